"""The check of a map is in figures, on axes, in HTML and in the JSON record, and nothing is there without it."""

from __future__ import annotations

from dataclasses import replace

from clairvit.methods.explanation import Explanation
from clairvit.metrics.check_result import CheckResult, MapCheck, RemovalEffect
from clairvit.plotting.axes import explanation_html, plot_explanation
from clairvit.plotting.canvas import SIDE_BEARINGS, SMALL, text_width, wrap
from clairvit.plotting.figures import explanation_figure
from plotting.fakes import fake

REMOVALS = (
    RemovalEffect(0.1, 2, 0.2, (0.8, 0.82, 0.81), 9.0),
    RemovalEffect(0.3, 5, 0.1, (0.7, 0.72, 0.71), 9.0),
)
CHECK = MapCheck(
    "cat.jpg", "Egyptian Mau", "legrad", "probability", 0.9, REMOVALS, 0.5, 0.1, 0.9, {}, 0, 0.0, "supported"
)


def checked(maps: int = 1) -> Explanation:
    return replace(fake(maps, names=[f"{k}.jpg" for k in range(maps)]), checked=CheckResult((CHECK,) * maps))


def test_verdict_and_sentence_are_written_under_the_map() -> None:
    plain, figure = explanation_figure(fake()), explanation_figure(checked())
    texts = [text.get_text() for text in figure.texts]
    assert "Check: supported" in texts
    assert CHECK.sentence in " ".join(texts).replace("\u00a0", " ")
    assert figure.get_figheight() > plain.get_figheight()
    assert not any("Check" in text.get_text() for text in plain.texts)


def test_lines_of_rows_do_not_meet_the_next_row() -> None:
    figure = explanation_figure(checked(2))
    verdicts = [text.get_position()[1] for text in figure.texts if text.get_text() == "Check: supported"]
    assert len(verdicts) == 2
    second_row = [axes.get_position().y1 for axes in figure.axes if axes.images and axes.get_position().y1 < 0.55]
    lines = [text for text in figure.texts if text.get_position()[1] > max(second_row)]
    assert any("uses." in text.get_text() for text in lines)  # the end of the first sentence is above


def test_wrapped_lines_fit_and_hold_all_words() -> None:
    lines = wrap(CHECK.sentence, 2.0, SMALL)
    assert len(lines) > 1
    assert " ".join(lines).replace("\u00a0", " ") == CHECK.sentence
    assert all(text_width(line) * SMALL * SIDE_BEARINGS <= 72 * 2.0 for line in lines)
    assert wrap("Donaudampfschifffahrtsgesellschaft x", 0.1, SMALL) == ["Donaudampfschifffahrtsgesellschaft", "x"]


def test_axes_html_and_record_hold_the_check() -> None:
    explanation = checked()
    axes = plot_explanation(explanation)
    assert " ".join(axes.get_xlabel().split()) == CHECK.sentence  # type: ignore[union-attr]
    assert "This map points at what the model uses." in explanation_html(explanation)
    record = explanation.to_dict()
    assert record["check"]["checks"][0]["verdict"] == "supported"
    assert fake().to_dict()["check"] is None
