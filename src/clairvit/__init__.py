"""ClairViT: why did my Vision Transformer say that, and how far can I trust the answer?

>>> import clairvit as cv
>>> model = cv.load("pets")
>>> cv.explain(model, "cat.jpg", method="legrad").save("cat.png")
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from clairvit._version import __version__ as __version__

if TYPE_CHECKING:
    from clairvit.diagnostics.doctor import doctor as doctor
    from clairvit.diagnostics.report import Check as Check
    from clairvit.diagnostics.report import Diagnosis as Diagnosis
    from clairvit.errors import ClairError as ClairError
    from clairvit.methods.ensembles import ensemble as ensemble
    from clairvit.methods.ensembles import smooth as smooth
    from clairvit.methods.explain import compare as compare
    from clairvit.methods.explain import explain as explain
    from clairvit.methods.explanation import Explanation as Explanation
    from clairvit.methods.registry import list_methods as list_methods
    from clairvit.metrics.evaluate import evaluate as evaluate
    from clairvit.metrics.registry import list_metrics as list_metrics
    from clairvit.metrics.score import Score as Score
    from clairvit.models.load import load as load
    from clairvit.models.model import Layout as Layout
    from clairvit.models.model import Model as Model
    from clairvit.models.wrap import wrap as wrap
    from clairvit.selection.choose import choose as choose
    from clairvit.targets.contrast import contrast as contrast
    from clairvit.tracing.trace import trace as trace

# The verbs, imported when first used: `clairvit --help` must not wait for torch.
_PLACES = {
    "load": "clairvit.models.load",
    "wrap": "clairvit.models.wrap",
    "contrast": "clairvit.targets.contrast",
    "Layout": "clairvit.models.model",
    "Model": "clairvit.models.model",
    "explain": "clairvit.methods.explain",
    "compare": "clairvit.methods.explain",
    "smooth": "clairvit.methods.ensembles",
    "ensemble": "clairvit.methods.ensembles",
    "Explanation": "clairvit.methods.explanation",
    "trace": "clairvit.tracing.trace",
    "list_methods": "clairvit.methods.registry",
    "list_metrics": "clairvit.metrics.registry",
    "evaluate": "clairvit.metrics.evaluate",
    "choose": "clairvit.selection.choose",
    "Score": "clairvit.metrics.score",
    "doctor": "clairvit.diagnostics.doctor",
    "Check": "clairvit.diagnostics.report",
    "Diagnosis": "clairvit.diagnostics.report",
    "ClairError": "clairvit.errors",
}
__all__ = ["__version__", *_PLACES]


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        value = getattr(importlib.import_module(_PLACES[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'clairvit' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
