"""The desk: the models that are served, the lanes that work for them, and the photos in memory."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn

from clairvit._version import __version__
from clairvit.errors import BadInput, UnknownName, did_you_mean
from clairvit.methods.explanation import Cost
from clairvit.methods.flow import Flow
from clairvit.methods.registry import FAMILIES, Method, by_family, list_methods
from clairvit.methods.spec import MethodSpec, resolve_method
from clairvit.models.model import Model
from clairvit.targets.base import class_name
from clairvit.tracing.recording import record
from clairvit.tracing.trace import Trace, run_backward
from clairvit.web.job_queue import JobQueue
from clairvit.web.schemas import Limits, MethodCard, MethodsReply, ModelCard, ModelsReply
from clairvit.web.uploads import MOST_BYTES, MOST_PIXELS, UploadStore

ALL = "all"
MOST_PASSES = 20_000  # of one request; what would take more is refused before it begins
LARGEST_OPTION = 10_000  # samples, steps, …: what memory is asked for grows with them
LARGEST = {"cells": 32}  # on a side, so memory grows with their square
QUICK_PASSES = 12  # forwards and backwards that a request of the quick lane may take in all, beside shared traces
FEW_METHODS = 4  # of a quick request
PLACES = {"photos": 8, "quick": 16, "longer": 6, "slow": 4}  # longer: many methods at once, and curves


@dataclass(frozen=True, eq=False)
class AppState:
    models: dict[str, dict[str, Model]]  # lane -> name -> model; the weights of a model are there once
    cards: tuple[ModelCard, ...]
    lanes: dict[str, JobQueue]
    photos: UploadStore
    seconds: float

    def model_name(self, asked: str | None) -> str:
        names = [card.name for card in self.cards]
        if asked is None:
            return names[0]
        if asked not in names:
            raise UnknownName(
                f"There is no model '{asked}' on this server; it has {', '.join(names)}.{did_you_mean(asked, names)}"
            )
        return asked

    def card(self, name: str) -> ModelCard:
        return next(card for card in self.cards if card.name == name)

    def about(self) -> ModelsReply:
        limits = Limits(upload_bytes=MOST_BYTES, pixels=MOST_PIXELS, seconds=self.seconds, passes=MOST_PASSES)
        return ModelsReply(version=__version__, models=list(self.cards), limits=limits)

    def close(self) -> None:
        for lane in self.lanes.values():
            lane.close()


def create_state(models: Sequence[Model], seconds: float = 120.0) -> AppState:
    """Look at each model once, so that the first request need not, and hand every lane its own."""
    if not models:
        raise BadInput("No models were given; expected at least one.")
    names = [model.name for model in models]
    if len({*names}) < len(names):
        raise BadInput(f"Two models have the same name: {', '.join(names)}; expected each once.")
    for model in models:
        model.module.requires_grad_(False).eval()
    every = {lane: {model.name: _twin(model) for model in models} for lane in PLACES if lane != "photos"}
    photos = UploadStore({model.name: model for model in models})
    cards = tuple(_card(model, photos) for model in every["quick"].values())
    lanes = {name: JobQueue(name, places, seconds) for name, places in PLACES.items()}
    return AppState(every, cards, lanes, photos, seconds)


def _twin(model: Model) -> Model:
    """The same weights in modules of their own: hooks and flags live on modules, and a trace visits one at a time."""
    shared = {id(tensor): tensor for tensor in (*model.module.parameters(), *model.module.buffers())}
    module: nn.Module = copy.deepcopy(model.module, shared)
    return replace(model, module=module)


def seen(model: Model, photos: UploadStore, mark: str) -> Trace:
    """A forward without gradients."""
    recording = record(model, photos.find(mark).pixels[model.name], differentiable=False)
    return run_backward(recording, None, None)


def _card(model: Model, photos: UploadStore) -> ModelCard:
    trace = seen(model, photos, "demo")
    calls = [layer.call for layer in trace.layers if layer.call is not None and layer.call.kind == "tokens"]
    heads = int(trace.layers[-1].A.shape[1]) if calls and len(calls) == len(trace.layers) else 0
    return ModelCard(
        name=model.name,
        labels=[class_name(model.labels, k) for k in range(trace.logits.shape[-1])] if model.classifier else [],
        size=(int(trace.pixels.shape[-2]), int(trace.pixels.shape[-1])),
        grid=trace.layout.grid,
        prefix=trace.layout.prefix,
        layers=len(trace.layers),
        heads=heads,
        activation=model.activation_of(trace.logits),
    )


def methods_reply() -> MethodsReply:
    found = list_methods()
    ordered = [found[place] for place in by_family(method.family for method in found)]
    families = list(dict.fromkeys(method.family for method in ordered))
    known = [family for family in FAMILIES if family in families]
    cards = [
        MethodCard(
            name=method.name,
            family=method.family,
            summary=method.summary,
            paper=method.paper,
            signed=method.signed and not method.relu,
            class_specific=method.class_specific,
            one_trace=is_one_trace(method),
            slow=method.slow,
            forwards=method.cost.forwards,
            backwards=method.cost.backwards,
            combinators=list(method.combinators),
        )
        for method in ordered
        if method.name not in _JOINS
    ]
    return MethodsReply(families=[*known, *(f for f in families if f not in known)], methods=cards)


_JOINS = ("smooth", "ensemble")  # they take other methods, so they are no choice in a list


def is_one_trace(method: Method) -> bool:
    return not method.slow and method.name not in _JOINS and method.own_cost(**method.options) == Cost()


def settle(texts: Sequence[str], patches: int, targets: int = 1) -> tuple[list[MethodSpec], str]:
    """The methods of a request, and the lane that it belongs to; work without end is refused here."""
    listed = [
        name
        for text in texts
        for name in ([m.name for m in list_methods() if is_one_trace(m)] if text.strip() == ALL else [text])
    ]
    specs = list({spec.text: spec for spec in map(resolve_method, listed)}.values())
    every = [one for spec in specs for one in (spec, *spec.members)]
    for one in every:
        for key, value in one.options:
            most = LARGEST.get(key, LARGEST_OPTION)
            if _is_above(value, most):
                raise BadInput(f"'{one.text}' asks for {key}={value}; expected at most {most} on this server.")
    own = sum((spec.own_cost(patches) for spec in specs), Cost())
    passes = max(targets, 1) * (own.forwards + own.backwards)
    if passes > MOST_PASSES:
        raise BadInput(
            f"This would take up to {passes:,} passes of the model; expected at most {MOST_PASSES:,} on this server: "
            "lower samples= or steps=, or use the command line."
        )
    if passes > QUICK_PASSES or any(one.method.slow or isinstance(one.aggregation, Flow) for one in every):
        return specs, "slow"
    return specs, "longer" if len(specs) > FEW_METHODS else "quick"


def _is_above(value: object, most: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not abs(value) <= most  # NaN is, too
