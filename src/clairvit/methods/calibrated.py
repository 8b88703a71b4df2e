"""Calibrated methods: a weighted sum of layer maps of several kinds, with weights that were fitted to one model.

map = Σ_kind Σ_layer w[kind, layer] · M[kind, layer] / ‖Σ_layer M[kind, layer]‖₂

All layers of all kinds come from one forward and one backward pass per rule table. `attnlrp+plus` is the special case
w[attnlrp, layer] = 1 and 0 elsewhere. `cv.calibrate` fits the weights, a recipe holds them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from clairvit._spec import ParsedSpec
from clairvit.data.hashing import digest, weights_hash
from clairvit.errors import BadInput, NotApplicable, Verb
from clairvit.methods.aggregation import Single
from clairvit.methods.layer_view import LayerView, mean_of_heads
from clairvit.methods.parsing import CALIBRATED
from clairvit.methods.registry import FORWARD, Method, Requires
from clairvit.methods.spec import MethodSpec, resolve_method, resolve_parsed
from clairvit.models.model import Model

HASH_LENGTH = 12  # letters of a hash in a method string


def gradient_attention(layer: LayerView) -> Tensor:
    """mean_h A * G: where more attention would raise the score, and where it would lower it."""
    return mean_of_heads(layer.A * layer.G)  # [B, rows, N]


def mean_positive_gradient_attention(layer: LayerView) -> Tensor:
    """mean over queries of mean_h relu(A * G): a layer of Grad-SAM."""
    return layer.column_means("AG+")  # [B, N]


def _at_layer(method: str) -> Callable[[int], MethodSpec]:
    """Return the function of a layer to a registered method at that layer."""
    return lambda layer: resolve_parsed(ParsedSpec(method, combinator=f"layer:{layer}"))


def _unregistered(name: str, **fields: Any) -> Callable[[int], MethodSpec]:
    """Return the function of a layer to a layer map that is no method of its own."""
    method = Method(name=name, family="gradient × attention", paper="", **fields)
    return lambda layer: MethodSpec(
        method=method,
        options=(),
        canonical=ParsedSpec(f"{CALIBRATED}:{name}", combinator=f"layer:{layer}"),
        aggregation=Single(layer),
    )


# Kind of layer map -> the method that makes the map of one layer. A new kind is one more line.
KINDS: Mapping[str, Callable[[int], MethodSpec]] = {
    "attnlrp": _at_layer("attnlrp"),
    "decompx": _at_layer("decompx"),
    "reslrp": _at_layer("reslrp"),
    "ixg": _at_layer("ixg"),
    "genatt": _at_layer("genatt"),
    "attention-gradient": _unregistered("attention-gradient", function=gradient_attention, output="matrix"),
    "gradsam": _unregistered(
        "gradsam",
        function=mean_positive_gradient_attention,
        output="tokens",
        requires=Requires(gradients=("attention",), all_rows=True),
    ),
    "raw-attention": _at_layer("raw-attention"),
    "genatt-product": lambda layer: resolve_method("genatt", start_layer=layer),
}
PRIOR = "attnlrp"  # the kind whose plain sum over layers weights are shrunk to
PRIOR_METHOD = "attnlrp+plus"


def layer_specs(kinds: Sequence[str], layers: int) -> tuple[MethodSpec, ...]:
    """Return the methods that make all layer maps of these kinds, kind by kind."""
    return tuple(KINDS[kind](layer) for kind in kinds for layer in range(layers))


def table_of(kind: str) -> str | None:
    """Return the name of the rule table whose backward a kind reads; None if it needs no backward."""
    tables = KINDS[kind](0).tables
    return str(tables[0]) if tables else None


def scaled_layer_maps(maps: Sequence[Tensor], kinds: int) -> Tensor:
    """Return layer maps, kind by kind [B, rows, cols] each, as [kinds, L, B, patches] in float64.

    Each kind is divided, image by image, by the L2 norm of its sum over layers; a sum of zeros by 1.
    """
    stacked = torch.stack([layer_map.double().flatten(1) for layer_map in maps])  # [kinds·L, B, patches]
    by_kind = stacked.reshape(kinds, -1, *stacked.shape[1:])
    norms = by_kind.sum(1, keepdim=True).norm(dim=-1, keepdim=True)  # [kinds, 1, B, 1]
    return by_kind / torch.where(norms == 0, torch.ones_like(norms), norms)


@dataclass(frozen=True)
class Calibration:
    """Weights of layer maps, and the model that they were fitted to.

    Args:
        weights: Kind of layer map -> one weight per layer.
        model: The name of the model.
        model_hash: `weights_hash` of the model: parameters, labels, preprocessing, layout.
        size: Height and width of the images.
        grid: Rows and columns of patches.
    """

    weights: Mapping[str, tuple[float, ...]]
    model: str
    model_hash: str
    size: tuple[int, int]
    grid: tuple[int, int]

    @property
    def layers(self) -> int:
        return len(next(iter(self.weights.values())))

    @cached_property
    def hash(self) -> str:
        """The first letters of a hash of all that the map depends on."""
        return digest(repr((sorted(self.weights.items()), self.model_hash, self.size, self.grid)).encode())[
            :HASH_LENGTH
        ]

    def combine(self, maps: Sequence[Tensor]) -> Tensor:
        """Σ_kind Σ_layer w[kind, layer] · M[kind, layer] / ‖Σ_layer M[kind, layer]‖₂, weights fitted to the model."""
        grid = (int(maps[0].shape[-2]), int(maps[0].shape[-1]))
        if grid != tuple(self.grid):
            raise NotApplicable(
                f"The recipe was calibrated for {self._described()} and this image has {grid[0]} × {grid[1]} patches; "
                "expected the same number. Resize the image, or calibrate for this size: cv.calibrate(model, images)."
            )
        layer_maps = scaled_layer_maps(maps, len(self.weights))
        weights = torch.tensor(list(self.weights.values()), dtype=torch.float64, device=layer_maps.device)
        return torch.einsum("kl,klbp->bp", weights, layer_maps).reshape(maps[0].shape).to(maps[0].dtype)

    def misfit(self, model: Model) -> NotApplicable | None:
        """Return an error that names both models if this is not the one that the weights were fitted to."""
        model_hash = weights_hash(model)
        if model_hash == self.model_hash:
            return None
        rows, cols = model.preprocess.size
        return NotApplicable(
            f"The recipe was calibrated for {self._described()} with weights {self.model_hash[:HASH_LENGTH]}, and this "
            f"is {model.name}, {rows} × {cols} pixels, with weights {model_hash[:HASH_LENGTH]}; expected the same "
            "model, labels and preprocessing. Calibrate this one: ",
            Verb("calibrate", file="mine.json"),
            ".",
        )

    def _described(self) -> str:
        (height, width), (rows, cols) = self.size, self.grid
        return f"{self.model}, {height} × {width} pixels, {rows} × {cols} patches, {self.layers} layers,"

    @classmethod
    def from_document(cls, document: Any, source: str) -> Calibration:
        """Return the calibration in a recipe's JSON; raise BadInput that names its `source` if it cannot be used."""
        try:
            calibration = cls(
                weights={str(kind): tuple(map(float, values)) for kind, values in document["weights"].items()},
                model=str(document["model"]),
                model_hash=str(document["model_hash"]),
                size=_pair(document["size"]),
                grid=_pair(document["grid"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BadInput(
                f"The calibration in '{source}' cannot be read ({type(error).__name__}: {error}); expected weights, "
                "model, model_hash, size and grid, as cv.calibrate(model, images).save('mine.json') writes them."
            ) from error
        unknown = [kind for kind in calibration.weights if kind not in KINDS]
        lengths = {len(values) for values in calibration.weights.values()}
        finite = all(math.isfinite(weight) for values in calibration.weights.values() for weight in values)
        if unknown or len(lengths) != 1 or 0 in lengths or not finite:
            what = f"the kinds {', '.join(unknown)}" if unknown else f"lists of {sorted(lengths)} weights"
            raise BadInput(
                f"The calibration in '{source}' has {what}; expected one finite weight per layer for each of "
                f"{', '.join(KINDS)}. Make it again: cv.calibrate(model, images)."
            )
        return calibration


def _pair(values: Any) -> tuple[int, int]:
    first, second = values
    return int(first), int(second)


# Calibrations that were fitted or read in this process, by hash: a method string names one by its hash, so that the
# same text always means the same map.
_calibrations: dict[str, Calibration] = {}


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class CalibratedSpec(MethodSpec):
    """The spec of a calibrated method: it carries its weights, so that another process can read it."""

    calibration: Calibration

    def __reduce__(self) -> tuple[Callable[..., MethodSpec], tuple[Any, ...]]:
        return calibrated_spec, (self.calibration, self.text.rpartition("#")[0])


def calibrated_spec(calibration: Calibration, file: str = CALIBRATED) -> MethodSpec:
    """Return the method of a calibration; its text is "FILE#HASH", or "calibrated#HASH" where there is no file."""
    _calibrations[calibration.hash] = calibration
    method = Method(
        name=CALIBRATED,
        family=CALIBRATED,
        paper="weights fitted to the model by cv.calibrate",
        function=calibration.combine,
        output="image",
        requires=replace(FORWARD, fitted_to=calibration.misfit),
        signed=True,
    )
    members = layer_specs(tuple(calibration.weights), calibration.layers)
    canonical = ParsedSpec(f"{file}#{calibration.hash}")
    return CalibratedSpec(method=method, options=(), canonical=canonical, members=members, calibration=calibration)


def calibration_by_hash(hash_: str) -> Calibration | None:
    """Return the calibration of that hash, if this process has fitted or read it."""
    return _calibrations.get(hash_)
