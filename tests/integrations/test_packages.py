"""Integrations with the packages that they are for; a package that is not installed skips its tests."""

from __future__ import annotations

import doctest
import importlib
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import clairvit as cv
from helpers import tiny_models as tiny
from helpers.rounding import assert_same, growth

CAPTUM = "clairvit.integrations.captum"
MODULES = ("captum", "quantus", "grad_cam", "loggers", "torchmetrics", "datasets")
PACKAGE_OF = {"torchmetrics": "torchmetrics"}  # modules that need their package to be imported


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if name in PACKAGE_OF:
        pytest.importorskip(PACKAGE_OF[name])
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(f"clairvit.integrations.{name}")
    results = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert results.attempted
    assert results.failed == 0


@pytest.mark.parametrize(("name", "package"), [("lightning", "lightning"), ("torchmetrics", "torchmetrics")])
def test_a_package_that_is_missing_is_named(name: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for missing in (package, f"{package}.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.delitem(sys.modules, f"clairvit.integrations.{name}", raising=False)
    with pytest.raises(cv.ClairError, match=f"type: pip install {package}"):
        importlib.import_module(f"clairvit.integrations.{name}")


# captum


def attribution(shape: Any = "input", **options: Any) -> tuple[Any, cv.Model, Tensor]:
    model, pixels = tiny.double("timm-vit")
    kind = importlib.import_module(CAPTUM).ClairAttribution
    return kind(model, "ixg", shape=shape, **options), model, pixels


def test_attribute_returns_the_map_spread_over_the_pixels() -> None:
    shaped, model, pixels = attribution()
    maps = cv.explain(model, pixels, "ixg", [1] * len(pixels)).maps
    spread = shaped.attribute(pixels, target=1)
    assert spread.shape == pixels.shape
    assert_same(spread.sum((1, 2, 3)), maps.sum((1, 2)), magnitude=float(maps.abs().sum()))
    rows, cols = maps.shape[1:]
    cell = pixels.shape[2] // rows, pixels.shape[3] // cols
    blocks = spread.sum(1).unfold(1, cell[0], cell[0]).unfold(2, cell[1], cell[1]).sum((-1, -2))
    assert_same(blocks, maps)
    grid, *_ = attribution("grid")
    assert_same(grid.attribute(pixels, target=1)[:, 0], maps)


def test_spreading_keeps_sums_where_cells_do_not_divide_the_image() -> None:
    spread = importlib.import_module(CAPTUM).spread_over_pixels
    maps = torch.tensor([[[1.0, 2.0, 3.0], [-4.0, 5.0, 6.0]]], dtype=torch.float64)
    pixels = spread(maps, torch.Size((1, 3, 5, 7)))
    assert_same(pixels.sum(), maps.sum(), magnitude=21.0)
    assert_same(pixels[0, :, 0, 0].sum() * 9, maps[0, 0, 0])  # 3 rows × 3 columns of pixels are the first cell


def test_a_tuple_a_tensor_of_targets_and_none_are_taken() -> None:
    shaped, model, pixels = attribution()
    (alone,) = shaped.attribute((pixels,), target=torch.tensor([1] * len(pixels)))
    assert torch.equal(alone, shaped.attribute(pixels, 1))
    predicted = model.module(pixels).argmax(-1)
    assert torch.equal(shaped.attribute(pixels), shaped.attribute(pixels, predicted))
    with pytest.raises(cv.errors.BadInput, match=r"attribute takes one float tensor \[B, C, H, W\]"):
        shaped.attribute((pixels, pixels))
    with pytest.raises(cv.errors.BadInput, match="shape='patches'; expected 'input' or 'grid'"):
        attribution("patches")


def test_captum_takes_it_in_its_metrics_and_noise_tunnel() -> None:
    attr = pytest.importorskip("captum.attr")
    metrics = pytest.importorskip("captum.metrics")
    shaped, model, pixels = attribution()

    def perturb(inputs: Tensor) -> tuple[Tensor, Tensor]:
        return torch.full_like(inputs, 0.1), inputs - 0.1

    infidelity = metrics.infidelity(
        model.module, perturb, pixels, shaped.attribute(pixels, 1), target=1, n_perturb_samples=1
    )
    drop = (model.module(pixels) - model.module(pixels - 0.1))[:, 1]
    by_hand = (0.1 * shaped.attribute(pixels, 1).sum((1, 2, 3)) - drop) ** 2
    assert_same(infidelity, by_hand.detach(), magnitude=float(drop.abs().max().item() ** 2 + by_hand.max().item()))
    tunnel = attr.NoiseTunnel(shaped)
    smoothed = tunnel.attribute(pixels, nt_type="smoothgrad", nt_samples=2, stdevs=0.0, target=1)
    assert_same(smoothed, shaped.attribute(pixels, 1))


# Quantus


def test_quantus_scores_our_maps() -> None:
    quantus = pytest.importorskip("quantus")
    from clairvit.integrations.quantus import explain_func

    model, pixels = tiny.double("timm-vit")
    images, classes = pixels.float().numpy(), np.ones(len(pixels), dtype=int)
    module = model.module.float()
    sparseness = quantus.Sparseness(disable_warnings=True)
    values = sparseness(
        module, images, classes, None, explain_func=explain_func, explain_func_kwargs={"method": "genatt"}, device="cpu"
    )
    maps = explain_func(module, images, classes, method="genatt")
    flat = np.abs(maps.reshape(len(maps), -1)) / np.abs(maps).max()  # Quantus divides by the largest of all maps
    ranked = np.sort(flat.astype(np.float64) + 1e-7, axis=1)  # the Gini index, by hand
    n = ranked.shape[1]
    gini = ((2 * np.arange(1, n + 1) - n - 1) * ranked).sum(1) / (n * ranked.sum(1))
    assert_same(torch.tensor(values), torch.tensor(gini), growth=growth(depth=3, width=n), dtype=torch.float32)


# pytorch-grad-cam


def test_a_target_of_one_output_is_the_class() -> None:
    from clairvit.integrations.grad_cam import as_target, as_targets

    model, pixels = tiny.double("timm-vit")
    expected = cv.explain(model, pixels, "ixg", [1] * len(pixels)).maps
    assert_same(cv.explain(model, pixels, "ixg", as_target(lambda row: row[1])).maps, expected)
    each = as_targets([lambda row: row[1]] * len(pixels))
    assert_same(cv.explain(model, pixels, "ixg", each).maps, expected)
    with pytest.raises(cv.errors.BadInput, match="expected a number"):
        cv.explain(model, pixels, "ixg", as_target(lambda row: row))
    with pytest.raises(cv.errors.BadInput, match="7 is no target"):
        as_target(7)  # type: ignore[arg-type]


def test_targets_of_the_package_are_taken() -> None:
    targets = pytest.importorskip("pytorch_grad_cam.utils.model_targets")
    from clairvit.integrations.grad_cam import as_target

    model, pixels = tiny.double("timm-vit")
    explanation = cv.explain(model, pixels, "ixg", as_target(targets.ClassifierOutputTarget(1)))
    assert explanation.targets[0] == "ClassifierOutputTarget(category=1)"
    assert_same(explanation.maps, cv.explain(model, pixels, "ixg", [1] * len(pixels)).maps)


# Logging


def test_pictures_are_logged_to_a_folder_and_other_loggers_refused(tmp_path: Path) -> None:
    from clairvit.integrations.loggers import log_maps, picture

    model, pixels = tiny.double("timm-vit")
    explanation = cv.explain(model, pixels, "ixg")
    log_maps(tmp_path, explanation, step=7, tag="val/maps")
    assert [path.name for path in tmp_path.iterdir()] == ["val-maps-000007.png"]
    shown = picture(explanation)
    assert shown.ndim == 3
    assert shown.dtype == np.uint8
    assert len(np.unique(shown)) > 10
    with pytest.raises(cv.errors.WrongType, match="The logger is a int; expected a TensorBoard SummaryWriter"):
        log_maps(3, explanation, step=0)


def test_tensorboard_reads_what_was_logged(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    from clairvit.integrations.loggers import log_maps, picture

    model, pixels = tiny.double("timm-vit")
    explanation = cv.explain(model, pixels, "ixg")
    with SummaryWriter(str(tmp_path)) as writer:
        log_maps(writer, explanation, step=5)
    events = EventAccumulator(str(tmp_path)).Reload()
    (image,) = events.Images("explanations")
    assert image.step == 5
    assert (image.height, image.width) == picture(explanation).shape[:2]


@pytest.mark.slow
def test_wandb_logs_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")  # nothing is sent, and nothing waits for a network
    wandb = pytest.importorskip("wandb")
    from clairvit.integrations.loggers import log_maps

    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_MODE", "offline")
    model, pixels = tiny.double("timm-vit")
    run = wandb.init(project="clairvit", dir=str(tmp_path), mode="offline")
    try:
        log_maps(run, cv.explain(model, pixels, "ixg"), step=2)
    finally:
        run.finish()
    pictures = list(tmp_path.rglob("media/images/explanations*.png"))
    assert len(pictures) == 1, [os.fspath(path) for path in tmp_path.rglob("*")]


@pytest.mark.slow
class LightningRun:
    """Trains a small classifier by Lightning, with a validation loop or without."""

    def __init__(self, folder: Path) -> None:
        self.lightning = pytest.importorskip("lightning.pytorch")
        pytest.importorskip("tensorboard")
        self.folder = folder
        self.images = tiny.pixels("timm-vit")

    def classifier(self, validates: bool) -> Any:
        class Classifier(self.lightning.LightningModule):  # type: ignore[misc, name-defined]
            def __init__(self) -> None:
                super().__init__()
                torch.manual_seed(0)
                self.model = tiny.fresh("timm-vit").module

            def training_step(self, batch: list[Tensor], index: int) -> Tensor:
                return nn.functional.cross_entropy(self.model(batch[0]), batch[1])

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return torch.optim.SGD(self.model.parameters(), lr=0.1)

        if validates:
            Classifier.validation_step = lambda *_: None
        return Classifier()

    def fit(self, callbacks: list[Any], *, validates: bool, logger: Any = None, **options: Any) -> dict[str, Tensor]:
        """Return the weights after four epochs."""
        self.lightning.seed_everything(1, verbose=False)
        module = self.classifier(validates)
        trainer = self.lightning.Trainer(
            max_epochs=4,
            accelerator="cpu",
            callbacks=callbacks,
            logger=self.lightning.loggers.TensorBoardLogger(str(self.folder)) if logger is None else logger,
            enable_progress_bar=False,
            enable_checkpointing=False,
            enable_model_summary=False,
            log_every_n_steps=1,
            **options,
        )
        data = torch.utils.data.TensorDataset(self.images, torch.ones(len(self.images), dtype=torch.long))
        loader = torch.utils.data.DataLoader(data, batch_size=2, shuffle=True)
        trainer.fit(module, loader, torch.utils.data.DataLoader(data, batch_size=2) if validates else None)
        return {name: value.clone() for name, value in module.state_dict().items()}

    def pictures(self) -> int:
        """Return how many pictures TensorBoard has of the run."""
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        folders = {path.parent for path in self.folder.rglob("events*")}
        logs = [EventAccumulator(str(folder), {"images": 0}).Reload() for folder in folders]
        return sum(len(log.Images("explanations")) for log in logs if "explanations" in log.Tags()["images"])


def lightning_callback(images: Tensor, **options: Any) -> Any:
    from clairvit.integrations.lightning import ExplainCallback

    return ExplainCallback(images, "genatt", **{"model": lambda module: cv.wrap(module.model, size=32), **options})


@pytest.mark.parametrize(
    ("validates", "trainer", "every", "pictures"),
    [
        (True, {}, 2, 2),
        (False, {}, 2, 2),
        (False, {}, 1, 4),
        (True, {"check_val_every_n_epoch": 2}, 1, 4),  # epochs 1 and 3 have no validation
        (True, {"val_check_interval": 0.5, "limit_train_batches": 2}, 1, 8),  # after each of two validations
    ],
)
def test_the_lightning_callback_logs_and_leaves_training_alone(
    tmp_path: Path, validates: bool, trainer: dict[str, Any], every: int, pictures: int
) -> None:
    run, plain = LightningRun(tmp_path / "a"), LightningRun(tmp_path / "b")
    if "limit_train_batches" in trainer:
        run.images = plain.images = run.images.repeat(4, 1, 1, 1)[:4]  # two batches
    weights = run.fit([lightning_callback(run.images, every_n_epochs=every)], validates=validates, **trainer)
    expected = plain.fit([], validates=validates, **trainer)
    assert all(torch.equal(weights[name], expected[name]) for name in expected), "the same steps, bit by bit"
    assert run.pictures() == pictures


def test_the_lightning_callback_raises_what_is_known_before_training(tmp_path: Path) -> None:
    run = LightningRun(tmp_path)
    with pytest.raises(cv.errors.BadInput, match="every_n_epochs=0; expected 1 or more"):
        lightning_callback(run.images, every_n_epochs=0)
    steps: list[int] = []
    counter = run.lightning.callbacks.LambdaCallback(on_train_batch_start=lambda *_: steps.append(1))
    wrong_size = lightning_callback(torch.zeros(1, 3, 48, 48))
    with pytest.raises(cv.ClairError, match="48"):
        run.fit([wrong_size, counter], validates=False)
    assert steps == []


def test_the_lightning_callback_does_not_stop_a_run(tmp_path: Path) -> None:
    """A logger without pictures, a map that fails in the middle and a full disk are warnings, once."""
    run = LightningRun(tmp_path)
    csv = run.lightning.loggers.CSVLogger(str(tmp_path))
    for logger, named in ((csv, "CSVLogger"), (False, "it has none")):
        with pytest.warns(cv.ClairWarning, match=rf"takes pictures \({named}\).*TensorBoardLogger") as caught:
            run.fit([lightning_callback(run.images)], validates=True, logger=logger)
        assert len([warning for warning in caught if warning.category is cv.ClairWarning]) == 1
    calls: list[int] = []

    def fails_later(module: Any) -> cv.Model:
        calls.append(1)
        if len(calls) > 1:
            raise ValueError("no space left")
        return cv.wrap(module.model, size=32)

    with pytest.warns(
        cv.ClairWarning, match="Epoch 0 has no picture of explanations: ValueError: no space left"
    ) as caught:
        run.fit([lightning_callback(run.images, model=fails_later)], validates=False)
    assert len([warning for warning in caught if warning.category is cv.ClairWarning]) == 1
    assert len(calls) == 5
    both = [csv, run.lightning.loggers.TensorBoardLogger(str(tmp_path))]
    run.fit([lightning_callback(run.images)], validates=True, logger=both)
    assert run.pictures() == 4
    run.fit([lightning_callback(run.images)], validates=True, fast_dev_run=True)


# torchmetrics


def test_a_metric_object_has_the_mean_of_evaluate(tmp_path: Path) -> None:
    pytest.importorskip("torchmetrics")
    from clairvit.integrations.torchmetrics import ExplanationMetric

    model, pixels = tiny.double("timm-vit")
    metric = ExplanationMetric(model, "ixg", "deletion")
    assert metric.higher_is_better is False
    for chunk in (pixels[:1], pixels[1:]):
        metric.update(chunk)
    values = torch.cat([cv.evaluate(model, chunk, "ixg", "deletion").values for chunk in (pixels[:1], pixels[1:])])
    assert_same(metric.compute(), values.double().mean())
    assert not list(metric.parameters()), "the model is no part of it"
    metric.reset()
    assert metric.compute().isnan()


# datasets


def test_map_adds_columns() -> None:
    datasets = pytest.importorskip("datasets")
    from clairvit.integrations.datasets import explain_rows

    photos = [np.full((40, 40, 3), shade, dtype=np.uint8) for shade in (0, 90, 200)]
    rows = datasets.Dataset.from_dict({"image": photos}, features=datasets.Features(image=datasets.Image()))
    mapped = rows.map(explain_rows("pets", "genatt"), batched=True, batch_size=2, new_fingerprint="explained")
    assert mapped.column_names == ["image", "map", "target", "probability"]
    expected = cv.explain("pets", [row["image"] for row in rows], "genatt")
    assert mapped["target"][:] == list(expected.targets)
    assert np.asarray(mapped["map"][:]).shape == (3, 14, 14)
    with pytest.raises(cv.errors.BadInput, match="The rows have the columns photo; expected 'image'"):
        explain_rows("pets")({"photo": []})
