"""Images are decoded ahead and results written behind, in order, bounded, and no thread is left."""

from __future__ import annotations

import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from clairvit.cli.image_job import Failure, ImageResult, explain_images
from clairvit.data import dataset as dataset_module
from clairvit.data.dataset import iter_batches
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
        blocked = threading.Thread(target=writer.submit, args=(lambda: work(2),))
        blocked.start()
        assert len(writer._pending) <= 2
        release.set()
        blocked.join()
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


def test_data_that_is_read_in_one_thread_only_stays_there(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams and data sets of the user may not be thread-safe."""
    threads: list[int] = []
    monkeypatch.setattr(
        dataset_module,
        "read_ahead",
        lambda *a, workers, **o: threads.append(workers) or read_ahead(*a, workers=workers, **o),
    )
    model = identity_model()
    tensors = dataset_module.as_dataset(torch.zeros(3, 3, 6, 8), model)
    files = dataset_module.as_dataset([str(photos / "0.jpg"), str(photos / "1.jpg")], model)
    masked = dataset_module.as_dataset([str(photos / "0.jpg")] * 2, model, masks=lambda name, picture: None)
    for data in (tensors, files, masked):
        list(iter_batches(data, model, 2, workers=2))
    assert threads == [0, 2, 0]


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
    """A tensor that records how it is moved."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def pin_memory(self) -> _Pixels:
        self.calls.append("pin_memory")
        return self

    def to(self, *where: Any, **options: Any) -> _Pixels:
        self.calls.append((where, options))
        return self


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_pixels_go_to_a_gpu_through_pinned_memory_without_waiting(device: str) -> None:
    class OnDevice:
        dtype = torch.float32

    model, pixels = OnDevice(), _Pixels()
    model.device = torch.device(device)  # type: ignore[attr-defined]
    to_device(pixels, model)  # type: ignore[arg-type]
    if device == "cuda":
        assert pixels.calls[:2] == ["pin_memory", ((torch.device("cuda"),), {"non_blocking": True})]
    else:
        assert pixels.calls == [((torch.device("cpu"), torch.float32), {})]
