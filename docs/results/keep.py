"""Keep of a scores.json (clairvit evaluate) what docs/results.md is made of:

    python docs/results/keep.py scores.json "DINOv2-S, 95 % right" > docs/results/dinov2.json

Means, standard errors and intervals of every method and metric, and paired differences for the papers' claims.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np

from clairvit.metrics.confidence_intervals import mean_interval

DIGITS = 4
# (method that the paper says is better, than which, who says so)
CLAIMS = [
    ("grad-rollout", "rollout", "CMI report: gradient rollout lies more on the foreground"),
    ("genatt", "rollout", "Chefer et al.: gradients and relevance beat rollout"),
    ("transatt", "gradcam", "Coporan: LRP (Transformer Attribution) beats CAM"),
    ("transatt", "rollout", "Chefer et al.: Transformer Attribution beats rollout"),
    ("gmar-l1", "rollout", "Joita's report: GMAR beats rollout"),
    ("gmar-l2", "rollout", "Joita's report: GMAR beats rollout"),
    ("legrad", "rollout", "Joita's report: LeGrad beats rollout"),
    ("legrad", "gmar-l1", "Joita's report: LeGrad beats GMAR"),
    ("focusvit", "gradcam", "FocusViT beats Grad-CAM"),
    ("focusvit", "raw-attention", "FocusViT beats attention"),
    ("focusvit", "transatt", "FocusViT beats LRP"),
    *((f"{base}+skipplus", base, f"SkipPLUS improves {base}") for base in ("ixg", "genatt", "decompx", "attnlrp")),
    *((f"{base}+skipplus", f"{base}+plus", f"SkipPLUS improves PLUS, {base}") for base in ("ixg", "genatt", "decompx")),
]


def main(path: str, title: str) -> None:
    content = json.loads(Path(path).read_text(encoding="utf-8"))
    records = {(one["method"], one["metric"]): one for one in content["scores"]}
    metrics = list(dict.fromkeys(metric for _, metric in records))
    scores = [{**short(one), "method": method, "metric": metric} for (method, metric), one in records.items()]
    pairs = [
        {"better": better, "worse": worse, "who": who, "metric": metric, **paired(records, better, worse, metric)}
        for better, worse, who in CLAIMS
        for metric in metrics
        if (better, metric) in records and (worse, metric) in records
    ]
    kept = {
        "title": title,
        "model": Path(content["model"].removeprefix("file:")).name,
        "images": len(content["images"]),
        "versions": content["versions"],
        "skipped": content["skipped"],
        "better": {metric: next(one["better"] for (_, m), one in records.items() if m == metric) for metric in metrics},
        "baselines": sorted({one["method"] for one in content["scores"] if one["baseline"]}),
        "scores": scores,
        "pairs": pairs,
    }
    print("{" + ",\n".join(f"{json.dumps(key)}: {lines(value)}" for key, value in kept.items()) + "}")


def lines(value: Any) -> str:
    """A line for each member of a list, so that changes can be read."""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[\n" + ",\n".join(json.dumps(one, ensure_ascii=False) for one in value) + "]"
    return json.dumps(value, ensure_ascii=False)


def short(one: dict[str, Any]) -> dict[str, Any]:
    found = {key: rounded(one[key]) for key in ("mean", "standard_error")}
    found["interval"] = [rounded(edge) for edge in one["interval"]]
    return found | {key: one[key] for key in ("n_valid", "n_invalid", "n_degenerate")}


def paired(records: dict[Any, Any], better: str, worse: str, metric: str) -> dict[str, Any]:
    """The mean difference and its interval on images where both are defined; positive if the paper is right."""
    one, other = (
        np.array([math.nan if v is None else v for v in records[m, metric]["values"]]) for m in (better, worse)
    )
    gap = (one - other) * (1 if records[better, metric]["better"] == "higher" else -1)
    gap = gap[np.isfinite(gap)]
    low, high = mean_interval(gap, 0)
    return {"gap": rounded(float(gap.mean())), "interval": [rounded(low), rounded(high)], "n": len(gap)}


def rounded(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.{DIGITS}g}")


if __name__ == "__main__":
    main(*sys.argv[1:])
