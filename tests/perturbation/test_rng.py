"""Chance can be repeated: it knows the seed and the image, and nothing of the batch or the precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import clairvit as cv
from clairvit.errors import BadInput
from clairvit.perturbation.rng import check_seed, image_seeds, make_generator


def drawn(mark: int, k: int = 0) -> float:
    return float(torch.rand((), generator=make_generator(mark, k), dtype=torch.float64))


def test_every_pair_of_seed_and_number_has_its_own_draws() -> None:
    """Not so if the two were only mixed: then the samples of seed 1 are those of seed 0 in another order."""
    draws = {drawn(seed, k) for seed in range(32) for k in range(32)}
    assert len(draws) == 32 * 32
    assert drawn(5, 7) == drawn(5, 7)


def test_an_image_is_known_in_any_batch_and_precision() -> None:
    images = torch.randn(3, 3, 8, 12, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    marks = image_seeds(images, 0)
    assert len(set(marks)) == 3
    assert [image_seeds(one[None], 0)[0] for one in images] == marks
    assert image_seeds(images.flip(0), 0) == marks[::-1]
    assert image_seeds(images.bfloat16(), 0) == image_seeds(images.double(), 0) == marks
    assert image_seeds(images.to(memory_format=torch.channels_last), 0) == marks
    assert image_seeds(images[:, :, ::2, ::2], 0) == image_seeds(images[:, :, ::2, ::2].contiguous(), 0)
    assert not set(image_seeds(images, 1)) & set(marks)


def test_one_pixel_elsewhere_is_another_image() -> None:
    image = torch.zeros(1, 3, 8, 8)
    moved = []
    for place in range(64):
        one = image.clone()
        one[0, 0].view(-1)[place] = 1
        moved += image_seeds(one, 0)
    assert len(set(moved)) == 64


@pytest.mark.parametrize("seed", ["x", 1.5, None, True])
def test_a_seed_is_a_whole_number(seed: Any) -> None:
    model, image = cv.load("pets"), torch.zeros(1, 3, 224, 224)
    verbs: list[Callable[[], object]] = [
        lambda: cv.explain(model, image, "ixg", seed=seed),
        lambda: cv.compare(model, image, ["ixg"], seed=seed),
        lambda: cv.evaluate(model, image, "ixg", "sparseness", seed=seed),
        lambda: cv.choose(model, image, ["ixg"], seed=seed),
    ]
    for verb in verbs:
        with pytest.raises(BadInput, match=r"seed=.* expected a whole number, such as 0"):
            verb()
    assert check_seed(np.int64(7)) == 7
