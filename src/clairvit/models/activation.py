"""What a model's scores mean: softmax (one class of several), sigmoid (each class for itself), raw (no probability).

Probabilities exist for the first two only. `infer_activation` reads what a module states about itself; where it states
nothing, several columns are a softmax classifier and a single column is a raw score.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, get_args

from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid, multilabel_soft_margin_loss

from clairvit.errors import BadInput, did_you_mean
from clairvit.numerics import widened

Activation = Literal["softmax", "sigmoid", "raw"]
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)

# Losses by class name, so that timm's and torchmetrics-like ones count without an import.
_SIGMOID_LOSSES = frozenset(
    {
        "BCEWithLogitsLoss",
        "MultiLabelSoftMarginLoss",
        "BinaryCrossEntropy",
        "AsymmetricLossMultiLabel",
        "SigmoidFocalLoss",
    }
)
_SOFTMAX_LOSSES = frozenset(
    {
        "CrossEntropyLoss",
        "NLLLoss",
        "LabelSmoothingCrossEntropy",
        "SoftTargetCrossEntropy",
        "AsymmetricLossSingleLabel",
    }
)
_RAW_LOSSES = frozenset({"MSELoss", "L1Loss", "SmoothL1Loss", "HuberLoss", "PoissonNLLLoss", "GaussianNLLLoss"})
_ACTIVATED_LOSSES = frozenset({"BCELoss"})  # it takes probabilities, so the module ends in a sigmoid
_PROBLEM_TYPES: dict[str, Activation] = {
    "regression": "raw",
    "multi_label_classification": "sigmoid",
    "single_label_classification": "softmax",
}
NOTHING_STATED = "nothing else is stated"  # the reason for softmax where nothing says what the scores mean
HEADS = ("head", "fc", "classifier", "cls_classifier", "heads")  # names of the layer that gives class scores
_TRANSPARENT = (nn.Identity, nn.Dropout, nn.Flatten, nn.Unflatten)  # a last module that leaves the values as they are


class StatedActivation(NamedTuple):
    """An activation, and where it was stated."""

    activation: Activation
    reason: str
    activated: bool = False  # the module applies a sigmoid or softmax itself, so its output is no logit


def check_activation(activation: Any, columns: int | None = None) -> Activation:
    """Return the activation; raise BadInput for an unknown one, or for softmax over a single column (always 1)."""
    if activation not in ACTIVATIONS:
        near = did_you_mean(activation, ACTIVATIONS) if isinstance(activation, str) else ""
        raise BadInput(
            f"activation={activation!r} was given; expected softmax (one class of several), sigmoid (each class for "
            f"itself) or raw (scores that are no probabilities).{near}"
        )
    if activation == "softmax" and columns == 1:
        raise BadInput(
            "activation='softmax' was given for a model with a single output, whose softmax is 1 for any image; "
            "expected 'sigmoid' for a yes/no classifier, or 'raw' for a regression."
        )
    return activation  # type: ignore[no-any-return]


def activation_for(activation: Activation, columns: int) -> Activation:
    """Return the activation of scores with so many columns: a single one with softmax is raw, as its softmax is 1."""
    return "raw" if activation == "softmax" and columns == 1 else activation


def probabilities(logits: Tensor, activation: Activation) -> Tensor | None:
    """Return softmax or sigmoid of logits [..., C], in their shape; None where the scores are raw."""
    match activation_for(activation, logits.shape[-1]):
        case "softmax":
            return widened(logits).softmax(-1)
        case "sigmoid":
            return widened(logits).sigmoid()
        case "raw":
            return None


def log_probabilities(logits: Tensor, activation: Activation) -> Tensor | None:
    """Return the logarithm of `probabilities`, accurate where these are near 0; None where the scores are raw."""
    match activation_for(activation, logits.shape[-1]):
        case "softmax":
            return widened(logits).log_softmax(-1)
        case "sigmoid":
            return logsigmoid(widened(logits))
        case "raw":
            return None


def infer_activation(module: nn.Module, *, classifier: bool = True) -> StatedActivation:
    """Return what a module states about its scores.

    In this order: an embedding is raw; `module.stated_activation` (a `StatedActivation`); `config.problem_type` of
    transformers; a last module nn.Sigmoid or nn.Softmax (its outputs are taken as they are); a loss that the module or
    a submodule holds; a single output column is raw; everything else is softmax.
    """
    if not classifier:
        return StatedActivation("raw", "the output is an embedding")
    stated = getattr(module, "stated_activation", None)
    if isinstance(stated, StatedActivation):
        return stated
    columns = output_columns(module)
    config = getattr(module, "config", None)
    problem = getattr(config, "problem_type", None)
    if problem in _PROBLEM_TYPES:
        activation = activation_for(_PROBLEM_TYPES[problem], columns or 2)
        return StatedActivation(activation, f"config.problem_type is {problem}")
    return (
        _from_last_module(module)
        or _from_losses(module)
        or (StatedActivation("raw", "the model has a single output") if columns == 1 else None)
        or StatedActivation("softmax", NOTHING_STATED)
    )


def output_columns(module: nn.Module) -> int | None:
    """Return how many scores a module gives per image; None if neither its head nor its configuration says so.

    The shape of the head comes first: users replace heads and leave `num_classes` or `config.num_labels` as they were.
    """
    outputs = head_outputs(module)
    if outputs is not None:
        return outputs
    config = getattr(module, "config", None)
    for holder, name in ((config, "num_labels"), (module, "num_classes"), (module, "num_labels")):
        count = getattr(holder, name, None)
        if isinstance(count, int) and not isinstance(count, bool) and count > 0:
            return count
    return None


def head_outputs(module: nn.Module) -> int | None:
    """Return the number of outputs of the linear layer called head, fc or classifier; None if there is none."""
    get_classifier: Any = getattr(module, "get_classifier", None)  # timm's, which also finds nested heads
    classifier = get_classifier() if callable(get_classifier) else None
    first = classifier[0] if isinstance(classifier, tuple | list) and classifier else classifier
    for head in (first, *(getattr(module, name, None) for name in HEADS), module):
        last = _last_module(head) if isinstance(head, nn.Module) else None
        if isinstance(last, nn.Linear):
            return last.out_features
    return None


def _last_module(module: nn.Module) -> nn.Module:
    """Return the module whose output a module, or a sequence of modules, returns unchanged.

    Of a layer that PEFT adapted it is the layer itself: `base_layer` (LoRA) or `original_module` (trained as a whole).
    """
    for name in ("original_module", "base_layer"):
        inner = getattr(module, name, None)
        module = inner if isinstance(inner, nn.Module) else module
    while isinstance(module, nn.Sequential):
        parts = [part for part in module if not isinstance(part, _TRANSPARENT)]
        if not parts:
            break
        module = parts[-1]
    return module


def _from_last_module(module: nn.Module) -> StatedActivation | None:
    """Return what a last nn.Sigmoid, nn.Softmax or nn.LogSoftmax says about the outputs."""
    children = [child for child in module.children() if not isinstance(child, (*_TRANSPARENT, nn.modules.loss._Loss))]
    if isinstance(module, nn.Sequential):
        last = _last_module(module)
    else:
        last = _last_module(children[-1]) if children else module
    if isinstance(last, nn.Sigmoid | nn.Softmax):
        reason = f"the module ends in nn.{type(last).__name__}, so its outputs are taken as they are"
        return StatedActivation("raw", reason, activated=True)
    if isinstance(last, nn.LogSoftmax):
        return StatedActivation("softmax", "the module ends in nn.LogSoftmax, which a softmax leaves as it is")
    return None


def _from_losses(module: nn.Module) -> StatedActivation | None:
    """Return the activation that all losses held by a module and its submodules agree on."""
    by_activation: dict[str, StatedActivation] = {}
    for value in (value for part in module.modules() for value in (part, *vars(part).values())):
        is_function = value is binary_cross_entropy_with_logits or value is multilabel_soft_margin_loss
        name = value.__name__ if is_function else type(value).__name__ if isinstance(value, nn.Module) else ""
        reason = f"the module holds the loss {name}"
        if is_function or name in _SIGMOID_LOSSES:
            stated = StatedActivation("sigmoid", reason)
        elif name in _SOFTMAX_LOSSES:
            stated = StatedActivation("softmax", reason)
        elif name in _RAW_LOSSES:
            stated = StatedActivation("raw", reason)
        elif name in _ACTIVATED_LOSSES:
            reason += ", which takes probabilities, so its outputs are taken as they are"
            stated = StatedActivation("raw", reason, activated=True)
        else:
            continue
        by_activation.setdefault(stated.activation, stated)
    return next(iter(by_activation.values())) if len(by_activation) == 1 else None
