"""The page in a real browser: links, failures, and what happens when many things happen at once."""

from __future__ import annotations

import io
import re
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import pytest
from PIL import Image

import clairvit as cv
from clairvit.models.image_files import read_image
from clairvit.web.state import AppState, create_state
from helpers.browser_tab import (
    WAIT,
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
    wait_for_map,
)
from helpers.tiny_models import cnn, fresh, strange
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


def test_the_token_is_taken_out_of_the_address_or_asked_for_in_the_page(browser: Any, state: AppState) -> None:
    with serving(state, "a-secret-token") as address:
        page = browser.new_page()
        heard = []
        page.on("request", lambda request: heard.append(request.url))
        page.goto(f"{address}/#method=rollout&token=a-secret-token")
        wait_for_map(page)
        assert "secret" not in page.url + "".join(heard)
        assert "method=rollout" in page.url
        assert page.locator("#token-form").is_hidden()
        other, dialogs = browser.new_page(), []
        other.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
        other.goto(address)
        sync_api.expect(other.locator("#token-field")).to_be_focused(timeout=WAIT)
        other.keyboard.type("wrong")
        other.keyboard.press("Enter")
        sync_api.expect(other.locator("#token-error")).to_contain_text("not accepted", timeout=WAIT)
        other.locator("#token-field").fill("a-secret-token")
        other.keyboard.press("Enter")
        wait_for_map(other)
        assert other.locator("#token-form").is_hidden()
        assert dialogs == []
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
    settled(page, "ixg")
    state.uploads._cache.clear()
    page.locator("#play-deletion").click()
    animation_ended(page)
    state.uploads._cache.clear()
    page.locator("#map-0").hover(position={"x": 100, "y": 100})
    sync_api.expect(page.locator("#patch-text")).to_contain_text("it looks most", timeout=WAIT)


def test_slow_work_shows_progress_and_can_be_cancelled(visit: Callable[..., Any], state: AppState) -> None:
    page = visit()
    method(page, "rise")
    sync_api.expect(page.locator("#status-text")).to_contain_text(re.compile(r"RISE: .*\d %"), timeout=WAIT)
    sync_api.expect(page.locator("#caption-0")).to_contain_text("(old); RISE is being made")
    assert page.locator("#map-panel.stale").count() == 1, "the former map is dimmed"
    page.locator("#cancel").click()
    sync_api.expect(page.locator("#status-text")).to_have_text("Cancelled.")
    assert page.locator("#map-panel.stale").count() == 0
    end = time.monotonic() + WAIT / 1000
    while state.queues["slow"].pending:
        assert time.monotonic() < end, "the work went on"
        time.sleep(0.05)
    assert page.locator('#methods input[value="attnlrp+plus"]').is_checked(), "the list says what is shown"


def test_two_tabs_at_once_do_not_mix(visit: Callable[..., Any]) -> None:
    first, second = visit(), visit("#method=rollout")
    method(first, "gradcam")
    method(second, "attnlrp")
    for page, name in ((first, "gradcam"), (second, "attnlrp")):
        settled(page, name)
    assert picture(first) != picture(second)


def test_settings_that_make_no_sense_become_usual_ones(visit: Callable[..., Any]) -> None:
    page = visit("#layer=-3&opacity=7&cmap=nonsense&head=99&target=x&model=none&colour=red")
    assert picture(page) == picture(visit("#opacity=1"))
    assert page.locator("#layer-text").inner_text() == "all together"
    assert page.locator("#cmap").input_value() == "auto"
    assert page.locator("#head").input_value() == "mean"


def test_another_link_in_the_same_tab_is_followed(visit: Callable[..., Any]) -> None:
    page = visit()
    page.evaluate("() => { location.hash = 'method=rollout'; }")
    settled(page, "rollout")


BAD_LINKS = {  # what the page says of each
    "#method=nope": "not here (“nope”)",
    "#method=__import__('os')": "",
    "#photo=../..": "",
    "#method=legrad(x=1)": "not possible here",
    "#method=lime(samples=-3)": "takes",  # it asks first
    "#target=999": "not possible here",
    "#method=rollout&target=999&layer=3": "not possible here",
    f"#other={'0' * 32}": "no longer has the second photo",
    f"#other={'0' * 32}&pair=alike&method=legrad(x=1)": "not possible here",
    f"#photo={'0' * 32}&other={'1' * 32}&target=3": "no longer has that photo",
}


@pytest.mark.parametrize("link", BAD_LINKS)
def test_a_bad_link_leaves_a_working_page_without_technical_words(visit: Callable[..., Any], link: str) -> None:
    page = visit(link)
    settled(page, "attnlrp+plus")
    sync_api.expect(page.locator("#status-text")).not_to_have_text(re.compile("…$"))
    text = page.locator("#status-text").inner_text() + page.locator("#ask-first").inner_text()
    assert BAD_LINKS[link] in text
    assert not re.search(r"cv\.|--|pattern|body|option|x=1", text)
    assert page.locator("#save-png").is_enabled()
    sync_api.expect(page.locator("#caption-0")).to_contain_text("Bengal")


def test_a_second_photo_that_is_gone_leaves_the_first(visit: Callable[..., Any]) -> None:
    page = visit()
    changes(page, lambda: page.evaluate(HANDED_OVER, "drop"))
    settled(page)
    photo = re.search(r"photo=[0-9a-f]{32}", page.url)
    assert photo
    other = visit(f"#{photo[0]}&other={'0' * 32}")
    sync_api.expect(other.locator("#status-text")).to_contain_text("no longer has the second photo", timeout=WAIT)
    assert photo[0] in other.url
    assert picture(other) == picture(page)


def test_a_server_that_is_gone_is_reported_in_plain_words(visit: Callable[..., Any]) -> None:
    page = visit()
    checked(page)
    page.route("**/api/**", lambda route: route.abort())
    method(page, "ixg")
    sync_api.expect(page.locator("#status.error #status-text")).to_contain_text("server does not answer", timeout=WAIT)
    page.locator("#dismiss").click()
    sync_api.expect(page.locator("#status.error")).to_have_count(0)


def test_a_link_to_a_slow_method_asks_first(visit: Callable[..., Any], state: AppState) -> None:
    page = visit("#method=rise(samples=10000)")
    settled(page, "attnlrp+plus")
    sync_api.expect(page.locator("#ask-text")).to_contain_text(re.compile("RISE, which takes (about|under)"))
    assert state.queues["slow"].pending == 0
    page.locator("#ask-default").click()
    sync_api.expect(page.locator("#ask-first")).to_be_hidden()


def test_a_model_without_classes_is_no_dead_page(browser: Any) -> None:
    """A CLIP model without labels: every default failed."""
    embedding = create_state([fresh("open_clip-tower")])
    default = embedding.cards[0].default_method
    with serving(embedding) as address:
        page = browser.new_page()
        page.goto(address)
        settled(page, default)
        sync_api.expect(page.locator("#answer-says")).to_contain_text("names nothing")
        sync_api.expect(page.locator("#caption-0")).to_contain_text("where the model looks")
        # No hole in the column: both edges are read at once, until the texts that come with the map have moved them.
        edge = "document.getElementById('{}-panel').getBoundingClientRect().{}"
        page.wait_for_function(f"{edge.format('keep', 'top')} - {edge.format('photo', 'bottom')} < 20", timeout=60_000)
        sync_api.expect(page.locator("#badge")).not_to_have_text("Testing this map…", timeout=WAIT)
        assert page.locator("#curves").is_hidden(), "there is no answer that could be lost"
        method(page, "ixg")  # it explains a score, and there is none
        sync_api.expect(page.locator("#status.error #status-text")).not_to_contain_text("=", timeout=WAIT)
        assert page.locator("#map-panel").get_attribute("data-method") == default
        page.close()


def test_the_skip_link_keeps_the_settings(visit: Callable[..., Any]) -> None:
    """It changed the fragment of the address, and the page was loaded anew."""
    page = visit("#method=ixg")
    page.evaluate("() => { window.sameDocument = true; }")
    page.locator(".skip").focus()
    page.keyboard.press("Enter")
    sync_api.expect(page.locator("#maps")).to_be_focused()
    page.wait_for_timeout(300)
    assert page.evaluate("() => window.sameDocument") is True
    assert "method=ixg" in page.url


def test_a_method_without_layers_is_shown_as_itself(visit: Callable[..., Any]) -> None:
    """After layer 11 and head 1, gradcam showed a head of the raw attention under its own name."""
    page = visit()
    page.locator("#layer").fill("12")
    page.locator("#head").select_option("1")
    sync_api.expect(page.locator("#caption-0")).to_contain_text("head 1", timeout=WAIT)
    method(page, "gradcam")
    settled(page, "gradcam")
    assert picture(page) == picture(visit("#method=gradcam"))
    assert page.locator("#layer").input_value() == "0"
    assert page.locator("#head").input_value() == "mean"


def test_two_targets_of_a_method_without_targets_are_one_map_and_a_note(visit: Callable[..., Any]) -> None:
    page = visit("#method=rollout&target=5&target=11")
    assert page.locator("#second-map").is_hidden()
    sync_api.expect(page.locator("#notes")).to_contain_text("the same map for every answer")
    method(page, "ixg")
    settled(page, "ixg")
    assert page.locator("#second-map").is_visible(), "the classes were kept"


def test_the_thumbnails_of_another_photo_are_gone_at_once(visit: Callable[..., Any]) -> None:
    page = visit()
    page.locator("#compare summary").click()
    page.locator("#thumbs button").first.wait_for()
    held: list[Any] = []  # the request of the new thumbnails is not answered yet

    def hold(route: Any) -> None:
        is_of_all = b"\r\nall\r\n" in (route.request.post_data_buffer or b"")
        held.append(route) if is_of_all else route.continue_()

    page.route("**/api/explain", hold)
    changes(page, lambda: page.evaluate(HANDED_OVER, "drop"))
    settled(page)
    sync_api.expect(page.locator("#thumbs")).to_have_text("Working…")
    assert page.locator("#thumbs button").count() == 0
    assert len(held) == 1
    held[0].continue_()
    page.locator("#thumbs button").first.wait_for()


def test_a_link_to_a_photo_that_is_gone_shows_the_example_with_its_own_class(visit: Callable[..., Any]) -> None:
    page = visit(f"#photo={'0' * 32}&target=3")
    settled(page)
    sync_api.expect(page.locator("#status-text")).to_contain_text("no longer has that photo")
    sync_api.expect(page.locator("#caption-0")).to_contain_text("Bengal")
    assert "target=3" not in page.url


def test_several_photos_are_listed_with_answer_and_test(visit: Callable[..., Any]) -> None:
    page = visit()
    files = []
    for number, turn in enumerate((Image.Transpose.FLIP_LEFT_RIGHT, Image.Transpose.FLIP_TOP_BOTTOM)):
        buffer = io.BytesIO()
        read_image("demo").transpose(turn).save(buffer, "JPEG")
        files.append({"name": f"cat-{number}.jpg", "mimeType": "image/jpeg", "buffer": buffer.getvalue()})
    page.set_input_files("#file", [*files, {"name": "bad.jpg", "mimeType": "image/jpeg", "buffer": b"no photo"}])
    rows = page.locator("#photos tbody tr")
    sync_api.expect(rows).to_have_count(3)
    for number in (0, 1):
        sync_api.expect(rows.nth(number)).to_contain_text(re.compile(r"%\s*(Map |Nothing here)"), timeout=WAIT)
    sync_api.expect(rows.nth(2)).to_contain_text("not a photo", timeout=WAIT)
    sync_api.expect(page.locator("#photo-caption")).to_have_text("cat-0.jpg")
    rows.nth(1).locator("button").first.click()
    sync_api.expect(page.locator("#photo-caption")).to_have_text("cat-1.jpg", timeout=WAIT)
    rows.nth(0).locator(".second").click()
    sync_api.expect(page.locator("#other-caption")).to_have_text("cat-0.jpg", timeout=WAIT)


def test_a_photo_of_one_colour_comes_with_a_caution(visit: Callable[..., Any]) -> None:
    page = visit()
    assert page.locator("#caution").is_hidden()
    buffer = io.BytesIO()
    Image.new("RGB", (300, 200), "grey").save(buffer, "PNG")
    page.set_input_files("#file", {"name": "grey.png", "mimeType": "image/png", "buffer": buffer.getvalue()})
    sync_api.expect(page.locator("#caution")).to_contain_text("one colour", timeout=WAIT)


def test_arrow_keys_pass_through_methods_without_running_each(visit: Callable[..., Any]) -> None:
    page = visit()
    urls: list[str] = []
    page.on("request", lambda request: urls.append(request.url) if request.url.endswith("/api/explain") else None)
    page.locator('#methods input[value="attnlrp+plus"]').focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    settled(page, cv.recommended_methods()[2].method)
    assert len(urls) == 1


FOCUSED = "() => { const e = document.activeElement; return e.id || e.dataset.key || e.name || e.className; }"


def test_the_main_path_by_keyboard_alone(visit: Callable[..., Any]) -> None:
    """Help, answer, part of the map, layer, method, film: each is reached by Tab and used without a pointer."""
    page = visit()
    checked(page)

    def tab_to(name: str) -> None:
        for _ in range(45):
            page.keyboard.press("Tab")
            if page.evaluate(FOCUSED) == name:
                return
        raise AssertionError(f"{name} is not reached")

    page.keyboard.press("Tab")
    assert page.evaluate(FOCUSED) == "skip", "the first stop skips to the map"
    tab_to("help-open")
    page.keyboard.press("Enter")
    sync_api.expect(page.locator("#help")).to_be_visible()
    page.keyboard.press("Escape")
    sync_api.expect(page.locator("#help-open")).to_be_focused()
    for name in ("model", "badge", "file", "class-11"):
        tab_to(name)
    page.keyboard.press("Enter")
    sync_api.expect(page.locator("#caption-0")).to_contain_text("Egyptian Mau", timeout=WAIT)
    tab_to("map-0")
    page.keyboard.press("ArrowRight")
    sync_api.expect(page.locator("#tooltip")).to_be_visible()
    tab_to("layer")
    page.keyboard.press("ArrowRight")
    sync_api.expect(page.locator("#layer-text")).to_have_text("0 (0 to 11)")
    for name in ("save-report", "filter", "method"):
        tab_to(name)
    page.keyboard.press("ArrowDown")
    settled(page, cv.recommended_methods()[1].method)
    tab_to("play-deletion")
    page.keyboard.press("Enter")
    sync_api.expect(page.locator("#curves")).to_have_attribute("data-film", re.compile("playing|waiting|ended"))


def test_the_last_of_many_quick_choices_is_the_one_that_counts(visit: Callable[..., Any]) -> None:
    page = visit()
    for name in ("gradcam", "attnlrp", "rollout", "ixg"):
        method(page, name)
    settled(page, "ixg")
    assert "method=ixg" in page.url
    page.locator("#layer").fill("4")
    page.locator("#head").select_option("1")
    sync_api.expect(page.locator("#caption-0")).to_contain_text("layer 3, head 1", timeout=WAIT)
    assert page.locator('#methods input[value="ixg"]').is_checked()


def test_a_curve_of_the_map_before_is_not_shown(visit: Callable[..., Any], state: AppState) -> None:
    """The map changes while the curve is computed."""
    page = visit()
    page.locator("#play-deletion").click()
    method(page, "rollout")
    settled(page, "rollout")
    sync_api.expect(page.locator('#methods input[value="rollout"]').first).to_be_checked()
    while state.queues["long"].pending:
        page.wait_for_timeout(50)
    page.wait_for_timeout(500)
    assert page.locator("#chart .method").count() == 0
    page.locator("#play-deletion").click()
    sync_api.expect(page.locator("#chart")).to_have_attribute(
        "aria-label", re.compile("in the order of Attention rollout"), timeout=WAIT
    )


def test_a_model_that_a_method_does_not_fit_is_not_shown(browser: Any) -> None:
    """The list goes back to the model on show."""
    models = [fresh("timm-vit"), cv.wrap(strange(cnn), name="cnn", size=(32, 32))]
    with serving(create_state(models)) as address:
        page = browser.new_page()
        page.goto(f"{address}/#method=rollout")
        wait_for_map(page)
        page.locator("#model").select_option("cnn")
        sync_api.expect(page.locator("#status.error #status-text")).to_contain_text("attention", timeout=WAIT)
        assert page.locator("#model").input_value() == "timm-vit"
        assert page.locator("#head option").count() > 1
        method(page, "gradcam")
        settled(page, "gradcam")
        page.locator("#model").select_option("cnn")
        sync_api.expect(page.locator("#head option")).to_have_count(1)
        settled(page)
        assert "model=cnn" in page.url
        page.close()


def test_a_map_is_refined_step_by_step_and_tested_once(visit: Callable[..., Any]) -> None:
    page = visit()
    checked(page)
    requests: list[str] = []
    page.on("request", lambda request: requests.append(urlsplit(request.url).path))
    before = picture(page)
    page.evaluate(
        """() => { window.tested = [];
        const panel = document.getElementById("map-panel"), badge = document.getElementById("badge");
        new MutationObserver(() => window.tested.push(!badge.disabled))
          .observe(panel, { attributes: true, attributeFilter: ["data-method"] }); }"""
    )
    page.locator("#refine").click()
    settled(page, "refine(attnlrp+plus)")  # 256 passes are the method's default
    sync_api.expect(page.locator("#refine-text")).to_contain_text("After 256 passes, ")
    assert requests.count("/api/explain") == 5
    assert page.evaluate("() => window.tested") == [False] * 5, "no step is shown with the test of the map before it"
    checked(page)
    assert requests.count("/api/check") == 1
    assert picture(page) != before
    assert page.locator("#refine").is_hidden(), "there are no further steps"
    assert page.locator('#methods input[value="attnlrp+plus"]').first.is_checked(), "the method that is refined"
    method(page, "genatt")
    settled(page, "genatt")
    assert page.locator("#refine").is_visible()
