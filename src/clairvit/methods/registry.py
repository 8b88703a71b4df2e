"""Methods: a layer map and an aggregation under a name. Whatever is registered is tested, listed and documented."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, TypeVar

from torch import Tensor

from clairvit import _presets
from clairvit._cost import Cost
from clairvit._entries import Entry
from clairvit._facts import entries_of, facts_of
from clairvit._presets import preset_decorator
from clairvit._registry import Registry
from clairvit._spec import Registered, check_choice, check_function, check_is_free, check_name, is_built_in
from clairvit.errors import BadInput, NotApplicable
from clairvit.methods.aggregation import Aggregation, Total
from clairvit.methods.result import MapFunction, NumbersNote
from clairvit.models.model import Model
from clairvit.option_types import Doc, Option, options_of
from clairvit.plugins import load_entry_points
from clairvit.tracing.recorders.base import Recorder
from clairvit.tracing.rules import PLAIN, RuleTable

F = TypeVar("F", bound=MapFunction)
Output = Literal["matrix", "tokens", "image"]
Passes = Literal["none", "forward", "backward", "local"]
Place = Literal["attention", "tokens", "pixels", "embedding"]

COMBINATORS = {
    "plus": "sum over all layers",
    "skipplus": "sum over the layers from ceil(L/2) on",
    "from:M": "sum over the layers from M on",
    "rollout": "row-normalised product with the residual",
    "flow": "maximum flow through the row-normalised layers with the residual; slow, options as in attention-flow",
    "last": "the last layer alone",
    "layer:K": "layer K alone",
}
# From what looks at the least to what looks at the most; baselines last.
FAMILIES = ("attention", "gradient × attention", "gradient", "cam", "relevance", "decomposition", "perturbation")
MATRIX_COMBINATORS = ("rollout", "flow")  # those that need an N×N matrix from each layer
USUAL_PATCHES = 196  # of the costs in lists: 224 pixels in patches of 16
USUAL_LAYERS = 12
RELU = Option("relu", True, Annotated[bool, Doc("end the formula with a ReLU: keep only what is positive")])
PLUS_MODE = Option(
    "plus_mode",
    "layer",
    Annotated[Literal["layer", "subnetwork"], Doc("what a sum adds up: layer maps, or rollouts from each layer on")],
)
NORMALISE = Option(
    "normalise",
    "none",
    Annotated[
        Literal["rows", "first", "none"],
        Doc("what adds up to 1 in each layer: its rows with the identity, its rows before it is added, or nothing"),
    ],
)
RESERVED = ("all", "smooth", "shift", "ensemble", "calibrated")  # names that stand for other methods
_INJECTED = ("layer", "trace", "seed", "maps")  # parameters of a method's function that are no options


@dataclass(frozen=True)
class WeightedHeads:
    """A layer map of the form sum_h w_h f(A_h, G_h): vector × matrix, it is a sum that needs no N×N tensor.

    Args:
        entry: f, entry by entry.
        weights: A function of the `LayerView` to w, [B, H]; None: the mean over heads.
        head_sums: The sums over all entries of a head that `weights` reads, to be computed in the same pass.
    """

    entry: Entry
    weights: Callable[[Any], Tensor] | None = None
    head_sums: tuple[Entry, ...] = ()


@dataclass(frozen=True)
class Requires:
    """What a method needs of the shared trace, and of the model.

    Args:
        passes: "none", a "forward", a "backward", or "local": the graph itself, for gradients of single blocks.
        rules: The rule table of the backward it reads.
        second_rules: Another rule table whose backward it reads too.
        recorders: What must be recorded beyond x dx q k v dO.
        gradients: Where the backward must leave gradients; by default at the attention for a method that gives
            matrices, at the tokens for one that gives tokens, at the pixels for one that gives an image. At the
            "embedding" of the patches: with the recorder `PatchEmbedding`.
        first_layer: The layer nearest to the image that it reads; by default the aggregation's first one. Negative
            numbers count from the end.
        all_rows: The layer map cannot be computed for single query rows.
        heads: The form of the layer map, where it is a sum over heads: what is read of it can then be computed without
            the matrix itself.
        poolings: The only poolings it is defined for; none named: all.
        plane: It needs rows and columns of an image: clips, whose grid has frames too, are refused.
        structure: What a model must have beyond attention: "residual" (x + attention, decomposed), "middle" (that sum).
        fitted_to: A function of a model to the error if it is not the one that the method was fitted to.

    Example:
        >>> import clairvit as cv
        >>> cv.extend.Requires(passes="forward").tables  # the rule tables of its backward passes
        ()
    """

    passes: Passes = "backward"
    rules: RuleTable = PLAIN
    second_rules: RuleTable | None = None
    recorders: tuple[type[Recorder], ...] = ()
    gradients: tuple[Place, ...] | None = None
    first_layer: int | None = None
    all_rows: bool = False
    heads: WeightedHeads | None = field(default=None, repr=False)
    poolings: tuple[str, ...] = ()
    plane: bool = False
    structure: tuple[str, ...] = ()
    fitted_to: Callable[[Model], NotApplicable | None] | None = field(default=None, repr=False)

    @property
    def tables(self) -> tuple[RuleTable, ...]:
        """The rule tables whose backward passes it reads."""
        first = (self.rules,) if self.passes == "backward" else ()
        return first if self.second_rules is None else (*first, self.second_rules)

    @property
    def shared_cost(self) -> Cost:
        """The passes it shares with other methods: scores and targets take a forward in any case."""
        return Cost(1, (self.passes in ("backward", "local")) + (self.second_rules is not None))


BACKWARD = Requires()
FORWARD = Requires(passes="forward")
FORWARD_ON_PLANE = Requires(passes="forward", plane=True)
NOTHING = Requires(passes="none")


@dataclass(frozen=True)
class ExtraCost:
    """What a method spends on top of the shared trace.

    Args:
        passes: A function of the options, and of `patches` if it has that parameter, to the passes for one target.
        at_most: `passes` is an upper bound: the number is known only when it is done.
        slow: It takes much longer than one trace, so `--method all` leaves it out.
    """

    passes: Callable[..., Cost] | None = None
    at_most: bool = False
    slow: bool = False


NO_EXTRA_COST = ExtraCost()


@dataclass(frozen=True)
class Caveats:
    """What a reader of its maps must know.

    Args:
        zero_reason: Why its map is zero on whole kinds of models, for the warning.
        weak_class_signal: Why what all classes share outweighs the class in its map on whole kinds of models.
        numerically_unstable: Why round-off shows in its map (differences over near-zero sums).
        as_written: Why two networks that compute the same can get two maps.
        discrepancies: Where papers and public code disagree, and what is done here.
        note: A function (trace, layers, **options) of a run to a note (text, or `NumbersNote`), or None.
        no_tails: Of a method of output "image": why it is not defined for the sub-networks of a model, the end of a
            sentence that begins with its name; "" lets it be combined by "+plus" and the like.
    """

    zero_reason: str = ""
    weak_class_signal: str = ""
    numerically_unstable: str = ""
    as_written: str = ""
    discrepancies: str = ""
    note: Callable[..., str | NumbersNote | None] | None = None
    no_tails: str = ""


NO_CAVEATS = Caveats()


@dataclass(frozen=True)
class OptionOverrides:
    """Options that are not simply the function's and the aggregation's.

    Args:
        aliases: A paper's word -> the aggregation's field.
        combined: Defaults that change under a combinator.
        refused: An option that it has no use for, or that would be taken for something else -> why, and what to type.
    """

    aliases: Mapping[str, str] = field(default_factory=dict)
    combined: Mapping[str, Any] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)

    @property
    def words(self) -> dict[str, str]:
        """The aggregation's field -> the paper's word."""
        return {name: word for word, name in self.aliases.items()}


NO_OVERRIDES = OptionOverrides()


@dataclass(frozen=True, kw_only=True)
class Method(Registered):
    """A registered method, as `cv.list_methods()` lists it."""

    function: MapFunction = field(repr=False)
    output: Output  # an N×N matrix per layer, one number per token and layer, or a whole image at once
    aggregation: Aggregation | None = None
    requires: Requires | Callable[..., Requires] = field(default=Requires(), repr=False)  # or a function of the options
    signed: bool = False
    class_specific: bool = True
    relu: bool = False  # the formula ends with a ReLU (dropped when recombined: SkipPLUS sums signed maps)
    score: str = "logit"  # which score it explains where the user names none
    is_stochastic: bool = True  # False: it takes a seed for some options only, and its default map ignores it
    option_overrides: OptionOverrides = field(default=NO_OVERRIDES, repr=False)
    extra_cost: ExtraCost = field(default=NO_EXTRA_COST, repr=False)
    caveats: Caveats = field(default=NO_CAVEATS, repr=False)

    @property
    def summary(self) -> str:
        """The first line of its docstring."""
        return self.first_line

    def requirements(self, **options: Any) -> Requires:
        """Return what it needs of a trace with these options, the others at their defaults."""
        if isinstance(self.requires, Requires):
            return self.requires
        return self.requires(**{name: o.default for name, o in function_options(self.function).items()} | options)

    @property
    def passes(self) -> Passes:
        """What it must see of the shared trace, with the default options."""
        return self.requirements().passes

    @property
    def tables(self) -> tuple[str, ...]:
        """The names of the rule tables whose backward passes it reads, with the default options."""
        return tuple(map(str, self.requirements().tables))

    @property
    def cost(self) -> Cost:
        """Passes for one target, with the default options."""
        return self.requirements().shared_cost + self.own_cost(**self.options)

    @property
    def slow(self) -> bool:
        """Whether it takes much longer than one trace."""
        return self.extra_cost.slow

    def own_cost(self, patches: int = USUAL_PATCHES, **options: Any) -> Cost:
        """Return the passes that it makes itself, on top of the traces it shares with other methods."""
        count = self.extra_cost.passes
        if count is None:
            return Cost()
        by_patches = "patches" in inspect.signature(count).parameters
        return count(**options, **({"patches": patches} if by_patches else {}))

    @property
    def option_list(self) -> tuple[Option, ...]:
        """Every option: those of its function, of its aggregation under the names that users type, and `relu`."""
        words = self.option_overrides.words
        layered = (replace(o, name=words.get(o.name, o.name)) for o in layer_options(self, self.aggregation).values())
        return (*function_options(self.function).values(), *layered, *((RELU,) if self.relu else ()))

    @property
    def combinators(self) -> tuple[str, ...]:
        """The combinators that it may be followed by, such as "+plus"."""
        if self.caveats.no_tails:
            return ()
        return tuple(f"+{name}" for name in COMBINATORS if self.output == "matrix" or name not in MATRIX_COMBINATORS)


def function_options(function: Callable[..., Any]) -> dict[str, Option]:
    """Return the options of a method's function."""
    return options_of(function, _INJECTED)


def layer_options(method: Method, aggregation: Aggregation | None) -> dict[str, Option]:
    """Return the fields of an aggregation that are options of this method, with its values as defaults.

    One number per token has no rows to choose, a sum is one of the rows that the head reads unless the method's paper
    takes means, the order of a product is the later layer on the left, and none but presets divide columns.
    """
    if aggregation is None:
        return {}
    takes_means = isinstance(method.aggregation, Total) and method.aggregation.mean
    without = {"order", *(() if takes_means else ("rows", "mean")), *(() if method.output == "matrix" else ("rows",))}
    refused = method.option_overrides.refused if aggregation is method.aggregation else ()
    fields = options_of(type(aggregation), without.union(refused))
    if getattr(aggregation, NORMALISE.name, "columns") != "columns":
        fields[NORMALISE.name] = NORMALISE
    return {name: replace(option, default=getattr(aggregation, name)) for name, option in fields.items()}


def method(
    name: str,
    *,
    output: Output,
    aggregation: Aggregation | None = None,
    family: str = "custom",
    paper: str = "",
    requires: Requires | Callable[..., Requires] = BACKWARD,
    signed: bool = False,
    class_specific: bool = True,
    relu: bool = False,
    score: str = "logit",
    is_stochastic: bool = True,
    presets: Mapping[str, Mapping[str, Any]] | None = None,
    option_overrides: OptionOverrides = NO_OVERRIDES,
    extra_cost: ExtraCost = NO_EXTRA_COST,
    caveats: Caveats = NO_CAVEATS,
    slow: bool = False,
    overwrite: bool = False,
) -> Callable[[F], F]:
    """Register the decorated function as a method: this package's methods and your own.

    Its keyword parameters with defaults become options, checked against their annotations.

    Args:
        name: What users type.
        output: What the function returns: "matrix" ([B, rows, N] per layer), "tokens" ([B, N] per layer) or "image"
            ([B, rows, cols] from the whole trace).
        aggregation: How layers are combined, from `clairvit.extend`: `Product`, `Total`, `Single`; None for
            "image".
        family: A heading in lists and figures: one of the built-in ones, or "custom".
        paper: A reference.
        requires: What it needs of the shared trace: passes, rule table (`clairvit.rules`), recorders
            (`clairvit.recorders`); or a function of the options to it.
        signed: Whether the map has negative values.
        class_specific: Whether the map depends on the target.
        relu: Whether the formula ends with a ReLU, which a combinator drops.
        score: The score that it explains where the user names none: "logit" or "prob".
        is_stochastic: Whether its default map depends on the seed, if it takes one.
        presets: Published variants: name -> options.
        option_overrides: Options that are not simply the function's and the aggregation's.
        extra_cost: What it spends on top of the shared trace.
        caveats: What a reader of its maps must know.
        slow: It takes much longer than one trace, so "all" leaves it out; the same as `ExtraCost(slow=True)`.
        overwrite: Replace a built-in method of the same name.

    Returns:
        A decorator that returns the function unchanged.

    Raises:
        BadInput: A built-in name without `overwrite`, an unknown family, a missing aggregation, a function without the
            parameter `layer` (or `trace`), or an option without annotation.

    Example:
        >>> import clairvit as cv
        >>> from torch import Tensor
        >>> from clairvit.extend import FORWARD, LayerView, Total
        >>> @cv.method("token-norm", output="tokens", aggregation=Total(), requires=FORWARD, class_specific=False)
        ... def token_norm(layer: LayerView, power: float = 1.0) -> Tensor:
        ...     return layer.x.norm(dim=-1) ** power
        >>> cv.list_methods("token-*")
        ['token-norm']
        >>> cv.explain("pets", "demo", "token-norm(power=2)+last").maps.shape
        torch.Size([1, 14, 14])
    """
    check_name(name, "method")
    check_choice(name, "output", output, ("matrix", "tokens", "image"))
    check_choice(name, "family", family, (*FAMILIES, "baseline", "custom"))
    if (aggregation is None) != (output == "image") or isinstance(aggregation, type):
        raise BadInput(
            f"output={output!r} and aggregation={aggregation!r} were given for the method '{name}'; expected an "
            "aggregation of layers, such as clairvit.extend.Total(), for 'matrix' and 'tokens', and none for "
            "'image'."
        )

    def register(function: F) -> F:
        check_function(name, function, "trace" if output == "image" else "layer")
        if not is_built_in(function) and not overwrite:
            check_is_free(name, "method", METHODS.registered_so_far(name), RESERVED)
        facts = facts_of(name, function.__module__)
        registered = Method(
            name=name,
            family=family,
            paper=paper,
            function=function,
            output=output,
            aggregation=aggregation,
            requires=requires,
            signed=signed,
            class_specific=class_specific,
            relu=relu,
            score=score,
            is_stochastic=is_stochastic,
            presets=presets or {},
            option_overrides=option_overrides,
            extra_cost=replace(extra_cost, slow=slow or extra_cost.slow),
            caveats=replace(
                caveats,
                discrepancies=caveats.discrepancies or facts.discrepancies,
                as_written=caveats.as_written or facts.as_written,
            ),
            facts=facts,
        )
        METHODS.register(name, registered, module=function.__module__)
        return function

    return register


def named_variant(name: str, base: str, *, meaning: str, details: str, paper: str, **pinned: Any) -> None:
    """Register `base` with some options pinned under a name of its own: the same function, fewer options.

    Args:
        name: What users type; `name` is `base(**pinned)`, bit by bit.
        base: A registered method.
        meaning: What the docstring's first line says after the base's formula and a colon.
        details: The rest of the docstring.
        paper: Who published the variant; the base's own paper is named after it.
        **pinned: Options of the base's function and their values.
    """
    method = METHODS.registered(base)
    assert method is not None, f"{base} must be registered before {name}"
    function, requires, note = method.function, method.requires, method.caveats.note

    @functools.wraps(function)
    def variant(*args: Any, **options: Any) -> Any:
        return function(*args, **pinned, **options)

    signature = inspect.signature(function)
    options = [p for p in signature.parameters.values() if p.name not in pinned]
    variant.__signature__ = signature.replace(parameters=options)  # type: ignore[attr-defined]
    variant.__doc__ = f"{method.summary.partition(': ')[0]}: {meaning}\n\n{details}"
    facts = facts_of(name, function.__module__)
    caveats = replace(
        method.caveats,
        as_written=facts.as_written,
        discrepancies=facts.discrepancies or f"As {base}.",
        note=note and functools.partial(note, **pinned),
    )
    registered = replace(
        method,
        name=name,
        function=variant,
        paper=f"{paper}; {method.paper}",
        requires=requires if isinstance(requires, Requires) else functools.partial(requires, **pinned),
        presets={},
        caveats=caveats,
        facts=facts,
    )
    METHODS.register(name, registered, module=function.__module__)


def preset(name: str, preset: str, *, moved: Sequence[str] = (), **fields: Any) -> Callable[[F], F]:
    """Register a function as a preset of a method: a layer map and options of its own, under the method's name.

    Args:
        name: The method.
        preset: The name of the preset.
        moved: Options of the method in earlier versions, `name` or `name=value`, that are part of this preset now.
        **fields: Fields of `Method` that differ from the method's: aggregation, requires, caveats, …
    """
    return preset_decorator(METHODS, name, preset, moved, fields)


def add_presets(name: str, **presets: Mapping[str, Any]) -> None:
    """Add presets, preset name -> options, to a method."""
    _presets.add_presets(METHODS, name, presets)


def list_methods() -> list[Method]:
    """Return every registered method."""
    return METHODS.values()


def by_family(families: Iterable[str]) -> list[int]:
    """Return positions in the order of `FAMILIES`, within a family as given; baselines last, unknown ones before."""
    names = list(families)
    order = (*FAMILIES, *dict.fromkeys(name for name in names if name not in (*FAMILIES, "baseline")), "baseline")
    return sorted(range(len(names)), key=lambda place: order.index(names[place]))


def aliases() -> dict[str, tuple[str, ...]]:
    """Return names that papers, talks and other libraries use, and what the same thing is called here.

    They are suggested, never taken silently: most of them stand for several methods.
    """
    names: dict[str, tuple[str, ...]] = {}
    registered = {method.name: method.facts for method in METHODS.values()}
    for name, facts in {**entries_of(__package__), **registered}.items():
        for alias in facts.aliases:
            names[alias] = (*names.get(alias, ()), name)
    return names


METHODS: Registry[Method] = Registry(
    "method",
    aliases=aliases,
    package=__package__,
    modules=["clairvit.compat.vit_explain", "clairvit.compat.reports"],  # they add presets
    load_others=functools.partial(load_entry_points, "clairvit.methods"),
    advice="`clairvit methods` (or cv.list_methods()) lists all of them.",
)


def find_method(name: str) -> Method:
    """Return a method by its name; raise UnknownName with a suggestion if there is none."""
    return METHODS.resolve(name)
