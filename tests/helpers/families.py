"""Families of models, each as a tiny one with random weights, and which methods and targets run on it.

    from helpers.families import FAMILIES, what_runs

A new family is one line of FAMILIES. `python docs/generate_what_works.py` prints docs/what-works.md from them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import timm
import torch
import transformers as hf
from timm.models.mlp_mixer import MlpMixer
from torch import Tensor, nn

import clairvit as cv
from clairvit.methods.registry import list_methods
from helpers import dense_models, tiny_pairs, vision_language
from helpers.custom_vits import CLASSES
from helpers.lora import lora
from helpers.tiny_models import STRANGE, cnn, double, strange

# Column -> family of the registry, whose quick methods are all run; perturbation methods are slow, so a few are.
COLUMNS = {
    "attention": "attention",
    "gradient × attention": "gradient × attention",
    "gradient": "gradient",
    "CAM": "cam",
    "LRP": "relevance",
    "decomposition": "decomposition",
}
PERTURBATION = ("leave-one-out", "occlusion", "rise(samples=8)", "atman")


NEURON = {"Neuron": cv.Neuron(0, 0)}
SIMILAR = {"Similar": lambda images: cv.Similar(images.flip(-1))}
CLASSIFIER = {"class": 0, "Contrast": cv.Contrast(0, 1), **SIMILAR, **NEURON}


@dataclass(frozen=True)
class Family:
    """One row: how its model and images are made, and the targets that it is asked for, the first by every method."""

    name: str
    examples: str  # where such models come from
    make: Callable[[], tuple[cv.Model, Any]]
    targets: Mapping[str, Any] = field(
        default_factory=lambda: CLASSIFIER
    )  # name -> target, or a function of the images
    quick: bool = False  # part of the ordinary tests


@dataclass(frozen=True)
class Runs:
    """What ran: per column the methods that gave a map, and those that were refused with their reason."""

    maps: dict[str, list[str]]
    refused: dict[str, dict[str, str]]
    targets: dict[str, str]  # name -> "" or the reason of its refusal


def methods_of(column: str) -> list[str]:
    """Return the methods that are run for a column."""
    if column == "perturbation":
        return list(PERTURBATION)
    return [method.name for method in list_methods() if method.family == COLUMNS[column] and not method.slow]


def what_runs(family: Family, chosen: Collection[str] | None = None) -> Runs:
    """Run the methods of every column with the family's first target, and a gradient method with each target.

    `chosen` are the methods that are run, if not all.
    """
    model, images = family.make()
    model = replace(model, name="the model")
    columns = {
        column: [method for method in methods_of(column) if chosen is None or method in chosen]
        for column in (*COLUMNS, "perturbation")
    }
    listed = [method for methods in columns.values() for method in methods]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", cv.ClairWarning)  # maps of zeros say so
        target_values = {
            name: target(images) if callable(target) else target for name, target in family.targets.items()
        }
        many = cv.compare(model, images, listed, target=next(iter(target_values.values())), skip=True)
        targets = {name: _reason(model, images, target) for name, target in target_values.items()}
    return Runs(
        {column: [method for method in methods if method in many] for column, methods in columns.items()},
        {column: {m: many.skipped[m] for m in methods if m in many.skipped} for column, methods in columns.items()},
        targets,
    )


def _reason(model: cv.Model, images: Any, target: Any) -> str:
    try:
        maps = cv.explain(model, images, "saliency", target=target).maps
    except cv.ClairError as error:
        return str(error)
    assert maps.isfinite().all()
    return ""


def table_row(family: Family, runs: Runs) -> str:
    """Return the row of the table in Markdown."""
    cells = [
        "yes" if not refused else f"{len(runs.maps[column])} of {len(runs.maps[column]) + len(refused)}"
        for column, refused in runs.refused.items()
    ]
    cells = ["no" if cell.startswith("0 of") else cell for cell in cells]
    targets = ", ".join(name for name, reason in runs.targets.items() if not reason)
    return f"| {' | '.join([f'**{family.name}**', family.examples, *cells, targets])} |"


def sentence(method: str, reason: str) -> str:
    """Return a refusal without the name of the method, which the page lists before it."""
    return reason.replace(f"'{method}'", "The method").replace(f"'{method.partition('(')[0]}'", "The method")


def reasons(family: Family, runs: Runs) -> tuple[str, ...]:
    """Return one line per reason of refusal: the methods, or the targets, and the sentence that users see."""
    by_reason: dict[str, list[str]] = {}
    for column, refused in runs.refused.items():
        sentences = {method: sentence(method, reason) for method, reason in refused.items()}
        whole = len(set(sentences.values())) == 1 and not runs.maps[column]
        for method, reason in list(sentences.items())[: 1 if whole else None]:
            by_reason.setdefault(reason, []).append(f"all of *{column}*" if whole else f"`{method}`")
    for target, reason in runs.targets.items():
        if reason:
            by_reason.setdefault(reason, []).append(f"target {target}")
    return tuple(f"* {', '.join(names)}: {reason}" for reason, names in by_reason.items())


# The families


def _zoo(name: str) -> Callable[[], tuple[cv.Model, Tensor]]:
    return lambda: double(name, batch=1)


def _module(make: Callable[[], nn.Module], side: int | tuple[int, int] = 32) -> Callable[[], tuple[cv.Model, Tensor]]:
    """Return a builder of a classifier with random weights, and one image of noise."""
    size = (side, side) if isinstance(side, int) else side

    def build_family() -> tuple[cv.Model, Tensor]:
        model = cv.wrap(strange(make).double(), size=size, mean=0.5, std=0.5)
        return model, noise(size)

    return build_family


def noise(size: tuple[int, ...], channels: int = 3) -> Tensor:
    """Return one image of noise [1, channels, H, W]."""
    return torch.randn(1, channels, *size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def _strange(name: str) -> Callable[[], tuple[cv.Model, Tensor]]:
    return _module(STRANGE[name].make, STRANGE[name].size)


def pvt() -> nn.Module:
    """Return PVT v2: four stages, keys made fewer by convolutions."""
    narrow: dict[str, Any] = {"embed_dims": (8, 16, 24, 32), "num_heads": (1, 2, 3, 4), "depths": (1, 1, 1, 1)}
    return timm.create_model("pvt_v2_b0", num_classes=CLASSES, **narrow)


def segformer() -> nn.Module:
    """Return SegFormer's classifier: four stages, keys made fewer by convolutions."""
    config = hf.SegformerConfig(
        hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1], num_attention_heads=[1, 1, 2, 2], num_labels=CLASSES
    )
    return hf.SegformerForImageClassification(config)


def convnext() -> nn.Module:
    """Return a ConvNeXt of four small stages."""
    return timm.create_model("convnext_atto", num_classes=CLASSES, depths=(1, 1, 1, 1), dims=(8, 8, 16, 16))


def mixer() -> nn.Module:
    """Return an MLP-Mixer: tokens without attention."""
    return MlpMixer(img_size=32, patch_size=8, embed_dim=16, num_blocks=2, num_classes=CLASSES)


def four_channels() -> tuple[cv.Model, Tensor]:
    """Return a ViT of images with a fourth channel, near infrared say."""
    options: dict[str, Any] = {"img_size": 32, "patch_size": 8, "in_chans": 4, "embed_dim": 24, "num_heads": 2}
    module = strange(lambda: timm.create_model("vit_tiny_patch16_224", depth=2, num_classes=CLASSES, **options))
    return cv.wrap(module.double(), size=32, mean=0.5, std=0.5), noise((32, 32), channels=4)


def _dense(make: Callable[[], nn.Module]) -> Callable[[], tuple[cv.Model, Tensor]]:
    return lambda: (dense_models.model_of(make), dense_models.images(1))


def siglip2() -> tuple[cv.Model, Tensor]:
    """Return a classifier of SigLIP 2 with images of any proportions."""
    tower = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision = {**tower, "patch_size": 8, "num_patches": 16}
    text = {**tower, "vocab_size": 20, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
    config = hf.Siglip2Config(vision_config=vision, text_config=text, num_labels=CLASSES)
    module = strange(lambda: hf.Siglip2ForImageClassification(config)).double()
    return cv.wrap(module, size=(24, 40), mean=0.5, std=0.5), noise((24, 40))


CLIP: dict[str, Any] = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
CLIP |= {"image_size": 32, "patch_size": 8, "num_frames": 6, "num_labels": CLASSES}


def _video(make: Callable[[], nn.Module]) -> tuple[cv.Model, Tensor]:
    """Return a model of clips and a clip of noise [1, frames, 3, H, W]."""
    clip = torch.randn(1, 6, 3, 32, 32, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return cv.wrap(strange(make).double(), size=32, mean=0.5, std=0.5), clip


def videomae() -> tuple[cv.Model, Tensor]:
    """Return a VideoMAE whose grid is 3 × 4 × 4: a token has two frames."""
    return _video(lambda: hf.VideoMAEForVideoClassification(hf.VideoMAEConfig(**CLIP, tubelet_size=2)))


def timesformer() -> tuple[cv.Model, Tensor]:
    """Return a TimeSformer of divided space-time attention."""
    return _video(lambda: hf.TimesformerForVideoClassification(hf.TimesformerConfig(**CLIP)))


def vjepa2() -> tuple[cv.Model, Tensor]:
    """Return a V-JEPA 2 whose grid is 3 × 4 × 4, read by an attention pool."""
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "mlp_ratio": 1.5}
    clips = {"crop_size": 32, "patch_size": 8, "frames_per_clip": 6, "tubelet_size": 2}
    predictor = {"pred_hidden_size": 24, "pred_num_hidden_layers": 1, "pred_num_attention_heads": 2}
    config = hf.VJEPA2Config(**sizes, **clips, **predictor, num_pooler_layers=1, num_labels=CLASSES)
    return _video(lambda: hf.VJEPA2ForVideoClassification(config))


def _language(name: str) -> Callable[[], tuple[cv.Model, Tensor]]:
    """Return a builder of a vision-language model that is asked for the word after a text."""

    def build_family() -> tuple[cv.Model, Tensor]:
        module = vision_language.tiny_language_model(name, torch.float32)  # its norms are computed in float32 anyway
        model = cv.wrap(module, size=vision_language.SIDE, mean=0.5, std=0.5)
        text = vision_language.model_text(name, [1, 3], [4, 11, 12, 14])
        return model.with_inputs(**text), vision_language.images(dtype=torch.float32)

    return build_family


def _pair(name: str) -> Callable[[], tuple[cv.Model, Tensor]]:
    return lambda: (tiny_pairs.wrapped(name), tiny_pairs.pixels(1))


REGION = {"Region": cv.Region(0, box=(4, 8, 40, 36)), **NEURON}
DEPTH = {"Region": cv.Region(box=(4, 8, 40, 36)), **NEURON}
QUERY = {"Query": cv.Query(2, 1), **NEURON}
TEXT = {"Text": cv.Text("a red car"), "Contrast of texts": cv.Contrast(cv.Text("a cat"), cv.Text("a dog"))}
TEXT |= {**SIMILAR, **NEURON}
WORD = {
    "NextToken": cv.NextToken(token=9),
    "Contrast of tokens": cv.Contrast(cv.NextToken(token=9), cv.NextToken(token=10)),
    **NEURON,
}
EMBEDDING = {"channel": 0, **SIMILAR, **NEURON}
FAMILIES: list[Family] = [
    Family("ViT", "timm `vit_*`", _zoo("timm-vit"), quick=True),
    Family("ViT", "transformers `ViT*`", _zoo("hf-vit-sdpa")),
    Family("ViT", "torchvision `vit_*`", _zoo("torchvision-vit"), quick=True),
    Family("DeiT, two class tokens", "timm `deit_*_distilled_*`", _zoo("timm-deit-distilled")),
    Family("DeiT III", "timm `deit3_*`", _zoo("timm-deit3")),
    Family("BEiT", "timm `beit_*`", _zoo("timm-beit")),
    Family("EVA-02", "timm `eva02_*`", _zoo("timm-eva02")),
    Family("CaiT", "timm `cait_*`", _zoo("timm-cait")),
    Family("DINOv2", "transformers `Dinov2*`", _zoo("hf-dinov2-sdpa"), quick=True),
    Family("DINOv2 with registers", "timm `vit_*_reg4_dinov2`", _zoo("timm-dinov2-reg4")),
    Family("DINOv3", "timm `vit_*_dinov3`", _zoo("timm-dinov3")),
    Family("CLIP, image tower", "timm `vit_*_clip_*`", _zoo("timm-clip")),
    Family("CLIP, image tower", "open_clip", _zoo("open_clip-tower"), EMBEDDING),
    Family("CLIP, image tower", "transformers `CLIPVisionModel*`", _zoo("hf-clip-projection-sdpa"), EMBEDDING),
    Family("CLIP, both towers", "open_clip", _pair("open_clip"), TEXT),
    Family("CLIP, both towers", "transformers `CLIPModel`", _pair("CLIPModel"), TEXT, quick=True),
    Family("SigLIP, both towers", "transformers `SiglipModel`", _pair("SiglipModel"), TEXT),
    Family("SigLIP, image tower", "timm `vit_*_siglip_*`", _zoo("timm-siglip-map")),
    Family("SAM, image encoder with global attention", "timm `samvit_*`", _zoo("timm-sam")),
    Family("ViT of four channels", "timm, `in_chans=4`", four_channels),
    Family("PEFT, LoRA in every layer", "transformers `ViT*`", lambda: (cv.wrap(lora(), size=32), noise((32, 32)))),
    Family("SigLIP 2 of variable size", "transformers `Siglip2*`", siglip2),
    Family("Parallel blocks", "timm `vit_*_18x2_*`", _zoo("timm-parallel")),
    Family("Swin", "timm `swin_*`", _strange("swin"), quick=True),
    Family("Swin V2", "timm `swinv2_*`", _strange("swin-v2")),
    Family("MaxViT", "timm `maxvit_*`", _strange("maxvit")),
    Family("XCiT", "timm `xcit_*`", _strange("xcit")),
    Family("PVT v2", "timm `pvt_v2_*`", _module(pvt, 64)),
    Family("SegFormer, classifier", "transformers `SegformerForImageClassification`", _module(segformer, 64)),
    Family("SegFormer, segmenter", "transformers", _dense(dense_models.segformer), REGION),
    Family("DPT, segmenter", "transformers", _dense(dense_models.dpt_segmenter), REGION, quick=True),
    Family("DPT, depth", "transformers", _dense(dense_models.dpt_depth), DEPTH),
    Family("MaskFormer", "transformers", _dense(dense_models.maskformer), REGION),
    Family("Mask2Former", "transformers", _dense(dense_models.mask2former), REGION),
    Family("SAM with a box", "transformers", _dense(dense_models.sam), DEPTH),
    Family("DETR", "transformers", _dense(dense_models.detr), QUERY),
    Family("RT-DETR", "transformers", _dense(dense_models.rt_detr), QUERY),
    Family("YOLOS", "transformers", _dense(dense_models.yolos), QUERY),
    Family("VideoMAE", "transformers `VideoMAE*`", videomae),
    Family("TimeSformer", "transformers `Timesformer*`", timesformer),
    Family("V-JEPA 2", "transformers `VJEPA2*`", vjepa2),
    Family("LLaVA", "transformers `Llava*`", _language("llava"), WORD),
    Family("PaliGemma", "transformers `PaliGemma*`", _language("paligemma"), WORD),
    Family("Qwen2-VL", "transformers `Qwen2VL*`", _language("qwen2-vl"), WORD, quick=True),
    Family("Qwen2.5-VL", "transformers `Qwen2_5_VL*`", _language("qwen2.5-vl"), WORD),
    Family("SmolVLM", "transformers `SmolVLM*`", _language("smolvlm"), WORD),
    Family("Idefics3", "transformers `Idefics3*`", _language("idefics3"), WORD),
    Family("InternVL", "transformers `InternVL*`", _language("internvl"), WORD),
    Family("CNN", "torchvision, timm", _module(cnn), quick=True),
    Family("ConvNeXt", "timm `convnext_*`", _module(convnext, 64)),
    Family("MLP-Mixer", "timm `mixer_*`", _module(mixer)),
]
