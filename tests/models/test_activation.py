"""What a model's scores mean: inferred from the module, given, and rejected where it cannot be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from timm.loss import AsymmetricLossMultiLabel, BinaryCrossEntropy
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, normalize

import clairvit as cv
from clairvit.data.hashing import weights_hash
from clairvit.errors import BadInput
from clairvit.models.activation import log_probabilities, probabilities
from clairvit.targets.base import score_values
from clairvit.targets.resolve import top
from helpers.rounding import assert_same
from helpers.targets import resolve_targets

SMALL_VIT = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "image_size": 32,
    "patch_size": 8,
}


def classifier(columns: int, *last: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, columns), *last)


class Trained(nn.Module):
    """A module that keeps its loss, as training classes do."""

    def __init__(self, columns: int, loss: Any) -> None:
        super().__init__()
        self.net = classifier(columns)
        self.loss = loss

    def forward(self, pixels: Tensor) -> Tensor:
        scores: Tensor = self.net(pixels)
        return scores


# what a module states ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "activation"),
    [
        (classifier(3), "softmax"),
        (classifier(1), "raw"),
        (classifier(3, nn.Sigmoid()), "raw"),
        (classifier(3, nn.Softmax(-1), nn.Identity()), "raw"),
        (classifier(3, nn.LogSoftmax(-1)), "softmax"),
        (Trained(3, nn.BCEWithLogitsLoss()), "sigmoid"),
        (Trained(1, nn.BCEWithLogitsLoss()), "sigmoid"),
        (Trained(3, nn.MultiLabelSoftMarginLoss()), "sigmoid"),
        (Trained(3, binary_cross_entropy_with_logits), "sigmoid"),
        (Trained(3, AsymmetricLossMultiLabel()), "sigmoid"),
        (Trained(3, BinaryCrossEntropy()), "sigmoid"),
        (Trained(3, nn.CrossEntropyLoss()), "softmax"),
        (Trained(3, nn.MSELoss()), "raw"),
        (Trained(3, nn.BCELoss()), "raw"),
        (Trained(3, nn.ModuleList([nn.BCEWithLogitsLoss(), nn.CrossEntropyLoss()])), "softmax"),  # they disagree
        (timm.create_model("vit_tiny_patch16_224", num_classes=1, img_size=32, depth=1), "raw"),
        (timm.create_model("vit_tiny_patch16_224", num_classes=0, img_size=32, depth=1), "raw"),
        (timm.create_model("vit_tiny_patch16_224", num_classes=4, img_size=32, depth=1), "softmax"),
    ],
)
def test_the_activation_is_inferred_from_the_module(module: nn.Module, activation: str) -> None:
    model = cv.wrap(module, size=8)
    assert model.activation == activation
    assert model.activation_reason


def test_a_head_that_was_replaced_counts_and_not_what_the_module_says_of_the_old_one() -> None:
    module: Any = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1)
    module.head = nn.Linear(192, 1)
    assert module.num_classes == 1000
    assert cv.wrap(module).activation == "raw"


def test_outputs_that_are_activated_already_are_taken_as_they_are_and_a_note_says_so() -> None:
    model = cv.wrap(classifier(3, nn.Sigmoid()), size=8, layout=cv.Layout((2, 2), 0, "avg"))
    assert model.activated
    assert model.activation_reason == "the module ends in nn.Sigmoid, so its outputs are taken as they are"
    logits = model.logits(torch.rand(2, 3, 8, 8))
    assert model.probabilities(logits) is None


@pytest.mark.parametrize(
    ("columns", "problem", "activation"),
    [
        (3, None, "softmax"),
        (1, None, "raw"),
        (3, "single_label_classification", "softmax"),
        (3, "multi_label_classification", "sigmoid"),
        (1, "multi_label_classification", "sigmoid"),
        (2, "regression", "raw"),
    ],
)
def test_transformers_states_the_problem(columns: int, problem: str | None, activation: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(**SMALL_VIT, num_labels=columns, problem_type=problem)
    module = transformers.ViTForImageClassification(config).eval()
    assert cv.wrap(module).activation == activation
    module.save_pretrained(tmp_path)
    transformers.ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(tmp_path)
    assert cv.load(f"hf:{tmp_path}").activation == activation


# what is given ----------------------------------------------------------------------------------------------------


def test_a_given_activation_overrides_the_stated_one() -> None:
    for activation in ("softmax", "sigmoid", "raw"):
        model = cv.wrap(Trained(3, nn.BCEWithLogitsLoss()), size=8, activation=activation)
        assert (model.activation, model.activation_reason) == (activation, "it was given")
    assert cv.wrap(classifier(1), size=8, activation="sigmoid").activation == "sigmoid"
    assert not cv.wrap(classifier(3, nn.Softmax(-1)), size=8, activation="raw").activated
    assert cv.load("pets", activation="sigmoid").activation == "sigmoid"
    assert cv.load("pets").activation == "softmax"


@pytest.mark.parametrize(
    "load", [lambda a: cv.load("pets", activation=a), lambda a: cv.wrap(classifier(3), activation=a)]
)
def test_an_unknown_activation_raises(load: Any) -> None:
    with pytest.raises(BadInput, match=r"activation='sigmod' was given; expected softmax .* Did you mean 'sigmoid'\?"):
        load("sigmod")
    with pytest.raises(BadInput, match="activation=3 was given"):
        load(3)


def test_a_softmax_over_a_single_output_raises() -> None:
    with pytest.raises(BadInput, match="single output, whose softmax is 1 for any image; expected 'sigmoid'"):
        cv.wrap(classifier(1), size=8, activation="softmax")


def test_an_embedding_has_no_probabilities() -> None:
    backbone = timm.create_model("vit_tiny_patch16_224", num_classes=0, img_size=32, depth=1)
    with pytest.raises(BadInput, match="which returns an embedding; expected 'raw'"):
        cv.wrap(backbone, activation="sigmoid")
    model = cv.wrap(backbone, activation="raw")
    assert model.probabilities(torch.rand(1, 192)) is None
    assert cv.Model(backbone, "by hand", classifier=False).activation == "raw"


def test_a_single_column_is_raw_even_if_the_module_does_not_state_it() -> None:
    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(12))

        def forward(self, pixels: Tensor) -> Tensor:
            return (pixels.flatten(1) @ self.weight)[:, None]

    model = cv.wrap(Hidden(), size=2, layout=cv.Layout((2, 2), 0, "avg"))
    logits = model.logits(torch.rand(2, 3, 2, 2))
    assert model.activation_of(logits) == "raw"
    assert model.probabilities(logits) is None


# probabilities ----------------------------------------------------------------------------------------------------


def test_probabilities_by_hand() -> None:
    logits = torch.tensor([[1.0, -2.0, 0.5], [700.0, 0.0, -700.0]], dtype=torch.float64)
    soft = logits.exp() / logits.exp().sum(-1, keepdim=True)
    assert_same(probabilities(logits, "softmax"), soft)
    assert_same(probabilities(logits, "sigmoid"), 1 / (1 + (-logits).exp()))
    assert probabilities(logits, "raw") is None
    assert log_probabilities(logits, "raw") is None
    logarithm = log_probabilities(logits, "sigmoid")
    assert logarithm is not None
    assert float(logarithm[1, 2]) == -700, "the logarithm of a probability that is 0 in floating point"
    assert_same(logarithm[0], (1 / (1 + (-logits[0]).exp())).log())


def test_half_precision_is_widened() -> None:
    for activation in ("softmax", "sigmoid"):
        chances = probabilities(torch.tensor([[0.0, 12.0]], dtype=torch.float16), activation)  # type: ignore[arg-type]
        assert chances is not None
        assert chances.dtype == torch.float32


@pytest.mark.parametrize("activation", ["softmax", "sigmoid", "raw"])
def test_kinds_of_scores(activation: Any) -> None:
    logits = torch.tensor([[1.0, -2.0, 0.5]], dtype=torch.float64, requires_grad=True)
    assert_same(score_values(logits, "logit", activation), logits)
    if activation == "raw":
        for score in ("prob", "logprob", "neg_loss", "loss"):
            with pytest.raises(
                BadInput, match=f"score '{score}' is made of a probability, and this model's scores are"
            ):
                resolve_targets(1, logits, score=score, activation=activation)
        (target,) = resolve_targets(1, logits, activation=activation)
        assert target.with_preferred_score("prob").score == "logit"
        assert_same(target.with_preferred_score("logprob")(logits), logits[:, 1])
        return
    p = torch.softmax(logits, -1) if activation == "softmax" else torch.sigmoid(logits)
    for score, expected in (("prob", p), ("logprob", p.log()), ("neg_loss", p.log()), ("loss", -p.log())):
        (target,) = resolve_targets(1, logits, score=score, activation=activation)
        assert_same(target(logits), expected[:, 1])
    (free,) = resolve_targets(1, logits, activation=activation)
    assert_same(free.with_preferred_score("prob").take([0, 0])(logits.repeat(2, 1)), p[:, 1].repeat(2))


def test_the_highest_classes() -> None:
    logits = torch.tensor([[3.0, 2.0, -1.0]], dtype=torch.float64)
    names = ["cat", "dog", "newt"]
    independent = top(logits, names, 2, activation="sigmoid")[0]
    assert [name for name, _ in independent] == ["cat", "dog"]
    assert_same([p for _, p in independent], torch.tensor([3.0, 2.0], dtype=torch.float64).sigmoid())
    assert top(logits, names, 2, activation="raw")[0] == [("cat", 3.0), ("dog", 2.0)]
    assert top(torch.tensor([[37.0]]), ["age"])[0] == [("age", 37.0)]


# zero-shot --------------------------------------------------------------------------------------------------------


@pytest.fixture
def tiny_open_clip(monkeypatch: pytest.MonkeyPatch) -> None:
    open_clip = pytest.importorskip("open_clip")
    small: dict[str, Any] = {
        "embed_dim": 32,
        "vision_cfg": {"image_size": 32, "layers": 2, "width": 64, "patch_size": 8},
        "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2},
    }
    monkeypatch.setitem(open_clip.factory._MODEL_CONFIGS, "tiny", small)
    siglip = {**small, "init_logit_bias": -10, "custom_text": True}
    monkeypatch.setitem(open_clip.factory._MODEL_CONFIGS, "tiny-with-bias", siglip)


def cosines(model: cv.Model, pixels: Tensor) -> Tensor:
    module: Any = model.module
    with torch.no_grad():
        return normalize(module.tower(pixels).double(), dim=-1) @ module.text.double().T


def test_prompts_are_compared_and_a_single_one_is_a_cosine(tiny_open_clip: None) -> None:
    pixels = torch.rand(2, 3, 32, 32, dtype=torch.float64)
    two = cv.load("open_clip:tiny", pretrained=False, labels=["a cat", "a dog"], dtype="float64")
    assert two.activation == "softmax"
    one_label = cv.load("open_clip:tiny", pretrained=False, labels=["a cat"], dtype="float64")
    assert one_label.activation == "raw"
    with torch.no_grad():
        # the text tower runs in float32, here with one prompt and there with two, before everything is cast
        assert_same(one_label.logits(pixels), cosines(two, pixels)[:, :1], dtype=torch.float32)
        chances = two.probabilities(two.logits(pixels))
    assert one_label.probabilities(one_label.logits(pixels)) is None
    assert_same(chances, (two.module.scale * cosines(two, pixels)).softmax(-1))  # type: ignore[operator]
    with pytest.raises(BadInput, match="single output"):
        cv.load("open_clip:tiny", pretrained=False, labels=["a cat"], activation="softmax")


def test_raw_prompts_are_cosines(tiny_open_clip: None) -> None:
    pixels = torch.rand(2, 3, 32, 32, dtype=torch.float64)
    model = cv.load("open_clip:tiny", pretrained=False, labels=["a cat", "a dog"], dtype="float64", activation="raw")
    with torch.no_grad():
        assert_same(model.logits(pixels), cosines(model, pixels))


@pytest.mark.parametrize("prompts", [["a cat"], ["a cat", "a dog"]])
def test_siglip_gives_every_prompt_a_probability_of_its_own(prompts: list[str], tiny_open_clip: None) -> None:
    pixels = torch.rand(2, 3, 32, 32, dtype=torch.float64)
    model = cv.load("open_clip:tiny-with-bias", pretrained=False, labels=prompts, dtype="float64")
    assert model.activation == "sigmoid"
    with torch.no_grad():
        chances = model.probabilities(model.logits(pixels))
    module: Any = model.module
    assert float(module.bias) == -10
    assert_same(chances, (module.scale * cosines(model, pixels) - 10).sigmoid())


# identity ---------------------------------------------------------------------------------------------------------


def test_the_activation_is_part_of_the_model_hash() -> None:
    module = classifier(3)
    hashes = {weights_hash(cv.wrap(module, size=8, activation=a)) for a in ("softmax", "sigmoid", "raw", None)}
    assert len(hashes) == 3
