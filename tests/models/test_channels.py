"""Check images of any number of channels: tensors, arrays, files, pictures of them, and every method on top."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import timm
import torch
from PIL import Image
from torch import Tensor, nn

import clairvit as cv
from clairvit.errors import BadInput, NotApplicable
from clairvit.methods.registry import list_methods
from clairvit.models.images import displayed, prepare
from clairvit.perturbation.removal import background

SIZE = 32


def vit(channels: int, seed: int = 0) -> nn.Module:
    """Return a tiny timm ViT in float64 for images of `channels` channels and four patches."""
    torch.manual_seed(seed)
    options = {"img_size": SIZE, "in_chans": channels, "depth": 2, "num_classes": 5, "embed_dim": 24, "num_heads": 2}
    return timm.create_model("vit_tiny_patch16_224", **options).double().eval()


def wrapped(channels: int, **options: Any) -> cv.Model:
    return cv.wrap(vit(channels), mean=0.4, std=0.3, **options)


def images(channels: int, count: int = 2) -> Tensor:
    return torch.randn(count, channels, SIZE, SIZE, generator=torch.Generator().manual_seed(1)).double()


def same_model_on_doubled_channels() -> tuple[cv.Model, cv.Model]:
    """Return f(x) and g with g([x, x]) = f(x): each copy of a channel has half of the weights."""
    three, six = vit(3), vit(6)
    weights = three.state_dict()
    kernel = weights["patch_embed.proj.weight"]
    six.load_state_dict(weights | {"patch_embed.proj.weight": torch.cat([kernel, kernel], 1) / 2})
    return cv.wrap(three, mean=0.4, std=0.3), cv.wrap(six, mean=0.4, std=0.3)


@pytest.mark.parametrize(
    "method", ["rollout", "genatt", "ixg", "attnlrp+plus", "gradcam", "integrated-gradients", "leave-one-out", "rise"]
)
def test_two_copies_of_each_channel_are_explained_as_one(method: str) -> None:
    """g([x, x]) = f(x), so that maps of tokens are the same, and painting removes the same."""
    three, six = same_model_on_doubled_channels()
    pixels = images(3)
    options = "(removal=black)" if method in ("leave-one-out", "rise") else ""
    expected = cv.explain(three, pixels, method + options, target=1).maps
    maps = cv.explain(six, torch.cat([pixels, pixels], 1), method + options, target=1).maps
    torch.testing.assert_close(maps, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("channels", [1, 4])
def test_saliency_is_the_gradient_of_all_channels(channels: int) -> None:
    model, pixels = wrapped(channels), images(channels).requires_grad_(True)
    (gradient,) = torch.autograd.grad(model.module(pixels)[:, 2].sum(), pixels)
    maps = cv.explain(model, pixels.detach(), "saliency(level=pixel)", target=2).maps
    torch.testing.assert_close(maps, gradient.abs().amax(1), rtol=1e-9, atol=0)


@pytest.mark.filterwarnings("ignore::clairvit.errors.ClairWarning")
@pytest.mark.parametrize("channels", [1, 4])
def test_every_method_takes_any_number_of_channels(channels: int) -> None:
    model, pixels = wrapped(channels), images(channels, 1)
    refused = set()
    for method in list_methods():
        try:
            assert cv.explain(model, pixels, method.name).maps.isfinite().all(), method.name
        except NotApplicable:
            refused.add(method.name)
    assert refused == {"cam"}  # for its pooling


def test_a_metric_of_each_family_takes_any_number_of_channels() -> None:
    metrics = ["deletion", "road", "irof", "infidelity", "max-sensitivity", "smooth-mprt", "sparseness"]
    scores = cv.evaluate(wrapped(4), images(4), ["ixg"], metrics)
    assert all(np.isfinite(scores["ixg", metric].mean) for metric in metrics)


@pytest.mark.parametrize("removal", ["black", "image-mean", "minimum", "blur", "gaussian-blur", "noise", "mean"])
@pytest.mark.parametrize("channels", [1, 6])
def test_backgrounds_have_the_shape_of_the_images(removal: str, channels: int) -> None:
    pixels, preprocess = images(channels), wrapped(channels).preprocess
    painted = background(removal, pixels, preprocess, seed=0)
    assert painted.shape == pixels.shape
    if removal == "black":
        assert (painted * 0.3 + 0.4).abs().max() < 1e-15


# where the number of channels comes from


def test_channels_are_those_of_the_first_convolution() -> None:
    assert cv.wrap(vit(6)).preprocess.channels == 6
    assert cv.wrap(nn.Sequential(nn.Conv2d(1, 3, 1), vit(3))).preprocess.channels == 1  # grey made to three
    assert cv.wrap(nn.Linear(1, 1)).preprocess.channels == 3
    assert cv.wrap(vit(3), channels=3).preprocess.channels == 3
    head_first = nn.ModuleDict({"head": nn.Conv2d(256, 2, 1), "stem": nn.Conv2d(2, 8, 3)})
    assert cv.wrap(head_first).preprocess.channels == 2


def test_a_configuration_states_the_channels() -> None:
    import transformers

    small = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.ViTConfig(**small, image_size=SIZE, patch_size=16, num_channels=4)
    model = cv.wrap(transformers.ViTForImageClassification(config))
    assert model.preprocess.mean == (0.5,) * 4
    assert cv.explain(model, images(4).float(), "rollout").maps.shape == (2, 2, 2)


def test_what_is_assumed_about_channels_is_noted() -> None:
    (of_channels, others) = cv.wrap(vit(4)).assumptions
    assert of_channels.startswith("mean and std were assumed: 0.5, because nothing states them for 4 channels")
    assert others.startswith("resize and interpolation were assumed: timm's for vit_tiny_patch16_224")
    assert not any("mean" in note for note in wrapped(4).assumptions)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mean": (0.5, 0.5, 0.5)}, "has 3 numbers, and the model takes 4 channels; expected one number for each"),
        ({"channels": 0}, "channels=0; expected the number of channels"),
        ({"display": (0, 1)}, r"display=\(0, 1\); expected the indices of three channels"),
        ({"display": (0, 1, 4)}, r"display=\(0, 1, 4\); expected the indices in 0…3"),
        ({"display": "rgb"}, "display='rgb'; expected"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        cv.wrap(vit(4), **options)


# what is given


def test_tensors_of_other_channels_are_refused_with_both_numbers() -> None:
    words = r"\[2, 3, 32, 32\]; expected \[B, 4, H, W\] or \[4, H, W\]: the model takes 4 channels, and 3 were given"
    with pytest.raises(BadInput, match=words):
        cv.explain(wrapped(4), images(3))
    with pytest.raises(BadInput, match="the model takes 1 channel, and 3 were given"):
        cv.explain(wrapped(1), list(images(3)))
    with pytest.raises(BadInput, match=r"move the channels first: \.permute"):
        cv.explain(wrapped(4), images(4).permute(0, 2, 3, 1))


def test_grey_files_are_read_as_one_channel(tmp_path: Path) -> None:
    grey = np.random.default_rng(0).integers(0, 256, (SIZE, SIZE), dtype=np.uint8)
    Image.fromarray(grey).save(tmp_path / "grey.png")
    model = wrapped(1, resize=SIZE)
    expected = (torch.from_numpy(grey).float() / 255 - 0.4) / 0.3
    for given in (tmp_path / "grey.png", Image.fromarray(grey), grey, grey[..., None], torch.from_numpy(grey)[None]):
        pixels = prepare([given], model).pixels
        assert torch.equal(pixels[0, 0], expected.double())
    colour = Image.fromarray(np.dstack([grey, grey, grey]))  # luminance weights add up to 1
    assert torch.equal(prepare(colour, model).pixels[0, 0], expected.double())


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
@pytest.mark.parametrize("planar", [False, True])
def test_bands_of_a_tiff_become_channels(tmp_path: Path, dtype: Any, planar: bool) -> None:
    white = np.iinfo(dtype).max
    bands = np.random.default_rng(0).integers(0, white, (SIZE, SIZE, 6), dtype=dtype, endpoint=True)
    path = tmp_path / "bands.tif"
    data = bands.transpose(2, 0, 1) if planar else bands
    tifffile.imwrite(path, data, photometric="minisblack", planarconfig="separate" if planar else "contig")
    model = wrapped(6, resize=SIZE)
    pixels = prepare(path, model).pixels
    expected = (torch.from_numpy(bands.astype(np.float32)).permute(2, 0, 1) / float(white) - 0.4) / 0.3
    torch.testing.assert_close(pixels[0], expected.double(), rtol=1e-6, atol=1e-6)
    assert torch.equal(prepare(bands, model).pixels, pixels)
    assert cv.evaluate(model, [path], "rollout", "deletion").values.isfinite().all()


def test_resizing_is_done_channel_by_channel() -> None:
    bands = np.random.default_rng(0).integers(0, 256, (50, 70, 4), dtype=np.uint8)
    model = wrapped(4)
    grey = cv.wrap(vit(1), mean=0.4, std=0.3)
    planes = torch.cat([prepare(bands[..., i], grey).pixels for i in range(4)], 1)
    assert torch.equal(prepare(bands, model).pixels, planes)


def test_pictures_of_other_channels_are_refused(tmp_path: Path) -> None:
    Image.new("RGB", (40, 40)).save(tmp_path / "rgb.png")
    with pytest.raises(BadInput, match=r"rgb.png' has 3 channels \(shape \[40, 40, 3\]\), and the model takes 4"):
        cv.explain(wrapped(4), tmp_path / "rgb.png")
    with pytest.raises(BadInput, match="and the model takes 6; expected"):
        cv.explain(wrapped(6), "demo")
    with pytest.raises(BadInput, match="type float64; expected uint8"):
        cv.explain(wrapped(4), np.zeros((40, 40, 4)))
    (tmp_path / "broken.tif").write_bytes(b"II*\0nonsense")
    with pytest.raises(BadInput, match=r"broken.tif' .*expected a whole image"):
        cv.explain(wrapped(4), tmp_path / "broken.tif")


# pictures


def test_displayed_channels_are_scaled_to_their_range() -> None:
    pixels = images(6)[0]
    shown = displayed(pixels, wrapped(6, display=(5, 0, 2)).preprocess)
    low, high = pixels.flatten(1).amin(1), pixels.flatten(1).amax(1)
    expected = ((pixels - low[:, None, None]) / (high - low)[:, None, None])[[5, 0, 2]]
    torch.testing.assert_close(shown, expected, rtol=1e-12, atol=1e-12)


def test_one_channel_is_grey_and_two_have_no_blue() -> None:
    grey = displayed(images(1)[0], wrapped(1).preprocess)
    assert grey.shape == (3, SIZE, SIZE)
    assert torch.equal(grey[0], grey[2])
    assert displayed(torch.zeros(1, 2, 2), wrapped(1).preprocess).eq(0).all()  # constant
    two = displayed(images(2)[0], wrapped(2).preprocess)
    assert float(two[1].amax()) == 1
    assert not two[2].any()
    one_of_six = displayed(images(6)[0], wrapped(6, display=(4,)).preprocess)
    assert torch.equal(one_of_six[0], one_of_six[1])


@pytest.mark.parametrize("channels", [1, 2, 6])
def test_pictures_are_drawn_and_say_what_they_show(channels: int, tmp_path: Path) -> None:
    explanation = cv.explain(wrapped(channels), images(channels), "ixg")
    explanation.save(tmp_path / "maps.png")
    assert Image.open(tmp_path / "maps.png").size[0] > 100
    assert any(note.startswith("pictures show channel") for note in explanation.notes)
    assert not any("pictures show" in note for note in cv.explain(wrapped(3), images(3), "ixg").notes)
