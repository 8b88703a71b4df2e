"""One road: a question is read, grouped, recorded and resolved once for every verb."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import warnings
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import clairvit as cv
from clairvit.data.pipeline import THREAD_NAME
from clairvit.errors import BadInput, ClairWarning
from clairvit.methods import runs
from clairvit.methods.runs import CHUNK_SIZE, Question, Run, TargetList, iter_runs
from clairvit.methods.spec import resolve_method
from clairvit.models.state_hash import state_hash
from helpers.rounding import assert_same
from helpers.tiny_models import build, double, fresh_double, wrapped

KIND = "timm-vit"
CHUNK = CHUNK_SIZE["cpu"]
SPECS = [resolve_method("ixg")]


class Pictures(torch.utils.data.Dataset[Tensor]):
    """A data set of preprocessed images."""

    def __init__(self, pixels: Tensor) -> None:
        self.pixels = pixels

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, index: int) -> Tensor:
        return self.pixels[index]


def shape_of(question: Question, **options: Any) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return the rows and the places of the targets of each run."""
    return [(run.rows, run.places) for run in iter_runs(question, SPECS, **options)]


def test_a_batch_is_one_run_and_a_data_set_is_read_in_chunks() -> None:
    model, images = double(KIND, CHUNK + 3)
    everything = tuple(range(CHUNK + 3))
    chunks = [(everything[:CHUNK], (0,)), (everything[CHUNK:], (0,))]
    assert shape_of(Question.of(model, images)) == [(everything, (0,))]
    assert shape_of(Question.of(model, Pictures(images))) == chunks
    assert shape_of(Question.of(model, iter(images))) == chunks
    assert shape_of(Question.of_dataset(model, images)) == chunks
    assert shape_of(Question.of(model, images), size=CHUNK) == chunks


def test_targets_that_read_one_output_share_a_run() -> None:
    model, images = double(KIND, 3)
    first, second = cv.Neuron(1, 2), cv.Neuron(0, 3)
    assert shape_of(Question.of(model, images, targets=[1, [1, 2, 3], None])) == [((0, 1, 2), (0, 1, 2))]
    assert shape_of(Question.of(model, images, targets=[first, second])) == [((0, 1, 2), (0,)), ((0, 1, 2), (1,))]
    mixed = Question.of(model, images, [first, first, second])
    assert shape_of(mixed) == [((0, 1), (0,)), ((2,), (0,))]
    assert shape_of(mixed, alone=True) == [((0,), (0,)), ((1,), (0,)), ((2,), (0,))]


def test_a_run_has_the_targets_of_its_own_images() -> None:
    model, images = double(KIND, CHUNK + 2)
    classes = [index % 4 for index in range(len(images))]
    for question in (Question.of(model, Pictures(images), classes), Question.of_dataset(model, images, classes)):
        seen = [target.classes for run in iter_runs(question, SPECS) for target in run.targets]
        assert seen == [tuple(classes[:CHUNK]), tuple(classes[CHUNK:])]
    labelled = Question.of_dataset(model, images, "label", labels=classes)
    assert [run.targets[0].classes for run in iter_runs(labelled, SPECS)] == [
        tuple(classes[:CHUNK]),
        tuple(classes[CHUNK:]),
    ]


def test_each_group_is_recorded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[int] = []
    usual = runs.record_for

    def count(specs: Any, model: cv.Model, pixels: Tensor, *rest: Any) -> Any:
        recorded.append(len(pixels))
        return usual(specs, model, pixels, *rest)

    monkeypatch.setattr(runs, "record_for", count)
    model, images = double(KIND, CHUNK + 1)
    cv.compare(model, Pictures(images), ["ixg", "rollout", "genatt"], targets=[1, 2])
    assert recorded == [CHUNK, 1]
    recorded.clear()
    cv.evaluate(model, images, ["ixg", "rollout"], ["sparseness"])
    assert recorded == [CHUNK, 1]


@pytest.mark.parametrize("verb", [cv.explain, cv.evaluate])
def test_images_and_model_are_prepared_once(verb: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            seen.append(name)
            return function(*args, **options)

        return call

    for name in ("prepare", "model_and_images"):
        monkeypatch.setattr(runs, name, counted(name, getattr(runs, name)))
    model, images = double(KIND, 2)
    verb(model, images, "ixg")
    assert seen == (["model_and_images", "prepare"] if verb is cv.explain else ["model_and_images"])


def test_the_structure_is_found_once_in_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    from clairvit.methods import explain as explain_module
    from clairvit.methods import planner

    calls: list[str] = []
    for module in (explain_module, planner):
        usual = module.model_structure

        def count(*args: Any, usual: Any = usual) -> Any:
            calls.append("structure")
            return usual(*args)

        monkeypatch.setattr(module, "model_structure", count)
    model, images = fresh_double(KIND, 2)
    cv.explain(model, images)
    assert len(calls) == 1


def test_closing_ends_the_threads_that_read_ahead(tmp_path: Path) -> None:
    for number in range(2 * CHUNK):
        Image.fromarray(np.full((40, 40, 3), number, dtype=np.uint8)).save(tmp_path / f"{number}.png")
    question = Question.of_dataset(wrapped(KIND), str(tmp_path))
    with closing(iter_runs(question, SPECS)) as some:
        next(some)
        assert [thread for thread in threading.enumerate() if thread.name.startswith(THREAD_NAME)]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith(THREAD_NAME)]


def test_a_run_is_let_go_before_the_next_one_is_recorded() -> None:
    import weakref

    model, images = fresh_double(KIND, 3 * CHUNK)
    alive: list[weakref.ref[Run]] = []
    with closing(iter_runs(Question.of(model, Pictures(images)), SPECS)) as some:
        for run in some:
            assert not any(reference() for reference in alive)
            alive.append(weakref.ref(run))
            del run
    assert len(alive) == 3


def test_target_lists_say_what_is_wrong() -> None:
    model, images = double(KIND, 3)
    with pytest.raises(BadInput, match="expected one of them"):
        TargetList.of(1, [2])
    with pytest.raises(BadInput, match="An empty list of targets"):
        TargetList.of(None, [])
    with pytest.raises(BadInput, match="2 targets were given for 3 images"):
        Question.of_dataset(model, images, [1, 2])
    with pytest.raises(BadInput, match="2 targets were given for 3 images"):
        Question.of(model, images, [cv.Neuron(1, 2), 3])
    with pytest.raises(BadInput, match="read different outputs"):
        Question.of(model, images, [cv.Neuron(1, 2), 3, 4]).of_one_output()


def test_an_array_of_classes_is_a_list_of_them_in_chunks_too() -> None:
    model, images = double(KIND, CHUNK + 2)
    classes = [index % 4 for index in range(len(images))]
    listed = cv.evaluate(model, images, "ixg", "sparseness", target=classes)
    for array in (torch.tensor(classes), np.array(classes)):
        assert_same(cv.evaluate(model, images, "ixg", "sparseness", target=array).values, listed.values)


def test_some_images_of_a_question_keep_their_targets() -> None:
    model, images = double(KIND, 4)
    question = Question.of_dataset(model, images, [3, 2, 1, 0]).take([2, 0])
    (run,) = iter_runs(question, SPECS)
    assert run.targets[0].classes == (1, 3)
    assert_same(run.batch.pixels, images[[2, 0]])


# The weights' hash ----------------------------------------------------------------------------------------------------


def changed_in_place(module: nn.Module) -> None:
    with torch.no_grad():
        next(module.parameters()).add_(1)


def changed_data(module: nn.Module) -> None:
    next(module.parameters()).data += 1


def assigned_data(module: nn.Module) -> None:
    parameter = next(module.parameters())
    parameter.data = parameter.data + 1


def loaded(module: nn.Module) -> None:
    module.load_state_dict({name: value + 1 for name, value in module.state_dict().items()})


def replaced(module: nn.Module) -> None:
    name, parameter = next(iter(module.named_parameters()))
    *path, last = name.split(".")
    setattr(module.get_submodule(".".join(path)), last, nn.Parameter(parameter.detach() + 1))


CHANGES = [changed_in_place, changed_data, assigned_data, loaded, replaced]


@pytest.mark.parametrize("change", CHANGES)
def test_the_hash_is_that_of_the_weights_that_were_explained(change: Callable[[nn.Module], None]) -> None:
    """Read before the weights change it is theirs; read for the first time afterwards it is empty, and says so."""
    module = copy.deepcopy(build(KIND))
    _, images = double(KIND, 1)
    model = cv.wrap(module)
    before = cv.explain(model, images.float(), "rollout")
    first_hash = before.weights_hash
    assert first_hash == state_hash(module)
    change(module)
    unread, read = (cv.explain(model, images.float(), "rollout") for _ in range(2))
    second_hash = read.weights_hash
    assert second_hash == state_hash(module) != first_hash
    assert unread.weights_hash == second_hash  # hashed meanwhile: the weights are still the same
    change(module)
    late = cv.explain(model, images.float(), "rollout")
    change(module)
    with pytest.warns(ClairWarning, match="weights_hash is empty"):
        assert late.weights_hash == ""
    assert (before.weights_hash, read.weights_hash, unread.weights_hash) == (first_hash, second_hash, second_hash)
    with pytest.raises(BadInput, match="not those that were explained"):
        late.check()


def test_the_hash_is_read_for_a_pickle_and_outlives_the_model() -> None:
    module = copy.deepcopy(build(KIND))
    _, images = fresh_double(KIND, 1)
    explanation = cv.explain(cv.wrap(module), images.float(), "rollout")
    expected = state_hash(copy.deepcopy(module))
    content = pickle.dumps(explanation)
    changed_in_place(module)
    assert pickle.loads(content).weights_hash == expected == explanation.weights_hash
    del module
    gc.collect()
    assert explanation.weights_hash == expected


def test_the_hash_of_a_model_that_is_gone_can_still_be_read() -> None:
    module = copy.deepcopy(build(KIND))
    _, images = fresh_double(KIND, 1)
    explanation = replace(cv.explain(cv.wrap(module), images.float(), "rollout"), origin=None)
    expected = state_hash(copy.deepcopy(module))
    del module
    gc.collect()
    assert explanation.weights_hash == expected


def test_no_weights_are_hashed_until_the_hash_is_read() -> None:
    """Of several chunks either: weights that change before the first look have no hash any more."""
    module = copy.deepcopy(build(KIND))
    _, images = double(KIND, 2 * CHUNK)
    explanation = cv.explain(cv.wrap(module), Pictures(images.float()), "rollout")
    changed_in_place(module)
    with pytest.warns(ClairWarning, match="weights_hash is empty"):
        assert explanation.weights_hash == ""


class CountsItsCalls(nn.Module):
    """A model whose own forward changes a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = copy.deepcopy(build(KIND))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, pixels: Tensor) -> Any:
        assert isinstance(self.calls, Tensor)
        self.calls += 1
        return self.inner(pixels)


def test_weights_that_the_pass_itself_changes_are_hashed_at_once() -> None:
    _, images = double(KIND, 1)
    module = CountsItsCalls()
    explanation = cv.explain(cv.wrap(module, size=32), images.float(), "ixg")
    expected = state_hash(module)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ClairWarning)
        cv.wrap(module, size=32).logits(images.float())
        assert explanation.weights_hash == expected != state_hash(module)
