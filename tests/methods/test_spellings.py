"""Whole models whose norms, activations or linear layers are written out get the maps of torch's own, or an error."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import clairvit as cv
from clairvit.errors import NotApplicable
from helpers import spellings
from helpers.covering import covering_array
from helpers.method_conditions import method_of
from helpers.tiny_models import build, pixels

NAME = "timm-vit"


class Norm(nn.Module):
    """A LayerNorm that another function computes."""

    def __init__(self, norm: nn.LayerNorm, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.weight, self.bias, self.function = norm.weight, norm.bias, function
        norm.eps = spellings.EPS

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight, self.bias)


class Activation(nn.Module):
    """An activation that another function computes."""

    def __init__(self, _: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Linear(nn.Module):
    """A linear layer that another function computes."""

    def __init__(self, linear: nn.Linear, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.weight, self.bias, self.function = linear.weight, linear.bias, function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight, self.bias)


def respelled(kind: type[nn.Module], spelling: Any, function: Callable[..., Tensor]) -> nn.Module:
    """Return the tiny ViT with every such module of its blocks computed by a function."""
    module = build(NAME).double()
    for part in module.modules():
        if isinstance(part, nn.LayerNorm):
            part.eps = spellings.EPS
    for block in module.blocks:  # type: ignore[union-attr]
        for parent in [*block.modules()]:
            for name, child in [*parent.named_children()]:
                if isinstance(child, kind):
                    setattr(parent, name, spelling(child, function))
    return module


def explained(module: nn.Module, method: str) -> cv.Explanation:
    return cv.explain(cv.wrap(module, size=32), pixels(NAME, 1, dtype=torch.float64), method, target=1)


def assert_same_maps(module: nn.Module, method: str) -> None:
    library = respelled(nn.Bilinear, None, torch.add)  # nothing is replaced
    expected, value = explained(library, method), explained(module, method)
    torch.testing.assert_close(value.maps, expected.maps, rtol=1e-10, atol=1e-10 * float(expected.maps.abs().max()))
    assert not [note for note in value.notes if "relevance may be wrong" in note]


def kind_of(method: str) -> tuple[Hashable, ...]:
    """Return what reads a spelling: the rule tables, or the family of a method without one."""
    return method_of(method).tables or (method_of(method).family,)


WRITTEN_NORMS = ["by_sqrt", "by_negative_power", "divided_in_place", "by_var_mean"]
OF_NORMS = [
    *(
        "attnlrp+plus",
        "attnlrp",
        "cp-lrp",
        "reslrp",
        "transatt",
        "lrp",
        "deep-taylor",
        "libra-fullgrad-plus",
        "fullgrad",
    ),
    *("fullgrad(rules=linear)", "globenc", "attin", "alti", "decompx(bias=absdot)", "gradcam", "scorecam(relu=false)"),
]
OF_ACTIVATIONS = ["attnlrp+plus", "transatt", "deep-taylor", "fullgrad", "fullgrad(rules=linear)", "decompx(bias=norm)"]
OF_LINEARS = ["attnlrp(gamma_lin=0.25)", "cp-lrp(preset=vit)", "transatt", "lrp", "deep-taylor", "fullgrad", "globenc"]


@pytest.mark.parametrize(
    ("norm", "method"),
    covering_array(
        ["by_sqrt", "by_negative_power", "divided_in_place", "by_var_mean"], OF_NORMS, column_traits=kind_of
    ),
)
def test_norms_that_are_written_out_change_no_map(norm: str, method: str) -> None:
    assert_same_maps(respelled(nn.LayerNorm, Norm, spellings.NORMS[norm]), method)


@pytest.mark.parametrize(
    ("gelu", "method"),
    covering_array(["ndtr", "packet", "erf", "quotient"], OF_ACTIVATIONS, column_traits=kind_of),
)
def test_activations_that_are_written_out_change_no_map(gelu: str, method: str) -> None:
    assert_same_maps(respelled(nn.GELU, Activation, spellings.GELUS[gelu]), method)


@pytest.mark.parametrize(
    ("linear", "method"), covering_array(["@", "einsum", "addmm", "conv1d"], OF_LINEARS, column_traits=kind_of)
)
def test_linear_layers_that_are_written_out_change_no_map(linear: str, method: str) -> None:
    assert_same_maps(respelled(nn.Linear, Linear, spellings.LINEARS[linear]), method)


@pytest.mark.parametrize("method", ["attnlrp+plus", "decompx", "transatt", "attnlrp+layer:1"])
def test_a_custom_autograd_function_is_named_in_the_notes(method: str) -> None:
    module = respelled(nn.GELU, Activation, spellings.UNKNOWN_GELUS["GeluFunction"])
    notes = [note for note in explained(module, method).notes if "relevance may be wrong" in note]
    assert len(notes) == 1
    assert "GeluFunction" in notes[0]
    assert all("relevance may be wrong" not in note for note in explained(module, "genatt").notes)


def test_the_notes_follow_the_layers_that_the_model_has() -> None:
    module = respelled(nn.GELU, Activation, spellings.UNKNOWN_GELUS["GeluFunction"])
    assert explained(module, "attnlrp").notes[-1].startswith(f"{len(module.blocks)} operations")  # type: ignore[arg-type]
    assert (
        explained(copy.deepcopy(build(NAME)).double(), "attnlrp").notes == explained(build(NAME).double(), "ixg").notes
    )


@pytest.mark.parametrize("method", ["gradcam", "scorecam"])
@pytest.mark.parametrize("norm", ["scale_and_shift", "native", "as_group_norm", "channels_first"])
def test_maps_that_read_the_last_norm_are_refused_where_it_is_not_recognised(norm: str, method: str) -> None:
    functions = spellings.NORMS | spellings.UNCENTRED_NORMS | spellings.UNKNOWN_NORMS
    with pytest.raises(NotApplicable, match="norm before the last attention"):
        explained(respelled(nn.LayerNorm, Norm, functions[norm]), method)


@pytest.mark.parametrize("linear", ["@", "einsum", "addmm", "conv1d", "bias apart", "sum", "tensordot"])
def test_biases_are_not_distributed_where_they_belong_to_no_linear_layer(linear: str) -> None:
    functions = spellings.LINEARS | spellings.UNKNOWN_LINEARS
    with pytest.raises(NotApplicable, match="writes out a linear layer"):
        explained(respelled(nn.Linear, Linear, functions[linear]), "decompx(bias=absdot)")


def test_the_doctor_fails_operations_without_a_rule() -> None:
    images = pixels(NAME, 1)
    module = respelled(nn.GELU, Activation, spellings.UNKNOWN_GELUS["GeluFunction"]).float()
    check = cv.doctor(cv.wrap(module, size=32), images)["rules"]
    assert check.status == "fail"
    assert "2 operations of the model had no AttnLRP rule (GeluFunction)" in check.finding
    assert cv.doctor(cv.wrap(build(NAME), size=32), images)["rules"].status == "pass"
