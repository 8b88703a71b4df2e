from __future__ import annotations

import numpy as np
import pytest

from clairvit.errors import BadInput, UnknownName
from clairvit.plotting.canvas import BAR, Canvas
from clairvit.plotting.overlay import DIVERGING, SEQUENTIAL, Scale, scale_of
from clairvit.plotting.style import PlotStyle, plot_style


def test_unsigned_maps_run_from_lowest_to_highest() -> None:
    scale = scale_of(np.array([[2.0, 3.0], [5.0, 4.0]]), signed=False, style=PlotStyle(robust=0))
    assert (scale.low, scale.high, scale.cmap) == (2.0, 5.0, SEQUENTIAL)
    assert scale.position(np.array([2.0, 3.5, 5.0])).tolist() == [0.0, 0.5, 1.0]


def test_signed_maps_are_symmetric_around_zero() -> None:
    scale = scale_of(np.array([-1.0, 0.0, 4.0]), signed=True, style=PlotStyle(robust=0))
    assert (scale.low, scale.high, scale.cmap) == (-4.0, 4.0, DIVERGING)
    assert scale.position(np.array([0.0])) == 0.5
    assert scale.strength(np.array([-2.0])) == scale.strength(np.array([2.0])) == 0.5
    red, _, blue = scale.colours(np.array([4.0]))[0]
    assert red > blue, "for the class is red"


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("value", [0.0, 3.0, np.nan, np.inf])
def test_a_constant_map_lights_up_nothing_and_divides_by_nothing(value: float, signed: bool) -> None:
    values = np.full((3, 3), value)
    with np.errstate(all="raise"):
        scale = scale_of(values, signed)
        colours = scale.colours(values)
    assert np.isfinite(colours).all()
    if not (signed and value == 3.0):  # a signed map that is 3 everywhere speaks for the class everywhere
        assert scale.strength(values).max() == 0.0


def test_values_that_are_not_finite_do_not_stretch_the_scale() -> None:
    values = np.array([0.0, 1.0, np.nan, np.inf])
    scale = scale_of(values, signed=False, style=PlotStyle(robust=0))
    assert (scale.low, scale.high) == (0.0, 1.0)
    assert scale.position(values).tolist() == [0.0, 1.0, 0.0, 1.0]


def test_robust_limits_ignore_a_single_hot_patch() -> None:
    values = np.append(np.linspace(0, 1, 199), 1000.0)
    whole, robust = (scale_of(values, signed=False, style=PlotStyle(robust=percent)) for percent in (0, 1))
    assert (whole.high, whole.clipped) == (1000.0, (False, False))
    assert robust.high < 2.0
    assert robust.clipped == (True, True)


@pytest.mark.parametrize("signed", [True, False])
def test_a_single_patch_is_a_map_and_not_an_outlier(signed: bool) -> None:
    values = np.zeros((14, 14))
    values[3, 4] = 1.0
    assert scale_of(values, signed).high == 1.0


def test_huge_values_do_not_overflow() -> None:
    scale = scale_of(np.array([-1.7e308, 1.7e308]), signed=True, style=PlotStyle(robust=0))
    with np.errstate(all="raise"):
        assert scale.position(np.array([-1.7e308, 0.0, 1.7e308])).tolist() == [0.0, 0.5, 1.0]


def test_an_unknown_colour_map_is_refused_with_a_suggestion() -> None:
    with pytest.raises(UnknownName, match=r"'viridi' is not a matplotlib colour map.*Did you mean 'viridis'"):
        scale_of(np.zeros(2), signed=False, style=PlotStyle(cmap="viridi"))


def test_display_options_are_checked() -> None:
    assert plot_style({"robust": 1, "smooth": False}) == PlotStyle(robust=1, smooth=False)
    with pytest.raises(UnknownName, match=r"'opacit' is not a display option.*Did you mean 'opacity'"):
        plot_style({"opacit": 1})
    for wrong in ({"robust": 50}, {"opacity": 1.5}, {"dpi": 0}):
        with pytest.raises(BadInput, match="try"):
            plot_style(wrong)


@pytest.mark.parametrize("bound", [0.551, 0.0888, 88.8, 888.0, 5.55e-5])
def test_the_numbers_of_a_colour_bar_end_before_the_next_tile(bound: float) -> None:
    canvas = Canvas(3.0, 3.0)
    canvas.colour_bar(Scale(-bound, bound, DIVERGING, True, clipped=(True, True)), 0.8, 0.06, 0.5, 2.0)
    (axes, *_) = canvas.figure.axes
    canvas.figure.canvas.draw()
    right = max(label.get_window_extent().x1 for label in axes.get_yticklabels()) / canvas.figure.dpi
    assert right < BAR, "a tile is followed by BAR inches"
