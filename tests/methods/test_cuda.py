"""The same maps on a GPU. Runs where there is one; CI has none, so `docs/benchmarks.md` says when it last ran."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch

import clairvit as cv
from helpers.method_conditions import METHODS, allow_declared_zeros, method_of, short
from helpers.rounding import assert_same, growth, magnified

pytestmark = pytest.mark.cuda
# Those that the built-in model can have; the flow's solver runs on the CPU and is quicker on few tokens.
EVERY = [
    "attention-flow(max_tokens=20)" if name == "attention-flow" else short(name)
    for name, method in METHODS.items()
    if not method.requirements().poolings or "token" in method.requirements().poolings
]
GROWTH = growth(depth=27 * 12, width=768)  # 12 blocks, forward and backward; the widest sum is over the MLP
DELICATE = [name for name in EVERY if method_of(name).caveats.numerically_unstable]


@pytest.fixture(autouse=True)
def _declared_zeros() -> Iterator[None]:
    with warnings.catch_warnings():
        allow_declared_zeros()
        yield


@pytest.fixture(scope="module")
def pixels() -> torch.Tensor:
    return torch.randn(3, 3, 224, 224, generator=torch.Generator().manual_seed(0))


def test_gpu_maps_equal_cpu_maps(pixels: torch.Tensor) -> None:
    """In float64. Where a method divides by sums near zero, float32 on the CPU shows how far rounding is magnified."""
    on_cpu, on_gpu = (
        cv.compare(cv.load("pets", device=device, dtype=torch.float64), pixels[:1].double(), EVERY, target=5)
        for device in ("cpu", "cuda")
    )
    single = cv.compare(cv.load("pets"), pixels[:1], DELICATE, target=5)
    for name in EVERY:
        expected, found = on_cpu[name].maps, on_gpu[name].maps
        assert found.is_cuda
        magnitude = magnified(single[name].maps, expected) if name in DELICATE else None
        assert_same(found, expected, magnitude=magnitude, growth=GROWTH, dtype=torch.float64, label=name)


def test_gradcam_on_a_cnn(pixels: torch.Tensor) -> None:
    module = cv.load("torchvision:resnet18", pretrained=False, dtype=torch.float64).module
    on_cpu, on_gpu = (
        cv.explain(cv.wrap(module.to(device)), pixels.double(), "gradcam(relu=false)", target=5).maps
        for device in ("cpu", "cuda")
    )
    assert_same(on_gpu, on_cpu, growth=GROWTH)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_gives_finite_float32_maps(pixels: torch.Tensor, dtype: str) -> None:
    found = cv.compare(cv.load("pets", device="cuda", dtype=dtype), pixels, EVERY, target=5)
    for name in EVERY:
        assert found[name].maps.dtype == torch.float32
        assert found[name].maps.isfinite().all(), name


def test_memory_comes_back(pixels: torch.Tensor) -> None:
    model = cv.load("pets", device="cuda")
    quick = [name for name in EVERY if name in METHODS and METHODS[name].extra_cost.passes is None]
    cv.compare(model, pixels, quick, target=5)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(5):
        cv.compare(model, pixels, quick, target=5)
    assert torch.cuda.memory_allocated() == before
