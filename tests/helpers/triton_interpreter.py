"""Run the small cases of Triton kernels on the CPU, in a process of its own: Triton reads a variable on import."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest


def interpreted_lines(module: str, function: str) -> list[str]:
    """Return what a function of a test module prints under Triton's interpreter; skip where there is no Triton."""
    if find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    tests = Path(__file__).parent.parent
    path = os.pathsep.join([str(tests), str(tests.parent / "src"), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    code = f"from {module} import {function}; {function}()"
    output = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert output.returncode == 0, output.stderr
    return output.stdout.splitlines()
