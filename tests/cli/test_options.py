"""Option groups, and one vocabulary of options for all commands."""

from __future__ import annotations

import json
from pathlib import Path

import click
import pytest
import typer
from PIL import Image
from typer.testing import CliRunner

from clairvit.cli import main, options
from clairvit.cli.app import app
from clairvit.cli.arguments import data_specs, single_method
from clairvit.cli.declare import argument, expand_groups, group, option
from clairvit.errors import BadInput
from helpers.small_study import ARCHITECTURE, weights

COMMANDS: dict[str, click.Command] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
TINY = ["--model", "file:tiny.safetensors", "--arch", f"timm:{ARCHITECTURE}"]
Captured = pytest.CaptureFixture[str]


@group("Size")
class Size:
    width: int = option(3, "Columns.")
    run: options.RunOptions
    flat: bool = option(False, "One row.")


def test_a_group_becomes_one_option_per_field() -> None:
    """Groups in groups too; an option of the command itself wins over a field of its name."""
    calls: list[tuple[str, Size, int]] = []

    def draw(name: str = argument(..., "Which."), *, size: Size, seed: int = option(7, "Of the command.")) -> None:
        calls.append((name, size, seed))

    app_of_one = typer.Typer()
    app_of_one.command()(expand_groups(draw))
    assert CliRunner().invoke(app_of_one, ["cat", "--width", "5", "--flat"]).exit_code == 0
    assert CliRunner().invoke(app_of_one, ["cat", "--seed", "1"]).exit_code == 0
    assert CliRunner().invoke(app_of_one, []).exit_code == 2
    runs = [options.RunOptions(seed=seed) for seed in (7, 1)]
    assert calls == [
        ("cat", Size(width=5, run=runs[0], flat=True), 7),
        ("cat", Size(width=3, run=runs[1], flat=False), 1),
    ]


def test_an_option_without_a_default_stays_none() -> None:
    assert options.ModelOptions().arch is None
    assert options.OutputOptions().as_json is False


def parameters(name: str) -> dict[str, click.Parameter]:
    return {option: parameter for parameter in COMMANDS[name].params for option in parameter.opts}


@pytest.mark.parametrize("option", ["--method", "--metric", "--data", "--format", "--tune-start"])
def test_options_that_take_lists_are_repeatable_in_every_command(option: str) -> None:
    owners = [name for name in COMMANDS if option in parameters(name)]
    assert owners
    assert all(parameters(name)[option].multiple for name in owners)  # type: ignore[attr-defined]


def test_commands_that_share_an_option_describe_it_alike() -> None:
    for flag in ("--limit", "--split", "--download", "--json", "--quiet", "--arch", "--crop"):
        texts = {parameters(name)[flag].help for name in COMMANDS if flag in parameters(name)}  # type: ignore[attr-defined]
        assert len(texts) == 1, flag
    for name in ("evaluate", "choose", "bench", "reproduce"):
        assert {"--data", "--limit", "--split", "--download", "--seed", "--json", "--out"} <= set(parameters(name))


def test_methods_are_repeated_or_separated_by_commas(tmp_path: Path, capsys: Captured) -> None:
    listed = []
    for typed in (
        ["--method", "rollout,center"],
        ["--method", "rollout", "--method", "center"],
        ["--methods", "rollout,center"],  # the first edition's name
    ):
        weights(tmp_path / "tiny.safetensors")
        model = ["--model", f"file:{tmp_path}/tiny.safetensors", "--arch", f"timm:{ARCHITECTURE}"]
        assert main(["compare", "demo", *model, *typed, "--out", f"{tmp_path}/maps.json", "--json"]) == 0
        listed.append(list(json.loads(capsys.readouterr().out)["results"][0]["methods"]))
    assert listed == [["rollout", "center"]] * 3


def test_commands_of_one_method_refuse_several(capsys: Captured) -> None:
    assert single_method(None, "explain") is None
    assert single_method(["rollout(fusion=max,residual=0.5)"], "explain") == "rollout(fusion=max,residual=0.5)"
    for command in (["explain", "demo"], ["doctor", "pets"]):
        assert main([*command, "--method", "rollout", "--method", "legrad"]) == 2
        assert f"{command[0]} takes one method, and 2 were given: rollout, legrad." in capsys.readouterr().err


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    weights(tmp_path / "tiny.safetensors")
    for name, colour in (("cat", "red"), ("dog", "blue")):
        (tmp_path / "photos" / name).mkdir(parents=True)
        (tmp_path / "masks" / name).mkdir(parents=True)
        for number in range(2):
            Image.new("RGB", (32, 32), colour).save(tmp_path / "photos" / name / f"{name}{number}.png")
            mask = Image.new("L", (32, 32))
            mask.paste(1, (8, 8, 24, 24))
            mask.save(tmp_path / "masks" / name / f"{name}{number}.png")
    return tmp_path


def test_a_folder_is_a_data_set(photos: Path) -> None:
    assert data_specs(["photos,pets:x", "scenes"]) == ["folder:photos", "pets:x", "scenes"]
    with pytest.raises(BadInput, match="--data ',' names nothing"):
        data_specs([","])
    with pytest.raises(BadInput, match="--data names 2 data sets"):
        options.DataOptions(data=["pets:x", "scenes"]).single_spec()


def test_evaluate_and_choose_take_the_data_of_bench(photos: Path, capsys: Captured) -> None:
    shared = [*TINY, "--method", "rollout,center", "--metric", "ap", "--masks", "masks", "--limit", "3", "--json"]
    names = {}
    for command in ("evaluate", "choose", "bench"):
        out = {"evaluate": "scores", "choose": "recipe.json", "bench": "store"}[command]
        assert main([command, "--data", "photos", *shared, "--out", out]) == 0
        document = json.loads(capsys.readouterr().out)
        names[command] = document["images"] if command != "bench" else document["results"][0]["images"]
    assert len(names["bench"]) == 3
    assert names["evaluate"] == names["choose"] == names["bench"]


def test_images_and_a_data_set_exclude_each_other(photos: Path, capsys: Captured) -> None:
    assert main(["evaluate", "photos", "--data", "scenes"]) == 2
    assert "--data scenes was given with photos; expected images or a data set" in capsys.readouterr().err
    assert main(["evaluate", "--method", "rollout"]) == 2
    assert "Which images? Expected files, folders or globs, or --data NAME:PATH." in capsys.readouterr().err
