"""Loading by name with random weights, wrapping, and names that do not exist."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

import pytest
import timm
import torch
from torch import nn

import clairvit as cv
from clairvit.errors import BadInput, UnknownName
from clairvit.models.images import prepare
from clairvit.models.model import Layout
from clairvit.models.sources import registry as sources
from clairvit.models.sources import torchvision as from_torchvision
from clairvit.targets.resolve import top


def scores(model: cv.Model) -> torch.Tensor:
    with torch.no_grad():
        return model.logits(torch.zeros(1, 3, *model.preprocess.size, dtype=model.dtype))


# pets -----------------------------------------------------------------------------------------------------------------


def test_pets_classifies_the_demo_cat() -> None:
    model = cv.load("pets")
    with torch.no_grad():
        ((name, chance), *_), *_ = top(model.logits(prepare("demo", model).pixels), model.labels)
    assert name == "Bengal"
    assert chance == pytest.approx(0.676, abs=0.01)
    assert model.name == "pets"
    assert len(model.labels) == 37
    assert model.dtype == torch.float32
    assert not model.module.training
    assert model.preprocess.resize == 248


def test_pets_ships_with_its_card() -> None:
    card = (resources.files("clairvit.models.builtin") / "pets" / "README.md").read_text(encoding="utf-8")
    for fact in ("vit_tiny_patch16_224", "78.8 %", "92.2 %", "3,669", "CC BY-SA 4.0", "Not good for"):
        assert fact in card


def test_random_weights_are_repeatable_and_leave_the_generator_unchanged() -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    first = cv.load("pets", pretrained=False)
    assert torch.equal(torch.rand(3), expected)
    second = cv.load("pets", pretrained=False)
    assert first.name == "pets (random weights)"
    assert all(torch.equal(a, b) for a, b in zip(first.module.parameters(), second.module.parameters(), strict=True))
    assert not torch.equal(scores(first), scores(cv.load("pets")))
    with pytest.raises(BadInput, match="takes 224 x 224 images"):
        cv.load("pets", size=96)
    assert scores(cv.load("pets", pretrained=False, size=96)).shape == (1, 37)


def test_device_and_dtype() -> None:
    assert cv.load("pets", dtype="float64").dtype == torch.float64
    assert cv.load("pets", dtype=torch.bfloat16, device="cpu").dtype == torch.bfloat16
    with pytest.raises(BadInput, match=r"dtype='int8' .* float32, float64, float16, bfloat16"):
        cv.load("pets", dtype="int8")
    with pytest.raises(BadInput, match="device 'cuda:99' cannot be used here"):
        cv.load("pets", device="cuda:99")


# timm -----------------------------------------------------------------------------------------------------------------


def test_timm_random() -> None:
    model = cv.load("timm:vit_tiny_patch16_224", pretrained=False)
    assert model.name == "timm:vit_tiny_patch16_224 (random weights)"
    assert model.labels[281] == "tabby"
    assert model.labels[134] != model.labels[517]  # two cranes
    assert len(set(model.labels)) == 1000
    assert model.preprocess.mean == (0.5, 0.5, 0.5)
    assert model.preprocess.resize == 248
    assert scores(model).shape == (1, 1000)


def test_timm_sizes_and_backbones() -> None:
    wide = cv.load("timm:vit_tiny_patch16_224", pretrained=False, size=(64, 96))
    assert wide.preprocess.size == (64, 96)
    assert scores(wide).shape == (1, 1000)
    assert scores(cv.load("timm:resnet10t", pretrained=False, size=64)).shape == (1, 1000)
    backbone = cv.load("timm:vit_small_patch14_dinov2", pretrained=False, size=56)
    assert not backbone.classifier
    assert backbone.labels == ()
    for size in ("big", (1, 2, 3), 0, (32, -1)):
        with pytest.raises(BadInput, match="is not an image size"):
            cv.load("pets", size=size)  # type: ignore[arg-type]


def test_labels_given(tmp_path: Path) -> None:
    names = [f"kind {i}" for i in range(37)]
    (tmp_path / "list.json").write_text(json.dumps(names))
    (tmp_path / "dict.json").write_text(json.dumps({str(i): name for i, name in enumerate(names)}))
    for labels in (names, tmp_path / "list.json", str(tmp_path / "dict.json")):
        assert cv.load("pets", pretrained=False, labels=labels).labels == tuple(names)
    with pytest.raises(BadInput, match="2 labels were given for a model with 37 classes; give exactly 37"):
        cv.load("pets", labels=["cat", "dog"])
    with pytest.raises(BadInput, match=r"no label file 'nowhere\.json'"):
        cv.load("pets", labels="nowhere.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(BadInput, match=r"label file '.*bad\.json' cannot be used"):
        cv.load("pets", labels=tmp_path / "bad.json")
    (tmp_path / "numbers.json").write_text("[1, 2]")
    with pytest.raises(BadInput, match="expected a JSON list of class names"):
        cv.load("pets", labels=tmp_path / "numbers.json")


# torchvision ----------------------------------------------------------------------------------------------------------


def test_torchvision_random() -> None:
    model = cv.load("torchvision:vit_b_32", pretrained=False, size=64)
    assert model.labels[281] == "tabby"
    assert scores(model).shape == (1, 1000)
    assert from_torchvision.preprocess(from_torchvision.choose_weights("vit_b_16", ""), None).resize == 256
    with pytest.raises(BadInput, match="square images only"):
        cv.load("torchvision:vit_b_32", pretrained=False, size=(64, 96))
    with pytest.raises(BadInput, match="fix its image size"):
        cv.load("torchvision:vit_b_32", size=64)


# unknown names --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("pet", r"no model 'pet'\. Did you mean 'pets'"),
        ("vit_tiny_patch16_224", "Did you mean 'timm:vit_tiny_patch16_224'"),
        ("tim:vit_tiny_patch16_224", r"Did you mean 'timm:vit_tiny_patch16_224'\?"),
        ("openclip:ViT-B-32:openai", r"Did you mean 'open_clip:ViT-B-32:openai'\?"),
        ("hf:", "Did you mean 'hf:google/vit-base-patch16-224'"),
        ("zzz", "type 'clairvit models'"),
        ("timm:vit_tny_patch16_224", r"timm has no model 'vit_tny_patch16_224'\. Did you mean 'vit_tiny_patch16_224'"),
        ("timm:vit_tiny_patch16_224.augreg_in22k", "no weights 'augreg_in22k' .* Did you mean 'augreg_in21k'"),
        ("torchvision:vit_b_61", "Did you mean 'vit_b_16'"),
        ("torchvision:vit_b_16:IMAGENET1K_V9", "Did you mean 'IMAGENET1K_V1'"),
        ("open_clip:VitB32:openai", "Did you mean 'ViT-B-32'"),
        ("open_clip:ViT-B-32:opena", "Did you mean 'openai'"),
        ("open_clip:ViT-B-32", "names no weights.*'open_clip:ViT-B-32:TAG', one of: openai"),
    ],
)
def test_unknown_names(name: str, message: str) -> None:
    with pytest.raises(UnknownName, match=message):
        cv.load(name)


def test_a_module_is_not_a_name() -> None:
    with pytest.raises(BadInput, match=r"load got a Linear.*cv\.wrap"):
        cv.load(nn.Linear(1, 1))  # type: ignore[arg-type]


def test_sources() -> None:
    rows = sources.sources()
    assert [row.spec.partition(":")[0] for row in rows] == [
        "pets",
        "scenes",
        "parts",
        "timm",
        "hf",
        "torchvision",
        "open_clip",
        "file",
        "MODULE",
    ]
    assert all(all(row) for row in rows)
    names = [row.spec for row in sources.sources("timm:vit_tiny*")]
    assert "timm:vit_tiny_patch16_224" in names
    assert all(name.startswith("timm:vit_tiny") for name in names)
    assert {"torchvision:vit_b_16"} <= {row.spec for row in sources.sources("vit_b_")}
    assert any(
        row.spec == "open_clip:ViT-B-32" and "openai" in row.description for row in sources.sources("open_clip:B-32")
    )
    assert "hf:dinov2" in [row.spec for row in sources.sources("hf:dino")]
    assert sources.sources("nothing-like-this") == []
    with pytest.raises(UnknownName, match="no model 'tim:vit'"):
        sources.sources("tim:vit")


# wrap -----------------------------------------------------------------------------------------------------------------


def test_wrap_does_not_change_the_module() -> None:
    module = nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Linear(12, 2)).train()
    layout = Layout(grid=(2, 2), prefix=0, pooling="avg")
    model = cv.wrap(
        module, mean=(0, 0, 0), std=(1, 1, 1), size=(2, 2), labels=["a", "b"], layout=layout, resize=3, name="m"
    )
    assert model.module is module
    assert module.training
    assert all(p.requires_grad for p in module.parameters())
    assert model.preprocess.resize == 3
    assert model.preprocess.size == (2, 2)
    assert (model.name, model.labels, model.layout, model.classifier) == ("m", ("a", "b"), layout, True)


def test_wrap_unwraps_compiled_and_parallel_modules() -> None:
    module = nn.Linear(2, 2)
    for outer in (torch.compile(module), nn.DataParallel(module), nn.DataParallel(torch.compile(module))):
        model = cv.wrap(outer)
        assert model.module is module
        assert model.name == "Linear"


def test_wrap_reads_the_preprocessing_of_a_timm_module() -> None:
    module = timm.create_model("vit_tiny_patch16_224", img_size=96)
    model = cv.wrap(module)
    assert model.preprocess.mean == (0.5, 0.5, 0.5)
    assert model.preprocess.size == (96, 96)
    assert model.preprocess.resize == 106
    assert cv.wrap(module, std=(0.1, 0.2, 0.3)).preprocess.std == (0.1, 0.2, 0.3)
    other = nn.Linear(1, 1)
    assert cv.wrap(other).preprocess.mean == (0.485, 0.456, 0.406)
    assert cv.wrap(other).preprocess.size == (224, 224)
    other.image_size = 384  # type: ignore[assignment]
    assert cv.wrap(other).preprocess.size == (384, 384)
    assert cv.wrap(other, size=32).preprocess.size == (32, 32)


def test_wrap_raises_for_what_is_no_module() -> None:
    with pytest.raises(BadInput, match=r"wrap got a str; expected a torch\.nn\.Module.*cv\.load"):
        cv.wrap("pets")  # type: ignore[arg-type]
    with pytest.raises(BadInput, match=r"std=\(0, 1, 1\); expected one positive number for each channel"):
        cv.wrap(nn.Linear(1, 1), std=(0, 1, 1))
    with pytest.raises(BadInput, match=r"mean=\(0.5, 0.5\) has 2 numbers, and the model takes 3 channels"):
        cv.wrap(nn.Linear(1, 1), mean=(0.5, 0.5))
