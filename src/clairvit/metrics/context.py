"""Case: a batch of images with the maps of several methods. All that a metric looks at, and all it can ask for.

A metric sees all methods at once, [M, B, …], so that they share what the maths allows: one set of random subsets, one
noisy copy of an image, one randomised model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from clairvit.errors import BadInput
from clairvit.methods.planner import record_for, run_all, spent_on
from clairvit.methods.spec import MethodSpec
from clairvit.metrics.threshold import min_max
from clairvit.models.model import Model
from clairvit.perturbation.probe import Probe, probing
from clairvit.perturbation.rng import image_seeds, make_generator
from clairvit.targets.base import SCORES, Target
from clairvit.tracing.module_state import frozen_eval
from clairvit.tracing.trace import Trace

Upsampling = Literal["nearest", "bilinear", "bicubic"]
ScoreKind = Literal["prob", "logit", "logprob"]
NORMALISED_BY = "full image − nothing left"
MapShape = Literal["raw", "abs", "relu", "min-max", "over-largest"]


@dataclass(eq=False)
class Notes:
    """The notes of one metric, each once."""

    notes: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


@dataclass(eq=False)
class EvalContext:
    """M methods' maps of B images, one target an image.

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
        ... def largest_value(context: cv.EvalContext):
        ...     return context.maps.flatten(2).amax(-1)  # [M, B]
        >>> cv.evaluate("pets", "demo", "legrad", "largest-value").n_valid
        1
    """

    trace: Trace  # a forward of the images, with the target
    specs: tuple[MethodSpec, ...]  # the M methods, for metrics that explain again
    raw: tuple[Tensor, ...]  # M maps [B, rows, cols], on the patches or finer
    masks: Tensor | None = None  # bool [B, H, W] where the object is
    void: Tensor | None = None  # bool [B, H, W] pixels that count nowhere
    labels: tuple[int | None, ...] | None = None  # the true classes
    others: tuple[int | None, ...] | None = None  # classes of other objects in the images
    shape: str = "raw"  # what is done to each map first; `raw` holds the result
    seed: int = 0
    aside: Notes = field(default_factory=Notes)
    settings: dict[str, str] = field(default_factory=dict)  # what a metric used in place of what its options say
    _emptied: dict[str, Tensor] = field(default_factory=dict, repr=False)  # [B] by removal: scores with nothing left

    @property
    def model(self) -> Model:
        return self.trace.recording.model

    @property
    def target(self) -> Target:
        assert self.trace.target is not None
        return self.trace.target

    @property
    def size(self) -> tuple[int, int]:
        return int(self.trace.pixels.shape[-2]), int(self.trace.pixels.shape[-1])

    @property
    def patches(self) -> int:
        return self.trace.layout.patches

    @functools.cached_property
    def maps(self) -> Tensor:
        """[M, B, rows, cols] on the patches, float64; finer maps are averaged over each patch."""
        grid = self.trace.layout.grid
        return torch.stack([_on_grid(one.double(), grid) for one in self.raw])

    def fine(self, upsampling: Upsampling = "bilinear") -> Iterator[Tensor]:
        """Method by method [B, H, W], float64."""
        for one in self.raw:
            if tuple(one.shape[-2:]) == self.size:
                yield one.double()
                continue
            corners = None if upsampling == "nearest" else False
            mode = "nearest-exact" if upsampling == "nearest" else upsampling
            yield F.interpolate(one[:, None].double(), self.size, mode=mode, align_corners=corners)[:, 0]

    @functools.cached_property
    def invalid(self) -> Tensor:
        """bool [M, B]: maps with NaN or infinity. Their score is NaN, whatever the metric."""
        return torch.stack([~one.isfinite().flatten(1).all(1) for one in self.raw])

    @functools.cached_property
    def degenerate(self) -> Tensor:
        """bool [M, B]: constant maps, which say nothing."""
        return torch.stack([constant(one) for one in self.raw])

    @functools.cached_property
    def order(self) -> Tensor:
        """[M, B, patches]: the patches of each map, highest first; ties in an order drawn from seed and image."""
        flat = self.maps.flatten(2).nan_to_num(nan=float("-inf"))
        luck = torch.stack([torch.randperm(self.patches, generator=make_generator(mark)) for mark in self.marks]).to(
            flat.device
        )
        luck = luck.expand(len(flat), -1, -1)
        shuffled = flat.gather(2, luck)
        return luck.gather(2, shuffled.argsort(dim=2, descending=True, stable=True))

    @functools.cached_property
    def rank(self) -> Tensor:
        """[M, B, patches]: the place of each patch in `order`."""
        places = torch.arange(self.patches, device=self.order.device).expand_as(self.order)
        return torch.empty_like(self.order).scatter_(2, self.order, places)

    @functools.cached_property
    def marks(self) -> list[int]:
        """A number an image, of seed and content: the same chance in any batch."""
        return image_seeds(self.trace.pixels, self.seed)

    def value(self, score: str) -> Callable[[Tensor, list[int]], Tensor]:
        """Return a function (logits [n, C], images [n]) -> the target's score [n] of this kind.

        Where the model has no probability, `prob` is the raw score.
        """
        if score == "accuracy":
            return self._is_the_answer
        check_score(score)
        if self.falls_back(score):
            score = "logit"
            self.settings["score"] = "raw"
        wanted = self.target if self.target.score == "custom" else replace(self.target, score=score)
        return lambda logits, images: wanted.take(images)(logits)

    def falls_back(self, score: str) -> bool:
        """Return whether a preference for the probability is answered by the raw score: there is no probability."""
        return score == "prob" and self.target.activation == "raw" and self.target.score != "custom"

    def meaning(self, score: str) -> str:
        """Return what the values of `normalised` are, for the axis of a curve."""
        if self.target.score == "custom":
            return "target function" if score in SCORES else score
        return "normalised score" if self.falls_back(score) else score

    def normalised(self, values: Tensor, score: str, removal: str, what: str) -> Tensor:
        """Return raw scores as (f − f(nothing left)) / |f(x) − f(nothing left)|; probabilities and others unchanged.

        A curve of raw scores so ends at 0 and begins at 1, or at -1 where the whole image lowers the score: what is
        higher stays higher. NaN where the score with nothing left is that of the image. values [M, B, S].
        """
        if not self.falls_back(score):
            return values
        nothing, rise = self.nothing_left(removal, what)
        return (values - nothing[:, None]) / rise[:, None]

    def normalised_drop(self, drop: Tensor, score: str, removal: str, what: str) -> Tensor:
        """Return differences of raw scores, [M, B, S], over |f(x) − f(nothing left)|; others unchanged."""
        return drop / self.nothing_left(removal, what)[1][:, None] if self.falls_back(score) else drop

    def nothing_left(self, removal: str, what: str) -> tuple[Tensor, Tensor]:
        """Return f(nothing left) and |f(x) − f(nothing left)|, two [B], the latter NaN where it is 0; one forward."""
        self.settings["normalised_by"] = NORMALISED_BY
        if removal not in self._emptied:
            keep = torch.zeros(1, 1, self.patches, dtype=torch.bool)
            with self.probe(removal, what, 1) as probe:
                self._emptied[removal] = probe.score_kept(keep, self.value("prob")).double()[:, 0]
        self.aside.note(f"{what}: this model's scores are raw, so they are normalised by ({NORMALISED_BY})")
        nothing = self._emptied[removal]
        rise = (self.original("prob") - nothing).abs()
        flat = rise == 0
        if flat.any():
            self.aside.note(
                f"{what}: the raw score of {int(flat.sum())} of {len(flat)} images is the same with nothing left, so "
                "that their curves cannot be normalised and have no score"
            )
        return nothing, rise.masked_fill(flat, torch.nan)

    def _is_the_answer(self, logits: Tensor, images: list[int]) -> Tensor:
        """[n] 1 where the target is the predicted class."""
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
        """[B]: the score of the images as they are."""
        logits = self.trace.logits
        return self.value(score)(logits, list(range(len(logits)))).double()

    @contextmanager
    def probe(self, removal: str, what: str, forwards: int) -> Iterator[Probe]:
        with probing(self.trace, removal, what=what, forwards=forwards, seed=self.seed) as probe:
            for note in probe.notes:
                self.aside.note(note)
            yield probe

    def left(self, keep: Tensor, removal: str, score: str, what: str) -> Tensor:
        """[M, B, V] scores when only the patches of `keep`, bool [M, B, V, patches], are left."""
        count, images, variants, _ = keep.shape
        with self.probe(removal, what, count * variants) as probe:
            flat = keep.transpose(0, 1).flatten(1, 2)  # [B, M·V, patches]
            found = probe.score_kept(flat, self.value(score)).double()
        return found.reshape(images, count, variants).transpose(0, 1)

    def explained_again(
        self, pixels: Tensor, model: Model | None = None, seed: int | None = None, target: Target | None = None
    ) -> Tensor:
        """[M, V·B, rows, cols]: the same methods on other pixels [V·B, 3, H, W], another model or other targets [B]."""
        self._check_can_explain()
        recording = record_for(
            self.specs, model or self.model, pixels.to(self.trace.pixels.dtype), self.trace.recording.options
        )
        images = len(self.trace.pixels)
        goal = (target or self.target).take([*range(images)] * (len(pixels) // images))
        found = run_all(self.specs, recording, [goal], seed=self.seed if seed is None else seed)
        spent, copies = spent_on(recording, self.specs), len(pixels) // images
        self.trace.recording.forwards += spent.forwards * copies
        self.trace.recording.backwards += spent.backwards * copies
        grid = self.trace.layout.grid
        maps = []
        for spec in self.specs:
            (result,) = found[spec.text]
            if result.error is not None:
                raise result.error
            assert result.maps is not None
            maps.append(_on_grid(shaped(result.maps.double(), self.shape), grid))
        return torch.stack(maps)

    def logits_of(self, pixels: Tensor) -> Tensor:
        """[B, C] of other pixels, float64; a forward."""
        self.trace.recording.forwards += 1
        with frozen_eval(self.model.module), torch.no_grad():
            return self.model.logits(pixels.to(self.trace.pixels.dtype)).double()

    def _check_can_explain(self) -> None:
        if not self.specs:
            raise BadInput(
                "This metric explains the images again, and maps without a method were given; expected a method name: "
                "cv.evaluate(model, images, 'legrad', …)."
            )

    def needed_masks(self) -> Tensor:
        if self.masks is None:
            raise BadInput(
                "This metric compares maps with masks, and none were given; expected one mask an image: masks=[…].",
                parameters={"masks": "DIR"},
            )
        return self.masks


def shaped(maps: Tensor, shape: str) -> Tensor:
    """[B, rows, cols], image by image: as it is, |a|, max(a, 0), to 0…1, or over the largest |a|."""
    check_shape(shape)
    if shape == "abs":
        return maps.abs()
    if shape == "relu":
        return maps.clamp(min=0)
    if shape == "min-max":
        return min_max(maps)
    if shape == "over-largest":
        largest = maps.abs().amax((1, 2), keepdim=True)
        return maps / torch.where(largest == 0, torch.ones_like(largest), largest)
    return maps


def check_shape(shape: str) -> None:
    if shape not in get_args(MapShape):
        raise BadInput(f"normalize={shape} was given; expected one of {', '.join(get_args(MapShape))}.")


def constant(maps: Tensor) -> Tensor:
    """[B, rows, cols] -> bool [B]: maps that say nothing."""
    return (maps == maps[:, :1, :1]).flatten(1).all(1)


def check_score(score: str) -> None:
    if score not in SCORES:
        raise BadInput(f"score={score!r} was given; expected one of {', '.join(SCORES)} or accuracy.")


def _on_grid(maps: Tensor, grid: tuple[int, int]) -> Tensor:
    """[B, rows, cols], finer maps averaged over each patch."""
    if tuple(maps.shape[-2:]) == grid:
        return maps
    return F.adaptive_avg_pool2d(maps[:, None], grid)[:, 0]


def steps_of(patches: int, parts: Sequence[float]) -> list[int]:
    """How many patches each part of the image is: rounded, never none."""
    return [max(1, round(part * patches)) for part in parts]
