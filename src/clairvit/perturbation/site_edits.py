"""Edits at sites: what the tokens of a `Site` become while the model of a recording runs.

sites = SiteEdits(recording, source=None, rows=(0, 1), count=2)
sites.scores({Site(layer=3, head=2): "zero"})   # [B, C]
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
from torch import Tensor

from clairvit.errors import Argument, BadInput, NotApplicable, Placeholder, UnknownName, WrongType, did_you_mean
from clairvit.models.model import Layout
from clairvit.perturbation.activation_patching import Edit, Place, PlacePatching
from clairvit.perturbation.site import PARTS, Site
from clairvit.tracing.module_state import frozen_eval
from clairvit.tracing.recorders.residual_branches import ResidualBranches
from clairvit.tracing.recording import Recording, record

Value = Literal["zero", "mean", "source"] | Tensor
Kind = Literal["head", "block", "attention", "mlp"]
VALUES = ("zero", "mean", "source")
KINDS = ("head", "block", "attention", "mlp")


@dataclass(frozen=True, eq=False)
class SiteEdits:
    """Run the model of a recording with the tokens of sites replaced.

    Args:
        recording: The forward pass of B images; every layer must attend between all tokens.
        source: The pixels of the source images, [1 or B, 3, H, W]; None: there are none.
        rows: The rows of the B images among all that were given.
        count: The number of all images: a value may have an entry for each.
    """

    recording: Recording
    source: Tensor | None
    rows: Sequence[int]
    count: int
    _source_activations: dict[Place, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_layers(self.recording, "interventions")

    def scores(self, sites: Mapping[Site, Value]) -> Tensor:
        """Return the scores of the images [B, C] with the tokens of each site replaced, in the order of the mapping."""
        return self._run(self.recording.pixels, [self._edit(site, value) for site, value in sites.items()])

    def sites_of_kind(self, kind: Kind) -> Iterator[Site]:
        """Yield every site of a kind, layer by layer."""
        for layer, call in enumerate(self.recording.calls):
            if kind == "head":
                yield from (Site(layer, head=head) for head in range(call.v.shape[1]))
            else:
                yield Site(layer, part=None if kind == "block" else kind)

    @functools.cached_property
    def _branches(self) -> ResidualBranches:
        """The sums that add attention and MLP to the residual stream, from the graph of the first image."""
        return record(self.recording.model, self.recording.pixels[:1], recorders=(ResidualBranches,))[ResidualBranches]

    def _run(self, pixels: Tensor, edits: Iterable[tuple[Place, Edit]]) -> Tensor:
        by_place: dict[Place, list[Edit]] = {}
        for place, edit in edits:
            by_place.setdefault(place, []).append(edit)
        model = self.recording.model
        with frozen_eval(model.module), PlacePatching(self.recording, len(pixels), by_place):
            return model.logits(pixels).detach()

    def _source_activation(self, place: Place) -> Tensor:
        """Return the activation of the source images at a place, [B, …]."""
        if self.source is None:
            raise no_source()
        if place not in self._source_activations:
            activations: list[Tensor] = []
            self._run(self.source, [(place, lambda activation: activations.append(activation.clone()))])
            self._source_activations[place] = activations[0]
        activation = self._source_activations[place]
        return activation.expand(len(self.recording.pixels), *activation.shape[1:])

    def _edit(self, site: Site, value: Any) -> tuple[Place, Edit]:
        """Return the place of a site, and the edit that gives its tokens a value."""
        _check_site_and_value(site, value)
        (place, head), rows = self._place(site), _token_rows(self.recording, site)
        replacement = self._replacement(site, place, head, rows, value)

        def edit(activation: Tensor) -> Tensor:
            edited = activation.clone()
            tokens = edited if head is None else edited[:, head]  # [B, N, d]
            tokens[:, rows] = replacement(tokens)
            return edited

        return place, edit

    def _replacement(
        self, site: Site, place: Place, head: int | None, rows: Tensor, value: Tensor | str
    ) -> Callable[[Tensor], Tensor]:
        """Return a function of a site's tokens [B, N, d]: what its tokens `rows` become, [B, rows, d]."""
        if isinstance(value, Tensor):
            checked = self._checked_value(site, rows, value)
            return lambda tokens: checked.to(tokens).expand(len(tokens), len(rows), -1)
        if value == "source":
            activation = self._source_activation(place)
            source = (activation if head is None else activation[:, head])[:, rows]
            return lambda tokens: source
        if value == "zero":
            return lambda tokens: torch.zeros_like(tokens[:, rows])
        layout = _ordered_layout(self.recording)

        def mean_of_patches(tokens: Tensor) -> Tensor:
            patches = tokens[:, layout.patches_among(tokens.shape[1])]
            return patches.mean(1, keepdim=True).expand(-1, len(rows), -1)

        return mean_of_patches

    def _checked_value(self, site: Site, rows: Tensor, value: Tensor) -> Tensor:
        """Return what a user's tensor says of these images; raise BadInput unless its shape fits and it is finite."""
        recording = self.recording
        block_input, call = recording.inputs[site.layer], recording.calls[site.layer]
        assert site.head is not None or block_input is not None
        like = call.v if block_input is None or site.head is not None else recording.as_tokens(block_input)
        shape = [self.count, len(rows), int(like.shape[-1])]
        if list(value.shape) not in (shape, shape[1:], shape[2:]):
            raise BadInput(
                f"The value of {site} has shape {list(value.shape)}; expected {shape}, {shape[1:]} for every image, or "
                f"{shape[2:]} for every token."
            )
        if not value.is_floating_point() or not bool(value.isfinite().all()):
            raise BadInput(
                f"The value of {site} is of {value.dtype} or not finite; expected finite floating-point numbers."
            )
        return value.detach()[list(self.rows)] if value.ndim == 3 else value.detach()

    def _place(self, site: Site) -> tuple[Place, int | None]:
        """Return where a site's activation is computed, and which of the heads there it is.

        Raises:
            BadInput: The model has no such layer or head.
        """
        recording, layers = self.recording, len(self.recording.calls)
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
        check_whole_blocks(recording)
        if site.part is None:
            return Place("tokens", call.block), None
        branches = self._branches.branches(site.layer)
        if branches is None:
            raise NotApplicable(
                f"Layer {site.layer} of {recording.model.name} does not add attention and MLP to the residual stream "
                "by two sums, so that their outputs are not known exactly; expected such a block, or cv.Site(layer)."
            )
        branch = branches[PARTS.index(site.part)]
        return Place("sum", branch.number, branch.term), None


def check_source_is_used(source: Any, values: Iterable[Any]) -> None:
    """Raise BadInput for source images that no site takes."""
    if source is not None and not any(isinstance(value, str) and value == "source" for value in values):
        raise BadInput(
            "Source images were given, and no site has the value 'source'; give it to a site, or leave them out."
        )


def no_source() -> BadInput:
    """Return the error for a site that takes source images where there are none."""
    return BadInput(
        "A site's value is 'source' and no source images were given; pass ",
        Argument("source", Placeholder("images")),
        ".",
    )


def check_layers(recording: Recording, what: str) -> None:
    """Raise NotApplicable unless every layer attends between all tokens; `what` is not known for several networks."""
    recording.structure.check_members(recording.model.name, what)
    kinds = sorted({call.kind for call in recording.calls})
    if kinds != ["tokens"] or recording.structure.layout is None:
        seen = f"attention of the kinds {', '.join(kinds)} was seen" if kinds else "no attention was seen"
        raise NotApplicable(
            f"{recording.model.name} does not attend between all its tokens in every layer ({seen}), so that its "
            "activations are not those of a plain Vision Transformer; expected a model with global attention."
        )


def check_whole_blocks(recording: Recording) -> None:
    """Raise NotApplicable unless each block is a module whose output is the input of the next."""
    structure = recording.structure
    if not structure.whole_blocks or any(site.block is None for site in structure.layers):
        raise NotApplicable(
            f"The blocks of {recording.model.name} are no modules whose output is the next one's input, so that a "
            "block's tokens are not known exactly; expected one module per block, or cv.Site(layer, head=…)."
        )


def _check_site_and_value(site: Any, value: Any) -> None:
    if not isinstance(site, Site):
        raise WrongType(f"A site is a {type(site).__name__}; expected cv.Site(layer=…).")
    if not isinstance(value, Tensor | str):
        raise WrongType(
            f"The value of {site} is a {type(value).__name__}; expected a tensor or one of: {', '.join(VALUES)}."
        )
    if isinstance(value, str) and value not in VALUES:
        raise UnknownName(
            f"There is no value '{value}'.{did_you_mean(value, VALUES)} Choose one of: {', '.join(VALUES)}; or give "
            "a tensor."
        )


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
