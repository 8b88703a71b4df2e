"""Train the built-in model `parts` from random weights on generated part scenes, with parts removed at random.

Usage: python benchmarks/train_parts.py --out parts-vit.safetensors --device cuda

As in FunnyBirds (Hesse et al., ICCV 2023), parts are removed at random while training, and the target of such a picture
is uniform over the classes that have the parts which are left: a picture without a part is nothing unusual for the
model. A second head, which is not kept, names the variant of each part, or that it is missing: training needs fewer
steps with it. Scenes of seed 1 are trained on; seed 2 is validated on, once, at the end. The last lines say how often
the model is right: on whole pictures, and with k parts removed, where any class with the parts left is right.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clairvit.data.part_scenes import CLASSES, MAX_DISTRACTORS, PARTS, SIZE, TABLE, part_scene
from clairvit.models.preprocess import Preprocess
from clairvit.models.sources import weights_header
from clairvit.training.checkpoint import write_tensors

ARCH = "vit_tiny_patch16_224"
OPTIONS = {"patch_size": 8, "embed_dim": 128, "depth": 6, "num_heads": 4}
TRAINING_SEED, VALIDATION_SEED = 1, 2
COMPONENTS = len(PARTS) + MAX_DISTRACTORS
CHUNK = 250  # scenes that a worker draws at once
MISSING = int(max(map(max, TABLE.variants))) + 1  # stands for a part that was removed
VARIANTS = torch.tensor(TABLE.variants)  # [C, P]


@dataclass(frozen=True, eq=False)
class Scenes:
    """Scenes in two layers; see `PartScene`."""

    full: Tensor  # uint8 [N, 3, size, size]
    empty: Tensor  # uint8 [N, 3, size, size]
    components: Tensor  # uint8 [N, size, size]
    labels: Tensor  # [N]

    def __len__(self) -> int:
        return len(self.labels)

    def to(self, device: torch.device) -> Scenes:
        return Scenes(*(values.to(device) for values in (self.full, self.empty, self.components, self.labels)))

    def compose(self, rows: Tensor, keep: Tensor) -> Tensor:
        """Return the pictures of rows [B] with the components of keep, bool [B, K], normalised: [B, 3, size, size]."""
        nothing = torch.zeros_like(keep[:, :1])
        components = self.components[rows].long().flatten(1)
        shown = torch.cat([nothing, keep], 1).gather(1, components).reshape(-1, 1, *self.components.shape[1:])
        return torch.where(shown, self.full[rows], self.empty[rows]).float() / 127.5 - 1


def draw_chunk(seed: int, start: int, stop: int) -> tuple[np.ndarray, ...]:
    drawn = [part_scene(seed, number) for number in range(start, stop)]
    layers = (np.stack([getattr(scene, name) for scene in drawn]) for name in ("full", "empty", "components"))
    return (*layers, np.array([CLASSES.index(scene.class_name) for scene in drawn]))


def draw_scenes(seed: int, count: int, workers: int) -> Scenes:
    """Draw scenes 0 … count - 1 of a seed in several processes."""
    starts = range(0, count, CHUNK)
    ends = [min(start + CHUNK, count) for start in starts]
    full, empty = (torch.empty(count, 3, SIZE, SIZE, dtype=torch.uint8) for _ in range(2))
    components, labels = torch.empty(count, SIZE, SIZE, dtype=torch.uint8), torch.empty(count, dtype=torch.long)
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        chunks = pool.map(draw_chunk, [seed] * len(ends), starts, ends)
        for start, arrays in zip(starts, chunks, strict=True):
            with_parts, without, regions, classes = (torch.from_numpy(array) for array in arrays)
            rows = slice(start, start + len(classes))
            full[rows], empty[rows] = with_parts.permute(0, 3, 1, 2), without.permute(0, 3, 1, 2)
            components[rows], labels[rows] = regions, classes
    return Scenes(full, empty, components, labels)


def random_keep(count: int, generator: torch.Generator) -> Tensor:
    """Return which components stay, bool [B, K]: half of the pictures are whole, from others 1 … P parts are removed.

    Distractors are removed with a probability that is drawn for each picture, from half of the pictures.
    """

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, device=generator.device)

    removed = (1 + (uniform(count, 1) * len(PARTS)).floor()) * (uniform(count, 1) < 0.5)  # [B, 1] numbers of parts
    parts = uniform(count, len(PARTS)).argsort(1).argsort(1) >= removed
    distractors = uniform(count, MAX_DISTRACTORS) >= uniform(count, 1) * (uniform(count, 1) < 0.5)
    return torch.cat([parts, distractors], 1)


def compatible(labels: Tensor, keep: Tensor) -> Tensor:
    """Return which classes have the visible parts of pictures with labels [B] and keep [B, K]: bool [B, C]."""
    variants = VARIANTS.to(labels.device)
    same = variants[None] == variants[labels][:, None]  # [B, C, P]
    return (same | ~keep[:, None, : len(PARTS)]).all(-1)


def visible_variants(labels: Tensor, keep: Tensor) -> Tensor:
    """Return the variant of each part, MISSING where it was removed: [B, P]."""
    return VARIANTS.to(labels.device)[labels].masked_fill(~keep[:, : len(PARTS)], MISSING)


def batches(count: int, size: int, steps: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Yield rows [size] of `steps` batches, from one random order of all scenes after the other."""
    rows = torch.empty(0, dtype=torch.long, device=generator.device)
    for _ in range(steps):
        while len(rows) < size:
            rows = torch.cat([rows, torch.randperm(count, generator=generator, device=generator.device)])
        yield rows[:size]
        rows = rows[size:]


def train(module: nn.Module, scenes: Scenes, arguments: argparse.Namespace) -> None:
    """Minimise the cross-entropy with the compatible classes; AdamW, cosine decay after a linear warm-up."""
    device = scenes.labels.device
    generator = torch.Generator(device).manual_seed(arguments.seed)
    steps = math.ceil(arguments.epochs * len(scenes) / arguments.batch)
    warmup = max(1, steps // 20)
    part_head = nn.Linear(int(OPTIONS["embed_dim"]), len(PARTS) * (MISSING + 1)).to(device)
    parameters = [*module.parameters(), *part_head.parameters()]
    decayed, others = ([p for p in parameters if (p.ndim > 1) == is_matrix] for is_matrix in (True, False))
    groups = [{"params": decayed, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(groups, lr=arguments.rate, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda step: min(1, (step + 1) / warmup) * (1 + math.cos(math.pi * step / steps)) / 2
    )
    started, losses = time.monotonic(), []
    for step, rows in enumerate(batches(len(scenes), arguments.batch, steps, generator)):
        keep = random_keep(len(rows), generator)
        pixels, allowed = scenes.compose(rows, keep), compatible(scenes.labels[rows], keep).float()
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            features = module.forward_head(module.forward_features(pixels), pre_logits=True)  # type: ignore[operator]
            logits, part_logits = module.head(features), part_head(features)  # type: ignore[operator]
        loss = F.cross_entropy(logits.float(), allowed / allowed.sum(1, keepdim=True))
        loss = loss + arguments.part_loss * F.cross_entropy(
            part_logits.float().reshape(-1, MISSING + 1), visible_variants(scenes.labels[rows], keep).flatten()
        )
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
        schedule.step()
        losses.append(loss.detach())
        if (step + 1) % max(1, steps // 40) == 0:
            mean = torch.stack(losses).mean().item()
            losses.clear()
            print(f"step {step + 1}/{steps}: loss {mean:.4f}, {time.monotonic() - started:.0f} s", flush=True)


@torch.no_grad()
def share_compatible(module: nn.Module, scenes: Scenes, removed: int, distractors: bool = True) -> float:
    """Return how often the answer is a class with the visible parts, after `removed` random parts were removed."""
    device = scenes.labels.device
    generator = torch.Generator(device).manual_seed(removed)
    hits = 0.0
    for start in range(0, len(scenes), 500):
        rows = torch.arange(start, min(start + 500, len(scenes)), device=device)
        order = torch.rand(len(rows), len(PARTS), generator=generator, device=device).argsort(1).argsort(1)
        keep = torch.cat([order >= removed, torch.full((len(rows), MAX_DISTRACTORS), distractors, device=device)], 1)
        answers = module(scenes.compose(rows, keep)).argmax(1)
        hits += float(compatible(scenes.labels[rows], keep).gather(1, answers[:, None]).sum())
    return hits / len(scenes)


def write(module: nn.Module, path: Path) -> None:
    """Write float16 weights with architecture, labels and preprocessing in the header."""
    preprocess = Preprocess(size=(SIZE, SIZE), resize=SIZE, mean=(0.5,) * 3, std=(0.5,) * 3)
    header = weights_header.write(ARCH, OPTIONS, CLASSES, preprocess)
    write_tensors({name: tensor.half() for name, tensor in module.state_dict().items()}, header, path)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("parts-vit.safetensors"))
    parser.add_argument("--scenes", type=int, default=100_000)
    parser.add_argument("--epochs", type=float, default=60)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--part-loss", type=float, default=0.5, help="weight of the second head's cross-entropy")
    parser.add_argument("--validate", type=int, default=4_800)
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    return parser.parse_args()


def main() -> None:
    import timm

    arguments = parse()
    device, started = torch.device(arguments.device), time.monotonic()
    training = draw_scenes(TRAINING_SEED, arguments.scenes, arguments.workers)
    validation = draw_scenes(VALIDATION_SEED, arguments.validate, arguments.workers)
    print(f"{len(training)} + {len(validation)} scenes drawn in {time.monotonic() - started:.0f} s", flush=True)
    torch.manual_seed(arguments.seed)
    module = timm.create_model(ARCH, num_classes=len(CLASSES), img_size=SIZE, **OPTIONS).to(device)
    train(module.train(), training.to(device), arguments)
    module = module.half().float().eval()  # as it is written
    write(module, arguments.out)
    validation = validation.to(device)
    print(f"accuracy on {len(validation)} whole pictures: {share_compatible(module, validation, 0):.4f}")
    print(f"without distractors: {share_compatible(module, validation, 0, distractors=False):.4f}")
    for removed in range(1, len(PARTS)):
        share = share_compatible(module, validation, removed)
        print(f"{removed} of {len(PARTS)} parts removed, the answer has the parts left: {share:.4f}")
    print(f"wrote {arguments.out} after {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
