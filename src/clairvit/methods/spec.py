"""Method strings, settled: which method, with which options, over which layers.

"rollout"   "rollout(fusion=max)"   "genatt+skipplus"   "decompx+from:6"   "ixg+layer:3"
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

from clairvit.errors import BadInput, NotApplicable, UnknownName, did_you_mean
from clairvit.methods.aggregation import Aggregation, Product, Single, Suffixes, Total
from clairvit.methods.explanation import Cost
from clairvit.methods.flow import Flow
from clairvit.methods.options import check_range
from clairvit.methods.parsing import SEARCHED, ParsedSpec, parse_spec, refuse_auto
from clairvit.methods.registry import (
    ALIASES,
    COMBINATORS,
    MATRIX_COMBINATORS,
    USUAL_PATCHES,
    Method,
    Passes,
    find_method,
    layer_options,
    list_methods,
    load_all,
    parameters,
    shared_cost,
)


@dataclass(frozen=True)
class MethodSpec:
    """A method with its options and aggregation settled: what a run executes."""

    method: Method
    options: tuple[tuple[str, Any], ...]  # of the function
    aggregation: Aggregation | None
    relu: bool
    text: str  # canonical: the same text always means the same map
    members: tuple[MethodSpec, ...] = ()  # the methods whose maps it joins: it is an ensemble

    @property
    def key(self) -> tuple[Any, ...]:
        """Two bounds with the same key have the same layer map."""
        return (self.method.function, self.options)

    @property
    def needs_all_rows(self) -> bool:
        return self.method.needs_all_rows or (self.aggregation is not None and self.aggregation.needs_all_rows)

    @property
    def inside(self) -> bool:
        """Does it look at what happens inside blocks, from a film of the forward?"""
        unless = self.method.forward_unless
        return "residual" in self.method.needs or (unless is not None and unless not in self.options)

    @property
    def middles(self) -> bool:
        """Does it read the residual stream after attention?"""
        return "middle" in self.method.needs

    @property
    def passes(self) -> Passes:
        if self.method.forward_unless is not None and self.inside:
            return "forward"
        return "backward" if self.method.backward_if in self.options else self.method.passes

    @property
    def reads_gradients(self) -> bool:
        """Does it need a backward: of the shared trace, of single blocks, or of passes that it makes itself?"""
        return self.passes in ("backward", "local") or self.also is not None or self.own_cost().backwards > 0

    @property
    def backwards(self) -> int:
        """How many backwards of the shared traces it reads, for one target."""
        if self.members:
            tables = {t for one in self.members for t in (one.rules, one.also)} - {None}
            return len(tables) + any(one.passes == "local" for one in self.members)
        return shared_cost(self.passes, self.also).backwards

    @property
    def cost(self) -> Cost:
        """Passes for one target, on an image of 14 × 14 patches."""
        return self.cost_for(USUAL_PATCHES)

    def cost_for(self, patches: int) -> Cost:
        """Passes for one target, on an image of so many patches."""
        return Cost(shared_cost(self.passes).forwards, self.backwards) + self.own_cost(patches)

    def own_cost(self, patches: int = USUAL_PATCHES) -> Cost:
        """The passes that it makes itself, on top of shared traces."""
        return sum((one.method.own_cost(patches, **dict(one.options)) for one in self.members or (self,)), Cost())

    @property
    def rules(self) -> str | None:
        """The rule table of the backward it reads, if it reads one."""
        if self.passes != "backward":
            return None
        return (self.method.rules or "plain") if self.method.table is None else self.method.table(**dict(self.options))

    @property
    def also(self) -> str | None:
        """The second rule table that it reads."""
        return self.method.also if self.method.also_table is None else self.method.also_table(**dict(self.options))

    @property
    def biases(self) -> str | None:
        """Which biases a backward must add up for it."""
        return None if self.method.reads_biases is None else self.method.reads_biases(**dict(self.options))

    @property
    def needs_pixels(self) -> bool:
        """Does it read the gradient at the pixels?"""
        whole = self.aggregation is None and self.method.reads == "pixels"
        return self.passes == "backward" and (whole or ("level", "pixel") in self.options)

    @property
    def needs_attention(self) -> bool:
        """Does it read gradients at the attention?"""
        return (
            self.method.output == "matrix"
            or self.method.reads == "last attention"
            or self.method.backward_if in self.options
        )

    @property
    def needs_tokens(self) -> bool:
        """Does it read gradients at the blocks' inputs?"""
        return self.method.output == "tokens"

    def first_layer(self, count: int) -> int:
        """The layer nearest to the image that it reads: a backward need go no further."""
        if ("reversed_gradients", True) in self.options:
            return 0  # the last layer's partner is the first
        if self.aggregation is None:
            return count - 1 if self.method.reads == "last attention" else count
        return self.aggregation.used(count).start

    def notes(self, count: int) -> tuple[str, ...]:
        """What a reader of the map should know: that a start which is meant to be searched was not."""
        searched = SEARCHED in self.method.option_aliases and "+" not in self.text
        if not searched or not isinstance(self.aggregation, Total) or self.aggregation.start != "half":
            return ()
        start, name = self.aggregation.used(count).start, self.method.name
        return (f"{name}: m is ceil(L/2) = {start}; `clairvit choose IMAGES --tune-start {name}` looks for m*",)


Wrapper = Callable[[ParsedSpec, dict[str, Any]], MethodSpec]
_wrappers: dict[str, Wrapper] = {}


def wraps(name: str) -> Callable[[Wrapper], Wrapper]:
    """Enter a function on methods, such as smooth(…), under its name."""

    def enter(wrapper: Wrapper) -> Wrapper:
        _wrappers[name] = wrapper
        return wrapper

    return enter


def resolve_method(text: str, **options: Any) -> MethodSpec:
    """Settle a method string such as "rollout(fusion=max)+skipplus"; keyword options come on top."""
    load_all()
    try:
        written = parse_spec(text)
    except BadInput as error:
        known = [method.name for method in list_methods()]
        raise BadInput(f"{error}{did_you_mean(text, known, ALIASES) if isinstance(text, str) else ''}") from None
    combinator = written.combinator
    if written.name in _wrappers:
        return _wrappers[written.name](written, options)
    method = find_method(written.name)
    refuse_auto(written.name, combinator, written.options | options)
    if written.inner:
        raise BadInput(f"'{written.inner[0]}' in '{text}' is not an option; expected option=value.")
    given = written.options | options
    plus_mode = _plus_mode(method, combinator, given)
    over, combined = _combined(method, combinator, plus_mode)
    for word in ("preset", "compat"):
        if word in given:
            given = _preset(method, str(given.pop(word)), over, combinator) | given
    own = {key: p.default for key, p in parameters(method.function).items()}
    if combined:
        own |= method.combinator_defaults
    relu = method.relu and not combined
    fields = layer_options(method, over)
    for key, value in given.items():
        ours = method.option_aliases.get(key, key)
        if key in own:
            own[key] = checked(_hints(method.function)[key], key, value)
            check_range(method.function, key, own[key])
        elif ours in fields:
            assert over is not None
            over = replace(over, **{ours: checked(_hints(type(over))[ours], key, value)})
        elif key == "relu" and method.relu:
            relu = checked(bool, key, value)
        else:
            raise UnknownName(_no_option(method, key, over))
    canonical = _canonical(method, own, over, relu, combinator, plus_mode)
    return MethodSpec(method, tuple(sorted(own.items())), over, relu, canonical)


def _plus_mode(method: Method, combinator: str, given: dict[str, Any]) -> str:
    """Taken out of `given`: does a sum over layers add up what each says, or the rollouts that start at each?"""
    mode = (
        "layer"
        if "plus_mode" not in given
        else checked(Literal["layer", "subnetwork"], "plus_mode", given["plus_mode"])
    )
    word = combinator.partition(":")[0]
    if "plus_mode" in given and word not in ("plus", "skipplus", "from"):
        raise UnknownName(
            f"'{method.name}' has no option 'plus_mode' here; it says what a sum over layers adds up. "
            f"Use {method.name}(plus_mode={mode})+plus."
        )
    given.pop("plus_mode", None)
    if mode == "subnetwork" and not isinstance(method.aggregation, Product):
        raise NotApplicable(
            f"plus_mode=subnetwork adds up the rollouts that start at each layer, and '{method.name}' is no rollout: "
            f"its map of the network from a layer on is what that layer says. Use {method.name}+{combinator}."
        )
    return str(mode)


def _combined(method: Method, combinator: str, plus_mode: str = "layer") -> tuple[Aggregation | None, bool]:
    """The aggregation that a combinator stands for, and whether there was one."""
    if not combinator:
        return method.aggregation, False
    word, colon, number = combinator.partition(":")
    names = [c.partition(":")[0] for c in COMBINATORS]
    if word not in names or (word in ("from", "layer")) != bool(colon):
        known = ", ".join(f"+{c}" for c in COMBINATORS)
        raise UnknownName(
            f"There is no combinator '+{combinator}'; expected one of {known}.{did_you_mean(word, names)}"
        )
    if method.output == "image":
        raise NotApplicable(
            f"'{method.name}' makes its map from the whole image at once, so '+{combinator}' has no layers to combine. "
            f"Use '{method.name}' alone, or a layer-wise method such as "
            f"{'genatt' if word in MATRIX_COMBINATORS else 'ixg'}+{combinator}."
        )
    if word in MATRIX_COMBINATORS and method.output != "matrix":
        raise NotApplicable(
            f"'+{word}' goes from token to token through N×N matrices, and '{method.name}' says one number for each "
            f"token. Use {method.name}+plus or {method.name}+skipplus, or a matrix method such as genatt+{word}."
        )
    if colon and not re.fullmatch(r"-?\d+", number):
        raise BadInput(f"'+{combinator}' needs a layer number; expected +{word}:6, say.")

    def total(start: int | Literal["half"]) -> Aggregation:
        own = method.aggregation
        if plus_mode == "subnetwork" and isinstance(own, Product):
            return Suffixes(start, own.residual, own.alpha, own.normalise)
        return Total(start)

    made: dict[str, Callable[[], Aggregation]] = {
        "plus": lambda: total(0),
        "skipplus": lambda: total("half"),
        "from": lambda: total(int(number)),
        "rollout": lambda: Product(residual=1.0, normalise="rows"),
        "flow": lambda: Flow(),
        "last": lambda: Single(-1),
        "layer": lambda: Single(int(number)),
    }
    return made[word](), True


def _preset(method: Method, name: str, over: Aggregation | None, combinator: str) -> dict[str, Any]:
    if name not in method.presets:
        known = ", ".join(method.presets) or "none"
        raise UnknownName(
            f"'{method.name}' has no preset '{name}'; it has {known}.{did_you_mean(name, method.presets)}"
        )
    preset = dict(method.presets[name])
    own = {*parameters(method.function), *layer_options(method, over), "relu"}
    replaced = [key for key in preset if method.option_aliases.get(key, key) not in own]
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
    own = {name: _hints(method.function)[name] for name in parameters(method.function)}
    paper_words = {ours: theirs for theirs, ours in method.option_aliases.items()}
    aggregation = {} if method.aggregation is None else _hints(type(method.aggregation))
    layers = {paper_words.get(name, name): aggregation[name] for name in layer_options(method, method.aggregation)}
    return own | layers | ({"relu": bool} if method.relu else {})


def checked(hint: Any, key: str, value: Any) -> Any:
    """The value, if the annotation of the option `key` allows it."""
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


def _no_option(method: Method, key: str, over: Aggregation | None) -> str:
    paper_words = {ours: theirs for theirs, ours in method.option_aliases.items()}
    fields = [paper_words.get(name, name) for name in layer_options(method, over)]
    known = [*parameters(method.function), *fields, *(["relu"] if method.relu else [])]
    listed = ", ".join(known) or "none"
    return f"'{method.name}' has no option '{key}' here; it has {listed}.{did_you_mean(key, known)}"


def _canonical(
    method: Method, own: dict[str, Any], over: Aggregation | None, relu: bool, combinator: str, plus_mode: str
) -> str:
    """Name, every option that is not the default, combinator."""
    defaults = {key: p.default for key, p in parameters(method.function).items()}
    base, combined = _combined(method, combinator, plus_mode)
    if combined:
        defaults |= method.combinator_defaults
    changed = {key: value for key, value in own.items() if value != defaults[key]}
    if over is not None and base is not None:
        paper_words = {ours: theirs for theirs, ours in method.option_aliases.items()}
        changed |= {
            paper_words.get(f.name, f.name): getattr(over, f.name)
            for f in dataclasses.fields(over)
            if getattr(over, f.name) != getattr(base, f.name)
        }
    if method.relu and relu != (not combined):
        changed["relu"] = relu
    if plus_mode != "layer":
        changed["plus_mode"] = plus_mode
    inside = ",".join(f"{key}={value}" for key, value in sorted(changed.items()))
    return method.name + (f"({inside})" if inside else "") + (f"+{combinator}" if combinator else "")
