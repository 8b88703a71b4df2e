"""Perturbation methods on the command line: how many samples, how patches are taken away, what it cost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clairvit.cli import main
from clairvit.cli.arguments import with_method_options
from clairvit.errors import BadInput

Captured = pytest.CaptureFixture[str]
SMALL = ["--model", "timm:vit_tiny_patch16_224", "--no-pretrained"]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_samples_and_removal_reach_the_method(capsys: Captured) -> None:
    options = ["--method", "lime", "--samples", "30", "--removal", "black", "--seed", "5", "--json"]
    assert main(["explain", "demo", *options, *SMALL]) == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    assert result["method"] == "lime(removal=black,samples=30)"
    assert (result["seed"], result["score"]) == (5, "prob")
    assert result["cost"]["forwards"] == 30, "the first sample is the image itself"
    (error,) = result["standard_error"]
    assert error["max"] > 0
    (values,) = result["standard_error_maps"]
    assert (len(values), len(values[0])) == (14, 14)


def test_a_score_that_is_named_is_the_one_explained(capsys: Captured) -> None:
    assert main(["explain", "demo", "--method", "lime(samples=10)", "--score", "logit", "--json", *SMALL]) == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    assert result["score"] == "logit"


def test_what_it_cost_is_printed(capsys: Captured) -> None:
    assert main(["explain", "demo", "--method", "lime", "--samples", "12", "--batch-size", "4", *SMALL]) == 0
    printed = capsys.readouterr().out
    assert "It took 12 forward and" in printed
    assert "standard error" in printed


def test_methods_without_the_option_say_which_they_have(capsys: Captured) -> None:
    assert main(["explain", "demo", "--method", "rollout", "--samples", "12"]) == 2
    assert "'rollout' has no option 'samples' here; it has fusion" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--removal", "blurr", "Did you mean 'blur'?"),
        ("--autocast", "int8", "autocast='int8' was given; expected bfloat16 or float16"),
        ("--samples", "0", "greater than or equal to 1"),
        ("--batch-size", "0", "greater than or equal to 1"),
    ],
)
def test_bad_values_are_refused(option: str, value: str, message: str, capsys: Captured) -> None:
    assert main(["explain", "demo", "--method", "lime", option, value]) == 2
    assert message in capsys.readouterr().err


def test_compare_hands_options_to_the_methods_that_have_them() -> None:
    texts = ["rollout", "lime", "kernelshap(samples=9)", "leave-one-out"]
    assert list(map(str, with_method_options(texts, samples=50, removal="mean"))) == [
        "rollout",
        "lime(removal=mean,samples=50)",
        "kernelshap(removal=mean,samples=9)",
        "leave-one-out(removal=mean)",
    ]
    assert list(map(str, with_method_options(texts, samples=None, removal=None))) == texts
    with pytest.raises(BadInput, match="--samples 50 was given, and none of the methods takes samples"):
        with_method_options(["rollout", "leave-one-out"], samples=50)


def test_rougher_passes_give_about_the_same_map(capsys: Captured) -> None:
    maps = []
    for rough in ([], ["--autocast", "bf16"]):
        assert main(["explain", "demo", "--method", "lime(samples=200,cells=7)", "--json", *rough]) == 0
        maps.append(json.loads(capsys.readouterr().out)["results"][0]["maps"][0])
    exact_values, rough_values = ([value for row in rows for value in row] for rows in maps)
    assert exact_values != rough_values
    spread = max(exact_values) - min(exact_values)
    assert max(abs(a - b) for a, b in zip(exact_values, rough_values, strict=True)) < 0.1 * spread


def test_a_budget_refines_every_image_by_as_many_passes(capsys: Captured) -> None:
    """A time in which nothing fits runs the passes that show how long one takes; later images get as many."""
    options = ["--method", "genatt", "--budget", "1ms", "--json", *SMALL]
    assert main(["explain", "demo", "demo", *options]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    assert [result["method"] for result in results] == ["refine(genatt,passes=16)"] * len(results)
    assert results[0]["refinement"][0].startswith("After 16 passes, ")
    assert main(["explain", "demo", "--budget", "1s", "--passes", "8", *SMALL]) == 2
    assert "--passes and --budget were given" in capsys.readouterr().err
