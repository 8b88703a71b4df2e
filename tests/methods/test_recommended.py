"""The default method, its fallbacks, and the recommendations."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import clairvit as cv
from clairvit.cli import main
from clairvit.errors import BadInput
from clairvit.methods.recommended import (
    COMPARED,
    CONTRASTED,
    DefaultMethod,
    default_method,
    default_methods,
    defaults_for,
    kind_of_model,
    recommended_methods,
)
from clairvit.methods.spec import resolve_method
from clairvit.metrics.confidence_intervals import mean_interval
from clairvit.tracing.structure import model_structure
from helpers.broken_models import quantised, wrapped
from helpers.scripts import load_script
from helpers.tiny_models import STRANGE, cnn, strange

DOCS = Path(__file__).parents[2] / "docs"


def test_every_recommended_method_exists() -> None:
    for item in (*default_methods(), *recommended_methods()):
        assert resolve_method(item.method).text == item.method
        assert item.reason


def test_the_default_is_the_first_of_the_list() -> None:
    explanation = cv.explain("pets", "demo")
    assert explanation.method == default_method() == "attnlrp+plus"
    assert torch.equal(explanation.maps, cv.explain("pets", "demo", "attnlrp+plus").maps)
    assert not any("default" in note for note in explanation.notes)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("swin", "hierarchical"), ("hf-swin", "hierarchical"), ("maxvit", "hierarchical"), ("xcit", "plain")],
)
def test_hierarchical_models_have_a_default_of_their_own(kind: str, expected: str) -> None:
    model = cv.wrap(strange(STRANGE[kind].make), name=kind)
    images = torch.randn(1, 3, *STRANGE[kind].size, generator=torch.Generator().manual_seed(1))
    assert kind_of_model(model_structure(model, images)) == expected
    method = next(item.method for item in default_methods() if item.models == expected)
    assert cv.explain(model, images, target=1).method == method


def test_a_cnn_has_a_default_of_its_own() -> None:
    model, images = cv.wrap(cnn().eval()), torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    explanation = cv.explain(model, images, target=1)
    assert explanation.method == "saliency"
    assert "saliency was used, the default for this kind of model" in explanation.notes[-1]
    assert torch.equal(explanation.maps, cv.explain(model, images, "saliency", target=1).maps)


def test_texts_and_similar_images_have_a_default_of_their_own() -> None:
    """On a plain ViT; a class of the same model keeps the usual one, and what is compared says why."""
    images = torch.randn(1, 3, 224, 224, generator=torch.Generator().manual_seed(1))
    methods = {item.models: item.method for item in default_methods()}
    alone, against = methods[COMPARED], methods[CONTRASTED]
    assert alone != against
    vector = torch.randn(192, generator=torch.Generator().manual_seed(2))
    cat, dog = cv.Text("cat", embedding=vector), cv.Text("dog", embedding=vector.flip(0))
    minus_dog = cv.Text("cat", embedding=vector, against=vector.flip(0))
    for target, expected in (
        *((cat, alone), ([cat], alone), (cv.Similar(images.flip(-1)), alone)),
        *((minus_dog, against), (cv.Contrast(cat, dog), against), ([minus_dog], against)),
    ):
        explanation = cv.explain("pets", images, target=target)
        assert explanation.method == expected
        assert f"{expected} was used, the default for this target" in explanation.notes[-1]
    both = cv.explain("pets", images, targets=[cat, minus_dog])
    assert {explanation.method for explanation in both} == {alone}  # a method for all: the one that does for each
    assert cv.explain("pets", images).method == default_method()
    assert cv.explain("pets", images, target=cv.Contrast(1, 2)).method == default_method()
    assert cv.Text("a cat").subtracts
    assert not cv.Text("a cat", against=None).subtracts
    swin = cv.wrap(strange(STRANGE["swin"].make), name="swin")
    pixels = torch.randn(1, 3, *STRANGE["swin"].size, generator=torch.Generator().manual_seed(1))
    assert kind_of_model(model_structure(swin, pixels), compares=CONTRASTED) == "hierarchical"


def quick(*methods: str) -> tuple[DefaultMethod, ...]:
    return tuple(DefaultMethod("plain", method, "reason") for method in methods)


def test_a_quantised_model_is_explained_as_a_black_box(monkeypatch: pytest.MonkeyPatch) -> None:
    model = wrapped(quantised())
    images = torch.randn(1, 3, *model.preprocess.size, generator=torch.Generator().manual_seed(0))
    chosen = defaults_for(model_structure(model, images))
    assert [item.method for item in chosen] == ["lime"]
    monkeypatch.setattr("clairvit.methods.explain.defaults_for", lambda *_, **__: quick("lime(samples=24)"))
    assert cv.explain(model, images, target=1).method == "lime(samples=24)"


def test_a_method_that_does_not_fit_gives_way_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clairvit.methods.explain.defaults_for", lambda *_, **__: quick("cam", "ixg", "lime"))
    explanation = cv.explain("pets", ["demo", "demo"])
    assert explanation.method == "ixg"
    assert "The default cam does not fit this model" in explanation.notes[-2]
    assert explanation.notes[-1] == "ixg was used, the default for this kind of model: reason."


def test_a_data_set_is_explained_by_default() -> None:
    pixels = torch.randn(3, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    dataset = torch.utils.data.TensorDataset(pixels, torch.zeros(3))
    explanation = cv.explain("pets", dataset)
    assert (explanation.method, len(explanation)) == ("attnlrp+plus", 3)


def test_options_belong_to_the_default_method() -> None:
    with pytest.raises(LookupError, match="attnlrp"):
        cv.explain("pets", "demo", fusion="max")


def test_a_wrong_target_is_no_reason_to_fall_back() -> None:
    with pytest.raises(BadInput):
        cv.explain("pets", "demo", target=99)


RESULTS = {
    name: json.loads((DOCS / "results" / f"{name}.json").read_text(encoding="utf-8")) for name in ("pets", "dinov2")
}


def evidence_of(method: str) -> str:
    """Return the published means of a method, rounded, as recommendations.toml writes them."""
    means = {
        name: {record["metric"]: record["mean"] for record in run["scores"] if record["method"] == method}
        for name, run in RESULTS.items()
    }
    built_in, other = means["pets"], means["dinov2"]
    text = f"ins − del {built_in['insertion-deletion']:.3f}, AP {built_in['ap']:.3f}"
    return text + (f" (DINOv2-S {other['insertion-deletion']:.3f}, {other['ap']:.3f})" if other else "")


def test_the_evidence_is_that_of_the_published_results() -> None:
    """Figures in recommendations.toml and docs/which-method.md are those of docs/results/*.json, rounded."""
    page = (DOCS / "which-method.md").read_text(encoding="utf-8")
    for item in recommended_methods():
        assert item.evidence == evidence_of(item.method), item.purpose
        assert f"| {item.evidence} |" in page, item.purpose
    for method in ("calibrated", "rollout"):
        assert evidence_of(method) in page


@pytest.mark.parametrize("name", RESULTS)
@pytest.mark.parametrize("metric", ["insertion-deletion", "insertion-deletion(removal=mean)", "srg"])
def test_no_one_pass_method_is_surely_more_faithful_than_the_default(name: str, metric: str) -> None:
    run = RESULTS[name]
    rivals = [paired for paired in run["to_default"] if paired["metric"] == metric and paired["n"]]
    assert {paired["method"] for paired in rivals} >= {"attnlrp", "attnlrp+skipplus", "genatt", "reslrp+plus"}
    for paired in rivals:
        if paired["method"] in ("calibrated", *run["baselines"]) or resolve_method(paired["method"]).cost.forwards > 1:
            continue
        assert paired["interval"][0] <= 0, f"{paired['method']} is more faithful than {default_method()}"


def test_the_default_has_the_highest_mean_of_one_pass_on_the_built_in_model() -> None:
    means = {
        record["method"]: record["mean"]
        for record in RESULTS["pets"]["scores"]
        if record["metric"] == "insertion-deletion" and record["method"] != "calibrated"
    }
    one_pass = [method for method in means if resolve_method(method).cost.forwards <= 1]
    assert max(one_pass, key=means.__getitem__) == default_method()


def test_the_cheap_method_is_ahead_of_rollout_on_both_models() -> None:
    cheap = next(item.method for item in recommended_methods() if item.purpose == "cheap")
    for run in RESULTS.values():
        means = {(record["method"], record["metric"]): record["mean"] for record in run["scores"]}
        for metric in ("insertion-deletion", "insertion-deletion(removal=mean)", "srg", "ap"):
            assert means[cheap, metric] > means["rollout", metric]


def table_of(title: str) -> dict[str, list[float]]:
    """Return the means by method of the table below a title of docs/which-method.md."""
    text = (DOCS / "which-method.md").read_text(encoding="utf-8").partition(title)[2].partition("\n\n")[2]
    rows = [line.split("|")[1:-1] for line in text.partition("\n\n")[0].splitlines() if line.startswith("| `")]
    return {name.strip(" `"): [float(cell.split("±")[0]) for cell in cells] for name, *cells in rows}


@pytest.mark.parametrize(
    ("models", "title", "measures"),
    [("hierarchical", "**Swin, ", 2), ("cnn", "**ResNet-18, ", 1)],
)
def test_fallbacks_are_the_most_faithful_of_few_passes_where_they_were_measured(
    models: str, title: str, measures: int
) -> None:
    """By the mean of insertion − deletion with tokens and with pixels; the evidence has the published figures."""
    item = next(item for item in default_methods() if item.models == models)
    table = table_of(title)
    quick = [
        name for name in table if resolve_method(name).cost.backwards <= 1 and resolve_method(name).cost.forwards <= 1
    ]
    assert {"attnlrp+plus", "decompx+plus", "saliency", "gradcam", "ixg"} <= set(quick)
    assert max(quick, key=lambda name: sum(table[name][:measures])) == item.method
    assert re.findall(r"0\.\d{3}", item.evidence) == [f"{mean:.3f}" for mean in table[item.method][:measures]]


def test_the_default_without_gradients_is_the_most_faithful_on_photos_and_shows_its_weaker_figure_too() -> None:
    item = next(item for item in default_methods() if item.models == "no gradient")
    photos, drawings = table_of("**`pets` in int8**"), table_of("**`parts` in int8**")
    assert {"random", "center", "alti", "rollout", "leave-one-out"} <= set(photos) == set(drawings)
    assert max(photos, key=lambda name: photos[name][0]) == item.method
    figures = [f"{table[item.method][0]:.3f}" for table in (photos, drawings)]
    assert re.findall(r"0\.\d{3}", item.evidence) == figures


def test_the_default_has_the_evidence_of_the_faithful_method() -> None:
    plain = next(item for item in default_methods() if item.models == "plain")
    assert plain.evidence == evidence_of(default_method())


CLIP = load_script("benchmarks/clip_truth.py")
CLIP_SCORES = json.loads((DOCS / "results" / "clip.json").read_text(encoding="utf-8"))


def clip_means(score: str, metric: str, *methods: str) -> list[str]:
    """Return the means of methods over all photos of docs/results/clip.json."""
    table = CLIP.joined(CLIP_SCORES, score)
    return [f"{np.mean(list(table[method][metric].values())):.3f}" for method in methods]


def test_the_evidence_for_texts_is_that_of_the_file() -> None:
    """On the half that judges, too, each default is surely ahead of the other where it is used."""
    items = {item.models: item for item in default_methods()}
    alone, against = items[COMPARED], items[CONTRASTED]
    methods = (alone.method, against.method, "center")
    assert re.findall(r"0\.\d{3}", alone.evidence) == clip_means("cosine", "ap", *methods)
    expected = [*clip_means("neutral", CLIP.IN_COSINE, *methods[1::-1]), *clip_means("neutral", "ap", *methods[1::-1])]
    assert re.findall(r"\d\.\d{3}", against.evidence) == expected
    page = (DOCS / "which-method.md").read_text("utf-8")
    assert alone.evidence in page
    assert against.evidence in page
    neutral, cosine = (CLIP.joined(CLIP_SCORES, score) for score in ("neutral", "cosine"))

    def gap(table: dict[str, Any], metric: str, better: str, half: str) -> tuple[float, float]:
        other = against.method if better == alone.method else alone.method
        return mean_interval(np.array(CLIP.paired(table[better][metric], table[other][metric], half)))

    for half in ("judge", "all"):
        assert gap(neutral, CLIP.IN_COSINE, against.method, half)[0] > 0
        assert gap(neutral, "ap", against.method, half)[0] < 0 < gap(neutral, "ap", against.method, half)[1]
        assert gap(cosine, "ap", alone.method, half)[0] > 0


def test_the_tables_of_the_page_on_clip_are_those_of_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    CLIP.print_tables(CLIP_SCORES)
    why = load_script("benchmarks/clip_why.py")
    why.print_report(json.loads((DOCS / "results" / "clip-why.json").read_text(encoding="utf-8")))
    page = (DOCS / "clip.md").read_text("utf-8")
    printed = [line for line in capsys.readouterr().out.splitlines() if line and "median" not in line]
    assert len(printed) > 20
    assert [line for line in printed if line not in page] == []


def test_the_list_of_methods_says_what_is_used_where_none_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["methods"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "Used where none is named" in printed
    assert main(["methods", "--json"]) == 0
    records = {record["name"]: record for record in json.loads(capsys.readouterr().out)}
    for item in default_methods():
        assert f"{item.models} {item.method} " in printed
        stated_fields = ("models", "method", "reason", "evidence")
        stated = {field: getattr(item, field) for field in stated_fields}
        assert stated in records[resolve_method(item.method).method.name]["default_for"]
    assert records["rollout"]["default_for"] == []


def test_the_localising_method_has_the_highest_mean_average_precision_of_both_models() -> None:
    precision = [
        {record["method"]: record["mean"] for record in run["scores"] if record["metric"] == "ap"}
        for run in RESULTS.values()
    ]
    shared = set(precision[0]) & set(precision[1])
    best = max(shared, key=lambda method: sum(means[method] for means in precision))
    assert best == next(item.method for item in recommended_methods() if item.purpose == "localising")
