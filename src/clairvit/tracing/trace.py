"""Trace: what one forward and one backward pass recorded, under one rule table.

tr = cv.trace(model, "cat.jpg", target="Bengal")
tr.layers[3].A          # [B, H, N, N], derived when asked for
tr.layers[3].G          # dy/dA, exact under fused kernels too
tr.retarget("Persian")  # another backward, no other forward
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from clairvit.errors import BadInput, NotApplicable, UnknownName, did_you_mean
from clairvit.models.coerce import ModelLike, as_images, as_model
from clairvit.models.images import prepare
from clairvit.models.layout import Layout
from clairvit.models.model import Model
from clairvit.targets.target import Target, resolve
from clairvit.tracing.attention import AttentionCall
from clairvit.tracing.layer import Layer, gradient_at
from clairvit.tracing.module_state import own_grad_mode
from clairvit.tracing.parts import AttentionSite
from clairvit.tracing.pooling import pool_row
from clairvit.tracing.recorders.bias_terms import Biases
from clairvit.tracing.recording import Recording, record
from clairvit.tracing.rules import PARAMETRIC_TABLES, TABLES
from clairvit.tracing.stages import Stage


@dataclass(frozen=True, eq=False)
class Trace:
    """Layers first to last, and what the gradient says at both ends of the network.

    Attributes:
        layers: The layers, first to last: `.A`, `.G`, `.x`, `.dx`, `.q`, `.k`, `.v`.
        target: What was differentiated; None: a forward pass only.
        rules: The rule table of the backward pass.
        pixels: The normalised images [B, 3, H, W].

    Example:
        >>> import clairvit as cv
        >>> tr = cv.trace("pets", "demo")
        >>> len(tr.layers), tr.layers[0].x.shape, tr.logits.shape
        (12, torch.Size([1, 197, 192]), torch.Size([1, 37]))
    """

    recording: Recording
    target: Target | None  # None: a forward only
    rules: str | None  # None: no backward was made
    layers: tuple[Layer, ...]
    pixels: Tensor  # [B, 3, H, W]
    pixels_gradient: Tensor | None
    embedding_gradient: Tensor | None  # shaped as recording.embedding.made
    final_tokens: Tensor | None  # [B, N, d] the last block's output
    final_gradient: Tensor | None
    normed: Tensor | None  # [B, N, d] the last block's normalised input; where patches are averaged, its output
    normed_gradient: Tensor | None
    biases: Mapping[str, Biases] = field(default_factory=dict)  # what the layers' own biases add, where asked for
    bias_maps: tuple[Tensor, Tensor] | None = None  # all biases as a picture [B, H, W], and their sum [B]

    def __repr__(self) -> str:
        """Return one line: model, images, layers, rules and target."""
        targets = "no target" if self.target is None else f"targets {list(self.target.names)}"
        return (
            f"Trace({self.recording.model.name!r}, pixels {tuple(self.pixels.shape)}, {len(self.layers)} layers, "
            f"rules {self.rules}, {targets})"
        )

    @property
    def logits(self) -> Tensor:
        return self.recording.logits.detach()

    @property
    def layout(self) -> Layout:
        layout, stages = self.recording.structure.layout, self.recording.structure.stages
        if layout is None and stages:
            return Layout(stages[-1].grid, 0, "avg")
        if layout is None:
            raise NotApplicable(
                f"No patch tokens were found in {self.recording.model.name} ({len(self.layers)} attention calls seen); "
                "expected a Vision Transformer. Use saliency, or pass layout=cv.Layout(…) to cv.wrap."
            )
        return layout

    @property
    def in_order(self) -> Layout:
        """The layout, if the patch tokens lie on it row by row."""
        if not self.recording.structure.in_order:
            raise NotApplicable(
                "The patch tokens of this model do not come row by row after the prefix (a class token at the end, or "
                "tokens sorted by windows), so they make no map. Use saliency, or pass layout=cv.Layout(…) to cv.wrap."
            )
        return self.layout

    @property
    def dpixels(self) -> Tensor:
        """dy/dpixels, [B, 3, H, W]."""
        return gradient_at(self.pixels_gradient, "pixels")

    @functools.cached_property
    def blank(self) -> list[bool]:
        """Images whose score has no gradient at all: nothing that is read off the gradient speaks of the target."""
        own = [self.final_gradient] if self.final_gradient is not None else [x.out_gradient for x in self.layers]
        batch = len(self.pixels)
        found = [x.reshape(batch, -1).any(1) for x in own if x is not None and len(x) % batch == 0]
        return torch.stack(found).any(0).logical_not().tolist() if found else [False] * batch

    @functools.cached_property
    def read(self) -> Tensor:
        """[1 or B, N]: how much the head reads of each token's row; rows of an N×N map are weighted so."""
        layout = self.layout
        if layout.pooling == "map":
            return pool_row(self.recording.pools, layout)
        row = self.logits.new_zeros(layout.tokens, dtype=_working(self.logits.dtype))
        for index, weight in layout.read:
            row[index] = weight
        return row[None]

    @functools.cached_property
    def read_rows(self) -> Tensor | None:
        """The few rows the head reads, or None if it reads most of them."""
        if self.layout.pooling == "map":
            return None
        rows = [index for index, _ in self.layout.read]
        few = 0 < len(rows) < self.layout.tokens // 2
        return torch.tensor(rows, device=self.pixels.device) if few else None

    @own_grad_mode()
    def retarget(self, target: Any, *, score: str | None = None) -> Trace:
        """The same forward, another target: one more backward."""
        kind = score or (self.target.score if self.target else "logit")
        return run_backward(
            self.recording, one_target(self.recording, target, kind, single=len(self.pixels) == 1), self.rules
        )

    @own_grad_mode()
    def again(self, other: Tensor, rules: str | None = "plain", *, reach: GradientScope | None = None) -> Trace:
        """The same model and target on other pixels [variants·B, 3, H, W]: all images of a variant, then the next.

        Or other tokens [variants·B, N, d] at the first block. Each variant costs a forward and a backward (just a
        forward with `rules=None`), counted with this trace's own; the graph is freed.
        """
        start = self.recording.from_tokens(other, like=self.recording.inputs[0]) if other.ndim == 3 else None
        pixels = other if start is None else self.pixels.repeat(len(other) // len(self.pixels), 1, 1, 1)
        how = functools.partial(record, tables=(rules or "plain",), differentiable=rules is not None, start=start)
        made, target = self.rerecorded(pixels, how)
        self.recording.backwards += len(pixels) // len(self.pixels) if rules is not None else 0
        return run_backward(made, target, rules, keep=False, reach=reach or EVERYTHING)

    def rerecorded(self, pixels: Tensor, how: Callable[[Model, Tensor], Recording]) -> tuple[Recording, Target]:
        """A recording of other pixels as in `again`, with the target for it; its forwards are counted here."""
        assert self.target is not None
        variants = len(pixels) // len(self.pixels)
        self.recording.forwards += variants
        target = self.target.take([*range(len(self.pixels))] * variants)
        return how(self.recording.model, pixels.to(self.pixels.dtype)), target


@own_grad_mode()
def trace(model: ModelLike, images: Any, target: Any = None, rules: str = "plain", *, score: str = "logit") -> Trace:
    """Run one forward and one backward pass over one image or a batch and record what the methods read.

    Args:
        model: A `cv.Model`, a name for `cv.load`, or any `nn.Module`.
        images: As in `cv.explain`; all of them are one batch.
        target: What is differentiated, as in `cv.explain`: one target per image.
        rules: The rule table of the backward pass: "plain" is autograd's own, the others are in `tracing/rules`.
        score: logit, prob or logprob.

    Returns:
        A `Trace`: `.layers[i].A` and `.G` (attention and its gradient), `.x`, `.dx`, `.q`, `.k`, `.v`.

    Raises:
        UnknownName: A rule table, model or class that does not exist.
        BadInput: An image or target that cannot be used.
        CaptureError: The model's attention cannot be seen.

    Example:
        >>> import clairvit as cv
        >>> tr = cv.trace("pets", "demo", target="Bengal")
        >>> tr.layers[3].A.shape
        torch.Size([1, 3, 197, 197])
        >>> tr.retarget("Persian").target.names  # another backward pass, no other forward pass
        ('Persian',)
    """
    check_rules(rules)
    images = as_images(images)
    model = as_model(model, images)
    batch = prepare(images, model)
    recording = record(model, batch.pixels, tables=(rules,))
    return run_backward(recording, one_target(recording, target, score, single=batch.single), rules)


def check_rules(rules: str) -> None:
    if rules.partition("(")[0] not in (PARAMETRIC_TABLES if "(" in rules else TABLES):
        raise UnknownName(
            f"There is no rule table '{rules}'; expected one of {', '.join(TABLES)}.{did_you_mean(rules, TABLES)}"
        )


def one_target(recording: Recording, target: Any, score: str, *, single: bool) -> Target:
    found = resolve(
        target,
        recording.logits.detach(),
        recording.model.labels,
        score=score,
        classifier=recording.model.classifier,
        single=single,
        activation=recording.model.activation,
    )
    if len(found) != 1:
        raise BadInput(
            f"{len(found)} targets were given for one trace; expected one for each image. "
            "Call trace.retarget(target) for every further target: it costs a backward only."
        )
    return found[0]


@dataclass(frozen=True)
class GradientScope:
    """How far back a backward goes (layer `first`), and where it leaves gradients: attention, tokens, pixels."""

    first: int = 0
    attention: bool = True
    tokens: bool = True
    pixels: bool = True


EVERYTHING = GradientScope()


def run_backward(
    recording: Recording,
    target: Target | None,
    rules: str | None = "plain",
    *,
    keep: bool = True,
    reach: GradientScope = EVERYTHING,
) -> Trace:
    """The backward of one target through a recording; `rules=None` makes no backward, `keep=False` frees the graph."""
    calls, plan = recording.calls, recording.structure
    wanted = [call.out for call in calls[reach.first :]] if reach.attention else []
    wanted += [x for x in recording.inputs[reach.first :] if x is not None] if reach.tokens else []
    wanted += [recording.pixels] if reach.pixels else []
    made = recording.embedding.made if reach.pixels and recording.embedding is not None else None
    wanted += [made] if made is not None and made.requires_grad and all(made is not x for x in wanted) else []
    ends = [t for t in (recording.end, recording.normed) if t is not None and not any(t is w for w in wanted)]
    of: dict[int, Tensor | None] = {}
    if target is not None and rules is not None and wanted:
        asked = [*wanted, *ends]
        # What does not depend on the image (a decoder's learned queries) has no gradient: zero, as where none arrives.
        dependent = [tensor for tensor in asked if tensor.requires_grad]
        gradients = recording.gradients(target, rules, dependent, keep=keep)
        of = {id(tensor): None for tensor in asked}
        of |= {id(tensor): gradient for tensor, gradient in zip(dependent, gradients, strict=True)}

    def shaped(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else recording.as_tokens(tensor)

    def gradient_of(tensor: Tensor | None) -> Tensor | None:
        if tensor is None or id(tensor) not in of:
            return None
        found = of[id(tensor)]
        return torch.zeros_like(tensor) if found is None else found

    def heads_gradient(call: AttentionCall) -> Tensor | None:
        found = gradient_of(call.out)
        return None if found is None else call.heads(found)

    places: tuple[AttentionSite | Stage, ...] = plan.stages or plan.layers
    layers = tuple(
        Layer(
            index=index,
            count=len(recording.inputs),
            call=calls[index] if calls else None,
            grid=part.grid,
            name=part.name if isinstance(part, Stage) else "",
            tokens=None if x is None else shaped(x.detach()),
            tokens_gradient=shaped(gradient_of(x)),
            out_gradient=heads_gradient(calls[index]) if calls else None,
            middle=shaped(recording.middles.get(index)),
        )
        for index, (x, part) in enumerate(zip(recording.inputs, places, strict=True))
    )
    found_trace = Trace(
        recording=recording,
        target=target,
        rules=rules,
        layers=layers,
        pixels=recording.pixels.detach(),
        pixels_gradient=gradient_of(recording.pixels),
        embedding_gradient=gradient_of(made),
        final_tokens=shaped(None if recording.end is None else recording.end.detach()),
        final_gradient=shaped(gradient_of(recording.end)),
        normed=shaped(None if recording.normed is None else recording.normed.detach()),
        normed_gradient=shaped(gradient_of(recording.normed)),
        biases={
            kind: ledger.by_layer([c.block for c in calls], recording.pixels)
            for kind, ledger in recording.ledgers.items()
        },
        bias_maps=None if recording.bias_maps is None else recording.bias_maps.told(),
    )
    if not keep:
        recording.let_go()
    return found_trace


def _working(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
