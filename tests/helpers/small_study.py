"""A study that runs in seconds: a tiny ViT in a file, photographs of noise in folders that are classes."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn

from clairvit.bench.plan import DataConfig, ModelConfig, Study
from clairvit.bench.store import Store
from clairvit.models.model import Model

ARCHITECTURE = "test_vit"
METHODS, METRICS = ("legrad", "raw-attention"), ("deletion(steps=3)", "sparseness")
# what is not measured: who computed it, when, and how long it took
TABLE = (
    "select model, model_hash, image, image_hash, label, predicted, probability, method, metric, settings, options, "
    "better, value, degenerate, x, y, counts, forwards, backwards, note, among from results order by all"
)


def weights(path: Path, seed: int = 0) -> str:
    """The smallest ViT that timm has, on 32 × 32 pixels, for three classes."""
    import timm  # here: worker processes that only unpickle a `Deadly` need not wait for it

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = timm.create_model(ARCHITECTURE, img_size=32, num_classes=3)
        for parameter in module.parameters():
            nn.init.normal_(parameter, std=0.1)
    save_file(module.state_dict(), path)
    return f"file:{path}"


def photos(folder: Path, count: int, seed: int = 0) -> str:
    rng = np.random.default_rng(seed)
    for number in range(count):
        class_folder = folder / str(number % 3)
        class_folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(class_folder / f"{number:03}.png")
    return f"folder:{folder}"


def study(folder: Path, images: int = 6, **others: Any) -> Study:
    """Return a study in a folder; weights and photos that are in the folder are reused."""
    file = folder / "tiny.safetensors"
    model = f"file:{file}" if file.exists() else weights(file)
    photo_folder = folder / "photos"
    data = f"folder:{photo_folder}" if photo_folder.exists() else photos(photo_folder, images)
    usual: dict[str, Any] = {"methods": METHODS, "metrics": METRICS, "at_once": 2}
    return Study((ModelConfig(model, arch=f"timm:{ARCHITECTURE}"),), (DataConfig(data),), **usual | others)


def table(store: Store) -> list[tuple[Any, ...]]:
    return store.query(TABLE)[1]


@dataclass(frozen=True)
class Deadly(ModelConfig):
    """A model that kills the worker process that loads it, so many times."""

    flags: str = ""
    times: int = 1
    planner: int = field(default_factory=os.getpid)  # the process that must live

    def load(self, device: str | None = None) -> Model:
        if os.getpid() != self.planner:
            died = len(list(Path(self.flags).glob("died*")))
            if died < self.times:
                (Path(self.flags) / f"died{died}").touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return super().load(device)
