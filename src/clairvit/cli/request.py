"""What `explain` and `compare` are both asked: images, a model, targets, a place for results; and how it is done."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from clairvit.cli.paper import progress
from clairvit.cli.split import split_labels, split_targets
from clairvit.cli.work import Delivered, Failure, Job, carry_out, find, place

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

    def carry_out(
        self, verb: Verb, save: Save, what: str, ending: str, methods: int = 1
    ) -> tuple[list[Delivered], list[Failure]]:
        """Load the model once, then explain and write image by image; `ending` is of the file names in a folder."""
        where = place(self.out)  # a place that cannot be written to is refused before a model is loaded
        found, failures = find(self.images)
        net = load(self.model, self.arch, self.no_pretrained, self.labels, self.device, self.activation)

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
) -> Model:
    """The model options of every command."""
    import clairvit as cv

    names = split_labels(labels) if labels is not None else None
    return cv.load(model, pretrained=not no_pretrained, arch=arch, labels=names, device=device, activation=activation)


def read_targets(target: Sequence[str] | None, contrast: tuple[str, str] | None, model: Model) -> list[Any]:
    """--target and --contrast together, in that order; none of them: the predicted class."""
    import clairvit as cv

    targets: list[Any] = list(split_targets(target or [], model.labels))
    if contrast is not None:
        targets.append(cv.contrast(*contrast))
    return targets
