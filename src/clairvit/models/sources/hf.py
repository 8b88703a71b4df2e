"""`hf:ID`, `hf:FOLDER` or, for random weights, `hf:MODEL_TYPE`: transformers' vision models.

Three kinds: classifiers; image-and-text pairs (CLIP, SigLIP), which prompts turn into classifiers; bare backbones.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from clairvit.errors import BadInput, ModelUnavailable, NotApplicable, UnknownName, did_you_mean
from clairvit.models.model import Model, Preprocess, first_scores
from clairvit.models.preprocess import INTERPOLATIONS, assumption
from clairvit.models.request import Request, fit_labels, seeded
from clairvit.models.sources.hf_outputs import Backbone, UnmaskedEncoder, refusal
from clairvit.models.sources.hub import extra, fetching, hub_blocked, offline, quiet
from clairvit.models.sources.zero_shot import ZeroShot

Kind = Literal["classifier", "pair", "backbone"]


def build(request: Request) -> Model:
    transformers = extra("transformers", "hf", request.spec)
    folder = Path(request.rest).expanduser()
    local = folder.is_dir()
    where = str(folder) if local else request.rest
    if not local and "/" not in where:
        return _from_type(transformers, request)
    needed = "weights" if request.pretrained else "configuration"
    blocked = None if local else hub_blocked()
    with fetching(request.spec, blocked, what=needed, local=local), seeded(), torch.no_grad():
        config = transformers.AutoConfig.from_pretrained(where, trust_remote_code=False)
        what = kind(transformers, config, request.spec)
        if request.pretrained:
            model = _with_weights(transformers, config, what, where, request)
            preprocess, assumed = _preprocess(transformers, config, where, request)
        else:
            model = _with_random(transformers, config, what, request)
            preprocess, assumed = plain_preprocess(config), ()
        described = _describe(transformers, model.eval(), what, preprocess, where, request)
        return dataclasses.replace(described, assumptions=assumed)


def _from_type(transformers: Any, request: Request) -> Model:
    """A bare model type has an architecture but no weights."""
    known = vision_types(transformers)
    if request.rest not in transformers.CONFIG_MAPPING:
        raise UnknownName(
            f"'{request.rest}' is neither a folder, nor a hub id (OWNER/NAME), nor a model type of transformers."
            f"{did_you_mean(request.rest, known)} Type 'hf:google/vit-base-patch16-224', or 'hf:vit' with "
            "pretrained=False.",
            parameters={"pretrained": "False"},
        )
    if request.pretrained:
        raise BadInput(
            f"'{request.spec}' is a model type without weights; give a hub id or a folder (hf:OWNER/NAME), or ask for "
            "random weights with pretrained=False.",
            parameters={"pretrained": "False"},
        )
    with fetching(request.spec, local=True), seeded(), torch.no_grad():
        config = transformers.AutoConfig.for_model(request.rest)
        what = kind(transformers, config, request.spec)
        if what == "pair" and request.labels is not None:
            raise ModelUnavailable(
                f"'{request.spec}' has no tokenizer to read the labels with; give a hub id or a folder that holds one, "
                "or use 'open_clip:ViT-B-32', whose tokenizer is built in."
            )
        model = _with_random(transformers, config, what, request).eval()
        return _describe(transformers, model, what, plain_preprocess(config), "", request)


def vision_types(transformers: Any) -> list[str]:
    """Model types with an image classifier or a text tower, for `clairvit models` and for suggestions."""
    auto = transformers.models.auto.modeling_auto
    one_of = (
        auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
        auto.MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    )
    return sorted({name for mapping in one_of for name in mapping})


def kind(transformers: Any, config: Any, spec: str) -> Kind:
    """Return what the model is to us, told by the class its weights were saved from; else by its configuration."""
    architectures = config.architectures or ()
    if any("ForImageClassification" in name for name in architectures):
        return "classifier"
    saved = next((known for name in architectures if (known := getattr(transformers, name, None)) is not None), None)
    if saved is not None and not _PRETRAINING.search(saved.__name__) and not _pairs(saved):
        _refuse(saved, config, spec)
    base = transformers.MODEL_MAPPING.get(type(config), None)
    base = base[0] if isinstance(base, tuple) else base
    if base is not None and _pairs(base) and hasattr(config, "vision_config"):
        return "pair"
    if not architectures and type(config) in transformers.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING:
        _refuse(transformers.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING[type(config)], config, spec)
        return "classifier"
    if base is None or not _takes_images(base, config):
        raise NotApplicable(
            f"'{spec}' is a {config.model_type} model, which does not take images; expected a vision model such as "
            "'hf:google/vit-base-patch16-224'."
        )
    _refuse(base, config, spec)
    return "backbone"


_PRETRAINING = re.compile("ForPreTraining|ForMaskedImageModeling")  # their encoder is explained


def _pairs(model_class: Any) -> bool:
    """An image tower and a text tower whose embeddings are compared."""
    return hasattr(model_class, "get_text_features") and hasattr(model_class, "get_image_features")


def _takes_images(model_class: Any, config: Any) -> bool:
    parts = (config, getattr(config, "vision_config", None))
    named = any(hasattr(part, name) for part in parts for name in ("num_channels", "image_size", "patch_size"))
    return named or "pixel_values" in inspect.signature(model_class.forward).parameters


def _refuse(model_class: Any, config: Any, spec: str) -> None:
    model_class = model_class[0] if isinstance(model_class, tuple) else model_class
    reason = refusal(model_class, config)
    if reason is not None:
        raise NotApplicable(f"'{spec}' cannot be explained as it is: {reason}")


def _class(transformers: Any, config: Any, what: Kind) -> Any:
    if what != "classifier":
        return transformers.AutoModel
    # by its own name first: a distilled DeiT has two heads, and the automatic class would leave both out
    named = (getattr(transformers, name, None) for name in config.architectures or ())
    return next((found for found in named if found is not None), transformers.AutoModelForImageClassification)


def _with_weights(transformers: Any, config: Any, what: Kind, where: str, request: Request) -> nn.Module:
    if request.size:
        raise BadInput(
            f"The weights of '{request.spec}' fix its image size, so size={request.size} cannot be used; leave it out."
        )
    bars = transformers.utils.logging
    shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        model, report = _class(transformers, config, what).from_pretrained(
            where, config=config, output_loading_info=True
        )
    finally:
        if shown:
            bars.enable_progress_bar()
    missing = sorted(report["missing_keys"])
    if what == "backbone":
        return _backbone(model, pooled=not any("pooler" in key for key in missing))
    if missing:
        raise ModelUnavailable(
            f"The weights of '{request.spec}' lack {len(missing)} of the model's tensors ({', '.join(missing[:3])}), "
            "which would be random; use weights that were saved from the whole model."
        )
    return model  # type: ignore[no-any-return]


def _with_random(transformers: Any, config: Any, what: Kind, request: Request) -> nn.Module:
    if request.size:
        rows, columns = request.size
        vision = getattr(config, "vision_config", config)
        vision.image_size = rows if rows == columns else [rows, columns]
    if what == "classifier" and request.labels is not None:
        config.num_labels = len(request.labels)
    model_class = _class(transformers, config, what)
    build_from = getattr(model_class, "from_config", None) or model_class._from_config
    model = build_from(config)
    return _backbone(model, pooled=True) if what == "backbone" else model


def _backbone(model: nn.Module, pooled: bool) -> nn.Module:
    return UnmaskedEncoder(model) if type(model).__name__ == "ViTMAEModel" else Backbone(model, pooled)


def _describe(
    transformers: Any, model: nn.Module, what: Kind, preprocess: Preprocess, where: str, request: Request
) -> Model:
    if what == "classifier":
        config: Any = model.config
        labels = fit_labels(request.labels, lambda: class_names(config), config.num_labels)
        return Model(model, request.name, preprocess, labels)
    if what == "backbone":
        return Model(model, request.name, preprocess, classifier=False)
    if request.labels is None:
        return Model(ImageTower(model), request.name, preprocess, classifier=False)
    text = prompt_features(transformers, model, where, request.labels)
    scale = model.logit_scale.exp()  # type: ignore[operator]
    module = ZeroShot(ImageTower(model), text, scale, getattr(model, "logit_bias", None))
    return Model(module, request.name, preprocess, request.labels)


def prompt_features(transformers: Any, model: Any, where: str, prompts: tuple[str, ...]) -> Tensor:
    """[C, d], the text tower's own embedding of each prompt."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(where, trust_remote_code=False)
    # SigLIP was trained on full-length padding and reads the last token; the others stop at the end mark
    padding = "max_length" if "siglip" in model.config.model_type else True
    length = model.config.text_config.max_position_embeddings
    tokens = tokenizer(list(prompts), padding=padding, truncation=True, max_length=length, return_tensors="pt")
    tokens.pop("token_type_ids", None)
    return first_scores(model.get_text_features(**tokens))


class ImageTower(nn.Module):
    """The image half of an image-and-text pair: pixels -> projected embedding."""

    def __init__(self, pair: nn.Module) -> None:
        super().__init__()
        self.pair = pair
        # held by nobody else once the prompts are encoded; the text half is often the larger one
        for name in ("text_model", "text_projection"):
            if isinstance(getattr(pair, name, None), nn.Module):
                setattr(pair, name, None)

    def forward(self, pixels: Tensor) -> Tensor:
        return first_scores(self.pair.get_image_features(pixel_values=pixels))  # type: ignore[operator]


def class_names(config: Any) -> tuple[str, ...]:
    """Return the class names of a configuration; none where they are transformers' placeholders, LABEL_0, LABEL_1, …"""
    names = {int(number): str(name) for number, name in (getattr(config, "id2label", None) or {}).items()}
    if sorted(names) != list(range(len(names))) or all(name == f"LABEL_{number}" for number, name in names.items()):
        return ()
    return tuple(names[number] for number in range(len(names)))


def saved_preprocess(module: nn.Module) -> Preprocess | None:
    """Return the preprocessing saved where a module's weights came from: a folder, or the hub's cache on this disk."""
    import transformers

    where = str(getattr(getattr(module, "config", None), "name_or_path", "") or "")
    if not where:
        return None
    try:
        with quiet(), offline():
            processor = transformers.AutoImageProcessor.from_pretrained(
                where, trust_remote_code=False, local_files_only=True
            )
        return read_processor(processor.to_dict(), where)
    except (OSError, ValueError, NotApplicable):  # no processor there, or none that resizes as ours does
        return None


def _preprocess(transformers: Any, config: Any, where: str, request: Request) -> tuple[Preprocess, tuple[str, ...]]:
    """Return the saved processor's numbers, else the user's; a mean that is stated nowhere is not guessed."""
    try:
        images = transformers.AutoImageProcessor.from_pretrained(where, trust_remote_code=False).to_dict()
    except OSError as error:
        if not Path(where).is_dir():
            raise
        given = request.preprocessing
        if given.mean is None or given.std is None:
            raise ModelUnavailable(
                f"'{request.spec}' has no preprocessor_config.json, so its mean, std and image size are unknown; load "
                "it with mean= and std= (and resize=), or save the image processor there too."
            ) from error
        preprocess = given.applied_to(plain_preprocess(config))
        absent = given.missing()
        return preprocess, assumption(
            absent, preprocess, f"the usual, because '{where}' has no preprocessor_config.json"
        )
    return read_processor(images, request.spec), ()


def plain_preprocess(config: Any) -> Preprocess:
    """For random weights, where any honest numbers will do."""
    size = getattr(getattr(config, "vision_config", config), "image_size", None) or 224
    rows, columns = (size, size) if isinstance(size, int) else tuple(size)
    return Preprocess(size=(rows, columns), mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))


def read_processor(images: dict[str, Any], spec: str) -> Preprocess:
    """A transformers image processor as numbers."""
    size = {key: value for key, value in dict(images.get("size") or {}).items() if value}
    crop = images.get("crop_size") if images.get("do_center_crop") else None
    short, box = size.get("shortest_edge"), (size.get("height"), size.get("width"))
    fraction = images.get("crop_pct")  # ConvNeXt's way: crop a fraction, but squash from 384 up
    if short and fraction:
        target = (short, short)
        resize: int | tuple[int, int] = int(short / fraction) if short < 384 else target
    elif short:
        target, resize = _box(crop, short), short
    elif box[0] and box[1]:
        target, resize = _box(crop, box), (int(box[0]), int(box[1]))
    else:
        raise NotApplicable(
            f"The image processor of '{spec}' resizes by {size or 'a token budget'}, and ClairViT by 'shortest_edge' "
            "or 'height' and 'width'; preprocess the images yourself and pass tensors to cv.wrap(module, …)."
        )
    # mean and std are for pixels times rescale_factor (1/255 nearly always), ours for pixels in 0..1
    unit = 255 * images.get("rescale_factor", 1 / 255) if images.get("do_rescale", True) else 255.0
    mean, std = (images["image_mean"], images["image_std"]) if images.get("do_normalize", True) else ([0.0], [1.0])
    return Preprocess(
        size=target,
        mean=_three(mean, unit),
        std=_three(std, unit),
        resize=resize,
        interpolation=INTERPOLATIONS[int(images.get("resample", 2))],
        keep_ratio=isinstance(resize, int),
    )


def _box(crop: Any, otherwise: Any) -> tuple[int, int]:
    sides = (crop["height"], crop["width"]) if isinstance(crop, dict) else crop or otherwise
    rows, columns = (sides, sides) if isinstance(sides, int) else sides
    return int(rows), int(columns)


def _three(values: Any, unit: float) -> tuple[float, float, float]:
    three = [float(value) / unit for value in (values * 3 if len(values) == 1 else values)]
    return three[0], three[1], three[2]
