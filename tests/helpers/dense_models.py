"""Tiny segmenters, depth models and detectors of transformers, with random weights from a seed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

import clairvit as cv
from helpers.shared_models import shared_model

SIZE = 64  # pixels
NAMES = ("cat", "dog", "sky", "sea", "tree")
_LABELS: dict[str, Any] = {
    "id2label": dict(enumerate(NAMES)),
    "label2id": {name: index for index, name in enumerate(NAMES)},
}
_VIT: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "image_size": SIZE,
    "patch_size": 16,
}


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    """Return a module with random weights from a fixed seed, in evaluation mode; no weight stays zero or tiny.

    Kernels of convolutions are as large as keeps the size of what goes through them: a token of a deep backbone then
    sees its place more than the rest of the image.
    """
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = build().eval()
        convolutions = {id(part.weight) for part in module.modules() if isinstance(part, nn.Conv2d)}
        kept = {id(part.weight) for part in module.modules() if isinstance(part, nn.BatchNorm2d)}
        for parameter in module.parameters():
            if id(parameter) in convolutions:
                nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)
            elif id(parameter) not in kept:
                nn.init.normal_(parameter, std=0.3 if parameter.ndim > 1 else 0.5)
    return module


def _dpt_config() -> Any:
    return hf.DPTConfig(
        **_VIT, backbone_out_indices=[0, 1, 2, 3], neck_hidden_sizes=[8, 8, 8, 8], fusion_hidden_size=8, **_LABELS
    )


def segformer() -> nn.Module:
    """Return SegFormer: four stages with reduced keys."""
    config = hf.SegformerConfig(
        hidden_sizes=[8, 8, 16, 16],
        depths=[1, 1, 1, 1],
        num_attention_heads=[1, 1, 2, 2],
        decoder_hidden_size=16,
        **_LABELS,
    )
    return seeded(lambda: hf.SegformerForSemanticSegmentation(config))


def dpt_segmenter() -> nn.Module:
    """Return DPT's segmenter on a plain ViT."""
    return seeded(lambda: hf.DPTForSemanticSegmentation(_dpt_config()))


def dpt_depth() -> nn.Module:
    """Return DPT's depth model on a plain ViT; its depths are positive, where its last ReLU has a gradient."""
    module: Any = seeded(lambda: hf.DPTForDepthEstimation(_dpt_config()))
    last = [layer for layer in module.head.head if isinstance(layer, nn.Conv2d)][-1]
    with torch.no_grad():
        last.weight.abs_()
        last.bias.abs_()
    return module  # type: ignore[no-any-return]


def _swin() -> Any:
    return hf.SwinConfig(
        embed_dim=16,
        depths=[1, 1, 1, 1],
        num_heads=[1, 1, 2, 2],
        window_size=4,
        image_size=SIZE,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )


def maskformer() -> nn.Module:
    """Return MaskFormer on Swin."""
    decoder = hf.DetrConfig(
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        num_queries=6,
    )
    config = hf.MaskFormerConfig(
        backbone_config=_swin(), decoder_config=decoder, fpn_feature_size=32, mask_feature_size=32, **_LABELS
    )
    return seeded(lambda: hf.MaskFormerForInstanceSegmentation(config))


def mask2former() -> nn.Module:
    """Return Mask2Former on Swin."""
    narrow = dict.fromkeys(("hidden_dim", "mask_feature_size", "feature_size"), 32)
    config = hf.Mask2FormerConfig(
        backbone_config=_swin(),
        **narrow,
        encoder_feedforward_dim=32,
        dim_feedforward=32,
        num_attention_heads=2,
        encoder_layers=1,
        decoder_layers=2,
        num_queries=5,
        **_LABELS,
    )
    return seeded(lambda: hf.Mask2FormerForUniversalSegmentation(config))


def sam() -> nn.Module:
    """Return SAM."""
    vision = hf.SamVisionConfig(
        hidden_size=16,
        output_channels=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        mlp_dim=32,
        image_size=SIZE,
        patch_size=16,
        window_size=2,
        global_attn_indexes=[1],
        num_pos_feats=12,
    )
    prompt = hf.SamPromptEncoderConfig(hidden_size=24, image_size=SIZE, patch_size=16)
    decoder = hf.SamMaskDecoderConfig(
        hidden_size=24, mlp_dim=32, num_hidden_layers=1, num_attention_heads=2, iou_head_hidden_dim=16
    )
    config = hf.SamConfig(vision_config=vision, prompt_encoder_config=prompt, mask_decoder_config=decoder)
    return seeded(lambda: hf.SamModel(config))


def sam2() -> nn.Module:
    """Return SAM 2 on a small Hiera."""
    hiera = hf.Sam2HieraDetConfig(
        hidden_size=16,
        num_attention_heads=1,
        image_size=[SIZE, SIZE],
        embed_dim_per_stage=[16, 32, 64, 128],
        num_attention_heads_per_stage=[1, 2, 4, 8],
        blocks_per_stage=[1, 1, 1, 1],
        global_attention_blocks=[],
        window_size_per_stage=[4, 2, 2, 2],
        window_positional_embedding_background_size=[4, 4],
    )
    vision = hf.Sam2VisionConfig(
        backbone_config=hiera,
        backbone_channel_list=[128, 64, 32, 16],
        fpn_hidden_size=16,
        backbone_feature_sizes=[[16, 16], [8, 8], [4, 4]],
    )
    prompt = hf.Sam2PromptEncoderConfig(hidden_size=16, image_size=SIZE)
    decoder = hf.Sam2MaskDecoderConfig(
        hidden_size=16, mlp_dim=16, num_attention_heads=2, iou_head_hidden_dim=16, num_hidden_layers=2
    )
    config = hf.Sam2Config(vision_config=vision, prompt_encoder_config=prompt, mask_decoder_config=decoder)
    return seeded(lambda: hf.Sam2Model(config))


def detr() -> nn.Module:
    """Return DETR on a small ResNet: softmax with "no object"."""
    backbone = hf.ResNetConfig(
        embedding_size=8,
        hidden_sizes=[8, 8, 16, 16],
        depths=[1, 1, 1, 1],
        layer_type="basic",
        out_features=["stage3"],
    )
    config = hf.DetrConfig(
        backbone_config=backbone,
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
        d_model=16,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        num_queries=7,
        **_LABELS,
    )
    return seeded(lambda: hf.DetrForObjectDetection(config))


def yolos() -> nn.Module:
    """Return YOLOS: a plain ViT with detection tokens after the patches; softmax with "no object"."""
    config = hf.YolosConfig(**(_VIT | {"image_size": [SIZE, SIZE]}), num_detection_tokens=6, **_LABELS)
    return seeded(lambda: hf.YolosForObjectDetection(config))


def rt_detr() -> nn.Module:
    """Return RT-DETR on a small ResNet: a sigmoid per class."""
    backbone = hf.RTDetrResNetConfig(
        embedding_size=8,
        hidden_sizes=[8, 8, 16, 16],
        depths=[1, 1, 1, 1],
        layer_type="basic",
        out_features=["stage2", "stage3", "stage4"],
    )
    config = hf.RTDetrConfig(
        backbone_config=backbone,
        encoder_hidden_dim=16,
        encoder_in_channels=[8, 16, 16],
        encoder_ffn_dim=16,
        encoder_attention_heads=2,
        d_model=16,
        decoder_in_channels=[16, 16, 16],
        decoder_ffn_dim=16,
        decoder_layers=2,
        decoder_attention_heads=2,
        num_queries=8,
        **_LABELS,
    )
    return seeded(lambda: hf.RTDetrForObjectDetection(config))


SEGMENTERS = {"segformer": segformer, "dpt": dpt_segmenter, "maskformer": maskformer, "mask2former": mask2former}
DENSE = SEGMENTERS | {"dpt depth": dpt_depth, "sam": sam, "sam2": sam2}
DETECTORS = {"detr": detr, "yolos": yolos, "rt_detr": rt_detr}


def model_of(build: Callable[[], nn.Module]) -> cv.Model:
    """Return a tiny model in float64; those of SEGMENTERS and DETECTORS are shared (`helpers/shared_models.py`)."""

    def wrapped() -> cv.Model:
        return cv.wrap(build().double(), size=SIZE, mean=0.5, std=0.5)

    def used() -> cv.Model:
        model = wrapped()
        with torch.no_grad():
            model.module(images(1))  # transformers hooks a model when it first runs
        return model

    return shared_model(build, used) if build in (*SEGMENTERS.values(), *DETECTORS.values()) else wrapped()


def images(count: int = 2, seed: int = 0) -> Tensor:
    """Return noise images [count, 3, SIZE, SIZE] in float64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 3, SIZE, SIZE, generator=generator, dtype=torch.float64)


def without_biases(module: nn.Module) -> nn.Module:
    """Return the module with every bias and every constant that is added between blocks set to zero."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith(("bias", "mid_position_embeddings")):
                parameter.zero_()
    return module
