"""Recommended methods: the default where none is named, with its fallbacks, and one method per purpose.

The lists are in `recommendations.toml`; the numbers behind them are in docs/results.md.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from clairvit.methods.spec import MethodSpec, resolve_method
from clairvit.models.model import Model
from clairvit.targets.base import Target
from clairvit.targets.embedding import compares_embeddings
from clairvit.tracing.structure import ModelStructure


@dataclass(frozen=True)
class Recommendation:
    """A method, what it is recommended for, and why.

    Attributes:
        purpose: What a user wants: "faithful", "localising", "cheap" or "black box".
        method: A method string.
        reason: Why, in a few words.
        evidence: The figures that speak for it, as docs/results.md has them.

    Example:
        >>> import clairvit as cv
        >>> cv.recommended_methods()[0].purpose
        'faithful'
    """

    purpose: str
    method: str
    reason: str
    evidence: str = ""


@dataclass(frozen=True)
class DefaultMethod:
    """The method that is used where none is named, for one kind of models."""

    models: str  # `COMPARED`, `CONTRASTED`, "plain", "hierarchical", "no block modules", "cnn" or "no gradient"
    method: str
    reason: str
    evidence: str = ""  # the figures that speak for it, as docs/which-method.md has them

    @functools.cached_property
    def spec(self) -> MethodSpec:
        """Return the method as a value."""
        return resolve_method(self.method)


# A plain Vision Transformer whose embedding is compared with a text's or an image's; the same minus that to others
COMPARED, CONTRASTED = "text or image", "text against others"


@functools.cache
def _tables() -> dict[str, list[dict[str, Any]]]:
    return tomllib.loads(resources.files("clairvit.methods").joinpath("recommendations.toml").read_text("utf-8"))


@functools.cache
def default_methods() -> tuple[DefaultMethod, ...]:
    """Return the default methods, one per kind of models; each is the fallback of those before it."""
    return tuple(DefaultMethod(**entry) for entry in _tables()["default"])


def kind_of_comparison(model: Model, targets: Sequence[Any] | None) -> str | None:
    """Return `COMPARED` or `CONTRASTED` where a model's scores are the image's embedding, and None elsewhere.

    Args:
        model: The model whose scores the targets are about.
        targets: Targets as a user names them, each one for all images or a list with one per image.
    """
    if not compares_embeddings(model):
        return None
    single = [part for item in targets or () for part in (item if isinstance(item, list | tuple) else (item,))]
    contrasted = bool(single) and all(isinstance(target, Target) and target.subtracts for target in single)
    return CONTRASTED if contrasted else COMPARED


def kind_of_model(structure: ModelStructure, *, compares: str | None = None) -> str:
    """Return which of the default methods a model starts with.

    Args:
        structure: The structure of the model.
        compares: How the score compares the image's embedding, from `kind_of_comparison`.
    """
    if structure.barriers:
        return "no gradient"
    if not structure.layers:
        return "cnn"
    if all(site.block is None for site in structure.layers):
        return "no block modules"
    grids = {site.grid for site in structure.layers}
    windowed = any(site.kind not in ("tokens", "channel") for site in structure.layers)
    if windowed or len(grids) > 1:
        return "hierarchical"
    return compares or "plain"


def defaults_for(structure: ModelStructure, *, compares: str | None = None) -> tuple[DefaultMethod, ...]:
    """Return the default method for a model of this structure, then its fallbacks."""
    items = default_methods()
    first = [item.models for item in items].index(kind_of_model(structure, compares=compares))
    return items[first:]


def reason_for_default(item: DefaultMethod, structure: ModelStructure, *, compares: str | None = None) -> str:
    """Return why a default method was used for a model of this structure, in a few words."""
    kind = kind_of_model(structure, compares=compares)
    if item.models != kind:
        return "the usual methods for this kind of model do not fit"
    if kind == "cnn" and structure.sites:
        return "no attention of this model is between its image tokens"
    if kind == "cnn" and not structure.stages:
        return "neither attention nor feature maps were seen in this model"
    return item.reason


@functools.cache
def default_method() -> str:
    """Return the method string that is used for a plain Vision Transformer where none is named."""
    return next(item.method for item in default_methods() if item.models == "plain")


def recommended_methods() -> tuple[Recommendation, ...]:
    """Return one method per purpose.

    Returns:
        `Recommendation`s with `.purpose`, `.method`, `.reason` and `.evidence`.

    Example:
        >>> import clairvit as cv
        >>> [item.method for item in cv.recommended_methods() if item.purpose == "faithful"]
        ['attnlrp+plus']
    """
    return tuple(Recommendation(entry.pop("name"), **entry) for entry in map(dict, _tables()["purpose"]))
