"""Content hashes of images and models: results are stored and looked up by content, not by name."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from clairvit.errors import BadInput
from clairvit.models.image_files import EncodedImage
from clairvit.models.model import Model
from clairvit.models.state_hash import state_hash


def digest(*parts: Any) -> str:
    """Return a hash of files (their bytes), pictures, arrays, tensors, bytes and file names; other values by repr."""
    total = hashlib.blake2b(digest_size=16)
    for part in parts:
        content = _bytes(part)
        total.update(f"{len(content)}:".encode())
        total.update(content)
    return total.hexdigest()


def _bytes(part: Any) -> bytes:
    """Return the content of one part as bytes."""
    if isinstance(part, bytes):
        return part
    if isinstance(part, EncodedImage):  # as the file with these bytes
        return part.content
    if isinstance(part, Path) or (isinstance(part, str) and os.path.isfile(part)):  # False for a name that is too long
        try:
            return Path(part).read_bytes()
        except OSError as error:
            raise BadInput(f"'{part}' cannot be read ({error.strerror}); expected a file.") from error
    if isinstance(part, Tensor):
        part = part.detach().cpu()
        part = (part.float() if part.dtype == torch.bfloat16 else part).numpy()  # numpy has no bfloat16
    if isinstance(part, Image.Image):
        part = np.asarray(part)
    if isinstance(part, np.ndarray):
        return repr((part.shape, part.dtype.str)).encode() + np.ascontiguousarray(part).tobytes()
    return repr(part).encode()


def weights_hash(model: Model) -> str:
    """Return a hash of all that determines a model's scores: tensors, labels, preprocessing, layout, activation."""
    preprocess = dataclasses.replace(model.preprocess, display=None)  # which channels are shown changes no score
    settings = (preprocess, model.labels, model.layout, model.activation)
    return digest(state_hash(model.module).encode(), repr(settings).encode())


def model_record(model: Model) -> dict[str, Any]:
    """Return what results store about a model in addition to its name, as JSON values."""
    return {
        "activation": model.activation,
        "weights_hash": state_hash(model.module),
        "preprocess": model.preprocess.to_dict(),
        "assumptions": list(model.assumptions),
    }
