"""Probe: score the target while patches are removed, images replaced or attention changed.

with probing(trace, "token", label="lime", forwards=1000, seed=0) as probe:
    scores = probe.score_kept(keep)          # bool [B or 1, V, patches] -> [B, V]
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from clairvit._progress import report_progress
from clairvit.errors import BadInput, NotApplicable
from clairvit.execution import ExecutionOptions
from clairvit.models.model import Layout
from clairvit.numerics import to_device, widened
from clairvit.perturbation.activation_patching import ActivationPatching
from clairvit.perturbation.attention_override import AttentionOverride, ScoreTransform
from clairvit.perturbation.batching import BatchBudget, in_batches, length_buckets
from clairvit.perturbation.removal import background, check_removal, impute, patches_to_pixels
from clairvit.perturbation.token_dropping import (
    NO_DROPPING,
    DropStrategy,
    can_pad,
    drop_strategy,
    droppable_tokens,
    padded_rows,
    run_tokens,
)
from clairvit.targets.base import TargetBatch
from clairvit.tracing.module_state import frozen_eval
from clairvit.tracing.trace import Trace

ScoreFunction = Callable[[Tensor, list[int]], Tensor]  # (logits [n, C], images [n]) -> [n, …]
Parts = list[tuple[Tensor, Tensor]]  # indices [n], and the values [n, …] that belong there
TOKENS_AT_ONCE = {"cpu": 16 * 197, "cuda": 512 * 197}  # keeps the processor busy, and its caches warm
PASS_OVERHEAD = {"cpu": 0, "cuda": 32 * 197}  # tokens that take about as long as launching the kernels of a pass


@dataclass(eq=False)
class ScoreCollector:
    """Turn the logits of variants of a batch into the target's scores; note which scores never changed."""

    target: TargetBatch
    logits: Tensor  # [B, C], of the images themselves
    _ranges: list[Tensor] = field(default_factory=list)  # lowest and highest score per image, [2, B]

    @functools.cached_property
    def original(self) -> Tensor:
        """The scores of the images themselves, [B]."""
        return self._target_scores(self.target, self.logits)

    def values(self, logits: Tensor, images: list[int], score: ScoreFunction | None) -> Tensor:
        """Return what is kept of a pass with logits [n, C] of variants of `images` [n]: scores [n, …], or logits."""
        if score is not None:
            return score(widened(logits), images)
        if self.target.is_batch_function:
            return widened(logits)  # the user's own function takes all images at once, in their order
        return self._target_scores(self.target.take(images), logits)

    @staticmethod
    def _target_scores(target: TargetBatch, logits: Tensor) -> Tensor:
        """Return scores [n] in float64, as removals change them little; the user's functions get the model's dtype."""
        is_class = all(isinstance(row, tuple) for row in target.rows)
        return target(logits.double() if is_class else widened(logits)).double()

    def by_image(self, values: Tensor, variants: int, images: Tensor | None = None) -> Tensor:
        """Return scores [rows, V] of values [rows·V, …]; rows are the whole batch, or variants of these `images`."""
        values = values.reshape(-1, variants, *values.shape[1:])
        if self.target.is_batch_function and variants:
            values = torch.stack([self._score_together(values[:, v], images) for v in range(variants)], 1)
        if values.numel():
            self._note_range(values, images)
        return values

    def _score_together(self, logits: Tensor, images: Tensor | None) -> Tensor:
        """Return scores [rows] by the user's function; logits [rows, C] of `images` replace those of the batch."""
        if images is None:
            return self.target(logits).double()
        batch_logits = widened(self.logits)
        replaced = [batch_logits.index_put((images[i],), logits[i]) for i in range(len(images))]
        return torch.stack([self.target(batch)[image].double() for batch, image in zip(replaced, images, strict=True)])

    def _note_range(self, scores: Tensor, images: Tensor | None) -> None:
        """Note the lowest and highest of scores [rows, V] per image; ±infinity for images without a row."""
        count = len(self.logits)
        rows = torch.arange(count, device=scores.device) if images is None else images
        low, high = (scores.new_full((count,), bound) for bound in (math.inf, -math.inf))
        low = low.scatter_reduce(0, rows, scores.amin(1), "amin")
        self._ranges.append(torch.stack([low, high.scatter_reduce(0, rows, scores.amax(1), "amax")]))

    def unmoved(self) -> list[bool]:
        """Return which images kept exactly their score under everything that was tried."""
        if not self._ranges:
            return [False] * len(self.logits)
        low, high = torch.stack(self._ranges).unbind(1)
        unchanged: list[bool] = ((low.amin(0) == self.original) & (high.amax(0) == self.original)).tolist()
        return unchanged


def concatenate(parts: Parts) -> Tensor:
    """Return the values of all parts, in the order of their indices."""
    order = torch.cat([indices for indices, _ in parts]).argsort()
    return torch.cat([values for _, values in parts])[order]


class Probe:
    """Score a trace's target under removals. Passes are counted with the trace's own."""

    def __init__(
        self,
        trace: Trace,
        removal: str,
        seed: int,
        advance: Callable[[int], None],
        options: ExecutionOptions,
        label: str,
    ) -> None:
        assert trace.target is not None
        self.trace, self.removal, self.seed, self.options = trace, removal, seed, options
        self.target: TargetBatch = trace.target
        self.pixels = trace.pixels
        self.size = (int(self.pixels.shape[-2]), int(self.pixels.shape[-1]))  # of an image, or of a frame
        self.layout: Layout = trace.layout
        self.grid, self.patches = self.layout.grid, self.layout.patches
        self.images_run = 0  # images that went through the model
        self.strategy: DropStrategy = drop_strategy(trace.recording) if removal == "token" else NO_DROPPING
        self.tokens = droppable_tokens(trace.recording) if self.strategy.mode != "none" else None
        self._drops = self.strategy.mode == "drop"
        # Whether the head reads other tokens only, so that it can do without patches
        self._reads_no_patches = (
            not trace.recording.structure.reads_unknown
            and self.layout.pooling not in ("map", "query")
            and not any(row in self.layout.patch_rows for row, _ in self.layout.read)
        )
        limit = TOKENS_AT_ONCE.get(self.pixels.device.type, TOKENS_AT_ONCE["cuda"])
        self.budget = BatchBudget(limit, options.batch_size)
        self._advance = advance
        substituted = removal == "token" and not self._drops
        self.notes: tuple[str, ...] = (f"{label}: {_fallback_note(self.strategy)}",) if substituted else ()
        if trace.recording.structure.painted:
            cells = " × ".join(map(str, self.layout.grid))
            self.notes += (f"{label}: no tokens of this model are seen; its patches are {cells} cells of the image",)
        self._background: Tensor | None = None
        self._collector = ScoreCollector(trace.target, trace.logits)

    @property
    def paints(self) -> bool:
        """Whether patches are painted over with a background, so that they can also be removed in part."""
        return self.tokens is None and self.removal != "road"

    @property
    def background(self) -> Tensor:
        """What is painted over removed patches, [B, 3, H, W]."""
        if self._background is None:
            self._background = background(self.removal, self.pixels, self.trace.recording.model.preprocess, self.seed)
        return self._background

    @functools.cached_property
    def image_seeds(self) -> list[int]:
        """One seed per image, from its content."""
        return self.trace.image_seeds(self.seed)

    @property
    def original(self) -> Tensor:
        """The scores of the images themselves, [B], from the trace."""
        return self._collector.original

    def score_kept(self, keep: Tensor, score: ScoreFunction | None = None) -> Tensor:
        """Return scores [B, V] in float64 when only the patches of `keep`, bool [B or 1, V, patches], are left.

        `score(logits [n, C], images [n])` -> [n, …] replaces the target's score.
        """
        images = len(self.pixels)
        fits = keep.ndim == 3 and keep.shape[2] == self.patches and len(keep) in (1, images)
        if not fits or keep.dtype != torch.bool:
            raise BadInput(
                f"keep is {keep.dtype} of shape {list(keep.shape)}; expected booleans of shape [{images} images or 1, "
                f"variants, {self.patches} patches]."
            )
        variants = keep.shape[1]
        if not variants:
            return self.original.new_zeros(images, 0)
        flat = keep.expand(images, -1, -1).reshape(-1, self.patches)  # image by image
        values = self.score_pairs(torch.arange(len(flat)) // variants, flat, score)
        if score is not None:
            return values.reshape(images, variants, *values.shape[1:])
        return self._collector.by_image(values, variants)

    def score_pairs(self, images: Tensor, keep: Tensor, score: ScoreFunction | None = None) -> Tensor:
        """Return [n, …] as `score_kept`, for images [n] with the patches `keep` [n, patches] left.

        For searches that need more passes for one image than for another. Without `score`, targets that are functions
        of the whole batch are not applied: logits are returned. What decides about the passes is read once, before
        the first: on a GPU the host need not wait for one pass to start the next.
        """
        parts: Parts = []
        image_of, counts = images.tolist(), keep.sum(1).tolist()
        keep, device = keep.to(self.pixels.device), self.pixels.device
        for rows in self._passes_of(counts):
            run = functools.partial(self._logits_of_kept, rows, image_of, counts, keep)
            patches = counts[rows[0]] if self._drops and counts[rows[0]] else self.patches
            for ks, logits in in_batches(len(rows), self.budget, patches + self.layout.tokens - self.patches, run):
                self._count(len(ks))
                batch = rows[ks.start : ks.stop]
                values = self._collector.values(logits, [image_of[row] for row in batch], score)
                parts.append((to_device(batch, device), values))
        return concatenate(parts)

    def _passes_of(self, counts: list[int]) -> Iterator[list[int]]:
        """Yield the rows that may share passes, given the number of patches of each; that with the most comes first."""
        if not self._drops:
            yield list(range(len(counts)))
            return
        overhead = PASS_OVERHEAD.get(self.pixels.device.type, PASS_OVERHEAD["cuda"])
        if overhead and not can_pad(self.trace.recording):
            overhead = 0
        if not self._reads_no_patches:  # with no patch left, all are run as zeros, and apart
            empty = [row for row, count in enumerate(counts) if not count]
            if empty:
                yield empty
        rows = [row for row, count in enumerate(counts) if count or self._reads_no_patches]
        for bucket in length_buckets([counts[row] for row in rows], overhead):
            yield [rows[index] for index in bucket]

    def score_images(
        self,
        count: int,
        variant: Callable[[range], Tensor],
        images: Sequence[int] | None = None,
        score: ScoreFunction | None = None,
    ) -> Tensor:
        """Return scores [rows, V] of images that the caller makes: variant(ks) -> [rows, len(ks), 3, H, W].

        `images` are those that the rows are variants of, where they are not the whole batch in its order. `score` as in
        `score_kept`.
        """
        sources = torch.tensor(range(len(self.pixels)) if images is None else images, device=self.pixels.device)
        if not count:
            return self.original.new_zeros(len(sources), 0)
        parts: Parts = []

        def run(ks: range) -> Tensor:
            batches = torch.split(variant(ks).flatten(0, 1), self.budget.capacity(self.layout.tokens))
            return torch.cat([self._logits(batch) for batch in batches])

        for ks, logits in in_batches(count, self.budget, self.layout.tokens, run, images_per_variant=len(sources)):
            self._count(len(logits))
            variants = torch.arange(ks.start, ks.stop, device=logits.device)
            indices = (torch.arange(len(sources), device=variants.device)[:, None] * count + variants).flatten()
            parts.append((indices, self._collector.values(logits, sources[indices // count].tolist(), score)))
        if score is not None:
            return concatenate(parts).reshape(len(sources), count, -1).squeeze(-1)
        return self._collector.by_image(concatenate(parts), count, None if images is None else sources)

    def blend(self, masks: Tensor) -> Tensor:
        """Return [B, k, 3, H, W]: images where masks [B or 1, k, H, W] are 1, the background where they are 0."""
        masks = masks[:, :, None].to(self.pixels)
        return torch.lerp(self.background[:, None], self.pixels[:, None], masks)

    def score_with_attention(self, count: int, transform: Callable[[Tensor, Tensor], ScoreTransform]) -> Tensor:
        """Return scores [B, V] with changed attention: transform(images [n], variants [n]) changes that of n of them.

        Raises:
            NotApplicable: Some attention calls of the model cannot be changed.
        """
        pairs = torch.arange(len(self.pixels) * count, device=self.pixels.device)

        def run(ks: range) -> Tensor:
            batch = pairs[ks.start : ks.stop]
            images = batch // count
            with AttentionOverride(len(batch), self.layout.tokens, transform(images, batch % count)) as override:
                if self.tokens is None:
                    logits = self._logits(self.pixels[images])
                else:
                    with self.options.precision(self.pixels.device):
                        logits = run_tokens(self.trace.recording, self.strategy, self.tokens[images], None)
            expected = sum(site.heads_apart for site in self.trace.recording.structure.layers)
            if override.calls < max(1, expected):
                raise NotApplicable(
                    f"Only {override.calls} of the {expected} attention calls of this model could be changed; the "
                    "others are inside windows, or run outside torch."
                )
            return logits

        return self._score_pairs(pairs, count, run)

    def score_patched(self, images: Tensor, activations: Mapping[int, Tensor]) -> Tensor:
        """Return scores [B, patches] of `images` [B, 3, H, W] when the token of one patch has other activations.

        Run [b, i] takes the token of patch i from activations[block] [B, N, d] at the input of each of these blocks.

        Raises:
            NotApplicable: Some of these blocks are not entered with tokens.
        """
        pairs = torch.arange(len(images) * self.patches, device=self.pixels.device)
        patch_rows = torch.tensor(self.layout.patch_rows, device=self.pixels.device)

        def run(ks: range) -> Tensor:
            batch = pairs[ks.start : ks.stop]
            rows, positions = batch // self.patches, patch_rows[batch % self.patches]
            values = {block: tokens[rows, positions] for block, tokens in activations.items()}
            with ActivationPatching(self.trace.recording, values, positions) as patching:
                logits = self._logits(images[rows])
            if patching.applied < len(values):
                raise NotApplicable(
                    f"Only {patching.applied} of {len(values)} blocks of this model could be given other activations; "
                    "the others take no tokens."
                )
            return logits

        return self._score_pairs(pairs, self.patches, run)

    def _score_pairs(self, pairs: Tensor, count: int, run: Callable[[range], Tensor]) -> Tensor:
        """Return scores [B, count]: pair b · count + k is variant k of image b; `run` returns the logits of a range."""
        parts: Parts = []
        for ks, logits in in_batches(len(pairs), self.budget, self.layout.tokens, run):
            self._count(len(ks))
            batch = pairs[ks.start : ks.stop]
            parts.append((batch, self._collector.values(logits, [k // count for k in ks], None)))
        return self._collector.by_image(concatenate(parts), count)

    def unmoved(self) -> list[bool]:
        """Return which images kept exactly their score under everything that was tried."""
        return self._collector.unmoved()

    def _logits_of_kept(
        self, rows: list[int], image_of: list[int], counts: list[int], keep: Tensor, ks: range
    ) -> Tensor:
        """Return logits of `rows[ks]`: of the image of each row with only its patches `keep`, `counts` of them."""
        batch = rows[ks.start : ks.stop]
        images = to_device([image_of[row] for row in batch], self.pixels.device)
        keep = keep[to_device(batch, self.pixels.device)]  # [n, patches]
        counts = [counts[row] for row in batch]
        if self.tokens is None:
            return self._logits(self._painted(images, keep))
        tokens = self.tokens[images]
        longest = max(counts)
        with self.options.precision(self.pixels.device):
            if not self._drops or not (self._reads_no_patches or longest):  # a mean over no tokens is undefined
                visible = self.layout.pad_patches(keep, True)
                return run_tokens(self.trace.recording, self.strategy, tokens * visible[..., None], None)
            kept, visible = padded_rows(self.layout, keep, longest)  # [n, K]
            masked = visible if min(counts) < longest else None
            return run_tokens(self.trace.recording, self.strategy, tokens, kept, masked)

    def _painted(self, images: Tensor, keep: Tensor) -> Tensor:
        """Return images [n, 3, H, W] whose patches outside `keep` are imputed or painted over."""
        visible = patches_to_pixels(keep.reshape(-1, *self.grid), tuple(self.pixels.shape[2:]))  # [n, H, W]
        if self.removal == "road":
            return impute(self.pixels[images], visible == 0, [self.image_seeds[i] for i in images.tolist()])
        return torch.where(visible[:, None] > 0, self.pixels[images], self.background[images])

    @torch.no_grad()
    def _logits(self, pixels: Tensor) -> Tensor:
        model = self.trace.recording.model
        with frozen_eval(model.module), self.options.precision(pixels.device):
            return model.logits(pixels.to(self.pixels.dtype))

    def _count(self, images: int) -> None:
        self.images_run += images
        self._advance(images)


@contextmanager
def probing(
    trace: Trace,
    removal: str,
    *,
    label: str,
    forwards: int,
    seed: int = 0,
    options: ExecutionOptions | None = None,
) -> Iterator[Probe]:
    """Yield a probe for about `forwards` variants per image; progress is reported under `label`.

    `options` replaces the execution options of the recording.
    """
    check_removal(removal)
    images = len(trace.pixels)
    with report_progress(label, forwards * images) as advance, torch.no_grad():
        probe = Probe(trace, removal, seed, advance, options or trace.recording.options, label)
        try:
            yield probe
        finally:
            trace.recording.forwards += math.ceil(probe.images_run / images)


def _fallback_note(strategy: DropStrategy) -> str:
    if strategy.mode == "zero":
        return "tokens cannot be dropped from this model (windows, or a fixed number of them); they were set to zero"
    return "this model has no token stream to drop patches from; they were painted with the mean colour (removal=mean)"
