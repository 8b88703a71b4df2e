"""Layers shown together, as on a GPU, give the same maps as one by one."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import pytest
import torch

import clairvit as cv
from clairvit.cuda import layers as gpu_layers
from clairvit.methods import executor
from clairvit.methods.explanation import Comparison
from clairvit.methods.layer_view import LayerView
from helpers.covering import covering_array, method_model_pairs, some_models
from helpers.method_conditions import METHODS, fits
from helpers.reference_kernels import use_reference_kernels
from helpers.rounding import assert_same
from helpers.tiny_models import TINY, pixels, wrapped

TARGET = 3
EVERY = [f"{name}(relu=false)" if method.relu else name for name, method in METHODS.items() if not method.slow]
COMBINED = ["genatt+plus", "genatt+skipplus", "ixg+skipplus", "legrad+plus", "rollout(preset=joita)", "focusvit(m=1)"]
OPTIONS = ["attcat(pair=output)", "rollout(residual=0.3)", "rollout(preset=jacobgil)", "grad-rollout(preset=jacobgil)"]
TEXTS = [*EVERY, *COMBINED, *OPTIONS]
PAIRS = method_model_pairs(TEXTS, TINY, seed="planner")


@pytest.mark.parametrize(("kind", "layers"), covering_array(some_models([*TINY], 30, seed="planner"), [False, True]))
def test_layers_together_are_layers_one_by_one(kind: str, layers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [text for text, other in PAIRS if other == kind]
    apart = maps_of(kind, texts, layers)
    seen = show_together(monkeypatch)
    together = maps_of(kind, texts, layers)
    assert max(seen, default=0) > 1 or kind in UNLIKE
    assert_same_maps(together, apart)


@pytest.mark.parametrize("kind", some_models([*TINY], 6))
def test_layers_read_by_kernels_are_layers_read_as_matrices(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels themselves are replaced by torch: what is asked of them, and what is made of it, is tested here."""
    apart = maps_of(kind, TEXTS)
    show_together(monkeypatch)
    called = use_reference_kernels(monkeypatch)
    assert_same_maps(maps_of(kind, TEXTS), apart)
    assert called or kind in UNFUSED


def test_plain_methods_of_a_plain_model_are_read_by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    show_together(monkeypatch)
    called = use_reference_kernels(monkeypatch)
    maps_of("timm-deep", TEXTS)
    expected = {"row_sums", "weighted_heads", "row_products", "products_and_norms", "distances", "product_steps"}
    assert expected <= set(called)


def maps_of(kind: str, texts: list[str], layers: bool = False) -> Comparison:
    image, model = pixels(kind, dtype=torch.float64), wrapped(kind, torch.float64)
    names = [text for text in texts if fits(text, kind)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return cv.compare(model, image, names, target=TARGET, layers=layers, skip=True)


def show_together(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Show layers together, as on a GPU; return a list of how many were shown at once."""
    seen: list[int] = []
    show = executor._show

    def watched(passes: Sequence[object], view: LayerView, indices: list[int]) -> list[object]:
        seen.append(len(indices))
        return show(passes, view, indices)

    monkeypatch.setattr(gpu_layers, "is_launch_bound", lambda trace: True)
    monkeypatch.setattr(gpu_layers, "STACKED_SHARE", 1e9)
    monkeypatch.setattr(executor, "_show", watched)
    return seen


def assert_same_maps(together: Comparison, apart: Comparison) -> None:
    assert together.skipped.keys() == apart.skipped.keys()
    for name, explanation in apart.items():
        assert_same(together[name].maps, explanation.maps, dtype=torch.float64, label=name)
        if explanation.layers is not None:
            assert_same(together[name].layers, explanation.layers, dtype=torch.float64, label=name)


# Attention that is not computed by torch's fused function, and blocks whose tokens are not seen.
UNFUSED = ["home-loop"]
# Positions are added to the scores as a mask that differs from layer to layer.
UNLIKE = [kind for kind in TINY if any(word in kind for word in ("beit", "sam", "relpos", "post-norm", "mask"))]


def test_groups_stay_within_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    tr = cv.trace(wrapped("timm-deep"), pixels("timm-deep"), target=TARGET)
    share = tr.layers[0].A.numel() * 4 / (5 * tr.layers[0].v.numel() * 4)  # in parts of the values of all five layers
    monkeypatch.setattr(gpu_layers, "STACKED_SHARE", 2 * share)
    assert list(gpu_layers.layer_groups([4, 3, 2, 1, 0], tr)) == [[4, 3], [2, 1], [0]]
    monkeypatch.setattr(gpu_layers, "STACKED_SHARE", 0.9 * share)
    assert list(gpu_layers.layer_groups([2, 1, 0], tr)) == [[2], [1], [0]]
