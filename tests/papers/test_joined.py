"""Several data sets in one table: the numbers of each run, the paper's beside them where it has them, a radar each."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from clairvit._io import dumps_json
from clairvit.errors import BadInput
from clairvit.metrics.radar import area_under_radar, radar
from clairvit.papers.checks import BETTER
from clairvit.papers.joined import Document, data_name, join, read_document, unique_names
from clairvit.papers.paper import find_paper
from clairvit.reports.joined import joined_json, joined_radars, joined_report, joined_tables
from clairvit.reports.render import to_markdown

PAPER = find_paper("focusvit")
DATA = {"flowers": "Flower", "dogs": "Dog", "indoor67": "MiT", "caltech101": "Caltech", "pets": "Pet"}


def cell(value: float | None, printed: float | None = None) -> Mapping[str, Any]:
    empty = {"interval": [None, None], "standard_error": None, "paper_rank": None, "our_rank": None, "images": 9}
    return {"paper": printed, "ours": value, **empty}


def printed_run(spec: str, shift: float = 0.0) -> Document:
    """Return a run whose numbers are those that the paper prints on this data, plus `shift`."""
    table = PAPER.table_for(spec)
    assert table is not None
    rows = [
        {"method": name, "cells": {key: cell(row[index] + shift, row[index]) for key, row in table.values.items()}}
        for index, name in enumerate(table.methods)
    ]
    random = {"method": "random", "cells": {key: cell(0.5) for key in table.values if key != "AUR"}}
    claims = [{"claim": claim.statement, "verdict": "holds", "true": 5, "comparisons": 5} for claim in PAPER.claims]
    return {
        "command": "reproduce",
        "paper": {"name": "focusvit"},
        "model": "tiny",
        "data": spec,
        "images": 9,
        "numbers_on": table.data,
        "rows": [*rows, random],
        "claims": claims,
        "tuned": {"best": 8},
    }


def test_five_data_sets_are_the_papers_tables_2_and_3() -> None:
    joined = join([printed_run(f"{name}:/data") for name in DATA])
    numbers, claims = joined_tables(joined)
    measures = [*(measure.name for measure in PAPER.measures), "AUR"]
    assert [(row.cells[0].text, row.cells[1].text[:-2]) for row in numbers.rows] == [
        (name, measure) for name in DATA for measure in measures
    ]
    for row in numbers.rows:
        table = next(table for table in PAPER.tables if table.data == DATA[row.cells[0].text])
        for method, entry in zip(joined.methods, row.cells[2:], strict=True):
            value = table.value(row.cells[1].text[:-2], method)
            expected = "–" if math.isnan(value) and method == "random" else f"{value:.3g} ({value:g})"
            assert method == "random" or entry.text == expected
    largest = [row for row in numbers.rows if row.cells[1].text == "AUR ↑"]
    assert all([entry.best for entry in row.cells[2:]] == [False] * 5 + [True, False] for row in largest)
    assert len(claims.rows) == len(PAPER.claims)
    assert set(claims.rows[0].cells[1:]) == {claims.rows[0].cells[1]}
    assert claims.rows[0].cells[1].text == "holds (5 of 5)"
    assert "pets m* = 8" in numbers.caption


def test_lower_is_better_for_three_measures() -> None:
    joined = join([printed_run("pets:/a"), printed_run("flowers:/b")])
    numbers = next(iter(joined_tables(joined)))
    for row in numbers.rows[:4]:
        values = dict(zip(joined.ranked, (entry.best for entry in row.cells[2:]), strict=False))
        table = PAPER.tables[-1]
        measure = row.cells[1].text[:-2]
        printed = table.values[measure]
        best = max(printed) if measure == "Faithfulness Correlation" else min(printed)
        assert [name for name, is_best in values.items() if is_best] == [
            name for name, value in zip(table.methods, printed, strict=True) if value == best
        ]


def test_random_is_never_the_best() -> None:
    document = json.loads(json.dumps(printed_run("pets:/a")))
    document["rows"][-1]["cells"]["Faithfulness Correlation"]["ours"] = 99.0
    numbers = next(iter(joined_tables(join([document, printed_run("dogs:/b")]))))
    assert not numbers.rows[0].cells[-1].best


def test_radars_are_those_of_the_numbers_above_those_of_the_paper() -> None:
    joined = join([printed_run("pets:/a"), printed_run("flowers:/b")])
    figure = joined_radars(joined)
    assert figure is not None
    polar = [axes for axes in figure.axes if axes.name == "polar"]
    assert len(polar) == 4
    tops = [round(axes.get_position().y0, 6) for axes in polar]
    assert tops[0] == tops[1] > tops[2] == tops[3]
    run = joined.runs[0]
    radii = joined.radii(run, printed=False)
    assert radii == joined.radii(run, printed=True), "these runs have the paper's numbers"
    import torch

    values = torch.tensor([PAPER.tables[-1].values[measure.name] for measure in PAPER.measures]).double().T
    expected = area_under_radar(radar(values, BETTER))
    assert area_under_radar(torch.tensor(list(radii.values())).double()).tolist() == pytest.approx(expected.tolist())


def test_data_that_the_paper_has_not_stands_without_its_numbers() -> None:
    joined = join([printed_run("folder:/photos/birds"), printed_run("pets:/a")])
    birds, pets = joined.runs
    assert (birds.name, birds.printed) == ("birds", None)
    assert pets.printed == "Pet"
    first = next(iter(joined_tables(joined))).rows[0]
    assert "(" not in first.cells[2].text
    figure = joined_radars(joined)
    assert figure is not None
    assert len([axes for axes in figure.axes if axes.name == "polar"]) == 3


def test_names_of_runs_are_unique() -> None:
    assert data_name("pets:/data/x") == "pets"
    assert data_name("folder:/data/birds/") == "birds"
    assert unique_names(["pets", "dogs", "pets", "pets"]) == ("pets", "dogs", "pets-2", "pets-3")


def test_markdown_marks_the_best_and_json_keeps_the_runs(tmp_path: Path) -> None:
    documents = [printed_run("pets:/a"), printed_run("dogs:/b")]
    joined = join(documents)
    assert "**0.0635 (0.0635)**" in to_markdown(joined_report(joined))
    content = json.loads(dumps_json(joined_json(joined)))
    assert content["runs"] == json.loads(dumps_json(documents))
    assert content["data"] == ["pets", "dogs"]


def test_finished_runs_are_read_from_their_folders(tmp_path: Path) -> None:
    (tmp_path / "focusvit.json").write_text(dumps_json(printed_run("pets:/a")), encoding="utf-8")
    assert read_document(tmp_path, "focusvit")["data"] == "pets:/a"
    with pytest.raises(BadInput, match="expected the folder that a finished `clairvit reproduce joita"):
        read_document(tmp_path, "joita")
    (tmp_path / "joita.json").write_text("{", encoding="utf-8")
    with pytest.raises(BadInput, match="cannot be read"):
        read_document(tmp_path, "joita")
    (tmp_path / "cmi.json").write_text('{"check": []}', encoding="utf-8")
    with pytest.raises(BadInput, match="is no result of `clairvit reproduce cmi`"):
        read_document(tmp_path, "cmi")


def test_what_does_not_belong_together_is_refused() -> None:
    with pytest.raises(BadInput, match="1 finished run was given to join"):
        join([printed_run("pets:/a")])
    other = {**printed_run("pets:/a"), "paper": {"name": "joita"}}
    with pytest.raises(BadInput, match="Reproductions of focusvit and joita"):
        join([printed_run("pets:/a"), other])
