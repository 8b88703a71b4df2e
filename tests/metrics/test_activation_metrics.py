"""Faithfulness metrics through all three activations: closed forms on a model that is linear before its activation."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import clairvit as cv
from clairvit.errors import BadInput, NotApplicable
from clairvit.metrics.context import NORMALISED_BY
from clairvit.metrics.registry import list_metrics
from clairvit.perturbation.segments import segments_on_patches, superpixels_of
from helpers.linear_patch_model import LinearPatches, effects
from helpers.rounding import assert_same

GRID, PATCH, TARGET = (4, 4), 16, 1
PATCHES = GRID[0] * GRID[1]
ACTIVATIONS = ("softmax", "sigmoid", "raw")
TWINS: dict[str, nn.Module] = {"softmax": nn.Softmax(-1), "sigmoid": nn.Sigmoid(), "raw": nn.Identity()}


def applied(logits: Tensor, activation: str) -> Tensor:
    """Return what the activation makes of logits [..., C], written out."""
    if activation == "softmax":
        return logits.exp() / logits.exp().sum(-1, keepdim=True)
    return 1 / (1 + (-logits).exp()) if activation == "sigmoid" else logits


class LinearCase:
    """A linear model with an activation, one image, a map of any order, and the exact score of any patches left."""

    def __init__(self, activation: str, *, seed: int = 0, sign: float = 1.0, map_seed: int = 7) -> None:
        self.activation = activation
        size = (GRID[0] * PATCH, GRID[1] * PATCH)
        self.module = LinearPatches(GRID, PATCH, smooth=False, seed=seed).double().eval()
        with torch.no_grad():
            self.module.weights.mul_(sign)
        self.layout = cv.Layout(GRID, 0, "avg")
        self.model = cv.wrap(self.module, name="linear", size=size, layout=self.layout, activation=activation)
        twin = nn.Sequential(self.module, TWINS[activation])
        self.twin = cv.wrap(twin, name="twin", size=size, layout=self.layout, activation="raw")
        draws = torch.Generator().manual_seed(seed + 1)
        self.image = 1 + 0.3 * torch.randn(1, 3, *size, generator=draws, dtype=torch.float64)
        self.by_class = torch.stack([effects(self.model, self.image, c).flatten() for c in range(3)])
        self.map = torch.randn(GRID, generator=torch.Generator().manual_seed(map_seed), dtype=torch.float64)
        self.order = self.map.flatten().argsort(descending=True)

    def f(self, left: Tensor) -> float:
        return float(applied(self.by_class @ left.double(), self.activation)[TARGET])

    def without_top(self, count: int) -> float:
        left = torch.ones(PATCHES, dtype=torch.bool)
        left[self.order[:count]] = False
        return self.f(left)

    def top_alone(self, count: int) -> float:
        left = torch.zeros(PATCHES, dtype=torch.bool)
        left[self.order[:count]] = True
        return self.f(left)

    @property
    def full(self) -> float:
        return self.without_top(0)

    @property
    def nothing(self) -> float:
        return self.top_alone(0)

    @property
    def unit(self) -> float:
        """What drops are divided by."""
        return abs(self.full - self.nothing) if self.activation == "raw" else 1.0

    def level(self, value: float) -> float:
        """Return a score as it stands in a curve."""
        return (value - self.nothing) / self.unit if self.activation == "raw" else value

    def score(self, metric: str, *, twin: bool = False, **more: Any) -> cv.Score:
        model = self.twin if twin else self.model
        ex = replace(cv.explain(model, self.image, "random", target=TARGET), maps=self.map[None])
        score = cv.evaluate(model, self.image, ex, metric, baselines=False, **{"removal": "mean", **more})
        assert isinstance(score, cv.Score)
        return score


def area(values: list[float]) -> float:
    """Return the mean height under the trapezoids of equally spaced values."""
    return sum((a + b) / 2 for a, b in itertools.pairwise(values)) / (len(values) - 1)


@pytest.fixture(params=ACTIVATIONS)
def linear_case(request: pytest.FixtureRequest) -> LinearCase:
    return LinearCase(request.param)


# Closed forms


def test_deletion(linear_case: LinearCase) -> None:
    expected = [linear_case.level(linear_case.without_top(k)) for k in (0, 4, 8, 12)]
    score = linear_case.score("deletion", steps=3)
    assert_same(score.mean, area(expected))
    assert score.curve is not None
    assert_same(score.curve.y[0], expected)
    assert score.curve.meaning == ("normalised score" if linear_case.activation == "raw" else "prob")


def test_deletion_to_the_end_reaches_nothing(linear_case: LinearCase) -> None:
    score = linear_case.score("deletion", steps=3, ends=True)
    assert score.curve is not None
    assert_same(score.curve.y[0, -1], 0.0 if linear_case.activation == "raw" else linear_case.nothing, magnitude=1.0)


def test_insertion(linear_case: LinearCase) -> None:
    expected = [linear_case.level(linear_case.top_alone(k)) for k in (4, 8, 12, 16)]
    assert_same(linear_case.score("insertion", steps=3).mean, area(expected))


def test_insertion_minus_deletion(linear_case: LinearCase) -> None:
    up = area([linear_case.level(linear_case.top_alone(k)) for k in (4, 8, 12, 16)])
    down = area([linear_case.level(linear_case.without_top(k)) for k in (0, 4, 8, 12)])
    assert_same(linear_case.score("insertion-deletion", steps=3).mean, up - down)


def test_deletion_by_pixels_is_normalised_alike(linear_case: LinearCase) -> None:
    """All pixels of a patch have its value, so that a quarter of the pixels is a quarter of the patches."""
    score = linear_case.score("deletion", steps=3, granularity="pixel", upsampling="nearest")
    assert_same(score.mean, linear_case.score("deletion", steps=3).mean)


def test_drops(linear_case: LinearCase) -> None:
    expected = [(linear_case.full - linear_case.without_top(k)) / linear_case.unit for k in (0, 4, 8, 12)]
    assert_same(linear_case.score("deletion", steps=3, score="drop").mean, area(expected))


def test_aopc(linear_case: LinearCase) -> None:
    expected = [(linear_case.full - linear_case.without_top(k)) / linear_case.unit for k in range(PATCHES)]
    assert_same(linear_case.score("aopc").mean, sum(expected) / PATCHES)


def test_comprehensiveness_and_sufficiency(linear_case: LinearCase) -> None:
    counts = [max(1, round(q * PATCHES)) for q in (0.01, 0.05, 0.1, 0.2, 0.5)]
    gone = [(linear_case.full - linear_case.without_top(k)) / linear_case.unit for k in counts]
    alone = [(linear_case.full - linear_case.top_alone(k)) / linear_case.unit for k in counts]
    assert_same(linear_case.score("comprehensiveness").mean, sum(gone) / 5)
    assert_same(linear_case.score("sufficiency").mean, sum(alone) / 5)


def test_road(linear_case: LinearCase) -> None:
    best_gone = [linear_case.level(linear_case.without_top(k)) for k in (4, 8, 12)]
    last_gone = [linear_case.level(linear_case.top_alone(PATCHES - k)) for k in (4, 8, 12)]
    both = [(b - a) / 2 for a, b in zip(best_gone, last_gone, strict=True)]
    assert_same(linear_case.score("road", steps=3).mean, sum(both) / 3)
    assert_same(linear_case.score("road", steps=3, order="morf").mean, sum(best_gone) / 3)
    assert_same(linear_case.score("road", steps=3, order="lerf").mean, sum(last_gone) / 3)


def test_srg(linear_case: LinearCase) -> None:
    """Both curves meet at either end, so that four trapezoids have five heights, of which three are not 0."""
    gains = [
        linear_case.level(linear_case.top_alone(PATCHES - k)) - linear_case.level(linear_case.without_top(k))
        for k in (4, 8, 12)
    ]
    assert_same(linear_case.score("srg", steps=3).mean, area([0, *gains, 0]))


def test_irof(linear_case: LinearCase) -> None:
    (segments,) = superpixels_of(linear_case.image, linear_case.model.preprocess)
    groups = segments_on_patches(segments, GRID).flatten()
    count = int(groups.max()) + 1
    means = [float(linear_case.map.flatten()[groups == g].mean()) for g in range(count)]
    left, curve = torch.ones(PATCHES, dtype=torch.bool), []
    for g in [-1, *sorted(range(count), key=lambda g: -means[g])]:
        left = left & (groups != g)
        value = linear_case.f(left)
        curve.append(linear_case.level(value) if linear_case.activation == "raw" else value / linear_case.full)
    score = linear_case.score("irof")
    assert count > 1
    assert_same(score.mean, 1 - area(curve))


def test_monotonicity(linear_case: LinearCase) -> None:
    """Least relevant first, four groups of four; a share of steps is not normalised."""
    values = [linear_case.f(left) for left in (last_left(linear_case, k) for k in (4, 8, 12, 16))]
    expected = sum(b >= a for a, b in itertools.pairwise(values)) / 3
    score = linear_case.score("monotonicity", steps=4)
    assert_same(score.mean, expected)
    assert "normalised_by" not in score.settings
    assert score.curve is not None
    assert_same(score.curve.y[0], values)
    assert score.curve.meaning == ("score" if linear_case.activation == "raw" else "prob")


def last_left(case: LinearCase, count: int) -> Tensor:
    left = torch.zeros(PATCHES, dtype=torch.bool)
    left[case.order.flip(0)[:count]] = True
    return left


def test_completeness(linear_case: LinearCase) -> None:
    score = "logit" if linear_case.activation == "raw" else "prob"
    rise = linear_case.full - linear_case.nothing
    expected = abs(float(linear_case.map.sum()) - rise) / abs(rise)
    assert_same(linear_case.score("completeness", score=score).mean, expected)


def test_faithfulness_estimate(linear_case: LinearCase) -> None:
    """Groups of four by falling relevance, each taken away alone."""
    drops, sums = [], []
    for k in range(4):
        group = linear_case.order[4 * k : 4 * k + 4]
        left = torch.ones(PATCHES, dtype=torch.bool)
        left[group] = False
        drops.append(linear_case.full - linear_case.f(left))
        sums.append(float(linear_case.map.flatten()[group].sum()))
    expected = torch.corrcoef(torch.tensor([drops, sums], dtype=torch.float64))[0, 1]
    score = "logit" if linear_case.activation == "raw" else "prob"
    assert_same(linear_case.score("faithfulness-estimate", steps=4, score=score).mean, expected)


RANDOM = {
    "faithfulness-correlation": {"runs": 12},
    "sensitivity-n": {"runs": 6, "sizes": 3},
    "infidelity": {"runs": 12},
    "infidelity(scaled=false)": {"runs": 12},
}
AREAS = (
    "deletion",
    "insertion",
    "insertion-deletion",
    "aopc",
    "comprehensiveness",
    "sufficiency",
    "road",
    "irof",
    "srg",
)
SETTLED = ("monotonicity", "completeness", "faithfulness-estimate", "saco", "idsds")  # nothing is drawn
OTHERS = (
    "monotonicity",
    "completeness",
    "faithfulness-estimate",
    "saco",
    "idsds",
    "faithfulness-correlation",
    "sensitivity-n",
    "infidelity",
    "naopc",
    "f-fidelity",
    "sufficient-size",
    "necessary-size",
)


@pytest.mark.parametrize("activation", ["softmax", "sigmoid"])
@pytest.mark.parametrize("metric", [*AREAS, *SETTLED, *RANDOM])
def test_a_probability_is_the_score_of_a_model_that_applies_its_activation(activation: str, metric: str) -> None:
    """The same sets are drawn for the same image, so that no reference has to draw them."""
    case = LinearCase(activation)
    ours = case.score(metric, score="prob", **RANDOM.get(metric, {}))
    twins = case.score(metric, twin=True, score="logit", **RANDOM.get(metric, {}))
    assert_same(ours.values, twins.values)


def test_every_faithfulness_metric_is_in_these_tests() -> None:
    assert {metric.name for metric in list_metrics() if metric.family == "faithfulness"} == {*AREAS, *OTHERS}


# What raw scores are divided by, and the notes on it


@pytest.mark.parametrize("metric", AREAS)
def test_a_normalised_score_does_not_depend_on_scale_and_offset(metric: str) -> None:
    """f and 3 f + 5 are the same regression in another unit."""
    case = LinearCase("raw")

    class Shifted(nn.Module):
        def forward(self, logits: Tensor) -> Tensor:
            return 3 * logits + 5

    case.twin = replace(case.twin, module=nn.Sequential(case.module, Shifted()))
    score = case.score(metric)
    assert_same(case.score(metric, twin=True).values, score.values)
    assert score.settings["score"] == "raw"
    assert score.settings["normalised_by"] == NORMALISED_BY
    assert score.settings["activation"] == "raw"
    assert score.span == (-math.inf, math.inf)
    assert f"{metric}: this model's scores are raw, so they are normalised by ({NORMALISED_BY})" in score.notes


@pytest.mark.parametrize("metric", AREAS)
def test_an_explicit_logit_is_taken_as_it_is(metric: str) -> None:
    case = LinearCase("raw")
    score = case.score(metric, score="logit")
    assert "normalised_by" not in score.settings
    assert score.settings["score"] == "logit"
    if metric == "deletion":
        assert score.curve is not None
        assert_same(score.curve.y[0, 0], case.full)


@pytest.mark.parametrize("metric", AREAS)
def test_where_the_image_lowers_the_score_a_better_map_stays_better(metric: str) -> None:
    """The map that knows the effects is better than its opposite, also where the whole image has a negative score."""
    case = LinearCase("raw", sign=1.0 if float(LinearCase("raw").full) < 0 else -1.0)
    assert case.full < case.nothing == 0
    truth = case.by_class[TARGET].reshape(GRID)
    scores = []
    for maps in (truth, -truth):
        case.map = maps
        scores.append(case.score(metric))
    gap = scores[0].mean - scores[1].mean
    assert gap > 0 if scores[0].better == "higher" else gap < 0


@pytest.mark.parametrize("metric", [*AREAS, "completeness"])
def test_a_score_that_nothing_changes_is_undefined(metric: str) -> None:
    case = LinearCase("raw")
    with torch.no_grad():
        case.module.weights[TARGET].zero_()
    score = case.score(metric)
    assert (score.n_valid, score.n_invalid) == (0, 1)
    assert bool(score.values.isnan().all())
    if metric != "completeness":
        assert any("is the same with nothing left" in note for note in score.notes)


def test_an_undefined_share_is_not_infinite() -> None:
    """irof of a logit that is exactly 0 for the whole image, 12 − 12, and not for its halves."""
    case = LinearCase("softmax")
    case.image = torch.ones_like(case.image)
    case.image[..., 32:] = 2
    with torch.no_grad():
        case.module.embed.weight.fill_(2.0**-10)  # sums of these are exact
        case.module.weights[TARGET, :, :2], case.module.weights[TARGET, :, 2:] = 2, -1
        assert float(case.model.logits(case.image)[0, TARGET]) == 0
    assert int(superpixels_of(case.image, case.model.preprocess)[0].max()) > 0
    score = case.score("irof", score="logit")
    assert bool(score.values.isnan().all())
    assert score.n_invalid == 1


def test_scores_that_need_a_probability_are_refused_of_raw_ones() -> None:
    case = LinearCase("raw")
    with pytest.raises(BadInput, match="score 'logprob' is made of a probability"):
        case.score("deletion", score="logprob")
    with pytest.raises(BadInput, match="score 'log-odds' is made of a probability"):
        case.score("deletion", score="log-odds")


def test_images_that_a_model_is_sure_of_need_a_probability() -> None:
    case = LinearCase("raw")
    images = case.image.repeat(4, 1, 1, 1)
    with pytest.raises(NotApplicable, match="grid-pointing-game takes images that the model is sure of"):
        cv.evaluate(case.model, images, "random", "grid-pointing-game")


def test_accuracy_of_a_single_output_is_refused() -> None:
    class One(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, image: Tensor) -> Tensor:
            scores: Tensor = self.inner(image)
            return scores[:, :1]

    case = LinearCase("raw")
    model = cv.wrap(One(case.module), size=(64, 64), layout=case.layout)
    with pytest.raises(BadInput, match="single output, which gives the same answer for any image"):
        cv.evaluate(model, case.image, "random", "deletion", score="accuracy", removal="mean")
    score = cv.evaluate(model, case.image, "random", "deletion", removal="mean")
    assert isinstance(score, cv.Score)
    assert score.settings["score"] == "raw", "one column that no module announces is raw where it is seen"


# What the model says of each image


def test_predictions_have_a_probability_where_there_is_one(linear_case: LinearCase) -> None:
    scores = cv.evaluate(linear_case.model, linear_case.image, ["random"], ["sparseness"])
    assert not isinstance(scores, cv.Score)
    (seen,) = scores.predictions  # type: ignore[attr-defined]
    logits = linear_case.by_class.sum(1)
    assert seen.predicted == int(logits.argmax())
    if linear_case.activation == "raw":
        assert seen.probability is None
    else:
        assert_same(seen.probability, applied(logits, linear_case.activation).max())


# A single CLIP prompt, whose insertion was 1 for any map


def test_one_prompt_has_a_cosine_and_maps_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    open_clip = pytest.importorskip("open_clip")
    small: dict[str, Any] = {
        "embed_dim": 16,
        "vision_cfg": {"image_size": 32, "layers": 2, "width": 64, "patch_size": 8},
    }
    small["text_cfg"] = {"context_length": 77, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2}
    monkeypatch.setitem(open_clip.factory._MODEL_CONFIGS, "tiny", small)
    model = cv.load("open_clip:tiny", pretrained=False, labels=["a cat"], dtype="float64")
    image = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    explanation = cv.explain(model, image, "leave-one-out")
    assert explanation.probabilities == (None,)
    assert explanation.class_scores[0] is not None
    assert -1 <= explanation.class_scores[0] <= 1
    assert float(explanation.maps.abs().max()) > 0
    opposite = replace(explanation, maps=-explanation.maps)
    values = [float(cv.evaluate(model, image, ex, "insertion").mean) for ex in (explanation, opposite)]  # type: ignore[union-attr]
    assert values[0] != values[1]
    assert 1.0 not in values


@pytest.mark.parametrize(
    ("metric", "expected"),
    [
        ("faithfulness-correlation(runs=12)", 1.0),
        ("sensitivity-n(runs=6,sizes=3)", 1.0),
        ("faithfulness-estimate(steps=4)", 1.0),
        ("infidelity(runs=12)", 0.0),
        ("infidelity(runs=12,scaled=false)", 0.0),
        ("completeness", 0.0),
    ],
)
def test_the_effects_of_a_raw_linear_model_are_its_perfect_map(metric: str, expected: float) -> None:
    case = LinearCase("raw")
    case.map = case.by_class[TARGET].reshape(GRID)
    assert_same(case.score(metric).mean, expected, magnitude=1.0)
