"""Rows: what is declared of each field follows for taking and joining rows, in every class that has rows."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import clairvit as cv
from clairvit._rows import Rows, RowSequence, first, joined, per_row, row_numbers, same, union
from clairvit.cuda.graphs import ClassIndexTarget
from clairvit.data.dataset import ImageDataset, Sample, SampleBatch
from clairvit.errors import BadInput
from clairvit.methods.explanation import Heads, Origin, TextRelevance
from clairvit.methods.intervention import InterventionScores, InterventionSweep
from clairvit.metrics.certificate import Certificate, CertifiedPatches
from clairvit.metrics.check_result import CheckResult, MapCheck
from clairvit.metrics.score import Curve, Score
from clairvit.models.preprocess import Preprocess
from clairvit.models.state_hash import WeightsHash
from clairvit.selection.ridge import Moments
from clairvit.targets.base import ScoreContext, TargetBatch
from helpers.tiny_models import wrapped

COUNT = 4


def numbers(*shape: int) -> Tensor:
    return torch.arange(float(np.prod(shape))).reshape(shape)


def heads() -> Heads:
    return Heads("rollout", numbers(2, 3, COUNT, 2, 2), numbers(2, 3, COUNT, 2, 2), numbers(3, COUNT, 2, 2))


def refinement() -> cv.results.Refinement:
    return cv.results.Refinement(numbers(COUNT, 5), numbers(COUNT, 2, 2))


def target() -> TargetBatch:
    rows = tuple(((row, 1.0),) for row in range(COUNT))
    return TargetBatch(tuple(f"class {row}" for row in range(COUNT)), tuple(range(COUNT)), "logit", rows)


def map_check(name: str) -> MapCheck:
    numbers = (0.5, 0.25, None, None, None, None)
    return MapCheck(name, "cat", "legrad", "score", 1.0, (), *numbers, {"genatt": 0.5}, 1, None, None)


def checks() -> CheckResult:
    return CheckResult(tuple(map_check(f"{row}.jpg") for row in range(COUNT)), cv.results.Cost(12), 3, ("painted",))


def certified_patches(count: int = COUNT) -> CertifiedPatches:
    names = tuple(f"{row}.jpg" for row in range(count))
    certificate = Certificate("keep", "legrad", 0.5, names, (1,) * count, (1, 2, 4), (2, 2), (4, 4), "tiny", "abc")
    targets, held = tuple(f"class {row}" for row in range(count)), tuple(row % 2 == 0 for row in range(count))
    return CertifiedPatches(numbers(count, 2, 2) % 4 == 1, names, targets, certificate, held, targets)


def explanation() -> cv.Explanation:
    logits = numbers(COUNT, 5)
    return cv.Explanation(
        maps=numbers(COUNT, 2, 2),
        method="legrad",
        signed=False,
        targets=tuple(f"class {row}" for row in range(COUNT)),
        classes=(0, 1, None, 3),
        score="logit",
        logits=logits,
        probabilities=(0.5, 0.25, None, 0.125),
        pixels=numbers(COUNT, 3, 4, 4),
        names=tuple(f"{row}.jpg" for row in range(COUNT)),
        model="tiny",
        labels=(),
        preprocess=Preprocess(size=(4, 4)),
        seed=1,
        cost=cv.results.Cost(1, 1, 0.5),
        standard_error=numbers(COUNT, 2, 2),
        chosen=numbers(COUNT, 2, 2) > 7,
        regions=numbers(COUNT, 4, 4) > 20,
        layers=numbers(3, COUNT, 2, 2),
        heads=heads(),
        refinement=refinement(),
        text_relevance=tuple(TextRelevance((f"word {row}",), numbers(1) + row) for row in range(COUNT)),
        notes=("first", "second"),
        weights=WeightsHash("abc"),
        versions={"torch": "2"},
        checked=checks(),
        certified=certified_patches(),
        origin=Origin((None,) * COUNT, tuple(target().take([row]) for row in range(COUNT))),  # type: ignore[arg-type]
    )


def expectation(against: bool = False) -> cv.results.Expectation:
    names = tuple(f"{row}.jpg" for row in range(COUNT))
    shares = (numbers(COUNT) + 1) / 8
    return cv.results.Expectation(
        rows=tuple(range(COUNT)),
        names=names,
        classes=("cat", "dog", "cat", "dog"),
        targets=names,
        answers=("cat", "dog", "dog", "dog"),
        inside=shares,
        net_inside=shares - 1,
        net_outside=shares / 2,
        area=shares / 4,
        patches=torch.arange(COUNT),
        full=numbers(COUNT, 2),
        without_inside=numbers(COUNT, 2) - 1,
        without_outside=numbers(COUNT, 2) - 2,
        random_inside=numbers(COUNT, 3, 2) - 3,
        random_outside=numbers(COUNT, 3, 2) - 4,
        answers_without_inside=("dog",) * COUNT,
        answers_without_outside=("cat",) * COUNT,
        model="tiny",
        method="legrad",
        quantity="probability",
        conditions=(cv.results.Condition("inside", ">=", 0.25),),
        left_out=(("x.jpg", "it has no mask"),),
        notes=("a note",),
        against=expectation() if against else None,
    )


def mistakes() -> cv.results.Mistakes:
    photo = torch.zeros(4, 4, 3, dtype=torch.uint8)
    return cv.results.Mistakes(
        rows=tuple(range(COUNT)),
        names=tuple(f"{row}.jpg" for row in range(COUNT)),
        true=("cat", None, "dog", "cat"),
        predicted=("dog", "cat", "cat", "cat"),
        second=("cat", "dog", "dog", "dog"),
        probabilities=(numbers(COUNT, 2) + 1) / 16,
        true_probabilities=(numbers(COUNT) + 1) / 16,
        ranks=(2, None, 2, 1),
        kinds=("confident and wrong", "between two", "far down", "among many"),
        contrasts=("dog − cat",) * COUNT,
        maps=numbers(COUNT, 2, 2),
        parts=numbers(COUNT, 2, 2) % 4 == 0,
        needed=(1, None, 1, 1),
        random_wins=(0, None, 2, 1),
        differences=numbers(COUNT, 3),
        photos=(photo, photo, None, None),
        sizes=(1, 2),
        model="tiny",
        method="ixg",
        images=9,
        labelled=8,
        wrong=2,
        pairs=(cv.results.ConfusedPair("cat", "dog", 1, 8, 0.0, 0.5),),
        notes=("a note",),
    )


def patch_features(layers: tuple[cv.results.PatchFeatures, ...] = ()) -> cv.results.PatchFeatures:
    return cv.results.PatchFeatures(
        tokens=numbers(COUNT, 2, 2, 3),
        pca=numbers(COUNT, 2, 2, 3),
        explained_variance=numbers(3),
        explained_variance_ratio=numbers(3),
        components=numbers(3, 3),
        mean=numbers(3),
        norms=numbers(COUNT, 2, 2),
        outliers=numbers(COUNT, 2, 2) > 6,
        limits=numbers(2, 3),
        layer=1,
        layer_name="block 1",
        names=tuple(f"{row}.jpg" for row in range(COUNT)),
        model="tiny",
        pixels=numbers(COUNT, 3, 4, 4),
        preprocess=Preprocess(size=(4, 4)),
        layers=layers,
        notes=("a note",),
    )


def score() -> Score:
    values = numbers(COUNT)
    return Score(
        metric="deletion",
        method="legrad",
        values=values,
        better="lower",
        span=(0.0, 1.0),
        degenerate=values > 2,
        names=tuple(f"{row}.jpg" for row in range(COUNT)),
        model="tiny",
        curve=Curve(numbers(3), numbers(COUNT, 3), "prob"),
        notes=("a note",),
        counts=numbers(COUNT, 1, 2),
        cost=cv.results.Cost(3, 0, 1.0),
    )


def score_with_baselines() -> Score:
    return dataclasses.replace(score(), baselines={"random": score(), "center": score()})


def batch() -> SampleBatch:
    return SampleBatch(
        rows=tuple(range(3, 3 + COUNT)),
        names=("a.jpg", "b.jpg", "a.jpg", "c.jpg"),
        pixels=numbers(COUNT, 3, 4, 4),
        masks=numbers(COUNT, 4, 4) > 9,
        void=None,
        lacks_mask=(False, True, True, False),
        labels=("cat", 1, None, 2),
        others=None,
    )


def sweep() -> InterventionSweep:
    titles = tuple(f"class {row}" for row in range(COUNT))
    return InterventionSweep(numbers(COUNT, 3, 2), "head", "zero", titles, "logit", numbers(COUNT), titles, "tiny")


@functools.cache
def tiny() -> cv.Model:
    return wrapped("timm-vit")


def interventions(classes: Any = None) -> InterventionScores:
    names = tuple(f"{row}.jpg" for row in range(COUNT))
    sites = (cv.Site(1), cv.Site(0, head=1))
    return InterventionScores(numbers(COUNT, 5), numbers(COUNT, 5) + 1, sites, names, tiny(), classes, ("a note",))


def index_target() -> ClassIndexTarget:
    return ClassIndexTarget(("a", "b", "c", "d"), (0, 1, 2, 3), "logit", index=torch.arange(COUNT)[:, None])


def moments() -> Moments:
    gram, cross, power = (numbers(*shape).numpy() for shape in ((COUNT, 2, 2), (COUNT, 2), (COUNT,)))
    return Moments(gram, cross, power)


INSTANCES: dict[type[Rows], tuple[Callable[[], Any], ...]] = {
    cv.Explanation: (explanation,),
    Heads: (heads,),
    cv.results.Refinement: (refinement,),
    Origin: (lambda: explanation().origin,),
    CheckResult: (checks,),
    CertifiedPatches: (certified_patches,),
    cv.results.Expectation: (expectation, lambda: expectation(against=True)),
    cv.results.Mistakes: (mistakes,),
    cv.results.PatchFeatures: (patch_features, lambda: patch_features((patch_features(), patch_features()))),
    InterventionSweep: (sweep,),
    InterventionScores: (interventions, lambda: interventions([1, 2, None, "cat"])),
    Score: (score, score_with_baselines),
    Curve: (lambda: score().curve,),
    TargetBatch: (target,),
    ClassIndexTarget: (index_target,),
    ScoreContext: (lambda: ScoreContext(numbers(COUNT, 5), ("cat", "dog")),),
    SampleBatch: (batch,),
    Moments: (moments,),
}
NOT_JOINED = {ImageDataset: "reading is a function of the row"}
CASES = [
    pytest.param(make, id=f"{cls.__name__}-{i}") for cls, makes in INSTANCES.items() for i, make in enumerate(makes)
]


def subclasses(cls: type[Rows]) -> Iterator[type[Rows]]:
    for derived in cls.__subclasses__():
        yield derived
        yield from subclasses(derived)


def assert_equal(value: Any, other: Any, place: str = "x") -> None:
    """Compare dataclasses, tuples, mappings and tensors bit by bit."""
    assert type(value) is type(other), place
    if dataclasses.is_dataclass(value):
        for entry in dataclasses.fields(value):
            assert_equal(getattr(value, entry.name), getattr(other, entry.name), f"{place}.{entry.name}")
    elif isinstance(value, Tensor):
        assert value.dtype == other.dtype, place
        assert torch.equal(value, other), place
    elif isinstance(value, np.ndarray):
        np.testing.assert_array_equal(value, other, place)
    elif isinstance(value, tuple):
        assert len(value) == len(other), place
        for index, pair in enumerate(zip(value, other, strict=True)):
            assert_equal(*pair, f"{place}[{index}]")
    elif isinstance(value, dict):
        assert list(value) == list(other), place
        for key in value:
            assert_equal(value[key], other[key], f"{place}[{key!r}]")
    else:
        assert value == other, place


def test_every_class_with_rows_is_tested() -> None:
    ours = {cls for cls in subclasses(Rows) if cls.__module__.startswith("clairvit.")} - {RowSequence}
    assert ours == {*INSTANCES, *NOT_JOINED}


@pytest.mark.parametrize("cls", [*INSTANCES, *NOT_JOINED], ids=lambda cls: cls.__name__)
def test_no_second_decorator_forgets_the_declarations(cls: type[Rows]) -> None:
    assert all(entry.metadata for entry in dataclasses.fields(cls))  # type: ignore[arg-type]


@pytest.mark.parametrize("make", CASES)
def test_rows_joined_one_by_one_are_the_whole(make: Callable[[], Any]) -> None:
    whole = make()
    assert len(whole) == COUNT
    assert_equal(type(whole).concat(whole.take([row]) for row in range(COUNT)), whole)
    assert_equal(type(whole).concat([whole.take([0]), whole.take([1, 2, 3])]), whole)


@pytest.mark.parametrize("make", CASES)
@pytest.mark.parametrize("order", [[3, 1, 0, 2], [2, 2, 1], [0], []])
def test_taking_twice_is_taking_the_rows_of_rows(make: Callable[[], Any], order: list[int]) -> None:
    whole = make()
    permutation = [2, 0, 3, 1]
    assert_equal(whole.take(permutation).take(order), whole.take([permutation[row] for row in order]))
    assert len(whole.take(order)) == len(order)
    inverse = [permutation.index(row) for row in range(COUNT)]
    assert_equal(whole.take(permutation).take(inverse), whole)


@pytest.mark.parametrize("make", CASES)
def test_taking_takes_every_field_with_a_value_per_row(make: Callable[[], Any]) -> None:
    whole = make()
    for name, rule in type(whole)._rules.items():
        value = getattr(whole.take([1]), name)
        if rule.axis is None:
            assert_equal(value, getattr(whole, name), name)
        elif isinstance(value, Tensor):
            assert_equal(value, getattr(whole, name).narrow(rule.axis, 1, 1), name)


@pytest.mark.parametrize("make", [explanation, patch_features, sweep, checks])
def test_indices_slices_lists_and_masks(make: Callable[[], Any]) -> None:
    whole = make()
    mask = [True, False, False, True]
    for items in ([0, 3], mask, np.array(mask), torch.tensor(mask), torch.tensor([0, 3]), np.array([-4, -1])):
        assert_equal(whole[items], whole.take([0, 3]))
    assert_equal(whole[1:3], whole.take([1, 2]))
    assert_equal(whole[::-1], whole.take([3, 2, 1, 0]))
    singles = [whole[row] for row in (0, 1, 2, -1)]
    for single, iterated in zip(singles, whole, strict=True):
        assert_equal(single, iterated)
    with pytest.raises(IndexError, match=r"Row 4 was asked for; there are 4, counted from 0\."):
        whole[4]
    with pytest.raises(IndexError, match=r"A mask of 2 entries was given for 4 rows; expected one for each\."):
        whole[[True, False]]
    with pytest.raises(TypeError, match="expected an int, a slice, a list of ints or a mask"):
        whole["a.jpg"]
    with pytest.raises(TypeError, match="expected an int, a slice, a list of ints or a mask"):
        whole[1.0]


def test_empty_masks_and_lists_name_no_row() -> None:
    assert row_numbers([], 3) == []
    assert row_numbers([False] * 3, 3) == []
    assert row_numbers(np.int64(-1), 3) == [2]


def test_a_field_that_is_not_declared_is_an_error_when_the_class_is_made() -> None:
    with pytest.raises(TypeError, match=r"Forgetful\.names does not say how rows are taken and joined; expected one"):

        class Forgetful(Rows):
            maps: Tensor = per_row()
            names: tuple[str, ...] = ()

    with pytest.raises(TypeError, match=r"Derived\.index does not say how rows are taken"):

        class Derived(TargetBatch):
            index: int


class Small(RowSequence):
    """Values with all kinds of fields."""

    values: Tensor = per_row()
    model: str = same()
    origin: Tensor = same()
    notes: tuple[str, ...] = union(default=())
    seed: int = first(default=0)
    count: int = joined(sum, default=1)
    extra: Tensor | None = per_row(default=None)
    texts: tuple[str, ...] = per_row(default=())


def small(model: str = "vit", **fields: Any) -> Small:
    return Small(numbers(2, 3), model, torch.ones(2), **fields)


def test_every_kind_of_field_is_joined_as_declared() -> None:
    parts = [small(notes=("b", "a"), seed=5, count=2), small(notes=("a", "c"), seed=6, count=3)]
    whole = Small.concat(parts)
    assert (whole.notes, whole.seed, whole.count, whole.model) == (("b", "a", "c"), 5, 5, "vit")
    assert (whole.extra, whole.texts) == (None, ())


def test_what_one_part_lacks_the_whole_lacks() -> None:
    parts = [small(extra=numbers(2), texts=("x", "y")), small()]
    for order in (parts, parts[::-1]):
        whole = Small.concat(order)
        assert (whole.extra, whole.texts) == (None, ())
    assert Small.concat(parts[:1]).texts == ("x", "y")


def test_parts_that_differ_are_refused() -> None:
    with pytest.raises(BadInput, match=r"Smalls of different model were given to join: 'vit' and 'cnn'; expected one"):
        Small.concat([small(), small("cnn")])
    with pytest.raises(BadInput, match="Smalls of different origin were given to join; expected one"):
        Small.concat([small(), dataclasses.replace(small(), origin=torch.zeros(2))])
    with pytest.raises(BadInput, match="Nothing was given to join; expected at least one Small"):
        Small.concat([])


@pytest.mark.parametrize("make", [explanation, patch_features, sweep, score])
def test_results_of_different_models_are_refused(make: Callable[[], Any]) -> None:
    whole = make()
    with pytest.raises(BadInput):
        type(whole).concat([whole, dataclasses.replace(whole, model="another")])


def test_features_in_another_basis_are_refused() -> None:
    features = patch_features()
    with pytest.raises(BadInput, match="different components"):
        cv.results.PatchFeatures.concat([features, dataclasses.replace(features, components=-features.components)])


def test_a_target_about_no_part_of_the_image_has_an_empty_region() -> None:
    whole = explanation()
    parts = [whole[:1], dataclasses.replace(whole[1:], regions=None)]
    regions = cv.Explanation.concat(parts).regions
    assert regions is not None
    assert torch.equal(regions[:1], whole.regions[:1])  # type: ignore[index]
    assert not regions[1:].any()


def test_the_cost_of_a_batch_counts_once_and_that_of_several_is_added_up() -> None:
    whole = explanation()
    assert cv.Explanation.concat(list(whole)).cost == whole.cost
    other = dataclasses.replace(whole, cost=cv.results.Cost(3, 0, 2.0))
    assert cv.Explanation.concat([whole, other]).cost == cv.results.Cost(3, 1, 2.5)


def test_outputs_of_different_widths_are_padded() -> None:
    whole = explanation()
    wide = cv.Explanation.concat([whole, dataclasses.replace(whole, logits=numbers(COUNT, 7), labels=("a",))])
    assert wide.logits.shape == (2 * COUNT, 7)
    assert wide.logits[:COUNT, 5:].isnan().all()
    assert (wide.labels, wide.classifier, wide.activation) == ((), False, "raw")


def test_origins_of_other_weights_are_not_kept() -> None:
    whole = explanation()
    assert cv.Explanation.concat([whole, dataclasses.replace(whole, weights=WeightsHash("other"))]).origin is None


def test_a_data_set_of_rows_reads_these_rows() -> None:
    dataset = ImageDataset(
        ("a", "b", "c"), lambda row, model: Sample(torch.full((3, 1, 1), float(row))), lambda row: f"hash {row}"
    )
    part = dataset.take([2, 0]).take([1, 0, 1])
    assert part.names == ("a", "c", "a")
    assert [part.content_hash(row) for row in range(3)] == ["hash 0", "hash 2", "hash 0"]
    assert [float(part.read(row, None).pixels[0, 0, 0]) for row in range(3)] == [0, 2, 0]  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="cannot be joined"):
        ImageDataset.concat([dataset, dataset])


def test_images_without_a_mask_are_counted_by_row_not_by_name() -> None:
    assert batch().unmasked == ("b.jpg", "a.jpg")
    assert batch().take([0, 3]).unmasked == ()
