"""Biases: what each operation adds on its own, and what the score's gradient makes of it, token by token.

Every operation is out = J · in + b, J its Jacobian and b what is left: a bias, or, where the operation bends, also the
part of its value that its slope does not explain. FullGrad adds up b · dy/dout. While a recording that was asked for it
runs, a `Watcher` notes b at each operation from the first block on; on the way back a hook there adds b · dy/dout to a
`BiasAccumulator`, one number a token and block. No gradient is kept, and other recordings pay nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from clairvit.errors import NotApplicable
from clairvit.models.model import Layout
from clairvit.tracing.bias_contributions import CHANNELS_SECOND, bias_term, is_matrix_product
from clairvit.tracing.capture import Capture
from clairvit.tracing.parts import MOST_PREFIX_TOKENS
from clairvit.tracing.structure import ModelStructure


@dataclass(eq=False)
class BiasAccumulator:
    """b · dy/dout of one backward, added up for each block: by token, and what belongs to no token."""

    count: int  # tokens
    tokens: dict[int, Tensor] = field(default_factory=dict)  # [B, N]
    apart: dict[int, Tensor] = field(default_factory=dict)  # [B]: pooled vectors, the classifier
    unplaced: str = ""  # an operation whose rows could not be told apart as tokens
    open: bool = False

    def begin(self) -> None:
        self.tokens.clear()
        self.apart.clear()
        self.open = True

    def add(self, block: int, told: Tensor, layout: Layout, *, pooled: bool) -> None:
        """Numbers [B, M] of an operation on M rows: all tokens, the patches, tokens behind late ones, or no tokens."""
        rows, count = told.shape[1], layout.tokens
        if pooled or not (rows == layout.patches or count <= rows <= count + MOST_PREFIX_TOKENS):
            self.apart[block] = self.apart.get(block, 0) + told.sum(1)
            return
        if rows == layout.patches:
            told = F.pad(told, (layout.prefix, 0))
        own, late = told[:, -count:], told[:, :-count].sum(1)
        self.tokens[block] = self.tokens.get(block, 0) + own
        self.apart[block] = self.apart.get(block, 0) + late

    def by_layer(self, blocks: Sequence[int], pixels: Tensor) -> Biases:
        """A layer has what was added from its block on until the next one starts; the last has the end's too."""
        self.open = False
        wide = torch.promote_types(pixels.dtype, torch.float32)
        apart = pixels.new_zeros(len(blocks), len(pixels), dtype=wide)
        tokens = apart[..., None].repeat(1, 1, self.count)
        stops = [*blocks[1:], math.inf][: len(blocks)]  # no blocks, no stops: a CNN
        for layer, (start, stop) in enumerate(zip(blocks, stops, strict=True)):
            for told, into in ((self.tokens, tokens), (self.apart, apart)):
                for block, value in told.items():
                    if start <= block < stop:
                        into[layer] += value
        return Biases(tokens, apart, self.unplaced)


@dataclass(frozen=True, eq=False)
class Biases:
    """What the layers' own biases add to the score."""

    tokens: Tensor  # [L, B, N]
    apart: Tensor  # [L, B], in vectors that are no token's: pooled ones, the classifier's
    unplaced: str = ""

    def checked(self) -> Biases:
        if self.unplaced:
            raise NotApplicable(
                f"The biases of this model cannot be told apart by token: {self.unplaced} lies on no grid of all "
                "tokens (windows, stages, a CNN). Use fullgrad-pixel, or ixg, which needs none."
            )
        return self


def watched(capture: Capture, kinds: Iterable[str], plan: ModelStructure, batch: int) -> dict[str, BiasAccumulator]:
    """A ledger for each kind, kept by the observer of this capture."""
    count = 0 if plan.layout is None else plan.layout.tokens
    split = next(
        (f"an attention of {p.queries} × {p.keys}" for p in plan.layers if p.kind in ("window", "reduced")), ""
    )
    ledgers = {
        kind: BiasAccumulator(count, unplaced=split if count else "its input") for kind in kinds if kind != "maps"
    }
    if ledgers and plan.layout is not None:
        capture.observer = Watcher(capture, ledgers, batch, plan, plan.layout).see
    return ledgers


class Watcher:
    """The observer of a capture: notes each operation's b, and hooks its output to a ledger."""

    def __init__(
        self, capture: Capture, ledgers: Mapping[str, BiasAccumulator], batch: int, plan: ModelStructure, layout: Layout
    ) -> None:
        self.capture, self.ledgers, self.batch = capture, ledgers, batch
        self.layout, self.sequence_first = layout, plan.sequence_first
        own = [place for place, part in enumerate(plan.parts) if part.kind not in ("pool", "aside")]
        self.calls = own[-1] + 1 if own else 0  # attention calls up to the last layer's: what follows is a pool's
        self._scores = 0  # how many numbers the last q kᵀ has, until its attention is done
        self._done = 0  # attention calls

    def see(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        if self.capture.block < 0 or not isinstance(out, Tensor) or not out.requires_grad:
            return
        if len(self.capture.calls) > self._done:
            self._scores, self._done = 0, len(self.capture.calls)
        elif is_matrix_product(func, args) and out.ndim >= 3:
            self._scores = out.numel()
        for kind, ledger in self.ledgers.items():
            # What is added to attention alone (relative positions, a mix of heads) is, like positions, no token's bias.
            if kind == "learned" and self._scores == out.numel():
                continue
            b = bias_term(kind, func, args, kwargs, out)
            if b is not None:
                self._hook(ledger, func, out, b.detach() if isinstance(b, Tensor) else b)

    def _hook(self, ledger: BiasAccumulator, func: Any, out: Tensor, b: Tensor | float) -> None:
        layout, block, batch = self.layout, self.capture.block, self.batch
        second = out.ndim > 2 and (func in CHANNELS_SECOND or self._image_shaped(out))
        shape = tuple(out.shape[:1] + out.shape[2:] if second else out.shape[:-1])
        end = self.capture.tape is not None  # where pools come, and a stream [N, B, d] may have been turned back
        turned = self.sequence_first and out.ndim == 3 and shape[1] == batch and not (end and shape[0] == batch)
        # torch's own multi-head attention works on [N, B, d] and [N·B, d], whatever the model does.
        transposed = func is F.linear if self.capture._depth else turned
        rows = rows_of(shape, batch, layout, transposed)
        rows = 1 if rows is None and end and shape[0] % batch == 0 else rows
        # What a pool has made, or the head reads, has rows that are no tokens, however many there are.
        pooled = shape == (batch,) or any(call.queries == rows for call in self.capture.calls[self.calls :])
        if rows is None or not (end or rows in (1, layout.patches, layout.tokens)):
            ledger.unplaced = ledger.unplaced or f"{getattr(func, '__name__', func)} {list(out.shape)}"
            return
        if second and isinstance(b, Tensor) and b.ndim == 1:
            b = b.view(-1, *(1,) * (out.ndim - 2))

        def told(gradient: Tensor | None) -> None:
            if ledger.open and gradient is not None:  # a rule may pass nothing on
                wide = gradient.detach().to(torch.promote_types(gradient.dtype, torch.float32))
                if isinstance(b, Tensor) and b.ndim == 1 and not second:  # a learned bias, the same for all rows
                    numbers = wide @ b.to(wide)
                else:
                    numbers = (wide * b).sum(1 if second else -1)
                ledger.add(block, by_row(numbers, batch, rows, transposed), layout, pooled=pooled)

        out.register_hook(told)  # type: ignore[no-untyped-call]

    def _image_shaped(self, out: Tensor) -> bool:
        """[B, d, rows, cols]"""
        grid, shape = self.layout.grid, tuple(out.shape)
        return out.ndim == 4 and shape[2:] == grid and shape[1:3] != grid and shape[1] != self.layout.tokens


def rows_of(shape: tuple[int, ...], batch: int, layout: Layout, transposed: bool) -> int | None:
    """How many rows an image has in numbers of this shape, channels gone; None if images cannot be told apart."""
    if transposed or len(shape) == 1:
        return math.prod(shape) // batch if math.prod(shape) % batch == 0 else None
    if shape[0] % batch:
        return None
    for count in (layout.tokens, layout.patches):  # [B, N], [B, H, N], [B·H, N], [B, N, H], [B, rows, cols]
        if shape[-1] == count or shape[1] == count or (shape[0] == batch and math.prod(shape[1:]) == count):
            return count
    return (shape[1] if len(shape) == 2 else 1) if shape[0] == batch else None


def by_row(numbers: Tensor, batch: int, rows: int, transposed: bool) -> Tensor:
    """[B, rows]: heads are added up."""
    if transposed:
        return numbers.reshape(rows, batch).T
    if numbers.ndim > 2 and numbers.shape[1] == rows:  # [B, N, H], [B, queries, keys]
        return numbers.flatten(2).sum(-1)
    return numbers.reshape(batch, -1, rows).sum(1)
