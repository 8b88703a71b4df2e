"""A planned pass records what a pass that sees every operation records, bit for bit, and a changed model is noticed."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import clairvit as cv
from clairvit.tracing.capture import Capture
from clairvit.tracing.fingerprint import fingerprint
from clairvit.tracing.recording import Recording, record
from clairvit.tracing.structure import forget_structures, model_structure
from clairvit.tracing.trace import one_target, run_backward
from helpers.custom_vits import Block, FusedAttention, HomeMade
from helpers.tiny_models import fresh, pixels, wrapped

# Fused, explicit, mixed heads, an attention pool, torch's own multi-head attention, einsum, [N, B, d], in place
PLANNED = {
    "timm-vit": 3,  # operations per attention call that a planned pass may need
    "timm-vit-explicit": 16,
    "timm-cait": 16,
    "timm-siglip-map": 4,
    "hf-vit-sdpa": 10,
    "torchvision-vit": 50,
    "home-einsum": 15,
    "home-sequence-first": 50,
    "home-in-place": 15,
}
UNPLANNED = ("home-batchnorm-stem", "home-encoder-pre-norm")  # a corrected gradient, modules with a fast path


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """List the functions that reach a capture; not reads of attributes (`x.shape`): libraries change their number."""
    functions: list[Any] = []
    original = Capture.__torch_function__

    def count(self: Capture, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") != "__get__":
            functions.append(func)
        return original(self, func, types, args, kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Capture, "__torch_function__", count)
        yield functions


def tensors(recording: Recording) -> list[Tensor | None]:
    """Return all that a recording holds, and the gradients of a backward pass."""
    values = [recording.logits, recording.end, *recording.inputs]
    for call in (*recording.calls, *recording.pools):
        values += [call.q, call.k, call.v, *call.outputs, call.weights, call.scores, call.mask]
    trace = run_backward(recording, one_target(recording, 3, "logit", single=False))
    values += [trace.pixels_gradient, trace.final_gradient]
    for layer in trace.layers:
        values += [layer.tokens_gradient, layer.out_gradient]
    return values


def assert_identical(recording: Recording, expected: Recording) -> None:
    assert [call.block for call in recording.calls] == [call.block for call in expected.calls]
    assert [call.kind for call in recording.calls] == [call.kind for call in expected.calls]
    pairs = list(zip(tensors(recording), tensors(expected), strict=True))
    assert any(value is not None and bool(value.any()) for value, _ in pairs)
    for value, reference in pairs:
        assert (value is None) == (reference is None)
        assert value is None or (reference is not None and torch.equal(value, reference))


@pytest.mark.parametrize("name", PLANNED)
def test_a_planned_pass_is_the_same_pass(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, image = fresh(name), pixels(name)
    structure = model_structure(model, image)
    assert structure.plan is not None
    assert structure.plan.holds is None  # the first pass sees every operation, and checks the plan
    with counted(monkeypatch) as functions:
        complete = record(model, image)
        assert structure.plan.holds
        everything = len(functions)
        functions.clear()
        planned = record(model, image)
        assert 0 < len(functions) <= PLANNED[name] * len(structure.sites) < everything
    assert_identical(planned, complete)
    assert_identical(record(model, image[:1]), run_unplanned(model, image[:1], monkeypatch))


def run_unplanned(model: cv.Model, image: Tensor, monkeypatch: pytest.MonkeyPatch) -> Recording:
    """Record in a pass that sees every operation."""
    structure = model_structure(model, image)
    with monkeypatch.context() as patch:
        if structure.plan is not None:
            patch.setattr(structure.plan, "holds", False)
        return record(model, image)


@pytest.mark.parametrize("name", UNPLANNED)
def test_models_without_a_plan_see_every_operation(name: str) -> None:
    assert model_structure(wrapped(name), pixels(name)).plan is None


# A model that is changed between two traces


class Switched(nn.Module):
    """A model whose forward can be changed from outside: one more attention before its head, one block fewer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = HomeMade(lambda: Block(FusedAttention))
        self.extra = False

    def forward(self, image: Tensor) -> Tensor:
        scores: Tensor = self.inner(image)
        if self.extra:
            rows = scores[:, None, None].expand(-1, 1, 17, -1)
            scores = nn.functional.scaled_dot_product_attention(rows, rows, rows)[:, 0, 0]
        return scores


def confirmed() -> tuple[cv.Model, Switched, Tensor]:
    module = Switched().eval()
    model, image = cv.wrap(module, size=(32, 32), name="switched"), pixels("timm-vit")
    record(model, image)
    plan = model_structure(model, image).plan
    assert plan is not None
    assert plan.holds
    return model, module, image


def one_more_call(self: nn.Module, tokens: Tensor) -> Tensor:
    tokens = type(self).forward(self, tokens)
    heads = tokens[:, None]
    return tokens + nn.functional.scaled_dot_product_attention(heads, heads, heads)[:, 0]


def _flag(module: Switched) -> None:
    module.extra = True


def _patched_forward(module: Switched) -> None:
    module.inner.blocks[1].forward = MethodType(one_more_call, module.inner.blocks[1])


def _patched_class(module: Switched) -> None:
    plain = Switched.forward

    def forward(self: Switched, image: Tensor) -> Tensor:
        self.extra = True
        try:
            return plain(self, image)
        finally:
            self.extra = False

    Switched.forward = forward  # type: ignore[method-assign]


def _hook(module: Switched) -> None:
    def attend(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        heads = output[:, None]
        return nn.functional.scaled_dot_product_attention(heads, heads, heads)[:, 0]

    module.inner.blocks[0].register_forward_hook(attend)


@pytest.mark.parametrize("change", [_flag, _patched_forward, _patched_class, _hook])
def test_another_attention_call_is_seen(change: Callable[[Switched], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """The changed model is looked at again: nothing of the earlier structure is left."""
    monkeypatch.setattr(Switched, "forward", Switched.forward)  # restored afterwards
    model, module, image = confirmed()
    calls = len(model_structure(model, image).sites)
    change(module)
    changed = record(model, image)
    assert len(changed.structure.sites) == calls + 1
    forget_structures(module)
    assert_identical(changed, record(model, image))


def test_an_attention_call_that_is_missing_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function of torch was replaced, which no state of the module tells: the pass itself shows it."""
    model, _, image = confirmed()
    plain = nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", lambda q, k, v, **_: v)
    assert record(model, image).calls == ()
    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", plain)
    assert len(record(model, image).calls) == 2
    assert_identical(record(model, image), run_unplanned(model, image, monkeypatch))


def test_another_form_of_attention_is_read_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    model, image = wrapped("timm-vit"), pixels("timm-vit")
    fused = [record(model, image) for _ in range(2)][-1]
    for block in model.module.blocks:
        block.attn.fused_attn = False
    explicit = record(model, image)
    assert fused.calls[0].weights is None
    assert explicit.calls[0].weights is not None
    assert_identical(explicit, run_unplanned(model, image, monkeypatch))


def test_an_error_of_the_model_leaves_no_mode_and_no_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    model, module, image = confirmed()
    state = fingerprint(module)

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("broken inside the window")

    with monkeypatch.context() as patch:
        patch.setattr(nn.functional, "scaled_dot_product_attention", fail)
        with pytest.raises(RuntimeError, match="broken inside"):
            record(model, image)
    assert torch.overrides._get_current_function_mode() is None
    assert fingerprint(module) == state
    assert_identical(record(model, image), run_unplanned(model, image, monkeypatch))


def test_a_plan_keeps_no_model_alive() -> None:
    model, module, image = confirmed()
    record(model, image)
    reference = weakref.ref(module)
    del model, module
    gc.collect()
    assert reference() is None
