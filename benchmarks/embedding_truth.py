"""Print how much of a map lies on the object that was asked for, in scenes of two objects, for prompts and similarity.

Usage: python benchmarks/embedding_truth.py --images 16

The image-and-text model is the built-in classifier `scenes`: its image embedding is what its head reads, and a prompt,
the name of a class, is embedded as the row of that class in the head. For similarity, another scene of two objects
shares one class with the scene that is explained: first that of its first object, then that of its second.

The share of a map is the part of its positive relevance on the asked object, out of that on both objects. Both are
asked for; a map that does not depend on the question has 0.5. In brackets: how often the share is above 0.5.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import clairvit as cv
from clairvit.data.scenes import CLASSES, Scene, draw, plan, scene, with_class

sys.path.insert(0, str(Path(__file__).parent))

from dense_truth import METHODS, TEST_SEED, shares

KINDS = {"prompt": "prompt that names it", "similar": "similar to a scene with it"}
OTHER_SEED = 5  # of the scenes that are compared with


class ScenePair(nn.Module):
    """A classifier as a pair of towers: a prompt is embedded as the head's row of the class that it names."""

    def __init__(self, classifier: Any) -> None:
        super().__init__()
        self.classifier = classifier
        self.logit_scale = nn.Parameter(torch.zeros(()))

    def encode_image(self, images: Tensor) -> Tensor:
        """Return what the head reads, [B, d]."""
        embeddings: Tensor = self.classifier.forward_head(self.classifier.forward_features(images), pre_logits=True)
        return embeddings

    def encode_text(self, classes: Tensor) -> Tensor:
        """Return the head's rows of classes [n, 1], [n, d]."""
        rows: Tensor = self.classifier.head.weight[classes[:, 0]]
        return rows


def tokenize(prompts: list[str]) -> Tensor:
    """Return the number of the class that each prompt names, [n, 1]; a prompt is a class or a sentence with one."""
    return torch.tensor([[next(i for i, name in enumerate(CLASSES) if name in prompt)] for prompt in prompts])


def scene_pair(name: str = "scenes, as a pair") -> cv.Model:
    """Return the built-in model `scenes` as an image-and-text model."""
    scenes = cv.load("scenes")
    settings = scenes.preprocess
    return cv.wrap(
        ScenePair(scenes.module),
        tokenizer=tokenize,
        name=name,
        size=settings.size,
        mean=settings.mean,
        std=settings.std,
    )


def scene_with(class_name: str, others: Sequence[str], number: int) -> Scene:
    """Return a scene of two objects, the first of a class, the second of none of the others."""
    third = next(name for name in CLASSES if name not in (class_name, *others))
    return draw(with_class(with_class(plan(OTHER_SEED, number, 2), class_name), third, 1))


def questions(kind: str, scenes: Sequence[Scene]) -> list[cv.targets.Target]:
    """Return the targets for the first object of each scene, then those for the second."""
    names = [*(item.class_name for item in scenes), *(str(item.other_class_name) for item in scenes)]
    if kind == "prompt":
        return [cv.Text(name, against=None) for name in names]
    classes = [(item.class_name, str(item.other_class_name)) for item in scenes] * 2
    return [
        cv.Similar(scene_with(name, both, number).picture)
        for number, (name, both) in enumerate(zip(names, classes, strict=True))
    ]


def main() -> None:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--images", type=int, default=16)
    parser.add_argument("--method", default=";".join(METHODS), help="separated by ';'")
    arguments = parser.parse_args()
    methods, started = arguments.method.split(";"), time.monotonic()
    model = scene_pair()
    scenes = [scene(TEST_SEED, number, objects=2) for number in range(arguments.images)]
    columns = {kind: shares(model, scenes, questions(kind, scenes), methods) for kind in KINDS}
    print(f"| method | {' | '.join(KINDS.values())} |")
    print("|---" * (len(KINDS) + 1) + "|")
    for method in methods:
        cells = [f"{v[method].mean():.3f} ({float((v[method] > 0.5).float().mean()):.0%})" for v in columns.values()]
        print(f"| `{method}` | {' | '.join(cells)} |")
    print(f"{time.monotonic() - started:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
