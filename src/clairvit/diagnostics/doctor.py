"""doctor(model): run every check on a model and report findings and advice."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from clairvit._progress import report_progress
from clairvit.diagnostics.context import MAX_IMAGES, DoctorContext, registered_checks
from clairvit.diagnostics.inspection import buffers_restored, snapshot
from clairvit.diagnostics.report import Check, Diagnosis
from clairvit.errors import ClairError, WrongType
from clairvit.methods.spec import MethodSpec, resolve_method
from clairvit.models.coerce import LabelledImages, as_images
from clairvit.models.image_files import DEMO
from clairvit.models.images import prepare
from clairvit.models.load import load
from clairvit.models.model import Model
from clairvit.models.submodules import compiled_in_place
from clairvit.models.wrap import wrap


def doctor(
    model: str | Model | nn.Module,
    images: Any = None,
    *,
    method: str | MethodSpec | None = None,
    seed: int = 0,
    inputs: Mapping[str, Any] | None = None,
) -> Diagnosis:
    """Check whether a model can be explained as it is, and how far its explanations can be trusted.

    Args:
        model: A name for `cv.load`, a `cv.Model`, or an `nn.Module`, which is wrapped with what it states itself.
        images: A path, PIL image, array or tensor, or a list of these; None is the built-in photo. Give six or more of
            the kind that the model was trained on, so that "deletion better than random" can be tested.
        method: The method whose maps are compared with random ones; None is attnlrp+plus, or another that applies.
        seed: Seed of the random maps.
        inputs: As in `cv.explain`. Of inputs with a row per image, all checks but that of deletion take the first image
            alone, with its row.

    Returns:
        A `Diagnosis` with one `Check` (pass, warn, fail or skip) per line. An exception inside a check is a failure of
        that check; the others still run. The model is bit-identical afterwards, also after errors.

    Raises:
        BadInput: An image that cannot be read, or an unknown method.
        UnknownName, ModelUnavailable: A name that `cv.load` cannot load.

    Example:
        >>> import clairvit as cv
        >>> print(cv.doctor("pets").ok)
        True
    """
    spec = None if method is None else resolve_method(method)  # an unknown one is refused before any check runs
    images = as_images(images)
    if isinstance(images, LabelledImages):
        images = list(images)
    if isinstance(model, nn.Module):
        try:
            model = wrap(model)
        except ClairError as error:
            return Diagnosis(type(model).__name__, (), (Check("model", "fail", str(error)),))
    loaded = load(model) if isinstance(model, str) else model
    if not isinstance(loaded, Model):
        raise WrongType(
            f"doctor got a {type(loaded).__name__}; expected a cv.Model, a torch.nn.Module or a name such as 'pets'."
        )
    loaded = loaded.with_inputs(**(inputs or {}))
    with buffers_restored(loaded.module), torch.random.fork_rng(devices=_cuda_devices(loaded)):
        return _run_checks(loaded, DEMO if images is None else images, spec, seed)


def _run_checks(model: Model, images: Any, method: MethodSpec | None, seed: int) -> Diagnosis:
    """Run all checks in their order."""
    all_images = images if isinstance(images, list | tuple | torch.Tensor) else [images]
    if isinstance(all_images, torch.Tensor) and all_images.ndim == 3:
        all_images = all_images[None]
    model.check_input_rows(len(all_images))
    batch = prepare(all_images[: 1 if model.has_input_rows else MAX_IMAGES], _without_obstacles(model))
    one = model.for_row(0)
    context = DoctorContext(one, model, batch, all_images, method, seed, snapshot(one.module))
    checks = registered_checks()
    with report_progress("checks", len(checks)) as advance:
        for registered in checks:
            context.checks[registered.name] = registered.run(context)
            advance(1)
    return Diagnosis(model.name, _image_names(all_images, batch.names), tuple(context.checks.values()))


def _without_obstacles(model: Model) -> Model:
    """Return the model, with an identity as its module if no images are prepared for that: a check reports it.

    'device' fails for a module on the meta device, 'compile' for one that was compiled in place.
    """
    tensors = itertools.chain(model.module.parameters(), model.module.buffers())
    unusable = any(tensor.is_meta for tensor in tensors) or compiled_in_place(model.module)
    return replace(model, module=nn.Identity()) if unusable else model


def _image_names(images: Any, first: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of all images: of the first ones as prepared, of the rest their paths or numbers."""
    unprepared = range(len(first), len(images))
    return (*first, *(str(images[i]) if isinstance(images[i], str) else f"image {i + 1}" for i in unprepared))


def _cuda_devices(model: Model) -> list[int]:
    """Return the devices whose generators the checks may advance."""
    device = model.device
    return [device.index if device.index is not None else torch.cuda.current_device()] if device.type == "cuda" else []
