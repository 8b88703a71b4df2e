"""What every command does around its verb: refuse early, find the images, load, say what was assumed, show, end.

What is misspelt is refused before a model is loaded. An image that cannot be used becomes a `Failure`; the others are
used all the same, and the exit status is 2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from clairvit.cli import options
from clairvit.cli.annotations import Annotations, image_source
from clairvit.cli.arguments import read_single_target
from clairvit.cli.console import Advance, print_data_notes, progress_bar
from clairvit.cli.declare import group
from clairvit.cli.finish import exit_on_failures, print_document
from clairvit.cli.hints import with_options
from clairvit.cli.image_job import Failure, find_image_files

if TYPE_CHECKING:
    from clairvit.data.dataset import ImageDataset
    from clairvit.metrics.registry import MetricSpec
    from clairvit.models.model import Model


@dataclass(frozen=True)
class Command:
    """One run of a command.

    Args:
        name: The command, as documents state it.
        participle: What is done to images: "2 of 3 could not be scored"; None for a command without images.
        output: What is printed.
        failures: The images that could not be used; it grows.
    """

    name: str
    participle: str | None
    output: options.OutputOptions
    failures: list[Failure] = field(default_factory=list)

    def on_error(self, image: str, error: Exception) -> None:
        """Remember that an image could not be used."""
        self.failures.append(Failure(image, with_options(error)))

    def image_files(self, images: Sequence[str]) -> list[str]:
        """Return the files that the arguments name; end the command if there is none."""
        paths, failures = find_image_files(images)
        self.failures.extend(failures)
        return paths or self.stop()

    def notes(self, notes: Iterable[str]) -> None:
        """Print what was assumed about models and data, each sentence once."""
        print_data_notes(notes, self.output.hidden)

    def progress(self, title: str, total: int = 1) -> AbstractContextManager[Advance]:
        """Show a progress bar."""
        return progress_bar(title, total, hidden=self.output.hidden)

    def finish(self, succeeded: int, document: Callable[[], Mapping[str, Any]], show: Callable[[], object]) -> None:
        """Print the result, as a JSON document or for people, then the failures, and end with the exit status.

        Args:
            succeeded: The number of images that could be used.
            document: Returns the content of the JSON document.
            show: Prints the result for people.
        """
        if self.output.as_json:
            print_document(self.name, document(), None if self.participle is None else self.failures)
        elif not self.output.quiet:
            show()
        exit_on_failures(succeeded, self.failures, self.participle or "done")

    def stop(self) -> NoReturn:
        """End a command whose images could all not be used."""
        self.finish(0, lambda: {"results": []}, lambda: None)
        raise typer.Exit(2)


@dataclass(frozen=True)
class Opened:
    """A model that was loaded, its images, and how they are scored, as arguments of the verb."""

    model: Model
    images: ImageDataset
    detected: Mapping[str, Sequence[tuple[str, float]]]
    arguments: Mapping[str, Any]


@group()
class ScoringOptions:
    """A model, images with their annotations, what they are scored by, and how the passes are run."""

    data: options.DataOptions
    annotations: Annotations
    model: str = options.model_name()
    model_options: options.ModelOptions
    target: str | None = options.single_target(
        "A class name (or its unique beginning) or number, or 'label': the true class; default: the prediction."
    )
    readouts: options.ReadoutOptions
    run_options: options.RunOptions

    def open(self, command: Command, images: Sequence[str] | None, metrics: Sequence[MetricSpec]) -> Opened:
        """Refuse what cannot work together, then load the model and open the images."""
        self.run_options.check()
        self.model_options.preprocess()
        readouts = self.readouts.readouts()
        seed = self.run_options.seed
        source, failures = image_source(images, self.data, self.annotations, metrics, self.target, seed)
        command.failures.extend(failures)
        if source.is_empty:
            command.stop()
        net = self.model_options.load(self.model)
        dataset = source.open(net, by_label=self.target == "label")
        command.notes((*net.assumptions, *dataset.images.notes))
        target = read_single_target(self.target, net, readouts)
        arguments = {"target": target, "on_error": command.on_error, **self.run_options.arguments()}
        return Opened(net, dataset.images, dataset.detected, arguments)

    def explain_with(self, *typed: str) -> list[str]:
        """Return the command that explains an image by this model: ['clairvit', 'explain', 'IMAGE', …]."""
        model = ["--model", self.model] if self.model != "pets" else []
        return ["clairvit", "explain", "IMAGE", *model, *self.model_options.typed(), *typed]
