"""Randomisation: does a map change when the model forgets what it learnt, or when another class is asked for?"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from clairvit.errors import BadInput
from clairvit.methods.explanation import Cost
from clairvit.metrics.context import EvalContext
from clairvit.metrics.curves import area
from clairvit.metrics.noise import Draws, numpy_chance, numpy_noise, own_noise
from clairvit.metrics.parameter_randomisation import Law, Order, explained_cascade
from clairvit.metrics.registry import MetricOutput, metric
from clairvit.metrics.similarity import Similarity, alike, histogram_entropy
from clairvit.models.model import Model
from clairvit.perturbation.rng import make_generator
from clairvit.targets.base import Target, class_name
from clairvit.tracing.attention import widened

Summary = Literal["mean", "last", "auc"]
Other = Literal["random", "second", "least", "quantus"]
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
    case: EvalContext,
    order: Order = "top-down",
    layers: int | None = STEPS,
    by: Law = "normal",
    similarity: Similarity = "spearman",
    signed: bool = False,
    summary: Summary = "mean",
    original: bool = False,
) -> MetricOutput:
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
    return MetricOutput(_summed_up(x, y, summary), x, y, similarity, "part of the layers drawn anew")


@metric(
    "smooth-mprt",
    family="randomisation",
    better="lower",
    span=(-1, 1),
    paper="Hedström et al., 2023 (Sanity checks revisited)",
    needs=("methods",),
    cost=lambda layers, samples, original, **_: Cost(((layers or MODULES) + 1 + original) * samples),
    presets={
        "quantus": {
            "samples": 50,
            "clean": True,
            "order": "bottom-up",
            "layers": None,
            "by": "quantus",
            "original": True,
            "draws": "quantus",
        }
    },
    discrepancies="Quantus takes 50 copies of which the last has no noise, resets modules as in mprt, draws new noise "
    "for every model, so that even the original resembles itself by less than 1, and averages with that "
    "(`preset=quantus`, with seed=42 and its numpy seed as ours). It explains by its own methods whatever explain_func "
    "it is given.",
)
def smooth_mprt(
    case: EvalContext,
    samples: int = 10,
    clean: bool = False,
    order: Order = "top-down",
    layers: int | None = STEPS,
    by: Law = "normal",
    similarity: Similarity = "spearman",
    signed: bool = False,
    summary: Summary = "mean",
    original: bool = False,
    draws: Draws = "own",
) -> MetricOutput:
    """mprt of maps that are means over noisy copies: as mprt, without the grain of single gradients.

    The noise is normal with a tenth of the distance between the image's largest and smallest value as standard
    deviation, the same for every model; `draws=quantus` is numpy's, and goes on from model to model. `clean` leaves the
    last copy as it is. `original` explains the original once more and counts how far it resembles itself. Other
    options are those of mprt.
    """
    if samples < 1:
        raise BadInput(f"samples={samples} was given; expected 1 or more noisy copies, such as samples=10.")
    x = widened(case.trace.pixels)
    spread = NOISE * (x.amax((1, 2, 3)) - x.amin((1, 2, 3)))[:, None, None, None]

    going_on = numpy_noise(x, case.seed, lambda chance, shape: chance.standard_normal(shape))

    def copies() -> Iterator[Tensor]:
        noise = going_on if draws == "quantus" else own_noise(x, case.marks, "normal")
        for k in range(samples):
            yield x if clean and k == samples - 1 else x + spread * next(noise)

    def explain(model: Model) -> Tensor:
        return torch.stack([case.explained_again(pixels, model=model) for pixels in copies()]).mean(0)

    usual = explain(case.model)
    again = [explain(case.model)] if original else []
    steps, maps = explained_cascade(case, explain, order, layers, by)
    if original:
        steps, maps = torch.cat([torch.zeros(1, dtype=steps.dtype), steps]), [*again, *maps]
    y = torch.stack([alike(similarity, usual, one, signed=signed) for one in maps], -1)
    return MetricOutput(_summed_up(steps, y, summary), steps, y, similarity, "part of the layers drawn anew")


@metric(
    "efficient-mprt",
    family="randomisation",
    better="higher",
    span=(-1, math.inf),
    paper="Hedström et al., 2023 (Sanity checks revisited)",
    needs=("methods",),
    cost=lambda **_: Cost(1),
    presets={"quantus": {"by": "quantus"}},
    discrepancies="Quantus resets modules as in mprt (`preset=quantus`, with seed=42). Its rules for the number of "
    "bins read the number of axes where they need the number of entries; here the number is an option, and 100 is its "
    "default too.",
)
def efficient_mprt(case: EvalContext, bins: int = 100, by: Law = "normal") -> Tensor:
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
    presets={"quantus": {"other": "quantus", "similarity": "ssim-flat", "resolution": "pixel"}},
    discrepancies="Quantus takes the SSIM of the flattened maps, with windows of 7 pixels that run along the rows and "
    "over their ends, and draws y′ by numpy from one seed for every batch (`preset=quantus`, with seed=42); here "
    "windows are squares of the map.",
)
def random_logit(
    case: EvalContext,
    other: Other = "random",
    similarity: Similarity = "ssim",
    signed: bool = True,
    resolution: Literal["patch", "pixel"] = "patch",
) -> Tensor:
    """s(a(x; y), a(x; y′)), y′ another class: 1 for maps that do not ask for the class, low for maps that do.

    `other=random` draws y′ from seed and image, all classes but y alike; `second` is the most probable other class,
    `least` the least probable; `quantus` draws by numpy from the seed alone. `resolution=pixel` gives every pixel the
    value of its patch first.
    """
    goal = elsewhere(case, [_other(case, row, other) for row in range(len(case.marks))])
    maps = case.explained_again(case.trace.pixels, target=goal)
    pair = [case.maps, maps]
    if resolution == "pixel":
        pair = [F.interpolate(one, case.size, mode="nearest-exact") for one in pair]
    return alike(similarity, pair[0], pair[1], signed=signed)


def _summed_up(x: Tensor, y: Tensor, summary: Summary) -> Tensor:
    """[M, B, S] -> [M, B]"""
    if summary == "last" or len(x) == 1:
        return y[..., -1]
    return y.mean(-1) if summary == "mean" else area(x, y, "width")


def _other(case: EvalContext, row: int, which: Other) -> int:
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
        return rest[int(torch.randint(count - 1, (), generator=make_generator(case.marks[row])))]
    if which == "quantus":
        return rest[int(numpy_chance(case.seed).randint(0, count - 1, 1)[0])]
    scores = logits[rest]
    return rest[int(scores.argmax() if which == "second" else scores.argmin())]


def elsewhere(case: EvalContext, classes: list[int]) -> Target:
    """The same kind of target for other classes."""
    names = tuple(class_name(case.model.labels, c) for c in classes)
    return replace(case.target, names=names, classes=tuple(classes), rows=tuple(((c, 1.0),) for c in classes))
