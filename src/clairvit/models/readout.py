"""Readouts: modules that run the user's module and read a row of scores per image off whatever it returns.

A readout holds the user's module as it is and adds no parameters. All passes (traces, rule tables,
token dropping, metrics) run through it, so that what is explained is exactly what is read.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from clairvit.errors import BadInput, ClairError

if TYPE_CHECKING:
    from clairvit.models.model import Layout

IMAGE_INPUTS = ("pixel_values", "pixel_values_videos", "images", "image", "pixels", "x")  # names of forward's images


class Readout(nn.Module):
    """Read scores [B, C] off the output of a module by a function."""

    def __init__(self, module: nn.Module, function: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.module = module
        self.function = function

    def prepare(self, pixels: Tensor) -> None:
        """Find what must be known of the module before it runs on images of the size of `pixels` [1, 3, H, W]."""

    def read_layout(self, layout: Layout) -> Layout | None:
        """Return the layout of the tokens with the rows that the scores read; None: they are to be inferred."""
        return None

    def forward(self, pixels: Tensor) -> Tensor:
        """Return scores [B, C] of pixels [B, 3, H, W]."""
        scores = call_reader(self.function, self.module(pixels), len(pixels))
        return scores[:, None] if scores.ndim == 1 else scores


class SizedReadout(Readout):
    """Read scores [B, C] off the output by a function that is given the size of the images, too.

    A function of (output, (H, W)) reads places of the image, whatever the resolution of the output.
    """

    def __init__(self, module: nn.Module, function: Callable[[Any, tuple[int, int]], Tensor]) -> None:
        super().__init__(module, function)  # type: ignore[arg-type]

    def forward(self, pixels: Tensor) -> Tensor:
        """Return scores [B, C] of pixels [B, 3, H, W]."""
        function: Callable[[Any, tuple[int, int]], Tensor] = self.function  # type: ignore[assignment]
        size = (int(pixels.shape[-2]), int(pixels.shape[-1]))
        return call_reader(lambda output: function(output, size), self.module(pixels), len(pixels))


class BoundInputs(nn.Module):
    """Run a module on images together with other inputs.

    Inputs of one row are repeated for every image. Those with a row per image are of images whose number and order are
    known: they run by `for_row`, image by image, and never in a batch whose rows could be other images or variants.
    """

    def __init__(self, module: nn.Module, inputs: Mapping[str, Any]) -> None:
        super().__init__()
        self.module = module
        names, self.image_input = _forward_inputs(module)
        unknown = [] if names is None else [name for name in inputs if name not in names]
        if unknown:
            raise BadInput(
                f"{type(module).__name__} has no input '{unknown[0]}'; expected one of {', '.join(names or ())}."
            )
        rows = {name: len(value) for name, value in inputs.items() if _has_rows(value)}
        if len(set(rows.values())) > 1:
            listed = " and ".join(f"'{name}' has {count} rows" for name, count in rows.items())
            raise BadInput(f"The input {listed}; expected one row for all images, [1, …], or one for each image.")
        self.inputs = dict(inputs)
        self.rows = next(iter(rows.values()), None)  # None: one row for all images
        self._by_row: dict[int, BoundInputs] = {}

    def for_row(self, row: int) -> BoundInputs:
        """Return the module with the inputs of one image: always the same one, so that it is looked at once."""
        if row not in self._by_row:
            inputs = {name: value[row : row + 1] if _has_rows(value) else value for name, value in self.inputs.items()}
            self._by_row[row] = BoundInputs(self.module, inputs)
        return self._by_row[row]

    def check_count(self, images: int) -> None:
        """Raise BadInput unless inputs with a row per image have so many rows."""
        if self.rows not in (None, images):
            name = next(name for name, value in self.inputs.items() if _has_rows(value))
            raise BadInput(
                f"The input '{name}' has shape {list(self.inputs[name].shape)}, and there "
                f"{'is 1 image' if images == 1 else f'are {images} images'}; expected one row for all of them, [1, …], "
                f"or one for each, [{images}, …]."
            )

    def forward(self, pixels: Tensor) -> Any:
        """Return what the module returns for pixels [B, 3, H, W] and the other inputs."""
        if self.rows is not None:
            name = next(name for name, value in self.inputs.items() if _has_rows(value))
            raise BadInput(
                f"The input '{name}' has {self.rows} rows, one for each image, and this function runs all images with "
                f"the same inputs; expected one row, [1, …]. Run it image by image, with {name}[i : i + 1]."
            )
        inputs = {name: _for_images(value, pixels) for name, value in self.inputs.items()}
        if self.image_input is None:
            return self.module(pixels, **inputs)
        return self.module(**{self.image_input: pixels}, **inputs)


class HeadInput(nn.Module):
    """Run a module and return what its linear head is given, the embedding [B, d]."""

    def __init__(self, module: nn.Module, head: str) -> None:
        super().__init__()
        self.module = module
        self.head = head  # its name among the module's submodules

    def forward(self, pixels: Tensor) -> Tensor:
        """Return the input [B, d] of the head for pixels [B, 3, H, W]."""
        with linear_calls(self.module, (self.head,)) as calls:
            self.module(pixels)
        return calls[-1].input


@dataclass(frozen=True, eq=False)
class LinearCall:
    """One call of a linear layer in a forward pass."""

    name: str
    input: Tensor
    output: Tensor


@contextmanager
def linear_calls(module: nn.Module, names: Sequence[str]) -> Iterator[list[LinearCall]]:
    """Record the calls of named linear layers by this thread inside the block, in their order."""
    calls: list[LinearCall] = []
    thread = threading.get_ident()  # the user's own code may run the module in another one meanwhile

    def record(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            if threading.get_ident() == thread and args:
                calls.append(LinearCall(name, args[0], output))

        return hook

    hooks = [module.get_submodule(name).register_forward_hook(record(name)) for name in names]
    try:
        yield calls
    finally:
        for handle in hooks:
            handle.remove()


def evaluation_copy(module: nn.Module) -> nn.Module:
    """Return a module in evaluation mode: itself, or a copy that shares its tensors if it is in training mode.

    The user's module is never switched, so that other threads may trace or train it meanwhile.
    """
    if not any(part.training for part in module.modules()):
        return module
    tensors = itertools.chain(module.parameters(), module.buffers())
    return copy.deepcopy(module, {id(tensor): tensor for tensor in tensors}).eval()


class NextTokenScores(nn.Module):
    """Run a vision-language model on images and a fixed text, and read the scores [B, V] of the token after it."""

    def __init__(
        self,
        module: nn.Module,
        function: Callable[[Any], Tensor],
        *,
        pixel_inputs: Callable[[nn.Module, Tensor], Mapping[str, Tensor]],
        inputs: Mapping[str, Any],
        text: tuple[str, ...] = (),
    ) -> None:
        """Bind a text.

        Args:
            module: The vision-language model.
            function: Of its output for the last position: scores [B, V].
            pixel_inputs: Of the module and pixels [B, 3, H, W]: the inputs of forward that hold the images.
            inputs: The inputs of the text, with one row for all images.
            text: The tokens of the sequence that are no image tokens, in their order.
        """
        super().__init__()
        self.module = unwrap_readout(module)
        self.function = function
        self.pixel_inputs = pixel_inputs
        self.inputs = dict(inputs)
        self.text = text

    @property
    def token_stream(self) -> nn.Module:
        """The language model, whose blocks are the layers; the vision tower comes before them."""
        return self.module.get_decoder()  # type: ignore[operator, no-any-return]

    def forward(self, pixels: Tensor) -> Tensor:
        """Return the logits [B, V] at the last position of the text, for pixels [B, 3, H, W]."""
        inputs = {name: _for_images(value, pixels) for name, value in self.inputs.items() if name != "position_ids"}
        if "position_ids" in self.inputs:  # [3, 1, N]
            inputs["position_ids"] = self.inputs["position_ids"].to(pixels.device).expand(-1, len(pixels), -1)
        images = self.pixel_inputs(self.module, pixels)
        # Not `call_reader`: where tokens are dropped, one image makes a batch of variants.
        return self.function(self.module(**images, **inputs, use_cache=False, logits_to_keep=1))


_WRAPPERS = (Readout, BoundInputs, HeadInput, NextTokenScores)


def unwrap_readout(module: nn.Module) -> nn.Module:
    """Return the user's module inside readouts and bound inputs."""
    while isinstance(module, _WRAPPERS):
        module = module.module
    return module


def bound_inputs(module: nn.Module) -> Mapping[str, Any]:
    """Return the inputs next to the image that the user's module is given, by name."""
    inputs: dict[str, Any] = {}
    while isinstance(module, _WRAPPERS):
        inputs |= module.inputs if isinstance(module, BoundInputs | NextTokenScores) else {}
        module = module.module
    return inputs


def token_stream(module: nn.Module) -> nn.Module | None:
    """Return the part of a module whose blocks are the layers, where a readout says so; None: all of it."""
    while isinstance(module, _WRAPPERS):
        if isinstance(module, NextTokenScores):
            return module.token_stream
        module = module.module
    return None


def readout_text(module: nn.Module) -> tuple[str, ...]:
    """Return the tokens of the text that a readout puts next to the image tokens, in their order; () without one."""
    while isinstance(module, _WRAPPERS):
        if isinstance(module, NextTokenScores):
            return module.text
        module = module.module
    return ()


def call_reader(function: Callable[[Any], Tensor], output: Any, count: int) -> Tensor:
    """Return what a function reads off the output for `count` images; raise BadInput unless that is [B] or [B, C]."""
    try:
        scores = function(output)
    except (ClairError, torch.OutOfMemoryError):  # a message of ours, and what callers halve their batches for
        raise
    except Exception as error:  # the user's own code may raise anything
        raise BadInput(
            f"The target function failed on what the model returned, {describe_output(output)} "
            f"({type(error).__name__}: {error}); expected a function of it that returns one number per image."
        ) from error
    if isinstance(scores, Tensor) and scores.ndim == 0 and count == 1:
        scores = scores[None]
    if not isinstance(scores, Tensor) or scores.ndim not in (1, 2) or len(scores) != count:
        returned = f"shape {list(scores.shape)}" if isinstance(scores, Tensor) else f"a {type(scores).__name__}"
        raise BadInput(
            f"The target function returned {returned} for {count} image{'s' * (count != 1)} of which the model "
            f"returned {describe_output(output)}; expected a tensor [{count}], one number per image."
        )
    return scores


def describe_output(output: Any) -> str:
    """Return what a module returned in a few words: its type and the shapes of its tensors."""
    if isinstance(output, Tensor):
        return f"a tensor {list(output.shape)}"
    items = dict(output.items()) if isinstance(output, Mapping) else {}
    if not items and isinstance(output, tuple | list):
        items = {str(index): value for index, value in enumerate(output)}
    if not items:
        items = dict(getattr(output, "__dict__", {}))
    shapes = [f"{name} {list(value.shape)}" for name, value in items.items() if isinstance(value, Tensor)]
    return f"a {type(output).__name__}" + (f" with {', '.join(shapes[:6])}" if shapes else "")


def _forward_inputs(module: nn.Module) -> tuple[tuple[str, ...] | None, str | None]:
    """Return the inputs of forward (None: any) and the one that takes images (None: the first positional one)."""
    parameters = inspect.signature(module.forward).parameters
    kinds = {parameter.kind for parameter in parameters.values()}
    names = None if inspect.Parameter.VAR_KEYWORD in kinds else tuple(parameters)
    return names, next((name for name in IMAGE_INPUTS if name in parameters), None)


def _has_rows(value: Any) -> bool:
    """Return whether an input has a row per image."""
    return isinstance(value, Tensor) and value.ndim > 0 and len(value) != 1


def _for_images(value: Any, pixels: Tensor) -> Any:
    """Return an input for all images of a batch, on their device; floats in their dtype."""
    if not isinstance(value, Tensor):
        return value
    value = value.to(pixels) if value.is_floating_point() else value.to(pixels.device)
    return value.expand(len(pixels), *value.shape[1:]) if value.ndim else value
