"""The one table of torch operations: every spelling of an operation has one kind, and its arguments one form."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from clairvit.errors import UnknownName
from clairvit.tracing import ops
from clairvit.tracing.rules import LINEAR, TABLES, rule_table
from clairvit.tracing.rules.attnlrp import attnlrp


class Seen(TorchFunctionMode):
    """Keep the kinds of the operations that run."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = ops.kind_of(func)
        self.kinds += [] if kind is None else [kind]
        return func(*args, **(kwargs or {}))


x, y = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
SPELLINGS: list[tuple[str, Callable[[], object]]] = [
    (ops.ADD, lambda: x + y),
    (ops.ADD, lambda: 1 + x),
    (ops.ADD, lambda: torch.add(x, y)),
    (ops.ADD_IN_PLACE, lambda: x.clone().__iadd__(y)),
    (ops.ADD_IN_PLACE, lambda: x.clone().add_(y)),
    (ops.SUBTRACT, lambda: x - y),
    (ops.REVERSED_SUBTRACT, lambda: 1 - x),
    (ops.MULTIPLY, lambda: x * y),
    (ops.MULTIPLY, lambda: 2 * x),
    (ops.DIVIDE, lambda: x / y),
    (ops.MATMUL, lambda: x @ y.mT),
    (ops.MATMUL, lambda: torch.bmm(x, y.mT)),
    (ops.EINSUM, lambda: torch.einsum("bid,bjd->bij", x, y)),
    (ops.SOFTMAX, lambda: x.softmax(-1)),
    (ops.SOFTMAX, lambda: nn.Softmax(-1)(x)),
    (ops.NORM, lambda: nn.LayerNorm(4)(x)),
    (ops.NORM, lambda: nn.RMSNorm(4)(x)),
    (ops.LINEAR, lambda: nn.Linear(4, 5)(x)),
    (ops.CONV, lambda: nn.Conv2d(2, 5, 1)(x)),
    (ops.ACTIVATION, lambda: nn.GELU()(x)),
    (ops.GATE, lambda: torch.sigmoid(x)),
    (ops.CONCATENATE, lambda: torch.cat([x, y])),
    (ops.ATTENTION, lambda: F.scaled_dot_product_attention(x, y, x)),
]


@pytest.mark.parametrize(("kind", "run"), SPELLINGS, ids=[f"{i}-{kind}" for i, (kind, _) in enumerate(SPELLINGS)])
def test_every_spelling_has_its_kind(kind: str, run: Callable[[], object]) -> None:
    with Seen() as seen:
        run()
    assert kind in seen.kinds


@pytest.mark.parametrize("centred", [True, False])
def test_arguments_of_norms_are_the_same_by_position_and_by_name(centred: bool) -> None:
    weight, bias = torch.randn(4), torch.randn(4)
    function = F.layer_norm if centred else F.rms_norm
    positions = (x, (4,), weight, bias, 0.1) if centred else (x, (4,), weight, 0.1)
    names = {"normalized_shape": (4,), "weight": weight, "eps": 0.1} | ({"bias": bias} if centred else {})
    for norm in (ops.NormArguments.of(function, positions, {}), ops.NormArguments.of(function, (x,), names)):
        assert (norm.x is x, norm.weight is weight, norm.eps, norm.centred) == (True, True, 0.1, centred)
        assert norm.bias is (bias if centred else None)
    assert ops.NormArguments.of(function, (x, (4,)), {}).eps == (1e-5 if centred else torch.finfo(x.dtype).eps)


def test_out_of_place_forms_have_the_same_value() -> None:
    for function in (Tensor.add_, Tensor.sub_, Tensor.mul_, Tensor.div_):
        assert torch.equal(ops.out_of_place(function)(x, y), function(x.clone(), y))
    assert ops.out_of_place(torch.add) is torch.add


def test_rule_tables_are_values() -> None:
    table = attnlrp(gamma_lin=0.05, gamma_conv=0.25)
    assert str(table) == "attnlrp(gamma_lin=0.05,gamma_conv=0.25,eps=0.0,inside=True)"
    assert rule_table("linear") is LINEAR is rule_table(LINEAR)
    assert rule_table(str(table)) == rule_table("attnlrp(gamma_lin=0.05, gamma_conv=0.25)") == table
    assert table != attnlrp(gamma_lin=0.05, gamma_conv=0.25, inside=False)
    assert len({*TABLES.values(), table, attnlrp(gamma_lin=0.05, gamma_conv=0.25)}) == len(TABLES) + 1
    for other in (*TABLES.values(), table):
        restored = pickle.loads(pickle.dumps(other))
        assert restored == other
        assert restored.rules.keys() == other.rules.keys()
    for unknown in ("linaer", "linear(eps=1)"):
        with pytest.raises(UnknownName, match=r"There is no rule table"):
            rule_table(unknown)
