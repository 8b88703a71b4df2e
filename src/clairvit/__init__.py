"""ClairViT: why did my Vision Transformer say that, and how far can I trust the answer?

Example:
    >>> import clairvit as cv
    >>> ex = cv.explain("pets", "demo")  # any model, any image; any registered method, or the best known one
    >>> ex.targets
    ('Bengal',)
    >>> many = cv.compare("pets", "demo", ["rollout", "genatt+skipplus"])
    >>> score = cv.evaluate("pets", "demo", "attnlrp+plus", "deletion")
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from clairvit._version import __version__ as __version__

if TYPE_CHECKING:
    from clairvit._cost import Cost as Cost
    from clairvit.bench.plan import Study as Study
    from clairvit.bench.run import run_study as run_study
    from clairvit.citations import cite as cite
    from clairvit.diagnostics.doctor import doctor as doctor
    from clairvit.diagnostics.report import Check as Check
    from clairvit.diagnostics.report import Diagnosis as Diagnosis
    from clairvit.errors import BadInput as BadInput
    from clairvit.errors import CaptureError as CaptureError
    from clairvit.errors import ClairError as ClairError
    from clairvit.errors import ClairWarning as ClairWarning
    from clairvit.errors import ModelUnavailable as ModelUnavailable
    from clairvit.errors import NotApplicable as NotApplicable
    from clairvit.errors import UnknownName as UnknownName
    from clairvit.errors import WrongType as WrongType
    from clairvit.methods.ensembles import ensemble as ensemble
    from clairvit.methods.ensembles import shift as shift
    from clairvit.methods.ensembles import smooth as smooth
    from clairvit.methods.explain import compare as compare
    from clairvit.methods.explain import explain as explain
    from clairvit.methods.explanation import Comparison as Comparison
    from clairvit.methods.explanation import Explanation as Explanation
    from clairvit.methods.explanation import Heads as Heads
    from clairvit.methods.explanation import TextRelevance as TextRelevance
    from clairvit.methods.explanation import concat as concat
    from clairvit.methods.features import PatchFeatures as PatchFeatures
    from clairvit.methods.features import features as features
    from clairvit.methods.generation import generate as generate
    from clairvit.methods.intervention import InterventionScores as InterventionScores
    from clairvit.methods.intervention import InterventionSweep as InterventionSweep
    from clairvit.methods.intervention import intervene as intervene
    from clairvit.methods.intervention import intervene_sweep as intervene_sweep
    from clairvit.methods.layer_view import LayerView as LayerView
    from clairvit.methods.logit_lens import logit_lens as logit_lens
    from clairvit.methods.match import ImageMatch as ImageMatch
    from clairvit.methods.match import match as match
    from clairvit.methods.recipe import Recipe as Recipe
    from clairvit.methods.recommended import Recommendation as Recommendation
    from clairvit.methods.recommended import recommended_methods as recommended_methods
    from clairvit.methods.registry import Requires as Requires
    from clairvit.methods.registry import method as method
    from clairvit.methods.result import MapResult as MapResult
    from clairvit.methods.spec import MethodSpec as MethodSpec
    from clairvit.metrics.check import check_maps as check_maps
    from clairvit.metrics.check_result import CheckResult as CheckResult
    from clairvit.metrics.check_result import MapCheck as MapCheck
    from clairvit.metrics.check_result import RemovalEffect as RemovalEffect
    from clairvit.metrics.context import EvalContext as EvalContext
    from clairvit.metrics.evaluate import evaluate as evaluate
    from clairvit.metrics.registry import MetricOutput as MetricOutput
    from clairvit.metrics.registry import MetricSpec as MetricSpec
    from clairvit.metrics.registry import metric as metric
    from clairvit.metrics.score import Curve as Curve
    from clairvit.metrics.score import Score as Score
    from clairvit.metrics.score import Scores as Scores
    from clairvit.models.load import load as load
    from clairvit.models.model import Layout as Layout
    from clairvit.models.model import Model as Model
    from clairvit.models.preprocess import Preprocess as Preprocess
    from clairvit.models.text_encoder import TextEncoder as TextEncoder
    from clairvit.models.wrap import wrap as wrap
    from clairvit.perturbation.site import Site as Site
    from clairvit.registry import list_methods as list_methods
    from clairvit.registry import list_metrics as list_metrics
    from clairvit.registry import list_models as list_models
    from clairvit.registry import parse_method as parse_method
    from clairvit.registry import parse_metric as parse_metric
    from clairvit.reports.files import report as report
    from clairvit.selection.calibrate import calibrate as calibrate
    from clairvit.selection.choose import choose as choose
    from clairvit.selection.result import Selection as Selection
    from clairvit.targets.base import Target as Target
    from clairvit.targets.base import TargetBatch as TargetBatch
    from clairvit.targets.contrast import Contrast as Contrast
    from clairvit.targets.function import Output as Output
    from clairvit.targets.query import Query as Query
    from clairvit.targets.region import Region as Region
    from clairvit.targets.similar import Similar as Similar
    from clairvit.targets.text import Text as Text
    from clairvit.targets.token import NextToken as NextToken
    from clairvit.tracing.neuron import Direction as Direction
    from clairvit.tracing.neuron import Neuron as Neuron
    from clairvit.tracing.recorders.base import Recorder as Recorder
    from clairvit.tracing.recorders.residual_sums import ResidualSums as ResidualSums
    from clairvit.tracing.trace import Trace as Trace
    from clairvit.tracing.trace import trace as trace

# Public name -> module. Imported when first used: `clairvit --help` must not wait for torch.
_MODULES = {
    # models
    "load": "clairvit.models.load",
    "wrap": "clairvit.models.wrap",
    "list_models": "clairvit.registry",
    "Model": "clairvit.models.model",
    "Preprocess": "clairvit.models.preprocess",
    "Layout": "clairvit.models.model",
    "TextEncoder": "clairvit.models.text_encoder",
    # explanations
    "explain": "clairvit.methods.explain",
    "compare": "clairvit.methods.explain",
    "concat": "clairvit.methods.explanation",
    "Explanation": "clairvit.methods.explanation",
    "Comparison": "clairvit.methods.explanation",
    "Heads": "clairvit.methods.explanation",
    "TextRelevance": "clairvit.methods.explanation",
    "Cost": "clairvit._cost",
    "Target": "clairvit.targets.base",
    "TargetBatch": "clairvit.targets.base",
    "Contrast": "clairvit.targets.contrast",
    "Output": "clairvit.targets.function",
    "Neuron": "clairvit.tracing.neuron",
    "Direction": "clairvit.tracing.neuron",
    "Region": "clairvit.targets.region",
    "Query": "clairvit.targets.query",
    "Text": "clairvit.targets.text",
    "Similar": "clairvit.targets.similar",
    "match": "clairvit.methods.match",
    "ImageMatch": "clairvit.methods.match",
    "NextToken": "clairvit.targets.token",
    "generate": "clairvit.methods.generation",
    "shift": "clairvit.methods.ensembles",
    "smooth": "clairvit.methods.ensembles",
    "ensemble": "clairvit.methods.ensembles",
    "list_methods": "clairvit.registry",
    "parse_method": "clairvit.registry",
    "cite": "clairvit.citations",
    "method": "clairvit.methods.registry",
    "MethodSpec": "clairvit.methods.spec",
    "LayerView": "clairvit.methods.layer_view",
    "MapResult": "clairvit.methods.result",
    "Requires": "clairvit.methods.registry",
    "Recommendation": "clairvit.methods.recommended",
    "recommended_methods": "clairvit.methods.recommended",
    "Recorder": "clairvit.tracing.recorders.base",
    "ResidualSums": "clairvit.tracing.recorders.residual_sums",
    "features": "clairvit.methods.features",
    "PatchFeatures": "clairvit.methods.features",
    "trace": "clairvit.tracing.trace",
    "Trace": "clairvit.tracing.trace",
    # activations
    "intervene": "clairvit.methods.intervention",
    "intervene_sweep": "clairvit.methods.intervention",
    "logit_lens": "clairvit.methods.logit_lens",
    "Site": "clairvit.perturbation.site",
    "InterventionScores": "clairvit.methods.intervention",
    "InterventionSweep": "clairvit.methods.intervention",
    # scores
    "evaluate": "clairvit.metrics.evaluate",
    "Score": "clairvit.metrics.score",
    "Scores": "clairvit.metrics.score",
    "Curve": "clairvit.metrics.score",
    "list_metrics": "clairvit.registry",
    "parse_metric": "clairvit.registry",
    "metric": "clairvit.metrics.registry",
    "MetricSpec": "clairvit.metrics.registry",
    "MetricOutput": "clairvit.metrics.registry",
    "EvalContext": "clairvit.metrics.context",
    "check_maps": "clairvit.metrics.check",
    "CheckResult": "clairvit.metrics.check_result",
    "MapCheck": "clairvit.metrics.check_result",
    "RemovalEffect": "clairvit.metrics.check_result",
    "choose": "clairvit.selection.choose",
    "calibrate": "clairvit.selection.calibrate",
    "Selection": "clairvit.selection.result",
    "Recipe": "clairvit.methods.recipe",
    # studies
    "Study": "clairvit.bench.plan",
    "run_study": "clairvit.bench.run",
    "report": "clairvit.reports.files",
    # diagnosis
    "doctor": "clairvit.diagnostics.doctor",
    "Diagnosis": "clairvit.diagnostics.report",
    "Check": "clairvit.diagnostics.report",
    # errors
    "ClairError": "clairvit.errors",
    "BadInput": "clairvit.errors",
    "WrongType": "clairvit.errors",
    "UnknownName": "clairvit.errors",
    "NotApplicable": "clairvit.errors",
    "ModelUnavailable": "clairvit.errors",
    "CaptureError": "clairvit.errors",
    "ClairWarning": "clairvit.errors",
}
__all__ = ["__version__", *_MODULES]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        value = getattr(importlib.import_module(_MODULES[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'clairvit' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
