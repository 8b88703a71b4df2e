"""The verbs `explain` and `compare`: run methods on images and return explanations; traces are shared."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from clairvit._cost import Cost
from clairvit._rng import check_seed
from clairvit.errors import Argument, BadInput, NotApplicable
from clairvit.execution import ExecutionOptions
from clairvit.methods.collect import checks_of_maps, collect
from clairvit.methods.cuda_graphs import GRAPHS, PassesRequest
from clairvit.methods.explanation import Comparison, Explanation, concat
from clairvit.methods.heads import collect_heads, head_notes, head_variants
from clairvit.methods.planner import misfits, record_for, run_all
from clairvit.methods.recipe import method_text_for
from clairvit.methods.recommended import DefaultMethod, default_method, defaults_for, kind_of_model, reason_for_default
from clairvit.methods.registry import by_family
from clairvit.methods.registry import list_methods as registered_methods
from clairvit.methods.spec import MethodSpec, resolve_method
from clairvit.models.coerce import LabelledImages, ModelLike, model_and_images
from clairvit.models.images import Batch, UnusualRange, image_name, prepare, prepare_part, unusual_notes
from clairvit.models.model import Model
from clairvit.models.state_hash import state_hash
from clairvit.targets.base import ANY_CLASS, NO_SCORE, Target, TargetBatch, class_agnostic_target
from clairvit.targets.resolve import readout_models, resolve_for
from clairvit.tracing.module_state import frozen_eval, own_grad_mode
from clairvit.tracing.structure import ModelStructure, model_structure

if TYPE_CHECKING:
    from clairvit.methods.recipe import Recipe

MOST_NAMED = 6  # targets that a note lists
CHUNK_SIZE = {"cpu": 8, "cuda": 32}  # images of a data set that are explained together
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
            the scores [B, C] -> [B], or any other `cv.Target`: what a module returns besides class scores is read by
            `cv.Output(function)`. A list holds one target per image.
        targets: Several targets for each image: a list of what `target` accepts. The maps are ordered by target, then
            by image.
        recipe: The recipe, or its file, that a method such as "focusvit(m=auto)" reads its start layer from.
        score: logit, prob or logprob. None is what the method is meant for: the logit, or the probability for most
            perturbation methods, where the model has one (`Model.activation`).
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
    """
    method = str(method) if isinstance(method, MethodSpec) else method
    default = method is None and recipe is None
    if recipe is None and isinstance(method, str) and not method.lower().endswith(".json"):
        resolve_method(method, **options)  # a misspelt method is refused before a model is loaded
    model, images = model_and_images(model, images, inputs)
    text = default_method() if default else method_text_for(model, method, recipe)
    request = _Request(
        model,
        (resolve_method(text, **options),),
        _target_list(target, targets),
        score,
        check_seed(seed),
        layers,
        ExecutionOptions.from_caller(batch_size, autocast),
        by_head=by_head,
        once=True,
    )
    run = _explain_by_default if default and not options else _explain_images
    return next(iter(_explain_readouts(request, images, run).values()))


def _explain_by_default(request: _Request, images: Any) -> Comparison:
    """Explain with the default method for this kind of model, or the first of its fallbacks that fits; notes say so."""
    if isinstance(images, LabelledImages):
        first = None if images.first is None else prepare_part([images.first], request.model)
    else:
        images = first = prepare(images, request.model)
    if first is None:
        raise BadInput("The data set has no images; expected at least one.")
    structure = model_structure(request.model, first.pixels)
    notes = [
        f"{request.model.name} gives no gradient: {barrier.reason}."
        for barrier in structure.barriers[:1]
        if barrier.reason
    ]
    *preferred, last = defaults_for(structure)
    if first is images:
        request = replace(request, structure=structure)
    for item in preferred:
        try:
            (explanation,) = _explain_images(replace(request, specs=(resolve_method(item.method),)), images).values()
        except NotApplicable as error:
            notes.append(f"The default {item.method} does not fit this model: {error}")
        else:
            return _with_default_notes(explanation, item, structure, notes)
    (explanation,) = _explain_images(replace(request, specs=(resolve_method(last.method),)), images).values()
    return _with_default_notes(explanation, last, structure, notes)


def _with_default_notes(
    explanation: Explanation, item: DefaultMethod, structure: ModelStructure, notes: Sequence[str]
) -> Comparison:
    """Return the explanation with the reason for its method, unless it is the usual one."""
    if item.method != default_method():
        why = reason_for_default(item, structure)
        reason = f"{item.method} was used, the default for this kind of model: {why}."
        if item.models != kind_of_model(structure):
            reason = f"{item.method} was used: {why}."
        explanation = replace(explanation, notes=(*explanation.notes, *notes, reason))
    comparison = Comparison()
    comparison[explanation.method], comparison.cost = explanation, explanation.cost
    return comparison


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
) -> Comparison:
    """Run many methods on the same images: one forward pass, and one backward pass per rule table.

    Args:
        model: As in `explain`.
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

    Raises:
        BadInput: An image, target or option that cannot be used.
        UnknownName: A method, model, class or option that does not exist.
        NotApplicable: A method does not fit the model, unless `skip` is set.

    Example:
        >>> import clairvit as cv
        >>> many = cv.compare("pets", "demo", ["rollout", "genatt+skipplus"])
        >>> list(many)
        ['rollout', 'genatt+skipplus']
    """
    listed = [ALL] if methods == ALL else list(DEFAULT_PANEL) if methods is None else methods
    if isinstance(listed, str) or not listed:
        raise BadInput(
            f"methods={methods!r} was given; expected a list of names such as ['rollout', 'legrad'], or 'all'."
        )
    specs = {spec.text: spec for spec in map(resolve_method, expand_all(listed))}
    model, images = model_and_images(model, images, inputs)
    request = _Request(
        model,
        tuple(specs.values()),
        _target_list(target, targets),
        score,
        check_seed(seed),
        layers,
        ExecutionOptions.from_caller(batch_size, autocast),
        skip=skip or ALL in listed,
    )
    return _explain_readouts(request, images, _explain_images)


def expand_all(methods: Sequence[str | MethodSpec]) -> list[str]:
    """Return the method strings with "all" replaced by every method that is not slow, then ordered by family.

    Without "all" among them they stay as they are, in the order given.
    """
    if ALL not in methods:
        return [str(method) for method in methods]
    quick = [method.name for method in registered_methods() if not method.slow]
    listed = list(dict.fromkeys(name for text in methods for name in (quick if text == ALL else [str(text)])))
    return [listed[i] for i in by_family(resolve_method(text).method.family for text in listed)]


@dataclass(frozen=True, eq=False)
class _Request:
    """The arguments of `explain` and `compare`, checked."""

    model: Model
    specs: tuple[MethodSpec, ...]
    targets: tuple[Any, ...] | None  # each is for all images, or a list with one per image; None: predicted class
    score: str | None
    seed: int
    layers: bool
    execution: ExecutionOptions
    by_head: bool = False
    skip: bool = False
    once: bool = False  # maps that are the same for every target are computed for the first one only
    structure: ModelStructure | None = None  # of the model for these images, where it was found in this call


def _target_list(target: Any, targets: Sequence[Any] | None) -> tuple[Any, ...] | None:
    """Return the targets of each image; None where the predicted class is explained."""
    if targets is None:
        return None if target is None else (target,)
    if target is not None:
        raise BadInput(
            "target= and targets= were given; expected one of them: target= for one target per image, targets=[…] for "
            "several."
        )
    if isinstance(targets, str) or (not isinstance(targets, Sequence | Tensor) and not hasattr(targets, "tolist")):
        raise BadInput(
            f"targets={targets!r} was given; expected a list of targets, each explained for every image. For one "
            "target pass target=."
        )
    listed = tuple(targets.tolist() if hasattr(targets, "tolist") else targets)
    if not listed:
        raise BadInput("An empty list of targets was given; name at least one, or leave it out for the prediction.")
    return listed


def _explain_readouts(request: _Request, images: Any, run: Callable[[_Request, Any], Comparison]) -> Comparison:
    """Explain targets by the model whose scores they are about: one run for those that read the same output.

    Targets of single images that read different outputs (a region of each image) are explained image by image.
    """
    targets = request.targets or (None,)
    if request.model.has_input_rows:
        return _explain_singly(request, images, run)
    models = [readout_models(request.model, target) for target in targets]
    if all(len(readouts) == 1 for readouts in models):
        if all(readouts[0] is models[0][0] for readouts in models):
            return run(replace(request, model=models[0][0]), images)
        requests = [
            replace(request, model=readouts[0], targets=(target,))
            for target, readouts in zip(targets, models, strict=True)
        ]
        return _concat_comparisons([run(part, images) for part in requests])
    return _explain_singly(request, images, run)


def _explain_singly(request: _Request, images: Any, run: Callable[[_Request, Any], Comparison]) -> Comparison:
    """Explain images one by one, each with its own target and its own row of the model's further inputs."""
    if not isinstance(images, LabelledImages):
        images = prepare(images, request.model)
    request.model.check_input_rows(len(images))
    comparisons = []
    for row in range(len(images)):
        model = request.model.for_row(row)
        targets = request.targets
        if targets is not None:
            own = tuple(_target_rows(target, range(row, row + 1), images) for target in targets)
            targets = tuple(target[0] if isinstance(target, list) else target for target in own)
        comparisons.append(
            _explain_readouts(replace(request, model=model, targets=targets), _single_image(images, row, model), run)
        )
    if not comparisons:
        raise BadInput("The data set has no images; expected at least one.")
    return _concat_comparisons(comparisons, [1] * len(comparisons))


def _single_image(images: LabelledImages | Batch, row: int, model: Model) -> Batch:
    """Return one image as a batch, under its name among all images."""
    if isinstance(images, LabelledImages):
        batch = prepare(images[row : row + 1], model)
        given = tuple(image_name(image, row) for image in images[row : row + 1])
        return replace(batch, names=given)
    return replace(images, pixels=images.pixels[row : row + 1], names=images.names[row : row + 1])


def _explain_images(request: _Request, images: Any) -> Comparison:
    """Explain images in one batch, or a data set chunk by chunk; leave out what was fitted to another model."""
    skipped = misfits(request.specs, request.model, skip=request.skip)
    fitting = tuple(spec for spec in request.specs if spec.text not in skipped)
    comparison = _explain_chunks(replace(request, specs=fitting), images) if fitting else Comparison()
    comparison.skipped |= skipped
    return comparison


def _explain_chunks(request: _Request, images: Any) -> Comparison:
    if not isinstance(images, LabelledImages):
        return _explain_batch(request, prepare(images, request.model))
    if images.first is None:
        raise BadInput("The data set has no images; expected at least one.")
    size = CHUNK_SIZE.get(request.model.device.type, 8)
    parts: list[Comparison] = []
    sizes: list[int] = []
    unusual: list[tuple[UnusualRange, Sequence[str]]] = []
    for items, names in images.chunks(size):
        chunk_request = request
        if request.targets is not None:
            rows = range(sum(sizes), sum(sizes) + len(items))
            targets = tuple(_target_rows(target, rows, images) for target in request.targets)
            chunk_request = replace(request, targets=targets)
        batch = replace(prepare_part(items, request.model), names=names)
        parts.append(_explain_batch(chunk_request, batch))
        sizes.append(len(items))
        unusual += [(item, names) for item in batch.unusual]
    comparison = _concat_comparisons(parts, sizes)
    notes = unusual_notes(unusual, sum(sizes), request.model.preprocess)
    for text, explanation in comparison.items():
        comparison[text] = replace(explanation, notes=(*notes, *explanation.notes))
    return comparison


def _target_rows(target: Any, rows: range, images: Sized) -> Any:
    """Return the target of some images: the same for all, or these entries of a list with one per image."""
    listed = target.tolist() if hasattr(target, "tolist") else target
    if not isinstance(listed, list | tuple):
        return target
    if len(listed) != len(images):  # an iterator is read to its end
        raise BadInput(f"{len(listed)} targets were given for {len(images)} images; expected one for each.")
    return [listed[row] for row in rows]


def _concat_comparisons(parts: Sequence[Comparison], sizes: Sequence[int] | None = None) -> Comparison:
    """Join the comparisons of chunks of `sizes` images; maps are ordered by target, then by image.

    Without sizes each part holds all images, for a target of its own.
    """
    comparison = Comparison()
    for part in parts:
        comparison.skipped |= part.skipped
    comparison.cost = sum((part.cost for part in parts), Cost())
    for text in parts[0]:
        if text in comparison.skipped:
            continue
        explanations = [part[text] for part in parts]
        if sizes is None:
            comparison[text] = concat(explanations)
            continue
        targets = len(explanations[0]) // sizes[0]
        starts = [sum(map(len, explanations[:i])) for i in range(len(parts))]
        order = [
            start + target * size + row
            for target in range(targets)
            for start, size in zip(starts, sizes, strict=True)
            for row in range(size)
        ]
        comparison[text] = concat(explanations)[order]
    return comparison


@own_grad_mode()
def _explain_batch(request: _Request, batch: Batch) -> Comparison:
    """Run every method on one batch: record once, run all, check and collect the maps."""
    model, specs = request.model, request.specs
    started = time.perf_counter()
    passes = _capturable_passes(request, batch.pixels)
    replayed = None if passes is None else GRAPHS.replay(passes)
    if replayed is None:
        recording = record_for(specs, model, batch.pixels, request.execution, request.structure)
        weights_hash = state_hash(model.module, recording.structure.weights)
    else:
        recording, weights_hash = replayed.recording, replayed.weights_hash()
    on_host = Tensor.cpu if replayed is None else replayed.on_host
    resolved = _resolve_targets(request, recording.logits.detach() if replayed is None else on_host(recording.logits))
    agnostic = request.once and not any(spec.method.class_specific for spec in specs)
    goals = resolved[:1] if agnostic else resolved
    heads = {spec.text: head_variants(spec, recording) for spec in specs} if request.by_head else {}
    if passes is None or replayed is None:
        by_text = {spec.text: spec for variants in heads.values() for spec in variants.values()}
        runs = list((by_text | {spec.text: spec for spec in specs}).values())
        results = run_all(runs, recording, goals, seed=request.seed, layers=request.layers or request.by_head)
        if passes is not None:
            GRAPHS.count(passes, goals[0], recording, results)
        checks = checks_of_maps(results)
    else:
        results, checks = replayed.results, replayed.checks
    seconds = time.perf_counter() - started
    comparison = collect(
        model,
        batch,
        recording,
        specs,
        goals,
        results,
        request.seed,
        seconds,
        weights_hash,
        checks=checks,
        on_host=on_host,
        skip=request.skip,
    )
    _add_regions(request, batch.pixels, comparison)
    for text, explanation in comparison.items():
        if not explanation.class_specific and (model.classifier or request.targets is not None):
            comparison[text] = _for_any_class(explanation, resolved if request.targets is not None else ())
    for spec in specs if request.by_head else ():
        explanation, spec_heads = comparison[spec.text], collect_heads(spec, heads[spec.text], results)
        comparison[spec.text] = replace(
            explanation,
            layers=explanation.layers if request.layers else None,
            heads=spec_heads,
            notes=(*explanation.notes, *head_notes(spec, spec_heads)),
        )
    return comparison


def _capturable_passes(request: _Request, pixels: Tensor) -> PassesRequest | None:
    """Return the passes of a batch if a CUDA graph could serve them: for one class target, of a classifier."""
    targets = request.targets or (None,)
    label = targets[0]
    if request.by_head or len(targets) > 1 or isinstance(label, bool) or not isinstance(label, int | str | None):
        return None
    score = "logit" if request.score is None else request.score
    passes = PassesRequest(request.model, request.specs, pixels, label, score, request.seed, request.layers)
    return passes if passes.is_capturable else None


def _add_regions(request: _Request, pixels: Tensor, comparison: Comparison) -> None:
    """Add the part of each image that its target is about to explanations that depend on the target."""
    asking = [text for text, explanation in comparison.items() if explanation.class_specific]
    items = [item for target in request.targets or () for item in (target if _is_list(target) else [target])]
    if not asking or not any(isinstance(item, Target) for item in items):
        return
    with frozen_eval(request.model.module):
        regions = _target_regions(request, pixels)
    if regions is None:
        return
    forwards = sum(item.region_forwards for item in items if isinstance(item, Target))
    listed = any(_is_list(target) for target in request.targets or ())
    cost = Cost(forwards=math.ceil(forwards / len(pixels)) if listed else forwards)
    for text in asking:
        explanation = comparison[text]
        comparison[text] = replace(explanation, regions=regions, cost=explanation.cost + cost)
    comparison.cost += cost


def _target_regions(request: _Request, pixels: Tensor) -> Tensor | None:
    """Return the part of each image that its target is about, bool [targets · B, H, W]; None if there is none."""
    parts: list[tuple[int, Tensor | None]] = []
    for target in request.targets or ():
        pairs = [(target, pixels)]
        if _is_list(target):
            pairs = [(item, pixels[row : row + 1]) for row, item in enumerate(target)]
        for item, images in pairs:
            parts.append((len(images), item.region(request.model, images) if isinstance(item, Target) else None))
    if all(region is None for _, region in parts):
        return None
    empty = torch.zeros(1, *pixels.shape[-2:], dtype=torch.bool)
    return torch.cat([empty.expand(count, -1, -1) if region is None else region for count, region in parts])


def _is_list(target: Any) -> bool:
    return isinstance(target, list | tuple)


def _resolve_targets(request: _Request, logits: Tensor) -> tuple[TargetBatch, ...]:
    """Return the targets of each image as functions of the logits [B, C]."""
    model = request.model
    if request.targets is None and not model.classifier:
        return _no_target(model, request.specs, len(logits))
    return tuple(resolve_for(model, target, logits, score=request.score)[0] for target in request.targets or (None,))


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


def _no_target(model: Model, specs: Sequence[MethodSpec], count: int) -> tuple[TargetBatch, ...]:
    """Return an empty target for an embedding, which has no predicted class; raise if a method needs one."""
    asking = next((spec for spec in specs if spec.method.class_specific), None)
    if asking is None:
        return (class_agnostic_target(count),)
    raise BadInput(
        f"{model.name} returns an embedding, not class scores, and '{asking.text}' explains a score. Load it with ",
        Argument("labels", ["a photo of a cat", ...]),
        ", or pass a target function of the output.",
    )
