"""FunnyBirds' questions: on maps by hand and a model whose use of the parts is known, then the contract of metrics."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import timm
import torch
from numpy.typing import NDArray
from PIL import Image
from scipy import ndimage
from scipy.stats import spearmanr
from torch import Tensor, nn

import clairvit as cv
from clairvit.data.part_scenes import CLASSES, PARTS, PartScenePlan, draw, part_scenes, plan
from clairvit.data.parts import PartTable, RemovableParts
from clairvit.errors import BadInput
from clairvit.execution import ExecutionOptions
from clairvit.metrics.context import EvalContext
from clairvit.metrics.parts import THRESHOLDS, component_masks
from clairvit.metrics.registry import MetricOutput, list_metrics, resolve_metric
from clairvit.models.images import prepare
from clairvit.models.model import Model
from clairvit.targets.base import TargetBatch
from clairvit.targets.resolve import resolve_for
from clairvit.tracing.trace import Trace
from helpers.module_fingerprint import differences, fingerprint, surroundings
from helpers.rounding import assert_same

# Four parts side by side, and below them two distractors, all blocks of 4 × 4 pixels that are 1 on a background of 0.
# Class x shares the parts 0 and 1 with y, 2 and 3 with z, and none with w.
TABLE = PartTable(tuple("abcd"), ("x", "y", "z", "w"), ((0, 0, 0, 0), (0, 0, 1, 1), (1, 1, 0, 0), (1, 1, 1, 1)))
BLOCKS = [(0, 0), (0, 1), (0, 2), (0, 3), (2, 0), (2, 2)]
MASKS = torch.zeros(6, 12, 16, dtype=torch.bool)
for block, (row, column) in enumerate(BLOCKS):
    MASKS[block, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4] = True
WEIGHTS = torch.tensor(  # [C, K]: what a visible component adds to the logit of a class
    [[4.0, 3.0, 2.0, 1.0, 0, 0], [3.5, 2.5, 0, 0, 0, 0], [0, 0, 1.5, 0.5, 0, 0], [0, 0, 0, 0, 0, 0]]
)
PART_METRICS = [metric for metric in list_metrics() if "parts" in metric.needs]
EXACT = "dilation=0"


class AdditiveModel(nn.Module):
    """Logits are weights · visible components, plus ½ for class w: x 10, y 6, z 2, w ½ on the whole image."""

    def __init__(self, weights: Tensor = WEIGHTS) -> None:
        super().__init__()
        self.weights = nn.Parameter(weights)

    def forward(self, pixels: Tensor) -> Tensor:
        visible = torch.einsum("bhw,khw->bk", pixels[:, 0], MASKS.to(pixels)) / 16
        return visible @ self.weights.T.to(pixels) + torch.tensor([0, 0, 0, 0.5]).to(pixels)


@dataclass(eq=False)
class HandContext(EvalContext):
    """A context whose maps of other classes are given: class -> importance of the components."""

    other_maps: Any = None

    def explain(  # type: ignore[override]
        self, pixels: Tensor, model: Any = None, seed: Any = None, target: TargetBatch | None = None
    ) -> Tensor:
        assert target is not None
        return torch.stack([block_map(self.other_maps[c]) for c in target.classes])[None]


def draw_blocks(keep: NDArray[np.bool_]) -> Tensor:
    """Images [V, 3, 12, 16] with the blocks of keep, bool [V, K]."""
    visible = torch.from_numpy(keep).double()
    return torch.einsum("vk,khw->vhw", visible, MASKS.double())[:, None].expand(-1, 3, -1, -1)


def block_map(importance: list[float]) -> Tensor:
    """A map [12, 16] with these sums on the components and 0 elsewhere."""
    return torch.einsum("k,khw->hw", torch.tensor(importance, dtype=torch.float64) / 16, MASKS.double())


def context_of(
    *importance: list[float], label: int | None = 0, target: int = 0, weights: Tensor = WEIGHTS, other_maps: Any = None
) -> HandContext:
    """One image of class x, and one method for each list of importances."""
    parts = RemovableParts(MASKS, TABLE, draw_blocks)
    pixels = draw_blocks(np.ones((1, 6), bool))
    model = Model(AdditiveModel(weights), "additive", labels=TABLE.classes)
    logits = model.module(pixels).detach()
    (resolved,) = resolve_for(model, [target], logits)
    recording = SimpleNamespace(model=model, forwards=0, backwards=0, options=ExecutionOptions())
    trace: Any = SimpleNamespace(pixels=pixels, logits=logits, target=resolved, recording=recording)
    maps = tuple(block_map(sums)[None] for sums in importance)
    return HandContext(cast(Trace, trace), (), maps, labels=(label,), parts=(parts,), other_maps=other_maps)


def score(text: str, *importance: list[float], **options: Any) -> list[float]:
    output = resolve_metric(text)(context_of(*importance, **options))
    values: Tensor = output.values if isinstance(output, MetricOutput) else output
    return values[:, 0].tolist()


PERFECT, DISTRACTED, HALF = [4.0, 3, 2, 1, 0, 0], [0.0, 0, 0, 0, 5, 5], [4.0, 3, 0, 0, 0, 0]


def test_the_hand_made_model_is_what_the_tests_below_assume() -> None:
    context = context_of(PERFECT)
    assert context.trace.logits.tolist() == [[10, 6, 2, 0.5]]
    assert TABLE.sufficient_sets(0) == ((0, 2), (0, 3), (1, 2), (1, 3))
    assert TABLE.contrast_classes(0) == (1, 2)


@pytest.mark.parametrize(
    ("metric", "perfect", "distracted", "half"),
    [
        ("controlled-synthetic-data-check", 1, 0, 1 / 2),  # half: one of the two parts of a sufficient set
        ("preservation-check", 1, 0, 1),  # parts 0 and 1 alone: x 7, y 6
        ("deletion-check", 1, 0, 0),  # without them: x 3, z 2
        ("distractibility", 1, 0, 1),
        ("part-completeness", 1, 0, (1 / 2 + 1 + 0) / 6 + 1 / 2),
    ],
)
def test_checks_at_one_threshold(metric: str, perfect: float, distracted: float, half: float) -> None:
    values = score(f"{metric}(threshold=0.05,{EXACT})", PERFECT, DISTRACTED, HALF)
    assert values == [perfect, distracted, pytest.approx(half, abs=1e-12)]


def test_a_part_below_the_threshold_is_not_important() -> None:
    """At 0.35 of the sum 10, part 0 alone is important: x 4, y 3.5 with it, x 6, y 2.5 without."""
    checks = ("controlled-synthetic-data-check", "preservation-check", "deletion-check")
    assert [score(f"{name}(threshold=0.35,{EXACT})", PERFECT)[0] for name in checks] == [1 / 2, 1, 0]


def test_the_threshold_is_chosen_by_completeness() -> None:
    """A map on the distractors is most complete at the last threshold, ½, at which nothing is important."""
    output = resolve_metric(f"distractibility({EXACT})")(context_of(DISTRACTED, PERFECT))
    assert torch.equal(output.x, THRESHOLDS)
    assert (len(output.x), float(output.x[0]), float(output.x[-1])) == (80, 0.01, 0.5)
    assert output.y[0, 0].tolist() == [0] * 79 + [1]
    assert output.criterion[0, 0].tolist() == [0] * 79 + [1 / 2]
    assert output.criterion[1, 0, 0] == 1
    assert output.chooses == "threshold"
    assert output.values[:, 0].tolist() == [1, 1]


def test_irrelevant_parts_of_the_object_count_as_distractors() -> None:
    """drop=0.25: of the logit 10, parts 2 and 3 (drops 2 and 1) are irrelevant next to the two distractors."""
    assert score(f"distractibility(threshold=0.05,drop=0.25,{EXACT})", PERFECT, HALF, [1.0] * 6) == [1 / 2, 1, 0]


def test_negative_values() -> None:
    """Of a map with a negative sum, signed, all that is near 0 is important; `positive` leaves part 0 alone."""
    text, negative = f"distractibility(threshold=0.1,{EXACT})", [1.0, -5, 0, 0, 0, 0]
    signed, positive = (score(f"{text[:-1]},relevance={kind})", negative)[0] for kind in ("signed", "positive"))
    assert (signed, positive) == (0, 1)
    tied = score(f"single-deletion({EXACT},relevance=positive)", [4.0, -3, -2, 1, 0, 0])[0]
    assert tied == pytest.approx(0.5 + 0.5 * 1.5 / math.sqrt(5 * 4.5))  # ranks 4, 1½, 1½, 3 and 4, 3, 2, 1


def test_single_deletion() -> None:
    values = score(f"single-deletion({EXACT})", PERFECT, [1.0, 2, 3, 4, 9, 9], [4.0, 3, 1, 2, 0, 0], [1.0] * 6)
    assert values[:3] == [pytest.approx(1), pytest.approx(0), pytest.approx(0.5 + 0.5 * 0.8)]
    assert math.isnan(values[3])  # all parts alike: no rank


@pytest.mark.parametrize(
    ("of_y", "of_z", "expected"),
    [
        ([3.5, 2.5, 0, 0, 0, 0], [0, 0, 1.5, 0.5, 0, 0], 1),  # each on the parts that its class shares with the image
        ([0, 0, 1.5, 0.5, 0, 0], [3.5, 2.5, 0, 0, 0, 0], 0),  # swapped
        ([1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 0, 0], 0),  # the same map for both
        ([2, 2, 2, 2, 0, 0], [1, 1, 1, 1, 0, 0], 1 / 2),
    ],
)
def test_target_sensitivity(of_y: list[float], of_z: list[float], expected: float) -> None:
    maps = {1: [float(v) for v in of_y], 2: [float(v) for v in of_z]}
    assert score(f"target-sensitivity({EXACT})", PERFECT, other_maps=maps) == [expected]


def test_target_sensitivity_leaves_out_images_where_the_model_does_not_follow_the_parts() -> None:
    weights = WEIGHTS.clone()
    weights[1] = torch.tensor([0.0, 0, 1, 1, 0, 0])  # y falls without the parts that it shares with z
    maps = {1: PERFECT, 2: PERFECT}
    assert math.isnan(score("target-sensitivity", PERFECT, weights=weights, other_maps=maps)[0])


def test_the_model_is_scored_by_itself() -> None:
    weights = WEIGHTS.clone()
    weights[0, 5] = 2.0  # class x uses one of the two distractors
    assert score("background-independence", PERFECT, HALF) == [1, 1]
    assert score("background-independence", PERFECT, weights=weights) == [1 / 2]
    assert score("background-independence(drop=0.3)", PERFECT, weights=weights) == [1]
    assert score("part-accuracy", PERFECT) == [1]
    assert score("part-accuracy(removed=1)", PERFECT) == [1]
    assert score("part-accuracy(removed=4)", PERFECT) == [1]  # every class has the parts left, which are none
    assert score("part-accuracy", PERFECT, label=1) == [0]


def test_what_is_undefined() -> None:
    """A map of another class than the predicted one says nothing about the prediction; CSDC needs the true class."""
    for name in ("preservation-check", "deletion-check", "controlled-synthetic-data-check"):
        assert math.isnan(score(f"{name}(threshold=0.05)", PERFECT, target=1)[0])
    assert math.isnan(score("controlled-synthetic-data-check(threshold=0.05)", PERFECT, label=1)[0])
    assert score("preservation-check(threshold=0.05)", PERFECT, label=1) == [1]
    assert math.isnan(score("part-accuracy", PERFECT, label=None)[0])


def test_dilation_by_two_pixels() -> None:
    parts = RemovableParts(MASKS, TABLE, draw_blocks)
    grown = component_masks([parts], 2)[0]
    assert grown[1].nonzero().amin(0).tolist() == [0, 2]  # rows 0 … 3, columns 4 … 7, two more on each side
    assert grown[1].nonzero().amax(0).tolist() == [5, 9]
    assert int(grown[1].sum()) == 6 * 8
    assert torch.equal(component_masks([parts], 0)[0], MASKS)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "preservation-check(threshold=2)",
            "threshold=2 was given; expected from 0 to 1 of the map's sum, such as threshold=0.05",
        ),
        ("distractibility(drop=1)", "drop=1 was given; expected 0 or more and below 1 of the score, such as drop=0.05"),
        ("single-deletion(dilation=-1)", "dilation=-1 was given; expected 0 or more pixels, such as dilation=2"),
        ("part-accuracy(removed=5)", "removed=5 was given; expected a number of parts to remove, 0 … 4"),
    ],
)
def test_options_that_cannot_be(text: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        score(text, PERFECT)


# The contract, on part scenes and a small ViT of random weights


@pytest.fixture(scope="module")
def model() -> cv.Model:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = timm.create_model(
            "vit_tiny_patch16_224", img_size=64, embed_dim=24, depth=2, num_heads=2, num_classes=len(CLASSES)
        )
    return cv.wrap(module.double(), name="small", size=64, resize=64, labels=CLASSES, mean=0.5, std=0.5)


def text_of(name: str, threshold: float | None = None) -> str:
    options = {metric.name: metric.options for metric in PART_METRICS}[name]
    return f"{name}(threshold={threshold})" if threshold is not None and "threshold" in options else name


def test_the_contract_of_metrics_with_parts(model: cv.Model) -> None:
    dataset, names = part_scenes(3, size=64), [text_of(metric.name, 0.1) for metric in PART_METRICS]
    before, around = fingerprint(model.module), surroundings()
    together = cv.evaluate(model, dataset, ["ixg", "rollout"], names, baselines=False, batch_size=4)
    assert differences(before, fingerprint(model.module)) == []
    assert differences(around, surroundings()) == []
    again = cv.evaluate(model, dataset, ["ixg", "rollout"], names, baselines=False)
    alone = [cv.evaluate(model, dataset.take([row]), ["ixg", "rollout"], names, baselines=False) for row in range(3)]
    for key, result in together.items():
        values = result.values
        defined = values[values.isfinite()]
        assert ((defined >= 0) & (defined <= 1)).all(), key
        assert values.isfinite().all() or resolve_metric(key[1]).metric.undefined, key
        assert (result.better, result.span) == ("higher", (0, 1)), key
        assert_same(values.nan_to_num(7), again[key].values.nan_to_num(7), label=str(key))
        assert_same(values.nan_to_num(7), torch.cat([s[key].values for s in alone]).nan_to_num(7), label=str(key))


def test_the_authors_protocol_step_by_step(model: cv.Model) -> None:
    """Every picture drawn anew without the parts in question, one image and one threshold at a time."""
    threshold, dataset = 0.1, part_scenes(3, size=64)
    images = torch.stack([dataset.read(row, model).pixels for row in range(3)])
    maps = cv.explain(model, images, "ixg").maps
    names = ["preservation-check", "deletion-check", "distractibility"]
    texts = [*(f"{name}(threshold={threshold})" for name in names), "single-deletion", "background-independence"]
    scores = cv.evaluate(model, dataset, ["ixg"], texts, baselines=False)
    for row in range(3):
        planned = plan(0, row, 64)

        def logits(removed: set[int], planned: PartScenePlan = planned) -> Tensor:
            parts = tuple(part for k, part in enumerate(planned.parts) if k not in removed)
            blobs = tuple(blob for k, blob in enumerate(planned.distractors) if k + len(PARTS) not in removed)
            picture = Image.fromarray(draw(replace(planned, parts=parts, distractors=blobs)).full)
            with torch.no_grad():
                return model.logits(prepare([picture], model).pixels)[0]

        components = draw(planned).components
        fine = maps[row].repeat_interleave(16, 0).repeat_interleave(16, 1)  # [64, 64]
        importance = []
        for k in range(components.max()):
            near = ndimage.binary_dilation(components == k + 1, np.ones((5, 5)))
            importance.append(float(fine[torch.from_numpy(near)].sum()))
        every, original = range(len(importance)), logits(set())
        target = int(original.argmax())
        important = {k for k in every if importance[k] > threshold * float(fine.sum())}
        body_parts = set(range(len(PARTS)))
        drops = [float(original[target] - logits({k})[target]) for k in every]
        irrelevant = {k for k in every if drops[k] < 0.05 * abs(float(original[target]))}
        background = set(every) - body_parts
        expected = [
            float(int(logits(body_parts - important).argmax()) == target),
            float(int(logits(body_parts & important).argmax()) != target),
            1 - len(important & irrelevant) / len(irrelevant),
            0.5 + 0.5 * spearmanr(importance[: len(PARTS)], drops[: len(PARTS)]).statistic,
            len(background & irrelevant) / len(background),
        ]
        for text, value in zip(texts, expected, strict=True):
            assert_same(scores["ixg", text].values[row], torch.tensor(value, dtype=torch.float64), label=text)


def test_one_threshold_for_the_set_and_all_checks(model: cv.Model) -> None:
    names = [metric.name for metric in PART_METRICS if metric.whole_set]
    assert len(names) == 5
    dataset = part_scenes(9, size=64)  # two chunks of images
    scores = cv.evaluate(model, dataset, ["ixg", "rollout"], names, baselines=False)
    for method in ("ixg", "rollout"):
        curve = scores[method, "part-completeness"].curve
        assert curve is not None
        best = int(curve.y.nanmean(0).argmax())
        for name in names:
            result = scores[method, name]
            assert result.curve is not None
            assert result.settings["threshold"] == float(THRESHOLDS[best])
            assert torch.equal(result.values.nan_to_num(7), result.curve.y[:, best].nan_to_num(7))
    given = cv.explain(model, torch.stack([dataset.read(row, model).pixels for row in range(9)]), "ixg")
    by_hand = cv.evaluate(model, dataset, given, "part-completeness", baselines=False)
    assert_same(by_hand.values, scores["ixg", "part-completeness"].values)


def test_a_map_with_nan_has_no_score(model: cv.Model) -> None:
    dataset = part_scenes(2, size=64)
    ex = cv.explain(model, torch.stack([dataset.read(row, model).pixels for row in range(2)]), "ixg")
    maps = ex.maps.clone()
    maps[0, 1, 1] = math.nan
    for metric in PART_METRICS:
        if metric.name == "target-sensitivity":
            continue  # it explains the image again
        result = cv.evaluate(model, dataset, replace(ex, maps=maps), metric.name, baselines=False)
        assert math.isnan(result.values[0]), metric.name


def test_other_images_are_refused(model: cv.Model) -> None:
    images = torch.zeros(1, 3, 64, 64, dtype=torch.float64)
    for metric in PART_METRICS:
        with pytest.raises(BadInput, match=r"removes parts of an object .* expected a data set with removable parts"):
            cv.evaluate(model, images, "ixg", metric.name, labels=[0], baselines=False)
