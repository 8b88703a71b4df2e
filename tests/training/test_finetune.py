"""Fine-tuning: it learns, stops in time, is interrupted without a trace, and what it writes loads by itself."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import clairvit as cv
from clairvit.data.dataset import ImageDataset, as_dataset
from clairvit.errors import BadInput, ClairError, ModelUnavailable, UnknownName
from clairvit.models.model import Model
from clairvit.training.augment import augment, center_crop, draw_augmentations, epoch_order
from clairvit.training.base_model import BaseModel, ModelRequest, load_base_model
from clairvit.training.checkpoint import Epoch, Progress, read_progress
from clairvit.training.finetune import Trained, checkpoint_of, finetune
from clairvit.training.image_cache import cache_images, class_indices, class_names, stratified_split
from clairvit.training.training_config import TrainingConfig, named_recipe
from helpers.rounding import assert_same, growth
from helpers.small_datasets import coloured_noise

NOBODY = Model(nn.Identity(), "nobody")
# dropout, so that a generator's state matters; a rate that falls each epoch, so that the schedule's does
SHAPE = {"patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2, "drop_rate": 0.2, "drop_path_rate": 0.2}
SHORT = TrainingConfig(epochs=3, batch=8, rate=5e-3, every=1, gamma=0.8, patience=9)
PLAIN = {"warmup": 0, "clip": None}  # a rate that is there from the first step on


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Sums of several threads may be rounded otherwise."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run(folder: Path, dataset: ImageDataset | None = None, recipe: TrainingConfig = SHORT, **more: Any) -> Trained:
    options = {"pretrained": False, "options": SHAPE, "size": 32, "out": folder / "model.safetensors", **more}
    return finetune(dataset or coloured_noise(24), "timm:vit_tiny_patch16_224", recipe=recipe, **options)


# interruption ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [1, 2])
def test_a_run_that_was_interrupted_ends_with_the_same_bytes(tmp_path: Path, after: int) -> None:
    """Also in the middle of an epoch: what was not written is done again. (SIGKILL is tests/cli/test_finetune.py's.)"""
    whole = run(tmp_path / "whole")

    def stop(epoch: Epoch) -> None:
        if epoch.number == after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "parts", on_epoch=stop)
    assert len(read_progress(checkpoint_of(tmp_path / "parts" / "model.safetensors")).history) == after
    torch.manual_seed(after)  # whatever happened in between
    resumed = run(tmp_path / "parts")
    assert resumed.resumed == after
    assert whole.resumed == 0
    assert resumed.history == whole.history
    for name in ("model.safetensors", "model.training.safetensors"):
        assert (tmp_path / "parts" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_another_seed_is_another_run(tmp_path: Path) -> None:
    """So the test above can fail."""
    first = run(tmp_path / "a")
    other = run(tmp_path / "b", recipe=dataclasses.replace(SHORT, seed=1))
    assert first.history != other.history
    assert first.path.read_bytes() != other.path.read_bytes()


def test_nothing_is_left_but_the_weights_and_the_checkpoint(tmp_path: Path) -> None:
    run(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.safetensors", "model.training.safetensors"]


def test_a_finished_run_is_not_done_again_and_may_be_made_longer(tmp_path: Path) -> None:
    first = run(tmp_path)
    again = run(tmp_path)
    assert again.resumed == 3
    assert again.history == first.history
    longer = run(tmp_path, recipe=dataclasses.replace(SHORT, epochs=4))
    assert longer.resumed == 3
    assert longer.history[:3] == first.history
    assert len(longer.history) == 4
    whole = run(tmp_path / "whole", recipe=dataclasses.replace(SHORT, epochs=4))
    assert whole.history == longer.history


def test_other_settings_are_not_mixed_with_an_earlier_run(tmp_path: Path) -> None:
    run(tmp_path)
    with pytest.raises(BadInput, match=r"batch was 8, now 4.*fresh=True"):
        run(tmp_path, recipe=dataclasses.replace(SHORT, batch=4))
    with pytest.raises(BadInput, match="other images"):
        run(tmp_path, coloured_noise(24, seed=1))
    fresh = run(tmp_path, recipe=dataclasses.replace(SHORT, batch=4, epochs=1), fresh=True)
    assert (fresh.resumed, len(fresh.history)) == (0, 1)


def test_a_broken_checkpoint_and_lost_weights_are_errors_with_a_reason(tmp_path: Path) -> None:
    run(tmp_path)
    checkpoint, weights = tmp_path / "model.training.safetensors", tmp_path / "model.safetensors"
    content = weights.read_bytes()
    weights.unlink()
    with pytest.raises(BadInput, match="are gone"):
        run(tmp_path)
    weights.write_bytes(content)
    checkpoint.write_bytes(checkpoint.read_bytes()[:1000])
    with pytest.raises(BadInput, match=r"cannot be used.*fresh=True"):
        run(tmp_path)
    checkpoint.write_bytes(content)  # a file of tensors, but no checkpoint
    with pytest.raises(BadInput, match=r"cannot be used.*fresh=True"):
        run(tmp_path)


def test_the_users_random_numbers_are_not_disturbed(tmp_path: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    run(tmp_path, recipe=dataclasses.replace(SHORT, epochs=1))
    assert torch.equal(torch.rand(3), expected)


# learning -------------------------------------------------------------------------------------------------------------


def test_it_learns_and_the_file_has_the_best_epochs_weights_with_all_that_load_asks(tmp_path: Path) -> None:
    recipe = TrainingConfig(epochs=8, batch=8, rate=5e-3, patience=8, held_out=0.25)
    done = run(tmp_path, coloured_noise(40), recipe)
    assert done.best.accuracy == 1.0
    assert done.best.number == min(epoch.number for epoch in done.history if epoch.accuracy == 1.0)
    assert (done.images, done.validated, done.classes) == (30, 10, ("blue", "red"))
    model = cv.load(f"file:{done.path}")
    assert model.labels == ("blue", "red")
    assert (model.preprocess.size, model.preprocess.resize) == ((32, 32), 36)
    new = coloured_noise(40, seed=7)
    pages = [new.read(row, model) for row in range(40)]
    with torch.no_grad():
        guesses = model.logits(torch.stack([page.pixels for page in pages])).argmax(1)
    assert [model.labels[guess] for guess in guesses] == [page.label for page in pages]


def test_weights_may_be_written_as_float16(tmp_path: Path) -> None:
    recipe = dataclasses.replace(SHORT, epochs=1)
    full, half = run(tmp_path / "a", recipe=recipe), run(tmp_path / "b", recipe=recipe, dtype="float16")
    first, second = (cv.load(f"file:{done.path}").module.state_dict() for done in (full, half))
    for name, tensor in first.items():
        assert torch.equal(tensor.half().float(), second[name])
    assert half.path.stat().st_size < 0.6 * full.path.stat().st_size


def test_training_goes_on_from_a_file_with_a_new_head(tmp_path: Path) -> None:
    first = run(tmp_path / "first")
    dataset = as_dataset(
        [Image.new("RGB", (32, 32), name) for name in ("red", "blue", "lime") * 3], NOBODY, labels=["r", "b", "g"] * 3
    )
    recipe = dataclasses.replace(SHORT, epochs=1, rate=1e-9, decay=0.0)
    done = finetune(dataset, f"file:{first.path}", recipe=recipe, out=tmp_path / "second.safetensors")
    before, after = (cv.load(f"file:{path}") for path in (first.path, done.path))
    assert after.labels == ("b", "g", "r")
    key = "blocks.0.attn.qkv.weight"
    assert torch.allclose(before.module.state_dict()[key], after.module.state_dict()[key], atol=1e-6)
    assert after.module.state_dict()["head.weight"].shape[0] == 3
    with pytest.raises(BadInput, match="has its shape already"):
        finetune(dataset, f"file:{first.path}", options={"depth": 1}, out=tmp_path / "third.safetensors")


def test_a_file_that_names_the_same_classes_keeps_its_head(tmp_path: Path) -> None:
    first = run(tmp_path / "first")
    recipe = dataclasses.replace(SHORT, epochs=1, rate=1e-9, decay=0.0)
    done = finetune(coloured_noise(24), f"file:{first.path}", recipe=recipe, out=tmp_path / "second.safetensors")
    before, after = (cv.load(f"file:{path}").module.state_dict()["head.weight"] for path in (first.path, done.path))
    assert torch.allclose(before, after, atol=1e-6)


def test_validation_sees_what_the_finished_model_will_see(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same numbers go in, normalised, and dropout rests."""
    seen: list[tuple[bool, torch.Tensor]] = []

    def watched(*arguments: Any) -> BaseModel:
        start = load_base_model(*arguments)
        start.module.register_forward_pre_hook(lambda module, given: seen.append((module.training, given[0])))
        return start

    monkeypatch.setattr("clairvit.training.finetune.load_base_model", watched)
    rng = np.random.default_rng(3)
    sizes = [(32, 32 + more) for more in range(6)]  # however much is cut off, odd or even
    pictures = [Image.fromarray(rng.integers(0, 255, (*size, 3), dtype=np.uint8)) for size in sizes]
    others = as_dataset(pictures, NOBODY, labels=["red", "blue"] * 3)
    done = run(tmp_path, validation=others, recipe=dataclasses.replace(SHORT, epochs=2))
    assert [training for training, _ in seen] == [True, True, True, False] * 2, "24 images in batches of 8, then 6"
    model = cv.load(f"file:{done.path}")
    expected = torch.stack([others.read(row, model).pixels for row in range(6)])
    assert torch.allclose(seen[-1][1], expected, atol=0.51 / 255 / min(model.preprocess.std))
    shown = torch.cat([given for training, given in seen if training])
    assert -1 <= float(shown.min()) < -0.9 < 0.8 < float(shown.max()) <= 1, "training sees no other scale"


def test_training_stops_when_patience_ends_and_the_rate_falls_in_steps(tmp_path: Path) -> None:
    recipe = TrainingConfig(epochs=40, batch=8, rate=5e-3, gamma=0.5, every=2, patience=3, **PLAIN)
    done = run(tmp_path, recipe=recipe)
    assert done.stopped_early
    assert len(done.history) == done.best.number + 3 < 40
    assert [epoch.rate for epoch in done.history[:4]] == pytest.approx([5e-3, 5e-3, 2.5e-3, 2.5e-3])
    assert run(tmp_path, recipe=recipe).history == done.history
    # what is kept is the best epoch's: as if training had ended there
    until = run(tmp_path / "until", recipe=dataclasses.replace(recipe, epochs=done.best.number))
    assert until.path.read_bytes() == done.path.read_bytes()


def test_validation_images_that_are_given_are_used_and_none_is_held_out(tmp_path: Path) -> None:
    done = run(tmp_path, validation=coloured_noise(6, seed=3), recipe=dataclasses.replace(SHORT, epochs=1))
    assert (done.images, done.validated) == (24, 6)
    green = as_dataset([Image.new("RGB", (32, 32))], NOBODY, labels=["green"])
    with pytest.raises(BadInput, match="class 'green', which is none of the 2"):
        run(tmp_path / "other", validation=green)


def test_an_unreadable_image_costs_only_itself(tmp_path: Path) -> None:
    files = []
    for number in range(12):
        path = tmp_path / f"{number}.png"
        Image.new("RGB", (32, 32), ("red", "blue")[number % 2]).save(path)
        files.append(str(path))
    Path(files[4]).write_bytes(b"no image")
    dataset = as_dataset(files, NOBODY, labels=["red", "blue"] * 6)
    left: list[str] = []
    recipe = dataclasses.replace(SHORT, epochs=1)
    done = run(tmp_path, dataset, recipe, on_error=lambda name, error: left.append(name))
    assert left == [files[4]]
    bare = as_dataset(files[5:], NOBODY, labels=["blue", "red", None, "red", "blue", "red", "blue"])
    errors: list[str] = []
    done_without = run(tmp_path / "bare", bare, recipe, on_error=lambda name, error: errors.append(str(error)))
    assert errors == [f"'{files[7]}' has no class; expected one for each image."]
    assert done_without.images + done_without.validated == 6
    assert done.images + done.validated == 11
    with pytest.raises(BadInput, match="not an image"):
        run(tmp_path / "strict", dataset, recipe)


def test_a_loss_that_explodes_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ClairError, match=r"diverged.*than .*fresh=True"):
        run(tmp_path, recipe=dataclasses.replace(SHORT, rate=1e30, epochs=5))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"out": "model.pt"}, "ends in '.pt'"),
        ({"dtype": "int8"}, "dtype='int8'"),
        ({"options": {"checkpoint_path": "x"}}, "no option that shapes"),
        ({"options": {"embed_dims": 4}}, "Did you mean 'embed_dim'"),
        ({"options": {"depth": "two"}}, "expected int"),
        ({"options": {"window_size": 4}}, "options that this model takes"),
        ({"options": {"embed_dim": 17, "num_heads": 2}}, "options that this model takes"),
        ({"device": "quantum"}, "cannot be used here"),
        ({"recipe": dataclasses.replace(SHORT, resize=16)}, "expected at least 32"),
        ({"dataset": as_dataset([Image.new("RGB", (9, 9))], NOBODY)}, "have no classes"),
        ({"dataset": as_dataset([Image.new("RGB", (9, 9))] * 2, NOBODY, labels=["a", "a"])}, "at least two classes"),
        ({"dataset": as_dataset([Image.new("RGB", (9, 9))] * 2, NOBODY, labels=["a", "b"])}, "single image"),
    ],
)
def test_what_cannot_be_done_is_refused(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        run(tmp_path, **options)


def test_a_place_that_cannot_be_written_to_is_found_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    epochs: list[Epoch] = []
    with pytest.raises(BadInput, match=r"Cannot write '.*model.safetensors' \(.*\); choose a place you may write to"):
        run(tmp_path / "file", on_epoch=epochs.append)
    assert epochs == []
    done = run(tmp_path / "new", recipe=dataclasses.replace(SHORT, epochs=1))
    assert {file.name for file in done.path.parent.iterdir()} == {"model.safetensors", "model.training.safetensors"}


def test_only_timm_models_and_files_are_trained(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"expected 'timm:NAME', 'file:PATH\.safetensors', or a built-in model \(pets"):
        finetune(coloured_noise(24), "torchvision:vit_b_16", out=tmp_path / "x.safetensors")
    with pytest.raises(ModelUnavailable, match="not there"):
        finetune(coloured_noise(24), "file:nothing.safetensors", out=tmp_path / "x.safetensors")


@pytest.mark.parametrize(
    "wrong",
    [
        {"epochs": 0}, {"batch": 0}, {"rate": 0.0}, {"rate": float("nan")}, {"gamma": 1.5}, {"decay": -1.0},
        {"head_rate": 0.0}, {"warmup": -1}, {"clip": 0.0}, {"rotation": 200.0}, {"jitter": 1.0}, {"held_out": 0.0},
        {"patience": 0}, {"every": 0},
    ],
)  # fmt: skip
def test_a_recipe_that_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match=next(iter(wrong))):
        TrainingConfig(**wrong)


# the recipe's pieces --------------------------------------------------------------------------------------------------


def test_focusvits_recipe_is_the_papers_and_other_sizes_keep_their_ratio() -> None:
    recipe = named_recipe("focusvit").resolved(pretrained=True, new_head=True)
    assert (recipe.rate, recipe.head_rate, recipe.warmup, recipe.clip) == (1e-4, 1e-4, 0, None)
    assert (recipe.gamma, recipe.every, recipe.batch, recipe.patience) == (0.7, 10, 32, 5)
    assert recipe.rotation == 15
    assert recipe.flip
    assert recipe.cover((224, 224)) == (256, 256)
    assert recipe.cover((96, 192)) == (108, 220)
    assert TrainingConfig(resize=96).cover((96, 192)) == (96, 192)
    with pytest.raises(UnknownName, match=r"no recipe 'focus'.*default, focusvit"):
        named_recipe("focus")


def test_the_default_rates_suit_what_is_trained() -> None:
    settled = [
        TrainingConfig().resolved(pretrained, new) for pretrained, new in ((True, True), (True, False), (False, True))
    ]
    assert [(rates.rate, rates.head_rate) for rates in settled] == [(1e-5, 1e-3), (1e-5, 1e-5), (1e-4, 1e-4)]
    given = TrainingConfig(rate=1e-3, head_rate=2e-3).resolved(pretrained=True, new_head=True)
    assert (given.rate, given.head_rate) == (1e-3, 2e-3)
    assert TrainingConfig(rate=5e-2).resolved(pretrained=True, new_head=True).head_rate == 5e-2, "never below the rate"


def test_the_rate_rises_and_then_falls_in_steps() -> None:
    """4 steps an epoch, one epoch of warm-up: 1/5 … 4/5, then 1; half from epoch 2 on, a quarter from epoch 4 on."""
    recipe = TrainingConfig(warmup=1, gamma=0.5, every=2)
    factors = [recipe.factor(step, 4) for step in range(20)]
    assert factors == pytest.approx([0.2, 0.4, 0.6, 0.8, *[1] * 4, *[0.5] * 8, *[0.25] * 4])
    assert [TrainingConfig(warmup=0).factor(step, 1) for step in (0, 9, 10, 20)] == pytest.approx([1, 1, 0.7, 0.49])


def test_training_uses_the_schedule_and_a_rate_of_its_own_for_a_new_head(tmp_path: Path) -> None:
    """The optimiser's own record, step by step; 24 images, 20 trained on, 8 a step: 3 steps an epoch."""
    first = run(tmp_path / "first", recipe=dataclasses.replace(SHORT, epochs=1))
    dataset = as_dataset(
        [Image.new("RGB", (32, 32), name) for name in ("red", "blue", "lime") * 8], NOBODY, labels=["r", "b", "g"] * 8
    )
    seen: list[list[float]] = []
    step = torch.optim.AdamW.step

    def watched(optimiser: torch.optim.AdamW, *given: Any) -> Any:
        seen.append([group["lr"] for group in optimiser.param_groups])
        return step(optimiser, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", watched)
        done = finetune(
            dataset, f"file:{first.path}", recipe=TrainingConfig(epochs=2, batch=8), out=tmp_path / "second.safetensors"
        )
    factors = [TrainingConfig().factor(step, 3) for step in range(6)]
    assert [rates[0] for rates in seen] == pytest.approx([1e-5 * factor for factor in factors])
    assert [rates[1] for rates in seen] == pytest.approx([1e-3 * factor for factor in factors])
    assert [epoch.rate for epoch in done.history] == pytest.approx([7.5e-6, 1e-5]), "of the last step"


def test_the_default_keeps_a_trained_backbone_where_one_high_rate_undoes_it(tmp_path: Path) -> None:
    """Closed form: AdamW's first step moves a weight by its rate, whatever the gradient, so two steps of the old
    recipe move all weights by 2 × rate, those of the default the backbone's by at most 1.5 × a hundredth of it."""
    first = run(tmp_path / "first", recipe=dataclasses.replace(SHORT, epochs=1))
    moved = {}
    for name in ("default", "focusvit"):
        rate = {"rate": 1e-2, "head_rate": 1e-2} if name == "focusvit" else {"rate": 1e-4, "head_rate": 1e-2}
        recipe = dataclasses.replace(named_recipe(name), epochs=2, batch=32, decay=0.0, **rate)
        out = tmp_path / f"{name}.safetensors"
        done = finetune(coloured_noise(24), f"file:{first.path}", recipe=recipe, out=out, classes=("blue", "red"))
        before, after = (cv.load(f"file:{path}").module.state_dict() for path in (first.path, done.path))
        blocks = [key for key in before if key.startswith("blocks.")]
        moved[name] = max(float((before[key] - after[key]).abs().max()) for key in blocks)
    assert moved["default"] <= 1.5e-4 * 1.01
    assert moved["focusvit"] >= 9e-3


def test_gradients_are_clipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    norms: list[float] = []
    step = torch.optim.AdamW.step

    def watched(optimiser: torch.optim.AdamW, *given: Any) -> Any:
        gradients = [p.grad for group in optimiser.param_groups for p in group["params"] if p.grad is not None]
        norms.append(float(torch.linalg.vector_norm(torch.stack([gradient.norm() for gradient in gradients]))))
        return step(optimiser, *given)

    monkeypatch.setattr(torch.optim.AdamW, "step", watched)
    run(tmp_path, recipe=dataclasses.replace(SHORT, epochs=1, clip=1e-3))
    assert norms
    assert max(norms) <= 1e-3 * (1 + 1e-5)


def test_the_training_state_can_be_removed_when_training_is_complete(tmp_path: Path) -> None:
    done = run(tmp_path, keep_state=False)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    assert done.path.exists()


def pictures(count: int = 4, side: int = 20) -> torch.Tensor:
    return torch.randint(0, 256, (count, 3, side, side), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


def still(**more: Any) -> TrainingConfig:
    return TrainingConfig(**{"rotation": 0.0, "jitter": 0.0, "flip": False, **more})


def test_a_crop_is_a_copy_of_a_part_and_every_part_has_its_turn() -> None:
    whole = pictures(1)
    corners = {
        (down, right): whole[0, :, down : down + 16, right : right + 16]
        for down, right in itertools.product(range(5), range(5))
    }
    met = set()
    for number in range(300):
        cut = (augment(whole, (16, 16), still(), draw_augmentations(1, number, 1))[0] * 255).round().to(torch.uint8)
        (where,) = [place for place, part in corners.items() if torch.equal(part, cut)]
        met.add(where)
    assert met == set(corners)


def assert_same_picture(actual: torch.Tensor, expected: torch.Tensor, label: str = "") -> None:
    """In float32, as pictures are: a place of up to 40 pixels is off by four roundings, and neighbours differ by 1."""
    assert_same(actual, expected, magnitude=1.0, growth=growth(4, 40), label=label)


def test_flips_mirror_and_turns_turn() -> None:
    whole = pictures(2, 16)
    lots = torch.full((2, 7), 0.5)
    lots[0, 2], lots[1, 2] = 0.1, 0.9
    augmented = augment(whole, (16, 16), still(flip=True), lots)
    assert_same_picture(augmented[0], whole[0].flip(-1) / 255)
    assert_same_picture(augmented[1], whole[1] / 255)
    lots[0, 3], lots[1, 3] = 0.0, 1.0
    augmented = augment(whole, (16, 16), still(rotation=90.0), lots)
    assert_same_picture(augmented[0], whole[0].rot90(-1, (1, 2)) / 255)
    assert_same_picture(augmented[1], whole[1].rot90(1, (1, 2)) / 255)
    wide = pictures(1, 32)[..., 6:26, :]  # 20 × 32 pixels
    lots = torch.full((1, 7), 0.5)
    lots[0, 3] = 1.0
    middle = wide[0, :, 2:18, 8:24]
    augmented = augment(wide, (16, 16), still(rotation=90.0), lots)
    assert_same_picture(augmented[0], middle.rot90(1, (1, 2)) / 255, "nothing is stretched")
    whole = pictures(1, 40)
    augmented = augment(whole, (12, 20), still(rotation=90.0), lots)
    assert_same_picture(augmented[0], whole[0, :, 10:30, 14:26].rot90(1, (1, 2)) / 255, "nor in wide crops")


def test_jitter_changes_brightness_contrast_and_saturation_and_nothing_where_it_is_even() -> None:
    whole = pictures(3, 16) // 2 + 40
    even = torch.full((3, 7), 0.5)
    assert_same_picture(augment(whole, (16, 16), still(jitter=0.4), even), whole / 255)
    one_each = even.clone()
    one_each[range(3), [4, 5, 6]] = 1.0
    bright, contrast, colourful = augment(whole, (16, 16), still(jitter=0.4), one_each)
    assert_same_picture(bright, (whole[0] / 255 * 1.4).clamp(0, 1))
    assert float(contrast.std()) > 1.2 * float((whole[1] / 255).std())
    assert float(colourful.std(0).mean()) > 1.2 * float((whole[2] / 255).std(0).mean())


def test_the_middle_is_what_validation_sees() -> None:
    whole = pictures(2)
    assert torch.equal(center_crop(whole, (16, 16)), whole[..., 2:18, 2:18] / 255)


def test_every_epoch_has_its_own_order_and_lots() -> None:
    assert sorted(epoch_order(10, 0, 1).tolist()) == list(range(10))
    orders = {tuple(epoch_order(10, seed, epoch).tolist()) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9
    assert torch.equal(draw_augmentations(4, 0, 1), draw_augmentations(4, 0, 1))
    assert not torch.equal(draw_augmentations(4, 0, 1), draw_augmentations(4, 0, 2))


def test_a_share_of_each_class_is_held_out() -> None:
    numbers = torch.tensor([0] * 20 + [1] * 5 + [2])
    rows, held = stratified_split(numbers, 0.2, 0)
    assert sorted([*rows.tolist(), *held.tolist()]) == list(range(26))
    assert numbers[held].bincount(minlength=3).tolist() == [4, 1, 0]
    assert torch.equal(stratified_split(numbers, 0.2, 0)[1], held)
    assert not torch.equal(stratified_split(numbers, 0.2, 1)[1], held)


def test_classes_are_in_the_order_of_names_or_numbers() -> None:
    assert class_names(["b", "a", "b"]) == ("a", "b")
    assert class_names([10, 2]) == tuple(map(str, range(11)))
    assert class_indices([2, 0], class_names([2, 0])).tolist() == [2, 0]
    assert class_indices([1, "a", 0], ("a", "b")).tolist() == [1, 0, 0]
    with pytest.raises(BadInput, match="class '2'"):
        class_indices([2], ("a", "b"))


def test_large_sets_are_kept_on_disk_and_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = cache_images(coloured_noise(24), (37, 37), "bicubic")
    monkeypatch.setattr("clairvit.training.image_cache.IN_MEMORY", 1000)
    large = cache_images(coloured_noise(24), (37, 37), "bicubic")
    assert isinstance(large.bytes, np.memmap)
    assert np.array_equal(large.bytes, usual.bytes)
    assert large.content_hash == usual.content_hash
    assert large.batch(torch.tensor([3, 1])).shape == (2, 3, 37, 37)


def test_the_best_epoch_is_the_first_of_the_most_accurate() -> None:
    history = tuple(Epoch(number + 1, 1.0, 0.5, accuracy, 1e-3) for number, accuracy in enumerate((0.5, 0.9, 0.9, 0.7)))
    progress = Progress({}, history)
    assert progress.best.number == 2
    assert progress.should_stop(2)
    assert not progress.should_stop(3)
    assert not Progress({}).should_stop(1)


# built-in models ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["pets", "scenes", "parts"])
def test_a_built_in_model_is_a_start(name: str) -> None:
    """What an unreachable hub advises ("use the built-in model 'pets'") works for fine-tuning too."""
    start, source = load_base_model(ModelRequest(name), ("red", "blue"), seed=0), cv.load(name)
    assert start.preprocess == source.preprocess
    assert start.module.num_classes == 2
    original = source.module.state_dict()
    for key, value in start.module.state_dict().items():
        if not key.startswith("head."):
            assert torch.equal(value, original[key]), key


def test_the_same_classes_keep_their_head() -> None:
    source = cv.load("scenes")
    start = load_base_model(ModelRequest("scenes"), source.labels, seed=0)
    assert torch.equal(start.module.head.weight, source.module.head.weight)


def test_a_built_in_model_has_its_shape() -> None:
    with pytest.raises(BadInput, match="'pets' has its shape already"):
        load_base_model(ModelRequest("pets", options={"depth": 3}), ("red", "blue"), seed=0)
