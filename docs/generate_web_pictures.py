"""Draw docs/images/web.jpg: twelve states of the page of `clairvit serve`, photographed in Chromium.

python docs/generate_web_pictures.py [--folder FOLDER]    FOLDER: also the single screenshots, in full size
"""

from __future__ import annotations

import argparse
import io
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont, ImageOps
from playwright.sync_api import Page, sync_playwright

from clairvit.models.image_files import read_image

TARGET = Path(__file__).parent / "images" / "web.jpg"
TILE, LABEL, GAP, COLUMNS = (640, 400), 30, 16, 3
WAIT = 120_000  # milliseconds
DESK = {"viewport": {"width": 1440, "height": 900}}
PHONE = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True}


def png(image: Image.Image, name: str) -> dict[str, Any]:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return {"name": name, "mimeType": "image/png", "buffer": buffer.getvalue()}


def nothing(page: Page) -> None:
    """Leave the page as it is."""


def point(page: Page) -> None:
    box = page.locator("#map-0").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 0.9 * box["width"], box["y"] + 0.45 * box["height"])
    page.wait_for_function("() => document.getElementById('tooltip').dataset.most")
    page.wait_for_timeout(300)


def play(page: Page) -> None:
    page.locator("#badge").click()
    page.wait_for_selector("#curves[data-film=ended]", timeout=WAIT)
    page.locator("#curves").scroll_into_view_if_needed()
    page.evaluate("() => scrollTo(0, document.getElementById('curves').offsetTop - 330)")


def several(page: Page) -> None:
    cat = read_image("demo")
    photos = [
        png(ImageOps.mirror(cat), "mirrored.png"),
        png(cat.rotate(180), "upside-down.png"),
        png(ImageOps.grayscale(cat).convert("RGB"), "grey.png"),
    ]
    page.set_input_files("#file", photos)
    rows = "[...document.querySelectorAll('#photos tbody tr')]"
    page.wait_for_function(f"() => {rows}.every((row) => /upport|chance/.test(row.textContent))", timeout=WAIT)


def compare(page: Page) -> None:
    page.locator("#compare summary").click()
    page.wait_for_selector("#thumbs button", timeout=WAIT)
    page.locator("#all").scroll_into_view_if_needed()
    page.evaluate("() => scrollTo(0, document.body.scrollHeight)")


def two_photos(page: Page) -> None:
    page.set_input_files("#other-file", png(ImageOps.mirror(read_image("demo")), "mirrored.png"))
    page.wait_for_selector("#pair-options:not([hidden])", timeout=WAIT)
    tested(page)
    page.wait_for_function("() => /upport|chance|tested/.test(document.getElementById('badge-1').textContent)")


def features(page: Page) -> None:
    page.locator("#features summary").click()
    page.wait_for_selector("#features-grid[data-layer]", timeout=WAIT)
    page.locator("#alike-map").press("ArrowRight")
    page.wait_for_function("() => document.getElementById('alike-text').textContent.includes('other parts')")
    page.evaluate("() => scrollTo(0, document.body.scrollHeight)")


def flat(page: Page) -> None:
    page.set_input_files("#file", png(Image.new("RGB", (300, 200), "grey"), "wall.png"))
    page.wait_for_selector("#caution:not([hidden])", timeout=WAIT)
    tested(page)


def tested(page: Page) -> None:
    page.wait_for_selector("#map-panel[aria-busy=false]", timeout=WAIT)
    page.wait_for_selector("#badge:not([disabled])", timeout=WAIT)


STATES: list[tuple[str, str, Callable[[Page], object], dict[str, Any]]] = [
    ("1  first screen", "", nothing, DESK),
    ("2  a part under the pointer", "", point, DESK),
    ("3  the test as a film", "", play, DESK),
    ("4  two photos on one scale", "", two_photos, DESK),
    ("5  one head of one layer", "#method=genatt&layer=9&head=1", nothing, DESK),
    ("6  several photos", "", several, DESK),
    ("7  all quick methods", "", compare, DESK),
    ("8  which parts are alike to the model", "", features, DESK),
    ("9  a photo of nothing", "", flat, DESK),
    ("10  a control", "#method=random", nothing, DESK),
    ("11  dark", "#method=grad-rollout", nothing, {**DESK, "color_scheme": "dark"}),
    ("12  phone, and how to read this", "", nothing, PHONE),
]


def photograph(browser: Any, address: str) -> list[Image.Image]:
    """Return a screenshot of each state."""
    shots = []
    for _, link, act, options in STATES:
        page = browser.new_page(**options)
        page.goto(f"{address}{link}")
        tested(page)
        act(page)
        shot = Image.open(io.BytesIO(page.screenshot()))
        if options is PHONE:
            page.locator("#help-open").click()
            shot = side_by_side(shot, Image.open(io.BytesIO(page.screenshot())))
        shots.append(shot.convert("RGB"))
        page.close()
    return shots


def side_by_side(left: Image.Image, right: Image.Image) -> Image.Image:
    joined = Image.new("RGB", (left.width + right.width + 40, left.height), "white")
    joined.paste(left, (0, 0))
    joined.paste(right, (left.width + 40, 0))
    return joined


def contact_sheet(shots: list[Image.Image]) -> Image.Image:
    """Return all screenshots on one sheet, each under its name."""
    rows = -(-len(shots) // COLUMNS)
    width, height = TILE[0] + GAP, TILE[1] + LABEL + GAP
    sheet = Image.new("RGB", (COLUMNS * width + GAP, rows * height + GAP), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(18)
    for number, (shot, (name, *_)) in enumerate(zip(shots, STATES, strict=True)):
        left, top = GAP + number % COLUMNS * width, GAP + number // COLUMNS * height
        draw.text((left, top), name, fill="#1c1b22", font=font)
        small = ImageOps.contain(shot, TILE, Image.Resampling.LANCZOS)
        sheet.paste(small, (left, top + LABEL))
        draw.rectangle((left, top + LABEL, left + small.width, top + LABEL + small.height), outline="#85838f")
    return sheet


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path)
    folder = parser.parse_args().folder
    command = [sys.executable, "-c", "from clairvit.cli import main; main(['serve', '--port', '0'])"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
        try:
            assert server.stdout is not None
            address = next(line for line in server.stdout if "http://" in line).split()[1]
            with sync_playwright() as play_:
                browser = play_.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
                shots = photograph(browser, address)
                browser.close()
        finally:
            server.terminate()
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        for shot, (name, *_) in zip(shots, STATES, strict=True):
            shot.save(folder / f"{name.split()[0]}.png")
    contact_sheet(shots).save(TARGET, quality=82)
    print(TARGET)


if __name__ == "__main__":
    main()
