"""The page of wrong and unsure answers: counts, confused pairs, all answers, and the first photos with their maps."""

from __future__ import annotations

import math

from clairvit.audit.mistake_table import KINDS, Mistakes
from clairvit.numerics import percent
from clairvit.plotting.labels import format_number
from clairvit.plotting.mistakes import headings, how_many, pictures, shown_rows
from clairvit.reports.blocks import Block, Cell, Column, Document, Example, Facts, Row, Section, Table, Text, Tile
from clairvit.reports.gallery import data_uri
from clairvit.reports.render import to_html


def mistakes_page(result: Mistakes, photos: int) -> str:
    """Return the page as self-contained HTML, with at most so many photos."""
    return to_html(mistakes_document(result, photos))


def mistakes_document(result: Mistakes, photos: int) -> Document:
    """Return the content of the page."""
    rules = result.rules
    kinds = (
        f"Confident and wrong: p ≥ {rules.confident:g}. Far down: the true class is after place {rules.far}. Between "
        f"two: the first two classes have p ≥ {rules.confident:g} together, and the true class is one of them. Among "
        "many: all others. The first rule that holds counts."
    )
    counts = tuple((kind, str(result.kind_counts[kind])) for kind in KINDS)
    sections = [Section("Answers", (Text(result.sentence, lead=True), Facts(counts), Text(kinds)))]
    if result.pairs:
        sections.append(Section("Confused classes", (_pairs(result),)))
    if len(result):
        sections.append(Section("All of them", (_answers(result),)))
    if any(photo is not None for photo in result.photos):
        rows = shown_rows(result, photos)
        parts = (
            f"{how_many(result, len(rows))}. Red speaks for the answer and against the other class. The third picture "
            f"lacks the smallest number of top patches, of {', '.join(map(str, result.sizes))}, without which the "
            f"other class is the answer (removal: {result.removal})."
        )
        examples: list[Block] = [Text(parts), *(_example(result, row) for row in rows)]
        sections.append(Section("Photos", examples))
    about = [f"{result.model}, method {result.method or '–'}, seed {result.seed}"]
    left_out = [f"{name} is left out: {reason}" for name, reason in result.left_out]
    return Document("Wrong and unsure answers", ". ".join(about), tuple(sections), (*result.notes, *left_out))


def _pairs(result: Mistakes) -> Table:
    """Return a row per pair of true and predicted class, with the share of the true class's images."""
    columns = (
        Column("true class", number=False),
        Column("answer", number=False),
        Column("images"),
        Column("share", note="of the true class, 95 % interval"),
    )
    rows = []
    for pair in result.pairs:
        known = not math.isnan(pair.low)
        interval = f"{100 * pair.low:.0f} to {100 * pair.high:.0f} %" if known else "fewer than 6 images"
        count = Cell(f"{pair.count} of {pair.of}", sort_key=float(pair.count))
        share = Cell(percent(pair.share), interval, sort_key=pair.share)
        rows.append(Row((Cell(pair.true), Cell(pair.predicted), count, share)))
    records = result.to_dict(values=False)["pairs"]
    return Table("pairs", "How often each true class was given another answer.", columns, tuple(rows), tuple(records))


def _answers(result: Mistakes) -> Table:
    """Return a row per wrong or unsure answer."""
    columns = (
        *(Column(title, number=False) for title in ("image", "kind", "true class", "answer", "then")),
        Column("cost", note="−log p of the true class"),
        Column("patches", note="that made the difference"),
        Column("random", note=f"sets of {result.draws} that do it too"),
    )
    rows = []
    for record in result._table():
        true = record["true_probability"]
        cells = (
            Cell(record["image"]),
            Cell(record["kind"]),
            Cell(record["true"] or "–", "" if math.isnan(true) else percent(true)),
            Cell(record["predicted"], percent(record["probability"])),
            Cell(record["second"], percent(record["second_probability"])),
            Cell(format_number(record["cost"]), sort_key=record["cost"]),
            Cell("–" if record["needed"] is None else str(record["needed"]), sort_key=record["needed"]),
            Cell("–" if record["random_wins"] is None else str(record["random_wins"])),
        )
        rows.append(Row(cells))
    return Table("mistakes", how_many(result, len(result)), columns, tuple(rows), tuple(result._table()))


def _example(result: Mistakes, row: int) -> Example:
    """Return the pictures of one answer side by side."""
    tiles = []
    for number, (picture, heading) in enumerate(zip(pictures(result, row), headings(result, row), strict=True)):
        text, _, detail = heading.partition("\n")
        detail = detail if number else ""  # the caption has name and kind
        tiles.append(Tile(data_uri(picture), text, text, detail, True if number == 1 else None))
    return Example(f"{result.names[row]}: {result.kinds[row]}", tuple(tiles))
