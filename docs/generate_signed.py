"""Draw docs/images/signed.jpg, a signed map next to one that is not:  python docs/generate_signed.py"""

from __future__ import annotations

from pathlib import Path

import clairvit as cv

PICTURE = Path(__file__).parent / "images" / "signed.jpg"

if __name__ == "__main__":
    print(cv.compare("pets", "demo", ["attnlrp+plus", "genatt"], target="Bengal").save(PICTURE, dpi=100))
