"""A run computes what is missing, once, and nothing else, and survives SIGKILL at any moment and a second process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import clairvit as cv
import clairvit.bench.plan as plan_module
import clairvit.bench.run as run_module
import clairvit.bench.worker as worker_module
from clairvit.bench.plan import ModelConfig, Shard, Study, Unit, image_set_hash, settings_of
from clairvit.bench.results import combinations, read_scores, unreadable_images
from clairvit.bench.run import Outcome, StudyProgress, run_study
from clairvit.bench.store import Row, Store
from clairvit.bench.worker import Worker
from clairvit.errors import BadInput, ClairError, ClairWarning
from clairvit.models.model import Model
from helpers.rounding import assert_same
from helpers.small_study import METHODS, METRICS, study, table, weights


class Counting(Worker):
    """Notes what it was asked to compute."""

    def rows(self, unit: Unit) -> list[Row]:
        computed_units.append(unit)
        return super().rows(unit)


computed_units: list[Unit] = []


def run(small_study: Study, store: Store, kind: type[Worker] = Counting) -> Outcome:
    computed_units.clear()
    return run_study(small_study, store, worker=kind(small_study.resolved()))


def doubled(store: Store) -> int:
    """Cells that are there more than once."""
    cells = "model_hash, image_hash, image, method, metric, settings, among"
    return len(store.query(f"select {cells} from results group by all having count(*) > 1")[1])


@dataclass(frozen=True)
class Wide(ModelConfig):
    """A model in float64, so that numbers computed in different batches are the same but for rounding."""

    def load(self, device: str | None = None) -> Model:
        model = super().load(device)
        model.module.double()
        return model


def test_the_numbers_are_those_of_evaluate(tmp_path: Path) -> None:
    small_study = study(tmp_path, images=4, at_once=4, seed=3)
    small_study = replace(small_study, models=tuple(Wide(entry.spec, entry.arch) for entry in small_study.models))
    store = Store.open(tmp_path / "store")
    outcome = run(small_study, store)
    assert (outcome.computed, outcome.failed, doubled(store)) == (1, (), 0)
    ((name, weights_hash, data, settings),) = combinations(store)
    model = small_study.models[0].load()
    images = sorted((tmp_path / "photos").rglob("*.png"))
    expected = cv.evaluate(model, images, list(METHODS), list(METRICS), seed=3)
    stored_scores = read_scores(store, weights_hash, data, settings)
    assert (name, data, settings) == (model.name, small_study.data[0].spec, settings_of(small_study))
    assert isinstance(expected, dict)
    assert set(stored_scores) == {
        *expected,
        *((baseline, metric) for baseline in ("random", "center") for metric in METRICS),
    }
    for key, score in expected.items():
        assert_same(stored_scores[key].values, score.values)
        assert_same([stored_scores[key].mean, *stored_scores[key].interval], [score.mean, *score.interval])
        assert_same(stored_scores[key].baselines["random"].values, score.baselines["random"].values)
    assert [entry.predicted for entry in stored_scores.predictions] == [
        entry.predicted for entry in expected.predictions
    ]
    assert [entry.image for entry in stored_scores.predictions] == [
        path.relative_to(tmp_path / "photos").as_posix() for path in images
    ]


def test_a_second_run_has_nothing_to_do_and_more_methods_and_metrics_only_those(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "store")
    assert run(study(tmp_path), store).computed == len(computed_units) == 3
    before = table(store)
    assert run(study(tmp_path), store).computed == len(computed_units) == 0
    assert run(study(tmp_path, methods=(*METHODS, "genatt")), store).computed == 3
    assert {unit.methods for unit in computed_units} == {("genatt",)}
    assert run(study(tmp_path, metrics=(*METRICS, "complexity")), store).computed == 3
    assert {(unit.methods, unit.metrics) for unit in computed_units} == {
        ((*METHODS, "random", "center"), ("complexity",))
    }
    assert all(row in table(store) for row in before)
    assert doubled(store) == 0
    assert len(store.studies()) == 3


def test_an_image_that_changed_is_computed_and_read_alone(tmp_path: Path) -> None:
    small_study, store = study(tmp_path), Store.open(tmp_path / "store")
    before = run(small_study, store).plan
    photo = tmp_path / "photos" / "1" / "001.png"
    Image.open(photo).rotate(90).save(photo)
    after = run(small_study, store).plan
    assert [[before.images[0][row][0] for row in unit.rows] for unit in computed_units] == [["1/001.png"]]
    old, new = (
        read_scores(store, plan.hashes[0], "", settings_of(small_study), plan.images[0])["legrad", "sparseness"]
        for plan in (before, after)
    )
    changed = [name for name, a, b in zip(old.names, old.values, new.values, strict=True) if a != b]
    assert changed == ["1/001.png"]
    assert len(new.names) == 6


def test_images_that_were_seen_in_another_folder_have_their_new_names(tmp_path: Path) -> None:
    small_study, store = study(tmp_path), Store.open(tmp_path / "store")
    run(small_study, store)
    (tmp_path / "photos" / "1" / "001.png").rename(tmp_path / "photos" / "1" / "zzz.png")
    plan = run(small_study, store).plan
    assert computed_units == []
    scores = read_scores(store, plan.hashes[0], small_study.data[0].spec, settings_of(small_study), plan.images[0])
    assert "1/zzz.png" in scores["legrad", "sparseness"].names
    assert len(scores["legrad", "sparseness"].names) == 6
    mixed = plan.images[0][::-1]
    again = read_scores(store, plan.hashes[0], small_study.data[0].spec, settings_of(small_study), mixed)[
        "legrad", "sparseness"
    ]
    assert again.names == tuple(sorted(again.names)) == scores["legrad", "sparseness"].names  # whatever their order was
    assert torch.equal(again.values, scores["legrad", "sparseness"].values)


def test_a_metric_of_a_whole_set_is_of_the_set_that_is_asked_for_or_of_the_largest(tmp_path: Path) -> None:
    store, metric, settings = Store.open(tmp_path / "store"), "grid-pointing-game", "seed=0,target=predicted,maps=raw"
    shared = {"model": "m", "model_hash": "w", "data": "d", "method": "legrad", "metric": metric, "settings": settings}
    fixed_columns = {"predicted": 1, "probability": 0.5, "options": "{}", "better": "higher"}
    for key, marks, value in (("k1", "ab", 0.1), ("k2", "abcd", 0.2), ("k3", "bcd", 0.3)):
        unit = Unit(
            key, "w", 0, 0, tuple(range(len(marks))), tuple(marks), ("legrad",), (metric,), 1, image_set_hash(marks)
        )
        spent = {"unit": key, "among": unit.image_set, "value": value, "forwards": 1, "backwards": 0, "seconds": 0.1}
        store.write(
            unit, [{**shared, **fixed_columns, **spent, "image": f"{mark}.png", "image_hash": mark} for mark in marks]
        )
    for marks, value in (("ab", 0.1), ("abcd", 0.2), ("bcd", 0.3), ("", 0.2)):
        images = [(f"{mark}.png", mark) for mark in marks] or None
        stored_scores = read_scores(store, "w", "d", settings, images)["legrad", metric]
        assert stored_scores.values.tolist() == [value] * len(marks or "abcd")


def test_an_image_that_cannot_be_read_costs_only_itself(tmp_path: Path) -> None:
    small_study, store = study(tmp_path), Store.open(tmp_path / "store")
    (tmp_path / "photos" / "1" / "001.png").write_text("no picture")
    outcome = run(small_study, store)
    assert outcome.failed == ()
    lost = unreadable_images(store, outcome.plan.hashes[0], settings_of(small_study), outcome.plan.images[0])
    assert list(lost) == ["1/001.png"]
    assert "is not an image" in lost["1/001.png"]
    stored_scores = read_scores(store, outcome.plan.hashes[0], "", settings_of(small_study), outcome.plan.images[0])
    assert len(stored_scores["legrad", "sparseness"].names) == 5
    run(small_study, store)
    assert computed_units == []


class Flaky(Counting):
    kind: type[Exception] = RuntimeError

    def rows(self, unit: Unit) -> list[Row]:
        if 2 in unit.rows:
            raise self.kind("the cat is on the keyboard")
        return super().rows(unit)


@pytest.mark.parametrize("kind", [RuntimeError, AssertionError, MemoryError])
def test_a_unit_that_fails_is_recorded_and_tried_again_by_the_next_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    monkeypatch.setattr(Flaky, "kind", kind)
    small_study, store = study(tmp_path), Store.open(tmp_path / "store")
    outcome = run(small_study, store, Flaky)
    assert outcome.computed == 2
    ((unit, error),) = outcome.failed
    assert unit.rows == (2, 3)
    assert error.startswith(f"{kind.__name__}: the cat is on the keyboard (test_run.py, line ")
    (kept,) = store.failures()
    assert (kept["unit"], kept["error"]) == (unit.key, error)
    assert run(small_study, store).computed == 1
    assert [planned.key for planned in computed_units] == [unit.key]
    assert store.failures() == []


def test_a_damaged_part_is_computed_again(tmp_path: Path) -> None:
    small_study, store = study(tmp_path), Store.open(tmp_path / "store")
    run(small_study, store)
    before, part = table(store), sorted((store.path / "parts").iterdir())[1]
    part.write_bytes(part.read_bytes()[:-40])
    with pytest.warns(ClairWarning, match=part.name):
        outcome = run(small_study, store)
    assert [unit.key for unit in computed_units] == [part.name.partition("-")[0]]
    assert outcome.computed == 1
    assert table(store) == before


def test_numbers_of_another_version_are_used_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_study, store = study(tmp_path), Store.open(tmp_path / "store")
    with monkeypatch.context() as patched:
        patched.setattr(worker_module, "__version__", "0.0.9")
        run(small_study, store)
    with pytest.warns(ClairWarning, match=r"has numbers of ClairViT 0\.0\.9, and this is .*use another folder"):
        assert run(small_study, store).computed == 0


def test_what_this_version_does_not_know_is_left_out_and_named(tmp_path: Path) -> None:
    small_study, store = study(tmp_path), Store.open(tmp_path / "store")
    plan = run(small_study, store).plan
    names, part_rows = store.query("select * from parts")
    rows = [dict(zip(names, row, strict=True)) for row in part_rows]
    odd = {"legrad": "legrad(power=3)", "sparseness": "spareness"}
    renamed = [
        {**row, "method": odd.get(row["method"], row["method"]), "metric": odd.get(row["metric"], row["metric"])}
        for row in rows
    ]
    other = Store.open(tmp_path / "other")
    other.write(plan.units[0], renamed)
    with pytest.warns(ClairWarning) as caught:
        scores = read_scores(other, plan.hashes[0], small_study.data[0].spec, settings_of(small_study))
    assert {metric for _, metric in scores} == {"deletion(steps=3)"}
    assert {method for method, _ in scores} == {"raw-attention", "random", "center"}
    words = [str(entry.message) for entry in caught]
    assert len(words) == 2
    assert "'legrad(power=3)' is in the store and left out here: 'legrad' has no option 'power'" in words[0]
    assert "'spareness' is in the store and left out here" in words[1]
    assert "Did you mean 'sparseness'" in words[1]


def test_what_changed_since_it_was_planned_is_not_stored(tmp_path: Path) -> None:
    small_study, store = study(tmp_path), Store.open(tmp_path / "store")
    photo = tmp_path / "photos" / "1" / "001.png"

    def change_image(plan: Any) -> None:
        Image.open(photo).rotate(90).save(photo)

    outcome = run_study(small_study, store, on_plan=change_image)
    ((_, error),) = outcome.failed
    assert "1/001.png is not the image that it was" in error
    assert (run_study(small_study, store).computed, store.failures()) == (1, store.failures())


def test_a_worker_with_another_model_or_fewer_images_stores_nothing(tmp_path: Path) -> None:
    """As on another machine, where other files have the same names."""
    small_study, store = study(tmp_path), Store.open(tmp_path / "store")

    def on_plan(plan: Any) -> None:
        worker.models.clear()
        worker.hashes.clear()
        weights(tmp_path / "tiny.safetensors", seed=1)

    worker = Worker(small_study.resolved())
    outcome = run_study(small_study, store, worker=worker, on_plan=on_plan)
    assert (outcome.computed, len(outcome.failed)) == (0, 3)
    assert all("has other weights here than where the study was planned" in error for _, error in outcome.failed)

    def fewer(plan: Any) -> None:
        worker.datasets[0] = worker.datasets[0].take(range(3))

    worker = Worker(small_study.resolved())
    outcome = run_study(small_study, store, worker=worker, on_plan=fewer)
    assert outcome.computed == 1
    assert [unit.rows for unit, _ in outcome.failed] == [(2, 3), (4, 5)]
    assert all("has 3 images here, fewer than where" in error for _, error in outcome.failed)


def test_another_seed_is_another_study(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "store")
    assert run(study(tmp_path), store).computed == 3
    assert run(study(tmp_path, seed=1), store).computed == 3


def test_claims_and_failures_leave_no_files(tmp_path: Path) -> None:
    small_study, store = study(tmp_path), Store.open(tmp_path / "store")
    run(small_study, store, Flaky)
    assert [file.name for file in (store.path / "claims").iterdir()] == ["store"]

    class Stopped(Worker):
        def rows(self, unit: Unit) -> list[Row]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(small_study, store, Stopped)
    assert [file.name for file in (store.path / "claims").iterdir()] == ["store"]


def test_a_run_that_is_stopped_within_an_image_goes_on_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_study, store = study(tmp_path, images=2, at_once=2), Store.open(tmp_path / "store")
    monkeypatch.setattr(run_module, "FORWARDS_PER_UNIT", 1)  # a method of an image is a unit
    monkeypatch.setattr(plan_module, "MOST_REPEATED", 9)

    class Stopped(Counting):
        def rows(self, unit: Unit) -> list[Row]:
            if len(computed_units) == 3:
                raise KeyboardInterrupt
            return super().rows(unit)

    with pytest.raises(KeyboardInterrupt):
        run(small_study, store, Stopped)
    before = list(computed_units)
    outcome = run(small_study, store)
    assert outcome.plan.done == sum(unit.cells for unit in before) > 0
    assert {len(unit.methods) for unit in before} == {1}
    assert not {unit.key for unit in before} & {unit.key for unit in computed_units}
    assert doubled(store) == 0
    assert len(store.cells()) == outcome.plan.cells


def test_a_full_disk_ends_the_run_and_the_next_one_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_study, store = study(tmp_path), Store.open(tmp_path / "store")
    usual = Store.write

    def write(self: Store, unit: Unit, rows: Sequence[Row]) -> Path:
        if 2 in unit.rows:
            raise ClairError("The store cannot be written to (No space left on device).")
        return usual(self, unit, rows)

    monkeypatch.setattr(Store, "write", write)
    with pytest.raises(ClairError, match="No space left"):
        run(small_study, store)
    monkeypatch.undo()
    assert run(small_study, store).computed == 2


# A process that has imported everything forks children that run the study; importing takes longer than a study.
IMAGES = 24
STUDY_PROCESSES = f"""
import json, os, random, signal, sys, time
from pathlib import Path

import duckdb, pyarrow.parquet
import clairvit as cv
from clairvit.data.open import list_datasets
from clairvit.bench.run import run_study
from clairvit.bench.store import Store
from helpers.rounding import assert_same
from helpers.small_study import study

cv.list_methods(), cv.list_metrics(), list_datasets()
folder = Path(sys.argv[1])
own = study(folder, {IMAGES}, at_once=1)
own.models[0].load()

def child(name):
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            outcome = run_study(own, Store.open(folder / name))
            (folder / f"computed-{{os.getpid()}}").write_text(str(outcome.computed))
            status = 3 if outcome.failed else 0
        finally:
            os._exit(status)
    return pid

def parts(name):
    return list((folder / name / "parts").glob("*.parquet"))

def running(pid):
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

def ended(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

outcome = {{"killed": [], "parts": []}}
outcome["whole"] = ended(child("whole"))
times = sorted(part.stat().st_mtime for part in parts("whole"))
one = (times[-1] - times[0]) / len(times)  # seconds for a unit
generator = random.Random(0)
for number in range(10):
    before, pid = len(parts("killed")), child("killed")
    if number % 4:  # else while it plans, or opens the store
        while len(parts("killed")) == before and running(pid):
            time.sleep(one / 50)
    end = time.monotonic() + generator.uniform(0, 1.5) * one
    while time.monotonic() < end and len(parts("killed")) < before + 2:  # there must be something left for ten
        time.sleep(one / 50)
    os.kill(pid, signal.SIGKILL)
    outcome["killed"].append(ended(pid))
    outcome["parts"].append(len(parts("killed")))
outcome["resumed"] = ended(child("killed"))
pair = child("both"), child("both")
outcome["both"] = [ended(pid) for pid in pair]
outcome["computed"] = [int((folder / f"computed-{{pid}}").read_text()) for pid in pair]
print(json.dumps(outcome))
"""


@pytest.fixture(scope="module")
def studies(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Three stores of one study, 'whole', 'killed' and 'both', and how their processes ended."""
    folder = tmp_path_factory.mktemp("studies")
    paths = os.pathsep.join([str(Path(__file__).parent.parent), *sys.path])
    process = subprocess.run(
        [sys.executable, "-c", STUDY_PROCESSES, str(folder)],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.returncode == 0, process.stderr
    return folder, json.loads(process.stdout)


def test_a_study_that_is_killed_ten_times_ends_as_if_it_had_not_been(studies: tuple[Path, dict[str, Any]]) -> None:
    folder, outcome = studies
    assert (outcome["whole"], outcome["resumed"]) == (0, 0)
    assert outcome["killed"] == [-9] * 10  # each time it was in the middle of it
    assert 7 <= outcome["parts"][-1] < IMAGES, outcome["parts"]
    whole, killed = Store.open(folder / "whole"), Store.open(folder / "killed")
    assert table(killed) == table(whole)
    assert len(table(whole)) == IMAGES * 4 * 2
    assert doubled(killed) == 0
    assert len(killed.parts()[0]) == IMAGES
    assert [file.name for file in (killed.path / "claims").iterdir()] == ["store"]


def test_two_processes_on_one_store_compute_each_unit_once(studies: tuple[Path, dict[str, Any]]) -> None:
    folder, outcome = studies
    assert outcome["both"] == [0, 0]
    assert sum(outcome["computed"]) == IMAGES
    assert min(outcome["computed"]) > 0, "one of them did it all: nothing was shown"
    whole, both = Store.open(folder / "whole"), Store.open(folder / "both")
    assert table(both) == table(whole)
    assert doubled(both) == 0
    assert [file.name for file in (both.path / "claims").iterdir()] == ["store"]
    assert len(both.studies()) == 1


def test_shards_together_are_the_study(tmp_path: Path) -> None:
    small_study = study(tmp_path, images=6, at_once=1)
    alone = Store.open(tmp_path / "alone")
    run(small_study, alone)
    keys = {unit.key for unit in computed_units}
    merged, computed = Store.open(tmp_path / "merged"), []
    for index in range(3):
        part = Store.open(tmp_path / f"part-{index}")
        computed_units.clear()
        worker = Counting(small_study.resolved())
        outcome = run_study(small_study, part, worker=worker, shard=Shard(index, 3))
        computed += [unit.key for unit in computed_units]
        assert outcome.computed == len(computed_units)
        assert merged.merge(part) == len(computed_units)
        assert merged.merge(part) == 0, "what is there is not written again"
    assert sorted(computed) == sorted(keys), "every unit once"
    assert table(merged) == table(alone)
    assert merged.studies() == alone.studies()
    assert merged.models() == alone.models()
    assert run(small_study, merged).computed == 0, "nothing is missing"


def test_progress_is_of_all_units_and_autocast_is_another_study(tmp_path: Path) -> None:
    small_study, store = study(tmp_path, images=3, at_once=1), Store.open(tmp_path / "store")
    steps: list[StudyProgress] = []
    run_study(small_study, store, worker=Counting(small_study.resolved()), on_unit=steps.append)
    assert [(step.done, step.units, step.failed, step.images) for step in steps] == [(n, 3, 0, n) for n in (1, 2, 3)]
    assert steps[-1].cells == len(store.cells())
    assert steps[-1].remaining == 0
    assert replace(steps[0], seconds=10.0).remaining == 20.0
    assert replace(steps[1], seconds=4.0).images_per_second == 0.5
    half = replace(small_study, autocast="bf16").resolved()
    assert settings_of(half) == f"{settings_of(small_study)},autocast=bfloat16"
    assert run(half, store).computed == 3
    assert {row[0] for row in store.query("select settings from results")[1]} == {
        settings_of(small_study),
        settings_of(half),
    }
    assert "autocast" not in small_study.as_document(), "stores of earlier versions know the study"
    assert store.compact() == 6
    assert run(half, store).computed == 0
    assert run(small_study, store).computed == 0
    with pytest.raises(BadInput, match="autocast='int8' was given"):
        replace(small_study, autocast="int8").resolved()


@pytest.mark.parametrize("text", ["3", "3/3", "-1/3", "a/b", "1/0", "1.5/3"])
def test_shards_that_do_not_exist_are_refused(text: str) -> None:
    with pytest.raises(BadInput, match="expected INDEX/COUNT"):
        Shard.parse(text)
    assert Shard.parse(" 2/3 ") == Shard(2, 3)
