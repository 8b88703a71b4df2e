"""The page of a model with a text tower: a prompt is typed, its map and cosine are shown, and a link keeps it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import clairvit as cv
from clairvit.web.state import create_state
from helpers.browser_tab import WAIT, browser, needs_a_browser, settled, sync_api
from helpers.tiny_models import fresh
from helpers.tiny_pairs import save_clip
from helpers.web_server import serving

__all__ = ["browser"]  # a fixture
pytestmark = needs_a_browser


def test_a_prompt_is_typed_and_shown(tmp_path: Path, browser: Any) -> None:
    state = create_state([cv.load(f"hf:{save_clip(tmp_path)}"), fresh("timm-vit")], time_limit=300)
    try:
        with serving(state) as address:
            page = browser.new_page()
            page.set_default_timeout(WAIT)
            errors: list[str] = []
            page.on("pageerror", lambda error: errors.append(str(error)))
            page.goto(address)
            settled(page)
            page.locator("#prompt").fill("a red car")
            page.locator("#prompt").press("Enter")
            sync_api.expect(page.locator("#caption-0")).to_contain_text("a red car cosine")
            sync_api.expect(page.locator("#answer-says")).to_contain_text("like the words a red car (cosine")
            settled(page)
            assert "text=a+red+car" in page.url
            page.reload()
            sync_api.expect(page.locator("#caption-0")).to_contain_text("a red car cosine")
            page.locator("#model").select_option("timm-vit")
            sync_api.expect(page.locator("#prompt-form")).to_be_hidden()
            settled(page)
            assert errors == []
            page.close()
    finally:
        state.close()
