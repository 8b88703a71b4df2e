"""Per-block gradients: what one block alone adds to the score, with the head reading that block's output (LeGrad).

For layer l the model's own head is run on the pooled output x^{l+1}, and the gradient of that score goes back through
block l only, as one vector-Jacobian product on the graph of the forward. Needs `HeadReplay`; `LastLinear` makes it
cheaper.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from clairvit.errors import NotApplicable, UnknownName, did_you_mean
from clairvit.numerics import equal_along, index_tensor
from clairvit.tracing.attention_call import tile_bytes
from clairvit.tracing.capture import Capture
from clairvit.tracing.module_state import translate_autograd_errors
from clairvit.tracing.recorders.head_replay import HeadReplay, LastLinear, LinearEdges
from clairvit.tracing.rules import PLAIN
from clairvit.tracing.trace import Trace

POOLS = ("mean", "model")


def cotangents(trace: Trace, pool: str = "mean") -> Callable[[int], Tensor]:
    """Return the function layer l -> d s^l / d x^{l+1}, [B, N, d]: the model's head, run on that layer's output.

    With pool "mean" the gradients of all layers are computed here, [L, B, d]; with "model" each is [B, N, d], computed
    when it is asked for and not kept.
    """
    if pool not in POOLS:
        raise UnknownName(f"There is no pool '{pool}'; expected 'mean' or 'model'.{did_you_mean(pool, POOLS)}")
    if pool == "model":
        return lambda index: _head_gradient(trace, block_outputs(trace)[index].detach())
    outputs = block_outputs(trace)
    count = outputs[0].shape[1]
    pooled = torch.stack([out.detach().mean(1) for out in outputs])  # [L, B, d]
    shares = _pooled_gradients(trace, pooled) / count  # every token has the same share
    return lambda index: shares[index][:, None].expand(-1, count, -1)


def through_block(trace: Trace, index: int, cotangent: Tensor) -> tuple[Tensor, ...]:
    """Return d s^l / d O^l through block l alone, shaped as the model's attention outputs."""
    recording = trace.recording
    if recording.switch is not None:
        recording.switch.table = PLAIN
    out, attention_outputs = block_outputs(trace)[index], recording.calls[index].outputs
    linear = recording[LastLinear].edges(index) if LastLinear in recording.recorders else None
    split = _split(out, linear, cotangent)
    outputs, cotangents = split if split is not None else ([out], [cotangent])
    with translate_autograd_errors():
        return torch.autograd.grad(outputs, attention_outputs, cotangents, retain_graph=True)


def _split(
    out: Tensor, linear: LinearEdges | None, cotangent: Tensor
) -> tuple[list[GradientEdge], list[Tensor]] | None:
    """Return edges and cotangents from which a backward costs less, where every token has the same cotangent.

    The block's last linear layer need then pass only one of them back. x^{l+1} = x_mid + f(y), y = W h: the backward
    starts at x_mid and at h, and W (a third of the block) is multiplied by one row instead of N.
    None if the block is not built so: the ordinary backward gives the same, only slower.
    """
    if linear is None or cotangent.stride(1) != 0 or out.grad_fn is None:
        return None
    residual = _other_summand(out.grad_fn, linear.output.node)
    if residual is None:
        return None
    (at_linear,) = torch.autograd.grad(out, linear.output, cotangent, retain_graph=True)
    if at_linear.ndim != 3 or not equal_along(at_linear, dim=1):
        return None
    at_hidden = at_linear[:, :1] @ linear.weight
    return [residual, linear.input], [cotangent, at_hidden.expand(-1, cotangent.shape[1], -1)]


def _other_summand(node: Node, branch: Node) -> GradientEdge | None:
    """Return the other summand if `node` is a plain sum and `branch` alone feeds one (through scales, dropout)."""
    edges = node.next_functions
    if node.name() != "AddBackward0" or len(edges) != 2 or getattr(node, "_saved_alpha", 1) != 1:
        return None
    for (summand, _), (other, number) in (edges, edges[::-1]):
        for _ in range(6):  # LayerScale, drop path, dropout: never more
            if summand is branch and other is not None:
                return GradientEdge(other, number)
            before = [edge[0] for edge in summand.next_functions if edge[0] is not None] if summand is not None else []
            if len(before) != 1:
                break
            summand = before[0]
    return None


def block_outputs(trace: Trace) -> list[Tensor]:
    """Return x^1 … x^L in the graph, [B, N, d] each."""
    recording = trace.recording
    outputs = [*recording.inputs[1:], recording.end]
    for i in reversed(range(len(outputs) - 1)):
        # Parallel attention: both halves read the same input.
        if outputs[i] is not None and outputs[i] is recording.inputs[i]:
            outputs[i] = outputs[i + 1]
    if any(out is None or out.shape != outputs[-1].shape for out in outputs):  # type: ignore[union-attr]
        raise NotApplicable(
            "The model has no single stream of tokens from its first block to its head (windowed stages, or blocks "
            "that are no modules), which this method needs.",
            alternative="a gradient method",
        )
    with torch.enable_grad():  # a transposed stream must stay in the graph
        return [recording.as_tokens(out) for out in outputs if out is not None]


def _pooled_gradients(trace: Trace, pooled: Tensor) -> Tensor:
    """Return d s / d z for one pooled vector z per layer and image, [L, B, d]: the head reads z at every place."""
    at_once = _layers_at_once(trace, pooled)
    try:
        return torch.cat([_tokens_gradient(trace, part) for part in torch.split(pooled, at_once)])
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        # A head that has the batch size written into it (a class token expanded to it, say): one layer at a time.
        return torch.cat([_tokens_gradient(trace, part) for part in torch.split(pooled, 1)])


def _layers_at_once(trace: Trace, pooled: Tensor) -> int:
    """Return on how many layers' tokens [B, N, d] the head is run at once: two, or as many as fit into a small tile.

    The head's norm and its backward hold three to four tensors [layers·B, N, d] next to the graph of the forward. For
    two layers that is no more than a backward through an MLP holds there: the gradients at 4 d hidden channels, twice.
    """
    limit = tile_bytes(trace.recording.calls[-1], len(pooled), sums_only=True)
    return max(2, limit // (trace.layout.tokens * pooled[0].nbytes))


def _tokens_gradient(trace: Trace, pooled: Tensor) -> Tensor:
    """Return d s / d z for some layers' z, [layers, B, d], by one run of the head on layers·B·N tokens."""
    with torch.enable_grad():
        z = pooled.detach().requires_grad_(True)
        tokens = z.flatten(0, 1)[:, None].expand(-1, trace.layout.tokens, -1)  # [layers·B, N, d]
        return torch.autograd.grad(_scores(trace, tokens, len(z)), z)[0]


def _head_gradient(trace: Trace, tokens: Tensor) -> Tensor:
    with torch.enable_grad():
        tokens = tokens.requires_grad_(True)
        return torch.autograd.grad(_scores(trace, tokens, 1), tokens)[0]


def _scores(trace: Trace, tokens: Tensor, layers: int) -> Tensor:
    """Return the sum of the target's scores over layers and images; tokens [layers·B, n, d]."""
    recording = trace.recording
    assert trace.target is not None
    logits = recording[HeadReplay].replay(recording.from_tokens(tokens), recording.logits)
    if len(logits) != len(tokens):  # gather with an index of B rows takes the first B of them without an error
        raise RuntimeError(f"The head returned {len(logits)} rows of scores for {len(tokens)} rows of tokens.")
    return torch.stack([trace.target(part).sum() for part in logits.chunk(layers)]).sum()


def pool_gradients(trace: Trace) -> list[Tensor]:
    """Return each layer's d s^l / d A_pool, [B, H, rows read, keys], where the model's attention pool reads x^{l+1}."""
    gradients = []
    read = index_tensor(tuple(index for index, _ in trace.layout.read), trace.pixels.device)
    for out in block_outputs(trace):
        capture = Capture(len(trace.pixels), heads_apart=trace.recording.structure.heads_apart_of_pools)
        with torch.enable_grad(), capture:
            score = _scores(trace, out.detach().requires_grad_(True), 1)
        last = capture.calls[-1]
        gradients.append(last.G(last.heads(torch.autograd.grad(score, last.outputs)), read))
    return gradients
