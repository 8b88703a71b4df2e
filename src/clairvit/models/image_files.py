"""Image files: which files a path, folder or pattern stands for, and how any picture becomes upright 8-bit RGB."""

from __future__ import annotations

import glob
import importlib
import io
import math
import re
import struct
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from clairvit.errors import BadInput, ClairWarning, did_you_mean, install, user_stacklevel

_COMMON = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".jfif", ".avif")
SUFFIXES = (*_COMMON, ".heic", ".heif")
HEIF = "HEIF"  # Pillow's name of the format, once pillow-heif is registered
HEIC_BRANDS = (b"heic", b"heix", b"hevc", b"heim", b"heis", b"mif1", b"msf1")
DEMO = "demo"  # scikit-image's cat
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
    listed = [paths] if isinstance(paths, str | Path) else list(paths)
    return list(dict.fromkeys(image for path in listed for image in _expand(path)))


def as_path(text: str | Path) -> Path:
    """Return the path, ~ replaced; raise BadInput for what cannot be the name of a file."""
    try:
        path = Path(text).expanduser()
        path.exists()
    except (OSError, ValueError, RuntimeError) as error:  # too long, a loop of links, the home of an unknown user
        reason = getattr(error, "strerror", None) or error
        raise BadInput(f"'{str(text)[:80]}' is no path ({reason}); give the path of an image or a folder.") from error
    return path


def is_folder_or_pattern(text: str | Path) -> bool:
    """Return whether a path is a folder or a pattern, and not one file."""
    path = as_path(text)
    return path.is_dir() or (glob.has_magic(str(path)) and not path.exists())


def refuse_url(source: str | Path) -> None:
    """Raise BadInput for a URL: images are read from files only."""
    if isinstance(source, str) and _URL.match(source):
        raise BadInput(
            f"'{source}' is an address, and images are read from files only; download it first, then give the path of "
            "the file."
        )


def files_below(folder: Path, suffixes: Sequence[str] = SUFFIXES, *, deep: bool = True) -> list[Path]:
    """Return the files below a folder with one of the suffixes in natural order (cat2 before cat10).

    Names that begin with a dot are skipped (.ipynb_checkpoints, thumbnails, macOS resource forks). `deep=False` lists
    the folder itself only.
    """
    paths = (path for path in folder.glob("**/*" if deep else "*") if path.suffix.lower() in suffixes)
    visible = (path for path in paths if not _is_hidden(path.relative_to(folder)) and path.is_file())
    return sorted(visible, key=natural_order)


def folders_in(folder: Path) -> list[Path]:
    """Return the folders in a folder, sorted by name, without hidden ones."""
    return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def _expand(text: str | Path) -> list[Path]:
    """Return the images that one path, folder or pattern stands for."""
    refuse_url(text)
    path = as_path(text)
    if path.is_dir():
        return _images_below(path)
    if path.exists() or not glob.has_magic(str(path)):
        return [path]
    matches = sorted((Path(match) for match in glob.glob(str(path), recursive=True)), key=natural_order)
    images = [p for p in matches if p.suffix.lower() in SUFFIXES and not p.name.startswith(".") and p.is_file()]
    # a pattern may name folders ("pets/*"), but those inside a ** are in the list already
    folders = [p for p in matches if p.is_dir()] if "**" not in str(path) else []
    images += [p for folder in folders for p in files_below(folder)]
    if not images:
        raise BadInput(f"No image matches '{text}'; looked for files ending in {', '.join(SUFFIXES)}.")
    return images


def _images_below(folder: Path) -> list[Path]:
    images = files_below(folder)
    if not images:
        raise BadInput(
            f"There are no images in the folder '{folder}' or below; looked for files ending in {', '.join(SUFFIXES)}."
        )
    return images


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def natural_order(path: Path | str) -> list[tuple[int, int, str]]:
    """Return the sort key that puts cat2 before cat10."""
    parts = re.split(r"(\d+)", str(path).lower())
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts]


def open_image(source: Any, **options: Any) -> Image.Image:
    """Return Pillow's lazily opened image, without its warning about size.

    Pillow warns above 89 million pixels, which cameras of phones reach, and raises from twice as many on, which
    `read_image` turns into BadInput. `warnings.catch_warnings` would reset which warnings were already shown.
    """
    filters: list[Any] = warnings.filters  # type: ignore[assignment]
    ignore = ("ignore", None, Image.DecompressionBombWarning, None, 0)
    filters.insert(0, ignore)
    try:
        return Image.open(source, **options)
    except UnidentifiedImageError:
        if "formats" in options or not is_heic(_first_bytes(source)) or not register_heif():
            raise
        return Image.open(source)
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


def read_picture(source: Any, channels: int) -> Picture:
    """Return an upright picture with the channels that a model takes.

    Three channels are 8-bit RGB, one is 8-bit grey, made from any colour mode; any other number is an array [H, W, C]
    of uint8 or uint16, and nothing is converted: the file or array must have these channels.
    """
    if channels == 3:
        return read_image(source)
    if channels == 1:
        return read_image(source).convert("L")
    if isinstance(source, Image.Image):
        return _bands(np.asarray(upright(source, "the PIL image")), channels, "the PIL image")
    if isinstance(source, np.ndarray):
        return _bands(source, channels, "the image array")
    if isinstance(source, EncodedImage):
        return _bands(_read_bands(io.BytesIO(source.content), source.name), channels, f"'{source.name}'")
    if isinstance(source, str | Path) and str(source) != DEMO:
        refuse_url(source)
        check_file(as_path(source))
        return _bands(_read_bands(as_path(source), str(as_path(source))), channels, f"'{source}'")
    return _bands(np.asarray(read_image(source)), channels, f"{source!r}")


def picture_size(picture: Picture) -> tuple[int, int]:
    """Return (columns, rows), as PIL's `size`."""
    return picture.size if isinstance(picture, Image.Image) else (int(picture.shape[1]), int(picture.shape[0]))


def _read_bands(source: Path | io.BytesIO, name: str) -> NDArray[Any]:
    """Return the bands of a file, [H, W, C] or [C, H, W]: TIFF by tifffile, which reads any number of them."""
    if Path(name).suffix.lower() not in (".tif", ".tiff"):
        _decode(source, name)  # raise BadInput for what cannot be decoded
        with open_image(source) as image:
            return np.asarray(upright(image, f"'{name}'"))
    import tifffile

    try:
        bands = np.asarray(tifffile.imread(source))
        if bands.size == 0:
            raise ValueError("it has no pixels")
    except (tifffile.TiffFileError, ValueError, OSError, LookupError, struct.error) as error:
        raise BadInput(f"'{name}' is a damaged TIFF ({error}); expected a whole image: save it again.") from error
    return bands


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


def read_image(source: str | Path | Image.Image | NDArray[Any] | EncodedImage) -> Image.Image:
    """Return any picture as an upright 8-bit RGB image; transparency becomes white."""
    if isinstance(source, Image.Image):
        return _rgb(source, "the PIL image")
    if isinstance(source, EncodedImage):
        return _decode(io.BytesIO(source.content), source.name)
    if isinstance(source, np.ndarray):
        return _from_array(source)
    if not isinstance(source, str | Path):
        raise BadInput(
            f"An image was given as {type(source).__name__}; expected a path, a PIL image, a uint8 array [H, W, 3] or "
            "a preprocessed float tensor [3, H, W]."
        )
    refuse_url(source)
    path = as_path(source)
    if str(source) == DEMO and not path.exists():
        from skimage import data

        return Image.fromarray(data.chelsea())
    check_file(path)
    return _decode(path, str(path))


def _decode(source: Path | io.BytesIO, name: str) -> Image.Image:
    """Return the picture of a file, or of its bytes, as upright 8-bit RGB; raise BadInput if it cannot be decoded."""
    try:
        with open_image(source) as image:
            return _rgb(image, f"'{name}'")
    except BadInput:  # a ValueError too
        raise
    except Image.DecompressionBombError as error:
        raise BadInput(
            f"'{name}' is too large to decode safely ({error}); make a smaller copy first, for instance with "
            f"ImageMagick: convert '{Path(name).name}' -resize 2000x2000 small.png."
        ) from error
    except UnidentifiedImageError as error:
        if is_heic(_first_bytes(source)) and not register_heif():
            raise BadInput(
                f"'{name}' is a HEIC photo, and pillow-heif, which reads these, is not installed; type: "
                f"{install('heic')}, or export the photo as JPEG."
            ) from error
        raise BadInput(
            f"'{name}' is not an image, whatever its name says (it starts with {_first_bytes(source)!r}); expected "
            "JPEG, PNG, WebP, TIFF, GIF or BMP."
        ) from error
    except OSError as error:
        raise BadInput(f"'{name}' cannot be opened ({error.strerror or error}); give an image you may read.") from error
    except (ValueError, SyntaxError, TypeError, LookupError, ArithmeticError, struct.error) as error:  # by its header
        raise BadInput(f"'{name}' is damaged ({error}); expected a whole image: save or download it again.") from error


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
        near = did_you_mean(path.name, [p.name for p in folder.iterdir()]) if folder.is_dir() else ""
        missing = "" if folder.is_dir() else f" (there is no folder '{folder}')"
        kind = "image" if path.suffix else "image or folder"
        raise BadInput(
            f"There is no {kind} '{path}'{missing}.{near} Give the path of an image or of a folder with images, or "
            "'demo' for the built-in cat."
        )


def _first_bytes(source: Any) -> bytes:
    """Return the first 12 bytes of a path or of an open file, which is rewound."""
    if isinstance(source, str | Path):
        with Path(source).open("rb") as file:
            return file.read(12)
    source.seek(0)
    first: bytes = source.read(12)
    source.seek(0)
    return first


def _from_array(array: NDArray[Any]) -> Image.Image:
    """Return a uint8 array [H, W], [H, W, 1], [H, W, 3] or [H, W, 4] as an RGB image."""
    grey_or_colour = array.ndim == 2 or (array.ndim == 3 and array.shape[-1] in (1, 3, 4))
    if array.dtype != np.uint8 or not grey_or_colour or array.size == 0:
        raise BadInput(
            f"The image array has shape {list(array.shape)} and dtype {array.dtype}; expected uint8 [H, W, 3] or "
            f"[H, W]{_array_advice(array, grey_or_colour)}."
        )
    return _rgb(Image.fromarray(array[..., 0] if array.shape[-1] == 1 and array.ndim == 3 else array), "the array")


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


def _rgb(image: Image.Image, name: str) -> Image.Image:
    """Decode the image, turn it upright and convert it to 8-bit RGB."""
    if 0 in image.size:
        raise BadInput(f"{name} is {image.width} x {image.height} pixels; expected at least one pixel.")
    try:
        image.load()
        return _eight_bit_rgb(upright(image, name), name)
    except BadInput:
        raise
    except Exception as error:  # Pillow's decoders raise a dozen kinds on broken bytes
        raise BadInput(
            f"{name} is damaged or of a kind that cannot be read ({error}); expected a whole image: save or download "
            "it again."
        ) from error


def upright(image: Image.Image, name: str) -> Image.Image:
    """Return the image rotated or mirrored as its EXIF orientation says."""
    try:
        transpose = _UPRIGHT.get(image.getexif().get(ORIENTATION, 1))
    except (SyntaxError, struct.error, ValueError, TypeError) as error:
        warnings.warn(
            f"The EXIF data of {name} cannot be read ({error}); used as it is.",
            ClairWarning,
            stacklevel=user_stacklevel(),
        )
        transpose = None
    return image if transpose is None else image.transpose(transpose)


def _eight_bit_rgb(image: Image.Image, name: str) -> Image.Image:
    """Return an image of any colour mode as 8-bit RGB on white."""
    if image.mode == "RGB":
        return image.copy()
    if image.mode == "F" or image.mode.startswith("I"):  # 16- and 32-bit grey: convert() would clip, not scale
        return Image.fromarray(_eight_bit(np.asarray(image), image.mode, name)).convert("RGB")
    if "A" in image.mode or "a" in image.mode or "transparency" in image.info:
        picture = image.convert("RGBA")
        white = Image.new("RGBA", picture.size, "white")
        return Image.alpha_composite(white, picture).convert("RGB")
    return image.convert("RGB")


def _eight_bit(grey: NDArray[Any], mode: str, name: str) -> NDArray[np.uint8]:
    """Return grey values in 0..255, scaled from the range they are in: 0..1, 0..255, 0..65535, else min..max."""
    values = grey.astype(np.float64)
    if not np.isfinite(values).all():
        raise BadInput(f"{name} has NaN or infinite pixels; expected finite ones.")
    low, high = values.min(), values.max()
    if mode.startswith("I;16"):
        top = 65535.0
    elif low >= 0:
        top = next((t for t in (1.0, 255.0, 65535.0) if high <= t and (t > 1 or mode == "F")), high)
    else:
        values, top = values - low, (high - low) or 1.0
    return np.round(values * (255 / top)).astype(np.uint8)
