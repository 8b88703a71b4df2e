"""One road for every verb: a `Question` is asked, and `iter_runs` yields recorded batches with their targets.

    question = Question.of(model, images, target)
    for run in iter_runs(question, specs):
        results = run_all(specs, run.recording, run.targets)

Images are read a few at a time, grouped by the output of the model that their targets read, and each group is recorded
once. What a verb does with a run (maps, scores, checks) is its own.
"""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor

from clairvit._progress import report_progress
from clairvit.cuda.graphs import GRAPHS, PassesRequest, ReplayResult, graph_request
from clairvit.data.dataset import ErrorHandler, ImageDataset, ImageSource, SampleBatch, as_dataset, iter_batches
from clairvit.errors import Argument, BadInput, ClairError, ClairWarning, user_stacklevel
from clairvit.execution import ExecutionOptions, check_seed
from clairvit.methods.collect import MapChecks, checks_of_maps
from clairvit.methods.executor import Result
from clairvit.methods.planner import record_for, run_all
from clairvit.methods.spec import MethodSpec
from clairvit.models.coerce import LabelledImages, ModelLike, StreamedImages, model_and_images
from clairvit.models.images import Batch, prepare
from clairvit.models.model import Model
from clairvit.models.state_hash import WeightsHash
from clairvit.targets.base import TargetBatch, class_agnostic_target
from clairvit.targets.class_ import find_class
from clairvit.targets.resolve import DIFFERENT_OUTPUTS, as_target, resolve_for
from clairvit.tracing.recording import Recording
from clairvit.tracing.structure import ModelStructure

LABEL = "label"  # as a target of images that may have labels: the true class
CHUNK_SIZE = {"cpu": 8, "cuda": 32}  # images
OnError = Literal["raise", "skip"] | Callable[[str, ClairError], None] | None


def chunk_size(model: Model) -> int:
    """Return how many images are read, recorded and explained together where they need not be one batch."""
    return CHUNK_SIZE.get(model.device.type, 8)


def error_handler(on_error: OnError) -> ErrorHandler | None:
    """Return the function that is called with the name and the error of an image; None: the error is raised."""
    if on_error is None or on_error == "raise":
        return None
    if on_error == "skip":
        return _warn_of_unreadable
    if not callable(on_error):
        raise BadInput(f"on_error={on_error!r} was given; expected 'raise', 'skip' or a function of name and error.")
    return on_error


def _warn_of_unreadable(name: str, error: ClairError) -> None:
    warnings.warn(f"{name} is left out: {error}", ClairWarning, stacklevel=user_stacklevel())


@dataclass(frozen=True, eq=False)
class TargetList:
    """The targets of each image: none named, one or several for all images, or lists with one per image.

    Args:
        items: Each is a target for every image, a list with one per image, or a `TargetBatch` that was resolved for
            all images; None: nothing was named, so that the predicted class is explained, or nothing where the model
            predicts none.
        of_labels: "label" means the true class of each image.
        needed: A model that predicts no class needs a target; else it has none, for methods that read no score.
    """

    items: tuple[Any, ...] | None = None
    of_labels: bool = False
    needed: bool = False

    @classmethod
    def of(cls, target: Any, targets: Sequence[Any] | None = None, *, needed: bool = False) -> TargetList:
        """Return what a user named as `target=` or `targets=`; raise BadInput for both, or for an empty list."""
        if targets is None:
            return cls(None if target is None else (target,), needed=needed)
        if target is not None:
            raise BadInput(
                "target= and targets= were given; expected one of them: target= for one target per image, targets=[…] "
                "for several."
            )
        if isinstance(targets, str) or (not isinstance(targets, Sequence | Tensor) and not hasattr(targets, "tolist")):
            raise BadInput(
                f"targets={targets!r} was given; expected a list of targets, each explained for every image. For one "
                "target pass target=."
            )
        listed = tuple(targets.tolist() if hasattr(targets, "tolist") else targets)
        if not listed:
            raise BadInput("An empty list of targets was given; name at least one, or leave it out for the prediction.")
        return cls(listed, needed=needed)

    @property
    def kind(self) -> Literal["predicted", "label", "given"]:
        """Return what is explained: the predicted class, the true class, or what the user named."""
        if self.items is None:
            return "predicted"
        return "label" if self.of_labels and isinstance(self.items[0], str) and self.items[0] == LABEL else "given"

    def check_count(self, images: ImageSource) -> None:
        """Raise BadInput for a list of targets that has not one for each image."""
        for item in self.items or ():
            if _listed(item) is not None:
                _entries(item, (), images)

    def of_images(self, rows: Sequence[int], images: ImageSource) -> tuple[Any, ...] | None:
        """Return the targets of some images: those for all, and of lists the entries of these images."""
        if self.items is None:
            return None
        return tuple(_entries(item, rows, images) for item in self.items)

    def readouts(self, model: Model, images: ImageSource) -> tuple[tuple[Model, ...], ...]:
        """Return for each target the model whose scores it is about: one for all images, or one per image.

        A model that has inputs with a row per image is one model for each.
        """
        models = [model]
        if model.has_input_rows:
            model.check_input_rows(len(images))
            models = [model.for_row(row) for row in range(len(images))]
        by_target: list[tuple[Model, ...]] = []
        for item in (None,) if self.items is None else self.items:
            if isinstance(item, list | tuple):
                each = models if len(models) > 1 else itertools.repeat(model, len(item))
                read = [as_target(entry).readout(own) for own, entry in zip(each, item, strict=False)]
            else:
                single = None if item is None or _listed(item) is not None else item  # arrays hold class indices
                read = [as_target(single).readout(own) for own in models]
            same = len({id(readout) for readout in read}) == 1
            if not same and len(read) != len(images):
                raise BadInput(f"{len(item)} targets were given for {len(images)} images; expected one for each.")
            by_target.append((read[0],) if same else tuple(read))
        return tuple(by_target)


def _listed(target: Any) -> list[Any] | tuple[Any, ...] | None:
    """Return a list with one target per image, also of an array; None for a single target."""
    listed = target.tolist() if hasattr(target, "tolist") else target
    return listed if isinstance(listed, list | tuple) else None


def _entries(target: Any, rows: Sequence[int], images: ImageSource) -> Any:
    """Return what is a target for all images as it is, and of one per image the entries of some of them."""
    if isinstance(target, TargetBatch):
        return target.take(rows)
    listed = _listed(target)
    if listed is None or (isinstance(images, Batch) and len(rows) == len(images)):
        return target  # its length is checked where it is resolved
    if len(listed) != len(images):  # an iterator is read to its end
        raise BadInput(f"{len(listed)} targets were given for {len(images)} images; expected one for each.")
    return [listed[row] for row in rows]


@dataclass(frozen=True, eq=False)
class Question:
    """A model, images, targets and how to run: what every verb is asked.

    Args:
        model: The user's model.
        images: A prepared batch, images that are read as they are asked for, or a data set with annotations.
        targets: What is explained.
        readouts: For each target the model whose scores it is about: one for all images, or one per image.
        score: The kind of score that the user named; None is what the method is meant for.
        seed: The seed of everything random.
        execution: How perturbed inputs are run.
    """

    model: Model
    images: ImageSource
    targets: TargetList
    readouts: tuple[tuple[Model, ...], ...]
    score: str | None
    seed: int
    execution: ExecutionOptions

    @classmethod
    def of(
        cls,
        model: ModelLike,
        images: Any,
        target: Any = None,
        *,
        targets: Sequence[Any] | None = None,
        score: str | None = None,
        seed: int = 0,
        batch_size: int | None = None,
        autocast: str | None = None,
        inputs: Mapping[str, Any] | None = None,
        one_batch: bool = False,
        scored: Literal["always", "if possible", "never"] = "if possible",
    ) -> Question:
        """Return what was asked, coerced and checked once.

        Images at hand become a batch, with `one_batch` also those of a data set. `scored` says whether every run has a
        target, or whether there is none for a model that predicts no class, or for any.
        """
        model, images = model_and_images(model, images, inputs)
        listed = TargetList(()) if scored == "never" else TargetList.of(target, targets, needed=scored == "always")
        seed, execution = check_seed(seed), ExecutionOptions.from_caller(batch_size, autocast)
        source = images if isinstance(images, LabelledImages) and not one_batch else prepare(images, model)
        return cls(model, source, listed, listed.readouts(model, source), score, seed, execution)

    @classmethod
    def of_dataset(
        cls,
        model: ModelLike,
        images: Any,
        target: Any = None,
        *,
        masks: Any = None,
        mask_kind: str = "nonzero",
        labels: Sequence[int | str | None] | None = None,
        distractors: Sequence[int | str | None] | None = None,
        score: str | None = None,
        seed: int = 0,
        batch_size: int | None = None,
        autocast: str | None = None,
        inputs: Mapping[str, Any] | None = None,
        needed: bool = True,
    ) -> Question:
        """Return what was asked about images that may have annotations, which are read a few at a time.

        `needed` says whether a model that predicts no class needs a target.
        """
        model, images = model_and_images(model, images, inputs)
        dataset = as_dataset(images, model, masks=masks, mask_kind=mask_kind, labels=labels, others=distractors)
        listed = TargetList(None if target is None else (target,), of_labels=True, needed=needed)
        listed.check_count(dataset)
        readouts = listed.readouts(model, dataset)
        seed, execution = check_seed(seed), ExecutionOptions.from_caller(batch_size, autocast)
        return cls(model, dataset, listed, readouts, score, seed, execution)

    @property
    def models(self) -> list[Model]:
        """Return the different models whose scores the targets are about."""
        return list({id(model): model for models in self.readouts for model in models}.values())

    def settings(self, maps: str) -> dict[str, str]:
        """Return what every score of maps of this question depends on, given what is done to each map first."""
        activations = dict.fromkeys(model.activation for model in self.models)
        return {"target": self.targets.kind, "maps": maps, "activation": ", ".join(activations)}

    def of_one_output(self) -> Question:
        """Return the same question to the one model that all targets are about; raise BadInput for several."""
        if len(self.models) > 1:
            raise BadInput(DIFFERENT_OUTPUTS)
        return replace(self, model=self.models[0], readouts=((self.models[0],),) * len(self.readouts))

    def take(self, rows: Sequence[int]) -> Question:
        """Return the question about chosen images of a data set."""
        assert isinstance(self.images, ImageDataset)
        items = self.targets.of_images(rows, self.images)
        readouts = tuple(each if len(each) == 1 else tuple(each[row] for row in rows) for each in self.readouts)
        return replace(
            self, images=self.images.take(rows), targets=replace(self.targets, items=items), readouts=readouts
        )

    def target_of(self, row: int) -> Any:
        """Return the first target of one image as the user named it; None: none was named."""
        items = self.targets.of_images([row], self.images)
        return None if items is None else items[0][0] if isinstance(items[0], list) else items[0]

    def first_image(self, *, skip: bool = False) -> SampleBatch:
        """Return the first image; with `skip` the first one that can be read."""
        on_error: ErrorHandler | None = (lambda name, error: None) if skip else None
        with closing(iter_batches(self.images, self.model, 1, on_error)) as batches:
            first = next(batches, None)
        if first is None:
            raise BadInput("None of the images could be read; expected at least one that can.")
        return first


@dataclass(frozen=True)
class Replay:
    """What a CUDA graph depends on next to the passes: it may serve class targets of a classifier."""

    score: str | None
    seed: int
    layers: bool


@dataclass(frozen=True, eq=False)
class Run:
    """One recorded batch: images whose targets read the same output of the model.

    On a GPU its passes may be a replay of a CUDA graph (`cuda/graphs.py`).

    Args:
        rows: The rows of the images among all images.
        model: The model whose scores the targets are about.
        batch: The images.
        places: Which of the question's targets these are.
        named: The targets of these images as the user named them; None: none were named.
        recording: The recorded forward pass; after a replay without activations.
        logits: The scores [B, C], on the CPU after a replay.
        weights_hash: That of the weights that were used.
        targets: The targets, resolved; each is a function of the scores of these images.
        started: When the run began, in seconds of `time.perf_counter`.
    """

    rows: tuple[int, ...]
    model: Model
    batch: SampleBatch
    places: tuple[int, ...]
    named: tuple[Any, ...] | None
    recording: Recording
    logits: Tensor
    weights_hash: WeightsHash
    targets: tuple[TargetBatch, ...]
    started: float
    _request: PassesRequest | None = None  # a graph could serve it
    _replayed: ReplayResult | None = None

    def run_all(
        self, specs: Sequence[MethodSpec], targets: Sequence[TargetBatch], *, seed: int, layers: bool
    ) -> tuple[dict[str, list[Result]], list[MapChecks]]:
        """Return method text -> one result per target, and the checks of their maps."""
        if self._replayed is not None:
            return self._replayed.results, self._replayed.checks
        results = run_all(specs, self.recording, targets, seed=seed, layers=layers)
        if self._request is not None:
            GRAPHS.count(self._request, targets[0], self.recording, results)
        return results, checks_of_maps(results)


def iter_runs(
    question: Question,
    specs: Sequence[MethodSpec],
    *,
    on_error: ErrorHandler | None = None,
    size: int | None = None,
    alone: bool = False,
    label: str = "",
    structure: ModelStructure | None = None,
    replay: Replay | None = None,
) -> Generator[Run, None, None]:
    """Read, chunk and group the images, record each group once for these methods, and resolve its targets.

    Call it inside `own_grad_mode`. Close it (`contextlib.closing`) where its consumer may raise: then the threads that
    read ahead end at once.

    Args:
        question: What is asked.
        specs: The methods that will read the recordings; where the consumer shortens the list, later runs are recorded
            for those that are left.
        on_error: Called for each image of a data set that cannot be read; without it the first one raises.
        size: Images per batch; None is `chunk_size`, and all of a prepared batch.
        alone: Where targets of single images read different outputs, every image is a run; else neighbours that read
            the same output stay together.
        label: What progress is reported as; "" reports none.
        structure: The structure of the model for the first run, where it was found in this call.
        replay: A CUDA graph may serve the passes of `explain`; these are its settings.
    """
    images, targets = question.images, question.targets
    if size is None and not isinstance(images, Batch):
        size = chunk_size(question.model)
    count = len(images) if label and not isinstance(images, StreamedImages) else 0
    one_by_one = alone and any(len(models) > 1 for models in question.readouts)
    with (
        report_progress(label, count) if label else nullcontext(lambda further: None) as advance,
        closing(iter_batches(images, question.model, size, on_error)) as batches,
    ):
        for batch in batches:
            for positions, places, model in _groups(question, batch.rows, one_by_one):
                part = batch if len(positions) == len(batch.rows) else batch.take(positions)
                of_images = None if targets.items is None else targets.of_images(part.rows, images)
                named: tuple[Any, ...] | None = None
                if of_images is not None:
                    entries = (of_images[place] for place in places)
                    named = tuple(item[0] if one_by_one and isinstance(item, list) else item for item in entries)
                yield _run(question, specs, model, part, places, named, structure, replay)
                structure = None
                if not places or places[-1] == len(question.readouts) - 1:
                    advance(len(positions))


def _run(
    question: Question,
    specs: Sequence[MethodSpec],
    model: Model,
    batch: SampleBatch,
    places: tuple[int, ...],
    named: tuple[Any, ...] | None,
    structure: ModelStructure | None,
    replay: Replay | None,
) -> Run:
    """Record all that the methods require, or replay the graph of such passes, and resolve the targets.

    Targets are functions of the batch's scores [B, C].
    """
    started = time.perf_counter()
    request = replayed = None
    if replay is not None:
        request = graph_request(model, specs, batch.pixels, named, replay.score, replay.seed, replay.layers)
        replayed = None if request is None else GRAPHS.replay(request)
    if replayed is not None:
        recording, logits, weights = replayed.recording, replayed.logits, WeightsHash(replayed.weights_hash())
    else:
        recording = record_for(specs, model, batch.pixels, question.execution, structure)
        logits = recording.logits.detach()
        weights = WeightsHash.of(model.module, model.name, recording.structure.weights)
    if named is not None and question.targets.kind == LABEL:
        classes = class_indices(batch.labels, model, logits.shape[-1])
        if classes is None or None in classes:
            raise BadInput(
                "target='label' was given without labels for all images; expected ",
                Argument("labels", [...], of="evaluate"),
                ", the true class of each image.",
            )
        named = (classes,)
    if named is None and not question.targets.needed and not model.classifier:
        resolved: tuple[TargetBatch, ...] = (_without_target(model, specs, len(logits)),)
    else:
        resolved = tuple(
            item if isinstance(item, TargetBatch) else resolve_for(model, item, logits, score=question.score)[0]
            for item in ((None,) if named is None else named)
        )
    return Run(
        batch.rows, model, batch, places, named, recording, logits, weights, resolved, started, request, replayed
    )


def _groups(
    question: Question, rows: Sequence[int], one_by_one: bool
) -> Iterator[tuple[list[int], tuple[int, ...], Model]]:
    """Yield positions in a batch of `rows`, places among the targets, and the model that these targets read there."""

    every, readouts = list(range(len(rows))), question.readouts
    if not readouts:
        yield every, (), question.model
        return
    by_position = [tuple(each[0] if len(each) == 1 else each[row] for each in readouts) for row in rows]
    for _, group in itertools.groupby(every, lambda at: (one_by_one and at, *map(id, by_position[at]))):
        positions = list(group)
        models = by_position[positions[0]]
        if all(model is models[0] for model in models):
            yield positions, tuple(range(len(models))), models[0]
        else:
            yield from ((positions, (place,), model) for place, model in enumerate(models))


def _without_target(model: Model, specs: Sequence[MethodSpec], count: int) -> TargetBatch:
    """Return an empty target for an embedding, which has no predicted class; raise if a method needs one."""
    needing = next((spec for spec in specs if spec.method.class_specific), None)
    if needing is None:
        return class_agnostic_target(count)
    raise BadInput(
        f"{model.name} returns an embedding, not class scores, and '{needing.text}' explains a score. Load it with ",
        Argument("labels", ["a photo of a cat", ...]),
        ", or pass a target function of the output.",
    )


def class_indices(classes: Sequence[int | str | None] | None, model: Model, count: int) -> list[int | None] | None:
    """Return the indices of classes that may be given by name, among `count` scores."""
    if classes is None:
        return None
    return [None if name is None else find_class(name, model.labels, count) for name in classes]
