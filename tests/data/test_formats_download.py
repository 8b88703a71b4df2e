"""Downloads: by torchvision where it has one, and a clear error where it has none or the network fails."""

from __future__ import annotations

from pathlib import Path
from urllib.error import URLError

import pytest
import torchvision

from clairvit.data.open import list_datasets, open_data
from clairvit.errors import BadInput


@pytest.mark.parametrize(
    ("name", "theirs", "inside"),
    [
        ("pets", "OxfordIIITPet", "oxford-iiit-pet"),
        ("flowers", "Flowers102", "flowers-102"),
        ("caltech101", "Caltech101", "caltech101"),
        ("voc", "VOCSegmentation", "VOCdevkit/VOC2012"),
        ("voc-class", "VOCSegmentation", "VOCdevkit/VOC2012"),
    ],
)
def test_download_goes_through_torchvision(
    name: str, theirs: str, inside: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What torchvision would do is not done; that it is asked, where it puts things and what fails is looked at."""
    roots: list[Path] = []

    def no_network(root: Path, *_: object, download: bool, **__: object) -> None:
        assert download
        roots.append(root)
        raise URLError("no route to host")

    monkeypatch.setattr(torchvision.datasets, theirs, no_network)
    place = tmp_path / "new"
    with pytest.raises(BadInput) as raised:
        open_data(f"{name}:{place}", download=True)
    assert roots == [place]
    assert "could not be downloaded (URLError: <urlopen error no route to host>); look at the network" in str(
        raised.value
    )
    assert f"  {place}/\n" in str(raised.value)
    (data,) = [dataset for dataset in list_datasets() if dataset.name == name]
    assert inside in data.archive_folders, "where torchvision puts it is where it is looked for"


def test_formats_without_download_raise(tmp_path: Path) -> None:
    for data in list_datasets():
        if not data.download and data.accepts == "folder":
            with pytest.raises(BadInput, match=f"{data.title} cannot be downloaded from here: .*Put it into:"):
                open_data(f"{data.name}:{tmp_path}", download=True)
