"""Recipe: the method that was chosen for a model or fitted to it, as a small JSON file.

`cv.explain(…, recipe=…)` reads it, and its path stands wherever a method string does.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from os import PathLike
from pathlib import Path
from typing import Any

from clairvit._io import dumps_json, parse_json, to_json, write_text
from clairvit._spec import ParsedSpec
from clairvit._tables import TableRow, Tabular, write_table
from clairvit._version import __version__
from clairvit.data.hashing import weights_hash
from clairvit.errors import BadInput, ClairWarning, Message, UnknownName, Verb, user_stacklevel
from clairvit.methods.calibrated import Calibration, calibrated_spec, calibration_by_hash
from clairvit.methods.parsing import AUTO, CALIBRATED, RECIPE, STARTS, parse_spec, start_search
from clairvit.methods.spec import RECIPE_FILE, MethodSpec, resolve_method, resolve_parsed, wraps
from clairvit.models.model import Model

KIND = "clairvit recipe"
FORMAT = 1
SHORT_HASH = 12  # characters of a hash that are shown


@dataclass(frozen=True)
class Recipe(Tabular):
    """A method, the model it was chosen for, and the numbers that speak for it. No dates: same choice, same file.

    Attributes:
        method: The method string.
        model: The name of the model it was chosen for.
        weights: A hash of the weights, the labels and the preprocessing.
        starts: Method -> the same method from its best start layer.
        ranking: The numbers behind the choice.
        calibration: The weights of a calibrated method; None where none was fitted.

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
    settings: Mapping[str, Any] = field(default_factory=dict)  # target, normalisation of maps
    images: int = 0
    seed: int = 0
    clear: bool = False  # is the method significantly better than all others?
    answer: tuple[str, ...] = ()
    ranking: tuple[Mapping[str, Any], ...] = ()
    starts: Mapping[str, str] = field(default_factory=dict)  # "genatt" -> "genatt+from:7"
    tuned: tuple[Mapping[str, Any], ...] = ()  # the score of every start
    model_record: Mapping[str, Any] = field(default_factory=dict)  # preprocessing, weights' hash, assumptions
    calibration: Calibration | None = None
    version: str = __version__

    @property
    def is_calibrated(self) -> bool:
        """Whether the method is the calibrated one."""
        return self.calibration is not None and self.method == f"{CALIBRATED}#{self.calibration.hash}"

    @property
    def spec(self) -> MethodSpec:
        """The method as a `MethodSpec`, for verbs that take several methods."""
        return resolve_method(self.method_for())

    def method_for(self, text: str | None = None) -> str:
        """Return the recipe's method or, for "focusvit(m=auto)" or "genatt+from:auto", that one from its best layer."""
        if self.calibration is not None:
            calibrated_spec(self.calibration)  # from here on its hash stands for it
        if text is None:
            return self.method
        parsed = parse_spec(text)
        resolved = self._resolve_auto(parsed)
        if resolved is parsed:
            raise BadInput(
                f"The method '{text}' and a recipe for '{self.method}' were given; expected one of the two, or a "
                "method that reads where it starts from the recipe, such as focusvit(m=auto) or genatt+from:auto."
            )
        return resolve_parsed(resolved).text

    def _resolve_auto(self, parsed: ParsedSpec) -> ParsedSpec:
        """Return the method with the recipe's layer in place of auto; `parsed` itself where there is no auto."""
        if parsed.inner:  # smooth(focusvit(m=auto), n=20)
            members = [parse_spec(member) for member in parsed.inner]
            resolved = [self._resolve_auto(member) for member in members]
            unchanged = all(new is old for new, old in zip(resolved, members, strict=True))
            return parsed if unchanged else replace(parsed, inner=tuple(resolved))
        options = {key: value for key, value in parsed.options.items() if key not in STARTS or value != AUTO}
        if len(options) == len(parsed.options) and parsed.combinator != f"from:{AUTO}":
            return parsed
        if parsed.combinator and parsed.combinator != f"from:{AUTO}":
            raise BadInput(
                f"'{parsed}' has a start layer 'auto' and the combinator '+{parsed.combinator}', which combines layers "
                f"another way; expected one of the two, such as {parsed.name}+from:{AUTO}."
            )
        base = resolve_method(parsed.name, **options).text
        if base not in self.starts:
            listed = ", ".join(self.starts) or "none"
            raise BadInput(
                f"The recipe holds no layer where '{base}' starts; it has {listed}. Make one by ",
                start_search(base, file="recipe.json"),
                ".",
            )
        return parse_spec(self.starts[base])

    def check(self, model: Model) -> None:
        """Warn if the recipe was made for other weights; a calibrated method is refused where it is used."""
        weights = weights_hash(model)
        if weights != self.weights and not self.is_calibrated:
            warnings.warn(
                f"The recipe was made for {self.model} (weights {self.weights[:SHORT_HASH]}), and this is {model.name} "
                f"with other weights ({weights[:SHORT_HASH]}): what was best there need not be best here. Run "
                "cv.choose(model, images) on this model.",
                ClairWarning,
                stacklevel=user_stacklevel(),
            )

    def to_dict(self) -> dict[str, Any]:
        """Return the recipe as JSON values."""
        return dict(to_json({"kind": KIND, "format": FORMAT, **asdict(self)}))

    def _table(self) -> list[TableRow]:
        """Return a row per method, or of a calibrated one per metric: the numbers behind the choice."""
        rows = [_flat(row) for row in self.ranking]
        columns = dict.fromkeys(name for row in rows for name in row)
        return [{name: row.get(name) for name in columns} for row in rows]

    def save(self, path: PathLike[str] | str) -> Path:
        """Write the recipe (.json), which `cv.explain(…, "recipe.json")` follows, or the table of numbers (.csv)."""
        file = Path(path)
        if file.suffix.lower() == ".csv":
            return write_table(self, file)
        if file.suffix.lower() != ".json":
            raise BadInput(f"'{path}' is no name for a recipe; expected one that ends in .json, such as recipe.json.")
        content = dumps_json({"kind": KIND, "format": FORMAT, **asdict(self)}, indent=2)
        return write_text(content + "\n", file)

    def plot(self, ax: Any = None) -> Any:
        """Draw the ranking: a mean with its 95 % interval per method, the best on top.

        The best, and the methods that do not differ from it significantly, are in colour.

        Args:
            ax: Matplotlib axes; None makes a figure.

        Returns:
            The axes.

        Raises:
            BadInput: The recipe has no ranking, because it was not made by `cv.choose`.
        """
        from clairvit.plotting.axes import plot_ranking

        return plot_ranking(self, ax)

    def _repr_html_(self) -> str:
        """Return the ranking and the conclusion, as a notebook shows them."""
        from clairvit.plotting.axes import ranking_html

        return ranking_html(self)


def _flat(row: Mapping[str, Any]) -> TableRow:
    """Return a row without nested values: the ends of an interval and the entries of a table are columns."""
    flat: TableRow = {}
    for name, value in row.items():
        if isinstance(value, Mapping):
            flat |= {f"{name}_{key}": entry for key, entry in value.items()}
        elif isinstance(value, list | tuple):
            flat |= dict(zip((f"{name}_low", f"{name}_high"), value, strict=True))
        else:
            flat[name] = value
    return flat


def read_recipe(path: PathLike[str] | str) -> Recipe:
    """Return the recipe in a file, or raise BadInput if it is none."""
    make = Message(" Make one by ", Verb("choose", file="recipe.json"), ".")
    if not isinstance(path, str | PathLike):
        raise BadInput(f"A recipe was given as {type(path).__name__}; expected its file or a Recipe.", make)
    try:
        content = parse_json(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"The recipe '{path}' cannot be read: {error.strerror}.", make) from error
    except ValueError as error:
        raise BadInput(f"'{path}' is not JSON ({error}), so it is no recipe.", make) from error
    if not isinstance(content, dict) or content.get("kind") != KIND:
        raise BadInput(f'\'{path}\' is JSON, and no recipe: expected "kind": "{KIND}".', make)
    if content.get("format") != FORMAT:
        raise BadInput(
            f"'{path}' is a recipe of format {content.get('format')}, written by ClairViT "
            f"{content.get('version')}; this is {__version__}, which reads format {FORMAT}.",
            make,
        )
    missing = [name for name in ("method", "model", "weights") if not isinstance(content.get(name), str)]
    if missing:
        raise BadInput(f"The recipe '{path}' has no {', '.join(missing)}; expected text for each.", make)
    starts = content.get("starts", {})
    if not isinstance(starts, dict) or not all(isinstance(text, str) for text in starts.values()):
        raise BadInput(
            f"The 'starts' of the recipe '{path}' are no table of methods; expected {{\"genatt\": …}}.", make
        )
    names = {item.name for item in fields(Recipe)}
    values: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in content.items() if key in names
    }
    if values.get("calibration") is not None:
        values["calibration"] = Calibration.from_document(values["calibration"], str(path))
        _check_hash(str(path), values["calibration"], (values["method"], *starts.values()))
        calibrated_spec(values["calibration"])  # its hash may be the method
    for text in (values["method"], *starts.values()):
        resolve_method(text)  # raises for a method that is not known, with the nearest names
    return Recipe(**values)


def _check_hash(source: str, calibration: Calibration, methods: Sequence[str]) -> None:
    """Raise BadInput if a method names other weights than a recipe holds: the file was edited by hand."""
    hashes = {hash_ for text in methods for hash_ in re.findall(rf"{CALIBRATED}#(\w+)", text)}
    others = sorted(hashes - {calibration.hash})
    if others:
        raise BadInput(
            f"The recipe '{source}' names the weights {others[0]} and holds {calibration.hash}: it was changed after "
            f"cv.calibrate wrote it. Take the file as it was, or name what it holds: {CALIBRATED}#{calibration.hash}."
        )


@wraps(RECIPE_FILE)
def _resolve_recipe(parsed: ParsedSpec) -> MethodSpec:
    """Return the method of "mine.json", "mine.json#1a2b3c4d5e6f" or "calibrated#1a2b3c4d5e6f".

    A recipe of `cv.choose` is its method; a calibrated one is named by its file and the hash of its weights.
    """
    match = RECIPE.fullmatch(parsed.name)
    assert match is not None
    file, hash_ = match["file"], (match["hash"] or "").lower()
    if parsed.options:
        typed = ", ".join(parsed.options)
        raise UnknownName(f"The recipe '{file}' takes no options, and {typed} was given; expected none.")
    calibration = calibration_by_hash(hash_) if hash_ else None
    if calibration is not None:
        return calibrated_spec(calibration, file)
    if file.lower() == CALIBRATED:
        raise UnknownName(
            f"'{parsed.name}' names a calibrated recipe that was neither fitted nor read in this process; expected "
            "its file, such as mine.json, which ",
            Verb("calibrate", file="mine.json"),
            " writes.",
        )
    recipe = read_recipe(file)
    if recipe.calibration is not None and recipe.is_calibrated:
        if hash_ and hash_ != recipe.calibration.hash:
            raise BadInput(
                f"'{file}' holds the weights {recipe.calibration.hash} now, and {parsed.name} was asked for; expected "
                "a file that stays as it was. Name it without the hash to use what it holds now."
            )
        return calibrated_spec(recipe.calibration, file)
    return resolve_method(recipe.method)


def as_recipe(recipe: Recipe | PathLike[str] | str) -> Recipe:
    """Return a recipe, read from its file where it is a path."""
    return recipe if isinstance(recipe, Recipe) else read_recipe(recipe)


def method_text_for(
    model: Model, method: str | PathLike[str] | Recipe | None, recipe: str | PathLike[str] | Recipe | None
) -> str:
    """Return a method string: the one typed, a recipe's method, or "focusvit(m=auto)" with the recipe's layer."""
    if recipe is None:
        if isinstance(method, str) and not method.lower().endswith(".json"):
            return method
        if not isinstance(method, str | PathLike | Recipe):
            raise BadInput(f"{method!r} is not a method; expected NAME such as 'attnlrp+plus', or a recipe.")
        recipe, method = method, None
    resolved = as_recipe(recipe)
    text = resolved.method_for(None if method is None else str(method))
    resolved.check(model)
    if resolved.is_calibrated and not isinstance(recipe, Recipe):
        return resolve_method(str(recipe)).text  # named by its file, as in a list of methods
    return text
