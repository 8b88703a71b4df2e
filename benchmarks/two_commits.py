"""Time two checkouts in one run: every row is timed in both, one right after the other, and paired ratios are shown.

    git worktree add /tmp/before COMMIT
    OMP_WAIT_POLICY=passive python benchmarks/two_commits.py /tmp/before/src src --rounds 15
    python benchmarks/two_commits.py /tmp/before/src src --device cuda --rows '[!eo]*'    # ViT-B/16, batch 32, bfloat16

Only the public functions are used, so that the checkouts may differ inside. One thread each. On a GPU, where the fourth
call replays a captured graph, four rounds warm up, and the model has random weights. On a machine with other work use
--processor: seconds of the process instead of the clock's (CPU only).
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

ALONE = ["rollout", "genatt", "gradsam", "gmar-l1", "focusvit", "legrad", "decompx+skipplus", "attnlrp+plus", "ixg"]
APART = ["transatt", "partial-lrp", "lrp", "deep-taylor", "globenc", "alti", "fullgrad(biases=implicit)", "tokentm"]
MANY = ["lime(samples=64)", "rise(samples=64)", "occlusion", "leave-one-out", "smoothgrad(n=4)"]
METRICS = ["deletion", "insertion", "aopc", "faithfulness-correlation(runs=20)", "road", "irof", "sparseness"]
METRICS += ["max-sensitivity(samples=2)", "efficient-mprt", "infidelity(runs=8)"]
PANEL = [*ALONE, "raw-attention", "grad-rollout", "attcam", "gradcam", "cat", "attcat", "saliency", "random"]


def tasks() -> dict[str, tuple[str, Any]]:
    """Return the rows: a name, and which public function is called with what."""
    rows: dict[str, tuple[str, Any]] = {name: ("explain", name) for name in [*ALONE, *APART, *MANY]}
    rows[f"compare of {len(PANEL)} methods"] = ("compare", PANEL)
    return rows | {f"evaluate {name}": ("evaluate", name) for name in METRICS}


def serve(model_name: str, device: str, clock: Callable[[], float]) -> None:
    """Read one task per line, run it, and answer with its seconds."""
    import torch

    import clairvit as cv

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    images: Any = "demo"
    if device == "cuda":
        import timm

        module = timm.create_model("vit_base_patch16_224").eval().requires_grad_(False).to("cuda", torch.bfloat16)
        model = cv.wrap(module, size=224, name="ViT-B/16")
        images = torch.randn(32, 3, 224, 224, device="cuda", dtype=torch.bfloat16)
    else:
        model = cv.load(model_name)
    for line in sys.stdin:
        verb, value = json.loads(line)
        start = clock()
        if verb == "explain":
            cv.explain(model, images, value, target=0)
        elif verb == "compare":
            cv.compare(model, images, value, target=0)
        else:
            cv.evaluate(model, images, "legrad", value, target=0)
        if device == "cuda":
            torch.cuda.synchronize()
        print(clock() - start, flush=True)


def start_worker(source: str, *options: str) -> subprocess.Popen[str]:
    """Start a process that runs tasks with the package in `source`."""
    environment = os.environ | {"PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, source, source, "--serve", *options]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def seconds(worker: subprocess.Popen[str], task: tuple[str, Any]) -> float:
    """Return how long one task took in a worker."""
    assert worker.stdin is not None
    assert worker.stdout is not None
    worker.stdin.write(json.dumps(task) + "\n")
    worker.stdin.flush()
    return float(worker.stdout.readline())


def main() -> None:
    """Print the median of paired ratios (after / before) per row, slowest first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", help="the src folder of the one checkout")
    parser.add_argument("after", help="the src folder of the other")
    parser.add_argument("--model", default="pets", help="on a CPU")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--rows", default="*", help="a pattern of row names, such as 'evaluate *' or '[!el]*'")
    parser.add_argument("--processor", action="store_true", help="processor seconds of the process (CPU)")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        clock = time.process_time if arguments.processor else time.perf_counter
        serve(arguments.model, arguments.device, clock)
        return
    sources = [os.path.abspath(source) for source in (arguments.before, arguments.after)]
    options = ["--model", arguments.model, "--device", arguments.device, *["--processor"] * arguments.processor]
    workers = [start_worker(source, *options) for source in sources]
    warm_up = 4 if arguments.device == "cuda" else 1
    rows = {name: task for name, task in tasks().items() if fnmatch.fnmatchcase(name, arguments.rows)}
    timed: dict[str, list[tuple[float, float]]] = {name: [] for name in rows}
    for turn in range(arguments.rounds + warm_up):
        for name, task in rows.items():
            order = (0, 1) if turn % 2 else (1, 0)
            pair = {index: seconds(workers[index], task) for index in order}
            if turn >= warm_up:
                timed[name].append((pair[0], pair[1]))
    ratios = {name: statistics.median(after / before for before, after in pairs) for name, pairs in timed.items()}
    print(f"{'row':40} {'before ms':>10} {'after ms':>10} {'ratio':>7}")
    for name, ratio in sorted(ratios.items(), key=lambda item: -item[1]):
        before, after = (statistics.median(column) * 1000 for column in zip(*timed[name], strict=True))
        print(f"{name:40} {before:10.2f} {after:10.2f} {ratio:7.3f}")
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.close()
        worker.wait()


if __name__ == "__main__":
    main()
