"""`--import FILE|MODULE`: methods and metrics of the user's own, on every command, in studies and on the page."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from fastapi.testclient import TestClient

import clairvit as cv
from clairvit import plugins
from clairvit.bench.executors import WorkerConfig
from clairvit.bench.store import Store
from clairvit.bench.worker import compute_rows
from clairvit.cli import main
from clairvit.cli.app import app
from clairvit.methods.registry import METHODS
from clairvit.metrics.registry import METRICS
from clairvit.web.app import create_app
from clairvit.web.state import create_state
from helpers.other_packages import FACTS, METHOD, METRIC
from helpers.small_study import ARCHITECTURE, photos, weights

STUDY = """
import = ["own/my.py", "own.scores"]
models = [{spec = "SPEC", arch = "timm:ARCH"}]
data = "DATA"
methods = ["token-length", "raw-attention"]
metrics = ["peak-share"]
at_once = 2
"""


QUICK = ("--model", "scenes", "--metric", "sparseness")


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Registries, modules and the memory of imports as they were."""
    monkeypatch.setattr(plugins, "_imported", {})
    monkeypatch.setattr(plugins, "_origins", {})
    modules = set(sys.modules)
    with METHODS.restored(), METRICS.restored():
        yield
    for name in set(sys.modules) - modules:
        if name.partition(".")[0] in ("my", "own", "helping") or name.startswith("my_"):
            del sys.modules[name]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with my.py, which is the current one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.py").write_text(METHOD + METRIC, encoding="utf-8")
    (tmp_path / "my.toml").write_text(FACTS, encoding="utf-8")
    return tmp_path


def test_every_command_takes_it() -> None:
    group = typer.main.get_command(app)
    commands = {"clairvit": group, **group.commands}  # type: ignore[attr-defined]
    assert len(commands) > 15
    for name, command in commands.items():
        assert [option.name for option in command.params if "--import" in option.opts] == ["imports"], name


@pytest.mark.parametrize(
    "arguments",
    [
        ("methods", "token-length", "--import", "my.py"),
        ("--import", "my.py", "methods", "token-length"),
        ("metrics", "peak-share", "--import=my.py"),
        ("cite", "token-length", "--import", "my"),
        ("explain", "demo", "--method", "token-length+last", "--import", "./my.py", "--out", "out"),
        ("compare", "demo", "--method", "token-length,raw-attention", "--import", "my.py", "--out", "out.png"),
        ("evaluate", "demo", "--method", "token-length", "--metric", "peak-share", "--import", "my.py"),
        ("choose", "--data", "folder:photos", "--method", "token-length,raw-attention", "--import", "my.py", *QUICK),
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_method_of_an_own_file_works(here: Path, arguments: tuple[str, ...]) -> None:
    photos(here / "photos", 6)
    assert main(arguments) == 0


def test_options_are_looked_up_after_the_import_wherever_it_stands(here: Path) -> None:
    assert main(["explain", "--method", "token-length", "demo", "--out", "out", "--import", "my.py"]) == 0
    assert (here / "out" / "demo-token-length.png").exists()


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("gone.py", None, "There is no file '*gone.py' to import; expected a Python file"),
        ("gone.module", None, "There is no module 'gone.module' to import; looked in *. A file is named with its"),
        ("my_bad.py", "def f(:", "'my_bad.py' cannot be imported (SyntaxError: invalid syntax (my_bad.py, line 1));"),
        ("my_bad.py", "\n1 / 0", "'my_bad.py' cannot be imported (ZeroDivisionError: division by zero, line 2);"),
        ("my_bad", "1 / 0", "'my_bad' cannot be imported (ZeroDivisionError: division by zero); expected Python"),
        ("my_bad.py", "import gone", "cannot be imported (ModuleNotFoundError: No module named 'gone', line 1)"),
        ("my_bad.py", "raise SystemExit(3)", "'my_bad.py' cannot be imported (SystemExit: 3, line 1); expected Python"),
        ("my_bad.py", "x = 1", "'my_bad.py' registers no method and no metric; expected a function with @cv.method"),
        (
            "my_bad.py",
            METHOD.replace("token-length", "rollout"),
            "'my_bad.py' cannot be imported: There is a built-in method 'rollout'; expected another name",
        ),
    ],
    ids=["file", "module", "syntax", "raises", "module raises", "needs more", "exits", "nothing", "built-in name"],
)
def test_what_cannot_be_imported_is_one_sentence(
    here: Path, capsys: pytest.CaptureFixture[str], file: str, text: str | None, message: str
) -> None:
    if text is not None:
        (here / f"{file.removesuffix('.py')}.py").write_text(text, encoding="utf-8")
    names = METHODS.names
    assert main(["methods", "rollout", "--import", file]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("clairvit: ")
    assert captured.err.count("\n") == 1
    begin, _, end = message.partition("*")
    assert begin in captured.err
    assert end in captured.err
    assert METHODS.names == names
    assert not [name for name in sys.modules if name.startswith("my_bad")]


def test_a_name_of_another_file_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "more").mkdir()
    (here / "more" / "my.py").write_text(METHOD, encoding="utf-8")
    assert main(["methods", "--import", "my.py", "--import", "more/my.py"]) == 2
    message = capsys.readouterr().err
    assert f"'my.py' cannot be imported: There is a method 'token-length' of '{here / 'my.py'}'; expected" in message


def test_files_import_what_lies_beside_them_and_none_takes_the_name_of_a_module(here: Path) -> None:
    (here / "more").mkdir()
    (here / "more" / "helping.py").write_text("NAME = 'shared-name'", encoding="utf-8")
    code = METHOD.replace('"token-length"', "NAME")
    (here / "more" / "json.py").write_text(f"from helping import NAME\n{code}", encoding="utf-8")
    path = list(sys.path)
    assert main(["methods", "shared-name", "--import", "more/json.py"]) == 0
    assert sys.modules["json"] is json
    assert sys.path == path


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A study whose own code is in a folder beside it; the current folder is another one."""
    code = tmp_path / "study" / "own"
    code.mkdir(parents=True)
    (code / "my.py").write_text(METHOD, encoding="utf-8")
    (code / "scores.py").write_text(METRIC, encoding="utf-8")
    spec, data = weights(tmp_path / "tiny.safetensors"), photos(tmp_path / "photos", 4)
    text = STUDY.replace("SPEC", spec).replace("ARCH", ARCHITECTURE).replace("DATA", data)
    (tmp_path / "study" / "study.toml").write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "study" / "study.toml"


def values(store: str) -> list[tuple[object, ...]]:
    return Store.open(Path(store), create=False).query("select image, method, value from results order by all")[1]


def test_a_study_imports_its_code_and_so_do_its_workers(study: Path) -> None:
    """Processes, and the shards of a job array, compute what one process does."""
    assert main(["bench", str(study), "--out", "one"]) == 0
    assert main(["bench", str(study), "--out", "two", "--workers", "2"]) == 0
    assert main(["bench", str(study), "--out", "half", "--shard", "0/2"]) == 0
    assert main(["bench", str(study), "--out", "other", "--shard", "1/2"]) == 0
    assert main(["bench", "--out", "both", "--merge", "half", "--merge", "other"]) == 0
    assert values("one") == values("two") == values("both")
    assert len(values("one")) == 4 * 4


@pytest.mark.ray
def test_actors_of_ray_import_the_code_of_a_study(study: Path) -> None:
    assert main(["bench", str(study), "--out", "one"]) == 0
    assert main(["bench", str(study), "--out", "ray", "--engine", "ray", "--workers", "1"]) == 0
    assert values("one") == values("ray")


def test_the_page_lists_and_explains_by_methods_of_an_own_file(here: Path) -> None:
    plugins.import_code(["my.py"])
    state = create_state([cv.load("pets")], time_limit=300)
    with TestClient(create_app(state), base_url="http://127.0.0.1") as client:  # closes the state
        cards = {card["name"]: card for card in client.get("/api/methods").json()["methods"]}
        assert "power" in [option["name"] for option in cards["token-length"]["options"]]
        reply = client.post("/api/explain", data={"method": "token-length(power=2.0)"}).json()
    assert [item["method"] for item in reply["explanations"]] == ["token-length(power=2.0)"]


def test_an_edited_method_is_computed_again_and_never_mixed(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", str(study), "--out", "store"]) == 0
    before = {row[:2]: row[2] for row in values("store")}
    capsys.readouterr()
    code = study.parent / "own" / "my.py"
    for text, computed in ((METHOD + "\n# a comment", 0), (METHOD.replace("** power", "** (2 * power)"), 2)):
        code.write_text(text, encoding="utf-8")
        plugins._imported.clear()
        sys.modules.pop("my", None)
        assert main(["bench", str(study), "--out", "store", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["computed"] == computed
    after = {row[:2]: row[2] for row in values("store") if row[1] == "token-length"}
    assert len(after) == 4
    assert all(value != before[key] for key, value in after.items())


def test_a_worker_whose_file_is_gone_says_so(study: Path) -> None:
    """A machine of a cluster without the file: the unit fails with a sentence, the worker goes on."""
    plugins.import_code(["own/my.py"], study.parent)
    worker = WorkerConfig(None).start()  # type: ignore[arg-type]
    assert [item.name for item in worker.imports] == [str(study.parent / "own" / "my.py")]
    (study.parent / "own" / "my.py").unlink()
    plugins._imported.clear()
    rows, error = compute_rows(worker, None)  # type: ignore[arg-type]
    assert rows == []
    assert error is not None
    assert "There is no file" in error


def test_keys_of_a_study_name_import(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for line, message in (
        ("imports = ['a.py']", "line 1: 'imports' is no key here. Did you mean 'import'? Expected: models, "),
        ("import = 3", "line 1: 'import' is 3; expected a text or a list"),
        ("import = [3]", "line 1: 'import' is 3; expected texts only"),
        ("import = 'gone.py'", f"There is no file '{study.parent / 'gone.py'}' to import"),
    ):
        study.write_text(line, encoding="utf-8")
        assert main(["bench", str(study), "--out", "store"]) == 2
        assert message in capsys.readouterr().err
