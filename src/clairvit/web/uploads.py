"""Uploads: decode untrusted photos under limits, and cache the preprocessed pixels in memory."""

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

from PIL import Image, ImageStat, UnidentifiedImageError
from torch import Tensor

from clairvit.models.image_files import DEMO, HEIF, is_heic, open_image, read_image, register_heif, to_rgb
from clairvit.models.images import prepare
from clairvit.models.model import Model

MAX_BYTES = 20 * 2**20
MAX_PIXELS = 50_000_000
MAX_DECODED = 3 * MAX_PIXELS  # bytes of a decoded PNG: a small file may hold 16 bits of four channels
# No EPS, which runs a program; no TIFF, where millions of tiles in a small file take minutes and gigabytes to list.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
KINDS = "JPEG, PNG, WebP, GIF or BMP"
CACHE_BYTES = 96 * 2**20
TINY = 64  # pixels of the shorter side
FLAT = 6.0  # standard deviation of every channel, of 255
MAX_SCANS = 100  # of a JPEG; ten are usual, and a scan of a few bytes can cover the whole picture
# Polyglot files: bytes that begin or end as a page or a program are refused.
_PAGE = re.compile(rb"<!doctype|<\?php|%PDF-|%%EOF|<(?:html|svg|script)[\s/>]", re.IGNORECASE)
_HEIC = (
    f"This is an iPhone photo (HEIC), which cannot be read here; expected {KINDS}. Share or export it as JPEG, or set "
    "the camera to 'Most Compatible'."
)
_DAMAGED = "The photo is damaged; expected a whole one: save or download it again."  # without Pillow's words for it
_START, _END = 1024, 66_000  # bytes that are searched


class InvalidUpload(Exception):
    """An upload that is refused, with the status that says why: 413 too large, 415 no photo, 422 a broken one."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class UploadExpired(Exception):
    """The photo is not, or no longer, in memory."""


@dataclass(frozen=True, eq=False)
class Upload:
    """The input of each model. The file itself is not kept."""

    id: str
    pixels: Mapping[str, Tensor]  # model name -> [1, 3, H, W], normalised
    cautions: tuple[str, ...] = ()  # why the answer may mean little

    @property
    def bytes(self) -> int:
        """Return the memory of the pixels."""
        return sum(pixels.nbytes for pixels in self.pixels.values())


def decode(data: bytes) -> tuple[Image.Image, tuple[str, ...]]:
    """Return an upright RGB image and notes, or raise InvalidUpload; nothing is decoded before its size is known."""
    if not data:
        raise InvalidUpload(422, f"The file is empty; expected a photo: {KINDS}.")
    if len(data) > MAX_BYTES:
        raise InvalidUpload(
            413, f"The file has {len(data):,} bytes; expected at most {MAX_BYTES:,}: send a smaller copy."
        )
    if _is_polyglot(data):
        raise InvalidUpload(
            415, "The file is a page or an archive as well as an image; expected a photo and nothing else."
        )
    # Compressed data cannot hold this marker, so these are scans (and those of the thumbnail).
    if data.startswith(b"\xff\xd8") and data.count(b"\xff\xda") > MAX_SCANS:
        raise InvalidUpload(
            422, f"The JPEG has more than {MAX_SCANS} scans, which takes too long to read; save it again."
        )
    try:
        formats = (HEIF,) if is_heic(data) and register_heif() else FORMATS
        image = open_image(io.BytesIO(data), formats=formats)
    except Image.DecompressionBombError as error:
        raise InvalidUpload(413, f"{_TOO_MANY_PIXELS} Send a smaller copy.") from error
    except UnidentifiedImageError as error:
        if is_heic(data) and not register_heif():
            raise InvalidUpload(415, _HEIC) from error
        raise InvalidUpload(415, f"This is not a photo that can be read here; expected {KINDS}: convert it.") from error
    except Exception as error:  # Pillow raises many kinds of errors on broken headers
        raise InvalidUpload(422, _DAMAGED) from error
    with image:
        if image.width * image.height > MAX_PIXELS:
            raise InvalidUpload(413, f"The photo has {image.width:,} × {image.height:,} pixels. {_TOO_MANY_PIXELS}")
        if image.width * image.height * _bytes_per_pixel(data) > MAX_DECODED:
            raise InvalidUpload(
                413,
                f"The photo has {image.width:,} × {image.height:,} pixels of {8 * _bytes_per_pixel(data)} bits, which "
                "take too long to read; send a smaller copy, or a JPEG.",
            )
        if not 1 / 100 <= image.width / max(1, image.height) <= 100:
            raise InvalidUpload(
                422, f"The photo is {image.width} × {image.height} pixels, too narrow to show; crop it."
            )
        try:
            return to_rgb(image, "The photo")
        except Exception as error:  # Pillow's decoders raise many kinds of errors on broken bytes
            raise InvalidUpload(422, _DAMAGED) from error


def _bytes_per_pixel(data: bytes) -> int:
    """Return the bytes that a decoded pixel of a PNG takes, by its header; 3 for other formats."""
    if not data.startswith(b"\x89PNG") or len(data) < 26:
        return 3
    bits, kind = data[24], data[25]
    return max(1, bits // 8) * {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}.get(kind, 4)


def photo_cautions(image: Image.Image) -> tuple[str, ...]:
    """Return why the answer to a photo may mean little: it is tiny, or nearly of one colour."""
    cautions = []
    if min(image.size) < TINY:
        cautions.append(f"The photo has only {image.width} × {image.height} pixels, too few to show much.")
    if max(ImageStat.Stat(image.resize((64, 64))).stddev) < FLAT:
        cautions.append("The photo is nearly of one colour: there is little in it that an answer could be about.")
    return tuple(cautions)


_TOO_MANY_PIXELS = f"Photos of more than {MAX_PIXELS // 1_000_000} megapixels are not decoded."


def _is_polyglot(data: bytes) -> bool:
    """Return whether the bytes are also a page, a program or an archive."""
    return any(_PAGE.search(part) for part in (data[:_START], data[-_END:])) or zipfile.is_zipfile(io.BytesIO(data))


class UploadStore:
    """A cache of preprocessed photos; the least recently used is evicted first, the demo never."""

    def __init__(self, models: Mapping[str, Model], max_bytes: int = CACHE_BYTES) -> None:
        self._models, self._max_bytes = models, max_bytes
        self._key = secrets.token_bytes(32)  # ids are keyed hashes: nobody can compute the id of a known photo
        self._lock = threading.Lock()
        self._cache: OrderedDict[str, Upload] = OrderedDict()
        self._demo = self._preprocess(DEMO, read_image(DEMO))

    def add(self, data: bytes) -> Upload:
        """Decode, preprocess and store a photo; raise InvalidUpload."""
        photo_id = hashlib.blake2b(data, key=self._key, digest_size=16).hexdigest()
        with self._lock:
            if photo_id in self._cache:
                self._cache.move_to_end(photo_id)
                return self._cache[photo_id]
        photo = self._preprocess(photo_id, *decode(data))
        with self._lock:
            self._cache[photo_id] = photo
            while self.bytes > self._max_bytes and len(self._cache) > 1:
                self._cache.popitem(last=False)
        return photo

    def find(self, photo_id: str) -> Upload:
        """Return a photo by its id; raise UploadExpired."""
        if photo_id == DEMO:
            return self._demo
        with self._lock:
            if photo_id not in self._cache:
                raise UploadExpired("This photo is not (or no longer) in the server's memory; send the file again.")
            self._cache.move_to_end(photo_id)
            return self._cache[photo_id]

    @property
    def bytes(self) -> int:
        """Return the memory of all photos but the demo."""
        return sum(photo.bytes for photo in self._cache.values())

    def _preprocess(self, photo_id: str, image: Image.Image, notes: tuple[str, ...] = ()) -> Upload:
        pixels = {name: prepare([image], model).pixels for name, model in self._models.items()}
        return Upload(photo_id, pixels, (*notes, *photo_cautions(image)))
