"""Functions on methods: smooth, ensemble, every start layer, and the two readings of PLUS."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator

import pytest
import torch

import clairvit as cv
from clairvit.errors import BadInput, NotApplicable, UnknownName
from clairvit.methods.ensembles import starts
from clairvit.methods.explanation import Explanation
from clairvit.methods.spec import resolve_method
from helpers.method_conditions import METHODS, allow_declared_zeros, home_of
from helpers.rounding import assert_same, same
from helpers.tiny_models import pixels, wrapped

TARGET, DEEP, DEPTH = 3, "timm-deep", 5
ONE_TRACE = [name for name, method in METHODS.items() if method.extra_cost.passes is None]
ROLLOUTS = ["rollout", "genatt", "gmar-l1", "grad-rollout", "rollout(residual=0.3)"]


@pytest.fixture(autouse=True)
def _relu_may_leave_nothing() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*its ReLU keeps what speaks for the target")
        allow_declared_zeros()
        yield


@functools.cache
def model_of(kind: str) -> cv.Model:
    return wrapped(kind, torch.float64)


def explained(text: str, kind: str = DEEP, seed: int = 0) -> Explanation:
    return cv.explain(model_of(kind), pixels(kind, dtype=torch.float64), text, target=TARGET, seed=seed)


# PLUS, taken literally: the sum of the rollouts of every sub-network


@pytest.mark.parametrize("name", ROLLOUTS)
@pytest.mark.parametrize(("combinator", "first"), [("plus", 0), ("skipplus", 3), ("from:2", 2), ("from:-1", 4)])
def test_subnetworks_are_the_rollouts_that_start_at_each_layer(name: str, combinator: str, first: int) -> None:
    options = name.partition("(")[2].rstrip(")")
    base = name.partition("(")[0]

    def written(more: str) -> str:
        return f"{base}({','.join(filter(None, [options, more]))})"

    summed = explained(written("plus_mode=subnetwork") + f"+{combinator}")
    each = [explained(written(f"start_layer={m}")).maps for m in range(first, DEPTH)]
    assert_same(summed.maps, torch.stack(each).sum(0))
    assert resolve_method(summed.method).text == summed.method
    if combinator != "from:-1":
        assert not same(summed.maps, explained(f"{base}+{combinator}").maps)


def test_layer_is_the_usual_reading_of_plus() -> None:
    assert resolve_method("genatt(plus_mode=layer)+plus").text == "genatt+plus"


@pytest.mark.parametrize("text", ["ixg(plus_mode=subnetwork)+plus", "raw-attention(plus_mode=subnetwork)+skipplus"])
def test_what_is_no_rollout_has_no_other_reading(text: str) -> None:
    with pytest.raises(NotApplicable, match=r"is no rollout.*Use (ixg\+plus|raw-attention\+skipplus)"):
        resolve_method(text)


@pytest.mark.parametrize("text", ["genatt(plus_mode=subnetwork)", "genatt(plus_mode=layer)+last"])
def test_plus_mode_needs_a_sum_over_layers(text: str) -> None:
    with pytest.raises(UnknownName, match=r"has no option 'plus_mode' here.*Use genatt\(plus_mode=\w+\)\+plus"):
        resolve_method(text)


# Every start layer


@pytest.mark.parametrize("name", ["focusvit", "genatt", "decompx", "ixg", "legrad", "rollout(fusion=max)", "cat"])
def test_every_start_layer_comes_from_one_trace(name: str) -> None:
    texts = starts(name, DEPTH)
    comparison = cv.compare(model_of(DEEP), pixels(DEEP, dtype=torch.float64), texts, target=TARGET)
    spec = resolve_method(name)
    assert (comparison.cost.forwards, comparison.cost.backwards) == (1, int(spec.passes == "backward"))
    assert list(comparison) == texts
    assert len({explanation.maps.sum().item() for explanation in comparison.values()}) == DEPTH


def test_focusvit_start_layers_are_suffix_sums() -> None:
    model, image = model_of(DEEP), pixels(DEEP, dtype=torch.float64)
    comparison = cv.compare(model, image, starts("focusvit", DEPTH), target=TARGET)
    layers = cv.explain(model, image, "focusvit", target=TARGET, layers=True).layers
    assert layers is not None
    for m, explanation in enumerate(comparison.values()):
        assert_same(explanation.maps, layers[m:].sum(0))


def test_start_layers_of_what_has_none() -> None:
    assert starts("genatt+skipplus", 2) == ["genatt+from:0", "genatt+from:1"]
    assert starts("gradcam", 2) == ["gradcam+from:0", "gradcam+from:1"]
    for text in ("saliency", "attention-flow", "rollout(preset=joita)"):
        with pytest.raises(NotApplicable, match="does not start at a layer"):
            starts(text, DEPTH)


# Smooth


@pytest.mark.parametrize("name", ONE_TRACE)
def test_smooth_without_noise_is_the_method(name: str) -> None:
    kind = home_of(name, DEEP, "timm-deep-avg")
    plain, smoothed = explained(name, kind), explained(f"smooth({name},n=2,sigma=0)", kind)
    assert_same(smoothed.maps, plain.maps)
    assert smoothed.signed == plain.signed
    # The scores take a forward too.
    assert (smoothed.cost.forwards, smoothed.cost.backwards) == (1 + 2, 2 * plain.cost.backwards)


def test_smooth_is_the_mean_over_noisy_images() -> None:
    from clairvit.methods.multi_pass import noisy_images

    model, image = model_of(DEEP), pixels(DEEP, dtype=torch.float64)
    noisy = noisy_images(cv.trace(model, image, target=TARGET), 0.2, 7)
    each = [cv.explain(model, noisy(k), "genatt", target=TARGET).maps for k in range(5)]
    explanation = explained(cv.ensembles.smooth("genatt", n=5, sigma=0.2), seed=7)
    assert explanation.method == "smooth(genatt,n=5,sigma=0.2)"
    assert_same(explanation.maps, torch.stack(each).mean(0))
    assert not same(explained(explanation.method, seed=8).maps, explanation.maps)


def test_smooth_agrees_with_smoothgrad() -> None:
    """The one is the other where both average the same thing: input × gradient at the pixels is linear in both."""
    mine = explained("smooth(ixg(level=pixel),n=4)")
    theirs = explained("smoothgrad(base=ixg,n=4)")
    assert_same(mine.maps, theirs.maps)


# Ensembles


def test_an_ensemble_shares_the_passes_of_its_members() -> None:
    explanation = explained(cv.ensembles.ensemble("genatt", "attcat", "rollout"))
    assert explanation.method == "ensemble(genatt,attcat,rollout)"
    assert (explanation.cost.forwards, explanation.cost.backwards) == (1, 1)
    comparison = cv.compare(
        model_of(DEEP), pixels(DEEP, dtype=torch.float64), ["genatt", explanation.method, "decompx"]
    )
    assert (comparison.cost.forwards, comparison.cost.backwards) == (1, 2)


def test_ranks_are_what_scipy_says() -> None:
    from scipy.stats import rankdata

    maps = [explained(name).maps for name in ("genatt", "ixg")]
    expected = sum(torch.from_numpy(rankdata(heatmap.flatten(1).numpy(), axis=1) - 1) / 15 for heatmap in maps) / 2
    assert_same(explained("ensemble(genatt,ixg)").maps.flatten(1), expected)


def test_minmax_scales_image_by_image() -> None:
    maps = [explained(name).maps.flatten(1) for name in ("genatt", "ixg")]
    scaled = [(m - m.amin(1, keepdim=True)) / (m.amax(1, keepdim=True) - m.amin(1, keepdim=True)) for m in maps]
    assert_same(explained("ensemble(genatt,ixg,by=minmax)").maps.flatten(1), (scaled[0] + scaled[1]) / 2)


def test_max_joins_layers_as_layercam_does() -> None:
    texts = ["layercam+layer:1", "layercam+layer:3", "layercam"]
    each = [explained(text).maps.clamp(min=0) for text in texts]
    expected = torch.stack(
        [layer_map / layer_map.amax((1, 2), keepdim=True).clamp(min=1e-30) for layer_map in each]
    ).amax(0)
    assert expected.amax((1, 2)).tolist() == [1, 1]
    assert_same(explained(cv.ensembles.ensemble(*texts, by="max")).maps, expected)


def test_equal_patches_share_their_rank() -> None:
    from clairvit.methods.ensembles import scaled_ranks
    from clairvit.numerics import min_max

    assert scaled_ranks(torch.tensor([[2.0, 1.0, 2.0, 5.0]])).tolist() == [[0.5, 0.0, 0.5, 1.0]]
    assert min_max(torch.ones(1, 3)).tolist() == [[0.0, 0.0, 0.0]]


def test_functions_on_methods_can_be_nested() -> None:
    for text in ("smooth(ensemble(genatt,rollout(fusion=max)),n=2)", "ensemble(smooth(ixg,n=2),raw-attention+plus)"):
        explanation = explained(text)
        assert explanation.method == text
        assert explanation.maps.isfinite().all()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("smooth()", r"was given 0 methods; expected one: smooth\(genatt, n=20\)"),
        ("smooth(genatt,ixg)", r"was given 2 methods; expected one"),
        ("smooth(genatt,m=3)", r"'smooth' has no option 'm'; it has n, sigma"),
        ("smooth(genatt,n=0)", r"n=0 was given; expected 1 or more"),
        ("smooth(genatt,n=many)", r"n=many was given; expected a number"),
        ("smooth(genatt)+plus", r"Put it inside: smooth\(genatt\+plus"),
        ("smooth(smoothgrad)", r"makes many passes itself"),
        ("smooth(gennatt)", r"Did you mean 'genatt'"),
        ("ensemble(genatt)", r"was given 1 methods; expected two or more"),
        ("ensemble(genatt,genatt(fusion=mean))", r"was given 1 methods; expected two or more"),
        ("ensemble(genatt,ixg(fusion=mean))", r"has no option 'fusion'"),
        ("ensemble(genatt,ixg,by=sum)", r"by=sum was given; expected 'rank' or 'minmax' or 'max'"),
        ("ensemble(genatt,ensemble(ixg,cat))", r"another one as member"),
        ("genatt(ixg)", r"'ixg' in 'genatt\(ixg\)' is not an option; expected option=value"),
        ("smooth(genatt", r"parenthesis is never closed"),
    ],
)
def test_mistakes_are_refused_with_a_reason(text: str, message: str) -> None:
    with pytest.raises((BadInput, NotApplicable, UnknownName), match=message):
        explained(text)
