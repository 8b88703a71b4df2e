"""Scores of single images in a reproduction: aligned with the predictions, in the paper's unit, beside the paper's."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from clairvit.bench.plan import DataConfig, ModelConfig
from clairvit.metrics.score import Prediction, Score
from clairvit.papers.comparison import NamedScores
from clairvit.papers.paper import find_paper
from clairvit.papers.per_image import ImageScores, scores_by_image
from clairvit.papers.reproduce import Reproduction
from clairvit.papers.setup import ReproductionConfig
from clairvit.reports.reproduction import reproduction_json
from clairvit.reports.reproduction_parts import MOST_IMAGES, extra_tables

PREDICTIONS = (Prediction("photos/Piggy_Bank.jpg", 0, 0.9, 1), Prediction("other.jpg", 1, None, None))
LABELS = ("cat", "dog")


def score(values: list[float], names: tuple[str, ...]) -> Score:
    flags = torch.zeros(len(values)).bool()
    return Score("faf", "rollout", torch.tensor(values).double(), "higher", (0, 1), flags, names, "m")


def by_image(name: str, scores: NamedScores) -> tuple[ImageScores, ...]:
    paper = find_paper(name)
    return scores_by_image(paper, scores, PREDICTIONS, LABELS, paper.tables[0])


def test_an_image_that_the_paper_names_has_its_numbers() -> None:
    names = tuple(prediction.image for prediction in PREDICTIONS)
    first, second = by_image("cmi", {("Attention Rollout", "FAF"): score([0.25, math.nan], names)})
    assert first.values == {("Attention Rollout", "FAF"): 0.25}
    assert (first.predicted, first.label, first.probability) == ("cat", "dog", 0.9)
    assert first.printed_as == "piggy bank"
    assert first.printed["Attention Rollout", "FAF"] == 0.467
    assert first.printed["Gradient Attention Rollout", "BAF"] == 0.427
    assert math.isnan(second.values["Attention Rollout", "FAF"])
    assert (second.printed_as, second.printed, second.label) == (None, {}, None)


def test_scores_are_in_the_papers_unit_and_of_their_own_image() -> None:
    """Coporan's Jaccard index is in per cent, and of the confident images only."""
    first, second = by_image("coporan", {("CAM", "Jaccard Index"): score([0.5], ("other.jpg",))})
    assert math.isnan(first.values["CAM", "Jaccard Index"])
    assert second.values["CAM", "Jaccard Index"] == 50
    assert not first.printed, "the paper prints nothing by image"


def reproduction(images: tuple[ImageScores, ...]) -> Reproduction:
    paper = find_paper("cmi")
    config = ReproductionConfig(paper, ModelConfig("tiny"), DataConfig("folder:photos"))
    return Reproduction(config, "tiny", 2, paper.tables[0], (), (), (), (), (), (), (), 0.0, by_image=images)


def test_the_table_and_the_document_have_every_image() -> None:
    names = tuple(prediction.image for prediction in PREDICTIONS)
    key = ("Attention Rollout", "FAF")
    images = by_image("cmi", {key: score([0.25, 0.5], names)})
    (table,) = extra_tables(reproduction(images))
    assert [column.title for column in table.columns[2:]] == [
        "FAF, Attention Rollout",
        "BAF, Attention Rollout",
        "FAF, Gradient Attention Rollout",
        "BAF, Gradient Attention Rollout",
    ]
    cells = [[cell.text for cell in row.cells] for row in table.rows]
    assert cells[0][:4] == ["photos/Piggy_Bank.jpg", "cat (90%)", "0.25 / 0.467", "– / 0.533"]
    assert cells[1][:3] == ["other.jpg", "dog", "0.5 / –"]
    entry, other = reproduction_json(reproduction(images))["by_image"]
    assert entry["scores"] == {"Attention Rollout": {"FAF": 0.25}}
    assert entry["paper"]["scores"]["Attention Rollout"]["FAF"] == 0.467
    assert other["paper"] is None


@pytest.mark.parametrize("count", [MOST_IMAGES, MOST_IMAGES + 1])
def test_a_long_table_says_what_it_leaves_out(count: int) -> None:
    names = tuple(prediction.image for prediction in PREDICTIONS)
    _, image = by_image("cmi", {("Attention Rollout", "FAF"): score([0.25, 0.5], names)})
    many = tuple(replace(image, image=f"{number}.jpg") for number in range(count))
    (table,) = extra_tables(reproduction(many))
    assert len(table.rows) == MOST_IMAGES
    assert ("the first" in table.caption) == (count > MOST_IMAGES)
    assert table.rows[0].cells[2].text == "0.5", "no number of the paper is known"
