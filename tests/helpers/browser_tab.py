"""A tab of a real browser and its content; needs an installed Chromium."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright import sync_api

from helpers.browser import find_chromium

needs_a_browser = [
    pytest.mark.browser,
    pytest.mark.filterwarnings("default::clairvit.errors.ClairWarning"),
]
WAIT = 60_000  # milliseconds, for a machine that is busy with other things
sync_api.expect.set_options(timeout=WAIT)  # else 5 s
API = re.compile(r"/api/(models|methods|explain|(?:trace|features)/\d+|curve|check)$")


@pytest.fixture(scope="module")  # two modules may not both have playwright open
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as play:
        chromium = play.chromium.launch(executable_path=find_chromium(), args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def visit(browser: Any, address: str) -> Iterator[Callable[..., Any]]:
    """Open tabs; at the end no tab may have had an error or a request to another server."""
    tabs, errors = [], []

    def opened(hash_: str = "", shows_a_map: bool = True, **options: Any) -> Any:
        page = browser.new_page(**{"viewport": {"width": 1280, "height": 900}, **options})
        page.set_default_timeout(WAIT)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on(
            "console", lambda message: errors.append(message.text) if message.type in ("error", "warning") else None
        )
        page.on("request", lambda request: check_url(request.url))
        page.goto(f"{address}/{hash_}")
        tabs.append(page)
        if shows_a_map:
            wait_for_map(page)
        return page

    def check_url(url: str) -> None:
        if url.startswith("blob:"):
            return
        parts = urlsplit(url)
        if f"{parts.scheme}://{parts.netloc}" != address:
            errors.append(f"request to another server: {url}")
        if parts.path.startswith("/api/") and not API.search(parts.path):
            errors.append(f"unknown API address: {url}")

    yield opened
    for page in tabs:
        page.close()
    expected = [error for error in errors if "Failed to load resource" in error]  # a refusal that a test provokes
    assert [error for error in errors if error not in expected] == []


def wait_for_map(page: Any, words: str | re.Pattern[str] = re.compile(r"\d\s%\s|any answer|score")) -> None:
    sync_api.expect(page.locator("#caption-0")).to_contain_text(words, timeout=WAIT)


def settled(page: Any, method_text: str | None = None) -> None:
    """Wait until the map of the settings is shown."""
    shown = page.locator("#map-panel")
    if method_text is not None:
        sync_api.expect(shown).to_have_attribute("data-method", method_text, timeout=WAIT)
    sync_api.expect(shown).to_have_attribute("aria-busy", "false", timeout=WAIT)


def checked(page: Any) -> None:
    """Wait until the map is tested."""
    sync_api.expect(page.locator("#badge")).to_be_enabled(timeout=WAIT)


def animation_ended(page: Any) -> None:
    sync_api.expect(page.locator("#curves")).to_have_attribute("data-film", "ended", timeout=WAIT)


def picture(page: Any, name: str = "map-0") -> str:
    data_url: str = page.evaluate("(name) => document.getElementById(name).toDataURL()", name)
    return data_url


def changes(page: Any, act: Callable[[], object], name: str = "map-0") -> None:
    """Assert that the canvas changes after an action."""
    before, end = picture(page, name), time.monotonic() + WAIT / 1000
    act()
    while picture(page, name) == before:
        assert time.monotonic() < end, "nothing changed"
        time.sleep(0.05)


def method(page: Any, name: str) -> None:
    page.evaluate("() => { document.getElementById('all-methods').open = true; }")
    # A recommended one is listed twice. Clicked, not checked: the page goes back to the former one if it fails at once.
    page.locator(f'#methods input[value="{name}"]').first.click()
