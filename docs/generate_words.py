"""Draw docs/images/targets-words.png: the words of an answer, side by side, with the text under each map.

python docs/generate_words.py

No weights of a vision-language model come with ClairViT: this is a small LLaVA of transformers with random weights, so
that the picture shows what the figure is made of, and nothing about cats.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

import clairvit as cv

PATH = Path(__file__).parent / "images" / "targets-words.png"
PROMPT, ANSWER = "what is in the photo ?", "a cat"
WORDS = ("<unk>", "<bos>", "<eos>", "<image>", *PROMPT.split(), *ANSWER.split())
SIZE, PATCH, WIDTH, DPI = 224, 16, 64, 110


def tokenizer() -> Any:
    """Return a tokenizer of whole words."""
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"unk_token": "<unk>", "bos_token": "<bos>", "eos_token": "<eos>"}
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=words, **special)
    fast.add_special_tokens({"additional_special_tokens": ["<image>"]})
    return fast


def random_llava() -> Any:
    """Return a small LLaVA with random weights."""
    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4}
    special = {"vocab_size": len(WORDS), "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**sizes, image_size=SIZE, patch_size=PATCH),
        text_config=transformers.LlamaConfig(**sizes, **special),
        image_token_id=3,
        image_seq_length=(SIZE // PATCH) ** 2,
    )
    module = transformers.LlavaForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)  # weights as they are initialised make nearly the same map of every word
    return module


def main() -> None:
    """Explain each word of the answer after those before it."""
    model = cv.wrap(random_llava(), name="LLaVA, random weights", size=SIZE, mean=0.5, std=0.5)
    words, shared = ANSWER.split(), {"prompt": PROMPT, "processor": tokenizer()}
    targets = [cv.NextToken(word, answer=" ".join(words[:number]), **shared) for number, word in enumerate(words)]
    explanation = cv.explain(model, "demo", "attnlrp+plus", targets=targets)
    print(explanation.save(PATH, dpi=DPI), explanation.targets)


if __name__ == "__main__":
    main()
