"""How far rounding the weights to 8 bits can move a paper's table: `python benchmarks/weight_rounding.py joita …`.

Weights that were stored with one scale and zero point per tensor are known to half a step, (max − min) / 255 / 2. Each
seed adds an independent uniform error of up to that size to every weight (of tensors whose parts were stored with
scales of their own, such as query, key and value, no less), and the table is computed again: the spread of the
numbers is what the rounding may have moved them by.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from clairvit.bench.plan import DataConfig, ModelConfig
from clairvit.bench.store import Store
from clairvit.models.model import Model
from clairvit.papers.paper import find_paper
from clairvit.papers.preparation import prepared
from clairvit.papers.reproduce import reproduce
from clairvit.papers.setup import ReproductionConfig

LEVELS = 255  # steps of 8 bits


def perturbed(model: Model, seed: int) -> None:
    """Add to each weight a uniform error of up to half of its tensor's 8-bit step."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for values in model.module.parameters():
            step = (values.max() - values.min()) / LEVELS
            values.add_((torch.rand(values.shape, generator=generator) - 0.5) * step)


def table(config: ReproductionConfig, model: Model) -> dict[tuple[str, str], float]:
    """Return (measure, method) -> our number."""
    with tempfile.TemporaryDirectory() as folder:
        rows = reproduce(config, Store.open(Path(folder) / "store"), model=model).rows
    return {(measure, row.entry.name): cell.ours for row in rows for measure, cell in row.cells.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paper")
    parser.add_argument("--data", required=True)
    parser.add_argument("--masks")
    parser.add_argument("--model", required=True)
    parser.add_argument("--arch")
    parser.add_argument("--mean", type=float)
    parser.add_argument("--std", type=float)
    parser.add_argument("--seeds", type=int, default=8)
    options = parser.parse_args()
    paper = find_paper(options.paper)
    model = ModelConfig(options.model, options.arch, mean=options.mean, std=options.std)
    config = prepared(ReproductionConfig(paper, model, DataConfig(options.data, masks=options.masks)))
    as_it_is = table(config, config.model.load())
    runs = []
    for seed in range(options.seeds):
        loaded = config.model.load()
        perturbed(loaded, seed)
        runs.append(table(replace(config, seed=0), loaded))
        print(f"seed {seed} of {options.seeds} done", flush=True)
    print("| measure | method | as stored | mean | standard deviation | lowest | highest |")
    print("|---|---|--:|--:|--:|--:|--:|")
    for (measure, method), value in sorted(as_it_is.items(), key=lambda item: item[0][0]):
        values = np.array([run[measure, method] for run in runs])
        numbers = (value, values.mean(), values.std(ddof=1), values.min(), values.max())
        print(f"| {measure} | {method} | " + " | ".join(f"{number:.2f}" for number in numbers) + " |")


if __name__ == "__main__":
    main()
