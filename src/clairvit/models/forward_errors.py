"""What the error of a module's forward pass means: an input that is missing, or a size that does not fit."""

from __future__ import annotations

import inspect

from torch import Tensor, nn

from clairvit.errors import Argument, Message
from clairvit.models.model import Model
from clairvit.models.readout import bound_inputs, unwrap_readout

_NAMED = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_FLAGS = ("output_", "return_", "use_", "labels", "interpolate_")  # inputs of transformers that hold no data
MOST_NAMED = 4  # optional inputs that a message lists


def forward_failure(model: Model, pixels: Tensor, error: Exception) -> tuple[str, str]:
    """Return what went wrong when a model ran on pixels [B, C, H, W], and what to do about it, one sentence each."""
    module = unwrap_readout(model.module)
    given = tuple(bound_inputs(model.module))
    required, optional = _further_inputs(module, given)
    cause = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
    if isinstance(error, TypeError) and required:
        were, them = ("it was", "it") if len(required) == 1 else ("they were", "them")
        finding = f"{model.name} needs {_quoted(required)} besides the image, and {were} not given ({cause})."
        return finding, f"Pass {them} by name: {_as_arguments(required)}, or model.with_inputs(…)."
    size = " × ".join(map(str, pixels.shape[2:]))
    images = f"{len(pixels)} {'images' if pixels.ndim == 4 else 'clips'}"
    kind = ("an image" if pixels.ndim == 4 else "a clip") if len(pixels) == 1 else images
    finding = f"{model.name} failed on {kind} of {size} pixels ({cause})."
    if "NoneType" in str(error) and optional:
        return finding, (
            f"Its forward was given the image alone, and also takes {_quoted(optional[:MOST_NAMED])}. If it needs "
            f"{'that' if len(optional) == 1 else 'one of them'}, pass it by name: {_as_arguments(optional[:1])}."
        )
    advice = (
        "If that is not a size it takes, pass tensors of the right size, or paths and PIL images: these are resized to "
        "cv.wrap(…, size=)."
    )
    return finding, Message(advice, also=[Argument("size")])


def _further_inputs(module: nn.Module, given: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """Return the inputs of forward besides the image that are not given: those without a default, those with None."""
    parameters = [item for item in inspect.signature(module.forward).parameters.values() if item.kind in _NAMED]
    others = [item for item in parameters[1:] if item.name not in given and not item.name.startswith(_FLAGS)]
    required = [item.name for item in others if item.default is item.empty]
    return required, [item.name for item in others if item.default is None]


def _quoted(names: list[str]) -> str:
    quoted = [f"'{name}'" for name in names]
    return quoted[0] if len(quoted) == 1 else f"{', '.join(quoted[:-1])} and {quoted[-1]}"


def _as_arguments(names: list[str]) -> str:
    items = ", ".join(f"'{name}': …" for name in names)
    return f"inputs={{{items}}}"
