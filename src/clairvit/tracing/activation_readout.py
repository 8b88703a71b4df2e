"""ActivationReadout: run a model up to one of its blocks and read scores off an activation there.

The pass ends where the block ends, so that everything that reads the scores (traces, rule tables, token dropping,
metrics) sees a model of the blocks up to that one, whose head is the activation. Blocks, heads and the outputs of
attention and MLP are found as for `cv.intervene`, without names.
"""

from __future__ import annotations

import contextlib
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Self, get_args

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from clairvit.errors import BadInput, CaptureError, NotApplicable, UnknownName, did_you_mean
from clairvit.models.model import Layout, Model
from clairvit.models.readout import BoundInputs, Readout, readout_text, unwrap_readout
from clairvit.models.sources.hf_outputs import writes_text
from clairvit.option_types import checked_index
from clairvit.targets.embedding import image_embedding
from clairvit.targets.token import NextToken
from clairvit.tracing import ops
from clairvit.tracing.capture import Capture
from clairvit.tracing.module_state import this_thread_only
from clairvit.tracing.recorders.residual_branches import Branch, ResidualBranches
from clairvit.tracing.recording import record
from clairvit.tracing.structure import MOST_STRUCTURES, AttentionSite, ModelStructure, model_structure, tokens_among

Where = Literal["block", "attention", "mlp", "head"]
Pool = Literal["mean", "max", "token"]


@dataclass(frozen=True)
class ActivationSite:
    """An activation [B, N, d] of a block, and how its tokens become one row [B, d].

    where: the block's output; what its attention or its MLP adds to the residual stream; the output A v of one head.
    patch: an index, row by row from 0, or (row, column), with the frame first for clips; None: pooled over the patches,
    or the class token.
    """

    layer: int
    where: Where = "block"
    head: int | None = None
    patch: int | tuple[int, ...] | None = None
    pool: Pool = "mean"

    def __post_init__(self) -> None:
        object.__setattr__(self, "layer", checked_index(self.layer, "The layer"))
        _check_choice("where", self.where, get_args(Where))
        _check_choice("pool", self.pool, get_args(Pool))
        if self.head is not None:
            object.__setattr__(self, "head", checked_index(self.head, "The head"))
        if (self.head is None) == (self.where == "head"):
            raise BadInput(
                f"where='{self.where}' and head={self.head} were given; expected a head with where='head', and none "
                "with any other."
            )
        if self.patch is None:
            return
        if self.pool != "mean":  # the default
            raise BadInput(f"patch={self.patch} and pool='{self.pool}' were given; expected one of the two.")
        if isinstance(self.patch, tuple | list):
            patch: int | tuple[int, ...] = tuple(
                checked_index(place, "A coordinate of the patch") for place in self.patch
            )
        else:
            patch = checked_index(self.patch, "The patch")
        object.__setattr__(self, "patch", patch)

    def __str__(self) -> str:
        """Return the site in words."""
        words = [f"layer {self.layer}"]
        words += [f"head {self.head}"] if self.head is not None else [self.where] * (self.where != "block")
        if self.patch is not None:
            words.append(f"patch {self.patch}")
        elif self.pool != "mean":
            words.append("class token" if self.pool == "token" else "largest patch")
        return ", ".join(words)

    def patch_index(self, grid: tuple[int, ...]) -> int:
        """Return the index of the patch on a grid; raise BadInput if it lies outside."""
        count = math.prod(grid)
        if isinstance(self.patch, int) and self.patch < count:
            return self.patch
        if isinstance(self.patch, tuple) and len(self.patch) == len(grid):
            index = 0
            for place, side in zip(self.patch, grid, strict=True):
                index = index * side + place if place < side else count
            if index < count:
                return index
        sides, axes = " × ".join(map(str, grid)), ("frame", "row", "column")[-len(grid) :]
        raise BadInput(
            f"There is no patch {self.patch}: layer {self.layer} has {sides}; give an index from 0 to {count - 1}, or "
            f"({', '.join(axes)}) up to {tuple(side - 1 for side in grid)}."
        )


def _check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise UnknownName(
            f"There is no {name}={value!r}.{did_you_mean(str(value), choices)} Choose one of: {', '.join(choices)}."
        )


@dataclass(frozen=True, eq=False)
class _Place:
    """Where a site's activation is computed, for images of one size."""

    structure: ModelStructure
    block: nn.Module
    visit: int  # which call of the block, from 1: blocks may be shared between layers
    layout: Layout  # of the layer's tokens
    branch: Branch | None = None  # of a sum inside the block


class ActivationReadout(Readout):
    """Read scores [B, C] off an activation: function(tokens [B, N, d]) -> [B, N, C], pooled over the tokens."""

    def __init__(self, model: Model, site: ActivationSite, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__(model.module, function)
        self.model, self.site = model, site
        self._places: OrderedDict[torch.Size, _Place] = OrderedDict()  # by the shape of an image

    def prepare(self, pixels: Tensor) -> None:
        """Find the block, and the sum inside it, by passes over one image [1, 3, H, W] that are made once."""
        self._places[pixels.shape[1:]] = self._find_place(pixels)
        self._places.move_to_end(pixels.shape[1:])
        while len(self._places) > MOST_STRUCTURES:
            self._places.popitem(last=False)

    def read_layout(self, layout: Layout) -> Layout | None:
        """Return the layout with the rows that are read: those of the patches, one of them, or the class token."""
        if self.site.patch is not None:
            return replace(layout, pooling="avg", read=((layout.patch_rows[self.site.patch_index(layout.grid)], 1.0),))
        pooling: Literal["token", "max", "avg"] = "avg" if self.site.pool == "mean" else self.site.pool
        return replace(layout, pooling=pooling, read=())

    def forward(self, pixels: Tensor) -> Tensor:
        """Return scores [B, C] of pixels [B, 3, H, W]."""
        place = self._place(pixels)
        with _SiteReader(place, self.site) as reader, contextlib.suppress(_BlockEndError):
            self.module(pixels)
        if reader.activation is None:
            raise CaptureError(
                f"The activation of {self.site} was not computed in this forward pass; expected the same path every "
                "time. Switch off random depth or early exits."
            )
        tokens = (
            reader.activation if self.site.where == "head" else place.structure.as_tokens(reader.activation, pixels)
        )
        return self._pooled(self.function(tokens), place)

    def _pooled(self, values: Tensor, place: _Place) -> Tensor:
        """Return [B, C] of the values of all tokens [B, N, C]."""
        layout = place.layout
        if self.site.patch is not None:
            # A product, not an index: where tokens were dropped, the constant is sliced to those that are left.
            row = layout.patch_rows[self.site.patch_index(layout.grid)]
            weight = (torch.arange(layout.tokens, device=values.device) == row).to(values.dtype)
            return (values * weight[:, None]).sum(1)
        if self.site.pool == "token":
            return values[:, 0 if layout.prefix else -layout.suffix]
        patches = values[:, layout.prefix : values.shape[1] - layout.suffix]  # fewer where some were dropped
        return patches.mean(1) if self.site.pool == "mean" else patches.amax(1)

    def _place(self, pixels: Tensor) -> _Place:
        """Return the place that `prepare` found."""
        if pixels.shape[1:] not in self._places:
            self.prepare(pixels[:1])
        return self._places[pixels.shape[1:]]

    def _find_place(self, pixels: Tensor) -> _Place:
        """Return where the activation is computed; raise BadInput or NotApplicable if the model has no such one."""
        structure = model_structure(self.model, pixels)
        _check_blocks(structure, self.site, self.model.name)
        layer = structure.layers[self.site.layer]
        assert layer.block is not None
        layout = _layer_layout(structure, layer, self.model.name)
        if self.site.pool == "token" and (readout_text(self.module) or not layout.other_rows):
            raise BadInput(f"{self.model.name} has no class token; expected pool='mean', pool='max' or patch=….")
        if self.site.patch is not None:
            self.site.patch_index(layout.grid)
        visit = sum(other.block is layer.block for other in structure.layers[: self.site.layer + 1])
        branch = self._branch(structure, pixels) if self.site.where in ("attention", "mlp") else None
        return _Place(structure, layer.block, visit, layout, branch)

    def _branch(self, structure: ModelStructure, pixels: Tensor) -> Branch:
        """Return the term of the sum that adds the attention's or the MLP's output to the residual stream."""
        key = ("branch", self.site.layer, self.site.where)
        if key not in structure.facts:
            branches = record(self.model, pixels[:1], recorders=(ResidualBranches,))[ResidualBranches]
            pair = branches.branches_in_block(self.site.layer)
            if pair is None:
                raise NotApplicable(
                    f"Layer {self.site.layer} of {self.model.name} does not add attention and MLP to the residual "
                    "stream by two sums, so that their outputs are not known exactly; expected where='block'."
                )
            structure.facts[key] = pair[0 if self.site.where == "attention" else 1]
        branch: Branch = structure.facts[key]
        return branch


def activation_model(model: Model) -> Model:
    """Return a model whose structure can be found whatever its module returns."""
    base = model.base or model
    if base.text_encoder is not None:
        return image_embedding(base)  # the image tower alone
    if writes_text(type(unwrap_readout(base.module))):
        return NextToken().readout(base)  # the blocks of the language model, for the text that was given
    if base.returns or isinstance(base.module, BoundInputs):
        return base.read("sum of all outputs", _sum_of_outputs)
    return base


def _sum_of_outputs(output: Any) -> Tensor:
    """Return the sum of all tensors in what a module returned for one image, [1]."""
    return torch.stack([tensor.sum() for tensor in _float_tensors(output)]).sum()[None]


def _float_tensors(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    if isinstance(output, Mapping):
        parts = list(output.values())
    else:
        parts = list(output) if isinstance(output, tuple | list) else list(getattr(output, "__dict__", {}).values())
    return [tensor for part in parts for tensor in _float_tensors(part)]


def _check_blocks(structure: ModelStructure, site: ActivationSite, name: str) -> None:
    """Raise unless the layer exists and its block is a module of its own."""
    count = len(structure.layers)
    structure.check_members(name, "a neuron")
    if not count:
        raise NotApplicable(
            f"No attention was seen in {name}, so that it has no blocks to read a neuron of; expected a Vision "
            "Transformer. Read what the module returns with cv.Output(function)."
        )
    if site.layer >= count:
        raise BadInput(f"There is no layer {site.layer}: {name} has {count}; give one from 0 to {count - 1}.")
    layer = structure.layers[site.layer]
    if not structure.whole_blocks or layer.block is None:
        raise NotApplicable(
            f"The blocks of {name} are no modules whose output is the next one's input, so that a block's tokens are "
            "not known exactly; expected one module per block."
        )
    if structure.sequence_first and layer.kind != "tokens":
        raise NotApplicable(
            f"{name} has blocks of [B, N, d] and of [N, B, d], and which of them layer {site.layer} is cannot be told "
            "from its shape; expected a model with one order of its axes."
        )
    if site.where == "head" and layer.kind != "tokens":
        raise NotApplicable(
            f"The attention of layer {site.layer} of {name} is not between all its tokens ({layer.kind}), so that a "
            "head has no value per token; expected where='block', 'attention' or 'mlp'."
        )


def _layer_layout(structure: ModelStructure, layer: AttentionSite, name: str) -> Layout:
    """Return where the patches lie among the tokens of a layer; later stages of a hierarchical model have no others."""
    layout = structure.layout
    if structure.region is not None:
        raise structure.region.refusal()
    if layout is None or layer.grid is None or not structure.in_order:
        raise NotApplicable(
            f"The patch tokens of {name} do not lie row by row on the image, so that patches cannot be told from "
            "other tokens; expected layout=cv.Layout(…) in cv.wrap."
        )
    return layout if layer.grid == layout.plane else Layout(layer.grid, 0, "avg")


class _BlockEndError(BaseException):
    """End a forward pass after a block. No error: it is no `Exception`, which the user's model may catch."""


class _SiteReader:
    """Keep the activation of a site, in the graph, and end the forward pass where its block ends, inside the `with`."""

    def __init__(self, place: _Place, site: ActivationSite) -> None:
        self._place, self._site = place, site
        self._visits = 0
        self._capture: _SiteCapture | None = None
        self._hooks: list[RemovableHandle] = []
        self.activation: Tensor | None = None

    def __enter__(self) -> Self:
        block = self._place.block
        self._hooks.append(block.register_forward_pre_hook(this_thread_only(self._begin), with_kwargs=True))
        self._hooks.append(block.register_forward_hook(this_thread_only(self._end), with_kwargs=True))
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._stop_capture()

    def _begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        tokens = tokens_among(args, kwargs)
        if tokens is None:
            return
        self._visits += 1
        if self._visits == self._place.visit and self._site.where != "block":
            sequence_first = self._place.structure.sequence_first and tokens.ndim == 3
            heads_apart = self._place.structure.layers[self._site.layer].heads_apart
            batch = int(tokens.shape[sequence_first])
            self._capture = _SiteCapture(batch, self._place.branch, self._site, heads_apart)
            self._capture.__enter__()  # type: ignore[no-untyped-call]

    def _end(self, module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        if self._visits != self._place.visit or tokens_among(args, kwargs) is None:
            return
        if self._capture is None:
            self.activation = tokens_among((out,) if isinstance(out, Tensor) else tuple(out), {})
        else:
            self.activation = self._capture.activation
        self._stop_capture()
        raise _BlockEndError

    def _stop_capture(self) -> None:
        capture, self._capture = self._capture, None
        if capture is not None:
            capture.__exit__(None, None, None)  # type: ignore[no-untyped-call]


class _SiteCapture(Capture):
    """Keep a head's output, or a term of a sum, of one block."""

    def __init__(self, batch: int, branch: Branch | None, site: ActivationSite, heads_apart: int) -> None:
        super().__init__(batch, heads_apart=(heads_apart,))
        self._branch, self._site = branch, site
        self._sums = -1
        self.activation: Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if ops.kind_of(func) in ops.SUMS:
            self._sums += 1
            if self._branch is not None and self._sums == self._branch.number:
                # An in-place sum would overwrite its first term.
                overwritten = self._branch.term == 0 and ops.is_in_place(func, kwargs or {})
                term = args[self._branch.term]
                self.activation = term.clone() if overwritten else term
        out = super().__torch_function__(func, types, args, kwargs)
        if self._site.head is not None and self.activation is None and self.calls:
            heads = self.calls[-1].heads(self.calls[-1].outputs)  # [B, H, N, dh]
            if self._site.head >= heads.shape[1]:
                raise BadInput(
                    f"There is no head {self._site.head}: layer {self._site.layer} has {heads.shape[1]}; give one from "
                    f"0 to {heads.shape[1] - 1}."
                )
            self.activation = heads[:, self._site.head]
        return out
