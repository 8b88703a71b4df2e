"""Site: an activation of a Vision Transformer, by layer, head, part and tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from clairvit.errors import BadInput, UnknownName, WrongType, did_you_mean
from clairvit.option_types import checked_index

Part = Literal["attention", "mlp"]
PARTS = ("attention", "mlp")
TOKEN_GROUPS = ("patches", "prefix", "suffix")


@dataclass(frozen=True)
class Site:
    """Name an activation that `cv.intervene` can replace.

    Attributes:
        layer: The block, from 0. Alone, it is the block's input tokens, [B, N, d].
        head: A head of the layer's attention: its output before the output projection, [B, N, dh].
        part: "attention" or "mlp": what this part adds to the residual stream, LayerScale included, [B, N, d].
        tokens: Patch indices, row by row from 0; "patches", "prefix" (class token, registers) or "suffix" (tokens
            after the patches); None: all tokens.

    Raises:
        BadInput: A negative number, a head together with a part, a token that is named twice, or none at all.
        WrongType: A layer, head or token that is no integer.
        UnknownName: A part or group of tokens that does not exist.

    Example:
        >>> import clairvit as cv
        >>> print(cv.Site(layer=3), cv.Site(3, head=2), cv.Site(3, part="mlp", tokens=[0, 5]), sep="; ")
        layer 3; layer 3, head 2; layer 3, mlp, 2 patches
    """

    layer: int
    head: int | None = None
    part: Part | None = None
    tokens: tuple[int, ...] | Sequence[int] | Literal["patches", "prefix", "suffix"] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "layer", _checked_index(self.layer, "layer"))
        if self.head is not None:
            object.__setattr__(self, "head", _checked_index(self.head, "head"))
        if self.part is not None and self.part not in PARTS:
            raise UnknownName(
                f"There is no part '{self.part}' of a block.{did_you_mean(str(self.part), PARTS)} Choose one of: "
                f"{', '.join(PARTS)}; leave it out for the block's input tokens."
            )
        if self.head is not None and self.part is not None:
            raise BadInput(
                f"A site has head={self.head} and part='{self.part}'; expected one of them. A head is named by "
                "cv.Site(layer, head=…), the output of all heads together by cv.Site(layer, part='attention')."
            )
        object.__setattr__(self, "tokens", _checked_tokens(self.tokens))

    def __str__(self) -> str:
        """Return the site in words."""
        words = [f"layer {self.layer}"]
        if self.head is not None:
            words.append(f"head {self.head}")
        if self.part is not None:
            words.append(self.part)
        if isinstance(self.tokens, str):
            words.append(self.tokens)
        elif self.tokens is not None:
            words.append(f"{len(self.tokens)} patch{'es' * (len(self.tokens) != 1)}")
        return ", ".join(words)


def _checked_index(value: Any, name: str) -> int:
    """Return an integer of Python or NumPy as int; raise unless it is one from 0."""
    return checked_index(value, f"The {name} of a site")


def _checked_tokens(tokens: Any) -> tuple[int, ...] | str | None:
    if tokens is None:
        return None
    if isinstance(tokens, str):
        if tokens not in TOKEN_GROUPS:
            raise UnknownName(
                f"There is no group of tokens '{tokens}'.{did_you_mean(tokens, TOKEN_GROUPS)} Choose one of: "
                f"{', '.join(TOKEN_GROUPS)}; or a list of patch indices, or None for all tokens."
            )
        return tokens
    if hasattr(tokens, "tolist"):
        tokens = tokens.tolist()
    if not isinstance(tokens, Sequence):
        raise WrongType(f"tokens= is a {type(tokens).__name__}; expected a list of patch indices.")
    indices = tuple(_checked_index(token, "token") for token in tokens)
    if not indices or len(set(indices)) != len(indices):
        raise BadInput(
            f"tokens= names {len(indices)} patches, {len(set(indices))} different ones; expected at least one, and "
            "each of them once."
        )
    return indices
