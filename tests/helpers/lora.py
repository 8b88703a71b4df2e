"""A classifier of transformers wrapped as PEFT wraps it, with random weights; PEFT itself is not needed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import Tensor, nn

NAMES = {0: "ant", 1: "bee", 2: "cat"}


def classifier(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    config = transformers.ViTConfig(
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=32,
        patch_size=16,
        id2label=NAMES,
        label2id={name: number for number, name in NAMES.items()},
    )
    return transformers.ViTForImageClassification(config).double().eval()


# PEFT, as its classes are nested: PeftModel.base_model (the tuner) .model (the user's model, its layers replaced)


class LoraLinear(nn.Module):
    """W x + b + scaling · B A x, with one adapter named "default"."""

    def __init__(self, base_layer: nn.Linear, rank: int = 2, scaling: float = 0.7) -> None:
        super().__init__()
        self.base_layer, self.scaling = base_layer, {"default": scaling}
        self.lora_dropout = nn.ModuleDict({"default": nn.Dropout(0.5)})
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base_layer.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, base_layer.out_features, bias=False)})

    def forward(self, x: Tensor) -> Tensor:
        update = self.lora_B["default"](self.lora_A["default"](self.lora_dropout["default"](x)))
        return self.base_layer(x) + update * self.scaling["default"]

    def merged(self) -> nn.Linear:
        update = self.lora_B["default"].weight @ self.lora_A["default"].weight
        with torch.no_grad():
            self.base_layer.weight += self.scaling["default"] * update
        return self.base_layer


class ModulesToSaveWrapper(nn.Module):
    """A layer that is trained as a whole, next to the original one."""

    def __init__(self, original_module: nn.Module) -> None:
        super().__init__()
        self.original_module = original_module
        torch.manual_seed(7)
        self.modules_to_save = nn.ModuleDict({"default": nn.Linear(24, 3, dtype=torch.float64)})

    def forward(self, x: Tensor) -> Tensor:
        return self.modules_to_save["default"](x)


class LoraModel(nn.Module):
    """The tuner: it replaces layers of the model that it is given, and states its configuration there too."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.peft_config = {"default": SimpleNamespace(is_prompt_learning=False)}
        model.peft_config = self.peft_config

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.model, name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model.forward(*args, **kwargs)


class PeftModel(nn.Module):
    """The outer wrapper, which passes attributes on and runs the inner model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base_model = LoraModel(model)
        self.calls = 0
        self.register_forward_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.calls += 1

    @property
    def peft_config(self) -> Any:
        return self.base_model.peft_config

    @property
    def active_peft_config(self) -> Any:
        return self.peft_config["default"]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.base_model, name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.base_model.model(*args, **kwargs)


def lora() -> PeftModel:
    """Return a classifier with LoRA in every attention and MLP layer, and a head trained as a whole."""
    model = classifier()
    torch.manual_seed(3)
    for part in list(model.modules()):
        for name, layer in list(part.named_children()):
            if isinstance(layer, nn.Linear) and name != "classifier":
                setattr(part, name, LoraLinear(layer).double())
    model.classifier = ModulesToSaveWrapper(model.classifier)  # type: ignore[assignment]
    return PeftModel(model).eval()
