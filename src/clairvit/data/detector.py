"""torchvision's Mask R-CNN with COCO weights, from torchvision's server or from a file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from clairvit.errors import Argument, BadInput, ModelUnavailable, did_you_mean
from clairvit.models.load import usable_device
from clairvit.models.load_options import seeded
from clairvit.models.sources.file import SUFFIXES, read_weights
from clairvit.models.sources.hub import first_line, no_pickles
from clairvit.models.sources.torchvision import choose_weights, download_blocked

V2, V1 = "maskrcnn_resnet50_fpn_v2", "maskrcnn_resnet50_fpn"
_V1_KEY = "roi_heads.box_head.fc6.weight"  # v2 has convolutions there


@dataclass(frozen=True, eq=False)
class Detector:
    """Mask R-CNN in eval mode with frozen weights; `categories[label]` is the name of a class."""

    module: nn.Module
    name: str
    categories: tuple[str, ...]

    @property
    def device(self) -> torch.device:
        """Return the device of the weights."""
        return next(self.module.parameters()).device


def load_detector(weights: str | Path | None = None, device: str | torch.device | None = None) -> Detector:
    """Return Mask R-CNN with COCO weights.

    Args:
        weights: A state dict, .pth or .safetensors, of v1 or v2; None downloads v2. Only tensors are unpickled.
        device: The CPU unless given.

    Raises:
        ModelUnavailable: The weights cannot be downloaded.
        BadInput: The file cannot be read or does not fit.
    """
    torch_device = usable_device(device)
    state = _download_state() if weights is None else _read_state(Path(weights).expanduser())
    name = V1 if _V1_KEY in state else V2
    with seeded():  # every tensor is overwritten: this only leaves the user's generator as it was
        module = _build_v1(state) if name == V1 else _build_v2()
    _load_state(module, state, name, _url(V2) if weights is None else str(weights))
    return Detector(
        module.eval().requires_grad_(False).to(torch_device), name, tuple(choose_weights(name, "").meta["categories"])
    )


def _download_state() -> Mapping[str, Tensor]:
    """Return torchvision's weights from its cache or server; the hash in the file's name is checked."""
    weights = choose_weights(V2, "")
    blocked = download_blocked(weights.url)  # torch.hub itself has no timeout
    try:
        if blocked:
            raise ConnectionError(blocked)
        with no_pickles():
            return dict(weights.get_state_dict(progress=True, check_hash=True))
    except Exception as error:  # network, disk, hash and unpickler raise different types
        raise ModelUnavailable(
            f"The COCO weights of torchvision's {V2} could not be loaded ({first_line(error)}); where there is a "
            f"network fetch {weights.url} ({weights.meta['_file_size']:.0f} MB) and pass it: load_detector('FILE').",
            advice=[Argument("weights", "FILE")],
        ) from error


def _read_state(path: Path) -> Mapping[str, Tensor]:
    """Return the state dict of a file; raise BadInput if it cannot be read."""
    if not path.is_file():
        near = did_you_mean(path.name, [p.name for p in path.parent.glob("*") if p.suffix in SUFFIXES])
        problem = "a folder" if path.is_dir() else "not there"
        raise BadInput(
            f"The detector's weights '{path}' are {problem}.{near} {_advice()}", advice=[Argument("weights", "FILE")]
        )
    try:
        return read_weights(path, str(path))[0]
    except ModelUnavailable as error:
        raise BadInput(f"{error} {_advice()}", advice=[Argument("weights", "FILE")]) from error


def _build_v2() -> nn.Module:
    from torchvision.models import detection

    module: nn.Module = detection.maskrcnn_resnet50_fpn_v2(weights=None, weights_backbone=None)
    return module


def _build_v1(state: Mapping[str, Tensor]) -> nn.Module:
    """Return v1 as torchvision builds it for these weights: COCO's were trained on frozen norms with eps = 0.

    Ordinary batch norms count their batches: the keys of the file say which kind it was saved from.
    """
    from torchvision.models.detection import MaskRCNN
    from torchvision.models.detection.backbone_utils import resnet_fpn_backbone
    from torchvision.ops import FrozenBatchNorm2d

    ordinary = any(key.endswith("num_batches_tracked") for key in state)
    norm = nn.BatchNorm2d if ordinary else FrozenBatchNorm2d
    backbone = resnet_fpn_backbone(backbone_name="resnet50", weights=None, norm_layer=norm)
    module: nn.Module = MaskRCNN(backbone, num_classes=len(choose_weights(V1, "").meta["categories"]))
    for part in module.modules():
        if isinstance(part, FrozenBatchNorm2d):
            part.eps = 0.0
    return module


def _load_state(module: nn.Module, state: Mapping[str, Tensor], name: str, source: str) -> None:
    """Load every tensor (torchvision renames those of its older files); raise BadInput if one does not fit."""
    try:
        missing, unexpected = module.load_state_dict(state, strict=False)
        wrong = {"missing": missing, "unexpected": unexpected}
    except RuntimeError as error:
        wrong = {"of another shape": re.findall(r"size mismatch for (\S+):", str(error)) or [first_line(error)]}
    problems = [
        f"{len(keys)} {word} ({', '.join(keys[:3])}{', …' if len(keys) > 3 else ''})"
        for word, keys in wrong.items()
        if keys
    ]
    if problems:
        raise BadInput(
            f"The weights in '{source}' do not fit torchvision's {name} with COCO's 91 labels: {'; '.join(problems)}. "
            f"{_advice()}",
            advice=[Argument("weights", "FILE")],
        )


def _url(name: str) -> str:
    return str(choose_weights(name, "").url)


def _advice() -> str:
    return f"Expected the COCO weights of {V2} ({_url(V2)}) or {V1} ({_url(V1)}): load_detector('FILE')."
