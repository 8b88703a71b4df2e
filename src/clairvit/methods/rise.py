"""RISE: the mean score of images under random masks, where the masks let through."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from clairvit._cost import Cost
from clairvit._rng import make_generator
from clairvit.methods.gradient import Level
from clairvit.methods.registry import FORWARD_ON_PLANE, ExtraCost, method
from clairvit.methods.result import MapResult
from clairvit.option_types import Doc, Range
from clairvit.perturbation.probe import probing
from clairvit.perturbation.removal import Removal, patches_to_pixels
from clairvit.tracing.trace import Trace

NUMBERS_AT_ONCE = 2**21  # of masks that are summed up together: 16 MB
Samples = Annotated[int, Range(ge=2, unit="masks to compare", example=500), Doc("how many random masks are drawn")]
Cells = Annotated[
    int, Range(ge=2, unit="cells along each side", example=7), Doc("how many cells a mask has along each side")
]


@dataclass(frozen=True, eq=False)
class RandomMasks:
    """RISE's masks, computed when called: coarse grids of zeros and ones, bilinearly enlarged and shifted."""

    coarse: Tensor  # [N, cells, cells], 0 or 1
    row_shifts: Tensor  # [N]: the first row that is visible of the enlarged grid
    col_shifts: Tensor  # [N]
    row_weights: Tensor  # [shifts, height, cells]: each row of the mask as a mixture of the grid's rows, per shift
    col_weights: Tensor  # [shifts, width, cells]

    def __call__(self, ks: range) -> Tensor:
        """Return masks ks, [k, height, width], in 0…1."""
        part = slice(ks.start, ks.stop)
        rows, cols = self.row_weights[self.row_shifts[part]], self.col_weights[self.col_shifts[part]]
        return rows @ self.coarse[part] @ cols.transpose(1, 2)

    def pooled(self, grid: tuple[int, int]) -> RandomMasks:
        """Return the same masks averaged over each patch: enlarging and averaging are both linear."""
        rows, cols = (
            _pool(weights, side) for weights, side in zip((self.row_weights, self.col_weights), grid, strict=True)
        )
        return replace(self, row_weights=rows, col_weights=cols)

    def to(self, device: torch.device) -> RandomMasks:
        return RandomMasks(*(getattr(self, field.name).to(device) for field in fields(self)))


def random_masks(samples: int, cells: int, p: float, size: tuple[int, int], seed: int) -> RandomMasks:
    """Return RISE's masks for images of this size, drawn from the seed alone: the same for every image."""
    rows, cols = (shifted_weights(side, cells) for side in size)
    coarse = (
        torch.rand(
            samples, cells, cells, generator=make_generator(seed, "rise/cells"), dtype=torch.float32, device="cpu"
        )
        < p
    )
    shifts = torch.rand(
        samples, 2, generator=make_generator(seed, "rise/shifts"), dtype=torch.float32, device="cpu"
    ) * torch.tensor([len(rows), len(cols)])
    row_shifts, col_shifts = shifts.long().T
    return RandomMasks(coarse.double(), row_shifts, col_shifts, rows, cols)


def shifted_weights(side: int, cells: int) -> Tensor:
    """Return each pixel of a side as a mixture of the grid's cells, for every shift: [shifts, side, cells].

    The grid is enlarged over one cell more than the image, so that every shift less than a cell stays inside. Between
    the centres of cells it is linear; beyond the outermost centres it is reflected, as in the authors' code.
    """
    cell = math.ceil(side / cells)
    enlarged = (cells + 1) * cell
    position = ((torch.arange(enlarged, dtype=torch.float64) + 0.5) * cells / enlarged - 0.5).abs()
    position = (cells - 1) - (cells - 1 - position).abs()
    weights = (1 - (position[:, None] - torch.arange(cells)).abs()).clamp(min=0)  # [enlarged, cells]
    return torch.stack([weights[shift : shift + side] for shift in range(cell)])


def _pool(weights: Tensor, side: int) -> Tensor:
    """Return weights [shifts, pixels, cells] averaged over each patch, [shifts, side, cells]."""
    return F.adaptive_avg_pool1d(weights.transpose(1, 2), side).transpose(1, 2)


@method(
    "rise",
    family="perturbation",
    paper="Petsiuk et al., BMVC 2018",
    output="image",
    requires=FORWARD_ON_PLANE,
    extra_cost=ExtraCost(lambda samples, **_: Cost(samples), slow=True),
    score="prob",
)
def rise(
    trace: Trace,
    *,
    samples: Samples = 4000,
    cells: Cells = 7,
    p: Annotated[
        float,
        Range(gt=0, lt=1, unit="(the probability of an open cell)", example=0.5),
        Doc("the probability that a cell is open"),
    ] = 0.5,
    removal: Removal = "mean",
    normalise_by_mask_sum: Annotated[
        bool, Doc("divide each position by the sum of its masks, not by their expected number")
    ] = False,
    level: Level = "patch",
    seed: int = 0,
) -> MapResult:
    """sum_i f(x·M_i) M_i / (N p): the mean score of images under random masks, where the masks let through.

    A mask is a grid of cells × cells, each open with probability p, enlarged bilinearly and shifted at random. What it
    hides is mixed with the background of `removal`. Patches that are dropped (token, road) cannot be removed in
    part: a patch is kept where its mask exceeds a level drawn per mask, so with the mask's value as probability.
    `normalise_by_mask_sum` divides each position by the sum of its masks instead of N p. `level=pixel` gives H × W.
    """
    with probing(trace, removal, label="rise", forwards=samples, seed=seed) as probe:
        pixel_masks = random_masks(samples, cells, p, probe.size, seed).to(probe.pixels.device)
        masks: Callable[[range], Tensor] = pixel_masks if level == "pixel" else pixel_masks.pooled(probe.layout.plane)
        if probe.paints:
            scores = probe.score_images(samples, lambda ks: probe.blend(pixel_masks(ks)[None]))  # [B, N]
        else:
            keep = binarise(pixel_masks.pooled(probe.layout.plane)(range(samples)), seed)
            scores = probe.score_kept(keep.flatten(1)[None])
            masks = _enlarged(keep, probe.size if level == "pixel" else probe.layout.plane)
        maps, error = masked_mean(scores, masks, None if normalise_by_mask_sum else p)
    return MapResult.from_probe(maps.to(scores.dtype), probe, standard_error=error.to(scores.dtype))


def binarise(masks: Tensor, seed: int) -> Tensor:
    """Return where masks [N, rows, cols] exceed a level that is drawn per mask, uniformly from 0…1: bool."""
    levels = torch.rand(
        len(masks), generator=make_generator(seed, "rise/levels"), dtype=torch.float64, device="cpu"
    ).to(masks.device)
    return masks > levels[:, None, None]


def _enlarged(keep: Tensor, size: tuple[int, int]) -> Callable[[range], Tensor]:
    return lambda ks: patches_to_pixels(keep[ks.start : ks.stop], size).double()


def masked_mean(scores: Tensor, masks: Callable[[range], Tensor], p: float | None) -> tuple[Tensor, Tensor]:
    """Return sum_i f_i M_i over N p, or over sum_i M_i (p=None), and its standard error: two maps [B, rows, cols].

    The masks are independent draws, so the first is a mean of N numbers. The second is a ratio of two means; its error
    is that of the residuals M_i (f_i − ratio).
    """
    count = scores.shape[1]
    mean_score = scores.double().mean(1, keepdim=True) if p is None else scores.new_zeros(len(scores), 1).double()
    f = scores.double() - mean_score  # a ratio of sums is shifted with the scores: less to cancel in its error
    sums: list[Tensor] = []  # M, M², f M, f M², f² M²
    for ks in _chunks(count, masks(range(1)).numel()):
        f_k, m = f[:, ks.start : ks.stop], masks(ks)
        size = m.shape[1:]
        m = m.flatten(1)  # [k, positions]
        part = [m.sum(0)[None], (m**2).sum(0)[None], f_k @ m, f_k @ m**2, f_k**2 @ m**2]
        part = [term.reshape(-1, *size) for term in part]
        sums = part if not sums else [a + b for a, b in zip(sums, part, strict=True)]
    m, mm, fm, fmm, ffmm = sums
    if p is None:
        mask_sum = m.clamp(min=1e-12)  # a position that no mask shows gets the mean of all scores
        ratio = fm / mask_sum
        variance = (ffmm - 2 * ratio * fmm + ratio**2 * mm) / mask_sum**2
        return ratio + mean_score[:, :, None], (variance.clamp(min=0) * count / (count - 1)).sqrt()
    mean, mean_square = fm / count, ffmm / count
    return mean / p, ((mean_square - mean**2).clamp(min=0) / (count - 1)).sqrt() / p


def _chunks(count: int, each: int) -> list[range]:
    """Return ranges that do not depend on the batch size, so that sums do not either."""
    step = max(1, NUMBERS_AT_ONCE // each)
    return [range(start, min(count, start + step)) for start in range(0, count, step)]
