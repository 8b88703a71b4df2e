"""Thresholded maps by hand, over images and over a set by a confusion matrix of all pixels (METRICS 7.1, test 8)."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

import clairvit as cv
from clairvit.errors import BadInput, UnknownName
from clairvit.metrics.localisation import SWEEP, binarise, otsu, score_thresholded
from clairvit.metrics.registry import MetricOutput, resolve_metric
from clairvit.numerics import min_max
from helpers.eval_contexts import case_of, values
from helpers.reference_token_dropping import logits_without
from helpers.rounding import assert_same
from helpers.tiny_models import double

SIZE = 16
NEAR = "upsampling=nearest"
NAMES = ["pixel-accuracy", "iou", "iou(classes=two)", "f1"]


def noise(batch: int = 3, seed: int = 0) -> Tensor:
    return torch.randn(batch, 4, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def some_masks(batch: int = 3, seed: int = 5) -> Tensor:
    return torch.rand(batch, SIZE, SIZE, generator=torch.Generator().manual_seed(seed)) < 0.3


def by_hand(name: str, predicted: np.ndarray, truth: np.ndarray) -> float:
    """Of flat arrays, pixel by pixel."""
    table = np.zeros((2, 2))
    for guess, right in zip(predicted, truth, strict=True):
        table[int(right), int(guess)] += 1
    (tn, fp), (fn, tp) = table
    if name == "pixel-accuracy":
        return float((tp + tn) / table.sum())
    if name == "f1":
        return float(2 * tp / (2 * tp + fp + fn))
    iou = tp / (tp + fp + fn)
    return float(iou if name == "iou" else (iou + tn / (tn + fp + fn)) / 2)


def with_options(name: str, more: str) -> str:
    return f"{name[:-1]},{more})" if name.endswith(")") else f"{name}({more})"


def test_thresholded_metrics_by_hand() -> None:
    """A map that is 1 on the upper half, an object in the left half of 16 × 16."""
    maps = torch.zeros(1, 4, 4, dtype=torch.float64)
    maps[:, :2] = 1
    masks = torch.zeros(1, SIZE, SIZE, dtype=torch.bool)
    masks[:, :, :8] = True
    context = case_of(maps, masks=masks)
    assert float(values(f"pixel-accuracy({NEAR})", context)) == 0.5
    assert float(values(f"iou({NEAR})", context)) == pytest.approx(1 / 3)
    assert float(values(f"iou({NEAR},classes=two)", context)) == pytest.approx(1 / 3)
    assert float(values(f"f1({NEAR})", context)) == 0.5
    void = torch.zeros_like(masks)
    void[:, 8:] = True
    assert float(values(f"iou({NEAR})", case_of(maps, masks=masks, void=void))) == 0.5


@pytest.mark.parametrize("threshold", ["half", "mean", "otsu", "sweep"])
@pytest.mark.parametrize("name", NAMES)
def test_a_set_is_one_confusion_matrix_of_all_pixels(name: str, threshold: str) -> None:
    """Several methods, void pixels, one image whose map has NaN and one without an object: both are left out."""
    maps, masks = [noise(5, seed=k) for k in range(2)], some_masks(5)
    void = torch.rand(5, SIZE, SIZE, generator=torch.Generator().manual_seed(9)) < 0.2
    masks[3] = False
    maps[0][1, 2, 2] = math.nan
    context = case_of(*maps, masks=masks, void=void)
    output = resolve_metric(with_options(name, f"threshold={threshold},over=set"))(context)
    assert isinstance(output, MetricOutput)
    fine = list(context.pixel_maps("bilinear"))
    for method in range(2):
        use = [image for image in range(5) if image != 3 and not (method == 0 and image == 1)]
        edges = SWEEP if threshold == "sweep" else (None,)
        every, each = [], []
        for place, _ in enumerate(edges):
            cut = binarise(fine[method], threshold)[place]
            keep = ~void
            pool = [(cut[i][keep[i]].numpy(), masks[i][keep[i]].numpy()) for i in use]
            every.append(by_hand(name, np.concatenate([a for a, _ in pool]), np.concatenate([b for _, b in pool])))
            each.append([by_hand(name, a, b) for a, b in pool])
        score = cv.Score(
            metric=name,
            method="",
            values=output.values[method],
            better="higher",
            span=(0, 1),
            degenerate=torch.zeros(5, dtype=torch.bool),
            names=("",) * 5,
            model="",
            counts=output.counts[method] if output.counts is not None else None,
        )
        assert score.mean == pytest.approx(float(np.mean(every)), abs=1e-12)
        assert score.n_valid == len(use)
        assert output.values[method, use].tolist() == pytest.approx(np.mean(each, 0).tolist(), abs=1e-12)
        if name.startswith("iou"):
            assert score.mean != pytest.approx(float(np.mean(each)), abs=1e-4), "not the mean over images"


def test_a_set_through_evaluate_goes_beyond_a_batch() -> None:
    """Ten images are two batches; counts of both are in the score."""
    model, images = double("timm-vit", 10)
    masks = torch.zeros(10, *images.shape[-2:], dtype=torch.bool)
    for row, mask in enumerate(masks):
        mask[2 : 8 + 2 * row, 4 : 12 + row] = True
    score = cv.evaluate(model, images, "ixg", "iou(preset=chefer)", target=3, masks=masks)
    maps = cv.explain(model, images, "ixg", target=3).maps[:, None]
    fine = torch.nn.functional.interpolate(maps, images.shape[-2:], mode="bilinear")[:, 0].numpy()
    predicted = fine > fine.mean((1, 2), keepdims=True)
    assert score.mean == pytest.approx(by_hand("iou(classes=two)", predicted.ravel(), masks.numpy().ravel()), abs=1e-12)
    low, high = score.interval
    assert low < score.mean < high


def test_chefers_presets() -> None:
    context = case_of(noise(), masks=some_masks())
    for name, same in (
        ("pixel-accuracy", "pixel-accuracy(threshold=mean,over=set)"),
        ("iou", "iou(threshold=mean,over=set,classes=two)"),
        ("f1", "f1(preset=chefer,threshold=mean)"),
    ):
        assert resolve_metric(f"{name}(preset=chefer)") == resolve_metric(same)
        assert values(f"{name}(preset=coporan)", context).equal(values(name, context)), "0.5, image by image"


def test_chefers_f1_is_row_by_row_and_zero_where_a_row_has_no_object() -> None:
    masks = torch.zeros(2, SIZE, SIZE, dtype=torch.bool)
    masks[:, 3:9, 2:11] = True
    context = case_of(noise(2), masks=masks)
    (maps,) = context.pixel_maps("bilinear")
    metric_values = values("f1(preset=chefer)", context)
    for image in range(2):
        predicted = maps[image] > maps[image].mean()
        rows = []
        for row in range(SIZE):
            both = int((predicted[row] & masks[image, row]).sum())
            total = int(predicted[row].sum()) + int(masks[image, row].sum())
            rows.append(2 * both / total if masks[image, row].any() else 0.0)
        assert float(metric_values[0, image]) == pytest.approx(sum(rows) / SIZE, abs=1e-12)
    assert not torch.allclose(metric_values, values("f1(threshold=mean)", context), atol=0.01)


@pytest.mark.parametrize("name", NAMES)
def test_a_sweep_is_a_curve_and_its_mean_and_best(name: str) -> None:
    context = case_of(noise(), noise(seed=1), masks=some_masks())
    sweep, best = (resolve_metric(with_options(name, f"threshold={word}"))(context) for word in ("sweep", "best"))
    assert sweep.x.tolist() == pytest.approx([0.05 * k for k in range(1, 20)])
    assert sweep.y.shape == (2, 3, 19)
    assert torch.allclose(sweep.values, sweep.y.mean(-1))
    assert torch.equal(best.values, sweep.y.amax(-1))
    assert torch.equal(best.y, sweep.y)
    assert torch.allclose(sweep.y[..., 9], values(with_options(name, "threshold=half"), context), atol=1e-12)
    (maps, _) = context.pixel_maps("bilinear")
    predicted = (min_max(maps, (1, 2)) > 0.3).numpy()
    expected = [by_hand(name, predicted[i].ravel(), context.masks[i].numpy().ravel()) for i in range(3)]
    assert sweep.y[0, :, 5].tolist() == pytest.approx(expected, abs=1e-12)


def test_what_has_no_common_threshold_is_refused() -> None:
    context = case_of(noise(), masks=some_masks())
    for name in ("pixel-accuracy", "iou", "f1"):
        with pytest.raises(BadInput, match=r"threshold=best and over=set were given"):
            resolve_metric(f"{name}(threshold=best,over=set)")(context)
    with pytest.raises(BadInput, match=r"threshold=sweep was given; expected 'half' or 'mean' or 'otsu'"):
        resolve_metric("f1(preset=chefer,threshold=sweep)")
    with pytest.raises(UnknownName, match=r"'f1' takes no rows any more; it is part of f1\(preset=chefer\)\."):
        resolve_metric("f1(rows=true)")


def test_the_threshold_is_strict() -> None:
    """0.5 is not more than 0.5, and no value of a constant map is more than its mean."""
    maps = torch.tensor([[[0.0, 0.5, 0.5, 1.0]] * 4])
    assert binarise(maps, "half")[0, 0, 0].tolist() == [False, False, False, True]
    assert binarise(maps, "mean")[0, 0, 0].tolist() == [False, False, False, True]
    assert SWEEP[9] == 0.5
    assert binarise(maps, "sweep")[9, 0, 0].tolist() == [False, False, False, True]
    for word in ("half", "mean", "otsu", "sweep"):
        assert not binarise(torch.full((1, 4, 4), 3.0), word).any()


def test_otsu_splits_two_heaps() -> None:
    generator = torch.Generator().manual_seed(0)
    heaps = torch.cat(
        [0.2 + 0.03 * torch.randn(500, generator=generator), 0.8 + 0.03 * torch.randn(300, generator=generator)]
    )
    assert 0.3 < float(otsu(heaps.clamp(0, 1))) < 0.7


def test_otsu_is_scikit_images() -> None:
    from skimage.filters import threshold_otsu

    for seed in range(5):
        heatmap = min_max(noise(1, seed) + 2 * (noise(1, seed + 9) > 0.5), (1, 2))[0]
        edges = torch.linspace(0, 1, 257, dtype=torch.float64)
        theirs = threshold_otsu(
            hist=(np.histogram(heatmap.numpy(), edges.numpy())[0], ((edges[1:] + edges[:-1]) / 2).numpy())
        )
        assert (heatmap > otsu(heatmap)).equal(heatmap > float(theirs))


def test_a_part_of_nothing_is_whole() -> None:
    """A full mask that is found fully has no background: both classes are right."""
    masks = torch.ones(1, SIZE, SIZE, dtype=torch.bool)
    context = case_of(noise(1), masks=masks)
    table = torch.tensor([256.0, 0, 0, 0], dtype=torch.float64)

    def shares(_: Tensor) -> Tensor:
        tp, fp, fn, tn = table.expand(1, 1, 4).unbind(-1)
        return torch.stack([torch.stack([tp, tp + fp + fn], -1), torch.stack([tn, tn + fp + fn], -1)], -2)

    assert score_thresholded(context, "", "half", "images", "nearest", shares).values.tolist() == [[1.0]]


# Spuriosity: outside over inside


def test_spuriosity_of_leave_one_out_is_that_of_tokens_left_out_by_hand() -> None:
    """z_k = |p − p without token k| of a ViT in float64; inside are the patches that the box fills by half or more."""
    model, images = double("timm-vit", 3)
    masks = torch.zeros(3, 32, 32, dtype=torch.bool)
    masks[0, 3:18, 9:30] = True
    masks[1, 8:12, 0:24] = True
    masks[1, 20:22, 4:6] = True  # the box reaches down to here
    masks[2] = True  # nothing is outside
    inside = [
        [1, 2, 5, 6, 7],  # of patch 3 it fills 30 of 64 pixels
        [4 * r + c for r in (1, 2) for c in (0, 1, 2)],
        list(range(16)),
    ]
    scores = cv.evaluate(model, images, "leave-one-out", ["a-tsi", "m-tsi"], target=2, masks=masks, baselines=False)
    for row in range(2):
        image = images[row : row + 1]
        whole = float(logits_without(model.module, image, [], 16).softmax(-1)[2])
        z = [abs(whole - float(logits_without(model.module, image, [k], 16).softmax(-1)[2])) for k in range(16)]
        within = [z[k] for k in inside[row]]
        beyond = [z[k] for k in range(16) if k not in inside[row]]
        average = (math.fsum(beyond) / len(beyond)) / (math.fsum(within) / len(within))
        assert_same(scores["leave-one-out", "a-tsi"].values[row], average, magnitude=100.0)
        assert_same(scores["leave-one-out", "m-tsi"].values[row], max(beyond) / max(within), magnitude=100.0)
    for metric in ("a-tsi", "m-tsi"):
        assert scores["leave-one-out", metric].values[2].isnan()


def test_spuriosity_of_maps_by_hand() -> None:
    maps = torch.tensor([[[4.0, -2.0], [1.0, 0.0]]], dtype=torch.float64)
    masks = torch.zeros(1, 16, 16, dtype=torch.bool)
    masks[:, :8, :8] = True
    masks[:, 8:, 12:] = True  # half of the last patch
    context = case_of(maps, masks=masks)
    assert values("a-tsi(box=false)", context).tolist() == [[((2 + 1) / 2) / ((4 + 0) / 2)]]
    assert values("m-tsi(box=false)", context).tolist() == [[2 / 4]]
    assert values("a-tsi", context).isnan().all(), "the box is the whole image"
    empty = case_of(maps, masks=torch.zeros(1, 16, 16, dtype=torch.bool))
    assert values("a-tsi", empty).isnan().all()
    assert values("m-tsi", empty).isnan().all()
    dark = case_of(torch.tensor([[[0.0, 2.0], [1.0, 0.0]]], dtype=torch.float64), masks=masks)
    assert values("m-tsi(box=false)", dark).isnan().all(), "no relevance inside"
    void = torch.zeros(1, 16, 16, dtype=torch.bool)
    void[:, 8:, :8] = True
    assert values("a-tsi(box=false)", case_of(maps, masks=masks, void=void)).tolist() == [[2 / ((4 + 0) / 2)]]
