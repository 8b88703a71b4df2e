"""Relevance does not depend on how a norm, an activation or a linear layer is spelled; what has no rule is reported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clairvit.tracing.capture import Capture
from clairvit.tracing.rules import ActiveRuleTable, rule_table
from clairvit.tracing.rules.coverage import note_on, uncovered_operations
from helpers import spellings

HOLDING = ["linear", "attnlrp", "reslrp", "libra"]  # tables that hold the spread of a norm fixed
PASSING = ["chefer", "lrp", "deep-taylor"]  # tables that pass relevance through a norm entry by entry
GAMMA = ["attnlrp(gamma_lin=0.25)", "cp-lrp(gamma_lin=0.25,eps=0.1)", "reslrp(gamma=1,gamma_lin=0.1)"]


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def relevance(function: Callable[[Tensor], Tensor], rules: str, width: int = 8) -> tuple[Tensor, tuple[str, ...]]:
    """Return the backward of a function of x [2, 5, width] under a rule table, and what had no rule."""
    table = rule_table(rules)
    switch = ActiveRuleTable.among([table])
    leaf = randn(2, 5, width).requires_grad_()
    with Capture(2, switch):
        out = function(leaf * 1.0)
    if switch is not None:
        switch.table = table
    without = uncovered_operations(out, (), table)
    return torch.autograd.grad(out, leaf, randn(*out.shape, seed=1))[0], without


def assert_same(
    function: Callable[[Tensor], Tensor], library: Callable[[Tensor], Tensor], rules: str, noted: Any = ()
) -> None:
    value, without = relevance(function, rules)
    expected, nothing = relevance(library, rules)
    torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-10)
    assert (without, nothing) == (noted, ())


def of_norm(norm: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
    weight, bias = nn.Parameter(randn(8, seed=2), False), nn.Parameter(randn(8, seed=3), False)
    return lambda x: norm(x, weight, bias)


def of_rms(norm: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
    weight = nn.Parameter(randn(8, seed=2), False)
    return lambda x: norm(x, weight)


def of_linear(linear: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
    weight, bias = nn.Parameter(randn(6, 8, seed=2), False), nn.Parameter(randn(6, seed=3), False)
    return lambda x: linear(x, weight, bias)


@pytest.mark.parametrize("rules", ["plain", *HOLDING, *PASSING])
@pytest.mark.parametrize("spelling", spellings.NORMS)
def test_a_layer_norm_in_other_words_has_the_relevance_of_torchs_own(spelling: str, rules: str) -> None:
    # A mean by a matrix product might be a branch of layers: the relevance is right, and ResLRP's note is cautious.
    noted = ("sub",) if (spelling, rules) == ("by_weights", "reslrp") else ()
    assert_same(of_norm(spellings.NORMS[spelling]), of_norm(spellings.layer_norm), rules, noted)


@pytest.mark.parametrize("rules", ["plain", *HOLDING])
@pytest.mark.parametrize("spelling", spellings.UNCENTRED_NORMS)
def test_a_norm_that_is_never_centred_as_a_whole_is_right_where_its_spread_is_held(spelling: str, rules: str) -> None:
    assert_same(of_norm(spellings.UNCENTRED_NORMS[spelling]), of_norm(spellings.layer_norm), rules)


@pytest.mark.parametrize("rules", PASSING)
@pytest.mark.parametrize("spelling", spellings.UNCENTRED_NORMS)
def test_and_is_reported_where_relevance_passes_through_entry_by_entry(spelling: str, rules: str) -> None:
    assert "uncentred" in relevance(of_norm(spellings.UNCENTRED_NORMS[spelling]), rules)[1]


@pytest.mark.parametrize("rules", [*HOLDING, *PASSING])
@pytest.mark.parametrize("spelling", spellings.UNKNOWN_NORMS)
def test_a_norm_without_a_rule_is_reported_by_name(spelling: str, rules: str) -> None:
    name = {"native": "native_layer_norm", "as_group_norm": "native_group_norm"}.get(spelling, spelling)
    assert relevance(of_norm(spellings.UNKNOWN_NORMS[spelling]), rules)[1] == (name,)


@pytest.mark.parametrize("rules", ["plain", *HOLDING, *PASSING])
@pytest.mark.parametrize("spelling", spellings.RMS_NORMS)
def test_an_rms_norm_in_other_words_has_the_relevance_of_torchs_own(spelling: str, rules: str) -> None:
    assert_same(of_rms(spellings.RMS_NORMS[spelling]), of_rms(spellings.rms_norm), rules)


ACTIVATIONS: list[tuple[str, Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = [
    *((f"gelu {name}", function, F.gelu) for name, function in spellings.GELUS.items()),
    *((f"silu {name}", function, F.silu) for name, function in spellings.SILUS.items()),
    *(
        (f"tanh {name}", function, lambda x: F.gelu(x, approximate="tanh"))
        for name, function in spellings.TANH_GELUS.items()
    ),
]


@pytest.mark.parametrize("rules", ["plain", *HOLDING, *PASSING])
@pytest.mark.parametrize(("function", "library"), [a[1:] for a in ACTIVATIONS], ids=[a[0] for a in ACTIVATIONS])
def test_an_activation_in_other_words_has_the_relevance_of_torchs_own(
    function: Callable[[Tensor], Tensor], library: Callable[[Tensor], Tensor], rules: str
) -> None:
    assert_same(function, library, rules)


@pytest.mark.parametrize("rules", [*HOLDING, *PASSING])
def test_a_custom_autograd_function_is_reported_by_name(rules: str) -> None:
    assert relevance(spellings.UNKNOWN_GELUS["GeluFunction"], rules)[1] == ("GeluFunction",)


@pytest.mark.parametrize("rules", [*HOLDING, *PASSING])
@pytest.mark.parametrize("spelling", spellings.SILUS)
def test_a_gated_mlp_does_not_depend_on_how_its_activation_is_spelled(spelling: str, rules: str) -> None:
    first, second = (nn.Parameter(randn(8, 8, seed=seed), False) for seed in (4, 5))

    def gated(silu: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda x: silu(F.linear(x, first)) * F.linear(x, second)

    assert_same(gated(spellings.SILUS[spelling]), gated(F.silu), rules)


@pytest.mark.parametrize("rules", ["plain", *HOLDING, *PASSING, *GAMMA])
@pytest.mark.parametrize("spelling", spellings.LINEARS)
def test_a_linear_layer_in_other_words_has_the_relevance_of_torchs_own(spelling: str, rules: str) -> None:
    assert_same(of_linear(spellings.LINEARS[spelling]), of_linear(F.linear), rules)


@pytest.mark.parametrize("rules", [*PASSING, *GAMMA])
@pytest.mark.parametrize("spelling", spellings.UNKNOWN_LINEARS)
def test_a_linear_layer_without_a_rule_is_reported(spelling: str, rules: str) -> None:
    name = {"sum": "sum of a product", "tensordot": "mm"}[spelling]
    assert relevance(of_linear(spellings.UNKNOWN_LINEARS[spelling]), rules)[1] == (name,)


UNRULED: dict[str, tuple[Callable[[Tensor], Tensor], tuple[str, ...]]] = {
    "product of two": (lambda x: F.linear(x, torch.eye(8).double()) * x.flip(-1), ("mul",)),
    "square": (lambda x: x * x, ("mul",)),
    "power": (lambda x: F.relu(x) ** 2, ("pow",)),
    "quotient": (lambda x: x / x.flip(-1), ("div",)),
    "exp": (torch.exp, ("exp",)),
    "elu": (F.elu, ("elu",)),
    "gate of a mean": (lambda x: x * torch.sigmoid(x.mean(1, keepdim=True) @ torch.eye(8).double()), ()),
    "relu": (lambda x: F.relu(x).amax(-1), ()),
    "constant factor": (lambda x: (x * 3 / 7 - 2).mean(1), ()),
    "views and joins": (lambda x: torch.cat([x[:, 1:], x.flip(1)], 1).transpose(1, 2).reshape(2, -1), ()),
    "detached": (lambda x: x * x.detach(), ()),
}


@pytest.mark.parametrize("case", UNRULED)
def test_what_is_linear_needs_no_rule_and_what_is_not_is_reported(case: str) -> None:
    function, expected = UNRULED[case]
    assert relevance(function, "attnlrp")[1] == expected


@pytest.mark.parametrize("rules", ["plain", "residual"])
def test_tables_that_are_gradients_report_nothing(rules: str) -> None:
    assert relevance(torch.exp, rules)[1] == ()


def test_the_note_names_three_operations() -> None:
    names: Any = ("mul", "exp", "mul", "pow", "div")
    assert note_on(names, "attnlrp(gamma_lin=0.25)") == (
        "5 operations of the model had no AttnLRP rule (mul, exp, pow, …); relevance may be wrong."
    )
    assert note_on(("exp",), "linear") == ("1 operation of the model had no CP-LRP rule (exp); relevance may be wrong.")
