"""The cascade: which parameters are drawn anew at each step, from which law, and what is never touched."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import clairvit as cv
from clairvit.methods.registry import METHODS, NOTHING
from clairvit.metrics.randomisation import parameter_layers, spread_steps
from helpers.tiny_models import build

KIND = "timm-vit"
ORDERS = ["top-down", "bottom-up", "independent"]


def states(module: nn.Module, order: str = "top-down", layers: int | None = None, by: str = "normal") -> list[Any]:
    """The parameters of every model of a cascade, as a method sees them that MPRT asks for maps."""
    seen: list[Any] = []

    def watched(trace: cv.Trace) -> Tensor:
        seen.append(copy.deepcopy(trace.recording.model.module.state_dict()))
        return torch.arange(16.0).reshape(1, 4, 4)

    with METHODS.restored():
        cv.method("watched", output="image", requires=NOTHING, class_specific=False)(watched)
        model, image = cv.wrap(module, name="tiny", size=(32, 32), mean=0.5, std=0.5), torch.zeros(1, 3, 32, 32)
        cv.evaluate(model, image, "watched", "mprt", target=1, baselines=False, order=order, layers=layers, by=by)
    trained, *randomised = seen
    assert not changed(module.state_dict(), trained)
    return randomised


def changed(before: dict[str, Tensor], after: dict[str, Tensor]) -> set[str]:
    return {name for name in before if not torch.equal(before[name], after[name])}


@pytest.mark.parametrize("by", ["normal", "shuffle"])
@pytest.mark.parametrize("kind", [KIND, "timm-vit-qk-norm", "hf-vit-eager", "torchvision-vit", "home-batchnorm-stem"])
def test_the_last_step_has_every_parameter_randomised(kind: str, by: str) -> None:
    module = build(kind)
    parameters = {name: p for name, p in module.named_parameters() if p.numel() > 1}
    for order in ("top-down", "bottom-up"):
        (last,) = states(module, order, 1, by)
        assert changed(module.state_dict(), last) == set(parameters), "all parameters, no buffer"
        for name, p in parameters.items():
            if by == "shuffle":
                assert torch.equal(p.detach().flatten().sort().values, last[name].flatten().sort().values)
    if kind == KIND:
        assert {"cls_token", "pos_embed"} <= set(parameters)


def test_normal_draws_keep_mean_and_deviation_and_differ_between_equal_layers() -> None:
    module = build(KIND)
    (last,) = states(module, layers=1)
    for name, p in module.named_parameters():
        n, deviation = p.numel(), float(p.detach().std(correction=0))
        assert abs(float(last[name].mean() - p.detach().mean())) < 5 * deviation / n**0.5, name
        assert abs(float(last[name].std(correction=0)) / deviation - 1) < 5 / (2 * n) ** 0.5, name
    standard = [(last[f"blocks.{k}.attn.qkv.weight"]) for k in range(2)]
    standard = [(x - x.mean()) / x.std() for x in standard]
    assert (standard[0] - standard[1]).abs().mean() > 0.5


def test_reset_initialises_modules_that_can_and_draws_the_rest() -> None:
    module = build(KIND)
    (last,) = states(module, layers=1, by="reset")
    for name, part in module.named_modules():
        if isinstance(part, nn.LayerNorm):
            assert (last[f"{name}.weight"] == 1).all()
            assert (last[f"{name}.bias"] == 0).all()
    assert last["head.weight"].abs().max() <= 1 / module.head.in_features**0.5, "uniform, as nn.Linear does"
    assert changed(module.state_dict(), last) == {name for name, _ in module.named_parameters()}
    (again,) = states(module, layers=1, by="reset")
    assert not changed(last, again)


@pytest.mark.parametrize("order", ORDERS)
def test_the_cascade_goes_layer_by_layer(order: str) -> None:
    module = build(KIND)
    names = {id(p): name for name, p in module.named_parameters()}
    owned = [{names[id(p)] for p in parameters} for _, parameters in parameter_layers(module)]
    assert owned[0] == {"cls_token", "pos_embed"}
    assert owned[-1] == {"head.weight", "head.bias"}
    every = states(module, order)
    assert len(every) == len(owned)
    for step, state in enumerate(every):
        expected = {
            "top-down": owned[-step - 1 :],
            "bottom-up": owned[: step + 1],
            "independent": owned[step : step + 1],
        }
        assert changed(module.state_dict(), state) == set.union(*expected[order])


@pytest.mark.parametrize("order", ORDERS)
def test_fewer_steps_are_some_of_all_steps(order: str) -> None:
    module = build(KIND)
    every, some = states(module, order), states(module, order, 5)
    for step, state in zip(spread_steps(len(every), 5), some, strict=True):
        assert not changed(every[step - 1], state)


def test_steps_are_spread_evenly_up_to_the_last() -> None:
    assert spread_steps(75, 3) == [25, 50, 75]
    assert spread_steps(7, 3) == [3, 5, 7]
    assert spread_steps(4, 12) == spread_steps(4, None) == [1, 2, 3, 4]
    assert spread_steps(75, 1) == [75]


def test_a_shared_parameter_is_drawn_once() -> None:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    (_, first_layer), (_, rest) = parameter_layers(nn.Sequential(first, second))
    assert [id(p) for p in first_layer] == [id(first.weight), id(first.bias)]
    assert [id(p) for p in rest] == [id(second.bias)]
