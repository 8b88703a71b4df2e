"""Count what a warm call passes through: functions, files, packages and depth of our own frames.

    python benchmarks/road.py                          a table
    python benchmarks/road.py --out road.json          also as JSON, to compare two commits
    python benchmarks/road.py --compare before.json after.json
    python benchmarks/road.py --list explain           the functions of one call, by file

The counts are of the second call (for `bench` and the page of a second study and a second target), so that what is
loaded or found once is not in them. Comprehensions, generator expressions and lambdas are part of the function that
holds them. Only the calling thread and threads that it starts are counted, not other processes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

INNER = ("<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>", "<lambda>")
STUDY = """
models = ["pets"]
data = ["folder:{images}"]
methods = ["rollout", "attnlrp+plus"]
metrics = ["deletion"]
"""


class Counter:
    """Collects the code objects of the package that run, and the depth of its frames."""

    def __init__(self, package: Path) -> None:
        self.package = str(package)
        self.seen: set[CodeType] = set()
        self.depth = 0

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """Note a call of a function of the package."""
        if event != "call" or not self._is_ours(frame.f_code):
            return
        self.seen.add(frame.f_code)
        depth = 0
        outer: FrameType | None = frame
        while outer is not None:
            depth += self._is_ours(outer.f_code)
            outer = outer.f_back
        self.depth = max(self.depth, depth)

    def reset(self) -> None:
        """Forget what was noted."""
        self.seen, self.depth = set(), 0

    def _is_ours(self, code: CodeType) -> bool:
        return code.co_filename.startswith(self.package) and code.co_name not in INNER

    def counts(self) -> dict[str, int]:
        """Return the numbers of functions, files and packages, and the largest depth."""
        files = {code.co_filename for code in self.seen}
        packages = {Path(name).relative_to(self.package).parts[0] for name in files}
        packages = {name for name in packages if not name.endswith(".py")}
        return {"functions": len(self.seen), "files": len(files), "packages": len(packages), "depth": self.depth}


@contextlib.contextmanager
def counting(package: Path) -> Iterator[Counter]:
    """Count calls in this thread and in threads that start inside."""
    counter = Counter(package)
    threading.setprofile(counter)
    sys.setprofile(counter)
    try:
        yield counter
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def write_photos(folder: Path) -> Path:
    """Write four pictures of noise, each different, and return their folder."""
    from PIL import Image

    photos = folder / "photos"
    photos.mkdir()
    for number in range(4):
        Image.effect_noise((256, 256), 40 + number).convert("RGB").save(photos / f"photo-{number}.png")
    return photos


def page_request(stack: contextlib.ExitStack, model: Any) -> Callable[[int], object]:
    """Return a function that asks the page's server for the map of another class each time."""
    from fastapi.testclient import TestClient

    from clairvit.web.app import create_app
    from clairvit.web.state import create_state

    state = create_state([model], time_limit=300)
    stack.callback(state.close)
    app = create_app(state)
    client = stack.enter_context(TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=True))

    def request(number: int) -> None:
        reply = client.post("/api/explain", data={"target": model.labels[number]})
        if reply.status_code != 200:
            raise SystemExit(f"/api/explain failed: {reply.text}")

    return request


def flows(folder: Path, stack: contextlib.ExitStack) -> dict[str, Callable[[int], object]]:
    """Return the calls that are counted; each takes the number of the call."""
    from typer.testing import CliRunner

    import clairvit as cv
    from clairvit.cli.app import app

    model = cv.load("pets")
    photos = write_photos(folder)
    (folder / "study.toml").write_text(STUDY.format(images=photos))

    def bench(number: int) -> None:
        result = CliRunner().invoke(app, ["bench", str(folder / "study.toml"), "--out", str(folder / f"out-{number}")])
        if result.exit_code:
            raise SystemExit(f"bench failed: {result.output}")

    return {
        "explain": lambda number: cv.explain(model, "demo"),
        "explain saliency": lambda number: cv.explain(model, "demo", "saliency"),
        "evaluate": lambda number: cv.evaluate(model, str(photos), "attnlrp+plus", "deletion"),
        "bench": bench,
        "page": page_request(stack, model),
    }


def count() -> dict[str, dict[str, int]]:
    """Return the counts of the second call of each flow."""
    import clairvit

    counts = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        counting(Path(clairvit.__file__).parent) as counter,
        contextlib.ExitStack() as stack,
    ):
        for name, flow in flows(Path(folder), stack).items():
            flow(0)
            counter.reset()
            flow(1)
            counts[name] = counter.counts()
    return counts


def print_functions(name: str) -> None:
    """Print the functions that the second call of a flow passes, the files with most of them first."""
    import clairvit

    package = Path(clairvit.__file__).parent
    with tempfile.TemporaryDirectory() as folder, counting(package) as counter, contextlib.ExitStack() as stack:
        flow = flows(Path(folder), stack)[name]
        flow(0)
        counter.reset()
        flow(1)
        codes = sorted(counter.seen, key=lambda code: (code.co_filename, code.co_firstlineno))
    by_file: dict[str, list[str]] = {}
    for code in codes:
        by_file.setdefault(str(Path(code.co_filename).relative_to(package)), []).append(code.co_qualname)
    for file, names in sorted(by_file.items(), key=lambda item: -len(item[1])):
        print(f"{file} {len(names)}: {', '.join(names)}")


def size() -> dict[str, int]:
    """Return lines, files, public names and options of the package."""
    import clairvit as cv
    from clairvit.methods.registry import list_methods
    from clairvit.metrics.registry import list_metrics

    flat = [name for name in dir(cv) if not isinstance(getattr(cv, name), ModuleType) and name != "__version__"]
    sources = list(Path(cv.__file__).parent.rglob("*.py"))
    return {
        "files": len(sources),
        "lines": sum(len(path.read_text(encoding="utf-8").splitlines()) for path in sources),
        "public names": len(flat),
        "options of methods": sum(len(method.options) for method in list_methods()),
        "options of metrics": sum(len(metric.options) for metric in list_metrics()),
    }


def print_counts(counts: Mapping[str, Mapping[str, int]], sizes: Mapping[str, int]) -> None:
    """Print one row per call, and the size of the package."""
    columns = ("functions", "files", "packages", "depth")
    print(f"{'':20}" + "".join(f"{column:>11}" for column in columns))
    for name, row in counts.items():
        print(f"{name:20}" + "".join(f"{row[column]:11d}" for column in columns))
    print("\n" + "\n".join(f"{name:20}{number:11,d}" for name, number in sizes.items()))


def print_comparison(before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """Print every count of two commits as before → after."""
    for part in ("calls", "size"):
        rows = [(name, row) for name, row in before[part].items()] if part == "calls" else [("", before[part])]
        for name, row in rows:
            other = after[part][name] if name else after[part]
            cells = ", ".join(f"{key} {value:,} → {other[key]:,}" for key, value in row.items())
            print(f"{name + ': ' if name else ''}{cells}")


def main() -> None:
    """Count, or compare two files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("BEFORE", "AFTER"))
    parser.add_argument("--list", choices=("explain", "explain saliency", "evaluate", "bench", "page"))
    arguments = parser.parse_args()
    if arguments.list:
        print_functions(arguments.list)
        return
    if arguments.compare:
        print_comparison(*(json.loads(path.read_text()) for path in arguments.compare))
        return
    warnings.simplefilter("ignore")
    counts, sizes = count(), size()
    print_counts(counts, sizes)
    if arguments.out:
        arguments.out.write_text(json.dumps({"calls": counts, "size": sizes}, indent=1))


if __name__ == "__main__":
    main()
