"""Image files: which files a path, folder or pattern stands for, and how any picture becomes upright 8-bit RGB."""

from __future__ import annotations

import glob
import importlib
import io
import math
import os
import re
import struct
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from clairvit.errors import BadInput, ClairWarning, did_you_mean, importing, install, user_stacklevel

_COMMON = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".jfif", ".avif")
SUFFIXES = (*_COMMON, ".heic", ".heif")
HEIF = "HEIF"  # Pillow's name of the format, once pillow-heif is registered
HEIC_BRANDS = (b"heic", b"heix", b"hevc", b"heim", b"heis", b"mif1", b"msf1")
DEMO = "demo"
DEMO_FILE = Path(__file__).with_name("demo.png")  # a cat, see NOTICE
# Decoders that run no program and open no other file: EPS runs Ghostscript, and IPTC, WMF, GRIB, … hand over to others.
FORMATS = (
    *("JPEG", "PNG", "WEBP", "TIFF", "GIF", "BMP", "PPM", "AVIF", "JPEG2000", HEIF, "ICO", "PSD", "DIB", "PCX", "SGI"),
    *("QOI", "SUN", "DDS", "ICNS", "FITS", "XBM", "XPM", "IM", "MSP", "SPIDER", "TGA"),
)
EPS = (b"%!PS", b"\xc5\xd0\xd3\xc6")  # how such files begin
PAGED = ("TIFF", "GIF", "WEBP", "PNG", "AVIF")  # not MPO: the other pictures of a phone's photo are depth and gain
DARK = 2**14  # largest value of 16-bit grey that cameras of 10, 12 and 14 bits stay below
ORIENTATION = 0x0112  # the EXIF tag
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_UPRIGHT_BANDS: Mapping[int, Callable[[NDArray[Any]], NDArray[Any]]] = {  # of arrays [H, W, C]
    2: lambda bands: bands[:, ::-1],
    3: lambda bands: bands[::-1, ::-1],
    4: lambda bands: bands[::-1],
    5: lambda bands: bands.swapaxes(0, 1),
    6: lambda bands: np.rot90(bands, -1),
    7: lambda bands: bands[::-1, ::-1].swapaxes(0, 1),
    8: np.rot90,
}
_METADATA = ("exif", "xmp", "XML:com.adobe.xmp", "Raw profile type exif")  # where Pillow looks for the orientation
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")  # two letters or more: C:// is a drive


@dataclass(frozen=True)
class EncodedImage:
    """The bytes of an image file that is no file of its own: a member of an archive, a cell of a table, an object."""

    name: str  # in messages
    content: bytes


def find_images(paths: str | Path | Sequence[str | Path]) -> list[Path]:
    """Return files as they are, the images below folders, and what patterns ("cats/*.jpg") match; each file once.

    A plain path is kept even if there is no file: `read_image` raises the error, and other images are not affected.
    """
    images: list[Path] = []
    for text in [paths] if isinstance(paths, str | Path) else paths:
        path = as_path(text)
        if path.is_dir():
            below = files_below(path)
            if not below:
                raise BadInput(
                    f"There are no images in the folder '{path}' or below; looked for files ending in "
                    f"{', '.join(SUFFIXES)}."
                )
        elif path.exists() or not glob.has_magic(str(path)):
            below = [path]
        else:
            matches = glob_files(str(path))
            named = [p for p in matches if p.suffix.lower() in SUFFIXES and not p.name.startswith(".")]
            below = [p for p in named if _may_be_image(p)]
            # a pattern may name folders ("pets/*"), but those inside a ** are in the list already
            folders = [p for p in matches if p.is_dir()] if "**" not in str(path) else []
            below += [p for folder in folders for p in files_below(folder)]
            if not below:
                raise BadInput(f"No image matches '{text}'; looked for files ending in {', '.join(SUFFIXES)}.")
        images += below
    return list(dict.fromkeys(images))


def as_path(text: str | Path) -> Path:
    """Return the path, ~ replaced; raise BadInput for a URL, and for what cannot be the name of a file."""
    if isinstance(text, str) and _URL.match(text):
        raise BadInput(
            f"'{text}' is an address, and images are read from files only; download it first, then give the path of "
            "the file."
        )
    if text == "":  # an unset variable of the shell; Path("") would be the current folder
        raise BadInput("The path is empty; expected that of an image or a folder, such as '.' for the current folder.")
    try:
        path = Path(text).expanduser()
        path.exists()
    except (OSError, ValueError, RuntimeError) as error:  # too long, a loop of links, the home of an unknown user
        reason = getattr(error, "strerror", None) or error
        raise BadInput(f"'{str(text)[:80]}' is no path ({reason}); give the path of an image or a folder.") from error
    return path


def files_below(folder: Path, suffixes: Sequence[str] = SUFFIXES, *, deep: bool = True) -> list[Path]:
    """Return the files below a folder with one of the suffixes in natural order (cat2 before cat10).

    Names that begin with a dot are skipped (.ipynb_checkpoints, thumbnails, macOS resource forks). Links to folders are
    followed, but not those to a folder that the link lies in. `deep=False` lists the folder itself only.

    Raises:
        BadInput: The folder cannot be read; for folders below it there is a warning.
    """
    taken = (path for path in walk_files(folder, deep=deep) if path.suffix.lower() in suffixes)
    return sorted((path for path in taken if _may_be_image(path)), key=natural_order)


def walk_files(folder: Path, *, deep: bool = True) -> Iterator[Path]:
    """Yield what is below a folder and no folder itself, in no particular order; hidden names are skipped."""
    for path, _, names in _walk(folder):
        yield from (path / name for name in names)
        if not deep:
            return


def _walk(
    folder: Path, around: frozenset[tuple[int, int]] = frozenset()
) -> Iterator[tuple[Path, list[str], list[str]]]:
    """Yield each folder from `folder` downwards with the visible names in it: of folders, and of all else.

    Links are followed; `around` are the folders on the way here, so that a link to one of them ends.
    """
    try:
        status = os.stat(folder)
        with os.scandir(folder) as listed:
            is_folder = {entry.name: _is_folder(entry) for entry in listed if not entry.name.startswith(".")}
    except OSError as error:
        if not around:
            raise BadInput(
                f"The folder '{folder}' cannot be read ({error.strerror}); give one you may read."
            ) from error
        message = f"The folder '{folder}' cannot be read ({error.strerror}); what is in it is left out."
        warnings.warn(message, ClairWarning, stacklevel=user_stacklevel())
        return
    identity = (status.st_dev, status.st_ino)
    if identity in around:
        return
    folders = [name for name, is_dir in is_folder.items() if is_dir]
    yield folder, folders, [name for name, is_dir in is_folder.items() if not is_dir]
    for name in folders:
        yield from _walk(folder / name, around | {identity})


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry is a folder or a link to one; False for what may not be looked at."""
    try:
        return entry.is_dir()
    except OSError:  # also of a link to itself
        return False


def folders_in(folder: Path) -> list[Path]:
    """Return the folders in a folder, sorted by name, without hidden ones; raise BadInput if it cannot be read."""
    _, names, _ = next(_walk(folder))
    return sorted(folder / name for name in names)


def _may_be_image(path: Path) -> bool:
    """Return whether a path is a file, or a link to nothing, which is reported when it is read; no pipe or device."""
    return os.path.isfile(path) or (os.path.islink(path) and not os.path.exists(path))


def glob_files(pattern: str) -> list[Path]:
    """Return what matches a pattern in natural order; ** ends at links that lead back to a folder around them."""
    stated = Path(pattern).parts
    parts = [part for part, before in zip(stated, (None, *stated), strict=False) if not part == before == "**"]
    deep = parts.index("**") if "**" in parts else None
    if deep is None:
        return sorted(map(Path, glob.glob(pattern)), key=natural_order)
    bases = [Path(*parts[:deep])] if deep else [Path()]
    if glob.has_magic(str(bases[0])):
        bases = [path for path in glob_files(str(bases[0])) if path.is_dir()]
    rest = parts[deep + 1 :] or ("*",)
    folders = (folder for base in bases if base.is_dir() for folder, *_ in _walk(base))
    matches = (path for folder in folders for path in glob_files(os.path.join(glob.escape(str(folder)), *rest)))
    return sorted(set(matches), key=natural_order)


def natural_order(path: Path | str) -> list[tuple[int, int, str]]:
    """Return the sort key that puts cat2 before cat10."""
    parts = re.split(r"(\d+)", str(path).lower())
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts]


def open_image(source: Any, formats: Sequence[str] | None = None) -> Image.Image:
    """Return Pillow's lazily opened image, without its warning about size; by content, whatever the file is called.

    `formats` are the decoders that may read it; None takes all that run no program, and registers that of HEIC.

    Pillow warns above 89 million pixels, which cameras of phones reach, and raises from twice as many on, which
    `read_image` turns into BadInput. `warnings.catch_warnings` would reset which warnings were already shown.
    """
    filters: list[Any] = warnings.filters  # type: ignore[assignment]
    ignore = ("ignore", None, Image.DecompressionBombWarning, None, 0)
    filters.insert(0, ignore)
    try:
        Image.init()
        readable = [name for name in (FORMATS if formats is None else formats) if name in Image.OPEN]
        return Image.open(source, formats=readable)
    except UnidentifiedImageError:
        if formats is not None or not is_heic(_first_bytes(source)) or not register_heif():
            raise
        return Image.open(source, formats=[*readable, HEIF])
    finally:
        filters.remove(ignore)


def is_heic(data: bytes) -> bool:
    """Return whether a file that begins with these bytes is a HEIC photo, as iPhones take them."""
    return data[4:8] == b"ftyp" and data[8:12] in HEIC_BRANDS


def register_heif() -> bool:
    """Let Pillow read HEIC photos by pillow-heif; return whether that is installed."""
    try:
        pillow_heif = importlib.import_module("pillow_heif")
    except ModuleNotFoundError as error:
        if error.name != "pillow_heif":
            raise  # installed, and broken
        return False
    pillow_heif.register_heif_opener()
    return True


Picture = Image.Image | NDArray[Any]  # RGB or grey; [H, W, C] of 8 or 16 bits for any other number of channels
Source = str | Path | Image.Image | NDArray[Any] | EncodedImage


class Reading(NamedTuple):
    """A picture, and what a user should know about how it was read."""

    picture: Picture
    notes: tuple[str, ...] = ()


def read_with_notes(source: Any, channels: int) -> Reading:
    """Return an upright picture with the channels that a model takes, and notes, which are warnings too.

    Three channels are 8-bit RGB, one is 8-bit grey, made from any colour mode; any other number is an array [H, W, C]
    of uint8 or uint16, and nothing is converted: the file or array must have these channels. A picture that was read
    can be read again: it has no orientation and no transparent colour any more.
    """
    if channels in (1, 3):
        image, notes = _read_rgb(source)
        for note in notes:
            warnings.warn(note, ClairWarning, stacklevel=user_stacklevel())
        return Reading(image.convert("L") if channels == 1 else image, notes)
    if isinstance(source, Image.Image):
        load_pixels(source)
        return Reading(_bands(np.asarray(upright(source, "the PIL image")), channels, "the PIL image"))
    if isinstance(source, np.ndarray):
        return Reading(_bands(source, channels, "the image array"))
    if isinstance(source, EncodedImage):
        return Reading(_read_bands(source, channels, f"'{source.name}'"))
    if isinstance(source, str | Path) and str(source) != DEMO:
        path = as_path(source)
        check_file(path)
        return Reading(_read_bands(path, channels, f"'{source}'"))
    return Reading(_bands(np.asarray(_read_rgb(source)[0]), channels, f"{source!r}"))


def read_picture(source: Any, channels: int) -> Picture:
    """Return the picture of `read_with_notes`; its notes are warnings."""
    return read_with_notes(source, channels).picture


def picture_size(picture: Picture) -> tuple[int, int]:
    """Return (columns, rows), as PIL's `size`."""
    return picture.size if isinstance(picture, Image.Image) else (int(picture.shape[1]), int(picture.shape[0]))


def _read_bands(source: Path | EncodedImage, channels: int, quoted: str) -> NDArray[Any]:
    """Return the bands of a file, upright, as [H, W, C]: TIFF by tifffile, which reads any number of them."""
    opened: Any = source
    name = str(source)
    if isinstance(source, EncodedImage):
        name, opened = source.name, io.BytesIO(source.content)
    if Path(name).suffix.lower() not in (".tif", ".tiff"):
        _read_rgb(source)  # raise BadInput for what cannot be decoded
        with open_image(opened) as image:
            load_pixels(image)
            return _bands(np.asarray(upright(image, quoted)), channels, quoted)
    with importing(f"The TIFF '{name}' of {channels} channels", extra="tiff", error=BadInput):
        import tifffile

    try:
        with tifffile.TiffFile(opened) as file:
            bands = np.asarray(file.asarray())
            tag = getattr(file.pages[0], "tags", {}).get(ORIENTATION) if file.pages else None
        if bands.size == 0:
            raise ValueError("it has no pixels")
    except (tifffile.TiffFileError, ValueError, OSError, LookupError, struct.error) as error:
        raise BadInput(f"'{name}' is a damaged TIFF ({error}); expected a whole image: save it again.") from error
    turn = _UPRIGHT_BANDS.get(1 if tag is None else tag.value)
    bands = _bands(bands, channels, quoted)
    return bands if turn is None else np.ascontiguousarray(turn(bands))


def _bands(array: NDArray[Any], channels: int, name: str) -> NDArray[Any]:
    """Return an array [H, W, C] of a picture's bands; raise BadInput for other shapes and types."""
    if array.ndim == 3 and array.shape[0] == channels != array.shape[-1]:
        array = np.moveaxis(array, 0, -1)  # stored band by band
    bands = array.shape[-1] if array.ndim == 3 else 1
    if array.ndim not in (2, 3) or bands != channels or array.size == 0:
        raise BadInput(
            f"{name} has {bands} channel{'' if bands == 1 else 's'} (shape {list(array.shape)}), and the model takes "
            f"{channels}; expected [H, W, {channels}]: a uint8 array, a TIFF of {channels} bands, or a preprocessed "
            f"float tensor [{channels}, H, W]."
        )
    if array.dtype not in (np.uint8, np.uint16):
        raise BadInput(
            f"{name} has values of type {array.dtype}; expected uint8 (0..255) or uint16 (0..65535), or a preprocessed "
            f"float tensor [{channels}, H, W]."
        )
    return array


def read_image(source: Source) -> Image.Image:
    """Return any picture as an upright 8-bit RGB image; transparency becomes white, notes are warnings."""
    picture = read_with_notes(source, 3).picture
    assert isinstance(picture, Image.Image)
    return picture


def _read_rgb(source: Source) -> tuple[Image.Image, tuple[str, ...]]:
    """Return any picture as an upright 8-bit RGB image, and notes; raise BadInput if it cannot be decoded."""
    if isinstance(source, Image.Image):
        return to_rgb(source, "the PIL image")
    if isinstance(source, np.ndarray):
        return _from_array(source)
    file: Path | io.BytesIO
    if isinstance(source, EncodedImage):
        file, name = io.BytesIO(source.content), source.name
    elif isinstance(source, str | Path):
        path = as_path(source)
        is_demo = str(source) == DEMO and not path.exists()
        file, name = (DEMO_FILE, DEMO) if is_demo else (path, str(path))
        if not is_demo:
            check_file(path)
    else:
        raise BadInput(
            f"An image was given as {type(source).__name__}; expected a path, a PIL image, a uint8 array [H, W, 3] or "
            "a preprocessed float tensor [3, H, W]."
        )
    try:
        with open_image(file) as image:
            return to_rgb(image, f"'{name}'")
    except BadInput:  # a ValueError too
        raise
    except Image.DecompressionBombError as error:
        raise BadInput(
            f"'{name}' is too large to decode safely ({error}); make a smaller copy first, for instance with "
            f"ImageMagick: convert '{Path(name).name}' -resize 2000x2000 small.png."
        ) from error
    except UnidentifiedImageError as error:
        raise _not_an_image(_first_bytes(file), name) from error
    except OSError as error:
        raise BadInput(f"'{name}' cannot be opened ({error.strerror or error}); give an image you may read.") from error
    except (ValueError, SyntaxError, TypeError, LookupError, ArithmeticError, struct.error) as error:  # by its header
        raise BadInput(f"'{name}' is damaged ({error}); expected a whole image: save or download it again.") from error


def _not_an_image(first: bytes, name: str) -> BadInput:
    """Return the error for a file that no decoder knows, by its first bytes."""
    if is_heic(first) and not register_heif():
        return BadInput(
            f"'{name}' is a HEIC photo, and pillow-heif, which reads these, is not installed; type: "
            f"{install('heic')}, or export the photo as JPEG."
        )
    if first.startswith(EPS):
        return BadInput(
            f"'{name}' is an EPS drawing, which only another program can draw; expected JPEG, PNG, WebP, TIFF, GIF or "
            "BMP: export it as PNG."
        )
    return BadInput(
        f"'{name}' is not an image, whatever its name says (it starts with {first!r}); expected JPEG, PNG, WebP, TIFF, "
        "GIF or BMP."
    )


def check_file(path: Path) -> None:
    """Raise BadInput for a path without a file, or of a folder; "demo" needs no file."""
    if str(path) == DEMO and not path.exists():
        return
    if path.is_dir():
        images = files_below(path)
        advice = f"give one file in it, such as '{images[0]}'" if images else "give the path of an image"
        raise BadInput(f"'{path}' is a folder where an image was expected; {advice}.")
    if not path.exists():
        folder = path.parent
        near = did_you_mean(path.name, _names_in(folder)) if folder.is_dir() else ""
        missing = "" if folder.is_dir() else f" (there is no folder '{folder}')"
        kind = "image" if path.suffix else "image or folder"
        raise BadInput(
            f"There is no {kind} '{path}'{missing}.{near} Give the path of an image or of a folder with images, or "
            "'demo' for the built-in cat."
        )


def _names_in(folder: Path) -> list[str]:
    """Return the names of the files and folders in a folder; none if it cannot be read."""
    with suppress(OSError):
        return [path.name for path in folder.iterdir()]
    return []


def _first_bytes(source: Any) -> bytes:
    """Return the first 12 bytes of a path or of an open file, which is rewound."""
    if isinstance(source, str | Path):
        with Path(source).open("rb") as file:
            return file.read(12)
    source.seek(0)
    first: bytes = source.read(12)
    source.seek(0)
    return first


def _from_array(array: NDArray[Any]) -> tuple[Image.Image, tuple[str, ...]]:
    """Return a uint8 array [H, W], [H, W, 1], [H, W, 3] or [H, W, 4] as an RGB image."""
    grey_or_colour = array.ndim == 2 or (array.ndim == 3 and array.shape[-1] in (1, 3, 4))
    if array.dtype != np.uint8 or not grey_or_colour or array.size == 0:
        raise BadInput(
            f"The image array has shape {list(array.shape)} and dtype {array.dtype}; expected uint8 [H, W, 3] or "
            f"[H, W]{_array_advice(array, grey_or_colour)}."
        )
    return to_rgb(Image.fromarray(array[..., 0] if array.shape[-1] == 1 and array.ndim == 3 else array), "the array")


def _array_advice(array: NDArray[Any], grey_or_colour: bool) -> str:
    """Return the expression that makes a picture of the array `a`, from its shape and range of values."""
    if array.size == 0:
        return ""
    if not grey_or_colour:
        first = array.ndim == 3 and array.shape[0] in (1, 3, 4)
        return ": move the channels last, a.transpose(1, 2, 0)" if first else ""
    if array.dtype.kind not in "biuf":
        return ", and these are no real numbers"
    low, high = float(array.min()), float(array.max())
    if array.dtype == np.bool_:
        return ": convert it, a.astype('uint8') * 255"
    if not (math.isfinite(low) and math.isfinite(high)):
        return " of finite numbers"
    if array.dtype.kind == "f" and low >= 0 and high <= 1:
        return ": multiply by 255 and convert, (a * 255).round().astype('uint8')"
    if low >= 0 and high <= 255:
        return ": convert it, a.round().astype('uint8')"
    if array.dtype == np.uint16:
        return ": scale and convert it, (a // 257).astype('uint8')"
    if array.dtype.kind == "f" and array.ndim == 3 and array.shape[-1] == 3 and max(-low, high) <= 50:
        return "; if it is normalised already, pass it as a tensor: torch.from_numpy(a).permute(2, 0, 1)"
    return f" with values in 0..255, and these are from {low:.4g} to {high:.4g}"


def to_rgb(image: Image.Image, name: str) -> tuple[Image.Image, tuple[str, ...]]:
    """Decode an image, turn it upright and convert it to 8-bit RGB; return it without metadata, and notes.

    `name` begins the sentences about it.
    """
    if 0 in image.size:
        raise BadInput(f"{name} is {image.width} x {image.height} pixels; expected at least one pixel.")
    if image.format == "EPS" and getattr(image, "tile", None):  # not decoded yet
        raise BadInput(f"{name} is an EPS drawing, which only another program can draw; export it as PNG.")
    notes: tuple[str, ...] = ()
    try:
        if image.format in PAGED and getattr(image, "is_animated", False) and image.tell() == 0:
            notes = (f"{name} has several {'pages' if image.format == 'TIFF' else 'frames'}; only the first is read.",)
        colour, white = _colour_and_white(image)  # before it is decoded: these ask the file
        load_pixels(image)
        rgb, value_notes = _eight_bit_rgb(upright(image, name), name, colour, white)
    except BadInput:
        raise
    except Exception as error:  # Pillow's decoders raise a dozen kinds on broken bytes
        raise BadInput(
            f"{name} is damaged or of a kind that cannot be read ({error}); expected a whole image: save or download "
            "it again."
        ) from error
    rgb.info = {}
    return rgb, (*notes, *value_notes)


def load_pixels(image: Image.Image) -> None:
    """Decode an opened image.

    Pillow maps uncompressed files into memory, and a TIFF that lies on its side with columns and rows exchanged, which
    scrambles it. Without a file name it reads the bytes.
    """
    is_turned = image.format == "TIFF" and getattr(image, "_tile_size", image.size) != image.size
    name = getattr(image, "filename", "")
    if not (is_turned and name):
        image.load()
        return
    image.filename = ""  # type: ignore[attr-defined]
    try:
        image.load()
    finally:
        image.filename = name  # type: ignore[attr-defined]


def _colour_and_white(image: Image.Image) -> tuple[Any, int | None]:
    """Return the transparent colour of a PNG, and the value of white in a TIFF; None where the file states none.

    The colour is the one of a PNG without alpha that is transparent (tRNS), as its decoded pixels have it. A picture
    that was opened and converted by the user has no format, and its colours are what they are.

    White is that of a TIFF of 9 to 15 bits that is decoded to 16: from its bits, or its highest value. The highest
    value is a statistic by the standard, so only that of a whole number of bits counts.
    """
    colour = image.info.get("transparency") if image.format == "PNG" and image.mode != "P" else None
    tile = getattr(image, "tile", None)
    if colour is not None and tile:
        raw_mode = str(tile[0][3])
        if raw_mode in ("L;2", "L;4"):  # grey is decoded to 0..255, and the colour is not
            colour = colour * 255 // (2 ** int(raw_mode[-1]) - 1)
        elif raw_mode == "RGB;16B":
            colour = tuple(value >> 8 for value in colour)

    white: int | None = None
    tags = getattr(image, "tag_v2", None)
    if tags is not None and image.mode.startswith("I;16"):
        bits, highest = (next(iter(np.atleast_1d(tags.get(tag, 0)).tolist()), 0) for tag in (258, 281))
        if 8 < bits < 16:
            white = int(2**bits - 1)
        elif highest in {2**count - 1 for count in range(9, 16)}:
            white = int(highest)
    return colour, white


def upright(image: Image.Image, name: str) -> Image.Image:
    """Return the image rotated or mirrored as its EXIF orientation says, and without it: a second time does nothing."""
    try:
        transpose = _UPRIGHT.get(image.getexif().get(ORIENTATION, 1))
    except (SyntaxError, struct.error, ValueError, TypeError) as error:
        warnings.warn(
            f"The EXIF data of {name} cannot be read ({error}); used as it is.",
            ClairWarning,
            stacklevel=user_stacklevel(),
        )
        transpose = None
    if transpose is None:
        return image
    turned = image.transpose(transpose)
    turned.info = {key: value for key, value in image.info.items() if key not in _METADATA}
    return turned


def _eight_bit_rgb(
    image: Image.Image, name: str, colour: Any, white: int | None
) -> tuple[Image.Image, tuple[str, ...]]:
    """Return an image of any colour mode as 8-bit RGB on white, and notes.

    Args:
        image: A decoded image.
        name: Begins the sentences about it.
        colour: The transparent colour of an image without alpha; None if all is opaque.
        white: The value of white in 16-bit grey, if the file states another than 65535.
    """
    notes: tuple[str, ...] = ()
    if image.mode == "F" or image.mode.startswith("I"):  # 16- and 32-bit grey: convert() would clip, not scale
        values, notes = _eight_bit(np.asarray(image), image.mode, name, white)
        rgb = Image.fromarray(values).convert("RGB")
    elif "A" in image.mode or "a" in image.mode or (image.mode == "P" and "transparency" in image.info):
        picture = (image.convert("LA") if image.mode == "La" else image).convert("RGBA")
        rgb = Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture).convert("RGB")
    else:
        rgb = image.copy() if image.mode == "RGB" else image.convert("RGB")
    if colour is not None:
        bands = (image.convert("L") if image.mode == "1" else image).split()
        levels = colour if isinstance(colour, tuple) else (colour,)
        is_clear = np.logical_and.reduce([np.asarray(band) == v for band, v in zip(bands, levels, strict=True)])
        rgb.paste((255, 255, 255), mask=Image.fromarray(is_clear))
    return rgb, notes


def _eight_bit(
    grey: NDArray[Any], mode: str, name: str, white: int | None
) -> tuple[NDArray[np.uint8], tuple[str, ...]]:
    """Return grey values in 0..255, scaled from the range they are in: 0..1, 0..255, 0..65535, else min..max."""
    if grey.dtype.kind == "u" and grey.itemsize == 2:  # of either order of bytes
        high = float(grey.max())
        top = 65535.0 if white is None else max(float(white), high)
        table = np.round(np.arange(65536) * (255 / top)).clip(0, 255).astype(np.uint8)  # small beside a large photo
        scaled: NDArray[np.uint8] = table[grey]
    else:
        values = grey.astype(np.float64)
        if not np.isfinite(values).all():
            raise BadInput(f"{name} has NaN or infinite pixels; expected finite ones.")
        low, high = values.min(), values.max()
        if low >= 0:
            top = next((t for t in (1.0, 255.0, 65535.0) if high <= t and (t > 1 or mode == "F")), high)
        else:
            values, top = values - low, (high - low) or 1.0
        scaled = np.round(values * (255 / top)).astype(np.uint8)
    notes = (_dark_note(name, int(high)),) if top == 65535 and 0 < high < DARK else ()
    return scaled, notes


def _dark_note(name: str, high: int) -> str:
    """Return the caution for grey that is far from white, as 12 bits in a 16-bit file are."""
    bits = next(bits for bits in (8, 10, 12, 14) if high < 2**bits)
    return (
        f"{name} is grey with no value above {high:,}, and white is 65,535, so it is very dark to the model; if it "
        f"holds {bits} bits, multiply its values by {2 ** (16 - bits)} first."
    )
