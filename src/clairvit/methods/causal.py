"""Causal methods: what happens to the score when a patch is really taken away."""

from __future__ import annotations

import torch
from torch import Tensor

from clairvit.methods.explanation import Cost
from clairvit.methods.method import method
from clairvit.perturb.aside import Aside
from clairvit.perturb.probe import probing
from clairvit.perturb.removal import Removal
from clairvit.trace.trace import Trace


@method(
    "leave-one-out",
    family="perturbation",
    paper="do(x_i) as in Coporan's survey",
    gives="image",
    passes="forward",
    more=lambda patches, **_: Cost(patches),
    score="prob",
    draws=False,
    signed=True,
    slow=True,
)
def leave_one_out(trace: Trace, *, aside: Aside, removal: Removal = "token", seed: int = 0) -> Tensor:
    """f(x) − f(x without patch i): the exact effect of do(remove i), one forward a patch.

    What every other method guesses at, for one patch at a time: two patches that say the same do not matter alone.
    """
    patches = trace.layout.patches
    with probing(trace, removal, what="leave-one-out", forwards=patches, aside=aside, seed=seed) as probe:
        scores = probe.keeping(~torch.eye(patches, dtype=torch.bool)[None])  # [B, patches]
        return (probe.original[:, None] - scores).reshape(-1, *probe.grid)
