"""pytorch-grad-cam: its targets (`ClassifierOutputTarget(281)`, your own) as targets of `cv.explain`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from clairvit.errors import BadInput

GradCAMTarget = Callable[[Any], Tensor]  # a function of one image's output to a number


def as_target(target: GradCAMTarget, name: str | None = None) -> Callable[[Tensor], Tensor]:
    """Return a target for `cv.explain` of a target of pytorch-grad-cam.

    Args:
        target: A callable of one image's output, such as `ClassifierOutputTarget(281)`.
        name: The title in figures; its class and fields unless given.

    Returns:
        A function of the outputs [B, …] to [B], which `target=` takes.

    Raises:
        BadInput: Something that cannot be called, or that returns no number per image.

    Example:
        >>> import clairvit as cv
        >>> from clairvit.integrations.grad_cam import as_target
        >>> class ClassifierOutputTarget:  # as in pytorch-grad-cam
        ...     def __init__(self, category):
        ...         self.category = category
        ...     def __call__(self, model_output):
        ...         return model_output[self.category]
        >>> cv.explain("pets", "demo", "ixg", target=as_target(ClassifierOutputTarget(5))).targets
        ('ClassifierOutputTarget(category=5)',)
    """
    if not callable(target):
        raise BadInput(f"{target!r} is no target; expected a callable of one image's output, or a class for target=.")

    def of_batch(outputs: Tensor) -> Tensor:
        values = [torch.as_tensor(target(row)) for row in outputs]
        if any(value.numel() != 1 for value in values):
            raise BadInput(
                f"{of_batch.__name__} returned values of shape {list(values[0].shape)} for one image; expected a "
                "number. Sum or average them."
            )
        return torch.stack([value.reshape(()) for value in values])

    of_batch.__name__ = name or _title(target)
    return of_batch


def as_targets(targets: Sequence[GradCAMTarget]) -> list[Callable[[Tensor], Tensor]]:
    """Return the targets of a list, one per image, as pytorch-grad-cam takes it."""
    return [as_target(target) for target in targets]


def _title(target: GradCAMTarget) -> str:
    """Return "ClassifierOutputTarget(category=5)"; tensors among the fields are left out."""
    if hasattr(target, "__name__"):
        return str(target.__name__)
    plain = {key: value for key, value in vars(target).items() if isinstance(value, int | float | str)}
    return f"{type(target).__name__}({', '.join(f'{key}={value!r}' for key, value in plain.items())})"
