"""Small real studies for tests of reports, and a parser of their HTML."""

from __future__ import annotations

from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path

import torch

from clairvit.bench.plan import DataConfig, ModelConfig, Study
from clairvit.bench.run import run_study
from clairvit.bench.store import Store
from clairvit.bench.worker import Worker
from clairvit.data.dataset import ImageDataset, as_dataset
from clairvit.models.images import Batch
from helpers.tiny_models import pixels, wrapped

NASTY = '<script>alert(1)</script>"><img src=x onerror=alert(2)>&lt;a|b*c_d'  # whichever image is shown, it is one
NAMES = tuple(f"{index}{NASTY}.png" for index in range(6))
METHODS = ("legrad", "rollout", "genatt", "raw-attention")
METRICS = ("deletion", "insertion", "sparseness")
MODEL = wrapped("timm-vit", torch.float64)


def dataset(
    names: Sequence[str] = NAMES, labels: Sequence[int] | None = (1, 2, 1, 0, 1, 2), seed: int = 1
) -> ImageDataset:
    batch = Batch(pixels("timm-vit", len(names), seed, torch.float64), tuple(names))
    return as_dataset(batch, MODEL, labels=None if labels is None else labels[: len(names)])


def study_of(methods: Sequence[str] = METHODS, metrics: Sequence[str] = METRICS, spec: str = "folder:photos") -> Study:
    return Study((ModelConfig("tiny"),), (DataConfig(spec),), tuple(methods), tuple(metrics)).resolved()


def worker_of(study: Study, images: ImageDataset | None = None) -> Worker:
    return Worker(study, models={0: MODEL}, datasets={0: images or dataset()})


def run(path: Path, study: Study | None = None, images: ImageDataset | None = None) -> Store:
    """A store as a study writes it."""
    study = study or study_of()
    store = Store.open(path)
    run_study(study, store, worker=worker_of(study, images))
    return store


def unreadable(names: Sequence[str]) -> ImageDataset:
    """None of its images can be read."""
    from clairvit.errors import BadInput

    def read(row: int, model: object) -> object:
        raise BadInput(f"{names[row]} is no image.")

    good = dataset(names, None)
    return ImageDataset(tuple(names), read, good.content_hash)


VOID = {"meta", "link", "img", "br", "wbr"}
SVG = {"path"}


class Reader(HTMLParser):
    """What a browser would find: elements with their attributes and texts, in order."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.texts: dict[int, str] = {}  # by place among the elements: all that is inside
        self.open: list[tuple[str, int]] = []
        self.parents: list[tuple[str, ...]] = []
        self.feed(page)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.parents.append(tuple(name for name, _ in self.open))
        self.elements.append((tag, {name: value or "" for name, value in attributes}))
        if tag not in VOID:
            self.open.append((tag, len(self.elements) - 1))

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        assert tag in SVG
        self.parents.append(tuple(name for name, _ in self.open))
        self.elements.append((tag, {name: value or "" for name, value in attributes}))

    def handle_endtag(self, tag: str) -> None:
        open_tag, _ = self.open.pop()
        assert open_tag == tag, f"<{open_tag}> is closed by </{tag}>"

    def handle_data(self, data: str) -> None:
        for _, index in self.open:
            self.texts[index] = self.texts.get(index, "") + data

    def all(self, tag: str, kind: str | None = None) -> list[tuple[dict[str, str], str]]:
        """Attributes and text of every such element."""
        return [
            (attributes, self.texts.get(index, ""))
            for index, (name, attributes) in enumerate(self.elements)
            if name == tag and (kind is None or kind in attributes.get("class", "").split())
        ]

    def section(self, title: str) -> str:
        """The text of the section with this heading."""
        for attributes, text in self.all("section"):
            anchor = attributes["aria-labelledby"]
            heads = [t for tag in ("h2", "h3") for a, t in self.all(tag) if a["id"] == anchor]
            if heads == [title]:
                return text
        raise AssertionError(f"no section '{title}'")


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
