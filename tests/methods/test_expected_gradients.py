"""Expected Gradients against a loop of plain autograd in float64 with the same draws, and against its expectation."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import clairvit as cv
from clairvit._rng import image_seeds
from clairvit.errors import BadInput
from clairvit.methods.expected_gradients import draws
from clairvit.methods.spec import resolve_method
from clairvit.perturbation.removal import gaussian_blur
from clairvit.web.state import resolve_request
from helpers.exact_models import TARGETS, build, images_for, wrapped
from helpers.linear_patch_model import effects, linear
from helpers.reference_vit import forward, score, written_out
from helpers.rounding import assert_same

SAMPLES = 7
KINDS = ["plain", "registers", "avg", "map"]


def copies(pixels: Tensor) -> Tensor:
    """The default references: the mean colour, which is zero, and the image blurred. [2, B, 3, H, W]"""
    return torch.stack([torch.zeros_like(pixels), gaussian_blur(pixels)])


def pixel_gradient(module: nn.Module, pixels: Tensor) -> Tensor:
    leaf = pixels.detach().clone().requires_grad_(True)
    return torch.autograd.grad(score(module(leaf), TARGETS), leaf)[0]


def terms_by_hand(module: nn.Module, pixels: Tensor, references: Tensor, seed: int = 0) -> Tensor:
    """(x − x') · gradient of every draw, one image and one pass at a time: [n, B, H, W]."""
    picks, alphas = draws(image_seeds(pixels, seed), len(references), SAMPLES)
    terms = []
    for pick, alpha in zip(picks, alphas, strict=True):
        x0 = torch.stack([references[pick[b], b] for b in range(len(pixels))])
        on_path = torch.stack([x0[b] + alpha[b] * (pixels[b] - x0[b]) for b in range(len(pixels))])
        terms.append(((pixels - x0) * pixel_gradient(module, on_path)).sum(1))
    return torch.stack(terms)


def pooled(terms: Tensor) -> Tensor:
    """[n, B, H, W] -> [n, B, rows, cols], summed over patches of 4 × 4."""
    return terms.unfold(2, 4, 4).unfold(3, 4, 4).sum((-2, -1))


@pytest.mark.parametrize("kind", KINDS)
def test_pixels_by_hand_with_the_same_draws(kind: str) -> None:
    module = build(kind)
    pixels = images_for(module)
    terms = terms_by_hand(module, pixels, copies(pixels))
    for level, expected in (("pixel", terms), ("patch", pooled(terms))):
        explanation = cv.explain(
            wrapped(module), pixels, f"expected-gradients(samples={SAMPLES},level={level})", target=TARGETS
        )
        assert_same(explanation.maps, expected.mean(0))
        assert explanation.standard_error is not None
        assert_same(explanation.standard_error, expected.std(0) / SAMPLES**0.5)


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_by_hand_with_the_same_draws(kind: str) -> None:
    module = build(kind)
    pixels, vit = images_for(module), written_out(module)
    with torch.no_grad():
        x, ends = vit.embed(pixels), torch.stack([vit.embed(reference) for reference in copies(pixels)])
    picks, alphas = draws(image_seeds(pixels, 0), 2, SAMPLES)
    total = torch.zeros_like(x)
    for pick, alpha in zip(picks, alphas, strict=True):
        x0 = ends[pick, torch.arange(len(x))]
        leaf = torch.lerp(x0, x, alpha[:, None, None]).requires_grad_(True)
        total += (x - x0) * torch.autograd.grad(score(forward(vit, leaf).logits, TARGETS), leaf)[0]
    explanation = cv.explain(
        wrapped(module), pixels, f"expected-gradients(samples={SAMPLES},level=token)", target=TARGETS
    )
    assert_same(explanation.maps, (total.sum(-1) / SAMPLES)[:, vit.prefix :].unflatten(1, vit.grid))


def test_a_linear_model_has_the_same_map_in_every_draw() -> None:
    """Its gradient is constant, so that only the reference matters: with one, the map is exact and has no error."""
    model, image = linear()
    explanation = cv.explain(model, image, "expected-gradients(samples=3,references=mean)", target=1, score="logit")
    assert_same(explanation.maps[0], effects(model, image, 1))
    assert explanation.standard_error is not None
    assert_same(
        explanation.standard_error, torch.zeros_like(explanation.maps), magnitude=float(explanation.maps.abs().max())
    )
    blurred = cv.explain(model, image, "expected-gradients(samples=3,references=blur)", target=1, score="logit")
    assert_same(blurred.maps[0], effects(model, image, 1) - effects(model, gaussian_blur(image), 1))


def test_the_expectation_is_the_mean_of_integrated_gradients_and_is_complete() -> None:
    """400 draws stay within five standard errors of the integral, which adds up to the score's rise."""
    module = build("plain")
    pixels = images_for(module)
    points, weights = np.polynomial.legendre.leggauss(40)
    integral = torch.zeros_like(pixels)
    for reference in copies(pixels):
        for point, weight in zip((points + 1) / 2, weights / 2, strict=True):
            on_path = torch.lerp(reference, pixels, float(point))
            integral += (pixels - reference) * pixel_gradient(module, on_path) * weight / 2
    explanation = cv.explain(wrapped(module), pixels, "expected-gradients(samples=400)", target=TARGETS)
    expected = pooled(integral.sum(1)[None])[0]
    assert explanation.standard_error is not None
    assert ((explanation.maps - expected).abs() <= 5 * explanation.standard_error).all()
    assert (explanation.standard_error > 0).all()
    with torch.no_grad():
        logits = torch.stack([module(images) for images in (pixels, *copies(pixels))])[:, torch.arange(2), TARGETS]
    rise = logits[0] - logits[1:].mean(0)
    assert ((integral.sum((1, 2, 3)) - rise).abs() < 1e-3 * rise.abs()).all()  # of the quadrature
    assert f"rises by {rise[0]:.3g}, {rise[1]:.3g} from the references" in explanation.notes[0]
    errors = [float(text) for text in explanation.notes[0].rpartition("error is ")[2].split(", ")]
    gaps = (explanation.maps.sum((1, 2)) - rise).abs().tolist()
    assert all(gap <= 5 * error for gap, error in zip(gaps, errors, strict=True))


def test_references_from_a_folder(tmp_path: Path) -> None:
    noise = np.random.default_rng(0)
    for index in range(5):
        Image.fromarray(noise.integers(0, 256, (12, 20, 3), dtype=np.uint8)).save(tmp_path / f"{index}.png")
    module = build("plain")
    pixels, model = images_for(module), wrapped(module)
    name = f"expected-gradients(samples={SAMPLES},references={tmp_path})"
    explanation = cv.explain(model, pixels, name, target=TARGETS)
    files = [np.array(Image.open(tmp_path / f"{index}.png")) for index in range(5)]
    references = torch.stack([torch.from_numpy(file).permute(2, 0, 1).float() / 255 for file in files])
    normalised = ((references - 0.5) / 0.5).double()[:, None].expand(-1, 2, -1, -1, -1)
    assert_same(explanation.maps, pooled(terms_by_hand(module, pixels, normalised)).mean(0))
    assert (explanation.cost.forwards, explanation.cost.backwards) == (1 + SAMPLES + 5, SAMPLES)
    few = f"expected-gradients(samples=3,references={tmp_path})"
    assert resolve_method(few).own_cost(15).forwards == 3 + 3  # no more references than draws
    assert cv.explain(model, pixels, few, target=TARGETS).cost.forwards == 1 + 3 + 3


@pytest.mark.parametrize(
    ("references", "message"),
    [
        ("blurr", "Did you mean 'blur'"),
        ("/nowhere/at/all", "nowhere"),
        ("", "copies, mean"),
        ("a" * 5000, "is no path"),
    ],
)
def test_unusable_references_are_refused(references: str, message: str) -> None:
    module = build("plain")
    with pytest.raises(BadInput, match=message):
        cv.explain(wrapped(module), images_for(module), "expected-gradients", target=TARGETS, references=references)


def test_references_of_another_size_are_refused(tmp_path: Path) -> None:
    Image.new("RGB", (40, 40)).save(tmp_path / "a.png")
    model, image = linear(grid=(4, 4), patch=8)
    other = cv.wrap(model.module, size=(32, 64), layout=cv.Layout((4, 4), 0, "avg"))
    with pytest.raises(BadInput, match="32 × 64 pixels; the explained ones have 32 × 32"):
        cv.explain(other, image, f"expected-gradients(references={tmp_path})", target=1)


def test_a_server_reads_no_folder_for_others() -> None:
    assert resolve_request(["expected-gradients(references=blur)"], 196)[1] == "slow"
    with pytest.raises(BadInput, match="reads no files"):
        resolve_request(["expected-gradients(references=/home)"], 196)
    with pytest.raises(BadInput, match="reads no files"):
        resolve_request(["ensemble(rollout,expected-gradients(references=/home))"], 196)
