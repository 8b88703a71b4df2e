"""Neurons and directions: targets inside a model, read off the tokens of one of its blocks.

They lie here and not in `targets/`, because the blocks of a model are found by tracing it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from clairvit.errors import BadInput, WrongType
from clairvit.models.model import Model
from clairvit.option_types import checked_index
from clairvit.targets.base import ScoreContext, Target, TargetBatch
from clairvit.tracing.activation_readout import ActivationReadout, ActivationSite, Pool, Where, activation_model

SCORE = "activation"


@dataclass(frozen=True)
class Neuron(Target):
    """Ask why a channel of a block is active.

    The score is a[c] = pool_t x_t[c], where x [N, d] are the tokens of `where`. Only the blocks up to this one take
    part: attention maps are rolled out up to it, and no later layer has a map.

    Args:
        layer: The block, from 0.
        channel: The channel, from 0: of the d of the model, or of the dh of a head.
        where: "block": the block's output; "attention" or "mlp": what that part adds to the residual stream, LayerScale
            included; "head": the output A v of one head, before the output projection.
        head: The head, from 0, with where="head".
        patch: One patch: an index, row by row from 0, or (row, column), for clips (frame, row, column). None: `pool`.
        pool: "mean" or "max" over the patches; "token": the class token.

    Raises:
        BadInput: A head without where="head" or the other way round, a patch together with a pool, or a layer, channel,
            head or patch that the model does not have.
        UnknownName: A `where` or `pool` that does not exist.
        NotApplicable: The model's blocks are no modules, or do not add attention and MLP by two sums.

    Example:
        >>> import clairvit as cv
        >>> cv.explain("pets", "demo", "ixg", target=cv.Neuron(3, 17)).targets
        ('layer 3, channel 17',)
        >>> cv.explain("pets", "demo", "ixg", target=cv.Neuron(8, 5, where="head", head=2, patch=(4, 6))).targets
        ('layer 8, head 2, patch (4, 6), channel 5',)
    """

    layer: int
    channel: int
    _: KW_ONLY
    where: Where = "block"
    head: int | None = None
    patch: int | tuple[int, ...] | None = None
    pool: Pool = "mean"

    def __post_init__(self) -> None:
        object.__setattr__(self, "channel", checked_index(self.channel, "The channel"))
        object.__setattr__(self, "layer", self.site.layer)

    @property
    def site(self) -> ActivationSite:
        """Return the activation that the channel is one of."""
        return ActivationSite(self.layer, self.where, self.head, self.patch, self.pool)

    def readout(self, model: Model) -> Model:
        """Return the model of the blocks up to the layer, whose scores [B, d] are all channels."""
        return _read_activation(model, ("neuron", self.site), self.site, all_channels)

    def resolve(self, context: ScoreContext) -> TargetBatch:
        """Return the channel's activation as the score."""
        if self.channel >= context.classes:
            raise BadInput(
                f"There is no channel {self.channel}: {self.site} has {context.classes}; give one from 0 to "
                f"{context.classes - 1}."
            )
        return _activation_target(context, f"{self.site}, channel {self.channel}", self.channel)


@dataclass(frozen=True)
class Direction(Target):
    """A direction in a block's activations: a linear probe, a concept vector, a latent of a sparse autoencoder.

    The score is a = pool_t (x_t · w + b), or pool_t relu(x_t · w + b), where x [N, d] are the tokens of `where`.

    Args:
        layer: The block, from 0.
        vector: w, as long as the activation has channels: a tensor, array or list [d].
        bias: b.
        relu: Clip each token's value at zero before pooling, as the encoder of a sparse autoencoder does.
        name: The title; "layer 3, direction" unless given.
        where: As in `Neuron`.
        head: As in `Neuron`.
        patch: As in `Neuron`.
        pool: As in `Neuron`.

    Raises:
        BadInput: A vector of another length than the activation, of zeros or not finite; and as in `Neuron`.
        WrongType: A vector that is no list of numbers.
        UnknownName: As in `Neuron`.
        NotApplicable: As in `Neuron`.

    Example:
        >>> import clairvit as cv, torch
        >>> probe = cv.targets.Direction(6, torch.ones(192), name="sum of channels")
        >>> cv.explain("pets", "demo", "attnlrp+plus", target=probe)
        Explanation('attnlrp+plus' of pets, 1×14×14: sum of channels)
    """

    layer: int
    vector: Sequence[float] = field(repr=False)
    bias: float = 0.0
    _: KW_ONLY
    relu: bool = False
    name: str = ""
    where: Where = "block"
    head: int | None = None
    patch: int | tuple[int, ...] | None = None
    pool: Pool = "mean"

    def __post_init__(self) -> None:
        object.__setattr__(self, "vector", _checked_vector(self.vector))
        if isinstance(self.bias, bool) or not isinstance(self.bias, int | float) or not math.isfinite(self.bias):
            raise BadInput(f"bias={self.bias!r} was given; expected a finite number.")
        object.__setattr__(self, "layer", self.site.layer)

    @property
    def site(self) -> ActivationSite:
        """Return the activation that the direction lies in."""
        return ActivationSite(self.layer, self.where, self.head, self.patch, self.pool)

    def readout(self, model: Model) -> Model:
        """Return the model of the blocks up to the layer, whose only score is the direction's."""
        projection = Projection(tuple(self.vector), self.bias, self.relu, str(self.site))
        return _read_activation(model, ("direction", self.site, projection), self.site, projection)

    def resolve(self, context: ScoreContext) -> TargetBatch:
        """Return the value of the direction as the score."""
        return _activation_target(context, self.name or f"{self.site}, direction", 0)


@dataclass(frozen=True)
class Projection:
    """x · w + b of tokens [B, N, d], clipped at zero if `relu`: [B, N, 1]."""

    vector: tuple[float, ...]
    bias: float
    relu: bool
    place: str  # in messages

    def __call__(self, tokens: Tensor) -> Tensor:
        if len(self.vector) != tokens.shape[-1]:
            raise BadInput(
                f"The vector has {len(self.vector)} numbers, and {self.place} has {tokens.shape[-1]} channels; "
                "expected one number per channel."
            )
        weight = torch.tensor([self.vector], dtype=torch.float64).to(tokens)  # [1, d]
        values = F.linear(tokens, weight, weight.new_tensor([self.bias]) if self.bias else None)
        return F.relu(values) if self.relu else values


def all_channels(tokens: Tensor) -> Tensor:
    """Return tokens [B, N, d] as they are: each channel is a score."""
    return tokens


def _read_activation(
    model: Model, key: tuple[Any, ...], site: ActivationSite, function: Callable[[Tensor], Tensor]
) -> Model:
    """Return the model whose scores are a function of the tokens at a site."""
    whole = activation_model(model)
    return model.read(key, function, readout=lambda _, reader: ActivationReadout(whole, site, reader), classifier=False)


def _activation_target(context: ScoreContext, title: str, column: int) -> TargetBatch:
    count = len(context)
    return TargetBatch(
        (title,) * count, (None,) * count, SCORE, (((column, 1.0),),) * count, activation=context.activation
    )


def _checked_vector(vector: Any) -> tuple[float, ...]:
    """Return the numbers of a tensor, array or list [d]; raise unless they are finite and not all zero."""
    values = vector.detach().tolist() if isinstance(vector, Tensor) else vector
    values = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(values, list | tuple) or not all(
        isinstance(value, int | float) and not isinstance(value, bool) for value in values
    ):
        raise WrongType(f"The vector is a {type(vector).__name__}; expected a tensor, array or list [d] of numbers.")
    if not any(values) or not all(map(math.isfinite, values)):
        raise BadInput("The vector has no number but zero, or one that is not finite; expected a direction [d].")
    return tuple(map(float, values))
