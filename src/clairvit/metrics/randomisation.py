"""Randomisation: does a map change when the model's parameters are randomised, or when another class is explained?"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, cast

import torch
from torch import Tensor, nn

from clairvit._cost import Cost
from clairvit._progress import report_progress
from clairvit._rng import image_noise, make_generator
from clairvit.errors import BadInput
from clairvit.metrics.context import EvalContext
from clairvit.metrics.curves import area_under_curve
from clairvit.metrics.registry import MetricOutput, metric
from clairvit.metrics.robustness import Copies
from clairvit.metrics.similarity import Similarity, histogram_entropy, map_similarity
from clairvit.models.load_options import seeded
from clairvit.models.model import Model
from clairvit.numerics import widened
from clairvit.option_types import Doc, Range
from clairvit.targets.base import TargetBatch, class_name
from clairvit.tracing.module_state import frozen_eval

Steps = Annotated[
    int,
    Range(ge=1, unit="steps (None: all)", example=12),
    Doc("how many steps of the cascade are explained, evenly spread; None: all"),
]
Bins = Annotated[int, Range(ge=2, example=100), Doc("how many bins the map's histogram has")]
Order = Annotated[
    Literal["top-down", "bottom-up", "independent"], Doc("from which end layers are randomised, or each one alone")
]
Law = Annotated[Literal["normal", "shuffle", "reset"], Doc("how parameters are randomised")]
Signed = Annotated[bool, Doc("compare maps with their signs; false: their absolute values")]
Summary = Annotated[
    Literal["mean", "last", "auc"],
    Doc("what is read of the curve: its mean, its last step, or its area over its width"),
]
Other = Annotated[
    Literal["random", "second", "least"],
    Doc("the other class: drawn at random, the most or the least probable one"),
]
Layer = tuple[nn.Module, tuple[nn.Parameter, ...]]  # a module and the parameters it owns itself
STEPS = 12
MODULES = 75  # of a ViT with twelve blocks
NOISE = 0.1  # of the difference between an image's largest and smallest value (SmoothGrad)
X_AXIS = "part of the layers drawn anew"


@metric(
    "mprt",
    family="randomisation",
    better="lower",
    span=(-1, 1),
    paper="Adebayo et al., NeurIPS 2018",
    needs=("methods",),
    cost=lambda layers, **_: Cost(layers or MODULES),
)
def mprt(
    context: EvalContext,
    order: Order = "top-down",
    layers: Steps | None = STEPS,
    by: Law = "normal",
    similarity: Similarity = "spearman",
    signed: Signed = False,
    summary: Summary = "mean",
) -> MetricOutput:
    """Return mean_l ρ(|a(x; θ)|, |a(x; θ_l)|), θ_l with l layers randomised: high if the map ignores the parameters.

    Layers are the modules that own parameters. `order=top-down` randomises from the head on and keeps what it has
    randomised, `bottom-up` starts at the input, `independent` randomises one layer at a time. `layers` is how many
    steps of the cascade are explained, evenly spread, the last one with every layer randomised; None is all.
    `by=normal` draws each parameter tensor from a normal of its own mean and standard deviation (so a tensor of equal
    entries stays), `shuffle` permutes its entries, `reset` initialises modules that can and draws the rest from the
    normal. `summary=last` is the last step alone, `auc` the area under the curve over its width.
    """
    steps = [
        (fraction, context.explain(context.trace.pixels, model=model))
        for fraction, model in randomised_models(context, order, layers, by)
    ]
    return compared_steps(context.maps, steps, similarity, signed, summary)


def compared_steps(
    reference: Tensor, steps: Sequence[tuple[float, Tensor]], similarity: Similarity, signed: bool, summary: Summary
) -> MetricOutput:
    """Return the similarity of the maps of each step, (fraction of the layers, maps [M, B, …]), to the reference."""
    y = torch.stack([map_similarity(similarity, reference, maps, signed=signed) for _, maps in steps], -1)
    x = torch.tensor([fraction for fraction, _ in steps], dtype=torch.float64)
    return MetricOutput(_summarise(x, y, summary), x, y, similarity, X_AXIS)


@metric(
    "smooth-mprt",
    family="randomisation",
    better="lower",
    span=(-1, 1),
    paper="Hedström et al., 2023 (Sanity checks revisited)",
    needs=("methods",),
    cost=lambda layers, samples, **_: Cost(((layers or MODULES) + 1) * samples),
)
def smooth_mprt(
    context: EvalContext,
    samples: Copies = 10,
    order: Order = "top-down",
    layers: Steps | None = STEPS,
    by: Law = "normal",
    similarity: Similarity = "spearman",
    signed: Signed = False,
    summary: Summary = "mean",
) -> MetricOutput:
    """Return the MPRT of maps that are means over noisy copies of the image, without the noise of single gradients.

    The noise is normal with a tenth of the difference between the image's largest and smallest value as standard
    deviation, the same for every model. Other options are those of mprt.
    """
    x = widened(context.trace.pixels)
    std = noise_of_copies(x)

    def smooth_maps(model: Model) -> Tensor:
        noises = itertools.islice(image_noise(x, context.image_seeds, "normal"), samples)
        return torch.stack([context.explain(x + std * noise, model=model) for noise in noises]).mean(0)

    reference = smooth_maps(context.model)
    steps = [(fraction, smooth_maps(model)) for fraction, model in randomised_models(context, order, layers, by)]
    return compared_steps(reference, steps, similarity, signed, summary)


def noise_of_copies(x: Tensor) -> Tensor:
    """Return a tenth of the difference between the largest and the smallest value of each image [B, C, H, W]."""
    axes = tuple(range(1, x.ndim))
    return NOISE * (x.amax(axes, keepdim=True) - x.amin(axes, keepdim=True))


@metric(
    "efficient-mprt",
    family="randomisation",
    better="higher",
    span=(-1, math.inf),
    paper="Hedström et al., 2023 (Sanity checks revisited)",
    needs=("methods",),
    cost=lambda **_: Cost(1),
)
def efficient_mprt(context: EvalContext, bins: Bins = 100, by: Law = "normal") -> Tensor:
    """Return (H(a_random) − H(a)) / H(a), H the entropy of the histogram of the map: higher for a random model's map.

    Only the fully randomised model is explained. NaN where all of a map falls into one bin, as of a constant map.
    """
    return rise_of_entropy(context, randomised_models(context, "top-down", 1, by), bins)


def rise_of_entropy(context: EvalContext, models: Iterator[tuple[float, Model]], bins: int) -> Tensor:
    """Return (H(a_random) − H(a)) / H(a), [M, B], of the only one of the models."""
    (maps,) = [context.explain(context.trace.pixels, model=model) for _, model in models]
    before, after = (histogram_entropy(values.flatten(2), bins) for values in (context.maps, maps))
    return ((after - before) / before).masked_fill(before == 0, math.nan)


@metric(
    "random-logit",
    family="randomisation",
    better="lower",
    span=(-1, 1),
    paper="Sixt et al., ICML 2020",
    needs=("methods",),
    cost=lambda **_: Cost(1),
)
def random_logit(
    context: EvalContext, other: Other = "random", similarity: Similarity = "ssim", signed: Signed = True
) -> Tensor:
    """Return s(a(x; y), a(x; y′)), y′ another class: 1 for maps that do not depend on the class, low for maps that do.

    `other=random` draws y′ from seed and image, all classes but y alike; `second` is the most probable other class,
    `least` the least probable.
    """
    maps = maps_of_other_classes(context, lambda row, others: _chosen_class(context, row, others, other))
    return map_similarity(similarity, context.maps, maps, signed=signed)


def maps_of_other_classes(context: EvalContext, choose: Callable[[int, list[int]], int]) -> Tensor:
    """Return maps [M, B, rows, cols] of the class that `choose(row, other classes)` returns for each image."""
    classes = [choose(row, _other_classes(context, row)) for row in range(len(context.image_seeds))]
    return context.explain(context.trace.pixels, target=target_of_classes(context, classes))


def _summarise(x: Tensor, y: Tensor, summary: Summary) -> Tensor:
    """Return [M, B] of a curve [M, B, S]."""
    if summary == "last" or len(x) == 1:
        return y[..., -1]
    return y.mean(-1) if summary == "mean" else area_under_curve(x, y, "width")


def _other_classes(context: EvalContext, row: int) -> list[int]:
    """Return the classes that are not the one explained."""
    count, target = len(context.trace.logits[row]), context.target.classes[row]
    if target is None or count < 2:
        name = context.target.names[row]
        cause = f"'{name}', which is no class," if target is None else "a model with a single class"
        raise BadInput(
            f"random-logit compares the map of a class with that of another one, and {cause} was given; expected a "
            "class of several: target=3, or nothing for the prediction."
        )
    return [c for c in range(count) if c != target]


def _chosen_class(context: EvalContext, row: int, other_classes: list[int], which: Other) -> int:
    """Return one of the other classes of an image."""
    if which == "random":
        generator = make_generator(context.image_seeds[row], "random-logit/other class")
        return other_classes[int(torch.randint(len(other_classes), (), generator=generator, device="cpu"))]
    scores = context.trace.logits[row].detach()[other_classes]
    return other_classes[int(scores.argmax() if which == "second" else scores.argmin())]


def target_of_classes(context: EvalContext, classes: list[int]) -> TargetBatch:
    """Return the same kind of target for other classes, one per image."""
    names = tuple(class_name(context.model.labels, c) for c in classes)
    return replace(context.target, names=names, classes=tuple(classes), rows=tuple(((c, 1.0),) for c in classes))


# Models with randomised parameters


def randomised_models(context: EvalContext, order: Order, layers: int | None, by: Law) -> Iterator[tuple[float, Model]]:
    """Yield the fraction of the layers that are randomised, and the model then; it changes with the next step.

    All draws are from one generator of the seed.
    """
    generator = make_generator(context.seed, "mprt/parameters")
    return models_layer_by_layer(
        context, order, layers, parameter_layers, lambda layer: randomise(layer, by, generator), f"by={by}"
    )


def models_layer_by_layer(
    context: EvalContext,
    order: Order,
    layers: int | None,
    choose: Callable[[nn.Module], list[Layer]],
    randomise_layer: Callable[[Layer], None],
    what: str,
) -> Iterator[tuple[float, Model]]:
    """Yield the same, with layers that `choose` names in a module and `randomise_layer` draws anew, as `what` says.

    The user's model is copied, never changed. Draws come from the seed alone, so that every batch gets the same random
    models; steps that are not yielded are drawn nevertheless, so that the others do not depend on `layers`.
    """
    with frozen_eval(context.model.module):  # no other thread registers hooks meanwhile
        model = replace(context.model, module=copy.deepcopy(context.model.module))
    randomised = choose(model.module)
    if not randomised:
        raise BadInput(
            f"{context.model.name} has no parameters that {what} can draw anew; expected some. Take by=normal, or "
            "another metric."
        )
    chosen = spread_steps(len(randomised), layers)
    with report_progress("randomisation", len(chosen)) as advance:
        for step, layer in enumerate(reversed(randomised) if order == "top-down" else randomised, 1):
            trained = [p.detach().clone() for p in layer[1]]
            randomise_layer(layer)
            if step in chosen:
                yield step / len(randomised), model
                advance(1)
            if order == "independent":
                _restore(layer[1], trained)


def parameter_layers(module: nn.Module) -> list[Layer]:
    """Return modules that own parameters, in the order of registration; the first owns a shared parameter."""
    layers: list[Layer] = []
    owned: set[int] = set()
    for part in module.modules():
        parameters = tuple(p for p in part.parameters(recurse=False) if id(p) not in owned)
        owned.update(id(p) for p in parameters)
        if parameters:
            layers.append((part, parameters))
    return layers


def spread_steps(layers: int, steps: int | None) -> list[int]:
    """Return at most `steps` of 1 … layers, evenly spread, always with the last."""
    count = layers if steps is None else min(steps, layers)
    return [math.ceil(k * layers / count) for k in range(1, count + 1)]


@torch.no_grad()
def randomise(layer: Layer, by: Law, generator: torch.Generator) -> None:
    """Draw the parameters of a layer anew, in place."""
    module, parameters = layer
    if by == "reset" and can_reset(module):
        reset(layer, int(torch.randint(2**62, (), generator=generator, device="cpu")))
        return
    for p in parameters:
        flat = widened(p.detach()).flatten().cpu()
        if by == "shuffle":
            drawn = flat[torch.randperm(flat.numel(), generator=generator, device="cpu")]
        else:
            noise = torch.randn(flat.shape, generator=generator, dtype=torch.float32, device="cpu").to(flat)
            drawn = flat.mean() + flat.std(correction=0) * noise
        p.copy_(drawn.reshape(p.shape))


def can_reset(module: nn.Module) -> bool:
    """Return whether a module can initialise its parameters itself."""
    return callable(getattr(module, "reset_parameters", None))


@torch.no_grad()
def reset(layer: Layer, seed: int) -> None:
    """Initialise a module as it does itself, on the CPU: another device would draw other numbers from the same seed.

    torch's global generators are not changed.
    """
    module, parameters = layer
    device = parameters[0].device
    module.cpu()
    with seeded(seed):
        cast(Any, module).reset_parameters()  # torch types a module's attributes as tensors or modules
    module.to(device)


@torch.no_grad()
def _restore(parameters: tuple[nn.Parameter, ...], values: list[Tensor]) -> None:
    """Copy values back into parameters."""
    for p, value in zip(parameters, values, strict=True):
        p.copy_(value)
