"""`torchvision:NAME` or `torchvision:NAME:WEIGHTS`."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from clairvit.errors import BadInput, UnknownName, did_you_mean
from clairvit.models.labels import fit_labels
from clairvit.models.load_options import Request, seeded
from clairvit.models.model import Model
from clairvit.models.preprocess import Preprocess
from clairvit.models.sources.hub import fetching, not_downloaded, url_blocked


def build(request: Request) -> Model:
    from torchvision import models

    name, _, wanted = request.rest.partition(":")
    if name not in names():
        raise UnknownName(
            f"torchvision has no classification model '{name}'.{did_you_mean(name, names())} "
            "Type 'clairvit models torchvision:vit_*' for a list."
        )
    weights = choose_weights(name, wanted)
    if request.pretrained:
        if request.size:
            raise BadInput(
                f"The weights of '{request.spec}' fix its image size, so size={request.size} cannot be used; "
                "leave size out, or use the timm model of the same kind, which resizes its positions."
            )
        blocked = download_blocked(weights.url)
        if blocked:  # before torch.hub announces a download that will not happen
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
    from torchvision import models

    return list(models.list_models(module=models))


def choose_weights(name: str, wanted: str) -> Any:
    from torchvision import models

    family = models.get_model_weights(name)
    if not wanted:
        return family.DEFAULT
    if wanted not in family.__members__:
        known = list(family.__members__)
        raise UnknownName(
            f"torchvision has no weights '{wanted}' for '{name}'.{did_you_mean(wanted, known)} "
            f"It has: {', '.join(known)}."
        )
    return family[wanted]


def preprocess(weights: Any, size: tuple[int, int] | None) -> Preprocess:
    """The transform that belongs to the weights."""
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
    import torch

    cached = Path(torch.hub.get_dir(), "checkpoints", Path(urlparse(url).path).name)
    return None if cached.exists() else url_blocked(url)
