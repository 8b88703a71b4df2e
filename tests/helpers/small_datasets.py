"""Data sets in miniature: pictures of 6 × 8 pixels, seen by a model pixel for pixel, so that masks can be compared."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image
from torch import nn

from clairvit.data.dataset import ImageDataset, Sample, as_dataset
from clairvit.data.open import OpenedDataset
from clairvit.models.model import Model
from clairvit.models.preprocess import Preprocess

ROWS, COLUMNS = 6, 8


def identity_model(labels: Sequence[str] = (), size: tuple[int, int] = (ROWS, COLUMNS)) -> Model:
    """Return a model that takes pictures as they are, without class names."""
    return Model(nn.Identity(), "identity", Preprocess(size=size), tuple(labels))


def photo(path: Path, seed: int = 0, size: tuple[int, int] = (ROWS, COLUMNS)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 255, (*size, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path, format="PNG" if path.suffix == ".png" else "JPEG")
    return path


def painted(path: Path, values: np.ndarray) -> Path:
    """A PNG of these very values [rows, columns] or [rows, columns, 3]."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(values.astype(np.uint8)).save(path)
    return path


def written(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def block(top: int, bottom: int, left: int, right: int) -> np.ndarray:
    """bool [6, 8]"""
    mask = np.zeros((ROWS, COLUMNS), dtype=bool)
    mask[top:bottom, left:right] = True
    return mask


def read_sample(data: OpenedDataset, row: int, model: Model | None = None) -> Sample:
    return data.dataset.read(row, model or identity_model())


def called(data: OpenedDataset, row: int) -> str | None:
    """The name of the true class, by the data set's own list."""
    label = read_sample(data, row).label
    return None if label is None else data.classes[int(label)]


def shows(sample: Sample, mask: np.ndarray, void: np.ndarray | None = None) -> bool:
    """Pixel for pixel."""
    assert sample.mask is not None
    assert sample.void is not None
    empty = np.zeros_like(mask)
    return bool(
        (sample.mask.numpy() == mask).all() and (sample.void.numpy() == (empty if void is None else void)).all()
    )


def coloured_noise(count: int, seed: int = 0) -> ImageDataset:
    """Return pictures of 32 × 40 pixels of noise that is reddish or bluish in turn, labelled so."""
    rng = np.random.default_rng(seed)
    pictures = []
    for number in range(count):
        noise = rng.integers(0, 120, (32, 40, 3), dtype=np.uint8)
        noise[..., 2 * (number % 2)] += 120
        pictures.append(Image.fromarray(noise))
    return as_dataset(pictures, Model(nn.Identity(), "placeholder"), labels=["red", "blue"] * (count // 2))
