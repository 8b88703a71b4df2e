"""Keep of the scores of `clairvit evaluate` what docs/results.md is made of:

    python docs/results/keep.py "DINOv2-S, 95 % right" scores.json slow.json > docs/results/dinov2.json
    python docs/results/keep.py --add docs/results/dinov2.json more.json > new.json

Means, standard errors and intervals of every method and metric, paired differences for the papers' claims, and those of
every method to `attnlrp+plus`. Several files are of other methods or metrics on the same images, or of the same ones on
other images, which are then joined; a calibrated recipe is called `calibrated`.
Where deletion and insertion were scored and their difference was not, it is taken image by image: the same passes.
`--add` keeps what there is and adds the methods that it lacks. `attnlrp+plus` must be among those of the new file, with
the means that were kept: then the images, the model and the settings are the same.
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
SAME = 2e-3  # by how much the means of the default may differ between two machines
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
    if title == "--add":
        kept = json.loads(Path(paths[0]).read_text(encoding="utf-8"))
        write(with_methods_of(kept, summary(kept["title"], *paths[1:])))
    else:
        write(summary(title, *paths))


def summary(title: str, *paths: str) -> dict[str, Any]:
    """Return means and paired differences of the scores in files of `clairvit evaluate`."""
    contents = [json.loads(Path(path).read_text(encoding="utf-8")) for path in paths]
    if len(contents) > 1 and all(not set(content["images"]) & set(contents[0]["images"]) for content in contents[1:]):
        contents = [of_all_images(contents)]
    first = contents[0]
    if any(content["images"] != first["images"] for content in contents):
        raise SystemExit(
            "Some images are in two files and not in all; expected files of the same images, or of others."
        )
    records: dict[tuple[str, str], dict[str, Any]] = {}
    for content in contents:
        for record in content["scores"]:
            records.setdefault((short_name(record["method"]), record["metric"]), record)
    records |= differences(records)
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
    return {
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


def of_all_images(contents: list[dict[str, Any]]) -> dict[str, Any]:
    """Return runs on different images as one run; all must have the same methods, metrics and model."""
    tables = [{(score["method"], score["metric"]): score for score in content["scores"]} for content in contents]
    if any(table.keys() != tables[0].keys() for table in tables) or len({run["model"] for run in contents}) > 1:
        raise SystemExit("The files are of different images, and of different methods, metrics or models.")
    scores = []
    for key, record in tables[0].items():
        values = [value for table in tables for value in table[key]["values"]]
        joined = {"n_degenerate": sum(table[key]["n_degenerate"] for table in tables), **statistics(values, record)}
        scores.append(record | joined)
    return contents[0] | {"images": [image for run in contents for image in run["images"]], "scores": scores}


def statistics(values: list[float | None], record: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a record with their mean, standard error and interval in the record's span."""
    low, high = record["span"]
    span = (-math.inf if low is None else low, math.inf if high is None else high)
    valid = np.array([value for value in values if value is not None and math.isfinite(value)])
    return {
        "values": values,
        "mean": float(valid.mean()) if len(valid) else None,
        "standard_error": float(valid.std(ddof=1) / len(valid) ** 0.5) if len(valid) > 1 else None,
        "interval": list(mean_interval(valid, 0, span)),
        "n_valid": len(valid),
        "n_invalid": len(values) - len(valid),
    }


def differences(records: dict[tuple[str, str], dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    """Return insertion − deletion of the methods that have both and not yet their difference."""
    added = {}
    for (method, metric), insertion in records.items():
        deletion = records.get((method, "deletion"))
        if metric != "insertion" or deletion is None or (method, "insertion-deletion") in records:
            continue
        pairs = zip(insertion["values"], deletion["values"], strict=True)
        values = [None if None in pair else pair[0] - pair[1] for pair in pairs]
        record = insertion | {"metric": "insertion-deletion", "span": [-1, 1]}
        added[method, "insertion-deletion"] = record | statistics(values, record)
    return added


def with_methods_of(kept: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Return what was kept with the methods of another run that it lacks; the default must have the same means."""
    means = [{row["metric"]: row["mean"] for row in run["scores"] if row["method"] == DEFAULT} for run in (kept, more)]
    shared = means[0].keys() & means[1].keys()
    differing = [metric for metric in shared if abs(means[0][metric] - means[1][metric]) > SAME]
    if kept["images"] != more["images"] or differing or not shared:
        seen = ", ".join(f"{metric} {means[1][metric]} instead of {means[0][metric]}" for metric in sorted(differing))
        raise SystemExit(f"The runs are not of the same images and model; expected the same means of {DEFAULT}. {seen}")
    known = {row["method"] for row in kept["scores"]}
    added = {
        key: [*kept[key], *(row for row in more[key] if row["method"] not in known and row["metric"] in kept["better"])]
        for key in ("scores", "to_default")
    }
    skipped = {name: reason for name, reason in more["skipped"].items() if name not in known}
    return {**kept, **added, "skipped": {**kept["skipped"], **skipped}}


def write(kept: dict[str, Any]) -> None:
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
