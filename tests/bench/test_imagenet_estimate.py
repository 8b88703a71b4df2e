"""benchmarks/imagenet_estimate.py: a run that is cut off keeps what it has, and no rate is guessed."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.scripts import load_script


def benchmark() -> Any:
    return load_script("benchmarks/imagenet_estimate.py")


def measured(path: Path, **named: Any) -> Any:
    options = {"model": "pets", "device": "cpu", "random_weights": False, "images": 1, "repeats": 1, "batch_size": None}
    options |= {"autocast": None, "families": None, "metrics": None, "save": path, **named}
    return benchmark().measure(Namespace(**options))


def test_named_rows_are_added_to_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rates.json"
    measured(path, families=["baseline"])
    rates = measured(path, families=["attention"], metrics=["sparseness"])
    assert list(rates.maps) == ["baseline", "attention"]
    assert benchmark().Rates(**json.loads(path.read_text())) == rates
    assert "maps of attention (2)" in capsys.readouterr().err
    benchmark().report(rates, 1000)
    printed = capsys.readouterr().out
    assert "| the rows above |" in printed
    assert "Not measured" in printed
    assert "maps of relevance" in printed
    with pytest.raises(SystemExit, match="this run of"):
        measured(path, families=["cam"], images=2)


def test_what_was_measured_is_in_the_file_of_a_run_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cut_off(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(benchmark().cv, "evaluate", cut_off)
    with pytest.raises(KeyboardInterrupt):
        measured(tmp_path / "rates.json", families=["baseline"], metrics=["sparseness"])
    saved = json.loads((tmp_path / "rates.json").read_text())
    assert list(saved["maps"]) == ["baseline"]
    assert saved["metrics"] == {}


def test_a_long_first_run_is_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[int] = []
    benchmark().seconds(lambda: runs.append(0), torch.device("cpu"), 3)
    assert len(runs) == 4
    monkeypatch.setattr(benchmark(), "LONG", -1.0)
    benchmark().seconds(lambda: runs.append(0), torch.device("cpu"), 3)
    assert len(runs) == 5
