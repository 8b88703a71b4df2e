"""transformers' models that are no image classifiers: each works, or `Model.returns` says what it returns."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from transformers.models.auto import modeling_auto

import clairvit as cv
from clairvit.errors import BadInput, ClairError, NotApplicable
from clairvit.models.sources import hf as hf_source
from clairvit.models.sources.adapters import Backbone, UnmaskedEncoder
from clairvit.models.sources.hf_outputs import no_scores
from clairvit.tracing.structure import model_structure
from helpers.rounding import assert_same
from helpers.transformers_names import vit_layers

SIZE = 64
VIT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "image_size": SIZE,
    "patch_size": 16,
}
TEXT = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 99}


def segformer() -> Any:
    widths = {"hidden_sizes": [8, 16, 32, 32], "num_attention_heads": [1, 1, 2, 2], "depths": [2, 2, 2, 2]}
    return hf.SegformerConfig(**widths, decoder_hidden_size=16, num_labels=5)


def swin(**more: Any) -> Any:
    return hf.SwinConfig(
        embed_dim=16, depths=[1, 1, 1, 1], num_heads=[1, 1, 2, 2], window_size=4, image_size=SIZE, **more
    )


def mask2former() -> nn.Module:
    stages = swin(out_features=["stage1", "stage2", "stage3", "stage4"])
    narrow = dict.fromkeys(("hidden_dim", "mask_feature_size", "feature_size"), 32)
    config = hf.Mask2FormerConfig(
        backbone_config=stages,
        **narrow,
        encoder_feedforward_dim=32,
        dim_feedforward=32,
        num_attention_heads=2,
        encoder_layers=1,
        decoder_layers=2,
        num_queries=5,
        num_labels=5,
    )
    return hf.Mask2FormerForUniversalSegmentation(config)


def dpt() -> Any:
    return hf.DPTConfig(
        **(VIT | {"num_hidden_layers": 4}),
        backbone_out_indices=[0, 1, 2, 3],
        neck_hidden_sizes=[8, 8, 8, 8],
        fusion_hidden_size=8,
        num_labels=5,
    )


def llava() -> Any:
    vision = hf.CLIPVisionConfig(**VIT, projection_dim=16)
    return hf.LlavaConfig(vision_config=vision, text_config=hf.LlamaConfig(**TEXT))


def encoder_decoder() -> nn.Module:
    decoder = hf.BertConfig(**TEXT, is_decoder=True, add_cross_attention=True)
    return hf.VisionEncoderDecoderModel(
        hf.VisionEncoderDecoderConfig.from_encoder_decoder_configs(hf.ViTConfig(**VIT), decoder)
    )


def clip() -> Any:
    return hf.CLIPConfig(text_config=TEXT, vision_config=VIT, projection_dim=16)


def sam() -> Any:
    vision = hf.SamVisionConfig(**{**VIT, "output_channels": 16}, global_attn_indexes=[1], window_size=2)
    return hf.SamConfig(vision_config=vision)


# What is wrapped -> what its refusal says, and a module that follows the advice (None: there is nothing to follow)
Refused = tuple[Callable[[], nn.Module], str, Callable[[nn.Module, Tensor], Tensor] | None]
REFUSED: dict[str, Refused] = {
    "segformer": (
        lambda: hf.SegformerForSemanticSegmentation(segformer()),
        "class scores for every pixel",
        lambda model, pixels: model(pixels).logits.mean((2, 3)),
    ),
    "mask2former": (
        mask2former,
        "a mask and class scores for each of its queries",
        lambda model, pixels: model(pixels).class_queries_logits[:, 0],
    ),
    "yolos": (
        lambda: hf.YolosForObjectDetection(
            hf.YolosConfig(**(VIT | {"image_size": [SIZE, SIZE]}), num_detection_tokens=4, num_labels=5)
        ),
        "a box and class scores for each of its queries",
        lambda model, pixels: model(pixels).logits[:, 0],
    ),
    "dpt": (
        lambda: hf.DPTForDepthEstimation(dpt()),
        "a depth for every pixel",
        lambda model, pixels: model(pixels).predicted_depth.mean((1, 2))[:, None],
    ),
    "dpt segmentation": (
        lambda: hf.DPTForSemanticSegmentation(dpt()),
        "class scores for every pixel",
        lambda model, pixels: model(pixels).logits.mean((2, 3)),
    ),
    "backbone": (
        lambda: hf.SwinBackbone(swin()),
        "a list of feature maps",
        lambda model, pixels: model(pixels).feature_maps[-1].mean((2, 3)),
    ),
    "clip": (
        lambda: hf.CLIPModel(clip()),
        "compares images with texts and needs both",
        lambda model, pixels: getattr(out := model.get_image_features(pixels), "pooler_output", out),
    ),
    "mae": (lambda: hf.ViTMAEForPreTraining(hf.ViTMAEConfig(**VIT)), "reconstructed patches", None),
    "masked image": (lambda: hf.ViTForMaskedImageModeling(hf.ViTConfig(**VIT)), "reconstructed patches", None),
    "llava": (lambda: hf.LlavaForConditionalGeneration(llava()), "returns text", None),
    "llava, bare": (lambda: hf.LlavaModel(llava()), "needs text or other tokens", None),
    "encoder-decoder": (encoder_decoder, "returns text", None),
    "sam": (lambda: hf.SamModel(sam()), "masks for points or boxes", None),
}
# A part that the advice names -> the part
PARTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "mae": lambda model: model.base_model,
    "masked image": lambda model: model.base_model,
    "llava": lambda model: model.model.vision_tower,
    "encoder-decoder": lambda model: model.get_encoder(),
    "sam": lambda model: model.vision_encoder,
}


def built(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make().eval()


def pixels(batch: int = 2, dtype: torch.dtype = torch.float32) -> Tensor:
    drawn = torch.randn(batch, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return drawn.to(dtype)


class Following(nn.Module):
    """The user's module that follows the advice."""

    def __init__(self, model: nn.Module, forward: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.model, self.score = model, forward

    def forward(self, images: Tensor) -> Tensor:
        return self.score(self.model, images)


def explains(model: cv.Model) -> set[str]:
    """The methods that give a map; no exception is anybody else's."""
    target: Any = 0 if model.classifier else lambda embedding: embedding[:, 0]
    comparison = cv.compare(model, pixels(), ["rollout", "genatt", "ixg", "attnlrp", "saliency"], target, skip=True)
    assert all(explanation.maps.isfinite().all() for explanation in comparison.values())
    return set(comparison)


@pytest.mark.parametrize("kind", REFUSED)
def test_without_a_target_the_error_says_what_the_model_returns(kind: str) -> None:
    make, words, _ = REFUSED[kind]
    module = built(make)
    with pytest.raises(NotApplicable, match=re.escape(words)) as error:
        cv.explain(cv.wrap(module, size=SIZE), pixels())
    message = str(error.value)
    assert message.startswith(type(module).__name__)
    assert re.search(r"\. (Name|Say|Pass|Explain|Use) ", message), "what to do"


READ = [kind for kind, (_, _, follow) in REFUSED.items() if follow is not None and kind != "clip"]  # CLIP needs texts


@pytest.mark.parametrize("kind", READ)
def test_a_function_reads_what_the_model_returns(kind: str) -> None:
    """A target of the raw output gives what the user's own module around the model gives."""
    make, _, follow = REFUSED[kind]
    assert follow is not None
    module = built(make).double()
    images = pixels(dtype=torch.float64)
    wrapped = cv.wrap(Following(module, follow), size=SIZE, classifier=True)
    expected = cv.explain(wrapped, images, "saliency", target=0).maps
    seen: list[Any] = []

    def score(output: Any) -> Tensor:
        seen.append(output)
        return follow(lambda _: output, images[: len(output[0])])[:, 0]  # type: ignore[arg-type]

    explained = cv.explain(cv.wrap(module, size=SIZE), images, "saliency", target=cv.Output(score))
    assert_same(explained.maps, expected)
    assert explained.probabilities == (None, None)
    assert not any(isinstance(output, Tensor) for output in seen), "the raw output"


@pytest.mark.parametrize("kind", PARTS)
def test_the_part_that_the_advice_names_works(kind: str) -> None:
    model = cv.wrap(PARTS[kind](built(REFUSED[kind][0])), size=SIZE)
    assert not model.classifier
    assert {"ixg", "saliency"} <= explains(model)


# ViTMAE masks three quarters of the patches and shuffles the rest.


def test_mae_takes_every_patch_in_order() -> None:
    module = built(lambda: hf.ViTMAEModel(hf.ViTMAEConfig(**VIT))).double()
    model = cv.wrap(module)
    images = pixels(dtype=torch.float64)
    assert isinstance(model.module, UnmaskedEncoder)
    embedded = module.embeddings.patch_embeddings(images) + module.embeddings.position_embeddings[:, 1:]
    cls = module.embeddings.cls_token + module.embeddings.position_embeddings[:, :1]
    tokens = torch.cat([cls.expand(2, -1, -1), embedded], 1)
    for layer in vit_layers(module):
        out = layer(tokens)
        tokens = out[0] if isinstance(out, tuple) else out
    assert_same(model.logits(images).detach(), module.layernorm(tokens)[:, 0].detach())
    assert {"rollout", "genatt", "ixg", "attnlrp", "saliency"} <= set(
        cv.compare(model, images, ["rollout", "genatt", "ixg", "attnlrp", "saliency"], lambda z: z[:, 0])
    )
    plan = model_structure(model, images)
    assert plan.layout is not None
    assert plan.layout.grid == (4, 4)
    assert plan.in_order


def test_mae_stays_as_it_was_also_after_an_error() -> None:
    module = built(lambda: hf.ViTMAEModel(hf.ViTMAEConfig(**VIT, mask_ratio=0.6)))
    model = cv.wrap(module)
    first = cv.explain(model, pixels(), "rollout").maps
    assert torch.equal(first, cv.explain(model, pixels(), "rollout").maps)
    assert module.config.mask_ratio == 0.6
    with pytest.raises(BadInput):
        cv.explain(model, pixels()[..., :40], "rollout")
    assert module.config.mask_ratio == 0.6
    assert module(pixels()).last_hidden_state.shape[1] == 1 + int(16 * 0.4)


@pytest.mark.parametrize(
    "make",
    [
        lambda: hf.ViTModel(hf.ViTConfig(**VIT)),
        lambda: hf.ViTModel(hf.ViTConfig(**VIT), add_pooling_layer=False),
        lambda: hf.Dinov2Model(hf.Dinov2Config(**{k: v for k, v in VIT.items() if k != "intermediate_size"})),
        lambda: hf.CLIPVisionModelWithProjection(hf.CLIPVisionConfig(**VIT, projection_dim=16)),
        lambda: hf.DPTModel(dpt()),
    ],
)
def test_bare_encoders_work(make: Callable[[], nn.Module]) -> None:
    module = built(make)
    model = cv.wrap(module)
    assert not model.classifier
    assert model.name == type(module).__name__
    assert {"rollout", "genatt", "ixg", "saliency"} <= explains(model)


def test_a_projected_embedding_is_the_one_explained() -> None:
    module = built(lambda: hf.CLIPVisionModelWithProjection(hf.CLIPVisionConfig(**VIT, projection_dim=16)))
    assert torch.equal(cv.wrap(module).logits(pixels()), module(pixels()).image_embeds)


def test_without_a_pooler_it_is_the_class_token_or_the_mean() -> None:
    vit = built(lambda: hf.ViTModel(hf.ViTConfig(**VIT), add_pooling_layer=False))
    assert isinstance(cv.wrap(vit).module, Backbone)
    assert torch.equal(cv.wrap(vit).logits(pixels()), vit(pixels()).last_hidden_state[:, 0])
    ijepa = built(lambda: hf.IJepaModel(hf.IJepaConfig(**VIT)))
    assert torch.equal(cv.wrap(ijepa).logits(pixels()), ijepa(pixels()).last_hidden_state.mean(1))
    maps = built(lambda: hf.SegformerModel(segformer()))
    assert torch.equal(cv.wrap(maps).logits(pixels()), maps(pixels()).last_hidden_state.mean((2, 3)))


# SegFormer: every token attends, to fewer keys.


def test_reduced_keys_are_not_called_channels() -> None:
    model = cv.wrap(built(lambda: hf.SegformerForImageClassification(segformer())), size=SIZE)
    plan = model_structure(model, pixels())
    assert [part.kind for part in plan.sites] == [*["reduced"] * 6, *["window"] * 2]
    assert plan.layout is not None
    assert plan.layout.grid == (16, 16)
    for method in ("rollout", "genatt+layer:0"):
        with pytest.raises(NotApplicable) as error:
            cv.explain(model, pixels(), method, target=1)
        assert "channels" not in str(error.value)
    with pytest.raises(NotApplicable, match="to fewer, spatially reduced keys"):
        cv.explain(model, pixels(), "genatt+layer:0", target=1)
    assert cv.explain(model, pixels(), "ixg", target=1).maps.shape == (2, 16, 16)


# Loading


PROCESSOR = {"image_processor_type": "ViTImageProcessor", "size": {"height": SIZE, "width": SIZE}}


@pytest.mark.parametrize("kind", ["segformer", "yolos", "dpt", "mask2former", "llava", "encoder-decoder", "sam"])
def test_load_says_what_a_checkpoint_returns(tmp_path: Path, kind: str) -> None:
    make, words, _ = REFUSED[kind]
    module = built(make)
    module.save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PROCESSOR), encoding="utf-8")
    model = cv.load(f"hf:{tmp_path}")
    assert words in model.returns
    assert type(model.module) is type(module)
    assert not model.classifier
    with pytest.raises(NotApplicable, match=re.escape(words)):
        cv.explain(model, pixels())


@pytest.mark.parametrize("name", ["llava", "detr", "yolos", "mask2former", "sam", "bert"])
def test_load_refuses_types_without_a_row_of_scores(name: str) -> None:
    with pytest.raises(NotApplicable):
        cv.load(f"hf:{name}", pretrained=False)


def test_load_takes_the_encoder_of_a_masked_autoencoder(tmp_path: Path) -> None:
    built(lambda: hf.ViTMAEForPreTraining(hf.ViTMAEConfig(**VIT))).save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PROCESSOR), encoding="utf-8")
    model = cv.load(f"hf:{tmp_path}")
    assert isinstance(model.module, UnmaskedEncoder)
    assert not model.classifier
    assert {"rollout", "ixg", "saliency"} <= explains(model)


# All of transformers' vision models

_TASKS = (
    *("IMAGE_CLASSIFICATION", "IMAGE", "BACKBONE", "MASKED_IMAGE_MODELING", "ZERO_SHOT_IMAGE_CLASSIFICATION"),
    *("OBJECT_DETECTION", "ZERO_SHOT_OBJECT_DETECTION", "SEMANTIC_SEGMENTATION", "UNIVERSAL_SEGMENTATION"),
    *("INSTANCE_SEGMENTATION", "IMAGE_SEGMENTATION", "DEPTH_ESTIMATION", "MASK_GENERATION", "IMAGE_TO_IMAGE"),
    *("KEYPOINT_DETECTION", "KEYPOINT_MATCHING", "VIDEO_CLASSIFICATION", "CAUSAL_IMAGE_MODELING"),
    *("IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "VISUAL_QUESTION_ANSWERING", "DOCUMENT_QUESTION_ANSWERING"),
)
TOKENS_OR_TEXT = {"ImageGPTForImageClassification", "ShieldGemma2ForImageClassification"}


def vision_classes() -> list[str]:
    names = set()
    for task in _TASKS:
        for entry in getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES", {}).values():
            names |= set(entry) if isinstance(entry, tuple) else {entry}
    return sorted(name for name in names if hasattr(hf, name))


def test_every_vision_class_works_or_raises_with_a_reason() -> None:
    classes = vision_classes()
    assert len(classes) > 100
    taken = set()
    for name in classes:
        model_class = getattr(hf, name)
        try:
            config = model_class.config_class()
        except (TypeError, ValueError, AttributeError, ImportError, OSError):  # no defaults, or one to download
            config = None
        try:
            reason = no_scores(model_class, config)
        except NotApplicable as error:
            reason = str(error)
        if not reason:
            taken.add(name)
        else:
            assert reason.startswith(f"{name} "), reason
            assert reason.endswith("."), reason
            assert reason.count(". ") == 1, reason
    classifiers = {name for name in classes if "ForImageClassification" in name}
    assert classifiers - taken == TOKENS_OR_TEXT & classifiers
    others = {name for name in taken - classifiers if re.search("For(?!VideoClassification)[A-Z]", name)}
    assert not others, "a task that returns something else"


def shrunk(config: Any) -> Any:
    """The configuration with the numbers that most vision models share made small."""
    small = {**VIT, "embed_dim": 16, "num_heads": 2, "num_layers": 2, "num_labels": 5, "projection_dim": 16}
    for name, value in small.items():
        if isinstance(getattr(config, name, None), int):
            setattr(config, name, value)
    if isinstance(getattr(config, "depths", None), list | tuple):
        config.depths = [1] * len(config.depths)
    return config


# Those that are small once shrunk; the others differ by their own numbers only, or need packages of their own
SMALL = (
    *("BeitForImageClassification", "Data2VecVisionForImageClassification", "DeiTForImageClassification"),
    *("DeiTForImageClassificationWithTeacher", "Dinov2ForImageClassification", "IJepaForImageClassification"),
    *("Dinov2WithRegistersForImageClassification", "ViTForImageClassification", "ViTMSNForImageClassification"),
    *("Aimv2VisionModel", "BeitModel", "CLIPVisionModel", "Data2VecVisionModel", "DeiTModel"),
    *("DINOv3ViTModel", "IJepaModel", "MLCDVisionModel", "PixioModel", "SiglipVisionModel", "ViTMSNModel"),
)
WITHOUT_ATTENTION = (
    *("FocalNetForImageClassification", "SwiftFormerForImageClassification", "PPLCNetForImageClassification"),
    *("MobileNetV2ForImageClassification", "PvtForImageClassification", "SegformerForImageClassification"),
)


@pytest.mark.parametrize("name", [name for name in (*SMALL, *WITHOUT_ATTENTION) if hasattr(hf, name)])
def test_accepted_classes_can_be_explained(name: str) -> None:
    model_class = getattr(hf, name)
    model = cv.wrap(built(lambda: model_class(shrunk(model_class.config_class()))), size=SIZE)
    methods = explains(model)
    assert "saliency" in methods
    assert name not in SMALL or {"rollout", "ixg"} <= methods


def test_errors_are_clair_errors() -> None:
    """The user's subclass speaks for itself: it is taken, and what it returns is looked at later."""

    class Odd(hf.ViTForMaskedImageModeling):
        pass

    model = cv.wrap(built(lambda: Odd(hf.ViTConfig(**VIT))))
    with pytest.raises(ClairError):
        cv.explain(model, pixels(), "ixg", target=1)


def test_bad_input_is_not_taken_for_a_missing_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """BadInput is a ValueError: where those of transformers mean "no processor", ours must reach the user."""
    hf.ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(tmp_path)
    module = nn.Identity()
    module.config = SimpleNamespace(name_or_path=str(tmp_path))
    saved = hf_source.saved_preprocess(module)
    assert saved is not None
    assert saved.size == (32, 32)

    def raising(error: Exception) -> None:
        def read_processor(*_: object) -> None:
            raise error

        monkeypatch.setattr(hf_source, "read_processor", read_processor)

    raising(ValueError("no size"))
    assert hf_source.saved_preprocess(module) is None
    raising(NotApplicable("It resizes by a token budget."))
    assert hf_source.saved_preprocess(module) is None
    raising(BadInput("std=0 was given; expected positive numbers."))
    with pytest.raises(BadInput, match=r"^std=0 was given"):
        hf_source.saved_preprocess(module)
