"""A method with a recorder of its own, from outside the package: it declares what it needs, and reads it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import clairvit as cv
from clairvit._spec import Registered
from clairvit.errors import CaptureError
from clairvit.extend import LayerView, Op, Recorder, Requires, Single, method, ops
from clairvit.methods.registry import METHODS, Method
from clairvit.tracing.recording import Recording, record
from helpers.tiny_models import fresh, pixels, wrapped


class HiddenActivations(Recorder):
    kinds = frozenset({ops.ACTIVATION})

    def __init__(self) -> None:
        self.outputs: dict[int, Tensor] = {}

    def on_op(self, op: Op) -> None:
        self.outputs[op.block] = op.output.detach()

    def at_layer(self, index: int, recording: Recording) -> Tensor:
        return self.outputs[index]


def active_share(layer: LayerView, threshold: float = 0.0) -> Tensor:
    """mean_k [h_k > threshold]: which share of a token's hidden MLP units is active."""
    return (layer[HiddenActivations] > threshold).float().mean(-1)  # [B, N]


REQUIRES = Requires(passes="forward", recorders=(HiddenActivations,))


@pytest.fixture
def registered() -> Iterator[None]:
    fields = {"family": "attention", "paper": "a test", "class_specific": False}
    with METHODS.restored():
        method("active-share", output="tokens", aggregation=Single(-1), requires=REQUIRES, **fields)(active_share)
        yield


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("text", ["active-share", "active-share(threshold=0.05)", "active-share+layer:0"])
def test_a_method_reads_its_own_recorder(text: str) -> None:
    model, images = fresh("timm-vit"), pixels("timm-vit")
    hidden: list[Tensor] = []
    hooks = [b.mlp.act.register_forward_hook(lambda m, i, out: hidden.append(out)) for b in model.module.blocks]
    model.logits(images)
    for hook in hooks:
        hook.remove()
    chosen, threshold = hidden[0 if "layer:0" in text else -1], 0.05 if "threshold" in text else 0.0
    expected = (chosen > threshold).float().mean(-1)
    ex = cv.explain(model, images, text)
    assert torch.equal(ex.maps.flatten(1), expected[:, -ex.maps[0].numel() :])
    assert (ex.cost.forwards, ex.cost.backwards) == (1, 0)


def test_a_recorder_that_was_not_required_is_missing() -> None:
    recording = record(wrapped("timm-vit"), pixels("timm-vit"), differentiable=False)
    with pytest.raises(CaptureError, match=r"HiddenActivations was not recorded; .*Requires\(recorders="):
        recording[HiddenActivations]


def test_what_is_special_about_a_method_is_no_field_of_all_methods() -> None:
    of_methods_alone = {f.name for f in dataclasses.fields(Method)} - {f.name for f in dataclasses.fields(Registered)}
    assert len(of_methods_alone) <= 11, "declare it in Requires, ExtraCost, Caveats, or a recorder"
