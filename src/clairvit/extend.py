"""Everything that a method, metric, target or recorder of your own imports.

    from clairvit.extend import LayerView, Product, method

    @method("mine", output="matrix", aggregation=Product(residual=1.0), family="custom", paper="ours")
    def mine(layer: LayerView) -> Tensor: ...

The recorders that ClairViT has are in `cv.recorders`, its rule tables in `cv.rules`.
"""

from clairvit._cost import Cost
from clairvit.methods.aggregation import Aggregation, Product, Single, Suffixes, Total
from clairvit.methods.flow import Flow
from clairvit.methods.layer_view import LayerView, mean_of_heads
from clairvit.methods.registry import (
    BACKWARD,
    FORWARD,
    FORWARD_ON_PLANE,
    NOTHING,
    Caveats,
    ExtraCost,
    OptionOverrides,
    Requires,
    WeightedHeads,
    method,
    named_variant,
)
from clairvit.methods.result import MapResult
from clairvit.methods.spec import MethodSpec
from clairvit.metrics.context import EvalContext
from clairvit.metrics.dataset_context import DatasetContext
from clairvit.metrics.registry import MetricOutput, MetricSpec, metric
from clairvit.option_types import Doc, Range
from clairvit.perturbation.probe import probing
from clairvit.targets.base import ScoreContext, Target, TargetBatch
from clairvit.tracing import ops
from clairvit.tracing.recorders.base import Op, Recorder

__all__ = [
    "BACKWARD",
    "FORWARD",
    "FORWARD_ON_PLANE",
    "NOTHING",
    "Aggregation",
    "Caveats",
    "Cost",
    "DatasetContext",
    "Doc",
    "EvalContext",
    "ExtraCost",
    "Flow",
    "LayerView",
    "MapResult",
    "MethodSpec",
    "MetricOutput",
    "MetricSpec",
    "Op",
    "OptionOverrides",
    "Product",
    "Range",
    "Recorder",
    "Requires",
    "ScoreContext",
    "Single",
    "Suffixes",
    "Target",
    "TargetBatch",
    "Total",
    "WeightedHeads",
    "mean_of_heads",
    "method",
    "metric",
    "named_variant",
    "ops",
    "probing",
]
