"""`hf:ID`, `hf:FOLDER` or, for random weights, `hf:MODEL_TYPE`: transformers' vision models.

Three kinds: classifiers; image-and-text pairs (CLIP, SigLIP), which prompts turn into classifiers; bare backbones.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import re
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from clairvit.errors import Argument, BadInput, ModelUnavailable, NotApplicable, UnknownName, did_you_mean
from clairvit.models.labels import fit_labels
from clairvit.models.load_options import LoadOptions, seeded
from clairvit.models.model import Model
from clairvit.models.preprocess import INTERPOLATIONS, Preprocess, assumption, for_size
from clairvit.models.sources.adapters import (
    Backbone,
    ImageTower,
    UnmaskedEncoder,
    ZeroShot,
    clip_frames,
    drop_submodules,
    interpolation_option,
    takes_images,
)
from clairvit.models.sources.hf_outputs import no_scores
from clairvit.models.sources.hf_versions import check_version
from clairvit.models.sources.hub import extra, fetching, hub_blocked, offline, quiet
from clairvit.models.text_encoder import TextEncoder, TextTower, transformers_tokens

Kind = Literal["classifier", "pair", "backbone", "other"]  # other: what it returns is read by a target


def build(request: LoadOptions) -> Model:
    """Return a model of a hub id, a folder or, with random weights, a model type."""
    transformers = extra("transformers", "hf", request.spec)
    folder = Path(request.identifier).expanduser()
    local = folder.is_dir()
    location = str(folder) if local else request.identifier
    if not local and "/" not in location:
        return _from_type(transformers, request)
    if local and (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        raise ModelUnavailable(
            f"'{request.spec}' holds an adapter (adapter_config.json) without its base model; load both with peft, "
            "PeftModel.from_pretrained(base, folder), and pass the module to cv.wrap."
        )
    component = "weights" if request.pretrained else "configuration"
    blocked = None if local else hub_blocked()
    with fetching(request.spec, blocked, component=component, local=local), seeded(), torch.no_grad():
        config, kind, model = _load_module(transformers, location, request)
        if request.pretrained:
            preprocess, assumed = _saved_or_given_preprocess(transformers, config, location, request)
        else:
            preprocess, assumed = default_preprocess(config), ()
        preprocess = _for_requested_size(preprocess, config, request)
        described = _describe(transformers, model.eval(), kind, preprocess, location, request)
        return dataclasses.replace(described, assumptions=assumed)


def _load_module(transformers: Any, location: str, request: LoadOptions) -> tuple[Any, Kind, nn.Module]:
    """Return the configuration, the kind and the module of a hub id or a folder."""
    config = transformers.AutoConfig.from_pretrained(location, trust_remote_code=False)
    check_version(config.model_type)
    kind = model_kind(transformers, config, request.spec)
    if request.pretrained:
        return config, kind, _with_weights(transformers, config, kind, location, request)
    return config, kind, _with_random_weights(transformers, config, kind, request)


def open_text_tower(location: str, request: LoadOptions) -> TextTower:
    """Return the text tower of the same model, loaded again; its image tower is not kept."""
    if not location:
        raise _no_tokenizer(request)
    transformers = extra("transformers", "hf", request.spec)
    local = Path(location).is_dir()
    blocked = None if local else hub_blocked()
    with fetching(request.spec, blocked, component=_TEXT, local=local), seeded(), torch.no_grad():
        _, _, pair = _load_module(transformers, location, request)
        return _text_tower(transformers, drop_submodules(pair.eval(), _IMAGE_PARTS), location)


def _text_tower(transformers: Any, pair: Any, location: str) -> TextTower:
    """Return the text tower of a pair with the tokenizer that was saved next to it."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(location, trust_remote_code=False)
    return TextTower(pair, transformers_tokens(pair, tokenizer))


def _no_tokenizer(request: LoadOptions) -> ModelUnavailable:
    return ModelUnavailable(
        f"'{request.spec}' has no tokenizer to read prompts with; give a hub id or a folder that holds one, "
        "or use 'open_clip:ViT-B-32', whose tokenizer is built in."
    )


_TEXT = "text tower or tokenizer"
_IMAGE_PARTS, _TEXT_PARTS = ("vision_model", "visual_projection"), ("text_model", "text_projection")


def _from_type(transformers: Any, request: LoadOptions) -> Model:
    """Return a model type of transformers, which has an architecture but no weights."""
    types = vision_types(transformers)
    if request.identifier not in transformers.CONFIG_MAPPING:
        raise UnknownName(
            f"'{request.identifier}' is neither a folder, nor a hub id (OWNER/NAME), nor a model type of "
            f"transformers.{did_you_mean(request.identifier, types)} Type 'hf:google/vit-base-patch16-224', or "
            "'hf:vit' with ",
            Argument("pretrained", False),
            ".",
        )
    if request.pretrained:
        raise BadInput(
            f"'{request.spec}' is a model type without weights; give a hub id or a folder (hf:OWNER/NAME), or ask "
            "for random weights with ",
            Argument("pretrained", False),
            ".",
        )
    with fetching(request.spec, local=True), seeded(), torch.no_grad():
        config = transformers.AutoConfig.for_model(request.identifier)
        check_version(config.model_type)
        kind = model_kind(transformers, config, request.spec)
        if kind == "other":  # often billions of parameters, and random ones explain nothing
            raise NotApplicable(
                f"'{request.spec}' is a model type that returns no class scores; give a folder or a hub id with "
                "weights, or build a small one yourself and cv.wrap it."
            )
        if kind == "pair" and request.labels is not None:
            raise _no_tokenizer(request)
        model = _with_random_weights(transformers, config, kind, request).eval()
        preprocess = _for_requested_size(default_preprocess(config), config, request)
        return _describe(transformers, model, kind, preprocess, "", request)


def vision_types(transformers: Any) -> list[str]:
    """Return the model types with an image classifier or a text encoder."""
    auto = transformers.models.auto.modeling_auto
    mappings = (
        auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
        auto.MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    )
    return sorted({name for mapping in mappings for name in mapping})


def model_kind(transformers: Any, config: Any, spec: str) -> Kind:
    """Return the kind of a model, by the class that its weights were saved from, else by its configuration."""
    architectures = config.architectures or ()
    if any("ForImageClassification" in name or "ForVideoClassification" in name for name in architectures):
        return "classifier"
    classes = (getattr(transformers, name, None) for name in architectures)
    saved = next((model_class for model_class in classes if model_class is not None), None)
    is_encoder = saved is not None and (_PRETRAINING.search(saved.__name__) or _has_text_encoder(saved))
    if saved is not None and not is_encoder and no_scores(saved, config):
        return "other"
    base = transformers.MODEL_MAPPING.get(type(config), None)
    base = base[0] if isinstance(base, tuple) else base
    if base is not None and _has_text_encoder(base) and hasattr(config, "vision_config"):
        return "pair"
    if not architectures and type(config) in transformers.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING:
        return "classifier"
    if base is None or not _takes_images(base, config):
        raise NotApplicable(
            f"'{spec}' is a {config.model_type} model, which does not take images; expected a vision model such as "
            "'hf:google/vit-base-patch16-224'."
        )
    return "other" if no_scores(base, config) else "backbone"


_PRETRAINING = re.compile("ForPreTraining|ForMaskedImageModeling")  # their encoder is explained


def _has_text_encoder(model_class: Any) -> bool:
    """Return whether a model embeds both images and texts, to be compared."""
    return hasattr(model_class, "get_text_features") and hasattr(model_class, "get_image_features")


def _takes_images(model_class: Any, config: Any) -> bool:
    configs = (config, getattr(config, "vision_config", None))
    has_image_size = any(
        hasattr(part, name) for part in configs for name in ("num_channels", "image_size", "patch_size")
    )
    return has_image_size or "pixel_values" in inspect.signature(model_class.forward).parameters


def _model_class(transformers: Any, config: Any, kind: Kind) -> Any:
    """Return the class to build: the one that the weights were saved from, or an automatic one."""
    if kind in ("pair", "backbone"):
        return transformers.AutoModel
    # a distilled DeiT has two heads, and the automatic class would leave both out
    classes = (getattr(transformers, name, None) for name in config.architectures or ())
    automatic = transformers.AutoModelForImageClassification if kind == "classifier" else transformers.AutoModel
    return next((model_class for model_class in classes if model_class is not None), automatic)


def _with_weights(transformers: Any, config: Any, kind: Kind, location: str, request: LoadOptions) -> nn.Module:
    """Return the module with its saved weights; raise ModelUnavailable if tensors of its head are missing."""
    any_size = patch_budget(config) is not None or _merges_patches(config)
    any_size = any_size or (kind == "pair" and _takes_any_size(transformers, config))
    if request.size and not any_size:
        raise BadInput(
            f"The weights of '{request.spec}' fix its image size, so size={request.size} cannot be used; leave it out."
        )
    logging = transformers.utils.logging
    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model, report = _model_class(transformers, config, kind).from_pretrained(
            location, config=config, output_loading_info=True
        )
    finally:
        if enabled:
            logging.enable_progress_bar()
    missing = sorted(report["missing_keys"])
    if kind == "backbone":
        return _backbone(model, pooled=not any("pooler" in key for key in missing))
    if missing:
        raise ModelUnavailable(
            f"The weights of '{request.spec}' lack {len(missing)} of the model's tensors ({', '.join(missing[:3])}), "
            "which would be random; use weights that were saved from the whole model."
        )
    return model  # type: ignore[no-any-return]


def _takes_any_size(transformers: Any, config: Any) -> bool:
    """Return whether the image tower of a pair can interpolate its position embeddings."""
    pair_class = transformers.MODEL_MAPPING[type(config)]
    return bool(interpolation_option(pair_class[0] if isinstance(pair_class, tuple) else pair_class))


def _merges_patches(config: Any) -> bool:
    """Return whether a vision-language model takes images of any size, cut into patches (Qwen2-VL)."""
    return hasattr(getattr(config, "vision_config", None), "spatial_merge_size")


def _with_random_weights(transformers: Any, config: Any, kind: Kind, request: LoadOptions) -> nn.Module:
    """Return the module with random weights, for the size and number of labels of the request."""
    if request.size:
        rows, columns = request.size
        vision = getattr(config, "vision_config", config)
        if patch_budget(config) is None:
            vision.image_size = rows if rows == columns else [rows, columns]
    if kind == "classifier" and request.labels is not None:
        config.num_labels = len(request.labels)
    model_class = _model_class(transformers, config, kind)
    build_from = getattr(model_class, "from_config", None) or model_class._from_config
    model = build_from(config)
    return _backbone(model, pooled=True) if kind == "backbone" else model


def _backbone(model: nn.Module, pooled: bool) -> nn.Module:
    return UnmaskedEncoder(model) if type(model).__name__ == "ViTMAEModel" else Backbone(model, pooled)


def _describe(
    transformers: Any, model: nn.Module, kind: Kind, preprocess: Preprocess, location: str, request: LoadOptions
) -> Model:
    """Return the module as a model: a classifier, an embedding, or a zero-shot classifier of prompts."""
    frames = clip_frames(model.model if isinstance(model, Backbone) else model)
    preprocess = dataclasses.replace(preprocess, frames=frames)
    if kind == "classifier":
        config: Any = model.config
        labels = fit_labels(request.labels, lambda: class_names(config), config.num_labels)
        return Model(takes_images(model), request.name, preprocess, labels)
    if kind == "backbone":
        return Model(model, request.name, preprocess, classifier=False)
    if kind == "other":
        returns = no_scores(type(model), model.config)
        labels = class_names(model.config)
        return Model(model, request.name, preprocess, labels, classifier=False, returns=returns)
    return _describe_pair(transformers, model, preprocess, location, request)


def _describe_pair(transformers: Any, pair: Any, preprocess: Preprocess, location: str, request: LoadOptions) -> Model:
    """Return the image tower of a pair, or a zero-shot classifier of prompts; its text tower is not kept."""
    encoder = TextEncoder(functools.partial(open_text_tower, location, request))
    preprocess = for_size(preprocess, request.size or preprocess.size)
    if request.labels is None:
        tower = ImageTower(drop_submodules(pair, _TEXT_PARTS))
        return Model(tower, request.name, preprocess, classifier=False, text_encoder=encoder)
    text = encoder.remember(request.labels, _text_tower(transformers, pair, location).embed(request.labels))
    tower = ImageTower(drop_submodules(pair, _TEXT_PARTS))
    module = ZeroShot(tower, text, pair.logit_scale.exp(), getattr(pair, "logit_bias", None))
    return Model(module, request.name, preprocess, request.labels, text_encoder=encoder)


def class_names(config: Any) -> tuple[str, ...]:
    """Return the class names of a configuration; () if they are transformers' placeholders, LABEL_0, LABEL_1, …"""
    names = {int(number): str(name) for number, name in (getattr(config, "id2label", None) or {}).items()}
    if sorted(names) != list(range(len(names))) or all(name == f"LABEL_{number}" for number, name in names.items()):
        return ()
    return tuple(names[number] for number in range(len(names)))


def saved_preprocess(module: nn.Module) -> Preprocess | None:
    """Return the preprocessing saved where a module's weights came from: a folder, or the hub's cache on this disk."""
    import transformers

    location = str(getattr(getattr(module, "config", None), "name_or_path", "") or "")
    if not location:
        return None
    try:
        with quiet(), offline():
            processor = transformers.AutoImageProcessor.from_pretrained(
                location, trust_remote_code=False, local_files_only=True
            )
        return read_processor(processor.to_dict(), location, channel_count(module.config) or 3)
    except BadInput:  # a ValueError too, and no reason to guess
        raise
    except (OSError, ValueError, NotApplicable):  # no processor, or one that resizes in another way
        return None


def _saved_or_given_preprocess(
    transformers: Any, config: Any, location: str, request: LoadOptions
) -> tuple[Preprocess, tuple[str, ...]]:
    """Return the preprocessing of the saved image processor, else the user's, and notes on what was assumed."""
    try:
        processor = transformers.AutoImageProcessor.from_pretrained(location, trust_remote_code=False).to_dict()
    except OSError as error:
        if not Path(location).is_dir():
            raise
        options = request.preprocessing
        if options.mean is None or options.std is None:
            raise ModelUnavailable(
                f"'{request.spec}' has no preprocessor_config.json, so its mean, std and image size are unknown; load "
                "it with ",
                *(Argument("mean"), " and ", Argument("std"), " (and ", Argument("resize"), ")"),
                ", or save the image processor there too.",
            ) from error
        preprocess = options.applied_to(default_preprocess(config))
        return preprocess, assumption(
            options.missing(), preprocess, f"the usual, because '{location}' has no preprocessor_config.json"
        )
    preprocess = read_processor(processor, request.spec, channel_count(config) or 3)
    if _single_size(processor):
        preprocess = for_size(preprocess, request.size or preprocess.size)
        return preprocess, _single_size_note(preprocess.size, any_size=_merges_patches(config))
    return preprocess, _crop_note(processor, preprocess, request.spec)


def default_preprocess(config: Any) -> Preprocess:
    """Return mean and std 0.5 at the configured image size, for random weights."""
    stated = getattr(getattr(config, "vision_config", config), "image_size", None) or getattr(config, "crop_size", None)
    size = stated or square_size(config) or 224
    rows, columns = (size, size) if isinstance(size, int) else tuple(size)
    channels = channel_count(config) or 3
    return Preprocess(size=(rows, columns), mean=(0.5,) * channels, std=(0.5,) * channels)


def _for_requested_size(preprocess: Preprocess, config: Any, request: LoadOptions) -> Preprocess:
    """Return the preprocessing for the size that was asked for, where the model takes any (NaFlex)."""
    if request.size is None or patch_budget(config) is None:
        return preprocess
    return for_size(preprocess, request.size)


def patch_budget(config: Any) -> tuple[int, int] | None:
    """Return patch size and number of patches of a model that takes images of any size (NaFlex); None for others."""
    vision = getattr(config, "vision_config", config)
    patch_size, patches = (getattr(vision, name, None) for name in ("patch_size", "num_patches"))
    if not isinstance(patch_size, int) or not isinstance(patches, int) or hasattr(vision, "image_size"):
        return None
    return patch_size, patches


def square_size(config: Any) -> int | None:
    """Return the side of the largest square image within the patch budget; None for a model without one."""
    budget = patch_budget(config)
    return None if budget is None else math.isqrt(budget[1]) * budget[0]


def channel_count(config: Any) -> int | None:
    """Return the number of channels of an image by the configuration; None where it does not say."""
    parts = (config, *(getattr(config, name, None) for name in ("vision_config", "backbone_config")))
    counts = (getattr(part, "num_channels", None) for part in parts)
    return next((count for count in counts if isinstance(count, int)), None)


def read_processor(processor: dict[str, Any], spec: str, channels: int = 3) -> Preprocess:
    """Return the preprocessing of a transformers image processor, given as a dict."""
    size = {key: value for key, value in dict(processor.get("size") or {}).items() if value}
    size = _single_size(processor) or size
    crop = processor.get("crop_size") if processor.get("do_center_crop") else None
    short, longest, box = size.get("shortest_edge"), size.get("longest_edge"), (size.get("height"), size.get("width"))
    fraction = processor.get("crop_pct")  # ConvNeXt: crop a fraction below 384 pixels, squash from 384 on
    if short and fraction:
        target = (short, short)
        resize: int | tuple[int, int] = int(short / fraction) if short < 384 else target
    elif short or (longest and not box[0]):  # DETR keeps the whole photo, SAM pads it: see `_crop_note`
        side = int(short or longest or 0)
        target, resize = _crop_size(crop, side), side
    elif box[0] and box[1]:
        target, resize = _crop_size(crop, box), (int(box[0]), int(box[1]))
    elif processor.get("max_num_patches") and processor.get("patch_size"):  # NaFlex: squares of the same budget
        side = math.isqrt(int(processor["max_num_patches"])) * int(processor["patch_size"])
        target = resize = (side, side)
    else:
        raise NotApplicable(
            f"The image processor of '{spec}' resizes by {size or 'a token budget'}, and ClairViT by 'shortest_edge' "
            "or 'height' and 'width'; preprocess the images yourself and pass tensors to cv.wrap(module, …)."
        )
    # its mean and std are for pixels times rescale_factor (1/255 nearly always), those of Preprocess for 0..1
    unit = 255 * processor.get("rescale_factor", 1 / 255) if processor.get("do_rescale", True) else 255.0
    mean, std = [0.0], [1.0]
    if processor.get("do_normalize", True):
        mean, std = processor["image_mean"], processor["image_std"]
    return Preprocess(
        size=target,
        mean=_channels(mean, unit, channels),
        std=_channels(std, unit, channels),
        resize=resize,
        interpolation=INTERPOLATIONS[int(processor.get("resample", 2))],
        keep_ratio=isinstance(resize, int) or bool(processor.get("keep_aspect_ratio")),
    )


def _crop_note(processor: dict[str, Any], preprocess: Preprocess, spec: str) -> tuple[str, ...]:
    """Return the note that a processor which keeps the whole photo (detectors, SAM) is replaced by a central crop."""
    size = dict(processor.get("size") or {})
    if not size.get("longest_edge") and not processor.get("keep_aspect_ratio"):
        return ()
    rows, columns = preprocess.size
    note = (
        f"The image processor of '{spec}' keeps the whole of a photo that is not square; here the model sees its "
        f"central {rows} × {columns} pixels. For the whole photo pass tensors that are preprocessed."
    )
    return (note,)


USUAL_SIDE = 448  # pixels, of an image for a model that takes any size


def _single_size(processor: dict[str, Any]) -> dict[str, int]:
    """Return one size for processors that choose one by the image, or cut it into tiles; {} for all others."""
    if processor.get("do_image_splitting") is not None and processor.get("max_image_size"):  # Idefics3, SmolVLM
        side = int(processor["max_image_size"]["longest_edge"])
        return {"height": side, "width": side}
    if not processor.get("merge_size"):
        return {}
    unit = int(processor["patch_size"]) * int(processor["merge_size"])  # Qwen2-VL: pixels of a token
    budget = dict(processor.get("size") or {}).get("longest_edge") or processor.get("max_pixels") or USUAL_SIDE**2
    side = unit * max(1, min(round(USUAL_SIDE / unit), math.isqrt(int(budget)) // unit))
    return {"height": side, "width": side}


def _single_size_note(size: tuple[int, int], *, any_size: bool) -> tuple[str, ...]:
    """Return the note that images come in one size, in one piece."""
    other = "; size= takes another" if any_size else ", in one piece and not in tiles"
    return (f"The image was resized to {size[0]} × {size[1]} pixels{other}.",)


def _crop_size(crop: Any, default: Any) -> tuple[int, int]:
    """Return (rows, columns) of the crop, or the default without one."""
    sides = (crop["height"], crop["width"]) if isinstance(crop, dict) else crop or default
    rows, columns = (sides, sides) if isinstance(sides, int) else sides
    return int(rows), int(columns)


def _channels(values: Any, unit: float, channels: int) -> tuple[float, ...]:
    """Return mean or std of each channel in units of 0..1; one number stands for all."""
    listed = [values] if isinstance(values, int | float) else list(values)
    return tuple(float(value) / unit for value in (listed * channels if len(listed) == 1 else listed))
