"""Draw docs/images/features.png and features-layers.png from the built-in photo and model.

python docs/generate_features.py
"""

from __future__ import annotations

from pathlib import Path

import clairvit as cv

FOLDER = Path(__file__).parent / "images"
PATCH = (5, 4)  # the cat's left eye
DPI = 110


def main() -> None:
    features = cv.features("pets", "demo", layer="all")
    print(features.save(FOLDER / "features.png", patch=PATCH, dpi=DPI))
    print(features.save(FOLDER / "features-layers.png", layers=True, dpi=DPI))


if __name__ == "__main__":
    main()
