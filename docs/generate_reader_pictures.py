"""Photograph what readers of the comprehension check see (docs/readers-test.md), of a server of any edition.

clairvit serve --port 8000
python docs/generate_reader_pictures.py http://127.0.0.1:8000 FOLDER

Writes FOLDER/1.png … 4.png: the first screen, 1440 × 900, nothing scrolled, opened or pointed at.
"""

from __future__ import annotations

import argparse
import io
import shutil
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Page, sync_playwright

WAIT = 120_000  # milliseconds
CASES = ("", "#method=random", "#method=ixg", "flat")  # of the example photo: default, a control, signed


def flat_photo() -> dict[str, Any]:
    """A grey wall: a photo with nothing to see in it."""
    buffer = io.BytesIO()
    Image.new("RGB", (300, 200), "grey").save(buffer, "PNG")
    return {"name": "wall.png", "mimeType": "image/png", "buffer": buffer.getvalue()}


def wait(page: Page) -> None:
    """Wait until nothing more is computed; the first edition has no badge."""
    page.wait_for_function("() => document.getElementById('caption-0').textContent.trim()", timeout=WAIT)
    if page.locator("#badge").count():
        page.wait_for_selector("#badge:not([disabled])", timeout=WAIT)
    page.wait_for_load_state("networkidle", timeout=WAIT)
    page.wait_for_timeout(500)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("address")
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for number, case in enumerate(CASES, start=1):
            page = browser.new_page(viewport={"width": 1440, "height": 900})
            page.goto(f"{arguments.address.rstrip('/')}/{case if case.startswith('#') else ''}")
            wait(page)
            if case == "flat":
                page.set_input_files("#file", flat_photo())
                page.wait_for_function("() => location.hash.includes('photo=')", timeout=WAIT)
                wait(page)
            page.screenshot(path=arguments.folder / f"{number}.png")
            page.close()
        browser.close()


if __name__ == "__main__":
    main()
