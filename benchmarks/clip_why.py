"""Measure why relevance rules fail on the cosine of a CLIP: shared direction, outlier tokens, norm, cancellation.

Usage:
    python benchmarks/clip_why.py --weights clip-vitb16-visual.safetensors --text-features clip-text.safetensors \
        --photos oxford-iiit-pet --limit 50 --device cuda --out why.json

Photos, texts and weights are those of clip_truth.py; the text is "cat" or "dog", whichever the photo shows. Printed:

* how much the texts of each table of the file have in common;
* what the cosine is made of: the part in the direction of the mean of the 20 texts, and the part that is left when no
  patch is (the class token alone);
* AP against the animal of the map of each target: the cosine; the mean of all texts alone ("shared"); the text with
  that direction projected out; the text with the direction of the mean image embedding projected out; the text minus
  the mean of the others ("neutral"); and the product x · t with the embedding x not divided by its length ("no norm");
* how alike (Spearman) the map of the cosine and that of the shared direction are, and their masses Σ|R|. The rules hold
  the norm fixed, so that maps add up: R(text) = R(in the shared direction) + R(rest);
* outlier patches (longer than twice the median at the last block): their number, their share of Σ|R|, and AP without
  them (they get the map's median);
* Σ|R| / |ΣR| over patches at each block's input: what cancels between patches.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from scipy.stats import spearmanr
from torch import Tensor
from torch.nn.functional import interpolate, normalize

import clairvit as cv
from clairvit.data.dataset import SampleBatch, iter_batches
from clairvit.data.open import open_data
from clairvit.metrics.confidence_intervals import mean_interval
from clairvit.metrics.localisation import average_precision_of
from clip_truth import VOC, chunk_rows, load_clip, species_of, text_target

METHODS = ("attnlrp+plus", "attnlrp", "reslrp", "decompx+skipplus", "genatt", "legrad")
SHARE = (0, 1)  # the range of AP
OUTLIER = 2.0  # times the median length of the patches


class Product:
    """The product of embeddings and a text, x · t, as a function of the module's output."""

    def __init__(self, text: Tensor) -> None:
        self.text = text

    def __call__(self, output: Tensor) -> Tensor:
        return output @ self.text.to(output)


def embeddings(model: cv.Model, pixels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the unit embeddings of images [B, d] and of no patch at all [d], and the last block's input [B, N, D]."""
    module: Any = model.module
    inputs: list[Tensor] = []
    hook = module.blocks[-1].register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    with torch.no_grad():
        whole = module(pixels.to(model.device))
        hook.remove()
        token = module.norm_pre(module.cls_token + module.pos_embed[:, :1])
        empty = module.head(module.norm(module.blocks(token))[:, 0])
    return normalize(whole, dim=-1).cpu().double(), normalize(empty, dim=-1)[0].cpu().double(), inputs[0].cpu()


def without(vector: Tensor, direction: Tensor) -> Tensor:
    """Return a vector [d] with a direction projected out."""
    unit = normalize(direction, dim=0)
    return vector - (vector @ unit) * unit


def targets_of(word: str, texts: Tensor, mean_image: Tensor) -> dict[str, cv.targets.Target]:
    """Return the targets that are compared, for one word."""
    text, mean = texts[VOC.index(word)], texts.mean(0)

    def of(vector: Tensor) -> cv.targets.Target:
        return cv.Text(word, embedding=vector, against=None)  # of length 1, which scales a map and no more

    return {
        "cosine": text_target("cosine", word, texts),
        "shared": of(mean),
        "without the shared direction": of(without(text, mean)),
        "without the mean image": of(without(text, mean_image.to(text))),
        "neutral": text_target("neutral", word, texts),
        "no norm": cv.Output(Product(text), name=word),
    }


def average_precision(maps: Tensor, batch: SampleBatch) -> list[float]:
    """Return AP of maps [B, h, w] against the animals of a batch, each patch as large as it is."""
    assert batch.masks is not None
    assert batch.void is not None
    values = interpolate(maps[:, None].double(), size=batch.masks.shape[1:], mode="nearest")[:, 0]
    return [float(v) for v in average_precision_of(values, batch.masks, ~batch.void)]


def outlier_record(maps: Tensor, outliers: Tensor, batch: SampleBatch) -> dict[str, list[float]]:
    """Return the share of Σ|R| on outlier patches [B, n], and AP of maps [B, h, w] where they get the map's median."""
    flat = maps.flatten(1)
    share = (flat.abs() * outliers).sum(1) / flat.abs().sum(1)
    filled = torch.where(outliers, flat.median(1, keepdim=True).values, flat).reshape(maps.shape)
    return {"share": share.tolist(), "ap": average_precision(filled, batch)}


def score_group(
    model: cv.Model, batch: SampleBatch, word: str, texts: Tensor, mean_image: Tensor, methods: Sequence[str]
) -> dict[str, Any]:
    """Return everything that is measured of photos of one species."""
    whole, empty, tokens = embeddings(model, batch.pixels)
    text, shared = texts[VOC.index(word)].double(), normalize(texts.mean(0).double(), dim=0)
    lengths = tokens[:, 1:].norm(dim=-1)  # [B, n], without the class token
    outliers = lengths > OUTLIER * lengths.median(1, keepdim=True).values
    in_background = ~(interpolate(batch.masks[:, None].double(), size=(14, 14), mode="area")[:, 0].flatten(1) > 0)  # type: ignore[index]
    neutral = text - (texts.sum(0).double() - text) / (len(texts) - 1)
    record: dict[str, Any] = {
        "cosine": (whole @ text).tolist(),
        "cosine, shared direction": ((whole @ shared) * (text @ shared)).tolist(),
        "cosine, no patch": [float(empty @ text)] * len(whole),
        "neutral": (whole @ neutral).tolist(),
        "neutral, no patch": [float(empty @ neutral)] * len(whole),
        "outliers": outliers.sum(1).tolist(),
        "outliers in the background": (outliers & in_background).sum(1).tolist(),
        "ap": {},
        "without outliers": {},
        "cancels": {},
    }
    maps: dict[tuple[str, str], Tensor] = {}
    targets = targets_of(word, texts, mean_image)
    for name in targets:
        explanations = cv.compare(model, batch.pixels, list(methods), target=targets[name], layers=True)
        for method, explanation in explanations.items():
            maps[name, method] = explanation.maps.cpu()
            record["ap"][f"{name}/{method}"] = average_precision(explanation.maps.cpu(), batch)
            if name in ("cosine", "neutral"):
                record["without outliers"][f"{name}/{method}"] = outlier_record(explanation.maps.cpu(), outliers, batch)
            if explanation.layers is not None and method in ("attnlrp+plus", "reslrp"):
                layers = explanation.layers.cpu().double().flatten(2)  # [L, B, n]
                ratio = layers.abs().sum(2) / layers.sum(2).abs()
                record["cancels"][f"{name}/{method}"] = ratio.T.tolist()
    for method in methods:
        pairs = zip(maps["cosine", method].flatten(1), maps["shared", method].flatten(1), strict=True)
        record.setdefault("spearman", {})[method] = [float(spearmanr(a, b).statistic) for a, b in pairs]
        scale = float(texts[VOC.index(word)].double() @ shared)  # cos = scale · (cosine with shared) + the rest
        in_shared = scale * maps["shared", method]
        rest = maps["cosine", method] - in_shared
        masses = in_shared.abs().sum((1, 2)) / rest.abs().sum((1, 2))
        record.setdefault("mass of shared over rest", {})[method] = masses.tolist()
    return record


def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the records of all groups of photos."""
    model = load_clip(arguments.weights, arguments.device)
    texts = load_file(arguments.text_features)["voc20"]
    dataset = open_data(f"pets:{arguments.photos}", limit=arguments.limit).dataset
    words = species_of(dataset.names, arguments.photos)
    with torch.no_grad():
        wholes = [embeddings(model, batch.pixels)[0] for batch in iter_batches(dataset, model, arguments.batch)]
    mean_image = torch.cat(wholes).mean(0)
    records = []
    for rows in chunk_rows(len(dataset)):
        for word in ("cat", "dog"):
            group = dataset.take([row for row in rows if words[row] == word])
            for batch in iter_batches(group, model, arguments.batch):
                records.append(
                    {"word": word} | score_group(model, batch, word, texts, mean_image, arguments.methods.split(";"))
                )
                arguments.out.write_text(json.dumps(records) + "\n", encoding="utf-8")
    return records


def gathered(records: list[dict[str, Any]], *path: str) -> Tensor:
    """Return the values under a path of keys of all records, [n, …]."""
    values: list[Any] = []
    for record in records:
        item: Any = record
        for key in path:
            item = item[key]
        values += item
    return torch.tensor(values, dtype=torch.float64)


def cell(values: Tensor, span: tuple[float, float] = (-math.inf, math.inf)) -> str:
    """Return mean and 95 % interval; `span` is the range of a value."""
    low, high = mean_interval(values.numpy(), 0, span)
    return f"{values.mean():.3f} [{low:.3f}, {high:.3f}]".replace("-", "−")


def print_texts(tables: dict[str, Tensor]) -> None:
    """Print how much the texts of each table have in common, and their means with the mean of VOC's."""
    reference = normalize(normalize(tables["voc20"], dim=-1).mean(0), dim=0)
    print("| texts | number | cosine of two | cosine with their mean | cosine of their mean and VOC's |")
    print("|---|---|---|---|---|")
    for name, table in tables.items():
        unit = normalize(table, dim=-1)
        mean = normalize(unit.mean(0), dim=0)
        among = (unit @ unit.T)[~torch.eye(len(unit), dtype=torch.bool)]
        values = (among.mean(), (unit @ mean).mean(), mean @ reference)
        print(f"| {name} | {len(unit)} | {' | '.join(f'{float(value):.3f}' for value in values)} |")


def print_report(records: list[dict[str, Any]]) -> None:
    """Print what the file of a run holds as Markdown."""
    methods = list(records[0]["spearman"])
    print(f"\n{len(gathered(records, 'cosine'))} photos.\n")
    for key in ("cosine", "cosine, shared direction", "cosine, no patch", "neutral", "neutral, no patch"):
        print(f"* {key}: {cell(gathered(records, key))}")
    for key in ("outliers", "outliers in the background"):
        print(f"* {key}, patches of 196: {cell(gathered(records, key))}")
    names = list(dict.fromkeys(key.rpartition("/")[0] for key in records[0]["ap"]))
    print(f"\n| AP of the target | {' | '.join(f'`{method}`' for method in methods)} |\n{'|---' * (len(methods) + 1)}|")
    for name in names:
        cells = [cell(gathered(records, "ap", f"{name}/{method}"), SHARE) for method in methods]
        print(f"| {name} | {' | '.join(cells)} |")
    for name in names[1:]:
        pairs = [[gathered(records, "ap", f"{part}/{method}") for part in (name, names[0])] for method in methods]
        print(f"| {name}, minus that of the {names[0]} | {' | '.join(cell(a - b) for a, b in pairs)} |")
    for name in ("cosine", "neutral"):
        for title, key in (("without outliers", "ap"), ("share of Σ∣R∣ on outliers", "share")):
            cells = [cell(gathered(records, "without outliers", f"{name}/{m}", key), SHARE) for m in methods]
            print(f"| {name}: {title} | {' | '.join(cells)} |")
        parts = [
            gathered(records, "without outliers", f"{name}/{m}", "ap") - gathered(records, "ap", f"{name}/{m}")
            for m in methods
        ]
        print(f"| {name}: what leaving outliers out adds to AP | {' | '.join(map(cell, parts))} |")
    for key in ("spearman", "mass of shared over rest"):
        print(f"| {key} | {' | '.join(cell(gathered(records, key, method)) for method in methods)} |")
    for key in records[0]["cancels"]:
        ratios = gathered(records, "cancels", key).median(0).values
        print(f"\n{key}: median of Σ|R| / |ΣR| by block " + " ".join(f"{float(v):.1f}" for v in ratios))


def main() -> None:
    """Run, write the file and print the report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--text-features", type=Path)
    parser.add_argument("--photos", type=Path, help="the folder of Oxford-IIIT Pet")
    parser.add_argument("--limit", type=int, default=50)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--methods", default=";".join(METHODS), help="separated by ';'")
    parser.add_argument("--batch", type=int, default=10, help="photos that are explained together")
    parser.add_argument("--table", action="store_true", help="print the report of the file, and run nothing")
    parser.add_argument("--out", type=Path, default=Path("why.json"), help="written after each group of photos")
    arguments = parser.parse_args()
    records = json.loads(arguments.out.read_text(encoding="utf-8")) if arguments.table else run(arguments)
    if arguments.text_features is not None:
        print_texts(load_file(arguments.text_features))
    print_report(records)


if __name__ == "__main__":
    main()
