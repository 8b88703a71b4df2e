"""`timm:NAME`: the model, its evaluation transform and, for ImageNet heads, timm's class names."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from torch import nn

from clairvit.errors import UnknownName, did_you_mean
from clairvit.models.labels import fit_labels
from clairvit.models.load_options import LoadOptions, seeded
from clairvit.models.model import Model
from clairvit.models.preprocess import Preprocess
from clairvit.models.sources.hub import abbreviated, fetching, hub_blocked


def build(request: LoadOptions) -> Model:
    """Return a timm model with pretrained or random weights."""
    name = request.identifier
    check_name(name)
    if request.pretrained:
        local = name.startswith("local-dir:")
        with fetching(request.spec, None if local else hub_blocked(), local=local), seeded():
            module = create(name, pretrained=True, size=request.size)
    else:
        with seeded():
            module = create(name, pretrained=False, size=request.size)
    return describe(module, request)


def describe(module: nn.Module, request: LoadOptions) -> Model:
    """Return a timm module as a model, with its preprocessing and class names."""
    classes = int(getattr(module, "num_classes", 0))
    labels = fit_labels(request.labels, lambda: imagenet_labels(module), classes) if classes else ()
    return Model(
        module=module,
        name=request.name,
        preprocess=preprocess(module, request.size),
        labels=labels,
        classifier=classes > 0,
    )


def create(name: str, *, pretrained: bool, size: tuple[int, int] | None = None, **options: Any) -> nn.Module:
    """Return a timm module, built for an image size if it depends on one."""
    import timm

    if size is None:
        return timm.create_model(name, pretrained=pretrained, **options)  # type: ignore[no-any-return]
    try:
        return timm.create_model(name, pretrained=pretrained, img_size=size, **options)  # type: ignore[no-any-return]
    except TypeError as error:
        if "img_size" not in str(error):
            raise
        # a convolutional model: it takes any size
        return timm.create_model(name, pretrained=pretrained, **options)  # type: ignore[no-any-return]


def check_name(name: str) -> None:
    """Raise UnknownName if timm has no such model or weights; hf_hub: and local-dir: names are not checked."""
    import timm

    if ":" in name:
        return
    arch, _, tag = name.partition(".")
    if not timm.is_model(arch):
        raise UnknownName(
            f"timm has no model '{arch}'.{did_you_mean(arch, timm.list_models())} "
            "Type 'clairvit models timm:vit_*' for a list."
        )
    tags = [model.partition(".")[2] for model in timm.list_pretrained(f"{arch}.*")]
    if tag and tag not in tags:
        raise UnknownName(
            f"timm has no weights '{tag}' for '{arch}'.{did_you_mean(tag, tags)} It has: {abbreviated(tags)}. "
            f"Type 'timm:{arch}' for the default ones."
        )


def preprocess(module: nn.Module, size: tuple[int, int] | None = None) -> Preprocess:
    """Return the preprocessing of timm's evaluation transform."""
    from timm.data import resolve_model_data_config

    config = resolve_model_data_config(module)
    built_size = getattr(getattr(module, "patch_embed", None), "img_size", None)  # may differ from the pretrained one
    rows, columns = size or built_size or config["input_size"][1:]
    box = (math.floor(rows / config["crop_pct"]), math.floor(columns / config["crop_pct"]))
    squash = config["crop_mode"] == "squash"
    square = box[0] == box[1]
    return Preprocess(
        size=(rows, columns),
        mean=tuple(config["mean"]),
        std=tuple(config["std"]),
        resize=box[0] if square and not squash else box,
        interpolation=config["interpolation"] if square or squash else _resize_interpolation(config, (rows, columns)),
        keep_ratio=not squash,
    )


def _resize_interpolation(config: dict[str, Any], size: tuple[int, int]) -> str:
    """Return the interpolation of timm's transform of non-square crops; before 1.0.31 it ignored the configured one."""
    from timm.data import create_transform

    resize = create_transform(**(config | {"input_size": (3, *size)}), is_training=False).transforms[0]
    interpolation = getattr(resize, "interpolation", config["interpolation"])
    return str(getattr(interpolation, "value", interpolation))


def imagenet_labels(module: nn.Module) -> tuple[str, ...]:
    """Return short English class names of ImageNet heads (1k, 12k, 21k, …); () for other heads."""
    from timm.data import ImageNetInfo, infer_imagenet_subset

    subset = infer_imagenet_subset(module)
    if subset is None:
        return ()
    info = ImageNetInfo(subset)
    return short_names([info.index_to_description(i) for i in range(info.num_classes())])


def short_names(descriptions: list[str]) -> tuple[str, ...]:
    """Return 'tabby' for 'tabby, tabby cat'; names that would not be unique keep their synonyms or get a number."""
    first = [description.split(",")[0].strip() for description in descriptions]
    count = Counter(first)
    names = [short if count[short] == 1 else long for short, long in zip(first, descriptions, strict=True)]
    count = Counter(names)
    return tuple(name if count[name] == 1 else f"{name} ({i})" for i, name in enumerate(names))
