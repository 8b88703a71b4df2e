"""Masks: the image through holes (RISE), with a window covered (occlusion), with one part left (PAMI)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from clairvit.errors import BadInput
from clairvit.methods.explanation import Cost
from clairvit.methods.multi_pass import at_least_one
from clairvit.methods.registry import FORWARD, ExtraCost, method
from clairvit.methods.result import MapResult
from clairvit.perturbation.probe import probing
from clairvit.perturbation.removal import Removal, on_pixels
from clairvit.perturbation.rng import make_generator
from clairvit.tracing.trace import Trace

NUMBERS_AT_ONCE = 2**21  # of masks that are summed up together: 16 MB
Box = tuple[int, int, int, int]  # top, left, height, width, in patches


# RISE


@dataclass(frozen=True, eq=False)
class Holes:
    """RISE's masks, made when they are looked at: coarse grids of zeros and ones, smoothly enlarged and shifted."""

    coarse: Tensor  # [N, cells, cells], 0 or 1
    down: Tensor  # [N]: the first row that is seen of the enlarged grid
    right: Tensor  # [N]
    rows: Tensor  # [shifts, height, cells]: each row of the mask as a mixture of the grid's rows, for every shift
    cols: Tensor  # [shifts, width, cells]

    def __call__(self, ks: range) -> Tensor:
        """[k, height, width], in 0…1"""
        own = slice(ks.start, ks.stop)
        return self.rows[self.down[own]] @ self.coarse[own] @ self.cols[self.right[own]].transpose(1, 2)

    def on(self, grid: tuple[int, int]) -> Holes:
        """The same masks averaged over each patch: enlarging and averaging are both linear."""
        return Holes(self.coarse, self.down, self.right, _pooled(self.rows, grid[0]), _pooled(self.cols, grid[1]))

    def to(self, device: torch.device) -> Holes:
        return Holes(*(part.to(device) for part in (self.coarse, self.down, self.right, self.rows, self.cols)))


def holes(samples: int, cells: int, p: float, size: tuple[int, int], seed: int) -> Holes:
    """RISE's masks for images of this size, all of the seed's making: every image sees the same."""
    rows, cols = (shifted_mixtures(side, cells) for side in size)
    coarse = torch.rand(samples, cells, cells, generator=make_generator(seed, 0)) < p
    down, right = (
        (torch.rand(samples, 2, generator=make_generator(seed, 1)) * torch.tensor([len(rows), len(cols)])).long().T
    )
    return Holes(coarse.double(), down, right, rows, cols)


def shifted_mixtures(side: int, cells: int) -> Tensor:
    """[shifts, side, cells]: the side as seen from each shift, one row a pixel, as a mixture of the grid's cells.

    The grid is stretched over one cell more than the image, so that every shift less than a cell stays inside. Between
    the middles of cells it is linear; beyond the outermost middles it turns back, as in the authors' code.
    """
    cell = math.ceil(side / cells)
    stretched = (cells + 1) * cell
    place = ((torch.arange(stretched, dtype=torch.float64) + 0.5) * cells / stretched - 0.5).abs()
    place = (cells - 1) - (cells - 1 - place).abs()
    mixture = (1 - (place[:, None] - torch.arange(cells)).abs()).clamp(min=0)  # [stretched, cells]
    return torch.stack([mixture[shift : shift + side] for shift in range(cell)])


def _pooled(table: Tensor, count: int) -> Tensor:
    """[shifts, side, cells] -> [shifts, count, cells]"""
    return F.adaptive_avg_pool1d(table.transpose(1, 2), count).transpose(1, 2)


@method(
    "rise",
    family="perturbation",
    paper="Petsiuk et al., BMVC 2018",
    output="image",
    requires=FORWARD,
    extra_cost=ExtraCost(lambda samples, **_: Cost(samples), slow=True),
    score="prob",
)
def rise(
    trace: Trace,
    *,
    samples: int = 4000,
    cells: int = 7,
    p: float = 0.5,
    removal: Removal = "mean",
    normalise_by_mask_sum: bool = False,
    level: Literal["patch", "pixel"] = "patch",
    seed: int = 0,
) -> MapResult:
    """sum_i f(x·M_i) M_i / (N p): the mean score of images seen through random masks, where these let through.

    A mask is a grid of cells × cells, each open with chance p, enlarged without edges and shifted at random. What it
    hides is mixed with the background of `removal`. Patches that are dropped (token, road) cannot be half gone: there
    a patch is kept where its mask exceeds a level drawn for each mask, which keeps it with the mask's own chance.
    `normalise_by_mask_sum` divides each place by how much was seen of it instead of N p. `level=pixel` gives H × W.
    """
    check_samples(samples)
    check_cells(cells)
    if not 0 < p < 1:
        raise BadInput(f"p={p} was given; expected a chance between 0 and 1 that a cell is open, such as p=0.5.")
    with probing(trace, removal, what="rise", forwards=samples, seed=seed) as probe:
        fine = holes(samples, cells, p, probe.size, seed).to(probe.pixels.device)
        masks: Callable[[range], Tensor] = fine if level == "pixel" else fine.on(probe.grid)
        if probe.paints:
            scores = probe.score_images(samples, lambda ks: probe.blend(fine(ks)[None]))  # [B, N]
        else:
            keep = hardened(fine.on(probe.grid)(range(samples)), seed)
            scores = probe.score_kept(keep.flatten(1)[None])
            masks = _cut_out(keep, probe.size if level == "pixel" else probe.grid)
        found, error = seen_through(scores, masks, None if normalise_by_mask_sum else p)
    return MapResult.from_probe(found.to(scores.dtype), probe, standard_error=error.to(scores.dtype))


def hardened(masks: Tensor, seed: int) -> Tensor:
    """Smooth masks [N, rows, cols] as bool: what exceeds a level that is drawn for each mask, uniformly from 0…1."""
    levels = torch.rand(len(masks), generator=make_generator(seed, 2), dtype=torch.float64).to(masks.device)
    return masks > levels[:, None, None]


def _cut_out(keep: Tensor, size: tuple[int, int]) -> Callable[[range], Tensor]:
    return lambda ks: on_pixels(keep[ks.start : ks.stop], size).double()


def seen_through(scores: Tensor, masks: Callable[[range], Tensor], p: float | None) -> tuple[Tensor, Tensor]:
    """sum_i f_i M_i over N p, or over sum_i M_i (p=None), with its standard error: two maps [B, rows, cols].

    The masks were drawn one by one, so that the first is a plain mean of N numbers. The second is a ratio of two means;
    its error is that of the residuals M_i (f_i − ratio).
    """
    count = scores.shape[1]
    middle = scores.double().mean(1, keepdim=True) if p is None else scores.new_zeros(len(scores), 1).double()
    f = scores.double() - middle  # a ratio of sums is shifted with the scores: less to cancel in its error
    sums: list[Tensor] = []  # M, M², f M, f M², f² M²
    for ks in _chunks(count, masks(range(1)).numel()):
        own, m = f[:, ks.start : ks.stop], masks(ks)
        size = m.shape[1:]
        m = m.flatten(1)  # [k, places]
        part = [m.sum(0)[None], (m**2).sum(0)[None], own @ m, own @ m**2, own**2 @ m**2]
        part = [one.reshape(-1, *size) for one in part]
        sums = part if not sums else [a + b for a, b in zip(sums, part, strict=True)]
    m, mm, fm, fmm, ffmm = sums
    if p is None:
        seen = m.clamp(min=1e-12)  # nothing was ever seen there: the mean of all scores
        ratio = fm / seen
        spread = (ffmm - 2 * ratio * fmm + ratio**2 * mm) / seen**2
        return ratio + middle[:, :, None], (spread.clamp(min=0) * count / (count - 1)).sqrt()
    mean, square = fm / count, ffmm / count
    return mean / p, ((square - mean**2).clamp(min=0) / (count - 1)).sqrt() / p


def _chunks(count: int, each: int) -> list[range]:
    """The same pieces whatever the batch size, so that sums are the same too."""
    step = max(1, NUMBERS_AT_ONCE // each)
    return [range(start, min(count, start + step)) for start in range(0, count, step)]


def check_samples(samples: int) -> None:
    if samples < 2:
        raise BadInput(f"samples={samples} was given; expected 2 or more masks to compare, such as samples=500.")


def check_cells(cells: int) -> None:
    if cells < 2:
        raise BadInput(f"cells={cells} was given; expected 2 or more cells along each side, such as cells=7.")


# Occlusion


@method(
    "occlusion",
    family="perturbation",
    paper="Zeiler & Fergus, ECCV 2014",
    output="image",
    requires=FORWARD,
    # a window starts at a patch: never more windows than patches
    extra_cost=ExtraCost(lambda patches, **_: Cost(patches), at_most=True, slow=True),
    score="prob",
    is_stochastic=False,
    signed=True,
)
def occlusion(
    trace: Trace,
    *,
    window: int = 3,
    stride: int = 1,
    share: bool = True,
    removal: Removal = "mean",
    seed: int = 0,
) -> MapResult:
    """mean of f(x) − f(x without W) over the windows W that cover a patch: what is lost behind a sliding grey square.

    `window` and `stride` count patches; the last window is cut off at the border. The loss of a window is shared among
    its patches, so that the map is right where all patches matter alike; share=false gives each the whole loss, as
    captum does. window=1 takes away one patch at a time, as leave-one-out does.
    """
    for name, value in (("window", window), ("stride", stride)):
        if value < 1:
            raise BadInput(f"{name}={value} was given; expected 1 or more patches, such as {name}=1.")
    if stride > window:
        raise BadInput(
            f"stride={stride} was given with window={window}; expected a stride of at most the window, or some patches "
            f"are never covered. Use stride={window}."
        )
    sides = tuple(min(window, max(1, side - 1)) for side in trace.layout.grid)  # something must be left to see
    notes = []
    if max(sides) < window:
        notes.append(f"occlusion: a window of {window} patches leaves nothing to see here; it was cut to {max(sides)}")
    boxes = sliding(trace.layout.grid, (sides[0], sides[1]), stride)
    covered = in_boxes(boxes, trace.layout.grid)  # [V, rows, cols]
    with probing(trace, removal, what="occlusion", forwards=len(boxes), seed=seed) as probe:
        scores = probe.score_kept(~covered.flatten(1)[None])  # [B, V]
        lost = (probe.original[:, None] - scores).double()
    maps = mean_over_boxes(lost / covered.flatten(1).sum(1).to(lost) if share else lost, covered)
    return MapResult.from_probe(maps.to(scores.dtype), probe, notes=notes)


def sliding(grid: tuple[int, int], window: tuple[int, int], stride: int) -> list[Box]:
    """Windows from the first corner on, until the last one reaches the border."""
    starts = []
    for side, own in zip(grid, window, strict=True):
        step = min(stride, own)  # of a window that was cut: no patch is stepped over
        starts.append(range(0, step * math.ceil((side - own) / step) + 1, step))
    return [(top, left, *window) for top in starts[0] for left in starts[1]]


def in_boxes(boxes: list[Box], grid: tuple[int, int]) -> Tensor:
    """bool [V, rows, cols]: the patches of each box; what reaches over the border is cut off."""
    inside = torch.zeros(len(boxes), *grid, dtype=torch.bool)
    for own, (top, left, height, width) in zip(inside, boxes, strict=True):
        own[top : top + height, left : left + width] = True
    return inside


def mean_over_boxes(values: Tensor, inside: Tensor) -> Tensor:
    """sum_k v_k m_k / sum_k m_k: values [B, V] of boxes, bool [V, rows, cols] -> [B, rows, cols]."""
    m = inside.to(values)
    return torch.einsum("bv,vrc->brc", values, m) / m.sum(0)


# PAMI


@method(
    "pami",
    family="perturbation",
    paper="Shi et al., 2023",
    output="image",
    requires=FORWARD,
    # at most: on small grids windows of different scales are the same
    extra_cost=ExtraCost(
        lambda scales, **_: Cost(sum((2 * k + 1) ** 2 for k in range(1, scales + 1))), at_most=True, slow=True
    ),
    score="prob",
    is_stochastic=False,
)
def pami(trace: Trace, *, scales: int = 4, removal: Removal = "blur", seed: int = 0) -> MapResult:
    """sum_k f(x with only part k) m_k / sum_k m_k: how well the parts that contain a patch do without all the rest.

    The parts are our choice, as no code was released: at scale s = 1 … `scales` windows of 1/(s+1) of each side, 2s+1
    of them along it, so that neighbours share about a half. Everything else is hidden by `removal`.
    """
    at_least_one("scales", scales)
    boxes = parts(trace.layout.grid, scales)
    inside = in_boxes(boxes, trace.layout.grid)  # [V, rows, cols]
    with probing(trace, removal, what="pami", forwards=len(boxes), seed=seed) as probe:
        scores = probe.score_kept(inside.flatten(1)[None])  # [B, V]
    return MapResult.from_probe(mean_over_boxes(scores.double(), inside).to(scores.dtype), probe)


def parts(grid: tuple[int, int], scales: int) -> list[Box]:
    """Windows of several sizes, evenly spread from border to border; each once, where scales fall together."""
    found: dict[Box, None] = {}
    for scale in range(1, scales + 1):
        height, width = (math.ceil(side / (scale + 1)) for side in grid)
        tops, lefts = (_spread(side - own, 2 * scale + 1) for side, own in zip(grid, (height, width), strict=True))
        found |= {(top, left, height, width): None for top in tops for left in lefts}
    return list(found)


def _spread(last: int, count: int) -> list[int]:
    """At most `count` whole numbers from 0 to `last`, evenly."""
    count = min(count, last + 1)
    return [(2 * i * last + count - 1) // (2 * (count - 1)) for i in range(count)] if count > 1 else [0]
