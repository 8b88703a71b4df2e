"""Tail: the sub-network f_l of a model, from the input of block l to the scores, as a model of its own.

    tail = cv.tail(model, 6)
    tokens, others = tail.module.inputs_of(images)            # x_l: patch tokens [B, d, rows, cols], other tokens
    cv.explain(tail, tokens, "lime", inputs={"others": others})

Its images are the patch tokens at block l: a picture of d channels with one pixel per patch. The other tokens (class
token, registers) are an input of their own, which nothing removes or disturbs. The blocks before l are not run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from clairvit.errors import BadInput, NotApplicable
from clairvit.models.coerce import ModelLike, model_and_images
from clairvit.models.images import prepare
from clairvit.models.model import Layout, Model
from clairvit.models.preprocess import Preprocess
from clairvit.models.readout import BoundInputs
from clairvit.tracing.module_state import frozen_eval, own_grad_mode, this_thread_only
from clairvit.tracing.recording import Recording, record
from clairvit.tracing.structure import ModelStructure, tokens_among

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}  # of the largest score; 10 % in half precision
OTHERS = "others"  # the input of a tail that holds its tokens that are no patches


class PassedOver(nn.Module):
    """Stand in for a block that is not run: return its tokens as they are, in the form that the block returns."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.outputs = outputs  # 0: a tensor; else a tuple of so many, the tokens first

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the tokens among the arguments."""
        tokens = tokens_among(args, kwargs)
        return (tokens, *(None,) * (self.outputs - 1)) if self.outputs else tokens


class Tail(nn.Module):
    """Run a model from the input of one block on.

    The model's own forward runs on a placeholder image. Blocks before the first one are passed over, and the first one
    is given these tokens.
    """

    takes_tokens = True  # its images are no pictures, and have no usual range

    def __init__(self, whole: Model, structure: ModelStructure, layer: int, size: Sequence[int]) -> None:
        """Take a model apart.

        Args:
            whole: The model.
            structure: Its structure for images of this size.
            layer: The first block that is run.
            size: The shape of an image, [C, H, W].
        """
        super().__init__()
        facts = _facts(structure, layer)
        sites = structure.layers
        replaced = {
            id(site.block): PassedOver(outputs) for site, outputs in zip(sites[:layer], facts.outputs, strict=True)
        }
        self.inner = _with_replaced(whole.module, replaced, {})
        self.whole, self.layer = whole, layer
        self.structure = _cut(structure, layer, facts)
        self.size = tuple(size)

    @property
    def layout(self) -> Layout:
        """The tokens at the first block."""
        assert self.structure.layout is not None
        return self.structure.layout

    def split(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return tokens [B, N, d] as patch tokens [B, d, rows, cols] and the other tokens [B, k, d]."""
        patches = tokens[:, list(self.layout.patch_rows)]
        grid = self.layout.grid
        return patches.transpose(1, 2).reshape(len(tokens), -1, *grid), tokens[:, list(self.layout.other_rows)]

    def inputs_of(self, images: Any) -> tuple[Tensor, Tensor]:
        """Return what the tail is given of images: patch tokens [B, d, rows, cols] and the other tokens [B, k, d]."""
        recording = record(self.whole, prepare(images, self.whole).pixels, differentiable=False)
        x = recording.inputs[self.layer]
        assert x is not None
        return self.split(recording.as_tokens(x))

    def forward(self, pixels: Tensor, others: Tensor | None = None) -> Tensor:
        """Return the scores [n, C] of patch tokens [n, d, rows, cols] and other tokens [n, k, d]."""
        layout = self.layout
        count = len(layout.other_rows)
        if count and (others is None or others.shape[1] != count or len(others) not in (1, len(pixels))):
            given = "none" if others is None else f"a tensor of shape {list(others.shape)}"
            raise BadInput(
                f"The tail was given {given} as its {count} tokens that are no patches; expected [{len(pixels)}, "
                f"{count}, {pixels.shape[1]}]: inputs={{'{OTHERS}': …}} of tail.module.inputs_of(images)."
            )
        patches = pixels.flatten(2).transpose(1, 2)  # [n, P, d]
        parts = [patches]
        if others is not None and count:
            others = others.to(patches).expand(len(patches), -1, -1)
            parts = [others[:, : layout.prefix], patches, others[:, layout.prefix :]]
        tokens = torch.cat(parts, 1)
        if self.structure.sequence_first:
            tokens = tokens.transpose(0, 1)
        entered = False

        def enter(module: nn.Module, args: Any, kwargs: Any) -> Any:
            nonlocal entered
            replaced = tokens_among(args, kwargs)
            if entered or replaced is None:
                return None
            entered = True
            return tuple(tokens if a is replaced else a for a in args), {
                name: tokens if a is replaced else a for name, a in kwargs.items()
            }

        first = self.structure.layers[0].block
        assert first is not None
        # Before all other hooks: what they see are the tokens that the block is given.
        hook = first.register_forward_pre_hook(this_thread_only(enter), prepend=True, with_kwargs=True)
        try:
            return self.whole.scores(self.inner(pixels.new_zeros(len(pixels), *self.size)))
        finally:
            hook.remove()


@dataclass(eq=False)
class _TailFacts:
    """What was found out about the sub-network from one layer on; remembered with the model's structure."""

    outputs: tuple[int, ...]  # of each block before it, as in `PassedOver`
    error: str | None = None  # why there is no such sub-network
    is_checked: bool = False
    facts: dict[Any, Any] = field(default_factory=dict)  # of the sub-network's own structure


def _facts(structure: ModelStructure, layer: int) -> _TailFacts:
    facts: _TailFacts = structure.facts[("tail", layer)]
    return facts


def _cut(structure: ModelStructure, layer: int, facts: _TailFacts) -> ModelStructure:
    """Return the structure of the sub-network from one layer on: without the attention calls of earlier blocks."""
    first = structure.layer_calls[layer]
    passed_over = {id(site.block) for site in structure.layers[:layer]}
    sites = tuple(
        site
        for index, site in enumerate(structure.sites)
        if index >= first or site.block is None or id(site.block) not in passed_over
    )
    return replace(structure, sites=sites, plan=None, facts=facts.facts)


def _with_replaced(module: nn.Module, replaced: Mapping[int, nn.Module], copies: dict[int, nn.Module]) -> nn.Module:
    """Return a module that has others in place of some of its parts, and shares all the rest with this one."""
    if id(module) in replaced:
        return replaced[id(module)]
    if id(module) not in copies:
        children = {
            name: None if child is None else _with_replaced(child, replaced, copies)
            for name, child in module._modules.items()
        }
        copies[id(module)] = module
        if any(child is not module._modules[name] for name, child in children.items()):
            copy = type(module).__new__(type(module))
            copy.__dict__.update(module.__dict__)
            copy.__dict__["_modules"] = type(module._modules)(children)
            copies[id(module)] = copy
    return copies[id(module)]


def tail_of(recording: Recording, layer: int) -> Model:
    """Return the sub-network of a recording's model from one layer on; raise NotApplicable if there is none."""
    whole, structure = recording.model, recording.structure
    reason = _refusal(recording)
    if reason is not None:
        raise _no_tail(whole, layer, reason)
    key = ("tail", layer)
    if key not in structure.facts:
        structure.facts[key] = _TailFacts(_block_outputs(recording)[:layer])
    facts: _TailFacts = structure.facts[key]
    if facts.error is None:
        layout = structure.layout
        x = recording.inputs[layer]
        assert layout is not None
        assert x is not None
        channels = int(x.shape[-1])
        model = Model(
            module=Tail(whole, structure, layer, recording.pixels.shape[1:]),
            name=f"{whole.name} from block {layer} on",
            preprocess=Preprocess(size=layout.plane, mean=(0.0,) * channels, std=(1.0,) * channels, resize=None),
            labels=whole.labels,
            layout=layout,
            classifier=whole.classifier,
            activation=whole.activation,
            activated=whole.activated,
            through_no_grad=whole.through_no_grad,
        )
        if not facts.is_checked:
            facts.error = _difference(recording, model, layer)
            facts.is_checked = True
    if facts.error is not None:
        raise _no_tail(whole, layer, facts.error)
    return model


def _no_tail(whole: Model, layer: int, reason: str) -> NotApplicable:
    return NotApplicable(
        f"{whole.name} has no sub-network that begins with the tokens at block {layer}: {reason}. Methods that read "
        "layer maps need none.",
        methods=("ixg+plus", "attnlrp+plus"),
    )


def _refusal(recording: Recording) -> str | None:
    """Return why a model has no sub-networks of tokens, as far as its structure says."""
    structure, layout = recording.structure, recording.structure.layout
    sites = structure.layers
    if not sites or layout is None:
        return structure.attention_seen if not sites else "its patch tokens were not found"
    if structure.members:
        return f"it holds several networks side by side ({structure.members_apart})"
    if len(layout.grid) != 2:
        return "its patches are those of clips"
    if not structure.in_order or structure.region is not None:
        return "its patch tokens do not lie row by row on the whole image"
    if any(site.kind != "tokens" or site.queries != layout.tokens for site in sites):
        return "its layers do not all work on the same tokens (stages, windows)"
    if not structure.whole_blocks or len({id(site.block) for site in sites} - {id(None)}) < len(sites):
        return "its blocks are not one module each"
    if any(x is None or x.ndim != 3 for x in recording.inputs):
        return "its blocks do not take tokens [B, N, d]"
    return None


def _block_outputs(recording: Recording) -> tuple[int, ...]:
    """Return what each block returns: 0 for a tensor, else the length of a tuple whose first entry are the tokens."""
    facts = recording.structure.facts
    if "block outputs" not in facts:
        forms: dict[int, int] = {}

        def note(module: nn.Module, args: Any, output: Any) -> None:
            forms[id(module)] = 0 if isinstance(output, Tensor) else len(output)

        blocks = [site.block for site in recording.structure.layers if site.block is not None]
        hooks = [block.register_forward_hook(this_thread_only(note)) for block in blocks]
        try:
            with frozen_eval(recording.model.module), torch.no_grad():
                recording.model.logits(recording.pixels.detach()[:1])
        finally:
            for hook in hooks:
                hook.remove()
        facts["block outputs"] = tuple(forms[id(block)] for block in blocks)
    outputs: tuple[int, ...] = facts["block outputs"]
    return outputs


def _difference(recording: Recording, tail: Model, layer: int) -> str | None:
    """Return in words how a tail differs from the model that it is a part of, on the recording's first image."""
    (part, first), *_ = parts_of(recording, tail, layer, rows=[0])
    with torch.autocast(first.device.type, enabled=False):
        rerun = record(part, first, differentiable=False)
        whole = record(
            recording.model, recording.pixels.detach()[:1], differentiable=False, structure=recording.structure
        )
    pairs = [(rerun.logits, whole.logits)]
    if rerun.end is not None and whole.end is not None:
        pairs.append((rerun.end, whole.end))  # a head of zeros gives the same scores for everything
    if len(rerun.inputs) != len(recording.inputs) - layer:
        return "blocks before it are run by another way than as modules of their own"
    for values, expected in pairs:
        tolerance = TOLERANCE.get(expected.dtype, 0.1)
        if values.shape != expected.shape or (values - expected).abs().max() > tolerance * expected.abs().max():
            return "its scores depend on more than these tokens (on earlier blocks, or on the image itself)"
    return None


def parts_of(
    recording: Recording, tail: Model, layer: int, rows: Sequence[int] | None = None
) -> list[tuple[Model, Tensor]]:
    """Return a tail with the other tokens of each image, and the patch tokens [1, d, rows, cols] of that image.

    Without other tokens (a model without a class token) all images are one part.
    """
    module = tail.module
    assert isinstance(module, Tail)
    x = recording.inputs[layer]
    assert x is not None
    patches, others = module.split(recording.as_tokens(x.detach()))
    rows = range(len(patches)) if rows is None else rows
    if not others.shape[1]:
        return [(tail, patches[list(rows)])]
    return [
        (replace(tail, module=BoundInputs(module, {OTHERS: others[row : row + 1]})), patches[row : row + 1])
        for row in rows
    ]


@own_grad_mode()
def tail(model: ModelLike, layer: int) -> Model:
    """Return the sub-network f_l of a model: tokens at the input of block l in, scores out.

    A method on it is A(f_l)(x_l) of SkipPLUS, equation 3: `METHOD+layer:l` is the same map, and `METHOD+plus` the sum
    over all l. Its images are the patch tokens [B, d, rows, cols] at block l; the tokens that are no patches (class
    token, registers) are its input `others`, and stay as they are whatever is removed.

    Args:
        model: A `cv.Model`, a name for `cv.load`, or any `nn.Module`.
        layer: The first block that is run; negative numbers count from the end.

    Returns:
        A model that shares the weights of this one. `tail.module.inputs_of(images)` returns what it is given of images.

    Raises:
        NotApplicable: The model is no plain Vision Transformer, or its scores depend on more than these tokens.
        BadInput: There is no such layer.

    Example:
        >>> import clairvit as cv
        >>> pets = cv.load("pets")
        >>> tail = cv.tail(pets, 6)
        >>> tokens, others = tail.module.inputs_of("demo")
        >>> tokens.shape, others.shape
        (torch.Size([1, 192, 14, 14]), torch.Size([1, 1, 192]))
        >>> ex = cv.explain(tail, tokens, "saliency", target="Bengal", inputs={"others": others})
        >>> same = cv.explain(pets, "demo", "saliency+layer:6", target="Bengal")
        >>> bool((ex.maps - same.maps).abs().max() < 1e-4 * same.maps.max())
        True
    """
    whole, _ = model_and_images(model, [], None)
    channels, size = whole.preprocess.channels, whole.preprocess.size
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(1, channels, *size, generator=generator, dtype=torch.float32, device="cpu")
    noise = noise.to(device=whole.device, dtype=whole.dtype)
    recording = record(whole, noise, differentiable=False)
    count = len(recording.inputs)
    if not -count <= layer < count:
        raise BadInput(f"Layer {layer} was asked of a model with {count} layers; expected {-count}…{count - 1}.")
    return tail_of(recording, layer % count)
