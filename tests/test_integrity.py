"""Integrity: whatever a verb does, and wherever it is stopped, the model and the process are as they were before.

Failures are put in place of single torch calls, at several points between the first and the last one of a run.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import clairvit as cv
from clairvit.bench.run import run_study
from clairvit.bench.store import Store
from clairvit.bench.worker import Worker
from clairvit.data.dataset import as_dataset
from clairvit.errors import ClairError
from clairvit.models.model import Model
from clairvit.training.finetune import finetune
from clairvit.training.training_config import TrainingConfig
from helpers.covering import all_cases, covering_array
from helpers.method_conditions import allow_declared_zeros
from helpers.module_fingerprint import differences, messy, surroundings, unchanged
from helpers.operations import FailAt
from helpers.rounding import assert_same
from helpers.small_study import study
from helpers.verbs import NAME, VERBS, out_of_memory, tensors

POINTS = 7  # where a run is stopped: at the first call, near the last, and between
MANY = 10_000  # calls of a run that takes seconds; it is stopped at three points
LAST = 95  # per cent of the calls; a run that finds something remembered makes a few calls less


class Stop(Exception):
    """An error of somebody else's code."""


@dataclass(frozen=True)
class Failure:
    """What is raised in place of a torch call, and how it may come out."""

    error: Callable[[], BaseException]
    comes_out: tuple[type[BaseException], ...]
    repeatedly: bool = False
    may_recover: bool = False  # a batch that is out of memory is halved; another way to drop tokens is tried


FAILURES = {
    "method raises": Failure(lambda: Stop("of the method"), (Stop, ClairError), may_recover=True),
    "KeyboardInterrupt": Failure(KeyboardInterrupt, (KeyboardInterrupt,)),
    "out of memory once": Failure(out_of_memory, (torch.OutOfMemoryError, ClairError), may_recover=True),
    "out of memory for good": Failure(out_of_memory, (torch.OutOfMemoryError, ClairError), repeatedly=True),
}


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Torch about our messy models; ClairViT about ReLUs that leave nothing of a random model's map."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Full backward hook is firing")
        allow_declared_zeros()
        yield


def test_the_list_of_verbs_is_complete() -> None:
    """A new public verb that takes a model must be in helpers/verbs.py."""
    need_no_model = {"load", "wrap", "cite", "method", "metric", "recommended_methods", "run_study", "report"}
    need_no_model |= {"list_methods", "list_metrics", "list_models", "parse_method", "parse_metric"}
    need_no_model |= {"tail"}  # returns a model: tests/methods/test_tails.py
    need_no_model |= {"generate"}  # needs a vision-language model: tests/targets/test_next_token.py
    public = {name for name in cv.__all__ if name[0].islower() and callable(getattr(cv, name))}
    assert {name.split()[0] for name in VERBS} == public - need_no_model


def test_surroundings_see_every_kind_of_change() -> None:
    changes: dict[str, Callable[[], object]] = {
        "default dtype": lambda: torch.set_default_dtype(torch.float64),
        "grad": lambda: torch.set_grad_enabled(False),
        "autocast": lambda: torch.set_autocast_enabled("cpu", True),
        "warnings": lambda: warnings.simplefilter("ignore", ResourceWarning),
        "torch": lambda: torch.rand(1),
    }
    grad, dtype, generator = torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_rng_state()
    for name, change in changes.items():
        before = surroundings()
        with warnings.catch_warnings():
            try:
                change()
                assert name in differences(before, surroundings())
            finally:
                torch.set_grad_enabled(grad)
                torch.set_default_dtype(dtype)
                torch.set_autocast_enabled("cpu", False)
                torch.set_rng_state(generator)
        assert differences(before, surroundings()) == []


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_leaves_everything_as_it_was(verb: str) -> None:
    module, run = messy(NAME), VERBS[verb]
    run(messy(NAME))  # libraries that are imported on the way (scipy.stats) set warning filters of their own
    with unchanged(module):
        tensors(run(module))


@functools.cache
def undisturbed(verb: str) -> tuple[list[Tensor], int]:
    """Return the numbers of a verb on a fresh model, and how many torch calls it makes."""
    with FailAt(Stop) as counting:
        expected = tensors(VERBS[verb](messy(NAME)))
    return expected, counting.calls


def points_of(failure: str, calls: int) -> list[int]:
    """Return three of the points for each failure, so that every point is that of one or more; all with --cases=all."""
    if all_cases() and calls < MANY:
        return [*range(POINTS)]
    return [*((0, 3, 6), (1, 3, 5), (0, 2, 4), (2, 4, 6))[[*FAILURES].index(failure)]]


@pytest.mark.parametrize(("verb", "failure"), covering_array([*VERBS], [*FAILURES], least=2))
def test_a_verb_that_is_stopped_leaves_everything_as_it_was(verb: str, failure: str) -> None:
    """And afterwards it gives what it gives otherwise: nothing half done was remembered."""
    run, kind = VERBS[verb], FAILURES[failure]
    expected, calls = undisturbed(verb)
    assert calls > POINTS
    points = points_of(failure, calls)
    for point in points:
        at = 1 + LAST * calls // 100 * point // (POINTS - 1)
        module = messy(NAME)  # one that nothing is known of yet: the same calls in the same order
        stopped = FailAt(kind.error, at, repeatedly=kind.repeatedly)
        with unchanged(module):
            try:
                with stopped:
                    run(module)
            except kind.comes_out:
                pass
            else:
                recovers = kind.may_recover or (verb == "doctor" and failure != "KeyboardInterrupt")  # a line says so
                assert recovers, f"{failure} at call {at} of {calls} was swallowed"
        assert stopped.raised >= 1
        if point in points[1:]:
            again = tensors(run(module))
            assert len(again) == len(expected)
            for ours, theirs in zip(again, expected, strict=True):
                assert_same(ours, theirs, label=f"{verb} after {failure}", dtype=torch.float32)


@pytest.mark.parametrize("failure", [None, *FAILURES])
def test_a_study_leaves_the_model_as_it_was(tmp_path: Path, failure: str | None) -> None:
    """What `clairvit bench` does with each model."""
    small_study = study(tmp_path, 2)
    worker = Worker(small_study.resolved())
    worker.open()
    module: nn.Module = worker.model(0).module
    module.train()
    run_study(small_study, Store.open(tmp_path / "first"), worker=worker)
    with FailAt(Stop) as counting:
        run_study(small_study, Store.open(tmp_path / "counted"), worker=worker)
    for point in range(3):
        kind = None if failure is None else FAILURES[failure]
        at = None if kind is None else 1 + LAST * counting.calls // 100 * point // 2
        mode = FailAt(Stop if kind is None else kind.error, at, repeatedly=kind is not None and kind.repeatedly)
        with unchanged(module):
            try:
                with mode:
                    run_study(small_study, Store.open(tmp_path / f"store{point}"), worker=worker)
            except (Stop, KeyboardInterrupt, torch.OutOfMemoryError, ClairError):
                assert failure is not None
            else:
                assert failure != "KeyboardInterrupt"
        assert (mode.raised > 0) == (failure is not None)


@pytest.mark.parametrize("failure", [None, *FAILURES])
def test_training_leaves_the_process_as_it_was(tmp_path: Path, failure: str | None) -> None:
    """`clairvit finetune` makes its own model; random numbers, modes and flags of the process are the user's."""
    photos = [Image.new("RGB", (40, 40), colour) for colour in ("red", "blue", "green", "white")]
    dataset = as_dataset(photos, Model(nn.Identity(), "none"), labels=["a", "b", "a", "b"])
    shape = {"patch_size": 16, "embed_dim": 8, "depth": 1, "num_heads": 1, "drop_rate": 0.1}

    def run(folder: str) -> None:
        out, recipe = tmp_path / folder / "m.safetensors", TrainingConfig(epochs=1, batch=2)
        how = {"options": shape, "size": 32, "out": out, "recipe": recipe, "pretrained": False}
        finetune(dataset, "timm:vit_tiny_patch16_224", **how)

    with FailAt(Stop) as counting:
        run("counted")
    kind = None if failure is None else FAILURES[failure]
    for point in range(POINTS if kind else 1):
        at = None if kind is None else 1 + LAST * counting.calls // 100 * point // (POINTS - 1)
        mode = FailAt(Stop if kind is None else kind.error, at, repeatedly=kind is not None and kind.repeatedly)
        with unchanged():
            try:
                with mode:
                    run(f"run{point}")
            except (Stop, KeyboardInterrupt, torch.OutOfMemoryError, ClairError):
                assert failure is not None
            else:
                assert failure != "KeyboardInterrupt"
        assert (mode.raised > 0) == (failure is not None)
