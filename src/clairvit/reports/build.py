"""Build the report of a store: a document, section by section."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from clairvit._progress import report_progress
from clairvit._version import __version__
from clairvit.bench.plan import Study
from clairvit.bench.store import Store
from clairvit.bench.worker import Worker
from clairvit.methods.collect import versions
from clairvit.metrics.accumulator import BASELINES
from clairvit.plotting.labels import ARROWS, UNDEFINED, count_images
from clairvit.reports import sections
from clairvit.reports.blocks import Block, Cell, Column, Document, Facts, Item, Items, Row, Section, Table, Text
from clairvit.reports.gallery import WorkerFactory, colour_bars, draw_examples, load_source, select_examples
from clairvit.reports.study_results import StoreContents, StudyResults, read_store
from clairvit.reports.study_warnings import store_warnings, warnings_section
from clairvit.reports.summary import summary_section

TITLE = "Which explanation to trust"


@dataclass(frozen=True)
class ReportOptions:
    """Options of a report.

    Args:
        gallery: Load the models and images of the study to show examples.
        open_worker: Loads the models and images of a study; by default as the study names them.
    """

    gallery: bool = True
    open_worker: WorkerFactory | None = None


def build_report(store: Store, options: ReportOptions | None = None) -> Document:
    """Return the report of everything that is in a store."""
    options = options or ReportOptions()
    contents = read_store(store)
    date = f" · results of {contents.written:%-d %B %Y}" if contents.written else ""
    about = f"Study in {contents.path.resolve().name}/{date} · ClairViT {__version__}"
    pairs = [(results.model, results.data) for results in contents.results]
    parts = [*([summary_section(contents)] if contents.results else []), study_section(contents)]
    workers = _WorkerCache(options.open_worker or Worker)
    with report_progress("report", len(contents.results)) as advance:
        for results in contents.results:
            title = f"{results.model} on {results.data}"
            if pairs.count((results.model, results.data)) > 1:
                title += f" ({results.settings}; weights {results.model_hash[:8]})"
            parts.append(Section(title, (), tuple(_model_sections(results, contents, options, workers))))
            advance(1)
    parts.append(environment_section(contents))
    return Document(TITLE, about, tuple(parts), contents.warnings)


class _WorkerCache:
    """One worker per study, so that a model is loaded once."""

    def __init__(self, open_worker: WorkerFactory) -> None:
        self.open_worker = open_worker
        self.workers: dict[Study, Worker] = {}

    def __call__(self, study: Study) -> Worker:
        if study not in self.workers:
            self.workers[study] = self.open_worker(study)
        return self.workers[study]


def _model_sections(
    results: StudyResults, contents: StoreContents, options: ReportOptions, workers: WorkerFactory
) -> Iterator[Section]:
    """Yield the sections on one model and data."""
    if not results.scores:
        yield Section("Ranking", [Text("None of the images could be scored; the warnings say why.", lead=True)])
        yield warnings_section(results, contents.missing)
        return
    examples, results = _examples_section(results, contents, options, workers)
    yield sections.ranking_section(results)
    if results.methods:
        yield sections.radar_section(results)
    yield sections.curves_section(results)
    yield examples
    yield sections.classes_section(results)
    yield sections.agreement_section(results)
    yield sections.cost_section(results)
    yield warnings_section(results, contents.missing)


def _examples_section(
    results: StudyResults, contents: StoreContents, options: ReportOptions, workers: WorkerFactory
) -> tuple[Section, StudyResults]:
    """Return the gallery, and the results with the class names, which the model knows."""
    title = "Examples"
    if not options.gallery:
        return Section(title, [Text("Left out, as asked (--no-gallery).")]), results
    source = load_source(results, contents.studies, workers)
    if isinstance(source, str):
        text = f"The images cannot be shown, because the model or the data cannot be loaded here: {source}"
        return Section(title, [Text(text if text.endswith(".") else f"{text}.")]), results
    results = replace(results, classes=tuple(source.model.labels))
    selected = select_examples(results)
    examples, problems = draw_examples(results, selected, source)
    blocks: list[Block] = []
    if examples:
        text = "Maps were computed again for this page with the study's model and seed, each drawn on its own scale"
        colours = "Where there is no colour, a patch hardly matters"
        blocks.append(Text(f"{text}; the number is the method's {results.key_metric} on the image. {colours}."))
        blocks.append(colour_bars(examples))
    if selected and not any(prediction.label is not None for prediction in results.scores.predictions):
        blocks.append(Text("The true classes are not known, so right and wrong predictions cannot be told apart."))
    blocks += [*(Text(sentence) for sentence in problems), *examples]
    return Section(title, blocks or [Text("There is no method or no score to choose examples by.")]), results


def study_section(contents: StoreContents) -> Section:
    """Return the models, data, methods, metrics, seed and settings of the studies, and what was computed."""
    title = "What was run"
    if not contents.studies and not contents.results:
        empty = "The store is empty: nothing was run, or nothing has been finished yet."
        return Section(title, [Text(empty, lead=True)])
    blocks: list[Block] = []
    if not contents.results:
        blocks.append(Text("Nothing has been finished yet: the store has no results.", lead=True))
    for number, study in enumerate(contents.studies, start=1):
        (first, value), *other_facts = _study_facts(study)
        prefix = f"study {number}: " if len(contents.studies) > 1 else ""
        blocks.append(Facts(((prefix + first, value), *other_facts)))
    if contents.missing:
        blocks.append(_missing_table(contents))
    if contents.results:
        blocks += [_models_table(contents), *_metric_descriptions(contents)]
    return Section(title, blocks)


def _study_facts(study: Study) -> list[tuple[str, str]]:
    data = []
    for config in study.data:
        options = {"split": config.split, "limit": config.limit, "masks": config.masks}
        text = ", ".join(f"{word} {value}" for word, value in options.items() if value is not None)
        data.append(f"{config.spec} ({text})" if text else config.spec)
    models = [f"{config.spec}{'' if config.pretrained else ' (random weights)'}" for config in study.models]
    return [
        ("models", ", ".join(models)),
        ("data", ", ".join(data)),
        ("methods", ", ".join(method for method in study.methods if method not in BASELINES) or "none"),
        ("baselines", ", ".join(method for method in study.methods if method in BASELINES) or "none"),
        ("metrics", ", ".join(study.metrics)),
        ("explained class", "the true one" if study.target == "label" else "the predicted one"),
        ("maps", study.maps),
        ("seed", str(study.seed)),
    ]


def _missing_table(contents: StoreContents) -> Table:
    """Return planned and computed images and scores, of each model and data set that is not complete."""
    columns = (
        *(Column(word, number=False) for word in ("model", "data")),
        *(Column(word, note="computed of planned") for word in ("images", "scores")),
    )
    rows = [
        Row(
            (
                Cell(entry.model),
                Cell(entry.data),
                Cell(f"{entry.images_done} of {entry.images}", sort_key=entry.images_done),
                Cell(f"{entry.cells_done} of {entry.cells}", sort_key=entry.cells_done),
            )
        )
        for entry in contents.missing
    ]
    records = tuple(record for entry in contents.missing for record in entry.as_records())
    return Table("missing", "Not complete", columns, tuple(rows), records)


def _models_table(contents: StoreContents) -> Table:
    """Return a row per model and data set, with counts and accuracy."""
    columns = (
        *(Column(word, number=False) for word in ("model", "weights", "data")),
        *(Column(word) for word in ("images", "unreadable", "accuracy", "methods", "metrics")),
    )
    rows, records = [], []
    for results in contents.results:
        labelled = [prediction for prediction in results.scores.predictions if prediction.label is not None]
        accuracy = (
            sum(prediction.label == prediction.predicted for prediction in labelled) / len(labelled)
            if labelled
            else None
        )
        counts = {
            "images": len(results.scores.predictions),
            "unreadable": len(results.unreadable),
            "methods": len(results.methods),
            "metrics": len(results.metrics),
        }
        cells = [Cell(text) for text in (results.model, results.model_hash[:8], results.data)]
        numbers = [Cell(str(count), sort_key=count) for count in counts.values()]
        numbers.insert(2, Cell(UNDEFINED if accuracy is None else f"{100 * accuracy:.0f} %", sort_key=accuracy))
        rows.append(Row((*cells, *numbers)))
        records.append(results.record(**counts, accuracy=accuracy))
    return Table("models", "Models and data", columns, tuple(rows), tuple(records))


def _metric_descriptions(contents: StoreContents) -> list[Block]:
    """Return what each metric is, for a reader who does not know it by name."""
    items, records = [], []
    specs = {text: results.specs.metric(text) for results in contents.results for text in results.metrics}
    for text, spec in specs.items():
        family, better, paper = spec.metric.family, spec.better, spec.metric.paper
        summary = spec.metric.summary.replace("`", "")
        items.append(Item(f"{ARROWS[better]} {better} is better; {family}. {summary} {paper}.", text))
        records.append({"metric": text, "family": family, "better": better, "summary": summary, "paper": paper})
    return [Text("The metrics:"), Items(tuple(items), "metrics", tuple(records))]


def environment_section(contents: StoreContents) -> Section:
    """Return the versions that wrote the results and this page, and what went wrong with the store."""
    writers = ", ".join(f"ClairViT {version}" for version in contents.versions) or "nothing was written yet"
    installed = ", ".join(f"{name} {version}" for name, version in versions().items())
    total = sum(len(results.scores.predictions) for results in contents.results)
    facts = Facts(
        (
            ("results written by", writers),
            ("last result", f"{contents.written:%Y-%m-%d %H:%M} UTC" if contents.written else "none"),
            ("this page written by", installed),
            ("store", str(contents.path)),
            ("in it", f"{len(contents.results)} × model, data and settings; {count_images(total)} scored"),
        )
    )
    failures: Block = store_warnings(contents) or Text("No unit failed and every part can be read.")
    return Section("Environment", [facts], (Section("Units that failed", [failures]),))
