"""Names of modules in the ViTs of transformers, which changed with its version 5."""

from __future__ import annotations

from typing import Any


def vit_layers(vit: Any) -> Any:
    """Return the blocks of a ViTModel or ViTMAEModel: `layers`, or `encoder.layer` in older versions."""
    return vit.layers if hasattr(vit, "layers") else vit.encoder.layer


def value_and_output(attention: Any) -> tuple[Any, Any]:
    """Return the projections of the values and of the output of a block's attention."""
    if hasattr(attention, "v_proj"):
        return attention.v_proj, attention.o_proj
    return attention.attention.value, attention.output.dense
