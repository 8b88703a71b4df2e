"""Reading images: every odd picture either works or gives one clear sentence."""

from __future__ import annotations

import io
import os
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from clairvit.errors import BadInput, ClairWarning
from clairvit.models.image_files import find_images, open_image, read_image
from clairvit.models.images import prepare
from clairvit.models.model import Model
from clairvit.models.preprocess import Preprocess
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


def test_broken_exif_warns_and_is_ignored(tmp_path: Path) -> None:
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
        actual = read_image(source)
        assert actual.mode == "RGB", mode
        assert actual.size == base.size, mode


def test_transparency_becomes_white(tmp_path: Path) -> None:
    pixels = np.zeros((4, 4, 4), np.uint8)
    pixels[:2, :, 3] = 255
    Image.fromarray(pixels).save(tmp_path / "cut.png")
    actual = np.asarray(read_image(tmp_path / "cut.png"))
    assert (actual[:2] == 0).all()
    assert (actual[2:] == 255).all()
    palette = Image.new("P", (4, 4), 0)
    palette.putpalette([10, 20, 30])
    palette.save(tmp_path / "see-through.gif", transparency=0)
    assert read_image(tmp_path / "see-through.gif").getpixel((0, 0)) == (255, 255, 255)


def test_sixteen_bit_grey_is_scaled_not_clipped(tmp_path: Path) -> None:
    values = np.linspace(0, 65535, 256).astype(np.uint16).reshape(16, 16)
    for name in ("deep.png", "deep.tiff"):
        Image.fromarray(values).save(tmp_path / name)
        actual = np.asarray(read_image(tmp_path / name))[..., 0]
        assert np.array_equal(actual, np.round(values / 257).astype(np.uint8)), name


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
    path = tmp_path / f"animation{suffix}"
    frames[0].save(path, save_all=True, append_images=frames[1:], **({"lossless": True} if suffix == ".webp" else {}))
    with pytest.warns(ClairWarning, match="has several frames; only the first is read"):
        assert read_image(path).getpixel((4, 4)) == (255, 0, 0)


def test_one_pixel_is_an_image(tmp_path: Path, model: Model) -> None:
    Image.new("RGB", (1, 1), (255, 0, 0)).save(tmp_path / "dot.png")
    batch = prepare(tmp_path / "dot.png", model)
    assert batch.pixels.shape == (1, 3, 32, 48)
    assert_same(batch.pixels[0, 0], torch.full((32, 48), (1 - 0.485) / 0.229), growth=growth(3, 1))  # / 255, −, /


# what cannot be read ------------------------------------------------------------------------------------------------


def test_a_missing_file_suggests_similar_names(tmp_path: Path) -> None:
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


def test_a_huge_image_raises_before_it_is_decoded(tmp_path: Path) -> None:
    path = tmp_path / "huge.png"
    Image.new("1", (20000, 10000)).save(path)
    limit = Image.MAX_IMAGE_PIXELS
    with pytest.raises(BadInput, match=r"huge\.png' is too large to decode safely.*200000000 pixels.*smaller copy"):
        read_image(path)
    assert limit == Image.MAX_IMAGE_PIXELS


def test_an_extremely_narrow_image_raises(model: Model) -> None:
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
    ("array", "message"),
    [
        (np.zeros((4, 4, 3)), r"dtype float64; expected uint8 .*\(a \* 255\)"),
        (np.zeros((4, 4, 3), np.uint16), "dtype uint16"),
        (np.zeros((4, 4, 2), np.uint8), r"shape \[4, 4, 2\]"),
        (np.zeros((0, 4, 3), np.uint8), r"shape \[0, 4, 3\]"),
    ],
)
def test_arrays_that_are_no_pictures(array: np.ndarray, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        read_image(array)


def test_other_objects_are_named() -> None:
    with pytest.raises(BadInput, match="given as int; expected a path, a PIL image"):
        read_image(7)  # type: ignore[arg-type]


# advice that works when it is followed --------------------------------------------------------------------------------


def advised(message: str) -> str:
    """The expression in a message that makes a picture of the array `a`."""
    expression = re.search(r"\(?\ba\b[^:;]*astype\('uint8'\)(?: \* 255)?|a\.transpose\([^)]*\)", message)
    assert expression is not None, message
    return expression[0]


@pytest.mark.parametrize(
    "make",
    [
        lambda picture: picture / 255,
        lambda picture: (picture / 255).astype(np.float32),
        lambda picture: picture.astype(np.float64),
        lambda picture: picture.astype(np.float32),
        lambda picture: picture.astype(np.int64),
        lambda picture: picture.astype(np.uint16) * 257,
        lambda picture: picture.transpose(2, 0, 1),
    ],
    ids=["0..1", "0..1 float32", "0..255 floats", "0..255 float32", "int64", "uint16", "channels first"],
)
def test_following_the_advice_for_an_array_gives_the_picture(make: Callable[[np.ndarray], np.ndarray]) -> None:
    picture = gradient()
    array = make(picture)
    with pytest.raises(BadInput, match=r"expected uint8 \[H, W, 3\]") as caught:
        read_image(array)
    followed = eval(advised(str(caught.value)), {"a": array})
    assert np.array_equal(np.asarray(read_image(followed)), picture)


def test_following_the_advice_for_a_mask_of_booleans() -> None:
    array = gradient()[..., 0] > 128
    with pytest.raises(BadInput, match="dtype bool") as caught:
        read_image(array)
    seen = np.asarray(read_image(eval(advised(str(caught.value)), {"a": array})))
    assert np.array_equal(seen[..., 0], np.where(array, 255, 0))


def test_an_array_of_normalised_floats_is_advised_to_be_a_tensor(model: Model) -> None:
    how = model.preprocess
    pixels = prepare(Image.fromarray(gradient()), model).pixels[0]
    array = pixels.permute(1, 2, 0).numpy()
    with pytest.raises(BadInput, match="if it is normalised already") as caught:
        read_image(array)
    advice = re.search(r"torch\.from_numpy\(a\)\.permute\(2, 0, 1\)", str(caught.value))
    assert advice is not None
    assert torch.equal(prepare(eval(advice[0], {"a": array, "torch": torch}), model).pixels[0], pixels)
    assert how == model.preprocess


def test_arrays_without_a_sensible_range_say_which_they_have() -> None:
    with pytest.raises(BadInput, match=r"with values in 0\.\.255, and these are from -300 to 900"):
        read_image(np.array([[-300, 900]]))
    with pytest.raises(BadInput, match="of finite numbers"):
        read_image(np.array([[0.0, np.nan]]))


# float tensors that were not normalised -------------------------------------------------------------------------------


def raw_tensor() -> torch.Tensor:
    """What torchvision's ToTensor gives: [3, 32, 48] in 0..1."""
    return torch.from_numpy(gradient(32, 48)).permute(2, 0, 1).float() / 255


@pytest.mark.parametrize("form", ["one", "batch", "list"])
def test_a_tensor_of_raw_pixels_is_warned_about_and_noted(model: Model, form: str) -> None:
    raw = raw_tensor()
    images = {"one": raw, "batch": torch.stack([raw, raw]), "list": [raw]}[form]
    with pytest.warns(ClairWarning, match=r"look like pixels in 0\.\.1 that were not normalised") as caught:
        batch = prepare(images, model)
    assert batch.notes == (str(caught[0].message),)
    assert "values from 0 to 1" in batch.notes[0]


@pytest.mark.parametrize(
    ("raw_rows", "start"),
    [
        ([4], "The image tensor (image 5) has values from 0 to 1, which look like pixels"),
        ([1, 9, 17], "3 of 20 image tensors (image 2, image 10, image 18) have values from 0 to 1,"),
        ([*range(12)], "12 of 20 image tensors (image 1, image 2, image 3, image 4, image 5 and 7 more) have values"),
        ([*range(20)], "All 20 image tensors have values from 0 to 1,"),
    ],
)
@pytest.mark.parametrize("form", ["list", "data set", "iterator", "features"])
def test_tensors_of_raw_pixels_are_warned_about_once_with_their_numbers(
    form: str, raw_rows: list[int], start: str
) -> None:
    import clairvit as cv
    from helpers import tiny_models as tiny

    model, images = tiny.double("timm-vit")
    raw = torch.linspace(0, 1, images[0].numel(), dtype=torch.float64).reshape(images[0].shape)
    items = [raw if row in raw_rows else images[row % len(images)] for row in range(20)]
    given: Any = items
    if form in ("data set", "features"):
        given = Items([(item, 0) for item in items])
    elif form == "iterator":
        given = iter(items)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if form == "features":
            notes = cv.features(model, given).notes
        else:
            notes = cv.explain(model, given, "rollout").notes
    messages = [str(warning.message) for warning in caught if warning.category is ClairWarning]
    assert [message for message in messages if "normalised" in message] == messages
    assert len(messages) == 1
    assert messages[0].startswith(start)
    assert [note for note in notes if "normalised" in note] == messages


class Items(torch.utils.data.Dataset[Any]):
    """A data set of (image, label)."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


def test_evaluate_warns_of_raw_tensors_in_words_that_are_shown_once() -> None:
    import clairvit as cv
    from helpers import tiny_models as tiny

    model, images = tiny.double("timm-vit")
    raw = torch.linspace(0, 1, images[0].numel(), dtype=torch.float64).reshape(images[0].shape)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cv.evaluate(model, [raw * (1 - 0.01 * row) for row in range(8)], "rollout", "sparseness")
    messages = {str(warning.message) for warning in caught if warning.category is ClairWarning}
    assert len(messages) == 1
    assert "were not normalised" in messages.pop()


def test_following_the_advice_for_raw_tensors_ends_the_warning(model: Model) -> None:
    raw = raw_tensor()
    with pytest.warns(ClairWarning, match="pass a PIL image or a uint8 array, or") as caught:
        prepare(raw, model)
    advice = re.search(r"\(x - mean\) / std with mean (\[.*?\]) and std (\[.*?\])\.$", str(caught[0].message))
    assert advice is not None
    mean, std = (torch.tensor(eval(part))[:, None, None] for part in advice.groups())
    normalised = prepare((raw - mean) / std, model)  # a ClairWarning would be an error here
    picture = prepare(Image.fromarray(gradient(32, 48)), model)
    array = prepare(gradient(32, 48), model)
    assert normalised.notes == picture.notes == array.notes == ()
    assert torch.equal(picture.pixels, array.pixels)
    assert torch.equal(normalised.pixels, picture.pixels)


def test_following_the_advice_for_tensors_up_to_255(model: Model) -> None:
    raw = raw_tensor() * 255
    with pytest.warns(ClairWarning, match=r"pass uint8 pixels or \(x / 255 - mean\) / std"):
        prepare(raw, model)
    picture = prepare(Image.fromarray(gradient(32, 48)), model)
    assert torch.equal(prepare(raw.round().to(torch.uint8), model).pixels, picture.pixels)
    mean, std = (torch.tensor(part)[:, None, None] for part in (model.preprocess.mean, model.preprocess.std))
    assert prepare((raw / 255 - mean) / std, model).notes == ()


def test_tensors_that_may_be_normalised_do_not_warn(model: Model) -> None:
    flat = torch.full((3, 32, 48), 0.5)
    for pixels in (torch.zeros(3, 32, 48), flat, flat + 0.2 * raw_tensor(), raw_tensor() - 0.1, 3 * raw_tensor()):
        assert prepare(pixels, model).notes == ()
    as_it_is = Model(model.module, "0..1", Preprocess((32, 48), (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)))
    assert prepare(raw_tensor(), as_it_is).notes == ()  # this model takes pixels in 0..1


def test_explain_carries_the_note() -> None:
    import clairvit as cv

    model = cv.load("pets")
    raw = torch.from_numpy(np.array(read_image("demo").resize((224, 224)))).permute(2, 0, 1).float() / 255
    with pytest.warns(ClairWarning, match="not normalised"):
        explanation = cv.explain(model, raw, "ixg")
    assert len(explanation.notes) == 1
    assert "pixels in 0..1" in explanation.notes[0]


# folders, patterns, addresses -----------------------------------------------------------------------------------------


@pytest.fixture
def five(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "five" / ".ipynb_checkpoints").mkdir(parents=True)
    for name in ("a1.png", "a2.png", "a10.png", "b.jpg", "c.jpg", ".hidden.png", ".ipynb_checkpoints/a1.png"):
        Image.fromarray(gradient()).save(tmp_path / "five" / name)
    return tmp_path


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ("five", ["five/a1.png", "five/a2.png", "five/a10.png", "five/b.jpg", "five/c.jpg"]),
        ("five/*.jpg", ["five/b.jpg", "five/c.jpg"]),
        (Path("five/a1*.png"), ["five/a1.png", "five/a10.png"]),
        (["five/*.jpg", "five/a1.png"], ["five/b.jpg", "five/c.jpg", "five/a1.png"]),
        ("five/c*", ["five/c.jpg"]),
    ],
)
def test_folders_and_patterns_stand_for_their_images(five: Path, model: Model, given: Any, names: list[str]) -> None:
    batch = prepare(given, model)
    assert list(batch.names) == names
    assert not batch.single
    assert batch.pixels.shape == (len(names), 3, 32, 48)


def test_explain_and_evaluate_take_folders_and_patterns(five: Path) -> None:
    import clairvit as cv

    pets = cv.load("pets")
    assert cv.explain(pets, "five/*.jpg", "ixg").names == ("five/b.jpg", "five/c.jpg")
    assert cv.evaluate(pets, "five/*.jpg", "ixg", "sparseness").names == ("five/b.jpg", "five/c.jpg")
    with pytest.raises(BadInput, match=r"No image matches 'five/\*\.tif'"):
        cv.explain(pets, "five/*.tif", "ixg")


def test_a_folder_where_one_image_is_needed_names_a_file_in_it(five: Path) -> None:
    with pytest.raises(BadInput, match="'five' is a folder where an image was expected; give one file in it") as caught:
        read_image("five")
    advice = re.search(r"such as '(.*)'", str(caught.value))
    assert advice is not None
    assert read_image(advice[1]).size == (60, 40)


@pytest.mark.parametrize("address", ["https://example.org/cat.jpg", "s3://bucket/cat.jpg", "file:///tmp/cat.jpg"])
def test_urls_raise_and_keep_their_slashes(model: Model, address: str) -> None:
    for read in (lambda: read_image(address), lambda: prepare([address], model), lambda: find_images(address)):
        with pytest.raises(BadInput, match=f"'{address}' is an address, .* files only; download it first"):
            read()


# large pictures -------------------------------------------------------------------------------------------------------


def test_a_picture_of_108_megapixels_is_read_without_a_warning_of_pillow(tmp_path: Path) -> None:
    Image.new("1", (12_000, 9_000), 1).save(tmp_path / "large.png")
    before = list(warnings.filters)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with open_image(tmp_path / "large.png") as image:
            assert image.size == (12_000, 9_000)
    assert not caught
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        open_image(tmp_path / "large.png").close()
        with pytest.raises(Image.DecompressionBombWarning):  # the user's own calls are warned as ever
            Image.open(tmp_path / "large.png")
    assert warnings.filters == before
