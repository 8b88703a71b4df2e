"""Base of targets: a new kind is one subclass, raw outputs are taken, and a class-agnostic target has no score."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from clairvit.errors import BadInput, ClairError, NotApplicable
from clairvit.targets.base import ScoreContext, Target, TargetBatch, call_function, class_agnostic_target
from helpers.targets import resolve_targets

LABELS = ("Bengal", "Beagle", "Egyptian Mau", "Pug")


@pytest.fixture
def logits() -> Tensor:
    return torch.tensor([[0.0, 3.0, 1.0, -1.0], [2.0, 0.0, 1.0, 0.1]])


@dataclass(frozen=True)
class SecondClass(Target):
    """The class with the second highest score of each image: a kind of target that the package does not have."""

    def resolve(self, context: ScoreContext) -> TargetBatch:
        classes = context.logits.topk(2, dim=-1).indices[:, 1].tolist()
        return context.target([context.name(c) for c in classes], classes, [((c, 1.0),) for c in classes])


def test_a_subclass_of_target_spec_is_a_target(logits: Tensor) -> None:
    (target,) = resolve_targets(SecondClass(), logits, LABELS)
    assert target.names == ("Egyptian Mau", "Egyptian Mau")
    assert not target.class_agnostic
    assert torch.equal(target(logits), torch.tensor([1.0, 1.0]))
    (mixed,) = resolve_targets([SecondClass(), "Pug"], logits, LABELS)
    assert mixed.names == ("Egyptian Mau", "Pug")


def test_a_target_takes_the_raw_output_of_a_module(logits: Tensor) -> None:
    (target,) = resolve_targets("Pug", logits, LABELS)
    for output in (logits, (logits, "tokens"), {"logits": logits}):
        assert torch.equal(target(output), torch.tensor([-1.0, 0.1]))


def test_a_class_agnostic_target_has_a_title_and_no_score() -> None:
    target = class_agnostic_target(2)
    assert (target.names, target.score, target.class_agnostic, len(target)) == (("any class",) * 2, "none", True, 2)
    assert target.take([0]).names == ("any class",)


@pytest.mark.parametrize("error", [NotApplicable("No such score."), torch.OutOfMemoryError("CUDA out of memory")])
def test_errors_that_callers_handle_pass_a_target_function(logits: Tensor, error: ClairError | RuntimeError) -> None:
    """Our own messages are not wrapped, and running out of memory still halves the batch."""

    def function(_: Tensor) -> Tensor:
        raise error

    with pytest.raises(type(error)) as caught:
        call_function(function, logits)
    assert caught.value is error


def test_any_other_error_of_a_target_function_is_one_sentence(logits: Tensor) -> None:
    with pytest.raises(BadInput, match=r"^The target function failed .* \(IndexError: .*one number per image\.$"):
        call_function(lambda scores: scores[:, 9], logits)
