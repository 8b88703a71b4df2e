"""`ex.check()`: exact numbers on models that are linear in their patches, the verdicts, and what a reader reads."""

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
from torch import Tensor, nn

import clairvit as cv
from clairvit._rng import image_seeds, make_generator
from clairvit.methods.runs import CHUNK_SIZE
from clairvit.metrics.check import DRAWS, FRACTIONS, _ties_at_the_cut, log_odds, quantity_of, removal_effects
from clairvit.metrics.check_result import CHANCE, LARGEST_EFFECT, SUPPORTED, judge
from clairvit.targets.base import TargetBatch
from clairvit.tracing.outlier_tokens import OUTLIER_RATIO, norm_ratios
from helpers.linear_patch_model import effects, linear
from helpers.module_fingerprint import unchanged
from helpers.tiny_models import build, double, pixels

pytestmark = pytest.mark.filterwarnings("ignore::clairvit.errors.ClairWarning")
GRID = (10, 10)
PATCHES = 100


def linear_raw(seed: int = 0) -> tuple[cv.Model, Tensor]:
    """A linear model whose outputs are raw scores, and its image."""
    model, image = linear(GRID, 4, seed=seed)
    return replace(model, activation="raw"), image


def linear_softmax(seed: int = 0) -> tuple[cv.Model, Tensor]:
    return linear(GRID, 4, seed=seed)


def random_sets(image: Tensor, seed: int, count: int) -> list[Tensor]:
    """The places of the patches in the random draws of a check, drawn again by hand."""
    (image_seed,) = image_seeds(image, seed)
    return [
        torch.randperm(PATCHES, generator=make_generator(image_seed, "check/random places", k)) for k in range(count)
    ]


def check_one(model: cv.Model, image: Tensor, values: Tensor, **arguments: Any) -> cv.results.MapCheck:
    return cv.check_maps(model, image, values[None], **arguments)[0]


# Exact values


def test_removals_are_sums_of_the_effects_of_the_patches_that_are_left() -> None:
    """f(kept S) = Σ_{p in S} effect_p: values, spread and effects are sums by hand."""
    model, image = linear_raw()
    by_patch = effects(model, image, 1)
    check = check_one(model, image, by_patch, target=1, seed=3)
    flat = by_patch.flatten()
    ordered, total = flat.sort(descending=True).values, float(flat.sum())
    tolerance = 100 * PATCHES * np.finfo(np.float64).eps * float(flat.abs().sum())
    draws = iter(random_sets(image, 3, len(FRACTIONS) * DRAWS + 1))
    random = [[float(flat[next(draws) >= count].sum()) for _ in range(DRAWS)] for count in (10, 30)]
    assert check.full == pytest.approx(total, abs=tolerance)
    assert [removal.patches for removal in check.removals] == [10, 30]
    for removal, count, values in zip(check.removals, (10, 30), random, strict=True):
        assert removal.top == pytest.approx(float(ordered[count:].sum()), abs=tolerance)
        assert removal.random == pytest.approx(values, abs=tolerance)
        assert removal.random_mean == pytest.approx(np.mean(values), abs=tolerance)
        assert removal.random_spread == pytest.approx(np.std(values, ddof=1), abs=tolerance)
    assert check.kept == pytest.approx(float(ordered[:10].sum()), abs=tolerance)
    assert check.kept_random == pytest.approx(float(flat[next(draws) < 10].sum()), abs=tolerance)


def test_effect_is_students_t_with_one_spread_for_both_fractions() -> None:
    """σ² = mean_f s_f² / (f (1 − f)); e_f = (mean r_f − t_f) / (σ √(f (1 − f)) √(1 + 1/K)), in numpy."""
    top, random, fractions = np.array([1.0, -2.0]), np.array([[3.0, 4.0, 5.5], [2.0, 0.0, 1.0]]), np.array([0.1, 0.3])
    share = fractions * (1 - fractions)
    sigma = np.sqrt(np.mean(random.var(1, ddof=1) / share))
    expected = (random.mean(1) - top) / (sigma * np.sqrt(share) * np.sqrt(1 + 1 / 3))
    computed = removal_effects(torch.tensor(top), torch.tensor(random), fractions.tolist())
    assert computed == pytest.approx(expected.tolist(), rel=1e-12)


def test_variance_of_random_removals_is_in_proportion_to_f_times_one_minus_f() -> None:
    """The assumption behind the common spread: f N of N values without replacement, all subsets of a small set."""
    from itertools import combinations

    values = np.array([0.3, -1.2, 2.0, 0.7, 1.1, -0.4])
    for size in (1, 2, 3, 5):
        sums = [sum(chosen) for chosen in combinations(values, size)]
        fraction = size / len(values)
        expected = fraction * (1 - fraction) * len(values) ** 2 / (len(values) - 1) * values.var()
        assert np.var(sums) == pytest.approx(expected, rel=1e-12)


def test_effects_of_equal_draws_are_bounded_and_those_of_no_gap_are_zero() -> None:
    equal = torch.ones(2, 3)
    assert removal_effects(torch.tensor([0.0, 1.0]), equal, [0.1, 0.3]) == [LARGEST_EFFECT, 0.0]
    assert removal_effects(torch.tensor([2.0, 1.0]), equal, [0.1, 0.3]) == [-LARGEST_EFFECT, 0.0]
    assert removal_effects(torch.tensor([0.0, 0.0]), equal, [1.0, 1.0]) == [0.0, 0.0]  # nothing is left
    assert removal_effects(torch.tensor([0.0, 1.0]), equal, [0.1, 0.3], rounding=1.0) == [1.0, 0.0]


def test_log_odds_are_exact_where_the_probability_is_one_in_float() -> None:
    logits = torch.tensor([[60.0, 0.0, 1.0], [0.5, 0.25, 0.0]], dtype=torch.float64)
    expected = [60 - math.log(1 + math.e), 0.5 - math.log(math.exp(0.25) + 1)]
    assert log_odds(logits, 0, "softmax").tolist() == pytest.approx(expected, rel=1e-14)
    assert log_odds(logits, 1, "sigmoid").tolist() == [0.0, 0.25]
    p = logits.softmax(1)[1, 0]
    assert float(log_odds(logits, 0, "softmax")[1]) == pytest.approx(float((p / (1 - p)).log()), rel=1e-12)


def test_probability_of_a_class_is_what_is_measured_and_its_log_odds_are_judged() -> None:
    model, image = linear_softmax()
    check = check_one(model, image, effects(model, image, 2), target=2)
    with torch.no_grad():
        p = float(model.logits(image).softmax(1)[0, 2])
    assert check.quantity == "probability"
    assert check.full == pytest.approx(p, rel=1e-12)
    assert all(0 <= value <= 1 for removal in check.removals for value in (removal.top, *removal.random))


# Verdicts


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([SUPPORTED, SUPPORTED], "supported"),
        ([SUPPORTED + 2, SUPPORTED - 2], "supported"),  # the mean counts
        ([SUPPORTED - 0.01, SUPPORTED - 0.01], "weak"),
        ([CHANCE, CHANCE], "weak"),
        ([CHANCE - 0.01, CHANCE - 0.01], "not better than chance"),
        ([0.0, 0.0], "not better than chance"),
        ([-LARGEST_EFFECT, LARGEST_EFFECT], "not better than chance"),
        ([-5.0, -5.0], "not better than chance"),
    ],
)
def test_verdict_follows_the_thresholds(values: list[float], expected: str) -> None:
    assert judge(values) == expected


@pytest.mark.parametrize("make", [linear_raw, linear_softmax])
def test_map_of_the_true_effects_is_supported_and_its_negative_is_not(make: Callable[..., Any]) -> None:
    model, image = make()
    by_patch = effects(model, image, 0)
    assert check_one(model, image, by_patch, target=0).verdict == "supported"
    assert check_one(model, image, -by_patch, target=0).verdict == "not better than chance"


def test_shuffled_maps_of_a_planted_model_are_not_better_than_chance() -> None:
    model, image = linear_raw()
    flat = effects(model, image, 0).flatten()
    orders = [torch.randperm(PATCHES, generator=torch.Generator().manual_seed(k)) for k in range(20)]
    maps = torch.stack([flat[order].reshape(GRID) for order in orders])
    result = cv.check_maps(model, image.expand(20, -1, -1, -1), maps, target=0)
    assert result.verdicts.count("not better than chance") >= 17
    assert "supported" not in result.verdicts


def test_constant_map_is_not_better_than_chance_and_says_why() -> None:
    model, image = linear_raw()
    check = check_one(model, image, torch.full(GRID, 0.1) + 1e-9, target=0)
    assert check.verdict == "not better than chance"
    assert any("the same everywhere" in remark for remark in check.remarks)


def test_score_that_nothing_changes_is_not_better_than_chance_and_says_why() -> None:
    model, image = linear_raw()
    module = copy.deepcopy(model.module)
    nn.init.zeros_(module.weights)  # type: ignore[arg-type]
    check = check_one(replace(model, module=module), image, torch.arange(100.0).reshape(GRID), target=0)
    assert check.verdict == "not better than chance"
    assert any("whatever is removed" in remark for remark in check.remarks)


def test_image_of_a_batch_that_cannot_be_checked_leaves_the_others_alone() -> None:
    model, image = linear_raw()
    by_patch = effects(model, image, 0)
    broken = by_patch.clone()
    broken[0, 0] = math.nan
    result = cv.check_maps(model, image.expand(3, -1, -1, -1), torch.stack([by_patch, broken, by_patch]), target=0)
    assert result.verdicts == ("supported", None, "supported")
    assert "cannot be checked" in result[1].sentence
    assert "NaN" in result[1].sentence
    alone = check_one(model, image, by_patch, target=0)
    for check in (result[0], result[2]):
        values = [(removal.top, *removal.random) for removal in check.removals]
        for value, removal in zip(values, alone.removals, strict=True):
            assert value == pytest.approx((removal.top, *removal.random), rel=1e-9)
    assert json.loads(json.dumps(result.to_dict()))["checks"][1]["verdict"] is None


# The sentences for a reader


def test_sentence_of_a_probability_is_in_per_cent() -> None:
    removals = (
        cv.results.RemovalEffect(0.1, 20, 0.121, (0.8, 0.81, 0.82), 9.0),
        cv.results.RemovalEffect(0.3, 59, 0.05, (0.7, 0.71, 0.72), 9.0),
    )
    check = cv.results.MapCheck(
        "a", "cat", "genatt", "probability", 0.831, removals, 0.5, 0.1, 0.9, {}, 0, 0.0, "supported"
    )
    assert check.sentence == (
        "Without the brightest 10 % of the photo the model's confidence in cat falls from 83 % to 12 %; random "
        "patches: 81 %. This map points at what the model uses."
    )
    same = replace(check, removals=(replace(removals[0], top=0.8305), replace(removals[1], top=0.86)))
    assert "stays at 83 %" in replace(same, verdict="weak").sentence
    larger = replace(check, removals=(replace(removals[0], top=0.8), removals[1]))
    assert "brightest 30 % of the photo" in larger.sentence  # the smaller removal says too little
    score = replace(larger, quantity="score", removals=(replace(removals[0], effect=SUPPORTED - 0.1), removals[1]))
    assert "brightest 30 % of the photo the model's score for cat falls from 0.83 to 0.05" in score.sentence
    assert "the similarity to b.jpg falls from 0.83" in replace(score, target="similar to b.jpg").sentence


def test_raw_scores_are_never_per_cent_of_confidence() -> None:
    model, image = linear_raw()
    check = check_one(model, image, effects(model, image, 1), target=1)
    assert check.quantity == "score"
    assert "confidence" not in check.sentence
    assert check.sentence.count("%") == 1  # of the photo
    assert f"from {check.full:.2f} to {check.removals[0].top:.2f}" in check.sentence


def test_quantity_of_targets() -> None:
    row = ((2, 1.0),)
    target = TargetBatch(("cat",), (2,), "logit", (row,))
    assert quantity_of(target, 0) == "probability"
    assert quantity_of(target, 0, class_specific=False) == "score"
    assert quantity_of(replace(target, activation="raw"), 0) == "score"
    assert quantity_of(replace(target, score="loss"), 0) == "score"
    assert quantity_of(replace(target, classes=(None,)), 0) == "score"  # a contrast
    assert quantity_of(replace(target, rows=()), 0) == "similarity"


def test_a_fall_of_the_log_odds_that_the_confidence_does_not_show_is_reported() -> None:
    """One class is so far above the others that its probability stays 1 whatever is removed."""
    model, image = linear_softmax()
    module = copy.deepcopy(model.module)
    with torch.no_grad():
        module.weights[1] += 10  # type: ignore[index, operator]
    sure = replace(model, module=module)
    check = check_one(sure, image, effects(sure, image, 1), target=1)
    assert check.full == pytest.approx(1)
    assert check.verdict == "supported"
    assert any("log-odds" in remark for remark in check.remarks)


def test_low_confidence_is_reported() -> None:
    model, image = linear_softmax()
    with torch.no_grad():
        p = model.logits(image).softmax(1)[0]
    low = int(p.argmin())
    assert float(p[low]) < 2 / 3
    check = check_one(model, image, effects(model, image, low), target=low)
    sure = float(p.max()) >= 2 / len(p)  # twice the probability of guessing
    answer = f"The model's answer is class {int(p.argmax())} ("
    assert any(remark.startswith(answer if sure else "The model is unsure") for remark in check.remarks)


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
    (remark,) = [
        remark
        for remark in check_one(other, image, effects(other, image, target), target=target).remarks
        if "little that could fall" in remark
    ]
    assert remark.startswith("The model's answer is class 2 (" if sure else "The model is unsure: its confidence in")


# Real models


@pytest.fixture(scope="module")
def vit() -> cv.Model:
    return cv.wrap(build("timm-vit").double())


def photos(count: int = 2) -> Tensor:
    return pixels("timm-vit", batch=count).double()


def test_check_costs_at_most_twelve_forwards_per_image(vit: cv.Model) -> None:
    explanation = cv.explain(vit, photos(3), "genatt", target=3)
    counted: list[int] = []
    handle = vit.module.get_submodule("head").register_forward_hook(lambda _, __, out: counted.append(len(out)))
    try:
        explanation.check()  # a changed model is looked at, and the way to drop tokens found, once
        counted.clear()
        result = explanation.check()
    finally:
        handle.remove()
    assert sum(counted) <= 12 * 3
    assert result.cost.forwards == sum(counted) / 3


def test_check_leaves_the_model_bit_identical_and_is_decided_by_the_seed(vit: cv.Model) -> None:
    explanation = cv.explain(vit, photos(), "genatt", target=3)
    with unchanged(vit.module):
        first = explanation.check(seed=1)
    assert explanation.check(seed=1).checks == first.checks
    other = explanation.check(seed=2)
    assert other[0].removals[0].top == pytest.approx(first[0].removals[0].top, rel=1e-9)
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


def test_contrasts_functions_and_class_agnostic_maps_speak_of_a_score(vit: cv.Model) -> None:
    for target in (cv.Contrast(1, 2), lambda scores: scores[:, 1] - scores[:, 2]):
        check = cv.explain(vit, photos(1), "genatt", target=target).check()[0]
        with torch.no_grad():
            logits = vit.logits(photos(1))[0]
        assert check.quantity == "score"
        assert check.full == pytest.approx(float(logits[1] - logits[2]), rel=1e-9)
    rollout = cv.explain(vit, photos(1), "rollout").check()[0]
    assert rollout.quantity == "score"
    assert "confidence" not in rollout.sentence


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
    assert all(check.verdict is not None for check in result)
    assert all(len(check.agreement) >= 1 for check in result)
    assert result.cost.forwards <= 12


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
