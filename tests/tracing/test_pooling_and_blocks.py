"""What the structure says of unusual pooling, of attention modules that are no blocks, and of odd convolutions."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import clairvit as cv
from clairvit.errors import NotApplicable
from clairvit.tracing.structure import ModelStructure, model_structure
from helpers.equivalent_vits import MEAN, PATCHES, SIZE, VARIANTS, Attention, ViT, blocks_of, images, reference
from helpers.rounding import assert_same


def wrap(module: nn.Module) -> cv.Model:
    labels = ["a", "b", "c", "d", "e"]
    return cv.wrap(module.eval(), size=SIZE, mean=(0.5,) * 3, std=(0.5,) * 3, labels=labels)


def structure_of(module: nn.Module) -> ModelStructure:
    return model_structure(wrap(module), images())


@pytest.mark.parametrize("patch", range(PATCHES))
def test_a_head_that_reads_one_patch_reads_that_row(patch: int) -> None:
    model = reference()
    model.pool = lambda x: x[:, 1 + patch]  # type: ignore[method-assign]
    layout = structure_of(model).layout
    assert layout is not None
    assert layout.read == ((1 + patch, 1.0),)


def test_a_row_that_is_added_and_taken_away_again_is_not_read() -> None:
    plain = structure_of(reference(MEAN)).layout
    assert structure_of(VARIANTS["pooling: mean of all, less the class token"].build()).layout == plain


def test_a_head_that_gathers_by_a_batch_of_indices_is_replayed_layer_by_layer() -> None:
    """LeGrad runs the head on several layers at once: gather with an index of B rows would take the first B of them."""
    gathering = VARIANTS["pooling: gather"].build()
    for batch in (1, 2):
        expected = cv.explain(wrap(reference()), images(batch), "legrad", target=1)
        assert_same(cv.explain(wrap(gathering), images(batch), "legrad", target=1).maps, expected.maps)


class BareAttention(nn.Module):
    """Norms and residual sums in one forward, attention and MLP in modules."""

    def __init__(self, model: ViT) -> None:
        super().__init__()
        self.model = model

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        m, x = self.model, self.model.tokens(image)
        for block in blocks_of(m):
            x = x + block.attn(block.norm1(x))
            x = x + block.mlp(block.norm2(x))
        return m.head(m.pool(m.norm(x)))  # type: ignore[no-any-return]


class NormedAttention(nn.Module):
    """A norm and an attention; the residual sum is added around it."""

    def __init__(self, norm: nn.Module, attention: nn.Module) -> None:
        super().__init__()
        self.norm, self.attention = norm, attention

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(self.norm(x))  # type: ignore[no-any-return]


def test_an_attention_module_that_is_given_normalised_tokens_is_no_block() -> None:
    structure = structure_of(BareAttention(reference()))
    assert [site.block for site in structure.layers] == [None, None]
    with pytest.raises(NotApplicable, match="not a module of its own, so its input was not seen"):
        cv.explain(wrap(BareAttention(reference())), images(), "ixg", target=1)


def test_a_module_of_norm_and_attention_is_given_the_stream() -> None:
    model = reference()
    for block in blocks_of(model):
        block.attn, block.norm1 = NormedAttention(block.norm1, block.attn), nn.Identity()
    module = BareAttention(model)
    assert all(isinstance(site.block, NormedAttention) for site in structure_of(module).layers)
    for method in ("ixg", "attnlrp+plus", "vanilla-l2"):
        expected = cv.explain(wrap(reference()), images(), method, target=1)
        assert_same(cv.explain(wrap(module), images(), method, target=1).maps, expected.maps)


def test_attention_modules_without_residual_sums_are_blocks_where_each_feeds_the_next() -> None:
    class Chain(ViT):
        def encode(self, x: torch.Tensor) -> torch.Tensor:
            for block in blocks_of(self):
                x = block.attn(x)
            return x

    module = Chain().double()
    assert all(isinstance(site.block, Attention) for site in structure_of(module).layers)


def test_a_convolution_over_tokens_is_no_patch_embedding() -> None:
    layout = structure_of(VARIANTS["linear: 1 × 1 convolution of a plane"].build()).layout
    assert layout is not None
    assert (layout.grid, layout.prefix) == ((3, 3), 1)


@pytest.mark.parametrize("method", ["scorecam", "vit-cx(samples=4)"])
def test_masks_of_channels_need_a_layer(method: str) -> None:
    with pytest.raises(NotApplicable, match="No layer of .* was seen"):
        cv.explain(wrap(VARIANTS["attention: exp of log_softmax"].build()), images(), method, target=1)


@pytest.mark.parametrize("name", ["linear: halves of the outputs", "linear: a low-rank part beside it"])
@pytest.mark.parametrize("method", ["attin", "globenc", "alti"])
def test_a_projection_of_several_products_is_followed(name: str, method: str) -> None:
    expected = cv.explain(wrap(reference()), images(), method, target=1)
    assert_same(cv.explain(wrap(VARIANTS[name].build()), images(), method, target=1).maps, expected.maps)


def test_the_first_step_of_a_built_in_sum_is_no_residual_sum() -> None:
    """`sum([x, attention])` computes 0 + x first."""
    with pytest.raises(NotApplicable, match="does not add its attention to its own input"):
        cv.explain(wrap(VARIANTS["residual: built-in sum"].build()), images(), "tokentm", target=1)
