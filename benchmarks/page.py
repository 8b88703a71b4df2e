"""Speed of the page of `clairvit serve` in Chromium: first map, change of the method, badge of the test.

python benchmarks/page.py [--repeats 5] [--out page.json]

Seconds as a visitor has them: from the request of the page, or the choice of a method, until the map is drawn; from the
map until its badge is there. The server keeps recent results, so each visit has a photo of its own, which was uploaded
before with another method: nothing that is timed has been computed before. Medians over `repeats` visits, and over the
methods that are chosen in each. Apart from these, `after_start` is the first visit to a fresh server, with the example.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from PIL import Image
from playwright.sync_api import sync_playwright

from clairvit.models.image_files import read_image

METHODS = ("rollout", "legrad", "genatt", "ixg", "gradcam", "decompx")
LIMITS = {"first_map_s": 1.3, "change_s": 0.3, "badge_s": 2.0}
MAP_SHOWN = """([method]) => {
  const panel = document.getElementById("map-panel");
  return panel.ariaBusy === "false" && (!method || panel.dataset.method === method); }"""
BADGE_SHOWN = "() => !document.getElementById('badge').disabled"


def upload(address: str, number: int) -> str:
    """Send the example photo with noise of its own, explained by a method that no visit uses; return its id."""
    pixels = np.asarray(read_image("demo").convert("RGB"), dtype=np.int16)
    noise = np.random.default_rng(number).integers(-8, 9, pixels.shape)
    buffer = io.BytesIO()
    Image.fromarray((pixels + noise).clip(0, 255).astype(np.uint8)).save(buffer, "PNG")
    files = {"image": (f"{number}.png", buffer.getvalue(), "image/png")}
    reply = httpx.post(f"{address}/api/explain", files=files, data={"method": "center"}, timeout=120)
    reply.raise_for_status()
    return str(reply.json()["photo"])


def visit(browser: Any, address: str, times: dict[str, list[float]]) -> None:
    """Open the page, wait for map and badge, then choose methods one after another."""
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    started = time.perf_counter()
    page.goto(address, wait_until="commit")
    page.wait_for_function(MAP_SHOWN, arg=[None])
    shown = time.perf_counter()
    page.wait_for_function(BADGE_SHOWN)
    times["first_map_s"].append(shown - started)
    times["badge_s"].append(time.perf_counter() - shown)
    page.evaluate("() => { document.getElementById('all-methods').open = true; }")
    for method in METHODS:
        radio = page.locator(f'#methods input[value="{method}"]').first
        started = time.perf_counter()
        radio.check()
        page.wait_for_function(MAP_SHOWN, arg=[method])
        shown = time.perf_counter()
        page.wait_for_function(BADGE_SHOWN)
        times["change_s"].append(shown - started)
        times["badge_s"].append(time.perf_counter() - shown)
    page.close()


def measure(repeats: int) -> dict[str, Any]:
    command = [sys.executable, "-c", "from clairvit.cli import main; main(['serve', '--port', '0'])"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    times: dict[str, list[float]] = {name: [] for name in LIMITS}
    at_start: dict[str, list[float]] = {name: [] for name in LIMITS}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
        try:
            assert server.stdout is not None
            address = next(line for line in server.stdout if "http://" in line).split()[1].rstrip("/")
            with sync_playwright() as play:
                browser = play.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
                visit(browser, address, at_start)  # also loads what libraries load once
                for number in range(repeats):
                    visit(browser, f"{address}/#photo={upload(address, number)}", times)
                browser.close()
        finally:
            server.terminate()
    return {
        "median": {name: round(statistics.median(values), 3) for name, values in times.items()},
        "highest": {name: round(max(values), 3) for name, values in times.items()},
        "after_start": {name: round(values[0], 3) for name, values in at_start.items()},
        "limits": LIMITS,
        "load_average": os.getloadavg()[0],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    result = measure(arguments.repeats)
    text = json.dumps(result, indent=1)
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text + "\n", encoding="utf-8")
    return int(any(result["median"][name] > limit for name, limit in LIMITS.items()))


if __name__ == "__main__":
    sys.exit(main())
