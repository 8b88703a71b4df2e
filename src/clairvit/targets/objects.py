"""The objects of Pascal VOC and COCO among ImageNet's 1000 classes, so that a model of ImageNet can be asked for them.

The table is ours, by the names of the classes. A class counts if whatever it shows is such an object: a tabby is a cat.
What only resembles the object, holds it or is a part of it does not count: a flower pot is no plant, a book jacket no
book, and ImageNet's kite is a bird.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

CLASSES = 1000
NEARLY_ALL = 0.98
_BIRDS = (*range(7, 25), *range(80, 101), *range(127, 147))
# Object -> indices among ImageNet's classes; none: ImageNet has no such class.
OBJECTS: Mapping[str, tuple[int, ...]] = {
    # Pascal VOC
    "airplane": (404, 895),
    "bicycle": (444, 671),
    "bird": _BIRDS,
    "boat": (472, 484, 554, 576, 625, 780, 814, 871, 914),
    "bottle": (440, 720, 737, 898, 907),
    "bus": (654, 779, 874),
    "car": (436, 468, 511, 609, 627, 656, 661, 751, 817),
    "cat": tuple(range(281, 286)),
    "chair": (423, 559, 765),
    "cow": (345,),
    "dining table": (532,),
    "dog": tuple(range(151, 269)),
    "horse": (339,),
    "motorcycle": (665, 670),
    "person": (),
    "potted plant": (),
    "sheep": (348, 349),
    "couch": (831,),
    "train": (466, 547, 705, 820),
    "tv": (664, 782, 851),
    # COCO has these too
    "truck": (555, 569, 675, 717, 864, 867),
    "traffic light": (920,),
    "fire hydrant": (),
    "stop sign": (),
    "parking meter": (704,),
    "bench": (703,),
    "elephant": (385, 386),
    "bear": (294, 295, 296, 297),
    "zebra": (340,),
    "giraffe": (),
    "backpack": (414,),
    "umbrella": (879,),
    "handbag": (),
    "tie": (457, 906),
    "suitcase": (),
    "frisbee": (),
    "skis": (795,),
    "snowboard": (),
    "sports ball": (429, 430, 522, 574, 722, 768, 805, 852, 890),
    "kite": (),
    "baseball bat": (),
    "baseball glove": (),
    "skateboard": (),
    "surfboard": (),
    "tennis racket": (752,),
    "wine glass": (),
    "cup": (504, 968),
    "fork": (),
    "knife": (499,),
    "spoon": (910,),
    "bowl": (659, 809),
    "banana": (954,),
    "apple": (948,),
    "sandwich": (),
    "orange": (950,),
    "broccoli": (937,),
    "carrot": (),
    "hot dog": (934,),
    "pizza": (963,),
    "donut": (),
    "cake": (),
    "bed": (564,),
    "toilet": (861,),
    "laptop": (620, 681),
    "mouse": (673,),
    "remote": (761,),
    "keyboard": (508,),
    "cell phone": (487,),
    "microwave": (651,),
    "oven": (),
    "toaster": (859,),
    "sink": (896,),
    "refrigerator": (760,),
    "book": (),
    "clock": (409, 530, 892),
    "vase": (883,),
    "scissors": (),
    "teddy bear": (850,),
    "hair drier": (589,),
    "toothbrush": (),
}
SPELLINGS = {  # of Pascal VOC
    "aeroplane": "airplane",
    "diningtable": "dining table",
    "motorbike": "motorcycle",
    "pottedplant": "potted plant",
    "sofa": "couch",
    "tvmonitor": "tv",
}


def object_classes(name: str, labels: Sequence[str]) -> tuple[int, ...] | None:
    """Return the classes of a model of ImageNet that are an object of VOC or COCO, of one class at least.

    None: it is no such object, or the labels are not ImageNet's.
    """
    key = " ".join(name.lower().replace("_", " ").split())
    classes = OBJECTS.get(SPELLINGS.get(key, key))
    if classes is None or not are_imagenet(tuple(labels)):
        return None
    return classes


@functools.lru_cache(maxsize=16)
def are_imagenet(labels: tuple[str, ...]) -> bool:
    """Return whether labels name ImageNet's 1000 classes in their order, by those of the objects in the table.

    Nearly all must agree: libraries rename what two classes are called ("crane bird", "crane (134)").
    """
    if len(labels) != CLASSES:
        return False
    from timm.data import ImageNetInfo

    info = ImageNetInfo("imagenet-1k")
    used = sorted({index for classes in OBJECTS.values() for index in classes})
    agreeing = [bool(_synonyms(labels[index]) & _synonyms(info.index_to_description(index))) for index in used]
    return sum(agreeing) >= NEARLY_ALL * len(used)


def _synonyms(label: str) -> set[str]:
    return {part.strip().lower().replace("_", " ") for part in label.split(",")}
