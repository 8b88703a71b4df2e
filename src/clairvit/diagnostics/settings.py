"""Checks of the module's settings: device, precision, mode, wrappers, quantisation, preprocessing."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import torch
from torch import nn

from clairvit.diagnostics.context import DoctorContext, abbreviated, check, failed, passed, plural, warned
from clairvit.diagnostics.report import Check
from clairvit.errors import Message
from clairvit.methods.collect import HALF_DIGITS
from clairvit.models.model import Model
from clairvit.models.submodules import COMPILED_ADVICE, compiled_in_place, compiled_sentence


@check("model")
def model_loads(context: DoctorContext) -> Check:
    """Report the module's class and size."""
    module = context.model.module
    count = sum(parameter.numel() for parameter in module.parameters())
    kind = type(module).__name__
    return passed(f"{kind} with {plural(count, 'parameter')} loads.", parameters=count, kind=kind)


@check("device", needs=("model",))
def one_device(context: DoctorContext) -> Check:
    """Check that all parameters and buffers are on one device, and not on meta."""
    module = context.model.module
    tensors = itertools.chain(module.named_parameters(), module.named_buffers())
    devices = {name: str(tensor.device) for name, tensor in tensors}
    counts = Counter(devices.values())
    if "meta" in counts:
        name = next(name for name, device in devices.items() if device == "meta")
        return failed(
            f"'{name}' is on the meta device, where tensors have no values.",
            "Load the weights and call module.to_empty(device='cpu') before that, or build the model outside "
            "torch.device('meta').",
            devices=dict(counts),
        )
    if len(counts) > 1:
        rare = counts.most_common()[-1][0]
        name = next(name for name, device in devices.items() if device == rare)
        return failed(
            f"Parameters and buffers are spread over {', '.join(sorted(counts))}; '{name}' is on {rare}.",
            "Move the whole module to one device: module.to('cpu').",
            devices=dict(counts),
        )
    return passed(f"Everything is on {next(iter(counts), 'cpu')}.", devices=dict(counts))


@check("precision", needs=("model",))
def precision(context: DoctorContext) -> Check:
    """Warn of half precision, which rounds maps to three digits, and of mixed precision."""
    counts = Counter(str(p.dtype).removeprefix("torch.") for p in context.model.module.parameters())
    kinds = {p.dtype for p in context.model.module.parameters() if p.is_floating_point()}
    half = sorted(str(kind).removeprefix("torch.") for kind in kinds & {*HALF_DIGITS})
    if half:
        digits = HALF_DIGITS[getattr(torch, half[0])]
        return warned(
            f"Parameters are {' and '.join(sorted(counts))}: activations and gradients carry about {digits} digits, "
            "so that small relevances are rounding noise.",
            "Explain a float32 copy: cv.load(…, dtype='float32') or module.float().",
            dtypes=dict(counts),
        )
    if len(kinds) > 1:
        return warned(
            f"Parameters are of several precisions: {', '.join(sorted(counts))}.",
            "Cast the module to one of them: module.float().",
            dtypes=dict(counts),
        )
    kind = next(iter(sorted(counts)), "float32")
    return passed(f"{kind}.", dtypes=dict(counts))


@check("mode", needs=("model",))
def evaluation_mode(context: DoctorContext) -> Check:
    """Warn of training mode: a trace always runs in eval mode, the user's own calls do not."""
    module = context.model.module
    training = [name or "the module" for name, part in module.named_modules() if part.training]
    if not training:
        return passed("Eval mode.")
    affected = [
        f"{name} ({type(part).__name__})"
        for name, part in module.named_modules()
        if part.training and _depends_on_mode(part)
    ]
    if not affected:
        return passed("Training mode, but no layer of the model behaves differently in it.", training=len(training))
    return warned(
        f"The model is in training mode: {abbreviated(affected)} behave differently there. ClairViT explains it in "
        "eval mode, your own calls would give other scores.",
        "Call model.eval() before you compare scores.",
        training=len(training),
        affected=affected,
    )


def _depends_on_mode(part: nn.Module) -> bool:
    """Return whether a layer behaves differently in training mode: dropout, drop path, batch statistics."""
    rate = getattr(part, "p", getattr(part, "drop_prob", None))
    if "drop" in type(part).__name__.lower() and isinstance(rate, int | float):
        return rate > 0
    return isinstance(part, nn.modules.batchnorm._BatchNorm)


@check("parameters", needs=("model",))
def trainable_parameters(context: DoctorContext) -> Check:
    """Check that no parameter was made in inference mode; frozen parameters do not matter."""
    parameters = list(context.model.module.named_parameters())
    inference = [name for name, p in parameters if p.is_inference()]
    if inference:
        return failed(
            f"{plural(len(inference), 'parameter tensor')} were made under torch.inference_mode(), e.g. "
            f"'{inference[0]}', and can take no part in a gradient.",
            "Build or load the model outside inference_mode.",
            inference=len(inference),
        )
    frozen = sum(not p.requires_grad for _, p in parameters)
    count = f"{frozen} of {plural(len(parameters), 'tensor')} frozen" if frozen else "None is frozen"
    return passed(
        f"{count}; gradients go to the image, not to parameters, so that this changes nothing.",
        frozen=frozen,
        tensors=len(parameters),
    )


@check("compile", needs=("model",))
def compiled(context: DoctorContext) -> Check:
    """Check that no submodule was compiled in place; torch.compile(module) is removed by `wrap`."""
    in_place = compiled_in_place(context.model.module)
    if in_place:
        return failed(compiled_sentence(in_place), COMPILED_ADVICE, compiled=in_place)
    if "torch.compile" in context.model.wrappers:
        return passed("torch.compile was removed: the module inside it is explained, with the same weights.")
    return passed("Not compiled.")


@check("parallel", needs=("model",))
def parallel(context: DoctorContext) -> Check:
    """Report DataParallel wrappers, which `wrap` removes."""
    wrappers = [name for name in context.model.wrappers if name.endswith("DataParallel")]
    if wrappers:
        return passed(f"{' and '.join(wrappers)} was removed: the module inside it is explained, on one device.")
    return passed("Not wrapped for several devices.")


@check("quantisation", needs=("model",))
def quantised(context: DoctorContext) -> Check:
    """Check that there are no quantised layers, which pass no gradient."""
    layers = quantised_layers(context.model.module)
    if layers:
        return failed(
            f"{plural(len(layers), 'layer')} quantised, e.g. {abbreviated(layers, 2)}: no gradient passes them, so "
            "that gradient, CAM and relevance methods do not apply.",
            "Explain the model before it was quantised. Methods that need no gradient remain: rollout, "
            "leave-one-out, occlusion, lime.",
            layers=layers,
        )
    return passed("No quantised layer.")


def quantised_layers(module: nn.Module) -> list[str]:
    """Return "name (class)" of the layers whose weights are no floating-point parameters."""
    libraries = ("Linear8bitLt", "Linear4bit", "LinearNF4", "LinearFP4", "QuantLinear", "WQLinear")
    return [
        f"{name} ({type(part).__module__.split('.')[0]} {type(part).__name__})"
        for name, part in module.named_modules()
        if (".quantized" in type(part).__module__ and hasattr(part, "weight")) or type(part).__name__ in libraries
    ]


@check("preprocessing", needs=("model",))
def preprocessing(context: DoctorContext) -> Check:
    """Check that mean and standard deviation are for pixels in 0..1; warn if they are assumed."""
    preprocess = context.model.preprocess
    source = preprocessing_source(context.model)
    mean, std = (", ".join(f"{value:.3g}" for value in values) for values in (preprocess.mean, preprocess.std))
    summary = f"{preprocess.size[0]} × {preprocess.size[1]} pixels, mean ({mean}), std ({std})"
    details: dict[str, Any] = {
        "size": preprocess.size,
        "mean": preprocess.mean,
        "std": preprocess.std,
        "source": source,
    }
    if max(preprocess.mean) > 1 or max(preprocess.std) > 1:
        return failed(
            f"{summary}: mean and std are of pixels in 0..255, and ClairViT's pixels are in 0..1.",
            "Divide both by 255.",
            **details,
        )
    if source == "assumed":
        return warned(
            Message(f"{summary}.", *(part for note in context.model.assumptions for part in (" ", note))),
            "State what the model was trained with: mean, std, resize and interpolation.",
            **details,
        )
    return passed(f"{summary}, as {source} states.", **details)


def preprocessing_source(model: Model) -> str:
    """Return who states the preprocessing: "its source", which may be the user, or "assumed"."""
    return "assumed" if model.assumptions else "its source"
