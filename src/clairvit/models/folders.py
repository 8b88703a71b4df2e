"""Which image files a list of files, folders and patterns stands for."""

from __future__ import annotations

import glob
import re
from collections.abc import Sequence
from pathlib import Path

from clairvit.errors import BadInput

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".jfif", ".avif")


def find_images(paths: str | Path | Sequence[str | Path]) -> list[Path]:
    """Files as they are, folders with everything below them, patterns ("cats/*.jpg") expanded; each file once.

    A plain path is kept even when nothing is there: `read_image` will say so, and the other images get their turn.
    """
    given = [paths] if isinstance(paths, str | Path) else list(paths)
    found = [image for path in given for image in _expand(path)]
    return list(dict.fromkeys(found))


def _expand(given: str | Path) -> list[Path]:
    path = Path(given).expanduser()
    if path.is_dir():
        return _inside(path)
    if path.exists() or not glob.has_magic(str(path)):
        return [path]
    matches = sorted((Path(match) for match in glob.glob(str(path), recursive=True)), key=_natural)
    images = [p for p in matches if p.is_file() and _is_image(p)]
    # a pattern may name folders ("pets/*"), but those inside a ** are in the list already
    folders = [p for p in matches if p.is_dir()] if "**" not in str(path) else []
    images += [p for folder in folders for p in sorted(folder.rglob("*"), key=_natural) if _is_image(p)]
    if not images:
        raise BadInput(f"No image matches '{given}'; looked for files ending in {', '.join(SUFFIXES)}.")
    return images


def _inside(folder: Path) -> list[Path]:
    images = sorted((p for p in folder.rglob("*") if _is_image(p)), key=_natural)
    if not images:
        raise BadInput(
            f"There are no images in the folder '{folder}' or below; looked for files ending in {', '.join(SUFFIXES)}."
        )
    return images


def _is_image(path: Path) -> bool:
    """By suffix; hidden files are mostly the shadows that macOS leaves next to images."""
    return path.suffix.lower() in SUFFIXES and not path.name.startswith(".") and path.is_file()


def _natural(path: Path) -> list[tuple[int, int, str]]:
    """cat2 before cat10."""
    parts = re.split(r"(\d+)", str(path).lower())
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in parts]
