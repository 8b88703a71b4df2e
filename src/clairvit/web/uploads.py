"""Photos: bytes from strangers, decoded by pillow under limits, kept as what the models see, forgotten in time."""

from __future__ import annotations

import hashlib
import io
import re
import secrets
import threading
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from PIL import Image, UnidentifiedImageError
from torch import Tensor

from clairvit.models.image_files import DEMO, open_image, read_image
from clairvit.models.images import prepare
from clairvit.models.model import Model

MOST_BYTES = 20 * 2**20
MOST_PIXELS = 50_000_000
# No EPS, which runs a program; no TIFF, where millions of tiles in a small file take minutes and gigabytes to list.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
KINDS = "JPEG, PNG, WebP, GIF or BMP"
KEPT_BYTES = 96 * 2**20
MOST_SCANS = 100  # of a JPEG; ten are usual, and each goes over the whole picture, in few bytes if it changes nothing
# Two files in one: what begins or ends as a page or a program is no photo that anybody meant to send.
_PAGE = re.compile(rb"<!doctype|<\?php|%PDF-|%%EOF|<(?:html|svg|script)[\s/>]", re.IGNORECASE)
_START, _END = 1024, 66_000  # bytes that are looked at


class InvalidUpload(Exception):
    """An upload that is refused, with the status that says why: 413 too large, 415 no photo, 422 a broken one."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class UploadExpired(Exception):
    """A photo that is not, or no longer, in memory."""


@dataclass(frozen=True, eq=False)
class Upload:
    """What each model sees of it. The file itself is not kept."""

    mark: str
    pixels: Mapping[str, Tensor]  # model name -> [1, 3, H, W], normalised

    @property
    def bytes(self) -> int:
        return sum(one.nbytes for one in self.pixels.values())


def decode(data: bytes) -> Image.Image:
    """An upright RGB image, or BadPhoto; nothing is decoded before its size is known."""
    if not data:
        raise InvalidUpload(422, f"The file is empty; expected a photo: {KINDS}.")
    if len(data) > MOST_BYTES:
        raise InvalidUpload(
            413, f"The file has {len(data):,} bytes; expected at most {MOST_BYTES:,}: send a smaller copy."
        )
    if _is_also_something_else(data):
        raise InvalidUpload(
            415, "The file is a page or an archive as well as an image; expected a photo and nothing else."
        )
    # Compressed data cannot hold this marker, so these are scans (and those of the thumbnail).
    if data.startswith(b"\xff\xd8") and data.count(b"\xff\xda") > MOST_SCANS:
        raise InvalidUpload(
            422, f"The JPEG has more than {MOST_SCANS} scans, which takes too long to read; save it again."
        )
    try:
        image = open_image(io.BytesIO(data), formats=FORMATS)
    except Image.DecompressionBombError as error:
        raise InvalidUpload(413, f"{_TOO_MANY} Send a smaller copy.") from error
    except UnidentifiedImageError as error:
        raise InvalidUpload(415, f"This is not a photo that can be read here; expected {KINDS}: convert it.") from error
    except Exception as error:  # pillow's parsers raise a dozen kinds on broken headers
        raise InvalidUpload(
            422, f"The photo is damaged ({_reason(error)}); expected a whole one: save it again."
        ) from error
    with image:
        if image.width * image.height > MOST_PIXELS:
            raise InvalidUpload(413, f"The photo has {image.width:,} × {image.height:,} pixels. {_TOO_MANY}")
        if not 1 / 100 <= image.width / max(1, image.height) <= 100:
            raise InvalidUpload(
                422, f"The photo is {image.width} × {image.height} pixels, too narrow to look at; crop it."
            )
        try:
            image.load()
            return read_image(image)
        except Exception as error:
            message = f"The photo is damaged ({_reason(error)}); expected a whole one: save or download it again."
            raise InvalidUpload(422, message) from error


_TOO_MANY = f"Photos of more than {MOST_PIXELS // 1_000_000} megapixels are not decoded."


def _reason(error: Exception) -> str:
    return str(error).splitlines()[0][:120] if str(error) else type(error).__name__


def _is_also_something_else(data: bytes) -> bool:
    """A page, a program or an archive."""
    return any(_PAGE.search(part) for part in (data[:_START], data[-_END:])) or zipfile.is_zipfile(io.BytesIO(data))


class UploadStore:
    """The photos in memory, the longest unused forgotten first; the demo always stays."""

    def __init__(self, models: Mapping[str, Model], most: int = KEPT_BYTES) -> None:
        self._models, self._most = models, most
        self._key = secrets.token_bytes(32)  # a mark says nothing to somebody who has the same photo
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, Upload] = OrderedDict()
        self._demo = self._seen(DEMO, read_image(DEMO))

    def add(self, data: bytes) -> Upload:
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

    def find(self, mark: str) -> Upload:
        if mark == DEMO:
            return self._demo
        with self._lock:
            if mark not in self._kept:
                raise UploadExpired("This photo is not (or no longer) in the server's memory; send the file again.")
            self._kept.move_to_end(mark)
            return self._kept[mark]

    @property
    def bytes(self) -> int:
        return sum(photo.bytes for photo in self._kept.values())

    def _seen(self, mark: str, image: Image.Image) -> Upload:
        return Upload(mark, {name: prepare([image], model).pixels for name, model in self._models.items()})
