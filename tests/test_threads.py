"""Threads: four on one model get the maps that one gets, and whoever else runs the model does not disturb a trace."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import clairvit as cv
from clairvit.models.load_options import seeded
from clairvit.tracing.module_state import frozen_eval
from clairvit.tracing.recording import record
from helpers.method_conditions import allow_declared_zeros
from helpers.module_fingerprint import messy, unchanged
from helpers.rounding import assert_same
from helpers.tiny_models import build, pixels
from helpers.verbs import KINDS, NAME, TARGET

THREADS = 4
IMAGES = 2  # for each thread


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Full backward hook is firing")
        allow_declared_zeros()
        yield


def at_once(work: Callable[[int], Any], threads: int = THREADS) -> list[Any]:
    """Return work(0), work(1), … of threads that start together; an error of one of them is raised here."""
    gate, results, errors = threading.Barrier(threads), dict[int, Any](), list[BaseException]()

    def run(number: int) -> None:
        try:
            gate.wait()
            results[number] = work(number)
        except BaseException as error:
            errors.append(error)

    workers = [threading.Thread(target=run, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if errors:
        raise errors[0]
    return [results[number] for number in range(threads)]


def noise(number: int) -> Tensor:
    return pixels(NAME, batch=1, seed=number, dtype=torch.float64)


def double(module: nn.Module) -> nn.Module:
    """Return the module in float64, with gradients of that kind."""
    module = module.double()
    for p in module.parameters():
        p.grad = None
    return module


@pytest.mark.parametrize("kind", KINDS)
def test_four_threads_get_the_maps_of_one(kind: str) -> None:
    module, method = double(messy(NAME)), KINDS[kind]
    images = [noise(number) for number in range(THREADS * IMAGES)]
    alone, model = cv.wrap(double(messy(NAME))), cv.wrap(module)
    expected = [cv.explain(alone, image, method, target=TARGET).maps for image in images]

    def work(number: int) -> list[Tensor]:
        share = images[number::THREADS]
        return [cv.explain(model, image, method, target=TARGET).maps for image in share]

    with unchanged(module):
        maps = at_once(work)
    for number, image_maps in enumerate(expected):
        assert_same(maps[number % THREADS][number // THREADS], image_maps, label=f"{method}, image {number}")


def test_threads_may_use_different_methods_and_verbs() -> None:
    """Traces with gradients and with rules, a perturbation, an intervention, and a metric that copies the model."""
    module = double(messy(NAME))
    sites: dict[cv.Site, Any] = {cv.Site(0, head=1): "zero", cv.Site(1, part="mlp"): "mean"}
    verbs: list[Callable[[cv.Model], Tensor]] = [
        lambda model: cv.explain(model, noise(1), "genatt", target=TARGET).maps,
        lambda model: cv.explain(model, noise(2), "attnlrp", target=TARGET).maps,
        lambda model: cv.explain(model, noise(3), "leave-one-out", target=TARGET).maps,
        lambda model: cv.evaluate(model, noise(4), "ixg", "mprt(layers=2)", target=TARGET, baselines=False).values,
        lambda model: cv.intervene(model, noise(5), sites).intervened,
        lambda model: cv.logit_lens(model, noise(6)),
    ]
    expected = [verb(cv.wrap(double(messy(NAME)))) for verb in verbs]
    model = cv.wrap(module)
    with unchanged(module):
        results = at_once(lambda number: [verbs[(number + turn) % len(verbs)](model) for turn in range(len(verbs))])
    for number, values in enumerate(results):
        for turn, value in enumerate(values):
            assert_same(value, expected[(number + turn) % len(verbs)], label=f"thread {number}, turn {turn}")


class TwoHeads(nn.Module):
    """A model with a head of its own on a backbone that another one uses too."""

    def __init__(self, backbone: nn.Module, classes: int, seed: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.out = nn.Linear(7, classes).double()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            self.out.weight.copy_(torch.randn(classes, 7, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.backbone(x))


def test_models_that_share_a_backbone_wait_for_each_other() -> None:
    """The flags of the shared part are put back by the first one that ends, unless the second waits for it."""
    backbone = double(build(NAME)).train()
    with torch.no_grad():
        width = backbone.eval()(noise(0)).shape[1]
    backbone.train()
    assert width == 7
    modules = [TwoHeads(backbone, 3, seed).train() for seed in range(2)]
    images = [noise(number) for number in range(6)]
    expected = [[cv.explain(cv.wrap(m), image, "attnlrp", target=1).maps for image in images] for m in modules]
    models = [cv.wrap(module) for module in modules]
    with unchanged(modules[0]), unchanged(modules[1]):
        maps = at_once(lambda number: [cv.explain(models[number % 2], x, "attnlrp", target=1).maps for x in images])
    for number, thread_maps in enumerate(maps):
        for ours, theirs in zip(thread_maps, expected[number % 2], strict=True):
            assert_same(ours, theirs)


@pytest.mark.parametrize("frozen", [True, False])
def test_models_around_the_same_weights_wait_for_each_other_unless_these_are_frozen(frozen: bool) -> None:
    """A server has one model per queue around the same frozen weights: a slow trace must not hold up a quick one."""
    module = build(NAME).requires_grad_(not frozen)
    copied = copy.deepcopy(module, {id(tensor): tensor for tensor in module.parameters()})
    entered, release = threading.Event(), threading.Event()

    def trace() -> None:
        with frozen_eval(copied):
            entered.set()
            release.wait(60)

    with frozen_eval(module):
        worker = threading.Thread(target=trace)
        worker.start()
        assert entered.wait(60 if frozen else 0.1) == frozen
        release.set()
    worker.join(60)
    assert entered.is_set()
    assert all(parameter.requires_grad is not frozen for parameter in module.parameters())


@pytest.mark.parametrize("place", ["patch_embed", "blocks.0.attn", "blocks.1.attn", "blocks.1.mlp"])
@pytest.mark.parametrize("method", ["genatt", "gradcam", "attnlrp", "legrad", "leave-one-out"])
def test_a_forward_of_somebody_else_does_not_disturb_a_trace(method: str, place: str) -> None:
    """A server may go on answering while a map is made: its tokens must not end up in the map."""
    module = double(build(NAME))
    expected = cv.explain(cv.wrap(module), noise(0), method, target=TARGET).maps
    model = cv.wrap(build(NAME).double())
    served: list[Tensor] = []
    other = noise(9)

    def serve(*_: Any) -> None:
        if threading.current_thread() is threading.main_thread() and not served:
            worker = threading.Thread(target=lambda: served.append(model.module(other)))
            worker.start()
            worker.join()  # in the middle of our forward, a whole one of another thread

    model.module.get_submodule(place).register_forward_hook(serve)
    for _ in range(2):  # the first run looks at the model, the second one knows it
        served.clear()
        maps = cv.explain(model, noise(0), method, target=TARGET).maps
        assert served
        assert_same(maps, expected)


def test_a_trace_waits_for_the_one_that_is_running() -> None:
    """Both forwards are whole: block 0 and block 1 of one thread, then of the other."""
    module, order = build(NAME), list[str]()
    inside, free = threading.Event(), threading.Event()

    def note(*_: Any) -> None:
        order.append(threading.current_thread().name)
        if threading.current_thread().name == "first" and not inside.is_set():
            inside.set()
            free.wait(0.2)  # long enough for the other one, if it did not wait

    for block in module.blocks:
        block.register_forward_hook(note)
    model, image = cv.wrap(module), pixels(NAME, batch=1)
    first, second = (threading.Thread(target=record, args=(model, image), name=name) for name in ("first", "second"))
    first.start()
    inside.wait()
    second.start()
    first.join()
    second.join()
    for at in range(0, len(order), 2):
        assert order[at] == order[at + 1]


def test_threads_that_seed_leave_the_generator_as_it_was() -> None:
    before = torch.get_rng_state()

    def draw(number: int) -> list[Tensor]:
        draws = []
        for _ in range(200):
            with seeded(number):
                draws.append(torch.rand(1))
        return draws

    for number, draws in enumerate(at_once(draw)):
        expected = torch.rand(1, generator=torch.Generator().manual_seed(number))
        assert all(torch.equal(value, expected) for value in draws)
    assert torch.equal(torch.get_rng_state(), before)
