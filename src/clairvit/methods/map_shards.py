"""Map shards: the maps of many images in few NPZ files, in half precision, and the function that reads them.

A shard is one file, `maps-KEY.npz`, written atomically. It holds `index`, a JSON text with the images, targets and
methods of the shard, and for each method `METHOD/maps`, float16 [images, rows, columns] within −1..1, with
`METHOD/scale`, float32 [images], its largest magnitude: map = scale × maps. Raw maps may be as small as 1e-9, which
float16 has no number for; scaled ones lose 2⁻¹¹ of their largest value at most.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from clairvit._io import atomic_write
from clairvit.errors import BadInput

FORMAT = 1
SHARD_IMAGES = 1024  # images of one file


@dataclass(frozen=True, eq=False)
class StoredMaps:
    """The maps of one method that shards hold."""

    names: tuple[str, ...]  # of the images, in the order in which they were written
    targets: tuple[str, ...]
    maps: Tensor  # [N, rows, columns], float32


def write_shard(
    folder: str | Path,
    key: str,
    names: Sequence[str],
    targets: Sequence[str],
    maps: Mapping[str, Tensor],
) -> Path:
    """Write the maps of some images and return the file.

    Args:
        folder: Where shards lie; made if it is not there.
        key: The end of the file's name; a shard of the same key is replaced.
        names: The images.
        targets: What each map explains.
        maps: Method -> [images, rows, columns].
    """
    index = {"format": FORMAT, "images": list(names), "targets": list(targets), "methods": list(maps)}
    arrays: dict[str, NDArray[Any]] = {"index": np.frombuffer(json.dumps(index).encode(), dtype=np.uint8)}
    for method, values in maps.items():
        scaled, scale = _to_half(values)
        arrays |= {f"{method}/maps": scaled, f"{method}/scale": scale}
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **arrays)
    return atomic_write(Path(folder) / f"maps-{key}.npz", buffer.getbuffer())


def _to_half(values: Tensor) -> tuple[NDArray[np.float16], NDArray[np.float32]]:
    """Return maps divided by their largest magnitude as float16, and these magnitudes."""
    flat = values.detach().float().cpu()
    scale = flat.flatten(1).abs().amax(1)
    divisor = torch.where(scale > 0, scale, torch.ones_like(scale)).reshape(-1, *([1] * (flat.ndim - 1)))
    return (flat / divisor).numpy().astype(np.float16), scale.numpy()


def list_maps(folder: str | Path) -> dict[str, int]:
    """Return the methods whose maps a folder of shards holds, and of how many images."""
    counts: dict[str, int] = {}
    for file in _shards(folder):
        with _opened(file) as archive:
            index = _index(archive)
            for method in index["methods"]:
                counts[method] = counts.get(method, 0) + len(index["images"])
    return counts


def read_maps(folder: str | Path, method: str, names: Sequence[str] | None = None) -> StoredMaps:
    """Return the maps of a method from a folder of shards.

    Args:
        folder: Where `clairvit explain --keep-maps` or `write_shard` wrote them.
        method: As it was written: `list_maps` lists them.
        names: Images to read, in the order of the shards; None for all.

    Raises:
        BadInput: There are no shards, none of this method, an image is missing, or a shard is damaged.

    Example:
        >>> import torch
        >>> file = write_shard("maps", "0", ["a.jpg", "b.jpg"], ["cat", "dog"], {"ixg": torch.rand(2, 14, 14)})
        >>> read_maps("maps", "ixg", ["b.jpg"]).maps.shape
        torch.Size([1, 14, 14])
    """
    wanted = None if names is None else set(names)
    images: list[str] = []
    targets: list[str] = []
    maps: list[Tensor] = []
    for file in _shards(folder):
        with _opened(file) as archive:
            index = _index(archive)
            rows = [row for row, name in enumerate(index["images"]) if wanted is None or name in wanted]
            if method not in index["methods"] or not rows:
                continue
            scaled, scale = archive[f"{method}/maps"][rows], archive[f"{method}/scale"][rows]
            maps.append(torch.from_numpy(scaled.astype(np.float32) * scale.reshape(-1, *([1] * (scaled.ndim - 1)))))
            images += [index["images"][row] for row in rows]
            targets += [index["targets"][row] for row in rows]
    missing = sorted((wanted or set()) - set(images))
    if not maps or missing:
        lacking = f"no map of {method} for '{missing[0]}'" if missing else f"no maps of {method}"
        raise BadInput(f"The shards in '{folder}' hold {lacking}; they have: {', '.join(list_maps(folder))}.")
    if len({tuple(part.shape[1:]) for part in maps}) > 1:
        raise BadInput(f"The maps of {method} in '{folder}' have several sizes; read them by names of one size.")
    return StoredMaps(tuple(images), tuple(targets), torch.cat(maps))


def _shards(folder: str | Path) -> list[Path]:
    files = sorted(Path(folder).glob("maps-*.npz"))
    if not files:
        raise BadInput(f"There are no map shards in '{folder}'; expected files maps-….npz of `write_shard`.")
    return files


def _opened(file: Path) -> Any:
    try:
        return np.load(file, allow_pickle=False)
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise BadInput(f"The map shard '{file}' cannot be read ({error}); remove it and explain again.") from error


def _index(archive: Any) -> dict[str, Any]:
    index: dict[str, Any] = json.loads(bytes(archive["index"]))
    if index.get("format") != FORMAT:
        raise BadInput(f"A map shard has format {index.get('format')}; this version of ClairViT reads {FORMAT}.")
    return index


class MapShardWriter:
    """Collect maps image by image and write a shard whenever `size` images are together.

    Example:
        >>> import torch
        >>> writer = MapShardWriter("kept", size=2)
        >>> for name in ("a", "b", "c"):
        ...     writer.add(name, "cat", {"ixg": torch.rand(14, 14)})
        >>> [file.name for file in writer.close()]
        ['maps-00000.npz', 'maps-00001.npz']
    """

    def __init__(self, folder: str | Path, size: int = SHARD_IMAGES) -> None:
        self.folder, self.size = Path(folder), size
        self._rows: list[tuple[str, str, Mapping[str, Tensor]]] = []
        self._files: list[Path] = []

    def add(self, name: str, target: str, maps: Mapping[str, Tensor]) -> None:
        """Add the maps [rows, columns] of one image, by method; another set of methods or sizes begins a new shard."""
        shapes = {method: tuple(values.shape) for method, values in maps.items()}
        if self._rows and shapes != {method: tuple(values.shape) for method, values in self._rows[0][2].items()}:
            self._write()
        self._rows.append((name, target, {method: values.detach().float().cpu() for method, values in maps.items()}))
        if len(self._rows) >= self.size:
            self._write()

    def close(self) -> list[Path]:
        """Write what is left and return all files."""
        self._write()
        return self._files

    def _write(self) -> None:
        if self._rows:
            names, targets, maps = zip(*self._rows, strict=True)
            stacked = {method: torch.stack([of_image[method] for of_image in maps]) for method in maps[0]}
            self._files.append(write_shard(self.folder, f"{len(self._files):05}", names, targets, stacked))
            self._rows = []
