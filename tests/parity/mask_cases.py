"""What make_masks.py asked the peers, so that the tests ask the same."""

from __future__ import annotations

OCCLUSIONS = [(1, 1), (2, 1), (2, 2)]  # window and stride, in patches of peers_models.vit
RISES = {  # size, samples, cells, p: that ViT's own images; sides that no number of cells divides; the usual size
    "small": ((12, 20), 60, 3, 0.5),
    "odd": ((33, 50), 5, 7, 0.3),
    "usual": ((224, 224), 2, 7, 0.5),
}
KEPT_EVERY = {"small": 1, "odd": 1, "usual": 5}  # pixels of the masks, along each side: a small file
