"""CUDA graphs: what decides whether one is used, on any machine; captured and replayed passes, on a GPU."""

from __future__ import annotations

import contextlib
import gc
import itertools
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import clairvit as cv
from clairvit.cuda import graphs as cuda_graphs
from clairvit.cuda.graphs import (
    EAGER_RUNS,
    GRAPHS,
    ClassIndexTarget,
    GraphCache,
    PackedTensors,
    PassesRequest,
    module_state,
    without_cuda_graphs,
)
from clairvit.methods import runs
from clairvit.methods.spec import resolve_method
from clairvit.targets.base import class_agnostic_target
from clairvit.targets.resolve import resolve_for
from helpers.attention_calls import attention_call
from helpers.custom_vits import Block, FusedAttention, HomeMade
from helpers.rounding import assert_same


def small_model() -> cv.Model:
    return cv.wrap(HomeMade(lambda: Block(FusedAttention)).eval(), size=32)


def request(*methods: str, label: int | str | None = 0, score: str = "logit", **changes: Any) -> PassesRequest:
    model = changes.pop("model", None) or small_model()
    pixels = changes.pop("pixels", torch.zeros(2, 3, 32, 32))
    specs = tuple(map(resolve_method, methods))
    return PassesRequest(model, specs, pixels, label, score, changes.pop("seed", 0), changes.pop("layers", False))


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let images pass for images on a GPU."""
    monkeypatch.setattr(Tensor, "is_cuda", True)


def test_no_graph_is_used_on_a_cpu() -> None:
    assert not request("genatt").is_capturable


@pytest.mark.usefixtures("on_cuda")
@pytest.mark.parametrize(
    ("methods", "capturable"),
    [
        (["genatt"], True),
        (["rollout", "random"], True),  # a baseline is run next to the graph
        (["attnlrp+plus", "legrad", "fullgrad"], True),
        (["random"], False),  # no passes to capture
        (["lime"], False),
        (["genatt", "smoothgrad"], False),  # random draws, and passes of its own
        (["alti", "globenc"], True),
    ],
)
def test_which_methods_can_be_captured(methods: list[str], capturable: bool) -> None:
    assert request(*methods).is_capturable is capturable


@pytest.mark.usefixtures("on_cuda")
def test_graphs_are_switched_off_inside_a_with_alone() -> None:
    graph_request = request("genatt")
    with without_cuda_graphs():
        assert not graph_request.is_capturable
        with ThreadPoolExecutor() as pool:
            assert pool.submit(lambda: graph_request.is_capturable).result(), "another thread is not affected"
        with contextlib.suppress(KeyError), without_cuda_graphs():
            raise KeyError
        assert not graph_request.is_capturable
    assert graph_request.is_capturable


@pytest.mark.usefixtures("on_cuda")
def test_nothing_is_captured_while_a_function_mode_is_active() -> None:
    class PassThrough(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    graph_request = request("genatt")
    assert graph_request.is_capturable
    with PassThrough():
        assert not graph_request.is_capturable


def test_requests_that_run_other_operations_have_other_keys() -> None:
    model = small_model()
    keys = {
        request("genatt", model=model).key,
        request("genatt", model=model, label=None).key,
        request("genatt", model=model, score="prob").key,
        request("genatt", model=model, layers=True).key,
        request("genatt", "rollout", model=model).key,
        request("genatt+skipplus", model=model).key,
        request("genatt", model=model, pixels=torch.zeros(3, 3, 32, 32)).key,
        request("genatt", model=model, pixels=torch.zeros(2, 3, 32, 32, dtype=torch.float64)).key,
        request("genatt", model=small_model()).key,
    }
    assert len(keys) == 9
    # one module, wrapped twice: its scores mean something else, or are read elsewhere
    other = cv.wrap(model.module, size=32, activation="sigmoid")
    elsewhere = cv.wrap(model.module, size=32, layout=cv.Layout((4, 4), 1, "avg"))
    keys |= {request("genatt", model=other).key, request("genatt", model=elsewhere).key}
    assert len(keys) == 11
    assert request("genatt", model=model, label=1).key in keys  # another class is another number in the same place


def test_class_indices_on_the_device_give_the_scores_and_gradients_of_the_target() -> None:
    model = small_model()
    logits = torch.randn(3, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_(True)
    for score in ("logit", "prob", "logprob"):
        target = resolve_for(model, [1, 7, 4], logits.detach(), score=score)[0]
        index = torch.tensor([[1], [7], [4]])
        same = ClassIndexTarget(
            target.names, target.classes, target.score, target.rows, activation=target.activation, index=index
        )
        assert_same(same(logits), target(logits))
        ours, expected = (torch.autograd.grad(goal(logits).sum(), logits)[0] for goal in (same, target))
        assert_same(ours, expected)


def test_packed_tensors_are_copied_together() -> None:
    tensors = [torch.rand(2, 3), torch.rand(4), torch.tensor([[True], [False]]), torch.rand(2, 2).T]
    packed = PackedTensors([*tensors, tensors[0]])
    for copies in (packed.copied(), packed.copied_to_host()):
        for tensor in tensors:
            assert torch.equal(copies[id(tensor)], tensor)
            assert copies[id(tensor)].data_ptr() != tensor.data_ptr()


def test_the_state_of_a_module_changes_with_what_a_graph_depends_on() -> None:
    module = small_model().module
    state = module_state(module)
    assert module_state(module) == state
    with torch.no_grad():
        next(module.parameters()).add_(1)  # in place: a graph reads the new values
    assert module_state(module) == state
    handle = module.register_forward_hook(lambda *_: None)
    assert module_state(module) != state
    handle.remove()
    assert module_state(module) == state
    name, parameter = next((n, p) for n, p in module.named_parameters() if "." not in n)
    setattr(module, name, torch.nn.Parameter(parameter.detach().clone()))
    assert module_state(module) != state


def run_once(cache: GraphCache, requested: PassesRequest) -> None:
    recording: Any = SimpleNamespace(calls=(), structure=SimpleNamespace(written=frozenset()))
    cache.count(requested, class_agnostic_target(2), recording, {})


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch) -> GraphCache:
    """A cache whose captures are plain objects that hold 1 byte."""
    captured: list[Any] = []

    def capture(requested: PassesRequest, target: Any, results: Any, structure: Any) -> Any:
        state = module_state(requested.model.module, structure.written)
        graph = SimpleNamespace(memory=1, pixels=requested.pixels, state=state, structure=structure)
        graph.replay = lambda _: SimpleNamespace(
            number=len(captured), results={}, checks=[], recording=None, structure_holds=lambda: True
        )
        captured.append(graph)
        return graph

    monkeypatch.setattr(cuda_graphs, "capture_graph", capture)
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda: None))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=40))
    return GraphCache()


def test_a_graph_is_captured_after_some_runs_and_replayed(cache: GraphCache) -> None:
    graph_request = request("genatt")
    for _ in range(EAGER_RUNS):
        assert cache.replay(graph_request) is None
        run_once(cache, graph_request)
        assert len(cache) == 0
    run_once(cache, graph_request)
    assert len(cache) == 1
    assert getattr(cache.replay(graph_request), "number", None) == 1


def test_large_layers_are_not_captured(cache: GraphCache) -> None:
    call, _ = attention_call(1, 2, 1200, width=8)  # A takes more than two tiles of 4 MiB
    recording: Any = SimpleNamespace(calls=(call,))
    graph_request = request("genatt")
    for _ in range(EAGER_RUNS + 3):
        cache.count(graph_request, class_agnostic_target(2), recording, {})
    assert len(cache) == 0


def test_a_graph_of_a_module_that_changed_is_dropped(cache: GraphCache) -> None:
    model = small_model()
    graph_request = request("genatt", model=model)
    for _ in range(EAGER_RUNS + 1):
        run_once(cache, graph_request)
    handle = model.module.register_forward_hook(lambda *_: None)
    assert cache.replay(graph_request) is None
    assert len(cache) == 0
    handle.remove()


def test_graphs_within_the_memory_are_kept_and_those_that_made_room_wait_longer(cache: GraphCache) -> None:
    graph_requests = [request("genatt", seed=seed) for seed in range(12)]
    for each in graph_requests:
        for _ in range(EAGER_RUNS + 1):
            run_once(cache, each)
    assert len(cache) == 10  # a quarter of 40 bytes
    assert cache.replay(graph_requests[0]) is None
    for _ in range(2 * EAGER_RUNS):
        run_once(cache, graph_requests[0])
        assert cache.replay(graph_requests[0]) is None
    run_once(cache, graph_requests[0])
    assert cache.replay(graph_requests[0]) is not None


def test_no_two_living_graphs_have_a_stream_and_those_of_dead_ones_are_used_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    numbers = itertools.cycle(range(4))  # torch hands out its streams in turn
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: SimpleNamespace(cuda_stream=next(numbers)))
    streams, device = cuda_graphs.CaptureStreams(), torch.device("cuda", 0)
    taken = [streams.take(device) for _ in range(3)]
    next(numbers)  # somebody else takes one
    streams.give_back(device, taken[1])
    assert streams.take(device) is taken[1]
    assert streams.take(device).cuda_stream == 3
    assert len({stream.cuda_stream for stream in taken}) == 3


def test_graphs_go_with_their_module(cache: GraphCache) -> None:
    model = small_model()
    graph_request = request("genatt", model=model)
    for _ in range(EAGER_RUNS + 1):
        run_once(cache, graph_request)
    assert len(cache) == 1
    alive = weakref.ref(model.module)
    del model, graph_request
    gc.collect()
    assert alive() is None
    assert len(cache) == 0


@pytest.fixture
def graphs() -> Iterator[GraphCache]:
    GRAPHS.clear()
    yield GRAPHS
    GRAPHS.clear()


def passes_request(
    model: cv.Model, specs: Any, pixels: Tensor, named: Any, score: str | None, seed: int, layers: bool
) -> PassesRequest:
    """Return what could be captured if the pixels were on a GPU."""
    return PassesRequest(model, tuple(specs), pixels, named[0], "logit" if score is None else score, seed, layers)


class EmptyGraph:
    """A CUDA graph whose outputs stay those of the captured images."""

    def replay(self) -> None:
        """Run nothing."""


@pytest.fixture
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let passes on a CPU be captured, by graphs that run nothing; return what events were asked to do."""
    graph_request: list[str] = []

    def event() -> SimpleNamespace:
        return SimpleNamespace(
            record=lambda: graph_request.append("record"), synchronize=lambda: graph_request.append("synchronize")
        )

    cuda: dict[str, Any] = {
        "CUDAGraph": EmptyGraph,
        "graph": lambda *args, **options: contextlib.nullcontext(),
        "graph_pool_handle": lambda: None,
        "memory_reserved": lambda device: 0,
        "get_device_properties": lambda device: SimpleNamespace(total_memory=40),
        "current_stream": lambda: SimpleNamespace(
            wait_event=lambda event: graph_request.append("wait"), wait_stream=lambda other: None
        ),
        "Stream": lambda *args: SimpleNamespace(wait_event=lambda event: None, cuda_stream=len(graph_request)),
        "stream": lambda stream: contextlib.nullcontext(),
        "Event": event,
    }
    for name, stand_in in cuda.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(Tensor, "record_stream", lambda tensor, stream: None)
    monkeypatch.setattr(runs, "graph_request", passes_request)
    return graph_request


def test_a_replay_is_collected_as_an_ordinary_run(graphs: GraphCache, on_a_cpu: list[str]) -> None:
    """Scores, marks, notes and checks are read from copies on the host, maps from copies where they were computed."""
    model = small_model()
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    methods = ["rollout", "genatt", "fullgrad", "attnlrp+plus", "random"]
    runs = [cv.compare(model, images, methods, target=3) for _ in range(EAGER_RUNS + 3)]
    assert len(graphs) == 1
    (graph,) = graphs._graphs.values()
    captured = {
        result.maps.data_ptr() for group in graph.results.values() for result in group if result.maps is not None
    }
    assert (graph.stream.cuda_stream in cuda_graphs.STREAMS._taken, graph.memory) == (True, 0)
    assert on_a_cpu.count("wait") == 2  # each replay waits until the outputs of the one before have been copied
    assert "synchronize" in on_a_cpu
    for name in methods:
        ordinary, *replays = (run[name] for run in (runs[0], *runs[-2:]))
        for replayed in replays:
            assert torch.equal(replayed.maps, ordinary.maps), name
            assert replayed.maps.data_ptr() not in captured
            assert torch.equal(replayed.logits, ordinary.logits)
            assert (replayed.targets, replayed.probabilities, replayed.weights_hash, replayed.notes) == (
                ordinary.targets,
                ordinary.probabilities,
                ordinary.weights_hash,
                ordinary.notes,
            )


def _random_images(seed: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4, 3, 224, 224, generator=generator).to("cuda", dtype)


METHODS = ["rollout", "genatt", "gmar-l1", "gmar-l2", "tokentm", "legrad", "fullgrad", "attnlrp+plus", "random"]
METHODS += ["globenc", "alti", "attin"]


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("target", [None, 3], ids=["predicted", "class 3"])
def test_replays_equal_ordinary_runs(graphs: GraphCache, dtype: torch.dtype, target: int | None) -> None:
    model = cv.load("pets", device="cuda", dtype=dtype)
    for seed in range(EAGER_RUNS + 1):
        cv.compare(model, _random_images(seed, dtype), METHODS, target=target)
    assert len(graphs) == 1
    for seed in (10, 11):
        images = _random_images(seed, dtype)
        replayed = cv.compare(model, images, METHODS, target=target)
        with without_cuda_graphs():
            expected = cv.compare(model, images, METHODS, target=target)
        for name in METHODS:
            ours, other = replayed[name], expected[name]
            assert torch.equal(ours.maps, other.maps), name
            assert (ours.targets, ours.probabilities, ours.weights_hash, ours.notes, ours.cost.backwards) == (
                other.targets,
                other.probabilities,
                other.weights_hash,
                other.notes,
                other.cost.backwards,
            )


@pytest.mark.cuda
def test_a_replay_sees_changed_weights_and_a_replaced_one_ends_the_graph(graphs: GraphCache) -> None:
    model = cv.load("pets", device="cuda")
    images = _random_images(0, torch.float32)
    before = [cv.explain(model, images, "genatt", target=3) for _ in range(EAGER_RUNS + 2)][-1]
    weight = model.module.blocks[3].mlp.fc1.weight
    weight.data.mul_(1.5)  # torch counts no version for this
    after = cv.explain(model, images, "genatt", target=3)
    assert len(graphs) == 1
    assert not torch.equal(after.maps, before.maps)
    assert after.weights_hash != before.weights_hash
    model.module.blocks[3].mlp.fc1.weight = torch.nn.Parameter(weight.detach() / 1.5, requires_grad=False)
    again = cv.explain(model, images, "genatt", target=3)
    assert len(graphs) == 0
    assert_same(again.maps, before.maps)
    assert again.weights_hash == cv.explain(model, images, "genatt", target=3).weights_hash


@pytest.mark.cuda
def test_a_capture_that_fails_frees_its_memory_and_is_not_tried_again(graphs: GraphCache) -> None:
    from clairvit.methods.aggregation import Total

    @cv.method("reads-a-number", output="tokens", aggregation=Total())
    def reads_a_number(layer: cv.extend.LayerView) -> Tensor:
        return layer.x.norm(dim=-1) * float(layer.x.abs().max())

    model = cv.load("pets", device="cuda")
    images = _random_images(0, torch.float32)
    for _ in range(EAGER_RUNS + 1):  # a capture that succeeds: cuBLAS keeps the workspace of the stream (64 MB)
        cv.compare(model, images, ["genatt"], target=3)
    assert len(graphs) == 1
    graphs.clear()
    torch.manual_seed(0)
    draws = torch.rand(5, device="cuda")
    torch.manual_seed(0)
    reserved = []
    for _ in range(EAGER_RUNS + 3):
        cv.compare(model, images, ["genatt", "reads-a-number"], target=3)
        torch.cuda.empty_cache()
        reserved.append(torch.cuda.memory_reserved())
    assert len(graphs) == 0
    assert reserved[-1] <= reserved[1]
    assert torch.equal(torch.rand(5, device="cuda"), draws), "the random generator is as it was"


@pytest.mark.cuda
def test_a_graph_works_after_another_one_is_gone(graphs: GraphCache) -> None:
    """Two graphs captured on one stream share a workspace of cuBLAS, which torch frees with the first of them."""
    images = _random_images(0, torch.float32)
    first, second = cv.load("pets", device="cuda"), cv.load("pets", device="cuda")
    for model in (first, second):
        for _ in range(EAGER_RUNS + 1):
            cv.explain(model, images, "genatt", target=3)
    assert len(graphs) == 2
    handles = {graph.stream.cuda_stream for graph in graphs._graphs.values()}
    assert len(handles) == 2
    graphs._forget(id(first.module))
    gc.collect()
    torch.cuda.empty_cache()
    filler = [torch.zeros(2**20, device="cuda") for _ in range(100)]  # takes the memory that was freed
    replayed = cv.explain(second, images, "genatt", target=3)
    with without_cuda_graphs():
        expected = cv.explain(second, images, "genatt", target=3)
    assert torch.equal(replayed.maps, expected.maps)
    assert not any(bool(block.any()) for block in filler)
