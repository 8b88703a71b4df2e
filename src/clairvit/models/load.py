"""load("pets"), load("timm:vit_base_patch16_224") …: models by name."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Sequence

import torch

from clairvit.errors import BadInput
from clairvit.models.activation import check_activation
from clairvit.models.labels import Labels, read_labels
from clairvit.models.load_options import LoadOptions
from clairvit.models.model import Model
from clairvit.models.preprocess import Size, parse_size, preprocess_options
from clairvit.models.sources import builtin
from clairvit.models.sources.registry import BUILDERS, BUILT_IN, PYTHON, split_name
from clairvit.models.wrap import with_activation

DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


def load(
    name: str,
    *,
    pretrained: bool = True,
    arch: str | None = None,
    labels: Labels | None = None,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    size: Size | None = None,
    mean: float | Sequence[float] | None = None,
    std: float | Sequence[float] | None = None,
    resize: Size | None = None,
    interpolation: str | None = None,
    activation: str | None = None,
    display: Sequence[int] | None = None,
    fit: str | None = None,
) -> Model:
    """Return a model by name: pets, scenes, parts, timm:NAME, hf:ID, torchvision:NAME, open_clip:… or file:PATH.

    MODULE:ATTRIBUTE is a model of your own code, which stays on its device, in its precision and mode unless `device`
    or `dtype` is given. Any other comes in eval mode. What its source does not state about preprocessing is named in
    `Model.assumptions`.

    Args:
        name: What to load; `clairvit models` lists the sources.
        pretrained: False draws random weights from a fixed seed.
        arch: The timm architecture of a weights file (file: only).
        labels: Class names in class order, an id → name or name → id dict, or a JSON file of any of these; for
            CLIP-like models the prompts, taken word for word.
        device, dtype: Where and in which precision the model runs; CPU and float32 unless given.
        size: Image size, which is also the centre crop, where the model leaves a choice.
        mean, std: For pixels in 0..1, one number per channel (red, green, blue) or one for all; in place of the
            source's own.
        resize: Short side in pixels before the crop, or (rows, columns) that the image is made to cover.
        interpolation: nearest, lanczos, bilinear, bicubic, box or hamming.
        activation: What the scores mean: softmax (one class of several), sigmoid (each class for itself) or raw (no
            probabilities: a regression, a cosine); None is what the model states itself.
        display: Indices of the channels that pictures show as red, green and blue, or of the one shown in grey.
        fit: crop (the picture keeps its shape, what is outside the centre is cut off) or squash (the whole picture is
            distorted to the model's size, or to `resize`); the source's own unless given.

    Returns:
        The model that `cv.explain` and all other functions take.

    Raises:
        UnknownName: No source has a model of that name.
        ModelUnavailable: The weights cannot be found, downloaded or read.
        BadInput: An option does not fit the model.

    Example:
        >>> import clairvit as cv
        >>> cv.load("pets")
        Model('pets', VisionTransformer, 224×224, 37 classes, softmax, cpu, torch.float32)
        >>> cv.load("timm:vit_tiny_patch16_224", pretrained=False, mean=0.5, std=0.5, resize=248).preprocess.resize
        248
    """
    source, identifier = split_name(name)
    torch_device, torch_dtype = usable_device(device), _usable_dtype(dtype)
    preprocessing = preprocess_options(mean, std, resize, interpolation, display, fit)
    checked = None if activation is None else check_activation(activation)
    request = LoadOptions(
        name, identifier, pretrained, arch, read_labels(labels), parse_size(size), checked, preprocessing
    )
    if arch is not None and source != "file":
        raise BadInput(f"arch={arch!r} belongs to 'file:PATH' only; '{name}' knows its own architecture.")
    if source == PYTHON:
        return _load_python(request, device, dtype)
    model: Model = (
        builtin.build(source, request)
        if source in BUILT_IN
        else importlib.import_module(BUILDERS.resolve(source)).build(request)
    )
    model = with_activation(model, checked)
    module = model.module.eval().to(device=torch_device, dtype=torch_dtype)
    return dataclasses.replace(model, module=module, preprocess=preprocessing.applied_to(model.preprocess))


def _load_python(request: LoadOptions, device: str | torch.device | None, dtype: str | torch.dtype | None) -> Model:
    """Return the model of MODULE:ATTRIBUTE, moved or cast only if device or dtype is given."""
    from clairvit.models.sources.python import build

    model = build(request)
    module = model.module
    module = module if device is None else module.to(device=usable_device(device))
    module = module if dtype is None else module.to(dtype=_usable_dtype(dtype))
    return dataclasses.replace(model, module=module)


def usable_device(device: str | torch.device | None) -> torch.device:
    """Return the device, the CPU for None; raise BadInput if no tensor can be made on it."""
    try:
        usable = torch.device(device or "cpu")
        torch.empty(0, device=usable)
    except (RuntimeError, AssertionError) as error:
        raise BadInput(
            f"The device '{device}' cannot be used here ({str(error).splitlines()[0]}); try 'cpu'."
        ) from error
    return usable


def _usable_dtype(dtype: str | torch.dtype | None) -> torch.dtype:
    usable = DTYPES.get(dtype) if isinstance(dtype, str) else dtype or torch.float32
    if usable is None or usable not in DTYPES.values():
        raise BadInput(f"dtype={dtype!r} is not one a model can run in; give one of {', '.join(DTYPES)}.")
    return usable
