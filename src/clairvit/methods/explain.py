"""The verbs `explain` and `compare`: run methods on images and return explanations; traces are shared."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from os import PathLike
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch
from torch import Tensor

from clairvit._cost import Cost
from clairvit.errors import BadInput, NotApplicable
from clairvit.methods.collect import collect
from clairvit.methods.explanation import Comparison, Explanation, concat
from clairvit.methods.heads import collect_heads, head_notes, head_variants
from clairvit.methods.planner import misfits
from clairvit.methods.recipe import method_text_for
from clairvit.methods.recommended import (
    COMPARED,
    CONTRASTED,
    default_method,
    defaults_for,
    kind_of_comparison,
    kind_of_model,
    reason_for_default,
)
from clairvit.methods.refined import check_seconds, refined_spec
from clairvit.methods.registry import by_family
from clairvit.methods.registry import list_methods as registered_methods
from clairvit.methods.runs import Question, Replay, Run, iter_runs
from clairvit.methods.spec import MethodSpec, resolve_method
from clairvit.models.coerce import ModelLike
from clairvit.models.images import Batch, UnusualRange, unusual_notes
from clairvit.targets.base import ANY_CLASS, NO_SCORE, Target, TargetBatch
from clairvit.tracing.module_state import frozen_eval, own_grad_mode
from clairvit.tracing.structure import ModelStructure, model_structure

if TYPE_CHECKING:
    from clairvit.methods.compare_models import ModelComparison
    from clairvit.methods.recipe import Recipe

Value = TypeVar("Value")
MOST_NAMED = 6  # targets that a note lists
# The methods of `compare` when none are named: the best known of each family
DEFAULT_PANEL = (
    *("raw-attention", "rollout", "grad-rollout", "attcam", "genatt", "gmar-l1", "legrad", "focusvit", "attcat"),
    *("attnlrp+plus", "decompx+skipplus"),
)
ALL = "all"


def explain(
    model: ModelLike,
    images: Any,
    method: str | MethodSpec | PathLike[str] | Recipe | None = None,
    target: Any = None,
    *,
    targets: Sequence[Any] | None = None,
    recipe: str | PathLike[str] | Recipe | None = None,
    score: str | None = None,
    passes: int | None = None,
    seconds: float | None = None,
    seed: int = 0,
    layers: bool = False,
    by_head: bool = False,
    batch_size: int | None = None,
    autocast: str | None = None,
    inputs: Mapping[str, Any] | None = None,
    **options: Any,
) -> Explanation:
    """Explain a model's output for one image or many with one method.

    Args:
        model: A `cv.Model`, a name for `cv.load`, or any `nn.Module`, which stays as it is. The preprocessing of a
            bare module is read off its timm or transformers configuration; otherwise ImageNet's is assumed, with a
            warning.
        images: A path, folder, pattern, PIL image, uint8 array, preprocessed float tensor, a list of these, a
            DataLoader, or a data set of images or (image, label); or what a processor of transformers returns, with
            the model's other inputs. "demo" is a built-in photo of a cat.
        method: A method string, a `MethodSpec`, or a recipe (also its file). None is attnlrp+plus for a plain
            Vision Transformer, and for hierarchical models, CNNs and models without gradients the default of their
            kind, which a note says.
        target: What to explain: None (the predicted class), a class index or name, `cv.Contrast(a, b)`, a function of
            the scores [B, C] -> [B], or any other `cv.targets.Target`: what a module returns besides class scores is
            read by `cv.Output(function)`. A list holds one target per image.
        targets: Several targets for each image: a list of what `target` accepts. The maps are ordered by target, then
            by image.
        recipe: The recipe, or its file, that a method such as "focusvit(m=auto)" reads its start layer from.
        score: logit, prob or logprob. None is what the method is meant for: the logit, or the probability for most
            perturbation methods, where the model has one (`Model.activation`).
        passes: Refine the method's map by so many passes in which random patches are kept: refine(METHOD, passes=N),
            with a standard error per patch. None: the method's map as it is.
        seconds: Refine it by as many such passes as fit in this time per map; the first map decides how many these
            are, and the method string says it.
        seed: The seed of everything random.
        layers: Keep the map of each layer in `.layers`.
        by_head: Keep the maps of each attention head in `.heads`.
        batch_size: At most so many perturbed images in one pass; None: chosen by size, halved when memory runs out.
        autocast: "bfloat16" makes perturbed passes faster and less exact.
        inputs: Further inputs of the module's forward by name: {"input_ids": …}. A tensor has one row for all images,
            or one for each: these are then explained one by one, each with its own row.
        **options: Options of the method, e.g. fusion="max".

    Returns:
        An `Explanation` with one map per image and target.

    Raises:
        BadInput: An image, target or option that cannot be used.
        UnknownName: A method, model, class or option that does not exist.
        NotApplicable: The method does not fit the model.

    Example:
        >>> import clairvit as cv
        >>> model = cv.load("pets")
        >>> cv.explain(model, "demo")
        Explanation('attnlrp+plus' of pets, 1×14×14: Bengal)
        >>> cv.explain(model, "demo", "rollout", fusion="max").method
        'rollout(fusion=max)'
        >>> cv.explain(model, ["demo", "demo"], "ixg+plus", target=["Bengal", "Beagle"]).targets
        ('Bengal', 'Beagle')
        >>> cv.explain(model, "demo", "genatt", targets=["Bengal", "Beagle"]).maps.shape
        torch.Size([2, 14, 14])
        >>> cv.explain(model, "demo", passes=16).method
        'refine(attnlrp+plus,passes=16)'
    """
    if seconds is not None:
        if passes is not None:
            raise BadInput("passes= and seconds= were given; expected one of them.")
        check_seconds(seconds)
    spec: MethodSpec | None = None
    is_file = isinstance(method, str) and method.lower().endswith(".json")
    if recipe is None and isinstance(method, str | MethodSpec) and not is_file:
        spec = resolve_method(method, **options)  # a misspelt method is refused before a model is loaded
    question = Question.of(
        model,
        images,
        target,
        targets=targets,
        score=score,
        seed=seed,
        batch_size=batch_size,
        autocast=autocast,
        inputs=inputs,
    )
    if spec is None and (method is not None or recipe is not None):
        named = method.text if isinstance(method, MethodSpec) else method
        spec = resolve_method(method_text_for(question.model, named, recipe), **options)
    elif spec is None and options:
        spec = resolve_method(default_method(), **options)
    if spec is None:
        explanation = _explain_by_default(question, passes, layers=layers, by_head=by_head)
    else:
        spec = spec if passes is None else refined_spec(spec, passes)
        (explanation,) = maps_of_question(question, [spec], layers=layers, by_head=by_head, once=True).values()
    if seconds is None:
        return explanation
    first = explanation[:1].refine(seconds=seconds, batch_size=batch_size, autocast=autocast)
    if len(explanation) == 1:
        return first
    fitting = 0 if first.refinement is None else first.refinement.passes
    return explanation.refine(fitting, batch_size=batch_size, autocast=autocast)


def _explain_by_default(question: Question, passes: int | None, *, layers: bool, by_head: bool) -> Explanation:
    """Explain with the default method for this kind of model, or the first of its fallbacks that fits; notes say so."""

    def explain_by(spec: MethodSpec, structure: ModelStructure) -> Explanation:
        spec = spec if passes is None else refined_spec(spec, passes)
        known = structure if isinstance(question.images, Batch) else None
        comparison = maps_of_question(question, [spec], layers=layers, by_head=by_head, once=True, structure=known)
        (explanation,) = comparison.values()
        return explanation

    explanation, notes = run_by_default(question, explain_by)
    return replace(explanation, notes=(*explanation.notes, *notes)) if notes else explanation


def run_by_default(
    question: Question, run: Callable[[MethodSpec, ModelStructure], Value], *, skip: bool = False
) -> tuple[Value, tuple[str, ...]]:
    """Return what `run` makes of the default method for this kind of model, or of the first fallback that fits.

    Args:
        question: What is asked; its first image shows the model's structure, with `skip` the first that can be read.
        run: A function of a method and the structure; NotApplicable says that the method does not fit.
        skip: Leave out images that cannot be read.

    Returns:
        Its result, and notes on the choice where it is not the usual default.
    """
    model, images = question.readouts[0][0], question.images
    pixels = images.pixels if isinstance(images, Batch) else question.first_image(skip=skip).pixels
    structure = model_structure(model, pixels)
    notes = [
        f"{model.name} gives no gradient: {barrier.reason}." for barrier in structure.barriers[:1] if barrier.reason
    ]
    compares = kind_of_comparison(model, question.targets.items)
    items = defaults_for(structure, compares=compares)
    for item in items:
        try:
            result = run(item.spec, structure)
        except NotApplicable as error:
            if item is items[-1]:
                raise
            notes.append(f"The default {item.method} does not fit this model: {error}")
            continue
        break
    if item.method == default_method():
        return result, ()
    why = reason_for_default(item, structure, compares=compares)
    about = "target" if item.models in (COMPARED, CONTRASTED) else "kind of model"
    reason = f"{item.method} was used, the default for this {about}: {why}."
    if item.models != kind_of_model(structure, compares=compares):
        reason = f"{item.method} was used: {why}."
    return result, (*notes, reason)


@overload
def compare(
    model: ModelLike,
    images: Any,
    methods: str | Sequence[str | MethodSpec] | None = None,
    target: Any = None,
    *,
    targets: Sequence[Any] | None = None,
    score: str | None = None,
    seed: int = 0,
    layers: bool = False,
    skip: bool = False,
    batch_size: int | None = None,
    autocast: str | None = None,
    inputs: Mapping[str, Any] | None = None,
) -> Comparison: ...
@overload
def compare(
    model: list[Any] | tuple[Any, ...],
    images: Any,
    methods: str | Sequence[str | MethodSpec] | None = None,
    target: Any = None,
    *,
    targets: Sequence[Any] | None = None,
    score: str | None = None,
    seed: int = 0,
    layers: bool = False,
    skip: bool = False,
    batch_size: int | None = None,
    autocast: str | None = None,
    inputs: Mapping[str, Any] | None = None,
) -> ModelComparison: ...
def compare(
    model: ModelLike | list[Any] | tuple[Any, ...],
    images: Any,
    methods: str | Sequence[str | MethodSpec] | None = None,
    target: Any = None,
    *,
    targets: Sequence[Any] | None = None,
    score: str | None = None,
    seed: int = 0,
    layers: bool = False,
    skip: bool = False,
    batch_size: int | None = None,
    autocast: str | None = None,
    inputs: Mapping[str, Any] | None = None,
) -> Comparison | ModelComparison:
    """Run many methods on the same images: one forward pass, and one backward pass per rule table.

    Args:
        model: As in `explain`; or a list of models, each of which preprocesses the photos itself, predicts its own
            class and finds a class by its name.
        images: As in `explain`.
        methods: A list of method strings or specs; None is a panel of well-known ones; "all", alone or in the list, is
            every method that fits the model and is not slow.
        target: As in `explain`.
        targets: As in `explain`.
        score: As in `explain`.
        seed: The seed of everything random.
        layers: Keep the map of each layer in `.layers` of the explanations.
        skip: Leave out methods that do not fit the model and say why in `.skipped`; always so with "all".
        batch_size: As in `explain`.
        autocast: As in `explain`.
        inputs: As in `explain`.

    Returns:
        A `Comparison`: method string -> Explanation. A notebook shows it as a picture; `.save("all.png")` writes that.
        Of a list of models a `ModelComparison`: model name -> Comparison, where a method that does not fit a model is
        left out.

    Raises:
        BadInput: An image, target or option that cannot be used.
        UnknownName: A method, model, class or option that does not exist.
        NotApplicable: A method does not fit the model, or none of them, unless `skip` is set.

    Example:
        >>> import clairvit as cv
        >>> many = cv.compare("pets", "demo", ["rollout", "genatt+skipplus"])
        >>> list(many)
        ['rollout', 'genatt+skipplus']
    """
    if isinstance(model, list | tuple):
        from clairvit.methods.compare_models import compare_models

        how = {"score": score, "seed": seed, "layers": layers, "batch_size": batch_size, "autocast": autocast}
        return compare_models(model, images, methods, target, targets=targets, skip=skip, inputs=inputs, **how)
    listed = [ALL] if methods == ALL else list(DEFAULT_PANEL) if methods is None else methods
    if isinstance(listed, str) or not listed:
        raise BadInput(
            f"methods={methods!r} was given; expected a list of names such as ['rollout', 'legrad'], or 'all'."
        )
    specs = expand_all(listed)
    question = Question.of(
        model,
        images,
        target,
        targets=targets,
        score=score,
        seed=seed,
        batch_size=batch_size,
        autocast=autocast,
        inputs=inputs,
    )
    return maps_of_question(question, specs, layers=layers, skip=skip or ALL in listed)


def expand_all(methods: Sequence[str | MethodSpec]) -> list[MethodSpec]:
    """Return each method once, with "all" replaced by every method that is not slow, then ordered by family.

    Without "all" among them they are in the order given.
    """
    return ordered(map(resolve_method, without_all(methods)), by_families=ALL in methods)


def without_all(methods: Sequence[str | MethodSpec]) -> list[str | MethodSpec]:
    """Return the methods with the names of all that are not slow in place of "all"."""
    quick = [method.name for method in registered_methods() if not method.slow] if ALL in methods else []
    listed = (method if isinstance(method, MethodSpec) else str(method) for method in methods)
    return [name for method in listed for name in (quick if method == ALL else [method])]


def ordered(specs: Iterable[MethodSpec], *, by_families: bool) -> list[MethodSpec]:
    """Return each method once, by family or as they come."""
    once = list({spec.text: spec for spec in specs}.values())
    return [once[row] for row in by_family(spec.method.family for spec in once)] if by_families else once


@own_grad_mode()
def maps_of_question(
    question: Question,
    specs: Sequence[MethodSpec],
    *,
    layers: bool = False,
    by_head: bool = False,
    skip: bool = False,
    once: bool = False,
    structure: ModelStructure | None = None,
) -> Comparison:
    """Run methods on all images and join the maps of the runs: ordered by target, then by image.

    Args:
        question: What is asked.
        specs: The methods.
        layers: Keep the maps of single layers.
        by_head: Keep the maps of single heads.
        skip: Leave out methods that do not fit the model.
        once: Maps that are the same for every target are computed for the first one only.
        structure: The structure of the model for the first images, where it was found in this call.
    """
    unfit = misfits(specs, question.models, skip=skip)
    specs = [spec for spec in specs if spec.text not in unfit]
    replay = None if by_head else Replay(question.score, question.seed, layers)
    parts: list[_Part] = []
    if specs:
        with closing(iter_runs(question, specs, alone=True, structure=structure, replay=replay)) as runs:
            for run in runs:
                maps = _explain_run(run, specs, question.seed, layers=layers, by_head=by_head, skip=skip, once=once)
                parts.append(_Part(run.places, run.rows, maps, run.batch.names, run.batch.unusual))
                del run  # frees its recording before the next one is made
    comparison = parts[0].maps if len(parts) == 1 and isinstance(question.images, Batch) else _joined(parts, question)
    comparison.skipped |= unfit
    return comparison


@dataclass(frozen=True, eq=False)
class _Part:
    """The maps of a run, of some of the targets (by their places) and some of the images (by their rows)."""

    places: tuple[int, ...]
    rows: tuple[int, ...]
    maps: Comparison
    names: tuple[str, ...]
    unusual: tuple[UnusualRange, ...]


def _joined(parts: Sequence[_Part], question: Question) -> Comparison:
    """Join the maps of all runs, ordered by target, then by image; values that look wrong are in one note for all."""
    comparison = Comparison()
    if not parts:
        return comparison
    if all(len(models) == 1 for models in question.readouts):
        parts = sorted(parts, key=lambda part: part.places)
    comparison.cost = sum((part.maps.cost for part in parts), Cost())
    for part in parts:
        comparison.skipped |= part.maps.skipped
    unusual = {part.rows: [(item, part.names) for item in part.unusual] for part in parts}
    count = len({row for rows in unusual for row in rows})
    notes = unusual_notes([item for items in unusual.values() for item in items], count, question.model.preprocess)
    for text in parts[0].maps:
        if text in comparison.skipped:
            continue
        places = [
            (part.places[map_number // len(part.rows)], part.rows[map_number % len(part.rows)])
            for part in parts
            for map_number in range(len(part.maps[text]))
        ]
        order = sorted(range(len(places)), key=lambda position: places[position])
        explanation = concat([part.maps[text] for part in parts])[order]
        comparison[text] = replace(explanation, notes=(*notes, *explanation.notes))
    return comparison


def _explain_run(
    run: Run, specs: Sequence[MethodSpec], seed: int, *, layers: bool, by_head: bool, skip: bool, once: bool
) -> Comparison:
    """Run every method on one recorded batch, check the maps and collect them with what is known of them."""
    agnostic = once and not any(spec.method.class_specific for spec in specs)
    targets = run.targets[:1] if agnostic else run.targets
    heads = {spec.text: head_variants(spec, run.recording) for spec in specs} if by_head else {}
    by_text = {spec.text: spec for variants in heads.values() for spec in variants.values()}
    variants_and_specs = list((by_text | {spec.text: spec for spec in specs}).values())
    results, checks = run.run_all(variants_and_specs, targets, seed=seed, layers=layers or by_head)
    comparison = collect(run, specs, targets, results, checks, seed=seed, skip=skip)
    if run.named:
        _add_regions(run, comparison)
    for text, explanation in comparison.items():
        if not explanation.class_specific and (run.model.classifier or run.named is not None):
            comparison[text] = _for_any_class(explanation, run.targets if run.named is not None else ())
    for spec in specs if by_head else ():
        explanation, spec_heads = comparison[spec.text], collect_heads(spec, heads[spec.text], results)
        comparison[spec.text] = replace(
            explanation,
            layers=explanation.layers if layers else None,
            layer_grids=explanation.layer_grids if layers else (),
            heads=spec_heads,
            notes=(*explanation.notes, *head_notes(spec, spec_heads)),
        )
    return comparison


def _add_regions(run: Run, comparison: Comparison) -> None:
    """Add the part of each image that its target is about to explanations that depend on the target."""
    specific = [text for text, explanation in comparison.items() if explanation.class_specific]
    named, pixels = run.named or (), run.batch.pixels
    lists = [target for target in named if isinstance(target, list | tuple)]
    targets = [item for target in named for item in (target if isinstance(target, list | tuple) else [target])]
    if not specific or not any(isinstance(item, Target) for item in targets):
        return
    regions: list[tuple[int, Tensor | None]] = []
    with frozen_eval(run.model.module):
        for target in named:
            pairs = [(target, pixels)]
            if isinstance(target, list | tuple):
                pairs = [(item, pixels[row : row + 1]) for row, item in enumerate(target)]
            for item, images in pairs:
                regions.append((len(images), item.region(run.model, images) if isinstance(item, Target) else None))
    if all(region is None for _, region in regions):
        return
    empty = torch.zeros(1, *pixels.shape[-2:], dtype=torch.bool)
    joined = torch.cat([empty.expand(count, -1, -1) if region is None else region for count, region in regions])
    forwards = sum(item.region_forwards for item in targets if isinstance(item, Target))
    cost = Cost(forwards=math.ceil(forwards / len(pixels)) if lists else forwards)
    for text in specific:
        explanation = comparison[text]
        comparison[text] = replace(explanation, regions=joined, cost=explanation.cost + cost)
    comparison.cost += cost


def _for_any_class(explanation: Explanation, targets: Sequence[TargetBatch]) -> Explanation:
    """Return the explanation of a class-agnostic method: its map is evidence for no class, whatever was asked for."""
    names = dict.fromkeys(name for target in targets for name in target.names)
    about = f", so it says nothing of {' or '.join(names)} in particular" if len(names) <= MOST_NAMED and names else ""
    note = f"{explanation.method} is class-agnostic: its map is the same for every class{about}."
    count = len(explanation)
    return replace(
        explanation,
        targets=(ANY_CLASS,) * count,
        classes=(None,) * count if len(targets) > 1 else explanation.classes,
        probabilities=(None,) * count,
        score=NO_SCORE,
        notes=(*explanation.notes, *([note] if targets else [])),
    )
