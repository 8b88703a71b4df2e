"""Header of a weights file: architecture, options, labels, preprocessing and activation as JSON, checked on reading."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

from clairvit._io import parse_json
from clairvit.errors import BadInput, ModelUnavailable, did_you_mean
from clairvit.models.activation import Activation, check_activation
from clairvit.models.labels import is_dict_or_names, label_names
from clairvit.models.preprocess import Preprocess, parse_size, per_channel, preprocess_options

Header = Mapping[str, str]
# Options of timm models that a file or the command line may set. Others (a checkpoint's path, for example) would make
# timm read files, so only these are allowed.
ARCHITECTURE_OPTIONS: dict[str, tuple[type, ...]] = {
    "patch_size": (int,),
    "embed_dim": (int,),
    "depth": (int,),
    "num_heads": (int,),
    "mlp_ratio": (int, float),
    "qkv_bias": (bool,),
    "qk_norm": (bool,),
    "init_values": (int, float),
    "class_token": (bool,),
    "no_embed_class": (bool,),
    "reg_tokens": (int,),
    "global_pool": (str,),
    "window_size": (int,),
    "drop_rate": (int, float),
    "attn_drop_rate": (int, float),
    "proj_drop_rate": (int, float),
    "drop_path_rate": (int, float),
}


def write(
    arch: str,
    options: Mapping[str, Any],
    labels: tuple[str, ...],
    preprocess: Preprocess,
    activation: Activation = "softmax",
    training: Mapping[str, Any] | None = None,
) -> dict[str, str]:
    """Return the header entries that this module reads, and what was done to the training data (`training`), if any."""
    return {
        **({"training": json.dumps(dict(training), ensure_ascii=False)} if training else {}),
        "activation": activation,
        "format": "pt",
        "arch": f"timm:{arch}",
        "options": json.dumps(dict(options)),
        "labels": json.dumps(list(labels), ensure_ascii=False),
        "preprocess": json.dumps(dataclasses.asdict(preprocess)),
    }


def check_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of timm's create_model; raise BadInput for a name or type that is not allowed."""
    for name, value in options.items():
        if name not in ARCHITECTURE_OPTIONS:
            raise BadInput(
                f"'{name}' is no option that shapes a timm model.{did_you_mean(name, ARCHITECTURE_OPTIONS)} Known are "
                f"{', '.join(ARCHITECTURE_OPTIONS)}."
            )
        types = ARCHITECTURE_OPTIONS[name]
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            raise BadInput(f"{name}={value!r} was given; expected {' or '.join(kind.__name__ for kind in types)}.")
    return dict(options)


def read_options(header: Header, spec: str) -> dict[str, Any]:
    """Return the options of the architecture; none if the header has no entry."""
    options = _read_json(header, "options", spec)
    try:
        if options is not None and not isinstance(options, dict):
            raise BadInput(f"They are a {type(options).__name__}.")
        return check_options(options or {})
    except BadInput as error:
        raise _invalid_entry("options", spec, str(error)) from error


def read_labels(header: Header, spec: str, classes: int) -> tuple[str, ...] | None:
    """Return the class names: a list, or a dict in either direction; None if the header has no entry."""
    labels = _read_json(header, "labels", spec)
    if labels is None:
        return None
    if not is_dict_or_names(labels):
        raise _invalid_entry("labels", spec, "expected a list of names.")
    try:
        names = label_names(labels)
    except BadInput as error:
        raise _invalid_entry("labels", spec, str(error)) from error
    if len(names) != classes:
        raise _invalid_entry("labels", spec, f"it has {len(names)} names for {classes} classes.")
    return names


def read_activation(header: Header, spec: str, columns: int) -> Activation | None:
    """Return what the scores of a model with so many columns mean; None if the header has no entry."""
    if "activation" not in header:
        return None
    try:
        return check_activation(header["activation"], columns)
    except BadInput as error:
        raise _invalid_entry("activation", spec, str(error)) from error


def read_preprocess(header: Header, spec: str) -> dict[str, Any]:
    """Return the fields of `Preprocess` that the header states, as `write` writes them or as single entries.

    Single entries are `mean`, `std`, `size` (or timm's `img_size`), `resize` and `interpolation`, each JSON or numbers
    separated by commas, such as mean = "0.485, 0.456, 0.406".
    """
    fields = _read_whole_preprocess(header, spec)
    for name in ("mean", "std", "resize", "interpolation", "img_size", "size"):
        if name not in header:
            continue
        value = _parse_entry(header[name])
        if name in ("size", "img_size"):
            fields["size"] = _check_entry(name, spec, parse_size, value)
        elif value is not None:
            field = getattr(_check_entry(name, spec, preprocess_options, **{name: value}), name)
            fields[name] = _check_entry(name, spec, per_channel, name, field, 3) if name in ("mean", "std") else field
    return fields


def _read_whole_preprocess(header: Header, spec: str) -> dict[str, Any]:
    """Return all fields of the entry "preprocess"; none if the header has no such entry."""
    entry = _read_json(header, "preprocess", spec)
    if entry is None:
        return {}
    try:
        rows, columns = (int(side) for side in entry["size"])
        box = entry["resize"]
        options = preprocess_options(entry["mean"], entry["std"], interpolation=str(entry["interpolation"]))
        return {
            "size": (rows, columns),
            "mean": per_channel("mean", options.mean or (), 3),
            "std": per_channel("std", options.std or (), 3),
            "resize": box if box is None or isinstance(box, int) else (int(box[0]), int(box[1])),
            "interpolation": options.interpolation,
            "keep_ratio": bool(entry["keep_ratio"]),
        }
    except (KeyError, TypeError, ValueError, IndexError, BadInput) as error:
        reason = str(error).rstrip(".") if isinstance(error, BadInput) else f"{type(error).__name__}: {error}"
        raise _invalid_entry("preprocess", spec, f"{reason}.") from error


def _parse_entry(text: str) -> Any:
    """Return an entry as JSON, as numbers separated by commas, or as text."""
    for candidate in (text, f"[{text}]"):
        try:
            value = parse_json(candidate)
        except ValueError:
            continue
        return tuple(value) if isinstance(value, list) else value
    return text


def _check_entry(entry: str, spec: str, check: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return the result of `check`; its error names the file and the entry."""
    try:
        return check(*args, **kwargs)
    except (BadInput, TypeError) as error:
        raise _invalid_entry(entry, spec, str(error)) from error


def _read_json(header: Header, name: str, spec: str) -> Any:
    """Return an entry of JSON; None if the header has none of that name."""
    try:
        return parse_json(header[name]) if name in header else None
    except ValueError as error:
        raise _invalid_entry(name, spec, f"{error}.") from error


def _invalid_entry(name: str, spec: str, reason: str) -> ModelUnavailable:
    return ModelUnavailable(
        f"The entry '{name}' in the header of '{spec}' cannot be used: {reason} Expected one as clairvit finetune "
        "writes it."
    )
