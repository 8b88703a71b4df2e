"""Write tests/fixtures/atman.npz with the authors' own functions (github.com/Aleph-Alpha/AtMan, commit 847f090).

    git clone https://github.com/Aleph-Alpha/AtMan /tmp/AtMan
    PYTHONPATH=tests:tests/parity python tests/parity/make_atman.py /tmp/AtMan/atman-magma/atman_magma

Theirs: which tokens look alike, their factors, how scores are changed, and the difference of cross-entropies (negated:
they store loss before − loss after). Ours: the ViT around it, whose patch tokens at the first block are given to them.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peers_models import TARGETS, vit
from torch import Tensor

FIXTURES = Path(__file__).parent.parent / "fixtures"


def theirs(folder: Path, name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main(folder: Path) -> None:
    change = theirs(folder, "manipulate_attention").manipulate_attention_scores
    alike = theirs(folder, "conceptual_suppression").ConceptualSuppression
    module, images = vit()
    prefix = module.num_prefix_tokens

    def logits(image: Tensor, config: dict[str, list[Any]] | None) -> Tensor:
        x = module.norm_pre(module._pos_embed(module.patch_embed(image)))
        factors = torch.ones(1, 1, x.shape[1], x.shape[1], dtype=x.dtype)
        if config is not None:
            for index, factor in zip(config["suppression_token_index"], config["suppression_factor"], strict=True):
                factors[..., prefix + index] = factor
        everything = torch.ones_like(factors, dtype=torch.bool)
        for block in module.blocks:
            attention, y = block.attn, block.norm1(x)
            q, k, v = attention.qkv(y).unflatten(-1, (3, attention.num_heads, -1)).permute(2, 0, 3, 1, 4)
            scores = q @ k.transpose(-2, -1)
            scores = scores if config is None else change(scores, everything, factors)
            mixed = (scores * attention.scale).softmax(-1) @ v
            x = x + block.ls1(attention.proj(mixed.transpose(1, 2).flatten(2)))
            x = x + block.ls2(block.mlp(block.norm2(x)))
        return module.forward_head(module.norm(x))

    kept = {}
    with torch.no_grad():
        for threshold in (None, 0.6, 0.1):
            maps = []
            for image, target in zip(images, TARGETS, strict=True):
                tokens = module.norm_pre(module._pos_embed(module.patch_embed(image[None])))[:, prefix:]
                configs = [
                    {"suppression_token_index": [i], "suppression_factor": [0.1]} for i in range(tokens.shape[1])
                ]
                if threshold is not None:
                    configs = alike(tokens, threshold, True).modify_configs(configs)
                goal = torch.tensor([target])
                before = torch.nn.functional.cross_entropy(logits(image[None], None), goal)
                after = [
                    torch.nn.functional.cross_entropy(logits(image[None], after_suppression), goal)
                    for after_suppression in configs
                ]
                maps.append([-float(before - after_suppression) for after_suppression in after])
            kept["none" if threshold is None else str(threshold)] = np.array(maps)
    np.savez_compressed(FIXTURES / "atman.npz", **kept)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
