"""Certificates: sizes by brute force, the quantile by all orders, what is marked, refused, written and read again."""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import clairvit as cv
from clairvit.data.dataset import as_dataset
from clairvit.errors import BadInput, ClairError, NotApplicable, UnknownName
from clairvit.extend import Total
from clairvit.methods.registry import METHODS
from clairvit.metrics.answer_size import size_grid, smallest_from_which
from clairvit.metrics.certificate import conformal_quantile, conformal_rank, fewest_photos
from clairvit.results import Certificate
from helpers.linear_patch_model import effects, linear
from helpers.reference_token_dropping import logits_left
from helpers.tiny_models import double, pixels, wrapped

KIND, COUNT, PATCHES = "timm-vit", 12, 16
NAMES = ["ixg", "random"]


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Forget the methods that a test registers."""
    with METHODS.restored():
        yield


@functools.cache
def model_and_images() -> tuple[cv.Model, Tensor]:
    """Return a model whose answers differ from photo to photo, and photos."""
    model, images = double(KIND, COUNT)
    with torch.no_grad():
        model.module.head.bias -= model.logits(images).mean(0)  # type: ignore[union-attr, operator]
    assert len(set(model.logits(images).argmax(1).tolist())) > 2
    return model, images


@functools.cache
def certificate(method: str = "ixg", keep: float = 0.75, **options: Any) -> Certificate:
    model, images = model_and_images()
    return cv.certify(model, images, method, keep, **options)


def orders(method: str, images: Tensor) -> list[list[int]]:
    """Patches by falling relevance; these maps have no ties."""
    model, _ = model_and_images()
    maps = cv.explain(model, images, method).maps.flatten(1)
    assert all(len(set(row.tolist())) == PATCHES for row in maps)
    return maps.argsort(1, descending=True).tolist()


def smallest_by_hand(holds: Callable[[int], bool], grid: tuple[int, ...]) -> float:
    return min((k for k in grid if all(holds(larger) for larger in grid if larger >= k)), default=math.inf)


def answer(module: nn.Module, image: Tensor, kept: list[int]) -> int:
    return int(logits_left(module, image, torch.tensor([sorted(kept)])).argmax())


# Sizes


@pytest.mark.parametrize("method", NAMES)
@pytest.mark.parametrize("statement", ["keep", "change"])
def test_sizes_are_those_of_tokens_left_out_by_hand(method: str, statement: str) -> None:
    """Each photo by itself, in float64: embed, keep some rows, run what is left, for every size of the grid."""
    model, images = model_and_images()
    certified = certificate(method, 0.5, statement=statement, sizes=7)
    grid = tuple(sorted({max(1, round(PATCHES * (j / 7) ** 2)) for j in range(1, 8)}))
    assert size_grid(PATCHES, 7) == grid
    expected: list[int | None] = []
    for image, order in zip(images.split(1), orders(method, images), strict=True):
        whole = int(model.logits(image).argmax())

        def holds(k: int, image: Tensor = image, order: list[int] = order, whole: int = whole) -> bool:
            kept = order[:k] if statement == "keep" else order[k:]
            return (answer(model.module, image, kept) == whole) == (statement == "keep")

        size = smallest_by_hand(holds, grid if statement == "keep" else grid[:-1])
        expected.append(None if math.isinf(size) else int(size))
    assert list(certified.sizes) == expected
    assert certified.tried == (grid if statement == "keep" else grid[:-1])
    assert len({*expected}) > 2, "a case that says something"


def test_sizes_of_a_linear_model_are_sums_of_effects() -> None:
    """Removed patches count 0, so that the answer of a set is the class with the largest sum over it."""
    model, image = linear((4, 4))
    images = torch.cat([image + 0.4 * pixels(KIND, 6, seed, torch.float64) for seed in (3, 4)])
    certified = cv.certify(model, images, "ixg", 0.5, removal="mean", sizes=16)
    expected = []
    for row in images.split(1):
        parts = torch.stack([effects(model, row, target).flatten() for target in range(3)])  # [classes, patches]
        whole = int(parts.sum(1).argmax())
        order = parts[whole].argsort(descending=True)

        def holds(k: int, parts: Tensor = parts, order: Tensor = order, whole: int = whole) -> bool:
            return int(parts[:, order[:k]].sum(1).argmax()) == whole

        expected.append(smallest_by_hand(holds, certified.tried))
    assert list(certified.sizes) == expected
    assert "removed patches are painted over, removal=mean" in certified.sentence


def test_the_smallest_size_from_which_on_all_hold() -> None:
    sizes = (1, 3, 4, 9, 16)
    every = list(itertools.product([False, True], repeat=len(sizes)))
    expected = [smallest_by_hand(dict(zip(sizes, holds, strict=True)).__getitem__, sizes) for holds in every]
    assert smallest_from_which(torch.tensor(every), sizes).tolist() == expected


@pytest.mark.parametrize(("patches", "sizes"), [(1, 20), (2, 2), (16, 20), (49, 7), (196, 20), (196, 400)])
def test_a_grid_rises_to_all_patches(patches: int, sizes: int) -> None:
    grid = size_grid(patches, sizes)
    assert list(grid) == sorted({*grid})
    assert (grid[0], grid[-1]) == (1 if sizes**2 >= patches else grid[0], patches)
    assert len(grid) <= min(sizes, patches)
    for size in grid:
        nearest = min((abs(patches * (j / sizes) ** 2 - size), j) for j in range(1, sizes + 1))[0]
        assert nearest <= 0.5 or size == 1


def test_the_metrics_are_the_sizes_as_shares() -> None:
    model, images = model_and_images()
    scores = cv.evaluate(model, images, NAMES, ["sufficient-size", "necessary-size"], baselines=False)
    for method in NAMES:
        for statement, metric in (("keep", "sufficient-size"), ("change", "necessary-size")):
            sizes = [PATCHES if size is None else size for size in certificate(method, 0.5, statement=statement).sizes]
            assert scores[method, metric].values.tolist() == [size / PATCHES for size in sizes]


def test_a_metric_has_no_value_where_there_is_no_answer_to_keep() -> None:
    model, images = model_and_images()
    answers = model.logits(images).argmax(1).tolist()
    others = [(answers[0] + 1) % model.logits(images).shape[1], *answers[1:]]
    score = cv.evaluate(model, images, "ixg", "sufficient-size", target=others)
    assert score.values.isnan().tolist() == [True] + [False] * (COUNT - 1)
    several = replace(model, activation="sigmoid")
    score = cv.evaluate(several, images, "ixg", "sufficient-size", target=1)
    assert score.values.isnan().all()
    assert "do not exclude each other (sigmoid)" in score.notes[0]


def test_passes_are_one_per_size_and_photo_and_one_for_the_map() -> None:
    model, images = wrapped(KIND), pixels(KIND, COUNT)
    runs = 0

    def count(module: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> None:
        nonlocal runs
        runs += len(output)

    handle = model.module.head.register_forward_hook(count)  # type: ignore[operator, union-attr]
    cv.certify(model, images, "random", 0.5)  # how tokens are dropped is found out once per model
    runs = 0
    certified = cv.certify(model, images, "random", 0.5)
    assert runs == COUNT * (1 + len(certified.tried) - 1), "all patches are the image itself"
    runs = 0
    explanation = cv.explain(model, images[:2], "random")
    assert runs == 2
    explanation.certify(certified)
    assert runs == 2, "marking needs no pass"
    explanation.certify(certified, test=True)
    assert runs == 2 + 2 * 2, "the photo's tokens are read once more, then the marked patches alone"
    handle.remove()


# The quantile


@pytest.mark.parametrize("keep", [0.5, 0.8, 0.9, 0.95, 2 / 3])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 9, 10, 19, 20, 37, 100])
def test_the_quantile_covers_exactly_as_often_as_it_says(count: int, keep: float) -> None:
    """Of n + 1 exchangeable sizes each is the new one equally often: the number covered is ⌈(n + 1) keep⌉, exactly."""
    rank = conformal_rank(count, keep)
    assert rank == math.ceil((count + 1) * Fraction(str(keep)))
    assert (rank <= count) == (count >= fewest_photos(keep))
    sizes = [float((7 * k + 3) % 1009) for k in range(count + 1)]  # all different, in no order
    with_ties = [size // 100 for size in sizes]
    for listed in (sizes, with_ties):
        others = [listed[:k] + listed[k + 1 :] for k in range(count + 1)]
        covered = sum(size <= conformal_quantile(rest, keep) for size, rest in zip(listed, others, strict=True))
        if rank > count:
            assert covered == count + 1, "the quantile is infinite"
        elif listed is sizes:
            assert covered == rank
        else:
            assert covered >= rank
        assert covered >= keep * (count + 1)


def test_a_tenth_is_a_tenth() -> None:
    """In floating point (n + 1) · 0.9 would be above a whole number, and the rank one too high."""
    assert [conformal_rank(count, 0.9) for count in (9, 19, 29, 69, 99)] == [9, 18, 27, 63, 90]
    assert math.ceil((1 - 0.1) * 70) != math.ceil(70 * 0.9) or conformal_rank(69, 0.9) == 63
    assert [fewest_photos(keep) for keep in (0.5, 0.8, 0.9, 0.95, 0.99, 0.3)] == [1, 4, 9, 19, 99, 1]


def test_q_is_the_quantile_of_the_sizes_and_a_size_that_was_tried() -> None:
    certified = certificate()
    sizes = [size for size in certified.sizes if size is not None]
    assert certified.q == sorted(sizes)[math.ceil(13 * 0.75) - 1]
    assert certified.q in certified.tried
    assert (certified.n, certified.alpha, certified.patches) == (COUNT, 0.25, PATCHES)


# What is marked


@pytest.mark.parametrize("statement", ["keep", "change"])
@pytest.mark.parametrize("method", NAMES)
def test_the_top_q_patches_are_marked_and_tested(method: str, statement: str) -> None:
    model, _ = model_and_images()
    certified = certificate(method, 0.5, statement=statement)
    images = pixels(KIND, 5, seed=9, dtype=torch.float64)
    marked = cv.explain(model, images, method).certify(certified, test=True)
    for row, order in enumerate(orders(method, images)):
        top = order[: certified.q]
        assert marked.patches[row].flatten().nonzero().flatten().tolist() == sorted(top)
        kept = top if statement == "keep" else order[certified.q :]
        then = answer(model.module, images[row : row + 1], kept)
        same = then == int(model.logits(images[row : row + 1]).argmax())
        assert marked.held[row] == (same if statement == "keep" else not same)
        assert marked.answers[row] == f"class {then}"
        assert f"On this photo it {'holds' if marked.held[row] else 'does not hold'}" in marked.sentences[row]
    assert not cv.explain(model, images, method).certify(certified).held


@pytest.mark.filterwarnings("ignore:flat-map")
def test_ties_are_broken_as_in_calibration() -> None:
    """A constant map ranks patches by the seed and the photo; the same photo has the same order in both places."""
    model, images = model_and_images()

    @cv.method("flat-map", output="tokens", aggregation=Total(), overwrite=True)
    def flat_map(layer: cv.extend.LayerView) -> Tensor:
        return torch.zeros_like(layer.x[..., 0])

    certified = cv.certify(model, images, "flat-map", 0.5)
    marked = cv.explain(model, images, "flat-map").certify(certified, test=True)
    assert marked.patches.flatten(1).sum(1).tolist() == [certified.q] * COUNT
    assert len({tuple(patches.flatten().tolist()) for patches in marked.patches}) > 1
    assert certified.q is not None
    for size, held in zip(certified.sizes, marked.held, strict=True):
        assert held or size is None or size > certified.q


def test_the_sentence_says_how_many_and_for_whom() -> None:
    model, images = model_and_images()
    certified = replace(certificate(), keep=0.9, sizes=(3,) * COUNT)
    assert certified.sentence == (
        "The model keeps its answer from the top 3 of 16 patches alone, for 90 % of photos like the calibration photos "
        "(12 of them)."
    )
    marked = cv.explain(model, images[:1], "ixg").certify(certified)
    assert str(marked) == (
        "The model keeps its answer from these 3 of 16 patches alone, for 90 % of photos like the calibration photos.\n"
        "Whether a photo is like the calibration photos is not checked."
    )
    whole = cv.explain(model, images[:1], "ixg").certify(replace(certified, sizes=(PATCHES,) * COUNT))
    assert whole.patches.all()
    assert "These are all patches: no fewer are certified." in whole.sentence


def test_a_class_and_a_contrast_are_about_their_photos_alone() -> None:
    model, images = model_and_images()
    logits = model.logits(images)
    answers = logits.argmax(1).tolist()
    common = max(set(answers), key=answers.count)
    of_class = cv.certify(model, images, "ixg", 0.5, target=common)
    chosen = [row for row, index in enumerate(answers) if index == common]
    assert len(of_class.names) == len(chosen) < COUNT
    assert list(of_class.sizes) == [certificate("ixg", 0.5).sizes[row] for row in chosen]
    assert f"photos like the calibration photos that the model calls class {common}" in of_class.sentence
    a, b = common, next(index for index in answers if index != common)
    pair = cv.Contrast(a, b)
    above = [row for row in range(COUNT) if logits[row, a] > logits[row, b]]
    of_pair = cv.certify(model, images, "ixg", 0.5, target=pair)
    assert of_pair.n == len(above)
    maps = cv.explain(model, images, "ixg", target=pair).maps.flatten(1)
    for row, size in zip(above, of_pair.sizes, strict=True):
        order = maps[row].argsort(descending=True).tolist()

        def holds(k: int, row: int = row, order: list[int] = order) -> bool:
            left = logits_left(model.module, images[row : row + 1], torch.tensor([sorted(order[:k])]))[0]
            return bool(left[a] > left[b])

        assert size == smallest_by_hand(holds, of_pair.tried)
    explanation = cv.explain(model, images[above[:1]], "ixg", target=pair)
    marked = explanation.certify(of_pair, test=True)
    assert marked.sentence.startswith(f"The model keeps class {a} − class {b} above 0 from these {of_pair.q} of 16")
    with pytest.raises(BadInput, match="and the certificate of"):
        cv.explain(model, images[above[:1]], "ixg").certify(of_pair)


# Regions


def test_regions_are_counted_with_the_exact_interval() -> None:
    """The patches that lie in the region by half or more alone, by hand; the interval is Clopper and Pearson's."""
    from scipy.stats import binomtest

    model, images = model_and_images()
    masks = torch.zeros(COUNT, 32, 32, dtype=torch.bool)
    for row, mask in enumerate(masks):
        mask[: 8 * (1 + row % 4), : 8 + 4 * (row % 3)] = True  # 4 pixels are half of a patch
    masks[3] = False
    certified = cv.certify(model, images, statement="region", masks=masks, keep=0.5)
    expected = []
    for row in range(COUNT):
        kept = [4 * r + c for r in range(1 + row % 4) for c in range((8 + 4 * (row % 3) + 4) // 8)]
        image = images[row : row + 1]
        expected.append(row != 3 and answer(model.module, image, kept) == int(model.logits(image).argmax()))
    assert list(certified.holds) == expected
    assert 0 < sum(expected) < COUNT
    interval = binomtest(sum(expected), COUNT).proportion_ci(0.95)
    assert certified.share == pytest.approx((interval.low, interval.high))
    assert certified.q is None
    assert f"on {sum(expected)} of 12 photos" in certified.sentence
    with pytest.raises(BadInput, match="about regions that were drawn"):
        cv.explain(model, images[:1], "ixg").certify(certified)


# What is left out, and refused


def test_copies_are_left_out() -> None:
    model, images = model_and_images()
    certified = cv.certify(model, torch.cat([images, images[:3]]), "ixg", 0.75)
    assert certified.sizes == certificate().sizes
    assert "3 photos are copies of others and were left out" in certified.notes
    assert certified.data == certificate().data


def test_a_map_with_nan_counts_as_failed_and_cannot_be_marked() -> None:
    model, images = model_and_images()
    broken = images[0].clone()

    @cv.method("nan-map", output="image", overwrite=True)
    def nan_map(trace: cv.Trace) -> Tensor:
        maps = torch.rand(len(trace.pixels), 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        maps[(trace.pixels == broken).flatten(1).all(1)] = math.nan
        return maps

    certified = cv.certify(model, images, "nan-map", 0.5)
    assert certified.sizes[0] is None
    assert None not in certified.sizes[1:]
    explanation = cv.explain(model, images[1:2], "nan-map")
    explanation.certify(certified)
    with pytest.raises(BadInput, match="has NaN or infinity"):
        replace(explanation, maps=explanation.maps * math.nan).certify(certified)


def test_photos_that_cannot_be_read_are_left_out(tmp_path: Path) -> None:
    from PIL import Image

    files = []
    for number in range(6):
        files.append(tmp_path / f"{number}.png")
        noise = torch.randint(0, 256, (32, 32, 3), generator=torch.Generator().manual_seed(number)).byte().numpy()
        Image.fromarray(noise).save(files[-1])
    files[2].write_bytes(b"no picture")
    errors: list[str] = []
    model = wrapped(KIND)
    dataset = as_dataset(files, model)
    certified = cv.certify(model, dataset, "ixg", 0.8, on_error=lambda name, error: errors.append(name))
    assert (certified.n, len(errors)) == (5, 1)
    with pytest.raises(BadInput, match="3 photos cannot certify anything for 80 %"):
        cv.certify(model, as_dataset(files[1:5], model), "ixg", 0.8, on_error=lambda name, error: None)


def test_nothing_is_certified_where_hiding_never_changes_the_answer() -> None:
    module = nn.Sequential(nn.Conv2d(3, 4, 8, 8), nn.Flatten(2))

    class Stubborn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.features = module

        def forward(self, image: Tensor) -> Tensor:
            scores = self.features(image).mean(-1).tanh()
            return torch.cat([scores, scores.new_full((len(scores), 1), 5.0)], 1)

    model = cv.wrap(Stubborn().eval(), size=(32, 32), layout=cv.Layout((4, 4), 0, "avg"), labels=list("abcde"))
    certified = cv.certify(model, pixels(KIND, 5), "random", 0.8, statement="change", removal="mean")
    assert certified.q is None
    assert certified.sizes == (None,) * 5
    assert "No number of top patches that was tried is enough for 80 %" in certified.sentence
    assert f"{certified.tried[-1]} of 16 are on 0 of 5 photos" in certified.sentence
    with pytest.raises(BadInput, match="names no number of patches"):
        cv.explain(model, pixels(KIND, 1), "random").certify(certified)


def sigmoid(model: cv.Model, images: Tensor) -> None:
    cv.certify(replace(model, activation="sigmoid"), images, "ixg", 0.5)


def embedding(model: cv.Model, images: Tensor) -> None:
    other, noise = double("open_clip-nonsquare", COUNT)
    cv.certify(other, noise, "ixg", 0.5, target=1)


@pytest.mark.parametrize(
    ("certify", "error", "message"),
    [
        (
            lambda m, x: cv.certify(m, x[:8], "ixg"),
            BadInput,
            r"8 photos cannot certify .*expected 9 calibration photos",
        ),
        (lambda m, x: cv.certify(m, x, "ixg", 0.99), BadInput, r"expected 99 calibration photos or more, ⌈1/α⌉ − 1"),
        (lambda m, x: cv.certify(m, x, "ixg", 1.0), BadInput, "keep=1.0 was given; expected a share"),
        (lambda m, x: cv.certify(m, x, "ixg", 0.0), BadInput, "keep=0.0 was given; expected a share"),
        (lambda m, x: cv.certify(m, x, "ixg", statement="kept"), UnknownName, "Did you mean 'keep'"),
        (lambda m, x: cv.certify(m, x, "ixg", sizes=1), BadInput, "sizes=1 was given"),
        (lambda m, x: cv.certify(m, x, "ixg", removal="nothing"), UnknownName, "There is no removal"),
        (lambda m, x: cv.certify(m, x, "ixg", target="label"), BadInput, "true class of a new photo is not known"),
        (lambda m, x: cv.certify(m, x, "ixg", target=[1] * COUNT), BadInput, "A list of targets was given"),
        (
            lambda m, x: cv.certify(m, x, "ixg", target=lambda s: s[:, 0]),
            NotApplicable,
            "neither a class nor a contrast",
        ),
        (lambda m, x: cv.certify(m, x, "ixg", target=cv.Neuron(1, 2)), NotApplicable, "reads another output"),
        (lambda m, x: cv.certify(m, x, statement="region"), BadInput, "without regions; expected masks="),
        (lambda m, x: cv.certify(m, x, "ixg", statement="region"), BadInput, "drawn by a person; expected no method"),
        (sigmoid, NotApplicable, "do not exclude each other"),
        (embedding, NotApplicable, "gives no answer that could be kept"),
    ],
)
def test_what_cannot_be_certified_is_refused(
    certify: Callable[[cv.Model, Tensor], Any], error: type[ClairError], message: str
) -> None:
    with pytest.raises(error, match=message):
        certify(*model_and_images())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"method": "genatt"}, "for maps of 'ixg', and these are of 'genatt'; expected the same"),
        ({"seed": 1}, "made with seed 1, and the certificate with 0"),
        ({"score": "prob"}, "explain the score 'prob', and the certificate is for maps of 'logit'"),
        ({"maps": torch.rand(1, 8, 8)}, r"maps are 8 × 8 of images of 32 × 32 pixels, .* is for 4 × 4"),
        ({"pixels": torch.zeros(1, 3, 48, 48)}, "of images of 48 × 48 pixels"),
    ],
)
def test_maps_of_another_kind_are_refused(change: dict[str, Any], message: str) -> None:
    model, images = model_and_images()
    explanation = cv.explain(model, images[:1], change.get("method", "ixg"), score=change.get("score"))
    more = {name: value for name, value in change.items() if name not in ("method", "score")}
    with pytest.raises(BadInput, match=message):
        replace(explanation, **more).certify(certificate())


def test_maps_of_another_model_or_class_are_refused() -> None:
    model, images = model_and_images()
    other = wrapped(KIND, torch.float64)
    with torch.no_grad():
        other.module.head.bias += 1  # type: ignore[union-attr, operator]
    with pytest.raises(BadInput, match="with other weights"):
        cv.explain(other, images[:1], "ixg").certify(certificate())
    answers = int(model.logits(images[:1]).argmax())
    wrong = (answers + 1) % model.logits(images[:1]).shape[1]
    with pytest.raises(BadInput, match=f"is of class {wrong}, and the model's answer is class {answers}"):
        cv.explain(model, images[:1], "ixg", target=wrong).certify(certificate())
    cv.explain(model, images[:1], "random", target=wrong).certify(certificate("random"))  # the same for every class
    prepared = replace(model, preprocess=replace(model.preprocess, mean=(0.4,) * 3))
    with pytest.raises(BadInput, match="were prepared otherwise"):
        cv.explain(prepared, images[:1], "ixg").certify(certificate())


# Files


def test_a_certificate_is_read_as_it_was_written(tmp_path: Path) -> None:
    model, images = model_and_images()
    file = certificate().save(tmp_path / "certificate.json")
    assert Certificate.load(file) == certificate()
    content = json.loads(file.read_text())
    assert (content["q"], content["n"]) == (certificate().q, COUNT)
    marked = cv.explain(model, images[:2], "ixg").with_certificate(file, test=True)
    stored = cv.Explanation.load(marked.save(tmp_path / "maps.npz"))
    assert stored.certified is not None
    assert marked.certified is not None
    assert torch.equal(stored.certified.patches, marked.certified.patches)
    assert str(stored.certified) == str(marked.certified)
    assert stored.certified.certificate == certificate()
    with pytest.raises(BadInput, match="holds no model"):
        stored.certify(certificate(), test=True)
    assert stored.certify(certificate(), test=True, model=model).held == marked.certified.held
    table = certificate().to_pandas()
    assert table["patches"].tolist() == list(certificate().sizes)
    assert table["holds"].sum() == sum(size <= certificate().q for size in certificate().sizes)  # type: ignore[operator]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": 1}, "was changed after cv.certify wrote it: its 'q' is 1"),
        ({"keep": 0.5}, "was changed after cv.certify wrote it"),
        ({"kind": "clairvit recipe"}, "is JSON, and no certificate"),
        ({"format": 99}, "is a certificate of format 99"),
        ({"sizes": None}, "is a damaged certificate"),
    ],
)
def test_a_file_that_was_changed_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    file = certificate("ixg", 0.9).save(tmp_path / "certificate.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(BadInput, match=message):
        Certificate.load(file)


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="cannot be read"):
        Certificate.load(tmp_path / "none.json")
    file = tmp_path / "text.json"
    file.write_text("no json")
    with pytest.raises(BadInput, match="is not JSON"):
        Certificate.load(file)


def test_code_that_was_changed_is_refused() -> None:
    model, images = model_and_images()

    def registered(power: int) -> None:
        @cv.method("power-map", output="tokens", aggregation=Total(), overwrite=True)
        def power_map(layer: cv.extend.LayerView) -> Tensor:
            return layer.x.norm(dim=-1) ** power

    registered(1)
    certified = cv.certify(model, images, "power-map", 0.5)
    assert certified.code
    cv.explain(model, images[:1], "power-map").certify(certified)
    registered(3)
    with pytest.raises(BadInput, match="was changed after the certificate was made"):
        cv.explain(model, images[:1], "power-map").certify(certified)


def test_the_default_method_is_that_of_explain() -> None:
    model, images = model_and_images()
    assert cv.certify(model, images[:4], keep=0.5).method == cv.explain(model, images[:1]).method
