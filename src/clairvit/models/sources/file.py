"""`file:PATH`: weights on disk for a timm architecture; number of classes and image size follow from their shapes.

A CLIP in OpenAI's or open_clip's names is read as its image tower, with or without the text tower next to it.
Files that `clairvit finetune` writes also have architecture, options, labels and preprocessing in their header.
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

from clairvit.errors import Argument, BadInput, ModelUnavailable, Placeholder, did_you_mean
from clairvit.models.labels import read_labels
from clairvit.models.load_options import LoadOptions, seeded
from clairvit.models.model import Model
from clairvit.models.preprocess import Preprocess, assumption, for_size
from clairvit.models.sources import timm as timm_source
from clairvit.models.sources import weights_header

State = dict[str, Tensor]
EXAMPLE = Argument("arch", "timm:vit_base_patch16_224")
SUFFIXES = (".safetensors", ".pth", ".pt", ".bin")
_CHECKPOINT_KEYS = ("state_dict_ema", "model_ema", "state_dict", "model")  # where training scripts put the weights
_PREFIXES = ("module.", "_orig_mod.", "model.", "backbone.")
# Of OpenAI's and open_clip's CLIP; without `visual.proj` the tower is no plain Vision Transformer
CLIP_TOWER = {"visual.class_embedding", "visual.positional_embedding", "visual.conv1.weight", "visual.proj"}


def build(request: LoadOptions) -> Model:
    """Return the model of a weights file."""
    path = Path(request.identifier).expanduser()
    state, header = read_weights(path, request.spec)
    name = architecture(request, header)
    is_tower = state.keys() >= CLIP_TOWER
    options = tower_options(state) if is_tower else infer_options(name, state, header, request.spec)
    stated = weights_header.read_preprocess(header, request.spec)
    size = request.size or stated.get("size") or infer_size(name, renamed_tower(state) if is_tower else state)
    with seeded():  # the file fills every tensor: this only leaves the user's generator as it was
        module = timm_source.create(name, pretrained=False, size=size, **options)
    if request.pretrained:
        load_state(module, renamed_tower(state, module) if is_tower else state, request.spec, name)
    if is_tower:
        return _tower_model(module, request, name, size)
    classes = int(options["num_classes"])
    header_labels = weights_header.read_labels(header, request.spec, classes) if classes else None
    labels = request.labels or read_labels(labels_file(path)) or header_labels
    model = timm_source.describe(module, LoadOptions(request.spec, name, request.pretrained, labels=labels, size=size))
    activation = weights_header.read_activation(header, request.spec, classes) if model.classifier else None
    if activation is not None:
        model = dataclasses.replace(model, activation=activation, activation_reason="the weights file states it")
    preprocess = request.preprocessing.applied_to(_with_stated(model.preprocess, stated))
    missing = [field for field in request.preprocessing.missing() if field not in stated]
    source = f"timm's for {name}, because '{path.name}' does not say"
    assumed = assumption(missing, preprocess, source) if request.pretrained else ()
    return dataclasses.replace(model, preprocess=preprocess, assumptions=assumed)


def _tower_model(module: torch.nn.Module, request: LoadOptions, name: str, size: tuple[int, int] | None) -> Model:
    """Return the image tower of a CLIP: an embedding of images, which has no classes and no text tower."""
    if request.labels is not None:
        raise BadInput(
            f"labels= was given, and '{request.spec}' is read as the image tower of a CLIP, which has no classes; for "
            "prompts as classes load both towers ('open_clip:NAME:PATH'), for given texts use cv.Text(…, embedding=)."
        )
    model = timm_source.describe(module, LoadOptions(request.spec, name, request.pretrained, size=size))
    preprocess = request.preprocessing.applied_to(model.preprocess)
    path = Path(request.identifier)
    assumed = assumption(request.preprocessing.missing(), preprocess, f"timm's for {name}, as '{path.name}' is silent")
    return dataclasses.replace(model, preprocess=preprocess, labels=(), classifier=False, assumptions=assumed)


def tower_options(state: State) -> dict[str, Any]:
    """Return the options of timm's model for the image tower of a CLIP: its head is the projection [width, d]."""
    return {"num_classes": int(state["visual.proj"].shape[1])}


def renamed_tower(state: State, module: torch.nn.Module | None = None) -> State:
    """Return the image tower of a CLIP in timm's names; without a module only the tensors that say how large it is."""
    tower = {key: value for key, value in state.items() if key.startswith("visual.")}
    if module is None:
        return {
            "pos_embed": tower["visual.positional_embedding"][None],
            "patch_embed.proj.weight": tower["visual.conv1.weight"],
            "cls_token": tower["visual.class_embedding"][None, None],
        }
    from timm.models.vision_transformer import checkpoint_filter_fn

    return dict(checkpoint_filter_fn(tower, module))


def _with_stated(preprocess: Preprocess, stated: Mapping[str, Any]) -> Preprocess:
    """Return timm's preprocessing with the fields that the file states."""
    fields = dict(stated)
    if isinstance(fields.get("resize"), int):
        fields.setdefault("keep_ratio", True)
    size = fields.pop("size", preprocess.size)
    return for_size(dataclasses.replace(preprocess, size=size, **fields), preprocess.size)


def read_weights(path: Path, spec: str) -> tuple[State, dict[str, str]]:
    """Return the tensors and, of a safetensors file, the header (arch, global_pool, …)."""
    try:
        is_file = path.is_file()
    except (OSError, ValueError) as error:  # a folder that may not be searched, a name that is too long
        reason = getattr(error, "strerror", None) or error
        raise ModelUnavailable(
            f"The weights file '{str(path)[:200]}' cannot be read ({reason}); look at its name and permissions."
        ) from error
    if not is_file:
        near = did_you_mean(path.name, [p.name for p in path.parent.glob("*") if p.suffix in SUFFIXES])
        problem = "a folder" if path.is_dir() else "not there"
        raise ModelUnavailable(f"The weights file '{path}' is {problem}.{near} Type 'file:PATH.safetensors'.")
    try:
        with path.open("rb"):  # safetensors says "No such file" of one that may not be read
            pass
    except OSError as error:
        raise ModelUnavailable(
            f"The weights file '{path}' cannot be read ({error.strerror or error}); look at its permissions."
        ) from error
    try:
        if path.suffix == ".safetensors":
            from safetensors import safe_open

            with safe_open(path, framework="pt") as file:
                return strip_prefixes({key: file.get_tensor(key) for key in file.keys()}), dict(file.metadata() or {})  # noqa: SIM118
        return strip_prefixes(find_state_dict(torch.load(path, map_location="cpu", weights_only=True))), {}  # noqa: TID251 - tensors alone
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


def find_state_dict(checkpoint: Any) -> State:
    """Return the state dict inside what a training script saved."""
    for key in _CHECKPOINT_KEYS:
        if isinstance(checkpoint, Mapping) and isinstance(checkpoint.get(key), Mapping):
            checkpoint = checkpoint[key]
    if not isinstance(checkpoint, Mapping) or not all(isinstance(value, Tensor) for value in checkpoint.values()):
        raise ValueError("no dictionary of tensors in it")
    return dict(checkpoint)


def strip_prefixes(state: State) -> State:
    """Return the state dict without the prefix that DDP, torch.compile or a training class put before every name."""
    for prefix in (*_PREFIXES, *_PREFIXES):
        if state and all(key.startswith(prefix) for key in state):
            state = {key.removeprefix(prefix): value for key, value in state.items()}
    return state


def architecture(request: LoadOptions, header: Mapping[str, str]) -> str:
    """Return timm's name of the architecture, from the request or the header."""
    arch = request.arch or header.get("arch") or header.get("architecture")
    if arch is None:
        raise BadInput(
            f"'{request.spec}' does not say which architecture its weights are for; add ",
            Argument("arch", "timm:NAME"),
            ", such as ",
            EXAMPLE,
            ".",
        )
    source, colon, name = arch.partition(":")
    if colon and source != "timm":
        raise BadInput(
            f"arch='{arch}' is not a timm architecture, the only kind a weights file can be for; give ",
            Argument("arch", "timm:NAME"),
            ", 'hf:FOLDER' for a transformers folder, or build the module and use cv.wrap(module, …).",
        )
    name = name if colon else source
    if ":" in name:  # timm would read the architecture of a hub or a folder, and not from its own list
        raise BadInput(
            f"arch='{arch}' is the name of weights elsewhere; expected that of an architecture of timm, such as ",
            EXAMPLE,
            ".",
        )
    timm_source.check_name(name)
    return name


def infer_options(name: str, state: State, header: Mapping[str, str], spec: str) -> dict[str, Any]:
    """Return number of classes and pooling, from the shape of the head and the norms, and the header's options."""
    options: dict[str, Any] = {"num_classes": count_classes(name, state), **weights_header.read_options(header, spec)}
    if "global_pool" in header:
        options["global_pool"] = header["global_pool"]
    elif "fc_norm.weight" in state and "norm.weight" not in state:
        options["global_pool"] = "avg"  # timm's ViTs normalise after averaging
    return options


def count_classes(name: str, state: State) -> int:
    """Return the number of rows of the head; 0 if the file has none, as a backbone has."""
    import timm

    classifier = timm.get_pretrained_cfg(name).classifier or "head"
    head = classifier if isinstance(classifier, str) else classifier[0]
    weight = state.get(f"{head}.weight")
    return 0 if weight is None else int(weight.shape[0])


def infer_size(name: str, state: State) -> tuple[int, int] | None:
    """Return the square image size of the position embedding; None if it is the architecture's default."""
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


def load_state(module: torch.nn.Module, state: State, spec: str, name: str, library: str = "timm") -> None:
    """Load every tensor; raise ModelUnavailable with the names of those that do not fit."""
    expected = module.state_dict()
    missing, extra = sorted(expected.keys() - state.keys()), sorted(state.keys() - expected.keys())
    shapes = [
        f"{key} {tuple(state[key].shape)} instead of {tuple(expected[key].shape)}"
        for key in sorted(expected.keys() & state.keys())
        if state[key].shape != expected[key].shape
    ]
    problems = [
        f"{len(keys)} {problem} ({', '.join(keys[:3])}{', …' if len(keys) > 3 else ''})"
        for keys, problem in ((missing, "missing"), (extra, "unexpected"), (shapes, "of another shape"))
        if keys
    ]
    if problems:
        seen = f"The weights in '{spec}' do not fit {library}'s '{name}': {'; '.join(problems)}."
        if library != "timm":
            raise ModelUnavailable(f"{seen} Name the model that they were saved from.")
        raise ModelUnavailable(
            f"{seen} Give the architecture they were saved from with ",
            Argument("arch", "timm:NAME"),
            ", and ",
            Argument("size", (Placeholder("rows"), Placeholder("columns"))),
            " if it was not square.",
        )
    module.load_state_dict(state)


def labels_file(path: Path) -> Path | None:
    """Return 'dogs-labels.json' next to 'dogs.safetensors', if there is one."""
    labels = path.with_name(f"{path.stem}-labels.json")
    return labels if labels.is_file() else None
