"""Tokens: a patch is taken away by taking its token away. Embed once, add positions, drop, run the shorter sequence.

The model runs its own forward on a stand-in image; where its first block is handed tokens, it gets ours instead. That
is done without an adapter, so it is tried out first: `select_strategy` compares what comes out with the plain forward
and with attention that does not look at the dropped tokens,
and settles for zeroed tokens, or nothing, where they differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from clairvit.models.model import Layout, first_scores
from clairvit.perturbation.attention_override import Rewritten, hiding
from clairvit.perturbation.batching import out_of_memory
from clairvit.perturbation.position_slicing import Positions
from clairvit.tracing.module_state import frozen_eval, this_thread_only
from clairvit.tracing.recording import Recording, record
from clairvit.tracing.structure import ModelStructure, tokens_among


@dataclass(frozen=True)
class DropStrategy:
    """How patches are taken out of this model's token stream."""

    how: Literal["drop", "zero", "none"] = "drop"
    positions: bool = False  # rotary or relative positions must be cut to the kept tokens
    whole_batch: bool = False  # the model counts its images before the first block: the stand-in is a whole batch


NO_WAY = DropStrategy("none")
_WAYS = (
    *(DropStrategy("drop", positions, whole) for whole in (False, True) for positions in (False, True)),
    *(DropStrategy("zero", False, whole) for whole in (False, True)),
)
_known: WeakKeyDictionary[nn.Module, dict[ModelStructure, DropStrategy]] = WeakKeyDictionary()


def way_of(recording: Recording) -> DropStrategy:
    """Looked up, or found by trying; remembered as long as the model is built the same.

    Its few passes of two images are the model's price and not a method's: no method counts them.
    """
    found = _known.setdefault(recording.model.module, {})
    if recording.structure not in found:
        found[recording.structure] = select_strategy(recording)
    return found[recording.structure]


def embedded(recording: Recording) -> Tensor | None:
    """The first block's input [B, N, d], where its tokens are the layout's; None: no token stream to drop from."""
    plan, first = recording.structure, recording.inputs[0] if recording.inputs else None
    if plan.layout is None or first is None or not plan.layers or not plan.in_order:
        return None
    tokens = recording.as_tokens(first.detach())
    return tokens if tokens.shape[1] == plan.layout.tokens else None


@torch.no_grad()
def run_tokens(recording: Recording, way: DropStrategy, tokens: Tensor, kept: Tensor | None) -> Tensor:
    """Logits [V, C] of token fields [V, N, d]: those of `kept` [V, K], in order, or all of them."""
    module, plan = recording.model.module, recording.structure
    assert plan.layout is not None
    if kept is not None:
        tokens = tokens.gather(1, kept[..., None].expand(-1, -1, tokens.shape[-1]))  # [V, K, d]
    positions = Positions(kept, plan.layout.tokens, plan.layout.prefix) if way.positions and kept is not None else None
    stand_in = recording.pixels.detach()[:1]
    stand_in = stand_in.expand(len(tokens), -1, -1, -1) if way.whole_batch else stand_in
    given = recording.from_tokens(tokens, like=recording.inputs[0])
    if plan.writes_in_place:
        given = given.clone()  # the caller's tokens stay what they are
    cut = positions or nullcontext()
    with (
        frozen_eval(module),
        _as_it_was(module),
        _marked(given, positions) as marked,
        _starting_from(marked, plan, positions),
        _attention_of_any_length(tokens),
        cut,
    ):
        return first_scores(module(stand_in)).detach()


def _attention_of_any_length(tokens: Tensor) -> AbstractContextManager[None]:
    """cuDNN plans its attention anew for every sequence length, which takes longer than the passes themselves."""
    if not tokens.is_cuda:
        return nullcontext()
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


@contextmanager
def _marked(given: Tensor, positions: Positions | None) -> Iterator[Tensor]:
    """Where lengths do not tell, what depends on the tokens has a gradient; it is never asked for."""
    if positions is None or not positions.ambiguous:
        yield given
        return
    with torch.inference_mode(False), torch.enable_grad():
        yield given.clone().requires_grad_().clone()  # no leaf: blocks may write in place


@contextmanager
def _starting_from(given: Tensor, plan: ModelStructure, positions: Positions | None) -> Iterator[None]:
    """The first block gets `given`; every block gets its position arguments cut to what is kept."""
    started = False

    def enter(module: nn.Module, args: Any, kwargs: Any) -> Any:
        nonlocal started
        own = tokens_among(args, kwargs)
        if own is None:
            return None
        new = own
        if not started:
            started = True
            if plan.whole_blocks:
                new = given
            else:
                own.data = given.detach()  # the very tensor, so that a residual beside the module starts from it too
                own.requires_grad_(given.requires_grad)

        def put(value: Any) -> Any:
            if value is own:
                return new
            return value if positions is None else positions.handed(value)

        return tuple(map(put, args)), {name: put(value) for name, value in kwargs.items()}

    blocks = {id(part.block): part.block for part in plan.layers if part.block is not None}
    wanted = list(blocks.values()) if positions is not None else list(blocks.values())[:1]
    hooks = [block.register_forward_pre_hook(this_thread_only(enter), with_kwargs=True) for block in wanted]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


# Trying out


@torch.no_grad()
def select_strategy(recording: Recording) -> DropStrategy:
    """The first way that gives what it must on two images of noise; the user's own may be blank, and show nothing."""
    if embedded(recording) is None:
        return NO_WAY
    own = recording.pixels
    dice = torch.Generator().manual_seed(0)
    two = torch.randn(2, *own.shape[1:], generator=dice).to(own)  # neither is the stand-in
    quiet = torch.autocast(own.device.type, enabled=False)  # what rounding hides cannot be told apart
    with frozen_eval(recording.model.module), quiet:  # our hooks see nobody else's passes
        truth = record(recording.model, two, differentiable=False)
        tokens = embedded(truth)
        assert tokens is not None
        for way in _WAYS:
            if _works(recording, way, tokens, truth):
                return way
    return NO_WAY


def _some_of(layout: Layout, count: int, device: torch.device) -> Tensor:
    """[2, prefix + count]: two different sets of patches, behind the prefix."""
    dice = torch.Generator().manual_seed(0)
    sets = [torch.randperm(layout.patches, generator=dice)[:count].sort().values for _ in range(2)]
    prefix = torch.arange(layout.prefix)
    return torch.stack([torch.cat([prefix, layout.prefix + own]) for own in sets]).to(device)


def _works(recording: Recording, way: DropStrategy, tokens: Tensor, truth: Recording) -> bool:
    try:
        if not _changes_nothing(recording, way, tokens, truth):
            return False
        if way.how == "zero":
            return True
        layout = truth.structure.layout
        assert layout is not None
        half = max(1, layout.patches // 2 - (layout.patches > 4))  # a number that is no square
        counts = (half, 1) if way.positions else (half,)  # one patch alone fits what is as long as all of them, too
        return all(_drops(recording, way, tokens, _some_of(layout, count, tokens.device)) for count in counts)
    except Exception as error:  # whatever a stranger's model raises: it cannot take them so, and the next way is tried
        if out_of_memory(error):
            raise
        return False


def _changes_nothing(recording: Recording, way: DropStrategy, tokens: Tensor, truth: Recording) -> bool:
    """Does a model that is handed all of an image's tokens make of them what it makes of the image?"""
    plain, handed = _Ends(recording), _Ends(recording)
    with frozen_eval(recording.model.module), plain:
        recording.model.logits(truth.pixels)
    with handed:
        whole = run_tokens(recording, way, tokens, None)
    # A head of zeros says the same of everything, so that the last block is asked as well.
    return _alike(whole, truth.logits) and _alike(handed.last, plain.last)


def _drops(recording: Recording, way: DropStrategy, tokens: Tensor, kept: Tensor) -> bool:
    """Does a model that is handed the kept tokens make of them what it does when nobody looks at the others?"""
    ends = _Ends(recording)
    with ends:
        short = run_tokens(recording, way, tokens, kept)
    if len(short) != len(tokens):
        return False
    if _alike(recording.as_tokens(ends.last), _looking_away(recording, way, tokens, kept)):
        return True
    # Heads that are mixed after the softmax (CaiT) look at hidden tokens all the same. A model whose blocks know no
    # places has nothing that dropping could get wrong.
    return not way.positions and _knows_no_places(recording, way, tokens, kept)


def _looking_away(recording: Recording, way: DropStrategy, tokens: Tensor, kept: Tensor) -> Tensor:
    """What the last block makes of the kept tokens when nobody looks at the others, [2, K, d]."""
    shown = torch.zeros(tokens.shape[:2], dtype=torch.bool, device=tokens.device).scatter_(1, kept, True)
    with _Ends(recording) as ends, Rewritten(len(tokens), tokens.shape[1], hiding(shown)):
        run_tokens(recording, replace(way, positions=False), tokens, None)
    end = recording.as_tokens(ends.last)
    return end.gather(1, kept[..., None].expand(-1, -1, end.shape[-1]))


def _knows_no_places(recording: Recording, way: DropStrategy, tokens: Tensor, kept: Tensor) -> bool:
    """Does the order of the patch tokens not matter, neither of all nor of some?"""
    assert recording.structure.layout is not None
    prefix = recording.structure.layout.prefix

    def turned(rows: Tensor) -> Tensor:
        return torch.cat([rows[:, :prefix], rows[:, prefix:].flip(1)], 1)

    def end(tokens: Tensor, kept: Tensor | None) -> Tensor:
        with _Ends(recording) as ends:
            run_tokens(recording, way, tokens, kept)
        return recording.as_tokens(ends.last)

    return _alike(end(turned(tokens), None), turned(end(tokens, None))) and _alike(
        end(tokens, turned(kept)), turned(end(tokens, kept))
    )


class _Ends:
    """Notes what the last block gives."""

    def __init__(self, recording: Recording) -> None:
        block = recording.structure.layers[-1].block
        assert block is not None
        self.block, self.seen = block, list[Tensor]()

    @property
    def last(self) -> Tensor:
        return self.seen[-1]

    def __enter__(self) -> _Ends:
        self.hook = self.block.register_forward_hook(this_thread_only(self._leave))
        return self

    def __exit__(self, *error: object) -> None:
        self.hook.remove()

    def _leave(self, module: nn.Module, args: Any, out: Any) -> None:
        tokens = tokens_among((out,) if isinstance(out, Tensor) else tuple(out), {})
        if tokens is not None:
            self.seen.append(tokens)


def _alike(found: Tensor, expected: Tensor) -> bool:
    if found.shape != expected.shape:
        return False
    slack = 1e-3 if expected.dtype in (torch.float32, torch.float64) else 0.1
    gap = (found.float() - expected.float()).abs().max()
    return bool(gap <= slack * expected.float().abs().max())


@contextmanager
def _as_it_was(module: nn.Module) -> Iterator[None]:
    """Some models keep what they made for a number of tokens; afterwards all is as it was before.

    Only what changed is touched, so that an interruption on the way out leaves a whole model.
    """
    # Torch's own layers, most of a model's modules, keep nothing.
    parts = [part for part in module.modules() if not type(part).__module__.startswith("torch.nn.")]
    before = [(part.__dict__, dict(part.__dict__)) for part in parts]
    before += [
        (value, dict(value))
        for _, attributes in before
        for name, value in attributes.items()
        if type(value) is dict and name not in ("_parameters", "_modules") and not name.endswith("hooks")
    ]
    try:
        yield
    finally:
        for now, then in before:
            for name in [name for name in now if name not in then]:
                del now[name]
            for name, value in then.items():
                if name not in now or now[name] is not value:
                    now[name] = value
