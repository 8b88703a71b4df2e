"""Run many variants in few passes. Running out of memory halves the batch; it grows back after passes that fit."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch

from clairvit.execution import ExecutionOptions

Output = TypeVar("Output")
_OUT_OF_MEMORY = (  # Linux, other systems, Apple's GPUs, and CUDA libraries that allocate for themselves
    *("can't allocate memory", "not enough memory", "out of memory"),
    *("CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED"),
)
GROWS_AFTER = 8  # passes that fit before a halved batch is doubled again


def check_execution_options(batch_size: int | None, autocast: str | None) -> None:
    """Raise BadInput unless these are valid execution options."""
    ExecutionOptions(batch_size, autocast)


class BatchBudget:
    """The size of one pass, in tokens or pixels: halved after running out of memory, doubled again later.

    A `batch_size` that the user chose counts images, whatever their size.
    """

    def __init__(self, limit: int, batch_size: int | None = None) -> None:
        self.limit = self.current = limit
        self.batch_size = batch_size
        self._successes = 0

    def capacity(self, image_size: int) -> int:
        """Return how many images of this size go into one pass, at least 1."""
        if self.batch_size is not None:
            return max(1, self.batch_size * self.current // self.limit)
        return max(1, self.current // max(image_size, 1))

    def halve(self) -> None:
        """Halve the size of a pass after running out of memory."""
        self.current, self._successes = self.current // 2, 0

    def count_success(self) -> None:
        """Count a pass that fitted; double a halved size after `GROWS_AFTER` of them."""
        self._successes += 1
        if self._successes >= GROWS_AFTER and self.current < self.limit:
            self.current, self._successes = min(2 * self.current, self.limit), 0


def in_batches(
    count: int, budget: BatchBudget, image_size: int, run: Callable[[range], Output], images_per_variant: int = 1
) -> Iterator[tuple[range, Output]]:
    """Yield (ks, run(ks)) for variants 0 … count - 1, as many in one call as the budget holds.

    A variant of several images (a whole batch, say) may exceed the budget alone; `run` then splits it into passes.
    """
    start = 0
    while start < count:
        ks = range(start, min(count, start + max(1, budget.capacity(image_size) // images_per_variant)))
        output: Output | None = None
        try:
            output = run(ks)
        except (RuntimeError, MemoryError) as error:
            smallest = min(len(ks) * images_per_variant, budget.capacity(image_size)) == 1
            if smallest or not out_of_memory(error):
                raise
        if output is None:  # outside the handler, where the error no longer holds the tensors of the failed attempt
            budget.halve()
            _free_memory()
            continue
        budget.count_success()
        yield ks, output
        start = ks.stop


def length_buckets(lengths: Sequence[int], overhead: int) -> list[list[int]]:
    """Return indices in groups that share passes, each filled up to its longest; longest first.

    A group takes in the next shorter length as long as the tokens of padding stay within `overhead`, the number of
    tokens that take as long as starting a pass does. With 0, a group has one length.
    """
    buckets: list[list[int]] = []
    padding = 0
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        gap = lengths[buckets[-1][0]] - lengths[index] if buckets else 0
        padding += gap
        if not buckets or (gap and padding > overhead):
            buckets.append([])
            padding = 0
        buckets[-1].append(index)
    return buckets


def out_of_memory(error: BaseException) -> bool:
    """Return whether an error means too little memory: a class of torch on accelerators, a message on the CPU."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)


def _free_memory() -> None:
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()
