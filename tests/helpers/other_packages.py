"""Packages of others: an installed one with entry points, and a module that is put beside our own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).parent.parent.parent / "src"
TESTS = Path(__file__).parent.parent
METHOD = '''
from torch import Tensor

import clairvit as cv
from clairvit.methods.aggregation import Total
from clairvit.methods.registry import FORWARD


@cv.method(
    "token-length", output="tokens", aggregation=Total(), requires=FORWARD, class_specific=False, paper="Doe, 2026"
)
def token_length(layer: cv.extend.LayerView, power: float = 1.0) -> Tensor:
    """|x|^power of each token."""
    return layer.x.norm(dim=-1) ** power
'''
METRIC = '''
from torch import Tensor

import clairvit as cv


@cv.metric("peak-share", better="higher", span=(0, 1), paper="Doe, 2026")
def peak_share(context: cv.extend.EvalContext, power: float = 1.0) -> Tensor:
    """Return the brightest patch's share of the map."""
    maps = context.maps.flatten(2).abs() ** power
    return maps.amax(-1) / maps.sum(-1)
'''
FACTS = """
[token-length]
title = "Length of tokens"
sentence = "Shows which parts have long vectors."
also = ["norm of activations"]
aliases = ["activationnorm"]
references = ["doe2026lengths", "abnar2020quantifying"]
discrepancies = "The paper squares the lengths."

[references.doe2026lengths]
type = "misc"
author = "Doe, Jane"
title = "Lengths of tokens"
year = 2026
"""
METRIC_FACTS = """
[peak-share]
references = ["doe2026lengths"]
discrepancies = "The paper leaves the border out."
"""


def write_package(folder: Path, name: str, files: Mapping[str, str], **groups: str) -> None:
    """Write an installed package: modules and facts, and a dist-info that declares entry points.

    Args:
        folder: A folder of the import path.
        name: Of the package and of its distribution.
        files: File name -> text.
        **groups: "methods" and "metrics" -> the module of the package that registers them.
    """
    package = folder / name
    package.mkdir(parents=True)
    for file, text in {"__init__.py": "", **files}.items():
        (package / file).write_text(text, encoding="utf-8")
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n", encoding="utf-8")
    lines = [f"[clairvit.{group}]\n{name} = {name}.{module}\n" for group, module in groups.items()]
    (info / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")


def answers_of(code: str, *paths: Path, folder: Path | None = None) -> tuple[Any, str]:
    """Run Python in a new process with these folders on the import path.

    Returns:
        The value of `answer` at the end, as JSON, and what was written to stderr.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (*paths, SOURCE, TESTS)))}
    script = f"{code}\nimport json\nprint('\\n' + json.dumps(answer))"
    ran = subprocess.run(
        [sys.executable, "-c", script], cwd=folder, env=environment, capture_output=True, encoding="utf-8", check=False
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1]), ran.stderr
