"""Several models side by side, image by image, as `clairvit compare -m A -m B` does: load, compare, write, print."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from clairvit.cli.arguments import split_targets
from clairvit.cli.console import EXPLAINS, SHOWS, print_line, progress_bar, table
from clairvit.cli.finish import MAX_ROWS, print_skipped
from clairvit.cli.hints import with_options
from clairvit.cli.image_job import Failure, OutputPath, WrittenResult, file_stems, find_image_files, output_path
from clairvit.cli.options import ModelOptions, OutputOptions, RunOptions, TargetOptions
from clairvit.errors import BadInput, ClairError

if TYPE_CHECKING:
    from pathlib import Path

    from clairvit.methods.compare_models import ModelComparison
    from clairvit.methods.spec import MethodSpec
    from clairvit.models.model import Model


@dataclass(frozen=True)
class WrittenModels:
    """The files of one image, and the JSON records of each model."""

    image: str
    files: tuple[Path, ...]
    models: Mapping[str, WrittenResult]


@dataclass(frozen=True)
class ModelsJob:
    """The options of `compare` with several models.

    Args:
        images: Files, folders and globs.
        models: What was typed for each model.
        methods: What is compared.
        out: A file or a folder.
        suffix: The end of the file names in a folder.
    """

    images: Sequence[str]
    models: Sequence[str]
    model_options: ModelOptions
    targets: TargetOptions
    run_options: RunOptions
    output: OutputOptions
    methods: Sequence[MethodSpec]
    out: str
    suffix: str

    def run(self) -> tuple[list[WrittenModels], list[Failure]]:
        """Load the models once, then compare them image by image; an image that fails does not end the others."""
        import clairvit as cv

        out = output_path(self.out)  # refused before a model is loaded
        if self.targets.generate:
            raise BadInput("--generate explains the words that one model writes; expected it with a single --model.")
        readouts = self.targets.readouts()
        paths, failures = find_image_files(self.images)
        if not paths:
            return [], failures
        models = self.model_options.load_each(self.models)
        targets = [*self._classes(models), *readouts]
        stems, results, comparisons, errors = file_stems(paths), [], [], []
        with progress_bar(f"{len(models)} models", len(paths), hidden=self.output.hidden) as advance:
            for path in paths:
                advance(1)
                try:
                    comparison = cv.compare(
                        models,
                        path,
                        list(self.methods),
                        targets=targets or None,
                        score=self.targets.score,
                        skip=True,
                        **self.run_options.arguments(),
                    )
                except ClairError as error:
                    errors.append(error)
                    failures.append(Failure(path, with_options(error)))
                    continue
                comparisons += [comparison] if out.is_file else []
                results.append(self._written(comparison, path, out, stems[path]))
        if errors and not results:
            raise errors[0]
        if comparisons:
            file = joined(comparisons).save(out.path)
            results = [WrittenModels(result.image, (file,), result.models) for result in results]
        return results, failures

    def _classes(self, models: Sequence[Model]) -> list[Any]:
        """Return the targets of --target and --contrast; a class with a comma in its name is one of any model's."""
        import clairvit as cv

        labels = {label for model in models for label in model.labels}
        targets: list[Any] = list(split_targets(self.targets.target or [], labels))
        return targets if self.targets.contrast is None else [*targets, cv.Contrast(*self.targets.contrast)]

    def _written(self, comparison: ModelComparison, image: str, out: OutputPath, stem: str) -> WrittenModels:
        files = () if out.is_file else tuple(map(comparison.save, out.files(f"{stem}-{self.suffix}")))
        values = self.output.as_json
        models = {
            name: WrittenResult(
                image,
                files,
                {method: explanation.to_dict(values) for method, explanation in methods.items()},
                methods.skipped,
                methods.cost,
            )
            for name, methods in comparison.items()
        }
        return WrittenModels(image, files, models)


def joined(comparisons: Sequence[ModelComparison]) -> ModelComparison:
    """Return the comparisons of several images as one, of the methods that each of them has."""
    from clairvit.methods.compare_models import ModelComparison
    from clairvit.methods.explanation import Comparison, concat

    whole = ModelComparison()
    for model, first in comparisons[0].items():
        parts = [comparison[model] for comparison in comparisons]
        whole[model] = Comparison()
        whole[model].cost = sum((part.cost for part in parts[1:]), parts[0].cost)
        for part in parts:
            whole[model].skipped |= part.skipped
        shared = [method for method in first if method not in whole[model].skipped]
        whole[model].update({method: concat([part[method] for part in parts]) for method in shared})
    return whole


def entry(result: WrittenModels, slow: Mapping[str, str]) -> dict[str, Any]:
    """Return one image of the JSON document."""
    return {
        "image": result.image,
        "files": [str(file) for file in result.files],
        "models": {
            name: {
                "cost": None if written.cost is None else vars(written.cost),
                "methods": written.records,
                "skipped": {**written.skipped, **slow},
            }
            for name, written in result.models.items()
        },
    }


def print_models(results: Sequence[WrittenModels], slow: Mapping[str, str]) -> None:
    """Print what each model sees in each image, the methods of each, and what was left out."""
    from clairvit.plotting.labels import class_label

    lines: list[tuple[str, ...]] = []
    for result in results[:MAX_ROWS]:
        for name, written in result.models.items():
            if not written.records:
                lines.append((result.image, name, "", "", ""))
                continue
            top = written.first["top"][0][:2]
            best = [class_label(guess["name"], guess["probability"], guess["score"]) for guess in top]
            specific = [record for record in written.records.values() if record["class_specific"]]
            explained = ", ".join(dict.fromkeys(specific[0]["targets"])) if specific else "any class"
            lines.append((result.image, name, *best, *[""] * (2 - len(best)), explained))
    table("What each model sees", ("image", "model", "predicted", "then", "explained"), lines, grouped=True)
    if len(results) > MAX_ROWS:
        print_line(f"… and {len(results) - MAX_ROWS} more images; --json lists all of them.")
    if not results:
        return
    rows = []
    for name, written in results[0].models.items():
        for method, record in written.records.items():
            kind = (EXPLAINS[record["class_specific"]], SHOWS[record["signed"]])
            rows.append((name, record["family"], method, *kind, f"{1000 * record['cost']['own_seconds']:.1f}"))
    columns = ("model", "family", "method", "explains", "shows", "ms")
    table("The milliseconds are each method's own, without the passes", columns, rows, right=("ms",), grouped=True)
    for name, written in results[0].models.items():
        if written.skipped:
            print_line(f"{name}:")
        print_skipped(written.skipped)
    print_skipped({}, slow)
