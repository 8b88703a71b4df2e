"""Forward decomposition: a block's output taken apart into what each token adds to it, read by lengths and distances.

T_ij = sum_h A_ij^h f^h(x_j) + delta_ij x_i, f^h(x_j) = W_o^h W_v^h LN(x_j) without biases (LN with its true spread).
The bias of the values can be kept (`value_bias=true`): the authors' own codes of AttIN, GlobEnc and ALTI do so.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.linalg import vector_norm

from clairvit.errors import BadInput, NotApplicable
from clairvit.methods.aggregation import Product, Single
from clairvit.methods.gradient import input_x_gradient, token_gradients
from clairvit.methods.layer_view import LayerView, mean_of_heads
from clairvit.methods.registry import Caveats, OptionOverrides, Requires, method
from clairvit.methods.vector_norms import apportioned, distances, head_lengths, lengths
from clairvit.tracing.decompx import Sharing, shares
from clairvit.tracing.recorders.op_log import OpLog
from clairvit.tracing.recorders.residual import PostAttentionResidual
from clairvit.tracing.rules import LINEAR

OFFICIAL = {"official": {"value_bias": True}}
Ln = Literal["none", "next", "attention", "block"]


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
def attended_lengths(
    layer: LayerView, value_bias: bool = False, heads: Literal["sum", "mean"] = "sum", ln: Ln = "none"
) -> Tensor:
    """||sum_h A_ij f(x_j)||: how long the vector is that a token gets from each other token, not how much it looks.

    The paper looks at one layer at a time and multiplies none, so alone this is the last layer, as raw-attention is;
    attin+plus and +skipplus are SkipPLUS's forms, attin+rollout adds the identity. `heads="mean"` is the mean of the
    heads' own lengths ||A^h_ij f^h(x_j)||. `preset=official` keeps the bias of the values, as the paper's f does.
    """
    vectors = layer.decomposition.vectors(value_bias=value_bias, ln=ln)
    if heads == "mean":
        return mean_of_heads(head_lengths(layer.A, vectors, layer.rows))
    return lengths(layer.A, vectors, layer.rows, residual=0.0)


@method(
    "attin-residual",
    family="decomposition",
    paper="Kobayashi et al., EMNLP 2021",
    output="matrix",
    aggregation=Product(residual=0.0, normalise="rows"),
    requires=Requires(passes="forward", recorders=(OpLog,), structure=("residual",)),
    class_specific=False,
    presets={"official": {"value_bias": True, "ln": "attention"}},
)
def residual_lengths(layer: LayerView, value_bias: bool = False, ln: Ln = "none", strength: float = 1.0) -> Tensor:
    """prod_l ||sum_h A_ij f(x_j) + delta_ij x_i||, row-normalised: lengths with the residual in the sum.

    In one layer the residual changes only what a token gives to itself, so alone the layers are multiplied: rows are
    shares (the paper speaks of mixing ratios), the residual is in the vectors and no identity is added. `ln="next"`
    applies the norm that reads the sum (norm2), its spread held fixed; "attention" and "block" apply the norms that the
    residual stream itself goes through, which only post-norm blocks have (the paper's BERT).
    """
    return lengths(layer.A, layer.decomposition.vectors(value_bias=value_bias, ln=ln), layer.rows, residual=strength)


@method(
    "globenc",
    family="decomposition",
    paper="Modarressi et al., NAACL 2022",
    output="matrix",
    aggregation=Product(residual=0.0),
    requires=Requires(passes="forward", recorders=(OpLog,), structure=("residual",)),
    class_specific=False,
    presets=OFFICIAL,
)
def encoder_lengths(layer: LayerView, value_bias: bool = False, ln: Ln = "block", strength: float = 1.0) -> Tensor:
    """prod_l ||T_ij||: lengths of what token j adds to token i in the whole block, multiplied layer by layer.

    The MLP is passed by, its residual and the norms around it are not: in a post-norm block both norms are applied, as
    in the authors' code; a pre-norm block has none in its residual stream, which is SkipPLUS's form for ViTs. As in the
    authors' code no identity is added and rows are not normalised (their paper's text does not say). `strength` takes
    the residual that many times (SkipPLUS tried 0 and 0.5).
    """
    return lengths(layer.A, layer.decomposition.vectors(value_bias=value_bias, ln=ln), layer.rows, residual=strength)


@method(
    "alti",
    family="decomposition",
    paper="Ferrando et al., EMNLP 2022",
    output="matrix",
    aggregation=Product(residual=0.0),
    requires=Requires(passes="forward", recorders=(OpLog,), structure=("residual",)),
    class_specific=False,
    presets={"official": {"value_bias": True}, "skipplus": {"resultant": "block"}},
)
def token_closeness(
    layer: LayerView, resultant: Literal["attn", "block"] = "attn", p: Literal[1, 2] = 1, value_bias: bool = False
) -> Tensor:
    """prod_l C, C_ij ~ relu(||y_i|| - ||y_i - T_ij||): how near what token j adds comes to the whole, in L1.

    y_i is what the T_ij add up to: the sum after attention (after its norm in a post-norm block), biases included.
    `resultant="block"` compares with the block's output after the MLP, as SkipPLUS's code does. A row in which nothing
    comes near is the token itself; rows add up to 1.
    """
    inside = layer.decomposition
    y = inside.resultant(inside.norms("attention")) if resultant == "attn" else _block_output(layer)
    vectors = inside.vectors(value_bias=value_bias, ln="attention")
    near = vector_norm(y[:, layer.rows], p, -1)[..., None] - distances(layer.A, vectors, layer.rows, y, p)
    return apportioned(near.clamp(min=0), layer.rows)


@method(
    "tokentm",
    family="gradient × attention",
    paper="Wu et al., CVPR 2024",
    output="matrix",
    aggregation=Product(residual=0.0),
    requires=Requires(recorders=(PostAttentionResidual,), structure=("middle",)),
    option_overrides=OptionOverrides(combined={"start": "one"}),
    caveats=Caveats(
        weak_class_signal="its weights are about 1/N, so the identity outweighs the gradient "
        "(less so with necc=mean_exp)"
    ),
)
def token_transformation(
    layer: LayerView,
    necc: Literal["softmax", "mean_exp"] = "softmax",
    head_stage: Literal["mean-first", "post"] = "mean-first",
    start: Literal["length", "one"] = "length",
) -> Tensor:
    """prod_l (I + W_mlp)(I + (A W_attn) * relu(G)): attention weighed by how tokens change in length and direction.

    W_i = ||E'_i|| / ||E_i|| · NECC_i, E and E' a token before and after attention or MLP; NECC = softmax over tokens of
    cos(E_i, E'_i), or exp(cos) over its mean (N times as much: `necc=mean_exp`). The first layer's columns are
    multiplied by the tokens' lengths (`start=length`); under a combinator they are not, as each layer stands alone.
    A and relu(G) are averaged over heads before they are multiplied, `head_stage="post"` averages their product. The
    authors' code could not be read: this is METHODS 2.10, after a third party's version.
    """
    x, x_mid, out = layer.x, layer[PostAttentionResidual], _block_output(layer)
    attention, mlp = transformed(x, x_mid, necc), transformed(x_mid, out, necc)  # [B, N]
    wanted = layer.G.clamp(min=0)
    if head_stage == "post":
        looks = mean_of_heads(layer.A * wanted)
    else:
        looks = mean_of_heads(layer.A) * mean_of_heads(wanted)
    matrix = looks * attention[:, None]  # [B, rows, N]
    matrix[:, torch.arange(len(layer.rows), device=x.device), layer.rows] += 1
    matrix = matrix * (1 + mlp[:, layer.rows, None])
    return matrix * vector_norm(x, dim=-1)[:, None] if start == "length" and layer.index == 0 else matrix


def transformed(before: Tensor, after: Tensor, necc: str) -> Tensor:
    """How much longer each token became, times how well it kept its direction beside the others, [B, N]."""
    kept = torch.cosine_similarity(before, after, dim=-1).softmax(-1)
    if necc == "mean_exp":
        kept = kept * kept.shape[-1]
    was: Tensor = vector_norm(before, dim=-1).clamp(min=torch.finfo(before.dtype).tiny)
    became: Tensor = vector_norm(after, dim=-1)
    return became / was * kept


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
    layer: LayerView, level: Literal["token", "pixel"] = "token", bias: Sharing = "none"
) -> Tensor:
    """sum_d x_d dy/dx_d, attention, norms and slopes held fixed: what each token adds to the score, all the way.

    Without bias it is one backward for all layers. The other modes share each bias b out among tokens: by |<b, D_j>|
    (`absdot`, the authors' default), |cos(b, D_j)| (`abssim`), ||D_j|| (`norm`), alike (`equal`) or all to the class
    token (`cls`), D_j what has become of token j; then the tokens add up to the score. They carry all N vectors of all
    N tokens forwards: no backward, but memory N² d and the work of about N forwards for each layer asked for, so
    +skipplus costs L/2 times that. As in the authors' code W_o b_v + b_o waits for the sum with the residual; unlike
    there the first layer's value bias is no exception, and activations have the slope f(z)/z (their GeLU_ZO).
    """
    if bias == "none":
        return input_x_gradient(layer, level)
    if level == "pixel":
        raise BadInput(f"level=pixel and bias={bias} were given; biases are shared among tokens. Use level=token.")
    trace = layer.trace
    if bias == "cls" and not layer.layout.prefix:
        raise NotApplicable("bias=cls gives all biases to the class token, and this model has none. Use bias=absdot.")
    _ = layer.x  # where there are no tokens, say that
    added = shares(trace.recording, layer.index, bias)  # [N, B, C]
    assert trace.target is not None
    with torch.enable_grad():
        logits = trace.logits.requires_grad_(True)
        (weights,) = torch.autograd.grad(trace.target(logits).sum(), logits)  # [B, C]
    return (added * weights).sum(-1).T  # [B, N]


def _block_output(layer: LayerView) -> Tensor:
    out = layer.block_output()
    if out is None or out.shape != layer.x.shape:
        raise NotApplicable(
            f"The output of layer {layer.index} was not seen as tokens like its input; expected blocks that are "
            "modules with the same tokens on both sides. Use globenc or genatt."
        )
    return out
