"""The verbs `intervene` and `intervene_sweep`: replace activations while the model runs, and read its scores.

The user's own model runs; activations of it are replaced on the way (`perturbation/site_edits.py`).
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from clairvit._io import to_json
from clairvit._progress import track
from clairvit._rows import RowSequence, first, per_row, same, union
from clairvit._tables import TableRow, Tabular
from clairvit.errors import BadInput, UnknownName, WrongType, did_you_mean
from clairvit.methods.runs import OnError, Question, Run, chunk_size, error_handler, iter_runs
from clairvit.models.coerce import ModelLike, as_images
from clairvit.models.images import prepare
from clairvit.models.model import Model
from clairvit.perturbation.site import Site
from clairvit.perturbation.site_edits import KINDS, VALUES, Kind, SiteEdits, Value, check_source_is_used, no_source
from clairvit.targets.base import TargetBatch, class_name
from clairvit.targets.resolve import check_same_readout, readout_model, resolve_for
from clairvit.tracing.module_state import own_grad_mode


def _take_targets(target: Any, rows: list[int]) -> Any:
    return [target[row] for row in rows] if isinstance(target, list | tuple) else target


def _join_targets(parts: Sequence[Any]) -> Any:
    return [entry for part in parts for entry in part] if isinstance(parts[0], list | tuple) else parts[0]


class InterventionScores(RowSequence, Tabular):
    """Hold the scores of images with and without replaced activations.

    A sequence of its images: `len(scores)`, `scores[0]`, `scores[2:5]`.

    Attributes:
        original: The model's scores, [B, C].
        intervened: Its scores with the activations replaced, [B, C].
        sites: The sites that were replaced.
        names: The names of the images.
        model: The model whose scores they are: that of `cv.intervene`, or one that reads what its target is about.
        asked: The target of `cv.intervene`.
        notes: Preprocessing that was assumed, values that look wrong.

    Example:
        >>> import clairvit as cv
        >>> scores = cv.intervene("pets", "demo", {cv.Site(layer=11, part="attention"): "zero"})
        >>> scores.original.shape, scores.difference("Bengal").shape
        (torch.Size([1, 37]), torch.Size([1]))
    """

    original: Tensor = per_row()
    intervened: Tensor = per_row()
    sites: tuple[Site, ...] = same()
    names: tuple[str, ...] = per_row()
    model: Model = first()
    asked: Any = per_row(default=None, take=_take_targets, join=_join_targets)
    notes: tuple[str, ...] = union(default=())

    def __repr__(self) -> str:
        """Return one line: the sites and the shape of the scores."""
        return f"InterventionScores({'; '.join(map(str, self.sites))}, scores {list(self.original.shape)})"

    def to_dict(self) -> dict[str, Any]:
        """Return the scores as JSON values.

        Returns:
            Sites, and the scores [B, C] without (`original`) and with the replacement (`intervened`).
        """
        content = {
            "model": self.model.name,
            "sites": [str(site) for site in self.sites],
            "names": self.names,
            "original": self.original.tolist(),
            "intervened": self.intervened.tolist(),
            "notes": self.notes,
        }
        return dict(to_json(content))

    def _table(self) -> list[TableRow]:
        """Return a row per image and class."""
        sites = "; ".join(map(str, self.sites))
        scores = zip(self.names, self.original.tolist(), self.intervened.tolist(), strict=True)
        return [
            {"model": self.model.name, "sites": sites, "image": image, "class": index, "name": name}
            | {"original": original, "intervened": intervened}
            for image, *pair in scores
            for index, (original, intervened) in enumerate(zip(*pair, strict=True))
            for name in [class_name(self.model.labels, index)]
        ]

    def difference(self, target: Any = None, *, score: str | None = None) -> Tensor:
        """Return the target's score intervened − original, [B].

        Args:
            target: As in `cv.explain`, of the output that was computed; None is that of `cv.intervene`, or the class
                that the unchanged model predicts.
            score: logit, prob or logprob; None is the logit, or the target's own kind.

        Raises:
            UnknownName: A class or score that does not exist.
            BadInput: A target that cannot be used, or that reads another output than `cv.intervene` was asked for.
        """
        batch = self.target(target, score)
        return batch(self.intervened) - batch(self.original)

    def target(self, target: Any = None, score: str | None = None) -> TargetBatch:
        """Return a target, resolved against the original scores."""
        if target is None:
            target = self.asked
        check_same_readout(self.model, target)
        (batch,) = resolve_for(self.model, target, self.original, score=score)
        return batch


class InterventionSweep(RowSequence, Tabular):
    """Hold how a target's score changes when one site after the other is replaced.

    A sequence of its images: `len(sweep)`, `sweep[0]`, `sweep[2:5]`; `InterventionSweep.concat` joins those of batches.

    Attributes:
        effects: Intervened − original score of the target, [B, L, H]; H = 1 unless the sites are heads, and NaN where a
            layer has fewer heads than others.
        kind: What was replaced: head, block, attention or mlp.
        value: What it became: zero, mean or source.
        target: The title of each image's target.
        score: The kind of score.
        scores: The score of each image's target in the unchanged model, [B].
        names: The names of the images.
        model: The name of the model.
        notes: Preprocessing that was assumed, values that look wrong.

    Example:
        >>> import clairvit as cv
        >>> sweep = cv.intervene_sweep("pets", "demo", kind="mlp", target="Bengal")
        >>> sweep.table.shape, sweep.target
        (torch.Size([12, 1]), ('Bengal',))
    """

    effects: Tensor = per_row()
    kind: Kind = same()
    value: str = same()
    target: tuple[str, ...] = per_row()
    score: str = same()
    scores: Tensor = per_row()
    names: tuple[str, ...] = per_row()
    model: str = same()
    notes: tuple[str, ...] = union(default=())

    def __repr__(self) -> str:
        """Return one line: the kind of site, the value and the size of the table."""
        layers, columns = self.effects.shape[1:]
        return (
            f"InterventionSweep({self.kind!r}, value {self.value!r}, {layers} × {columns}, {len(self.effects)} images)"
        )

    @property
    def table(self) -> Tensor:
        """The mean effect over the images, [L, H]."""
        return self.effects.mean(0)

    def plot(self, ax: Any = None) -> Any:
        """Draw the table as a heat map: layers are rows, heads columns; blue lowers the score, red raises it.

        Args:
            ax: matplotlib axes; None makes a figure.

        Returns:
            The axes.

        Example:
            >>> import clairvit as cv
            >>> cv.intervene_sweep("pets", "demo", kind="mlp", target="Bengal").plot().get_ylabel()
            'layer'
        """
        from clairvit.plotting.intervention_sweep import plot_intervention_sweep  # drawing comes after methods

        return plot_intervention_sweep(self, ax)

    def to_dict(self, values: bool = True) -> dict[str, Any]:
        """Return the sweep as JSON values under the names of the fields.

        Args:
            values: Include the effects of each image, and not only their mean.

        Returns:
            The content of the .json file.
        """
        content: dict[str, Any] = {
            "model": self.model,
            "kind": self.kind,
            "value": self.value,
            "score": self.score,
            "names": self.names,
            "target": self.target,
            "scores": self.scores.tolist(),
            "table": self.table.tolist(),
            "notes": self.notes,
        }
        return dict(to_json(content | ({"effects": self.effects.tolist()} if values else {})))

    def _table(self) -> list[TableRow]:
        """Return a row per image and site."""
        return [
            {"model": self.model, "image": name, "target": target, "kind": self.kind, "value": self.value}
            | {"layer": layer, "head": head if self.kind == "head" else None, "score": self.score, "effect": effect}
            for name, target, effects in zip(self.names, self.target, self.effects.tolist(), strict=True)
            for layer, of_layer in enumerate(effects)
            for head, effect in enumerate(of_layer)
        ]

    def save(self, path: str | PathLike[str]) -> Path:
        """Write a file by its suffix: a heat map, .json (`to_dict`), .csv (a row per image and site), .npz the effects.

        Args:
            path: The file to write; readers never see a partial file.

        Returns:
            The path.

        Raises:
            BadInput: A suffix that cannot be written.
        """
        from clairvit.plotting.intervention_sweep import save_intervention_sweep

        return save_intervention_sweep(self, Path(path))


def check_sweep(kind: Any, value: Any, source: Any) -> None:
    """Raise an error for a kind or value of a sweep that does not exist, and for source images that are not used."""
    if kind not in KINDS:
        raise UnknownName(
            f"There is no kind '{kind}'.{did_you_mean(str(kind), KINDS)} Choose one of: {', '.join(KINDS)}."
        )
    if isinstance(value, Tensor):
        raise WrongType(
            f"The value of a sweep is a tensor; expected one of: {', '.join(VALUES)}. Use cv.intervene instead."
        )
    if value not in VALUES:
        raise UnknownName(
            f"There is no value '{value}'.{did_you_mean(str(value), VALUES)} Choose one of: {', '.join(VALUES)}."
        )
    check_source_is_used(source, [value])
    if value == "source" and source is None:
        raise no_source()


@own_grad_mode()
@torch.no_grad()
def intervene(
    model: ModelLike,
    images: Any,
    sites: Mapping[Site, Value],
    *,
    source: Any = None,
    target: Any = None,
    batch_size: int | None = None,
    on_error: OnError = "raise",
) -> InterventionScores:
    """Replace activations of the model while it runs, and return its scores with and without.

    Args:
        model: A `cv.Model`, a name for `cv.load`, or any `nn.Module`.
        images: As in `cv.explain`.
        sites: Site -> what its tokens become: "zero"; "mean", the mean over the image's patch tokens at the site, as
            the changed pass computes it; "source", the activation of the source images there; or a tensor
            [B, tokens, d], [tokens, d] or [d]. Applied in this order.
        source: Images for "source": one for all, or as many as `images`.
        target: Which output is computed, as in `cv.explain`: a prompt, a region, a query, a word or a neuron has scores
            of its own. None: the class scores, of which `.difference` names one.
        batch_size: Images in one pass; None: 8, or 32 on a GPU.
        on_error: As in `cv.evaluate`.

    Returns:
        `InterventionScores`: `.original` and `.intervened` [B, C], and `.difference(target)` [B].

    Raises:
        BadInput: A layer, head or token out of range, a value of another shape, or images that cannot be used.
        UnknownName: A value that is no tensor and none of zero, mean and source.
        NotApplicable: The model has no such activation: blocks that are no modules, attention inside windows.

    Example:
        >>> import clairvit as cv
        >>> sites = {cv.Site(layer=5, head=2): "zero", cv.Site(layer=9, part="mlp"): "mean"}
        >>> cv.intervene("pets", "demo", sites)
        InterventionScores(layer 5, head 2; layer 9, mlp, scores [1, 37])
        >>> same = cv.intervene("pets", "demo", {cv.Site(layer=3): "source"}, source="demo")  # the image's own tokens
        >>> bool((same.difference() == 0).all())
        True
    """
    if not isinstance(sites, Mapping) or not sites:
        raise BadInput("No site was given; expected a mapping such as {cv.Site(layer=3, head=2): 'zero'}.")
    check_source_is_used(source, sites.values())
    question = Question.of_dataset(model, images, target, batch_size=batch_size, needed=False)
    readout_model(question.model, target)  # scores and sites of several outputs have nothing in common
    with closing(_runs_and_edits(question, source, on_error)) as runs:
        return InterventionScores.concat(
            InterventionScores(
                original=run.recording.logits,
                intervened=edits.scores(sites),
                sites=tuple(sites),
                names=run.batch.names,
                model=run.model,
                asked=None if run.named is None else run.named[0],
                notes=run.batch.notes,
            )
            for run, edits in runs
        )


@own_grad_mode()
@torch.no_grad()
def intervene_sweep(
    model: ModelLike,
    images: Any,
    *,
    kind: Kind = "head",
    target: Any = None,
    value: Literal["zero", "mean", "source"] = "zero",
    source: Any = None,
    score: str | None = None,
    batch_size: int | None = None,
    on_error: OnError = "raise",
) -> InterventionSweep:
    """Replace every layer, or every head of every layer, by itself: one forward pass per site.

    Args:
        model: As in `cv.intervene`.
        images: As in `cv.intervene`.
        kind: "head", "block" (its input tokens), "attention" or "mlp" (what they add to the residual stream).
        target: What is scored, as in `cv.explain`; None is the class that the unchanged model predicts.
        value: "zero", "mean" or "source", as in `cv.intervene`.
        source: Images for "source", as in `cv.intervene`.
        score: logit, prob or logprob; None is the logit, or the target's own kind.
        batch_size: As in `cv.intervene`.
        on_error: As in `cv.evaluate`.

    Returns:
        An `InterventionSweep`: `.effects` [B, L, H], their mean `.table` [L, H], `.plot()` and `.save()`.

    Raises:
        UnknownName: A kind, value, class or score that does not exist.
        BadInput: A target or images that cannot be used.
        NotApplicable: As in `cv.intervene`.

    Example:
        >>> import clairvit as cv
        >>> cv.intervene_sweep("pets", "demo", target="Bengal")
        InterventionSweep('head', value 'zero', 12 × 3, 1 images)
    """
    check_sweep(kind, value, source)
    question = Question.of_dataset(model, images, target, score=score, batch_size=batch_size)
    readout_model(question.model, target)
    with closing(_runs_and_edits(question, source, on_error)) as runs:
        return InterventionSweep.concat(_sweep_run(run, edits, kind, value) for run, edits in runs)


def _sweep_run(run: Run, edits: SiteEdits, kind: Kind, value: Value) -> InterventionSweep:
    """Replace the sites of one recorded batch one by one."""
    sites, (target,) = list(edits.sites_of_kind(kind)), run.targets
    columns = 1 + max((site.head or 0 for site in sites), default=0)
    before = target(run.recording.logits)  # [B]
    effects = before.new_full((len(before), len(run.recording.calls), columns), float("nan"))
    for site in track(sites, f"{kind} replaced"):
        effects[:, site.layer, site.head or 0] = target(edits.scores({site: value})) - before
    return InterventionSweep(
        effects=effects,
        kind=kind,
        value=str(value),
        target=target.names,
        score=target.score,
        scores=before.detach(),
        names=run.batch.names,
        model=run.model.name,
        notes=run.batch.notes,
    )


def _runs_and_edits(question: Question, source: Any, on_error: OnError) -> Generator[tuple[Run, SiteEdits], None, None]:
    """Yield each recorded batch with the edits that replace its activations; raise BadInput if no image can be read."""
    count, size = len(question.images), question.execution.batch_size or chunk_size(question.model)
    pixels = None if source is None else prepare(as_images(source), question.model).pixels
    any_run = False
    with closing(iter_runs(question, (), on_error=error_handler(on_error), size=size, label="images")) as runs:
        for run in runs:
            shape = (count, *run.batch.pixels.shape[1:])
            if pixels is not None and (len(pixels) not in (1, count) or pixels.shape[1:] != shape[1:]):
                raise BadInput(
                    f"The source images are {list(pixels.shape)} and the images {list(shape)}; expected one source "
                    "image for all, or one for each, of the same size."
                )
            of_rows = pixels if pixels is None or len(pixels) == 1 else pixels[list(run.rows)]
            yield run, SiteEdits(run.recording, of_rows, run.rows, count)
            any_run = True
    if not any_run:
        raise BadInput("None of the images could be read; expected at least one that can.")
