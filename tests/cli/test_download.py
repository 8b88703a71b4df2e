"""--download: every command that takes a data set asks torchvision for it, and only where it was typed."""

from __future__ import annotations

from pathlib import Path
from urllib.error import URLError

import pytest
import torchvision

from clairvit.cli import main

COMMANDS = {
    "reproduce": ["reproduce", "cmi", "--data", "pets:new"],
    "choose": ["choose", "pets:new"],
    "bench": ["bench", "--data", "pets:new", "--out", "study"],
    "finetune": ["finetune", "pets:new", "--no-pretrained"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_what_is_not_there_is_asked_for(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    requested_roots: list[Path] = []

    def no_network(root: Path, **_: object) -> None:
        requested_roots.append(root)
        raise URLError("no route to host")

    monkeypatch.setattr(torchvision.datasets, "OxfordIIITPet", no_network)
    monkeypatch.chdir(tmp_path)
    assert main(COMMANDS[name]) == 2
    assert "or let it be downloaded there (--download)." in capsys.readouterr().err
    assert requested_roots == []
    assert main([*COMMANDS[name], "--download"]) == 2
    assert "Oxford-IIIT Pet could not be downloaded (URLError" in capsys.readouterr().err
    assert requested_roots == [Path("new")]


def test_images_of_ones_own_are_not_downloaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["choose", str(tmp_path), "--download"]) == 2
    assert "--download is of a data set, such as pets:PATH" in capsys.readouterr().err
    assert main(["finetune", str(tmp_path), "--download"]) == 2
    assert "--download is of a data set, such as pets:PATH" in capsys.readouterr().err
    assert main(["reproduce", "cmi", "--data", f"folder:{tmp_path}/photos", "--download"]) == 2
    assert "cannot be downloaded from here: it is your own" in capsys.readouterr().err
