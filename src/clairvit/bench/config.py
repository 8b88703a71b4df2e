"""Wish: a study as a person writes it, in a TOML file. What is wrong in it is said with its line."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Any

from clairvit.bench.plan import AT_ONCE, DataConfig, ModelConfig
from clairvit.errors import BadInput, did_you_mean
from clairvit.models.activation import check_activation
from clairvit.models.preprocess import preprocess_options, rows_columns

Where = tuple[str | int, ...]  # the way to a value: keys, and places in lists

MODEL: Mapping[str, type | UnionType] = {
    "spec": str,
    "arch": str,
    "labels": str | list,
    "pretrained": bool,
    "activation": str,
    "mean": int | float | list,
    "std": int | float | list,
    "resize": int | list,
    "crop": int | list,
    "interpolation": str,
}
DATA: Mapping[str, type | UnionType] = {"spec": str, "split": str, "limit": int, "masks": str, "mask_kind": str}
STUDY: Mapping[str, type | UnionType] = {
    "models": str | list | dict,
    "data": str | list | dict,
    "methods": str | list,
    "metrics": str | list,
    "split": str,
    "limit": int,
    "seed": int,
    "target": str,
    "maps": str,
    "at_once": int,
}
SAID = {
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    list: "a list",
    dict: "a table",
}


@dataclass(frozen=True)
class StudyConfig:
    """What was asked for; None where nothing was said."""

    models: tuple[ModelConfig, ...] | None = None
    data: tuple[DataConfig, ...] | None = None
    methods: tuple[str, ...] | None = None
    metrics: tuple[str, ...] | None = None
    split: str | None = None  # for data that says nothing itself
    limit: int | None = None
    seed: int | None = None
    target: str | None = None
    maps: str | None = None
    at_once: int = AT_ONCE


def read_config(path: Path) -> StudyConfig:
    """A file such as

    models = ["pets", {spec = "file:mine.safetensors", arch = "timm:vit_small_patch16_224", resize = 256}]
    data = [{spec = "pets:../oxford-iiit-pet", limit = 200}]
    methods = ["legrad", "rollout(fusion=max)"]
    metrics = ["deletion", "insertion"]
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"The study '{path}' cannot be read ({error}); expected a TOML file in UTF-8.") from error
    try:
        found = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise BadInput(f"The study '{path}' is not TOML: {error}.") from error
    page = _Page(path, text)
    page.check(found, STUDY, ())
    return StudyConfig(
        models=_each(found, "models", page, MODEL, _model),
        data=_each(found, "data", page, DATA, lambda given: DataConfig(**given)),
        methods=page.texts(found, "methods"),
        metrics=page.texts(found, "metrics"),
        **{name: found[name] for name in ("split", "limit", "seed", "target", "maps", "at_once") if name in found},
    )


def _model(given: Mapping[str, Any]) -> ModelConfig:
    settled: dict[str, Any] = {key: tuple(one) if isinstance(one, list) else one for key, one in given.items()}
    return ModelConfig(**settled)


def _check_preprocessing(given: Mapping[str, Any], page: _Page, where: Where) -> None:
    """Refuse numbers that no model takes, with their line."""
    for key in ("mean", "std", "resize", "crop", "interpolation"):
        value: Any = tuple(given[key]) if isinstance(given.get(key), list) else given.get(key)
        options: dict[str, Any] = {} if key == "crop" else {key: value}
        try:
            rows_columns(value if key == "crop" else None)
            preprocess_options(**options)
        except BadInput as error:
            raise page.error((*where, key), str(error)) from error


def _each(found: Mapping[str, Any], name: str, page: _Page, known: Mapping[str, type | UnionType], make: Any) -> Any:
    """A text, a table, or a list of them."""
    if name not in found:
        return None
    given = found[name]
    listed = given if isinstance(given, list) else [given]
    made = []
    for place, one in enumerate(listed):
        where: Where = (name, place) if isinstance(given, list) else (name,)
        if isinstance(one, str):
            one = {"spec": one}
        if not isinstance(one, dict):
            raise page.wrong(where, one, f"a text such as '{_EXAMPLES[name]}', or a table with spec = …")
        page.check(one, known, where)
        if "spec" not in one:
            raise page.error(where, f"'{name}' has a table without spec; expected spec = '{_EXAMPLES[name]}'.")
        if isinstance(one.get("labels"), list):
            page.texts(one, "labels", where)
        if "activation" in one:
            try:
                check_activation(one["activation"])
            except BadInput as error:
                raise page.error((*where, "activation"), str(error)) from error
        if name == "models":
            _check_preprocessing(one, page, where)
        made.append(make(one))
    return tuple(made)


_EXAMPLES = {"models": "timm:vit_base_patch16_224", "data": "folder:photos"}


@dataclass(frozen=True)
class _Page:
    """The file as text, in which mistakes are found again."""

    path: Path
    text: str

    def check(self, found: Mapping[str, Any], known: Mapping[str, type | UnionType], where: Where) -> None:
        """Every key is known, every value of its kind."""
        for key, value in found.items():
            if key not in known:
                near = did_you_mean(key, known)
                raise self.error((*where, key), f"'{key}' is no key here.{near} Expected: {', '.join(known)}.")
            kind = known[key]
            if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
                raise self.wrong((*where, key), value, _said(kind))

    def texts(self, found: Mapping[str, Any], key: str, where: Where = ()) -> tuple[str, ...] | None:
        """A text, or a list of texts."""
        if key not in found:
            return None
        given = found[key]
        listed = [given] if isinstance(given, str) else given
        for place, one in enumerate(listed):
            if not isinstance(one, str):
                raise self.wrong((*where, key, place), one, "texts only")
        return tuple(listed)

    def wrong(self, where: Where, value: Any, expected: str) -> BadInput:
        name = next(str(step) for step in reversed(where) if isinstance(step, str))
        return self.error(where, f"'{name}' is {value!r}; expected {expected}.")

    def error(self, where: Where, sentence: str) -> BadInput:
        return BadInput(f"{self.path}, line {self._line(where)}: {sentence}")

    def _line(self, where: Where) -> int:
        """The file is read line by line until what is meant is in it; then the line that names it is looked for."""
        lines = self.text.splitlines()
        before = 0  # lines that are TOML, and in which it is not
        for count in range(1, len(lines) + 1):
            try:
                found = tomllib.loads("\n".join(lines[:count]))
            except tomllib.TOMLDecodeError:
                continue  # in the middle of a list or a text of several lines
            if _is_in(found, where):
                break
            before = count
        else:
            count = len(lines)
        return _naming(lines[:count], before, where)


def _naming(lines: Sequence[str], before: int, where: Where) -> int:
    """Of the lines after so many, the one that says the name: without it, it would not be there."""
    *_, name = (step for step in where if isinstance(step, str))
    pattern = re.compile(rf"(^|[\s\[{{,.\"'])({re.escape(name)})(?=[\"']?\s*[=\].])")
    own = where[: max(place for place, step in enumerate(where) if step == name) + 1]
    for place in range(before, len(lines)):
        other = pattern.sub(r"\1\2_", lines[place])
        try:
            without = tomllib.loads("\n".join([*lines[:place], other, *lines[place + 1 :]]))
        except tomllib.TOMLDecodeError:
            continue
        if not _is_in(without, own):
            return place + 1
    return before + 1


def _is_in(found: Any, where: Sequence[str | int]) -> bool:
    for step in where:
        listed = isinstance(found, list) and isinstance(step, int) and step < len(found)
        if not listed and not (isinstance(found, dict) and step in found):
            return False
        found = found[step]
    return True


def _said(kind: type | UnionType) -> str:
    parts = kind.__args__ if isinstance(kind, UnionType) else (kind,)
    return " or ".join(SAID[part] for part in parts)
