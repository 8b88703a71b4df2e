"""Draw the table of a patch sweep, layers × heads, as a heat map, and write it."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from clairvit._io import atomic_write, dumps_json, to_json, write_json
from clairvit.perturbation.patching import PatchSweep
from clairvit.plotting.overlay import to_numpy
from clairvit.plotting.save import PICTURES, check_suffix, write_figure

CELL = 0.32  # inches
FRAME = 1.4  # inches for labels and the colour bar


def figure_size(layers: int, columns: int) -> tuple[float, float]:
    """Return the width and height of a figure of so many cells, in inches."""
    return max(3.0, CELL * columns + FRAME), max(2.4, CELL * layers + FRAME)


def plot_patch_sweep(sweep: PatchSweep, ax: Any = None) -> Axes:
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


def save_patch_sweep(sweep: PatchSweep, path: Path) -> Path:
    """Write the heat map, the record, or the effects [B, L, H] with the record as `about`, by the suffix."""
    suffix = check_suffix(path)
    if suffix in PICTURES:
        from matplotlib.figure import Figure

        layers, columns = sweep.effects.shape[1:]
        figure = Figure(figsize=figure_size(layers, columns), layout="constrained")
        plot_patch_sweep(sweep, figure.subplots())
        return write_figure(figure, path)
    if suffix == ".json":
        return write_json(patch_sweep_record(sweep), path)
    buffer = io.BytesIO()
    about = np.array(dumps_json(patch_sweep_record(sweep, values=False)))
    np.savez_compressed(buffer, effects=to_numpy(sweep.effects), scores=to_numpy(sweep.scores), about=about)
    return atomic_write(path, buffer.getvalue())


def patch_sweep_record(sweep: PatchSweep, values: bool = True) -> dict[str, Any]:
    """Return a sweep as JSON values under the names of `PatchSweep`; `effects` [B, L, H] unless not wanted."""
    content: dict[str, Any] = {
        "model": sweep.model,
        "kind": sweep.kind,
        "value": sweep.value,
        "score": sweep.score,
        "names": list(sweep.names),
        "target": list(sweep.target),
        "scores": sweep.scores.tolist(),
        "table": sweep.table.tolist(),
    }
    return dict(to_json(content | ({"effects": sweep.effects.tolist()} if values else {})))
