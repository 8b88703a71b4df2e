"""Keep of the scores of `clairvit evaluate` what docs/results.md is made of:

    python docs/results/keep.py "DINOv2-S, 95 % right" scores.json slow.json > docs/results/dinov2.json

Means, standard errors and intervals of every method and metric, paired differences for the papers' claims, and those of
every method to `attnlrp+plus`. Several files are of the same images; a calibrated recipe is called `calibrated`.
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
DEFAULT = "attnlrp+plus"
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
    *(
        (f"{base}+skipplus", f"{base}+plus", f"SkipPLUS improves PLUS, {base}")
        for base in ("ixg", "genatt", "decompx", "attnlrp")
    ),
    ("reslrp", "attnlrp", "ResLRP beats AttnLRP"),
    ("reslrp", "legrad", "ResLRP beats LeGrad"),
    ("libra-fullgrad-plus", "fullgrad-plus", "LibraGrad improves FullGrad+"),
    ("libra-attcat", "attcat", "LibraGrad improves AttCAT"),
    ("libra-genatt", "genatt", "LibraGrad improves GenAtt"),
]


def main(title: str, *paths: str) -> None:
    contents = [json.loads(Path(path).read_text(encoding="utf-8")) for path in paths]
    first = contents[0]
    if any(content["images"] != first["images"] for content in contents):
        raise SystemExit("The files are of different images; expected scores of the same ones.")
    records: dict[tuple[str, str], dict[str, Any]] = {}
    for content in contents:
        for record in content["scores"]:
            records.setdefault((short_name(record["method"]), record["metric"]), record)
    metrics = list(dict.fromkeys(metric for _, metric in records))
    scores = [{**short(record), "method": method, "metric": metric} for (method, metric), record in records.items()]
    pairs = [
        {"better": better, "worse": worse, "who": who, "metric": metric, **paired(records, better, worse, metric)}
        for better, worse, who in CLAIMS
        for metric in metrics
        if (better, metric) in records and (worse, metric) in records
    ]
    to_default = [
        {"method": method, "metric": metric, **paired(records, method, DEFAULT, metric)}
        for method, metric in records
        if method != DEFAULT and (DEFAULT, metric) in records
    ]
    kept = {
        "title": title,
        "model": Path(first["model"].removeprefix("file:")).name,
        "images": len(first["images"]),
        "versions": first["versions"],
        "skipped": {name: why for content in contents for name, why in content["skipped"].items()},
        "better": {metric: next(one["better"] for (_, m), one in records.items() if m == metric) for metric in metrics},
        "baselines": sorted({one["method"] for content in contents for one in content["scores"] if one["baseline"]}),
        "scores": scores,
        "pairs": pairs,
        "to_default": to_default,
    }
    print("{" + ",\n".join(f"{json.dumps(key)}: {lines(value)}" for key, value in kept.items()) + "}")


def short_name(method: str) -> str:
    """Return "calibrated" for a recipe's "mine.json#1a2b…", other methods as they are."""
    return "calibrated" if ".json#" in method else method


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
    if len(gap) == 0:
        return {"gap": None, "interval": [None, None], "n": 0}
    low, high = mean_interval(gap, 0)
    return {"gap": rounded(float(gap.mean())), "interval": [rounded(low), rounded(high)], "n": len(gap)}


def rounded(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.{DIGITS}g}")


if __name__ == "__main__":
    main(*sys.argv[1:])
