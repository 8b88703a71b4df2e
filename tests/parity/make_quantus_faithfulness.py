"""Write tests/fixtures/quantus_faithfulness.npz with Quantus 0.6.0 itself, each image alone after np.random.seed.

    python -m venv /tmp/peer && /tmp/peer/bin/pip install quantus==0.6.0 timm
    PYTHONPATH=src:tests /tmp/peer/bin/python tests/parity/make_quantus_faithfulness.py

Areas are not asked for: they need np.trapz, which numpy 2.4 no longer has.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import quantus
import torch
from torch import Tensor, nn

from parity.faithfulness_cases import MODELS, RUNS, SEED, SQUARES, STEP, TARGETS, dyadic, maps_of, photos

FIXTURE = Path(__file__).parent.parent / "fixtures" / "quantus_faithfulness.npz"
QUIET: dict[str, Any] = {"disable_warnings": True, "display_progressbar": False, "return_aggregate": False}


class Doubled(nn.Module):
    """Quantus makes float32 of every input."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, image: Tensor) -> Tensor:
        return self.module(image.double())


def score_of_metric(
    metric: Any, module: nn.Module, images: Tensor, maps: Tensor, targets: list[int], **more: Any
) -> np.ndarray:
    """[B, …]: every image alone, so that the draws of one do not depend on the others."""
    scores = []
    for image, target, heatmap in zip(images, targets, maps, strict=True):
        np.random.seed(SEED)  # noqa: NPY002 (what Quantus draws from)
        scores.append(
            metric(
                model=Doubled(module).eval(),
                x_batch=image[None].numpy(),
                y_batch=np.array([target]),
                a_batch=heatmap[None].numpy(),
                device="cpu",
                **more,
            )[0]
        )
    return np.array(scores)


def answers(name: str) -> dict[str, np.ndarray]:
    module, images = photos(name)
    maps, step = maps_of(images), STEP[name]
    metrics = {
        "correlation": quantus.FaithfulnessCorrelation(**QUIET),
        "correlation of 30": quantus.FaithfulnessCorrelation(nr_runs=RUNS, subset_size=100, **QUIET),
        "flipping": quantus.PixelFlipping(features_in_step=step, **QUIET),
        "estimate": quantus.FaithfulnessEstimate(features_in_step=step, **QUIET),
        "infidelity": quantus.Infidelity(n_perturb_samples=2, **QUIET),
        "infidelity of one": quantus.Infidelity(n_perturb_samples=1, **QUIET),
        "complete": quantus.Completeness(**QUIET),
    }
    for order in ("morf", "lerf", "random"):
        metrics[order] = quantus.RegionPerturbation(patch_size=SQUARES[name], order=order, **QUIET)
        metrics[f"{order} of 5"] = quantus.RegionPerturbation(patch_size=4, regions_evaluation=5, order=order, **QUIET)
    scores = {what: score_of_metric(metric, module, images, maps, TARGETS) for what, metric in metrics.items()}
    scores["flipping logits"] = score_of_metric(metrics["flipping"], module, images, maps, TARGETS, softmax=False)
    monotone = quantus.Monotonicity(features_in_step=step, abs=False, **QUIET)
    for sign in (1, -1):
        scores[f"monotone {sign}"] = score_of_metric(monotone, module, images, sign * maps, TARGETS)
    return scores


arrays = {f"{name} {what}": value for name in MODELS for what, value in answers(name).items()}
sums, ones, complete = dyadic()
arrays["dyadic complete"] = score_of_metric(quantus.Completeness(**QUIET), sums, ones, complete, [0])
np.savez_compressed(FIXTURE, **arrays)
for what, value in arrays.items():
    print(what, value.shape, value.dtype, value.flatten()[:3])
print(FIXTURE.stat().st_size, "bytes; torch", torch.__version__, "numpy", np.__version__)
