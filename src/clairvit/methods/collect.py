"""Turn the results of runs into explanations: check the maps, warn of empty ones, count the passes."""

from __future__ import annotations

import functools
import platform
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from clairvit._cost import Cost
from clairvit._rows import join_rows
from clairvit.errors import ClairError, ClairWarning, user_stacklevel
from clairvit.methods.executor import Result
from clairvit.methods.explanation import Comparison, Explanation, Origin, TextRelevance
from clairvit.methods.spec import MethodSpec
from clairvit.models.activation import activation_for, probabilities
from clairvit.models.images import named_images
from clairvit.models.model import Model
from clairvit.models.readout import readout_text
from clairvit.targets.base import TargetBatch

if TYPE_CHECKING:
    from clairvit.methods.runs import Run

HALF_DIGITS = {torch.float16: 3, torch.bfloat16: 2}  # decimal digits of half precision
ROUNDINGS = 16  # a map whose values differ by no more than so many roundings of the largest one is constant


def collect(
    run: Run,
    specs: Sequence[MethodSpec],
    targets: Sequence[TargetBatch],
    results: dict[str, list[Result]],
    checks: Sequence[MapChecks],
    *,
    seed: int,
    skip: bool,
) -> Comparison:
    """Return an explanation per method; one that does not fit the model is raised, or with `skip` left out.

    Args:
        run: The recorded batch.
        specs: The methods.
        targets: The targets that the methods were run for: those of the run, or the first of them.
        results: Method text -> one result per target.
        checks: Those of the maps of all results.
        seed: The seed of everything random.
        skip: Leave methods out that do not fit the model.
    """
    seconds = time.perf_counter() - run.started
    model, batch, recording = run.model, run.batch, run.recording
    count, logits = len(targets), recording.logits.detach()
    repeated, names = logits.repeat(count, 1), batch.names * count
    classes = tuple(index for target in targets for index in target.classes)
    by_row = [target.by_row(recording.logits) for target in targets]
    class_probabilities = probabilities(run.logits.cpu().repeat(count, 1), model.activation)
    activated = (f"{model.name}: {model.activation_reason}",) if model.activated else ()
    about_model = (*activated, *recording.structure.notes, *_model_notes(model, batch.notes))
    # Marks on a device, which methods share, and the properties of maps are read once each.
    marks = {id(r.unmoved): r.unmoved for group in results.values() for r in group}
    unmoved = {key: listed.tolist() if isinstance(listed, Tensor) else listed for key, listed in marks.items()}
    properties = {
        text: MapProperties(*lists)
        for check in checks
        for text, lists in zip(check.texts, check.answers.tolist(), strict=True)
    }
    shared_seconds = seconds - sum(result.seconds for group in results.values() for result in group)
    common: dict[str, Any] = {  # rows are images within targets
        "targets": tuple(name for target in targets for name in target.names),
        "classes": classes,
        "logits": repeated,
        "probabilities": _of_classes(class_probabilities if model.classifier else None, classes),
        "pixels": batch.pixels if count == 1 else batch.pixels.repeat(count, *(1,) * (batch.pixels.ndim - 1)),
        "names": names,
        "model": model.name,
        "labels": model.labels,
        "preprocess": model.preprocess,
        "seed": seed,
        "classifier": model.classifier,
        "activation": activation_for(model.activation, logits.shape[-1]),
        "weights": run.weights_hash,
        "versions": versions(),
        "origin": Origin.of(model, by_row[0] if count == 1 else TargetBatch.concat(by_row)),
    }
    about_targets = tuple(dict.fromkeys(note for target in targets for note in target.notes))
    text = readout_text(model.module)  # whose tokens have relevance too
    comparison = Comparison()
    comparison.cost = Cost(recording.forwards, recording.backwards, seconds)
    for spec in specs:
        of_targets = results[spec.text]
        error = next((result.error for result in of_targets if result.error is not None), None)
        if error is not None:
            if not skip:
                raise error
            comparison.skipped[spec.text] = str(error)
            continue
        checked = properties[spec.text]
        rows_unmoved = [is_unmoved for result in of_targets for is_unmoved in unmoved[id(result.unmoved)]]
        notes = _checked_notes(spec, of_targets, checked, rows_unmoved, names, len(recording.inputs))
        maps = _stored([result.maps for result in of_targets])
        assert maps is not None
        of_text = _stored([result.other_tokens for result in of_targets]) if text else None
        own_seconds = sum(result.seconds for result in of_targets)
        passes = sum((result.own_cost for result in of_targets), Cost(1, count * spec.backwards))
        comparison[spec.text] = Explanation(
            **common,
            maps=maps,
            method=spec.text,
            # Heads that are mixed after the softmax (CaiT) can make even an attention map negative.
            signed=(spec.method.signed and not spec.relu) or any(checked.negative),
            score=of_targets[0].score or targets[0].score,
            cost=passes + Cost(seconds=shared_seconds + own_seconds, own_seconds=own_seconds),
            standard_error=_stored([result.standard_error for result in of_targets]),
            chosen=_stored([result.chosen for result in of_targets]),
            refinement=join_rows([result.refinement for result in of_targets]),
            layers=_stored([result.layers for result in of_targets], axis=1),
            layer_grids=of_targets[0].layer_grids,
            text_relevance=() if of_text is None else tuple(TextRelevance(text, row) for row in of_text),
            family=spec.method.family,
            class_specific=spec.method.class_specific,
            notes=(
                *batch.notes,
                *recording.notes,
                *(about_targets if spec.method.class_specific else ()),
                *notes,
                *about_model,
            ),
        )
    return comparison


def _model_notes(model: Model, notes: Sequence[str]) -> list[str]:
    """Return notes that half precision rounds maps, and that a softmax was assumed.

    The second is for a model whose user has not described it at all, as the notes on its images say.
    """
    about_model, dtype = [], model.dtype
    if dtype in HALF_DIGITS:
        kind, digits = str(dtype).removeprefix("torch."), HALF_DIGITS[dtype]
        about_model.append(f"{model.name} runs in {kind}, about {digits} digits: small relevances are rounding noise.")
    if model.assumes_classes and set(notes) & set(model.assumptions):
        about_model.append(
            "A softmax was assumed: one class per image. If several can be right at once, give activation='sigmoid'."
        )
    return about_model


def _of_classes(values: Tensor | None, classes: Sequence[int | None]) -> tuple[float | None, ...]:
    """Return the probability of each row's class; None where there is no class or no probability."""
    if values is None:
        return (None,) * len(classes)
    rows = [row for row, index in enumerate(classes) if index is not None]
    of_rows = iter(values[rows, [index for index in classes if index is not None]].tolist() if rows else ())
    return tuple(None if index is None else next(of_rows) for index in classes)


@dataclass(frozen=True, eq=False)
class MapProperties:
    """What a warning depends on, for each of the B maps of one method."""

    finite: list[bool]
    nonzero: list[bool]
    negative: list[bool]
    varying: list[bool]


@dataclass(frozen=True, eq=False)
class MapChecks:
    """The properties of maps of one shape on their device, where they can be computed without waiting for it."""

    texts: tuple[str, ...]  # of the methods
    answers: Tensor  # bool [methods, 4, B]: the fields of `MapProperties`


def checks_of_maps(results: dict[str, list[Result]]) -> list[MapChecks]:
    """Return the checks of all maps; those of one shape are made together."""
    joined = {text: _stored([result.maps for result in group]) for text, group in results.items()}
    stored = {text: maps for text, maps in joined.items() if maps is not None}
    checks = []
    for kind in {(maps.shape, maps.dtype, maps.device): None for maps in stored.values()}:
        texts = [text for text, maps in stored.items() if (maps.shape, maps.dtype, maps.device) == kind]
        flat = torch.stack([stored[text] for text in texts]).flatten(2)  # [methods, B, n]
        answers = torch.stack([flat.isfinite().all(2), flat.any(2), (flat < 0).any(2), varies(flat)], 1)
        checks.append(MapChecks(tuple(texts), answers))
    return checks


def varies(maps: Tensor) -> Tensor:
    """Return for maps [..., n] whether their values differ by more than rounding: max - min > 16 eps max |map|.

    A map of a single cell counts as varying: it has no other cell to differ from.
    """
    spread = maps.amax(-1) - maps.amin(-1)
    rounding = ROUNDINGS * torch.finfo(maps.dtype).eps * maps.abs().amax(-1)
    return (spread > rounding) | (maps.shape[-1] == 1)


def _checked_notes(
    spec: MethodSpec,
    runs: Sequence[Result],
    checked: MapProperties,
    unmoved: Sequence[bool],
    names: Sequence[str],
    layers: int,
) -> tuple[str, ...]:
    """Return the notes of a method's maps; raise for NaN.

    Warn of maps that do not depend on the target, that are zero, and that are constant.
    """
    broken = [name for name, finite in zip(names, checked.finite, strict=True) if not finite]
    if broken:
        raise ClairError(
            f"'{spec.text}' gave NaN or infinity for {', '.join(broken)}; expected finite numbers. {_nan_advice(spec)}"
        )
    notes = [*(spec.notes(layers) if layers else ()), *(note for result in runs for note in result.note_texts())]

    rows = list(zip(names, checked.nonzero, checked.varying, unmoved, strict=True))
    independent = [name for name, _, _, is_unmoved in rows if is_unmoved]
    zero = [name for name, nonzero, _, is_unmoved in rows if not (nonzero or is_unmoved)]
    constant = [name for name, nonzero, varying, is_unmoved in rows if nonzero and not (varying or is_unmoved)]
    warned = []
    if independent:
        which = named_images(independent)
        warned.append(f"{spec.text}: the map of {which} does not depend on the target: {_unmoved_reason(spec)}")
    if zero:
        why = spec.method.caveats.zero_reason
        why = why or _zero_reason(spec)
        if spec.relu:
            why = "its ReLU keeps what speaks for the target, and nothing does; relu=False shows the signed map"
        warned.append(f"{spec.text}: the map of {named_images(zero)} is zero everywhere: {why}")
    if constant and spec.method.family != "baseline":
        warned.append(
            f"{spec.text}: the map of {named_images(constant)} is the same everywhere, up to rounding, so it says "
            "nothing about places"
        )
    for note in warned:
        warnings.warn(note, ClairWarning, stacklevel=user_stacklevel())
    return (*notes, *warned)


def _nan_advice(spec: MethodSpec) -> str:
    """Return what to do about NaN: a method from outside the package is looked at first."""
    function = spec.method.function
    if function.__module__.partition(".")[0] != "clairvit":
        return (
            "Look at the method's function first: is there a division by zero, or a logarithm or root of what may be 0 "
            "or negative? A built-in method, such as genatt, shows whether the model itself gives finite numbers."
        )
    return "Run the model in float32 (cv.load(…, dtype=torch.float32)) and check its weights."


def _unmoved_reason(spec: MethodSpec) -> str:
    """Return why a map may not depend on the target."""
    if spec.method.family == "perturbation" or not spec.cost.backwards:
        return "the score stays the same whatever is removed (a head of zeros? an image of one colour?)"
    return "no gradient reaches the tokens (a head of zeros?)"


def _zero_reason(spec: MethodSpec) -> str:
    """Return why a map may be zero of a target that the model's answer depends on."""
    if not spec.method.class_specific:
        return "nothing to show"
    if spec.passes == "backward":
        return "gradients reach the tokens, but its formula keeps nothing of them (ReLUs, products with zeros)"
    return _unmoved_reason(spec)


def _stored(tensors: Sequence[Tensor | None], axis: int = 0) -> Tensor | None:
    """Return the tensors of all targets concatenated, in float32 or wider, bool as it is; None if one is missing."""
    stored = []
    for tensor in tensors:
        if tensor is None:
            return None
        kept = tensor.dtype in (torch.float64, torch.bool)
        stored.append(tensor.detach() if kept else tensor.detach().float())
    return stored[0] if len(stored) == 1 else torch.cat(stored, axis)


@functools.cache
def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that a result depends on."""
    versions_by_package = {"python": platform.python_version()}
    for package in ("clairvit", "torch", "timm", "torchvision", "transformers", "open_clip_torch"):
        try:
            versions_by_package[package] = version(package)
        except PackageNotFoundError:
            continue  # an extra that is not installed
    return versions_by_package
