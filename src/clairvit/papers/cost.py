"""Cost: what a paper says of how long its method takes, measured against the method that it compares with."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from clairvit._cost import Cost
from clairvit.data.dataset import ImageDataset
from clairvit.errors import BadInput, NotApplicable
from clairvit.methods.explain import explain
from clairvit.methods.spec import MethodSpec, resolve_method
from clairvit.metrics.confidence_intervals import mean_interval
from clairvit.models.images import Batch
from clairvit.models.model import Model
from clairvit.papers.paper import CostClaim, Paper
from clairvit.papers.setup import first_readable

ROUNDS = 15  # in each of them both methods run once
WARM_UP = 3  # rounds that are not counted


@dataclass(frozen=True)
class CostResult:
    """What one explanation takes by two methods: passes, and the ratio of the times in one run."""

    claim: CostClaim
    method: Cost  # per image; its seconds are the median of the rounds
    baseline: Cost
    ratio: float  # geometric mean over the rounds
    interval: tuple[float, float]  # 95 %
    rounds: int
    device: str

    @property
    def extra_passes(self) -> int:
        """Return how many more passes the method takes, forward and backward ones counted alike."""
        first, second = (cost.forwards + cost.backwards for cost in (self.method, self.baseline))
        return first - second

    @property
    def work_needed(self) -> float:
        """Return how much work besides the passes would make the printed ratio true, in passes; NaN without one.

        With e more passes than the p of the baseline and w of other work in both, the ratio is 1 + e / (p + w). A
        backward pass is counted as one forward pass, the least that it takes.
        """
        if self.claim.ratio is None or self.claim.ratio <= 1:
            return math.nan
        return self.extra_passes / (self.claim.ratio - 1) - (self.baseline.forwards + self.baseline.backwards)

    @property
    def verdict(self) -> str:
        """Return what follows for the claim, here."""
        low, high = self.interval
        if self.claim.ratio is None:
            return "slower here" if low > 1 else "faster here" if high < 1 else "no difference here"
        if low <= self.claim.ratio <= high:
            return "holds here"
        return "slower than printed" if low > self.claim.ratio else "faster than printed"


def check_costs(paper: Paper) -> None:
    """Raise `BadInput` for a paper that says nothing about the cost of its methods."""
    if not paper.costs:
        raise BadInput(f"'{paper.name}' says nothing about what its methods cost, so there is nothing to measure.")


def measure_costs(
    paper: Paper, effort: str, model: Model, dataset: ImageDataset, seed: int = 0
) -> tuple[tuple[CostResult, ...], tuple[str, ...]]:
    """Run both methods of each claim in turn on one image, and return passes and ratios of times.

    Args:
        paper: Whose claims about cost are measured.
        effort: How many samples its methods draw.
        model: The loaded model.
        dataset: Its first image that can be read is explained.
        seed: Of the methods and of the interval.

    Returns:
        The results, and why a claim has none: a method that does not fit the model.
    """
    images = first_readable(model, dataset)
    batch = Batch(images.pixels, images.names, single=True)
    methods = {entry.name: resolve_method(paper.at_effort(effort, entry.method)) for entry in paper.methods}
    results, reasons = [], []
    for claim in paper.costs:
        try:
            results.append(_measure(claim, methods[claim.method], methods[claim.baseline], model, batch, seed))
        except NotApplicable as error:
            reasons.append(f"What it costs was not measured ({claim.statement}). {error}")
    return tuple(results), tuple(reasons)


def _measure(
    claim: CostClaim, method: MethodSpec, baseline: MethodSpec, model: Model, batch: Batch, seed: int
) -> CostResult:
    specs = (method, baseline)
    seconds: list[tuple[float, float]] = []
    costs: Sequence[Cost] = ()
    for count in range(WARM_UP + ROUNDS):
        order = (0, 1) if count % 2 else (1, 0)  # neither always comes first
        runs = {index: _time(specs[index], model, batch, seed) for index in order}
        costs = [runs[index][0] for index in (0, 1)]
        if count >= WARM_UP:
            seconds.append((runs[0][1], runs[1][1]))
    first, second = (
        Cost(cost.forwards, cost.backwards, float(np.median(times)))
        for cost, times in zip(costs, zip(*seconds, strict=True), strict=True)
    )
    ratio, interval = ratio_of_times(np.array(seconds), seed)
    return CostResult(claim, first, second, ratio, interval, ROUNDS, str(model.device))


def ratio_of_times(
    seconds: np.ndarray[tuple[int, int], np.dtype[np.float64]], seed: int
) -> tuple[float, tuple[float, float]]:
    """Return the geometric mean of first / second over the rounds of seconds [rounds, 2], and its 95 % interval."""
    logs = np.log(seconds[:, 0] / seconds[:, 1])
    low, high = mean_interval(logs, seed)
    return math.exp(float(logs.mean())), (math.exp(low), math.exp(high))


def _time(spec: MethodSpec, model: Model, batch: Batch, seed: int) -> tuple[Cost, float]:
    """Explain an image once; return passes and seconds."""
    _wait(model)
    started = time.perf_counter()
    explanation = explain(model, batch, spec, seed=seed)
    _wait(model)
    return explanation.cost, time.perf_counter() - started


def _wait(model: Model) -> None:
    """Wait for a GPU, which works behind the program's back."""
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
