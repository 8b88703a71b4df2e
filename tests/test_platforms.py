"""Every module of the package can be imported on Windows: ruff bans what only POSIX has (pyproject.toml)."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.source_files import SOURCE, source_trees

ROOT = SOURCE.parent.parent
POSIX_MODULES = {"fcntl", "grp", "posix", "pty", "pwd", "readline", "resource", "syslog", "termios", "tty"}
BANNED = {
    "import fcntl": "fcntl",
    "from pwd import getpwuid": "pwd",
    "import os\nos.fork()": "os.fork",
    "from os import fork": "os.fork",
    "import signal\nsignal.signal(signal.SIGKILL, None)": "signal.SIGKILL",
    "import random": "random",
    "import torch\ntorch.manual_seed(0)": "torch.manual_seed",
    "import numpy as np\nnp.random.seed(0)": "numpy.random.seed",
    "import pickle\npickle.loads(b'')": "pickle.loads",
    "import torch\ntorch.load('x')": "torch.load",
}


@pytest.mark.parametrize("code", BANNED)
def test_ruff_bans_it_in_the_package_alone(code: str) -> None:
    """`make lint` runs it on the whole package; here is shown that it sees what it looks for."""
    ruff = shutil.which("ruff", path=str(Path(sys.executable).parent)) or shutil.which("ruff")
    assert ruff, "make test installs ruff"
    command = [ruff, "check", "--no-cache", "--select", "TID251", "--output-format", "concise", "--stdin-filename"]
    for place, banned in (("src/clairvit/numerics.py", True), ("tests/test_numerics.py", False)):
        done = subprocess.run([*command, str(ROOT / place), "-"], input=code, capture_output=True, text=True, cwd=ROOT)
        assert (f"`{BANNED[code]}` is banned" in done.stdout) == banned, done.stdout + done.stderr


IMPORT_ALL = """
import importlib, os, pathlib, sys
import torch, torchvision, timm, transformers, open_clip, filelock, fastapi, uvicorn, ray, rich, typer
import matplotlib.pyplot
import multiprocessing.popen_spawn_posix, scipy.stats, skimage.segmentation, duckdb, pyarrow.parquet

class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name in NAMES:
            raise ImportError(f"{name} is not there on Windows")

for name in NAMES:
    sys.modules.pop(name, None)
sys.meta_path.insert(0, Missing())
for name in NAMES:
    try:
        importlib.import_module(name)
    except ImportError:
        pass
    else:
        sys.exit(f"{name} could be imported")
root = pathlib.Path(sys.argv[1])
names = sorted(".".join(file.relative_to(root.parent).with_suffix("").parts) for file in root.rglob("*.py"))
modules = [name.removesuffix(".__init__") for name in names if not name.endswith("__main__")]
for module in modules:
    importlib.import_module(module)
print(len(modules))
"""


@pytest.mark.slow
def test_every_module_can_be_imported_without_posix_modules() -> None:
    """Libraries may use what they find; the package itself may not."""
    blocked = sorted(POSIX_MODULES - {"posix"})  # Python itself is built on posix here
    code = f"NAMES = {blocked!r}\n{IMPORT_ALL}"
    done = subprocess.run([sys.executable, "-c", code, str(SOURCE)], capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == len([place for place in source_trees() if not place.endswith("__main__.py")])
