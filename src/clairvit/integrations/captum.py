"""captum: a method as an object with `.attribute(inputs, target)`, for captum's metrics, NoiseTunnel and pictures."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, ParamSpec, TypeVar

import torch
from torch import Tensor

from clairvit.errors import BadInput
from clairvit.methods.explain import explain
from clairvit.methods.spec import MethodSpec, resolve_method
from clairvit.models.coerce import ModelLike, as_model
from clairvit.models.model import Model

P = ParamSpec("P")
R = TypeVar("R")


def _with_wrapped(function: Callable[P, R]) -> Callable[P, R]:
    """Return the function with `__wrapped__`, by which captum's NoiseTunnel calls methods."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return function(*args, **kwargs)

    return call


class ClairAttribution:
    """A method in the shape of captum's `Attribution`.

    Args:
        model: A `cv.Model`, a module or a name.
        method: A method string or spec; None is the default method for the model.
        shape: "input" gives each patch's relevance to its pixels and channels in equal parts, [B, C, H, W], so that
            sums are kept; "grid" gives the map itself, [B, 1, rows, cols].
        **options: Further arguments of `cv.explain`: seed, score, options of the method.

    Example:
        >>> import torch
        >>> import clairvit as cv
        >>> from clairvit.integrations.captum import ClairAttribution
        >>> pixels = torch.zeros(2, 3, 224, 224)
        >>> ClairAttribution(cv.load("pets"), "ixg").attribute(pixels, target=[3, 5]).shape
        torch.Size([2, 3, 224, 224])
    """

    def __init__(
        self,
        model: ModelLike,
        method: str | MethodSpec | None = None,
        *,
        shape: Literal["input", "grid"] = "input",
        **options: Any,
    ) -> None:
        if shape not in ("input", "grid"):
            raise BadInput(f"shape={shape!r}; expected 'input' or 'grid'.")
        self.model: Model = as_model(model, torch.zeros(1))
        self.method = None if method is None else resolve_method(method)
        self.shape = shape
        self.options = options

    @property
    def forward_func(self) -> Callable[[Tensor], Tensor]:
        """The module, as captum calls what is explained."""
        module: Callable[[Tensor], Tensor] = self.model.module
        return module

    @property
    def multiplies_by_inputs(self) -> bool:
        """False: captum must not divide by the inputs."""
        return False

    def has_convergence_delta(self) -> bool:
        """Return False: `attribute` takes no return_convergence_delta."""
        return False

    @_with_wrapped
    def attribute(
        self, inputs: Tensor | tuple[Tensor, ...], target: Any = None, additional_forward_args: Any = None
    ) -> Tensor | tuple[Tensor, ...]:
        """Return the attribution of preprocessed images.

        Args:
            inputs: [B, C, H, W], as the module takes them; or a tuple of one such tensor, as captum passes it.
            target: One class, a class per image (list or tensor [B]), or None for the predicted ones.
            additional_forward_args: None; the module takes images only.

        Returns:
            [B, C, H, W], or [B, 1, rows, cols] for shape="grid"; a tuple of it if the inputs were one.

        Raises:
            BadInput: Several inputs, further arguments, or something that is no batch of images.
        """
        pixels = inputs[0] if isinstance(inputs, tuple) and len(inputs) == 1 else inputs
        if not isinstance(pixels, Tensor) or pixels.ndim != 4 or additional_forward_args is not None:
            raise BadInput(
                "attribute takes one float tensor [B, C, H, W] and no additional_forward_args; for models of several "
                "inputs use cv.explain(model, images, inputs={…})."
            )
        explanation = explain(self.model, pixels.detach(), self.method, class_targets(target), **self.options)
        maps = explanation.maps.to(pixels)[:, None]  # [B, 1, rows, cols]
        attributions = maps if self.shape == "grid" else spread_over_pixels(maps[:, 0], pixels.shape)
        return (attributions,) if isinstance(inputs, tuple) else attributions


def class_targets(target: Any) -> Any:
    """Return captum's target as `cv.explain` takes it: tensors become numbers."""
    if isinstance(target, Tensor):
        return target.item() if target.ndim == 0 or target.numel() == 1 else [int(index) for index in target.flatten()]
    return target


def spread_over_pixels(maps: Tensor, shape: torch.Size) -> Tensor:
    """Return [B, C, H, W]: each cell's value in equal parts on its pixels and channels, so that sums are kept."""
    channels, sides = shape[1], shape[2:]
    cells = [
        torch.div(torch.arange(side, device=maps.device) * count, side, rounding_mode="floor")
        for side, count in zip(sides, maps.shape[1:], strict=True)
    ]  # the cell of each row and column of pixels
    pixels = [torch.bincount(cell, minlength=count) for cell, count in zip(cells, maps.shape[1:], strict=True)]
    shares = maps / (pixels[0][:, None] * pixels[1] * channels)
    return shares[:, cells[0]][:, :, cells[1]][:, None].expand(shape).contiguous()
