"""Print how much of a map lies on the object that was asked for, in scenes of two objects, for regions and queries.

Usage: python benchmarks/dense_truth.py --images 16 --steps 200

Two models are made of the built-in model `scenes`. The segmenter reads class scores off each patch token,
s(p) = W x_p + b, one of eight classes or background: W by ridge regression on scenes whose masks are known; then, with
--steps, all weights of a copy are trained (cross-entropy per patch, Adam). The detector has one query per class q,
which attends to the patches that score for it, a_q = softmax_p(s_q(p) / T): its class scores are Σ_p a_q(p) s(p), its
box is centred at Σ_p a_q(p) · place(p).

Each scene has two objects of different classes. What is said about a class must be explained by the object of this
class: the share of a map is the part of its positive relevance on the asked object, out of that on both objects. Both
are asked for; a map that does not depend on the question has 0.5. In brackets: how often the share is above 0.5.

"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import clairvit as cv
from clairvit.data.scenes import CLASSES, SIZE, Scene, scene
from clairvit.models.images import prepare

METHODS = ("rollout", "genatt", "saliency", "gradcam", "ixg+skipplus", "attnlrp+plus", "leave-one-out")
KINDS = {
    "region": "class in the whole image",
    "object": "class in the object's box",
    "query": "best query of the class",
    "box": "x of that query's box",
}
BACKGROUND_WEIGHT = 0.25  # of a patch in the loss: most are background
FIT_SEED, TEST_SEED, TRAIN_SEED = 2, 3, 4  # the built-in model was trained on scenes of seed 1
BACKGROUND = len(CLASSES)
TEMPERATURE = 0.05  # of the detector's attention, for ridge scores of 0…1
SCALE = 10.0  # from these to logits


class PatchScores(nn.Module):
    """A Vision Transformer of timm with a linear layer on its patch tokens: [B, 3, H, W] -> [B, C, rows, columns]."""

    def __init__(self, encoder: nn.Module, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(weight.shape[1], weight.shape[0]).to(weight)
        self.head.weight, self.head.bias = nn.Parameter(weight), nn.Parameter(bias)

    def forward(self, pixels: Tensor) -> Tensor:
        """Return the scores of all classes for every patch."""
        scores: Tensor = self.head(patch_tokens(self.encoder, pixels))  # [B, N, C]
        side = round(scores.shape[1] ** 0.5)
        return scores.mT.reshape(len(scores), -1, side, side)


class ClassQueries(nn.Module):
    """A detector of one query per class that attends to the patches of the highest scores for this class."""

    def __init__(self, segmenter: PatchScores, temperature: float = TEMPERATURE) -> None:
        super().__init__()
        self.segmenter, self.temperature = segmenter, temperature

    def forward(self, pixels: Tensor) -> dict[str, Tensor]:
        """Return class scores [B, Q, classes + 1] and boxes [B, Q, 4], centre and size in fractions of the image."""
        maps = self.segmenter(pixels)  # [B, C + 1, rows, columns]
        side = maps.shape[-1]
        scores = maps.flatten(2)
        attention = (scores[:, :BACKGROUND] / self.temperature).log_softmax(-1).exp()  # [B, Q, N]
        logits = (attention[:, :, None] * scores[:, None]).sum(-1)  # [B, Q, C + 1]
        y, x = torch.meshgrid(*[(torch.arange(side).to(maps) + 0.5) / side] * 2, indexing="ij")
        x, y = x.flatten(), y.flatten()
        centre_x, centre_y = (attention * x).sum(-1), (attention * y).sum(-1)
        width = (attention * (x - centre_x[..., None]).abs()).sum(-1) * 4  # |x - centre| of a box is a quarter of it
        height = (attention * (y - centre_y[..., None]).abs()).sum(-1) * 4
        return {"logits": logits, "pred_boxes": torch.stack([centre_x, centre_y, width, height], -1)}


def patch_tokens(encoder: nn.Module, pixels: Tensor) -> Tensor:
    """Return the patch tokens [B, N, d] after the last block and norm of a Vision Transformer of timm."""
    tokens: Tensor = encoder.forward_features(pixels)  # type: ignore[operator]
    return tokens[:, encoder.num_prefix_tokens :]


def patch_shares(mask: object, cells: int) -> Tensor:
    """Return the part of each patch that a mask [rows, columns] covers, [cells, cells]."""
    pixels = torch.as_tensor(mask, dtype=torch.float64)
    return nn.functional.adaptive_avg_pool2d(pixels[None, None], cells)[0, 0]


def patch_labels(drawn: Scene, cells: int) -> Tensor:
    """Return the class of each patch [cells · cells]: of the object whose marker covers it by half, else background."""
    labels = torch.full((cells, cells), BACKGROUND)
    for mask, name in ((drawn.part, drawn.class_name), (drawn.other_part, drawn.other_class_name)):
        if mask is not None and name is not None:
            labels[patch_shares(mask, cells) >= 0.5] = CLASSES.index(name)
    return labels.flatten()


def fit_segmenter(images: int = 160, ridge: float = 1e-3) -> cv.Model:
    """Return the segmenter: W = Yᵀ X (Xᵀ X + λ N I)⁻¹ on patch tokens X of scenes of two objects."""
    base = cv.load("scenes")
    drawn = [scene(FIT_SEED, number, objects=2) for number in range(images)]
    pixels = prepare([item.picture for item in drawn], base).pixels
    with torch.no_grad():
        tokens = patch_tokens(base.module, pixels).double()  # [B, N, d]
    cells = round(tokens.shape[1] ** 0.5)
    labels = torch.cat([patch_labels(item, cells) for item in drawn])
    X, Y = tokens.flatten(0, 1), nn.functional.one_hot(labels, BACKGROUND + 1).double()
    weights = 1 / Y.sum(0).clamp(min=1)[labels]  # every class counts alike, whatever its area
    weights = weights / weights.sum()
    mean, target = (weights[:, None] * X).sum(0), (weights[:, None] * Y).sum(0)
    centred = X - mean
    covariance = (centred.T * weights) @ centred + ridge * torch.eye(X.shape[1], dtype=torch.float64)
    W = torch.linalg.solve(covariance, (centred.T * weights) @ (Y - target)).T  # [C + 1, d]
    module = PatchScores(base.module, W.float(), (target - W @ mean).float())
    preprocess = base.preprocess
    names = [*CLASSES, "background"]
    return cv.wrap(module.eval(), mean=preprocess.mean, std=preprocess.std, size=SIZE, labels=names, name="segmenter")


def train_segmenter(segmenter: cv.Model, steps: int, batch: int = 32, rate: float = 1e-3) -> cv.Model:
    """Return a copy of the segmenter whose weights are all trained: cross-entropy per patch, new scenes every step."""
    module: Any = copy.deepcopy(segmenter.module).train()
    with torch.no_grad():
        module.head.weight.mul_(SCALE)  # ridge scores of 0…1 as logits
        module.head.bias.mul_(SCALE)
    class_weights = torch.tensor([1.0] * BACKGROUND + [BACKGROUND_WEIGHT])
    optimizer = torch.optim.Adam(module.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps)
    for step in range(steps):
        drawn = [scene(TRAIN_SEED, step * batch + number, objects=2) for number in range(batch)]
        maps = module(prepare([item.picture for item in drawn], segmenter).pixels)
        labels = torch.stack([patch_labels(item, maps.shape[-1]) for item in drawn])  # [B, N]
        loss = nn.functional.cross_entropy(maps.flatten(2), labels, weight=class_weights)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        if step % 20 == 0:
            print(f"step {step}: loss {float(loss):.3f}", file=sys.stderr)
    return dataclasses.replace(segmenter, module=module.eval())


def fit_detector(segmenter: cv.Model, temperature: float = TEMPERATURE) -> cv.Model:
    """Return the detector that reads the segmenter's scores."""
    assert isinstance(segmenter.module, PatchScores)
    preprocess = segmenter.preprocess
    return cv.wrap(
        ClassQueries(segmenter.module, temperature).eval(),
        mean=preprocess.mean,
        std=preprocess.std,
        size=SIZE,
        labels=[*CLASSES, "background"],
        activation="sigmoid",
        name="detector",
    )


def fit_models(steps: int = 0, weights: Path | None = None) -> tuple[cv.Model, cv.Model]:
    """Return segmenter and detector; a file of weights is read if it is there, and written after a training."""
    segmenter = fit_segmenter()
    if weights is not None and weights.is_file():
        module = copy.deepcopy(segmenter.module)
        module.load_state_dict(load_file(weights))
        segmenter = dataclasses.replace(segmenter, module=module)
    elif steps:
        segmenter = train_segmenter(segmenter, steps)
        if weights is not None:
            save_file(segmenter.module.state_dict(), weights)
    trained = bool(steps) or weights is not None
    return segmenter, fit_detector(segmenter, TEMPERATURE * SCALE if trained else TEMPERATURE)


def shares(
    model: cv.Model, scenes: Sequence[Scene], targets: Sequence[cv.targets.Target], methods: Sequence[str]
) -> dict[str, Tensor]:
    """Return of each method the share of positive relevance on the asked object, [2 · scenes].

    `targets` are the questions for the first object of each scene, then those for the second.
    """
    pixels = prepare([item.picture for item in scenes], model).pixels
    count = len(scenes)
    parts = [cv.compare(model, pixels, methods, target=list(targets[start : start + count])) for start in (0, count)]
    results: dict[str, Tensor] = {}
    for method in methods:
        values = []
        for part, asked_first in zip(parts, (True, False), strict=True):
            explanation = next(ex for name, ex in part.items() if name.startswith(method.partition("(")[0]))
            for row, item in enumerate(scenes):
                relevance = explanation.maps[row].double().clamp(min=0)
                first, second = (patch_shares(mask, len(relevance)) for mask in (item.mask, item.other_mask))
                on_first, on_second = float((relevance * first).sum()), float((relevance * second).sum())
                both = on_first + on_second
                values.append((on_first if asked_first else on_second) / both if both else 0.5)
        results[method] = torch.tensor(values)
    return results


def questions(kind: str, scenes: Sequence[Scene]) -> list[cv.targets.Target]:
    """Return the targets for the first object of each scene, then those for the second."""
    names = [*(item.class_name for item in scenes), *(str(item.other_class_name) for item in scenes)]
    if kind == "region":
        return [cv.Region(name, box=(0, 0, SIZE, SIZE)) for name in names]
    if kind == "object":
        masks = [*(item.mask for item in scenes), *(item.other_mask for item in scenes)]
        return [cv.Region(name, box=bounding_box(mask)) for name, mask in zip(names, masks, strict=True)]
    return [cv.Query(class_=name, box="x" if kind == "box" else None) for name in names]


def bounding_box(mask: object) -> tuple[int, int, int, int]:
    """Return (left, top, right, bottom) of a mask [rows, columns]."""
    rows, columns = torch.as_tensor(mask).nonzero(as_tuple=True)
    return int(columns.min()), int(rows.min()), int(columns.max()) + 1, int(rows.max()) + 1


def accuracy(segmenter: cv.Model, scenes: Sequence[Scene]) -> tuple[float, float]:
    """Return how often a patch on a marker, and a patch elsewhere, gets its class."""
    with torch.no_grad():
        maps = segmenter.module(prepare([item.picture for item in scenes], segmenter).pixels)
    predicted = maps.argmax(1).flatten(1)
    labels = torch.stack([patch_labels(item, maps.shape[-1]) for item in scenes])
    right, marked = predicted == labels, labels != BACKGROUND
    return float(right[marked].float().mean()), float(right[~marked].float().mean())


def main() -> None:
    """Fit both models and print a Markdown table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--images", type=int, default=16)
    parser.add_argument("--steps", type=int, default=0, help="train the segmenter; 0: ridge regression alone")
    parser.add_argument("--weights", type=Path, help="a .safetensors file: read if it is there, else written")
    parser.add_argument("--method", default=";".join(METHODS), help="separated by ';'")
    arguments = parser.parse_args()
    methods, started = arguments.method.split(";"), time.monotonic()
    segmenter, detector = fit_models(arguments.steps, arguments.weights)
    scenes = [scene(TEST_SEED, number, objects=2) for number in range(arguments.images)]
    marked, elsewhere = accuracy(segmenter, scenes)
    print(f"Patches with the right class: {marked:.3f} of those on markers, {elsewhere:.3f} of the others.\n")
    print(f"| method | {' | '.join(KINDS.values())} |")
    print("|---" * (len(KINDS) + 1) + "|")
    columns = {}
    for kind in KINDS:
        model = detector if kind in ("query", "box") else segmenter
        columns[kind] = shares(model, scenes, questions(kind, scenes), methods)
        print(f"{KINDS[kind]}: {time.monotonic() - started:.0f} s", file=sys.stderr)
    for method in methods:
        cells = [
            f"{values[method].mean():.3f} ({float((values[method] > 0.5).float().mean()):.0%})"
            for values in columns.values()
        ]
        print(f"| `{method}` | {' | '.join(cells)} |")
    print(f"{time.monotonic() - started:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
