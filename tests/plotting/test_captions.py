"""Captions: class-agnostic maps name no class, and a long model name is shortened so that every line fits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import matplotlib
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

import clairvit as cv
from clairvit.plotting.canvas import SMALL, shorten_name, text_width
from clairvit.plotting.comparison import comparison_figure
from clairvit.plotting.figures import explanation_figure, layers_figure
from clairvit.plotting.heads import heads_figure
from clairvit.plotting.labels import CLASS_AGNOSTIC, format_number
from clairvit.plotting.save import RC_PARAMS
from clairvit.plotting.tiles import method_label, source_line
from helpers import tiny_pairs
from helpers.tiny_models import double, pixels, wrapped

LONG = f"file:/home/somebody/{'projects/' * 12}run-7/epoch-30.safetensors"
MODEL = wrapped("timm-vit")


def texts(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.texts] + [text.get_text() for axis in figure.axes for text in axis.texts]


def explained(method: str, **more: Any) -> cv.Explanation:
    return cv.explain(MODEL, pixels("timm-vit", 1)[0], method, layers=True, by_head=True, **more)


@pytest.mark.parametrize("dpi", [72, 100, 200, 300])
@pytest.mark.parametrize("method", ["genatt", "rollout"])
def test_every_line_fits_the_figure(method: str, dpi: int) -> None:
    explanation = replace(explained(method), model=LONG)
    for draw in (explanation_figure, layers_figure, heads_figure):
        figure = draw(explanation)
        figure.set_dpi(dpi)
        with matplotlib.rc_context(RC_PARAMS):
            canvas, inside = figure.canvas, figure.bbox
            assert isinstance(canvas, FigureCanvasAgg)
            for text in figure.texts:
                box = text.get_window_extent(canvas.get_renderer())
                assert box.x0 >= inside.x0, text.get_text()
                assert box.x1 <= inside.x1, text.get_text()
        (caption,) = [text for text in texts(figure) if "safetensors" in text or "epoch" in text]
        assert caption.startswith(method), "the method is read"
        assert "epoch-30.safetensors" in caption or caption.count("…") == 1
        if draw is explanation_figure and method == "genatt":
            assert caption.endswith("explains the logit")


def test_the_middle_of_a_name_is_left_out() -> None:
    whole = shorten_name("legrad · ", "pets", " · explains the logit", 5.0, SMALL)
    assert whole == "legrad · pets · explains the logit"
    text = shorten_name("legrad · ", LONG, " · explains the logit", 4.0, SMALL)
    assert text.startswith("legrad · file:")
    assert text.endswith("epoch-30.safetensors · explains the logit")
    assert text.count("…") == 1
    assert text_width(text) * 0.75 * SMALL <= 4.0 * 72


def test_a_class_agnostic_method_is_one_map_that_names_no_class() -> None:
    """NEWCOMER B2: two identical maps of rollout, each titled with a class, 'explains the logit'."""
    explanation = explained("rollout", targets=[3, 1])
    assert explanation.maps.shape[0] == len(explanation) == 1
    assert (explanation.targets, explanation.classes, explanation.probabilities, explanation.score) == (
        ("any class",),
        (None,),
        (None,),
        "none",
    )
    assert explanation.layers is not None
    assert explanation.layers.shape[1] == 1
    (note,) = explanation.notes
    assert note == (
        "rollout is class-agnostic: its map is the same for every class, so it says nothing of class 3 or class 1 in "
        "particular."
    )
    content = explanation.to_dict()
    assert (content["targets"], content["score"], content["class_specific"]) == (["any class"], "none", False)
    for draw in (explanation_figure, layers_figure, heads_figure):
        words = " | ".join(texts(draw(explanation)))
        assert "explains the" not in words
        assert CLASS_AGNOSTIC in words


def test_a_contrast_of_a_class_agnostic_method_is_no_contrast() -> None:
    explanation = explained("rollout", target=cv.Contrast(3, 1))
    assert explanation.targets == ("any class",)
    assert "class 3 − class 1" in explanation.notes[0]
    shown = explanation_figure(explanation)
    assert not [text for text in texts(shown) if "−" in text and "class" in text]


def test_the_predicted_class_is_no_title_either() -> None:
    explanation = explained("raw-attention")
    assert explanation.targets == ("any class",)
    assert explanation.notes == ()
    assert explanation.classes != (None,), "what the model predicts, for scoring the map"
    assert explained("genatt").targets != ("any class",)


def test_a_comparison_draws_a_class_agnostic_map_once() -> None:
    comparison = cv.compare(MODEL, pixels("timm-vit", 1)[0], ["rollout", "genatt"], targets=[3, 1])
    assert comparison["rollout"].targets == ("any class", "any class"), (
        "as many as the others have, to be drawn together"
    )
    assert comparison["genatt"].targets == ("class 3", "class 1")
    words = texts(comparison_figure(comparison))
    assert words.count("any class") == 1
    assert [sum(text.startswith(f"class {number}") for text in words) >= 1 for number in (1, 3)] == [True, True]


def test_a_class_agnostic_map_is_scored_by_the_class_that_was_asked_for() -> None:
    image = pixels("timm-vit", 1)
    for target in (None, 3):
        explanation = cv.explain(MODEL, image, "rollout", target=target)
        score = cv.evaluate(MODEL, image, explanation, "deletion")
        assert score.values.tolist() == cv.evaluate(MODEL, image, "rollout", "deletion", target=target).values.tolist()


def test_the_value_of_a_target_that_is_no_class_is_stated() -> None:
    """A prompt's cosine or logit, an activation, a function's value: never "explains the custom"."""
    pair, images = tiny_pairs.wrapped("CLIPModel"), tiny_pairs.pixels(1)
    model, photos = double("timm-vit", batch=1)
    for explanation, word in (
        (cv.explain(pair, images, "ixg", target=cv.Text("a dog")), "difference of cosines"),
        (cv.explain(pair, images, "ixg", target=cv.Text("a dog"), score="logit"), "difference of logits"),
        (cv.explain(model, photos, "ixg", target=cv.Neuron(1, 3)), "activation"),
        (cv.explain(model, photos, "ixg", target=cv.Output(lambda output: output[:, 1] ** 2)), "score"),
        (cv.explain(model, photos, "ixg", targets=[3, cv.Output(lambda output: output[:, 1])]), "score"),
    ):
        last = len(explanation) - 1
        value = explanation.target_scores[last]
        assert value is not None
        assert method_label(explanation, last) == f"ixg · {word} {format_number(value)}"
        assert source_line(explanation)[2] == f" · explains the {word}"
    assert method_label(cv.explain(model, photos, "ixg", target=3), 0) == "ixg"
