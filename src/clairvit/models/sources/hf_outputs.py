"""What transformers' models return, inferred from class and configuration: class scores, an embedding, or else.

Most methods explain one row of class scores (or one embedding) per image. Detectors, segmenters and text generators
return something else: `Model.returns` then says what, and which target reads it. Bare encoders get a pooled output.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from clairvit.errors import Argument, Call, Message, NotApplicable, Placeholder
from clairvit.models.sources.adapters import Backbone, UnmaskedEncoder, takes_images, takes_patches
from clairvit.models.sources.hf_versions import check_version

_ROW = "one row of class scores [B, classes]"
_OUTPUT = "Say what to read of that: target=cv.Output(function), with one number per image"
_BOX = tuple(map(Placeholder, ("LEFT", "TOP", "RIGHT", "BOTTOM")))
_REGION = Message("Name a part of the image: ", Argument("target", Call("Region", Placeholder("CLASS"), box=_BOX)))
_INDEX = Argument("target", Call("Query", Placeholder("INDEX")))
_QUERY = Message("Name a query: ", _INDEX)
_ENCODER = "Explain its encoder instead, whose output is an embedding"
# The end of a class name -> what the model returns, and what to do. The first that fits counts.
_TASKS: tuple[tuple[str, str, str], ...] = (
    ("ForObjectDetection", "a box and class scores for each of its queries", _QUERY),
    ("ForSemanticSegmentation", "class scores for every pixel [B, classes, h, w]", _REGION),
    (
        "Segmentation",
        "a mask and class scores for each of its queries",
        Message(_REGION, ", or a query: ", _INDEX),
    ),
    (
        "ForDepthEstimation",
        "a depth for every pixel",
        Message("Name a part of the image: ", Argument("target", Call("Region", box=_BOX))),
    ),
    ("Estimation", "numbers for every pixel or keypoint", _OUTPUT),
    ("ForKeypointDetection", "keypoints", _OUTPUT),
    ("ForKeypointMatching", "matches between two images", "Explain its keypoint detector instead"),
    ("ForImageMatting", "an alpha mask", _OUTPUT),
    ("ForImageSuperResolution", "an image", _OUTPUT),
    ("ForMaskedImageModeling", "reconstructed patches", f"{_ENCODER}: cv.wrap(model.base_model)"),
    ("ForPreTraining", "reconstructed patches", f"{_ENCODER}: cv.wrap(model.base_model)"),
    ("ForCausalImageModeling", "the colours of the next pixels", f"{_ENCODER}: cv.wrap(model.base_model)"),
    ("Recognition", "text", f"{_ENCODER}: wrap its backbone"),
    (
        "Retrieval",
        "a score of image and text together",
        "Explain its vision tower instead, whose output is an embedding",
    ),
    ("Backbone", "a list of feature maps", _OUTPUT),
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


def adapted(module: nn.Module) -> tuple[nn.Module, str]:
    """Return a transformers module as one that gives a row per image, and what it returns if it gives none.

    Classifiers and encoders with a pooled output come back as they are. Other encoders come in a `Backbone`, which
    leaves them unchanged; ViTMAE in one that masks and shuffles no patches.
    """
    if not is_transformers(module):
        return module, ""
    check_version(getattr(module.config, "model_type", ""))
    name = type(module).__name__
    reason = no_scores(type(module), module.config)
    if reason:
        return module, reason
    if name == "ViTMAEModel":
        return UnmaskedEncoder(module), ""
    is_row = "ForImageClassification" in name or "ForVideoClassification" in name or _pools(module)
    return takes_images(module) if is_row else Backbone(module, pooled=True), ""


def image_token_id(config: Any) -> int | None:
    """Return the token that stands for the image in a text; None if the model has none."""
    number: int | None = getattr(config, "image_token_id", getattr(config, "image_token_index", None))
    return number


def next_token_obstacle(model_class: type[nn.Module], config: Any) -> str:
    """Return why `cv.NextToken` does not apply to a transformers class that writes text; "" if it does."""
    parameters: Any = inspect.signature(model_class.forward).parameters
    decoder_only = not getattr(config, "is_encoder_decoder", False) and image_token_id(config) is not None
    if not decoder_only or not {"input_ids", "pixel_values"} <= set(parameters):
        return "does not put image tokens into the sequence of its language model"
    if "cross_attention_mask" in parameters or not hasattr(model_class, "get_image_features"):
        return "reads the image by cross-attention, and puts no image tokens into the sequence of its language model"
    if hasattr(config, "image_grid_pinpoints"):
        return "cuts an image into tiles of different sizes, whose tokens form no grid"
    return ""


def writes_text(model_class: type[nn.Module]) -> bool:
    """Return whether a transformers class returns text, one token after the other."""
    return model_class.__name__.endswith(_GENERATORS)


def no_scores(model_class: type[nn.Module], config: Any) -> str:
    """Return why a transformers class has no row of scores and no embedding per image; "" if it has one.

    Two sentences: what the model returns or needs, and what to do.

    Raises:
        NotApplicable: The model takes no images.
    """
    name, parameters = model_class.__name__, inspect.signature(model_class.forward).parameters
    if writes_text(model_class):
        obstacle = next_token_obstacle(model_class, config)
        text = f"{name} returns text, one token after the other, not {_ROW}"
        if obstacle:
            return f"{text}, and cv.NextToken does not apply, because it {obstacle}. {_vision_tower(model_class)}."
        word = Argument("target", Call("NextToken", "cat", prompt="What is this?"))
        return Message(f"{text}. Name a word: ", word, ".")
    for ending, returned, advice in _TASKS:
        if name.endswith(ending):
            return Message(f"{name} returns {returned}, not {_ROW}. ", advice, ".")
    if hasattr(model_class, "get_text_features"):
        return Message(
            f"{name} compares images with texts and needs both. Name a prompt: ",
            Argument("target", Call("Text", "a photo of a cat")),
            "; or load it with prompts as labels, ",
            Argument("labels", ["a photo of a cat", ...]),
            ".",
        )
    if "input_ids" in parameters:
        return f"{name} needs text or other tokens (input_ids), not only an image. {_TOWER}."
    if "input_points" in parameters:
        return Message(
            f"{name} returns masks for points or boxes that it is given, not {_ROW}. Name a point: ",
            Argument("target", Call("Region", point=(Placeholder("X"), Placeholder("Y")))),
            "; or explain its image encoder, cv.wrap(model.vision_encoder).",
        )
    required = [key for key, value in parameters.items() if value.default is value.empty and value.kind in _NAMED]
    required = [key for key in required if key not in ("self", "pixel_values", "pixel_values_videos", "inputs")]
    if takes_patches(model_class):  # they are cut by an adapter
        required = [key for key in required if key not in ("pixel_attention_mask", "spatial_shapes")]
    if required:
        return (
            f"{name} needs {', '.join(required)} besides the image. Pass them: inputs={{'{required[0]}': …}}, or "
            "model.with_inputs(…)."
        )
    if not {"pixel_values", "pixel_values_videos"} & set(parameters):
        raise NotApplicable(f"{name} takes no images: its forward has no pixel_values. Use a vision model.")
    if "ForImageClassification" not in name and _has_queries(config):
        return f"{name} returns an embedding for each of its queries, not {_ROW}. {_OUTPUT}."
    return ""


def _vision_tower(model_class: type[nn.Module]) -> str:
    """Return the advice to explain the vision tower, unless that needs more than an image (Llama 3.2 Vision)."""
    if "aspect_ratio_ids" in inspect.signature(model_class.forward).parameters:
        return "Its vision tower needs the sizes of tiles besides the image, so no target applies to this model"
    return _TOWER


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
