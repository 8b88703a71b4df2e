"""Forward decomposition: a block's output as a sum of vectors T_ij, what token j adds to token i; maps are their norms.

T_ij = sum_h A_ij^h f^h(x_j) + delta_ij x_i, f^h(x_j) = W_o^h W_v^h LN(x_j) without biases (LN with its true spread).
The bias of the values can be kept (`value_bias=true`): the authors' own codes of AttIN, GlobEnc and ALTI do so.
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from torch import Tensor
from torch.linalg import vector_norm

from clairvit.cuda import kernels
from clairvit.cuda.kernels import products_and_norms
from clairvit.errors import BadInput, NotApplicable
from clairvit.methods.aggregation import Product, Single
from clairvit.methods.alternatives import advice
from clairvit.methods.gradient import TokenLevel, input_x_gradient, token_gradients
from clairvit.methods.layer_view import LayerView, mean_of_heads
from clairvit.methods.registry import Caveats, OptionOverrides, Requires, method
from clairvit.numerics import widened
from clairvit.option_types import Doc
from clairvit.tracing.block_decomposition import Vectors
from clairvit.tracing.decompx import Sharing, shares
from clairvit.tracing.recorders.op_log import OpLog
from clairvit.tracing.recorders.residual import PostAttentionResidual
from clairvit.tracing.rules import LINEAR

OFFICIAL = {"official": {"value_bias": True}}
Ln = Annotated[
    Literal["none", "next", "attention", "block"],
    Doc("which norms are applied: none, the one that reads the sum, or those in a post-norm block's stream"),
]
RESIDUAL_INSIDE = "the residual is one of the vectors whose norms it takes, so that no identity is added"
EPS = 1e-8  # the least norm in a cosine, as in torch.cosine_similarity
NUMBERS_AT_ONCE = 2**20  # of T, 4 MiB in float32: what a cache can hold
NUMBERS_AT_ONCE_ON_GPU = 2**26  # there a piece should be worth starting a kernel for


@method(
    "attin",
    family="decomposition",
    paper="Kobayashi et al., EMNLP 2020",
    output="matrix",
    aggregation=Single(-1),
    requires=Requires(passes="forward", recorders=(OpLog,), structure=("residual",)),
    class_specific=False,
    presets=OFFICIAL,
)
def attended_norms(
    layer: LayerView,
    value_bias: Annotated[
        bool, Doc("keep the bias of the values, and the shift of the norm before the attention")
    ] = False,
    heads: Annotated[
        Literal["sum", "mean"], Doc("the norm of the heads' sum, or the mean of the heads' norms")
    ] = "sum",
    ln: Ln = "none",
) -> Tensor:
    """||sum_h A_ij f(x_j)||: the norm of the vector that a token gets from each other token, not the attention to it.

    The paper looks at one layer at a time and multiplies none, so alone this is the last layer, as raw-attention is;
    attin+plus and +skipplus are SkipPLUS's forms, attin+rollout adds the identity. `heads="mean"` is the mean of the
    heads' own norms ||A^h_ij f^h(x_j)||. `preset=official` keeps the bias of the values, as the paper's f does; without
    it, the beta of the norm before the attention is left out too.
    """
    vectors = layer.decomposition.vectors(value_bias=value_bias, ln=ln)
    if heads == "mean":
        return mean_of_heads(head_norms(layer.A, vectors, layer.rows))
    return contribution_norms(layer.A, vectors, layer.rows, residual=0.0)  # [B, rows, N]


@method(
    "attin-residual",
    family="decomposition",
    paper="Kobayashi et al., EMNLP 2021",
    output="matrix",
    aggregation=Product(residual=0.0, normalise="rows"),
    requires=Requires(passes="forward", recorders=(OpLog,), structure=("residual",)),
    class_specific=False,
    presets={"official": {"value_bias": True, "ln": "attention"}},
    option_overrides=OptionOverrides(refused={"residual": f"{RESIDUAL_INSIDE}; strength says how often it counts."}),
)
def residual_norms(
    layer: LayerView,
    value_bias: Annotated[
        bool, Doc("keep the bias of the values, and the shift of the norm before the attention")
    ] = False,
    ln: Ln = "none",
    strength: Annotated[float, Doc("how many times the residual is taken")] = 1.0,
) -> Tensor:
    """prod_l ||sum_h A_ij f(x_j) + delta_ij x_i||, row-normalised: norms with the residual in the sum.

    In one layer the residual changes only what a token gives to itself, so alone the layers are multiplied: rows are
    shares (mixing ratios in the paper), the residual is in the vectors and no identity is added. `ln="next"`
    applies the norm that reads the sum (norm2), its spread held fixed; "attention" and "block" apply the norms that the
    residual stream itself goes through, which only post-norm blocks have (the paper's BERT). With `value_bias=false`
    the beta of the norm before the attention is left out too.
    """
    vectors = layer.decomposition.vectors(value_bias=value_bias, ln=ln)
    return contribution_norms(layer.A, vectors, layer.rows, residual=strength)  # [B, rows, N]


@method(
    "globenc",
    family="decomposition",
    paper="Modarressi et al., NAACL 2022",
    output="matrix",
    aggregation=Product(residual=0.0),
    requires=Requires(passes="forward", recorders=(OpLog,), structure=("residual",)),
    class_specific=False,
    presets=OFFICIAL,
    option_overrides=OptionOverrides(refused={"residual": f"{RESIDUAL_INSIDE}; strength says how often it counts."}),
)
def encoder_norms(
    layer: LayerView,
    value_bias: Annotated[
        bool, Doc("keep the bias of the values, and the shift of the norm before the attention")
    ] = False,
    ln: Ln = "block",
    strength: Annotated[float, Doc("how many times the residual is taken")] = 1.0,
) -> Tensor:
    """prod_l ||T_ij||: norms of what token j adds to token i in the whole block, multiplied layer by layer.

    The MLP is left out, its residual and the norms around it are not: in a post-norm block both norms are applied, as
    in the authors' code; a pre-norm block has none in its residual stream, which is SkipPLUS's form for ViTs. As in the
    authors' code no identity is added and rows are not normalised (their paper's text does not say). `strength` takes
    the residual that many times (SkipPLUS tried 0 and 0.5). With `value_bias=false` the beta of the norm before the
    attention is left out too.
    """
    vectors = layer.decomposition.vectors(value_bias=value_bias, ln=ln)
    return contribution_norms(layer.A, vectors, layer.rows, residual=strength)  # [B, rows, N]


@method(
    "alti",
    family="decomposition",
    paper="Ferrando et al., EMNLP 2022",
    output="matrix",
    aggregation=Product(residual=0.0),
    requires=Requires(passes="forward", recorders=(OpLog,), structure=("residual",)),
    class_specific=False,
    presets={"official": {"value_bias": True}, "skipplus": {"resultant": "block"}},
    option_overrides=OptionOverrides(refused={"residual": f"{RESIDUAL_INSIDE}."}),
)
def token_closeness(
    layer: LayerView,
    resultant: Annotated[
        Literal["attn", "block"],
        Doc("what tokens are compared with: the sum after the attention, or the block's output"),
    ] = "attn",
    p: Annotated[Literal[1, 2], Doc("the norm that measures distance: L1 or L2")] = 1,
    value_bias: Annotated[
        bool, Doc("keep the bias of the values, and the shift of the norm before the attention")
    ] = False,
) -> Tensor:
    """prod_l C, C_ij ~ relu(||y_i|| - ||y_i - T_ij||): how close what token j adds is to the whole, in L1.

    y_i is what the T_ij add up to: the sum after attention (after its norm in a post-norm block), biases included.
    `resultant="block"` compares with the block's output after the MLP, as SkipPLUS's code does. A row in which nothing
    is close is the token itself; rows add up to 1. With `value_bias=false` the beta of the norm before the attention is
    left out too.
    """
    inside = layer.decomposition
    y = inside.resultant(inside.norms("attention")) if resultant == "attn" else _block_output(layer)
    vectors = inside.vectors(value_bias=value_bias, ln="attention")
    closeness = vector_norm(y[:, layer.rows], p, -1)[..., None] - distances(layer.A, vectors, layer.rows, y, p)
    return normalised_rows(closeness.clamp(min=0), layer.rows)  # [B, rows, N]


@method(
    "tokentm",
    family="gradient × attention",
    paper="Wu et al., CVPR 2024",
    output="matrix",
    aggregation=Product(residual=0.0),
    requires=Requires(recorders=(PostAttentionResidual,), structure=("middle",)),
    option_overrides=OptionOverrides(
        combined={"start": "one"}, refused={"residual": "its matrices have the identity in them already."}
    ),
    caveats=Caveats(
        weak_class_signal="its weights are about 1/N, so the identity outweighs the gradient "
        "(less so with necc=mean_exp)"
    ),
)
def token_transformation(
    layer: LayerView,
    necc: Annotated[
        Literal["softmax", "mean_exp"],
        Doc("how a token's change of direction is weighed: softmax over tokens, or exp over its mean"),
    ] = "softmax",
    head_stage: Annotated[
        Literal["mean-first", "post"], Doc("whether heads are averaged before A and G are multiplied, or after")
    ] = "mean-first",
    start: Annotated[
        Literal["length", "one"], Doc("what the first layer's columns are multiplied by: the tokens' norms, or nothing")
    ] = "length",
) -> Tensor:
    """prod_l (I + W_mlp)(I + (A W_attn) * relu(G)): attention weighted by how tokens change in norm and direction.

    W_i = ||E'_i|| / ||E_i|| · NECC_i, E and E' a token before and after attention or MLP; NECC = softmax over tokens of
    cos(E_i, E'_i), or exp(cos) over its mean (N times as much: `necc=mean_exp`). The first layer's columns are
    multiplied by the tokens' norms (`start=length`); under a combinator they are not, as layers are not multiplied.
    A and relu(G) are averaged over heads before they are multiplied, `head_stage="post"` averages their product. The
    authors' code could not be read: this is METHODS 2.10, after a third party's version.
    """
    attention = layer.once_per_layer("x, x_mid", lambda: layer.combine_tokens(products_and_norms, _around_attention))
    mlp = layer.once_per_layer(
        "x_mid, x_out", lambda: layer.combine_tokens(products_and_norms, _around_mlp)
    )  # [B, 3, N]
    W_attn = layer.once_per_layer(("W_attn", necc), lambda: transformation_weights(attention, necc))  # [B, N]
    W_mlp = layer.once_per_layer(("W_mlp", necc), lambda: transformation_weights(mlp, necc))  # [B, N]
    if head_stage == "post":
        AG = mean_of_heads(layer.A * layer.G.clamp(min=0))  # not relu(A·G): mixed heads (CaiT) have negative A
    else:
        AG = layer.A_mean * layer.weighted("G+")
    matrix = AG * W_attn[:, None]  # [B, rows, N]
    matrix[:, torch.arange(len(layer.rows), device=matrix.device), layer.rows] += 1
    matrix = matrix * (1 + W_mlp[:, layer.rows, None])
    if start == "one":
        return matrix
    return matrix * layer.at_first_layer(attention[:, 1], otherwise=1.0)[:, None]


def _around_attention(layer: LayerView) -> tuple[Tensor, Tensor]:
    """Return the tokens before and after attention, [B, N, d]."""
    return layer.layer.x, _after_attention(layer)


def _around_mlp(layer: LayerView) -> tuple[Tensor, Tensor]:
    """Return the tokens before and after the MLP, [B, N, d]."""
    return _after_attention(layer), _checked_output(layer, layer.output_tokens())


def _after_attention(layer: LayerView) -> Tensor:
    """Return the tokens after attention, [B, N, d], in the model's precision."""
    tokens = layer.trace[PostAttentionResidual].tokens_at(layer.index, layer.trace.recording)
    return layer[PostAttentionResidual] if tokens is None else tokens  # which raises


def transformation_weights(products: Tensor, necc: str) -> Tensor:
    """Return W_i = ||E'_i|| / ||E_i|| · NECC_i, [B, N], of tokens' E·E', ||E|| and ||E'||, [B, 3, N]."""
    product, norm_before, norm_after = products.unbind(1)
    norm_before = norm_before.clamp(min=torch.finfo(products.dtype).tiny)
    cosine = product / (norm_before.clamp(min=EPS) * norm_after.clamp(min=EPS))
    NECC = cosine.softmax(-1)
    if necc == "mean_exp":
        NECC = NECC * NECC.shape[-1]
    return norm_after / norm_before * NECC


@method(
    "decompx",
    family="decomposition",
    paper="Modarressi et al., ACL 2023, without bias (= CP-LRP at eps 0)",
    output="tokens",
    aggregation=Single(0),
    requires=lambda bias, level, **_: (
        Requires(rules=LINEAR, gradients=token_gradients(level))
        if bias == "none"
        else Requires(passes="forward", recorders=(OpLog,))
    ),
    signed=True,
)
def linear_decomposition(
    layer: LayerView,
    level: TokenLevel = "token",
    bias: Annotated[Sharing, Doc("how biases are shared out among tokens; none leaves them out")] = "none",
) -> Tensor:
    """sum_d x_d dy/dx_d, attention, norms and slopes held fixed: what each token adds to the score through all layers.

    Without bias it is one backward for all layers. The other modes share each bias b out among tokens: by |<b, D_j>|
    (`absdot`, the authors' default), |cos(b, D_j)| (`abssim`), ||D_j|| (`norm`), alike (`equal`) or all to the class
    token (`cls`), D_j the decomposed vector of token j; then tokens add up to the score. These modes propagate all N
    vectors of all N tokens: no backward, but memory N² d and the work of about N forwards per layer that is explained,
    so +skipplus costs L/2 times that. As in the authors' code W_o b_v + b_o waits for the sum with the residual; unlike
    there the first layer's value bias is no exception, and activations have the slope f(z)/z (their GeLU_ZO).
    """
    if bias == "none":
        return input_x_gradient(layer, level)
    if level == "pixel":
        raise BadInput(f"level=pixel and bias={bias} were given; biases are shared among tokens. Use level=token.")
    trace = layer.trace
    if bias == "cls" and not layer.layout.prefix:
        raise NotApplicable(
            "bias=cls gives all biases to a class token before the patches, and this model has none. Use bias=absdot."
        )
    _ = layer.x  # where there are no tokens, say that
    with advice("Use bias=none."):
        added = shares(trace.recording, layer.index, bias)  # [N, B, C]
    assert trace.target is not None
    with torch.enable_grad():
        logits = trace.logits.requires_grad_(True)
        (weights,) = torch.autograd.grad(trace.target(logits).sum(), logits)  # [B, C]
    return (added * weights).sum(-1).T  # [B, N]


# Norms of T_ij = r_i (s_i sum_h A_ij^h f_j^h + delta_ij x_i) without storing all N × N vectors: a Triton kernel has
# them in registers. Elsewhere L2 norms come from the Gram matrices [H, H] of each token's f; L1 has no such form and
# goes through the rows in pieces.


def contribution_norms(A: Tensor, vectors: Vectors, rows: Tensor, residual: float = 1.0) -> Tensor:
    """Return ||T_ij||_2 [B, rows, N] for A [B, H, rows, N], with the residual taken `residual` times."""
    if kernels.decomposition_applies(A, vectors.f):
        return _distances_by_kernel(A, vectors, rows, None, 2, residual)
    return _norms_by_gram_matrices(A, vectors, rows, residual)


def _norms_by_gram_matrices(A: Tensor, vectors: Vectors, rows: Tensor, residual: float) -> Tensor:
    """Return ||T_ij||_2 [B, rows, N].

    ||sum_h A_ij^h f_j^h||² = sum_{h,h'} A_ij^h A_ij^h' <f_j^h, f_j^h'>; the residual only changes i = j.
    """
    f = widened(vectors.f).transpose(1, 2)  # [B, N, H, d]
    gram = f @ f.transpose(-2, -1)  # [B, N, H, H]
    A_by_key = A.permute(0, 3, 2, 1)  # [B, N, rows, H]
    squares = ((A_by_key @ gram) * A_by_key).sum(-1).transpose(1, 2)  # [B, rows, N]
    spread, scale = vectors.spread[:, rows], vectors.scale[:, rows]  # [B, rows, 1]
    squares = squares * spread.square()
    if residual:
        i = torch.arange(len(rows), device=rows.device)
        x, f_i = vectors.x[:, rows], f[:, rows]  # [B, rows, d], [B, rows, H, d]
        attended = (A[:, :, i, rows].transpose(1, 2)[..., None] * f_i).sum(2) * spread  # what i adds to itself
        squares[:, i, rows] = (attended + residual * x).square().sum(-1)
    return squares.clamp(min=0).sqrt() * scale


def head_norms(A: Tensor, vectors: Vectors, rows: Tensor) -> Tensor:
    """Return ||A_ij^h f_j^h||_2 of each head, [B, H, rows, N]."""
    scale = (vectors.spread * vectors.scale)[:, rows]  # [B, rows, 1]
    f_norms: Tensor = vector_norm(widened(vectors.f), dim=-1)  # [B, H, N]
    return A.abs() * f_norms[:, :, None] * scale[:, None]


def distances(A: Tensor, vectors: Vectors, rows: Tensor, y: Tensor, p: int) -> Tensor:
    """Return ||y_i - T_ij||_p [B, rows, N] for y [B, N, d]."""
    if kernels.decomposition_applies(A, vectors.f):
        return _distances_by_kernel(A, vectors, rows, y, p)
    return _distances_in_pieces(A, vectors, rows, y, p)


def _distances_in_pieces(A: Tensor, vectors: Vectors, rows: Tensor, y: Tensor, p: int) -> Tensor:
    """Return ||y_i - T_ij||_p [B, rows, N], one image and a few rows at a time."""
    scale = (vectors.spread * vectors.scale)[:, None, rows]  # [B, 1, rows, 1]
    A_by_key = (A * scale).permute(0, 3, 2, 1)  # [B, N, rows, H]
    f, x = widened(vectors.f).transpose(1, 2), vectors.x * vectors.scale  # [B, N, H, d], [B, N, d]
    norms = A.new_empty(len(A), len(rows), vectors.x.shape[1])
    size = max(1, (NUMBERS_AT_ONCE_ON_GPU if A.is_cuda else NUMBERS_AT_ONCE) // vectors.x[0].numel())
    for image in range(len(A)):
        for first in range(0, len(rows), size):
            piece = rows[first : first + size]
            A_piece = A_by_key[image, :, first : first + size]  # [N, piece, H]
            difference = torch.baddbmm(y[image, None, piece], A_piece, f[image], alpha=-1)  # y_i - T_ij, [N, piece, d]
            difference[piece, torch.arange(len(piece), device=piece.device)] -= x[image, piece]
            norm = difference.abs_().sum(-1) if p == 1 else vector_norm(difference, p, -1)  # in place: twice as fast
            norms[image, first : first + size] = norm.T
    return norms


def _distances_by_kernel(
    A: Tensor, vectors: Vectors, rows: Tensor, y: Tensor | None, p: int, residual: float = 1.0
) -> Tensor:
    """Return ||y_i - T_ij||_p [B, rows, N], with the residual taken `residual` times; y = 0 where it is None."""
    from clairvit.cuda.kernels import decomposition

    scale = (vectors.spread * vectors.scale)[:, rows]  # [B, rows, 1]
    x = vectors.x * (residual * vectors.scale) if residual else None
    y_rows = None if y is None else y[:, rows]
    return decomposition.distances(A, scale, vectors.f, x, y_rows, rows, p)


def normalised_rows(closeness: Tensor, rows: Tensor) -> Tensor:
    """Return [B, rows, N] with rows that add up to 1; a row of zeros becomes a row of the identity."""
    total = closeness.sum(-1, keepdim=True)
    identity = (rows[:, None] == torch.arange(closeness.shape[-1], device=rows.device)).to(closeness.dtype)
    return torch.where(total > 0, closeness / torch.where(total > 0, total, 1), identity)


def _block_output(layer: LayerView) -> Tensor:
    """Return the block's output [B, N, d], or raise NotApplicable where it does not match the input."""
    return _checked_output(layer, layer.block_output())


def _checked_output(layer: LayerView, output: Tensor | None) -> Tensor:
    if output is None or output.shape != layer.layer.x.shape:
        raise NotApplicable(
            f"The output of layer {layer.index} was not seen as tokens like its input; expected blocks that are "
            "modules with the same tokens on both sides.",
            methods=("globenc", "genatt"),
        )
    return output
