"""Write tests/fixtures/surrogates.npz with the peers' own packages (lime 0.2.0.1, shap 0.51.0, captum 0.9.0).

    python -m venv /tmp/peer && /tmp/peer/bin/pip install lime shap captum scikit-learn -e .
    PYTHONPATH=src:tests /tmp/peer/bin/python tests/parity/make_surrogates.py

The built-in model on the demo image, removed parts in the mean colour. Features are the 7 × 7 cells of 2 × 2 patches,
each peer is run with several seeds for its mean and its standard error. shap is also asked for the exact values of
2 × 2 cells, and lime's solver for its answer to given samples. The scores of the samples that ClairViT draws are
written too, so that a test need not run the model three thousand times.

The file in the repository holds the scores of the first edition of the built-in model, which the tests only compare
with each other; `shap exact`, which a test compares with the model itself, was made again with the second edition.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import shap
import sklearn.metrics
import torch
from captum._utils.models.linear_model import SkLearnRidge
from captum.attr import KernelShap, Lime
from lime.lime_base import LimeBase
from lime.lime_image import LimeImageExplainer
from torch import Tensor

import clairvit as cv
from clairvit.perturbation.segments import random_halves, shapley_coalitions

FIXTURES = Path(__file__).parent.parent / "fixtures"
CELLS, SEEDS, SAMPLES, WIDTH = 7, 4, 1000, 0.25
MODEL = cv.load("pets")
PIXELS = cv.trace(MODEL, "demo").pixels.detach()
TARGET = int(MODEL.logits(PIXELS).argmax())
MEAN, STD = (np.array(values, dtype=np.float64) for values in (MODEL.preprocess.mean, MODEL.preprocess.std))


def mask_of(cells: int) -> np.ndarray:
    """[224, 224]: the cell of each pixel. 14 patches of 16 pixels divide by 2 and by 7."""
    place = np.arange(224) // (224 // cells)
    return place[:, None] * cells + place


@torch.no_grad()
def scores(pixels: Tensor, kind: str) -> np.ndarray:
    """[n] of normalised images, eight at a time."""
    logits = torch.cat([MODEL.logits(part) for part in pixels.float().split(8)]).double()
    return (logits if kind == "logit" else logits.softmax(-1))[:, TARGET].numpy()


def keeping(kept: np.ndarray, cells: int, kind: str) -> np.ndarray:
    """[n, cells²] of 0 and 1 -> scores [n]."""
    shown = torch.from_numpy(np.asarray(kept)[:, mask_of(cells)]).float()[:, None]
    return np.concatenate([scores(PIXELS * part, kind) for part in shown.split(64)])


def lime_values(seed: int) -> np.ndarray:
    """lime's kernel is exp(-D²/2w²); its width is chosen so that it is ours of width 0.25."""
    image = PIXELS[0].permute(1, 2, 0).double().numpy() * STD + MEAN

    def classify(images: np.ndarray) -> np.ndarray:
        probabilities = scores(torch.from_numpy((images - MEAN) / STD).permute(0, 3, 1, 2), "prob")
        return np.stack([probabilities, 1 - probabilities], 1)

    explainer = LimeImageExplainer(kernel_width=WIDTH / np.sqrt(2), feature_selection="none", random_state=seed)
    reference = explainer.explain_instance(
        image,
        classify,
        labels=(0,),
        top_labels=None,
        hide_color=MEAN,
        num_samples=SAMPLES,
        segmentation_fn=lambda _: mask_of(CELLS),
    )
    return np.array([value for _, value in sorted(reference.local_exp[0])])


def captum_lime_values(seed: int) -> np.ndarray:
    """Its own kernel measures the images' distance, not the samples'; here the distance of the samples."""
    torch.manual_seed(seed)

    def closeness(_: Tensor, __: Tensor, sample: Tensor, **___: object) -> float:
        return float(np.exp(-(((1 - np.sqrt(sample.float().mean().item())) / WIDTH) ** 2)))

    explainer = Lime(lambda x: torch.from_numpy(scores(x, "prob")), SkLearnRidge(alpha=1.0), closeness)
    mask = torch.from_numpy(mask_of(CELLS))[None, None].expand_as(PIXELS)
    reference = explainer.attribute(
        PIXELS, feature_mask=mask, n_samples=SAMPLES, perturbations_per_eval=8, return_input_shape=False
    )
    return reference.double().numpy().ravel()


def captum_shap_values(seed: int) -> np.ndarray:
    torch.manual_seed(seed)
    mask = torch.from_numpy(mask_of(CELLS))[None, None].expand_as(PIXELS)
    reference = KernelShap(lambda x: torch.from_numpy(scores(x, "logit"))).attribute(
        PIXELS, feature_mask=mask, n_samples=SAMPLES, perturbations_per_eval=8, return_input_shape=False
    )
    return reference.double().numpy().ravel()


def shap_values(seed: int, cells: int, samples: int) -> np.ndarray:
    """Without its own choice of ten features (l1_reg), which is the default."""
    np.random.seed(seed)  # noqa: NPY002, the one that shap draws from
    count = cells * cells
    explainer = shap.KernelExplainer(lambda kept: keeping(kept, cells, "logit"), np.zeros((1, count)))
    reference = explainer.shap_values(np.ones((1, count)), nsamples=samples, l1_reg=False, silent=True)
    return np.asarray(reference).reshape(count)


def lime_fit(kept: np.ndarray, outputs: np.ndarray) -> np.ndarray:
    """lime's solver, with its own distance and kernel at their default width."""
    base = LimeBase(lambda d: np.sqrt(np.exp(-(d**2) / WIDTH**2)), random_state=0)
    distance = sklearn.metrics.pairwise_distances(kept, kept[:1], metric="cosine").ravel()
    pairs = base.explain_instance_with_data(kept, outputs[:, None], distance, 0, kept.shape[1], "none")[1]
    return np.array([value for _, value in sorted(pairs)])


def half_scores() -> dict[str, np.ndarray]:
    """Probabilities of what ClairViT draws for LIME, behind everything kept."""
    kept = np.concatenate([np.ones((1, CELLS**2), dtype=bool), random_halves(SAMPLES - 1, CELLS**2, seed=1).numpy()])
    return {"halves": np.packbits(kept), "half scores": keeping(kept, CELLS, "prob")}


def coalition_scores() -> dict[str, np.ndarray]:
    """Logits of what ClairViT draws for 7 × 7 cells with the default number of samples, from plain painted images."""
    drawn = shapley_coalitions(CELLS**2, CELLS**2 + 1024, seed=1)
    sets = drawn.sets.numpy()
    ends = keeping(np.stack([np.zeros(CELLS**2), np.ones(CELLS**2)]), CELLS, "logit")
    with_set, with_rest = keeping(sets, CELLS, "logit"), keeping(~sets, CELLS, "logit")
    return {"sets": np.packbits(sets), "halved": (with_set - with_rest) / 2, "total": ends[1] - ends[0]}


def main() -> None:
    arrays: dict[str, np.ndarray] = {"target": np.array(TARGET)}
    runs = {
        "lime": lime_values,
        "captum lime": captum_lime_values,
        "captum kernelshap": captum_shap_values,
        "shap": lambda seed: shap_values(seed, CELLS, SAMPLES),
    }
    for name, values in runs.items():
        draws = np.stack([values(seed) for seed in range(SEEDS)])
        arrays[name] = draws.mean(0)
        # Four runs say little of one feature's error, and enough of all features' together.
        arrays[f"{name} error"] = np.sqrt(draws.var(0, ddof=1).mean() / SEEDS)
        print(name, float(arrays[f"{name} error"]), np.abs(arrays[name]).mean(), flush=True)
        np.savez_compressed(FIXTURES / "surrogates.npz", **arrays)
    arrays |= half_scores() | coalition_scores()
    arrays["shap exact"] = shap_values(0, 2, 100)
    kept = (np.random.default_rng(0).random((120, CELLS * CELLS)) < 0.5).astype(np.float64)
    kept[0] = 1
    arrays["kept"] = kept.astype(bool)
    arrays["said"] = keeping(kept, CELLS, "prob")
    arrays["lime fit"] = lime_fit(kept, arrays["said"])
    np.savez_compressed(FIXTURES / "surrogates.npz", **arrays)


if __name__ == "__main__":
    main()
