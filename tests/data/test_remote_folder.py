"""Results at a URL: a folder of this disk that is downloaded, uploaded and kept where an upload fails."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from clairvit.data import remote_folder
from clairvit.data.remote_folder import RemoteFolder, local_folder
from clairvit.errors import BadInput

URL = "memory://bucket/study"


@pytest.fixture
def memory() -> Iterator[Any]:
    filesystem = fsspec.filesystem("memory")
    filesystem.store.clear()
    yield filesystem
    filesystem.store.clear()


def files(memory: Any) -> dict[str, bytes]:
    return {path.removeprefix("/bucket/study/"): memory.cat_file(path) for path in memory.find("/bucket/study")}


def test_a_path_is_itself(tmp_path: Path) -> None:
    with local_folder(str(tmp_path / "store")) as folder:
        assert folder == tmp_path / "store"


def test_what_is_written_is_uploaded_and_found_again(memory: Any) -> None:
    with local_folder(URL) as folder:
        (folder / "parts").mkdir()
        (folder / "parts" / "a").write_bytes(b"1")
        (folder / "parts" / "b.tmp").write_bytes(b"half")
        (folder / "claims").mkdir()
        (folder / "claims" / "unit").write_bytes(b"")
    assert files(memory) == {"parts/a": b"1"}
    with local_folder(f"{URL}/") as folder:
        assert (folder / "parts" / "a").read_bytes() == b"1"
        (folder / "parts" / "a").unlink()
        (folder / "parts" / "c").write_bytes(b"2")
    assert files(memory) == {"parts/c": b"2"}
    assert not folder.exists()


def test_only_changes_are_uploaded(memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    memory.pipe_file("/bucket/study/a", b"1")
    uploaded: list[str] = []
    put_file = type(memory).put_file
    monkeypatch.setattr(
        type(memory), "put_file", lambda self, source, target: (uploaded.append(target), put_file(self, source, target))
    )
    with local_folder(URL) as folder:
        (folder / "b").write_bytes(b"2")
    assert [target.rpartition("/")[2] for target in uploaded] == ["b"]


def test_results_are_uploaded_after_an_error_too(memory: Any) -> None:
    def interrupted() -> None:
        with local_folder(URL) as folder:
            (folder / "a").write_bytes(b"1")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert files(memory) == {"a": b"1"}


def test_uploads_go_on_while_the_command_runs(memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_folder, "UPLOAD_SECONDS", 0.01)
    uploaded = threading.Event()
    upload = RemoteFolder.upload

    def watched(self: RemoteFolder) -> None:
        upload(self)
        if files(memory):
            uploaded.set()

    monkeypatch.setattr(RemoteFolder, "upload", watched)
    with local_folder(URL) as folder:
        (folder / "a").write_bytes(b"1")
        assert uploaded.wait(60)


@pytest.mark.usefixtures("memory")
def test_results_that_cannot_be_uploaded_stay_on_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(fsspec.get_filesystem_class("memory"), "put_file", refused)
    with (
        pytest.raises(BadInput, match=r"cannot be written to \(Permission denied\).*The results stay in '"),
        local_folder(URL) as folder,
    ):
        (folder / "a").write_bytes(b"1")
    assert (folder / "a").read_bytes() == b"1"


def test_a_protocol_without_a_package_is_refused() -> None:
    with pytest.raises(BadInput, match="nosuch://x"), local_folder("nosuch://x"):
        pass


@pytest.mark.usefixtures("memory")
def test_nothing_is_left_on_the_disk_where_a_download_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(fsspec.get_filesystem_class("memory"), "exists", refused)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(BadInput, match=r"cannot be read \(Permission denied\)"), local_folder(URL):
        pass
    assert list(tmp_path.iterdir()) == []
