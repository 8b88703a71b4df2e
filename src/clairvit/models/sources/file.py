"""`file:PATH`: weights on disk for a timm architecture. The file itself says how many classes and which image size.

What `clairvit finetune` writes says more: architecture and options, labels and preprocessing are notes in its header.
"""

from __future__ import annotations

import dataclasses
import math
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clairvit.errors import BadInput, ModelUnavailable, did_you_mean
from clairvit.models import notes
from clairvit.models.model import Model, Preprocess
from clairvit.models.preprocess import assumption, for_size
from clairvit.models.request import Request, read_labels, seeded
from clairvit.models.sources import timm as from_timm

State = dict[str, Tensor]
SUFFIXES = (".safetensors", ".pth", ".pt", ".bin")
_WRAPPINGS = ("state_dict_ema", "model_ema", "state_dict", "model")  # where training scripts put the weights
_PREFIXES = ("module.", "_orig_mod.", "model.", "backbone.")


def build(request: Request) -> Model:
    path = Path(request.rest).expanduser()
    state, said = read_weights(path, request.spec)
    name = architecture(request, said)
    options = infer_options(name, state, said, request.spec)
    stated = notes.preprocess(said, request.spec)
    size = request.size or stated.get("size") or infer_size(name, state)
    with seeded():  # the file fills every tensor, so this only keeps the user's random numbers undisturbed
        module = from_timm.create(name, pretrained=False, size=size, **options)
    if request.pretrained:
        fit(module, state, request.spec, name)
    classes = int(options["num_classes"])
    stated_labels = notes.labels(said, request.spec, classes) if classes else None
    labels = request.labels or read_labels(beside(path)) or stated_labels
    settled = Request(request.spec, name, request.pretrained, labels=labels, size=size)
    model = from_timm.describe(module, settled)
    activation = notes.activation(said, request.spec, options["num_classes"]) if model.classifier else None
    if activation is not None:
        model = dataclasses.replace(model, activation=activation, activation_reason="the weights file states it")
    preprocess = request.preprocessing.applied_to(_as_stated(model.preprocess, stated))
    absent = [one for one in request.preprocessing.missing() if one not in stated]
    source = f"timm's for {name}, because '{path.name}' does not say"
    assumed = assumption(absent, preprocess, source) if request.pretrained else ()
    return dataclasses.replace(model, preprocess=preprocess, assumptions=assumed)


def _as_stated(preprocess: Preprocess, stated: Mapping[str, Any]) -> Preprocess:
    """Return timm's numbers with those of the file in their place."""
    given = dict(stated)
    if isinstance(given.get("resize"), int):
        given.setdefault("keep_ratio", True)
    size = given.pop("size", preprocess.size)
    return for_size(dataclasses.replace(preprocess, size=size, **given), preprocess.size)


def read_weights(path: Path, spec: str) -> tuple[State, dict[str, str]]:
    """The tensors and, from safetensors, the notes in the header (arch, global_pool …)."""
    if not path.is_file():
        near = did_you_mean(path.name, [p.name for p in path.parent.glob("*") if p.suffix in SUFFIXES])
        seen = "a folder" if path.is_dir() else "not there"
        raise ModelUnavailable(f"The weights file '{path}' is {seen}.{near} Type 'file:PATH.safetensors'.")
    try:
        if path.suffix == ".safetensors":
            from safetensors import safe_open

            with safe_open(path, framework="pt") as file:
                return strip({key: file.get_tensor(key) for key in file.keys()}), dict(file.metadata() or {})  # noqa: SIM118
        return strip(unwrap(torch.load(path, map_location="cpu", weights_only=True))), {}
    except pickle.UnpicklingError as error:
        raise ModelUnavailable(
            f"'{spec}' holds more than tensors, and ClairViT never unpickles code; save the weights alone: "
            "safetensors.torch.save_file(model.state_dict(), 'model.safetensors')."
        ) from error
    except Exception as error:  # safetensors, zip and tar readers each raise their own kind on broken bytes
        raise ModelUnavailable(
            f"'{spec}' cannot be read as weights ({type(error).__name__}: {str(error)[:120]}); expected a file written "
            "by safetensors, or a state dict written by torch.save."
        ) from error


def unwrap(loaded: Any) -> State:
    """The state dict inside whatever a training script saved."""
    for name in _WRAPPINGS:
        if isinstance(loaded, Mapping) and isinstance(loaded.get(name), Mapping):
            loaded = loaded[name]
    if not isinstance(loaded, Mapping) or not all(isinstance(value, Tensor) for value in loaded.values()):
        raise ValueError("no dictionary of tensors in it")
    return dict(loaded)


def strip(state: State) -> State:
    """Without the prefix that DDP, torch.compile or a training class put before every name."""
    for prefix in (*_PREFIXES, *_PREFIXES):
        if state and all(key.startswith(prefix) for key in state):
            state = {key.removeprefix(prefix): value for key, value in state.items()}
    return state


def architecture(request: Request, said: Mapping[str, str]) -> str:
    arch = request.arch or said.get("arch") or said.get("architecture")
    if arch is None:
        raise BadInput(
            f"'{request.spec}' does not say which architecture its weights are for; add arch='timm:NAME', such "
            "as arch='timm:vit_base_patch16_224'.",
            parameters={"arch": "timm:NAME"},
        )
    source, colon, name = arch.partition(":")
    if colon and source != "timm":
        raise BadInput(
            f"arch='{arch}' is not a timm architecture, the only kind a weights file can be for; give "
            "arch='timm:NAME', 'hf:FOLDER' for a transformers folder, or build the module and use cv.wrap(module, …).",
            parameters={"arch": "timm:NAME"},
        )
    name = name if colon else source
    from_timm.check_name(name)
    return name


def infer_options(name: str, state: State, said: Mapping[str, str], spec: str) -> dict[str, Any]:
    """Number of classes and pooling, from the head's shape and from which norms are there; the rest from the notes."""
    options: dict[str, Any] = {"num_classes": count_classes(name, state), **notes.options(said, spec)}
    if "global_pool" in said:
        options["global_pool"] = said["global_pool"]
    elif "fc_norm.weight" in state and "norm.weight" not in state:
        options["global_pool"] = "avg"  # timm's ViTs norm after averaging
    return options


def count_classes(name: str, state: State) -> int:
    """Rows of the head; 0 when the file has none, which makes a backbone."""
    import timm

    classifier = timm.get_pretrained_cfg(name).classifier or "head"
    head = classifier if isinstance(classifier, str) else classifier[0]
    weight = state.get(f"{head}.weight")
    return 0 if weight is None else int(weight.shape[0])


def infer_size(name: str, state: State) -> tuple[int, int] | None:
    """The square image size that the position embedding was made for, None if it is the architecture's own."""
    import timm

    positions, patches = state.get("pos_embed"), state.get("patch_embed.proj.weight")
    if positions is None or patches is None or positions.ndim != 3:
        return None
    for prefix in range(1 + sum(state[k].shape[1] for k in ("cls_token", "dist_token", "reg_token") if k in state)):
        side = math.isqrt(positions.shape[1] - prefix)
        if side * side == positions.shape[1] - prefix:
            size = (side * patches.shape[-2], side * patches.shape[-1])
            return None if size == tuple(timm.get_pretrained_cfg(name).input_size[1:]) else size
    return None


def fit(module: torch.nn.Module, state: State, spec: str, name: str) -> None:
    """Load every tensor, or say which do not fit."""
    own = module.state_dict()
    missing, extra = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
    shapes = [
        f"{key} {tuple(state[key].shape)} instead of {tuple(own[key].shape)}"
        for key in sorted(own.keys() & state.keys())
        if state[key].shape != own[key].shape
    ]
    found = [
        f"{len(keys)} {word} ({', '.join(keys[:3])}{', …' if len(keys) > 3 else ''})"
        for keys, word in ((missing, "missing"), (extra, "unexpected"), (shapes, "of another shape"))
        if keys
    ]
    if found:
        raise ModelUnavailable(
            f"The weights in '{spec}' do not fit timm's '{name}': {'; '.join(found)}. Give the architecture they were "
            "saved from with arch='timm:NAME', and size=(rows, columns) if it was not square.",
            parameters={"arch": "timm:NAME"},
        )
    module.load_state_dict(state)


def beside(path: Path) -> Path | None:
    """'dogs.safetensors' may come with 'dogs-labels.json'."""
    labels = path.with_name(f"{path.stem}-labels.json")
    return labels if labels.is_file() else None
