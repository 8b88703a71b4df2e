"""Relevance and decomposition by swapped backward rules: gradient × input, read under another table."""

from __future__ import annotations

from clairvit.methods.aggregate import Single
from clairvit.methods.gradient import input_x_gradient
from clairvit.methods.method import register

register(
    "cp-lrp",
    input_x_gradient,
    family="relevance",
    paper="Ali et al., ICML 2022, eps 0 (= decompx)",
    gives="tokens",
    over=Single(0),
    rules="linear",
    signed=True,
)
register(
    "attnlrp",
    input_x_gradient,
    family="relevance",
    paper="Achtibat et al., ICML 2024, eps 0",
    gives="tokens",
    over=Single(0),
    rules="attnlrp",
    signed=True,
)
