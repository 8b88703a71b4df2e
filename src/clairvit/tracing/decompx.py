"""Shares of a score: the tokens of a block carried forwards to the scores as a sum, biases shared out on the way.

D[j] is what has become of token j, for every tensor on the way; the D of all tokens and a constant C, made of biases,
add up to the tensor itself. At each bias C is given to the tokens, by a rule, and is zero again (DecompX). Memory: N² d
for an image, N tokens of N vectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from clairvit.errors import NotApplicable
from clairvit.tracing.block_decomposition import BlockDecomposition
from clairvit.tracing.capture import role
from clairvit.tracing.linearised import PathStep, applied, is_join, is_sum, last_uses, linear_path, shifted
from clairvit.tracing.recording import Recording

Sharing = Literal["none", "absdot", "abssim", "norm", "equal", "cls"]
_ATTENTION = ("fused", "product", "einsum")


def shares(recording: Recording, index: int, sharing: Sharing) -> Tensor:
    """What each token of a layer's input adds to the scores, [N, B, C]; with all biases shared out they add up."""
    film = recording.film
    assert film is not None, "recorded with inside=True"
    assert film.end is not None
    block, _ = film.attended[index]
    start, first = film.starts[block]
    links = linear_path(film.steps[first:], start, film.end)
    if not links:
        raise NotApplicable(
            f"Nothing was seen that leads from layer {index} to the scores; expected torch operations all the way. "
            "Use bias=none."
        )
    later = _deferred(links, recording, index) if sharing != "none" else set[int]()
    held = {id(start): _each_token_alone(recording, start)}
    constants = {id(start): torch.zeros_like(start)}
    last = last_uses(links)
    for number, link in enumerate(links):
        made = applied(link, tuple(held[id(t)] for t in link.carriers), stacked=True)
        rest = shifted(link, tuple(constants[id(t)] for t in link.carriers))
        if sharing != "none" and ((_brings_bias(link) and id(link) not in later) or link is links[-1]):
            made = tuple(_settled(D, C, sharing) for D, C in zip(made, rest, strict=True))
            rest = tuple(torch.zeros_like(C) for C in rest)
        for t, D, C in zip(link.step.made, made, rest, strict=True):
            held[id(t)], constants[id(t)] = D, C
        for gone in [key for key in held if last.get(key, number) <= number and key != id(film.end)]:
            del held[gone], constants[gone]
    found = held[id(film.end)]
    _check_sum(found, constants[id(film.end)], film.end)
    return found


def _each_token_alone(recording: Recording, start: Tensor) -> Tensor:
    """[N, as the block's input]: the tokens one by one, the others zero."""
    x = recording.as_tokens(start)  # [B, N, d]
    one = torch.eye(x.shape[1], dtype=x.dtype, device=x.device)[:, None, :, None] * x  # [N, B, N, d]
    return torch.stack([recording.from_tokens(tokens, like=start) for tokens in one])


def _brings_bias(link: PathStep) -> bool:
    return role(link.step.function) in ("linear", "norm") or is_sum(link.step) or is_join(link.step)


def _deferred(links: Sequence[PathStep], recording: Recording, first: int) -> set[int]:
    """Links whose bias waits: that of values for their attention, that of attention for the sum with the residual.

    So W_o b_v + b_o is shared by the vectors of the residual stream, as DecompX does it.
    """
    # A step may hand back what it was given (contiguous, to): such a tensor was made before.
    maker = {id(t): link for link in links for t in link.step.made if all(t is not own for own in link.carriers)}
    found = set[int]()
    for link in links:
        if role(link.step.function) in _ATTENTION:
            source: PathStep | None = link
            while source is not None and (source is link or role(source.step.function) is None):
                source = maker.get(id(source.carriers[0]))
            if source is not None and role(source.step.function) == "linear":
                found.add(id(source))
    steps = {id(link.step): link for link in links}
    for index in range(first, len(recording.calls)):
        for inner in BlockDecomposition.of(recording, index).to_sum[:-1]:
            if id(inner.step) in steps and role(inner.step.function) != "norm":
                found.add(id(steps[id(inner.step)]))
    return found


def _settled(D: Tensor, C: Tensor, sharing: Sharing) -> Tensor:
    """D [N, …, d] with the constant C […, d] given to the N of them."""
    if not C.any():
        return D
    weight = _weights(D, C, sharing)  # [N, …, 1]
    total = weight.sum(0, keepdim=True)
    even = torch.full_like(weight, 1 / len(weight))
    return D + torch.where(total > 0, weight / torch.where(total > 0, total, 1), even) * C


def _weights(D: Tensor, C: Tensor, sharing: Sharing) -> Tensor:
    length: Tensor = torch.linalg.vector_norm(D, dim=-1, keepdim=True)
    if sharing == "norm":
        return length
    if sharing == "equal":
        return (length != 0).to(D.dtype)  # among those that are there at all, as in the authors' code
    if sharing == "cls":
        weight = torch.zeros_like(length)
        weight[0] = 1
        return weight
    dot = (D * C).sum(-1, keepdim=True).abs()
    return dot if sharing == "absdot" else dot / torch.where(length == 0, 1, length)  # |cos|, but for C's length


def _check_sum(D: Tensor, C: Tensor, true: Tensor) -> None:
    """Something nonlinear without a rule of its own would show here."""
    room = torch.finfo(true.dtype).eps ** 0.5 * (D.abs().sum(0) + C.abs()).max()
    off = (D.sum(0) + C - true).abs().max()
    if not off <= room:
        raise NotApplicable(
            f"What the tokens add to the scores and the scores themselves differ by {float(off):.3g}; expected the "
            "model to be linear once attention, norms and activations are held fixed. Use bias=none."
        )
