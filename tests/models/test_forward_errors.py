"""Errors of models that cannot be run and arguments that cannot be used: the true reason, and what to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import timm
import torch
import transformers as hf
from torch import Tensor, nn

import clairvit as cv
from clairvit.errors import BadInput, NotApplicable, UnknownName, WrongType
from helpers.custom_vits import Block, FusedAttention, HomeMade

PIXELS = torch.randn(1, 3, 32, 32)


def vit() -> HomeMade:
    torch.manual_seed(0)
    return HomeMade(lambda: Block(FusedAttention)).eval()


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.vit = vit()

    def forward(self, image: Tensor, age: Tensor, sex: Tensor, scale: float = 1.0) -> Tensor:
        return self.vit(image) * age * sex * scale


class SizesOfImages(TwoInputs):
    def forward(self, pixel_values: Tensor, image_sizes: Tensor | None = None) -> Tensor:  # type: ignore[override]
        return self.vit(pixel_values) * image_sizes.sum()


Verb = Callable[[cv.Model], object]
VERBS: tuple[Verb, ...] = (
    lambda model: cv.explain(model, PIXELS),
    lambda model: cv.compare(model, PIXELS, ["rollout"]),
    lambda model: cv.evaluate(model, PIXELS, "saliency"),
    lambda model: cv.trace(model, PIXELS),
)


@pytest.mark.parametrize("verb", VERBS)
def test_a_missing_input_is_named(verb: Verb) -> None:
    model = cv.wrap(TwoInputs(), size=32)
    with pytest.raises(
        BadInput, match=r"needs 'age' and 'sex' besides the image.*inputs=\{'age': …, 'sex': …\}"
    ) as error:
        verb(model)
    assert "32 × 32" not in str(error.value)
    with pytest.raises(BadInput, match=r"needs 'sex' besides the image, and it was not given.*inputs=\{'sex': …\}"):
        verb(model.with_inputs(age=torch.ones(1, 1)))
    verb(model.with_inputs(age=torch.ones(1, 1), sex=torch.ones(1, 1)))


def test_an_input_left_at_none_is_named() -> None:
    with pytest.raises(BadInput, match=r"NoneType.*also takes 'image_sizes'.*inputs=\{'image_sizes': …\}"):
        cv.explain(cv.wrap(SizesOfImages(), size=32), PIXELS)


def test_a_wrong_size_is_still_a_size() -> None:
    with pytest.raises(BadInput, match=r"failed on an image of 40 × 40 pixels .*cv\.wrap\(…, size=\)"):
        cv.explain(cv.wrap(vit(), size=32), torch.randn(1, 3, 40, 40))


def test_the_doctor_names_the_input_and_prints_one_line_for_what_it_did_not_run() -> None:
    diagnosis = cv.doctor(cv.wrap(TwoInputs(), size=32), PIXELS)
    assert diagnosis["forward"].finding.startswith("TwoInputs needs 'age' and 'sex' besides the image")
    skipped = [check for check in diagnosis.checks if check.status == "skip"]
    assert len(skipped) > 10
    lines = [line for line in str(diagnosis).splitlines() if line.startswith("skip")]
    (line,) = lines
    assert line.startswith(f"skip  {len(skipped)} others")
    assert all(check.name in " ".join(str(diagnosis).split()) for check in skipped)


def test_a_module_compiled_in_place_is_refused_by_every_verb_without_a_pass() -> None:
    calls: list[object] = []
    for part in ("", "blocks.1"):
        module = vit()
        module.register_forward_pre_hook(lambda *_: calls.append(None))
        model = cv.wrap(module, size=32)
        cv.explain(model, PIXELS, "rollout")
        before = len(calls)
        module.get_submodule(part).compile()
        for verb in (*VERBS, lambda model: cv.check_maps(model, PIXELS, torch.ones(1, 4, 4))):
            with pytest.raises(BadInput, match=r"compiled in place .* cannot be traced. Build the model again without"):
                verb(model)
        assert len(calls) == before
        assert "compiled in place" in cv.doctor(model, PIXELS)["compile"].finding


def test_swapped_arguments_are_recognised() -> None:
    module = vit()
    for model in (module, cv.wrap(module, size=32), nn.Sequential(module)):
        for images in ("photo.jpg", PIXELS):
            for verb in (cv.explain, cv.compare, lambda *both: cv.evaluate(*both, "rollout"), cv.doctor):
                with pytest.raises(WrongType, match=r"The images are a \w+; expected the model first, then the images"):
                    verb(images, model)


def test_a_misspelt_folder_is_a_folder(tmp_path: Path) -> None:
    (tmp_path / "pugs").mkdir()
    with pytest.raises(BadInput, match=r"no image or folder '.*pugz'. Did you mean 'pugs'\? .*a folder with images"):
        cv.explain(cv.wrap(vit(), size=32), str(tmp_path / "pugz"))


def test_an_unknown_class_names_where_the_names_are() -> None:
    model = cv.wrap(vit(), size=32, labels=[f"breed {i}" for i in range(7)])
    with pytest.raises(UnknownName, match=r"no class 'Tiger'.*`clairvit classes` and `model\.labels` list the names"):
        cv.explain(model, PIXELS, target="Tiger")


def test_nothing_is_assumed_after_the_readmes_wrap() -> None:
    stated = cv.wrap(vit(), mean=0.5, std=0.5, size=32, labels=[f"breed {i}" for i in range(7)])
    assert stated.assumptions == ()
    assert cv.explain(stated, "demo").notes == ()
    assert cv.doctor(stated)["preprocessing"].status == "pass"
    assert "were assumed" in cv.wrap(vit(), mean=0.5, std=0.5).assumptions[0], "a size was not stated"
    other_head = cv.wrap(timm.create_model("vit_tiny_patch16_224", num_classes=4), mean=0.5, std=0.5)
    assert "resize and interpolation were assumed" in other_head.assumptions[0]


def test_a_softmax_that_nothing_states_is_noted_with_the_preprocessing() -> None:
    note = "A softmax was assumed: one class per image. If several can be right at once, give activation='sigmoid'."
    assert note not in cv.explain(vit(), PIXELS).notes  # nothing was preprocessed
    bare = cv.wrap(vit(), resize=32, size=32)
    assert cv.explain(bare, "demo").notes[-1] == note
    for stated in ({"activation": "sigmoid"}, {"activation": "softmax"}, {"labels": [str(i) for i in range(7)]}):
        assert note not in cv.explain(cv.wrap(vit(), resize=32, size=32, **stated), "demo").notes


@pytest.mark.parametrize(("dtype", "digits"), [(torch.float16, 3), (torch.bfloat16, 2)])
def test_half_precision_is_noted(dtype: torch.dtype, digits: int) -> None:
    model = cv.wrap(vit().to(dtype), mean=0.5, std=0.5, size=32, name="mine")
    (note,) = cv.explain(model, PIXELS.to(dtype), "rollout").notes
    kind = str(dtype).removeprefix("torch.")
    assert note == f"mine runs in {kind}, about {digits} digits: small relevances are rounding noise."
    assert cv.explain(cv.wrap(vit(), mean=0.5, std=0.5, size=32), PIXELS, "rollout").notes == ()


def llama_vision() -> nn.Module:
    vision = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_global_layers": 1,
        "attention_heads": 2,
        "intermediate_size": 40,
        "image_size": 32,
        "patch_size": 8,
        "max_num_tiles": 1,
        "supported_aspect_ratios": [[1, 1]],
        "vision_output_dim": 64,
        "intermediate_layers_indices": [0],
    }
    text = {
        "vocab_size": 99,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "intermediate_size": 40,
        "cross_attention_layers": [1],
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    config = hf.MllamaConfig(vision_config=vision, text_config=text, image_token_index=98)
    return hf.MllamaForConditionalGeneration(config).eval()


def test_llama_vision_is_refused_by_what_it_is() -> None:
    module = llama_vision()
    reason = "reads the image by cross-attention, and puts no image tokens into the sequence of its language model"
    with pytest.raises(NotApplicable, match=reason) as refusal:
        cv.explain(module, PIXELS)
    assert "Name a word" not in str(refusal.value), "that would be refused, too"
    with pytest.raises(NotApplicable, match=reason):
        cv.explain(module, PIXELS, target=cv.NextToken(token=5), inputs={"input_ids": torch.tensor([[98, 3, 4]])})


def segmenter() -> nn.Module:
    torch.manual_seed(0)
    config = hf.EomtConfig(
        hidden_size=24,
        num_hidden_layers=4,
        num_attention_heads=3,
        image_size=32,
        patch_size=8,
        num_queries=6,
        num_blocks=2,
        num_upscale_blocks=1,
        intermediate_size=40,
        num_register_tokens=0,
    )
    return hf.EomtForUniversalSegmentation(config).eval()


def test_a_model_with_attention_gets_no_note_about_having_none() -> None:
    model = cv.wrap(segmenter(), mean=0.5, std=0.5, size=32)
    explanation = cv.explain(model, PIXELS, target=cv.Query(1))
    assert explanation.method == "saliency"
    assert explanation.notes[-1] == "saliency was used: the usual methods for this kind of model do not fit."
    assert not any("ResNet" in note or "no attention:" in note for note in explanation.notes)
    with pytest.raises(NotApplicable, match=r"Layer 2 attends between 23 tokens, others than those"):
        cv.explain(model, PIXELS, "genatt", target=cv.Query(1))
