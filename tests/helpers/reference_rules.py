"""DecompX and AttnLRP the long way: D[i, j, :] carried forward (METHODS 5.4), relevance sent back (METHODS 4.3)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from helpers.reference_vit import (
    ACTIVATIONS,
    Attention,
    AttentionRun,
    Linear,
    Mlp,
    MlpRun,
    Norm,
    Pool,
    PoolRun,
    Reader,
    Run,
    ViT,
)
from helpers.rounding import assert_same

# Forward decomposition. D is [B, tokens i, sources s, d]; the last source collects every bias met on the way, so the
# sources always add up to the true activation.


def decomposed(vit: ViT, run: Run, start: int, classes: list[int]) -> Tensor:
    """[B, N + 1]: what each token of x^start, and all biases after it, give to the target's logit."""
    x = run.x[start]
    D = torch.diag_embed(x.transpose(1, 2)).permute(0, 2, 3, 1)  # D_ij = delta_ij x_j
    D = torch.cat([D, torch.zeros_like(D[:, :, :1])], 2)
    for (attention, mlp), (first, second) in list(zip(vit.blocks, run.blocks, strict=True))[start:]:
        D = _through_attention(attention, first, D)
        D = _through_mlp(mlp, second, D)
        _check_sources(D, second.end)
    D = _through_norm(vit.norm, run.x[-1], D)
    if vit.pool is not None:
        D = _through_pool(vit.pool, run.pool, D)
    parts = [_through_reader(reader, z, D) for reader, z in zip(vit.readers, run.pooled, strict=True)]
    logits = sum(parts)  # [B, s, classes]
    return torch.stack([logits[b, :, c] for b, c in enumerate(classes)])


def _check_sources(D: Tensor, true: Tensor) -> None:
    assert_same(D.sum(2), true)


def _with_bias(D: Tensor, bias: Tensor) -> Tensor:
    return torch.cat([D[..., :-1, :], D[..., -1:, :] + bias], -2)


def _through_linear(part: Linear, D: Tensor) -> Tensor:
    return _with_bias(D @ part.W.T, part.b)


def _through_norm(part: Norm | None, x: Tensor, D: Tensor) -> Tensor:
    """gamma * (D - mean_d D) / sigma_i, sigma of the true token."""
    if part is None:
        return D
    return _with_bias(part.gamma * part.centre(D) / part.sigma(x).unsqueeze(-2), part.beta)


def _through_attention(part: Attention, run: AttentionRun, D: Tensor) -> Tensor:
    h = _through_norm(part.norm, run.x, D)
    values = _through_linear(part.v, h)
    v = values.unflatten(-1, (-1, part.size))  # [B, j, s, value heads, dh]
    v = v.repeat_interleave(part.heads // v.shape[3], 3)
    O = torch.einsum("bhij,bjshd->bishd", run.A, v).flatten(3)  # noqa: E741
    inner = _through_norm(part.sub_norm, run.joined, O)
    return D + part.g1 * _through_linear(part.out, inner)


def _through_mlp(part: Mlp, run: MlpRun, D: Tensor) -> Tensor:
    """W2 (r * W1 D) with r = act(z)/z, or the whole gate, frozen at its true value."""
    h = _through_norm(part.norm, run.x, D)
    slope = ACTIVATIONS[part.act](run.z)
    slope = slope if part.gate else slope / run.z
    a = slope.unsqueeze(-2) * _through_linear(part.up, h)
    inner = _through_norm(part.sub_norm, run.a, a)
    return D + part.g2 * _through_linear(part.down, inner)


def _through_pool(pool: Pool, run: PoolRun, D: Tensor) -> Tensor:
    values = _through_linear(pool.v, D[:, pool.first :]).unflatten(-1, (pool.heads, -1))
    O = torch.einsum("bhij,bjshd->bishd", run.A, values).flatten(3)  # noqa: E741
    return _through_mlp(pool.mlp, run.mlp, _through_linear(pool.out, O))


def _through_reader(reader: Reader, z: Tensor, D: Tensor) -> Tensor:
    pooled = torch.einsum("n,bnsd->bsd", reader.rows, D)
    return reader.share * _through_linear(reader.classifier, _through_norm(reader.norm, z, pooled))


# AttnLRP, eps -> 0: every rule divides by what it distributes.


def attnlrp(vit: ViT, run: Run, classes: list[int], gamma: float = 0.0) -> list[Tensor]:
    """Relevance of the tokens x^0 … x^L, [B, N, d] each, from the target's logit down; ResLRP with `gamma`."""
    one_hot = torch.nn.functional.one_hot(torch.tensor(classes), run.logits.shape[-1]).to(run.logits)
    R = _back_through_head(vit, run, one_hot * run.logits, gamma)
    relevances = [R]
    for (attention, mlp), (first, second) in reversed(list(zip(vit.blocks, run.blocks, strict=True))):
        R = _back_through_mlp(mlp, second, R, gamma)
        R = _back_through_attention(attention, first, R, gamma)
        relevances.append(R)
    return relevances[::-1]


def _residual_rule(x: Tensor, branch: Tensor, R: Tensor, gamma: float) -> tuple[Tensor, Tensor]:
    """Entry by entry in proportion; what has the sign of the sum counts 1 + gamma times."""
    positive = x + branch > 0
    weighted = [z + gamma * torch.where(positive, z.clamp(min=0), z.clamp(max=0)) for z in (x, branch)]
    total = weighted[0] + weighted[1]
    return weighted[0] / total * R, weighted[1] / total * R


def amplification(vit: ViT, run: Run, classes: list[int], gamma: float) -> Tensor:
    """A = Σ(|R_in| + |R_up|) / Σ|R_out| over the two residual sums of each block, [L, B]."""
    rows = []
    for index, R in enumerate(attnlrp(vit, run, classes, gamma)[1:]):
        (_, mlp), (first, second) = vit.blocks[index], run.blocks[index]
        over, under = 0.0, 0.0
        for part, R_out in ((second, R), (first, _back_through_mlp(mlp, second, R, gamma))):
            R_in, R_up = _residual_rule(part.x, part.end - part.x, R_out, gamma)
            over, under = over + (R_in.abs() + R_up.abs()).sum((1, 2)), under + R_out.abs().sum((1, 2))
        rows.append(over / under)
    return torch.stack(rows)


def _linear_rule(part: Linear, x: Tensor, R: Tensor) -> Tensor:
    """R_j = sum_i x_j w_ij R_i / z_i, z with its bias, which absorbs its share."""
    return x * ((R / part(x)) @ part.W)


def _norm_rule(part: Norm | None, x: Tensor, R: Tensor) -> Tensor:
    """Identity for 1/std; the affine part and the centring are linear layers."""
    if part is None:
        return R
    c = part.centre(x)
    scaled = part.gamma * c / part.sigma(x)
    Rc = R * scaled / (scaled + part.beta)
    if not part.centred:
        return Rc
    return x * part.centre(Rc / c)  # the centring matrix I - 1/d is symmetric


def _matmul_rule(a: Tensor, b: Tensor, Z: Tensor, R: Tensor) -> tuple[Tensor, Tensor]:
    """Z = a b: each factor gets R / (2 Z)."""
    share = R / (2 * Z)
    return a * (share @ b.transpose(-2, -1)), b * (a.transpose(-2, -1) @ share)


def _softmax_rule(S: Tensor, A: Tensor, R: Tensor) -> Tensor:
    return S * (R - A * R.sum(-1, keepdim=True))


def _turn_rule(part: Attention, x: Tensor, R: Tensor) -> Tensor:
    """RoPE is a linear layer without bias."""
    if part.turn is None:
        return R
    return x * torch.autograd.functional.vjp(part.turn, x, R / part.turn(x))[1]


def _ungrouped(part: Attention, linear: Linear, R: Tensor) -> Tensor:
    """[B, H, N, dh] -> [B, N, heads·dh]; copies of a shared head add up."""
    heads = linear.W.shape[0] // part.size
    return R.unflatten(1, (heads, -1)).sum(2).transpose(1, 2).flatten(2)


def _back_through_attention(part: Attention, run: AttentionRun, R: Tensor, gamma: float) -> Tensor:
    Rx, Rf = _residual_rule(run.x, run.end - run.x, R, gamma)
    Rf = _norm_rule(part.sub_norm, run.joined, _linear_rule(part.out, run.inner, Rf))
    RO = part.split(Rf)
    RA, Rv = _matmul_rule(run.A, run.v, run.O, RO)
    RS = _softmax_rule(run.S, run.A, RA) * run.products / run.S  # an added bias absorbs its share
    keys = run.k.transpose(-2, -1) / math.sqrt(part.size)
    Rq, Rk = _matmul_rule(run.q, keys, run.products, RS)
    branches = [(part.v, Rv)]
    for relevance, linear, norm, normed, raw in (
        (Rq, part.q, part.q_norm, run.normed[0], run.raw[0]),
        (Rk.transpose(-2, -1), part.k, part.k_norm, run.normed[1], run.raw[1]),
    ):
        branches.append((linear, _norm_rule(norm, raw, _turn_rule(part, normed, relevance))))
    Rh = sum(_linear_rule(linear, run.h, _ungrouped(part, linear, branch)) for linear, branch in branches)
    return Rx + _norm_rule(part.norm, run.x, Rh)


def _back_through_mlp(part: Mlp, run: MlpRun, R: Tensor, gamma: float) -> Tensor:
    Rx, Rf = _residual_rule(run.x, run.end - run.x, R, gamma)
    Ra = _norm_rule(part.sub_norm, run.a, _linear_rule(part.down, run.inner, Rf))
    if part.gate is None:
        Rh = _linear_rule(part.up, run.h, Ra)  # the activation passes relevance on as it is
    else:
        Rh = _linear_rule(part.up, run.h, Ra / 2) + _linear_rule(part.gate, run.h, Ra / 2)
    return Rx + _norm_rule(part.norm, run.x, Rh)


def _back_through_pool(pool: Pool, run: PoolRun, R: Tensor, gamma: float) -> Tensor:
    RO = pool.split(_linear_rule(pool.out, run.joined, _back_through_mlp(pool.mlp, run.mlp, R, gamma)))
    RA, Rv = _matmul_rule(run.A, run.v, run.O, RO)
    keys = run.k.transpose(-2, -1) / math.sqrt(run.k.shape[-1])
    _, Rk = _matmul_rule(pool.latent, keys, run.S, _softmax_rule(run.S, run.A, RA))  # the latent keeps its half
    branches = ((pool.v, Rv), (pool.k, Rk.transpose(-2, -1)))
    R = sum(_linear_rule(linear, run.tokens, branch.transpose(1, 2).flatten(2)) for linear, branch in branches)
    return torch.nn.functional.pad(R, (0, 0, pool.first, 0))


def _back_through_head(vit: ViT, run: Run, R: Tensor, gamma: float) -> Tensor:
    """R at the logits [B, C] -> R at the tokens x^L."""
    source = run.normed if run.pool is None else run.pool.mlp.end
    relevance = torch.zeros_like(source)
    for reader, z in zip(vit.readers, run.pooled, strict=True):
        h = reader.norm(z) if reader.norm else z
        class_logits = reader.share * reader.classifier(h)
        Rz = _norm_rule(reader.norm, z, _linear_rule(reader.classifier, h, R * class_logits / run.logits))
        relevance = relevance + reader.rows[:, None] * source * (Rz / z).unsqueeze(1)
    if vit.pool is not None:
        relevance = _back_through_pool(vit.pool, run.pool, relevance, gamma)
    return _norm_rule(vit.norm, run.x[-1], relevance)
