"""Recipe: what was chosen for a model, as a small JSON file that `explain --recipe` follows."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from os import PathLike
from pathlib import Path
from typing import Any

from clairvit._io import dumps_json, write_text
from clairvit._version import __version__
from clairvit.data.hashing import weights_hash
from clairvit.errors import BadInput, ClairWarning
from clairvit.methods.parsing import AUTO, STARTS, parse_spec
from clairvit.methods.spec import resolve_method
from clairvit.models.model import Model

KIND = "clairvit recipe"
FORMAT = 1
KNOWN_BY = 12  # letters of a hash that people are shown


@dataclass(frozen=True)
class Recipe:
    """A method, the model it was chosen for, and the numbers that speak for it. No dates: same choice, same file.

    Attributes:
        method: The method string.
        model: The name of the model it was chosen for.
        weights: A hash of the weights, the labels and the preprocessing.
        starts: Method -> the same method from its best start layer.
        ranking: The numbers behind the choice.

    Example:
        >>> import clairvit as cv
        >>> recipe = cv.Recipe(method="legrad", model="pets", weights="")
        >>> recipe.method_for()
        'legrad'
    """

    method: str
    model: str
    weights: str  # hash of the weights, the labels and the preprocessing
    metrics: tuple[str, ...] = ()
    by: str = ""  # what the ranking is by
    settings: Mapping[str, Any] = field(default_factory=dict)  # target, what is done to maps
    images: int = 0
    seed: int = 0
    clear: bool = False  # is the method significantly better than all others?
    answer: tuple[str, ...] = ()
    ranking: tuple[Mapping[str, Any], ...] = ()
    starts: Mapping[str, str] = field(default_factory=dict)  # "genatt" -> "genatt+from:7"
    tuned: tuple[Mapping[str, Any], ...] = ()  # the score of every start
    model_record: Mapping[str, Any] = field(default_factory=dict)  # preprocessing, weights' hash, assumptions
    version: str = __version__

    def method_for(self, text: str | None = None) -> str:
        """The method of the recipe or, with "focusvit(m=auto)" or "genatt+from:auto", that one from its best layer."""
        if text is None:
            return self.method
        settled = self._settled(text)
        if settled == text:
            raise BadInput(
                f"The method '{text}' and a recipe for '{self.method}' were given; expected one of the two, or a "
                "method that reads where it starts from the recipe, such as focusvit(m=auto) or genatt+from:auto."
            )
        return resolve_method(settled).text

    def _settled(self, text: str) -> str:
        """The text with the layer wherever it says auto."""
        written = parse_spec(text)
        if written.inner:  # smooth(focusvit(m=auto), n=20)
            inner = [self._settled(one) for one in written.inner]
            changed = ",".join([*inner, *(f"{key}={value}" for key, value in written.options.items())])
            return text if tuple(inner) == written.inner else f"{written.name}({changed})"
        own = {key: value for key, value in written.options.items() if key not in STARTS or value != AUTO}
        if len(own) == len(written.options) and written.combinator != f"from:{AUTO}":
            return text
        base = resolve_method(written.name, **own).text
        if base not in self.starts:
            listed = ", ".join(self.starts) or "none"
            raise BadInput(
                f"The recipe holds no layer where '{base}' starts; it has {listed}. Make one by "
                f"cv.choose(model, images, tune_start=['{base}']).save('recipe.json').",
                parameters={"tune_start": base},
            )
        return self.starts[base]

    def check(self, model: Model) -> None:
        """Warn if the recipe is for other weights."""
        own = weights_hash(model)
        if own != self.weights:
            warnings.warn(
                f"The recipe was made for {self.model} (weights {self.weights[:KNOWN_BY]}), and this is {model.name} "
                f"with other weights ({own[:KNOWN_BY]}): what was best there need not be best here. Run `clairvit "
                "choose` on this model.",
                ClairWarning,
                stacklevel=3,
            )

    def save(self, path: Path | str) -> Path:
        """Write it; the file is whole or not there."""
        place = Path(path)
        if place.suffix.lower() != ".json":
            raise BadInput(f"'{path}' is no name for a recipe; expected one that ends in .json, such as recipe.json.")
        content = dumps_json({"kind": KIND, "format": FORMAT, **asdict(self)}, indent=2)
        return write_text(content + "\n", place)


def read_recipe(path: PathLike[str] | str) -> Recipe:
    """A recipe from its file, if it is one."""
    make = "Make one by cv.choose(model, images).save('recipe.json')."
    hint = {"choose": "recipe.json"}
    if not isinstance(path, str | PathLike):
        raise BadInput(
            f"A recipe was given as {type(path).__name__}; expected its file or a Recipe. {make}", parameters=hint
        )
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"The recipe '{path}' cannot be read: {error.strerror}. {make}", parameters=hint) from error
    except ValueError as error:
        raise BadInput(f"'{path}' is not JSON ({error}), so it is no recipe. {make}", parameters=hint) from error
    if not isinstance(content, dict) or content.get("kind") != KIND:
        raise BadInput(f'\'{path}\' is JSON, and no recipe: expected "kind": "{KIND}". {make}', parameters=hint)
    if content.get("format") != FORMAT:
        raise BadInput(
            f"'{path}' is a recipe of format {content.get('format')}, written by ClairViT {content.get('version')}; "
            f"this is {__version__}, which reads format {FORMAT}. {make}",
            parameters=hint,
        )
    missing = [name for name in ("method", "model", "weights") if not isinstance(content.get(name), str)]
    if missing:
        raise BadInput(
            f"The recipe '{path}' has no {', '.join(missing)}; expected text for each. {make}", parameters=hint
        )
    starts = content.get("starts", {})
    if not isinstance(starts, dict) or not all(isinstance(text, str) for text in starts.values()):
        raise BadInput(
            f"The 'starts' of the recipe '{path}' are no table of methods; expected {{\"genatt\": …}}. {make}",
            parameters=hint,
        )
    known = {one.name for one in fields(Recipe)}
    own: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in content.items() if key in known
    }
    for text in (own["method"], *starts.values()):
        resolve_method(text)  # a method that is not known is refused here, with the nearest names
    return Recipe(**own)


def recipe_of(given: Recipe | PathLike[str] | str) -> Recipe:
    return given if isinstance(given, Recipe) else read_recipe(given)
