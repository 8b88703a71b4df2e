"""Check that every verb takes DataLoaders, data sets, rows of Hugging Face data sets and generators."""

from __future__ import annotations

import functools
import io
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader

import clairvit as cv
from clairvit.errors import BadInput, NotApplicable
from clairvit.methods.runs import CHUNK_SIZE
from clairvit.models.coerce import StreamedImages, as_images
from helpers.tiny_models import fresh, wrapped

KIND = "timm-vit"
COUNT = 9


def photos(count: int = COUNT) -> list[Image.Image]:
    rng = np.random.default_rng(0)
    return [Image.fromarray(rng.integers(0, 256, (40, 40, 3), np.uint8)) for _ in range(count)]


def halves() -> list[np.ndarray]:
    """Return the mask of the upper half of each photo."""
    mask = np.zeros((40, 40), np.uint8)
    mask[:20] = 1
    return [mask] * COUNT


class Rows:
    """Rows shaped as those of `datasets.Dataset`: dicts by index, a dict of columns by slice."""

    column_names = ("image", "label")

    def __init__(self, count: int = COUNT) -> None:
        self.images = photos(count)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int | slice) -> dict[str, Any]:
        if isinstance(index, slice):
            return {"image": self.images[index], "label": [i % 5 for i in range(len(self))][index]}
        return {"image": self.images[index], "label": index % 5}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[i] for i in range(len(self)))


SOURCES: dict[str, Callable[[], Any]] = {
    "DataLoader": lambda: DataLoader(Rows(), batch_size=4, collate_fn=list),  # type: ignore[arg-type]
    "data set": Rows,
    "generator of rows": lambda: iter(Rows()),
    "generator of images": lambda: (photo for photo in photos()),
}
FAST = "deletion(steps=2)"
VERBS: dict[str, Callable[[cv.Model, Any], Any]] = {
    "explain": lambda model, images: cv.explain(model, images, "ixg", target=1).maps,
    "explain by default": lambda model, images: cv.explain(model, images).maps,
    "explain, a target per image": lambda model, images: cv.explain(model, images, "ixg", target=[1] * COUNT).maps,
    "compare": lambda model, images: cv.compare(model, images, ["ixg", "rollout"])["rollout"].maps,
    "trace": lambda model, images: cv.trace(model, images, target=1).layers[0].dx,
    "evaluate": lambda model, images: cv.evaluate(model, images, "ixg", FAST, target=1).values,
    "choose": lambda model, images: cv.choose(model, images, ["ixg"], [FAST]).scores["ixg", FAST].values,
    "calibrate": lambda model, images: (
        cv.explain(model, photos()[:1], cv.calibrate(model, images, sets=2, metrics=[FAST])).maps
    ),
    "certify": lambda model, images: torch.tensor(cv.certify(model, images, "ixg", 0.5).sizes, dtype=torch.float64),
    "check_maps": lambda model, images: torch.tensor(
        [check.full for check in cv.check_maps(model, images, torch.ones(COUNT, 4, 4))]
    ),
    "expect": lambda model, images: cv.expect(model, images, halves(), "ixg", 1).random_inside,
    "mistakes": lambda model, images: cv.mistakes(model, images, "ixg", labels=[1] * COUNT).differences,
    "features": lambda model, images: cv.features(model, images).pca,
    "doctor": lambda model, images: torch.tensor(len(cv.doctor(model, images).images)),
}


def assert_close(values: Tensor, expected: Tensor) -> None:
    """Assert equality up to the order of additions, which depends on how many images go through the model at once."""
    torch.testing.assert_close(values, expected, rtol=1e-9, atol=1e-12)


@functools.cache
def result_of_a_list(verb: str) -> Tensor:
    result: Tensor = VERBS[verb](wrapped(KIND, torch.float64), photos())
    return result


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_gives_what_it_gives_for_a_list(verb: str, source: str) -> None:
    given = VERBS[verb](wrapped(KIND, torch.float64), SOURCES[source]())
    assert_close(given.nan_to_num(), result_of_a_list(verb).nan_to_num())


@pytest.mark.parametrize("verb", ["explain", "compare"])
def test_a_generator_is_read_chunk_by_chunk(verb: str) -> None:
    """While a chunk is explained, no more images are alive than this chunk and those read for the next one."""
    alive: set[int] = set()
    most = 0

    def stream() -> Iterator[Image.Image]:
        nonlocal most
        for i, photo in enumerate(photos(5 * chunk)):
            copy = photo.copy()
            alive.add(i)
            weakref.finalize(copy, alive.discard, i)
            most = max(most, len(alive))
            yield copy
            del copy

    chunk = CHUNK_SIZE["cpu"]
    model = fresh(KIND, torch.float64)
    if verb == "explain":
        assert len(cv.explain(model, stream(), "rollout")) == 5 * chunk
    else:
        assert len(cv.compare(model, stream(), ["rollout"])["rollout"]) == 5 * chunk
    assert most <= 2 * chunk + 1


def test_no_method_of_a_default_reads_an_image_twice() -> None:
    """The default method falls back where it does not fit; the first chunk is then still there."""
    stream = as_images(photo for photo in photos())
    assert isinstance(stream, StreamedImages)
    for _ in range(2):  # a method that fails on the first chunk leaves it there
        images, names = next(stream.chunks(4))
        assert (len(images), names[0]) == (4, "image 1")
    assert sum(len(images) for images, _ in stream.chunks(4)) == COUNT
    with pytest.raises(BadInput, match=f"read already, up to image {COUNT}; expected a new one"):
        next(stream.chunks(4))
    with pytest.raises(BadInput, match="read already"):
        stream[0]


def test_an_empty_generator_is_refused() -> None:
    for verb in (cv.explain, cv.features):
        with pytest.raises(BadInput, match="expected at least one"):
            verb(wrapped(KIND, torch.float64), (photo for photo in photos(0)))


def test_targets_of_a_generator_are_counted() -> None:
    with pytest.raises(BadInput, match=f"2 targets were given for {COUNT} images"):
        cv.explain(wrapped(KIND, torch.float64), (photo for photo in photos()), "ixg", target=[1, 2])


def test_single_rows_and_columns() -> None:
    model, rows = wrapped(KIND, torch.float64), Rows()
    expected = cv.explain(model, photos(), "rollout").maps
    assert_close(cv.explain(model, rows[2], "rollout").maps, expected[2:3])
    columns = as_images(rows[1:4])
    assert list(columns.labels) == [1, 2, 3]
    assert_close(cv.explain(model, rows[1:4], "rollout").maps, expected[1:4])
    renamed = {"photo": photos()[0], "id": 7}
    assert_close(cv.explain(model, renamed, "rollout").maps, expected[:1])


def test_encoded_images_are_decoded() -> None:
    buffer = io.BytesIO()
    photos()[0].save(buffer, "PNG")
    row = {"image": {"bytes": buffer.getvalue(), "path": None}}
    expected = cv.explain(wrapped(KIND, torch.float64), photos()[0], "rollout").maps
    assert_close(cv.explain(wrapped(KIND, torch.float64), [row], "rollout").maps, expected)
    with pytest.raises(BadInput, match="bytes that are no image"):
        cv.explain(wrapped(KIND, torch.float64), [{"image": {"bytes": b"none", "path": None}}])


def test_a_dict_of_splits_is_refused_with_one_to_take() -> None:
    splits: Mapping[str, Sequence[Any]] = {"train": Rows(), "test": Rows()}  # type: ignore[dict-item]
    with pytest.raises(BadInput, match=r"dict of data sets .*train, test.* such as data\['train'\]"):
        cv.explain(wrapped(KIND, torch.float64), splits)


def test_the_real_package() -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"image": photos(3), "label": [0, 1, 2]}).cast_column("image", datasets.Image())
    expected = cv.explain(wrapped(KIND, torch.float64), photos(3), "rollout").maps
    for given in (rows, rows.to_iterable_dataset(), rows[:]):
        assert_close(cv.explain(wrapped(KIND, torch.float64), given, "rollout").maps, expected)


def test_a_method_that_does_not_fit_is_refused_for_generators_too() -> None:
    with pytest.raises(NotApplicable):
        cv.explain(wrapped(KIND, torch.float64), (photo for photo in photos()), "cam")
