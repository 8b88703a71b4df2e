"""What each head says: the same numbers as the attention itself, for every kind of pooling, from one trace."""

from __future__ import annotations

import pytest
import torch

import clairvit as cv
from clairvit.methods.explanation import FUSIONS
from helpers.rounding import assert_same
from helpers.tiny_models import ZOO, double, pixels, wrapped

KINDS = ["timm-vit", "timm-reg4-gap", "timm-deit-distilled-explicit", "timm-siglip-map", "hf-dinov2-registers-sdpa"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ["raw-attention", "genatt", "grad-rollout"])
def test_heads_are_what_the_trace_says(kind: str, method: str) -> None:
    (model, image), tiny = double(kind), ZOO[kind]
    explanation = cv.explain(model, image, method, target=3, by_head=True)
    tr = cv.trace(model, image, target=3)
    assert explanation.heads is not None
    assert explanation.layers is None, "layers are stored with layers=True alone"
    for index, layer in enumerate(tr.layers):
        head_maps = layer.A if method == "raw-attention" else (layer.A * layer.G).clamp(min=0)  # [B, H, N, N]
        rows = torch.einsum("bi,bhij->hbj", tr.readout_weights.expand(len(image), -1), head_maps)[..., tiny.prefix :]
        heads = rows.unflatten(-1, tiny.grid)
        assert_same(explanation.heads.maps[index], heads)
        for place, fuse in enumerate((head_maps.amin(1), head_maps.mean(1), head_maps.amax(1))):
            row = (tr.readout_weights[:, None] @ fuse)[:, 0, tiny.prefix :].unflatten(-1, tiny.grid)
            assert_same(explanation.heads.fused[index, place], row)


@pytest.mark.parametrize(
    "text", ["rollout", "rollout(discard_ratio=0.5)", "genatt+skipplus", "grad-rollout(preset=jacobgil)"]
)
def test_fusions_are_the_method_with_that_option(text: str) -> None:
    model, image = double("timm-vit")
    explanation = cv.explain(model, image, text, target=[1, 4], by_head=True, layers=True)
    assert explanation.heads is not None
    assert explanation.heads.whole is not None
    for place, fusion in enumerate(FUSIONS):
        alone = cv.explain(model, image, text, target=[1, 4], layers=True, fusion=fusion)
        assert_same(explanation.heads.whole[place], alone.maps)
        assert alone.layers is not None
        assert_same(explanation.heads.fused[:, place], alone.layers)
    for head in range(explanation.heads.maps.shape[1]):
        alone = cv.explain(model, image, text, target=[1, 4], layers=True, fusion=head)
        assert alone.layers is not None
        assert_same(explanation.heads.maps[:, head], alone.layers)


def test_heads_cost_no_pass_and_change_no_map() -> None:
    model, image = double("timm-vit")
    for text in ("rollout", "legrad", "decompx", "attention-flow(grid_pool=2)"):
        plain, with_heads = (cv.explain(model, image, text, target=3, by_head=by_head) for by_head in (False, True))
        assert_same(with_heads.maps, plain.maps)
        assert (with_heads.cost.forwards, with_heads.cost.backwards) == (plain.cost.forwards, plain.cost.backwards)
        assert plain.heads is None
        assert with_heads.heads is not None
        assert (with_heads.heads.method == text) == (text == "rollout")
        assert any("head" in note for note in with_heads.notes) == (text != "rollout"), "borrowed heads are said to be"


def test_several_targets_have_heads_of_their_own() -> None:
    model, images = double("timm-vit")
    both = cv.explain(model, images[0], "genatt", targets=[1, 4], by_head=True).heads
    for place, target in enumerate([1, 4]):
        alone = cv.explain(model, images[0], "genatt", target=target, by_head=True).heads
        assert both is not None
        assert alone is not None
        assert_same(both.maps[:, :, place], alone.maps[:, :, 0])


def test_an_option_called_heads_stays_an_option() -> None:
    model, image = wrapped("timm-vit"), pixels("timm-vit")
    assert cv.explain(model, image, "attin", target=3, heads="mean").method == "attin(heads=mean)"
