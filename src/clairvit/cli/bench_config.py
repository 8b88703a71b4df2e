"""What was typed and what the file says, as a study: options win."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from clairvit.cli.arguments import split_labels, split_methods
from clairvit.cli.evaluate import wanted_methods, wanted_metrics
from clairvit.errors import BadInput

if TYPE_CHECKING:
    from clairvit.bench.config import StudyConfig
    from clairvit.bench.plan import DataConfig, ModelConfig, Study

METHODS, METRICS = "legrad,rollout", "deletion,insertion,sparseness"  # as `clairvit evaluate` has them
Value = TypeVar("Value")


def models_of(
    wish: StudyConfig,
    model: str | None,
    arch: str | None,
    no_pretrained: bool,
    labels: str | None,
    activation: str | None = None,
    preprocess: Mapping[str, Any] | None = None,
) -> tuple[ModelConfig, ...]:
    from clairvit.models.activation import check_activation

    if model is None and wish.models is not None:
        if arch is not None or no_pretrained or labels is not None or activation is not None or preprocess:
            raise BadInput(
                "--arch, --no-pretrained, --labels, --activation and preprocessing belong to --model; expected them in "
                "the file, or both."
            )
        return wish.models
    if activation is not None:
        check_activation(activation)
    names = split_labels(labels) if labels is not None else None
    specs = split_methods(model or "pets")
    if preprocess and len(specs) > 1:
        raise BadInput(
            f"Preprocessing is of one model, and {len(specs)} were given; expected a study file in which each has its "
            "own."
        )
    files = [spec for spec in specs if spec.startswith("file:")] or specs  # else loading says what --arch is for
    return tuple(
        model_config(spec, arch if spec in files else None, names, not no_pretrained, activation, preprocess or {})
        for spec in specs
    )


def model_config(
    spec: str,
    arch: str | None,
    labels: str | list[str] | None,
    pretrained: bool,
    activation: str | None,
    preprocess: Mapping[str, Any],
) -> ModelConfig:
    """Return a model as a study keeps it; `preprocess` as `read_preprocess` returns it."""
    from clairvit.bench.plan import ModelConfig

    seen = {"crop" if name == "size" else name: value for name, value in preprocess.items()}
    names = tuple(labels) if isinstance(labels, list) else labels
    return ModelConfig(spec, arch, names, pretrained, activation, **seen)


def data_of(
    wish: StudyConfig, data: str | None, limit: int | None, split: str | None, masks: str | None, mask_kind: str | None
) -> tuple[DataConfig, ...]:
    """Options win over what the file says of single sets, and that over what it says of all of them."""
    from clairvit.bench.plan import DataConfig

    if data is None and wish.data is None:
        raise BadInput("Which images? Expected --data folder:PATH (or pets:PATH, …), or data = … in the file.")
    listed = wish.data or () if data is None else tuple(map(DataConfig, _parts(data, "--data")))
    return tuple(
        DataConfig(
            one.spec,
            _said(split, one.split, wish.split),
            _said(limit, one.limit, wish.limit),
            _said(masks, one.masks),
            one.mask_kind if mask_kind is None else mask_kind,
            one.void,
        )
        for one in listed
    )


def _said(*values: Value | None) -> Value | None:
    """The first that was said at all: 0 and nothing are two things."""
    return next((value for value in values if value is not None), None)


def _parts(text: str, option: str) -> list[str]:
    found = [part.strip() for part in text.split(",") if part.strip()]
    if not found:
        raise BadInput(f"{option} '{text}' names nothing; expected one or more, separated by commas.")
    return found


def study_of(
    wish: StudyConfig,
    models: tuple[ModelConfig, ...],
    data: tuple[DataConfig, ...],
    method: str | None,
    metric: str | None,
    target: str | None,
    maps: str | None,
    seed: int | None,
) -> Study:
    from clairvit.bench.plan import Study
    from clairvit.metrics.context import check_shape

    methods = wanted_methods(_named("methods", method, wish.methods, METHODS))
    metrics = wanted_metrics(_named("metrics", metric, wish.metrics, METRICS))
    shape = _said(maps, wish.maps) or "raw"
    check_shape(shape)
    return Study(
        models,
        data,
        tuple(methods),
        tuple(one.text for one in metrics),
        seed=_said(seed, wish.seed) or 0,
        target=_said(target, wish.target),
        maps=shape,
        at_once=wish.at_once,
    )


def _named(what: str, typed: str | None, listed: Sequence[str] | None, usual: str) -> str:
    """Names separated by commas: what was typed, what the file lists, or the usual ones."""
    if typed is None and listed is not None and not listed:
        raise BadInput(f"{what} = [] in the file names nothing; expected one or more, or no such line: {usual}.")
    return typed if typed is not None else ",".join(listed or (usual,))
