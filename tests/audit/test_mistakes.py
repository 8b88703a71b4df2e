"""cv.mistakes: rules of kinds, order, pairs, parts of an additive model, tokens dropped by hand, files, bad input."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

import clairvit as cv
from clairvit.audit.mistake_table import KINDS, ConfusedPair, MistakeRules, confused_pairs
from clairvit.audit.mistakes import Answer
from clairvit.data.open import open_data
from clairvit.errors import BadInput, NotApplicable, UnknownName
from clairvit.metrics.confidence_intervals import share_interval
from clairvit.metrics.context import EvalContext
from helpers.fixed_maps import fixed_map
from helpers.linear_patch_model import CLASSES, LinearPatches, effects, linear
from helpers.reference_token_dropping import logits_left
from helpers.rounding import assert_same
from helpers.small_study import photos
from helpers.tiny_models import build, double, wrapped

NAME, PATCHES = "timm-vit", 16
RULES = MistakeRules()


@pytest.mark.parametrize(
    ("first", "second", "rank", "expected"),
    [
        (0.8, 0.1, 2, "confident and wrong"),
        (0.8, 0.1, 9, "confident and wrong"),
        (0.79, 0.005, 6, "far down"),
        (0.79, 0.02, 5, "among many"),  # place 5 is not far, and the true class is none of the two
        (0.79, 0.02, 2, "between two"),
        (0.5, 0.3, 2, "between two"),
        (0.5, 0.29, 2, "among many"),
        (0.5, 0.4, 3, "among many"),
        (0.45, 0.4, 1, "between two"),  # right and unsure
        (0.45, 0.3, 1, "among many"),
        (0.45, 0.4, None, "between two"),  # no true class
        (0.2, 0.1, None, "among many"),
    ],
)
def test_the_first_rule_that_holds_names_the_kind(first: float, second: float, rank: int | None, expected: str) -> None:
    assert RULES.kind(first, second, rank) == expected
    assert expected in KINDS


def test_the_numbers_of_the_rules_are_options() -> None:
    assert MistakeRules(confident=0.9).kind(0.85, 0.1, 2) == "between two"
    assert MistakeRules(far=2).kind(0.5, 0.4, 3) == "far down"
    for arguments, message in (
        ({"confident": 1.5}, "confident=1.5"),
        ({"unsure": -1}, "unsure=-1"),
        ({"far": 0}, "far=0"),
    ):
        with pytest.raises(BadInput, match=message):
            MistakeRules(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("first", "rank", "expected"),
    [
        (0.9, 2, True),
        (0.4, 3, True),
        (0.9, 1, False),
        (0.4, 1, True),
        (0.5, 1, False),
        (0.4, None, True),
        (0.6, None, False),
    ],
)
def test_wrong_and_unsure_answers_are_listed(first: float, rank: int | None, expected: bool) -> None:
    assert RULES.is_listed(first, rank) is expected


def answer(row: int, first: float, true_probability: float, rank: int | None) -> Answer:
    true = None if rank is None else rank - 1
    return Answer(row, f"{row}.jpg", 0, 1, first, 0.05, true, true_probability, rank)


def test_wrong_answers_come_first_by_cost_or_confidence_then_the_least_sure() -> None:
    answers = [
        answer(0, 0.45, 0.45, 1),
        answer(1, 0.9, 0.05, 2),
        answer(2, 0.3, math.nan, None),
        answer(3, 0.6, 0.01, 3),
        answer(4, 0.6, 0.02, 3),
    ]
    by_cost = sorted(answers, key=lambda item: item.order("cost"))
    assert [item.row for item in by_cost] == [3, 4, 1, 2, 0]
    by_confidence = sorted(answers, key=lambda item: item.order("confidence"))
    assert [item.row for item in by_confidence] == [1, 3, 4, 2, 0]


def test_the_other_class_is_the_true_one_or_the_second_answer() -> None:
    assert answer(0, 0.9, 0.01, 7).other == 6
    assert answer(0, 0.4, 0.4, 1).other == 1
    assert answer(0, 0.4, math.nan, None).other == 1


def test_pairs_have_counts_and_intervals_of_the_true_class() -> None:
    answers = [("a", "a")] * 5 + [("a", "b")] * 3 + [("b", "a")] * 3 + [("a", "c")] + [("c", "c")] * 9
    assert confused_pairs(answers) == (
        ConfusedPair("a", "b", 3, 9, *share_interval(3, 9)),
        ConfusedPair("b", "a", 3, 3, *(pytest.approx(math.nan, nan_ok=True),) * 2),
        ConfusedPair("a", "c", 1, 9, *share_interval(1, 9)),
    )


def additive(seed: int, scale: float) -> tuple[cv.Model, Tensor, Tensor]:
    """Return an additive classifier of 6 × 6 patches, an image, and what each patch adds to each logit."""
    model, image = linear((6, 6), seed=seed)
    assert isinstance(model.module, LinearPatches)
    with torch.no_grad():
        model.module.weights.mul_(scale)
    return model, image, torch.stack([effects(model, image, index).flatten() for index in range(CLASSES)])


def test_the_parts_that_made_the_difference_are_those_of_an_additive_model() -> None:
    """Every patch adds a known amount to each logit: what is left without the top patches is a sum by hand."""
    outcomes = set()
    for seed in range(8):
        model, image, adds = additive(seed, scale=1.0)
        logits = adds.sum(1)
        predicted = int(logits.argmax())
        true = int(logits.argsort(descending=True)[1 + seed % 2])
        difference = adds[predicted] - adds[true]
        result = cv.mistakes(
            model,
            image,
            fixed_map(difference.reshape(6, 6)),
            labels=[true],
            removal="mean",
            parts=(0.5, 0.03, 0.1, 0.2),
        )
        assert result.sizes == (1, 4, 7, 18)
        order = difference.argsort(descending=True)
        left = torch.stack([adds[:, order[count:]].sum(1) for count in (0, *result.sizes)])  # [1 + S, classes]
        expected = left[:, predicted] - left[:, true]
        assert_same(result.differences[0], expected, magnitude=float(adds.abs().sum()))
        wins = [count for count, scores in zip(result.sizes, left[1:], strict=True) if int(scores.argmax()) == true]
        assert result.needed == (wins[0] if wins else None,)
        parts = torch.zeros(36, dtype=torch.bool)
        parts[order[: wins[0] if wins else 0]] = True
        assert torch.equal(result.parts[0].flatten(), parts)
        assert result.ranks == (2 + seed % 2,)
        assert_same(result.true_probabilities[0], logits.softmax(0)[true])
        assert_same(result.probabilities[0], logits.softmax(0).sort(descending=True).values[:2])
        assert result.costs == (pytest.approx(-float(logits.log_softmax(0)[true])),)
        outcomes.add(result.needed[0])
    assert None in outcomes
    assert len(outcomes) > 2, "some sizes, and none"


def test_random_sets_of_the_same_size_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of random sets: the top patches, which do it, and the first patches, whose sum is known."""
    outcomes = set()
    for seed in range(12):
        model, image, adds = additive(seed, scale=0.2)
        predicted, true = adds.sum(1).argsort(descending=True)[:2].tolist()
        difference = adds[predicted] - adds[true]
        first, top = torch.arange(36), difference.argsort(descending=True).argsort()

        def places(context: Any, count: int, stream: str = "", index: int = 0, top: Tensor = top) -> Tensor:
            return (top if (stream, index) == ("mistakes/random patches", 1) else first)[None]  # noqa: B023

        arguments: dict[str, Any] = {"labels": [true], "removal": "mean", "parts": (0.2, 0.5)}
        method = fixed_map(difference.reshape(6, 6))
        with monkeypatch.context() as patched:
            patched.setattr(EvalContext, "tie_order", places)
            result = cv.mistakes(model, image, method, draws=3, **arguments)
        (needed,) = result.needed
        if needed is None:
            assert result.random_wins == (None,)
        else:
            wins = int(adds[:, needed:].sum(1).argmax()) == true
            assert result.random_wins == (1 + 2 * wins,)
            outcomes.add(wins)
            assert cv.mistakes(model, image, method, draws=0, **arguments).random_wins == (None,)
    assert False in outcomes


def test_differences_are_those_of_tokens_dropped_by_hand() -> None:
    model, images = double(NAME)
    module = build(NAME).double()
    logits = module(images).detach()
    order = logits.argsort(1, descending=True)
    true = order[:, 2].tolist()
    result = cv.mistakes(model, images, "ixg", labels=true, by="confidence")
    contrasts = [cv.Contrast(int(order[row, 0]), true[row]) for row in range(2)]
    explanation = cv.explain(model, images, "ixg", target=contrasts)
    assert result.cost.forwards == 1 + len(result.sizes) + (result.draws if any(result.needed) else 0)
    assert result.cost.backwards == 1
    for place, row in enumerate(result.rows):
        assert result.names[place] == explanation.names[row]
        assert_same(result.maps[place], explanation.maps[row])
        assert result.contrasts[place] == explanation.targets[row]
        ranked = explanation.maps[row].flatten().argsort(descending=True)
        a, b = int(order[row, 0]), true[row]
        for number, count in enumerate((0, *result.sizes)):
            left = logits_left(module, images[row : row + 1], ranked[count:].sort().values[None])[0]
            size = float(left.abs().max())
            assert_same(result.differences[place, number], left[a] - left[b], magnitude=size)
            if result.needed[place] == count:
                assert int(left.argmax()) == b


def test_true_classes_decide_what_is_wrong_and_what_is_unsure() -> None:
    model, images = double(NAME, batch=6)
    answers = cv.explain(model, images, "ixg")
    predicted = [index for index in answers.classes if index is not None]
    labels: list[int | None] = [predicted[0], predicted[1], None, None, (predicted[4] + 1) % 5, (predicted[5] + 2) % 5]
    result = cv.mistakes(model, images, "ixg", labels=labels, unsure=1.0)
    assert {*result.rows[:2]} == {4, 5}
    assert result.is_wrong == (True, True, False, False, False, False)
    assert (result.images, result.labelled, result.wrong) == (6, 4, 2)
    assert result.true[2:].count(None) == 2
    costs = [cost for cost in result.costs[:2] if cost is not None]
    assert costs == sorted(costs, reverse=True)
    assert sum(pair.count for pair in result.pairs) == 2
    sure = cv.mistakes(model, images, "ixg", labels=labels, unsure=0.0)
    assert sure.rows == result.rows[:2]
    assert any("true class of 2 images is not known" in note for note in result.notes)
    assert len(result.of_pair(result.true[0] or "", result.predicted[0])) >= 1
    assert sum(len(result.of_kind(kind)) for kind in KINDS) == 6
    assert result.kind_counts == {kind: len(result.of_kind(kind)) for kind in KINDS}
    with pytest.raises(BadInput, match="no kind of mistake 'wrong'"):
        result.of_kind("wrong")  # type: ignore[arg-type]


def test_without_true_classes_only_unsure_answers_are_listed() -> None:
    model, images = double(NAME, batch=4)
    result = cv.mistakes(model, images, "ixg", unsure=0.9)
    probability = cv.explain(model, images, "ixg").probabilities
    assert sorted(result.rows) == [row for row, p in enumerate(probability) if p is not None and p < 0.9]
    assert result.probabilities[:, 0].tolist() == sorted(result.probabilities[:, 0].tolist())
    assert result.wrong == result.labelled == 0
    assert "only unsure answers are listed" in result.sentence
    assert result.true == (None,) * len(result)
    assert [name.partition(" − ")[2] for name in result.contrasts] == list(result.second)
    assert result.pairs == ()


def test_results_do_not_depend_on_the_batch() -> None:
    model, images = double(NAME, batch=10)  # more than one chunk
    labels = [0] * 10
    together = cv.mistakes(model, images, "ixg", labels=labels)
    for place, row in enumerate(together.rows):
        alone = cv.mistakes(model, images[row : row + 1], "ixg", labels=[0])
        assert_same(alone.maps[0], together.maps[place])
        assert_same(alone.differences, together[place].differences, magnitude=10.0)
        assert alone.needed[0] == together.needed[place]
        assert alone.random_wins[0] == together.random_wins[place]


def test_nothing_wrong_is_a_result_too(tmp_path: Path) -> None:
    model, images = double(NAME)
    predicted = list(cv.explain(model, images, "ixg").classes)
    result = cv.mistakes(model, images, labels=predicted, unsure=0.0)
    assert len(result) == 0
    assert repr(result) == "Mistakes(timm-vit: 0 wrong, 0 unsure of 2 answers)"
    assert json.loads(result.save(tmp_path / "none.json").read_text())["images"] == 2
    assert result.save(tmp_path / "none.csv").read_text().strip() == ""
    assert "0 of 2 answers are wrong" in result.save(tmp_path / "none.html").read_text()
    with pytest.raises(BadInput, match="no answer is wrong or unsure"):
        result.save(tmp_path / "none.png")
    with pytest.raises(BadInput, match="no answer is wrong or unsure"):
        result.plot()


@pytest.mark.slow
def test_pictures_and_pages_show_the_first_photos_and_say_how_many(tmp_path: Path) -> None:
    model, images = double(NAME, batch=5)
    labels = [(index + 1) % 5 for index in cv.explain(model, images, "ixg").classes if index is not None]
    result = cv.mistakes(model, images, "ixg", labels=labels, photos=3)
    assert [photo is not None for photo in result.photos] == [True, True, True, False, False]
    photo = result.photos[0]
    assert photo is not None
    assert (tuple(photo.shape), photo.dtype) == ((32, 32, 3), torch.uint8)
    assert result.plot().shape == (3, 3)
    assert result.plot(2).shape == (2, 3)
    with Image.open(result.save(tmp_path / "m.png", photos=2)) as picture:
        assert picture.height > picture.width / 3
    page = result.save(tmp_path / "m.html", photos=2).read_text()
    assert "2 of 5 wrong or unsure answers, sorted by cost" in page
    assert page.count("data:image/jpeg") == 2 * 3
    assert all(name in page for name in result.names)
    assert result.contrasts[0] in page
    assert result._repr_html_().count("<tr>") == 1 + 5
    with pytest.raises(BadInput, match="photos=0 was given"):
        result.plot(0)
    without = cv.mistakes(model, images, "ixg", labels=labels, photos=0)
    with pytest.raises(BadInput, match="no photo was kept"):
        without.save(tmp_path / "without.png")
    assert "data:image" not in without.save(tmp_path / "without.html").read_text()


def test_names_of_folders_may_be_the_classes(tmp_path: Path) -> None:
    photos(tmp_path / "photos", 6)
    model = wrapped(NAME)
    model = replace(model, labels=tuple("0123456"))
    files = sorted(str(file) for file in (tmp_path / "photos").glob("*/*.png"))
    result = cv.mistakes(model, str(tmp_path / "photos"), "ixg", labels="folders", unsure=1.0)
    assert result.labelled == 6
    for name, true in zip(result.names, result.true, strict=True):
        assert Path(name).parent.name == true
    listed = cv.mistakes(model, files, "ixg", labels="folders", unsure=1.0)
    assert listed.true == result.true
    with pytest.raises(BadInput, match="images that are not files"):
        cv.mistakes(model, torch.zeros(1, 3, 32, 32), labels="folders")
    with pytest.raises(BadInput, match="data set that is opened already"):
        cv.mistakes(model, open_data("scenes:1").dataset, labels=[0])
    with pytest.raises(BadInput, match="labels='truth' was given"):
        cv.mistakes(model, files, labels="truth")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"by": "loss"}, UnknownName, "no order 'loss'; expected one of cost, confidence"),
        ({"parts": ()}, BadInput, r"parts=\(\) was given"),
        ({"parts": (0.1, 1.0)}, BadInput, "expected shares of the patches between 0 and 1"),
        ({"draws": -1}, BadInput, "draws=-1"),
        ({"photos": True}, BadInput, "photos=True"),
        ({"confident": 2}, BadInput, "confident=2"),
        ({"labels": [1]}, BadInput, "1 labels were given for 2 images"),
        ({"labels": ["no such class"] * 2}, BadInput, "no such class"),
        ({"method": "rollout"}, NotApplicable, "the same map for every class"),
        ({"method": "no-such-method"}, UnknownName, "no-such-method"),
        ({"removal": "nothing"}, (BadInput, UnknownName), "nothing"),
    ],
)
def test_bad_input_is_one_sentence(arguments: dict[str, Any], error: Any, message: str) -> None:
    model, images = double(NAME)
    with pytest.raises(error, match=message):
        cv.mistakes(model, images, **{"labels": [0, 0], "method": "ixg", "unsure": 1.0} | arguments)


def test_models_without_one_answer_are_refused() -> None:
    model, images = double(NAME)
    sigmoid = cv.wrap(model.module, size=32, activation="sigmoid")
    with pytest.raises(NotApplicable, match=r"do not exclude each other \(sigmoid\)"):
        cv.mistakes(sigmoid, images)
    raw = cv.wrap(model.module, size=32, activation="raw")
    with pytest.raises(NotApplicable, match="its outputs are no classes"):
        cv.mistakes(raw, images)
