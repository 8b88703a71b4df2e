"""PNG files of kinds that Pillow cannot write: any number of bits, with a transparent colour."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence

GREY, RGB, RGBA = 0, 2, 6  # colour types


def chunk(kind: bytes, content: bytes) -> bytes:
    """Return one chunk with its length and checksum."""
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png(size: tuple[int, int], bits: int, colour_type: int, rows: bytes, transparent: Sequence[int] = ()) -> bytes:
    """Return a PNG of (columns, rows) from its packed rows, one after the other, and its transparent colour."""
    columns, count = size
    header = struct.pack(">IIBBBBB", columns, count, bits, colour_type, 0, 0, 0)
    length = len(rows) // count
    lines = b"".join(b"\x00" + rows[start : start + length] for start in range(0, len(rows), length))
    clear = chunk(b"tRNS", struct.pack(f">{len(transparent)}H", *transparent)) if transparent else b""
    data = chunk(b"IDAT", zlib.compress(lines))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + clear + data + chunk(b"IEND", b"")
