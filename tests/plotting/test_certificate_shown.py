"""Certified patches are outlined, and the sentence is in figures, on axes, in HTML and in the record."""

from __future__ import annotations

from dataclasses import replace

import torch
from matplotlib.collections import LineCollection

from clairvit.methods.explanation import Explanation
from clairvit.plotting.axes import explanation_html, plot_explanation
from clairvit.plotting.figures import explanation_figure
from clairvit.results import Certificate, CertifiedPatches
from plotting.fakes import fake
from plotting.test_check_shown import checked

CERTIFICATE = Certificate(
    "keep", "legrad", 0.8, ("a", "b", "c", "d"), (2, 3, 1, 3), (1, 2, 3, 16), (4, 4), (64, 64), "pets", "abc"
)
SENTENCE = (
    "The model keeps its answer from these 3 of 16 patches alone, for 80 % of photos like the calibration photos."
)


def certified(explanation: Explanation) -> Explanation:
    patches = torch.zeros(len(explanation), 4, 4, dtype=torch.bool)
    patches[:, 0, :3] = True
    return replace(
        explanation, certified=CertifiedPatches(patches, explanation.names, explanation.targets, CERTIFICATE)
    )


def test_patches_are_outlined_and_the_sentence_is_below_that_of_the_check() -> None:
    figure = explanation_figure(certified(checked()))
    texts = {text.get_text(): text.get_position()[1] for text in figure.texts}
    written = " ".join(texts).replace("\u00a0", " ")
    assert SENTENCE in written
    assert "Whether a photo is like the calibration photos is not checked." in written
    assert "Outlined: the parts that were hidden" not in written, "the certified ones are"
    assert texts["Check: Map supported by a test"] > texts["Certified patches (outlined)"], "y grows upwards"
    outlines = [line for axes in figure.axes for line in axes.collections if isinstance(line, LineCollection)]
    assert [len(line.get_segments()) for line in outlines] == [8, 8], (
        "a row of three patches has eight sides, drawn twice"
    )
    of_check = explanation_figure(checked())
    assert figure.get_figheight() > of_check.get_figheight()
    plain = explanation_figure(fake())
    assert not any(line for axes in plain.axes for line in axes.collections if isinstance(line, LineCollection))


def test_axes_html_and_record_hold_the_certificate() -> None:
    explanation = certified(fake())
    axes = plot_explanation(explanation)
    assert " ".join(axes.get_xlabel().split()) == SENTENCE  # type: ignore[union-attr]
    assert SENTENCE in explanation_html(explanation)
    record = explanation.to_dict()["certified"]
    assert record["maps"][0]["patches"] == [[0, 0], [0, 1], [0, 2]]
    assert record["certificate"]["q"] == 3
    assert "names" not in record["certificate"], "what it has of each photo is in its own file"
    assert fake().to_dict()["certified"] is None
