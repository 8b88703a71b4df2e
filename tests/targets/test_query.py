"""Query: class scores and boxes of a detector's queries, against autograd and passes by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

import clairvit as cv
from clairvit.errors import BadInput, ClairError, NotApplicable, UnknownName
from clairvit.perturbation.token_dropping import drop_strategy
from clairvit.targets.query import NO_OBJECT, SIDES
from helpers.dense_models import (
    DETECTORS,
    NAMES,
    SIZE,
    detr,
    dpt_segmenter,
    images,
    mask2former,
    model_of,
    rt_detr,
    without_biases,
    yolos,
)
from helpers.rounding import assert_same

SOFTMAX = ("detr", "yolos")
INDEX = 3


def sides(boxes: Tensor) -> dict[str, Tensor]:
    """Return the sides of boxes [..., 4] by name."""
    x, y, width, height = boxes.unbind(-1)
    corners = {"left": x - width / 2, "top": y - height / 2, "right": x + width / 2, "bottom": y + height / 2}
    return corners | {"x": x, "y": y, "width": width, "height": height}


def best_queries(name: str, logits: Tensor, class_: int) -> list[int]:
    """Return the query of the highest probability of a class, by logits [B, Q, C]."""
    p = logits.softmax(-1) if name in SOFTMAX else logits.sigmoid()
    return [int(index) for index in p[..., class_].argmax(1)]


@pytest.mark.parametrize("name", DETECTORS)
def test_scores_and_probabilities_of_a_query(name: str) -> None:
    model, pixels = model_of(DETECTORS[name]), images()
    with torch.no_grad():
        logits = model.module(pixels).logits[:, INDEX]
    p = logits.softmax(-1) if name in SOFTMAX else logits.sigmoid()
    explanation = cv.explain(model, pixels, "saliency", target=cv.Query(INDEX, "dog"))
    assert_same(explanation.logits, logits)
    assert explanation.targets == ("dog (query 3)",) * 2
    assert explanation.labels == ((*NAMES, NO_OBJECT) if name in SOFTMAX else NAMES)
    assert explanation.activation == ("softmax" if name in SOFTMAX else "sigmoid")
    assert_same(torch.tensor(explanation.probabilities, dtype=torch.float64), p[:, 1])
    probable = cv.explain(model, pixels, "saliency", target=cv.Query(INDEX))
    assert probable.classes == tuple(p[:, : len(NAMES)].argmax(1).tolist())


@pytest.mark.parametrize("processor", [("detr", "DetrImageProcessor"), ("rt_detr", "RTDetrImageProcessor")])
def test_probabilities_are_those_of_the_models_own_post_processing(processor: tuple[str, str]) -> None:
    name, class_name = processor
    model, pixels = model_of(DETECTORS[name]), images(1)
    with torch.no_grad():
        output = model.module(pixels)
    (result,) = getattr(hf, class_name)().post_process_object_detection(output, threshold=0.0)
    queries = range(output.logits.shape[1])
    targets = [cv.Query(query) for query in queries]
    actual = [cv.explain(model, pixels, "saliency", target=target).probabilities[0] for target in targets]
    assert max(result["scores"].tolist()) == pytest.approx(max(p for p in actual if p is not None), rel=1e-12)


@pytest.mark.parametrize("name", DETECTORS)
def test_gradients_are_those_of_autograd(name: str) -> None:
    model, pixels = model_of(DETECTORS[name]), images()
    with torch.no_grad():
        best = best_queries(name, model.module(pixels).logits, 1)
    rows = torch.arange(2)
    targets = {
        cv.Query(INDEX, "dog"): lambda output: output.logits[:, INDEX, 1],
        cv.Query(class_="dog"): lambda output: output.logits[rows, best, 1],
        cv.Query(INDEX, box="right"): lambda output: sides(output.pred_boxes)["right"][:, INDEX],
        cv.Query(class_=1, box="height"): lambda output: sides(output.pred_boxes)["height"][rows, best],
    }
    for target, read in targets.items():
        leaf = pixels.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(read(model.module(leaf)).sum(), leaf)
        assert bool((gradient.flatten(1).abs().amax(1) > 0).all())
        explanation = cv.explain(model, pixels, "saliency(level=pixel)", target=target)
        assert_same(explanation.maps, gradient.abs().amax(1), label=str(target))


@pytest.mark.parametrize("name", DETECTORS)
@pytest.mark.parametrize("side", SIDES)
def test_sides_of_boxes(name: str, side: str) -> None:
    model, pixels = model_of(DETECTORS[name]), images()
    with torch.no_grad():
        output = model.module(pixels)
    trace = cv.trace(model, pixels, target=cv.Query(INDEX, box=side))
    assert trace.target is not None
    assert trace.target.names == (f"{side} of query 3",) * 2
    assert trace.target.score == "box side"
    assert trace.target.activation == "raw"
    assert_same(trace.target(trace.logits), sides(output.pred_boxes)[side][:, INDEX])
    best = best_queries(name, output.logits, 2)
    trace = cv.trace(model, pixels, target=cv.Query(class_="sky", box=side))
    assert trace.target is not None
    assert trace.target.names == tuple(f"{side} of sky (query {query})" for query in best)
    assert_same(trace.target(trace.logits), sides(output.pred_boxes)[side][torch.arange(2), best])


@pytest.mark.parametrize("name", DETECTORS)
def test_the_best_query_of_a_class_is_chosen_once(name: str) -> None:
    """A perturbed copy is scored by the query of the image itself, even where another one is better now."""
    model, pixels = model_of(DETECTORS[name]), images()
    with torch.no_grad():
        logits = model.module(pixels).logits
        others = {factor: model.module(factor * pixels).logits for factor in (-1, 0, 5, -5, 20)}
    factor, class_, best = next(
        (factor, class_, best)
        for class_ in range(len(NAMES))
        for factor, other in others.items()
        if (best := best_queries(name, logits, class_)) != best_queries(name, other, class_)
    )
    trace = cv.trace(model, pixels, target=cv.Query(class_=class_))
    assert trace.target is not None
    assert trace.target.names == tuple(f"{NAMES[class_]} (query {query})" for query in best)
    with torch.no_grad():
        scores = trace.target(trace.recording.model.logits(factor * pixels))
    assert_same(scores, others[factor][torch.arange(2), best, class_])


@pytest.mark.parametrize("name", DETECTORS)
def test_the_box_of_the_query_is_the_region_of_the_map(name: str) -> None:
    model, pixels = model_of(DETECTORS[name]), images()
    with torch.no_grad():
        output = model.module(pixels)
    for target, queries in (
        (cv.Query(INDEX, "dog"), [INDEX] * 2),
        (cv.Query(class_=1), best_queries(name, output.logits, 1)),
    ):
        explanation = cv.explain(model, pixels, "saliency", target=target)
        assert explanation.cost.forwards == 2, "one pass reads the boxes"
        assert explanation.regions is not None
        for row, query in enumerate(queries):
            x, y, width, height = (SIZE * output.pred_boxes[row, query]).tolist()
            width, height = max(width, 1), max(height, 1)  # a pixel at least
            inside = [
                [abs(column + 0.5 - x) <= width / 2 and abs(line + 0.5 - y) <= height / 2 for column in range(SIZE)]
                for line in range(SIZE)
            ]
            assert explanation.regions[row].tolist() == inside
    assert cv.explain(model, pixels, "random", target=cv.Query(INDEX)).regions is None  # it is about no query
    several = cv.explain(model, pixels, "saliency", targets=[cv.Query(INDEX), cv.Query(INDEX, box="x")])
    assert several.regions is not None
    assert torch.equal(
        several.regions, cv.explain(model, pixels, "saliency", target=cv.Query(INDEX)).regions.repeat(2, 1, 1)
    )


def test_linear_rules_share_out_the_whole_score() -> None:
    """Without biases YOLOS's head is linear but for a ReLU, so that Σ x · dx over all tokens is the logit."""
    model, pixels = model_of(lambda: without_biases(yolos())), images()
    trace = cv.trace(model, pixels, target=cv.Query(INDEX, "sky"), rules="linear")
    assert trace.target is not None
    x, dx = trace.layers[0].x, trace.layers[0].dx
    assert x is not None
    assert dx is not None
    score = trace.target(trace.logits)
    assert bool((score.abs() > 1e-3).all())
    assert_same((x * dx).flatten(1).sum(1), score, magnitude=float((x * dx).abs().flatten(1).sum(1).max()))


def test_linear_rules_share_out_the_whole_score_of_a_decoder() -> None:
    """DETR adds positions to queries and keys alone: without biases all of a query's logit comes from image tokens."""
    model, pixels = model_of(lambda: without_biases(detr())), images()
    trace = cv.trace(model, pixels, target=cv.Query(INDEX, "sky"), rules="linear")
    assert trace.target is not None
    score = trace.target(trace.logits)
    assert bool((score.abs() > 1e-3).all())
    for layer in trace.layers:
        x, dx = layer.x, layer.dx
        assert x is not None
        assert dx is not None
        assert_same((x * dx).flatten(1).sum(1), score, magnitude=float((x * dx).abs().flatten(1).sum(1).max()))


@pytest.mark.parametrize("rules", ["linear", "attnlrp"])
def test_rules_reach_through_the_sigmoid_of_a_box(rules: str) -> None:
    """The sigmoid at the end of the box head is no gate: its slope multiplies the gradient of what is before it."""
    model, pixels = model_of(yolos), images()
    trace = cv.trace(model, pixels, target=cv.Query(INDEX, box="x"), rules=rules)
    with torch.no_grad():
        x = model.module(pixels).pred_boxes[:, INDEX, 0]
    logit = cv.Output(lambda output: torch.logit(output.pred_boxes[:, INDEX, 0]), name="x before the sigmoid")
    before = cv.trace(model, pixels, target=logit, rules=rules)
    assert before.layers[0].dx is not None
    assert float(before.layers[0].dx.abs().max()) > 0
    assert_same(trace.layers[0].dx, before.layers[0].dx * (x * (1 - x))[:, None, None])


def test_yolos_without_a_patch_is_run_on_a_shorter_sequence() -> None:
    """Dropping a token equals attention without it: both against the blocks, called one by one."""
    module: Any = without_biases(yolos()).double()  # no positions are added between the blocks
    model = cv.wrap(module, size=SIZE, mean=0.5, std=0.5)
    pixels, target = images(1), cv.Query(INDEX, "sky")
    trace = cv.trace(model, pixels, target=target)
    assert drop_strategy(trace.recording).mode == "drop"
    drops = cv.explain(model, pixels, "leave-one-out", target=target, score="logit").maps.flatten()
    with torch.no_grad():
        tokens = module.vit.embeddings(pixels)
        whole = _yolos_logit(module, tokens)
        assert_same(whole, module(pixels).logits[0, INDEX, 2])
        for patch in (0, 6, 15):
            kept = [index for index in range(tokens.shape[1]) if index != 1 + patch]
            left = _yolos_logit(module, tokens[:, kept])
            assert_same(drops[patch], whole - left, magnitude=float(whole.abs()))


def _yolos_logit(module: Any, tokens: Tensor) -> Tensor:
    """Return the logit of "sky" in query INDEX for tokens [1, N, d] at YOLOS's first block."""
    for block in module.vit.encoder.layer:
        output = block(tokens)
        tokens = output[0] if isinstance(output, tuple) else output
    tokens = module.vit.layernorm(tokens)[:, -module.config.num_detection_tokens :]
    return module.class_labels_classifier(tokens)[0, INDEX, 2]  # type: ignore[no-any-return]


def test_occlusion_by_hand() -> None:
    model, pixels = model_of(detr), images(1)
    maps = cv.explain(model, pixels, "leave-one-out(removal=mean)", target=cv.Query(INDEX, "dog"), score="prob").maps[0]
    cell = SIZE // maps.shape[0]
    with torch.no_grad():
        whole = model.module(pixels).logits[0, INDEX].softmax(-1)[1]
        for row, column in ((0, 0), (1, 2)):
            painted = pixels.clone()
            painted[..., row * cell : (row + 1) * cell, column * cell : (column + 1) * cell] = 0
            drop = whole - model.module(painted).logits[0, INDEX].softmax(-1)[1]
            assert_same(maps[row, column], drop, magnitude=1.0)


def test_contrast_and_verbs() -> None:
    model, pixels = model_of(yolos), images()
    with torch.no_grad():
        logits = model.module(pixels).logits[:, INDEX]
    contrast = cv.Contrast(cv.Query(INDEX, "cat"), cv.Query(INDEX, NO_OBJECT))
    trace = cv.trace(model, pixels, target=contrast)
    assert trace.target is not None
    assert_same(trace.target(trace.logits), logits[:, 0] - logits[:, -1])
    for target in (cv.Query(INDEX), cv.Query(class_="cat"), cv.Query(class_="cat", box="x")):
        many = cv.compare(model, pixels, ["rollout", "ixg", "attnlrp+plus", "decompx"], target=target)
        assert all(bool(explanation.maps.isfinite().all()) for explanation in many.values())
        assert cv.evaluate(model, pixels, "ixg", "deletion", target=target).values.shape == (2,)
        assert len(cv.explain(model, pixels, "ixg", target=target).check()) == 2


def test_targets_of_different_outputs_are_explained_and_checked_together() -> None:
    model, pixels = model_of(yolos), images()
    targets = [cv.Query(2, "dog"), cv.Query(2, box="left"), cv.Query(4, "dog")]
    together = cv.explain(model, pixels, "ixg", targets=targets)
    assert together.targets[::2] == ("dog (query 2)", "left of query 2", "dog (query 4)")
    assert together.labels == ()
    checks = together.check()
    for position, target in enumerate(targets):
        alone = cv.explain(model, pixels, "ixg", target=target)
        rows = [2 * position, 2 * position + 1]
        assert_same(together.maps[rows], alone.maps)
        assert together[rows].probabilities == alone.probabilities
        assert together[rows].class_scores == alone.class_scores
        assert [check.verdict for check in checks.take(rows)] == [check.verdict for check in alone.check()]
        for check, expected in zip(checks.take(rows), alone.check(), strict=True):
            assert check.quantity == expected.quantity
            numbers = [(each.full, each.removals[0].top, *each.removals[0].random) for each in (check, expected)]
            assert_same(numbers[0], numbers[1], magnitude=10.0, dtype=torch.float64)
    assert [check.verdict for check in together.check(model)] == [check.verdict for check in checks]


def test_queries_of_mask2former_have_classes_and_no_boxes() -> None:
    model, pixels = model_of(mask2former), images(1)
    with torch.no_grad():
        logits = model.module(pixels).class_queries_logits[:, 2]
    explanation = cv.explain(model, pixels, "saliency", target=cv.Query(2))
    assert_same(explanation.logits, logits)
    assert explanation.regions is None
    with pytest.raises(NotApplicable, match=r"box= reads 'pred_boxes'.*leave box= out"):
        cv.explain(model, pixels, "saliency", target=cv.Query(2, box="left"))


def test_modules_of_the_user() -> None:
    class Detector(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

        def forward(self, pixels: Tensor) -> dict[str, Tensor]:
            tokens = self.scale * torch.nn.functional.avg_pool2d(pixels, 16).flatten(2).mT  # [B, 16, 3]
            return {"pred_logits": tokens, "pred_boxes": tokens[..., [0, 1, 2, 2]].sigmoid()}

    pixels = images()
    softmax = cv.wrap(Detector(), size=SIZE, mean=0.5, std=0.5, labels=["red", "green"], activation="softmax")
    explanation = cv.explain(softmax, pixels, "saliency", target=cv.Query(7, "red"))
    assert explanation.labels == ("red", "green", NO_OBJECT)
    p = torch.nn.functional.avg_pool2d(pixels, 16).flatten(2).mT[:, 7].softmax(-1)
    assert_same(torch.tensor(explanation.probabilities, dtype=torch.float64), p[:, 0])
    unnamed = cv.wrap(Detector(), size=SIZE, mean=0.5, std=0.5, activation="sigmoid")
    assert cv.explain(unnamed, pixels, "saliency", target=cv.Query(7, 2)).targets == ("class 2 (query 7)",) * 2
    with pytest.raises(BadInput, match=r"There is no class 3: the model has 3"):
        cv.explain(unnamed, pixels, "saliency", target=cv.Query(class_=3))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({}, BadInput, r"neither an index nor a class; expected Query\(17\) or Query\(class_='cat'\)"),
        ({"index": -1}, BadInput, r"Query\(-1\) was given; expected the number of a query, from 0"),
        ({"index": "cat"}, BadInput, r"Query\('cat'\) was given; expected the number of a query"),
        ({"index": 2.0}, BadInput, r"Query\(2\.0\) was given"),
        (
            {"index": 2, "box": "lefft"},
            UnknownName,
            r"no side 'lefft'\. Did you mean 'left'\? Expected one of",
        ),
        ({"index": 2, "class_": "cat", "box": "left"}, BadInput, r"the same for every class"),
        ({"index": 7}, BadInput, r"There is no query 7: the model has 7; give a number from 0 to 6"),
        ({"index": 7, "box": "x"}, BadInput, r"There is no query 7"),
        ({"index": 1, "class_": "tres"}, UnknownName, r"There is no class 'tres'.*Did you mean 'tree'"),
        ({"class_": "tres"}, UnknownName, r"There is no class 'tres' among the model's 5.*Did you mean 'tree'"),
        ({"class_": 5}, BadInput, r"There is no class 5: the model has 5"),
    ],
)
def test_errors(arguments: dict[str, Any], error: type[ClairError], message: str) -> None:
    model = model_of(detr)
    with pytest.raises(error, match=message):
        cv.explain(model, images(1), "saliency", target=cv.Query(**arguments))


def test_models_without_queries_are_refused() -> None:
    pixels = images(1)
    with pytest.raises(NotApplicable, match=r"DPTForSemanticSegmentation has none.*target=cv\.Region"):
        cv.explain(model_of(dpt_segmenter), pixels, "saliency", target=cv.Query(1))
    classifier = nn.Sequential(nn.Flatten(), nn.Linear(3 * SIZE * SIZE, 4)).double()
    with pytest.raises(NotApplicable, match=r"the model returned a tensor \[1, 4\].*of a classifier a class"):
        cv.explain(cv.wrap(classifier, size=SIZE), pixels, "saliency", target=cv.Query(1))
    with pytest.raises(BadInput, match="raw"):
        cv.explain(model_of(rt_detr), pixels, "saliency", target=cv.Query(1, box="x"), score="prob")
