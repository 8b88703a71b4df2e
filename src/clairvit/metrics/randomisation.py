"""Randomisation: does a map change when the model forgets what it learnt, or when another class is asked for?"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from clairvit.errors import BadInput
from clairvit.methods.explanation import Cost
from clairvit.metrics.case import Case
from clairvit.metrics.curves import area
from clairvit.metrics.metric import Measured, metric
from clairvit.metrics.similarity import Similarity, alike, histogram_entropy
from clairvit.models.model import Model
from clairvit.models.target import Target, class_name
from clairvit.perturb.chance import dice
from clairvit.perturb.watch import telling
from clairvit.trace.attention import widened

Order = Literal["top-down", "bottom-up", "independent"]
Law = Literal["normal", "shuffle", "reset", "quantus"]
Summary = Literal["mean", "last", "auc"]
Other = Literal["random", "second", "least"]
Layer = tuple[nn.Module, tuple[nn.Parameter, ...]]  # a module and the parameters it owns itself
STEPS = 12
MODULES = 75  # of a ViT with twelve blocks
NOISE = 0.1  # of the distance between an image's largest and smallest value (SmoothGrad)


@metric(
    "mprt",
    family="randomisation",
    better="lower",
    span=(-1, 1),
    paper="Adebayo et al., NeurIPS 2018",
    needs=("methods",),
    cost=lambda layers, **_: Cost(layers or MODULES),
    presets={"quantus": {"layers": None, "by": "quantus", "original": True}},
    discrepancies="Quantus draws each layer from the same seed, so that layers of one shape become equal, leaves "
    "cls_token, pos_embed and LayerScale as they were learnt, sets norms to 1 and 0, and averages with the similarity "
    "1 of the model to itself (`preset=quantus`, with seed=42 for its draws); here every parameter is drawn anew from "
    "one generator, and the original does not count.",
)
def mprt(
    case: Case,
    order: Order = "top-down",
    layers: int | None = STEPS,
    by: Law = "normal",
    similarity: Similarity = "spearman",
    signed: bool = False,
    summary: Summary = "mean",
    original: bool = False,
) -> Measured:
    """mean_l ρ(|a(x; θ)|, |a(x; θ_l)|), θ_l with l layers drawn anew: high if the map ignores what the model learnt.

    Layers are the modules that own parameters. `order=top-down` randomises from the head on and keeps what it has
    randomised, `bottom-up` starts at the input, `independent` randomises one layer at a time. `layers` is how many
    steps of the cascade are explained, evenly spread, the last one with every layer randomised; None is all.
    `by=normal` draws each parameter tensor from a normal of its own mean and standard deviation (so a tensor of equal
    entries stays), `shuffle` permutes its entries, `reset` initialises modules that can and draws the rest from the
    normal, `quantus` initialises modules that can, each from the same seed, and nothing else. `summary=last` is the
    last step alone, `auc` the area under the curve over its width. `original` counts the similarity 1 of the model to
    itself as a step at the beginning.
    """

    def explain(model: Model) -> Tensor:
        return case.explained_again(case.trace.pixels, model=model)

    x, maps = explained_cascade(case, explain, order, layers, by)
    if original:
        x, maps = torch.cat([torch.zeros(1, dtype=x.dtype), x]), [case.maps, *maps]
    y = torch.stack([alike(similarity, case.maps, one, signed=signed) for one in maps], -1)
    return Measured(_summed_up(x, y, summary), x, y, similarity)


@metric(
    "smooth-mprt",
    family="randomisation",
    better="lower",
    span=(-1, 1),
    paper="Hedström et al., 2023 (Sanity checks revisited)",
    needs=("methods",),
    cost=lambda layers, samples, **_: Cost(((layers or MODULES) + 1) * samples),
    presets={"quantus": {"samples": 50, "clean": True, "order": "bottom-up", "layers": None, "by": "quantus"}},
    discrepancies="Quantus takes 50 copies of which the last has no noise and resets modules as in mprt "
    "(`preset=quantus`); its draws of the noise, and its average with the original, are not repeated here.",
)
def smooth_mprt(
    case: Case,
    samples: int = 10,
    clean: bool = False,
    order: Order = "top-down",
    layers: int | None = STEPS,
    by: Law = "normal",
    similarity: Similarity = "spearman",
    signed: bool = False,
    summary: Summary = "mean",
) -> Measured:
    """mprt of maps that are means over noisy copies: as mprt, without the grain of single gradients.

    The noise is normal with a tenth of the distance between the image's largest and smallest value as standard
    deviation, the same for every model. `clean` leaves the last copy as it is. Other options are those of mprt.
    """
    if samples < 1:
        raise BadInput(f"samples={samples} was given; expected 1 or more noisy copies, such as samples=10.")
    x = widened(case.trace.pixels)
    spread = NOISE * (x.amax((1, 2, 3)) - x.amin((1, 2, 3)))[:, None, None, None]

    def copies() -> Iterator[Tensor]:
        for k in range(samples):
            drawn = [torch.randn(x.shape[1:], generator=dice(mark, k)) for mark in case.marks]
            yield x if clean and k == samples - 1 else x + spread * torch.stack(drawn).to(x)

    def explain(model: Model) -> Tensor:
        return torch.stack([case.explained_again(pixels, model=model) for pixels in copies()]).mean(0)

    usual = explain(case.model)
    steps, maps = explained_cascade(case, explain, order, layers, by)
    y = torch.stack([alike(similarity, usual, one, signed=signed) for one in maps], -1)
    return Measured(_summed_up(steps, y, summary), steps, y, similarity)


@metric(
    "efficient-mprt",
    family="randomisation",
    better="higher",
    span=(-1, math.inf),
    paper="Hedström et al., 2023 (Sanity checks revisited)",
    needs=("methods",),
    cost=lambda **_: Cost(1),
    discrepancies="Quantus's rules for the number of bins read the number of axes where they need the number of "
    "entries; here the number is an option, and 100 is Quantus's default too.",
)
def efficient_mprt(case: Case, bins: int = 100, by: Law = "normal") -> Tensor:
    """(H(a_random) − H(a)) / H(a), H the entropy of the histogram: how much more disorder a random model's map has.

    Only the fully randomised model is explained. NaN where all of a map falls into one bin, as of a constant map.
    """
    if bins < 2:
        raise BadInput(f"bins={bins} was given; expected 2 or more, such as bins=100.")

    def explain(model: Model) -> Tensor:
        return case.explained_again(case.trace.pixels, model=model)

    _, (maps,) = explained_cascade(case, explain, "top-down", 1, by)
    before, after = (histogram_entropy(one.flatten(2), bins) for one in (case.maps, maps))
    return ((after - before) / before).masked_fill(before == 0, math.nan)


@metric(
    "random-logit",
    family="randomisation",
    better="lower",
    span=(-1, 1),
    paper="Sixt et al., ICML 2020",
    needs=("methods",),
    cost=lambda **_: Cost(1),
    discrepancies="Quantus takes the SSIM of the flattened maps, with windows that run along the rows and over their "
    "ends; here windows are squares of the map.",
)
def random_logit(case: Case, other: Other = "random", similarity: Similarity = "ssim", signed: bool = True) -> Tensor:
    """s(a(x; y), a(x; y′)), y′ another class: 1 for maps that do not ask for the class, low for maps that do.

    `other=random` draws y′ from seed and image, all classes but y alike; `second` is the most probable other class,
    `least` the least probable.
    """
    goal = elsewhere(case, [_other(case, row, other) for row in range(len(case.marks))])
    maps = case.explained_again(case.trace.pixels, target=goal)
    return alike(similarity, case.maps, maps, signed=signed)


def explained_cascade(
    case: Case, explain: Callable[[Model], Tensor], order: Order, layers: int | None, by: Law
) -> tuple[Tensor, list[Tensor]]:
    """Parts of the layers that are randomised [S], and what is explained then.

    The user's model is copied, never touched. Draws come from the seed alone, so that every batch meets the same random
    models; steps that are left out are drawn nevertheless, so that the others are the same whatever `layers` says.
    """
    if layers is not None and layers < 1:
        raise BadInput(f"layers={layers} was given; expected 1 or more steps, such as layers=12, or None for all.")
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
    maps, chance = [], dice(case.seed)
    with telling("randomisation", len(chosen)) as tell:
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
    """As the module initialises itself; torch's own generators stay where they were."""
    devices = sorted({p.device.index or 0 for p in own if p.device.type == "cuda"})
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        cast(Any, module).reset_parameters()  # torch types a module's attributes as tensors or modules


@torch.no_grad()
def _put(parameters: tuple[nn.Parameter, ...], values: list[Tensor]) -> None:
    for p, value in zip(parameters, values, strict=True):
        p.copy_(value)


def _summed_up(x: Tensor, y: Tensor, summary: Summary) -> Tensor:
    """[M, B, S] -> [M, B]"""
    if summary == "last" or len(x) == 1:
        return y[..., -1]
    return y.mean(-1) if summary == "mean" else area(x, y, "width")


def _other(case: Case, row: int, which: Other) -> int:
    """A class that is not the one explained."""
    logits, here = case.trace.logits[row].detach(), case.target.classes[row]
    count = len(logits)
    if here is None or count < 2:
        seen = f"'{case.target.names[row]}', which is no class," if here is None else "a model with a single class"
        raise BadInput(
            f"random-logit compares the map of a class with that of another one, and {seen} was given; expected a "
            "class of several: target=3, or nothing for the prediction."
        )
    rest = [c for c in range(count) if c != here]
    if which == "random":
        return rest[int(torch.randint(count - 1, (), generator=dice(case.marks[row])))]
    scores = logits[rest]
    return rest[int(scores.argmax() if which == "second" else scores.argmin())]


def elsewhere(case: Case, classes: list[int]) -> Target:
    """The same kind of target for other classes."""
    names = tuple(class_name(case.model.labels, c) for c in classes)
    return replace(case.target, names=names, classes=tuple(classes), rows=tuple(((c, 1.0),) for c in classes))
