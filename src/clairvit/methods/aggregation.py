"""Aggregations: how layer maps become one map. Each is a frozen value; combinators such as `+plus` name some of them.

They see each layer once. Those here keep a few rows [B, N], never an N×N product: reading a map is linear, so a product
of matrices is read as vector × matrix, from the layer next to the head down to the first. (Attention flow has a file of
its own: it must see all matrices at once.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from clairvit.cuda import kernels
from clairvit.errors import BadInput
from clairvit.models.model import Layout
from clairvit.option_types import Doc


class Aggregation(Protocol):
    """A frozen dataclass whose fields are options. `row` is what it keeps from layer to layer: [B, N], or more rows."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def matrices_only(self) -> bool: ...  # it cannot combine token maps; `start_row` is where it starts

    @property
    def needs_all_rows(self) -> bool: ...  # not only those the head reads

    @property
    def ascending(self) -> bool: ...  # it takes the first layer first

    def used(self, count: int, /) -> range: ...  # the layers it combines

    def start_row(self, read: Tensor, /) -> Tensor | None: ...

    def step(self, row: Tensor | None, layer_map: Tensor, read: Tensor, /) -> Tensor: ...

    def steps(self, row: Tensor | None, layer_maps: Tensor, read: Tensor, /) -> Tensor: ...  # of several layers

    def finish(self, row: Tensor, count: int, layout: Layout, /) -> Tensor: ...  # [B, N]


@runtime_checkable
class VectorAggregation(Aggregation, Protocol):
    """An aggregation that reads a layer's matrix M as vector × matrix, so that M need not exist as a whole.

    `left` returns the vector, given M's row sums, and `advance` takes the product:

        row ← advance(row, left(row, read, M·1) · M, M·1)  =  step(row, M, read)

    Entry i of `left` depends on row i alone, so that M may be read a tile of rows at a time.
    """

    def left(self, row: Tensor | None, read: Tensor, sums: Tensor, /) -> Tensor: ...  # [1 or B, rows]

    def advance(self, row: Tensor | None, product: Tensor, sums: Tensor, /) -> Tensor: ...


def one_by_one(aggregation: Aggregation, row: Tensor | None, layer_maps: Tensor, read: Tensor) -> Tensor:
    """Return the row after several layers, one step each."""
    for layer_map in layer_maps:
        row = aggregation.step(row, layer_map, read)
    assert row is not None
    return row


@dataclass(frozen=True)
class Single:
    """One layer's map; negative numbers count from the end."""

    layer: Annotated[int, Doc("which layer; negative numbers count from the end")] = -1

    matrices_only = False
    needs_all_rows = False
    ascending = False

    def used(self, count: int) -> range:
        index = layer_index(self.layer, count)
        return range(index, index + 1)

    def start_row(self, read: Tensor) -> Tensor | None:
        return None

    def step(self, row: Tensor | None, layer_map: Tensor, read: Tensor) -> Tensor:
        return reading(layer_map, read)

    def steps(self, row: Tensor | None, layer_maps: Tensor, read: Tensor) -> Tensor:
        return one_by_one(self, row, layer_maps, read)

    def left(self, row: Tensor | None, read: Tensor, sums: Tensor) -> Tensor:
        return read

    def advance(self, row: Tensor | None, product: Tensor, sums: Tensor) -> Tensor:
        return product

    def finish(self, row: Tensor, count: int, layout: Layout) -> Tensor:
        return row


@dataclass(frozen=True)
class Total:
    """The sum over the layers from `start` on: PLUS from 0, SkipPLUS from "half" = ceil(L/2)."""

    start: Annotated[
        int | Literal["half"], Doc("the first layer of the sum; half is ceil(L/2), negative numbers count from the end")
    ] = 0
    rows: Annotated[
        Literal["read", "all"], Doc("which queries of a matrix count: those that the head reads, or the mean of all")
    ] = "read"
    mean: Annotated[bool, Doc("divide the sum by the number of layers")] = False

    matrices_only = False
    ascending = False

    @property
    def needs_all_rows(self) -> bool:
        return self.rows == "all"

    def used(self, count: int) -> range:
        return range(layer_index(self.start, count), count)

    def start_row(self, read: Tensor) -> Tensor | None:
        return None

    def step(self, row: Tensor | None, layer_map: Tensor, read: Tensor) -> Tensor:
        return self.steps(row, layer_map[None], read)

    def steps(self, row: Tensor | None, layer_maps: Tensor, read: Tensor) -> Tensor:
        each = read if len(read) == 1 else read.repeat(len(layer_maps), *[1] * (read.ndim - 1))
        maps = layer_maps.flatten(0, 1)  # [layers·B, N], or matrices
        parts = maps.mean(1) if self.rows == "all" and maps.ndim == 3 else reading(maps, each)  # [layers·B, N]
        total = parts.reshape(*layer_maps.shape[:2], -1).sum(0)
        return total if row is None else row + total

    def left(self, row: Tensor | None, read: Tensor, sums: Tensor) -> Tensor:
        return read if self.rows == "read" else torch.ones_like(read)

    def advance(self, row: Tensor | None, product: Tensor, sums: Tensor) -> Tensor:
        part = product if self.rows == "read" else product / sums.shape[-1]
        return part if row is None else row + part

    def finish(self, row: Tensor, count: int, layout: Layout) -> Tensor:
        return row / len(self.used(count)) if self.mean else row


@dataclass(frozen=True)
class Product:
    """Rollout: the product of M + residual·I over the layers, later layers on the left, read where the head reads.

    r = r⁰ prod_l (M^l + residual·I) is carried as what the identities alone pass on, i = r⁰ residual^L, and what the
    layers add to it, a:  a ← residual·a + (i + a) M,  so that a gradient of 1e-9 is not lost in the start row's 1/N.
    Where r⁰ is the same for every patch (mean pooling), what the identities give to all patches alike is no
    information and is left out of the map: the rest keeps its own scale. Elsewhere (a class token: r⁰ is zero at the
    patches; an attention pool) the map is r itself.

    Without identities and normalisation (`residual=0`) a product of gradients may be 1e-50. It is carried over its
    largest value, a power of two, per image, which is multiplied back at the end as far as the number format holds it:
    a map that would be zeros or lose digits is a multiple of itself, any other is the product bit by bit.

    A mixture alpha·M + (1 - alpha)·I is the same map times a constant: residual = (1 - alpha) / alpha, 1 for 0.5.
    `normalise="first"` divides each row of M by its sum before the identity is added, and then by 1 + residual: with
    residual 1 that is 0.5·M̄ + 0.5·I, SkipPLUS's equation 2. Rows that add up to 1 make "rows" the same.
    `normalise="columns"` is jacobgil's missing keepdim and `order="forward"` the reversed product of two of the
    papers; presets of `compat` set them, and methods have no such options.
    """

    residual: Annotated[float, Doc("how many times the identity is added to each layer")] = 1.0
    normalise: Annotated[
        Literal["rows", "first", "none", "columns"],
        Doc("what adds up to 1 in each layer: rows with the identity, rows before it is added, nothing, or columns"),
    ] = "none"
    order: Literal["later-left", "forward"] = "later-left"
    start_layer: Annotated[int, Doc("the first layer of the product; negative numbers count from the end")] = 0

    matrices_only = True
    needs_all_rows = True

    @property
    def ascending(self) -> bool:
        return self.order == "forward"

    def used(self, count: int) -> range:
        return range(layer_index(self.start_layer, count), count)

    @property
    def is_scaled(self) -> bool:
        """Whether nothing but matrices is multiplied, so that their product is carried with an exponent of its own."""
        return self.normalise == "none" and self.residual == 0

    @property
    def kept_rows(self) -> int:
        """How many rows `start_row` has."""
        return 4 if self.is_scaled else 3

    def start_row(self, read: Tensor) -> Tensor | None:
        """Return [1 or B, 3, N]: r⁰, how far the identities' part is from it, what the layers added.

        Where `is_scaled`, [1 or B, 4, N]: the last one is the power of two that what the layers added is in units of.
        """
        return torch.stack([read, *[torch.zeros_like(read)] * (self.kept_rows - 1)], 1)

    def step(self, row: Tensor | None, layer_map: Tensor, read: Tensor) -> Tensor:
        return self.steps(row, layer_map[None], read)

    def steps(self, row: Tensor | None, layer_maps: Tensor, read: Tensor) -> Tensor:
        assert row is not None
        residual = self.residual
        totals, losses = None, None
        if self.normalise == "first":
            layer_maps = layer_maps / _nonzero(layer_maps.sum(-1, keepdim=True))
        if self.normalise != "none":
            totals, losses = _row_totals(layer_maps.sum(-1), residual)  # [layers, B, N]
        row = row.expand(layer_maps.shape[1], -1, -1)
        if self.is_scaled:
            for matrix in layer_maps:
                row = _only_added(row, _plus_product(row[:, 2], row[:, :3].sum(1), matrix, residual))
            return row
        if self.normalise != "columns" and kernels.rollout_applies(layer_maps):
            from clairvit.cuda.kernels import rollout

            return rollout.product_steps(row, layer_maps, totals, losses, 1.0, residual)
        start, shift, added = row.unbind(1)  # [B, N] each
        if totals is None or losses is None:
            for matrix in layer_maps:
                passed = start + shift
                added = _plus_product(added, passed + added, matrix, residual)
                shift = shift if residual == 1 else shift + passed * (residual - 1)
            return torch.stack([start, shift, added], 1)
        for matrix, total, loss in zip(layer_maps, totals, losses, strict=True):
            passed = start + shift
            if self.normalise != "columns":
                added = _plus_product(added / total, (passed + added) / total, matrix, residual)
            else:
                added = _plus_product(added, passed + added, matrix, residual) / total
            shift = shift + passed * loss
        return torch.stack([start, shift, added], 1)

    def left(self, row: Tensor | None, read: Tensor, sums: Tensor) -> Tensor:
        """Return i + a, over the row's total where rows are normalised, [1 or B, rows]."""
        assert row is not None
        left = row[:, :3].sum(1)
        if self.normalise == "first":
            return left / (_row_totals(_is_nonzero(sums), self.residual)[0] * _nonzero(sums))
        return left / _row_totals(sums, self.residual)[0] if self.normalise == "rows" else left

    def advance(self, row: Tensor | None, product: Tensor, sums: Tensor) -> Tensor:
        assert row is not None
        residual = self.residual
        row = row.expand(len(product), -1, -1)
        if self.is_scaled:
            return _only_added(row, product)
        start, shift, added = row.unbind(1)  # [B, N] each
        passed = start + shift
        if self.normalise == "none":
            return torch.stack([start, shift + passed * (residual - 1), residual * added + product], 1)
        total, loss = _row_totals(_is_nonzero(sums) if self.normalise == "first" else sums, residual)
        over_rows = self.normalise != "columns"
        added = residual * added / total + product if over_rows else (residual * added + product) / total
        return torch.stack([start, shift + passed * loss, added], 1)

    def finish(self, row: Tensor, count: int, layout: Layout) -> Tensor:
        return sum_of_products([row], layout)


def sum_of_products(rows: Sequence[Tensor], layout: Layout) -> Tensor:
    """Return the sum [B, N] of products' rows [B, 3 or 4, N], what is the same for all patches left out.

    Powers of two are multiplied back together, so that the sum of products that are all too small is a multiple of
    itself.
    """
    if rows[0].shape[1] == 3:
        return (
            torch.stack([without_constant(row, layout) for row in rows]).sum(0)
            if len(rows) > 1
            else without_constant(rows[0], layout)
        )
    exponents = torch.stack([row[:, 3, :1] for row in rows])  # [rows, B, 1]
    unit = exponents.amax(0)
    parts = [_times_power(row[:, 2], exponent - unit) for row, exponent in zip(rows, exponents, strict=True)]
    added = torch.stack(parts).sum(0) if len(parts) > 1 else parts[0]
    limits = torch.finfo(added.dtype)
    smallest = math.log2(limits.tiny) - math.log2(limits.eps)  # below it a largest value of 1 would lose digits
    return _times_power(added, unit.clamp(min=smallest, max=-smallest))


def _only_added(row: Tensor, added: Tensor) -> Tensor:
    """Return the row [B, 4, N] after a step that keeps nothing but a product [B, N], over a power of two."""
    start, _, _, exponent = row.unbind(1)
    largest = added.abs().amax(1, keepdim=True)
    usable = largest.isfinite() & (largest > 0)
    power = torch.frexp(torch.where(usable, largest, 1.0)).exponent.to(added)
    return torch.stack([start, -start, _times_power(added, -power), exponent + power], 1)


def _times_power(values: Tensor, exponents: Tensor) -> Tensor:
    """Return values [B, N] times 2^e, e [B, 1], without rounding: the power is written as bits, in halves."""
    half = torch.div(exponents, 2, rounding_mode="floor")
    return values * _power_of_two(half) * _power_of_two(exponents - half)


def _power_of_two(exponents: Tensor) -> Tensor:
    """Return 2^e of whole numbers e in the range of the format: `torch.pow` may round."""
    double = exponents.dtype == torch.float64
    integer, bits, bias = (torch.int64, 52, 1023) if double else (torch.int32, 23, 127)
    power = (exponents.clamp(1 - bias, bias).to(integer) + bias) << bits
    return power.view(torch.float64 if double else torch.float32).to(exponents.dtype)


def without_constant(row: Tensor, layout: Layout) -> Tensor:
    """Return start + shift + added [B, N] of a product's row [B, 3, N].

    Where `start` is the same for every patch, what start + shift gives to all patches alike is left out.
    """
    start, shift, added = row.unbind(1)
    patches = start[:, layout.patch_slice]
    even = patches.amax(1, keepdim=True) == patches.amin(1, keepdim=True)  # [B, 1]
    lowest = shift[:, layout.patch_slice].amin(1, keepdim=True)
    relative = (start - patches[:, :1]) + (shift - lowest)  # zeros and differences: nothing large is left to round
    return torch.where(even, relative, start + shift) + added


@dataclass(frozen=True)
class Suffixes:
    """The sum, over the layers from `start` on, of the rollouts that begin there: PLUS of a rollout, taken literally.

    One pass yields the rows of all of them: the rollout from layer l on is the one from l + 1 on, times layer l.
    """

    start: Annotated[int | Literal["half"], Doc("the first layer of the sum of rollouts; half is ceil(L/2)")] = 0
    residual: Annotated[float, Doc("how many times the identity is added to each layer")] = 1.0
    normalise: Annotated[
        Literal["rows", "first", "none", "columns"],
        Doc("what adds up to 1 in each layer: rows with the identity, rows before it is added, nothing, or columns"),
    ] = "none"

    matrices_only = True
    needs_all_rows = True
    ascending = False

    @property
    def product(self) -> Product:
        return Product(self.residual, self.normalise)

    def used(self, count: int) -> range:
        return range(layer_index(self.start, count), count)

    def start_row(self, read: Tensor) -> Tensor | None:
        """Return [1 or B, 3, N]: no rollout yet; each step appends the next one, in as many rows as `Product` keeps."""
        return self.product.start_row(read)

    def step(self, row: Tensor | None, layer_map: Tensor, read: Tensor) -> Tensor:
        assert row is not None
        rollout = self.product.step(row[:, -self.product.kept_rows :], layer_map, read)
        return torch.cat([row.expand(len(rollout), -1, -1), rollout], 1)

    def steps(self, row: Tensor | None, layer_maps: Tensor, read: Tensor) -> Tensor:
        return one_by_one(self, row, layer_maps, read)

    def left(self, row: Tensor | None, read: Tensor, sums: Tensor) -> Tensor:
        assert row is not None
        return self.product.left(row[:, -self.product.kept_rows :], read, sums)

    def advance(self, row: Tensor | None, product: Tensor, sums: Tensor) -> Tensor:
        assert row is not None
        rollout = self.product.advance(row[:, -self.product.kept_rows :], product, sums)
        return torch.cat([row.expand(len(rollout), -1, -1), rollout], 1)

    def finish(self, row: Tensor, count: int, layout: Layout) -> Tensor:
        return sum_of_products(torch.split(row, self.product.kept_rows, 1)[1:], layout)


def reading(layer_map: Tensor, read: Tensor) -> Tensor:
    """Return [B, N] of a layer map: token maps as they are, matrices [B, rows, N] read at the rows of the head."""
    return layer_map if layer_map.ndim == 2 else (read[:, None] @ layer_map)[:, 0]


def _row_totals(sums: Tensor, residual: float) -> tuple[Tensor, Tensor]:
    """Return the row sums of M + residual·I, 1 where they are 0, and residual / total - 1, without cancellation."""
    total = sums + residual
    empty = total == 0  # a row of zeros stays one
    total = total.masked_fill_(empty, 1)
    return total, torch.where(empty, residual - 1, -sums / total)


def _nonzero(sums: Tensor) -> Tensor:
    """Return sums, 1 where they are 0: what rows are divided by, so that a row of zeros stays one."""
    return sums.masked_fill(sums == 0, 1)


def _is_nonzero(sums: Tensor) -> Tensor:
    """Return what the rows of M̄ add up to: 1, and 0 where those of M add up to 0."""
    return (sums != 0).to(sums)


def _plus_product(added: Tensor, row: Tensor, matrix: Tensor, residual: float) -> Tensor:
    """Return residual·added + row · M, [B, N]."""
    return torch.baddbmm(added[:, None], row[:, None], matrix, beta=residual)[:, 0]


def layer_index(layer: int | str, count: int) -> int:
    """Return the index of a layer that may be counted from the end; "half" is SkipPLUS's ceil(L/2).

    Raises:
        BadInput: There is no such layer.
    """
    if layer == "half":
        return min(math.ceil(count / 2), count - 1)
    layer = int(layer)
    if not -count <= layer < count:
        raise BadInput(f"Layer {layer} was asked of a model with {count} layers; expected {-count}…{count - 1}.")
    return layer % count
