"""Method specs: which method, with which options, over which layers; resolved once from a method string.

"rollout"   "rollout(fusion=max)"   "genatt+skipplus"   "decompx+from:6"   "ixg+layer:3"
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

from clairvit._registry import Registry
from clairvit.errors import BadInput, Message, NotApplicable, UnknownName, did_you_mean
from clairvit.methods.aggregation import Aggregation, Product, Single, Suffixes, Total
from clairvit.methods.explanation import Cost
from clairvit.methods.flow import Flow
from clairvit.methods.parsing import RECIPE, SEARCHED, ParsedSpec, parse_spec, refuse_auto, start_search
from clairvit.methods.registry import (
    ALIASES,
    COMBINATORS,
    MATRIX_COMBINATORS,
    METHODS,
    USUAL_PATCHES,
    Method,
    Passes,
    Place,
    Requires,
    find_method,
    layer_options,
    parameters,
)
from clairvit.models.model import Model
from clairvit.option_types import check_range
from clairvit.tracing.rules import RuleTable


@dataclass(frozen=True)
class MethodSpec:
    """A method with its options and aggregation settled; `str(spec)` is its canonical text.

    `cv.parse_method` makes one, and every verb accepts it in place of a method string.

    Args:
        method: The registered method: name, family, paper, default options.
        options: Every option of its function with its value.
        aggregation: How the layers are combined; None for a method that makes its map from the whole image at once.
        relu: Whether the formula ends with a ReLU.
        text: The canonical text: the same text always means the same map.
        members: The methods of an ensemble, or the layer maps of a calibrated method.

    Example:
        >>> import clairvit as cv
        >>> spec = cv.parse_method("rollout( protect=none, fusion=max )+skipplus")
        >>> print(spec)
        rollout(fusion=max)+skipplus
        >>> cv.explain("pets", "demo", spec).method == str(spec)
        True
    """

    method: Method
    options: tuple[tuple[str, Any], ...]
    aggregation: Aggregation | None
    relu: bool
    text: str
    members: tuple[MethodSpec, ...] = ()

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"MethodSpec({self.text!r})"

    def __hash__(self) -> int:
        return hash(self.text)

    @property
    def key(self) -> tuple[Any, ...]:
        """Two specs with the same key have the same layer map."""
        return (self.method.function, self.options)

    @functools.cached_property
    def requires(self) -> Requires:
        """What it needs of the shared trace with these options."""
        return self.method.requirements(**dict(self.options))

    @property
    def needs_all_rows(self) -> bool:
        """Whether its layer maps are needed for all query rows, not only those the head reads."""
        return self.requires.all_rows or (self.aggregation is not None and self.aggregation.needs_all_rows)

    @property
    def passes(self) -> Passes:
        """What it must see of the shared trace."""
        return self.requires.passes

    @property
    def reads_gradients(self) -> bool:
        """Whether it needs a backward: of the shared trace, of single blocks, or of passes that it makes itself."""
        return self.requires.shared_cost.backwards > 0 or self.own_cost().backwards > 0

    @property
    def backwards(self) -> int:
        """How many backwards of the shared traces it reads, for one target."""
        if self.members:
            tables = {table for member in self.members for table in member.tables}
            return len(tables) + any(member.passes == "local" for member in self.members)
        return self.requires.shared_cost.backwards

    @property
    def cost(self) -> Cost:
        """Passes for one target, on an image of 14 × 14 patches."""
        return self.cost_for(USUAL_PATCHES)

    def cost_for(self, patches: int) -> Cost:
        """Return the passes for one target, on an image of so many patches."""
        return Cost(1, self.backwards) + self.own_cost(patches)

    def own_cost(self, patches: int = USUAL_PATCHES) -> Cost:
        """Return the passes that it makes itself, on top of shared traces."""
        specs = self.members or (self,)
        return sum((spec.method.own_cost(patches, **dict(spec.options)) for spec in specs), Cost())

    @property
    def tables(self) -> tuple[RuleTable, ...]:
        """The rule tables whose backward passes it reads."""
        return self.requires.tables

    @property
    def rules(self) -> RuleTable | None:
        """The rule table of the backward it reads, if it reads one."""
        return self.requires.rules if self.passes == "backward" else None

    @property
    def second_rules(self) -> RuleTable | None:
        """The second rule table that it reads."""
        return self.requires.second_rules

    @property
    def gradients(self) -> tuple[Place, ...]:
        """Where it reads gradients."""
        by_output: dict[str, Place] = {"matrix": "attention", "tokens": "tokens", "image": "pixels"}
        declared = self.requires.gradients
        return (by_output[self.method.output],) if declared is None else declared

    def first_layer(self, count: int) -> int:
        """Return the layer nearest to the image that it reads: a backward need go no further."""
        declared = self.requires.first_layer
        if declared is not None:
            return declared % count
        return count if self.aggregation is None else self.aggregation.used(count).start

    def misfit(self, model: Model) -> NotApplicable | None:
        """Return why it may not be used with a model, if it was fitted to another one."""
        checks = (spec.requires.fitted_to for spec in (self, *self.members))
        errors = (check(model) for check in checks if check is not None)
        return next((error for error in errors if error is not None), None)

    def notes(self, count: int) -> tuple[str, ...]:
        """Return a note if a start layer that is meant to be searched was not."""
        searched = SEARCHED in self.method.option_overrides.aliases and "+" not in self.text
        if not searched or not isinstance(self.aggregation, Total) or self.aggregation.start != "half":
            return ()
        start, name = self.aggregation.used(count).start, self.method.name
        return (Message(f"{name}: m is ceil(L/2) = {start}; ", start_search(name), " looks for m*"),)


Wrapper = Callable[[ParsedSpec, dict[str, Any]], MethodSpec]
# smooth(…), ensemble(…), and recipes
WRAPPERS: Registry[Wrapper] = Registry("wrapper", modules=["clairvit.methods.ensembles", "clairvit.methods.recipe"])
RECIPE_FILE = ".json"  # the wrapper of a method that is given as a recipe; no name that can be typed


def wraps(name: str) -> Callable[[Wrapper], Wrapper]:
    """Return a decorator that registers a function on methods, such as smooth(…), under its name."""

    def decorate(wrapper: Wrapper) -> Wrapper:
        WRAPPERS.register(name, wrapper)
        return wrapper

    return decorate


MOST_SPECS = 1024
_SPECS: dict[str, MethodSpec] = {}  # method string without further options -> what it was resolved to


def resolve_method(text: str | MethodSpec, **options: Any) -> MethodSpec:
    """Return the spec of a method string such as "rollout(fusion=max)+skipplus"; keyword options override it."""
    if isinstance(text, MethodSpec):
        if not options:
            return text
        text = text.text
    known = _SPECS.get(text) if isinstance(text, str) and not options else None
    if known is not None and METHODS.registered(known.method.name) is known.method:
        return known
    try:
        parsed = parse_spec(text)
    except BadInput as error:
        raise BadInput(f"{error}{did_you_mean(text, METHODS, ALIASES) if isinstance(text, str) else ''}") from None
    combinator = parsed.combinator
    if RECIPE.fullmatch(parsed.name):
        return WRAPPERS.resolve(RECIPE_FILE)(parsed, options)
    if parsed.name in WRAPPERS:
        return WRAPPERS.resolve(parsed.name)(parsed, options)
    method = find_method(parsed.name)
    refuse_auto(parsed.name, combinator, parsed.options | options)
    if parsed.inner:
        raise BadInput(f"'{parsed.inner[0]}' in '{text}' is not an option; expected option=value.")
    typed = parsed.options | options
    plus_mode = _plus_mode(method, combinator, typed)
    aggregation, combined = _combined(method, combinator, plus_mode)
    for keyword in ("preset", "compat"):
        if keyword in typed:
            typed = _preset(method, str(typed.pop(keyword)), aggregation, combinator) | typed
    values = _function_defaults(method, combined)
    relu = method.relu and not combined
    fields = layer_options(method, aggregation)
    for key, value in typed.items():
        name = method.option_overrides.aliases.get(key, key)
        if key in values:
            values[key] = checked(_hints(method.function)[key], key, value)
            check_range(method.function, key, values[key])
        elif name in fields:
            assert aggregation is not None
            aggregation = replace(aggregation, **{name: checked(_hints(type(aggregation))[name], key, value)})
        elif key == "relu" and method.relu:
            relu = checked(bool, key, value)
        else:
            raise UnknownName(_no_option(method, key, aggregation))
    canonical = _canonical(method, values, aggregation, relu, combinator, plus_mode)
    spec = MethodSpec(method, tuple(sorted(values.items())), aggregation, relu, canonical)
    if not options and len(_SPECS) < MOST_SPECS:
        _SPECS[text] = spec
    return spec


def _function_defaults(method: Method, combined: bool) -> dict[str, Any]:
    """Return the defaults of the function's options, which may change under a combinator."""
    defaults = {key: p.default for key, p in parameters(method.function).items()}
    return defaults | dict(method.option_overrides.combined) if combined else defaults


def _plus_mode(method: Method, combinator: str, options: dict[str, Any]) -> str:
    """Take `plus_mode` out of the options: whether a sum adds up layer maps, or rollouts that start at each layer."""
    mode = "layer"
    if "plus_mode" in options:
        mode = checked(Literal["layer", "subnetwork"], "plus_mode", options["plus_mode"])
        if combinator.partition(":")[0] not in ("plus", "skipplus", "from"):
            raise UnknownName(
                f"'{method.name}' has no option 'plus_mode' here; it says what a sum over layers adds up. "
                f"Use {method.name}(plus_mode={mode})+plus."
            )
        del options["plus_mode"]
    if mode == "subnetwork" and not isinstance(method.aggregation, Product):
        raise NotApplicable(
            f"plus_mode=subnetwork adds up the rollouts that start at each layer, and '{method.name}' is no rollout: "
            f"its map of the network from a layer on is what that layer says. Use {method.name}+{combinator}."
        )
    return mode


def _combined(method: Method, combinator: str, plus_mode: str = "layer") -> tuple[Aggregation | None, bool]:
    """Return the aggregation that a combinator stands for, and whether there is a combinator."""
    if not combinator:
        return method.aggregation, False
    kind, colon, number = combinator.partition(":")
    names = [c.partition(":")[0] for c in COMBINATORS]
    if kind not in names or (kind in ("from", "layer")) != bool(colon):
        listed = ", ".join(f"+{c}" for c in COMBINATORS)
        raise UnknownName(
            f"There is no combinator '+{combinator}'; expected one of {listed}.{did_you_mean(kind, names)}"
        )
    if method.output == "image":
        raise NotApplicable(
            f"'{method.name}' makes its map from the whole image at once, so '+{combinator}' has no layers to combine. "
            f"Use '{method.name}' alone, or a layer-wise method such as "
            f"{'genatt' if kind in MATRIX_COMBINATORS else 'ixg'}+{combinator}."
        )
    if kind in MATRIX_COMBINATORS and method.output != "matrix":
        raise NotApplicable(
            f"'+{kind}' goes from token to token through N×N matrices, and '{method.name}' says one number for each "
            f"token. Use {method.name}+plus or {method.name}+skipplus, or a matrix method such as genatt+{kind}."
        )
    if colon and not re.fullmatch(r"-?\d+", number):
        raise BadInput(f"'+{combinator}' needs a layer number; expected +{kind}:6, say.")

    def total(start: int | Literal["half"]) -> Aggregation:
        product = method.aggregation
        if plus_mode == "subnetwork" and isinstance(product, Product):
            return Suffixes(start, product.residual, product.alpha, product.normalise)
        return Total(start)

    aggregations: dict[str, Callable[[], Aggregation]] = {
        "plus": lambda: total(0),
        "skipplus": lambda: total("half"),
        "from": lambda: total(int(number)),
        "rollout": lambda: Product(residual=1.0, normalise="rows"),
        "flow": lambda: Flow(),
        "last": lambda: Single(-1),
        "layer": lambda: Single(int(number)),
    }
    return aggregations[kind](), True


def _preset(method: Method, name: str, aggregation: Aggregation | None, combinator: str) -> dict[str, Any]:
    """Return the options of a preset."""
    if name not in method.presets:
        listed = ", ".join(method.presets) or "none"
        raise UnknownName(
            f"'{method.name}' has no preset '{name}'; it has {listed}.{did_you_mean(name, method.presets)}"
        )
    preset = dict(method.presets[name])
    options = {*parameters(method.function), *layer_options(method, aggregation), "relu"}
    replaced = [key for key in preset if method.option_overrides.aliases.get(key, key) not in options]
    if replaced and combinator:
        raise NotApplicable(
            f"The preset '{name}' of '{method.name}' says how layers are combined ({', '.join(replaced)}), and "
            f"'+{combinator}' does it another way. Use {method.name}(preset={name}) alone, or "
            f"{method.name}+{combinator} with the options of the preset that you want."
        )
    return preset


@functools.cache
def _hints(of: Any) -> dict[str, Any]:
    return get_type_hints(of)


def option_hints(method: Method) -> dict[str, Any]:
    """Return the type annotation of each option of a method, under the names that users type."""
    of_function = {name: _hints(method.function)[name] for name in parameters(method.function)}
    paper_words = method.option_overrides.words
    hints = {} if method.aggregation is None else _hints(type(method.aggregation))
    of_layers = {paper_words.get(name, name): hints[name] for name in layer_options(method, method.aggregation)}
    return of_function | of_layers | ({"relu": bool} if method.relu else {})


def checked(hint: Any, key: str, value: Any) -> Any:
    """Return the value, if the annotation of the option `key` allows it; else raise BadInput."""
    allowed = get_args(hint) if get_origin(hint) is not None else (hint,)
    choices = [c for a in allowed if get_origin(a) is Literal for c in get_args(a)]
    choices += list(allowed) if get_origin(hint) is Literal else []
    kinds = tuple(a for a in allowed if isinstance(a, type))
    if value is None and "none" in choices:  # typed in a string, `none` may be either
        return "none"
    if value in choices and isinstance(value, str | int):
        return value
    if isinstance(value, int) and not isinstance(value, bool) and float in kinds:
        return float(value)
    if isinstance(value, kinds) and not (isinstance(value, bool) and bool not in kinds):
        return value
    words = {int: "a number", float: "a number", bool: "True or False", type(None): "None"}
    expected = [repr(c) for c in choices] + [words.get(k, k.__name__) for k in kinds]
    hint_text = did_you_mean(value, [c for c in choices if isinstance(c, str)]) if isinstance(value, str) else ""
    raise BadInput(f"{key}={value} was given; expected {' or '.join(dict.fromkeys(expected))}.{hint_text}")


def _no_option(method: Method, key: str, aggregation: Aggregation | None) -> str:
    if key in method.option_overrides.refused:
        return f"'{method.name}' has no option '{key}': {method.option_overrides.refused[key]}"
    paper_words = method.option_overrides.words
    fields = [paper_words.get(name, name) for name in layer_options(method, aggregation)]
    options = [*parameters(method.function), *fields, *(["relu"] if method.relu else [])]
    listed = ", ".join(options) or "none"
    return f"'{method.name}' has no option '{key}' here; it has {listed}.{did_you_mean(key, options)}"


def _canonical(
    method: Method,
    values: dict[str, Any],
    aggregation: Aggregation | None,
    relu: bool,
    combinator: str,
    plus_mode: str,
) -> str:
    """Return the canonical text: name, every option that is not the default, combinator."""
    base, combined = _combined(method, combinator, plus_mode)
    defaults = _function_defaults(method, combined)
    changed = {key: value for key, value in values.items() if value != defaults[key]}
    if aggregation is not None and base is not None:
        paper_words = method.option_overrides.words
        changed |= {
            paper_words.get(f.name, f.name): getattr(aggregation, f.name)
            for f in dataclasses.fields(aggregation)
            if getattr(aggregation, f.name) != getattr(base, f.name)
        }
    if method.relu and relu != (not combined):
        changed["relu"] = relu
    if plus_mode != "layer":
        changed["plus_mode"] = plus_mode
    inside = ",".join(f"{key}={value}" for key, value in sorted(changed.items()))
    return method.name + (f"({inside})" if inside else "") + (f"+{combinator}" if combinator else "")
