"""What each attention head says by itself, and what min, mean and max over the heads leave, from the same trace.

A method that fuses heads by an option `fusion` is run once for each head and each fusion: these runs share the trace,
so they cost a few sums. For any other method the heads are those of the attention itself, and a note says so.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from clairvit.methods.aggregation import Single
from clairvit.methods.executor import Result
from clairvit.methods.explanation import FUSIONS, Heads
from clairvit.methods.flow import Flow
from clairvit.methods.registry import parameters
from clairvit.methods.spec import MethodSpec, resolve_method
from clairvit.tracing.recording import Recording

OF_ANY = "raw-attention"  # where a method has no heads of its own


def has_own_heads(spec: MethodSpec) -> bool:
    """Can it be run head by head? (A maximum flow for each head would take too long.)"""
    fuses = "fusion" in parameters(spec.method.function)
    return fuses and spec.aggregation is not None and not isinstance(spec.aggregation, Flow)


def variants(spec: MethodSpec, recording: Recording) -> dict[str | int, MethodSpec]:
    """The method with each head alone and with each fusion; none where layers have different numbers of heads."""
    counts = {int(call.v.shape[1]) for call in recording.calls}
    if len(counts) != 1:
        return {}
    base = spec.text if has_own_heads(spec) else OF_ANY
    return {fusion: resolve_method(base, fusion=fusion) for fusion in (*range(counts.pop()), *FUSIONS)}


def gathered(
    spec: MethodSpec, chosen: Mapping[str | int, MethodSpec], results: Mapping[str, list[Result]]
) -> Heads | None:
    """The runs of `variants` as one; None where the model has no heads that see all tokens."""
    runs = [results[one.text] for one in chosen.values()]
    if not runs or any(result.layers is None for run in runs for result in run):
        return None
    layers = torch.stack([_of_all_targets([result.layers for result in run]) for run in runs])  # [H+3, B, L, …]
    layers = layers.movedim(2, 0)  # [L, H+3, B, rows, cols]
    own = has_own_heads(spec)
    whole = (
        [results[chosen[fusion].text] for fusion in FUSIONS] if own and not isinstance(spec.aggregation, Single) else []
    )
    return Heads(
        method=spec.text if own else OF_ANY,
        maps=layers[:, : -len(FUSIONS)],
        fused=layers[:, -len(FUSIONS) :],
        whole=torch.stack([torch.cat([_known(one.maps) for one in run]) for run in whole]) if whole else None,
    )


def remark(spec: MethodSpec, heads: Heads | None) -> tuple[str, ...]:
    """What a reader of the picture must know."""
    if heads is None:
        return (f"{spec.text}: this model has no heads that look from every token at every token, so none are shown",)
    if heads.method != spec.text:
        why = "a maximum flow a head is too slow" if isinstance(spec.aggregation, Flow) else "it has no option `fusion`"
        return (f"{spec.text}: it is not run head by head ({why}); the heads shown are the attention's",)
    return ()


def _of_all_targets(layers: list[Tensor | None]) -> Tensor:
    """[B, L, rows, cols] of the targets' [L, B, rows, cols]."""
    return torch.cat([_known(part).movedim(0, 1) for part in layers]).detach()


def _known(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.detach()
