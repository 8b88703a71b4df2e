"""Attention methods on encoder-decoder models (DETR): from a query of the decoder back to the image tokens.

Chefer, Gur, Wolf, "Generic Attention-model Explainability", ICCV 2021, eqs 5-11, with i the image tokens and q the
queries: R_ii = I, R_qq = I and R_qi = 0 at first, and Ā the method's layer map, mean_h relu(A * G) for GenAtt.

    encoder:               R_ii ← R_ii + Ā R_ii
    decoder, self:         R_qq ← R_qq + Ā R_qq,   R_qi ← R_qi + Ā R_qi
    decoder, cross:        R_qi ← R_qi + R̄_qqᵀ Ā R̄_ii
    R̄ = I + (R − I) / row sums of (R − I)

The map is the row of the query that the score reads, in R_qi.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from clairvit.cuda.layers import view_of
from clairvit.errors import NotApplicable
from clairvit.methods.aggregation import Product, Single
from clairvit.methods.layer_view import DecoderView, LayerView, RunContext
from clairvit.methods.result import as_map_result
from clairvit.methods.spec import MethodSpec
from clairvit.tracing.decoder import check_decoder
from clairvit.tracing.trace import Trace

DecoderMap = tuple[bool, Tensor]  # whether it is cross-attention; [B, Q, N], or [B, Q, Q] between queries


def reads_queries(spec: MethodSpec, trace: Trace) -> bool:
    """Return whether a method's map starts at a decoder: its matrices are multiplied, or the last one is read."""
    aggregation = spec.aggregation
    starts_there = isinstance(aggregation, Product) or (isinstance(aggregation, Single) and aggregation.layer == -1)
    return spec.method.output == "matrix" and starts_there and bool(trace.layers) and trace.layout.pooling == "query"


def token_relevance(spec: MethodSpec, trace: Trace, context: RunContext) -> Tensor:
    """Return the relevance of the image tokens for the query that the score reads, [B, N]."""
    aggregation, function = spec.aggregation, spec.method.function
    check_decoder(trace.recording.decoder, trace.layout)

    def map_of(view: LayerView) -> Tensor:
        return as_map_result(function(view, **dict(spec.options))).maps

    read = trace.query_weights  # [1 or B, Q]
    if isinstance(aggregation, Single):
        last = [layer for layer in trace.decoder if layer.attention.kind == "cross"][-1]
        return (read[:, None] @ map_of(DecoderView(last, context)))[:, 0]
    assert isinstance(aggregation, Product)
    decoder = [(layer.attention.kind == "cross", map_of(DecoderView(layer, context))) for layer in trace.decoder]
    encoder = [map_of(view_of(trace.layers[index], context)) for index in aggregation.used(len(trace.layers))]
    _check_product(spec, aggregation)
    if aggregation.normalise == "none":
        return generic_attention_relevance(encoder, decoder, read)
    return rollout_relevance(encoder, decoder, read, aggregation)


def _check_product(spec: MethodSpec, product: Product) -> None:
    """Raise NotApplicable for options that no paper defines on encoder-decoder models."""
    generic = product.normalise == "none" and product.residual == 1
    if product.order == "forward" or not (generic or product.normalise == "rows"):
        raise NotApplicable(
            f"'{spec.text}' is not defined for a model that reads the image by the queries of a decoder; expected "
            "normalise=rows, or normalise=none with residual=1, and order=later-left."
        )


def generic_attention_relevance(encoder: Sequence[Tensor], decoder: Sequence[DecoderMap], read: Tensor) -> Tensor:
    """Return the rows of R_qi that are read, [B, N], by eqs 5-11: layer maps Ā of encoder and decoder, first to last.

    R − I is carried instead of R, so that small relevances are not rounded against the identity's 1. A row of R − I
    that is zero stays zero, where the authors' division by its sum drops the whole layer.
    """
    of_image = _without_identity(encoder)  # R_ii − I
    shares = _row_normalised(of_image)
    queries = torch.zeros_like(next(layer_map for is_cross, layer_map in decoder if not is_cross))  # R_qq − I
    relevance = torch.zeros_like(next(layer_map for is_cross, layer_map in decoder if is_cross))  # R_qi
    for is_cross, layer_map in decoder:
        if is_cross:
            of_tokens = layer_map + layer_map @ shares  # Ā R̄_ii
            relevance = relevance + of_tokens + _row_normalised(queries).mT @ of_tokens
        else:
            queries = queries + layer_map + layer_map @ queries
            relevance = relevance + layer_map @ relevance
    return (read[:, None] @ relevance)[:, 0]


def rollout_relevance(
    encoder: Sequence[Tensor], decoder: Sequence[DecoderMap], read: Tensor, product: Product
) -> Tensor:
    """Return the rows of R_qqᵀ A R_ii that are read, [B, N]: A the last cross-attention, R_qq and R_ii rollouts.

    So the authors of the rules above compute rollout for DETR.
    """
    of_queries = _rollout([layer_map for is_cross, layer_map in decoder if not is_cross], product)
    last = [layer_map for is_cross, layer_map in decoder if is_cross][-1]
    return (read[:, None] @ (of_queries.mT @ (last @ _rollout(encoder, product))))[:, 0]


def _without_identity(matrices: Sequence[Tensor]) -> Tensor:
    """Return prod_l (I + Ā^l) − I, [B, N, N], later layers on the left."""
    added = torch.zeros_like(matrices[0])
    for matrix in matrices:
        added = added + matrix + matrix @ added
    return added


def _row_normalised(matrix: Tensor) -> Tensor:
    sums = matrix.sum(-1, keepdim=True)
    return matrix / sums.masked_fill(sums == 0, 1)


def _rollout(matrices: Sequence[Tensor], product: Product) -> Tensor:
    """Return prod_l of the row-normalised M + residual·I, [B, N, N], later layers on the left."""
    identity = torch.eye(matrices[0].shape[-1], dtype=matrices[0].dtype, device=matrices[0].device)
    rolled = identity.expand_as(matrices[0])
    for matrix in matrices:
        rolled = _row_normalised(matrix + product.residual * identity) @ rolled
    return rolled
