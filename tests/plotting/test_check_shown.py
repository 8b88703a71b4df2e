"""The check of a map is in figures, on axes, in HTML and in the JSON record, and nothing is there without it."""

from __future__ import annotations

import html
from dataclasses import replace

from clairvit.methods.explanation import Explanation
from clairvit.metrics.check_result import AnswerCheck, CheckResult, MapCheck, RemovalEffect
from clairvit.plotting.axes import explanation_html, plot_explanation
from clairvit.plotting.canvas import SIDE_BEARINGS, SMALL, text_width, wrap
from clairvit.plotting.figures import explanation_figure
from clairvit.plotting.patch_outline import marked_patches
from plotting.fakes import fake

REMOVALS = (
    RemovalEffect(3 / 16, 3, 0.2, (0.8, 0.82, 0.81), 9.0),
    RemovalEffect(5 / 16, 5, 0.1, (0.7, 0.72, 0.71), 9.0),
)
CHECK = MapCheck(
    name="cat.jpg",
    target="Egyptian Mau",
    method="legrad",
    quantity="probability",
    full=0.9,
    removals=REMOVALS,
    prediction=0.6,
    partial=0.5,
    yardstick=0.5,
    specific=0.5,
    rival="Bengal",
    stability=0.9,
    agreement={},
    outliers=0,
    outlier_share=0.0,
    verdict="supported",
    grid=(4, 4),
    brightest=(5, 6, 9, 10, 1),
)


def checked(maps: int = 1, check: MapCheck = CHECK) -> Explanation:
    return replace(fake(maps, names=[f"{k}.jpg" for k in range(maps)]), checked=CheckResult((check,) * maps))


def test_badge_and_sentences_are_written_under_the_map() -> None:
    plain, figure = explanation_figure(fake()), explanation_figure(checked())
    texts = [text.get_text() for text in figure.texts]
    assert f"Check: {CHECK.badge}" in texts
    for sentence in (CHECK.about_the_map, f"Answer: {CHECK.answer.sentence}"):
        assert sentence in " ".join(texts).replace("\u00a0", " ")
    assert figure.get_figheight() > plain.get_figheight()
    assert not any("Check" in text.get_text() for text in plain.texts)


def test_lines_of_rows_do_not_meet_the_next_row() -> None:
    figure = explanation_figure(checked(2))
    verdicts = [text.get_position()[1] for text in figure.texts if text.get_text() == f"Check: {CHECK.badge}"]
    assert len(verdicts) == 2
    second_row = [axes.get_position().y1 for axes in figure.axes if axes.images and axes.get_position().y1 < 0.55]
    lines = [text for text in figure.texts if text.get_position()[1] > max(second_row)]
    assert any("hidden." in text.get_text() for text in lines)  # the end of the first sentence is above


def test_wrapped_lines_fit_and_hold_all_words() -> None:
    lines = wrap(CHECK.sentence, 2.0, SMALL)
    assert len(lines) > 1
    assert " ".join(lines).replace("\u00a0", " ") == CHECK.sentence
    assert all(text_width(line) * SMALL * SIDE_BEARINGS <= 72 * 2.0 for line in lines)
    assert wrap("Donaudampfschifffahrtsgesellschaft x", 0.1, SMALL) == ["Donaudampfschifffahrtsgesellschaft", "x"]


def test_axes_html_and_record_hold_the_check() -> None:
    explanation = checked()
    axes = plot_explanation(explanation)
    assert " ".join(axes.get_xlabel().split()) == str(CHECK)  # type: ignore[union-attr]
    assert CHECK.sentence in html.unescape(explanation_html(explanation))
    record = explanation.to_dict()
    assert record["check"]["checks"][0]["verdict"] == "supported"
    assert fake().to_dict()["check"] is None


def test_remarks_and_doubts_are_in_the_picture() -> None:
    """What is filed is the picture: it must not leave out what the terminal says."""
    doubtful = replace(
        CHECK, remarks=("A little noise changes the map.",), answer=AnswerCheck("take care", ("Unsure.",))
    )
    texts = " ".join(text.get_text() for text in explanation_figure(checked(check=doubtful)).texts)
    for words in ("A little noise changes the map.", "Unsure.", "but take care"):
        assert words in texts.replace("\u00a0", " ")
    nothing = replace(CHECK, verdict=None, answer=AnswerCheck("nothing to explain", ("The photo is of one colour.",)))
    texts = " ".join(text.get_text() for text in explanation_figure(checked(check=nothing)).texts)
    assert "Nothing here to explain" in texts
    assert "The photo is of one colour." in texts.replace("\u00a0", " ")
    assert "supported" not in texts


def test_the_hidden_patches_are_outlined() -> None:
    marked = marked_patches(checked(), 0)
    assert marked is not None
    assert sorted(marked.flatten().nonzero()[0].tolist()) == [
        5,
        6,
        9,
    ]  # those of the removal that the sentence is about
    assert marked_patches(fake(), 0) is None
    assert marked_patches(checked(check=replace(CHECK, verdict=None)), 0) is None
    assert marked_patches(checked(check=replace(CHECK, grid=(2, 2, 4))), 0) is None, "the patches of clips"

    def lines(explanation: Explanation) -> int:
        return sum(len(axes.collections) for axes in explanation_figure(explanation).axes)

    assert lines(checked()) == lines(fake()) + 2  # dark and light
