"""Any file name and any standard output: what is shown is safe, what is written is whole, nothing is a traceback."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import clairvit as cv
from clairvit.cli import app as app_module
from clairvit.cli import main
from clairvit.cli.console import print_json, print_line, print_message, table
from clairvit.errors import BadInput
from clairvit.plotting.canvas import Canvas

NAMES = (b"a.png", b"bad\xff.png", b"caf\xc3\xa9.png", b"esc\x1b]0;x\x07.png", b"=1+1.png")
SHOWN = ("a.png", r"bad\xff.png", "café.png", r"esc\x1b]0;x\x07.png", "=1+1.png")


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    monkeypatch.chdir(tmp_path)
    Path("photos").mkdir()
    for number, name in enumerate(NAMES):
        picture = np.random.default_rng(number).integers(0, 256, (32, 32, 3), np.uint8)
        content = io.BytesIO()
        Image.fromarray(picture).save(content, "PNG")
        Path("photos", os.fsdecode(name)).write_bytes(content.getvalue())
    return [b"photos/" + name for name in sorted(NAMES)]


def test_a_name_that_is_not_utf_8_ends_no_folder(names: list[bytes], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "photos", "--method", "rollout", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert sorted(os.fsencode(result["image"]) for result in document["results"]) == names, "the names are given back"
    for name in NAMES:
        for suffix in (b".png", b".json", b".npz"):
            assert os.path.isfile(b"out/" + name.removesuffix(b".png") + b"-rollout" + suffix)
    record = json.loads(Path("out", os.fsdecode(b"bad\xff-rollout.json")).read_text(encoding="utf-8"))
    assert os.fsencode(record["names"][0]) == b"photos/bad\xff.png"


def test_tables_scores_and_figures_show_any_name(names: list[bytes], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "photos", "--method", "rollout,raw-attention", "--out", "maps.pdf"]) == 0
    printed, errors = capsys.readouterr()
    assert all(name in printed for name in SHOWN)
    assert "\x1b" not in printed + errors
    assert main(["evaluate", "photos", "--method", "rollout", "--metric", "sparseness", "--out", "scores.csv"]) == 0
    scores = Path("scores.csv").read_text(encoding="utf-8")
    assert all(f"photos/{name},rollout,sparseness,0." in scores for name in SHOWN)
    assert "\x1b" not in scores


def test_a_study_of_any_names(names: list[bytes], capsys: pytest.CaptureFixture[str]) -> None:
    data = ("--data", "folder:photos", "--method", "rollout", "--metric", "sparseness")
    assert main(["bench", *data, "--out", "store", "--json"]) == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    assert set(result["images"]) == {"esc\x1b]0;x\x07.png" if "esc" in name else name for name in SHOWN}
    assert main(["report", "store", "--out", "study.html"]) == 0


def test_a_figure_takes_any_text() -> None:
    canvas = Canvas(3, 1)
    canvas.heading("bad\udcff\x1b.png", "caf\udcc3\udca9", 0, 0, 3)
    canvas.caption("method · ", "bad\udcff" * 40, " · end", 0, 0.5, 3)
    canvas.figure.savefig(io.BytesIO(), format="png")
    assert canvas.figure.texts[0].get_text() == r"bad\xff\x1b.png"


def test_messages_and_tables_obey_no_terminal_code(capsys: pytest.CaptureFixture[str]) -> None:
    hostile = "cat\x1b]0;owned\x07\x9b2J\udcff"
    print_message(f"{hostile} is damaged")
    print_line(hostile)
    table(hostile, (hostile, "value"), [(hostile, "1")])
    print_json({hostile: hostile})
    printed, errors = capsys.readouterr()
    assert not set("\x1b\x07\x9b\udcff") & set(printed.replace("\n", "") + errors)
    assert r"cat\x1b]0;owned\x07\x9b2J\xff is damaged" in errors


def test_the_error_of_a_hostile_name_is_shown_escaped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for arguments in (["explain", "no\x1b]0;x\x07.png"], ["explain", "demo", "--model", "file:\x1b[2J.safetensors"]):
        assert main(arguments) == 2
        assert "\x1b" not in capsys.readouterr().err
    assert main(["explain", "no\x1b.png", "--json"]) == 2
    printed, _ = capsys.readouterr()
    assert "\x1b" not in printed
    assert "no\x1b.png" in str(json.loads(printed)).replace("\\x1b", "\x1b")


# standard output -----------------------------------------------------------------------------------------------------


def some_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the command print a table with symbols, a line with a name, and a document."""

    def app(args: list[str], **_: object) -> None:
        if "--json" in args:
            print_json({"name": "café ∀ \udcff"})
            return
        table("What it sees", ("class ↑", "share"), [("Käfer", "68 % █████")], ("share",))
        print_line("猫.png → maps")

    monkeypatch.setattr(app_module, "app", app)


@pytest.mark.parametrize("encoding", ["cp1252", "latin-1", "ascii", "utf-8", "utf-16"])
def test_output_of_any_encoding(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """cp1252 is what Windows takes for `> log.txt`."""
    some_output(monkeypatch)
    for arguments in ([], ["--json"]):
        stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
        monkeypatch.setattr(sys, "stdout", stream)
        assert main(arguments) == 0
        assert sys.stdout is stream
        stream.flush()
        text = stream.buffer.getvalue().decode(encoding)  # type: ignore[attr-defined]
        if arguments:
            assert json.loads(text) == {"name": "café ∀ \udcff"}
        elif encoding in ("cp1252", "latin-1"):
            assert "Käfer" in text
            assert "68 % #####" in text
            assert "?.png > maps" in text
        elif encoding == "ascii":
            assert "K?fer" in text
        else:
            assert "猫.png → maps" in text


def test_the_command_runs_on_an_ascii_output() -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "clairvit", "methods"]
    done = subprocess.run(command, capture_output=True, check=False, env=environment)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"rollout" in done.stdout


@pytest.mark.parametrize("closed", [(1,), (0, 1, 2)])
def test_closed_streams_end_no_command_and_get_no_files_of_others(closed: tuple[int, ...], tmp_path: Path) -> None:
    """Without descriptors 0 to 2 the first file that is opened would be what prints go to."""
    program = (
        "import sys, clairvit.cli.app as module\n"
        "def app(**_):\n"
        "    print('to nobody'); print('to nobody', file=sys.stderr)\n"
        f"    with open({str(tmp_path / 'result')!r}, 'w') as file: file.write(str(file.fileno() > 2))\n"
        "module.app = app\n"
        "sys.exit(module.main([]))\n"
    )
    redirected = " ".join(f"{number}>&-" for number in closed)
    done = subprocess.run(["sh", "-c", f'exec "$0" -c "$1" {redirected}', sys.executable, program], check=False)
    assert done.returncode == 0
    assert (tmp_path / "result").read_text() == "True"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has it")
@pytest.mark.parametrize("status", [0, 2])
def test_a_full_disk_behind_standard_output_is_one_sentence(status: int) -> None:
    program = (
        "import sys, clairvit.cli.app as module\n"
        "def app(**_):\n"
        "    print('x' * 100_000); sys.stdout.flush(); print('rest'); print('worked', file=sys.stderr)\n"
        f"    raise SystemExit({status})\n"
        "module.app = app\n"
        "sys.exit(module.main([]))\n"
    )
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", program], stdout=full, stderr=-1, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == (
        "worked\nclairvit: Standard output cannot be written to (No space left on device); files are complete.\n"
    )


def test_no_backend_of_matplotlib_is_needed() -> None:
    environment = {**os.environ, "MPLBACKEND": "nonsense"}
    program = (
        "import sys; from clairvit.cli import main; status = main(['--version']); import matplotlib; sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


# nested files --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["recipe", "labels", "study"])
def test_files_that_are_nested_deep_are_one_sentence(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    deep = "[" * 3_000 + "]" * 3_000
    file = tmp_path / ("study.toml" if option == "study" else "deep.json")
    file.write_text(f"models = {deep}" if option == "study" else deep)
    arguments = {
        "recipe": ["explain", "demo", "--recipe", str(file)],
        "labels": ["explain", "demo", "--model", "timm:vit_tiny_patch16_224", "--no-pretrained", "--labels", str(file)],
        "study": ["bench", str(file), "--out", str(tmp_path / "store")],
    }
    assert main(arguments[option]) == 2
    assert "nested too deep" in capsys.readouterr().err


def test_an_empty_argument_is_not_the_current_folder(
    names: list[bytes], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir("photos")
    assert main(["explain", ""]) == 2
    assert "The path is empty" in capsys.readouterr().err
    assert not Path("out").exists()
    with pytest.raises(BadInput, match="The path is empty"):
        cv.explain("pets", "")
