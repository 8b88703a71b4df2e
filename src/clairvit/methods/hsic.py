"""HSIC: statistical dependence, linear or not, of the score on whether a cell of the image is shown."""

from __future__ import annotations

import math
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from clairvit._cost import Cost
from clairvit._rng import make_generator
from clairvit.methods.registry import FORWARD_ON_PLANE, ExtraCost, method
from clairvit.methods.result import MapResult
from clairvit.methods.rise import Cells, Samples
from clairvit.numerics import pool_to_grid
from clairvit.option_types import Doc
from clairvit.perturbation.probe import Probe, probing
from clairvit.perturbation.removal import Removal, patches_to_pixels
from clairvit.tracing.trace import Trace

Design = Annotated[
    Literal["sobol", "lhs", "random"], Doc("how masks are drawn: Sobol points, a Latin hypercube, or at random")
]
Width = Annotated[
    Literal["outputs", "distances"],
    Doc("the width of the outputs' kernel: their median, or the median of their distances"),
]
NARROW = 0.5  # spreads of the outputs: a narrower kernel ranks even a linear model's cells worse than width=distances


@method(
    "hsic",
    family="perturbation",
    paper="Novello et al., NeurIPS 2022",
    output="image",
    requires=FORWARD_ON_PLANE,
    extra_cost=ExtraCost(lambda samples, **_: Cost(samples), slow=True),
)
def hsic(
    trace: Trace,
    *,
    samples: Samples = 500,
    cells: Cells = 8,
    design: Design = "sobol",
    width: Width = "outputs",
    removal: Removal = "mean",
    seed: int = 0,
) -> MapResult:
    """(1/n) sum (HKH)·(HLH): how much the score depends on whether a cell is shown, whichever way it moves it.

    The image is cut into cells × cells; each of `samples` masks shows about half of them. K compares the masks in one
    cell, L the outputs (a Gaussian as wide as the outputs' median, or the median of their `distances`), H centres. A
    patch has the mean of the cells under it; where patches are dropped (token, road) they belong to the cell of their
    centre. `design`: Sobol points, a Latin hypercube as in the paper, or random. There is no standard error: neither
    Sobol points nor a Latin hypercube are independent draws, so compare the maps of a few seeds instead.
    """
    with probing(trace, removal, label="hsic", forwards=samples, seed=seed) as probe:
        finest = probe.size if probe.paints else probe.layout.plane
        sides = (min(cells, finest[0]), min(cells, finest[1]))
        shown = binary_design(design, samples, sides[0] * sides[1], seed).to(probe.pixels.device)  # [n, cells²]
        notes = _aliased_cells_notes(shown)
        outputs = _masked_scores(probe, shown, sides)  # [B, n]
    widths = kernel_widths(outputs.double(), width)
    if bool((widths.abs() < NARROW * outputs.double().std(1)).any()) and width == "outputs":
        notes.append(
            "hsic: the median of the outputs is near zero compared with their spread; width=distances suits them better"
        )
    scores = torch.stack([dependence(shown, y, sigma) for y, sigma in zip(outputs.double(), widths, strict=True)])
    return MapResult.from_probe(_on_patches(scores.reshape(-1, *sides), probe).to(outputs.dtype), probe, notes=notes)


def dependence(shown: Tensor, outputs: Tensor, width: Tensor) -> Tensor:
    """Return (1/n) sum (HKH)·(HLH), [cells], for the columns of `shown`, bool [n, cells], and outputs [n]; float64.

    K = 1 + (1/2 − (z − z')²) is 3/2 − z − z' + 2 z z' for zeros and ones, of which centring leaves 2 (Hz)(Hz)ᵀ. So no
    K is built: the sum is 2 (Hz)ᵀ L (Hz).
    """
    squares = (outputs[:, None] - outputs[None]) ** 2
    L = torch.exp(-squares / (2 * width**2).clamp(min=1e-300))  # [n, n]; at width 0 only equal outputs are similar
    L = L - L.mean(0)
    L = L - L.mean(1, keepdim=True)  # HLH, exactly 0 where all outputs are the same
    z = shown.to(outputs)
    z = z - z.mean(0)  # Hz
    return (2 * (z * (L @ z)).sum(0) / len(z)).clamp(min=0)


def kernel_widths(outputs: Tensor, width: Width) -> Tensor:
    """Return the median of outputs [B, n], as in xplique, or of the distances between two of them: [B]."""
    if width == "outputs":
        return outputs.quantile(0.5, dim=1)
    return torch.stack([torch.pdist(y[:, None]).median() for y in outputs])


def binary_design(design: Design, samples: int, cells: int, seed: int) -> Tensor:
    """Return which cells each mask shows, bool [samples, cells].

    Rounding Sobol points leaves the first bit of each coordinate, and scrambling can only flip it. So the seed flips
    these bits, and permutes the coordinates among the cells.
    """
    if design == "random":
        return (
            torch.rand(samples, cells, generator=make_generator(seed, "hsic/points"), dtype=torch.float32, device="cpu")
            < 0.5
        )
    if design == "lhs":  # one point in each of n strata of a side: half of them, in random order, lie above 1/2
        points = torch.rand(
            samples, cells, generator=make_generator(seed, "hsic/points"), dtype=torch.float32, device="cpu"
        )
        strata = torch.rand(
            samples, cells, generator=make_generator(seed, "hsic/strata"), dtype=torch.float32, device="cpu"
        ).argsort(0)
        return (strata + points) / samples > 0.5
    from scipy.stats import qmc

    points = qmc.Sobol(cells, scramble=False).random_base2(math.ceil(math.log2(samples)))[:samples]
    flipped = torch.rand(cells, generator=make_generator(seed, "hsic/points"), dtype=torch.float32, device="cpu") < 0.5
    return (torch.from_numpy(points >= 0.5) ^ flipped)[
        :, torch.randperm(cells, generator=make_generator(seed, "hsic/strata"), device="cpu")
    ]


def _aliased_cells_notes(shown: Tensor) -> list[str]:
    """Return a note if cells are always shown together, as with few Sobol points: these get the same score."""
    same = shown ^ shown[:1]  # a cell and its complement are equivalent
    different = len(set(map(tuple, same.T.tolist())))
    if different == shown.shape[1]:
        return []
    apart = f"{len(shown)} masks tell {different} of {shown.shape[1]} cells apart; the others share scores"
    return [f"hsic: {apart}. Use more samples or fewer cells"]


def _masked_scores(probe: Probe, shown: Tensor, sides: tuple[int, int]) -> Tensor:
    """Return the scores of the images under each mask, [B, n]."""
    if probe.paints:
        masks = shown.reshape(-1, *sides)

        def variant(ks: range) -> Tensor:
            return probe.blend(patches_to_pixels(masks[ks.start : ks.stop], probe.size)[None])

        return probe.score_images(len(shown), variant)
    return probe.score_kept(shown[:, cell_of_patch(sides, probe.layout.plane).to(shown.device)][None])


def cell_of_patch(sides: tuple[int, int], grid: tuple[int, int]) -> Tensor:
    """Return the cell, counted row by row, that holds the centre of each patch, [patches]."""
    rows, cols = (((torch.arange(count) + 0.5) * side / count).long() for side, count in zip(sides, grid, strict=True))
    return (rows[:, None] * sides[1] + cols).flatten()


def _on_patches(scores: Tensor, probe: Probe) -> Tensor:
    """Return cell scores [B, cells, cells] as [B, rows, cols]: the mean over a patch's pixels, or its cell's score."""
    if probe.paints:
        pixels = F.interpolate(scores[:, None], size=probe.size, mode="nearest-exact")[:, 0]
        return pool_to_grid(pixels, probe.layout.plane, "mean")
    sides = (int(scores.shape[1]), int(scores.shape[2]))
    return scores.flatten(1)[:, cell_of_patch(sides, probe.layout.plane).to(scores.device)].reshape(
        -1, *probe.layout.plane
    )
