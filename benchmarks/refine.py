"""Measure refined maps: what N passes with random patches kept add to the map of one pass, on photos and models.

    python benchmarks/refine.py --data pets:oxford-iiit-pet --limit 100 --out refine-pets.jsonl
    python benchmarks/refine.py --data folder:imagenet --model file:vitb.safetensors --arch timm:vit_base_patch16_224 \
        --mean 0.5 --std 0.5 --passes 8,32,128,256 --out refine-vitb.jsonl
    python benchmarks/refine.py --table refine-pets.jsonl refine-vitb.jsonl

One line of JSON per photo is written as soon as it is measured, and a run that was cut off goes on from there. Photos
are a seeded sample. The target is the predicted class. For every N the map is that of `ex.refine(N)`; `lime` and
`kernelshap` have as many passes. Each map is scored by the metrics below. Intervals: of the 64 sets that follow the
first N, the share whose log-odds, as contrasts within blocks, lie inside the posterior's 90 % predictive interval;
and the share of patches whose value after most passes lies inside the interval of fewer passes.
Tables have means over photos with 95 % intervals, and differences to the one-pass map photo by photo.
"""

from __future__ import annotations

import argparse
import json
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import clairvit as cv
from clairvit.data.dataset import iter_batches
from clairvit.data.open import open_data
from clairvit.methods.refined import last_patch_tokens, refined_map
from clairvit.methods.runs import Question, iter_runs
from clairvit.metrics.confidence_intervals import mean_interval
from clairvit.metrics.context import EvalContext
from clairvit.metrics.registry import resolve_metric
from clairvit.models.images import Batch
from clairvit.perturbation.random_sets import contrasts, keep_sets
from clairvit.tracing.module_state import own_grad_mode
from clairvit.tracing.trace import run_backward

METRICS = ("insertion-deletion", "insertion-deletion(removal=mean)", "srg", "saco", "faithfulness-correlation")
PRIOR = "one pass"
BASELINES = ("random", "center")
RIVALS = ("lime", "kernelshap")
HELD_OUT = 64  # sets after the first N
NORMAL_90 = 1.6448536269514722  # the 95th percentile of the normal distribution


@own_grad_mode()
def measure(model: cv.Model, image: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the scores of every map of one photo, the seconds per pass, and the share of sets inside intervals."""
    explanation = cv.explain(model, image, arguments.method)
    maps = {PRIOR: explanation.maps} | {name: cv.explain(model, image, name).maps for name in BASELINES}
    refined, steps = explanation, {}
    for passes in arguments.passes:
        refined = steps[passes] = refined.refine(passes)
        maps[f"refine {passes}"] = refined.maps
    for name in RIVALS:
        for passes in arguments.rivals:
            maps[f"{name} {passes}"] = cv.explain(model, image, f"{name}(samples={passes})").maps
    question = Question.of(model, image)
    with closing(iter_runs(question, [cv.parse_method("saliency")])) as runs:
        run = next(runs)
        trace = run_backward(run.recording, run.targets[0], None)
        context = EvalContext(trace=trace, specs=(), raw=tuple(maps.values()))
        scores = {}
        for metric in arguments.metrics:
            output = resolve_metric(metric)(context)
            values = output if isinstance(output, Tensor) else output.values
            scores[metric] = dict(zip(maps, values[:, 0].tolist(), strict=True))
        tokens = last_patch_tokens(trace)
    assert refined.refinement is not None
    inside = {
        passes: share_inside(explanation.maps[0], refined.refinement.scores[0], passes, tokens)
        for passes in arguments.passes
        if passes + HELD_OUT <= refined.refinement.passes
    }
    return {
        "probability": explanation.probabilities[0],
        "scores": scores,
        "inside": inside,
        "covered": {passes: share_covered(step, refined) for passes, step in steps.items() if step is not refined},
        "method": explanation.method,
    }


def share_covered(few: cv.Explanation, many: cv.Explanation) -> float:
    """Return for how many patches the map of many passes is inside the 90 % interval that few passes gave.

    The map of more passes of a posterior differs from that of fewer by the difference of the two variances. A constant
    added to all patches does not show in contrasts, so that the mean difference is left out.
    """
    assert few.standard_error is not None
    assert many.standard_error is not None
    difference = few.maps[0] - many.maps[0]
    bound = NORMAL_90 * (few.standard_error[0].square() - many.standard_error[0].square()).clamp(min=0).sqrt()
    return float(((difference - difference.mean()).abs() <= bound).double().mean())


def share_inside(prior: Tensor, scores: Tensor, passes: int, tokens: Tensor | None) -> float:
    """Return how many of the sets that follow the first ones are inside their 90 % predictive intervals."""
    places = torch.cartesian_prod(*(torch.arange(side, dtype=torch.float64) for side in prior.shape))
    keep = keep_sets(prior.numel(), passes + HELD_OUT, 0)
    of_image = None if tokens is None else tokens[0]
    posterior = refined_map(prior.flatten().cpu().double(), keep[:passes], scores[:passes], places, of_image)
    mixing = contrasts(HELD_OUT)
    equations = mixing @ keep[passes:].double()
    errors = mixing @ scores[passes : passes + HELD_OUT] - equations @ posterior.mean
    return float((errors.abs() <= NORMAL_90 * posterior.predictive_error(equations)).double().mean())


def run(arguments: argparse.Namespace) -> None:
    """Measure photo by photo, going on after those that the file has."""
    statement: dict[str, Any] = {
        name: (getattr(arguments, name),) * 3 for name in ("mean", "std") if getattr(arguments, name)
    }
    statement |= {name: getattr(arguments, name) for name in ("arch", "labels") if getattr(arguments, name)}
    model = cv.load(arguments.model, device=arguments.device, **statement)
    dataset = open_data(arguments.data, limit=arguments.limit, seed=arguments.seed).dataset
    out = Path(arguments.out)
    finished = len(out.read_text().splitlines()) if out.exists() else 0
    for row in range(finished, len(dataset)):
        started = time.perf_counter()
        (batch,) = iter_batches(dataset.take([row]), model, 1)
        values = measure(model, Batch(batch.pixels, batch.names), arguments)
        about = {"model": arguments.model, "data": arguments.data, "seed": arguments.seed, "photo": batch.names[0]}
        with out.open("a") as file:
            file.write(json.dumps(about | values) + "\n")
        print(f"{row + 1}/{len(dataset)}: {time.perf_counter() - started:.1f} s", flush=True)


def print_tables(path: str) -> None:
    """Print mean scores, differences to the one-pass map, shares inside intervals and seconds per pass."""
    rows = [json.loads(line) for line in Path(path).read_text().splitlines()]
    first = rows[0]
    metrics = list(first["scores"])
    names = list(first["scores"][metrics[0]])
    values = {
        metric: {name: np.array([row["scores"][metric][name] for row in rows]) for name in names} for metric in metrics
    }
    print(f"\n{first['model']}, {len(rows)} photos of {first['data']}, one pass: {first['method']}\n")
    print(f"| map | {' | '.join(metrics)} |\n|---|{'---|' * len(metrics)}")
    for name in names:
        cells = []
        for metric in metrics:
            of_map = values[metric][name]
            compared = of_map if name == PRIOR or name in BASELINES else of_map - values[metric][PRIOR]
            compared = compared[np.isfinite(compared)]
            low, high = mean_interval(compared)
            sign = "" if name == PRIOR or name in BASELINES else "+"
            cells.append(f"{compared.mean():{sign}.3f} [{low:.3f}, {high:.3f}]")
        print(f"| {name} | {' | '.join(cells)} |")
    print("\nrefine and its rivals: difference to the one-pass map.\n")
    for passes in first["inside"]:
        shares = np.array([row["inside"][passes] for row in rows])
        low, high = mean_interval(shares, span=(0.0, 1.0))
        print(f"{passes} passes: {shares.mean():.3f} [{low:.3f}, {high:.3f}] of the next {HELD_OUT} sets inside 90 %")
    for passes in first["covered"]:
        shares = np.array([row["covered"][passes] for row in rows])
        low, high = mean_interval(shares, span=(0.0, 1.0))
        print(
            f"{passes} passes: the map of most passes lies inside the 90 % interval for {shares.mean():.3f} of patches "
            f"[{low:.3f}, {high:.3f}]"
        )


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part)


def main() -> None:
    """Measure, or print the tables of a run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", nargs="+", metavar="FILE")
    parser.add_argument("--data", default="")
    parser.add_argument("--model", default="pets")
    parser.add_argument("--arch")
    parser.add_argument("--labels")
    parser.add_argument("--mean", type=float)
    parser.add_argument("--std", type=float)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--method", help="the one-pass method; the default of the model")
    parser.add_argument("--limit", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--passes", type=_numbers, default=(8, 32, 64, 128, 256, 1024))
    parser.add_argument("--rivals", type=_numbers, default=(64, 256), help="passes of lime and kernelshap")
    parser.add_argument("--metrics", type=lambda text: tuple(text.split(";")), default=METRICS, help="a;b;c")
    parser.add_argument("--out", default="refine.jsonl")
    arguments = parser.parse_args()
    if arguments.table:
        for path in arguments.table:
            print_tables(path)
    else:
        run(arguments)


if __name__ == "__main__":
    main()
