"""Which image files a list of files, folders and patterns stands for."""

from __future__ import annotations

import glob
import re
from collections.abc import Sequence
from pathlib import Path

from clairvit.errors import BadInput

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".jfif", ".avif")


_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")  # two letters or more: C:// is a drive


def find_images(paths: str | Path | Sequence[str | Path]) -> list[Path]:
    """Files as they are, folders with everything below them, patterns ("cats/*.jpg") expanded; each file once.

    A plain path is kept even when nothing is there: `read_image` will say so, and the other images get their turn.
    """
    given = [paths] if isinstance(paths, str | Path) else list(paths)
    found = [image for path in given for image in _expand(path)]
    return list(dict.fromkeys(found))


def as_path(given: str | Path) -> Path:
    """Return what was typed as a path, ~ replaced; refuse what no file can be called."""
    try:
        path = Path(given).expanduser()
        path.exists()
    except (OSError, ValueError, RuntimeError) as error:  # too long, a loop of links, the home of an unknown user
        reason = getattr(error, "strerror", None) or error
        raise BadInput(f"'{str(given)[:80]}' is no path ({reason}); give the path of an image or a folder.") from error
    return path


def stands_for_many(path: str | Path) -> bool:
    """Return whether a path is a folder or a pattern, and not one file."""
    place = as_path(path)
    return place.is_dir() or (glob.has_magic(str(place)) and not place.exists())


def refuse_url(source: str | Path) -> None:
    """Say that addresses are not fetched; as a path they would lose a slash and not be found."""
    if isinstance(source, str) and _URL.match(source):
        raise BadInput(
            f"'{source}' is an address, and images are read from files only; download it first, then give the path of "
            "the file."
        )


def files_below(folder: Path, suffixes: Sequence[str] = SUFFIXES, *, deep: bool = True) -> list[Path]:
    """Return the files below a folder with one of the suffixes, cat2 before cat10; what is hidden is skipped.

    Hidden are names that begin with a dot: .ipynb_checkpoints, thumbnails, the shadows that macOS leaves. `deep=False`
    lists the folder itself only.
    """
    inside = (path for path in folder.glob("**/*" if deep else "*") if path.suffix.lower() in suffixes)
    seen = (path for path in inside if not _is_hidden(path.relative_to(folder)) and path.is_file())
    return sorted(seen, key=_natural)


def folders_in(folder: Path) -> list[Path]:
    """Return the folders in a folder by name, without hidden ones."""
    return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def _expand(given: str | Path) -> list[Path]:
    refuse_url(given)
    path = as_path(given)
    if path.is_dir():
        return _inside(path)
    if path.exists() or not glob.has_magic(str(path)):
        return [path]
    matches = sorted((Path(match) for match in glob.glob(str(path), recursive=True)), key=_natural)
    images = [p for p in matches if p.suffix.lower() in SUFFIXES and not p.name.startswith(".") and p.is_file()]
    # a pattern may name folders ("pets/*"), but those inside a ** are in the list already
    folders = [p for p in matches if p.is_dir()] if "**" not in str(path) else []
    images += [p for folder in folders for p in files_below(folder)]
    if not images:
        raise BadInput(f"No image matches '{given}'; looked for files ending in {', '.join(SUFFIXES)}.")
    return images


def _inside(folder: Path) -> list[Path]:
    images = files_below(folder)
    if not images:
        raise BadInput(
            f"There are no images in the folder '{folder}' or below; looked for files ending in {', '.join(SUFFIXES)}."
        )
    return images


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _natural(path: Path) -> list[tuple[int, int, str]]:
    """cat2 before cat10."""
    parts = re.split(r"(\d+)", str(path).lower())
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts]
