"""Content hashes of images and models: results are stored and looked up by content, not by name."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from clairvit.errors import BadInput
from clairvit.models.image_files import EncodedImage
from clairvit.models.model import Model
from clairvit.models.preprocess import Preprocess
from clairvit.models.readout import unwrap_readout


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
    settings = (model.preprocess, model.labels, model.layout, model.activation)
    return digest(state_hash(model.module).encode(), repr(settings).encode())


_HASHES: weakref.WeakKeyDictionary[nn.Module, tuple[bytes, str]] = weakref.WeakKeyDictionary()


def state_hash(module: nn.Module) -> str:
    """Return a hash of the content of all parameters and buffers: names, dtypes, shapes and bytes.

    It is the same on every machine and device. A second call for the same module is cheap: the bytes are read again
    only if a tensor was replaced, changed in place, or differs in its sum or in a sample of its values. What reads
    another output of a module has the module's hash.
    """
    module = unwrap_readout(module)
    state = _state(module)
    check = _change_check(state)
    cached = _HASHES.get(module)
    if cached is not None and cached[0] == check:
        return cached[1]
    total = hashlib.blake2b(digest_size=16)
    for name, value in state:
        for content in _contents(name, value):
            total.update(f"{len(content)}:".encode())
            total.update(content)
    _HASHES[module] = check, total.hexdigest()
    return total.hexdigest()


def model_record(model: Model) -> dict[str, Any]:
    """Return what results store about a model in addition to its name, as JSON values."""
    return {
        "activation": model.activation,
        "weights_hash": state_hash(model.module),
        "preprocess": plain_preprocess(model.preprocess),
        "assumptions": list(model.assumptions),
    }


def plain_preprocess(preprocess: Preprocess) -> dict[str, Any]:
    """Return preprocessing as JSON values."""
    values: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(preprocess)))
    return values


def _state(module: nn.Module) -> list[tuple[str, Any]]:
    """Return parameters, buffers (also non-persistent ones) and other saved values, sorted by name."""
    state: dict[str, Any] = dict(module.state_dict())
    state |= dict(module.named_parameters(remove_duplicate=False))
    state |= dict(module.named_buffers(remove_duplicate=False))
    return sorted(state.items())


def _contents(name: str, value: Any) -> Iterator[bytes | memoryview]:
    """Yield a tensor's name, dtype, shape and bytes; for quantised weights, those of their components."""
    if isinstance(value, tuple | list):  # the packed weights of a dynamically quantised layer
        for index, part in enumerate(value):
            yield from _contents(f"{name}.{index}", part)
    elif not isinstance(value, Tensor):
        yield f"{name} {value!r}".encode()
    elif hasattr(value, "__tensor_flatten__"):  # a subclass that holds other tensors, such as torchao's
        inner, context = value.__tensor_flatten__()
        yield f"{name} {type(value).__name__} {context!r}".encode()
        for part in inner:
            yield from _contents(f"{name}.{part}", getattr(value, part))
    elif value.is_quantized:
        per_channel = value.qscheme() in (torch.per_channel_affine, torch.per_channel_symmetric)
        scale = (value.q_per_channel_scales().tolist() if per_channel else value.q_scale()) if value.numel() else None
        zero = (
            (value.q_per_channel_zero_points().tolist() if per_channel else value.q_zero_point())
            if value.numel()
            else None
        )
        yield f"{name} {value.qscheme()} {scale} {zero}".encode()
        yield from _contents(name, value.int_repr())
    else:
        plain = value.detach()
        dense = (plain.to_dense() if plain.layout != torch.strided else plain).cpu().resolve_conj().resolve_neg()
        yield f"{name} {dense.dtype} {tuple(dense.shape)}".encode()
        yield dense.contiguous().reshape(-1).view(torch.uint8).numpy().data


def _change_check(state: Sequence[tuple[str, Any]]) -> bytes:
    """Return a cheap digest that changes with the tensors: identity, version, sum and a sample of values of each."""
    parts: list[Any] = []
    numbers: list[Tensor] = []
    for name, value in state:
        if not isinstance(value, Tensor) or value.is_quantized or value.layout != torch.strided:
            parts.append((name, id(value), repr(value)))
            continue
        plain = value.detach()
        version = None if plain.is_inference() else value._version
        parts.append((name, plain.data_ptr(), version, plain.dtype, plain.shape, plain.device))
        if plain.numel():
            flat = (torch.view_as_real(plain) if plain.is_complex() else plain).reshape(-1)
            wide = flat if flat.dtype in (torch.float32, torch.float64) else flat.double()
            numbers += [wide.sum()[None].double(), wide[:: max(1, wide.numel() // 64)].double()]
    by_device: dict[torch.device, list[Tensor]] = {}
    for number in numbers:
        by_device.setdefault(number.device, []).append(number)
    values = [torch.cat(tensors).cpu().numpy().tobytes() for tensors in by_device.values()]  # one transfer per device
    return hashlib.blake2b(b"".join([repr(parts).encode(), *values]), digest_size=16).digest()
