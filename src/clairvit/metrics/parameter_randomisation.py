"""Cascade: a copy of the model forgets what it learnt, layer by layer, and is explained on the way."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from clairvit.errors import BadInput
from clairvit.metrics.context import EvalContext
from clairvit.models.load_options import seeded
from clairvit.models.model import Model
from clairvit.perturbation.progress import report_progress
from clairvit.perturbation.rng import make_generator
from clairvit.tracing.attention import widened
from clairvit.tracing.module_state import frozen_eval

Order = Literal["top-down", "bottom-up", "independent"]
Law = Literal["normal", "shuffle", "reset", "quantus"]
Layer = tuple[nn.Module, tuple[nn.Parameter, ...]]  # a module and the parameters it owns itself


def explained_cascade(
    case: EvalContext, explain: Callable[[Model], Tensor], order: Order, layers: int | None, by: Law
) -> tuple[Tensor, list[Tensor]]:
    """Parts of the layers that are randomised [S], and what is explained then.

    The user's model is copied, never touched. Draws come from the seed alone, so that every batch meets the same random
    models; steps that are left out are drawn nevertheless, so that the others are the same whatever `layers` says.
    """
    if layers is not None and layers < 1:
        raise BadInput(f"layers={layers} was given; expected 1 or more steps, such as layers=12, or None for all.")
    with frozen_eval(case.model.module):  # no other thread registers hooks meanwhile
        model = replace(case.model, module=copy.deepcopy(case.model.module))
    every = layers_of(model.module)
    if by == "quantus":
        every = [layer for layer in every if can_reset(layer[0])]
    if not every:
        raise BadInput(
            f"{case.model.name} has no parameters that by={by} can draw anew; expected some. Take by=normal, or "
            "another metric."
        )
    chosen = spread_steps(len(every), layers)
    maps, chance = [], make_generator(case.seed)
    with report_progress("randomisation", len(chosen)) as tell:
        for step, layer in enumerate(reversed(every) if order == "top-down" else every, 1):
            learnt = [p.detach().clone() for p in layer[1]]
            randomise(layer, by, torch.Generator().manual_seed(case.seed + 1) if by == "quantus" else chance)
            if step in chosen:
                maps.append(explain(model))
                tell(1)
            if order == "independent":
                _put(layer[1], learnt)
    return torch.tensor(chosen, dtype=torch.float64) / len(every), maps


def layers_of(module: nn.Module) -> list[Layer]:
    """Modules that own parameters, in the order of registration; a shared parameter belongs to the first of them."""
    found: list[Layer] = []
    seen: set[int] = set()
    for part in module.modules():
        own = tuple(p for p in part.parameters(recurse=False) if id(p) not in seen)
        seen.update(id(p) for p in own)
        if own:
            found.append((part, own))
    return found


def spread_steps(layers: int, steps: int | None) -> list[int]:
    """At most so many of 1 … layers, evenly spread, always with the last."""
    count = layers if steps is None else min(steps, layers)
    return [math.ceil(k * layers / count) for k in range(1, count + 1)]


@torch.no_grad()
def randomise(layer: Layer, by: Law, chance: torch.Generator) -> None:
    """Draw the parameters of a layer anew, in place."""
    module, own = layer
    if by in ("reset", "quantus") and can_reset(module):
        drawn_seed = int(torch.randint(2**62, (), generator=chance))
        _reset(module, own, chance.initial_seed() if by == "quantus" else drawn_seed)
        return
    for p in own:
        flat = widened(p.detach()).flatten().cpu()
        if by == "shuffle":
            drawn = flat[torch.randperm(flat.numel(), generator=chance)]
        else:
            noise = torch.randn(flat.shape, generator=chance, dtype=torch.float32).to(flat)
            drawn = flat.mean() + flat.std(correction=0) * noise
        p.copy_(drawn.reshape(p.shape))


def can_reset(module: nn.Module) -> bool:
    return callable(getattr(module, "reset_parameters", None))


def _reset(module: nn.Module, own: tuple[nn.Parameter, ...], seed: int) -> None:
    """As the module initialises itself, on the CPU: another device would draw other numbers from the same seed.

    torch's own generators stay where they were.
    """
    home = own[0].device
    module.cpu()
    with seeded(seed):
        cast(Any, module).reset_parameters()  # torch types a module's attributes as tensors or modules
    module.to(home)


@torch.no_grad()
def _put(parameters: tuple[nn.Parameter, ...], values: list[Tensor]) -> None:
    for p, value in zip(parameters, values, strict=True):
        p.copy_(value)
