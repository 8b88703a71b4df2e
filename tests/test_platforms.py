"""Every module of the package can be imported on Windows: what only POSIX has is not used, or asked for first."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

from helpers.source_files import SOURCE, source_trees, violations

POSIX_MODULES = {"fcntl", "grp", "posix", "pty", "pwd", "readline", "resource", "syslog", "termios", "tty"}
POSIX_FUNCTIONS = {
    *("chown", "chroot", "fchmod", "fchown", "fork", "forkpty", "getegid", "geteuid", "getgid", "getloadavg"),
    *("getpgid", "getpriority", "getuid", "killpg", "mkfifo", "nice", "sched_getaffinity", "setsid", "setuid"),
    *("sync", "uname", "wait3", "wait4", "waitid", "alarm", "setitimer", "sigwait", "pthread_kill", "tzset"),
    *("SIGALRM", "SIGHUP", "SIGKILL", "SIGUSR1", "SIGUSR2", "SIGCHLD", "SIGPIPE", "SIGQUIT"),
}


def unguarded(tree: ast.AST) -> list[str]:
    """Return what only POSIX has and the code uses outside `try … except ImportError` and outside a hasattr check."""
    guarded: set[int] = set()
    for node in ast.walk(tree):
        catches = isinstance(node, ast.Try) and any(
            handler.type is not None and ("ImportError" in (names := ast.unparse(handler.type)) or "Attribute" in names)
            for handler in node.handlers
        )
        asks = isinstance(node, ast.If | ast.IfExp) and any(
            word in ast.unparse(node.test) for word in ("hasattr", "sys.platform", "os.name")
        )
        if catches or asks:
            guarded.update(id(inner) for inner in ast.walk(node))
    uses = []
    for node in ast.walk(tree):
        if id(node) in guarded:
            continue
        if isinstance(node, ast.Import):
            uses += [alias.name for alias in node.names if alias.name.split(".")[0] in POSIX_MODULES]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in POSIX_MODULES:
            uses.append(str(node.module))
        elif isinstance(node, ast.Attribute) and node.attr in POSIX_FUNCTIONS and isinstance(node.value, ast.Name):
            uses += [f"{node.value.id}.{node.attr}"] if node.value.id in ("os", "signal", "time", "posix") else []
    return uses


def test_the_sweep_sees_what_it_looks_for() -> None:
    code = (
        "import fcntl\nimport os\ndef f():\n    from pwd import getpwuid\n    os.fork()\n    os.kill(1, signal.SIGKILL)"
    )
    assert sorted(unguarded(ast.parse(code))) == ["fcntl", "os.fork", "pwd", "signal.SIGKILL"]
    code = "try:\n    import fcntl\nexcept ImportError:\n    fcntl = None\nif hasattr(os, 'fork'):\n    os.fork()"
    assert unguarded(ast.parse(code)) == []


def test_nothing_is_used_that_only_posix_has() -> None:
    assert len(source_trees()) > 100
    assert violations(unguarded) == {}


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
