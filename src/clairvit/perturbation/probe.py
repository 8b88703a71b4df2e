"""Probe: what does the model say when only these patches are left? The one question under every sampling method.

with probing(trace, "token", what="lime", forwards=1000, seed=0, aside=aside) as probe:
    scores = probe.keeping(keep)             # bool [B or 1, V, patches] -> [B, V]
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from clairvit.errors import BadInput, NotApplicable
from clairvit.models.model import Layout
from clairvit.perturbation.aside import MapResult
from clairvit.perturbation.attention_override import Rewrite, Rewritten
from clairvit.perturbation.batching import BatchBudget, current_pace, in_batches
from clairvit.perturbation.progress import report_progress
from clairvit.perturbation.removal import background, check_removal, on_pixels
from clairvit.perturbation.rng import image_seeds
from clairvit.perturbation.road import imputed
from clairvit.perturbation.score_collector import Found, ScoreCollector, Value, in_order
from clairvit.perturbation.token_dropping import NO_WAY, DropStrategy, embedded, run_tokens, way_of
from clairvit.targets.base import Target
from clairvit.tracing.module_state import frozen_eval
from clairvit.tracing.trace import Trace

TOKENS_AT_ONCE = {"cpu": 16 * 197, "cuda": 512 * 197}  # keeps the processor busy, and its caches warm


class Probe:
    """Scores of a trace's target under removals. Counts its passes with the trace's own."""

    def __init__(self, trace: Trace, removal: str, seed: int, tell: Callable[[int], None]) -> None:
        assert trace.target is not None
        self.trace, self.removal, self.seed, self.tell = trace, removal, seed, tell
        self.target: Target = trace.target
        self.pixels = trace.pixels
        self.size = (int(self.pixels.shape[-2]), int(self.pixels.shape[-1]))
        self.layout: Layout = trace.layout
        self.passed = 0  # images that went through the model
        self.way: DropStrategy = way_of(trace.recording) if removal == "token" else NO_WAY
        self.tokens = embedded(trace.recording) if self.way.how != "none" else None
        self._room = BatchBudget(TOKENS_AT_ONCE.get(self.pixels.device.type, TOKENS_AT_ONCE["cuda"]))
        self._background: Tensor | None = None
        self._tally = ScoreCollector(trace.target, trace.logits)

    @property
    def grid(self) -> tuple[int, int]:
        return self.layout.grid

    @property
    def patches(self) -> int:
        return self.layout.patches

    @property
    def paints(self) -> bool:
        """Are patches painted over with a background, so that they can also be half gone?"""
        return self.tokens is None and self.removal != "road"

    @property
    def background(self) -> Tensor:
        """[B, 3, H, W]"""
        if self._background is None:
            self._background = background(self.removal, self.pixels, self.trace.recording.model.preprocess, self.seed)
        return self._background

    @functools.cached_property
    def _marks(self) -> list[int]:
        return image_seeds(self.pixels, self.seed)

    @property
    def original(self) -> Tensor:
        """The score of each image as it is, [B]; the trace knows it already."""
        return self._tally.original

    def score_kept(self, keep: Tensor, value: Value | None = None) -> Tensor:
        """[B, V] scores, in float64, when only the patches of `keep`, bool [B or 1, V, patches], are left.

        `value(logits [n, C], images [n])` -> [n, …] takes the place of the target's score.
        """
        images = len(self.pixels)
        keep = keep.to(self.pixels.device)
        shaped = keep.ndim == 3 and keep.shape[2] == self.patches and len(keep) in (1, images)
        if not shaped or keep.dtype != torch.bool:
            raise BadInput(
                f"keep is {keep.dtype} of shape {list(keep.shape)}; expected booleans of shape [{images} images or 1, "
                f"variants, {self.patches} patches]."
            )
        variants = keep.shape[1]
        if not variants:
            return self.original.new_zeros(images, 0)
        flat = keep.expand(images, -1, -1).reshape(-1, self.patches)  # image by image
        values = self.score_pairs(torch.arange(len(flat), device=keep.device) // variants, flat, value)
        if value is not None:
            return values.reshape(images, variants, *values.shape[1:])
        return self._tally.by_image(values, variants)

    def score_pairs(self, images: Tensor, keep: Tensor, value: Value | None = None) -> Tensor:
        """[n, …] as `keeping`, of any images [n] with any patches `keep` [n, patches] left.

        For searches, which ask more of one image than of another. Without `value`, a function of the user's own gets
        no say: logits come back.
        """
        counts = keep.sum(1) if self._drops else keep.new_full((len(keep),), self.patches, dtype=torch.long)
        found: Found = []
        for count in sorted(set(counts.tolist())):
            places = (counts == count).nonzero()[:, 0]
            each = (count or self.patches) + self.layout.prefix  # none: all are there, as zeros

            def run(ks: range, places: Tensor = places) -> Tensor:
                own = places[ks.start : ks.stop]
                return self._patches_left(images[own], keep[own])

            for ks, logits in in_batches(len(places), self._room, each, run):
                self._count(len(ks))
                own = places[ks.start : ks.stop]
                found.append((own, self._tally.valued(logits, images[own], value)))
        return in_order(found)

    def score_images(
        self,
        count: int,
        variant: Callable[[range], Tensor],
        images: Sequence[int] | None = None,
        value: Value | None = None,
    ) -> Tensor:
        """[rows, V] scores of images that a method paints itself: variant(ks) -> [rows, len(ks), 3, H, W].

        `images` are those that the rows are variants of, where they are not the whole batch in its order. `value` as in
        `keeping`.
        """
        own = torch.tensor(range(len(self.pixels)) if images is None else images, device=self.pixels.device)
        if not count:
            return self.original.new_zeros(len(own), 0)
        found: Found = []

        def run(ks: range) -> Tensor:
            painted = variant(ks).flatten(0, 1)
            parts = torch.split(painted, self._room.holds(self.layout.tokens))
            return torch.cat([self._logits(part) for part in parts])

        for ks, logits in in_batches(count, self._room, self.layout.tokens, run, together=len(own)):
            self._count(len(logits))
            at = torch.arange(ks.start, ks.stop, device=logits.device)
            places = (torch.arange(len(own), device=at.device)[:, None] * count + at).flatten()
            found.append((places, self._tally.valued(logits, own[places // count], value)))
        if value is not None:
            return in_order(found).reshape(len(own), count, -1).squeeze(-1)
        return self._tally.by_image(in_order(found), count, None if images is None else own)

    def blend(self, masks: Tensor) -> Tensor:
        """Images seen through masks [B or 1, k, H, W] in 0…1, the background where they are 0: [B, k, 3, H, W]."""
        masks = masks[:, :, None].to(self.pixels)
        return torch.lerp(self.background[:, None], self.pixels[:, None], masks)

    def score_with_attention(self, count: int, rewrite: Callable[[Tensor, Tensor], Rewrite]) -> Tensor:
        """[B, V] scores with changed attention: rewrite(images [n], variants [n]) says how, for n of them at once."""
        found: Found = []
        every = torch.arange(len(self.pixels) * count, device=self.pixels.device)

        def run(ks: range) -> Tensor:
            own = every[ks.start : ks.stop]
            images = own // count
            with Rewritten(len(own), self.layout.tokens, rewrite(images, own % count)) as mode:
                if self.tokens is None:
                    logits = self._logits(self.pixels[images])
                else:
                    with current_pace().precision(self.pixels.device):
                        logits = run_tokens(self.trace.recording, self.way, self.tokens[images], None)
            if mode.seen < max(1, len(self.trace.layers)):
                raise NotApplicable(
                    f"Only {mode.seen} of the {len(self.trace.layers)} attention calls of this model could be changed "
                    "(others are inside windows, or run outside torch). Use leave-one-out, which takes patches out."
                )
            return logits

        for ks, logits in in_batches(len(every), self._room, self.layout.tokens, run):
            self._count(len(ks))
            own = every[ks.start : ks.stop]
            found.append((own, self._tally.valued(logits, own // count, None)))
        return self._tally.by_image(in_order(found), count)

    def unmoved(self) -> list[bool]:
        """Images whose score stayed exactly what it was under all that was tried."""
        return self._tally.unmoved()

    @property
    def _drops(self) -> bool:
        return self.way.how == "drop"

    @property
    def _alone_suffices(self) -> bool:
        """Does the head read prefix tokens only, so that it can do without patches?"""
        return self.layout.pooling in ("token", "distilled")

    def _patches_left(self, images: Tensor, keep: Tensor) -> Tensor:
        """Logits of images [n] with only `keep` [n, patches]; as many in each where tokens are dropped."""
        if self.tokens is None:
            return self._logits(self._painted(images, keep))
        prefix, tokens = self.layout.prefix, self.tokens[images]
        lead = torch.arange(prefix, device=keep.device).expand(len(keep), -1)
        with current_pace().precision(self.pixels.device):
            if not self._drops or not (self._alone_suffices or keep.any()):  # there is no mean of nothing
                shown = torch.cat([keep.new_ones(len(keep), prefix), keep], 1)
                return run_tokens(self.trace.recording, self.way, tokens * shown[..., None], None)
            kept = torch.cat([lead, keep.nonzero()[:, 1].reshape(len(keep), -1) + prefix], 1)  # [n, K]
            whole = kept.shape[1] == self.layout.tokens
            return run_tokens(self.trace.recording, self.way, tokens, None if whole else kept)

    def _painted(self, images: Tensor, keep: Tensor) -> Tensor:
        shown = on_pixels(keep.reshape(-1, *self.grid), self.size)  # [n, H, W]
        if self.removal == "road":
            return imputed(self.pixels[images], shown == 0, [self._marks[i] for i in images.tolist()])
        return torch.where(shown[:, None] > 0, self.pixels[images], self.background[images])

    @torch.no_grad()
    def _logits(self, pixels: Tensor) -> Tensor:
        model = self.trace.recording.model
        with frozen_eval(model.module), current_pace().precision(pixels.device):
            return model.logits(pixels.to(self.pixels.dtype))

    def _count(self, images: int) -> None:
        self.passed += images
        self.tell(images)


@contextmanager
def probing(
    trace: Trace, removal: str, *, what: str, forwards: int, aside: MapResult, seed: int = 0
) -> Iterator[Probe]:
    """A probe for about `forwards` variants of each image, with a progress bar called `what`."""
    check_removal(removal)
    images = len(trace.pixels)
    with report_progress(what, forwards * images) as tell, torch.no_grad():
        probe = Probe(trace, removal, seed, tell)
        if removal == "token" and probe.way.how != "drop":
            aside.note(f"{what}: {_instead(probe.way)}")
        try:
            yield probe
            now = probe.unmoved()
            aside.unmoved = [a and b for a, b in zip(aside.unmoved or now, now, strict=True)]  # by all of its probes
        finally:
            trace.recording.forwards += math.ceil(probe.passed / images)


def _instead(way: DropStrategy) -> str:
    if way.how == "zero":
        return "tokens cannot be dropped from this model (windows, or a fixed number of them); they were set to zero"
    return "this model has no token stream to drop patches from; they were painted with the mean colour (removal=mean)"
