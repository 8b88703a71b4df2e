"""Explanations are read back from .npz files as they were saved, and nothing in a file is unpickled."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import clairvit as cv
from clairvit._io import dumps_json, parse_json
from clairvit.errors import BadInput
from clairvit.models.state_hash import WeightsHash
from helpers.families import videomae
from helpers.tiny_models import double, pixels, wrapped
from helpers.vision_language import SIDE, images, model_text, tiny_language_model
from plotting.fakes import fake

LOST = {"origin"}  # the model and the user's targets are no values


def classifier(**options: Any) -> cv.Explanation:
    return cv.explain(wrapped("timm-vit"), pixels("timm-vit", batch=3), target=[1, 4, 6], **options)


def in_float64() -> cv.Explanation:
    return cv.explain(*double("timm-vit"), "genatt", target=1, layers=True)


def in_bfloat16() -> cv.Explanation:
    whole = classifier(method="rollout")
    return replace(whole, pixels=whole.pixels.bfloat16(), logits=whole.logits.bfloat16())


def of_text() -> cv.Explanation:
    module = tiny_language_model("llava")
    model, inputs = cv.wrap(module, size=SIDE, mean=0.5, std=0.5), model_text("llava", [1, 3], [4, 11, 12, 14])
    return cv.explain(model, images(2), "decompx", cv.NextToken(token=9), inputs=inputs)


def of_a_clip() -> cv.Explanation:
    model, clip = videomae()
    return cv.explain(model, clip, "saliency", target=1)


def with_regions() -> cv.Explanation:
    whole = classifier(method="saliency")
    return replace(whole, regions=torch.rand(3, *whole.pixels.shape[-2:]) > 0.5, classes=(None, 1, None))


def joined_from_two_outputs() -> cv.Explanation:
    """NaN where an output has fewer columns, and no probability."""
    whole = classifier(method="saliency")
    wide = replace(whole, logits=torch.cat([whole.logits, whole.logits], 1), labels=())
    return cv.Explanation.concat([replace(whole, labels=("a",)), wide])


KINDS: dict[str, Callable[[], cv.Explanation]] = {
    "layers": lambda: classifier(method="genatt", layers=True),
    "heads": lambda: classifier(method="rollout", by_head=True),
    "chosen patches": lambda: replace(classifier(method="saliency"), chosen=torch.rand(3, 4, 4) > 0.5),
    "standard error": lambda: classifier(method="rise(samples=16)"),
    "check": lambda: classifier(method="genatt").with_check(),
    "chunks": lambda: classifier(method="genatt", batch_size=1),
    "contrast": lambda: cv.explain(wrapped("timm-vit"), pixels("timm-vit"), "ixg", target=cv.Contrast(1, 2)),
    "class-agnostic": lambda: cv.explain(wrapped("timm-vit"), pixels("timm-vit"), "raw-attention"),
    "made by hand": lambda: fake(2, targets=["Bengal", "Bengal − Egyptian Mau"], names=["=1+1", "\udcff.jpg"]),
    "float64": in_float64,
    "bfloat16": in_bfloat16,
    "text": of_text,
    "clip": of_a_clip,
    "regions": with_regions,
    "two outputs": joined_from_two_outputs,
}


@pytest.fixture(scope="module", params=KINDS)
def explanation(request: pytest.FixtureRequest) -> cv.Explanation:
    return KINDS[request.param]()


def assert_equal(value: Any, other: Any, place: str) -> None:
    """Compare bit by bit; NaN equals NaN, and types are equal too."""
    assert type(value) is type(other), place
    if isinstance(value, WeightsHash):  # hashes that are not known are not equal
        assert value.value == other.value, place
    elif is_dataclass(value):
        for entry in fields(value):
            if entry.name not in LOST:
                assert_equal(getattr(value, entry.name), getattr(other, entry.name), f"{place}.{entry.name}")
    elif isinstance(value, Tensor):
        assert (value.dtype, value.device) == (other.dtype, other.device), place
        assert torch.equal(value.nan_to_num(nan=12345), other.nan_to_num(nan=12345)), place
    elif isinstance(value, tuple):
        assert len(value) == len(other), place
        for index, pair in enumerate(zip(value, other, strict=True)):
            assert_equal(*pair, f"{place}[{index}]")
    else:
        assert value == other, place


def test_what_is_read_is_what_was_saved(explanation: cv.Explanation, tmp_path: Path) -> None:
    loaded = cv.Explanation.load(explanation.save(tmp_path / "maps.npz"))
    assert_equal(loaded, explanation, "explanation")
    assert loaded.origin is None
    assert loaded.class_scores == explanation.class_scores or explanation.logits.isnan().any()
    again = cv.Explanation.load(loaded.save(tmp_path / "again.npz"))
    assert_equal(again, loaded, "again")


def test_what_is_read_can_be_drawn_indexed_and_joined(explanation: cv.Explanation, tmp_path: Path) -> None:
    loaded = cv.Explanation.load(explanation.save(tmp_path / "maps.npz"))
    assert loaded.save(tmp_path / "maps.png").exists()
    assert_equal(cv.Explanation.concat(list(loaded)), loaded, "joined")


def test_what_is_read_is_checked_with_the_model(tmp_path: Path) -> None:
    model = wrapped("timm-vit")
    explanation = cv.explain(model, pixels("timm-vit", batch=2), "genatt", target=[1, 4])
    loaded = cv.Explanation.load(explanation.save(tmp_path / "maps.npz"))
    with pytest.raises(BadInput, match=r"holds no model; expected the model that was explained: ex\.check\(model\)"):
        loaded.check()
    assert loaded.check(model).checks == explanation.check().checks
    with pytest.raises(BadInput, match="weights"):
        loaded.check(wrapped("timm-vit-qk-norm-explicit"))


def test_a_comparison_is_read_back_with_its_methods(tmp_path: Path) -> None:
    many = cv.compare(wrapped("timm-vit"), pixels("timm-vit", batch=2), ["rollout", "genatt+skipplus"])
    many.skipped["gradcam"] = "it does not fit"
    path = many.save(tmp_path / "many.npz")
    loaded = cv.Comparison.load(path)
    assert list(loaded) == list(many)
    for method in many:
        assert_equal(loaded[method], many[method], method)
    assert (loaded.skipped, loaded.cost) == (many.skipped, many.cost)
    with np.load(path) as arrays:
        assert sum(name.endswith("pixels") for name in arrays) == 1, "methods share the pixels"
    with pytest.raises(BadInput, match=r"2 methods \(rollout, genatt\+skipplus\).*cv\.Comparison\.load"):
        cv.Explanation.load(path)
    with pytest.raises(BadInput, match=r"one method.*cv\.Explanation\.load"):
        cv.Comparison.load(many["rollout"].save(tmp_path / "one.npz"))


def changed(path: Path, **arrays: Any) -> Path:
    """Write a copy of a file with other arrays; None leaves one out."""
    with np.load(path) as stored:
        content = dict(stored) | arrays
    buffer = io.BytesIO()
    np.savez(buffer, **{name: array for name, array in content.items() if array is not None})
    copy = path.with_name("changed.npz")
    copy.write_bytes(buffer.getvalue())
    return copy


def about_with(path: Path, **values: Any) -> Any:
    with np.load(path) as stored:
        about = parse_json(str(stored["about"])) | values
    return np.array(dumps_json({name: value for name, value in about.items() if value != "left out"}))


def test_a_file_of_an_earlier_version_is_refused_in_a_sentence(tmp_path: Path) -> None:
    path = fake().save(tmp_path / "maps.npz")
    old = changed(path, about=about_with(path, format="left out", labels="left out"), pixels=None)
    with pytest.raises(
        BadInput, match=r"another version of ClairViT \(0\).*Explain the images again, or .*numpy\.load"
    ):
        cv.Explanation.load(old)


def test_damaged_files_are_refused_in_a_sentence(tmp_path: Path) -> None:
    path = fake(2).save(tmp_path / "maps.npz")
    for arrays, message in (
        ({"about": None}, "holds no explanation"),
        ({"maps": None}, r"is no \.npz file of an explanation"),
        ({"pixels": None}, r"is no \.npz file of an explanation"),
        ({"about": np.array("{")}, r"is no \.npz file of an explanation"),
        ({"about": np.array("[]")}, "no table of values"),
        ({"about": about_with(path, cost=3)}, r"is no \.npz file of an explanation"),
        ({"about": about_with(path, targets="left out")}, r"is no \.npz file of an explanation"),
        ({"about": about_with(path, targets=["cat"])}, r"is damaged: its fields are of \[1, 2\] maps"),
        ({"maps": np.zeros((3, 4, 4), np.float32)}, r"is damaged: its fields are of \[2, 3\] maps"),
    ):
        with pytest.raises(BadInput, match=message):
            cv.Explanation.load(changed(path, **arrays))
    for content in (b"", b"meow", path.read_bytes()[:-20], path.read_bytes()[:300]):
        (tmp_path / "broken.npz").write_bytes(content)
        with pytest.raises(BadInput, match=r"is no \.npz file of an explanation"):
            cv.Explanation.load(tmp_path / "broken.npz")
    np.save(tmp_path / "array.npy", np.zeros(3))
    with pytest.raises(BadInput, match=r"is no \.npz file of an explanation"):
        cv.Explanation.load(tmp_path / "array.npy")
    with pytest.raises(BadInput, match=r"missing\.npz' cannot be read \(No such file"):
        cv.Explanation.load(tmp_path / "missing.npz")


class Trap:
    """An object that leaves a trace where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    mark = tmp_path / "unpickled"
    path = changed(fake().save(tmp_path / "maps.npz"), extra=np.array([Trap(mark)], dtype=object))
    with pytest.raises(BadInput, match=r"is no \.npz file of an explanation"):
        cv.Explanation.load(path)
    (tmp_path / "trap.npz").write_bytes(pickle.dumps(Trap(mark)))
    with pytest.raises(BadInput, match=r"is no \.npz file of an explanation"):
        cv.Explanation.load(tmp_path / "trap.npz")
    assert not mark.exists()
