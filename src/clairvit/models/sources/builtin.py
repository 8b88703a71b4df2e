"""`pets` and `scenes`: the models whose weights come with this package."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path

from clairvit.errors import BadInput
from clairvit.models.labels import fit_labels
from clairvit.models.load_options import LoadOptions, seeded
from clairvit.models.model import Model
from clairvit.models.preprocess import Preprocess

_PACKAGE = "clairvit.models.builtin"
# weights file and its architecture (None: the file states it)
_FILES = {
    "pets": ("pets/pets-vit-tiny.safetensors", "timm:vit_tiny_patch16_224"),
    "scenes": ("scenes/scenes-vit.safetensors", None),
}


@contextmanager
def built_in_weights(name: str) -> Iterator[tuple[Path, str | None]]:
    """Yield the weights file of a built-in model, and its architecture if the file does not state it."""
    relative, arch = _FILES[name]
    with resources.as_file(resources.files(_PACKAGE).joinpath(*relative.split("/"))) as path:
        yield path, arch


def build(name: str, request: LoadOptions) -> Model:
    """Return the built-in model of that name."""
    return {"pets": _pets, "scenes": _scenes}[name](request)


def _pets(request: LoadOptions) -> Model:
    """Return the ViT-Tiny for 37 breeds; its model card is pets/README.md."""
    import timm
    from safetensors.torch import load as parse

    folder = resources.files(_PACKAGE) / "pets"
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


def _scenes(request: LoadOptions) -> Model:
    """Return the ViT for generated scenes; its model card is scenes/README.md, its labels are in the weights file."""
    from clairvit.models.sources import file

    if request.pretrained and request.size not in (None, (96, 96)):
        raise BadInput(f"The built-in model takes 96 x 96 images, not size={request.size}; leave size out.")
    with built_in_weights("scenes") as (path, _):
        return file.build(dataclasses.replace(request, identifier=str(path)))
