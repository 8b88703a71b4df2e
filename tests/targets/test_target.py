"""Targets: every way to state what is explained, and every error."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from clairvit.errors import BadInput, UnknownName
from clairvit.targets.class_ import find_class
from clairvit.targets.contrast import Contrast
from clairvit.targets.resolve import top
from helpers.rounding import assert_same, growth
from helpers.targets import resolve_targets

LABELS = ("Bengal", "Beagle", "Egyptian Mau", "Pug", "crane, bird", "crane, machine")


@pytest.fixture
def logits() -> Tensor:
    return torch.tensor([[0.0, 3.0, 1.0, -1.0, 0.5, 0.2], [2.0, 0.0, 1.0, 0.1, 0.3, 0.4]], requires_grad=True)


def test_predicted_class(logits: Tensor) -> None:
    (target,) = resolve_targets(None, logits, LABELS)
    assert target.names == ("Beagle", "Bengal")
    assert target.classes == (1, 0)
    assert target.score == "logit"
    assert torch.equal(target(logits), torch.tensor([3.0, 2.0]))


@pytest.mark.parametrize(
    "spec", [2, np.int64(2), torch.tensor(2), "2", "Egyptian Mau", "egyptian mau", "EGY", " Egyp "]
)
def test_one_class_for_all(logits: Tensor, spec: object) -> None:
    (target,) = resolve_targets(spec, logits, LABELS)  # type: ignore[arg-type]
    assert target.classes == (2, 2)
    assert target.names == ("Egyptian Mau",) * 2
    assert torch.equal(target(logits), torch.tensor([1.0, 1.0]))


def test_gradient_is_one_at_the_class(logits: Tensor) -> None:
    (target,) = resolve_targets([3, "Pug"], logits, LABELS)
    (gradient,) = torch.autograd.grad(target(logits).sum(), logits)
    expected = torch.zeros(2, 6)
    expected[:, 3] = 1
    assert torch.equal(gradient, expected)


def test_names() -> None:
    assert find_class("crane, machine", LABELS, 6) == 5
    assert find_class("machine", LABELS, 6) == 5  # a synonym
    assert find_class("Ben", LABELS, 6) == 0
    with pytest.raises(
        BadInput, match=r"'be' could be any of 2: 'Bengal' \(0\), 'Beagle' \(1\); type more of the name"
    ):
        find_class("be", LABELS, 6)
    with pytest.raises(BadInput, match=r"'crane' could be any of 2"):
        find_class("crane", LABELS, 6)
    with pytest.raises(UnknownName, match=r"no class 'Pugg' among the model's 6\. Did you mean 'Pug'\?"):
        find_class("Pugg", LABELS, 6)
    with pytest.raises(UnknownName, match="no class ''"):
        find_class("", LABELS, 6)


def test_exact_name_beats_longer_ones_and_digits_can_be_names() -> None:
    assert find_class("cat", ("cat", "cat fish", "Cat"), 3) == 0
    assert find_class("cAt", ("cat", "cat fish"), 2) == 0
    assert find_class("1", ("3", "1"), 2) == 1
    assert find_class("0", ("3", "1"), 2) == 0
    with pytest.raises(BadInput, match=r"could be any of 2: 'crane' \(0\), 'crane' \(1\).*or the index"):
        find_class("crane", ("crane", "crane"), 2)


def test_without_labels(logits: Tensor) -> None:
    (target,) = resolve_targets(4, logits)
    assert target.names == ("class 4", "class 4")
    with pytest.raises(BadInput, match="given by name, and this model has no class names; give an index from 0 to 5"):
        resolve_targets("Pug", logits)


@pytest.mark.parametrize("index", [6, -1, "6", "-1"])
def test_out_of_range(logits: Tensor, index: object) -> None:
    with pytest.raises(BadInput, match=rf"There is no class {index}: the model has 6; give an index from 0 to 5"):
        resolve_targets(index, logits, LABELS)  # type: ignore[arg-type]


@pytest.mark.parametrize("spec", [True, 1.5, object(), {"a": 1}, [[1, 2], [3, 4]]])
def test_invalid_targets_raise(logits: Tensor, spec: object) -> None:
    with pytest.raises(BadInput, match="expected a class index, a class name, Contrast"):
        resolve_targets(spec, logits, LABELS)  # type: ignore[arg-type]


# lists --------------------------------------------------------------------------------------------------------------


def test_list_is_one_for_each_image(logits: Tensor) -> None:
    for spec in (["Pug", None], ("Pug", None)):
        (target,) = resolve_targets(spec, logits, LABELS)
        assert target.classes == (3, 0)
        assert torch.equal(target(logits), torch.tensor([-1.0, 2.0]))
    assert resolve_targets(torch.tensor([1, 2]), logits, LABELS)[0].classes == (1, 2)  # type: ignore[arg-type]
    assert resolve_targets(np.array([1, 2]), logits, LABELS)[0].classes == (1, 2)  # type: ignore[arg-type]


def test_list_for_a_single_image_is_several_targets(logits: Tensor) -> None:
    targets = resolve_targets(["Pug", None, Contrast("Pug", "Bengal")], logits[:1], LABELS, single=True)
    assert [t.names for t in targets] == [("Pug",), ("Beagle",), ("Pug − Bengal",)]
    assert [t(logits[:1]).item() for t in targets] == [-1.0, 3.0, -1.0]


@pytest.mark.parametrize(
    ("spec", "rows", "message"),
    [
        (
            [1, 2, 3],
            2,
            "3 targets were given for 2 images; give one for all, or a list of exactly 2, one for each image",
        ),
        ([1], 2, "1 target was given for 2 images"),
        ([1, 2], 1, "2 targets were given for 1 image;"),
        ([], 2, "0 targets were given for 2 images"),
    ],
)
def test_wrong_number(logits: Tensor, spec: list[int], rows: int, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        resolve_targets(spec, logits[:rows], LABELS)
    with pytest.raises(BadInput, match="empty list of targets"):
        resolve_targets([], logits[:1], LABELS, single=True)


# contrasts ----------------------------------------------------------------------------------------------------------


def test_contrast(logits: Tensor) -> None:
    (target,) = resolve_targets(Contrast(None, "Pug"), logits, LABELS)
    assert target.names == ("Beagle − Pug", "Bengal − Pug")
    assert target.classes == (None, None)
    assert_same(target(logits), torch.tensor([4.0, 1.9]), growth=growth(1, 2))  # float32: one difference
    (target,) = resolve_targets(Contrast(1, "3"), logits, LABELS, score="prob")
    chances = logits.softmax(-1)
    assert_same(target(logits), chances[:, 1] - chances[:, 3], growth=growth(2, 6), magnitude=1.0)  # float32, 6 classes


def test_contrast_with_itself(logits: Tensor) -> None:
    with pytest.raises(BadInput, match="Contrast of 'Bengal' with itself is 0 everywhere"):
        resolve_targets(Contrast(None, "Bengal"), logits, LABELS)
    with pytest.raises(BadInput, match="expected a class index"):
        resolve_targets(Contrast(1, lambda scores: scores[:, 0]), logits, LABELS)  # type: ignore[arg-type]


# scores -------------------------------------------------------------------------------------------------------------


def test_scores(logits: Tensor) -> None:
    actual = {
        s: resolve_targets(2, logits, LABELS, score=s)[0](logits)
        for s in ("logit", "prob", "logprob", "neg_loss", "loss")
    }
    expected = logits.log_softmax(-1)[:, 2]
    assert torch.equal(actual["logprob"], expected)
    assert torch.equal(actual["neg_loss"], expected)
    assert torch.equal(actual["loss"], -expected)
    assert_same(actual["prob"], expected.exp(), growth=growth(3, 6))  # float32: exp of a logarithm of a sum of 6
    assert torch.equal(actual["logit"], logits[:, 2])
    with pytest.raises(
        UnknownName, match=r"no score 'probs'\. Did you mean 'prob'.*logit, prob, logprob, neg_loss, loss"
    ):
        resolve_targets(2, logits, LABELS, score="probs")


def test_single_output_is_a_raw_score_unless_it_is_a_sigmoid() -> None:
    logits = torch.tensor([[2.0], [-1.0]], requires_grad=True)
    (target,) = resolve_targets(None, logits, score="prob", activation="sigmoid")
    assert torch.allclose(target(logits), torch.tensor([2.0, -1.0]).sigmoid())
    assert top(logits, activation="sigmoid")[0] == [("class 0", pytest.approx(torch.tensor(2.0).sigmoid().item()))]
    with pytest.raises(BadInput, match="this model's scores are raw"):
        resolve_targets(None, logits, score="prob")
    assert top(logits)[0] == [("class 0", 2.0)]


def test_half_precision_probabilities_are_computed_in_full() -> None:
    logits = torch.tensor([[0.0, 20.0]], dtype=torch.float16, requires_grad=True)
    (target,) = resolve_targets(0, logits, score="prob")
    assert target(logits).dtype == torch.float32
    assert target(logits).item() == pytest.approx(2.06e-9, rel=1e-2)


# functions ----------------------------------------------------------------------------------------------------------


def margin(scores: Tensor) -> Tensor:
    best = scores.topk(2, dim=-1).values
    return best[:, 0] - best[:, 1]


def test_function(logits: Tensor) -> None:
    (target,) = resolve_targets(margin, logits, LABELS, score="prob")
    assert target.names == ("margin", "margin")
    assert target.classes == (None, None)
    assert target.score == "custom"
    assert torch.equal(target(logits), torch.tensor([2.0, 1.0]))
    (target,) = resolve_targets(lambda scores: scores[0, 3], logits[:1], LABELS)
    assert torch.equal(target(logits[:1]), torch.tensor([-1.0]))
    assert target.names == ("custom target",)


def test_functions_and_classes_mixed(logits: Tensor) -> None:
    (target,) = resolve_targets([lambda scores: scores[0, 0] * 2, "Pug"], logits.detach() + 1, LABELS)
    assert target.names == ("custom target", "Pug")
    assert target.score == "logit"
    assert_same(target(logits.detach() + 1), torch.tensor([2.0, 1.1]), growth=growth(1, 2))  # float32: one sum


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda s: s, r"returned shape \[2, 6\] for scores \[2, 6\]; expected a tensor \[2\]"),
        (lambda s: s.sum(), r"returned shape \[\] for scores"),
        (lambda s: 3.0, "returned a float"),
        (lambda s: s[:, 9], r"failed on the model's output \[2, 6\] \(IndexError"),
        (lambda s: s.argmax(-1).float(), "does not depend on the scores in a way that has a gradient"),
        (lambda s: s.detach()[:, 0], "leave out argmax, detach"),
        (lambda s: s[:, 0] / 0, "NaN or infinite values"),
    ],
)
def test_bad_functions(logits: Tensor, function: object, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        resolve_targets(function, logits, LABELS)  # type: ignore[arg-type]


def test_functions_are_checked_even_without_gradients(logits: Tensor) -> None:
    with torch.no_grad():
        (target,) = resolve_targets(margin, logits)
    with torch.inference_mode():
        frozen = logits * 1
        resolve_targets(margin, frozen)
    resolve_targets(margin, frozen)
    assert target(logits).requires_grad


# rows, embeddings, NaN, top -----------------------------------------------------------------------------------------


def test_take(logits: Tensor) -> None:
    (target,) = resolve_targets(["Pug", Contrast(0, 1)], logits, LABELS)
    three = target.take([1, 0, 1])
    assert three.names == ("Bengal − Beagle", "Pug", "Bengal − Beagle")
    assert torch.equal(three(logits[[1, 0, 1]]), torch.tensor([2.0, -1.0, 2.0]))
    (target,) = resolve_targets(margin, logits)
    assert torch.equal(target.take([1])(logits[1:]), torch.tensor([1.0]))
    with pytest.raises(BadInput, match=r"target for 2 images got scores of shape \[1, 6\].*take"):
        target(logits[:1])


def test_embedding_has_no_prediction(logits: Tensor) -> None:
    with pytest.raises(BadInput, match="gives an embedding, so it predicts no class; load it with prompts"):
        resolve_targets(None, logits, classifier=False)
    with pytest.raises(BadInput, match="score 'prob' needs classes"):
        resolve_targets(1, logits, classifier=False, score="prob")
    assert resolve_targets(1, logits, classifier=False)[0].names == ("class 1", "class 1")
    assert resolve_targets(margin, logits, classifier=False)[0].classes == (None, None)


def test_nan_scores(logits: Tensor) -> None:
    broken = logits.detach().clone()
    broken[1, 3] = float("nan")
    for ask in (lambda: resolve_targets(None, broken), lambda: top(broken)):
        with pytest.raises(BadInput, match="scores for image 2 are NaN or infinite"):
            ask()


def test_top(logits: Tensor) -> None:
    best = top(logits, LABELS, k=2)
    assert [[name for name, _ in row] for row in best] == [["Beagle", "Egyptian Mau"], ["Bengal", "Egyptian Mau"]]
    assert best[0][0][1] == pytest.approx(float(logits.softmax(-1)[0, 1].detach()))
    assert [len(row) for row in top(logits, k=50)] == [6, 6]
