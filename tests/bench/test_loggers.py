"""Loggers get the progress of all workers and the means, with fakes and with TensorBoard."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from clairvit.bench import loggers as loggers_module
from clairvit.bench.loggers import FunctionLogger, opened_loggers
from clairvit.errors import ClairError, UnknownName


def test_wandb_and_mlflow_get_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def noted(name: str) -> Any:
        return lambda *values, **named: (
            calls.append((name, *values, named)) or SimpleNamespace(log=noted("run.log"), finish=noted("run.finish"))
        )

    names = ("set_experiment", "start_run", "log_metrics", "end_run")
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=noted("init")))
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(**{name: noted(name) for name in names}))
    with opened_loggers(["wandb:pets", "mlflow:first"]) as opened:
        for logger in opened:
            logger.log({"deletion/pets/rollout(fusion=max)": 0.5}, 3)
    assert calls == [
        ("init", {"project": "pets"}),
        ("set_experiment", "first", {}),
        ("start_run", {}),
        ("run.log", {"deletion/pets/rollout(fusion=max)": 0.5}, {"step": 3}),
        ("log_metrics", {"deletion/pets/rollout_fusion_max_": 0.5}, {"step": 3}),
        ("run.finish", {}),
        ("end_run", {}),
    ]


def test_tensorboard_writes_scalars(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with opened_loggers([f"tensorboard:{tmp_path}"]) as (logger,):
        logger.log({"study/units": 1.0}, 1)
        logger.log({"study/units": 2.0}, 2)
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(event.step, event.value) for event in events.Scalars("study/units")] == [(1, 1.0), (2, 2.0)]


def test_unknown_and_missing_loggers(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []
    with loggers_module.LOGGERS.restored():
        loggers_module.run_logger("fake")(lambda place: FunctionLogger(lambda *_: None, lambda: closed.append(place)))
        opened = opened_loggers(["fake:x", "wandbb"])
        with pytest.raises(UnknownName, match=r"There is no logger 'wandbb'. Did you mean 'wandb'"):
            opened.__enter__()
        assert closed == []
        monkeypatch.setitem(sys.modules, "wandb", None)
        opened = opened_loggers(["fake:x", "wandb"])
        with pytest.raises(ClairError, match="pip install wandb"):
            opened.__enter__()
        assert closed == ["x"], "a run that began is ended"
