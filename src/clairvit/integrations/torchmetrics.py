"""torchmetrics: a metric of a method as an object with `update`, `compute` and `reset`, summed over processes."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from clairvit.errors import importing
from clairvit.methods.spec import MethodSpec, resolve_method
from clairvit.metrics.evaluate import evaluate
from clairvit.metrics.registry import MetricSpec, resolve_metric
from clairvit.models.coerce import ModelLike, as_model

if TYPE_CHECKING:
    from torch.nn import Module as Metric
else:
    with importing("clairvit.integrations.torchmetrics", packages="torchmetrics"):
        Metric = importlib.import_module("torchmetrics").Metric


class ExplanationMetric(Metric):
    """The mean of a metric of ClairViT over images, as a metric of torchmetrics.

    Args:
        model: A `cv.Model`, a module or a name. It is not a submodule: `.to()` and `state_dict()` leave it alone.
        method: A method string or spec.
        metric: A metric string or spec of one image; metrics of a whole set need `cv.evaluate`.
        **options: Further arguments of `cv.evaluate`: seed, batch_size, normalize.

    Example:
        >>> import clairvit as cv
        >>> from clairvit.integrations.torchmetrics import ExplanationMetric
        >>> deletion = ExplanationMetric(cv.load("pets"), "genatt", "deletion")
        >>> deletion.higher_is_better
        False
    """

    full_state_update = False
    is_differentiable = False
    total: Tensor
    count: Tensor

    def __init__(
        self, model: ModelLike, method: str | MethodSpec, metric: str | MetricSpec = "deletion", **options: Any
    ) -> None:
        super().__init__()
        self._explained = (as_model(model, torch.zeros(1)),)  # in a tuple: torch registers no submodule of it
        self.method = resolve_method(method)
        self.spec = resolve_metric(metric)
        self.options = options
        add_state: Any = self.add_state
        add_state("total", default=torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        add_state("count", default=torch.zeros((), dtype=torch.long), dist_reduce_fx="sum")

    @property
    def higher_is_better(self) -> bool:
        """Whether a higher mean is better."""
        return self.spec.better == "higher"

    def update(self, images: Any, target: Any = None, **arguments: Any) -> None:
        """Score images; arguments as in `cv.evaluate` (masks=, labels=). Undefined values do not count."""
        score = evaluate(
            self._explained[0],
            images,
            self.method,
            self.spec,
            target=target,
            baselines=False,
            **self.options,
            **arguments,
        )
        values = score.values.double()
        self.total += values.nansum().to(self.total)
        self.count += values.isfinite().sum().to(self.count)

    def compute(self) -> Tensor:
        """Return the mean over the images for which the metric is defined; NaN without any."""
        return self.total / self.count
