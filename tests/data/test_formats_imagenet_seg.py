"""ImageNet-Segmentation in miniature: an HDF5 file as MATLAB 7.3 writes it, and the error without h5py."""

from __future__ import annotations

import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

from clairvit.data.open import open_data
from clairvit.errors import BadInput
from helpers.small_datasets import block, called, read_sample, shows, written

TENCH, ZEBRA = "n01440764", "n02391049"


def matlab(path: Path, wnids: list[str] | None, truths: list[np.ndarray]) -> list[np.ndarray]:
    """As MATLAB 7.3 writes cell arrays: references to arrays with their dimensions turned round; gt in a cell more."""
    generator = np.random.default_rng(0)
    pictures = [generator.integers(0, 255, (6, 8, 3), dtype=np.uint8) for _ in truths]
    with h5py.File(path, "w") as file:

        def cell(name: str, items: list[np.ndarray]) -> None:
            cells = file.create_dataset(name, (len(items), 1), dtype=h5py.ref_dtype)
            for row, item in enumerate(items):
                cells[row, 0] = file.create_dataset(f"#refs#/{name}{row}", data=item).ref

        cell("value/img", [picture.T for picture in pictures])
        if wnids is not None:
            cell("value/target", [np.array([[ord(letter)] for letter in wnid], np.uint16) for wnid in wnids])
        outer = file.create_dataset("value/gt", (len(truths), 1), dtype=h5py.ref_dtype)
        for row, truth in enumerate(truths):
            inner = file.create_dataset(f"#refs#/cell{row}", (1, 1), dtype=h5py.ref_dtype)
            inner[0, 0] = file.create_dataset(f"#refs#/truth{row}", data=truth.T).ref
            outer[row, 0] = inner.ref
    return pictures


def test_imagenet_segmentation(tmp_path: Path) -> None:
    truths = [block(1, 3, 2, 7).astype(np.uint8), block(0, 1, 0, 1).astype(np.int8), block(0, 2, 0, 2).astype(np.uint8)]
    truths[1][5] = -1
    pictures = matlab(tmp_path / "gtsegs_ijcv.mat", [ZEBRA, TENCH, "n99999999"], truths)
    data = open_data(f"imagenet-seg:{tmp_path}")
    assert open_data(f"imagenet-seg:{tmp_path}/gtsegs_ijcv.mat").dataset.names == data.dataset.names
    assert data.dataset.names == ("gtsegs_ijcv.mat/0001", "gtsegs_ijcv.mat/0002", "gtsegs_ijcv.mat/0003")
    assert [called(data, row) for row in range(3)] == ["zebra", "tench", None]
    assert data.notes == ("1 of 3 images are of classes that ImageNet-1k does not have: no true class.",)
    assert shows(read_sample(data, 0), block(1, 3, 2, 7))
    assert shows(read_sample(data, 1), block(0, 1, 0, 1), block(5, 6, 0, 8))
    assert shows(read_sample(data, 2), block(0, 2, 0, 2)), "an object without a class is one nevertheless"
    seen = read_sample(data, 0).pixels.numpy().transpose(1, 2, 0) * [0.229, 0.224, 0.225] + [0.485, 0.456, 0.406]
    assert np.abs(seen * 255 - pictures[0]).max() < 1e-3
    marks = [data.dataset.content_hash(row) for row in range(3)]
    truths[1][0, 0] = 0
    matlab(tmp_path / "gtsegs_ijcv.mat", [TENCH, TENCH, "n99999999"], truths)
    again = [open_data(f"imagenet-seg:{tmp_path}").dataset.content_hash(row) for row in range(3)]
    assert [first == second for first, second in zip(marks, again, strict=True)] == [False, False, True]
    matlab(tmp_path / "gtsegs_ijcv.mat", None, truths)
    bare = open_data(f"imagenet-seg:{tmp_path}")
    assert (bare.dataset.has_labels, bare.dataset.has_masks) == (False, True)
    assert "no value/target" in bare.notes[0]
    assert shows(read_sample(bare, 0), block(1, 3, 2, 7))


def test_imagenet_segmentation_names_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadInput, match=r"'gtsegs_ijcv.mat' is missing"):
        open_data(f"imagenet-seg:{tmp_path}")
    written(tmp_path / "gtsegs_ijcv.mat", "no HDF5")
    with pytest.raises(BadInput, match="expected the whole file, with value/img and value/gt"):
        open_data(f"imagenet-seg:{tmp_path}")
    with h5py.File(tmp_path / "gtsegs_ijcv.mat", "w") as file:
        file["other"] = 1
    with pytest.raises(BadInput, match="expected the whole file, with value/img and value/gt"):
        open_data(f"imagenet-seg:{tmp_path}")
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(BadInput, match=r"needs the package h5py, .*; type: pip install h5py$"):
        open_data(f"imagenet-seg:{tmp_path}")
