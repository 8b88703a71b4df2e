"""Prompts as targets, on CLIP and SigLIP of open_clip and transformers: against the libraries' own cosines."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import clairvit as cv
from clairvit.targets.text import NEUTRAL_PROMPTS
from helpers import tiny_pairs
from helpers.rounding import assert_same, same
from helpers.tiny_pairs import PAIRS, blocks, cosines, pixels, wrapped

PROMPT, OTHER, NEUTRAL = "a red car", "the dog", ["a photo", "a photo of a cat"]
every_pair = pytest.mark.parametrize("name", PAIRS)


@every_pair
def test_the_score_is_the_cosine(name: str) -> None:
    pair, images = tiny_pairs.build(name), pixels()
    model = wrapped(name, pair)
    trace = cv.trace(model, images, target=cv.Text(PROMPT, against=None))
    expected = cosines(name, pair, images, [PROMPT, OTHER, *NEUTRAL]).detach()
    assert trace.target.score == "cosine"
    assert trace.target.names == (PROMPT, PROMPT)
    assert_same(trace.target(trace.logits), expected[:, 0])
    for target, values in (
        (cv.Contrast(cv.Text(PROMPT), cv.Text(OTHER)), expected[:, 0] - expected[:, 1]),
        (cv.Text(PROMPT), expected[:, 0] - cosines(name, pair, images, list(NEUTRAL_PROMPTS)).detach().mean(1)),
        (cv.Text(PROMPT, against=NEUTRAL), expected[:, 0] - expected[:, 2:].mean(1)),
        (cv.Text(PROMPT, score="logit", against=None), logits(pair, expected[:, 0])),
        (
            cv.Text(PROMPT, against=NEUTRAL, score="logit"),
            logits(pair, expected[:, 0]) - logits(pair, expected[:, 2:]).mean(1),
        ),
    ):
        trace = cv.trace(model, images, target=target)
        assert_same(trace.target(trace.logits).detach(), values, magnitude=float(values.abs().max()) + 20)


def logits(pair: Any, cosine: Tensor) -> Tensor:
    """Return scale · cos + bias, the model's own logit."""
    bias = getattr(pair, "logit_bias", None)
    return (pair.logit_scale.exp() * cosine + (0 if bias is None else bias)).detach()


@every_pair
def test_a_score_that_is_named_is_the_models_logit(name: str) -> None:
    """score="logit" next to a prompt asks for the same as cv.Text(…, score="logit"), and is not ignored."""
    model, images = wrapped(name), pixels()
    for against in ((), NEUTRAL):
        explanation = cv.explain(model, images, "ixg", target=cv.Text(PROMPT, against=against), score="logit")
        stated = cv.explain(model, images, "ixg", target=cv.Text(PROMPT, against=against, score="logit"))
        assert explanation.score == stated.score == ("difference of logits" if against else "logit")
        assert_same(torch.tensor(explanation.target_scores), torch.tensor(stated.target_scores))
        assert_same(explanation.maps, stated.maps)
    cosine = cv.explain(model, images, "ixg", target=cv.Text(PROMPT, against=None))
    assert cosine.score == "cosine"
    assert not same(
        cosine.maps, cv.explain(model, images, "ixg", target=cv.Text(PROMPT, against=None), score="logit").maps
    )


@every_pair
def test_gradients_are_those_of_the_cosine(name: str) -> None:
    pair, images = tiny_pairs.build(name), pixels()
    trace = cv.trace(wrapped(name, pair), images, target=cv.Text(PROMPT, against=None))
    inputs: list[Tensor] = []
    hooks = [block.register_forward_pre_hook(lambda _, args: inputs.append(args[0])) for block in blocks(pair)]
    pixel_input = images.clone().requires_grad_()
    score = cosines(name, pair, pixel_input, [PROMPT])[:, 0]
    for hook in hooks:
        hook.remove()
    gradients = torch.autograd.grad(score.sum(), [*inputs, pixel_input])
    for layer, x, dx in zip(trace.layers, inputs, gradients[:-1], strict=True):
        assert_same(layer.x, x.detach())
        assert_same(layer.dx, dx, magnitude=float(dx.abs().max()))
    ixg = cv.explain(wrapped(name, pair), images, "ixg", target=cv.Text(PROMPT, against=None)).maps
    products = (inputs[0] * gradients[0]).detach()[:, -9:]
    assert_same(ixg.flatten(1), products.sum(-1), magnitude=float(products.abs().max()))
    saliency = cv.explain(wrapped(name, pair), images, "saliency", target=cv.Text(PROMPT, against=None))
    assert saliency.score == "cosine"
    assert saliency.maps.shape == (2, 3, 3)


@every_pair
def test_linear_rules_distribute_the_cosine(name: str) -> None:
    pair, images = without_biases(tiny_pairs.build(name)), pixels()
    trace = cv.trace(wrapped(name, pair), images, target=cv.Text(PROMPT, against=None), rules="linear")
    expected = cosines(name, pair, images, [PROMPT])[:, 0].detach()
    for layer in trace.layers:
        products = layer.x * layer.dx
        assert_same(products.sum((1, 2)), expected, magnitude=float(products.abs().sum((1, 2)).max()))


def without_biases(pair: nn.Module) -> nn.Module:
    """Set every bias of the image tower to 0, so that all of the score comes from the tokens."""
    with torch.no_grad():
        for name, parameter in pair.named_parameters():
            if name.endswith("bias") and "vis" in name:
                parameter.zero_()
    return pair


@every_pair
def test_leave_one_out_by_hand(name: str) -> None:
    pair, images = tiny_pairs.build(name), pixels(1)
    maps = cv.explain(wrapped(name, pair), images, "leave-one-out", target=cv.Text(PROMPT, against=None)).maps
    full = cosines(name, pair, images, [PROMPT])[0, 0]
    drops = [full - score_without(name, pair, images, patch) for patch in range(9)]
    assert_same(maps.flatten(), torch.stack(drops).detach(), magnitude=1.0)


def score_without(name: str, pair: nn.Module, images: Tensor, patch: int) -> Tensor:
    """Return the cosine with one patch token removed before the first block."""

    def drop(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        tokens = args[0]  # [B, N, d]
        gone = tokens.shape[1] - 9 + patch
        return (torch.cat([tokens[:, :gone], tokens[:, gone + 1 :]], 1), *args[1:])

    hook = blocks(pair)[0].register_forward_pre_hook(drop)
    try:
        return cosines(name, pair, images, [PROMPT])[0, 0]
    finally:
        hook.remove()


def test_removed_tokens_are_masked_keys() -> None:
    pair, images = tiny_pairs.build("CLIPModel"), pixels(1)
    maps = cv.explain(wrapped("CLIPModel", pair), images, "leave-one-out", target=cv.Text(PROMPT, against=None)).maps
    text = tiny_pairs.text_features("CLIPModel", pair, [PROMPT])
    tower: Any = pair.vision_model
    hidden = tower.pre_layrnorm(tower.embeddings(images))
    scores = []
    for removed in (None, *range(1, 10)):
        mask = torch.zeros(1, 1, 10, 10, dtype=torch.float64)
        if removed is not None:
            mask[..., removed] = -torch.inf
        state = hidden
        for block in tower.encoder.layers:
            state = block(state, attention_mask=mask)
            state = state if isinstance(state, Tensor) else state[0]
        embedding = pair.visual_projection(tower.post_layernorm(state[:, 0]))
        scores.append(nn.functional.cosine_similarity(embedding, text)[0].detach())
    assert_same(maps.flatten(), scores[0] - torch.stack(scores[1:]), magnitude=1.0)


@pytest.mark.parametrize("name", ["open_clip", "CLIPModel"])  # attention pools: test_legrad_of_an_attention_pool
def test_legrad_by_the_authors_protocol(name: str) -> None:
    """LeGrad of CLIP: mean of all tokens, final norm, projection, cosine with the text; the last two blocks."""
    pair, images = tiny_pairs.build(name), pixels(1)
    maps = cv.explain(wrapped(name, pair), images, "legrad(preset=official)", target=cv.Text(PROMPT, against=None)).maps
    expected = sum(legrad_layer(name, pair, images, layer) for layer in (1, 2))
    assert_same(maps.flatten(), expected)


def legrad_layer(name: str, pair: Any, images: Tensor, index: int) -> Tensor:
    """Return mean_{h, i} relu(d s / d A_ij) of one block by autograd, for s = cos(head(mean of its output), text)."""
    inputs: list[Tensor] = []
    hook = blocks(pair)[index].register_forward_pre_hook(lambda _, args: inputs.append(args[0].detach()))
    tiny_pairs.image_features(pair, images)
    hook.remove()
    state, block = inputs[0], blocks(pair)[index]
    norm, attention, second = (
        (block.ln_1, block.attn, block.ln_2)
        if name == "open_clip"
        else (block.layer_norm1, block.self_attn, block.layer_norm2)
    )
    if name == "open_clip":
        q, k, v = (norm(state) @ attention.in_proj_weight.T + attention.in_proj_bias).chunk(3, -1)
    else:
        q, k, v = (project(norm(state)) for project in (attention.q_proj, attention.k_proj, attention.v_proj))
    q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in (q, k, v))  # [B, H, N, 8]
    A = (q @ k.mT / 8**0.5).softmax(-1).detach().requires_grad_()
    mixed = attention.out_proj((A @ v).transpose(1, 2).flatten(2))
    state = state + mixed
    state = state + block.mlp(second(state))
    if name == "open_clip":
        pooled = pair.visual.ln_post(state.mean(1)) @ pair.visual.proj
    else:
        pooled = pair.visual_projection(pair.vision_model.post_layernorm(state.mean(1)))
    text = tiny_pairs.text_features(name, pair, [PROMPT])
    score = nn.functional.normalize(pooled, dim=-1) @ nn.functional.normalize(text, dim=-1).T
    (gradient,) = torch.autograd.grad(score.sum(), A)
    return gradient.clamp(min=0).mean((1, 2))[0, 1:].detach()


@every_pair
def test_several_prompts_cost_one_forward(name: str) -> None:
    model, images = wrapped(name), pixels(1)
    both = cv.explain(model, images, "attnlrp", targets=[cv.Text(PROMPT), cv.Text(OTHER)])
    assert both.cost.forwards == 1
    assert both.targets == (PROMPT, OTHER)
    for row, prompt in enumerate((PROMPT, OTHER)):
        alone = cv.explain(model, images, "attnlrp", target=cv.Text(prompt))
        assert_same(both.maps[row], alone.maps[0], magnitude=1.0)
    per_image = cv.explain(model, pixels(2), "attnlrp", target=[cv.Text(PROMPT), cv.Text(OTHER)])
    assert per_image.targets == (PROMPT, OTHER)
    agnostic = cv.explain(model, images, "raw-attention" if name != "SiglipModel" else "random", target=cv.Text(PROMPT))
    assert agnostic.targets == ("any class",)


@every_pair
def test_a_module_in_training_mode_is_left_so(name: str) -> None:
    pair, images = tiny_pairs.build(name), pixels(1)
    expected = cv.explain(wrapped(name, pair), images, "ixg", target=cv.Text(PROMPT, against=None)).maps
    for part in pair.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.5
    pair.train()
    before = copy.deepcopy(pair.state_dict())
    assert torch.equal(
        cv.explain(wrapped(name, pair), images, "ixg", target=cv.Text(PROMPT, against=None)).maps, expected
    )
    assert all(part.training for part in pair.modules())
    assert all(parameter.requires_grad for parameter in pair.parameters())
    assert all(torch.equal(value, before[key]) for key, value in pair.state_dict().items())


def test_prompts_are_encoded_once_until_weights_change(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = tiny_pairs.build("open_clip")
    calls: list[int] = []
    encode = pair.encode_text
    monkeypatch.setattr(pair, "encode_text", lambda tokens: (calls.append(len(tokens)), encode(tokens))[1])
    encoder = wrapped("open_clip", pair).text_encoder
    assert encoder is not None
    first = encoder.encode([PROMPT, OTHER, PROMPT])
    assert torch.equal(first[0], first[2])
    encoder.encode([OTHER])
    assert calls == [2]
    with torch.no_grad():
        pair.text_projection.mul_(-1.0)
    assert_same(encoder.encode([PROMPT]), -first[:1])
    assert calls == [2, 1]


@every_pair
def test_every_verb_takes_prompts(name: str) -> None:
    model, images, target = wrapped(name), pixels(2), cv.Text(PROMPT, against=None)
    scores = cv.evaluate(model, images, ["ixg", "random"], ["deletion(steps=3)", "sparseness"], target=target)
    assert scores["ixg", "deletion(steps=3)"].n_valid == 2
    assert list(cv.compare(model, images, ["ixg", "saliency"], target=target)) == ["ixg", "saliency"]
    checked = cv.explain(model, images[:1], "ixg", target=target).check()
    assert checked[0].answer.status == "nothing to explain", "the image is noise"
    assert checked[0].full == pytest.approx(float(cv.explain(model, images[:1], "ixg", target=target).target_scores[0]))
    assert cv.choose(model, images, ["ixg", "saliency"], metrics=["deletion(steps=3)"], target=target).best


def test_prompts_that_cannot_be_used() -> None:
    for bad, message in (
        ("", "An empty prompt was given"),
        ("  ", "An empty prompt was given"),
        (3, "The prompt 3 is a int; expected a string"),
        (["a", "b"], r"cv\.Text got 2 prompts in a list; expected one string"),
    ):
        with pytest.raises(cv.errors.BadInput, match=message):
            cv.Text(bad)  # type: ignore[arg-type]
    with pytest.raises(cv.errors.BadInput, match="The prompt 7 is a int"):
        cv.Text("a cat", against=["a dog", 7])  # type: ignore[list-item]
    with pytest.raises(cv.errors.UnknownName, match=r"There is no score 'logits' of a prompt\. Did you mean 'logit'"):
        cv.Text("a cat", score="logits")  # type: ignore[arg-type]


def test_models_that_cannot_read_prompts() -> None:
    with pytest.raises(
        cv.errors.NotApplicable, match="pets has no text tower, so it cannot compare an image with 'a cat'"
    ):
        cv.explain("pets", "demo", "ixg", target=cv.Text("a cat"))
    pair = tiny_pairs.build("open_clip")
    with pytest.raises(
        cv.errors.NotApplicable, match=r"CLIP has a text tower, and nothing says which tokenizer .*get_tokenizer"
    ):
        cv.explain(cv.wrap(pair, size=24), pixels(1), "ixg", target=cv.Text("a cat"))
    with pytest.raises(cv.errors.BadInput, match="tokenizer='ViT-B-32' was given; expected a tokenizer"):
        cv.wrap(pair, tokenizer="ViT-B-32")
    with pytest.raises(cv.errors.BadInput, match="tokenizer= was given for Linear, which has no text tower"):
        cv.wrap(nn.Linear(2, 2), tokenizer=tiny_pairs.open_clip_tokenizer)
    with pytest.raises(cv.errors.BadInput, match=r"The tokenizer failed on \['newt'\] \(ValueError"):
        cv.explain(wrapped("open_clip", pair), pixels(1), "ixg", target=cv.Text("newt", against=None))
    with pytest.raises(cv.errors.BadInput, match="has 10 tokens, and the text tower reads 8"):
        cv.explain(wrapped("CLIPModel"), pixels(1), "ixg", target=cv.Text("a cat " + "a dog " * 3 + "?"))
    with pytest.raises(cv.errors.BadInput, match="The score 'prob'"):
        cv.explain(wrapped("open_clip", pair), pixels(1), "ixg", target=cv.Text("a cat"), score="prob")


def test_tokenizers_that_hold_another() -> None:
    """open_clip's wrapper of a tokenizer is called itself; a processor of transformers is not."""

    class Holder:
        def __init__(self, tokenizer: Any) -> None:
            self.tokenizer = tokenizer

        def __call__(self, prompts: list[str]) -> Tensor:
            return tiny_pairs.open_clip_tokenizer(prompts)

    for name, holder in (("open_clip", Holder(None)), ("CLIPModel", Holder(tiny_pairs.tokenizer()))):
        pair = tiny_pairs.build(name)
        encoder = cv.wrap(pair, tokenizer=holder, size=24).text_encoder
        assert encoder is not None
        expected = nn.functional.normalize(tiny_pairs.text_features(name, pair, [PROMPT]).detach(), dim=-1)
        assert_same(encoder.encode([PROMPT]), expected)


def test_the_kind_of_score_of_a_prompt() -> None:
    """The kind of score and a note name what is subtracted; a map that does not depend on the prompt has no note."""
    model, images = wrapped("open_clip"), pixels(1)
    for target, score, note in (
        (
            cv.Text(PROMPT),
            "difference of cosines",
            "minus the mean cosine of 20 neutral prompts ('a photo of a plane', …)",
        ),
        (cv.Text(PROMPT, against=["a photo"]), "difference of cosines", "minus the mean cosine of 'a photo'"),
        (cv.Text(PROMPT, against=None), "cosine", "the score is the cosine of image and text alone."),
        (cv.Text(PROMPT, score="logit"), "difference of logits", "minus the mean logit of 20 neutral prompts"),
    ):
        explanation = cv.explain(model, images, "ixg", target=target)
        assert explanation.score == score
        assert any(note in text for text in explanation.notes), explanation.notes
        assert explanation.to_dict()["score"] == score
        assert not any("the score is" in text for text in cv.explain(model, images, "rollout", target=target).notes)
    assert cv.explain(model, images, "ixg", target=cv.Contrast(cv.Text(PROMPT), cv.Text(OTHER))).score == (
        "difference of cosines"
    )


def image_tower(dtype: torch.dtype = torch.float64) -> tuple[Any, cv.Model]:
    """Return an open_clip pair and its image tower as a model without a text tower."""
    pair = tiny_pairs.build("open_clip").to(dtype)
    return pair, cv.wrap(pair.visual, size=24, mean=0.5, std=0.5, classifier=False)


def test_given_embeddings_are_compared_like_prompts() -> None:
    pair, tower = image_tower()
    images = pixels()
    features = tiny_pairs.text_features("open_clip", pair, [PROMPT, OTHER, *NEUTRAL]).detach()
    whole = wrapped("open_clip", pair)
    for given, prompt in (
        (cv.Text(PROMPT, embedding=3 * features[0], against=None), cv.Text(PROMPT, against=None)),
        (cv.Text(PROMPT, embedding=features[0].numpy(), against=features[2:]), cv.Text(PROMPT, against=NEUTRAL)),
        (
            cv.Contrast(cv.Text(PROMPT, embedding=features[0]), cv.Text(OTHER, embedding=features[1].tolist())),
            cv.Contrast(cv.Text(PROMPT), cv.Text(OTHER)),
        ),
    ):
        actual = cv.explain(tower, images, "attnlrp+plus", target=given)
        expected = cv.explain(whole, images, "attnlrp+plus", target=prompt)
        assert actual.score == expected.score
        assert_same(torch.tensor(actual.target_scores), torch.tensor(expected.target_scores), magnitude=1.0)
        assert_same(actual.maps, expected.maps, magnitude=float(expected.maps.abs().max()))


def test_given_embeddings_say_what_they_lack() -> None:
    _, tower = image_tower()
    vector = torch.ones(12)
    alone = cv.explain(tower, pixels(1), "ixg", target=cv.Text("cat", embedding=vector))
    assert alone.score == "cosine"
    assert any("No other texts were given to compare it with: add against=." in note for note in alone.notes)
    with pytest.raises(cv.errors.NotApplicable, match=r"no text tower, so it cannot compare .*embedding="):
        cv.explain(tower, pixels(1), "ixg", target=cv.Text("a cat"))
    with pytest.raises(cv.errors.NotApplicable, match="to which the scale of a logit belongs"):
        cv.explain(tower, pixels(1), "ixg", target=cv.Text("cat", embedding=vector, score="logit"))
    with pytest.raises(cv.errors.NotApplicable, match="has 12 numbers and the one it is compared with 5"):
        cv.explain(tower, pixels(1), "ixg", target=cv.Text("cat", embedding=torch.ones(5)))
    for bad, message in (
        (torch.zeros(12), "holds NaN, infinity or zeros alone"),
        ([1.0, float("nan")], "holds NaN, infinity or zeros alone"),
        (torch.ones(2, 12), "2 embeddings were given for 'cat'"),
        (torch.ones(1, 2, 3), r"has shape \[1, 2, 3\]"),
        ("cat", "is a str; expected numbers"),
    ):
        with pytest.raises(cv.errors.BadInput, match=message):
            cv.Text("cat", embedding=bad)
    with pytest.raises(cv.errors.BadInput, match="which no text tower encodes"):
        cv.Text("cat", embedding=vector, against=["a photo"])
    assert cv.Text("cat", embedding=vector) == cv.Text("cat", embedding=2 * vector)
    assert cv.Text("cat", embedding=vector) != cv.Text("cat", embedding=vector + torch.arange(12))
