"""HEIC photos: read where pillow-heif is installed, refused with the way out where it is not."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from PIL import Image

import clairvit as cv
from clairvit.errors import BadInput
from clairvit.models.image_files import HEIF, find_images, is_heic, read_image
from clairvit.web.uploads import InvalidUpload, decode

BOX = b"\x00\x00\x00\x18ftypheic\x00\x00\x00\x00mif1heic"


def picture() -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (20, 30, 3), np.uint8))


def heic_bytes(image: Image.Image) -> bytes:
    """The box of a HEIC file, then a PNG, which the opener of the test decodes."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return BOX + buffer.getvalue()


@pytest.fixture
def without_opener(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pillow_heif", None)  # import raises ModuleNotFoundError


@pytest.fixture
def with_opener(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A module with the function that pillow-heif registers its opener by."""

    def opener(file: io.BytesIO, _: str) -> Image.Image:
        return Image.open(io.BytesIO(file.read()[len(BOX) :]), formats=["PNG"])

    module = ModuleType("pillow_heif")
    module.register_heif_opener = lambda: Image.register_open(HEIF, opener, is_heic)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pillow_heif", module)
    Image.init()  # Pillow registers its own formats when the first file is opened, and only once
    names, openers = list(Image.ID), dict(Image.OPEN)
    yield
    Image.ID[:] = names
    Image.OPEN.clear()
    Image.OPEN.update(openers)


def test_a_heic_photo_is_read_where_pillow_heif_is_installed(with_opener: None, tmp_path: Path) -> None:
    image = picture()
    file = tmp_path / "photo.heic"
    file.write_bytes(heic_bytes(image))
    assert find_images(tmp_path) == [file]
    assert np.array_equal(np.asarray(read_image(file)), np.asarray(image))
    assert np.array_equal(np.asarray(decode(heic_bytes(image))[0]), np.asarray(image)), "sent to the page"
    maps = cv.explain("pets", file, "random").maps
    assert maps.shape == (1, 14, 14)


def test_a_damaged_one_is_refused_as_such(with_opener: None, tmp_path: Path) -> None:
    file = tmp_path / "photo.heic"
    file.write_bytes(heic_bytes(picture())[:-40])
    with pytest.raises(BadInput, match="damaged"):
        read_image(file)
    with pytest.raises(InvalidUpload, match="damaged"):
        decode(heic_bytes(picture())[:-40])


def test_without_it_the_sentence_says_what_to_do(without_opener: None, tmp_path: Path) -> None:
    file = tmp_path / "photo.heic"
    file.write_bytes(heic_bytes(picture()))
    with pytest.raises(BadInput, match=r"is a HEIC photo.*clairvit\[heic\].*or export the photo as JPEG"):
        read_image(file)
    with pytest.raises(InvalidUpload, match="iPhone photo"):
        decode(heic_bytes(picture()))


def test_other_files_that_are_no_image_say_so(without_opener: None, tmp_path: Path) -> None:
    file = tmp_path / "photo.heic"
    file.write_bytes(b"hello, I am a photo")
    with pytest.raises(BadInput, match="is not an image"):
        read_image(file)
