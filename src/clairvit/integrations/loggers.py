"""Log maps during training: TensorBoard, Weights & Biases, Lightning's loggers, or a folder of pictures."""

from __future__ import annotations

import importlib
import io
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from clairvit.errors import WrongType
from clairvit.methods.explanation import Comparison, Explanation


def log_maps(logger: Any, explanation: Explanation | Comparison, *, step: int, tag: str = "explanations") -> None:
    """Log the picture of an explanation.

    Args:
        logger: A TensorBoard `SummaryWriter`, a run of `wandb.init`, a logger of Lightning that has one of these, or a
            folder, into which PNG files are written.
        explanation: What `cv.explain` or `cv.compare` returned.
        step: The training step or epoch.
        tag: The name of the series of pictures.

    Raises:
        WrongType: A logger of another kind.

    Example:
        >>> import clairvit as cv
        >>> from clairvit.integrations.loggers import log_maps
        >>> log_maps("maps", cv.explain("pets", "demo", "genatt"), step=3)
        >>> [path.name for path in Path("maps").iterdir()]
        ['explanations-000003.png']
    """
    if isinstance(logger, str | PathLike):
        folder = Path(logger)
        folder.mkdir(parents=True, exist_ok=True)
        explanation.save(folder / f"{tag.replace('/', '-')}-{step:06d}.png")
        return
    experiment = _experiment(logger)
    if _is_tensorboard(experiment):
        experiment.add_image(tag, picture(explanation), global_step=step, dataformats="HWC")
    elif _is_wandb(experiment):
        image = importlib.import_module("wandb").Image(picture(explanation), caption=str(explanation))
        experiment.log({tag: image}, step=step)
    else:
        raise WrongType(
            f"The logger is a {type(experiment).__name__}; expected a TensorBoard SummaryWriter, a wandb run, a "
            "Lightning logger of these, or a folder. For others, log picture(explanation), an array [H, W, 3]."
        )


def takes_pictures(logger: Any) -> bool:
    """Return whether `log_maps` can log to this."""
    experiment = _experiment(logger)
    return isinstance(logger, str | PathLike) or _is_tensorboard(experiment) or _is_wandb(experiment)


def _experiment(logger: Any) -> Any:
    """Return what a logger of Lightning writes to; anything else as it is."""
    return getattr(logger, "experiment", logger)


def _is_tensorboard(experiment: Any) -> bool:
    return hasattr(experiment, "add_image")


def _is_wandb(experiment: Any) -> bool:
    return hasattr(experiment, "log") and type(experiment).__module__.partition(".")[0] == "wandb"


def picture(explanation: Explanation | Comparison) -> NDArray[np.uint8]:
    """Return what a notebook shows, as RGB [H, W, 3]."""
    with Image.open(io.BytesIO(explanation._repr_png_())) as image:
        return np.asarray(image.convert("RGB"))
