"""Public functions, each as one small call that uses a model, for tests of guarantees about models.

A new public function is one more line of VERBS.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import clairvit as cv
from helpers.tiny_models import pixels

NAME = "timm-vit"
TARGET = 3
STATUSES = ("pass", "warn", "fail", "skip")
# One method or more of each way to make a map.
KINDS = {
    "attention": "rollout",
    "gradient": "ixg",
    "attention and gradient": "genatt",
    "one block": "legrad",
    "rules": "attnlrp",
    "two tables": "transatt",
    "biases": "fullgrad",
    "inside blocks": "alti",
    "CAM": "gradcam",
    "many passes": "smoothgrad(n=3)",
    "path": "integrated-gradients(steps=3)",
    "tokens dropped": "leave-one-out",
    "perturbation": "rise(samples=8)",
    "surrogate": "lime(samples=24)",
    "attention suppressed": "atman",
    "activations replaced": "caap",
    "residual sums": "reslrp",
    "combined": "ensemble(smooth(ixg,n=2),shift(ixg,n=2),raw-attention)",
}
METRICS = [
    "deletion(steps=3)",
    "faithfulness-correlation(runs=6)",
    "max-sensitivity(samples=2)",
    "mprt(layers=2)",
    "sparseness",
]


def image(batch: int = 1) -> Tensor:
    """Return preprocessed noise."""
    return pixels(NAME, batch=batch)


def explain(module: nn.Module, method: str) -> Any:
    return cv.explain(cv.wrap(module), image(), method, target=TARGET)


def compare(module: nn.Module) -> Any:
    return cv.compare(cv.wrap(module), image(2), ["genatt", "attnlrp", "rollout", "cam"], target=TARGET, skip=True)


def trace(module: nn.Module) -> Any:
    traced = cv.trace(cv.wrap(module), image(), target=TARGET, rules="attnlrp").retarget(1)
    return traced.layers[0].A, traced.layers[0].G


def evaluate(module: nn.Module) -> Any:
    return cv.evaluate(cv.wrap(module), image(2), ["genatt", "leave-one-out"], METRICS, target=TARGET)


def choose(module: nn.Module) -> Any:
    panel, metrics = ["genatt", "ixg"], ["deletion(steps=2)", "sparseness"]
    return cv.choose(cv.wrap(module), image(4), panel, metrics, target=TARGET, tune_start=["genatt"])


def calibrate(module: nn.Module) -> Any:
    recipe = cv.calibrate(cv.wrap(module), image(8), target=TARGET, sets=2, metrics=["deletion(steps=1)"])
    assert recipe.calibration is not None
    return torch.tensor(list(recipe.calibration.weights.values()), dtype=torch.float64)


def doctor(module: nn.Module) -> Any:
    return cv.doctor(cv.wrap(module), image())


def check_maps(module: nn.Module) -> Any:
    maps = torch.arange(32.0).reshape(2, 4, 4)
    return cv.check_maps(cv.wrap(module), image(2), maps, target=TARGET, method="genatt")


def certify(module: nn.Module) -> Any:
    """Certify, mark and test: the sizes of the photos, and which patches are marked."""
    certificate = cv.certify(cv.wrap(module), image(4), "genatt", 0.5)
    marked = cv.explain(cv.wrap(module), image(1), "genatt").certify(certificate, test=True)
    return torch.tensor(certificate.sizes, dtype=torch.float64), marked.patches


def reference(module: nn.Module) -> Any:
    return cv.reference(cv.wrap(module), image(20)).embeddings


def expect(module: nn.Module) -> Any:
    masks = torch.zeros(2, 32, 32, dtype=torch.bool)
    masks[:, :16, :24] = True
    result = cv.expect(cv.wrap(module), image(2), masks, "genatt", TARGET, against=cv.wrap(module))
    return result.inside, result.without_inside, result.random_outside


def mistakes(module: nn.Module) -> Any:
    return cv.mistakes(cv.wrap(module), image(2), "genatt", labels=[TARGET, TARGET], unsure=1.0).differences


def features(module: nn.Module) -> Any:
    return cv.features(cv.wrap(module), image(2), layer="all", foreground="positive", batch_size=1)


def intervene(module: nn.Module) -> Any:
    sites = {
        cv.Site(0, tokens=[1, 2]): "mean",
        cv.Site(0, head=1): "zero",
        cv.Site(1): "source",
        cv.Site(1, part="mlp"): "zero",
    }
    scores = cv.intervene(cv.wrap(module), image(2), sites, source=image())
    return scores.original, scores.intervened


def intervene_sweep(module: nn.Module) -> Any:
    return cv.intervene_sweep(cv.wrap(module), image(), kind="attention", target=TARGET).effects


def logit_lens(module: nn.Module) -> Any:
    return cv.logit_lens(cv.wrap(module), image())


def match(module: nn.Module) -> Any:
    return cv.match(cv.wrap(module), *image(2), "genatt").explanation


VERBS: dict[str, Callable[[nn.Module], Any]] = {
    **{f"explain {kind}": lambda module, method=method: explain(module, method) for kind, method in KINDS.items()},
    "compare": compare,
    "trace": trace,
    "evaluate": evaluate,
    "choose": choose,
    "calibrate": calibrate,
    "doctor": doctor,
    "check_maps": check_maps,
    "certify": certify,
    "reference": reference,
    "expect": expect,
    "mistakes": mistakes,
    "features": features,
    "intervene": intervene,
    "intervene_sweep": intervene_sweep,
    "logit_lens": logit_lens,
    "match": match,
}


def tensors(result: Any) -> list[Tensor]:
    """Return the numbers of a verb's result, for comparison."""
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, cv.Explanation):
        return [result.maps]
    if isinstance(result, cv.results.PatchFeatures):
        return [result.tokens, result.norms, result.explained_variance]
    if isinstance(result, cv.Score):
        return [result.values]
    if isinstance(result, cv.results.CheckResult):
        return [torch.tensor([[r.top, *r.random, r.effect] for r in check.removals]) for check in result]
    if isinstance(result, dict):
        return [tensor for value in result.values() for tensor in tensors(value)]
    if isinstance(result, tuple):
        return [tensor for value in result for tensor in tensors(value)]
    if hasattr(result, "checks"):  # a Diagnosis: its lines, each passed or not
        return [torch.tensor([STATUSES.index(check.status) for check in result.checks], dtype=torch.float64)]
    return tensors(dict(result.scores))  # a Selection


def out_of_memory() -> BaseException:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
