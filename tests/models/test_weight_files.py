"""file:PATH: classes, size and pooling follow from the file, or an error says why it cannot be used."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import nn

import clairvit as cv
from clairvit.errors import BadInput, ModelUnavailable, UnknownName
from helpers.rounding import assert_same


def scores(model: cv.Model) -> torch.Tensor:
    with torch.no_grad():
        return model.logits(torch.zeros(1, 3, *model.preprocess.size, dtype=model.dtype))


@pytest.fixture(scope="module")
def dogs() -> nn.Module:
    return timm.create_model("vit_tiny_patch16_224", num_classes=5, img_size=64).eval()


def assert_computes_the_same(model: cv.Model, module: nn.Module) -> None:
    """Assert that the loaded model gives the module's scores; in float64, which holds float32 weights exactly."""
    ours, theirs = copy.deepcopy(model.module).double(), copy.deepcopy(module).double()
    with torch.no_grad():
        pixels = torch.linspace(-1, 1, 3 * 64 * 64, dtype=torch.float64).view(1, 3, 64, 64)
        assert_same(ours(pixels), theirs(pixels))


def test_classes_and_size_follow_from_the_tensors(tmp_path: Path, dogs: nn.Module) -> None:
    path = tmp_path / "dogs.safetensors"
    save_file(dogs.state_dict(), path)
    model = cv.load(f"file:{path}", arch="timm:vit_tiny_patch16_224")
    assert model.name == f"file:{path}"
    assert model.preprocess.size == (64, 64)
    assert model.labels == ()
    assert_computes_the_same(model, dogs)
    (tmp_path / "dogs-labels.json").write_text('["a", "b", "c", "d", "e"]')
    assert cv.load(str(path), arch="vit_tiny_patch16_224").labels == ("a", "b", "c", "d", "e")
    assert cv.load(f"file:{path}", arch="timm:vit_tiny_patch16_224", labels=list("vwxyz")).labels == tuple("vwxyz")


def test_the_header_may_state_the_architecture(tmp_path: Path, dogs: nn.Module) -> None:
    path = tmp_path / "dogs.safetensors"
    save_file(dogs.state_dict(), path, {"arch": "timm:vit_tiny_patch16_224"})
    assert_computes_the_same(cv.load(f"file:{path}"), dogs)
    save_file(dogs.state_dict(), path)
    with pytest.raises(BadInput, match="does not say which architecture its weights are for; add arch='timm:NAME'"):
        cv.load(f"file:{path}")


@pytest.mark.parametrize("wrapping", ["plain", "state_dict", "ddp", "half"])
def test_torch_files(tmp_path: Path, dogs: nn.Module, wrapping: str) -> None:
    state = dogs.state_dict()
    saved = {
        "plain": state,
        "state_dict": {"epoch": 3, "state_dict": state},
        "ddp": {"model": {f"module.{key}": value for key, value in state.items()}},
        "half": {key: value.half() for key, value in state.items()},
    }[wrapping]
    torch.save(saved, tmp_path / "dogs.pth")
    model = cv.load(f"file:{tmp_path}/dogs.pth", arch="timm:vit_tiny_patch16_224")
    assert model.dtype == torch.float32
    if wrapping != "half":
        assert_computes_the_same(model, dogs)


def test_average_pooling_follows_from_the_tensors(tmp_path: Path) -> None:
    module = timm.create_model("vit_tiny_patch16_224", num_classes=5, img_size=64, global_pool="avg").eval()
    save_file(module.state_dict(), tmp_path / "avg.safetensors")
    assert_computes_the_same(cv.load(f"file:{tmp_path}/avg.safetensors", arch="timm:vit_tiny_patch16_224"), module)


def test_file_without_a_head_is_a_backbone(tmp_path: Path, dogs: nn.Module) -> None:
    state = {key: value for key, value in dogs.state_dict().items() if not key.startswith("head.")}
    save_file(state, tmp_path / "body.safetensors")
    model = cv.load(f"file:{tmp_path}/body.safetensors", arch="timm:vit_tiny_patch16_224")
    assert not model.classifier
    assert scores(model).shape == (1, 192)


def test_files_that_do_not_fit(tmp_path: Path, dogs: nn.Module) -> None:
    path = tmp_path / "dogs.safetensors"
    save_file(dogs.state_dict(), path)
    with pytest.raises(
        ModelUnavailable, match=r"do not fit timm's 'vit_small_patch16_224': \d+ of another shape \(blocks"
    ):
        cv.load(f"file:{path}", arch="timm:vit_small_patch16_224")
    state = dogs.state_dict()
    state["surprise"] = state.pop("norm.weight").clone()
    save_file(state, path)
    with pytest.raises(ModelUnavailable, match=r"1 missing \(norm\.weight\); 1 unexpected \(surprise\)"):
        cv.load(f"file:{path}", arch="timm:vit_tiny_patch16_224")
    with pytest.raises(BadInput, match="arch='hf:vit' is not a timm architecture"):
        cv.load(f"file:{path}", arch="hf:vit")
    with pytest.raises(UnknownName, match=r"no model 'vit_tny_patch16_224'\. Did you mean 'vit_tiny_patch16_224'"):
        cv.load(f"file:{path}", arch="timm:vit_tny_patch16_224")
    with pytest.raises(BadInput, match="belongs to 'file:PATH' only"):
        cv.load("pets", arch="timm:vit_tiny_patch16_224")


class Sneaky:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return Path.touch, (Path("/tmp/clairvit-was-fooled"),)  # type: ignore[return-value]


@pytest.mark.parametrize("arch", ["timm:hf_hub:x/y", "timm:hf-hub:timm/vit_tiny", "timm:local-dir:/tmp"])
@pytest.mark.parametrize("place", ["header", "argument"])
def test_the_architecture_is_one_of_timms_list(tmp_path: Path, dogs: nn.Module, arch: str, place: str) -> None:
    path = tmp_path / "dogs.safetensors"
    save_file(dogs.state_dict(), path, {"arch": arch} if place == "header" else {})
    with pytest.raises(BadInput, match=rf"arch='{arch}' is the name of weights elsewhere; expected that of an arch"):
        cv.load(f"file:{path}", arch=None if place == "header" else arch)


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_weights_that_may_not_be_read(
    tmp_path: Path, dogs: nn.Module, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / f"dogs{suffix}"
    path.touch()
    usual = Path.open

    def refuse(self: Path, *arguments: Any, **options: Any) -> Any:
        if self == path:  # as for a user without the right to; root has it
            raise PermissionError(13, "Permission denied", str(self))
        return usual(self, *arguments, **options)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ModelUnavailable, match=r"cannot be read \(Permission denied\); look at its permissions"):
        cv.load(f"file:{path}", arch="timm:vit_tiny_patch16_224")


def test_a_name_of_weights_that_is_too_long() -> None:
    with pytest.raises(ModelUnavailable, match=r"cannot be read .*File name too long"):
        cv.load(f"file:{'x' * 300}.safetensors", arch="timm:vit_tiny_patch16_224")


def test_files_that_are_no_weights(tmp_path: Path) -> None:
    torch.save({"model": Sneaky()}, tmp_path / "sneaky.pth")
    with pytest.raises(
        ModelUnavailable, match=r"sneaky\.pth' holds more than tensors, and ClairViT never unpickles code"
    ):
        cv.load(f"file:{tmp_path}/sneaky.pth", arch="timm:vit_tiny_patch16_224")
    assert not Path("/tmp/clairvit-was-fooled").exists()
    for name in ("text.safetensors", "text.pth"):
        (tmp_path / name).write_text("no weights in here")
        with pytest.raises(ModelUnavailable, match=r"text\.\w+' "):
            cv.load(f"file:{tmp_path}/{name}", arch="timm:vit_tiny_patch16_224")
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(ModelUnavailable, match="no dictionary of tensors in it"):
        cv.load(f"file:{tmp_path}/list.pt", arch="timm:vit_tiny_patch16_224")
    with pytest.raises(ModelUnavailable, match=r"'.*test\.pth' is not there\. Did you mean 'text\.pth'"):
        cv.load(f"file:{tmp_path}/test.pth", arch="timm:vit_tiny_patch16_224")
    with pytest.raises(ModelUnavailable, match="is a folder"):
        cv.load(f"file:{tmp_path}", arch="timm:vit_tiny_patch16_224")
