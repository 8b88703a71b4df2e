"""ImageNet's thousand classes: WordNet's ids, numbers and names."""

from __future__ import annotations

from functools import cache


@cache
def numbers() -> dict[str, int]:
    """'n01440764' -> 0, as every ImageNet-1k model counts."""
    from timm.data import ImageNetInfo

    return {wnid: number for number, wnid in enumerate(ImageNetInfo("imagenet-1k").label_names())}


@cache
def names() -> tuple[str, ...]:
    """As our timm models call them."""
    from timm.data import ImageNetInfo

    from clairvit.models.sources.timm import short_names

    return short_names(list(ImageNetInfo("imagenet-1k").label_descriptions()))
