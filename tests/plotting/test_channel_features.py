"""Feature maps: the right channels, on the right grid, in a figure of the right shape."""

from __future__ import annotations

import pytest
import torch

import clairvit as cv
from clairvit.errors import BadInput, NotApplicable
from clairvit.methods.channel_features import channel_features, channels_of, spread
from clairvit.plotting.channel_features import channel_features_figure
from helpers.rounding import assert_same
from helpers.tiny_models import cnn, double, pixels, strange, wrapped


def test_of_a_cnn_are_its_stages() -> None:
    module, image = strange(cnn).double(), pixels("timm-vit", dtype=torch.float64)
    features = channel_features(cv.wrap(module, name="mine"), image, count=5)
    assert [feature.name for feature in features] == ["image 1", "image 2"]
    a = module[:5](image)[1].detach()  # the last feature map of the second image
    last = features[1].layers[-1]
    assert (last.name, last.width, last.mean.shape) == ("4", 12, (8, 8))
    strongest = a.abs().mean((1, 2)).argsort(descending=True)[:5].tolist()
    assert [k for k, _ in last.channels] == strongest
    assert last.mean.dtype == torch.float64, "not rounded to float32"
    assert_same(last.mean, a.mean(0))
    assert_same(last.channels[0][1], a[strongest[0]])


def test_of_a_vit_are_its_patch_tokens() -> None:
    model, image = double("timm-dinov2-reg4")
    layer = cv.trace(model, image, target=1).layers[-1]
    (first_features, _) = channel_features(model, image, count=3, layers=2)
    assert [x.name for x in first_features.layers] == ["block 0", f"block {layer.index}"]
    grid = first_features.layers[-1].mean.shape
    patches = layer.x[0, -grid[0] * grid[1] :]  # behind CLS and the registers
    assert_same(first_features.layers[-1].mean, patches.mean(1).reshape(grid))


def test_by_relevance_ranks_for_a_target() -> None:
    model, image = cv.wrap(strange(cnn).double()), pixels("timm-vit", dtype=torch.float64)
    layer = cv.trace(model, image, target=2).layers[-1]
    best = (layer.x * layer.dx)[0].abs().mean(0).argsort(descending=True)[:3].tolist()
    layers = channel_features(model, image, 2, by="relevance", count=3)[0].layers[-1]
    assert [k for k, _ in layers.channels] == best


def test_of_features_that_are_there_already() -> None:
    module, image = strange(cnn).double(), pixels("timm-vit", dtype=torch.float64)
    features = cv.features(cv.wrap(module, name="mine"), image, layer="all")
    expected = channel_features(cv.wrap(module, name="mine"), image, count=5)
    actual = channels_of(features, 5)
    for first, second in zip(expected, actual, strict=True):
        assert [layer.name for layer in first.layers] == [layer.name for layer in second.layers]
        for layer, again in zip(first.layers, second.layers, strict=True):
            assert_same(again.mean, layer.mean)
            assert [k for k, _ in again.channels] == [k for k, _ in layer.channels]
    a = module[:5](image).detach()
    assert features.strongest_channels(5).tolist() == a.abs().mean((2, 3)).argsort(1, descending=True)[:, :5].tolist()
    assert features.strongest_channels(99).shape == (2, 12)
    assert (
        features.to_dict(values=False, channels=2)["strongest_channels"]["4"] == features.strongest_channels(2).tolist()
    )
    assert features.to_dict(values=False)["strongest_channels"] is None
    for count in (0, True, 2.5):
        with pytest.raises(BadInput, match=r"channels were asked for; expected a whole number of 1 or more"):
            features.strongest_channels(count)


def test_the_figure_has_a_row_for_each_layer_of_each_image() -> None:
    model, image = cv.wrap(strange(cnn), name="mine"), pixels("timm-vit")
    features = channel_features(model, image, count=4, names=["a/cat.jpg", "a/dog.jpg"])
    figure = channel_features_figure(features)
    words = [text.get_text() for text in figure.texts]
    assert {"cat.jpg", "dog.jpg", "2 · 16 × 16 · 8 channels", "4 · 8 × 8 · 12 channels"} <= set(words)
    assert words.count("mean") == 4  # two images, two stages
    assert len(figure.axes) == 2 + 4 * (1 + 4)
    assert "mine" in words[-1]


def test_what_cannot_be_drawn_is_refused() -> None:
    with pytest.raises(BadInput, match="count=0"):
        channel_features(cv.wrap(strange(cnn)), pixels("timm-vit"), count=0)
    with pytest.raises(NotApplicable, match="no feature maps"):
        channel_features(wrapped("home-loop"), pixels("home-loop"))
    with pytest.raises(BadInput, match="no features to draw"):
        channel_features_figure([])


def test_layers_are_spread_evenly() -> None:
    assert spread(12, 6) == [0, 2, 4, 7, 9, 11]
    assert spread(3, 6) == [0, 1, 2]
    assert spread(12, 1) == [11]
    assert spread(1, 6) == [0]
