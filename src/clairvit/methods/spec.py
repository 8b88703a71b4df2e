"""Method specs: which method, with which options, over which layers; resolved once from a method string.

"rollout"   "rollout(fusion=max)"   "genatt+skipplus"   "decompx+from:6"   "ixg+layer:3"
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from clairvit._cost import Cost
from clairvit._presets import moved_option, with_preset
from clairvit._registry import Registry
from clairvit._spec import ParsedSpec, Spec, changed_options
from clairvit.errors import BadInput, Message, NotApplicable, UnknownName, did_you_mean
from clairvit.methods.aggregation import Aggregation, Product, Single, Suffixes, Total
from clairvit.methods.flow import Flow
from clairvit.methods.parsing import CALIBRATED, RECIPE, SEARCHED, parse_spec, refuse_auto, start_search
from clairvit.methods.registry import (
    COMBINATORS,
    MATRIX_COMBINATORS,
    METHODS,
    PLUS_MODE,
    RELU,
    USUAL_LAYERS,
    USUAL_PATCHES,
    Method,
    Passes,
    Place,
    Requires,
    find_method,
    function_options,
    layer_options,
)
from clairvit.models.model import Model
from clairvit.tracing.rules import RuleTable


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class MethodSpec(Spec):
    """A method with its options and aggregation settled; `str(spec)` is its canonical text.

    `cv.parse_method` makes one, and every verb accepts it in place of a method string.

    Args:
        method: The registered method: name, family, paper, default options.
        options: Every option of its function with its value.
        canonical: Name, the options that are not the default, combinator; its text always means the same map.
        aggregation: How the layers are combined; None for a method that makes its map from the whole image at once.
        relu: Whether the formula ends with a ReLU.
        members: The methods of an ensemble, or the layer maps of a calibrated method.

    Example:
        >>> import clairvit as cv
        >>> spec = cv.parse_method("rollout( discard_ratio=0, fusion=max )+skipplus")
        >>> print(spec)
        rollout(fusion=max)+skipplus
        >>> cv.explain("pets", "demo", spec).method == str(spec)
        True
    """

    method: Method
    aggregation: Aggregation | None = None
    relu: bool = False
    members: tuple[MethodSpec, ...] = ()

    def __reduce__(self) -> tuple[Callable[..., MethodSpec], tuple[Any, ...]]:
        return resolve_parsed, (self.canonical,)

    @property
    def registered(self) -> Method:
        """The registered method."""
        return self.method

    @functools.cached_property
    def key(self) -> tuple[Any, ...]:
        """Two specs with the same key have the same layer map."""
        return (self.method.function, self.options)

    @property
    def on_tails(self) -> bool:
        """Whether it is run on sub-networks: a method of the whole image, combined over the layers they begin with."""
        return self.method.output == "image" and self.aggregation is not None

    @functools.cached_property
    def whole(self) -> MethodSpec:
        """The same method without its combinator, as it is run on a sub-network; a ReLU follows the sum."""
        own = function_options(self.method.function)
        options = {name: value for name, value in self.canonical.options.items() if name in (*own, "preset")}
        canonical = replace(self.canonical, combinator="", options=options)
        return replace(self, aggregation=None, relu=False, canonical=canonical)

    @functools.cached_property
    def requires(self) -> Requires:
        """What it needs of the shared trace with these options."""
        requires = self.method.requirements(**dict(self.options))
        return Requires(passes="forward", fitted_to=requires.fitted_to) if self.on_tails else requires

    @functools.cached_property
    def needs_all_rows(self) -> bool:
        """Whether its layer maps are needed for all query rows, not only those the head reads."""
        return self.requires.all_rows or (self.aggregation is not None and self.aggregation.needs_all_rows)

    @functools.cached_property
    def passes(self) -> Passes:
        """What it must see of the shared trace."""
        return self.requires.passes

    @functools.cached_property
    def reads_gradients(self) -> bool:
        """Whether it needs a backward: of the shared trace, of single blocks, or of passes that it makes itself."""
        return self.requires.shared_cost.backwards > 0 or self.own_cost().backwards > 0

    @functools.cached_property
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

    def cost_for(self, patches: int, layers: int = USUAL_LAYERS) -> Cost:
        """Return the passes for one target, on an image of so many patches.

        A pass through a sub-network counts as a pass.
        """
        return Cost(1, self.backwards) + self.own_cost(patches, layers)

    def own_cost(self, patches: int = USUAL_PATCHES, layers: int = USUAL_LAYERS) -> Cost:
        """Return the passes that it makes itself, on top of shared traces."""
        if self.members:
            return sum((spec.own_cost(patches, layers) for spec in self.members), Cost())
        own = self.method.own_cost(patches, **dict(self.options))
        if not self.on_tails or self.aggregation is None:
            return own
        on_tail = Cost(1, self.whole.backwards) + own
        return sum((on_tail for _ in self.aggregation.used(layers)), Cost())

    @functools.cached_property
    def tables(self) -> tuple[RuleTable, ...]:
        """The rule tables whose backward passes it reads."""
        return self.requires.tables

    @functools.cached_property
    def rules(self) -> RuleTable | None:
        """The rule table of the backward it reads, if it reads one."""
        return self.requires.rules if self.passes == "backward" else None

    @functools.cached_property
    def second_rules(self) -> RuleTable | None:
        """The second rule table that it reads."""
        return self.requires.second_rules

    @functools.cached_property
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
        searched = SEARCHED in self.method.option_overrides.aliases and not self.canonical.combinator
        if not searched or not isinstance(self.aggregation, Total) or self.aggregation.start != "half":
            return ()
        start, name = self.aggregation.used(count).start, self.method.name
        return (Message(f"{name}: m is ceil(L/2) = {start}; ", start_search(name), " looks for m*"),)


# Values of options that speak of pixels. They mean nothing for a sub-network, whose images are tokens.
PIXEL_OPTIONS: dict[str, tuple[str, ...]] = {
    "level": ("pixel",),
    "baseline": ("black", "white"),
    "features": ("superpixels",),
    "removal": ("black", "minimum", "noise", "road"),
}
TOKEN_REFERENCES = ("copies", "mean", "blur")  # of expected gradients: made of the tokens themselves

Wrapper = Callable[[ParsedSpec], MethodSpec]
# smooth(…), ensemble(…), and recipes
WRAPPERS: Registry[Wrapper] = Registry(
    "wrapper", modules=["clairvit.methods.ensembles", "clairvit.methods.refined", "clairvit.methods.recipe"]
)
READS_RECIPE = re.compile(rf"\.json|{CALIBRATED}", re.IGNORECASE)  # somewhere in a text, whose meaning may then change
RECIPE_FILE = ".json"  # the wrapper of a method that is given as a recipe; no name that can be typed


def wraps(name: str) -> Callable[[Wrapper], Wrapper]:
    """Return a decorator that registers a function on methods, such as smooth(…), under its name."""

    def decorate(wrapper: Wrapper) -> Wrapper:
        WRAPPERS.register(name, wrapper)
        return wrapper

    return decorate


def resolve_method(method: str | MethodSpec | ParsedSpec, **options: Any) -> MethodSpec:
    """Return the spec of a method string such as "rollout(fusion=max)+skipplus"; keyword options override it."""
    if isinstance(method, MethodSpec):
        return resolve_parsed(method.canonical.with_options(options)) if options else method
    if isinstance(method, ParsedSpec):
        return resolve_parsed(method.with_options(options))
    if not options and isinstance(method, str) and not READS_RECIPE.search(method):
        return _remembered(method, METHODS.changes, WRAPPERS.changes)
    return resolve_parsed(_parsed(method).with_options(options))


@functools.lru_cache(maxsize=256)
def _remembered(text: str, methods: int, wrappers: int) -> MethodSpec:
    """Return the spec of a text, which stays the same until a registry changes: `methods` and `wrappers` count that."""
    return resolve_parsed(_parsed(text))


def _parsed(text: str) -> ParsedSpec:
    try:
        return parse_spec(text)
    except BadInput as error:
        near = did_you_mean(text, METHODS, METHODS.aliases) if isinstance(text, str) else ""
        raise BadInput(f"{error}{near}") from None


def resolve_parsed(parsed: ParsedSpec) -> MethodSpec:
    """Return the spec of a name, options and combinator."""
    combinator = parsed.combinator
    if RECIPE.fullmatch(parsed.name):
        return WRAPPERS.resolve(RECIPE_FILE)(parsed)
    if parsed.name in WRAPPERS:
        return WRAPPERS.resolve(parsed.name)(parsed)
    method = find_method(parsed.name)
    refuse_auto(parsed.name, combinator, parsed.options)
    if parsed.inner:
        raise BadInput(f"'{parsed.inner[0]}' in '{parsed}' is not an option; expected option=value.")
    method, settings, typed = with_preset(method, parsed.options)
    plus_mode = _plus_mode(method, combinator, typed)
    aggregation, combined = _combined(method, combinator, plus_mode)
    preset = str(parsed.options.get("preset", parsed.options.get("compat", "")))
    _check_preset(method, preset, settings, aggregation, combinator)
    own, layered = function_options(method.function), layer_options(method, aggregation)
    defaults = {name: option.default for name, option in own.items()}
    defaults |= dict(method.option_overrides.combined) if combined else {}
    values, base, relu = dict(defaults), aggregation, method.relu and not combined
    for key, value in {**settings, **typed}.items():
        moved = moved_option(find_method(method.name), method, key, value)
        if moved:
            raise UnknownName(moved)
        name = method.option_overrides.aliases.get(key, key)
        if key in own:
            values[key] = own[key].checked(value)
        elif name in layered:
            assert aggregation is not None
            aggregation = replace(aggregation, **{name: layered[name].checked(value, key)})
        elif key == RELU.name and method.relu:
            relu = RELU.checked(value)
        else:
            raise UnknownName(_no_option(method, key, base))
    changed = changed_options(values, defaults)
    for name, option in layered.items():
        if getattr(aggregation, name) != option.default:
            changed[method.option_overrides.words.get(name, name)] = getattr(aggregation, name)
    if method.relu and relu != (not combined):
        changed[RELU.name] = relu
    if plus_mode != PLUS_MODE.default:
        changed[PLUS_MODE.name] = plus_mode
    if method.preset:
        changed["preset"] = method.preset
    spec = MethodSpec(
        method=method,
        options=tuple(sorted(values.items())),
        aggregation=aggregation,
        relu=relu,
        canonical=ParsedSpec(method.name, (), changed, combinator),
    )
    if spec.on_tails:
        _check_tokens_only(spec)
    return spec


def _check_tokens_only(spec: MethodSpec) -> None:
    """Raise BadInput for options that speak of pixels: tokens have neither colours nor places within a patch."""
    for name, value in spec.options:
        if value in PIXEL_OPTIONS.get(name, ()) or (name == "references" and value not in TOKEN_REFERENCES):
            combinator, method = spec.canonical.combinator, spec.method.name
            raise BadInput(
                f"{name}={value} was given with '+{combinator}', which runs '{method}' on the tokens of a block, and "
                f"{name}={value} speaks of pixels; expected another {name}. Or use '{method}' alone."
            )


def _plus_mode(method: Method, combinator: str, options: dict[str, Any]) -> str:
    """Take `plus_mode` out of the options: whether a sum adds up layer maps, or rollouts that start at each layer."""
    mode = str(PLUS_MODE.default)
    if "plus_mode" in options:
        mode = str(PLUS_MODE.checked(options["plus_mode"]))
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
    if method.caveats.no_tails:
        raise NotApplicable(
            f"'{method.name}' {method.caveats.no_tails}, so that '+{combinator}' has nothing to combine. Use "
            f"'{method.name}' alone, or another method, such as "
            f"{'genatt' if kind in MATRIX_COMBINATORS else 'ixg'}+{combinator}."
        )
    if kind in MATRIX_COMBINATORS and method.output != "matrix":
        what = "patch" if method.output == "image" else "token"
        raise NotApplicable(
            f"'+{kind}' goes from token to token through N×N matrices, and '{method.name}' says one number for each "
            f"{what}. Use {method.name}+plus or {method.name}+skipplus, or a matrix method such as genatt+{kind}."
        )
    if colon and not re.fullmatch(r"-?\d+", number):
        raise BadInput(f"'+{combinator}' needs a layer number; expected +{kind}:6, say.")

    def total(start: int | Literal["half"]) -> Aggregation:
        product = method.aggregation
        if plus_mode == "subnetwork" and isinstance(product, Product):
            return Suffixes(start, product.residual, product.normalise)
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
    aggregation = aggregations[kind]()
    layers = _preset_layers(method)
    _check_preset(method, method.preset, layers, aggregation, combinator)
    return replace(aggregation, **layers), True


def _preset_layers(method: Method) -> dict[str, Any]:
    """Return how a variant combines layers otherwise than its method: fields of the aggregation and their values."""
    base = find_method(method.name).aggregation if method.preset else method.aggregation
    if method.aggregation is base or method.aggregation is None:
        return {}
    values = {field.name: getattr(method.aggregation, field.name) for field in dataclasses.fields(method.aggregation)}
    return {name: value for name, value in values.items() if value != getattr(base, name, dataclasses.MISSING)}


def _check_preset(
    method: Method, name: str, settings: Mapping[str, Any], aggregation: Aggregation | None, combinator: str
) -> None:
    """Refuse a preset that says how layers are combined together with a combinator that does it another way."""
    fields = () if aggregation is None else (field.name for field in dataclasses.fields(aggregation))
    options = {*function_options(method.function), *fields, RELU.name}
    replaced = [key for key in settings if method.option_overrides.aliases.get(key, key) not in options]
    if replaced and combinator:
        raise NotApplicable(
            f"The preset '{name}' of '{method.name}' says how layers are combined ({', '.join(replaced)}), and "
            f"'+{combinator}' does it another way. Use {method.name}(preset={name}) alone, or "
            f"{method.name}+{combinator} with the options of the preset that you want."
        )


def _no_option(method: Method, key: str, aggregation: Aggregation | None) -> str:
    if key in method.option_overrides.refused:
        return f"'{method.name}' has no option '{key}': {method.option_overrides.refused[key]}"
    if key == "alpha" and isinstance(aggregation, Product | Suffixes):
        return (
            f"'{method.name}' has no option 'alpha': alpha·M + (1 − alpha)·I is M + residual·I times a constant, "
            "residual = (1 − alpha) / alpha. For alpha=0.5 type residual=1."
        )
    paper_words = method.option_overrides.words
    fields = [paper_words.get(name, name) for name in layer_options(method, aggregation)]
    options = [*function_options(method.function), *fields, *([RELU.name] if method.relu else [])]
    listed = ", ".join(options) or "none"
    return f"'{method.name}' has no option '{key}' here; it has {listed}.{did_you_mean(key, options)}"
