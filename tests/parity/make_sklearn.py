"""Write tests/fixtures/sklearn.npz: maps against masks by scikit-learn's own metrics.

python -m venv /tmp/peer && /tmp/peer/bin/pip install scikit-learn
/tmp/peer/bin/python tests/parity/make_sklearn.py

Void pixels are left out of the arrays that scikit-learn is given. `ap(pooled=true)` is Chefer's: one average precision
over the background's channel 1 − r and the foreground's r, r the map in 0…1.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from sklearn.metrics import accuracy_score, average_precision_score, f1_score, jaccard_score, roc_auc_score

FIXTURES = Path(__file__).parent.parent / "fixtures"
SIZE = 12


def maps_and_masks() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Noise, few values (ties), patches, a constant, the mask itself, its opposite; masks of any shape; void pixels."""
    rng = np.random.default_rng(0)
    masks = rng.random((6, SIZE, SIZE)) < np.array([0.5, 0.3, 0.1, 0.3, 0.4, 0.2])[:, None, None]
    masks[1] = False
    masks[1, 2:9, 3:8] = True
    maps = rng.normal(size=masks.shape)
    maps[1] = np.round(maps[1])
    maps[2] = np.kron(np.round(rng.normal(size=(4, 4)), 1), np.ones((3, 3)))
    maps[3] = 0.7
    maps[4] = masks[4]
    maps[5] = -5.0 * masks[5]
    return maps, masks, rng.random(masks.shape) < 0.15


def scaled(heatmap: np.ndarray) -> np.ndarray:
    low, high = heatmap.min(), heatmap.max()
    return (heatmap - low) / (high - low) if high > low else np.zeros_like(heatmap)


def by_sklearn(heatmap: np.ndarray, mask: np.ndarray, counts: np.ndarray) -> dict[str, float]:
    r = scaled(heatmap)
    values, truth, background = heatmap[counts], mask[counts], ~mask[counts]
    scores = {
        "ap": average_precision_score(truth, values),
        "ap(pooled=true)": average_precision_score(
            np.concatenate([background, truth]), np.concatenate([1 - r[counts], r[counts]])
        ),
        "roc-auc": roc_auc_score(truth, values),
    }
    for name, edge in (("half", 0.5), ("mean", r.mean())):
        predicted = (r > edge)[counts]
        scores[f"iou(threshold={name})"] = jaccard_score(truth, predicted, zero_division=0)
        scores[f"iou(threshold={name},classes=two)"] = jaccard_score(truth, predicted, average="macro", zero_division=0)
        scores[f"f1(threshold={name})"] = f1_score(truth, predicted, zero_division=0)
        scores[f"pixel-accuracy(threshold={name})"] = accuracy_score(truth, predicted)
    return scores


def main() -> None:
    maps, masks, void = maps_and_masks()
    scores: dict[str, list[float]] = {}
    for prefix, left_out in (("", np.zeros_like(void)), ("void ", void)):
        for heatmap, mask, out in zip(maps, masks, left_out, strict=True):
            for name, value in by_sklearn(heatmap, mask, ~out).items():
                scores.setdefault(prefix + name, []).append(float(value))
    np.savez_compressed(FIXTURES / "sklearn.npz", maps=maps, masks=masks, void=void, **scores)


if __name__ == "__main__":
    main()
