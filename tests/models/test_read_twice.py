"""What a file says of its picture is applied once: orientation, transparent colours, bits; the rest is noted."""

from __future__ import annotations

import io
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from clairvit.data.masks import read_mask
from clairvit.errors import BadInput, ClairWarning
from clairvit.models.image_files import EncodedImage, read_image, read_picture, upright
from clairvit.models.images import prepare
from clairvit.models.model import Model
from clairvit.models.preprocess import Preprocess
from helpers.raw_png import GREY, RGB, png

ORIENTATION = 0x0112
TURNS: dict[int, Callable[[np.ndarray], np.ndarray]] = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.swapaxes(0, 1),
    6: lambda a: np.rot90(a, -1),
    7: lambda a: a[::-1, ::-1].swapaxes(0, 1),
    8: lambda a: np.rot90(a),
}
EXIF_KINDS = ("PNG", "TIFF", "WEBP", "JPEG", "MPO")
MODES = ("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "CMYK", "YCbCr", "LAB", "HSV", "I", "F", "I;16")


def picture() -> np.ndarray:
    """16 x 24 pixels without any symmetry; blocks of 8 keep their mean in a JPEG."""
    values = np.random.default_rng(0).integers(0, 256, (2, 3, 3), np.uint8)
    return values.repeat(8, 0).repeat(8, 1)


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **({"lossless": True} if kind == "WEBP" else {}), **options)
    return buffer.getvalue()


def with_orientation(kind: str, orientation: int) -> bytes:
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    return encoded(Image.fromarray(picture()), kind, exif=exif)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", EXIF_KINDS)
def test_reading_an_oriented_image_twice_is_reading_it_once(kind: str, orientation: int) -> None:
    content = with_orientation(kind, orientation)
    image = read_image(EncodedImage("photo", content))
    stored = read_image(EncodedImage("photo", with_orientation(kind, 1)))
    assert np.array_equal(np.asarray(image), TURNS[orientation](np.asarray(stored)))
    assert np.array_equal(np.asarray(read_image(image)), np.asarray(image))
    with Image.open(io.BytesIO(content)) as opened:
        turned = upright(opened, "it")
        assert np.array_equal(np.asarray(upright(turned, "it")), np.asarray(turned))
        assert np.array_equal(np.asarray(read_image(opened)), np.asarray(image))  # now it is decoded


@pytest.mark.parametrize("orientation", [3, 6])
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "TIFF"])
def test_an_orientation_in_xmp_is_applied_once(kind: str, orientation: int) -> None:
    xmp = f'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF tiff:Orientation="{orientation}"/></x:xmpmeta>'
    if kind == "PNG":
        from PIL.PngImagePlugin import PngInfo

        described = PngInfo()
        described.add_itxt("XML:com.adobe.xmp", xmp)
        options: dict[str, Any] = {"pnginfo": described}
    else:
        options = {"tiffinfo": {700: xmp.encode()}} if kind == "TIFF" else {"xmp": xmp.encode()}
    image = read_image(EncodedImage("photo", encoded(Image.fromarray(picture()), kind, **options)))
    stored = read_image(EncodedImage("photo", encoded(Image.fromarray(picture()), kind)))
    assert np.array_equal(np.asarray(image), TURNS[orientation](np.asarray(stored)))
    assert np.array_equal(np.asarray(read_image(image)), np.asarray(image))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("orientation", [1, 5, 8])
def test_reading_twice_is_reading_once_in_every_mode(mode: str, orientation: int) -> None:
    base = Image.fromarray(np.dstack([picture(), np.arange(384, dtype=np.uint8).reshape(16, 24)]))  # with alpha
    if mode in ("I", "F", "I;16"):
        values = np.arange(384).reshape(16, 24) * 170
        image = Image.fromarray(values.astype({"I": np.int32, "F": np.float32, "I;16": np.uint16}[mode]))
    elif mode == "LAB":
        image = Image.merge("LAB", base.split()[:3])
    else:
        through = {"La": "LA", "RGBa": "RGBA", "PA": "P", "LA": "RGBA"}.get(mode, "RGB")
        image = base.convert(through).convert(mode)
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    image.info |= {"exif": exif.tobytes(), "transparency": 3}
    once = read_image(image)
    assert once.mode == "RGB"
    assert once.size == ((24, 16) if orientation == 1 else (16, 24))
    assert np.array_equal(np.asarray(read_image(once)), np.asarray(once))
    grey = read_picture(image, 1)
    assert np.array_equal(np.asarray(read_picture(grey, 1)), np.asarray(grey))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("name", ["bands.tif", "bands.dat"])
def test_pictures_of_any_number_of_bands_are_upright_too(tmp_path: Path, orientation: int, name: str) -> None:
    import tifffile

    bands = np.random.default_rng(1).integers(0, 256, (6, 9, 4), np.uint8)
    tifffile.imwrite(
        tmp_path / name,
        bands,
        photometric="rgb",
        extrasamples=["unassalpha"],
        metadata=None,
        extratags=[(ORIENTATION, "H", 1, orientation, True)],
    )
    assert np.array_equal(read_picture(tmp_path / name, 4), TURNS[orientation](bands))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("mode", ["L", "RGBA", "CMYK", "I;16"])
def test_an_uncompressed_tiff_on_its_side_is_not_scrambled(tmp_path: Path, mode: str, orientation: int) -> None:
    """Pillow maps these into memory as if columns and rows were exchanged already."""
    values = np.random.default_rng(2).integers(0, 256, (6, 9, 4), np.uint8)
    stored = Image.fromarray(values[..., 0].astype(np.uint16) * 257 if mode == "I;16" else values)
    stored = stored if mode in ("RGBA", "I;16") else stored.convert(mode)
    stored.save(tmp_path / "side.tif", tiffinfo={ORIENTATION: orientation})
    expected = TURNS[orientation](np.asarray(read_image(stored)))
    assert np.array_equal(np.asarray(read_image(tmp_path / "side.tif")), expected)
    if mode == "L":
        mask = read_mask(tmp_path / "side.tif", (9, 6) if orientation <= 4 else (6, 9))
        assert np.array_equal(np.asarray(mask), np.where(expected[..., 0] > 0, 255, 0))


# transparent colours ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("grey of 1 bit", png((2, 1), 1, GREY, b"\x40", [1]), [0, 255]),
        ("grey of 1 bit, black", png((2, 1), 1, GREY, b"\x40", [0]), [255, 255]),
        ("grey of 2 bits", png((4, 1), 2, GREY, b"\x1b", [2]), [0, 85, 255, 255]),
        ("grey of 4 bits", png((2, 1), 4, GREY, b"\x5a", [5]), [255, 170]),
        ("grey of 8 bits", png((2, 1), 8, GREY, b"\x50\xa0", [80]), [255, 160]),
        ("grey of 16 bits", png((2, 1), 16, GREY, struct.pack(">2H", 257 * 90, 257 * 9), [257 * 9]), [90, 255]),
        ("colour of 8 bits", png((2, 1), 8, RGB, bytes([1, 1, 1, 4, 5, 6]), [4, 5, 6]), [1, 255]),
        (
            "colour of 16 bits",
            png((2, 1), 16, RGB, struct.pack(">6H", *[257 * 7] * 3, 40000, 50000, 60000), [40000, 50000, 60000]),
            [7, 255],
        ),
        (
            "dark colour of 16 bits",
            png((2, 1), 16, RGB, struct.pack(">6H", *[257 * 7] * 3, 9, 9, 9), [9] * 3),
            [7, 255],
        ),
    ],
)
def test_the_transparent_colour_of_a_png_becomes_white(name: str, content: bytes, expected: list[int]) -> None:
    image = read_image(EncodedImage(name, content))
    assert np.asarray(image).tolist() == [[[value] * 3 for value in expected]]
    assert np.array_equal(np.asarray(read_image(image)), np.asarray(image))


def test_a_transparent_colour_gives_the_input_of_the_same_picture_with_alpha() -> None:
    model = Model(nn.Linear(1, 1), "tiny", Preprocess(size=(16, 24), resize=None))
    colours = np.ascontiguousarray(picture())
    clear = colours[0, 0]
    alpha = np.where((colours == clear).all(-1), 0, 255).astype(np.uint8)
    with Image.open(io.BytesIO(png((24, 16), 8, RGB, colours.tobytes(), clear.tolist()))) as keyed:
        batch = prepare(keyed, model)
    assert torch.equal(batch.pixels, prepare(Image.fromarray(np.dstack([colours, alpha])), model).pixels)


def test_the_colours_of_a_picture_that_the_user_converted_stay() -> None:
    """Pillow leaves the transparent colour of a palette in what `convert` returns, where opaque pixels may have it."""
    picture = Image.new("P", (2, 1))
    picture.putpalette([10, 20, 30, 10, 20, 30])
    picture.putpixel((1, 0), 1)
    picture.info["transparency"] = 0
    assert read_image(picture).getpixel((0, 0)) == (255, 255, 255)
    assert read_image(picture.convert("RGB")).getpixel((1, 0)) == (10, 20, 30)


# grey of 9 to 15 bits -----------------------------------------------------------------------------------------------


def tiff_of_12_bits(values: list[int]) -> bytes:
    """One row of packed 12-bit grey, which neither Pillow nor tifffile alone writes."""
    packed = b"".join(
        bytes([a >> 4, (a & 15) << 4 | b >> 8, b & 255]) for a, b in zip(*[iter(values)] * 2, strict=True)
    )
    tags = [
        (256, len(values)),
        (257, 1),
        (258, 12),
        (259, 1),
        (262, 1),
        (273, 0),
        (277, 1),
        (278, 1),
        (279, len(packed)),
    ]
    start = 8 + 2 + 12 * len(tags) + 4
    entries = b"".join(struct.pack("<HHIHH", tag, 3, 1, start if tag == 273 else value, 0) for tag, value in tags)
    return b"II*\x00" + struct.pack("<IH", 8, len(tags)) + entries + bytes(4) + packed


def test_grey_of_12_bits_is_scaled_where_the_file_says_so() -> None:
    values = [0, 1000, 2048, 4095]
    expected = [round(value * 255 / 4095) for value in values]
    deep = Image.fromarray(np.array([values], np.uint16))
    stated = encoded(deep, "TIFF", tiffinfo={281: 4095})
    for content in (tiff_of_12_bits(values), stated):
        assert np.asarray(read_image(EncodedImage("deep.tif", content)))[0, :, 0].tolist() == expected
    statistic = encoded(deep, "TIFF", tiffinfo={281: 4000})  # the highest value of some picture, not its white
    with pytest.warns(ClairWarning, match="very dark"):
        assert np.asarray(read_image(EncodedImage("deep.tif", statistic)))[0, :, 0].tolist() == [0, 4, 8, 16]


@pytest.mark.parametrize(("highest", "bits", "factor"), [(255, 8, 256), (1000, 10, 64), (4095, 12, 16), (16383, 14, 4)])
@pytest.mark.parametrize("kind", ["PNG", "TIFF", "PPM", "I"])
def test_dark_grey_of_16_bits_is_noted(tmp_path: Path, kind: str, highest: int, bits: int, factor: int) -> None:
    model = Model(nn.Linear(1, 1), "tiny", Preprocess(size=(8, 8), resize=None))
    values = np.full((8, 8), highest, np.uint16)
    source: Any = tmp_path / "dark.img"
    if kind == "I":
        source = Image.fromarray(values.astype(np.int32))
    else:
        Image.fromarray(values).save(source, kind)
    if kind in ("I", "PPM") and highest == 255:
        assert prepare(source, model).notes == ()  # Pillow's 32-bit integers up to 255 are 8 bits
        return
    with pytest.warns(ClairWarning, match=rf"no value above {highest:,}, .* very dark .* {bits} bits, .* by {factor} "):
        batch = prepare(source, model)
    assert len(batch.notes) == 1
    followed = Image.fromarray((values.astype(np.int64) * factor).astype(np.uint16))
    assert prepare(followed, model).notes == ()  # the advice works


def test_ordinary_and_black_grey_of_16_bits_has_no_note() -> None:
    model = Model(nn.Linear(1, 1), "tiny", Preprocess(size=(8, 8), resize=None))
    for highest in (0, 2**14, 65535):
        assert prepare(Image.fromarray(np.full((8, 8), highest, np.uint16)), model).notes == ()


# several pages ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "parts"), [("TIFF", "pages"), ("GIF", "frames"), ("WEBP", "frames"), ("PNG", "frames")]
)
def test_only_the_first_of_several_pictures_is_read_and_that_is_noted(tmp_path: Path, kind: str, parts: str) -> None:
    model = Model(nn.Linear(1, 1), "tiny", Preprocess(size=(8, 8), resize=None))
    pictures = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    (tmp_path / "picture").write_bytes(encoded(pictures[0], kind, save_all=True, append_images=pictures[1:]))
    with pytest.warns(ClairWarning, match=rf"picture' has several {parts}; only the first is read\."):
        batch = prepare(tmp_path / "picture", model)
    assert len(batch.notes) == 1
    assert torch.equal(batch.pixels, prepare(pictures[0], model).pixels)
    (tmp_path / "picture").write_bytes(encoded(pictures[0], kind))
    assert prepare(tmp_path / "picture", model).notes == ()


def test_a_frame_that_the_user_chose_has_no_note() -> None:
    pictures = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    with Image.open(io.BytesIO(encoded(pictures[0], "TIFF", save_all=True, append_images=pictures[1:]))) as picture:
        picture.seek(1)
        assert read_image(picture).getpixel((0, 0)) == (0, 0, 255)


def test_the_second_picture_of_a_phones_photo_is_no_page() -> None:
    content = encoded(Image.new("RGB", (8, 8)), "MPO", save_all=True, append_images=[Image.new("RGB", (4, 4))])
    assert read_image(EncodedImage("photo.jpg", content)).size == (8, 8)


# programs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["photo.jpg", "drawing.eps"])
def test_no_program_is_run_for_an_eps_file(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from PIL import EpsImagePlugin

    def run(*_: object, **__: object) -> None:
        pytest.fail("Ghostscript was run")

    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", run)
    assert "subprocess" in sys.modules  # what Ghostscript would be run by
    monkeypatch.setattr("subprocess.check_call", run)
    content = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n"
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BadInput, match=rf"{name}' is an EPS drawing, which only another program can draw"):
        read_image(tmp_path / name)
    for channels in (1, 5):
        with pytest.raises(BadInput, match="is an EPS drawing"):
            read_picture(tmp_path / name, channels)
    with Image.open(io.BytesIO(content)) as drawing, pytest.raises(BadInput, match="PIL image is an EPS drawing"):
        read_image(drawing)
