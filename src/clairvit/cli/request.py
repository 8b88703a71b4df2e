"""What `explain` and `compare` are both asked: images, a model, targets, a place for results; and how it is done."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from clairvit.cli.arguments import split_labels, split_numbers, split_targets
from clairvit.cli.console import progress
from clairvit.cli.image_job import Delivered, Failure, Job, carry_out, find, place

if TYPE_CHECKING:
    from pathlib import Path

    from clairvit.methods.explanation import Explanation
    from clairvit.models.images import Batch
    from clairvit.models.model import Model

USUAL_BATCH = 8
Save = Callable[["Model", Mapping[str, "Explanation"], "Path"], list["Path"]]  # model, explanations, where
Verb = Callable[["Model", "Batch", Any], Mapping[str, "Explanation"]]  # model, images, target -> explanations by method


@dataclass(frozen=True)
class Request:
    """The options that both commands have, as they were typed."""

    images: Sequence[str]
    model: str
    arch: str | None
    no_pretrained: bool
    labels: str | None
    device: str | None
    target: Sequence[str] | None
    contrast: tuple[str, str] | None
    out: str
    as_json: bool
    quiet: bool
    batch_size: int | None
    activation: str | None = None
    preprocess: Mapping[str, Any] = field(default_factory=dict)  # as `read_preprocess` returns it

    def carry_out(
        self, verb: Verb, save: Save, what: str, ending: str, methods: int = 1
    ) -> tuple[list[Delivered], list[Failure]]:
        """Load the model once, then explain and write image by image; `ending` is of the file names in a folder."""
        where = place(self.out)  # a place that cannot be written to is refused before a model is loaded
        found, failures = find(self.images)
        if not found:  # each failure says why; no model is loaded for nothing
            return [], failures
        net = load(
            self.model, self.arch, self.no_pretrained, self.labels, self.device, self.activation, self.preprocess
        )

        def of_net(batch: Batch, aim: Any) -> Mapping[str, Explanation]:
            return verb(net, batch, aim)

        targets = read_targets(self.target, self.contrast, net)
        job = Job(
            net,
            targets,
            of_net,
            functools.partial(save, net),
            where,
            ending,
            self.batch_size or USUAL_BATCH,
            values=self.as_json,
            methods=methods,
        )
        with progress(what, len(found), hidden=self.as_json or self.quiet) as advance:
            return carry_out(job, found, failures, advance), failures


def load(
    model: str,
    arch: str | None,
    no_pretrained: bool,
    labels: str | None,
    device: str | None,
    activation: str | None = None,
    preprocess: Mapping[str, Any] | None = None,
) -> Model:
    """The model options of every command; `preprocess` as `read_preprocess` returns it."""
    import clairvit as cv

    names = split_labels(labels) if labels is not None else None
    return cv.load(
        model,
        pretrained=not no_pretrained,
        arch=arch,
        labels=names,
        device=device,
        activation=activation,
        **dict(preprocess or {}),
    )


def read_preprocess(
    mean: str | None, std: str | None, resize: str | None, crop: str | None, interpolation: str | None
) -> dict[str, Any]:
    """Return the options of preprocessing as arguments of `cv.load`, checked before a model is loaded."""
    from clairvit.models.preprocess import preprocess_options, rows_columns

    given: dict[str, Any] = {"interpolation": interpolation} if interpolation is not None else {}
    for name, text in (("mean", mean), ("std", std)):
        if text is not None:
            numbers = split_numbers(text, f"--{name}", float)
            given[name] = numbers[0] if len(numbers) == 1 else numbers
    for name, option, text in (("resize", "--resize", resize), ("size", "--crop", crop)):
        if text is not None:
            sides = split_numbers(text, option, int)
            given[name] = sides[0] if len(sides) == 1 else sides
    preprocess_options(**{name: value for name, value in given.items() if name != "size"})
    rows_columns(given.get("size"))
    return given


def read_targets(target: Sequence[str] | None, contrast: tuple[str, str] | None, model: Model) -> list[Any]:
    """--target and --contrast together, in that order; none of them: the predicted class."""
    import clairvit as cv

    targets: list[Any] = list(split_targets(target or [], model.labels))
    if contrast is not None:
        targets.append(cv.contrast(*contrast))
    return targets
