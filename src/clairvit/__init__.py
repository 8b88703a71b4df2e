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

import sys
from typing import Any

import lazy_loader

# `__init__.pyi` lists the names. They are imported when first used: `clairvit --help` must not wait for torch.
_public_name, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

# Names of 0.2 -> where they are now
_RENAMED = {
    "patch": "intervene",
    "patch_sweep": "intervene_sweep",
    "PatchedScores": "results.InterventionScores",
    "PatchSweep": "results.InterventionSweep",
    "similar": "match",
    "Similarity": "results.ImageMatch",
    "concat": "Explanation.concat",
    **{name: f"ensembles.{name}" for name in ("ensemble", "shift", "smooth")},
    **{
        name: f"errors.{name}"
        for name in ("BadInput", "CaptureError", "ModelUnavailable", "NotApplicable", "UnknownName", "WrongType")
    },
    **{
        name: f"extend.{name}"
        for name in ("EvalContext", "LayerView", "MapResult", "MethodSpec", "MetricOutput", "MetricSpec", "Requires")
    },
    **{name: f"models.{name}" for name in ("Preprocess", "TextEncoder")},
    **{name: f"recorders.{name}" for name in ("Recorder", "ResidualSums")},
    **{
        name: f"results.{name}"
        for name in (
            *("Check", "CheckResult", "Cost", "Curve", "Diagnosis", "Heads", "MapCheck", "PatchFeatures"),
            *("Recommendation", "RemovalEffect", "TextRelevance"),
        )
    },
    **{name: f"targets.{name}" for name in ("Direction", "Target", "TargetBatch")},
}


def __getattr__(name: str) -> Any:
    if name in __all__:
        return _public_name(name)
    if name in _RENAMED:
        sentence = f"cv.{name} is called cv.{_RENAMED[name]} since 0.3."
        # `from clairvit import NAME` would say "cannot import name" for an AttributeError
        if sys._getframe(1).f_code.co_name == "_handle_fromlist":
            raise ImportError(sentence, name=name)
        raise AttributeError(sentence, name=name, obj=sys.modules[__name__])
    raise AttributeError(f"module 'clairvit' has no attribute {name!r}", name=name, obj=sys.modules[__name__])
