"""Method: a layer map and an aggregation under a name. Once registered it is swept by the tests, listed, documented."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any, Literal, TypeVar

from clairvit.compat import reports, vit_explain
from clairvit.errors import UnknownName, did_you_mean
from clairvit.methods.aggregation import Aggregation
from clairvit.methods.explanation import Cost
from clairvit.methods.result import MapFunction

F = TypeVar("F", bound=MapFunction)
Output = Literal["matrix", "tokens", "image"]
Passes = Literal["none", "forward", "backward", "local"]

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
_GIVEN = ("layer", "trace", "seed")  # parameters of a method's function that are no options


@dataclass(frozen=True)
class Method:
    """What `cv.list_methods()` lists."""

    name: str
    family: str
    paper: str
    function: MapFunction = field(repr=False)
    output: Output  # N×N matrix a layer, one number a token and layer, or a whole image at once
    passes: Passes  # what it must see: nothing, a forward, a backward, or one block at a time
    rules: str | None  # the rule table of its backward
    aggregation: Aggregation | None
    signed: bool
    class_specific: bool
    relu: bool = False  # the formula ends with a ReLU (dropped when recombined: SkipPLUS sums signed maps)
    needs_all_rows: bool = False  # the layer map cannot be computed for single query rows
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, repr=False)
    option_aliases: Mapping[str, str] = field(
        default_factory=dict, repr=False
    )  # a paper's word -> the aggregation's field
    combinator_defaults: Mapping[str, Any] = field(
        default_factory=dict, repr=False
    )  # options that change under a combinator
    also: str | None = None  # a second rule table whose gradients it reads too
    table: Callable[..., str] | None = field(default=None, repr=False)  # options -> rule table, where they choose it
    also_table: Callable[..., str | None] | None = field(default=None, repr=False)  # options -> the second one
    needs: tuple[
        str, ...
    ] = ()  # what a model must have beyond attention: "residual" (x + attention, taken apart), "middle" (that sum)
    poolings: tuple[str, ...] = ()  # the only poolings it is defined for; none named: all
    zero_reason: str = ""  # why its map is zero on whole kinds of models, in words for the warning
    weak_class_signal: str = ""  # why what all classes share outweighs the class in its map on whole kinds of models
    numerically_unstable: str = ""  # why round-off shows in its map (differences over near-zero sums), in words
    forward_unless: tuple[str, Any] | None = field(default=None, repr=False)  # else it reads the film, no backward
    discrepancies: str = ""  # where papers and public code disagree, and what we do, in one or two sentences
    slow: bool = False  # takes much longer than one trace, so `--method all` leaves it out
    # (options, and `patches` if it asks for them) -> passes of its own for one target
    more: Callable[..., Cost] | None = field(default=None, repr=False)
    at_most: bool = False  # `more` is a bound: how many it takes shows on the way
    is_stochastic: bool = (
        True  # False: it takes a seed for some removals only, and its default map does not depend on it
    )
    score: str = "logit"  # which score it explains where the user names none
    reads: Literal["pixels", "last attention"] = "pixels"  # the gradient it wants, if it gives an image
    backward_if: tuple[str, Any] | None = field(default=None, repr=False)  # an option that makes it need a backward
    reads_biases: Callable[..., str] | None = field(default=None, repr=False)  # options -> which biases it reads
    note_fn: Callable[..., str | None] | None = field(default=None, repr=False)  # (trace, layers, **options) -> a note

    @property
    def summary(self) -> str:
        return (inspect.getdoc(self.function) or "").split("\n")[0]

    @property
    def cost(self) -> Cost:
        """Passes for one target, with the default options."""
        return shared_cost(self.passes, self.also) + self.own_cost(**self.options)

    @property
    def tables(self) -> tuple[str, ...]:
        """The rule tables whose backwards it reads, with the default options."""
        return tuple(name for name in (self.rules, self.also) if name is not None)

    def own_cost(self, patches: int = USUAL_PATCHES, **options: Any) -> Cost:
        """The passes that it makes itself, on top of the traces it shares with other methods."""
        if self.more is None:
            return Cost()
        asks = "patches" in inspect.signature(self.more).parameters
        return self.more(**options, **({"patches": patches} if asks else {}))

    @property
    def options(self) -> dict[str, Any]:
        """Every option with its default."""
        shown = {name: p.default for name, p in parameters(self.function).items()}
        if self.aggregation is not None:
            paper_words = {ours: theirs for theirs, ours in self.option_aliases.items()}
            shown |= {
                paper_words.get(name, name): getattr(self.aggregation, name)
                for name in layer_options(self, self.aggregation)
            }
        return shown | ({"relu": True} if self.relu else {})

    @property
    def combinators(self) -> tuple[str, ...]:
        if self.output == "image":
            return ()
        return tuple(f"+{name}" for name in COMBINATORS if self.output == "matrix" or name not in MATRIX_COMBINATORS)


def layer_options(method: Method, over: Aggregation | None) -> list[str]:
    """The aggregation's fields that mean something to this method: one number for each token has no rows to choose."""
    names = [] if over is None else [f.name for f in dataclasses.fields(over)]
    return [name for name in names if method.output == "matrix" or name != "rows"]


def shared_cost(passes: Passes, also: str | None = None) -> Cost:
    """What is spent on the traces that a method shares with others: scores and targets take a forward in any case."""
    return Cost(1, (1 if passes in ("backward", "local") else 0) + (also is not None))


_registry: dict[str, Method] = {}
_HOMES = (
    "attention",
    "gradient_attention",
    "gradient",
    "cam",
    "fullgrad",
    "lrp",
    "decomposition",
    "multi_pass",
    "leave_one_out",
    "scorecam",
    "counterfactual",
    "lime_shap",
    "rise",
    "occlusion",
    "hsic",
    "baseline",
    "ensembles",
)


def register(
    name: str,
    function: MapFunction,
    *,
    family: str,
    paper: str,
    output: Output,
    aggregation: Aggregation | None = None,
    passes: Passes = "backward",
    rules: str = "plain",
    signed: bool = False,
    class_specific: bool = True,
    **more: Any,
) -> None:
    """Give a layer map a name, an aggregation and its place in the lists."""
    table = rules if passes == "backward" else None
    more.setdefault("discrepancies", _discrepancies().get(name, ""))
    more["presets"] = {
        **more.get("presets", {}),
        **vit_explain.PRESETS.get(name, {}),
        **reports.PRESETS.get(name, {}),
    }
    _registry[name] = Method(
        name, family, paper, function, output, passes, table, aggregation, signed, class_specific, **more
    )


@functools.cache
def _discrepancies() -> Mapping[str, str]:
    """Return where papers and public code disagree, by method."""
    return tomllib.loads(resources.files("clairvit.methods").joinpath("discrepancies.toml").read_text("utf-8"))


def method(name: str, **what: Any) -> Callable[[F], F]:
    """`register` as a decorator."""

    def enter(function: F) -> F:
        register(name, function, **what)
        return function

    return enter


@functools.cache
def load_all() -> None:
    """Import the modules that register something."""
    for home in _HOMES:
        importlib.import_module(f"clairvit.methods.{home}")


def list_methods() -> list[Method]:
    """Every registered method."""
    load_all()
    return list(_registry.values())


def by_family(families: Iterable[str]) -> list[int]:
    """Positions in the order of `FAMILIES`, within a family as given; baselines last, unknown ones before."""
    given = list(families)
    known = (*FAMILIES, *dict.fromkeys(name for name in given if name not in (*FAMILIES, "baseline")), "baseline")
    return sorted(range(len(given)), key=lambda place: known.index(given[place]))


# Names that papers, talks and other libraries use, and what the same thing is called here. They are suggested, never
# taken silently: most of them stand for several methods.
ALIASES: dict[str, tuple[str, ...]] = {
    "chefer": ("genatt", "transatt"),
    "cheferlrp": ("transatt",),
    "genericattention": ("genatt",),
    "transformerattribution": ("transatt",),
    "attentionrollout": ("rollout",),
    "attention": ("raw-attention", "rollout"),
    "flow": ("attention-flow",),
    "gradcam++": ("gradcam-pp",),
    "gradcamplusplus": ("gradcam-pp",),
    "guidedgradcam": ("gradcam",),
    "gradient": ("saliency", "ixg"),
    "gradients": ("saliency", "ixg"),
    "vanillagradient": ("saliency", "vanilla"),
    "inputxgradient": ("ixg",),
    "gradientxinput": ("ixg",),
    "gradxinput": ("ixg",),
    "ig": ("integrated-gradients",),
    "intgrad": ("integrated-gradients",),
    "shap": ("kernelshap",),
    "shapley": ("kernelshap",),
    "loo": ("leave-one-out",),
    "ablation": ("leave-one-out", "occlusion"),
    "beyondattention": ("transatt",),
}


def find_method(name: str) -> Method:
    load_all()
    if name not in _registry:
        raise UnknownName(
            f"There is no method '{name}'.{did_you_mean(name, _registry, ALIASES)} "
            "`clairvit methods` (or cv.list_methods()) lists all of them."
        )
    return _registry[name]


@functools.cache
def parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """The options of a method's function."""
    return {name: p for name, p in inspect.signature(function).parameters.items() if name not in _GIVEN}
