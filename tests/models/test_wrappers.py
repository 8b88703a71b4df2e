"""Check modules wrapped by PEFT and accelerate, on several devices, or sharded."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import clairvit as cv
from clairvit.errors import BadInput, ModelUnavailable
from clairvit.models.model import Model
from helpers.lora import LoraLinear, classifier, lora
from helpers.module_fingerprint import fingerprint
from helpers.transformers_names import vit_layers


def pixels(count: int = 2) -> Tensor:
    return torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(1)).double()


def merged() -> nn.Module:
    model = lora().base_model.model
    for part in list(model.modules()):
        for name, layer in list(part.named_children()):
            if isinstance(layer, LoraLinear):
                setattr(part, name, layer.merged())
    model.classifier = model.classifier.modules_to_save["default"]
    return model


LINEAR = ["raw-attention", "rollout", "genatt", "legrad", "ixg", "gradcam", "attnlrp+plus", "decompx(bias=none)"]
LINEAR += ["saliency", "smoothgrad(n=2)", "integrated-gradients(steps=4)", "leave-one-out", "kernelshap", "reslrp"]


@pytest.mark.parametrize("method", LINEAR)
def test_maps_of_lora_are_those_of_merged_weights(method: str) -> None:
    maps = cv.explain(lora(), pixels(), method, target=1).maps
    torch.testing.assert_close(maps, cv.explain(merged(), pixels(), method, target=1).maps, rtol=1e-7, atol=1e-10)
    assert maps.abs().max() > 0


def test_what_a_wrapped_model_states_is_taken(tmp_path: Path) -> None:
    processor = transformers.ViTImageProcessor(
        size={"height": 32, "width": 32}, image_mean=[0.1, 0.2, 0.3], image_std=[0.4, 0.5, 0.6]
    )
    processor.save_pretrained(tmp_path)
    module = lora()
    module.base_model.model.config.name_or_path = str(tmp_path)
    model = cv.wrap(module)
    assert model.labels == ("ant", "bee", "cat")
    assert (model.preprocess.size, model.preprocess.mean) == ((32, 32), (0.1, 0.2, 0.3))
    assert (model.name, model.wrappers) == ("ViTForImageClassification", ("PeftModel",))
    assert model.classifier
    assert not model.assumptions


def test_a_lora_module_is_not_changed() -> None:
    module = lora().train()
    before = fingerprint(module)
    cv.explain(module, pixels(), "attnlrp+plus")
    with pytest.raises(BadInput):
        cv.explain(module, pixels()[:, :2])
    assert fingerprint(module) == before
    assert module.training


def test_prompt_learning_is_kept() -> None:
    module = lora()
    module.base_model.peft_config["default"].is_prompt_learning = True
    assert cv.wrap(module).module is module


def test_a_module_by_its_python_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "tuned_models.py").write_text("from test_wrappers import lora as build\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    assert cv.load("tuned_models:build").labels == ("ant", "bee", "cat")


def test_a_folder_of_an_adapter_alone_is_refused(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}', encoding="utf-8")
    with pytest.raises(ModelUnavailable, match=r"holds an adapter .* without its base model; load both with peft"):
        cv.load(f"hf:{tmp_path}")


def test_the_real_package() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules="all-linear", r=2, init_lora_weights=False)
    module = peft.get_peft_model(classifier(), config).double().eval()
    maps = cv.explain(module, pixels(), "ixg", target=1).maps
    assert cv.wrap(module).labels == ("ant", "bee", "cat")
    plain = module.merge_and_unload()
    torch.testing.assert_close(maps, cv.explain(plain, pixels(), "ixg", target=1).maps, rtol=1e-7, atol=1e-10)


# accelerate


class AlignDevices:
    """What accelerate's hook does before and after a module's forward: move tensors to the module's device."""

    def __init__(self, offload: bool = False) -> None:
        self.offload, self.moved = offload, 0

    def run(self, forward: Any, *args: Any, **kwargs: Any) -> Any:
        self.moved += 1
        args = tuple(a.to("cpu").clone() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args)
        return forward(*args, **kwargs)


def hooked(offload: bool = False) -> nn.Module:
    """Return a classifier whose layers have accelerate's hooks, as after dispatch_model."""
    module: Any = classifier()
    for layer in (module.vit.embeddings, *vit_layers(module.vit), module.classifier):
        layer._hf_hook = AlignDevices(offload)
        layer._old_forward = layer.forward
        layer.forward = functools.partial(layer._hf_hook.run, layer._old_forward)
    module.hf_device_map = {"": "cpu"}
    return module


@pytest.mark.parametrize("method", ["rollout", "genatt", "ixg", "attnlrp+plus", "saliency", "leave-one-out"])
def test_maps_of_a_hooked_module_are_those_of_the_plain_one(method: str) -> None:
    module = hooked()
    maps = cv.explain(module, pixels(), method, target=1).maps
    assert module.classifier._hf_hook.moved > 0
    torch.testing.assert_close(maps, cv.explain(classifier(), pixels(), method, target=1).maps, rtol=1e-9, atol=1e-12)


def test_offloaded_weights_are_refused() -> None:
    with pytest.raises(BadInput, match=r"is offloaded by accelerate: .* load the model whole"):
        cv.wrap(hooked(offload=True))


def test_tensors_on_several_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Meta tensors stand for those of a second device: a device is all that is looked at."""
    module = classifier()
    module.classifier.to("meta")
    monkeypatch.setattr("clairvit.models.model._check_materialised", lambda places, name: None)
    words = r"lie on 2 devices \(.*'classifier.bias' on meta.*\), and a trace combines layers on one; load"
    with pytest.raises(BadInput, match=words):
        cv.wrap(module)
    with pytest.raises(BadInput, match=words):
        cv.explain(Model(module, "net"), pixels())


def test_the_device_is_that_of_the_input_embedding() -> None:
    module = classifier()
    module.vit.embeddings.cls_token = nn.Parameter(torch.empty(1, 1, 24, device="meta"))
    assert next(module.parameters()).is_meta
    assert Model(module, "net").device == torch.device("cpu")


# FSDP


class FullyShardedDataParallel(nn.Module):
    """A module of the name of torch's: the real one needs a process group."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def test_sharded_modules_are_refused() -> None:
    with pytest.raises(BadInput, match=r"is sharded \(FullyShardedDataParallel\).*gather a full state_dict"):
        cv.wrap(FullyShardedDataParallel(classifier()))


def test_the_name_is_that_of_torch() -> None:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp import FullyShardedDataParallel as Real

    assert (FSDPModule.__name__, Real.__name__) == ("FSDPModule", "FullyShardedDataParallel")
