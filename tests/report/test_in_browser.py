"""A report in a real Chromium: no word on the console, no request to anywhere, and a script that sorts.

The same look at a page that complains and calls home shows that the look would see it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from dataclasses import dataclass
from html import escape
from pathlib import Path

import pytest

from clairvit.reports.build import ReportOptions, build_report
from clairvit.reports.render import to_html
from helpers.browser import find_chromium
from helpers.small_report import NASTY, Reader, run, worker_of

pytestmark = pytest.mark.browser
NO_ORIGIN = "not an origin"  # who Chromium says asked, when it was Chromium itself


@dataclass(frozen=True)
class Visit:
    page: str  # as it is once scripts have run
    console: list[str]
    requests: list[str]


def visit(file: Path, tmp_path: Path) -> Visit:
    log = tmp_path / "net.json"
    command = [
        str(find_chromium()),
        *("--headless", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
        *("--disable-component-update", "--host-resolver-rules=MAP * ~NOTFOUND"),  # nothing leaves this machine
        *(["--no-sandbox"] if os.geteuid() == 0 else []),
        *(f"--user-data-dir={tmp_path / 'profile'}", "--enable-logging=stderr", f"--log-net-log={log}"),
        *("--dump-dom", file.as_uri()),
    ]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=60, check=True)
    events = json.loads(log.read_text(encoding="utf-8"))["events"]
    requests = [event["params"] for event in events if "url" in event.get("params", {})]
    urls = [
        request_params["url"] for request_params in requests if request_params.get("initiator", NO_ORIGIN) != NO_ORIGIN
    ]
    return Visit(done.stdout, re.findall(r"CONSOLE:\d+\] (.*)", done.stderr), urls)


def test_a_report_is_silent_and_sorts(tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text(
        to_html(build_report(run(tmp_path / "run"), ReportOptions(open_worker=worker_of))), encoding="utf-8"
    )
    visited = visit(file, tmp_path)
    assert visited.console == []
    assert visited.requests == []
    page = Reader(file.read_text(encoding="utf-8"))
    heads = sum(attributes["scope"] == "col" for attributes, _ in page.all("th"))
    assert visited.page.count("<button type=") == heads > 20  # the script has run to its end
    text = re.sub(r"<[^>]*>", "", visited.page)
    assert escape(NASTY, quote=False) in text


def test_the_look_sees_pages_that_are_not_silent(tmp_path: Path) -> None:
    file = tmp_path / "bad.html"
    content = '<!doctype html><img src="http://127.0.0.1:9/x.png"><script>console.error("oh")</script>'
    file.write_text(content, encoding="utf-8")
    visited = visit(file, tmp_path)
    assert visited.console
    assert '"oh"' in visited.console[0]
    assert "http://127.0.0.1:9/x.png" in visited.requests
