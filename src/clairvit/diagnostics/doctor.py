"""The verb `doctor`: run every check on a model and say what to do."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from clairvit.diagnostics.examination import FEW_IMAGES, Examination, steps
from clairvit.diagnostics.inspection import buffers_restored, snapshot
from clairvit.diagnostics.report import Check, Diagnosis
from clairvit.errors import ClairError, WrongType
from clairvit.methods.spec import MethodSpec, resolve_method
from clairvit.models.coerce import LabelledImages, as_images
from clairvit.models.image_files import DEMO
from clairvit.models.images import prepare
from clairvit.models.load import load
from clairvit.models.model import Model
from clairvit.models.wrap import wrap
from clairvit.perturbation.progress import report_progress


def doctor(
    model: str | Model | nn.Module,
    images: Any = None,
    *,
    method: str | MethodSpec | None = None,
    seed: int = 0,
) -> Diagnosis:
    """Check whether a model can be explained as it is, and how far its explanations can be trusted.

    Args:
        model: A name for `cv.load`, a `cv.Model`, or an `nn.Module`, which is wrapped with what it states itself.
        images: A path, PIL image, array or tensor, or a list of these; None is the built-in photo. Give six or more of
            the kind that the model was trained on, so that "deletion better than random" can be tested.
        method: The method whose maps are compared with random ones; None is attnlrp+plus, or another that applies.
        seed: Of the random maps.

    Returns:
        A `Diagnosis` with one `Check` (pass, warn, fail or skip) per line. An exception inside a check is a failure of
        that check; the others go on. The model is bit for bit what it was, also after errors.

    Raises:
        BadInput: An image that cannot be read, or an unknown method.
        UnknownName, ModelUnavailable: A name that `cv.load` cannot load.

    Example:
        >>> import clairvit as cv
        >>> print(cv.doctor("pets").ok)
        True
    """
    if method is not None:
        method = resolve_method(method).text  # a misspelt method is refused before the work
    images = as_images(images)
    if isinstance(images, LabelledImages):
        images = list(images)
    given = [images] if images is not None and not isinstance(images, list | tuple | torch.Tensor) else images
    if isinstance(model, nn.Module):
        try:
            model = wrap(model)
        except ClairError as error:
            return Diagnosis(type(model).__name__, (), (Check("model", "fail", str(error)),))
    subject = load(model) if isinstance(model, str) else model
    if not isinstance(subject, Model):
        raise WrongType(
            f"doctor got a {type(subject).__name__}; expected a cv.Model, a torch.nn.Module or a name such as 'pets'."
        )
    with buffers_restored(subject.module), torch.random.fork_rng(devices=_cuda_devices(subject)):
        return _examined(subject, DEMO if given is None else given, method, seed)


def _examined(model: Model, images: Any, method: str | None, seed: int) -> Diagnosis:
    """Run all checks, one after the other."""
    every = images if isinstance(images, list | tuple | torch.Tensor) else [images]
    if isinstance(every, torch.Tensor) and every.ndim == 3:
        every = every[None]
    batch = prepare(every[:FEW_IMAGES], _readable(model))
    examination = Examination(model, batch, every, method, seed, snapshot(model.module))
    order = steps()
    with report_progress("checks", len(order)) as tell:
        for step in order:
            examination.checks[step.name] = step.run(examination)
            tell(1)
    return Diagnosis(model.name, _names(every, batch.names), tuple(examination.checks.values()))


def _readable(model: Model) -> Model:
    """Return the model, or one that images can be read for where its tensors have no values; 'device' names those."""
    tensors = itertools.chain(model.module.parameters(), model.module.buffers())
    return replace(model, module=nn.Identity()) if any(tensor.is_meta for tensor in tensors) else model


def _names(images: Any, first: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of all images; beyond the few that were prepared, their paths or numbers."""
    rest = range(len(first), len(images))
    return (*first, *(str(images[k]) if isinstance(images[k], str) else f"image {k + 1}" for k in rest))


def _cuda_devices(model: Model) -> list[int]:
    device = model.device
    return [device.index if device.index is not None else torch.cuda.current_device()] if device.type == "cuda" else []
