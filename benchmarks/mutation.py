"""Make seeded mistakes in copies of the package, one at a time, and count which of them the tests see.

    python benchmarks/mutation.py --mutants 66 --jobs 2 --out out/mutation      # goes on where it stopped
    python benchmarks/mutation.py --list                                        # the mistakes alone

A mistake is one change of one expression: a comparison that is turned, a sign, an order of arguments, a number that is
off by one, a missing `abs` or `clamp`, another default, a branch that is never taken. They are spread over the packages
by size. Each is looked for by the tests of its package and of those packages that show what it computes, the files with
its name first, until one fails; what `make test` does not see is looked for with `--cases=all`. A failure counts if the
same test passes without the mistake. The working tree is never changed.
"""

from __future__ import annotations

import argparse
import ast
import copy
import hashlib
import json
import os
import queue
import random
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
# Folders and files of tests that can see a mistake of a package, besides the folder with the package's name.
SEEN_BY = {
    "models": ["tests/tracing/test_capture.py", "tests/methods/test_contract.py", "tests/diagnostics"],
    "targets": ["tests/methods/test_contract.py", "tests/methods/test_explanation.py"],
    "data": ["tests/metrics/test_evaluate.py", "tests/bench"],
    "tracing": ["tests/methods"],
    "perturbation": ["tests/methods", "tests/metrics"],
    "methods": ["tests/parity", "tests/test_change_between_calls.py"],
    "metrics": ["tests/test_change_between_calls.py", "tests/bench/test_own_code.py"],
    "bench": ["tests/cli/test_bench.py", "tests/report"],
    "papers": ["tests/cli/test_reproduce.py"],
    "audit": ["tests/cli/test_expect.py", "tests/cli/test_mistakes.py"],
    "training": ["tests/cli/test_finetune.py"],
    "diagnostics": ["tests/cli/test_doctor.py"],
    "plotting": ["tests/report", "tests/cli/test_commands.py"],
    "reports": ["tests/report", "tests/cli/test_report.py"],
    "cuda": ["tests/methods/test_operation_counts.py", "tests/methods/test_large_layers.py"],
    "compat": ["tests/methods", "tests/parity", "tests/papers"],
}
# Run on a GPU, or nothing to get wrong
WITHOUT_TESTS_HERE = ("cuda/kernels/", "cuda/graphs.py", "_version.py", "__main__.py")
MARKERS = "not (browser or ray or cuda)"
TURNED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
LEFT_OUT = {"abs", "relu", "clamp", "clamp_min", "softmax", "sqrt", "square", "flip", "cumsum", "sigmoid", "strip"}
LIBRARIES = {"torch", "np", "math", "F", "nn"}  # torch.abs(x) is another call than x.abs()
EXCHANGED = {"max": "min", "min": "max", "amax": "amin", "sum": "mean", "mean": "sum", "any": "all", "all": "any"}
EXCHANGED |= {"argmax": "argmin", "zeros_like": "ones_like", "ones_like": "zeros_like", "zeros": "ones", "triu": "tril"}


@dataclass(frozen=True)
class Mutant:
    """One mistake: the bytes start…end of a file become `after`."""

    path: str  # below src/clairvit
    line: int
    kind: str
    start: int
    end: int
    before: str
    after: str

    @property
    def package(self) -> str:
        """Return the package, or "top level"."""
        return self.path.partition("/")[0] if "/" in self.path else "top level"

    @property
    def key(self) -> str:
        """Return a name that is the same in every run on the same source."""
        return hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()[:10]

    def __str__(self) -> str:
        return f"{self.path}:{self.line} ({self.kind}) {_short(self.before)} → {_short(self.after)}"


def _short(text: str) -> str:
    text = " ".join(text.split())
    return f"`{text if len(text) <= 60 else text[:57] + '...'}`"


# Mistakes


def changes(node: ast.AST) -> Iterator[tuple[str, ast.AST, ast.AST]]:
    """Yield the mistakes that can be made at one node: the kind, the expression that changes, and what it becomes."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in TURNED:
        operators = [TURNED[type(node.ops[0])](), *node.ops[1:]]
        yield "comparison", node, ast.Compare(node.left, operators, node.comparators)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub) and not _of_text(node):
        yield "sign", node, ast.BinOp(node.left, ast.Sub() if isinstance(node.op, ast.Add) else ast.Add(), node.right)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.Div) and not _of_text(node):
        yield (
            "factor",
            node,
            ast.BinOp(node.left, ast.Div() if isinstance(node.op, ast.Mult) else ast.Mult(), node.right),
        )
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Not):
        yield "sign" if isinstance(node.op, ast.USub) else "negation", node, node.operand
    elif isinstance(node, ast.BoolOp):
        yield "and, or", node, ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
    elif isinstance(node, ast.Call):
        yield from _call_changes(node)
    elif isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Store):
        for index in ast.walk(node.slice):
            if isinstance(index, ast.Constant) and type(index.value) is int:
                yield "off by one", index, ast.Constant(index.value + 1)
    elif isinstance(node, ast.FunctionDef):
        for default in (*node.args.defaults, *node.args.kw_defaults):
            if isinstance(default, ast.Constant) and isinstance(default.value, bool):
                yield "default", default, ast.Constant(not default.value)
            elif isinstance(default, ast.Constant) and isinstance(default.value, int | float):
                yield "default", default, ast.Constant(default.value * 2 + 1)
    elif isinstance(node, ast.If) and not (isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"):
        yield "branch never taken", node.test, ast.Constant(False)


def _call_changes(node: ast.Call) -> Iterator[tuple[str, ast.AST, ast.AST]]:
    first, second = (*node.args, None, None)[:2]
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    of_names = isinstance(first, ast.Name) and isinstance(second, ast.Name) and ast.dump(first) != ast.dump(second)
    if of_names and name not in ("isinstance", "issubclass", "getattr", "hasattr"):
        yield (
            "arguments swapped",
            node,
            ast.Call(node.func, [node.args[1], node.args[0], *node.args[2:]], node.keywords),
        )
    if (
        isinstance(node.func, ast.Attribute)
        and node.func.attr in LEFT_OUT
        and not (isinstance(node.func.value, ast.Name) and node.func.value.id in LIBRARIES)
    ):
        yield "call left out", node, node.func.value
    if name in EXCHANGED and (isinstance(node.func, ast.Attribute) or name in ("max", "min", "any", "all")):
        changed = copy.deepcopy(node)
        other = EXCHANGED[name]
        changed.func = (
            ast.Attribute(node.func.value, other) if isinstance(node.func, ast.Attribute) else ast.Name(other)
        )
        yield "another function", node, changed
    if isinstance(node.func, ast.Name) and node.func.id == "range" and isinstance(first, ast.expr):
        changed = copy.deepcopy(node)
        changed.args[-1] = ast.BinOp(changed.args[-1], ast.Sub(), ast.Constant(1))
        yield "off by one", node, changed


def _of_text(node: ast.AST) -> bool:
    """Return whether strings, lists or paths are joined: another operator would be an error at once."""
    return any(
        isinstance(inner, ast.JoinedStr | ast.List | ast.Tuple)
        or (isinstance(inner, ast.Constant) and isinstance(inner.value, str))
        for inner in ast.walk(node)
    )


def sites(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield the nodes of a module that run: no annotations, assertions, overloads, or texts of errors."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Assert | ast.Raise | ast.AnnAssign):
            continue
        yield node
        waiting += [
            child
            for name, value in ast.iter_fields(node)
            if name not in ("annotation", "returns", "decorator_list", "bases")
            for child in (value if isinstance(value, list) else [value])
            if isinstance(child, ast.AST) and not isinstance(child, ast.JoinedStr)
        ]


def mutants_of(source: Path, path: Path) -> list[Mutant]:
    """Return every mistake that can be made in a file."""
    text = path.read_bytes()
    lines = [0]
    for line in text.splitlines(keepends=True):
        lines.append(lines[-1] + len(line))
    found = []
    for node in sites(ast.parse(text)):
        for kind, old, new in changes(node):
            if not isinstance(old, ast.expr) or old.end_lineno is None or old.end_col_offset is None:
                continue
            start, end = lines[old.lineno - 1] + old.col_offset, lines[old.end_lineno - 1] + old.end_col_offset
            after = f"({ast.unparse(ast.fix_missing_locations(new))})"
            place = path.relative_to(source).as_posix()
            found.append(Mutant(place, old.lineno, kind, start, end, text[start:end].decode(), after))
    return sorted(set(found), key=lambda mutant: (mutant.start, mutant.end, mutant.after))


def drawn(source: Path, count: int, seed: int) -> list[Mutant]:
    """Return `count` mistakes: each package at least one, the rest by size; each kind of mistake as likely."""
    by_package: dict[str, list[Mutant]] = defaultdict(list)
    for path in sorted(source.rglob("*.py")):
        if not any(word in path.relative_to(source).as_posix() for word in WITHOUT_TESTS_HERE):
            for mutant in mutants_of(source, path):
                by_package[mutant.package].append(mutant)
    packages = [package for package in sorted(by_package) if by_package[package]]
    total = sum(len(by_package[package]) for package in packages)
    counts = {package: max(1, count * len(by_package[package]) // total) for package in packages}
    for package in sorted(packages, key=lambda package: -(count * len(by_package[package]) % total)):
        if sum(counts.values()) >= count:
            break
        counts[package] += 1
    chosen: list[Mutant] = []
    for package in packages:
        generator = random.Random(f"{seed} {package}")
        rest = list(by_package[package])
        for _ in range(min(counts[package], len(rest))):
            kind = generator.choice(sorted({mutant.kind for mutant in rest}))
            mutant = generator.choice([mutant for mutant in rest if mutant.kind == kind])
            chosen.append(mutant)
            rest = [other for other in rest if (other.path, other.line) != (mutant.path, mutant.line)]
    return chosen


# Tests


def tests_for(mutant: Mutant, tree: Path) -> list[str]:
    """Return the files of tests that can see a mistake: those with the module's name first, then its package's."""
    module = Path(mutant.path).stem.strip("_")
    if mutant.package == "top level":
        files = sorted((tree / "tests").glob("test_*.py"))
        named = [
            file for file in files if module in file.stem or re.search(rf"\b_?{module}\b", file.read_text("utf-8"))
        ]
        files = named or files
    else:
        files = [
            file
            for place in (f"tests/{mutant.package}", *SEEN_BY.get(mutant.package, []))
            for file in (sorted((tree / place).rglob("test_*.py")) if (tree / place).is_dir() else [tree / place])
            if file.exists()
        ]
    package = f"clairvit.{mutant.path.removesuffix('.py').replace('/', '.')}"
    stem = module.rstrip("s")

    def order(file: Path) -> int:
        return 0 if stem in file.stem else 1 if package in file.read_text(encoding="utf-8") else 2

    return [file.relative_to(tree).as_posix() for file in sorted(dict.fromkeys(files), key=order)]


def run_tests(tree: Path, tests: list[str], cases: str, limit: float) -> tuple[str, str]:
    """Run tests until one fails; return "survived", "killed" or "timeout", and the test that failed."""
    environment = os.environ | {
        "PYTHONPATH": str(tree / "src"),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "MPLBACKEND": "Agg",
    }
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-rfE", "-p", "no:cacheprovider", "-m", MARKERS]
    command += [f"--cases={cases}", *tests]
    try:
        done = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, timeout=limit, check=False
        )
    except subprocess.TimeoutExpired:
        return "timeout", ""
    if done.returncode in (0, 5):  # 5: nothing was selected
        return "survived", ""
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+\.py(?:::.*?)?)(?: - .*)?$", done.stdout, re.MULTILINE)
    return "killed", failed[0] if failed else done.stdout.strip().splitlines()[-1]


class Trees:
    """Copies of the working tree, one for each job."""

    def __init__(self, folder: Path, count: int) -> None:
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            check=True,
        )
        files = [name for name in listed.stdout.decode().split("\0") if name and (ROOT / name).is_file()]
        self.free: queue.Queue[Path] = queue.Queue()
        for number in range(count + 1):  # the last one stays without mistakes
            tree = folder / f"tree{number}"
            for name in files:
                (tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, tree / name)
            if number < count:
                self.free.put(tree)
        self.untouched = tree
        self._passes: dict[tuple[str, str], bool] = {}
        self._lock = threading.Lock()

    def passes_without(self, test: str, cases: str, limit: float) -> bool:
        """Return whether a test passes where there is no mistake."""
        with self._lock:
            if (test, cases) not in self._passes:
                self._passes[test, cases] = run_tests(self.untouched, [test], cases, limit)[0] == "survived"
            return self._passes[test, cases]


def judge(mutant: Mutant, trees: Trees, limit: float, files: int | None) -> dict[str, Any]:
    """Return what the tests say about one mistake: with covering arrays, and if it survives with all cases.

    `files`: only the first so many files of tests are run, those that name the module.
    """
    tree = trees.free.get()
    path = tree / "src" / "clairvit" / mutant.path
    text = path.read_bytes()
    result: dict[str, Any] = {"key": mutant.key, **asdict(mutant), "package": mutant.package}
    try:
        path.write_bytes(text[: mutant.start] + mutant.after.encode() + text[mutant.end :])
        tests = tests_for(mutant, tree)[:files]
        for suite, cases in (("short", "covering"), ("long", "all")):
            start, skipped, outcome = time.monotonic(), list[str](), ("survived", "")
            while True:
                outcome = run_tests(tree, [*tests, *(f"--deselect={test}" for test in skipped)], cases, limit)
                if outcome[0] != "killed" or trees.passes_without(outcome[1], cases, limit):
                    break
                skipped.append(outcome[1])  # it fails without the mistake too
            result[suite], result[f"{suite}_test"] = outcome
            result[f"{suite}_seconds"] = round(time.monotonic() - start, 1)
            if outcome[0] != "survived":
                break  # seen, or the tests had no time: a loop that does not end, or a machine that is busy
    finally:
        path.write_bytes(text)
        trees.free.put(tree)
    return result


# Report


def table(results: list[dict[str, Any]]) -> str:
    """Return the results in Markdown: a line for each package, then what was not seen."""
    lines = [
        "| package | mistakes | seen by make test | only by make test-all | not seen | no answer in time |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    verdicts = {result["key"]: _verdict(result) for result in results}
    for package in [*sorted({result["package"] for result in results}), None]:
        counts = Counter(verdicts[r["key"]] for r in results if package in (None, r["package"]))
        row = [str(counts[verdict]) for verdict in ("short", "long", "none", "time")]
        lines.append(f"| {package or '**all**'} | {sum(counts.values())} | {' | '.join(row)} |")
    for verdict, title in (
        ("long", "Seen by make test-all only"),
        ("none", "Not seen"),
        ("time", "No answer in time (--limit)"),
    ):
        rows = [result for result in results if verdicts[result["key"]] == verdict]
        if rows:
            lines += ["", f"{title}:", ""]
            lines += [f"* {_mutant(result)}{_seen_by(result)}" for result in rows]
    return "\n".join(lines)


def _verdict(result: dict[str, Any]) -> str:
    if "timeout" in (result["short"], result.get("long")):
        return "time"
    return "short" if result["short"] == "killed" else "long" if result.get("long") == "killed" else "none"


def _mutant(result: dict[str, Any]) -> Mutant:
    return Mutant(**{name: result[name] for name in Mutant.__dataclass_fields__})


def _seen_by(result: dict[str, Any]) -> str:
    return f" — {result['long_test']}" if result.get("long_test") else ""


def main() -> None:
    """Draw mistakes, judge those that were not judged before, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutants", type=int, default=66, help="how many mistakes (default: 66)")
    parser.add_argument("--seed", type=int, default=28)
    parser.add_argument("--jobs", type=int, default=2, help="mistakes that are looked at together (default: 2)")
    parser.add_argument("--minutes", type=float, default=40, help="start no further mistake after this time")
    parser.add_argument(
        "--limit", type=float, default=900, help="seconds for one run of tests; longer is counted apart"
    )
    parser.add_argument(
        "--files", type=int, help="files of tests that are run for a mistake (default: all that can see it)"
    )
    parser.add_argument("--only", default="", help="mistakes in paths that contain this text")
    parser.add_argument("--out", type=Path, default=Path("out/mutation"), help="where results.jsonl is kept")
    parser.add_argument("--list", action="store_true", help="print the mistakes and run nothing")
    arguments = parser.parse_args()
    mutants = drawn(ROOT / "src" / "clairvit", arguments.mutants, arguments.seed)
    mutants = [mutant for mutant in mutants if arguments.only in mutant.path]
    if arguments.list:
        print(*mutants, sep="\n")
        return
    arguments.out.mkdir(parents=True, exist_ok=True)
    store = arguments.out / "results.jsonl"
    judged = (
        {result["key"]: result for result in map(json.loads, store.read_text().splitlines())} if store.exists() else {}
    )
    random.Random(arguments.seed).shuffle(mutants)  # so that a run that is stopped has seen all packages
    end = time.monotonic() + 60 * arguments.minutes
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(arguments.jobs) as pool, store.open("a") as file:
        trees, lock = Trees(Path(folder), arguments.jobs), threading.Lock()

        def work(mutant: Mutant) -> None:
            if mutant.key in judged or time.monotonic() > end:
                return
            result = judge(mutant, trees, arguments.limit, arguments.files)
            with lock:
                judged[mutant.key] = result
                print(json.dumps(result), file=file, flush=True)
                seen = result.get("long_test") or result["short_test"]
                print(f"{_verdict(result):5} {mutant} {seen}", file=sys.stderr, flush=True)

        list(pool.map(work, mutants))
    results = [judged[mutant.key] for mutant in mutants if mutant.key in judged]
    print(table(sorted(results, key=lambda result: (result["package"], result["path"], result["line"]))))
    if left := len(mutants) - len(results):
        print(f"\n{left} of {len(mutants)} mistakes are left: run the same command again.")


if __name__ == "__main__":
    main()
