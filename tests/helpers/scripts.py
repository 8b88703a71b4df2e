"""Scripts that are no part of the package (benchmarks, .ci) as modules."""

from __future__ import annotations

import functools
import importlib.util
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


@functools.cache
def load_script(path: str) -> Any:
    """Return the module of a script, given by its path below the root of the repository; it is executed once."""
    file = ROOT / path
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
