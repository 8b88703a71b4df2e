"""Features as pictures, without a target: principal components, similarities and norms of patch tokens.

features = cv.features(model, "photos/")
features.pca                 # [B, rows, cols, 3], one basis for all images
features.similarity(3, 5)    # cosine of every patch to the one in row 3, column 5
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from clairvit._io import to_json
from clairvit._rows import RowSequence, per_row, same, union
from clairvit._tables import TableRow, Tabular
from clairvit.errors import BadInput, ClairWarning, NotApplicable, user_stacklevel
from clairvit.methods.collect import versions
from clairvit.methods.principal_components import principal_components
from clairvit.methods.runs import Question, chunk_size, iter_runs
from clairvit.models.coerce import ModelLike
from clairvit.models.images import UnusualRange, unusual_notes
from clairvit.models.model import Model
from clairvit.models.preprocess import Preprocess
from clairvit.models.state_hash import WeightsHash
from clairvit.numerics import map_statistics, widened
from clairvit.tracing.grid import on_grid
from clairvit.tracing.module_state import own_grad_mode
from clairvit.tracing.outlier_tokens import FEWEST_PATCHES, OUTLIER_RATIO, has_comparable_tokens, norm_ratios
from clairvit.tracing.trace import Trace, run_backward

ALL = "all"
COMPONENTS = 3  # red, green and blue
FEWEST_TOKENS = COMPONENTS + 1  # of which three components say something
CLIPPED = 1.0  # per cent of the patches beyond each end of a colour scale
Foreground = Literal["positive", "negative"]
SIDES = ("positive", "negative")


def _take_of_each_layer(layers: tuple[PatchFeatures, ...], rows: list[int]) -> tuple[PatchFeatures, ...]:
    return tuple(layer.take(rows) for layer in layers)


def _join_each_layer(parts: Sequence[tuple[PatchFeatures, ...]]) -> tuple[PatchFeatures, ...]:
    return tuple(PatchFeatures.concat(layers) for layers in zip(*parts, strict=True)) if all(parts) else ()


class PatchFeatures(RowSequence, Tabular):
    """The patch tokens of one layer as pictures: principal components, norms, outliers, similarities.

    A sequence: `len(features)`, `features[0]`, `features[2:5]` and iteration give the features of some of the images,
    in the same basis and on the same colour scale; parts of one basis can be joined (`PatchFeatures.concat`). A
    notebook cell that ends with one shows its picture.

    Args:
        tokens: [B, rows, cols, d], the output of the layer.
        pca: [B, rows, cols, 3], (x − mean) · components in float64; 0 outside the foreground, if there is one.
        explained_variance: [3], the variance of the components over the patches of all images.
        explained_variance_ratio: [3], their share in the total variance.
        components: [3, d], orthonormal; the entry of largest magnitude of each is positive.
        mean: [d] of the patches.
        norms: [B, rows, cols], |x|.
        outliers: bool [B, rows, cols], patches of more than 5 median norms of their image; None where norms cannot be
            compared (windows, stages, CNNs).
        limits: [2, 3], the 1st and 99th percentile of each component over all images: the ends of the colour scale.
        layer: The index of the layer.
        layer_name: "block 11", or the name of a CNN's stage.
        names: B names of images.
        model: The name of the model.
        pixels: [B, 3, H, W], the normalised input of the model.
        preprocess: The model's preprocessing.
        foreground: bool [B, rows, cols], the patches that the components were computed from; None: all.
        layers: The features of each layer, if asked for; each has a basis of its own.
        notes: Preprocessing that was assumed, layers that were left out, …
        weights: The hash of the model's parameters and buffers, as `.weights_hash` reads it.
        versions: Package versions that the result depends on.

    Example:
        >>> import clairvit as cv
        >>> features = cv.features("pets", "demo")
        >>> features
        PatchFeatures(block 11 of pets, 1×14×14 patches, 192 channels)
        >>> features.similarity(7, 7).shape
        torch.Size([1, 14, 14])
    """

    tokens: Tensor = per_row()
    pca: Tensor = per_row()
    explained_variance: Tensor = same()
    explained_variance_ratio: Tensor = same()
    components: Tensor = same()
    mean: Tensor = same()
    norms: Tensor = per_row()
    outliers: Tensor | None = per_row()
    limits: Tensor = same()
    layer: int = same()
    layer_name: str = same()
    names: tuple[str, ...] = per_row()
    model: str = same()
    pixels: Tensor = per_row()
    preprocess: Preprocess = same()
    foreground: Tensor | None = per_row(default=None)
    layers: tuple[PatchFeatures, ...] = per_row(default=(), take=_take_of_each_layer, join=_join_each_layer)
    notes: tuple[str, ...] = union(default=())
    weights: WeightsHash = same(default_factory=lambda: WeightsHash(""), repr=False)
    versions: dict[str, str] = same(default_factory=dict)

    @property
    def weights_hash(self) -> str:
        """Return a hash of the model's parameters and buffers, computed when it is first read."""
        return self.weights.value

    def __repr__(self) -> str:
        """Return one line: layer, model and shape."""
        patches = "×".join(map(str, self.norms.shape))
        return f"PatchFeatures({self.layer_name} of {self.model}, {patches} patches, {self.tokens.shape[-1]} channels)"

    @property
    def grid(self) -> tuple[int, int]:
        """Return rows and columns of the patches."""
        return int(self.norms.shape[1]), int(self.norms.shape[2])

    def similarity(self, row: int, col: int, image: int | None = None) -> Tensor:
        """Return the cosine of every patch to one of them, x_p · x_q / (|x_p| |x_q|), [B, rows, cols] in float64.

        Args:
            row: The row of the patch, from the top; −1 is the last.
            col: Its column, from the left.
            image: The image that the patch is of, for all B images; None: of each image its own patch.

        Returns:
            The cosines; 0 where a token is zero.

        Raises:
            BadInput: There is no such patch or image.
        """
        rows, cols = self.grid
        row, col = _checked_index("row", row, rows), _checked_index("col", col, cols)
        units = unit_vectors(self.tokens)
        reference = units[:, row, col]  # [B, d]
        if image is not None:
            reference = reference[_checked_index("image", image, len(self)), None]  # [1, d]
        return (units * reference[:, None, None]).sum(-1)

    def similarities(self) -> Tensor:
        """Return the cosine of every pair of patches of an image, [B, patches, patches] in float64, row by row.

        Returns:
            The cosines; row p is `similarity` of patch p.

        Example:
            >>> import clairvit as cv
            >>> cv.features("pets", "demo").similarities().shape
            torch.Size([1, 196, 196])
        """
        units = unit_vectors(self.tokens).flatten(1, 2)  # [B, patches, d]
        return units @ units.transpose(1, 2)

    def strongest_channels(self, count: int = 8) -> Tensor:
        """Return the channels with the largest mean |activation| over the patches, [B, count], the strongest first.

        Args:
            count: How many; all of them where the layer has fewer.

        Returns:
            Their indices; `tokens[..., index]` is the feature map of one, and `save("f.png", channels=8)` draws them.

        Raises:
            BadInput: The count is below 1.

        Example:
            >>> import clairvit as cv
            >>> cv.features("pets", "demo").strongest_channels(3).shape
            torch.Size([1, 3])
        """
        check_channels(count)
        means = self.tokens.abs().flatten(1, 2).mean(1)  # [B, d]
        return means.topk(min(count, means.shape[1])).indices

    def plot(self, ax: Any = None, **display: Any) -> Any:
        """Draw the components of each image as colours on matplotlib axes.

        Args:
            ax: Axes to draw on: one for a single image, a sequence of B for several; None makes a figure.
            **display: smooth=True blends neighbouring patches.

        Returns:
            The axes of a single image, or an array of B axes.

        Example:
            >>> import clairvit as cv
            >>> cv.features("pets", "demo").plot().get_title()
            'demo'
        """
        from clairvit.plotting.features import plot_features  # drawing comes after methods

        return plot_features(self, ax, **display)

    def to_dict(
        self, values: bool = True, patch: tuple[int, int] | None = None, channels: int | None = None
    ) -> dict[str, Any]:
        """Return the features as JSON values under the names of the fields; lists have one entry per image.

        Args:
            values: Include components and norms of each patch.
            patch: (row, column) of the patch that all others are compared with.
            channels: How many of the strongest channels of each layer are named.

        Returns:
            The content of the .json file.

        Example:
            >>> import clairvit as cv
            >>> cv.features("pets", "demo").to_dict(values=False)["grid"]
            [14, 14]
        """
        content: dict[str, Any] = {
            "model": self.model,
            "weights_hash": self.weights_hash,
            "preprocess": self.preprocess.to_dict(),
            "layer": self.layer,
            "layer_name": self.layer_name,
            "grid": list(self.grid),
            "channels": int(self.tokens.shape[-1]),
            "names": self.names,
            "explained_variance": self.explained_variance.tolist(),
            "explained_variance_ratio": self.explained_variance_ratio.tolist(),
            "norm_statistics": [map_statistics(norms) for norms in self.norms],
            "outliers": None  # (row, column) of each
            if self.outliers is None
            else [patches.nonzero().tolist() for patches in self.outliers],
            "foreground": None  # the share of patches
            if self.foreground is None
            else [float(patches.double().mean()) for patches in self.foreground],
            "patch": patch,
            "notes": self.notes,
            "versions": self.versions,
            "layers": [
                {
                    "layer": layer.layer,
                    "layer_name": layer.layer_name,
                    "grid": list(layer.grid),
                    "explained_variance_ratio": layer.explained_variance_ratio.tolist(),
                }
                for layer in self.layers
            ],
            "strongest_channels": None  # layer -> those of each image
            if channels is None
            else {layer.layer_name: layer.strongest_channels(channels).tolist() for layer in (self.layers or (self,))},
        }
        if values:
            content |= {"pca": self.pca.tolist(), "norms": self.norms.tolist()}
            if patch is not None:
                content["similarity"] = self.similarity(*patch).tolist()
        return dict(to_json(content))

    def _table(self) -> list[TableRow]:
        """Return a row per image and patch: its components, its norm, and whether it is an outlier."""
        names = ("component_1", "component_2", "component_3")
        outliers = [None] * self.norms.numel() if self.outliers is None else self.outliers.flatten().tolist()
        places = itertools.product(self.names, *map(range, self.grid))
        values = zip(places, self.pca.flatten(0, 2).tolist(), self.norms.flatten().tolist(), outliers, strict=True)
        return [
            {"model": self.model, "layer": self.layer_name, "image": image, "row": row, "column": column}
            | dict(zip(names, components, strict=True))
            | {"norm": norm, "outlier": is_outlier}
            for (image, row, column), components, norm, is_outlier in values
        ]

    def save(
        self,
        path: str | PathLike[str],
        *,
        patch: tuple[int, int] | None = None,
        channels: int | None = None,
        **display: Any,
    ) -> Path:
        """Write a file by its suffix: a picture, .json (`to_dict`), .csv (a row per patch), .npz tokens and components.

        Args:
            path: The file to write; readers never see a partial file.
            patch: (row, column) of the patch that all others are compared with, in the picture and the file.
            channels: Draw the feature maps of so many of the strongest channels in place of the components, a row per
                layer; a document names them.
            **display: Display options: dpi=, smooth=True, and layers=True for the picture of all layers.

        Returns:
            The path.

        Raises:
            BadInput: Another suffix, or no such patch.
            UnknownName: A display option that does not exist.
        """
        from clairvit.plotting.features import save_features

        if channels is not None:
            check_channels(channels)
        return save_features(self, Path(path), patch=patch, channels=channels, **display)

    def _repr_png_(self) -> bytes:
        """Return the picture that a notebook shows."""
        from clairvit.plotting.features import features_png

        return features_png(self)


@own_grad_mode()
def features(
    model: ModelLike,
    images: Any,
    *,
    layer: int | Literal["all"] = -1,
    foreground: Foreground | None = None,
    threshold: float = 0.0,
    batch_size: int | None = None,
) -> PatchFeatures:
    """Show what a model's patch tokens have in common, by forward passes alone: no target, no gradient.

    The tokens of all images together give one basis of three principal components, computed in float64. Red, green and
    blue therefore mean the same in every image of the call, whatever their order.

    Args:
        model: As in `cv.explain`.
        images: As in `cv.explain`.
        layer: The block (or stage of a CNN) whose output is shown, from 0; −1 is the last one, before the final norm.
            "all": the last one, and every layer in `.layers`.
        foreground: "positive" or "negative": keep the patches on that side of the first component, and compute the
            components again from these alone, as DINOv2's figures do. Which side is the object is for you to see.
        threshold: With `foreground`: how far on that side, in standard deviations of the first component.
        batch_size: Images in one pass; None: 8, or 32 on a GPU.

    Returns:
        A `PatchFeatures`: `.pca`, `.norms`, `.outliers`, `.similarity(row, col)`, `.plot()`, `.save("f.png")`.

    Raises:
        BadInput: An image, layer or option that cannot be used.
        UnknownName: A model that does not exist.
        NotApplicable: The layer's tokens do not lie on a grid, or are not finite.

    Example:
        >>> import clairvit as cv
        >>> features = cv.features("pets", "demo")
        >>> features.pca.shape, features.grid
        (torch.Size([1, 14, 14, 3]), (14, 14))
        >>> len(cv.features("pets", "demo", layer="all").layers)
        12
    """
    check_options(layer, foreground, threshold)
    question = Question.of(model, images, batch_size=batch_size, scored="never")
    collected = _collect(question, layer)
    results = [
        _patch_features(output, collected, question.model, foreground, threshold) for output in collected.outputs
    ]
    notes = tuple(dict.fromkeys(note for result in results for note in result.notes))
    return replace(results[-1], layers=tuple(results) if layer == ALL else (), notes=notes)


@dataclass(frozen=True, eq=False)
class LayerOutput:
    """The output of one layer on its grid."""

    index: int
    name: str  # "block 11", "layer4"
    tokens: Tensor | None  # [B, rows, cols, d]; None where they form no grid


@dataclass(frozen=True, eq=False)
class _Collected:
    """What forward passes over all images left."""

    outputs: tuple[LayerOutput, ...]
    pixels: Tensor  # [B, 3, H, W]
    names: tuple[str, ...]
    comparable: bool  # norms can be compared
    weights: WeightsHash
    notes: tuple[str, ...]


def check_options(layer: Any, foreground: Any, threshold: Any) -> None:
    """Raise BadInput for options of `features` that fit no model."""
    if layer != ALL and (not isinstance(layer, int) or isinstance(layer, bool)):
        raise BadInput(f"layer={layer!r} was given; expected the number of a layer such as -1, the last, or 'all'.")
    if foreground is not None and foreground not in SIDES:
        raise BadInput(f"foreground={foreground!r} was given; expected 'positive' or 'negative', or None for all.")
    if isinstance(threshold, bool) or not isinstance(threshold, int | float) or not math.isfinite(threshold):
        raise BadInput(f"threshold={threshold!r} was given; expected a finite number of standard deviations.")
    if foreground is None and threshold != 0:
        raise BadInput(f"threshold={threshold:g} was given without a foreground; expected foreground='positive' too.")


def check_channels(count: Any) -> None:
    """Raise BadInput for a number of channels that cannot be shown."""
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise BadInput(f"{count!r} channels were asked for; expected a whole number of 1 or more.")


def unit_vectors(tokens: Tensor) -> Tensor:
    """Return tokens [..., d] with length 1, in float64; a token that is zero stays so."""
    wide = tokens.double()
    lengths = wide.norm(dim=-1, keepdim=True)
    return wide / torch.where(lengths > 0, lengths, torch.ones_like(lengths))


def _checked_index(name: str, value: Any, count: int) -> int:
    """Return an index from 0; raise BadInput if there is no such one of `count`."""
    if not isinstance(value, int) or isinstance(value, bool) or not -count <= value < count:
        raise BadInput(f"{name}={value!r} was given; expected a whole number from 0 to {count - 1}.")
    return value % count


def _collect(question: Question, layer: int | str) -> _Collected:
    """Run all images, a few at a time, and return the output of the layer, or of every layer that lies on a grid."""
    model, size = question.model, question.execution.batch_size or chunk_size(question.model)
    parts: list[list[LayerOutput]] = []
    pixels: list[Tensor] = []
    names: list[str] = []
    notes: list[str] = []
    unusual: list[tuple[UnusualRange, Sequence[str]]] = []
    with closing(iter_runs(question, (), size=size, label="features")) as runs:
        for run in runs:
            trace = run_backward(run.recording, None, None, keep=False)
            outputs = _selected(layer_outputs(trace), layer, trace)
            comparable = has_comparable_tokens(run.recording.structure)
            weights = run.weights_hash
            parts.append([output for output in outputs if output.tokens is not None])
            skipped = [output.name for output in outputs if output.tokens is None]
            notes += [*run.batch.notes, *(f"The tokens of {name} lie on no grid and are left out." for name in skipped)]
            pixels.append(run.batch.pixels.cpu())
            names += run.batch.names
            unusual += [(item, run.batch.names) for item in run.batch.unusual]
    notes += unusual_notes(unusual, len(names), model.preprocess)
    sizes = sorted({tuple(batch_pixels.shape[-2:]) for batch_pixels in pixels})
    if len(sizes) > 1:
        raise BadInput(f"The images have different sizes: {sizes}; expected one size, as they share a basis.")
    joined = [replace(same[0], tokens=torch.cat([_tokens(part) for part in same])) for same in zip(*parts, strict=True)]
    return _Collected(tuple(joined), torch.cat(pixels), tuple(names), comparable, weights, tuple(dict.fromkeys(notes)))


def _tokens(output: LayerOutput) -> Tensor:
    assert output.tokens is not None
    return output.tokens


def layer_outputs(trace: Trace) -> list[LayerOutput]:
    """Return the output of each layer, on the CPU: what the next block receives, or the feature map of a CNN's stage.

    The last block's output is taken before the final norm.
    """
    structure = trace.recording.structure
    structure.check_members(trace.recording.model.name, "patch features")
    if structure.stages:
        entries = [(layer.name, layer.tokens, layer.grid) for layer in trace.layers]
    else:
        following = [(layer.tokens, layer.grid) for layer in trace.layers[1:]]
        last = [(trace.final_tokens, trace.layers[-1].grid)] if trace.layers else []
        entries = [(f"block {i}", tokens, grid) for i, (tokens, grid) in enumerate([*following, *last])]
    outputs = []
    for index, (name, tokens, grid) in enumerate(entries):
        form_grid = tokens is not None and structure.in_order
        patches = on_grid(widened(tokens), structure.layout, grid, trace.pixels) if tokens is not None else None
        outputs.append(LayerOutput(index, name, patches.detach().cpu() if form_grid and patches is not None else None))
    return outputs


def _selected(outputs: Sequence[LayerOutput], layer: int | str, trace: Trace) -> list[LayerOutput]:
    """Return the layer that was asked for, or all; raise where there is none or its tokens form no grid."""
    name = trace.recording.model.name
    if not any(output.tokens is not None for output in outputs):
        raise NotApplicable(
            f"No layer of {name} lies on a grid of patches ({len(outputs)} layers seen), so its tokens make no "
            "picture; expected a CNN or a Vision Transformer whose blocks are modules, or layout=cv.Layout(…) in "
            "cv.wrap."
        )
    if layer == ALL:
        return list(outputs)
    count = len(outputs)
    if not isinstance(layer, int) or not -count <= layer < count:
        raise BadInput(f"layer={layer} was given, and {name} has {count} layers; expected 0 to {count - 1}, or 'all'.")
    output = outputs[layer]
    if output.tokens is None:
        fitting = ", ".join(str(other.index) for other in outputs if other.tokens is not None)
        raise NotApplicable(
            f"The tokens of {output.name} of {name} do not lie on a grid of patches (one cell, or no module of its "
            f"own); expected one of the layers that do: {fitting}, or a larger image."
        )
    return [output]


def _patch_features(
    output: LayerOutput, collected: _Collected, model: Model, side: Foreground | None, threshold: float
) -> PatchFeatures:
    """Return the components, norms and outliers of one layer's tokens."""
    tokens = _tokens(output)
    if tokens.ndim == 5:
        raise NotApplicable(
            f"Features are drawn on images, and {model.name} takes clips; expected an image model. cv.trace(…) has the "
            "tokens of each layer."
        )
    batch, rows, cols, width = tokens.shape
    flat = tokens.reshape(-1, width)
    _check_tokens(flat, output.name, model)
    basis, kept, notes = principal_components(flat, COMPONENTS), None, collected.notes
    if basis.total_variance == 0:
        note = f"All patch tokens of {output.name} of {model.name} are equal, so the components are zero."
        warnings.warn(note, ClairWarning, stacklevel=user_stacklevel())
        notes = (*notes, note)
    elif side is not None:
        scores = basis.project(flat)[:, 0] * (1 if side == "positive" else -1)
        kept = scores > threshold * float(basis.variances[0]) ** 0.5
        if int(kept.sum()) < FEWEST_TOKENS:
            raise BadInput(
                f"The foreground has {int(kept.sum())} of {len(flat)} patches (threshold={threshold:g}, {side} side); "
                f"expected {FEWEST_TOKENS} or more: lower the threshold."
            )
        basis = principal_components(flat[kept], COMPONENTS)
    pca = basis.project(flat)
    coloured = (pca if kept is None else pca[kept]).numpy()
    limits = torch.from_numpy(np.percentile(coloured, [CLIPPED, 100 - CLIPPED], axis=0))
    pca = pca if kept is None else pca * kept[:, None]
    comparable = collected.comparable and rows * cols >= FEWEST_PATCHES
    ratios = norm_ratios(tokens.flatten(1, 2)) if comparable else None  # [B, patches]
    return PatchFeatures(
        tokens=tokens,
        pca=pca.reshape(batch, rows, cols, COMPONENTS),
        explained_variance=basis.variances,
        explained_variance_ratio=basis.ratios,
        components=basis.components,
        mean=basis.mean,
        norms=tokens.norm(dim=-1),
        outliers=None if ratios is None else (ratios > OUTLIER_RATIO).reshape(batch, rows, cols),
        limits=limits,
        layer=output.index,
        layer_name=output.name,
        names=collected.names,
        model=model.name,
        pixels=collected.pixels,
        preprocess=model.preprocess,
        foreground=None if kept is None else kept.reshape(batch, rows, cols),
        notes=notes,
        weights=collected.weights,
        versions=versions(),
    )


def _check_tokens(flat: Tensor, name: str, model: Model) -> None:
    """Raise where three components of tokens [n, d] cannot be computed."""
    count, width = flat.shape
    if count < FEWEST_TOKENS or width < COMPONENTS:
        raise BadInput(
            f"{name} of {model.name} has {count} patches of {width} channels in all; expected {FEWEST_TOKENS} or more "
            f"patches of {COMPONENTS} or more channels: use a larger image, more images or an earlier layer."
        )
    if not bool(flat.isfinite().all()):
        raise NotApplicable(
            f"The tokens of {name} of {model.name} are not finite, so they have no principal components; expected "
            "finite numbers: run the model in float32, or look at an earlier layer."
        )
