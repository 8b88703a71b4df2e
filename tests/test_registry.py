"""Names of methods, metrics and models: filters, specs, and methods and metrics of the user's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated, Any

import pytest
import torch
from torch import Tensor

import clairvit as cv
from clairvit.errors import BadInput, UnknownName
from clairvit.methods import registry as methods
from clairvit.methods.aggregation import Product, Total
from clairvit.metrics import registry as metrics
from clairvit.metrics.dataset_context import DatasetContext
from clairvit.option_types import Range
from helpers.rounding import assert_same
from helpers.tiny_models import double, pixels, wrapped

KIND = "timm-vit"


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Forget what a test registers."""
    with methods.METHODS.restored(), metrics.METRICS.restored():
        yield


def test_filters_are_wildcards() -> None:
    assert {"lrp", "attnlrp", "cp-lrp"} <= set(cv.list_methods(filter="*lrp*"))
    assert all("lrp" in name for name in cv.list_methods("*lrp*"))
    assert cv.list_methods("lrp") == ["lrp"], "without a wildcard the name itself, as in timm"
    assert cv.list_methods(["lrp", "roll*"]) == ["rollout", "lrp"]
    assert cv.list_methods("nothing*") == []
    assert cv.list_methods() == [method.name for method in methods.list_methods()]
    assert cv.list_metrics() == [metric.name for metric in metrics.list_metrics()]
    assert cv.list_metrics("*sertion*") == ["insertion", "insertion-deletion"]
    assert set(cv.list_methods(family="attention")) < set(cv.list_methods())
    assert set(cv.list_metrics(family="complexity")) < set(cv.list_metrics())


def test_models_by_name() -> None:
    assert cv.list_models("pets") == ["pets"]
    assert "timm:vit_tiny_patch16_224" in cv.list_models("timm:vit_tiny*")
    assert cv.list_models("timm:vit_tiny_patch16_224") == ["timm:vit_tiny_patch16_224"]
    assert cv.list_models("torchvision:vit_b_1?") == ["torchvision:vit_b_16"]
    with pytest.raises(UnknownName):
        cv.list_models("tim:vit*")


def test_specs_print_their_canonical_text() -> None:
    spec = cv.parse_method("rollout( fusion = max )+skipplus")
    assert str(spec) == spec.text == "rollout(fusion=max)+skipplus"
    assert cv.parse_method(spec) is spec
    assert str(cv.parse_method(spec, fusion="min")) == "rollout(fusion=min)+skipplus"
    metric = cv.parse_metric("deletion(removal=mean)")
    assert str(metric) == metric.text == "deletion(removal=mean)"
    assert cv.parse_metric(metric) is metric
    assert str(cv.parse_metric(metric, removal="black")) == "deletion(removal=black)"
    with pytest.raises(UnknownName, match="Did you mean 'rollout'"):
        cv.parse_method("rolout")


def test_every_verb_takes_specs() -> None:
    model, images = wrapped(KIND), pixels(KIND)
    method, metric = cv.parse_method("genatt+plus"), cv.parse_metric("deletion(steps=2)")
    assert cv.explain(model, images, method, target=1).method == "genatt+plus"
    assert list(cv.compare(model, images, [method, "ixg"], target=1)) == ["genatt+plus", "ixg"]
    assert cv.evaluate(model, images, method, metric, target=1).metric == "deletion(steps=2)"
    both = cv.evaluate(model, images, [method, "ixg"], [metric, "sparseness"], target=1)
    assert ("genatt+plus", "deletion(steps=2)") in both
    assert cv.choose(model, images, [method], [metric], target=1).metrics == ("deletion(steps=2)",)
    assert cv.ensembles.smooth(method, n=2) == "smooth(genatt+plus,n=2)"
    assert cv.ensembles.ensemble(method, "ixg") == "ensemble(genatt+plus,ixg)"


def register(**more: Any) -> None:
    @cv.method("mine", output="matrix", aggregation=Product(residual=1.0), paper="own", **more)
    def mine(layer: cv.extend.LayerView, power: float = 1.0) -> Tensor:
        """mean_h relu(A * G)^power."""
        return (layer.A * layer.G).clamp(min=0).pow(power).mean(1)


def test_a_method_of_the_users_own() -> None:
    register()
    assert cv.list_methods("mi*") == ["mine"]
    assert cv.parse_method("mine").method.family == "custom"
    model, images = wrapped(KIND), pixels(KIND)
    comparison = cv.compare(model, images, ["mine", "mine+skipplus", "mine(power=2)"], target=3)
    assert all(
        explanation.maps.shape[0] == len(images) and bool(explanation.maps.any()) for explanation in comparison.values()
    )
    exact, images = double(KIND)
    assert_same(cv.explain(exact, images, "mine", target=3).maps, cv.explain(exact, images, "genatt", target=3).maps)
    register()  # a notebook cell that is run twice
    assert cv.list_methods("mi*") == ["mine"]


def test_a_built_in_method_is_replaced_only_on_request() -> None:
    def constant(layer: cv.extend.LayerView) -> Tensor:
        return layer.A.mean(1)

    for name in ("rollout", "smooth", "all"):
        with pytest.raises(BadInput, match=rf"There is a built-in method '{name}'.*overwrite=True"):
            cv.method(name, output="matrix", aggregation=Product())(constant)
    assert methods.find_method("rollout").paper != "own"
    cv.method("rollout", output="matrix", aggregation=Product(), paper="own", overwrite=True)(constant)
    assert methods.find_method("rollout").paper == "own"


def test_declarations_that_cannot_work_are_refused() -> None:
    with pytest.raises(BadInput, match="expected an aggregation of layers"):
        cv.method("mine", output="tokens")
    with pytest.raises(BadInput, match="none for 'image'"):
        cv.method("mine", output="image", aggregation=Total())
    with pytest.raises(BadInput, match="'My method' is no name for a method"):
        cv.method("My method", output="image")
    with pytest.raises(BadInput, match="The option 'power' of 'mine' has no default or no annotation"):

        @cv.method("mine", output="tokens", aggregation=Total())
        def mine(layer: cv.extend.LayerView, power=2.0) -> Tensor:  # type: ignore[no-untyped-def]
            return layer.x.norm(dim=-1)

    with pytest.raises(BadInput, match="The option 'power' of 'mine' has no default or no annotation"):

        @cv.metric("mine", better="higher")
        def score(context: cv.extend.EvalContext, power: float) -> Tensor:
            return context.maps.sum((-1, -2))


MISTAKES: dict[str, tuple[Callable[[], object], str]] = {
    "family": (
        lambda: cv.method("mine", output="image", family="my own family"),
        r"family='my own family' was given for 'mine'; expected one of 'attention', .*'custom'",
    ),
    "output": (lambda: cv.method("mine", output="matrices"), r"output='matrices'.*Did you mean 'matrix'"),  # type: ignore[arg-type]
    "class": (
        lambda: cv.method("mine", output="tokens", aggregation=Total),  # type: ignore[arg-type]
        r"expected an aggregation of layers, such as .*Total\(\)",
    ),
    "parameter of a layer": (
        lambda: cv.method("mine", output="tokens", aggregation=Total())(lambda view: view.x.norm(dim=-1)),
        r"has the first parameter 'view'; expected def f\(layer: cv.extend.LayerView",
    ),
    "parameter of an image": (
        lambda: cv.method("mine", output="image")(lambda layer: layer.x),
        r"has the first parameter 'layer'; expected def f\(trace: cv.Trace",
    ),
    "no parameter": (lambda: cv.method("mine", output="image")(lambda: None), "takes no argument; expected def f"),
    "better": (
        lambda: cv.metric("mine", better="up"),  # type: ignore[arg-type]
        r"better='up' was given for 'mine'; expected one of 'higher', 'lower'",
    ),
    "family of a metric": (lambda: cv.metric("mine", better="lower", family="faithful"), "Did you mean 'faithfulness'"),
    "span": (lambda: cv.metric("mine", better="lower", span=(1, 0)), r"span=\(1, 0\).*the lowest and the highest"),
    "needs": (lambda: cv.metric("mine", better="lower", needs=("mask",)), "needs='mask'.*Did you mean 'masks'"),  # type: ignore[arg-type]
    "scope": (lambda: cv.metric("mine", better="lower", scope="all"), "scope='all'.*expected one of 'image', 'set'"),  # type: ignore[arg-type]
    "metric without a parameter": (
        lambda: cv.metric("mine", better="lower")(lambda: None),
        r"takes no argument; expected def f\(context",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_a_registration_is_named(mistake: str) -> None:
    act, message = MISTAKES[mistake]
    with pytest.raises(BadInput, match=message):
        act()
    assert "mine" not in cv.list_methods()
    assert "mine" not in cv.list_metrics()


@pytest.mark.parametrize(
    ("output", "function", "message"),
    [
        ("matrix", lambda layer: layer.A, r"\[2, 3, \d+, 17\]; expected a tensor \[B, rows, N\] per layer"),
        ("matrix", lambda layer: layer.x.norm(dim=-1), r"\[2, 17\]; expected a tensor \[B, rows, N\] per layer"),
        ("tokens", lambda layer: layer.A.mean(1), r"; expected a tensor \[B, N\] per layer"),
        (
            "tokens",
            lambda layer: layer.x.norm(dim=-1)[:, 1:],
            r"\[2, 16\]; expected a number for each of the 17 tokens",
        ),
        ("tokens", lambda layer: [0.0], r"a list; expected a tensor \[B, N\] per layer"),
        ("image", lambda trace: trace.pixels, r"\[2, 3, \d+, \d+\]; expected a tensor \[B, rows, cols\]"),
        ("image", lambda trace: trace.pixels[:1, 0], r"\[1, .*with a map for each of 2 images"),
        ("image", lambda trace: None, r"a NoneType; expected a tensor \[B, rows, cols\]"),
    ],
)
def test_a_map_of_the_wrong_form_is_named_with_its_method(
    output: Any, function: Callable[..., Any], message: str
) -> None:
    cv.method("mine", output=output, aggregation=None if output == "image" else Total())(function)
    model, images = double(KIND)
    with pytest.raises(BadInput, match=rf"The method 'mine' is registered with output='{output}'.*{message}"):
        cv.explain(model, images, "mine", target=1)


def test_nan_of_a_method_of_the_users_own_is_not_blamed_on_the_weights() -> None:
    @cv.method("mine", output="tokens", aggregation=Total())
    def mine(layer: cv.extend.LayerView) -> Tensor:
        return (-layer.x.square().sum(-1)).log()

    model, images = double(KIND)
    with pytest.raises(cv.ClairError, match=r"'mine' gave NaN.*Look at the method's function first") as caught:
        cv.explain(model, images, "mine", target=1)
    assert "weights" not in str(caught.value)


def test_a_metric_of_a_set_may_return_a_tensor() -> None:
    @cv.metric("image-count", better="higher", scope="set")
    def image_count(context: DatasetContext) -> Tensor:
        """Return the number of images, for each method and image."""
        return torch.full((len(context.specs), len(context)), float(len(context)), dtype=torch.float64)

    score = cv.evaluate(wrapped(KIND), pixels(KIND), "ixg", "image-count", target=1)
    assert score.values.tolist() == [float(len(pixels(KIND)))] * len(pixels(KIND))


def test_a_metric_of_the_users_own() -> None:
    @cv.metric("peak", better="higher", span=(0, 1))
    def peak(context: cv.extend.EvalContext, power: float = 1.0) -> Tensor:
        """max |a|^power / sum |a|^power."""
        maps = context.maps.flatten(2).abs() ** power
        return maps.amax(-1) / maps.sum(-1)

    assert cv.list_metrics("pe*") == ["peak"]
    model, images = wrapped(KIND), pixels(KIND)
    score = cv.evaluate(model, images, "ixg", "peak", target=1, power=2.0)
    maps = cv.explain(model, images, "ixg", target=1).maps.double().flatten(1).square()
    assert (score.metric, score.better, score.span) == ("peak(power=2.0)", "higher", (0, 1))
    assert_same(score.values, maps.amax(1) / maps.sum(1))
    assert score.method == "ixg"
    with pytest.raises(BadInput, match="There is a built-in metric 'deletion'"):
        cv.metric("deletion", better="lower")(peak)


def test_ranges_of_own_metrics_are_checked() -> None:
    @cv.metric("power-mean", better="higher")
    def power_mean(context: cv.extend.EvalContext, power: Annotated[float, Range(gt=0, example=2)] = 1.0) -> Tensor:
        return (context.maps.flatten(2).abs() ** power).mean(-1)

    assert dict(cv.parse_metric("power-mean(power=2)").options) == {"power": 2.0}
    with pytest.raises(BadInput, match=r"^power=0 was given; expected more than 0, such as power=2\.$"):
        cv.parse_metric("power-mean", power=0)
