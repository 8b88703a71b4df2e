"""Configuration of a study: models, data, methods and metrics, read from a TOML file. Errors name the line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, StrictBool, StrictFloat, StrictInt, StrictStr, TypeAdapter, ValidationError

from clairvit._toml import Location, TomlSource, read_toml
from clairvit.data.dataset import ImageDataset, masks_on_patches, void_as_object
from clairvit.errors import BadInput, did_you_mean
from clairvit.models.activation import check_activation
from clairvit.models.preprocess import parse_size, preprocess_options

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

    from clairvit.models.model import Model

IMAGES_PER_UNIT = 8  # at most; on a CPU a unit that costs much has fewer
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
    read = read_toml(path, "study", "docs/studies.md")
    source = _Source(read.path, read.text, read.document)
    document = source.document
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
class _Source(TomlSource):
    """A study's file."""

    def translate(self, errors: Sequence[ErrorDetails]) -> BadInput:
        """Return pydantic's errors as one message: the first unknown key, else missing key, else wrong value."""
        by_kind: dict[str, list[ErrorDetails]] = {}
        for error in errors:
            by_kind.setdefault(error["type"], []).append(error)
        for error in by_kind.get("unexpected_keyword_argument", ()):
            *parents, key = self.locate(error["loc"])
            kind = _TABLES[str(parents[0])][0] if parents else StudyConfig
            field_names = [_KEYS.get(field.name, field.name) for field in fields(kind)]
            suggestion = did_you_mean(str(key), field_names)
            return self.error(
                (*parents, key), f"'{key}' is no key here.{suggestion} Expected: {', '.join(field_names)}."
            )
        for error in by_kind.get("missing", ()):
            location = self.locate(error["loc"])
            key, example = location[0], _TABLES[str(location[0])][1]
            return self.error(location, f"'{key}' has a table without spec; expected spec = '{example}'.")
        first = self.locate(errors[0]["loc"])
        deepest = max((self.locate(e["loc"]) for e in errors if self.locate(e["loc"])[: len(first)] == first), key=len)
        same = [error for error in errors if self.locate(error["loc"]) == deepest]
        key = next(step for step in reversed(deepest) if isinstance(step, str))
        value = self.value(deepest)
        return self.error(deepest, f"'{key}' is {value!r}; expected {_expected(deepest, same)}.")

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
                raise self.error((*location, key), str(error)) from error


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
