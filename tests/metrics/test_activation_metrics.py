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


class Known:
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
def known(request: pytest.FixtureRequest) -> Known:
    return Known(request.param)


# Closed forms


def test_deletion(known: Known) -> None:
    wanted = [known.level(known.without_top(k)) for k in (0, 4, 8, 12)]
    score = known.score("deletion", steps=3)
    assert_same(score.mean, area(wanted))
    assert score.curve is not None
    assert_same(score.curve.y[0], wanted)
    assert score.curve.meaning == ("normalised score" if known.activation == "raw" else "prob")


def test_deletion_to_the_end_reaches_nothing(known: Known) -> None:
    score = known.score("deletion", steps=3, ends=True)
    assert score.curve is not None
    assert_same(score.curve.y[0, -1], 0.0 if known.activation == "raw" else known.nothing, magnitude=1.0)


def test_insertion(known: Known) -> None:
    wanted = [known.level(known.top_alone(k)) for k in (4, 8, 12, 16)]
    assert_same(known.score("insertion", steps=3).mean, area(wanted))


def test_insertion_minus_deletion(known: Known) -> None:
    up = area([known.level(known.top_alone(k)) for k in (4, 8, 12, 16)])
    down = area([known.level(known.without_top(k)) for k in (0, 4, 8, 12)])
    assert_same(known.score("insertion-deletion", steps=3).mean, up - down)


def test_deletion_by_pixels_is_normalised_alike(known: Known) -> None:
    """All pixels of a patch have its value, so that a quarter of the pixels is a quarter of the patches."""
    score = known.score("deletion", steps=3, granularity="pixel", upsampling="nearest")
    assert_same(score.mean, known.score("deletion", steps=3).mean)


def test_drops(known: Known) -> None:
    wanted = [(known.full - known.without_top(k)) / known.unit for k in (0, 4, 8, 12)]
    assert_same(known.score("deletion", steps=3, score="drop").mean, area(wanted))


def test_aopc(known: Known) -> None:
    wanted = [(known.full - known.without_top(k)) / known.unit for k in range(PATCHES)]
    assert_same(known.score("aopc").mean, sum(wanted) / PATCHES)


def test_comprehensiveness_and_sufficiency(known: Known) -> None:
    counts = [max(1, round(q * PATCHES)) for q in (0.01, 0.05, 0.1, 0.2, 0.5)]
    gone = [(known.full - known.without_top(k)) / known.unit for k in counts]
    alone = [(known.full - known.top_alone(k)) / known.unit for k in counts]
    assert_same(known.score("comprehensiveness").mean, sum(gone) / 5)
    assert_same(known.score("sufficiency").mean, sum(alone) / 5)


def test_road(known: Known) -> None:
    best_gone = [known.level(known.without_top(k)) for k in (4, 8, 12)]
    last_gone = [known.level(known.top_alone(PATCHES - k)) for k in (4, 8, 12)]
    both = [(b - a) / 2 for a, b in zip(best_gone, last_gone, strict=True)]
    assert_same(known.score("road", steps=3).mean, sum(both) / 3)
    assert_same(known.score("road", steps=3, order="morf").mean, sum(best_gone) / 3)
    assert_same(known.score("road", steps=3, order="lerf").mean, sum(last_gone) / 3)


def test_srg(known: Known) -> None:
    """Both curves meet at either end, so that four trapezoids have five heights, of which three are not 0."""
    gains = [known.level(known.top_alone(PATCHES - k)) - known.level(known.without_top(k)) for k in (4, 8, 12)]
    assert_same(known.score("srg", steps=3).mean, area([0, *gains, 0]))


def test_irof(known: Known) -> None:
    (segments,) = superpixels_of(known.image, known.model.preprocess)
    groups = segments_on_patches(segments, GRID).flatten()
    count = int(groups.max()) + 1
    means = [float(known.map.flatten()[groups == g].mean()) for g in range(count)]
    left, curve = torch.ones(PATCHES, dtype=torch.bool), []
    for g in [-1, *sorted(range(count), key=lambda g: -means[g])]:
        left = left & (groups != g)
        value = known.f(left)
        curve.append(known.level(value) if known.activation == "raw" else value / known.full)
    score = known.score("irof")
    assert count > 1
    assert_same(score.mean, 1 - area(curve))


def test_monotonicity(known: Known) -> None:
    """Least relevant first, four groups of four; a share of steps is not normalised."""
    values = [known.f(left) for left in (known_left(known, k) for k in (4, 8, 12, 16))]
    wanted = sum(b >= a for a, b in itertools.pairwise(values)) / 3
    score = known.score("monotonicity", steps=4)
    assert_same(score.mean, wanted)
    assert "normalised_by" not in score.settings
    assert score.curve is not None
    assert_same(score.curve.y[0], values)
    assert score.curve.meaning == ("score" if known.activation == "raw" else "prob")


def known_left(known: Known, count: int) -> Tensor:
    left = torch.zeros(PATCHES, dtype=torch.bool)
    left[known.order.flip(0)[:count]] = True
    return left


def test_completeness(known: Known) -> None:
    score = "logit" if known.activation == "raw" else "prob"
    rise = known.full - known.nothing
    wanted = abs(float(known.map.sum()) - rise) / abs(rise)
    assert_same(known.score("completeness", score=score).mean, wanted)


def test_faithfulness_estimate(known: Known) -> None:
    """Groups of four by falling relevance, each taken away alone."""
    drops, sums = [], []
    for k in range(4):
        group = known.order[4 * k : 4 * k + 4]
        left = torch.ones(PATCHES, dtype=torch.bool)
        left[group] = False
        drops.append(known.full - known.f(left))
        sums.append(float(known.map.flatten()[group].sum()))
    wanted = torch.corrcoef(torch.tensor([drops, sums], dtype=torch.float64))[0, 1]
    score = "logit" if known.activation == "raw" else "prob"
    assert_same(known.score("faithfulness-estimate", steps=4, score=score).mean, wanted)


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
)


@pytest.mark.parametrize("activation", ["softmax", "sigmoid"])
@pytest.mark.parametrize("metric", [*AREAS, *SETTLED, *RANDOM])
def test_a_probability_is_the_score_of_a_model_that_applies_its_activation(activation: str, metric: str) -> None:
    """The same sets are drawn for the same image, so that no reference has to draw them."""
    known = Known(activation)
    ours = known.score(metric, score="prob", **RANDOM.get(metric, {}))
    twins = known.score(metric, twin=True, score="logit", **RANDOM.get(metric, {}))
    assert_same(ours.values, twins.values)


def test_every_faithfulness_metric_is_in_these_tests() -> None:
    assert {one.name for one in list_metrics() if one.family == "faithfulness"} == {*AREAS, *OTHERS}


# What raw scores are divided by, and what is said about it


@pytest.mark.parametrize("metric", AREAS)
def test_a_normalised_score_does_not_depend_on_scale_and_offset(metric: str) -> None:
    """f and 3 f + 5 are the same regression in another unit."""
    known = Known("raw")

    class Shifted(nn.Module):
        def forward(self, logits: Tensor) -> Tensor:
            return 3 * logits + 5

    known.twin = replace(known.twin, module=nn.Sequential(known.module, Shifted()))
    score = known.score(metric)
    assert_same(known.score(metric, twin=True).values, score.values)
    assert score.settings["score"] == "raw"
    assert score.settings["normalised_by"] == NORMALISED_BY
    assert score.settings["activation"] == "raw"
    assert score.span == (-math.inf, math.inf)
    assert f"{metric}: this model's scores are raw, so they are normalised by ({NORMALISED_BY})" in score.notes


@pytest.mark.parametrize("metric", AREAS)
def test_an_explicit_logit_is_taken_as_it_is(metric: str) -> None:
    known = Known("raw")
    score = known.score(metric, score="logit")
    assert "normalised_by" not in score.settings
    assert score.settings["score"] == "logit"
    if metric == "deletion":
        assert score.curve is not None
        assert_same(score.curve.y[0, 0], known.full)


@pytest.mark.parametrize("metric", AREAS)
def test_where_the_image_lowers_the_score_a_better_map_stays_better(metric: str) -> None:
    """The map that knows the effects is better than its opposite, also where the whole image has a negative score."""
    known = Known("raw", sign=1.0 if float(Known("raw").full) < 0 else -1.0)
    assert known.full < known.nothing == 0
    truth = known.by_class[TARGET].reshape(GRID)
    scores = []
    for maps in (truth, -truth):
        known.map = maps
        scores.append(known.score(metric))
    gap = scores[0].mean - scores[1].mean
    assert gap > 0 if scores[0].better == "higher" else gap < 0


@pytest.mark.parametrize("metric", [*AREAS, "completeness"])
def test_a_score_that_nothing_changes_is_undefined(metric: str) -> None:
    known = Known("raw")
    with torch.no_grad():
        known.module.weights[TARGET].zero_()
    score = known.score(metric)
    assert (score.n_valid, score.n_invalid) == (0, 1)
    assert bool(score.values.isnan().all())
    if metric != "completeness":
        assert any("is the same with nothing left" in note for note in score.notes)


def test_an_undefined_share_is_not_infinite() -> None:
    """irof of a logit that is exactly 0 for the whole image, 12 − 12, and not for its halves."""
    known = Known("softmax")
    known.image = torch.ones_like(known.image)
    known.image[..., 32:] = 2
    with torch.no_grad():
        known.module.embed.weight.fill_(2.0**-10)  # sums of these are exact
        known.module.weights[TARGET, :, :2], known.module.weights[TARGET, :, 2:] = 2, -1
        assert float(known.model.logits(known.image)[0, TARGET]) == 0
    assert int(superpixels_of(known.image, known.model.preprocess)[0].max()) > 0
    score = known.score("irof", score="logit")
    assert bool(score.values.isnan().all())
    assert score.n_invalid == 1


def test_scores_that_need_a_probability_are_refused_of_raw_ones() -> None:
    known = Known("raw")
    with pytest.raises(BadInput, match="score 'logprob' is made of a probability"):
        known.score("deletion", score="logprob")
    with pytest.raises(BadInput, match="score 'log-odds' is made of a probability"):
        known.score("deletion", score="log-odds")


def test_images_that_a_model_is_sure_of_need_a_probability() -> None:
    known = Known("raw")
    images = known.image.repeat(4, 1, 1, 1)
    with pytest.raises(NotApplicable, match="grid-pointing-game takes images that the model is sure of"):
        cv.evaluate(known.model, images, "random", "grid-pointing-game")


def test_accuracy_of_a_single_output_is_refused() -> None:
    class One(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, image: Tensor) -> Tensor:
            scores: Tensor = self.inner(image)
            return scores[:, :1]

    known = Known("raw")
    model = cv.wrap(One(known.module), size=(64, 64), layout=known.layout)
    with pytest.raises(BadInput, match="single output, which gives the same answer for any image"):
        cv.evaluate(model, known.image, "random", "deletion", score="accuracy", removal="mean")
    score = cv.evaluate(model, known.image, "random", "deletion", removal="mean")
    assert isinstance(score, cv.Score)
    assert score.settings["score"] == "raw", "one column that no module announces is raw where it is seen"


# What the model says of each image


def test_predictions_have_a_probability_where_there_is_one(known: Known) -> None:
    scores = cv.evaluate(known.model, known.image, ["random"], ["sparseness"])
    assert not isinstance(scores, cv.Score)
    (seen,) = scores.predictions  # type: ignore[attr-defined]
    logits = known.by_class.sum(1)
    assert seen.predicted == int(logits.argmax())
    if known.activation == "raw":
        assert seen.probability is None
    else:
        assert_same(seen.probability, applied(logits, known.activation).max())


# A single CLIP prompt, of which insertion said 1 for any map


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
    made = cv.explain(model, image, "leave-one-out")
    assert made.probabilities == (None,)
    assert made.class_scores[0] is not None
    assert -1 <= made.class_scores[0] <= 1
    assert float(made.maps.abs().max()) > 0
    opposite = replace(made, maps=-made.maps)
    values = [float(cv.evaluate(model, image, ex, "insertion").mean) for ex in (made, opposite)]  # type: ignore[union-attr]
    assert values[0] != values[1]
    assert 1.0 not in values


@pytest.mark.parametrize(
    ("metric", "wanted"),
    [
        ("faithfulness-correlation(runs=12)", 1.0),
        ("sensitivity-n(runs=6,sizes=3)", 1.0),
        ("faithfulness-estimate(steps=4)", 1.0),
        ("infidelity(runs=12)", 0.0),
        ("infidelity(runs=12,scaled=false)", 0.0),
        ("completeness", 0.0),
    ],
)
def test_the_effects_of_a_raw_linear_model_are_its_perfect_map(metric: str, wanted: float) -> None:
    known = Known("raw")
    known.map = known.by_class[TARGET].reshape(GRID)
    assert_same(known.score(metric).mean, wanted, magnitude=1.0)
