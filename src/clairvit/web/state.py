"""The state of the server: models, job queues and uploads; which queue a request belongs to."""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from clairvit._cost import Cost
from clairvit._version import __version__
from clairvit.errors import BadInput, NotApplicable, UnknownName, did_you_mean
from clairvit.methods.calibrated import calibrated_spec, calibration_by_hash
from clairvit.methods.explain import explain
from clairvit.methods.flow import Flow
from clairvit.methods.plain_language import plain_language, plain_words
from clairvit.methods.recipe import read_recipe
from clairvit.methods.recommended import defaults_for, recommended_methods
from clairvit.methods.registry import Method, by_family, list_methods
from clairvit.methods.spec import MethodSpec, resolve_method
from clairvit.models.image_files import register_heif
from clairvit.models.images import Batch
from clairvit.models.model import Model
from clairvit.option_types import local_paths
from clairvit.targets.base import class_name
from clairvit.tracing.module_state import frozen_eval
from clairvit.tracing.recording import record
from clairvit.tracing.structure import model_structure
from clairvit.tracing.trace import Trace, run_backward
from clairvit.web.job_queue import JobQueue
from clairvit.web.result_cache import ResultCache
from clairvit.web.schemas import (
    DEFAULT,
    Limits,
    MethodCard,
    MethodsResponse,
    ModelCard,
    ModelsResponse,
    OptionCard,
    RecommendationCard,
)
from clairvit.web.uploads import MAX_BYTES, MAX_PIXELS, UploadStore

ALL = "all"
BASELINE = "baseline"  # the family of the controls
MAX_PASSES = 20_000  # of one request; larger ones are refused
MAX_OPTION = 10_000  # samples, steps, …: memory grows with them
MAX_OPTIONS = {"cells": 32}  # per side, so memory grows with their square
QUICK_PASSES = 12  # forwards and backwards of a quick request, without the shared trace
QUICK_METHODS = 4
# Jobs per queue; long: many methods, checks and curves. Eight quick jobs of 0.13 s wait for about a second; a client
# that finds no place is told when to try again.
CAPACITIES = {"uploads": 8, "quick": 8, "long": 6, "slow": 4}


@dataclass(frozen=True, eq=False)
class AppState:
    """Models, job queues and uploads of a server."""

    models: dict[str, dict[str, Model]]  # queue -> name -> model; the queues share the weights
    cards: tuple[ModelCard, ...]
    queues: dict[str, JobQueue]
    uploads: UploadStore
    time_limit: float  # seconds per request
    recipes: tuple[MethodSpec, ...] = ()  # calibrated methods that the server was started with
    results: ResultCache = field(default_factory=ResultCache)

    def model_name(self, requested: str | None) -> str:
        """Return the name of the requested model, the first one by default; raise UnknownName."""
        names = [card.name for card in self.cards]
        if requested is None:
            return names[0]
        if requested not in names:
            raise UnknownName(
                f"There is no model '{requested}' on this server; it has {', '.join(names)}."
                f"{did_you_mean(requested, names)}"
            )
        return requested

    def card(self, name: str) -> ModelCard:
        """Return the description of a model."""
        return next(card for card in self.cards if card.name == name)

    def resolve(self, texts: Sequence[str], model: str, targets: int = 1) -> tuple[list[MethodSpec], str]:
        """Return the methods of a request, 'default' being that of the model, and the queue that it belongs to."""
        card = self.card(model)
        rows, columns = card.grid
        named = [card.default_method if text.strip() == DEFAULT else text for text in texts]
        return resolve_request(named, rows * columns, targets)

    def models_response(self) -> ModelsResponse:
        """Return the models and the limits of this server."""
        limits = Limits(
            upload_bytes=MAX_BYTES,
            pixels=MAX_PIXELS,
            seconds=self.time_limit,
            passes=MAX_PASSES,
            heic=register_heif(),
        )
        return ModelsResponse(version=__version__, models=list(self.cards), limits=limits)

    def close(self) -> None:
        """Close all queues."""
        for queue in self.queues.values():
            queue.close()


def create_state(models: Sequence[Model], time_limit: float = 300.0, recipes: Sequence[str] = ()) -> AppState:
    """Trace each model once to describe it, and give every queue its own modules around the same weights.

    `recipes` are files of calibrated methods; requests name them by the text that the list of methods gives.
    """
    calibrated = tuple(_calibrated(file) for file in recipes)
    if not models:
        raise BadInput("No models were given; expected at least one.")
    names = [model.name for model in models]
    if len({*names}) < len(names):
        raise BadInput(f"Two models have the same name: {', '.join(names)}; expected each once.")
    for model in models:
        model.module.requires_grad_(False).eval()
    by_queue = {
        queue: {model.name: _with_shared_weights(model) for model in models}
        for queue in CAPACITIES
        if queue != "uploads"
    }
    uploads = UploadStore({model.name: model for model in models})
    cards = tuple(_card(model, uploads) for model in by_queue["quick"].values())
    queues = {name: JobQueue(name, capacity, time_limit) for name, capacity in CAPACITIES.items()}
    return AppState(by_queue, cards, queues, uploads, time_limit, calibrated)


def _calibrated(file: str) -> MethodSpec:
    """Return the calibrated method of a recipe, named by its file without the folder."""
    calibration = read_recipe(file).calibration
    if calibration is None:
        raise BadInput(
            f"'{file}' is a recipe without weights; expected one of `clairvit calibrate`. A method that `choose` named "
            "is on the page already."
        )
    return calibrated_spec(calibration, re.sub(r"[^A-Za-z0-9_.\-]", "_", Path(file).name))


def _with_shared_weights(model: Model) -> Model:
    """Return a copy with the same tensors: hooks and flags belong to modules, and queues trace at the same time."""
    shared = {id(tensor): tensor for tensor in (*model.module.parameters(), *model.module.buffers())}
    module: nn.Module = copy.deepcopy(model.module, shared)
    return replace(model, module=module)


def trace_photo(model: Model, uploads: UploadStore, photo: str) -> Trace:
    """Return the trace of a forward without gradients."""
    recording = record(model, uploads.find(photo).pixels[model.name], differentiable=False)
    return run_backward(recording, None, None)


def _card(model: Model, uploads: UploadStore) -> ModelCard:
    trace = trace_photo(model, uploads, "demo")
    calls = [layer.call for layer in trace.layers if layer.call is not None and layer.call.kind == "tokens"]
    heads = int(trace.layers[-1].A.shape[1]) if calls and len(calls) == len(trace.layers) else 0
    return ModelCard(
        name=model.name,
        labels=[class_name(model.labels, k) for k in range(trace.logits.shape[-1])] if model.classifier else [],
        size=(int(trace.pixels.shape[-2]), int(trace.pixels.shape[-1])),
        grid=trace.layout.plane,
        prefix=trace.layout.prefix,
        layers=len(trace.layers),
        heads=heads,
        activation=model.activation_of(trace.logits),
        reads_prompts=model.text_encoder is not None,
        default_method=_default_method(model, trace.pixels),
        seconds=_forward_seconds(model, trace.pixels),
    )


def _default_method(model: Model, pixels: Tensor) -> str:
    """Return the default method for this kind of model, or the first of its fallbacks that fits.

    A model without classes has no score to explain: there it is the first method that needs none.
    """
    if model.classifier:
        candidates = [item.method for item in defaults_for(model_structure(model, pixels))]
    else:
        recommended = [item.method for item in recommended_methods()]
        quick = [method.name for method in list_methods() if is_one_trace(method) and method.family != BASELINE]
        candidates = [text for text in (*recommended, *quick) if not resolve_method(text).method.class_specific]
    for text in candidates:
        if resolve_method(text).method.slow:
            return text
        try:
            return explain(model, Batch(pixels, ("demo",), single=True), text).method
        except NotApplicable:
            continue  # the next one
    raise BadInput(
        f"{model.name} has no class names, and no method without them fits it; expected a model with classes: load it "
        "with labels=[…]."
    )


def _forward_seconds(model: Model, pixels: Tensor) -> float:
    """Return the seconds per photo of a forward pass of eight: the shortest of three, as the first ones load libraries.

    Methods that make many passes make them in batches.
    """
    batch = pixels.expand(8, *pixels.shape[1:]).to(model.device, model.dtype)
    times = []
    with frozen_eval(model.module), torch.no_grad():
        for _ in range(3):
            started = time.perf_counter()
            model.logits(batch).sum().item()  # waits for a GPU
            times.append(time.perf_counter() - started)
    return min(times) / len(batch)


def methods_response(recipes: Sequence[MethodSpec] = ()) -> MethodsResponse:
    """Return every method, ordered by family, and the calibrated ones of this server."""
    registered = [*list_methods(), *(replace(spec.method, name=spec.text) for spec in recipes)]
    ordered = [registered[row] for row in by_family(method.family for method in registered)]
    backwards = {spec.text: spec.backwards for spec in recipes}
    cards = [
        MethodCard(
            name=method.name,
            title=plain_language(method.name).title,
            sentence=plain_language(method.name, method.summary).sentence,
            also=list(plain_language(method.name).also),
            control=method.family == BASELINE,
            family=method.family,
            summary=method.summary,
            paper=method.paper,
            signed=method.signed and not method.relu,
            class_specific=method.class_specific,
            one_trace=is_one_trace(method) and method.name not in backwards,
            slow=method.slow,
            forwards=method.cost.forwards,
            backwards=backwards.get(method.name, method.cost.backwards),
            options=[
                OptionCard(name=option.name, default=str(option.default), allowed=option.allowed, meaning=option.doc)
                for option in method.option_list
            ],
            combinators=list(method.combinators),
        )
        for method in ordered
        if method.name not in _COMBINING
    ]
    return MethodsResponse(
        recommended=[
            RecommendationCard(title=words.title, sentence=words.sentence, **asdict(item))
            for item in recommended_methods()
            for words in [plain_words(resolve_method(item.method))]
        ],
        families=list(dict.fromkeys(method.family for method in ordered)),
        methods=cards,
    )


_COMBINING = ("smooth", "shift", "ensemble")  # they take other methods, so they cannot be chosen from a list


def is_one_trace(method: Method) -> bool:
    """Return whether a method needs one forward and backward only."""
    return not method.slow and method.name not in _COMBINING and method.own_cost(**method.options) == Cost()


def resolve_request(texts: Sequence[str], patches: int, targets: int = 1) -> tuple[list[MethodSpec], str]:
    """Return the methods of a request and the queue that it belongs to; raise BadInput if it is too expensive."""
    names = [
        name
        for text in texts
        for name in ([m.name for m in list_methods() if is_one_trace(m)] if text.strip() == ALL else [text])
    ]
    for name in names:
        for recipe in re.finditer(r"\.json(?:#([0-9a-f]+))?", name, re.IGNORECASE):  # requests open no files
            if recipe[1] is None or calibration_by_hash(recipe[1].lower()) is None:
                raise UnknownName(
                    f"'{name}' names a recipe that this server has not read; expected one that it was started with "
                    "(`clairvit serve --recipe mine.json`), by the name that its list of methods gives."
                )
    specs = list({spec.text: spec for spec in map(resolve_method, names)}.values())
    with_members = [member for spec in specs for member in (spec, *spec.members)]
    for member in with_members:
        for key in local_paths(member.method.function, dict(member.options)):
            raise BadInput(
                f"'{member.text}' names files by {key}=; this server reads no files of its own for others. Leave {key} "
                "out, or use the command line."
            )
        for key, value in member.options:
            limit = MAX_OPTIONS.get(key, MAX_OPTION)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if is_number and not abs(value) <= limit:  # NaN exceeds it too
                raise BadInput(f"'{member.text}' asks for {key}={value}; expected at most {limit} on this server.")
    cost = sum((spec.own_cost(patches) for spec in specs), Cost())
    passes = max(targets, 1) * (cost.forwards + cost.backwards)
    if passes > MAX_PASSES:
        raise BadInput(
            f"This would take up to {passes:,} passes of the model; expected at most {MAX_PASSES:,} on this server: "
            "lower samples= or steps=, or use the command line."
        )
    is_slow = any(member.method.slow or isinstance(member.aggregation, Flow) for member in with_members)
    if passes > QUICK_PASSES or is_slow:
        return specs, "slow"
    return specs, "long" if len(specs) > QUICK_METHODS else "quick"
