"""Tiny vision-language models of transformers with random weights, their processors, and a language model by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn

from clairvit.errors import ModelUnavailable
from clairvit.models.sources.hf_versions import check_version

SIDE = 32  # pixels of an image
GRID = (4, 4)  # of image tokens
IMAGE = 5  # the image token
WORDS = (
    *("<unk>", "<bos>", "<eos>", "what", "is", "<image>", "<video>", "<start>", "<end>", "cat", "dog", "on", "the"),
    *("sofa", "?", "a", "\n", "USER:", "ASSISTANT:", "<fake_token_around_image>", "<global-img>"),
    *("<end_of_utterance>", "grass"),
)
VOCABULARY = 40
PROMPT = "what is on the sofa ?"
_TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
_TOWER: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 37, "num_hidden_layers": 2, "num_attention_heads": 4}
_ROTARY = {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}}
_MARKS = {"image_token_id": IMAGE, "video_token_id": 6, "vision_start_token_id": 7, "vision_end_token_id": 8}


def _llava() -> Any:
    vision = transformers.CLIPVisionConfig(**_TOWER, image_size=SIDE, patch_size=8)
    text = transformers.LlamaConfig(**_TEXT)
    return transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_id=IMAGE, image_seq_length=16)


def _paligemma() -> Any:
    vision = transformers.SiglipVisionConfig(**_TOWER, image_size=SIDE, patch_size=8, vision_use_head=False)
    text = transformers.GemmaConfig(**{**_TEXT, "num_key_value_heads": 1, "head_dim": 8})
    return transformers.PaliGemmaConfig(vision_config=vision, text_config=text, image_token_id=IMAGE, projection_dim=32)


def _qwen2() -> Any:
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "patch_size": 4, "mlp_ratio": 2}
    return transformers.Qwen2VLConfig(vision_config=vision, text_config={**_TEXT, **_ROTARY}, **_MARKS)


def _qwen2_5() -> Any:
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "out_hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 4,
        "patch_size": 4,
        "window_size": 16,
        "fullatt_block_indexes": [1],
    }
    return transformers.Qwen2_5_VLConfig(vision_config=vision, text_config={**_TEXT, **_ROTARY}, **_MARKS)


def _shuffled(config_class: Any) -> Any:
    return config_class(
        vision_config={**_TOWER, "image_size": SIDE, "patch_size": 4},
        text_config=transformers.LlamaConfig(**_TEXT),
        image_token_id=IMAGE,
        scale_factor=2,
    )


def _internvl() -> Any:
    vision = {**_TOWER, "image_size": [SIDE, SIDE], "patch_size": [4, 4]}
    text = transformers.Qwen2Config(**_TEXT)
    return transformers.InternVLConfig(vision_config=vision, text_config=text, image_token_id=IMAGE)


def tiled_model() -> Any:
    """Return LLaVA-NeXT, which cuts an image into tiles."""
    vision = transformers.CLIPVisionConfig(**_TOWER, image_size=SIDE, patch_size=8)
    text = transformers.LlamaConfig(**_TEXT)
    config = transformers.LlavaNextConfig(vision_config=vision, text_config=text, image_token_id=IMAGE)
    return transformers.LlavaNextForConditionalGeneration(config).eval().double()


def cross_attention_model() -> Any:
    """Return BLIP, whose decoder attends to the image without a token of it in its sequence."""
    part = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    vision = {**part, "image_size": SIDE, "patch_size": 8}
    config = transformers.BlipConfig(text_config={**part, "vocab_size": VOCABULARY}, vision_config=vision)
    return transformers.BlipForConditionalGeneration(config).eval().double()


def resampled_model() -> Any:
    """Return Idefics2, whose image tokens are four latents without a place in the image."""
    sizes = {"resampler_n_latents": 4, "resampler_depth": 1, "resampler_n_heads": 2, "resampler_head_dim": 8}
    config = transformers.Idefics2Config(
        vision_config={**_TOWER, "image_size": SIDE, "patch_size": 8},
        text_config=transformers.MistralConfig(**_TEXT),
        perceiver_config={**sizes, "num_key_value_heads": 1, "hidden_size": 32},
        image_token_id=IMAGE,
    )
    return transformers.Idefics2ForConditionalGeneration(config).eval().double()


FAMILIES: dict[str, Callable[[], Any]] = {
    "llava": lambda: transformers.LlavaForConditionalGeneration(_llava()),
    "paligemma": lambda: transformers.PaliGemmaForConditionalGeneration(_paligemma()),
    "qwen2-vl": lambda: transformers.Qwen2VLForConditionalGeneration(_qwen2()),
    "qwen2.5-vl": lambda: transformers.Qwen2_5_VLForConditionalGeneration(_qwen2_5()),
    "smolvlm": lambda: transformers.SmolVLMForConditionalGeneration(_shuffled(transformers.SmolVLMConfig)),
    "internvl": lambda: transformers.InternVLForConditionalGeneration(_internvl()),
    "idefics3": lambda: transformers.Idefics3ForConditionalGeneration(_shuffled(transformers.Idefics3Config)),
}


def tiny_language_model(family: str, dtype: torch.dtype = torch.float64, *, biases: bool = True) -> Any:
    """Return a model with weights of a fixed seed; without `biases` those of the language model are zero.

    The test is skipped where the family needs a newer transformers: `make matrix` runs it with the oldest that will do.
    """
    try:
        check_version(family.replace("-", "_").replace(".", "_"))
    except ModelUnavailable as error:
        pytest.skip(str(error))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = FAMILIES[family]().eval().to(dtype)
        for name, parameter in model.named_parameters():
            nn.init.normal_(parameter, std=0.2)
            if not biases and name.endswith("bias") and "vis" not in name:
                nn.init.zeros_(parameter)
    return model


def images(batch: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return noise [B, 3, 32, 32]."""
    return torch.randn(batch, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(1)).to(dtype)


def model_inputs(family: str, pixels: Tensor) -> dict[str, Tensor]:
    """Return one image [1, 3, 32, 32] in the form that the model's own processor makes of it, written with loops."""
    if not family.startswith("qwen"):
        return {"pixel_values": pixels[:, None] if family in ("smolvlm", "idefics3") else pixels}
    patches = []
    for row in range(4):
        for col in range(4):
            for line in range(2):
                for column in range(2):
                    top, left = 8 * row + 4 * line, 8 * col + 4 * column
                    patch = pixels[0, :, top : top + 4, left : left + 4]
                    patches.append(torch.stack([patch, patch], 1).flatten())  # colour, frame, row, column
    return {"pixel_values": torch.stack(patches), "image_grid_thw": torch.tensor([[1, 8, 8]])}


def model_text(family: str, before: list[int], after: list[int], *, answer: int = 0) -> dict[str, Tensor]:
    """Return what the model's own processor returns for a text around 16 image tokens, the last `answer` written."""
    ids = torch.tensor([before + [IMAGE] * 16 + after])
    text = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if family == "paligemma":
        text["token_type_ids"] = (torch.arange(ids.shape[1]) >= ids.shape[1] - answer).long()[None]
    if family.startswith("qwen"):
        text["mm_token_type_ids"] = (ids == IMAGE).int()
    return text


@contextmanager
def without_float32() -> Iterator[None]:
    """Let casts to float32 leave float64 as it is: RMSNorm and rotary angles are then computed in float64."""
    to, single, matmul = Tensor.to, Tensor.float, Tensor.__matmul__

    def keeping_to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        narrows = self.dtype == torch.float64 and any(value is torch.float32 for value in (*args, *kwargs.values()))
        return self if narrows else to(self, *args, **kwargs)

    def keeping_float(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self if self.dtype == torch.float64 else single(self, *args, **kwargs)

    def promoting_matmul(self: Tensor, other: Tensor) -> Tensor:
        """Frequencies stay float64, positions come from integers: before transformers 5.20 they are multiplied by @."""
        common = torch.promote_types(self.dtype, other.dtype)
        return matmul(to(self, common), to(other, common))

    Tensor.to, Tensor.float, Tensor.__matmul__ = keeping_to, keeping_float, promoting_matmul  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Tensor.to, Tensor.float, Tensor.__matmul__ = to, single, matmul  # type: ignore[method-assign]


# Processors


QWEN_PLACEHOLDERS = {"<image>": "<|image_pad|>", "<video>": "<|video_pad|>"}  # names that its processor falls back on


def word_tokenizer(renamed: Mapping[str, str] = MappingProxyType({})) -> Any:
    """Return a tokenizer of whole words between spaces, some of them under another name."""
    words = [renamed.get(word, word) for word in WORDS]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = [word for word in words if word.startswith("<") and word != "<unk>"]
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<bos>", eos_token="<eos>", pad_token="<eos>"
    )
    fast.add_special_tokens({"additional_special_tokens": special})
    return fast


def piece_tokenizer() -> Any:
    """Return a tokenizer that splits unknown words into pieces: 'catdog' is 'cat', 'dog'."""
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordPiece({**vocabulary, "##dog": 23}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", additional_special_tokens=["<image>"]
    )


def llava_processor() -> Any:
    """Return LLaVA's processor for images of 32 × 32 pixels, with a chat template."""
    size = {"height": SIDE, "width": SIDE}
    template = (
        "{% for m in messages %}USER: {% for c in m['content'] %}{% if c['type'] == 'image' %}<image> "
        "{% else %}{{ c['text'] }} {% endif %}{% endfor %}{% endfor %}{% if add_generation_prompt %}ASSISTANT:"
        "{% endif %}"
    )
    return transformers.LlavaProcessor(
        image_processor=transformers.CLIPImageProcessor(size=size, crop_size=size),
        tokenizer=word_tokenizer(),
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=template,
    )


def qwen_processor() -> Any:
    """Return Qwen2-VL's processor for patches of 4 × 4 pixels, with at most 1024 of them."""
    return transformers.Qwen2VLProcessor(
        image_processor=transformers.Qwen2VLImageProcessor(
            patch_size=4, merge_size=2, size={"shortest_edge": 64, "longest_edge": SIDE**2}
        ),
        tokenizer=word_tokenizer(QWEN_PLACEHOLDERS),
        video_processor=transformers.Qwen2VLVideoProcessor(patch_size=4, merge_size=2),
    )


def paligemma_processor() -> Any:
    """Return PaliGemma's processor for images of 32 × 32 pixels and 16 tokens."""
    image_processor = transformers.SiglipImageProcessor(size={"height": SIDE, "width": SIDE})
    image_processor.image_seq_length = 16
    return transformers.PaliGemmaProcessor(image_processor=image_processor, tokenizer=word_tokenizer())


def idefics3_processor() -> Any:
    """Return Idefics3's processor, which cuts images into tiles of 32 × 32 pixels by default."""
    image_processor = transformers.Idefics3ImageProcessor(
        size={"longest_edge": 2 * SIDE}, max_image_size={"longest_edge": SIDE}
    )
    return transformers.Idefics3Processor(image_processor=image_processor, tokenizer=word_tokenizer(), image_seq_len=16)


def smolvlm_processor() -> Any:
    """Return SmolVLM's processor; it is not made without the package num2words, which it needs for videos."""
    image_processor = transformers.SmolVLMImageProcessor(
        size={"longest_edge": 2 * SIDE}, max_image_size={"longest_edge": SIDE}
    )
    return transformers.SmolVLMProcessor(
        image_processor=image_processor,
        tokenizer=word_tokenizer(),
        video_processor=transformers.SmolVLMVideoProcessor(),
        image_seq_len=16,
    )


PROCESSORS: dict[str, Callable[[], Any]] = {
    "llava": llava_processor,
    "qwen2-vl": qwen_processor,
    "qwen2.5-vl": qwen_processor,
    "paligemma": paligemma_processor,
    "idefics3": idefics3_processor,
    "smolvlm": smolvlm_processor,
}


def saved_llava(folder: Path) -> Path:
    """Write a tiny LLaVA and its processor into a folder, and return it."""
    tiny_language_model("llava", torch.float32).save_pretrained(folder)
    llava_processor().save_pretrained(folder)
    return folder


# The language model by hand


def halved(x: Tensor, share: float) -> Tensor:
    """Return x with its gradient times `share`."""
    return x * share + (x * (1 - share)).detach()


def logit_by_hand(model: Any, embeddings: Tensor, rules: str, allowed: Tensor, positions: Tensor, token: int) -> Tensor:
    """Return the logit of a token after the last of embeddings [1, N, d], whose gradient follows the rules.

    plain: autograd's own. linear: attention, gates, the root of RMSNorm and the slope of activations held fixed.
    attnlrp: the last two held fixed, and the gradient of each factor of a product halved.
    """
    decoder = model.get_decoder()
    cos, sin = (part[:, None] for part in decoder.rotary_emb(embeddings, positions))

    def norm(layer: Any, x: Tensor) -> Tensor:
        eps = getattr(layer, "variance_epsilon", getattr(layer, "eps", None))
        root = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
        weight = 1 + layer.weight if type(layer).__name__.startswith("Gemma") else layer.weight
        return x * (root if rules == "plain" else root.detach()) * weight

    def rotated(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin

    def attention(layer: Any, x: Tensor) -> Tensor:
        width = layer.head_dim
        q, k, v = (
            project(x).unflatten(-1, (-1, width)).transpose(1, 2)
            for project in (layer.q_proj, layer.k_proj, layer.v_proj)
        )
        q, k = rotated(q), rotated(k)
        k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], 1) for part in (k, v))
        if rules == "attnlrp":
            q, k, v = halved(q, 0.25), halved(k, 0.25), halved(v, 0.5)
        A = (q @ k.transpose(-2, -1) * width**-0.5).masked_fill(~allowed, float("-inf")).softmax(-1)
        A = A.detach() if rules == "linear" else A
        return layer.o_proj((A @ v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def mlp(layer: Any, x: Tensor) -> Tensor:
        z, up = layer.gate_proj(x), layer.up_proj(x)
        gate = layer.act_fn(z)
        if rules != "plain":
            gate = z * (gate / z).detach()
        if rules == "linear":
            gate = gate.detach()
        if rules == "attnlrp":
            gate, up = halved(gate, 0.5), halved(up, 0.5)
        return layer.down_proj(gate * up)  # type: ignore[no-any-return]

    x = embeddings
    for layer in decoder.layers:
        x = x + attention(layer.self_attn, norm(layer.input_layernorm, x))
        x = x + mlp(layer.mlp, norm(layer.post_attention_layernorm, x))
    scores = F.linear(norm(decoder.norm, x)[:, -1], model.lm_head.weight)
    return scores[0, token]
