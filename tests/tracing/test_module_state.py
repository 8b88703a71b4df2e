"""The user's model is restored: after a trace, a map, an error or Ctrl-C nothing about it has changed."""

from __future__ import annotations

import gc
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import clairvit as cv
from clairvit.errors import BadInput, ClairError, UnknownName
from clairvit.tracing.recording import record
from clairvit.tracing.trace import one_target, run_backward
from helpers.custom_vits import Block, HomeMade, MatmulAttention
from helpers.method_conditions import METHODS, allow_declared_zeros, fits, home_of, short
from helpers.module_fingerprint import differences, fingerprint, messy, surroundings, unchanged
from helpers.rounding import assert_same, same
from helpers.tiny_models import build, pixels, strange

TARGET = 3
EVERY = [short(name) for name in METHODS]
ON_CLASS_TOKEN = [name for name in EVERY if fits(name, "timm-vit")]
GUESTS = ["timm-vit", "timm-siglip-map", "hf-dinov2-registers-sdpa", "torchvision-vit", "home-lucid", "home-in-place"]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Torch about our messy models; ClairViT about ReLUs that leave nothing of a random model's map."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Full backward hook is firing")
        allow_declared_zeros()
        yield


def test_the_fingerprint_sees_every_kind_of_change() -> None:
    """Each of these would go unnoticed if the comparison below were blind to it."""
    changes: dict[str, Callable[[nn.Module], Any]] = {
        "a weight": lambda m: m.head.weight.data.add_(1e-3),
        "a weight and back": lambda m: (m.head.weight.data.add_(1), m.head.weight.add_(-1)),
        "another parameter object": lambda m: setattr(m.head, "weight", nn.Parameter(m.head.weight.data.clone())),
        "training": lambda m: m.blocks[0].train(),
        "requires_grad": lambda m: m.head.weight.requires_grad_(False),
        "a gradient": lambda m: setattr(m.head.weight, "grad", torch.zeros_like(m.head.weight)),
        "a hook": lambda m: m.blocks[1].attn.register_forward_hook(lambda *_: None),
        "a flag": lambda m: m.set_grad_checkpointing(True),
        "a new attribute": lambda m: setattr(m.blocks[0], "_seen", []),
    }
    for what, change in changes.items():
        module = build("timm-vit")
        before = fingerprint(module)
        with torch.no_grad():
            change(module)
        assert differences(before, fingerprint(module)), what
    around = surroundings()
    torch.rand(1)
    assert differences(around, surroundings()) == ["torch"]


@pytest.mark.parametrize("name", GUESTS)
def test_trace_leaves_no_trace(name: str) -> None:
    module = messy(name)
    with unchanged(module):
        tr = cv.trace(cv.wrap(module), pixels(name), target=TARGET)
        assert tr.layers[0].A.isfinite().all()
        tr.retarget(TARGET + 1)


@pytest.mark.parametrize("method", EVERY)
def test_explain_leaves_no_trace(method: str) -> None:
    module = messy(home_of(method))
    with unchanged(module):
        cv.explain(cv.wrap(module), pixels("timm-vit"), method, target=TARGET)


@pytest.mark.parametrize("name", GUESTS)
def test_compare_leaves_no_trace(name: str) -> None:
    module = messy(name)
    with unchanged(module):
        cv.compare(cv.wrap(module), pixels(name), [m for m in EVERY if fits(m, name)], target=TARGET)


# Errors on the way


class Stop(Exception):
    """Somebody else's error."""


ERRORS = [KeyboardInterrupt, Stop, SystemExit, MemoryError]


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("when", [1, 2, 3, 4], ids=["look", "second-look", "record", "next-time"])
def test_error_in_a_forward_hook(when: int, error: type[BaseException]) -> None:
    """The first forward looks at the model, the second once more, the third is recorded; the fourth is another call."""
    module = messy("timm-vit")
    runs: list[int] = []

    def raises(*_: Any) -> None:
        runs.append(1)
        if len(runs) == when:
            raise error

    module.blocks[1].mlp.register_forward_hook(raises)
    model = cv.wrap(module)
    if when == 4:
        cv.explain(model, pixels("timm-vit"), "attnlrp", target=TARGET)
    with unchanged(module), pytest.raises(error):
        cv.explain(model, pixels("timm-vit"), "attnlrp", target=TARGET)
    assert len(runs) == when
    with unchanged(module):
        assert cv.explain(model, pixels("timm-vit"), "attnlrp", target=TARGET).maps.isfinite().all()


@pytest.mark.parametrize("when", [1, 2], ids=["tried-out", "in-the-backward"])
def test_ctrl_c_in_a_target_function(when: int) -> None:
    module, calls = messy("timm-vit"), []

    def target(scores: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) == when:
            raise KeyboardInterrupt
        return scores[:, TARGET]

    with unchanged(module), pytest.raises(KeyboardInterrupt):
        cv.trace(cv.wrap(module), pixels("timm-vit"), target=target)
    assert len(calls) == when


def test_error_in_a_target_function() -> None:
    def target(scores: Tensor) -> Tensor:
        raise ValueError("no such thing")

    module = messy("timm-vit")
    with unchanged(module), pytest.raises(BadInput, match=r"target function failed.*ValueError: no such thing"):
        cv.explain(cv.wrap(module), pixels("timm-vit"), "ixg", target=target)


def test_error_in_a_backward() -> None:
    """A gradient hook of the user's own raises while our backward passes."""
    module = messy("timm-vit")

    def raises(gradient: Tensor) -> None:
        raise KeyboardInterrupt

    module.blocks[0].register_forward_hook(lambda _, args, out: out.register_hook(raises) and None)
    with unchanged(module), pytest.raises(KeyboardInterrupt):
        cv.explain(cv.wrap(module), pixels("timm-vit"), "genatt", target=TARGET)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "class": ({"target": 99}, "There is no class 99"),
    "method": ({"method": "rolout"}, "Did you mean 'rollout'"),
    "layer": ({"method": "ixg+layer:9"}, "Layer 9 was asked of a model with 2 layers"),
    "size": ({"images": torch.zeros(1, 3, 40, 40)}, r"failed on an image of 40 × 40 pixels .*these are resized"),
}


@pytest.mark.parametrize("bad", REFUSED)
def test_refusals_leave_no_trace(bad: str) -> None:
    module = messy("timm-vit")
    arguments, message = REFUSED[bad]
    with unchanged(module), pytest.raises((BadInput, UnknownName), match=message):
        cv.explain(cv.wrap(module), **({"images": pixels("timm-vit"), "method": "ixg"} | arguments))


@pytest.mark.parametrize("name", ["timm-vit", "hf-vit-sdpa", "torchvision-vit", "open_clip-tower", "home-matmul"])
def test_an_image_of_the_wrong_size_is_named(name: str) -> None:
    """Each library has its own way to complain; all of them become the same sentence."""
    with pytest.raises(BadInput, match="failed on an image of 40 × 48 pixels"):
        cv.explain(cv.wrap(build(name)), torch.zeros(1, 3, 40, 48), "ixg", target=TARGET)


# Modes


def with_dropout() -> nn.Module:
    module = HomeMade(lambda: nn.Sequential(Block(MatmulAttention), nn.Dropout(0.5)))
    for block in module.blocks:
        block[0].attention.attn_drop = nn.Dropout(0.5)
    return module


@pytest.mark.parametrize("method", ["raw-attention", "genatt", "ixg", "legrad", "attnlrp"])
def test_train_mode_gives_eval_mode_maps(method: str) -> None:
    calm, training = strange(with_dropout).double(), strange(with_dropout).double().train()
    image = pixels("timm-vit", dtype=torch.float64)
    with torch.no_grad():
        assert not same(training(image), calm(image))  # dropout is really there
    expected = cv.explain(cv.wrap(calm), image, method, target=TARGET)
    with unchanged(training):
        explanation = cv.explain(cv.wrap(training), image, method, target=TARGET)
    assert_same(explanation.maps, expected.maps)
    assert_same(explanation.logits, expected.logits)
    assert all(part.training for part in training.modules())


@pytest.mark.parametrize("name", ["timm-vit", "timm-eva02", "hf-vit-sdpa"])
@pytest.mark.parametrize("method", ["rollout", "genatt", "decompx", "legrad"])
def test_library_checkpointing_is_switched_off_and_on_again(name: str, method: str) -> None:
    image = pixels(name, dtype=torch.float64)
    plain = cv.explain(cv.wrap(build(name).double()), image, method, target=TARGET).maps
    module = build(name).double().train()
    flag = "grad_checkpointing" if name.startswith("timm") else "gradient_checkpointing"
    module.set_grad_checkpointing(True) if name.startswith("timm") else module.gradient_checkpointing_enable()
    flags = [part for part in module.modules() if getattr(part, flag, False) is True]
    assert flags
    with unchanged(module):
        maps = cv.explain(cv.wrap(module), image, method, target=TARGET).maps
    assert_same(maps, plain)
    assert all(getattr(part, flag) is True for part in flags)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("method", ["rollout", "genatt", "decompx", "legrad"])
def test_the_callers_grad_mode_does_not_matter(method: str, mode: Callable[[], Any]) -> None:
    image = pixels("timm-vit", dtype=torch.float64)
    expected = cv.explain(cv.wrap(build("timm-vit").double()), image, method, target=TARGET).maps
    model = cv.wrap(build("timm-vit").double())
    with mode():
        maps = cv.explain(model, image, method, target=TARGET).maps
        tr = cv.trace(model, image, target=TARGET)
        assert tr.retarget(2).layers[0].G.isfinite().all()
        assert not torch.is_grad_enabled()
    assert_same(maps, expected)


def test_maps_need_no_gradient_and_hold_no_graph() -> None:
    for name, explanation in cv.compare(
        cv.wrap(build("timm-vit")), pixels("timm-vit"), ON_CLASS_TOKEN, target=TARGET
    ).items():
        for tensor in (explanation.maps, explanation.logits, explanation.pixels):
            assert not tensor.requires_grad, name
            assert tensor.grad_fn is None, name


def test_the_users_pixels_are_left_alone() -> None:
    image = pixels("timm-vit").requires_grad_()
    before = image.detach().clone()
    cv.explain(cv.wrap(build("timm-vit")), image, "ixg", target=TARGET)
    assert torch.equal(image, before)
    assert image.grad is None
    assert image._version == 0


# Wrappers


def test_compiled_model_is_unwrapped() -> None:
    """A torch.compile object that was never run; its inner module is the one that is traced."""
    module = build("timm-vit")
    model = cv.wrap(torch.compile(module))
    assert model.module is module
    maps = cv.explain(model, pixels("timm-vit"), "genatt", target=TARGET).maps
    assert torch.equal(maps, cv.explain(cv.wrap(module), pixels("timm-vit"), "genatt", target=TARGET).maps)


@pytest.mark.parametrize("layers", [1, 2])
def test_data_parallel_is_unwrapped(layers: int) -> None:
    module = build("timm-vit")
    outer: nn.Module = module
    for _ in range(layers):
        outer = nn.DataParallel(outer)
    model = cv.wrap(torch.compile(outer))
    assert model.module is module
    assert cv.explain(model, pixels("timm-vit"), "genatt", target=TARGET).maps.shape == (2, 4, 4)


# Threads


def test_two_threads_may_trace_one_model() -> None:
    """Hooks and flags live on the module: without a lock the second thread would see the first one's tokens."""
    module = messy("timm-vit").double()
    images = [pixels("timm-vit", seed=seed, dtype=torch.float64) for seed in range(8)]
    expected = [cv.explain(cv.wrap(module), image, "attnlrp", target=TARGET).maps for image in images]
    model, maps_by_thread, errors = cv.wrap(module), {}, []
    gate = threading.Barrier(2)

    def work(numbers: range) -> None:
        try:
            gate.wait()
            for number in numbers:
                maps_by_thread[number] = cv.explain(model, images[number], "attnlrp", target=TARGET).maps
        except BaseException as error:
            errors.append(error)

    with unchanged(module):
        threads = [threading.Thread(target=work, args=(range(start, 8, 2),)) for start in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert errors == []
    for number, maps in enumerate(expected):
        assert_same(maps_by_thread[number], maps)


def test_one_thread_waits_while_another_is_inside() -> None:
    """The second forward starts only after the first trace has left the model."""
    module = build("timm-vit")
    inside, order = threading.Event(), []

    def slow(*_: Any) -> None:
        order.append(threading.current_thread().name)
        if threading.current_thread().name == "first":
            inside.set()
            threading.Event().wait(0.2)

    module.blocks[0].register_forward_hook(slow)
    module.blocks[1].register_forward_hook(slow)
    model, image = cv.wrap(module), pixels("timm-vit", batch=1)

    def work() -> None:
        record(model, image)

    first, second = (threading.Thread(target=work, name=name) for name in ("first", "second"))
    first.start()
    inside.wait()
    second.start()
    first.join()
    second.join()
    for at in range(0, len(order), 2):  # each forward, block 0 and block 1, belongs to one thread
        assert order[at] == order[at + 1]


# Leaks


def live_tensors(collect: bool = True) -> int:
    if collect:
        gc.collect()
    return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())


@pytest.mark.usefixtures("frozen_heap")
def test_two_hundred_images_leave_no_tensors() -> None:
    model = cv.wrap(build("timm-vit"))

    def visit(seed: int) -> None:
        tr = cv.trace(model, pixels("timm-vit", batch=1, seed=seed), target=TARGET, rules="attnlrp")
        assert tr.layers[1].G.isfinite().all()

    for seed in range(5):
        visit(seed)
    before = live_tensors()
    for seed in range(200):
        visit(seed)
    assert live_tensors() <= before


@pytest.mark.usefixtures("frozen_heap")
@pytest.mark.parametrize("rules", ["plain", "linear", "attnlrp"])
@pytest.mark.parametrize("name", ["timm-vit", "timm-siglip-map", "home-einsum", "home-sequence-first", "hf-vit-eager"])
def test_a_trace_is_freed_with_its_last_name(name: str, rules: str) -> None:
    """No cycle keeps the graph alive until the garbage collector happens to come by: on a GPU that is an OOM."""
    model = cv.wrap(build(name))
    image = pixels(name, batch=1)
    cv.trace(model, image, target=TARGET, rules=rules)
    before = live_tensors()
    gc.disable()
    try:
        for _ in range(3):
            tr = cv.trace(model, image, target=TARGET, rules=rules)
            assert tr.layers[0].A.isfinite().all()
            del tr
        kept = live_tensors(collect=False) - before
    finally:
        gc.enable()
    assert kept <= 0


@pytest.mark.usefixtures("frozen_heap")
def test_explaining_leaves_no_tensors() -> None:
    model = cv.wrap(build("timm-vit"))
    for _ in range(2):
        cv.compare(model, pixels("timm-vit", batch=1), ON_CLASS_TOKEN, target=TARGET)
    before = live_tensors()
    for _ in range(5):
        cv.compare(model, pixels("timm-vit", batch=1), ON_CLASS_TOKEN, target=TARGET)
    assert live_tensors() <= before


@pytest.mark.usefixtures("frozen_heap")
def test_a_refusal_does_not_hold_the_trace() -> None:
    """An error knows the frames it came through, and these know the trace; nothing waits for the garbage collector."""
    model = cv.wrap(build("timm-vit"))
    image = pixels("timm-vit", batch=1)
    assert "cam" in cv.compare(model, image, ["genatt", "cam"], target=TARGET, skip=True).skipped
    before = live_tensors()
    gc.disable()
    try:
        for _ in range(3):
            cv.compare(model, image, ["genatt", "cam"], target=TARGET, skip=True)
        kept = live_tensors(collect=False) - before
    finally:
        gc.enable()
    assert kept <= 0


def test_a_model_is_freed_with_its_last_name() -> None:
    """What is remembered about a model does not keep it alive."""
    module = build("timm-vit")
    cv.explain(cv.wrap(module), pixels("timm-vit"), "ixg", target=TARGET)
    ghost = weakref.ref(module)
    del module
    gc.collect()
    assert ghost() is None


def test_forward_only_recordings_hold_no_graph() -> None:
    recording = record(cv.wrap(build("timm-vit")), pixels("timm-vit"), differentiable=False)
    assert recording.logits.grad_fn is None
    assert all(out.grad_fn is None for call in recording.calls for out in call.outputs)
    target = one_target(recording, TARGET, "logit", single=False)
    with pytest.raises(ClairError, match="no gradients"):
        run_backward(recording, target, "plain")
