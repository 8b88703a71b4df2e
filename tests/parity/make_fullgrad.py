"""Numbers of the FullGrad authors' code (idiap/fullgrad-saliency) on the tiny CNN of tests/methods/test_fullgrad.py.

PYTHONPATH=src:tests:tests/methods python tests/parity/make_fullgrad.py CLONE tests/fixtures/fullgrad.npz
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from test_fullgrad import TARGETS, convolutions, noise_images

if __name__ == "__main__":
    clone, out = sys.argv[1:]
    sys.path.insert(0, clone)
    torch.set_default_dtype(torch.float64)
    from saliency.fullgrad import FullGrad

    module = convolutions()
    for p in module.parameters():
        p.requires_grad_(True)
    # One image at a time, as its extractor pairs gradients with biases.
    maps = [
        FullGrad(module, (3, 16, 24)).saliency(image[None].clone(), torch.tensor([target]))
        for image, target in zip(noise_images(), TARGETS, strict=True)
    ]
    np.savez_compressed(Path(out), fullgrad=torch.cat(maps).detach().numpy())
