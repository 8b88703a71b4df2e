"""Explanation and Comparison: the maps of a method, with all that is needed to show, store and repeat them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from clairvit._cost import Cost
from clairvit._io import to_json
from clairvit._rows import Rows, RowSequence, first, joined, per_row, same, union
from clairvit._tables import TableRow, Tabular
from clairvit.errors import BadInput, Verb
from clairvit.methods.aggregation import layer_index
from clairvit.methods.result import LayerGrid, Refinement
from clairvit.models.activation import Activation, probabilities
from clairvit.models.preprocess import Preprocess
from clairvit.models.state_hash import WeightsHash
from clairvit.numerics import map_statistics, pick_cells
from clairvit.targets.base import CUSTOM_SCORE, NO_SCORE, class_name

if TYPE_CHECKING:
    from clairvit.methods.spec import MethodSpec
    from clairvit.metrics.answer_check import Reference
    from clairvit.metrics.certificate import Certificate, CertifiedPatches
    from clairvit.metrics.check_result import CheckResult
    from clairvit.models.coerce import ModelLike
    from clairvit.models.model import Model
    from clairvit.targets.base import TargetBatch

SHOWN_TARGETS = 3  # in a repr
SHOWN_METHODS = 6


FUSIONS = ("min", "mean", "max")


class Heads(Rows, Tabular):
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

    method: str = first()
    maps: Tensor = per_row(axis=2)
    fused: Tensor = per_row(axis=2)
    whole: Tensor | None = per_row(axis=1, default=None)

    def to_dict(self, values: bool = True) -> dict[str, Any]:
        """Return what the maps are, and `maps` [layers, heads, …], `fused` [layers, fusions, …], `whole_maps` as JSON.

        Args:
            values: Include the maps themselves.

        Returns:
            The content of the .json file.
        """
        content: dict[str, Any] = {
            "method": self.method,
            "layers": self.maps.shape[0],
            "heads": self.maps.shape[1],
            "fusions": list(FUSIONS),
            "whole": self.whole is not None,
        }
        tensors = {"maps": self.maps, "fused": self.fused, "whole_maps": self.whole} if values else {}
        return content | {name: to_json(maps.tolist()) for name, maps in tensors.items() if maps is not None}

    def _table(self) -> list[TableRow]:
        """Return a row per layer, head or fusion, and map, with the map's statistics."""
        names = [*map(str, range(self.maps.shape[1])), *FUSIONS]
        return [
            {"method": self.method, "layer": layer, "head": name, "map": row} | map_statistics(values)
            for layer, of_layer in enumerate(torch.cat([self.maps, self.fused], dim=1))
            for name, of_head in zip(names, of_layer, strict=True)
            for row, values in enumerate(of_head)
        ]

    def __repr__(self) -> str:
        layers, heads, maps, *_ = self.maps.shape
        return f"Heads('{self.method}', {layers} layers × {heads} heads × {maps} map{'s' * (maps != 1)})"


@dataclass(frozen=True, eq=False)
class TextRelevance(Tabular):
    """The relevance of the text next to an image: of a prompt, and of the answer so far.

    Args:
        tokens: The tokens before and after those of the image, in their order.
        values: [T], raw and signed as the map is, and on its scale.

    Example:
        >>> import clairvit as cv, torch
        >>> cv.results.TextRelevance(("what", " is", " it"), torch.tensor([0.5, 0.0, -0.25]))
        TextRelevance('what' 0.5, ' is' 0, ' it' -0.25)
    """

    tokens: tuple[str, ...]
    values: Tensor

    def to_dict(self) -> dict[str, Any]:
        """Return the tokens and their values as JSON values."""
        return {"tokens": list(self.tokens), "values": to_json(self.values.tolist())}

    def _table(self) -> list[TableRow]:
        """Return a row per token."""
        return [
            {"token": token, "value": value} for token, value in zip(self.tokens, self.values.tolist(), strict=True)
        ]

    def __repr__(self) -> str:
        """Return one line: each token with its value."""
        pairs = zip(self.tokens, self.values.tolist(), strict=True)
        return f"TextRelevance({', '.join(f'{token!r} {value:.3g}' for token, value in pairs)})"


class Origin(Rows):
    """The model and the target of each map, for `Explanation.check`; files and pickles hold None in its place."""

    models: tuple[Model, ...] = per_row()  # the model of each map, or one that reads another output of it
    targets: tuple[TargetBatch, ...] = per_row()  # of one row each

    @classmethod
    def of(cls, model: Model, target: TargetBatch) -> Origin:
        """Return the origin of maps of one model, given a target with one row per map."""
        count = len(target.names)
        return cls((model,) * count, (target,) if count == 1 else tuple(target.take([row]) for row in range(count)))

    def groups(self) -> list[tuple[list[int], Model, TargetBatch]]:
        """Return the maps that one model and one kind of score made: their rows, the model, and their target."""
        rows_of: dict[tuple[int, str, str], list[int]] = {}
        for row, (model, target) in enumerate(zip(self.models, self.targets, strict=True)):
            rows_of.setdefault((id(model), target.score, target.activation), []).append(row)
        return [
            (rows, self.models[rows[0]], type(self.targets[0]).concat(self.targets[row] for row in rows))
            for rows in rows_of.values()
        ]

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Leave the module and the user's functions out of a pickle."""
        return type(None), ()

    def __copy__(self) -> Origin:
        return self

    def __deepcopy__(self, memo: object) -> Origin:
        return self


@dataclass(frozen=True)
class ClassScore:
    """A class with the model's score and probability for one image."""

    index: int
    name: str
    probability: float | None  # None where the model's scores are raw
    score: float  # the model's own output for the class, before any activation


def _join_logits(parts: Sequence[Tensor]) -> Tensor:
    """Return the scores of all maps, [B, C]; rows of outputs with fewer columns end in NaN."""
    width = max(logits.shape[-1] for logits in parts)
    return torch.cat([F.pad(logits, (0, width - logits.shape[-1]), value=math.nan) for logits in parts])


class Explanation(RowSequence, Tabular):
    """B raw signed maps, one per image and target. Clipping, upsampling and colour come later, when it is drawn.

    A sequence: `len(ex)`, `ex[0]`, `ex[2:5]`, `ex[[0, 3]]`, `ex[mask]` and iteration give explanations of some of the
    maps, with the cost of the whole batch. A notebook cell that ends with an explanation shows its picture.

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
        layers: [L, B, rows, cols], the map of each layer, if asked for and the method has layers. Where layers differ
            in size, the cells of the coarser ones are repeated on the finest grid; `layer_map` has each on its own.
        layer_grids: Name, rows and columns of each layer, where they differ in size; empty where they do not.
        heads: The maps of each head, if asked for.
        text_relevance: The relevance of the text of a vision-language model, one per map; empty for other models, and
            for maps that are not read off the language model's tokens.
        family: The family of the method, e.g. "gradient × attention".
        class_specific: False: the same map whatever the target.
        classifier: False: `logits` are an embedding, so there are no probabilities.
        activation: What the logits mean: softmax, sigmoid or raw.
        notes: Fallbacks, zero maps, preprocessing that was assumed, …
        weights: The hash of the model's parameters and buffers, as `.weights_hash` reads it.
        versions: Package versions that the result depends on.
        refinement: What the passes of a refined map showed; None for other maps. `refine` goes on from there.
        checked: How far to trust each map, where `with_check` asked for it: in figures and files.
        certified: The patches that a certificate names, where `with_certificate` asked for them: in figures and files.
        origin: The model and the targets themselves, for `check`; None after pickling.

    Example:
        >>> import clairvit as cv
        >>> ex = cv.explain("pets", "demo", "legrad", targets=["Bengal", "Egyptian Mau"])
        >>> len(ex), ex[1].targets, ex.numpy().shape
        (2, ('Egyptian Mau',), (2, 14, 14))
    """

    maps: Tensor = per_row()
    method: str = same()
    signed: bool = first()
    targets: tuple[str, ...] = per_row()
    classes: tuple[int | None, ...] = per_row()
    score: str = first()
    logits: Tensor = per_row(join=_join_logits)
    probabilities: tuple[float | None, ...] = per_row()
    pixels: Tensor = per_row()
    names: tuple[str, ...] = per_row()
    model: str = same()
    labels: tuple[str, ...] = first()
    preprocess: Preprocess = first()
    seed: int = first()
    cost: Cost = joined(Cost.of_batches)
    standard_error: Tensor | None = per_row(default=None)
    chosen: Tensor | None = per_row(default=None)
    regions: Tensor | None = per_row(default=None)
    layers: Tensor | None = per_row(axis=1, default=None)
    layer_grids: tuple[LayerGrid, ...] = first(default=())
    heads: Heads | None = per_row(default=None)
    text_relevance: tuple[TextRelevance, ...] = per_row(default=())
    family: str = first(default="")
    class_specific: bool = first(default=True)
    classifier: bool = first(default=True)
    activation: Activation = first(default="softmax")
    notes: tuple[str, ...] = union(default=())
    weights: WeightsHash = first(default_factory=lambda: WeightsHash(""), repr=False)
    versions: dict[str, str] = first(default_factory=dict)
    refinement: Refinement | None = per_row(default=None)
    checked: CheckResult | None = per_row(default=None)
    certified: CertifiedPatches | None = per_row(default=None)
    origin: Origin | None = per_row(default=None, repr=False)

    @property
    def weights_hash(self) -> str:
        """Return a hash of the model's parameters and buffers, computed when it is first read.

        "" with a warning where the weights have changed by then.
        """
        return self.weights.value

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

    def layer_map(self, layer: int) -> Tensor:
        """Return the map of one layer on its own grid, [B, rows, cols].

        Args:
            layer: The number of the layer, from 0; negative numbers count from the end.

        Returns:
            The raw map; `layers[layer]` where all layers have one size.

        Raises:
            BadInput: The explanation has no layers, or not this one.

        Example:
            >>> import clairvit as cv
            >>> cv.explain("pets", "demo", "genatt", layers=True).layer_map(-1).shape
            torch.Size([1, 14, 14])
        """
        if self.layers is None:
            raise BadInput(
                f"'{self.method}' was computed without its layers; ask for them with ",
                Verb("explain", layers=True),
                ".",
            )
        index = layer_index(layer, len(self.layers))
        maps = self.layers[index]
        if not self.layer_grids:
            return maps
        grid = self.layer_grids[index]
        return pick_cells(maps, (grid.rows, grid.columns))

    @property
    def layer_names(self) -> tuple[str, ...]:
        """Return the names of the layers: "layer 0" …, of a CNN those of its stages."""
        if self.layer_grids:
            return tuple(grid.name for grid in self.layer_grids)
        return tuple(f"layer {index}" for index in range(0 if self.layers is None else len(self.layers)))

    def __repr__(self) -> str:
        """Return one line: method, model, shape of the maps and the first targets."""
        targets = ", ".join(self.targets[:SHOWN_TARGETS]) + (", …" if len(self) > SHOWN_TARGETS else "")
        shape = "×".join(map(str, self.maps.shape))
        return f"Explanation({self.method!r} of {self.model}, {shape}: {targets})"

    @classmethod
    def concat(cls, parts: Iterable[Self]) -> Self:
        """Return the maps of several explanations as one; see `cv.Explanation.concat`."""
        parts = list(parts)
        if not parts:
            raise BadInput("No explanations were given to join; expected at least one.")
        outputs = {(part.labels, part.classifier, part.activation, part.logits.shape[-1]) for part in parts}
        scores = {part.score for part in parts}
        if len({(part.method, part.model) for part in parts}) > 1 or (len(outputs) == 1 and len(scores) > 1):
            raise BadInput(
                "Only explanations by the same method, model and score fit into one; compare methods instead."
            )
        if any(part.regions is not None for part in parts):  # other targets have none: False everywhere
            parts = [replace(part, regions=part._regions()) for part in parts]
        whole = super().concat(parts)
        if len(outputs) > 1:  # of different outputs of one model: a query's classes and its box
            score = whole.score if len(scores) == 1 else CUSTOM_SCORE
            whole = replace(whole, labels=(), classifier=False, activation="raw", score=score)
        if any(part.weights != parts[0].weights for part in parts):
            whole = replace(whole, origin=None)
        return whole

    def _regions(self) -> Tensor:
        """Return the regions, [B, H, W]; False everywhere where the targets are about no part of the image."""
        height, width = self.pixels.shape[-2:]
        return torch.zeros(len(self), height, width, dtype=torch.bool) if self.regions is None else self.regions

    def top_classes(self, row: int, count: int = 5) -> list[ClassScore]:
        """Return the highest classes of one image, best first; none where the output is an embedding."""
        if not self.classifier:
            return []
        logits = self.logits[row].detach().to("cpu", torch.float64)
        class_probabilities = probabilities(logits, self.activation)
        values = logits if class_probabilities is None else class_probabilities
        return [
            ClassScore(
                index,
                class_name(self.labels, index),
                None if class_probabilities is None else float(class_probabilities[index]),
                float(logits[index]),
            )
            for index in values.topk(min(count, len(values))).indices.tolist()
        ]

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

    def refine(
        self,
        passes: int | None = None,
        *,
        seconds: float | None = None,
        batch_size: int | None = None,
        autocast: str | None = None,
    ) -> Explanation:
        """Correct each map by real passes with random patches kept, going on from those that were run already.

        The passes of a smaller number are the first of a larger one, so that it does not matter in which steps they
        were asked for: `ex.refine(64).refine(256)` runs 192 further passes and is `cv.explain(…, passes=256)`.

        Args:
            passes: How many passes there are in all, those before included; None: as many as fit in `seconds`.
            seconds: The time that may be spent on each map.
            batch_size: As in `cv.explain`.
            autocast: As in `cv.explain`.

        Returns:
            The explanation with refined maps, their standard errors, and `refinement`.

        Raises:
            BadInput: The model is not known any more, or its weights have changed.
            NotApplicable: The method makes many passes itself.

        Example:
            >>> import clairvit as cv
            >>> ex = cv.explain("pets", "demo", "genatt")
            >>> ex.refine(16).method
            'refine(genatt,passes=16)'
        """
        from clairvit.methods.refine_further import refine_explanation  # runs methods, which make explanations

        return refine_explanation(self, passes, seconds=seconds, batch_size=batch_size, autocast=autocast)

    def check(
        self,
        model: ModelLike | None = None,
        *,
        target: Any = None,
        passes: int = 64,
        reference: Reference | None = None,
        seed: int | None = None,
        batch_size: int | None = None,
        autocast: str | None = None,
    ) -> CheckResult:
        """Check how far each map can be trusted, and whether the answer means anything: words and numbers.

        In 64 passes random sets of patches are kept, and the map must predict what that does to the score beyond what
        maps of the middle and of edges predict; in two more what it marks most is hidden. About 70 shortened passes per
        image, shared by its maps.

        Args:
            model: The model that was explained; needed only for an explanation from a pickle.
            target: What was explained, where that was no class and `model` is given.
            passes: How many random sets of patches are tried, 32 or more.
            reference: What images look like that the model is meant for, of `cv.reference`.
            seed: The seed of random sets and noise; None is the explanation's own.
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

        return check_explanation(
            self,
            model,
            target=target,
            passes=passes,
            reference=reference,
            seed=seed,
            batch_size=batch_size,
            autocast=autocast,
        )

    def with_check(self, **arguments: Any) -> Explanation:
        """Return the same explanation with the result of `check` in `.checked`: figures and files then show it."""
        return replace(self, checked=self.check(**arguments))

    def certify(
        self,
        certificate: Certificate | str | PathLike[str],
        *,
        test: bool = False,
        model: ModelLike | None = None,
    ) -> CertifiedPatches:
        """Mark the patches of each map that a certificate names: from them alone the model keeps its answer.

        Args:
            certificate: What `cv.certify` made for this model and method, or its file.
            test: Test whether the statement holds on these photos, by one more pass.
            model: The model that was explained; needed only to test an explanation from a file.

        Returns:
            `CertifiedPatches`: `.patches` [B, rows, columns], `.sentences`, `.held`.

        Raises:
            BadInput: The certificate is of another model, method, seed, preprocessing or grid, or a map is not of the
                model's answer.

        Example:
            >>> import clairvit as cv, torch
            >>> model = cv.load("scenes")
            >>> noise = torch.randn(4, 3, 96, 96, generator=torch.Generator().manual_seed(0))
            >>> certificate = cv.certify(model, noise[:3], "ixg", keep=0.5)
            >>> marked = cv.explain(model, noise[3:], "ixg").certify(certificate, test=True)
            >>> tuple(marked.patches.shape), len(marked.held)
            ((1, 12, 12), 1)
        """
        from clairvit.metrics.certify import certify_explanation  # metrics come after methods

        return certify_explanation(self, certificate, test=test, model=model)

    def with_certificate(self, certificate: Certificate | str | PathLike[str], **arguments: Any) -> Explanation:
        """Return the same explanation with what `certify` marks in `.certified`: figures and files then show it."""
        return replace(self, certified=self.certify(certificate, **arguments))

    def to_dict(self, values: bool = True) -> dict[str, Any]:
        """Return everything as JSON values under the names of the fields; lists have one entry per map.

        Args:
            values: Include the maps themselves, and not only what they are about.

        Returns:
            The content of the .json file.

        Example:
            >>> import clairvit as cv
            >>> content = cv.explain("pets", "demo", "legrad").to_dict(values=False)
            >>> content["targets"], content["grid"]
            (['Bengal'], [14, 14])
        """

        def statistics(maps: Tensor | None) -> list[dict[str, float | None]] | None:
            return None if maps is None else [map_statistics(part) for part in maps]

        content: dict[str, Any] = {
            "method": self.method,
            "family": self.family,
            "signed": self.signed,
            "class_specific": self.class_specific,
            "model": self.model,
            "activation": self.activation,
            "weights_hash": self.weights_hash,
            "preprocess": self.preprocess.to_dict(),
            "score": self.score,
            "seed": self.seed,
            "cost": vars(self.cost),
            "notes": self.notes,
            "versions": self.versions,
            "grid": list(self.maps.shape[-2:]),
            "layers": None if self.layers is None else len(self.layers),
            "names": self.names,
            "targets": self.targets,
            "classes": self.classes,
            "probabilities": self.probabilities,
            "class_scores": self.class_scores,
            "target_scores": self.target_scores,
            "top": [[vars(guess) for guess in self.top_classes(row)] for row in range(len(self))],
            "statistics": statistics(self.maps),
            "standard_error": statistics(self.standard_error),
            "refinement": None
            if self.refinement is None
            else [self.refinement.sentence(row) for row in range(len(self))],
            "chosen": None  # (row, column) of each
            if self.chosen is None
            else [patches.nonzero().tolist() for patches in self.chosen],
            "layer_grids": [vars(grid) for grid in self.layer_grids],
            "layer_statistics": None
            if self.layers is None
            else [statistics(self.layer_map(layer)) for layer in range(len(self.layers))],
            "heads": None if self.heads is None else self.heads.to_dict(values=False),
            "text_relevance": [text.to_dict() for text in self.text_relevance] or None,
            "check": None if self.checked is None else self.checked.to_dict(),
            "certified": None if self.certified is None else self.certified.to_dict(),
        }
        if values:
            tensors = {"maps": self.maps, "standard_error_maps": self.standard_error, "layer_maps": self.layers}
            tensors["in_top_maps"] = None if self.refinement is None else self.refinement.in_top
            content |= {name: maps.tolist() for name, maps in tensors.items() if maps is not None}
        return dict(to_json(content))

    def _table(self) -> list[TableRow]:
        """Return a row per map: image, target, the model's answer, statistics of the map, and the check."""
        per_map = zip(
            self.names,
            self.targets,
            self.classes,
            self.probabilities,
            self.class_scores,
            self.target_scores,
            strict=True,
        )
        names = ("image", "target", "class", "probability", "class_score", "target_score")
        rows: list[TableRow] = [
            {"method": self.method, "model": self.model}
            | dict(zip(names, values, strict=True))
            | {"score": self.score, "seed": self.seed}
            | map_statistics(maps)
            for values, maps in zip(per_map, self.maps, strict=True)
        ]
        if self.checked is not None:
            for row, check in zip(rows, self.checked, strict=True):
                row |= {"verdict": check.verdict, "effect": check.effect, "answer": check.answer.status}
        if self.certified is not None:
            for row, marked in zip(rows, self.certified._table(), strict=True):
                row |= {"certified_patches": marked["q"], "certified_held": marked["held"]}
        return rows

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Explanation:
        """Read an explanation that was saved as .npz. Nothing in the file is unpickled.

        The model and the user's own targets are not in the file: `check` needs the model again, `ex.check(model)`, and
        `target_scores` are None.

        Args:
            path: A file that `save` wrote.

        Returns:
            The explanation, with maps, layers, heads, pixels, notes and all else that describes it, on the CPU.

        Raises:
            BadInput: The file cannot be read, holds no explanation, or the maps of several methods.

        Example:
            >>> import clairvit as cv, pathlib, tempfile
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     path = cv.explain("pets", "demo", "legrad").save(pathlib.Path(folder, "cat.npz"))
            ...     ex = cv.Explanation.load(path)
            >>> ex
            Explanation('legrad' of pets, 1×14×14: Bengal)
            >>> ex.check("pets").verdict
            'supported'
        """
        from clairvit.methods.explanation_files import read_explanation

        return read_explanation(path)

    def save(self, path: str | PathLike[str], **display: Any) -> Path:
        """Write a file by its suffix: a picture, .json (`to_dict`), .csv (a row per map), .npz for `load`.

        Args:
            path: The file to write; readers never see a partial file.
            **display: Display options of pictures (.png, .pdf, .svg, .jpg), as in `plot`; also dpi=, layers=True,
                heads=True.

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
        >>> cv.Explanation.concat(parts).targets
        ('Bengal', 'Beagle')
    """
    return Explanation.concat(explanations)


class Comparison(dict[str, Explanation], Tabular):
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

    def to_dict(self, values: bool = True) -> dict[str, Any]:
        """Return method string -> the explanation as JSON values.

        Args:
            values: Include the maps themselves.

        Returns:
            The content of the .json file.
        """
        return {method: explanation.to_dict(values) for method, explanation in self.items()}

    def _table(self) -> list[TableRow]:
        """Return a row per method and map."""
        return [row for explanation in self.values() for row in explanation._table()]

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Comparison:
        """Read a comparison that was saved as .npz; see `Explanation.load`.

        Args:
            path: A file that `save` wrote.

        Returns:
            The comparison, with what was skipped and the cost.

        Raises:
            BadInput: The file cannot be read, or holds no comparison.

        Example:
            >>> import clairvit as cv, pathlib, tempfile
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     path = cv.compare("pets", "demo", ["rollout", "legrad"]).save(pathlib.Path(folder, "cat.npz"))
            ...     many = cv.Comparison.load(path)
            >>> many
            Comparison(2 methods × 1 map: rollout, legrad)
        """
        from clairvit.methods.explanation_files import read_comparison

        return read_comparison(path)

    def save(self, path: str | PathLike[str], **display: Any) -> Path:
        """Write a file by its suffix: a picture of all methods, .json, .csv (a row per map), .npz for `load`.

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
