"""Batch: many variants in few passes. Out of memory halves the batch, and it grows back when things go well.

with pace(batch_size=64, autocast="bfloat16"):       # what cv.explain(…, batch_size=, autocast=) sets
    for ks, made in in_batches(1000, Room(50_000), each=197, run=run): …
"""

from __future__ import annotations

import gc
import numbers
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeVar

import torch

from clairvit.errors import BadInput

Made = TypeVar("Made")
PRECISIONS = {"bfloat16": torch.bfloat16, "float16": torch.float16}
PRECISIONS |= {"bf16": torch.bfloat16, "fp16": torch.float16}
_NO_MEMORY = (  # Linux, elsewhere, Apple's GPUs, and a CUDA library that asks for its own
    *("can't allocate memory", "not enough memory", "out of memory"),
    *("CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED"),
)
_DEVICES = ("cpu", "cuda", "mps")
GROWS_AFTER = 8  # passes that went well before a halved batch is doubled again


@dataclass(frozen=True)
class ExecutionOptions:
    """How variants are run: how many images in one pass (None: as many as keep the device busy), how precisely."""

    batch_size: int | None = None
    autocast: str | None = None
    outside: tuple[tuple[str, torch.dtype], ...] = ()  # the autocast that the caller was in, by device

    def precision(self, device: torch.device) -> AbstractContextManager[object]:
        """For passes of the model; the caller's own autocast stays where none was asked for."""
        if self.autocast is not None:
            return torch.autocast(device.type, PRECISIONS[self.autocast])
        outside = dict(self.outside).get(device.type)
        return nullcontext() if outside is None else torch.autocast(device.type, outside)


_AS_FITS = ExecutionOptions()
_pace: ContextVar[ExecutionOptions] = ContextVar("pace", default=_AS_FITS)


def check_pace(batch_size: int | None, autocast: str | None) -> None:
    whole = isinstance(batch_size, numbers.Integral) and not isinstance(batch_size, bool)
    if batch_size is not None and (not whole or batch_size < 1):
        raise BadInput(f"batch_size={batch_size!r} was given; expected 1 or more images in one pass, such as 64.")
    if autocast is not None and not (isinstance(autocast, str) and autocast in PRECISIONS):
        raise BadInput(f"autocast={autocast!r} was given; expected {' or '.join(PRECISIONS)}, or None for none.")


@contextmanager
def execution_options(batch_size: int | None = None, autocast: str | None = None) -> Iterator[None]:
    """Inside the block variants are run so; what is None stays as it was.

    Methods do their own arithmetic without autocast, so that the caller's is noted here, for the passes.
    """
    check_pace(batch_size, autocast)
    outer = _pace.get()
    outside = tuple((kind, torch.get_autocast_dtype(kind)) for kind in _DEVICES if torch.is_autocast_enabled(kind))
    before = _pace.set(
        ExecutionOptions(batch_size or outer.batch_size, autocast or outer.autocast, outside or outer.outside)
    )
    try:
        yield
    finally:
        _pace.reset(before)


def current_pace() -> ExecutionOptions:
    return _pace.get()


class BatchBudget:
    """How much goes into one pass, in tokens or pixels: half as much after running out of memory, more again later."""

    def __init__(self, most: int) -> None:
        self.most = self.now = most
        self._good = 0

    def holds(self, each: int) -> int:
        """How many things of this size; the batch size that the user set counts things, whatever their size."""
        own = current_pace().batch_size
        return max(1, (own * self.now // self.most) if own is not None else self.now // max(each, 1))

    def too_small(self) -> None:
        self.now, self._good = self.now // 2, 0

    def worked(self) -> None:
        self._good += 1
        if self._good >= GROWS_AFTER and self.now < self.most:
            self.now, self._good = min(2 * self.now, self.most), 0


def in_batches(
    count: int, room: BatchBudget, each: int, run: Callable[[range], Made], together: int = 1
) -> Iterator[tuple[range, Made]]:
    """run(ks) for variants 0 … count - 1, as many at once as there is room for.

    `each` is the size of one image; `together` is how many images a variant is (a whole batch, say), which `run` may
    have to spread over several passes.
    """
    done = 0
    while done < count:
        ks = range(done, min(count, done + max(1, room.holds(each) // together)))
        made: Made | None = None
        try:
            made = run(ks)
        except (RuntimeError, MemoryError) as error:
            if min(len(ks) * together, room.holds(each)) == 1 or not out_of_memory(error):
                raise
        if made is None:  # outside the handler, where the failed attempt is no longer held by its error
            room.too_small()
            _free_memory()
            continue
        room.worked()
        yield ks, made
        done = ks.stop


def out_of_memory(error: BaseException) -> bool:
    """Torch has a class for it on accelerators, and a sentence on the CPU."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY)


def _free_memory() -> None:
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()
