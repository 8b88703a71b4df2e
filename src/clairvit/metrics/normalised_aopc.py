"""NAOPC: the area over a removal curve, between the smallest and the largest area that any order of removal reaches.

How far an area can go depends on the model and the image, so that areas of two models do not compare; their places
between the two bounds do. The bounds are searched by a beam, the same for all methods.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Literal

import torch
from torch import Tensor

from clairvit._cost import Cost
from clairvit.metrics.context import EvalContext, ScoreKind, inverse_permutation, sort_with_ties
from clairvit.metrics.registry import metric
from clairvit.option_types import Doc, Range
from clairvit.perturbation.probe import Probe
from clairvit.perturbation.removal import Removal
from clairvit.perturbation.segments import grid_cells

Cells = Annotated[
    int | None,
    Range(ge=2, example=4),
    Doc("how many cells the image has along each side, which are removed one by one; None: every patch is one"),
]
Beam = Annotated[
    int, Range(ge=1, example=3), Doc("how many sets of cells the search for each bound keeps at each step")
]
NAME = "naopc"


def passes(patches: int, cells: int | None = 4, beam: int = 3, **_: object) -> Cost:
    """Return the most passes for one map: its own curve, and every set of cells that the two searches look at."""
    count = patches if cells is None else min(cells * cells, patches)
    looked_at = [min(beam * (count - k + 1), math.comb(count, k)) for k in range(2, count)]
    return Cost(count - 1 + count + 2 * sum(looked_at))


@metric(
    "naopc",
    family="faithfulness",
    better="higher",
    span=(0, 1),
    paper="Edin et al., ACL 2025",
    undefined="where every order of removal costs the same, no place between bounds is defined",
    flipped_by=("order", "lerf"),
    cost=passes,
)
def normalised_aopc(
    context: EvalContext,
    cells: Cells = 4,
    beam: Beam = 3,
    order: Annotated[Literal["morf", "lerf"], Doc("which cells go first: most relevant, or least relevant")] = "morf",
    removal: Removal = "token",
    score: ScoreKind = "prob",
) -> Tensor:
    """Return (AOPC − min) / (max − min), AOPC = mean_k f(x) − f(x without the first k cells), bounds over all orders.

    Cells are ordered by the sum of the map in them and removed one by one. `min` and `max` are the areas of the orders
    that a beam search finds for each image: after every step it goes on with the `beam` sets of cells whose area so far
    is the smallest (largest), and with a map's own order where that does better. 1 is the best order, 0 the worst,
    whatever the model, so that models compare. `order=lerf` removes the least relevant first: lower is better then.
    Raw scores are taken as they are: a place between two bounds has no unit. The ends, which all orders share, cancel.
    """
    labels = grid_cells(context.trace.layout.grid, cells).flatten().to(context.maps.device)
    members = labels == torch.arange(int(labels.max()) + 1, device=labels.device)[:, None]  # [K, patches]
    count = len(members)
    sums = context.maps.flatten(2) @ members.to(context.maps).T  # [M, B, K]
    rank = inverse_permutation(sort_with_ties(sums, context.tie_order(count, "naopc/ties")))
    rank = count - 1 - rank if order == "lerf" else rank
    removed = rank[:, :, None, :] < torch.arange(1, count, device=rank.device)[:, None]  # [M, B, K - 1, K]
    kept = ~(removed.to(context.maps) @ members.to(context.maps) > 0)
    drops = context.original(score)[:, None] - context.score_kept(kept, removal, score, NAME)
    areas = drops.sum(-1)  # [M, B]
    key = (NAME, cells, beam, removal, score)
    if key not in context.shared:
        context.shared[key] = _bounds(context, members, beam, removal, score)
    lowest, highest = context.shared[key]
    low, high = torch.minimum(lowest, areas), torch.maximum(highest, areas)
    return (areas - low) / (high - low).masked_fill(high == low, math.nan)


def _bounds(context: EvalContext, members: Tensor, beam: int, removal: str, score: str) -> tuple[Tensor, Tensor]:
    """Return the smallest and the largest sum of drops over the steps that the searches reach, both [B]."""
    original, function = context.original(score), context.score_function(score)
    costs: list[dict[int, float]] = [{} for _ in original]  # of each image: removed cells, as bits -> drop
    count = len(members)

    def look_at(probe: Probe, wanted: Sequence[tuple[int, int]]) -> None:
        """Run the images without sets of cells that were not looked at yet."""
        missing = [(image, cells) for image, cells in wanted if cells not in costs[image]]
        if not missing:
            return
        bits = torch.tensor([[cells >> k & 1 for k in range(count)] for _, cells in missing], device=members.device)
        keep = bits.double() @ members.double() == 0
        images = torch.tensor([image for image, _ in missing])
        values = probe.score_pairs(images, keep, function).double()
        drops = original[images.to(original.device)] - values
        for (image, cells), drop in zip(missing, drops.tolist(), strict=True):
            costs[image][cells] = drop

    def search(probe: Probe, sign: int) -> list[float]:
        """Return sign · the largest sign · sum of drops of each image."""
        beams: list[dict[int, float]] = [{0: 0.0} for _ in costs]  # removed cells -> sum of sign · drops
        for _ in range(count - 1):
            following: list[dict[int, float]] = []
            for sets in beams:
                best: dict[int, float] = {}
                for cells, total in sets.items():
                    for k in range(count):
                        larger = cells | 1 << k
                        if larger != cells and total > best.get(larger, -math.inf):
                            best[larger] = total
                following.append(best)
            look_at(probe, [(image, cells) for image, sets in enumerate(following) for cells in sets])
            for image, sets in enumerate(following):
                totals = [(total + sign * costs[image][cells], cells) for cells, total in sets.items()]
                totals.sort(key=lambda pair: (-pair[0], pair[1]))
                beams[image] = {cells: total for total, cells in totals[:beam]}
        return [sign * max(sets.values()) for sets in beams]

    with context.probe(removal, NAME, passes(len(members), None, beam).forwards) as probe:
        lowest, highest = search(probe, -1), search(probe, 1)
    return original.new_tensor(lowest).double(), original.new_tensor(highest).double()
