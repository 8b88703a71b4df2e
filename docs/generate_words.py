"""Draw docs/images/targets-words.png: each word that a small LLaVA writes about a scene.

python docs/generate_words.py [--weights FILE]

No weights of a vision-language model come with ClairViT. This one is a LLaVA of transformers whose vision tower is the
built-in model `scenes`; its projector and its language model of two blocks are trained here to name the two classes of
a scene in their order of CLASSES ("bars and ring"). A file of weights is read if it is there, else written.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPooling

import clairvit as cv
from clairvit.data.scenes import CLASSES, SIZE, Scene, scene
from clairvit.models.images import prepare
from clairvit.models.language import encode_prompt

PATH = Path(__file__).parent / "images" / "targets-words.png"
PROMPT = "what is on the discs ?"
WORDS = ("<unk>", "<bos>", "<eos>", "<image>", "what", "is", "on", "the", "discs", "?", "and", *CLASSES)
WIDTH, TRAINED, STEPS, BATCH, SHOWN = 96, 640, 240, 32, 900  # SHOWN: the number of the scene that is drawn
DPI = 110


class Tower(nn.Module):
    """A Vision Transformer of timm as the vision tower of LLaVA, which drops the first token."""

    def __init__(self, encoder: Any) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, pixel_values: Tensor, **_: Any) -> BaseModelOutputWithPooling:
        """Return the tokens after the last norm as the only hidden state."""
        tokens = self.encoder.forward_features(pixel_values)
        return BaseModelOutputWithPooling(last_hidden_state=tokens, hidden_states=(tokens,))


def tokenizer() -> Any:
    """Return a tokenizer of whole words."""
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"unk_token": "<unk>", "bos_token": "<bos>", "eos_token": "<eos>"}
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=words, **special)
    fast.add_special_tokens({"additional_special_tokens": ["<image>"]})
    return fast


def untrained() -> tuple[Any, Any]:
    """Return the module with random weights next to those of `scenes`, and the model `scenes`."""
    torch.manual_seed(0)
    scenes = cv.load("scenes")
    encoder: Any = scenes.module
    text = transformers.LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=len(WORDS),
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    vision = transformers.CLIPVisionConfig(
        hidden_size=encoder.embed_dim, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    vision.image_size, vision.patch_size = SIZE, encoder.patch_embed.patch_size[0]
    count = (SIZE // vision.patch_size) ** 2
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=text, image_token_id=3, image_seq_length=count, vision_feature_layer=-1
    )
    module = transformers.LlavaForConditionalGeneration(config).eval()
    module.model.vision_tower = Tower(encoder)
    return module, scenes


def answer(drawn: Scene) -> list[int]:
    """Return the token ids of the answer: both classes in the order of CLASSES."""
    first, second = sorted((drawn.class_name, str(drawn.other_class_name)), key=CLASSES.index)
    return [WORDS.index(word) for word in (first, "and", second, "<eos>")]


def train(module: Any, scenes: cv.Model) -> None:
    """Train projector and language model on the tower's tokens, which are computed once."""
    drawn = [scene(2, number, objects=2) for number in range(TRAINED)]
    with torch.no_grad():
        pixels = prepare([item.picture for item in drawn], scenes).pixels
        tokens = torch.cat([module.model.vision_tower(part).last_hidden_state[:, 1:] for part in pixels.split(64)])
    prompt = encode_prompt(module, tokenizer(), PROMPT, (SIZE, SIZE))
    answers = torch.tensor([answer(item) for item in drawn])
    parameters = [p for name, p in module.named_parameters() if "vision_tower" not in name]
    optimizer = torch.optim.AdamW(parameters, lr=2e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=STEPS)
    order = torch.Generator().manual_seed(0)
    for step in range(STEPS):
        rows = torch.randint(TRAINED, (BATCH,), generator=order)
        images = module.model.multi_modal_projector(tokens[rows])
        ids = torch.cat([prompt.ids.expand(BATCH, -1), answers[rows, :-1]], 1)
        embedded = module.get_input_embeddings()(ids)
        embedded = torch.cat([embedded[:, : prompt.first], images, embedded[:, prompt.first + prompt.count :]], 1)
        hidden = module.model.language_model(inputs_embeds=embedded, use_cache=False).last_hidden_state
        logits = module.lm_head(hidden[:, -answers.shape[1] :])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), answers[rows].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 20 == 0:
            print(f"step {step}: loss {loss.detach():.3f}", flush=True)


def accuracy(model: cv.Model, count: int = 16) -> float:
    """Return the share of new scenes whose answer is right."""
    right = 0
    for number in range(count):
        drawn = scene(3, number, objects=2)
        targets = cv.generate(model, drawn.picture, PROMPT, processor=tokenizer())
        right += [target.token for target in targets] == answer(drawn)[:-1]  # without the end of the text
    return right / count


def main() -> None:
    """Train or read the model, then draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--weights", type=Path)
    weights = parser.parse_args().weights
    module, scenes = untrained()
    if weights is not None and weights.is_file():
        module.load_state_dict(load_file(weights))
    else:
        train(module, scenes)
        if weights is not None:
            save_file({name: value.contiguous() for name, value in module.state_dict().items()}, weights)
    settings = scenes.preprocess
    model = cv.wrap(module, name="LLaVA of scenes", size=SIZE, mean=settings.mean, std=settings.std)
    print(f"answers that are right: {accuracy(model):.2f} of 16 new scenes")
    picture = scene(3, SHOWN, objects=2).picture
    targets = cv.generate(model, picture, PROMPT, processor=tokenizer())
    words = cv.explain(model, picture, "attnlrp", targets=targets)
    print(words.save(PATH, dpi=DPI), words.targets)


if __name__ == "__main__":
    main()
