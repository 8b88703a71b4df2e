"""Recorders and requirements for methods of your own: what must be seen of a forward and a backward pass.

`cv.Requires(passes="forward", recorders=(PatchEmbedding,))` declares it; `layer[PatchEmbedding]`, or `trace[…]` of a
method of the whole image, reads it. `FORWARD` and `BACKWARD` are the requirements of methods that need no more.
"""

from clairvit.methods.registry import (
    BACKWARD,
    FORWARD,
    FORWARD_ON_PLANE,
    NOTHING,
    Caveats,
    ExtraCost,
    OptionOverrides,
    Requires,
    WeightedHeads,
)
from clairvit.tracing.recorders.base import Op, Recorder
from clairvit.tracing.recorders.bias_terms import BiasMaps, BiasTerms, ImplicitBiasTerms, LearnedBiasTerms
from clairvit.tracing.recorders.head_replay import HeadReplay, LastLinear
from clairvit.tracing.recorders.last_norm import LastNorm
from clairvit.tracing.recorders.op_log import OpLog
from clairvit.tracing.recorders.patch_embedding import PatchEmbedding
from clairvit.tracing.recorders.residual import PostAttentionResidual
from clairvit.tracing.recorders.residual_branches import ResidualBranches
from clairvit.tracing.recorders.residual_sums import ResidualSums

__all__ = [
    "BACKWARD",
    "FORWARD",
    "FORWARD_ON_PLANE",
    "NOTHING",
    "BiasMaps",
    "BiasTerms",
    "Caveats",
    "ExtraCost",
    "HeadReplay",
    "ImplicitBiasTerms",
    "LastLinear",
    "LastNorm",
    "LearnedBiasTerms",
    "Op",
    "OpLog",
    "OptionOverrides",
    "PatchEmbedding",
    "PostAttentionResidual",
    "Recorder",
    "Requires",
    "ResidualBranches",
    "ResidualSums",
    "WeightedHeads",
]
