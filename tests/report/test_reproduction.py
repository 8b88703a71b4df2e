"""A reproduction as a document: the same tables in HTML and Markdown, names escaped, NaN as null in JSON."""

from __future__ import annotations

import json
import math

import pytest

from clairvit._io import dumps_json
from clairvit.bench.plan import DataConfig, ModelConfig
from clairvit.papers.comparison import Cell, Row
from clairvit.papers.paper import find_paper
from clairvit.papers.reproduce import Reproduction
from clairvit.papers.setup import ReproductionConfig
from clairvit.reports.render import to_html, to_markdown
from clairvit.reports.reproduction import reproduction_json, reproduction_report, result_tables
from helpers.small_report import Reader

NASTY = "<b>a|b*c</b>"


@pytest.fixture(scope="module")
def result() -> Reproduction:
    paper = find_paper("focusvit")
    config = ReproductionConfig(paper, ModelConfig("tiny"), DataConfig("folder:photos"))
    rows = tuple(
        Row(
            entry,
            {
                measure.name: Cell(math.nan, 0.1 * place + 0.01 * column, 0.02, (0.0, 0.5), 9, math.nan, place + 1)
                for column, measure in enumerate(paper.measures)
            },
        )
        for place, entry in enumerate(paper.methods)
    )
    return Reproduction(config, NASTY, 9, None, rows, (), (), (), (), (("data", NASTY),), ("unit 1 failed",), 1.0)


def test_html_has_the_tables_the_radar_and_the_differences(result: Reproduction) -> None:
    page = Reader(to_html(reproduction_report(result)))
    assert [text for _, text in page.all("caption")] == [table.caption for table in result_tables(result)]
    (drawing,) = [attributes for attributes, _ in page.all("svg")]
    assert drawing["aria-label"] == "Radar chart of focusvit"
    assert NASTY in page.section("What is not as in the paper")
    assert "unit 1 failed" in page.section("What is not as in the paper")
    assert not page.all("script")[1:]


def test_markdown_has_a_row_for_each_row_of_the_tables(result: Reproduction) -> None:
    text = to_markdown(reproduction_report(result))
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert len(rows) == sum(1 + len(table.rows) for table in result_tables(result))
    assert "&lt;b&gt;a\\|b\\*c&lt;/b&gt;" in text
    assert "<b>" not in text


def test_json_has_null_where_the_paper_has_no_number(result: Reproduction) -> None:
    content = json.loads(dumps_json(reproduction_json(result)))
    cell = next(iter(content["rows"][1]["cells"].values()))
    assert cell["paper"] is None
    assert cell["ours"] == pytest.approx(0.1)
    assert content["differences"] == [{"about": "data", "what": NASTY}]
