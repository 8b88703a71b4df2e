"""Draw the table of an intervention sweep, layers × heads, as a heat map, and write it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from clairvit._io import dumps_json
from clairvit.methods.explanation_files import arrays_as_bytes
from clairvit.methods.intervention import InterventionSweep
from clairvit.plotting.overlay import to_numpy
from clairvit.plotting.save import write_result

CELL = 0.32  # inches
FRAME = 1.4  # inches for labels and the colour bar


def figure_size(layers: int, columns: int) -> tuple[float, float]:
    """Return the width and height of a figure of so many cells, in inches."""
    return max(3.0, CELL * columns + FRAME), max(2.4, CELL * layers + FRAME)


def plot_intervention_sweep(sweep: InterventionSweep, ax: Any = None) -> Axes:
    """Draw the mean effect over the images on one axes and return it; zero is white."""
    table = to_numpy(sweep.table)
    layers, columns = table.shape
    if ax is None:
        from matplotlib import pyplot

        _, ax = pyplot.subplots(figsize=figure_size(layers, columns), layout="constrained")
    finite = np.abs(table[np.isfinite(table)])
    limit = float(finite.max()) if finite.size and finite.max() > 0 else 1.0
    image = ax.imshow(table, cmap="RdBu_r", vmin=-limit, vmax=limit, aspect="auto", interpolation="nearest")
    ax.set_ylabel("layer")
    ax.set_yticks(range(layers))
    if sweep.kind == "head":
        ax.set_xlabel("head")
        ax.set_xticks(range(columns))
    else:
        ax.set_xticks([])
    targets = sorted(set(sweep.target))
    title = targets[0] if len(targets) == 1 else f"{len(sweep.target)} images"
    ax.set_title(f"{sweep.kind} → {sweep.value}: {title}", fontsize="small")
    ax.figure.colorbar(image, ax=ax, label=f"change of the {sweep.score}")
    return ax  # type: ignore[no-any-return]


def save_intervention_sweep(sweep: InterventionSweep, path: Path) -> Path:
    """Write the heat map, the record, the table, or the effects [B, L, H] with the record as `about`, by the suffix."""

    def draw() -> Figure:
        layers, columns = sweep.effects.shape[1:]
        figure = Figure(figsize=figure_size(layers, columns), layout="constrained")
        plot_intervention_sweep(sweep, figure.subplots())
        return figure

    def npz() -> bytes:
        about = np.array(dumps_json(sweep.to_dict(values=False)))
        return arrays_as_bytes({"effects": to_numpy(sweep.effects), "scores": to_numpy(sweep.scores), "about": about})

    return write_result(sweep, path, draw, npz)
