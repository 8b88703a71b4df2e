"""The plain summary of a report says what the numbers allow, and no more."""

from __future__ import annotations

from pathlib import Path

import pytest

from clairvit.metrics.score import Prediction, Scores
from clairvit.reports.blocks import Example, Tile
from clairvit.reports.gallery import colour_bars
from clairvit.reports.study_results import StoreContents, StudyResults
from clairvit.reports.summary import summary_section
from helpers.fixed_scores import fixed_score

GOOD = [0.10, 0.12, 0.11, 0.13, 0.10, 0.12, 0.14, 0.11, 0.10, 0.13]
POOR = [0.50, 0.55, 0.53, 0.56, 0.52, 0.57, 0.51, 0.54, 0.58, 0.50]
ALIKE = [0.12, 0.10, 0.13, 0.11, 0.12, 0.10, 0.12, 0.13, 0.12, 0.11]


def text_of(columns: dict[str, list[float]], metric: str = "deletion", better: str = "lower") -> str:
    """Return the summary of a study of one metric with these values by method, the first method being the best."""
    n = len(next(iter(columns.values())))
    scores = Scores()
    scores.update({(name, metric): fixed_score(name, values, metric, better) for name, values in columns.items()})
    scores.predictions = tuple(Prediction(f"{i}.jpg", 0, 0.9, int(i == 0)) for i in range(n))
    methods = tuple(name for name in columns if name != "random")
    results = StudyResults("tiny", "0", "folder:x", "", scores, methods, (metric,), {}, {})
    section = summary_section(StoreContents(Path("x"), (), (results,), (), (), (), None))
    (lead, items) = section.blocks
    return " ".join([lead.text, *(f"{item.term} {item.text}" for item in items.items)])


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"legrad": GOOD, "gradcam": POOR, "random": POOR}, "is more than chance explains by deletion"),
        ({"legrad": GOOD, "gradcam": ALIKE, "random": POOR}, "cannot be told from Grad-CAM (gradcam) by deletion"),
        ({"legrad": GOOD[:3], "gradcam": POOR[:3], "random": POOR[:3]}, "Fewer than 6 images cannot say"),
        ({"legrad": POOR, "gradcam": GOOD, "random": POOR}, "By deletion alone Grad-CAM (gradcam) is better"),
    ],
)
def test_how_sure_the_first_place_is(columns: dict[str, list[float]], words: str) -> None:
    text = text_of(columns)
    assert text.startswith("Of 2 methods, LeGrad (legrad) is the best by deletion. What it does: ")
    assert words in text
    n = len(columns["legrad"])
    assert f"{n} images of folder:x; the model is right on {n - 1} of {n}." in text
    ahead = sum(a < b for a, b in zip(columns["legrad"], columns["random"], strict=True))
    assert f"by deletion on {ahead} of {n} images." in text


def test_one_method_without_random_maps() -> None:
    text = text_of({"legrad": GOOD})
    assert text.startswith("LeGrad (legrad) is the only method that was scored.")
    assert "Random maps were not scored" in text


def test_a_legend_for_each_kind_of_map_that_is_shown() -> None:
    photo, signed, plain = Tile("", "", "photo"), Tile("", "", "a", "", True), Tile("", "", "b", "", False)
    (bar,) = colour_bars([Example("", (photo, plain))]).bars
    colours, low, high = bar
    assert (low, high) == ("little", "much")
    assert colours[0] == "rgb(128, 128, 128)", "the photo is left alone where the map is low"
    assert len(colour_bars([Example("", (photo, signed, plain))]).bars) == 2
