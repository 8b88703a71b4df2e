"""Bytes from strangers: whatever is sent, the answer is a map or a clear 4xx, and nothing large is ever decoded."""

from __future__ import annotations

import io
import random
import struct
import sys
import zipfile
import zlib

import pytest
from fastapi.testclient import TestClient
from PIL import Image

from clairvit.models.image_files import read_image
from clairvit.web import uploads
from clairvit.web.state import AppState
from clairvit.web.uploads import InvalidUpload, UploadExpired, UploadStore, decode
from helpers.raw_png import RGB, RGBA, png

KINDS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")


def encoded(kind: str, size: tuple[int, int] = (64, 48)) -> bytes:
    buffer = io.BytesIO()
    read_image("demo").resize(size).save(buffer, kind)
    return buffer.getvalue()


def png_of_size(width: int, height: int, data: bytes = b"") -> bytes:
    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def jpeg_of_scans(count: int) -> bytes:
    """The last scan of a progressive JPEG over and over: each costs a few bytes, and a walk over the whole picture."""
    buffer = io.BytesIO()
    Image.new("L", (64, 64), 128).save(buffer, "JPEG", progressive=True)
    whole = buffer.getvalue()
    last = whole[whole.rindex(b"\xff\xda") : -2]
    return whole[:-2] + last * (count - whole.count(b"\xff\xda")) + whole[-2:]


def archive() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr("run.py", "print('hello')")
    return buffer.getvalue()


SVG = b'<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg"><script>alert(1)</script></svg>'
BAD = {
    "empty": (b"", 422, "is empty"),
    "text": (b"hello, I am a photo", 415, "expected JPEG"),
    "svg": (SVG, 415, "nothing else"),
    "eps": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n", 415, "expected JPEG"),
    "tiff": (encoded("TIFF"), 415, "expected JPEG"),
    "pdf": (b"%PDF-1.7\n1 0 obj\n", 415, "nothing else"),
    "pickle": (b"\x80\x04\x95\x05\x00\x00\x00\x00\x00\x00\x00\x8c\x01a\x94.", 415, "expected JPEG"),
    "program": (b"\x7fELF" + bytes(200), 415, "expected JPEG"),
    "archive": (archive(), 415, "nothing else"),
    "iPhone photo": (b"\x00\x00\x00\x18ftypheic\x00\x00\x00\x00mif1heic", 415, "export it as JPEG"),
    "bomb of 400 megapixels": (png_of_size(20_000, 20_000, zlib.compress(bytes(10**6))), 413, "megapixels"),
    "51 megapixels": (png_of_size(7_200, 7_100, zlib.compress(bytes(10**6))), 413, "megapixels"),
    "2^31 pixels wide": (png_of_size(2**31 - 1, 1), 413, "megapixels"),
    "too narrow": (png_of_size(3_000, 2, zlib.compress(bytes(20_000))), 422, "crop it"),
    "too narrow upright": (png_of_size(2, 3_000, zlib.compress(bytes(21_000))), 422, "crop it"),
    "no pixels": (png_of_size(0, 0), 415, "expected JPEG"),
    "png without data": (png_of_size(64, 64), 422, "The photo is damaged; expected"),  # without Pillow's words
    "photo and archive": (encoded("JPEG") + archive(), 415, "nothing else"),
    "photo and page": (encoded("GIF") + b"<html><script>alert(1)</script></html>", 415, "nothing else"),
    "page and photo": (b"<html>" + encoded("PNG"), 415, "nothing else"),
    "comment that is a program": (encoded("GIF")[:-1] + b"!\xfe\x10<script>1</script>\x00;", 415, "nothing else"),
    "photo and program": (encoded("WEBP") + b"<?PHP system(1);", 415, "nothing else"),
    "photo and vector page": (encoded("PNG") + b"<SVG\nonload=x>", 415, "nothing else"),
    "a hundred and one scans": (jpeg_of_scans(101), 422, "100 scans"),
    "too many bytes": (encoded("PNG") + bytes(uploads.MAX_BYTES), 413, "smaller copy"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_photo_gets_a_clear_refusal(client: TestClient, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pillow_heif", None)  # as where it is not installed
    data, status, words = BAD[name]
    response = client.post("/api/explain", files={"image": ("photo.jpg", data, "image/jpeg")})
    assert response.status_code == status, response.text
    assert response.json()["kind"] == ("too-large" if status == 413 else "bad-photo")
    assert words in response.json()["message"]


def test_what_only_looks_like_something_else_is_read() -> None:
    """Words that a photo may hold by chance, or in its description."""
    assert decode(jpeg_of_scans(100))[0].size == (64, 64)
    for words in (b"<svg", b"<?xpacket begin", b"PK\x03\x04", b"%%E"):
        assert decode(encoded("GIF") + words)[0].size == (64, 48)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_photo_is_read(kind: str) -> None:
    assert decode(encoded(kind))[0].size == (64, 48)


@pytest.mark.parametrize("kind", KINDS)
def test_broken_photos_are_refused_or_read_but_never_an_accident(kind: str) -> None:
    """Cut anywhere, and with bytes changed anywhere: BadPhoto or an image, no other exception."""
    whole, generator = encoded(kind), random.Random(kind)
    refused = set()
    for _ in range(150):
        data = bytearray(whole[: generator.randrange(len(whole))] if generator.random() < 0.5 else whole)
        for _ in range(generator.randrange(4)):
            if data:
                data[generator.randrange(len(data))] = generator.randrange(256)
        try:
            assert decode(bytes(data))[0].mode == "RGB"
        except InvalidUpload as error:
            refused.add(error.status)
    assert refused
    assert refused <= {413, 415, 422}


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_photo_gives_the_same_answer_in_every_orientation(client: TestClient, orientation: int) -> None:
    """As phones store portraits: turned, with a tag that says how to turn them back."""
    turn = Image.Transpose
    stored_by = {
        2: 0,
        3: turn.ROTATE_180,
        4: 1,
        5: turn.TRANSPOSE,
        6: turn.ROTATE_90,
        7: turn.TRANSVERSE,
        8: turn.ROTATE_270,
    }
    upright = read_image("demo")
    stored = upright if orientation == 1 else upright.transpose(turn(stored_by[orientation]))
    exif = Image.Exif()
    exif[0x0112] = orientation
    photo = io.BytesIO()
    stored.save(photo, "PNG", exif=exif)
    plain = io.BytesIO()
    upright.save(plain, "PNG")
    replies = []
    for data in (photo, plain):
        response = client.post("/api/explain", data={"method": "ixg"}, files={"image": ("photo.png", data.getvalue())})
        reply = response.json()
        replies.append((reply["top"], reply["probabilities"], reply["cautions"], reply["explanations"][0]["maps"]))
    assert replies[0] == replies[1]


def test_the_page_says_that_it_shows_the_first_frame_only(client: TestClient) -> None:
    picture = io.BytesIO()
    read_image("demo").save(picture, "GIF", save_all=True, append_images=[Image.new("RGB", (451, 300), "red")])
    reply = client.post(
        "/api/explain", data={"method": "ixg"}, files={"image": ("picture.gif", picture.getvalue())}
    ).json()
    assert "The photo has several frames; only the first is read." in reply["cautions"]


@pytest.mark.parametrize(("bits", "colour_type"), [(16, RGBA), (16, RGB), (8, RGBA)])
def test_a_small_file_that_takes_long_to_decode_is_refused(
    bits: int, colour_type: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Image.Image, "load", lambda self: pytest.fail("decoded"))
    bytes_per_pixel = bits // 8 * {RGB: 3, RGBA: 4}[colour_type]
    side = 7_000
    with pytest.raises(InvalidUpload, match=rf"of {8 * bytes_per_pixel} bits, which take too long") as caught:
        decode(png((side, side), bits, colour_type, bytes(side)))
    assert caught.value.status == 413


def test_ordinary_photos_of_many_pixels_are_not_refused() -> None:
    side = 120
    for bits, colour_type in ((8, RGB), (16, RGBA)):
        rows = bytes(side * side * bits // 8 * {RGB: 3, RGBA: 4}[colour_type])
        assert decode(png((side, side), bits, colour_type, rows))[0].size == (side, side)
    deepest = uploads.MAX_DECODED // uploads.MAX_PIXELS
    assert deepest >= 3, "a JPEG of as many pixels as are allowed is decoded"


def test_nothing_is_decoded_before_its_size_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image.Image, "load", lambda self: pytest.fail("decoded"))
    with pytest.raises(InvalidUpload, match="megapixels"):
        decode(png_of_size(10_000, 10_000))


def test_the_least_recently_used_photo_is_evicted(state: AppState) -> None:
    models = state.models["quick"]
    each = next(iter(state.uploads.find("demo").pixels.values())).nbytes
    few = UploadStore(models, max_bytes=2 * each)
    first, second, third = (few.add(encoded("PNG", (60 + k, 50))).id for k in range(3))
    assert few.bytes == 2 * each
    with pytest.raises(UploadExpired):
        few.find(first)
    assert few.find(second).id == second
    few.add(encoded("PNG", (90, 50)))
    with pytest.raises(UploadExpired):
        few.find(third)  # the second was used since
    assert few.find("demo").id == "demo"


def test_an_id_cannot_be_computed_by_others(state: AppState) -> None:
    data = encoded("PNG")
    assert UploadStore(state.models["quick"]).add(data).id != UploadStore(state.models["quick"]).add(data).id
