"""Trace: what one forward and one backward pass recorded, under one rule table.

trace = cv.trace(model, "cat.jpg", target="Bengal")
trace.layers[3].A          # [B, H, N, N], derived on access
trace.layers[3].G          # dy/dA, exact under fused kernels too
trace.retarget("Persian")  # another backward, no other forward
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from clairvit._rng import image_seeds
from clairvit.errors import BadInput, CaptureError, NotApplicable
from clairvit.models.coerce import ModelLike, model_and_images
from clairvit.models.images import prepare
from clairvit.models.model import Layout, Model
from clairvit.numerics import index_tensor
from clairvit.targets.base import SCORES, TargetBatch
from clairvit.targets.resolve import check_same_readout, readout_model, resolve_for
from clairvit.tracing.attention_call import AttentionCall
from clairvit.tracing.decoder import check_decoder, cross_attention_row, query_weights
from clairvit.tracing.layer import Layer, gradient_at
from clairvit.tracing.module_state import own_grad_mode, translate_autograd_errors
from clairvit.tracing.recorders.base import Recorder
from clairvit.tracing.recording import R, Recording, record, recorder_of
from clairvit.tracing.rules import PLAIN, RuleTable, rule_table
from clairvit.tracing.stages import Stage
from clairvit.tracing.structure import AttentionSite, pool_row


@dataclass(frozen=True, eq=False)
class Trace:
    """Layers first to last, and gradients at both ends of the network.

    Attributes:
        recording: The forward pass, which several traces may share.
        target: What was differentiated; None for a forward only.
        rules: The rule table of the backward pass; None if there was none.
        layers: One per block, or per stage of a CNN.
        without_rule: The names of the operations that the rule table should have had a rule for, and has none.
        decoder: One per attention of a decoder (DETR), between its queries or from these to the image tokens.
        pixels: The preprocessed images, [B, 3, H, W].
        pixels_gradient: dy/dpixels, where the backward went so far.
        final_tokens: The last block's output, [B, N, d].
        final_gradient: Its gradient.
        recorders: What recorders kept of this backward; read them as `trace[OpLog]`.

    Example:
        >>> import clairvit as cv
        >>> tr = cv.trace("pets", "demo")
        >>> len(tr.layers), tr.layers[0].x.shape, tr.logits.shape
        (12, torch.Size([1, 197, 192]), torch.Size([1, 37]))
    """

    recording: Recording
    target: TargetBatch | None
    rules: RuleTable | None
    layers: tuple[Layer, ...]
    pixels: Tensor
    pixels_gradient: Tensor | None
    final_tokens: Tensor | None
    final_gradient: Tensor | None
    recorders: Mapping[type[Recorder], Recorder] = field(default_factory=dict)
    decoder: tuple[Layer, ...] = ()
    without_rule: tuple[str, ...] = ()

    def __repr__(self) -> str:
        """Return one line: model, images, layers, rules and target."""
        targets = "no target" if self.target is None else f"targets {list(self.target.names)}"
        return (
            f"Trace({self.recording.model.name!r}, pixels {tuple(self.pixels.shape)}, {len(self.layers)} layers, "
            f"rules {self.rules}, {targets})"
        )

    def __getitem__(self, recorder: type[R]) -> R:
        """Return the recorder of this class, with its values of this backward pass."""
        return recorder_of(self.recorders, recorder)

    @property
    def logits(self) -> Tensor:
        """The model's output, [B, C], outside the graph."""
        return self.recording.logits.detach()

    @functools.cached_property
    def layout(self) -> Layout:
        """Where the patch tokens are; raise NotApplicable if none were found."""
        layout, stages = self.recording.structure.layout, self.recording.structure.stages
        if layout is None and stages:
            return Layout(stages[-1].grid, 0, "avg")
        if layout is None:
            raise NotApplicable(
                f"No patch tokens were found in {self.recording.model.name} "
                f"({self.recording.structure.attention_seen}); expected a Vision Transformer, or layout=cv.Layout(…) "
                "in cv.wrap.",
                alternative="a method of pixel gradients",
            )
        return layout

    @property
    def in_order(self) -> Layout:
        """The layout, if the patch tokens lie on it row by row and cover the image; else raise NotApplicable."""
        if self.recording.structure.region is not None:
            raise self.recording.structure.region.refusal()
        if not self.recording.structure.in_order:
            raise NotApplicable(
                "The patch tokens of this model do not lie row by row on the image, or it cannot be told (they are "
                "sorted by windows, or the forward flips, turns, rolls or pads the image), so they make no map; "
                "expected layout=cv.Layout(…) in cv.wrap.",
                alternative="a method of pixel gradients",
            )
        return self.layout

    @property
    def dpixels(self) -> Tensor:
        """dy/dpixels, [B, 3, H, W]."""
        return gradient_at(self.pixels_gradient, "pixels")

    def image_seeds(self, seed: int) -> list[int]:
        """Return one seed per image, from its content; of a sub-network from the photo, not from rounded tokens."""
        photos = self.recording.photos
        return image_seeds(self.pixels if photos is None else photos, seed)

    @functools.cached_property
    def zero_gradient(self) -> Tensor:
        """For each image, whether its score has no gradient at all, so that they say nothing of the target, [B]."""
        batch = len(self.pixels)
        # A score inside the last block (`Neuron`) does not depend on the block's output, but on its attention.
        gradients = [g for g in (self.final_gradient, *(layer.out_gradient for layer in self.layers)) if g is not None]
        gradients = [g for g in gradients if len(g) % batch == 0]
        is_zero = torch.full((batch,), bool(gradients), device=self.pixels.device)
        for gradient in gradients:
            is_zero = is_zero & ~gradient.reshape(batch, -1).any(1)
            if is_zero.is_cpu and not is_zero.any():  # as a rule the first is enough; a GPU is not waited for
                break
        return is_zero

    @functools.cached_property
    def readout_weights(self) -> Tensor:
        """How much the head reads of each token, [1 or B, N]; rows of an N×N map are weighted by it."""
        layout = self.layout
        if self.recording.structure.reads_unknown:
            raise NotApplicable(
                "Which tokens the scores read cannot be told, because the forward leaves torch after its blocks; "
                "expected the layout with its pooling: cv.wrap(…, layout=cv.Layout(grid=…, prefix=…, pooling=…)).",
                alternative="a perturbation method",
            )
        if layout.pooling == "max":
            raise NotApplicable(
                "The score is a maximum over the patches, so that another row of attention is read in each image and "
                "channel; expected a mean, a class token or one patch: pool='mean', pool='token' or patch=….",
                alternative="a gradient method",
            )
        if layout.pooling == "map":
            return pool_row(self.recording.pools, layout)
        check_decoder(self.recording.decoder, layout)
        if layout.pooling == "query":
            return cross_attention_row(self.recording.decoder, self.query_weights)
        return _readout_row(layout, torch.promote_types(self.logits.dtype, torch.float32), self.logits.device)

    @functools.cached_property
    def query_weights(self) -> Tensor:
        """How much the score reads of each query of the decoder, [1 or B, Q]."""
        last = self.decoder[-1]
        return query_weights(last.attention, last.out_gradient, self.layout)

    @functools.cached_property
    def readout_rows(self) -> Tensor | None:
        """The few rows the head reads; None if it reads most of them."""
        if self.layout.pooling in ("map", "query"):
            return None
        rows = [index for index, _ in self.layout.read]
        reads_few = 0 < len(rows) < self.layout.tokens // 2
        return index_tensor(tuple(rows), self.pixels.device) if reads_few else None

    @own_grad_mode()
    def retarget(self, target: Any, *, score: str | None = None) -> Trace:
        """Return the trace of another target on the same forward: one more backward.

        Args:
            target: As in `cv.trace`; it reads the same output of the model as the trace's own.
            score: logit, prob or logprob; None keeps the trace's own, where the target has that kind.

        Raises:
            BadInput: The target reads another output of the model, such as a neuron or a region.
        """
        check_same_readout(self.recording.model, target)
        own = self.target.score if self.target is not None and self.target.score in SCORES else None
        resolved = one_target(self.recording, target, score or own, single=len(self.pixels) == 1)
        return run_backward(self.recording, resolved, self.rules)

    @own_grad_mode()
    def rerun(
        self, other: Tensor, rules: str | RuleTable | None = PLAIN, *, scope: GradientScope | None = None
    ) -> Trace:
        """Return the trace of the same model and target on other inputs.

        These are pixels [variants·B, 3, H, W], all images of a variant, then the next; or tokens [variants·B, N, d] at
        the first block. Each variant costs a forward and a backward (just a forward with `rules=None`), counted with
        this trace's own; the graph is freed.
        """
        start = self.recording.from_tokens(other, like=self.recording.inputs[0]) if other.ndim == 3 else None
        pixels = (
            other
            if start is None
            else self.pixels.repeat(len(other) // len(self.pixels), *(1,) * (self.pixels.ndim - 1))
        )
        recorded = functools.partial(
            record,
            rules=(rules or PLAIN,),
            differentiable=rules is not None,
            start=start,
            structure=self.recording.structure if pixels.shape[1:] == self.pixels.shape[1:] else None,
        )
        recording, target = self.record_variants(pixels, recorded)
        self.recording.backwards += len(pixels) // len(self.pixels) if rules is not None else 0
        return run_backward(recording, target, rules, keep=False, scope=scope or EVERYTHING)

    def record_variants(
        self, pixels: Tensor, make: Callable[[Model, Tensor], Recording]
    ) -> tuple[Recording, TargetBatch]:
        """Return a recording of other pixels as in `rerun`, and the target for it; its forwards are counted here."""
        assert self.target is not None
        variants = len(pixels) // len(self.pixels)
        self.recording.forwards += variants
        target = self.target.take([*range(len(self.pixels))] * variants)
        return make(self.recording.model, pixels.to(self.pixels.dtype)), target


@functools.lru_cache(maxsize=64)
def _readout_row(layout: Layout, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the weight of each token that the head reads, [1, N]; shared, never to be written to."""
    with torch.inference_mode(False):
        row = torch.zeros(layout.tokens, dtype=dtype)
        for index, weight in layout.read:
            row[index] = weight
        return row[None].to(device)


@own_grad_mode()
def trace(
    model: ModelLike,
    images: Any,
    target: Any = None,
    rules: str | RuleTable = PLAIN,
    *,
    score: str | None = None,
    recorders: Iterable[type[Recorder]] = (),
    inputs: Mapping[str, Any] | None = None,
) -> Trace:
    """Run one forward and one backward pass over one image or a batch and record what the methods read.

    Args:
        model: A `cv.Model`, a name for `cv.load`, or any `nn.Module`.
        images: As in `cv.explain`; all of them are one batch.
        target: What is differentiated, as in `cv.explain`: one target per image.
        rules: The rule table of the backward pass: "plain" is autograd's own, the others are in `tracing/rules`.
        score: logit, prob or logprob; None is the target's own: the logit, or the cosine of a prompt.
        recorders: What to record beyond block inputs and attention; read it as `trace[OpLog]`.
        inputs: As in `cv.explain`.

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
    table = rule_table(rules)
    model, images = model_and_images(model, images, inputs)
    model = readout_model(model, target)
    batch = prepare(images, model)
    recording = record(model, batch.pixels, rules=(table,), recorders=recorders)
    recording.structure.check_rules(table, "this trace")
    return run_backward(recording, one_target(recording, target, score, single=batch.single), table)


def one_target(recording: Recording, target: Any, score: str | None, *, single: bool) -> TargetBatch:
    """Return the one target that is meant for a recording's images."""
    targets = resolve_for(recording.model, target, recording.logits.detach(), score=score, single=single)
    if len(targets) != 1:
        raise BadInput(
            f"{len(targets)} targets were given for one trace; expected one for each image. "
            "Call trace.retarget(target) for every further target: it costs a backward only."
        )
    return replace(targets[0], score_is_default=False)  # no method prefers another kind: the backward is done


@dataclass(frozen=True)
class GradientScope:
    """How far back a backward goes (layer `first`), and where it leaves gradients: attention, tokens, pixels.

    `embedding` is where the pixels become patches, a place of the recorder `PatchEmbedding`.
    """

    first: int = 0
    attention: bool = True
    tokens: bool = True
    pixels: bool = True
    embedding: bool = True


EVERYTHING = GradientScope()


def run_backward(
    recording: Recording,
    target: TargetBatch | None,
    rules: str | RuleTable | None = PLAIN,
    *,
    keep: bool = True,
    scope: GradientScope = EVERYTHING,
    recorders: Collection[type[Recorder]] | None = None,
) -> Trace:
    """Return the trace of one target; `rules=None` makes no backward, `keep=False` frees the graph.

    `recorders` are those that are read of this backward; all of the recording if none are named.
    """
    table = None if rules is None else rule_table(rules)
    read = {kind: r for kind, r in recording.recorders.items() if recorders is None or kind in recorders}
    gradients = {}
    without_rule: tuple[str, ...] = ()
    if target is not None and table is not None:
        without_rule = recording.operations_without_rule(table)
        gradients = _gradients(recording, target, table, scope, list(read.values()), keep=keep)

    calls, structure = recording.calls, recording.structure

    def gradient_of(tensor: Tensor | None) -> Tensor | None:
        if tensor is None or id(tensor) not in gradients:
            return None
        gradient = gradients[id(tensor)]
        return torch.zeros_like(tensor) if gradient is None else gradient

    def heads_gradient(call: AttentionCall) -> Tensor | None:
        outputs = [gradient for gradient in map(gradient_of, call.outputs) if gradient is not None]
        return call.heads(outputs) if len(outputs) == len(call.outputs) else None

    def tokens_of(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else structure.as_tokens(tensor, recording.pixels)

    sites: tuple[AttentionSite | Stage, ...] = structure.stages or structure.layers
    layers = tuple(
        Layer(
            index=index,
            count=len(recording.inputs),
            call=calls[index] if calls else None,
            grid=site.grid,
            name=site.name if isinstance(site, Stage) else "",
            tokens=None if x is None else tokens_of(x.detach()),
            tokens_gradient=tokens_of(gradient_of(x)),
            out_gradient=heads_gradient(calls[index]) if calls else None,
        )
        for index, (x, site) in enumerate(zip(recording.inputs, sites, strict=True))
    )
    decoder = tuple(
        Layer(index, len(recording.decoder), call, None, "", None, None, heads_gradient(call))
        for index, call in enumerate(recording.decoder)
    )
    result = Trace(
        recording=recording,
        target=target,
        rules=table,
        layers=layers,
        pixels=recording.pixels.detach(),
        pixels_gradient=gradient_of(recording.pixels),
        final_tokens=tokens_of(None if recording.end is None else recording.end.detach()),
        # None where the score is read inside the last block (`Neuron`) and does not depend on its output.
        final_gradient=tokens_of(None if recording.end is None else gradients.get(id(recording.end))),
        recorders={kind: recorder.after_backward(recording, gradient_of) for kind, recorder in read.items()},
        decoder=decoder,
        without_rule=without_rule,
    )
    if not keep:
        recording.release_graph()
    return result


def _gradients(
    recording: Recording,
    target: TargetBatch,
    rules: RuleTable,
    scope: GradientScope,
    recorders: Sequence[Recorder],
    *,
    keep: bool,
) -> dict[int, Tensor | None]:
    """Return tensor id -> gradient of the sum of the images' scores, one backward; None where no gradient arrives."""
    calls = (*recording.calls[scope.first :], *recording.decoder) if scope.attention else ()
    wanted = [output for call in calls for output in call.outputs]
    wanted += [x for x in recording.inputs[scope.first :] if x is not None] if scope.tokens else []
    wanted += [recording.pixels] if scope.pixels else []
    tensors = {id(tensor): tensor for tensor in wanted}
    if not tensors and not scope.embedding:
        return {}
    for recorder in recorders:
        tensors |= {id(tensor): tensor for tensor in recorder.differentiated(scope)}
    if recording.end is not None:
        tensors[id(recording.end)] = recording.end
    # What does not depend on the image (a decoder's learned queries) has no gradient: zero, as where none arrives.
    dependent = [tensor for tensor in tensors.values() if tensor.requires_grad]
    if not dependent and recording.differentiable:  # no embedding was seen
        return dict.fromkeys(tensors)
    for recorder in recorders:
        recorder.before_backward()
    if not recording.differentiable or rules not in recording.rules:
        recorded = ", ".join(map(str, recording.rules)) if recording.differentiable else "no gradients"
        raise CaptureError(
            f"This recording has a graph for {recorded}; '{rules}' was asked of it. Record again with rules='{rules}'."
        )
    if recording.switch is not None:
        recording.switch.table = rules
    y = target(recording.logits)
    y = (y / y.detach().where(y != 0, torch.ones_like(y))).sum() if rules.unit else y.sum()
    if not y.requires_grad:
        raise CaptureError(
            "The target's score does not depend on the image in a differentiable way; expected a score computed from "
            "the logits with torch operations. Check the target function, or look for torch.no_grad() in the model."
        )
    recording.backwards += 1
    with translate_autograd_errors():
        gradients = torch.autograd.grad(y, dependent, retain_graph=keep, allow_unused=True)
    by_id: dict[int, Tensor | None] = dict.fromkeys(tensors)
    return by_id | {id(tensor): gradient for tensor, gradient in zip(dependent, gradients, strict=True)}
