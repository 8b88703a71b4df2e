"""Query targets: the class score or a box side of one query of a detector."""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from clairvit.errors import BadInput, NotApplicable, UnknownName, did_you_mean
from clairvit.models.activation import Activation
from clairvit.models.model import Model
from clairvit.models.readout import describe_output, unwrap_readout
from clairvit.targets.base import ScoreContext, Target, TargetBatch, class_name
from clairvit.targets.class_ import find_class, resolve_classes

SIDES = ("left", "top", "right", "bottom", "x", "y", "width", "height")  # of a box; x, y: its centre
NO_OBJECT = "no object"
# Trained with a softmax over the classes and "no object", the last column; transformers' other detectors: sigmoid.
_SOFTMAX_TYPES = frozenset(
    {"detr", "yolos", "table-transformer", "maskformer", "mask2former", "oneformer", "eomt", "eomt_dinov3"}
)


@dataclass(frozen=True)
class Query(Target):
    """The class score, or a side of the box, of one query of a detector such as DETR, YOLOS or RT-DETR.

    Read are class logits [B, queries, classes] and boxes [B, queries, 4] of (centre x, centre y, width, height) in
    fractions of the image. DETR, YOLOS and Mask2Former have a softmax over the classes and "no object"; RT-DETR,
    Deformable and Conditional DETR a sigmoid per class: probabilities are the model's own. A module of your own
    returns a mapping with "logits" (or "pred_logits") and "pred_boxes"; with `activation="softmax"` its last column
    is "no object".

    Without an index, the query of the highest probability of the class is chosen in each image as it is, once, and
    kept for all perturbed copies. Its score is the class logit.

    Two-stage detectors (RT-DETR, Deformable DETR with two_stage) number their queries anew for every image, by the
    confidence of their encoder: in a perturbed image the same number may be another place. Gradients are not affected.

    Args:
        index: The number of the query, from 0.
        class_: A class index or name; None is the query's most probable class, "no object" left out.
        box: None for the class score; or the side of the box, a fraction of the image: left, top, right, bottom, x, y
            (the centre), width, height.

    Raises:
        BadInput: Neither an index nor a class was given, or the index is no whole number.
        UnknownName: There is no such side.

    Example:
        >>> import clairvit as cv, torch
        >>> class Detector(torch.nn.Module):
        ...     def forward(self, pixels):
        ...         tokens = pixels.unfold(2, 8, 8).unfold(3, 8, 8).mean((4, 5)).flatten(2).mT  # [B, 16, 3]
        ...         return {"logits": tokens, "pred_boxes": tokens.sigmoid()[..., [0, 1, 2, 2]]}
        >>> detector = cv.wrap(Detector(), size=32, labels=["red", "green", "blue"], activation="sigmoid")
        >>> image = torch.full((1, 3, 32, 32), -1.0)
        >>> image[:, 1, 8:16, 8:16] = 1
        >>> cv.explain(detector, image, "saliency", target=cv.Query(5)).targets
        ('green (query 5)',)
        >>> cv.explain(detector, image, "saliency", target=cv.Query(class_="green", box="left")).targets
        ('left of green (query 5)',)
    """

    index: int | None = None
    class_: int | str | None = None
    box: str | None = None

    def __post_init__(self) -> None:
        if self.index is None and self.class_ is None:
            raise BadInput("Query was given neither an index nor a class; expected Query(17) or Query(class_='cat').")
        if self.index is not None:
            if isinstance(self.index, bool) or not hasattr(self.index, "__index__") or operator.index(self.index) < 0:
                raise BadInput(f"Query({self.index!r}) was given; expected the number of a query, from 0.")
            object.__setattr__(self, "index", operator.index(self.index))
        if self.box is None:
            return
        if self.box not in SIDES:
            raise UnknownName(
                f"A box has no side {self.box!r}.{did_you_mean(str(self.box), SIDES)} Expected one of "
                f"{', '.join(SIDES)}."
            )
        if self.index is not None and self.class_ is not None:
            raise BadInput(
                f"The box of query {self.index} is the same for every class, and class_={self.class_!r} was given; "
                f"leave out the index or the class."
            )

    def readout(self, model: Model) -> Model:
        """Return the model of the query's class scores, of its box, or of one class in all queries."""
        _refuse_segmenter(model)
        activation = query_activation(model)
        softmax = activation == "softmax"
        names = (model.base or model).labels
        if self.index is not None and self.box is not None:
            read = functools.partial(_read_box, self.index)
            return model.read(("query box", self.index), read, labels=SIDES, classifier=True)
        if self.index is not None:
            return model.read(
                ("query", self.index),
                functools.partial(_read_classes, self.index),
                labels=(*names, NO_OBJECT) if softmax and names else names,
                activation=activation,
                activation_reason=f"the class scores of a query have a {activation}",
                classifier=True,
            )
        index = self._class_index(model)
        read = functools.partial(_read_queries, index, softmax, self.box is not None)
        return model.read(("queries", index, self.box is not None), read, classifier=False)

    @property
    def region_forwards(self) -> int:
        """Return the one pass that reads the boxes."""
        return 1

    def region(self, model: Model, pixels: Tensor) -> Tensor | None:
        """Return the pixels inside the query's box in each image, bool [B, H, W], by one pass; None without boxes."""
        base = model.base or model
        with torch.no_grad():
            output = base.module(pixels)
        boxes = _pred_boxes(output)
        if boxes is None:
            return None
        queries = torch.full((len(pixels),), -1 if self.index is None else self.index, device=boxes.device)
        if self.index is None:
            softmax = query_activation(model) == "softmax"
            queries = _class_choice(_query_logits(output), self._class_index(model), softmax).argmax(-1)
        return _inside_boxes(boxes[torch.arange(len(boxes), device=boxes.device), queries], pixels.shape[-2:])

    def resolve(self, context: ScoreContext) -> TargetBatch:
        """Return the target of each image; of a class, in the query that has it with the highest probability."""
        if self.index is None:
            return self._resolve_best(context)
        if self.box is not None:
            side = SIDES.index(self.box)
            names = [f"{self.box} of query {self.index}"] * len(context)
            return _as_it_is(context, names, [side] * len(context), "box side")
        if self.class_ is None and context.activation == "softmax":  # "no object" is no class
            classes = [int(index) for index in context.logits[:, :-1].argmax(-1)]
        else:
            classes = resolve_classes(self.class_, context)
        names = [f"{context.name(index)} (query {self.index})" for index in classes]
        return context.target(names, classes, [((index, 1.0),) for index in classes])

    def _resolve_best(self, context: ScoreContext) -> TargetBatch:
        """Return the target in the best query of each image; the columns are choice [Q], then logits or sides."""
        count = context.classes // (2 if self.box is None else 1 + len(SIDES))
        queries = [int(query) for query in context.logits[:, :count].argmax(-1)]
        label = str(self.class_)
        if context.model is not None:
            label = class_name((context.model.base or context.model).labels, self._class_index(context.model))
        names = [f"{label} (query {query})" for query in queries]
        if self.box is None:
            return _as_it_is(context, names, [count + query for query in queries], "logit")
        side = SIDES.index(self.box)
        columns = [count + len(SIDES) * query + side for query in queries]
        return _as_it_is(context, [f"{self.box} of {name}" for name in names], columns, "box side")

    def _class_index(self, model: Model) -> int:
        """Return the index of the class; where neither labels nor configuration count them, it is checked when read."""
        assert self.class_ is not None
        labels = (model.base or model).labels
        config = getattr(unwrap_readout((model.base or model).module), "config", None)
        return find_class(self.class_, labels, len(labels) or getattr(config, "num_labels", None) or sys.maxsize)


def _as_it_is(context: ScoreContext, names: list[str], columns: list[int], score: str) -> TargetBatch:
    """Return the target that is one column of the scores per image, with no class and no probability."""
    return TargetBatch(
        tuple(names),
        (None,) * len(names),
        score,
        tuple(((column, 1.0),) for column in columns),
        activation="raw",
    )


def query_activation(model: Model) -> Activation:
    """Return what turns a query's class scores into probabilities: transformers' by its type, else the model's own."""
    base = model.base or model
    model_type = getattr(getattr(unwrap_readout(base.module), "config", None), "model_type", None)
    if model_type is None:
        return base.activation
    return "softmax" if model_type in _SOFTMAX_TYPES else "sigmoid"


def _refuse_segmenter(model: Model) -> None:
    name = type(unwrap_readout((model.base or model).module)).__name__
    if name.endswith(("ForSemanticSegmentation", "ForDepthEstimation", "ForImageClassification")):
        raise NotApplicable(
            f"Query reads the queries of a detector, and {name} has none. Of a segmenter or depth model name a part "
            "of the image: target=cv.Region('cat', box=(LEFT, TOP, RIGHT, BOTTOM)); of a classifier a class: "
            "target='cat'."
        )


def _query_logits(output: Any) -> Tensor:
    """Return class logits [B, Q, C] of what a detector returned."""
    for name in ("class_queries_logits", "logits", "pred_logits"):
        value = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
        if isinstance(value, Tensor) and value.ndim == 3:
            return value
    raise NotApplicable(
        "Query reads class scores of queries, 'logits' [B, queries, classes], and the model returned "
        f"{describe_output(output)}. Of a segmenter name a part of the image: target=cv.Region('cat', box=(LEFT, TOP, "
        "RIGHT, BOTTOM)); of a classifier a class: target='cat'."
    )


def _pred_boxes(output: Any) -> Tensor | None:
    """Return the boxes [B, Q, 4] of what a detector returned, (centre x, centre y, width, height); None without."""
    boxes = output.get("pred_boxes") if isinstance(output, Mapping) else getattr(output, "pred_boxes", None)
    return boxes if isinstance(boxes, Tensor) and boxes.ndim == 3 and boxes.shape[-1] == 4 else None


def _inside_boxes(boxes: Tensor, size: Sequence[int]) -> Tensor:
    """Return which pixels of images of (rows, columns) have their centre in boxes [B, 4]: bool [B, rows, columns].

    A box narrower than a pixel counts as one pixel wide, so that it is seen.
    """
    x, y, width, height = boxes.double().cpu().unbind(-1)
    rows, columns = ((torch.arange(count, dtype=torch.float64) + 0.5) / count for count in size)
    across = (columns - x[:, None]).abs() <= width[:, None].clamp(min=1 / size[1]) / 2  # [B, columns]
    down = (rows - y[:, None]).abs() <= height[:, None].clamp(min=1 / size[0]) / 2
    return down[:, :, None] & across[:, None, :]


def _query_sides(output: Any) -> Tensor:
    """Return the sides of all boxes [B, Q, 8], of (centre x, centre y, width, height)."""
    boxes = _pred_boxes(output)
    if boxes is None:
        raise NotApplicable(
            f"box= reads 'pred_boxes' [B, queries, 4], and the model returned {describe_output(output)}; leave box= "
            "out to explain a query's class."
        )
    x, y, width, height = boxes.unbind(-1)
    return torch.stack([x - width / 2, y - height / 2, x + width / 2, y + height / 2, x, y, width, height], -1)


def _check_query(index: int, count: int) -> None:
    if index >= count:
        raise BadInput(f"There is no query {index}: the model has {count}; give a number from 0 to {count - 1}.")


def _read_classes(index: int, output: Any) -> Tensor:
    """Return the class logits of one query, [B, C]."""
    logits = _query_logits(output)
    _check_query(index, logits.shape[1])
    return logits[:, index]


def _read_box(index: int, output: Any) -> Tensor:
    """Return the sides of one query's box, [B, 8]."""
    sides = _query_sides(output)
    _check_query(index, sides.shape[1])
    return sides[:, index]


def _read_queries(index: int, softmax: bool, box: bool, output: Any) -> Tensor:
    """Return of one class in all queries what the choice is made by, then its logits, or the sides of the boxes.

    Chosen is by log p, or by the logit where a sigmoid makes p of it: [B, Q + Q], or [B, Q + 8 Q].
    """
    logits = _query_logits(output)
    if index >= logits.shape[-1] - softmax:
        last = logits.shape[-1] - softmax - 1
        raise BadInput(f"There is no class {index}: the model has {last + 1}; give an index from 0 to {last}.")
    choice = _class_choice(logits, index, softmax)
    return torch.cat([choice, _query_sides(output).flatten(1) if box else logits[..., index]], 1)


def _class_choice(logits: Tensor, index: int, softmax: bool) -> Tensor:
    """Return what the query of a class is chosen by, of logits [B, Q, C]: log p, or the logit of a sigmoid, [B, Q]."""
    return (logits.log_softmax(-1) if softmax else logits)[..., index]
