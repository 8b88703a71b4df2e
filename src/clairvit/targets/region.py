"""Region targets: the mean score of a class, or the mean depth, inside a part of the image."""

from __future__ import annotations

import functools
import hashlib
import inspect
import math
import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from clairvit.errors import Argument, BadInput, Call, NotApplicable, Placeholder
from clairvit.models.activation import Activation
from clairvit.models.model import Model
from clairvit.models.readout import BoundInputs, SizedReadout, describe_output, unwrap_readout
from clairvit.targets.base import ScoreContext, Target, TargetBatch
from clairvit.targets.class_ import resolve_classes
from clairvit.targets.query import query_activation

Size = tuple[int, int]  # rows, columns
MASKS = 3  # that SAM predicts for a point or box: whole, part, subpart


@dataclass(frozen=True)
class Region(Target):
    """The mean score of a class inside a region, for models that return scores for every pixel.

    The score is 1/|R| · Σ_{p ∈ R} s_c(p), where s_c is the model's own output, interpolated to the size of the image
    (bilinear, as segmenters do it). What s_c is depends on the model:

    * segmentation (SegFormer, DPT, UperNet, any module that returns [B, C, h, w] or {"out": …}): the class logit;
    * MaskFormer, Mask2Former, DETR's masks: Σ_q p_q(c) · sigmoid(m_q), the probability of the class in each query
      times that of its mask (with a sigmoid per class where the model has one);
    * depth (DPT, Depth Anything, any module that returns [B, h, w]): the depth; there is no class;
    * SAM, SAM 2: the logit of a mask that it predicts for the point or box, which is its prompt; `class_` is the mask
      (0, 1 or 2), and None the one of the highest predicted IoU. With prompts of your own (`inputs=`) any region is
      read.

    Means of scores are no probabilities: the activation is raw.

    Args:
        class_: A class index or name; None is the class of the highest mean score in the region.
        mask: The region as rows of booleans or zeros and ones, [H, W] (array, tensor or list), of the image that the
            model sees: after the resize and the crop of `model.preprocess`. Another size is resized by nearest
            neighbour.
        box: (left, top, right, bottom) in pixels of that image: columns left … right - 1, rows top … bottom - 1.
        point: (x, y) in pixels of that image: column x, row y.

    Raises:
        BadInput: The region is empty, or not inside the image.

    Example:
        >>> import clairvit as cv, torch
        >>> segmenter = cv.wrap(torch.nn.Conv2d(3, 2, 8, stride=8), size=32, labels=["sky", "sea"])
        >>> sky = cv.Region("sky", box=(0, 0, 32, 16))
        >>> cv.explain(segmenter, torch.randn(1, 3, 32, 32), "saliency", target=sky).targets
        ('sky in 0,0,32,16',)
    """

    class_: int | str | None = None
    mask: Any = field(default=None, repr=False, compare=False)
    box: tuple[float, float, float, float] | None = None
    point: tuple[float, float] | None = None
    _digest: str = field(default="", init=False, repr=False)  # of the mask, so that regions can be compared

    def __post_init__(self) -> None:
        given = [name for name in ("mask", "box", "point") if getattr(self, name) is not None]
        if len(given) != 1:
            raise BadInput(
                f"Region was given {' and '.join(given) or 'no place'}; expected one of mask=, "
                "box=(left, top, right, bottom) and point=(x, y)."
            )
        if self.mask is not None:
            mask = _as_mask(self.mask)
            object.__setattr__(self, "mask", mask)
            digest = hashlib.sha256(np.packbits(mask).tobytes()).hexdigest()
            object.__setattr__(self, "_digest", f"{mask.shape[0]}×{mask.shape[1]} {digest}")
        if self.box is not None:
            object.__setattr__(self, "box", _as_numbers("box", self.box, ("left", "top", "right", "bottom")))
        if self.point is not None:
            object.__setattr__(self, "point", _as_numbers("point", self.point, ("x", "y")))

    @property
    def place(self) -> str:
        """Return the place in words: "in 0,0,32,16", "at 5,7", "in the mask"."""
        if self.box is not None:
            return f"in {','.join(f'{side:g}' for side in self.box)}"
        return "in the mask" if self.point is None else f"at {','.join(f'{side:g}' for side in self.point)}"

    def readout(self, model: Model) -> Model:
        """Return the model of the region's mean scores [B, C]; every class of a region shares it."""
        kind = _dense_kind(model)
        place = replace(self, class_=None)
        function = functools.partial(kind.read, place, query_activation(model))
        labels = kind.labels(model)
        return model.read(
            ("region", place), function, readout=kind.module(place), labels=labels, classifier=True, layout=model.layout
        )

    def resolve(self, context: ScoreContext) -> TargetBatch:
        """Return the mean score of the class in the region."""
        kind = _CLASSES if context.model is None else _dense_kind(context.model)
        if kind.read is _read_prompted:
            classes = _best_masks(context) if self.class_ is None else resolve_classes(self.class_, context)
        else:
            classes = resolve_classes(self.class_, context)
        names = [context.name(index) for index in classes]
        if context.classes == 1 and not context.labels:
            names = ["score"] * len(classes)  # a single map that has no name
        batch = context.target([f"{name} {self.place}" for name in names], classes, [((c, 1.0),) for c in classes])
        return replace(batch, score=kind.score, score_is_default=False)

    def region(self, model: Model, pixels: Tensor) -> Tensor | None:
        """Return the pixels of the region, the same in every image: bool [B, H, W]."""
        inside = torch.from_numpy(self.inside((int(pixels.shape[-2]), int(pixels.shape[-1]))))
        return inside.expand(len(pixels), -1, -1)

    def inside(self, size: Size) -> NDArray[np.bool_]:
        """Return which pixels of an image of (rows, columns) lie in the region, [rows, columns].

        A pixel lies in a box if its centre does.

        Raises:
            BadInput: The region is not inside the image, or holds no pixel.
        """
        if self.mask is not None:
            return _resized(self.mask, size)
        rows, columns = size
        if self.point is not None:
            x, y = self.point
            if not (0 <= x < columns and 0 <= y < rows):
                raise _outside(f"point=({x:g}, {y:g})", size)
            left, top = float(math.floor(x)), float(math.floor(y))
            right, bottom = left + 1, top + 1
        else:
            assert self.box is not None
            left, top, right, bottom = self.box
            if not (0 <= left < right <= columns and 0 <= top < bottom <= rows):
                raise _outside(f"box=({left:g}, {top:g}, {right:g}, {bottom:g})", size)
        x_centres, y_centres = np.arange(columns) + 0.5, np.arange(rows) + 0.5
        inside = np.outer((y_centres >= top) & (y_centres < bottom), (x_centres >= left) & (x_centres < right))
        if not inside.any():
            raise BadInput(f"box={self.box} holds the centre of no pixel; expected a box of at least one pixel.")
        return inside


def _outside(region: str, size: Size) -> BadInput:
    return BadInput(
        f"{region} does not lie inside the image that the model sees, {size[1]} pixels wide and {size[0]} high; "
        "expected (left, top, right, bottom) or (x, y) in pixels of that image, after the resize and the crop."
    )


def _as_numbers(name: str, values: Any, parts: tuple[str, ...]) -> tuple[float, ...]:
    """Return a box or a point as a tuple of finite numbers."""
    listed = values.tolist() if hasattr(values, "tolist") else values
    valid = isinstance(listed, tuple | list) and len(listed) == len(parts)
    if not valid or not all(isinstance(v, numbers.Real) and math.isfinite(v) for v in listed):
        raise BadInput(f"{name}={values!r} was given; expected ({', '.join(parts)}) in pixels.")
    return tuple(float(value) for value in listed)


def _as_mask(mask: Any) -> NDArray[np.bool_]:
    """Return a mask as booleans [rows, columns]; raise BadInput for other shapes and for an empty one."""
    values = mask.detach().cpu().numpy() if isinstance(mask, Tensor) else np.asarray(mask)
    if values.ndim != 2 or not values.size or values.dtype.kind not in "biuf":
        raise BadInput(
            f"The mask has shape {list(values.shape)} and type {values.dtype}; expected [H, W] of booleans, or of "
            "numbers where everything but 0 is inside."
        )
    if not np.isfinite(values).all():
        raise BadInput("The mask has NaN or infinite values; expected booleans, or zeros and ones.")
    inside: NDArray[np.bool_] = values != 0
    if not inside.any():
        raise BadInput("The mask is empty: no pixel of it is inside; expected at least one.")
    return inside


def _resized(mask: NDArray[np.bool_], size: Size) -> NDArray[np.bool_]:
    """Return the mask at the size of the image: each pixel has the value of the mask at its centre."""
    rows, columns = (
        ((np.arange(new) + 0.5) * old / new).astype(int) for new, old in zip(size, mask.shape, strict=True)
    )
    resized = mask[np.ix_(rows, columns)]
    if not resized.any():
        raise BadInput(
            f"The mask of {mask.shape[0]} × {mask.shape[1]} pixels is empty once it is resized to the image that the "
            f"model sees, {size[0]} × {size[1]}; expected a larger region."
        )
    return resized


# Reading: a mean over pixels of an interpolated output is a weighted mean of the output itself


@functools.lru_cache(maxsize=64)
def region_weights(region: Region, size: Size, cells: Size) -> NDArray[np.float64]:
    """Return weights w [h, w] with Σ w · s = the mean over the region of s [h, w], interpolated to the image's size.

    Bilinear interpolation is y = R s Cᵀ, so that the mean over a mask M of y is the sum of s · (Rᵀ M C) / |M|. The
    weights add up to 1.
    """
    inside = region.inside(size)
    rows, columns = (_interpolation(new, old) for new, old in zip(size, cells, strict=True))
    weights: NDArray[np.float64] = rows.T @ inside.astype(np.float64) @ columns / inside.sum()
    return weights


def _interpolation(pixels: int, cells: int) -> NDArray[np.float64]:
    """Return the matrix [pixels, cells] of linear interpolation, as torch's with align_corners=False."""
    source = np.maximum((np.arange(pixels) + 0.5) * cells / pixels - 0.5, 0.0)
    low = np.minimum(source.astype(int), cells - 1)
    high = np.minimum(low + 1, cells - 1)
    matrix = np.zeros((pixels, cells))
    np.add.at(matrix, (np.arange(pixels), low), 1 - (source - low))
    np.add.at(matrix, (np.arange(pixels), high), source - low)
    return matrix


def region_mean(values: Tensor, region: Region, size: Size) -> Tensor:
    """Return the means over a region of maps [..., h, w] that cover an image of `size`: [...]."""
    weights = region_weights(region, size, (int(values.shape[-2]), int(values.shape[-1])))
    return (values * torch.from_numpy(weights).to(values)).sum((-2, -1))


def _read_maps(region: Region, activation: Activation, output: Any, size: Size) -> Tensor:
    """Return the region's mean scores [B, C] of the output of a segmenter or a depth model.

    `activation` is that of the class scores of queries, where the model has some.
    """
    if _value(output, "pred_boxes") is not None and _value(output, "pred_masks") is None:
        raise NotApplicable(
            f"Region reads scores for every pixel, and the model returned {describe_output(output)}: boxes of "
            "queries. Name a query instead: ",
            Argument("target", Call("Query", Placeholder("INDEX"))),
            ", or cv.Query(class_='cat').",
        )
    classes, masks = _value(output, "class_queries_logits"), _value(output, "masks_queries_logits")
    if classes is None or masks is None:
        classes, masks = _value(output, "logits"), _value(output, "pred_masks")
    if classes is not None and masks is not None and classes.ndim == 3 and masks.ndim == 4:
        p = classes.sigmoid() if activation == "sigmoid" else _softmax_classes(classes)
        covered = region_mean(masks.sigmoid(), region, size)  # [B, Q]
        return (p * covered[..., None]).sum(1)
    maps = next((v for name in ("predicted_depth", "logits", "out") if (v := _value(output, name)) is not None), None)
    if maps is None and isinstance(output, tuple | list):
        maps = next((item for item in output if isinstance(item, Tensor)), None)
    maps = output if isinstance(output, Tensor) else maps
    if not isinstance(maps, Tensor) or maps.ndim not in (3, 4) or not _covers(maps, size):
        raise NotApplicable(
            "Region reads scores for every pixel, [B, classes, h, w] or [B, h, w] in the proportions of the image, and "
            f"the model returned {describe_output(output)}. Of a classifier explain a class: target='cat'; of anything "
            "else say what to read: target=cv.Output(function)."
        )
    return region_mean(maps if maps.ndim == 4 else maps[:, None], region, size)


def _softmax_classes(logits: Tensor) -> Tensor:
    """Return the probabilities of all classes but the last, "no object": [B, Q, C + 1] -> [B, Q, C].

    The softmax is written as exp(log p): followed by a product it would look like attention.
    """
    return logits.log_softmax(-1).exp()[..., :-1]


def _read_prompted(region: Region, _: Activation, output: Any, size: Size) -> Tensor:
    """Return of SAM's masks [B, 1, M, h, w] the mean logits in the region, then the predicted IoUs: [B, 2 M]."""
    masks, iou = _value(output, "pred_masks"), _value(output, "iou_scores")
    if masks is None or iou is None or masks.ndim != 5 or masks.shape[1] != 1 or masks.shape[2] != MASKS:
        raise NotApplicable(
            f"Region reads three masks for one point or box of the model, and it returned {describe_output(output)}; "
            "say what to read of that: target=cv.Output(function)."
        )
    return torch.cat([region_mean(masks[:, 0], region, size), iou[:, 0]], 1)


def _best_masks(context: ScoreContext) -> list[int]:
    """Return the mask of the highest predicted IoU of each image."""
    return [int(index) for index in context.logits[:, MASKS:].argmax(-1)]


def _value(output: Any, name: str) -> Tensor | None:
    """Return a tensor of an output by its name; None if there is none."""
    value = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
    return value if isinstance(value, Tensor) else None


def _covers(maps: Tensor, size: Size) -> bool:
    """Return whether maps [..., h, w] have the proportions of the image, give or take a cell."""
    rows, columns = int(maps.shape[-2]), int(maps.shape[-1])
    return rows * columns > 0 and abs(rows * size[1] - columns * size[0]) <= max(size)


# Kinds of models


class _Kind(NamedTuple):
    """How a kind of model is read."""

    score: str
    read: Callable[[Region, Activation, Any, Size], Tensor]
    labels: Callable[[Model], tuple[str, ...]]
    module: Callable[[Region], Callable[[nn.Module, Callable[..., Tensor]], nn.Module]]


def _plain(_: Region) -> type[SizedReadout]:
    return SizedReadout


def _prompted(region: Region) -> Callable[[nn.Module, Callable[..., Tensor]], nn.Module]:
    """Return the readout that gives SAM the region's point or box as its prompt."""
    if region.mask is not None:
        raise BadInput("SAM predicts a mask for a point or a box, and Region has a mask; expected point= or box=.")
    name, prompt = ("input_points", [[region.point]]) if region.point is not None else ("input_boxes", [region.box])

    def readout(module: nn.Module, function: Callable[..., Tensor]) -> nn.Module:
        return SizedReadout(BoundInputs(module, {name: torch.tensor([prompt], dtype=torch.float64)}), function)

    return readout


_CLASSES = _Kind("mean score", _read_maps, lambda model: model.labels, _plain)
_LOGITS = _CLASSES._replace(score="mean logit")
_QUERIES = _CLASSES._replace(score="mean probability")
_DEPTH = _CLASSES._replace(score="mean depth", labels=lambda _: ("depth",))
_PROMPTED = _Kind(
    "mean mask logit",
    _read_prompted,
    lambda _: tuple(f"{name} {index}" for name in ("mask", "IoU of mask") for index in range(MASKS)),
    _prompted,
)


def _dense_kind(model: Model) -> _Kind:
    """Return how a model is read, by the class of its module."""
    base = model.base or model
    module = unwrap_readout(base.module)
    name = type(module).__name__
    if "input_points" in inspect.signature(module.forward).parameters:
        return _PROMPTED._replace(module=_plain) if isinstance(base.module, BoundInputs) else _PROMPTED
    if name.endswith("ForDepthEstimation"):
        return _DEPTH
    if name.endswith("ForSemanticSegmentation"):
        return _LOGITS
    return _QUERIES if name.endswith("Segmentation") else _CLASSES
