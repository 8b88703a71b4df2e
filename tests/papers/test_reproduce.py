"""Every preset end to end on a tiny model with generated images and masks: the numbers are cv.evaluate's, the paper's
stand beside them, what differs is said; a run that is repeated computes nothing; what the data lacks is asked for.
"""

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
from clairvit.data.dataset import ImageDataset, Sample, as_dataset, masks_on_patches, void_as_object
from clairvit.data.hashing import weights_hash
from clairvit.errors import BadInput, UnknownName
from clairvit.methods.spec import resolve_method
from clairvit.metrics.registry import resolve_metric
from clairvit.metrics.score import Prediction, Score, Scores
from clairvit.papers.paper import NAMES, find_paper
from clairvit.papers.reproduce import (
    Reproduction,
    check_data,
    depth,
    load_data,
    named_scores,
    reproduce,
    study_of,
    subset,
    sweep_methods,
)
from clairvit.papers.setup import LoadedData, ReproductionConfig, differences, replace_methods
from clairvit.reports.study_results import read_store
from helpers.tiny_models import ZOO, wrapped

MODEL = wrapped("timm-vit", torch.float64)
SIZE = 32


def picture(seed: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (SIZE, SIZE, 3), dtype=np.uint8))


def trimap(seed: int) -> np.ndarray:
    """An object of 12 × 12 pixels with a border of two pixels that counts nowhere."""
    mask = np.full((SIZE, SIZE), 2)
    top, left = np.random.default_rng(seed).integers(2, 16, 2)
    mask[top - 2 : top + 14, left - 2 : left + 14] = 3
    mask[top : top + 12, left : left + 12] = 1
    return mask


def dataset(count: int = 3, masks: bool = True, labels: bool = True) -> ImageDataset:
    seeds = range(count)
    return as_dataset(
        [picture(seed) for seed in seeds],
        MODEL,
        masks=[trimap(seed) for seed in seeds] if masks else None,
        mask_kind="trimap",
        labels=[seed % 3 for seed in seeds] if labels else None,
    )


def reproduction_config(name: str, **options: str) -> ReproductionConfig:
    return ReproductionConfig(
        find_paper(name), ModelConfig("tiny"), DataConfig("folder:here"), effort="quick", **options
    )


def ran(name: str, folder: Path, count: int = 3, **options: str) -> Reproduction:
    shown = LoadedData(dataset(count), f"{count} generated images", "the generator")
    return reproduce(reproduction_config(name, **options), Store.open(folder), model=MODEL, data=shown)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reproduction]:
    return {name: ran(name, tmp_path_factory.mktemp(name) / "store") for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_every_number_is_there_or_explained(name: str, results: dict[str, Reproduction]) -> None:
    result = results[name]
    preset = result.config.paper
    scored = result.images
    assert scored == 3 - (preset.tune is not None), "one image chooses the start layer"
    assert not result.failed
    words = " ".join(sentence for _, sentence in result.differences)
    for row in result.rows:
        method = resolve_method(preset.at_effort("quick", row.entry.method)).text
        for measure in preset.measures:
            metric = resolve_metric(preset.at_effort("quick", measure.metric)).text
            nobody_sure = measure.min_confidence is not None and "0 of 3 are predicted with more than 85%" in words
            undefined = f"{metric} of {method} is undefined on {scored} of {scored} images" in words
            assert math.isfinite(row.cells[measure.name].ours) or nobody_sure or undefined, (method, metric)


@pytest.mark.parametrize("name", NAMES)
def test_the_papers_numbers_stand_beside_ours(name: str, results: dict[str, Reproduction]) -> None:
    result = results[name]
    preset = result.config.paper
    assert [row.entry for row in result.rows] == list(preset.methods_and_baselines)
    if result.table is None:
        assert name == "skipplus"
        assert all(math.isnan(cell.paper) for row in result.rows for cell in row.cells.values())
        return
    for measure, printed in result.table.values.items():
        cells = [row.cells[measure] for row in result.rows if row.entry.name in result.table.methods]
        assert tuple(cell.paper for cell in cells) == printed, measure
        assert sorted(cell.paper_rank for cell in cells)[0] >= 1
        assert sum(cell.paper_rank for cell in cells) == len(cells) * (len(cells) + 1) / 2
    assert {agreement.measure for agreement in result.agreements} <= set(result.table.values)
    assert {agreement.data for agreement in result.agreements} == {
        table.data for table in preset.tables
    } or name == "coporan"


@pytest.mark.parametrize("name", NAMES)
def test_what_differs_is_listed(name: str, results: dict[str, Reproduction]) -> None:
    about = results[name].differences
    difference_by_topic = dict(reversed(about))
    assert MODEL.name in difference_by_topic["model"]
    assert "3 generated images" in difference_by_topic["data"]
    assert results[name].config.paper.images in difference_by_topic["data"]
    assert bool(results[name].measure_agreements) == (name in ("focusvit", "skipplus", "joita")), (
        "the others have too few methods"
    )
    few = f"{results[name].images} images say little: an interval, and any claim, takes 6."
    assert ("images", few) in about
    assert ("masks", "Masks are from the generator.") in about
    for gap in results[name].config.paper.gaps:
        assert ("protocol", gap) in about
    assert ("effort" in difference_by_topic) == bool(results[name].config.paper.efforts)
    assert len(results[name].claim_results) == len(results[name].config.paper.claims)


def test_the_numbers_are_evaluates(results: dict[str, Reproduction]) -> None:
    cells = {row.entry.name: row.cells for row in results["joita"].rows}
    images = masks_on_patches(dataset(), (4, 4))
    metrics = ["iou(upsampling=nearest)", "pixel-accuracy(upsampling=nearest)"]
    scores = cv.evaluate(MODEL, images, ["gmar-l1(preset=joita)", "legrad"], metrics)
    assert isinstance(scores, Scores)
    by_method_and_metric = {key[:2]: score for key, score in scores.items()}
    gmar = next(
        score
        for (method, metric), score in by_method_and_metric.items()
        if method.startswith("gmar") and metric == metrics[0]
    )
    assert cells["GMAR-L1"]["mIoU"].ours == pytest.approx(100 * gmar.mean, abs=1e-9)
    assert cells["GMAR-L1"]["mIoU"].images == gmar.n_valid
    other = by_method_and_metric["legrad", metrics[1]]
    assert cells["LeGrad (equation)"]["mPA"].ours == pytest.approx(100 * other.mean, abs=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_means_are_those_of_the_single_images(name: str, results: dict[str, Reproduction]) -> None:
    result = results[name]
    assert len(result.by_image) == result.images
    for row in result.rows:
        for measure in result.config.paper.measures:
            values = [image.values[row.entry.name, measure.name] for image in result.by_image]
            valid = [value for value in values if not math.isnan(value)]
            cell = row.cells[measure.name]
            assert len(valid) == cell.images
            assert not valid or cell.ours == pytest.approx(math.fsum(valid) / len(valid), rel=1e-9, abs=1e-9)


def test_skipplus_scores_the_true_class_and_turns_two_measures(results: dict[str, Reproduction]) -> None:
    cells = {row.entry.name: row.cells for row in results["skipplus"].rows}
    scores = cv.evaluate(MODEL, dataset(), ["ixg+skipplus"], ["deletion(score=accuracy)", "ap"], target="label")
    assert isinstance(scores, Scores)
    curve, ap = scores.values()
    assert cells["IxG∘SkipPLUS"]["Deletion Accuracy"].ours == pytest.approx(100 - 100 * curve.mean, abs=1e-9)
    assert cells["IxG∘SkipPLUS"]["AP"].ours == pytest.approx(100 * ap.mean, abs=1e-9)


def test_the_sweep_meets_plus_and_skipplus(results: dict[str, Reproduction]) -> None:
    """Started at layer 0 it is PLUS, at the middle SkipPLUS."""
    result = results["skipplus"]
    cells = {row.entry.name: row.cells for row in result.rows}
    layers = ZOO["timm-vit"].layers
    assert {sweep.method for sweep in result.sweeps} == set(result.config.paper.sweep)
    for curve in result.sweeps:
        name = {"decompx": "DecompX", "globenc": "GlobEnc", "ixg": "IxG"}[curve.method]
        assert len(curve.values) == layers
        assert curve.middle == math.ceil(layers / 2)
        assert curve.values[0] == pytest.approx(cells[f"{name}∘PLUS"][curve.measure.name].ours, abs=1e-9)
        assert curve.values[curve.middle] == pytest.approx(cells[f"{name}∘SkipPLUS"][curve.measure.name].ours, abs=1e-9)
        assert curve.values[curve.best] == max(curve.values), "higher is better by all of them"


def test_a_second_run_computes_nothing_and_a_larger_one_only_what_is_new(tmp_path: Path) -> None:
    plans: list[Plan] = []
    store = Store.open(tmp_path / "store")

    def go(count: int) -> Reproduction:
        shown = LoadedData(dataset(count), "generated")
        return reproduce(reproduction_config("joita"), store, model=MODEL, data=shown, on_plan=plans.append)

    first, again = go(3), go(3)
    assert plans[0].done == 0
    assert len(plans[0].units) == 1
    assert (plans[1].done, plans[1].units) == (plans[1].cells, ())
    assert repr(first.rows) == repr(again.rows)
    fewer = go(2)
    assert fewer.images == 2, "what the store has of other images does not count"
    assert {cell.images for row in fewer.rows for cell in row.cells.values()} == {2}


def test_confident_images_only(tmp_path: Path) -> None:
    """Coporan's subset: of the images above 85 %, none of the others, and the pointing game of all."""
    every = Scores()
    every.predictions = tuple(Prediction(f"{k}", 0, p, None) for k, p in enumerate((0.9, 0.85, 0.86)))
    coporan = replace(reproduction_config("coporan"), effort="paper")
    jaccard, pointing = coporan.paper.measures[0], coporan.paper.measures[-1]
    for metric in ("iou", "pointing-game(preset=coporan)"):
        every["attcam", metric] = Score(
            metric,
            "attcam",
            torch.tensor([0.1, 0.2, 0.5]).double(),
            "higher",
            (0, 1),
            torch.zeros(3).bool(),
            tuple("012"),
            "m",
        )
    scores_by_name = named_scores(coporan, every, (jaccard, pointing))
    assert scores_by_name["CAM", "Jaccard Index"].values.tolist() == pytest.approx([0.1, 0.5])
    assert scores_by_name["CAM", "Jaccard Index"].names == ("0", "2")
    assert len(scores_by_name["CAM", "Pointing Game Accuracy"].values) == 3


def test_confident_images_are_counted(tmp_path: Path, results: dict[str, Reproduction]) -> None:
    result = results["coporan"]
    logits = MODEL.logits(torch.stack([dataset().read(row, MODEL).pixels for row in range(3)]).to(MODEL.dtype))
    sure = int((logits.double().softmax(1).amax(1) > 0.85).sum())
    (sentence,) = [what for _, what in result.differences if "are predicted with more than" in what]
    assert sentence.startswith(f"{sure} of 3 ")
    assert {row.cells["Jaccard Index"].images for row in result.rows} <= set(range(sure + 1))
    assert all(row.cells["Pointing Game Accuracy"].images == 3 for row in result.rows if not row.entry.extra)


def test_void_counts_as_object_for_coporan() -> None:
    plain = dataset()
    with_void = void_as_object(plain)
    before, after = plain.read(0, MODEL), with_void.read(0, MODEL)
    assert before.mask is not None
    assert before.void is not None
    assert after.mask is not None
    assert bool(before.void.any())
    assert torch.equal(after.mask, before.mask | before.void)
    assert after.void is None
    assert with_void.content_hash(0) != plain.content_hash(0), "other masks are other numbers"
    assert with_void.content_hash(0) != with_void.content_hash(1)
    unmasked = void_as_object(dataset(masks=False))
    assert unmasked.read(0, MODEL).mask is None


def test_whoever_opens_the_study_again_sees_what_was_scored(tmp_path: Path) -> None:
    """A report shows an image only if its mark is the one that was scored."""
    for place, name in (("photos", "a.png"), ("masks", "a.png")):
        (tmp_path / place).mkdir()
        drawn = picture(0) if place == "photos" else Image.fromarray(trimap(0).astype(np.uint8))
        drawn.save(tmp_path / place / name)
    data = DataConfig(f"folder:{tmp_path}/photos", masks=f"{tmp_path}/masks", mask_kind="trimap")
    for name in ("coporan", "joita"):
        with_data = replace(reproduction_config(name), data=data)
        plans: list[Plan] = []
        store = Store.open(tmp_path / name)
        reproduce(with_data, store, model=MODEL, on_plan=plans.append)
        (study,) = read_store(store).studies
        assert (study.data[0].open(study.seed).content_hash(0),) == plans[0].units[0].image_hashes


def test_missing_masks_are_refused() -> None:
    shown = LoadedData(dataset(masks=False), "generated")
    for name in ("cmi", "coporan", "joita"):
        with pytest.raises(
            BadInput, match=rf"'{name}' compares maps with masks .*folder:here has none.*'mask-rcnn' for masks"
        ):
            check_data(reproduction_config(name), shown)
    assert len(check_data(reproduction_config("focusvit"), shown)) == 4
    measures = [measure.name for measure in check_data(reproduction_config("skipplus"), shown)]
    assert "AP" not in measures
    assert len(measures) == 4


def test_missing_true_classes_are_refused() -> None:
    with pytest.raises(BadInput, match=r"explains the true class, and folder:here has none.*target='predicted'"):
        check_data(reproduction_config("skipplus"), LoadedData(dataset(labels=False), "generated"))
    with pytest.raises(BadInput, match=r"the model has no class a, b, c, … \(4 of"):
        check_data(
            reproduction_config("skipplus"), LoadedData(dataset(), "generated", unknown_classes=("a", "b", "c", "d"))
        )
    assert check_data(
        reproduction_config("skipplus", target="predicted"), LoadedData(dataset(labels=False), "generated")
    )
    assert check_data(reproduction_config("joita"), LoadedData(dataset(), "generated", unknown_classes=("a",))), (
        "it needs no true class"
    )


def test_targets_are_the_papers_unless_one_is_named() -> None:
    assert reproduction_config("skipplus").study_target == "label"
    assert reproduction_config("skipplus", target="predicted").study_target is None
    assert reproduction_config("joita").study_target is None
    assert reproduction_config("joita", target="label").study_target == "label"
    with pytest.raises(BadInput, match="expected one of predicted, label"):
        _ = reproduction_config("joita", target="cat").study_target


def test_masks_that_changed_are_not_mixed_with_old_ones(tmp_path: Path) -> None:
    """In one store, images of the same names with and without void: each run has its own numbers."""
    store = Store.open(tmp_path / "s")

    def fractions(images: ImageDataset) -> str:
        reproduction = reproduce(reproduction_config("cmi"), store, model=MODEL, data=LoadedData(images, "generated"))
        assert reproduction.images == 3
        return repr([row.cells["FAF"] for row in reproduction.rows])

    plain, other = fractions(dataset()), fractions(void_as_object(dataset()))
    assert plain != other
    assert fractions(dataset()) == plain


def test_part_of_a_score_keeps_its_curve_and_counts() -> None:
    scores = cv.evaluate(MODEL, dataset(), ["ixg"], ["deletion", "iou(over=set)"])
    assert isinstance(scores, Scores)
    curve, overlap = scores.values()
    kept, counted = subset(curve, [True, False, True]), subset(overlap, [False, True, True])
    assert kept.curve is not None
    assert curve.curve is not None
    assert torch.equal(kept.curve.y, curve.curve.y[[0, 2]])
    assert kept.names == (curve.names[0], curve.names[2])
    assert counted.counts is not None
    assert overlap.counts is not None
    assert torch.equal(counted.counts, overlap.counts[1:])
    assert len(counted.degenerate) == 2


def test_the_study_has_the_efforts_samples() -> None:
    focusvit = reproduction_config("focusvit")
    study = study_of(focusvit, focusvit.paper.measures)
    assert "kernelshap(samples=40)" in study.methods
    assert any("layers=3" in metric for metric in study.metrics)
    assert study_of(replace(focusvit, effort="paper"), focusvit.paper.measures).methods[1] == "kernelshap"
    with pytest.raises(BadInput, match="quick, usual, paper"):
        study_of(replace(focusvit, effort="fast"), focusvit.paper.measures)


def test_layers_are_counted() -> None:
    assert depth(MODEL, dataset(1)) == ZOO["timm-vit"].layers
    whole = dataset(2)

    def torn(row: int, model: cv.Model) -> Sample:
        if row == 0:
            raise BadInput("it is torn.")
        return whole.read(row, model)

    assert depth(MODEL, replace(whole, read=torn)) == ZOO["timm-vit"].layers, "of the first that can be read"
    with pytest.raises(BadInput, match="None of the 1 images can be read"):
        depth(MODEL, replace(whole.take([0]), read=torn))
    assert sweep_methods(find_paper("skipplus"), 2)["ixg"] == ["ixg+from:0", "ixg+from:1"]
    assert sweep_methods(find_paper("joita"), 12) == {}


def test_nothing_to_score_is_an_error(tmp_path: Path) -> None:
    def broken(row: int, model: cv.Model) -> None:
        raise BadInput("it is torn.")

    torn = replace(dataset(), read=broken)
    with pytest.raises(BadInput, match="Nothing could be scored"):
        reproduce(reproduction_config("joita"), Store.open(tmp_path / "s"), model=MODEL, data=LoadedData(torn, "torn"))


def test_a_folder_is_opened_with_its_masks(tmp_path: Path) -> None:
    for seed in range(3):
        (tmp_path / "photos").mkdir(exist_ok=True)
        (tmp_path / "masks").mkdir(exist_ok=True)
        picture(seed).save(tmp_path / "photos" / f"{seed}.png")
        Image.fromarray(trimap(seed).astype(np.uint8)).save(tmp_path / "masks" / f"{seed}.png")
    data = DataConfig(f"folder:{tmp_path / 'photos'}", limit=2, masks=str(tmp_path / "masks"), mask_kind="trimap")
    shown = load_data(replace(reproduction_config("joita"), data=data), MODEL)
    assert "2 of 3 images" in shown.description
    assert shown.dataset.has_masks
    assert shown.masks == str(tmp_path / "masks")


def test_many_labels_and_methods_make_no_file_name() -> None:
    """What a study is known by is text of any length; a file of that name would be read instead."""
    long = replace(MODEL, labels=tuple(f"class number {k} of very many" for k in range(200)))
    other = replace(long, labels=(*long.labels[:-1], "another"))
    assert weights_hash(long) != weights_hash(other) != weights_hash(MODEL)
    assert weights_hash(long) == weights_hash(replace(long))


def test_an_image_that_cannot_be_read_costs_itself(tmp_path: Path) -> None:
    whole = dataset()

    def read(row: int, model: cv.Model) -> Sample:
        if row == 1:
            raise BadInput("it is torn.")
        return whole.read(row, model)

    shown = LoadedData(replace(whole, read=read), "generated")
    result = reproduce(reproduction_config("joita"), Store.open(tmp_path / "s"), model=MODEL, data=shown)
    assert result.images == 2
    assert result.failed == (f"{whole.names[1]}: it is torn.",)
    assert {cell.images for row in result.rows for cell in row.cells.values()} == {2}


def test_other_methods_under_the_papers_names() -> None:
    preset = replace_methods(find_paper("focusvit"), ["FocusViT=focusvit(m=1)", "SHAP=kernelshap(samples=9)"])
    assert [method.name for method in preset.methods] == [method.name for method in find_paper("focusvit").methods]
    study = study_of(replace(reproduction_config("focusvit"), paper=preset), preset.measures)
    assert study.methods[5] == "focusvit(m=1)"
    assert study.methods[1] == "kernelshap(samples=9)", "no effort changes what was asked for"
    assert study.methods[0] == "lime(preset=lime,samples=30)"
    with pytest.raises(UnknownName, match="Did you mean 'FocusViT'"):
        replace_methods(find_paper("focusvit"), ["FocusVit=rollout"])
    with pytest.raises(UnknownName, match="Type NAME=METHOD"):
        replace_methods(find_paper("focusvit"), ["rollout"])
    with pytest.raises(UnknownName, match="focusvitt"):
        replace_methods(find_paper("focusvit"), ["FocusViT=focusvitt"])


def test_only_coporan_runs_on_masks_with_void(tmp_path: Path) -> None:
    marks = {}
    for name in ("coporan", "joita"):
        plans: list[Plan] = []
        shown = LoadedData(dataset(2), "generated")
        reproduce(reproduction_config(name), Store.open(tmp_path / name), model=MODEL, data=shown, on_plan=plans.append)
        marks[name] = plans[0].units[0].image_hashes
    on_patches = masks_on_patches(dataset(2), (4, 4))
    assert marks["joita"] == tuple(on_patches.content_hash(row) for row in range(2))
    assert marks["coporan"] == tuple(void_as_object(dataset(2)).content_hash(row) for row in range(2))


@pytest.mark.parametrize(
    ("name", "spec", "same"),
    [
        ("coporan", "voc:/x", True),
        ("coporan", "pets:/x", False),
        ("joita", "voc:/x", False),  # only if the 14 images are there
        ("focusvit", "pets:/x", True),
        ("focusvit", "voc:/x", False),
    ],
)
def test_whether_the_paper_has_numbers_on_this_data_is_reported(name: str, spec: str, same: bool) -> None:
    study_preset = replace(reproduction_config(name), data=DataConfig(spec))
    table = study_preset.paper.table_for(spec)
    by_topic = dict(
        differences(
            study_preset, MODEL, LoadedData(dataset(2), "generated"), Scores(), study_preset.paper.measures, table
        )
    )
    assert by_topic["numbers"].endswith(f"the paper has {'them' if same else 'none'} for this data.")


def test_constant_maps_are_reported() -> None:
    flat = Scores()
    flat.predictions = (Prediction("x", 0, 0.9, None), Prediction("y", 0, 0.9, None))
    for method, constant in (("vanilla", True), ("ixg", False), ("random", True)):
        flat[method, "iou"] = Score(
            "iou", method, torch.ones(2).double(), "higher", (0, 1), torch.tensor([constant, False]), ("x", "y"), "m"
        )
    joita = reproduction_config("joita")
    stated_differences = differences(
        joita, MODEL, LoadedData(dataset(2), "generated"), flat, joita.paper.measures, None
    )
    sentences = [sentence for about, sentence in stated_differences if about == "constant"]
    assert sentences == ["Maps of vanilla are constant on 1 of 2 images: the order of their patches is arbitrary."]


def test_sums_that_are_the_same_maths(results: dict[str, Reproduction]) -> None:
    """SkipPLUS's special cases: summed, HiResCAM is IxG; FullGrad repeats biases, FullGrad+ does not."""
    cells = {row.entry.name: row.cells for row in results["skipplus"].rows}

    def ours(name: str) -> list[float]:
        return [cell.ours for cell in cells[name].values()]

    for first, second in (("HiResCAM", "IxG"), ("GlobEnc", "AttIN")):
        for ending in ("∘PLUS", "∘SkipPLUS"):
            assert ours(first + ending) == pytest.approx(ours(second + ending), abs=1e-9)
    assert ours("FullGrad∘PLUS") != pytest.approx(ours("FullGrad+∘PLUS"), abs=1e-9)
    assert ours("DecompX") != pytest.approx(ours("DecompX∘PLUS"), abs=1e-9)
