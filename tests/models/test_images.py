"""Reading images: every odd picture either works or gives one clear sentence."""

from __future__ import annotations

import io
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from clairvit.errors import BadInput, ClairWarning
from clairvit.models.images import prepare, read_image
from clairvit.models.model import Model, Preprocess
from helpers.rounding import assert_same, growth


@pytest.fixture(scope="module")
def photo() -> Image.Image:
    return read_image("demo")


@pytest.fixture
def model() -> Model:
    return Model(nn.Linear(1, 1), "tiny", Preprocess(size=(32, 48), resize=None))


def gradient(rows: int = 40, columns: int = 60) -> np.ndarray:
    ramp = np.linspace(0, 255, columns).astype(np.uint8)
    return np.stack([np.tile(ramp, (rows, 1)), np.full((rows, columns), 80), np.full((rows, columns), 160)], -1).astype(
        np.uint8
    )


# reading ------------------------------------------------------------------------------------------------------------


def test_demo_is_the_cat_unless_a_file_has_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert read_image("demo").size == (451, 300)
    assert read_image(Path("demo")).size == (451, 300)
    Image.new("RGB", (5, 7)).save(tmp_path / "demo", format="PNG")
    assert read_image("demo").size == (5, 7)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_rotation_is_undone(tmp_path: Path, orientation: int) -> None:
    from PIL import ImageOps

    exif = Image.Exif()
    exif[0x0112] = orientation
    path = tmp_path / "turned.png"
    Image.fromarray(gradient()).save(path, exif=exif)
    with Image.open(path) as stored:
        expected = ImageOps.exif_transpose(stored).convert("RGB")
    assert np.array_equal(np.asarray(read_image(path)), np.asarray(expected))
    assert read_image(path).size == ((60, 40) if orientation <= 4 else (40, 60))


def test_broken_exif_is_a_warning_not_the_end(tmp_path: Path) -> None:
    path = tmp_path / "odd.png"
    Image.fromarray(gradient()).save(path, exif=b"Exif\x00\x00garbage that is no TIFF header")
    with pytest.warns(ClairWarning, match="EXIF data of .* cannot be read"):
        assert read_image(path).size == (60, 40)


def test_cmyk_jpeg(tmp_path: Path) -> None:
    path = tmp_path / "print.jpg"
    Image.new("RGB", (20, 20), (200, 30, 40)).convert("CMYK").save(path, quality=95)
    red, green, blue = read_image(path).getpixel((10, 10))
    assert red > 150
    assert green < 90
    assert blue < 90


def test_palette_grey_bilevel_and_others_become_rgb(tmp_path: Path) -> None:
    base = Image.fromarray(gradient())
    for mode in ("P", "L", "1", "HSV", "YCbCr", "LA", "RGBA", "RGBa", "PA"):
        source = base.convert("RGBA").convert(mode) if mode == "RGBa" else base.convert(mode)
        got = read_image(source)
        assert got.mode == "RGB", mode
        assert got.size == base.size, mode


def test_transparency_is_laid_on_white(tmp_path: Path) -> None:
    pixels = np.zeros((4, 4, 4), np.uint8)
    pixels[:2, :, 3] = 255
    Image.fromarray(pixels).save(tmp_path / "cut.png")
    got = np.asarray(read_image(tmp_path / "cut.png"))
    assert (got[:2] == 0).all()
    assert (got[2:] == 255).all()
    palette = Image.new("P", (4, 4), 0)
    palette.putpalette([10, 20, 30])
    palette.save(tmp_path / "see-through.gif", transparency=0)
    assert read_image(tmp_path / "see-through.gif").getpixel((0, 0)) == (255, 255, 255)


def test_sixteen_bit_grey_is_scaled_not_clipped(tmp_path: Path) -> None:
    values = np.linspace(0, 65535, 256).astype(np.uint16).reshape(16, 16)
    for name in ("deep.png", "deep.tiff"):
        Image.fromarray(values).save(tmp_path / name)
        got = np.asarray(read_image(tmp_path / name))[..., 0]
        assert np.array_equal(got, np.round(values / 257).astype(np.uint8)), name


def test_sixteen_bit_colour_is_scaled(tmp_path: Path) -> None:
    import struct
    import zlib

    values = np.full((2, 2, 3), (65535, 32768, 256), ">u2")  # Pillow cannot write this kind, so by hand

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", 2, 2, 16, 2, 0, 0, 0)
    lines = b"".join(b"\x00" + row.tobytes() for row in values)
    png = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(lines)) + chunk(b"IEND", b"")
    (tmp_path / "deep.png").write_bytes(png)
    assert read_image(tmp_path / "deep.png").getpixel((0, 0)) == (255, 128, 1)


def test_integer_and_float_modes() -> None:
    def first_row(values: np.ndarray) -> list[int]:
        return [int(v) for v in np.asarray(read_image(Image.fromarray(values)))[0, :, 0]]

    assert first_row(np.array([[0, 128, 255]], np.int32)) == [0, 128, 255]
    assert first_row(np.array([[0, 257 * 100, 65535]], np.int32)) == [0, 100, 255]
    assert first_row(np.array([[0, 1, 1]], np.int32)) == [0, 1, 1]
    assert first_row(np.array([[0.0, 0.5, 1.0]], np.float32)) == [0, 128, 255]
    assert first_row(np.array([[0.0, 100.0, 255.0]], np.float32)) == [0, 100, 255]
    assert first_row(np.array([[-1.0, 0.0, 1.0]], np.float32)) == [0, 128, 255]
    with pytest.raises(BadInput, match="NaN or infinite pixels"):
        read_image(Image.fromarray(np.array([[0.0, np.nan]], np.float32)))


@pytest.mark.parametrize("suffix", [".gif", ".webp"])
def test_animations_give_their_first_frame(tmp_path: Path, suffix: str) -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ((255, 0, 0), (0, 255, 0))]
    path = tmp_path / f"film{suffix}"
    frames[0].save(path, save_all=True, append_images=frames[1:], **({"lossless": True} if suffix == ".webp" else {}))
    assert read_image(path).getpixel((4, 4)) == (255, 0, 0)


def test_one_pixel_is_an_image(tmp_path: Path, model: Model) -> None:
    Image.new("RGB", (1, 1), (255, 0, 0)).save(tmp_path / "dot.png")
    batch = prepare(tmp_path / "dot.png", model)
    assert batch.pixels.shape == (1, 3, 32, 48)
    assert_same(batch.pixels[0, 0], torch.full((32, 48), (1 - 0.485) / 0.229), growth=growth(3, 1))  # / 255, −, /


# what cannot be read ------------------------------------------------------------------------------------------------


def test_missing_file_offers_its_neighbours(tmp_path: Path) -> None:
    Image.new("RGB", (4, 4)).save(tmp_path / "kitten.png")
    with pytest.raises(BadInput, match=r"There is no image '.*kiten\.png'\. Did you mean 'kitten\.png'\?"):
        read_image(tmp_path / "kiten.png")
    with pytest.raises(BadInput, match=r"there is no folder .*nowhere.*'demo' for the built-in cat"):
        read_image(str(tmp_path / "nowhere" / "cat.png"))


def test_folder_where_an_image_was_expected(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="is a folder where an image was expected"):
        read_image(tmp_path)


def test_text_named_jpg(tmp_path: Path) -> None:
    (tmp_path / "note.jpg").write_text("dear diary, no pixels today")
    with pytest.raises(BadInput, match=r"note\.jpg' is not an image.*starts with b'dear diary, '.*JPEG"):
        read_image(tmp_path / "note.jpg")
    (tmp_path / "empty.png").write_bytes(b"")
    with pytest.raises(BadInput, match=r"empty\.png' is not an image"):
        read_image(tmp_path / "empty.png")


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_truncated_file(tmp_path: Path, kind: str, photo: Image.Image) -> None:
    whole = io.BytesIO()
    photo.save(whole, format=kind)
    path = tmp_path / "half.jpg"
    path.write_bytes(whole.getvalue()[: len(whole.getvalue()) // 2])
    with pytest.raises(BadInput, match=r"half\.jpg' is damaged.*save or download it again"):
        read_image(path)


def test_huge_image_is_refused_before_it_is_decoded(tmp_path: Path) -> None:
    path = tmp_path / "huge.png"
    Image.new("1", (20000, 10000)).save(path)
    limit = Image.MAX_IMAGE_PIXELS
    with pytest.raises(BadInput, match=r"huge\.png' is too large to decode safely.*200000000 pixels.*smaller copy"):
        read_image(path)
    assert limit == Image.MAX_IMAGE_PIXELS


def test_absurdly_narrow_image_does_not_fill_the_memory(model: Model) -> None:
    with pytest.raises(BadInput, match=r"1 x 90000 pixels is too narrow.*crop it first"):
        prepare(Image.new("RGB", (1, 90000)), model)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable_file(tmp_path: Path) -> None:
    path = tmp_path / "secret.png"
    Image.new("RGB", (4, 4)).save(path)
    path.chmod(0)
    with pytest.raises(BadInput, match="cannot be opened"):
        read_image(path)


@pytest.mark.parametrize(
    ("array", "said"),
    [
        (np.zeros((4, 4, 3)), r"dtype float64; expected uint8 .*\(a \* 255\)"),
        (np.zeros((4, 4, 3), np.uint16), "dtype uint16"),
        (np.zeros((4, 4, 2), np.uint8), r"shape \[4, 4, 2\]"),
        (np.zeros((0, 4, 3), np.uint8), r"shape \[0, 4, 3\]"),
    ],
)
def test_arrays_that_are_no_pictures(array: np.ndarray, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        read_image(array)


def test_other_objects_are_named() -> None:
    with pytest.raises(BadInput, match="given as int; expected a path, a PIL image"):
        read_image(7)  # type: ignore[arg-type]
