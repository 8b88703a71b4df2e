"""Rule tables for methods of your own: how relevance passes through each kind of operation.

A method names the table of the backward pass that it reads: `cv.extend.Requires(rules=attnlrp(gamma_lin=0.05))`.
"""

from clairvit.tracing.rules import CHEFER, DEEP_TAYLOR, LIBRA, LINEAR, LRP, PLAIN, RESIDUAL
from clairvit.tracing.rules.attnlrp import attnlrp, cp_lrp
from clairvit.tracing.rules.reslrp import reslrp
from clairvit.tracing.rules.table import Call, Gradients, Rule, RuleTable

__all__ = [
    "CHEFER",
    "DEEP_TAYLOR",
    "LIBRA",
    "LINEAR",
    "LRP",
    "PLAIN",
    "RESIDUAL",
    "Call",
    "Gradients",
    "Rule",
    "RuleTable",
    "attnlrp",
    "cp_lrp",
    "reslrp",
]
