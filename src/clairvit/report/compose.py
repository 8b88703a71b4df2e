"""Compose: a store becomes a document, section by section."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from clairvit._version import __version__
from clairvit.bench.plan import Study
from clairvit.bench.store import Store
from clairvit.bench.worker import Worker
from clairvit.methods.collect import versions
from clairvit.metrics.accumulator import BASELINES
from clairvit.metrics.registry import resolve_metric
from clairvit.perturbation.progress import report_progress
from clairvit.plotting.measures import ARROWS
from clairvit.report import sections
from clairvit.report.blocks import Block, Cell, Column, Document, Facts, Items, Row, Section, Table, Text
from clairvit.report.charts import images
from clairvit.report.costs import cost_section
from clairvit.report.gallery import Opener, find_source, pick, show
from clairvit.report.study_results import Account, Findings, gather, with_classes
from clairvit.report.study_warnings import store_warnings, warnings_section

TITLE = "Which explanation to trust"


@dataclass(frozen=True)
class ReportOptions:
    """What a report is to have beside its numbers."""

    gallery: bool = True
    open_worker: Opener | None = None  # who loads a study's models and images; None: as the study names them


def compose(store: Store, wishes: ReportOptions | None = None) -> Document:
    """Everything that a store has to say."""
    wishes = wishes or ReportOptions()
    account = gather(store)
    when = f" · results of {account.written:%-d %B %Y}" if account.written else ""
    about = f"Study in {account.path.resolve().name}/{when} · ClairViT {__version__}"
    pairs = [(findings.model, findings.data) for findings in account.findings]
    found = [what_was_run(account)]
    workers = _Workers(wishes.open_worker or Worker)
    with report_progress("report", len(account.findings)) as tell:
        for findings in account.findings:
            title = f"{findings.model} on {findings.data}"
            if pairs.count((findings.model, findings.data)) > 1:
                title += f" ({findings.settings}; weights {findings.model_hash[:8]})"
            found.append(Section(title, (), tuple(_of_model(findings, account, wishes, workers))))
            tell(1)
    found.append(environment(account))
    return Document(TITLE, about, tuple(found), account.warnings)


class _Workers:
    """One worker a study, so that a model is loaded once."""

    def __init__(self, opener: Opener) -> None:
        self.opener = opener
        self.known: dict[Study, Worker] = {}

    def __call__(self, study: Study) -> Worker:
        if study not in self.known:
            self.known[study] = self.opener(study)
        return self.known[study]


def _of_model(findings: Findings, account: Account, wishes: ReportOptions, workers: Opener) -> Iterator[Section]:
    if not findings.scores:
        yield Section("Ranking", [Text("None of the images could be scored; the warnings say why.", lead=True)])
        yield warnings_section(findings, account.missing)
        return
    examples, findings = _examples(findings, account, wishes, workers)
    yield sections.ranking(findings)
    if findings.methods:
        yield sections.radar_section(findings)
    yield sections.curves_section(findings)
    yield examples
    yield sections.classes_section(findings)
    yield sections.agreement_section(findings)
    yield cost_section(findings)
    yield warnings_section(findings, account.missing)


def _examples(findings: Findings, account: Account, wishes: ReportOptions, workers: Opener) -> tuple[Section, Findings]:
    """The gallery, and the findings with the names of classes, which the model knows."""
    title = "Examples"
    if not wishes.gallery:
        return Section(title, [Text("Left out, as asked (--no-gallery).")]), findings
    source = find_source(findings, account.studies, workers)
    if isinstance(source, str):
        said = f"The images cannot be shown, because the model or the data cannot be loaded here: {source}"
        return Section(title, [Text(said if said.endswith(".") else f"{said}.")]), findings
    findings = with_classes(findings, source.model.labels)
    chosen = pick(findings)
    figures, missing = show(findings, chosen, source)
    blocks: list[Block] = []
    if figures:
        words = "Maps were made again for this page with the study's model and seed, each drawn on a scale of its own"
        blocks.append(Text(f"{words}; the number is the method's {findings.key_metric} on the image."))
    if chosen and not any(one.label is not None for one in findings.scores.seen):
        blocks.append(Text("The true classes are not known, so right and wrong predictions cannot be told apart."))
    blocks += [Text(sentence) for sentence in missing]
    return Section(
        title, [*blocks, *figures] or [Text("There is no method or no score to choose examples by.")]
    ), findings


def what_was_run(account: Account) -> Section:
    """Models, data, methods, metrics, seed, settings: as they were asked for, and what came of it."""
    title = "What was run"
    if not account.studies and not account.findings:
        return Section(
            title, [Text("The store is empty: nothing was run, or nothing has been finished yet.", lead=True)]
        )
    blocks: list[Block] = []
    if not account.findings:
        blocks.append(Text("Nothing has been finished yet: the store has no results.", lead=True))
    for number, study in enumerate(account.studies):
        name = f"study {number + 1}: " if len(account.studies) > 1 else ""
        blocks.append(
            Facts(tuple((name + term if not place else term, said) for place, (term, said) in enumerate(_asked(study))))
        )
    if account.missing:
        blocks.append(_missing(account))
    if account.findings:
        blocks += [_overview(account), *_metrics(account)]
    return Section(title, blocks)


def _asked(study: Study) -> list[tuple[str, str]]:
    data = []
    for one in study.data:
        more = {"split": one.split, "limit": one.limit, "masks": one.masks}
        said = ", ".join(f"{word} {value}" for word, value in more.items() if value is not None)
        data.append(f"{one.spec} ({said})" if said else one.spec)
    models = [f"{one.spec}{'' if one.pretrained else ' (random weights)'}" for one in study.models]
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


def _missing(account: Account) -> Table:
    """Planned and computed, for each model and data set that is not complete."""
    columns = (
        *(Column(word, number=False) for word in ("model", "data")),
        *(Column(word, note="computed of planned") for word in ("images", "scores")),
    )
    rows = [
        Row(
            (
                Cell(one.model),
                Cell(one.data),
                Cell(f"{one.images_done} of {one.images}", order=one.images_done),
                Cell(f"{one.cells_done} of {one.cells}", order=one.cells_done),
            )
        )
        for one in account.missing
    ]
    records = tuple(record for one in account.missing for record in one.as_records())
    return Table("missing", "Not complete", columns, tuple(rows), records)


def _overview(account: Account) -> Table:
    columns = (
        *(Column(word, number=False) for word in ("model", "weights", "data")),
        *(Column(word) for word in ("images", "unreadable", "accuracy", "methods", "metrics")),
    )
    rows, records = [], []
    for one in account.findings:
        known = [seen for seen in one.scores.seen if seen.label is not None]
        right = sum(seen.label == seen.predicted for seen in known) / len(known) if known else None
        counts = (len(one.scores.seen), len(one.unread))
        last = (len(one.methods), len(one.metrics))
        cells = [Cell(text) for text in (one.model, one.model_hash[:8], one.data)]
        cells += [Cell(str(count), order=count) for count in counts]
        cells.append(Cell("–" if right is None else f"{100 * right:.0f} %", order=right))
        cells += [Cell(str(count), order=count) for count in last]
        rows.append(Row(tuple(cells)))
        numbers = dict(zip(("images", "unreadable", "methods", "metrics"), (*counts, *last), strict=True))
        records.append({**one.names(), **numbers, "accuracy": right})
    return Table("models", "Models and data", columns, tuple(rows), tuple(records))


def _metrics(account: Account) -> list[Block]:
    """What each metric is, for a reader who does not know it by name."""
    items, records = [], []
    for text in dict.fromkeys(metric for one in account.findings for metric in one.metrics):
        asked = resolve_metric(text)
        about = asked.metric.summary.replace("`", "")
        said = f"{ARROWS[asked.better]} {asked.better} is better; {asked.metric.family}. {about} {asked.metric.paper}."
        items.append(f"{text}\t{said}")
        names = ("metric", "family", "better", "summary", "paper")
        values = (text, asked.metric.family, asked.better, about, asked.metric.paper)
        records.append(dict(zip(names, values, strict=True)))
    return [Text("The metrics:"), Items(tuple(items), "metrics", tuple(records))]


def environment(account: Account) -> Section:
    """Who wrote the results, who wrote this page, and what went wrong with the store."""
    wrote = ", ".join(f"ClairViT {one}" for one in account.versions) or "nobody yet"
    here = ", ".join(f"{name} {number}" for name, number in versions().items())
    total = sum(len(findings.scores.seen) for findings in account.findings)
    facts = Facts(
        (
            ("results written by", wrote),
            ("last result", f"{account.written:%Y-%m-%d %H:%M} UTC" if account.written else "none"),
            ("this page written by", here),
            ("store", str(account.path)),
            ("in it", f"{len(account.findings)} × model, data and settings; {images(total)} scored"),
        )
    )
    found = store_warnings(account)
    blocks: list[Block] = [facts]
    trouble = [Text("No unit failed and every part can be read.")] if found is None else [found]
    return Section("Environment", blocks, (Section("Units that failed", trouble),))
