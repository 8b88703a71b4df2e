"""Which method is defined on which tiny model, by the conditions that the method itself declares."""

from __future__ import annotations

import re
import warnings

from clairvit.methods.registry import Method, list_methods

METHODS: dict[str, Method] = {method.name: method for method in list_methods()}


def method_of(text: str) -> Method:
    """ "genatt(…)+plus" -> genatt."""
    return METHODS[text.partition("(")[0].partition("+")[0]]


def short(name: str) -> str:
    """Return the method with few samples, so that a sweep over all models is quick."""
    return f"{name}(samples=24)" if "samples" in METHODS[name].options else name


def fits(text: str, kind: str) -> bool:
    """Return whether the method's declared conditions hold for this model."""
    from helpers.tiny_models import ZOO  # here, so that a machine without all the libraries can still read the registry

    requires, tiny = method_of(text).requirements(), ZOO[kind]
    return (not requires.poolings or tiny.pooling in requires.poolings) and not set(requires.structure) & tiny.lacks


def allow_declared_zeros() -> None:
    """Inside warnings.catch_warnings(): a zero map is no surprise where a ReLU or the method itself says why.

    What is zero behind a LayerNorm is constant where a residual goes past all of them (CLIP's mean of patches).
    """
    for name in [name for name, method in METHODS.items() if method.caveats.zero_reason]:
        warnings.filterwarnings("ignore", message=rf"{re.escape(name)}\b.*is the same everywhere")
    reasons = [method.caveats.zero_reason for method in METHODS.values() if method.caveats.zero_reason]
    for reason in ["its ReLU keeps what speaks for the target", *reasons]:
        warnings.filterwarnings("ignore", message=".*is zero everywhere: " + re.escape(reason))


def home_of(text: str, *kinds: str) -> str:
    """Return the first of these models that the method is defined for."""
    return next(kind for kind in kinds or ("timm-vit", "timm-vit-avg") if fits(text, kind))
