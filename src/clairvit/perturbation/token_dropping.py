"""Remove patches by dropping their tokens: embed once, add positions, drop tokens, run the shorter sequence.

The model runs its own forward on a placeholder image; the input of its first block is replaced by the given tokens. As
there is no adapter per model, `select_strategy` tests this first: it compares the result with the plain forward and
with attention that is masked at the dropped tokens. Where they differ, tokens are set to zero, or not touched at all.

Variants that keep different numbers of patches can share one pass (`padded_rows`): the shorter ones are filled up with
tokens that no other token attends to. `can_pad` tests whether this model's results stay the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from clairvit.models.model import Layout
from clairvit.perturbation.attention_override import AttentionOverride, KeyMask, mask_tokens
from clairvit.perturbation.batching import out_of_memory
from clairvit.perturbation.position_slicing import PositionSlicing
from clairvit.tracing.module_state import frozen_eval, this_thread_only
from clairvit.tracing.recording import Recording, record
from clairvit.tracing.structure import ModelStructure, tokens_among


@dataclass(frozen=True)
class DropStrategy:
    """How patches are removed from this model's token sequence."""

    mode: Literal["drop", "zero", "none"] = "drop"
    positions: bool = False  # rotary or relative positions must be sliced to the kept tokens
    batch_axis: bool = False  # these positions are [1, N, d], with an axis of the batch and none of the heads
    whole_batch: bool = False  # the model reads its batch size before the first block: the placeholder is a whole batch


NO_DROPPING = DropStrategy("none")
_STRATEGIES = (
    *(
        DropStrategy("drop", positions, batch_axis, whole_batch)
        for whole_batch in (False, True)
        for positions, batch_axis in ((False, False), (True, False), (True, True))
    ),
    *(DropStrategy("zero", whole_batch=whole_batch) for whole_batch in (False, True)),
)
# What a model can raise when it is run on fewer tokens than it was built for: shapes that do not match (RuntimeError),
# its own checks (AssertionError, ValueError), a grid side that is no whole number (TypeError, ZeroDivisionError), and
# tables indexed by the number of tokens (LookupError).
_WRONG_LENGTH = (RuntimeError, ValueError, TypeError, AssertionError, LookupError, ZeroDivisionError)
_ATTENTION_OF_ANY_LENGTH = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def drop_strategy(recording: Recording) -> DropStrategy:
    """Return the model's strategy, selected once per structure, which changes with the weights.

    The few passes of the selection belong to the model: no method counts them.
    """
    facts = recording.structure.facts
    if "drop strategy" not in facts:
        facts["drop strategy"] = select_strategy(recording)
    strategy: DropStrategy = facts["drop strategy"]
    return strategy


def can_pad(recording: Recording) -> bool:
    """Return whether variants of different lengths may share a pass, tested once per structure.

    They may not where the head reads patches (a mean would count the padding) or heads are mixed after the softmax.
    """
    facts = recording.structure.facts
    if "can pad" not in facts:
        facts["can pad"] = _pads_correctly(recording, drop_strategy(recording))
    return bool(facts["can pad"])


def droppable_tokens(recording: Recording) -> Tensor | None:
    """Return the first block's input [B, N, d] where its tokens are the layout's; None: no tokens can be dropped."""
    structure, first_input = recording.structure, recording.inputs[0] if recording.inputs else None
    if structure.layout is None or first_input is None or not structure.layers or not structure.in_order:
        return None
    tokens = recording.as_tokens(first_input.detach())
    return tokens if tokens.shape[1] == structure.layout.tokens else None


@torch.no_grad()
def run_tokens(
    recording: Recording, strategy: DropStrategy, tokens: Tensor, kept: Tensor | None, visible: Tensor | None = None
) -> Tensor:
    """Return logits [V, C] for tokens [V, N, d] of which only `kept` [V, K], in order, are run; None is all of them.

    No token attends to those that are run and not `visible`, bool [V, K].
    """
    module, structure = recording.model.module, recording.structure
    layout = structure.layout
    assert layout is not None
    if kept is not None:
        tokens = tokens.gather(1, kept[..., None].expand(-1, -1, tokens.shape[-1]))  # [V, K, d]
    positions = None
    if strategy.positions and kept is not None:
        positions = PositionSlicing(kept, layout, batch_axis=strategy.batch_axis)
    placeholder = recording.pixels.detach()[:1]
    placeholder = placeholder.expand(len(tokens), -1, -1, -1) if strategy.whole_batch else placeholder
    block_input = recording.from_tokens(tokens, like=recording.inputs[0])
    if structure.writes_in_place:
        block_input = block_input.clone()  # the caller's tokens are not changed
    with ExitStack() as stack:
        stack.enter_context(frozen_eval(module))
        stack.enter_context(_restore_attributes(module))
        if positions is not None and positions.ambiguous:  # requires_grad then marks what depends on the tokens
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.enable_grad())
            block_input = block_input.clone().requires_grad_().clone()  # not a leaf: blocks may write in place
        stack.enter_context(_replace_block_input(block_input, structure, positions))
        if tokens.is_cuda:  # cuDNN's attention plans for each sequence length, which takes longer than the pass
            stack.enter_context(sdpa_kernel(_ATTENTION_OF_ANY_LENGTH))
        if visible is not None:
            stack.enter_context(KeyMask(visible))
        if positions is not None:
            stack.enter_context(positions)
        return recording.model.scores(module(placeholder)).detach()


@contextmanager
def _replace_block_input(
    block_input: Tensor, structure: ModelStructure, positions: PositionSlicing | None
) -> Iterator[None]:
    """Give the first block `block_input`, and every block position arguments that are sliced to the kept tokens."""
    started = False

    def replace_arguments(module: nn.Module, args: Any, kwargs: Any) -> Any:
        nonlocal started
        tokens = tokens_among(args, kwargs)
        if tokens is None:
            return None
        replacement = tokens
        if not started:
            started = True
            if structure.whole_blocks:
                replacement = block_input
            else:
                tokens.data = block_input.detach()  # the same tensor object: a residual outside the module sees it too
                tokens.requires_grad_(block_input.requires_grad)

        def replaced(value: Any) -> Any:
            if value is tokens:
                return replacement
            return value if positions is None else positions.slice_argument(value)

        return tuple(map(replaced, args)), {name: replaced(value) for name, value in kwargs.items()}

    blocks = {id(site.block): site.block for site in structure.layers if site.block is not None}
    hooked = list(blocks.values()) if positions is not None else list(blocks.values())[:1]
    hooks = [block.register_forward_pre_hook(this_thread_only(replace_arguments), with_kwargs=True) for block in hooked]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def kept_rows(layout: Layout, keep: Tensor) -> Tensor:
    """Return the rows [n, K] of the kept patches, bool [n, patches] with as many in each, and of all other tokens."""
    return layout.pad_patches(keep, True).nonzero()[:, 1].reshape(len(keep), -1)


def padded_rows(layout: Layout, keep: Tensor, longest: int) -> tuple[Tensor | None, Tensor]:
    """Return the rows [n, K] of the kept patches and of all other tokens, and which of them are visible, bool [n, K].

    `keep` is bool [n, patches], with any number in each; `longest` is the largest of them, and K as many as it needs.
    In shorter ones patches that are not kept follow, and are not visible. None: all tokens are run, in their own order.
    """
    visible = layout.pad_patches(keep, True)  # [n, N], in the order of the tokens
    if longest == layout.patches:
        return None, visible
    patches = visible[:, layout.patch_slice]
    order = patches.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[
        :, :longest
    ]  # the kept first, in order
    rows = torch.arange(layout.tokens, device=keep.device).expand(len(keep), -1)
    end = layout.prefix + layout.patches
    kept = torch.cat([rows[:, : layout.prefix], order + layout.prefix, rows[:, end:]], 1)
    return kept, visible.gather(1, kept)


# Selection of the strategy


@torch.no_grad()
def select_strategy(recording: Recording) -> DropStrategy:
    """Return the first strategy whose results are right on two noise images; the user's own may be blank."""
    if droppable_tokens(recording) is None:
        return NO_DROPPING
    pixels = recording.pixels
    noise = torch.randn(
        2, *pixels.shape[1:], generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu"
    ).to(pixels)
    full_precision = torch.autocast(pixels.device.type, enabled=False)  # rounding would hide differences
    with frozen_eval(recording.model.module), full_precision:  # our hooks see no other thread's passes
        reference = record(recording.model, noise, differentiable=False, structure=recording.structure)
        tokens = droppable_tokens(reference)
        assert tokens is not None
        for strategy in _STRATEGIES:
            if _is_correct(recording, strategy, tokens, reference):
                return strategy
    return NO_DROPPING


@torch.no_grad()
def _pads_correctly(recording: Recording, strategy: DropStrategy) -> bool:
    """Return whether two noise images that keep different numbers of patches can be run together."""
    layout, pixels = recording.structure.layout, recording.pixels
    if strategy.mode != "drop" or layout is None or layout.patches < 3:
        return False
    noise = torch.randn(
        2, *pixels.shape[1:], generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu"
    ).to(pixels)
    with frozen_eval(recording.model.module), torch.autocast(pixels.device.type, enabled=False):
        recorded = record(recording.model, noise, differentiable=False, structure=recording.structure)
        tokens = droppable_tokens(recorded)
        assert tokens is not None
        for counts in ((layout.patches, 1), (max(2, layout.patches // 2), 1)):
            keep = torch.zeros(2, layout.patches, dtype=torch.bool, device=tokens.device)
            for variant, count in zip(keep, counts, strict=True):
                variant[-count:] = True
            together = run_tokens(recording, strategy, tokens, *padded_rows(layout, keep, counts[0]))
            for index in range(2):
                alone = kept_rows(layout, keep[index : index + 1])
                rows = None if alone.shape[1] == layout.tokens else alone
                logits = run_tokens(recording, strategy, tokens[index : index + 1], rows)
                if not _is_close(together[index : index + 1], logits):
                    return False
    return True


def _is_correct(recording: Recording, strategy: DropStrategy, tokens: Tensor, reference: Recording) -> bool:
    """Return whether a strategy reproduces the plain forward and, where it drops tokens, masked attention."""
    try:
        with frozen_eval(recording.model.module), _last_block_outputs(recording) as plain:
            recording.model.logits(reference.pixels)
        with _last_block_outputs(recording) as rerun:
            logits = run_tokens(recording, strategy, tokens, None)
        # A head of zeros gives the same logits for everything, so that the last block is compared as well.
        if not (_is_close(logits, reference.logits) and _is_close(rerun[-1], plain[-1])):
            return False
        if strategy.mode == "zero":
            return True
        layout = reference.structure.layout
        assert layout is not None
        half = max(1, layout.patches // 2 - (layout.patches > 4))  # a number that is no square
        counts = (half, 1) if strategy.positions else (half,)  # a length of one broadcasts, so it is tested by itself
        for count in counts:  # two different sets of so many patches
            generator = torch.Generator().manual_seed(0)
            keep = torch.zeros(2, layout.patches, dtype=torch.bool)
            for variant in keep:
                variant[torch.randperm(layout.patches, generator=generator, device="cpu")[:count]] = True
            if not _drops_correctly(recording, strategy, tokens, kept_rows(layout, keep).to(tokens.device)):
                return False
        return True
    except _WRONG_LENGTH as error:
        if out_of_memory(error):
            raise
        return False  # the model cannot be run in this way: the next strategy is tried


def _drops_correctly(recording: Recording, strategy: DropStrategy, tokens: Tensor, kept: Tensor) -> bool:
    """Return whether running the kept tokens alone equals attention that is masked at the others."""
    with _last_block_outputs(recording) as outputs:
        logits = run_tokens(recording, strategy, tokens, kept)
    if len(logits) != len(tokens):
        return False
    visible = torch.zeros(tokens.shape[:2], dtype=torch.bool, device=tokens.device).scatter_(1, kept, True)
    override = AttentionOverride(len(tokens), tokens.shape[1], mask_tokens(visible))
    with _last_block_outputs(recording) as masked_outputs, override:
        masked_logits = run_tokens(recording, replace(strategy, positions=False), tokens, None)
    masked = recording.as_tokens(masked_outputs[-1])
    masked = masked.gather(1, kept[..., None].expand(-1, -1, masked.shape[-1]))  # [2, K, d]
    layout = recording.structure.layout
    if layout is not None and layout.pooling == "query" and not _is_close(logits, masked_logits):
        return False  # a decoder follows, which must do without the tokens too
    if _is_close(recording.as_tokens(outputs[-1]), masked):
        return True
    # Heads that are mixed after the softmax (CaiT) attend to masked tokens all the same. Blocks that do not depend on
    # positions leave nothing that dropping could get wrong.
    return not strategy.positions and _is_permutation_equivariant(recording, strategy, tokens, kept)


def _is_permutation_equivariant(recording: Recording, strategy: DropStrategy, tokens: Tensor, kept: Tensor) -> bool:
    """Return whether reversing the patch tokens, all or the kept ones, only reverses the last block's output."""
    layout = recording.structure.layout
    assert layout is not None

    def reversed_patches(rows: Tensor) -> Tensor:
        end = rows.shape[1] - layout.suffix
        return torch.cat([rows[:, : layout.prefix], rows[:, layout.prefix : end].flip(1), rows[:, end:]], 1)

    def last_output(tokens: Tensor, kept: Tensor | None) -> Tensor:
        with _last_block_outputs(recording) as outputs:
            run_tokens(recording, strategy, tokens, kept)
        return recording.as_tokens(outputs[-1])

    return _is_close(
        last_output(reversed_patches(tokens), None), reversed_patches(last_output(tokens, None))
    ) and _is_close(last_output(tokens, reversed_patches(kept)), reversed_patches(last_output(tokens, kept)))


@contextmanager
def _last_block_outputs(recording: Recording) -> Iterator[list[Tensor]]:
    """Yield a list to which each pass inside the `with` adds the output of the last block."""
    outputs: list[Tensor] = []

    def store(module: nn.Module, args: Any, output: Any) -> None:
        tokens = tokens_among((output,) if isinstance(output, Tensor) else tuple(output), {})
        if tokens is not None:
            outputs.append(tokens)

    block = recording.structure.layers[-1].block
    assert block is not None
    hook = block.register_forward_hook(this_thread_only(store))
    try:
        yield outputs
    finally:
        hook.remove()


def _is_close(values: Tensor, expected: Tensor) -> bool:
    """Return whether two tensors agree to 0.1 % of the largest value; 10 % in half precision."""
    if values.shape != expected.shape:
        return False
    tolerance = 1e-3 if expected.dtype in (torch.float32, torch.float64) else 0.1
    error = (values.float() - expected.float()).abs().max()
    return bool(error <= tolerance * expected.float().abs().max())


@contextmanager
def _restore_attributes(module: nn.Module) -> Iterator[None]:
    """Restore attributes that the block changes: some models cache what they computed for a number of tokens.

    Only what changed is written, so that an interruption on the way out leaves a complete model.
    """
    # Torch's own layers, most of a model's modules, cache nothing.
    modules = [part for part in module.modules() if not type(part).__module__.startswith("torch.nn.")]
    saved = [(part.__dict__, dict(part.__dict__)) for part in modules]
    saved += [
        (value, dict(value))
        for _, attributes in saved
        for name, value in attributes.items()
        if type(value) is dict and name not in ("_parameters", "_modules") and not name.endswith("hooks")
    ]
    try:
        yield
    finally:
        for current, before in saved:
            for name in [name for name in current if name not in before]:
                del current[name]
            for name, value in before.items():
                if name not in current or current[name] is not value:
                    current[name] = value
