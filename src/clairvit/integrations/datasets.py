"""Hugging Face datasets: a function for `Dataset.map` that adds maps, targets and scores as columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from clairvit.errors import BadInput
from clairvit.methods.explain import explain
from clairvit.methods.spec import MethodSpec, resolve_method
from clairvit.models.coerce import ModelLike, as_model


def explain_rows(
    model: ModelLike, method: str | MethodSpec | None = None, *, image_column: str = "image", **options: Any
) -> Callable[[Mapping[str, Any]], dict[str, list[Any]]]:
    """Return a function for `dataset.map(…, batched=True)`.

    Args:
        model: A `cv.Model`, a module or a name; loaded once.
        method: A method string or spec; None is the default method for the model.
        image_column: The column of images.
        **options: Further arguments of `cv.explain`.

    Returns:
        A function of a batch of rows to the columns "map" (rows × columns of numbers), "target" and "probability".

    Raises:
        BadInput: When rows have no such column.

    Example:
        >>> from PIL import Image
        >>> from clairvit.integrations.datasets import explain_rows
        >>> rows = {"image": [Image.new("RGB", (224, 224), colour) for colour in ("red", "blue")]}
        >>> columns = explain_rows("pets", "genatt")(rows)  # as dataset.map(explain_rows(…), batched=True) calls it
        >>> sorted(columns), len(columns["map"])
        (['map', 'probability', 'target'], 2)
    """
    explained = as_model(model)
    spec = None if method is None else resolve_method(method)

    def add_columns(rows: Mapping[str, Any]) -> dict[str, list[Any]]:
        if image_column not in rows:
            columns = ", ".join(map(str, rows))
            raise BadInput(f"The rows have the columns {columns}; expected '{image_column}', or image_column=NAME.")
        images = rows[image_column]
        explanation = explain(explained, images if isinstance(images, list) else [images], spec, **options)
        added: dict[str, list[Any]] = {
            "map": explanation.numpy().tolist(),
            "target": list(explanation.targets),
            "probability": list(explanation.probabilities),
        }
        return added if isinstance(images, list) else {name: values[0] for name, values in added.items()}

    return add_columns
