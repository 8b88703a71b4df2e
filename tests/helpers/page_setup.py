"""What the pages of the documentation take for granted, made small: models, photos, data sets of the reader.

`PAGES` has for each page the setup that runs before its code, and replacements of what would be downloaded, need a GPU
or take minutes. A replacement that is not found in the page is an error, so that none is left behind.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

import clairvit as cv
from clairvit.models.image_files import read_image
from helpers import tiny_pairs

Names = dict[str, Any]
TINY = {"patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2}


@dataclass(frozen=True)
class PageSetup:
    """What is made before a page's code runs: files in a folder, and names; what is replaced in the code."""

    make: Callable[[Path], Names] = lambda folder: {}
    replace: Mapping[str, str] = field(default_factory=dict)

    def code(self, text: str) -> str:
        """Return the code with its replacements."""
        for old, new in self.replace.items():
            assert old in text, f"{old!r} is to be replaced and is not in the page"
            text = text.replace(old, new)
        return text


def photos(folder: Path, *names: str) -> None:
    """Save the demo photo under these names."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        read_image("demo").resize((96, 64)).save(folder / name)


def pets_folder(root: Path, breeds: tuple[str, ...] = ("Abyssinian", "Bengal"), each: int = 2) -> None:
    """Write a folder of the layout of Oxford-IIIT Pet."""
    (root / "annotations" / "trimaps").mkdir(parents=True)
    lines = []
    for label, breed in enumerate(breeds):
        for number in range(each):
            photos(root, f"images/{breed}_{number}.jpg")
            trimap = np.full((64, 96), 2, np.uint8)
            trimap[10:50, 20:60] = 1
            Image.fromarray(trimap).save(root / "annotations" / "trimaps" / f"{breed}_{number}.png")
            lines.append(f"{breed}_{number} {label + 1} 1 1")
    for split in ("test", "trainval"):
        (root / "annotations" / f"{split}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def clip() -> cv.Model:
    """Return a CLIP of three small blocks with random weights, which takes any words."""

    def tokenize(prompts: list[str]) -> torch.Tensor:
        words_of_prompts = [
            [word if word in tiny_pairs.WORDS else "?" for word in prompt.split()] for prompt in prompts
        ]
        return tiny_pairs.open_clip_tokenizer([" ".join(words) for words in words_of_prompts])

    torch.manual_seed(0)
    return cv.wrap(tiny_pairs.open_clip_pair().eval(), tokenizer=tokenize, size=24, mean=0.5, std=0.5)


def data(folder: Path) -> Names:
    """A folder of pets, one of photos with trimaps, and a model."""
    pets_folder(folder / "data" / "oxford-iiit-pet")
    photos(folder, "photos/cat.jpg")
    (folder / "masks").mkdir()
    Image.fromarray(np.full((64, 96), 1, np.uint8)).save(folder / "masks" / "cat.png")
    return {"model": cv.load("pets")}


def certify(folder: Path) -> Names:
    """A folder of ten different photos: crops of one."""
    whole = read_image("demo")
    (folder / "photos").mkdir()
    for number in range(10):
        left, top = 8 * number, 5 * number
        whole.crop((left, top, left + 160, top + 160)).save(folder / "photos" / f"{number}.png")
    return {}


def expect(folder: Path) -> Names:
    """Two photos, each with a mask of its middle."""
    files = ["photos/0.png", "photos/1.png"]
    photos(folder, *files)
    mask = np.zeros((64, 96), np.uint8)
    mask[16:48, 24:72] = 255
    return {"files": files, "masks": [mask, mask]}


def mistakes(folder: Path) -> Names:
    """Two photos in folders of their classes, one of them wrong."""
    photos(folder, "photos/Bengal/0.png", "photos/Beagle/1.png")
    return {}


def finetune(folder: Path) -> Names:
    """A data set of two classes."""
    from helpers.small_datasets import coloured_noise

    return {"dataset": coloured_noise(8), "TINY": TINY}


def foreground(folder: Path) -> Names:
    """A photo; the detector that the page loads is replaced by one that finds a cat in the middle."""
    photos(folder, "cat.jpg")

    class Cat(torch.nn.Module):
        """A detector that takes the middle of every picture for a cat, in the form of torchvision's detectors."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))
            self.roi_heads = torch.nn.Module()
            self.roi_heads.score_thresh = 0.05

        def forward(self, images: list[torch.Tensor]) -> list[dict[str, torch.Tensor]]:
            masks = [image.new_zeros(1, 1, *image.shape[1:]) for image in images]
            for mask in masks:
                mask[..., 16:48, 24:72] = 1
            return [{"labels": torch.tensor([1]), "scores": torch.tensor([0.98]), "masks": mask} for mask in masks]

    from clairvit.data.foreground import Detector

    return {"detector_of_a_cat": Detector(Cat().eval(), "stub", ("background", "cat"))}


def models(folder: Path) -> Names:
    """Checkpoints, modules and photos of the reader."""
    import transformers

    photos(folder, "face.jpg", "cat.jpg")
    save_file(timm.create_model("vit_tiny_patch16_224", num_classes=3).state_dict(), folder / "mine.safetensors")
    (folder / "classes.json").write_text('["ant", "bee", "cat"]', encoding="utf-8")
    (folder / "mypackage").mkdir()
    (folder / "mypackage" / "models.py").write_text(
        "import timm\ndef build():\n    return timm.create_model('vit_tiny_patch16_224', depth=1, num_classes=2)\n",
        encoding="utf-8",
    )
    tiny = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    transformers.ViTForImageClassification(transformers.ViTConfig(**tiny)).save_pretrained(folder / "checkpoint")
    transformers.ViTImageProcessor().save_pretrained(folder / "checkpoint")
    video = transformers.VideoMAEConfig(**tiny, image_size=32, patch_size=8, num_frames=4, num_labels=2)
    transformers.VideoMAEForVideoClassification(video).save_pretrained(folder / "video")
    net = timm.create_model("vit_tiny_patch16_224", depth=1, num_classes=2, img_size=32).eval()
    return {
        "module": timm.create_model("vit_tiny_patch16_224", depth=1, num_classes=2, img_size=(224, 320)),
        "names": ["a", "b"],
        "net": net,
        "regression_net": timm.create_model("vit_tiny_patch16_224", depth=1, num_classes=1, img_size=32).eval(),
        "pixels": torch.randn(1, 3, 32, 32),
        "folder": "video",
        "frames": [read_image("demo").resize((40, 32))] * 4,
    }


def planted_trigger(folder: Path) -> Names:
    """A folder of pets, weights in a file and a data set."""
    from clairvit.data.open import open_data

    pets_folder(folder / "data" / "oxford-iiit-pet")
    pets = cv.load("pets")
    header = {"arch": "timm:vit_tiny_patch16_224", "labels": json.dumps(list(pets.labels or ()))}
    save_file(pets.module.state_dict(), folder / "backdoor.safetensors", header)
    photos(folder, "photos/0.png")
    return {"my_dataset": open_data("folder:photos").dataset}


def studies(folder: Path) -> Names:
    """A study that was run."""
    from clairvit.bench.config import DataConfig, ModelConfig
    from clairvit.bench.plan import Study
    from clairvit.bench.run import run_study
    from clairvit.bench.store import Store

    study = Study(
        models=(ModelConfig("scenes"),), data=(DataConfig("scenes:1"),), methods=("rollout",), metrics=("sparseness",)
    )
    run_study(study, Store.open(folder / "study"))
    return {}


def targets(folder: Path) -> Names:
    """Photos, a small CLIP and a small LLaVA."""
    from helpers.vision_language import saved_llava

    photos(folder, "street.jpg", "cat.jpg", "other-cat.jpg", "a.jpg", "b.jpg", "sofa.jpg")
    saved_llava(folder / "llava")
    vectors = torch.randn(4, 16, generator=torch.Generator().manual_seed(0)).numpy()
    np.savez(folder / "texts.npz", cat=vectors[0], dog=vectors[1], car=vectors[2])
    return {"clip_of_the_tests": clip(), "vector": vectors[0], "others": vectors[1:]}


def testing(folder: Path) -> Names:
    """Results that are equal up to rounding, and two that are not."""
    exact = torch.linspace(0.1, 1, 8, dtype=torch.float64)
    return {
        "actual": exact * (1 + 1e-15),
        "expected": exact,
        "parts": exact,
        "total": exact.sum(),
        "score": exact.sum(),
        "single": exact.float(),
        "exact": exact,
        "first": exact,
        "second": exact + 1e-3,
    }


PAGES: dict[str, PageSetup] = {
    "certify.md": PageSetup(certify),
    "data.md": PageSetup(data, {"scenes:500": "scenes:5", "parts:240": "parts:2"}),
    "doctor.md": PageSetup(lambda folder: {"model": "scenes", "images": "demo"}),
    "expect.md": PageSetup(expect),
    "finetune.md": PageSetup(
        finetune,
        {
            'device="cuda"': "pretrained=False, options=TINY, size=32",
            "epochs=20": "epochs=1",
        },
    ),
    "foreground.md": PageSetup(
        foreground, {'load_detector("maskrcnn_resnet50_fpn_v2_coco-73cbd019.pth")': "detector_of_a_cat"}
    ),
    "mistakes.md": PageSetup(mistakes),
    "models.md": PageSetup(
        models,
        {
            'cv.load("timm:vit_base_patch16_224")': 'cv.load("timm:vit_base_patch16_224", pretrained=False)',
            "hf:google/vit-base-patch16-224": "hf:./checkpoint",
            'cv.load("torchvision:vit_b_16")': 'cv.load("torchvision:vit_b_16", pretrained=False)',
            'b79k", labels=': 'b79k", pretrained=False, labels=',
            "vit_small_patch16_224": "vit_tiny_patch16_224",
            'cv.load("torchvision:resnet50")': 'cv.load("torchvision:resnet18", pretrained=False)',
        },
    ),
    "howto-own-module.md": PageSetup(
        replace={
            '"vit_tiny_patch16_224", num_classes=3': '"vit_tiny_patch16_224", num_classes=3, depth=2, img_size=64',
            "cv.wrap(net, size=224": "cv.wrap(net, size=64",
        }
    ),
    "perturbation.md": PageSetup(replace={"samples=300": "samples=24"}),
    "planted-truth.md": PageSetup(replace={"part_scenes(240)": "part_scenes(8)"}),
    "planted-truth-trigger.md": PageSetup(planted_trigger, {"limit=200": "limit=2"}),
    "scenes.md": PageSetup(replace={"scenes(200": "scenes(4"}),
    "studies.md": PageSetup(studies),
    "targets.md": PageSetup(
        targets,
        {
            'cv.load("open_clip:ViT-B-32:openai")': "clip_of_the_tests",
            "hf:llava-hf/llava-1.5-7b-hf": "hf:./llava",
            '"What is on the sofa?")         # the greedy answer': '"What is on the sofa?", max_tokens=3)  # it',
        },
    ),
    "testing.md": PageSetup(testing),
}
