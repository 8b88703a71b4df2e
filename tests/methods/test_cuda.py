"""The same maps on a GPU. Runs where there is one; CI has none, so `docs/benchmarks.md` says when it last ran."""

from __future__ import annotations

import pytest
import torch

import clairvit as cv
from clairvit.methods.method import methods

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
EVERY = [m.name for m in methods()]


@pytest.fixture(scope="module")
def pixels() -> torch.Tensor:
    return torch.randn(3, 3, 224, 224, generator=torch.Generator().manual_seed(0))


def test_gpu_maps_equal_cpu_maps(pixels: torch.Tensor) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    on_cpu = cv.compare(cv.load("pets"), pixels, EVERY, target=5)
    on_gpu = cv.compare(cv.load("pets", device="cuda"), pixels, EVERY, target=5)
    for name in EVERY:
        expected, found = on_cpu[name].maps, on_gpu[name].maps
        assert found.is_cuda
        assert (found.cpu() - expected).abs().max() <= 2e-4 * expected.abs().max(), name


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_gives_finite_float32_maps(pixels: torch.Tensor, dtype: str) -> None:
    found = cv.compare(cv.load("pets", device="cuda", dtype=dtype), pixels, EVERY, target=5)
    for name in EVERY:
        assert found[name].maps.dtype == torch.float32
        assert found[name].maps.isfinite().all(), name


def test_memory_comes_back(pixels: torch.Tensor) -> None:
    model = cv.load("pets", device="cuda")
    cv.compare(model, pixels, EVERY, target=5)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(5):
        cv.compare(model, pixels, EVERY, target=5)
    assert torch.cuda.memory_allocated() == before
