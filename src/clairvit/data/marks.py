"""Marks: hashes by which images and models are known again, whatever they are called."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from clairvit.errors import BadInput
from clairvit.models.model import Model


def digest(*parts: Any) -> str:
    """A hash of files (their bytes), pictures, arrays, tensors and text; text that is no file's name comes as bytes."""
    found = hashlib.blake2b(digest_size=16)
    for part in parts:
        content = _bytes(part)
        found.update(f"{len(content)}:".encode())
        found.update(content)
    return found.hexdigest()


def _bytes(part: Any) -> bytes:
    if isinstance(part, bytes):
        return part
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
    """Of all that decides what a model says: its tensors, its classes' names, its preprocessing, its activation."""
    state = model.module.state_dict()
    tensors = [part for name in sorted(state) for part in (f"{name} {state[name].dtype}".encode(), state[name])]
    return digest(*tensors, repr((model.preprocess, model.labels, model.layout, model.activation)).encode())
