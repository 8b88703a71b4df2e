"""Compare candidates for the default method on models that plain ViTs say nothing about: hierarchical, and CNNs.

Usage: python benchmarks/default_method.py --device cuda --out default.json

No trained hierarchical model comes with the package, so small ones are trained here on generated part scenes, with
parts removed at random (see train_parts.py): a Swin of three stages (28, 14, 7 cells a side) and a ResNet-18. Then
every candidate is scored on new scenes: insertion − deletion with the engine's own removal and with mean-colour pixels,
and average precision against the parts. Prints a Markdown table per model.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import clairvit as cv
from clairvit.data.part_scenes import CLASSES, SIZE, part_scenes
from train_parts import Scenes, batches, compatible, draw_scenes, random_keep, share_compatible

ARCHITECTURES = {
    "swin": (
        "swin_tiny_patch4_window7_224",
        {"embed_dim": 48, "depths": (2, 2, 4), "num_heads": (2, 4, 8), "img_size": SIZE},
    ),
    "resnet18": ("resnet18", {}),
}
METHODS = (
    *("attnlrp+plus", "attnlrp+skipplus", "attnlrp", "attnlrp+last", "ixg+plus", "ixg", "decompx+plus", "gradcam"),
    *("gradcam+plus", "layercam", "saliency", "integrated-gradients", "lime", "rise", "occlusion"),
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


def main() -> None:
    import timm

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--scenes", type=int, default=50_000)
    parser.add_argument("--epochs", type=float, default=20)
    parser.add_argument("--images", type=int, default=100)
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    training = draw_scenes(1, arguments.scenes, arguments.workers).to(device)
    validation = draw_scenes(2, 2_400, arguments.workers).to(device)
    records = {}
    for name, (arch, options) in ARCHITECTURES.items():
        started = time.monotonic()
        torch.manual_seed(0)
        module = timm.create_model(arch, num_classes=len(CLASSES), **options).to(device)
        train(module.train(), training, arguments.epochs, 512, 1e-3)
        module.eval()
        accuracy = share_compatible(module, validation, 0)
        print(f"\n{name}: {100 * accuracy:.1f} % right, trained in {time.monotonic() - started:.0f} s\n", flush=True)
        model = cv.wrap(module, name=name, size=(SIZE, SIZE), mean=(0.5,) * 3, std=(0.5,) * 3, labels=CLASSES)
        dataset = part_scenes(arguments.images, seed=3)
        scores = cv.evaluate(model, dataset, list(METHODS), list(METRICS), skip=True)
        listed = list(dict.fromkeys(method for method, _ in scores))
        print("| method | " + " | ".join(METRICS) + " |")
        print("| --- |" + " --- |" * len(METRICS))
        for method in sorted(listed, key=lambda text: -scores[text, METRICS[0]].mean):
            cells = [f"{scores[method, m].mean:.3f} ± {scores[method, m].standard_error:.3f}" for m in METRICS]
            print(f"| `{method}` | " + " | ".join(cells) + " |", flush=True)
        for method, reason in scores.skipped.items():
            print(f"`{method}` is left out: {reason}")
        records[name] = {
            "accuracy": accuracy,
            "scores": {m: {text: scores[text, m].mean for text in listed} for m in METRICS},
        }
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
