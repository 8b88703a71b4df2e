"""Base model: the model that is fine-tuned, with a head for the classes and the metadata of its file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from clairvit.errors import BadInput
from clairvit.models.load import load
from clairvit.models.load_options import LoadOptions
from clairvit.models.preprocess import NOT_GIVEN, Preprocess, PreprocessOptions
from clairvit.models.sources import file as from_file
from clairvit.models.sources import timm as from_timm
from clairvit.models.sources import weights_header
from clairvit.models.sources.builtin import built_in_weights
from clairvit.models.sources.hub import fetching, hub_blocked
from clairvit.models.sources.registry import BUILT_IN, split_name


@dataclass(frozen=True)
class ModelRequest:
    """Which model is fine-tuned."""

    spec: str  # timm:NAME, file:PATH or a built-in name
    pretrained: bool = True
    arch: str | None = None  # for file:PATH, if the file does not name it
    options: Mapping[str, Any] | None = None  # of timm's create_model
    size: tuple[int, int] | None = None
    preprocessing: PreprocessOptions = NOT_GIVEN


@dataclass(frozen=True, eq=False)
class BaseModel:
    """A loaded model with a head for the classes."""

    module: nn.Module
    arch: str  # timm's name
    options: Mapping[str, Any]  # besides the number of classes and the image size
    preprocess: Preprocess  # of the model before training
    assumptions: tuple[str, ...] = ()  # about the preprocessing
    pretrained: bool = False  # all weights but those of a new head were trained before
    new_head: bool = True  # its weights were drawn from the seed


def load_base_model(request: ModelRequest, classes: tuple[str, ...], seed: int) -> BaseModel:
    """Load a model; weights that are not loaded (all, or the head's) are drawn from torch's generator with `seed`.

    Raises:
        BadInput: If the model cannot be fine-tuned, or the options do not fit it.
    """
    source, name = split_name(request.spec)
    options = weights_header.check_options(request.options or {})
    torch.manual_seed(seed)  # noqa: TID251 - layers initialise themselves from it
    if source == "timm":
        return _from_timm(request, name, options, len(classes))
    if source == "file":
        if options:
            raise BadInput(f"'{request.spec}' has its shape already; expected no options of the model with a file.")
        return _from_file(request, name, classes)
    if source in BUILT_IN:
        return _from_built_in(request, source, classes)
    raise BadInput(
        f"'{request.spec}' cannot be fine-tuned here; expected 'timm:NAME', 'file:PATH.safetensors', "
        f"or a built-in model ({', '.join(BUILT_IN)})."
    )


def _from_timm(request: ModelRequest, name: str, options: dict[str, Any], classes: int) -> BaseModel:
    from_timm.check_name(name)

    def create() -> nn.Module:
        try:
            return from_timm.create(
                name, pretrained=request.pretrained, size=request.size, num_classes=classes, **options
            )
        except (TypeError, AssertionError) as error:
            raise BadInput(
                f"timm cannot make '{name}' with {dict(options)} ({error}); expected options that this model takes."
            ) from error

    if request.pretrained:
        local = name.startswith("local-dir:")
        with fetching(request.spec, None if local else hub_blocked(), local=local):
            module = create()
    else:
        module = create()
    preprocess = request.preprocessing.applied_to(from_timm.preprocess(module, request.size))
    return BaseModel(module, _architecture(module, name), options, preprocess, pretrained=request.pretrained)


def _from_file(request: ModelRequest, path: str, classes: tuple[str, ...]) -> BaseModel:
    """Load a file; if it names the same classes it keeps its head, so that training continues."""
    file_request = LoadOptions(
        request.spec,
        path,
        request.pretrained,
        arch=request.arch,
        size=request.size,
        preprocessing=request.preprocessing,
    )
    model = from_file.build(file_request)
    state, metadata = from_file.read_weights(Path(path).expanduser(), request.spec)
    name = from_file.architecture(file_request, metadata)
    options = from_file.infer_options(name, state, metadata, request.spec)
    del options["num_classes"]
    reset_classifier: Any = getattr(model.module, "reset_classifier", None)
    if reset_classifier is None:
        raise BadInput(f"timm's '{name}' cannot be given a new head; expected a classifier, e.g. vit_base_patch16_224.")
    new_head = model.labels != classes
    if new_head:
        reset_classifier(len(classes))
    return BaseModel(
        model.module,
        name,
        options,
        model.preprocess,
        model.assumptions,
        pretrained=request.pretrained,
        new_head=new_head,
    )


def _from_built_in(request: ModelRequest, name: str, classes: tuple[str, ...]) -> BaseModel:
    """Load a model of this package: its weights are files for a timm architecture."""
    if request.options:
        raise BadInput(f"'{name}' has its shape already; expected no options of the model with a built-in one.")
    with built_in_weights(name) as (path, arch):
        base = _from_file(replace(request, arch=arch), str(path), classes)
    preprocess = load(name, pretrained=request.pretrained, size=request.size).preprocess
    return replace(base, preprocess=request.preprocessing.applied_to(preprocess), assumptions=())


def _architecture(module: nn.Module, name: str) -> str:
    """Return timm's name of the architecture; for a hub or a folder it is in the config."""
    config = getattr(module, "pretrained_cfg", None) or {}
    architecture = config.get("architecture") if ":" in name else None
    return str(architecture or name)
