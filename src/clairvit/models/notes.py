"""Notes in a weights file's header: which model the weights are for, as JSON that is checked before it is believed."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

from clairvit.errors import BadInput, ModelUnavailable, did_you_mean
from clairvit.models.activation import Activation, check_activation
from clairvit.models.model import Preprocess
from clairvit.models.preprocess import preprocess_options
from clairvit.models.request import label_names, rows_columns

# What may shape a timm model from a file or the command line. Others of its options (a checkpoint's path, say) would
# make it read files, so only these are let through.
SHAPING: dict[str, tuple[type, ...]] = {
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
    how: Preprocess,
    activation: Activation = "softmax",
) -> dict[str, str]:
    """The notes that this module reads."""
    return {
        "activation": activation,
        "format": "pt",
        "arch": f"timm:{arch}",
        "options": json.dumps(dict(options)),
        "labels": json.dumps(list(labels), ensure_ascii=False),
        "preprocess": json.dumps(dataclasses.asdict(how)),
    }


def check_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of timm's create_model that shape a model, each of its kind."""
    for name, value in options.items():
        if name not in SHAPING:
            raise BadInput(
                f"'{name}' is no option that shapes a timm model.{did_you_mean(name, SHAPING)} Known are "
                f"{', '.join(SHAPING)}."
            )
        kinds = SHAPING[name]
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise BadInput(f"{name}={value!r} was given; expected {' or '.join(kind.__name__ for kind in kinds)}.")
    return dict(options)


def options(said: Mapping[str, str], spec: str) -> dict[str, Any]:
    found = _read(said, "options", spec)
    try:
        if found is not None and not isinstance(found, dict):
            raise BadInput(f"They are a {type(found).__name__}.")
        return check_options(found or {})
    except BadInput as error:
        raise _unfit("options", spec, str(error)) from error


def labels(said: Mapping[str, str], spec: str, classes: int) -> tuple[str, ...] | None:
    """Return the class names in the header: a list, or a dict in either direction; None without any."""
    found = _read(said, "labels", spec)
    if found is None:
        return None
    if not isinstance(found, dict) and not (isinstance(found, list) and all(isinstance(name, str) for name in found)):
        raise _unfit("labels", spec, "expected a list of names.")
    try:
        names = label_names(found)
    except BadInput as error:
        raise _unfit("labels", spec, str(error)) from error
    if len(names) != classes:
        raise _unfit("labels", spec, f"it has {len(names)} names for {classes} classes.")
    return names


def activation(said: Mapping[str, str], spec: str, columns: int) -> Activation | None:
    """Return what the scores of a model with so many columns mean, where the file says so."""
    if "activation" not in said:
        return None
    try:
        return check_activation(said["activation"], columns)
    except BadInput as error:
        raise _unfit("activation", spec, str(error)) from error


def preprocess(said: Mapping[str, str], spec: str) -> dict[str, Any]:
    """Return the fields of `Preprocess` that the header states, as `write` writes them or one by one.

    Single entries are `mean`, `std`, `size` (or timm's `img_size`), `resize` and `interpolation`, each JSON or numbers
    separated by commas, such as mean = "0.485, 0.456, 0.406".
    """
    stated = _whole_preprocess(said, spec)
    for name in ("mean", "std", "resize", "interpolation", "img_size", "size"):
        if name not in said:
            continue
        value = _entry(said[name])
        if name in ("size", "img_size"):
            stated["size"] = _checked(name, spec, rows_columns, value)
        elif value is not None:
            given = _checked(name, spec, preprocess_options, **{name: value})
            stated[name] = getattr(given, name)
    return stated


def _whole_preprocess(said: Mapping[str, str], spec: str) -> dict[str, Any]:
    found = _read(said, "preprocess", spec)
    if found is None:
        return {}
    try:
        rows, columns = (int(side) for side in found["size"])
        box = found["resize"]
        given = preprocess_options(found["mean"], found["std"], interpolation=str(found["interpolation"]))
        return {
            "size": (rows, columns),
            "mean": given.mean,
            "std": given.std,
            "resize": box if box is None or isinstance(box, int) else (int(box[0]), int(box[1])),
            "interpolation": given.interpolation,
            "keep_ratio": bool(found["keep_ratio"]),
        }
    except (KeyError, TypeError, ValueError, IndexError, BadInput) as error:
        why = str(error).rstrip(".") if isinstance(error, BadInput) else f"{type(error).__name__}: {error}"
        raise _unfit("preprocess", spec, f"{why}.") from error


def _entry(text: str) -> Any:
    """Return a header's text as JSON, as numbers separated by commas, or as it is."""
    for candidate in (text, f"[{text}]"):
        try:
            value = json.loads(candidate)
        except ValueError:
            continue
        return tuple(value) if isinstance(value, list) else value
    return text


def _checked(entry: str, spec: str, read: Callable[..., Any], *values: Any, **named: Any) -> Any:
    """Call `read`, whose complaint then names the file and the entry."""
    try:
        return read(*values, **named)
    except (BadInput, TypeError) as error:
        raise _unfit(entry, spec, str(error)) from error


def _read(said: Mapping[str, str], name: str, spec: str) -> Any:
    try:
        return json.loads(said[name]) if name in said else None
    except ValueError as error:
        raise _unfit(name, spec, f"{error}.") from error


def _unfit(name: str, spec: str, why: str) -> ModelUnavailable:
    return ModelUnavailable(
        f"The note '{name}' in '{spec}' cannot be used: {why} Expected one as clairvit finetune writes it."
    )
