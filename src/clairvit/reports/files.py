"""Write the report of a study into files: report.html, report.md, and a CSV file for each kind of table."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from os import PathLike, fspath
from pathlib import Path

from clairvit._io import write_text
from clairvit.bench.store import Store
from clairvit.bench.worker import Worker
from clairvit.errors import BadInput, ClairWarning, UnknownName, did_you_mean, user_stacklevel
from clairvit.reports.blocks import Document
from clairvit.reports.build import ReportOptions, build_report
from clairvit.reports.render import to_csv, to_html, to_markdown

FORMATS = ("html", "md", "csv")


def report(
    run: Store | str | PathLike[str],
    out: str | PathLike[str] = "report.html",
    *,
    formats: Sequence[str] = (),
    gallery: bool = True,
    device: str | None = None,
) -> list[Path]:
    """Report a study on one page: ranking, curves, examples, agreement, cost and warnings.

    Args:
        run: The folder that `cv.run_study` or `clairvit bench` wrote.
        out: A file that ends in .html, .md or .csv, or a folder for report.html.
        formats: What to write, of html, md and csv; none: what `out` ends in.
        gallery: Load the models and images of the study to show examples.
        device: Where the models run then.

    Returns:
        The files. What a reader must know about the numbers is a warning too.

    Example:
        >>> import clairvit as cv
        >>> from clairvit.bench.config import DataConfig, ModelConfig
        >>> study = cv.Study((ModelConfig("scenes"),), (DataConfig("scenes:1"),), ("rollout",), ("sparseness",))
        >>> _ = cv.run_study(study, "runs/scenes")
        >>> [file.name for file in cv.report("runs/scenes", "report.md", gallery=False)]
        ['report.md']
    """
    base, endings = output_files(fspath(out), formats)
    store = run if isinstance(run, Store) else Store.open(Path(run), create=False)
    document = build_report(store, ReportOptions(gallery, lambda study: Worker(study, device)))
    for sentence in document.warnings:
        warnings.warn(sentence, ClairWarning, stacklevel=user_stacklevel())
    return write(document, base, endings)


def output_files(out: str, formats: Sequence[str] = ()) -> tuple[Path, list[str]]:
    """Return the path without its ending, and the endings of the files to write."""
    path = Path(out)
    if out.endswith(("/", "\\")) or path.is_dir() or not path.suffix:
        path = path / "report.html"
    ending = {".htm": "html"}.get(path.suffix.lower(), path.suffix.lower().lstrip("."))
    if ending not in FORMATS:
        raise BadInput(
            f"'{out}' ends in '{path.suffix}'; write to a name that ends in .html, .md or .csv, or to a folder."
        )
    endings = [name.lower() for name in formats] or [ending]
    for word in endings:
        if word not in FORMATS:
            raise UnknownName(
                f"There is no format '{word}'; expected {', '.join(FORMATS)}.{did_you_mean(word, FORMATS)}"
            )
    return path.with_suffix(""), list(dict.fromkeys(endings))


def write(document: Document, base: Path, endings: Sequence[str]) -> list[Path]:
    """Write report.html, report.md, report-ranking.csv, report-classes.csv, …; the '.2' of 'v1.2' is no ending."""

    def named(ending: str) -> Path:
        return base.parent / f"{base.name}{ending}"

    files = []
    if "html" in endings:
        files.append(write_text(to_html(document), named(".html")))
    if "md" in endings:
        files.append(write_text(to_markdown(document), named(".md")))
    if "csv" in endings:
        tables = {kind: records for kind, records in document.tables().items() if records}
        if not tables:
            raise BadInput("There is no table in this report, so no CSV; the store has no results yet.")
        files += [write_text(to_csv(records), named(f"-{kind}.csv")) for kind, records in tables.items()]
    return files
