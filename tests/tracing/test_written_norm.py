"""RMSNorm that a model writes out, x · rsqrt(mean(x²) + eps) · w, follows the rules of torch's own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from clairvit.tracing.capture import Capture
from clairvit.tracing.rules import ActiveRuleTable, rule_table


def written(x: Tensor, weight: Tensor) -> Tensor:
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def as_method(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight


def fused(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, 1e-6)


@pytest.mark.parametrize("norm", [written, as_method])
@pytest.mark.parametrize("rules", ["plain", "linear", "attnlrp", "reslrp", "libra", "chefer", "lrp", "deep-taylor"])
def test_a_norm_that_is_written_out_is_a_norm(norm: object, rules: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, c = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((2, 5, 8), (8,), (2, 5, 8))
    )

    def gradient(function: object) -> Tensor:
        table = rule_table(rules)
        switch = ActiveRuleTable.among([table])
        leaf = x.clone().requires_grad_()
        with Capture(2, switch):
            out = function(leaf, weight)  # type: ignore[operator]
        if switch is not None:
            switch.table = table
        return torch.autograd.grad(out, leaf, c)[0]

    torch.testing.assert_close(gradient(norm), gradient(fused), rtol=1e-10, atol=1e-12)
    if rules == "linear":  # nothing of the root is differentiated
        root = (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        torch.testing.assert_close(gradient(norm), c * weight * root, rtol=1e-12, atol=1e-12)
