"""Check clips: VideoMAE, TimeSformer and modules of an nn.Conv3d, on a grid of frames, rows and columns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from PIL import Image
from torch import Tensor, nn

import clairvit as cv
from clairvit.errors import BadInput, NotApplicable
from clairvit.methods.registry import list_methods
from clairvit.models.images import prepare
from clairvit.perturbation.removal import background, gaussian_blur
from clairvit.plotting.strip import frame_strip, side_by_side
from clairvit.plotting.style import PlotStyle
from helpers.custom_vits import WIDTH, Block, FusedAttention

FRAMES, SIZE, PATCH = 6, 32, 8
TINY = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "image_size": SIZE,
    "patch_size": PATCH,
    "num_frames": FRAMES,
    "num_labels": 5,
}
PLANE = {"scorecam", "vit-cx", "rise", "occlusion", "pami", "hsic", "fullgrad-pixel"}


def randomised(module: nn.Module) -> nn.Module:
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    return module.double().eval()


def videomae() -> Any:
    """Return a VideoMAE whose grid is 3 × 4 × 4: a token has two frames."""
    torch.manual_seed(0)
    return randomised(hf.VideoMAEForVideoClassification(hf.VideoMAEConfig(**TINY, tubelet_size=2)))


def timesformer() -> Any:
    """Return a TimeSformer of divided attention, whose grid is 6 × 4 × 4."""
    torch.manual_seed(0)
    return randomised(hf.TimesformerForVideoClassification(hf.TimesformerConfig(**TINY)))


def vjepa2(model_class: str = "VJEPA2ForVideoClassification") -> Any:
    """Return a V-JEPA 2 whose grid is 3 × 4 × 4, read by an attention pool; the model alone has a predictor too."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "mlp_ratio": 1.5}
    predictor = {"pred_hidden_size": 24, "pred_num_hidden_layers": 1, "pred_num_attention_heads": 2}
    clips = {"crop_size": SIZE, "patch_size": PATCH, "frames_per_clip": FRAMES, "tubelet_size": 2}
    config = hf.VJEPA2Config(**sizes, **predictor, **clips, num_pooler_layers=1, num_labels=5)
    return randomised(getattr(hf, model_class)(config))


class Volumes(nn.Module):
    """A transformer of clips [B, C, T, H, W] with a class token, cut by an nn.Conv3d into 2 × 3 × 4 patches."""

    def __init__(self) -> None:
        super().__init__()
        self.cut = nn.Conv3d(1, WIDTH, (2, 8, 8), (2, 8, 8))
        self.cls_token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.positions = nn.Parameter(torch.randn(1, 25, WIDTH))
        self.blocks = nn.Sequential(Block(FusedAttention), Block(FusedAttention))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, clips: Tensor) -> Tensor:
        patches = self.cut(clips).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.cls_token.expand(len(clips), -1, -1), patches], 1) + self.positions
        return self.head(self.blocks(tokens)[:, 0])


def clips(count: int = 2) -> Tensor:
    """Return clips with their frames first, as transformers takes them."""
    return torch.randn(count, FRAMES, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(2)).double()


# gradients by hand


def test_token_gradients_are_those_of_autograd() -> None:
    net = videomae()
    tokens = net.videomae.embeddings(clips(), None)
    hidden = net.videomae.encoder(tokens).last_hidden_state
    if net.videomae.layernorm is not None:
        hidden = net.videomae.layernorm(hidden)
    scores = net.classifier(net.fc_norm(hidden.mean(1)))
    torch.testing.assert_close(scores, net(clips()).logits)
    (gradient,) = torch.autograd.grad(scores[:, 2].sum(), tokens)
    maps = cv.explain(net, clips(), "ixg", target=2).maps
    expected = (tokens * gradient).sum(-1).reshape(2, 3, 4, 4).detach()
    torch.testing.assert_close(maps, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("build", [videomae, timesformer, vjepa2])
def test_pixel_gradients_are_those_of_autograd(build: Any) -> None:
    net, given = build(), clips().requires_grad_(True)
    (gradient,) = torch.autograd.grad(net(given).logits[:, 2].sum(), given)
    maps = cv.explain(net, clips(), "saliency(level=pixel)", target=2).maps
    torch.testing.assert_close(maps, gradient.abs().amax(2), rtol=1e-9, atol=1e-12)
    pooled = cv.explain(net, clips(), "saliency", target=2).maps
    frames = FRAMES // pooled.shape[1]
    cells = gradient.abs().amax(2).reshape(2, -1, frames, 4, PATCH, 4, PATCH).mean((2, 4, 6))
    torch.testing.assert_close(pooled, cells, rtol=1e-9, atol=1e-12)


def test_volumes_of_one_channel() -> None:
    torch.manual_seed(0)
    net = Volumes().double().eval()
    volumes = torch.randn(2, 1, 4, 24, 32).double()
    model = cv.wrap(net)
    assert (model.preprocess.channels, model.preprocess.frames) == (1, 0)
    structure = cv.trace(model, volumes, target=0).layout
    assert (structure.grid, structure.prefix, structure.pooling) == ((2, 3, 4), 1, "token")
    tokens = torch.cat([net.cls_token.expand(2, -1, -1), net.cut(volumes).flatten(2).transpose(1, 2)], 1)
    tokens = (tokens + net.positions).detach().requires_grad_(True)
    (gradient,) = torch.autograd.grad(net.head(net.blocks(tokens)[:, 0])[:, 1].sum(), tokens)
    maps = cv.explain(model, volumes, "ixg", target=1).maps
    expected = (tokens * gradient).sum(-1)[:, 1:].reshape(2, 2, 3, 4).detach()
    torch.testing.assert_close(maps, expected, rtol=1e-9, atol=1e-12)
    assert cv.explain(model, volumes, "rollout").maps.shape == (2, 2, 3, 4)


# removal


def test_painting_covers_a_patch_in_all_its_frames() -> None:
    net, given = videomae(), clips(1)
    full = net(given).logits[0, 1]
    drops = torch.zeros(3, 4, 4).double()
    for frame, row, col in np.ndindex(3, 4, 4):
        painted = given.clone()
        painted[:, 2 * frame : 2 * frame + 2, :, PATCH * row : PATCH * (row + 1), PATCH * col : PATCH * (col + 1)] = 0
        drops[frame, row, col] = (full - net(painted).logits[0, 1]).detach()
    maps = cv.explain(net, given, "leave-one-out(removal=mean)", target=1, score="logit").maps
    torch.testing.assert_close(maps[0], drops, rtol=1e-8, atol=1e-10)


def test_removed_tokens_are_gone() -> None:
    net, given = videomae(), clips(1)
    tokens = net.videomae.embeddings(given, None)
    full = net(given).logits[0, 1]
    drops = []
    for patch in range(48):
        kept = [i for i in range(48) if i != patch]
        hidden = net.videomae.encoder(tokens[:, kept]).last_hidden_state
        drops.append((full - net.classifier(net.fc_norm(hidden.mean(1)))[0, 1]).detach())
    maps = cv.explain(net, given, "leave-one-out(removal=token)", target=1, score="logit").maps
    torch.testing.assert_close(maps.flatten(), torch.stack(drops), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("removal", ["black", "image-mean", "minimum", "blur", "gaussian-blur", "noise", "mean"])
def test_backgrounds_have_the_shape_of_the_clips(removal: str) -> None:
    given = clips().transpose(1, 2)
    painted = background(removal, given, cv.wrap(videomae()).preprocess, seed=0)
    assert painted.shape == given.shape
    if removal == "gaussian-blur":  # frame by frame
        torch.testing.assert_close(painted[:, :, 4], gaussian_blur(given[:, :, 4]))


def test_road_imputes_frame_by_frame() -> None:
    maps = cv.explain(videomae(), clips(1), "leave-one-out(removal=road)", target=1).maps
    assert maps.isfinite().all()


# methods and metrics


@pytest.mark.filterwarnings("ignore::clairvit.errors.ClairWarning")
def test_every_method_works_or_says_that_it_is_for_images() -> None:
    net, given = videomae(), clips(1)
    refused: dict[str, str] = {}
    for method in list_methods():
        try:
            maps = cv.explain(net, given, method.name).maps
            assert maps.shape == (1, 3, 4, 4), method.name
            assert maps.isfinite().all(), method.name
        except NotApplicable as error:
            refused[method.name] = str(error)
    assert set(refused) == PLANE
    assert all("rows and columns of an image" in reason for reason in refused.values())


def test_divided_attention_is_described_and_refused() -> None:
    words = "within one frame, or among the frames of one place .* which attention methods need"
    for method in ("rollout", "genatt", "atman"):
        with pytest.raises(NotApplicable, match=words):
            cv.explain(timesformer(), clips(1), method)


def with_tokens(net: Any, change: Any) -> Tensor:
    """Return the scores of a TimeSformer whose embedded tokens [1, N, d] are changed."""
    hook = net.timesformer.embeddings.register_forward_hook(lambda module, args, tokens: change(tokens))
    try:
        return net(clips(1)).logits[0, 1]
    finally:
        hook.remove()


def test_tokens_of_divided_attention_lie_place_by_place() -> None:
    """TimeSformer's tokens are in the order rows, columns, frames; its maps are not."""
    net = timesformer()
    layout = cv.trace(net, clips(1), target=1).layout
    assert (layout.grid, layout.prefix, layout.time_last) == ((6, 4, 4), 1, True)
    assert (layout.pooling, layout.read) == ("token", ((0, 1.0),))
    leaves: list[Tensor] = []
    score = with_tokens(net, lambda tokens: leaves.append(tokens.detach().requires_grad_(True)) or leaves[0])
    (gradient,) = torch.autograd.grad(score, leaves)
    expected = (leaves[0] * gradient).sum(-1)[:, 1:].reshape(1, 4, 4, 6).permute(0, 3, 1, 2).detach()
    maps = cv.explain(net, clips(1), "ixg", target=1).maps
    torch.testing.assert_close(maps, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "method", ["attnlrp", "decompx", "gradcam(relu=false)", "reslrp", "lrp", "kernelshap(samples=200)"]
)
def test_gradients_relevance_and_perturbation_of_divided_attention(method: str) -> None:
    maps = cv.explain(timesformer(), clips(1), method, target=1).maps
    assert maps.shape == (1, 6, 4, 4)
    assert maps.std() > 0


def test_removed_tokens_of_divided_attention() -> None:
    """A patch cannot be dropped from frames of fixed size: its token is set to zero, and a note says so."""
    net = timesformer()
    full = net(clips(1)).logits[0, 1].detach()
    explanation = cv.explain(net, clips(1), "leave-one-out", target=1, score="logit")
    assert any("set to zero" in note for note in explanation.notes)
    for frame, row, col in ((0, 0, 3), (2, 1, 0), (5, 3, 2)):
        keep = torch.ones(1, 97, 1).double()
        keep[0, 1 + (row * 4 + col) * 6 + frame] = 0
        drop = full - with_tokens(net, lambda tokens, keep=keep: tokens * keep).detach()
        torch.testing.assert_close(explanation.maps[0, frame, row, col], drop, rtol=1e-8, atol=1e-10)


METRICS = ["deletion(steps=4)", "road(steps=2)", "faithfulness-correlation", "infidelity", "saco", "sparseness"]


def test_metrics_rank_all_patches_of_all_frames() -> None:
    net = videomae()
    explanation = cv.explain(net, clips(), "ixg", target=1)
    scores = cv.evaluate(net, clips(), ["ixg"], METRICS, target=1)
    assert all(np.isfinite(scores["ixg", cv.parse_metric(metric).text].mean) for metric in METRICS)
    given = cv.evaluate(net, clips(), explanation, METRICS[0], target=1)
    torch.testing.assert_close(given.values, scores["ixg", cv.parse_metric(METRICS[0]).text].values)
    with pytest.raises(NotApplicable, match="Superpixels are those of an image"):
        cv.evaluate(net, clips(), "ixg", "irof")
    with pytest.raises(NotApplicable, match="Features are drawn on images"):
        cv.features(net, clips())
    for check in explanation.check():
        assert check.grid == explanation.maps.shape[1:]
        assert -1 <= check.partial <= 1
        assert "noise" in check.answer.sentence


def test_deletion_removes_the_highest_patches_first() -> None:
    net, given = videomae(), clips(1)
    maps = torch.randn(1, 3, 4, 4, generator=torch.Generator().manual_seed(3)).double()
    explanation = cv.explain(net, given, "random", target=1)
    explanation = type(explanation)(**{**vars(explanation), "maps": maps})
    order = maps.flatten().argsort(descending=True)
    probabilities = []
    for removed in (0, 12, 24, 36, 48):
        keep = torch.ones(48)
        keep[order[:removed]] = 0
        visible = keep.reshape(3, 4, 4).repeat_interleave(2, 0).repeat_interleave(8, 1).repeat_interleave(8, 2)
        probabilities.append(net(given * visible[None, :, None]).logits.softmax(-1)[0, 1].detach())
    expected = torch.trapezoid(torch.stack(probabilities), dx=0.25)
    score = cv.evaluate(net, given, explanation, "deletion(steps=3,ends=true,removal=mean)", target=1)
    torch.testing.assert_close(score.values, expected[None], rtol=1e-8, atol=1e-10)


# inputs


def frames() -> list[Image.Image]:
    rng = np.random.default_rng(0)
    return [Image.fromarray(rng.integers(0, 256, (40, 48, 3), np.uint8)) for _ in range(FRAMES)]


def test_both_orders_of_axes_are_the_same_clip() -> None:
    model = cv.wrap(videomae())
    expected = clips().transpose(1, 2)
    for given in (clips(), clips().transpose(1, 2), list(clips()), [clip.transpose(0, 1) for clip in clips()]):
        assert torch.equal(prepare(given, model).pixels, expected)
    assert torch.equal(prepare(clips()[0], model).pixels, expected[:1])


def test_as_many_frames_as_channels_are_frames_first() -> None:
    torch.manual_seed(0)
    config = hf.TimesformerConfig(**(TINY | {"num_frames": 3}))
    model = cv.wrap(hf.TimesformerForVideoClassification(config))
    given = torch.randn(1, 3, 3, SIZE, SIZE)
    assert torch.equal(prepare(given, model).pixels, given.transpose(1, 2))
    explained = cv.explain(model, given, "saliency", target=1)
    scores = [cv.evaluate(model, given, method, "deletion(steps=3)", target=1) for method in ("saliency", explained)]
    assert torch.equal(scores[0].values, scores[1].values)


def test_lists_of_frames_are_clips() -> None:
    model = cv.wrap(videomae(), mean=0.5, std=0.5)
    single = prepare(frames(), model)
    assert (single.pixels.shape, single.single) == ((1, 3, FRAMES, SIZE, SIZE), True)
    image_model = cv.wrap(nn.Conv2d(3, 1, 1), mean=0.5, std=0.5, size=SIZE)
    by_frame = torch.stack([prepare(frame, image_model).pixels[0] for frame in frames()], 1)
    assert torch.equal(single.pixels[0], by_frame.double())
    two = cv.explain(model, [frames(), frames()[::-1]], "ixg", target=1)
    assert two.maps.shape == (2, 3, 4, 4)
    assert cv.evaluate(model, [frames(), frames()], "ixg", "sparseness").n_valid == 2


def test_a_folder_is_loaded(tmp_path: Path) -> None:
    videomae().float().save_pretrained(tmp_path)
    size = {"height": SIZE, "width": SIZE}
    hf.ViTImageProcessor(size=size, image_mean=[0.5] * 3, image_std=[0.5] * 3).save_pretrained(tmp_path)
    model = cv.load(f"hf:{tmp_path}")
    assert (model.preprocess.frames, model.preprocess.size) == (FRAMES, (SIZE, SIZE))
    assert cv.explain(model, frames(), "ixg").maps.shape == (1, 3, 4, 4)


@pytest.mark.parametrize(
    ("model_class", "config_class"),
    [("VideoMAEModel", "VideoMAEConfig"), ("TimesformerModel", "TimesformerConfig"), ("VivitModel", "VivitConfig")],
)
def test_encoders_are_embeddings_of_clips(model_class: str, config_class: str) -> None:
    torch.manual_seed(0)
    options = TINY if config_class != "VivitConfig" else TINY | {"tubelet_size": [2, PATCH, PATCH]}
    options = {name: value for name, value in options.items() if name not in ("num_labels",)}
    model = cv.wrap(getattr(hf, model_class)(getattr(hf, config_class)(**options)))
    assert not model.classifier
    embedding = cv.explain(model, clips(1).float(), "saliency", target=lambda scores: scores.square().sum(1))
    assert embedding.maps.shape[2:] == (4, 4)


def test_the_encoder_of_v_jepa_2_runs_without_its_predictor() -> None:
    net = vjepa2("VJEPA2Model")
    model = cv.wrap(net)
    assert (model.preprocess.size, model.preprocess.frames) == ((SIZE, SIZE), FRAMES)
    trace = cv.trace(model, clips(1), target=1)
    assert len(trace.layers) == 2
    expected = net(clips(1), skip_predictor=True).last_hidden_state.mean(1)
    torch.testing.assert_close(trace.logits, expected, rtol=1e-12, atol=1e-12)
    assert cv.explain(model, clips(1), "rollout", target=1).maps.shape == (1, 3, 4, 4)


# similarity of two clips


def test_gradients_of_the_cosine_of_two_clips() -> None:
    net, (first, second) = videomae(), clips().split(1)

    def embedding(clip: Tensor) -> Tensor:
        hidden = net.videomae(clip).last_hidden_state
        return net.fc_norm(hidden.mean(1))

    given = first.clone().requires_grad_(True)
    cosine = torch.nn.functional.cosine_similarity(embedding(given), embedding(second).detach())
    (gradient,) = torch.autograd.grad(cosine.sum(), given)
    explanation = cv.explain(net, first, "saliency(level=pixel)", target=cv.Similar(second))
    assert explanation.target_scores[0] == pytest.approx(cosine.item(), rel=1e-10)
    torch.testing.assert_close(explanation.maps, gradient.abs().amax(2), rtol=1e-9, atol=1e-12)


def test_both_directions_of_clips_whose_axes_are_ambiguous(tmp_path: Path) -> None:
    """As many frames as channels: a tensor of pixels [3, 3, H, W] would be read frames first."""
    torch.manual_seed(0)
    options = {**TINY, "num_frames": 3, "tubelet_size": 1}
    net = randomised(hf.VideoMAEForVideoClassification(hf.VideoMAEConfig(**options)))
    first, second = clips()[:, :3].split(1)
    pair = cv.match(net, first[0], second[0], "ixg")
    for item, (clip, other) in enumerate(((first, second), (second, first))):
        alone = cv.explain(net, clip, "ixg", target=cv.Similar(other))
        torch.testing.assert_close(pair.explanation.maps[item], alone.maps[0], rtol=1e-9, atol=1e-12)
        assert alone.target_scores[0] == pytest.approx(pair.cosine, rel=1e-10)
    assert Image.open(pair.save(tmp_path / "clips.png")).size[0] > 200


def test_the_embedding_of_clips_of_any_length_needs_their_length() -> None:
    torch.manual_seed(0)
    volumes = Volumes().double().eval()
    clip = torch.randn(1, 1, 4, 24, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    options: dict[str, Any] = {"size": (24, 32), "mean": 0.5, "std": 0.5}
    with pytest.raises(NotApplicable, match=r"any number of frames.*cv\.wrap\(module, frames=16\)"):
        cv.explain(cv.wrap(volumes, **options), clip, "ixg", target=cv.Similar(clip.flip(-1)))
    model = cv.wrap(volumes, frames=4, **options)
    assert cv.explain(model, clip, "ixg", target=cv.Similar(clip)).target_scores[0] == pytest.approx(1, rel=1e-12)


def test_a_loader_of_clips() -> None:
    dataset = torch.utils.data.TensorDataset(clips(), torch.arange(2))
    loader = torch.utils.data.DataLoader(dataset, batch_size=2)
    net = videomae()
    assert torch.equal(cv.explain(net, loader, "ixg", target=1).maps, cv.explain(net, clips(), "ixg", target=1).maps)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (torch.randn(1, 4, 3, SIZE, SIZE), r"A clip of 4 frames was given, and \w+ takes 6; expected 6 frames"),
        (torch.randn(3, SIZE, SIZE), r"takes clips of 6 frames, and .*expected a float tensor \[B, 6, 3, H, W\]"),
        ("demo", r"takes clips of 6 frames, and a str was given; expected"),
        (torch.randn(1, 5, 5, SIZE, SIZE), r"a tensor of shape \[5, 5, 32, 32\] was given"),
    ],
)
def test_what_is_no_clip_is_refused(given: Any, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        cv.explain(cv.wrap(videomae(), mean=0.5, std=0.5), given)


def test_images_are_no_clips() -> None:
    with pytest.raises(BadInput, match=r"\[1, 6, 3, 32, 32\]; expected \[B, 3, H, W\]"):
        cv.explain(cv.load("scenes"), clips(1).float())
    with pytest.raises(BadInput, match="frames=0; expected the number of frames"):
        cv.wrap(Volumes(), frames=0)
    with pytest.raises(BadInput, match=r"expected \(rows, columns\) of patches"):
        cv.Layout(grid=(2, 2, 2, 2), prefix=0, pooling="avg")


# pictures


def test_frames_lie_side_by_side_with_their_maps(tmp_path: Path) -> None:
    explanation = cv.explain(videomae(), clips(), "ixg", target=1)
    strip = frame_strip(explanation, PlotStyle(smooth=False))
    assert strip.pixels.shape == (2, 3, SIZE, 3 * SIZE)
    assert torch.equal(strip.pixels[:, :, :, SIZE : 2 * SIZE], clips()[:, 3].to(strip.pixels))  # the middle of 2 and 3
    assert torch.equal(strip.maps[:, ::PATCH, SIZE : 2 * SIZE : PATCH], explanation.maps[:, 1])
    assert side_by_side(torch.arange(8.0).reshape(8, 1, 1)).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    explanation.save(tmp_path / "clip.png")
    assert Image.open(tmp_path / "clip.png").size[0] > 200
    cv.compare(videomae(), clips(1), ["ixg", "saliency"]).save(tmp_path / "compared.png")
    images = cv.explain(cv.load("scenes"), torch.randn(1, 3, 96, 96), "ixg")
    assert frame_strip(images, PlotStyle()) is images
