"""Check models of cut patches (SigLIP 2, NaFlex): any image size, the processor's patches, every kind of method."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import transformers as hf
from PIL import Image
from torch import Tensor, nn

import clairvit as cv
from clairvit.errors import BadInput
from clairvit.models.images import prepare
from clairvit.models.sources.adapters import cut_patches, image_inputs
from helpers import tiny_pairs
from helpers.rounding import assert_same
from helpers.tiny_models import shaken

VISION = {
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 8,
    "num_patches": 16,
}
TEXT = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 20}
PATCH = 8


def classifier(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    config = hf.Siglip2Config(vision_config=VISION, text_config=TEXT, num_labels=5)
    module = hf.Siglip2ForImageClassification(config)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    return module.double().eval()


def encoder(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return hf.Siglip2VisionModel(hf.Siglip2VisionConfig(**VISION)).double().eval()


def pixels(height: int = 24, width: int = 40, count: int = 2) -> Tensor:
    return torch.randn(count, 3, height, width, generator=torch.Generator().manual_seed(1)).double()


def by_the_processor(image: Image.Image, **options: Any) -> dict[str, Tensor]:
    processor = hf.Siglip2ImageProcessor(patch_size=PATCH, max_num_patches=16)
    return dict(processor(image, return_tensors="pt", **options))


def test_patches_are_those_of_the_processor() -> None:
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (24, 40, 3), np.uint8))
    expected = by_the_processor(picture, do_resize=False)  # 15 patches of 16
    model = cv.wrap(encoder(), mean=0.5, std=0.5, size=(24, 40))
    image = prepare(picture, model).pixels
    inputs = image_inputs(encoder(), image)
    assert inputs["spatial_shapes"].tolist() == expected["spatial_shapes"].tolist() == [[3, 5]]
    torch.testing.assert_close(inputs["pixel_values"].float(), expected["pixel_values"][:, :15], rtol=0, atol=1e-6)


def test_a_square_photo_is_preprocessed_as_by_the_processor() -> None:
    """Both resize to 32 × 32, bilinear: the processor by torch, ours by Pillow, both rounded to eight bits."""
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8))
    model = cv.wrap(encoder(), mean=0.5, std=0.5)
    assert model.preprocess.size == (32, 32)
    expected = by_the_processor(picture)["pixel_values"]
    torch.testing.assert_close(cut_patches(prepare(picture, model).pixels, PATCH).float(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("size", [(32, 32), (24, 40)])
def test_scores_are_those_of_padded_patches(size: tuple[int, int]) -> None:
    """Padding to 16 patches under the mask gives what no padding gives."""
    images, module = pixels(*size), classifier()
    patches = cut_patches(images, PATCH)
    count = patches.shape[1]
    padded = torch.nn.functional.pad(patches, (0, 0, 0, 20 - count))
    mask = (torch.arange(20) < count).int().expand(2, -1)
    shapes = torch.tensor([[size[0] // PATCH, size[1] // PATCH]] * 2)
    expected = module(pixel_values=padded, pixel_attention_mask=mask, spatial_shapes=shapes).logits
    torch.testing.assert_close(cv.wrap(module).logits(images), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("size", [(32, 32), (24, 40)])
def test_gradients_are_those_of_autograd(size: tuple[int, int]) -> None:
    model, images = cv.wrap(classifier()), pixels(*size).requires_grad_(True)
    module: Any = model.module
    inputs = image_inputs(module.model, images)
    tokens = module.model.vision_model.embeddings(inputs["pixel_values"], inputs["spatial_shapes"])
    hidden = module.model.vision_model.encoder(inputs_embeds=tokens, attention_mask=None).last_hidden_state
    scores = module.model.classifier(module.model.vision_model.post_layernorm(hidden).mean(1))
    gradient, d_pixels = torch.autograd.grad(scores[:, 2].sum(), [tokens, images])
    grid = (size[0] // PATCH, size[1] // PATCH)
    maps = cv.explain(model, images.detach(), "ixg", target=2).maps
    torch.testing.assert_close(maps, (tokens * gradient).sum(-1).detach().reshape(2, *grid), rtol=1e-9, atol=1e-12)
    saliency = cv.explain(model, images.detach(), "saliency(level=pixel)", target=2).maps
    torch.testing.assert_close(saliency, d_pixels.abs().amax(1), rtol=1e-9, atol=1e-12)


METHODS = ["raw-attention", "rollout", "genatt", "legrad", "gradcam", "attnlrp+plus", "decompx", "reslrp", "lrp", "tam"]
METHODS += ["leave-one-out", "kernelshap", "rise", "occlusion", "smoothgrad(n=2)", "integrated-gradients(steps=3)"]


@pytest.mark.parametrize("method", METHODS)
def test_every_kind_of_method_works_on_a_non_square_grid(method: str) -> None:
    maps = cv.explain(classifier(), pixels(), method, target=1).maps
    assert maps.shape[1:] == (3, 5)
    assert maps.isfinite().all()
    assert maps.std() > 0


def test_tokens_are_removed_as_by_the_mask() -> None:
    """Leave-one-out by shorter sequences is the model's own attention mask over the removed patch."""
    model, images = cv.wrap(classifier()), pixels(count=1)
    module: Any = model.module
    inputs = image_inputs(module.model, images)
    full = module.model(**inputs).logits[:, 1]
    drops = []
    for patch in range(15):
        mask = torch.ones(1, 15, dtype=torch.int32)
        mask[0, patch] = 0
        drops.append(full - module.model(**(inputs | {"pixel_attention_mask": mask})).logits[:, 1])
    explanation = cv.explain(model, images, "leave-one-out(removal=token)", target=1, score="logit")
    torch.testing.assert_close(explanation.maps.flatten(1), torch.stack(drops, 1).detach(), rtol=1e-7, atol=1e-9)


def test_an_encoder_is_an_embedding_with_an_attention_pool() -> None:
    model = cv.wrap(encoder())
    assert not model.classifier
    expected = model.module.model(**image_inputs(encoder(), pixels())).pooler_output  # type: ignore[operator]
    torch.testing.assert_close(model.logits(pixels()), expected)
    assert cv.explain(model, pixels(), "rollout").maps.shape == (2, 3, 5)


def test_a_folder_is_loaded(tmp_path: Path) -> None:
    classifier().float().save_pretrained(tmp_path)  # type: ignore[operator]
    hf.Siglip2ImageProcessor(patch_size=PATCH, max_num_patches=16).save_pretrained(tmp_path)
    model = cv.load(f"hf:{tmp_path}")
    assert (model.preprocess.size, model.preprocess.mean) == ((32, 32), (0.5, 0.5, 0.5))
    assert cv.explain(model, "demo", "ixg").maps.shape == (1, 4, 4)
    wide = cv.load(f"hf:{tmp_path}", size=(24, 40))
    assert cv.explain(wide, "demo", "ixg").maps.shape == (1, 3, 5)


def test_a_pair_is_loaded_as_an_image_tower() -> None:
    model = cv.load("hf:siglip2", pretrained=False, size=(32, 48))
    assert model.preprocess.size == (32, 48)
    assert cv.explain(model, "demo", "rollout").maps.shape == (1, 2, 3)


def test_sizes_that_are_no_multiple_are_refused() -> None:
    with pytest.raises(BadInput, match=r"25 × 40 pixels were given; expected .* patch size 8, such as 32 × 40"):
        cv.explain(classifier(), pixels(25, 40))


@pytest.mark.parametrize("name", ["naflexvit_base_patch16_gap", "naflexvit_base_patch16_map"])
def test_timm_models_of_any_size(name: str) -> None:
    torch.manual_seed(0)
    module = timm.create_model(name, embed_dim=24, num_heads=2, depth=2, num_classes=5, patch_size=8).double().eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    images = pixels(24, 40).requires_grad_(True)
    (gradient,) = torch.autograd.grad(module(images)[:, 2].sum(), images)
    maps = cv.explain(module, images.detach(), "saliency(level=pixel)", target=2).maps
    torch.testing.assert_close(maps, gradient.abs().amax(1), rtol=1e-9, atol=1e-12)
    for method in ("rollout", "genatt", "ixg", "attnlrp+plus", "leave-one-out"):
        assert cv.explain(module, images.detach(), method, target=1).maps.shape == (2, 3, 5)


def test_a_prompt_is_compared_with_an_image_of_any_size() -> None:
    """The cosine and its gradient are those of the pair's own two towers, on patches cut from an image that is wide."""
    vision = {**tiny_pairs.VISION, "patch_size": PATCH, "num_patches": 16}
    config = hf.Siglip2Config(vision_config=vision, text_config={**tiny_pairs.TEXT, "projection_size": 16})
    module: Any = shaken(hf.Siglip2Model(config), seed=3).double().eval()
    model = cv.wrap(module, tokenizer=tiny_pairs.tokenizer(), size=(24, 40), mean=0.5, std=0.5)
    images = pixels(24, 40).requires_grad_()
    traced = cv.trace(model, images.detach(), target=cv.Text("a red car", against=None))
    tokens = tiny_pairs.tokenizer()(["a red car"], padding="max_length", max_length=8, return_tensors="pt")
    features = [
        module.get_text_features(tokens["input_ids"], tokens["attention_mask"]),
        module.get_image_features(**image_inputs(module.vision_model, images)),
    ]
    text, image = (getattr(values, "pooler_output", values) for values in features)
    score = nn.functional.cosine_similarity(image, text)
    assert traced.target is not None
    assert_same(traced.target(traced.logits).detach(), score.detach())
    (gradient,) = torch.autograd.grad(score.sum(), images)
    assert_same(traced.dpixels, gradient)
    assert cv.explain(model, images.detach(), "attnlrp+plus", target=cv.Text("a red car", against=None)).maps.shape == (
        2,
        3,
        5,
    )
