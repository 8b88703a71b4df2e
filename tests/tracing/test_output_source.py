"""An embedding is not taken for class scores: recognised by what the last operations of the forward are, or noted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import timm
import torch
import torch.nn.functional as F
import torchvision
import transformers as hf
from torch import Tensor, nn

import clairvit as cv
from clairvit.errors import BadInput
from helpers.custom_vits import CLASSES, WIDTH, Block, FusedAttention, HomeMade
from helpers.tiny_models import ZOO, build

PIXELS = torch.randn(1, 3, 32, 32)
TIMM = {"img_size": 32, "patch_size": 8, "depth": 2, "embed_dim": 24, "num_heads": 3}
HF = {
    "image_size": 32,
    "patch_size": 8,
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 40,
}


def home(head: nn.Module | None = None) -> HomeMade:
    module = HomeMade(lambda: Block(FusedAttention))
    module.head = nn.Identity() if head is None else head
    return module


class Through(nn.Module):
    """A user's own module around another one, with something done to its output."""

    def __init__(self, inner: nn.Module, then: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.inner, self.then = inner, then

    def forward(self, image: Tensor) -> Tensor:
        output = self.inner(image)
        return output if self.then is None else self.then(output)


class Projected(nn.Module):
    """A ViT and a projection, as a layer of some name or as a bare parameter (CLIP)."""

    def __init__(self, name: str, bare: bool = False, bias: bool = False) -> None:
        super().__init__()
        self.vit, self.name = home(), name
        weight = nn.Parameter(torch.randn(WIDTH, 10)) if bare else nn.Linear(WIDTH, 10, bias)
        setattr(self, name, weight)

    def forward(self, image: Tensor) -> Tensor:
        weight = getattr(self, self.name)
        return self.vit(image) @ weight if isinstance(weight, Tensor) else weight(self.vit(image))


class OfTransformers(nn.Module):
    """A headless model of transformers in a user's module."""

    def __init__(self, pooled: bool) -> None:
        super().__init__()
        self.vit, self.pooled = hf.ViTModel(hf.ViTConfig(**HF)), pooled

    def forward(self, image: Tensor) -> Tensor:
        output = self.vit(image)
        return output.pooler_output if self.pooled else output.last_hidden_state[:, 0]


EMBEDDINGS: dict[str, Callable[[], nn.Module]] = {
    "headless ViT": home,
    "headless timm": lambda: Through(timm.create_model("vit_tiny_patch16_224", num_classes=0, **TIMM)),
    "headless ResNet": lambda: Through(torchvision.models.resnet18(num_classes=2)),
    "transformers, pooled": lambda: OfTransformers(pooled=True),
    "transformers, class token": lambda: OfTransformers(pooled=False),
    "projection": lambda: Projected("proj"),
    "projection with a bias": lambda: Projected("image_projection", bias=True),
    "bare projection": lambda: Projected("proj", bare=True),
    "normalised": lambda: Through(Projected("out"), lambda x: F.normalize(x, dim=-1)),
    "divided by its length": lambda: Through(Projected("out"), lambda x: x / x.norm(dim=-1, keepdim=True)),
    "scaled and moved": lambda: Through(home(), lambda x: 2 * x.float() - 1),
}


def embedding(name: str) -> nn.Module:
    torch.manual_seed(0)
    module = EMBEDDINGS[name]()
    if name == "headless ResNet":
        module.inner.fc = nn.Identity()
    return module.eval()


@pytest.mark.parametrize("name", EMBEDDINGS)
def test_an_embedding_is_refused_until_it_is_stated(name: str) -> None:
    module = embedding(name)
    for target in (None, lambda scores: scores[:, 0]):
        with pytest.raises(BadInput, match=r"seems to return an embedding, not class scores: its .* come from"):
            cv.explain(cv.wrap(module, size=32), PIXELS, target=target)
    with pytest.raises(BadInput, match="seems to return an embedding"):
        cv.evaluate(cv.wrap(module, size=32), PIXELS, "saliency")
    stated = cv.wrap(module, size=32, classifier=False)
    explanation = cv.explain(stated, PIXELS, target=lambda scores: scores @ torch.arange(1.0, scores.shape[1] + 1))
    assert explanation.probabilities == (None,)
    assert (explanation.classifier, explanation.activation) == (False, "raw")
    assert cv.explain(stated, PIXELS, target=cv.Similar(PIXELS)).probabilities == (None,)
    classes = cv.wrap(module, size=32, classifier=True)  # the user's word counts, also after the first look
    assert cv.explain(classes, PIXELS, "saliency").classes[0] is not None
    with pytest.raises(BadInput, match="seems to return an embedding"):
        cv.explain(cv.wrap(module, size=32), PIXELS)


class ZeroShot(Through):
    def __init__(self) -> None:
        super().__init__(home())
        self.register_buffer("prompts", torch.randn(4, WIDTH))

    def forward(self, image: Tensor) -> Tensor:
        return 10 * F.normalize(self.inner(image), dim=-1) @ F.normalize(self.prompts, dim=-1).T


class Tempered(Through):
    """Class scores that are scaled by a number that depends on the image."""

    def forward(self, image: Tensor) -> Tensor:
        return self.inner(image) * image.mean((1, 2, 3))[:, None]


class Ensemble(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.members = nn.ModuleList([HomeMade(lambda: Block(FusedAttention)) for _ in range(2)])

    def forward(self, image: Tensor) -> Tensor:
        return (self.members[0](image) + self.members[1](image)) / 2


class ConvolutionalHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Conv2d(3, 8, 4, 4)
        self.classifier = nn.Sequential(nn.Conv2d(8, CLASSES, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1))

    def forward(self, image: Tensor) -> Tensor:
        return self.classifier(self.features(image).relu()).flatten(1)


CLASSIFIERS: dict[str, Callable[[], nn.Module]] = {
    "head": lambda: HomeMade(lambda: Block(FusedAttention)),
    "any name": lambda: Projected("answer", bias=True),
    "any name without a bias": lambda: Projected("weights"),
    "bare weight": lambda: Projected("w", bare=True),
    "sequence": lambda: nn.Sequential(home(), nn.Dropout(), nn.Linear(WIDTH, 5)),
    "two layers": lambda: nn.Sequential(home(), nn.Linear(WIDTH, 8), nn.GELU(), nn.Linear(8, 5)),
    "DETR's name": lambda: Projected("class_embed", bias=True),
    "head with a projection": lambda: home(nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 5))),
    "timm": lambda: Through(timm.create_model("vit_tiny_patch16_224", num_classes=5, **TIMM)),
    "ResNet": lambda: Through(torchvision.models.resnet18(num_classes=5)),
    "temperature": lambda: Through(HomeMade(lambda: Block(FusedAttention)), lambda x: x / 0.07),
    "softmax": lambda: Through(HomeMade(lambda: Block(FusedAttention)), lambda x: x.softmax(-1)),
    "softmax, written out": lambda: Through(
        HomeMade(lambda: Block(FusedAttention)), lambda x: x.exp() / x.exp().sum(-1, keepdim=True)
    ),
    "mean of tokens": lambda: Through(
        nn.Sequential(nn.Conv2d(3, 8, 8, 8), nn.Flatten(2), nn.Linear(16, 5)), lambda x: x.mean(1)
    ),
    "zero-shot": ZeroShot,
    "ensemble": Ensemble,
    "convolutional head": ConvolutionalHead,
    "mobilenet": lambda: Through(torchvision.models.mobilenet_v3_small(num_classes=5)),
}


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_ordinary_classifiers_without_labels_work_without_a_note(name: str) -> None:
    torch.manual_seed(0)
    explanation = cv.explain(cv.wrap(CLASSIFIERS[name]().eval(), size=32), PIXELS, "saliency")
    assert explanation.notes == ()
    assert explanation.probabilities[0] is not None


@pytest.mark.parametrize("name", [name for name, tiny in ZOO.items() if not tiny.full_size])
def test_no_model_of_the_zoo_changes_its_kind(name: str) -> None:
    """`Tiny.classifier` was written down by hand; a user's module around the model must not be another kind."""
    from helpers.tiny_models import pixels

    model = cv.wrap(build(name))
    assert model.classifier == ZOO[name].classifier
    if ZOO[name].classifier:
        explanation = cv.explain(cv.wrap(Through(build(name))), pixels(name, 1), "saliency")
        assert not any("Nothing states" in note for note in explanation.notes)


def test_an_output_that_cannot_be_traced_is_noted() -> None:
    pooled = nn.Sequential(nn.Conv2d(3, 12, 8, 8), nn.SiLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    (note,) = cv.explain(
        cv.wrap(Tempered(nn.Sequential(home(), nn.Linear(WIDTH, 5))), size=32), PIXELS, "saliency"
    ).notes
    assert note.startswith("Nothing states what the 5 outputs")
    (note,) = cv.explain(cv.wrap(pooled, size=32), PIXELS, "saliency").notes
    assert note.startswith("Nothing states what the 12 outputs of the model are")
    for stated in ({"classifier": True}, {"labels": [str(i) for i in range(12)]}, {"activation": "sigmoid"}):
        assert cv.explain(cv.wrap(pooled, size=32, **stated), PIXELS, "saliency").notes == ()


def test_towers_and_headless_models_of_libraries_are_embeddings_at_once() -> None:
    resnet = torchvision.models.resnet18()
    resnet.fc = nn.Identity()
    for module in (build("open_clip-tower"), build("open_clip-model"), resnet):
        model = cv.wrap(module)
        assert not model.classifier
        assert model.activation == "raw"


def test_no_probability_is_invented_for_a_tower(tmp_path: Path) -> None:
    model = cv.wrap(build("open_clip-tower"), mean=0.5, std=0.5, size=32)
    explanation = cv.explain(model, PIXELS, target=lambda embedding: embedding[:, 3])
    explanation.save(tmp_path / "map.json")
    stored = json.loads((tmp_path / "map.json").read_text(encoding="utf-8"))
    texts = json.dumps(stored, ensure_ascii=False), str(explanation), str(explanation.check())
    for text in texts:
        assert "%" not in text.replace("30 %", "").replace("10 %", "")  # the share of patches
        assert "class 4" not in text
    assert stored["activation"] == "raw"
