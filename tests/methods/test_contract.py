"""What every method promises on every kind of model. The sweep reads the registry, so a new method is in it at once."""

from __future__ import annotations

import functools
import inspect
import math
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import clairvit as cv
from clairvit._cost import Cost
from clairvit.errors import BadInput, ClairError, ClairWarning, NotApplicable
from clairvit.methods.explanation import Comparison
from clairvit.methods.spec import resolve_method
from helpers.covering import all_cases, covering_array, method_model_pairs, method_traits, one_of_each
from helpers.custom_vits import CLASSES, Block, HomeMade, MatmulAttention
from helpers.method_conditions import METHODS, allow_declared_zeros, fits, home_of, method_of, short
from helpers.module_fingerprint import differences, fingerprint, surroundings
from helpers.rounding import assert_same, magnified
from helpers.tiny_models import TINY, ZOO, build, double, fresh, growth_of, pixels, strange, wrapped

TARGET = 3
PATCHES = 16  # of the counting model
EVERY = [short(name) for name in METHODS]
# A ReLU at the end of a formula may leave nothing of a random model's map; the signed map is always there.
SIGNED_FORM = [f"{name}(relu=false)" if method_of(name).relu else name for name in EVERY]
CLASS_SPECIFIC = [name for name in SIGNED_FORM if method_of(name).class_specific]
CLASS_AGNOSTIC = [name for name in SIGNED_FORM if name not in CLASS_SPECIFIC]
# The methods of one model's sweep, a covering array; the model with one loop for its blocks is a case of its own.
PAIRS = method_model_pairs(EVERY, TINY)
ON_MODEL = {kind: [name for name, other in PAIRS if other == kind] for kind in TINY}
NO_BLOCK_MODULES = ["home-loop"]  # only what needs no block input works there
WHOLE = [kind for kind in TINY if kind not in NO_BLOCK_MODULES]
# Square, non-square, registers, distillation token, mean, mixed and MAP pooling, explicit, fused, not modules
MAIN = [
    "timm-vit",
    "timm-reg4-gap",
    "timm-dinov2-reg4",
    "timm-deit-distilled-explicit",
    "timm-siglip-map",
    "timm-cait",
    "hf-dinov2-registers-sdpa",
    "open_clip-nonsquare",
    "open_clip-coca",
    "home-lucid",
    "home-sequence-first",
    "home-mean-pool",
]


# Each method on four of them in each precision and with each seed.
MAIN_PAIRS = method_model_pairs(EVERY, MAIN, least=4, seed="main")
ON_MAIN = {kind: [name for name, other in MAIN_PAIRS if other == kind] for kind in MAIN}


def signed(names: list[str]) -> list[str]:
    """Return the methods in their signed form."""
    return [form for name, form in zip(EVERY, SIGNED_FORM, strict=True) if name in names]


@pytest.fixture(autouse=True)
def _relu_may_leave_nothing() -> Iterator[None]:
    with warnings.catch_warnings():
        allow_declared_zeros()
        yield


def compared(
    kind: str, image: Tensor, names: list[str] = EVERY, target: Any = TARGET, seed: int = 0, model: Any = None
) -> Comparison:
    comparison = cv.compare(model or wrapped(kind, image.dtype), image, names, target=target, seed=seed, skip=True)
    if kind not in NO_BLOCK_MODULES:
        assert set(comparison.skipped) == {name for name in names if not fits(name, kind)}
    return comparison


class Sweep:
    """Runs of the model's methods on three images, each with a target of its own; made when they are read.

    Several tests read the same run: the models are inspected once, and each run is made once while tests of one model
    follow each other.
    """

    targets = (3, 4, 6)

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.names = ON_MODEL[kind]
        self.signed_forms = signed(self.names)
        self.model = wrapped(kind)
        self.exact_model, self.exact_images = double(kind, batch=3)
        self.images = self.exact_images.float()
        self.changes: list[str] = []  # of the model and of global state during the run in float32

    @functools.cached_property
    def single(self) -> Comparison:
        """The methods in float32, as they are and in their signed form."""
        before, around = fingerprint(self.model.module), surroundings()
        names = list(dict.fromkeys([*self.names, *self.signed_forms]))
        comparison = compared(self.kind, self.images, names, list(self.targets), model=self.model)
        self.changes = differences(before, fingerprint(self.model.module)) + differences(around, surroundings())
        return comparison

    @functools.cached_property
    def exact(self) -> Comparison:
        """The methods in float64, in their signed form."""
        return self.in_float64(self.exact_images, list(self.targets))

    def in_float64(self, images: Tensor, targets: Any) -> Comparison:
        """Return the maps of the methods for other targets, or for some of the images."""
        return compared(self.kind, images, self.signed_forms, targets, model=self.exact_model)


@pytest.fixture(scope="module", params=TINY)
def sweep(request: pytest.FixtureRequest) -> Sweep:
    """One for each tiny model; tests of one model follow each other."""
    return Sweep(request.param)


def apart(actual: Tensor, expected: Tensor) -> float:
    """The largest difference, in parts of the map's own scale."""
    return float((actual - expected).abs().max() / expected.abs().max().clamp(min=1e-30))


def test_every_method_is_in_the_sweep() -> None:
    assert list(METHODS) == cv.list_methods()


def test_the_main_models_are_tiny() -> None:
    assert set(MAIN) <= set(TINY)


def test_maps_fit_the_grid_and_the_model_stays_bit_identical(sweep: Sweep) -> None:
    """One run of the methods: shapes, types and signs of the maps, and a model that is left as it was.

    Talking heads mix attention after the softmax; there a negative map is right, and is marked as signed. So is a mean
    of scores where there are no probabilities: an embedding's outputs have a sign of their own.
    """
    tiny, explanations = ZOO[sweep.kind], sweep.single
    assert sweep.changes == []
    for name in [name for name in EVERY if name in explanations]:
        explanation = explanations[name]
        assert explanation.maps.shape == (3, *tiny.grid), name
        assert explanation.maps.dtype == torch.float32, name
        assert explanation.maps.isfinite().all(), name
        assert (
            len(explanation)
            == len(explanation.targets)
            == len(explanation.classes)
            == len(explanation.logits)
            == len(explanation.pixels)
            == 3
        ), name
        method = method_of(name)
        if not method.signed or method.relu:
            of_outputs = method.score == "prob" and not tiny.classifier
            if (tiny.sums_to_one and not of_outputs) or method.relu:
                assert explanation.maps.min() >= 0, name
            assert explanation.signed == bool((explanation.maps < 0).any()), name


def test_maps_say_something(sweep: Sweep) -> None:
    """Not constant, and not the same for two images: centre is the only one that looks at neither model nor image."""
    for name in [name for name in SIGNED_FORM if name in sweep.single]:
        maps = sweep.single[name].maps
        if method_of(name).caveats.zero_reason and not maps.flatten(1).any(1).all():
            continue
        assert maps.flatten(1).std(1).min() > 0, name
        for first, second in ((0, 1), (0, 2), (1, 2)):
            assert torch.equal(maps[first], maps[second]) == (name == "center"), name


def test_prefix_tokens_are_cut_off_and_patches_stay_in_order(sweep: Sweep) -> None:
    """One map of each kind against the trace it was read from: a matrix, numbers for tokens, and pixels."""
    kind, tiny, model, image = sweep.kind, ZOO[sweep.kind], sweep.exact_model, sweep.exact_images[:2]
    tr = cv.trace(model, image, target=TARGET)
    comparison = compared(kind, image, ["raw-attention", "ixg", "saliency"], model=model)
    rows = (tr.readout_weights[:, None] @ tr.layers[-1].A.mean(1))[:, 0]  # [B, N]
    assert_same(comparison["raw-attention"].maps, rows[:, tiny.prefix :].reshape(2, *tiny.grid))
    if kind not in NO_BLOCK_MODULES:
        tokens = (tr.layers[0].x * tr.layers[0].dx).sum(-1)
        assert_same(comparison["ixg"].maps, tokens[:, tiny.prefix :].reshape(2, *tiny.grid))
    cells = tr.dpixels.abs().amax(1).unflatten(1, (tiny.grid[0], -1)).unflatten(3, (tiny.grid[1], -1))
    assert_same(comparison["saliency"].maps, cells.mean((2, 4)))


def test_blocks_that_are_no_modules_are_refused_clearly() -> None:
    comparison = compared("home-loop", pixels("home-loop"), [name for name in EVERY if fits(name, "home-loop")])
    assert {"raw-attention", "rollout", "genatt", "gradsam", "focusvit", "saliency", "random"} <= set(comparison)
    assert {"ixg", "cat", "decompx", "attnlrp"} <= set(comparison.skipped)
    for name, why in comparison.skipped.items():
        assert "modules" in why or "nn.Module" in why, name
        with pytest.raises(NotApplicable, match=r"Use|use"):
            cv.explain(wrapped("home-loop"), pixels("home-loop"), name, target=TARGET)


def test_batch_of_three_equals_three_batches_of_one(sweep: Sweep) -> None:
    """Each image with a target of its own, so that a mixed-up row is seen.

    Of each model one of the three images is run alone, the first, second or third in turn; with `--cases=all` each.
    """
    turn = TINY.index(sweep.kind) % len(sweep.targets)
    for row in range(len(sweep.targets)) if all_cases() else [turn]:
        for name, explanation in sweep.in_float64(sweep.exact_images[row : row + 1], sweep.targets[row]).items():
            maps = sweep.exact[name].maps[row]
            unstable = method_of(name).caveats.numerically_unstable
            magnitude = magnified(sweep.single[name].maps[row], maps) if unstable else None
            assert_same(maps, explanation.maps[0], magnitude=magnitude, dtype=torch.float64, label=name)


def test_float64_agrees_with_float32(sweep: Sweep) -> None:
    """Up to float32's rounding. A delicate method divides by sums near zero: its maps differ by more."""
    for name, explanation in sweep.exact.items():
        single = sweep.single[name].maps
        if (
            name != "random" and not method_of(name).caveats.numerically_unstable
        ):  # its noise comes from the image's bits
            assert single.dtype == torch.float32
            assert_same(single, explanation.maps, growth=growth_of(sweep.kind), label=name)


def assert_float32_maps(kind: str, maps_by_method: Comparison) -> None:
    for name, explanation in maps_by_method.items():
        assert explanation.maps.dtype == torch.float32, name
        assert explanation.maps.isfinite().all(), name
        assert explanation.maps.shape == (2, *ZOO[kind].grid), name


@pytest.mark.parametrize("kind", MAIN[::3])
def test_float16_models_give_float32_maps(kind: str) -> None:
    assert_float32_maps(kind, compared(kind, pixels(kind, dtype=torch.float16), ON_MAIN[kind]))


@pytest.mark.parametrize("kind", MAIN)
def test_bfloat16_models_give_float32_maps_that_resemble_those_of_float32(kind: str) -> None:
    """Half precision blurs the numbers of the model, not those of the method."""
    rough = compared(kind, pixels(kind, dtype=torch.bfloat16), signed(ON_MAIN[kind]))
    assert_float32_maps(kind, rough)
    exact = compared(kind, pixels(kind), signed(ON_MAIN[kind]), model=kept(kind))
    for name, explanation in rough.items():
        if name != "random" and not (
            method_of(name).caveats.numerically_unstable or method_of(name).caveats.zero_reason
        ):
            alike = torch.cosine_similarity(explanation.maps.flatten(1), exact[name].maps.flatten(1))
            assert alike.min() > 0.9, name


@pytest.mark.parametrize("kind", MAIN)
def test_same_seed_same_map(kind: str) -> None:
    first, again, other = (
        compared(kind, pixels(kind), ON_MAIN[kind], seed=seed, model=kept(kind)) for seed in (7, 7, 8)
    )
    for name, explanation in first.items():
        assert explanation.seed == 7
        assert torch.equal(explanation.maps, again[name].maps), name
        method = method_of(name)
        draws = method.is_stochastic and "seed" in inspect.signature(method.function).parameters
        assert torch.equal(explanation.maps, other[name].maps) == (not draws), name


def test_the_target_matters_to_class_specific_methods_only(sweep: Sweep) -> None:
    other = sweep.in_float64(sweep.exact_images, [4, 6, 3])
    for name, explanation in sweep.exact.items():
        if name in CLASS_AGNOSTIC:
            assert torch.equal(explanation.maps, other[name].maps), name
        elif not method_of(name).caveats.zero_reason or explanation.maps.any():
            # A rollout of next to nothing is the identity: what is the class's own is far above round-off, and small.
            least = 5e-5 if method_of(name).caveats.weak_class_signal else 1e-3
            assert apart(explanation.maps, other[name].maps) > least, name


@functools.cache
def kept(kind: str) -> cv.Model:
    """Return a model that several tests explain and none changes: it is inspected once."""
    return wrapped(kind)


@pytest.mark.parametrize("name", [name for name in SIGNED_FORM if method_of(name).signed])
def test_signed_methods_have_both_signs(name: str) -> None:
    signs = set[float]()
    for kind in [kind for kind in MAIN if fits(name, kind)]:
        signs.update(cv.explain(kept(kind), pixels(kind), name, target=TARGET).maps.sign().unique().tolist())
        if {-1.0, 1.0} <= signs:
            break  # further models could not change the verdict
    assert {-1.0, 1.0} <= signs or method_of(name).caveats.zero_reason
    assert cv.explain(kept(home_of(name)), pixels("timm-vit"), name, target=TARGET).signed


@pytest.mark.parametrize(
    ("name", "kind"),
    covering_array(EVERY, ["timm-reg4-gap", "timm-siglip-map", "hf-vit-eager"], method_traits, fitting=fits),
)
def test_alone_is_the_same_as_beside_others(kind: str, name: str) -> None:
    """compare shares traces; sharing changes no map."""
    if not fits(name, kind):
        refused(kept(kind), kind, name)
        return
    beside = everything_on(kind)[name]
    alone = cv.explain(*inspected_double(kind), name, target=TARGET)
    assert_same(alone.maps, beside.maps)
    assert (alone.method, alone.targets, alone.signed, alone.notes) == (
        beside.method,
        beside.targets,
        beside.signed,
        beside.notes,
    )


def refused(model: cv.Model, kind: str, name: str) -> None:
    """Where a method declares itself undefined it says so, and what to use."""
    with pytest.raises(NotApplicable, match=r"Use|use"):
        cv.explain(model, pixels(kind), name, target=TARGET)


@functools.cache
def inspected_double(kind: str) -> tuple[cv.Model, Tensor]:
    return double(kind)


@functools.cache
def everything_on(kind: str) -> Comparison:
    return compared(kind, pixels(kind, dtype=torch.float64))


@pytest.mark.parametrize("name", EVERY)
def test_several_targets_of_one_image(name: str) -> None:
    """`targets` gives one map for each, the same as one by one; a class-agnostic method gives one."""
    model, images = inspected_double(home_of(name))
    several = cv.explain(model, images[0], name, targets=[1, 4, None])
    if not method_of(name).class_specific:
        assert several.targets == ("any class",)
        assert_same(several.maps, cv.explain(model, images[0], name, target=4).maps)
        return
    assert len(several) == 3
    for row, target in enumerate([1, 4, None]):
        alone = cv.explain(model, images[0], name, target=target)
        assert_same(several.maps[row], alone.maps[0])
        assert several.targets[row] == alone.targets[0]


# Cost


class Passage(torch.autograd.Function):
    """Counts the images on their way back through a block."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, counter: list[int]) -> Tensor:
        ctx.counter = counter
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.counter.append(len(gradient))
        return gradient, None


class CountingBlock(Block):
    """Each way back from the block's output to its attention goes through the tap once."""

    def __init__(self) -> None:
        super().__init__(MatmulAttention)
        self.back: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        x = Passage.apply(x + self.attention(self.norm(x)), self.back)
        return x + self.mlp(x)


class Counting(HomeMade):
    """Its head reads the class token, or the mean of the patches."""

    def __init__(self, averages: bool = False) -> None:
        super().__init__(CountingBlock)
        self.averages = averages
        self.forwards: list[int] = []

    def forward(self, image: Tensor) -> Tensor:
        x = self.norm(self.through(self.tokens(image)))
        self.forwards.append(len(x))  # at the end: images that differ from the first block on are embedded once
        return self.head(x[:, 1:].mean(1) if self.averages else x[:, 0])

    def spent(self, what: Callable[[], Any], images: int = 2) -> tuple[Any, float, float]:
        """The result of a call, how many forwards it made an image, and backwards (the most any block saw).

        An image a pass, not a call: variants of an image may go through the model together.
        """
        for counter in (self.forwards, *(block.back for block in self.blocks)):
            counter.clear()
        result = what()
        return result, sum(self.forwards) / images, max(sum(block.back) for block in self.blocks) / images


@functools.cache
def counter(averages: bool) -> Counting:
    module = strange(lambda: Counting(averages))
    # The look at the model is made once, not per map, and so is trying out how its tokens are dropped.
    cv.explain(cv.wrap(module), pixels("timm-vit"), "leave-one-out", target=TARGET)
    return module


@pytest.fixture
def counting(request: pytest.FixtureRequest) -> Counting:
    """A model that the test's method is defined for, if it names one."""
    parameters = getattr(request.node, "callspec", None)
    name = parameters.params.get("name") if parameters is not None else None
    return counter(averages=name is not None and home_of(name) == "timm-vit-avg")


ON_CLASS_TOKEN = [name for name in EVERY if fits(name, "timm-vit")]


@pytest.mark.parametrize("name", EVERY)
def test_declared_cost_is_what_is_spent(counting: Counting, name: str) -> None:
    """Scores and targets need one forward whatever the method: noise counts it too."""
    model, declared = cv.wrap(counting), resolve_method(name).cost_for(PATCHES)
    explanation, forwards, backwards = counting.spent(
        lambda: cv.explain(model, pixels("timm-vit"), name, target=TARGET)
    )
    assert declared.backwards == backwards
    assert declared.forwards >= forwards if method_of(name).extra_cost.at_most else declared.forwards == forwards
    assert (explanation.cost.forwards, explanation.cost.backwards) == (math.ceil(forwards), backwards)


@pytest.mark.parametrize("name", EVERY)
def test_each_further_target_costs_a_backward(counting: Counting, name: str) -> None:
    """And a method that makes passes of its own makes them again."""
    model, declared, method_cost = (
        cv.wrap(counting),
        resolve_method(name).cost_for(PATCHES),
        resolve_method(name).own_cost(PATCHES),
    )
    image = pixels("timm-vit")[0]
    explanation, forwards, backwards = counting.spent(
        lambda: cv.explain(model, image, name, targets=[1, 2, 3]), images=1
    )
    most = 1 + 3 * method_cost.forwards
    assert forwards <= most if method_of(name).extra_cost.at_most else forwards == most
    assert backwards == 3 * declared.backwards
    assert (explanation.cost.forwards, explanation.cost.backwards) == (forwards, backwards)


def test_all_methods_together_cost_one_forward_and_one_backward_for_each_rule_table(counting: Counting) -> None:
    """A method that goes back through one block at a time adds a way back through each block, none from the scores."""
    model = cv.wrap(counting)
    exact = [name for name in ON_CLASS_TOKEN if not method_of(name).extra_cost.at_most]
    comparison, forwards, backwards = counting.spent(lambda: cv.compare(model, pixels("timm-vit"), exact, target=1))
    run = [method_of(name) for name in exact]
    tables = {table for method in run for table in method.tables}
    local = any(method.passes == "local" for method in run)
    methods_cost = sum((resolve_method(name).own_cost(PATCHES) for name in exact), Cost())
    assert (forwards, backwards) == (1 + methods_cost.forwards, len(tables) + local + methods_cost.backwards)
    assert (comparison.cost.forwards, comparison.cost.backwards) == (
        1 + methods_cost.forwards,
        len(tables) + methods_cost.backwards,
    )


def test_all_one_trace_methods_together_cost_one_forward(counting: Counting) -> None:
    names = [name for name in ON_CLASS_TOKEN if method_of(name).extra_cost.passes is None]
    _, forwards, backwards = counting.spent(lambda: cv.compare(cv.wrap(counting), pixels("timm-vit"), names, target=1))
    assert (forwards, backwards) == (1, len({t for name in names for t in method_of(name).tables}) + 1)


def test_forward_methods_make_no_graph(counting: Counting) -> None:
    names = [
        name
        for name in ON_CLASS_TOKEN
        if not method_of(name).cost.backwards and method_of(name).extra_cost.passes is None
    ]
    _, forwards, backwards = counting.spent(lambda: cv.compare(cv.wrap(counting), pixels("timm-vit"), names))
    assert (forwards, backwards) == (1, 0)


# Broken models


@functools.cache
def without_head(kind: str) -> cv.Model:
    """A classifier of zeros, as a new head often is; several tests explain it, none changes it."""
    model = fresh(kind)
    heads = [part for part in model.module.modules() if isinstance(part, nn.Linear) and part.out_features == CLASSES]
    assert heads
    for head in heads:
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
    return model


HEADED = [
    "timm-vit",
    "timm-vit-avg",
    "timm-reg4-gap",
    "timm-deit-distilled",
    "timm-siglip-map",
    "timm-cait",
    "hf-vit-sdpa",
    "hf-dinov2-registers-sdpa",
    "torchvision-vit",
    "home-lucid",
    "home-sequence-first",
]


@pytest.mark.parametrize("kind", HEADED)
def test_zero_head_is_still_understood(kind: str) -> None:
    """The scores do not show then which rows are read; the input of the head does."""
    layout = cv.trace(without_head(kind), pixels(kind), target=TARGET).layout
    assert (layout.grid, layout.prefix, layout.pooling) == (ZOO[kind].grid, ZOO[kind].prefix, ZOO[kind].pooling)
    read = dict(layout.read)
    assert sorted(read) == sorted(ZOO[kind].read)
    assert_same([read[row] for row in ZOO[kind].read], list(ZOO[kind].read.values()))


@pytest.mark.parametrize(("name", "kind"), covering_array(EVERY, HEADED, method_traits, fitting=fits))
def test_zero_head_warns_and_gives_no_nan(kind: str, name: str) -> None:
    model = without_head(kind)
    if not fits(name, kind):
        refused(model, kind, name)
        return
    if not method_of(name).class_specific:
        assert cv.explain(model, pixels(kind), name, target=TARGET).maps.std() > 0
        return
    with pytest.warns(ClairWarning, match=rf"{re.escape(name)}.*image 1, image 2") as warned:
        explanation = cv.explain(model, pixels(kind), name, target=TARGET)
    assert explanation.maps.isfinite().all()
    reads_scores = method_of(name).family == "perturbation" or not resolve_method(name).cost.backwards
    why = "whatever is removed" if reads_scores else "no gradient"
    assert any(why in str(warning.message) for warning in warned)
    assert any(why in note for note in explanation.notes)


@functools.cache
def with_broken_weight(kind: str, bad: float) -> cv.Model:
    module = build(kind)
    module.blocks[1].mlp.fc1.weight.data[0, 0] = bad
    return cv.wrap(module)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", one_of_each(EVERY, method_traits))
def test_broken_weights_are_an_error(name: str, bad: float) -> None:
    with pytest.raises(ClairError, match=r"NaN or infinite.*check the weights") as refusal:
        cv.explain(with_broken_weight(home_of(name), bad), pixels("timm-vit"), name, target=TARGET)
    assert "image 1, 2" in str(refusal.value)


class NanGradient(HomeMade):
    """Finite scores, but a derivative of 0/0."""

    def __init__(self) -> None:
        super().__init__(lambda: Block(MatmulAttention))

    def through(self, x: Tensor) -> Tensor:
        x = super().through(x)
        return x + 0 * (x * 0).sqrt()


@pytest.mark.parametrize(
    "name", [n for n in CLASS_SPECIFIC if fits(n, "timm-vit") and resolve_method(n).cost.backwards]
)
def test_nan_gradients_are_an_error(name: str) -> None:
    model = cv.wrap(strange(NanGradient), name="broken")
    with pytest.raises(ClairError, match=r"gave NaN or infinity for image 1, image 2; expected finite numbers"):
        cv.explain(model, pixels("timm-vit"), name, target=TARGET)


@pytest.mark.parametrize("name", one_of_each(EVERY, method_traits))
def test_wrong_number_of_targets_is_refused(name: str) -> None:
    with pytest.raises(BadInput, match="3 targets were given for 2 images"):
        cv.explain(kept(home_of(name)), pixels("timm-vit"), name, target=[1, 2, 3])


# The lists


def test_every_method_is_documented() -> None:
    for name, method in METHODS.items():
        assert len(method.summary) > 20, name
        assert method.paper, name
        assert method.family, name
        assert method.output in ("matrix", "tokens", "image"), name
        assert method.cost.forwards == 1 or method.extra_cost.passes is not None, name
        assert (method.aggregation is None) == (method.output == "image"), name
        assert not method.tables or method.passes == "backward", name
