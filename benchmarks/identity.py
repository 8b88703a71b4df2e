"""Hash every map and score, to show that a change of the code changed no result.

    python benchmarks/identity.py --out before.json        on the old commit
    python benchmarks/identity.py --out after.json         on the new one, on the same machine with as many threads
    python benchmarks/identity.py --compare before.json after.json

Hashes depend on the processor's kernels: compare files of one machine only.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import sys
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SCORED = ("rollout", "legrad", "ixg", "attnlrp+plus", "decompx+skipplus")
METRIC_MODELS = ("timm-vit", "timm-reg4-gap", "open_clip-nonsquare")
FEW = {"samples": 24}
FEW_RUNS = {"samples": 2, "runs": 5}
NEEDS_LABELS = ("grid-pointing-game", "class-contrast")  # several images, or a second class in each


def digest(values: Any) -> str:
    """Return the start of the SHA-256 of an array's shape, type and bytes."""
    array = values.detach().cpu().contiguous().numpy()
    return hashlib.sha256(f"{array.dtype}{array.shape}".encode() + array.tobytes()).hexdigest()[:16]


def registered(kind: str) -> Any:
    """Return the registered methods or metrics of the installed edition."""
    registry = importlib.import_module(f"clairvit.{kind}.registry")
    names = (f"registered_{kind}", f"list_{kind}")
    return next(getattr(registry, name) for name in names if hasattr(registry, name))()


def hash_maps(cv: Any, model: Any, images: Any, prefix: str, target: Any) -> dict[str, str]:
    """Hash the map of every method on one model; methods that do not apply are named."""
    methods = [(method.name, method.options) for method in registered("methods")]
    texts = [f"{name}(samples=24)" if "samples" in options else name for name, options in methods]
    texts += ["genatt+skipplus", "attnlrp+plus", "raw-attention+rollout", "ixg+last", "legrad+from:1"]
    compared = cv.compare(model, images, texts, target=target, seed=0, skip=True)
    hashes = {f"{prefix} {text}": digest(explanation.maps) for text, explanation in compared.items()}
    return hashes | {f"{prefix} {text}": "not applicable" for text in compared.skipped}


def hash_scores(cv: Any, model: Any, images: Any, masks: Any, prefix: str, target: Any) -> dict[str, str]:
    """Hash the values of every metric for a few methods on one model."""
    texts = []
    for metric in registered("metrics"):
        if "parts" in getattr(metric, "needs", ()):
            continue  # these images have no parts that can be removed
        few = ",".join(f"{key}={value}" for key, value in FEW_RUNS.items() if key in metric.options)
        texts.append(f"{metric.name}({few})" if few else metric.name)
    texts = [text for text in texts if not text.startswith(NEEDS_LABELS)]
    scores = cv.evaluate(model, images, list(SCORED), texts, target=target, masks=masks, seed=0, skip=True)
    return {f"{prefix} {method} {metric}": digest(score.values) for (method, metric), score in scores.items()}


def main() -> None:
    """Write the hashes of this checkout, or compare two files of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--compare", nargs=2, type=Path)
    parser.add_argument("--models", nargs="*", help="only these of the tiny models, and pets if named")
    arguments = parser.parse_args()
    if arguments.compare:
        before, after = (json.loads(path.read_text(encoding="utf-8")) for path in arguments.compare)
        differing = sorted(name for name in before.keys() & after.keys() if before[name] != after[name])
        for name in differing:
            print(f"differs  {name}: {before[name]} → {after[name]}")
        for name in sorted(before.keys() ^ after.keys()):
            print(f"{'gone' if name in before else 'new'}  {name}")
        print(f"{len(before.keys() & after.keys())} results compared, {len(differing)} differ")
        sys.exit(bool(differing))
    sys.path.insert(0, str(ROOT / "tests"))
    import torch

    import clairvit as cv

    tiny: Any = importlib.import_module("helpers.tiny_models")

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    chosen = arguments.models if arguments.models is not None else [*tiny.TINY, "pets"]
    hashes: dict[str, str] = {}
    for name in tiny.TINY:
        if name not in chosen:
            continue
        images = tiny.pixels(name)
        print(name, flush=True)
        hashes |= hash_maps(cv, tiny.wrapped(name), images, name, 3)
        if name in METRIC_MODELS:
            masks = torch.zeros(len(images), *images.shape[-2:], dtype=torch.bool)
            masks[:, 4:16, 3:14] = True
            hashes |= hash_scores(cv, tiny.wrapped(name), images, masks, name, 3)
    if "pets" in chosen:
        hashes |= hash_maps(cv, cv.load("pets"), "demo", "pets", None)
        masks = torch.zeros(1, 224, 224, dtype=torch.bool)
        masks[:, 40:180, 30:150] = True
        hashes |= hash_scores(cv, cv.load("pets"), "demo", masks, "pets", None)
    arguments.out.write_text(json.dumps(hashes, indent=0, sort_keys=True), encoding="utf-8")
    print(f"{len(hashes)} hashes in {arguments.out}")


if __name__ == "__main__":
    main()
