"""Draw the table of a patch sweep, layers × heads, as a heat map."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes

from clairvit.perturbation.patching import PatchSweep
from clairvit.plotting.overlay import to_numpy

CELL = 0.32  # inches
FRAME = 1.4  # inches for labels and the colour bar


def plot_patch_sweep(sweep: PatchSweep, ax: Any = None) -> Axes:
    """Draw the mean effect over the images on one axes and return it; zero is white."""
    table = to_numpy(sweep.table)
    layers, columns = table.shape
    if ax is None:
        from matplotlib import pyplot

        size = (max(3.0, CELL * columns + FRAME), max(2.4, CELL * layers + FRAME))
        _, ax = pyplot.subplots(figsize=size, layout="constrained")
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
