"""Figures: what a paper's figures show for the images at hand: photos with maps, or numbers of the run.

Photos are the paper's own where the data has them, else drawn with the seed of the run from the images that were
scored. What cannot be shown has a sentence in its place.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath

from torch import Tensor

from clairvit._progress import track
from clairvit._rng import make_generator
from clairvit.data.dataset import ImageDataset, Sample, void_as_object
from clairvit.data.open import open_data
from clairvit.errors import ClairError
from clairvit.methods.explain import compare
from clairvit.methods.explanation import Explanation
from clairvit.methods.runs import class_indices
from clairvit.methods.spec import resolve_method
from clairvit.metrics.score import Prediction, Score
from clairvit.models.images import Batch
from clairvit.models.model import Model
from clairvit.numerics import percent
from clairvit.papers.comparison import radar_radii
from clairvit.papers.figure_spec import FigureColumn, FigureSpec
from clairvit.papers.reproduce import Reproduction, Sweep
from clairvit.papers.setup import LoadedData
from clairvit.targets.class_ import find_class

MOST_SCANNED = 200  # images among which those are looked for that show two classes
MOST_IMAGES = 12  # in one figure
LAYER = "{layer}"  # in the method of a figure of layers: a map of its own for each


@dataclass(frozen=True, eq=False)
class FigureLine:
    """One photo, or one class of it, with a map per column; None where a method has none."""

    title: str
    detail: str = ""
    correct: bool | None = None  # whether the prediction is the true class; None where that is not known
    mask: Tensor | None = None  # bool [H, W]
    maps: tuple[Explanation | None, ...] = ()  # of one map each


@dataclass(frozen=True, eq=False)
class FigureContent:
    """What one figure shows; or `missing`, why it cannot be shown."""

    spec: FigureSpec
    caption: str = ""
    missing: str = ""
    note: str = ""  # what is not as in the paper, short enough for the picture itself
    part: str = ""  # of a figure of one photo each: which
    headings: tuple[str, ...] = ()  # of the columns
    lines: tuple[FigureLine, ...] = ()
    sweeps: tuple[Sweep, ...] = ()
    axes: tuple[str, ...] = ()
    panels: Mapping[str, Mapping[str, Sequence[float]]] = field(default_factory=dict)  # of radars
    curves: tuple[Score, ...] = ()

    @property
    def slug(self) -> str:
        """Return its part of a file name."""
        return f"{self.spec.slug}-{self.part}" if self.part else self.spec.slug


@dataclass(frozen=True, eq=False)
class FigureInputs:
    """What all figures of a run are made from."""

    result: Reproduction
    model: Model
    data: LoadedData
    images: int | None = None  # photos in a figure; None: as many as the paper's file says
    second: Model | None = None  # next to the first, such as a CNN


def compute_figures(inputs: FigureInputs) -> Iterator[FigureContent]:
    """Yield the content of each figure that the paper's file declares, in its order."""
    for spec in track(inputs.result.config.paper.figures, "figures"):
        try:
            yield from _contents(inputs, spec)
        except ClairError as error:  # one figure that cannot be made does not end the others
            yield FigureContent(spec, missing=str(error))


def join_figures(runs: Mapping[str, Sequence[FigureContent]]) -> list[FigureContent]:
    """Return the figures of photos that several runs of one paper have, with the photos of all data sets in one.

    Args:
        runs: Name of the data set -> its figures.
    """
    by_slug: dict[str, list[tuple[str, FigureContent]]] = {}
    for name, contents in runs.items():
        for content in contents:
            if content.spec.kind == "grid" and content.lines and not content.part:
                by_slug.setdefault(content.slug, []).append((name, content))
    joined = []
    for entries in by_slug.values():
        first = entries[0][1]
        alike = [(name, content) for name, content in entries if content.headings == first.headings]
        if len(alike) > 1:
            lines = [replace(line, title=f"{name}: {line.title}") for name, content in alike for line in content.lines]
            joined.append(replace(first, lines=tuple(lines), caption=" ".join(c.caption for _, c in alike)))
    return joined


def _contents(inputs: FigureInputs, spec: FigureSpec) -> Iterator[FigureContent]:
    if spec.is_picture:
        yield from _picture(inputs, spec)
        return
    make = {"starts": _starts, "radar": _radar, "curves": _curves}[spec.kind]
    yield make(inputs.result, spec)


# Figures of numbers


def _starts(result: Reproduction, spec: FigureSpec) -> FigureContent:
    """Return the curves over start layers of the paper's sweep."""
    if not result.sweeps:
        missing = "No method was started at each layer on these images: the model has no layers, or nothing was scored."
        return FigureContent(spec, missing=missing)
    caption = (
        f"Each method summed from a layer on, mean of {result.images} images of {result.model}; the filled point is "
        f"the best start, the dashed line SkipPLUS's ceil(L/2) = {result.sweeps[0].middle}, layer 0 is PLUS."
    )
    return FigureContent(spec, caption, sweeps=result.sweeps)


def _radar(result: Reproduction, spec: FigureSpec) -> FigureContent:
    """Return the place of some methods on each axis, between the worst and the best of all methods of the paper."""
    paper = result.config.paper
    cells = {row.entry.name: row.cells for row in result.rows}
    ranked = [row.entry.name for row in result.rows if not row.entry.extra]
    axes = [measure.name for measure in paper.measures if all(measure.name in cells[name] for name in ranked)]
    names = [column for column in spec.columns if isinstance(column, str)] or ranked
    if len(axes) < 3:
        missing = f"A radar takes three measures; these images allow {len(axes)}: {', '.join(axes) or 'none'}."
        return FigureContent(spec, missing=missing)
    ours = _polygons(radar_radii(paper, cells, ranked, printed=False), names)
    if not ours:
        return FigureContent(spec, missing="None of these methods has a number for every measure.")
    panels = {f"here, {result.images} images": ours}
    printed = _polygons(radar_radii(paper, cells, ranked, printed=True), names) if spec.printed else {}
    if printed and result.table is not None:
        panels[f"the paper, {result.table.data}"] = printed
    caption = (
        f"Rim and centre are the best and the worst of all {len(ranked)} methods of the paper; mean of {result.images} "
        f"images of {result.model}."
    )
    absent = [name for name in names if name not in ours]
    caption += f" Without a number for every measure: {', '.join(absent)}." if absent else ""
    return FigureContent(spec, caption, axes=tuple(axes), panels=panels)


def _polygons(radii: Mapping[str, Sequence[float]], names: Sequence[str]) -> dict[str, Sequence[float]]:
    return {name: radii[name] for name in names if name in radii}


def _curves(result: Reproduction, spec: FigureSpec) -> FigureContent:
    """Return the mean curve of each method by one measure."""
    names = [column for column in spec.columns if isinstance(column, str)]
    names = names or [entry.name for entry in result.config.paper.methods if not entry.extra]
    scores = [result.scores[name, spec.measure] for name in names if (name, spec.measure) in result.scores]
    curves = tuple(replace(score, method=name) for name, score in zip(names, scores, strict=False) if score.curve)
    if not curves:
        return FigureContent(spec, missing=f"{spec.measure} has no curve on these images.")
    return FigureContent(spec, f"{spec.measure} of {result.model}, as it was scored.", curves=curves)


# Figures of photos


@dataclass(frozen=True)
class _Column:
    """A column as it is computed: heading, canonical method, and whether the second model explains."""

    name: str
    method: str
    second: bool = False


@dataclass(frozen=True, eq=False)
class _Photos:
    """The photos of a figure, and the sentence that says which."""

    dataset: ImageDataset
    rows: tuple[int, ...]
    sentence: str
    note: str = ""
    classes: tuple[tuple[int, ...], ...] = ()  # of a figure of classes: those of each photo


def _picture(inputs: FigureInputs, spec: FigureSpec) -> Iterator[FigureContent]:
    """Yield a figure of photos; one for each photo, where one fills a figure."""
    columns, sentences = _columns(inputs, spec)
    if not columns:
        yield FigureContent(spec, missing=" ".join(sentences))
        return
    photos = _class_photos(inputs, spec) if spec.classes else _photos(inputs, spec)
    lines: list[list[FigureLine]] = []
    headings: tuple[str, ...] = tuple(column.name for column in columns)
    skipped: dict[str, str] = {}
    for place, row in enumerate(photos.rows):
        sample = photos.dataset.read(row, inputs.model)
        name = PurePath(photos.dataset.names[row]).name or photos.dataset.names[row]
        photo = _Photo(inputs, spec, photos.dataset, row, sample, name)
        if spec.kind == "classes":
            lines.append(photo.of_classes(columns, photos.classes[place], skipped))
        elif spec.kind == "layers":
            headings, line = photo.of_layers(columns[0], skipped)
            lines.append([line])
        else:
            lines.append([photo.of_methods(columns, skipped)])
    if spec.kind != "classes":
        kind = "true" if inputs.result.config.study_target == "label" else "predicted"
        sentences.append(f"Maps that are of a class are of the {kind} one.")
    sentences += [f"{name} is left out: {reason}" for name, reason in skipped.items()]
    if spec.masks != "none" and not photos.dataset.has_masks:
        sentences.append("The masks are left out: the data has none.")
    parts = [[line for of_photo in lines for line in of_photo]] if not spec.wrap else lines
    for number, part in enumerate(parts, start=1):
        content = FigureContent(
            spec,
            " ".join([photos.sentence, *sentences]),
            note=photos.note,
            part=str(number) if len(parts) > 1 else "",
            headings=headings,
            lines=tuple(part),
        )
        yield _without_empty_columns(content)


def _without_empty_columns(content: FigureContent) -> FigureContent:
    """Leave out the methods that have no map at all."""
    present = [index for index in range(len(content.headings)) if any(line.maps[index] for line in content.lines)]
    if not present:
        return replace(content, missing=content.caption or "No method has a map.", lines=())
    lines = tuple(replace(line, maps=tuple(line.maps[index] for index in present)) for line in content.lines)
    return replace(content, headings=tuple(content.headings[index] for index in present), lines=lines)


def _columns(inputs: FigureInputs, spec: FigureSpec) -> tuple[list[_Column], list[str]]:
    """Return the columns that can be computed, and a sentence on the others."""
    config = inputs.result.config
    entries = {entry.name: entry.method for entry in config.paper.methods}
    listed = spec.columns or tuple(entry.name for entry in config.paper.methods if not entry.extra)
    columns, sentences = [], []
    for column in listed:
        named = FigureColumn(column, entries[column]) if isinstance(column, str) else column
        if named.second and inputs.second is None:
            sentences.append(
                f"{named.name} is of a second model, and none was given: --second-model timm:resnet50 takes one."
            )
            continue
        columns.append(_Column(named.name, config.paper.at_effort(config.effort, named.method), named.second))
    return columns, sentences


def _photos(inputs: FigureInputs, spec: FigureSpec) -> _Photos:
    """Return the photos of the paper where the data has them, else some of those that were scored, by the seed."""
    result = inputs.result
    dataset, rows = _paper_photos(inputs, spec)
    if rows:
        listed = ", ".join(map(str, spec.ids))
        return _Photos(dataset, rows, f"The photos are the paper's ({spec.data} {listed}).")
    dataset, predictions = _scored(inputs)
    count = min(inputs.images or spec.images, MOST_IMAGES, len(dataset))
    right = {p.image: p.predicted == p.label for p in predictions if p.label is not None}
    order = _shuffled(len(dataset), result.config.seed, spec)
    rows = tuple(sorted(order[:count]))
    sentence = f"{count} of the {len(dataset)} images that were scored, drawn with seed {result.config.seed}."
    note = ""
    if spec.ids:
        note = "not the paper's photos"
        of_paper = ", ".join(map(str, spec.ids))
        sentence = f"The paper's photos ({spec.data} {of_paper}) are not in this data. Shown are {sentence}"
    if spec.outcomes and right:
        rows, sentence, note = _by_outcome(dataset, order, right, count, result.config.seed)
    elif spec.outcomes:
        sentence += " Which predictions are right is not known: the data has no true classes."
    return _Photos(dataset, rows, sentence, note)


def _paper_photos(inputs: FigureInputs, spec: FigureSpec) -> tuple[ImageDataset, tuple[int, ...]]:
    """Return the photos with the paper's ids; no rows where the data is another one, or lacks one of them."""
    config, scored = inputs.result.config.data, inputs.data.dataset
    if not spec.ids:
        return scored, ()
    names = {PurePath(name).stem: row for row, name in enumerate(scored.names)}
    if all(isinstance(identifier, str) for identifier in spec.ids):
        rows = tuple(names[str(identifier)] for identifier in spec.ids if str(identifier) in names)
        if len(rows) == len(spec.ids):
            return scored, rows
    if config.spec.partition(":")[0] != spec.data:
        return scored, ()
    opened = open_data(config.spec, spec.split or config.split, mask_kind=config.mask_kind).dataset
    dataset = void_as_object(opened) if inputs.result.config.paper.void == "object" else opened
    names = {PurePath(name).stem: row for row, name in enumerate(dataset.names)}
    places = [identifier if isinstance(identifier, int) else names.get(identifier, -1) for identifier in spec.ids]
    return dataset, tuple(places) if all(0 <= place < len(dataset) for place in places) else ()


def _scored(inputs: FigureInputs) -> tuple[ImageDataset, tuple[Prediction, ...]]:
    """Return the images that were scored, with what the model predicts for each."""
    dataset = inputs.data.dataset
    dataset = void_as_object(dataset) if inputs.result.config.paper.void == "object" else dataset
    by_name = {prediction.image: prediction for prediction in inputs.result.predictions}
    rows = [row for row, name in enumerate(dataset.names) if name in by_name]
    return dataset.take(rows), tuple(by_name[dataset.names[row]] for row in rows)


def _shuffled(count: int, seed: int, spec: FigureSpec) -> list[int]:
    import torch

    generator = make_generator(seed, f"papers/figure {spec.number}")
    order: list[int] = torch.randperm(count, generator=generator, device=generator.device).tolist()
    return order


def _by_outcome(
    dataset: ImageDataset, order: Sequence[int], right: Mapping[str, bool], count: int, seed: int
) -> tuple[tuple[int, ...], str, str]:
    """Return as many wrong predictions as right ones, the right ones first; fewer where there are not so many."""
    groups = [[row for row in order if right.get(dataset.names[row]) is kind] for kind in (True, False)]
    wrong = min(count // 2, len(groups[1]))
    rows = (*groups[0][: count - wrong], *groups[1][:wrong])
    sentence = (
        f"{len(rows) - wrong} photos that the model gets right and {wrong} that it gets wrong, drawn with seed {seed} "
        f"from the {len(dataset)} images that were scored, of which {len(groups[1])} are predicted wrongly."
    )
    lacking = "" if groups[1] else "no image that was scored is predicted wrongly"
    return rows, sentence, lacking


def _class_photos(inputs: FigureInputs, spec: FigureSpec) -> _Photos:
    """Return photos in which the model is surest to see all classes of the figure, or its own two best ones.

    A model that lacks a class of the paper shows the two most likely classes of each photo, which the caption says.
    """
    dataset, predictions = _scored(inputs)
    if not predictions:
        return _Photos(dataset, (), "No image was scored.")
    model, count = inputs.model, min(inputs.images or spec.images, MOST_IMAGES)
    seed = inputs.result.config.seed
    rows = sorted(_shuffled(len(dataset), seed, spec)[:MOST_SCANNED])
    explained, note = {row: _best_classes(model, dataset, row) for row in rows}, ""
    try:
        classes = tuple(find_class(name, model.labels, len(model.labels)) for name in spec.classes)
        of_photo = dict.fromkeys(rows, classes)
        reason = f"The model's probability of the least likely of {', '.join(spec.classes)} is the highest in these"
    except ClairError:
        shown = len(spec.classes)
        of_photo = {row: tuple(index for index, _ in best[:shown]) for row, best in explained.items()}
        reason = (
            f"The model does not have the paper's classes ({', '.join(spec.classes)}): shown are the {shown} most "
            "likely classes of the photos in which the last of these is the most likely"
        )
        note = "not the paper's classes, which the model does not have: the most likely ones"
    of_photo = {row: classes for row, classes in of_photo.items() if len(classes) > 1}
    least = {row: min(dict(explained[row]).get(index, -math.inf) for index in of_photo[row]) for row in of_photo}
    best = sorted(least, key=lambda row: -least[row])[:count]
    sentence = f"{reason}, {len(best)} of {len(rows)} images. Nobody checked that both objects are there."
    return _Photos(dataset, tuple(best), sentence, note, tuple(of_photo[row] for row in best))


def _best_classes(model: Model, dataset: ImageDataset, row: int) -> list[tuple[int, float]]:
    """Return the classes of an image with their probabilities (of raw scores, the scores), the highest first."""
    pixels = dataset.read(row, model).pixels[None].to(model.device, model.dtype)
    batch = Batch(pixels, (dataset.names[row],), single=False)
    explanation = next(iter(compare(model, batch, ["random"]).values()))
    return [
        (guess.index, guess.score if guess.probability is None else guess.probability)
        for guess in explanation.top_classes(0, explanation.logits.shape[-1])
    ]


@dataclass(frozen=True, eq=False)
class _Photo:
    """One photo with its annotations, explained for one figure."""

    inputs: FigureInputs
    spec: FigureSpec
    dataset: ImageDataset
    row: int
    sample: Sample
    name: str

    def of_methods(self, columns: Sequence[_Column], skipped: dict[str, str]) -> FigureLine:
        """Return a map of each method."""
        maps = self._maps(columns, skipped)
        return self._line(self.name, maps)

    def of_layers(self, column: _Column, skipped: dict[str, str]) -> tuple[tuple[str, ...], FigureLine]:
        """Return the map of each layer, with their headings; and the whole map last, where layers add up to it."""
        model = self._model(column)
        if LAYER in column.method:
            count = len(self._layered("rollout", model)) - 1
            methods = [
                _Column(f"layer {layer}", column.method.replace(LAYER, str(layer)), column.second)
                for layer in range(count)
            ]
            return tuple(method.name for method in methods), self._line(self.name, self._maps(methods, skipped))
        maps = self._layered(column.method, model)
        headings = (*(f"layer {layer}" for layer in range(len(maps) - 1)), column.name)
        return headings, self._line(self.name, maps)

    def of_classes(
        self, columns: Sequence[_Column], classes: Sequence[int], skipped: dict[str, str]
    ) -> list[FigureLine]:
        """Return a line for each class."""
        lines = []
        for index in classes:
            maps = self._maps(columns, skipped, target=index)
            explanation = next((entry for entry in maps if entry is not None), None)
            if explanation is not None:
                guesses = explanation.top_classes(0, explanation.logits.shape[-1])
                title = next(f"{g.name} {percent(g.probability)}".rstrip() for g in guesses if g.index == index)
                lines.append(FigureLine(title, self.name, None, self._mask(), maps))
        return lines

    def _maps(
        self, columns: Sequence[_Column], skipped: dict[str, str], target: int | None = None
    ) -> tuple[Explanation | None, ...]:
        explained: dict[tuple[bool, str], Explanation] = {}
        for second in {column.second for column in columns}:
            of_model = [column for column in columns if column.second is second]
            model = self._model(of_model[0])
            methods = [resolve_method(column.method) for column in of_model]
            wanted = target if target is not None or second else self._label()
            comparison = compare(model, self._batch(model), methods, wanted, seed=self._seed, skip=True)
            explained |= {(second, text): explanation for text, explanation in comparison.items()}
            skipped |= {
                column.name: comparison.skipped[method.text]
                for column, method in zip(of_model, methods, strict=True)
                if method.text in comparison.skipped
            }
        return tuple(explained.get((column.second, resolve_method(column.method).text)) for column in columns)

    def _layered(self, method: str, model: Model) -> tuple[Explanation, ...]:
        """Return a method's map of each layer, and its whole map last."""
        batch = self._batch(model)
        whole = next(iter(compare(model, batch, [method], self._label(), seed=self._seed, layers=True).values()))
        layers = [] if whole.layers is None else list(whole.layers)
        return (*(replace(whole, maps=maps, layers=None) for maps in layers), replace(whole, layers=None))

    def _line(self, title: str, maps: Sequence[Explanation | None]) -> FigureLine:
        """Return a line that says what the model predicts, and whether that is right."""
        explanation = next((entry for entry in maps if entry is not None), None)
        detail, correct = "", None
        if explanation is not None:
            for guess in explanation.top_classes(0, 1):
                detail = f"{guess.name} {percent(guess.probability)}".rstrip()
                label = self._true_class()
                correct = None if label is None else guess.index == label
                if correct is False and label is not None:
                    detail += f", is {self.inputs.model.labels[label]}"
        return FigureLine(title, detail, correct, self._mask(), tuple(maps))

    def _mask(self) -> Tensor | None:
        return self.sample.mask if self.spec.masks != "none" else None

    def _true_class(self) -> int | None:
        model = self.inputs.model
        try:
            (label,) = class_indices([self.sample.label], model, len(model.labels)) or [None]
        except ClairError:  # the data's classes are not the model's
            return None
        return label

    def _label(self) -> int | None:
        """Return the target of the run: the true class where it explains that, else None for the prediction."""
        return self._true_class() if self.inputs.result.config.study_target == "label" else None

    @property
    def _seed(self) -> int:
        return self.inputs.result.config.seed

    def _model(self, column: _Column) -> Model:
        model = self.inputs.second if column.second else self.inputs.model
        assert model is not None  # `_columns` leaves out those of a second model that was not given
        return model

    def _batch(self, model: Model) -> Batch:
        sample = self.sample if model is self.inputs.model else self.dataset.read(self.row, model)
        pixels = sample.pixels[None].to(model.device, model.dtype)
        return Batch(pixels, (self.dataset.names[self.row],), single=False)
