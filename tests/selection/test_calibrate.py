"""`cv.calibrate`: the formula by hand, recipes wherever a method string goes, honest scores, resumed runs, refusals."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

import clairvit as cv
import clairvit.methods.calibrated as calibrated_module
import clairvit.selection.calibrate as calibrate_module
from clairvit._progress import on_progress
from clairvit._rng import image_seeds, random_sets
from clairvit.bench.results import combinations, read_scores
from clairvit.bench.run import run_study
from clairvit.bench.store import Store
from clairvit.data.dataset import as_dataset
from clairvit.data.hashing import weights_hash
from clairvit.errors import BadInput, NotApplicable, UnknownName
from clairvit.methods.calibrated import KINDS, PRIOR_METHOD, Calibration, calibrated_spec, scaled_layer_maps, table_of
from clairvit.methods.recipe import read_recipe
from clairvit.methods.runs import CHUNK_SIZE, Question
from clairvit.metrics.registry import METRICS as METRIC_REGISTRY
from clairvit.metrics.registry import resolve_metric
from clairvit.selection.calibrate import (
    KEEP_RATES,
    CalibrationRequest,
    cross_fitted_scores,
    fit_calibration,
    observe,
)
from helpers.rounding import assert_same
from helpers.small_study import study
from helpers.tiny_models import STRANGE, cnn, double, fresh, growth_of, pixels, strange

NAME = "timm-vit"
COUNT, SETS = 9, 3
METRIC = "deletion(steps=3)"
POOLINGS = ["timm-vit", "timm-reg4-gap", "timm-siglip-map", "hf-dinov2-registers-sdpa"]  # CLS, mean, attention pool


@functools.cache
def model_and_images() -> tuple[cv.Model, Tensor]:
    return double(NAME, COUNT)


@functools.cache
def mine() -> cv.Recipe:
    model, images = model_and_images()
    return cv.calibrate(model, images, sets=SETS, metrics=[METRIC])


def a_calibration(model: cv.Model, images: Tensor, seed: int = 0, kinds: tuple[str, ...] = tuple(KINDS)) -> Calibration:
    """Random weights, as if they had been fitted."""
    layers = len(cv.trace(model, images[:1], 0).layers)
    grid = cv.explain(model, images[:1], "ixg", 0).maps.shape[1:]
    generator = np.random.default_rng(seed)
    weights = {kind: tuple(generator.normal(size=layers).tolist()) for kind in kinds}
    size = (images.shape[-2], images.shape[-1])
    return Calibration(weights, model.name, weights_hash(model), size, (grid[0], grid[1]))


@pytest.fixture
def no_calibrations(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has neither fitted nor read a recipe."""
    monkeypatch.setattr(calibrated_module, "_calibrations", {})


def vit_of_any_size() -> nn.Module:
    options: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 2}
    return strange(lambda: VisionTransformer(**options, num_classes=5, dynamic_img_size=True)).double()


# The map --------------------------------------------------------------------------------------------------------------


def layer_maps_by_hand(model: cv.Model, images: Tensor, target: int) -> dict[str, Tensor]:
    """Layer maps [L, B, rows, cols] of each kind, from public methods and from A and G of a trace."""
    named = {kind: f"{kind}+plus" for kind in ("attnlrp", "decompx", "reslrp", "ixg", "genatt", "raw-attention")}
    maps = {}
    for kind, method in named.items():
        layers = cv.explain(model, images, method, target, layers=True).layers
        assert layers is not None
        maps[kind] = layers
    trace = cv.trace(model, images, target)
    grid, prefix = maps["ixg"].shape[2:], trace.layout.prefix
    signed, positive = [], []
    for layer in trace.layers:
        product = layer.A * layer.G  # [B, H, N, N]
        signed.append((trace.readout_weights[:, None] @ product.mean(1))[:, 0, prefix:])
        positive.append(product.clamp(min=0).mean((1, 2))[:, prefix:])
    maps["attention-gradient"] = torch.stack(signed).reshape(len(signed), -1, *grid)
    maps["gradsam"] = torch.stack(positive).reshape(len(signed), -1, *grid)
    products = [cv.explain(model, images, f"genatt(start_layer={m})", target).maps for m in range(len(signed))]
    maps["genatt-product"] = torch.stack(products)
    return maps


@pytest.mark.parametrize("name", POOLINGS)
def test_the_map_is_the_weighted_sum_of_scaled_layer_maps(name: str) -> None:
    """Σ_kind Σ_layer w M / ‖Σ_layer M‖, image by image, with loops; rows are those that the head reads."""
    model, images = double(name, 2)
    calibration = a_calibration(model, images)
    layer_maps = layer_maps_by_hand(model, images, 3)
    assert set(layer_maps) == set(KINDS)
    expected = torch.zeros_like(layer_maps["ixg"][0])
    for kind, weights in calibration.weights.items():
        for image in range(2):
            norm = layer_maps[kind][:, image].sum(0).square().sum().sqrt()
            for layer, weight in enumerate(weights):
                expected[image] += weight * layer_maps[kind][layer, image] / norm
    maps = cv.explain(model, images, calibrated_spec(calibration), 3).maps
    assert_same(maps, expected, growth=growth_of(name), magnitude=float(len(KINDS) * expected.abs().max()))


def test_layers_that_are_visited_together_give_the_same_map(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the executor stacks layers."""
    model, images = model_and_images()
    spec = calibrated_spec(a_calibration(model, images))
    one_by_one = cv.explain(model, images[:2], spec).maps
    monkeypatch.setattr("clairvit.cuda.layers.is_launch_bound", lambda trace: True)
    monkeypatch.setattr("clairvit.cuda.layers.STACKED_SHARE", 1e9)
    together = cv.explain(model, images[:2], spec).maps
    assert_same(together, one_by_one, growth=growth_of(NAME), magnitude=len(KINDS) * float(one_by_one.abs().max()))


def test_weights_of_the_prior_are_attnlrp_plus_up_to_scale() -> None:
    model, images = model_and_images()
    layers = len(cv.trace(model, images[:1], 0).layers)
    prior = replace(a_calibration(model, images), weights={"attnlrp": (1.0,) * layers})
    maps = cv.explain(model, images, calibrated_spec(prior)).maps
    expected = cv.explain(model, images, PRIOR_METHOD).maps
    scaled = expected / expected.flatten(1).norm(dim=1)[:, None, None]
    assert_same(maps, scaled, growth=float(expected[0].numel() * layers))


def test_a_kind_of_zeros_stays_zero() -> None:
    assert not scaled_layer_maps([torch.zeros(2, 3, 3), torch.zeros(2, 3, 3)], 1).any()


def test_the_cost_is_one_forward_and_a_backward_per_table() -> None:
    model, images = model_and_images()
    assert {table_of(kind) for kind in KINDS} == {"attnlrp", "linear", "reslrp", "plain", None}
    explanation = cv.explain(model, images[:1], calibrated_spec(a_calibration(model, images)))
    assert (explanation.cost.forwards, explanation.cost.backwards) == (1, 4)
    few = calibrated_spec(a_calibration(model, images, kinds=("genatt", "raw-attention", "gradsam")))
    assert (few.cost.forwards, few.cost.backwards) == (1, 1)


# The data and the fit -------------------------------------------------------------------------------------------------


def request(seed: int = 0, sets: int = SETS) -> CalibrationRequest:
    model, images = model_and_images()
    return CalibrationRequest(Question.of_dataset(model, images, seed=seed), sets=sets)


def test_observations_are_sums_over_random_sets_and_the_probability_with_them() -> None:
    model, images = model_and_images()
    data = observe(request(seed=5))
    patches = data.setup.grid[0] * data.setup.grid[1]
    counts = [max(1, round(rate * patches)) for rate in KEEP_RATES]
    assert data.rates.tolist() == [k for k in range(len(counts)) for _ in range(SETS)]
    maps = layer_maps_by_hand(model, images[:1], int(model.logits(images[:1]).argmax()))
    keep = torch.cat(
        [
            random_sets(image_seeds(images[:1], 5), SETS, patches, count, "calibrate/token sets", k)[0]
            for k, count in enumerate(counts)
        ]
    )
    assert keep.sum(1).tolist() == [count for count in counts for _ in range(SETS)]
    stacked = scaled_layer_maps([layer for kind in data.setup.kinds for layer in maps[kind]], len(data.setup.kinds))
    expected = keep.double() @ stacked.flatten(0, 1)[:, 0].T  # [S, F]
    assert_same(data.sums[0], expected, growth=growth_of(NAME), magnitude=float(stacked.abs().max()) * patches)
    for row in range(0, len(keep), 5):
        assert_same(data.scores[0][row], probability_of_kept(model, images[:1], keep[row]), growth=growth_of(NAME))


def probability_of_kept(model: cv.Model, image: Tensor, keep: Tensor) -> float:
    """The probability of the predicted class, with timm's own parts run on the tokens that are left."""
    module: Any = model.module
    with torch.no_grad():
        tokens = module.norm_pre(module._pos_embed(module.patch_embed(image)))
        prefix = tokens.shape[1] - len(keep)
        left = tokens[:, torch.cat([torch.ones(prefix, dtype=torch.bool), keep])]
        logits = module.forward_head(module.norm(module.blocks(left)))
        return float(logits.softmax(1)[0, model.logits(image).argmax()])


def test_the_recipe_says_what_was_measured() -> None:
    recipe = mine()
    assert recipe.images == COUNT
    assert recipe.method.startswith("calibrated#")
    assert recipe.settings["scores"] == "cross-fitted"
    assert recipe.settings["data"] != cv.calibrate(*_without_first(), sets=SETS, metrics=[METRIC]).settings["data"]
    assert [row["metric"] for row in recipe.ranking] == [METRIC, "correlation on held-out token sets"]
    row = recipe.ranking[0]
    assert row["better"] == "lower"
    assert abs(row["gain"] - (row[PRIOR_METHOD] - row["calibrated"])) < 1e-12, "less is better: turned"
    assert recipe.clear == (row["gain_interval"][0] > 0)
    assert ("is significant" in recipe.answer[0]) == recipe.clear
    assert (f"use {PRIOR_METHOD}" in recipe.answer[0]) != recipe.clear


def _without_first() -> tuple[cv.Model, Tensor]:
    model, images = model_and_images()
    return model, images[1:]


def test_scores_are_of_weights_that_were_fitted_without_the_image() -> None:
    model, images = model_and_images()
    calibration_request = request()
    fitted = fit_calibration(calibration_request)
    assert fitted.rows == tuple(range(COUNT))
    scores = cross_fitted_scores(calibration_request, fitted, [resolve_metric(METRIC)])[METRIC]
    assert scores.names == as_dataset(images, model).names
    for rows, part in fitted.parts:
        for row in rows:
            alone = cv.evaluate(model, images[row : row + 1], str(calibrated_spec(part)), METRIC)
            assert_same(scores.values[row], alone.values[0], growth=growth_of(NAME))
    same = next(row["calibrated"] for row in mine().ranking if row["metric"] == METRIC)
    assert abs(same - scores.mean) < 1e-12


def test_data_of_an_image_do_not_reach_its_own_weights() -> None:
    """Another image in its place changes the weights of all parts but its own."""
    model, images = model_and_images()
    first = fit_calibration(request())
    changed = images.clone()
    changed[4] = pixels(NAME, 1, seed=99, dtype=torch.float64)[0]
    second = fit_calibration(CalibrationRequest(Question.of_dataset(model, changed), sets=SETS))
    for (rows, before), (_, after) in zip(first.parts, second.parts, strict=True):
        assert (before == after) == (4 in rows)


def test_one_backward_is_enough_with_backwards_1() -> None:
    model, images = model_and_images()
    recipe = cv.calibrate(model, images, sets=SETS, metrics=[METRIC], backwards=1)
    assert recipe.spec.backwards == 1
    assert cv.explain(model, images[:1], recipe).cost.backwards == 1


def test_other_seeds_give_other_sets_and_the_same_seed_the_same_recipe() -> None:
    model, images = model_and_images()
    assert cv.calibrate(model, images, sets=SETS, metrics=[METRIC]) == mine()
    assert cv.calibrate(model, images, sets=SETS, metrics=[METRIC], seed=1).method != mine().method


# Recipes wherever a method string goes --------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_calibrations")
def test_a_recipe_survives_its_file(tmp_path: Path) -> None:
    model, images = model_and_images()
    before = cv.explain(model, images[:2], mine()).maps
    file = mine().save(tmp_path / "my recipe, (1)+.json")
    calibrated_module._calibrations.clear()
    assert read_recipe(file) == mine()
    calibrated_module._calibrations.clear()
    explanation = cv.explain(model, images[:2], str(file))
    assert torch.equal(explanation.maps, before)
    assert explanation.method == cv.parse_method(str(file)).text
    spec = cv.parse_method(str(file))
    assert spec.text == f"{file}#{mine().method.partition('#')[2]}"
    calibrated_module._calibrations.clear()
    assert torch.equal(cv.explain(model, images[:2], spec.text).maps, before), "the text alone, in another process"


@pytest.mark.usefixtures("no_calibrations")
def test_a_hash_means_one_map_for_ever(tmp_path: Path) -> None:
    file = mine().save(tmp_path / "mine.json")
    text = cv.parse_method(str(file)).text
    document = json.loads(file.read_text())
    document["calibration"]["weights"]["attnlrp"][0] += 1
    other = Calibration.from_document(document["calibration"], "mine.json")
    document["method"] = f"calibrated#{other.hash}"
    file.write_text(json.dumps(document))
    assert cv.parse_method(str(file)).text != text
    calibrated_module._calibrations.clear()
    with pytest.raises(BadInput, match="holds the weights"):
        cv.parse_method(text)
    with pytest.raises(UnknownName, match="neither fitted nor read"):
        cv.parse_method(mine().method)
    for typed in ("recipe", "calibrated", "recipe(ixg)"):
        with pytest.raises(UnknownName):
            cv.parse_method(typed)
    with pytest.raises(UnknownName, match="takes no options"):
        cv.parse_method(str(file), fusion="max")


@pytest.mark.usefixtures("no_calibrations")
@pytest.mark.parametrize("forgotten", [False, True], ids=["original was read", "in another process"])
def test_a_recipe_that_was_edited_by_hand_is_refused(tmp_path: Path, forgotten: bool) -> None:
    """Whether or not this process knows the weights that its method names."""
    file = mine().save(tmp_path / "mine.json")
    read_recipe(file)
    document = json.loads(file.read_text())
    document["calibration"]["weights"]["attnlrp"][0] += 1
    file.write_text(json.dumps(document))
    if forgotten:
        calibrated_module._calibrations.clear()
    model, images = model_and_images()
    hash_ = mine().method.partition("#")[2]
    for run in (
        lambda: read_recipe(file),
        lambda: cv.explain(model, images[:1], str(file)),
        lambda: cv.explain(model, images[:1], recipe=file),
    ):
        with pytest.raises(BadInput, match=rf"names the weights {hash_} and holds \w{{12}}: it was changed after"):
            run()


def test_a_recipe_of_choose_is_its_method(tmp_path: Path) -> None:
    file = cv.Recipe(method="genatt+skipplus", model="pets", weights="").save(tmp_path / "chosen.json")
    assert cv.parse_method(str(file)).text == "genatt+skipplus"


def test_every_verb_takes_it(tmp_path: Path) -> None:
    model, images = model_and_images()
    text = cv.parse_method(str(mine().save(tmp_path / "mine.json"))).text
    maps = cv.explain(model, images[:2], text).maps
    many = cv.compare(model, images[:2], [text, "ixg", mine().spec])
    assert torch.equal(many[text].maps, maps)
    assert many.cost.forwards == 1
    assert_same(cv.explain(model, images[1:2], text).maps[0], maps[1], growth=growth_of(NAME))
    both = cv.explain(model, images[:1], text, targets=[0, 1])
    assert both.maps.shape[0] == 2
    assert not torch.equal(both.maps[0], both.maps[1])
    scores = cv.evaluate(model, images[:2], [text, "ixg"], [METRIC, "mprt(layers=1)"])
    assert {key[0] for key in scores} == {text, "ixg"}
    assert cv.explain(model, images[:1], f"smooth({text},n=2)").maps.shape == (1, *maps.shape[1:])


def test_choose_ranks_it_by_cross_fitted_scores(tmp_path: Path) -> None:
    model, images = model_and_images()
    selection = cv.choose(model, images, ["ixg"], [METRIC], calibrate=True)
    (text,) = [row.method for row in selection.ranking if row.method.startswith("calibrated#")]
    assert {row.method for row in selection.ranking} == {text, "ixg", PRIOR_METHOD, "random", "center"}
    calibration_request = request(sets=calibrate_module.SETS)
    expected = cross_fitted_scores(calibration_request, fit_calibration(calibration_request), [resolve_metric(METRIC)])[
        METRIC
    ]
    assert torch.equal(selection.scores[text, METRIC].values, expected.values)
    assert any("fitted without it" in sentence for sentence in selection.answer)
    file = selection.save(tmp_path / "chosen.json")
    recipe = read_recipe(file)
    assert recipe.calibration == selection.calibration
    assert recipe.method == selection.best


@pytest.mark.usefixtures("no_calibrations")
def test_a_study_stores_its_scores(tmp_path: Path) -> None:
    small_study = study(tmp_path, images=8, at_once=4)
    model = small_study.models[0].load()
    recipe = cv.calibrate(model, small_study.data[0].open(0), sets=2, metrics=[METRIC])
    file = recipe.save(tmp_path / "mine.json")
    small_study = replace(small_study, methods=(str(file), "legrad"), metrics=(METRIC,))
    calibrated_module._calibrations.clear()
    store = Store.open(tmp_path / "store")
    outcome = run_study(small_study, store)
    assert outcome.failed == ()
    rows = store.query("select method, count(value) from results group by method")[1]
    text = f"{file}#{recipe.method.partition('#')[2]}"
    assert dict(rows) == {text: 8, "legrad": 8, "random": 8, "center": 8}
    ((_, model_hash, data, settings),) = combinations(store)
    assert (text, METRIC) in read_scores(store, model_hash, data, settings)


# Refusals -------------------------------------------------------------------------------------------------------------


def test_another_model_is_refused_and_both_are_named() -> None:
    _, images = model_and_images()
    recipe = mine()
    other = fresh("timm-reg4-gap", torch.float64)
    with pytest.raises(NotApplicable, match=r"calibrated for timm-vit, .* and this is timm-reg4-gap"):
        cv.explain(other, pixels("timm-reg4-gap", 1, dtype=torch.float64), recipe)
    changed = fresh(NAME, torch.float64)
    with torch.no_grad():
        next(iter(changed.module.parameters())).add_(1e-3)
    with pytest.raises(NotApplicable, match=weights_hash(changed)[:12]):
        cv.evaluate(changed, images[:2], recipe.method, METRIC)
    many = cv.compare(changed, images[:2], [recipe.method, "ixg"], skip=True)
    assert list(many) == ["ixg"]
    assert "calibrated for timm-vit" in many.skipped[recipe.method]
    assert recipe.method in cv.evaluate(changed, images[:2], [recipe.method, "ixg"], [METRIC], skip=True).skipped
    assert recipe.method in cv.compare(changed, images[:2], [recipe.method], skip=True).skipped


def test_another_size_is_refused_and_both_are_named() -> None:
    calibration = mine().calibration
    assert calibration is not None
    rows, cols = calibration.grid
    with pytest.raises(NotApplicable, match=rf"{rows} × {cols} patches.*this image has 9 × 7 patches"):
        calibration.combine([torch.ones(1, 9, 7)] * calibration.layers * len(calibration.weights))


def test_an_image_of_another_size_is_refused_by_the_verbs() -> None:
    """A model that takes any size, given as it is and loaded for another size."""
    module = vit_of_any_size()
    images = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    model = cv.wrap(module, name="any-size", size=32)
    recipe = cv.calibrate(model, images, sets=2, metrics=[METRIC])
    wide = torch.randn(1, 3, 32, 48, dtype=torch.float64)
    both = r"calibrated for any-size, 32 × 32 pixels, 4 × 4 patches, 2 layers, and this image has 4 × 6 patches"
    with pytest.raises(NotApplicable, match=both):
        cv.explain(model, wide, recipe)
    with pytest.raises(NotApplicable, match=r"any-size, 32 × 32 pixels, .* and this is any-size, 48 × 48 pixels"):
        cv.explain(cv.wrap(module, name="any-size", size=48), wide, recipe)


@pytest.mark.parametrize("count", [1, 7])
def test_few_images_are_refused(count: int) -> None:
    model, images = model_and_images()
    with pytest.raises(BadInput, match=f"^{count} images were given; expected 8 or more"):
        cv.calibrate(model, images[:count])


@pytest.mark.parametrize(("kind", "make"), [("a-cnn", cnn), ("a-swin", STRANGE["swin"].make)])
def test_models_whose_layers_cannot_be_added_up_are_refused(kind: str, make: Callable[[], nn.Module]) -> None:
    net = cv.wrap(strange(make), name=kind, size=(32, 32))
    with pytest.raises(NotApplicable, match=rf"^{kind} cannot be calibrated"):
        cv.calibrate(net, torch.zeros(8, 3, 32, 32))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights": {"attnlrp": [1.0, 2.0], "ixg": [1.0]}}, "lists of"),
        ({"weights": {"no-such-kind": [1.0]}}, "no-such-kind"),
        ({"weights": {"ixg": ["a"]}}, "cannot be read"),
        ({"weights": {"ixg": [None]}}, "cannot be read"),
        ({"grid": 4}, "cannot be read"),
    ],
)
def test_a_broken_calibration_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    file = mine().save(tmp_path / "mine.json")
    document = json.loads(file.read_text())
    document["calibration"] |= change
    file.write_text(json.dumps(document))
    with pytest.raises(BadInput, match=message):
        cv.parse_method(str(file))


def test_metrics_of_whole_sets_and_bad_options_are_refused() -> None:
    model, images = model_and_images()
    for options in ({"sets": 1}, {"backwards": 0}, {"metrics": []}, {"metrics": "deletion"}):
        with pytest.raises(BadInput):
            cv.calibrate(model, images, **options)


# Resuming -------------------------------------------------------------------------------------------------------------


class Count:
    """Images that went through a module."""

    def __init__(self, module: nn.Module) -> None:
        self.images = 0
        module.register_forward_hook(lambda _, inputs, __: self._add(len(inputs[0])))

    def _add(self, images: int) -> None:
        self.images += images


def test_an_edited_metric_of_ones_own_is_scored_again(tmp_path: Path) -> None:
    """The cache keeps scores by the metric's code, not by its name alone."""
    model, images = double(NAME, COUNT)

    def mean_by(factor: float) -> float:
        @cv.metric("own-peak", better="higher", overwrite=True)
        def peak_of_map(context: cv.extend.EvalContext) -> Tensor:
            return factor * context.maps.flatten(2).amax(-1) / context.maps.flatten(2).abs().amax(-1)

        recipe = cv.calibrate(model, images, sets=SETS, metrics=["own-peak"], cache=tmp_path / "cache")
        return float(recipe.ranking[0]["calibrated"])

    with METRIC_REGISTRY.restored():
        first, again, other = mean_by(1.0), mean_by(1.0), mean_by(3.0)
    assert first == again
    assert_same(other, 3 * first)


def test_an_interrupted_run_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CHUNK_SIZE, "cpu", 3)
    model, images = double(NAME, COUNT)
    blocks = model.module.blocks
    assert isinstance(blocks, nn.Module)
    count = Count(next(iter(blocks.children())))
    options: dict[str, Any] = {"sets": SETS, "metrics": [METRIC]}
    cv.evaluate(model, images[:1], "ixg", METRIC)  # how tokens are dropped is tried once per model
    count.images = 0
    whole = cv.calibrate(model, images, cache=tmp_path / "whole", **options)
    full, count.images = count.images, 0

    def stop(label: str, done: int, steps: int) -> None:
        if label == "calibrate" and done >= 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), on_progress(stop):
        cv.calibrate(model, images, cache=tmp_path / "cache", **options)
    assert len(list((tmp_path / "cache").iterdir())) == 6
    count.images = 0
    resumed = cv.calibrate(model, images, cache=tmp_path / "cache", **options)
    per_image = 1 + SETS * len(KEEP_RATES)
    assert resumed == whole
    assert full - count.images == 6 * per_image, "the six images of the first run are not run again"
    count.images = 0
    assert cv.calibrate(model, images, cache=tmp_path / "cache", **options) == whole
    assert count.images <= 4, "nothing but the first image, which tells which maps the model has"
    next(iter((tmp_path / "cache").iterdir())).write_bytes(b"PK broken")
    with pytest.raises(BadInput, match="cannot be read"):
        cv.calibrate(model, images, cache=tmp_path / "cache", **options)
    count.images = 0
    cv.calibrate(model, images, cache=tmp_path / "cache", **{**options, "sets": SETS + 1})
    assert count.images > full, "other settings, other data"


def test_an_unreadable_image_is_left_out(tmp_path: Path) -> None:
    small_study = study(tmp_path, images=9)
    files = sorted((tmp_path / "photos").rglob("*.png"))
    files[2].write_bytes(b"no picture")
    failed: list[str] = []
    options: dict[str, Any] = {"sets": 2, "metrics": [METRIC], "on_error": lambda name, error: failed.append(name)}
    recipe = cv.calibrate(small_study.models[0].load(), files, **options)
    assert recipe.images == 8
    assert failed == [str(files[2])]
    with pytest.raises(BadInput, match=r"^7 images were given"):
        cv.calibrate(small_study.models[0].load(), files[1:], **options)
