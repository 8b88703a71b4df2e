"""Part: one attention call of a model, as its anatomy knows it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from clairvit.tracing.attention import Kind

MOST_PREFIX_TOKENS = 64  # CLS, distillation, registers: nobody has more


@dataclass(frozen=True)
class AttentionSite:
    """One attention call of the model: what kind it is and which module is its block."""

    kind: Kind
    block: nn.Module | None  # None: no called module holds this attention alone
    grid: tuple[int, int] | None  # of the block's tokens
    queries: int
    keys: int
