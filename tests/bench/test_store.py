"""A store is whole after anything: damage is noticed, claims are exclusive, and what is no store is left alone."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock, SoftFileLock

from clairvit.bench.plan import Cell, CellSet, DataConfig, ModelConfig, Study, Unit
from clairvit.bench.store import Store, forget_checks
from clairvit.errors import BadInput, ClairError, ClairWarning

STUDY = Study((ModelConfig("pets"),), (DataConfig("folder:x"),), ("legrad",), ("deletion",))


def unit(key: str = "k1", marks: tuple[str, str] = ("a", "b")) -> Unit:
    return Unit(key, "w", 0, 0, (0, 1), marks, ("legrad",), ("deletion",), 2)


def rows(work_unit: Unit, value: float = 0.5) -> list[dict[str, Any]]:
    shared = {"unit": work_unit.key, "model_hash": "w", "settings": "s", "method": "legrad", "metric": "deletion"}
    return [{**shared, "image_hash": mark, "value": value, "y": [0.0, value]} for mark in work_unit.image_hashes]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "store")


def test_what_is_written_is_read(store: Store) -> None:
    assert store.cells() == frozenset()
    assert not store.has(unit())
    store.write(unit(), rows(unit()))
    assert store.has(unit())
    assert not store.has(unit("k"))
    assert store.cells() == {Cell("w", mark, "legrad", "deletion", "s") for mark in "ab"}
    assert store.query("select image_hash, value, y, note from results order by all") == (
        ["image_hash", "value", "y", "note"],
        [("a", 0.5, [0.0, 0.5], None), ("b", 0.5, [0.0, 0.5], None)],
    )
    assert Store.open(store.path, create=False).cells() == store.cells()
    assert list(store.path.rglob("*.tmp")) == []


def test_a_store_remembers_each_study_once(store: Store) -> None:
    store.add_study(STUDY)
    store.add_study(STUDY)
    (study,) = store.studies()
    assert study["methods"] == ["legrad"]


@pytest.mark.parametrize("harm", ["a bit", "the end", "everything", "another"])
def test_a_damaged_part_is_named_and_put_aside(store: Store, harm: str) -> None:
    part, other = store.write(unit(), rows(unit())), unit("k2", ("c", "d"))
    store.write(other, rows(other, 0.7))
    content = bytearray(part.read_bytes())
    if harm == "a bit":
        content[len(content) // 3] ^= 1  # in the values: Parquet itself would not see it
    if harm == "the end":
        del content[-9:]
    if harm == "everything":
        content.clear()
    if harm == "another":  # whole, but of other numbers
        content = bytearray(next(store.path.glob("parts/k2-*.parquet")).read_bytes())
    part.write_bytes(content)
    with pytest.warns(ClairWarning, match=f"{part.name}.*computed again"):
        assert store.query("select distinct unit from results")[1] == [("k2",)]
    assert not store.has(unit())
    assert [file.name for file in (store.path / "broken").iterdir()] == [part.name]
    store.write(unit(), rows(unit()))
    assert len(store.query("select * from results")[1]) == 4


def test_a_damaged_part_that_another_process_moves_first_is_no_error(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = store.write(unit(), rows(unit()))
    part.write_bytes(b"harm")
    usual = os.replace

    def late(source: Path, target: Path) -> None:
        usual(source, target)
        usual(source, target)  # the second one finds nothing

    monkeypatch.setattr(os, "replace", late)
    assert store.cells() == frozenset()
    assert [file.name for file in (store.path / "broken").iterdir()] == [part.name]


@pytest.mark.parametrize(("number", "moved"), [(errno.EACCES, False), (errno.EMFILE, False), (errno.EIO, True)])
def test_a_part_that_cannot_be_read_is_moved_only_if_the_disk_lost_it(
    store: Store, monkeypatch: pytest.MonkeyPatch, number: int, moved: bool
) -> None:
    part = store.write(unit(), rows(unit()))

    kept = Path.open

    def unreadable(self: Path, *mode: Any, **options: Any) -> Any:
        if self.suffix == ".parquet":
            raise OSError(number, os.strerror(number))
        return kept(self, *mode, **options)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", unreadable)
        if moved:
            with pytest.warns(ClairWarning, match="is damaged and was moved"):
                assert store.cells() == frozenset()
        else:
            with pytest.raises(ClairError, match=rf"{part.name}' cannot be read \(.*left where it is"):
                store.cells()
    assert part.exists() != moved


def test_a_cell_that_two_studies_computed_at_once_is_seen_once(store: Store) -> None:
    """Cut in other units, so that neither knew of the other's claims."""
    store.write(unit("k1"), rows(unit("k1")))
    store.write(unit("k2", ("b", "c")), rows(unit("k2", ("b", "c"))))
    stored_rows = store.query("select image_hash, unit from results order by all")[1]
    assert stored_rows == [("a", "k1"), ("b", "k1"), ("c", "k2")]


def test_a_store_may_be_shared(tmp_path: Path) -> None:
    """Its files have the rights that the umask gives, not only the owner's."""
    before = os.umask(0o022)
    try:
        store = Store.open(tmp_path / "store")
        part = store.write(unit(), rows(unit()))
    finally:
        os.umask(before)
    assert [file.stat().st_mode & 0o777 for file in (part, store.path / "store.json")] == [0o644, 0o644]


def test_a_failure_is_kept_until_it_works(store: Store) -> None:
    store.write_failure(unit(), "out of memory")
    (failure,) = store.failures()
    assert (failure["unit"], failure["error"], failure["rows"]) == ("k1", "out of memory", [0, 1])
    store.write(unit(), rows(unit()))
    assert store.failures() == []


def test_a_claim_is_exclusive_and_leaves_nothing(store: Store) -> None:
    lock = store.lock_unit(unit())
    assert lock is not None
    assert store.lock_unit(unit()) is None
    assert store.lock_unit(unit("k2")) is not None
    store.unlock_unit(unit(), lock)
    assert not (store.path / "claims" / "k1").exists()
    (store.path / "claims" / "k1").touch()  # as a process that died leaves it: the file stays, the lock does not
    assert store.lock_unit(unit()) is not None


def test_a_claim_that_is_taken_away_while_it_is_made_is_made_again(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, first = store.path / "claims" / "k1", []
    touch = Path.touch

    def removed_once(file: Path, *args: Any, **kwargs: Any) -> None:
        touch(file, *args, **kwargs)
        if file == path and not first:  # its owner is done between our making and locking the file
            first.append(file)
            path.unlink()

    monkeypatch.setattr(Path, "touch", removed_once)
    lock = store.lock_unit(unit())
    assert lock is not None
    assert lock.is_locked
    assert path.exists()
    assert store.lock_unit(unit()) is None


def test_a_claim_on_a_file_that_was_removed_after_it_was_opened_is_no_claim(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """filelock asks whether the file it locked still has its name; the version that pyproject requires does."""
    path, opened, usual = store.path / "claims" / "k1", [], os.open

    def removed_once(file: Any, *args: Any, **kwargs: Any) -> int:
        descriptor = usual(file, *args, **kwargs)
        if Path(file) == path and not opened:
            opened.append(descriptor)
            path.unlink()
        return descriptor

    monkeypatch.setattr(os, "open", removed_once)
    lock = store.lock_unit(unit())
    monkeypatch.undo()
    assert lock is None or path.exists()
    again = store.lock_unit(unit())
    assert (lock is None) != (again is None), "one of the two holds the claim"


@pytest.mark.parametrize(
    "refusal",
    [OSError(errno.ENOLCK, os.strerror(errno.ENOLCK)), NotImplementedError("No locks available")],
    ids=["ENOLCK", "not-implemented"],
)
def test_a_disk_without_locks_is_named(store: Store, monkeypatch: pytest.MonkeyPatch, refusal: Exception) -> None:
    def refuse(self: FileLock) -> None:
        raise refusal

    monkeypatch.setattr(FileLock, "_acquire", refuse)
    with pytest.raises(ClairError, match=r"cannot be locked \(No locks available\).*a disk of this machine"):
        store.lock_unit(unit())
    with pytest.raises(ClairError, match="No locks available"):
        store.add_study(STUDY)


def test_a_lock_that_would_outlive_its_process_is_refused(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the disk cannot lock, filelock may turn to files that a killed process would leave for ever."""

    def turn_soft(self: FileLock) -> None:
        self.__class__ = SoftFileLock
        self._acquire()

    monkeypatch.setattr(FileLock, "_acquire", turn_soft)
    with pytest.raises(ClairError, match=r"cannot be locked \(Function not implemented\)"):
        store.lock_unit(unit("k7"))
    with pytest.raises(ClairError, match=r"cannot be locked \(Function not implemented\)"):
        store.add_study(STUDY)


def test_windows_removes_a_claim_after_its_release(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """There a file that is open cannot be removed."""
    lock = store.lock_unit(unit())
    assert lock is not None
    unlink = Path.unlink

    def refuse_open_files(path: Path, missing_ok: bool = False) -> None:
        if lock.is_locked:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", refuse_open_files)
    store.unlock_unit(unit(), lock)
    assert not lock.is_locked
    assert not (store.path / "claims" / "k1").exists()


def test_another_format_is_refused(store: Store) -> None:
    about = store.path / "store.json"
    about.write_text(json.dumps({"format": 99, "clairvit": "9.9", "studies": []}))
    with pytest.raises(BadInput, match=r"format 99 \(ClairViT 9.9\)"):
        Store.open(store.path)
    for content, words in (("{", "cannot be read"), ("[]", "holds a list"), ('{"format": 1}', "no list of studies")):
        about.write_text(content)
        with pytest.raises(ClairError, match=f"{words}.*restore it, or begin a new store"):
            Store.open(store.path)


def test_what_is_no_store_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(BadInput, match="not empty and no store"):
        Store.open(tmp_path)
    with pytest.raises(BadInput, match="is a file"):
        Store.open(tmp_path / "thesis.txt")
    with pytest.raises(BadInput, match="There is no store"):
        Store.open(tmp_path / "new", create=False)
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.txt"]
    with pytest.raises(ClairError, match="cannot be written to"):
        Store.open(tmp_path / "thesis.txt" / "store")


def test_a_store_that_was_killed_while_it_began_is_begun_again(tmp_path: Path) -> None:
    (tmp_path / "store" / "parts").mkdir(parents=True)
    (tmp_path / "store" / ".abc.tmp").touch()
    assert Store.open(tmp_path / "store").cells() == frozenset()


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_full_disk_ends_in_a_sentence_and_leaves_what_was_there(
    store: Store, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    store.write(unit(), rows(unit()))
    monkeypatch.setattr(os, step, full)
    with pytest.raises(ClairError, match=r"cannot be written to \(No space left on device\).*goes on from there"):
        store.write(unit("k2"), rows(unit("k2")))
    with pytest.raises(ClairError, match="No space left"):
        store.write_failure(unit("k3"), "error")
    monkeypatch.undo()
    assert store.query("select distinct unit from results")[1] == [("k1",)]
    assert list(store.path.rglob("*.tmp")) == []


def test_what_killed_processes_leave_is_swept_up(store: Store) -> None:
    old, new = store.path / "parts" / ".old.tmp", store.path / "parts" / ".new.tmp"
    old.touch()
    new.touch()
    os.utime(old, (time.time() - 7200,) * 2)
    store.add_study(STUDY)
    assert (old.exists(), new.exists()) == (False, True)


def test_claims_that_nobody_holds_are_swept_up(store: Store) -> None:
    """As of a process that was killed between writing a unit and letting go of it: nobody would claim it again."""
    (store.path / "claims" / "k1").touch()
    held = store.lock_unit(unit("k2"))
    store.add_study(STUDY)
    assert sorted(file.name for file in (store.path / "claims").iterdir()) == ["k2", "store"]
    assert held is not None
    assert store.lock_unit(unit("k2")) is None


def test_a_wrong_query_says_what_there_is(store: Store) -> None:
    with pytest.raises(BadInput, match=r"valeu.*columns unit, model") as caught:
        store.query("select valeu from results")
    assert "\n" not in str(caught.value)
    for nothing in ("", " ", ";"):
        with pytest.raises(BadInput, match="The query is empty; expected one such as 'select"):
            store.query(nothing)


def filled(store: Store, count: int = 5) -> list[tuple[Any, ...]]:
    """Write so many units of two cells and return all rows."""
    for number in range(count):
        work_unit = unit(f"k{number}", (f"a{number}", f"b{number}"))
        store.write(work_unit, rows(work_unit, number / 8))
    return contents(store)


def contents(store: Store) -> list[tuple[Any, ...]]:
    return sorted(store.query("select unit, image_hash, value, y from parts")[1])


def part_names(store: Store) -> list[str]:
    return sorted(file.name for file in (store.path / "parts").iterdir())


def test_compacted_parts_have_the_same_rows_and_units(store: Store) -> None:
    before, cells = filled(store), store.cells()
    assert store.compact(rows=5) == 5, "one file of three units and one of two"
    assert len(part_names(store)) == 2
    assert contents(store) == before
    assert store.cells() == cells == {Cell("w", f"{m}{n}", "legrad", "deletion", "s") for m in "ab" for n in range(5)}
    assert all(store.has(unit(f"k{number}")) for number in range(5))
    assert not store.has(unit("k5"))
    work_unit = unit("k9", ("x", "y"))
    store.write(work_unit, rows(work_unit))
    assert store.compact(rows=100) == 3, "what was compacted before is compacted again with what is new"
    (name,) = part_names(store)
    assert name.startswith("units-")
    assert store.compact(rows=100) == 0
    assert [row for row in contents(store) if row[0] != "k9"] == before


@pytest.mark.parametrize("removed", [0, 1, 5])
def test_a_compaction_that_is_killed_is_finished_by_the_next(
    store: Store, monkeypatch: pytest.MonkeyPatch, removed: int
) -> None:
    """After the large file is written, some or none of the parts are removed; no row is lost or doubled."""
    before = filled(store)
    unlink, left = Path.unlink, [removed]

    def killed(path: Path, missing_ok: bool = False) -> None:
        if path.suffix == ".parquet":
            if left[0] == 0:
                raise KeyboardInterrupt
            left[0] -= 1
        unlink(path, missing_ok=missing_ok)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", killed)
        if removed < 5:
            with pytest.raises(KeyboardInterrupt):
                store.compact()
        else:
            store.compact()
    assert len(part_names(store)) == 1 + 5 - removed
    assert contents(store) == before, "readers leave out what is in the large file"
    assert store.compact() == 5 - removed
    assert len(part_names(store)) == 1
    assert contents(store) == before


def test_a_query_whose_parts_are_compacted_meanwhile_reads_the_large_file(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, kept, calls = filled(store), Store.parts, []

    def listed_then_compacted(self: Store) -> Any:
        listing = kept(self)
        calls.append(len(listing[0]))
        if len(calls) == 1:
            Store(self.path).compact()  # by another process, between the listing and the query
        return listing

    monkeypatch.setattr(Store, "parts", listed_then_compacted)
    assert sorted(store.query("select unit, image_hash, value, y from results")[1]) == before
    assert calls[0] == 5
    assert calls[-1] == 1


def test_a_damaged_compacted_part_is_named_and_its_units_are_computed_again(store: Store) -> None:
    filled(store)
    store.compact()
    (name,) = part_names(store)
    content = bytearray((store.path / "parts" / name).read_bytes())
    content[len(content) // 3] ^= 1
    (store.path / "parts" / name).write_bytes(content)
    with pytest.warns(ClairWarning, match=f"{name}.*computed again"):
        assert store.cells() == frozenset()
    assert not store.has(unit("k1"))


def test_compacted_stores_merge_and_copies_are_kept_once(tmp_path: Path) -> None:
    first, second = Store.open(tmp_path / "first"), Store.open(tmp_path / "second")
    before = filled(first)
    filled(second)
    first.compact()
    assert first.merge(second) == 0, "its units are in the large file"
    work_unit = unit("k7", ("x", "y"))
    second.write(work_unit, rows(work_unit))
    assert first.merge(second) == 1
    second.compact()
    assert first.merge(second) == 0
    assert [row for row in contents(first) if row[0] != "k7"] == before


def test_a_file_is_checked_once_and_again_when_it_changes(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(store, 2)
    digests: list[str] = []
    kept = hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", lambda file, kind: digests.append(file.name) or kept(file, kind))
    forget_checks()
    store.parts()
    store.query("select 1 from results")
    assert len(digests) == 2
    (store.path / "parts" / part_names(store)[0]).touch()
    store.parts()
    assert len(digests) == 3


def test_a_store_at_a_url_is_refused() -> None:
    with pytest.raises(BadInput, match=r"'s3://bucket/store' is at a URL.*expected a folder of a disk"):
        Store.open("s3://bucket/store")


def test_a_set_of_cells_is_a_set() -> None:
    cells = {Cell("w", image, method, "deletion", "s") for image in "ab" for method in ("legrad", "ixg")}
    compact = CellSet.of(cells)
    assert compact == cells == set(compact)
    assert len(compact) == 4
    assert Cell("w", "a", "legrad", "deletion", "s") in compact
    assert Cell("w", "a", "legrad", "insertion", "s") not in compact
    assert "legrad" not in compact
    assert compact.pairs("w", "a", "s") is compact.pairs("w", "b", "s"), "equal sets are kept once"
    assert CellSet.of(compact) is compact
    assert CellSet({}) == frozenset()
