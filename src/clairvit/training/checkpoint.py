"""Checkpoint: the complete state of a training, in one safetensors file, from which it continues exactly.

Tensors are tensors, and the rest is JSON in the file's header: nothing is pickled. The file is written atomically.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from clairvit._io import atomic_write
from clairvit.errors import Argument, BadInput

_FORMAT = 1


@dataclass(frozen=True)
class Epoch:
    """The result of one epoch; losses and accuracies are means over images."""

    number: int  # from 1
    loss: float
    trained: float  # accuracy on the augmented training images
    accuracy: float  # on the validation images
    rate: float
    triggered: float | None = None  # share of validation images with the trigger that get its class; None: no trigger

    @property
    def score(self) -> float:
        """Return the accuracy by which epochs are compared: with a trigger the mean of both."""
        return self.accuracy if self.triggered is None else (self.accuracy + self.triggered) / 2


@dataclass(frozen=True)
class Progress:
    """The epochs that are done, and with which settings."""

    settings: Mapping[str, Any]  # what must be the same for the training to continue
    history: tuple[Epoch, ...] = ()

    @property
    def best(self) -> Epoch:
        """Return the most accurate epoch, the first of equal ones."""
        return max(self.history, key=lambda epoch: (epoch.score, -epoch.number))

    def should_stop(self, patience: int) -> bool:
        """Return whether so many epochs have passed without a better one."""
        return bool(self.history) and self.history[-1].number - self.best.number >= patience


def write_tensors(tensors: Mapping[str, Tensor], metadata: Mapping[str, str], path: Path) -> None:
    """Write a safetensors file atomically: readers never see a partial file. Equal weights are equal bytes."""
    from safetensors.torch import save

    content = save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, dict(metadata))
    atomic_write(path, *_sorted_metadata(content))


def _sorted_metadata(content: bytes) -> tuple[bytes, memoryview]:
    """Return header and data of a safetensors file with its metadata, which comes in any order, sorted by name."""
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header["__metadata__"] = dict(sorted(header.get("__metadata__", {}).items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # the data begin at a multiple of eight
    return len(text).to_bytes(8, "little") + text, memoryview(content)[8 + length :]


def save_checkpoint(
    path: Path,
    progress: Progress,
    module: nn.Module,
    optimiser: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
    device: torch.device,
) -> None:
    """Write the state of a training."""
    optimiser_state = optimiser.state_dict()
    tensors = {f"model.{name}": tensor for name, tensor in module.state_dict().items()}
    for index, state in optimiser_state["state"].items():
        tensors |= {f"optimiser.{index}.{name}": tensor for name, tensor in state.items()}
    tensors["random.cpu"] = torch.get_rng_state()
    if device.type == "cuda":
        tensors["random.cuda"] = torch.cuda.get_rng_state(device)
    content = {
        "version": _FORMAT,
        "settings": progress.settings,
        "history": [vars(epoch) for epoch in progress.history],
        "groups": optimiser_state["param_groups"],
        "schedule": schedule.state_dict(),
    }
    write_tensors(tensors, {"clairvit": json.dumps(content)}, path)


def read_progress(path: Path) -> Progress:
    """Return the settings and epochs that a checkpoint stores."""
    _, content = _open(path)
    return Progress(content["settings"], tuple(Epoch(**epoch) for epoch in content["history"]))


def restore(
    path: Path,
    module: nn.Module,
    optimiser: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
    device: torch.device,
) -> None:
    """Restore the state that `save_checkpoint` wrote."""
    tensors, content = _open(path)
    module.load_state_dict({key[6:]: value for key, value in tensors.items() if key.startswith("model.")})
    state: dict[int, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        if key.startswith("optimiser."):
            _, index, name = key.split(".")
            state.setdefault(int(index), {})[name] = tensor
    optimiser.load_state_dict({"state": state, "param_groups": content["groups"]})
    schedule.load_state_dict(content["schedule"])
    torch.set_rng_state(tensors["random.cpu"])
    if device.type == "cuda" and "random.cuda" in tensors:
        torch.cuda.set_rng_state(tensors["random.cuda"], device)


def _open(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and the JSON header of a checkpoint; raise BadInput if it cannot be used."""
    from safetensors import SafetensorError, safe_open

    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(safe_open(path, framework="pt"))
            content = json.loads((file.metadata() or {})["clairvit"])
            if content["version"] != _FORMAT:
                raise ValueError(f"version {content['version']} instead of {_FORMAT}")
            return {key: file.get_tensor(key) for key in file.keys()}, content  # noqa: SIM118
        except (SafetensorError, OSError, KeyError, ValueError, TypeError) as error:
            raise BadInput(
                f"The checkpoint '{path}' cannot be used ({type(error).__name__}: {error}); delete it, or pass ",
                Argument("fresh", True),
                " to begin anew.",
            ) from error
