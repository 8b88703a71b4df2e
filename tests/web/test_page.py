"""The page in a real browser: what a visitor does, and that nothing jumps, fails or leaves this machine meanwhile."""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
from PIL import Image

import clairvit as cv
from clairvit.plotting.overlay import denormalised_photo, overlay, scale_of, to_numpy
from clairvit.web.state import AppState
from helpers.browser_tab import (
    animation_ended,
    browser,
    changes,
    checked,
    method,
    needs_a_browser,
    picture,
    settled,
    sync_api,
    visit,
)

__all__ = ["browser", "visit"]  # fixtures
pytestmark = needs_a_browser
SHIFTS = """() => new Promise((done) => { let sum = 0;
  new PerformanceObserver((list) => { for (const one of list.getEntries()) if (!one.hadRecentInput) sum += one.value; })
    .observe({ type: "layout-shift", buffered: true });
  setTimeout(() => done(sum), 300); })"""
SMALL_TARGETS = """() => [...document.querySelectorAll("button, select, summary, .button, .check, #methods label")]
  .filter((one) => one.offsetParent && one.getBoundingClientRect().height < 44).map((one) => one.outerHTML)"""
COLOURED = """() => { const c = document.getElementById("map-0");
  const d = c.getContext("2d").getImageData(0, 0, c.width, c.height).data;
  let n = 0;
  for (let i = 0; i < d.length; i += 4) n += Math.abs(d[i] - d[i + 2]) > 40;
  return n / (d.length / 4); }"""


def test_the_first_load_shows_the_demo_explained_and_nothing_jumps(visit: Callable[..., Any]) -> None:
    page = visit()
    sync_api.expect(page.locator("#caption-0")).to_contain_text("Bengal")
    assert page.locator("#classes li").count() == 5
    assert page.locator("#methods fieldset").count() >= 7
    checked(page)
    assert 0.01 < page.evaluate(COLOURED) < 0.5, "the photo is grey, so colour is the map, and it is no veil"
    assert page.evaluate(SHIFTS) < 0.05
    sync_api.expect(page.locator("#answer-says")).to_contain_text(re.compile(r"The model says Bengal \(\d+\s%\), then"))
    for name in ("#answer", "#photo", "#map-0", "#legend", "#classes"):
        box = page.locator(name).bounding_box()
        assert box["y"] + box["height"] <= 900, f"{name} is not on the first screen"


def scale_end(page: Any, end: str) -> float:
    return float(page.locator(end).get_attribute("data-value"))


@pytest.mark.parametrize(("name", "targets"), [("legrad", [11]), ("ixg", [11]), ("ixg", [11, 5])])
def test_the_page_draws_as_the_command_line_does(visit: Callable[..., Any], name: str, targets: list[int]) -> None:
    """Sequential, signed, and two on one scale: canvases against plotting/overlay.py, up to how a photo is enlarged."""
    page = visit(f"#method={name}" + "".join(f"&target={target}" for target in targets))
    explanation = cv.explain(cv.load("pets"), "demo", name, targets=targets)
    values = to_numpy(explanation.maps)
    scale = scale_of(values, explanation.signed)
    assert scale_end(page, "#high") == pytest.approx(scale.high, rel=1e-5)
    photo = Image.fromarray(
        np.round(denormalised_photo(explanation.pixels[0], explanation.preprocess) * 255).astype(np.uint8)
    )
    large = np.asarray(photo.resize((448, 448), Image.Resampling.BILINEAR)) / 255.0
    for k in range(len(targets)):
        expected = overlay(large, values[k], scale)
        with Image.open(io.BytesIO(base64.b64decode(picture(page, f"map-{k}").partition(",")[2]))) as drawn:
            on_page = np.asarray(drawn.convert("RGB")) / 255.0
        assert np.abs(on_page - expected).mean() < 0.01
        assert np.abs(on_page - expected)[expected.max(-1) - expected.min(-1) > 0.3].mean() < 0.02, (
            "where the map glows"
        )
    low, high = page.locator("#low").inner_text(), page.locator("#high").inner_text()
    about = "Bengal" if targets == [5] else "Egyptian Mau" if len(targets) == 1 else "the answer"
    words = (f"against {about}", f"for {about}") if explanation.signed else ("little", f"much evidence for {about}")
    assert (low, high) == words


def test_layers_heads_and_unsigned_maps_are_the_librarys(visit: Callable[..., Any]) -> None:
    """By the ends of the scale."""
    explanation = cv.explain(cv.load("pets"), "demo", "ixg", layers=True, by_head=True)
    assert explanation.layers is not None
    assert explanation.heads is not None
    shown = {
        "": to_numpy(explanation.maps),
        "&layer=4": to_numpy(explanation.layers[3]),
        "&layer=4&head=2": to_numpy(explanation.heads.maps[3, 2]),
        "&signed=0": to_numpy(explanation.maps).clip(min=0),
    }
    for link, values in shown.items():
        page = visit(f"#method=ixg{link}")
        scale = scale_of(values, bool((values < 0).any()))
        for end, expected in (("#low", scale.low), ("#high", scale.high)):
            assert scale_end(page, end) == pytest.approx(expected, rel=1e-5), link
        page.close()


def test_class_method_layer_and_head(visit: Callable[..., Any]) -> None:
    page = visit()
    changes(page, lambda: page.locator("#classes .name").nth(1).click())
    sync_api.expect(page.locator("#caption-0")).to_contain_text("Egyptian Mau")
    changes(page, lambda: method(page, "ixg"))
    page.locator("#display summary").click()
    assert page.locator("#signed").is_enabled()
    changes(page, lambda: page.locator("#signed").uncheck())
    settled(page)
    changes(page, lambda: page.locator("#layer").fill("4"))
    assert page.locator("#layer-text").inner_text() == "3 (0 to 11)"
    changes(page, lambda: page.locator("#head").select_option("2"))
    sync_api.expect(page.locator("#caption-0")).to_contain_text("layer 3, head 2")
    changes(page, lambda: page.locator("#opacity").fill("0.3"))
    changes(page, lambda: page.locator("#cmap").select_option("viridis"))
    link = urlsplit(page.url).fragment
    for part in ("method=ixg", "layer=4", "head=2", "opacity=0.3", "signed=0", "cmap=viridis", "target="):
        assert part in link
    settled(page)
    assert picture(visit(f"#{link}")) == picture(page), "the permalink shows another picture"


def test_two_targets_side_by_side(visit: Callable[..., Any]) -> None:
    page = visit()
    assert page.locator("#second-map").is_hidden()
    page.locator("#classes .second").nth(1).click()
    page.locator("#second-map").wait_for(state="visible")
    sync_api.expect(page.locator("#caption-1")).to_contain_text("Egyptian Mau")
    assert picture(page, "map-0") != picture(page, "map-1")
    page.locator("#any-class").select_option(label="Beagle")
    sync_api.expect(page.locator("#caption-0")).to_contain_text("Beagle")


def test_a_patch_by_pointer_and_by_keyboard(visit: Callable[..., Any]) -> None:
    """The tooltip is at the pointer and says rank, value and where the patch looks; it goes when the pointer leaves."""
    page = visit("#layer=1")  # where each patch attends elsewhere
    tooltip, words = page.locator("#tooltip"), page.locator("#patch-text")
    before = picture(page)
    box = page.locator("#map-0").bounding_box()
    x, y = box["x"] + box["width"] * 2.5 / 14, box["y"] + box["height"] * 4.5 / 14
    page.mouse.move(x, y)
    model = cv.load("pets")
    layers, attention = cv.explain(model, "demo", layers=True).layers, cv.trace(model, "demo").layers[0].A[0].mean(0)
    assert layers is not None
    scores = layers[0, 0].flatten()
    index = 4 * 14 + 2
    rank, most = int((scores > scores[index]).sum()) + 1, int(attention[1 + index, 1:].argmax())
    sync_api.expect(words).to_contain_text(f"Number {rank} of 196 parts for Bengal")
    sync_api.expect(tooltip).to_have_attribute("data-most", str(most))
    right, down = most % 14 - 2, most // 14 - 4
    for steps, word in ((right, "to the right"), (-right, "to the left"), (down, "down"), (-down, "up")):
        assert (f"{steps} {word}" in words.inner_text()) == (steps > 0)
    assert float(tooltip.get_attribute("data-value")) == pytest.approx(float(scores[index]), rel=1e-5)
    place = tooltip.bounding_box()
    assert abs(place["x"] - x) < 60, "it is where one looks"
    assert abs(place["y"] - y) < 60, "it is where one looks"
    page.mouse.move(5, 5)
    sync_api.expect(tooltip).to_be_hidden()
    assert picture(page) == before, "the square goes with the pointer"
    page.locator("#map-0").focus()
    page.keyboard.press("ArrowRight")
    sync_api.expect(tooltip).to_have_attribute("data-col", "7")
    shown = picture(page, "attention")
    page.keyboard.press("ArrowDown")
    sync_api.expect(tooltip).to_have_attribute("data-row", "8")
    sync_api.expect(tooltip).to_have_attribute("data-most", re.compile(r"\d+"))
    assert picture(page, "attention") != shown


def test_holding_shows_the_photo(visit: Callable[..., Any]) -> None:
    page = visit()
    before = picture(page)
    assert before != picture(page, "photo")
    page.locator("#hold").focus()
    page.keyboard.down("Space")
    assert picture(page) == picture(page, "photo")
    page.keyboard.up("Space")
    assert picture(page) == before


def grey(page: Any) -> float:
    """The part of the film that is painted over."""
    with Image.open(io.BytesIO(base64.b64decode(picture(page, "perturbed").partition(",")[2]))) as drawn:
        return float((np.asarray(drawn.convert("RGB")) == 128).all(-1).mean())


def test_the_film_plays_ends_on_the_telling_frame_and_can_be_scrubbed(visit: Callable[..., Any]) -> None:
    page = visit()
    page.locator("#play-deletion").click()
    sync_api.expect(page.locator("#curves")).to_have_attribute("data-film", "playing")  # at once
    animation_ended(page)
    page.locator("#chart .method").wait_for(state="attached")
    for drawn in (".band", ".random", ".method", ".dot", ".label", ".random-label"):
        assert page.locator(f"#chart {drawn}").count() == 1
    telling = int(page.locator("#step").input_value())
    values = [percents(page, k) for k in range(15)]
    half = (values[0] + values[-1]) / 2
    assert values[telling] <= half + 0.01 < values[telling - 1] + 0.02, "the probability has just halved"
    page.locator("#step").fill("14")
    assert grey(page) == 1.0, "all patches are gone"
    page.locator("#step").fill("0")
    assert grey(page) < 0.01
    page.locator("#step").fill("7")
    assert grey(page) == pytest.approx(0.5, abs=0.01)
    page.locator("#play-insertion").click()
    animation_ended(page)
    sync_api.expect(page.locator("#curve-text")).to_contain_text("parts shown")
    assert "shown" in page.locator("#perturbed").get_attribute("aria-label")
    page.locator("#step").fill("14")
    assert grey(page) < 0.01, "all patches are there"
    sync_api.expect(page.locator("#curve-areas")).to_contain_text(re.compile("Hiding .* smaller .* Showing .* larger"))
    edge = page.locator("#chart").bounding_box()
    for name in (".label", ".random-label"):
        box = page.locator(f"#chart {name}").bounding_box()
        assert box["y"] >= edge["y"], f"{name} is cut off"


def percents(page: Any, step: int) -> float:
    page.locator("#step").fill(str(step))
    text = page.locator("#curve-text").inner_text()
    match = re.search(r"Bengal [<>]?([\d.]+)\s%", text)
    assert match, text
    return float(match[1]) / 100


def test_the_answer_card_is_the_librarys_check(visit: Callable[..., Any]) -> None:
    page = visit("#method=genatt")
    checked(page)
    (check,) = cv.explain(cv.load("pets"), "demo", "genatt").check()
    assert check.sentence.replace(" %", "\u00a0%") in page.locator("#answer-text").inner_text()
    assert check.answer.sentence in page.locator("#answer-text").inner_text()
    assert page.locator("#badge").inner_text() == check.badge
    assert page.locator("#badge").get_attribute("data-style") == check.badge_style
    method(page, "random")
    settled(page, "random")
    checked(page)
    assert page.locator("#badge").get_attribute("data-style") != "supported"
    sync_api.expect(page.locator("#answer-says")).to_contain_text("a control: it knows nothing of the model")
    assert "correlation" not in page.locator("#answer-text").inner_text()
    page.locator("#badge").click()
    sync_api.expect(page.locator("#curves")).to_have_attribute("data-film", "playing")
    for name in ("#perturbed", "#chart", "#step"):  # the film was below the window
        sync_api.expect(page.locator(name)).to_be_in_viewport(ratio=0.99)


def test_all_methods_as_thumbnails_and_one_enlarged(visit: Callable[..., Any]) -> None:
    page = visit()
    assert page.locator("#thumbs button").count() == 0, "nobody asked for them"
    page.locator("#compare summary").click()
    page.locator("#thumbs button").first.wait_for()
    assert page.locator("#thumbs canvas").count() > 35
    score = page.locator('#thumbs button[data-method="decompx"] small')
    assert re.fullmatch(r"[−\d.]+", score.inner_text())
    assert score.inner_text() != "1.00"
    changes(page, lambda: page.locator('#thumbs button[data-method="decompx"]').click())
    sync_api.expect(page.locator('#thumbs button[data-method="decompx"]')).to_have_attribute("aria-pressed", "true")
    sync_api.expect(page.locator("#map-0")).to_be_in_viewport()
    sync_api.expect(score).to_have_text("1.00")  # the number is about the map above, which is another one now
    sync_api.expect(page.locator('#methods input[value="decompx"]')).to_be_in_viewport()


WRITTEN = """() => { window.written = [];
  const write = CanvasRenderingContext2D.prototype.fillText;
  CanvasRenderingContext2D.prototype.fillText = function (text, ...place) {
    window.written.push(text);
    write.call(this, text, ...place); }; }"""


def saved(page: Any, button: str) -> tuple[str, bytes]:
    with page.expect_download() as waiting:
        page.locator(f"#save-{button}").click()
    return waiting.value.suggested_filename, Path(waiting.value.path()).read_bytes()


def test_results_can_be_kept_without_computing_them_again(visit: Callable[..., Any], state: AppState) -> None:
    page = visit("#layer=3&method=legrad")
    checked(page)
    page.locator("#map-0").hover(position={"x": 60, "y": 60})  # what is saved has no square
    page.evaluate(WRITTEN)
    names = {}
    for button, suffix in (("png", "png"), ("json", "json"), ("npz", "npz"), ("report", "html")):
        name, names[button] = saved(page, button)
        assert name == f"clairvit-example-legrad.{suffix}"
    record = json.loads(names["json"])
    assert record["method"] == "legrad"
    assert record["names"] == ["example"]
    (test,) = record["check"]["checks"]
    assert (test["target"], test["badge_style"]) == ("Bengal", page.locator("#badge").get_attribute("data-style"))
    assert np.load(io.BytesIO(names["npz"]), allow_pickle=False)["maps"].shape == (1, 14, 14)
    with Image.open(io.BytesIO(names["png"])) as image:
        assert image.width > 1300, "photo and map, large enough to print"
    written = " | ".join(page.evaluate("() => window.written"))
    for part in (
        *(
            "The model says Bengal",
            page.locator("#badge").inner_text(),
            "the photo, as the model sees it",
            "much evidence for Bengal",
        ),
        *("LeGrad (legrad), layer 2", "model pets", "photo example"),
    ):
        assert part in written
    report = names["report"].decode()
    for part in ("The model says Bengal", page.locator("#badge").inner_text(), "layer 2", "LeGrad (legrad)"):
        assert part in report
    assert report.count("data:image/png") >= 4, "photo, map, legend, layers"
    assert report.count("<svg") == 2, "hiding and showing"
    assert "data:font/woff2" in report
    assert "://" not in report.replace("http://www.w3.org/2000/svg", ""), "it needs nothing from elsewhere"


@pytest.mark.parametrize("targets", [[5], [5, 11]])
def test_a_head_of_raw_attention_is_described_as_attention(visit: Callable[..., Any], targets: list[int]) -> None:
    """AttnLRP has no heads of its own: what is shown is attention, the same for every answer and evidence for none."""
    classes = "".join(f"&target={index}" for index in targets)
    page = visit(f"#method=attnlrp%2Bplus&layer=9&head=1{classes}")
    sync_api.expect(page.locator("#caption-0")).to_have_text("any answer · Raw attention, layer 8, head 1")
    assert page.locator("#second-map").is_hidden(), "both answers have the same map"
    assert (page.locator("#low").inner_text(), page.locator("#high").inner_text()) == ("looks here little", "much")
    sync_api.expect(page.locator("#answer-says")).to_contain_text("it is the same for every answer")
    page.locator("#map-0").hover(position={"x": 60, "y": 60})
    sync_api.expect(page.locator("#patch-text")).to_contain_text(re.compile(r"Number \d+ of 196 parts \(value"))
    sync_api.expect(page.locator("#patch-text")).to_contain_text("In layer 8 it looks most")
    checked(page)
    page.evaluate(WRITTEN)
    saved(page, "png")
    report = saved(page, "report")[1].decode()
    written = " | ".join(page.evaluate("() => window.written"))
    for text in (written, report):
        assert "looks here little" in text
        assert "Raw attention (raw-attention)" in text
        assert "AttnLRP, all layers as a whole: " in text, "what the test is of"
    assert "evidence for" not in written
    page.locator("#layer").fill("0")
    sync_api.expect(page.locator("#caption-0")).to_have_text(re.compile(r"Bengal \d+\s% · AttnLRP, all layers"))
    assert page.locator("#head").input_value() == "mean"
    assert "head=" not in page.url
    assert page.locator("#second-map").is_visible() is (len(targets) == 2)


def test_arrow_keys_pass_over_a_slow_method_and_enter_starts_it(visit: Callable[..., Any]) -> None:
    page, requested = visit(), []
    page.on("request", lambda request: requested.append(request.post_data or "") if "explain" in request.url else None)
    page.evaluate("() => { document.getElementById('all-methods').open = true; }")
    names = page.eval_on_selector_all("#methods input", "(inputs) => inputs.map((input) => input.value)")
    place = names.index("lime")
    page.evaluate(f"() => document.querySelectorAll('#methods input')[{place - 1}].focus()")
    page.keyboard.press("ArrowDown")
    sync_api.expect(page.locator("#status-text")).to_contain_text("Press Enter to start LIME")
    page.wait_for_timeout(1500)  # three times the delay after which a quick method is shown
    assert not any("lime" in body for body in requested)
    page.keyboard.press("Enter")
    sync_api.expect(page.locator("#status-text")).to_contain_text("LIME")
    page.wait_for_timeout(100)
    assert any("lime" in body for body in requested)
    page.keyboard.press("Escape")


def test_a_report_waits_for_the_test_and_prints_on_two_sheets(
    visit: Callable[..., Any], browser: Any, tmp_path: Path
) -> None:
    """It is saved before the test is there; the film on the page is not started for it."""
    page, waiting_checks = visit(shows_a_map=False), []
    page.route("**/api/check", lambda route: waiting_checks.append(route))
    page.reload()
    settled(page, "attnlrp+plus")
    assert page.locator("#badge").is_disabled()
    with page.expect_download() as waiting:
        page.locator("#save-report").click()
        sync_api.expect(page.locator("#status-text")).to_contain_text("Preparing the report")
        for route in waiting_checks:
            route.continue_()
    file = tmp_path / "report.html"
    waiting.value.save_as(file)
    assert page.locator("#curves").get_attribute("data-film") == "none"
    report = browser.new_page()
    refusals: list[str] = []
    report.on("console", lambda message: refusals.append(message.text))
    report.goto(file.as_uri())
    assert refusals == [], "its policy allows all that is in it"
    assert report.evaluate("[...document.images].every((image) => image.naturalWidth > 0)")
    hostile = tmp_path / "hostile.html"
    hostile.write_text(file.read_text(encoding="utf-8") + "<script>document.title = 'run'</script>", encoding="utf-8")
    report.goto(hostile.as_uri())
    assert report.title() != "run"
    report.goto(file.as_uri())
    badge = report.locator(".badge")
    sync_api.expect(badge).to_have_text(page.locator("#badge").inner_text())
    assert badge.get_attribute("data-style") == page.locator("#badge").get_attribute("data-style")
    assert not PROGRAMMERS_WORDS.search(report.locator("body").inner_text())
    sheets = re.findall(rb"/Type\s*/Page\b", report.pdf(format="A4"))
    assert 1 <= len(sheets) <= 2
    report.close()


def test_a_saved_picture_has_nothing_of_the_pointer(visit: Callable[..., Any]) -> None:
    """The square around the last patch on the way to the button was in every PNG."""
    page = visit()
    checked(page)
    _, before = saved(page, "png")
    page.locator("#map-0").hover(position={"x": 100, "y": 100})
    sync_api.expect(page.locator("#tooltip")).to_be_visible()
    with page.expect_download() as waiting:
        page.evaluate("() => document.getElementById('save-png').click()")  # the pointer is still on the map
    assert Path(waiting.value.path()).read_bytes() == before


def test_phone_width_and_dark_mode(visit: Callable[..., Any]) -> None:
    ground = "() => getComputedStyle(document.body).backgroundColor"
    phone = visit(viewport={"width": 360, "height": 740}, is_mobile=True, has_touch=True)
    assert phone.evaluate("() => document.documentElement.scrollWidth") <= 360
    tops = [phone.locator(name).bounding_box()["y"] for name in ("#answer", "#map-0", "#drop", "#classes", "#layer")]
    assert tops == sorted(tops), "answer, map, photo and classes come before the knobs"
    assert tops[1] < 740, "the map is on the first screen"
    small = phone.evaluate(SMALL_TARGETS)
    assert small == [], "44 pixels are enough for a finger"
    dark = visit(color_scheme="dark")
    assert dark.evaluate(ground) != phone.evaluate(ground)


BORDERS = """() => [...document.querySelectorAll("button, select, input[type=search], .button")]
  .filter((one) => one.offsetParent && !one.disabled).map((one) => {
    const parse = (colour) => colour.match(/[\\d.]+/g).map(Number);
    const light = (colour) => parse(colour).slice(0, 3).map((c) => c / 255)
      .map((c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
      .reduce((sum, c, k) => sum + c * [0.2126, 0.7152, 0.0722][k], 0);
    let behind = one.parentElement;
    while (parse(getComputedStyle(behind).backgroundColor)[3] === 0) behind = behind.parentElement;
    const [a, b] = [getComputedStyle(one).borderTopColor, getComputedStyle(behind).backgroundColor].map(light);
    return [one.id || one.className, (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05)]; })"""
OUTLINES = """() => ["#classes .name[aria-pressed=true]", "#methods label:has(:checked)"]
  .map((name) => getComputedStyle(document.querySelector(name)).outlineStyle)"""


def test_borders_of_controls_and_forced_colours(visit: Callable[..., Any]) -> None:
    """Controls are seen by their borders, at 3 to 1; what is selected is seen where colours are the visitor's own."""
    for scheme in ("light", "dark"):
        page = visit(color_scheme=scheme)
        checked(page)
        contrasts = page.evaluate(BORDERS)
        assert len(contrasts) > 15
        assert [name for name, contrast in contrasts if contrast < 3] == [], scheme
    assert page.evaluate(OUTLINES) == ["none", "none"]
    page.emulate_media(forced_colors="active")
    assert page.evaluate(OUTLINES) == ["solid", "solid"]


def test_without_motion_the_film_is_its_telling_frame(visit: Callable[..., Any]) -> None:
    page = visit(reduced_motion="reduce")
    page.evaluate(
        """() => { window.states = [];
        new MutationObserver(() => window.states.push([document.getElementById("curves").dataset.film, step.value]))
          .observe(document.getElementById("curves"), { attributes: true }); }"""
    )
    page.locator("#play-deletion").click()
    animation_ended(page)
    assert 0 < int(page.locator("#step").input_value()) < 14, "nothing is to be seen on the last frame"
    assert {value for _, value in page.evaluate("() => window.states")} <= {page.locator("#step").input_value(), "14"}


def test_every_control_has_a_name(visit: Callable[..., Any]) -> None:
    page = visit()
    nameless = page.evaluate(
        """() => [...document.querySelectorAll("button, input, select, canvas[tabindex], svg[role]")].filter((one) =>
        !(one.textContent.trim() && one.tagName !== "SELECT") && !one.getAttribute("aria-label") && !one.labels?.length)
        .map((one) => one.outerHTML)"""
    )
    assert nameless == []


PROGRAMMERS_WORDS = re.compile(r"\bcv\.|(?<!\w)--\w|`|Failed to fetch|\bbody\.|\bfusion\b|undefined|\bNaN\b|\[object")
UNBROKEN = """(names) => { const wide = [];
  for (const parent of document.querySelectorAll(names)) {
    const walker = document.createTreeWalker(parent, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) for (const word of walker.currentNode.data.matchAll(/\\S+/g)) {
      const range = document.createRange();
      range.setStart(walker.currentNode, word.index);
      range.setEnd(walker.currentNode, word.index + word[0].length);
      const lines = new Set([...range.getClientRects()].map((box) => Math.round(box.top)));
      if (lines.size > 1) wide.push(word[0]);
    } }
  return wide; }"""


def test_the_page_has_no_programmers_words(visit: Callable[..., Any]) -> None:
    """Flags and options of the library were shown as notes, such as `fusion` for a head of the default method."""
    page = visit("#layer=3&head=1")
    sync_api.expect(page.locator("#notes")).to_contain_text("has no heads of its own")
    page.evaluate("() => { for (const one of document.querySelectorAll('details')) one.open = true; }")
    page.locator("#thumbs button").first.wait_for()
    page.locator("#help-open").click()
    for name in ("attnlrp+plus", "focusvit", "fullgrad", "vanilla", "random"):
        page.evaluate("(name) => document.querySelector(`#methods input[value='${name}']`).click()", name)
        settled(page, name)
        checked(page)
        match = PROGRAMMERS_WORDS.search(page.locator("body").inner_text())
        assert match is None, f"{name}: {match}"
    words = page.evaluate("async () => { const { duration } = await import('/texts.js'); return duration(1292); }")
    assert words == "about 22 min"


def test_the_columns_end_together_and_no_class_name_is_broken(visit: Callable[..., Any]) -> None:
    page = visit(viewport={"width": 1440, "height": 900})
    checked(page)
    ends = [
        box["y"] + box["height"]
        for box in (page.locator(f"#{name}-panel").bounding_box() for name in ("keep", "adjust", "method"))
    ]
    assert max(ends) - min(ends) < 2
    page.evaluate(
        """(names) => names.forEach((name, k) => {
        const row = document.createElement("tr");
        row.innerHTML = `<td></td><td><span>${name} 99.9 %</span></td><td><span>No better than chance</span></td>`;
        document.querySelector("#photos tbody").append(row);
        document.querySelector("#photos").hidden = false;
        document.querySelectorAll("#classes .name span:first-child")[k % 5].textContent += ` ${name}`; })""",
        list(cv.load("pets").labels or ()),
    )
    assert page.locator("#photos tbody tr").count() == 37
    assert page.evaluate(UNBROKEN, "#photos td, #classes .name") == []
    assert page.evaluate("() => document.querySelector('#photos-list').clientHeight") <= 400


QUERIES = {
    "grad-cam": {"gradcam", "gradcam-pp"},
    "gradcam": {"gradcam", "gradcam-pp"},
    "integrated gradients": {"integrated-gradients"},
    "attention rollout": {"rollout"},
    "SHAP": {"kernelshap"},
    "gradients integrated": {"integrated-gradients"},
    "integratedgradients": {"integrated-gradients"},
}


def test_methods_are_found_by_the_names_people_use(visit: Callable[..., Any]) -> None:
    page = visit()
    for query, names in QUERIES.items():
        page.locator("#filter").fill(query)
        visible = set(page.locator("#methods label:visible input").evaluate_all("(all) => all.map((one) => one.value)"))
        assert names <= visible, query
        assert len(visible) < 16, query
    page.locator("#filter").fill("qqq")
    sync_api.expect(page.locator("#nothing-found")).to_have_text("No method matches “qqq”.")


def test_pointing_at_a_part_colours_the_parts_that_are_alike(visit: Callable[..., Any]) -> None:
    page = visit()
    page.locator("#features summary").click()
    canvas = page.locator("#alike-map")
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 6.5 / 14, box["y"] + box["height"] * 5.5 / 14)
    sync_api.expect(canvas).to_have_attribute("data-part", str(5 * 14 + 6))
    cosines = cv.features("pets", "demo", layer=11).similarity(5, 6)[0].flatten()
    cosines[5 * 14 + 6] = -1
    assert int(canvas.get_attribute("data-best")) == int(cosines.argmax())
    assert abs(float(canvas.get_attribute("data-cosine")) - float(cosines.max())) < 1e-4  # float32, another batch
    sync_api.expect(page.locator("#alike-text")).to_contain_text("of 195 other parts are above 0.5")
    canvas.press("ArrowRight")
    sync_api.expect(canvas).to_have_attribute("data-part", str(5 * 14 + 7))
    page.locator("#features-layer").fill("1")  # another layer, the same part
    sync_api.expect(page.locator("#features-layer-text")).to_have_text("0 (0 to 11)")
    sync_api.expect(canvas).to_have_attribute("data-part", str(5 * 14 + 7))
