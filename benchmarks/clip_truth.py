"""Score methods on a real CLIP: maps of the texts "cat" and "dog" against the animal in photos of Oxford-IIIT Pet.

Usage:
    python benchmarks/clip_truth.py --weights clip-vitb16-visual.safetensors --text-features clip-text.safetensors \
        --photos oxford-iiit-pet --limit 200 --insertion 200 --device cuda --out clip.json
    python benchmarks/clip_truth.py --table clip.json                    # the tables of a run

`--weights` holds the image tower of OpenAI's CLIP ViT-B/16 (open_clip's names, `visual.*`), which timm's
`vit_base_patch16_clip_quickgelu_224` takes, and `--text-features` one table of text embeddings [texts, 512] per set, of
which `voc20` (the classes of Pascal VOC, in their order) is read. Nothing is downloaded; torch and timm are enough.

Three scores are explained: `cosine`, cos(image, text); `neutral`, that minus its mean over the other 19 texts; `pair`,
cos(image, "cat") − cos(image, "dog") or the other way round. A fourth, `--scores image`, is the cosine to another photo
of the same breed. Metrics: AP, IoU at the mean and pointing game against the animal; insertion − deletion of the score
(tokens removed; not of `image`), divided by |f(x) − f(nothing left)|, and in hundredths of a cosine; `--autocast
bfloat16` makes its passes quicker and less exact. Photos are a stratified sample over breeds; even rows choose (tuning
half), odd rows judge (judging half). The values of every photo are written after each chunk, and a run that was cut off
goes on from there.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

import clairvit as cv
from clairvit.data.dataset import ImageDataset, iter_batches
from clairvit.data.open import open_data
from clairvit.metrics.confidence_intervals import mean_interval

ARCHITECTURE = "timm:vit_base_patch16_clip_quickgelu_224"
VOC = (
    *("aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow", "dining table", "dog"),
    *("horse", "motorbike", "person", "potted plant", "sheep", "sofa", "train", "tv monitor"),
)
BASELINES = ("random", "center")
COMBINED = ("attnlrp", "reslrp", "decompx", "ixg", "genatt", "raw-attention")  # with +skipplus; the first four +plus
SINGLE = (
    *("raw-attention", "rollout", "genatt", "gradsam", "grad-rollout", "attcam", "gmar-l1", "gmar-l2", "focusvit"),
    *("legrad", "legrad(preset=official)", "ag-cam", "attcat", "libra-attcat", "libra-genatt", "tokentm", "ixg"),
    *("vanilla-l2", "saliency", "fullgrad", "fullgrad-plus", "libra-fullgrad-plus", "gradcam", "gradcam-pp"),
    *("layercam", "xgradcam-plus", "libra-xgradcam-plus", "attnlrp", "reslrp", "decompx", "transatt", "alti"),
)
METHODS = (*SINGLE, *(f"{method}+plus" for method in COMBINED[:4]), *(f"{method}+skipplus" for method in COMBINED))
SCORES = ("cosine", "neutral", "pair")
IMAGE = "image"
MASK_METRICS = ("ap", "iou(threshold=mean)", "pointing-game")
FAITHFUL, IN_COSINE = "insertion-deletion", "in cosine"
LEGRAD = "legrad"
SHARE = (0, 1)  # the range of AP, IoU and the pointing game
CHUNK = 20  # photos


def load_clip(weights: Path, device: str) -> cv.Model:
    """Return the image tower as an embedding of images."""
    return cv.load(f"file:{weights}", arch=ARCHITECTURE, device=device)


def species_of(names: tuple[str, ...], photos: Path) -> list[str]:
    """Return "cat" or "dog" of each photo, as the list of the data set has it."""
    lines = (photos / "annotations" / "test.txt").read_text(encoding="utf-8").splitlines()
    kinds = {line.split()[0]: line.split()[2] for line in lines if line and not line.startswith("#")}
    return ["cat" if kinds[Path(name).stem] == "1" else "dog" for name in names]


def partners(names: tuple[str, ...], photos: Path) -> list[Path]:
    """Return for each photo one of the same breed that is not among them."""
    every = sorted(path.stem for path in (photos / "images").glob("*.jpg"))
    free = set(every) - {Path(name).stem for name in names}
    breeds = [Path(name).stem.rpartition("_")[0] for name in names]
    chosen = [next(stem for stem in every if stem in free and stem.rpartition("_")[0] == breed) for breed in breeds]
    return [photos / "images" / f"{stem}.jpg" for stem in chosen]


def text_target(score: str, word: str, texts: Tensor) -> cv.targets.Target:
    """Return one of the three scores for a word; texts [20, d] are the embeddings of `VOC`."""
    row = VOC.index(word)
    if score == "cosine":
        return cv.Text(word, embedding=texts[row], against=None)
    others = [VOC.index("dog" if word == "cat" else "cat")] if score == "pair" else [k for k in range(20) if k != row]
    return cv.Text(word, embedding=texts[row], against=texts[others])


@torch.no_grad()
def ranges(model: cv.Model, dataset: ImageDataset, texts: Tensor, words: list[str], score: str) -> list[float]:
    """Return |f(x) − f(nothing left)| of each photo: what insertion − deletion is divided by."""
    module: Any = model.module
    differences = []
    for batch in iter_batches(dataset, model, CHUNK):
        whole = torch.nn.functional.normalize(module(batch.pixels.to(model.device)).double(), dim=-1).cpu()
        token = module.norm_pre(module.cls_token + module.pos_embed[:, :1])  # the class token alone
        empty = module.head(module.norm(module.blocks(token))[:, 0]).double()
        empty = torch.nn.functional.normalize(empty, dim=-1).cpu()
        for row, embedding in zip(batch.rows, whole, strict=True):
            target: Any = text_target(score, words[row], texts)
            direction = target.embedding.values[0].double()
            if target.against:
                direction = direction - target.against.values.double().mean(0)
            differences.append(abs(float((embedding - empty[0]) @ direction)))
    return differences


def score_chunk(
    model: cv.Model,
    part: ImageDataset,
    targets: list[cv.targets.Target],
    arguments: argparse.Namespace,
    *,
    faithful: bool,
) -> dict[str, dict[str, list[float]]]:
    """Return method -> metric -> the value of each photo of a chunk."""
    values: dict[str, dict[str, list[float]]] = {}

    jobs: list[tuple[str, list[str]]] = [(arguments.methods, list(MASK_METRICS))]
    if faithful:
        jobs.append((arguments.faithful, [f"{FAITHFUL}(steps={arguments.steps})"]))
    for methods, metrics in jobs:
        listed = list(dict.fromkeys((*methods.split(";"), *BASELINES)))
        scores = cv.evaluate(
            model, part, listed, metrics, target=targets, skip=True, baselines=False, autocast=arguments.autocast
        )
        for (method, metric), result in scores.items():
            name = metric.partition("(")[0]
            values.setdefault(method, {})[name] = [round(float(v), 5) for v in result.values]
    return values


def chunk_rows(count: int) -> list[list[int]]:
    """Return the rows of each chunk, spread over the data set: a run that was cut off has a sample of all breeds.

    Their number is odd, so that each chunk has rows of both halves.
    """
    chunks = max(1, round(count / CHUNK)) | 1
    return [list(range(k, count, chunks)) for k in range(chunks)]


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Score all chunks that the file has not yet, and return what it then holds."""
    model = load_clip(arguments.weights, arguments.device)
    texts = load_file(arguments.text_features)["voc20"]
    dataset = open_data(f"pets:{arguments.photos}", limit=arguments.limit).dataset
    words = species_of(dataset.names, arguments.photos)
    record: dict[str, Any] = {"chunks": {}}
    if arguments.out.is_file():
        record = json.loads(arguments.out.read_text(encoding="utf-8"))
    record |= {"model": "OpenAI CLIP ViT-B/16 (int8 weights)", "steps": arguments.steps, "device": str(model.device)}
    record["autocast"] = arguments.autocast
    record["photos"] = [Path(name).stem for name in dataset.names]
    started, scored = time.monotonic(), 0
    for number, rows in enumerate(chunk_rows(len(dataset))):
        part, chunk_words = dataset.take(rows), [words[row] for row in rows]
        faithful = scored < arguments.insertion
        scored += len(rows)
        for score in arguments.scores.split(","):
            key = f"{score}/{number}"
            if key in record["chunks"]:
                continue
            targets: list[cv.targets.Target] = (
                [cv.Similar(path) for path in partners(part.names, arguments.photos)]
                if score == IMAGE
                else [text_target(score, word, texts) for word in chunk_words]
            )
            values = score_chunk(model, part, targets, arguments, faithful=faithful and score != IMAGE)
            spans = [] if score == IMAGE else ranges(model, part, texts, chunk_words, score)
            record["chunks"][key] = {"rows": rows, "range": spans, "values": values}
            arguments.out.write_text(json.dumps(record) + "\n", encoding="utf-8")
            print(f"{key}: {time.monotonic() - started:.0f} s", flush=True)
    return record


def joined(record: dict[str, Any], score: str) -> dict[str, dict[str, dict[int, float]]]:
    """Return method -> metric -> row -> value of all chunks of a score; also insertion − deletion in 1/100 cosine."""
    table: dict[str, dict[str, dict[int, float]]] = {}
    for key, chunk in record["chunks"].items():
        if key.partition("/")[0] != score:
            continue
        for method, metrics in chunk["values"].items():
            for metric, values in metrics.items():
                by_row = table.setdefault(method, {}).setdefault(metric, {})
                by_row |= dict(zip(chunk["rows"], values, strict=True))
                if metric == FAITHFUL:
                    in_cosine = [100 * v * span for v, span in zip(values, chunk["range"], strict=True)]
                    table[method].setdefault(IN_COSINE, {}).update(zip(chunk["rows"], in_cosine, strict=True))
    return table


def halves(values: dict[int, float]) -> dict[str, list[float]]:
    """Return the values of all photos, of the tuning half (even rows) and of the judging half (odd rows)."""
    finite = {row: value for row, value in values.items() if value == value}
    return {
        "all": list(finite.values()),
        "tune": [value for row, value in finite.items() if row % 2 == 0],
        "judge": [value for row, value in finite.items() if row % 2 == 1],
    }


def mean_cell(values: list[float], span: tuple[float, float] = (-math.inf, math.inf)) -> str:
    """Return mean and 95 % interval of a table's cell; `span` is the range of a value."""
    if not values:
        return "–"
    low, high = mean_interval(np.array(values), 0, span)
    return f"{np.mean(values):.3f} [{low:.3f}, {high:.3f}]".replace("-", "−")


def paired(values: dict[int, float], others: dict[int, float], half: str) -> list[float]:
    """Return the differences of two methods on the photos of a half that both have a value of."""
    rows = values.keys() & others.keys()
    return halves({row: values[row] - others[row] for row in sorted(rows)})[half]


def print_tables(record: dict[str, Any]) -> None:
    """Print a Markdown table per score, best AP on the tuning half first, and what the judging half says of the best.

    The column of differences is to the method that is the best on the tuning half, of those scored on all photos.
    """
    scores = dict.fromkeys(key.partition("/")[0] for key in record["chunks"])
    for score in scores:
        table = joined(record, score)
        counts = {m: max((len(by[m]) for by in table.values() if m in by), default=0) for m in ("ap", FAITHFUL)}
        print(f"\n**{score}**: {counts['ap']} photos, insertion − deletion on {counts[FAITHFUL]}\n")
        ranked = sorted(table, key=lambda name: -float(np.mean(halves(table[name]["ap"])["tune"])))
        best = next(m for m in ranked if m not in BASELINES and len(table[m]["ap"]) == counts["ap"])
        titles = [
            "method",
            "photos",
            "AP, tuning half",
            "AP, judging half",
            f"minus `{best}`, judging half",
            "IoU",
            "pointing",
        ]
        faithful = any(IN_COSINE in by for by in table.values())
        titles += ["ins − del, 1/100 cosine", "minus `legrad`"] if faithful else []
        print(f"| {' | '.join(titles)} |\n{'|---' * len(titles)}|")
        behind = 0
        for method in ranked:
            by = table[method]
            gaps = paired(by["ap"], table[best]["ap"], "judge")
            behind += bool(mean_interval(np.array(gaps))[1] < 0)
            ap = halves(by["ap"])
            cells = [str(len(by["ap"])), f"{np.mean(ap['tune']):.3f}", mean_cell(ap["judge"], SHARE)]
            cells.append("–" if method == best else mean_cell(gaps))
            cells += [mean_cell(halves(by[metric])["all"], SHARE) for metric in ("iou", "pointing-game")]
            if faithful:
                against = {} if method == LEGRAD else table[LEGRAD].get(IN_COSINE, {})
                cells.append(mean_cell(halves(by.get(IN_COSINE, {}))["all"]))
                cells.append(mean_cell(paired(by.get(IN_COSINE, {}), against, "all")))
            print(f"| `{method}` | {' | '.join(cells)} |")
        print(f"\nOn the judging half `{best}` is surely ahead of {behind} of {len(ranked) - 1} others by AP.")


def main() -> None:
    """Run, or print the tables of a run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--text-features", type=Path)
    parser.add_argument("--photos", type=Path, help="the folder of Oxford-IIIT Pet")
    parser.add_argument("--limit", type=int, default=200)
    parser.add_argument("--insertion", type=int, default=200, help="photos of insertion − deletion")
    parser.add_argument("--steps", type=int, default=9, help="of insertion − deletion")
    parser.add_argument("--scores", default=",".join(SCORES), help=f"of {', '.join((*SCORES, IMAGE))}")
    parser.add_argument("--methods", default=";".join(METHODS), help="separated by ';'")
    parser.add_argument("--faithful", default=";".join(METHODS), help="those scored by insertion − deletion")
    parser.add_argument("--autocast", choices=["bfloat16", "float16"], help="precision of the passes of a metric")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=Path("clip.json"))
    parser.add_argument("--table", type=Path, help="print the tables of this file, and run nothing")
    arguments = parser.parse_args()
    print_tables(json.loads(arguments.table.read_text(encoding="utf-8")) if arguments.table else run(arguments))


if __name__ == "__main__":
    main()
