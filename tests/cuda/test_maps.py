"""The same maps on a GPU. Runs where there is one; CI has none, so `docs/benchmarks.md` says when it last ran.

Methods of one trace run on the built-in model. All methods, those of many passes too, run on a smaller one: three
blocks, 7 × 7 patches, heads of 64 as in the real ones. Families are tests of their own, so that a part can be run:
`-k "equal and perturbation"`.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator

import pytest
import timm
import torch

import clairvit as cv
from clairvit.cuda.graphs import EAGER_RUNS
from helpers.method_conditions import METHODS, allow_declared_zeros, method_of, short
from helpers.rounding import assert_same, growth, magnified
from helpers.tiny_models import strange

pytestmark = pytest.mark.cuda
# Those that both models can have; the flow's solver runs on the CPU and is quicker on few tokens.
EVERY = [
    "attention-flow(max_tokens=20)" if name == "attention-flow" else short(name)
    for name, method in METHODS.items()
    if not method.requirements().poolings or "token" in method.requirements().poolings
]
ONE_TRACE = [name for name in EVERY if method_of(name).extra_cost.passes is None]
FAMILIES = {
    family: [name for name in EVERY if method_of(name).family == family]
    for family in sorted({method_of(name).family for name in EVERY})
}
SIZE, DEPTH, TARGET = 112, 3, 5


def rounding_growth(depth: int) -> float:
    """Return the roundings of so many blocks, forward and backward; the widest sum is over the MLP."""
    return growth(depth=27 * depth, width=768)


@functools.cache
def small_model(device: str, dtype: torch.dtype) -> cv.Model:
    """Return a ViT of three blocks with random weights far from their initial ones."""
    module = strange(lambda: timm.create_model("vit_tiny_patch16_224", img_size=SIZE, depth=DEPTH, num_classes=10))
    return cv.wrap(module.to(device, dtype), size=SIZE, name="small")


@pytest.fixture(autouse=True)
def _declared_zeros() -> Iterator[None]:
    with warnings.catch_warnings():
        allow_declared_zeros()
        yield


@pytest.fixture(scope="module")
def pixels() -> torch.Tensor:
    return torch.randn(3, 3, 224, 224, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def small_pixels() -> torch.Tensor:
    return torch.randn(2, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(0))


def assert_equal_maps(
    on_cpu: cv.Model, on_gpu: cv.Model, single: cv.Model, images: torch.Tensor, names: list[str], depth: int
) -> None:
    """In float64. Where a method divides by sums near zero, float32 on the CPU shows how far rounding is magnified."""
    expected, comparison = (cv.compare(model, images.double(), names, target=TARGET) for model in (on_cpu, on_gpu))
    unstable = [name for name in names if method_of(name).caveats.numerically_unstable]
    rough = cv.compare(single, images, unstable, target=TARGET) if unstable else {}
    for name in names:
        maps, exact = comparison[name].maps, expected[name].maps
        assert maps.is_cuda
        magnitude = magnified(rough[name].maps, exact) if name in rough else None
        assert_same(maps, exact, magnitude=magnitude, growth=rounding_growth(depth), dtype=torch.float64, label=name)


@pytest.mark.parametrize("family", FAMILIES)
def test_gpu_maps_equal_cpu_maps(small_pixels: torch.Tensor, family: str) -> None:
    models = [
        small_model(*which) for which in (("cpu", torch.float64), ("cuda", torch.float64), ("cpu", torch.float32))
    ]
    assert_equal_maps(*models, small_pixels, FAMILIES[family], DEPTH)


def test_gpu_maps_of_the_built_in_model_equal_cpu_maps(pixels: torch.Tensor) -> None:
    on_cpu, on_gpu = (cv.load("pets", device=device, dtype=torch.float64) for device in ("cpu", "cuda"))
    assert_equal_maps(on_cpu, on_gpu, cv.load("pets"), pixels[:1], ONE_TRACE, 12)


def test_gradcam_on_a_cnn(pixels: torch.Tensor) -> None:
    module = cv.load("torchvision:resnet18", pretrained=False, dtype=torch.float64).module
    on_cpu, on_gpu = (
        cv.explain(cv.wrap(module.to(device)), pixels.double(), "gradcam(relu=false)", target=TARGET).maps
        for device in ("cpu", "cuda")
    )
    assert_same(on_gpu, on_cpu, growth=rounding_growth(12))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_half_precision_gives_finite_float32_maps(small_pixels: torch.Tensor, family: str, dtype: torch.dtype) -> None:
    assert_finite_maps(small_model("cuda", dtype), small_pixels, FAMILIES[family])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_of_the_built_in_model(pixels: torch.Tensor, dtype: torch.dtype) -> None:
    assert_finite_maps(cv.load("pets", device="cuda", dtype=dtype), pixels, ONE_TRACE)


def assert_finite_maps(model: cv.Model, images: torch.Tensor, names: list[str]) -> None:
    comparison = cv.compare(model, images, names, target=TARGET)
    for name in names:
        assert comparison[name].maps.dtype == torch.float32
        assert comparison[name].maps.isfinite().all(), name


def test_memory_comes_back(pixels: torch.Tensor) -> None:
    model = cv.load("pets", device="cuda")
    quick = [name for name in ONE_TRACE if name in METHODS]
    for _ in range(EAGER_RUNS + 2):  # a graph that is captured keeps its own memory
        cv.compare(model, pixels, quick, target=TARGET)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(5):
        cv.compare(model, pixels, quick, target=TARGET)
    assert torch.cuda.memory_allocated() == before
