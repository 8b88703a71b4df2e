"""Compare candidates for the default method on models that plain ViTs say nothing about.

Usage:
    python benchmarks/default_method.py --device cuda --out default.json       # a Swin and a ResNet-18, trained here
    python benchmarks/default_method.py --models quantised --images 24         # the built-in model parts, in int8
    python benchmarks/default_method.py --models quantised --photos PATH       # the built-in model pets, in int8

No trained hierarchical model comes with the package, so small ones are trained here on generated part scenes, with
parts removed at random (see train_parts.py): a Swin of three stages (28, 14, 7 cells a side) and a ResNet-18. The
quantised model is the built-in `parts` with linear layers in int8 (torch's dynamic quantisation, on the CPU), which no
gradient comes back through; with `--photos`, the folder of Oxford-IIIT Pet, it is `pets`. Every candidate is scored on
new scenes, or photos: insertion − deletion with the engine's own removal and with mean-colour pixels, and average
precision against the object. Prints a Markdown table per model; of trained models also where the last stage holds the
answer: the accuracy of its head on the mean of the object's cells, and of the other cells.
"""

from __future__ import annotations

import argparse
import json
import math
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import clairvit as cv
from clairvit.data.dataset import ImageDataset, iter_batches
from clairvit.data.open import open_data
from clairvit.data.part_scenes import CLASSES, SIZE, part_scenes
from train_parts import Scenes, batches, compatible, draw_scenes, random_keep, share_compatible

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "swin": (
        "swin_tiny_patch4_window7_224",
        {"embed_dim": 48, "depths": (2, 2, 4), "num_heads": (2, 4, 8), "img_size": SIZE},
    ),
    "resnet18": ("resnet18", {}),
}
QUANTISED = "quantised"
METHODS = (
    *("attnlrp+plus", "attnlrp+skipplus", "attnlrp", "attnlrp+last", "ixg+plus", "ixg", "decompx+plus", "gradcam"),
    *("gradcam+plus", "layercam", "saliency", "integrated-gradients", "lime", "rise", "occlusion", "random", "center"),
)
WITHOUT_GRADIENT = (
    *(
        "lime",
        "leave-one-out",
        "occlusion",
        "rise(samples=1000)",
        "alti",
        "rollout",
        "raw-attention",
        "raw-attention+skipplus",
    ),
    *("raw-attention+skipplus", "random", "center"),
)
METRICS = ("insertion-deletion", "insertion-deletion(removal=mean)", "ap")


def train(module: nn.Module, scenes: Scenes, epochs: float, batch: int, rate: float) -> None:
    """Minimise the cross-entropy with the classes that have the visible parts."""
    device = scenes.labels.device
    generator = torch.Generator(device).manual_seed(0)
    steps = math.ceil(epochs * len(scenes) / batch)
    optimiser = torch.optim.AdamW(module.parameters(), lr=rate, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda step: min(1.0, (step + 1) / (steps / 20)) * (1 + math.cos(math.pi * step / steps)) / 2
    )
    for rows in batches(len(scenes), batch, steps, generator):
        keep = random_keep(len(rows), generator)
        allowed = compatible(scenes.labels[rows], keep).float()
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = module(scenes.compose(rows, keep))
        loss = F.cross_entropy(logits.float(), allowed / allowed.sum(1, keepdim=True))
        optimiser.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimiser.step()
        schedule.step()


def trained_models(names: list[str], arguments: argparse.Namespace) -> dict[str, cv.Model]:
    """Return the models of these names, trained on part scenes of seed 1."""
    import timm

    device = torch.device(arguments.device)
    training = draw_scenes(1, arguments.scenes, arguments.workers).to(device)
    validation = draw_scenes(2, 2_400, arguments.workers).to(device)
    models = {}
    for name in names:
        arch, options = ARCHITECTURES[name]
        started = time.monotonic()
        torch.manual_seed(0)
        module = timm.create_model(arch, num_classes=len(CLASSES), **options).to(device)
        train(module.train(), training, arguments.epochs, arguments.batch, 1e-3)
        accuracy = share_compatible(module.eval(), validation, 0)
        print(f"{name}: {100 * accuracy:.1f} % right, trained in {time.monotonic() - started:.0f} s", flush=True)
        models[name] = cv.wrap(module, name=name, size=(SIZE, SIZE), mean=(0.5,) * 3, std=(0.5,) * 3, labels=CLASSES)
    return models


def quantised_model(name: str) -> cv.Model:
    """Return a built-in model with linear layers in int8."""
    model = cv.load(name)
    quantize: Any = torch.ao.quantization.quantize_dynamic  # untyped
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about its future
        module = quantize(model.module, {nn.Linear}, dtype=torch.qint8)
    return replace(model, module=module, name=f"{name}, {QUANTISED}")


@torch.no_grad()
def accuracy_by_cells(model: cv.Model, dataset: ImageDataset) -> dict[str, float]:
    """Return how often the head is right on the mean over cells of the last stage: of the object, and of the others."""
    hits: dict[str, list[Tensor]] = {"the object's cells": [], "the other cells": []}
    module: Any = model.module
    for batch in iter_batches(dataset, model, 30):
        assert batch.masks is not None
        assert batch.labels is not None
        features = module.forward_features(
            batch.pixels.to(model.device)
        )  # [B, rows, cols, d], of a CNN [B, d, rows, cols]
        features = features if features.shape[-1] == module.num_features else features.movedim(1, -1)
        covered = F.adaptive_max_pool2d(batch.masks[:, None].float(), features.shape[1:3])[:, 0] > 0  # [B, rows, cols]
        labels = torch.tensor([CLASSES.index(str(label)) for label in batch.labels])
        for key, cells in zip(hits, (covered, ~covered), strict=True):
            weights = cells.float().flatten(1).to(features)
            pooled = torch.einsum("bn,bnd->bd", weights / weights.sum(1, keepdim=True), features.flatten(1, 2))
            hits[key].append(module.get_classifier()(pooled).argmax(1).cpu() == labels)
    return {key: float(torch.cat(values).float().mean()) for key, values in hits.items()}


def print_table(model: cv.Model, dataset: ImageDataset, methods: tuple[str, ...]) -> dict[str, dict[str, float]]:
    """Score the methods, print a Markdown table, and return the means by metric and method."""
    scores = cv.evaluate(model, dataset, list(methods), list(METRICS), skip=True, baselines=False)
    listed = list(dict.fromkeys(method for method, _ in scores))
    print("\n| method | " + " | ".join(METRICS) + " |")
    print("| --- |" + " --- |" * len(METRICS))
    for method in sorted(listed, key=lambda text: -scores[text, METRICS[0]].mean):
        cells = [f"{scores[method, m].mean:.3f} ± {scores[method, m].standard_error:.3f}" for m in METRICS]
        print(f"| `{method}` | " + " | ".join(cells) + " |", flush=True)
    for method, reason in scores.skipped.items():
        print(f"`{method}` is left out: {reason}")
    return {metric: {text: scores[text, metric].mean for text in listed} for metric in METRICS}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", default="swin,resnet18", help=f"of {', '.join((*ARCHITECTURES, QUANTISED))}")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--scenes", type=int, default=50_000)
    parser.add_argument("--epochs", type=float, default=20)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--images", type=int, default=100)
    parser.add_argument("--photos", help="the folder of Oxford-IIIT Pet, for quantised pets")
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    dataset = part_scenes(arguments.images, seed=3)
    names = arguments.models.split(",")
    trained = trained_models([name for name in names if name != QUANTISED], arguments) if names != [QUANTISED] else {}
    records: dict[str, Any] = {}
    for name, model in trained.items():
        by_cells = accuracy_by_cells(model, dataset)
        print(f"\n{name}: right from " + ", ".join(f"{key} alone {100 * v:.0f} %" for key, v in by_cells.items()))
        records[name] = {"accuracy_by_cells": by_cells, "scores": print_table(model, dataset, METHODS)}
    if QUANTISED in names:
        if arguments.photos is not None:
            dataset = open_data(f"pets:{arguments.photos}", limit=arguments.images).dataset
        model = quantised_model("parts" if arguments.photos is None else "pets")
        records[QUANTISED] = {"scores": print_table(model, dataset, WITHOUT_GRADIENT)}
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
