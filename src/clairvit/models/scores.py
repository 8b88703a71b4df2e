"""Scores: which tensor [B, C] of all that a module returns holds the class scores, or the embedding."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from clairvit.errors import BadInput
from clairvit.models.activation import head_outputs

# Fields that outputs of transformers, timm and torchvision name; the first that is there counts.
FIELDS = ("logits", "image_embeds", "pooler_output", "last_hidden_state")
_READ = "target=cv.Output(function), where function(output) returns one number per image, [B]"


def extract_scores(output: Any, module: nn.Module | None = None, labels: int = 0) -> Tensor:
    """Return the class scores (or embedding) [B, C] in a module's output: tensor, dataclass, tuple or mapping.

    A field named logits counts before all others. Of several tensors that could be scores it is the one with as many
    columns as there are labels, else as the module's classifier head has outputs.

    Args:
        output: What the module returned.
        module: The module, whose layers may say which of several tensors holds its scores.
        labels: The number of class names; 0 where there are none.

    Raises:
        BadInput: No tensor could be scores, or nothing says which of several.
    """
    scores = output if isinstance(output, Tensor) else _named(output)
    scores = _chosen(output, module, labels) if scores is None else scores
    if not scores.is_floating_point():
        kind = str(scores.dtype).removeprefix("torch.")
        raise BadInput(
            f"The model returned scores of type {kind}; expected floating-point numbers, such as the logits before an "
            f"argmax. Say what to read of them: {_READ}."
        )
    if scores.ndim == 1:
        scores = scores[:, None]
    if scores.ndim != 2:
        raise BadInput(
            f"The model returned scores of shape {tuple(scores.shape)}; expected [B, classes]. Say what to read of "
            f"them: {_READ}."
        )
    return scores


def _named(output: Any) -> Tensor | None:
    """Return the tensor of the first of `FIELDS` that an output has; None if it has none."""
    for name in FIELDS:
        value = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
        if isinstance(value, Tensor) and (name != "last_hidden_state" or value.ndim == 2):
            return value.flatten(1) if name == "pooler_output" else value  # a CNN's is [B, d, 1, 1]
    return None


def _chosen(output: Any, module: nn.Module | None, labels: int) -> Tensor:
    """Return the tensor that is the only one that can be scores, or that labels or the head speak for."""
    tensors = dict(_tensors(output))
    candidates = {name: tensor for name, tensor in tensors.items() if _can_be_scores(tensor)}
    if len({id(tensor) for tensor in candidates.values()}) == 1:
        return next(iter(candidates.values()))
    if not candidates and len(tensors) == 1 and isinstance(output, tuple | list):
        return next(iter(tensors.values()))  # its shape is reported
    if not candidates:
        raise BadInput(
            f"The model returned a {type(output).__name__} without 'logits'; expected a tensor [B, classes]. "
            f"Say what to read of it: {_READ}."
        )
    for width in _widths({_columns(tensor) for tensor in candidates.values()}, module, labels):
        fitting = [tensor for tensor in candidates.values() if _columns(tensor) == width]
        if len(fitting) == 1:
            return fitting[0]
    listed = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in candidates.items())
    raise BadInput(
        f"The model returned a {type(output).__name__} with {len(candidates)} tensors that could be scores ({listed}), "
        f"and nothing says which; expected one, or a field named 'logits'. Say which to read: {_READ}; or name the "
        "classes, cv.wrap(module, labels=[…]), of which there must be as many as one of them has columns."
    )


def _widths(candidates: Collection[int], module: nn.Module | None, labels: int) -> Iterator[int]:
    """Yield the numbers of columns that scores have by labels, else by the head and by layers that lead to them."""
    if labels:
        yield labels
        return
    if module is None:
        return
    outputs = head_outputs(module)
    if outputs is not None:
        yield outputs
    linear = {(part.in_features, part.out_features) for part in module.modules() if isinstance(part, nn.Linear)}
    # A head computes the scores from the features that are returned next to them, and no layer leads back.
    for width in candidates:
        others = [other for other in candidates if other != width]
        if others and all((other, width) in linear and (width, other) not in linear for other in others):
            yield width


def _columns(tensor: Tensor) -> int:
    return int(tensor.shape[1]) if tensor.ndim == 2 else 1


def _can_be_scores(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and (tensor.ndim == 2 or (tensor.ndim == 1 and len(tensor) > 0))


def _tensors(output: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in nested tuples, lists, mappings and dataclasses, each with its place: "1", "aux.logits"."""
    if isinstance(output, Tensor):
        yield name, output
        return
    if isinstance(output, Mapping):
        items = list(output.items())
    elif isinstance(output, tuple | list):
        items = list(zip(getattr(output, "_fields", range(len(output))), output, strict=True))
    elif dataclasses.is_dataclass(output):
        items = [(field.name, getattr(output, field.name)) for field in dataclasses.fields(output)]
    else:
        items = list(getattr(output, "__dict__", {}).items())
    for key, value in items:
        if isinstance(value, Tensor | Mapping | tuple | list) or dataclasses.is_dataclass(value):
            yield from _tensors(value, f"{name}.{key}" if name else str(key))
