"""Evaluation contexts without a model, with maps and masks that a test chooses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from clairvit.metrics.context import EvalContext
from clairvit.metrics.registry import MetricOutput, resolve_metric
from clairvit.models.model import Layout
from clairvit.tracing.trace import Trace


def case_of(
    *maps: Tensor, masks: Tensor | None = None, void: Tensor | None = None, size: int = 16, seed: int = 0
) -> EvalContext:
    """Return a context with maps [B, rows, cols] of several methods; its images [B, 3, size, size] are arbitrary."""
    batch, rows, cols = maps[0].shape
    pixels = torch.arange(batch * 3 * size * size).reshape(batch, 3, size, size) / 1000
    layout = Layout(grid=(rows, cols), prefix=0, pooling="avg")
    trace: Any = SimpleNamespace(pixels=pixels, layout=layout)
    return EvalContext(cast(Trace, trace), (), maps, masks=masks, void=void, seed=seed)


def values(text: str, context: EvalContext) -> Tensor:
    """Return the values of a metric, [M, B], of an output with or without a curve."""
    output = resolve_metric(text)(context)
    metric_values: Tensor = output.values if isinstance(output, MetricOutput) else output
    return metric_values
