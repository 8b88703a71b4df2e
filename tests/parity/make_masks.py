"""Write tests/fixtures/masks.npz: RISE's masks and maps by its authors' own file, Occlusion by captum 0.9.0.

    git clone https://github.com/eclique/RISE /tmp/rise
    python -m venv /tmp/peer && /tmp/peer/bin/pip install captum timm torchvision scikit-image tqdm
    PYTHONPATH=tests:tests/parity:/tmp/rise /tmp/peer/bin/python tests/parity/make_masks.py

Their generator draws from numpy's own random numbers; these are noted on the way, so that ours can be given the same.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from captum.attr import Occlusion
from explanations import RISE  # the authors' file
from mask_cases import KEPT_EVERY, OCCLUSIONS, RISES
from peers_models import TARGETS, vit

FIXTURES = Path(__file__).parent.parent / "fixtures"
PATCH = 4


def their_masks(explainer: RISE, samples: int, cells: int, p: float) -> dict[str, np.ndarray]:
    """The masks, with the coarse grids and the shifts that they were made of."""
    grids: list[Any] = []
    shifts: list[Any] = []
    rand, randint = np.random.rand, np.random.randint
    np.random.rand = lambda *size: grids.append(rand(*size)) or grids[-1]
    np.random.randint = lambda *ends: shifts.append(randint(*ends)) or shifts[-1]
    try:
        np.random.seed(0)  # noqa: NPY002
        with tempfile.TemporaryDirectory() as folder:
            explainer.generate_masks(samples, cells, p, f"{folder}/masks.npy")
    finally:
        np.random.rand, np.random.randint = rand, randint
    return {
        "coarse": grids[0] < p,
        "shifts": np.array(shifts).reshape(samples, 2),
        "masks": explainer.masks[:, 0].numpy(),
    }


def main() -> None:
    torch.Tensor.cuda = lambda self: self  # their file asks for a GPU
    arrays: dict[str, np.ndarray] = {}
    module, pixels = vit()
    single, images = module.float(), pixels.float()
    for name, (size, samples, cells, p) in RISES.items():
        explainer = RISE(lambda x: single(x).softmax(-1), size)
        masks, every = their_masks(explainer, samples, cells, p), KEPT_EVERY[name]
        masks["masks"] = masks["masks"][:, ::every, ::every]
        arrays |= {f"{name} {what}": value for what, value in masks.items()}
        if size == tuple(images.shape[-2:]):
            with torch.no_grad():
                maps = [explainer(images[row : row + 1])[TARGETS[row]] for row in range(2)]
            arrays[f"{name} map"] = torch.stack(maps).numpy()
    module, pixels = vit()
    for window, stride in OCCLUSIONS:
        attribution = Occlusion(module).attribute(
            pixels,
            sliding_window_shapes=(3, window * PATCH, window * PATCH),
            strides=(3, stride * PATCH, stride * PATCH),
            target=torch.tensor(TARGETS),
        )
        arrays[f"occlusion {window} {stride}"] = attribution.detach().numpy()
    np.savez_compressed(FIXTURES / "masks.npz", **arrays)


if __name__ == "__main__":
    main()
