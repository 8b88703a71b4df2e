"""Explain images one batch at a time, as `explain` and `compare` do: find, read, explain, write.

An image that cannot be used becomes a `Failure`; the others are explained all the same.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clairvit.cli.arguments import GeneratedAnswer, read_targets, targets_of_image
from clairvit.cli.console import progress_bar
from clairvit.cli.hints import with_options
from clairvit.cli.options import ModelOptions, OutputOptions, RunOptions, TargetOptions
from clairvit.data.pipeline import WriteBehind
from clairvit.errors import BadInput, ClairError

if TYPE_CHECKING:
    from clairvit._cost import Cost
    from clairvit.methods.explanation import Explanation
    from clairvit.methods.map_shards import MapShardWriter
    from clairvit.models.images import Batch
    from clairvit.models.model import Model

MAX_STEM = 255 - 40  # bytes
ExplainBatch = Callable[["Model", "Batch", Any], Mapping[str, "Explanation"]]  # model, images, target -> by method
SaveResult = Callable[["Model", Mapping[str, "Explanation"], Path], list[Path]]  # model, explanations, path -> files


@dataclass(frozen=True)
class Failure:
    """An image that could not be used, and the sentence that says why."""

    image: str
    error: str


@dataclass(frozen=True)
class ImageResult:
    """The explanations of one image by method, with one map per target."""

    image: str
    explanations: Mapping[str, Explanation]
    skipped: Mapping[str, str]
    cost: Cost | None  # of all methods together, with the other images of the batch


@dataclass(frozen=True)
class WrittenResult:
    """The files and JSON records of one image: small enough to keep for thousands of images."""

    image: str
    files: tuple[Path, ...]
    records: Mapping[str, Mapping[str, Any]]  # method -> the .json record
    skipped: Mapping[str, str]
    cost: Cost | None

    @property
    def first(self) -> Mapping[str, Any]:
        """Return the record of the first method."""
        return next(iter(self.records.values()))


@dataclass(frozen=True)
class OutputPath:
    """Where results are written: one file that the user named, or a folder with several files per image."""

    path: Path
    is_file: bool

    def files(self, stem: str) -> list[Path]:
        """Return the files of one image in the folder."""
        stem = shortened_stem(stem)
        return [self.path / f"{stem}{suffix}" for suffix in (".png", ".json", ".npz")]


@dataclass(frozen=True)
class ImageJob:
    """The options of `explain` and `compare`, and what they do with a batch of images.

    Args:
        images: Files, folders and globs.
        model: The name of the model.
        explain: Explains a batch.
        save: Writes one file, and files next to it.
        out: A file or a folder.
        suffix: The end of the file names in a folder; None is the method that explained the image.
        title: The title of the progress bar.
        methods: The number of methods side by side in one picture.
        keep_maps: Write the maps into few large files (`methods/map_shards.py`), and no files of single images.
    """

    images: Sequence[str]
    model: str
    model_options: ModelOptions
    targets: TargetOptions
    run_options: RunOptions
    output: OutputOptions
    explain: ExplainBatch
    save: SaveResult
    out: str
    suffix: str | None
    title: str
    methods: int = 1
    keep_maps: bool = False

    def run(self) -> tuple[list[WrittenResult], list[Failure]]:
        """Load the model once, then explain and write image by image."""
        from clairvit.methods.map_shards import MapShardWriter
        from clairvit.methods.runs import chunk_size

        out = output_path(self.out)  # refused before a model is loaded
        if self.keep_maps and out.is_file:
            raise BadInput(
                f"--keep-maps writes many maps into files of a folder, and --out is '{self.out}'; expected a "
                "folder: --out maps/."
            )
        self.model_options.preprocess()
        readouts = self.targets.readouts()
        paths, failures = find_image_files(self.images)
        if not paths:  # each failure has its reason; no model is needed
            return [], failures
        model = self.model_options.load(self.model)
        targets = [*read_targets(self.targets.target, self.targets.contrast, model), *readouts]
        self._check_rows(out, len(paths), len(targets))
        shards = MapShardWriter(out.path) if self.keep_maps else None
        unwritten: list[ImageResult] = []  # written into one file at the end
        stems = file_stems(paths)
        size = self.run_options.batch_size or chunk_size(model)
        outcomes = explain_images(paths, model, targets, size, self.explain)
        with (
            progress_bar(self.title, len(paths), hidden=self.output.hidden) as advance,
            WriteBehind[WrittenResult](2 * size) as writer,
            closing(outcomes),
        ):
            for outcome in outcomes:
                advance(1)
                if isinstance(outcome, Failure):
                    failures.append(outcome)
                    continue
                single = not out.is_file and shards is None
                files = out.files(f"{stems[outcome.image]}-{self._suffix(outcome)}") if single else []
                writer.submit(partial(self._write, model, outcome, files, shards))
                unwritten += [outcome] if out.is_file else []
            results = writer.finish()
            if shards is not None:
                shard_files = tuple(shards.close())
                results = [replace(result, files=shard_files) for result in results]
            if unwritten:
                shared_files = self._write_together(model, unwritten, out.path)
                results = [replace(result, files=shared_files) for result in results]
        return results, failures

    def _suffix(self, result: ImageResult) -> str:
        """Return the end of an image's file names: the suffix, or the method that explained it."""
        return safe_file_name(next(iter(result.explanations))) if self.suffix is None else self.suffix

    def _check_rows(self, out: OutputPath, images: int, targets: int) -> None:
        """Raise BadInput if one picture of all images would be too tall, before the work and not after it."""
        from clairvit.plotting.comparison import rows_needed
        from clairvit.plotting.save import PICTURES, check_suffix
        from clairvit.plotting.tiles import check_rows

        if out.is_file and check_suffix(out.path) in PICTURES:
            check_rows(images if self.methods == 1 else rows_needed(self.methods, images, max(1, targets)))

    def _write(
        self, model: Model, result: ImageResult, paths: Sequence[Path], shards: MapShardWriter | None
    ) -> WrittenResult:
        if shards is not None:
            first = next(iter(result.explanations.values()))
            for row, target in enumerate(first.targets):
                maps = {name: explanation.maps[row] for name, explanation in result.explanations.items()}
                shards.add(result.image, target, maps)
        files = tuple(file for path in paths for file in self.save(model, result.explanations, path))
        values = self.output.as_json  # keep the maps in the records, not only in the files
        records = {name: explanation.to_dict(values) for name, explanation in result.explanations.items()}
        return WrittenResult(result.image, files, records, result.skipped, result.cost)

    def _write_together(self, model: Model, results: Sequence[ImageResult], path: Path) -> tuple[Path, ...]:
        from clairvit.methods.explanation import concat

        methods = results[0].explanations
        together = {name: concat([result.explanations[name] for result in results]) for name in methods}
        return tuple(self.save(model, together, path))


def find_image_files(arguments: Sequence[str]) -> tuple[list[str], list[Failure]]:
    """Return every image that the arguments name, and a failure for each argument or file that cannot be read.

    A single wrong argument raises BadInput.
    """
    from clairvit.models.image_files import check_file, find_images

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


def read_images(paths: Sequence[str], model: Model, failures: list[Failure]) -> Batch | None:
    """Return the images that can be read as one batch; the others are added to `failures`."""
    from clairvit.data.dataset import iter_batches, photo_dataset
    from clairvit.models.images import Batch

    def on_error(image: str, error: ClairError) -> None:
        failures.append(Failure(image, with_options(error)))

    with closing(iter_batches(photo_dataset(paths, model), model, max(1, len(paths)), on_error)) as batches:
        part = next(batches, None)
    return None if part is None else Batch(part.pixels, part.names, notes=part.notes)


def explain_images(
    images: Sequence[str], model: Model, targets: Sequence[Any], batch_size: int, explain: ExplainBatch
) -> Generator[ImageResult | Failure, None, None]:
    """Explain in batches and yield one outcome per image; several targets are explained image by image.

    Threads decode the images of the next batch while the model explains one; close the generator to end them.
    """
    from clairvit.data.dataset import iter_batches, photo_dataset
    from clairvit.models.images import Batch

    generated = any(isinstance(target, GeneratedAnswer) for target in targets)
    size = 1 if len(targets) > 1 or generated else batch_size
    failures: list[Failure] = []

    def on_error(image: str, error: ClairError) -> None:
        failures.append(Failure(image, with_options(error)))

    any_succeeded = False
    with closing(iter_batches(photo_dataset(images, model), model, size, on_error)) as batches:
        for part in batches:
            yield from failures
            failures.clear()
            batch = Batch(part.pixels, part.names, notes=part.notes)
            for outcome in explain_or_split(model, batch, targets, explain, any_succeeded):
                any_succeeded = any_succeeded or isinstance(outcome, ImageResult)
                yield outcome
        yield from failures


def explain_or_split(
    model: Model, batch: Batch, targets: Sequence[Any], explain: ExplainBatch, any_succeeded: bool
) -> list[ImageResult | Failure]:
    """Explain a batch, or image by image if that fails; raise the error if no image ever succeeded."""
    try:
        return list(_explain_batch(model, batch, targets, explain))
    except ClairError as error:
        if len(batch) == 1:
            outcomes: list[ImageResult | Failure] = [Failure(batch.names[0], with_options(error))]
        else:
            outcomes = [
                outcome
                for row, name in enumerate(batch.names)
                for outcome in explain_or_split(
                    model, replace(batch, pixels=batch.pixels[row : row + 1], names=(name,)), targets, explain, True
                )
            ]
        if not any_succeeded and all(isinstance(outcome, Failure) for outcome in outcomes):
            raise
        return outcomes


def _explain_batch(model: Model, batch: Batch, targets: Sequence[Any], explain: ExplainBatch) -> Iterator[ImageResult]:
    targets = targets_of_image(targets, model, batch)
    several = len(targets) > 1
    explanations = explain(model, replace(batch, single=several), list(targets) or None)
    skipped, cost = getattr(explanations, "skipped", {}), getattr(explanations, "cost", None)
    for position, name in enumerate(batch.names):
        by_method = {
            method: explanation if several else explanation[position] for method, explanation in explanations.items()
        }
        yield ImageResult(name, by_method, skipped, cost)


def output_path(out: str, check: Callable[[Path], object] | None = None) -> OutputPath:
    """Return 'cat.png' as a file, and 'out', 'out/' and every folder that exists as a folder.

    Args:
        out: What was typed.
        check: Raises BadInput for file names that cannot be written; None takes those of explanations.
    """
    refuse_url_output(out)
    if not out:  # an unset variable of the shell
        raise BadInput("--out is empty; expected a folder or a file, such as --out maps/.")
    path = Path(out)
    try:
        is_folder = path.is_dir()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise BadInput(f"--out '{out[:80]}' cannot be written to ({reason}); choose another name.") from error
    if out.endswith(("/", "\\")) or is_folder or not path.suffix:
        return OutputPath(path, is_file=False)
    if check is None:
        from clairvit.plotting.save import check_suffix

        check = check_suffix
    check(path)
    return OutputPath(path, is_file=True)


def refuse_url_output(out: str) -> None:
    """Raise BadInput for a URL: files are written whole under another name and renamed, which needs a disk."""
    from clairvit.data.locations import is_url

    if is_url(out):
        raise BadInput(
            f"--out '{out}' is a URL, and results are written to a disk of this machine; expected a folder or file, "
            "which can be copied there afterwards."
        )


def file_stems(images: Sequence[str]) -> dict[str, str]:
    """Return a unique file name without extension per image; 'a/cat.jpg', 'b/cat.jpg' are 'cat', 'cat-2'."""
    used: set[str] = set()
    stems: dict[str, str] = {}
    for image in images:
        stem = Path(image).stem or "image"
        candidate, number = stem, 1
        while candidate.casefold() in used:  # some file systems do not distinguish Cat and cat
            number += 1
            candidate = f"{stem}-{number}"
        used.add(candidate.casefold())
        stems[image] = candidate
    return stems


def shortened_stem(stem: str) -> str:
    """Return a name that a file system takes, with room for '-features-12.json'; a long one ends in a hash of it."""
    content = os.fsencode(stem)
    if len(content) <= MAX_STEM:
        return stem
    digest = hashlib.sha256(content).hexdigest()[:12]
    return f"{content[: MAX_STEM - len(digest) - 1].decode(errors='ignore')}-{digest}"


def safe_file_name(method: str) -> str:
    """Return 'rollout(fusion=max)+skipplus' as 'rollout_fusion=max_+skipplus', which every file system accepts."""
    letters = "".join(letter if letter.isalnum() or letter in "+-=." else "_" for letter in method)
    return letters.strip("_") or "method"
