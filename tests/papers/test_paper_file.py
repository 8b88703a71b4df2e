"""A paper of one's own: the docs' example runs by its path as a built-in paper does; what is wrong has a line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import clairvit as cv
from clairvit.cli import main
from clairvit.errors import BadInput
from clairvit.papers.general_checks import check_tables
from clairvit.papers.paper import find_paper
from clairvit.papers.paper_file import read_paper
from helpers.tiny_models import wrapped

DOCS = Path(__file__).parents[2] / "docs" / "reproduce.md"


def example() -> str:
    (block,) = re.findall(r"```toml\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    return str(block)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").mkdir()
    (tmp_path / "masks").mkdir()
    for seed in range(7):
        pixels = np.random.default_rng(seed).integers(0, 255, (32, 32, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "photos" / f"{seed}.png")
        mask = np.zeros((32, 32), dtype=np.uint8)
        mask[4 + seed : 20, 6:24] = 255
        Image.fromarray(mask).save(tmp_path / "masks" / f"{seed}.png")
    (tmp_path / "my-paper.toml").write_text(example(), encoding="utf-8")
    monkeypatch.setattr(cv, "load", lambda *_, **__: wrapped("timm-vit"))
    return tmp_path


def test_the_example_of_the_docs_runs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["reproduce", "my-paper.toml", "--data", "folder:photos", "--masks", "masks", "--effort", "quick"]
    assert main([*arguments, "--multiverse", "--out", "kept", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["paper"]["name"] == "my-paper"
    rows = {row["method"]: row for row in document["rows"]}
    assert rows["GenAtt"]["cells"]["mIoU"]["paper"] == 38.25
    assert rows["IxG"]["in_paper"] is False
    assert document["claims"][0]["claim"] == "GenAtt is better than rollout"
    needed = {entry["measure"]: entry for entry in document["images_needed"]}
    assert (needed["mIoU"]["difference"], needed["mIoU"]["had"]) == (6.75, 40)
    (claim,) = document["multiverse"]["claims"]
    assert claim["universes"] == sum(claim["counts"].values()) == len(claim["results"])
    chosen = {result["choices"]["GenAtt's sum"] for result in claim["results"]}
    assert chosen == {"all layers", "from the middle on"}
    assert {file.name for file in (folder / "kept").iterdir()} >= {
        "my-paper.json",
        "my-paper.md",
        "my-paper-multiverse.png",
    }
    assert main([*arguments, "--out", "kept"]) == 0, "the store goes on"
    assert "0 units of work" in capsys.readouterr().err


def test_a_path_is_checked_as_a_name_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "my-paper.toml", "--check"]) == 0
    printed = capsys.readouterr().out
    assert "1 of 1 hold when computed again" in printed
    assert "GenAtt is better than rollout" in printed


def test_nothing_to_check_is_a_sentence(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = example().partition("[[tables]]")[0]
    (folder / "bare.toml").write_text(text, encoding="utf-8")
    assert main(["reproduce", "bare.toml", "--check"]) == 0
    assert "Nothing that 'my-paper' prints can be computed again" in " ".join(capsys.readouterr().out.split())


def test_a_mistake_is_one_sentence_with_its_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = example().splitlines()
    (number,) = [place for place, line in enumerate(lines, 1) if line.startswith("winners")]
    lines[number - 1] = 'winner = ["GenAtt"]'
    (folder / "wrong.toml").write_text("\n".join(lines), encoding="utf-8")
    assert main(["reproduce", "wrong.toml", "--data", "folder:photos"]) == 2
    printed, errors = capsys.readouterr()
    assert printed == ""
    assert errors.startswith(f"clairvit: wrong.toml, line {number}: 'winner' is no key here. Did you mean 'winners'?")
    assert main(["reproduce", "nowhere.toml", "--check"]) == 2
    assert "The paper 'nowhere.toml' cannot be read" in capsys.readouterr().err


def test_the_name_of_a_built_in_paper_is_taken(folder: Path) -> None:
    (folder / "mine.toml").write_text(example().replace('"my-paper"', '"joita"'), encoding="utf-8")
    with pytest.raises(BadInput, match=r"^'mine\.toml' is called 'joita', as a built-in paper is"):
        find_paper("mine.toml")


def test_printed_means_are_computed_again(folder: Path) -> None:
    text = example().replace("count = 40", 'images = ["a", "b"]').replace("Deletion = [40.1, 22.0]", "")
    text = text.replace("mIoU = [31.5, 38.25]", "mIoU = [31.6, 38.3]").replace('["mIoU", "Deletion"]', '["mIoU"]')
    by_image = "[tables.per_image.mIoU]\nRollout = [31.0, 32.0]\nGenAtt = [38.0, 38.5]\n\n[[claims]]"
    (folder / "means.toml").write_text(text.replace("[[claims]]", by_image), encoding="utf-8")
    claim, rollout, genatt = check_tables(read_paper(folder / "means.toml"))
    assert claim.holds
    assert not rollout.holds
    assert rollout.numbers == "mean over 2 images: 31.500"
    assert genatt.statement == "The mean mIoU of GenAtt is 38.3 on 40 photos of birds"
    assert genatt.holds, "38.25 may be printed as 38.3"
