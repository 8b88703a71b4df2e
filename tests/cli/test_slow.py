"""Slow methods: `--method all` leaves them out and says so; long work shows a bar on a terminal and nowhere else."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from clairvit._progress import track
from clairvit.cli import console, main
from clairvit.cli.arguments import left_out, resolve_methods
from clairvit.methods.registry import list_methods

Captured = pytest.CaptureFixture[str]
SLOW = [method.name for method in list_methods() if method.slow]
OTHERS = [method.name for method in list_methods() if not method.slow]
WINDOWS = ["--model", "timm:test_maxvit", "--no-pretrained"]


def test_all_is_all_but_the_slow_ones() -> None:
    assert "attention-flow" in SLOW
    expanded = [str(spec) for spec in resolve_methods("all")]
    assert sorted(expanded) == sorted(OTHERS)
    assert left_out(["all"]) == {name: f"it is slow; --method all,{name} adds it." for name in SLOW}


def test_slow_ones_come_by_name() -> None:
    expanded = [str(spec) for spec in resolve_methods("all", "attention-flow")]
    assert sorted(expanded) == sorted([*OTHERS, "attention-flow"])
    families = [spec.method.family for spec in resolve_methods("all", "attention-flow")]
    assert families == sorted(families, key=list(dict.fromkeys(families)).index), "among its family"
    assert "attention-flow" not in left_out(["all", "attention-flow"])
    assert list(map(str, resolve_methods("attention-flow,rollout"))) == ["attention-flow", "rollout"]
    assert left_out(["attention-flow", "rollout"]) == {}


def test_what_was_left_out_is_printed_with_what_to_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["compare", "demo", "--method", "all", "--out", "all.png", *WINDOWS]) == 0
    printed = capsys.readouterr().out
    (slow,) = (text for text in printed.splitlines() if "it is slow" in text)
    assert slow.startswith("Left out attention-flow, ")
    assert slow.endswith("it is slow; --method all,NAME adds one.")
    assert main(["compare", "demo", "--method", "all,attention-flow", "--out", "all.png", "--json", *WINDOWS]) == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    assert "slow" not in result["skipped"]["attention-flow"], "it was tried, and does not fit windows"


def test_slow_is_listed(capsys: Captured) -> None:
    assert main(["methods", "--json"]) == 0
    listed = {method["name"]: method["slow"] for method in json.loads(capsys.readouterr().out)}
    assert listed["attention-flow"]
    assert not listed["rollout"]
    assert main(["methods", "attention-flow"]) == 0
    assert "left out of --method all" in capsys.readouterr().out


def shown(monkeypatch: pytest.MonkeyPatch, capsys: Captured, *, terminal: bool, hidden: bool, long: float) -> str:
    """What is written to stderr while one image with long work in it is explained."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich asks for a terminal in its own way
    monkeypatch.setattr(console, "INNER_BAR_AFTER", long)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    with console.progress_bar("images", 1, hidden=hidden) as advance:
        for _ in range(2):  # the same work twice
            for _ in track(range(5), "flow, image 1 of 1"):
                pass
        advance(1)
    return capsys.readouterr().err


def test_a_bar_for_long_work_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    for terminal, hidden in [(False, False), (True, True), (False, True)]:
        assert shown(monkeypatch, capsys, terminal=terminal, hidden=hidden, long=-1) == ""
    assert "flow" not in shown(monkeypatch, capsys, terminal=True, hidden=False, long=99)


def test_the_bar_says_how_far_the_work_is(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(console, "INNER_BAR_AFTER", -1)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")
    written, end = "", time.monotonic() + 60
    with console.progress_bar("images", 1):
        for step in track(range(3), "flow, image 1 of 1"):
            while step == 2 and "2/3" not in written and time.monotonic() < end:  # a thread draws the bar
                written += capsys.readouterr().err
    written += capsys.readouterr().err
    assert "flow, image 1 of 1" in written
    assert "2/3" in written
    assert "images" not in written, "one image needs no bar"
