"""The page under axe-core, which knows the rules of WCAG 2.2 A and AA: no violation in any appearance or state."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from PIL import Image

from clairvit.web.state import create_state
from helpers.browser_tab import WAIT, animation_ended, browser, checked, needs_a_browser, settled, sync_api, visit
from helpers.tiny_models import fresh
from helpers.web_server import serving

__all__ = ["browser", "visit"]  # fixtures
pytestmark = needs_a_browser
TAGS = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
OPTIONS = {"runOnly": {"type": "tag", "values": TAGS}, "resultTypes": ["violations"]}
APPEARANCES = {
    "light": ("light", {"width": 1280, "height": 900}),
    "dark": ("dark", {"width": 1280, "height": 900}),
    "phone": ("light", {"width": 390, "height": 844}),
}


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A server of a tiny model: the elements are those of a large one."""
    state = create_state([fresh("timm-vit")])
    with serving(state) as url:
        yield url
    state.close()


def violations(page: Any, appearances: Iterable[str] = APPEARANCES) -> list[str]:
    """Return each violation in each appearance as the rule and the element that breaks it."""
    broken = []
    for appearance in appearances:
        scheme, size = APPEARANCES[appearance]
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        page.set_viewport_size(size)
        response = Axe().run(page, options=OPTIONS).response
        assert len(response["passes"]) > 20, "the rules were applied"
        broken += [
            f"{appearance}: {rule['id']}: {node['target']}" for rule in response["violations"] for node in rule["nodes"]
        ]
    return broken


def open_everything(page: Any) -> None:
    """Show two maps, all methods, the film, the comparison, the features and a tooltip."""
    page.locator("#classes .second").nth(1).click()
    page.locator("#second-map").wait_for(state="visible")
    settled(page)
    page.locator("#play-deletion").click()
    page.evaluate("() => { for (const one of document.querySelectorAll('details')) one.open = true; }")
    page.locator("#thumbs button").first.wait_for()
    animation_ended(page)
    page.locator("#alike-map").press("ArrowRight")
    sync_api.expect(page.locator("#alike-text")).to_contain_text("other parts", timeout=WAIT)
    page.locator("#map-0").press("ArrowRight")
    sync_api.expect(page.locator("#tooltip")).to_be_visible()
    checked(page)


def hand_over_photos(page: Any) -> None:
    """Show the table of several photos with a refused one, a caution, and two photos side by side."""
    page.evaluate("() => { for (const one of document.querySelectorAll('details')) one.open = false; }")
    buffer = io.BytesIO()
    Image.new("RGB", (300, 200), "grey").save(buffer, "PNG")
    wall = {"name": "wall.png", "mimeType": "image/png", "buffer": buffer.getvalue()}
    page.set_input_files("#file", [wall, {**wall, "name": "bad.png", "buffer": b"no photo"}])
    sync_api.expect(page.locator("#photos tbody tr").nth(1)).to_contain_text("not a photo", timeout=WAIT)
    sync_api.expect(page.locator("#caution")).to_be_visible(timeout=WAIT)
    page.set_input_files("#other-file", wall)
    page.locator("#pair-options").wait_for(state="visible")
    settled(page)
    checked(page)


def test_axe_finds_no_violation_in_light_dark_and_phone(visit: Callable[..., Any]) -> None:
    """As opened, with everything open, several photos, the help; and axe does look: a button without name is found."""
    page = visit(reduced_motion="reduce")
    checked(page)
    assert violations(page) == []
    open_everything(page)
    assert violations(page) == []
    hand_over_photos(page)
    assert violations(page) == []
    page.locator("#help-open").click()
    sync_api.expect(page.locator("#help")).to_be_visible()
    assert violations(page) == []
    page.keyboard.press("Escape")
    page.evaluate("() => document.querySelector('main').append(document.createElement('button'))")
    assert [violation.split(": ")[1] for violation in violations(page, ["light"])] == ["button-name"]
