"""What transformers' models return, inferred from class and configuration, so that `load` and `wrap` fail early.

An explanation needs one row of class scores (or one embedding) per image. Detectors, segmenters, text generators and
video models return something else: the error says what the model returns and what to do. Bare encoders get a pooled
output.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from clairvit.errors import NotApplicable
from clairvit.models.sources.adapters import Backbone, UnmaskedEncoder, takes_images, takes_patches

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
_GENERATORS = (
    "ForConditionalGeneration",
    "ForVisionText2Text",
    "ForCausalLM",
    "EncoderDecoderModel",
    "ForBlockDiffusion",
)


def is_transformers(module: nn.Module) -> bool:
    """Return whether the class of a module is transformers' own, and not a user's subclass."""
    return type(module).__module__.startswith("transformers.") and hasattr(module, "config")


def adapted(module: nn.Module) -> nn.Module:
    """Return a transformers module as one that gives a row per image; raise NotApplicable if it cannot.

    Classifiers and encoders with a pooled output come back as they are. Other encoders come in a `Backbone`, which
    leaves them unchanged; ViTMAE in one that masks and shuffles no patches.
    """
    if not is_transformers(module):
        return module
    name = type(module).__name__
    reason = refusal(type(module), module.config)
    if reason is not None:
        raise NotApplicable(reason)
    if "ForImageClassification" in name or "ForVideoClassification" in name:
        return takes_images(module)
    if name == "ViTMAEModel":
        return UnmaskedEncoder(module)
    return takes_images(module) if _pools(module) else Backbone(module, pooled=True)


def refusal(model_class: type[nn.Module], config: Any) -> str | None:
    """Return why a transformers class has no row of scores and no embedding per image; None if it has one.

    Two sentences: what the model returns or needs, and what to do.
    """
    name, parameters = model_class.__name__, inspect.signature(model_class.forward).parameters
    if name.endswith(_GENERATORS):
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
    required = [key for key, value in parameters.items() if value.default is value.empty and value.kind in _NAMED]
    required = [key for key in required if key not in ("self", "pixel_values", "pixel_values_videos", "inputs")]
    if takes_patches(model_class):  # they are cut by an adapter
        required = [key for key in required if key not in ("pixel_attention_mask", "spatial_shapes")]
    if required:
        return (
            f"{name} needs {', '.join(required)} besides the image. Wrap it in a module that makes them in its "
            "forward, then cv.wrap that module."
        )
    if not {"pixel_values", "pixel_values_videos"} & set(parameters):
        return f"{name} takes no images: its forward has no pixel_values. Use a vision model."
    if "ForImageClassification" not in name and _has_queries(config):
        return f"{name} returns an embedding for each of its queries, not {_ROW}. {_WRAP}: that of one query."
    return None


_NAMED = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def _has_queries(config: Any) -> bool:
    """Return whether the model returns one embedding per query."""
    parts = (config, getattr(config, "decoder_config", None))
    return any(hasattr(part, name) for part in parts for name in ("num_queries", "num_detection_tokens"))


def _pools(module: nn.Module) -> bool:
    """Return whether forward is annotated to return a pooled output and the module has a pooler."""
    annotation = str(inspect.signature(type(module).forward).return_annotation)
    pooled = any(word in annotation for word in ("Pool", "ImageModelOutput", "VisionModelOutput"))
    return pooled and getattr(module, "pooler", True) is not None
