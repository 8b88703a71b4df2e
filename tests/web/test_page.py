"""The page in a real browser: what a visitor does, and that nothing jumps, fails or leaves this machine meanwhile."""

from __future__ import annotations

import base64
import io
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
from PIL import Image

import clairvit as cv
from clairvit.models.images import read_image
from clairvit.show.colour import scale_of
from clairvit.show.overlay import numbers, overlay, photo_of
from clairvit.web.desk import Desk

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium"),
    pytest.mark.filterwarnings("default::clairvit.errors.ClairWarning"),
]
WAIT = 60_000  # milliseconds, for a machine that is busy with other things
SHIFTS = """() => new Promise((done) => { let sum = 0;
  new PerformanceObserver((list) => { for (const one of list.getEntries()) if (!one.hadRecentInput) sum += one.value; })
    .observe({ type: "layout-shift", buffered: true });
  setTimeout(() => done(sum), 300); })"""
COLOURED = """() => { const c = document.getElementById("map-0");
  const d = c.getContext("2d").getImageData(0, 0, c.width, c.height).data;
  let n = 0;
  for (let i = 0; i < d.length; i += 4) n += Math.abs(d[i] - d[i + 2]) > 40;
  return n / (d.length / 4); }"""
HANDED_OVER = """async (way) => {
  const canvas = Object.assign(document.createElement("canvas"), { width: 90, height: 60 });
  const pen = canvas.getContext("2d");
  pen.fillStyle = "orange";
  pen.fillRect(20, 10, 40, 40);
  const blob = await new Promise((done) => canvas.toBlob(done)), data = new DataTransfer();
  data.items.add(new File([blob], "a.png", { type: "image/png" }));
  document.body.dispatchEvent(way === "drop" ? new DragEvent("drop", { bubbles: true, dataTransfer: data })
    : new ClipboardEvent("paste", { bubbles: true, clipboardData: data })); }"""
API = re.compile(r"/api/(models|methods|explain|trace/\d+|curve)$")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as play:
        made = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield made
        made.close()


@pytest.fixture
def visit(browser: Any, address: str) -> Iterator[Callable[..., Any]]:
    """Opens a tab; in the end no tab may have had an error, nor asked another server for anything."""
    tabs, troubles = [], []

    def opened(hash_: str = "", **options: Any) -> Any:
        page = browser.new_page(**{"viewport": {"width": 1280, "height": 900}, **options})
        page.set_default_timeout(WAIT)
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("console", lambda said: troubles.append(said.text) if said.type in ("error", "warning") else None)
        page.on("request", lambda asked: seen(asked.url))
        page.goto(f"{address}/{hash_}")
        tabs.append(page)
        wait_for_map(page)
        return page

    def seen(url: str) -> None:
        if url.startswith("blob:"):
            return
        parts = urlsplit(url)
        if f"{parts.scheme}://{parts.netloc}" != address:
            troubles.append(f"asked another server: {url}")
        if parts.path.startswith("/api/") and not API.search(parts.path):
            troubles.append(f"an address of its own: {url}")

    yield opened
    for page in tabs:
        page.close()
    expected = [one for one in troubles if "Failed to load resource" in one]  # a refusal that a test provokes
    assert [one for one in troubles if one not in expected] == []


def wait_for_map(page: Any, words: str = " %") -> None:
    sync_api.expect(page.locator("#caption-0")).to_contain_text(words, timeout=WAIT)


def settled(page: Any) -> None:
    sync_api.expect(page.locator("#status-text")).to_contain_text(re.compile(r"forwards?, .* s$"), timeout=WAIT)


def picture(page: Any, name: str = "map-0") -> str:
    found: str = page.evaluate("(name) => document.getElementById(name).toDataURL()", name)
    return found


def changes(page: Any, act: Callable[[], object], name: str = "map-0") -> None:
    """The canvas is another one soon after."""
    before, end = picture(page, name), time.monotonic() + WAIT / 1000
    act()
    while picture(page, name) == before:
        assert time.monotonic() < end, "nothing changed"
        time.sleep(0.05)


def method(page: Any, name: str) -> None:
    page.locator(f'#methods input[value="{name}"]').check()


def test_the_first_load_shows_the_demo_explained_and_nothing_jumps(visit: Callable[..., Any]) -> None:
    page = visit()
    sync_api.expect(page.locator("#caption-0")).to_contain_text("Egyptian Mau")
    assert page.locator("#classes li").count() == 5
    assert page.locator("#methods fieldset").count() >= 7
    colours = page.evaluate(COLOURED)
    assert colours > 0.05, "the photo is grey, so colour is the map"
    assert page.evaluate(SHIFTS) < 0.05


def test_the_token_is_taken_out_of_the_address_or_asked_for(browser: Any, served_with: Any) -> None:
    with served_with("a-secret-token") as address:
        page = browser.new_page()
        heard = []
        page.on("request", lambda asked: heard.append(asked.url))
        page.goto(f"{address}/#method=rollout&token=a-secret-token")
        wait_for_map(page)
        assert "secret" not in page.url + "".join(heard)
        assert "method=rollout" in page.url
        asked = []
        other = browser.new_page()
        other.on(
            "dialog", lambda one: (asked.append(one.message), one.accept(["wrong", "a-secret-token"][len(asked) - 1]))
        )
        other.goto(address)
        wait_for_map(other)
        assert len(asked) == 2
        assert "asks for a token" in asked[0]
        page.close()
        other.close()


@pytest.mark.parametrize("name", ["legrad", "ixg"])
def test_the_page_draws_as_the_command_line_does(visit: Callable[..., Any], name: str) -> None:
    """Sequential and signed: the canvas against show/overlay.py, up to how a photo is enlarged."""
    page = visit(f"#method={name}")
    made = cv.explain(cv.load("pets"), "demo", name)
    values = numbers(made.maps[0])
    photo = Image.fromarray(np.round(photo_of(made.pixels[0], made.preprocess) * 255).astype(np.uint8))
    large = np.asarray(photo.resize((448, 448), Image.Resampling.BILINEAR)) / 255.0
    wanted = overlay(large, values, scale_of(values, made.signed))
    with Image.open(io.BytesIO(base64.b64decode(picture(page).partition(",")[2]))) as drawn:
        found = np.asarray(drawn.convert("RGB")) / 255.0
    assert np.abs(found - wanted).mean() < 0.01
    assert np.abs(found - wanted)[wanted.max(-1) - wanted.min(-1) > 0.3].mean() < 0.02  # where the map glows


def test_class_method_layer_and_head(visit: Callable[..., Any]) -> None:
    page = visit()
    changes(page, lambda: page.locator("#classes .name").nth(1).click())
    sync_api.expect(page.locator("#caption-0")).to_contain_text("Bengal")
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
    assert page.locator("#beside").is_hidden()
    page.locator("#classes .also").nth(1).click()
    page.locator("#beside").wait_for(state="visible")
    sync_api.expect(page.locator("#caption-1")).to_contain_text("Bengal")
    assert picture(page, "map-0") != picture(page, "map-1")
    page.locator("#any-class").select_option(label="Beagle")
    sync_api.expect(page.locator("#caption-0")).to_contain_text("Beagle")


def test_a_patch_by_pointer_and_by_keyboard(visit: Callable[..., Any]) -> None:
    page = visit()
    words = page.locator("#patch-text")
    box = page.locator("#map-0").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 2.5 / 14, box["y"] + box["height"] * 4.5 / 14)
    sync_api.expect(words).to_contain_text(re.compile(r"Row 5, column 3: score .* place \d+ of 196\. In layer 11"))
    before = picture(page, "attends")
    page.locator("#map-0").focus()
    page.keyboard.press("ArrowRight")
    sync_api.expect(words).to_contain_text(re.compile(r"Row 5, column 4: .* look most at row"))
    assert picture(page, "attends") != before


def grey(page: Any) -> float:
    """The part of the film that is painted over."""
    with Image.open(io.BytesIO(base64.b64decode(picture(page, "film").partition(",")[2]))) as drawn:
        return float((np.asarray(drawn.convert("RGB")) == 128).all(-1).mean())


def test_deletion_plays_and_can_be_stepped_through(visit: Callable[..., Any]) -> None:
    page = visit()
    page.locator("#play-deletion").click()
    page.locator("#chart .method").wait_for(state="attached")
    sync_api.expect(page.locator("#curve-text")).to_contain_text("gone: 196 of 196", timeout=WAIT)
    assert page.locator("#chart .band").count() == 1
    assert grey(page) == 1.0, "all patches are gone"
    page.locator("#step").fill("0")
    assert grey(page) < 0.01
    page.locator("#step").fill("7")
    assert grey(page) == pytest.approx(0.5, abs=0.01)
    changes(page, lambda: page.locator("#step").fill("3"), "film")
    page.locator("#play-insertion").click()
    sync_api.expect(page.locator("#curve-text")).to_contain_text("shown: 196 of 196", timeout=WAIT)


def test_a_bad_file_is_refused_in_words_and_the_map_stays(visit: Callable[..., Any], tmp_path: Path) -> None:
    page = visit()
    before = picture(page)
    page.set_input_files("#file", {"name": "cat.jpg", "mimeType": "image/jpeg", "buffer": b"<svg onload=alert(1)>"})
    sync_api.expect(page.locator("#status.bad #status-text")).to_contain_text("nothing else")
    assert picture(page) == before
    buffer = io.BytesIO()
    read_image("demo").transpose(Image.Transpose.FLIP_LEFT_RIGHT).save(buffer, "JPEG")
    file = {"name": "cat.jpg", "mimeType": "image/jpeg", "buffer": buffer.getvalue()}
    changes(page, lambda: page.set_input_files("#file", file))
    sync_api.expect(page.locator("#status.bad")).to_have_count(0)
    settled(page)
    assert re.search(r"photo=[0-9a-f]{32}", page.url)


@pytest.mark.parametrize("way", ["drop", "paste"])
def test_photos_can_be_dropped_and_pasted(visit: Callable[..., Any], way: str) -> None:
    page = visit()
    changes(page, lambda: page.evaluate(HANDED_OVER, way))
    settled(page)
    assert re.search(r"photo=[0-9a-f]{32}", page.url)


def test_a_photo_that_the_server_forgot_is_sent_again(visit: Callable[..., Any], desk: Desk) -> None:
    page = visit()
    changes(page, lambda: page.evaluate(HANDED_OVER, "drop"))
    settled(page)
    desk.photos._kept.clear()
    changes(page, lambda: method(page, "ixg"))
    sync_api.expect(page.locator("#status-text")).to_contain_text("ixg: 1 forward", timeout=WAIT)


def test_slow_work_shows_progress_and_can_be_cancelled(visit: Callable[..., Any], desk: Desk) -> None:
    page = visit()
    method(page, "rise")
    sync_api.expect(page.locator("#status-text")).to_contain_text(re.compile(r"rise: .*\d %"), timeout=WAIT)
    page.locator("#cancel").click()
    sync_api.expect(page.locator("#status-text")).to_have_text("Cancelled.")
    end = time.monotonic() + 20
    while desk.lanes["slow"].inside:
        assert time.monotonic() < end, "the work went on"
        time.sleep(0.05)
    assert page.locator('#methods input[value="legrad"]').is_checked(), "the list says what is shown"


def test_all_methods_as_thumbnails_and_one_enlarged(visit: Callable[..., Any]) -> None:
    page = visit()
    page.locator("#all").scroll_into_view_if_needed()
    page.locator("#thumbs button").first.wait_for()
    assert page.locator("#thumbs canvas").count() > 35
    changes(page, lambda: page.locator('#thumbs button[data-method="decompx"]').click())
    sync_api.expect(page.locator('#thumbs button[data-method="decompx"]')).to_have_attribute("aria-pressed", "true")


def test_two_tabs_at_once_do_not_mix(visit: Callable[..., Any]) -> None:
    one, two = visit(), visit("#method=rollout")
    method(one, "gradcam")
    method(two, "attnlrp")
    for page, name in ((one, "gradcam"), (two, "attnlrp")):
        sync_api.expect(page.locator("#status-text")).to_contain_text(f"{name}: 1 forward", timeout=WAIT)
    assert picture(one) != picture(two)


@pytest.mark.parametrize(("button", "suffix"), [("png", ".png"), ("json", ".json"), ("npz", ".npz")])
def test_results_can_be_kept(visit: Callable[..., Any], button: str, suffix: str) -> None:
    page = visit()
    with page.expect_download() as waiting:
        page.locator(f"#save-{button}").click()
    file = Path(waiting.value.path())
    assert waiting.value.suggested_filename == f"clairvit-legrad{suffix}"
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
