"""Results of recent requests: files, checks and curves of a map that was shown are made without computing it again."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, replace

from torch import Tensor

from clairvit.methods.explanation import Explanation

CACHE_BYTES = 64 * 2**20


@dataclass(frozen=True)
class ResultKey:
    """What a map depends on; `targets` are class numbers as text, or what the client sent."""

    photo: str
    model: str
    method: str
    targets: tuple[str, ...]
    score: str | None
    seed: int
    readouts: tuple[str, ...] = ()  # targets that are no classes


@dataclass(frozen=True)
class CachedResult:
    """An explanation, and whether layers and heads were asked for: some methods have none."""

    explanation: Explanation
    layers: bool
    heads: bool


class ResultCache:
    """Explanations by what they depend on; the least recently used are evicted first."""

    def __init__(self, max_bytes: int = CACHE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._results: OrderedDict[ResultKey, CachedResult] = OrderedDict()

    def add(self, key: ResultKey, explanation: Explanation, layers: bool = False, heads: bool = False) -> None:
        """Store an explanation of one photo under its request, its classes, and each of its targets alone.

        `layers` and `heads` say whether they were asked for; a method that has none is not computed again for them.
        """
        entries = {key: explanation, **_by_classes(key, explanation)}
        if len(explanation) > 1:
            for row in range(len(explanation)):
                entries |= _by_classes(key, explanation[row])
        with self._lock:
            for entry_key, entry in entries.items():
                self._results[entry_key] = CachedResult(entry, layers, heads)
                self._results.move_to_end(entry_key)
            while self.bytes > self._max_bytes and len(self._results) > 1:
                self._results.popitem(last=False)

    def find(self, key: ResultKey, layers: bool = False, heads: bool = False) -> Explanation | None:
        """Return an explanation that has the layers and heads that are asked for, None if there is none."""
        with self._lock:
            result = self._results.get(key)
            if result is not None:
                self._results.move_to_end(key)
        if result is None:
            return None
        has_layers = result.layers or result.explanation.layers is not None
        has_heads = result.heads or result.explanation.heads is not None
        return result.explanation if has_layers >= layers and has_heads >= heads else None

    @property
    def bytes(self) -> int:
        """Return the memory of the arrays; rows of one explanation that share memory count once."""
        storages = {}
        for explanation in (result.explanation for result in self._results.values()):
            optional = (explanation.standard_error, explanation.chosen, explanation.layers)
            heads = None if explanation.heads is None else explanation.heads.maps
            for tensor in (explanation.maps, explanation.pixels, *optional, heads):
                if isinstance(tensor, Tensor):
                    storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return sum(storages.values())


def _by_classes(key: ResultKey, explanation: Explanation) -> dict[ResultKey, Explanation]:
    if None in explanation.classes:
        return {}
    return {replace(key, targets=tuple(str(index) for index in explanation.classes)): explanation}
