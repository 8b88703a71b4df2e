"""Results: the classes of what the verbs return, for annotations and `isinstance`."""

from clairvit._cost import Cost
from clairvit.audit.conditions import Condition, ConditionResult
from clairvit.audit.expectation import Aggregate, Expectation
from clairvit.audit.mistake_table import ConfusedPair, MistakeRules, Mistakes
from clairvit.diagnostics.report import Check, Diagnosis
from clairvit.methods.compare_models import ModelComparison
from clairvit.methods.explanation import Comparison, Explanation, Heads, TextRelevance
from clairvit.methods.features import PatchFeatures
from clairvit.methods.intervention import InterventionScores, InterventionSweep
from clairvit.methods.match import ImageMatch
from clairvit.methods.recipe import Recipe
from clairvit.methods.recommended import Recommendation
from clairvit.methods.result import Refinement
from clairvit.metrics.answer_check import Reference
from clairvit.metrics.certificate import Certificate, CertifiedPatches
from clairvit.metrics.check_result import AnswerCheck, CheckResult, MapCheck, RemovalEffect
from clairvit.metrics.score import Curve, Score, Scores
from clairvit.selection.result import Selection
from clairvit.selection.start_layer import StartLayer

__all__ = [
    "Aggregate",
    "AnswerCheck",
    "Certificate",
    "CertifiedPatches",
    "Check",
    "CheckResult",
    "Comparison",
    "Condition",
    "ConditionResult",
    "ConfusedPair",
    "Cost",
    "Curve",
    "Diagnosis",
    "Expectation",
    "Explanation",
    "Heads",
    "ImageMatch",
    "InterventionScores",
    "InterventionSweep",
    "MapCheck",
    "MistakeRules",
    "Mistakes",
    "ModelComparison",
    "PatchFeatures",
    "Recipe",
    "Recommendation",
    "Reference",
    "Refinement",
    "RemovalEffect",
    "Score",
    "Scores",
    "Selection",
    "StartLayer",
    "TextRelevance",
]
