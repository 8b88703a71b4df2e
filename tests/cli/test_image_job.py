from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from clairvit.cli.image_job import (
    Failure,
    ImageResult,
    OutputPath,
    explain_or_split,
    file_stems,
    output_path,
    safe_file_name,
)
from clairvit.errors import BadInput, ClairError, UnknownName
from clairvit.methods.explanation import concat
from clairvit.models.images import Batch
from clairvit.models.model import Model
from plotting.fakes import fake

MODEL = Model(nn.Identity(), "none")


def ready(*names: str) -> Batch:
    """Return a batch of grey images: of shade 0, 1, …"""
    shades = torch.arange(float(len(names)))
    return Batch(shades[:, None, None, None].expand(-1, 3, 64, 64), names)


def sound(model: Model, batch: Batch, target: Any) -> dict[str, Any]:
    return {"legrad": fake(len(batch), names=batch.names)}


def test_every_image_gets_its_own_part_and_name() -> None:
    results = explain_or_split(MODEL, ready("a.jpg", "b.jpg"), [], sound, any_succeeded=False)
    assert [outcome.image for outcome in results] == ["a.jpg", "b.jpg"]
    assert isinstance(results[1], ImageResult)
    assert results[1].explanations["legrad"].names == ("b.jpg",)
    assert len(results[1].explanations["legrad"]) == 1


def test_an_image_that_breaks_its_batch_is_left_out_alone() -> None:
    def fussy(model: Model, batch: Batch, target: Any) -> dict[str, Any]:
        if (batch.pixels == 1).any():
            raise ClairError("NaN came out.")
        return sound(model, batch, target)

    outcomes = explain_or_split(MODEL, ready("a", "b", "c"), [], fussy, any_succeeded=False)
    assert [type(outcome) for outcome in outcomes] == [ImageResult, Failure, ImageResult]
    assert outcomes[1] == Failure("b", "NaN came out.")


def test_a_request_that_never_works_is_one_error_not_a_list_of_failures() -> None:
    calls = []

    def wrong(model: Model, batch: Batch, target: Any) -> dict[str, Any]:
        calls.append(len(batch))
        raise UnknownName("There is no class 'Cow'.")

    with pytest.raises(UnknownName, match="Cow"):
        explain_or_split(MODEL, ready("a", "b"), ["Cow"], wrong, any_succeeded=False)
    assert calls == [2, 1, 1]
    assert len(explain_or_split(MODEL, ready("a", "b"), ["Cow"], wrong, any_succeeded=True)) == 2


def test_several_targets_stay_together() -> None:
    def two(model: Model, batch: Batch, target: Any) -> dict[str, Any]:
        assert target == ["Bengal", "Egyptian Mau"]
        assert batch.single
        return {"legrad": fake(2, targets=target, names=batch.names * 2)}

    (result,) = explain_or_split(MODEL, ready("a"), ["Bengal", "Egyptian Mau"], two, any_succeeded=False)
    assert isinstance(result, ImageResult)
    assert result.explanations["legrad"].names == ("a", "a")


def test_parts_and_wholes() -> None:
    whole = fake(3, layers=2, names=["a", "b", "c"])
    back = concat([whole[0], whole[1:]])
    assert back.names == whole.names
    assert torch.equal(back.maps, whole.maps)
    assert back.layers is not None
    assert back.layers.shape == (2, 3, 4, 4)
    assert back.cost == whole.cost, "one batch was paid once"
    assert concat([fake(), fake()]).cost.seconds == 2 * whole.cost.seconds
    with pytest.raises(BadInput, match="same method"):
        concat([fake(), fake(method="rollout")])


def test_a_suffix_makes_a_file_and_anything_else_a_folder(tmp_path: Path) -> None:
    (tmp_path / "v1.2").mkdir()
    assert output_path("cat.PDF").is_file
    for folder in ("out", "out/", "maps.v2/", str(tmp_path / "v1.2")):
        assert not output_path(folder).is_file
    with pytest.raises(BadInput, match=r"ends in '\.bmp'; write to a name that ends in"):
        output_path("cat.bmp")


def test_results_are_not_written_to_urls() -> None:
    with pytest.raises(BadInput, match=r"--out 's3://bucket/maps/' is a URL.*disk of this machine"):
        output_path("s3://bucket/maps/")


def test_images_with_the_same_name_do_not_overwrite_each_other() -> None:
    assert list(file_stems(["a/cat.jpg", "b/Cat.png", "cat-2.jpg", "demo"]).values()) == [
        "cat",
        "Cat-2",
        "cat-2-2",
        "demo",
    ]


@pytest.mark.parametrize(("out", "reason"), [("", "--out is empty"), ("x" * 300 + ".png", "File name too long")])
def test_outputs_that_cannot_be_written_are_refused(out: str, reason: str) -> None:
    with pytest.raises(BadInput, match=reason):
        output_path(out)


def test_long_names_are_shortened_and_stay_apart(tmp_path: Path) -> None:
    out = OutputPath(tmp_path, is_file=False)
    stems = ["é" * 120 + f"{number}-ensemble(rollout,genatt)" for number in range(3)] + [
        "x" * 255,
        "x" * 254 + "y",
        "cat",
    ]
    files = [file for stem in stems for file in out.files(stem)]
    for file in files:
        file.with_stem(f"{file.stem}-features-12").touch()  # the longest that is made of one
        file.touch()
    assert len(set(files)) == 3 * len(stems)
    assert files[-3:] == [tmp_path / "cat.png", tmp_path / "cat.json", tmp_path / "cat.npz"]


def test_methods_become_file_names() -> None:
    assert safe_file_name("rollout(fusion=max)+skipplus") == "rollout_fusion=max_+skipplus"
    assert safe_file_name("genatt+from:6") == "genatt+from_6"
