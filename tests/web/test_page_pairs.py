"""The page with two photos or two models: maps on one scale, what makes photos alike, features in one basis."""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import clairvit as cv
from clairvit.models.image_files import read_image
from clairvit.plotting.overlay import scale_of, to_numpy
from clairvit.web.state import create_state
from helpers.browser_tab import WAIT, browser, needs_a_browser, picture, settled, sync_api
from helpers.tiny_models import fresh
from helpers.web_server import serving

__all__ = ["browser"]  # a fixture
pytestmark = needs_a_browser
FIRST, SECOND = "timm-vit", "timm-vit-nonsquare"
METHOD = "ixg"


def flipped() -> Image.Image:
    return read_image("demo").transpose(Image.Transpose.FLIP_TOP_BOTTOM)


def file(name: str = "flipped.png") -> dict[str, Any]:
    buffer = io.BytesIO()
    flipped().save(buffer, "PNG")
    return {"name": name, "mimeType": "image/png", "buffer": buffer.getvalue()}


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    state = create_state([fresh(FIRST), fresh(SECOND)])
    with serving(state) as url:
        yield url
    state.close()


@pytest.fixture
def page(browser: Any, address: str) -> Iterator[Any]:
    new_page, errors = browser.new_page(viewport={"width": 1280, "height": 900}), []
    new_page.set_default_timeout(WAIT)
    new_page.on("pageerror", lambda error: errors.append(str(error)))
    new_page.goto(f"{address}/#method={METHOD}")
    settled(new_page, METHOD)
    yield new_page
    new_page.close()
    assert errors == []


def compare_photo(page: Any) -> None:
    page.set_input_files("#other-file", file())
    page.locator("#pair-options").wait_for(state="visible")
    settled(page)


def pair(page: Any, kind: str) -> None:
    page.locator(f"input[name=pair][value={kind}]").check()
    sync_api.expect(page.locator("#map-panel")).to_have_attribute("data-pair", kind)


def assert_one_scale(page: Any, *maps: Any) -> None:
    values = np.concatenate([to_numpy(each).ravel() for each in maps])
    scale = scale_of(values, bool((values < 0).any()))
    assert float(page.locator("#high").get_attribute("data-value")) == pytest.approx(scale.high, rel=1e-4)


def test_two_photos_are_on_one_scale_and_a_link_keeps_them(page: Any, address: str) -> None:
    model = fresh(FIRST)
    compare_photo(page)
    maps = [cv.explain(model, image, METHOD) for image in ("demo", flipped())]
    assert_one_scale(page, *(each.maps for each in maps))
    for k, (name, each) in enumerate(zip(("example", "flipped.png"), maps, strict=True)):
        sync_api.expect(page.locator(f"#caption-{k}")).to_contain_text(each.targets[0])
        sync_api.expect(page.locator(f"#map-{k}")).to_have_attribute(
            "aria-label", re.compile(f"{name}: {each.targets[0]}")
        )
    sync_api.expect(page.locator("#answer-says")).to_contain_text(re.compile("for example and .* for flipped.png"))
    sync_api.expect(page.locator("#badge-1")).to_contain_text(re.compile("upport|chance|tested"))
    pair(page, "same")
    same = cv.explain(model, flipped(), METHOD, target=maps[0].classes[0])
    assert_one_scale(page, maps[0].maps, same.maps)
    shown = picture(page, "map-1")
    page.reload()
    page.locator("#pair-options").wait_for(state="visible")
    assert picture(page, "map-1") == shown
    page.locator("#pair-end").click()
    sync_api.expect(page.locator("#second-map")).to_be_hidden()
    assert "other=" not in page.url


def test_what_makes_two_photos_alike_is_shown_in_both_directions(page: Any) -> None:
    model = fresh(FIRST)
    compare_photo(page)
    pair(page, "alike")
    there = cv.explain(model, "demo", METHOD, target=cv.Similar(flipped()))
    back = cv.explain(model, flipped(), METHOD, target=cv.Similar("demo"))
    assert_one_scale(page, there.maps, back.maps)
    cosine = f"cosine {float(there.target_scores[0]):.3f}".replace("-", "−")  # type: ignore[arg-type]
    sync_api.expect(page.locator("#answer-says")).to_contain_text(cosine)
    page.locator("#play-deletion").click()  # the film is of the similarity
    sync_api.expect(page.locator("#curves")).to_have_attribute("data-film", re.compile("playing|waiting|ended"))
    names, records = [], []
    page.on("download", lambda saved: names.append(saved))
    with page.expect_download(lambda saved: "flipped" in saved.suggested_filename):
        page.locator("#save-json").click()
    sync_api.expect(page.locator("#status-text")).to_contain_text("and clairvit-flipped-ixg.json")
    for saved in names:
        records.append(json.loads(Path(saved.path()).read_text(encoding="utf-8")))
    assert [record["targets"] for record in records] == [["similar to the other photo"]] * 2
    np.testing.assert_allclose(records[1]["maps"], to_numpy(back.maps), rtol=1e-3, atol=1e-6)
    page.locator("#filter").fill("rollout")
    page.locator('#methods input[value="rollout"]').first.check()  # the same for every question
    settled(page, "rollout")
    sync_api.expect(page.locator("#answer-says")).to_contain_text("they are the same for every answer")


def test_a_photo_is_compared_where_it_is_dropped(page: Any) -> None:
    drop = """(x) => { const canvas = Object.assign(document.createElement("canvas"), { width: 90, height: 60 });
      const data = new DataTransfer(), text = atob(canvas.toDataURL().split(",")[1]);
      const bytes = Uint8Array.from(text, (letter) => letter.charCodeAt(0));
      data.items.add(new File([bytes], "a.png", { type: "image/png" }));
      document.body.dispatchEvent(new DragEvent("drop", { bubbles: true, dataTransfer: data, clientX: x })); }"""
    page.evaluate(drop, 1000)
    sync_api.expect(page.locator("#other-caption")).to_have_text("a.png")
    sync_api.expect(page.locator("#photo-caption")).to_have_text("example photo")
    page.evaluate(drop, 100)
    sync_api.expect(page.locator("#photo-caption")).to_have_text("a.png")


def test_two_models_are_on_one_scale_and_each_has_its_own_parts(page: Any) -> None:
    page.locator("#other-model").select_option(SECOND)
    page.locator("#second-map").wait_for(state="visible")
    settled(page)
    first, second = fresh(FIRST), fresh(SECOND)
    index = cv.explain(first, "demo", METHOD).classes[0]
    maps = [cv.explain(model, "demo", METHOD, target=index) for model in (first, second)]
    assert_one_scale(page, *(each.maps for each in maps))
    sync_api.expect(page.locator("#caption-1")).to_contain_text(f"{SECOND}: {maps[1].targets[0]}")
    page.locator("#map-1").hover(position={"x": 5, "y": 5})
    rank = int((maps[1].maps[0] > maps[1].maps[0, 0, 0]).sum()) + 1
    sync_api.expect(page.locator("#patch-text")).to_contain_text(f"Number {rank} of 15 parts")
    page.locator("#display summary").click()
    page.locator("#shared").uncheck()
    assert_one_scale(page, maps[0].maps)
    assert f"otherModel={SECOND}" in page.url


def test_a_caution_is_about_the_model_that_it_is_about(browser: Any) -> None:
    """A second model that is unsure made the badge of the first doubtful; and its three layers filled the panel."""
    state = create_state([cv.load("pets"), fresh(FIRST)])
    with serving(state) as address:
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        page.set_default_timeout(WAIT)
        page.goto(f"{address}/#otherModel={FIRST}")
        sync_api.expect(page.locator("#badge-1")).to_contain_text(re.compile("upport|chance|tested"))
        sync_api.expect(page.locator("#caution")).to_contain_text(
            re.compile(f"^Take care: {FIRST}: The model is unsure")
        )
        assert "take care" not in page.locator("#badge").inner_text()
        page.locator("#model").select_option(FIRST)
        sync_api.expect(page.locator("#layer")).to_have_attribute("max", str(state.card(FIRST).layers))
        settled(page)
        assert page.locator("#layer-strip").bounding_box()["width"] <= 72 * (state.card(FIRST).layers + 1)
        page.close()
    state.close()


def test_features_of_two_photos_have_one_basis(page: Any) -> None:
    """The colours of the second photo against the library's components, patch by patch."""
    compare_photo(page)
    page.evaluate("() => { document.querySelector('#display').open = true; }")
    page.locator("#smooth").uncheck()
    page.locator("#features summary").click()
    sync_api.expect(page.locator("#features-grid")).to_have_attribute("data-layer", re.compile(r"\d+"))
    expected = cv.features(fresh(FIRST), ["demo", flipped()])
    low, high = to_numpy(expected.limits)
    colours = np.clip((to_numpy(expected.pca[1]) - low) / (high - low), 0, 1)
    with Image.open(io.BytesIO(base64.b64decode(picture(page, "colours-map-1").partition(",")[2]))) as drawn:
        pixels = np.asarray(drawn.convert("RGB")) / 255.0
    rows, cols = expected.grid
    height, width = pixels.shape[0] // rows, pixels.shape[1] // cols
    middles = pixels[height // 2 :: height, width // 2 :: width][:rows, :cols]
    np.testing.assert_allclose(middles, colours, atol=0.01)
    page.locator("#alike-map").hover(position={"x": 5, "y": 5})
    cosines = expected.similarity(0, 0, image=0).flatten()
    cosines[0] = -1
    sync_api.expect(page.locator("#alike-map")).to_have_attribute("data-best", str(int(cosines.argmax())))


def test_a_model_without_classes_shows_what_makes_two_photos_alike(browser: Any) -> None:
    """The method that it opens with needs no target, so another one is taken."""
    model = fresh("open_clip-tower")
    state = create_state([model])
    with serving(state) as address:
        page = browser.new_page()
        page.set_default_timeout(WAIT)
        page.goto(address)
        settled(page, state.cards[0].default_method)
        compare_photo(page)
        method = cv.recommended_methods()[0].method
        settled(page, method)
        there = cv.explain(model, "demo", method, target=cv.Similar(flipped()))
        back = cv.explain(model, flipped(), method, target=cv.Similar("demo"))
        assert_one_scale(page, there.maps, back.maps)
        assert page.locator("#play-deletion").is_enabled()
        assert page.locator("input[name=pair]:visible").count() == 0, "there is no other question"
        page.close()
    state.close()
