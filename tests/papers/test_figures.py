"""Figures of papers on a tiny model: which photos, which maps, which classes; and the sentence where one is missing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import clairvit as cv
from clairvit.bench.plan import DataConfig, ModelConfig
from clairvit.bench.store import Store
from clairvit.data.dataset import ImageDataset, as_dataset
from clairvit.errors import BadInput
from clairvit.methods.spec import resolve_method
from clairvit.papers.figure_spec import FigureColumn, FigureSpec, figure_problems
from clairvit.papers.figures import FigureContent, FigureInputs, compute_figures, join_figures
from clairvit.papers.paper import NAMES, MethodEntry, Paper, find_paper
from clairvit.papers.reproduce import Reproduction, reproduce
from clairvit.papers.setup import LoadedData, ReproductionConfig
from clairvit.plotting.paper_figures import paper_figure
from helpers.tiny_models import cnn, wrapped

MODEL = replace(wrapped("timm-vit", torch.float64), labels=("ant", "bee", "cat", "dog", "elk", "fox", "gnu"))
SIZE, COUNT = 32, 4


def photo(seed: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (SIZE, SIZE, 3), dtype=np.uint8))


def dataset(masks: bool = True, labels: bool = True) -> ImageDataset:
    mask = np.zeros((SIZE, SIZE), dtype=np.uint8)
    mask[4:20, 8:24] = 1
    images = as_dataset(
        [photo(seed) for seed in range(COUNT)],
        MODEL,
        masks=[mask] * COUNT if masks else None,
        labels=LABELS if labels else None,
    )
    return replace(images, names=tuple(f"photos/2007_{row}.jpg" for row in range(COUNT)))


PROBABILITIES = cv.explain(MODEL, [photo(seed) for seed in range(COUNT)], "random").logits.softmax(-1)
PREDICTED = PROBABILITIES.argmax(-1).tolist()
LABELS = [PREDICTED[0], PREDICTED[1], PREDICTED[2], (PREDICTED[3] + 1) % 7]  # the last is predicted wrongly


def small_paper(**fields: Any) -> Paper:
    """Joita's measures with two methods, and the figures of a test."""
    paper = find_paper("joita")
    methods = (MethodEntry("Rollout", "rollout"), MethodEntry("Gradient", "grad-rollout"))
    return replace(paper, methods=methods, tables=(), claims=(), costs=(), **fields)


def result_of(paper: Paper, folder: Path, images: ImageDataset, **options: Any) -> Reproduction:
    config = ReproductionConfig(paper, ModelConfig("tiny"), DataConfig("folder:here"), effort="quick", **options)
    return reproduce(config, Store.open(folder), model=MODEL, data=LoadedData(images, "generated images"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("figures") / "store"


def contents(folder: Path, *figures: FigureSpec, **others: Any) -> list[FigureContent]:
    images = others.pop("images", None) or dataset()
    result = result_of(small_paper(figures=figures, **others.pop("paper", {})), folder, images)
    return list(compute_figures(FigureInputs(result, MODEL, LoadedData(images, "generated images"), **others)))


def grid(**fields: Any) -> FigureSpec:
    return FigureSpec(**{"number": "3", "kind": "grid", "title": "two methods", "source": "p. 1"} | fields)


def texts(content: FigureContent) -> list[str]:
    figure = paper_figure(content)
    return [text.get_text() for text in figure.texts]


# Photos by methods


def test_maps_are_those_of_compare(folder: Path) -> None:
    (content,) = contents(folder, grid(images=2, masks="outline"))
    assert content.headings == ("Rollout", "Gradient")
    assert "2 of the 4 images that were scored, drawn with seed 0" in content.caption
    for line in content.lines:
        row = int(PurePath(line.title).stem[-1])
        assert line.mask is not None
        assert line.detail.startswith(MODEL.labels[PREDICTED[row]])
        assert line.correct is (row != 3)
        for method, explanation in zip(("rollout", "grad-rollout"), line.maps, strict=True):
            assert explanation is not None
            expected = cv.explain(MODEL, photo(row), method)
            assert torch.equal(explanation.maps, expected.maps)
    assert {"two methods" in text for text in texts(content)} == {True, False}


def test_the_same_seed_draws_the_same_photos(folder: Path) -> None:
    (first,), (again,) = contents(folder, grid(images=2)), contents(folder, grid(images=2))
    assert [line.title for line in first.lines] == [line.title for line in again.lines]


def test_the_papers_own_photos_are_taken_where_they_are(folder: Path) -> None:
    (content,) = contents(folder, grid(data="voc", ids=("2007_2", "2007_0")))
    assert [line.title for line in content.lines] == ["2007_2.jpg", "2007_0.jpg"]
    assert content.caption.startswith("The photos are the paper's (voc 2007_2, 2007_0).")
    assert content.note == ""
    (content,) = contents(folder, grid(data="voc", ids=("2007_2", "2008_9")))
    assert "are not in this data" in content.caption
    assert content.note == "not the paper's photos"
    assert content.note in texts(content)


def test_right_and_wrong_predictions(folder: Path) -> None:
    (content,) = contents(folder, grid(outcomes=True, images=2))
    assert [line.correct for line in content.lines] == [True, False]
    wrong = content.lines[1]
    assert wrong.title == "2007_3.jpg"
    assert wrong.detail.endswith(f", is {MODEL.labels[LABELS[3]]}")
    assert "of which 1 are predicted wrongly" in content.caption
    assert {"✓", "✗"} <= set(texts(content))
    assert content.note == ""


def test_a_constant_map_is_labelled(folder: Path) -> None:
    (content,) = contents(folder, grid(images=1))
    (line,) = content.lines
    first, second = line.maps
    assert first is not None
    zero = replace(first, maps=torch.zeros_like(first.maps))
    changed = replace(content, lines=(replace(line, maps=(zero, second)),))
    assert "zero everywhere" in texts(changed)
    assert "zero everywhere" not in texts(content)
    figure = paper_figure(changed)
    figure.canvas.draw()  # type: ignore[attr-defined]
    (words,) = (text.get_window_extent() for text in figure.texts if text.get_text() == "zero everywhere")
    pictures = [axes.get_window_extent() for axes in figure.axes if axes.images]
    assert len(pictures) >= 2
    assert not any(words.overlaps(picture) for picture in pictures)  # no part of a photo is covered


def test_the_caption_names_missing_classes_and_masks(folder: Path) -> None:
    result = result_of(
        small_paper(measures=tuple(replace(m, optional=True) for m in small_paper().measures), figures=()),
        folder.parent / "scored",
        dataset(),
    )
    bare = dataset(masks=False, labels=False)
    paper = replace(result.config.paper, figures=(grid(outcomes=True, masks="column"),))
    changed = replace(result, config=replace(result.config, paper=paper))
    (content,) = compute_figures(FigureInputs(changed, MODEL, LoadedData(bare, "bare")))
    assert "The masks are left out: the data has none." in content.caption
    assert {line.mask for line in content.lines} == {None}
    assert "mask" not in texts(content)


def test_a_column_of_a_second_model(folder: Path) -> None:
    columns = (FigureColumn("CNN", "gradcam", second=True), "Rollout")
    (alone,) = contents(folder, grid(columns=columns))
    assert alone.headings == ("Rollout",)
    assert "--second-model" in alone.caption
    second = replace(cv.wrap(cnn().eval(), mean=0.5, std=0.5, size=(SIZE, SIZE), labels=MODEL.labels), name="small CNN")
    (both,) = contents(folder, grid(columns=columns, images=1), second=second)
    assert both.headings == ("CNN", "Rollout")
    explanation = both.lines[0].maps[0]
    assert explanation is not None
    assert explanation.model == second.name


def test_a_method_that_does_not_fit_is_left_out_with_the_reason(folder: Path) -> None:
    columns = (FigureColumn("CNN", "rollout", second=True), "Rollout")
    second = replace(cv.wrap(cnn().eval(), mean=0.5, std=0.5, size=(SIZE, SIZE), labels=MODEL.labels), name="small CNN")
    (content,) = contents(folder, grid(columns=columns, images=1), second=second)
    assert content.headings == ("Rollout",)
    assert "CNN is left out: " in content.caption


def test_transposed_and_wrapped_figures_have_every_picture(folder: Path) -> None:
    (plain,) = contents(folder, grid(images=2))
    pictures = len(paper_figure(plain).axes)
    (transposed,) = contents(folder, grid(images=2, transposed=True))
    assert len(paper_figure(transposed).axes) == pictures
    wrapped_figures = contents(folder, grid(images=2, wrap=1))
    assert [content.slug for content in wrapped_figures] == ["3-1", "3-2"]
    assert all(len(content.lines) == 1 for content in wrapped_figures)
    assert {"Rollout", "Gradient"} <= set(texts(wrapped_figures[0]))


# Classes and layers


def test_the_same_photo_for_several_classes(folder: Path) -> None:
    spec = grid(kind="classes", classes=("dog", "bee"), images=1, columns=("Gradient",))
    (content,) = contents(folder, spec)
    assert [line.title.split()[0] for line in content.lines] == ["dog", "bee"]
    least = [min(float(row[MODEL.labels.index(name)]) for name in ("dog", "bee")) for row in PROBABILITIES]
    best = least.index(max(least))
    assert {line.detail for line in content.lines} == {f"2007_{best}.jpg"}
    for line, name in zip(content.lines, ("dog", "bee"), strict=True):
        (explanation,) = line.maps
        assert explanation is not None
        assert torch.equal(explanation.maps, cv.explain(MODEL, photo(best), "grad-rollout", target=name).maps)
    assert "Nobody checked that both objects are there" in content.caption


def test_a_model_without_the_classes_shows_its_own(folder: Path) -> None:
    (content,) = contents(folder, grid(kind="classes", classes=("zebra", "elephant"), images=1))
    assert "does not have the paper's classes (zebra, elephant)" in content.caption
    assert content.note.startswith("not the paper's classes")
    assert len({line.title for line in content.lines}) == 2


def test_layers(folder: Path) -> None:
    started, whole = contents(
        folder,
        grid(number="2", kind="layers", columns=(FigureColumn("DecompX", "decompx+layer:{layer}"),), images=1),
        grid(number="4", kind="layers", columns=(FigureColumn("all", "rollout"),), images=1),
    )
    assert len(started.headings) > 1
    assert started.headings[0] == "layer 0"
    row = int(PurePath(started.lines[0].title).stem[-1])
    first = started.lines[0].maps[0]
    assert first is not None
    assert torch.equal(first.maps, cv.explain(MODEL, photo(row), "decompx+layer:0").maps)
    assert whole.headings == (*started.headings, "all")


# Numbers


def test_curves_over_start_layers(folder: Path) -> None:
    spec = grid(number="7", kind="starts")
    (content,) = contents(folder, spec, paper={"sweep": ("ixg",), "sweep_measures": ("mIoU",)})
    (sweep,) = content.sweeps
    assert sweep.values[sweep.best] == max(sweep.values)
    assert f"ceil(L/2) = {sweep.middle}" in content.caption
    (axes,) = paper_figure(content).axes
    assert axes.lines[0].get_xdata()[0] == sweep.middle
    assert list(axes.lines[1].get_ydata()) == list(sweep.values)
    (without,) = contents(folder, spec)
    assert "No method was started at each layer" in without.missing


def test_a_radar_of_some_methods_has_the_scale_of_all(folder: Path) -> None:
    every, some = contents(
        folder, grid(number="1", kind="radar"), grid(number="2", kind="radar", columns=("Gradient",))
    )
    (ours,), (subset,) = every.panels.values(), some.panels.values()
    assert subset == {"Gradient": ours["Gradient"]}
    assert every.axes == ("mPA", "mIoU", "mAP")
    few = small_paper().measures[:2]
    (content,) = contents(folder, grid(kind="radar"), paper={"measures": few})
    assert content.missing.startswith("A radar takes three measures; these images allow 2")


def test_a_measure_without_a_curve(folder: Path) -> None:
    (content,) = contents(folder, grid(kind="curves", measure="mIoU"))
    assert content.missing == "mIoU has no curve on these images."
    with pytest.raises(BadInput, match="cannot be drawn: mIoU has no curve"):
        paper_figure(content)


# Several data sets, and the papers' files


def test_photos_of_several_data_sets_in_one_figure(folder: Path) -> None:
    (content,) = contents(folder, grid(images=1))
    (joined,) = join_figures({"pets": [content], "dogs": [content]})
    assert [line.title for line in joined.lines] == [f"{name}: {content.lines[0].title}" for name in ("pets", "dogs")]
    assert join_figures({"pets": [content]}) == []


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"columns": ("Nothing",)}, "names 'Nothing'"),
        ({"columns": (FigureColumn("x", "rolout"),)}, "whose method cannot be used"),
        ({"kind": "classes", "classes": ("dog",)}, "compares 1 classes"),
        ({"kind": "layers"}, "the layers of 0 methods"),
        ({"kind": "curves", "measure": "Nothing"}, "which the paper does not measure"),
        ({"ids": (3,)}, "not the data set"),
        ({"images": 0}, "expected 1 or more"),
        ({"number": "–"}, "no letter or digit"),
    ],
)
def test_a_figure_that_does_not_fit_its_paper(fields: dict[str, Any], words: str) -> None:
    (problem,) = figure_problems([grid(**fields)], ["Rollout"], ["mIoU"])
    assert words in problem


def test_two_figures_of_one_number() -> None:
    assert len(list(figure_problems([grid(), grid()], [], []))) == 2


@pytest.mark.parametrize("name", NAMES)
def test_every_paper_has_figures_whose_methods_exist(name: str) -> None:
    paper = find_paper(name)
    assert paper.figures
    entries = {entry.name: entry.method for entry in paper.methods}
    for figure in paper.figures:
        for column in figure.columns:
            method = entries[column] if isinstance(column, str) else column.method.replace("{layer}", "0")
            assert resolve_method(method).text
