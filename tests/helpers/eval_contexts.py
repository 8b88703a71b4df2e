"""Cases without a model: maps and masks as a test wants them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from clairvit.metrics.context import EvalContext
from clairvit.metrics.registry import MetricOutput, resolve_metric
from clairvit.tracing.trace import Trace


def case_of(
    *maps: Tensor, masks: Tensor | None = None, void: Tensor | None = None, size: int = 16, seed: int = 0
) -> EvalContext:
    """Maps [B, rows, cols] of several methods; images of size × size that nobody looks at."""
    batch, rows, cols = maps[0].shape
    pixels = torch.arange(batch * 3 * size * size).reshape(batch, 3, size, size) / 1000
    layout = SimpleNamespace(grid=(rows, cols), patches=rows * cols, prefix=0)
    trace: Any = SimpleNamespace(pixels=pixels, layout=layout)
    return EvalContext(cast(Trace, trace), (), maps, masks=masks, void=void, seed=seed)


def values(text: str, context: EvalContext) -> Tensor:
    """[M, B]: what a metric says of each image, with or without a curve."""
    said = resolve_metric(text)(context)
    found: Tensor = said.values if isinstance(said, MetricOutput) else said
    return found
