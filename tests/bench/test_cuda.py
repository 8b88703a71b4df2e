"""Studies on a GPU: the CPU's numbers, also from several processes; training in bfloat16 that goes on exactly."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import clairvit as cv
from clairvit.bench.executors import in_process, local
from clairvit.bench.run import run_study
from clairvit.bench.store import Store
from clairvit.bench.worker import Worker
from clairvit.data.dataset import ImageDataset, as_dataset
from clairvit.models.model import Model
from clairvit.training.finetune import finetune
from clairvit.training.training_config import TrainingConfig
from helpers.small_study import study, table

pytestmark = pytest.mark.cuda
VALUES = "select image, method, metric, value from results order by all"


@pytest.mark.parametrize("workers", [1, 2])
def test_a_study_on_a_gpu_has_the_numbers_of_the_cpu(tmp_path: Path, workers: int) -> None:
    rows_by_device = {}
    for device in ("cpu", "cuda"):
        small_study = study(tmp_path, metrics=("deletion(steps=3)", "sparseness", "faithfulness-correlation(runs=20)"))
        store = Store.open(tmp_path / device)
        engine = in_process if device == "cpu" or workers == 1 else local(workers, device=device)
        outcome = run_study(small_study, store, engine, Worker(small_study.resolved(), device))
        assert (outcome.computed, outcome.failed) == (3, ())
        rows_by_device[device] = store.query(VALUES)[1]
    assert [row[:3] for row in rows_by_device["cuda"]] == [row[:3] for row in rows_by_device["cpu"]]
    undefined = [row for row in rows_by_device["cpu"] if row[3] is None]
    assert len(undefined) < len(rows_by_device["cpu"]) / 4
    for ours, theirs in zip(rows_by_device["cuda"], rows_by_device["cpu"], strict=True):
        assert (ours[3] is None) == (theirs[3] is None)
        assert theirs[3] is None or ours[3] == pytest.approx(theirs[3], rel=1e-3, abs=1e-4), theirs


def test_a_study_on_a_gpu_is_the_same_twice(tmp_path: Path) -> None:
    stores = [Store.open(tmp_path / name) for name in ("one", "two")]
    for store in stores:
        small_study = study(tmp_path)
        run_study(small_study, store, worker=Worker(small_study.resolved(), "cuda"))
    assert table(stores[0]) == table(stores[1])


def colours(count: int = 64) -> ImageDataset:
    """Noise that is reddish or bluish."""
    rng = np.random.default_rng(0)
    pictures = []
    for number in range(count):
        noise = rng.integers(0, 120, (32, 40, 3), dtype=np.uint8)
        noise[..., 2 * (number % 2)] += 120
        pictures.append(Image.fromarray(noise))
    return as_dataset(pictures, Model(torch.nn.Identity(), "nobody"), labels=["red", "blue"] * (count // 2))


def test_training_in_bfloat16_learns_goes_on_exactly_and_writes_float32(tmp_path: Path) -> None:
    seen: list[torch.dtype] = []

    def train(folder: str, epochs: int) -> Path:
        hook = torch.nn.modules.module.register_module_forward_hook(
            lambda module, _, out: seen.append(out.dtype) if isinstance(module, torch.nn.Linear) else None
        )
        try:
            return finetune(
                colours(),
                "timm:vit_tiny_patch16_224",
                recipe=TrainingConfig(epochs=epochs, batch=8, rate=2e-3, patience=9),
                pretrained=False,
                options={"patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "drop_rate": 0.1},
                size=32,
                device="cuda",
                out=tmp_path / folder / "model.safetensors",
            ).path
        finally:
            hook.remove()

    whole = train("whole", 4)
    train("parts", 2)
    assert train("parts", 4).read_bytes() == whole.read_bytes()
    assert set(seen) == {torch.bfloat16}
    model = cv.load(f"file:{whole}")
    assert {parameter.dtype for parameter in model.module.parameters()} == {torch.float32}
    dataset = colours()
    pages = [dataset.read(row, model) for row in range(16)]
    guesses = model.logits(torch.stack([page.pixels for page in pages])).argmax(1)
    assert [model.labels[guess] for guess in guesses.tolist()] == [["red", "blue"][row % 2] for row in range(16)]
