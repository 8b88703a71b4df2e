"""ImageNet and ImageNet-S in miniature: numbers of ImageNet-1k models, ids, masks, void."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat
from torchvision.models._meta import _IMAGENET_CATEGORIES

from clairvit.data.formats import imagenet
from clairvit.data.open import open_data
from clairvit.errors import BadInput
from helpers.small_datasets import block, called, identity_model, painted, photo, read_sample, shows, written

TENCH, GOLDFISH, SHARK, ZEBRA = "n01440764", "n01443537", "n01484850", "n02391049"


def test_imagenet_classes_have_the_order_of_every_model() -> None:
    """Against torchvision's own list of names."""
    numbers, names = imagenet.class_indices(), imagenet.class_names()
    assert len(numbers) == len(names) == len(set(names)) == 1000
    assert list(numbers) == sorted(numbers)
    assert (numbers[TENCH], numbers[ZEBRA]) == (0, 340)
    for number in (0, 1, 2, 207, 281, 340, 386, 817, 999):
        assert names[number].lower() == _IMAGENET_CATEGORIES[number].lower()


def test_imagenet_in_class_folders(tmp_path: Path) -> None:
    """Numbers count where a model has a thousand classes or no names; otherwise names do."""
    for seed, (kind, name) in enumerate([(ZEBRA, "b"), (TENCH, "c"), (TENCH, "a")]):
        photo(tmp_path / "val" / kind / f"{name}.JPEG", seed)
    photo(tmp_path / "train" / SHARK / "x.JPEG")
    data = open_data(f"imagenet:{tmp_path}")
    assert data.dataset.names == (f"val/{TENCH}/a.JPEG", f"val/{TENCH}/c.JPEG", f"val/{ZEBRA}/b.JPEG")
    assert [called(data, row) for row in range(3)] == ["tench", "tench", "zebra"]
    assert [read_sample(data, row).label for row in range(3)] == [0, 0, 340]
    assert read_sample(data, 2, identity_model([f"a name of its own {i}" for i in range(1000)])).label == 340
    assert read_sample(data, 2, identity_model(["cat", "zebra"])).label == 1
    assert read_sample(data, 0, identity_model(["cat", "zebra"])).label is None
    assert len(data.unknown_classes(identity_model(["cat", "zebra"]))) == 999
    assert (data.dataset.has_masks, data.dataset.has_labels) == (False, True)
    assert read_sample(data, 0).mask is None
    assert called(open_data(f"imagenet:{tmp_path}", split="train"), 0) == "great white shark"
    photo(tmp_path / "val" / "n00000001" / "y.JPEG")
    photo(tmp_path / "val" / "loose.JPEG")
    more = open_data(f"imagenet:{tmp_path}")
    assert len(more) == 5
    assert [called(more, row) for row in range(5)] == [None, "tench", "tench", "zebra", None]
    assert "'n00000001': no class of ImageNet-1k" in more.notes[0]
    assert "1 images lie next to the class folders" in more.notes[1]
    photo(tmp_path / "cats" / "val" / "cat" / "y.JPEG")
    with pytest.raises(BadInput, match=r"are 'cat'; expected ImageNet's ids, like n01440764. .* type folder:"):
        open_data(f"imagenet:{tmp_path}/cats")
    with pytest.raises(BadInput, match="'val' is missing"):
        open_data(f"imagenet:{tmp_path}/val")


def test_imagenet_in_one_folder(tmp_path: Path) -> None:
    """The devkit's numbers are in another order than everybody's; meta.mat says which."""
    for number in (1, 2, 3):
        photo(tmp_path / "val" / f"ILSVRC2012_val_{number:08d}.JPEG", number)
    data = open_data(f"imagenet:{tmp_path}")
    assert not data.dataset.has_labels
    assert "ILSVRC2012_devkit_t12' is not there: no true classes" in data.notes[0]
    kinds = [(1, ZEBRA, "zebra", 0), (2, TENCH, "tench, Tinca tinca", 0), (1001, "n00001740", "entity", 2)]
    fields = [("ILSVRC2012_ID", object), ("WNID", object), ("words", object), ("num_children", object)]
    devkit = tmp_path / "ILSVRC2012_devkit_t12" / "data"
    truth = written(devkit / "ILSVRC2012_validation_ground_truth.txt", "2\n1\n2\n")
    savemat(devkit / "meta.mat", {"synsets": np.array(kinds, dtype=fields)[:, None]})
    data = open_data(f"imagenet:{tmp_path}")
    assert data.dataset.has_labels
    assert [read_sample(data, row).label for row in range(3)] == [0, 340, 0]
    photo(tmp_path / "val" / "ILSVRC2012_val_00000004.JPEG")
    with pytest.raises(BadInput, match=r"ILSVRC2012_val_00000004.JPEG' has no line in .*, which has 3"):
        open_data(f"imagenet:{tmp_path}")
    written(truth, "2\n7\n")
    with pytest.raises(BadInput, match=r"ground_truth.txt' names the class 7; expected a number of meta.mat's"):
        open_data(f"imagenet:{tmp_path}")


def coloured(values: np.ndarray) -> np.ndarray:
    """R + 256 · G [rows, columns, 3]; blue means nothing."""
    return np.stack([values % 256, values // 256, np.full_like(values, 77)], axis=-1)


@pytest.fixture
def imagenet_s(tmp_path: Path) -> Path:
    """All 50 folders; masks of a large zebra beside a goldfish (class 50 and 2), and of class 0 alone."""
    root = tmp_path / "ImageNetS50"
    ids = [*sorted(imagenet.class_indices())[:49], ZEBRA]
    for wnid in ids:
        (root / "validation" / wnid).mkdir(parents=True)
    values = np.zeros((6, 8), dtype=int)
    values[0:3], values[3:5, 0:4], values[5, 5:] = 50, 2, 1000
    photo(root / "validation" / GOLDFISH / "one.JPEG")
    painted(root / "validation-segmentation" / GOLDFISH / "one.png", coloured(values))
    photo(root / "validation" / ZEBRA / "two.JPEG", 1)
    painted(root / "validation-segmentation" / ZEBRA / "two.png", coloured(np.zeros((6, 8), dtype=int)))
    return root


def test_imagenet_s(imagenet_s: Path) -> None:
    """The largest class is the true one, whatever the folder says; 1000 is void; the second class is the other."""
    data = open_data(f"imagenet-s:{imagenet_s.parent}")
    assert data.dataset.names == (f"validation/{GOLDFISH}/one.JPEG", f"validation/{ZEBRA}/two.JPEG")
    sample = read_sample(data, 0)
    assert (sample.label, sample.other) == (340, 1)
    assert data.classes[340] == "zebra"
    assert shows(sample, block(0, 3, 0, 8), block(5, 6, 5, 8))
    alone = read_sample(data, 1)
    assert (alone.label, alone.other) == (None, None)
    assert shows(alone, block(0, 0, 0, 0))
    (imagenet_s / "validation-segmentation" / ZEBRA / "two.png").unlink()
    assert read_sample(data, 1).mask is None
    assert read_sample(data, 1).label == 340, "without a mask the folder's"


def test_imagenet_s_with_a_list(imagenet_s: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Class folders that were taken out would shift the numbers: then the list decides, and 919 classes need G."""
    for folder in sorted((imagenet_s / "validation").iterdir())[2:49]:
        folder.rmdir()
    with pytest.raises(BadInput, match=r"has 3 class folders; expected 50, 300 or 919, .* put ImageNetS_categories_im"):
        open_data(f"imagenet-s:{imagenet_s}")
    ids = sorted(imagenet.class_indices())
    ids = [*ids[:300], *ids[381:]]  # 919
    assert len(ids) == 919
    listed = written(imagenet_s / "ImageNetS_categories_im919.txt", "\n".join(reversed(ids)))
    values = np.where(block(0, 2, 0, 8), 919, np.where(block(3, 6, 0, 2), 257, 1000))
    mask = painted(imagenet_s / "validation-segmentation" / GOLDFISH / "one.png", coloured(values))
    sample = read_sample(open_data(f"imagenet-s:{imagenet_s}"), 0)
    assert (sample.label, sample.other) == (999, 256)
    assert shows(sample, block(0, 2, 0, 8), ~(block(0, 2, 0, 8) | block(3, 6, 0, 2)))
    painted(mask, coloured(np.full((6, 8), 920)))
    with pytest.raises(BadInput, match=r"has the class 920; expected 1 to 919, 0 or 1000"):
        read_sample(open_data(f"imagenet-s:{imagenet_s}"), 0)
    mask.write_text("no mask")
    with pytest.raises(BadInput, match=r"one.png' cannot be read"):
        read_sample(open_data(f"imagenet-s:{imagenet_s}"), 0)
    painted(mask, coloured(np.zeros((60, 80), int)))
    data = open_data(f"imagenet-s:{imagenet_s}")
    with monkeypatch.context() as patch:
        patch.setattr(Image, "MAX_IMAGE_PIXELS", 100)  # more than twice as many raise DecompressionBombError
        with pytest.raises(BadInput, match=r"one.png' cannot be read"):
            read_sample(data, 0)
    written(listed, "cat\ndog")
    with pytest.raises(BadInput, match="has the classes 'cat', 'dog'; expected ImageNet's ids"):
        open_data(f"imagenet-s:{imagenet_s}")
    written(imagenet_s / "ImageNetS_categories_im50.txt", "")
    with pytest.raises(BadInput, match="expected the one list of its masks"):
        open_data(f"imagenet-s:{imagenet_s}")


def test_imagenet_s_hashes_depend_on_the_class_list(imagenet_s: Path) -> None:
    before = open_data(f"imagenet-s:{imagenet_s}").dataset.content_hash(0)
    ids = sorted(imagenet.class_indices())[:50]
    written(imagenet_s / "ImageNetS_categories_im50.txt", "\n".join([*ids[:49], ZEBRA]))
    assert open_data(f"imagenet-s:{imagenet_s}").dataset.content_hash(0) == before
    written(imagenet_s / "ImageNetS_categories_im50.txt", "\n".join(ids))
    assert open_data(f"imagenet-s:{imagenet_s}").dataset.content_hash(0) != before
