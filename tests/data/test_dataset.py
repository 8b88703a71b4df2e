"""ImageDataset: images are read lazily, with masks and classes, and a broken one does not stop the others."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from clairvit.data.dataset import ImageDataset, as_dataset, iter_batches
from clairvit.data.hashing import digest
from clairvit.errors import BadInput, ClairError
from helpers.tiny_models import pixels, wrapped

MODEL = wrapped("timm-vit")


@pytest.fixture
def photos(tmp_path: Path) -> list[str]:
    generator = np.random.default_rng(0)
    paths = []
    for number in range(5):
        path = tmp_path / f"photo{number}.png"
        Image.fromarray(generator.integers(0, 255, (40, 60, 3), dtype=np.uint8)).save(path)
        paths.append(str(path))
    return paths


def test_only_the_images_of_a_batch_are_read(photos: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    kept = Image.open
    monkeypatch.setattr(Image, "open", lambda path, **how: opened.append(Path(path).name) or kept(path, **how))
    some = iter_batches(as_dataset(photos, MODEL), MODEL, 2, workers=0)
    assert opened == []
    first = next(some)
    assert opened == ["photo0.png", "photo1.png"]
    assert first.rows == (0, 1)
    assert first.pixels.shape == (2, 3, 32, 32)
    assert [part.rows for part in some] == [(2, 3), (4,)]


def test_a_broken_image_does_not_stop_the_others(photos: list[str]) -> None:
    Path(photos[1]).write_text("meow")
    errors: list[tuple[str, ClairError]] = []
    parts = list(iter_batches(as_dataset(photos, MODEL), MODEL, 2, lambda name, error: errors.append((name, error))))
    assert [part.rows for part in parts] == [(0,), (2, 3), (4,)]
    ((name, error),) = errors
    assert name == photos[1]
    assert "is not an image" in str(error)
    with pytest.raises(BadInput, match="is not an image"):
        list(iter_batches(as_dataset(photos, MODEL), MODEL, 2))


def test_masks_and_classes_come_with_their_images(photos: list[str]) -> None:
    """A mask of the whole picture is cut as the picture is; who has none has an empty one and is named."""
    trimap = np.full((40, 60), 2, np.uint8)
    trimap[:, 30:], trimap[:5] = 1, 3
    dataset = as_dataset(
        photos,
        MODEL,
        masks=[trimap, None, trimap, trimap, trimap],
        mask_kind="trimap",
        labels=["a", None, 2, 3, 4],
        others=[1, 2, None, 4, 5],
    )
    (part,) = iter_batches(dataset, MODEL, 8)
    assert part.masks is not None
    assert part.void is not None
    assert part.unmasked == (photos[1],)
    assert not part.masks[1].any()
    assert part.masks[0, 10:, 17:].all()
    assert not part.masks[0, :, :15].any()
    assert part.void[0, :2].all()
    assert not (part.masks & part.void).any()
    assert part.labels == ("a", None, 2, 3, 4)
    assert part.others == (1, 2, None, 4, 5)


def test_masks_may_be_computed_from_the_picture(photos: list[str]) -> None:
    seen: list[str] = []

    def left_half(name: str, picture: Image.Image) -> Image.Image:
        seen.append(name)
        mask = Image.new("L", picture.size)
        mask.paste(255, (0, 0, picture.width // 2, picture.height))
        return mask

    (part,) = iter_batches(as_dataset(photos[:2], MODEL, masks=left_half), MODEL, 8)
    assert seen == photos[:2]
    assert part.masks is not None
    assert part.masks[:, :, :16].all()
    assert not part.masks[:, :, 17:].any()
    with pytest.raises(BadInput, match="found on pictures, and a tensor was given"):
        list(iter_batches(as_dataset(pixels("timm-vit", 2), MODEL, masks=left_half), MODEL, 8))


def test_counts_must_agree(photos: list[str]) -> None:
    for word in ("masks", "labels", "others"):
        with pytest.raises(BadInput, match=f"1 {word} were given for 5 images; expected one for each"):
            as_dataset(photos, MODEL, **{word: [None]})
    with pytest.raises(BadInput, match="No images were given"):
        as_dataset([], MODEL)


def test_the_hash_depends_on_values_and_names_a_missing_file(tmp_path: Path) -> None:
    near = torch.tensor([1.0, 1.0 + 1e-12], dtype=torch.float64)
    assert digest(near[:1]) != digest(near[1:]), "float64 is not rounded"
    assert digest(near.bfloat16()) == digest(torch.ones(2).bfloat16())
    dataset = as_dataset([tmp_path / "gone.png"], MODEL)
    with pytest.raises(BadInput, match=r"gone.png' cannot be read \(No such file or directory\); expected a file"):
        dataset.content_hash(0)


def test_the_hash_depends_on_image_and_annotations(photos: list[str]) -> None:
    mask = np.zeros((40, 60), np.uint8)
    plain = as_dataset(photos, MODEL)
    assert isinstance(plain, ImageDataset)
    assert as_dataset(plain, MODEL) is plain
    marks = {
        plain.content_hash(0),
        plain.content_hash(1),
        as_dataset(photos, MODEL, labels=[1] * 5).content_hash(0),
        as_dataset(photos, MODEL, labels=[2] * 5).content_hash(0),
        as_dataset(photos, MODEL, masks=[mask] * 5).content_hash(0),
        as_dataset(photos, MODEL, masks=[mask + 1] * 5).content_hash(0),
        as_dataset(photos, MODEL, masks=[mask] * 5, mask_kind="voc").content_hash(0),
    }
    assert len(marks) == 7
    before = plain.content_hash(2)
    assert as_dataset(list(reversed(photos)), MODEL).content_hash(2) == before, "the row does not matter"
    Path(photos[2]).write_bytes(Path(photos[2]).read_bytes() + b" ")
    assert plain.content_hash(2) != before
    tensors = pixels("timm-vit", 2)
    assert as_dataset(tensors, MODEL).content_hash(0) != as_dataset(tensors, MODEL).content_hash(1)
    assert digest("ab", "c") != digest("a", "bc")
    assert digest(torch.zeros(2, 3)) != digest(torch.zeros(3, 2))
