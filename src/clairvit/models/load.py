"""load("pets"), load("timm:vit_base_patch16_224") …, and wrap(module) for everything else."""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import importlib
import importlib.util
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from clairvit.errors import BadInput, UnknownName, did_you_mean
from clairvit.models.activation import (
    Activation,
    Stated,
    check_activation,
    head_outputs,
    infer_activation,
    output_columns,
)
from clairvit.models.layout import Layout
from clairvit.models.model import Model, Preprocess, check_materialised
from clairvit.models.preprocess import assumption, for_size, preprocess_options
from clairvit.models.request import Labels, Request, Size, fit_labels, read_labels, rows_columns, seeded
from clairvit.models.sources.hf_outputs import Backbone, adapted
from clairvit.models.sources.python import current_directory_importable, is_python_name
from clairvit.models.sources.zero_shot import ZeroShot

DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


class Source(NamedTuple):
    """One line of `clairvit models`."""

    spec: str
    description: str
    example: str
    activation: str = ""  # what scores mean, where the kind of name says it


_SOFTMAX = "softmax; raw for a single output"
_ZERO_SHOT = "prompts: softmax, SigLIP sigmoid, a single CLIP prompt raw (the cosine)"
SOURCES = (
    Source("pets", "the built-in ViT-Tiny for 37 breeds of cats and dogs; needs no network", "pets", "softmax"),
    Source("scenes", "the built-in small ViT for generated scenes, where the evidence is known", "scenes", "softmax"),
    Source("timm:NAME", "any model of timm, with its own preprocessing", "timm:vit_base_patch16_224", _SOFTMAX),
    Source(
        "hf:ID",
        "a transformers vision model from the hub or a folder; CLIP with prompts",
        "hf:google/vit-base-patch16-224",
        f"config.problem_type, else {_SOFTMAX}; {_ZERO_SHOT}",
    ),
    Source("torchvision:NAME", "a torchvision classifier", "torchvision:vit_b_16", "softmax"),
    Source(
        "open_clip:NAME:WEIGHTS",
        "an open_clip image tower; zero-shot with prompts",
        "open_clip:ViT-B-32:openai",
        _ZERO_SHOT,
    ),
    Source(
        "file:PATH", "your own weights for a timm architecture (--arch timm:NAME)", "file:model.safetensors", _SOFTMAX
    ),
    Source(
        "MODULE:ATTRIBUTE",
        "a module of your own Python code, or a function that returns one",
        "mymodels:build",
        "what the module states, else " + _SOFTMAX,
    ),
)
BUILT_IN = ("pets", "scenes")
_BUILDERS = {
    "timm": "clairvit.models.sources.timm",
    "hf": "clairvit.models.sources.hf",
    "torchvision": "clairvit.models.sources.torchvision",
    "open_clip": "clairvit.models.sources.open_clip",
    "file": "clairvit.models.sources.file",
}
_PYTHON = "python"  # MODULE:ATTRIBUTE, where the module is none of the names above


def load(
    name: str,
    *,
    pretrained: bool = True,
    arch: str | None = None,
    labels: Labels | None = None,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    size: Size | None = None,
    mean: float | Sequence[float] | None = None,
    std: float | Sequence[float] | None = None,
    resize: Size | None = None,
    interpolation: str | None = None,
    activation: str | None = None,
) -> Model:
    """Load a model by name: pets, scenes, timm:NAME, hf:ID, torchvision:NAME, open_clip:NAME:WEIGHTS or file:PATH.

    MODULE:ATTRIBUTE is a model of your own code, which stays on its device, in its precision and mode unless `device`
    or `dtype` is given. Any other comes in eval mode. What its source does not state about preprocessing is named in
    `Model.assumptions`.

    Args:
        name: What to load; `clairvit models` lists the sources.
        pretrained: False draws random weights, always the same.
        arch: The timm architecture of a weights file (file: only).
        labels: Class names in class order, an id → name or name → id dict, or a JSON file of any of these; for
            CLIP-like models the prompts, taken word for word.
        device, dtype: Where and in which precision the model runs; CPU and float32 unless given.
        size: Image size, which is also the centre crop, where the model leaves a choice.
        mean, std: For pixels in 0..1, three numbers (red, green, blue) or one; in place of the source's own.
        resize: Short side in pixels before the crop, or (rows, columns) that the image is made to cover.
        interpolation: nearest, lanczos, bilinear, bicubic, box or hamming.
        activation: What the scores mean: softmax (one class of several), sigmoid (each class for itself) or raw (no
            probabilities: a regression, a cosine); None is what the model states itself.

    Returns:
        The model that every verb takes.

    Example:
        >>> import clairvit as cv
        >>> cv.load("pets")
        Model('pets', VisionTransformer, 224×224, 37 classes, softmax, cpu, torch.float32)
        >>> cv.load("timm:vit_tiny_patch16_224", pretrained=False, mean=0.5, std=0.5, resize=248).preprocess.resize
        248
    """
    source, rest = split(name)
    where, kind = usable_device(device), _dtype(dtype)
    preprocessing = preprocess_options(mean, std, resize, interpolation)
    means = None if activation is None else check_activation(activation)
    request = Request(name, rest, pretrained, arch, read_labels(labels), rows_columns(size), means, preprocessing)
    if arch is not None and source != "file":
        raise BadInput(f"arch={arch!r} belongs to 'file:PATH' only; '{name}' knows its own architecture.")
    built_in = {"pets": _pets, "scenes": _scenes}.get(source)
    if source == _PYTHON:
        return _own_code(request, device, dtype)
    model: Model = built_in(request) if built_in else importlib.import_module(_BUILDERS[source]).build(request)
    model = with_activation(model, means)
    module = model.module.eval().to(device=where, dtype=kind)
    return dataclasses.replace(model, module=module, preprocess=preprocessing.applied_to(model.preprocess))


def _own_code(request: Request, device: str | torch.device | None, dtype: str | torch.dtype | None) -> Model:
    """Return the model of MODULE:ATTRIBUTE, moved or cast only where that is asked for."""
    from clairvit.models.sources.python import build

    model = build(request)
    module = model.module
    module = module if device is None else module.to(device=usable_device(device))
    module = module if dtype is None else module.to(dtype=_dtype(dtype))
    return dataclasses.replace(model, module=module)


def wrap(
    module: nn.Module,
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
) -> Model:
    """Wrap any module that maps [B, 3, H, W] to [B, classes]. The module is not changed in any way.

    Preprocessing that is left out is taken from the module where it is known (timm's configuration, the processor saved
    with a transformers model), else it is ImageNet's; `Model.assumptions` then says so.

    Args:
        module: The module; inside torch.compile or DataParallel the inner one is taken.
        mean, std: For pixels in 0..1, three numbers (red, green, blue) or one.
        size: Rows and columns of the image that the module takes, which is also the centre crop.
        labels: Class names in class order, an id → name or name → id dict, or a JSON file of any of these; left out,
            those of a transformers configuration.
        resize: Short side in pixels before the crop, or (rows, columns) that the image is made to cover.
        interpolation: nearest, lanczos, bilinear, bicubic, box or hamming.
        name: The name in results; the class's unless given.
        layout: Grid, prefix tokens and pooling, if they are not to be inferred.
        classifier: False for an embedding, which has no predicted class; timm and transformers modules say so.
        activation: What the scores mean: softmax (one class of several), sigmoid (each class for itself) or raw (no
            probabilities). None reads it off the module: transformers' problem_type, a loss that it holds, a last
            nn.Sigmoid or nn.Softmax (scores that are taken as they are); a single output column is raw, everything
            else softmax.

    Returns:
        The model that every verb takes.

    Example:
        >>> import clairvit as cv, timm
        >>> module = timm.create_model("vit_tiny_patch16_224", num_classes=2)
        >>> cv.wrap(module, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5), labels={0: "ant", 1: "bee"}).labels
        ('ant', 'bee')
    """
    if not isinstance(module, nn.Module):
        raise BadInput(
            f"wrap got a {type(module).__name__}; expected a torch.nn.Module. For a model by name type cv.load(name)."
        )
    taken_off = wrappers(module)
    module = unwrapped(module)
    if isinstance(module, torch.jit.ScriptModule):
        raise BadInput(
            "wrap got a scripted or traced module (torch.jit), which runs outside Python and cannot be looked into; "
            "expected the module it was made from."
        )
    name = name or type(module).__name__
    check_materialised(module, name)
    traced = adapted(module)
    preprocessing = preprocess_options(mean, std, resize, interpolation)
    known, source = _own_preprocess(module, rows_columns(size))
    preprocess = preprocessing.applied_to(known)
    absent = preprocessing.missing() if source is not None else ()
    outputs = certain_outputs(module)
    given = read_labels(labels)
    if given and outputs is not None:
        names = fit_labels(given, tuple, outputs)
    else:
        names = given or _own_labels(module, outputs)
    if classifier is None:
        classifier = not (_embeds(module) or isinstance(traced, Backbone))
    assumed = assumption(absent, preprocess, source or "")
    model = Model(traced, name, preprocess, names, layout, classifier, assumptions=assumed, wrappers=taken_off)
    return with_activation(model, None if activation is None else check_activation(activation))


def with_activation(model: Model, activation: Activation | None) -> Model:
    """Return the model with the activation that was given, else with what its source or its module states."""
    if activation is not None:
        check_activation(activation, output_columns(model.module) if model.classifier else None)
        if not model.classifier and activation != "raw":
            raise BadInput(
                f"activation='{activation}' was given for {model.name}, which returns an embedding; expected 'raw', or "
                "a model with classes."
            )
        stated = Stated(activation, "it was given")
    elif model.activation_reason:
        return model
    else:
        stated = infer_activation(model.module, classifier=model.classifier)
    if isinstance(model.module, ZeroShot) and stated.activation == "raw":
        model.module.use_cosine()
    return dataclasses.replace(
        model, activation=stated.activation, activation_reason=stated.reason, activated=stated.activated
    )


def certain_outputs(module: nn.Module) -> int | None:
    """Return the number of outputs of a classifier of timm, transformers or torchvision, by the shape of its head.

    None for other modules, in which a layer called head may be anything: their labels are counted at the first forward
    pass.
    """
    known = type(module).__module__.partition(".")[0] in ("timm", "transformers", "torchvision")
    return head_outputs(module) if known else None


def _own_labels(module: nn.Module, outputs: int | None) -> tuple[str, ...]:
    """Return the class names of a transformers classifier, if it has any for all of its outputs."""
    if outputs is None or not _is_transformers(module):
        return ()
    from clairvit.models.sources.hf import class_names

    names = class_names(module.config)
    return names if len(names) == outputs else ()


def _embeds(module: nn.Module) -> bool:
    """timm backbones have no classes; transformers calls its headless models …Model."""
    headless = hasattr(module, "config") and "Model" in type(module).__name__.partition("With")[0][-5:]
    return getattr(module, "num_classes", None) == 0 or headless


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside torch.compile, DataParallel and DistributedDataParallel: only that one can be traced."""
    while (inner := unwrapped_once(module)) is not None:
        module = inner
    return module


def unwrapped_once(module: nn.Module) -> nn.Module | None:
    """Return the module inside one wrapper; None if there is no wrapper."""
    parallel = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    inner = module.module if isinstance(module, parallel) else getattr(module, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else None


def wrappers(module: nn.Module) -> tuple[str, ...]:
    """Return what `unwrapped` takes off, outermost first: "torch.compile", "DataParallel", …"""
    names: list[str] = []
    while (inner := unwrapped_once(module)) is not None:
        names.append("torch.compile" if hasattr(module, "_orig_mod") else type(module).__name__)
        module = inner
    return tuple(names)


def sources(pattern: str | None = None) -> list[Source]:
    """The kinds of names `load` takes; with a pattern ("timm:vit_tiny*", "siglip") the names themselves."""
    if pattern is None:
        return list(SOURCES)
    source, colon, wanted = pattern.partition(":")
    if not colon:
        source, wanted = "", pattern
    elif source not in _BUILDERS:
        raise _unknown(pattern)
    wanted = wanted if any(c in wanted for c in "*?[") else f"*{wanted}*"
    kinds = {source.spec.partition(":")[0]: source.activation for source in SOURCES}
    searched = [s for s in ("timm", "torchvision", "open_clip", "hf") if source in ("", s)]
    built_in = [s for s in SOURCES if s.spec in BUILT_IN and not source and fnmatch.fnmatchcase(s.spec, wanted.lower())]
    return built_in + [
        Source(f"{s}:{name}", note, f"{s}:{name}", kinds[s])
        for s in searched
        for name, note in _names(s, optional=not source)
        if fnmatch.fnmatchcase(name.lower(), wanted.lower())
    ]


def split(name: str) -> tuple[str, str]:
    """'timm:vit_tiny_patch16_224' -> ('timm', 'vit_tiny_patch16_224')."""
    if not isinstance(name, str):
        raise BadInput(
            f"load got a {type(name).__name__}; expected a name such as 'pets'. For a module use cv.wrap(it)."
        )
    if name in BUILT_IN:
        return name, ""
    source, _, rest = name.partition(":")
    if source in _BUILDERS and rest:
        return source, rest
    if name.endswith((".safetensors", ".pth", ".pt")):
        return "file", name
    if rest and is_python_name(name) and not _misspelt(source):
        return _PYTHON, name
    raise _unknown(name)


def _misspelt(source: str) -> bool:
    """Return whether a prefix that Python cannot import is nearly the name of a source: 'tim', 'torchvison'."""
    if not difflib.get_close_matches(source.lower(), _BUILDERS, n=1):
        return False
    with current_directory_importable():
        return "." not in source and importlib.util.find_spec(source) is None


def _unknown(name: str) -> UnknownName:
    """A source nobody knows, or a good name whose source was left out."""
    import timm

    source, colon, rest = name.partition(":")
    kinds = ", ".join(f"'{s.spec}'" for s in SOURCES)
    if timm.is_model(name):
        hint = f" Did you mean 'timm:{name}'?"
    elif colon and not rest:
        example = next((s.example for s in SOURCES if s.spec.startswith(name)), "pets")
        hint = f" Did you mean '{example}'?"
    elif colon:
        near = difflib.get_close_matches(source.lower(), _BUILDERS, n=1)
        hint = f" Did you mean '{near[0]}:{rest}'?" if near else ""
    elif "/" in name and not name.startswith((".", "/", "~")):  # a hub id: google/vit-base-patch16-224
        hint = f" Did you mean 'hf:{name}'?"
    else:
        hint = did_you_mean(name, [*BUILT_IN, *(f"timm:{known}" for known in timm.list_models())])
    return UnknownName(f"There is no model '{name}'.{hint} Models are named {kinds}; type 'clairvit models'.")


def _names(source: str, optional: bool) -> list[tuple[str, str]]:
    """(name, note) of every model of a source. In a search over all sources, absent libraries have no models."""
    if source == "timm":
        import timm

        tagged = {name.partition(".")[0] for name in timm.list_pretrained()}
        return [(name, "" if name in tagged else "no weights") for name in timm.list_models()]
    if source == "torchvision":
        from clairvit.models.sources.torchvision import names

        return [(name, "") for name in names()]
    library = {"open_clip": "open_clip", "hf": "transformers"}[source]
    if optional and importlib.util.find_spec(library) is None:
        return []
    from clairvit.models.sources.hub import extra

    package = extra(library, {"open_clip": "clip", "hf": "hf"}[source], source)
    if source == "open_clip":
        return [
            (name, f"weights: {', '.join(package.list_pretrained_tags_by_model(name))}")
            for name in package.list_models()
        ]
    from clairvit.models.sources.hf import vision_types

    return [(name, "a model type, for --no-pretrained") for name in vision_types(package)]


# weights inside this package, and the architecture that they are for (None: the file says it)
_BUILT_IN_FILES = {
    "pets": ("pets/pets-vit-tiny.safetensors", "timm:vit_tiny_patch16_224"),
    "scenes": ("scenes/scenes-vit.safetensors", None),
}


@contextmanager
def built_in_weights(name: str) -> Iterator[tuple[Path, str | None]]:
    """Yield the weights file of a built-in model, and its architecture where the file does not say it."""
    relative, arch = _BUILT_IN_FILES[name]
    with resources.as_file(resources.files("clairvit.models.builtin").joinpath(*relative.split("/"))) as path:
        yield path, arch


def _pets(request: Request) -> Model:
    """The model in this package; its card is pets/README.md."""
    import timm
    from safetensors.torch import load as parse

    folder = resources.files("clairvit.models.builtin") / "pets"
    labels = json.loads((folder / "pets-labels.json").read_text(encoding="utf-8"))
    size = request.size or (224, 224)
    if request.pretrained and request.size not in (None, (224, 224)):
        raise BadInput(f"The built-in model takes 224 x 224 images, not size={request.size}; leave size out.")
    with seeded():
        module = timm.create_model("vit_tiny_patch16_224", num_classes=len(labels), img_size=size)
    if request.pretrained:
        module.load_state_dict(parse((folder / "pets-vit-tiny.safetensors").read_bytes()))  # fp16, cast on the way in
    preprocess = Preprocess(size=size, resize=248 if size == (224, 224) else None)
    return Model(module, request.name, preprocess, fit_labels(request.labels, lambda: labels, len(labels)))


def _scenes(request: Request) -> Model:
    """The model in this package for generated scenes; its card is scenes/README.md, its labels are in the file."""
    from clairvit.models.sources.file import build

    if request.pretrained and request.size not in (None, (96, 96)):
        raise BadInput(f"The built-in model takes 96 x 96 images, not size={request.size}; leave size out.")
    with built_in_weights("scenes") as (path, _):
        return build(dataclasses.replace(request, rest=str(path)))


def _own_preprocess(module: nn.Module, size: tuple[int, int] | None) -> tuple[Preprocess, str | None]:
    """Return what is known of a module's preprocessing and, where it is a guess, whose values they are."""
    config = getattr(module, "pretrained_cfg", None)
    if isinstance(config, dict):
        from clairvit.models.sources.timm import preprocess

        outputs = certain_outputs(module)
        # another head than that of timm's weights: fine-tuned, perhaps with another mean
        other = outputs is not None and outputs != config.get("num_classes")
        return preprocess(module, size), f"timm's for {config.get('architecture')}" if other else None
    if _is_transformers(module):
        from clairvit.models.sources.hf import saved_preprocess

        saved = saved_preprocess(module)
        if saved is not None:
            return for_size(saved, size or saved.size), None
    return Preprocess(size=size or _own_size(module) or (224, 224)), "ImageNet's, because the module does not say"


def _is_transformers(module: nn.Module) -> bool:
    """Return whether a module has a configuration of transformers, as its models and their subclasses do."""
    kinds = type(getattr(module, "config", None)).__mro__
    return any(kind.__module__.partition(".")[0] == "transformers" for kind in kinds)


def _own_size(module: nn.Module) -> tuple[int, int] | None:
    """torchvision keeps it on the module, transformers on the config."""
    for place in (module, getattr(module, "config", None)):
        size = getattr(place, "image_size", None)
        if isinstance(size, int | tuple | list):
            return rows_columns(size if isinstance(size, int) else tuple(size))
    return None


def usable_device(device: str | torch.device | None) -> torch.device:
    try:
        found = torch.device(device or "cpu")
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError) as error:
        raise BadInput(
            f"The device '{device}' cannot be used here ({str(error).splitlines()[0]}); try 'cpu'."
        ) from error
    return found


def _dtype(dtype: str | torch.dtype | None) -> torch.dtype:
    found = DTYPES.get(dtype) if isinstance(dtype, str) else dtype or torch.float32
    if found not in DTYPES.values():
        raise BadInput(f"dtype={dtype!r} is not one a model can run in; give one of {', '.join(DTYPES)}.")
    assert found is not None
    return found
