"""Noise: ours is each image's own in any batch, numpy's is the stream that follows np.random.seed."""

from __future__ import annotations

import itertools

import numpy as np
import torch

from clairvit._rng import image_noise, image_seeds
from clairvit.compat.quantus import numpy_generator, numpy_noise
from helpers.tiny_models import pixels

KIND = "timm-vit"


def test_numpys_stream_is_what_a_single_image_gets() -> None:
    images = pixels(KIND, 3)
    np.random.seed(7)  # noqa: NPY002, the stream that Quantus draws from
    expected = [np.random.uniform(-0.2, 0.2, (1, images[0].numel())) for _ in range(3)]  # noqa: NPY002
    stream = numpy_noise(images, 7, lambda chance, shape: chance.uniform(-0.2, 0.2, shape))
    for theirs, ours in zip(expected, stream, strict=False):
        for image in ours:
            assert torch.equal(image.flatten(), torch.from_numpy(theirs[0]).to(images)), "all images meet the same"


def test_any_seed_makes_a_chance() -> None:
    assert numpy_generator(2**32 + 5).randint(1000) == numpy_generator(5).randint(1000)
    assert numpy_generator(-1).randint(1000) == numpy_generator(2**32 - 1).randint(1000)


def test_our_noise_does_not_depend_on_the_batch() -> None:
    images = pixels(KIND, 3)
    marks = image_seeds(images, 0)
    for law in ("uniform", "normal"):
        together = list(itertools.islice(image_noise(images, marks, law), 3))
        alone = list(itertools.islice(image_noise(images[1:2], marks[1:2], law), 3))
        for first, second in zip(together, alone, strict=True):
            assert torch.equal(first[1:2], second)
        assert not torch.equal(together[0], together[1])
        assert not torch.equal(together[0][0], together[0][1])


def test_laws() -> None:
    images = torch.zeros(1, 3, 100, 100)
    uniform, normal = (next(image_noise(images, [5], law)) for law in ("uniform", "normal"))
    assert uniform.abs().max() <= 1
    assert abs(float(uniform.mean())) < 0.02
    assert abs(float(uniform.std()) - 3**-0.5) < 0.01
    assert abs(float(normal.mean())) < 0.03
    assert abs(float(normal.std()) - 1) < 0.02
