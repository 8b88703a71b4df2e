from __future__ import annotations

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from clairvit.errors import BadInput
from clairvit.methods.explanation import Cost
from clairvit.show.figures import _columns, comparison_figure, explanation_figure, layers_figure, same_image
from clairvit.show.look import Look
from clairvit.show.page import fit, text_width, ticks
from clairvit.show.words import effort, guesses, percent
from show.fakes import fake


def drawn(figure: Figure) -> np.ndarray:
    canvas = figure.canvas
    assert isinstance(canvas, FigureCanvasAgg), "figures are drawn without a display"
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].astype(float) / 255


def written(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.texts]


def pictures(figure: Figure) -> list[np.ndarray]:
    return [np.asarray(axes.images[0].get_array()) for axes in figure.axes if axes.images]


def test_one_explanation_is_photo_overlay_and_bar_with_class_and_probability() -> None:
    figure = explanation_figure(fake())
    assert len(figure.axes) == 3
    assert "Egyptian Mau 91%" in written(figure)
    assert "cat.jpg" in written(figure)
    assert "Egyptian Mau 91% · Bengal 7.5%" in written(figure)
    photo, overlay = pictures(figure)[:2]
    change = np.abs(photo - overlay).sum(-1)
    assert change[:8, :8].mean() > 3 * change[-8:, -8:].mean(), "hot where the map is hot"
    assert drawn(figure).std() > 0.05


def test_targets_stand_side_by_side_and_images_in_rows() -> None:
    targets = explanation_figure(fake(3, targets=["Egyptian Mau", "Bengal", "Bengal − Egyptian Mau"]))
    assert len(targets.axes) == 1 + 3 * 2
    assert {"Bengal 7.5%", "Bengal − Egyptian Mau"} <= set(written(targets))
    rows = explanation_figure(fake(3, names=["a", "b", "c"]))
    assert len(rows.axes) == 3 * 3
    assert rows.get_figheight() > 2.5 * targets.get_figheight()


def test_maps_of_one_image_belong_together() -> None:
    explanation = fake(4, names=["a", "a", "b", "a"])
    assert same_image(explanation) == [[0, 1], [2], [3]]
    explanation.pixels[1] += 1
    assert same_image(explanation) == [[0], [1], [2], [3]], "two photos may have one name"


def test_signed_bars_are_symmetric() -> None:
    figure = explanation_figure(fake(signed=True), Look(robust=0))
    labels = [label.get_text() for label in figure.axes[-1].get_yticklabels()]
    assert labels[0].replace("−", "") == labels[2]
    assert labels[1] == "0"
    cut = explanation_figure(fake(signed=True, grid=(14, 14)), Look(robust=5)).axes[-1].get_yticklabels()
    assert [cut[0].get_text()[0], cut[2].get_text()[0]] == ["≤", "≥"], "the bar says where values were cut off"


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("value", [0.0, 1.0, float("nan"), 1e-320, 1e38])
def test_maps_without_contrast_are_drawn(value: float, signed: bool) -> None:
    explanation = fake(signed=signed)
    explanation.maps.fill_(value)
    assert np.isfinite(drawn(explanation_figure(explanation))).all()


def test_one_scale_for_all_on_request() -> None:
    explanation = fake(2, targets=["Egyptian Mau", "Bengal"])
    explanation.maps[1] /= 8  # exact in binary
    own = pictures(explanation_figure(explanation))
    shared = pictures(explanation_figure(explanation, Look(shared=True)))
    np.testing.assert_allclose(own[1], own[3])
    assert np.abs(shared[1] - shared[3]).max() > 0.3


def test_wide_models_get_wide_pictures() -> None:
    square, wide = explanation_figure(fake()), explanation_figure(fake(grid=(2, 4), size=(32, 64)))
    assert wide.get_figheight() < square.get_figheight()
    assert wide.get_figwidth() == square.get_figwidth()


def test_a_comparison_has_the_photo_and_a_tile_for_each_method_with_its_cost() -> None:
    methods = {name: fake(method=name, signed=name == "ixg") for name in ("rollout", "legrad", "ixg")}
    figure = comparison_figure(methods)
    assert len(pictures(figure)) == 4 + 2, "photo, three methods, two legends"
    assert {"rollout", "legrad", "ixg", "1 forward + 1 backward", "Egyptian Mau 91%"} <= set(written(figure))
    assert {"for the class", "most relevant"} <= set(written(figure))
    rows = comparison_figure({name: fake(2, names=["a", "b"]) for name in methods})
    assert len(pictures(rows)) == 2 * 4 + 1


def test_a_comparison_of_nothing_or_of_different_images_is_refused() -> None:
    with pytest.raises(BadInput, match="at least one method"):
        comparison_figure({})
    with pytest.raises(BadInput, match="different numbers of maps"):
        comparison_figure({"a": fake(1), "b": fake(2)})


def test_the_strip_has_a_picture_for_each_layer_with_its_number() -> None:
    figure = layers_figure(fake(layers=12))
    assert len(pictures(figure)) == 1 + 12 + 1
    assert [f"layer {number}" for number in range(12)] == [text for text in written(figure) if text.startswith("layer")]
    with pytest.raises(BadInput, match=r"without its layers.*layers=True"):
        layers_figure(fake())


def test_a_figure_too_tall_to_read_is_refused() -> None:
    with pytest.raises(BadInput, match=r"100 rows.*--out DIR"):
        explanation_figure(fake(100, names=[str(number) for number in range(100)]))


@pytest.mark.parametrize("tiles", range(1, 60))
def test_grids_are_nearly_full(tiles: int) -> None:
    columns = _columns(tiles)
    assert -tiles % columns < columns
    assert -tiles % columns <= 3


def test_text_that_does_not_fit_is_made_smaller_then_cut() -> None:
    assert fit("short", 2.0, 8) == ("short", 8)
    text, size = fit("a name of a class that goes on and on and on", 1.0, 8)
    assert text.endswith("…")
    assert size == 6
    assert text_width(text) * size <= 72
    assert fit("a$b$", 2.0, 8)[0] == "a$b$", "dollars are no formula"


def test_bars_share_a_power_of_ten() -> None:
    assert ticks([0.0, 0.00056, 0.00112]) == (["0", "0.56", "1.12"], "×10⁻³")
    assert ticks([1.2e5, 3e4]) == (["1.20", "0.30"], "×10⁵")
    assert ticks([-2.5, 0.0, 2.5]) == (["−2.50", "0", "2.50"], "")
    assert ticks([0.0]) == (["0"], "")


def test_words() -> None:
    assert [percent(p) for p in (1.0, 0.9996, 0.92, 0.0747, 0.0001, None)] == [
        "100%",
        "99.9%",
        "92%",
        "7.5%",
        "<0.1%",
        "",
    ]
    assert effort(Cost(1, 0)) == "1 forward"
    assert effort(Cost()) == "no pass"
    assert [guess.name for guess in guesses(fake(), 0, 2)] == ["Egyptian Mau", "Bengal"]
    assert len(guesses(fake(), 0, 99)) == 4
