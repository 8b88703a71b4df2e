"""From what the user typed to one result an image: find, read, explain, and carry on when one of them is broken."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clairvit.cli.hints import with_options
from clairvit.errors import BadInput, ClairError

if TYPE_CHECKING:
    from clairvit.cli.console import Advance
    from clairvit.methods.explanation import Cost, Explanation
    from clairvit.models.images import Batch
    from clairvit.models.model import Model


@dataclass(frozen=True)
class Failure:
    """An image that could not be used, and the sentence that says why."""

    image: str
    error: str


@dataclass(frozen=True)
class Result:
    """What was found for one image: method -> explanation with one map for each target."""

    image: str
    explanations: Mapping[str, Explanation]
    skipped: Mapping[str, str]
    cost: Cost | None  # of all methods together, with the other images of the batch


@dataclass(frozen=True)
class Delivered:
    """What is left of a result once its files are written: small enough to keep for thousands of images."""

    image: str
    files: tuple[Path, ...]
    records: Mapping[str, Mapping[str, Any]]  # method -> the .json record
    skipped: Mapping[str, str]
    cost: Cost | None

    @property
    def first(self) -> Mapping[str, Any]:
        return next(iter(self.records.values()))


Verb = Callable[["Batch", Any], Mapping[str, "Explanation"]]  # images, target -> explanations by method
Save = Callable[[Mapping[str, "Explanation"], Path], list[Path]]


@dataclass(frozen=True)
class Job:
    """What `explain` and `compare` do with images: `verb` explains a batch, `save` writes one file of the result."""

    model: Model
    targets: Sequence[Any]
    verb: Verb
    save: Save
    out: Place
    ending: str  # of the file names in a folder
    batch_size: int
    values: bool  # keep the maps in the records, not only in the files
    methods: int = 1  # side by side in one picture


def find(arguments: Sequence[str]) -> tuple[list[str], list[Failure]]:
    """Every image the arguments name, and the arguments that name none. A single wrong argument is simply an error.

    Files that are not there are found here, before a model is loaded for them.
    """
    from clairvit.models.images import check_file, find_images

    images: list[str] = []
    failures: list[Failure] = []
    for argument in arguments:
        try:
            images += [str(path) for path in find_images([argument])]
        except BadInput as error:
            if len(arguments) == 1:
                raise
            failures.append(Failure(argument, with_options(error)))
    readable = []
    for image in dict.fromkeys(images):
        try:
            check_file(Path(image))
            readable.append(image)
        except BadInput as error:
            failures.append(Failure(image, with_options(error)))
    return readable, failures


def carry_out(job: Job, images: Sequence[str], failures: list[Failure], advance: Advance) -> list[Delivered]:
    """Explain and write image by image; images that cannot be used are added to `failures`."""
    from clairvit.methods.explanation import concat
    from clairvit.plotting.save import PICTURES, check_suffix, record

    if job.out.is_file and check_suffix(job.out.path) in PICTURES:
        from clairvit.plotting.comparison import rows_needed
        from clairvit.plotting.tiles import check_rows

        several = rows_needed(job.methods, len(images), max(1, len(job.targets)))
        check_rows(len(images) if job.methods == 1 else several)  # before the work, not after it
    names = stems(images, job.ending)
    kept: list[Result] = []
    done: list[Delivered] = []
    for outcome in each_image(images, job.model, job.targets, job.batch_size, job.verb):
        advance(1)
        if isinstance(outcome, Failure):
            failures.append(outcome)
            continue
        files: tuple[Path, ...] = ()
        if job.out.is_file:
            kept.append(outcome)
        else:
            paths = job.out.files(names[outcome.image])
            files = tuple(file for path in paths for file in job.save(outcome.explanations, path))
        records = {name: record(one, job.values) for name, one in outcome.explanations.items()}
        done.append(Delivered(outcome.image, files, records, outcome.skipped, outcome.cost))
    if kept:
        together = {name: concat([result.explanations[name] for result in kept]) for name in kept[0].explanations}
        shared = tuple(job.save(together, job.out.path))
        done = [replace(one, files=shared) for one in done]
    return done


def each_image(
    images: Sequence[str], model: Model, targets: Sequence[Any], batch_size: int, verb: Verb
) -> Iterator[Result | Failure]:
    """Explain in batches; one broken image costs only itself. Several targets are explained image by image."""
    from clairvit.models.images import prepare

    size = 1 if len(targets) > 1 else batch_size
    worked = False
    for start in range(0, len(images), size):
        ready: list[Ready] = []
        for image in images[start : start + size]:
            try:
                ready.append(Ready(image, prepare([image], model)))
            except BadInput as error:
                yield Failure(image, with_options(error))
        for outcome in _explain(ready, targets, verb, worked):
            worked = worked or isinstance(outcome, Result)
            yield outcome


@dataclass(frozen=True)
class Ready:
    """An image as the model takes it."""

    image: str
    batch: Batch  # of one


def _explain(ready: Sequence[Ready], targets: Sequence[Any], verb: Verb, worked: bool) -> list[Result | Failure]:
    """A batch that fails is tried again image by image; if none works, the request is wrong and not the images."""
    if not ready:
        return []
    try:
        return list(_together(ready, targets, verb))
    except ClairError as error:
        if len(ready) == 1:
            outcomes: list[Result | Failure] = [Failure(ready[0].image, with_options(error))]
        else:
            outcomes = [outcome for one in ready for outcome in _explain([one], targets, verb, worked=True)]
        if not worked and all(isinstance(outcome, Failure) for outcome in outcomes):
            raise
        return outcomes


def _together(ready: Sequence[Ready], targets: Sequence[Any], verb: Verb) -> Iterator[Result]:
    import torch

    from clairvit.models.images import Batch

    several = len(targets) > 1
    pixels = torch.cat([one.batch.pixels for one in ready])
    names = tuple(name for one in ready for name in one.batch.names)
    notes = tuple(dict.fromkeys(note for one in ready for note in one.batch.notes))
    batch = Batch(pixels, names, single=several, notes=notes)
    found = verb(batch, list(targets) or None)
    skipped, cost = getattr(found, "skipped", {}), getattr(found, "cost", None)
    for position, one in enumerate(ready):
        own = {method: whole if several else whole[position] for method, whole in found.items()}
        yield Result(one.image, own, skipped, cost)


@dataclass(frozen=True)
class Place:
    """Where results go: into one file the user named, or into a folder, several files an image."""

    path: Path
    is_file: bool

    def files(self, stem: str) -> list[Path]:
        """The files of one image."""
        return [self.path / f"{stem}{suffix}" for suffix in (".png", ".json", ".npz")]


def place(out: str, check: Callable[[Path], object] | None = None) -> Place:
    """'cat.png' is a file, 'out', 'out/' and every folder that exists are folders; `check` refuses other suffixes."""
    path = Path(out)
    if out.endswith(("/", "\\")) or path.is_dir() or not path.suffix:
        return Place(path, is_file=False)
    if check is None:
        from clairvit.plotting.save import check_suffix

        check = check_suffix
    check(path)
    return Place(path, is_file=True)


def stems(images: Sequence[str], ending: str) -> dict[str, str]:
    """A file name without suffix for each image; 'a/cat.jpg' and 'b/cat.jpg' become 'cat-…' and 'cat-2-…'."""
    taken: set[str] = set()
    chosen: dict[str, str] = {}
    for image in images:
        stem = Path(image).stem or "image"
        candidate, number = stem, 1
        while candidate.casefold() in taken:  # some file systems do not tell Cat from cat
            number += 1
            candidate = f"{stem}-{number}"
        taken.add(candidate.casefold())
        chosen[image] = f"{candidate}-{ending}"
    return chosen


def file_name(method: str) -> str:
    """'rollout(fusion=max)+skipplus' -> 'rollout_fusion=max_+skipplus', which every file system takes."""
    kept = "".join(letter if letter.isalnum() or letter in "+-=." else "_" for letter in method)
    return kept.strip("_") or "method"
