"""Equal networks get equal maps, a refusal or a note: one small ViT, written in 150 ways, under every method.

Each way is run under every family of methods and each method on ten ways or more; `--cases=all` runs all pairs.
"""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Iterator

import pytest
from torch import Tensor, nn

import clairvit as cv
from clairvit.errors import ClairError
from clairvit.methods.explanation import Comparison, Explanation
from helpers.covering import covering_array, method_traits
from helpers.equivalent_vits import CLASSES, SIZE, VARIANTS, Base, images, reference
from helpers.method_conditions import METHODS, allow_declared_zeros, short

TARGET = 3
METHOD_TEXTS = [
    *(short(name) for name in METHODS),
    *("attnlrp+plus", "decompx+plus", "genatt+skipplus", "raw-attention+skipplus", "raw-attention+rollout"),
    *("attnlrp(gamma_lin=0.25)", "cp-lrp(gamma_lin=0.25)", "ixg(level=pixel)", "lrp(level=pixel)"),
]
# What a note says where a map differs: rules are missing, biases are, or patches were painted and not dropped.
EXCUSES = re.compile(
    r"had no .* rule \(.*\); relevance may be wrong|painted with|no convolution reads|biases inside .* cannot be seen"
)
# Methods that are defined on how a network is written, not only on what it computes (docs/limits.md), and where.
_ON_LINEAR_LAYERS = {  # gamma, alpha-beta and z+ rules: each linear layer by itself
    *("transatt", "partial-lrp", "lrp-rollout", "lrp", "deep-taylor", "lrp(level=pixel)"),
    *("attnlrp(gamma_lin=0.25)", "cp-lrp(gamma_lin=0.25)"),
}
_ON_BIASES = {"fullgrad", "fullgrad-plus", "libra-fullgrad-plus"}
_ON_ATTENTION = {  # dy/dA of A v + b is another one than that of A (v + b)
    *("genatt", "gradsam", "grad-rollout", "attcam", "gmar-l1", "gmar-l2", "focusvit", "legrad", "ag-cam", "tam"),
    *("libra-genatt", "tokentm", "genatt+skipplus"),
}
DEFINED_ON_THE_FORM = {
    "attention: values and projection in one matrix": _ON_LINEAR_LAYERS,
    "attention: bias of the values behind the attention": _ON_ATTENTION | _ON_BIASES | _ON_LINEAR_LAYERS,
    "linear: halves of the inputs": _ON_LINEAR_LAYERS,
    "linear: a low-rank part beside it": _ON_LINEAR_LAYERS,
    "linear: bias as a column": _ON_LINEAR_LAYERS | _ON_BIASES,
    "embedding: images normalised inside": {"fullgrad-pixel", "lrp(level=pixel)"},  # where the input is zero
}

EQUAL = {  # how many of the methods give an equal map; of the forms that are not listed all do
    "attention: keys before queries": 0,
    "attention: values before weights": 0,
    "attention: softmax as exponentials": 0,
    "attention: softmax by logsumexp": 0,
    "attention: exp of log_softmax": 0,
    "attention: normalised after the values": 0,
    "attention: sum of products, no matmul": 0,
    "attention: queries in two chunks": 3,
    "attention: queries in two fused chunks": 3,
    "attention: vmap over heads": 0,
    "attention: an autograd function": 56,
    "attention: heads projected one by one": 66,
    "attention: values and projection in one matrix": 66,
    "attention: bias of the values behind the attention": 50,
    "norm: torch.native_layer_norm": 44,
    "norm: a centring matrix": 42,
    "norm: group_norm": 46,
    "norm: channels first": 60,
    "norm: RMSNorm: a length": 63,
    "norm: RMSNorm: in place": 63,
    "norm: in place": 0,
    "norm: an autograd function": 53,
    "activation: SiLU: GLU": 55,
    "activation: an autograd function": 55,
    "activation: gate written with sigmoid": 56,
    "linear: tensordot": 66,
    "linear: sum of products": 66,
    "linear: halves of the inputs": 66,
    "linear: bias as a column": 65,
    "linear: a low-rank part beside it": 66,
    "linear: an autograd function": 63,
    "residual: into a copy": 69,
    "residual: sum of a stack": 66,
    "residual: x − (−branch)": 73,
    "residual: twice the mean": 66,
    "residual: addcmul": 69,
    "residual: lerp": 66,
    "residual: built-in sum": 69,
    "embedding: patches cut by hand": 70,
    "embedding: F.unfold": 70,
    "embedding: images normalised inside": 72,
    "container: no blocks, one forward": 34,
    "container: functions of parameters alone": 34,
    "container: gradient checkpointing": 0,
}


@pytest.fixture(autouse=True)
def _relu_may_leave_nothing() -> Iterator[None]:
    with warnings.catch_warnings():
        allow_declared_zeros()
        yield


PAIRS = covering_array(METHOD_TEXTS, list(VARIANTS), method_traits, lambda name: [VARIANTS[name].base], least=10)


def compare(module: nn.Module, texts: list[str]) -> Comparison:
    labels = [f"class {index}" for index in range(CLASSES)]
    model = cv.wrap(module, size=SIZE, mean=(0.5,) * 3, std=(0.5,) * 3, labels=labels)
    try:
        return cv.compare(model, images(), texts, target=TARGET, seed=0, skip=True)
    except ClairError:  # the model itself is refused
        return Comparison()


@functools.cache
def reference_maps(base: Base) -> Comparison:
    return compare(reference(base), METHOD_TEXTS)


def outcome(text: str, expected: Explanation, maps: Comparison) -> str:
    """Return "same", "refused", "noted", "pixels", or how far the map is from that of the reference."""
    if text not in maps:
        return "refused"
    first, second = expected.maps, maps[text].maps
    if first.shape == second.shape:
        scale = max(float(first.abs().max()), 1e-30)
        difference = float((first - second).abs().max()) / scale
        if difference <= 1e-10:
            return "same"
    notes = [note for note in maps[text].notes if note not in expected.notes]
    if any(EXCUSES.search(note) for note in notes):
        return "noted"
    if first.shape != second.shape:  # no patches were found: a map of pixels, which everybody sees
        return "pixels" if second.shape[-2:] == (SIZE, SIZE) else f"a map {list(second.shape)}"
    return f"{difference:.2g} of the largest value"


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_are_equal(name: str) -> None:
    output = VARIANTS[name].build()(images(2))
    logits = reference(VARIANTS[name].base)(images(2))
    tensors = [output] if isinstance(output, Tensor) else list(output.values() if isinstance(output, dict) else output)
    assert any(t.shape == logits.shape and float((t - logits).abs().max()) < 1e-11 for t in tensors)


@pytest.mark.parametrize("name", VARIANTS)
def test_equal_networks_get_equal_maps_a_refusal_or_a_note(name: str) -> None:
    texts = [text for text, variant in PAIRS if variant == name]
    expected, maps = reference_maps(VARIANTS[name].base), compare(VARIANTS[name].build(), texts)
    outcomes = {text: outcome(text, expected[text], maps) for text in texts if text in expected}
    allowed = {"same", "refused", "noted", "pixels"}
    by_definition = DEFINED_ON_THE_FORM.get(name, set())
    others = {text: result for text, result in outcomes.items() if result not in allowed}
    assert {text: result for text, result in others.items() if text not in by_definition} == {}
    equal = sum(result == "same" for result in outcomes.values())
    # Of a sample of the methods no more can be equal, and no more can differ, than of all of them.
    most, every = EQUAL.get(name, len(expected)), len(expected)
    assert len(outcomes) - (every - most) <= equal <= most, (
        "a form that was exact is refused or noted now, or the other way"
    )
