"""Results at a URL: a folder of this disk stands for one at any place that fsspec writes to.

Results are written whole under another name and renamed, and units are locked, which needs a disk. So a command works
in a copy on this disk, and what is new or changed there is uploaded every minute and at the end.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from clairvit.data.locations import filesystem_of, is_url, translated_errors
from clairvit.errors import BadInput

UPLOAD_SECONDS = 60.0
_LOCAL_FOLDERS = ("claims",)  # locks of units that are being computed on this machine
_LOCAL_SUFFIXES = (".tmp", ".lock")
State = Mapping[str, tuple[int, int]]  # path below the folder -> size and time of the last change


@contextmanager
def local_folder(location: str) -> Iterator[Path]:
    """Yield a folder of this disk that stands for `location`: the folder itself, or a copy of the one at a URL.

    Args:
        location: A path or URL. What is there at a URL is downloaded first, so that a study goes on where it was.

    Raises:
        BadInput: The URL cannot be read or written to.

    Example:
        >>> with local_folder("runs/study") as folder:
        ...     print(folder)
        runs/study
    """
    if not is_url(location):
        yield Path(location)
        return
    remote = RemoteFolder(location, Path(tempfile.mkdtemp(prefix="clairvit-")))
    is_downloaded = False
    try:
        remote.download()
        is_downloaded = True
        stopped = threading.Event()
        uploads = threading.Thread(target=remote.upload_until, args=(stopped,), daemon=True)
        uploads.start()
        try:
            yield remote.local
        finally:  # also after an error or Ctrl-C: what was computed is kept
            stopped.set()
            uploads.join()
            remote.upload_last()
    finally:
        if remote.is_uploaded or not is_downloaded:
            shutil.rmtree(remote.local, ignore_errors=True)


class RemoteFolder:
    """A folder at a URL and its copy on this disk."""

    def __init__(self, location: str, local: Path) -> None:
        self.location, self.local = location.rstrip("/"), local
        self._uploaded: State = {}

    @property
    def is_uploaded(self) -> bool:
        """Whether all that is on this disk is at the URL too."""
        return self._state() == self._uploaded

    def download(self) -> None:
        """Copy what is at the URL to this disk."""
        filesystem, root = filesystem_of(self.location)
        with translated_errors(self.location):
            for path in filesystem.find(root) if filesystem.exists(root) else ():
                below = str(path)[len(root.rstrip("/")) + 1 :]
                target = self.local / below
                target.parent.mkdir(parents=True, exist_ok=True)
                filesystem.get_file(path, str(target))
        self._uploaded = self._state()

    def upload(self) -> None:
        """Copy new and changed files to the URL, and remove there what was removed here."""
        filesystem, root = filesystem_of(self.location)
        state = self._state()
        with translated_errors(self.location, "written to"):
            for below, version in state.items():
                if self._uploaded.get(below) != version:
                    target = f"{root.rstrip('/')}/{below}"
                    filesystem.makedirs(target.rpartition("/")[0], exist_ok=True)
                    filesystem.put_file(str(self.local / below), target)
            for below in self._uploaded.keys() - state.keys():
                filesystem.rm_file(f"{root.rstrip('/')}/{below}")
        self._uploaded = state

    def upload_until(self, stopped: threading.Event) -> None:
        """Upload every minute until an event is set."""
        while not stopped.wait(UPLOAD_SECONDS):
            with suppress(BadInput):  # tried again in a minute; the last upload raises
                self.upload()

    def upload_last(self) -> None:
        """Upload what is left; where that fails, say where on this disk the results are."""
        try:
            self.upload()
        except BadInput as error:
            raise BadInput(f"{error} The results stay in '{self.local}'; copy them from there.") from error

    def _state(self) -> State:
        """Return the files of the copy that belong to the result."""
        files: dict[str, tuple[int, int]] = {}
        for path in sorted(self.local.rglob("*")):
            below = path.relative_to(self.local)
            if path.suffix in _LOCAL_SUFFIXES or below.parts[0] in _LOCAL_FOLDERS or not path.is_file():
                continue
            with suppress(FileNotFoundError):  # renamed or removed by the command meanwhile
                stat = path.stat()
                files[below.as_posix()] = (stat.st_size, stat.st_mtime_ns)
        return files
