"""The notebooks: valid files without outputs that run from top to bottom, offline, and show pictures."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from helpers.executed_code import PICTURE, Notebook, run_notebook

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "notebooks").glob("*.ipynb"))
# Values of the cell tagged `parameters` with which a notebook runs in a few seconds.
QUICK: dict[str, dict[str, Any]] = {
    "01-first-explanation": {},
    "02-your-own-model": {},
    "03-which-method-can-i-trust": {"IMAGES": 6, "METHODS": ["attnlrp+plus", "rollout"]},
    "04-a-prompt": {},
    "05-a-paper-reproduced": {"IMAGES": 4},
    "06-a-study-on-a-cluster": {"IMAGES": 4},
}


def test_every_notebook_is_run_and_listed() -> None:
    assert [path.stem for path in FILES] == list(QUICK)
    page = (ROOT / "docs" / "notebooks.md").read_text(encoding="utf-8")
    assert re.findall(r"`notebooks/([\w-]+)\.ipynb`", page) == list(QUICK)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_notebook_is_valid_and_stripped(path: Path) -> None:
    """By the schema of nbformat 4.5; a file that Jupyter has saved with outputs fails."""
    notebook = Notebook.read(path)
    assert (notebook.document["nbformat"], notebook.document["nbformat_minor"]) == (4, 5)
    assert set(notebook.document["metadata"]) == {"kernelspec", "language_info"}
    assert path.read_text(encoding="utf-8") == json.dumps(notebook.document, indent=1, ensure_ascii=False) + "\n"
    identifiers = [cell["id"] for cell in notebook.cells]
    assert len(set(identifiers)) == len(identifiers)
    assert all(re.fullmatch(r"[A-Za-z0-9_-]{1,64}", identifier) for identifier in identifiers)
    for cell in notebook.cells:
        fields = {"cell_type", "id", "metadata", "source"}
        if cell["cell_type"] == "code":
            fields |= {"execution_count", "outputs"}
            assert cell["execution_count"] is None
            assert cell["outputs"] == [], "strip the outputs before a commit"
        assert set(cell) == fields
        assert isinstance(cell["source"], list)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_notebook_begins_with_a_guarded_install_and_ends_with_what_next(path: Path) -> None:
    notebook = Notebook.read(path)
    first = notebook.sources("code")[0]
    assert 'find_spec("clairvit") is None:\n    %pip install -q ' in first
    assert notebook.sources("markdown")[0].startswith("# ")
    assert notebook.cells[-1]["cell_type"] == "markdown"
    assert "## What next" in notebook.sources("markdown")[-1]
    tagged = [cell for cell in notebook.cells if "parameters" in cell["metadata"].get("tags", [])]
    assert len(tagged) == bool(QUICK[path.stem])
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    if not project.get("urls"):
        assert "colab.research" not in path.read_text(encoding="utf-8"), "a badge needs a public address"


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_notebook_runs_and_shows_a_picture(path: Path, tmp_path: Path) -> None:
    displayed = run_notebook(Notebook.read(path), tmp_path, QUICK[path.stem])
    assert any(PICTURE in shown for shown in displayed)
