"""DecompX: the tokens of a block propagated to the scores as a sum, biases distributed on the way.

D[j] is the part of token j, for every tensor on the path; the D of all tokens and a constant C, made of biases, add up
to the tensor itself. At each bias C is distributed to the tokens, by a rule, and is zero again. Memory: N² d per image,
N tokens of N vectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from clairvit.errors import NotApplicable
from clairvit.tracing import ops
from clairvit.tracing.block_decomposition import BlockDecomposition, dependent
from clairvit.tracing.linearised import PathStep, applied, is_join, is_sum, last_uses, linear_path, shifted
from clairvit.tracing.recorders.op_log import OpLog, Step
from clairvit.tracing.recording import Recording

Sharing = Literal["none", "absdot", "abssim", "norm", "equal", "cls"]
_BIASED = ops.CONVOLUTIONS | {ops.BIASED_PRODUCT, ops.BIASED_MATMUL}
_PRODUCTS = ops.MATRIX_PRODUCTS | _BIASED | {ops.PRODUCT}
_ATTENTION = (ops.ATTENTION, *ops.MATRIX_PRODUCTS)
# Operations at which the search for the linear layer of the values ends: all that change values but these few
_PASSED = (None, ops.CONV1D, ops.GROUP_NORM, ops.ADD_IN_PLACE, ops.MULTIPLY_IN_PLACE, ops.DIVIDE)
_PASSED_THROUGH = frozenset({*_PASSED, *ops.DIFFERENCES, *ops.JOINS})


def shares(recording: Recording, index: int, sharing: Sharing) -> Tensor:
    """Return what each token of a layer's input adds to the scores, [N, B, C]; with biases distributed they add up."""
    log = recording[OpLog]
    assert log.scores is not None
    block, _ = log.attention_outputs[index]
    start, first = log.block_inputs[block]
    path = linear_path(log.steps[first:], start, log.scores)
    if not path:
        raise NotApplicable(
            f"Nothing was seen that leads from layer {index} to the scores; expected torch operations all the way."
        )
    if sharing != "none":
        _check_bias_places(path, log.steps[first:], start)
    deferred = _deferred(path, recording, index) if sharing != "none" else set[int]()
    parts = {id(start): _each_token_alone(recording, start)}  # D of each tensor
    constants = {id(start): torch.zeros_like(start)}  # C of each tensor
    last = last_uses(path)
    for number, link in enumerate(path):
        outputs = applied(link, tuple(parts[id(t)] for t in link.carriers), stacked=True)
        shifts = shifted(link, tuple(constants[id(t)] for t in link.carriers))
        if sharing != "none" and ((_brings_bias(link) and id(link) not in deferred) or link is path[-1]):
            outputs = tuple(_distributed(D, C, sharing) for D, C in zip(outputs, shifts, strict=True))
            shifts = tuple(torch.zeros_like(C) for C in shifts)
        for t, D, C in zip(link.step.outputs, outputs, shifts, strict=True):
            parts[id(t)], constants[id(t)] = D, C
        for unused in [key for key in parts if last.get(key, number) <= number and key != id(log.scores)]:
            del parts[unused], constants[unused]
    _check_sum(parts[id(log.scores)], constants[id(log.scores)], log.scores)
    return parts[id(log.scores)]


def _check_bias_places(path: Sequence[PathStep], steps: Sequence[Step], start: Tensor) -> None:
    """Raise NotApplicable where it is not known at which operation of the library form a bias would be added."""
    activations = dependent(steps, start)
    maker = {id(t): link for link in path for t in link.step.outputs if all(t is not c for c in link.carriers)}

    def constants(step: Step) -> list[Tensor]:
        return [t for t in step.inputs if id(t) not in activations]

    def is_product(step: Step) -> bool:
        """Return whether it is a linear layer without its bias: a product with weights, by whatever name."""
        if step.kind == ops.LINEAR:
            return ops.linear_arguments(step.args, step.kwargs).get("bias") is None
        known = step.kind in _PRODUCTS or step.function in (torch.tensordot, torch.sum, Tensor.sum)
        factors = step if step.kind is not None or step.function is torch.tensordot else source_of(step)
        return known and factors is not None and bool(constants(factors))

    def source_of(step: Step) -> Step | None:
        """Return the step behind views that computes what a step of the path reads."""
        link = maker.get(id(by_step[id(step)].carriers[0]))
        while link is not None and link.step.function in ops.REARRANGEMENTS:
            link = maker.get(id(link.carriers[0]))
        return None if link is None else link.step

    by_step = {id(link.step): link for link in path}
    for step in (link.step for link in path):
        is_norm = step.kind == ops.NORM and step.function is ops.written_norm
        unknown_norm = (step.holds_spread and not step.is_part) or (is_norm and step.args[4] not in ((), (-1,)))
        source = source_of(step) if is_sum(step) and _is_vector(constants(step)) else None
        biased = step.kind in _BIASED and len(constants(step)) > 1
        if step.kind in ops.CONVOLUTIONS:  # one that joins positions is no linear layer in other words
            biased &= ops.is_pointwise(ops.conv_arguments(step.args, step.kwargs))
        if unknown_norm or biased or (source is not None and is_product(source)):
            what = "a norm" if unknown_norm else "a linear layer"
            name = getattr(step.function if source is None else source.function, "__name__", "")
            raise NotApplicable(
                f"The model writes out {what} ('{name}') in a way that hides where its bias belongs, and bias=… "
                "distributes biases one by one; expected torch.nn.Linear and torch.nn.LayerNorm. Use bias=none."
            )


def _is_vector(constants: Sequence[Tensor]) -> bool:
    return len(constants) == 1 and constants[0].ndim == 1


def _each_token_alone(recording: Recording, start: Tensor) -> Tensor:
    """Return [N, as the block's input]: the tokens one by one, the others zero."""
    x = recording.as_tokens(start)  # [B, N, d]
    alone = torch.eye(x.shape[1], dtype=x.dtype, device=x.device)[:, None, :, None] * x  # [N, B, N, d]
    return torch.stack([recording.from_tokens(tokens, like=start) for tokens in alone])


def _brings_bias(link: PathStep) -> bool:
    return link.step.kind in (ops.LINEAR, ops.NORM) or is_sum(link.step) or is_join(link.step)


def _deferred(path: Sequence[PathStep], recording: Recording, first: int) -> set[int]:
    """Return the links whose bias waits: that of values for their attention, that of attention for the residual sum.

    So W_o b_v + b_o is distributed over the vectors of the residual stream, as DecompX does it.
    """
    # A step may return its input (contiguous, to): such a tensor existed before.
    maker = {id(t): link for link in path for t in link.step.outputs if all(t is not c for c in link.carriers)}
    deferred = set[int]()
    for link in path:
        if link.step.kind in _ATTENTION:
            source: PathStep | None = link
            while source is not None and (source is link or source.step.kind in _PASSED_THROUGH):
                source = maker.get(id(source.carriers[0]))
            if source is not None and source.step.kind == ops.LINEAR:
                deferred.add(id(source))
    links = {id(link.step): link for link in path}
    for index in range(first, len(recording.calls)):
        for inner in BlockDecomposition.of(recording, index).to_sum[:-1]:
            if id(inner.step) in links and inner.step.kind != ops.NORM:
                deferred.add(id(links[id(inner.step)]))
    return deferred


def _distributed(D: Tensor, C: Tensor, sharing: Sharing) -> Tensor:
    """Return D [N, …, d] with the constant C […, d] distributed over the N of them."""
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


def _check_sum(D: Tensor, C: Tensor, expected: Tensor) -> None:
    """Raise NotApplicable if parts and constant do not add up: some nonlinear operation has no rule."""
    bound = torch.finfo(expected.dtype).eps ** 0.5 * (D.abs().sum(0) + C.abs()).max()
    error = (D.sum(0) + C - expected).abs().max()
    if not error <= bound:  # NaN included
        raise NotApplicable(
            f"What the tokens add to the scores and the scores themselves differ by {float(error):.3g}; expected the "
            "model to be linear once attention, norms and activations are held fixed."
        )
