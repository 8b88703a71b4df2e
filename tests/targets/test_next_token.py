"""cv.NextToken: the word that a vision-language model writes next, by image and text tokens."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from PIL import Image
from tokenizers.processors import TemplateProcessing
from torch import Tensor

import clairvit as cv
from clairvit.models.language import cut_patches
from clairvit.models.readout import readout_text
from clairvit.perturbation.probe import probing
from helpers.covering import covering_array
from helpers.vision_language import (
    FAMILIES,
    GRID,
    IMAGE,
    PROCESSORS,
    PROMPT,
    SIDE,
    WORDS,
    cross_attention_model,
    images,
    llava_processor,
    logit_by_hand,
    model_inputs,
    model_text,
    piece_tokenizer,
    resampled_model,
    saved_llava,
    tiled_model,
    tiny_language_model,
    without_float32,
    word_tokenizer,
)

TOKEN = 9  # "cat"
BEFORE, AFTER = [1, 3], [4, 11, 12, 14]
TOKENS = len(BEFORE) + 16 + len(AFTER)


@pytest.fixture(autouse=True)
def _float64() -> Any:
    with without_float32():
        yield


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def wrapped(module: Any) -> cv.Model:
    return cv.wrap(module, size=SIDE, mean=0.5, std=0.5)


def text_of(family: str) -> dict[str, Tensor]:
    """Return the inputs of a text, as a user passes them."""
    return model_text(family, BEFORE, AFTER)


def model_logits(family: str, module: Any, pixels: Tensor, **changes: Any) -> Tensor:
    """Return the vocabulary's logits after the text, by the module's own forward."""
    return module(**model_inputs(family, pixels), **text_of(family) | changes).logits[:, -1]  # type: ignore[no-any-return]


def traced(family: str, module: Any, pixels: Tensor, rules: str = "plain") -> cv.Trace:
    return cv.trace(wrapped(module), pixels, cv.NextToken(token=TOKEN), rules, inputs=text_of(family))


def relevance(trace: cv.Trace, layer: int = 0) -> Tensor:
    """Return x · dx of each token at a block's input, [B, N]."""
    return (trace.layers[layer].x * trace.layers[layer].dx).sum(-1)


def test_scores_are_the_models_own_logits(family: str) -> None:
    module, pixels = tiny_language_model(family), images(2)
    trace = traced(family, module, pixels)
    expected = torch.cat([model_logits(family, module, pixels[i : i + 1]) for i in range(2)])
    torch.testing.assert_close(trace.logits, expected.detach(), rtol=1e-10, atol=1e-10)
    assert trace.layout == cv.Layout(GRID, len(BEFORE), "token", ((TOKENS - 1, 1.0),), suffix=len(AFTER))
    assert len(trace.layers) == 3  # of the language model; the vision tower has none


def test_gradients_are_those_of_autograd(family: str) -> None:
    """At the pixels, and at the tokens that enter the first block."""
    module, pixels = tiny_language_model(family), images(2)
    trace = traced(family, module, pixels)
    inputs: list[Tensor] = []
    hook = module.get_decoder().layers[0].register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    for image in range(2):
        leaf = pixels[image : image + 1].clone().requires_grad_()
        score = model_logits(family, module, leaf)[0, TOKEN]
        at_pixels, at_tokens = torch.autograd.grad(score, [leaf, inputs[-1]])
        torch.testing.assert_close(trace.dpixels[image : image + 1], at_pixels, rtol=1e-8, atol=1e-12)
        torch.testing.assert_close(trace.layers[0].dx[image : image + 1], at_tokens, rtol=1e-8, atol=1e-12)
    hook.remove()


@pytest.mark.parametrize("rules", ["plain", "linear", "attnlrp"])
@pytest.mark.parametrize("name", ["llava", "paligemma", "qwen2-vl"])  # blocks of Llama, Gemma and Qwen2
def test_rules_hold_in_blocks_of_language_models(name: str, rules: str) -> None:
    """RMSNorm, rotary positions, grouped queries and gated MLPs: against the language model written by hand."""
    module, pixels = tiny_language_model(name), images()
    trace = traced(name, module, pixels, rules)
    embeddings = trace.layers[0].x.clone().requires_grad_()
    allowed = torch.ones(TOKENS, TOKENS, dtype=torch.bool)
    if name != "paligemma":  # whose prompt attends in both directions
        allowed = allowed.tril()
    positions = torch.arange(TOKENS)[None] + int(name == "paligemma")
    if name == "qwen2-vl":
        text = text_of(name)
        positions, _ = module.model.get_rope_index(
            text["input_ids"], text["mm_token_type_ids"], image_grid_thw=torch.tensor([[1, 8, 8]])
        )
    logit = logit_by_hand(module, embeddings, rules, allowed, positions, TOKEN)
    torch.testing.assert_close(logit.detach(), trace.logits[0, TOKEN], rtol=1e-10, atol=1e-10)
    (expected,) = torch.autograd.grad(logit, embeddings)
    torch.testing.assert_close(trace.layers[0].dx, expected, rtol=1e-8, atol=1e-12)


def test_relevance_of_image_and_text_adds_up_to_the_logit(family: str) -> None:
    """Under the linear rules, at the input of every block; without biases nothing is left over."""
    module, pixels = tiny_language_model(family, biases=False), images(2)
    trace = traced(family, module, pixels, "linear")
    for layer in range(len(trace.layers)):
        torch.testing.assert_close(relevance(trace, layer).sum(1), trace.logits[:, TOKEN], rtol=1e-9, atol=1e-11)


def test_maps_and_text_are_the_tokens_of_one_row(family: str) -> None:
    module, pixels = tiny_language_model(family, biases=False), images(2)
    explanation = cv.explain(wrapped(module), pixels, "decompx", cv.NextToken(token=TOKEN), inputs=text_of(family))
    rows = relevance(traced(family, module, pixels, "linear"))
    torch.testing.assert_close(explanation.maps.flatten(1), rows[:, 2:18], rtol=1e-9, atol=1e-12)
    texts = torch.stack([text.values for text in explanation.text_relevance])
    torch.testing.assert_close(texts, torch.cat([rows[:, :2], rows[:, 18:]], 1), rtol=1e-9, atol=1e-12)
    totals = explanation.maps.sum((1, 2)) + texts.sum(1)
    torch.testing.assert_close(totals, explanation.logits[:, TOKEN], rtol=1e-9, atol=1e-11)
    assert [len(text.tokens) for text in explanation.text_relevance] == [6, 6]


METHODS = ["ixg", "attnlrp+plus", "reslrp", "saliency", "rollout", "genatt", "leave-one-out"]


@pytest.mark.parametrize(("method", "family"), covering_array(METHODS, [*FAMILIES], least=3))
def test_methods_of_every_kind_work(family: str, method: str) -> None:
    model, pixels = wrapped(tiny_language_model(family)), images(2)
    explanation = cv.explain(model, pixels, method, cv.NextToken(token=TOKEN), inputs=text_of(family))
    alone = cv.explain(model, pixels[1:], method, cv.NextToken(token=TOKEN), inputs=text_of(family))
    assert explanation.maps.shape == (2, *GRID)
    assert bool(explanation.maps.flatten(1).any(1).all())
    torch.testing.assert_close(explanation.maps[1], alone.maps[0], rtol=1e-7, atol=1e-12)
    assert not any("dropped" in note for note in explanation.notes)


def test_removing_image_tokens_is_masking_their_attention(family: str) -> None:
    """The tokens are left out of the sequence; the others keep their positions."""
    module, pixels = tiny_language_model(family), images()
    trace = traced(family, module, pixels)
    keep = torch.ones(1, 3, 16, dtype=torch.bool)
    keep[0, 0, 3], keep[0, 1, ::2], keep[0, 2, 1:] = False, False, False
    with probing(trace, "token", label="test", forwards=3, seed=0) as probe:
        scores = probe.score_kept(keep)
        assert probe.strategy.mode == "drop"
    for variant in range(3):
        visible = torch.ones(TOKENS, dtype=torch.bool)
        visible[2:18] = keep[0, variant]
        expected = _logits_with_hidden_tokens(family, module, pixels, visible)[0, TOKEN]
        torch.testing.assert_close(scores[0, variant], expected, rtol=1e-9, atol=1e-11)


def _logits_with_hidden_tokens(family: str, module: Any, pixels: Tensor, visible: Tensor) -> Tensor:
    """Return the logits while no token attends to hidden ones, by an attention mask of the blocks."""
    allowed = visible[None].expand(TOKENS, -1)
    if family != "paligemma":
        allowed = allowed.tril()
    allowed = allowed | torch.eye(TOKENS, dtype=torch.bool)  # a hidden token sees itself; no other sees it

    def masked(_: Any, args: Any, kwargs: Any) -> Any:
        return args, {**kwargs, "attention_mask": allowed[None, None]}

    hooks = [layer.register_forward_pre_hook(masked, with_kwargs=True) for layer in module.get_decoder().layers]
    with torch.no_grad():
        logits = model_logits(family, module, pixels)
    for hook in hooks:
        hook.remove()
    return logits


def test_image_tokens_lie_row_by_row(family: str) -> None:
    """With a vision tower that mixes no tokens, a token depends on the pixels of its own cell alone."""
    module = tiny_language_model(family)
    for name, parameter in module.named_parameters():
        if "vis" in name and any(
            part in name for part in ("self_attn.out_proj", "attn.proj", "attention.projection_layer")
        ):
            torch.nn.init.zeros_(parameter)
    model = cv.NextToken(token=TOKEN).readout(wrapped(module).with_inputs(**text_of(family)))
    pixels = images().requires_grad_()
    tokens: list[Tensor] = []
    hook = module.get_decoder().layers[0].register_forward_pre_hook(lambda _, args: tokens.append(args[0]))
    model.logits(pixels)
    hook.remove()
    for index in range(16):
        (gradient,) = torch.autograd.grad(tokens[0][0, 2 + index].sum(), pixels, retain_graph=True)
        cells = gradient[0].abs().sum(0).unfold(0, 8, 8).unfold(1, 8, 8).sum((-2, -1)).flatten()  # [16]
        assert cells.nonzero().flatten().tolist() == [index]


@pytest.mark.parametrize("verb", ["explain", "generate", "refused"])
def test_the_model_is_left_as_it_was(family: str, verb: str) -> None:
    module = tiny_language_model(family).train()
    model_logits(family, module, images())  # transformers' own attributes are set in the first forward
    attributes = {name: dict(vars(part)) for name, part in module.named_modules()}
    state = {name: value.clone() for name, value in module.state_dict().items()}
    generator = torch.random.get_rng_state()
    model = wrapped(module).with_inputs(**text_of(family))
    if verb == "explain":
        cv.explain(model, images(), "attnlrp", cv.NextToken(token=TOKEN))
    elif verb == "generate":
        with suppress(cv.errors.BadInput):  # random weights may answer with an end token
            cv.generate(model, images(), max_tokens=2)
    else:
        single = wrapped(module).with_inputs(input_ids=torch.tensor([[1, IMAGE, 3]]))  # its tokens are counted
        with pytest.raises(cv.errors.NotApplicable):
            cv.explain(single, images(), "cam", cv.NextToken(token=TOKEN))
    assert torch.equal(torch.random.get_rng_state(), generator)
    assert all(torch.equal(value, state[name]) for name, value in module.state_dict().items())
    for name, part in module.named_modules():
        assert vars(part).keys() == attributes[name].keys()
        assert all(vars(part)[key] is value for key, value in attributes[name].items())


def test_patches_are_cut_as_qwens_processor_does() -> None:
    pixels = torch.randint(0, 256, (3, 28, 56), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    processor = transformers.Qwen2VLImageProcessor(patch_size=7, merge_size=2, do_resize=False, do_rescale=False)
    processed = processor(pixels, return_tensors="pt", do_normalize=False)
    assert processed["image_grid_thw"].tolist() == [[1, 4, 8]]
    assert torch.equal(cut_patches(pixels[None].float(), 7, 2, 2), processed["pixel_values"].float())
    with pytest.raises(cv.errors.BadInput, match="28 × 50 pixels was given; expected sides that are multiples of 14"):
        cut_patches(torch.zeros(1, 3, 28, 50), 7, 2, 2)


# Text


def assert_as_processed(model: cv.Model, family: str, photo: Image.Image, text: str) -> cv.Explanation:
    """Explain a word, and compare text, pixels and logits with those of the model's own processor."""
    explanation = cv.explain(model, photo, "attnlrp+plus", cv.NextToken("cat", prompt=PROMPT))
    whole = {"do_image_splitting": False} if family in ("idefics3", "smolvlm") else {}
    encoded = PROCESSORS[family]()(images=[photo], text=[text], return_tensors="pt", **whole)
    ours = model_inputs(family, explanation.pixels)
    # Both processors compute (x / 255 - mean) / std in float32: three roundings each.
    bound = 6 * torch.finfo(torch.float32).eps * float(ours["pixel_values"].abs().max())
    assert float((encoded.pop("pixel_values") - ours["pixel_values"]).abs().max()) <= bound
    others = {name: value for name, value in encoded.items() if name not in ("labels", "pixel_attention_mask", *ours)}
    expected = model.module(**ours, **others).logits[0, -1].detach()
    torch.testing.assert_close(explanation.logits[0], expected, rtol=1e-10, atol=1e-10)
    probability = float(expected.softmax(-1)[TOKEN])
    assert explanation.probabilities[0] == pytest.approx(probability, rel=1e-10)
    assert explanation.targets == ("cat",)
    assert explanation.maps.shape == (1, *GRID)
    return explanation


def test_a_saved_model_is_loaded_with_its_processor(tmp_path: Path) -> None:
    model = cv.load(f"hf:{saved_llava(tmp_path)}", dtype="float64")
    message = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": PROMPT}]}]
    text = llava_processor().apply_chat_template(message, add_generation_prompt=True)
    explanation = assert_as_processed(model, "llava", Image.new("RGB", (40, 30), (200, 30, 60)), text)
    assert explanation.labels[:10] == WORDS[:10]
    assert explanation.text_relevance[0].tokens == ("USER:", *PROMPT.split(), "ASSISTANT:")


def spell_numbers(monkeypatch: pytest.MonkeyPatch, spell: Any) -> None:
    """Take a function for the package num2words, which SmolVLM's processor asks for and needs for videos alone."""
    monkeypatch.setattr("transformers.models.smolvlm.processing_smolvlm.num2words", spell)


@pytest.mark.parametrize("name", ["qwen2-vl", "qwen2.5-vl", "paligemma", "idefics3", "smolvlm"])
def test_prompts_are_those_of_the_models_own_processor(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An image of one colour, which every resize leaves as it is."""
    spell_numbers(monkeypatch, str)
    tiny_language_model(name, torch.float32).save_pretrained(tmp_path)
    PROCESSORS[name]().save_pretrained(tmp_path)
    model = cv.load(f"hf:{tmp_path}", dtype="float64")
    image = "<start><|image_pad|><end>" if name.startswith("qwen") else "<image>"
    photo = Image.new("RGB", (SIDE, SIDE), (200, 30, 60))
    explanation = assert_as_processed(model, name, photo, f"{image}{PROMPT}")
    assert model.preprocess.size == (SIDE, SIDE)
    assert explanation.text_relevance[0].tokens[-6:] == tuple(PROMPT.split())


def test_smolvlm_without_the_package_of_its_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_language_model("smolvlm", torch.float32).save_pretrained(tmp_path)
    spell_numbers(monkeypatch, str)
    PROCESSORS["smolvlm"]().save_pretrained(tmp_path)
    model = cv.load(f"hf:{tmp_path}")
    spell_numbers(monkeypatch, None)
    with pytest.raises(cv.errors.ModelUnavailable, match=r"The processor of .* cannot be used: .*num2words"):
        cv.explain(model, "demo", "ixg", cv.NextToken("cat", prompt=PROMPT))


def test_a_model_that_takes_any_size_is_loaded_for_one(tmp_path: Path) -> None:
    tiny_language_model("qwen2-vl", torch.float32).save_pretrained(tmp_path)
    PROCESSORS["qwen2-vl"]().save_pretrained(tmp_path)
    model = cv.load(f"hf:{tmp_path}", size=(16, 24))
    photo = Image.new("RGB", (90, 60), (10, 200, 60))
    explanation = cv.explain(model, photo, "attnlrp", cv.NextToken("cat", prompt=PROMPT))
    assert explanation.maps.shape == (1, 2, 3)
    assert any("resized to 16 × 24 pixels" in note for note in explanation.notes)


def test_a_template_that_begins_the_text_begins_it_once() -> None:
    processor = llava_processor()
    begin = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", WORDS.index("<bos>"))])
    processor.tokenizer.backend_tokenizer.post_processor = begin
    assert processor.tokenizer("cat")["input_ids"] == [1, TOKEN]
    processor.chat_template = "<bos> " + processor.chat_template
    target = cv.NextToken("cat", prompt=PROMPT, processor=processor)
    explanation = cv.explain(wrapped(tiny_language_model("llava")), images(), "ixg", target)
    assert explanation.text_relevance[0].tokens == ("<bos>", "USER:", *PROMPT.split(), "ASSISTANT:")


def test_errors_of_a_processor_are_translated() -> None:
    processor = llava_processor()
    processor.chat_template = "{{ raise_exception('no images here') }}"
    target = cv.NextToken("cat", prompt=PROMPT, processor=processor)
    with pytest.raises(cv.errors.BadInput, match=r"processor cannot read the prompt .*no images here"):
        cv.explain(wrapped(tiny_language_model("llava")), images(), "ixg", target)


def test_a_prompt_with_a_placeholder_is_taken_word_for_word(tmp_path: Path) -> None:
    model = cv.load(f"hf:{saved_llava(tmp_path)}")
    readout = cv.NextToken("cat", prompt="what <image> is").readout(model)
    assert readout_text(readout.module) == ("what", "is")
    assert readout.layout == cv.Layout(GRID, 1, "token", ((17, 1.0),), suffix=1)


def test_words_of_one_prompt_share_a_readout(tmp_path: Path) -> None:
    model = cv.load(f"hf:{saved_llava(tmp_path)}", dtype="float64")
    first, second = (cv.NextToken(word, prompt=PROMPT) for word in ("cat", "dog"))
    assert first.readout(model) is second.readout(model)
    explanation = cv.explain(model, images(), "ixg", cv.Contrast(first, second))
    both = cv.explain(model, images(), "ixg", targets=[first, second])
    assert explanation.targets == ("cat − dog",)
    torch.testing.assert_close(explanation.maps[0], both.maps[0] - both.maps[1], rtol=1e-9, atol=1e-12)


def test_the_answer_so_far_is_part_of_the_text(family: str) -> None:
    """Teacher forcing: the scores after the answer are those of the module on the longer text."""
    module, pixels = tiny_language_model(family), images()
    target = cv.NextToken(token=TOKEN, answer=(15, 10))
    trace = cv.trace(wrapped(module), pixels, target, inputs=text_of(family))
    longer = model_text(family, BEFORE, [*AFTER, 15, 10], answer=2)
    expected = module(**model_inputs(family, pixels), **longer).logits[:, -1]
    torch.testing.assert_close(trace.logits, expected.detach(), rtol=1e-10, atol=1e-10)
    assert trace.layout.suffix == len(AFTER) + 2


def test_without_a_word_the_models_own_is_explained(family: str) -> None:
    module, pixels = tiny_language_model(family), images(2)
    explanation = cv.explain(wrapped(module), pixels, "ixg", cv.NextToken(), inputs=text_of(family))
    assert explanation.classes == tuple(explanation.logits.argmax(1).tolist())


@pytest.mark.parametrize("name", ["llava", "qwen2-vl", "smolvlm"])
def test_generated_tokens_are_those_of_greedy_decoding(name: str) -> None:
    module, pixels = tiny_language_model(name), images()
    module.generation_config.eos_token_id = None
    inputs = {**model_inputs(name, pixels), **text_of(name)}
    answer = module.generate(**inputs, max_new_tokens=4, min_new_tokens=4, do_sample=False)[0, TOKENS:].tolist()
    if hasattr(module.model, "rope_deltas"):
        module.model.rope_deltas = None
    model = wrapped(module).with_inputs(**text_of(name))
    targets = cv.generate(model, pixels, max_tokens=4)
    assert [target.token for target in targets] == answer
    assert [target.answer for target in targets] == [tuple(answer[:i]) for i in range(4)]
    explanation = cv.explain(model, pixels, "attnlrp", targets=targets)
    assert explanation.maps.shape == (4, *GRID)
    assert [len(text.tokens) for text in explanation.text_relevance] == [6, 7, 8, 9]


def test_an_answer_ends_with_the_models_end_token() -> None:
    module = tiny_language_model("llava")
    model = wrapped(module).with_inputs(**text_of("llava"))
    first, second = cv.generate(model, images(), max_tokens=2)
    module.generation_config.eos_token_id = second.token
    if second.token != first.token:
        assert [target.token for target in cv.generate(model, images(), max_tokens=9)] == [first.token]
    module.generation_config.eos_token_id = [first.token]
    with pytest.raises(cv.errors.BadInput, match="answers nothing"):
        cv.generate(model, images())


def test_text_relevance_is_written_and_drawn(tmp_path: Path) -> None:
    model = cv.load(f"hf:{saved_llava(tmp_path / 'model')}")
    targets = [cv.NextToken(word, prompt=PROMPT) for word in ("cat", "dog")]
    explanation = cv.explain(model, images(dtype=torch.float32), "attnlrp", targets=targets)
    record = json.loads(explanation.save(tmp_path / "a.json").read_text("utf-8"))
    assert record["text_relevance"][1]["tokens"] == ["USER:", *PROMPT.split(), "ASSISTANT:"]
    assert record["text_relevance"][1]["values"] == explanation.text_relevance[1].values.tolist()
    figure = explanation.save(tmp_path / "a.svg").read_text("utf-8")
    without = cv.explain(model, images(dtype=torch.float32), "saliency", targets=targets)
    assert without.text_relevance == ()
    assert figure.count("ASSISTANT:") == 2
    assert "ASSISTANT:" not in without.save(tmp_path / "b.svg").read_text("utf-8")
    assert explanation[1].text_relevance == explanation.text_relevance[1:]


# Errors


@pytest.mark.parametrize(
    ("target", "error", "message"),
    [
        ({"word": "catdog"}, cv.errors.BadInput, "'catdog' is 2 tokens of this model: 'cat', '##dog'; expected one"),
        ({"word": "zebra"}, cv.errors.UnknownName, "no token for 'zebra'"),
        ({"token": 99}, cv.errors.BadInput, "There is no token 99: the model has 40 tokens"),
        ({"word": "cat", "prompt": None}, cv.errors.BadInput, "has no prompt, and the model no input_ids"),
        ({"word": "cat", "prompt": "<image> and <image>"}, cv.errors.BadInput, "image placeholders at several places"),
    ],
)
def test_targets_that_cannot_be_used_are_refused(target: dict[str, Any], error: Any, message: str) -> None:
    model = wrapped(tiny_language_model("llava"))
    chosen = cv.NextToken(**{"prompt": PROMPT, "processor": piece_tokenizer(), **target})
    with pytest.raises(error, match=message):
        cv.explain(model, images(), "ixg", chosen)


def test_text_inputs_that_cannot_be_used_are_refused() -> None:
    model, pixels = wrapped(tiny_language_model("llava")), images()
    with pytest.raises(cv.errors.BadInput, match="no image placeholder"):
        cv.explain(model, pixels, "ixg", cv.NextToken(token=1), inputs={"input_ids": torch.tensor([[1, 2]])})
    padded = {"input_ids": torch.tensor([[1, IMAGE]]), "attention_mask": torch.tensor([[0, 1]])}
    with pytest.raises(cv.errors.BadInput, match="hides some of input_ids"):
        cv.explain(model, pixels, "ixg", cv.NextToken(token=1), inputs=padded)
    with pytest.raises(cv.errors.BadInput, match="prompt='x' and input_ids were given"):
        cv.explain(model, pixels, "ixg", cv.NextToken(token=1, prompt="x"), inputs=text_of("llava"))
    with pytest.raises(cv.errors.BadInput, match="word='a' and token=3 were given"):
        cv.NextToken("a", token=3)


def test_models_without_tokenizer_or_text_are_refused() -> None:
    with pytest.raises(cv.errors.ModelUnavailable, match="LlavaForConditionalGeneration has no tokenizer"):
        cv.explain(wrapped(tiny_language_model("llava")), images(), "ixg", cv.NextToken("cat", prompt=PROMPT))
    target = cv.NextToken("cat", prompt=PROMPT, processor=word_tokenizer())
    with pytest.raises(cv.errors.ModelUnavailable, match="has a tokenizer and no processor"):
        cv.explain(wrapped(tiny_language_model("paligemma")), images(), "ixg", target)
    with pytest.raises(cv.errors.NotApplicable, match=r"pets .* writes no text"):
        cv.explain("pets", "demo", "ixg", cv.NextToken("cat", prompt=PROMPT))
    with pytest.raises(cv.errors.NotApplicable, match=r"Name a word: target=cv\.NextToken"):
        cv.explain(wrapped(tiny_language_model("llava")), images(), "ixg")


def test_models_without_image_tokens_in_a_grid_are_refused() -> None:
    inputs, pixels, target = {"input_ids": torch.tensor([[1, IMAGE, 4]])}, images(), cv.NextToken(token=TOKEN)
    with pytest.raises(cv.errors.NotApplicable, match="cuts an image into tiles"):
        cv.explain(wrapped(tiled_model()), pixels, "ixg", target, inputs=inputs)
    with pytest.raises(cv.errors.NotApplicable, match="does not put image tokens into the sequence"):
        cv.explain(wrapped(cross_attention_model()), pixels, "ixg", target, inputs=inputs)
    resampled = wrapped(resampled_model())
    with pytest.raises(cv.errors.NotApplicable, match="No patch tokens were found"):
        cv.explain(resampled, pixels, "ixg", target, inputs=inputs)
    assert cv.explain(resampled, pixels, "saliency", target, inputs=inputs).maps.shape == (1, SIDE, SIDE)


@pytest.mark.parametrize("name", ["llava", "qwen2.5-vl"])
def test_verbs_take_a_next_token(name: str) -> None:
    model, pixels = wrapped(tiny_language_model(name)).with_inputs(**text_of(name)), images(2)
    target = cv.NextToken(token=TOKEN)
    scores = cv.evaluate(model, pixels, ["ixg", "rollout"], ["deletion(steps=2)", "sparseness"], target=target)
    assert all(bool(torch.isfinite(score.values).all()) for score in scores.values())
    assert len(cv.explain(model, pixels, "attnlrp", target).check()) == 2
    assert cv.choose(model, pixels, ["ixg", "genatt"], ["deletion(steps=2)"], target=target).best in ("ixg", "genatt")
    effects = cv.intervene_sweep(model, pixels[:1], kind="attention", target=target).effects
    assert effects.shape == (1, 3, 1)  # blocks of the language model


def test_a_tokenizer_alone_reads_the_prompt() -> None:
    model = wrapped(tiny_language_model("llava"))
    target = cv.NextToken("cat", prompt=PROMPT, processor=word_tokenizer())
    explanation = cv.explain(model, images(), "ixg", target)
    assert explanation.targets == ("cat",)
    assert explanation.text_relevance[0].tokens == tuple(PROMPT.split())
