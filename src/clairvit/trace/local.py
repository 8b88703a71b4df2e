"""Local gradients: what one block alone does for the score, with the head reading that block's output (LeGrad).

For layer l the model's own head is run on the pooled output x^{l+1}, and the gradient of that score goes back through
block l only, as one vector-Jacobian product on the graph that the forward has left.
"""

from __future__ import annotations

import torch
from torch import Tensor

from clairvit.errors import NotApplicable, UnknownName, did_you_mean
from clairvit.trace.capture import Capture
from clairvit.trace.trace import Trace

POOLS = ("mean", "model")


def cotangents(trace: Trace, pool: str = "mean") -> list[Tensor]:
    """d s^l / d x^{l+1} for each layer, [B, N, d]: the taped head, run on every layer's output."""
    if pool not in POOLS:
        raise UnknownName(f"There is no pool '{pool}'; expected 'mean' or 'model'.{did_you_mean(pool, POOLS)}")
    outputs = block_outputs(trace)
    if pool == "model":
        return [_head_gradient(trace, out.detach()) for out in outputs]
    count = outputs[0].shape[1]
    pooled = torch.stack([out.detach().mean(1) for out in outputs])  # [L, B, d]
    gradient = _pooled_gradients(trace, pooled)  # [L, B, d]
    return list((gradient / count)[:, :, None].expand(-1, -1, count, -1))  # every token has the same share


def through_block(trace: Trace, index: int, cotangent: Tensor) -> Tensor:
    """d s^l / d O^l through block l alone, shaped as the model's attention output."""
    recording = trace.recording
    if recording.switch is not None:
        recording.switch.table = {}
    out = block_outputs(trace)[index]
    return torch.autograd.grad(out, recording.calls[index].out, cotangent, retain_graph=True)[0]


def block_outputs(trace: Trace) -> list[Tensor]:
    """x^1 … x^L in the graph."""
    recording = trace.recording
    outputs = [*recording.inputs[1:], recording.end]
    if any(out is None or out.shape != outputs[-1].shape for out in outputs):  # type: ignore[union-attr]
        raise NotApplicable(
            "The model has no single stream of tokens from its first block to its head (windowed stages, or blocks that are "
            "no modules), which this method needs. Use a gradient method: ixg, saliency or gradcam."
        )
    return [out for out in outputs if out is not None]


def _pooled_gradients(trace: Trace, pooled: Tensor) -> Tensor:
    """d s / d z for a pooled vector z a layer and image, [L, B, d]: the head reads a sequence that is z at every place."""
    layers, batch, width = pooled.shape
    few = trace.layout.prefix + 1  # enough for any head: CLS and registers, and one patch
    try:
        return _tokens_gradient(trace, pooled.reshape(layers * batch, width), few, layers).reshape(pooled.shape)
    except RuntimeError:
        # A head that has the batch or the token count written into it: one layer at a time, all tokens.
        return torch.stack([_tokens_gradient(trace, z, trace.layout.tokens, 1) for z in pooled])


def _tokens_gradient(trace: Trace, pooled: Tensor, count: int, layers: int) -> Tensor:
    with torch.enable_grad():
        z = pooled.detach().requires_grad_(True)
        score = _scores(trace, z[:, None].expand(-1, count, -1), layers)
        return torch.autograd.grad(score, z)[0]


def _head_gradient(trace: Trace, tokens: Tensor) -> Tensor:
    with torch.enable_grad():
        tokens = tokens.requires_grad_(True)
        return torch.autograd.grad(_scores(trace, tokens, 1), tokens)[0]


def _scores(trace: Trace, tokens: Tensor, layers: int) -> Tensor:
    """The sum of the target's scores over layers and images; tokens [layers·B, n, d]."""
    recording = trace.recording
    assert recording.tape is not None
    assert trace.target is not None
    logits = recording.tape.replay(tokens, recording.logits)
    return torch.stack([trace.target(part).sum() for part in logits.chunk(layers)]).sum()


def pool_gradients(trace: Trace) -> list[Tensor]:
    """For a model with an attention pool, each layer's d s^l / d A_pool, [B, H, queries, keys]: the pool reads x^{l+1}."""
    found = []
    for out in block_outputs(trace):
        capture = Capture(len(trace.pixels))
        with torch.enable_grad(), capture:
            score = _scores(trace, out.detach().requires_grad_(True), 1)
        last = capture.calls[-1]
        (gradient,) = torch.autograd.grad(score, last.out)
        found.append(last.G(last.heads(gradient)))
    return found
