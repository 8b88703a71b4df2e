"""Class targets: the score of one class, or of the class that the model predicts; how class names are looked up."""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from clairvit.errors import BadInput, UnknownName, did_you_mean
from clairvit.targets.base import ScoreContext, Target, TargetBatch, class_name
from clairvit.targets.objects import object_classes


@dataclass(frozen=True)
class ClassTarget(Target):
    """The score of a class, given by index or name; None is the predicted class of each image.

    For a model of ImageNet's 1000 classes, an object of VOC or COCO is the best-scoring class of those that are such
    objects: "dog" is the best-scoring breed.
    """

    label: Any = None

    def resolve(self, context: ScoreContext) -> TargetBatch:
        """Return the target of the class."""
        classes = resolve_classes(self.label, context)
        names = [class_name(context.labels, index) for index in classes]
        return context.target(names, classes, [((index, 1.0),) for index in classes])


def resolve_classes(label: Any, context: ScoreContext) -> list[int]:
    """Return the class index of each image; None is the class that the model predicts for it."""
    if label is None:
        if not context.classifier:
            raise BadInput(
                "This model gives an embedding, so it predicts no class; load it with prompts "
                '(labels=["a cat", "a dog"]), or pass target= an index or a function of the output.'
            )
        predicted: list[int] = context.logits.argmax(-1).tolist()  # one transfer
        return predicted
    if isinstance(label, bool) or not (isinstance(label, str) or hasattr(label, "__index__")):
        raise BadInput(
            f"The target {label!r} is a {type(label).__name__}; expected a class index, a class name, Contrast(a, b), "
            "a function of the output, or a list of these."
        )
    group = object_of_imagenet(label, context.labels)
    if group is not None:
        return [group[best] for best in context.logits[:, list(group)].argmax(-1).tolist()]
    return [find_class(label, context.labels, context.classes)] * len(context)


def object_of_imagenet(label: Any, labels: Sequence[str]) -> tuple[int, ...] | None:
    """Return the classes of ImageNet that an object of VOC or COCO stands for: the target is the best-scoring one.

    None: the label is something else, or the name of a class itself.

    Raises:
        UnknownName: ImageNet has no class of such objects.
    """
    if not isinstance(label, str) or _is_name(label.strip().lower(), labels):
        return None
    group = object_classes(label, labels)
    if group == ():
        raise UnknownName(
            f"ImageNet has no class of the object '{label}' (its classes are in `clairvit classes`). Type one of "
            "them, or use a model with prompts (CLIP, SigLIP)."
        )
    return group


def _is_name(name: str, labels: Sequence[str]) -> bool:
    """Return whether a class has this name, or has it among its synonyms."""
    return any(name.replace("_", " ") in (part.strip() for part in label.lower().split(",")) for label in labels)


def find_class(spec: int | str, labels: Sequence[str], classes: int) -> int:
    """Return the index of a class given by index, name or unique beginning of a name, whatever the case.

    Args:
        spec: An index, "7", a label, one of its comma-separated synonyms, or the beginning of a single label.
        labels: The model's class names.
        classes: The number of classes of the model.

    Raises:
        BadInput: The index is out of range, or several labels match.
        UnknownName: No label matches.
    """
    if not isinstance(spec, str):
        try:
            return _check_index(operator.index(spec), classes)
        except TypeError as error:
            raise BadInput(f"A class was given as {type(spec).__name__}; expected its index or its name.") from error
    name = spec.strip()
    if name in labels and labels.count(name) == 1:
        return labels.index(name)
    if re.fullmatch(r"-?\d{1,18}", name) and name not in labels:
        return _check_index(int(name), classes)
    if not labels:
        raise BadInput(
            f"The class '{spec}' was given by name, and this model has no class names; give an index from 0 to "
            f"{classes - 1}, or labels=[…] when you load it."
        )
    matches = _matching_labels(name.lower(), labels)
    if len(matches) == 1:
        return matches[0]
    if matches:
        listed = ", ".join(f"'{labels[i]}' ({i})" for i in matches[:6]) + (", …" if len(matches) > 6 else "")
        raise BadInput(
            f"The class '{spec}' could be any of {len(matches)}: {listed}; type more of the name, or the index."
        )
    raise UnknownName(
        f"There is no class '{spec}' among the model's {len(labels)}.{did_you_mean(name, labels)} "
        f"Type a class name, or an index from 0 to {classes - 1}; `clairvit classes` and `model.labels` list the names."
    )


def _matching_labels(name: str, labels: Sequence[str]) -> list[int]:
    """Return the classes whose label is the name (with _ for space, as folders are named), else has it as a synonym,
    else begins with it; the name is in lower case.
    """
    spaced = name.replace("_", " ")
    by_name = [i for i, label in enumerate(labels) if label.lower() in (name, spaced)]
    by_synonym = [i for i, label in enumerate(labels) if name in (part.strip().lower() for part in label.split(","))]
    by_start = [i for i, label in enumerate(labels) if name and label.lower().startswith(name)]
    return by_name or by_synonym or by_start


def _check_index(index: int, classes: int) -> int:
    if not 0 <= index < classes:
        raise BadInput(f"There is no class {index}: the model has {classes}; give an index from 0 to {classes - 1}.")
    return index
