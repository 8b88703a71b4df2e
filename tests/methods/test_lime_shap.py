"""LIME and KernelSHAP: exact on a linear model, Shapley values by brute force, the peers' answers, honest errors."""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from torch import Tensor, nn

import clairvit as cv
from clairvit.errors import BadInput
from clairvit.methods.explanation import Explanation
from clairvit.methods.lime_shap import LIME_WIDTH, lime_fit, lime_kernel, shapley_fit
from clairvit.methods.spec import resolve_method
from clairvit.perturbation.probe import Probe, probing
from clairvit.perturbation.segments import random_halves, segmentations, shapley_coalitions
from helpers.linear_patch_model import effects, linear
from helpers.rounding import assert_same, growth, same
from helpers.tiny_models import double, pixels, shaken, wrapped

FIXTURE = Path(__file__).parent.parent / "fixtures" / "surrogates.npz"
TARGET = 3


def on_linear(method: str, **options: Any) -> tuple[Tensor, Explanation]:
    """The known effects [rows, cols], and what the method says of them."""
    model, image = linear((4, 5))
    return effects(model, image, 1), cv.explain(model, image, method, 1, score="logit", removal="mean", **options)


# Known answers


@pytest.mark.parametrize("samples", [80, 120, 200, None])
def test_kernelshap_finds_the_effects_of_a_linear_model(samples: int | None) -> None:
    expected, explanation = on_linear("kernelshap", samples=samples)
    total = float(expected.abs().sum())
    assert_same(explanation.maps[0], expected, magnitude=total)
    assert explanation.standard_error is not None
    assert_same(
        explanation.standard_error[0], torch.zeros_like(expected), magnitude=total, label="nothing is left to chance"
    )


@pytest.mark.parametrize("alpha", [0.0, 1e-14])
def test_lime_finds_the_effects_of_a_linear_model(alpha: float) -> None:
    expected, explanation = on_linear("lime", alpha=alpha, samples=100)
    total = float(expected.abs().sum())
    assert_same(explanation.maps[0], expected, magnitude=total)
    assert explanation.standard_error is not None
    assert_same(explanation.standard_error[0], torch.zeros_like(expected), magnitude=total)


def test_the_ridge_of_lime_only_shrinks() -> None:
    expected, explanation = on_linear("lime")
    both = torch.stack([explanation.maps[0].flatten(), expected.flatten()])
    assert torch.corrcoef(both)[0, 1] > 0.999
    assert 0.9 < float(explanation.maps[0].norm() / expected.norm()) < 1


def test_lime_is_the_weighted_ridge_of_its_samples() -> None:
    """Written as one least-squares problem: sqrt(w) (a + z·b) = sqrt(w) f(z), and sqrt(alpha) b = 0."""
    model, image = double("timm-vit")
    explanation = cv.explain(model, image, "lime", TARGET, samples=60, removal="mean", alpha=0.7, width=0.3, seed=5)
    kept = torch.cat([torch.ones(1, 16), random_halves(59, 16, 5)]).double().numpy()
    shown = torch.from_numpy(kept.reshape(60, 1, 4, 4).repeat(8, 2).repeat(8, 3))
    for row in range(2):
        with torch.no_grad():
            scores = model.logits(image[row] * shown).softmax(-1)[:, TARGET].numpy()
        distance = 1 - kept.sum(1) / np.sqrt(16 * kept.sum(1).clip(1))
        root = np.sqrt(np.exp(-(distance**2) / 0.3**2))
        left = np.vstack([root[:, None] * np.hstack([kept, np.ones((60, 1))]), np.eye(16, 17) * np.sqrt(0.7)])
        expected = np.linalg.lstsq(left, np.concatenate([root * scores, np.zeros(16)]))[0][:16]
        assert_same(explanation.maps[row].flatten(), expected, magnitude=1)  # a fit to probabilities


def small(size: tuple[int, int] = (16, 32), patch: int = 8) -> nn.Module:
    """A ViT in float64, of 2 × 4 patches by default."""
    module = timm.create_model(
        "vit_tiny_patch16_224", img_size=size, patch_size=patch, embed_dim=24, depth=2, num_heads=3, num_classes=7
    )
    return shaken(module, 4).eval().double()


def painted(module: nn.Module, image: Tensor, kept: list[int]) -> Tensor:
    """Logits [C] with the other patches in the mean colour."""
    shown = torch.zeros(8, dtype=torch.double)
    shown[kept] = 1
    return module(image * shown.reshape(2, 4).repeat_interleave(8, 0).repeat_interleave(8, 1))[0]


def dropped(module: Any, image: Tensor, kept: list[int]) -> Tensor:
    """Logits [C] of a sequence of only these patches, in timm's own words."""
    tokens = module._pos_embed(module.patch_embed(image))
    tokens = tokens[:, [0, *(1 + patch for patch in kept)]]
    return module.forward_head(module.norm(module.blocks(module.norm_pre(tokens))))[0]


def shapley(value: Callable[[list[int]], float], players: int) -> Tensor:
    """From the definition: the mean over all orders of what a player adds."""
    values = {
        group: value(list(group))
        for size in range(players + 1)
        for group in itertools.combinations(range(players), size)
    }
    fair = torch.zeros(players, dtype=torch.double)
    for group, worth in values.items():
        for player in set(range(players)) - set(group):
            share = 1 / (players * math.comb(players - 1, len(group)))
            fair[player] += share * (values[tuple(sorted((*group, player)))] - worth)
    return fair


@pytest.mark.parametrize(("removal", "left"), [("mean", painted), ("token", dropped)])
def test_kernelshap_with_all_coalitions_is_shapley(removal: str, left: Callable[..., Tensor]) -> None:
    module, image = small(), pixels("timm-vit", 1, dtype=torch.float64)[:, :, :16]
    model = cv.wrap(module, size=(16, 32))
    explanation = cv.explain(model, image, "kernelshap", TARGET, removal=removal)
    with torch.no_grad():
        expected = shapley(lambda kept: float(left(module, image, kept).softmax(-1)[TARGET]), 8)
    assert explanation.maps.dtype == torch.float64
    assert_same(explanation.maps[0].flatten(), expected, magnitude=1)  # a mean of differences of probabilities
    assert expected.std() > 0.1 * expected.abs().max()
    assert explanation.standard_error is not None
    assert not explanation.standard_error.any()  # all coalitions were asked
    assert explanation.cost.forwards == 1 + 254 + 1
    assert_same(
        cv.explain(model, image, "kernelshap", TARGET, removal=removal, seed=9).maps, explanation.maps, magnitude=1
    )


def test_a_draw_of_coalitions_is_shapley_on_average() -> None:
    """Equal weights for drawn coalitions, the kernel for enumerated ones: any other mix would be off."""
    model = cv.wrap(small(), size=(16, 32))
    image = pixels("timm-vit", 1, dtype=torch.float64)[:, :, :16]
    exact = cv.explain(model, image, "kernelshap", TARGET).maps[0]
    few = torch.stack([cv.explain(model, image, "kernelshap", TARGET, samples=120, seed=k).maps[0] for k in range(60)])
    error = few.std(0) / math.sqrt(60)
    assert error.max() < 0.03 * exact.abs().max()
    assert ((few.mean(0) - exact).abs() <= 4 * error).all()


# Efficiency


@pytest.mark.parametrize("samples", [8, 24, 100])
@pytest.mark.parametrize(
    ("kind", "removal"),
    [
        ("timm-vit", "token"),
        ("timm-vit", "mean"),
        ("timm-vit-avg", "token"),
        ("timm-siglip-map", "token"),
        ("timm-reg4-gap", "blur"),
        ("hf-dinov2-registers-sdpa", "token"),
        ("home-mean-pool", "road"),
    ],
)
def test_values_add_up(kind: str, samples: int, removal: str) -> None:
    """To f(x) − f(all removed), in any number of samples."""
    model, image = wrapped(kind, torch.float64), pixels(kind, dtype=torch.float64)
    explanation = cv.explain(model, image, "kernelshap", TARGET, score="logit", samples=samples, removal=removal)
    with probing(cv.trace(model, image, target=TARGET), removal, label="test", forwards=1) as probe:
        nothing = probe.score_kept(torch.zeros(1, 1, probe.patches, dtype=torch.bool))[:, 0]
        expected = probe.original - nothing
    assert_same(explanation.maps.sum((1, 2)), expected, magnitude=float(explanation.maps.abs().sum()))


@functools.cache
def pets() -> cv.Model:
    return cv.load("pets", dtype=torch.float64)


def test_values_add_up_on_the_built_in_model() -> None:
    explanation = cv.explain(pets(), "demo", "kernelshap", samples=12, cells=2, removal="mean", score="logit")
    with torch.no_grad():
        nothing = pets().logits(torch.zeros_like(explanation.pixels))
    expected = (explanation.logits - nothing)[0, explanation.classes[0]]
    assert_same(explanation.maps[0, ::7, ::7].sum(), expected, magnitude=float(explanation.logits.abs().max()))


# Superpixels


def patchwork(width: int) -> Tensor:
    """Coloured stripes that are no patches, [3, 64, 64]."""
    image = torch.full((3, 64, 64), 0.2)
    for place, start in enumerate(range(0, 64, width)):
        image[place % 3, :, start : start + width] = 1.5
    return image


@pytest.mark.parametrize("method", ["lime", "kernelshap"])
def test_superpixels_of_a_linear_model(method: str) -> None:
    """A superpixel's effect is that of its pixels; a patch shows the mean over its pixels. Each image has its own."""
    model, _ = linear((4, 4), patch=16)
    images = torch.stack([patchwork(20), patchwork(27)]).double()
    options = {"alpha": 0.0} if method == "lime" else {}
    explanation = cv.explain(
        model, images, method, 1, score="logit", removal="mean", features="superpixels", samples=200, **options
    )
    with probing(cv.trace(model, images, target=1), "mean", label="test", forwards=1) as probe:
        groups = segmentations(probe, "superpixels", None)
    assert len({segment.count for segment in groups}) == 2
    weights = model.module.weights[1].detach().repeat_interleave(16, 0).repeat_interleave(16, 1) / 256
    for row, superpixel in enumerate(groups):
        pixel = images[row].mean(0) * weights  # what each pixel adds
        effect = pixel.new_zeros(superpixel.count).scatter_add_(0, superpixel.labels.flatten(), pixel.flatten())
        expected = effect[superpixel.labels].reshape(4, 16, 4, 16).mean((1, 3))
        assert_same(explanation.maps[row], expected, magnitude=float(pixel.abs().sum()))
    alone = cv.explain(
        model, images[1:], method, 1, score="logit", removal="mean", features="superpixels", samples=200, **options
    )
    assert_same(explanation.maps[1:], alone.maps)


def test_superpixels_of_tokens_are_patches() -> None:
    """One token, one number: the map is flat on each rounded superpixel, and these are stripes."""
    model, image = cv.wrap(small((64, 64), 16), size=(64, 64)), patchwork(20)[None].double()
    explanation = cv.explain(model, image, "lime", TARGET, samples=50, features="superpixels")
    assert 1 < explanation.maps.unique().numel() < 16
    with probing(cv.trace(model, image, target=TARGET), "token", label="test", forwards=1) as probe:
        (segmentation,) = segmentations(probe, "superpixels", None)
    assert 1 < segmentation.count < 16
    for feature in range(segmentation.count):
        assert explanation.maps[0][segmentation.labels == feature].unique().numel() == 1


# Chance


@pytest.mark.parametrize("text", ["lime(samples=70)", "kernelshap(samples=70)"])
def test_the_draws_know_neither_batch_nor_image(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn_masks: list[Tensor] = []
    keeping = Probe.score_kept

    def noting(probe: Probe, keep: Tensor) -> Tensor:
        drawn_masks.append(keep)
        return keeping(probe, keep)

    monkeypatch.setattr(Probe, "score_kept", noting)
    for images, size in ((1, 1), (3, 7), (3, 64)):
        cv.explain(wrapped("timm-vit"), pixels("timm-vit", images, seed=images), text, TARGET, seed=4, batch_size=size)
    assert len(drawn_masks) == 3
    assert len(drawn_masks[0]) == 1  # one set of masks for all images
    assert torch.equal(drawn_masks[0], drawn_masks[1])
    assert torch.equal(drawn_masks[0], drawn_masks[2])


@pytest.mark.parametrize("method", ["lime", "kernelshap"])
def test_batch_size_changes_nothing(method: str) -> None:
    model, image = double("timm-vit", batch=3)
    for removal in ("token", "noise"):
        maps = [
            cv.explain(model, image, method, TARGET, samples=70, removal=removal, seed=4, batch_size=size).maps
            for size in (1, 7, 64)
        ]
        assert_same(maps[0], maps[2])
        assert_same(maps[1], maps[2])


@pytest.mark.slow
@pytest.mark.parametrize(
    "text", ["lime(samples=60)", "lime(samples=100,alpha=0)", "lime(samples=60,cells=2)", "kernelshap(samples=160)"]
)
def test_standard_errors_are_the_spread_over_seeds(text: str) -> None:
    """In the root mean square over patches, within a factor of 1.3."""
    model, image = wrapped("timm-vit-avg"), pixels("timm-vit-avg")
    explanations = [cv.explain(model, image, text, TARGET, seed=seed) for seed in range(24)]
    spread = torch.stack([explanation.maps for explanation in explanations]).var(0).mean((1, 2)).sqrt()
    reported_error = (
        torch.stack([explanation.standard_error for explanation in explanations]).square().mean((0, 2, 3)).sqrt()
    )
    assert ((reported_error / spread).log().abs() < math.log(1.3)).all()


def test_errors_vanish_as_the_draw_becomes_complete() -> None:
    model = cv.wrap(small(), size=(16, 32))
    image = pixels("timm-vit", 1, dtype=torch.float64)[:, :, :16]
    many, most = (cv.explain(model, image, "kernelshap", TARGET, samples=n).standard_error for n in (150, 250))
    assert many is not None
    assert most is not None
    assert most.max() < 0.35 * many.max()


# Notes, errors and declared costs


def test_too_few_samples_are_noted() -> None:
    model, image = wrapped("timm-vit"), pixels("timm-vit")
    few = cv.explain(model, image, "kernelshap", TARGET, samples=10)
    assert few.standard_error is None
    assert re.search(r"10 samples tell 5 of the 15 differences between features.*Raise samples to 64", few.notes[0])
    short = cv.explain(model, image, "lime", TARGET, samples=10)
    assert re.search(r"10 samples are fewer than the 16 features.*raise samples, or use cells=7", short.notes[0])
    assert cv.explain(model, image, "lime", TARGET, samples=20).notes == ()
    assert cv.explain(model, image, "kernelshap", TARGET, samples=120).notes == ()


@pytest.mark.filterwarnings("ignore:.*is the same everywhere")
def test_one_feature_takes_it_all() -> None:
    model, image = double("timm-vit")
    explanation = cv.explain(model, image, "kernelshap", TARGET, cells=1, removal="mean")
    with torch.no_grad():
        scores = model.logits(torch.cat([image, torch.zeros_like(image[:1])])).softmax(-1)[:, TARGET]
    assert_same(explanation.maps, (scores[:2] - scores[2])[:, None, None].expand(2, 4, 4), magnitude=1)
    only, flat = explanation.notes
    assert only == "kernelshap: there is one feature only, so the map is flat; use features=patches, or more cells"
    assert "is the same everywhere" in flat


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("lime(samples=1)", "samples=1 was given; expected 2 or more variants of the image, such as samples=1000"),
        ("lime(width=0)", "width=0 was given; expected more than 0, such as width=0.25"),
        ("lime(alpha=-1)", "alpha=-1 was given; expected 0 or more (0: least squares), such as alpha=1"),
        (
            "kernelshap(samples=1)",
            "samples=1 was given; expected 2 or more variants of the image, such as samples=1000",
        ),
        ("kernelshap(cells=0)", "cells=0 was given; expected 1 or more cells in a row, such as cells=7"),
    ],
)
def test_impossible_options_are_refused(text: str, words: str) -> None:
    with pytest.raises(BadInput, match=re.escape(words)):
        cv.explain(wrapped("timm-vit"), pixels("timm-vit"), text, TARGET)


@pytest.mark.parametrize(
    ("text", "forwards"),
    [
        ("lime", 1 + 999),
        ("kernelshap", 1 + 2 * 196 + 2048 + 1),
        ("kernelshap(samples=25)", 1 + 24 + 1),
        ("kernelshap(cells=7)", 1 + 2 * 49 + 2048 + 1),
        ("kernelshap(cells=2)", 1 + 14 + 1),
    ],
)
def test_the_declared_cost(text: str, forwards: int) -> None:
    assert resolve_method(text).cost.forwards == forwards


@pytest.mark.parametrize(
    "text", ["kernelshap(samples=25)", "kernelshap(cells=3,samples=60)", "kernelshap(cells=2)", "lime(samples=9)"]
)
def test_what_is_declared_is_spent(text: str) -> None:
    explanation = cv.explain(wrapped("timm-vit"), pixels("timm-vit"), text, TARGET)
    assert explanation.cost.forwards == resolve_method(text).cost_for(16).forwards


# The peers (tests/parity/make_surrogates.py)


@functools.cache
def peers() -> dict[str, Tensor]:
    with np.load(FIXTURE) as file:
        return {name: torch.from_numpy(file[name]) for name in file.files}


def test_lime_fits_as_lime_does() -> None:
    """Its own solver on the same samples, with its own kernel: sqrt(exp(−D²/w²)) is ours at a width of w·sqrt(2)."""
    preset = dict(resolve_method("lime(preset=lime)").options)
    assert (preset["features"], preset["removal"]) == ("superpixels", "mean")
    kept = peers()["kept"].double()
    coefficients, _ = lime_fit(kept, peers()["said"][None], torch.eye(49).double(), preset["width"], preset["alpha"])
    assert_same(coefficients[0], peers()["lime fit"])
    ours, _ = lime_fit(kept, peers()["said"][None], torch.eye(49).double(), LIME_WIDTH, 1.0)
    assert not same(ours[0], peers()["lime fit"])  # METHODS.md's kernel falls off faster


def test_closeness_by_hand() -> None:
    seen = torch.tensor([[1.0, 1, 1, 1], [1, 0, 0, 0], [0, 0, 0, 0]], dtype=torch.float64)
    expected = [1.0, math.exp(-((0.5 / 0.25) ** 2)), math.exp(-((1 / 0.25) ** 2))]
    assert_same(lime_kernel(seen, 0.25), expected)


def test_kernelshap_agrees_with_shap_where_both_are_exact() -> None:
    explanation = cv.explain(
        pets(), "demo", "kernelshap", int(peers()["target"]), score="logit", removal="mean", cells=2
    )
    # Their scores are those of the model in float32: 12 blocks, heads of 64 channels.
    spec = {"dtype": torch.float32, "growth": growth(depth=12, width=64)}
    assert_same(explanation.maps[0, ::7, ::7].flatten(), peers()["shap exact"], **spec)


def assert_alike(values: Tensor, errors: Tensor, peer: str) -> None:
    """Differences are of the size that both sides' standard errors say."""
    z = (values - peers()[peer]) / (errors.square() + peers()[f"{peer} error"].square()).sqrt()
    assert z.abs().max() < 4
    assert 0.5 < z.square().mean() < 1.6
    assert torch.corrcoef(torch.stack([values, peers()[peer]]))[0, 1] > 0.8


@pytest.mark.parametrize("peer", ["lime", "captum lime"])
def test_lime_agrees_with_the_peers_within_chance(peer: str) -> None:
    """Our draw and fit on scores of the built-in model that were written beside the peers' values."""
    kept = torch.cat([torch.ones(1, 49, dtype=torch.bool), random_halves(999, 49, seed=1)])
    assert np.array_equal(np.packbits(kept.numpy()), peers()["halves"].numpy())  # else make the file again
    outputs, every = peers()["half scores"][None], torch.eye(49, dtype=torch.double)
    values, errors = lime_fit(kept.double(), outputs, every, LIME_WIDTH, 1.0)
    assert_alike(values[0], errors[0], peer)


@pytest.mark.parametrize("peer", ["shap", "captum kernelshap"])
def test_kernelshap_agrees_with_the_peers_within_chance(peer: str) -> None:
    """As above, with the number of samples that is the default."""
    drawn = shapley_coalitions(49, 49 + 1024, seed=1)
    assert np.array_equal(np.packbits(drawn.sets.numpy()), peers()["sets"].numpy())  # else make the file again
    outputs = (peers()["halved"][None], peers()["total"][None])
    values, errors, _ = shapley_fit(drawn, *outputs, torch.eye(49, dtype=torch.double))
    assert_same(values.sum(), peers()["total"].squeeze(), magnitude=float(values.abs().sum()))
    assert_alike(values[0], errors[0], peer)
