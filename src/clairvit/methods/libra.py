"""LibraGrad under its published names: methods on the balanced gradient (`rules=libra`, see `tracing/rules/linear.py`).

`libra-X` is `X(rules=libra)`, bit by bit.
"""

from __future__ import annotations

from clairvit.methods import cam, fullgrad, gradient_attention  # noqa: F401  (they register the methods named here)
from clairvit.methods.registry import named_variant

LIBRA_BASES = ("fullgrad-plus", "attcat", "genatt", "xgradcam-plus", "hirescam")
_PINNED = {"fullgrad-plus": {"biases": "learned"}}  # implicit biases are defined for the true slopes only
_DETAILS = """\
The same map as `{base}(rules=libra)`: what is not linear is pruned from the backward (attention and LayerNorm's spread
held fixed), scaled (an activation's slope is f(z)/z) or halved (a gate and what it multiplies). The authors explain
the probability: score=prob."""

for _base in LIBRA_BASES:
    named_variant(
        f"libra-{_base}",
        _base,
        meaning="the same on LibraGrad's balanced gradient.",
        details=_DETAILS.format(base=_base),
        paper="Mehri et al., CVPR 2025 (LibraGrad)",
        **_PINNED.get(_base, {}),
        rules="libra",
    )
