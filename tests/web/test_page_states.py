"""The page in a real browser: links, failures, and what happens when many things happen at once."""

from __future__ import annotations

import io
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
from PIL import Image

import clairvit as cv
from clairvit.models.image_files import read_image
from clairvit.web.state import AppState, create_state
from helpers.browser_tab import (
    WAIT,
    browser,
    changes,
    method,
    needs_a_browser,
    picture,
    settled,
    sync_api,
    visit,
    wait_for_map,
)
from helpers.tiny_models import cnn, strange, wrapped
from helpers.web_server import serving

__all__ = ["browser", "visit"]  # fixtures
pytestmark = needs_a_browser
HANDED_OVER = """async (way) => {
  const canvas = Object.assign(document.createElement("canvas"), { width: 90, height: 60 });
  const pen = canvas.getContext("2d");
  pen.fillStyle = "orange";
  pen.fillRect(20, 10, 40, 40);
  const blob = await new Promise((done) => canvas.toBlob(done)), data = new DataTransfer();
  data.items.add(new File([blob], "a.png", { type: "image/png" }));
  document.body.dispatchEvent(way === "drop" ? new DragEvent("drop", { bubbles: true, dataTransfer: data })
    : new ClipboardEvent("paste", { bubbles: true, clipboardData: data })); }"""


def test_the_token_is_taken_out_of_the_address_or_asked_for(browser: Any, state: AppState) -> None:
    with serving(state, "a-secret-token") as address:
        page = browser.new_page()
        heard = []
        page.on("request", lambda asked: heard.append(asked.url))
        page.goto(f"{address}/#method=rollout&token=a-secret-token")
        wait_for_map(page)
        assert "secret" not in page.url + "".join(heard)
        assert "method=rollout" in page.url
        other, asked, answers = browser.new_page(), [], ["wrong", "a-secret-token"]

        def answer(dialog: Any) -> None:
            asked.append(dialog.message)
            dialog.accept(answers.pop(0))

        other.on("dialog", answer)
        other.goto(address)
        wait_for_map(other)
        assert answers == []
        assert "needs a token" in asked[0]
        page.close()
        other.close()


def test_a_bad_file_is_refused_in_words_and_the_map_stays(visit: Callable[..., Any]) -> None:
    page = visit()
    before = picture(page)
    page.set_input_files("#file", {"name": "cat.jpg", "mimeType": "image/jpeg", "buffer": b"<svg onload=alert(1)>"})
    sync_api.expect(page.locator("#status.error #status-text")).to_contain_text("nothing else")
    assert picture(page) == before
    buffer = io.BytesIO()
    read_image("demo").transpose(Image.Transpose.FLIP_LEFT_RIGHT).save(buffer, "JPEG")
    file = {"name": "cat.jpg", "mimeType": "image/jpeg", "buffer": buffer.getvalue()}
    changes(page, lambda: page.set_input_files("#file", file))
    sync_api.expect(page.locator("#status.error")).to_have_count(0)
    settled(page)
    assert re.search(r"photo=[0-9a-f]{32}", page.url)


@pytest.mark.parametrize("way", ["drop", "paste"])
def test_photos_can_be_dropped_and_pasted(visit: Callable[..., Any], way: str) -> None:
    page = visit()
    changes(page, lambda: page.evaluate(HANDED_OVER, way))
    settled(page)
    assert re.search(r"photo=[0-9a-f]{32}", page.url)


def test_a_photo_that_the_server_forgot_is_sent_again(visit: Callable[..., Any], state: AppState) -> None:
    page = visit()
    changes(page, lambda: page.evaluate(HANDED_OVER, "drop"))
    settled(page)
    state.uploads._cache.clear()
    changes(page, lambda: method(page, "ixg"))
    sync_api.expect(page.locator("#status-text")).to_contain_text("ixg: 1 forward", timeout=WAIT)
    state.uploads._cache.clear()
    page.locator("#play-deletion").click()
    sync_api.expect(page.locator("#curve-text")).to_contain_text("removed: 196 of 196", timeout=WAIT)
    state.uploads._cache.clear()
    page.locator("#map-0").hover(position={"x": 100, "y": 100})
    sync_api.expect(page.locator("#patch-text")).to_contain_text("most to row", timeout=WAIT)


def test_slow_work_shows_progress_and_can_be_cancelled(visit: Callable[..., Any], state: AppState) -> None:
    page = visit()
    method(page, "rise")
    sync_api.expect(page.locator("#status-text")).to_contain_text(re.compile(r"rise: .*\d %"), timeout=WAIT)
    page.locator("#cancel").click()
    sync_api.expect(page.locator("#status-text")).to_have_text("Cancelled.")
    end = time.monotonic() + WAIT / 1000
    while state.queues["slow"].pending:
        assert time.monotonic() < end, "the work went on"
        time.sleep(0.05)
    assert page.locator('#methods input[value="attnlrp+plus"]').is_checked(), "the list says what is shown"


def test_two_tabs_at_once_do_not_mix(visit: Callable[..., Any]) -> None:
    one, two = visit(), visit("#method=rollout")
    method(one, "gradcam")
    method(two, "attnlrp")
    for page, name in ((one, "gradcam"), (two, "attnlrp")):
        sync_api.expect(page.locator("#status-text")).to_contain_text(f"{name}: 1 forward", timeout=WAIT)
    assert picture(one) != picture(two)


def test_settings_that_make_no_sense_become_usual_ones(visit: Callable[..., Any]) -> None:
    page = visit("#layer=-3&opacity=7&cmap=nonsense&head=99&target=x&model=none&colour=red")
    assert picture(page) == picture(visit("#opacity=1"))
    assert page.locator("#layer-text").inner_text() == "all"
    assert page.locator("#cmap").input_value() == "auto"
    assert page.locator("#head").input_value() == "mean"


def test_another_link_in_the_same_tab_is_followed(visit: Callable[..., Any]) -> None:
    page = visit()
    page.evaluate("() => { location.hash = 'method=rollout'; }")
    sync_api.expect(page.locator("#status-text")).to_contain_text("rollout: 1 forward", timeout=WAIT)


def test_a_link_to_a_method_that_is_not_there_says_so_and_the_page_goes_on(visit: Callable[..., Any]) -> None:
    page = visit("#method=legrat", shows_a_map=False)
    sync_api.expect(page.locator("#status.error #status-text")).to_contain_text("Did you mean 'legrad'", timeout=WAIT)
    for name in ("#save-png", "#save-json", "#save-npz", "#play-deletion", "#play-insertion", "#head", "#layer"):
        assert page.locator(name).is_disabled(), name
    method(page, "rollout")
    wait_for_map(page)
    assert page.locator("#save-png").is_enabled()
    assert page.locator("#play-deletion").is_enabled()


def test_the_last_of_many_quick_choices_is_the_one_that_counts(visit: Callable[..., Any]) -> None:
    page = visit()
    for name in ("gradcam", "attnlrp", "rollout", "ixg"):
        method(page, name)
    sync_api.expect(page.locator("#status-text")).to_contain_text("ixg: 1 forward", timeout=WAIT)
    assert "method=ixg" in page.url
    page.locator("#layer").fill("4")
    page.locator("#head").select_option("1")
    sync_api.expect(page.locator("#notes")).to_contain_text("Head 1 of layer 3")
    assert page.locator('#methods input[value="ixg"]').is_checked()


def test_a_curve_of_the_map_before_is_not_shown(visit: Callable[..., Any], state: AppState) -> None:
    """The map changes while the curve is computed."""
    page = visit()
    page.locator("#play-deletion").click()
    method(page, "rollout")
    sync_api.expect(page.locator("#caption-0")).to_contain_text("any class", timeout=WAIT)
    sync_api.expect(page.locator('#methods input[value="rollout"]').first).to_be_checked()
    while state.queues["long"].pending:
        page.wait_for_timeout(50)
    page.wait_for_timeout(500)
    assert page.locator("#chart .method").count() == 0
    page.locator("#play-deletion").click()
    sync_api.expect(page.locator("#chart")).to_have_attribute(
        "aria-label", re.compile("deletion curve of rollout"), timeout=WAIT
    )


def test_a_model_that_a_method_does_not_fit_is_not_shown(browser: Any) -> None:
    """The list goes back to the model on show."""
    models = [wrapped("timm-vit"), cv.wrap(strange(cnn), name="cnn", size=(32, 32))]
    with serving(create_state(models)) as address:
        page = browser.new_page()
        page.goto(f"{address}/#method=rollout")
        wait_for_map(page)
        page.locator("#model").select_option("cnn")
        sync_api.expect(page.locator("#status.error #status-text")).to_contain_text("attention", timeout=WAIT)
        assert page.locator("#model").input_value() == "timm-vit"
        assert page.locator("#head option").count() > 1
        method(page, "gradcam")
        sync_api.expect(page.locator("#status-text")).to_contain_text("gradcam: 1 forward", timeout=WAIT)
        page.locator("#model").select_option("cnn")
        sync_api.expect(page.locator("#head option")).to_have_count(1)
        settled(page)
        assert "model=cnn" in page.url
        page.close()
