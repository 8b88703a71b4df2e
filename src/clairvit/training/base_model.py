"""Start: the model that is fine-tuned, with a head for its classes, and what its file will have to say about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from clairvit.errors import BadInput
from clairvit.models.load import load
from clairvit.models.load_options import Request
from clairvit.models.preprocess import NOT_GIVEN, Preprocess, PreprocessOptions
from clairvit.models.sources import file as from_file
from clairvit.models.sources import timm as from_timm
from clairvit.models.sources import weights_header
from clairvit.models.sources.builtin import built_in_weights
from clairvit.models.sources.hub import fetching, hub_blocked
from clairvit.models.sources.registry import BUILT_IN, split


@dataclass(frozen=True, eq=False)
class Start:
    module: nn.Module
    arch: str  # timm's name
    options: Mapping[str, Any]  # beyond the number of classes and the image size
    own: Preprocess  # of the model before
    assumptions: tuple[str, ...] = ()  # about it
    pretrained: bool = False  # weights, apart from a new head, were trained before
    new_head: bool = True  # its weights were drawn from the seed


@dataclass(frozen=True)
class Wanted:
    """Which model is asked for."""

    spec: str  # timm:NAME or file:PATH
    pretrained: bool = True
    arch: str | None = None  # for file:PATH, where the file does not say it
    options: Mapping[str, Any] | None = None  # of timm's create_model
    size: tuple[int, int] | None = None
    preprocessing: PreprocessOptions = NOT_GIVEN


def begin(wanted: Wanted, classes: tuple[str, ...], seed: int) -> Start:
    """Weights that are not loaded (all, or the head's) are drawn from the seed; torch's own generator is used."""
    source, rest = split(wanted.spec)
    options = weights_header.check_options(wanted.options or {})
    torch.manual_seed(seed)
    if source == "timm":
        return _from_timm(wanted, rest, options, len(classes))
    if source == "file":
        if options:
            raise BadInput(f"'{wanted.spec}' has its shape already; expected no options of the model with a file.")
        return _from_file(wanted, rest, classes)
    if source in BUILT_IN:
        return _from_built_in(wanted, source, classes)
    raise BadInput(
        f"'{wanted.spec}' cannot be fine-tuned here; expected 'timm:NAME', 'file:PATH.safetensors', "
        f"or a built-in model ({', '.join(BUILT_IN)})."
    )


def _from_timm(wanted: Wanted, name: str, options: dict[str, Any], classes: int) -> Start:
    from_timm.check_name(name)

    def create() -> nn.Module:
        try:
            return from_timm.create(
                name, pretrained=wanted.pretrained, size=wanted.size, num_classes=classes, **options
            )
        except (TypeError, AssertionError) as error:
            raise BadInput(
                f"timm cannot make '{name}' with {dict(options)} ({error}); expected options that this model takes."
            ) from error

    if wanted.pretrained:
        local = name.startswith("local-dir:")
        with fetching(wanted.spec, None if local else hub_blocked(), local=local):
            module = create()
    else:
        module = create()
    preprocess = wanted.preprocessing.applied_to(from_timm.preprocess(module, wanted.size))
    return Start(module, _architecture(module, name), options, preprocess, pretrained=wanted.pretrained)


def _from_file(wanted: Wanted, rest: str, classes: tuple[str, ...]) -> Start:
    """A file that names these very classes keeps its head: training goes on."""
    request = Request(
        wanted.spec,
        rest,
        wanted.pretrained,
        arch=wanted.arch,
        size=wanted.size,
        preprocessing=wanted.preprocessing,
    )
    model = from_file.build(request)
    state, said = from_file.read_weights(Path(rest).expanduser(), wanted.spec)
    name = from_file.architecture(request, said)
    options = from_file.infer_options(name, state, said, wanted.spec)
    del options["num_classes"]
    new_head: Any = getattr(model.module, "reset_classifier", None)
    if new_head is None:
        raise BadInput(f"timm's '{name}' cannot be given a new head; expected a classifier, e.g. vit_base_patch16_224.")
    if model.labels != classes:
        new_head(len(classes))
    return Start(
        model.module,
        name,
        options,
        model.preprocess,
        model.assumptions,
        pretrained=wanted.pretrained,
        new_head=model.labels != classes,
    )


def _from_built_in(wanted: Wanted, name: str, classes: tuple[str, ...]) -> Start:
    """Start from a model inside this package: its weights are files for a timm architecture."""
    if wanted.options:
        raise BadInput(f"'{name}' has its shape already; expected no options of the model with a built-in one.")
    with built_in_weights(name) as (path, arch):
        start = _from_file(replace(wanted, arch=arch), str(path), classes)
    preprocess = load(name, pretrained=wanted.pretrained, size=wanted.size).preprocess
    return replace(start, own=wanted.preprocessing.applied_to(preprocess), assumptions=())


def _architecture(module: nn.Module, name: str) -> str:
    """Of a folder timm says what is in it."""
    config = getattr(module, "pretrained_cfg", None) or {}
    found = config.get("architecture") if ":" in name else None
    return str(found or name)
