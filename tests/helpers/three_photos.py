"""Three photos in a folder of the working directory: what commands that read folders are tried on."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image
from skimage import data

CAT = Image.fromarray(data.chelsea())  # 451 × 300


@pytest.fixture(autouse=True)
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """photos/cat0.png …, and the folder above as the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").mkdir()
    for number in range(3):
        CAT.crop((40 * number, 0, 451, 300)).save(tmp_path / "photos" / f"cat{number}.png")
    return tmp_path
