"""Equal networks that are written otherwise get equal maps; a method of which that is not true says so, and why."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import pytest
import torch
from torch import nn

import clairvit as cv
from clairvit.errors import NotApplicable
from clairvit.methods.registry import list_methods
from helpers.equivalent_vits import CLASSES, MEAN, PLAIN, SIZE, VARIANTS, Base, images, reference

LABELS = [f"class {i}" for i in range(CLASSES)]
CAMS = ["gradcam", "gradcam-pp", "hirescam", "layercam", "xgradcam", "scorecam"]
OF_NORMS = [
    *CAMS,
    "attnlrp",
    "transatt",
    "partial-lrp",
    "lrp",
    "deep-taylor",
    "fullgrad-plus",
    "reslrp",
    "decompx",
    "alti",
]
OF_LINEARS = ["attnlrp(gamma_lin=0.25)", "transatt", "partial-lrp", "lrp", "deep-taylor", "fullgrad-plus", "globenc"]
AS_WRITTEN = [
    "attention: bias of the values behind the attention",
    "attention: values and projection in one matrix",
    "linear: halves of the inputs",
    "linear: bias as a column",
    "linear: a low-rank part beside it",
]
OF_GAMMA = ("attnlrp", "cp-lrp", "reslrp")


def maps_of(module: nn.Module, methods: Iterable[str]) -> dict[str, cv.Explanation]:
    model = cv.wrap(module, size=SIZE, mean=(0.5,) * 3, std=(0.5,) * 3, labels=LABELS)
    return dict(cv.compare(model, images(), [*methods], target=3, seed=0, skip=True).items())


@functools.cache
def maps_of_reference(base: Base, methods: tuple[str, ...]) -> dict[str, cv.Explanation]:
    return maps_of(reference(base), methods)


def differing(variant: str, methods: Iterable[str]) -> set[str]:
    """Return the methods that give the variant another map than the reference; none may be refused."""
    written = VARIANTS[variant]
    expected = maps_of_reference(written.base, tuple(methods))
    values = maps_of(written.build(), expected)
    assert values.keys() == expected.keys() == set(methods)
    return {
        method
        for method, map_ in expected.items()
        if not torch.allclose(values[method].maps, map_.maps, rtol=1e-9, atol=1e-9 * float(map_.maps.abs().max()))
    }


@pytest.mark.parametrize("norm", ["F.normalize", "x / norm", "einsum of the squares"])
def test_norms_by_lengths_and_einsum_change_no_map(norm: str) -> None:
    assert not differing(f"norm: {norm}", OF_NORMS)


def test_a_matrix_from_the_left_is_a_linear_layer() -> None:
    assert not differing("linear: matrix from the left", OF_LINEARS)


def test_a_sum_of_products_keeps_its_bias_and_its_residual_sum() -> None:
    assert not differing(
        "linear: sum of products", ["fullgrad-plus", "libra-fullgrad-plus", "reslrp", "ixg", "decompx"]
    )


@pytest.mark.parametrize("base", [None, MEAN])
@pytest.mark.parametrize("method", ["gradcam", "scorecam"])
def test_class_activation_maps_are_refused_where_the_norm_is_not_recognised(method: str, base: Base | None) -> None:
    """In the second case, the mean of all patches is what reads the norm."""
    written = VARIANTS["norm: channels first"]
    if base is None:
        module = written.build()
    else:
        module = reference(base)
        written.change(module)
    with pytest.raises(NotApplicable, match="norm before the last attention"):
        cv.explain(cv.wrap(module.eval(), size=SIZE, labels=LABELS), images(), method, target=3)


class Unknown(nn.Module):
    """Something else than a norm before the attention: a layer of tanh."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.tanh()


@pytest.mark.parametrize("method", ["gradcam", "scorecam"])
def test_class_activation_maps_do_not_read_past_what_the_attention_reads(method: str) -> None:
    module = reference()
    for block in module.blocks:  # type: ignore[attr-defined]
        block.norm1 = Unknown()
    with pytest.raises(NotApplicable, match="norm before the last attention"):
        cv.explain(cv.wrap(module, size=SIZE, labels=LABELS), images(), method, target=3)


@pytest.mark.parametrize("method", ["gradcam", "hirescam"])
def test_without_a_norm_class_activation_maps_read_the_input_of_the_block(method: str) -> None:
    module = reference()
    for block in module.blocks:  # type: ignore[attr-defined]
        block.norm1 = nn.Identity()
    values = maps_of(module, [method, f"{method}(at=input)"])
    torch.testing.assert_close(values[method].maps, values[f"{method}(at=input)"].maps, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore::clairvit.errors.ClairWarning")  # of maps that are zero
def test_methods_say_that_their_maps_depend_on_how_a_network_is_written() -> None:
    gammas = {f"{name}(gamma_lin=0.25)": name for name in OF_GAMMA}
    names = [method.name for method in list_methods() if method.extra_cost.passes is None or method.caveats.as_written]
    methods = [*maps_of_reference(PLAIN, (*names, *gammas))]  # less those that a class token rules out
    differ = {gammas.get(m, m) for variant in AS_WRITTEN for m in differing(variant, methods)}
    assert differ == {method.name for method in list_methods() if method.caveats.as_written}
    plain = [method for variant in AS_WRITTEN for method in differing(variant, OF_GAMMA)]
    assert not plain, "without gamma they do not depend on it"
