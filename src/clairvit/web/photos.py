"""Photos: bytes from strangers, decoded by pillow under limits, kept as what the models see, forgotten in time."""

from __future__ import annotations

import hashlib
import io
import secrets
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from PIL import Image, UnidentifiedImageError
from torch import Tensor

from clairvit.models.images import DEMO, prepare, read_image
from clairvit.models.model import Model

MOST_BYTES = 20 * 2**20
MOST_PIXELS = 50_000_000
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")  # decoders that are used at all; no EPS, which runs a program
KEPT_BYTES = 96 * 2**20
# Two files in one: what begins or ends as a page, a program or an archive is no photo that anybody meant to send.
_AT_START = (b"%PDF-", b"<!doctype", b"<html", b"<svg", b"<script", b"<?php")
_AT_END = (b"PK\x05\x06", b"<html", b"<svg", b"<script", b"<?php", b"%%eof")
_START, _END = 1024, 66_000  # bytes that are looked at


class BadPhoto(Exception):
    """An upload that is refused, with the status that says why: 413 too large, 415 no photo, 422 a broken one."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Forgotten(Exception):
    """A photo that is not, or no longer, in memory."""


@dataclass(frozen=True, eq=False)
class Photo:
    """What each model sees of it. The file itself is not kept."""

    mark: str
    pixels: Mapping[str, Tensor]  # model name -> [1, 3, H, W], normalised

    @property
    def bytes(self) -> int:
        return sum(one.nbytes for one in self.pixels.values())


def decode(data: bytes) -> Image.Image:
    """An upright RGB image, or BadPhoto; nothing is decoded before its size is known."""
    if not data:
        raise BadPhoto(422, "The file is empty; expected a photo: JPEG, PNG, WebP, GIF, BMP or TIFF.")
    if len(data) > MOST_BYTES:
        raise BadPhoto(413, f"The file has {len(data):,} bytes; expected at most {MOST_BYTES:,}: send a smaller copy.")
    if _is_also_something_else(data):
        raise BadPhoto(415, "The file is a page or an archive as well as an image; expected a photo and nothing else.")
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except Image.DecompressionBombError as error:
        raise BadPhoto(413, f"{_TOO_MANY} Send a smaller copy.") from error
    except UnidentifiedImageError as error:
        raise BadPhoto(
            415, "This is not a photo that can be read; expected JPEG, PNG, WebP, GIF, BMP or TIFF."
        ) from error
    except Exception as error:  # pillow's parsers raise a dozen kinds on broken headers
        raise BadPhoto(422, f"The photo is damaged ({_reason(error)}); expected a whole one: save it again.") from error
    with image:
        if image.width * image.height > MOST_PIXELS:
            raise BadPhoto(413, f"The photo has {image.width:,} × {image.height:,} pixels. {_TOO_MANY}")
        if not 1 / 100 <= image.width / max(1, image.height) <= 100:
            raise BadPhoto(422, f"The photo is {image.width} × {image.height} pixels, too narrow to look at; crop it.")
        try:
            image.load()
            return read_image(image)
        except Exception as error:
            message = f"The photo is damaged ({_reason(error)}); expected a whole one: save or download it again."
            raise BadPhoto(422, message) from error


_TOO_MANY = f"Photos of more than {MOST_PIXELS // 1_000_000} megapixels are not decoded."


def _reason(error: Exception) -> str:
    return str(error).splitlines()[0][:120] if str(error) else type(error).__name__


def _is_also_something_else(data: bytes) -> bool:
    start, end = data[:_START].lower(), data[-_END:]
    # An archive's end mark is exact; words are looked for in either case, and behind the picture's own beginning only.
    tail = end.lower() if len(data) > _END else data[16:].lower()
    return any(word in start for word in _AT_START) or any(
        (word in end) if word.startswith(b"PK") else (word in tail) for word in _AT_END
    )


class Photos:
    """The photos in memory, the longest unused forgotten first; the demo always stays."""

    def __init__(self, models: Mapping[str, Model], most: int = KEPT_BYTES) -> None:
        self._models, self._most = models, most
        self._key = secrets.token_bytes(32)  # a mark says nothing to somebody who has the same photo
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, Photo] = OrderedDict()
        self._demo = self._seen(DEMO, read_image(DEMO))

    def add(self, data: bytes) -> Photo:
        mark = hashlib.blake2b(data, key=self._key, digest_size=16).hexdigest()
        with self._lock:
            if mark in self._kept:
                self._kept.move_to_end(mark)
                return self._kept[mark]
        photo = self._seen(mark, decode(data))
        with self._lock:
            self._kept[mark] = photo
            while self.bytes > self._most and len(self._kept) > 1:
                self._kept.popitem(last=False)
        return photo

    def find(self, mark: str) -> Photo:
        if mark == DEMO:
            return self._demo
        with self._lock:
            if mark not in self._kept:
                raise Forgotten("This photo is not (or no longer) in the server's memory; send the file again.")
            self._kept.move_to_end(mark)
            return self._kept[mark]

    @property
    def bytes(self) -> int:
        return sum(photo.bytes for photo in self._kept.values())

    def _seen(self, mark: str, image: Image.Image) -> Photo:
        return Photo(mark, {name: prepare([image], model).pixels for name, model in self._models.items()})
