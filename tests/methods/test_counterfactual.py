"""The chosen set flips the answer and has no patch to spare, by the model run by hand; on a linear model it is the
smallest of all sets; the search itself is held to brute force over all sets, and to its budget."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import clairvit as cv
from clairvit.errors import BadInput, ClairWarning, NotApplicable, UnknownName
from clairvit.methods.counterfactual import (
    find_flipping_set,
    greedy_removal,
    prefix_sets,
    restore_spare,
    smallest_prefix,
)
from clairvit.methods.spec import resolve_method
from helpers.linear_patch_model import CLASSES, effects, linear
from helpers.method_conditions import allow_declared_zeros
from helpers.reference_token_dropping import logits_left, logits_without
from helpers.rounding import assert_same
from helpers.tiny_models import ZOO, build, double, pixels, wrapped

KINDS = ["timm-vit", "timm-vit-nonsquare", "timm-vit-avg", "timm-reg4-gap", "timm-eva02"]
SEARCHES = [
    *itertools.product(KINDS, ["counterfactual", "counterfactual(search=map)", "counterfactual(along=legrad)"]),
    # Along the map of a random model it takes luck to flip the answer.
    *itertools.product(["timm-vit", "timm-vit-avg", "timm-eva02"], ["counterfactual(along=legrad,search=map)"]),
]


@pytest.fixture(autouse=True)
def _declared_zeros() -> Iterator[None]:
    with warnings.catch_warnings():
        allow_declared_zeros()
        yield


def margin(logits: Tensor, label: int) -> float:
    """How far a class is above the others."""
    return float(logits[label] - torch.cat([logits[:label], logits[label + 1 :]]).max())


def every_set(patches: int) -> Tensor:
    """bool [2^patches, patches]"""
    numbers = torch.arange(2**patches)
    return (numbers[:, None] >> torch.arange(patches) & 1).bool()


# On models


@pytest.mark.parametrize(("kind", "method"), SEARCHES)
def test_the_set_flips_the_answer_and_has_no_patch_to_spare(kind: str, method: str) -> None:
    """And its map is what the margin gains when a patch is put back, all by the model run by hand."""
    module, images = build(kind).double(), pixels(kind, batch=3, dtype=torch.float64)
    patches = ZOO[kind].grid[0] * ZOO[kind].grid[1]
    explanation = cv.explain(cv.wrap(module, size=ZOO[kind].size), images, method)
    assert explanation.chosen is not None
    flips = 0
    for image, label, chosen, values in zip(
        images, explanation.classes, explanation.chosen, explanation.maps, strict=True
    ):
        gone = chosen.flatten().nonzero()[:, 0].tolist()
        assert torch.equal(values != 0, chosen)
        assert label is not None
        if not gone:
            continue
        flips += 1
        flipped = margin(logits_without(module, image[None], gone, patches), label)
        largest = float(module(image[None]).abs().max())  # of the logits whose differences the map is
        assert flipped <= 0
        for i in gone:
            kept = margin(logits_without(module, image[None], [j for j in gone if j != i], patches), label)
            assert kept > 0, "this patch could be put back"
            assert_same(values.flatten()[i], kept - flipped, magnitude=largest)
    assert flips >= 2


@pytest.mark.parametrize("kind", ["timm-vit", "timm-vit-avg", "timm-reg4-gap"])
def test_greedy_is_at_most_one_patch_from_the_smallest_of_all_sets(kind: str) -> None:
    """Brute force: all smaller sets are tried, by hand. Nothing guarantees this; these models show it."""
    module, images = build(kind).double(), pixels(kind, dtype=torch.float64)
    patches = ZOO[kind].grid[0] * ZOO[kind].grid[1]
    explanation = cv.explain(cv.wrap(module, size=ZOO[kind].size), images, "counterfactual")
    assert explanation.chosen is not None
    for image, label, chosen in zip(images, explanation.classes, explanation.chosen, strict=True):
        assert label is not None
        size = int(chosen.sum())
        assert size > 0
        smallest = next((n for n in range(1, size) if _some_flip(module, image[None], label, patches, n)), size)
        assert size - 1 <= smallest <= size


def _some_flip(module: nn.Module, image: Tensor, label: int, patches: int, count: int) -> bool:
    """Does any set of so many patches flip the answer?"""
    kept = torch.tensor(list(itertools.combinations(range(patches), patches - count)))
    logits = torch.cat([logits_left(module, image, part) for part in kept.split(2048)])
    others = logits.clone()
    others[:, label] = float("-inf")
    return bool((logits[:, label] <= others.amax(1)).any())


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("search", ["greedy", "map"])
def test_of_a_linear_model_it_is_the_smallest_set_that_turns_a_contrast(search: str, seed: int) -> None:
    model, image = linear((3, 5), seed=seed)
    a, b = (int(c) for c in model.module(image)[0].topk(2).indices)
    explanation = cv.explain(model, image, "counterfactual", cv.Contrast(a, b), removal="mean", search=search)
    gains = (effects(model, image, a) - effects(model, image, b)).flatten()
    margins = gains.sum() - every_set(15).double() @ gains
    smallest = int(every_set(15).sum(1)[margins <= 0].min())
    assert explanation.chosen is not None
    assert int(explanation.chosen.sum()) == smallest
    assert f"removing {smallest} of 15 patches puts 'class {b}' above 'class {a}'" in explanation.notes[0]
    assert_same(
        explanation.maps[0].flatten(),
        torch.where(explanation.chosen[0].flatten(), gains, 0),
        magnitude=gains.abs().sum(),
    )


def test_of_a_linear_model_it_is_nearly_the_smallest_set_that_unseats_a_class() -> None:
    """With two rivals greedy may run after the wrong one: never below the optimum, and at it most of the time."""
    right = 0
    for seed in range(12):
        model, image = linear(seed=seed)
        label = int(model.module(image)[0].argmax())
        explanation = cv.explain(model, image, "counterfactual", removal="mean")
        parts = torch.stack([effects(model, image, c).flatten() for c in range(CLASSES)])  # [C, patches]
        logits = (~every_set(16)).double() @ parts.T
        others = logits.clone()
        others[:, label] = float("-inf")
        smallest = int(every_set(16).sum(1)[logits[:, label] <= others.amax(1)].min())
        assert explanation.chosen is not None
        assert int(explanation.chosen.sum()) >= smallest
        right += int(explanation.chosen.sum()) == smallest
    assert right >= 11


def test_painted_patches_flip_the_answer_too() -> None:
    module, images = build("timm-vit").double(), pixels("timm-vit", dtype=torch.float64)
    explanation = cv.explain(cv.wrap(module), images, "counterfactual", removal="mean")
    assert explanation.chosen is not None
    for image, label, chosen in zip(images, explanation.classes, explanation.chosen, strict=True):
        assert chosen.any()
        assert label is not None
        shown = (~chosen).repeat_interleave(8, 0).repeat_interleave(8, 1)
        with torch.no_grad():
            assert margin(module(image[None])[0], label) > 0 >= margin(module(image[None] * shown)[0], label)


def test_the_batch_does_not_matter() -> None:
    model, images = double("timm-vit", batch=3)
    together = cv.explain(model, images, "counterfactual")
    assert together.chosen is not None
    for row in range(3):
        alone = cv.explain(model, images[row : row + 1], "counterfactual")
        assert alone.chosen is not None
        assert torch.equal(alone.chosen[0], together.chosen[row])
        assert alone.notes[0].removeprefix("counterfactual") in together.notes[row]


# Targets and words


def test_the_note_names_the_new_answer() -> None:
    module, image = build("timm-vit").double(), pixels("timm-vit", batch=1, dtype=torch.float64)
    labels = ["ant", "bee", "cat", "dog", "elk", "fox", "gnu"]
    explanation = cv.explain(cv.wrap(module, labels=labels), image, "counterfactual")
    assert explanation.chosen is not None
    gone = explanation.chosen.flatten().nonzero()[:, 0].tolist()
    then = labels[int(logits_without(module, image, gone, 16).argmax())]
    assert explanation.notes == (
        f"counterfactual: removing {len(gone)} of 16 patches turns '{explanation.targets[0]}' into '{then}'",
    )


def test_what_is_not_the_answer_has_nothing_to_flip() -> None:
    image = pixels("timm-vit", batch=1)
    best, second = (int(c) for c in build("timm-vit")(image)[0].topk(2).indices)
    for target in (second, cv.Contrast(second, best)):
        with pytest.warns(ClairWarning, match="zero everywhere: there is nothing to flip"):
            explanation = cv.explain(wrapped("timm-vit"), image, "counterfactual", target)
        assert explanation.chosen is not None
        assert not explanation.chosen.any()
        assert not explanation.maps.any()
        assert f"'class {second}' is not above 'class {best}' to begin with" in explanation.notes[0]
        assert explanation.cost.forwards == 1


def test_an_answer_that_nothing_flips_is_noted() -> None:
    module = build("timm-vit")
    module.head.bias.data[2] += 1000
    with pytest.warns(ClairWarning, match="zero everywhere: .* no set of patches was found"):
        explanation = cv.explain(cv.wrap(module), pixels("timm-vit"), "counterfactual")
    assert explanation.chosen is not None
    assert not explanation.chosen.any()
    assert "no set was found without which 'class 2' falls behind" in explanation.notes[0]
    assert explanation.cost.forwards <= resolve_method("counterfactual").cost_for(16).forwards


def test_a_score_that_never_moves_is_noted() -> None:
    """A head of zeros with a bias: there is an answer, and the image has nothing to do with it."""
    module = build("timm-vit")
    module.head.weight.data.zero_()
    with pytest.warns(ClairWarning, match="stays the same whatever is removed"):
        explanation = cv.explain(cv.wrap(module), pixels("timm-vit"), "counterfactual")
    assert not explanation.maps.any()
    assert explanation.cost.forwards == 1 + 17, "each patch, and all of them"


def test_a_yes_or_no_score_flips_at_zero() -> None:
    module = build("timm-vit").double()
    image = pixels("timm-vit", batch=1, dtype=torch.float64)
    head = nn.Linear(24, 1).double()
    head.weight.data = module.head.weight.data[:1] - module.head.weight.data[1:2]
    head.bias.data.zero_()
    module.head = head
    with torch.no_grad():
        sign = 1.0 if float(module(image)) > 0 else -1.0
        head.weight *= sign
    explanation = cv.explain(cv.wrap(module, activation="sigmoid"), image, "counterfactual")
    assert explanation.chosen is not None
    gone = explanation.chosen.flatten().nonzero()[:, 0].tolist()
    assert gone
    assert float(logits_without(module, image, gone, 16)) <= 0 < float(module(image).detach())
    assert "into 'not class 0'" in explanation.notes[0]


def test_a_function_of_the_users_own_is_refused() -> None:
    with pytest.raises(NotApplicable, match=r"is no answer\. Use a class"):
        cv.explain(wrapped("timm-vit"), pixels("timm-vit"), "counterfactual", lambda scores: scores[:, 1])
    with pytest.raises(NotApplicable, match=r"is no answer\. Use a class"):
        cv.explain(wrapped("timm-vit"), pixels("timm-vit"), "counterfactual", [lambda scores: scores[:, 1], 2])


# Options


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("candidates=0", "candidates=0 was given; expected 1 or more"),
        ("effort=3", "effort=3 was given; expected 4 or more"),
        ("along=counterfactual", "expected another method"),
        ("along=legrat", "no method 'legrat'"),
        ("search=best", "search=best was given; expected 'greedy' or 'map'"),
    ],
)
def test_bad_options_are_refused(option: str, says: str) -> None:
    with pytest.raises(UnknownName if option == "along=legrat" else BadInput, match=says):
        cv.explain(wrapped("timm-vit"), pixels("timm-vit"), f"counterfactual({option})")


def test_a_map_on_another_grid_is_refused() -> None:
    with pytest.raises(NotApplicable, match=r"32 × 32 values and the image 4 × 4 patches.*Use along=leave-one-out"):
        cv.explain(wrapped("timm-vit"), pixels("timm-vit"), "counterfactual(along=saliency(level=pixel))")


@pytest.mark.parametrize("along", ["legrad", "genatt+skipplus", "smoothgrad(n=3)", "leave-one-out(removal=mean)"])
def test_the_passes_of_the_map_are_counted(along: str) -> None:
    """On a target that is not the answer, so that the map's passes are all there are."""
    model, image = wrapped("timm-vit"), pixels("timm-vit", batch=1)
    least = int(model.module(image)[0].argmin())
    explanation = cv.explain(model, image, f"counterfactual(along={along})", least)
    along_cost = resolve_method(along).cost_for(16)
    assert (explanation.cost.forwards, explanation.cost.backwards) == (1 + along_cost.forwards, along_cost.backwards)
    declared = resolve_method(explanation.method).cost_for(16)
    assert (declared.forwards, declared.backwards) == (1 + 20 * 16 + along_cost.forwards, along_cost.backwards)


@pytest.mark.parametrize("effort", [4, 5, 8])
def test_the_budget_is_kept_and_what_it_left_undone_is_noted(effort: int) -> None:
    for kind in ("timm-vit", "timm-cait", "timm-vit-nonsquare"):
        patches = ZOO[kind].grid[0] * ZOO[kind].grid[1]
        explanation = cv.explain(wrapped(kind), pixels(kind), "counterfactual", effort=effort, candidates=2)
        assert explanation.cost.forwards <= 1 + effort * patches
        assert explanation.chosen is not None
        assert explanation.chosen.any()


# The search, on functions of sets


class Fake:
    """Stands for a model: the margin is a function of the set of patches that are gone."""

    def __init__(self, patches: int, says: Callable[[frozenset[int]], float], budget: int = 10_000) -> None:
        self.patches, self.margin, self.budget = patches, says, budget
        self.initial = says(frozenset())
        self.is_minimal = True
        self.seen: list[frozenset[int]] = []

    def __call__(self, gone: Tensor) -> Tensor:
        sets = [frozenset(row.nonzero()[:, 0].tolist()) for row in gone]
        self.budget -= len(sets)
        self.seen += sets
        return torch.tensor([self.margin(patch_set) for patch_set in sets], dtype=torch.float64)

    @property
    def unmoved(self) -> bool:
        return bool(self.seen) and all(self.margin(patch_set) == self.initial for patch_set in self.seen)


def places(gone: Tensor) -> set[int]:
    return set(gone.nonzero()[:, 0].tolist())


def fake(patches: int, says: Callable[[frozenset[int]], float], budget: int = 10_000) -> Any:
    return Fake(patches, says, budget)


def test_the_smallest_prefix_is_found_though_longer_ones_do_not_flip() -> None:
    """Bisection would look at two of four and go on to the right."""
    evaluate = fake(4, lambda gone: -1.0 if len(gone) in (1, 4) else 1.0)
    prefix = smallest_prefix(evaluate, torch.zeros(4, dtype=torch.bool), torch.tensor([0.1, 0.4, 0.2, 0.3]))
    assert prefix is not None
    assert places(prefix[0]) == {1}
    assert smallest_prefix(fake(4, lambda gone: 1.0), torch.zeros(4, dtype=torch.bool), torch.ones(4)) is None


def test_patches_are_put_back_until_none_can_be() -> None:
    """{0, 1} or {2} flip: from all four, those that matter least come back first and together."""

    def says(gone: frozenset[int]) -> float:
        return 1.0 - 2.5 * ({0, 1} <= gone) - 1.5 * (2 in gone) - 0.01 * (3 in gone)

    evaluate = fake(4, says)
    gone, matters = restore_spare(evaluate, torch.ones(4, dtype=torch.bool), says(frozenset(range(4))))
    assert places(gone) in ({0, 1}, {2})
    assert evaluate.is_minimal
    assert matters[gone].min() > 0
    assert not matters[~gone].any()


@pytest.mark.parametrize("search", ["greedy", "map"])
def test_patches_that_do_nothing_one_by_one_may_do_it_together(search: str) -> None:
    """Any one patch is enough for the answer, so that leaving one out changes nothing at all."""
    flipping_set = find_flipping_set(fake(5, lambda gone: -1.0 if len(gone) == 5 else 1.0), search, None, 2)
    assert flipping_set is not None
    assert places(flipping_set[0]) == {0, 1, 2, 3, 4}


def test_equal_patches_are_taken_in_their_order() -> None:
    """Round-off between them must not choose: the same picture would get another set in another batch."""
    evaluate = fake(6, lambda gone: 2.5 - len(gone) - 1e-7 * sum(gone))
    flipping_set = find_flipping_set(evaluate, "greedy", None, 16)
    assert flipping_set is not None
    assert places(flipping_set[0]) == {0, 1, 2}


def test_later_steps_know_better_than_the_first() -> None:
    """Two that work together are found in the second step, though the other one does nothing alone."""

    def says(gone: frozenset[int]) -> float:
        return 3.0 - 0.2 * (0 in gone) - 3 * ({0, 5} <= gone) - 0.1 * sum(i in gone for i in (1, 2, 3, 4))

    gone, margin_then, _ = greedy_removal(fake(6, says), torch.tensor([0.2, 0.1, 0.1, 0.1, 0.1, 0.0]), 16, alone=True)
    assert places(gone) == {0, 5}
    assert_same(margin_then, -0.2, magnitude=3, growth=8)  # eight terms in float64


def test_what_turned_out_to_be_worthless_is_not_tried_again_first() -> None:
    """Patches 1, 2, 4, 5 say the same as 0. Two of them are tried beside 0, then two others, then the useful one."""
    alone = torch.tensor([1.0, 0.9, 0.8, 0.5, 0.7, 0.6])

    def says(gone: frozenset[int]) -> float:
        same = 1.0 if 0 in gone else max((float(alone[i]) for i in (1, 2, 4, 5) if i in gone), default=0.0)
        return 1.4 - same - 0.5 * (3 in gone)

    gone, _, _ = greedy_removal(fake(6, says), alone, 2, alone=True)
    assert places(gone) == {0, 1, 4, 3}
    assert places(greedy_removal(fake(6, says), alone, 2, alone=False)[0]) == {0, 1, 2, 4, 3}, (
        "a map is not kept up to date"
    )


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("search", ["greedy", "map"])
def test_any_function_of_sets_gets_a_set_without_spare_patches(search: str, seed: int) -> None:
    """Not monotone, with pairs that work together: brute force over all sets says what the smallest would be."""
    generator = torch.Generator().manual_seed(seed)
    alone, pairs = torch.randn(8, generator=generator), 0.7 * torch.randn(8, 8, generator=generator).triu(1)

    def says(gone: frozenset[int]) -> float:
        z = torch.tensor([float(i in gone) for i in range(8)])
        return float(1.5 - z @ alone - z @ pairs @ z)

    evaluate = fake(8, says)
    flipping_set = find_flipping_set(evaluate, search, None, 3)
    flips = [size for size in range(9) for s in itertools.combinations(range(8), size) if says(frozenset(s)) <= 0]
    if flipping_set is None:
        assert search == "map" or not flips
        return
    gone, matters = flipping_set
    assert says(frozenset(places(gone))) <= 0
    assert all(says(frozenset(places(gone) - {i})) > 0 for i in places(gone))
    assert flips[0] <= len(places(gone)) <= flips[0] + (1 if search == "greedy" else 3)
    assert torch.equal(matters > 0, gone)


@pytest.mark.parametrize("budget", [32, 40, 60])
def test_the_budget_is_never_overdrawn(budget: int) -> None:
    """From four forwards a patch on there is always a set that flips, if all patches gone do."""
    evaluate = fake(8, lambda gone: 7.5 - len(gone), budget)
    flipping_set = find_flipping_set(evaluate, "greedy", None, 3)
    assert flipping_set is not None
    assert len(places(flipping_set[0])) == 8
    assert evaluate.budget >= 0
    assert len(evaluate.seen) == budget - evaluate.budget


def test_the_first_of_an_order_are_sets_that_grow() -> None:
    assert [sorted(places(patch_set)) for patch_set in prefix_sets([2, 0, 3], 4)] == [[2], [0, 2], [0, 2, 3]]
