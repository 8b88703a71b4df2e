"""Print docs/methods.md from the registry:  python docs/generate_methods.py > docs/methods.md"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from itertools import groupby

from clairvit._presets import preset_formula, preset_settings
from clairvit.methods.aggregation import Product, Single, Total
from clairvit.methods.registry import COMBINATORS, MATRIX_COMBINATORS, Method, by_family, list_methods
from clairvit.option_types import Option
from clairvit.plotting.labels import cost_label

COLUMNS = ("method", "formula", "map", "needs", "cost", "paper")
INTRODUCTION = """# Methods

*Made by `python docs/generate_methods.py`; do not edit.*

`A` attention (row = query), `G` its gradient, `x` a block's input, `dx` its gradient, `h` head, `l` layer, `L` layers
in all. [What each of them says in words](#in-detail), with all options, presets and discrepancies, follows the tables.

*Map*: signed or not, and whether it depends on the class. *Needs*: what a method must see, and the rule table of its
backward; methods with the same table share one backward.
*Cost* is of one image of 14 × 14 patches and one target, as if the method were run alone: scores and targets take a
forward in any case. Variants are `NAME(option=…)` and `NAME(preset=…)`; combinators (`NAME+plus`) come on top."""
PEERS = """
## What others get wrong

Found by reading public code against the papers. The defaults here are right; where a published picture can only be
reproduced with the mistake, a preset has it.

* **Gradients paired with the wrong layer.** Backward hooks see the last layer first. vit-explain zips them with
  attentions collected first layer first, so layer l meets the gradient of layer L−1−l
  (`grad-rollout(preset=jacobgil)`).
* **Products in the wrong order.** With row = query, later layers stand on the left. Two of the five papers multiply
  the other way round and read a row that is not the output's (`rollout(preset=joita)`, `rollout(preset=cmi)`).
* **A missing keepdim.** Dividing an N×N matrix by its row sums without it divides columns: harmless until entries are
  discarded or heads fused by max (`rollout(preset=jacobgil)`).
* **The loss instead of the score.** Its gradient has the opposite sign, so a ReLU keeps what speaks against the
  class.
* **A batch of one.** Global minima, maxima and sums over the batch make maps depend on the other images. Here each
  image's map is the same in any batch; tests compare.
* **Row 0 and columns 1:.** Hard-wired, they are wrong for distilled models, registers, mean and attention pooling.
  Here the rows are those that the scores depend on, and all prefix tokens are cut off at the end.
* **A square grid.** `sqrt(N − 1)` fails for images that are not square and for models with registers.
* **Signs thrown away.** Clipping and rescaling to 0…1 before anything is stored makes evidence against a class
  unreadable. Maps stay raw here; colour comes last.
* **Hooks that see nothing.** Fused attention bypasses hooks on dropout or softmax modules, silently. Here attention
  is captured where it is computed, and a model in which none is seen is an error."""
NOT_HERE = """
## Not here

**I-SAW** (Mallick et al., ICIP 2022) is named in one of the five papers without a formula, and no code or text of it
could be read. Nothing is shipped under that name until it can be.

**PA-LRP** (arXiv 2506.02138) and **absLRP** (arXiv 2412.09311) are rule tables whose papers could not be read
completely: secondary sources leave out rules of single operations. They would be a file each in `tracing/rules/`."""

FUNCTIONS = """
A rollout under `+plus`, `+skipplus` or `+from:M` adds up what each layer says, as SkipPLUS does in practice. Read
literally, PLUS is the sum of the rollouts of all sub-networks: `genatt(plus_mode=subnetwork)+plus`.

A method that makes its map from the whole image (`saliency`, `lime`, `rise`, `lrp`, `tam`, …) is summed literally, by
SkipPLUS's equation 3: it is run on each sub-network f_l, the blocks from l on, whose image is the grid of tokens at
block l. `lime+layer:6` is `lime` on `cv.tail(model, 6)`, `lime+plus` the sum over all l, `lime+skipplus` over the l
from ceil(L/2) on; the maps are added as they are, none is scaled. What is removed, changed or followed is a patch's
token; the class token and registers stay as they are. So `removal=mean` and a baseline of zero are a token of zeros,
noise is as large as a part of the tokens' range, layer numbers in options count from l on, and options that speak of
pixels (`level=pixel`, `features=superpixels`, `removal=black`) are refused. `leave-one-out+layer:0` is `leave-one-out`,
since that drops tokens too; `saliency+layer:0` is not `saliency`: it reads tokens, not pixels. Each l takes the passes
of the method and a forward more, through fewer blocks the larger l is; the blocks before it run once per image. Models
whose layers work on other tokens (windows, stages), or whose head reads earlier blocks, are refused.

`METHOD(normalise=first)+rollout` is SkipPLUS's equation 2 for every method with a matrix per layer: rows add up to 1
before the identity is added. `normalise=rows`, the default, divides them after it is added.

Functions on methods, in a method string or in Python (`smooth`, `shift`, `ensemble` and `refine` of
`cv.ensembles`):

* `smooth(METHOD, n=20, sigma=0.1)`: the mean of a method over n noisy images, noise as in SmoothGrad.
* `shift(METHOD, n=9, pixels=8, shifts=grid, border=edge, level=patch)`: the mean of a method over n shifted images, its
  maps shifted back, so that what depends on where patches are cut cancels (the averaging half of DAVE, ICML 2026).
  `level=pixel` keeps the mean at the pixels; `border=wrap` shifts in a circle.
* `ensemble(METHOD, METHOD, …, by=rank)`: the mean of several methods' maps, each by the rank of its patches, or scaled
  to 0 … 1 (`by=minmax`); `by=max` is the largest of them, each over its own maximum, as LayerCAM joins layers:
  `ensemble(layercam+layer:5,layercam,by=max)`. The members share their passes.
* `refine(METHOD, passes=256, removal=token)`: the method's map, corrected by passes in which random patches are kept,
  with a standard error per patch: [refine](refine.md). `cv.explain(…, passes=256)` writes it around a method.

`clairvit.methods.ensembles.starts("focusvit", 12)` names a method from each start layer on; `cv.compare` makes all of
them from one trace."""


def main() -> None:
    listed = list_methods()
    methods = [listed[place] for place in by_family(method.family for method in listed)]
    print(INTRODUCTION)
    for family, members in groupby(methods, key=lambda method: method.family):
        title = "CAM" if family == "cam" else family.capitalize()
        print(f"\n## {title} methods\n")
        print_row(COLUMNS)
        print_row(["---"] * len(COLUMNS))
        for method in members:
            print_row(cells(method))
    print("\n## Combinators\n\nThey replace the way layers are combined:\n")
    for name, meaning in COMBINATORS.items():
        print(f"* `+{name}`: {meaning}")
    print(FUNCTIONS)
    print(PEERS)
    print(NOT_HERE)
    print("\n## In detail")
    family = ""
    for method in methods:
        if method.family != family:
            family = method.family
            print(f"\n### Family: {family}")
        section(method)


def print_row(texts: list[str] | tuple[str, ...]) -> None:
    """One line of the table. A bar inside a cell would end it, even inside a formula."""
    print("| " + " | ".join(text.replace("|", "\\|") for text in texts) + " |")


def cells(method: Method) -> list[str]:
    return [
        f"[`{method.name}`](#{method.name})",
        formula(method),
        map_kind(method),
        "<br>".join(needs(method)),
        bound(method) + cost_label(method.cost) + ("; slow" if method.slow else ""),
        method.paper,
    ]


def map_kind(method: Method) -> str:
    sign = ("signed with `relu=False`" if method.relu else "signed") if method.signed else "not negative"
    return sign if method.class_specific else f"{sign}; the same for all classes"


def bound(method: Method) -> str:
    return "at most " if method.extra_cost.at_most else ""


def formula(method: Method) -> str:
    """The docstring's first line up to its colon, as code (it has asterisks), and how layers are combined.

    Methods that share a layer map share its formula, so the layers are said here unless the formula says them itself.
    """
    text = method.summary.partition(":")[0].strip()
    says_layers = any(sign in text for sign in ("prod_l", "sum_{l", "sum_l", "maxflow", "last layer"))
    layers = "" if method.aggregation is None or says_layers else f"<br>layers: {combined(method.aggregation)}"
    return f"`{text}`{layers}"


def combined(over: object) -> str:
    """What an aggregation does, in two words."""
    if isinstance(over, Single):
        return {0: "the first", -1: "the last"}.get(over.layer, f"layer {over.layer}")
    if isinstance(over, Total):
        return ("mean" if over.mean else "sum") + ("" if over.start == 0 else f" from {over.start} on")
    if isinstance(over, Product):
        return "product with the residual" if over.residual else "product"
    return type(over).__name__.lower()


def needs(method: Method) -> list[str]:
    found = {
        "none": "nothing of the model",
        "forward": "a forward",
        "backward": "a backward under " + " and ".join(f"`{table}`" for table in method.tables),
        "local": "a backward through each block alone",
    }
    more = ["passes of its own"] if method.extra_cost.passes is not None else []
    more += [f"{' or '.join(method.requirements().poolings)} pooling"] if method.requirements().poolings else []
    more += list(method.requirements().structure)
    return [
        *([] if method.passes == "none" and method.extra_cost.passes is not None else [found[method.passes]]),
        *more,
    ]


def print_options(listed: Sequence[Option]) -> None:
    """Print each option with its default, what it takes and what it means."""
    if listed:
        print("* Options:")
    for option in listed:
        allowed = option.allowed.replace("|", "·")
        print(f"    * `{option.name}={option.default}`: {option.doc} ({allowed})")


def section(method: Method) -> None:
    doc = inspect.getdoc(method.function) or ""
    print(f"\n#### `{method.name}`\n\n{doc}\n")
    sign = "signed" if method.signed and not method.relu else "not negative"
    if method.relu:
        sign = "not negative (signed with `relu=False` and under a combinator)"
    kind = "one map for every class" if not method.class_specific else "a map for each class"
    print(f"* Paper: {method.paper}\n* Map: {sign}; {kind}\n* Needs: {', '.join(needs(method))}")
    of_its_own = " with these options, on 14 × 14 patches" if method.extra_cost.passes is not None else ""
    print(f"* Cost: {bound(method)}{cost_label(method.cost)}{of_its_own}")
    if method.score != "logit":
        print(f"* Score: {method.score}, unless you name another")
    caveats = method.caveats
    words = ("Often zero", caveats.zero_reason), ("Delicate", caveats.numerically_unstable)
    for word, why in (*words, ("Depends on how a network is written", caveats.as_written)):
        if why:
            print(f"* {word}: {why}")
    if method.caveats.discrepancies:
        print(f"* Discrepancies: {method.caveats.discrepancies}")
    if method.slow:
        print("* Slow: `clairvit compare --method all` leaves it out")
    print_options(method.option_list)
    for name in method.presets:
        sets = ", ".join(f"`{key}={value}`" for key, value in preset_settings(method, name).items())
        print(f"* Preset `{name}`: " + "; ".join(part for part in (sets, preset_formula(method, name)) if part))
    if not method.combinators:
        print(f"* Combinators: none (it {method.caveats.no_tails})")
    elif method.output != "matrix":
        without = " and ".join(f"`+{name}`" for name in MATRIX_COMBINATORS)
        why = (
            "it is run on the sub-network from each layer on"
            if method.output == "image"
            else "it says one number for each token"
        )
        print(f"* Combinators: all but {without} ({why})")


if __name__ == "__main__":
    main()
