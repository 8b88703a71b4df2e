"""Registry of model sources: what a model name means, which names there are, and hints for misspelt ones."""

from __future__ import annotations

import difflib
import fnmatch
import importlib.util
import os
from typing import NamedTuple

from clairvit._registry import Registry
from clairvit.errors import BadInput, UnknownName, did_you_mean
from clairvit.models.sources.python import is_python_name
from clairvit.plugins import importable_from


class Source(NamedTuple):
    """One line of `clairvit models`: a kind of name, or a model."""

    spec: str
    description: str
    example: str
    activation: str = ""  # what scores mean, if the kind of name determines it


_SOFTMAX = "softmax; raw for a single output"
_ZERO_SHOT = "prompts: softmax, SigLIP sigmoid, a single CLIP prompt raw (the cosine)"
SOURCES = (
    Source("pets", "the built-in ViT-Tiny for 37 breeds of cats and dogs; needs no network", "pets", "softmax"),
    Source("scenes", "the built-in small ViT for generated scenes, where the evidence is known", "scenes", "softmax"),
    Source("parts", "the built-in small ViT for generated objects of removable parts", "parts", "softmax"),
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
BUILT_IN = ("pets", "scenes", "parts")
_KINDS = ", ".join(f"'{source.spec}'" for source in SOURCES)
BUILDERS = Registry(  # prefix -> module with build(request)
    "model",
    {name: f"clairvit.models.sources.{name}" for name in ("timm", "hf", "torchvision", "open_clip", "file")},
    advice=f"Models are named {_KINDS}; type 'clairvit models'.",
)
PYTHON = "python"  # MODULE:ATTRIBUTE


def sources(pattern: str | None = None) -> list[Source]:
    """Return the kinds of names that `load` takes; with a pattern ("timm:vit_tiny*", "siglip") the matching models."""
    if pattern is None:
        return list(SOURCES)
    prefix, colon, glob = pattern.partition(":")
    if not colon:
        prefix, glob = "", pattern
    elif prefix not in BUILDERS:
        raise _unknown_name(pattern)
    glob = (glob if any(c in glob for c in "*?[") else f"*{glob}*").lower()
    activations = {source.spec.partition(":")[0]: source.activation for source in SOURCES}
    searched = [source for source in ("timm", "torchvision", "open_clip", "hf") if prefix in ("", source)]
    built_in = [s for s in SOURCES if s.spec in BUILT_IN and not prefix and fnmatch.fnmatchcase(s.spec, glob)]
    return built_in + [
        Source(f"{source}:{name}", note, f"{source}:{name}", activations[source])
        for source in searched
        for name, note in _list_models(source, optional=not prefix)
        if fnmatch.fnmatchcase(name.lower(), glob)
    ]


def split_name(name: str) -> tuple[str, str]:
    """Return the source and the identifier of a name: 'timm:resnet18' -> ('timm', 'resnet18')."""
    if not isinstance(name, str):
        raise BadInput(
            f"load got a {type(name).__name__}; expected a name such as 'pets'. For a module use cv.wrap(it)."
        )
    if name in BUILT_IN:
        return name, ""
    source, _, identifier = name.partition(":")
    if source in BUILDERS and identifier:
        return source, identifier
    if name.endswith((".safetensors", ".pth", ".pt")):
        return "file", name
    if identifier and is_python_name(name) and not _is_misspelt(source):
        return PYTHON, name
    raise _unknown_name(name)


def _is_misspelt(source: str) -> bool:
    """Return whether a prefix that Python cannot import is close to the name of a source: 'tim', 'torchvison'."""
    if not difflib.get_close_matches(source.lower(), BUILDERS, n=1):
        return False
    with importable_from(os.getcwd()):
        return "." not in source and importlib.util.find_spec(source) is None


def _unknown_name(name: str) -> UnknownName:
    """Return the error for a name of no source, with the nearest name; the prefix may only be missing."""
    import timm

    source, colon, identifier = name.partition(":")
    if timm.is_model(name):
        hint = f" Did you mean 'timm:{name}'?"
    elif colon and not identifier:
        example = next((s.example for s in SOURCES if s.spec.startswith(name)), "pets")
        hint = f" Did you mean '{example}'?"
    elif colon:
        near = difflib.get_close_matches(source.lower(), BUILDERS, n=1)
        hint = f" Did you mean '{near[0]}:{identifier}'?" if near else ""
    elif "/" in name and not name.startswith((".", "/", "~")):  # a hub id: google/vit-base-patch16-224
        hint = f" Did you mean 'hf:{name}'?"
    else:
        hint = did_you_mean(name, [*BUILT_IN, *(f"timm:{model}" for model in timm.list_models())])
    return BUILDERS.unknown(name, near=hint)


def _list_models(source: str, optional: bool) -> list[tuple[str, str]]:
    """Return (name, note) of every model of a source; none if its library is `optional` and not installed."""
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
