"""The kernel of decomposition norms: in Triton's interpreter and on a GPU, against the vectors in float64."""

from __future__ import annotations

import pytest
import torch

from clairvit.methods import decomposition
from clairvit.tracing.block_decomposition import Vectors
from helpers.distance_cases import Case, distance_cases, largest_excess
from helpers.triton_interpreter import interpreted_lines


def test_kernel_in_the_interpreter() -> None:
    lines = interpreted_lines("helpers.distance_cases", "print_distance_cases")
    assert len(lines) == len(distance_cases("cpu"))
    assert [line for line in lines if not line.endswith("ok")] == []


@pytest.mark.cuda
@pytest.mark.parametrize("case", distance_cases("cuda"), ids=str)
def test_kernel_on_a_gpu(case: Case) -> None:
    assert largest_excess(case, "cuda") <= 1


@pytest.mark.cuda
@pytest.mark.parametrize("residual", [0.0, 0.5, 1.0])
def test_norms_and_distances_by_the_kernel_are_those_of_the_other_ways(residual: float) -> None:
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda", dtype=torch.float64)

    A, f, x, y = normal(2, 3, 9, 21).softmax(-1), normal(2, 3, 21, 40), normal(2, 21, 40), normal(2, 21, 40)
    spread, scale = normal(2, 21, 1).abs(), normal(2, 21, 1).abs()
    rows = torch.randperm(21, generator=generator, device="cuda")[:9]
    exact, single = (
        Vectors(*(tensor.to(dtype) for tensor in (f, x, spread, scale))) for dtype in (torch.float64, torch.float32)
    )
    norms = decomposition.contribution_norms(A, exact, rows, residual)
    assert torch.allclose(decomposition.contribution_norms(A.float(), single, rows, residual).double(), norms, 1e-5)
    for p in (1, 2):
        distances = decomposition.distances(A, exact, rows, y, p)
        computed = decomposition.distances(A.float(), single, rows, y.float(), p)
        assert torch.allclose(computed.double(), distances, 1e-5)
