"""Recorders: what is kept of a forward and a backward pass beyond what every trace has.

`cv.trace(model, images, recorders=(ResidualSums,))[ResidualSums]` reads one. A method of your own declares it by
`cv.extend.Requires(recorders=(PatchEmbedding,))` and reads `layer[PatchEmbedding]`, or `trace[…]` for the whole image.
"""

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
    "BiasMaps",
    "BiasTerms",
    "HeadReplay",
    "ImplicitBiasTerms",
    "LastLinear",
    "LastNorm",
    "LearnedBiasTerms",
    "Op",
    "OpLog",
    "PatchEmbedding",
    "PostAttentionResidual",
    "Recorder",
    "ResidualBranches",
    "ResidualSums",
]
