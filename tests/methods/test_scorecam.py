"""Score-CAM and ViT-CX have the numbers of pytorch-grad-cam and of both papers' authors (make_feature_masks.py).

And closed forms on linear models, cells that stand for whole masks, and every option does what it says.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import clairvit as cv
from clairvit.errors import BadInput, ClairWarning
from clairvit.methods import scorecam
from clairvit.methods.spec import resolve_method
from clairvit.perturbation.probe import Probe, probing
from clairvit.tracing.recorders.last_norm import LastNorm
from clairvit.tracing.trace import Trace
from helpers.rounding import DEFAULT_GROWTH, assert_same, growth, same
from helpers.tiny_models import double, fresh, wrapped
from helpers.tiny_models import pixels as tiny_pixels
from parity.peers_models import TARGETS, vit
from parity.small_cnn import CHANNELS, CONSTANT, DEAD, small_cnn

FIXTURE = Path(__file__).parent.parent / "fixtures" / "feature_masks.npz"
MODELS = {"vit": vit, "cnn": small_cnn}
pytestmark = pytest.mark.filterwarnings("ignore:.*its ReLU keeps what speaks for the target")


@functools.cache
def stored() -> dict[str, Tensor]:
    with np.load(FIXTURE) as arrays:
        return {name: torch.from_numpy(arrays[name]) for name in arrays.files}


@functools.cache
def ready(kind: str) -> tuple[cv.Model, Tensor]:
    module, images = MODELS[kind]()
    return cv.wrap(module, size=(int(images.shape[-2]), int(images.shape[-1]))), images


def ours(kind: str, name: str, **options: Any) -> Tensor:
    model, images = ready(kind)
    return cv.explain(model, images, name, target=TARGETS, **options).maps


def traced(kind: str, score: str = "logit") -> Trace:
    model, images = ready(kind)
    return cv.trace(model, images, target=TARGETS, score=score, recorders=(LastNorm,))


def probe_of(trace: Trace, removal: str = "mean") -> Probe:
    with probing(trace, removal, label="test", forwards=1) as probe:
        return probe


def agree(actual: Tensor, expected: Tensor, magnitude: float | None = None) -> None:
    """Assert equality up to rounding; what the peers' code gave is float32.

    It interpolates, scales and weighs masks, and adds them up over at most 24 channels: four reductions.
    """
    assert expected.flatten().std() > 0
    theirs = expected.dtype == torch.float32
    assert_same(actual, expected, magnitude=magnitude, growth=growth(4, 24) if theirs else DEFAULT_GROWTH)


# Score-CAM


@pytest.mark.parametrize("kind", MODELS)
def test_scorecam_is_that_of_pytorch_grad_cam(kind: str) -> None:
    trace = traced(kind)
    scores = scorecam.masked_scores(probe_of(trace), scorecam.feature_maps(trace), corners=True)
    agree(scores.softmax(1), stored()[f"{kind} weights"])
    agree(ours(kind, "scorecam(preset=jacobgil,relu=false)"), stored()[f"{kind} map"])
    agree(ours(kind, "scorecam(preset=jacobgil)"), stored()[f"{kind} map"].clamp(min=0))


def test_plain_weights_of_the_probability_are_the_authors_code() -> None:
    """It adds up maps on the image, clips them and scales each to 0…1 in the end."""
    actual = ours("cnn", "scorecam(weights=plain,relu=false)", score="prob")
    whole = scorecam.enlarge(actual, (24, 40)).clamp(min=0)
    low, high = whole.amin((1, 2), keepdim=True), whole.amax((1, 2), keepdim=True)
    agree((whole - low) / (high - low), stored()["cnn official"])


def test_plain_weights_are_the_scores_and_leave_out_what_is_the_same_everywhere() -> None:
    trace = traced("cnn")
    maps = scorecam.feature_maps(trace)
    scores = scorecam.masked_scores(probe_of(trace), maps, corners=False)
    rest = [k for k in range(CHANNELS) if k not in (DEAD, CONSTANT)]
    expected = torch.einsum("bk,bkrc->brc", scores[:, rest], maps[:, rest])
    agree(ours("cnn", "scorecam(weights=plain,relu=false)"), expected)


@torch.no_grad()
def scorecam_by_hand(
    module: nn.Module, image: Tensor, a: Tensor, target: int, under: Tensor, chosen: list[int]
) -> Tensor:
    """One mask after the other, with the paper's rise over a baseline image (here: the background alone)."""
    rise = []
    for k in chosen:
        whole = F.interpolate(a[None, None, k], size=image.shape[-2:], mode="bilinear", align_corners=False)[0, 0]
        mask = (whole - whole.min()) / (whole.max() - whole.min()) if a[k].std() > 0 else torch.zeros_like(whole)
        rise.append(module((image * mask + under * (1 - mask))[None])[0, target] - module(under[None])[0, target])
    weights = torch.stack(rise).exp() / torch.stack(rise).exp().sum()
    return sum(w * a[k] for w, k in zip(weights, chosen, strict=True))  # type: ignore[return-value]


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("removal", ["mean", "black", "gaussian-blur", "noise"])
def test_scorecam_by_hand_and_the_baseline_of_the_paper_cancels(kind: str, removal: str) -> None:
    (module, images), trace = MODELS[kind](), traced(kind)
    maps, background = scorecam.feature_maps(trace), probe_of(trace, removal).background
    every = [*range(maps.shape[1])]
    by_hand = [scorecam_by_hand(module, images[i], maps[i], TARGETS[i], background[i], every) for i in range(2)]
    agree(ours(kind, "scorecam(relu=false)", removal=removal), torch.stack(by_hand))


def test_feature_maps_are_the_patch_tokens_of_the_last_first_norm() -> None:
    module, images = vit()
    seen: list[Tensor] = []
    hook = module.blocks[-1].norm1.register_forward_hook(lambda m, i, o: seen.append(o))
    with torch.no_grad():
        module(images)
    hook.remove()
    expected = seen[0][:, 1:].reshape(2, 3, 5, 24).permute(0, 3, 1, 2)
    agree(scorecam.feature_maps(traced("vit")), expected)


def test_feature_maps_of_a_mean_pooled_model_are_those_that_it_averages() -> None:
    trace = cv.trace(wrapped("home-mean-pool"), tiny_pixels("home-mean-pool"), target=1, recorders=(LastNorm,))
    assert trace[LastNorm].tokens is None  # its final norm comes after the mean
    assert trace.final_tokens is not None
    assert torch.equal(scorecam.feature_maps(trace).permute(0, 2, 3, 1).flatten(1, 2), trace.final_tokens)  # a view
    assert not same(trace.final_tokens, trace.layers[-1].x)


def test_top_k_takes_the_channels_that_vary_most_and_weighs_no_other() -> None:
    (module, images), trace = vit(), traced("vit")
    maps = scorecam.feature_maps(trace)
    by_hand = []
    for i in range(2):
        most = sorted(range(24), key=lambda k: -float(maps[i, k].var()))[:5]
        by_hand.append(scorecam_by_hand(module, images[i], maps[i], TARGETS[i], torch.zeros_like(images[i]), most))
    agree(ours("vit", "scorecam(top_k=5,relu=false)"), torch.stack(by_hand))
    agree(ours("vit", "scorecam(top_k=99)"), ours("vit", "scorecam"))
    model, images = ready("vit")
    assert cv.explain(model, images, "scorecam(top_k=5)", target=TARGETS).cost.forwards == 6
    assert resolve_method("scorecam(top_k=5)").cost.forwards == 6
    assert cv.explain(model, images, "scorecam", target=TARGETS).cost.forwards == 25


def test_a_map_that_is_the_same_everywhere_masks_everything_and_makes_no_nan() -> None:
    trace = traced("cnn")
    maps = scorecam.feature_maps(trace)
    masks = scorecam.enlarged_masks(maps, (24, 40))
    assert (masks[:, DEAD] == 0).all()
    assert (masks[:, CONSTANT] == 0).all()
    rest = [k for k in range(CHANNELS) if k not in (DEAD, CONSTANT)]
    assert (masks[:, rest].amin((2, 3)) == 0).all()
    assert (masks[:, rest].amax((2, 3)) == 1).all()
    # In float32 a constant is not one after interpolation; that must not be blown up to a mask.
    assert (scorecam.enlarged_masks(torch.full((1, 3, 5), 0.3), (224, 224)) == 0).all()
    model, images = ready("cnn")
    assert cv.explain(model, images, "scorecam", target=TARGETS).maps.isfinite().all()


@pytest.mark.parametrize("removal", ["token", "road"])
def test_removals_that_cannot_be_half_there_are_refused(removal: str) -> None:
    with pytest.raises(BadInput, match=f"removal={removal} was given; expected 'mean' or 'black' or 'blur'"):
        ours("vit", "scorecam", removal=removal)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("scorecam(top_k=0)", "top_k=0 was given; expected 1 or more"),
        ("vit-cx(samples=0)", "samples=0 was given; expected 1 or more"),
        ("vit-cx(repeats=0)", "repeats=0 was given; expected 1 or more"),
        (
            "vit-cx(threshold=-0.1)",
            "threshold=-0.1 was given; expected 0 or more (a cosine distance), such as threshold=0.1",
        ),
        ("vit-cx(noise=-1)", "noise=-1 was given; expected 0 or more (a standard deviation), such as noise=0.1"),
    ],
)
def test_options_without_meaning_are_refused(name: str, message: str) -> None:
    with pytest.raises(BadInput, match=re.escape(message)):
        ours("vit", name)


# ViT-CX: the authors' code


def first_of(labels: Tensor) -> list[int]:
    """The first channel of each of their clusters, in the order of their labels."""
    return [labels.tolist().index(label) for label in range(int(labels.max()) + 1)]


@pytest.mark.parametrize("image", [0, 1])
def test_masks_and_clusters_of_vit_cx_are_the_authors(image: int) -> None:
    theirs = stored()
    labels, expected = theirs[f"vit-cx still labels {image}"], theirs[f"vit-cx still masks {image}"]
    cells, first = scorecam.merge_maps(scorecam.feature_maps(traced("vit"))[image], (12, 20), 0.1, None)
    assert len(first) == len(expected) < 24
    order = np.argsort(first_of(labels)).tolist()
    assert first == [first_of(labels)[place] for place in order]
    agree(scorecam.enlarged_masks(cells, (12, 20)), expected[order])
    each, _ = scorecam.merge_maps(
        scorecam.feature_maps(traced("vit"))[image], (12, 20), 0.0, None
    )  # every channel alone
    partition = scorecam.cluster(scorecam.cosine_distances(each, (12, 20)), 0.1, None)
    assert partition.tolist() == [order.index(label) for label in labels.tolist()]


@pytest.mark.parametrize("image", [0, 1])
@pytest.mark.parametrize("kind", ["still", "noise"])
def test_scores_of_vit_cx_are_the_authors(monkeypatch: pytest.MonkeyPatch, kind: str, image: int) -> None:
    monkeypatch.setattr(scorecam, "normal_noise", their_noise)
    theirs, trace = stored(), traced("vit", "prob")
    cells, first = scorecam.merge_maps(scorecam.feature_maps(trace)[image], (12, 20), 0.1, None)
    p = scorecam.causal_scores(probe_of(trace), image, cells, 0, first, 0.1 if kind == "noise" else 0.0, True)
    order = np.argsort(first_of(theirs[f"vit-cx {kind} labels {image}"])).tolist()
    agree(p[0], theirs[f"vit-cx {kind} p {image}"][order])


def their_noise(mark: int, channel: int, like: Tensor) -> Tensor:
    """As make_feature_masks.py draws it."""
    generator = torch.Generator().manual_seed(100 + channel)
    return torch.randn(like.shape[1:], generator=generator, dtype=torch.float64).to(like)


@pytest.mark.parametrize("kind", ["still", "noise"])
def test_vit_cx_is_the_authors(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(scorecam, "normal_noise", their_noise)
    actual = ours("vit", "vit-cx", level="pixel", **({} if kind == "noise" else {"noise": 0.0}))
    expected = torch.stack([stored()[f"vit-cx {kind} map {i}"] for i in range(2)])
    agree(actual, expected)
    # Their map is nearly flat; what is left after its mean is the same too.
    flat = (1, 2)
    level = float(expected.abs().max())
    agree(actual - actual.mean(flat, keepdim=True), expected - expected.mean(flat, keepdim=True), level)


# ViT-CX: clusters


def random_maps(count: int = 30, grid: tuple[int, int] = (4, 6), seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, *grid, generator=generator, dtype=torch.float64).cumsum(-1)


def test_distances_between_cells_are_those_between_whole_masks() -> None:
    size = (37, 50)  # no multiple of the grid
    maps = random_maps()
    whole = scorecam.enlarge(maps, size).flatten(1)
    expected = 1 - F.cosine_similarity(whole[:, None], whole[None], dim=-1)
    assert_same(scorecam.cosine_distances(maps, size), expected, magnitude=1)  # 1 minus a cosine


def test_cluster_masks_are_those_of_whole_masks_added_up() -> None:
    """The authors' order of things, at the size of the image: scale, measure, join, add up, scale."""
    from scipy.cluster.hierarchy import fcluster, linkage
    from scipy.spatial.distance import pdist

    size, maps = (37, 50), random_maps()
    whole = scorecam.enlarged_masks(maps, size)
    labels = fcluster(linkage(pdist(whole.flatten(1).numpy(), "cosine"), "complete"), 0.1, "distance")
    sums = {label: whole[labels == label].sum(0) for label in dict.fromkeys(labels.tolist())}  # by first member
    expected = torch.stack([(s - s.min()) / (s.max() - s.min()) for s in sums.values()])
    cells, first = scorecam.merge_maps(maps, size, 0.1, None)
    assert 3 < len(first) < 27
    assert first == [labels.tolist().index(label) for label in sums]
    assert_same(scorecam.enlarged_masks(cells, size), expected)


def test_every_channel_is_in_one_cluster_and_copies_share_theirs() -> None:
    a, b = random_maps(2)
    flat = torch.full_like(a, 2.0)
    cells, first = scorecam.merge_maps(torch.stack([flat, a, b, a, 3 * a + 2, -b]), (16, 24), 1e-6, None)
    assert first == [1, 2, 5]  # the flat one masks nothing and is left out; a, its copy and 3a + 2 are the same mask
    alone, _ = scorecam.merge_maps(a[None], (16, 24), 0.1, None)
    assert_same(cells[0], 3 * alone[0])
    for most in (None, 1, 4, 30):
        joined = scorecam.cluster(scorecam.cosine_distances(random_maps(), (16, 24)), 0.01, most)
        assert joined.shape == (30,)
        assert sorted(set(joined.tolist())) == [*range(joined.max() + 1)]
        assert most is None or joined.max() < most


def test_linkage_is_complete_and_the_threshold_itself_is_too_far() -> None:
    chain = np.array([[0, 0.08, 0.16], [0.08, 0, 0.09], [0.16, 0.09, 0]])
    assert scorecam.cluster(chain, 0.1, None).tolist() == [0, 0, 1]  # single linkage would take all three
    assert scorecam.cluster(chain, 0.16, None).tolist() == [0, 0, 1]
    assert scorecam.cluster(chain, 0.161, None).tolist() == [0, 0, 0]
    assert scorecam.cluster(chain, 0.0, None).tolist() == [0, 1, 2]
    assert scorecam.cluster(chain, 0.0, 2).tolist() == [0, 0, 1]
    assert scorecam.cluster(chain[:1, :1], 0.1, None).tolist() == [0]


def test_samples_bound_the_masks() -> None:
    model, images = ready("vit")
    usual = cv.explain(model, images, "vit-cx", target=TARGETS)
    assert usual.cost.forwards == 1 + 14 + 13  # of two images, with and without their mask
    few = cv.explain(model, images, "vit-cx(samples=4)", target=TARGETS)
    assert few.cost.forwards == 1 + 2 * 4 == resolve_method("vit-cx(samples=4)").cost.forwards
    assert not same(few.maps, usual.maps)
    agree(cv.explain(model, images, "vit-cx(samples=24)", target=TARGETS).maps, usual.maps)


# ViT-CX: scores


def linear_network() -> tuple[cv.Model, Tensor]:
    """Without a bias or an activation, so that f(x + y) = f(x) + f(y)."""
    generator = torch.Generator().manual_seed(5)
    module = nn.Sequential(
        nn.Conv2d(3, 6, 4, 4, bias=False), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 5, bias=False)
    ).double()
    for p in module.parameters():
        p.data = torch.randn(p.shape, generator=generator, dtype=torch.float64)
    image = torch.randn(2, 3, 16, 24, generator=generator, dtype=torch.float64)
    return cv.wrap(module.eval(), size=(16, 24)), image


def test_on_a_linear_model_the_causal_score_is_that_of_the_masked_image() -> None:
    """f(xM + Z(1−M)) − f(x + Z(1−M)) + f(x) = f(xM): the noise goes, whatever it is; without `causal` it stays."""
    model, images = linear_network()
    a = model.module[0](images).detach()
    expected = []
    for i, target in enumerate(TARGETS):
        seen = scorecam.enlarged_masks(scorecam.merge_maps(a[i], (16, 24), 0.1, None)[0], (16, 24))  # [n, H, W]
        per_pixel = F.conv_transpose2d(
            model.module[3].weight[target].detach()[None, :, None, None].expand(1, -1, 4, 6) / 24,
            model.module[0].weight.detach(),
            stride=4,
        )[0]  # df/dpixel
        p = (per_pixel * images[i] * seen[:, None]).sum((1, 2, 3))
        expected.append((p[:, None, None] * seen / seen.sum(0)).sum(0) / len(seen))
    options = {"target": TARGETS, "score": "logit", "level": "pixel"}
    for seed in (0, 1):
        maps = cv.explain(model, images, "vit-cx", seed=seed, **options).maps
        agree(maps, torch.stack(expected))
    plain = [cv.explain(model, images, "vit-cx(causal=false)", seed=seed, **options).maps for seed in (0, 1)]
    assert not same(*plain)
    still = cv.explain(model, images, "vit-cx(causal=false,noise=0)", **options).maps
    agree(still, torch.stack(expected))


def test_without_noise_the_causal_term_is_nothing_and_costs_nothing() -> None:
    model, images = ready("vit")
    still, plain = (
        cv.explain(model, images, f"vit-cx(noise=0,causal={causal})", target=TARGETS) for causal in ("true", "false")
    )
    agree(still.maps, plain.maps)
    assert still.cost.forwards == plain.cost.forwards == 1 + 14  # of 14 and 13 masks, rounded up


def test_equal_scores_make_a_constant_map_where_any_mask_shows() -> None:
    cells = scorecam.merge_maps(random_maps(), (16, 24), 0.1, None)[0]
    p = torch.full((1, len(cells)), 0.7, dtype=torch.float64)
    masks = scorecam.weighted_masks(p, cells, (16, 24), coverage=True)
    assert_same(masks, torch.full_like(masks, 0.7 / len(cells)))
    seen = scorecam.enlarged_masks(cells, (16, 24))
    without = scorecam.weighted_masks(p, cells, (16, 24), coverage=False)[0]
    assert_same(without, 0.7 * seen.mean(0))
    alone = scorecam.weighted_masks(p[:, :1], cells[:1], (16, 24), coverage=True)[0]
    assert 0 < int((seen[0] == 0).sum()) < 10  # the darkest pixels of the only mask
    assert (alone[seen[0] == 0] == 0).all()
    assert_same(alone[seen[0] > 0], torch.full_like(alone[seen[0] > 0], 0.7))


def test_more_masks_than_are_laid_out_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = ours("vit", "vit-cx")
    monkeypatch.setattr(scorecam, "CHANNELS_AT_ONCE", 5)
    agree(ours("vit", "vit-cx"), whole)


def test_patches_are_means_of_pixels() -> None:
    cells = ours("vit", "vit-cx", level="pixel").reshape(2, 3, 4, 5, 4).mean((2, 4))
    agree(ours("vit", "vit-cx"), cells)


# Chance


@pytest.mark.parametrize("name", ["scorecam(relu=false)", "vit-cx", "vit-cx(repeats=3)"])
def test_the_batch_size_changes_nothing(name: str) -> None:
    whole = ours("vit", name)
    for size in (1, 7, 64):
        agree(ours("vit", name, batch_size=size), whole)


def test_each_image_has_its_own_noise_in_any_company() -> None:
    model, images = ready("vit")
    together = cv.explain(model, images, "vit-cx", target=TARGETS, seed=3).maps
    for i in (1, 0):
        alone = cv.explain(model, images[i], "vit-cx", target=TARGETS[i], seed=3).maps
        agree(together[i : i + 1], alone)
    other = cv.explain(model, images, "vit-cx", target=TARGETS, seed=4).maps
    assert not same(other, together)


def test_the_standard_error_is_the_spread_over_draws() -> None:
    model, images = ready("vit")

    def run(repeats: int, seed: int) -> cv.Explanation:
        return cv.explain(model, images, f"vit-cx(repeats={repeats})", target=TARGETS, seed=seed)

    assert run(1, 0).standard_error is None
    many = [run(4, seed) for seed in range(20)]
    assert many[0].cost.forwards == 1 + 4 * (14 + 13)
    errors = torch.stack([explanation.standard_error for explanation in many if explanation.standard_error is not None])
    assert errors.shape == (20, 2, 3, 5)
    spread = torch.stack([explanation.maps for explanation in many]).std(0)
    ratio = errors.square().mean(0).sqrt() / spread
    assert 0.75 < ratio.mean() < 1.3
    exact = torch.stack([run(1, seed).maps for seed in range(40, 80)]).mean(0)
    assert (torch.stack([explanation.maps for explanation in many]).mean(0) - exact).abs().max() < 5 * spread.max() / 4


def test_no_noise_has_no_standard_error() -> None:
    model, images = ready("vit")
    explanation = cv.explain(model, images, "vit-cx(noise=0,repeats=5)", target=TARGETS)
    assert explanation.standard_error is None
    assert explanation.cost.forwards == 15


# Other models and targets


def test_a_function_of_the_scores_is_a_target_too() -> None:
    """It is called with the scores of all images, those in question changed."""
    model, images = ready("vit")
    for name in ("vit-cx", "scorecam(relu=false)"):
        by_class = cv.explain(model, images, name, target=3, score="logit").maps
        by_function = cv.explain(model, images, name, target=lambda scores: scores[:, 3]).maps
        agree(by_function, by_class)


@pytest.mark.parametrize("name", ["scorecam", "vit-cx"])
def test_feature_maps_of_any_model(name: str) -> None:
    """Mean pooling, a tower without classes, and a CNN: batches do not mix."""
    for kind in ("timm-vit-avg", "open_clip-nonsquare"):
        model, images = double(kind)
        together = cv.explain(model, images, name, target=2).maps
        alone = cv.explain(model, images[1], name, target=2).maps
        assert_same(together[1], alone[0])
    model, images = ready("cnn")
    together = cv.explain(model, images, name, target=TARGETS).maps
    alone = cv.explain(model, images[1], name, target=TARGETS[1]).maps
    assert_same(together[1], alone[0])
    assert together.shape == (2, *((6, 10) if name == "scorecam" else (24, 40)))  # a CNN has no patches


@pytest.mark.parametrize("name", ["scorecam", "vit-cx"])
def test_single_precision_is_rounded_double_precision(name: str) -> None:
    module, images = small_cnn()
    single = cv.explain(cv.wrap(module.float(), size=(24, 40)), images.float(), name, target=TARGETS).maps
    # Two convolutions of up to 3 · 3 · 8 terms, pooling, head, softmax, and the masks' interpolation, scaling and sum.
    assert_same(single, ours("cnn", name), growth=growth(depth=8, width=72))


def test_features_that_are_the_same_everywhere_leave_nothing_to_say() -> None:
    module, images = small_cnn()
    with torch.no_grad():
        module[2].weight.zero_()
    model = cv.wrap(module, size=(24, 40))
    with pytest.warns(ClairWarning, match="vit-cx: the map of image 1, image 2 is zero everywhere"):
        explanation = cv.explain(model, images, "vit-cx", target=TARGETS)
    assert any("there is no mask" in note for note in explanation.notes)
    assert not explanation.maps.any()
    assert explanation.cost.forwards == 1


@pytest.mark.parametrize("name", ["scorecam", "vit-cx"])
def test_a_head_of_zeros_is_a_warning(name: str) -> None:
    model = fresh("timm-vit")
    for part in (model.module.head.weight, model.module.head.bias):
        nn.init.zeros_(part)
    with pytest.warns(ClairWarning, match="the score stays the same whatever is removed"):
        cv.explain(model, tiny_pixels("timm-vit"), name, target=1)


def test_the_probe_keeps_apart_what_it_saw_of_each_image() -> None:
    """Also when images are scored one by one: an image that was not scored is not reported as unmoved."""
    module, images = vit()
    nn.init.zeros_(module.head.weight)
    deaf = probe_of(cv.trace(cv.wrap(module, size=(12, 20)), images, target=TARGETS))
    deaf.score_images(2, lambda ks: torch.stack([images[1] * k for k in ks])[None], images=[1])
    assert deaf.unmoved() == [False, True]
    deaf.score_images(1, lambda ks: 2 * images[:1, None], images=[0])
    assert deaf.unmoved() == [True, True]
    listening = probe_of(traced("vit"))
    listening.score_images(1, lambda ks: 2 * images[1:, None], images=[1])
    assert listening.unmoved() == [False, False]  # one score, and it is not that of the image as it is
