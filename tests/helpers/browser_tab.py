"""A tab of a real browser, and what a visitor sees in it. They need a chromium that is installed."""

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
API = re.compile(r"/api/(models|methods|explain|trace/\d+|curve|check)$")


@pytest.fixture(scope="module")  # two modules may not both have playwright open
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as play:
        made = play.chromium.launch(executable_path=find_chromium(), args=["--no-sandbox"])
        yield made
        made.close()


@pytest.fixture
def visit(browser: Any, address: str) -> Iterator[Callable[..., Any]]:
    """Opens a tab; in the end no tab may have had an error, nor asked another server for anything."""
    tabs, troubles = [], []

    def opened(hash_: str = "", shows_a_map: bool = True, **options: Any) -> Any:
        page = browser.new_page(**{"viewport": {"width": 1280, "height": 900}, **options})
        page.set_default_timeout(WAIT)
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("console", lambda said: troubles.append(said.text) if said.type in ("error", "warning") else None)
        page.on("request", lambda asked: seen(asked.url))
        page.goto(f"{address}/{hash_}")
        tabs.append(page)
        if shows_a_map:
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


def wait_for_map(page: Any, words: str | re.Pattern[str] = re.compile(r" %|∀ any class")) -> None:
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
