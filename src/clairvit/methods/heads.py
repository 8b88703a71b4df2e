"""The maps of each attention head, and of the heads fused by min, mean and max, from one trace.

A method with an option `fusion` is run once per head and fusion: these runs share the trace, so they cost a few sums.
For any other method the heads are those of the raw attention, and a note says so.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from clairvit.methods.aggregation import Single
from clairvit.methods.executor import Result
from clairvit.methods.explanation import FUSIONS, Heads
from clairvit.methods.flow import Flow
from clairvit.methods.registry import function_options
from clairvit.methods.spec import MethodSpec, resolve_method
from clairvit.tracing.recording import Recording

FALLBACK = "raw-attention"  # where a method has no heads of its own


def has_own_heads(spec: MethodSpec) -> bool:
    """Return whether the method can be run head by head; a maximum flow per head would take too long."""
    fuses = "fusion" in function_options(spec.method.function)
    return fuses and spec.aggregation is not None and not isinstance(spec.aggregation, Flow)


def head_variants(spec: MethodSpec, recording: Recording) -> dict[str | int, MethodSpec]:
    """Return the method with each head alone and with each fusion; none if layers have different numbers of heads."""
    counts = {int(call.v.shape[1]) for call in recording.calls}
    if len(counts) != 1:
        return {}
    base = spec if has_own_heads(spec) else FALLBACK
    return {fusion: resolve_method(base, fusion=fusion) for fusion in (*range(counts.pop()), *FUSIONS)}


def collect_heads(
    spec: MethodSpec, variants: Mapping[str | int, MethodSpec], results: Mapping[str, list[Result]]
) -> Heads | None:
    """Return the results of the `head_variants`; None if the model has no heads that see all tokens."""
    runs = [results[variant.text] for variant in variants.values()]
    if not runs or any(result.layers is None for run in runs for result in run):
        return None
    layers = torch.stack([_concat_layers([result.layers for result in run]) for run in runs])  # [H+3, B, L, …]
    layers = layers.movedim(2, 0)  # [L, H+3, B, rows, cols]
    runs_by_head = has_own_heads(spec)
    fused_runs = (
        [results[variants[fusion].text] for fusion in FUSIONS]
        if runs_by_head and not isinstance(spec.aggregation, Single)
        else []
    )
    return Heads(
        method=spec.text if runs_by_head else FALLBACK,
        maps=layers[:, : -len(FUSIONS)],
        fused=layers[:, -len(FUSIONS) :],
        whole=torch.stack([torch.cat([_detached(result.maps) for result in run]) for run in fused_runs])
        if fused_runs
        else None,
    )


def head_notes(spec: MethodSpec, heads: Heads | None) -> tuple[str, ...]:
    """Return a note where the heads shown are not those of the method."""
    if heads is None:
        return (f"{spec.text}: this model has no heads that look from every token at every token, so none are shown",)
    if heads.method != spec.text:
        slow = isinstance(spec.aggregation, Flow)
        why = "a maximum flow per head is too slow" if slow else "it has no option `fusion`"
        return (f"{spec.text}: it is not run head by head ({why}); the heads shown are the attention's",)
    return ()


def _concat_layers(layers: list[Tensor | None]) -> Tensor:
    """Return [B, L, rows, cols] of the targets' [L, B, rows, cols]."""
    return torch.cat([_detached(part).movedim(0, 1) for part in layers]).detach()


def _detached(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.detach()
