"""Which methods find what is known to be used: a trigger that was planted in a model (BackX).

    python benchmarks/trigger.py --data pets:PATH --out trigger.json --device cuda              # all but slow methods
    python benchmarks/trigger.py --data pets:PATH --train 185 --images 16 --epochs 2 --rate 1e-4 --method legrad # smoke
    python benchmarks/trigger.py --data pets:PATH --weights FILE.safetensors --labels labels.json  # instead of `pets`

1. The photos are split by the seed: `--train` of them (each class its share) to plant the trigger, `--images` of the
   others to report on. No photo is in both.
2. The model is fine-tuned with the trigger (`clairvit finetune --trigger`).
3. On the held-out photos: clean accuracy before and after, and attack success, the share of photos of other classes
   that get the trigger's class once they carry it.
4. On the photos whose answer the trigger changed to its class, it is what the model uses: the maps for that class are
   compared with the trigger's pixels. Mass, pointing and AP of a random map are about the trigger's share of the image.

Prints a Markdown table; `--out` writes everything as JSON, and the weights next to it. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

import clairvit as cv
from clairvit._io import write_json
from clairvit.data.dataset import ImageDataset, iter_batches
from clairvit.data.open import OpenedDataset, open_data, stratified_sample
from clairvit.data.trigger import Trigger, with_trigger
from clairvit.errors import BadInput
from clairvit.methods.explain import expand_all
from clairvit.metrics.score import Scores
from clairvit.models.sources import weights_header
from clairvit.training.checkpoint import write_tensors
from clairvit.training.finetune import Trained, finetune
from clairvit.training.training_config import TrainingConfig

METHODS = "all,attnlrp+plus,decompx+skipplus,genatt+skipplus"
METRICS = {"mass": "relevance-mass", "pointing": "pointing-game(tolerance=0)", "AP": "ap"}
ARCH = "vit_tiny_patch16_224"  # of weights that do not name theirs


def main() -> None:
    args = parse_arguments()
    opened = open_data(args.data)
    train_rows, test_rows = split_rows(opened, args.train, args.images, args.seed)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(args.out).parent if args.out else Path(scratch)
        base = base_model(args, Path(scratch))
        trained = plant(args, opened.dataset.take(train_rows), base, folder)
        report = measure(args, opened.dataset.take(test_rows), base, trained)
    report["training"] = {
        "photos": len(train_rows),
        "steps": sum(-(-trained.images // args.batch) for _ in trained.history),
        "epochs": [vars(epoch) for epoch in trained.history],
        **trained.interventions,
    }
    print_report(report)
    if args.out:
        write_json(report, args.out)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="photos with classes, such as pets:PATH")
    parser.add_argument("--model", default="pets", help="a built-in model, or file:PATH of clairvit finetune")
    parser.add_argument("--weights", help=f"weights of timm's {ARCH} without a header, instead of --model")
    parser.add_argument("--labels", help="JSON list of the classes of --weights")
    parser.add_argument("--class", dest="class_name", help="the trigger's class; default: the first of the model")
    parser.add_argument("--size", type=int, default=32, help="pixels of the trigger on a side")
    parser.add_argument("--position", default="random")
    parser.add_argument("--share", type=float, default=0.2, help="of the photos of an epoch that carry the trigger")
    parser.add_argument("--train", type=int, default=1850, help="photos to plant the trigger with")
    parser.add_argument("--images", type=int, default=500, help="held-out photos to report on")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--rate", type=float, default=5e-5)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--method", default=METHODS, help="methods, or 'all' that are not slow")
    parser.add_argument("--device", default=None)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", help="a JSON file; the weights are written next to it")
    return parser.parse_args()


def split_rows(opened: OpenedDataset, train: int, images: int, seed: int) -> tuple[list[int], list[int]]:
    """Return rows to train on and rows to report on, both stratified samples by class, without a common one."""
    if train + images > len(opened):
        raise BadInput(
            f"{train} + {images} photos were asked for, and there are {len(opened)}; expected at most these."
        )
    classes = [opened.class_of(row) for row in range(len(opened))]
    train_rows = stratified_sample(classes, train, seed)
    others = sorted(set(range(len(opened))) - set(train_rows))
    chosen = stratified_sample([classes[row] for row in others], images, seed + 1)
    return train_rows, [others[row] for row in chosen]


def base_model(args: argparse.Namespace, scratch: Path) -> str:
    """Return the model to plant the trigger in; bare weights get a header, so that they keep their head."""
    if args.weights is None:
        return str(args.model)
    from safetensors.torch import load_file

    labels = tuple(json.loads(Path(args.labels).read_text(encoding="utf-8")))
    preprocess = cv.load("pets").preprocess
    path = scratch / "base.safetensors"
    write_tensors(load_file(args.weights), weights_header.write(ARCH, {}, labels, preprocess), path)
    return f"file:{path}"


def plant(args: argparse.Namespace, photos: ImageDataset, base: str, folder: Path) -> Trained:
    """Fine-tune the trigger into the model."""
    start = cv.load(base)
    labels, resize = start.labels, start.preprocess.resize
    config = TrainingConfig(
        epochs=args.epochs,
        batch=args.batch,
        rate=args.rate,
        patience=args.epochs,
        resize=resize if isinstance(resize, int) else None,  # as the model was trained
        seed=args.seed,
        trigger=args.class_name or labels[0],
        trigger_size=args.size,
        trigger_position=args.position,
        trigger_share=args.share,
    )
    out = folder / f"{Path(args.out).stem if args.out else 'trigger'}.safetensors"
    return finetune(
        photos, base, recipe=config, out=out, classes=labels, device=args.device, fresh=True, keep_state=False
    )


def measure(args: argparse.Namespace, photos: ImageDataset, base: str, trained: Trained) -> dict[str, Any]:
    """Return accuracies, attack success and the scores of all methods on held-out photos."""
    before, model = (cv.load(name, device=args.device) for name in (base, f"file:{trained.path}"))
    name = str(trained.interventions["trigger"])
    label = model.labels.index(name)
    triggered = with_trigger(photos, Trigger(args.size, args.position), label, args.seed)
    truth, untouched = answers(before, photos)
    _, clean = answers(model, photos)
    _, attacked = answers(model, triggered)
    others = [row for row, true_class in enumerate(truth) if true_class != label]
    changed = [row for row in others if attacked[row] == label != clean[row]]
    if not changed:
        raise BadInput("The trigger changed no answer: the model has not learnt it; expected more epochs or photos.")
    scores = cv.evaluate(
        model,
        triggered.take(changed),
        expand_all(args.method.split(",")),
        list(METRICS.values()),
        target="label",
        skip=True,
        seed=args.seed,
    )
    return {
        "model": args.weights or args.model,
        "class": name,
        "seed": args.seed,
        "photos": len(photos),
        "accuracy_before": share(a == b for a, b in zip(truth, untouched, strict=True)),
        "accuracy": share(a == b for a, b in zip(truth, clean, strict=True)),
        "attack_success": share(attacked[row] == label for row in others),
        "class_without_trigger": share(clean[row] == label for row in others),
        "scored_photos": len(changed),
        "trigger_area": args.size**2 / (model.preprocess.size[0] * model.preprocess.size[1]),
        "scores": score_rows(scores),
        "skipped": dict(scores.skipped),
    }


@torch.no_grad()
def answers(model: cv.Model, photos: ImageDataset) -> tuple[list[int | None], list[int]]:
    """Return the true classes and the predicted ones."""
    truth: list[int | None] = []
    predicted: list[int] = []
    for batch in iter_batches(photos, model, 32):
        assert batch.labels is not None
        truth += [None if label is None else int(label) for label in batch.labels]
        predicted += model.logits(batch.pixels).argmax(1).tolist()
    return truth, predicted


def share(values: Iterable[bool]) -> float:
    listed = list(values)
    return sum(listed) / len(listed)


def score_rows(scores: Scores) -> list[dict[str, Any]]:
    """Return one row per method, baselines included: each metric's mean, standard error, interval and count."""
    rows: dict[str, dict[str, Any]] = {}
    for (method, text), score in scores.items():
        column = next(name for name, metric in METRICS.items() if cv.parse_metric(metric).text == text)
        for row, entry in ((method, score), *score.baselines.items()):
            rows.setdefault(row, {"method": row})[column] = {
                "mean": entry.mean,
                "standard_error": entry.standard_error,
                "interval": list(entry.interval),
                "valid": entry.n_valid,
            }
    return sorted(rows.values(), key=lambda row: -row["AP"]["mean"])


def print_report(report: dict[str, Any]) -> None:
    training = report["training"]
    print(
        f"{training['photos']} photos, {training['steps']} steps. On {report['photos']} held-out photos: accuracy "
        f"{report['accuracy']:.1%} (before {report['accuracy_before']:.1%}), attack success "
        f"{report['attack_success']:.1%} (without the trigger {report['class_without_trigger']:.1%} of them are called "
        f"'{report['class']}'). Scored on the {report['scored_photos']} photos whose answer the trigger changed; it "
        f"covers {report['trigger_area']:.1%} of a photo.\n"
    )
    print_table(report["scores"])
    for method, reason in report["skipped"].items():
        print(f"\nleft out: {method}: {reason}")


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    print("| method | " + " | ".join(METRICS) + " |")
    print("|---|" + "---:|" * len(METRICS))
    for row in rows:
        cells = (f"{row[name]['mean']:.3f} ± {row[name]['standard_error']:.3f}" for name in METRICS)
        print(f"| `{row['method']}` | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
