"""Draw the pictures of docs/targets.md from generated scenes and the built-in `scenes` model.

python docs/generate_targets.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import clairvit as cv
from clairvit.data.scenes import CLASSES, draw, plan, with_class

FOLDER = Path(__file__).parent / "images"
SEED, DPI = 5, 110


class ScenePair(nn.Module):
    """An image-and-text model made of a classifier: a prompt's embedding is the head's row of its class."""

    def __init__(self, classifier: Any) -> None:
        super().__init__()
        self.classifier = classifier
        self.logit_scale = nn.Parameter(torch.zeros(()))

    def encode_image(self, pixels: Tensor) -> Tensor:
        """Return what the head reads [B, d]."""
        features: Tensor = self.classifier.forward_head(self.classifier.forward_features(pixels), pre_logits=True)
        return features

    def encode_text(self, classes: Tensor) -> Tensor:
        """Return the head's rows [n, d] of classes [n, 1]."""
        weight: Tensor = self.classifier.head.weight
        return weight[classes[:, 0]]


def tokenize(prompts: list[str]) -> Tensor:
    """Return the number of the class that each prompt names, [n, 1]."""
    return torch.tensor([[next(i for i, name in enumerate(CLASSES) if name in prompt)] for prompt in prompts])


def main() -> None:
    scenes = cv.load("scenes")
    settings = scenes.preprocess
    pair = cv.wrap(
        ScenePair(scenes.module),
        name="scenes, as a pair",
        tokenizer=tokenize,
        size=settings.size,
        mean=settings.mean,
        std=settings.std,
    )
    first, second = plan(SEED, 0, 2), plan(SEED, 1, 2)
    names = [str(item.marker.class_name) for item in first.objects if item.marker is not None]
    third = next(name for name in CLASSES if name not in names)
    pictures = [draw(first).picture, draw(with_class(with_class(second, names[0]), third, 1)).picture]
    prompts = [cv.Text(f"a disc with {name}") for name in names]
    by_prompt = cv.explain(pair, pictures[0], "attnlrp", targets=[*prompts, cv.Contrast(*prompts)])
    print(by_prompt.save(FOLDER / "targets-text.png", dpi=DPI))
    print(by_prompt.targets, by_prompt.target_scores)
    both = cv.similar(scenes, *pictures, "attnlrp")
    print(both.save(FOLDER / "targets-similar.png", dpi=DPI))
    print(both)


if __name__ == "__main__":
    main()
