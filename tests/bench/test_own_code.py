"""The code of own methods and metrics is part of a cell: an edited one is computed again, and nothing else is."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import textwrap
import types
import warnings
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as parquet
import pytest

import clairvit as cv
from clairvit.bench.plan import StoredPlan, Study, settings_of
from clairvit.bench.results import find_missing, read_scores
from clairvit.bench.run import Outcome, plan_study, run_study
from clairvit.bench.store import Store, _checksum, _parquet_bytes, units_of
from clairvit.bench.worker import Worker
from clairvit.errors import ClairError
from clairvit.methods import registry as methods
from clairvit.methods.spec import resolve_method
from clairvit.metrics import registry as metrics
from clairvit.metrics.own_code import Codes, code_hash, codes_of
from helpers.small_study import study

METHODS_SOURCE = """
import clairvit as cv
import torch
from clairvit.methods.aggregation import Total

SHARPNESS = 2.0


def sharpened(values):
    return values ** SHARPNESS


@cv.method("own-norm", output="tokens", aggregation=Total())
def own_norm(layer: cv.extend.LayerView, power: float = 1.0):
    return sharpened(layer.x.norm(dim=-1)) ** power


@cv.metric("own-share", better="higher")
def own_share(context: cv.extend.EvalContext, scale: float = 1.0):
    maps = context.maps.flatten(2).abs()
    return scale * maps.amax(-1) / maps.sum(-1)
"""
# Edits of the file, each of which changes what is computed, and by which of the two
EDITS = {
    "formula": (
        "return sharpened(layer.x.norm(dim=-1)) ** power",
        "return sharpened(layer.x.norm(dim=-1)) + power",
        "own-norm",
    ),
    "constant": ("SHARPNESS = 2.0", "SHARPNESS = 3.0", "own-norm"),
    "helper": ("return values ** SHARPNESS", "return values * SHARPNESS", "own-norm"),
    "default": ("power: float = 1.0", "power: float = 0.5", "own-norm"),
    "aggregation": ("aggregation=Total()", "aggregation=Total(start='half')", "own-norm"),
    "metric": ("scale * maps.amax(-1)", "scale * maps.amin(-1)", "own-share"),
    "metric's default": ("scale: float = 1.0", "scale: float = 0.5", "own-share"),
}
METHODS, METRICS = ("own-norm", "raw-attention"), ("own-share", "sparseness")


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    with methods.METHODS.restored(), metrics.METRICS.restored():
        yield


def register(source: str) -> types.ModuleType:
    """Run a file of own methods, as an import after an edit does."""
    module = types.ModuleType("own_methods")
    exec(compile(source, "/nowhere/own_methods.py", "exec"), vars(module))
    return module


def run(small_study: Study, store: Store) -> tuple[Outcome, list[str]]:
    """Return the outcome and the notes on changed code."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        outcome = run_study(small_study, store, worker=Worker(small_study.resolved()))
    assert outcome.failed == ()
    return outcome, [str(w.message) for w in caught if "code" in str(w.message)]


def stored(small_study: Study, store: Store, outcome: Outcome) -> dict[tuple[str, str], list[float]]:
    scores = read_scores(store, outcome.plan.hashes[0], "", settings_of(small_study), outcome.plan.images[0])
    return {key: score.values.tolist() for key, score in scores.items()}


def fresh(small_study: Study) -> dict[tuple[str, str], list[float]]:
    worker = Worker(small_study.resolved())
    scores = cv.evaluate(worker.model(0), worker.dataset(0), list(METHODS), list(METRICS), seed=small_study.seed)
    return {key: score.values.tolist() for key, score in scores.items()}


def computed_cells(outcome: Outcome) -> set[tuple[str, str]]:
    return {(m, q) for unit in outcome.plan.units for m in unit.methods for q in unit.metrics}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_method_or_metric_is_computed_again_and_nothing_else(tmp_path: Path, edit: str) -> None:
    before, after, changed = EDITS[edit]
    small_study = study(tmp_path, images=3, methods=METHODS, metrics=METRICS, at_once=3)
    store = Store.open(tmp_path / "store")
    register(METHODS_SOURCE)
    first, notes = run(small_study, store)
    assert notes == []
    assert stored(small_study, store, first).items() >= fresh(small_study).items()
    assert METHODS_SOURCE.count(before) == 1
    register(METHODS_SOURCE.replace(before, after))
    second, notes = run(small_study, store)
    assert notes == [f"The code of '{changed}' changed since the store '{store.path}' got its numbers; computed again."]
    expected = {
        (method, metric)
        for method in (*METHODS, "random", "center")
        for metric in METRICS
        if changed in (method, metric)
    }
    assert computed_cells(second) == expected
    assert stored(small_study, store, second).items() >= fresh(small_study).items()
    third, notes = run(small_study, store)
    assert (third.plan.units, notes) == ((), [])
    register(METHODS_SOURCE)  # back again: these numbers are still there
    fourth, notes = run(small_study, store)
    assert fourth.plan.units == ()
    assert stored(small_study, store, fourth).items() >= fresh(small_study).items()


def test_comments_and_line_breaks_are_no_edit(tmp_path: Path) -> None:
    small_study = study(tmp_path, images=2, methods=METHODS, metrics=METRICS, at_once=2)
    store = Store.open(tmp_path / "store")
    register(METHODS_SOURCE)
    run(small_study, store)
    register("# moved\n\n\n" + METHODS_SOURCE.replace("    return values", "    # as in the paper\n    return values"))
    outcome, notes = run(small_study, store)
    assert (outcome.plan.units, notes) == ((), [])


def test_built_in_ones_have_no_code() -> None:
    assert codes_of([m.name for m in methods.list_methods()], [m.name for m in metrics.list_metrics()]) == Codes()
    for text in ("smooth(genatt)", "shift(ixg)", "ensemble(genatt,rollout)"):
        assert code_hash(resolve_method(text)) == ""


@pytest.mark.parametrize(
    "text", ["own-norm", "own-norm(power=2)+skipplus", "smooth(own-norm)", "ensemble(own-norm,ixg)"]
)
def test_code_is_seen_through_wrappers(text: str) -> None:
    hashes = []
    for source in (METHODS_SOURCE, METHODS_SOURCE.replace("SHARPNESS = 2.0", "SHARPNESS = 3.0"), METHODS_SOURCE):
        register(source)
        hashes.append(code_hash(resolve_method(text)))
    assert hashes[0] == hashes[2] != hashes[1] != ""


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("x = [1, 2]", "x = [2, 1]"),
        ("x = {'a': 1}", "x = {'a': 2}"),
        ("x = torch.arange(3)", "x = torch.arange(3) + 1"),
        ("x = frozenset('ab')", "x = frozenset('ac')"),
        ("def x(): return 1", "def x(): return 2"),
        ("class x:\n    size = 1", "class x:\n    size = 2"),
        ("class x:\n    def f(self): return 1", "class x:\n    def f(self): return 2"),
        ("x = functools.partial(max, 1)", "x = functools.partial(max, 2)"),
        ("x = (lambda k: lambda: k)(1)", "x = (lambda k: lambda: k)(2)"),
        ("def y(): return 1\ndef x(): return y()", "def y(): return 2\ndef x(): return y()"),
        ("@functools.cache\ndef x(): return 1", "@functools.cache\ndef x(): return 2"),
    ],
)
def test_whatever_a_method_uses_counts(first: str, second: str) -> None:
    """Equal in every process: run again it has the same hash, changed it has another."""

    def hash_of(definition: str) -> str:
        module = types.ModuleType("own_methods")
        source = f"import functools, torch\n{definition}\ndef method(layer):\n    return layer.x * len(str(x))\n"
        exec(compile(source, "/nowhere/own.py", "exec"), vars(module))
        return code_hash(module.method)

    assert hash_of(first) == hash_of(first) != hash_of(second) == hash_of(second)
    assert hash_of(first)


def test_a_recursive_function_has_a_hash() -> None:
    def factorial(n: int) -> int:
        return n and n * factorial(n - 1)

    assert len(code_hash(factorial)) == 16


def test_numbers_of_a_store_that_kept_no_code_are_computed_again(tmp_path: Path) -> None:
    """A store of an earlier version: its parts have no column `code`, and built-in cells stay done."""
    small_study = study(tmp_path, images=3, methods=METHODS, metrics=METRICS, at_once=3)
    store = Store.open(tmp_path / "store")
    register(METHODS_SOURCE)
    run(small_study, store)
    for part in store.parts()[0]:
        table = parquet.read_table(part).drop_columns(["code"])
        part.unlink()
        content = _parquet_bytes(table)
        (key,) = units_of(part)
        (part.parent / f"{key}-{_checksum(content)}.parquet").write_bytes(content)
    index = (store.path / "store.json").read_text(encoding="utf-8")
    document = json.loads(index)
    del document["codes"]
    (store.path / "store.json").write_text(json.dumps(document), encoding="utf-8")
    assert len(store.cells()) == 3 * 4 * 2  # readable as ever
    register(METHODS_SOURCE.replace("SHARPNESS = 2.0", "SHARPNESS = 3.0"))
    outcome, notes = run(small_study, store)
    assert [note.partition("by which code")[2] for note in notes] == [
        " the numbers of 'own-norm' were computed; computed again.",
        " the numbers of 'own-share' were computed; computed again.",
    ]
    assert ("raw-attention", "sparseness") not in computed_cells(outcome)
    assert stored(small_study, store, outcome).items() >= fresh(small_study).items()
    assert store.compact() > 0
    assert stored(small_study, store, outcome).items() >= fresh(small_study).items()


def test_a_cache_that_a_method_fills_is_no_edit_while_it_runs(tmp_path: Path) -> None:
    source = METHODS_SOURCE.replace("SHARPNESS = 2.0", "SHARPNESS = 2.0\nSEEN = {}").replace(
        "    return values **", "    SEEN[len(SEEN)] = 1\n    return values **"
    )
    small_study = study(tmp_path, images=4, methods=METHODS, metrics=METRICS, at_once=1)
    register(source)
    outcome, notes = run(small_study, Store.open(tmp_path / "store"))
    assert (outcome.computed, notes) == (4, [])


def test_a_worker_with_other_code_computes_nothing(tmp_path: Path) -> None:
    register(METHODS_SOURCE)
    small_study = study(tmp_path, images=2, methods=METHODS, metrics=METRICS, at_once=2).resolved()
    plan, worker = plan_study(small_study, None)
    register(METHODS_SOURCE.replace("SHARPNESS = 2.0", "SHARPNESS = 3.0"))
    worker.study = pickle.loads(pickle.dumps(small_study))  # as a worker of another process has it
    with pytest.raises(ClairError, match="The code of 'own-norm' is another one here than where the study was planned"):
        worker.rows(plan.units[0])


def test_shards_of_own_methods_are_merged_and_what_is_missing_is_known(tmp_path: Path) -> None:
    small_study = study(tmp_path, images=3, methods=METHODS, metrics=METRICS, at_once=1)
    register(METHODS_SOURCE)
    store, other = (Store.open(tmp_path / name) for name in ("store", "other"))
    outcome, _ = run(small_study, other)
    assert store.merge(other) > 0
    assert store.codes() == other.codes() != Codes()
    assert run(small_study, store)[0].plan.units == ()
    plan = StoredPlan.of(small_study.resolved(), outcome.plan)
    assert find_missing(plan, store.cells()) == []
    register(METHODS_SOURCE.replace("SHARPNESS = 2.0", "SHARPNESS = 3.0"))
    store.add_codes(small_study.resolved(), codes_of(METHODS, METRICS))
    (missing,) = find_missing(plan, store.cells())
    assert {method for _, named, _ in missing.missing_scores for method in named} == {"own-norm"}


SCRIPT = """
import sys
from pathlib import Path
sys.path[:0] = [{tests!r}, {folder!r}]
import own_methods
from clairvit.bench.executors import in_process, local
from clairvit.bench.run import plan_study, run_study
from clairvit.bench.store import Store
from helpers.small_study import study

if __name__ == "__main__":
    own = study(Path({folder!r}), images=4, methods={methods!r}, metrics={metrics!r}, at_once=2)
    engine = local(1) if "worker" in sys.argv else in_process
    outcome = run_study(own, Store.open({folder!r} + "/store"), engine)
    print(len(outcome.plan.units), outcome.computed, len(outcome.failed))
"""


@pytest.mark.slow
def test_worker_processes_compute_edited_code_again(tmp_path: Path) -> None:
    """As users do it: a file of own methods is edited, and the script runs again, now with a worker process."""
    tests = str(Path(__file__).parents[1])
    script, methods_file = tmp_path / "run.py", tmp_path / "own_methods.py"
    script.write_text(SCRIPT.format(tests=tests, folder=str(tmp_path), methods=METHODS, metrics=METRICS))

    def run_script(*arguments: str) -> tuple[str, str]:
        command = [sys.executable, str(script), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
        return done.stdout.strip(), done.stderr

    methods_file.write_text(textwrap.dedent(METHODS_SOURCE))
    assert run_script()[0] == "2 2 0"
    methods_file.write_text(textwrap.dedent(METHODS_SOURCE).replace("SHARPNESS = 2.0", "SHARPNESS = 3.0"))
    output, errors = run_script("worker")
    assert output == "2 2 0"
    assert "The code of 'own-norm' changed" in errors
