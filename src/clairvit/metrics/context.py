"""EvalContext: a batch of images with the maps of several methods, and everything a metric can compute of them.

A metric gets all methods at once, [M, B, …], so that they share what the maths allows: one set of random subsets, one
noisy copy of an image, one randomised model.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from clairvit._rng import image_seeds, make_generator
from clairvit.data.parts import RemovableParts
from clairvit.errors import Argument, BadInput, NotApplicable
from clairvit.methods.planner import record_for, run_all, spent_on
from clairvit.methods.spec import MethodSpec
from clairvit.metrics.registry import UNBOUNDED_TARGET
from clairvit.models.model import Model
from clairvit.numerics import is_constant, min_max, over_largest, pool_to_grid
from clairvit.option_types import Doc
from clairvit.perturbation.probe import Probe, ScoreFunction, probing
from clairvit.targets.base import CUSTOM_SCORE, SCORES, TargetBatch
from clairvit.tracing.module_state import frozen_eval
from clairvit.tracing.trace import Trace

Upsampling = Annotated[Literal["nearest", "bilinear", "bicubic"], Doc("how a map of patches is enlarged to the pixels")]
ScoreKind = Annotated[
    Literal["prob", "logit", "logprob"],
    Doc("which number of the model is watched: probability, logit or log-probability"),
]
NORMALISED_BY = "full image − nothing left"
MapTransform = Literal["raw", "abs", "relu", "min-max", "over-largest"]


@dataclass(eq=False)
class Notes:
    """The notes of one metric, each once."""

    notes: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


@dataclass(eq=False)
class EvalContext:
    """M methods' maps of B images, one target per image.

    Attributes:
        maps: [M, B, rows, cols], the maps of M methods on the patches, float64.
        masks: bool [B, H, W], where the object is, if masks were given.
        labels: The true classes, if given.
        model: The model.
        target: What is scored.
        seed: The seed of everything random.

    Example:
        >>> import clairvit as cv
        >>> @cv.metric("largest-value", better="higher")
        ... def largest_value(context: cv.extend.EvalContext):
        ...     return context.maps.flatten(2).amax(-1)  # [M, B]
        >>> cv.evaluate("pets", "demo", "legrad", "largest-value").n_valid
        1
    """

    trace: Trace  # a forward of the images, with the target
    specs: tuple[MethodSpec, ...]  # the M methods, for metrics that explain other pixels, models or targets
    raw: tuple[Tensor, ...]  # M maps [B, rows, cols], on the patches or finer
    masks: Tensor | None = None  # bool [B, H, W] where the object is
    void: Tensor | None = None  # bool [B, H, W] pixels that are not counted
    labels: tuple[int | None, ...] | None = None  # the true classes
    others: tuple[int | None, ...] | None = None  # classes of other objects in the images
    transform: str = "raw"  # a `MapTransform`, already applied to `raw`
    seed: int = 0
    parts: tuple[RemovableParts, ...] | None = None  # what can be removed from each image
    shared: dict[Any, Any] = field(default_factory=dict, repr=False)  # results that several metrics use
    notes_log: Notes = field(default_factory=Notes)
    settings: dict[str, str] = field(default_factory=dict)  # values that a metric used instead of its options'
    _empty_scores: dict[str, Tensor] = field(default_factory=dict, repr=False)  # removal -> f(nothing left) [B]

    @property
    def model(self) -> Model:
        return self.trace.recording.model

    @property
    def target(self) -> TargetBatch:
        assert self.trace.target is not None
        return self.trace.target

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of the images."""
        return int(self.trace.pixels.shape[-2]), int(self.trace.pixels.shape[-1])

    @property
    def patches(self) -> int:
        return self.trace.layout.patches

    @functools.cached_property
    def maps(self) -> Tensor:
        """Maps on the patches, [M, B, rows, cols], float64; finer maps are averaged over each patch."""
        return torch.stack([pool_to_grid(maps.double(), self.trace.layout.plane) for maps in self.raw])

    def pixel_maps(self, upsampling: Upsampling = "bilinear") -> Iterator[Tensor]:
        """Yield maps at image size, [B, H, W], float64, method by method."""
        if self.trace.pixels.ndim == 5:
            raise NotApplicable(
                f"This metric compares maps with the pixels of an image, and {self.model.name} takes clips; expected a "
                "metric of patches."
            )
        for maps in self.raw:
            if tuple(maps.shape[-2:]) == self.size:
                yield maps.double()
                continue
            corners = None if upsampling == "nearest" else False
            mode = "nearest-exact" if upsampling == "nearest" else upsampling
            yield F.interpolate(maps[:, None].double(), self.size, mode=mode, align_corners=corners)[:, 0]

    @functools.cached_property
    def invalid(self) -> Tensor:
        """Maps with NaN or infinity, bool [M, B]. Their score is NaN, whatever the metric."""
        return torch.stack([~maps.isfinite().flatten(1).all(1) for maps in self.raw])

    @functools.cached_property
    def degenerate(self) -> Tensor:
        """Constant maps, bool [M, B]: they rank no patch above another."""
        return torch.stack([is_constant(maps, (1, 2)) for maps in self.raw])

    @functools.cached_property
    def order(self) -> Tensor:
        """Patch indices by falling relevance, [M, B, patches]; ties in a random order from seed and image."""
        return sort_with_ties(self.maps.flatten(2), self.tie_order(self.patches))

    @functools.cached_property
    def rank(self) -> Tensor:
        """The position of each patch in `order`, [M, B, patches]."""
        return inverse_permutation(self.order)

    @functools.cached_property
    def image_seeds(self) -> list[int]:
        """One seed per image, from the seed and its content: the same in any batch."""
        return image_seeds(self.trace.pixels, self.seed)

    def tie_order(self, count: int, stream: str = "metrics/ties", index: int = 0) -> Tensor:
        """Return a random permutation of 0 … count - 1 per image, [B, count], in which ties are broken."""
        return tie_orders(self.image_seeds, count, stream, index).to(self.maps.device)

    # Scores of the target

    def score_function(self, score: str) -> ScoreFunction:
        """Return a function (logits [n, C], images [n]) -> the target's score [n] of this kind.

        Where the model has no probability, `prob` is the raw score.
        """
        if score == "accuracy":
            return self._is_predicted
        if score not in SCORES:
            raise BadInput(f"score={score!r} was given; expected one of {', '.join(SCORES)} or accuracy.")
        if self.uses_raw_score(score):
            score = "logit"
            self.settings["score"] = "raw"
        if self.target.score == CUSTOM_SCORE:
            self.settings[UNBOUNDED_TARGET] = CUSTOM_SCORE
        elif not self.target.is_single_class:
            self.settings[UNBOUNDED_TARGET] = f"weighted {score}"
        target = self.target if self.target.score == CUSTOM_SCORE else replace(self.target, score=score)
        return lambda logits, images: target.take(images)(logits)

    def uses_raw_score(self, score: str) -> bool:
        """Return whether `prob` was chosen for a model without probabilities, so that the raw score replaces it."""
        return score == "prob" and self.target.activation == "raw" and self.target.score != "custom"

    def meaning(self, score: str) -> str:
        """Return what the values of `normalise_raw` are, for the axis of a curve."""
        if self.target.score == "custom":
            return "target function" if score in SCORES else score
        return "normalised score" if self.uses_raw_score(score) else score

    def normalise_raw(self, values: Tensor, score: str, removal: str, name: str) -> Tensor:
        """Return raw scores [M, B, S] as (f − f(nothing left)) / |f(x) − f(nothing left)|; other scores unchanged.

        A curve of raw scores then ends at 0 and begins at 1, or at -1 where the whole image lowers the score: higher
        scores stay higher. NaN where the score with nothing left is that of the image.
        """
        if not self.uses_raw_score(score):
            return values
        empty, rise = self.empty_image_scores(removal, name)
        return (values - empty[:, None]) / rise[:, None]

    def normalise_raw_drop(self, drop: Tensor, score: str, removal: str, name: str) -> Tensor:
        """Return differences of raw scores [M, B, S] over |f(x) − f(nothing left)|; other scores unchanged."""
        return drop / self.empty_image_scores(removal, name)[1][:, None] if self.uses_raw_score(score) else drop

    def empty_image_scores(self, removal: str, name: str) -> tuple[Tensor, Tensor]:
        """Return f(nothing left) and |f(x) − f(nothing left)|, both [B], the latter NaN where it is 0; one forward."""
        self.settings["normalised_by"] = NORMALISED_BY
        if removal not in self._empty_scores:
            keep = torch.zeros(1, 1, self.patches, dtype=torch.bool)
            self._empty_scores[removal] = self.score_shared(keep, removal, "prob", name)[:, 0]
        self.notes_log.note(f"{name}: this model's scores are raw, so they are normalised by ({NORMALISED_BY})")
        empty = self._empty_scores[removal]
        rise = (self.original("prob") - empty).abs()
        flat = rise == 0
        if flat.any():
            self.notes_log.note(
                f"{name}: the raw score of {int(flat.sum())} of {len(flat)} images is the same with nothing left, so "
                "that their curves cannot be normalised and have no score"
            )
        return empty, rise.masked_fill(flat, torch.nan)

    def _is_predicted(self, logits: Tensor, images: list[int]) -> Tensor:
        """Return 1 where the target is the predicted class, else 0, [n]."""
        classes = [self.target.classes[image] for image in images]
        if logits.shape[1] == 1:
            raise BadInput(
                "score=accuracy was given for a model with a single output, which gives the same answer for any image; "
                "expected score=prob."
            )
        if None in classes:
            raise BadInput("score=accuracy was given, and the target is no class; expected a class, or score=prob.")
        return (logits.argmax(1) == torch.tensor(classes, device=logits.device)).double()

    def original(self, score: str) -> Tensor:
        """Return the scores of the images themselves, [B]."""
        logits = self.trace.logits
        return self.score_function(score)(logits, list(range(len(logits)))).double()

    @contextmanager
    def probe(self, removal: str, name: str, forwards: int) -> Iterator[Probe]:
        """Yield a probe of the images for a metric of this name."""
        with probing(self.trace, removal, label=name, forwards=forwards, seed=self.seed) as probe:
            for note in probe.notes:
                self.notes_log.note(note)
            yield probe

    def score_kept(self, keep: Tensor, removal: str, score: str, name: str) -> Tensor:
        """Return scores [M, B, V] when only the patches of `keep`, bool [M, B, V, patches], are left."""
        methods, images, variants, _ = keep.shape
        flat = keep.transpose(0, 1).flatten(1, 2)  # [B, M·V, patches]
        return self.score_shared(flat, removal, score, name).reshape(images, methods, variants).transpose(0, 1)

    def score_shared(self, keep: Tensor, removal: str, score: str, name: str) -> Tensor:
        """Return scores [B, V], shared by all methods, when only `keep`, bool [B or 1, V, patches], is left."""
        with self.probe(removal, name, keep.shape[1]) as probe:
            return probe.score_kept(keep, self.score_function(score)).double()

    # Explanations of other inputs

    def explain(
        self, pixels: Tensor, model: Model | None = None, seed: int | None = None, target: TargetBatch | None = None
    ) -> Tensor:
        """Return the methods' maps [M, V·B, rows, cols] of other pixels [V·B, 3, H, W], model or targets [B]."""
        self._check_has_methods()
        images = len(self.trace.pixels)
        copies = len(pixels) // images
        options = self.trace.recording.options
        recording = record_for(self.specs, model or self.model, pixels.to(self.trace.pixels.dtype), options)
        targets = (target or self.target).take([*range(images)] * copies)
        results = run_all(self.specs, recording, [targets], seed=self.seed if seed is None else seed)
        cost = spent_on(recording, self.specs)
        self.trace.recording.forwards += cost.forwards * copies
        self.trace.recording.backwards += cost.backwards * copies
        maps = []
        for spec in self.specs:
            (result,) = results[spec.text]
            if result.error is not None:
                raise result.error
            assert result.maps is not None
            patch_maps = planar_maps(result.maps.double(), self.trace)
            maps.append(pool_to_grid(transform_maps(patch_maps, self.transform), self.trace.layout.plane))
        return torch.stack(maps)

    def compute_logits(self, pixels: Tensor) -> Tensor:
        """Return logits [B, C] of other pixels, float64; one forward."""
        self.trace.recording.forwards += 1
        with frozen_eval(self.model.module), torch.no_grad():
            return self.model.logits(pixels.to(self.trace.pixels.dtype)).double()

    def _check_has_methods(self) -> None:
        if not self.specs:
            raise BadInput(
                "This metric explains the images again, and maps without a method were given; expected a method name: "
                "cv.evaluate(model, images, 'legrad', …)."
            )

    def require_parts(self) -> tuple[RemovableParts, ...]:
        """Return the removable parts of each image; raise BadInput if there are none."""
        if self.parts is None:
            raise BadInput(
                "This metric removes parts of an object from the images, and theirs are not known; expected a data set "
                "with removable parts: parts:COUNT."
            )
        return self.parts

    def require_masks(self) -> Tensor:
        """Return the masks, bool [B, H, W]; raise BadInput if there are none."""
        if self.masks is None:
            raise BadInput(
                "This metric compares maps with masks, and none were given; expected one mask per image: ",
                Argument("masks", [...]),
                ".",
            )
        return self.masks


def tie_orders(image_seeds: Sequence[int], count: int, stream: str = "metrics/ties", index: int = 0) -> Tensor:
    """Return a random permutation of 0 … count - 1 for the seed of each image, [B, count], on the CPU."""
    generators = [make_generator(seed, stream, index) for seed in image_seeds]
    return torch.stack([torch.randperm(count, generator=generator, device="cpu") for generator in generators])


def sort_with_ties(values: Tensor, tie_order: Tensor) -> Tensor:
    """Return indices by falling value, [M, B, n]; NaN comes last, ties are in `tie_order`, permutations [B, n]."""
    tie_order = tie_order.expand(len(values), -1, -1)
    shuffled = values.nan_to_num(nan=float("-inf")).gather(2, tie_order)
    return tie_order.gather(2, shuffled.argsort(dim=2, descending=True, stable=True))


def inverse_permutation(order: Tensor) -> Tensor:
    """Return the position of each index in `order`, permutations […, n]."""
    positions = torch.arange(order.shape[-1], device=order.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, positions)


def planar_maps(maps: Tensor, trace: Trace) -> Tensor:
    """Return maps [B, rows, cols] as they are; those of clips on their patches, the frames below each other.

    Metrics compare patches with patches and need no frames: [B, frames, rows, cols] -> [B, frames · rows, cols].
    """
    return maps if maps.ndim == 3 else pool_to_grid(maps, trace.layout.grid).flatten(1, 2)


def transform_maps(maps: Tensor, transform: str) -> Tensor:
    """Return maps [B, rows, cols] transformed image by image: raw, |a|, max(a, 0), min-max, or a / max |a|."""
    if transform == "raw":
        return maps
    check_map_transform(transform)
    if transform == "abs":
        return maps.abs()
    if transform == "relu":
        return maps.clamp(min=0)
    if transform == "min-max":
        return min_max(maps, (1, 2))
    return over_largest(maps, (1, 2))


def check_map_transform(transform: str) -> None:
    """Raise BadInput unless this is a transformation of maps."""
    if transform not in get_args(MapTransform):
        raise BadInput(f"normalize={transform} was given; expected one of {', '.join(get_args(MapTransform))}.")


def fraction_counts(total: int, fractions: Sequence[float]) -> list[int]:
    """Return how many of `total` each fraction is: rounded, at least 1."""
    return [max(1, round(fraction * total)) for fraction in fractions]
