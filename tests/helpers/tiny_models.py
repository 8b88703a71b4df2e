"""Tiny Vision Transformers of every kind, with the properties of each one written down by hand.

    from helpers.tiny_models import ZOO, build, pixels

`build(name)` is seeded and randomised: biases, LayerScale, heads, norms and tokens are far from zero and from one, so a
test that forgets one of them fails. `ZOO[name]` has the properties that a trace must find by itself.
"""

from __future__ import annotations

import copy
import functools
import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import open_clip
import timm
import torch
import torchvision
import transformers as hf
from open_clip.transformer import VisionTransformer as OpenClipTower
from torch import Tensor, nn

import clairvit as cv
from helpers.custom_vits import (
    CLASSES,
    DEPTH,
    HEADS,
    PATCH,
    WIDTH,
    BatchedAttention,
    BiasedAttention,
    Block,
    Convolved,
    EinsumAttention,
    FusedAttention,
    GroupedAttention,
    HomeMade,
    InPlaceBlock,
    Loop,
    Lucid,
    MatmulAttention,
    MeanPool,
    SequenceFirst,
    TorchEncoder,
    TransposedEinsumAttention,
    ValuesFirstEinsumAttention,
    encoder_layer,
)
from helpers.rounding import growth
from helpers.shared_models import shared_model

Reference = Literal["hf", "mha", "drop"]


@dataclass(frozen=True)
class Tiny:
    """One configuration: how it is built, and the properties that a trace must find."""

    make: Callable[[], nn.Module]
    size: tuple[int, int] = (32, 32)
    grid: tuple[int, int] = (4, 4)
    prefix: int = 1
    pooling: str = "token"
    layers: int = DEPTH
    pools: int = 0  # attention calls after the layers that gather tokens
    queries: int = 1  # latent queries of the pool that the head reads
    blocks: str = ""  # where the block modules are; "" = the blocks are no modules
    reference: Reference | None = None  # how to get A and G without ClairViT
    sums_to_one: bool = True  # False: talking heads mix the rows after the softmax
    classifier: bool = True
    lacks: frozenset[str] = frozenset()  # of what methods may declare that they need
    full_size: bool = False  # the real constructor: slow, only for the capture test

    @property
    def tokens(self) -> int:
        return self.prefix + self.grid[0] * self.grid[1]

    @property
    def read(self) -> dict[int, float]:
        """Row -> weight, for each row that the head reads."""
        patches = range(self.prefix, self.tokens)
        if self.pooling == "map":
            return dict.fromkeys(range(self.queries), 1 / self.queries)
        if self.pooling == "mixed":
            return {0: 0.5} | dict.fromkeys(patches, 0.5 / len(patches))
        rows = {"token": [0], "distilled": [0, 1], "avg": list(patches)}[self.pooling]
        return dict.fromkeys(rows, 1 / len(rows))


def shaken(module: nn.Module, seed: int) -> nn.Module:
    """Draw every parameter anew, of a size that keeps activations near 1 and attention far from uniform."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in module.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            last = name.rpartition(".")[2]
            if p.ndim == 0:
                continue  # a temperature
            if p.ndim == 1 or (p.numel() == p.shape[-1] and "token" not in last):
                is_scale = last in ("weight", "gamma", "lambda1") or "gamma" in last or last.startswith("ls")
                p.copy_(0.7 + 0.2 * noise if is_scale else 0.3 * noise)
            elif p.shape[0] == 1 or "token" in last or "pos" in name:
                p.copy_(0.5 * noise)
            else:
                p.copy_(noise * 1.3 / math.sqrt(p[0].numel()))
    return module


def _build(name: str) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return shaken(ZOO[name].make(), zlib.crc32(name.encode())).eval()


_build_once = functools.cache(_build)


def build(name: str) -> nn.Module:
    """A fresh copy, in eval mode."""
    return _build(name) if ZOO[name].full_size else copy.deepcopy(_build_once(name))


def fresh(name: str, dtype: torch.dtype = torch.float32) -> cv.Model:
    """A fresh copy as a cv.Model: for tests that change it, or count the passes that inspect it."""
    return cv.wrap(build(name).to(dtype), name=name, size=ZOO[name].size, classifier=ZOO[name].classifier)


def wrapped(name: str, dtype: torch.dtype = torch.float32) -> cv.Model:
    """The model that tests share; one that a test changed is shared no longer (`helpers/shared_models.py`)."""
    if ZOO[name].full_size:
        return fresh(name, dtype)
    return shared_model((name, dtype), lambda: fresh(name, dtype))


def pixels(name: str, batch: int = 2, seed: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    """Preprocessed noise of the right size."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 3, *ZOO[name].size, generator=generator, dtype=torch.float64).to(dtype)


def double(name: str, batch: int = 2, seed: int = 1) -> tuple[cv.Model, Tensor]:
    """Return a shared model and images [batch, 3, H, W] for it, both float64: for comparisons of numbers."""
    return wrapped(name, torch.float64), pixels(name, batch, seed, torch.float64)


def fresh_double(name: str, batch: int = 2, seed: int = 1) -> tuple[cv.Model, Tensor]:
    """Return what `double` does, with a model of its own."""
    return fresh(name, torch.float64), pixels(name, batch, seed, torch.float64)


def growth_of(name: str) -> float:
    """Return how many roundings add up between an image and its map, forward and backward.

    A block has nine reductions (two norms, q, k and v at once, scores, softmax, values, output, two of the MLP), its
    backward pass two for each. The widest one is over the 3 · 8 · 8 pixels of a patch.
    """
    return growth(depth=27 * ZOO[name].layers, width=3 * PATCH * PATCH)


def _timm(name: str, **options: Any) -> Callable[[], nn.Module]:
    fused = options.pop("fused", True)
    usual = {
        "img_size": 32,
        "patch_size": PATCH,
        "embed_dim": WIDTH,
        "depth": DEPTH,
        "num_heads": HEADS,
        "num_classes": CLASSES,
    }

    def make() -> nn.Module:
        module = timm.create_model(name, **(usual | options))
        for part in module.modules():
            if hasattr(part, "fused_attn"):
                part.fused_attn = fused
        return module

    return make


def _hf(model: str, config: str, attention: str, nested: bool = False, **options: Any) -> Callable[[], nn.Module]:
    usual = {
        "hidden_size": WIDTH,
        "num_hidden_layers": DEPTH,
        "num_attention_heads": HEADS,
        "intermediate_size": 40,
        "image_size": 32,
        "patch_size": PATCH,
    }

    def make() -> nn.Module:
        if nested:  # two towers, only the image's is used
            text = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
            config_object = getattr(hf, config)(vision_config=usual | options, text_config=text, num_labels=CLASSES)
        else:
            config_object = getattr(hf, config)(**(usual | {"num_labels": CLASSES} | options))
        return getattr(hf, model)._from_config(config_object, attn_implementation=attention)

    return make


def _torchvision(**options: Any) -> Callable[[], nn.Module]:
    usual = {
        "image_size": 32,
        "patch_size": PATCH,
        "num_layers": DEPTH,
        "num_heads": HEADS,
        "hidden_dim": WIDTH,
        "mlp_dim": 40,
        "num_classes": CLASSES,
    }
    return lambda: torchvision.models.VisionTransformer(**(usual | options))


def _uninitialised(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """The real constructor without its slow initialisation: every parameter is drawn anew anyway."""

    def build_empty() -> nn.Module:
        with torch.device("meta"):
            return make().to_empty(device="cpu")

    return build_empty


def _open_clip(**options: Any) -> Callable[[], nn.Module]:
    usual = {
        "image_size": 32,
        "patch_size": PATCH,
        "width": WIDTH,
        "layers": DEPTH,
        "heads": HEADS,
        "mlp_ratio": 2.0,
        "output_dim": 10,
    }
    return lambda: OpenClipTower(**(usual | options))


def _open_clip_model() -> nn.Module:
    vision = {"image_size": 32, "patch_size": PATCH, "width": WIDTH, "layers": DEPTH, "head_width": WIDTH // HEADS}
    text = {"context_length": 8, "vocab_size": 20, "width": 16, "heads": 2, "layers": 1}
    return open_clip.CLIP(10, vision, text, quick_gelu=True).visual


def _home(attention: type[nn.Module]) -> Callable[[], nn.Module]:
    return lambda: HomeMade(lambda: Block(attention))


NON_SQUARE: dict[str, Any] = {"size": (24, 40), "grid": (3, 5)}
AVG: dict[str, Any] = {"pooling": "avg"}
EXPLICIT: dict[str, Any] = {"blocks": "blocks", "reference": "drop"}


def _timm_zoo() -> dict[str, Tiny]:
    """Each kind with fused attention and, where it has the switch, with explicit attention."""
    both: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
        "vit": ("vit_tiny_patch16_224", {}, {}),
        "vit-nonsquare": ("vit_tiny_patch16_224", {"img_size": (24, 40)}, NON_SQUARE),
        "vit-avg": ("vit_tiny_patch16_224", {"global_pool": "avg"}, AVG),
        "vit-qk-norm": ("vit_tiny_patch16_224", {"qk_norm": True, "init_values": 0.1}, {}),
        "deit-distilled": ("deit_tiny_distilled_patch16_224", {}, {"prefix": 2, "pooling": "distilled"}),
        "deit3": ("deit3_small_patch16_224", {}, {}),
        "beit": ("beit_base_patch16_224", {}, AVG),
        "eva02": ("eva02_tiny_patch14_224", {}, AVG),
        "dinov2-reg4": ("vit_small_patch14_reg4_dinov2", {}, {"prefix": 5}),
        "dinov3": ("vit_small_patch16_dinov3", {}, {"prefix": 5, **AVG}),
        # Tokens are feature maps [B, h, w, d], heads are folded into the batch, positions are added to the scores.
        "sam": ("samvit_base_patch16_224", {"global_attn_indexes": (0, 1)}, {"prefix": 0, **AVG}),
        "siglip-map": ("vit_base_patch16_siglip_224", {}, {"prefix": 0, "pooling": "map", "pools": 1}),
        "relpos": ("vit_relpos_small_patch16_224", {}, {"prefix": 0, **AVG}),
    }
    fused_only: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
        "deit": ("deit_tiny_patch16_224", {}, {}),
        "beitv2": ("beitv2_base_patch16_224", {"depth": 3}, {"layers": 3, **AVG}),
        "siglip-gap": ("vit_base_patch16_siglip_gap_224", {}, {"prefix": 0, **AVG}),
        "clip": ("vit_base_patch32_clip_224", {}, {}),
        "clip-quickgelu": ("vit_base_patch32_clip_quickgelu_224", {}, {}),
        "reg4-gap": ("vit_medium_patch16_reg4_gap_256", {"img_size": (24, 40)}, {"prefix": 4, **AVG, **NON_SQUARE}),
        "swiglu": ("vit_giant_patch14_reg4_dinov2", {}, {"prefix": 5}),
        "post-norm": ("vit_relpos_base_patch16_rpn_224", {}, {"prefix": 0, **AVG}),
        "deep": ("vit_tiny_patch16_224", {"depth": 5}, {"layers": 5}),
        "deep-avg": ("vit_tiny_patch16_224", {"depth": 5, "global_pool": "avg"}, {"layers": 5, **AVG}),
    }
    models = {}
    for kind, (name, options, facts) in (both | fused_only).items():
        models[f"timm-{kind}"] = Tiny(_timm(name, **options), **EXPLICIT, **facts)
    for kind, (name, options, facts) in both.items():
        models[f"timm-{kind}-explicit"] = Tiny(_timm(name, fused=False, **options), **EXPLICIT, **facts)
    # Class attention and talking heads are always explicit; the last two calls are the class token's.
    models["timm-cait"] = Tiny(_timm("cait_xxs24_224"), prefix=0, pooling="map", pools=2, sums_to_one=False, **EXPLICIT)
    # Two attentions side by side in each block.
    models["timm-parallel"] = Tiny(
        _timm("vit_small_patch16_18x2_224"), layers=4, reference="drop", lacks=frozenset({"residual", "middle"})
    )
    return models


def _hf_zoo() -> dict[str, Tiny]:
    kinds: dict[str, tuple[Callable[[str], Callable[[], nn.Module]], dict[str, Any]]] = {
        "vit": (lambda a: _hf("ViTForImageClassification", "ViTConfig", a), {}),
        "vit-nonsquare": (
            lambda a: _hf("ViTForImageClassification", "ViTConfig", a, image_size=(24, 40)),
            NON_SQUARE,
        ),
        "deit": (lambda a: _hf("DeiTForImageClassification", "DeiTConfig", a), {"prefix": 2}),
        "deit-teacher": (
            lambda a: _hf("DeiTForImageClassificationWithTeacher", "DeiTConfig", a),
            {"prefix": 2, "pooling": "distilled"},
        ),
        "dinov2": (lambda a: _hf("Dinov2ForImageClassification", "Dinov2Config", a), {"pooling": "mixed"}),
        "dinov2-swiglu": (
            lambda a: _hf("Dinov2ForImageClassification", "Dinov2Config", a, use_swiglu_ffn=True),
            {"pooling": "mixed"},
        ),
        "dinov2-registers": (
            lambda a: _hf("Dinov2WithRegistersForImageClassification", "Dinov2WithRegistersConfig", a),
            {"prefix": 5, "pooling": "mixed"},
        ),
        "clip": (lambda a: _hf("CLIPForImageClassification", "CLIPConfig", a, nested=True), AVG),
        "clip-projection": (
            lambda a: _hf("CLIPVisionModelWithProjection", "CLIPVisionConfig", a, projection_dim=10),
            {"classifier": False},
        ),
        "siglip": (
            lambda a: _hf("SiglipForImageClassification", "SiglipConfig", a, nested=True),
            {"prefix": 0, "pools": 1, **AVG},  # the attention pool is run, and its result not used
        ),
        "siglip-vision": (
            lambda a: _hf("SiglipVisionModel", "SiglipVisionConfig", a),
            {"prefix": 0, "pooling": "map", "pools": 1, "classifier": False},
        ),
    }
    return {
        f"hf-{kind}-{attention}": Tiny(make(attention), reference="hf", **facts)
        for kind, (make, facts) in kinds.items()
        for attention in ("sdpa", "eager")
    }


def _other_zoo() -> dict[str, Tiny]:
    layers = {"blocks": "encoder.layers", "reference": "mha"}
    tower = {"blocks": "transformer.resblocks", "reference": "mha", "classifier": False}
    home = {"blocks": "blocks", "reference": "drop"}
    return {
        "torchvision-vit": Tiny(_torchvision(), **layers),
        "torchvision-vit_b_16": Tiny(
            _uninitialised(torchvision.models.vit_b_16), (224, 224), (14, 14), layers=12, full_size=True, **layers
        ),
        "torchvision-vit_l_32": Tiny(
            _uninitialised(torchvision.models.vit_l_32), (224, 224), (7, 7), layers=24, full_size=True, **layers
        ),
        "open_clip-tower": Tiny(_open_clip(), **tower),
        "open_clip-avg": Tiny(_open_clip(pool_type="avg", ls_init_value=0.1), pooling="avg", **tower),
        "open_clip-ln-after-pool": Tiny(_open_clip(final_ln_after_pool=True, no_ln_pre=True), **tower),
        "open_clip-model": Tiny(_open_clip_model, **tower),
        "open_clip-nonsquare": Tiny(_open_clip(image_size=(24, 40)), **NON_SQUARE, **tower),
        "open_clip-coca": Tiny(
            _open_clip(attentional_pool=True, attn_pooler_queries=5, attn_pooler_heads=2),
            pooling="map",
            pools=1,
            **tower,
        ),
        "open_clip-custom-block": Tiny(
            _open_clip(block_type="custom", qk_norm=True), blocks="transformer.resblocks", classifier=False
        ),
        "home-matmul": Tiny(_home(MatmulAttention), **home),
        "home-einsum": Tiny(_home(EinsumAttention), **home),
        "home-einsum-transposed": Tiny(_home(TransposedEinsumAttention), **home),
        "home-einsum-values-first": Tiny(_home(ValuesFirstEinsumAttention), **home),
        "home-bmm": Tiny(_home(BatchedAttention), **home),
        "home-batchnorm-stem": Tiny(Convolved, blocks="blocks"),
        "home-fused": Tiny(_home(FusedAttention), blocks="blocks"),
        "home-mask-by-position": Tiny(_home(BiasedAttention), blocks="blocks"),
        "home-grouped-query": Tiny(_home(GroupedAttention), blocks="blocks"),
        "home-in-place": Tiny(lambda: HomeMade(lambda: InPlaceBlock(MatmulAttention)), **home),
        "home-lucid": Tiny(Lucid, layers=3, reference="drop"),
        "home-loop": Tiny(Loop, reference="drop"),
        "home-mean-pool": Tiny(MeanPool, prefix=0, pooling="avg", **NON_SQUARE, **home),
        "home-sequence-first": Tiny(SequenceFirst, reference="mha"),
        "home-encoder-pre-norm": Tiny(
            lambda: HomeMade(lambda: encoder_layer(norm_first=True)), blocks="blocks", reference="mha"
        ),
        "home-encoder-post-norm": Tiny(
            lambda: HomeMade(lambda: encoder_layer(norm_first=False)), blocks="blocks", reference="mha"
        ),
        "home-torch-encoder": Tiny(TorchEncoder, blocks="encoder.layers", reference="mha"),
    }


ZOO: dict[str, Tiny] = _timm_zoo() | _hf_zoo() | _other_zoo()
TINY = [name for name, tiny in ZOO.items() if not tiny.full_size]


# Models that are no plain ViTs: attention inside windows, between channels, or none at all.


@dataclass(frozen=True)
class Strange:
    """What gradient methods can still say: the grid of the first tokens and that of the last."""

    make: Callable[[], nn.Module]
    size: tuple[int, int]
    first: tuple[int, int]
    last: tuple[int, int]
    attends: str  # as the refusal says it
    blocks: str  # name of the block class


_SWIN: dict[str, Any] = {"patch_size": 4, "window_size": 4, "embed_dim": 12, "depths": (2, 2), "num_heads": (2, 3)}


def _swin(name: str, size: tuple[int, int]) -> Callable[[], nn.Module]:
    return lambda: timm.create_model(name, img_size=size, num_classes=CLASSES, **_SWIN)


def _hf_swin() -> nn.Module:
    return hf.SwinForImageClassification(hf.SwinConfig(image_size=32, num_labels=CLASSES, **_SWIN))


def _xcit(size: tuple[int, int]) -> Callable[[], nn.Module]:
    small = {"embed_dim": WIDTH, "depth": DEPTH, "num_heads": HEADS, "num_classes": CLASSES}
    return lambda: timm.create_model("xcit_nano_12_p16_224", img_size=size, **small)


def _maxvit() -> nn.Module:
    small = {"embed_dim": (32, 32), "depths": (1, 1), "block_type": ("M", "M"), "stem_width": 8}
    return timm.create_model("maxvit_rmlp_pico_rw_256", img_size=64, num_classes=CLASSES, **small)


WINDOWS = "inside windows or stages"
STRANGE = {
    "swin": Strange(
        _swin("swin_tiny_patch4_window7_224", (32, 32)), (32, 32), (8, 8), (4, 4), WINDOWS, "SwinTransformerBlock"
    ),
    "swin-nonsquare": Strange(
        _swin("swin_tiny_patch4_window7_224", (32, 64)), (32, 64), (8, 16), (4, 8), WINDOWS, "SwinTransformerBlock"
    ),
    "swin-v2": Strange(
        _swin("swinv2_tiny_window8_256", (32, 32)), (32, 32), (8, 8), (4, 4), WINDOWS, "SwinTransformerV2Block"
    ),
    "hf-swin": Strange(_hf_swin, (32, 32), (8, 8), (4, 4), WINDOWS, "SwinLayer"),
    "maxvit": Strange(_maxvit, (64, 64), (16, 16), (8, 8), WINDOWS, "PartitionAttentionCl"),
    "xcit": Strange(_xcit((64, 64)), (64, 64), (4, 4), (4, 4), "between channels", "XCABlock"),
    "xcit-nonsquare": Strange(_xcit((64, 96)), (64, 96), (4, 6), (4, 6), "between channels", "XCABlock"),
}


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 12, 3, 2, 1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(12, CLASSES),
    )


def strange(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """One of these, or one of your own, seeded and shaken."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return shaken(make(), seed).eval()
