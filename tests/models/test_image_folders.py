"""Which files a folder or pattern stands for: links, loops of links, folders that may not be read, odd names."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from clairvit.data.locations import expand_location
from clairvit.errors import BadInput, ClairWarning
from clairvit.models import image_files
from clairvit.models.image_files import as_path, files_below, find_images, folders_in, read_image


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """a.png, sub/b.png and elsewhere/c.png, with links to the last folder and to that of the photos itself."""
    monkeypatch.chdir(tmp_path)
    for name in ("photos/a.png", "photos/sub/b.png", "elsewhere/c.png"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4)).save(path)
    photos = tmp_path / "photos"
    (photos / "linked").symlink_to(tmp_path / "elsewhere")
    (photos / "loop").symlink_to(".")
    (photos / "sub" / "loop").symlink_to("..")
    return photos


ALL = ["photos/a.png", "photos/linked/c.png", "photos/sub/b.png"]


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("photos", ALL),
        ("photos/**/*.png", ALL),
        ("photos/**", ALL),
        ("**/*.png", ["elsewhere/c.png", *ALL]),
        ("*/**/*.png", ["elsewhere/c.png", *ALL]),
        ("photos/**/sub/*.png", ["photos/sub/b.png"]),
        ("photos/**/**/*.png", ALL),
        ("photos/*/*.png", ["photos/linked/c.png", "photos/loop/a.png", "photos/sub/b.png"]),
        ("photos/loop", ["photos/loop/a.png", "photos/loop/linked/c.png", "photos/loop/sub/b.png"]),
    ],
)
def test_links_are_followed_and_loops_end(photos: Path, pattern: str, names: list[str]) -> None:
    assert [str(path) for path in find_images(pattern)] == names
    if pattern != "photos/*/*.png":
        assert expand_location(pattern, (".png",)) == names


def test_two_loops_do_not_multiply(photos: Path) -> None:
    for number in range(20):
        (photos / f"loop{number}").symlink_to(".")
    assert len(files_below(photos)) == 3
    assert len(image_files.glob_files("photos/**/*.png")) == 3


def test_patterns_match_what_python_matches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without links the patterns are those of `glob`."""
    import glob

    monkeypatch.chdir(tmp_path)
    for name in ("a.png", "x/b.png", "x/y/c.png", "x/[z]/d.png", ".hidden/e.png", "x/.f.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    for pattern in ("*.png", "**/*.png", "x/**/*.png", "**/y/*", "x/**", "**/[[]z]/*", "*/*", str(tmp_path / "**/c*")):
        files = {path for path in glob.glob(pattern, recursive=True) if os.path.isfile(path)}
        assert {str(path) for path in image_files.glob_files(pattern) if path.is_file()} == files, pattern


def test_folders_include_linked_ones(photos: Path) -> None:
    assert [path.name for path in folders_in(photos)] == ["linked", "loop", "sub"]


def unreadable(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a user without the right to read it; root has it."""
    usual: Callable[[Any], Any] = os.scandir

    def scandir(path: Any = ".") -> Any:
        if Path(path).name == folder:
            raise PermissionError(13, "Permission denied", str(path))
        return usual(path)

    monkeypatch.setattr(os, "scandir", scandir)


def test_a_folder_below_that_cannot_be_read_is_named(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unreadable("sub", monkeypatch)
    with pytest.warns(
        ClairWarning, match=r"'photos/sub' cannot be read \(Permission denied\); what is in it is left out"
    ):
        assert [str(path) for path in find_images("photos")] == ["photos/a.png", "photos/linked/c.png"]
    with pytest.warns(ClairWarning, match="photos/sub"):
        assert [str(path) for path in find_images("photos/**/*.png")] == ["photos/a.png", "photos/linked/c.png"]


def test_a_folder_that_cannot_be_read_has_not_no_images(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unreadable("photos", monkeypatch)
    for read in (lambda: find_images("photos"), lambda: folders_in(photos), lambda: read_image("photos")):
        with pytest.raises(BadInput, match=r"cannot be read \(Permission denied\); give one you may read"):
            read()


def test_a_link_to_nothing_is_an_image_that_cannot_be_read(photos: Path) -> None:
    (photos / "gone.png").symlink_to("nowhere.png")
    assert photos / "gone.png" in find_images(photos)
    with pytest.raises(BadInput, match="There is no image"):
        read_image(photos / "gone.png")


def test_links_to_themselves_end_no_folder(photos: Path) -> None:
    (photos / "self.png").symlink_to("self.png")
    (photos / "folder").symlink_to("folder")
    files = find_images(photos)
    assert photos / "self.png" in files
    with pytest.raises(BadInput, match="There is no image"):
        read_image(photos / "self.png")


def test_an_empty_path_is_not_the_current_folder(photos: Path) -> None:
    for read in (
        lambda: find_images(""),
        lambda: find_images(["photos", ""]),
        lambda: read_image(""),
        lambda: as_path(""),
    ):
        with pytest.raises(BadInput, match=r"The path is empty; expected .* '\.' for the current folder"):
            read()
    assert len(find_images(".")) == 4
