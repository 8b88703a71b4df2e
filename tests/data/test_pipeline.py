"""Images are decoded ahead and results written behind, in order, bounded, and no thread is left."""

from __future__ import annotations

import threading
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import clairvit as cv
from clairvit.cli.image_job import Failure, ImageResult, explain_images
from clairvit.data.dataset import as_dataset, iter_batches
from clairvit.data.open import open_data
from clairvit.data.pipeline import THREAD_NAME, WriteBehind, read_ahead
from clairvit.errors import BadInput, ClairError
from clairvit.models.images import to_device
from helpers.small_datasets import identity_model, photo, written
from plotting.fakes import fake


def pipeline_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(THREAD_NAME)]


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_values_come_in_order_and_errors_in_their_place(workers: int) -> None:
    def read(number: int) -> int:
        if number == 4:
            raise BadInput("number 4")
        return number * number

    values: list[Any] = []
    with read_ahead(read, range(9), workers=workers, ahead=3) as reads:
        for get in reads:
            try:
                values.append(get())
            except BadInput as error:
                values.append(str(error))
    assert values == [0, 1, 4, 9, "number 4", 25, 36, 49, 64]
    assert pipeline_threads() == []


def test_items_are_read_ahead_by_other_threads_and_not_too_many() -> None:
    """The next items are read before they are asked for, and the one behind them is not."""
    started: list[int] = []
    third, names = threading.Event(), set()

    def read(number: int) -> int:
        started.append(number)
        names.add(threading.current_thread().name)
        if len(started) == 4:
            third.set()
        return number

    with read_ahead(read, range(100), workers=2, ahead=3) as reads:
        assert next(reads)() == 0
        assert third.wait(30), "items 1 to 3 are read although only item 0 was asked for"
        assert set(started) == {0, 1, 2, 3}
        assert len(list(zip(range(10), reads, strict=False))) == 10
    assert threading.current_thread().name not in names
    assert max(started) <= 13
    assert pipeline_threads() == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interruption_ends_the_threads(error: type[BaseException]) -> None:
    def interrupted_reader() -> None:
        with read_ahead(lambda number: number, range(100), workers=2, ahead=4) as reads:
            next(reads)()
            raise error

    def interrupted_writer() -> None:
        with WriteBehind[None](2) as writer:
            writer.submit(lambda: None)
            raise error

    for interrupted in (interrupted_reader, interrupted_writer):
        with pytest.raises(error):
            interrupted()
        assert pipeline_threads() == []


def test_results_are_written_in_order_behind_the_caller_and_bounded() -> None:
    release, begun = threading.Event(), threading.Event()
    order: list[int] = []

    def work(number: int) -> int:
        begun.set()
        release.wait(30)
        order.append(number)
        return number

    with WriteBehind[int](2) as writer:
        writer.submit(lambda: work(0))
        assert begun.wait(30)
        writer.submit(lambda: work(1))
        assert order == [], "the caller goes on while the first is written"
        submitted = threading.Event()
        third = threading.Thread(target=lambda: (writer.submit(lambda: work(2)), submitted.set()))
        third.start()
        assert not submitted.wait(0.3), "two wait or run: the third is accepted when the first has ended"
        release.set()
        third.join()
        assert writer.finish() == order == [0, 1, 2]


def test_an_error_of_the_writer_is_raised_and_later_work_is_dropped() -> None:
    def fails() -> int:
        raise BadInput("disk full")

    done: list[int] = []

    def write() -> None:
        with WriteBehind[int](1) as writer:
            writer.submit(fails)
            writer.submit(lambda: done.append(1) or 1)

    with pytest.raises(BadInput, match="disk full"):
        write()
    assert done == []
    assert pipeline_threads() == []


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for number in range(7):
        photo(tmp_path / "photos" / f"{number}.jpg", seed=number)
    written(tmp_path / "photos" / "3.jpg", "no image")
    return tmp_path / "photos"


def test_batches_are_the_same_with_any_number_of_threads(photos: Path) -> None:
    data, model = open_data(f"folder:{photos}").dataset, identity_model()
    assert data.concurrent
    batches, errors = [], []
    for workers in (0, 3):
        reported: list[str] = []
        batches.append(list(iter_batches(data, model, 2, lambda name, _, log=reported: log.append(name), workers)))
        errors.append(reported)
    assert errors == [["3.jpg"], ["3.jpg"]]
    assert [batch.rows for batch in batches[0]] == [(0, 1), (2,), (4, 5), (6,)]
    for first, second in zip(*batches, strict=True):
        assert first.rows == second.rows
        assert first.pixels.equal(second.pixels)
    assert pipeline_threads() == []


def test_a_consumer_that_raises_leaves_no_threads(photos: Path) -> None:
    data = open_data(f"folder:{photos}").dataset

    def interrupted() -> None:
        with closing(iter_batches(data, identity_model(), 2, None, 3)) as batches:
            next(batches)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert pipeline_threads() == []
    with pytest.raises(ClairError, match="is not an image"):
        list(iter_batches(data, identity_model(), 2, None, 3))
    assert pipeline_threads() == []


class WatchedPhotos(torch.utils.data.Dataset[torch.Tensor]):
    """A data set of the user's that records which threads read it."""

    def __init__(self) -> None:
        self.readers: set[int] = set()

    def __len__(self) -> int:
        return 3

    def __getitem__(self, row: int) -> torch.Tensor:
        self.readers.add(threading.get_ident())
        return torch.full((3, 6, 8), row / 4)


def test_data_that_is_read_in_one_thread_only_stays_there(photos: Path) -> None:
    """Data sets and functions of the user may not be thread-safe; files are."""
    watched, readers = WatchedPhotos(), set()

    def mask(name: str, picture: Any) -> None:
        readers.add(threading.get_ident())

    model, files = identity_model(), [str(photos / "0.jpg"), str(photos / "1.jpg")]
    for data, ahead in (
        (as_dataset(watched, model), False),
        (as_dataset(files, model, masks=mask), False),
        (as_dataset(files, model), True),
    ):
        with closing(iter_batches(data, model, 1, workers=2)) as batches:
            next(batches)
            assert bool(pipeline_threads()) == ahead
            assert len(list(batches)) == len(data) - 1
    assert watched.readers == readers == {threading.get_ident()}


def test_explain_reads_ahead_and_reports_what_cannot_be_read(photos: Path) -> None:
    def explain(model: Any, batch: Any, target: Any) -> dict[str, Any]:
        return {"legrad": fake(len(batch), names=batch.names)}

    paths = [str(photos / f"{number}.jpg") for number in range(7)]
    outcomes = list(explain_images(paths, identity_model(), [], 3, explain))
    kinds = {Path(outcome.image).stem: type(outcome) for outcome in outcomes}
    assert kinds == {str(number): Failure if number == 3 else ImageResult for number in range(7)}
    assert [o.image for o in outcomes if isinstance(o, ImageResult)] == [path for path in paths if "3.jpg" not in path]
    assert pipeline_threads() == []


class _Pixels:
    """Pixels in the memory of the host; moving them to a GPU waits for it unless they are pinned and need not wait."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        self.device, self.dtype, self.pinned, self.waited = torch.device("cpu"), dtype, False, False

    def pin_memory(self) -> _Pixels:
        self.pinned = True
        return self

    def to(self, *where: Any, non_blocking: bool = False, **named: Any) -> _Pixels:
        for value in (*where, *named.values()):
            if isinstance(value, torch.dtype):
                self.pinned &= value == self.dtype or self.device.type == "cuda"  # a new tensor
                self.dtype = value
        for value in (*where, *named.values()):
            if isinstance(value, torch.device) and value != self.device:
                self.waited |= value.type == "cuda" and not (self.pinned and non_blocking)
                self.device = value
        return self


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_pixels_reach_a_gpu_without_waiting_for_it(device: str) -> None:
    model: Any = SimpleNamespace(device=torch.device(device), dtype=torch.float32)
    pixels: Any = to_device(_Pixels(), model)  # type: ignore[arg-type]
    assert (pixels.device, pixels.dtype, pixels.waited) == (torch.device(device), torch.float32, False)


def test_pixels_keep_their_values_in_the_models_dtype() -> None:
    pixels = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    model = cv.wrap(torch.nn.Conv2d(3, 5, 1).double(), size=4, mean=0.5, std=0.5)
    moved = to_device(pixels, model)
    assert (moved.dtype, moved.device) == (model.dtype, model.device)
    assert torch.equal(moved, pixels.double())
