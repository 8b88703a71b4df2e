"""Write tests/fixtures/quantus_maps.npz with Quantus 0.6.0 itself: robustness, randomisation, complexity, localisation.

    python -m venv /tmp/peer && /tmp/peer/bin/pip install quantus==0.6.0 timm
    PYTHONPATH=src:tests:tests/parity /tmp/peer/bin/python tests/parity/make_quantus_maps.py

Every image is given to Quantus alone, after np.random.seed(SEED). Maps of models are input × gradient by plain
autograd, averaged over each patch, and every pixel of a patch gets that value. Metrics of maps alone get random maps.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import quantus
import torch
import torch.nn.functional as F
from peers_models import TARGETS, vit
from small_cnn import small_cnn
from torch import nn

from helpers.exact_models import CLASSES

FIXTURE = Path(__file__).parent.parent / "fixtures" / "quantus_maps.npz"
SEED = 42  # Quantus's own, where it sets one
SAMPLES = 12
QUIET = {"disable_warnings": True, "display_progressbar": False}
SIZE = 20


def their_maps(patch: int) -> Callable[..., np.ndarray]:
    def explain(model: Any, inputs: Any, targets: Any, **_: Any) -> np.ndarray:
        x = torch.as_tensor(np.asarray(inputs)).double().requires_grad_()
        scores = model(x)
        scores[torch.arange(len(x)), torch.as_tensor(np.asarray(targets)).long()].sum().backward()
        assert x.grad is not None
        patches = F.avg_pool2d((x * x.grad).detach().sum(1, keepdim=True), patch)
        return F.interpolate(patches, scale_factor=patch, mode="nearest").numpy()

    return explain


def image_by_image(metric: Any, module: nn.Module, images: torch.Tensor, explain: Any, **more: Any) -> list[Any]:
    curves = []
    for image, target in zip(images, TARGETS, strict=True):
        np.random.seed(SEED)  # noqa: NPY002, the stream that Quantus draws from
        scores = metric(
            model=module,
            x_batch=image[None].numpy(),
            y_batch=np.array([target]),
            a_batch=None,
            explain_func=explain,
            device="cpu",
            **more,
        )
        curves.append(scores)
    return curves


def of_models(arrays: dict[str, np.ndarray]) -> None:
    module, images = vit()
    cases = {"vit": (module, images, int(module.patch_embed.patch_size[0])), "cnn": (*small_cnn(), 4)}
    torch.set_default_dtype(torch.float64)  # Quantus hands its predictions torch.Tensor(x)
    for name, (model, pictures, patch) in cases.items():
        explain = their_maps(patch)
        metrics = {
            "max-sensitivity": quantus.MaxSensitivity(nr_samples=SAMPLES, **QUIET),
            "avg-sensitivity": quantus.AvgSensitivity(nr_samples=SAMPLES, **QUIET),
            "local-lipschitz": quantus.LocalLipschitzEstimate(nr_samples=SAMPLES, **QUIET),
            "local-lipschitz manhattan": quantus.LocalLipschitzEstimate(
                nr_samples=SAMPLES,
                norm_numerator=quantus.similarity_func.distance_manhattan,
                **QUIET,
            ),
            "relative-stability input": quantus.RelativeInputStability(nr_samples=SAMPLES, **QUIET),
            "relative-stability output": quantus.RelativeOutputStability(nr_samples=SAMPLES, **QUIET),
            "relative-stability input kept": quantus.RelativeInputStability(
                nr_samples=SAMPLES, return_nan_when_prediction_changes=False, **QUIET
            ),
            "relative-stability output kept": quantus.RelativeOutputStability(
                nr_samples=SAMPLES, return_nan_when_prediction_changes=False, **QUIET
            ),
            "random-logit": quantus.RandomLogit(num_classes=CLASSES, **QUIET),
            "efficient-mprt": quantus.EfficientMPRT(**QUIET),
        }
        for text, metric in metrics.items():
            arrays[f"{name} {text}"] = np.array(image_by_image(metric, model, pictures, explain)).reshape(-1)
            print(name, text, arrays[f"{name} {text}"])
        for order in ("top_down", "bottom_up", "independent"):
            curves = image_by_image(quantus.MPRT(layer_order=order, **QUIET), model, pictures, explain)
            arrays[f"{name} mprt {order}"] = np.array([[s[0] for s in curve.values()] for curve in curves])
        # SmoothMPRT asks quantus.explain whatever explain_func it is given, so that is what has to make the maps.
        usual = quantus.explain
        quantus.explain = explain
        for order in ("bottom_up", "top_down"):
            smooth = quantus.SmoothMPRT(nr_samples=4, layer_order=order, **QUIET)
            curves = image_by_image(smooth, model, pictures, explain)
            arrays[f"{name} smooth-mprt {order}"] = np.array([[s[0] for s in curve.values()] for curve in curves])
            average = quantus.SmoothMPRT(nr_samples=4, layer_order=order, return_average_correlation=True, **QUIET)
            averages = image_by_image(average, model, pictures, explain)
            arrays[f"{name} smooth-mprt {order} average"] = np.array(averages).reshape(-1)
            print(name, "smooth", order, arrays[f"{name} smooth-mprt {order} average"])
        quantus.explain = usual


def of_maps(arrays: dict[str, np.ndarray]) -> None:
    rng = np.random.default_rng(0)
    maps = rng.normal(size=(4, SIZE, SIZE)) ** 3
    maps[1] = np.abs(maps[1])
    maps[2, 5:, :] *= 1e-6  # values below the threshold of the effective complexity
    masks = rng.random(maps.shape) < np.array([0.3, 0.1, 0.5, 0.02])[:, None, None]
    ties = maps.copy()
    ties[0, [0, 3], [2, 7]] = ties[0].max() + 1  # two highest points, the second of them on the object
    masks[0, 0, 2], masks[0, 3, 7] = False, True
    arrays |= {"maps": ties, "masks": masks}
    metrics = {
        "sparseness": quantus.Sparseness(**QUIET),
        "complexity": quantus.Complexity(**QUIET),
        "effective-complexity": quantus.EffectiveComplexity(**QUIET),
        "roc-auc": quantus.AUC(**QUIET),
        "pointing-game": quantus.PointingGame(**QUIET),
        "relevance-mass": quantus.RelevanceMassAccuracy(**QUIET),
        "relevance-rank": quantus.RelevanceRankAccuracy(**QUIET),
        "top-k": quantus.TopKIntersection(k=50, **QUIET),
        "attribution-localisation": quantus.AttributionLocalisation(**QUIET),
        "energy-pointing-game": quantus.AttributionLocalisation(positive_attributions=True, abs=False, **QUIET),
    }
    empty = np.zeros_like(masks[:1])
    for text, metric in metrics.items():
        alone = [_of_map(metric, ties[i : i + 1], masks[i : i + 1]) for i in range(len(maps))]
        arrays[text] = np.array(alone, dtype=np.float64).reshape(-1)
        print(text, arrays[text])
    arrays["pointing-game of an empty mask"] = np.array(_of_map(metrics["pointing-game"], ties[:1], empty), float)
    arrays["pointing-game of an empty mask"] = arrays["pointing-game of an empty mask"].reshape(-1)
    together = quantus.EffectiveComplexity(**QUIET)
    arrays["effective-complexity of the batch"] = np.array(
        _of_map(together, ties * np.array([1e4, 1, 1, 1])[:, None, None], masks), float
    )


def _of_map(metric: Any, maps: np.ndarray, masks: np.ndarray) -> Any:
    images = np.random.default_rng(1).normal(size=(len(maps), 3, SIZE, SIZE))
    return metric(
        model=None,
        x_batch=images,
        y_batch=np.zeros(len(maps), dtype=int),
        a_batch=maps[:, None].copy(),
        s_batch=masks[:, None],
        channel_first=True,
    )


if __name__ == "__main__":
    results: dict[str, np.ndarray] = {}
    of_maps(results)
    of_models(results)
    np.savez_compressed(FIXTURE, **results)
    print(FIXTURE.stat().st_size, "bytes")
