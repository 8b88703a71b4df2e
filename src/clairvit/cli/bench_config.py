"""The study of `clairvit bench`, from a file and from options, which win over the file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

from clairvit.cli.arguments import resolve_methods, resolve_metrics
from clairvit.cli.evaluate import METHODS, METRICS
from clairvit.cli.options import DataOptions, ModelOptions, model_names
from clairvit.errors import BadInput

if TYPE_CHECKING:
    from clairvit.bench.config import StudyConfig
    from clairvit.bench.plan import DataConfig, ModelConfig, Study

Value = TypeVar("Value")


@dataclass(frozen=True)
class StudyOptions:
    """The options of the command line that define a study; None where nothing was typed."""

    model: list[str] | None = None
    model_options: ModelOptions = field(default_factory=ModelOptions)
    data: DataOptions = field(default_factory=DataOptions)
    masks: str | None = None
    mask_kind: str | None = None
    method: list[str] | None = None
    metric: list[str] | None = None
    target: str | None = None
    maps: str | None = None
    seed: int | None = None
    autocast: str | None = None


def study_of(config: StudyConfig, typed: StudyOptions) -> Study:
    """Return the study of a file and the options."""
    from clairvit.bench.plan import Study
    from clairvit.metrics.context import check_map_transform

    models, data = model_configs(config, typed), data_configs(config, typed)
    methods = resolve_methods(*_names("methods", typed.method, config.methods, METHODS))
    metrics = resolve_metrics(*_names("metrics", typed.metric, config.metrics, METRICS))
    maps = _first(typed.maps, config.maps) or "raw"
    check_map_transform(maps)
    return Study(
        models,
        data,
        tuple(methods),
        tuple(spec.text for spec in metrics),
        seed=_first(typed.seed, config.seed) or 0,
        target=_first(typed.target, config.target),
        maps=maps,
        at_once=config.at_once,
        autocast=_first(typed.autocast, config.autocast),
    )


def model_configs(config: StudyConfig, typed: StudyOptions) -> tuple[ModelConfig, ...]:
    """Return the models that were typed, else those of the file."""
    from clairvit.models.activation import check_activation

    options = typed.model_options
    preprocess = options.preprocess()
    if typed.model is None and config.models is not None:
        if options.typed() or options.no_pretrained:
            raise BadInput(
                "--arch, --no-pretrained, --labels, --activation and preprocessing belong to --model; expected them in "
                "the file, or both."
            )
        return config.models
    if options.activation is not None:
        check_activation(options.activation)
    names = model_names(typed.model)
    if preprocess and len(names) > 1:
        raise BadInput(
            f"Preprocessing is of one model, and {len(names)} were given; expected a study file in which each has its "
            "own."
        )
    # --arch belongs to files of weights; without any, loading a model explains what it is for
    files = [name for name in names if name.startswith("file:")] or names
    return tuple(options.config(name, options.arch if name in files else None) for name in names)


def data_configs(config: StudyConfig, typed: StudyOptions) -> tuple[DataConfig, ...]:
    """Return the data sets; options win over the file's entry of a data set, and that over the file's defaults."""
    from clairvit.bench.plan import DataConfig

    options = typed.data
    if options.data is None and config.data is None:
        raise BadInput("Which images? Expected --data folder:PATH (or pets:PATH, …), or data = … in the file.")
    entries = config.data or () if options.data is None else tuple(map(DataConfig, options.specs()))
    return tuple(
        replace(
            entry,
            split=_first(options.split, entry.split, config.split),
            limit=_first(options.limit, entry.limit, config.limit),
            masks=_first(typed.masks, entry.masks),
            mask_kind=entry.mask_kind if typed.mask_kind is None else typed.mask_kind,
        )
        for entry in entries
    )


def _first(*values: Value | None) -> Value | None:
    """Return the first value that is not None; 0 is a value."""
    return next((value for value in values if value is not None), None)


def _names(key: str, typed: Sequence[str] | None, listed: Sequence[str] | None, default: str) -> Sequence[str]:
    """Return the names that were typed, those that the file lists, or the default."""
    if not typed and listed is not None and not listed:
        raise BadInput(f"{key} = [] in the file names nothing; expected one or more, or no such line: {default}.")
    return typed or listed or [default]
