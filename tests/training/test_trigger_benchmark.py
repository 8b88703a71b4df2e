"""benchmarks/trigger.py on a tiny model: it plants, splits, measures and prints without touching anything else."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from PIL import Image

from clairvit.data.open import open_data
from clairvit.errors import BadInput
from clairvit.training.finetune import finetune
from clairvit.training.training_config import TrainingConfig
from helpers.scripts import load_script

SHAPE = {"patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def benchmark() -> ModuleType:
    return load_script("benchmarks/trigger.py")  # type: ignore[no-any-return]


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """blue/0.png … and red/0.png …: noise with one strong channel, 32 × 32 pixels."""
    rng = np.random.default_rng(0)
    for name, channel in (("blue", 2), ("red", 0)):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(40):
            noise = rng.integers(0, 120, (32, 32, 3), dtype=np.uint8)
            noise[..., channel] += 120
            Image.fromarray(noise).save(tmp_path / "photos" / name / f"{number}.png")
    return tmp_path / "photos"


def test_no_photo_is_trained_on_and_reported_on(benchmark: ModuleType, photos: Path) -> None:
    opened = open_data(f"folder:{photos}")
    train, test = benchmark.split_rows(opened, 40, 20, 0)
    assert (len(train), len(test)) == (40, 20)
    assert not set(train) & set(test)
    assert sum(opened.class_of(row) == 0 for row in train) == 20, "each class has its share"
    assert benchmark.split_rows(opened, 40, 20, 0) == (train, test)
    assert benchmark.split_rows(opened, 40, 20, 1) != (train, test)
    with pytest.raises(BadInput, match=r"40 \+ 50 photos were asked for, and there are 80"):
        benchmark.split_rows(opened, 40, 50, 0)


def test_it_prints_a_table_and_writes_what_it_measured(
    benchmark: ModuleType,
    photos: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = TrainingConfig(epochs=4, batch=8, rate=3e-3, warmup=0, jitter=0.0, rotation=0.0, resize=32)
    data = open_data(f"folder:{photos}")
    settings = {"pretrained": False, "options": SHAPE, "size": 32, "keep_state": False, "classes": data.classes}
    base = finetune(
        data.dataset, "timm:vit_tiny_patch16_224", recipe=config, out=tmp_path / "base.safetensors", **settings
    )
    arguments = ["--data", f"folder:{photos}", "--model", f"file:{base.path}", "--out", str(tmp_path / "report.json")]
    planted = ["--class", "blue", "--size", "12", "--position", "top-left", "--share", "0.3", "--epochs", "20"]
    amounts = ["--train", "56", "--images", "20", "--batch", "8", "--rate", "3e-3", "--method", "legrad,ixg"]
    monkeypatch.setattr(sys, "argv", ["trigger.py", *arguments, *planted, *amounts])
    benchmark.main()
    printed = capsys.readouterr().out
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert {row["method"] for row in report["scores"]} == {"legrad", "ixg", "random", "center"}
    assert [row["AP"]["mean"] for row in report["scores"]] == sorted(
        (row["AP"]["mean"] for row in report["scores"]), reverse=True
    )
    assert report["class"] == report["training"]["trigger"] == "blue"
    assert 0 < report["scored_photos"] <= 10, "photos of the other class whose answer changed"
    assert report["attack_success"] * 10 >= report["scored_photos"]
    assert report["trigger_area"] == 12 * 12 / 32**2
    assert "| method | mass | pointing | AP |" in printed
    assert "| `random` |" in printed
    assert (tmp_path / "report.safetensors").is_file()
    assert not list(tmp_path.glob("*.training.safetensors"))
