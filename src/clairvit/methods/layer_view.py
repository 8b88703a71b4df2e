"""LayerView: the layer a method is looking at. A and G are computed once for all methods, for the rows they read.

On a GPU methods look at views of `cuda/layers.py`, which give the same by kernels, and several layers at once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from clairvit._entries import Entry, entry_values
from clairvit.cuda.kernels import inner_products
from clairvit.errors import NotApplicable
from clairvit.models.model import Layout
from clairvit.numerics import wide_product, widened
from clairvit.tracing.attention_call import AttentionCall, Rows, is_large, tile_bytes
from clairvit.tracing.attention_reductions import AttentionReductions
from clairvit.tracing.block_decomposition import BlockDecomposition
from clairvit.tracing.grid import on_grid
from clairvit.tracing.layer import Layer
from clairvit.tracing.per_block_gradient import cotangents, pool_gradients, through_block
from clairvit.tracing.recorders.base import Recorder
from clairvit.tracing.rules import RuleTable, rule_table
from clairvit.tracing.trace import Trace


def mean_of_heads(heads: Tensor) -> Tensor:
    """Return the mean over heads, [B, H, rows, N] -> [B, rows, N]."""
    return weighted_heads(heads, heads.new_full(heads.shape[:2], 1 / heads.shape[1]))


def weighted_heads(heads: Tensor, weights: Tensor) -> Tensor:
    """Return sum_h w_h M_h for weights [B, H]: as a vector × matrix product, which reads the heads once."""
    return (weights[:, None] @ heads.flatten(2)).view(len(heads), *heads.shape[2:])


def tokens_to_grid(tokens: Tensor, trace: Trace, index: int) -> Tensor:
    """Return the patch tokens of a layer's [n, N, …] on the image grid, [n, rows, cols, …]."""
    maps = on_grid(tokens, trace.in_order, trace.layers[index].grid, trace.pixels)
    if maps is None:
        raise NotApplicable(
            f"The {tokens.shape[1]} tokens of layer {index} ({len(tokens)} × for {len(trace.pixels)} images) do not "
            "form a grid on the image.",
            methods=("saliency",),
        )
    return maps


def check_plane(trace: Trace, name: str) -> None:
    """Raise NotApplicable for clips: the method is defined on rows and columns of an image."""
    if trace.pixels.ndim == 5:
        raise NotApplicable(
            f"'{name}' is defined on rows and columns of an image, and {trace.recording.model.name} takes clips, whose "
            "patches lie in frames too.",
            methods=("leave-one-out", "kernelshap", "saliency"),
        )


@dataclass(eq=False)
class RunContext:
    """What the methods of one run share beyond a layer: the trace, and per-block gradients of all layers."""

    trace: Trace
    others: Mapping[RuleTable, Trace] = field(default_factory=dict)
    _cotangents: dict[str, Callable[[int], Tensor]] = field(default_factory=dict)  # pool -> layer -> d s^l / d x^{l+1}
    _pool: list[Tensor] | None = None

    def local(self, index: int, pool: str) -> tuple[Tensor, ...]:
        """Return d s^l / d O^l of one block, shaped as the model's attention outputs."""
        if pool not in self._cotangents:
            self._cotangents[pool] = cotangents(self.trace, pool)
        return through_block(self.trace, index, self._cotangents[pool](index))

    def pool(self) -> list[Tensor]:
        """Return each layer's d s^l / d A of the attention pool."""
        if self._pool is None:
            self._pool = pool_gradients(self.trace)
        return self._pool


class LayerView:
    """What a layer map sees: `layer.A`, `layer.G`, `layer.x` … Rows are all queries, or those the head reads.

    Attributes:
        A: Attention [B, H, rows, N].
        G: The gradient of the target at the attention [B, H, rows, N].
        x: The block's input [B, N, d].
        dx: The gradient of the target at the block's input [B, N, d].
        rows: The query rows that are computed.
        index: The number of the layer, from 0.
        count: The number of layers.

    Example:
        >>> import clairvit as cv
        >>> from clairvit.methods.aggregation import Total
        >>> from clairvit.methods.registry import FORWARD
        >>> @cv.method("value-norm", output="tokens", aggregation=Total(), requires=FORWARD, class_specific=False)
        ... def value_norm(layer: cv.extend.LayerView):
        ...     return layer.x.norm(dim=-1)  # [B, N]
        >>> cv.explain("pets", "demo", "value-norm").maps.shape
        torch.Size([1, 14, 14])
    """

    def __init__(
        self, layer: Layer, context: RunContext, all_rows: LayerView | None = None, rows: Rows | None = None
    ) -> None:
        self._layer = layer
        self.context = context
        self._all_rows = all_rows  # the view of all rows, if this one has only some of them
        self._rows = rows
        self._cache: dict[Hashable, Tensor] = {}
        self._reductions: AttentionReductions | None = None
        self._decomposition: BlockDecomposition | None = None

    @property
    def layer(self) -> Layer:
        """The block with its tensors."""
        return self._layer

    @property
    def _call(self) -> AttentionCall:
        """Its attention between tokens."""
        return self.layer.between_tokens()

    @property
    def _dO(self) -> Tensor:
        """The gradient of the attention's output, [B, H, N, dh]."""
        return self.layer.dO

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the model computed its tokens."""
        return self._layer.x.dtype

    def reading_rows(self) -> LayerView:
        """Return the same layer with only the query rows that the head reads (all of them if it reads most)."""
        rows = self.context.trace.readout_rows
        return self if rows is None else self.tile(rows)

    def tile(self, rows: Rows) -> LayerView:
        """Return the same layer with only some query rows; what it caches is freed with it."""
        return type(self)(self.layer, self.context, self, rows)

    @property
    def tile_bytes(self) -> int:
        """How large a tile of its attention may be."""
        return tile_bytes(self.layer.attention, self.count)

    @property
    def is_large(self) -> bool:
        """Whether its attention is better not computed for all rows at once: read it in tiles, or as sums."""
        call = self._layer.call
        return call is not None and call.kind == "tokens" and is_large(call, self._layer.count)

    @property
    def reductions(self) -> AttentionReductions:
        """Sums over all rows of f(A, G), which need no N×N tensor; shared between methods."""
        if self._all_rows is not None:
            return self._all_rows.reductions
        if self._reductions is None:
            self._reductions = self._reductions_of(self._call, self.layer.out_gradient)
        return self._reductions

    def _reductions_of(self, call: AttentionCall, gradient: Tensor | None) -> AttentionReductions:
        return AttentionReductions(call, gradient, tile_bytes(call, self.count, sums_only=True))

    @property
    def reads_sums(self) -> bool:
        """Whether sums of a large layer cost less than its tiles, which all methods share: not on a CPU."""
        return False

    @property
    def index(self) -> int:
        return self._layer.index

    @property
    def count(self) -> int:
        return self._layer.count

    @property
    def trace(self) -> Trace:
        return self.context.trace

    @property
    def layout(self) -> Layout:
        return self.context.trace.layout

    @property
    def A(self) -> Tensor:
        """Attention, [B, H, rows, N]."""
        return self.once("A", lambda: self._call.A(self._rows))

    @property
    def S(self) -> Tensor:
        """Scores before the softmax, [B, H, rows, N]."""
        return self.once("S", lambda: self._call.S(self._rows))

    @property
    def G(self) -> Tensor:
        """dy/dA, [B, H, rows, N]."""
        return self.once("G", lambda: self._call.G(self._dO, self._rows))

    @property
    def A_mean(self) -> Tensor:
        """mean_h A, [B, rows, N]."""
        return self.weighted("A")

    @property
    def values(self) -> tuple[Tensor, Tensor]:
        """v and dy/dv = Aᵀ dO, [B, H, N, dh] each."""
        call = self._call
        return widened(call.v.detach()), wide_product(call.A().transpose(-2, -1), self._dO.detach())

    @property
    def AG_positive(self) -> Tensor:
        """relu(A * G), [B, H, rows, N], shared between methods."""
        return self.once("AG+", lambda: (self.A * self.G).clamp_(min=0))

    @property
    def AG_positive_mean(self) -> Tensor:
        """mean_h relu(A * G), [B, rows, N]."""
        return self.weighted("AG+")

    def weighted(self, entry: Entry, weights: Tensor | None = None) -> Tensor:
        """Return sum_h w_h f(A_h, G_h), [B, rows, N], for weights [B, H]; the mean over heads without them."""
        if weights is None:
            return self.once(("mean", entry), lambda: self._sum_of_heads(entry, None))
        return self._sum_of_heads(entry, weights)

    def _sum_of_heads(self, entry: Entry, weights: Tensor | None) -> Tensor:
        """Return sum_h w_h f(A_h, G_h), [B, rows, N]; the mean over heads without weights."""
        entries = self._entries(entry)
        return mean_of_heads(entries) if weights is None else weighted_heads(entries, weights)

    def column_means(self, entry: Entry) -> Tensor:
        """Return the mean over heads and all queries of f(A, G), [B, N]."""
        if self._all_rows is not None:
            return self._all_rows.column_means(entry)
        if not self.is_large:
            return self.weighted(entry).mean(1)
        return self.once(("columns", entry), lambda: self.reductions.column_means(entry))

    def _entries(self, entry: Entry) -> Tensor:
        """Return f(A, G), [B, H, rows, N]."""
        if entry == "AG+":
            return self.AG_positive
        return self.A if entry == "A" else entry_values(entry, self.A if "A" in entry else None, self.G)

    @property
    def x(self) -> Tensor:
        """The block's input, [B, N, d]."""
        return self.once_per_layer("x", lambda: widened(self._layer.x))

    @property
    def dx(self) -> Tensor:
        """dy/dx, [B, N, d]."""
        return self.once_per_layer("dx", lambda: widened(self._layer.dx))

    @property
    def x_dx(self) -> Tensor:
        """sum_d x_d dy/dx_d, [B, N]: gradient × input of the block's input."""
        return self.once_per_layer("x dx", lambda: inner_products(self._layer.x, self._layer.dx))

    def combine_tokens(
        self, function: Callable[[Tensor, Tensor], Tensor], tensors_of: Callable[[LayerView], tuple[Tensor, Tensor]]
    ) -> Tensor:
        """Return function(a, b) [B, …] for the two tensors [B, N, d] that `tensors_of` returns for the layer."""
        return function(*tensors_of(self))

    def __getitem__(self, recorder: type[Recorder]) -> Tensor:
        """Return what a recorder kept of this layer; the method must declare it in `requires`."""
        recorded = self.trace[recorder]
        value = recorded.at_layer(self.index, self.trace.recording)
        if value is None:
            _ = self.layer.x, self.layer.between_tokens()  # raise where there are no tokens
            raise recorded.missing(self.index)
        return value

    @property
    def decomposition(self) -> BlockDecomposition:
        """The block's attention and residual, taken apart; the method must require `OpLog`."""
        if self._all_rows is not None:
            return self._all_rows.decomposition
        if self._decomposition is None:
            _ = self.layer.x, self.layer.between_tokens()  # raise where there are no tokens
            self._decomposition = BlockDecomposition.of(self.trace.recording, self.index)
        return self._decomposition

    @property
    def rows(self) -> Tensor:
        """Which queries the rows of A are."""
        if isinstance(self._rows, Tensor):
            return self._rows
        tokens = self._layer.x
        first, last = (0, tokens.shape[1]) if self._rows is None else (self._rows.start, self._rows.stop)
        return torch.arange(first, last, device=tokens.device)

    def G_norm(self, p: int) -> Tensor:
        """Return the L1 or L2 norm of each head's whole gradient matrix, [B, H]."""
        if self._all_rows is not None:
            return self._all_rows.G_norm(p)
        if p == 1 and self.is_large:
            return self.once("G1", lambda: self.reductions.head_sums("|G|"))
        if p == 1:
            return self.once("G1", lambda: self.G.abs().sum((-2, -1)))
        if "G" in self._cache:
            return self.once("G2", lambda: self.G.square().sum((-2, -1)).sqrt())
        call = self._call
        # ||dO vᵀ||² = <dOᵀ dO, vᵀ v>: two dh × dh products instead of an N × N one.
        dO, v = self._dO, call.v.detach()
        square = wide_product(dO.transpose(-2, -1), dO) * wide_product(v.transpose(-2, -1), v)
        return square.sum((-2, -1)).clamp(min=0).sqrt()

    def head_weights(self, p: int) -> Tensor:
        """Return w_h = ||G_h||_p / sum_h' ||G_h'||_p, [B, H]; all 0 where there is no gradient."""
        if self._all_rows is not None:
            return self._all_rows.head_weights(p)

        def weights() -> Tensor:
            norms = self.G_norm(p)
            total = norms.sum(1, keepdim=True)
            return norms / torch.where(total == 0, torch.ones_like(total), total)

        return self.once(("head weights", p), weights)

    def next_tokens(self) -> tuple[Tensor, Tensor] | None:
        """Return the block's output and its gradient, where another block follows; None after the last."""
        if self.index + 1 >= self.count:
            return None
        following = self.trace.layers[self.index + 1]
        return widened(following.x), widened(following.dx)

    def block_output(self) -> Tensor | None:
        """Return x of the next block, or what the head reads, [B, N, d]."""
        output = self.output_tokens()
        return None if output is None else widened(output)

    def output_tokens(self) -> Tensor | None:
        """Return the same as `block_output`, in the model's precision."""
        is_last = self.index + 1 == self.count
        return self.trace.final_tokens if is_last else self.trace.layers[self.index + 1].tokens

    def at_first_layer(self, values: Tensor, otherwise: float) -> Tensor:
        """Return values [B, …] of the model's first layer, and a number in their place for all others."""
        return values if self.index == 0 else torch.full_like(values, otherwise)

    def G_under(self, rules: str | RuleTable) -> Tensor:
        """Return G under the second rule table that the method requires, [B, H, rows, N]."""
        table = rule_table(rules)
        layer = self.context.others[table].layers[self.index]
        return self.once(("G", table), lambda: layer.between_tokens().G(layer.dO, self._rows))

    def attention_at(self, index: int) -> tuple[Tensor, Tensor]:
        """Return A and G of another layer of the trace, [B, H, rows, N] each, of the same rows as of this one."""
        layer = self.trace.layers[index]
        call = layer.between_tokens()
        return call.A(self._rows), call.G(layer.dO, self._rows)

    def local_G(self, pool: str) -> Tensor:
        """Return d s^l / dA of this block alone, [B, H, all rows, N]; of an attention pool, [B, H, queries, N]."""
        if self.layout.pooling == "map" and pool == "mean":
            return self.context.pool()[self.index][..., -self.layout.tokens :]
        call = self.layer.between_tokens()
        return call.G(call.heads(self.context.local(self.index, pool)))

    def local_column_means(self, pool: str) -> Tensor:
        """Return the mean over heads and queries of relu(d s^l / dA) of this block alone, [B, N]."""
        if not self.is_large or (self.layout.pooling == "map" and pool == "mean"):
            return self.local_G(pool).clamp_(min=0).mean((1, 2))
        call = self.layer.between_tokens()
        return self._reductions_of(call, call.heads(self.context.local(self.index, pool))).column_means("G+")

    def once(self, key: Hashable, make: Callable[[], Tensor]) -> Tensor:
        """Return make(), computed once per key for all methods; rows of the view of all rows where that has it."""
        if key not in self._cache:
            shared = self._shared(key)
            self._cache[key] = make() if shared is None else shared
        return self._cache[key]

    def once_per_layer(self, key: Hashable, make: Callable[[], Tensor]) -> Tensor:
        """Return make(), computed once per key for all tiles of rows too: it must not depend on the rows."""
        return (self._all_rows or self).once(key, make)

    def _shared(self, key: Hashable) -> Tensor | None:
        """Return what this view, or the one of all rows, has computed; None if neither has."""
        if key in self._cache:
            return self._cache[key]
        value = None if self._all_rows is None else self._all_rows._shared(key)
        return None if value is None or self._rows is None else value[..., self._rows, :]


class DecoderView(LayerView):
    """An attention of a decoder: `layer.A` and `layer.G` are [B, H, Q, N] or, between queries, [B, H, Q, Q]."""

    @property
    def rows(self) -> Tensor:
        """Which queries the rows of A are."""
        return torch.arange(self.layer.attention.queries, device=self.trace.pixels.device)

    def G_under(self, rules: str | RuleTable) -> Tensor:
        """Return G under the second rule table that the method requires."""
        layer = self.context.others[rule_table(rules)].decoder[self.index]
        return layer.between_tokens().G(layer.dO)
