"""Write tests/fixtures/road.npz with pytorch-grad-cam's own imputer (grad-cam 1.5.7), its noise switched off.

python -m venv /tmp/peer && /tmp/peer/bin/pip install grad-cam
/tmp/peer/bin/python tests/parity/make_road.py
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from pytorch_grad_cam.metrics.road import NoisyLinearImputer

FIXTURES = Path(__file__).parent.parent / "fixtures"


def main() -> None:
    rng = np.random.default_rng(0)
    image = rng.normal(size=(3, 20, 28)).astype(np.float32)
    patches = rng.random((5, 7)) < 0.5
    masks = {
        "scattered": rng.random((20, 28)) < 0.5,
        "patches": np.kron(patches, np.ones((4, 4), bool)),
        "nearly all": rng.random((20, 28)) < 0.97,
    }
    impute = NoisyLinearImputer(noise=0)
    imputed = {name: impute(torch.from_numpy(image), torch.from_numpy(~gone)).numpy() for name, gone in masks.items()}
    np.savez_compressed(
        FIXTURES / "road.npz", image=image, **{f"{name} gone": gone for name, gone in masks.items()}, **imputed
    )


if __name__ == "__main__":
    main()
