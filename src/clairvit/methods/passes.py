"""The passes over one batch: recorded as they run or, on a GPU, replayed by a CUDA graph (`cuda/graphs.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from clairvit.cuda.graphs import GRAPHS, PassesRequest, ReplayResult, graph_request
from clairvit.execution import ExecutionOptions
from clairvit.methods.collect import MapChecks, checks_of_maps
from clairvit.methods.executor import Result
from clairvit.methods.planner import record_for, run_all
from clairvit.methods.spec import MethodSpec
from clairvit.models.model import Model
from clairvit.models.state_hash import WeightsHash
from clairvit.targets.base import TargetBatch
from clairvit.tracing.recording import Recording
from clairvit.tracing.structure import ModelStructure


@dataclass(frozen=True)
class Replay:
    """What a CUDA graph depends on next to the passes: it may serve class targets of a classifier."""

    score: str | None
    seed: int
    layers: bool


@dataclass(frozen=True, eq=False)
class Passes:
    """The recorded forward of a batch, from which methods are run.

    Args:
        recording: The recording; after a replay without activations.
        logits: The scores [B, C], on the CPU after a replay.
        weights_hash: That of the weights that were used.
    """

    recording: Recording
    logits: Tensor
    weights_hash: WeightsHash
    _request: PassesRequest | None = None  # a graph could serve it
    _replayed: ReplayResult | None = None

    def run_all(
        self, specs: Sequence[MethodSpec], targets: Sequence[TargetBatch], *, seed: int, layers: bool
    ) -> tuple[dict[str, list[Result]], list[MapChecks]]:
        """Return method text -> one result per target, and the checks of their maps."""
        if self._replayed is not None:
            return self._replayed.results, self._replayed.checks
        results = run_all(specs, self.recording, targets, seed=seed, layers=layers)
        if self._request is not None:
            GRAPHS.count(self._request, targets[0], self.recording, results)
        return results, checks_of_maps(results)


def record_passes(
    model: Model,
    specs: Sequence[MethodSpec],
    pixels: Tensor,
    execution: ExecutionOptions,
    structure: ModelStructure | None = None,
    named: Sequence[Any] | None = None,
    replay: Replay | None = None,
) -> Passes:
    """Record all that these methods require of pixels [B, 3, H, W], or replay the graph of such passes.

    Args:
        model: The model.
        specs: The methods.
        pixels: The images.
        execution: How perturbed inputs are run.
        structure: That of the model for these images, where it is known in this call.
        named: The targets as the user named them.
        replay: What a graph depends on; None: passes are never replayed.
    """
    request = None  # on a CPU always
    if replay is not None:
        request = graph_request(model, specs, pixels, named, replay.score, replay.seed, replay.layers)
    replayed = None if request is None else GRAPHS.replay(request)
    if replayed is not None:
        weights = WeightsHash(replayed.weights_hash())
        return Passes(replayed.recording, replayed.logits, weights, request, replayed)
    recording = record_for(specs, model, pixels, execution, structure)
    weights = WeightsHash.of(model.module, model.name, recording.structure.weights)
    return Passes(recording, recording.logits.detach(), weights, _request=request)
