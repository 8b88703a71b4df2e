"""Patch activations and read the scores: `cv.patch`, `cv.patch_sweep` and `cv.logit_lens`.

The user's own model runs; one activation of it is replaced on the way (`perturbation/activation_patching.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor

from clairvit._io import to_json
from clairvit._progress import track
from clairvit._rows import RowSequence, per_row, same
from clairvit._tables import TableRow, Tabular
from clairvit.errors import Argument, BadInput, NotApplicable, Placeholder, UnknownName, WrongType, did_you_mean
from clairvit.models.coerce import ModelLike, as_images, as_model
from clairvit.models.images import Batch, prepare
from clairvit.models.model import Layout, Model
from clairvit.perturbation.activation_patching import BlockOutputs, Edit, Place, PlacePatching
from clairvit.perturbation.site import PARTS, Site
from clairvit.targets.base import TargetBatch, class_name
from clairvit.targets.resolve import check_same_readout, readout_model, resolve_for
from clairvit.tracing.module_state import frozen_eval, own_grad_mode
from clairvit.tracing.recorders.head_replay import HeadReplay
from clairvit.tracing.recorders.residual_branches import ResidualBranches
from clairvit.tracing.recording import Recording, record
from clairvit.tracing.structure import model_structure
from clairvit.tracing.trace import Trace

Value = Literal["zero", "mean", "source"] | Tensor
Kind = Literal["head", "block", "attention", "mlp"]
VALUES = ("zero", "mean", "source")
KINDS = ("head", "block", "attention", "mlp")


@dataclass(frozen=True, eq=False)
class PatchedScores(Tabular):
    """Hold the scores of images with and without patched activations.

    Attributes:
        original: The model's scores, [B, C].
        patched: Its scores with the activations replaced, [B, C].
        sites: The sites that were replaced.
        model: The model whose scores they are: that of `cv.patch`, or one that reads what its target is about.
        asked: The target of `cv.patch`.

    Example:
        >>> import clairvit as cv
        >>> scores = cv.patch("pets", "demo", {cv.Site(layer=11, part="attention"): "zero"})
        >>> scores.original.shape, scores.difference("Bengal").shape
        (torch.Size([1, 37]), torch.Size([1]))
    """

    original: Tensor
    patched: Tensor
    sites: tuple[Site, ...]
    model: Model = field(repr=False)
    asked: Any = field(default=None, repr=False)

    def __repr__(self) -> str:
        """Return one line: the sites and the shape of the scores."""
        return f"PatchedScores({'; '.join(map(str, self.sites))}, scores {list(self.original.shape)})"

    def to_dict(self) -> dict[str, Any]:
        """Return the scores as JSON values.

        Returns:
            Sites, and the scores [B, C] without (`original`) and with the replacement (`patched`).
        """
        scores = {"original": self.original.tolist(), "patched": self.patched.tolist()}
        return dict(to_json({"model": self.model.name, "sites": [str(site) for site in self.sites]} | scores))

    def _table(self) -> list[TableRow]:
        """Return a row per image and class."""
        sites = "; ".join(map(str, self.sites))
        scores = zip(self.original.tolist(), self.patched.tolist(), strict=True)
        return [
            {"model": self.model.name, "sites": sites, "image": image, "class": index, "name": name}
            | {"original": original, "patched": patched}
            for image, pair in enumerate(scores)
            for index, (original, patched) in enumerate(zip(*pair, strict=True))
            for name in [class_name(self.model.labels, index)]
        ]

    def difference(self, target: Any = None, *, score: str | None = None) -> Tensor:
        """Return the target's score patched − original, [B].

        Args:
            target: As in `cv.explain`, of the output that was computed; None is that of `cv.patch`, or the class that
                is predicted without patching.
            score: logit, prob or logprob; None is the logit, or the target's own kind.

        Raises:
            UnknownName: A class or score that does not exist.
            BadInput: A target that cannot be used, or that reads another output than `cv.patch` was asked for.
        """
        batch = self.target(target, score)
        return batch(self.patched) - batch(self.original)

    def target(self, target: Any = None, score: str | None = None) -> TargetBatch:
        """Return a target, resolved against the original scores."""
        if target is None:
            target = self.asked
        check_same_readout(self.model, target)
        (batch,) = resolve_for(self.model, target, self.original, score=score)
        return batch


class PatchSweep(RowSequence, Tabular):
    """Hold how a target's score changes when one site after the other is patched.

    A sequence of its images: `len(sweep)`, `sweep[0]`, `sweep[2:5]`; `PatchSweep.concat` joins those of batches.

    Attributes:
        effects: Patched − original score of the target, [B, L, H]; H = 1 unless the sites are heads, and NaN where a
            layer has fewer heads than others.
        kind: What was patched: head, block, attention or mlp.
        value: What it was replaced with: zero, mean or source.
        target: The title of each image's target.
        score: The kind of score.
        scores: The score of each image's target without patching, [B].
        names: The names of the images.
        model: The name of the model.

    Example:
        >>> import clairvit as cv
        >>> sweep = cv.patch_sweep("pets", "demo", kind="mlp", target="Bengal")
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

    def __repr__(self) -> str:
        """Return one line: the kind of site, the value and the size of the table."""
        layers, columns = self.effects.shape[1:]
        return f"PatchSweep({self.kind!r}, value {self.value!r}, {layers} × {columns}, {len(self.effects)} images)"

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
            >>> cv.patch_sweep("pets", "demo", kind="mlp", target="Bengal").plot().get_ylabel()
            'layer'
        """
        from clairvit.plotting.patch_sweep import plot_patch_sweep  # drawing comes after perturbation

        return plot_patch_sweep(self, ax)

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
        from clairvit.plotting.patch_sweep import save_patch_sweep

        return save_patch_sweep(self, Path(path))


def check_sweep(kind: Any, value: Any, source: Any) -> None:
    """Raise an error for a kind or value of a sweep that does not exist, and for source images that are not used."""
    if kind not in KINDS:
        raise UnknownName(
            f"There is no kind '{kind}'.{did_you_mean(str(kind), KINDS)} Choose one of: {_listed(KINDS)}."
        )
    if isinstance(value, Tensor):
        raise WrongType(f"The value of a sweep is a tensor; expected one of: {_listed(VALUES)}. Use cv.patch instead.")
    if value not in VALUES:
        raise UnknownName(
            f"There is no value '{value}'.{did_you_mean(str(value), VALUES)} Choose one of: {_listed(VALUES)}."
        )
    _check_source_is_used(source, [value])
    if value == "source" and source is None:
        raise _no_source()


@own_grad_mode()
@torch.no_grad()
def patch(
    model: ModelLike, images: Any, sites: Mapping[Site, Value], *, source: Any = None, target: Any = None
) -> PatchedScores:
    """Replace activations of the model while it runs, and return its scores with and without.

    Args:
        model: A `cv.Model`, a name for `cv.load`, or any `nn.Module`.
        images: As in `cv.explain`; all of them are one batch.
        sites: Site -> what its tokens become: "zero"; "mean", the mean over the image's patch tokens at the site, as
            the patched pass computes it; "source", the activation of the source images there; or a tensor
            [B, tokens, d], [tokens, d] or [d]. Applied in this order.
        source: Images for "source": one for all, or as many as `images`.
        target: Which output is computed, as in `cv.explain`: a prompt, a region, a query, a word or a neuron has scores
            of its own. None: the class scores, of which `.difference` names one.

    Returns:
        `PatchedScores`: `.original` and `.patched` [B, C], and `.difference(target)` [B].

    Raises:
        BadInput: A layer, head or token out of range, a value of another shape, or source images that do not fit.
        UnknownName: A value that is no tensor and none of zero, mean and source.
        NotApplicable: The model has no such activation: blocks that are no modules, attention inside windows.

    Example:
        >>> import clairvit as cv
        >>> scores = cv.patch("pets", "demo", {cv.Site(layer=5, head=2): "zero", cv.Site(layer=9, part="mlp"): "mean"})
        >>> scores
        PatchedScores(layer 5, head 2; layer 9, mlp, scores [1, 37])
        >>> same = cv.patch("pets", "demo", {cv.Site(layer=3): "source"}, source="demo")  # the image's own tokens
        >>> bool((same.difference() == 0).all())
        True
    """
    if not isinstance(sites, Mapping) or not sites:
        raise BadInput("No site was given; expected a mapping such as {cv.Site(layer=3, head=2): 'zero'}.")
    _check_source_is_used(source, sites.values())
    run = _patching_run(model, images, source, target)
    edits = [_site_edit(run, site, value) for site, value in sites.items()]
    scores = PatchedScores(run.recording.logits, run.patched(edits), tuple(sites), run.recording.model, target)
    if target is not None:
        scores.target()  # a class that does not exist is refused here
    return scores


@own_grad_mode()
@torch.no_grad()
def patch_sweep(
    model: ModelLike,
    images: Any,
    *,
    kind: Kind = "head",
    target: Any = None,
    value: Literal["zero", "mean", "source"] = "zero",
    source: Any = None,
    score: str | None = None,
) -> PatchSweep:
    """Patch every layer, or every head of every layer, by itself: one forward pass per site.

    Args:
        model: As in `cv.patch`.
        images: As in `cv.patch`.
        kind: "head", "block" (its input tokens), "attention" or "mlp" (what they add to the residual stream).
        target: What is scored, as in `cv.explain`; None is the class that is predicted without patching.
        value: "zero", "mean" or "source", as in `cv.patch`.
        source: Images for "source", as in `cv.patch`.
        score: logit, prob or logprob; None is the logit, or the target's own kind.

    Returns:
        A `PatchSweep`: `.effects` [B, L, H], their mean `.table` [L, H], `.plot()` and `.save()`.

    Raises:
        UnknownName: A kind, value, class or score that does not exist.
        BadInput: A target or source images that cannot be used.
        NotApplicable: As in `cv.patch`.

    Example:
        >>> import clairvit as cv
        >>> cv.patch_sweep("pets", "demo", target="Bengal")
        PatchSweep('head', value 'zero', 12 × 3, 1 images)
    """
    check_sweep(kind, value, source)
    run = _patching_run(model, images, source, target)
    sites = list(_sites_of_kind(run.recording, kind))
    original = run.recording.logits
    (batch,) = resolve_for(run.recording.model, target, original, score=score)
    columns = 1 + max((site.head or 0 for site in sites), default=0)
    before = batch(original)
    effects = before.new_full((len(before), len(run.recording.calls), columns), float("nan"))
    for site in track(sites, f"{kind} patched"):
        patched = run.patched([_site_edit(run, site, value)])
        effects[:, site.layer, site.head or 0] = batch(patched) - before
    return PatchSweep(
        effects, kind, value, batch.names, batch.score, before.detach(), run.names, run.recording.model.name
    )


@own_grad_mode()
@torch.no_grad()
def logit_lens(model: ModelLike | Trace, images: Any = None) -> Tensor:
    """Apply the model's own head to the output of each block: the scores as if the later blocks were left out.

    score[l] = head(x_l), where x_l is the output of block l, and the head is everything that follows the last block:
    norm, pooling and classifier (nostalgebraist, 2020). The last one is the model's score, up to rounding.

    Args:
        model: As in `cv.patch`, or a `cv.trace`, whose model and images are used.
        images: As in `cv.patch`; None with a trace.

    Returns:
        The scores [L, B, C].

    Raises:
        BadInput: Images next to a trace, or none without one.
        NotApplicable: The model's blocks are no modules, or attend inside windows.

    Example:
        >>> import clairvit as cv
        >>> scores = cv.logit_lens("pets", "demo")
        >>> scores.shape
        torch.Size([12, 1, 37])
    """
    if isinstance(model, Trace):
        if images is not None:
            raise BadInput("A trace and images were given; expected one of them, as a trace has images of its own.")
        wrapped, pixels = model.recording.model, model.pixels.detach()
    elif images is None:
        raise BadInput("No images were given; expected images, or a trace: cv.logit_lens(cv.trace(model, images)).")
    else:
        wrapped, batch = _model_and_batch(model, images)
        pixels = batch.pixels
    structure = model_structure(wrapped, pixels)
    with frozen_eval(wrapped.module), BlockOutputs(structure) as blocks:
        recording = record(wrapped, pixels, differentiable=False, recorders=(HeadReplay,))
    _check_layers(recording)
    _check_whole_blocks(recording)
    replay = recording[HeadReplay].replay
    scores: list[Tensor] = []
    for call in recording.calls:
        output = blocks.outputs[call.block]
        if output is None or recording.end is None or output.shape != recording.end.shape:
            raise NotApplicable(f"A block of {wrapped.name} gives no tokens that its head could read.")
        scores.append(replay(output, recording.logits))
    return torch.stack(scores)


# One run: the recording of the images, that of the source, and where each site is


@dataclass(frozen=True, eq=False)
class _PatchingRun:
    """The images and the source images of one call, each recorded once."""

    recording: Recording
    names: tuple[str, ...]  # of the images
    source: Tensor | None  # pixels [1 or B, 3, H, W]
    _source_activations: dict[Place, Tensor] = field(default_factory=dict)

    @functools.cached_property
    def branches(self) -> ResidualBranches:
        """The sums that add attention and MLP to the residual stream, from the graph of the first image."""
        return record(self.recording.model, self.recording.pixels[:1], recorders=(ResidualBranches,))[ResidualBranches]

    def patched(self, edits: list[tuple[Place, Edit]]) -> Tensor:
        """Return the scores of the images [B, C] with edits."""
        return _run_with(self.recording, self.recording.pixels, edits)

    def source_activation(self, place: Place) -> Tensor:
        """Return the activation of the source images at a place, [B, …]."""
        if self.source is None:
            raise _no_source()
        if place not in self._source_activations:
            activations: list[Tensor] = []
            _run_with(self.recording, self.source, [(place, lambda activation: activations.append(activation.clone()))])
            self._source_activations[place] = activations[0]
        activation = self._source_activations[place]
        return activation.expand(len(self.recording.pixels), *activation.shape[1:])


def _run_with(recording: Recording, pixels: Tensor, edits: list[tuple[Place, Edit]]) -> Tensor:
    by_place: dict[Place, list[Edit]] = {}
    for place, edit in edits:
        by_place.setdefault(place, []).append(edit)
    with frozen_eval(recording.model.module), PlacePatching(recording, len(pixels), by_place):
        return recording.model.logits(pixels).detach()


def _model_and_batch(model: ModelLike, images: Any, target: Any = None) -> tuple[Model, Batch]:
    images = as_images(images)
    wrapped = readout_model(as_model(model, images), target)
    return wrapped, prepare(images, wrapped)


def _patching_run(model: ModelLike, images: Any, source: Any, target: Any = None) -> _PatchingRun:
    """Return the recording of the images and the pixels of the source images, checked."""
    wrapped, batch = _model_and_batch(model, images, target)
    pixels = batch.pixels
    other = None if source is None else prepare(as_images(source), wrapped).pixels
    if other is not None and (len(other) not in (1, len(pixels)) or other.shape[1:] != pixels.shape[1:]):
        raise BadInput(
            f"The source images are {list(other.shape)} and the images {list(pixels.shape)}; expected one source image "
            "for all, or one for each, of the same size."
        )
    recording = record(wrapped, pixels, differentiable=False)
    _check_layers(recording)
    return _PatchingRun(recording, batch.names, other)


def _check_source_is_used(source: Any, values: Iterable[Any]) -> None:
    if source is not None and not any(isinstance(value, str) and value == "source" for value in values):
        raise BadInput(
            "Source images were given, and no site has the value 'source'; give it to a site, or leave them out."
        )


def _no_source() -> BadInput:
    return BadInput(
        "A site's value is 'source' and no source images were given; pass ",
        Argument("source", Placeholder("images")),
        ".",
    )


def _check_layers(recording: Recording) -> None:
    recording.structure.check_members(recording.model.name, "patching")
    kinds = sorted({call.kind for call in recording.calls})
    if kinds != ["tokens"] or recording.structure.layout is None:
        seen = f"attention of the kinds {_listed(kinds)} was seen" if kinds else "no attention was seen"
        raise NotApplicable(
            f"{recording.model.name} does not attend between all its tokens in every layer ({seen}), so that its "
            "activations are not those of a plain Vision Transformer; expected a model with global attention."
        )


def _check_whole_blocks(recording: Recording) -> None:
    structure = recording.structure
    if not structure.whole_blocks or any(site.block is None for site in structure.layers):
        raise NotApplicable(
            f"The blocks of {recording.model.name} are no modules whose output is the next one's input, so that a "
            "block's tokens are not known exactly; expected one module per block, or cv.Site(layer, head=…)."
        )


def _sites_of_kind(recording: Recording, kind: Kind) -> Iterator[Site]:
    for layer, call in enumerate(recording.calls):
        if kind == "head":
            yield from (Site(layer, head=head) for head in range(call.v.shape[1]))
        else:
            yield Site(layer, part=None if kind == "block" else kind)


def _site_edit(run: _PatchingRun, site: Site, value: Any) -> tuple[Place, Edit]:
    """Return the place of a site, and the edit that gives its tokens a value."""
    if not isinstance(site, Site):
        raise WrongType(f"A site is a {type(site).__name__}; expected cv.Site(layer=…).")
    if not isinstance(value, Tensor | str):
        raise WrongType(
            f"The value of {site} is a {type(value).__name__}; expected a tensor or one of: {_listed(VALUES)}."
        )
    if isinstance(value, str) and value not in VALUES:
        raise UnknownName(
            f"There is no value '{value}'.{did_you_mean(value, VALUES)} Choose one of: {_listed(VALUES)}; or give "
            "a tensor."
        )
    (place, head), rows = _place(run, site), _token_rows(run.recording, site)
    replacement = _replacement(run, site, place, rows, value)

    def edit(activation: Tensor) -> Tensor:
        edited = activation.clone()
        tokens = edited if head is None else edited[:, head]  # [B, N, d]
        tokens[:, rows] = replacement(tokens)
        return edited

    return place, edit


def _replacement(
    run: _PatchingRun, site: Site, place: Place, rows: Tensor, value: Tensor | str
) -> Callable[[Tensor], Tensor]:
    """Return a function of a site's tokens [B, N, d] whose value is what its tokens `rows` become, [B, rows, d]."""
    if isinstance(value, Tensor):
        checked = _checked_value(run.recording, site, rows, value)
        return lambda tokens: checked.to(tokens).expand(len(tokens), len(rows), -1)
    if value == "source":
        activation = run.source_activation(place)
        head = _place(run, site)[1]
        source = (activation if head is None else activation[:, head])[:, rows]
        return lambda tokens: source
    if value == "zero":
        return lambda tokens: torch.zeros_like(tokens[:, rows])
    layout = _ordered_layout(run.recording)

    def mean_of_patches(tokens: Tensor) -> Tensor:
        patches = tokens[:, layout.patches_among(tokens.shape[1])]
        return patches.mean(1, keepdim=True).expand(-1, len(rows), -1)

    return mean_of_patches


def _checked_value(recording: Recording, site: Site, rows: Tensor, value: Tensor) -> Tensor:
    """Return the tensor that the user gave for a site; raise BadInput unless it has a fitting shape and is finite."""
    block_input, call = recording.inputs[site.layer], recording.calls[site.layer]
    assert site.head is not None or block_input is not None
    like = call.v if block_input is None or site.head is not None else recording.as_tokens(block_input)
    shape = [len(recording.pixels), len(rows), int(like.shape[-1])]
    if list(value.shape) not in (shape, shape[1:], shape[2:]):
        raise BadInput(
            f"The value of {site} has shape {list(value.shape)}; expected {shape}, {shape[1:]} for every image, or "
            f"{shape[2:]} for every token."
        )
    if not value.is_floating_point() or not bool(value.isfinite().all()):
        raise BadInput(
            f"The value of {site} is of {value.dtype} or not finite; expected finite floating-point numbers."
        )
    return value.detach()


def _ordered_layout(recording: Recording) -> Layout:
    """Return the layout, if the patch tokens lie row by row in the sequence."""
    layout = recording.structure.layout
    if recording.structure.region is not None:
        raise recording.structure.region.refusal()
    if layout is None or not recording.structure.in_order:
        raise NotApplicable(
            f"The patch tokens of {recording.model.name} do not lie row by row on the image, so that patches have "
            "no index; expected tokens=None with another value than 'mean', or layout=cv.Layout(…) in cv.wrap."
        )
    return layout


def _token_rows(recording: Recording, site: Site) -> Tensor:
    """Return the rows of a site's tokens among all tokens, [T]."""
    device = recording.pixels.device
    if site.tokens is None:
        return torch.arange(recording.calls[site.layer].queries, device=device)
    layout = _ordered_layout(recording)
    if site.tokens == "patches":
        return torch.tensor(layout.patch_rows, device=device)
    if site.tokens in ("prefix", "suffix"):
        before = site.tokens == "prefix"
        rows = [row for row in layout.other_rows if (row < layout.prefix) == before]
        if not rows:
            raise BadInput(
                f"{recording.model.name} has no {site.tokens} tokens; expected tokens='patches', indices or None."
            )
        return torch.tensor(rows, device=device)
    indices = cast(tuple[int, ...], site.tokens)
    if max(indices) >= layout.patches:
        raise BadInput(
            f"There is no patch {max(indices)}: {recording.model.name} has {layout.patches}; give indices from 0 to "
            f"{layout.patches - 1}."
        )
    return torch.tensor(indices, device=device) + layout.prefix


def _place(run: _PatchingRun, site: Site) -> tuple[Place, int | None]:
    """Return where a site's activation is computed, and which of the heads there it is.

    Raises:
        BadInput: The model has no such layer or head.
    """
    recording, layers = run.recording, len(run.recording.calls)
    if site.layer >= layers:
        raise BadInput(f"There is no layer {site.layer}: the model has {layers}; give one from 0 to {layers - 1}.")
    call = recording.calls[site.layer]
    if site.head is not None:
        heads = int(call.v.shape[1])
        if site.head >= heads:
            raise BadInput(f"There is no head {site.head}: layer {site.layer} has {heads}; give one below {heads}.")
        output, head = call.output_of_head(site.head)
        before = recording.structure.sites[: recording.structure.layer_calls[site.layer]]
        return Place("heads", sum(other.heads_apart for other in before) + output), head
    _check_whole_blocks(recording)
    if site.part is None:
        return Place("tokens", call.block), None
    branches = run.branches.branches(site.layer)
    if branches is None:
        raise NotApplicable(
            f"Layer {site.layer} of {recording.model.name} does not add attention and MLP to the residual stream by "
            "two sums, so that their outputs are not known exactly; expected such a block, or cv.Site(layer)."
        )
    branch = branches[PARTS.index(site.part)]
    return Place("sum", branch.number, branch.term), None


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)
