"""Foreground by Mask R-CNN: objects are united as by hand, thresholds include their edge, masks lie on their picture,
and the weights that torchvision's own loader reads give the same network here, from its cache or from a file.
"""

from __future__ import annotations

import urllib.error
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn
from torchvision.models import detection
from torchvision.transforms.functional import pil_to_tensor

import clairvit as cv
from clairvit.data.foreground import Detector, foreground, load_detector
from clairvit.data.masks import prepare_mask
from clairvit.errors import BadInput, ModelUnavailable, UnknownName
from clairvit.models.image_files import ORIENTATION, read_image
from clairvit.models.images import prepare
from clairvit.models.load_options import seeded

COCO = detection.MaskRCNN_ResNet50_FPN_V2_Weights.COCO_V1
OLDER = detection.MaskRCNN_ResNet50_FPN_Weights.COCO_V1
NAMES = tuple(COCO.meta["categories"])
PERSON, CAT, DOG = (NAMES.index(name) for name in ("person", "cat", "dog"))
Answer = dict[str, Tensor]


class StubDetector(nn.Module):
    """A detector that finds what it is given, and like torchvision's keeps only what is above its own limit."""

    def __init__(self, answer: Callable[[Tensor], list[tuple[int, float, Tensor]]]) -> None:
        super().__init__()
        self.answer = answer
        self.weight = nn.Parameter(torch.zeros(1))
        self.roi_heads = nn.Module()
        self.roi_heads.score_thresh = 0.05
        self.limits: list[float] = []

    def forward(self, images: list[Tensor]) -> list[Answer]:
        assert not torch.is_grad_enabled()
        self.limits.append(self.roi_heads.score_thresh)
        return [self.detect(image) for image in images]

    def detect(self, image: Tensor) -> Answer:
        detections = [f for f in self.answer(image) if torch.tensor(f[1]) > self.roi_heads.score_thresh]
        return {
            "labels": torch.tensor([label for label, _, _ in detections], dtype=torch.int64),
            "scores": torch.tensor([score for _, score, _ in detections]),
            "masks": torch.stack([image.new_zeros(image.shape[1:]), *(m for _, _, m in detections)])[1:, None],
        }


def stub_detector(*detections: tuple[int, float, Tensor]) -> Detector:
    return Detector(StubDetector(lambda _: list(detections)).eval(), "stub", NAMES)


def box(rows: slice, columns: slice, probability: float = 0.9) -> Tensor:
    """[20, 30]: an object's probability in its box, 0 beside it."""
    mask = torch.zeros(20, 30)
    mask[rows, columns] = probability
    return mask


def bright(image: Tensor) -> list[tuple[int, float, Tensor]]:
    """Finds a cat wherever red is on."""
    return [(CAT, 0.8, image[0])]


PICTURE = Image.new("RGB", (30, 20), "grey")
UPPER = box(slice(2, 9), slice(3, 14))
LOWER = box(slice(6, 15), slice(10, 25))


def pixels(mask: Image.Image) -> NDArray[np.bool_]:
    values = np.asarray(mask)
    assert mask.mode == "L"
    assert set(np.unique(values)) <= {0, 255}
    return values == 255


def test_objects_are_united() -> None:
    foreground_mask = foreground(
        stub_detector((CAT, 0.6, UPPER), (PERSON, 0.95, LOWER), (DOG, 0.4, box(slice(0, 20), slice(0, 30)))), PICTURE
    )
    by_hand = np.zeros((20, 30), bool)
    by_hand[2:9, 3:14] = True
    by_hand[6:15, 10:25] = True
    assert np.array_equal(pixels(foreground_mask.mask), by_hand)
    assert foreground_mask.mask.size == PICTURE.size
    assert [name for name, _ in foreground_mask.classes] == ["person", "cat"]  # highest first; the dog is too unsure
    assert [score for _, score in foreground_mask.classes] == pytest.approx([0.95, 0.6])
    assert not foreground_mask.empty


@pytest.mark.parametrize("edge", [0.05, 0.5, 0.7, 1.0])
def test_thresholds_include_their_edge(edge: float) -> None:
    below = float(np.nextafter(np.float32(edge), np.float32(0)))
    at, under = stub_detector((CAT, edge, UPPER)), stub_detector((CAT, below, UPPER))
    assert foreground(at, PICTURE, score=edge).classes == (("cat", pytest.approx(edge)),)
    assert foreground(under, PICTURE, score=edge).classes == ()
    half = UPPER.clone()
    half[half > 0] = edge
    half[2, 3] = below
    expected = np.asarray(UPPER > 0).copy()
    expected[2, 3] = False
    assert np.array_equal(pixels(foreground(stub_detector((CAT, 0.9, half)), PICTURE, mask=edge).mask), expected)


def test_a_low_score_sets_the_detectors_threshold_and_restores_it() -> None:
    detector = stub_detector((CAT, 0.001, UPPER), (DOG, 0.0, LOWER))
    assert len(foreground(detector, PICTURE, score=0.001).classes) == 1
    assert len(foreground(detector, PICTURE, score=0).classes) == 2
    module: Any = detector.module
    assert module.limits[0] < 0.001
    assert module.roi_heads.score_thresh == 0.05
    foreground(detector, PICTURE, score=0.5)
    assert 0.49 < module.limits[2] < 0.5  # masks are made only for what counts
    module.answer = lambda _: 1 / 0
    with pytest.raises(ZeroDivisionError):
        foreground(detector, PICTURE)
    assert module.roi_heads.score_thresh == 0.05


@pytest.mark.parametrize(
    ("detector", "classes"),
    [
        (stub_detector(), ()),
        (stub_detector((CAT, 0.49, UPPER)), ()),
        (stub_detector((CAT, 0.9, UPPER * 0.5)), (("cat", pytest.approx(0.9)),)),  # seen, but nowhere for certain
    ],
)
def test_no_object_is_an_empty_mask_and_no_score(detector: Detector, classes: tuple[Any, ...]) -> None:
    foreground_mask = foreground(detector, PICTURE)
    assert foreground_mask.empty
    assert foreground_mask.mask.size == PICTURE.size
    assert not pixels(foreground_mask.mask).any()
    assert foreground_mask.classes == classes
    assert np.isnan(attention_on(foreground_mask.mask))


def test_an_object_all_over_the_picture() -> None:
    foreground_mask = foreground(stub_detector((CAT, 0.9, torch.ones(20, 30))), PICTURE)
    assert pixels(foreground_mask.mask).all()
    assert not foreground_mask.empty
    assert attention_on(foreground_mask.mask) == 1


def attention_on(mask: Image.Image) -> float:
    """The built-in model's FAF on this mask."""
    model = cv.load("pets")
    score = cv.evaluate(model, PICTURE, "rollout", "faf", masks=[mask])
    return float(score.values.squeeze())


def test_only_the_given_classes_count() -> None:
    detector = stub_detector((CAT, 0.6, UPPER), (PERSON, 0.95, LOWER))
    assert np.array_equal(pixels(foreground(detector, PICTURE, classes=["cat", "dog"]).mask), np.asarray(UPPER > 0))
    assert foreground(detector, PICTURE, classes="person").classes == (("person", pytest.approx(0.95)),)
    assert foreground(detector, PICTURE, classes=["dog"]).empty
    with pytest.raises(UnknownName, match=r"COCO has no class 'monastery'\..* Its 80 classes are person, bicycle, .*"):
        foreground(detector, PICTURE, classes=["cat", "monastery"])
    with pytest.raises(UnknownName, match=r"no class 'bycicle'. Did you mean 'bicycle'"):
        foreground(detector, PICTURE, classes="bycicle")
    for nobody in ("N/A", "__background__"):
        with pytest.raises(UnknownName, match="COCO has no class"):
            foreground(detector, PICTURE, classes=nobody)
    with pytest.raises(BadInput, match="names no class"):
        foreground(detector, PICTURE, classes=[])


@pytest.mark.parametrize(
    "options", [{"score": -0.1}, {"score": 1.1}, {"score": float("nan")}, {"mask": 0}, {"mask": 2}]
)
def test_invalid_thresholds_raise(options: dict[str, float]) -> None:
    (name,) = options
    with pytest.raises(BadInput, match=rf"{name}=.*; expected "):
        foreground(stub_detector(), PICTURE, **options)


def test_the_mask_lies_on_the_upright_picture(tmp_path: Path) -> None:
    scene = Image.new("RGB", (60, 40))
    scene.paste("white", (5, 8, 30, 19))
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    scene.transpose(Image.Transpose.ROTATE_90).save(tmp_path / "turned.png", exif=exif)
    detector = Detector(StubDetector(bright).eval(), "stub", NAMES)
    with Image.open(tmp_path / "turned.png") as stored:
        assert stored.size == (40, 60)
        foreground_mask = foreground(detector, stored)
    assert foreground_mask.mask.size == (60, 40)
    assert np.array_equal(pixels(foreground_mask.mask), np.asarray(scene)[..., 0] == 255)


def test_the_mask_is_preprocessed_as_the_picture() -> None:
    model = cv.load("pets")
    scene = Image.new("RGB", (600, 400))
    scene.paste("white", (150, 80, 310, 290))
    mask, _ = prepare_mask(
        foreground(Detector(StubDetector(bright).eval(), "stub", NAMES), scene).mask, model.preprocess
    )
    how = model.preprocess
    light = prepare(scene, model).pixels[0, 0] * how.std[0] + how.mean[0] > 0.5
    assert mask.shape == light.shape
    assert 0.1 < float(mask.double().mean()) < 0.5
    assert float((mask != light).double().mean()) < 0.01  # the picture is blended at its edges


def test_a_list_is_as_its_pictures_one_by_one() -> None:
    scenes = [Image.new("RGB", (30, 20), "white"), Image.new("RGB", (12, 50), "black")]
    detector = Detector(StubDetector(bright).eval(), "stub", NAMES)
    several = foreground(detector, scenes)
    assert [f.mask.size for f in several] == [(30, 20), (12, 50)]
    assert [f.empty for f in several] == [False, True]
    assert foreground(detector, []) == ()


# the real network, with random weights


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing is fetched, and a developer's own downloads decide nothing."""

    def refuse(*_: object, **__: object) -> None:
        raise urllib.error.URLError("no network in tests")

    monkeypatch.setattr("urllib.request.urlopen", refuse)
    monkeypatch.setattr("torch.hub.get_dir", lambda: str(tmp_path / "torch"))


@pytest.fixture(scope="module")
def newer() -> dict[str, Tensor]:
    """In half precision, for the sake of the disk."""
    with seeded():
        return halved(detection.maskrcnn_resnet50_fpn_v2(weights=None, weights_backbone=None).state_dict())


@pytest.fixture(scope="module")
def older() -> dict[str, Tensor]:
    """Named as in torchvision's file of 2019, from norms that count no batches."""
    state = halved(dim_first_layer().state_dict())
    names = {"rpn.head.conv.0.0.": "rpn.head.conv."}
    names |= {
        f"backbone.fpn.{kind}_blocks.{i}.0.": f"backbone.fpn.{kind}_blocks.{i}."
        for kind in ("inner", "layer")
        for i in range(4)
    }
    names |= {f"roi_heads.mask_head.{i}.0.": f"roi_heads.mask_head.mask_fcn{i + 1}." for i in range(4)}
    for new, old in names.items():
        state = {key.replace(new, old): value for key, value in state.items()}
    assert "rpn.head.conv.weight" in state
    return {key: value for key, value in state.items() if "num_batches_tracked" not in key}


def dim_first_layer() -> Any:
    """Its first norm sees little variance, so that what is added to it (0 or 1e-5) shows."""
    with seeded():
        module = detection.maskrcnn_resnet50_fpn(weights=None, weights_backbone=None)
    module.backbone.body.conv1.weight.data.mul_(0.01)
    module.backbone.body.bn1.running_var.fill_(1e-4)
    return module


def halved(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: value.half() if value.is_floating_point() else value for key, value in state.items()}


def cached(tmp_path: Path, weights: Any, state: object) -> Path:
    """Where torch.hub looks before it asks the network."""
    path = tmp_path / "torch" / "checkpoints" / weights.url.rpartition("/")[2]
    path.parent.mkdir(parents=True)
    torch.save(state, path)
    return path


def quick(module: Any) -> Any:
    """Small pictures, few proposals, few objects: a tenth of a second instead of ten."""
    module.transform.min_size, module.transform.max_size = (96,), 160
    module.rpn._post_nms_top_n["testing"] = 20
    module.roi_heads.detections_per_img = 15
    return module.eval()


def same_answer(ours: Detector, theirs: nn.Module, picture: Image.Image) -> Answer:
    """torchvision's own answer, after it was found to be ours to the last bit."""
    scene = [pil_to_tensor(picture).float() / 255]
    with torch.no_grad():
        (ours_output,), (theirs_output,) = quick(ours.module)(scene), quick(theirs)(scene)
    assert len(ours_output["scores"]) > 3
    for key in ("boxes", "labels", "scores", "masks"):
        assert torch.equal(ours_output[key], theirs_output[key]), key
    result: Answer = theirs_output
    return result


def test_the_newer_network_from_torchvisions_cache(tmp_path: Path, newer: dict[str, Tensor]) -> None:
    """Loaded as torchvision does it; then what foreground makes of it is the threshold of torchvision's answer."""
    path = cached(tmp_path, COCO, newer)
    generator = torch.random.get_rng_state()
    detector = load_detector()
    assert torch.equal(torch.random.get_rng_state(), generator)
    assert detector.name == "maskrcnn_resnet50_fpn_v2"
    assert detector.categories == NAMES
    assert detector.device == torch.device("cpu")
    assert not any(part.training for part in detector.module.modules())
    assert not any(weight.requires_grad for weight in detector.module.parameters())
    theirs = detection.maskrcnn_resnet50_fpn_v2(weights=COCO)
    path.unlink()
    cat = read_image("demo")
    raw = same_answer(detector, theirs, cat)

    before = {key: value.clone() for key, value in detector.module.state_dict().items()}
    score = float(raw["scores"][2])
    foreground_mask = foreground(detector, cat, score=score)
    assert np.array_equal(pixels(foreground_mask.mask), (raw["masks"][:3, 0] >= 0.5).any(0).numpy())
    assert foreground_mask.classes == tuple((NAMES[int(raw["labels"][i])], float(raw["scores"][i])) for i in range(3))
    assert len(foreground(detector, cat, score=0).classes) == 15  # as many as it gives

    tall = cat.resize((50, 90))  # beside it the cat would be padded, and other objects found
    several = foreground(detector, [tall, cat], score=score)
    for batched, alone in zip(several, (foreground(detector, tall, score=score), foreground_mask), strict=True):
        assert batched.classes == alone.classes
        assert batched.mask.tobytes() == alone.mask.tobytes()
    assert several[0].mask.size == (50, 90)
    assert all(torch.equal(value, before[key]) for key, value in detector.module.state_dict().items())


def test_the_older_network_from_a_file(tmp_path: Path, older: dict[str, Tensor]) -> None:
    """Old names, and norms that add nothing to their variance, as torchvision arranges it for these weights only."""
    path = cached(tmp_path, OLDER, older)
    detector = load_detector(path)
    theirs = detection.maskrcnn_resnet50_fpn(weights=OLDER)
    path.unlink()
    assert detector.name == "maskrcnn_resnet50_fpn"
    same_answer(detector, theirs, read_image("demo"))


def test_an_older_network_with_ordinary_norms_from_safetensors(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    theirs = dim_first_layer()
    save_file(theirs.state_dict(), tmp_path / "mine.safetensors")
    detector = load_detector(str(tmp_path / "mine.safetensors"))
    (tmp_path / "mine.safetensors").unlink()
    same_answer(detector, theirs, read_image("demo"))


def test_weights_that_are_not_the_detectors(tmp_path: Path, newer: dict[str, Tensor]) -> None:
    torch.save({"conv.weight": torch.zeros(1), "conv.bias": torch.zeros(1)}, tmp_path / "other.pth")
    expected = (
        r"'.*other.pth' do not fit torchvision's maskrcnn_resnet50_fpn_v2 with COCO's 91 labels: 363 missing "
        r"\(backbone.body.conv1.weight, .*, …\); 2 unexpected \(conv.weight, conv.bias\)\. Expected the COCO weights "
        r"of maskrcnn_resnet50_fpn_v2 \(https://.*73cbd019.pth\) or maskrcnn_resnet50_fpn \(https://.*\): "
        r"load_detector"
    )
    with pytest.raises(BadInput, match=expected):
        load_detector(tmp_path / "other.pth")

    two = {key: value[:2] if "cls_score" in key else value for key, value in newer.items()}
    torch.save(two, tmp_path / "pedestrians.pth")
    with pytest.raises(BadInput, match=r"2 of another shape \(roi_heads.box_predictor.cls_score.weight, roi_heads"):
        load_detector(tmp_path / "pedestrians.pth")
    (tmp_path / "pedestrians.pth").unlink()


def test_files_that_are_no_weights(tmp_path: Path) -> None:
    (tmp_path / "coco.pth").write_bytes(b"not a zip")
    (tmp_path / "coco.safetensors").write_bytes(b"neither")
    torch.save(nn.Linear(1, 1), tmp_path / "code.pth")
    for name, wrong in (("coco.pth", ""), ("coco.safetensors", "cannot be read"), ("code.pth", "never unpickles code")):
        with pytest.raises(BadInput, match=rf"{name}'.*{wrong}.* Expected the COCO .*load_detector\('FILE'\)"):
            load_detector(tmp_path / name)
    with pytest.raises(BadInput, match=r"koko.pth' are not there. Did you mean 'co.*load_detector\('FILE'\)"):
        load_detector(tmp_path / "koko.pth")
    with pytest.raises(BadInput, match=r"are a folder\. Expected"):
        load_detector(tmp_path)


def test_a_missing_device_raises_before_anything_is_loaded() -> None:
    with pytest.raises(BadInput, match="device 'tpu9' cannot be used here"):
        load_detector("nowhere.pth", device="tpu9")


def test_without_a_network_the_file_to_fetch_is_named() -> None:
    expected = (
        r"maskrcnn_resnet50_fpn_v2 could not be loaded \(download.pytorch.org cannot be reached: no network in tests\)"
        rf"; .*{COCO.url} \(177 MB\) and pass it: load_detector\('FILE'\)"
    )
    with pytest.raises(ModelUnavailable, match=expected):
        load_detector()


def test_a_pickle_in_the_cache_is_never_executed(tmp_path: Path) -> None:
    cached(tmp_path, COCO, Explosive())
    with pytest.raises(ModelUnavailable, match=r"could not be loaded .*load_detector\('FILE'\)"):
        load_detector()
    assert not (tmp_path / "ran").exists()


class Explosive:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path(torch.hub.get_dir()).parent / "ran",)


@pytest.mark.parametrize(
    "error",
    [urllib.error.URLError("reset by peer"), RuntimeError('invalid hash value (expected "73cbd019", got "0")')],
)
def test_a_download_that_breaks_off(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """The server answers, torch.hub asks for the right file with the right hash, and then something goes wrong."""
    downloads: list[tuple[str, str]] = []

    def download(url: str, _: str, hash_prefix: str, **__: object) -> None:
        downloads.append((url, hash_prefix))
        raise error

    monkeypatch.setattr("clairvit.models.sources.torchvision.url_blocked", lambda _: None)
    monkeypatch.setattr("torch.hub.download_url_to_file", download)
    with pytest.raises(
        ModelUnavailable, match=r"(reset by peer|invalid hash value).*\(177 MB\) and pass it: load_detector\('FILE'\)"
    ):
        load_detector()
    assert downloads == [(COCO.url, "73cbd019")]


def test_a_large_picture_is_shrunk_before_and_its_mask_enlarged_afterwards() -> None:
    """Each object's mask is drawn at the size the detector is given: of a photo of 12 megapixels that is gigabytes."""
    scene = Image.new("RGB", (4000, 3000))
    scene.paste("white", (1000, 600, 3000, 1800))
    seen: list[tuple[int, ...]] = []

    def watched(picture: Tensor) -> dict[str, Tensor]:
        seen.append(tuple(picture.shape))
        return bright(picture)

    foreground_mask = foreground(Detector(StubDetector(watched).eval(), "stub", NAMES), scene)
    assert seen == [(3, 1000, 1333)]
    assert foreground_mask.mask.size == (4000, 3000)
    edges = foreground_mask.mask.getbbox()
    assert edges is not None
    assert np.allclose(edges, (1000, 600, 3000, 1800), atol=6)
