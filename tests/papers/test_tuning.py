"""FocusViT's m*: the start with the best mean of `evaluate` on images that are then not scored; it is found again."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import timm
import torch

import clairvit as cv
from clairvit.bench.plan import DataConfig, ModelConfig, Plan
from clairvit.bench.store import Store
from clairvit.data.dataset import ImageDataset, as_dataset
from clairvit.errors import BadInput, UnknownName
from clairvit.metrics.score import Scores
from clairvit.papers.paper import Paper, Tuning, find_paper
from clairvit.papers.paper_file import read_paper
from clairvit.papers.reproduce import Reproduction, reproduce
from clairvit.papers.setup import LoadedData, ReproductionConfig, replace_methods
from clairvit.papers.split import portion_size, split_off
from clairvit.reports.render import to_markdown
from clairvit.reports.reproduction import reproduction_json, reproduction_report
from clairvit.selection.start_layer import start_at
from helpers.rounding import assert_same

DEPTH = 5
CLASSES = 3
NAMES = ("FocusViT", "FocusViT, m = ceil(L/2)", "FocusViT, uniform heads")


def deep_model() -> cv.Model:
    """Return a ViT of five blocks with large weights, so that layers differ, in float64."""
    torch.manual_seed(3)
    module = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=16, depth=DEPTH, num_heads=2, num_classes=CLASSES
    )
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return cv.wrap(module.double(), name="deep", size=32)


MODEL = deep_model()


def images(count: int) -> ImageDataset:
    pixels = torch.randn(count, 3, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    return as_dataset([*pixels], MODEL, labels=[row % CLASSES for row in range(count)])


@pytest.fixture(scope="module")
def paper() -> Paper:
    """FocusViT without what takes long: its own rows, by the measure that takes no pass."""
    whole = find_paper("focusvit")
    entries = tuple(entry for entry in whole.methods if entry.name in (*NAMES, "Attention"))
    return replace(whole, methods=entries, measures=(whole.measures[2],), tables=(), claims=whole.claims[2:3])


@pytest.fixture(scope="module")
def focused(paper: Paper) -> Paper:
    """The same with the claim that FocusViT has the lowest sparseness, against Attention alone."""
    claim = replace(paper.claims[0], pairs=(("FocusViT", "Attention"),))
    return replace(paper, claims=(claim,))


def ran(
    paper: Paper, folder: Path, count: int = 12, plans: list[Plan] | None = None, **options: object
) -> Reproduction:
    config = ReproductionConfig(paper, ModelConfig("tiny"), DataConfig("folder:here"), **options)  # type: ignore[arg-type]
    data = LoadedData(images(count), "generated", classes=tuple(row % CLASSES for row in range(count)))
    watch = (lambda plan: None) if plans is None else plans.append
    return reproduce(config, Store.open(folder), model=MODEL, data=data, on_plan=watch)


@pytest.fixture(scope="module")
def result(focused: Paper, tmp_path_factory: pytest.TempPathFactory) -> Reproduction:
    return ran(focused, tmp_path_factory.mktemp("tuned") / "store", validation=5)


def by_name(result: Reproduction) -> Mapping[str, str]:
    return {entry.name: entry.method for entry in result.config.paper.methods}


def scored_names(result: Reproduction) -> tuple[int, int]:
    assert result.tuned is not None
    return result.tuned.images, result.images


def test_the_start_is_the_best_on_the_validation_images_alone(result: Reproduction) -> None:
    """By `evaluate`, one start at a time, on the images that the seed splits off."""
    assert result.tuned is not None
    chosen, others = split_off([row % CLASSES for row in range(12)], 5, 0, "papers/validation")
    assert sorted([*chosen, *others]) == list(range(12))
    validation = images(12).take(chosen)
    values = []
    for layer in range(DEPTH):
        score = cv.evaluate(MODEL, validation, f"focusvit(m={layer})", "insertion-deletion")
        values.append(score.values.double().numpy())
    means = np.array([row.mean() for row in values])
    start = result.tuned.start
    assert_same(torch.tensor(start.means), torch.from_numpy(means))
    errors = [row.std(ddof=1) / math.sqrt(len(row)) for row in values]
    assert_same(torch.tensor(start.standard_errors), torch.tensor(errors, dtype=torch.float64), magnitude=1.0)
    assert start.best == int(means.argmax())
    assert len(set(means.round(6))) == DEPTH, "the starts differ, so that this can fail"
    assert start.half == math.ceil(DEPTH / 2)
    assert scored_names(result) == (5, 7)


def test_only_the_other_images_are_scored_with_the_chosen_start(result: Reproduction) -> None:
    assert result.tuned is not None
    best = result.tuned.start.best
    methods = by_name(result)
    assert methods["FocusViT"] == start_at("focusvit", best, DEPTH)
    assert methods["FocusViT, m = ceil(L/2)"] == "focusvit"
    assert methods["FocusViT, uniform heads"] == start_at("focusvit(head_weights=uniform)", best, DEPTH)
    _, others = split_off([row % CLASSES for row in range(12)], 5, 0, "papers/validation")
    metric = result.config.paper.measures[0].metric
    for name in NAMES:
        score = cv.evaluate(MODEL, images(12).take(others), methods[name], metric)
        cell = next(row.cells["Sparseness"] for row in result.rows if row.entry.name == name)
        assert cell.images == 7
        assert cell.ours == pytest.approx(score.mean, abs=1e-12)


def test_the_claim_is_judged_on_the_chosen_start(result: Reproduction) -> None:
    _, others = split_off([row % CLASSES for row in range(12)], 5, 0, "papers/validation")
    metric = result.config.paper.measures[0].metric
    scores = cv.evaluate(MODEL, images(12).take(others), [by_name(result)["FocusViT"], "rollout"], [metric])
    assert isinstance(scores, Scores)
    tuned, rollout = (score.mean for score in scores.values())
    assert result.claim_results[0].verdict == ("holds" if tuned < rollout else "does not hold")


def test_report_and_json_have_the_curve(result: Reproduction) -> None:
    assert result.tuned is not None
    start = result.tuned.start
    text = to_markdown(reproduction_report(result))
    rows = [line for line in text.splitlines() if "chosen, m*" in line.replace("\\", "")]
    assert len(rows) == 1
    assert rows[0].startswith(f"| {start.best} | {start.means[start.best]:.4g} |")
    assert "was chosen on 5 images that are not scored; 7 others are." in text
    assert "So few images may choose another layer" in text
    document = reproduction_json(result)["tuned"]
    assert document["best"] == start.best
    assert [point["mean"] for point in document["curve"]] == list(start.means)
    assert [point["standard_error"] for point in document["curve"]] == list(start.standard_errors)
    assert document["methods"] == ["FocusViT", "FocusViT, uniform heads"]


def test_what_was_chosen_is_found_again(focused: Paper, tmp_path: Path) -> None:
    """The second run computes neither the candidates nor the scores."""
    plans: list[Plan] = []
    first = ran(focused, tmp_path / "store", plans=plans, validation=4)
    again = ran(focused, tmp_path / "store", plans=plans, validation=4)
    assert [plan.done for plan in plans[:2]] == [0, 0]
    assert [plan.units for plan in plans[2:]] == [(), ()]
    assert first.tuned is not None
    assert again.tuned is not None
    assert first.tuned.start.means == again.tuned.start.means
    assert repr(first.rows) == repr(again.rows)


def test_none_are_split_off_where_that_is_asked_for(focused: Paper, tmp_path: Path) -> None:
    result = ran(focused, tmp_path / "store", count=4, validation=0)
    assert result.tuned is None
    assert result.images == 4
    assert by_name(result)["FocusViT"] == "focusvit"
    assert any("it is the middle one" in sentence for _, sentence in result.differences)


def test_the_papers_share_is_the_default(focused: Paper, tmp_path: Path) -> None:
    assert scored_names(ran(focused, tmp_path / "store", count=10)) == (2, 8)
    assert portion_size(0.2, 10) == 2
    assert portion_size(0.01, 10) == 1, "at least one"
    assert portion_size(7, 10) == 7


def test_parts_have_their_share_of_each_class() -> None:
    strata = [0] * 20 + [1] * 10
    part, rest = split_off(strata, 6, 0, "papers/validation")
    assert sorted([*part, *rest]) == list(range(30))
    assert sum(row < 20 for row in part) == 4
    assert split_off(strata, 6, 1, "papers/validation") != (part, rest)
    assert split_off(strata, 6, 0, "papers/training") != (part, rest), "parts for different purposes are independent"
    assert split_off(strata, 0, 0, "papers/validation") == ([], list(range(30)))


def test_a_method_that_is_named_is_not_tuned(focused: Paper, tmp_path: Path) -> None:
    named = replace_methods(focused, ["FocusViT=focusvit(m=1)"])
    assert named.tune is None
    result = ran(named, tmp_path / "store", count=3)
    assert (result.images, result.tuned) == (3, None)
    others = replace_methods(find_paper("focusvit"), ["LIME=rollout"]).tune
    assert others == find_paper("focusvit").tune


def test_a_model_without_attention_starts_nowhere(focused: Paper, tmp_path: Path) -> None:
    model = cv.wrap(_convolutions(), name="cnn", size=32)
    plain = replace(focused, measures=focused.measures, claims=())
    config = ReproductionConfig(plain, ModelConfig("cnn"), DataConfig("folder:here"))
    pixels = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    data = LoadedData(as_dataset([*pixels], model), "generated")
    result = reproduce(config, Store.open(tmp_path / "store"), model=model, data=data)
    assert result.tuned is None
    assert result.images == 2
    assert any("the model has no attention layers" in sentence for _, sentence in result.differences)


def _convolutions() -> torch.nn.Module:
    layers = torch.nn
    return layers.Sequential(
        layers.Conv2d(3, 4, 3, stride=8),
        layers.ReLU(),
        layers.AdaptiveAvgPool2d(1),
        layers.Flatten(),
        layers.Linear(4, 3),
    )


def test_what_cannot_be_split_off_is_refused(focused: Paper, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="5 of 5 images were to choose the start layer of FocusViT"):
        ran(focused, tmp_path / "a", count=5, validation=5)
    with pytest.raises(BadInput, match="expected a number of images, such as 200, or a share"):
        ran(focused, tmp_path / "b", count=5, validation=1.5)
    joita = ReproductionConfig(find_paper("joita"), ModelConfig("tiny"), DataConfig("folder:here"), validation=3)
    masks = torch.zeros(2, 32, 32, dtype=torch.bool)
    masks[:, :9] = True
    data = LoadedData(as_dataset([*torch.randn(2, 3, 32, 32).double()], MODEL, masks=masks), "generated")
    with pytest.raises(BadInput, match="nothing of 'joita' is chosen on validation images"):
        reproduce(joita, Store.open(tmp_path / "c"), model=MODEL, data=data)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('method = "Focus"', "names 'Focus', which the paper does not have"),
        ('method = "LIME"', "names 'LIME': "),
        ('metric = "insertion-deletions"', "names a metric that does not exist"),
        ("share = 1.5", "takes a share of 1.5 of the images"),
    ],
)
def test_a_wrong_tuning_is_no_paper(tmp_path: Path, line: str, problem: str) -> None:
    source = Path(cv.__file__).parent / "papers" / "focusvit.toml"
    key = line.partition(" ")[0]
    before, start, after = source.read_text(encoding="utf-8").partition("[tune]")
    block, end, rest = after.partition("[table_of_dataset]")
    lines = [text for text in block.splitlines() if not text.startswith(f"{key} =")]
    (tmp_path / "wrong.toml").write_text(f"{before}{start}{chr(10).join(lines)}\n{line}\n{end}{rest}", encoding="utf-8")
    with pytest.raises((BadInput, UnknownName), match=r"wrong\.toml, line \d+: .*" + problem):
        read_paper(tmp_path / "wrong.toml")


def test_focusvit_tunes_by_insertion_minus_deletion() -> None:
    assert find_paper("focusvit").tune == Tuning(
        "FocusViT",
        "insertion-deletion",
        "section 3.1, second observation",
        0.2,
        ("FocusViT, uniform heads",),
    )
