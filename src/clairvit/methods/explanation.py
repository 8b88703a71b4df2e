"""Explanation and Comparison: the maps of a method, with all that is needed to show, store and repeat them."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from clairvit._cost import Cost
from clairvit.errors import BadInput
from clairvit.models.activation import Activation
from clairvit.models.preprocess import Preprocess
from clairvit.targets.base import CUSTOM_SCORE, NO_SCORE, join_targets

if TYPE_CHECKING:
    from clairvit.methods.spec import MethodSpec
    from clairvit.metrics.check_result import CheckResult
    from clairvit.models.coerce import ModelLike
    from clairvit.models.model import Model
    from clairvit.targets.base import TargetBatch

SHOWN_TARGETS = 3  # in a repr
SHOWN_METHODS = 6
FUSIONS = ("min", "mean", "max")


@dataclass(frozen=True, eq=False)
class Heads:
    """The maps of each attention head in each layer, and of the heads of a layer fused by min, mean and max.

    Args:
        method: The method whose layer maps these are: the explanation's own, or raw-attention where it has no heads.
        maps: [L, H, B, rows, cols].
        fused: [L, 3, B, rows, cols], in the order of `FUSIONS`.
        whole: [3, B, rows, cols], the method over all its layers with the heads fused so in each; None where it reads
            a single layer, or has no heads of its own.

    Example:
        >>> import clairvit as cv
        >>> heads = cv.explain("pets", "demo", "rollout", by_head=True).heads
        >>> tuple(heads.maps.shape)
        (12, 3, 1, 14, 14)
    """

    method: str
    maps: Tensor
    fused: Tensor
    whole: Tensor | None = None

    def __repr__(self) -> str:
        layers, heads, maps, *_ = self.maps.shape
        return f"Heads('{self.method}', {layers} layers × {heads} heads × {maps} map{'s' * (maps != 1)})"


@dataclass(frozen=True, eq=False)
class TextRelevance:
    """The relevance of the text next to an image: of a prompt, and of the answer so far.

    Args:
        tokens: The tokens before and after those of the image, in their order.
        values: [T], raw and signed as the map is, and on its scale.

    Example:
        >>> import clairvit as cv, torch
        >>> cv.TextRelevance(("what", " is", " it"), torch.tensor([0.5, 0.0, -0.25]))
        TextRelevance('what' 0.5, ' is' 0, ' it' -0.25)
    """

    tokens: tuple[str, ...]
    values: Tensor

    def __repr__(self) -> str:
        """Return one line: each token with its value."""
        pairs = zip(self.tokens, self.values.tolist(), strict=True)
        return f"TextRelevance({', '.join(f'{token!r} {value:.3g}' for token, value in pairs)})"


@dataclass(frozen=True, eq=False)
class Origin:
    """The model and the target of each map, for `Explanation.check`; files and pickles hold None in its place."""

    models: tuple[Model, ...]  # one per map: the model, or one that reads another output of it
    targets: tuple[TargetBatch, ...]  # one per map, of one row

    @classmethod
    def of(cls, model: Model, target: TargetBatch) -> Origin:
        """Return the origin of maps of one model, given a target with one row per map."""
        return cls((model,) * len(target), tuple(target.take([row]) for row in range(len(target))))

    def take(self, rows: Sequence[int]) -> Origin:
        """Return the origin of chosen maps."""
        return Origin(tuple(self.models[row] for row in rows), tuple(self.targets[row] for row in rows))

    def groups(self) -> list[tuple[list[int], Model, TargetBatch]]:
        """Return the maps that one model and one kind of score made: their rows, the model, and their target."""
        rows_of: dict[tuple[int, str, str], list[int]] = {}
        for row, (model, target) in enumerate(zip(self.models, self.targets, strict=True)):
            rows_of.setdefault((id(model), target.score, target.activation), []).append(row)
        return [
            (rows, self.models[rows[0]], join_targets([self.targets[row] for row in rows])) for rows in rows_of.values()
        ]

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Leave the module and the user's functions out of a pickle."""
        return type(None), ()

    def __copy__(self) -> Origin:
        return self

    def __deepcopy__(self, memo: object) -> Origin:
        return self


@dataclass(frozen=True, eq=False)
class Explanation:
    """B raw signed maps, one per image and target. Clipping, upsampling and colour come later, when it is drawn.

    A sequence: `len(ex)`, `ex[0]`, `ex[2:5]`, `ex[[0, 3]]` and iteration give explanations of some of the maps.
    A notebook cell that ends with an explanation shows its picture.

    Args:
        maps: [B, rows, cols], raw and signed.
        method: The canonical method string, e.g. "rollout(fusion=max)+skipplus".
        signed: Whether negative values mean evidence against the target.
        targets: B names: "Egyptian Mau", "Bengal − Egyptian Mau", "class 281"; "any class" if class-agnostic.
        classes: B class indices; None for a contrast, a function, or several targets at once.
        score: The kind of score that is explained: logit, prob, logprob, …; "none" if class-agnostic.
        logits: [B, C].
        probabilities: B, the model's probability of the target class; None where there is none.
        pixels: [B, 3, H, W], the normalised input of the model.
        names: B names of images.
        model: The name of the model.
        labels: The class names of the model.
        preprocess: The model's preprocessing.
        seed: The seed of everything random.
        cost: Passes and seconds.
        standard_error: [B, rows, cols] of the maps, where they are estimated from random samples.
        chosen: bool [B, rows, cols], the patches that a search selected (counterfactual).
        regions: bool [B, H, W], the part of each image that its target is about: a region, or the box of a query; None
            for other targets. Figures outline it.
        layers: [L, B, rows, cols], the map of each layer, if asked for and the method has layers.
        heads: The maps of each head, if asked for.
        text_relevance: The relevance of the text of a vision-language model, one per map; empty for other models, and
            for maps that are not read off the language model's tokens.
        family: The family of the method, e.g. "gradient × attention".
        class_specific: False: the same map whatever the target.
        classifier: False: `logits` are an embedding, so there are no probabilities.
        activation: What the logits mean: softmax, sigmoid or raw.
        notes: Fallbacks, zero maps, preprocessing that was assumed, …
        weights_hash: A hash of the model's parameters and buffers.
        versions: Package versions that the result depends on.
        checked: How far to trust each map, where `with_check` asked for it: in figures and files.
        origin: The model and the targets themselves, for `check`; None after pickling.

    Example:
        >>> import clairvit as cv
        >>> ex = cv.explain("pets", "demo", "legrad", targets=["Bengal", "Egyptian Mau"])
        >>> len(ex), ex[1].targets, ex.numpy().shape
        (2, ('Egyptian Mau',), (2, 14, 14))
    """

    maps: Tensor
    method: str
    signed: bool
    targets: tuple[str, ...]
    classes: tuple[int | None, ...]
    score: str
    logits: Tensor
    probabilities: tuple[float | None, ...]
    pixels: Tensor
    names: tuple[str, ...]
    model: str
    labels: tuple[str, ...]
    preprocess: Preprocess
    seed: int
    cost: Cost
    standard_error: Tensor | None = None
    chosen: Tensor | None = None
    regions: Tensor | None = None
    layers: Tensor | None = None
    heads: Heads | None = None
    text_relevance: tuple[TextRelevance, ...] = ()
    family: str = ""
    class_specific: bool = True
    classifier: bool = True
    activation: Activation = "softmax"
    notes: tuple[str, ...] = ()
    weights_hash: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    checked: CheckResult | None = None
    origin: Origin | None = field(default=None, repr=False)

    @property
    def class_scores(self) -> tuple[float | None, ...]:
        """Return the model's own score of each target class, before any activation; None for other targets."""
        return tuple(
            None if index is None else float(self.logits[row, index]) for row, index in enumerate(self.classes)
        )

    @property
    def target_scores(self) -> tuple[float | None, ...]:
        """Return the value that is explained for each map, of the kind `score`; None where it is not known any more."""
        if self.origin is None or self.score == NO_SCORE:
            return (None,) * len(self)
        # by the method's own kind of score where the user named none
        targets = [target.with_preferred_score(self.score) for target in self.origin.targets]
        return tuple(
            None if target.class_agnostic else float(target(self.logits[row : row + 1]))
            for row, target in enumerate(targets)
        )

    def __len__(self) -> int:
        return len(self.maps)

    def __iter__(self) -> Iterator[Explanation]:
        return (self[i] for i in range(len(self)))

    def __repr__(self) -> str:
        """Return one line: method, model, shape of the maps and the first targets."""
        targets = ", ".join(self.targets[:SHOWN_TARGETS]) + (", …" if len(self) > SHOWN_TARGETS else "")
        shape = "×".join(map(str, self.maps.shape))
        return f"Explanation({self.method!r} of {self.model}, {shape}: {targets})"

    def __getitem__(self, items: int | slice | Sequence[int]) -> Explanation:
        """Return the explanation of some of the maps: ex[0], ex[2:5], ex[[0, 3]].

        The cost stays that of the whole batch.
        """
        rows = range(len(self))
        if isinstance(items, slice):
            return self._take(list(rows[items]))
        if isinstance(items, Sequence):
            return self._take([rows[item] for item in items])
        return self._take([rows[operator.index(items)]])

    def _take(self, rows: list[int]) -> Explanation:
        heads = self.heads
        return replace(
            self,
            maps=self.maps[rows],
            targets=tuple(self.targets[row] for row in rows),
            classes=tuple(self.classes[row] for row in rows),
            logits=self.logits[rows],
            probabilities=tuple(self.probabilities[row] for row in rows),
            pixels=self.pixels[rows],
            names=tuple(self.names[row] for row in rows),
            standard_error=None if self.standard_error is None else self.standard_error[rows],
            chosen=None if self.chosen is None else self.chosen[rows],
            regions=None if self.regions is None else self.regions[rows],
            checked=None if self.checked is None else self.checked.take(rows),
            origin=None if self.origin is None else self.origin.take(rows),
            layers=None if self.layers is None else self.layers[:, rows],
            text_relevance=tuple(self.text_relevance[row] for row in rows) if self.text_relevance else (),
            heads=None
            if heads is None
            else replace(
                heads,
                maps=heads.maps[:, :, rows],
                fused=heads.fused[:, :, rows],
                whole=None if heads.whole is None else heads.whole[:, rows],
            ),
        )

    def numpy(self) -> NDArray[Any]:
        """Return the maps as an array [B, rows, cols] in their own precision."""
        return np.asarray(self.maps.detach().cpu().numpy())

    def plot(self, ax: Any = None, **display: Any) -> Any:
        """Draw each map over its image on matplotlib axes.

        Args:
            ax: Axes to draw on: one for a single map, a sequence of B for several; None makes a figure.
            **display: Display options such as cmap="viridis", robust=1, opacity=0.8, smooth=False, shared=True (one
                colour scale for all maps; by default the classes of an image share one).

        Returns:
            The axes of a single map, or an array of B axes.

        Example:
            >>> import clairvit as cv
            >>> axes = cv.explain("pets", "demo").plot()
            >>> axes.get_title()
            'Bengal 68%'
        """
        from clairvit.plotting.axes import plot_explanation  # drawing comes after methods

        return plot_explanation(self, ax, **display)

    def check(
        self,
        model: ModelLike | None = None,
        *,
        target: Any = None,
        seed: int | None = None,
        batch_size: int | None = None,
        autocast: str | None = None,
    ) -> CheckResult:
        """Check how far each map can be trusted: a verdict, a sentence and numbers, at about 12 forwards per map.

        The brightest 10 % and 30 % of the patches are removed and the fall of the score is compared with that of as
        many random patches; stability, agreement with other methods and outlier tokens are reported with it.

        Args:
            model: The model that was explained; needed only for an explanation from a pickle.
            target: What was explained, where that was no class and `model` is given.
            seed: The seed of random patches and noise; None is the explanation's own.
            batch_size: As in `cv.explain`.
            autocast: As in `cv.explain`.

        Returns:
            A `CheckResult` with one `MapCheck` per map.

        Raises:
            BadInput: The model is not known any more, or its weights have changed.

        Example:
            >>> import clairvit as cv
            >>> cv.explain("pets", "demo", "genatt").check().verdict
            'supported'
        """
        from clairvit.metrics.check import check_explanation  # metrics come after methods

        return check_explanation(self, model, target=target, seed=seed, batch_size=batch_size, autocast=autocast)

    def with_check(self, **arguments: Any) -> Explanation:
        """Return the same explanation with the result of `check` in `.checked`: figures and files then show it."""
        return replace(self, checked=self.check(**arguments))

    def save(self, path: str | PathLike[str], **display: Any) -> Path:
        """Write a file by its suffix: .png/.pdf/.svg/.jpg the picture, .json the record, .npz the raw maps.

        Args:
            path: The file to write; readers never see a partial file.
            **display: Display options of pictures, as in `plot`; also dpi=, layers=True, heads=True.

        Returns:
            The path.

        Raises:
            BadInput: Another suffix.
            UnknownName: A display option that does not exist.
        """
        from clairvit.plotting.save import save

        return save(self, Path(path), **display)

    def _repr_png_(self) -> bytes:
        """Return the picture that a notebook shows."""
        from clairvit.plotting.save import explanation_png

        return explanation_png(self)

    def _repr_html_(self) -> str:
        """Return the picture and one line below it as self-contained HTML."""
        from clairvit.plotting.axes import explanation_html

        return explanation_html(self)


def concat(explanations: Sequence[Explanation]) -> Explanation:
    """Join explanations by the same method, model and score into one, e.g. those of several batches.

    Args:
        explanations: At least one; their maps are kept in this order.

    Returns:
        One explanation with all maps. Passes are counted per image, seconds are added up.

    Raises:
        BadInput: Nothing was given, or methods, models or scores differ.

    Example:
        >>> import clairvit as cv
        >>> model = cv.load("pets")
        >>> parts = [cv.explain(model, "demo", "legrad", target=name) for name in ("Bengal", "Beagle")]
        >>> cv.concat(parts).targets
        ('Bengal', 'Beagle')
    """
    if not explanations:
        raise BadInput("No explanations were given to join; expected at least one.")
    first = explanations[0]
    outputs = {(part.labels, part.classifier, part.activation, part.logits.shape[-1]) for part in explanations}
    scores = {part.score for part in explanations}
    if len({(part.method, part.model) for part in explanations}) > 1 or (len(outputs) == 1 and len(scores) > 1):
        raise BadInput("Only explanations by the same method, model and score fit into one; compare methods instead.")
    if len(outputs) > 1:  # of different outputs of one model: a query's classes and its box
        first = replace(first, labels=(), classifier=False, activation="raw")
        first = replace(first, score=first.score if len(scores) == 1 else CUSTOM_SCORE)
    layers = [part.layers for part in explanations if part.layers is not None]
    heads = [part.heads for part in explanations if part.heads is not None]
    return replace(
        first,
        maps=torch.cat([part.maps for part in explanations]),
        targets=tuple(target for part in explanations for target in part.targets),
        classes=tuple(index for part in explanations for index in part.classes),
        logits=_concat_logits([part.logits for part in explanations]),
        probabilities=tuple(probability for part in explanations for probability in part.probabilities),
        pixels=torch.cat([part.pixels for part in explanations]),
        names=tuple(name for part in explanations for name in part.names),
        standard_error=cat_if_all([part.standard_error for part in explanations]),
        chosen=cat_if_all([part.chosen for part in explanations]),
        regions=_concat_regions(explanations),
        text_relevance=tuple(text for part in explanations for text in part.text_relevance)
        if all(part.text_relevance for part in explanations)
        else (),
        layers=torch.cat(layers, dim=1) if len(layers) == len(explanations) else None,
        heads=_concat_heads(heads) if len(heads) == len(explanations) else None,
        cost=_concat_cost([part.cost for part in explanations]),
        origin=_concat_origins(explanations),
        checked=_concat_checks([part.checked for part in explanations]),
        notes=tuple(dict.fromkeys(note for part in explanations for note in part.notes)),
    )


def cat_if_all(tensors: Sequence[Tensor | None]) -> Tensor | None:
    """Return the tensors concatenated along the first axis; None if one of them is missing."""
    present = [tensor for tensor in tensors if tensor is not None]
    return torch.cat(present) if present and len(present) == len(tensors) else None


def _concat_regions(explanations: Sequence[Explanation]) -> Tensor | None:
    """Return the regions of all maps, [B, H, W]; False everywhere for targets without one, None if there is none."""
    if all(part.regions is None for part in explanations):
        return None
    empty = [torch.zeros(len(part), *part.pixels.shape[-2:], dtype=torch.bool) for part in explanations]
    return torch.cat(
        [part.regions if part.regions is not None else none for part, none in zip(explanations, empty, strict=True)]
    )


def _concat_logits(parts: Sequence[Tensor]) -> Tensor:
    """Return the scores of all maps, [B, C]; rows of outputs with fewer columns end in NaN."""
    width = max(logits.shape[-1] for logits in parts)
    return torch.cat([F.pad(logits, (0, width - logits.shape[-1]), value=math.nan) for logits in parts])


def _concat_origins(explanations: Sequence[Explanation]) -> Origin | None:
    """Return the origin of all maps; None if one has none, or if their weights differ."""
    origins = [part.origin for part in explanations if part.origin is not None]
    if len(origins) < len(explanations) or len({part.weights_hash for part in explanations}) > 1:
        return None
    models = tuple(model for origin in origins for model in origin.models)
    return Origin(models, tuple(target for origin in origins for target in origin.targets))


def _concat_checks(checks: Sequence[CheckResult | None]) -> CheckResult | None:
    """Return the checks of all maps; None if one is missing."""
    present = [check for check in checks if check is not None]
    return present[0].joined(present[1:]) if len(present) == len(checks) else None


def _concat_heads(heads: Sequence[Heads]) -> Heads:
    whole = [part.whole for part in heads if part.whole is not None]
    return Heads(
        heads[0].method,
        torch.cat([part.maps for part in heads], dim=2),
        torch.cat([part.fused for part in heads], dim=2),
        torch.cat(whole, dim=1) if len(whole) == len(heads) else None,
    )


def _concat_cost(costs: Sequence[Cost]) -> Cost:
    """Return passes per image and the seconds of all batches; parts of one batch share one object, counted once."""
    batches = list({id(cost): cost for cost in costs}.values())
    return Cost(
        max(cost.forwards for cost in batches),
        max(cost.backwards for cost in batches),
        sum(cost.seconds for cost in batches),
        sum(cost.own_seconds for cost in batches),
    )


class Comparison(dict[str, Explanation]):
    """A mapping from canonical method strings to explanations of the same images; what `cv.compare` returns.

    A method is found by its canonical string, as it was typed, or by its `MethodSpec`. A notebook cell that ends with
    a comparison shows its picture.

    Attributes:
        skipped: Method string -> why it does not fit this model.
        cost: Passes and seconds of everything together: traces are shared.

    Example:
        >>> import clairvit as cv
        >>> many = cv.compare("pets", "demo", ["rollout", "legrad"])
        >>> many
        Comparison(2 methods × 1 map: rollout, legrad)
        >>> many["legrad"].targets
        ('Bengal',)
    """

    def __init__(self) -> None:
        super().__init__()
        self.skipped: dict[str, str] = {}
        self.cost = Cost()

    def __missing__(self, method: str | MethodSpec) -> Explanation:
        """Return the explanation of a method that was not written in its canonical form."""
        from clairvit.methods.spec import resolve_method

        canonical = resolve_method(method).text
        if canonical not in self:
            raise KeyError(str(method))
        return self[canonical]

    def __repr__(self) -> str:
        """Return one line: how many methods and maps, the names of the first methods."""
        maps = len(next(iter(self.values()))) if self else 0
        size = f"{len(self)} method{'s' * (len(self) != 1)} × {maps} map{'s' * (maps != 1)}"
        listed = ", ".join([*self][:SHOWN_METHODS]) + (", …" if len(self) > SHOWN_METHODS else "")
        skipped = f"; {len(self.skipped)} skipped" if self.skipped else ""
        return f"Comparison({size}: {listed}{skipped})"

    def plot(self, axes: Any = None, **display: Any) -> NDArray[np.object_]:
        """Draw all maps on matplotlib axes: one row per map, one column per method.

        Args:
            axes: An array of axes [maps, methods]; None makes a figure.
            **display: Display options, as in `Explanation.plot`.

        Returns:
            The axes, [maps, methods].

        Example:
            >>> import clairvit as cv
            >>> cv.compare("pets", "demo", ["rollout", "legrad"]).plot().shape
            (1, 2)
        """
        from clairvit.plotting.axes import plot_comparison

        return plot_comparison(self, axes, **display)

    def save(self, path: str | PathLike[str], **display: Any) -> Path:
        """Write a file by its suffix: .png/.pdf/.svg/.jpg all methods next to each other, .json records, .npz maps.

        Args:
            path: The file to write; readers never see a partial file.
            **display: Display options of pictures, as in `Explanation.save`.

        Returns:
            The path.
        """
        from clairvit.plotting.save import save_comparison

        return save_comparison(self, Path(path), **display)

    def _repr_png_(self) -> bytes:
        """Return the picture that a notebook shows."""
        from clairvit.plotting.save import comparison_png

        return comparison_png(self)

    def _repr_html_(self) -> str:
        """Return the picture and the skipped methods as self-contained HTML."""
        from clairvit.plotting.axes import comparison_html

        return comparison_html(self)
