"""`ex.check()`: exact numbers on models that are linear in their patches, verdicts, answers, what is read."""

from __future__ import annotations

import copy
import json
import math
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torchvision
from PIL import Image, ImageDraw
from scipy import stats
from torch import Tensor, nn

import clairvit as cv
from clairvit.methods.runs import CHUNK_SIZE
from clairvit.metrics.answer_check import (
    AnswerFacts,
    Reference,
    check_answer,
    looks_untrained,
    near_guessing,
    photo_reasons,
)
from clairvit.metrics.check import (
    PASSES,
    Design,
    _ties_at_the_cut,
    _too_few_sets,
    log_odds,
    quantity_of,
    removal_effects,
    rival_of,
)
from clairvit.metrics.check_result import (
    CHANCE,
    LARGEST_EFFECT,
    PREDICTS,
    SPECIFIC,
    SUPPORTED,
    YARDSTICK,
    AnswerCheck,
    CheckResult,
    RemovalEffect,
    judge,
)
from clairvit.metrics.removal_prediction import correlation, edge_map, freed, middle_maps, partial_correlation
from clairvit.perturbation.probe import probing
from clairvit.perturbation.random_sets import contrasts, keep_sets
from clairvit.targets.base import TargetBatch
from clairvit.tracing.outlier_tokens import OUTLIER_RATIO, norm_ratios
from helpers.linear_patch_model import effects, linear
from helpers.module_fingerprint import unchanged
from helpers.tiny_models import build, double, pixels

pytestmark = pytest.mark.filterwarnings("ignore::clairvit.errors.ClairWarning")
GRID = (10, 10)
PATCHES = 100


def smooth_image(seed: int) -> Tensor:
    """An image [1, 3, 80, 80] whose neighbouring pixels are alike, as those of a photo, in float64."""
    noise = torch.randn(1, 3, 11, 11, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64)
    smooth: Tensor = nn.functional.interpolate(1 + 0.3 * noise, (80, 80), mode="bilinear", align_corners=True)
    return smooth


def linear_raw(seed: int = 0) -> tuple[cv.Model, Tensor]:
    """A linear model whose outputs are raw scores, and its image."""
    model, _ = linear(GRID, 4, seed=seed)
    return replace(model, activation="raw"), smooth_image(seed)[..., ::2, ::2]


def linear_softmax(seed: int = 0) -> tuple[cv.Model, Tensor]:
    return linear(GRID, 4, seed=seed)[0], smooth_image(seed)[..., ::2, ::2]


def check_one(model: cv.Model, image: Tensor, values: Tensor, **arguments: Any) -> cv.results.MapCheck:
    return cv.check_maps(model, image, values[None], **arguments)[0]


@pytest.fixture(scope="module")
def vit() -> cv.Model:
    return cv.wrap(build("timm-vit").double())


def photos(count: int = 2) -> Tensor:
    return pixels("timm-vit", batch=count).double()


# What a map predicts


def test_true_weights_of_an_additive_model_predict_all_and_their_negative_the_opposite() -> None:
    model, image = linear_raw()
    by_patch = effects(model, image, 1)
    check = check_one(model, image, by_patch, target=1)
    assert check.prediction == pytest.approx(1, abs=1e-9)
    assert check.partial == pytest.approx(1, abs=1e-9)
    assert check.share == pytest.approx(1, abs=1e-9)
    opposite = check_one(model, image, -3 * by_patch, target=1)
    assert opposite.prediction == pytest.approx(-1, abs=1e-9)
    assert opposite.share == 0


def test_correlations_are_those_of_numpy_on_the_sets_that_refine_spends() -> None:
    """Kept sets, contrasts, least squares and cosines by hand, with the scores of the linear model by hand."""
    model, image = linear_raw()
    by_patch, values = effects(model, image, 2).numpy(), np.random.default_rng(0).normal(size=GRID)
    check = check_one(model, image, torch.from_numpy(values), target=2, seed=3)
    sets = keep_sets(PATCHES, PASSES, 3).numpy().astype(float)
    mixing = contrasts(PASSES).numpy()
    v, p = mixing @ sets @ by_patch.ravel(), mixing @ sets @ values.ravel()
    places = (np.arange(10) + 0.5) / 10 - 0.5
    square = (places[:, None] ** 2 + places**2).ravel()
    edges = edge_map(image, GRID)[0].numpy()
    controls = mixing @ sets @ np.stack([np.sqrt(square), square, np.exp(-square / 0.125), edges], 1)
    left = [x - controls @ np.linalg.lstsq(controls, x, rcond=None)[0] for x in (p, v)]

    def cosine(a: Any, b: Any) -> float:
        return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))

    assert check.prediction == pytest.approx(cosine(p, v), abs=1e-9)
    assert check.partial == pytest.approx(cosine(*left), abs=1e-9)


def test_maps_of_the_middle_and_of_edges_have_no_partial_correlation() -> None:
    model, image = linear_raw()
    places = (torch.arange(10.0, dtype=torch.float64) + 0.5) / 10 - 0.5
    square = places[:, None] ** 2 + places**2
    edges = edge_map(image, GRID).reshape(GRID)
    center = cv.explain(model, image, "center").maps[0]
    for values in (edges, center, -square, -square.sqrt(), 2 * edges - square):
        check = check_one(model, image, values, target=0)
        assert check.partial == 0
        assert check.verdict == "not better than chance"
    assert freed(torch.ones(3, dtype=torch.float64), torch.eye(3, dtype=torch.float64)).tolist() == [0, 0, 0]


def test_edges_are_sobels_in_each_frame() -> None:
    """A ramp across has the gradient 8 times its slope inside, in every frame; a constant image none."""
    ramp = torch.arange(8.0, dtype=torch.float64).expand(1, 3, 2, 8, 8)
    edges = edge_map(ramp, (2, 4, 4)).reshape(2, 4, 4)
    assert edges[:, :, 1:3].flatten().tolist() == [8.0] * 16
    assert edges[:, :, 0].flatten().tolist() == [6.0] * 8  # at the border the slope is halved
    assert not edge_map(torch.ones(1, 3, 8, 8), (4, 4)).any()


def test_middle_maps_are_distance_square_and_bell() -> None:
    distances, squares, bells = middle_maps((2, 1, 2)).T
    assert distances.tolist() == [0.25] * 4
    assert squares.tolist() == [0.0625] * 4
    assert bells.tolist() == pytest.approx([math.exp(-0.5)] * 4)


def test_correlations_of_nothing_are_zero() -> None:
    zeros, values = torch.zeros(5, dtype=torch.float64), torch.arange(5.0, dtype=torch.float64)
    assert correlation(zeros, values) == correlation(values, zeros) == 0
    assert partial_correlation(values, values, values[:, None]) == 0


def test_maps_that_say_nothing_predict_as_often_as_students_t_has_it() -> None:
    """n contrasts freed of k controls have m = n − k dimensions; r √(m − 1) / √(1 − r²) is t of m − 1 degrees."""
    generator = torch.Generator().manual_seed(0)
    design = Design.of(PATCHES, PASSES, 0)
    edges = torch.rand(PATCHES, 1, generator=generator, dtype=torch.float64)
    controls = design.equations @ torch.cat([middle_maps(GRID), edges], 1)
    predicted = design.equations @ torch.randn(PATCHES, generator=generator, dtype=torch.float64)
    noise = torch.randn(2000, len(design.mixing), generator=generator, dtype=torch.float64)
    partials = [partial_correlation(predicted, values, controls) for values in noise]
    freedom = len(design.mixing) - 4 - 1
    limit = PREDICTS * math.sqrt(freedom / (1 - PREDICTS**2))
    expected = float(stats.t.sf(limit, freedom))
    counted = np.mean([partial >= PREDICTS for partial in partials])
    assert abs(counted - expected) < 4 * math.sqrt(expected * (1 - expected) / 2000)


def test_removals_hide_as_many_patches_as_some_random_sets() -> None:
    """f(kept S) = Σ_{p in S} effect_p: the values without the marked patches and with a block of sets, by hand."""
    model, image = linear_raw()
    by_patch = effects(model, image, 1)
    check = check_one(model, image, by_patch, target=1, seed=3)
    flat = by_patch.flatten()
    ordered, total = flat.sort(descending=True), float(flat.sum())
    tolerance = 100 * PATCHES * np.finfo(np.float64).eps * float(flat.abs().sum())
    sets = keep_sets(PATCHES, PASSES, 3)
    assert check.full == pytest.approx(total, abs=tolerance)
    assert [removal.patches for removal in check.removals] == [18, 31]
    for removal in check.removals:
        assert removal.fraction == removal.patches / PATCHES
        block = [float(flat[kept].sum()) for kept in sets if int((~kept).sum()) == removal.patches]
        assert len(block) == 8
        assert removal.top == pytest.approx(float(ordered.values[removal.patches :].sum()), abs=tolerance)
        assert removal.random == pytest.approx(block, abs=tolerance)
        assert removal.random_mean == pytest.approx(np.mean(block), abs=tolerance)
        assert removal.random_spread == pytest.approx(np.std(block, ddof=1), abs=tolerance)
    assert list(check.brightest) == ordered.indices[:31].tolist()
    assert len(check.marked) == 18


@pytest.mark.parametrize(("patches", "hidden"), [(1, ()), (2, (1,)), (4, (1,)), (16, (3, 5)), (196, (36, 61))])
def test_design_of_any_number_of_patches(patches: int, hidden: tuple[int, ...]) -> None:
    design = Design.of(patches, PASSES, 0)
    assert design.hidden == hidden
    assert torch.equal(design.keep, keep_sets(patches, PASSES, 0))
    assert all(len(design.sets_hiding(count)) >= 8 for count in hidden)
    fewer = Design.of(196, 32, 0)
    assert torch.equal(fewer.keep, keep_sets(196, 32, 0))
    assert fewer.hidden == (36,)


def test_a_refined_map_is_tested_on_sets_that_it_was_not_fitted_to(vit: cv.Model) -> None:
    after = Design.of(16, 64, 0, spent=20)
    assert torch.equal(after.keep, keep_sets(16, 88, 0)[24:])
    same = cv.explain(vit, photos(1), "genatt", target=3)
    as_refined = replace(same, method="refine(genatt,passes=20)").check()[0]
    p = [float(score) for score in scores_of_sets(vit, after.keep)]
    for removal in as_refined.removals:
        assert removal.random == pytest.approx([p[k] for k in after.sets_hiding(removal.patches)], rel=1e-9)


def scores_of_sets(model: cv.Model, keep: Tensor) -> Tensor:
    """The probability of class 3 with only the patches of each set kept."""
    with probing(cv.trace(model, photos(1), target=3), "token", label="test", forwards=len(keep)) as probe:
        scores: Tensor = probe.score_kept(keep[None], lambda logits, _: logits.double().softmax(1)[:, 3])
    return scores[0]


def test_the_difference_to_the_runner_up_says_what_is_specific() -> None:
    """The map of a class's own effects has the prediction 1; that of effect − runner-up's effect is specific to it."""
    model, image = linear_softmax()
    with torch.no_grad():
        logits = model.logits(image)[0]
    target, rival = (int(index) for index in logits.topk(2).indices)
    of_target, of_rival = effects(model, image, target), effects(model, image, rival)
    check = check_one(model, image, of_target - of_rival, target=target)
    assert check.rival == f"class {rival}"
    assert check.specific == pytest.approx(1, abs=1e-9)
    assert check_one(model, image, of_rival - of_target, target=target).specific == pytest.approx(-1, abs=1e-9)
    shared = check_one(replace(model, activation="sigmoid"), image, of_target, target=target)
    assert shared.specific is None, "several classes may be true at once"


def test_the_runner_up_is_the_best_other_class() -> None:
    target = TargetBatch(("cat",), (2,), "logit", (((2, 1.0),),))
    assert rival_of(target, 0, torch.tensor([0.0, 1.0, 3.0])) == 1
    assert rival_of(target, 0, torch.tensor([4.0, 1.0, 3.0])) == 0
    assert rival_of(replace(target, activation="raw"), 0, torch.tensor([4.0, 1.0, 3.0])) is None
    assert rival_of(replace(target, classes=(None,)), 0, torch.tensor([4.0, 1.0, 3.0])) is None


def test_log_odds_are_exact_where_the_probability_is_one_in_float() -> None:
    logits = torch.tensor([[60.0, 0.0, 1.0], [0.5, 0.25, 0.0]], dtype=torch.float64)
    expected = [60 - math.log(1 + math.e), 0.5 - math.log(math.exp(0.25) + 1)]
    assert log_odds(logits, 0, "softmax").tolist() == pytest.approx(expected, rel=1e-14)
    assert log_odds(logits, 1, "sigmoid").tolist() == [0.0, 0.25]
    p = logits.softmax(1)[1, 0]
    assert float(log_odds(logits, 0, "softmax")[1]) == pytest.approx(float((p / (1 - p)).log()), rel=1e-12)


def test_probability_of_a_class_is_what_is_shown() -> None:
    model, image = linear_softmax()
    check = check_one(model, image, effects(model, image, 2), target=2)
    with torch.no_grad():
        p = float(model.logits(image).softmax(1)[0, 2])
    assert check.quantity == "probability"
    assert check.full == pytest.approx(p, rel=1e-12)
    assert all(0 <= value <= 1 for removal in check.removals for value in (removal.top, *removal.random))


# Verdicts


def test_effect_is_students_t_with_one_spread_for_all_fractions() -> None:
    """σ² = mean_f s_f² / (f (1 − f)); e_f = (mean r_f − t_f) / (σ √(f (1 − f)) √(1 + 1/K)), in numpy."""
    top, random, fractions = np.array([1.0, -2.0]), np.array([[3.0, 4.0, 5.5], [2.0, 0.0, 1.0]]), np.array([0.1, 0.3])
    share = fractions * (1 - fractions)
    sigma = np.sqrt(np.mean(random.var(1, ddof=1) / share))
    expected = (random.mean(1) - top) / (sigma * np.sqrt(share) * np.sqrt(1 + 1 / 3))
    computed = removal_effects(torch.tensor(top), list(torch.tensor(random)), fractions.tolist(), 0.0)
    assert computed == pytest.approx(expected.tolist(), rel=1e-12)


def test_effects_of_equal_draws_are_bounded_and_those_of_no_gap_are_zero() -> None:
    equal = list(torch.ones(2, 3))
    assert removal_effects(torch.tensor([0.0, 1.0]), equal, [0.1, 0.3], 1e-9) == [LARGEST_EFFECT, 0.0]
    assert removal_effects(torch.tensor([2.0, 1.0]), equal, [0.1, 0.3], 1e-9) == [-LARGEST_EFFECT, 0.0]
    assert removal_effects(torch.tensor([]), [], [], 0.0) == []


@pytest.mark.parametrize(
    ("effect", "partial", "yardstick", "is_clear", "expected"),
    [
        (SUPPORTED, PREDICTS, None, True, "supported"),
        (SUPPORTED, PREDICTS, PREDICTS / YARDSTICK, True, "supported"),
        (SUPPORTED, PREDICTS, PREDICTS / YARDSTICK + 0.01, True, "weak"),
        (SUPPORTED, PREDICTS, None, False, "weak"),
        (SUPPORTED - 0.01, 1.0, None, True, "weak"),
        (SUPPORTED, PREDICTS - 0.01, None, True, "not better than chance"),
        (CHANCE, PREDICTS, 1.0, False, "weak"),
        (CHANCE - 0.01, 1.0, None, True, "not better than chance"),
        (LARGEST_EFFECT, 0.0, None, True, "not better than chance"),
        (LARGEST_EFFECT, -1.0, -1.0, True, "not better than chance"),
        (math.nan, 1.0, None, True, "not better than chance"),
    ],
)
def test_verdict_follows_the_thresholds(
    effect: float, partial: float, yardstick: float | None, is_clear: bool, expected: str
) -> None:
    assert judge(effect, partial, yardstick, is_clear) == expected


@pytest.mark.parametrize("make", [linear_raw, linear_softmax])
def test_map_of_the_true_effects_is_supported_and_its_negative_is_not(make: Callable[..., Any]) -> None:
    model, image = make()
    with torch.no_grad():
        target = int(model.logits(image)[0].argmax())
    by_patch = effects(model, image, target)
    check = check_one(model, image, by_patch, target=target)
    assert check.verdict == "supported"
    assert check_one(model, image, -by_patch, target=target).verdict == "not better than chance"


def test_shuffled_maps_of_a_planted_model_are_not_supported_and_share_their_passes() -> None:
    model, image = linear_raw()
    flat = effects(model, image, 0).flatten()
    orders = [torch.randperm(PATCHES, generator=torch.Generator().manual_seed(k)) for k in range(20)]
    maps = torch.stack([flat[order].reshape(GRID) for order in orders])
    result = cv.check_maps(model, image.expand(20, -1, -1, -1), maps, target=0)
    assert len(result) == 20
    assert result.verdicts.count("not better than chance") >= 15
    assert "supported" not in result.verdicts
    alone = check_one(model, image, maps[7], target=0)
    assert result[7].removals[1].top == pytest.approx(alone.removals[1].top, rel=1e-12)
    assert result[7].partial == pytest.approx(alone.partial, abs=1e-9)
    assert result.cost.forwards < PASSES / 4, "the sets are shared"


def test_constant_map_is_not_better_than_chance_and_says_why() -> None:
    model, image = linear_raw()
    check = check_one(model, image, torch.full(GRID, 0.1) + 1e-9, target=0)
    assert check.verdict == "not better than chance"
    assert check.prediction == check.partial == 0
    assert any("the same everywhere" in remark for remark in check.remarks)


def test_score_that_nothing_changes_has_nothing_to_explain() -> None:
    model, image = linear_raw()
    module = copy.deepcopy(model.module)
    nn.init.zeros_(module.weights)  # type: ignore[arg-type]
    check = check_one(replace(model, module=module), image, torch.arange(100.0).reshape(GRID), target=0)
    assert check.verdict is None
    assert check.answer.reasons == ("The score is the same whatever is hidden.",)


def test_image_of_a_batch_that_cannot_be_checked_leaves_the_others_alone() -> None:
    model, image = linear_raw()
    by_patch = effects(model, image, 0)
    broken = by_patch.clone()
    broken[0, 0] = math.nan
    result = cv.check_maps(model, image.expand(3, -1, -1, -1), torch.stack([by_patch, broken, by_patch]), target=0)
    assert result.verdicts == ("supported", None, "supported")
    assert "cannot be checked" in result[1].sentence
    assert "NaN" in result[1].sentence
    assert result[1].badge_style == "unknown"
    alone = check_one(model, image, by_patch, target=0)
    for check in (result[0], result[2]):
        values = [(removal.top, *removal.random) for removal in check.removals]
        for value, removal in zip(values, alone.removals, strict=True):
            assert value == pytest.approx((removal.top, *removal.random), rel=1e-9)
    assert json.loads(json.dumps(result.to_dict()))["checks"][1]["verdict"] is None


def test_a_score_that_is_nan_where_parts_are_hidden_cannot_be_checked() -> None:
    model, image = linear_raw()
    with torch.no_grad():
        full = model.logits(image)[:, 0]

    def broken(scores: Tensor) -> Tensor:
        return torch.where((scores[:, 0] - full).abs() < 1e-9, scores[:, 0], torch.nan)

    check = check_one(model, image, effects(model, image, 0), target=broken)
    assert check.verdict is None
    assert "NaN or infinite" in check.sentence


# The words for a reader

BASE = cv.results.MapCheck(
    name="a",
    target="cat",
    method="genatt",
    quantity="probability",
    full=0.831,
    removals=(
        RemovalEffect(0.18, 36, 0.121, (0.6, 0.61, 0.62), 9.0),
        RemovalEffect(0.31, 61, 0.05, (0.7, 0.71, 0.72), 9.0),
    ),
    prediction=0.557,
    partial=0.5,
    yardstick=0.5,
    specific=0.5,
    rival="dog",
    stability=0.9,
    agreement={},
    outliers=0,
    outlier_share=0.0,
    verdict="supported",
)


def test_sentence_of_a_probability_is_in_per_cent() -> None:
    assert BASE.sentence == (
        "Hiding the 18 % of the photo that the map marks most costs 3 × as much as hiding as many random parts: the "
        "model's confidence in cat falls from 83 % to 12 %; with random parts hidden it is 61 %. The map is supported: "
        "it predicts 31 % of what hiding parts does. It is specific to cat."
    )


@pytest.mark.parametrize(
    ("top", "random", "words"),
    [
        (0.431, 0.731, "costs 4 × as much as"),
        (0.431, 0.571, "costs 1.5 × as much as"),
        (0.431, 0.441, "costs hardly more than"),
        (0.431, 0.840, "costs far more than"),
        (0.431, 0.831, "costs far more than"),
        (0.830, 0.831, "costs hardly more than"),
        (0.831, 0.831, "costs no more than"),
        (0.900, 0.850, "costs no more than"),
        (0.500, 0.400, "costs no more than"),
        (0.900, 0.950, "costs no more than"),
    ],
)
def test_costs_are_compared_in_words(top: float, random: float, words: str) -> None:
    (removal, _) = BASE.removals
    check = replace(BASE, removals=(replace(removal, top=top, random=(random,)),), verdict="weak")
    assert words in check.sentence


def test_the_smallest_removal_that_a_person_sees_is_shown() -> None:
    small, large = BASE.removals
    assert BASE.shown is small
    assert replace(BASE, removals=(replace(small, top=0.59), large)).shown is large
    hardly = replace(small, top=0.59), replace(large, top=0.70)
    assert replace(BASE, removals=hardly).shown is hardly[0]
    score = replace(BASE, quantity="score", removals=(replace(small, effect=SUPPORTED - 0.1), large))
    assert score.shown is large
    assert "the model's score for cat falls from 0.83 to 0.05; with random parts hidden it is 0.71" in score.sentence
    assert "the similarity to b.jpg falls from 0.83" in replace(score, target="similar to b.jpg").sentence


def test_specificity_needs_maps_that_are_supported_at_least_weakly() -> None:
    other = replace(BASE, specific=SPECIFIC - 0.01)
    assert "It is not shown to be specific to cat rather than dog." in other.sentence
    assert replace(other, verdict="not better than chance").is_specific is None
    assert "specific" not in replace(BASE, specific=None, rival=None).sentence
    assert "specific" not in replace(BASE, verdict="not better than chance").sentence


GRID_OF_CHECKS = [
    (effect, partial, yardstick, specific, top, status)
    for effect in (0.0, 2.0, 9.0)
    for partial in (-0.2, 0.05, 0.4)
    for yardstick in (0.2, 0.9)
    for specific in (0.0, 0.6)
    for top in (0.9, 0.80, 0.3)
    for status in ("no objection", "take care", "nothing to explain")
]


def test_no_two_places_contradict_each_other() -> None:
    """Verdict, badge, its colour, sentence, picture, terminal, JSON and table, for a grid of what can be measured."""
    for effect, partial, yardstick, specific, top, status in GRID_OF_CHECKS:
        removals = (RemovalEffect(0.18, 36, top, (0.8, 0.81, 0.82), effect),)
        nothing = status == "nothing to explain"
        clear = removals[0].is_clear("probability")
        verdict = None if nothing else judge(effect, partial, yardstick, clear)
        answer = AnswerCheck(status, () if status == "no objection" else ("A reason.",))  # type: ignore[arg-type]
        check = replace(
            BASE,
            removals=removals,
            partial=partial,
            yardstick=yardstick,
            specific=specific,
            verdict=verdict,
            answer=answer,
        )
        texts = [str(check), check._repr_html_(), check.sentence + check.badge, json.dumps(check.to_dict())]
        texts += [str(CheckResult((check,))), str(CheckResult((check,))._table()[0])]
        supported = verdict == "supported"
        assert ("The map is supported" in check.sentence) == supported
        assert (check.badge.startswith("Map supported")) == supported
        assert (check.badge_style == "supported") == (supported and status == "no objection")
        assert not supported or clear, "never supported without an effect that a person sees"
        assert not supported or "no more than" not in check.sentence
        if nothing:
            assert all("supported" not in text for text in texts[:3])
            assert check.badge == "Nothing here to explain"
            assert check.badge_style == "unknown"
        if verdict == "not better than chance":
            assert all("supported" not in text for text in texts[:3])
            assert "not better than chance" in check.sentence
            assert check.is_specific is None
        assert all("A reason." in text for text in (str(check), texts[1])) == (status != "no objection")


def test_raw_scores_are_never_per_cent_of_confidence() -> None:
    model, image = linear_raw()
    check = check_one(model, image, effects(model, image, 1), target=1)
    assert check.quantity == "score"
    assert "confidence" not in str(check)
    assert f"from {check.full:.2f} to {check.shown.top:.2f}" in check.sentence  # type: ignore[union-attr]


def test_quantity_of_targets() -> None:
    row = ((2, 1.0),)
    target = TargetBatch(("cat",), (2,), "logit", (row,))
    assert quantity_of(target, 0) == "probability"
    assert quantity_of(replace(target, activation="raw"), 0) == "score"
    assert quantity_of(replace(target, score="loss"), 0) == "score"
    assert quantity_of(replace(target, classes=(None,)), 0) == "score"  # a contrast
    assert quantity_of(replace(target, rows=()), 0) == "similarity"


def test_a_fall_of_the_log_odds_that_the_confidence_does_not_show_is_not_supported() -> None:
    """One class is so far above the others that its probability stays 1 whatever is hidden."""
    model, image = linear_softmax()
    module = copy.deepcopy(model.module)
    with torch.no_grad():
        module.weights[1] += 10  # type: ignore[index, operator]
    sure = replace(model, module=module)
    check = check_one(sure, image, effects(sure, image, 1), target=1)
    assert check.full == pytest.approx(1)
    assert check.effect > SUPPORTED
    assert check.verdict != "supported"


@pytest.mark.parametrize("sure", [True, False])
def test_a_model_that_is_sure_of_another_class_is_not_called_unsure(sure: bool) -> None:
    """For Boxer on a photo of a pug the check once read "The model is unsure", at 97 % for Pug."""
    model, image = linear_softmax()
    module = copy.deepcopy(model.module)
    with torch.no_grad():
        module.weights.mul_(1e-3)  # type: ignore[operator, union-attr]
        if sure:
            module.weights[2] += 1  # type: ignore[index, operator]
    other = replace(model, module=module)
    with torch.no_grad():
        p = other.logits(image).softmax(1)[0]
    target = int(p.argmin())
    answer = check_one(other, image, effects(other, image, target), target=target).answer
    assert answer.reasons[-1].startswith("The model's answer is class 2 (" if sure else "The model's confidence in")


# Does the answer mean anything?


def picture(kind: str) -> Image.Image:
    """Pictures that mean nothing to a model of pets."""
    generator = np.random.default_rng(0)
    if kind == "flat":
        return Image.new("RGB", (300, 300), (128, 128, 128))
    if kind == "noise":
        return Image.fromarray(generator.integers(0, 256, (300, 300, 3), dtype=np.uint8))
    page = Image.new("RGB", (600, 840), (255, 255, 255))
    draw = ImageDraw.Draw(page)
    for line in range(40):
        draw.text(
            (50, 40 + 20 * line), f"Item {line:04d}   quantity {line % 7}   {37 * line}.00 EUR", fill=(20, 20, 20)
        )
    return page


@pytest.mark.parametrize("kind", ["flat", "noise", "invoice"])
def test_there_is_nothing_to_explain_in_pictures_that_mean_nothing(kind: str) -> None:
    check = cv.explain("pets", picture(kind)).check()[0]
    assert check.answer.status == "nothing to explain"
    assert check.answer.reasons
    assert_never_green(check)
    assert "There is nothing here to explain." in str(check)


def test_there_is_nothing_to_explain_in_random_weights() -> None:
    torch.manual_seed(0)
    model = cv.wrap(timm.create_model("vit_tiny_patch16_224", num_classes=10, depth=2).eval())
    check = cv.explain(model, "demo", "genatt").check()[0]
    assert any("look random" in reason for reason in check.answer.reasons)
    assert_never_green(check)


def assert_never_green(check: cv.results.MapCheck) -> None:
    """No place may call the map supported."""
    assert check.verdict is None
    assert check.badge == "Nothing here to explain"
    assert check.badge_style != "supported"
    assert "supported" not in str(check)
    assert "supported" not in check._repr_html_()
    assert not check.marked


def test_weights_are_random_while_all_norms_are_as_they_began() -> None:
    module = timm.create_model("vit_tiny_patch16_224", num_classes=10, depth=2)
    assert looks_untrained(module)
    with torch.no_grad():
        module.get_submodule("norm").bias[0] = 0.1  # type: ignore[index, union-attr]
    assert not looks_untrained(module)
    assert not looks_untrained(nn.Linear(2, 2)), "no norms: nothing to tell it by"
    assert not looks_untrained(cv.load("pets").module)


def test_photos_of_one_colour_and_noise_are_no_photos() -> None:
    model = cv.load("pets")
    for kind, words in (("flat", "one colour"), ("noise", "noise"), ("invoice", None)):
        pixels_of = cv.explain(model, picture(kind), "center").pixels[0]
        reasons = photo_reasons(pixels_of, model)
        assert [words in reason for reason in reasons] == ([] if words is None else [True])
    demo = cv.explain(model, "demo", "center").pixels[0]
    assert photo_reasons(demo, model) == ()
    assert photo_reasons(demo[:, None].expand(-1, 2, -1, -1), model) == (), "clips are looked at frame by frame"


FACTS = AnswerFacts("cat", "probability", 0.8, 0.1, True, 10, False, (3, 0.8), True, False, ())


@pytest.mark.parametrize(
    ("changes", "status", "words"),
    [
        ({}, "no objection", ""),
        ({"lowest": 0.77}, "nothing to explain", "hardly falls whatever is hidden"),
        ({"lowest": 0.9}, "nothing to explain", "hardly falls whatever is hidden"),
        ({"moves": False}, "nothing to explain", "The score is the same whatever is hidden."),
        ({"full": 0.19, "lowest": 0.0}, "nothing to explain", "guessing gives 10 %"),
        ({"full": 0.4, "lowest": 0.0}, "take care", "unsure: its confidence in cat is 40 %"),
        ({"full": 0.1, "lowest": 0.0, "is_answer": False}, "take care", "The model's answer is class 3 (80 %)"),
        ({"full": 0.1, "answer": (3, 0.15), "is_answer": False}, "take care", "guessing gives 10 %"),
        ({"is_sigmoid": True, "full": 0.3}, "take care", "does not see cat (confidence 30 %)"),
        ({"is_sigmoid": True, "lowest": 0.78}, "nothing to explain", "hardly falls"),
        ({"is_sigmoid": True}, "no objection", ""),
        ({"quantity": "score", "lowest": 0.8}, "no objection", ""),
        ({"quantity": "score", "full": -0.02, "is_image_similarity": True}, "nothing to explain", "cosine is -0.02"),
        ({"quantity": "score", "full": 0.4, "is_image_similarity": True}, "no objection", ""),
    ],
)
def test_the_sentence_about_the_answer(changes: dict[str, Any], status: str, words: str) -> None:
    answer = check_answer(replace(FACTS, **changes), ())
    assert answer.status == status
    assert words in answer.sentence
    assert bool(answer.reasons) == (status != "no objection")


def test_of_many_classes_five_times_guessing_is_little() -> None:
    """An invoice is a beagle by 10 % to a model of 37 breeds; a photo of a pet that it knows has more than 15 %."""
    assert [near_guessing(classes) for classes in (2, 10, 20, 1000)] == [0.6, 0.2, 0.15, 0.005]
    assert near_guessing(37) == pytest.approx(5 / 37)


def test_reasons_of_photo_and_reference_come_with_those_of_the_confidence() -> None:
    certain = check_answer(replace(FACTS, full=0.4), ("The photo is nearly of one colour.",), ("Far away.",))
    assert certain.status == "nothing to explain"
    assert certain.reasons[0] == "The photo is nearly of one colour."
    assert check_answer(FACTS, (), ("Far away.",)) == AnswerCheck("take care", ("Far away.",))


def test_a_reference_knows_its_own_kind_and_says_what_is_far_from_it(vit: cv.Model) -> None:
    generator = torch.Generator().manual_seed(0)
    near = torch.nn.functional.interpolate(
        torch.rand(60, 3, 4, 4, generator=generator).double(), (32, 32), mode="bilinear"
    )
    reference = cv.reference(vit, near[:40])
    assert len(reference) == 40
    embedded = reference.embeddings
    assert embedded.norm(dim=1) == pytest.approx(torch.ones(40), abs=1e-12)
    distances = 1 - embedded @ embedded.mT
    by_hand = sorted(float(np.sort(np.delete(row, k))[:5].mean()) for k, row in enumerate(distances.numpy()))
    assert reference.distances.tolist() == pytest.approx(by_hand, abs=1e-12)
    assert reference.limit == reference.distances.max(), "of fewer than 99 images none may be further away"
    assert reference.distance(embedded[:1]) < reference.limit
    far = replace(reference, embeddings=-embedded)
    checked = cv.check_maps(vit, near[40:41], torch.rand(1, 4, 4, generator=generator), 3, reference=far)
    assert any("unlike the 40 reference images" in reason for reason in checked[0].answer.reasons)
    with pytest.raises(cv.errors.BadInput, match="at least 20"):
        cv.reference(vit, near[:10])
    with pytest.raises(cv.errors.BadInput, match="of the same model"):
        reference.distance(torch.ones(1, 3))


def test_one_in_a_hundred_of_its_own_kind_is_beyond_the_limit() -> None:
    """The limit is the conformal quantile: the ⌈0.99 (n + 1)⌉-th of n distances."""
    reference = Reference("model", torch.zeros(199, 2), torch.arange(199.0))
    assert reference.limit == 197
    assert replace(reference, embeddings=torch.zeros(98, 2), distances=torch.arange(98.0)).limit == 97


# Real models


def test_passes_are_counted(vit: cv.Model) -> None:
    explanation = cv.explain(vit, photos(3), "genatt", target=3)
    counted: list[int] = []
    handle = vit.module.get_submodule("head").register_forward_hook(lambda _, __, out: counted.append(len(out)))
    try:
        explanation.check()  # a changed model is looked at, and the way to drop tokens found, once
        counted.clear()
        result = explanation.check()
    finally:
        handle.remove()
    assert result.cost.forwards == sum(counted) / 3 == 1 + PASSES + 2 + 1  # the image, sets, removals, a noisy copy
    fewer = explanation.check(passes=32)
    assert fewer.cost.forwards == 1 + 32 + 1 + 1
    with pytest.raises(cv.errors.BadInput, match="32 or more"):
        explanation.check(passes=31)


def test_targets_of_one_image_share_their_passes(vit: cv.Model) -> None:
    explanation = cv.explain(vit, photos(2), "genatt", targets=[3, 1, 4])
    together = explanation.check()
    assert together.cost.forwards <= (1 + PASSES + 3 * 3) / 3 + 1
    for row in (1, 5):
        alone = explanation[row].check()[0]
        assert together[row].name == alone.name
        assert together[row].target == alone.target
        assert together[row].removals[0].random == pytest.approx(alone.removals[0].random, rel=1e-9)
        assert together[row].partial == pytest.approx(alone.partial, abs=1e-9)


def test_check_leaves_the_model_bit_identical_and_is_decided_by_the_seed(vit: cv.Model) -> None:
    explanation = cv.explain(vit, photos(), "genatt", target=3)
    with unchanged(vit.module):
        first = explanation.check(seed=1)
    assert explanation.check(seed=1).checks == first.checks
    other = explanation.check(seed=2)
    assert other[0].removals[0].top == pytest.approx(first[0].removals[0].top, rel=1e-9)
    assert other[0].partial != first[0].partial
    assert other[0].removals[0].random != first[0].removals[0].random


def test_maps_are_checked_alike_alone_and_in_a_batch(vit: cv.Model) -> None:
    explanation = cv.explain(vit, photos(3), "ixg", target=[1, 2, 3])
    together, alone = explanation.check(), explanation[1].check()[0]
    assert together[1].target == alone.target
    assert together[1].verdict == alone.verdict
    for a, b in zip(together[1].removals, alone.removals, strict=True):
        assert (a.top, *a.random) == pytest.approx((b.top, *b.random), rel=1e-9)


def test_agreement_is_with_three_methods_of_other_families(vit: cv.Model) -> None:
    check = cv.explain(vit, photos(1), "genatt", target=3).check()[0]
    families = [cv.parse_method(text).method.family for text in check.agreement]
    assert len(set(families)) == 3
    assert "gradient × attention" not in families
    other = cv.explain(vit, photos(1), "ixg", target=3).check()[0]
    genatt, ixg = (cv.explain(vit, photos(1), text, target=3).numpy().ravel() for text in ("genatt", "ixg"))
    ranks = [np.argsort(np.argsort(values)) for values in (genatt, ixg)]
    assert other.agreement["genatt"] == pytest.approx(np.corrcoef(*ranks)[0, 1], abs=1e-12)


def test_stability_is_measured_where_the_method_costs_one_trace(vit: cv.Model) -> None:
    cheap = cv.explain(vit, photos(1), "genatt", target=3).check()
    assert cheap[0].stability is not None
    assert -1 <= cheap[0].stability <= 1
    slow = cv.explain(vit, photos(1), "rise(samples=8)", target=3).check()
    assert slow[0].stability is None
    assert any("stability was not measured" in note for note in slow.notes)
    assert slow.cost.forwards == cheap.cost.forwards - 1


def test_contrasts_and_functions_speak_of_a_score_and_class_agnostic_maps_of_the_prediction(vit: cv.Model) -> None:
    for target in (cv.Contrast(1, 2), lambda scores: scores[:, 1] - scores[:, 2]):
        check = cv.explain(vit, photos(1), "genatt", target=target).check()[0]
        with torch.no_grad():
            logits = vit.logits(photos(1))[0]
        assert check.quantity == "score"
        assert check.full == pytest.approx(float(logits[1] - logits[2]), rel=1e-9)
        assert check.specific is None
    rollout = cv.explain(vit, photos(1), "rollout").check()[0]
    assert rollout.quantity == "probability"
    assert rollout.specific is None, "the map is the same for every class"


def test_function_of_the_whole_batch_sees_the_other_images(vit: cv.Model) -> None:
    """Each image has its own class inside one function: rows must not be mixed up when variants are scored."""
    classes = torch.tensor([1, 4])
    explanation = cv.explain(vit, photos(2), "genatt", target=lambda scores: scores[torch.arange(2), classes])
    named = cv.explain(vit, photos(2), "genatt", target=cv.Contrast(1, 4))
    with torch.no_grad():
        logits = vit.logits(photos(2))
    assert [check.full for check in explanation.check()] == pytest.approx([float(logits[0, 1]), float(logits[1, 4])])
    assert explanation[1].check()[0].full == pytest.approx(float(logits[1, 4]))
    assert len(named.check()) == 2


def test_embedding_without_a_target_is_measured_by_similarity() -> None:
    model = replace(cv.wrap(build("timm-vit").double()), classifier=False, activation="raw")
    check = cv.explain(model, photos(1), "rollout").check()[0]
    assert check.quantity == "similarity"
    assert check.full == pytest.approx(1.0)
    assert all(value <= 1 for removal in check.removals for value in (removal.top, *removal.random))


def resnet() -> tuple[cv.Model, Tensor]:
    torch.manual_seed(0)
    return cv.wrap(torchvision.models.resnet18(num_classes=5).eval(), size=(64, 64)), torch.randn(2, 3, 64, 64)


def swin() -> tuple[cv.Model, Tensor]:
    torch.manual_seed(0)
    options = {"img_size": 64, "window_size": 4, "embed_dim": 16, "depths": (1, 1), "num_heads": (2, 4)}
    module = timm.create_model("swin_tiny_patch4_window7_224", num_classes=5, **options)
    return cv.wrap(module.eval(), size=(64, 64)), torch.randn(2, 3, 64, 64)


def mean_pooled() -> tuple[cv.Model, Tensor]:
    return cv.wrap(build("open_clip-avg")), pixels("open_clip-avg", batch=2)


@pytest.mark.parametrize("make", [resnet, swin, mean_pooled])
def test_other_kinds_of_models_are_checked(make: Callable[[], tuple[cv.Model, Tensor]]) -> None:
    """Convolutions, windows and mean pooling: tokens are dropped, set to zero or painted, by one code path."""
    model, images = make()
    result = cv.explain(model, images, "gradcam", target=1).check()
    assert len(result) == 2
    assert all(-1 <= check.partial <= 1 for check in result)
    assert all(len(check.agreement) >= 1 for check in result)
    assert result.cost.forwards <= PASSES + 6


def test_model_without_a_token_stream_is_painted_and_says_so() -> None:
    model, image = linear_raw()
    result = cv.check_maps(model, image, effects(model, image, 0)[None], target=0)
    assert any("painted with the mean colour" in note for note in result.notes)


# Outlier tokens


def test_outlier_share_counts_tokens_of_many_times_the_median_norm() -> None:
    tokens = torch.ones(1, 17, 8)
    tokens[0, 5] *= 2 * OUTLIER_RATIO
    tokens[0, 0] *= 100  # a prefix token is no patch
    ratios = norm_ratios(tokens[:, 1:])
    assert ratios.shape == (1, 16)
    assert (ratios > OUTLIER_RATIO).nonzero().tolist() == [[0, 4]]


def test_planted_outlier_is_found_among_the_brightest_patches(vit: cv.Model) -> None:
    module = build("timm-vit").double()
    with torch.no_grad():
        module.get_submodule("patch_embed")
        module.pos_embed[0, 1 + 6] += 1e4  # type: ignore[index, operator]
    model = cv.wrap(module)
    bright = torch.zeros(1, 4, 4, dtype=torch.float64)
    bright.view(-1)[6] = 1
    check = cv.check_maps(model, photos(1), bright, target=3)[0]
    assert check.outliers == 1
    assert check.outlier_share == 0.5  # of the two brightest of 16 patches
    assert any("outlier" in remark for remark in check.remarks)


# Objects


def test_pickled_explanation_needs_its_model_again(vit: cv.Model) -> None:
    explanation = cv.explain(vit, photos(1), "genatt", target=3)
    loaded = pickle.loads(pickle.dumps(explanation))
    assert loaded.origin is None
    with pytest.raises(cv.errors.BadInput, match=r"ex\.check\(model\)"):
        loaded.check()
    assert loaded.check(vit).checks == explanation.check().checks
    assert copy.deepcopy(explanation).check().checks == explanation.check().checks
    contrast = pickle.loads(pickle.dumps(cv.explain(vit, photos(1), "genatt", target=cv.Contrast(1, 2))))
    with pytest.raises(cv.errors.BadInput, match="target="):
        contrast.check(vit)
    assert contrast.check(vit, target=cv.Contrast(1, 2))[0].quantity == "score"


def test_changed_weights_are_refused() -> None:
    module = build("timm-vit")
    explanation = cv.explain(cv.wrap(module), pixels("timm-vit"), "genatt", target=3)
    with torch.no_grad():
        next(module.parameters()).add_(1)
    with pytest.raises(cv.errors.BadInput, match="not those that were explained"):
        explanation.check()


def test_maps_of_another_shape_are_refused(vit: cv.Model) -> None:
    with pytest.raises(cv.errors.BadInput, match=r"expected \[2, rows, columns\]"):
        cv.check_maps(vit, photos(2), torch.ones(1, 4, 4))


def test_result_is_a_sequence_and_names_its_images(vit: cv.Model) -> None:
    explanation = cv.explain(vit, photos(2), "genatt", target=3).with_check()
    result = explanation.checked
    assert result is not None
    assert len(result[:1]) == 1
    assert [check.name for check in result] == list(explanation.names)
    with pytest.raises(cv.errors.BadInput, match="check of 2 maps"):
        _ = result.verdict
    assert str(result).count("\n") == 1
    assert result[0]._repr_html_() in result._repr_html_()
    assert explanation[1].checked is not None
    assert explanation[1].checked.verdict == result[1].verdict
    assert cv.Explanation.concat([explanation[1], explanation[0]]).checked.checks == (result[1], result[0])  # type: ignore[union-attr]


def test_chunks_are_joined(vit: cv.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    explanation = cv.explain(vit, photos(3), "genatt", target=3)
    whole = explanation.check()
    monkeypatch.setitem(CHUNK_SIZE, "cpu", 2)
    parts = explanation.check()
    assert parts.cost.forwards == whole.cost.forwards
    assert [check.verdict for check in parts] == [check.verdict for check in whole]


def test_sets_that_no_map_of_the_class_predicts_are_remarked() -> None:
    assert _too_few_sets(None, 64) == _too_few_sets(PREDICTS, 64) == []
    (remark,) = _too_few_sets(PREDICTS - 0.01, 64)
    assert remark.startswith("No map of this class predicts what 64 random sets do")


def test_equally_bright_patches_at_the_cut_are_remarked() -> None:
    """Which of them are removed is drawn: of 16 patches the brightest 10 % are 2, 30 % are 5."""
    values = torch.arange(16.0, 0, -1)
    assert _ties_at_the_cut(values, (2, 5)) == []
    twins = values.clone()
    twins[3:5] = 12.5  # the fourth and the fifth: both are among the five
    assert _ties_at_the_cut(twins, (2, 5)) == []
    many = values.clone()
    many[3:9] = 12.5
    (remark,) = _ties_at_the_cut(many, (2, 5))
    assert remark.startswith("2 of the 5 brightest patches are drawn from 6 that are equally bright")
    (first,) = _ties_at_the_cut(torch.zeros(16), (2, 5))
    assert first.startswith("2 of the 2 brightest patches are drawn from 16")


def test_the_remark_of_ties_is_in_the_check() -> None:
    model, images = double("timm-vit", 1)
    ex = cv.explain(model, images, "ixg", target=3)
    flat = torch.zeros_like(ex.maps)
    flat[0, 1:3] = 1.0
    (check,) = replace(ex, maps=flat).check()
    assert any("equally bright" in remark for remark in check.remarks)
    (check,) = ex.check()
    assert not any("equally bright" in remark for remark in check.remarks)
