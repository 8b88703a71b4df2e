"""Configuration of a study: models, data, methods and metrics, read from a TOML file. Errors name the line."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, StrictBool, StrictFloat, StrictInt, StrictStr, TypeAdapter, ValidationError

from clairvit.data.dataset import ImageDataset, masks_on_patches, void_as_object
from clairvit.errors import BadInput, did_you_mean
from clairvit.models.activation import check_activation
from clairvit.models.preprocess import parse_size, preprocess_options

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

    from clairvit.models.model import Model

IMAGES_PER_UNIT = 8  # at most; on a CPU a unit that costs much has fewer
Location = tuple[str | int, ...]  # keys and list indices that lead to a value of the document
_STRICT: Any = {"extra": "forbid"}  # pydantic: an unknown key is an error


@dataclass(frozen=True)
class ModelConfig:
    """A model as `cv.load` takes it."""

    __pydantic_config__ = _STRICT

    spec: StrictStr
    arch: StrictStr | None = None
    labels: StrictStr | tuple[StrictStr, ...] | None = None
    pretrained: StrictBool = True
    activation: StrictStr | None = None  # None: what the model states
    mean: StrictFloat | tuple[StrictFloat, ...] | None = None
    std: StrictFloat | tuple[StrictFloat, ...] | None = None
    resize: StrictInt | tuple[StrictInt, ...] | None = None
    crop: StrictInt | tuple[StrictInt, ...] | None = None
    interpolation: StrictStr | None = None
    fit: StrictStr | None = None

    def load(self, device: str | None = None) -> Model:
        """Load the model."""
        from clairvit.models.load import load

        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(ModelConfig)}
        labels, crop = values.pop("labels"), values.pop("crop")
        return load(
            values.pop("spec"),
            labels=list(labels) if isinstance(labels, tuple) else labels,
            size=crop,
            device=device,
            **values,
        )


@dataclass(frozen=True)
class DataConfig:
    """Images as `open_data` takes them."""

    __pydantic_config__ = _STRICT

    spec: StrictStr
    split: StrictStr | None = None
    limit: StrictInt | None = None
    masks: StrictStr | None = None
    mask_kind: StrictStr = "nonzero"
    void: Literal["nowhere", "object"] = "nowhere"  # where pixels count that the masks leave undefined
    names: tuple[StrictStr, ...] = ()  # of the images that are taken, by their files' names; (): all
    mask_grid: tuple[StrictInt, StrictInt] | None = None  # rows and columns of patches that masks are reduced to

    def open(self, seed: int) -> ImageDataset:
        """Open the data set; `seed` draws the images where `limit` takes some of them."""
        from clairvit.data.open import open_data

        dataset = open_data(
            self.spec,
            split=self.split,
            limit=self.limit,
            seed=seed,
            masks=self.masks,
            mask_kind=self.mask_kind,
            names=self.names,
        ).dataset
        dataset = dataset if self.mask_grid is None else masks_on_patches(dataset, self.mask_grid)
        return void_as_object(dataset) if self.void == "object" else dataset


@dataclass(frozen=True)
class StudyConfig:
    """The content of a study's TOML file; None for keys that it does not have."""

    __pydantic_config__ = _STRICT

    models: tuple[ModelConfig, ...] | None = None
    data: tuple[DataConfig, ...] | None = None
    methods: tuple[StrictStr, ...] | None = None
    metrics: tuple[StrictStr, ...] | None = None
    split: StrictStr | None = None  # for data that names none itself
    limit: StrictInt | None = None
    seed: StrictInt | None = None
    target: StrictStr | None = None
    maps: StrictStr | None = None
    at_once: StrictInt = IMAGES_PER_UNIT
    autocast: StrictStr | None = None
    # Files and modules that register methods and metrics, relative to the file
    imports: Annotated[tuple[StrictStr, ...], Field(alias="import")] = ()


_TABLES: Mapping[str, tuple[type, str]] = {  # key of the file -> its class, and an example of a spec
    "models": (ModelConfig, "timm:vit_base_patch16_224"),
    "data": (DataConfig, "folder:photos"),
}
_KEYS = {"imports": "import"}  # field -> key of the file, where that is a word of Python
_EXPECTED = {  # pydantic's type of an error -> the value that is expected, and the items if they are in a list
    "string_type": ("a text", "texts only"),
    "int_type": ("a whole number", "whole numbers only"),
    "float_type": ("a number", "numbers only"),
    "bool_type": ("true or false", "true or false only"),
    "tuple_type": ("a list", "lists only"),
}


def read_config(path: Path) -> StudyConfig:
    """Return the study in a TOML file such as

    models = ["pets", {spec = "file:mine.safetensors", arch = "timm:vit_small_patch16_224", resize = 256}]
    data = [{spec = "pets:../oxford-iiit-pet", limit = 200}]
    methods = ["legrad", "rollout(fusion=max)"]
    metrics = ["deletion", "insertion"]

    Raises:
        BadInput: If it cannot be read, is not TOML, or has an unknown key or a wrong value: with the line of it.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"The study '{path}' cannot be read ({error}); expected a TOML file in UTF-8.") from error
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise BadInput(f"The study '{path}' is not TOML: {error}.") from error
    except RecursionError as error:
        raise BadInput(
            f"The study '{path}' is nested too deep; expected lists and tables as in `docs/studies.md`."
        ) from error
    source = _Source(path, text, document)
    full = dict(document)  # with a list for a single value, and a table with that spec for a text
    for key in ("models", "data"):
        if key in full:
            entries = full[key] if isinstance(full[key], list) else [full[key]]
            full[key] = [{"spec": entry} if isinstance(entry, str) else entry for entry in entries]
    for key in ("methods", "metrics", "import"):
        if isinstance(full.get(key), str):
            full[key] = [full[key]]
    try:
        config = TypeAdapter(StudyConfig).validate_python(full)
    except ValidationError as error:
        raise source.translate(error.errors()) from error
    for index, model in enumerate(config.models or ()):
        source.check_values(model, ("models", index) if isinstance(document["models"], list) else ("models",))
    return config


@dataclass(frozen=True)
class _Source:
    """The text of a TOML file and its content, in which the lines of errors are found."""

    path: Path
    text: str
    document: Mapping[str, Any]

    def translate(self, errors: Sequence[ErrorDetails]) -> BadInput:
        """Return pydantic's errors as one message: the first unknown key, else missing key, else wrong value."""
        by_kind: dict[str, list[ErrorDetails]] = {}
        for error in errors:
            by_kind.setdefault(error["type"], []).append(error)
        for error in by_kind.get("unexpected_keyword_argument", ()):
            *parents, key = self._locate(error["loc"])
            kind = _TABLES[str(parents[0])][0] if parents else StudyConfig
            field_names = [_KEYS.get(field.name, field.name) for field in fields(kind)]
            suggestion = did_you_mean(str(key), field_names)
            return self._error(
                (*parents, key), f"'{key}' is no key here.{suggestion} Expected: {', '.join(field_names)}."
            )
        for error in by_kind.get("missing", ()):
            location = self._locate(error["loc"])
            key, example = location[0], _TABLES[str(location[0])][1]
            return self._error(location, f"'{key}' has a table without spec; expected spec = '{example}'.")
        first = self._locate(errors[0]["loc"])
        deepest = max(
            (self._locate(e["loc"]) for e in errors if self._locate(e["loc"])[: len(first)] == first), key=len
        )
        same = [error for error in errors if self._locate(error["loc"]) == deepest]
        key = next(step for step in reversed(deepest) if isinstance(step, str))
        value = _lookup(self.document, deepest)
        return self._error(deepest, f"'{key}' is {value!r}; expected {_expected(deepest, same)}.")

    def check_values(self, model: ModelConfig, location: Location) -> None:
        """Raise `BadInput` for an activation or preprocessing that no model takes."""
        for key in ("activation", "mean", "std", "resize", "crop", "interpolation", "fit"):
            value: Any = getattr(model, key)
            if value is None:
                continue
            try:
                if key == "activation":
                    check_activation(value)
                elif key == "crop":
                    parse_size(value)
                else:
                    options: dict[str, Any] = {key: value}
                    preprocess_options(**options)
            except BadInput as error:
                raise self._error((*location, key), str(error)) from error

    def _locate(self, steps: Sequence[str | int]) -> Location:
        """Return the steps of a pydantic location that exist in the document.

        Others are members of a union, indices of a list that was a single value, and keys that are missing.
        """
        location: Location = ()
        for step in steps:
            if _contains(self.document, (*location, step)):
                location = (*location, step)
        return location

    def _error(self, location: Location, message: str) -> BadInput:
        return BadInput(f"{self.path}, line {self._line(location)}: {message}")

    def _line(self, location: Location) -> int:
        """Return the line of a value: that of its key, in the shortest beginning of the file that has the value."""
        lines = self.text.splitlines()
        before = 0  # lines that are valid TOML without the value
        for count in range(1, len(lines) + 1):
            try:
                beginning = tomllib.loads("\n".join(lines[:count]))
            except tomllib.TOMLDecodeError:
                continue  # inside a list or a text of several lines
            if _contains(beginning, location):
                break
            before = count
        else:
            count = len(lines)
        return _line_of_key(lines[:count], before, location)


def _line_of_key(lines: Sequence[str], before: int, location: Location) -> int:
    """Return the first line after so many whose key, once renamed, removes the value from the document."""
    *_, key = (step for step in location if isinstance(step, str))
    pattern = re.compile(rf"(^|[\s\[{{,.\"'])({re.escape(key)})(?=[\"']?\s*[=\].])")
    location = location[: max(place for place, step in enumerate(location) if step == key) + 1]
    for index in range(before, len(lines)):
        renamed = pattern.sub(r"\1\2_", lines[index])
        try:
            without = tomllib.loads("\n".join([*lines[:index], renamed, *lines[index + 1 :]]))
        except tomllib.TOMLDecodeError:
            continue
        if not _contains(without, location):
            return index + 1
    return before + 1


def _contains(document: Any, location: Location) -> bool:
    for step in location:
        in_list = isinstance(document, list) and isinstance(step, int) and step < len(document)
        if not in_list and not (isinstance(document, dict) and step in document):
            return False
        document = document[step]
    return True


def _lookup(document: Any, location: Location) -> Any:
    for step in location:
        document = document[step]
    return document


def _expected(location: Location, errors: Sequence[ErrorDetails]) -> str:
    """Return what was expected instead of a value, from all of pydantic's errors at its location."""
    key = str(location[0])
    if any(error["type"] == "dataclass_type" for error in errors):
        return f"a text such as '{_TABLES[key][1]}', or a table with spec = …"
    if key in ("methods", "metrics", "import") and len(location) == 1:
        return "a text or a list"
    is_item = isinstance(location[-1], int)
    choices = [
        _EXPECTED[error["type"]][is_item]
        if error["type"] in _EXPECTED
        else str(error.get("ctx", {}).get("expected", error["msg"]))
        for error in errors
    ]
    return " or ".join(dict.fromkeys(choices))
