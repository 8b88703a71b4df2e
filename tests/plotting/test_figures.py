from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

from clairvit._cost import Cost
from clairvit.errors import BadInput
from clairvit.methods.explanation import Explanation, Heads
from clairvit.numerics import percent
from clairvit.plotting.canvas import fit, text_width, tick_labels
from clairvit.plotting.comparison import arrange_cells, comparison_figure, rows_needed
from clairvit.plotting.figures import explanation_figure, layers_figure
from clairvit.plotting.heads import heads_figure
from clairvit.plotting.labels import cost_label
from clairvit.plotting.style import PlotStyle
from clairvit.plotting.tiles import same_image
from helpers.covering import all_cases
from plotting.fakes import fake


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


def test_only_patches_whose_sign_is_sure_are_drawn_on_request() -> None:
    """Of two strong patches one has an error of more than half of its value: the photo shows through there."""
    maps = torch.zeros(1, 4, 4)
    maps[0, 0, 0], maps[0, 3, 3] = 1.0, -1.0
    errors = torch.full((1, 4, 4), 0.1)
    errors[0, 3, 3] = 0.6
    explanation = replace(fake(), maps=maps, signed=True, standard_error=errors)
    neutral = pictures(explanation_figure(replace(explanation, maps=torch.zeros(1, 4, 4))))[1]
    side = neutral.shape[0] // 4
    for sure, expected in ((True, [True, False]), (False, [True, True])):
        figure = explanation_figure(explanation, PlotStyle(sure=sure))
        change = np.abs(pictures(figure)[1] - neutral).max(-1)
        assert [bool(change[:side, :side].max() > 0.1), bool(change[-side:, -side:].max() > 0.1)] == expected
        assert any("2 standard errors or more" in text for text in written(figure)) is sure
    without = explanation_figure(replace(explanation, standard_error=None), PlotStyle(sure=True))
    assert any("no standard errors" in text for text in written(without))


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
    figure = explanation_figure(fake(signed=True), PlotStyle(robust=0))
    labels = [label.get_text() for label in figure.axes[-1].get_yticklabels()]
    (against, lowest), (highest, favour) = labels[0].split("\n"), labels[2].split("\n")
    assert (against, favour) == ("against", "for"), "words for those who read no numbers"
    assert lowest.replace("−", "") == highest
    assert labels[1] == "0"
    cut = explanation_figure(fake(signed=True, grid=(14, 14)), PlotStyle(robust=5)).axes[-1].get_yticklabels()
    assert [cut[0].get_text().split("\n")[1][0], cut[2].get_text()[0]] == ["≤", "≥"], (
        "the bar says where values were cut off"
    )


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("value", [0.0, 1.0, float("nan"), 1e-320, 1e38])
def test_maps_without_contrast_are_drawn(value: float, signed: bool) -> None:
    explanation = fake(signed=signed)
    explanation.maps.fill_(value)
    assert np.isfinite(drawn(explanation_figure(explanation))).all()


@pytest.mark.parametrize("kind", ["figure", "comparison"])
@pytest.mark.parametrize(
    ("targets", "names", "shared", "same"),
    [
        (["Egyptian Mau", "Bengal"], ["a", "a"], None, True),
        (["Egyptian Mau", "Bengal"], ["a", "a"], False, False),
        (["Egyptian Mau", "Bengal − Egyptian Mau"], ["a", "a"], None, False),
        (["Egyptian Mau", "Bengal − Egyptian Mau"], ["a", "a"], True, True),
        (["Egyptian Mau", "Egyptian Mau"], ["a", "b"], None, False),
        (["Egyptian Mau", "Egyptian Mau"], ["a", "b"], True, True),
    ],
)
def test_classes_of_an_image_share_a_scale_and_others_on_request(
    targets: list[str], names: list[str], shared: bool | None, same: bool, kind: str
) -> None:
    explanation = fake(2, targets=targets, names=names)
    explanation.maps[1] /= 8  # exact in binary
    style = PlotStyle(shared=shared)
    drawn_maps = pictures(
        explanation_figure(explanation, style)
        if kind == "figure"
        else comparison_figure({"legrad": explanation}, style)
    )
    second = {("figure", 1): 3, ("figure", 2): 4, ("comparison", 1): 2, ("comparison", 2): 3}[kind, len(set(names))]
    difference = np.abs(drawn_maps[1] - drawn_maps[second]).max()
    assert difference > 0.3 if same else difference < 1e-12


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


@pytest.mark.parametrize("images", [*range(1, 21), 40] if all_cases() else [1, 2, 3, 4, 5, 7, 10, 17, 40])
@pytest.mark.parametrize("draw", ["figure", "two methods"])
def test_a_figure_of_many_images_is_no_column(images: int, draw: str) -> None:
    explanation = fake(images, names=[f"{number:02d}.jpg" for number in range(images)], grid=(2, 2), size=(8, 8))
    if draw == "figure":
        figure = explanation_figure(explanation)
        shown = [text for text in written(figure) if text.endswith(".jpg")]
        assert shown == list(explanation.names), "in reading order, each of them once"
    else:
        figure = comparison_figure({"rollout": explanation, "ixg": explanation})
        assert len(pictures(figure)) == 3 * images + 1
    width, height = figure.get_size_inches()
    assert width <= 16.5
    assert height / width <= 1.65 or width > 10, "beyond what three columns hold it grows downwards"
    for axes in figure.axes:
        box = axes.get_position()
        assert min(box.x0, box.y0) >= 0
        assert max(box.x1, box.y1) <= 1
    places = [tuple(np.round(axes.get_position().bounds, 6)) for axes in figure.axes]
    assert len(set(places)) == len(places), "nothing lies on something else"


@pytest.mark.parametrize("methods", range(1, 61))
def test_one_image_by_many_methods_has_the_shape_of_a_screen(methods: int) -> None:
    cell, rows, columns = arrange_cells(methods, 1, 1, 1.0, grouped=True)
    canvas = cell.canvas(rows, columns, 0.72)
    assert 0.8 <= canvas.width / canvas.height <= 3.6


def test_a_figure_too_tall_to_read_is_refused() -> None:
    with pytest.raises(BadInput, match=r"100 rows.*one file per image"):
        explanation_figure(fake(100, names=[str(number) for number in range(100)]))


@pytest.mark.parametrize("classes", [1, 2, 3, 5])
@pytest.mark.parametrize("methods", range(1, 60))
def test_grids_are_nearly_full_and_no_wider_than_a_page(methods: int, classes: int) -> None:
    cell, rows, columns = arrange_cells(methods, 1, classes, 1.0, grouped=True)
    assert 0 <= rows * columns - (methods + 1) < columns
    assert rows * columns <= max(methods + 4, 1.25 * (methods + 1))
    assert columns * cell.width <= 14
    assert cell.tile >= (1.2 if classes == 1 else 0.9), "large enough to see something"
    assert classes > 3 or rows * (cell.height + 0.12) <= 30, "no ribbon"


def of_families(**families: str) -> dict[str, Explanation]:
    return {name: replace(fake(method=name), family=family) for name, family in families.items()}


def test_families_stand_under_their_names() -> None:
    figure = comparison_figure(of_families(rollout="attention", flow="attention", ixg="gradient"))
    assert [text for text in written(figure) if text in ("attention", "gradient")] == ["attention", "gradient"]
    mixed = comparison_figure(of_families(rollout="attention", ixg="gradient", flow="attention"))
    assert "attention" not in written(mixed), "methods in an order of the user's own"
    alone = comparison_figure(of_families(rollout="attention", flow="attention"))
    assert "attention" not in written(alone), "one family is no group"


def test_a_family_that_goes_on_in_the_next_row_is_named_again() -> None:
    many = of_families(**{f"a{i}": "attention" for i in range(25)}, ixg="gradient")
    names = [text for text in written(comparison_figure(many)) if text in ("attention", "gradient")]
    assert names.count("attention") == arrange_cells(26, 1, 1, 1.0, grouped=True)[1]
    assert names[-1] == "gradient"


def boxes(figure: Figure) -> list[tuple[str, Bbox]]:
    canvas = figure.canvas
    assert isinstance(canvas, FigureCanvasAgg)
    return [
        (text.get_text(), text.get_window_extent(canvas.get_renderer())) for text in figure.texts if text.get_text()
    ]


@pytest.mark.parametrize("classes", [1, 2])
def test_no_title_runs_into_another(classes: int) -> None:
    names = [f"gradcam-elementwise-{i}(tokens=all)+skipplus" for i in range(45)]
    targets = ["Egyptian Mau", "Staffordshire Bull Terrier"][:classes]
    many = {name: replace(fake(classes, targets=targets), family=str(i // 8)) for i, name in enumerate(names)}
    placed = boxes(comparison_figure(many))
    assert len(placed) > 2 * 45
    for i, (title_text, box) in enumerate(placed):
        for other, beside in placed[i + 1 :]:
            wide = min(box.x1, beside.x1) - max(box.x0, beside.x0)
            high = min(box.y1, beside.y1) - max(box.y0, beside.y0)
            assert wide <= 1 or high <= 1, (title_text, other)


def test_marks_say_what_is_signed_and_what_knows_no_class() -> None:
    methods = {"rollout": replace(fake(), class_specific=False), "ixg": fake(signed=True), "legrad": fake()}
    figure = comparison_figure(methods)
    marks = [text.get_text() for axes in figure.axes for text in axes.texts]
    assert sorted(marks) == ["±", "±", "∀", "∀"], "one on its tile, one in the legend"
    assert {"signed: evidence for and against", "class-agnostic: one map for all classes"} <= set(written(figure))
    plain = comparison_figure({"legrad": fake()})
    assert not [text for axes in plain.axes for text in axes.texts]


def test_classes_stand_side_by_side_within_a_method() -> None:
    targets = ["Egyptian Mau", "Bengal"]
    figure = comparison_figure({name: fake(2, targets=targets) for name in ("rollout", "legrad")})
    assert len(pictures(figure)) == 1 + 2 * 2 + 1, "one photo, two classes of two methods, a legend"
    assert written(figure).count("Bengal 7.5%") == 2
    assert written(figure).count("rollout") == 1
    images = comparison_figure({name: fake(2, names=["a", "b"]) for name in ("rollout", "legrad")})
    assert written(images).count("rollout") == 2, "images stand in rows"


def test_many_methods_on_many_images_are_counted_before_the_work() -> None:
    assert rows_needed(10, images=5, classes=1) == 5
    assert rows_needed(45, images=1, classes=1) == 5
    assert rows_needed(45, images=10, classes=2) > 40


def with_heads(maps: int = 1, layers: int = 3, count: int = 4, **what: Any) -> Explanation:
    explanation = fake(maps, layers=layers, **what)
    assert explanation.layers is not None
    return replace(
        explanation,
        heads=Heads(
            explanation.method,
            explanation.layers[:, None].repeat(1, count, 1, 1, 1),
            explanation.layers[:, None].repeat(1, 3, 1, 1, 1),
            explanation.maps[None].repeat(3, 1, 1, 1),
        ),
    )


def test_heads_are_a_grid_with_fusions_beside_it() -> None:
    figure = heads_figure(with_heads())
    assert len(pictures(figure)) == 3, "heads, fusions of each layer, fusions of all layers"
    words = written(figure)
    assert [word for word in words if word.startswith("head ")] == [f"head {head}" for head in range(4)]
    assert [word for word in words if word.startswith("layer ")] == [f"layer {layer}" for layer in range(3)]
    assert [word for word in words if word in ("min", "mean", "max")] == ["min", "mean", "max"]
    assert "cat.jpg · Egyptian Mau 91% · legrad" in words
    with pytest.raises(BadInput, match=r"without its heads.*by_head=True"):
        heads_figure(fake())


def test_heads_that_know_no_class_are_drawn_once() -> None:
    two = with_heads(2, targets=["Egyptian Mau", "Bengal"])
    assert len(pictures(heads_figure(two))) == 6
    agnostic = heads_figure(replace(two, class_specific=False))
    assert len(pictures(agnostic)) == 3
    assert "cat.jpg · legrad" in written(agnostic)
    assert two.heads is not None
    borrowed = replace(two, heads=replace(two.heads, method="raw-attention", whole=None))
    assert len(pictures(heads_figure(borrowed))) == 2


def test_the_heads_of_a_large_model_fit_on_a_page() -> None:
    large = heads_figure(with_heads(layers=24, count=16))
    assert max(large.get_figwidth(), large.get_figheight()) < 17
    with pytest.raises(BadInput, match=r"inches tall.*fewer classes"):
        heads_figure(with_heads(10, layers=24, count=16, targets=["Bengal"] * 10))


def test_text_that_does_not_fit_is_made_smaller_then_cut() -> None:
    assert fit("short", 2.0, 8) == ("short", 8)
    text, size = fit("a name of a class that goes on and on and on", 1.0, 8)
    assert text.endswith("…")
    assert size == 6
    assert text_width(text) * size <= 72
    assert fit("a$b$", 2.0, 8)[0] == "a$b$", "dollars are no formula"


def test_bars_share_a_power_of_ten() -> None:
    assert tick_labels([0.0, 0.00056, 0.00112]) == (["0", "0.56", "1.12"], "×10⁻³")
    assert tick_labels([1.2e5, 3e4]) == (["1.20", "0.30"], "×10⁵")
    assert tick_labels([-2.5, 0.0, 2.5]) == (["−2.50", "0", "2.50"], "")
    assert tick_labels([0.0]) == (["0"], "")


def test_words() -> None:
    assert [percent(p) for p in (1.0, 0.9996, 0.92, 0.0747, 0.0001, None)] == [
        "100%",
        "99.9%",
        "92%",
        "7.5%",
        "<0.1%",
        "",
    ]
    assert cost_label(Cost(1, 0)) == "1 forward"
    assert cost_label(Cost()) == "no pass"
    assert [guess.name for guess in fake().top_classes(0, 2)] == ["Egyptian Mau", "Bengal"]
    assert len(fake().top_classes(0, 99)) == 4
