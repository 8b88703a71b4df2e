"""wrap(module): a module of the user's own as a model, with what the module states about itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol, TypeGuard, runtime_checkable

import torch
from torch import nn

from clairvit.errors import BadInput
from clairvit.models.activation import (
    HEADS,
    NOTHING_STATED,
    Activation,
    StatedActivation,
    check_activation,
    head_outputs,
    infer_activation,
    output_columns,
)
from clairvit.models.labels import Labels, fit_labels, read_labels
from clairvit.models.model import Layout, Model, check_placement
from clairvit.models.preprocess import (
    Preprocess,
    PreprocessOptions,
    Size,
    assumption,
    for_channels,
    for_size,
    parse_size,
    preprocess_options,
)
from clairvit.models.sources.adapters import Backbone, ImageTower, ZeroShot, clip_frames
from clairvit.models.sources.hf_outputs import adapted
from clairvit.models.text_encoder import encoder_of


def wrap(
    module: nn.Module | Pipeline,
    *,
    mean: float | Sequence[float] | None = None,
    std: float | Sequence[float] | None = None,
    size: Size | None = None,
    labels: Labels | None = None,
    resize: Size | None = None,
    interpolation: str | None = None,
    name: str | None = None,
    layout: Layout | None = None,
    classifier: bool | None = None,
    activation: str | None = None,
    channels: int | None = None,
    display: Sequence[int] | None = None,
    fit: str | None = None,
    frames: int | None = None,
    tokenizer: Any = None,
    through_no_grad: bool = False,
) -> Model:
    """Return a model of any module that maps [B, C, H, W] to [B, classes]; the module is not changed.

    Preprocessing that is left out is taken from the module where it is known (timm's configuration, the processor saved
    with a transformers model), else it is ImageNet's; `Model.assumptions` then says so.

    Args:
        module: The module; inside torch.compile or DataParallel the inner one is taken. Of a transformers pipeline
            ("image-classification"), its model with its image processor.
        mean, std: For pixels in 0..1, one number per channel (red, green, blue) or one for all.
        size: Rows and columns of the image that the module takes, which is also the centre crop.
        labels: Class names in class order, an id → name or name → id dict, or a JSON file of any of these; left out,
            those of a transformers configuration.
        resize: Short side in pixels before the crop, or (rows, columns) that the image is made to cover; the size
            unless given.
        interpolation: nearest, lanczos, bilinear, bicubic (unless given), box or hamming.
        name: The name in results; the class's unless given.
        layout: Grid, tokens next to the patches and pooling, if they are not to be inferred.
        classifier: False for an embedding, which has no predicted class; modules of timm, transformers and open_clip
            say so. Of others the first forward pass is looked at: an output that seems to be an embedding is refused.
        activation: What the scores mean: softmax (one class of several), sigmoid (each class for itself) or raw (no
            probabilities). None reads it off the module: transformers' problem_type, a loss that it holds, a last
            nn.Sigmoid or nn.Softmax (scores that are taken as they are); a single output column is raw, everything
            else softmax.
        channels: The number of channels C of an image; left out, that of the module's first convolution, else 3.
        display: Indices of the channels that pictures show as red, green and blue, or of the one shown in grey; left
            out, the first three.
        fit: crop (the picture keeps its shape, what is outside the centre is cut off) or squash (the whole picture is
            distorted to the module's size, or to `resize`); crop unless the module's own preprocessing says otherwise.
        frames: The number of frames of a clip, for a module that takes clips [B, C, T, H, W]; left out, that of its
            configuration, or any number where the first convolution is an nn.Conv3d.
        tokenizer: What reads the prompts of `cv.Text` for a CLIP or SigLIP module: open_clip.get_tokenizer(NAME), or a
            tokenizer or processor of transformers; left out, the one saved with a transformers model.
        through_no_grad: Keep gradients on where the forward switches them off (a frozen backbone under torch.no_grad or
            torch.inference_mode), so that methods that read gradients apply. No value changes. A detach() stays one.

    Returns:
        The model that `cv.explain` and all other functions take.

    Raises:
        BadInput: What is given is no module, or labels or preprocessing do not fit it.
        NotApplicable: A transformers model that returns neither class scores nor an embedding.

    Example:
        >>> import clairvit as cv, torch
        >>> module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 2))
        >>> cv.wrap(module, mean=0.5, std=0.5, size=2, labels={0: "ant", 1: "bee"}).labels
        ('ant', 'bee')
    """
    processor: Any = None
    if is_pipeline(module):
        module, processor = _pipeline_parts(module)
    if not isinstance(module, nn.Module):
        raise BadInput(
            f"wrap got a {type(module).__name__}; expected a torch.nn.Module. For a model by name type cv.load(name)."
        )
    removed_wrappers = wrappers(module)
    module = unwrapped(module)
    if isinstance(module, torch.jit.ScriptModule):
        raise BadInput(
            "wrap got a scripted or traced module (torch.jit), which runs outside Python and cannot be looked into; "
            "expected the module it was made from."
        )
    name = name or type(module).__name__
    check_placement(module, name)
    encoder = encoder_of(module, tokenizer, name)
    traced, returns = adapted(module)
    if encoder is not None and not returns:
        traced = ImageTower(module)
    options = preprocess_options(mean, std, resize, interpolation, display, fit)
    channels = image_channels(module) if channels is None else _check_channel_count(channels)
    preprocess, assumptions = _preprocess(module, options, parse_size(size), channels, processor)
    preprocess = dataclasses.replace(
        preprocess, frames=clip_frames(module) if frames is None else _check_frames(frames)
    )
    is_classifier = classifier
    if is_classifier is None:
        is_classifier = not (_is_headless(module) or isinstance(traced, Backbone | ImageTower) or returns)
    model = Model(
        traced,
        name,
        preprocess,
        _labels(module, read_labels(labels), returns),
        layout,
        is_classifier,
        assumptions=assumptions,
        wrappers=removed_wrappers,
        returns=returns,
        text_encoder=encoder,
        through_no_grad=bool(through_no_grad),
    )
    model = with_activation(model, None if activation is None else check_activation(activation))
    nothing_stated = classifier is None and not model.labels and model.activation_reason == NOTHING_STATED
    return dataclasses.replace(model, assumes_classes=nothing_stated and library_head_outputs(module) is None)


@runtime_checkable
class Pipeline(Protocol):
    """What `wrap` reads of a transformers pipeline."""

    model: nn.Module
    image_processor: Any


def is_pipeline(value: object) -> TypeGuard[Pipeline]:
    """Return whether a value is a pipeline of transformers; the library is not imported for it."""
    return any(kind.__module__.startswith("transformers.pipelines") for kind in type(value).__mro__)


def _pipeline_parts(pipeline: Pipeline) -> tuple[nn.Module, Any]:
    """Return the model and the image processor of a pipeline that takes images."""
    if getattr(pipeline, "image_processor", None) is None:
        raise BadInput(
            f"wrap got a {type(pipeline).__name__} without an image processor; expected a pipeline that takes images, "
            "such as pipeline('image-classification', …), or the module itself."
        )
    return pipeline.model, pipeline.image_processor


def with_activation(model: Model, activation: Activation | None) -> Model:
    """Return the model with the given activation, else with what its source or its module states."""
    if activation is not None:
        check_activation(activation, output_columns(model.module) if model.classifier else None)
        if not model.classifier and activation != "raw":
            raise BadInput(
                f"activation='{activation}' was given for {model.name}, which returns an embedding; expected 'raw', or "
                "a model with classes."
            )
        stated = StatedActivation(activation, "it was given")
    elif model.activation_reason:
        return model
    else:
        stated = infer_activation(model.module, classifier=model.classifier)
    if isinstance(model.module, ZeroShot) and stated.activation == "raw":
        model.module.use_cosine()
    return dataclasses.replace(
        model, activation=stated.activation, activation_reason=stated.reason, activated=stated.activated
    )


def library_head_outputs(module: nn.Module) -> int | None:
    """Return the number of outputs of a classifier of timm, transformers or torchvision, from the shape of its head.

    None for other modules, in which a layer called head may be anything: their labels are counted at the first forward
    pass.
    """
    library = type(module).__module__.partition(".")[0]
    return head_outputs(module) if library in ("timm", "transformers", "torchvision") else None


def _labels(module: nn.Module, labels: tuple[str, ...] | None, returns: str) -> tuple[str, ...]:
    """Return the given labels, their number checked where that is possible, else those of a transformers model.

    `returns` says that it gives no row of scores: then its labels are those of pixels or queries.
    """
    outputs = None if returns else library_head_outputs(module)
    if labels:
        return labels if outputs is None else fit_labels(labels, tuple, outputs)
    if (outputs is None and not returns) or not _has_transformers_config(module):
        return ()
    from clairvit.models.sources.hf import class_names

    names = class_names(module.config)
    return names if returns or len(names) == outputs else ()


def _is_headless(module: nn.Module) -> bool:
    """Return whether a module is known to have no classes.

    Those of timm have num_classes 0, those of transformers are called …Model, those of open_clip and clip are towers of
    a pair; in those of timm, torchvision and DINO an identity may take the place of the head.
    """
    named_model = hasattr(module, "config") and "Model" in type(module).__name__.partition("With")[0][-5:]
    library = type(module).__module__.partition(".")[0]
    is_tower = library in ("open_clip", "clip")
    without_head = library in ("timm", "torchvision", "dinov2", "dinov3") and any(
        isinstance(getattr(module, name, None), nn.Identity) for name in HEADS
    )
    return getattr(module, "num_classes", None) == 0 or named_model or is_tower or without_head


def image_channels(module: nn.Module) -> int:
    """Return how many channels a module's images have: by its configuration, else by its first convolution, else 3."""
    if _has_transformers_config(module):
        from clairvit.models.sources.hf import channel_count

        channels = channel_count(module.config)
        if channels is not None:
            return channels
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d | nn.Conv3d) and not (max(layer.kernel_size) == 1 and layer.in_channels > 4):
            return layer.in_channels  # a 1 × 1 convolution of many channels is a head that is defined first
    return 3


def _check_frames(frames: Any) -> int:
    if not isinstance(frames, int) or isinstance(frames, bool) or frames < 1:
        raise BadInput(f"frames={frames!r}; expected the number of frames of a clip, such as 16.")
    return frames


def _check_channel_count(channels: Any) -> int:
    if not isinstance(channels, int) or isinstance(channels, bool) or channels < 1:
        raise BadInput(f"channels={channels!r}; expected the number of channels of an image, such as 4.")
    return channels


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module inside torch.compile, DataParallel, DistributedDataParallel and PEFT: only that is traced."""
    while (inner := unwrapped_once(module)) is not None:
        module = inner
    return module


def unwrapped_once(module: nn.Module) -> nn.Module | None:
    """Return the module inside one wrapper; None if there is no wrapper."""
    parallel = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    inner = module.module if isinstance(module, parallel) else getattr(module, "_orig_mod", None)
    inner = _adapted_model(module) if inner is None else inner
    return inner if isinstance(inner, nn.Module) else None


def _adapted_model(module: nn.Module) -> nn.Module | None:
    """Return the model inside PEFT's wrapper, whose layers hold the adapters (LoRA, …); None for another module.

    `PeftModel.base_model` is the tuner, `base_model.model` the user's model with adapted layers in place of its own,
    so that both give the same output. Prompt learning changes the inputs instead: such a wrapper is kept.
    """
    if not hasattr(module, "peft_config") or getattr(module, "active_peft_config", None) is None:
        return None
    if getattr(module.active_peft_config, "is_prompt_learning", False):
        return None
    inner = getattr(getattr(module, "base_model", None), "model", None)
    return inner if isinstance(inner, nn.Module) else None


def wrappers(module: nn.Module) -> tuple[str, ...]:
    """Return the wrappers that `unwrapped` removes, outermost first: "torch.compile", "DataParallel", …"""
    names: list[str] = []
    while (inner := unwrapped_once(module)) is not None:
        names.append("torch.compile" if hasattr(module, "_orig_mod") else type(module).__name__)
        module = inner
    return tuple(names)


def _preprocess(
    module: nn.Module, options: PreprocessOptions, size: tuple[int, int] | None, channels: int, processor: Any
) -> tuple[Preprocess, tuple[str, ...]]:
    """Return the preprocessing that was given, else what the module states, and notes on what was assumed."""
    stated, assumed_from = _stated_preprocess(module, size, processor)
    preprocess = options.applied_to(for_channels(stated, channels))
    missing = options.missing() if assumed_from is not None else ()
    if size is not None and not {"mean", "std"} & set(missing):
        missing = ()  # resize and interpolation have defaults, which `wrap` states
    if channels == stated.channels:
        return preprocess, assumption(missing, preprocess, assumed_from or "")
    of_channels = tuple(name for name in ("mean", "std") if name in options.missing())
    others = tuple(name for name in missing if name not in of_channels)
    count = f"{channels} channel{'' if channels == 1 else 's'}"
    return preprocess, (
        *assumption(of_channels, preprocess, f"0.5, because nothing states them for {count}"),
        *assumption(others, preprocess, assumed_from or ""),
    )


def _stated_preprocess(
    module: nn.Module, size: tuple[int, int] | None, processor: Any
) -> tuple[Preprocess, str | None]:
    """Return the preprocessing that a module or a pipeline's processor states, and whose values are assumed, if any."""
    if processor is not None:
        from clairvit.models.sources.hf import read_processor

        stated = read_processor(processor.to_dict(), type(module).__name__, image_channels(module))
        return (stated if size is None else for_size(stated, size)), None
    config = getattr(module, "pretrained_cfg", None)
    if isinstance(config, dict):
        from clairvit.models.sources.timm import preprocess

        outputs = library_head_outputs(module)
        # another head than that of timm's weights: fine-tuned, perhaps with another mean
        new_head = outputs is not None and outputs != config.get("num_classes")
        return preprocess(module, size), f"timm's for {config.get('architecture')}" if new_head else None
    if _has_transformers_config(module):
        from clairvit.models.sources.hf import saved_preprocess

        saved = saved_preprocess(module)
        if saved is not None:
            return for_size(saved, size or saved.size), None
    visual = getattr(module, "visual", None)
    if isinstance(getattr(visual, "preprocess_cfg", None), dict):
        from clairvit.models.sources.open_clip import preprocess as open_clip_preprocess

        return open_clip_preprocess(visual.preprocess_cfg, type(module).__name__), None  # type: ignore[union-attr]
    return Preprocess(size=size or _stated_size(module) or (224, 224)), "ImageNet's, because the module does not say"


def _has_transformers_config(module: nn.Module) -> bool:
    """Return whether a module has a configuration of transformers, as its models and their subclasses do."""
    bases = type(getattr(module, "config", None)).__mro__
    return any(base.__module__.partition(".")[0] == "transformers" for base in bases)


def _stated_size(module: nn.Module) -> tuple[int, int] | None:
    """Return `image_size` of the module (torchvision) or of its configuration (transformers), or a NaFlex square.

    V-JEPA 2 calls it `crop_size`.
    """
    config = getattr(module, "config", None)
    if _has_transformers_config(module):
        from clairvit.models.sources.hf import square_size

        side = square_size(config)
        if side is not None:
            return side, side
    for holder in (module, config, getattr(config, "vision_config", None)):
        size = getattr(holder, "image_size", None) or getattr(holder, "crop_size", None)
        if isinstance(size, int | tuple | list):
            return parse_size(size if isinstance(size, int) else tuple(size))
    return None
