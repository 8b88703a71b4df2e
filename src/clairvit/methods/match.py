"""The verb `match`: which parts of two images make them alike, in both directions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

from clairvit._tables import TableRow, Tabular
from clairvit.errors import BadInput
from clairvit.methods.explain import explain
from clairvit.methods.explanation import Explanation, concat
from clairvit.methods.runs import Question
from clairvit.methods.spec import MethodSpec
from clairvit.models.coerce import ModelLike
from clairvit.models.images import Batch, prepare
from clairvit.models.model import Model
from clairvit.targets.similar import Similar


@dataclass(frozen=True, eq=False)
class ImageMatch(Tabular):
    """Two images, their cosine, and the map of each: what in it makes it like the other.

    Args:
        explanation: Two maps: of the first image for its similarity to the second, and the other way round.
        cosine: The cosine of their embeddings, in −1…1.

    Example:
        >>> import clairvit as cv
        >>> cv.match("pets", "demo", "demo", "ixg")
        ImageMatch(demo, demo: cosine 1.000 by ixg)
    """

    explanation: Explanation
    cosine: float

    def __repr__(self) -> str:
        names = ", ".join(self.explanation.names)
        return f"ImageMatch({names}: cosine {self.cosine:.3f} by {self.explanation.method})"

    def to_dict(self, values: bool = True) -> dict[str, Any]:
        """Return the cosine and both maps as JSON values.

        Args:
            values: Include the maps themselves.

        Returns:
            The content of the .json file.
        """
        return {"cosine": self.cosine, **self.explanation.to_dict(values)}

    def _table(self) -> list[TableRow]:
        """Return a row per direction."""
        return [{"cosine": self.cosine} | row for row in self.explanation._table()]

    def save(self, path: str | PathLike[str], **display: Any) -> Path:
        """Write a file by its suffix: a picture of both photos and maps, .json, .csv (a row per map), .npz the maps.

        Args:
            path: The file to write; readers never see a partial file.
            **display: Display options of pictures, as in `Explanation.plot`; also dpi=.

        Returns:
            The path.
        """
        from clairvit.plotting.match import save_match  # drawing comes after methods

        return save_match(self, Path(path), **display)

    def _repr_png_(self) -> bytes:
        """Return the picture that a notebook shows."""
        from clairvit.plotting.match import match_png

        return match_png(self)


def with_other_direction(model: Model, explanation: Explanation, other: Any, name: str) -> ImageMatch:
    """Return both directions from the explanation of one image by its similarity to another.

    Args:
        model: The model that was explained.
        explanation: One map, by `cv.Similar(other)`.
        other: The other image.
        name: The name of the other image.
    """
    batch = replace(prepare([other], model), names=(name,))
    first = Batch(explanation.pixels, explanation.names)  # a batch, as the axes of a clip's tensor are ambiguous
    back = explain(model, batch, explanation.method, target=Similar(first))
    both = concat([explanation, back])
    return ImageMatch(both, _cosine(both))


def _cosine(explanation: Explanation) -> float:
    """Return the cosine of the embeddings of two images."""
    return float(explanation.logits[0].double() @ explanation.logits[1].double())


def match(
    model: ModelLike,
    first: Any,
    second: Any,
    method: str | MethodSpec | None = None,
    **arguments: Any,
) -> ImageMatch:
    """Explain which parts of two images make them alike, by the cosine of their embeddings, in both directions.

    Args:
        model: As in `explain`; any model with an embedding, see `cv.Similar`.
        first, second: Two images: paths, PIL images, uint8 arrays or preprocessed float tensors.
        method: As in `explain`; None is the default for the model.
        **arguments: Further arguments of `explain`: seed=, batch_size=, options of the method.

    Returns:
        An `ImageMatch`: two maps and the cosine.

    Raises:
        BadInput: An image cannot be read, or more than two were given.
        NotApplicable: The model has no embedding, or the method does not fit it.

    Example:
        >>> import clairvit as cv
        >>> pair = cv.match("pets", "demo", "demo", "ixg")
        >>> pair.explanation.targets, round(pair.cosine, 3)
        (('similar to demo', 'similar to demo'), 1.0)
    """
    question = Question.of(model, [first, second], scored="never", one_batch=True)
    batch = question.images
    assert isinstance(batch, Batch)
    if len(batch) != 2:
        raise BadInput(f"{len(batch)} images were given to compare; expected two.")
    others = [Similar(Batch(batch.pixels[[other]], (batch.names[other],))) for other in (1, 0)]
    explanation = explain(question.model, batch, method, target=others, **arguments)
    return ImageMatch(explanation, _cosine(explanation))
