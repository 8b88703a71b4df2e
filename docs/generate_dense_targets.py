"""Draw docs/images/regions.jpg and queries.jpg: scenes of two objects, asked about one and about the other.

python docs/generate_dense_targets.py [--weights FILE]

The models are those of benchmarks/dense_truth.py, trained for 200 steps; a file of weights that it wrote saves time.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

import clairvit as cv
from clairvit.data.scenes import SIZE, Scene, scene

ROOT = Path(__file__).parent.parent
METHOD = "attnlrp+plus"
NUMBERS = (0, 5, 6)  # of the scenes of the benchmark
DPI = 100


def benchmark() -> Any:
    """Return the module benchmarks/dense_truth.py."""
    spec = importlib.util.spec_from_file_location("dense_truth", ROOT / "benchmarks" / "dense_truth.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["dense_truth"] = module
    spec.loader.exec_module(module)
    return module


def draw(path: Path, model: cv.Model, scenes: Sequence[Scene], targets: Sequence[Sequence[cv.targets.Target]]) -> None:
    """Draw a row per scene: the picture, then the map of each target, with the outline of its region or box."""
    columns = 1 + len(targets[0])
    figure, axes = plt.subplots(len(scenes), columns, figsize=(2.3 * columns, 2.45 * len(scenes)), layout="constrained")
    for row, (item, questions) in enumerate(zip(scenes, targets, strict=True)):
        axes[row, 0].imshow(item.picture)
        axes[row, 0].set_title(f"{item.class_name} and {item.other_class_name}", fontsize=9)
        axes[row, 0].axis("off")
        for column, target in enumerate(questions, 1):
            axis = axes[row, column]
            explanation = cv.explain(model, item.picture, METHOD, target=target)
            explanation.plot(ax=axis)
            axis.set_title(explanation.targets[0].replace(f" in 0,0,{SIZE},{SIZE}", " in the whole image"), fontsize=9)
    figure.savefig(path, dpi=DPI, pil_kwargs={"quality": 85})
    plt.close(figure)
    print(path)


def main() -> None:
    """Make the models, then both pictures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--weights", type=Path)
    truth = benchmark()
    segmenter, detector = truth.fit_models(200, parser.parse_args().weights)
    scenes = [scene(truth.TEST_SEED, number, objects=2) for number in NUMBERS]
    names = [(item.class_name, str(item.other_class_name)) for item in scenes]
    boxes = [(truth.bounding_box(item.mask), truth.bounding_box(item.other_mask)) for item in scenes]
    regions = [
        [
            cv.Region(name, box=box)
            for group in (((0, 0, SIZE, SIZE),) * 2, places)
            for name, box in zip(pair, group, strict=True)
        ]
        for pair, places in zip(names, boxes, strict=True)
    ]
    queries = [
        [*(cv.Query(class_=name) for name in pair), *(cv.Query(class_=name, box="x") for name in pair)]
        for pair in names
    ]
    draw(ROOT / "docs" / "images" / "regions.jpg", segmenter, scenes, regions)
    draw(ROOT / "docs" / "images" / "queries.jpg", detector, scenes, queries)


if __name__ == "__main__":
    main()
