"""Detectors and segmenters of transformers, tiny random weights: what works is exact, and what does not says why."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

import clairvit as cv
from clairvit.errors import NotApplicable
from clairvit.methods.registry import list_methods
from clairvit.tracing.structure import model_structure
from helpers.rounding import assert_same
from helpers.tiny_models import strange

SIZE, TARGET = 64, 2
QUICK = [m.name for m in list_methods() if m.cost.forwards <= 1 and not m.extra_cost.slow]
VIT = {
    "hidden_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 3,
    "intermediate_size": 40,
    "image_size": SIZE,
    "patch_size": 16,
}
STAGES = {"embedding_size": 8, "depths": [1, 1, 1, 1], "layer_type": "basic"}


class Scores(nn.Module):
    """A model of dense outputs, and how its class scores [B, C] are read."""

    def __init__(self, model: nn.Module, read: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.model, self.read = model, read

    def forward(self, pixels: Tensor) -> Tensor:
        return self.read(self.model, pixels)


def segformer() -> nn.Module:
    widths = {"hidden_sizes": [8, 16, 16, 16], "num_attention_heads": [1, 1, 2, 2], "depths": [1, 1, 1, 1]}
    config = hf.SegformerConfig(**widths, decoder_hidden_size=16, num_labels=5)
    return hf.SegformerForSemanticSegmentation(config)


def mask2former() -> nn.Module:
    backbone = hf.SwinConfig(
        embed_dim=16,
        depths=[1, 1, 1, 1],
        num_heads=[1, 1, 2, 2],
        window_size=4,
        image_size=SIZE,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )
    narrow = dict.fromkeys(
        ("hidden_dim", "mask_feature_size", "feature_size", "encoder_feedforward_dim", "dim_feedforward"), 32
    )
    config = hf.Mask2FormerConfig(
        backbone_config=backbone,
        **narrow,
        num_attention_heads=2,
        encoder_layers=1,
        decoder_layers=3,
        num_queries=5,
        num_labels=5,
    )
    return hf.Mask2FormerForUniversalSegmentation(config)


def dpt() -> nn.Module:
    necks = {"backbone_out_indices": [0, 1, 2, 3], "neck_hidden_sizes": [8, 8, 8, 8], "fusion_hidden_size": 8}
    return hf.DPTForSemanticSegmentation(hf.DPTConfig(**VIT, **necks, num_labels=5))


def sam() -> nn.Module:
    vision = hf.SamVisionConfig(**VIT, output_channels=16, global_attn_indexes=[1], window_size=2)
    return hf.SamModel(hf.SamConfig(vision_config=vision)).vision_encoder


def rt_detr() -> nn.Module:
    backbone = hf.RTDetrResNetConfig(
        **STAGES, hidden_sizes=[8, 16, 16, 16], out_features=["stage2", "stage3", "stage4"]
    )
    config = hf.RTDetrConfig(
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
        backbone_config=backbone,
        encoder_in_channels=[16, 16, 16],
        decoder_in_channels=[24, 24, 24],
        encoder_hidden_dim=24,
        d_model=24,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        decoder_layers=2,
        num_queries=6,
        num_labels=5,
    )
    return hf.RTDetrForObjectDetection(config)


def yolos() -> nn.Module:
    sizes = VIT | {"image_size": [SIZE, SIZE]}
    return hf.YolosForObjectDetection(hf.YolosConfig(**sizes, num_detection_tokens=4, num_labels=5))


class Dense(NamedTuple):
    make: Callable[[], nn.Module]
    read: Callable[[nn.Module, Tensor], Tensor]
    kinds: list[str]
    refusal: str | None  # of rollout; None: it works
    grid: tuple[int, int]


WINDOWS = r"attends inside windows or stages \("
DENSE = {
    "segformer": Dense(
        segformer,
        lambda model, pixels: model(pixels).logits.mean((2, 3)),
        ["reduced"] * 3 + ["window"],
        r"attends from all tokens to fewer, spatially reduced keys \(256×4 in layer 0\)",
        (16, 16),
    ),
    "mask2former": Dense(
        mask2former,
        lambda model, pixels: model(pixels).class_queries_logits[:, 1],
        ["window"] * 4 + ["cross", "query"] * 2,
        WINDOWS,
        (16, 16),
    ),
    "dpt": Dense(
        dpt, lambda model, pixels: model(pixels).logits[:, :, 3:9, 2:7].mean((2, 3)), ["tokens"] * 4, None, (4, 4)
    ),
    "sam": Dense(
        sam,
        lambda model, pixels: model(pixels).last_hidden_state[:, :, 1, 2],
        ["window", "tokens", "window", "window"],
        WINDOWS,
        (4, 4),
    ),
    "rt-detr": Dense(
        rt_detr,
        lambda model, pixels: model(pixels).logits[:, 1],
        ["tokens", "unrelated", "query"],
        "6 queries of this model's decoder read the image without a matrix of attention",
        (2, 2),
    ),
    "yolos": Dense(yolos, lambda model, pixels: model(pixels).logits[:, 1], ["tokens"] * 4, None, (4, 4)),
}


def photos() -> Tensor:
    return torch.randn(2, 3, SIZE, SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@functools.cache
def dense(name: str) -> cv.Model:
    case = DENSE[name]
    return cv.wrap(strange(lambda: Scores(case.make(), case.read)).double(), size=SIZE, classifier=True)


@pytest.mark.parametrize("name", DENSE)
def test_kinds_of_attention_are_recognised(name: str) -> None:
    structure = model_structure(dense(name), photos())
    assert [site.kind for site in structure.sites] == DENSE[name].kinds
    assert structure.layout is not None
    assert structure.layout.grid == DENSE[name].grid
    assert structure.in_order


def test_tokens_that_depend_on_the_whole_image_are_taken_in_order() -> None:
    """A deep CNN before two by two tokens: the centre of what a token depends on says nothing of its cell."""
    module = dense("rt-detr").module
    for seed in range(4):
        pixels = torch.randn(1, 3, SIZE, SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        assert model_structure(cv.wrap(module, size=SIZE), pixels).in_order


def test_two_way_attention_is_recognised() -> None:
    """SAM's mask decoder: prompts attend to each other and to the image, and the image to the prompts."""
    sizes = {"hidden_size": 24, "image_size": SIZE, "patch_size": 16}
    vision = hf.SamVisionConfig(
        **sizes, output_channels=24, num_hidden_layers=2, num_attention_heads=3, mlp_dim=32, global_attn_indexes=[0, 1],
        num_pos_feats=12,
    )  # fmt: skip
    decoder = hf.SamMaskDecoderConfig(
        hidden_size=24, mlp_dim=32, num_hidden_layers=1, num_attention_heads=3, iou_head_hidden_dim=16
    )
    config = hf.SamConfig(
        vision_config=vision, prompt_encoder_config=hf.SamPromptEncoderConfig(**sizes), mask_decoder_config=decoder
    )

    def masks(model: nn.Module, pixels: Tensor) -> Tensor:
        points = torch.full((len(pixels), 1, 1, 2), 20.0, dtype=pixels.dtype)
        return model(pixels, input_points=points).pred_masks[:, 0].mean((2, 3))

    model = cv.wrap(strange(lambda: Scores(hf.SamModel(config), masks)).double(), size=SIZE, classifier=True)
    structure = model_structure(model, photos())
    assert [site.kind for site in structure.sites] == ["tokens"] * 2 + ["query", "cross", "reverse", "cross"]
    for method in ("rollout", "genatt", "raw-attention"):
        with pytest.raises(NotApplicable, match="attend to the queries of its decoder too"):
            cv.explain(model, photos(), method, target=1)
    assert {"ixg", "gradcam", "attnlrp+plus"} == set(cv.compare(model, photos(), ["ixg", "gradcam", "attnlrp+plus"], 1))


@pytest.mark.parametrize("name", DENSE)
def test_attention_methods_work_or_say_why_not(name: str) -> None:
    refusal = DENSE[name].refusal
    for method in ("rollout", "genatt"):
        if refusal is None:
            assert cv.explain(dense(name), photos(), method, target=TARGET).maps.any()
        else:
            with pytest.raises(NotApplicable, match=refusal):
                cv.explain(dense(name), photos(), method, target=TARGET)


@pytest.mark.parametrize("name", DENSE)
def test_every_method_gives_a_map_or_a_reason(name: str) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".* is zero everywhere")
        comparison = cv.compare(
            dense(name), photos(), [*QUICK, "attnlrp+plus", "leave-one-out"], target=TARGET, skip=True
        )
    for method, explanation in comparison.items():
        assert explanation.maps.isfinite().all(), method
    rules = {"ixg", "attnlrp", "attnlrp+plus", "reslrp", "lrp", "decompx", "gradcam", "saliency", "leave-one-out"}
    assert rules <= set(comparison)
    assert all(comparison[method].maps.any() for method in rules - {"gradcam"})  # a ReLU may leave nothing


@pytest.mark.parametrize("name", DENSE)
def test_gradients_are_those_of_autograd(name: str) -> None:
    """At the first layer's tokens, taken from the model by a hook on that block, and at the pixels."""
    model, pixels, inputs = dense(name), photos().requires_grad_(), list[Tensor]()
    block = model_structure(model, photos()).layers[0].block
    assert block is not None
    hook = block.register_forward_pre_hook(
        lambda module, args, kwargs: inputs.append((args or tuple(kwargs.values()))[0]), with_kwargs=True
    )
    score = model.module(pixels)[:, TARGET].sum()
    hook.remove()
    dpixels, dx = torch.autograd.grad(score, [pixels, inputs[0]])
    channels = 1 if inputs[0].ndim == 4 and inputs[0].shape[2:] == DENSE[name].grid else -1  # [B, d, rows, cols]
    tokens = (inputs[0].detach() * dx).sum(channels)  # [B, N] or [B, rows, cols]
    layout = model_structure(model, photos()).layout
    assert layout is not None
    patches = tokens.flatten(1)[:, layout.patch_slice].reshape(2, *DENSE[name].grid)
    comparison = cv.compare(model, photos(), ["ixg", "saliency(level=pixel)"], target=TARGET)
    assert_same(comparison["ixg"].maps, patches)
    assert_same(comparison["saliency(level=pixel)"].maps, dpixels.abs().amax(1))


@pytest.mark.parametrize("name", ["segformer", "yolos", "sam"])
def test_relevance_is_conserved_under_the_linear_rules(name: str) -> None:
    """Without biases the tokens of the first layer, others than patches included, add up to the score."""
    case = DENSE[name]
    module = strange(lambda: Scores(case.make(), case.read)).double()
    with torch.no_grad():
        for key, parameter in module.named_parameters():
            if key.endswith("bias") or "mid_position" in key:  # YOLOS adds positions between its layers
                parameter.zero_()
    tr = cv.trace(cv.wrap(module, size=SIZE, classifier=True), photos(), TARGET, rules="linear")
    parts = (tr.layers[0].x * tr.layers[0].dx).flatten(1)
    assert_same(parts.sum(1), tr.logits[:, TARGET], magnitude=float(parts.abs().sum(1).max()))


def test_images_of_a_batch_stay_apart_in_a_decoder_of_sequence_first() -> None:
    """Mask2Former's decoder works on [queries, images, channels], its backbone on [images, tokens, channels]."""
    model = dense("mask2former")
    for method in ("lrp", "reslrp", "attnlrp"):
        together = cv.explain(model, photos(), method, target=TARGET).maps
        alone = cv.explain(model, photos()[1:], method, target=TARGET).maps
        assert_same(together[1:], alone, label=method)
