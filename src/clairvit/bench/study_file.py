"""The study of a TOML file, with what is said beside the file, such as options of the command line, winning over it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from clairvit.bench import METHODS, METRICS
from clairvit.bench.config import ModelConfig, StudyConfig
from clairvit.bench.plan import Specs, Study
from clairvit.errors import BadInput
from clairvit.methods.explain import expand_all
from clairvit.methods.parsing import split_at_commas
from clairvit.methods.spec import MethodSpec
from clairvit.metrics.context import check_map_transform
from clairvit.metrics.registry import MetricSpec, resolve_metric

PETS = (ModelConfig("pets"),)
Value = TypeVar("Value")


def study_of(
    config: StudyConfig,
    overrides: StudyConfig | None = None,
    methods: Sequence[MethodSpec] | None = None,
    metrics: Sequence[MetricSpec] | None = None,
) -> Study:
    """Return a study.

    Args:
        config: What the file says.
        overrides: What is used in place of the file's models, data sets, …; fields that are None are the file's.
        methods: Methods that are parsed already; they win over names.
        metrics: Metrics that are parsed already; they win over names.
    """
    overrides = StudyConfig() if overrides is None else overrides
    models = overrides.models if overrides.models is not None else config.models if config.models is not None else PETS
    maps = _first(overrides.maps, config.maps) or "raw"
    check_map_transform(maps)
    if methods is None:
        methods = expand_all(_names("methods", overrides.methods, config.methods, METHODS))
    if metrics is None:
        named = map(resolve_metric, _names("metrics", overrides.metrics, config.metrics, METRICS))
        metrics = list({spec.text: spec for spec in named}.values())
    data = _first(overrides.data, config.data)
    if data is None:
        raise BadInput("Which images? Expected data = … in the file, such as data = ['folder:photos'].")
    datasets = tuple(  # the overrides, then the file's entry of a data set, then the file's defaults
        replace(
            entry,
            split=_first(overrides.split, entry.split, config.split),
            limit=_first(overrides.limit, entry.limit, config.limit),
        )
        for entry in data
    )
    study = Study(
        models,
        datasets,
        tuple(spec.text for spec in methods),
        tuple(spec.text for spec in metrics),
        seed=_first(overrides.seed, config.seed) or 0,
        target=_first(overrides.target, config.target),
        maps=maps,
        at_once=config.at_once,
        autocast=_first(overrides.autocast, config.autocast),
    )
    return study.sharing(Specs(methods, metrics))


def _first(*values: Value | None) -> Value | None:
    """Return the first value that is not None; 0 is a value."""
    return next((value for value in values if value is not None), None)


def _names(
    key: str, overrides: Sequence[str] | None, listed: Sequence[str] | None, default: Sequence[str]
) -> list[str]:
    """Return the names that win, those that the file lists, or the default; a text may be a list itself."""
    texts = [part.strip() for text in overrides or listed or () for part in split_at_commas(text) if part.strip()]
    if (overrides or listed is not None) and not texts:
        raise BadInput(
            f"{key} = [] in the file names nothing; expected one or more, or no such line: {','.join(default)}."
        )
    return list(dict.fromkeys(texts or default))
