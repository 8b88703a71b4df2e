"""The verbs `explain` and `compare`: images and method names in, explanations out, traces shared."""

from __future__ import annotations

import functools
import platform
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from clairvit.data.hashing import state_hash
from clairvit.errors import BadInput, ClairError, ClairWarning
from clairvit.methods.executor import Result
from clairvit.methods.explanation import Cost, Explanation
from clairvit.methods.heads import gathered, remark, variants
from clairvit.methods.planner import record_for, run_all
from clairvit.methods.recipe import advised
from clairvit.methods.registry import by_family, shared_cost
from clairvit.methods.registry import list_methods as registered_methods
from clairvit.methods.spec import MethodSpec, resolve_method
from clairvit.models.images import Batch, prepare
from clairvit.models.model import Model
from clairvit.perturbation.batching import execution_options
from clairvit.perturbation.rng import check_seed
from clairvit.targets.target import Target, resolve
from clairvit.tracing.module_state import own_grad_mode
from clairvit.tracing.recording import Recording

if TYPE_CHECKING:
    from clairvit.methods.recipe import Recipe


ANY_CLASS = "any class"  # the target of a class-agnostic map
NO_SCORE = "none"  # what it explains
MOST_NAMED = 6  # targets that a note lists


class Comparison(dict[str, Explanation]):
    """Method string -> Explanation, with what was left out and what it all cost."""

    def __init__(self) -> None:
        super().__init__()
        self.skipped: dict[str, str] = {}  # method string -> why it does not fit this model
        self.cost = Cost()  # of everything together: traces are shared

    def __missing__(self, text: str) -> Explanation:
        """Keys are canonical; the method as it was typed finds its map too."""
        canonical = resolve_method(text).text
        if canonical not in self:
            raise KeyError(text)
        return self[canonical]

    def __repr__(self) -> str:
        left_out = f", {len(self.skipped)} left out" if self.skipped else ""
        return f"Comparison({', '.join(self)}{left_out})"

    def save(self, path: str | PathLike[str], **display: Any) -> Path:
        """Write by suffix: .png/.pdf/.svg/.jpg all methods side by side, .json the records, .npz the raw maps."""
        from clairvit.plotting.save import save_comparison

        return save_comparison(self, Path(path), **display)

    def _repr_png_(self) -> bytes:
        """Return the picture that a notebook shows for a cell that ends with the comparison."""
        from clairvit.plotting.save import comparison_png

        return comparison_png(self)


def explain(
    model: Model,
    images: Any,
    method: str | PathLike[str] | Recipe | None = None,
    target: Any = None,
    *,
    recipe: str | PathLike[str] | Recipe | None = None,
    score: str | None = None,
    seed: int = 0,
    layers: bool = False,
    by_head: bool = False,
    batch_size: int | None = None,
    autocast: str | None = None,
    **options: Any,
) -> Explanation:
    """One method on one image or a batch; legrad if none is named. A recipe, which `cv.choose` makes, names one too.

    `score` is logit, prob or logprob; None is what the method is meant for: the logit, or the probability for most
    perturbation methods, where the model has one (`Model.activation`), else the score itself. `batch_size` bounds how
    many perturbed images are in one pass (None: chosen by size, halved when memory runs out) and `autocast`
    ("bfloat16") lets those passes be rougher and faster.

    cv.explain(model, "cat.jpg")                                     # predicted class
    cv.explain(model, "cat.jpg", "rollout", fusion="max")            # method options as keywords
    cv.explain(model, ["a.jpg", "b.jpg"], "ixg+plus", target=["Bengal", "Beagle"])
    cv.explain(model, "two.jpg", target=["Bengal", "Beagle"])        # one image, a list: one map for each target
    cv.explain(model, "cat.jpg", "rollout", layers=True, by_head=True)   # .layers and .heads, from the same trace
    cv.explain(model, "cat.jpg", "lime", samples=2000, removal="blur")   # .standard_error
    cv.explain(model, "cat.jpg", "recipe.json")                      # what was best for this model
    cv.explain(model, "cat.jpg", "focusvit(m=auto)", recipe="recipe.json")
    """
    spec = resolve_method(advised(model, method, recipe), **options)
    with execution_options(batch_size, autocast):
        found = _explain_all(model, images, [spec], target, score, seed, layers, skip=False, by_head=by_head, once=True)
    return next(iter(found.values()))


# What `compare` shows when no methods are named: the best known of each family
DEFAULT_PANEL = (
    *("raw-attention", "rollout", "grad-rollout", "attcam", "genatt", "gmar-l1", "legrad", "focusvit", "attcat"),
    *("attnlrp", "decompx+skipplus"),
)
ALL = "all"


def compare(
    model: Model,
    images: Any,
    methods: str | Sequence[str] | None = None,
    target: Any = None,
    *,
    score: str | None = None,
    seed: int = 0,
    layers: bool = False,
    skip: bool = False,
    batch_size: int | None = None,
    autocast: str | None = None,
) -> Comparison:
    """Run many methods on the same images: one forward, and one backward per rule table.

    Args:
        methods: A list of method strings; None is a panel of well-known ones; "all", alone or in the list, is every
            method that fits the model and is not slow.
        skip: Leave out methods that do not fit the model and say why in `.skipped`; always so with "all".
        target, score, seed, layers, batch_size, autocast: As in `explain`.

    Returns:
        A Comparison: method string -> Explanation. A notebook shows it as a picture; `.save("all.png")` writes that.

    Example:
        >>> many = cv.compare(model, "cat.jpg", ["rollout", "legrad"])
    """
    listed = [methods] if methods == ALL else list(DEFAULT_PANEL) if methods is None else methods
    if isinstance(listed, str) or not listed:
        raise BadInput(
            f"methods={methods!r} was given; expected a list of names such as ['rollout', 'legrad'], or 'all'."
        )
    skip = skip or ALL in listed
    specs = [resolve_method(text) for text in expand_all(listed)]
    with execution_options(batch_size, autocast):
        return _explain_all(model, images, specs, target, score, seed, layers, skip=skip)


def expand_all(texts: Sequence[str]) -> list[str]:
    """Return the method strings with "all" replaced by every method that is not slow, then ordered by family.

    Without "all" among them they stay as they are, in the order given.
    """
    if ALL not in texts:
        return list(texts)
    quick = [method.name for method in registered_methods() if not method.slow]
    listed = list(dict.fromkeys(name for text in texts for name in (quick if text == ALL else [text])))
    return [listed[place] for place in by_family(resolve_method(text).method.family for text in listed)]


@own_grad_mode()
def _explain_all(
    model: Model,
    images: Any,
    specs: list[MethodSpec],
    target: Any,
    score: str | None,
    seed: int,
    layers: bool,
    *,
    skip: bool,
    by_head: bool = False,
    once: bool = False,
) -> Comparison:
    """`once`: maps that are the same for every target are made for the first one only."""
    specs = list({spec.text: spec for spec in specs}.values())
    seed = check_seed(seed)
    batch = prepare(images, model)
    started = time.perf_counter()
    recording = record_for(specs, model, batch.pixels)
    targets = (
        resolve(
            target,
            recording.logits.detach(),
            model.labels,
            score=score,
            classifier=model.classifier,
            single=batch.single,
            activation=model.activation,
        )
        if model.classifier or target is not None
        else _no_target(model, specs, len(batch.pixels))
    )
    asked = tuple(targets)
    if once and not any(spec.method.class_specific for spec in specs):
        targets = targets[:1]
    heads = {spec.text: variants(spec, recording) for spec in specs} if by_head else {}
    by_text = {spec.text: spec for own in heads.values() for spec in own.values()}
    wanted = list((by_text | {spec.text: spec for spec in specs}).values())
    results = run_all(wanted, recording, targets, seed=seed, layers=layers or by_head)
    seconds = time.perf_counter() - started
    found = _collect(model, batch, recording, specs, targets, results, seed, seconds, skip=skip)
    for text, made in found.items():
        if not made.class_specific and model.classifier:
            found[text] = _of_any_class(made, asked if target is not None else ())
    for spec in specs if by_head else ():
        made, own = found[spec.text], gathered(spec, heads[spec.text], results)
        kept = made.layers if layers else None
        found[spec.text] = replace(made, layers=kept, heads=own, notes=(*made.notes, *remark(spec, own)))
    return found


def _of_any_class(made: Explanation, asked: Sequence[Target]) -> Explanation:
    """Return the explanation of a class-agnostic method: its map is evidence for no class, whatever was `asked`."""
    several = len(asked) > 1
    names = dict.fromkeys(name for goal in asked for name in goal.names)
    about = f", so it says nothing of {' or '.join(names)} in particular" if len(names) <= MOST_NAMED and names else ""
    note = f"{made.method} is class-agnostic: its map is the same for every class{about}."
    return replace(
        made,
        targets=(ANY_CLASS,) * len(made),
        classes=(None,) * len(made) if several else made.classes,
        probabilities=(None,) * len(made),
        score=NO_SCORE,
        notes=(*made.notes, *([note] if asked else [])),
    )


def _no_target(model: Model, specs: list[MethodSpec], count: int) -> tuple[Target, ...]:
    """An embedding has no predicted class; methods that do not ask for one can still be run."""
    asking = next((spec for spec in specs if spec.method.class_specific), None)
    if asking is None:
        return (Target(names=(ANY_CLASS,) * count, classes=(None,) * count, score=NO_SCORE),)
    raise BadInput(
        f"{model.name} returns an embedding, not class scores, and '{asking.text}' explains a score. "
        "Load it with labels=['a photo of a cat', …], or pass a target function of the output.",
        parameters={"labels": "a photo of a cat,…"},
    )


def _collect(
    model: Model,
    batch: Batch,
    recording: Recording,
    specs: list[MethodSpec],
    targets: Sequence[Target],
    results: dict[str, list[Result]],
    seed: int,
    seconds: float,
    *,
    skip: bool,
) -> Comparison:
    found = Comparison()
    found.cost = Cost(recording.forwards, recording.backwards, seconds)
    logits = recording.logits.detach().repeat(len(targets), 1)
    pixels = batch.pixels if len(targets) == 1 else batch.pixels.repeat(len(targets), 1, 1, 1)
    names = tuple(name for goal in targets for name in goal.names)
    classes = tuple(index for goal in targets for index in goal.classes)
    activation = model.activation_of(logits)
    chances = model.probabilities(logits)
    probabilities = tuple(
        None if index is None or chances is None or not model.classifier else float(chances[row, index])
        for row, index in enumerate(classes)
    )
    alone = sum(result.seconds for group in results.values() for result in group)
    activated = (f"{model.name}: {model.activation_reason}",) if model.activated else ()
    weights = state_hash(model.module)
    facts = _facts({text: [result.maps for result in own] for text, own in results.items()})
    for spec in specs:
        own = results[spec.text]
        refused = next((result.error for result in own if result.error is not None), None)
        if refused is not None:
            if not skip:
                raise refused
            found.skipped[spec.text] = str(refused)
            continue
        image_names = batch.names * len(targets)
        maps, signed, notes = _checked_maps(spec, own, facts[spec.text], image_names, len(recording.inputs))
        has_layers = all(result.layers is not None for result in own)
        spent = sum(result.seconds for result in own)
        shared = Cost(shared_cost(spec.passes).forwards, len(targets) * spec.backwards)
        passes = sum((result.more for result in own), shared)
        found[spec.text] = Explanation(
            maps=maps,
            method=spec.text,
            signed=signed,
            targets=names,
            classes=classes,
            score=own[0].score or targets[0].score,
            logits=logits,
            probabilities=probabilities,
            pixels=pixels,
            names=image_names,
            model=model.name,
            labels=model.labels,
            preprocess=model.preprocess,
            weights_hash=weights,
            seed=seed,
            cost=passes + Cost(seconds=seconds - alone + spent, own_seconds=spent),
            standard_error=_of_all([result.standard_error for result in own]),
            chosen=_of_all([result.chosen for result in own]),
            layers=torch.cat([_stored(result.layers) for result in own], 1) if has_layers else None,
            family=spec.method.family,
            class_specific=spec.method.class_specific,
            classifier=model.classifier,
            activation=activation,
            notes=(*batch.notes, *notes, *activated),
            versions=versions(),
        )
    return found


# maps [B, …]; for each: all finite, any not 0, any below 0, more than one value
Facts = tuple[Tensor, list[bool], list[bool], list[bool], list[bool]]
ROUNDINGS = 16  # a map whose values differ by no more than so many roundings of the largest one is constant


def _facts(found: dict[str, list[Tensor | None]]) -> dict[str, Facts]:
    """What is known of each method's maps of all targets; asked of all of one shape at once, for a GPU's sake."""
    stored = {
        text: torch.cat([_stored(maps) for maps in own])
        for text, own in found.items()
        if all(m is not None for m in own)
    }
    facts: dict[str, Facts] = {}
    for kind in {(maps.shape, maps.dtype, maps.device) for maps in stored.values()}:
        texts = [text for text, maps in stored.items() if (maps.shape, maps.dtype, maps.device) == kind]
        flat = torch.stack([stored[text] for text in texts]).flatten(2)  # [methods, B, n]
        answers = torch.stack([flat.isfinite().all(2), flat.any(2), (flat < 0).any(2), varies(flat)], 1).tolist()
        facts |= {text: (stored[text], *answer) for text, answer in zip(texts, answers, strict=True)}
    return facts


def varies(maps: Tensor) -> Tensor:
    """Return for maps [..., n] whether their values differ by more than rounding: max - min > 16 eps max |map|.

    A map of a single cell counts as varying: there is nothing that it could say.
    """
    spread = maps.amax(-1) - maps.amin(-1)
    rounding = ROUNDINGS * torch.finfo(maps.dtype).eps * maps.abs().amax(-1)
    return (spread > rounding) | (maps.shape[-1] == 1)


def _checked_maps(
    spec: MethodSpec, own: list[Result], facts: Facts, names: tuple[str, ...], count: int
) -> tuple[Tensor, bool, tuple[str, ...]]:
    """The maps of all targets, and whether they have a sign; NaN is an error, zero and constant maps get a warning."""
    maps, finite, some, negative, varying = facts
    broken = [name for name, fine in zip(names, finite, strict=True) if not fine]
    if broken:
        raise ClairError(
            f"'{spec.text}' gave NaN or infinity for {', '.join(broken)}; expected finite numbers. "
            "Run the model in float32 (cv.load(…, dtype=torch.float32)) and check its weights."
        )
    notes = (*(spec.notes(count) if count else ()), *(note for result in own for note in result.notes))
    blank = [nothing for result in own for nothing in result.blank]
    silent = [name for name, nothing in zip(names, blank, strict=True) if nothing]
    empty = [name for name, anything, nothing in zip(names, some, blank, strict=True) if not (anything or nothing)]
    no_gradient = "no gradient reaches the tokens (a head of zeros?)"
    if spec.method.family == "perturbation" or not spec.cost.backwards:
        no_gradient = "the score stays the same whatever is removed (a head of zeros? an image of one colour?)"
    warned = []
    if silent:
        warned.append(f"{spec.text}: the map of {', '.join(silent)} does not speak of the target: {no_gradient}")
    if empty:
        why = spec.method.zero_reason or (no_gradient if spec.method.class_specific else "nothing to show")
        if spec.relu:
            why = "its ReLU keeps what speaks for the target, and nothing does; relu=False shows the signed map"
        warned.append(f"{spec.text}: the map of {', '.join(empty)} is zero everywhere: {why}")
    flat = [
        name
        for name, varied, anything, nothing in zip(names, varying, some, blank, strict=True)
        if anything and not (varied or nothing)
    ]
    if flat and spec.method.family != "baseline":
        warned.append(
            f"{spec.text}: the map of {', '.join(flat)} is the same everywhere, up to rounding, so it says nothing "
            "about places"
        )
    for note in warned:
        warnings.warn(note, ClairWarning, stacklevel=6)  # the line of the user who called a verb
    # Heads that are mixed after the softmax (CaiT) can make even an attention map negative.
    return maps, (spec.method.signed and not spec.relu) or any(negative), (*notes, *warned)


def _of_all(found: Sequence[Tensor | None]) -> Tensor | None:
    """What a method said of each target beside its maps, together."""
    said = [one.detach() for one in found if one is not None]
    if not said or len(said) < len(found):
        return None
    return torch.cat([one if one.dtype == torch.bool else _stored(one) for one in said])


def _stored(maps: Tensor | None) -> Tensor:
    """float32, or float64 for a float64 model."""
    assert maps is not None
    return maps.detach() if maps.dtype == torch.float64 else maps.detach().float()


@functools.cache
def versions() -> dict[str, str]:
    """What a result depends on."""
    found = {"python": platform.python_version()}
    for package in ("clairvit", "torch", "timm", "torchvision", "transformers", "open_clip_torch"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue  # an extra that is not installed
    return found
