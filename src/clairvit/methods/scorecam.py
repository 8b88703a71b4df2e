"""Feature masks: the image seen through its own feature maps. A map whose mask keeps the score shows what matters.

a_k is the k-th channel where class activation maps look (a ViT's patch tokens after the last block's first norm, a
CNN's last stage), laid out on the image by bilinear interpolation. No gradient is used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from clairvit.errors import BadInput
from clairvit.methods.cam import last_norm_features
from clairvit.methods.explanation import Cost
from clairvit.methods.layer_view import laid_out
from clairvit.methods.multi_pass import Level, at_least_one, on_image
from clairvit.methods.multi_pass import noise as normal_noise
from clairvit.methods.registry import ExtraCost, Requires, method
from clairvit.methods.result import MapResult
from clairvit.perturbation.probe import Probe, probing
from clairvit.perturbation.rng import image_seeds
from clairvit.tracing.attention import widened
from clairvit.tracing.recorders.last_norm import LastNorm
from clairvit.tracing.trace import Trace

Background = Literal["mean", "black", "blur", "gaussian-blur", "noise"]  # what shows through a mask that is half there
USUAL_CHANNELS = 768  # of the costs in lists: a ViT-B
ON_LAST_NORM = Requires(passes="forward", recorders=(LastNorm,))
AT_ONCE = 64  # channels that are laid out on the image at the same time


def feature_maps(trace: Trace) -> Tensor:
    """[B, d, rows, cols]"""
    last = trace.layers[-1]
    tokens = last_norm_features(trace)[0] if last.call is not None else None  # a CNN's stages are feature maps already
    return laid_out(widened(last.x if tokens is None else tokens), trace, last.index).permute(0, 3, 1, 2)


def on_pixels(maps: Tensor, size: tuple[int, int], corners: bool = False) -> Tensor:
    """[…, rows, cols] -> […, H, W], bilinear: a cell's value is at its centre, or the outer cells' at the corners."""
    flat = maps.reshape(-1, 1, *maps.shape[-2:])
    return F.interpolate(flat, size=size, mode="bilinear", align_corners=corners).reshape(*maps.shape[:-2], *size)


def masks_of(cells: Tensor, size: tuple[int, int], corners: bool = False) -> Tensor:
    """[…, rows, cols] -> […, H, W], each scaled to 0…1 on the image; what is the same everywhere masks everything."""
    maps = on_pixels(cells, size, corners)
    low, high = maps.amin((-2, -1), keepdim=True), maps.amax((-2, -1), keepdim=True)
    seen = varied(cells)[..., None, None]  # interpolation may round a constant up here and down there
    return torch.where(seen, (maps - low) / (high - low), torch.zeros_like(maps))


def varied(cells: Tensor) -> Tensor:
    """bool […] for […, rows, cols]: is it not the same everywhere?"""
    return cells.amax((-2, -1)) > cells.amin((-2, -1))


# Score-CAM


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
    presets={"jacobgil": {"corners": True}},
)
def score_cam(
    trace: Trace,
    *,
    top_k: int | None = None,
    weights: Literal["softmax", "plain"] = "softmax",
    corners: bool = False,
    removal: Background = "mean",
    seed: int = 0,
) -> MapResult:
    """relu(sum_k w_k a_k), w = softmax_k f(x · mask_k): channels weighted by the score that their own mask leaves.

    mask_k is a_k on the image, scaled to 0…1; where it is 0 the image is replaced as `removal` says. One forward a
    channel (192 in a ViT-Ti, 768 in a ViT-B): top_k=64 takes the 64 that vary most over the image, and weighs no other.
    The paper's rise over a baseline image, f(x · mask_k) − f(x_b), gives the same w: softmax ignores what all share.
    `weights=plain` takes the scores as they are; with score="prob" that is the authors' code. `corners` (preset
    jacobgil) stretches a_k from corner to corner as pytorch-grad-cam does, up to half a patch from where it was seen.
    """
    if top_k is not None:
        at_least_one("top_k", top_k)
    maps = feature_maps(trace)
    if top_k is not None and top_k < maps.shape[1]:
        chosen = maps.flatten(2).var(2).argsort(dim=1, descending=True, stable=True)[:, :top_k]  # [B, k]
        maps = maps[torch.arange(len(maps), device=maps.device)[:, None], chosen]
    with probing(trace, removal, what="scorecam", forwards=maps.shape[1], seed=seed) as probe:
        scores = masked_scores(probe, maps, corners)  # [B, d]
    if weights == "softmax":
        scores = scores.softmax(1)
    else:  # the authors leave out maps that are the same everywhere
        scores = scores * varied(maps)
    return MapResult.from_probe(torch.einsum("bk,bkrc->brc", scores.to(maps), maps), probe)


def masked_scores(probe: Probe, maps: Tensor, corners: bool) -> Tensor:
    """f(x · mask_k) for maps [B, d, rows, cols]: [B, d]. Masks are made when their turn comes."""

    def variant(ks: range) -> Tensor:
        return probe.blend(masks_of(maps[:, ks.start : ks.stop], probe.size, corners))

    return probe.score_images(maps.shape[1], variant)


# ViT-CX


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
    samples: int | None = None,
    threshold: float = 0.1,
    noise: float = 0.1,
    repeats: int = 1,
    causal: bool = True,
    coverage: bool = True,
    level: Level = "patch",
    seed: int = 0,
) -> MapResult:
    """(1/n) sum_i p_i M_i / sum_k M_k, p_i = f(x M_i + Z_i (1 − M_i)) − f(x + Z_i (1 − M_i)) + f(x): what masks leave.

    The masks are feature maps on the image, scaled to 0…1; those closer than `threshold` (cosine distance, complete
    linkage) are added up to one, so that tens of masks are left of hundreds. `samples` joins them further, until at
    most so many are. Z is normal noise of std `noise` in normalised pixels, and what it does to the whole image is
    taken off (`causal`). Dividing by how much all masks show of a pixel (`coverage`) keeps what many of them share from
    winning by their number. `repeats` draws the noise more than once, for a mean and its standard error.
    """
    _check_vit_cx(samples, threshold, noise, repeats)
    repeats = repeats if noise > 0 else 1
    every, marks = feature_maps(trace), image_seeds(trace.pixels, seed)
    size = (int(trace.pixels.shape[-2]), int(trace.pixels.shape[-1]))
    found = [mask_cells(maps, size, threshold, samples) for maps in every]
    passes = repeats * (2 if causal and noise > 0 else 1) * sum(len(cells) for cells, _ in found)
    forwards = math.ceil(passes / len(every))
    drawn, notes = [], []  # for each image [repeats, H, W]
    with probing(trace, "mean", what="vit-cx", forwards=forwards, seed=seed) as probe:
        for image, (cells, first) in enumerate(found):
            if not first:
                notes.append("vit-cx: every feature map is the same everywhere, so there is no mask; the map is zero")
                drawn.append(cells.new_zeros(repeats, *size))
                continue
            # A mask's noise is that of its first channel, so it stays when other masks change.
            draws = [draw * every.shape[1] + channel for draw in range(repeats) for channel in first]
            p = causal_scores(probe, image, cells, marks[image], draws, noise, causal)  # [repeats, n]
            drawn.append(seen_through(p, cells, size, coverage))
    pixels = torch.stack(drawn, 1)  # [repeats, B, H, W]
    maps = torch.stack([on_image(one, trace, level, "mean") for one in pixels])
    error = maps.std(0) / repeats**0.5 if repeats > 1 else None
    return MapResult.from_probe(maps.mean(0), probe, standard_error=error, notes=notes)


def _check_vit_cx(samples: int | None, threshold: float, noise: float, repeats: int) -> None:
    if samples is not None:
        at_least_one("samples", samples)
    at_least_one("repeats", repeats)
    if not threshold >= 0:
        raise BadInput(f"threshold={threshold} was given; expected a cosine distance of 0 or more, such as 0.1.")
    if not noise >= 0:
        raise BadInput(f"noise={noise} was given; expected a standard deviation of 0 or more, such as 0.1.")


def mask_cells(maps: Tensor, size: tuple[int, int], threshold: float, most: int | None) -> tuple[Tensor, list[int]]:
    """Maps [d, rows, cols] joined to n, and the first channel in each. On the image they are the masks, once scaled.

    Interpolation and scaling are linear but for each map's lowest and highest pixel: with these known, sums and angles
    of whole masks are those of their cells, and no mask need be as large as the image.
    """
    alive = varied(maps).nonzero()[:, 0]
    scaled = maps[alive]
    for start in range(0, len(scaled), AT_ONCE):
        some = scaled[start : start + AT_ONCE]
        whole = on_pixels(some, size)
        low, high = whole.amin((-2, -1), keepdim=True), whole.amax((-2, -1), keepdim=True)
        some.sub_(low).div_(high - low)  # in its place
    if not len(scaled):
        return scaled, []
    labels = joined(cosine_distances(scaled, size), threshold, most)
    members = [np.flatnonzero(labels == label).tolist() for label in range(labels.max() + 1)]
    return torch.stack([scaled[own].sum(0) for own in members]), [int(alive[own[0]]) for own in members]


def cosine_distances(cells: Tensor, size: tuple[int, int]) -> NDArray[np.float64]:
    """[d, d], 1 − cosine between maps as they are on the image: (U a)·(U b) = a·(UᵀU b), with U rows times columns."""
    maps = cells.cpu().double()
    along = [
        F.interpolate(torch.eye(count, dtype=torch.float64)[None], size=to, mode="linear", align_corners=False)[0]
        for count, to in zip(maps.shape[1:], size, strict=True)
    ]  # [rows, H] and [cols, W]
    rows, cols = (one @ one.T for one in along)
    products = maps.flatten(1) @ (rows @ maps @ cols).flatten(1).T
    length = products.diagonal().sqrt()
    return (1 - products / (length[:, None] * length)).numpy()


def joined(distance: NDArray[np.float64], threshold: float, most: int | None) -> NDArray[np.int64]:
    """[d] the group of each: complete linkage below the threshold, at most so many, numbered by their first member."""
    from scipy.cluster.hierarchy import fcluster, linkage

    if len(distance) == 1:
        return np.zeros(1, dtype=np.int64)
    pairs = distance[np.triu_indices(len(distance), 1)].clip(min=0)
    tree = linkage(pairs, "complete")
    labels = fcluster(tree, np.nextafter(threshold, -1), "distance")  # scikit-learn joins what is below, not at it
    if most is not None and labels.max() > most:
        labels = fcluster(tree, most, "maxclust")
    _, first, label = np.unique(labels, return_index=True, return_inverse=True)
    return first.argsort().argsort()[label].astype(np.int64)


def causal_scores(
    probe: Probe, image: int, cells: Tensor, mark: int, draws: Sequence[int], std: float, causal: bool
) -> Tensor:
    """p [repeats, n] for the masks that n cells [n, rows, cols] make; each has its own noise in every repeat."""
    x = widened(probe.pixels[image])
    subtracts = causal and std > 0  # without noise f(x + 0) is f(x)

    def variant(ks: range) -> Tensor:
        masks = masks_of(cells[[k % len(cells) for k in ks]], probe.size)[:, None]  # [k, 1, H, W]
        added = torch.zeros_like(x).expand(len(ks), *x.shape)
        if std > 0:
            added = std * torch.stack([normal_noise(mark, draws[k], x[None]) for k in ks]) * (1 - masks)
        return torch.stack([x * masks + added, x + added] if subtracts else [x * masks + added])

    said = probe.score_images(len(draws), variant, images=[image, image] if subtracts else [image])
    p = said[0] - said[1] + probe.original[image] if subtracts else said[0]
    return p.reshape(-1, len(cells))


def seen_through(p: Tensor, cells: Tensor, size: tuple[int, int], coverage: bool) -> Tensor:
    """(1/n) sum_i p_i M_i, divided by sum_k M_k where there is anything: [repeats, H, W] for p [repeats, n]."""
    total, shown = p.new_zeros(len(p), *size), p.new_zeros(size)
    for start in range(0, len(cells), AT_ONCE):
        some = slice(start, start + AT_ONCE)
        masks = masks_of(cells[some], size).to(p)
        total += torch.einsum("rn,nhw->rhw", p[:, some], masks)
        shown += masks.sum(0)
    if coverage:
        total = total / torch.where(shown > 0, shown, torch.ones_like(shown))
    return total / len(cells)
