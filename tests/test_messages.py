"""What the library says: errors are in terms of Python, the command line adds its options, -O changes nothing."""

from __future__ import annotations

import ast
import builtins
import functools
import importlib
import pickle
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.request import urlretrieve

import pytest
import typer
from PIL import Image

import clairvit as cv
from clairvit.cli import main
from clairvit.cli.app import HIDDEN_ALIASES, app
from clairvit.cli.declare import TypedCommand
from clairvit.cli.hints import SUFFIXES, with_options, worded
from clairvit.errors import Advice, Argument, BadInput, Call, Message, ModelUnavailable, Placeholder, Verb
from clairvit.models.image_files import read_image
from helpers.source_files import source_trees, violations

LIBRARY = tuple({place.partition("/")[0] for place in source_trees()} - {"cli", "web"})
FLAG = re.compile(r"(?<![\w-])--[a-z]")
OTHER_PROGRAM = re.compile(r"`(?!clairvit)[^`]*`")  # `ray start --head`
GROUP: Any = typer.main.get_command(app)


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
    called_errors = {
        node.func.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id.endswith(("Error", "Input"))
    }
    named = {inner.id for node in raises for inner in ast.walk(node) if isinstance(inner, ast.Name)}
    places: list[ast.AST] = [*raises, *(value for name, value in constants.items() if name in named)]
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            builds = any(
                isinstance(inner, ast.Call) and isinstance(inner.func, ast.Name) and inner.func.id in called_errors
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


def typed(name: str) -> TypedCommand:
    """Return a command of the app as `cli/hints.py` sees it."""
    options = {flag: str(option.metavar or "") for option in GROUP.commands[name].params for flag in option.opts}
    return TypedCommand(name, options)


class Unknown(str):
    """Stand for a local variable of a function that gives advice, a text or a number."""

    def __truediv__(self, other: float) -> float:
        return 1 / other

    def __getattr__(self, name: str) -> Unknown:
        if name.startswith("__"):
            raise AttributeError(name)
        return Unknown("x")


class Locals(dict[str, Any]):
    """Stand for all of its local variables."""

    def __missing__(self, name: str) -> Any:
        return getattr(builtins, name, Unknown("x"))


@functools.cache
def advice_of_the_library() -> tuple[Advice, ...]:
    """Return every piece of advice in the source of the library; what is only known at run time is "x" in it."""
    pieces: dict[str, Advice] = {}
    for place, tree in source_trees().items():
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
        calls = [node for node in calls if node.func.id in ("Argument", "Verb")]  # type: ignore[attr-defined]
        if not calls or place == "errors.py" or place.partition("/")[0] not in LIBRARY:
            continue
        module = importlib.import_module(f"clairvit.{place.removesuffix('.py').replace('/', '.')}")
        for node in calls:
            piece = eval(ast.unparse(node), {}, Locals(vars(module)))
            if not isinstance(piece.name, Unknown):
                pieces[str(piece)] = piece
    return tuple(pieces.values())


def parsed(text: str, command: str) -> None:
    """Parse options, or a whole command in backticks, by the app; an option that does not exist is an error."""
    if text.startswith("`"):
        program, command, *words = shlex.split(text.strip("`"))
        assert program == "clairvit"
    else:
        words = shlex.split(text)
        words += [
            "x" for entry in GROUP.commands[command].params if entry.required and not entry.opts[0].startswith("-")
        ]
    GROUP.commands[command].make_context(command, words)


@pytest.mark.parametrize("piece", advice_of_the_library(), ids=str)
def test_advice_is_an_option_that_exists_or_stays_python(piece: Advice) -> None:
    """Of every command: what is printed can be typed as it is, and each command advises options that it has."""
    reached = []
    for name in GROUP.commands:
        text = worded(Message(piece), typed(name))
        if text == str(piece):
            continue
        reached.append(name)
        assert "cv." not in text
        for suffix in SUFFIXES.values():
            text = text.removesuffix(suffix)
        parsed(f"{text} 1" if getattr(piece, "value", ...) is None else text, name)
    assert reached, "some command can do what the library advises"


def test_the_advice_of_the_library_is_found() -> None:
    names = {str(piece) for piece in advice_of_the_library()}
    assert {"arch='timm:NAME'", "mask_kind='trimap'", "fresh=True", "target=cv.Query(INDEX)", "masks=[…]"} <= names
    assert any(name.startswith("cv.choose(model, images, tune_start=") for name in names)
    assert len(names) > 25


def test_options_that_do_not_exist_are_found_by_the_test() -> None:
    with pytest.raises(Exception, match="No such option"):
        parsed("--nosuch 3", "explain")


def test_hints_are_options_as_the_help_shows_them() -> None:
    """Hidden aliases work, and are not advised."""
    shown = {option for command in GROUP.commands.values() for given in command.params for option in given.opts}
    assert not shown & {f"--{alias}" for alias in HIDDEN_ALIASES}
    assert {f"--{name}" for name in HIDDEN_ALIASES.values()} <= shown


def test_the_library_writes_advice_in_python() -> None:
    box = tuple(map(Placeholder, ("LEFT", "TOP", "RIGHT", "BOTTOM")))
    message = Message(
        "Name ", Argument("target", Call("Region", Placeholder("CLASS"), box=box)), "; or give ", Argument("mean")
    )
    assert message == "Name target=cv.Region(CLASS, box=(LEFT, TOP, RIGHT, BOTTOM)); or give mean="
    assert worded(message, typed("explain")) == "Name --region CLASS@LEFT,TOP,RIGHT,BOTTOM; or give --mean"
    assert (
        worded(message, typed("finetune"))
        == "Name target=cv.Region(CLASS, box=(LEFT, TOP, RIGHT, BOTTOM)); or give --mean"
    )
    assert worded(message) == message, "outside a command"
    assert worded("mask_kind='trimap' in a text", typed("evaluate")) == "mask_kind='trimap' in a text", (
        "no text is read"
    )


def test_messages_in_messages_keep_their_advice() -> None:
    inner = Message("pass ", Argument("mask_kind", "trimap"), also=[Argument("size")])
    outer = Message("cat.png: ", inner, ".")
    assert outer == "cat.png: pass mask_kind='trimap'."
    assert worded(outer, typed("evaluate")) == "cat.png: pass --mask-kind trimap. On the command line: --crop."
    assert BadInput("cat.png: ", inner).advice == (Argument("mask_kind", "trimap"), Argument("size"))


def test_verbs_are_commands() -> None:
    search = Verb("choose", file="recipe.json", tune_start=["focusvit(m=auto)"])
    assert str(search) == "cv.choose(model, images, tune_start=['focusvit(m=auto)']).save('recipe.json')"
    command = "`clairvit choose IMAGES --tune-start 'focusvit(m=auto)' --out recipe.json`"
    assert worded(Message(search), typed("explain")) == command
    layers = Message("ask for them with ", Verb("explain", layers=True))
    assert worded(layers, typed("explain")) == "ask for them with --layers"
    assert worded(layers, typed("compare")) == "ask for them with `clairvit explain IMAGES --layers`"


def test_hints_are_options_of_the_command_that_was_typed() -> None:
    fresh, arch = Argument("fresh", True), Argument("arch", "timm:NAME")
    error = BadInput("No.", advice=[arch, Argument("by_head", True), fresh, Argument("pretrained", False)])
    hint = "No. On the command line: --arch timm:NAME"
    assert with_options(error, typed("explain")) == f"{hint}, --heads, --no-pretrained."
    assert with_options(error, typed("finetune")) == f"{hint}, --fresh, --no-pretrained."
    assert with_options(error) == "No."
    assert with_options(ValueError("no"), typed("explain")) == "no"
    labels = BadInput("Expected ", Argument("labels", [...], of="evaluate"), ".")
    assert with_options(labels, typed("evaluate")) == "Expected --truth FILE."


def test_advice_survives_another_process() -> None:
    error = ModelUnavailable("Add ", Argument("arch", "timm:NAME"), ".", advice=[Argument("out", "PATH")])
    copied = pickle.loads(pickle.dumps(error))
    assert (str(copied), copied.advice) == ("Add arch='timm:NAME'.", error.advice)
    assert with_options(copied, typed("explain")) == with_options(error, typed("explain"))


def test_the_command_line_writes_its_options(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    import torch
    from safetensors.torch import save_file

    save_file({"head.weight": torch.zeros(2, 3)}, weights)
    assert main(["explain", "demo", "--model", f"file:{weights}"]) == 2
    printed = " ".join(capsys.readouterr().err.split())
    assert printed.endswith("add --arch timm:NAME, such as --arch timm:vit_base_patch16_224.")
    with pytest.raises(BadInput, match="add arch='timm:NAME', such as arch='timm:vit_base_patch16_224'"):
        cv.load(f"file:{weights}")


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
            if isinstance(node, ast.FunctionDef) and any(
                "property" in ast.unparse(decorator) for decorator in node.decorator_list
            ):
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
def test_a_wrong_target_is_refused_with_and_without_asserts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`reproduce` checked --target inside an assert, so that with -O it went on and loaded a model."""
    arguments = ["reproduce", "joita", "--data", f"folder:{tmp_path}", "--target", "cat", "--model", "nonsense"]
    assert main(arguments) == 2
    command = [sys.executable, "-O", "-m", "clairvit", *arguments]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 2
    assert done.stderr == capsys.readouterr().err
    assert "target='cat' was given; expected one of predicted, label" in " ".join(done.stderr.split())


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
