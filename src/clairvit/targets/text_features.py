"""Files of text embeddings: prompts of a text tower that is not at hand, by name."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clairvit.errors import BadInput, UnknownName, did_you_mean
from clairvit.targets.embedding import Embeddings
from clairvit.targets.text import NEUTRAL, Text

SUFFIXES = (".safetensors", ".npz")
MOST_LISTED = 10


def text_features(
    path: str | PathLike[str], names: Sequence[str] | None = None, *, against: str | Sequence[str] | None = NEUTRAL
) -> list[Text]:
    """Return targets of texts whose embeddings are in a file, each compared with the mean of the file's other texts.

    Args:
        path: A .safetensors or .npz file with one vector [d] per text under the text's name; or with a single table
            [n, d], whose n names are a JSON list under "names" in the header (.safetensors) or an array "names" (.npz).
        names: The texts that are wanted, in this order; None is all of them.
        against: "neutral": the mean cosine of the other texts of the file is subtracted; a list: that of these texts
            of the file; None or []: nothing is.

    Returns:
        A `cv.Text` per name.

    Raises:
        BadInput: A file that cannot be read, or holds anything else.
        UnknownName: The file has no such text.

    Example:
        >>> import clairvit as cv, numpy as np
        >>> np.savez("texts.npz", cat=[0.6, 0.8], dog=[1.0, 0.0])
        >>> cv.targets.text_features("texts.npz", ["cat"])
        [Text(prompt='cat', against=1 embedding of 2 numbers, score='cosine')]
    """
    vectors = read_text_features(Path(path).expanduser())
    listed = list(vectors) if names is None else list(names)
    chosen = [against] if isinstance(against, str) and against != NEUTRAL else against
    for name in (*listed, *(chosen if isinstance(chosen, list | tuple) else ())):
        if name not in vectors:
            known = ", ".join(list(vectors)[:MOST_LISTED]) + (", …" if len(vectors) > MOST_LISTED else "")
            near = did_you_mean(name, list(vectors))
            raise UnknownName(f"'{Path(path).name}' has no text '{name}'.{near} It has: {known}.")
    targets = []
    for name in listed:
        others = [other for other in vectors if other != name] if chosen == NEUTRAL else list(chosen or ())
        rest: Any = torch.stack([vectors[other] for other in others]) if others else chosen
        # "neutral" without other texts: Text says that there was nothing to compare with
        targets.append(Text(name, embedding=vectors[name], against=rest))
    return targets


def read_text_features(path: Path) -> dict[str, Tensor]:
    """Return the embeddings [d] of a file by the names of the texts, in the file's order."""
    if path.suffix not in SUFFIXES or not path.is_file():
        problem = "is not there" if path.suffix in SUFFIXES else "is no such file"
        raise BadInput(f"The file of text embeddings '{path}' {problem}; expected {' or '.join(SUFFIXES)}.")
    try:
        tensors, names = _read_safetensors(path) if path.suffix == ".safetensors" else _read_npz(path)
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise BadInput(f"The file of text embeddings '{path}' cannot be read ({error}).") from error
    if names is not None and len(tensors) == 1:
        (table,) = tensors.values()
        if table.ndim != 2 or len(table) != len(names) or len(set(names)) != len(names):
            raise BadInput(
                f"'{path.name}' has {len(names)} names for a table of shape {list(table.shape)}; expected a different "
                "name for each row."
            )
        tensors = dict(zip(names, table, strict=True))
    odd = next((name for name, tensor in tensors.items() if tensor.ndim != 1), None)
    if odd is not None:
        raise BadInput(
            f"'{odd}' in '{path.name}' has shape {list(tensors[odd].shape)}; expected one vector [d] per text, or a "
            'single table [n, d] with "names".'
        )
    if len({len(tensor) for tensor in tensors.values()}) != 1:
        raise BadInput(f"'{path.name}' holds no vectors of one length; expected embeddings of one text tower.")
    return {name: Embeddings.of(tensor, f"'{name}' in '{path.name}'").values[0] for name, tensor in tensors.items()}


def _read_safetensors(path: Path) -> tuple[dict[str, Tensor], list[str] | None]:
    """Return tensors by name, and the names of a table's rows in the header."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - no mapping
            header: Mapping[str, str] = file.metadata() or {}
    except SafetensorError as error:
        raise ValueError(str(error)) from error
    names = json.loads(header["names"]) if "names" in header else None
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise ValueError('"names" in its header is no JSON list of strings')
    return tensors, names


def _read_npz(path: Path) -> tuple[dict[str, Tensor], list[str] | None]:
    """Return arrays by name, and the names of a table's rows in the array "names"."""
    with np.load(path, allow_pickle=False) as file:
        arrays = {key: file[key] for key in file.files}
    names = arrays.pop("names").tolist() if "names" in arrays and arrays["names"].dtype.kind == "U" else None
    wrong = next((key for key, array in arrays.items() if array.dtype.kind not in "fiu"), None)
    if wrong is not None:
        raise ValueError(f"'{wrong}' holds no numbers")
    return {key: torch.from_numpy(array) for key, array in arrays.items()}, names
