"""Output source: what the last operations of a forward pass say about its output, class scores or an embedding.

From the output back to the pixels, operations that keep the meaning of a column (a scale, an activation, a mean, a
choice of tokens) are passed over. The first that does not decides: a linear layer gives class scores, unless it is
named as a projection; a norm, a division by a length and a sum of a residual stream give features.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from clairvit.errors import BadInput
from clairvit.models.activation import output_columns
from clairvit.models.model import Model
from clairvit.tracing import ops
from clairvit.tracing.recorders.base import Op, Recorder

Meaning = Literal["classes", "embedding", "unknown"]
HEADS = frozenset({"head", "heads", "fc", "classifier", "logits", "cls_head", "mlp_head", "classification_head"})
CLASS_WORDS = ("class", "cls", "logit", "head")  # what the last part of the name of a head contains: DETR's class_embed
PROJECTIONS = ("proj", "embed")  # what the last part of the name of a projection contains
UNIT = 1e-3  # how far a length or a sum that is 1 may be from it: half precision rounds it so
_PRODUCTS = ops.MATRIX_PRODUCTS | {ops.LINEAR, ops.BIASED_MATMUL}
_ADDED_PRODUCTS = (torch.addmm, Tensor.addmm, torch.mm, Tensor.mm)
_NORMS = frozenset({ops.NORM, ops.GROUP_NORM})


class OutputSource(NamedTuple):
    """What an output means, and the words for what that was read from."""

    meaning: Meaning
    reason: str = ""


UNKNOWN = OutputSource("unknown")
CLASSES = OutputSource("classes")


@dataclass(eq=False)
class _Value:
    """A tensor of the forward pass: the operation that gave it, and its inputs."""

    function: Callable[..., Any] | None  # None: the pixels, a parameter or a constant
    inputs: tuple[_Value, ...]
    tensor: Tensor
    sees_image: bool
    name: str = ""  # of a parameter or buffer


class OutputSourceFinder(Recorder):
    """Keep which operation gave each tensor of one forward pass of one image."""

    kinds = None

    def __init__(self, module: nn.Module, pixels: Tensor) -> None:
        self._names = {id(tensor): name for name, tensor in (*module.named_parameters(), *module.named_buffers())}
        self._values: dict[int, _Value] = {id(pixels): _Value(None, (), pixels, sees_image=True)}

    def on_op(self, op: Op) -> None:
        outputs = list(_tensors(op.output))
        if outputs:
            arguments = _of_values(op.function, op.args, op.kwargs)
            inputs = tuple(self._value(tensor) for tensor in _tensors(arguments))
            sees_image = any(value.sees_image for value in inputs)
            for tensor in outputs:
                self._values[id(tensor)] = _Value(op.function, inputs, tensor, sees_image)

    def _value(self, tensor: Tensor) -> _Value:
        value = self._values.get(id(tensor))
        return (
            _Value(None, (), tensor, sees_image=False, name=self._names.get(id(tensor), "")) if value is None else value
        )

    def source(self, scores: Tensor) -> OutputSource:
        """Return what the scores [1, C] mean, by the operations that gave them."""
        value = self._values.get(id(scores))
        return UNKNOWN if value is None else _source(value)


def check_output(model: Model, source: OutputSource, scores: Tensor) -> tuple[str, ...]:
    """Return a note if nothing says that the scores [1, C] are those of classes; raise BadInput for an embedding.

    It is for modules whose user states neither labels nor an activation, and whose outputs count as class scores.
    """
    columns = int(scores.shape[-1])
    if source.meaning == "embedding":
        raise BadInput(
            f"{model.name} seems to return an embedding, not class scores: its {columns} numbers come from "
            f"{source.reason}. Wrap it as what it is: cv.wrap(module, classifier=False) for an embedding, with "
            "cv.Similar(image) or a function as the target; cv.wrap(module, classifier=True) or labels=[…] for class "
            "scores."
        )
    if source.meaning == "classes" or columns == 1 or output_columns(model.module) == columns:
        return ()
    note = (
        f"Nothing states what the {columns} outputs of the model are: they were read as class scores, through a "
        "softmax. For an embedding give cv.wrap(module, classifier=False), else labels= or activation=."
    )
    return (note,)


def _of_values(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the arguments whose values an operation reads, not those of which it takes type or shape alone."""
    name = getattr(function, "__name__", "")
    if name.endswith("_like") or name.startswith("new_"):
        return ()
    return args[:1] if name in ("to", "type_as", "expand_as", "view_as", "reshape_as") else (args, dict(kwargs))


def _tensors(values: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested arguments or outputs."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, dict):
        yield from _tensors(tuple(values.values()))
    elif isinstance(values, tuple | list):
        for value in values:
            yield from _tensors(value)


def _source(value: _Value) -> OutputSource:
    """Return what a tensor means."""
    seen = set()
    while True:
        inputs = [item for item in value.inputs if item.sees_image]
        kind = ops.kind_of(value.function)
        if not inputs or id(value) in seen:
            return UNKNOWN
        seen.add(id(value))
        if kind in _PRODUCTS or value.function in _ADDED_PRODUCTS:
            return _of_product(value) if len(inputs) == 1 else UNKNOWN
        if kind in _NORMS:
            return OutputSource("embedding", "a normalisation")
        if kind == ops.NORMALIZE:
            return OutputSource("embedding", "a vector divided by its length")
        numerator = _numerator(value, kind, inputs)
        if numerator is not None:
            source = _of_quotient(value.tensor)
            if source is not None:
                return source
            value = numerator
            continue
        if kind in ops.CONVOLUTIONS:
            return CLASSES if HEADS & set(_parts(_weight_name(value))) else UNKNOWN
        if len(inputs) > 1 and kind in ops.SUMS:
            return _of_sum(inputs)
        if len(inputs) > 1 and kind in ops.JOINS:
            return _agreed([_source(item) for item in inputs])
        if len(inputs) > 1 and len({id(item) for item in inputs}) > 1:
            return UNKNOWN
        value = inputs[0]


def _of_product(value: _Value) -> OutputSource:
    """Return what a product with fixed weights means, by their name."""
    name = _weight_name(value)
    parts = _parts(name)
    projects = "pooler" in parts or any(word in part for part in parts[-1:] for word in PROJECTIONS)
    is_head = HEADS & set(parts) or any(word in parts[-1] for word in CLASS_WORDS if parts)
    if is_head or not projects:
        return CLASSES
    return OutputSource("embedding", f"the projection '{name}'")


def _weight_name(value: _Value) -> str:
    """Return the name of the layer, or of the bare parameter, that a product or convolution multiplies by."""
    names = [name for item in value.inputs if not item.sees_image for name in _names(item)]
    name = next((name for name in names if not name.endswith("bias")), "")
    return name.removesuffix(".weight")


def _names(value: _Value) -> list[str]:
    """Return the names of the parameters that a constant was made of, such as those of a transposed weight."""
    return [value.name] if value.name else [name for item in value.inputs for name in _names(item)]


def _parts(name: str) -> list[str]:
    """Return the parts of a layer's name without the numbers of a sequence: "head.0" -> ["head"]."""
    return [part for part in name.lower().split(".") if part and not re.fullmatch(r"\d+", part)]


def _numerator(value: _Value, kind: str | None, inputs: list[_Value]) -> _Value | None:
    """Return what is divided by a number that depends on all its entries, as in x / ‖x‖; None if nothing is."""
    width = value.tensor.shape[-1] if value.tensor.ndim else 1
    if kind not in (ops.DIVIDE, ops.MULTIPLY) or len(inputs) != 2 or width == 1:
        return None
    wide = [item for item in inputs if item.tensor.ndim and item.tensor.shape[-1] == width]
    return wide[0] if len(wide) == 1 else None


def _of_quotient(values: Tensor) -> OutputSource | None:
    """Return what rows [..., C] mean that were divided by a number each; None for a softmax that is written out."""
    values = values.detach().double()
    length, spread = values.norm(dim=-1), values.square().mean(-1).sqrt()
    if bool((values >= 0).all()) and _are_one(values.sum(-1)):
        return None
    if _are_one(length):
        return OutputSource("embedding", "a vector divided by its length")
    return OutputSource("embedding", "a normalisation") if _are_one(spread) else UNKNOWN


def _are_one(values: Tensor) -> bool:
    return bool(((values - 1).abs() < UNIT).all())


def _of_sum(inputs: list[_Value]) -> OutputSource:
    """Return what a sum means: features if it is a step x + f(x) of a residual stream, else what its terms agree on."""
    sources = [_source(item) for item in inputs]
    for index, item in enumerate(inputs):
        others = [other for other in inputs if other is not item]
        if any(_depends_on(other, item) for other in others):
            through_head = sources[index].meaning == "classes" and HEADS & set(_parts(_layer_of(item)))
            return _agreed(sources) if through_head else OutputSource("embedding", "a residual sum x + f(x)")
    return _agreed(sources)


def _layer_of(value: _Value) -> str:
    """Return the name of the linear layer that a value comes from through operations of a single input."""
    while True:
        inputs = [item for item in value.inputs if item.sees_image]
        if ops.kind_of(value.function) in _PRODUCTS or len(inputs) != 1:
            return _weight_name(value)
        value = inputs[0]


def _depends_on(value: _Value, other: _Value) -> bool:
    """Return whether a value was computed from another."""
    pending, seen = [value], set()
    while pending:
        item = pending.pop()
        if item is other:
            return True
        if id(item) not in seen:
            seen.add(id(item))
            pending += item.inputs
    return False


def _agreed(sources: list[OutputSource]) -> OutputSource:
    """Return what all terms of a sum, or parts of a row, mean; unknown where they differ."""
    return sources[0] if len({source.meaning for source in sources}) == 1 else UNKNOWN
