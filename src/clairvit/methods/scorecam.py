"""Score-CAM and ViT-CX: the image masked by its own feature maps; a map whose mask keeps the score shows what matters.

a_k is the k-th channel of the features of class activation maps (a ViT's patch tokens after the last block's first
norm, a CNN's last stage), enlarged to the image bilinearly. No gradient is used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from clairvit._cost import Cost
from clairvit.errors import NotApplicable
from clairvit.methods.cam import last_norm_features
from clairvit.methods.gradient import Level, at_level
from clairvit.methods.layer_view import tokens_to_grid
from clairvit.methods.multi_pass import normal_noise
from clairvit.methods.registry import ExtraCost, Requires, method
from clairvit.methods.result import MapResult
from clairvit.numerics import widened
from clairvit.option_types import Doc, Range
from clairvit.perturbation.probe import Probe, probing
from clairvit.tracing.recorders.last_norm import LastNorm
from clairvit.tracing.trace import Trace

Background = Annotated[
    Literal["mean", "black", "blur", "gaussian-blur", "noise"], Doc("what is shown where a mask is 0")
]  # removals that can replace pixels in part
Weights = Annotated[Literal["softmax", "plain"], Doc("the softmax of the scores, or the scores as they are")]
Channels = Annotated[
    int,
    Range(ge=1, unit="channels", example=64),
    Doc("only so many channels, those that vary most over the image; None: all"),
]
USUAL_CHANNELS = 768  # of the costs in lists: a ViT-B
ON_LAST_NORM = Requires(passes="forward", recorders=(LastNorm,), plane=True)
CHANNELS_AT_ONCE = 64  # enlarged to the image at the same time


def feature_maps(trace: Trace) -> Tensor:
    """Return the channels of the features that class activation maps read, [B, d, rows, cols]."""
    if not trace.layers:
        raise NotApplicable(
            f"No layer of {trace.recording.model.name} was seen, and this method masks the image by feature maps.",
            alternative="a perturbation method",
        )
    last = trace.layers[-1]
    tokens = last_norm_features(trace)[0] if last.call is not None else None  # a CNN's stages are feature maps already
    return tokens_to_grid(widened(last.x if tokens is None else tokens), trace, last.index).permute(0, 3, 1, 2)


def enlarge(maps: Tensor, size: tuple[int, int], corners: bool = False) -> Tensor:
    """Return maps […, rows, cols] as […, H, W], bilinearly; `corners` aligns the outer cells with the corners."""
    flat = maps.reshape(-1, 1, *maps.shape[-2:])
    return F.interpolate(flat, size=size, mode="bilinear", align_corners=corners).reshape(*maps.shape[:-2], *size)


def enlarged_masks(cells: Tensor, size: tuple[int, int], corners: bool = False) -> Tensor:
    """Return maps […, rows, cols] enlarged to […, H, W] and scaled to 0…1; constant maps become 0."""
    maps = enlarge(cells, size, corners)
    low, high = maps.amin((-2, -1), keepdim=True), maps.amax((-2, -1), keepdim=True)
    is_varied = varies(cells)[..., None, None]  # of the cells: interpolation may round a constant
    return torch.where(is_varied, (maps - low) / (high - low), torch.zeros_like(maps))


def varies(cells: Tensor) -> Tensor:
    """Return which of the maps […, rows, cols] are not constant, bool […]."""
    return cells.amax((-2, -1)) > cells.amin((-2, -1))


@method(
    "scorecam",
    family="cam",
    paper="Wang et al., CVPR Workshops 2020",
    output="image",
    requires=ON_LAST_NORM,
    extra_cost=ExtraCost(lambda top_k, **_: Cost(USUAL_CHANNELS if top_k is None else top_k), at_most=True, slow=True),
    is_stochastic=False,
    signed=True,
    relu=True,
)
def score_cam(
    trace: Trace,
    *,
    top_k: Channels | None = None,
    weights: Weights = "softmax",
    removal: Background = "mean",
    seed: int = 0,
) -> MapResult:
    """relu(sum_k w_k a_k), w = softmax_k f(x · mask_k): channels weighted by the score that their own mask leaves.

    mask_k is a_k on the image, scaled to 0…1; where it is 0 the image is replaced as `removal` says. One forward per
    channel (192 in a ViT-Ti, 768 in a ViT-B): top_k=64 takes only the 64 channels that vary most over the image.
    The paper's rise over a baseline image, f(x · mask_k) − f(x_b), gives the same w: softmax ignores what all share.
    `weights=plain` takes the scores as they are; with score="prob" that is the authors' code.
    """
    return map_of_channels(trace, top_k, weights, removal, seed)


def map_of_channels(
    trace: Trace, top_k: int | None, weights: Weights, removal: Background, seed: int, *, corners: bool = False
) -> MapResult:
    """Return Score-CAM's map; `corners` stretches feature maps so that their outer cells lie in the image's corners."""
    maps = feature_maps(trace)
    if top_k is not None and top_k < maps.shape[1]:
        channels = maps.flatten(2).var(2).argsort(dim=1, descending=True, stable=True)[:, :top_k]  # [B, k]
        maps = maps[torch.arange(len(maps), device=maps.device)[:, None], channels]
    with probing(trace, removal, label="scorecam", forwards=maps.shape[1], seed=seed) as probe:
        scores = masked_scores(probe, maps, corners)  # [B, d]
    if weights == "softmax":
        scores = scores.softmax(1)
    else:  # the authors leave out constant maps
        scores = scores * varies(maps)
    return MapResult.from_probe(torch.einsum("bk,bkrc->brc", scores.to(maps), maps), probe)


def masked_scores(probe: Probe, maps: Tensor, corners: bool) -> Tensor:
    """Return f(x · mask_k) for maps [B, d, rows, cols]: [B, d]. Masks are computed batch by batch."""

    def variant(ks: range) -> Tensor:
        return probe.blend(enlarged_masks(maps[:, ks.start : ks.stop], probe.size, corners))

    return probe.score_images(maps.shape[1], variant)


@method(
    "vit-cx",
    family="perturbation",
    paper="Xie et al., IJCAI 2023 (ViT-CX)",
    output="image",
    requires=ON_LAST_NORM,
    extra_cost=ExtraCost(
        lambda samples, repeats, causal, noise, **_: Cost(
            (samples or USUAL_CHANNELS) * (1 if noise == 0 else repeats * (2 if causal else 1))
        ),
        at_most=True,
        slow=True,
    ),
    score="prob",
)
def vit_cx(
    trace: Trace,
    *,
    samples: Annotated[
        Annotated[int, Range(ge=1, unit="masks", example=50)] | None,
        Doc("merge the masks to at most so many; None: no further than by their distance"),
    ] = None,
    threshold: Annotated[
        float, Range(ge=0, unit="(a cosine distance)", example=0.1), Doc("masks closer than this are added up to one")
    ] = 0.1,
    noise: Annotated[
        float,
        Range(ge=0, unit="(a standard deviation)", example=0.1),
        Doc("standard deviation of the noise outside a mask, in normalised pixels"),
    ] = 0.1,
    repeats: Annotated[
        int, Range(ge=1, example=5), Doc("how often the noise is drawn, for a mean and its standard error")
    ] = 1,
    causal: Annotated[bool, Doc("subtract what the noise does to the whole image")] = True,
    coverage: Annotated[bool, Doc("divide each position by the sum of its masks")] = True,
    level: Level = "patch",
    seed: int = 0,
) -> MapResult:
    """(1/n) sum_i p_i M_i / sum_k M_k, p_i = f(x M_i + Z_i (1 − M_i)) − f(x + Z_i (1 − M_i)) + f(x): what masks leave.

    The masks are feature maps on the image, scaled to 0…1; those closer than `threshold` (cosine distance, complete
    linkage) are added up to one, so that tens of masks are left of hundreds. `samples` merges them further, to at most
    that many. Z is normal noise of std `noise` in normalised pixels, and what it does to the whole image is
    subtracted (`causal`). Dividing by the sum of all masks at a pixel (`coverage`) keeps regions that many masks share
    from dominating. `repeats` draws the noise more than once, for a mean and its standard error.
    """
    repeats = repeats if noise > 0 else 1
    maps, seeds = feature_maps(trace), trace.image_seeds(seed)
    size = (int(trace.pixels.shape[-2]), int(trace.pixels.shape[-1]))
    merged = [merge_maps(image_maps, size, threshold, samples) for image_maps in maps]
    passes = repeats * (2 if causal and noise > 0 else 1) * sum(len(cells) for cells, _ in merged)
    forwards = math.ceil(passes / len(maps))
    pixel_maps, notes = [], []  # for each image [repeats, H, W]
    with probing(trace, "mean", label="vit-cx", forwards=forwards, seed=seed) as probe:
        for image, (cells, channels) in enumerate(merged):
            if not channels:
                notes.append("vit-cx: every feature map is the same everywhere, so there is no mask; the map is zero")
                pixel_maps.append(cells.new_zeros(repeats, *size))
                continue
            # A mask's noise is that of its first channel, so it does not depend on the other masks.
            draws = [draw * maps.shape[1] + channel for draw in range(repeats) for channel in channels]
            p = causal_scores(probe, image, cells, seeds[image], draws, noise, causal)  # [repeats, n]
            pixel_maps.append(weighted_masks(p, cells, size, coverage))
    runs = torch.stack([at_level(run, trace, level, "mean") for run in torch.stack(pixel_maps, 1)])  # [repeats, B, …]
    error = runs.std(0) / repeats**0.5 if repeats > 1 else None
    return MapResult.from_probe(runs.mean(0), probe, standard_error=error, notes=notes)


def merge_maps(maps: Tensor, size: tuple[int, int], threshold: float, most: int | None) -> tuple[Tensor, list[int]]:
    """Return sums of similar maps [d, rows, cols]: [n, rows, cols], and the first channel of each; scaled, the masks.

    Interpolation and scaling are linear but for each map's lowest and highest pixel: with these known, sums and angles
    of whole masks are those of their cells, and no mask need be as large as the image.
    """
    varied = varies(maps).nonzero()[:, 0]
    scaled = maps[varied]
    for start in range(0, len(scaled), CHANNELS_AT_ONCE):
        part = scaled[start : start + CHANNELS_AT_ONCE]
        pixels = enlarge(part, size)
        low, high = pixels.amin((-2, -1), keepdim=True), pixels.amax((-2, -1), keepdim=True)
        part.sub_(low).div_(high - low)  # in place
    if not len(scaled):
        return scaled, []
    labels = cluster(cosine_distances(scaled, size), threshold, most)
    clusters = [np.flatnonzero(labels == label).tolist() for label in range(labels.max() + 1)]
    return torch.stack([scaled[members].sum(0) for members in clusters]), [int(varied[m[0]]) for m in clusters]


def cosine_distances(cells: Tensor, size: tuple[int, int]) -> NDArray[np.float64]:
    """Return 1 − cosine between enlarged maps, [d, d]: (U a)·(U b) = a·(UᵀU b), with U rows times columns."""
    maps = cells.cpu().double()
    interpolations = [
        F.interpolate(torch.eye(count, dtype=torch.float64)[None], size=to, mode="linear", align_corners=False)[0]
        for count, to in zip(maps.shape[1:], size, strict=True)
    ]  # [rows, H] and [cols, W]
    rows, cols = (U @ U.T for U in interpolations)
    products = maps.flatten(1) @ (rows @ maps @ cols).flatten(1).T
    norms = products.diagonal().sqrt()
    return (1 - products / (norms[:, None] * norms)).numpy()


def cluster(distance: NDArray[np.float64], threshold: float, most: int | None) -> NDArray[np.int64]:
    """Return cluster labels [d]: complete linkage below the threshold, at most `most`, numbered by first member."""
    from scipy.cluster.hierarchy import fcluster, linkage

    if len(distance) == 1:
        return np.zeros(1, dtype=np.int64)
    pairs = distance[np.triu_indices(len(distance), 1)].clip(min=0)
    tree = linkage(pairs, "complete")
    labels = fcluster(tree, np.nextafter(threshold, -1), "distance")  # as scikit-learn: below the threshold, not at it
    if most is not None and labels.max() > most:
        labels = fcluster(tree, tree[len(distance) - most - 1, 2], "distance")  # after n − most merges
    _, first, label = np.unique(labels, return_index=True, return_inverse=True)
    return first.argsort().argsort()[label].astype(np.int64)


def causal_scores(
    probe: Probe, image: int, cells: Tensor, image_seed: int, draws: Sequence[int], std: float, causal: bool
) -> Tensor:
    """Return p [repeats, n] for the masks of n maps `cells` [n, rows, cols]; each has its own noise in every repeat."""
    x = widened(probe.pixels[image])
    subtracts = causal and std > 0  # without noise f(x + 0) is f(x)

    def variant(ks: range) -> Tensor:
        masks = enlarged_masks(cells[[k % len(cells) for k in ks]], probe.size)[:, None]  # [k, 1, H, W]
        added = torch.zeros_like(x).expand(len(ks), *x.shape)
        if std > 0:
            added = std * torch.stack([normal_noise(image_seed, draws[k], x[None]) for k in ks]) * (1 - masks)
        return torch.stack([x * masks + added, x + added] if subtracts else [x * masks + added])

    scores = probe.score_images(len(draws), variant, images=[image, image] if subtracts else [image])
    p = scores[0] - scores[1] + probe.original[image] if subtracts else scores[0]
    return p.reshape(-1, len(cells))


def weighted_masks(p: Tensor, cells: Tensor, size: tuple[int, int], coverage: bool) -> Tensor:
    """Return (1/n) sum_i p_i M_i, over sum_k M_k where that is not 0: [repeats, H, W] for p [repeats, n]."""
    total, mask_sum = p.new_zeros(len(p), *size), p.new_zeros(size)
    for start in range(0, len(cells), CHANNELS_AT_ONCE):
        part = slice(start, start + CHANNELS_AT_ONCE)
        masks = enlarged_masks(cells[part], size).to(p)
        total += torch.einsum("rn,nhw->rhw", p[:, part], masks)
        mask_sum += masks.sum(0)
    if coverage:
        total = total / torch.where(mask_sum > 0, mask_sum, torch.ones_like(mask_sum))
    return total / len(cells)
