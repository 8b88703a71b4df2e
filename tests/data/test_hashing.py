"""Hashes of weights: the same content has the same hash, on every device and however it was made."""

from __future__ import annotations

import copy
import hashlib

import pytest
import timm
import torch
from torch import nn

import clairvit as cv
from clairvit.data.hashing import model_record, weights_hash
from clairvit.models.state_hash import state_hash


def seeded_module(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))


def test_the_hash_is_of_the_content() -> None:
    first = seeded_module()
    assert (
        state_hash(first)
        == state_hash(seeded_module())
        == state_hash(copy.deepcopy(first))
        == state_hash(first.train())
    )
    assert state_hash(first) != state_hash(seeded_module(1))
    assert state_hash(first) != state_hash(seeded_module().double())
    assert state_hash(nn.Linear(2, 3)) != state_hash(nn.Linear(3, 2))


def test_the_hash_does_not_depend_on_the_machine() -> None:
    """Written down once: a hash in a result must be found again elsewhere."""
    module = nn.Linear(2, 2)
    with torch.no_grad():
        module.weight.copy_(torch.tensor([[1.0, -2.0], [0.5, 0.25]]))
        module.bias.zero_()
    assert state_hash(module) == "43d6d0bb45f8818295255364fb3165c4"
    assert state_hash(module.to(memory_format=torch.contiguous_format)) == "43d6d0bb45f8818295255364fb3165c4"


def test_views_and_strides_do_not_matter() -> None:
    first, second = nn.Linear(3, 2), nn.Linear(3, 2)
    second.weight = nn.Parameter(first.weight.detach().T.contiguous().T)  # the same numbers, stored by columns
    second.bias = first.bias
    assert not second.weight.is_contiguous()
    assert state_hash(first) == state_hash(second)


@pytest.mark.parametrize("change", ["step", "data", "one element", "swap", "buffer", "replaced", "not saved"])
def test_every_change_is_detected_although_the_hash_is_cached(change: str) -> None:
    module = seeded_module()
    module.register_buffer("scale", torch.ones(1), persistent=False)
    before = state_hash(module)
    first = module[0]
    assert isinstance(first, nn.Linear)
    with torch.no_grad():
        if change == "step":
            first.weight.add_(1e-3)
        elif change == "data":
            first.weight.data.mul_(1.5)  # torch does not count this as a change
        elif change == "one element":
            first.weight.data[0, 0] += 1e-6
        elif change == "swap":
            first.weight.data.copy_(first.weight.data.flip(0))  # the sum stays
        elif change == "buffer":
            module[1].running_mean.data.add_(1)
        elif change == "replaced":
            first.weight = nn.Parameter(first.weight + 1)
        else:
            module.scale.data.add_(1)
    assert state_hash(module) != before
    assert state_hash(module) == state_hash(copy.deepcopy(module))


def test_the_bytes_are_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    module, hashes, blake2b = seeded_module(), [], hashlib.blake2b
    monkeypatch.setattr(hashlib, "blake2b", lambda *data, **options: hashes.append(data) or blake2b(*data, **options))
    first = state_hash(module)
    count = len(hashes)
    assert count > 0
    assert state_hash(module) == first
    assert len(hashes) == count
    module[0].weight.data.zero_()
    assert state_hash(module) != first


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.bool, torch.int8]
)
def test_every_dtype_has_a_hash(dtype: torch.dtype) -> None:
    class Holder(nn.Module):
        def __init__(self, value: int) -> None:
            super().__init__()
            self.register_buffer("kept", torch.full((5,), value).to(dtype))

    assert state_hash(Holder(1)) == state_hash(Holder(1))
    assert state_hash(Holder(1)) != state_hash(Holder(0))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_quantised_layers_have_a_hash() -> None:
    def quantised(seed: int) -> nn.Module:
        module: nn.Module = torch.ao.quantization.quantize_dynamic(seeded_module(seed), {nn.Linear}, dtype=torch.qint8)
        return module

    assert state_hash(quantised(0)) == state_hash(quantised(0))
    assert state_hash(quantised(0)) != state_hash(quantised(1))


def test_inference_tensors_have_a_hash() -> None:
    with torch.inference_mode():
        module = seeded_module()
    assert state_hash(module) == state_hash(seeded_module())


def test_the_model_hash_has_labels_and_preprocessing_and_the_record_is_json() -> None:
    module = timm.create_model("vit_tiny_patch16_224", num_classes=2, img_size=32, depth=1)
    first, second = cv.wrap(module, labels=["a", "b"]), cv.wrap(module, labels=["a", "b"], mean=0.25)
    assert weights_hash(first) != weights_hash(second)
    assert weights_hash(first) == weights_hash(cv.wrap(module, labels=["a", "b"], display=[0]))  # changes no score
    assert model_record(first)["weights_hash"] == model_record(second)["weights_hash"] == state_hash(module)
    assert model_record(second)["preprocess"] == {
        "size": [32, 32],
        "mean": [0.25, 0.25, 0.25],
        "std": [0.5, 0.5, 0.5],
        "resize": 35,
        "interpolation": "bicubic",
        "keep_ratio": True,
        "display": None,
        "frames": None,
    }
    assert model_record(second)["assumptions"] == list(second.assumptions)
