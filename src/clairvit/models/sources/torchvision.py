"""`torchvision:NAME` or `torchvision:NAME:WEIGHTS`."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from clairvit.errors import BadInput, UnknownName, did_you_mean
from clairvit.models.labels import fit_labels
from clairvit.models.load_options import LoadOptions, seeded
from clairvit.models.model import Model
from clairvit.models.preprocess import Preprocess
from clairvit.models.sources.hub import fetching, not_downloaded, url_blocked


def build(request: LoadOptions) -> Model:
    """Return a torchvision classifier with pretrained or random weights."""
    from torchvision import models

    name, _, tag = request.identifier.partition(":")
    if name not in names():
        raise UnknownName(
            f"torchvision has no classification model '{name}'.{did_you_mean(name, names())} "
            "Type 'clairvit models torchvision:vit_*' for a list."
        )
    weights = choose_weights(name, tag)
    if request.pretrained:
        if request.size:
            raise BadInput(
                f"The weights of '{request.spec}' fix its image size, so size={request.size} cannot be used; "
                "leave size out, or use the timm model of the same kind, which resizes its positions."
            )
        blocked = download_blocked(weights.url)
        if blocked:  # torch.hub would print that it downloads
            raise not_downloaded(request.spec, "weights", blocked)
        with fetching(request.spec), seeded():
            module = models.get_model(name, weights=weights)
    else:
        options = {"image_size": request.size[0]} if request.size and name.startswith("vit_") else {}
        if options and request.size and request.size[0] != request.size[1]:
            raise BadInput(f"torchvision's ViTs take square images only, not size={request.size}; use a timm model.")
        with seeded():
            module = models.get_model(name, weights=None, **options)
    categories = weights.meta["categories"]
    return Model(
        module=module,
        name=request.name,
        preprocess=preprocess(weights, request.size),
        labels=fit_labels(request.labels, lambda: categories, len(categories)),
    )


def names() -> list[str]:
    """Return the names of torchvision's classifiers."""
    from torchvision import models

    return list(models.list_models(module=models))


def choose_weights(name: str, tag: str) -> Any:
    """Return the weights of a model by tag; "" is the default."""
    from torchvision import models

    family = models.get_model_weights(name)
    if not tag:
        return family.DEFAULT
    if tag not in family.__members__:
        tags = list(family.__members__)
        raise UnknownName(
            f"torchvision has no weights '{tag}' for '{name}'.{did_you_mean(tag, tags)} It has: {', '.join(tags)}."
        )
    return family[tag]


def preprocess(weights: Any, size: tuple[int, int] | None) -> Preprocess:
    """Return the preprocessing of the weights' transform."""
    transform = weights.transforms()
    (crop,), (resize,) = transform.crop_size, transform.resize_size
    return Preprocess(
        size=size or (crop, crop),
        mean=tuple(transform.mean),
        std=tuple(transform.std),
        resize=None if size else resize,
        interpolation=transform.interpolation.value,
    )


def download_blocked(url: str) -> str | None:
    """Return why weights that are not in the cache cannot be downloaded; None if they can or are cached."""
    import torch

    cached = Path(torch.hub.get_dir(), "checkpoints", Path(urlparse(url).path).name)
    return None if cached.exists() else url_blocked(url)
