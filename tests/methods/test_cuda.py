"""The same maps on a GPU. Runs where there is one; CI has none, so `docs/benchmarks.md` says when it last ran."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch

import clairvit as cv
from conditions import METHODS, allow_declared_zeros, method_of, short

pytestmark = pytest.mark.cuda
# Those that the built-in model can have; the flow's solver runs on the CPU and is quicker on few tokens.
EVERY = [
    "attention-flow(max_tokens=20)" if name == "attention-flow" else short(name)
    for name, method in METHODS.items()
    if not method.poolings or "token" in method.poolings
]
DELICATE = [name for name in EVERY if method_of(name).delicate]


@pytest.fixture(autouse=True)
def _declared_zeros() -> Iterator[None]:
    with warnings.catch_warnings():
        allow_declared_zeros()
        yield


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
        if name not in DELICATE:
            assert (found.cpu() - expected).abs().max() <= 2e-4 * expected.abs().max(), name


def test_gpu_maps_equal_cpu_maps_in_double_precision(pixels: torch.Tensor) -> None:
    """Where round-off shows, it is round-off: in float64 the two agree."""
    on_cpu, on_gpu = (
        cv.compare(cv.load("pets", device=device, dtype=torch.float64), pixels[:1].double(), DELICATE, target=5)
        for device in ("cpu", "cuda")
    )
    for name in DELICATE:
        expected, found = on_cpu[name].maps, on_gpu[name].maps
        assert (found.cpu() - expected).abs().max() <= 1e-6 * expected.abs().max(), name


def test_gradcam_on_a_cnn(pixels: torch.Tensor) -> None:
    module = cv.load("torchvision:resnet18", pretrained=False).module
    on_cpu, on_gpu = (
        cv.explain(cv.wrap(module.to(device)), pixels, "gradcam(relu=false)", target=5).maps
        for device in ("cpu", "cuda")
    )
    assert (on_gpu.cpu() - on_cpu).abs().max() <= 2e-4 * on_cpu.abs().max()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_gives_finite_float32_maps(pixels: torch.Tensor, dtype: str) -> None:
    found = cv.compare(cv.load("pets", device="cuda", dtype=dtype), pixels, EVERY, target=5)
    for name in EVERY:
        assert found[name].maps.dtype == torch.float32
        assert found[name].maps.isfinite().all(), name


def test_memory_comes_back(pixels: torch.Tensor) -> None:
    model = cv.load("pets", device="cuda")
    quick = [name for name in EVERY if name in METHODS and METHODS[name].more is None]
    cv.compare(model, pixels, quick, target=5)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(5):
        cv.compare(model, pixels, quick, target=5)
    assert torch.cuda.memory_allocated() == before
