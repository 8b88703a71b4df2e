"""How a verb runs: the seed, how many images one pass of the model holds, and in which precision it runs."""

from __future__ import annotations

import numbers
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from clairvit.errors import BadInput

PRECISIONS = {"bfloat16": torch.bfloat16, "float16": torch.float16, "bf16": torch.bfloat16, "fp16": torch.float16}
_DEVICES = ("cpu", "cuda", "mps")


def check_seed(seed: Any) -> int:
    """Return a seed as an int; raise BadInput for anything but a whole number."""
    if isinstance(seed, bool) or not isinstance(seed, numbers.Integral):
        raise BadInput(f"seed={seed!r} is a {type(seed).__name__}; expected a whole number, such as 0.")
    return int(seed)


def precision_name(autocast: str) -> str:
    """Return the full name of a precision: "bf16" is "bfloat16"; raise BadInput for an unknown one."""
    return str(PRECISIONS[ExecutionOptions(autocast=autocast).autocast or ""]).removeprefix("torch.")


@dataclass(frozen=True)
class ExecutionOptions:
    """How perturbed inputs are run. Verbs make it with `from_caller`; it travels with the `Recording`.

    Args:
        batch_size: Most images in one pass; None is as many as keep the device busy.
        autocast: The name of a precision for passes of the model; None leaves the caller's own autocast on.
        caller_autocast: The precision of the autocast that the caller is in, per device type.

    Raises:
        BadInput: batch_size is not a positive whole number, or autocast is not one of `PRECISIONS`.

    Example:
        >>> ExecutionOptions(batch_size=64).batch_size
        64
    """

    batch_size: int | None = None
    autocast: str | None = None
    caller_autocast: tuple[tuple[str, torch.dtype], ...] = ()

    def __post_init__(self) -> None:
        """Check the values."""
        size, autocast = self.batch_size, self.autocast
        is_whole = isinstance(size, numbers.Integral) and not isinstance(size, bool)
        if size is not None and (not is_whole or size < 1):
            raise BadInput(f"batch_size={size!r} was given; expected 1 or more images in one pass, such as 64.")
        if autocast is not None and not (isinstance(autocast, str) and autocast in PRECISIONS):
            raise BadInput(f"autocast={autocast!r} was given; expected {' or '.join(PRECISIONS)}, or None for none.")

    @classmethod
    def from_caller(cls, batch_size: int | None = None, autocast: str | None = None) -> ExecutionOptions:
        """Return the options of a verb; note the caller's autocast, as methods do their own arithmetic without it."""
        enabled = [device for device in _DEVICES if torch.is_autocast_enabled(device)]
        return cls(batch_size, autocast, tuple((device, torch.get_autocast_dtype(device)) for device in enabled))

    def precision(self, device: torch.device) -> AbstractContextManager[object]:
        """Return the autocast context for passes of the model; the caller's own where none was asked for."""
        if self.autocast is not None:
            return torch.autocast(device.type, PRECISIONS[self.autocast])
        dtype = dict(self.caller_autocast).get(device.type)
        return nullcontext() if dtype is None else torch.autocast(device.type, dtype)
