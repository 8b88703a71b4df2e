"""Several models side by side: `compare` for each of them, on the same photos and for the same targets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

from clairvit._cost import Cost
from clairvit._tables import TableRow, Tabular
from clairvit.errors import BadInput, NotApplicable, UnknownName
from clairvit.methods.explanation import Comparison
from clairvit.models.coerce import ModelLike, all_preprocessed, as_images, as_model
from clairvit.models.model import Model
from clairvit.targets.base import class_name


class ModelComparison(dict[str, Comparison], Tabular):
    """A mapping from model names to the comparisons of their methods; what `cv.compare` of several models returns.

    Each model sees the photos through its own preprocessing and has its own prediction; a class is found by name in
    each of them. A notebook cell that ends with one shows its picture: a row per model.

    Example:
        >>> import clairvit as cv
        >>> many = cv.compare(["pets", cv.load("torchvision:resnet18", pretrained=False)], "demo", ["gradcam"])
        >>> many
        ModelComparison(2 models: pets, torchvision:resnet18 (random weights); 1 method)
        >>> many["pets"]["gradcam"].targets
        ('Bengal',)
    """

    @property
    def methods(self) -> tuple[str, ...]:
        """Return the methods that fit at least one of the models: those of the first model, then further ones."""
        return tuple(dict.fromkeys(method for comparison in self.values() for method in comparison))

    @property
    def skipped(self) -> dict[str, dict[str, str]]:
        """Return model -> method -> why it does not fit this model."""
        return {model: dict(comparison.skipped) for model, comparison in self.items()}

    @property
    def cost(self) -> Cost:
        """Return the passes and seconds of all models together."""
        return sum((comparison.cost for comparison in self.values()), Cost())

    def take(self, rows: Sequence[int]) -> ModelComparison:
        """Return some of the maps of every model and method."""
        part = ModelComparison()
        for model, comparison in self.items():
            part[model] = Comparison()
            part[model].skipped, part[model].cost = comparison.skipped, comparison.cost
            part[model].update({method: explanation.take(rows) for method, explanation in comparison.items()})
        return part

    def __repr__(self) -> str:
        """Return one line: the models, and how many methods."""
        count = len(self.methods)
        skipped = sum(map(len, self.skipped.values()))
        left_out = f"; {skipped} skipped" if skipped else ""
        return f"ModelComparison({len(self)} models: {', '.join(self)}; {count} method{'s' * (count != 1)}{left_out})"

    def to_dict(self, values: bool = True) -> dict[str, Any]:
        """Return model -> its methods, what was left out and why, and the cost, as JSON values.

        Args:
            values: Include the maps themselves.

        Returns:
            The content of the .json file.
        """
        return {
            model: {
                "methods": comparison.to_dict(values),
                "skipped": dict(comparison.skipped),
                "cost": dict(vars(comparison.cost)),
            }
            for model, comparison in self.items()
        }

    def _table(self) -> list[TableRow]:
        """Return a row per model, method and map."""
        return [row for comparison in self.values() for row in comparison._table()]

    def save(self, path: str | PathLike[str], **display: Any) -> Path:
        """Write a file by its suffix: a picture with a row per model, .json, .csv (a row per map), .npz arrays.

        Args:
            path: The file to write; readers never see a partial file.
            **display: Display options of pictures, as in `Explanation.save`.

        Returns:
            The path.
        """
        from clairvit.plotting.model_comparison import save_model_comparison

        return save_model_comparison(self, Path(path), **display)

    def _repr_png_(self) -> bytes:
        """Return the picture that a notebook shows."""
        from clairvit.plotting.model_comparison import model_comparison_png

        return model_comparison_png(self)


def compare_models(
    models: Sequence[ModelLike],
    images: Any,
    methods: str | Sequence[Any] | None,
    target: Any,
    *,
    targets: Sequence[Any] | None,
    skip: bool,
    **arguments: Any,
) -> ModelComparison:
    """Compare methods on each of several models; one that does not fit a model is left out there.

    Raises:
        BadInput: The images are preprocessed for one of the models, or a class is given by a number that means
            different classes.
        UnknownName: A model has no class of that name.
        NotApplicable: A method fits none of the models, unless `skip` is set.
    """
    from clairvit.methods.explain import compare

    if not models:
        raise BadInput("No models were given to compare; expected at least one.")
    if isinstance(images, Iterator):
        images = list(images)
    loaded = [as_model(model, images) for model in models]
    check_same_input(loaded, images)
    check_class_numbers(loaded, [target, *(targets or ())])
    comparison = ModelComparison()
    for name, model in zip(model_names(loaded), loaded, strict=True):
        try:
            single = compare(model, images, methods, target, targets=targets, skip=True, **arguments)
        except UnknownName as error:
            raise UnknownName(f"{name}: {error}") from error
        comparison[name] = renamed(single, name)
    check_fit(comparison, skip=skip)
    return comparison


def renamed(comparison: Comparison, model: str) -> Comparison:
    """Return a comparison whose explanations bear the name that tells the model from the others."""
    for method, explanation in comparison.items():
        if explanation.model != model:
            comparison[method] = replace(explanation, model=model)
    return comparison


def check_fit(comparison: ModelComparison, *, skip: bool) -> None:
    """Raise NotApplicable where no method fits any model, or, unless `skip` is set, where one fits none."""
    skipped = comparison.skipped
    fitting = comparison.methods
    unfit = [method for reasons in skipped.values() for method in reasons if method not in fitting]
    if unfit and (not skip or not fitting):
        reasons = "; ".join(f"{model}: {reasons[unfit[0]]}" for model, reasons in skipped.items())
        raise NotApplicable(f"'{unfit[0]}' fits none of the models. {reasons}")


def model_names(models: Sequence[Model]) -> list[str]:
    """Return a name for each model that no other one has: resnet50, resnet50 (2)."""
    names: list[str] = []
    for model in models:
        number, name = 1, model.name
        while name in names:
            number += 1
            name = f"{model.name} ({number})"
        names.append(name)
    return names


def check_same_input(models: Sequence[Model], images: Any) -> None:
    """Raise BadInput for pixels that are preprocessed already, where the models expect different ones."""
    differ = any(model.preprocess != models[0].preprocess for model in models)
    if differ and not isinstance(images, Mapping) and all_preprocessed(as_images(images)):
        raise BadInput(
            f"The images are preprocessed tensors, and {' and '.join(model_names(models))} preprocess images in "
            "different ways; expected photos (paths, PIL images or uint8 arrays), which each model preprocesses itself."
        )


def check_class_numbers(models: Sequence[Model], targets: Sequence[Any]) -> None:
    """Raise BadInput for a class that is given by its number, where that is another class in another model."""
    for target in targets:
        for item in target if isinstance(target, list | tuple) else [target]:
            if isinstance(item, bool) or not (isinstance(item, int) or (isinstance(item, str) and item.isdecimal())):
                continue
            number = int(item)
            names = [class_name(model.labels, number) for model in models if model.labels]
            if len({name.casefold() for name in names}) > 1:
                meanings = ", ".join(
                    f"{class_name(model.labels, number)} in {name}"
                    for name, model in zip(model_names(models), models, strict=True)
                )
                raise BadInput(f"Class {number} is {meanings}; expected the name of a class that every model has.")
