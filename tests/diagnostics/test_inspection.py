"""The numbers behind the checks, against closed forms and brute force in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import clairvit as cv
from clairvit.diagnostics.arithmetic import OUTLIER_RATIO, find_outliers
from clairvit.diagnostics.inspection import (
    DEVIATIONS,
    RoundingBound,
    buffers_restored,
    differences,
    first_difference,
    first_not_finite,
    inspect_backward,
    inspect_forward,
    snapshot,
)
from clairvit.diagnostics.structure import blocks_without_attention
from clairvit.tracing.recording import record
from clairvit.tracing.structure import model_structure
from clairvit.tracing.trace import run_backward
from helpers.broken_models import Artefacts, uninitialised, wrapped
from helpers.custom_vits import Block, Halving, HalvingInPlace, HomeMade, MatmulAttention
from helpers.rounding import assert_same
from helpers.tiny_models import fresh, pixels
from helpers.tiny_models import wrapped as tiny_wrapped


@pytest.mark.parametrize("block", [Halving, HalvingInPlace])
def test_cancellation_in_closed_form(block: type[Block]) -> None:
    model = wrapped(uninitialised(lambda: HomeMade(lambda: block(MatmulAttention), depth=2)).double())
    image = torch.randn(2, 3, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ratios = record(model, image, recorders=(cv.recorders.ResidualSums,))[cv.recorders.ResidualSums].by_sum
    assert_same(ratios, [[1.0, 3.0], [1.0, 3.0]])


@pytest.mark.parametrize(
    "name",
    [
        *("timm-vit", "timm-dinov2-reg4", "timm-swiglu", "timm-sam", "hf-vit-eager", "hf-dinov2-sdpa"),
        *("torchvision-vit", "open_clip-tower", "home-lucid", "home-sequence-first", "home-encoder-pre-norm"),
        *("home-encoder-post-norm", "home-torch-encoder", "timm-post-norm"),
    ],
)
def test_each_block_has_two_residual_sums(name: str) -> None:
    model, image = tiny_wrapped(name, torch.float64), pixels(name, dtype=torch.float64)
    ratios = record(model, image, recorders=(cv.recorders.ResidualSums,))[cv.recorders.ResidualSums].by_sum
    assert [len(layer) for layer in ratios] == [2] * len(model_structure(model, image).layers)
    assert all(ratio >= 1 for layer in ratios for ratio in layer)


def test_cancellation_against_brute_force() -> None:
    """The first sum of each block of a pre-norm ViT, from hooks on its parts."""
    model, image = fresh("timm-vit", torch.float64), pixels("timm-vit", dtype=torch.float64)
    given: list[Tensor] = []
    added: list[Tensor] = []
    for block in model.module.blocks:  # type: ignore[union-attr]
        block.register_forward_pre_hook(lambda _, args: given.append(args[0].detach()))
        block.attn.register_forward_hook(lambda _, args, out: added.append(out.detach()))
    model_structure(model, image)  # a forward pass of its own
    given.clear()
    added.clear()
    ratios = record(model, image, recorders=(cv.recorders.ResidualSums,))[cv.recorders.ResidualSums].by_sum
    count = len(ratios)  # hooks that are new may make the model be looked at again: the recorded pass is the last
    for layer, x, up in zip(ratios, given[-count:], added[-count:], strict=True):
        assert_same(layer[0], float((x.abs() + up.abs()).sum() / (x + up).abs().sum()))


def test_outliers_against_brute_force() -> None:
    model = wrapped(uninitialised(Artefacts).double())
    image = torch.randn(2, 3, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    trace = run_backward(record(model, image, differentiable=False), None, None)
    outliers = find_outliers(trace)
    for place in range(2):
        ratios, shares = [], []
        for layer in trace.layers[1:]:
            norms = layer.x[place, 1:].norm(dim=-1)
            ratio = norms / norms.median()
            ratios.append(float(ratio.max()))
            shares.append((float(layer.A[place, :, :, 1:][..., ratio > OUTLIER_RATIO].sum(-1).mean()), layer.index))
        assert_same(outliers.ratios[place], max(ratios))
        share, index = max(shares)
        assert_same(outliers.shares[place], share)
        assert outliers.layers[place] == index
        assert outliers.counts[place] == 1


def test_the_rounding_bound_is_its_formula() -> None:
    bound = RoundingBound(unit=2.0**-24, operations=100, width=64, magnitude=3.0, amplified=0.0)
    assert bound.scores == DEVIATIONS * math.sqrt(6400) * 2.0**-24 * 3.0
    assert bound.of_terms(5.0) == DEVIATIONS * math.sqrt(6400) * 2.0**-24 * 5.0
    shaky = RoundingBound(unit=2.0**-24, operations=100, width=64, magnitude=3.0, amplified=1e-3)
    assert shaky.scores == DEVIATIONS * math.sqrt(6400) * 1e-3


def test_a_forward_is_counted_and_measured() -> None:
    module = nn.Sequential(nn.Flatten(), nn.Linear(12, 5), nn.ReLU(), nn.Linear(5, 2))
    model = cv.wrap(module, size=2)
    inspection = inspect_forward(model, torch.ones(1, 3, 2, 2))
    assert [call.name for call in inspection.calls] == ["0", "1", "2", "3"]
    assert inspection.operations == 4  # flatten, linear, relu, linear
    assert inspection.width == 12
    assert inspection.dtype == torch.float32
    with torch.no_grad():
        hidden = module[1](torch.ones(1, 12))
    assert inspection.calls[1].largest == pytest.approx(float(hidden.abs().max()))


def test_first_difference_and_first_not_finite() -> None:
    class Noise(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.rand(())

    class Root(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x - 10).sqrt()

    image = torch.ones(1, 3, 2, 2)
    noisy = cv.wrap(nn.Sequential(nn.Flatten(), nn.Linear(12, 4), Noise(), nn.Linear(4, 2)), size=2)
    assert first_difference(inspect_forward(noisy, image), inspect_forward(noisy, image)) == "2 (Noise)"
    broken = cv.wrap(nn.Sequential(nn.Flatten(), nn.Identity(), Root(), nn.Linear(12, 2)), size=2)
    call = first_not_finite(inspect_forward(broken, image))
    assert call is not None
    assert call.name == "2"


def test_the_gradient_ends_in_a_module_or_between_two() -> None:
    class Cut(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.detach()

    image = torch.ones(1, 3, 2, 2)
    inside = cv.wrap(nn.Sequential(nn.Flatten(), nn.Linear(12, 4), Cut(), nn.Linear(4, 2)), size=2)
    assert inspect_backward(inside, image).blocked_by == "in 2 (Cut)"

    class Outside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(12, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x.flatten(1)).detach())

    assert inspect_backward(cv.wrap(Outside(), size=2), image).blocked_by == "after first (Linear)"
    assert inspect_backward(cv.wrap(nn.Sequential(nn.Flatten(), nn.Linear(12, 2)), size=2), image).blocked_by == ""


def test_a_snapshot_names_what_changed() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    before = snapshot(module)
    with torch.no_grad():
        module[0].weight[0, 0] += 1
    module[1].training = False
    module[1].running_mean += 1  # type: ignore[operator]
    module[0].bias.requires_grad_(False)
    module.register_forward_hook(lambda *_: None)
    assert differences(before, snapshot(module)) == [
        "1.training",
        "buffer 1.running_mean",
        "hooks of module",
        "parameter 0.bias",
        "parameter 0.weight",
    ]


def test_buffers_are_restored_also_after_an_error() -> None:
    module = nn.BatchNorm1d(2)
    before, tensor = snapshot(module), module.running_mean

    def interrupted() -> None:
        with buffers_restored(module):
            module.running_mean += 1  # type: ignore[operator]
            module.running_var = torch.zeros(2)  # another tensor in its place
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        interrupted()
    assert snapshot(module) == before
    assert module.running_mean is tensor


@pytest.mark.parametrize(
    "name", ["timm-vit", "timm-parallel", "hf-vit-sdpa", "home-loop", "timm-cait", "hf-siglip-sdpa"]
)
def test_no_block_of_a_healthy_model_lacks_attention(name: str) -> None:
    model, image = tiny_wrapped(name), pixels(name, 1)
    assert (
        blocks_without_attention(model.module, model_structure(model, image), inspect_forward(model, image).called)
        == []
    )
