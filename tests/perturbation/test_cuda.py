"""The perturbation engine on a GPU: the same scores, memory that runs out for real, rougher passes."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import clairvit as cv
from clairvit.execution import ExecutionOptions
from clairvit.perturbation import probe as engine
from clairvit.perturbation.probe import probing
from clairvit.perturbation.removal import REMOVALS
from clairvit.tracing.trace import Trace

pytestmark = pytest.mark.cuda
PATCHES = 196


@pytest.fixture(autouse=True)
def _exact_products() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def traced(device: str, source: str = "pets", batch: int = 2) -> Trace:
    images = torch.randn(batch, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    return cv.trace(cv.load(source, pretrained=source == "pets", device=device), images.to(device), target=5)


def some(variants: int) -> Tensor:
    return torch.rand(1, variants, PATCHES, generator=torch.Generator().manual_seed(1)) < 0.5


@pytest.mark.parametrize("removal", REMOVALS)
def test_scores_equal_those_of_the_cpu(removal: str) -> None:
    scores = {}
    for device in ("cpu", "cuda"):
        with probing(traced(device), removal, label="test", forwards=6) as probe:
            scores[device] = probe.score_kept(some(6)).cpu()
    assert (scores["cuda"] - scores["cpu"]).abs().max() <= 1e-3 * scores["cpu"].abs().max()


def test_memory_that_runs_out_halves_the_batch_and_changes_nothing() -> None:
    trace = traced("cuda", "timm:vit_base_patch16_224", batch=1)
    keep = some(512)
    with probing(trace, "mean", label="test", forwards=512) as probe:
        expected = probe.score_kept(keep)
    torch.cuda.empty_cache()
    held, total = torch.cuda.memory_allocated(), torch.cuda.get_device_properties(0).total_memory
    limit = held + 400 * 2**20  # not enough for 512 images of a ViT-B at once
    torch.cuda.set_per_process_memory_fraction(limit / total)
    try:
        options = ExecutionOptions(512)
        with probing(trace, "mean", label="test", forwards=512, options=options) as probe:
            probed_scores = probe.score_kept(keep)
            assert probe.budget.current < probe.budget.limit
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert (probed_scores - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_rougher_passes_are_rougher_and_resemble() -> None:
    trace, keep = traced("cuda"), some(64)
    scores = []
    for precision in (None, "bfloat16"):
        options = ExecutionOptions(autocast=precision)
        with probing(trace, "token", label="test", forwards=64, options=options) as probe:
            scores.append(probe.score_kept(keep))
    exact, rough = scores
    assert rough.dtype == torch.float64
    assert not torch.equal(exact, rough)
    spread = exact.std(1, keepdim=True)
    assert ((rough - exact).abs() / spread).mean() < 0.2


def test_a_gpu_takes_many_variants_at_once() -> None:
    assert engine.TOKENS_AT_ONCE["cuda"] > 16 * engine.TOKENS_AT_ONCE["cpu"]


def test_the_host_does_not_wait_between_passes() -> None:
    """The number of times that the host waits for the GPU does not grow with the number of passes."""
    trace, waits = traced("cuda"), []
    for batch_size in (64, 8):
        with probing(trace, "token", label="test", forwards=64, options=ExecutionOptions(batch_size)) as probe:
            probe.score_kept(some(64))  # whether lengths can be padded is tested once
            torch.cuda.set_sync_debug_mode("warn")
            try:
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    probe.score_kept(some(64))
            finally:
                torch.cuda.set_sync_debug_mode("default")
        waits.append(sum("synchronizing" in str(warning.message) for warning in caught))
    assert waits[0] == waits[1]
