"""Counterfactual: a small set of patches whose removal changes the model's answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal

import torch
from torch import Tensor

from clairvit._cost import Cost
from clairvit.errors import BadInput, NotApplicable
from clairvit.methods.planner import record_for, run_all
from clairvit.methods.registry import FORWARD, Caveats, ExtraCost, method
from clairvit.methods.result import MapResult
from clairvit.methods.spec import resolve_method
from clairvit.numerics import widened
from clairvit.option_types import Doc, Range
from clairvit.perturbation.probe import Probe, probing
from clairvit.perturbation.removal import Removal
from clairvit.targets.base import TargetBatch, class_name
from clairvit.tracing.trace import Trace

NAME, ALONE = "counterfactual", "leave-one-out"
LEAST_EFFORT = 4  # an order, its prefixes, and one round of putting back, which takes two
DECIMALS = 4  # of logits, when patches are ordered: rounding must not choose between equal patches


@method(
    NAME,
    family="perturbation",
    paper="smallest destroying region: Dabkowski & Gal, NeurIPS 2017; here of patches",
    output="image",
    requires=FORWARD,
    extra_cost=ExtraCost(lambda patches, effort, along, **_: _cost(patches, effort, along), at_most=True, slow=True),
    is_stochastic=False,
    caveats=Caveats(
        no_tails="selects one set of patches of the photo, and sets of several sub-networks have no sum",
        zero_reason="there is nothing to flip, or no set of patches was found that flips it; the notes say which",
    ),
)
def counterfactual(
    trace: Trace,
    *,
    removal: Removal = "token",
    search: Annotated[
        Literal["greedy", "map"], Doc("which patch goes next: the best of some candidates, or the next one of a map")
    ] = "greedy",
    along: Annotated[str, Doc("the method whose map says which patches are promising")] = ALONE,
    candidates: Annotated[
        int, Range(ge=1, unit="patches", example=16), Doc("how many promising patches are tried in each step")
    ] = 16,
    effort: Annotated[
        int,
        Range(ge=LEAST_EFFORT, unit="forwards per patch", example=20),
        Doc("how many forwards per patch may be spent"),
    ] = 20,
    seed: int = 0,
) -> MapResult:
    """margin(x without S∖i) − margin(x without S), i in S: S is a small set of patches whose removal flips the answer.

    The margin is the target's logit minus the highest other one (a − b for a contrast), whatever the score, and the
    logit itself where each class stands for itself (a sigmoid); the answer flips where it is no longer above 0. The map
    says how far the target comes back when patch i alone is put back, and is 0 outside S; `chosen` is S. Guaranteed: S
    flips the answer, and stops doing so when any one patch is put back. Not guaranteed: that no other set is smaller.
    `search=greedy` removes, step by step, the one of the `candidates` most promising patches that lowers the margin
    most; `search=map` removes patches in the order of a map and takes the smallest number that flips. Then patches are
    put back as long as the answer stays flipped. `along` is the map that says which patches are promising:
    leave-one-out (of the margin), or any method, such as legrad. At most effort × patches forwards; a note says if they
    were too few for the second guarantee.
    """
    assert trace.target is not None
    margins = margin_function(trace.target)
    images, patches = len(trace.pixels), trace.layout.patches
    order, notes = (None, ()) if along == ALONE else _map_along(along, trace, seed)  # [B, patches]
    maps = torch.zeros(images, patches, dtype=torch.float64)
    chosen = torch.zeros(images, patches, dtype=torch.bool)
    unmoved = []
    with probing(trace, removal, label=NAME, forwards=effort * patches, seed=seed) as probe:
        notes = (*notes, *probe.notes)
        for image in range(images):
            evaluate = MarginEvaluator(probe, image, margins, effort * patches)
            flipping_set = find_flipping_set(evaluate, search, None if order is None else order[image], candidates)
            if flipping_set is not None:
                chosen[image], maps[image] = flipping_set
            unmoved.append(evaluate.unmoved)
            which = f" of image {image + 1}" if images > 1 else ""
            notes = (*notes, f"{NAME}{which}: {evaluate.description(chosen[image])}")
    dtype = torch.float64 if trace.logits.dtype == torch.float64 else torch.float32
    shape = (images, *trace.layout.grid)
    maps = maps.reshape(shape).to(trace.pixels.device, dtype)
    return MapResult(maps, chosen=chosen.reshape(shape), notes=notes, unmoved=unmoved)


def _cost(patches: int, effort: int, along: str) -> Cost:
    return Cost(effort * patches) + (Cost() if along == ALONE else resolve_method(along).cost_for(patches))


# The margin


Margins = Callable[[Tensor, list[int]], Tensor]  # logits [n, C] of images [n] -> [n, 2]: margin, and the rival class


def margin_function(target: TargetBatch) -> Margins:
    """Return a function of logits that gives the target's margin over its rival, and which class the rival is."""
    rows = [row if isinstance(row, tuple) else () for row in target.rows]
    if target.is_batch_function or not all(len(row) in (1, 2) for row in rows):
        raise NotApplicable(
            f"'{NAME}' looks for what changes the model's answer, and a target function of your own is no answer. "
            f"Use a class or cv.Contrast(a, b) as target, or {ALONE}."
        )

    def margins(logits: Tensor, images: list[int]) -> Tensor:
        classes = torch.tensor([rows[i][0][0] for i in images], device=logits.device)
        target_logits = logits.gather(1, classes[:, None])[:, 0]
        if logits.shape[1] == 1 and target.activation == "raw":
            raise NotApplicable(
                f"'{NAME}' looks for what changes the model's answer, and a model with a single raw score gives none: "
                f"no value of it is a border between two answers. Use {ALONE}, or load or wrap the model with "
                "activation='sigmoid' if it says yes above 0."
            )
        rival_logits = logits.scatter(1, classes[:, None], float("-inf"))
        for n, i in enumerate(images):
            if len(rows[i]) == 2:  # a contrast has one rival only
                rival_logits[n] = float("-inf")
                rival_logits[n, rows[i][1][0]] = logits[n, rows[i][1][0]]
        best = rival_logits.max(1)
        margin, rival = target_logits - best.values, best.indices.to(target_logits.dtype)
        if target.activation == "sigmoid":  # classes do not compete: the answer is yes where p > 1/2, a logit above 0
            is_binary = torch.tensor([len(rows[i]) == 1 for i in images], device=logits.device)
            margin, rival = torch.where(is_binary, target_logits, margin), rival.masked_fill(is_binary, -1)
        return torch.stack([margin, rival], 1)

    return margins


class MarginEvaluator:
    """The margin of one image without some patches, with a budget of forwards and a memory of which rivals won."""

    def __init__(self, probe: Probe, image: int, margins: Margins, budget: int) -> None:
        self.probe, self.image, self.margins = probe, image, margins
        self.budget = budget  # forwards left
        self.patches = probe.patches
        self.initial, rival = margins(widened(probe.trace.logits[image : image + 1]), [image])[0].tolist()
        self.rivals = {(): int(rival)}  # by the patches that are removed
        self.low = self.high = self.initial
        self.evaluated = 0
        self.is_minimal = True

    def __call__(self, removed: Tensor) -> Tensor:
        """Return the margins without the patches `removed`, bool [n, patches]: float64 [n]."""
        images = torch.full((len(removed),), self.image, device=self.probe.pixels.device)
        values = self.probe.score_pairs(images, ~removed.to(images.device), self.margins).double().cpu()
        self.budget -= len(removed)
        self.evaluated += len(removed)
        margins = values[:, 0]
        self.low, self.high = min(self.low, float(margins.min())), max(self.high, float(margins.max()))
        for row, (margin, rival) in zip(removed, values.tolist(), strict=True):
            if margin <= 0:
                self.rivals[tuple(row.nonzero()[:, 0].tolist())] = int(rival)
        return margins

    @property
    def unmoved(self) -> bool:
        """Whether the margin stayed the same for all sets that were tried."""
        return self.evaluated > 0 and self.low == self.high

    def description(self, chosen: Tensor) -> str:
        """Return what the removal of the chosen set, bool [patches], does, in words."""
        target, labels = self.probe.target, self.probe.trace.recording.model.labels
        row = target.rows[self.image]
        assert isinstance(row, tuple)
        name, is_contrast = class_name(labels, row[0][0]), len(row) == 2
        removed = tuple(chosen.nonzero()[:, 0].tolist())
        rival = self.rivals[removed]
        rival_name = class_name(labels, rival) if rival >= 0 else f"not {name}"
        if self.initial <= 0:
            return f"'{name}' is not above '{rival_name}' to begin with, so there is nothing to flip"
        if not removed:
            return (
                f"no set was found without which '{name}' falls behind ({self.evaluated} tried, one of them all "
                "patches)"
            )
        text = f"removing {len(removed)} of {self.patches} patches "
        text += f"puts '{rival_name}' above '{name}'" if is_contrast else f"turns '{name}' into '{rival_name}'"
        return text if self.is_minimal else f"{text}; the effort ran out before all of them were tried back in"


# The search, for one image


def find_flipping_set(
    evaluate: MarginEvaluator, search: str, order: Tensor | None, candidates: int
) -> tuple[Tensor, Tensor] | None:
    """Return a set that flips the answer and has no patch to spare, bool [patches], and its map; None if none is found.

    `order` [patches] says which patches are promising; None: what each does alone.
    """
    if evaluate.initial <= 0:
        if evaluate.initial == 0:  # equal scores: those of a head of zeros stay equal whatever is removed
            evaluate(torch.ones(1, evaluate.patches, dtype=torch.bool))
        return None
    promise = order
    if promise is None:
        alone = torch.eye(evaluate.patches + 1, evaluate.patches, dtype=torch.bool)
        alone[-1] = True  # and all together, so that a head of zeros is not searched any further
        promise = (evaluate.initial - evaluate(alone))[:-1]
        if evaluate.unmoved:
            return None
    removed, margin = torch.zeros(evaluate.patches, dtype=torch.bool), evaluate.initial
    if search == "greedy":
        removed, margin, promise = greedy_removal(evaluate, promise, candidates, alone=order is None)
    if margin > 0:
        extended = smallest_prefix(evaluate, removed, promise)
        if extended is None:
            return None
        removed, margin = extended
    return restore_spare(evaluate, removed, margin)


def greedy_removal(
    evaluate: MarginEvaluator, promise: Tensor, candidates: int, alone: bool
) -> tuple[Tensor, float, Tensor]:
    """Remove the best of a few patches at a time until the answer flips; return the set, its margin and the promise.

    `promise` [patches] says which are tried first. Where it is what each patch does `alone`, it is updated: later steps
    know better what a patch does next to those that are removed.
    """
    eye = torch.eye(evaluate.patches, dtype=torch.bool)
    removed, margin = torch.zeros(evaluate.patches, dtype=torch.bool), evaluate.initial
    promise = promise.double()
    while margin > 0 and evaluate.budget >= candidates + 2 * evaluate.patches and not removed.all():
        tried = [i for i in descending(promise) if not removed[i]][:candidates]
        if alone and not removed.any():
            margins = evaluate.initial - promise[tried]  # the first step was evaluated already, as leave-one-out
        else:
            margins = evaluate(removed | eye[tried])
        best = descending(-margins)[0]
        if alone:
            promise = promise.index_copy(0, torch.tensor(tried), margin - margins)
        removed, margin = removed | eye[tried[best]], float(margins[best])
    return removed, margin, promise


def smallest_prefix(evaluate: MarginEvaluator, removed: Tensor, promise: Tensor) -> tuple[Tensor, float] | None:
    """Return the fewest further patches, in descending order of promise, that flip the answer, and the margin.

    All numbers of patches are tried: more removed patches need not mean a lower margin.
    """
    if removed.all():
        return None
    sets = removed | prefix_sets([i for i in descending(promise) if not removed[i]], evaluate.patches)
    margins = evaluate(sets)
    flipped = (margins <= 0).nonzero()[:, 0].tolist()
    return (sets[flipped[0]], float(margins[flipped[0]])) if flipped else None


def restore_spare(evaluate: MarginEvaluator, removed: Tensor, margin: float) -> tuple[Tensor, Tensor]:
    """Put patches back as long as the answer stays flipped; return the set that is left, and each patch's effect."""
    eye = torch.eye(evaluate.patches, dtype=torch.bool)
    while True:
        chosen = removed.nonzero()[:, 0]
        restored = evaluate(removed & ~eye[chosen])  # each one put back alone
        spare = (restored <= 0).nonzero()[:, 0]
        evaluate.is_minimal = len(spare) == 0
        if evaluate.is_minimal or evaluate.budget < 2 * len(chosen):
            effects = torch.zeros(evaluate.patches, dtype=torch.float64)
            effects[chosen] = (restored - margin).clamp(min=0)
            return removed, effects
        # Those that matter least come back first, together as many as can.
        ordered = spare[descending(-restored[spare])]
        sets = removed & ~prefix_sets(chosen[ordered].tolist(), evaluate.patches)
        margins = torch.cat([restored[ordered[:1]], evaluate(sets[1:])]) if len(ordered) > 1 else restored[ordered]
        last = int((margins <= 0).nonzero()[-1])
        removed, margin = sets[last], float(margins[last])


def descending(values: Tensor) -> list[int]:
    """Return indices from the largest to the smallest value; of equal ones, the first comes first."""
    order: list[int] = values.double().round(decimals=DECIMALS).argsort(descending=True, stable=True).tolist()
    return order


def prefix_sets(order: list[int], patches: int) -> Tensor:
    """Return the first, the first two, … of these patches: bool [len(order), patches]."""
    sets = torch.zeros(len(order), patches, dtype=torch.bool)
    for count, patch in enumerate(order):
        sets[count:, patch] = True
    return sets


def _map_along(along: str, trace: Trace, seed: int) -> tuple[Tensor, tuple[str, ...]]:
    """Return the maps of another method, [B, patches], each over its own largest value, and their notes."""
    inner = resolve_method(along)
    if inner.method.name == NAME:
        raise BadInput(f"along={along} was given; expected another method than {NAME} itself, such as legrad.")
    assert trace.target is not None
    recording = record_for([inner], trace.recording.model, trace.pixels, trace.recording.options)
    (result,) = run_all([inner], recording, [trace.target], seed=seed)[inner.text]
    trace.recording.forwards += 1 + result.own_cost.forwards
    trace.recording.backwards += inner.backwards + result.own_cost.backwards
    if result.error is not None:
        raise result.error
    assert result.maps is not None
    if tuple(result.maps.shape[1:]) != trace.layout.grid:
        raise NotApplicable(
            f"The map of '{inner.text}' has {' × '.join(map(str, result.maps.shape[1:]))} values and the image "
            f"{' × '.join(map(str, trace.layout.grid))} patches; expected one value per patch. Use along={ALONE}."
        )
    flat = result.maps.detach().flatten(1).double().cpu()
    return flat / flat.abs().amax(1, keepdim=True).clamp(min=1e-300), tuple(result.note_texts())
