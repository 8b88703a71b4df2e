"""Files of text embeddings: targets by name, compared with the other texts of the file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import clairvit as cv
from helpers.rounding import assert_same

NAMES = ["cat", "dog", "a red car"]
VECTORS = torch.randn(3, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def write(path: Path, kind: str) -> Path:
    """Write the vectors in one of the four layouts."""
    if kind == "safetensors":
        save_file(dict(zip(NAMES, VECTORS.clone(), strict=True)), path := path / "texts.safetensors")
    elif kind == "safetensors table":
        save_file({"texts": VECTORS}, path := path / "texts.safetensors", {"names": '["cat", "dog", "a red car"]'})
    elif kind == "npz":
        np.savez(path := path / "texts.npz", **dict(zip(NAMES, VECTORS.numpy(), strict=True)))
    else:
        np.savez(path := path / "texts.npz", names=np.array(NAMES), texts=VECTORS.numpy())
    return path


@pytest.mark.parametrize("kind", ["safetensors", "safetensors table", "npz", "npz table"])
def test_texts_by_name(kind: str, tmp_path: Path) -> None:
    path = write(tmp_path, kind)
    assert {target.prompt for target in cv.targets.text_features(path)} == set(NAMES)
    (dog,) = cv.targets.text_features(path, ["dog"])
    assert_same(dog.embedding.values[0], VECTORS[1] / VECTORS[1].norm())
    expected = (VECTORS / VECTORS.norm(dim=1, keepdim=True))[[0, 2]].mean(0)
    assert_same(dog.against.values.mean(0), expected)  # in any order
    (alone,) = cv.targets.text_features(path, ["dog"], against=None)
    assert alone.against == ()
    (pair,) = cv.targets.text_features(path, ["dog"], against=["cat"])
    assert_same(pair.against.values[0], VECTORS[0] / VECTORS[0].norm())


def test_a_file_of_one_text_has_nothing_to_compare_with(tmp_path: Path) -> None:
    np.savez(tmp_path / "one.npz", cat=np.ones(12))
    (cat,) = cv.targets.text_features(tmp_path / "one.npz")
    assert "No other texts were given" in cat.note("cosine")


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"cat": np.ones(3), "dog": np.ones(4)}, "holds no vectors of one length"),
        ({"cat": np.ones((2, 3))}, r"'cat' in 'texts.npz' has shape \[2, 3\]"),
        ({"names": np.array(["a", "a"]), "t": np.ones((2, 3))}, "2 names for a table of shape"),
        ({"cat": np.array(["x"])}, "'cat' holds no numbers"),
        ({"cat": np.zeros(3), "dog": np.ones(3)}, "'cat' in 'texts.npz' holds NaN, infinity or zeros"),
    ],
)
def test_files_that_hold_something_else(arrays: dict[str, np.ndarray], message: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "texts.npz", **arrays)
    with pytest.raises(cv.errors.BadInput, match=message):
        cv.targets.text_features(tmp_path / "texts.npz")


def test_files_and_names_that_are_not_there(tmp_path: Path) -> None:
    path = write(tmp_path, "npz")
    with pytest.raises(cv.errors.UnknownName, match=r"has no text 'dgo'\. Did you mean 'dog'.* It has: cat, dog"):
        cv.targets.text_features(path, ["dgo"])
    for name, message in (("texts.csv", "is no such file"), ("no.npz", "is not there")):
        with pytest.raises(cv.errors.BadInput, match=message):
            cv.targets.text_features(tmp_path / name)
    (tmp_path / "broken.safetensors").write_bytes(b"12345678")
    with pytest.raises(cv.errors.BadInput, match="cannot be read"):
        cv.targets.text_features(tmp_path / "broken.safetensors")
