"""Fine-tuning before an experiment: nothing that is trained on is scored, and a run that was stopped goes on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from clairvit.bench.plan import DataConfig, ModelConfig
from clairvit.bench.store import Store
from clairvit.errors import BadInput
from clairvit.papers.paper import Paper, find_paper, list_papers
from clairvit.papers.reproduce import reproduce
from clairvit.papers.setup import ReproductionConfig
from clairvit.training.chained import FinetunedModel, finetune_for, training_parts
from clairvit.training.training_config import named_recipe

COUNT = 24
CLASSES = ("blue", "green", "red")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 pictures of noise in three colours, a folder for each."""
    root = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(0)
    for number in range(COUNT):
        name = CLASSES[number % 3]
        noise = rng.integers(0, 120, (40, 40, 3), dtype=np.uint8)
        noise[..., 2 - number % 3] += 120
        (root / name).mkdir(exist_ok=True)
        Image.fromarray(noise).save(root / name / f"{number}.png")
    return root


def paper() -> Paper:
    whole = find_paper("focusvit")
    entries = tuple(entry for entry in whole.methods if entry.method.startswith(("focusvit", "rollout")))
    return replace(whole, methods=entries, measures=(whole.measures[2],), tables=(), claims=())


def config(folder: Path, **data: int) -> ReproductionConfig:
    return ReproductionConfig(paper(), ModelConfig("scenes"), DataConfig(f"folder:{folder}", **data), validation=3)


def trained(folder: Path, out: Path, epochs: int = 1) -> FinetunedModel:
    return finetune_for(config(folder), out, portion=12, epochs=epochs)


def test_the_experiment_goes_on_with_the_trained_model(folder: Path, tmp_path: Path) -> None:
    finetuned = trained(folder, tmp_path)
    assert finetuned.trained.images + finetuned.trained.validated == 12
    model = finetuned.config.model.load()
    assert model.labels == CLASSES
    data = finetuned.parts.load(finetuned.config.data, model)
    assert (len(data.dataset), data.unknown_classes) == (12, ())
    assert "12 of the 12 images not trained on" in data.description
    result = reproduce(finetuned.config, Store.open(tmp_path / "store"), model=model, data=data)
    assert (result.images, result.tuned is not None) == (9, True)
    right = {split.right.images + split.wrong.images for split in result.by_correctness}
    assert right == {9}, "true classes are known"
    assert "by the recipe 'focusvit'" in finetuned.sentence
    assert finetuned.as_document()["images"] == finetuned.trained.images


def test_a_second_run_trains_nothing_and_more_epochs_go_on(folder: Path, tmp_path: Path) -> None:
    first = trained(folder, tmp_path)
    weights = first.trained.path.read_bytes()
    again = trained(folder, tmp_path)
    assert again.trained.resumed == len(again.trained.history) == 1
    assert again.trained.path.read_bytes() == weights
    more = trained(folder, tmp_path, epochs=2)
    assert (more.trained.resumed, len(more.trained.history)) == (1, 2)


def test_no_image_is_trained_on_and_scored(folder: Path) -> None:
    parts = training_parts(config(folder, limit=6).data, 0.5, 0)
    scored = set(parts.opened.dataset.take(parts.scored).names)
    assert len(parts.training) == 12
    assert len(scored) == 6
    assert not scored & set(parts.training.names)
    assert (
        "6 of the 12 images not trained on" in parts.load(config(folder).data, ModelConfig("scenes").load()).description
    )
    other = training_parts(config(folder).data, 0.5, 1)
    assert other.training.names != parts.training.names


def pets(root: Path, *splits: str) -> Path:
    """Write six tiny photos for each split in the layout of Oxford-IIIT Pet."""
    (root / "images").mkdir(parents=True)
    (root / "annotations" / "trimaps").mkdir(parents=True)
    for split in splits:
        lines = []
        for number in range(6):
            name = f"{('Bengal', 'pug')[number % 2]}_{split}{number}".replace("trainval", "1").replace("test", "2")
            values = np.random.default_rng(number).integers(0, 255, (40, 40, 3), dtype=np.uint8)
            Image.fromarray(values).save(root / "images" / f"{name}.jpg")
            Image.fromarray(np.ones((40, 40), dtype=np.uint8)).save(root / "annotations" / "trimaps" / f"{name}.png")
            lines.append(f"{name} {1 + number % 2} {1 + number % 2} 1")
        (root / "annotations" / f"{split}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return root


def test_the_training_split_is_trained_on_where_there_is_one(tmp_path: Path) -> None:
    both = DataConfig(f"pets:{pets(tmp_path / 'both', 'test', 'trainval')}")
    parts = training_parts(both, None, 0)
    assert (len(parts.training), len(parts.scored), parts.shared) == (6, 6, False)
    assert parts.description == "6 of 6 images of the split trainval"
    assert len(training_parts(both, 4, 0).training) == 4
    assert len(training_parts(replace(both, limit=2), 4, 0).scored) == 2


def test_a_missing_training_split_is_named(tmp_path: Path) -> None:
    parts = training_parts(DataConfig(f"pets:{pets(tmp_path / 'one', 'test')}"), 4, 0)
    assert (len(parts.training), len(parts.scored), parts.shared) == (4, 2, True)
    assert "the split trainval is not there" in parts.description


def test_what_cannot_be_trained_is_refused(folder: Path, tmp_path: Path) -> None:
    flat = tmp_path / "flat"
    flat.mkdir()
    Image.new("RGB", (32, 32)).save(flat / "1.png")
    with pytest.raises(
        BadInput, match="has no classes, so no model can be fine-tuned on it; expected data with classes"
    ):
        training_parts(DataConfig(f"folder:{flat}"), None, 0)
    with pytest.raises(BadInput, match=r"24 of 24 images of .* were to be trained on"):
        training_parts(config(folder).data, 24, 0)
    labelled = replace(config(folder), model=ModelConfig("scenes", labels=("a", "b")))
    with pytest.raises(BadInput, match="was given with fine-tuning"):
        finetune_for(labelled, tmp_path)
    with pytest.raises(BadInput, match="expected a number of images"):
        finetune_for(config(folder), tmp_path, portion=2.5)


def test_every_recipe_of_a_paper_exists() -> None:
    assert {paper.name: named_recipe(paper.recipe).rate for paper in list_papers()}["focusvit"] == 1e-4
