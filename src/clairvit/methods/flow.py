"""Attention flow: the maximum flow from the head's read-out to each input token, the layers' matrices as capacities.

Nodes are (level, token); a layer's matrix holds the capacities of the edges from each token to each token one level
down. A token's score is the maximum flow to it alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from clairvit._progress import track
from clairvit.errors import BadInput, NotApplicable
from clairvit.methods.aggregation import one_by_one
from clairvit.models.model import Layout
from clairvit.option_types import Doc, Range, check_fields

Capacities = NDArray[np.int32]  # the solver takes integers only
FINEST = 1e9  # all that leaves the read-out is 1, so no sum along a flow exceeds 2³¹


@dataclass(frozen=True)
class Flow:
    """Maximum flow from the head's read-out to each input token; the flows are scaled to sum 1 over all tokens.

    Capacities are relu(M) + residual·I, row-normalised (residual 1 on attention is half and half). `prune` leaves out
    edges with a smaller capacity. `grid_pool` merges k×k patches to one token first: rows are averaged, columns summed,
    so that every row still adds up to 1; its flow is then shared evenly. `max_tokens` merges as many as it takes to
    have no more tokens than that. Capacities are rounded to multiples of 1/`precision`.
    """

    residual: Annotated[float, Range(ge=0, example=1), Doc("how many times the identity is added to each layer")] = 1.0
    prune: Annotated[float, Range(ge=0, lt=1, example=0.0001), Doc("edges with a smaller capacity are left out")] = 0.0
    grid_pool: Annotated[
        int, Range(ge=1, unit="patches per side", example=2), Doc("merge so many patches per side to one token first")
    ] = 1
    max_tokens: Annotated[int | None, Doc("merge patches until there are no more tokens than this; None: never")] = None
    precision: Annotated[
        float, Range(ge=1000, le=FINEST, example=1e6), Doc("capacities are rounded to multiples of one part in so many")
    ] = FINEST

    matrices_only = True
    needs_all_rows = True
    ascending = False

    def __post_init__(self) -> None:
        check_fields(self)

    def used(self, count: int) -> range:
        return range(count)

    def start_row(self, read: Tensor) -> Tensor | None:
        return read[:, None]  # [1 or B, 1, N]: the source

    def step(self, row: Tensor | None, layer_map: Tensor, read: Tensor) -> Tensor:
        """Return the capacities so far, [B, 1 + layers·N, N]: of the source, then of each token, last layer first."""
        assert row is not None
        return torch.cat([row.expand(len(layer_map), -1, -1), row_normalised_capacities(layer_map, self.residual)], 1)

    def steps(self, row: Tensor | None, several: Tensor, read: Tensor) -> Tensor:
        return one_by_one(self, row, several, read)

    def finish(self, row: Tensor, count: int, layout: Layout) -> Tensor:
        groups = patch_groups(layout, self._side(layout))
        networks = row.double().cpu().numpy()
        flows = [
            self._flows(network, groups, f"flow, image {i + 1} of {len(row)}") for i, network in enumerate(networks)
        ]
        return torch.as_tensor(np.stack(flows), dtype=row.dtype, device=row.device)

    def _side(self, layout: Layout) -> int:
        """Return how many patches per side are merged to one token."""
        most = layout.tokens if self.max_tokens is None else self.max_tokens
        others = layout.tokens - layout.patches
        if most <= others:
            raise BadInput(
                f"max_tokens={most} was given for a model with {others} tokens next to the patches; expected "
                f"{others + 1} or more."
            )
        if len(layout.grid) == 3:
            if self.grid_pool > 1 or layout.tokens > most:
                raise NotApplicable(
                    "Patches of a clip lie in frames too, and merging is defined on rows and columns of an image; "
                    "expected grid_pool=1 without max_tokens."
                )
            return 1
        sides = range(self.grid_pool, max(self.grid_pool, *layout.grid) + 1)
        return next(side for side in sides if patch_groups(layout, side).max() < most or side == sides[-1])

    def _flows(self, network: NDArray[np.float64], groups: NDArray[np.intp], label: str) -> NDArray[np.float64]:
        """Return the flows [N] of one image's network [1 + L·N, N]; progress is reported under `label`."""
        if not np.isfinite(network).all():
            return np.full(len(groups), np.nan)  # integers would hide it
        source, layers = merge_tokens(network, groups)
        layers = np.where(layers < self.prune, 0, layers)
        flows = maximum_flows(_integers(source, self.precision), _integers(layers, self.precision), label=label)
        shared = (flows / np.bincount(groups))[groups]  # [N]
        total = shared.sum()
        return shared / total if total > 0 else shared


def row_normalised_capacities(matrix: Tensor, residual: float) -> Tensor:
    """Return relu(M) + residual·I, row-normalised, [B, N, N]; a row of zeros stays one."""
    capacities = matrix.clamp(min=0)
    capacities.diagonal(dim1=1, dim2=2).add_(residual)
    sums = capacities.sum(-1, keepdim=True)
    return capacities / sums.masked_fill(sums == 0, 1)


def patch_groups(layout: Layout, side: int) -> NDArray[np.intp]:
    """Return the group of each token, [N]. Other tokens stay alone; groups may be smaller at the edge of the grid."""
    rows, columns = layout.plane
    across = -(-columns // side)
    down, right = np.divmod(np.arange(rows * columns), columns)
    patches = layout.prefix + down // side * across + right // side
    return np.concatenate([np.arange(layout.prefix), patches, patches[-1] + 1 + np.arange(layout.suffix)])


def merge_tokens(
    network: NDArray[np.float64], groups: NDArray[np.intp]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the capacities of the source, [n], and each layer, [L, n, n], when tokens of a group become one."""
    member = np.eye(groups.max() + 1)[groups]  # [N, n]
    source = np.maximum(network[0], 0) @ member
    layers = network[1:].reshape(-1, *member.shape[:1] * 2)  # [L, N, N]
    return source, (member / member.sum(0)).T @ layers @ member


def maximum_flows(
    source: Capacities, layers: Capacities, *, early_exit: bool = True, keep: int | None = None, label: str = "flow"
) -> NDArray[np.int64]:
    """Return the maximum flow from the source to each token below the last of `layers` [L, n, n] (top first), [n].

    Most flows are as large as what leaves the source or what can enter the token, and most of these need few edges:
    the `keep` largest of each token are tried first. A flow that reaches the bound there is a maximum of the whole.
    """
    keep = max(32, len(source) // 6) if keep is None else keep
    bounds = upper_bounds(source, layers)
    full = _Network(source, layers)
    sparse = _Network(source, _largest(layers, keep)) if early_exit and keep < len(source) else None
    flows = np.zeros(len(source), np.int64)
    for token in track(range(len(source)), label):
        entering = layers[-1][:, token]  # [n]
        if sparse is not None:
            flows[token] = sparse.flow(entering)
        if sparse is None or flows[token] < bounds[token]:
            flows[token] = full.flow(entering)
    return flows


def upper_bounds(source: Capacities, layers: Capacities) -> NDArray[np.int64]:
    """Return min(what can leave the read-out, what can enter the token), [n]."""
    leaving = np.minimum(source, layers[0].sum(1, dtype=np.int64)).sum(dtype=np.int64)
    bounds: NDArray[np.int64] = np.minimum(leaving, layers[-1].sum(0, dtype=np.int64))
    return bounds


class _Network:
    """The edges as a graph. The lowest level holds one token at a time, so only the capacities of its edges change."""

    def __init__(self, source: Capacities, layers: Capacities) -> None:
        from scipy.sparse import csr_array

        tokens = len(source)
        capacities = np.concatenate([source[None], *layers[:-1]])  # [1 + (L - 1)·n, n]: row r is of node r's edges
        capacities[1 : 1 + tokens] *= source[: len(capacities) - 1, None] > 0  # no flow reaches the others
        node, token = capacities.nonzero()
        ends = 1 + tokens * ((node - 1) // tokens + 1) + token  # one level down
        self.sink, self.tokens = 1 + len(layers) * tokens, tokens
        edges = np.concatenate([[0], np.count_nonzero(capacities, 1), np.ones(tokens, int), [0]])
        self.graph = csr_array(
            (
                np.concatenate([capacities[node, token], np.zeros(tokens, np.int32)]),
                np.concatenate([ends, np.full(tokens, self.sink)]).astype(np.int32),
                edges.cumsum().astype(np.int32),
            ),
            shape=(self.sink + 1, self.sink + 1),
        )

    def flow(self, entering: Capacities) -> int:
        """Return the maximum flow to a token with these capacities `entering` [n] from the last layer's tokens."""
        from scipy.sparse.csgraph import maximum_flow

        self.graph.data[-self.tokens :] = entering
        return int(maximum_flow(self.graph, 0, self.sink, method="dinic").flow_value)


def _largest(layers: Capacities, keep: int) -> Capacities:
    """Return the layers with only each token's `keep` largest capacities between the first and the last."""
    inner = layers[1:-1]
    smallest = np.partition(inner, -keep, axis=-1)[..., -keep, None] if inner.size else inner
    return np.concatenate([layers[:1], np.where(inner >= smallest, inner, 0), layers[1:][-1:]])


def _integers(capacities: NDArray[np.float64], precision: float) -> Capacities:
    return np.rint(capacities * precision).astype(np.int32)
