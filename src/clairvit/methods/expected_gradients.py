"""Expected Gradients: integrated gradients averaged over reference images, one random point of each path at a time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import torch
from torch import Tensor

from clairvit._cost import Cost
from clairvit._rng import make_generator
from clairvit.errors import BadInput, did_you_mean
from clairvit.methods.gradient import at_level
from clairvit.methods.layer_view import tokens_to_grid
from clairvit.methods.multi_pass import (
    AT_PIXELS,
    AT_TOKENS,
    by_variant,
    completeness_note,
    run_variants,
    target_scores,
    trace_variants,
)
from clairvit.methods.registry import FORWARD, ExtraCost, method
from clairvit.methods.result import MapResult
from clairvit.models.image_files import as_path
from clairvit.models.images import list_images, prepare
from clairvit.numerics import widened
from clairvit.option_types import Doc, LocalPath, Passes
from clairvit.perturbation.removal import background
from clairvit.tracing.trace import Trace

NAME = "expected-gradients"
# Copies of the explained image that serve as references where the user has none: word -> removals that paint them.
COPIES = {"copies": ("mean", "gaussian-blur"), "mean": ("mean",), "blur": ("gaussian-blur",)}
References = Annotated[
    str,
    LocalPath(words=tuple(COPIES)),
    Doc("a folder of images, or copies of the image itself: in the mean colour, blurred, or both"),
]


def _cost(samples: int, references: str, **_: object) -> Cost:
    """Return a forward and backward per draw, and a forward per reference for its score."""
    count = len(COPIES[references]) if references in COPIES else min(len(_reference_files(references)), samples)
    return Cost(samples + count, samples)


@method(
    NAME,
    family="gradient",
    paper="Erion et al., Nature Machine Intelligence 2021",
    output="image",
    requires=FORWARD,
    extra_cost=ExtraCost(_cost, slow=True),
    signed=True,
)
def expected_gradients(
    trace: Trace,
    samples: Annotated[Passes, Doc("how many pairs of a reference and a point of the path are drawn")] = 50,
    references: References = "copies",
    level: Annotated[
        Literal["patch", "pixel", "token"], Doc("where the map ends: patches, pixels, or the first block's tokens")
    ] = "patch",
    seed: int = 0,
) -> MapResult:
    """mean_k (x − x'_k)·dy/dx(x'_k + alpha_k (x − x'_k)), x' from references, alpha uniform: gradients on many paths.

    Integrated gradients without one baseline: each draw takes a reference image and a point of the straight path from
    it. `references` is a folder of images (at most `samples` of them are used), or copies of the image itself: in the
    mean colour (`mean`), blurred (`blur`) or both (`copies`). `level=token` goes from the reference's tokens to the
    image's at the first block. In expectation the map adds up to the score's rise over the references' mean score; the
    notes say how far this one is, and `standard_error` how much each patch varies with the draws.
    """
    by_token = level == "token"
    if by_token:
        trace.recording.structure.check_members(trace.recording.model.name, "level=token")
    reference_scores, ends = run_references(trace, load_references(trace, references, samples, seed), tokens=by_token)
    x = widened(trace.layers[0].x if by_token else trace.pixels)
    picks, alphas = draws(trace.image_seeds(seed), len(ends), samples)  # [n, B] each
    images = torch.arange(len(x), device=x.device)

    def start(k: int) -> Tensor:
        return ends[picks[k].to(ends.device), images]

    def interpolated(k: int) -> Tensor:
        return torch.lerp(start(k), x, alphas[k].to(x).reshape(-1, *[1] * (x.ndim - 1)))

    maps: list[Tensor] = []
    for ks, variants in trace_variants(trace, samples, interpolated, AT_TOKENS if by_token else AT_PIXELS, NAME):
        g = by_variant(variants.layers[0].dx if by_token else variants.dpixels, trace)  # [V, B, …]
        for k, gradient in zip(ks, g, strict=True):
            product = (x - start(k)) * gradient
            if by_token:
                maps.append(tokens_to_grid(product.sum(-1), trace, 0))
            else:
                maps.append(at_level(product.sum(1), trace, "pixel" if level == "pixel" else "patch", "sum"))
    by_draw = torch.stack(maps)  # [n, B, rows, cols]
    rise, sums = target_scores(trace) - reference_scores.mean(0), by_draw.flatten(2).sum(2)  # [B], [n, B]
    note = completeness_note(sums.mean(0), rise, "more samples", NAME, "references")
    if samples == 1:
        return MapResult(by_draw[0], notes=(note,))
    error, error_of_sum = (values.std(0) / samples**0.5 for values in (by_draw, sums))
    listed = ", ".join(f"{value:.2g}" for value in error_of_sum.tolist())
    return MapResult(by_draw.mean(0), standard_error=error, notes=(f"{note}; the sum's standard error is {listed}",))


def draws(seeds: Sequence[int], count: int, samples: int) -> tuple[Tensor, Tensor]:
    """Return which of `count` references each draw takes for each image, and its alpha; [samples, B] each."""
    picks, alphas = [], []
    for image_seed in seeds:
        generator = make_generator(image_seed, "expected-gradients/draws")
        alphas.append(torch.rand(samples, generator=generator, dtype=torch.float64, device="cpu"))
        picks.append(torch.randint(count, (samples,), generator=generator, device="cpu"))
    return torch.stack(picks, 1), torch.stack(alphas, 1)


def load_references(trace: Trace, references: str, samples: int, seed: int) -> Tensor:
    """Return the reference images of every explained image, [R, B, 3, H, W], normalised as these are."""
    pixels, model = trace.pixels, trace.recording.model
    if references in COPIES:
        wide = widened(pixels)
        return torch.stack([background(removal, wide, model.preprocess, seed) for removal in COPIES[references]])
    files = _reference_files(references)
    if len(files) > samples:
        order = torch.randperm(len(files), generator=make_generator(seed, "expected-gradients/files"), device="cpu")[
            :samples
        ]
        files = [files[index] for index in sorted(order.tolist())]
    loaded = prepare(files, model).pixels.to(pixels)
    if loaded.shape[1:] != pixels.shape[1:]:
        rows, cols = loaded.shape[-2:]
        raise BadInput(
            f"The references in '{references}' become images of {rows} × {cols} pixels; the explained ones have "
            f"{pixels.shape[-2]} × {pixels.shape[-1]}. Explain images of the model's own size, or use references=blur."
        )
    return loaded[:, None].expand(-1, len(pixels), -1, -1, -1)


def _reference_files(references: str) -> list[Path]:
    """Return the image files of a folder or pattern."""
    if not references or (not as_path(references).exists() and not set(references) & set("/\\*?.")):
        raise BadInput(
            f"references={references} was given; expected {', '.join(COPIES)}, or a folder of images."
            f"{did_you_mean(references, COPIES)}"
        )
    return list_images(references)[0]


def run_references(trace: Trace, images: Tensor, *, tokens: bool) -> tuple[Tensor, Tensor]:
    """Return the target's score of each reference, [R, B], and x': its pixels, or its tokens at the first block."""

    def run(ks: range) -> tuple[Tensor, Tensor]:
        variants = trace.rerun(images[ks.start : ks.stop].flatten(0, 1).to(trace.pixels.dtype), None)
        start = variants.layers[0].x if tokens else variants.pixels
        return by_variant(target_scores(variants), trace), by_variant(start, trace)

    outputs = [output for _, output in run_variants(trace, len(images), run, NAME)]
    return torch.cat([scores for scores, _ in outputs]), torch.cat([start for _, start in outputs])
