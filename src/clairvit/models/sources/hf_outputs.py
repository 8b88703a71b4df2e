"""What transformers' models return, told from class and configuration, so that `load` and `wrap` can refuse early.

An explanation needs one row of class scores (or one embedding) for each image. Detectors, segmenters, models that write
text and models that take videos return something else; each is refused by a sentence that says what it returns and
what to do. Bare encoders are given a pooled output.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from clairvit.errors import BadInput, NotApplicable

_ROW = "one row of class scores [B, classes]"
_WRAP = "Wrap it in a module whose forward returns such a row"
_ENCODER = "Explain its encoder instead, whose output is an embedding"
# The end of a class name -> what the model returns, and what to do. The first that fits counts.
_TASKS: tuple[tuple[str, str, str], ...] = (
    (
        "ForObjectDetection",
        "a box and class scores for each of its queries",
        f"{_WRAP}: model(pixels).logits[:, QUERY]",
    ),
    (
        "ForSemanticSegmentation",
        "class scores for every pixel [B, classes, h, w]",
        f"{_WRAP}: model(pixels).logits.mean((2, 3)), or the scores of one pixel",
    ),
    (
        "Segmentation",
        "a mask and class scores for each of its queries",
        f"{_WRAP}: the class scores of one query (class_queries_logits[:, QUERY] or logits[:, QUERY])",
    ),
    ("ForDepthEstimation", "a depth for every pixel", f"{_WRAP}: model(pixels).predicted_depth.mean((1, 2))[:, None]"),
    ("Estimation", "numbers for every pixel or keypoint", f"{_WRAP}: the mean of the numbers that you ask about"),
    ("ForKeypointDetection", "keypoints", f"{_WRAP}: the score of one keypoint"),
    ("ForKeypointMatching", "matches between two images", "Explain its keypoint detector instead"),
    ("ForImageMatting", "an alpha mask", f"{_WRAP}: the mean of the alpha of a region"),
    ("ForImageSuperResolution", "an image", f"{_WRAP}: the mean of a region of that image"),
    ("ForMaskedImageModeling", "reconstructed patches", f"{_ENCODER}: cv.wrap(model.base_model)"),
    ("ForPreTraining", "reconstructed patches", f"{_ENCODER}: cv.wrap(model.base_model)"),
    ("ForCausalImageModeling", "the colours of the next pixels", f"{_ENCODER}: cv.wrap(model.base_model)"),
    ("Recognition", "text", f"{_ENCODER}: wrap its backbone"),
    (
        "Retrieval",
        "a score of image and text together",
        "Explain its vision tower instead, whose output is an embedding",
    ),
    ("Backbone", "a list of feature maps", f"{_WRAP}: model(pixels).feature_maps[-1].mean((2, 3))"),
)
_TOWER = (
    "Explain its vision tower instead, whose output is an embedding: cv.wrap(model.get_encoder()) or "
    "cv.wrap(model.model.vision_tower)"
)
_WRITERS = ("ForConditionalGeneration", "ForVisionText2Text", "ForCausalLM", "EncoderDecoderModel", "ForBlockDiffusion")


def is_transformers(module: nn.Module) -> bool:
    """Return whether the class of a module is transformers' own; a user's subclass speaks for itself."""
    return type(module).__module__.startswith("transformers.") and hasattr(module, "config")


def adapted(module: nn.Module) -> nn.Module:
    """Return a transformers module as one that gives a row for each image; raise NotApplicable if it cannot.

    Classifiers and encoders with a pooled output come back as they are. Other encoders come in a `Backbone`, which
    leaves them unchanged; ViTMAE in one that masks and shuffles no patches.
    """
    if not is_transformers(module):
        return module
    name = type(module).__name__
    reason = refusal(type(module), module.config)
    if reason is not None:
        raise NotApplicable(reason)
    if "ForImageClassification" in name:
        return module
    if name == "ViTMAEModel":
        return UnmaskedEncoder(module)
    return module if _pools(module) else Backbone(module, pooled=True)


def refusal(model_class: type[nn.Module], config: Any) -> str | None:
    """Return why a transformers class has no row of scores or embedding for an image; None if it has.

    Two sentences: what the model returns or needs, and what to do.
    """
    name, parameters = model_class.__name__, inspect.signature(model_class.forward).parameters
    if name.endswith(_WRITERS):
        return f"{name} returns text, one token after the other, not {_ROW}. {_TOWER}."
    for ending, returned, advice in _TASKS:
        if name.endswith(ending):
            return f"{name} returns {returned}, not {_ROW}. {advice}."
    if hasattr(model_class, "get_text_features"):
        return (
            f"{name} compares images with texts and needs both. Load it with the prompts as labels, cv.load('hf:…', "
            "labels=['a photo of a cat', …]), or wrap a module that returns model.get_image_features(pixels)."
        )
    if "input_ids" in parameters:
        return f"{name} needs text or other tokens (input_ids), not only an image. {_TOWER}."
    if "input_points" in parameters:
        return (
            f"{name} returns masks for points or boxes that it is given, not {_ROW}. Explain its image encoder "
            "instead, whose output is an embedding: cv.wrap(model.vision_encoder)."
        )
    if "ForImageClassification" not in name and _takes_video(model_class, config):
        return f"{name} takes the frames of a video, [B, T, 3, H, W], not an image. Use an image model."
    more = [key for key, value in parameters.items() if value.default is value.empty and value.kind in _NAMED]
    more = [key for key in more if key not in ("self", "pixel_values", "inputs")]
    if "spatial_shapes" in parameters:  # pixel_values are patches cut beforehand (SigLIP 2)
        more = ["pixel_attention_mask", "spatial_shapes"]
    if more:
        return (
            f"{name} needs {', '.join(more)} besides the image. Wrap it in a module that makes them in its forward, "
            "then cv.wrap that module."
        )
    if "pixel_values" not in parameters:
        return f"{name} takes no images: its forward has no pixel_values. Use a vision model."
    if "ForImageClassification" not in name and _has_queries(config):
        return f"{name} returns an embedding for each of its queries, not {_ROW}. {_WRAP}: that of one query."
    return None


_NAMED = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def _takes_video(model_class: type[nn.Module], config: Any) -> bool:
    modalities = getattr(model_class, "input_modalities", ())
    parameters = inspect.signature(model_class.forward).parameters
    return (
        modalities in ("video", ("video",))
        or "pixel_values_videos" in parameters
        or any(hasattr(config, name) for name in ("tubelet_size", "num_frames"))
    )


def _has_queries(config: Any) -> bool:
    parts = (config, getattr(config, "decoder_config", None))
    return any(hasattr(part, name) for part in parts for name in ("num_queries", "num_detection_tokens"))


def _pools(module: nn.Module) -> bool:
    """Does forward say that it returns a pooled output, and has the module what it takes?"""
    returned = str(inspect.signature(type(module).forward).return_annotation)
    named = any(word in returned for word in ("Pool", "ImageModelOutput", "VisionModelOutput"))
    return named and getattr(module, "pooler", True) is not None


class Backbone(nn.Module):
    """A model without a head: its pooled output, or, where there is none, its class token or the mean of its tokens."""

    def __init__(self, model: nn.Module, pooled: bool) -> None:
        super().__init__()
        self.model = model
        self.pooled = pooled

    def forward(self, pixels: Tensor) -> Tensor:
        """[B, 3, H, W] -> [B, d]."""
        return self.pool(self.model(pixels))

    def pool(self, output: Any) -> Tensor:
        for name in ("image_embeds", "pooler_output") if self.pooled else ():
            pooled = getattr(output, name, None)
            if isinstance(pooled, Tensor):
                return pooled.flatten(1)
        tokens = getattr(output, "last_hidden_state", None)
        if not isinstance(tokens, Tensor) or tokens.ndim not in (3, 4):
            raise BadInput(
                f"{type(self.model).__name__} returned a {type(output).__name__} without a last_hidden_state of tokens "
                "or feature maps; expected one. Wrap it in a module whose forward returns [B, d], then cv.wrap that."
            )
        if tokens.ndim == 4:
            return tokens.mean((2, 3))  # [B, d, h, w]
        return tokens[:, 0] if self._class_token else tokens.mean(1)

    @property
    def _class_token(self) -> bool:
        names = (name.rpartition(".")[2] for name, _ in self.model.named_parameters())
        return any(name in ("cls_token", "class_embedding", "class_token") for name in names)


class UnmaskedEncoder(Backbone):
    """ViTMAE's encoder on all patches, in order: during a forward its mask ratio is 0, afterwards what it was."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, pooled=False)

    def forward(self, pixels: Tensor) -> Tensor:
        """[B, 3, H, W] -> [B, d]."""
        embeddings: Any = self.model.embeddings
        count = int(embeddings.patch_embeddings.num_patches)
        order = torch.arange(count, device=pixels.device, dtype=torch.float32).expand(len(pixels), -1)  # sorted noise
        with _mask_ratio(embeddings.config, 0.0):
            return self.pool(self.model(pixels, noise=order))


@contextmanager
def _mask_ratio(config: Any, ratio: float) -> Iterator[None]:
    before = config.mask_ratio
    config.mask_ratio = ratio
    try:
        yield
    finally:
        config.mask_ratio = before
