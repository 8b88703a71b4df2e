"""Checked options of `load`, and the seed of random weights."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from clairvit.models.activation import Activation
from clairvit.models.preprocess import NOT_GIVEN, PreprocessOptions


@dataclass(frozen=True)
class LoadOptions:
    """The options of one call of `load`, checked; every source reads these."""

    spec: str  # as typed: "timm:vit_tiny_patch16_224"
    identifier: str  # what follows the source's colon: a name, a hub id, a path
    pretrained: bool = True
    arch: str | None = None
    labels: tuple[str, ...] | None = None
    size: tuple[int, int] | None = None
    activation: Activation | None = None  # None: what the model states
    preprocessing: PreprocessOptions = NOT_GIVEN

    @property
    def name(self) -> str:
        """Return the name in results, which says so if the weights are random."""
        return self.spec if self.pretrained else f"{self.spec} (random weights)"


_generator_lock = threading.RLock()


def _release_in_child() -> None:
    """Make a new lock in a child process: a thread that is not there may hold the old one."""
    global _generator_lock
    _generator_lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_release_in_child)


@contextmanager
def seeded(seed: int = 0) -> Iterator[None]:
    """Seed torch's CPU generator inside the block and restore its state afterwards.

    All threads share that generator: one thread at a time may seed and restore it.
    """
    with _generator_lock, torch.random.fork_rng(devices=[]):  # weights are drawn on the CPU
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed other devices too
        yield
