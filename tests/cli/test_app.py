from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from clairvit import __version__
from clairvit.cli import app as app_module
from clairvit.cli import main
from clairvit.errors import BadInput, ClairWarning

COMMANDS = [str(command.name) for command in app_module.app.registered_commands]
CLAIRVIT = [sys.executable, "-m", "clairvit"]


def test_the_command_line_is_read_without_torch_numpy_or_matplotlib() -> None:
    code = "import sys, clairvit.cli; print([m for m in ('torch', 'numpy', 'matplotlib', 'rich') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_help_imports_nothing_heavy() -> None:
    """How long it takes is measured by benchmarks/help.py."""
    code = "import sys; from clairvit.cli import main; main(['--help']); print('modules:', *sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    printed, _, modules = done.stdout.rpartition("modules: ")
    assert "explain" in printed
    assert {"torch", "numpy", "scipy", "matplotlib", "PIL", "timm", "transformers"} & set(modules.split()) == set()


def test_all_commands_are_there() -> None:
    expected = {
        "explain",
        "compare",
        "evaluate",
        "choose",
        "doctor",
        "bench",
        "report",
        "reproduce",
        "finetune",
        "serve",
    }
    assert expected | {"methods", "metrics", "models", "classes"} <= set(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    assert f"clairvit {command}" in capsys.readouterr().out.split("Examples")[1]


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"clairvit {__version__}\n"


def test_an_unknown_command_gets_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explian", "cat.jpg"]) == 2
    assert "Did you mean 'explain'?" in capsys.readouterr().err


def test_unknown_options_and_missing_images_are_usage_errors(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "demo", "--methd", "rollout"]) == 2
    assert "--method" in capsys.readouterr().err
    assert main(["explain", "demo", "--batch-size", "0"]) == 2


def fail_with(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    def app(**_: object) -> None:
        raise error

    monkeypatch.setattr(app_module, "app", app)


def test_an_error_is_one_sentence_and_status_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_with(BadInput("There is no cat; look behind the sofa."), monkeypatch)
    assert main(["explain"]) == 2
    assert capsys.readouterr() == ("", "clairvit: There is no cat; look behind the sofa.\n")


def test_with_json_an_error_is_a_document_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_with(BadInput("There is no cat."), monkeypatch)
    assert main(["explain", "--json"]) == 2
    assert json.loads(capsys.readouterr().out) == {"error": "There is no cat."}


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(130)])
def test_stopping_is_130_and_a_sentence(
    error: BaseException, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_with(error, monkeypatch)
    assert main(["explain"]) == 130
    assert capsys.readouterr().err == "clairvit: stopped; what was written until now is complete.\n"


def test_a_bug_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_with(ZeroDivisionError(), monkeypatch)
    with pytest.raises(ZeroDivisionError):
        main(["explain"])


def test_our_warnings_are_notes(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def app(**_: object) -> None:
        warnings.warn("the map is zero", ClairWarning, stacklevel=1)

    monkeypatch.setattr(app_module, "app", app)
    assert main(["explain"]) == 0
    assert capsys.readouterr().err == "clairvit: note: the map is zero\n"


def test_a_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    command = f"'{sys.executable}' -c 'import sys; from clairvit.cli import main; sys.exit(main())' methods --json"
    piped = f"{command} | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", piped], capture_output=True, text=True, check=False)
    assert done.stdout == "[\n"
    assert done.stderr == ""
    assert done.returncode == 0


def test_a_closed_pipe_neither_ends_the_work_nor_changes_the_status(monkeypatch: pytest.MonkeyPatch) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    done: list[str] = []

    def app(**_: object) -> None:
        print("x" * 100_000)
        sys.stdout.flush()
        done.append("the work after the output")
        raise SystemExit(2)

    monkeypatch.setattr(app_module, "app", app)
    with os.fdopen(write_end, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert main(["explain"]) == 2
        assert sys.stdout is pipe
    assert done == ["the work after the output"]
