"""Makes tests/fixtures/forward.npz: what the authors' own codes of GlobEnc, ALTI and DecompX say of `post_norm()`.

Run once, in a throw-away environment with transformers 4.36, with a folder that holds (fetched, never committed)
  globenc_bert.py      mohsenfayyaz/GlobEnc                 src/modeling/modeling_bert.py
  alti_contributions.py  mt-upc/transformer-contributions   src/contributions.py
  decompx/modeling_bert.py, decompx/decompx_utils.py        mohsenfayyaz/DecompX src/
    PYTHONPATH=tests:FOLDER python tests/parity/make_forward.py
"""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import BertConfig

from helpers.custom_vits import CLASSES, HEADS, WIDTH
from helpers.post_norm_model import EPS, PostNorm, picture, post_norm

# ALTI's file reads a settings file and imports captum for other methods; both are stood in for.
NAMES = {
    "layer": "encoder.layer",
    "ln1": "attention.output.LayerNorm",
    "ln2": "output.LayerNorm",
    "values": "attention.self.value",
    "dense": "attention.output.dense",
    "pre_layer_norm": "False",
}
settings, captum, attr = types.ModuleType("pyaml_env"), types.ModuleType("captum"), types.ModuleType("captum.attr")
settings.parse_config = lambda _: {"models": {"bert": NAMES}}
for word in ("IntegratedGradients", "Saliency", "InputXGradient", "InterpretableEmbeddingBase", "TokenReferenceBase"):
    setattr(attr, word, object)
sys.modules |= {"pyaml_env": settings, "captum": captum, "captum.attr": attr}

import alti_contributions  # noqa: E402
import globenc_bert  # noqa: E402
from decompx import modeling_bert as decompx_bert  # noqa: E402
from decompx.decompx_utils import DecompXConfig  # noqa: E402

CONFIG = BertConfig(
    hidden_size=WIDTH,
    num_hidden_layers=2,
    num_attention_heads=HEADS,
    intermediate_size=40,
    layer_norm_eps=EPS,
    hidden_act="gelu",
    num_labels=CLASSES,
    vocab_size=10,
)


def same_weights(encoder: nn.Module, ours: PostNorm) -> nn.Module:
    pairs = {
        "attention.self.query": "query",
        "attention.self.key": "key",
        "attention.self.value": "value",
        "attention.output.dense": "dense",
        "attention.output.LayerNorm": "norm1",
        "intermediate.dense": "up",
        "output.dense": "down",
        "output.LayerNorm": "norm2",
    }
    for theirs, block in zip(encoder.layer, ours.blocks, strict=True):
        for name, our_name in pairs.items():
            theirs.get_submodule(name).load_state_dict(getattr(block, our_name).state_dict())
    return encoder.double().eval()


class Tower(nn.Module):
    """An encoder with a name for it, as ALTI's hooks expect."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder, self.config = encoder, CONFIG


@torch.no_grad()
def globenc(ours: PostNorm, x: Tensor) -> dict[str, list[Tensor]]:
    encoder = same_weights(globenc_bert.BertEncoder(CONFIG), ours)
    names = ("attin", "attin_residual", "attin_residual_ln", "globenc")
    maps_by_method: dict[str, list[Tensor]] = {name: [] for name in names}
    for layer in encoder.layer:
        out = layer(x, output_norms=True)  # x, A, ||αf|| by head, ||Σαf||, ||Σαf + x||, after one norm, after both
        for place, name in enumerate(names, 3):
            maps_by_method[name].append(out[place][0])
        x = out[0]
    return maps_by_method


@torch.no_grad()
def alti(ours: PostNorm, x: Tensor) -> list[Tensor]:
    encoder = same_weights(globenc_bert.BertEncoder(CONFIG), ours)
    wrapper = alti_contributions.ModelWrapper(Tower(encoder))
    inputs: dict[str, Any] = {}
    outputs: dict[str, Any] = {}
    for name, part in wrapper.model.named_modules():

        def keep(_: nn.Module, given: Any, output: Any, name: str = name) -> None:
            inputs[name], outputs[name] = [given], [output]

        part.register_forward_hook(keep)
    states, attentions = [x], []
    for layer in encoder.layer:
        out = layer(states[-1], output_attentions=True)
        states.append(out[0])
        attentions.append(out[1])
    result = wrapper.get_contributions(states, attentions, inputs, outputs)
    near = result["contributions"] + result["resultants"].norm(p=1, dim=-1)[..., None]  # their "min_sum" scaling
    return list(near.clamp(min=0) / near.clamp(min=0).sum(-1, keepdim=True))


@torch.no_grad()
def decompx(ours: PostNorm, x: Tensor, sharing: str) -> Tensor:
    encoder = same_weights(decompx_bert.BertEncoder(CONFIG), ours)
    settings = DecompXConfig(bias_decomp_type=sharing, aggregation="vector")
    out = encoder(
        x, attention_mask=torch.zeros(1, 1, 1, x.shape[1]).double(), decompx_config=settings, return_dict=False
    )
    vectors = out[-1].aggregated[0]  # [B, i, j, d]
    head = decompx_bert.BertForSequenceClassification(CONFIG).double()
    head.classifier.load_state_dict(ours.head.state_dict())
    return head.ffn_decomposer(vectors[:, 0], include_biases=True, bias_decomp_type=sharing)[0]  # [j, C]


def main() -> None:
    torch.set_default_dtype(torch.float64)  # some of their weights are made in the default type
    ours, bare = post_norm(), post_norm(first_value_bias=False)
    x = ours.tokens(picture()).detach()
    kept: dict[str, Tensor] = {}
    for name, matrices in (globenc(ours, x) | {"alti": alti(ours, x)}).items():
        kept[name] = torch.stack([M[0] for M in matrices])  # the class token's row of each layer
        kept[f"{name}_product"] = (matrices[1] @ matrices[0])[0]
    for sharing in ("absdot", "abssim", "norm", "equal", "cls"):
        kept[f"decompx_{sharing}"] = decompx(bare, bare.tokens(picture()).detach(), sharing)
    where = Path(__file__).parent.parent / "fixtures" / "forward.npz"
    np.savez_compressed(where, **{name: value.numpy() for name, value in kept.items()})


if __name__ == "__main__":
    main()
