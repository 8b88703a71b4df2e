"""Region: the mean score inside a mask, box or point, against interpolation, autograd and passes by hand."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn

import clairvit as cv
from clairvit.errors import BadInput, ClairError, NotApplicable, UnknownName
from clairvit.models.readout import unwrap_readout
from clairvit.perturbation.token_dropping import drop_strategy
from clairvit.targets.region import region_mean
from helpers.dense_models import (
    DENSE,
    NAMES,
    SEGMENTERS,
    SIZE,
    dpt_depth,
    dpt_segmenter,
    images,
    model_of,
    sam,
    segformer,
    without_biases,
    yolos,
)
from helpers.rounding import assert_same

BOX = (4, 8, 40, 36)
Size = tuple[int, int]


def interpolated_mean(maps: Tensor, inside: Tensor) -> Tensor:
    """Return the mean inside a mask [H, W] of maps [B, C, h, w], interpolated to its size: [B, C]."""
    size = (int(inside.shape[0]), int(inside.shape[1]))
    return F.interpolate(maps, size=size, mode="bilinear", align_corners=False)[..., inside].mean(-1)


def box_mask(box: tuple[int, int, int, int] = BOX, size: Size = (SIZE, SIZE)) -> Tensor:
    left, top, right, bottom = box
    inside = torch.zeros(size, dtype=torch.bool)
    inside[top:bottom, left:right] = True
    return inside


def by_hand(name: str, module: nn.Module, pixels: Tensor) -> Tensor:
    """Return the mean scores in BOX [B, C] of a model of DENSE, from what its module returns."""
    inside = box_mask()
    if name in ("sam", "sam2"):
        prompt = torch.tensor([[BOX]], dtype=torch.float64).expand(len(pixels), -1, -1)
        output: Any = module(pixels, input_boxes=prompt)
        return torch.cat([interpolated_mean(output.pred_masks[:, 0], inside), output.iou_scores[:, 0]], 1)
    output = module(pixels)
    if name == "dpt depth":
        return interpolated_mean(output.predicted_depth[:, None], inside)
    if "former" in name and name != "segformer":
        p, masks = output.class_queries_logits.softmax(-1)[..., :-1], output.masks_queries_logits.sigmoid()
        return interpolated_mean(torch.einsum("bqc,bqhw->bchw", p, masks), inside)
    return interpolated_mean(output.logits, inside)


# The region


@pytest.mark.parametrize("size", [(16, 24), (17, 23)])
@pytest.mark.parametrize("cells", [(4, 6), (20, 30), (5, 7), (1, 1)])
def test_mean_is_that_of_the_interpolated_scores(size: Size, cells: Size) -> None:
    maps = torch.randn(2, 3, *cells, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    random_mask = torch.rand(size, generator=torch.Generator().manual_seed(1)) > 0.7
    regions = [
        (cv.Region(box=(3, 2, 20, 9)), box_mask((3, 2, 20, 9), size)),
        (cv.Region(point=(7, 11)), box_mask((7, 11, 8, 12), size)),
        (cv.Region(mask=random_mask), random_mask),
    ]
    for region, inside in regions:
        assert_same(region_mean(maps, region, size), interpolated_mean(maps, inside))


def test_pixels_of_a_box_are_those_whose_centre_lies_inside() -> None:
    inside = cv.Region(box=(0.4, 1, 2.6, 2.5)).inside((4, 4))  # centres 0.5, 1.5, 2.5 and 1.5; 2.5 is not below 2.5
    assert np.argwhere(inside).tolist() == [[1, 0], [1, 1], [1, 2]]
    assert np.argwhere(cv.Region(point=(2.9, 0.1)).inside((4, 4))).tolist() == [[0, 2]]


def test_mask_of_another_size_is_resized_by_nearest_neighbour() -> None:
    mask = [[0, 255], [0, 0]]
    assert cv.Region(mask=mask).inside((4, 6)).tolist() == [[False] * 3 + [True] * 3] * 2 + [[False] * 6] * 2
    large = torch.rand(30, 50, generator=torch.Generator().manual_seed(0)) > 0.5
    nearest = F.interpolate(large[None, None].double(), size=(7, 9), mode="nearest-exact")[0, 0] > 0
    assert cv.Region(mask=large).inside((7, 9)).tolist() == nearest.tolist()


def test_regions_are_compared_by_their_content() -> None:
    mask = np.eye(5, dtype=bool)
    assert cv.Region("cat", mask=mask) == cv.Region("cat", mask=torch.from_numpy(mask).float())
    assert cv.Region("cat", mask=mask) != cv.Region("cat", mask=~mask)
    assert cv.Region("cat", mask=mask) != cv.Region("dog", mask=mask)
    assert cv.Region(box=(0, 0, 2, 2)) != cv.Region(box=(0, 0, 2, 3))
    model = model_of(dpt_segmenter)
    readout = cv.Region("cat", box=BOX).readout(model)
    assert cv.Region("dog", box=BOX).readout(model) is readout
    assert cv.Region("dog", box=(0, 0, 2, 2)).readout(model) is not readout


# What is read, and its gradients


@pytest.mark.parametrize("name", DENSE)
def test_scores_are_means_of_what_the_model_returns(name: str) -> None:
    model, pixels = model_of(DENSE[name]), images()
    with torch.no_grad():
        assert_same(cv.Region(box=BOX).readout(model).logits(pixels), by_hand(name, model.module, pixels))


def test_maskformer_agrees_with_its_own_post_processing() -> None:
    model, pixels = model_of(SEGMENTERS["maskformer"]), images()
    processor = hf.MaskFormerImageProcessor()
    if "return_segmentation_scores" not in inspect.signature(processor.post_process_semantic_segmentation).parameters:
        pytest.skip("transformers returns no scores of segments in this version")
    with torch.no_grad():
        output = model.module(pixels)
        results = processor.post_process_semantic_segmentation(
            output, target_sizes=[(SIZE, SIZE)] * 2, return_segmentation_scores=True
        )
        expected = torch.stack([result["segmentation_scores"][:, box_mask()].mean(-1) for result in results])
        assert_same(cv.Region(box=BOX).readout(model).logits(pixels), expected)


@pytest.mark.parametrize("name", DENSE)
def test_gradients_are_those_of_autograd(name: str) -> None:
    model, pixels = model_of(DENSE[name]), images()
    class_ = {"dpt depth": 0}.get(name, 2)
    leaf = pixels.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(by_hand(name, model.module, leaf)[:, class_].sum(), leaf)
    assert bool((gradient.flatten(1).abs().amax(1) > 0).all())
    explanation = cv.explain(model, pixels, "saliency(level=pixel)", target=cv.Region(class_, box=BOX))
    assert_same(explanation.maps, gradient.abs().amax(1))
    assert explanation.activation == "raw"
    assert explanation.probabilities == (None, None)


@pytest.mark.parametrize("name", ["dpt", "segformer"])
def test_token_gradients_are_those_of_autograd(name: str) -> None:
    model, pixels = model_of(DENSE[name]), images()
    trace = cv.trace(model, pixels, target=cv.Region("sky", box=BOX))
    for layer in (0, len(trace.layers) - 1):
        block = trace.recording.structure.layers[layer].block
        assert block is not None
        inputs: list[Tensor] = []
        handle = block.register_forward_pre_hook(lambda _, args, inputs=inputs: inputs.append(args[0]))
        score = by_hand(name, model.module, pixels.clone().requires_grad_())[:, NAMES.index("sky")].sum()
        handle.remove()
        (gradient,) = torch.autograd.grad(score, inputs)
        tokens = gradient if gradient.ndim == 3 else gradient.flatten(2).mT  # SegFormer's blocks take [B, d, h, w]
        assert_same(trace.layers[layer].dx, tokens, label=f"layer {layer}")


@pytest.mark.parametrize("name", ["dpt", "segformer"])
def test_linear_rules_share_out_the_whole_score(name: str) -> None:
    """Without biases, all that the head does is linear or a ReLU, so that Σ x · dx over the tokens is the score."""
    model, pixels = model_of(lambda: without_biases(DENSE[name]())), images()
    trace = cv.trace(model, pixels, target=cv.Region("sky", box=BOX), rules="linear")
    assert trace.target is not None
    x, dx = trace.layers[0].x, trace.layers[0].dx
    assert x is not None
    assert dx is not None
    score = trace.target(trace.logits)
    assert bool((score.abs() > 1e-3).all())
    assert_same((x * dx).flatten(1).sum(1), score, magnitude=float((x * dx).abs().flatten(1).sum(1).max()))


# Perturbation


@pytest.mark.parametrize("name", ["segformer", "sam"])
def test_occlusion_by_hand(name: str) -> None:
    model, pixels = model_of(DENSE[name]), images(1)
    target = cv.Region(1, box=BOX)
    maps = cv.explain(model, pixels, "leave-one-out(removal=mean)", target=target).maps[0]
    rows, columns = maps.shape
    cell = SIZE // rows
    with torch.no_grad():
        whole = by_hand(name, model.module, pixels)[0, 1]
        for row, column in ((0, 0), (rows // 2, 1), (rows - 1, columns - 1)):
            painted = pixels.clone()
            painted[..., row * cell : (row + 1) * cell, column * cell : (column + 1) * cell] = 0
            drop = whole - by_hand(name, model.module, painted)[0, 1]
            assert_same(maps[row, column], drop, magnitude=float(whole.abs()))


def test_tokens_of_a_dense_head_are_set_to_zero_by_hand() -> None:
    """DPT's head needs every token, so that a removed one is zero at the first block."""
    model, pixels = model_of(dpt_segmenter), images(1)
    target = cv.Region("sky", box=BOX)
    trace = cv.trace(model, pixels, target=target)
    assert drop_strategy(trace.recording).mode == "zero"
    maps = cv.explain(model, pixels, "leave-one-out", target=target).maps[0]
    block = trace.recording.structure.layers[0].block
    assert block is not None
    for patch in (0, 5, 15):

        def without(_: nn.Module, args: tuple[Any, ...], token: int = 1 + patch) -> tuple[Any, ...]:
            tokens = args[0].clone()
            tokens[:, token] = 0
            return (tokens, *args[1:])

        with torch.no_grad():
            whole = by_hand("dpt", model.module, pixels)[0, 2]
            handle = block.register_forward_pre_hook(without)
            left = by_hand("dpt", model.module, pixels)[0, 2]
            handle.remove()
        assert_same(maps.flatten()[patch], whole - left, magnitude=float(whole.abs()))


# Classes, titles, verbs


def test_classes_names_and_contrast() -> None:
    model, pixels = model_of(dpt_segmenter), images()
    scores = by_hand("dpt", model.module, pixels).detach()
    best = [NAMES[index] for index in scores.argmax(1).tolist()]
    predicted = cv.explain(model, pixels, "saliency", target=cv.Region(box=BOX))
    assert predicted.targets == tuple(f"{name} in 4,8,40,36" for name in best)
    assert predicted.score == "mean logit"
    assert predicted.labels == NAMES
    assert_same(predicted.logits, scores)
    cat, dog = cv.Region("cat", box=BOX), cv.Region("dog", box=BOX)
    contrast = cv.trace(model, pixels, target=cv.Contrast(cat, dog))
    assert contrast.target is not None
    assert contrast.target.names == ("cat in 4,8,40,36 − dog in 4,8,40,36",) * 2
    assert_same(contrast.target(contrast.logits), scores[:, 0] - scores[:, 1])


def test_each_image_may_have_a_region_of_its_own() -> None:
    model, pixels = model_of(dpt_segmenter), images()
    regions = [cv.Region("cat", box=BOX), cv.Region("sky", point=(50, 60))]
    both = cv.explain(model, pixels, "ixg", target=regions)
    assert both.targets == ("cat in 4,8,40,36", "sky at 50,60")
    assert both.regions is not None
    assert [region.sum().item() for region in both.regions] == [36 * 28, 1]
    assert torch.equal(both.regions[0], box_mask().bool())
    assert both[1].regions is not None
    assert both[1].regions[0, 60, 50]
    scores = cv.evaluate(model, pixels, "ixg", "deletion(steps=2)", target=regions)
    for row, region in enumerate(regions):
        alone = cv.explain(model, pixels[row : row + 1], "ixg", target=region)
        assert_same(both.maps[row], alone.maps[0])
        score = cv.evaluate(model, pixels[row : row + 1], "ixg", "deletion(steps=2)", target=region)
        assert_same(scores.values[row], score.values[0])
    assert cv.explain(model, pixels, "rollout", target=regions).regions is None  # it is about no region
    contrast = cv.explain(
        model, pixels, "ixg", target=cv.Contrast(*[cv.Region(name, box=BOX) for name in ("cat", "sky")])
    )
    assert contrast.regions is not None
    assert torch.equal(contrast.regions[1], box_mask().bool())


def test_depth_has_no_class() -> None:
    model = model_of(dpt_depth)
    explanation = cv.explain(model, images(1), "ixg", target=cv.Region(point=(3, 60)))
    assert explanation.targets == ("depth at 3,60",)
    assert explanation.score == "mean depth"
    with pytest.raises(UnknownName, match="no class 'cat' among the model's 1"):
        cv.explain(model, images(1), "ixg", target=cv.Region("cat", point=(3, 60)))


def test_sam_takes_the_point_as_its_prompt_and_the_mask_that_it_trusts_most() -> None:
    model, pixels = model_of(sam), images()
    target = cv.Region(point=(20, 33))
    prompt = torch.tensor([[[[20.0, 33.0]]]], dtype=torch.float64).expand(2, -1, -1, -1)
    with torch.no_grad():
        output: Any = unwrap_readout(model.module)(pixels, input_points=prompt)
    best = output.iou_scores[:, 0].argmax(1).tolist()
    expected = interpolated_mean(output.pred_masks[:, 0], box_mask((20, 33, 21, 34)))
    explanation = cv.explain(model, pixels, "saliency", target=target)
    assert explanation.targets == tuple(f"mask {index} at 20,33" for index in best)
    assert_same(explanation.logits[:, :3], expected)
    with pytest.raises(BadInput, match=r"SAM predicts a mask for a point or a box.*expected point= or box="):
        cv.explain(model, pixels, "saliency", target=cv.Region(mask=np.ones((4, 4))))


def test_sam_with_prompts_of_the_user() -> None:
    model, pixels = model_of(sam), images()
    prompts = torch.tensor([[[[20.0, 33.0], [5.0, 6.0]]]], dtype=torch.float64)
    with torch.no_grad():
        output: Any = model.module(pixels, input_points=prompts.expand(2, -1, -1, -1))
    explanation = cv.explain(
        model, pixels, "saliency", target=cv.Region(2, mask=box_mask()), inputs={"input_points": prompts}
    )
    assert_same(explanation.logits[:, 2], interpolated_mean(output.pred_masks[:, 0], box_mask())[:, 2])


@pytest.mark.parametrize("activation", ["softmax", "sigmoid"])
def test_masks_of_queries_of_the_user(activation: str) -> None:
    class Masks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.maps = nn.Conv2d(3, 6, 8, stride=8, dtype=torch.float64)

        def forward(self, pixels: Tensor) -> dict[str, Tensor]:
            masks = self.maps(pixels)  # six queries
            return {"logits": masks.flatten(2)[..., :4], "pred_masks": masks}

    pixels, names = images(), ["a", "b", "c", "d"][: 3 if activation == "softmax" else 4]
    model = cv.wrap(Masks(), size=SIZE, mean=0.5, std=0.5, labels=names, activation=activation)
    with torch.no_grad():
        output = model.module(pixels)
        p = output["logits"].softmax(-1)[..., :3] if activation == "softmax" else output["logits"].sigmoid()
        dense = torch.einsum("bqc,bqhw->bchw", p, output["pred_masks"].sigmoid())
        assert_same(cv.Region(box=BOX).readout(model).logits(pixels), interpolated_mean(dense, box_mask()))


def test_outputs_of_modules_of_the_user() -> None:
    weight = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    class Returns(nn.Module):
        def __init__(self, pack: Callable[[Tensor], Any]) -> None:
            super().__init__()
            self.weight, self.pack = nn.Parameter(weight), pack

        def forward(self, pixels: Tensor) -> Any:
            return self.pack(F.conv2d(pixels, self.weight, stride=8))

    pixels = images()
    expected = interpolated_mean(F.conv2d(pixels, weight, stride=8), box_mask())
    for pack in (lambda maps: maps, lambda maps: {"out": maps, "aux": maps * 2}, lambda maps: (maps, 1)):
        model = cv.wrap(Returns(pack), size=SIZE, mean=0.5, std=0.5, labels=["a", "b", "c", "d"])
        assert_same(cv.Region("a", box=BOX).readout(model).logits(pixels), expected)
        assert cv.explain(model, pixels, "saliency", target=cv.Region("a", box=BOX)).score == "mean score"
    single = cv.wrap(Returns(lambda maps: maps[:, 0]), size=SIZE, mean=0.5, std=0.5)
    explanation = cv.explain(single, pixels, "saliency", target=cv.Region(box=BOX))
    assert explanation.targets == ("score in 4,8,40,36",) * 2
    assert_same(explanation.logits[:, 0], expected[:, 0])


def test_verbs() -> None:
    model, pixels = model_of(dpt_segmenter), images()
    target = cv.Region("sky", box=BOX)
    before = {name: value.clone() for name, value in model.module.state_dict().items()}
    many = cv.compare(model, pixels, ["rollout", "genatt", "attnlrp+plus", "legrad"], target=target)
    assert all(bool(explanation.maps.isfinite().all()) for explanation in many.values())
    score = cv.evaluate(model, pixels, "ixg", "deletion", target=target)
    assert np.isfinite(score.mean)
    assert len(cv.explain(model, pixels, "ixg", target=target).check()) == 2
    assert cv.choose(model, pixels, ["ixg", "rollout"], target=target).best in ("ixg", "rollout")
    after = model.module.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


# Errors


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({}, BadInput, r"Region was given no place; expected one of mask=, box="),
        ({"box": BOX, "point": (1, 2)}, BadInput, r"Region was given box and point; expected one of"),
        ({"mask": np.zeros((4, 4))}, BadInput, r"The mask is empty: no pixel of it is inside"),
        ({"mask": np.ones((3, 4, 4))}, BadInput, r"The mask has shape \[3, 4, 4\].*expected \[H, W\]"),
        ({"mask": [[0.0, float("nan")]]}, BadInput, r"The mask has NaN"),
        ({"mask": [["a"]]}, BadInput, r"The mask has shape \[1, 1\] and type <U1"),
        ({"box": (1, 2, 3)}, BadInput, r"box=\(1, 2, 3\) was given; expected \(left, top, right, bottom\)"),
        ({"box": (1, 2, 3, float("inf"))}, BadInput, r"expected \(left, top, right, bottom\) in pixels"),
        ({"point": 5}, BadInput, r"point=5 was given; expected \(x, y\)"),
        ({"box": (0, 0, 65, 10)}, BadInput, r"box=\(0, 0, 65, 10\) does not lie inside.*64 pixels wide and 64 high"),
        ({"box": (9, 0, 9, 10)}, BadInput, r"does not lie inside"),
        ({"box": (9.6, 0, 10.4, 10)}, BadInput, r"holds the centre of no pixel"),
        ({"point": (64, 3)}, BadInput, r"point=\(64, 3\) does not lie inside"),
        ({"mask": np.eye(500)[::-1] * (np.arange(500) == 1)}, BadInput, r"empty once it is resized"),
        ({"class_": "tres", "box": BOX}, UnknownName, r"no class 'tres' among the model's 5\. Did you mean 'tree'\?"),
        ({"class_": 5, "box": BOX}, BadInput, r"There is no class 5: the model has 5"),
    ],
)
def test_errors(arguments: dict[str, Any], error: type[ClairError], message: str) -> None:
    model = model_of(dpt_segmenter)
    with pytest.raises(error, match=message):
        cv.explain(model, images(1), "saliency", target=cv.Region(**arguments))


def test_models_without_scores_for_pixels_are_refused() -> None:
    pixels = images(1)
    with pytest.raises(NotApplicable, match=r"Region reads scores for every pixel.*target=cv\.Query\(INDEX\)"):
        cv.explain(model_of(yolos), pixels, "saliency", target=cv.Region(box=BOX))
    classifier = nn.Sequential(nn.Flatten(), nn.Linear(3 * SIZE * SIZE, 4)).double()
    with pytest.raises(NotApplicable, match=r"returned a tensor \[1, 4\]\. Of a classifier explain a class: target='"):
        cv.explain(cv.wrap(classifier, size=SIZE), pixels, "saliency", target=cv.Region(box=BOX))
    tokens = nn.Sequential(nn.Conv2d(3, 6, 8, stride=8), nn.Flatten(2)).double()  # [B, 6, 64] is no map
    with pytest.raises(NotApplicable, match=r"in the proportions of the image"):
        cv.explain(cv.wrap(tokens, size=SIZE), pixels, "saliency", target=cv.Region(box=BOX))
    with pytest.raises(BadInput, match=r"mean of|raw"):
        cv.explain(model_of(segformer), pixels, "saliency", target=cv.Region(box=BOX), score="prob")
