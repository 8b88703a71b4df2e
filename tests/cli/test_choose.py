"""`clairvit choose` and `explain --recipe` end to end: the numbers are cv.choose's, mistakes one sentence."""

from __future__ import annotations

import json
import math
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import clairvit as cv
from clairvit.bench.plan import DataConfig
from clairvit.cli import main
from clairvit.cli.annotations import data_set, sample_images
from clairvit.data.dataset import ImageDataset, as_dataset
from clairvit.errors import BadInput
from helpers.small_study import ARCHITECTURE, weights
from helpers.three_photos import photos as photos

Captured = pytest.CaptureFixture[str]
METRIC = "insertion-deletion(steps=1)"
QUICK = ("--method", "rollout,genatt+skipplus", "--metric", METRIC)


def stored(path: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
    return document


def refusal(capsys: Captured, *arguments: str) -> str:
    """Run, expect status 2 and exactly one sentence of ours on stderr."""
    assert main([*arguments]) == 2
    printed, errors = capsys.readouterr()
    assert printed == ""
    assert errors.startswith("clairvit: ")
    assert errors.count("\n") == 1, errors
    return errors


# choose ---------------------------------------------------------------------------------------------------------------


def test_a_ranking_and_its_recipe(capsys: Captured) -> None:
    assert main(["choose", "photos", *QUICK]) == 0
    printed = capsys.readouterr().out
    files = [f"photos/cat{number}.png" for number in range(3)]
    pick = cv.choose(cv.load("pets"), files, ["rollout", "genatt+skipplus"], [METRIC])
    for row in pick.ranking:
        (line,) = [row_text for row_text in printed.splitlines() if row_text.split()[:2] == [str(row.rank), row.method]]
        assert f"{row.mean:.3g} ± {row.standard_error:.2g}" in line
        assert math.isnan(row.interval[0]), "three images have no interval"
        assert ("●" in line) == row.is_pareto_optimal
        assert ("(baseline)" in line) == row.baseline
    assert "nan" not in printed
    for heading in ("3 images", "95 % interval", "gap to best", "cost of a map", "front", "1 f + 1 b"):
        assert heading in printed, heading
    flat = " ".join(printed.split())
    for sentence in pick.answer:
        assert " ".join(sentence.split()) in flat
    assert "Wrote recipe.json; use it by: clairvit explain IMAGE --recipe recipe.json" in printed
    again = stored("recipe.json")
    assert again["method"] == pick.best
    assert again["weights"] == pick.weights
    assert again["starts"] == {}


def test_the_best_start_is_shown_and_kept(capsys: Captured) -> None:
    options = ["--method", "rollout", "--metric", "insertion-deletion(steps=1)", "--tune-start", "focusvit"]
    assert main(["choose", "photos/cat0.png", *options]) == 0
    printed = capsys.readouterr().out
    again = stored("recipe.json")
    (tuned,) = again["tuned"]
    assert len(tuned["curve"]) == 12
    assert again["starts"] == {"focusvit": tuned["method"]}
    assert "focusvit from each layer on" in printed
    for point in tuned["curve"]:
        (line,) = [row for row in printed.splitlines() if row.split()[:2] == [str(point["start"]), point["method"]]]
        assert f"{point['mean']:.3g}" in line
        assert ("best" in line) == (point["start"] == tuned["best"])
        assert ("ceil(L/2)" in line) == (point["start"] == 6)


def test_json_for_machines(capsys: Captured) -> None:
    assert main(["choose", "photos", *QUICK, "--out", "new/best.json", "--json", "--limit", "2", "--seed", "3"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["command"] == "choose"
    assert document["best"] == stored("new/best.json")["method"] == document["ranking"][0]["method"]
    assert document["clear"] is False
    assert len(document["images"]) == 2
    assert document["files"] == ["new/best.json"]
    assert {row["method"] for row in document["ranking"]} == {"rollout", "genatt+skipplus", "random", "center"}
    assert document["seed"] == 3
    assert document["answer"][0].startswith("No significant winner: ")
    assert document["failed"] == []


def test_what_to_type_next_can_be_typed(capsys: Captured) -> None:
    weights(Path("tiny.safetensors"))
    model = ["--model", "file:tiny.safetensors", "--arch", f"timm:{ARCHITECTURE}", "--labels", "a cat,b,c"]
    assert main(["choose", "photos", *QUICK, *model]) == 0
    command = capsys.readouterr().out.partition("use it by: ")[2].strip()
    assert command.startswith("clairvit explain IMAGE ")
    _, *typed = ["photos/cat0.png" if part == "IMAGE" else part for part in shlex.split(command)]
    assert main(typed) == 0


def test_quiet_is_quiet(capsys: Captured) -> None:
    assert main(["choose", "photos/cat0.png", *QUICK, "--quiet"]) == 0
    assert capsys.readouterr().out == ""
    assert Path("recipe.json").exists()


def test_masks_and_another_ranking(capsys: Captured) -> None:
    Path("masks").mkdir()
    for number in range(3):
        size = (451 - 40 * number, 300)
        picture = Image.new("L", size)
        picture.paste(1, (0, 0, size[0] // 2, 300))
        picture.save(f"masks/cat{number}.png")
    options = ["--method", "rollout", "--metric", f"{METRIC},ap", "--masks", "masks", "--by", "ap"]
    assert main(["choose", "photos", *options]) == 0
    assert stored("recipe.json")["by"] == "ap"
    assert "faithfulness, localisation and cost" in " ".join(capsys.readouterr().out.split())


def test_masks_that_do_not_match(capsys: Captured) -> None:
    """One of another size, one that is missing, then none at all: an error, and nothing is chosen."""
    Path("masks").mkdir()
    Image.new("L", (451, 300), 1).save("masks/cat0.png")
    Image.new("L", (10, 7), 1).save("masks/cat1.png")
    arguments = ["choose", "photos", "--method", "rollout", "--metric", f"{METRIC},ap", "--masks", "masks"]
    assert main(arguments) == 2
    printed, errors = capsys.readouterr()
    assert "1 of 2 images have no mask, so no ap: photos/cat2.png." in " ".join(printed.split())
    assert "1 of 3 could not be scored" in errors
    assert "The mask 'masks/cat1.png' is 10 × 7 pixels and its image 411 × 300" in errors
    Path("recipe.json").unlink()
    for name in ("cat0", "cat1"):
        Path(f"masks/{name}.png").rename(f"masks/other-{name}.png")
    message = refusal(capsys, *arguments, "--by", "ap")
    assert "None of the 2 masks in 'masks' is called like one of the 3 images; expected 'cat0.png'" in message
    assert not Path("recipe.json").exists()


def test_a_broken_image_costs_only_itself(capsys: Captured) -> None:
    Path("photos/broken.png").write_bytes(b"no picture")
    assert main(["choose", "photos", *QUICK]) == 2
    printed, errors = capsys.readouterr()
    assert "3 images" in printed
    assert "1 of 4 could not be scored" in errors
    assert "broken.png" in errors
    assert Path("recipe.json").exists()


def test_a_data_set_brings_its_masks(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[DataConfig, int]] = []

    def opened(self: DataConfig, seed: int) -> ImageDataset:
        seen.append((self, seed))
        masks = [np.ones((300, 451 - 40 * number), dtype=np.uint8) for number in range(3)]
        files = [f"photos/cat{number}.png" for number in range(3)]
        return as_dataset(files, cv.load("pets"), masks=masks)

    monkeypatch.setattr(DataConfig, "open", opened)
    options = ["--method", "rollout", "--split", "test", "--limit", "3", "--seed", "5"]
    assert main(["choose", "pets:somewhere", *options, "--json", "--metric", f"{METRIC},pointing-game"]) == 0
    assert seen == [(DataConfig("pets:somewhere", "test", 3), 5)]
    assert json.loads(capsys.readouterr().out)["ranking"][0]["means"]["pointing-game"] == 1
    assert "has its own masks" in refusal(capsys, "choose", "pets:somewhere", "--masks", "photos")
    assert "expected one data set, or images" in refusal(capsys, "choose", "pets:somewhere", "photos")


def test_what_is_a_data_set() -> None:
    assert data_set(["pets:somewhere"]) == "pets:somewhere"
    assert data_set(["photos"]) is None
    Path("a:b.png").write_bytes(b"")
    assert data_set(["a:b.png"]) is None
    with pytest.raises(BadInput, match="expected one data set"):
        data_set(["photos", "pets:x"])


def test_a_sample_is_by_seed_and_in_order() -> None:
    names = [f"{number:02}" for number in range(30)]
    some = sample_images(names, 10, 1)
    assert len(set(some)) == 10
    assert some == sorted(some) == sample_images(names, 10, 1) != sample_images(names, 10, 2)
    assert sample_images(names, 99, 1) == names


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--method", "legrod"], "Did you mean 'legrad'"),
        (["--metric", "delition"], "Did you mean 'deletion'"),
        (["--metric", "ap"], "'ap' compares maps with masks, and none were given"),
        (["--tune-start", "genat"], "Did you mean 'genatt'"),
        (["--tune-start", "random"], "'random' does not look at the model"),
        (["--out", "recipe.txt"], "--out recipe.txt is no name for a recipe; expected one that ends in .json"),
        (["--split", "test"], "--split test is of a data set, such as pets:PATH; photos is none."),
        (["--by", "delition"], "by=delition was given; expected one of first, mean-rank, insertion-deletion"),
        (["--target", "Bengal,Beagle"], "names 2 classes; expected one"),
    ],
)
def test_mistakes_are_one_sentence(capsys: Captured, arguments: list[str], message: str) -> None:
    assert message in refusal(capsys, "choose", "photos", *arguments)


# explain --recipe -----------------------------------------------------------------------------------------------------


def written(**more: Any) -> str:
    usual = {"kind": "clairvit recipe", "format": 1, "method": "rollout", "model": "pets", "weights": "0" * 32}
    Path("recipe.json").write_text(json.dumps({**usual, **more}), encoding="utf-8")
    return "recipe.json"


def test_explain_follows_what_was_chosen(capsys: Captured) -> None:
    assert main(["choose", "photos", "--method", "rollout", "--metric", METRIC, "--quiet"]) == 0
    assert main(["explain", "photos", "--recipe", "recipe.json", "--json"]) == 0
    printed, errors = capsys.readouterr()
    assert [result["method"] for result in json.loads(printed)["results"]] == ["rollout"] * 3
    assert errors == ""  # the same weights: nothing to warn of


def test_other_weights_are_reported_once(capsys: Captured) -> None:
    assert main(["explain", "photos", "--recipe", written(), "--batch-size", "1", "--quiet"]) == 0
    errors = capsys.readouterr().err
    assert errors.count("The recipe was made for pets (weights 000000000000)") == 1
    assert "with other weights" in errors


def test_m_auto_reads_the_recipe(capsys: Captured) -> None:
    path = written(starts={"focusvit": "focusvit(m=9)"})
    assert main(["explain", "demo", "--method", "focusvit(m=auto)", "--recipe", path, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["results"][0]["method"] == "focusvit(m=9)"
    message = refusal(capsys, "explain", "demo", "--method", "focusvit(m=auto)")
    assert "clairvit choose IMAGES --tune-start focusvit --out recipe.json" in message
    message = refusal(capsys, "explain", "demo", "--method", "rollout", "--recipe", path)
    assert "'rollout' and a recipe for 'rollout' were given; expected one of the two" in message
    assert "cannot be read: No such file" in refusal(capsys, "explain", "demo", "--recipe", "none.json")


def test_without_a_recipe_the_method_is_the_usual_one(capsys: Captured) -> None:
    assert main(["explain", "demo", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["results"][0]["method"] == "attnlrp+plus"
