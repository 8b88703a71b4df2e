"""What is remembered about a model: found once, again when a pass shows that it is out of date, and never kept alive.

`tests/test_change_between_calls.py` changes models between two explanations; here is the rest: how often a model is
looked at, what memory stays, forks, hooks that explain, models that are not the same in every pass.
"""

from __future__ import annotations

import copy
import gc
import os
import signal
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import clairvit as cv
from clairvit.cuda.graphs import PassesGraph
from clairvit.errors import BadInput, CaptureError
from clairvit.models.model import MOST_READOUTS
from clairvit.models.text_encoder import TextEncoder, TextTower
from clairvit.targets.resolve import readout_model
from clairvit.tracing import fingerprint as fingerprints
from clairvit.tracing.fingerprint import fingerprint
from clairvit.tracing.recording import record
from clairvit.tracing.structure import MOST_STRUCTURES, _structures, model_structure
from helpers.custom_vits import Block, FusedAttention, HomeMade
from helpers.rounding import assert_same
from helpers.tiny_models import build, fresh_double, pixels, shaken

TARGET = 3


def home(block: Callable[[], nn.Module] = lambda: Block(FusedAttention)) -> HomeMade:
    return shaken(HomeMade(block), 1).double().eval()


def image(seed: int = 1) -> Tensor:
    return pixels("timm-vit", batch=1, seed=seed, dtype=torch.float64)


def explained(module: nn.Module, method: str = "genatt") -> cv.Explanation:
    return cv.explain(cv.wrap(module, size=32, mean=(0.5,) * 3, std=(0.5,) * 3), image(), method, target=TARGET)


# How often a model is looked at


class Keeping(Block):
    """A block that counts its passes and keeps what it computes, as hand-written code does."""

    def __init__(self) -> None:
        super().__init__(FusedAttention)
        self.passes, self.kept, self.history, self.by_size = 0, None, [], {}

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.passes += 1
        self.kept = out.detach()
        self.history.append(float(out.detach().sum()))
        self.by_size[tuple(x.shape)] = out
        return out


@pytest.mark.parametrize(
    ("block", "first"), [(lambda: Block(FusedAttention), 2), (Keeping, 3)], ids=["plain", "keeping"]
)
def test_an_unchanged_model_is_looked_at_once(block: Callable[[], nn.Module], first: int) -> None:
    """What the forward itself writes to the module is no change of the model.

    A forward that detaches something is looked at a second time, with the gradient kept on.
    """
    module, passes = home(block), list[int]()
    module.register_forward_hook(lambda *_: passes.append(1))
    for forwards in (first, 1, 1):
        passes.clear()
        explained(module)
        assert len(passes) == forwards


def test_a_model_that_holds_too_much_to_be_compared_is_looked_at_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprints, "MOST_VALUES", 3)
    module, passes = home(), list[int]()
    assert fingerprint(module) is None
    module.register_forward_hook(lambda *_: passes.append(1))
    for _ in range(2):
        passes.clear()
        explained(module)
        assert len(passes) == 2


def test_structures_of_many_image_sizes_are_not_all_kept() -> None:
    module = build("timm-beit")
    module = nn.Sequential(nn.AdaptiveAvgPool2d(32), module)
    model = cv.wrap(module, size=32)
    for side in range(32, 33 + MOST_STRUCTURES):
        record(model, torch.zeros(1, 3, side, side), differentiable=False)
    assert len(_structures[module]) == MOST_STRUCTURES


# A pass that is not like the one before it


class Shortened(HomeMade):
    """A model that leaves out a block while a file is there, which no state of Python tells."""

    file = Path()

    def through(self, x: Tensor) -> Tensor:
        for block in self.blocks[self.file.exists() :]:
            x = block(x)
        return x


def test_a_pass_that_misses_an_attention_call_is_looked_at_again(tmp_path: Path) -> None:
    file = tmp_path / "flag"
    module = shaken(Shortened(lambda: Block(FusedAttention)), 1).double().eval()
    module.file = file
    fresh = copy.deepcopy(module)
    assert len(record(cv.wrap(module, size=32), image()).calls) == 2
    file.touch()
    assert len(record(cv.wrap(module, size=32), image()).calls) == 1
    assert_same(explained(module).maps, explained(fresh).maps)


def test_a_state_of_one_call_spoils_no_later_one() -> None:
    """The first explanation meets an extra pass; the second one does not."""
    module, times = home(), [0]

    def twice(part: nn.Module, given: Any, _: Tensor) -> None:
        times[0] += 1
        if times[0] == 1:
            part.forward(*given)

    expected = explained(copy.deepcopy(module)).maps
    module.register_forward_hook(twice)
    for _ in range(2):
        assert_same(explained(module).maps, expected)


class Alternating(nn.Module):
    """Two networks that take turns."""

    def __init__(self) -> None:
        super().__init__()
        self.networks = nn.ModuleList([home(), home()])
        self.turn = 0

    def forward(self, x: Tensor) -> Tensor:
        self.turn += 1
        return self.networks[self.turn % 2](x)


@pytest.mark.parametrize("method", ["genatt", "raw-attention", "ixg"])
def test_a_model_of_two_networks_that_take_turns_is_refused(method: str) -> None:
    with pytest.raises(CaptureError, match="went through other blocks than in the pass before"):
        explained(Alternating(), method)


class Dropping(Block):
    """A block whose dropout stays on (Monte Carlo dropout)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(nn.functional.dropout(x, 0.3, training=True))


def test_a_model_that_is_random_in_evaluation_mode_gets_a_note() -> None:
    words = "Two passes over the same image gave different scores"
    module = home(lambda: Dropping(FusedAttention))
    for _ in range(2):
        assert [note for note in explained(module).notes if words in note]
    for other in (home(), build("timm-vit").half(), build("timm-vit").bfloat16()):
        model = cv.wrap(other, size=32, mean=(0.5,) * 3, std=(0.5,) * 3)
        for batch in (1, 3):
            images = pixels("timm-vit", batch=batch, dtype=model.dtype)
            notes = cv.explain(model, images, "raw-attention", target=TARGET).notes
            assert not [note for note in notes if words in note]


def test_complex_scores_are_refused() -> None:
    class Waves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = home()

        def forward(self, x: Tensor) -> Tensor:
            return torch.complex(self.inner(x), self.inner(x))

    with pytest.raises(BadInput, match="returned scores of type complex128; expected floating-point numbers"):
        explained(Waves())


@pytest.mark.parametrize("place", ["", "blocks.0", "head"])
def test_explaining_inside_a_hook_of_the_pass_is_refused_for_what_it_is(place: str) -> None:
    module = home()
    expected = explained(copy.deepcopy(module)).maps
    handle = module.get_submodule(place).register_forward_hook(lambda *_: explained(module) and None)
    for run in (lambda: module(image()), lambda: explained(module)):
        with pytest.raises(CaptureError, match="started while a forward pass was being traced, from a forward hook"):
            run()
    handle.remove()
    assert_same(explained(module).maps, expected)


# What stays in memory


def small_cnn() -> nn.Module:
    layers = (nn.Conv2d(3, 4, 3, 2), nn.ReLU(), nn.Conv2d(4, 4, 3, 2), nn.Flatten(), nn.Linear(196, 5))
    return nn.Sequential(*layers).double().eval()


@pytest.mark.parametrize(
    ("make", "method"),
    [(home, "leave-one-out"), (home, "genatt"), (small_cnn, "gradcam")],
    ids=["pixels", "trace", "stages"],
)
def test_a_part_that_refers_to_its_model_does_not_keep_it_alive(make: Callable[[], nn.Module], method: str) -> None:
    """What is remembered names blocks and stages, which must not keep alive what they refer to."""
    module = make()
    for part in [*module.modules()][1:]:
        part.__dict__["owner"] = [{"model": module}]
    model = cv.wrap(module, size=32, mean=(0.5,) * 3, std=(0.5,) * 3)
    cv.explain(model, image(), method, target=TARGET)
    cv.explain(model, image(), "saliency", target=cv.Output(lambda output: output[:, 0]))
    reference = weakref.ref(module)
    del module, part, model
    gc.collect()
    assert reference() is None


def test_readouts_are_bounded() -> None:
    """A mask for each image of a data set is not kept for ever; the last ones are."""
    model = fresh_double("timm-vit")[0]
    targets = [cv.Output(lambda output, number=number: output[:, number]) for number in range(5)]
    masks = [torch.zeros(4) for _ in range(3 * MOST_READOUTS)]
    references = [weakref.ref(mask) for mask in masks]
    for mask in masks:
        readout_model(model, cv.Output(lambda output, mask=mask: output[:, 0] + mask.sum()))
    readouts = [readout_model(model, target) for target in targets]
    del masks, mask
    gc.collect()
    assert sum(reference() is not None for reference in references) == MOST_READOUTS - len(targets)
    assert all(readout_model(model, target) is readout for target, readout in zip(targets, readouts, strict=True))


def test_a_class_of_the_user_is_not_kept_alive() -> None:
    class Local(HomeMade):
        pass

    module = shaken(Local(lambda: Block(FusedAttention)), 1).double().eval()
    module.__dict__["settings"] = type("Settings", (), {"kind": "cls"})()
    explained(module)
    reference = weakref.ref(type(module.settings))
    del module
    gc.collect()
    assert reference() is None


# Processes that are forked in the middle of a trace


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*")
def test_a_child_that_is_forked_during_a_trace_of_another_thread_can_explain() -> None:
    """The child has the model as it was before the trace, and waits for no thread that is not there."""
    if not hasattr(os, "fork"):
        return  # this system makes no such children
    module = home().train()
    expected = explained(home()).maps
    inside, done = threading.Event(), threading.Event()

    def wait(*_: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            inside.set()
            done.wait(60)

    module.blocks[0].register_forward_hook(wait)
    worker = threading.Thread(target=explained, args=(module,))
    worker.start()
    inside.wait(60)
    child = os.fork()
    if child == 0:  # no assertion: the child must not go on with other tests
        signal.alarm(60)
        torch.set_num_threads(1)  # a fork copies no OpenMP threads; PyTorch would wait for them for ever
        is_as_before = all(part.training for part in module.modules()) and all(
            parameter.requires_grad for parameter in module.parameters()
        )
        hooks = sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in module.modules())
        maps = explained(module).maps
        os._exit(0 if is_as_before and hooks == 1 and torch.allclose(maps, expected) else 3)
    _, status = os.waitpid(child, 0)
    done.set()
    worker.join(60)
    assert os.waitstatus_to_exitcode(status) == 0
    assert all(part.training for part in module.modules())


# Embeddings of prompts


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 600).reshape(200, 3))

    def encode_text(self, tokens: Tensor) -> Tensor:
        return self.weight[tokens].mean(1)


def test_embeddings_of_prompts_follow_the_weights_of_the_text_tower() -> None:
    module = Words()
    encoder = TextEncoder(lambda: TextTower(module, lambda prompts: torch.tensor([[3, 5]] * len(prompts))))
    before = encoder.encode(["a cat"])
    for _ in range(2):
        module.weight.data.add_(torch.linspace(0, 1, 200)[:, None])  # torch counts no version for this
        after = encoder.encode(["a cat"])
        assert not torch.equal(after, before)
        assert torch.equal(after, TextEncoder(encoder.open_tower).encode(["a cat"]))
        before = after


# Replays on a GPU: what the host compares


def test_a_replay_with_other_weights_is_used_if_the_structure_is_the_same() -> None:
    module = home()
    module.blocks[1].register_parameter("gain", nn.Parameter(torch.ones(1, dtype=torch.float64)))
    model = cv.wrap(module, size=32)
    structure, sums = model_structure(model, image()), torch.zeros(2, dtype=torch.int64)
    graph: Any = SimpleNamespace(structure=structure, sums=None)
    request: Any = SimpleNamespace(model=model, pixels=image())
    assert PassesGraph.structure_holds(graph, request, sums)
    module.head.weight.data.mul_(2)
    assert PassesGraph.structure_holds(graph, request, sums + 1)
    module.__dict__["forward"] = lambda x: module.head(module.norm(module.through(module.tokens(x)))[:, 1:].mean(1))
    assert not PassesGraph.structure_holds(graph, request, sums + 2)
