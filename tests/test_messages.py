"""What the library says: errors are in terms of Python, the command line adds its options, -O changes nothing."""

from __future__ import annotations

import ast
import functools
import pickle
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.request import urlretrieve

import click
import pytest
import typer
from PIL import Image

from clairvit.cli import main
from clairvit.cli.app import HIDDEN_ALIASES, app
from clairvit.cli.hints import COMMANDS, option_of, parameters_as_options, with_options
from clairvit.errors import BadInput, ModelUnavailable
from clairvit.models.image_files import read_image
from helpers.source_files import source_trees, violations

LIBRARY = tuple({place.partition("/")[0] for place in source_trees()} - {"cli", "web"})
FLAG = re.compile(r"(?<![\w-])--[a-z]")
OTHER_PROGRAM = re.compile(r"`(?!clairvit)[^`]*`")  # `ray start --head`
GROUP = typer.main.get_command(app)


# Flags


def is_warning(node: ast.AST) -> bool:
    """Return whether a node is a call of warnings.warn or warn."""
    return isinstance(node, ast.Call) and ast.unparse(node.func) in ("warn", "warnings.warn")


def raised_strings(tree: ast.AST) -> Iterator[str]:
    """Yield the strings of error and warning messages.

    They are the strings inside raise statements and calls of warn, those of functions that are called there or that
    build errors (docstrings excepted), and those of module constants that are named there.
    """
    raises = [node for node in ast.walk(tree) if isinstance(node, ast.Raise) or is_warning(node)]
    constants = {
        target.id: node.value
        for node in ast.iter_child_nodes(tree)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    called = {
        inner.func.id
        for node in raises
        for inner in ast.walk(node)
        if isinstance(inner, ast.Call) and isinstance(inner.func, ast.Name)
    }
    made = {
        node.func.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id.endswith(("Error", "Input"))
    }
    named = {inner.id for node in raises for inner in ast.walk(node) if isinstance(inner, ast.Name)}
    places: list[ast.AST] = [*raises, *(value for name, value in constants.items() if name in named)]
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            builds = any(
                isinstance(inner, ast.Call) and isinstance(inner.func, ast.Name) and inner.func.id in made
                for inner in ast.walk(node)
            )
            if node.name in called or builds:
                places += node.body[1:] if ast.get_docstring(node) else node.body
    for place in places:
        for inner in ast.walk(place):
            if isinstance(inner, ast.Constant) and isinstance(inner.value, str):
                yield OTHER_PROGRAM.sub("", inner.value)


def test_the_sweep_sees_flags() -> None:
    code = "def hint():\n    return 'type --fresh'\ndef f(x):\n    'doc --x'\n    raise E(f'{x} with --out {hint()}')"
    assert [text for text in raised_strings(ast.parse(code)) if FLAG.search(text)] == [" with --out ", "type --fresh"]
    assert not any(FLAG.search(text) for text in raised_strings(ast.parse("raise E('`ray start --head`')")))
    for code in ("import warnings\nwarnings.warn('use --fresh')", "HINT = 'use --fresh'\nraise E(HINT)"):
        assert any(FLAG.search(text) for text in raised_strings(ast.parse(code))), code


def test_library_errors_advise_no_flags() -> None:
    """Neither the command line nor the page is imported by the library."""
    assert {"errors.py", "methods", "models"} <= set(LIBRARY)
    assert violations(lambda tree: [text for text in raised_strings(tree) if FLAG.search(text)], LIBRARY) == {}


def advised() -> set[str]:
    """Return the parameter names that errors of the library hand to the command line."""
    names: set[str] = set()
    for place, tree in source_trees().items():
        for node in ast.walk(tree) if place.partition("/")[0] in LIBRARY else ():
            if isinstance(node, ast.keyword) and node.arg == "parameters":
                names |= {
                    str(key.value)
                    for inner in ast.walk(node.value)
                    if isinstance(inner, ast.Dict)
                    for key in inner.keys
                    if isinstance(key, ast.Constant)
                }
    return names


def test_every_advised_parameter_is_an_option_of_some_command() -> None:
    options = {option for command in GROUP.commands.values() for given in command.params for option in given.opts}
    names = advised()
    assert {"arch", "out", "truth", "tune_start", "fresh"} <= names
    assert {name for name in names if name not in COMMANDS and option_of(name) not in options} == set()
    for text in COMMANDS.values():
        words = text.strip("`").format("x").split()
        command = GROUP.commands[words[1]]
        known = {option for given in command.params for option in given.opts}
        assert {word for word in words if word.startswith("--")} <= known


def test_hints_are_options_as_the_help_shows_them() -> None:
    """Hidden aliases work, and are not advised."""
    shown = {option for command in GROUP.commands.values() for given in command.params for option in given.opts}
    assert not shown & {f"--{alias}" for alias in HIDDEN_ALIASES}
    assert {f"--{name}" for name in HIDDEN_ALIASES.values()} <= shown
    assert not {option_of(name) for name in advised()} & {f"--{alias}" for alias in HIDDEN_ALIASES}


def test_parameters_in_notes_are_written_as_options() -> None:
    note = "Masks have three values; mask_kind='trimap' reads them."
    assert parameters_as_options(note) == "Masks have three values; --mask-kind trimap reads them."
    note = "m is 6; cv.choose(model, images, tune_start=['focusvit']) looks for m*"
    command = "`clairvit choose IMAGES --tune-start focusvit --out recipe.json`"
    assert parameters_as_options(note) == f"m is 6; {command} looks for m*"


def test_hints_are_options_of_the_command_that_was_typed() -> None:
    error = BadInput("No.", parameters={"arch": "timm:NAME", "by_head": "True", "fresh": "True", "pretrained": "False"})
    explain, finetune = GROUP.commands["explain"], GROUP.commands["finetune"]
    assert with_options(error, explain) == "No. On the command line: --arch timm:NAME, --heads, --no-pretrained."
    assert with_options(error, finetune) == "No. On the command line: --arch timm:NAME, --fresh, --no-pretrained."
    assert with_options(error) == "No."
    with click.Context(finetune):
        assert "--fresh" in with_options(error)
    assert with_options(ValueError("no"), explain) == "no"
    error = BadInput("No.", parameters={"tune_start": "focusvit(m=auto)"})
    assert "--tune-start 'focusvit(m=auto)' --out" in with_options(error, explain)


def test_parameters_survive_another_process() -> None:
    error = pickle.loads(pickle.dumps(ModelUnavailable("No.", parameters={"arch": "timm:NAME"})))
    assert (str(error), error.parameters) == ("No.", {"arch": "timm:NAME"})


def test_the_command_line_adds_its_options(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    import torch
    from safetensors.torch import save_file

    save_file({"head.weight": torch.zeros(2, 3)}, weights)
    assert main(["explain", "demo", "--model", f"file:{weights}"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "add arch='timm:NAME'" in said
    assert said.endswith("On the command line: --arch timm:NAME.")


# Asserts

PURE = {"isinstance", "callable", "len", "all", "any", "hasattr", "issubclass", "set", "type"}


def acting_asserts(tree: ast.AST) -> list[str]:
    """Return asserts that do more than look: calls of anything but pure builtins, assignments, awaits, yields."""
    acting = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            calls = [inner for inner in ast.walk(node.test) if isinstance(inner, ast.Call)]
            acts = any(not (isinstance(call.func, ast.Name) and call.func.id in PURE) for call in calls)
            acts |= any(isinstance(inner, ast.NamedExpr | ast.Await | ast.Yield) for inner in ast.walk(node.test))
            if acts:
                acting.append(ast.unparse(node))
    return acting


@functools.cache
def properties_that_raise() -> frozenset[str]:
    """Return the names of properties of the package that raise errors by themselves: reading one is a check."""
    names = set()
    for tree in source_trees().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and any("property" in ast.unparse(one) for one in node.decorator_list):
                calls = {
                    inner.func.attr
                    for inner in ast.walk(node)
                    if isinstance(inner, ast.Call) and isinstance(inner.func, ast.Attribute)
                }
                checks = any(call.startswith(("check", "need")) for call in calls)
                if checks or any(isinstance(inner, ast.Raise) for inner in ast.walk(node)):
                    names.add(node.name)
    return frozenset(names)


def test_the_sweep_sees_asserts_that_act() -> None:
    code = "assert f(x)\nassert x.pop()\nassert (y := 3)\nassert isinstance(x, int)\nassert x is not None"
    assert acting_asserts(ast.parse(code)) == ["assert f(x)", "assert x.pop()", "assert (y := 3)"]
    assert {"study_target", "layout", "in_order"} <= properties_that_raise()


def checking_asserts(tree: ast.AST) -> list[str]:
    """Return asserts that read a property which raises, and do not only narrow a type."""
    checking = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            read = {inner.attr for inner in ast.walk(node.test) if isinstance(inner, ast.Attribute)}
            narrows = isinstance(node.test, ast.Compare) and isinstance(node.test.ops[0], ast.IsNot)
            if not narrows and read & properties_that_raise():
                checking.append(ast.unparse(node))
    return checking


def test_asserts_have_no_side_effects() -> None:
    """python -O removes them. They may only tell the type checker what is true anyway."""
    assert violations(acting_asserts) == {}
    assert checking_asserts(ast.parse("assert study.layout == 3")) == ["assert study.layout == 3"]
    assert violations(checking_asserts) == {}


@pytest.mark.slow
def test_a_wrong_target_is_refused_with_and_without_asserts(tmp_path: Path) -> None:
    """`reproduce` checked --target inside an assert, so that with -O it went on and loaded a model."""
    arguments = ["reproduce", "joita", "--data", f"folder:{tmp_path}", "--target", "cat", "--model", "nonsense"]
    answers = [
        subprocess.run([sys.executable, *switch, "-m", "clairvit", *arguments], capture_output=True, encoding="utf-8")
        for switch in ([], ["-O"])
    ]
    assert [done.returncode for done in answers] == [2, 2]
    assert answers[0].stderr == answers[1].stderr
    assert "target='cat' was given; expected one of predicted, label" in " ".join(answers[0].stderr.split())


# Advice


class _Silent(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Keep the test's output clean."""


def test_following_the_advice_about_addresses_works(tmp_path: Path) -> None:
    """The message says: download the image, then give the path of the file."""
    Image.new("RGB", (32, 32), "red").save(tmp_path / "red.png")
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Silent, directory=str(tmp_path))) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        address = f"http://127.0.0.1:{server.server_port}/red.png"
        with pytest.raises(BadInput, match="download it first, then give the path of the file"):
            read_image(address)
        path, _ = urlretrieve(address, tmp_path / "downloaded.png")
        server.shutdown()
    assert read_image(path).getpixel((0, 0)) == (255, 0, 0)
