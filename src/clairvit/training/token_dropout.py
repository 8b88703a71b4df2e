"""Token dropout: train on shorter sequences, so that a model with tokens removed is in its domain (IDSDS)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from clairvit._rng import make_generator
from clairvit.errors import NotApplicable
from clairvit.models.model import Layout, Model
from clairvit.models.preprocess import Preprocess
from clairvit.perturbation.token_dropping import drop_strategy, droppable_tokens, kept_rows
from clairvit.tracing.recording import record
from clairvit.tracing.structure import tokens_among


@dataclass(frozen=True, eq=False)
class TokenDropout:
    """The block in front of which tokens are dropped, and how many of them at most."""

    block: nn.Module
    layout: Layout  # tokens that are no patches stay
    most: int  # patches that a step drops at most

    def draw(self, images: int, generator: torch.Generator) -> Tensor:
        """Return the token indices that are kept, [B, K], in order.

        The number of dropped patches is uniform in 0 … most, the same for all images of a step; which ones is drawn
        per image.
        """
        dropped = int(torch.randint(0, self.most + 1, (), generator=generator, device="cpu"))
        order = torch.rand(images, self.layout.patches, generator=generator, dtype=torch.float32, device="cpu").argsort(
            1
        )
        keep = torch.zeros_like(order, dtype=torch.bool).scatter_(1, order[:, dropped:], True)
        return kept_rows(self.layout, keep)

    @contextmanager
    def dropping(self, kept: Tensor) -> Iterator[None]:
        """Run forwards inside the `with` on the kept tokens alone; gradients flow through the selection."""

        def select(module: nn.Module, args: Any, kwargs: Any) -> Any:
            tokens = tokens_among(args, kwargs)
            assert tokens is not None
            rows = kept.to(tokens.device)[..., None].expand(-1, -1, tokens.shape[-1])
            chosen = tokens.gather(1, rows)  # [B, K, d]
            args = tuple(chosen if value is tokens else value for value in args)
            return args, {name: chosen if value is tokens else value for name, value in kwargs.items()}

        hook = self.block.register_forward_pre_hook(select, with_kwargs=True)
        try:
            yield
        finally:
            hook.remove()


def epoch_generator(seed: int, epoch: int) -> torch.Generator:
    """Return the generator of an epoch's dropped tokens."""
    return make_generator(seed, "training/dropped tokens", epoch)


def token_dropout(module: nn.Module, preprocess: Preprocess, rate: float, device: torch.device) -> TokenDropout:
    """Return where and how many tokens of this model are dropped, at most round(rate · patches), never all of them.

    Raises:
        NotApplicable: The model has no tokens, or its blocks know positions, which a shorter sequence would shift.
    """
    noise = torch.randn(
        1, 3, *preprocess.size, generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu"
    ).to(device)
    recording = record(Model(module, "model", preprocess), noise, differentiable=False)
    structure, tokens, strategy = recording.structure, droppable_tokens(recording), drop_strategy(recording)
    block = structure.layers[0].block if structure.layers else None
    usable = strategy.mode == "drop" and not strategy.positions and structure.whole_blocks
    first_input = recording.inputs[0] if recording.inputs else None
    same_shape = tokens is not None and first_input is not None and first_input.shape == tokens.shape  # [B, N, d]
    if block is None or not usable or not same_shape:
        raise NotApplicable(
            f"drop_tokens={rate} was given for {type(module).__name__}, whose tokens cannot be dropped in training; "
            "expected a ViT that adds its position embedding before the first block, such as timm's vit_* and deit_*."
        )
    layout = structure.layout
    assert layout is not None
    most = min(round(rate * layout.patches), layout.patches - 1)
    return TokenDropout(block, layout, most)
