"""Chance can be repeated: it knows the seed and the image, and nothing of the batch or the precision."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import clairvit as cv
from clairvit._rng import NUMBERS, image_seeds, make_generator
from clairvit.errors import BadInput
from clairvit.execution import check_seed


def drawn(seed: int, stream: str, index: int = 0) -> float:
    return float(torch.rand((), generator=make_generator(seed, stream, index), dtype=torch.float64))


@pytest.mark.parametrize("stream", ["metrics/random sets", "irof/ties"])
def test_every_pair_of_seed_and_index_has_its_own_draws(stream: str) -> None:
    """Not so if the two were only mixed: then the samples of seed 1 are those of seed 0 in another order."""
    draws = {drawn(seed, stream, k) for seed in range(32) for k in range(32)}
    assert len(draws) == 32 * 32
    assert drawn(5, stream, 7) == drawn(5, stream, 7)


def test_named_streams_never_meet() -> None:
    """By name alone; a review listed pairs of numbers that met (calibrate and faithfulness-correlation, …)."""
    names = sorted({name for name, _ in calls_in_source()} - set(NUMBERS))
    assert len({drawn(0, name, k) for name in (*names, "smoothgrad/noise") for k in range(50)}) == 50 * (len(names) + 1)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (("calibrate/token sets", 0), ("faithfulness-correlation/channel values", 0)),
        (("metrics/pixel ties", 0), ("aopc/random order", 0)),
    ],
)
def test_the_pairs_that_met_do_not(first: tuple[str, int], second: tuple[str, int]) -> None:
    assert drawn(3, *first) != drawn(3, *second)
    assert {first[0], second[0]} - set(NUMBERS), "one of the two has a name alone"


def test_numbered_streams_draw_what_they_always_did() -> None:
    """Maps and scores of earlier versions stay: blake2b of "seed number"."""
    for stream, number in NUMBERS.items():
        for index in (0, 3):
            content = f"7 {number + index}".encode()
            old = torch.Generator().manual_seed(int.from_bytes(hashlib.blake2b(content, digest_size=8).digest()))
            assert drawn(7, stream, index) == float(torch.rand((), generator=old, dtype=torch.float64))


def calls_in_source() -> list[tuple[str, str]]:
    """Return the name of the stream of every call that draws, with the file; a call without a literal has ""."""
    position = {"make_generator": 1, "tie_order": 1, "random_sets": 4, "split_off": 3}
    calls = []
    for file in Path(cv.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            name = getattr(node.func, "attr", getattr(node.func, "id", "")) if isinstance(node, ast.Call) else ""
            if name in position and isinstance(node, ast.Call):
                arguments = node.args[position[name] : position[name] + 1]
                literal = isinstance(arguments[0], ast.Constant) if arguments else False
                calls.append((str(arguments[0].value) if literal else "", str(file.name)))  # type: ignore[attr-defined]
    return calls


def test_every_stream_has_a_name_and_one_file_that_draws_from_it() -> None:
    calls = calls_in_source()
    files: dict[str, set[str]] = {}
    for name, file in calls:
        files.setdefault(name, set()).add(file)
    assert files.pop("") == {"_rng.py", "context.py", "split.py", "figures.py"}, (
        "those that pass a stream on, or name one by a figure's number"
    )
    assert {name: of for name, of in files.items() if len(of) > 1} == {}
    # Three former pairs drew from numbers; these have names alone now. A new stream belongs here, not in NUMBERS.
    by_name = {"infidelity/blocks", "irof/ties", "aopc/random order", "naopc/ties", "f-fidelity/sets"}
    by_name |= {"refine/sets", "refine/draws", "papers/validation", "papers/training"}
    by_name |= {"expect/random patches", "mistakes/random patches"}
    assert set(files) - set(NUMBERS) == by_name
    assert set(NUMBERS) - set(files) == {"metrics/ties", "benchmarks/shuffled maps"}  # a default, and outside src


def test_an_image_is_known_in_any_batch_and_precision() -> None:
    images = torch.randn(3, 3, 8, 12, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    marks = image_seeds(images, 0)
    assert len(set(marks)) == 3
    assert [image_seeds(image[None], 0)[0] for image in images] == marks
    assert image_seeds(images.flip(0), 0) == marks[::-1]
    assert image_seeds(images.bfloat16(), 0) == image_seeds(images.double(), 0) == marks
    assert image_seeds(images.to(memory_format=torch.channels_last), 0) == marks
    assert image_seeds(images[:, :, ::2, ::2], 0) == image_seeds(images[:, :, ::2, ::2].contiguous(), 0)
    assert not set(image_seeds(images, 1)) & set(marks)


def test_one_pixel_elsewhere_is_another_image() -> None:
    image = torch.zeros(1, 3, 8, 8)
    moved = []
    for place in range(64):
        changed = image.clone()
        changed[0, 0].view(-1)[place] = 1
        moved += image_seeds(changed, 0)
    assert len(set(moved)) == 64


@pytest.mark.parametrize("seed", ["x", 1.5, None, True])
def test_a_seed_is_a_whole_number(seed: Any) -> None:
    model, image = cv.load("pets"), torch.zeros(1, 3, 224, 224)
    verbs: list[Callable[[], object]] = [
        lambda: cv.explain(model, image, "ixg", seed=seed),
        lambda: cv.compare(model, image, ["ixg"], seed=seed),
        lambda: cv.evaluate(model, image, "ixg", "sparseness", seed=seed),
        lambda: cv.choose(model, image, ["ixg"], seed=seed),
    ]
    for verb in verbs:
        with pytest.raises(BadInput, match=r"seed=.* expected a whole number, such as 0"):
            verb()
    assert check_seed(np.int64(7)) == 7
