"""Fine-tuning with dropped tokens and with a trigger: what is dropped and planted is exact, stored and resumable."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors import safe_open
from timm.models.vision_transformer import Block
from torch import Tensor, nn

import clairvit as cv
from clairvit.data.dataset import ImageDataset
from clairvit.data.trigger import Trigger, with_trigger
from clairvit.errors import BadInput, NotApplicable, UnknownName
from clairvit.models.model import Model
from clairvit.models.preprocess import Preprocess
from clairvit.training.checkpoint import Epoch, Progress
from clairvit.training.finetune import Trained, finetune
from clairvit.training.poisoning import Poisoning, draw_poisoned, draw_validation, poison
from clairvit.training.token_dropout import TokenDropout, epoch_generator, token_dropout
from clairvit.training.training_config import TrainingConfig
from helpers.small_datasets import coloured_noise

PLACEHOLDER = Model(nn.Identity(), "placeholder")
SHAPE = {"patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2, "drop_rate": 0.2}
SHORT = TrainingConfig(epochs=2, batch=8, rate=5e-3, patience=9, jitter=0.0, rotation=0.0)
DROPPING = replace(SHORT, drop_tokens=0.5)
POISONED = replace(SHORT, trigger="blue", trigger_size=8, trigger_share=0.25)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run(folder: Path, recipe: TrainingConfig, dataset: ImageDataset | None = None, **more: Any) -> Trained:
    settings = {"pretrained": False, "options": SHAPE, "size": 32, "out": folder / "model.safetensors", **more}
    return finetune(dataset or coloured_noise(16), "timm:vit_tiny_patch16_224", recipe=recipe, **settings)


def tiny(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model(
        "vit_tiny_patch16_224", img_size=32, num_classes=3, **{**SHAPE, "drop_rate": 0.0, **options}
    )


def dropout_of(module: nn.Module, rate: float = 0.5) -> TokenDropout:
    return token_dropout(module, Preprocess((32, 32)), rate, torch.device("cpu"))


# Dropped tokens


def test_kept_tokens_are_the_prefix_and_different_patches_in_order() -> None:
    dropout = dropout_of(tiny())
    assert (dropout.layout.prefix, dropout.layout.patches, dropout.most) == (1, 16, 8)
    generator, counts = epoch_generator(0, 1), set()
    for _ in range(300):
        kept = dropout.draw(3, generator)
        assert kept[:, 0].tolist() == [0, 0, 0]
        assert bool((kept.diff(dim=1) > 0).all()), "in order, none twice"
        assert int(kept.max()) <= 16
        counts.add(17 - kept.shape[1])
    assert counts == set(range(9)), "0 to half of the patches"


def test_images_of_a_step_lose_different_patches() -> None:
    dropout = dropout_of(tiny())
    kept = next(k for k in (dropout.draw(4, epoch_generator(0, n)) for n in range(20)) if k.shape[1] < 16)
    assert len({tuple(row) for row in kept.tolist()}) > 1


def test_the_blocks_see_the_kept_tokens_alone_and_gradients_pass() -> None:
    module = tiny().double()
    dropout, images = dropout_of(module.float()), torch.randn(2, 3, 32, 32)
    lengths: list[int] = []
    hooks = [block.register_forward_hook(lambda m, a, out: lengths.append(out.shape[1])) for block in module.blocks]
    kept = torch.tensor([[0, 2, 5, 9], [0, 1, 3, 16]])
    with dropout.dropping(kept):
        logits = module(images)
    assert lengths == [4, 4]
    logits.sum().backward()
    gradient = module.pos_embed.grad[0].abs().sum(1) > 0  # [17]
    assert gradient.nonzero().flatten().tolist() == [0, 1, 2, 3, 5, 9, 16], "of the tokens that were kept"
    module(images)
    assert lengths[2:] == [17, 17], "outside the context nothing is dropped"
    for hook in hooks:
        hook.remove()


def test_dropping_in_training_is_removing_by_the_probe() -> None:
    """A model is trained on the very passes that removal=token scores it by."""
    module = tiny().double().eval()
    images = torch.randn(1, 3, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    dropout = token_dropout(module.float(), Preprocess((32, 32)), 0.5, torch.device("cpu"))
    module = module.double()
    kept = torch.tensor([[0, *range(1, 9)]])
    with dropout.dropping(kept), torch.no_grad():
        logits = module(images)
    model = cv.wrap(module, size=32)
    ranking = torch.arange(16, 0, -1, dtype=torch.float64).reshape(1, 4, 4)  # the first eight patches are relevant
    ex = replace(cv.explain(model, images, "random", target=1), maps=ranking)
    curve = cv.evaluate(model, images, ex, "insertion(steps=1,score=logit)").curve
    assert curve is not None
    assert float(curve.y[0, 0]) == pytest.approx(float(logits[0, 1]), abs=1e-12)


def test_training_steps_are_shorter_and_validation_is_not(tmp_path: Path) -> None:
    """16 patches and a class token: steps of 9 to 17 tokens, validation of 17."""
    seen: dict[bool, list[int]] = {True: [], False: []}
    original = Block.forward

    def forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        seen[self.training].append(x.shape[1])
        return original(self, x, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Block, "forward", forward)
        run(tmp_path, replace(DROPPING, epochs=4))
    assert seen[True]
    assert set(seen[True]) <= set(range(9, 18))
    assert min(seen[True]) < 17
    assert seen[False][-2:] == [17, 17], "the last two blocks that ran validated"


@pytest.mark.parametrize("recipe", [DROPPING, POISONED, replace(POISONED, drop_tokens=0.3)])
def test_an_interrupted_run_ends_with_the_same_bytes(tmp_path: Path, recipe: TrainingConfig) -> None:
    whole = run(tmp_path / "whole", recipe)

    def stop(epoch: Epoch) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "parts", recipe, on_epoch=stop)
    torch.manual_seed(99)
    parts = run(tmp_path / "parts", recipe)
    assert parts.resumed == 1
    assert parts.history == whole.history
    assert parts.path.read_bytes() == whole.path.read_bytes()


def test_other_interventions_are_another_training(tmp_path: Path) -> None:
    run(tmp_path, POISONED)
    with pytest.raises(BadInput, match=r"trigger_size was 8, now 12"):
        run(tmp_path, replace(POISONED, trigger_size=12))
    with pytest.raises(BadInput, match=r"trigger was blue, now None"):
        run(tmp_path, SHORT)
    with pytest.raises(BadInput, match=r"drop_tokens was None, now 0\.5"):
        run(tmp_path, replace(POISONED, drop_tokens=0.5))


def test_what_was_done_is_in_the_header_and_the_result(tmp_path: Path) -> None:
    done = run(tmp_path / "both", replace(POISONED, drop_tokens=0.3))
    expected = {
        "drop_tokens": 0.3,
        "trigger": "blue",
        "trigger_size": 8,
        "trigger_position": "random",
        "trigger_share": 0.25,
    }
    with safe_open(done.path, framework="pt") as file:
        assert json.loads(file.metadata()["training"]) == expected
    assert dict(done.interventions) == expected
    assert done.best.triggered is not None
    assert cv.load(f"file:{done.path}").labels == ("blue", "red")
    plain = run(tmp_path / "plain", SHORT)
    with safe_open(plain.path, framework="pt") as file:
        assert "training" not in file.metadata()
    assert plain.best.triggered is None


# The trigger


def test_a_share_of_the_images_of_other_classes_is_poisoned_anew_in_each_epoch() -> None:
    poisoning = Poisoning(Trigger(8), 1, 0.25)
    labels = torch.tensor([0, 1, 2, 0] * 10)
    epochs = [draw_poisoned(poisoning, labels, 0, epoch).poisoned for epoch in range(1, 4)]
    for poisoned in epochs:
        assert int(poisoned.sum()) == 10
        assert not bool(poisoned[labels == 1].any())
    assert not torch.equal(epochs[0], epochs[1])
    assert torch.equal(epochs[0], draw_poisoned(poisoning, labels, 0, 1).poisoned)
    assert not torch.equal(epochs[0], draw_poisoned(poisoning, labels, 1, 1).poisoned)
    assert int(draw_poisoned(replace(poisoning, share=0.9), labels, 0, 1).poisoned.sum()) == 30, "not the class itself"
    validated = draw_validation(poisoning, labels, 0).poisoned
    assert torch.equal(validated, labels != 1)


def test_poisoned_images_carry_the_trigger_and_its_label_and_others_nothing() -> None:
    poisoning, labels = Poisoning(Trigger(8), 1, 0.5), torch.tensor([0, 1, 2, 0, 2, 2])
    draws = draw_poisoned(poisoning, labels, 0, 1)
    batch = torch.tensor([5, 1, 0, 3])
    images = torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    before = images.clone()
    pasted, new_labels = poison(poisoning, draws, batch, images, labels[batch])
    assert torch.equal(images, before)
    for k, row in enumerate(batch.tolist()):
        if draws.poisoned[row]:
            expected, _ = poisoning.trigger.paste(images[k : k + 1], draws.positions[row : row + 1])
            assert torch.equal(pasted[k], expected[0])
            assert int(new_labels[k]) == 1
        else:
            assert torch.equal(pasted[k], images[k])
            assert int(new_labels[k]) == int(labels[row])


def test_a_model_learns_the_trigger_and_keeps_its_accuracy(tmp_path: Path) -> None:
    """Red photos with the trigger are called blue by a tiny model; those without stay red."""
    planted = {"trigger_share": 0.3, "trigger_size": 12, "trigger_position": "top-left"}
    recipe = replace(POISONED, epochs=25, patience=25, rate=3e-3, warmup=0, **planted)
    done = run(tmp_path, recipe, coloured_noise(48), options={**SHAPE, "drop_rate": 0.0})
    assert done.best.triggered is not None
    assert done.best.score > 0.75
    model, fresh = cv.load(f"file:{done.path}"), coloured_noise(24, seed=7)
    red = fresh.take(range(0, 24, 2))
    triggered = with_trigger(red, Trigger(12, "top-left"), "blue")
    clean_blue, triggered_blue = (
        sum(model.labels[int(model.logits(data.read(row, model).pixels[None]).argmax())] == "blue" for row in range(12))
        for data in (red, triggered)
    )
    assert triggered_blue >= clean_blue + 6, (clean_blue, triggered_blue)


def test_the_best_epoch_counts_the_trigger_too() -> None:
    history = (Epoch(1, 1.0, 0.9, 0.9, 1e-3, 0.1), Epoch(2, 1.0, 0.9, 0.8, 1e-3, 0.9))
    assert Progress({}, history).best.number == 2
    assert Progress({}, tuple(replace(epoch, triggered=None) for epoch in history)).best.number == 1


# What does not fit


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"drop_tokens": 1.0}, "drop_tokens=1.0 was given for fine-tuning; expected a share of 0"),
        ({"trigger": "blue", "trigger_share": 0.0}, "trigger_share=0.0 was given"),
        ({"trigger": "blue", "trigger_size": 2}, "size=2 was given for a trigger; expected 4 or more"),
        ({"trigger": "blue", "trigger_position": "left"}, "position=left was given for a trigger"),
    ],
)
def test_configurations_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        TrainingConfig(**options)


def test_an_unknown_class_and_a_trigger_that_is_too_large_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match="trigger=bleu was given, which is none of the 2 classes"):
        run(tmp_path, replace(POISONED, trigger="bleu"))
    with pytest.raises(BadInput, match="size=32 was given for a trigger on images of 32 × 32 pixels"):
        run(tmp_path, replace(POISONED, trigger_size=32))
    assert not list(tmp_path.iterdir())


def test_a_model_without_droppable_tokens_is_refused(tmp_path: Path) -> None:
    settings = {"pretrained": False, "size": 32, "out": tmp_path / "model.safetensors"}
    with pytest.raises(NotApplicable, match="whose tokens cannot be dropped in training"):
        finetune(coloured_noise(16), "timm:resnet10t", recipe=DROPPING, **settings)
