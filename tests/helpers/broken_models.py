"""Tiny Vision Transformers that are broken in one way each, with the check of `cv.doctor` that must name it."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import clairvit as cv
from helpers.custom_vits import CLASSES, WIDTH, Block, HomeMade, MatmulAttention
from helpers.tiny_models import shaken


class Plain(HomeMade):
    """The healthy model that the others break."""

    def __init__(self) -> None:
        super().__init__(lambda: Block(MatmulAttention), depth=3)


class ActiveDropout(Plain):
    """F.dropout without training=self.training."""

    def through(self, x: Tensor) -> Tensor:
        return F.dropout(super().through(x), 0.3)


class ShuffledTokens(Plain):
    """Random masking as in ViTMAE: patches are permuted and a quarter is left out."""

    def tokens(self, image: Tensor) -> Tensor:
        tokens = super().tokens(image)
        kept = torch.randperm(tokens.shape[1] - 1)[:12] + 1
        return torch.cat([tokens[:, :1], tokens[:, kept]], 1)


class NumpyAttention(MatmulAttention):
    """Attention computed outside torch."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        queries, keys, values = (t.detach().cpu().numpy() for t in (q, k, v))
        weights = np.exp(queries @ keys.swapaxes(-2, -1) * q.shape[-1] ** -0.5)
        return torch.from_numpy(weights / weights.sum(-1, keepdims=True) @ values).to(v)


class OpaqueAttention(torch.autograd.Function):
    """A kernel of one's own, differentiable in the values: nothing of it passes through torch functions."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        queries, keys, values = (t.detach().cpu().numpy() for t in (q, k, v))
        scores = np.exp(queries @ keys.swapaxes(-2, -1) * q.shape[-1] ** -0.5)
        ctx.weights = scores / scores.sum(-1, keepdims=True)
        return torch.from_numpy(ctx.weights @ values).to(v)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, Tensor]:
        (gradient,) = gradients
        return None, None, torch.from_numpy(ctx.weights.swapaxes(-2, -1) @ gradient.cpu().numpy()).to(gradient)


class KernelAttention(MatmulAttention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return OpaqueAttention.apply(q, k, v)


def one_block_in_numpy() -> nn.Module:
    model = Plain()
    model.blocks[1] = Block(NumpyAttention)
    return model


def all_blocks_in_a_kernel() -> nn.Module:
    return HomeMade(lambda: Block(KernelAttention), depth=2)


class SoftmaxInside(Plain):
    def forward(self, image: Tensor) -> Tensor:
        return super().forward(image).softmax(-1)


class BatchStatistics(Plain):
    """Features normalised over the batch, as a BatchNorm in training mode does."""

    def through(self, x: Tensor) -> Tensor:
        features = super().through(x)
        return features - 0.5 * features.mean(0, keepdim=True)


class Squeezed(Plain):
    """squeeze() takes the batch axis away when there is one image."""

    def forward(self, image: Tensor) -> Tensor:
        return super().forward(image).squeeze()


class Checkpointed(Plain):
    """torch.utils.checkpoint called in the forward, in either of its two forms."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def through(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


class OnlyFeatures(Plain):
    """A mapping without logits."""

    def forward(self, image: Tensor) -> Any:
        return {"features": self.through(self.tokens(image))}


class Detached(Plain):
    """Features cut from the graph after the second block."""

    def through(self, x: Tensor) -> Tensor:
        x = self.blocks[1](self.blocks[0](x)).detach()
        return self.blocks[2](x)


class IgnoresPatches(Plain):
    """The answer comes from the embedded patches, past all blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.shortcut = nn.Linear(WIDTH, CLASSES)

    def forward(self, image: Tensor) -> Tensor:
        x = self.tokens(image)
        return 0 * self.head(self.norm(self.through(x))[:, 0]) + self.shortcut(x.mean(1))


class IgnoresImage(Plain):
    """The head reads a constant."""

    def tokens(self, image: Tensor) -> Tensor:
        return super().tokens(0 * image)


class Counting(Plain):
    """A buffer that counts the calls, also in eval mode."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, image: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(image)


class OtherWithGradients(Plain):
    """Another answer where gradients are on."""

    def forward(self, image: Tensor) -> Tensor:
        return super().forward(image) * (1.01 if torch.is_grad_enabled() else 1.0)


class RootOfZero(Plain):
    """The root of zero has no finite gradient."""

    def forward(self, image: Tensor) -> Tensor:
        return super().forward(image) + (0 * image.sum((1, 2, 3))).abs().sqrt()[:, None]


class FailsInForward(Plain):
    def forward(self, image: Tensor) -> Tensor:
        raise ZeroDivisionError("the third wheel")


class CancellingBlock(Block):
    """A block that takes away most of what came in."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + (-0.9 * x))


class Cancelling(HomeMade):
    def __init__(self) -> None:
        super().__init__(lambda: CancellingBlock(MatmulAttention), depth=2)


class Artefacts(Plain):
    """One patch token of thirty times the usual length after the first block, as DINOv2 has them without registers."""

    def through(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        x = torch.cat([x[:, :6], 30 * x[:, 6:7], x[:, 7:]], 1)
        return self.blocks[2](self.blocks[1](x))


class UnknownActivation(nn.Module):
    """A nonlinearity that no linear rule knows."""

    def forward(self, x: Tensor) -> Tensor:
        return x.exp().log1p().sin()


def with_unknown_activation() -> nn.Module:
    model = Plain()
    model.blocks[1].mlp[2] = UnknownActivation()
    return model


def healthy() -> nn.Module:
    return uninitialised(Plain)


def uninitialised(build: Callable[[], nn.Module]) -> nn.Module:
    """A seeded module in eval mode, its parameters far from zero and one."""
    return shaken(build(), zlib.crc32(b"broken")).eval()


def wrapped(module: nn.Module, **options: Any) -> cv.Model:
    stated: dict[str, Any] = {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.2, 0.2), "size": 32, "name": "tiny"}
    stated |= {"resize": 32, "interpolation": "bicubic"}
    return cv.wrap(module, **(stated | options))


def changed(build: Callable[[], nn.Module], change: Callable[[Any], object]) -> nn.Module:
    """A seeded module whose weights are then changed in place."""
    module = uninitialised(build)
    with torch.no_grad():
        change(module)
    return module


def not_a_number() -> nn.Module:
    return changed(Plain, lambda module: module.blocks[1].mlp[1].weight[3, 4].fill_(torch.nan))


def zero_head() -> nn.Module:
    def clear(module: Any) -> None:
        module.head.weight.zero_()
        module.head.bias.zero_()

    return changed(Plain, clear)


def equal_rows() -> nn.Module:
    """A head that does not tell classes apart but for a constant."""
    return changed(Plain, lambda module: module.head.weight.copy_(module.head.weight[:1].repeat(CLASSES, 1)))


def saturated() -> nn.Module:
    """A bias so large that one class has probability 1 whatever the image."""
    return changed(Plain, lambda module: module.head.bias[2].fill_(1e4))


def half_overflow() -> nn.Module:
    return changed(Plain, lambda module: module.blocks[1].mlp[3].weight.mul_(5e4)).half()


def quantised() -> nn.Module:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.ao.quantization.quantize_dynamic(uninitialised(Plain), {nn.Linear}, dtype=torch.qint8)


def compiled_in_place() -> nn.Module:
    module = uninitialised(Plain)
    module.blocks[0].compile(backend="eager")
    return module


def on_meta() -> nn.Module:
    module = uninitialised(Plain)
    module.head = nn.Linear(WIDTH, CLASSES, device="meta")
    return module


def inference_weights() -> nn.Module:
    with torch.inference_mode():
        return uninitialised(Plain)


def mean_of_bytes() -> cv.Model:
    model = wrapped(healthy())
    return replace(model, preprocess=replace(model.preprocess, mean=(123.7, 116.3, 103.5)))


BROKEN: dict[str, tuple[Callable[[], cv.Model], str, str]] = {
    # name: (how it is made, the check that must fail, a piece of what it must say); two where both are true
    "dropout": (lambda: wrapped(uninitialised(ActiveDropout)), "determinism", "draws random numbers"),
    "shuffled tokens": (lambda: wrapped(uninitialised(ShuffledTokens)), "determinism", "blocks.0"),
    "NaN weights": (lambda: wrapped(not_a_number()), "finite scores", "blocks.1.mlp.1.weight"),
    "float16 overflow": (lambda: wrapped(half_overflow()), "finite scores", "blocks.1.mlp.3"),
    "numpy attention": (
        lambda: wrapped(uninitialised(one_block_in_numpy)),
        "gradient, attention",
        "No attention was seen in blocks.1,",
    ),
    "own kernels": (
        lambda: wrapped(uninitialised(all_blocks_in_a_kernel)),
        "attention, rules",
        "no AttnLRP rule (OpaqueAttention)",
    ),
    "head of zeros": (lambda: wrapped(zero_head()), "scores", "same score"),
    "ignores the image": (lambda: wrapped(uninitialised(IgnoresImage)), "scores", "exactly the same scores"),
    "equal rows": (lambda: wrapped(equal_rows()), "class sensitivity", "are the same"),
    "softmax inside": (lambda: wrapped(uninitialised(SoftmaxInside)), "activation", "add up to 1"),
    "quantised": (lambda: wrapped(quantised()), "quantisation", "blocks.0.attention.qkv"),
    "batch statistics": (lambda: wrapped(uninitialised(BatchStatistics)), "batch independence", "in the batch"),
    "squeeze": (lambda: wrapped(uninitialised(Squeezed)), "forward", "squeeze()"),
    "checkpoint reentrant": (lambda: wrapped(uninitialised(lambda: Checkpointed(True))), "checkpointing", "blocks.2"),
    "checkpoint": (lambda: wrapped(uninitialised(lambda: Checkpointed(False))), "checkpointing", "ran again"),
    "no logits": (lambda: wrapped(uninitialised(OnlyFeatures)), "forward", "without 'logits'"),
    "raises": (lambda: wrapped(uninitialised(FailsInForward)), "forward", "ZeroDivisionError: the third wheel"),
    "detached": (lambda: wrapped(uninitialised(Detached)), "gradient", "it ends after blocks.1"),
    "root of zero": (lambda: wrapped(uninitialised(RootOfZero)), "gradient", "NaN or infinite"),
    "ignores patches": (lambda: wrapped(uninitialised(IgnoresPatches)), "token gradient", "bypasses the blocks"),
    "saturated": (lambda: wrapped(saturated()), "deletion", "does not change the score"),
    "counter": (lambda: wrapped(uninitialised(Counting)), "side effects", "buffer calls"),
    "other with gradients": (lambda: wrapped(uninitialised(OtherWithGradients)), "trace", "traced forward"),
    "compiled in place": (lambda: wrapped(compiled_in_place()), "compile", "blocks.0"),
    "meta device": (lambda: replace(wrapped(healthy()), module=on_meta()), "device", "head.weight"),
    "inference weights": (lambda: wrapped(inference_weights()), "parameters", "inference_mode"),
    "mean of 0..255": (mean_of_bytes, "preprocessing", "0..255"),
    "wrong layout": (lambda: wrapped(healthy(), layout=cv.Layout((3, 3), 1, "token")), "layout", "3 × 3"),
}
