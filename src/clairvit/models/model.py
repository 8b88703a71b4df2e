"""Model: a module with its preprocessing, labels and (if the user knows better) its layout."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from clairvit.errors import BadInput
from clairvit.models.activation import Activation, activation_for, check_activation, probabilities
from clairvit.models.layout import Layout


@dataclass(frozen=True)
class Preprocess:
    """Resize, centre crop to `size` (rows, columns), then (x - mean) / std with x in 0..1.

    `resize` is the short side, or a box (rows, columns) that the image is made to cover, or to fill exactly when
    `keep_ratio` is False; None is just enough to cover `size`.

    Args:
        size: Rows and columns of the model's input.
        mean: Of red, green and blue, for pixels in 0..1.
        std: Of red, green and blue, for pixels in 0..1.
        resize: The short side, or a box (rows, columns) to cover; None: just enough to cover `size`.
        interpolation: nearest, lanczos, bilinear, bicubic, box or hamming.
        keep_ratio: False: the image is squeezed to `resize` exactly.

    Example:
        >>> import clairvit as cv
        >>> cv.Preprocess(size=(96, 96)).resize is None
        True
    """

    size: tuple[int, int] = (224, 224)  # rows, columns
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)
    resize: int | tuple[int, int] | None = None
    interpolation: str = "bicubic"
    keep_ratio: bool = True  # False: SigLIP and most transformers models squash the image to a square


@dataclass(frozen=True, eq=False)
class Model:
    """What every verb takes. `module` stays the user's own: nothing here changes it.

    Args:
        module: The user's own module; nothing here changes it.
        name: The name in results.
        preprocess: Resize, crop, mean and std.
        labels: Class names in class order.
        layout: Grid, prefix tokens and pooling; None: inferred from the first trace.
        classifier: False: the output is an embedding, so there is no predicted class.
        activation: What turns scores into probabilities: softmax, sigmoid, or raw (nothing does).
        activation_reason: What the activation was read from; "" where nothing was looked at.
        activated: The module applies its activation itself.
        assumptions: Notes about preprocessing that nothing states, shown with results.
        wrappers: What `cv.wrap` took off the module: "torch.compile", "DataParallel", …

    Example:
        >>> import clairvit as cv
        >>> model = cv.load("pets")
        >>> model.preprocess.size, len(model.labels), model.activation
        ((224, 224), 37, 'softmax')
    """

    module: nn.Module
    name: str
    preprocess: Preprocess = field(default_factory=Preprocess)
    labels: tuple[str, ...] = ()
    layout: Layout | None = None  # None: inferred from the first trace
    classifier: bool = True  # False: the output is an embedding, so there is no predicted class
    activation: Activation = "softmax"  # what turns scores into probabilities; "raw": nothing does
    activation_reason: str = ""  # what the activation was read from; "" where nothing was looked at
    activated: bool = False  # the module applies its activation itself: raw scores that are probabilities already
    assumptions: tuple[str, ...] = ()  # notes about preprocessing that nothing states, shown with results
    wrappers: tuple[str, ...] = ()  # what `wrap` took off the module: "torch.compile", "DataParallel", …

    def __post_init__(self) -> None:
        check_activation(self.activation)
        if not self.classifier and self.activation == "softmax":  # the default; an embedding has no classes
            object.__setattr__(self, "activation", "raw")

    def __repr__(self) -> str:
        """Return one line; `model.module` prints the layers."""
        rows, columns = self.preprocess.size
        classes = f"{len(self.labels)} classes" if self.labels else "no class names"
        kind = f"{classes}, {self.activation}" if self.classifier else "embedding"
        return (
            f"Model({self.name!r}, {type(self.module).__name__}, {rows}×{columns}, {kind}, {self.device}, {self.dtype})"
        )

    @property
    def device(self) -> torch.device:
        return self._like.device

    @property
    def dtype(self) -> torch.dtype:
        return self._like.dtype

    @property
    def _like(self) -> Tensor:
        for tensor in itertools.chain(self.module.parameters(), self.module.buffers()):
            if tensor.is_floating_point():
                return tensor
        return torch.empty(0)

    def activation_of(self, logits: Tensor) -> Activation:
        """Return what logits [..., C] of this model mean: a softmax over a single column would be 1, so that is raw."""
        return activation_for(self.activation, logits.shape[-1])

    def probabilities(self, logits: Tensor) -> Tensor | None:
        """Return the probabilities of logits [..., C], in their shape; None where the model's scores are raw.

        Args:
            logits: What `Model.logits` returns. Half precision is widened to float32.

        Returns:
            softmax(logits) or sigmoid(logits), by `Model.activation`; None for "raw".

        Example:
            >>> import clairvit as cv, torch
            >>> model = cv.wrap(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 3)), activation="sigmoid")
            >>> model.probabilities(torch.tensor([[0.0, 0.0, 0.0]]))
            tensor([[0.5000, 0.5000, 0.5000]])
        """
        return probabilities(logits, self.activation)

    def logits(self, pixels: Tensor) -> Tensor:
        """[B, 3, H, W] -> [B, C], whatever the module wraps its output in."""
        scores = first_scores(self.module(pixels))
        if len(scores) != len(pixels):
            raise BadInput(
                f"{self.name} returned scores of shape {list(scores.shape)} for {len(pixels)} images; expected one row "
                "for each image. Look for squeeze() in its forward, then cv.wrap it again."
            )
        return scores


def check_materialised(module: nn.Module, name: str) -> None:
    """Refuse a module with tensors on the meta device, which have a shape and no numbers."""
    for key, tensor in itertools.chain(module.named_parameters(), module.named_buffers()):
        if tensor.is_meta:
            raise BadInput(
                f"{name} is on the meta device ('{key}' has a shape and no numbers); give it weights first: "
                "module.to_empty(device='cpu'), then module.load_state_dict(weights)."
            )


def first_scores(output: Any) -> Tensor:
    """The class scores (or embedding) in a module's output: a tensor, a transformers output, a tuple or a mapping."""
    if isinstance(output, Tensor):
        scores = output
    else:
        for name in ("logits", "image_embeds", "pooler_output", "last_hidden_state"):
            value = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
            if isinstance(value, Tensor) and (name != "last_hidden_state" or value.ndim == 2):
                scores = value.flatten(1) if name == "pooler_output" else value  # a CNN's is [B, d, 1, 1]
                break
        else:
            tensors = [o for o in output if isinstance(o, Tensor)] if isinstance(output, tuple | list) else []
            if not tensors:
                raise BadInput(
                    f"The model returned a {type(output).__name__} without 'logits'; expected a tensor [B, classes]. "
                    "Wrap the module in one whose forward returns that tensor, then cv.wrap(it, …)."
                )
            scores = tensors[0]
    if scores.ndim == 1:
        scores = scores[:, None]
    if scores.ndim != 2:
        raise BadInput(
            f"The model returned scores of shape {tuple(scores.shape)}; expected [B, classes]. "
            "Wrap the module in one whose forward pools its output, then cv.wrap(it, …)."
        )
    return scores
