"""Attention flow: the layers as a network of pipes. How much can run from the head's read-out to each input token?

Nodes are (level, token); a layer's matrix says how much each token can pass on to each token one level down. A token's
score is the largest flow that reaches it when all of the network works for it alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from clairvit.errors import BadInput
from clairvit.methods.aggregation import one_by_one
from clairvit.models.model import Layout
from clairvit.perturbation.progress import track

Whole = NDArray[np.int32]  # capacities: the solver knows whole numbers only
FINEST = 1e9  # all that leaves the read-out is 1, so no sum along a flow passes 2³¹


@dataclass(frozen=True)
class Flow:
    """Maximum flow from the head's read-out to each input token; the flows are scaled to sum 1 over all tokens.

    A token passes on relu(M) + residual·I, row-normalised (residual 1 on attention is half and half). `prune` leaves
    out what passes on less than this share of a token. `grid_pool` joins k×k patches to one token first: rows are
    averaged, columns summed, so that every row still adds up to 1; its flow is then shared out evenly. `max_tokens`
    joins as many as it takes to have no more tokens than that. Capacities are whole multiples of 1/`precision`.
    """

    residual: float = 1.0
    prune: float = 0.0
    grid_pool: int = 1
    max_tokens: int | None = None
    precision: float = FINEST

    matrices_only = True
    needs_all_rows = True
    ascending = False

    def __post_init__(self) -> None:
        if self.residual < 0:
            raise BadInput(f"residual={self.residual} was given; expected 0 or more (1: attention and residual alike).")
        if not 0 <= self.prune < 1:
            raise BadInput(f"prune={self.prune} was given; expected 0 ≤ prune < 1, such as 0.0001 (0: exact).")
        if self.grid_pool < 1:
            raise BadInput(f"grid_pool={self.grid_pool} was given; expected 1 (exact), 2 or more patches a side.")
        if not 1000 <= self.precision <= FINEST:
            raise BadInput(f"precision={self.precision} was given; expected 1000 … {FINEST:.0e}.")

    def used(self, count: int) -> range:
        return range(count)

    def start_row(self, read: Tensor) -> Tensor | None:
        return read[:, None]  # [1 or B, 1, N]: the source

    def step(self, row: Tensor | None, said: Tensor, read: Tensor) -> Tensor:
        """The network so far, [B, 1 + layers·N, N]: what the source passes on, then each token, last layer first."""
        assert row is not None
        return torch.cat([row.expand(len(said), -1, -1), passed_on(said, self.residual)], 1)

    def steps(self, row: Tensor | None, several: Tensor, read: Tensor) -> Tensor:
        return one_by_one(self, row, several, read)

    def finish(self, row: Tensor, count: int, layout: Layout) -> Tensor:
        groups = patch_groups(layout, self._side(layout))
        networks = row.double().cpu().numpy()
        flows = [self._flows(one, groups, f"flow, image {i + 1} of {len(row)}") for i, one in enumerate(networks)]
        return torch.as_tensor(np.stack(flows), dtype=row.dtype, device=row.device)

    def _side(self, layout: Layout) -> int:
        """How many patches a side are joined."""
        most = layout.tokens if self.max_tokens is None else self.max_tokens
        if most <= layout.prefix:
            raise BadInput(
                f"max_tokens={most} was given for a model with {layout.prefix} tokens before the patches; expected "
                f"{layout.prefix + 1} or more."
            )
        sides = range(self.grid_pool, max(self.grid_pool, *layout.grid) + 1)
        return next(side for side in sides if patch_groups(layout, side).max() < most or side == sides[-1])

    def _flows(self, network: NDArray[np.float64], groups: NDArray[np.intp], what: str) -> NDArray[np.float64]:
        """[N] of one image's network [1 + L·N, N]."""
        if not np.isfinite(network).all():
            return np.full(len(groups), np.nan)  # whole numbers would hide it
        source, layers = pooled(network, groups)
        layers = np.where(layers < self.prune, 0, layers)
        flows = maximum_flows(_whole(source, self.precision), _whole(layers, self.precision), what=what)
        shared = (flows / np.bincount(groups))[groups]  # [N]
        total = shared.sum()
        return shared / total if total > 0 else shared


def passed_on(said: Tensor, residual: float) -> Tensor:
    """relu(M) + residual·I, row-normalised, [B, N, N]; a row of zeros stays one."""
    passing = said.clamp(min=0)  # nothing runs through a negative pipe
    passing.diagonal(dim1=1, dim2=2).add_(residual)
    sums = passing.sum(-1, keepdim=True)
    return passing / sums.masked_fill(sums == 0, 1)


def patch_groups(layout: Layout, side: int) -> NDArray[np.intp]:
    """[N]: the group of each token. Prefix tokens stay alone; at the edge of the grid groups may be smaller."""
    rows, columns = layout.grid
    across = -(-columns // side)
    down, right = np.divmod(np.arange(rows * columns), columns)
    return np.concatenate([np.arange(layout.prefix), layout.prefix + down // side * across + right // side])


def pooled(network: NDArray[np.float64], groups: NDArray[np.intp]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """What the source, [n], and each layer, [L, n, n], pass on when tokens of a group become one."""
    member = np.eye(groups.max() + 1)[groups]  # [N, n]
    source = np.maximum(network[0], 0) @ member
    layers = network[1:].reshape(-1, *member.shape[:1] * 2)  # [L, N, N]
    return source, (member / member.sum(0)).T @ layers @ member


def maximum_flows(
    source: Whole, layers: Whole, *, early_exit: bool = True, keep: int | None = None, what: str = "flow"
) -> NDArray[np.int64]:
    """The maximum flow from the source to each token below the last of `layers` [L, n, n] (top first), [n].

    Most flows are as large as what leaves the source or what can enter the token, and most of these need few pipes:
    the `keep` widest of each token are tried first. A flow that reaches the bound there is a maximum everywhere.
    """
    keep = max(32, len(source) // 6) if keep is None else keep
    bounds = upper_bounds(source, layers)
    whole = _Network(source, layers)
    thin = _Network(source, _widest(layers, keep)) if early_exit and keep < len(source) else None
    flows = np.zeros(len(source), np.int64)
    for token in track(range(len(source)), what):
        entering = layers[-1][:, token]  # [n]
        if thin is not None:
            flows[token] = thin.flow(entering)
        if thin is None or flows[token] < bounds[token]:
            flows[token] = whole.flow(entering)
    return flows


def upper_bounds(source: Whole, layers: Whole) -> NDArray[np.int64]:
    """min(what can leave the read-out, what can enter the token), [n]."""
    leaving = np.minimum(source, layers[0].sum(1, dtype=np.int64)).sum(dtype=np.int64)
    bounds: NDArray[np.int64] = np.minimum(leaving, layers[-1].sum(0, dtype=np.int64))
    return bounds


class _Network:
    """The pipes as a graph. The lowest level holds one token at a time, so only the widths of its pipes change."""

    def __init__(self, source: Whole, layers: Whole) -> None:
        from scipy.sparse import csr_array

        tokens = len(source)
        passing = np.concatenate([source[None], *layers[:-1]])  # [1 + (L - 1)·n, n]: row r is what node r passes on
        passing[1 : 1 + tokens] *= source[: len(passing) - 1, None] > 0  # nothing comes to the others
        node, token = passing.nonzero()
        ends = 1 + tokens * ((node - 1) // tokens + 1) + token  # one level down
        self.sink, self.tokens = 1 + len(layers) * tokens, tokens
        pipes = np.concatenate([[0], np.count_nonzero(passing, 1), np.ones(tokens, int), [0]])
        self.graph = csr_array(
            (
                np.concatenate([passing[node, token], np.zeros(tokens, np.int32)]),
                np.concatenate([ends, np.full(tokens, self.sink)]).astype(np.int32),
                pipes.cumsum().astype(np.int32),
            ),
            shape=(self.sink + 1, self.sink + 1),
        )

    def flow(self, entering: Whole) -> int:
        """The maximum flow to a token that the last layer's tokens pass `entering` [n] on to."""
        from scipy.sparse.csgraph import maximum_flow

        self.graph.data[-self.tokens :] = entering
        return int(maximum_flow(self.graph, 0, self.sink, method="dinic").flow_value)


def _widest(layers: Whole, keep: int) -> Whole:
    """Each token's widest pipes in the layers between the first and the last."""
    inner = layers[1:-1]
    narrowest = np.partition(inner, -keep, axis=-1)[..., -keep, None] if inner.size else inner
    return np.concatenate([layers[:1], np.where(inner >= narrowest, inner, 0), layers[1:][-1:]])


def _whole(capacities: NDArray[np.float64], precision: float) -> Whole:
    return np.rint(capacities * precision).astype(np.int32)
