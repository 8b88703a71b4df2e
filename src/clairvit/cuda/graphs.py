"""CUDA graphs: the passes and maps of a batch, captured once and replayed for further batches of the same shape.

On a GPU in half precision the host needs longer to start the kernels of a Vision Transformer than the GPU to run them.
When the same methods have explained `EAGER_RUNS` batches of one shape by one model, the next batch is run as before
and once more while CUDA captures it; later batches are copied to where the captured pixels lie and replayed with one
launch. The captured operations are those of the ordinary path: nothing is computed in another way.

Why a replay is right: during a capture the host cannot read a number from the GPU (CUDA refuses), so that nothing
which depends on the images can have decided what was captured. What the host can decide by is compared at every
replay: the state of the module (`tracing/fingerprint.py`), the addresses of its tensors, the precision settings, and,
where weights have changed, the structure of the model.
The first replay must give the maps of the ordinary run, or the graph is dropped. Methods that read numbers on the way
(searches, random draws, attention flow) cannot be captured and run as ever.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode

from clairvit._cost import Cost
from clairvit._rows import per_row
from clairvit.methods.collect import MapChecks, checks_of_maps
from clairvit.methods.executor import Result
from clairvit.methods.planner import record_for, run_all, singles
from clairvit.methods.spec import MethodSpec
from clairvit.models.model import Model
from clairvit.models.scores import extract_scores
from clairvit.models.state_hash import checksums, state_hash
from clairvit.models.submodules import submodules, tensors_of
from clairvit.numerics import widened
from clairvit.targets.base import TargetBatch, class_agnostic_target, score_values
from clairvit.targets.class_ import find_class
from clairvit.tracing.attention_call import is_large
from clairvit.tracing.fingerprint import Path, fingerprint
from clairvit.tracing.recording import Recording
from clairvit.tracing.structure import ModelStructure, model_structure

EAGER_RUNS = 2  # batches before a capture: the first inspects the model, the second runs by its plan
MOST_GRAPHS = 16  # of all models together
MOST_MEMORY = 0.25  # of the GPU's, for all graphs: each holds the memory of its passes
MOST_REQUESTS = 64  # whose runs are counted
MOST_STREAMS = 32  # of torch's own, per device
# Roundings of the largest value by which the first replay may differ from the ordinary run: the same kernels run, but
# a library may choose another one while it is captured
ROUNDINGS = {torch.float64: 2**10, torch.float32: 2**10, torch.bfloat16: 2**4, torch.float16: 2**4}

Results = dict[str, list[Result]]  # method text -> one per target
_GRAPHS_ALLOWED = ContextVar("graphs_allowed", default=True)


@contextmanager
def without_cuda_graphs() -> Iterator[None]:
    """Run all passes inside the `with` in the ordinary way: nothing is captured, counted or replayed.

    The state is that of the current thread or task; others are not affected.
    """
    token = _GRAPHS_ALLOWED.set(False)
    try:
        yield
    finally:
        _GRAPHS_ALLOWED.reset(token)


@dataclass(frozen=True, eq=False)
class PassesRequest:
    """The passes and methods of one batch, for the class `label` of each image; None: the class that is predicted."""

    model: Model
    specs: tuple[MethodSpec, ...]
    pixels: Tensor
    label: int | str | None
    score: str
    seed: int
    layers: bool

    @property
    def captured_specs(self) -> tuple[MethodSpec, ...]:
        """The methods that read the passes."""
        return tuple(spec for spec in self.specs if spec.method.family != "baseline")

    @property
    def baseline_specs(self) -> tuple[MethodSpec, ...]:
        """The methods that look at no pass, and may draw random numbers: run next to a replay."""
        return tuple(spec for spec in self.specs if spec.method.family == "baseline")

    @property
    def is_capturable(self) -> bool:
        """Whether a graph can be used: on CUDA, for a classifier, while no function or dispatch mode is active."""
        return (
            _GRAPHS_ALLOWED.get()
            and self.pixels.is_cuda
            and self.model.classifier
            and self.model.base is None
            and _get_current_function_mode() is None  # type: ignore[no-untyped-call]
            and torch._C._len_torch_dispatch_stack() == 0
            and bool(self.captured_specs)
            and all(_is_capturable(spec) for spec in singles(self.specs))
        )

    @functools.cached_property
    def key(self) -> Hashable:
        """What decides which operations are run, apart from the state of the module."""
        methods = tuple((spec.text, id(spec.method)) for spec in self.specs)
        form = (self.pixels.shape, self.pixels.stride(), self.pixels.dtype, self.pixels.device)
        target = (self.score, self.label is None)
        model = (id(self.model.module), self.model.activation, self.model.layout)  # one module may be wrapped twice
        return (*model, methods, self.seed, self.layers, form, target, _precision())


def graph_request(
    model: Model,
    specs: Sequence[MethodSpec],
    pixels: Tensor,
    named: Sequence[Any] | None,
    score: str | None,
    seed: int,
    layers: bool,
) -> PassesRequest | None:
    """Return the passes of a batch if a CUDA graph could serve them: for one class target of a classifier, on a GPU."""
    targets = named or (None,)
    label = targets[0]
    if not pixels.is_cuda or len(targets) > 1 or isinstance(label, bool) or not isinstance(label, int | str | None):
        return None
    request = PassesRequest(model, tuple(specs), pixels, label, "logit" if score is None else score, seed, layers)
    return request if request.is_capturable else None


def _is_capturable(spec: MethodSpec) -> bool:
    """Return whether a method reads the shared passes alone, or, a baseline, none."""
    if spec.method.family == "baseline":
        return True
    reads_passes = spec.aggregation is not None or spec.passes == "backward"
    return reads_passes and spec.own_cost() == Cost()


class ClassIndexTarget(TargetBatch):
    """Class targets whose indices lie on the GPU, so that a replay can be given others."""

    index: Tensor = per_row(default_factory=lambda: torch.empty(0, 1, dtype=torch.long))  # [B, 1]

    def __call__(self, output: Any) -> Tensor:
        """Return the score of each image's class, [B]."""
        logits = output if isinstance(output, Tensor) else extract_scores(output)
        return score_values(widened(logits), self.score, self.activation).gather(1, self.index)[:, 0]


@dataclass(frozen=True, eq=False)
class ReplayResult:
    """What a replay gave: scores, one result per method and target, their checks, and the weights that they are of.

    What the host reads is on the CPU: the logits, and the numbers of results and checks. They are there once
    `structure_holds` has waited for the GPU; maps stay on it.
    """

    recording: Recording
    logits: Tensor
    results: Results
    checks: list[MapChecks]
    weights_hash: Callable[[], str]  # waits for the GPU
    structure_holds: Callable[[], bool]  # whether the model is still built as it was captured; waits for the GPU


class PackedTensors:
    """Tensors that are joined by dtype, so that all of them are copied by one operation per dtype."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for tensor in {id(tensor): tensor for tensor in tensors}.values():
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
        self._groups = list(by_dtype.values())
        self._packed = [torch.cat([tensor.reshape(-1) for tensor in group]) for group in self._groups]

    def copied(self) -> dict[int, Tensor]:
        """Return the copy of each tensor, made now, by the id of the tensor."""
        return self._unpacked([packed.clone() for packed in self._packed])

    def copied_to_host(self) -> dict[int, Tensor]:
        """Return the copy of each tensor on the CPU, by the id of the tensor: complete when the GPU is done with it."""
        hosts = [torch.empty(packed.shape, dtype=packed.dtype, pin_memory=packed.is_cuda) for packed in self._packed]
        for host, packed in zip(hosts, self._packed, strict=True):
            host.copy_(packed, non_blocking=True)
        return self._unpacked(hosts)

    def _unpacked(self, copies: Sequence[Tensor]) -> dict[int, Tensor]:
        unpacked: dict[int, Tensor] = {}
        for group, packed in zip(self._groups, copies, strict=True):
            parts = torch.split(packed, [tensor.numel() for tensor in group])
            unpacked |= {id(tensor): part.view(tensor.shape) for tensor, part in zip(group, parts, strict=True)}
        return unpacked


@dataclass(eq=False)
class PassesGraph:
    """A captured graph with its inputs and outputs, which stay at their addresses."""

    graph: Any  # torch.cuda.CUDAGraph
    pixels: Tensor
    index: Tensor  # the class of each image, [B, 1]
    logits: Tensor
    results: Results
    checks: list[MapChecks]
    checksums: Tensor  # of the module's tensors, computed with the passes
    outputs: PackedTensors  # all of these, packed
    numbers: PackedTensors  # those that the host reads
    recording: Callable[..., Recording]  # of a model, pixels and logits; without activations
    structure: ModelStructure
    state: Any  # of the module, as `module_state` tells it
    weights: list[Tensor]  # keeps what the graph reads at its addresses
    specs: tuple[MethodSpec, ...]  # keeps the methods of the key alive
    stream: Any  # that it was captured on; no other living graph has it
    memory: int = 0  # bytes that it holds
    weights_hash: tuple[bytes, str] | None = None  # checksums, and the hash of the weights that have them
    sums: bytes | None = None  # of weights for which the structure is known to hold
    lock: threading.Lock = field(default_factory=threading.Lock)
    copy_done: Any = None  # torch.cuda.Event: the outputs of the last replay have been copied

    def replay(self, request: PassesRequest) -> ReplayResult:
        """Return the results for other images, and for another class, as copies."""
        with self.lock:
            if self.copy_done is not None:
                torch.cuda.current_stream().wait_event(self.copy_done)
            self.pixels.copy_(request.pixels)
            if request.label is not None:
                self.index.fill_(find_class(request.label, request.model.labels, self.logits.shape[-1]))
            self.graph.replay()
            copies, hosts = self.outputs.copied(), self.numbers.copied_to_host()
            done = self.copy_done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()

        def copy(tensor: Tensor) -> Tensor:
            return hosts[id(tensor)] if id(tensor) in hosts else copies[id(tensor)]

        def sums() -> Tensor:
            done.synchronize()
            return hosts[id(self.checksums)]

        recording = self.recording(model=request.model, pixels=request.pixels, logits=copies[id(self.logits)])
        results = {text: [_copied(result, copy) for result in group] for text, group in self.results.items()}
        checks = [replace(check, answers=copy(check.answers)) for check in self.checks]
        return ReplayResult(
            recording,
            hosts[id(self.logits)],
            results,
            checks,
            weights_hash=lambda: self.hash_of(request.model.module, sums()),
            structure_holds=lambda: self.structure_holds(request, sums()),
        )

    def structure_holds(self, request: PassesRequest, sums: Tensor) -> bool:
        """Return whether the model has the structure that was captured; other weights may read other tokens."""
        values = sums.numpy().tobytes()
        if self.sums not in (None, values) and model_structure(request.model, request.pixels) != self.structure:
            return False
        self.sums = values
        return True

    def hash_of(self, module: nn.Module, sums: Tensor) -> str:
        """Return the hash of the weights: the known one if the tensors have the same checksums."""
        values = sums.numpy().tobytes()
        if self.weights_hash is None or self.weights_hash[0] != values:
            self.weights_hash = values, state_hash(module)
        return self.weights_hash[1]


class GraphCache:
    """The graphs of all models, and how often each request was run without one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs: OrderedDict[Hashable, int] = OrderedDict()
        self._captures: Counter[Hashable] = Counter()
        self._rejected: set[Hashable] = set()
        self._graphs: OrderedDict[Hashable, PassesGraph] = OrderedDict()
        self._watched: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def __len__(self) -> int:
        return len(self._graphs)

    def replay(self, request: PassesRequest) -> ReplayResult | None:
        """Return the results by a graph; None if there is none for the module as it is."""
        with self._lock:
            graph = self._graphs.get(request.key)
            if graph is None:
                return None
            self._graphs.move_to_end(request.key)
        before = torch.cuda.Event()  # type: ignore[no-untyped-call]
        before.record()
        replayed = graph.replay(request)  # the GPU is at work while the host compares
        state = module_state(request.model.module, graph.structure.written)
        if state == graph.state and replayed.structure_holds():
            baselines = _baseline_results(request, replayed.recording, before)
            replayed.results.update(baselines)
            replayed.checks.extend(checks_of_maps(baselines))
            return replayed
        with self._lock:
            self._graphs.pop(request.key, None)
            self._runs.pop(request.key, None)
        return None

    def count(self, request: PassesRequest, target: TargetBatch, recording: Recording, results: Results) -> None:
        """Count a run without a graph, and capture one after some of them; recording and results are those of the run.

        Large layers are not captured: there the GPU is the slower one, and memory is short.
        """
        key, module = request.key, request.model.module
        if any(is_large(call, len(recording.calls)) for call in recording.calls):
            return
        with self._lock:
            runs = self._runs[key] = self._runs.pop(key, 0) + 1
            while len(self._runs) > MOST_REQUESTS:
                oldest, _ = self._runs.popitem(last=False)
                self._rejected.discard(oldest)
                self._captures.pop(oldest, None)
            # A graph that was evicted is captured again after twice as many runs as before
            if runs <= EAGER_RUNS * 2 ** self._captures[key] or key in self._rejected:
                return
            self._runs[key] = 0
            self._captures[key] += 1
        graph = capture_graph(request, target, results, recording.structure)
        with self._lock:
            if graph is None:
                self._rejected.add(key)
                return
            self._graphs[key] = graph
            limit = MOST_MEMORY * torch.cuda.get_device_properties(graph.pixels.device).total_memory
            while len(self._graphs) > MOST_GRAPHS or sum(each.memory for each in self._graphs.values()) > limit:
                self._graphs.popitem(last=False)
            if module not in self._watched:
                self._watched.add(module)
                weakref.finalize(module, self._forget, id(module))

    def clear(self) -> None:
        """Free the memory of all graphs."""
        with self._lock:
            self._graphs.clear()

    def _forget(self, module_id: int) -> None:
        """Drop the graphs of a module that is gone; takes no lock, since it runs wherever the module is freed."""
        for key in [key for key in list(self._graphs) if isinstance(key, tuple) and key[0] == module_id]:
            self._graphs.pop(key, None)


GRAPHS = GraphCache()


def _baseline_results(request: PassesRequest, recording: Recording, before: Any) -> Results:
    """Return the results of the methods that look at no pass, on a stream of their own: they do not wait for a replay.

    `before` is the event at which the pixels were there.
    """
    if not request.baseline_specs:
        return {}
    current, side_stream = torch.cuda.current_stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side_stream.wait_event(before)
    with torch.cuda.stream(side_stream):
        target = class_agnostic_target(len(request.pixels))
        results = run_all(request.baseline_specs, recording, [target], seed=request.seed, layers=request.layers)
    current.wait_stream(side_stream)
    for group in results.values():
        for result in group:
            for tensor in _parts(result):
                tensor.record_stream(current)
    return results


def capture_graph(
    request: PassesRequest, target: TargetBatch, expected: Results, structure: ModelStructure
) -> PassesGraph | None:
    """Return the graph of the passes over a batch whose results are known; None where there is none, or it differs."""
    state = module_state(request.model.module, structure.written)
    if state is None:
        return None
    device = request.pixels.device
    before = torch.cuda.memory_reserved(device)
    pool, stream = torch.cuda.graph_pool_handle(), STREAMS.take(device)
    try:
        graph = _capture(request, target, structure, state, pool, stream)
        replayed = graph.replay(request)
        replayed.structure_holds()  # notes the checksums of the weights
        results = replayed.results
    except RuntimeError:  # CUDA refuses to capture a transfer to the host; memory may run out
        graph = None
    except BaseException:
        STREAMS.give_back(device, stream)
        raise
    if graph is None:  # outside of `except`: there the traceback keeps the tensors of the capture
        _release(pool, stream)
        STREAMS.give_back(device, stream)
        return None
    weakref.finalize(graph.graph, STREAMS.give_back, device, stream)
    graph.memory = torch.cuda.memory_reserved(device) - before
    return graph if _are_same(results, expected, request.pixels.dtype) else None


class CaptureStreams:
    """Streams to capture on, a different one for each living graph of a device.

    cuBLAS has one workspace per stream. It is allocated in the memory of the graph whose capture needs it first. Newer
    versions of torch free it with that graph, although a second graph that was captured on the stream writes to it
    (pytorch issue 193402); 2.11 and before never free it (64 MB on an H200), so that streams are used again.
    """

    def __init__(self) -> None:
        self._free: dict[torch.device, list[Any]] = {}
        self._lock = threading.Lock()
        self._taken: set[int] = set()  # handles: torch hands out 32 streams in turn, the same ones again and again

    def take(self, device: torch.device) -> Any:
        """Return a stream that no living graph has: that which was given back last, or a new one."""
        with self._lock:
            free = self._free.setdefault(device, [])
            stream = free.pop() if free else torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            for _ in range(MOST_STREAMS):
                if stream.cuda_stream not in self._taken:
                    break
                stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._taken.add(stream.cuda_stream)
            return stream

    def give_back(self, device: torch.device, stream: Any) -> None:
        """Let the next capture have a stream; takes no lock, since it runs wherever a graph is freed."""
        self._taken.discard(stream.cuda_stream)
        self._free[device].append(stream)


STREAMS = CaptureStreams()


def _capture(
    request: PassesRequest, target: TargetBatch, structure: ModelStructure, state: Any, pool: Any, stream: Any
) -> PassesGraph:
    pixels, weights = request.pixels.clone(), _tensors(request.model.module)
    index = torch.tensor([[index] for index in target.classes], device=pixels.device)
    on_device = ClassIndexTarget(
        target.names,
        target.classes,
        target.score,
        target.rows,
        score_is_default=target.score_is_default,
        activation=target.activation,
        index=index,
    )
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        recording = record_for(request.captured_specs, request.model, pixels, structure=structure)
        logits = recording.logits.detach()
        if request.label is None:
            index.copy_(logits.argmax(-1, keepdim=True))
        results = run_all(request.captured_specs, recording, [on_device], seed=request.seed, layers=request.layers)
        sums, checks = checksums(weights), checks_of_maps(results)
        read = [logits, sums, *(check.answers for check in checks), *_read_by_host(results)]
        outputs = PackedTensors([*read, *(t for group in results.values() for r in group for t in _parts(r))])
        numbers = PackedTensors(read)
    light = functools.partial(
        Recording,
        structure=recording.structure,
        inputs=(None,) * len(recording.inputs),
        end=None,
        calls=(),
        pools=(),
        decoder=(),
        switch=None,
        rules=recording.rules,
        differentiable=False,
        recorders={},
        forwards=recording.forwards,
        backwards=recording.backwards,
        notes=recording.notes,
    )
    return PassesGraph(
        graph,
        pixels,
        index,
        logits,
        results,
        checks,
        sums,
        outputs,
        numbers,
        light,
        structure,
        state,
        weights,
        tuple(request.specs),
        stream,
    )


def _release(pool: Any, stream: Any) -> None:
    """Free the memory of a capture that failed, and set the random generator back: torch does both for a finished one.

    Up to torch 2.11 a failed capture leaves the generator in the state of a capture, and every later draw on the GPU
    raises "Offset increment outside graph capture". A capture that ends well, of a single operation, sets it back.
    """
    device = stream.device
    try:
        torch._C._cuda_endAllocateToPool(device.index, pool)
    except RuntimeError:  # torch has ended the capture itself, and its memory goes with the graph
        pass
    else:
        torch._C._cuda_releasePool(device.index, pool)
    gc.collect()  # tensors of the capture may lie in reference cycles with its error
    one_operation = torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream, capture_error_mode="thread_local")
    with contextlib.suppress(RuntimeError), one_operation:  # no memory left: the batch itself has been explained
        torch.zeros(1, device=device)
    torch.cuda.empty_cache()


def module_state(module: nn.Module, written: Collection[Path] = frozenset()) -> Any:
    """Return what decides which operations a module runs and on which memory; None if it cannot be told.

    `written` are the places that its own forward writes to.
    """
    state = fingerprint(module, written)
    return None if state is None else (state, tuple(tensor.data_ptr() for tensor in _tensors(module)))


def _tensors(module: nn.Module) -> list[Tensor]:
    return [tensor.detach() for part in submodules(module) for _, tensor in tensors_of(part)]


def _precision() -> Hashable:
    """Return the settings of torch that choose between kernels."""
    backends: Any = torch.backends.cuda  # its functions carry no types
    return (
        backends.flash_sdp_enabled(),
        backends.mem_efficient_sdp_enabled(),
        backends.math_sdp_enabled(),
        backends.cudnn_sdp_enabled(),
        torch.get_float32_matmul_precision(),
        torch.backends.cudnn.allow_tf32,
        torch.backends.cudnn.benchmark,
        torch.are_deterministic_algorithms_enabled(),
        torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None,
    )


def _parts(result: Result) -> list[Tensor]:
    """Return the tensors of a result."""
    tensors = [value for value in vars(result).values() if isinstance(value, Tensor)]
    return [*tensors, *(note.numbers for note in result.number_notes)]


def _read_by_host(results: Results) -> list[Tensor]:
    """Return the small tensors that explanations are made of next to the maps."""
    each = [result for group in results.values() for result in group]
    marks = [result.unmoved for result in each if isinstance(result.unmoved, Tensor)]
    return [*marks, *(note.numbers for result in each for note in result.number_notes)]


def _copied(result: Result, copy: Callable[[Tensor], Tensor]) -> Result:
    """Return a result with copies of its tensors."""
    tensors: dict[str, Any] = {name: copy(value) for name, value in vars(result).items() if isinstance(value, Tensor)}
    notes = [replace(note, numbers=copy(note.numbers)) for note in result.number_notes]
    return replace(result, seconds=0.0, notes=list(result.notes), number_notes=notes, **tensors)


def _are_same(results: Results, expected: Results, dtype: torch.dtype) -> bool:
    """Return whether two runs gave the same maps, up to roundings of the model's dtype."""
    for text, group in results.items():
        for result, other in zip(group, expected[text], strict=True):
            if (result.error is None) != (other.error is None) or (result.maps is None) != (other.maps is None):
                return False
            if result.maps is not None and other.maps is not None:
                bound = ROUNDINGS.get(dtype, 1) * torch.finfo(dtype).eps * other.maps.abs().max()
                if not bool(((result.maps - other.maps).abs() <= bound).all()):
                    return False
    return True
