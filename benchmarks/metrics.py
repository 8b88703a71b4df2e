"""What a metric costs, in F = one plain forward of one image, measured before and after every row of the same run.

    OMP_WAIT_POLICY=passive OMP_NUM_THREADS=1 python benchmarks/metrics.py             # built-in model, batch 8
    pip install quantus                                                                # for the rows of Quantus
    python benchmarks/metrics.py --model timm:vit_base_patch16_224 --device cuda
    python benchmarks/metrics.py --only flat                                           # 10 and 1000 images

Seconds are processor seconds on the CPU, so that busy neighbours count less. A row is the median of its repeats, and
of one map (the map itself is made before), unless it says how many.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

import clairvit as cv
from clairvit.methods.planner import record_for, run_all
from clairvit.methods.spec import resolve_method
from clairvit.metrics.context import EvalContext
from clairvit.metrics.registry import list_metrics, resolve_metric
from clairvit.targets.resolve import resolve_for
from clairvit.tracing.trace import run_backward

TEN = ("ixg", "genatt", "gradcam", "gmar-l1", "gmar-l2", "attcam", "focusvit", "rollout", "raw-attention", "gradsam")
QUANTUS_RUNS = 100
FEW, MANY = 10, 1000  # images


@dataclass(frozen=True)
class Row:
    name: str
    seconds: float  # an image
    plain: float  # seconds of a plain forward of one image, around this row

    @property
    def cost(self) -> float:
        return self.seconds / self.plain


def clock(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


def timed(work: Callable[[], object], device: torch.device) -> float:
    started = clock(device)
    work()
    return clock(device) - started


def plain_forward(model: cv.Model, pixels: Tensor) -> float:
    with torch.no_grad():
        return statistics.median(timed(lambda: model.logits(pixels), pixels.device) for _ in range(5)) / len(pixels)


def measured(name: str, work: Callable[[], object], model: cv.Model, pixels: Tensor, repeats: int = 3) -> Row:
    """Time each repeat next to a plain forward pass, so that both run under the same load."""
    work()  # what is set up once is no cost of a map
    seconds, plain = [], [plain_forward(model, pixels)]
    for _ in range(repeats):
        seconds.append(timed(work, pixels.device) / len(pixels))
        plain.append(plain_forward(model, pixels))
    row = Row(name, statistics.median(seconds), statistics.median(plain))
    print(f"{row.name:56s} {row.cost:9.2f} F   {1000 * row.seconds:9.1f} ms per image", flush=True)
    return row


def make_context(model: cv.Model, pixels: Tensor, methods: Sequence[str], masks: Tensor | None = None) -> EvalContext:
    """Return the context of a metric with the maps of these methods."""
    specs = tuple(resolve_method(name) for name in methods)
    recording = record_for(specs, model, pixels)
    (target,) = resolve_for(model, None, recording.logits.detach())
    results = run_all(specs, recording, [target])
    maps = [results[spec.text][0].maps for spec in specs]
    raw = tuple(method_map.detach() for method_map in maps if method_map is not None)
    return EvalContext(trace=run_backward(recording, target, None), specs=specs, raw=raw, masks=masks)


def scoring(
    model: cv.Model, pixels: Tensor, texts: Sequence[str], methods: Sequence[str] = ("ixg",)
) -> Callable[[], Any]:
    """Return a function that scores maps that are computed beforehand."""
    masks = torch.zeros(len(pixels), *pixels.shape[-2:], dtype=torch.bool, device=pixels.device)
    masks[:, 50:170, 60:160] = True
    context = make_context(model, pixels, methods, masks)
    specs = [resolve_metric(text) for text in texts]
    return lambda: [spec(context) for spec in specs]


def budget(row: Row, most: float) -> None:
    print(f"    budget {most:g} F: {'met' if row.cost <= most else 'MISSED'}", flush=True)


def perturbing(model: cv.Model, pixels: Tensor) -> None:
    print("\nFaithfulness, one map")
    of = functools.partial(scoring, model, pixels)
    budget(measured("deletion + insertion, 9 steps each, tokens", of(["deletion", "insertion"]), model, pixels), 10.0)
    budget(measured("insertion-deletion, 9 steps each, tokens", of(["insertion-deletion"]), model, pixels), 10.0)
    text = "faithfulness-correlation"
    budget(measured(f"{text}, 100 runs, 25 % of tokens", of([text]), model, pixels), 75)
    budget(measured(f"{text}(compat=quantus), 100 runs", of([f"{text}(compat=quantus)"]), model, pixels, 1), 102)
    row = measured(f"{text}, ten maps", of([text], TEN), model, pixels)
    print(f"    {row.cost / 10:.1f} F per map: random sets do not depend on the map")


def again(model: cv.Model, pixels: Tensor) -> None:
    print("\nMetrics that explain again: one method and ten from one trace")
    for text in ("max-sensitivity", "mprt"):
        single, ten = scoring(model, pixels, [text]), scoring(model, pixels, [text], TEN)
        alone = measured(f"{text}, ixg", single, model, pixels, 2)
        every = measured(f"{text}, ten methods", ten, model, pixels, 2)
        ratio = every.cost / alone.cost
        print(f"    ratio {ratio:.2f}, budget 1.3: {'met' if ratio <= 1.3 else 'MISSED'}", flush=True)


def looking(model: cv.Model, pixels: Tensor) -> None:
    print("\nMetrics that look at the map alone, all of a family, one map")
    for family in ("complexity", "localisation"):
        names = [metric.name for metric in list_metrics() if metric.family == family and "methods" not in metric.needs]
        measured(f"{family}: {len(names)} metrics", scoring(model, pixels, names), model, pixels)


def scoring_by_quantus(model: cv.Model, pixels: Tensor, name: str, **options: Any) -> Callable[..., Any]:
    """Return a function that scores maps of `ixg`, computed beforehand, by a metric of Quantus; keywords go to it."""
    library: Any = importlib.import_module("quantus")
    ex = cv.explain(model, pixels, "ixg")
    fine = torch.nn.functional.interpolate(ex.maps[:, None].float(), pixels.shape[-2:], mode="bilinear")
    x, a = pixels.cpu().numpy(), fine.cpu().numpy()
    y = np.array([label for label in ex.classes if label is not None])
    metric = getattr(library, name)(disable_warnings=True, display_progressbar=False, **options)
    settings = {"x_batch": x, "y_batch": y, "a_batch": a, "device": str(pixels.device), "batch_size": len(x)}
    return functools.partial(metric, model=model.module, **settings)


def quantus(model: cv.Model, pixels: Tensor) -> None:
    """The same questions to Quantus, where it is installed; maps are made before, as for us."""
    try:
        importlib.import_module("quantus")
    except ImportError:
        print("\nQuantus is not installed")
        return
    print("\nQuantus, one map")

    def gradient(model: Any, inputs: Any, targets: Any, **_: Any) -> Any:
        images = torch.as_tensor(inputs, dtype=pixels.dtype, device=pixels.device)
        wrapped = cv.wrap(model, name="again", size=(224, 224))
        maps = cv.explain(wrapped, images, "ixg", target=[int(label) for label in targets]).maps
        return torch.nn.functional.interpolate(maps[:, None].float(), images.shape[-2:]).cpu().numpy()

    of = functools.partial(scoring_by_quantus, model, pixels)
    works: dict[str, Callable[..., Any]] = {
        f"FaithfulnessCorrelation, {QUANTUS_RUNS} runs": of("FaithfulnessCorrelation", nr_runs=QUANTUS_RUNS),
        "Sparseness": of("Sparseness"),
        "MaxSensitivity, 10 samples, ixg": functools.partial(
            of("MaxSensitivity", nr_samples=10), explain_func=gradient
        ),
    }
    for name, work in works.items():
        measured(f"Quantus {name}", work, model, pixels, 1)


def flat(model: cv.Model) -> None:
    """Time an image and memory with few and with many images, read from files."""
    print(f"\n{FEW} and {MANY} images from files: deletion(steps=3), sparseness and pointing-game of ixg")
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        paths = []
        for number in range(MANY):
            coarse = Image.fromarray(rng.integers(0, 255, (9, 9, 3), dtype=np.uint8))
            paths.append(str(Path(folder) / f"{number}.jpg"))
            coarse.resize((300, 260), Image.Resampling.BICUBIC).save(paths[-1])
        mask = np.zeros((260, 300), np.uint8)
        mask[60:200, 80:220] = 1
        for count in (FEW, FEW, MANY):
            started = clock(model.device)
            cv.evaluate(
                model,
                paths[:count],
                ["ixg"],
                ["deletion(steps=3)", "sparseness", "pointing-game"],
                masks=[mask] * count,
                baselines=False,
            )
            seconds = clock(model.device) - started
            most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            print(f"{count:5d} images {1000 * seconds / count:9.1f} ms per image, peak memory so far {most:.0f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="pets")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--only", choices=("perturbing", "again", "looking", "quantus", "flat"))
    chosen = parser.parse_args()
    model = cv.load(chosen.model, pretrained=chosen.model == "pets", device=chosen.device)
    size = model.preprocess.size
    pixels = torch.randn(chosen.batch, 3, *size, generator=torch.Generator().manual_seed(0)).to(model.device)
    print(f"{chosen.model} on {chosen.device}, batch {chosen.batch}, torch {torch.__version__}")
    for part in (perturbing, again, looking, quantus):
        if chosen.only in (None, part.__name__):
            part(model, pixels)
    if chosen.only in (None, "flat"):
        flat(model)


if __name__ == "__main__":
    main()
