"""How many operations a trace runs: what methods share is computed once, and a layer costs no more than stated here.

On a GPU in half precision the host's time is the number of these operations, so that their number is the speed.
"""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import clairvit as cv
from clairvit.cuda import layers as gpu_layers
from clairvit.methods.registry import list_methods
from helpers.tiny_models import ZOO, pixels, wrapped

TARGET = 3
SHALLOW, DEEP = "timm-vit", "timm-deep"  # alike but for the number of blocks
PLAIN = [m.name for m in list_methods() if not m.slow and set(m.tables) <= {"plain"} and m.family != "decomposition"]


class OperationCount(TorchDispatchMode):
    """Count the operations that reach a kernel or describe memory.

    Not `detach`: autograd calls it for what it saves, and torch 2.6 twice as often as torch 2.15.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.names[name] += name != "detach"
        return func(*args, **(kwargs or {}))


def operations(kind: str, methods: list[str]) -> Counter[str]:
    model, image = wrapped(kind), pixels(kind)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cv.compare(model, image, methods, target=TARGET, skip=True)  # finds the structure, and confirms the plan
        with OperationCount() as count:
            cv.compare(model, image, methods, target=TARGET, skip=True)
    return count.names


def per_layer(methods: list[str]) -> float:
    """Return the operations of one more block: those of the model itself included."""
    layers = ZOO[DEEP].layers - ZOO[SHALLOW].layers
    return (operations(DEEP, methods).total() - operations(SHALLOW, methods).total()) / layers


# (methods, the most operations per layer one by one, and with layers shown together)
BOUNDS = [
    (["genatt"], 159, 122),
    (["rollout"], 130, 99),
    ([name for name in PLAIN if name != "legrad"], 519, 304),
]


@pytest.mark.parametrize(("methods", "apart", "together"), BOUNDS, ids=["genatt", "rollout", "all plain"])
def test_operations_per_layer(methods: list[str], apart: int, together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert per_layer(methods) <= apart
    monkeypatch.setattr(gpu_layers, "is_launch_bound", lambda trace: True)  # as on a GPU
    monkeypatch.setattr(gpu_layers, "STACKED_SHARE", 1e9)
    assert per_layer(methods) <= together


def test_methods_share_what_they_read() -> None:
    """Each softmax of a layer is A itself: one per layer, however many methods read it."""
    readers = ["raw-attention", "rollout", "genatt", "gradsam", "gmar-l1", "focusvit", "grad-rollout"]
    alone, all_together = operations(SHALLOW, ["genatt"]), operations(SHALLOW, readers)
    assert all_together["_softmax"] == alone["_softmax"] > 0
    assert all_together["abs"] - alone["abs"] <= ZOO[SHALLOW].layers  # |G|, for the head weights of two methods
    assert torch.is_grad_enabled()
