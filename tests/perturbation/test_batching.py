"""Many variants in few passes: as many as asked for or as there is memory for, and as precise as was asked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

import clairvit as cv
from clairvit._progress import on_progress, report_progress
from clairvit.errors import BadInput
from clairvit.execution import ExecutionOptions
from clairvit.methods.planner import record_for
from clairvit.methods.spec import resolve_method
from clairvit.perturbation.batching import GROWS_AFTER, BatchBudget, in_batches
from clairvit.perturbation.probe import TOKENS_AT_ONCE, probing
from clairvit.tracing.trace import Trace, one_target, run_backward
from helpers.rounding import assert_same
from helpers.tiny_models import fresh, fresh_double, pixels, wrapped

LINUX = RuntimeError(
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "4000000000000000 bytes. Error code 12 (Cannot allocate memory)"
)
ELSEWHERE = RuntimeError("[enforce fail] data. DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes.")
ERRORS = [torch.OutOfMemoryError("CUDA out of memory."), LINUX, ELSEWHERE, MemoryError()]


class Small:
    """A device that holds so many things; more are an error. Notes what was tried."""

    def __init__(self, holds: int, error: BaseException) -> None:
        self.holds, self.error, self.tried = holds, error, list[int]()

    def run(self, ks: range) -> list[int]:
        self.tried.append(len(ks))
        if len(ks) > self.holds:
            raise self.error
        return list(ks)


@pytest.mark.parametrize("error", ERRORS, ids=["cuda", "linux", "elsewhere", "numpy"])
def test_out_of_memory_halves_the_batch_and_it_grows_back(error: BaseException) -> None:
    device, budget = Small(5, error), BatchBudget(160)
    values_in_order = [k for _, outputs in in_batches(100, budget, 10, device.run) for k in outputs]
    assert values_in_order == list(range(100))
    # 16 and 8 are too many, 4 fit; after eight good passes 8 is tried again, and so on
    assert device.tried == [16, 8, *[4] * GROWS_AFTER, 8, *[4] * GROWS_AFTER, 8, *[4] * GROWS_AFTER, 4]
    device.holds = 1000
    device.tried.clear()
    for _ in in_batches(1000, budget, 10, device.run):
        pass
    assert max(device.tried) == device.tried[-2] == 16


def test_torch_says_so_on_this_machine() -> None:
    def run(ks: range) -> Tensor:
        return torch.empty(10**15 if len(ks) > 1 else 1)

    assert [len(ks) for ks, _ in in_batches(3, BatchBudget(3), 1, run)] == [1, 1, 1]


def test_one_that_does_not_fit_is_an_error_and_other_errors_stay() -> None:
    device = Small(0, LINUX)
    with pytest.raises(RuntimeError, match="can't allocate"):
        list(in_batches(8, BatchBudget(8), 1, device.run))
    assert device.tried == [8, 4, 2, 1]
    device = Small(0, RuntimeError("shapes do not match"))
    with pytest.raises(RuntimeError, match="shapes"):
        list(in_batches(8, BatchBudget(8), 1, device.run))
    assert device.tried == [8]


def test_a_variant_of_many_images_is_spread_over_passes() -> None:
    """A batch of 6 images where 2 fit: the painted variant is run in three passes."""
    model, images = fresh_double("timm-vit", 6)
    trace = cv.trace(model, images, target=3)
    seen: list[int] = []

    def watch(module: object, args: tuple[Tensor, ...]) -> None:
        seen.append(len(args[0]))
        if len(args[0]) > 2:
            raise LINUX

    hook = model.module.blocks[1].register_forward_pre_hook(watch)
    with probing(trace, "mean", label="test", forwards=3) as probe:
        probed_scores = probe.score_images(3, lambda ks: probe.blend(torch.ones(1, len(ks), 32, 32) * 0.5))
        hook.remove()
        expected = probe.score_images(3, lambda ks: probe.blend(torch.ones(1, len(ks), 32, 32) * 0.5))
    assert seen[-9:] == [2] * 9
    assert_same(probed_scores, expected)


# In the engine


@contextmanager
def lengths(trace: Trace) -> Iterator[list[tuple[int, int, torch.dtype]]]:
    """Images, tokens and precision of what the last block's MLP is given in each pass."""
    seen: list[tuple[int, int, torch.dtype]] = []
    mlp = trace.recording.model.module.blocks[-1].mlp.fc2
    hook = mlp.register_forward_pre_hook(lambda m, args: seen.append((*args[0].shape[:2], args[0].dtype)))
    yield seen
    hook.remove()


def random_keep(images: int, variants: int, seed: int = 0) -> Tensor:
    return torch.rand(images, variants, 16, generator=torch.Generator().manual_seed(seed)) < 0.5


def kept(
    trace: Trace, keep: Tensor, removal: str = "token", options: ExecutionOptions | None = None
) -> tuple[Tensor, list[tuple[int, int, torch.dtype]]]:
    with (
        probing(trace, removal, label="test", forwards=keep.shape[1], options=options) as probe,
        lengths(trace) as seen,
    ):
        return probe.score_kept(keep), seen


def test_passes_are_of_one_length_and_as_few_as_can_be() -> None:
    trace = cv.trace(wrapped("timm-vit"), pixels("timm-vit", 3), target=3)
    keep = random_keep(1, 50)
    _, seen = kept(trace, keep)
    groups = keep.sum(2).flatten().bincount()
    limit = TOKENS_AT_ONCE["cpu"]
    expected = {
        (count + 1, -(-int(many) * 3 // (limit // (max(count, 1) + 1)))) for count, many in enumerate(groups) if many
    }
    assert {(n, sum(length == n for _, length, _ in seen)) for _, n, _ in seen} == expected
    assert sum(many for many, _, _ in seen) == 150


@pytest.mark.parametrize("removal", ["token", "mean"])
@pytest.mark.parametrize("size", [1, 4, 7])
def test_no_pass_is_larger_than_the_batch_size(size: int, removal: str) -> None:
    trace = cv.trace(wrapped("timm-vit"), pixels("timm-vit", 3), target=3)
    options = ExecutionOptions(batch_size=size)
    _, seen = kept(trace, random_keep(1, 20), removal, options)
    assert max(many for many, _, _ in seen) <= size
    with (
        probing(trace, "mean", label="test", forwards=5, options=options) as probe,
        lengths(trace) as painted,
    ):
        probe.score_images(5, lambda ks: probe.blend(torch.ones(1, len(ks), 32, 32)))
    assert max(many for many, _, _ in painted) <= size
    assert sum(many for many, _, _ in painted) == 15
    _, free = kept(trace, random_keep(1, 20), removal)
    assert len(free) < len(seen)


def test_images_of_a_batch_do_not_make_passes_smaller() -> None:
    trace = cv.trace(wrapped("timm-vit"), pixels("timm-vit", 8), target=3)
    with probing(trace, "mean", label="test", forwards=100) as probe, lengths(trace) as seen:
        probe.score_images(100, lambda ks: probe.blend(torch.ones(1, len(ks), 32, 32)))
    most = TOKENS_AT_ONCE["cpu"] // 17
    assert seen[0][0] == most // 8 * 8


def test_autocast_is_for_the_passes_and_the_scores_stay_wide() -> None:
    trace = cv.trace(wrapped("timm-vit"), pixels("timm-vit", 2), target=3)
    keep = random_keep(1, 20)
    exact, seen = kept(trace, keep)
    assert {dtype for _, _, dtype in seen} == {torch.float32}
    rough, seen = kept(trace, keep, options=ExecutionOptions(autocast="bfloat16"))
    assert {dtype for _, _, dtype in seen} == {torch.bfloat16}
    assert rough.dtype == torch.float64
    assert 0 < (rough - exact).abs().max() < 0.1 * exact.abs().max()


@pytest.mark.parametrize("name", ["timm-vit", "timm-eva02", "home-lucid", "timm-sam"])
def test_the_caller_s_own_autocast_reaches_the_passes(name: str) -> None:
    """The arithmetic of methods is kept out of it, and the passes must still match the recorded forward."""
    model = fresh(name)
    seen: list[torch.dtype] = []
    linear = [part for part in model.module.modules() if isinstance(part, torch.nn.Linear)][-2]
    linear.register_forward_hook(lambda m, args, out: seen.append(out.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        explanation = cv.explain(model, pixels(name, 2), "leave-one-out", target=3)
    assert seen[-1] == torch.bfloat16  # the method's own pass
    expected = cv.explain(model, pixels(name, 2), "leave-one-out", target=3)
    assert torch.cosine_similarity(explanation.maps.flatten(1), expected.maps.flatten(1)).min() > 0.9


def test_options_are_checked() -> None:
    with pytest.raises(BadInput, match="batch_size=0 was given; expected 1 or more"):
        ExecutionOptions(batch_size=0)
    with pytest.raises(BadInput, match="expected bfloat16 or float16"):
        ExecutionOptions(autocast="int8")


def test_options_of_a_verb_note_the_caller_s_autocast() -> None:
    assert ExecutionOptions.from_caller(3, "float16") == ExecutionOptions(3, "float16")
    with torch.autocast("cpu", torch.bfloat16):
        options = ExecutionOptions.from_caller()
    assert options.caller_autocast == (("cpu", torch.bfloat16),)
    with options.precision(torch.device("cpu")):
        assert torch.get_autocast_dtype("cpu") == torch.bfloat16
        assert torch.is_autocast_enabled("cpu")
    assert not torch.is_autocast_enabled("cpu")


def test_options_travel_with_the_recording() -> None:
    model, images = wrapped("timm-vit"), pixels("timm-vit", 2)
    options = ExecutionOptions(batch_size=3)
    recording = record_for([resolve_method("leave-one-out")], model, images, options)
    assert recording.options is options
    trace = run_backward(recording, one_target(recording, 3, "logit", single=False), None)
    _, seen = kept(trace, random_keep(1, 20))
    assert max(many for many, _, _ in seen) == 3
    assert record_for([resolve_method("leave-one-out")], model, images).options == ExecutionOptions()


# Progress


def _fail_if(true: bool) -> None:
    if true:
        raise ZeroDivisionError


def test_a_listener_gets_every_pass_and_the_end_once() -> None:
    trace = cv.trace(wrapped("timm-vit"), pixels("timm-vit", 3), target=3)
    events: list[tuple[str, int, int]] = []
    with on_progress(lambda *news: events.append(news)):
        _, seen = kept(trace, random_keep(1, 20), options=ExecutionOptions(batch_size=8))
    assert [done for _, done, _ in events] == sorted({done for _, done, _ in events})
    assert {(what, steps) for what, _, steps in events} == {("test", 60)}
    assert events[-1] == ("test", 60, 60)
    assert len(events) == len(seen)


def test_work_that_ends_early_late_or_badly() -> None:
    counts: list[int] = []
    with on_progress(lambda what, done, steps: counts.append(done)):
        with report_progress("short", 10) as tell:
            tell(4)
        with report_progress("long", 10) as tell:
            tell(8)
            tell(8)
        with pytest.raises(ZeroDivisionError), report_progress("broken", 10) as tell:
            _fail_if(tell(4) is None)
    assert counts == [4, 10, 8, 10, 4]
    with report_progress("alone", 10) as tell:
        tell(4)
    assert counts == [4, 10, 8, 10, 4]
