"""Method strings: every combinator, option and preset of every method works or is refused with what to type instead."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import re
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import clairvit as cv
from clairvit._presets import preset_settings
from clairvit.errors import BadInput, ClairError, NotApplicable, UnknownName
from clairvit.methods.explanation import Explanation
from clairvit.methods.registry import COMBINATORS, Requires, preset
from clairvit.methods.registry import METHODS as METHODS_BY_NAME
from clairvit.methods.spec import resolve_method
from helpers.covering import covering_array, method_traits, one_of_each
from helpers.custom_vits import Block, HomeMade, MatmulAttention
from helpers.exact_models import build as exact_model
from helpers.exact_models import images_for
from helpers.method_conditions import METHODS, allow_declared_zeros, fits, home_of, short
from helpers.rounding import assert_same, same
from helpers.tiny_models import ZOO, fresh, pixels, strange, wrapped

TARGET = 3
EVERY = list(METHODS)
LAYERED = [name for name, method in METHODS.items() if method.output != "image"]
MATRICES = [name for name, method in METHODS.items() if method.output == "matrix"]
TYPED = {"from:M": ["from:1", "from:-2"], "layer:K": ["layer:0", "layer:-2"]}  # what stands for a number
COMBINATIONS = [  # those of methods of the whole image are in test_tails.py
    f"{name}+{typed}"
    for name, method in METHODS.items()
    if method.output != "image"
    for listed in method.combinators
    for typed in TYPED.get(listed[1:], [listed[1:]])
]
DEEP, DEEP_AVG = "timm-deep", "timm-deep-avg"  # five layers: an odd number tells ceil from floor
KINDS = [DEEP, "timm-siglip-map", "timm-reg4-gap", "hf-dinov2-registers-sdpa", "home-lucid", "home-sequence-first"]


def combination_traits(text: str) -> tuple[str, str]:
    """Return the method and the combinator."""
    name, _, combinator = text.partition("+")
    return name, combinator


def kinds_of_combination(text: str) -> tuple[str, ...]:
    """Return what a refusal of a combination depends on: what the method gives, how it sums, and the combinator."""
    name, combinator = combination_traits(text)
    return METHODS[name].output, type(METHODS[name].aggregation).__name__, combinator


@pytest.fixture(autouse=True)
def _relu_may_leave_nothing() -> Iterator[None]:
    with warnings.catch_warnings():
        allow_declared_zeros()
        yield


@functools.cache
def model_of(kind: str) -> cv.Model:
    return wrapped(kind, torch.float64)


def image_of(kind: str) -> Tensor:
    return pixels(kind, dtype=torch.float64)


def explained(text: str, kind: str | None = None, **options: Any) -> Explanation:
    is_method = isinstance(text, str) and text.partition("(")[0].partition("+")[0] in METHODS
    kind = kind or (home_of(text, DEEP, DEEP_AVG) if is_method else DEEP)
    return cv.explain(model_of(kind), image_of(kind), text, target=TARGET, **options)


@functools.cache
def explained_once(text: str, kind: str) -> Explanation:
    """Return the explanation that several tests read: of a method with one option, or of the method itself."""
    return explained(text, kind)


# Combinators

# Each model runs every method and every combinator, and each combination is run.
WORKING = covering_array(COMBINATIONS, KINDS, combination_traits, fitting=fits)
WORKING_ON = {kind: [text for text, other in WORKING if other == kind and fits(text, kind)] for kind in KINDS}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_listed_combinations_work(kind: str) -> None:
    for text in WORKING_ON[kind]:
        explanation = cv.explain(model_of(kind), image_of(kind), text, target=TARGET)
        assert explanation.maps.shape == (2, *ZOO[kind].grid), text
        assert explanation.maps.isfinite().all(), text
        assert explanation.method == text, text


SUMS = {"+plus", "+skipplus", "+from:M", "+last", "+layer:K"}
COMBINED_BY = {"matrix": SUMS | {"+rollout", "+flow"}, "tokens": SUMS, "image": SUMS}  # what each kind of map allows


@pytest.mark.parametrize("output", COMBINED_BY)
def test_every_method_has_the_combinators_of_its_output(output: str) -> None:
    methods = [method for method in METHODS.values() if method.output == output]
    assert methods
    for method in methods:
        assert set(method.combinators) == (set() if method.caveats.no_tails else COMBINED_BY[output])


@pytest.mark.parametrize("name", LAYERED)
def test_combinators_pick_and_add_up_what_the_layers_say(name: str) -> None:
    """The layers are the same under each of them; only the sum differs. L = 5, so ceil(L/2) = 3."""
    layers = explained(f"{name}+plus", layers=True).layers
    assert layers.shape == (5, 2, 4, 4)
    expected = {
        "plus": layers.sum(0),
        "skipplus": layers[3:].sum(0),
        "from:0": layers.sum(0),
        "from:2": layers[2:].sum(0),
        "from:-2": layers[3:].sum(0),
        "last": layers[4],
        "layer:0": layers[0],
        "layer:3": layers[3],
        "layer:-5": layers[0],
    }
    for combinator, expected_value in expected.items():
        assert_same(explained(f"{name}+{combinator}").maps, expected_value, label=combinator)


def exact_average() -> nn.Module:
    """One block, patches averaged."""
    return exact_model("avg-no-cls", depth=1)


@pytest.mark.parametrize("name", LAYERED)
def test_skipplus_of_a_single_layer_is_that_layer(name: str) -> None:
    reads_class_token = fits(name, "timm-vit")
    make = (lambda: HomeMade(lambda: Block(MatmulAttention), depth=1)) if reads_class_token else exact_average
    model = cv.wrap(strange(make).double())
    image = image_of("timm-vit") if reads_class_token else images_for(model.module)
    skipped, last = (cv.explain(model, image, f"{name}+{c}", target=TARGET).maps for c in ("skipplus", "last"))
    assert torch.equal(skipped, last)
    assert skipped.isfinite().all()


@pytest.mark.parametrize("name", [name for name in MATRICES if not METHODS[name].signed])
def test_rollout_multiplies_row_normalised_matrices(name: str) -> None:
    """Rows of such a product add up to 1, so what the patches get is positive and leaves something for CLS."""
    maps = explained(f"{name}+rollout").maps
    assert maps.min() >= 0
    assert maps.sum((1, 2)).min() > 0
    assert maps.sum((1, 2)).max() < 1


def test_names_that_are_combinations() -> None:
    for first, second in [
        ("cat", "ixg+plus"),
        ("ixg", "cat+layer:0"),
        ("rollout", "raw-attention+rollout"),
        ("raw-attention", "rollout+last"),
        ("grad-rollout", "genatt+rollout"),
        ("focusvit(m=2)", "focusvit+from:2"),
        ("focusvit(head_weights=uniform)", "genatt+skipplus"),
        ("gradsam(preset=skipplus)", "genatt+plus"),
        ("attcam(relu=false)", "attcam+last"),
        ("legrad(mean=false)", "legrad+plus"),
        ("legrad(preset=official)", "legrad+from:-2"),
    ]:
        assert_same(explained(first).maps, explained(second).maps, label=f"{first}, {second}")


def test_a_combinator_drops_the_relu_and_the_cam_conventions() -> None:
    """SkipPLUS sums signed maps of block inputs over all tokens (METHODS 3)."""
    spec = resolve_method("gradcam+plus")
    assert not spec.relu
    assert dict(spec.options) == {"at": "input", "tokens": "all"}
    assert resolve_method("gradcam").relu
    assert dict(resolve_method("gradcam").options) == {"at": "norm", "tokens": "patch"}
    assert resolve_method("gradcam(relu=true)+plus").relu
    assert explained("gradcam+plus").signed
    assert not explained("gradcam(relu=true)+plus").signed
    assert explained("gradcam(relu=true)+plus").maps.min() >= 0


@pytest.mark.slow
def test_layers_of_an_explanation() -> None:
    for name in EVERY:
        explanation, without = explained(short(name), layers=True), explained(short(name))
        last_block_only = METHODS[name].options.get("at") in ("norm", "output")
        whole_map_only = METHODS[name].output == "image" and name != "tam"
        assert (explanation.layers is None) == (whole_map_only or last_block_only), name
        assert explanation.layers is None or explanation.layers.shape == (5, 2, 4, 4), name
        assert without.layers is None, name
        assert_same(without.maps, explanation.maps, label=name)
    assert explained("gradcam(at=input)", layers=True).layers.shape == (5, 2, 4, 4)
    assert explained("ixg(level=pixel)", layers=True).layers is None


# Combinators that make no sense


def suggestions(message: str) -> list[str]:
    """What a message tells the user to type."""
    return re.findall(r"[\w-]+\+[\w:-]+", message.partition("Use ")[2])


REFUSED = [
    f"{name}+{typed}"
    for name, method in METHODS.items()
    for combinator in COMBINATORS
    if f"+{combinator}" not in method.combinators
    for typed in TYPED.get(combinator, [combinator])
]


def test_images_and_token_maps_cannot_do_everything() -> None:
    assert {"saliency+rollout", "random+last", "center+from:1", "ixg+rollout", "legrad+rollout"} <= set(REFUSED)


@pytest.mark.parametrize("text", one_of_each(REFUSED, kinds_of_combination))
def test_combinators_that_are_not_listed_are_refused_with_what_to_type(text: str) -> None:
    name, _, combinator = text.partition("+")
    with pytest.raises(NotApplicable) as refusal:
        explained(text)
    message = str(refusal.value)
    assert f"'{name}'" in message
    assert f"+{combinator.partition(':')[0]}" in message
    assert "Use " in message
    for suggested in suggestions(message):
        assert explained(suggested).maps.shape == (2, 4, 4), suggested  # advice that can be followed


@pytest.mark.parametrize("text", ["genatt+plus+last", "ixg+from:1+skipplus", "saliency+plus+plus"])
def test_two_combinators_are_refused(text: str) -> None:
    with pytest.raises(BadInput, match=r"has 2 combinators; expected one, such as") as refusal:
        resolve_method(text)
    assert text in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "near"),
    [
        ("genatt+plsu", "Did you mean 'plus'"),
        ("genatt+skip", "Did you mean 'skipplus'"),
        ("genatt+roll-out", "Did you mean 'rollout'"),
        ("genatt+from", "from:M"),
        ("genatt+layer", "layer:K"),
        ("genatt+plus:3", r"\+plus,"),
        ("genatt+xyz", "expected one of"),
        ("saliency+plsu", "Did you mean 'plus'"),
    ],
)
def test_unknown_combinators(text: str, near: str) -> None:
    with pytest.raises(UnknownName, match=near) as refusal:
        resolve_method(text)
    message = str(refusal.value)
    assert f"There is no combinator '+{text.partition('+')[2]}'" in message
    assert all(f"+{combinator}" in message for combinator in COMBINATORS)


@pytest.mark.parametrize("text", ["genatt+from:x", "genatt+layer:", "genatt+layer:last"])
def test_layer_numbers_are_numbers(text: str) -> None:
    with pytest.raises(BadInput, match=r"needs a layer number; expected \+(from|layer):6"):
        resolve_method(text)


OUT_OF_RANGE = [
    f"{name}+{combinator}" for name in LAYERED for combinator in ("layer:5", "layer:-6", "from:5", "from:99")
]


@pytest.mark.parametrize("text", one_of_each(OUT_OF_RANGE, kinds_of_combination))
def test_layers_out_of_range(text: str) -> None:
    number = text.partition(":")[2]
    with pytest.raises(BadInput, match=rf"Layer {number} was asked of a model with 5 layers; expected -5…4"):
        explained(text)


@pytest.mark.parametrize("text", ["raw-attention(layer=5)", "rollout(start_layer=5)", "focusvit(m=9)", "cat(start=-6)"])
def test_layer_options_out_of_range(text: str) -> None:
    with pytest.raises(BadInput, match=r"was asked of a model with 5 layers; expected -5…4"):
        explained(text)


# What can be mistyped


@pytest.mark.parametrize(
    ("text", "near"), [("rolout", "rollout"), ("GenAt", "genatt"), ("attn-lrp", "attnlrp"), ("decomp+plus", "decompx")]
)
def test_unknown_methods(text: str, near: str) -> None:
    with pytest.raises(UnknownName, match=rf"There is no method .*'{near}'.*clairvit methods"):
        resolve_method(text)


def test_unknown_options_are_named_with_those_there_are() -> None:
    for name, method in METHODS.items():
        with pytest.raises(UnknownName, match=rf"'{name}' has no option 'nonsense'") as refusal:
            resolve_method(f"{name}(nonsense=1)")
        listed = str(refusal.value).partition("it has ")[2]
        for option in method.options:
            assert re.search(rf"\b{option}\b", listed), option


@pytest.mark.parametrize(
    ("text", "near"),
    [
        ("rollout(fuson=max)", "fusion"),
        ("rollout(discard=0.5)", "discard_ratio"),
        ("gradcam(token=all)", "tokens"),
        ("gradcam(rlu=false)", "relu"),
        ("focusvit(headweights=uniform)", "head_weights"),
        ("raw-attention(layers=1)", "layer"),
        ("raw-attention(fusions=max)+plus", "fusion"),
    ],
)
def test_unknown_options_offer_the_nearest(text: str, near: str) -> None:
    with pytest.raises(UnknownName, match=rf"Did you mean .*'{near}'"):
        resolve_method(text)


@pytest.mark.parametrize(
    "text", ["raw-attention(layer=1)+plus", "rollout(residual=0.3)+last", "legrad(mean=false)+last"]
)
def test_options_of_the_aggregation_that_a_combinator_replaces(text: str) -> None:
    with pytest.raises(UnknownName, match=r"has no option .* here"):
        resolve_method(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rollout(fusion=maxx)", r"fusion=maxx was given; expected 'mean' or 'max' or 'min' or a number.*'max'"),
        ("rollout(fusion=0.5)", r"fusion=0.5 was given"),
        ("rollout(residual=much)", r"residual=much was given; expected a number"),
        ("rollout(prune=1)+flow", r"prune=1 was given; expected 0 or more and below 1, such as prune=0\.0001\."),
        ("rollout(residual=much,plus_mode=subnetwork)+plus", r"residual=much was given; expected a number"),
        ("rollout(normalise=true)", r"normalise=True was given; expected 'rows' or 'first' or 'none'"),
        ("genatt(normalise=columns)", r"normalise=columns was given; expected 'rows' or 'first' or 'none'\."),
        ("rollout(start_layer=1.5)", r"start_layer=1.5 was given; expected a number"),
        ("gradcam(relu=maybe)", r"relu=maybe was given; expected True or False"),
        ("gradcam(relu=2)", r"relu=2 was given; expected True or False"),
        ("attcam(relu=none)+plus", r"relu=None was given; expected True or False"),
        (
            "grad-rollout(preset=jacobgil,reversed_gradients=1)",
            r"reversed_gradients=1 was given; expected True or False",
        ),
        ("legrad(pool=cls)", r"pool=cls was given; expected 'mean' or 'model'"),
        ("focusvit(m=halb)", r"m=halb was given; expected 'half' or a number.*'half'"),
        ("gradsam(mean=1)", r"mean=1 was given; expected True or False"),
    ],
)
def test_values_that_are_not_allowed(text: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        resolve_method(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("raw-attention(fusion=3)", r"fusion=3 names a head of 3; expected mean, max, min or 0…2"),
        ("rollout(discard_ratio=1)", r"discard_ratio=1 was given; expected 0 or more and below 1 of the entries"),
        ("grad-rollout(discard_ratio=-0.1)", r"discard_ratio=-0.1 was given; expected 0 or more and below 1"),
        ("center(sigma=0)", r"sigma=0 was given; expected more than 0, such as sigma=0.25"),
        ("cat(level=pixel)", r"level=pixel looks before the first layer; layer 4 was asked for. Use level=token"),
        ("ixg(level=pixel)+last", r"level=pixel looks before the first layer; layer 4 was asked for. Use level=token"),
    ],
)
def test_values_that_do_not_fit_the_model(text: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        explained(text)


@pytest.mark.parametrize("text", ["gradcam(layer=0)", "gradcam(at=norm)+plus"])
def test_the_last_norm_is_the_last_blocks(text: str) -> None:
    with pytest.raises(NotApplicable, match=r"at=norm looks at the last block only; layer \d of 5 .* Use at=input"):
        explained(text)


@pytest.mark.parametrize(
    "text", ["", "  ", "(fusion=max)", "rollout(", "rollout)", "roll out", "rollout(a=1)x", "+plus"]
)
def test_strings_that_are_no_methods(text: str) -> None:
    with pytest.raises(BadInput, match=r"is not a method.*; expected NAME, NAME\(option=value\) or NAME\+combinator"):
        resolve_method(text)


@pytest.mark.parametrize("thing", [3, ["rollout"], torch.zeros(2)])
def test_things_that_are_no_strings(thing: Any) -> None:
    with pytest.raises(BadInput, match=r"is not a method; expected NAME"):
        explained(thing)


@pytest.mark.parametrize("text", ["rollout(fusion)", "rollout(max)", "rollout(fusion=max,residual)"])
def test_options_without_a_value(text: str) -> None:
    with pytest.raises(BadInput, match=r"is not an option; expected option=value"):
        resolve_method(text)


@pytest.mark.parametrize("wrong", ["rollout", [], ()])
def test_compare_wants_a_list(wrong: Any) -> None:
    with pytest.raises(BadInput, match=r"expected a list of names such as \['rollout', 'legrad'\]"):
        cv.compare(model_of(DEEP), image_of(DEEP), wrong)


def test_compare_finds_mistakes_before_it_runs_anything() -> None:
    runs: list[int] = []
    model = fresh(DEEP)
    model.module.register_forward_hook(lambda *_: runs.append(1))
    with pytest.raises(UnknownName):
        cv.compare(model, pixels(DEEP), ["rollout", "rolout"])
    assert runs == []


def test_compare_makes_a_method_once() -> None:
    names = ["rollout", "rollout(fusion=mean)", " Rollout "]
    comparison = cv.compare(model_of(DEEP), image_of(DEEP), names, target=TARGET)
    assert list(comparison) == ["rollout"]


# Options


# Where 1 or 0.25 is the default or leaves nothing.
OTHER: dict[str, list[Any]] = {"grid_pool": [2], "max_tokens": [8], "prune": [0.01], "precision": [1e6]}
OTHER |= {"samples": [20], "cells": [2], "top_k": [4], "repeats": [2], "effort": [6], "along": ["legrad"]}
OTHER |= {"references": ["mean", "blur"]}


def alternatives(name: str) -> list[tuple[str, Any]]:
    """Each option of a method with each other value its annotation allows."""
    usual: dict[Any, list[Any]] = {bool: [True, False], int: [1], float: [0.25], type(None): [None]}
    pairs = []
    for option in METHODS[name].option_list:
        values: list[Any] = []
        for kind in option.alternatives:
            values += [kind] if kind not in usual and kind is not str else OTHER.get(option.name) or usual[kind]
        pairs += [(option.name, value) for value in dict.fromkeys(values) if value != option.default]
    return pairs


# level=pixel is before the first layer, and a sum over layers has others too.
OPTIONS = [
    (n, option, v) for n in EVERY for option, v in alternatives(n) if (n, option, v) != ("cat", "level", "pixel")
]
# Options that need another one beside them.
TOGETHER = {(name, "layer"): ("at", "input") for name, method in METHODS.items() if "at" in method.options}


def beside(name: str, option: str) -> dict[str, Any]:
    few = {"samples": 24} if "samples" in METHODS[name].options and option != "samples" else {}
    return few | (dict([TOGETHER[name, option]]) if (name, option) in TOGETHER else {})


def written(name: str, option: str, value: Any) -> str:
    return f"{name}({','.join(f'{key}={v}' for key, v in ({option: value} | beside(name, option)).items())})"


@pytest.mark.parametrize(("name", "option", "value"), OPTIONS)
@pytest.mark.filterwarnings("ignore:.*is the same everywhere")
def test_every_value_of_every_option(name: str, option: str, value: Any) -> None:
    """It works, and by keyword and by its canonical text it is the same spec, which is all that a run reads."""
    text = written(name, option, value)
    spec, explanation = resolve_method(text), explained_once(text, home_of(text, DEEP, DEEP_AVG))
    assert explanation.method == spec.text
    whole_image = METHODS[name].output == "image" and (option, value) == ("level", "pixel")
    assert explanation.maps.shape == ((2, 32, 32) if whole_image else (2, 4, 4))
    assert explanation.maps.isfinite().all()
    assert resolve_method(name, **({option: value} | beside(name, option))) == spec
    assert resolve_method(spec.text) == spec
    assert resolve_method(spec.text).text == spec.text


def test_all_methods_but_the_baselines_have_options_to_try() -> None:
    assert set(EVERY) - {name for name, _, _ in OPTIONS} == {"center", "random"}


def test_defaults_written_out_are_the_method_itself() -> None:
    for name, method in METHODS.items():
        given = method.options
        assert resolve_method(name, **given) == resolve_method(name)
        inside = ", ".join(f"{key} = {value}" for key, value in given.items())
        assert resolve_method(f" {name.upper()} ( {inside} ) ").text == name


def test_canonical_text_of_combinations() -> None:
    for text in COMBINATIONS:
        spec = resolve_method(text)
        assert spec.text == text
        assert resolve_method(spec.text) == spec


def test_canonical_text_does_not_depend_on_how_it_was_typed() -> None:
    for typed in [
        "rollout(fusion=max,discard_ratio=0.5)+skipplus",
        "rollout( discard_ratio = .50 , fusion=max )+skipplus",
        "Rollout(fusion='max',discard_ratio=0.5)+skipplus",
    ]:
        assert resolve_method(typed).text == "rollout(discard_ratio=0.5,fusion=max)+skipplus"
    assert resolve_method("rollout", fusion="max", discard_ratio=0.5).text == "rollout(discard_ratio=0.5,fusion=max)"
    assert (
        resolve_method("rollout(residual=2)").text
        == resolve_method("rollout", residual=2).text
        == "rollout(residual=2.0)"
    )
    assert resolve_method("focusvit(m=3)").text == "focusvit(m=3)"
    assert resolve_method("gradcam(relu=false)").text == "gradcam(relu=False)"


def test_keywords_come_on_top_of_the_string() -> None:
    assert resolve_method("rollout(fusion=max)", fusion="min").text == "rollout(fusion=min)"
    assert torch.equal(explained("rollout(fusion=min)").maps, explained("rollout(fusion=max)", fusion="min").maps)


def test_unknown_keywords_are_unknown_options() -> None:
    with pytest.raises(UnknownName, match=r"'rollout' has no option 'fuson' here.*Did you mean 'fusion'"):
        explained("rollout", fuson="max")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is the same everywhere")
def test_options_change_maps() -> None:
    """Values that are accepted and then forgotten would pass every test above."""
    still = []
    for name, option, value in OPTIONS:
        # Registers tell patches from no-cls; in the small one all of attcam's map speaks against the target.
        kind = {"keys": "timm-dinov2-reg4", "relu": "timm-vit"}.get(option, DEEP)
        kind = kind if fits(name, kind) else DEEP_AVG
        usual = explained_once(short(name) if option != "samples" else name, kind)
        explanation = explained_once(written(name, option, value), kind)
        if METHODS[name].caveats.zero_reason and not usual.maps.any():
            continue  # and says so
        if usual.maps.shape == explanation.maps.shape and same(usual.maps, explanation.maps):
            still.append(written(name, option, value))
    # The tokens do not see the patch embedding's gamma; without gamma or eps there is nothing to leave out inside.
    harmless = {
        *(
            f"{name}({option})"
            for name in ("cp-lrp", "attnlrp", "reslrp")
            for option in ("gamma_conv=0.25", "inside=False")
        ),
    }
    fused_before = {
        "rollout(normalise=none)",
        "alti(normalise=rows)",
        "decompx(bias=cls)",  # what goes to the class token is not on the patches
        *(f"{name}(normalise=first)" for name in ("rollout", "gmar-l1", "gmar-l2", "alti", "attin-residual")),
    }  # rows of mean and weighted mean attention, and ALTI's contributions, add up to 1 anyway
    # Only post-norm blocks have norms in their residual stream (tests/trace/test_inside.py).
    post_norm = {f"{name}(ln={which})" for name in ("attin", "attin-residual") for which in ("attention", "block")}
    post_norm |= {"globenc(ln=none)", "globenc(ln=attention)"}
    # Noise has no two patches alike, few channels make few masks, and on 16 patches every search ends at the same set.
    alike = {"atman(threshold=None)", "vit-cx(samples=20)", "counterfactual(along=legrad)"}
    # The patch embedding is linear, and the middle third of a few layers starts at 1 anyway.
    alike |= {"expected-gradients(level=token,samples=24)", "caap(start=1)"}
    alike |= {"counterfactual(candidates=1)", "counterfactual(effort=6)", "counterfactual(search=map)"}
    assert set(still) - harmless - fused_before - post_norm - alike == set()


def test_a_number_for_each_token_has_no_rows_to_choose() -> None:
    assert "rows" not in METHODS["legrad"].options
    with pytest.raises(UnknownName, match="'legrad' has no option 'rows'"):
        resolve_method("legrad(rows=all)")


# Presets

PRESETS = [(name, preset) for name, method in METHODS.items() for preset in method.presets]


def test_there_are_presets() -> None:
    assert {("rollout", "jacobgil"), ("grad-rollout", "cmi"), ("gmar-l1", "joita"), ("legrad", "official")} <= set(
        PRESETS
    )


@pytest.mark.parametrize(("name", "preset"), PRESETS)
@pytest.mark.filterwarnings("ignore:.*is the same everywhere")
def test_presets_are_their_options(name: str, preset: str) -> None:
    spec = resolve_method(f"{name}(preset={preset})")
    assert (
        spec
        == resolve_method(f"{name}(compat={preset})")
        == resolve_method(name, preset=preset)
        == resolve_method(name, compat=preset)
    )
    settings = METHODS[name].presets[preset]
    if isinstance(settings, Mapping):
        assert spec == resolve_method(name, **settings)
        assert "preset" not in spec.text
    else:
        assert (spec.method, spec.text) == (settings, f"{name}(preset={preset})")
    assert resolve_method(spec.text) == spec
    assert spec.text != name
    explanation = explained(f"{name}(preset={preset})")
    assert explanation.maps.isfinite().all()
    assert torch.equal(explanation.maps, explained(spec.text).maps)
    if (name, preset) != (
        "rollout",
        "skipplus",
    ):  # mean attention has rows that add up to 1
        assert not same(explanation.maps, explained(name).maps)


def test_options_come_on_top_of_a_preset() -> None:
    spec = resolve_method("legrad(preset=official,mean=true)")
    assert spec == resolve_method("legrad(start=-2,mean=true)")
    variant = resolve_method("rollout(preset=jacobgil,discard_ratio=0.3,normalise=rows,protect=cls_cell)")
    assert variant.text == "rollout(discard_ratio=0.3,normalise=rows,preset=jacobgil)"
    assert (
        resolve_method(variant, fusion="max").text
        == "rollout(discard_ratio=0.3,fusion=max,normalise=rows,preset=jacobgil)"
    )
    assert dict(variant.options) == {"fusion": "mean", "discard_ratio": 0.3, "protect": "cls_cell"}


def test_options_of_earlier_versions_name_the_preset_that_has_them() -> None:
    with pytest.raises(
        UnknownName, match=r"^'legrad' takes no formula any more; it is part of legrad\(preset=joita\)\.$"
    ):
        resolve_method("legrad(formula=joita)")
    with pytest.raises(UnknownName, match=r"part of grad-rollout\(preset=jacobgil\) and grad-rollout\(preset=cmi\)\.$"):
        resolve_method("grad-rollout", head_stage="post")
    with pytest.raises(UnknownName, match=r"takes no normalise=columns any more; it is part of rollout\(preset=jacob"):
        resolve_method("rollout(normalise=columns)")
    with pytest.raises(UnknownName, match=r"'genatt' has no option 'alpha': .* For alpha=0\.5 type residual=1\.$"):
        resolve_method("genatt(alpha=0.5)")
    with pytest.raises(UnknownName, match=r"'globenc' has no option 'residual': .*; strength says how often it counts"):
        resolve_method("globenc(residual=1)")
    with pytest.raises(UnknownName, match=r"'gmar-l1' has no option 'heeds' here"):
        resolve_method("gmar-l1(heeds=mean)")


def test_a_variant_that_is_registered_anew_is_the_new_one() -> None:
    before = resolve_method("legrad(preset=joita)")
    with METHODS_BY_NAME.restored():
        preset("legrad", "joita", requires=Requires())(lambda layer: layer.A.mean((1, 2)))
        assert resolve_method("legrad(preset=joita)").method.function is not before.method.function
    assert resolve_method("legrad(preset=joita)") == before


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "rollout(preset=jacobgill)",
            r"'rollout' has no preset 'jacobgill'; it has .*jacobgil, .*Did you mean 'jacobgil'",
        ),
        ("genatt(preset=chefer)", r"'genatt' has no preset 'chefer'; it has none"),
        ("saliency(compat=any)", r"'saliency' has no preset 'any'; it has none"),
    ],
)
def test_unknown_presets(text: str, message: str) -> None:
    with pytest.raises(UnknownName, match=message):
        resolve_method(text)


@pytest.mark.parametrize(("name", "preset"), PRESETS)
@pytest.mark.parametrize("combinator", ["plus", "last", "from:1", "rollout"])
def test_presets_under_a_combinator(name: str, preset: str, combinator: str) -> None:
    """A preset of the layer map can be recombined; one that says how layers are combined cannot, and says so."""
    text = f"{name}(preset={preset})+{combinator}"
    if METHODS[name].output == "image" and combinator != "rollout":
        pixels_named = preset_settings(METHODS[name], preset).get("features") == "superpixels"
        with pytest.raises(BadInput, match="speaks of pixels") if pixels_named else contextlib.nullcontext():
            assert resolve_method(text).on_tails
        return
    if f"+{combinator}" not in [c.replace(":M", ":1") for c in METHODS[name].combinators]:
        with pytest.raises(NotApplicable, match=rf"\+{combinator}"):
            resolve_method(text)
        return
    fields = {field.name for field in dataclasses.fields(resolve_method(f"{name}+{combinator}").aggregation)}
    options = {METHODS[name].option_overrides.aliases.get(key, key) for key in preset_settings(METHODS[name], preset)}
    alone, base = resolve_method(f"{name}(preset={preset})").aggregation, METHODS[name].aggregation
    options |= {key for key, value in vars(alone).items() if value != vars(base)[key]}
    if options <= fields | set(dict(resolve_method(f"{name}(preset={preset})").options)):
        assert explained(text, "timm-reg4-gap").maps.isfinite().all()
        assert resolve_method(resolve_method(text).text) == resolve_method(text)
        return
    with pytest.raises(NotApplicable, match=rf"preset '{preset}'.*'\+{combinator}'.* Use {name}\(preset={preset}\)"):
        resolve_method(text)


# Gradients go back as far as a method reads, and no further


def listed(name: str, combinator: str) -> bool:
    return f"{name}+{combinator}" in COMBINATIONS


# Each method alone with three combinators, each combinator with every kind of method.
ALONE = covering_array(
    LAYERED,
    list(dict.fromkeys(text.partition("+")[2] for text in COMBINATIONS)),
    method_traits,
    least=3,
    fitting=listed,
)


@pytest.mark.parametrize("text", [f"{name}+{combinator}" for name, combinator in ALONE if listed(name, combinator)])
def test_combinations_alone_and_beside_others(text: str) -> None:
    """Alone, the backward stops early; beside ixg it does not."""
    kind = home_of(text, DEEP, DEEP_AVG)
    beside = cv.compare(model_of(kind), image_of(kind), [text, "ixg", "saliency"], target=TARGET)[text].maps
    assert_same(explained(text).maps, beside)


def test_reversed_gradients_reach_the_mirrored_layer() -> None:
    """vit-explain pairs layer 4 with the gradient of layer 0, so the way back must be gone to the end."""
    last, every = (
        explained(f"grad-rollout(preset=jacobgil,discard_ratio=0,start_layer={start})", layers=True).layers
        for start in (4, 0)
    )
    assert len(every) == 5
    assert_same(last[-1], every[4])


def test_focusvit_says_that_its_start_was_not_searched() -> None:
    explanation = explained("focusvit")
    middle = math.ceil(5 / 2)
    note = f"focusvit: m is ceil(L/2) = {middle}; cv.choose(model, images, tune_start=['focusvit']) looks for m*"
    assert explanation.notes == (note,)
    assert explained("focusvit(m=3)").notes == explained("focusvit+skipplus").notes == ()
    assert torch.equal(explained("focusvit(m=3)").maps, explanation.maps)


@pytest.mark.parametrize(
    ("text", "seen", "layer"),
    [
        ("focusvit(m=auto)", "'m=auto'", r"focusvit\(m=6\)"),
        ("legrad(start=auto)", "'start=auto'", r"legrad\(start=6\)"),
        ("genatt+from:auto", r"'\+from:auto'", r"genatt\+from:6"),
    ],
)
def test_a_start_from_a_recipe_needs_one(text: str, seen: str, layer: str) -> None:
    name = text.partition("(")[0].partition("+")[0]
    with pytest.raises(
        BadInput, match=rf"^{seen} reads .*tune_start=\['{name}'\]\)\.save\('recipe.json'\).*type a layer: {layer}"
    ):
        resolve_method(text)


@pytest.mark.parametrize("text", ["rollout(fusion=max)+nonsense", "nonsense(x=1)+plus", "ixg+layer:77"])
def test_every_mistake_is_a_clair_error(text: str) -> None:
    with pytest.raises(ClairError):
        explained(text)
