"""A multiverse: each universe is what cv.evaluate says of its choices; none is counted twice; verdicts; it goes on."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import clairvit as cv
from clairvit.bench.plan import DataConfig, ModelConfig, Plan
from clairvit.bench.store import Store
from clairvit.data.dataset import ImageDataset, as_dataset, masks_on_patches
from clairvit.metrics.registry import resolve_metric
from clairvit.models.model import Model
from clairvit.models.preprocess import preprocess_options
from clairvit.papers.dimensions import Alternative, Dimension, Fit, general_dimensions, problems
from clairvit.papers.multiverse import (
    ClaimMultiverse,
    Multiverse,
    Universe,
    UniverseResult,
    claims_of,
    run_multiverse,
    universes_of,
)
from clairvit.papers.paper import Claim, Measure, MethodEntry, Paper, find_paper, list_papers
from clairvit.papers.setup import ReproductionConfig
from clairvit.plotting.specification_curve import STYLES, Specification, specification_curves
from clairvit.reports.multiverse import multiverse_json, multiverse_tables
from helpers.tiny_models import wrapped

MODEL = wrapped("timm-vit", torch.float64)
COUNT = 7
CLAIM = Claim("A is better than B", "text", (("A", "B"),), ("overlap",))
PAPER = Paper(
    *("toy", "Toy", "no authors", "none", "none", "7", "none"),
    methods=(MethodEntry("A", "ixg"), MethodEntry("B", "rollout")),
    measures=(Measure("overlap", "iou", factor=100), Measure("curve", "deletion(steps=2)")),
    claims=(CLAIM,),
    dimensions=(Dimension("A is", (Alternative("plain"), Alternative("summed", methods={"A": "ixg+plus"}))),),
)


def with_fit(fit: Fit) -> Model:
    return replace(MODEL, preprocess=preprocess_options(fit=fit).applied_to(MODEL.preprocess))


def dataset() -> ImageDataset:
    pictures, masks = [], []
    for seed in range(COUNT):
        generator = np.random.default_rng(seed)
        pictures.append(Image.fromarray(generator.integers(0, 255, (32, 48, 3), dtype=np.uint8)))
        mask = np.zeros((32, 48), dtype=np.uint8)
        mask[3 + seed : 25, 8 + 2 * seed : 33] = 255
        masks.append(mask)
    return as_dataset(pictures, MODEL, masks=masks)


def ran(store: Store, paper: Paper = PAPER, plans: list[Plan] | None = None) -> Multiverse:
    config = ReproductionConfig(paper, ModelConfig("tiny"), DataConfig("folder:here"))
    return run_multiverse(
        config, store, dataset(), with_fit, MODEL, on_plan=[].append if plans is None else plans.append
    )


@pytest.fixture(scope="module")
def multiverse(tmp_path_factory: pytest.TempPathFactory) -> Multiverse:
    return ran(Store.open(tmp_path_factory.mktemp("multiverse") / "store"))


def test_every_universe_is_what_evaluate_says_of_its_choices(multiverse: Multiverse) -> None:
    (claim,) = multiverse.claims
    assert len(claim.results) == 2 * 2 * 2 * 3, "method, picture, resolution, cut"
    for result in claim.results:
        chosen = result.universe.choices
        model = with_fit({"squashed": "squash", "cropped": "crop"}[chosen["picture"]])  # type: ignore[arg-type]
        on_patches = chosen["resolution"] == "patches"
        images = masks_on_patches(dataset(), (4, 4)) if on_patches else dataset()
        upsampling = "nearest" if on_patches else "bilinear"
        metric = f"iou(threshold={chosen['cut at']},upsampling={upsampling})"
        method = {"plain": "ixg", "summed": "ixg+plus"}[chosen["A is"]]
        first, second = cv.evaluate(model, images, [method, "rollout"], [metric], baselines=False).values()
        gaps = (first.values - second.values).numpy()
        assert result.lead == pytest.approx(100 * gaps.mean(), abs=1e-9)
        assert result.effect == pytest.approx(gaps.mean() / gaps.std(ddof=1), abs=1e-9)
        assert result.verdict.endswith("holds") == bool(gaps.mean() > 0)
        assert result.images == COUNT


def test_it_goes_on_in_the_store(tmp_path: Path, multiverse: Multiverse) -> None:
    store, plans = Store.open(tmp_path / "store"), list[Plan]()
    first, again = ran(store, plans=plans), ran(store, plans=plans)
    assert len(plans) == 8, "two pictures by two resolutions, twice"
    assert all(plan.units == () for plan in plans[4:])
    documents = [multiverse_json(result) for result in (first, again, multiverse)]
    assert documents[0] == documents[1] == documents[2]


def test_universes_are_counted_once(multiverse: Multiverse) -> None:
    for paper in (PAPER, *list_papers()):
        for claim in claims_of(paper):
            universes = universes_of(paper, claim, "usual", "crop", masks=True)
            identities = [universe.identity for universe in universes]
            assert len(set(identities)) == len(identities)
            if not universes:  # of an area under the radar, which is no measure
                assert set(claim.measures) == {paper.area}
                continue
            first = universes[0]
            protocol = paper.at_effort("usual", first.measure.metric)
            assert first.metric == resolve_metric(protocol).text, "the paper's protocol comes first"
    joita = find_paper("joita")
    legrad, gmar = claims_of(joita)
    assert (legrad.general, gmar.general) == ("LeGrad is the best by all measures", "GMAR improves on rollout")
    assert len(universes_of(joita, legrad, "usual", "crop", masks=True)) == (2 * 3 + 1) * 2 * 2 * 3 * 2
    assert len(universes_of(joita, gmar, "usual", "crop", masks=True)) == (2 * 3 + 1) * 2 * 2 * 3
    assert universes_of(joita, gmar, "usual", "crop", masks=False) == []


def test_a_protocol_that_cannot_be_is_left_out_and_named(tmp_path: Path) -> None:
    curve = Measure("curve", "deletion(granularity=pixel,removal=black,steps=2)")
    claim = replace(CLAIM, measures=("curve",))
    paper = replace(PAPER, measures=(curve,), claims=(claim,), dimensions=())
    result = ran(Store.open(tmp_path / "store"), paper)
    (left_out, *others) = result.left_out
    assert "removal=token" in left_out
    assert "which takes whole patches" in left_out
    removals = set(result.claims[0].alternatives("removal"))
    assert "black" in removals
    assert "token" not in removals
    assert others or {"blur", "mean"} < removals
    assert not result.failed


def test_verdicts() -> None:
    universe = Universe(CLAIM, {}, None, PAPER.measures[0], "iou", {})  # type: ignore[arg-type]

    def verdict(comparisons: int, true: int, surely: int, surely_not: int) -> str:
        return UniverseResult(universe, 0.0, 0.0, comparisons, true, surely, surely_not, 9).verdict

    assert verdict(3, 3, 3, 0) == "surely holds"
    assert verdict(3, 3, 2, 0) == "holds"
    assert verdict(3, 2, 2, 1) == "in part"
    assert verdict(3, 0, 0, 2) == "turns around"
    assert verdict(3, 0, 0, 3) == "surely turns around"
    assert verdict(0, 0, 0, 0) == "cannot be said"


def test_tables_count_what_the_json_lists(multiverse: Multiverse) -> None:
    summary, choices = multiverse_tables(multiverse)
    document = multiverse_json(multiverse)["claims"][0]
    (row,) = summary.rows
    assert [cell.text for cell in row.cells][:2] == ["A is better than B", "24"]
    assert sum(int(cell.text) for cell in row.cells[2:]) == 24 == sum(document["counts"].values())
    by_choice: dict[str, int] = {}
    for row in choices.rows:
        texts = [cell.text for cell in row.cells]
        assert int(texts[2]) == sum(map(int, texts[3:]))
        by_choice[texts[0]] = by_choice.get(texts[0], 0) + int(texts[2])
    assert by_choice == {"measure": 24, "A is": 24, "picture": 24, "resolution": 24, "cut at": 24}


def test_the_chart_has_a_point_for_each_universe(multiverse: Multiverse) -> None:
    (claim,) = multiverse.claims
    points = [Specification(entry.effect, entry.verdict, entry.universe.choices) for entry in claim.results]
    points.append(Specification(math.inf, "surely holds", points[0].choices))
    figure = specification_curves({"A is better": points}, "Toy")
    curve, *rows = figure.axes
    drawn = [line for line in curve.lines if len(line.get_xdata()) and line.get_linestyle() in ("None", "none", "")]
    assert sum(len(line.get_xdata()) for line in drawn) == 25
    assert len(rows) == 2 + 2 + 2 + 3, "no row for the only measure"
    assert {line.get_color() for line in drawn} <= {colour for colour, _ in STYLES.values()}
    assert all(np.isfinite(line.get_ydata()).all() for line in drawn)


def test_dimensions_are_checked() -> None:
    assert not [problem for entry in general_dimensions() for problem in problems(entry, set())]
    assert problems(Dimension("x"), set()) == [
        "the dimension 'x' has alternatives and option, or neither; expected one of them"
    ]
    assert problems(Dimension("x", option="removal"), set()) == ["the dimension 'x' has an option without values"]
    named = Dimension("x", (Alternative("a", methods={"Z": "ixg"}),))
    assert problems(named, {"A"}) == ["the dimension 'x' names 'Z', which the paper does not have"]


def test_an_empty_multiverse_has_no_tables_of_choices() -> None:
    alone = Multiverse((ClaimMultiverse(CLAIM, ()),))
    assert len(list(multiverse_tables(alone))) == 1
