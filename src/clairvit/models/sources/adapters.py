"""Adapter modules that give one row per image: pooled backbones, image towers, zero-shot classifiers."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from clairvit.errors import BadInput, NotApplicable
from clairvit.models.activation import StatedActivation
from clairvit.models.model import Model
from clairvit.models.readout import HeadInput, evaluation_copy, linear_calls
from clairvit.models.scores import extract_scores
from clairvit.models.text_encoder import is_pair


class ZeroShot(nn.Module):
    """Classify by prompts: logits = scale · cos(image, prompt) + bias [B, prompts]; the bias is SigLIP's.

    A model with a bias was trained with a sigmoid per pair of image and text: every prompt has a probability of its
    own, also a single one. Without a bias, a softmax compares two prompts or more; a single prompt has nothing to be
    compared with, and its score is the cosine.
    """

    text: Tensor
    scale: Tensor
    bias: Tensor

    def __init__(self, tower: nn.Module, text: Tensor, scale: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.tower = tower
        self.num_classes = len(text)
        self.sigmoid = bias is not None
        self.register_buffer("text", normalize(text.detach(), dim=-1).clone())  # [C, d]
        self.register_buffer("scale", scale.detach().clone())
        self.register_buffer("bias", torch.zeros_like(scale) if bias is None else bias.detach().clone())

    @property
    def stated_activation(self) -> StatedActivation:
        """Return what the scores mean, which follows from the bias and the number of prompts."""
        if self.sigmoid:
            return StatedActivation(
                "sigmoid", "zero-shot with a bias (SigLIP): every prompt has a probability of its own"
            )
        if self.num_classes == 1:
            return StatedActivation("raw", "a single prompt has nothing to be compared with: its score is the cosine")
        return StatedActivation("softmax", "zero-shot: the prompts are compared with each other")

    def use_cosine(self) -> None:
        """Score by the cosine itself, in -1…1: a raw score needs neither the trained scale nor the bias."""
        self.scale = torch.ones_like(self.scale)
        self.bias = torch.zeros_like(self.bias)

    def forward(self, pixels: Tensor) -> Tensor:
        image = normalize(extract_scores(self.tower(pixels)), dim=-1)  # [B, d]
        return self.scale * image @ self.text.T + self.bias


def takes_patches(model: nn.Module | type[nn.Module]) -> bool:
    """Return whether a model takes patches that were cut beforehand, and their grid (SigLIP 2, NaFlex)."""
    forward: Any = model.forward
    return "spatial_shapes" in inspect.signature(forward).parameters


def cut_patches(pixels: Tensor, patch_size: int) -> Tensor:
    """Return the patches of pixels [B, C, H, W] row by row, [B, rows · cols, p · p · C], a patch's channels last."""
    batch, channels, height, width = pixels.shape
    if height % patch_size or width % patch_size:
        raise BadInput(
            f"Images of {height} × {width} pixels were given; expected sides that are multiples of the patch size "
            f"{patch_size}, such as {-(-height // patch_size) * patch_size} × {-(-width // patch_size) * patch_size}."
        )
    rows, cols = height // patch_size, width // patch_size
    cells = pixels.reshape(batch, channels, rows, patch_size, cols, patch_size).permute(0, 2, 4, 3, 5, 1)
    return cells.reshape(batch, rows * cols, -1)


def image_inputs(model: nn.Module, pixels: Tensor) -> dict[str, Any]:
    """Return the arguments by which a transformers model takes pixels [B, C, H, W].

    A NaFlex model takes patches and their grid; all images of a batch have one size, so that nothing is padded and no
    attention mask is needed.
    """
    if not takes_patches(model):
        return {"pixel_values": pixels}
    config: Any = model.config
    patch_size = int(getattr(config, "vision_config", config).patch_size)
    grid = [pixels.shape[-2] // patch_size, pixels.shape[-1] // patch_size]
    shapes = torch.tensor(grid, device=pixels.device).expand(len(pixels), -1)
    patches = cut_patches(pixels, patch_size)
    return {"pixel_values": patches, "pixel_attention_mask": None, "spatial_shapes": shapes}


class FramesFirst(nn.Module):
    """A transformers model of clips [B, T, C, H, W] as one of clips [B, C, T, H, W], as ClairViT keeps them.

    V-JEPA 2 runs its predictor after the encoder, whose output nothing here reads: it is left out.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.has_predictor = "skip_predictor" in inspect.signature(model.forward).parameters

    @property
    def config(self) -> Any:
        """Return the configuration of the model."""
        return self.model.config

    def forward(self, clips: Tensor) -> Any:
        options = {"skip_predictor": True} if self.has_predictor else {}
        return self.model(clips.transpose(1, 2), **options)


class VariableSize(nn.Module):
    """A model of cut patches (SigLIP 2, NaFlex) as one of images of any size: pixels [B, C, H, W] -> its output."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    @property
    def config(self) -> Any:
        """Return the configuration of the model."""
        return self.model.config

    def forward(self, pixels: Tensor) -> Any:
        return self.model(**image_inputs(self.model, pixels))


def takes_images(model: nn.Module) -> nn.Module:
    """Return a model as one that takes pixels [B, C, H, W] or clips [B, C, T, H, W]: most come back as they are."""
    if takes_patches(model):
        return VariableSize(model)
    return FramesFirst(model) if takes_clips(type(model), getattr(model, "config", None)) else model


def takes_clips(model_class: type[nn.Module], config: Any) -> bool:
    """Return whether a transformers class takes the frames of a clip, [B, T, C, H, W]."""
    if not model_class.__module__.startswith("transformers."):
        return False
    parameters = inspect.signature(model_class.forward).parameters
    return (
        getattr(model_class, "input_modalities", ()) in ("video", ("video",))
        or "pixel_values_videos" in parameters
        or any(hasattr(config, name) for name in ("tubelet_size", "num_frames"))
    )


def clip_frames(module: nn.Module) -> int | None:
    """Return the frames of a clip that a module takes, 0 for any number; None for a module of images."""
    config = getattr(module, "config", None)
    if "image_grid_thw" in inspect.signature(module.forward).parameters:
        return None  # Qwen2-VL, which takes clips too: its images are two equal frames
    if takes_clips(type(module), config):
        count = getattr(config, "num_frames", None) or getattr(config, "frames_per_clip", None)
        return count if isinstance(count, int) else 0
    layers = (layer for layer in module.modules() if isinstance(layer, nn.Conv2d | nn.Conv3d))
    return 0 if isinstance(next(layers, None), nn.Conv3d) else None


class ImageTower(nn.Module):
    """The image encoder of an image-and-text model: pixels [B, 3, H, W] -> projected embedding [B, d].

    Images of another size than the trained one get interpolated position embeddings, where transformers offers that.
    """

    def __init__(self, pair: nn.Module) -> None:
        super().__init__()
        self.pair = pair

    def forward(self, pixels: Tensor) -> Tensor:
        """Return the embeddings [B, d] of pixels [B, 3, H, W]."""
        pair: Any = self.pair
        if not hasattr(pair, "get_image_features"):
            return extract_scores(pair.encode_image(pixels))
        options = {} if tuple(pixels.shape[-2:]) == _trained_size(pair) else interpolation_option(type(pair))
        return extract_scores(pair.get_image_features(**image_inputs(pair, pixels), **options))


def interpolation_option(pair_class: Any) -> dict[str, bool]:
    """Return the argument that makes a pair of transformers take images of any size; {} if it has none."""
    name = "interpolate_pos_encoding"
    return {name: True} if name in inspect.signature(pair_class.get_image_features).parameters else {}


def _trained_size(pair: Any) -> tuple[int, int] | None:
    """Return the rows and columns of a pair's images by its configuration; None if it does not say."""
    size = getattr(getattr(pair.config, "vision_config", pair.config), "image_size", None)
    return (size, size) if isinstance(size, int) else None if size is None else tuple(size)


def embedding_part(model: Model) -> nn.Module:
    """Return the part of a model's module whose output is the image's embedding.

    The image tower of an image-and-text model; of an embedding the module itself; of a classifier the module up to its
    head, the linear layer that gives the scores.

    Raises:
        NotApplicable: There is no such part.
    """
    module = model.module
    if isinstance(module, ZeroShot):
        return module.tower
    if is_pair(module):
        return ImageTower(module)
    if model.returns:
        raise NotApplicable(f"{model.name} has no embedding that images could be compared by. ", model.returns)
    return HeadInput(module, linear_head(model)) if model.classifier else module


def linear_head(model: Model) -> str:
    """Return the name of the linear layer whose output are the scores of a classifier and whose input is [B, d]."""
    names = [name for name, part in model.module.named_modules() if isinstance(part, nn.Linear) and name]
    preprocess = model.preprocess
    if preprocess.frames == 0:
        raise NotApplicable(
            f"{model.name} takes clips of any number of frames, and one has to be run to find its embedding; say how "
            "many frames they have: cv.wrap(module, frames=16)."
        )
    frames = () if preprocess.frames is None else (preprocess.frames,)
    shape = (1, preprocess.channels, *frames, *preprocess.size)
    pixels = torch.zeros(shape, device=model.device, dtype=model.dtype)
    module = evaluation_copy(model.module)
    with torch.inference_mode(False), torch.no_grad(), linear_calls(module, names) as calls:
        scores = model.scores(module(pixels))
    last = calls[-1] if calls else None
    if last is None or last.input.ndim != 2 or not torch.equal(last.output, scores):
        raise NotApplicable(
            f"The scores of {model.name} are not the output of one linear layer that reads [B, d], so nothing says "
            "which numbers are its embedding. Wrap the part that gives the embedding: cv.wrap(part, classifier=False)."
        )
    return last.name


def drop_submodules(module: nn.Module, names: Sequence[str]) -> nn.Module:
    """Remove submodules of a pair that was loaded for its other tower, to free their memory; return the module."""
    for name in names:
        if isinstance(getattr(module, name, None), nn.Module):
            setattr(module, name, None)
    return module


class Backbone(nn.Module):
    """A model without a head: its pooled output or, if there is none, its class token or the mean of its tokens."""

    def __init__(self, model: nn.Module, pooled: bool) -> None:
        super().__init__()
        self.model = model
        self.pooled = pooled

    def forward(self, pixels: Tensor) -> Tensor:
        """Return the embeddings [B, d] of pixels [B, 3, H, W]."""
        return self.pool(takes_images(self.model)(pixels))

    def pool(self, output: Any) -> Tensor:
        """Return one embedding per image, [B, d], of what the model returned."""
        for name in ("image_embeds", "pooler_output") if self.pooled else ():
            pooled = getattr(output, name, None)
            if isinstance(pooled, Tensor):
                return pooled.flatten(1)
        tokens = getattr(output, "last_hidden_state", None)
        if not isinstance(tokens, Tensor) or tokens.ndim not in (3, 4):
            raise BadInput(
                f"{type(self.model).__name__} returned a {type(output).__name__} without a last_hidden_state of tokens "
                "or feature maps; expected one. Wrap it in a module whose forward returns [B, d], then cv.wrap that."
            )
        if tokens.ndim == 4:
            return tokens.mean((2, 3))  # [B, d, h, w]
        return tokens[:, 0] if self._has_class_token else tokens.mean(1)

    @property
    def _has_class_token(self) -> bool:
        names = (name.rpartition(".")[2] for name, _ in self.model.named_parameters())
        return any(name in ("cls_token", "class_embedding", "class_token") for name in names)


class UnmaskedEncoder(Backbone):
    """ViTMAE's encoder on all patches, in order: its mask ratio is 0 during a forward pass and restored afterwards."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, pooled=False)

    def forward(self, pixels: Tensor) -> Tensor:
        """Return the embeddings [B, d] of pixels [B, 3, H, W]."""
        embeddings: Any = self.model.embeddings
        count = int(embeddings.patch_embeddings.num_patches)
        order = torch.arange(count, device=pixels.device, dtype=torch.float32).expand(len(pixels), -1)  # sorted noise
        with _mask_ratio(embeddings.config, 0.0):
            return self.pool(self.model(pixels, noise=order))


@contextmanager
def _mask_ratio(config: Any, ratio: float) -> Iterator[None]:
    """Set the mask ratio inside the block and restore it afterwards."""
    before = config.mask_ratio
    config.mask_ratio = ratio
    try:
        yield
    finally:
        config.mask_ratio = before
