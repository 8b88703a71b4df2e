"""Counterfactual: the fewest patches without which the model says something else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from clairvit.errors import BadInput, NotApplicable
from clairvit.methods.explanation import Cost
from clairvit.methods.multi_pass import at_least_one
from clairvit.methods.planner import record_for, run_all
from clairvit.methods.registry import FORWARD, Caveats, ExtraCost, method
from clairvit.methods.result import MapResult
from clairvit.methods.spec import resolve_method
from clairvit.perturbation.probe import Probe, probing
from clairvit.perturbation.removal import Removal
from clairvit.targets.base import Target, class_name
from clairvit.tracing.attention import widened
from clairvit.tracing.trace import Trace

NAME, ALONE = "counterfactual", "leave-one-out"
LEAST_EFFORT = 4  # an order, its prefixes, and one round of putting back, which asks twice
DECIMALS = 4  # of logits, when patches are ordered: round-off between equal patches must not choose


@method(
    NAME,
    family="perturbation",
    paper="smallest destroying region: Dabkowski & Gal, NeurIPS 2017; here of patches",
    output="image",
    requires=FORWARD,
    extra_cost=ExtraCost(lambda patches, effort, along, **_: _cost(patches, effort, along), at_most=True, slow=True),
    is_stochastic=False,
    caveats=Caveats(
        zero_reason="there is nothing to flip, or no set of patches was found that flips it; the notes say which"
    ),
)
def counterfactual(
    trace: Trace,
    *,
    removal: Removal = "token",
    search: Literal["greedy", "map"] = "greedy",
    along: str = ALONE,
    candidates: int = 16,
    effort: int = 20,
    seed: int = 0,
) -> MapResult:
    """margin(x without S∖i) − margin(x without S), i in S: S is a small set of patches whose removal flips the answer.

    The margin is the target's logit minus the highest other one (a − b for a contrast), whatever the score, and the
    logit itself where each class stands for itself (a sigmoid); the answer flips where it is no longer above 0. The map
    says how far the target comes back when patch i alone is put back, and is 0 outside S; `chosen` is S. Guaranteed: S
    flips the answer, and stops doing so when any one patch is put back. Not guaranteed: that no other set is smaller,
    which only trying all sets could tell.
    `search=greedy` removes, step by step, the one of the `candidates` most promising patches that lowers the margin
    most; `search=map` removes patches in the order of a map and takes the smallest number that flips. Then patches are
    put back as long as the answer stays flipped. `along` is the map that says which patches are promising:
    leave-one-out (of the margin), or any method, such as legrad. At most effort × patches forwards; a note says if they
    were too few for the second guarantee.
    """
    at_least_one("candidates", candidates)
    if effort < LEAST_EFFORT:
        raise BadInput(f"effort={effort} was given; expected {LEAST_EFFORT} or more forwards a patch, such as 20.")
    assert trace.target is not None
    margins = margins_of(trace.target)
    images, patches = len(trace.pixels), trace.layout.patches
    order, notes = (None, ()) if along == ALONE else _map_along(along, trace, seed)  # [B, patches]
    maps = torch.zeros(images, patches, dtype=torch.float64)
    chosen = torch.zeros(images, patches, dtype=torch.bool)
    unmoved = []
    with probing(trace, removal, what=NAME, forwards=effort * patches, seed=seed) as probe:
        notes = (*notes, *probe.notes)
        for image in range(images):
            ask = FlipSearch(probe, image, margins, effort * patches)
            found = flipping(ask, search, None if order is None else order[image], candidates)
            if found is not None:
                chosen[image], maps[image] = found
            unmoved.append(ask.unmoved)
            notes += (f"{NAME}{f' of image {image + 1}' * (images > 1)}: {ask.story(chosen[image])}",)
    dtype = torch.float64 if trace.logits.dtype == torch.float64 else torch.float32
    grid = (images, *trace.layout.grid)
    on_device = maps.reshape(grid).to(trace.pixels.device, dtype)
    return MapResult(on_device, chosen=chosen.reshape(grid), notes=notes, unmoved=unmoved)


def _cost(patches: int, effort: int, along: str) -> Cost:
    return Cost(effort * patches) + (Cost() if along == ALONE else resolve_method(along).cost_for(patches))


# What is asked


Margins = Callable[[Tensor, list[int]], Tensor]  # logits [n, C] of images [n] -> [n, 2]: the margin, and who comes next


def margins_of(target: Target) -> Margins:
    """How far the target is above its rival, and which class that is."""
    rows = [row if isinstance(row, tuple) else () for row in target.rows]
    if target.together or not all(len(row) in (1, 2) for row in rows):
        raise NotApplicable(
            f"'{NAME}' looks for what changes the model's answer, and a target function of your own is no answer. "
            f"Use a class or cv.contrast(a, b) as target, or {ALONE}."
        )

    def margins(logits: Tensor, images: list[int]) -> Tensor:
        own = torch.tensor([rows[i][0][0] for i in images], device=logits.device)
        mine = logits.gather(1, own[:, None])[:, 0]
        if logits.shape[1] == 1 and target.activation == "raw":
            raise NotApplicable(
                f"'{NAME}' looks for what changes the model's answer, and a model with a single raw score gives none: "
                f"no value of it is a border between two answers. Use {ALONE}, or load or wrap the model with "
                "activation='sigmoid' if it says yes above 0."
            )
        others = logits.scatter(1, own[:, None], float("-inf"))
        for n, i in enumerate(images):
            if len(rows[i]) == 2:  # a contrast has one rival only
                others[n] = float("-inf")
                others[n, rows[i][1][0]] = logits[n, rows[i][1][0]]
        best = others.max(1)
        margin, rival = mine - best.values, best.indices.to(mine.dtype)
        if target.activation == "sigmoid":  # classes do not compete: the answer is yes where p > 1/2, a logit above 0
            yes_or_no = torch.tensor([len(rows[i]) == 1 for i in images], device=logits.device)
            margin, rival = torch.where(yes_or_no, mine, margin), rival.masked_fill(yes_or_no, -1)
        return torch.stack([margin, rival], 1)

    return margins


class FlipSearch:
    """What the margin of one image is without some patches; remembers how often it was asked, and what came out."""

    def __init__(self, probe: Probe, image: int, margins: Margins, most: int) -> None:
        self.probe, self.image, self.margins = probe, image, margins
        self.left = most  # forwards
        self.patches = probe.patches
        self.start, rival = margins(widened(probe.trace.logits[image : image + 1]), [image])[0].tolist()
        self.rivals = {(): int(rival)}  # by what is gone
        self.low = self.high = self.start
        self.asked = 0
        self.minimal = True

    def __call__(self, gone: Tensor) -> Tensor:
        """bool [n, patches] -> float64 [n]"""
        images = torch.full((len(gone),), self.image, device=self.probe.pixels.device)
        found = self.probe.score_pairs(images, ~gone.to(images.device), self.margins).double().cpu()
        self.left -= len(gone)
        self.asked += len(gone)
        flat = found[:, 0]
        self.low, self.high = min(self.low, float(flat.min())), max(self.high, float(flat.max()))
        for row, (margin, rival) in zip(gone, found.tolist(), strict=True):
            if margin <= 0:
                self.rivals[tuple(row.nonzero()[:, 0].tolist())] = int(rival)
        return flat

    @property
    def unmoved(self) -> bool:
        """Did nothing change anything?"""
        return self.asked > 0 and self.low == self.high

    def story(self, chosen: Tensor) -> str:
        """What was found, in words."""
        target, labels = self.probe.target, self.probe.trace.recording.model.labels
        row = target.rows[self.image]
        assert isinstance(row, tuple)
        mine, contrast = class_name(labels, row[0][0]), len(row) == 2
        gone = tuple(chosen.nonzero()[:, 0].tolist())
        rival = self.rivals[gone]
        other = class_name(labels, rival) if rival >= 0 else f"not {mine}"
        if self.start <= 0:
            return f"'{mine}' is not above '{other}' to begin with, so there is nothing to flip"
        if not gone:
            return f"no set was found without which '{mine}' falls behind ({self.asked} tried, one of them all patches)"
        words = f"removing {len(gone)} of {self.patches} patches "
        words += f"puts '{other}' above '{mine}'" if contrast else f"turns '{mine}' into '{other}'"
        return words if self.minimal else f"{words}; the effort ran out before all of them were tried back in"


# The search, for one image


def flipping(ask: FlipSearch, search: str, order: Tensor | None, candidates: int) -> tuple[Tensor, Tensor] | None:
    """A set that flips the answer and has no patch to spare, bool [patches], with its map; None: nothing was found."""
    if ask.start <= 0:
        if ask.start == 0:  # equal scores: a head of zeros says so whatever is removed
            ask(torch.ones(1, ask.patches, dtype=torch.bool))
        return None
    worth = order
    if worth is None:
        alone = torch.eye(ask.patches + 1, ask.patches, dtype=torch.bool)
        alone[-1] = True  # and all together, lest a head of zeros be searched through
        worth = (ask.start - ask(alone))[:-1]
        if ask.unmoved:
            return None
    gone, margin = torch.zeros(ask.patches, dtype=torch.bool), ask.start
    if search == "greedy":
        gone, margin, worth = step_by_step(ask, worth, candidates, alone=order is None)
    if margin > 0:
        further = smallest_prefix(ask, gone, worth)
        if further is None:
            return None
        gone, margin = further
    return put_back(ask, gone, margin)


def step_by_step(ask: FlipSearch, worth: Tensor, candidates: int, alone: bool) -> tuple[Tensor, float, Tensor]:
    """Remove the best of a few patches at a time until the answer flips: what is gone, its margin, what is known now.

    `worth` [patches] says who is tried first. Where it is what each patch does alone, it is kept up to date: later
    steps know better what a patch does beside those that are gone.
    """
    eye = torch.eye(ask.patches, dtype=torch.bool)
    gone, margin, worth = torch.zeros(ask.patches, dtype=torch.bool), ask.start, worth.double()
    while margin > 0 and ask.left >= candidates + 2 * ask.patches and not gone.all():
        near = [i for i in falling(worth) if not gone[i]][:candidates]
        if alone and not gone.any():
            margins = ask.start - worth[near]  # the first step is what leave-one-out has asked already
        else:
            margins = ask(gone | eye[near])
        best = falling(-margins)[0]
        if alone:
            worth = worth.index_copy(0, torch.tensor(near), margin - margins)
        gone, margin = gone | eye[near[best]], float(margins[best])
    return gone, margin, worth


def smallest_prefix(ask: FlipSearch, gone: Tensor, worth: Tensor) -> tuple[Tensor, float] | None:
    """The fewest further patches, taken in falling order of worth, that flip the answer.

    All numbers are tried: more patches gone is not always further down.
    """
    if gone.all():
        return None
    sets = gone | firsts([i for i in falling(worth) if not gone[i]], ask.patches)
    margins = ask(sets)
    flipped = (margins <= 0).nonzero()[:, 0].tolist()
    return (sets[flipped[0]], float(margins[flipped[0]])) if flipped else None


def put_back(ask: FlipSearch, gone: Tensor, margin: float) -> tuple[Tensor, Tensor]:
    """Put patches back as long as the answer stays flipped: the set that is left, and how much each of it matters."""
    eye = torch.eye(ask.patches, dtype=torch.bool)
    while True:
        chosen = gone.nonzero()[:, 0]
        without = ask(gone & ~eye[chosen])  # each one put back alone
        spare = (without <= 0).nonzero()[:, 0]
        ask.minimal = len(spare) == 0
        if ask.minimal or ask.left < 2 * len(chosen):
            matters = torch.zeros(ask.patches, dtype=torch.float64)
            matters[chosen] = (without - margin).clamp(min=0)
            return gone, matters
        # Those that are missed least come back first, together as many as can.
        back = spare[falling(-without[spare])]
        sets = gone & ~firsts(chosen[back].tolist(), ask.patches)
        margins = torch.cat([without[back[:1]], ask(sets[1:])]) if len(back) > 1 else without[back]
        last = int((margins <= 0).nonzero()[-1])
        gone, margin = sets[last], float(margins[last])


def falling(worth: Tensor) -> list[int]:
    """Places from the largest to the smallest; of equal ones, the first comes first."""
    order: list[int] = worth.double().round(decimals=DECIMALS).argsort(descending=True, stable=True).tolist()
    return order


def firsts(order: list[int], patches: int) -> Tensor:
    """The first, the first two, … of these places: bool [len(order), patches]."""
    sets = torch.zeros(len(order), patches, dtype=torch.bool)
    for count, place in enumerate(order):
        sets[count:, place] = True
    return sets


def _map_along(along: str, trace: Trace, seed: int) -> tuple[Tensor, tuple[str, ...]]:
    """Return the maps of another method, [B, patches], each over its own largest value, and their notes."""
    inner = resolve_method(along)
    if inner.method.name == NAME:
        raise BadInput(f"along={along} was given; expected another method than {NAME} itself, such as legrad.")
    assert trace.target is not None
    recording = record_for([inner], trace.recording.model, trace.pixels, trace.recording.options)
    (result,) = run_all([inner], recording, [trace.target], seed=seed)[inner.text]
    trace.recording.forwards += 1 + result.more.forwards
    trace.recording.backwards += inner.backwards + result.more.backwards
    if result.error is not None:
        raise result.error
    assert result.maps is not None
    if tuple(result.maps.shape[1:]) != trace.layout.grid:
        raise NotApplicable(
            f"The map of '{inner.text}' has {' × '.join(map(str, result.maps.shape[1:]))} values and the image "
            f"{' × '.join(map(str, trace.layout.grid))} patches; expected one for each. Use along={ALONE}."
        )
    flat = result.maps.detach().flatten(1).double().cpu()
    return flat / flat.abs().amax(1, keepdim=True).clamp(min=1e-300), tuple(result.notes)
