"""A transformers pipeline goes into wrap and the verbs as it is: its model, its image processor, its labels."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

import clairvit as cv
from helpers.rounding import assert_same, growth

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def pipe() -> object:
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48, image_size=32, patch_size=8
    )
    config.id2label = {0: "ant", 1: "bee", 2: "cat"}
    net = transformers.ViTForImageClassification(config).eval()
    torch.nn.init.normal_(net.classifier.weight)
    processor = transformers.ViTImageProcessor(
        size={"height": 32, "width": 32}, image_mean=[0.1, 0.2, 0.3], image_std=[0.5, 0.6, 0.7]
    )
    return transformers.pipeline("image-classification", model=net, image_processor=processor, device="cpu")


@pytest.fixture
def photo() -> Image.Image:
    """An image of the model's size, so that no resampling differs."""
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8))


def test_a_wrapped_pipeline_answers_as_the_pipeline(pipe: object, photo: Image.Image) -> None:
    model = cv.wrap(pipe)
    assert model.labels == ("ant", "bee", "cat")
    assert model.preprocess.mean == pytest.approx((0.1, 0.2, 0.3))
    assert not model.assumptions, "the processor states everything"
    explanation = cv.explain(model, photo, "ixg")
    answers = {entry["label"]: entry["score"] for entry in pipe(photo)}  # type: ignore[operator]
    probabilities = explanation.logits.softmax(-1)[0].double()
    expected = torch.tensor([answers[label] for label in model.labels], dtype=torch.float64)
    assert_same(probabilities, expected, growth=growth(depth=8, width=48), dtype=torch.float32)
    assert explanation.targets[0] == max(answers, key=answers.__getitem__)


def test_verbs_take_a_pipeline_without_a_warning(pipe: object, photo: Image.Image) -> None:
    assert cv.explain(pipe, photo, "genatt").maps.shape == (1, 4, 4)


def test_what_the_user_states_overrules_the_processor(pipe: object) -> None:
    assert cv.wrap(pipe, mean=0.5).preprocess.mean == (0.5, 0.5, 0.5)


def test_a_pipeline_of_text_is_refused(pipe: object) -> None:
    class TextPipeline(type(pipe)):  # type: ignore[misc]
        def __init__(self) -> None:
            self.model = pipe.model  # type: ignore[attr-defined]
            self.image_processor = None

    with pytest.raises(cv.errors.BadInput, match="wrap got a TextPipeline without an image processor"):
        cv.wrap(TextPipeline())
