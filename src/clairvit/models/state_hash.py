"""Hashes of weights: the same content has the same hash, on every machine and device, and a change is seen at once."""

from __future__ import annotations

import hashlib
import warnings
import weakref
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from clairvit.errors import ClairWarning, user_stacklevel
from clairvit.models.readout import unwrap_readout
from clairvit.models.submodules import named_submodules

_HASHES: weakref.WeakKeyDictionary[nn.Module, tuple[Hashable, str]] = weakref.WeakKeyDictionary()
# The check of weights that a pass was seen to leave as they are: places and versions were compared after it
_UNTOUCHED: weakref.WeakKeyDictionary[nn.Module, Hashable] = weakref.WeakKeyDictionary()


def state_hash(module: nn.Module, check: Hashable = None) -> str:
    """Return a hash of the content of all parameters and buffers: names, dtypes, shapes and bytes.

    It is the same on every machine and device. A second call for the same module is cheap: the bytes are read again
    only if a tensor was replaced, changed in place, or differs in the sum, or in a sample, of its bits. What
    reads another output of a module has the module's hash. `check` is `weights_check(module)`, where it is known.
    """
    module = unwrap_readout(module)
    cached = _HASHES.get(module)
    if check is not None and cached is not None and cached[0] == check:
        return cached[1]
    state = _state(module)
    check = change_check(state)
    if cached is not None and cached[0] == check:
        return cached[1]
    total = hashlib.blake2b(digest_size=16)
    for name, value in state:
        for content in _contents(name, value):
            total.update(f"{len(content)}:".encode())
            total.update(content)
    _HASHES[module] = check, total.hexdigest()
    return total.hexdigest()


def weights_check(module: nn.Module) -> Hashable:
    """Return a value, cheap to compute, that changes with any parameter or buffer of a module or of what it reads."""
    return change_check(_state(unwrap_readout(module)))


@dataclass(eq=False, repr=False)
class WeightsHash:
    """The hash of a model's weights as they were when they were used, computed when it is first read.

    Until then the module is kept, with the check of its weights at that time. Weights that have changed since have no
    hash that could still be computed: it is then "", with a warning.

    Example:
        >>> WeightsHash("1a2b").value
        '1a2b'
    """

    _value: str | None
    _module: nn.Module | None = None
    _name: str = ""
    _check: Hashable = None

    @classmethod
    def of(cls, module: nn.Module, name: str, check: Hashable) -> WeightsHash:
        """Return the hash of a model's weights, whose `weights_check` was `check` when the pass began.

        It is known at once where they were hashed before, and computed at once where the pass itself changed them.
        """
        module = unwrap_readout(module)
        cached = _HASHES.get(module)
        if cached is not None and cached[0] == check:
            return cls(cached[1])
        if _UNTOUCHED.get(module) != check:
            if not isinstance(check, tuple) or _places_and_versions(_state(module)) != check[0]:
                return cls(state_hash(module))
            _UNTOUCHED[module] = check
        return cls(None, module, name, check)

    @property
    def value(self) -> str:
        """Return the hash; "" where the weights have changed before it was read."""
        module = self._module
        if self._value is None and module is not None:
            check = weights_check(module)
            self._value = state_hash(module, check) if check == self._check else ""
            self._module, self._check = None, None
            if not self._value:
                warnings.warn(
                    f"The weights of {self._name} have changed since they were explained, and their hash had not been "
                    "read by then, so that weights_hash is empty; read weights_hash, save or pickle the explanation "
                    "before the weights change.",
                    ClairWarning,
                    stacklevel=user_stacklevel(),
                )
        return self._value or ""

    def __eq__(self, other: object) -> bool:
        """Compare the weights, without a hash where they are those of one module at one time."""
        if not isinstance(other, WeightsHash):
            return NotImplemented
        if self is other or (
            self._module is not None and self._module is other._module and self._check == other._check
        ):
            return True
        return bool(self.value) and self.value == other.value

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"WeightsHash({self.value!r})"

    def __copy__(self) -> WeightsHash:
        return self

    def __deepcopy__(self, memo: object) -> WeightsHash:
        return self

    def __reduce__(self) -> tuple[type[WeightsHash], tuple[str]]:
        """Store the hash itself."""
        return WeightsHash, (self.value,)


def _state(module: nn.Module) -> list[tuple[str, Any]]:
    """Return parameters, buffers (also non-persistent ones) and other saved values, sorted by name."""
    tensors: dict[str, Any] = {}
    saves_more = False  # a state_dict may hold more than parameters and buffers: packed weights, hooks
    for prefix, part in named_submodules(module):
        for name, tensor in (*part._parameters.items(), *part._buffers.items()):
            if tensor is not None:
                tensors[f"{prefix}{name}"] = tensor
        kind, attributes = type(part), part.__dict__
        saves_more = (
            saves_more
            or kind._save_to_state_dict is not nn.Module._save_to_state_dict
            or kind.get_extra_state is not nn.Module.get_extra_state
            or kind.state_dict is not nn.Module.state_dict
            or bool(attributes.get("_state_dict_hooks") or attributes.get("_state_dict_pre_hooks"))
            or not attributes.keys().isdisjoint(("state_dict", "_save_to_state_dict", "get_extra_state"))
        )
    saved = module.state_dict() if saves_more else {}
    return sorted((saved | tensors).items())


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


def change_check(state: Sequence[tuple[str, Any]]) -> Hashable:
    """Return a value, cheap to compute, that changes with the tensors: identity, version and checksum of each."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for _, value in state:
        if isinstance(value, Tensor) and not value.is_quantized and value.layout == torch.strided and value.numel():
            by_device.setdefault(value.device, []).append(value.detach())
    sums = [checksums(tensors).cpu().numpy().tobytes() for tensors in by_device.values()]  # one transfer per device
    return _places_and_versions(state), tuple(sums)


def _places_and_versions(state: Sequence[tuple[str, Any]]) -> tuple[Hashable, ...]:
    """Return what tells each tensor from another one, and counts its changes in place; other values as text."""
    items: list[Hashable] = []
    for name, value in state:
        if not isinstance(value, Tensor) or value.is_quantized or value.layout != torch.strided:
            items.append((name, id(value), repr(value)))
        else:
            version = None if value.is_inference() else value._version
            items.append((name, value.data_ptr(), version, value.dtype, value.shape, value.device))
    return tuple(items)


_JOINED_BYTES = 2**25  # of tensors that are summed together where launching a kernel costs more than reading them
_SAMPLED = 64  # numbers of a tensor, or of several that are joined


def checksums(tensors: Sequence[Tensor]) -> Tensor:
    """Return sums of the bits of tensors of one device, and a sample of them, int64.

    Bits are summed as whole numbers of 8 bytes, which wrap around: exact in any order, as fast as memory, and another
    sum if one value changes. Values that changed places show in the sample. On a GPU tensors are joined first.
    """
    if tensors[0].is_cpu:
        arrays: list[Any] = []
        for tensor in tensors:
            common = tensor.dtype in (torch.float32, torch.float64) and tensor.is_contiguous()
            if common and tensor.nbytes % 8 == 0:  # without a copy
                words = tensor.numpy().reshape(-1).view(np.int64)
            else:
                words = _words(tensor).numpy()
            arrays += [words.sum()[None], words[:: max(1, len(words) // _SAMPLED)]]
        return torch.from_numpy(np.concatenate(arrays))
    joined = _joined_groups([_words(tensor) for tensor in tensors])
    return torch.cat([_sum_and_sample(group[0] if len(group) == 1 else torch.cat(group)) for group in joined])


def _sum_and_sample(words: Tensor) -> Tensor:
    """Return the sum of numbers, and about 64 of them."""
    return torch.cat([words.sum()[None], words[:: max(1, len(words) // _SAMPLED)]])


def _words(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor as whole numbers of 8 bytes, int64 [words], padded with zeros."""
    plain = tensor.detach()
    flat = (torch.view_as_real(plain) if plain.is_complex() else plain).contiguous().reshape(-1)
    data = flat.view(torch.uint8)
    if data.numel() % 8:
        data = torch.nn.functional.pad(data, (0, -data.numel() % 8))
    return (data if data.storage_offset() % 8 == 0 else data.clone()).view(torch.int64)  # they begin at such an address


def _joined_groups(parts: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return consecutive tensors in groups of at most `_JOINED_BYTES`, larger ones alone."""
    groups: list[list[Tensor]] = []
    size = 0
    for part in parts:
        if not groups or size + part.nbytes > _JOINED_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(part)
        size += part.nbytes
    return groups
