"""The detector: torchvision's Mask R-CNN with COCO weights, from torchvision's server or from a file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from clairvit.errors import BadInput, ModelUnavailable, did_you_mean
from clairvit.models.load import usable_device
from clairvit.models.load_options import seeded
from clairvit.models.sources.file import SUFFIXES, read_weights
from clairvit.models.sources.hub import first_line, no_pickles
from clairvit.models.sources.torchvision import choose_weights, download_blocked

NEWER, OLDER = "maskrcnn_resnet50_fpn_v2", "maskrcnn_resnet50_fpn"
_ONLY_OLDER = "roi_heads.box_head.fc6.weight"  # the newer one has convolutions there


@dataclass(frozen=True, eq=False)
class Detector:
    """Mask R-CNN in eval mode with frozen weights. `categories[label]` is a class's name."""

    module: nn.Module
    name: str
    categories: tuple[str, ...]

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device


def load_detector(weights: str | Path | None = None, device: str | torch.device | None = None) -> Detector:
    """Mask R-CNN with COCO weights: from a file of either architecture, or the newer one from torchvision's server.

    A file is a state dict, .pth or .safetensors; nothing is ever unpickled but tensors.
    """
    where = usable_device(device)
    state = _from_server() if weights is None else _from_file(Path(weights).expanduser())
    name = OLDER if _ONLY_OLDER in state else NEWER
    with seeded():  # every tensor is overwritten, so this only keeps the user's random numbers undisturbed
        module = _older(state) if name == OLDER else _newer()
    _fill(module, state, name, _url(NEWER) if weights is None else str(weights))
    return Detector(
        module.eval().requires_grad_(False).to(where), name, tuple(choose_weights(name, "").meta["categories"])
    )


def _from_server() -> Mapping[str, Tensor]:
    """torchvision's own weights, from its cache or over the network; the file's name holds the hash it must have."""
    weights = choose_weights(NEWER, "")
    blocked = download_blocked(weights.url)  # torch.hub itself waits without end
    try:
        if blocked:
            raise ConnectionError(blocked)
        with no_pickles():
            return dict(weights.get_state_dict(progress=True, check_hash=True))
    except Exception as error:  # network, disk, hash and unpickler each raise their own kind
        raise ModelUnavailable(
            f"The COCO weights of torchvision's {NEWER} could not be loaded ({first_line(error)}); where there is a "
            f"network fetch {weights.url} ({weights.meta['_file_size']:.0f} MB) and pass it: load_detector('FILE').",
            parameters={"weights": "FILE"},
        ) from error


def _from_file(path: Path) -> Mapping[str, Tensor]:
    if not path.is_file():
        near = did_you_mean(path.name, [p.name for p in path.parent.glob("*") if p.suffix in SUFFIXES])
        seen = "a folder" if path.is_dir() else "not there"
        raise BadInput(f"The detector's weights '{path}' are {seen}.{near} {_advice()}", parameters={"weights": "FILE"})
    try:
        return read_weights(path, str(path))[0]
    except ModelUnavailable as error:
        raise BadInput(f"{error} {_advice()}", parameters={"weights": "FILE"}) from error


def _newer() -> nn.Module:
    from torchvision.models import detection

    module: nn.Module = detection.maskrcnn_resnet50_fpn_v2(weights=None, weights_backbone=None)
    return module


def _older(state: Mapping[str, Tensor]) -> nn.Module:
    """As torchvision builds it for these weights: COCO's were trained on frozen norms that divide by √(variance + 0).

    Ordinary norms count their batches, so a file tells which kind it was saved from.
    """
    from torchvision.models.detection import MaskRCNN
    from torchvision.models.detection.backbone_utils import resnet_fpn_backbone
    from torchvision.ops import FrozenBatchNorm2d

    counted = any(key.endswith("num_batches_tracked") for key in state)
    norm = nn.BatchNorm2d if counted else FrozenBatchNorm2d
    backbone = resnet_fpn_backbone(backbone_name="resnet50", weights=None, norm_layer=norm)
    module: nn.Module = MaskRCNN(backbone, num_classes=len(choose_weights(OLDER, "").meta["categories"]))
    for part in module.modules():
        if isinstance(part, FrozenBatchNorm2d):
            part.eps = 0.0
    return module


def _fill(module: nn.Module, state: Mapping[str, Tensor], name: str, source: str) -> None:
    """Load every tensor (torchvision renames those of its older files), or say which do not fit."""
    try:
        missing, unexpected = module.load_state_dict(state, strict=False)
        wrong = {"missing": missing, "unexpected": unexpected}
    except RuntimeError as error:
        wrong = {"of another shape": re.findall(r"size mismatch for (\S+):", str(error)) or [first_line(error)]}
    found = [
        f"{len(keys)} {word} ({', '.join(keys[:3])}{', …' if len(keys) > 3 else ''})"
        for word, keys in wrong.items()
        if keys
    ]
    if found:
        raise BadInput(
            f"The weights in '{source}' do not fit torchvision's {name} with COCO's 91 labels: {'; '.join(found)}. "
            f"{_advice()}",
            parameters={"weights": "FILE"},
        )


def _url(name: str) -> str:
    return str(choose_weights(name, "").url)


def _advice() -> str:
    return f"Expected the COCO weights of {NEWER} ({_url(NEWER)}) or {OLDER} ({_url(OLDER)}): load_detector('FILE')."
