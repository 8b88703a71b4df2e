"""Further inputs with a row per image: every verb gives each image what it gets when it is explained alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import clairvit as cv
from clairvit.errors import BadInput
from helpers.custom_vits import CLASSES, WIDTH, Block, FusedAttention, HomeMade

COUNT = 4  # images


class Aged(HomeMade):
    """A ViT whose patch tokens are scaled by a second input, so that another row gives another map."""

    def __init__(self) -> None:
        super().__init__(lambda: Block(FusedAttention))
        self.of_age = nn.Linear(1, WIDTH)

    def forward(self, image: Tensor, age: Tensor, scale: float = 1.0) -> Tensor:
        tokens = self.tokens(image) * (1 + scale * self.of_age(age)[:, None])
        for block in self.blocks:
            tokens = block(tokens)
        return self.head(self.norm(tokens)[:, 0])


@pytest.fixture(scope="module")
def model() -> cv.Model:
    torch.manual_seed(0)
    module = Aged().eval().double()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return cv.wrap(module, mean=0.5, std=0.5, size=32, labels=[f"name {i}" for i in range(CLASSES)])


PIXELS = torch.randn(COUNT, 3, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
AGES = torch.tensor([[-2.0], [0.0], [1.0], [3.0]], dtype=torch.float64)
METHODS = ("attnlrp+plus", "rollout", "genatt", "gradcam", "leave-one-out", "rise(samples=6)", "lime(samples=20)")


def alone(model: cv.Model, row: int) -> dict[str, Any]:
    return {"model": model, "images": PIXELS[row : row + 1], "inputs": {"age": AGES[row : row + 1]}}


@pytest.mark.parametrize("method", [*METHODS, None])
def test_maps_are_those_of_each_image_alone(model: cv.Model, method: str | None) -> None:
    together = cv.explain(model, PIXELS, method, inputs={"age": AGES})
    assert together.names == ("image 1", "image 2", "image 3", "image 4")
    for row in range(COUNT):
        single = cv.explain(**alone(model, row), method=method)
        assert torch.equal(together.maps[row], single.maps[0])
        assert torch.equal(together.logits[row], single.logits[0])
        assert together.targets[row] == single.targets[0]
    shared = cv.explain(model, PIXELS, method, inputs={"age": AGES[:1]})
    assert not torch.equal(shared.logits[1:], together.logits[1:]), "the rows matter"


def test_the_batch_gives_the_scores_that_the_module_gives(model: cv.Model) -> None:
    together = cv.explain(model, PIXELS, "ixg", inputs={"age": AGES})
    torch.testing.assert_close(together.logits, model.module(PIXELS, AGES).detach(), rtol=1e-10, atol=1e-12)


def test_targets_of_images_and_several_targets_keep_their_rows(model: cv.Model) -> None:
    listed = cv.explain(model, PIXELS, "ixg", target=[0, 1, 2, 3], inputs={"age": AGES})
    several = cv.explain(model, PIXELS, "ixg", targets=[2, lambda scores: scores[:, 0]], inputs={"age": AGES})
    for row in range(COUNT):
        assert torch.equal(listed.maps[row], cv.explain(**alone(model, row), method="ixg", target=row).maps[0])
        for index, target in enumerate((2, 0)):
            single = cv.explain(**alone(model, row), method="ixg", target=target)
            assert torch.equal(several.maps[index * COUNT + row], single.maps[0])


@pytest.mark.parametrize("kind", ["pairs", "generator", "loader"])
def test_data_sets_go_row_by_row(model: cv.Model, kind: str) -> None:
    pairs = [(image, 1) for image in PIXELS]
    images = {"pairs": pairs, "generator": iter(pairs), "loader": torch.utils.data.DataLoader(pairs, batch_size=3)}
    maps = cv.explain(model, images[kind], "genatt", inputs={"age": AGES}).maps
    assert torch.equal(maps, cv.explain(model, PIXELS, "genatt", inputs={"age": AGES}).maps)


def test_processors_output_may_hold_rows(model: cv.Model) -> None:
    module = model.module
    images = {"pixel_values": PIXELS, "age": AGES}
    assert torch.equal(
        cv.explain(cv.wrap(module, size=32), images, "genatt").maps,
        cv.explain(model, PIXELS, "genatt", inputs={"age": AGES}).maps,
    )


def test_compare_evaluate_choose_and_check_use_the_rows(model: cv.Model) -> None:
    rows = {"age": AGES}
    explanations = cv.compare(model, PIXELS, ["genatt", "rollout"], inputs=rows)
    scores = cv.evaluate(model, PIXELS, "genatt", "deletion(steps=3)", inputs=rows)
    chosen = cv.choose(model, PIXELS, ["genatt", "rollout"], ["deletion(steps=3)"], inputs=rows)
    checked = explanations["genatt"].check()
    given = cv.check_maps(model, PIXELS, explanations["genatt"].maps, method="genatt", inputs=rows)
    assert torch.equal(chosen.scores["genatt", "deletion(steps=3)"].values, scores.values)
    for row in range(COUNT):
        single = cv.explain(**alone(model, row), method="genatt")
        assert torch.equal(explanations["genatt"].maps[row], single.maps[0])
        assert (
            scores.values[row] == cv.evaluate(**alone(model, row), methods="genatt", metrics="deletion(steps=3)").values
        )
        assert checked[row].verdict == given[row].verdict == single.check().verdict
        assert str(checked[row]).removeprefix(f"image {row + 1}: ") == str(single.check())


def test_a_check_of_some_maps_takes_the_rows_of_these(model: cv.Model) -> None:
    explanation = cv.explain(model, PIXELS, "genatt", inputs={"age": AGES})
    picked = explanation[[3, 1]]
    for target in (None, 2):
        for position, row in enumerate((3, 1)):
            expected = cv.explain(**alone(model, row), method="genatt").check(target=target)
            assert str(picked.check(target=target)[position]) == str(expected)


def test_the_doctor_takes_inputs(model: cv.Model) -> None:
    assert cv.doctor(model, PIXELS)["forward"].finding.startswith("Aged needs 'age' besides the image")
    for ages in (AGES, AGES[:1]):
        diagnosis = cv.doctor(model, PIXELS, inputs={"age": ages})
        assert diagnosis.ok
        assert diagnosis.images == ("image 1", "image 2", "image 3", "image 4")


def test_rows_of_another_number_are_refused_by_name(model: cv.Model) -> None:
    refusal = r"'age' has shape \[3, 1\], and there are 4 images; expected one row .* or one for each, \[4, …\]"
    inputs = {"age": AGES[:3]}
    verbs: tuple[Callable[[], object], ...] = (
        lambda: cv.explain(model, PIXELS, inputs=inputs),
        lambda: cv.compare(model, PIXELS, inputs=inputs),
        lambda: cv.evaluate(model, PIXELS, "genatt", inputs=inputs),
        lambda: cv.choose(model, PIXELS, ["genatt"], inputs=inputs),
        lambda: cv.check_maps(model, PIXELS, torch.ones(COUNT, 4, 4), inputs=inputs),
        lambda: cv.doctor(model, PIXELS, inputs=inputs),
        lambda: cv.explain(model, [(image, 1) for image in PIXELS], inputs=inputs),
    )
    for verb in verbs:
        with pytest.raises(BadInput, match=refusal):
            verb()
    with pytest.raises(BadInput, match="'age' has 3 rows and 'scale' has 2 rows"):
        model.with_inputs(age=AGES[:3], scale=torch.ones(2))


def test_what_runs_all_images_at_once_refuses_rows(model: cv.Model) -> None:
    bound = model.with_inputs(age=AGES)
    for verb in (lambda: cv.trace(bound, PIXELS), lambda: bound.logits(PIXELS), lambda: bound.logits(PIXELS[:1])):
        with pytest.raises(BadInput, match="'age' has 4 rows, one for each image"):
            verb()
    trace = cv.trace(model.with_inputs(age=AGES[2:3]), PIXELS[2:3], target=1)
    assert torch.equal(trace.logits, cv.explain(model, PIXELS, "ixg", inputs={"age": AGES}).logits[2:3])
