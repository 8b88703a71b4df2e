"""The page in a real browser: what a visitor does, and that nothing jumps, fails or leaves this machine meanwhile."""

from __future__ import annotations

import base64
import io
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
from helpers.browser_tab import WAIT, browser, changes, method, needs_a_browser, picture, settled, sync_api, visit

__all__ = ["browser", "visit"]  # fixtures
pytestmark = needs_a_browser
SHIFTS = """() => new Promise((done) => { let sum = 0;
  new PerformanceObserver((list) => { for (const one of list.getEntries()) if (!one.hadRecentInput) sum += one.value; })
    .observe({ type: "layout-shift", buffered: true });
  setTimeout(() => done(sum), 300); })"""
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
    colours = page.evaluate(COLOURED)
    assert colours > 0.05, "the photo is grey, so colour is the map"
    assert page.evaluate(SHIFTS) < 0.05


@pytest.mark.parametrize(("name", "targets"), [("legrad", [11]), ("ixg", [11]), ("ixg", [11, 5])])
def test_the_page_draws_as_the_command_line_does(visit: Callable[..., Any], name: str, targets: list[int]) -> None:
    """Sequential, signed, and two on one scale: canvases against plotting/overlay.py, up to how a photo is enlarged."""
    page = visit(f"#method={name}" + "".join(f"&target={one}" for one in targets))
    made = cv.explain(cv.load("pets"), "demo", name, targets=targets)
    values = to_numpy(made.maps)
    scale = scale_of(values, made.signed)
    assert float(page.locator("#high").inner_text().lstrip("≥ ")) == pytest.approx(scale.high, rel=5e-3)
    photo = Image.fromarray(np.round(denormalised_photo(made.pixels[0], made.preprocess) * 255).astype(np.uint8))
    large = np.asarray(photo.resize((448, 448), Image.Resampling.BILINEAR)) / 255.0
    for k in range(len(targets)):
        wanted = overlay(large, values[k], scale)
        with Image.open(io.BytesIO(base64.b64decode(picture(page, f"map-{k}").partition(",")[2]))) as drawn:
            found = np.asarray(drawn.convert("RGB")) / 255.0
        assert np.abs(found - wanted).mean() < 0.01
        assert np.abs(found - wanted)[wanted.max(-1) - wanted.min(-1) > 0.3].mean() < 0.02  # where the map glows


def test_layers_heads_and_unsigned_maps_are_the_librarys(visit: Callable[..., Any]) -> None:
    """By the ends of the scale."""
    made = cv.explain(cv.load("pets"), "demo", "ixg", layers=True, by_head=True)
    assert made.layers is not None
    assert made.heads is not None
    shown = {
        "": to_numpy(made.maps),
        "&layer=4": to_numpy(made.layers[3]),
        "&layer=4&head=2": to_numpy(made.heads.maps[3, 2]),
        "&signed=0": to_numpy(made.maps).clip(min=0),
    }
    for link, values in shown.items():
        page = visit(f"#method=ixg{link}")
        scale = scale_of(values, bool((values < 0).any()))
        for end, wanted in (("#low", scale.low), ("#high", scale.high)):
            assert float(page.locator(end).inner_text().lstrip("≤≥ ")) == pytest.approx(wanted, rel=5e-3), link
        page.close()


def test_class_method_layer_and_head(visit: Callable[..., Any]) -> None:
    page = visit()
    changes(page, lambda: page.locator("#classes .name").nth(1).click())
    sync_api.expect(page.locator("#caption-0")).to_contain_text("Egyptian Mau")
    changes(page, lambda: method(page, "ixg"))
    assert page.locator("#signed").is_enabled()
    changes(page, lambda: page.locator("#signed").uncheck())
    settled(page)
    changes(page, lambda: page.locator("#layer").fill("4"))
    assert page.locator("#layer-text").inner_text() == "3"
    changes(page, lambda: page.locator("#head").select_option("2"))
    sync_api.expect(page.locator("#notes")).to_contain_text("Head 2 of layer 3")
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
    page = visit("#layer=1")  # where each patch attends elsewhere
    words = page.locator("#patch-text")
    box = page.locator("#map-0").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 2.5 / 14, box["y"] + box["height"] * 4.5 / 14)
    model = cv.load("pets")
    said, attends = cv.explain(model, "demo", layers=True).layers, cv.trace(model, "demo").layers[0].A[0].mean(0)
    assert said is not None
    scores = said[0, 0].flatten()
    index = 4 * 14 + 2
    place, most = int((scores > scores[index]).sum()) + 1, int(attends[1 + index, 1:].argmax())
    sync_api.expect(words).to_contain_text(re.compile(rf"Row 5, column 3: score .* rank {place} of 196\."))
    sync_api.expect(words).to_contain_text(
        f"In layer 0, its heads attend most to row {most // 14 + 1}, column {most % 14 + 1};"
    )
    score = float(words.inner_text().split("score ")[1].split()[0])
    assert score == pytest.approx(float(scores[index]), rel=5e-3)
    before = picture(page, "attention")
    page.locator("#map-0").focus()
    page.keyboard.press("ArrowRight")
    sync_api.expect(words).to_contain_text(
        re.compile(r"Row 5, column 4: .* attend most to row \d+, column \d+; \d+ % of the attention")
    )
    assert picture(page, "attention") != before


def grey(page: Any) -> float:
    """The part of the film that is painted over."""
    with Image.open(io.BytesIO(base64.b64decode(picture(page, "perturbed").partition(",")[2]))) as drawn:
        return float((np.asarray(drawn.convert("RGB")) == 128).all(-1).mean())


def test_deletion_plays_and_can_be_stepped_through(visit: Callable[..., Any]) -> None:
    page = visit()
    page.locator("#play-deletion").click()
    page.locator("#chart .method").wait_for(state="attached")
    sync_api.expect(page.locator("#curve-text")).to_contain_text("removed: 196 of 196", timeout=WAIT)
    for drawn in (".band", ".random", ".method", ".dot"):
        assert page.locator(f"#chart {drawn}").count() == 1
    assert grey(page) == 1.0, "all patches are gone"
    page.locator("#step").fill("0")
    assert grey(page) < 0.01
    page.locator("#step").fill("7")
    assert grey(page) == pytest.approx(0.5, abs=0.01)
    changes(page, lambda: page.locator("#step").fill("3"), "perturbed")
    page.locator("#play-insertion").click()
    sync_api.expect(page.locator("#curve-text")).to_contain_text("inserted: 196 of 196", timeout=WAIT)
    assert grey(page) < 0.01, "all patches are there"
    page.locator("#step").fill("0")
    assert grey(page) == 1.0


def test_check_is_shown_under_the_map_until_the_map_changes(visit: Callable[..., Any]) -> None:
    page = visit()
    assert page.locator("#check").is_hidden()
    page.locator("#check-map").click()
    sync_api.expect(page.locator("#check-verdict")).to_have_text("supported", timeout=WAIT)
    sync_api.expect(page.locator("#check-text")).to_contain_text("Without the brightest")
    method(page, "ixg")
    sync_api.expect(page.locator("#check")).to_be_hidden(timeout=WAIT)


def test_all_methods_as_thumbnails_and_one_enlarged(visit: Callable[..., Any]) -> None:
    page = visit()
    page.locator("#all").scroll_into_view_if_needed()
    page.locator("#thumbs button").first.wait_for()
    assert page.locator("#thumbs canvas").count() > 35
    changes(page, lambda: page.locator('#thumbs button[data-method="decompx"]').click())
    sync_api.expect(page.locator('#thumbs button[data-method="decompx"]')).to_have_attribute("aria-pressed", "true")


@pytest.mark.parametrize(("button", "suffix"), [("png", ".png"), ("json", ".json"), ("npz", ".npz")])
def test_results_can_be_kept(visit: Callable[..., Any], button: str, suffix: str) -> None:
    page = visit()
    with page.expect_download() as waiting:
        page.locator(f"#save-{button}").click()
    file = Path(waiting.value.path())
    assert waiting.value.suggested_filename == f"clairvit-attnlrp-plus{suffix}"
    assert file.stat().st_size > 1000


def test_phone_width_and_dark_mode(visit: Callable[..., Any]) -> None:
    ground = "() => getComputedStyle(document.body).backgroundColor"
    phone = visit(viewport={"width": 360, "height": 740}, is_mobile=True, has_touch=True)
    assert phone.evaluate("() => document.documentElement.scrollWidth") <= 360
    assert phone.locator("#map-0").bounding_box()["y"] < 200, "the map comes first"
    dark = visit(color_scheme="dark")
    assert dark.evaluate(ground) != phone.evaluate(ground)


def test_every_control_has_a_name(visit: Callable[..., Any]) -> None:
    page = visit()
    nameless = page.evaluate(
        """() => [...document.querySelectorAll("button, input, select, canvas[tabindex], svg[role]")].filter((one) =>
        !(one.textContent.trim() && one.tagName !== "SELECT") && !one.getAttribute("aria-label") && !one.labels?.length)
        .map((one) => one.outerHTML)"""
    )
    assert nameless == []
