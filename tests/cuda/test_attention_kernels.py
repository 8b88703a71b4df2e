"""Sums over f(A, G) of one layer by the Triton kernels, in the interpreter and on a GPU, against the matrices."""

from __future__ import annotations

import pytest

from clairvit.cuda import kernels
from helpers.attention_calls import attention_call, kernel_cases, largest_excess
from helpers.triton_interpreter import interpreted_lines


def test_kernels_are_for_fused_attention_on_cuda() -> None:
    call, _ = attention_call(1, 2, 20, width=16)
    assert not kernels.attention_applies(call)


def test_kernels_in_the_interpreter() -> None:
    lines = interpreted_lines("helpers.attention_calls", "print_kernel_cases")
    assert len(lines) == len(kernel_cases("cpu"))
    assert [line for line in lines if not line.endswith("ok")] == []


@pytest.mark.cuda
@pytest.mark.parametrize("case", kernel_cases("cuda"), ids=str)
def test_kernels_on_a_gpu(case: tuple[object, ...]) -> None:
    assert largest_excess(case, "cuda") <= 1
