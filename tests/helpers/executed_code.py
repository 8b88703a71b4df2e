"""Run the code of pages and notebooks in this process and undo what it leaves behind: a process each costs seconds."""

from __future__ import annotations

import ast
import base64
import io
import json
import os
import random
import re
import shlex
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import chdir, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib import pyplot

from clairvit import plugins
from clairvit.cli import main
from clairvit.methods.registry import METHODS
from clairvit.metrics.registry import METRICS
from helpers.page_setup import PageSetup

PICTURE = "data:image/png;base64,"


def python_blocks(page: Path) -> list[str]:
    """Return the Python blocks of a page in their order."""
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


def write_user_files(page: Path, folder: Path) -> None:
    """Write the blocks of a page that begin with `# my.py` or `# my.toml` to files of that name."""
    for name, text in re.findall(r"```\w+\n# (\w+\.\w+)\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
        (folder / name).write_text(text, encoding="utf-8")


@contextmanager
def isolated(folder: Path) -> Iterator[dict[str, Any]]:
    """Give a namespace to run code in; restore folder, random state, registries, warnings and figures at the end.

    Files of the folder that were imported are forgotten.
    """
    python_state, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        with chdir(folder), METHODS.restored(), METRICS.restored(), torch.random.fork_rng(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            yield {"__name__": "__main__"}
    finally:
        for name, module in [*sys.modules.items()]:
            if str(getattr(module, "__file__", None)).startswith(f"{folder}{os.sep}"):
                del sys.modules[name]
        for source in plugins.imported():
            del plugins._imported[source]
        pyplot.close("all")
        random.setstate(python_state)
        np.random.set_state(numpy_state)  # noqa: NPY002


def run_page(page: Path, folder: Path, setup: PageSetup) -> dict[str, Any]:
    """Run all Python of a page from top to bottom, after its setup, and return its namespace."""
    with isolated(folder) as namespace:
        namespace.update(setup.make(folder))
        exec(compile(setup.code("\n".join(python_blocks(page))), f"Python of {page.name}", "exec"), namespace)
    return namespace


# Notebooks


@dataclass(frozen=True)
class Notebook:
    """A notebook of format 4."""

    path: Path
    document: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path) -> Notebook:
        """Read a file."""
        return cls(path, json.loads(path.read_text(encoding="utf-8")))

    @property
    def cells(self) -> list[dict[str, Any]]:
        """Return the cells."""
        return list(self.document["cells"])

    def sources(self, kind: str) -> list[str]:
        """Return the texts of the cells of one kind, `code` or `markdown`."""
        return ["".join(cell["source"]) for cell in self.cells if cell["cell_type"] == kind]


def run_notebook(notebook: Notebook, folder: Path, parameters: Mapping[str, Any]) -> list[str]:
    """Run the code cells in one namespace and return what is displayed: HTML, pictures as data URLs, or text.

    As in Jupyter, a cell displays the value of its last expression and the figures that it leaves open.

    Args:
        notebook: The notebook.
        folder: The working directory.
        parameters: Values set after the cell that is tagged `parameters`, which must set the same names.
    """
    displayed = []
    with isolated(folder) as namespace:
        namespace["_command"] = run_command
        for number, cell in enumerate(notebook.cells):
            if cell["cell_type"] != "code":
                continue
            displayed += _run_cell("".join(cell["source"]), namespace, f"{notebook.path.name}[{number}]")
            if "parameters" in cell["metadata"].get("tags", []):
                assert set(parameters) <= set(namespace), "the tests set parameters that the notebook does not have"
                namespace.update(parameters)
    return displayed


def _run_cell(source: str, namespace: dict[str, Any], name: str) -> list[str]:
    source = re.sub(r"^(\s*)%pip .*$", r"\1pass", source, flags=re.MULTILINE)
    source = re.sub(r"^(\s*)!clairvit (.*)$", r'\1_command(rf"""\2 """)', source, flags=re.MULTILINE)
    tree = ast.parse(source, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, name, "exec"), namespace)
    value = eval(compile(ast.Expression(last.value), name, "eval"), namespace) if isinstance(last, ast.Expr) else None
    shows = value is not None and not source.rstrip().endswith(";")
    displayed = [_display(value)] if shows else []
    for figure in map(pyplot.figure, pyplot.get_fignums()):
        file = io.BytesIO()
        figure.savefig(file, format="png", dpi=40)
        displayed.append(_picture(file.getvalue()))
    pyplot.close("all")
    return displayed


def _display(value: Any) -> str:
    """Return what a notebook shows of a value: the richest representation that it has."""
    if hasattr(value, "_repr_html_"):
        return str(value._repr_html_())
    if hasattr(value, "_repr_png_"):
        return _picture(value._repr_png_())
    return repr(value)


def _picture(png: bytes) -> str:
    return PICTURE + base64.b64encode(png).decode()


def run_command(line: str) -> None:
    """Run a command line of clairvit; it must succeed."""
    status = main(shlex.split(line))
    assert status == 0, f"clairvit {line}: exit status {status}"
