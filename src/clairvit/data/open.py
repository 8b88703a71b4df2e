"""The door to data: open_data("pets:PATH") is an album with what the data set's own files say of its images."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path

import numpy as np
from torch import Tensor

from clairvit.data.dataset import ImageDataset, Sample
from clairvit.data.formats.entry import Annotation, DatasetIndex, Entry
from clairvit.data.formats.registry import DataRequest, Dataset, find_root, not_there, registered
from clairvit.data.hashing import digest
from clairvit.data.masks import check_kind, prepare_mask, read_mask
from clairvit.errors import BadInput, ClairError, UnknownName, did_you_mean
from clairvit.models.image_files import read_image
from clairvit.models.images import prepare
from clairvit.models.model import Model

_LAYOUTS = (  # in the order in which they are listed
    *("folder", "pets", "flowers", "caltech101", "voc", "dogs", "indoor67"),
    *("imagenet", "imagenet_s", "imagenet_seg", "coco", "mura"),
)
_VOID = 255  # in a mask of the kind voc
SCENES, SCENES_SPLITS, SOME = "scenes", ("one", "two", "part"), 200


@dataclass(frozen=True, eq=False)
class Data:
    """Images, what they are of, and where they come from."""

    dataset: ImageDataset
    name: str  # pets
    title: str  # Oxford-IIIT Pet
    root: Path
    split: str
    classes: tuple[str, ...]  # the data set's own, in its own order
    total: int  # images in the split, before a limit
    number: Callable[[int, Model], int | None]  # a class of the data set -> the model's number, if it has it

    def __len__(self) -> int:
        return len(self.dataset)

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should know of the folder."""
        return self.dataset.notes

    def unknown(self, model: Model) -> tuple[str, ...]:
        """Classes of the data set that the model does not have; images of them have no true class."""
        return tuple(name for own, name in enumerate(self.classes) if self.number(own, model) is None)


def datasets() -> tuple[Dataset, ...]:
    """What `open_data` can read, with its layout (`.layout()`), what it has (`.has`) and whether it can `.download`."""
    modules = [importlib.import_module(f"clairvit.data.formats.{name}").__name__ for name in _LAYOUTS]
    places = {module: place for place, module in enumerate(modules)}
    # whoever was imported first, the list is in the same order; what others registered comes after it
    return tuple(sorted(registered().values(), key=lambda data: places.get(data.open.__module__, len(places))))


def open_data(
    spec: str,
    split: str | None = None,
    limit: int | None = None,
    seed: int = 0,
    download: bool = False,
    *,
    masks: str | Path | None = None,
    mask_kind: str = "nonzero",
) -> Data:
    """ "NAME:PATH" as an album. No image is read before its turn comes.

    limit     so many images, drawn by the seed from all classes alike, in the data set's order
    download  fetch the data set into PATH if it is not there, where that is allowed
    masks     of `folder:PATH` only: a folder with 'cat.png' for 'cat.jpg', read as `mask_kind` says

    "scenes" or "scenes:COUNT" are drawn by the seed and need no path; their splits are one (object), two (objects) and
    part (one object, the mask is of the part that decides its class).
    """
    if limit is not None and (isinstance(limit, bool) or limit < 1):
        raise BadInput(f"limit={limit} was given; expected the number of images to take, 1 or more.")
    check_kind(mask_kind)
    drawn = spec.partition(":")[0] == SCENES
    known = None if drawn else _parse(spec)
    if masks is not None and (known is None or known[0].name != "folder"):
        raise BadInput(f"masks={masks} was given with {spec}, which has its own; expected it with folder:PATH only.")
    if known is None:
        return _scenes(spec, split, limit, seed)
    data, path = known
    split = _split(data, split)
    root = _root(data, path, split, download)
    found = data.open(DataRequest(root, split, None if masks is None else Path(masks).expanduser(), mask_kind))
    if not found.entries:
        raise BadInput(f"'{root}' holds no images for {data.name}, split {split}. Expected:\n{data.layout(path)}")
    rows = range(len(found.entries)) if limit is None else sample(_groups(found, limit), limit, seed)
    entries = [found.entries[row] for row in rows]
    return Data(
        dataset=_album(entries, found),
        name=data.name,
        title=data.title,
        root=root,
        split=split,
        classes=found.classes,
        total=len(found.entries),
        number=lambda own, model: class_of(own, found, model),
    )


def _scenes(spec: str, split: str | None, limit: int | None, seed: int) -> Data:
    """Scenes have no folder: they are drawn."""
    from clairvit.data.scenes import CLASSES, scenes

    count = spec.partition(":")[2] or str(limit or SOME)
    if not count.isdecimal() or int(count) < 1:
        raise BadInput(f"'{spec}' was given; expected scenes, or scenes:COUNT such as scenes:500.")
    if split not in (None, *SCENES_SPLITS):
        raise UnknownName(f"Scenes have no split '{split}'. Choose one of: {', '.join(SCENES_SPLITS)}.")
    many = int(count) if limit is None else min(int(count), limit)
    dataset = scenes(many, seed, objects=1 + (split == "two"), mask="part" if split == "part" else "object")
    found = DatasetIndex((), CLASSES)
    return Data(
        dataset=dataset,
        name=SCENES,
        title="Scenes",
        root=Path(),
        split=split or SCENES_SPLITS[0],
        classes=CLASSES,
        total=int(count),
        number=lambda own, model: class_of(own, found, model),
    )


def sample(groups: Sequence[int | None], limit: int, seed: int) -> list[int]:
    """`limit` rows in ascending order, in which each group has its share, rounded up or down by chance.

    The rows are laid out group by group, in random order, and every (n / limit)-th is taken from a random start.
    """
    count = len(groups)
    if limit >= count:
        return list(range(count))
    dice = np.random.default_rng(seed)
    kinds = sorted(set(groups), key=lambda kind: (kind is None, kind or 0))
    place = dict(zip(kinds, dice.permutation(len(kinds)), strict=True))
    laid = sorted(dice.permutation(count).tolist(), key=lambda row: place[groups[row]])
    steps = (np.arange(limit) + dice.random()) * (count / limit)
    return sorted(laid[min(int(step), count - 1)] for step in steps)


def class_of(own: int, found: DatasetIndex, model: Model) -> int | None:
    """The model's number for a class of the data set, or None: by its whole name or one of its synonyms.

    A beginning of a name is not enough here: VOC's cat is no catamaran.
    """
    name = found.classes[own]
    if found.numbering == "imagenet" and len(model.labels) == len(found.classes):
        return own
    if found.numbering != "names" and not model.labels:
        return own
    wanted = name.lower()
    spaced = wanted.replace("_", " ")
    labels = [label.lower() for label in model.labels]
    whole = [i for i, label in enumerate(labels) if label in (wanted, spaced)]
    either = [i for i, label in enumerate(labels) if {wanted, spaced} & {part.strip() for part in label.split(",")}]
    if len(whole or either) == 1:
        return (whole or either)[0]
    return int(name) if found.numbering == "names" and name.isdecimal() and not whole else None


def _parse(spec: str) -> tuple[Dataset, Path]:
    known = {data.name: data for data in datasets()}
    name, colon, path = str(spec).partition(":")
    if name in known and path:
        return known[name], Path(path).expanduser()
    if name in known:
        raise BadInput(f"'{spec}' does not say where the data is; type {name}:PATH. Expected:\n{known[name].layout()}")
    hint = f" For a folder of images type folder:{spec}." if Path(spec).expanduser().is_dir() else ""
    raise UnknownName(
        f"There is no data set '{name if colon else spec}'.{did_you_mean(name, known)}{hint} "
        f"Type NAME:PATH, with one of: {', '.join(known)}."
    )


def _split(data: Dataset, split: str | None) -> str:
    if split is None:
        return data.splits[0]
    if split not in data.splits:
        raise UnknownName(
            f"{data.title} has no split '{split}'.{did_you_mean(split, data.splits)} "
            f"Choose one of: {', '.join(data.splits)}."
        )
    return split


def _root(data: Dataset, path: Path, split: str, download: bool) -> Path:
    """The folder with everything in it, after a download if need be."""
    if path.is_file() and path.name in data.needs:
        path = path.parent  # the one file that a data set consists of
    root, lacks = find_root(data, path, split)
    if lacks is None and path.exists():
        return root
    if download:
        _fetch(data, path)
        root, lacks = find_root(data, path, split)
    if lacks is not None or not path.exists():
        raise not_there(data, path, root, lacks or "")
    return root


def _fetch(data: Dataset, path: Path) -> None:
    if data.fetch is None:
        raise BadInput(
            f"{data.title} cannot be downloaded from here: {data.why_no_download}. Put it into:\n{data.layout(path)}"
        )
    try:
        path.mkdir(parents=True, exist_ok=True)
        data.fetch(path)
    except (OSError, RuntimeError, HTTPException, ImportError) as error:  # no network, no disk, a broken archive
        raise BadInput(
            f"{data.title} could not be downloaded ({type(error).__name__}: {error}); look at the network and the disk "
            f"and try again, or put it by hand into:\n{data.layout(path)}"
        ) from error


def _groups(found: DatasetIndex, limit: int) -> list[int | None]:
    """By which a sample is drawn; those of the whole set are not looked for in vain."""
    if limit >= len(found.entries) or not found.has_labels:
        return [None] * len(found.entries)
    return [_group(entry) for entry in found.entries]


def _group(entry: Entry) -> int | None:
    try:
        return entry.group()
    except ClairError:
        return None  # what is wrong with it is said when it is read, if it is drawn at all


def _album(entries: Sequence[Entry], found: DatasetIndex) -> ImageDataset:
    def read(row: int, model: Model) -> Sample:
        return _page(entries[row], found, model)

    def mark(row: int) -> str:
        entry = entries[row]
        if isinstance(entry.image, Path) and not entry.image.is_file():
            read_image(entry.image)  # says so
        image = entry.image if isinstance(entry.image, Path) else entry.image()
        own = entry.group() if found.numbering == "names" else None
        named = found.classes if own is None else found.classes[own]
        known = (part.encode() if isinstance(part, str) else part for part in entry.behind())
        return digest(image, *known, repr((named, found.whole, found.has_others)).encode())

    names = tuple(entry.name for entry in entries)
    return ImageDataset(names, read, mark, found.has_masks, found.has_labels, found.has_others, found.notes)


def _page(entry: Entry, found: DatasetIndex, model: Model) -> Sample:
    picture = read_image(entry.image if isinstance(entry.image, Path) else entry.image())
    pixels = prepare([picture], model).pixels[0]
    known = entry.known(picture.size)
    seen = {own: _as_seen(mask, known, picture.size, model) for own, mask in known.objects.items()}
    order = sorted(seen, key=lambda own: (-int(seen[own][0].sum()), -int(known.objects[own].sum()), own))
    label = order[0] if known.label is None and order else known.label
    other = next((own for own in order if own != label and bool(seen[own][0].any())), None)
    mask = void = None
    if found.has_masks and known.masked:
        # masks may be of another size than the picture, and void with them
        nothing = np.zeros((picture.height, picture.width) if known.void is None else known.void.shape, dtype=bool)
        mask, void = _as_seen(nothing, known, picture.size, model)
        for own, (there, _) in seen.items():
            mask = mask | there if found.whole or own == order[0] else mask
    return Sample(
        pixels,
        mask,
        void,
        label=_number(label, found, model) if found.has_labels else None,
        other=_number(other, found, model) if found.has_others else None,
    )


def _as_seen(mask: object, known: Annotation, size: tuple[int, int], model: Model) -> tuple[Tensor, Tensor]:
    """Object and void, bool [H, W], cut and resized as the model's images are."""
    values = np.asarray(mask).astype(np.uint8)
    if known.void is not None:
        values = np.where(known.void, _VOID, values)
    return prepare_mask(read_mask(values, size, "voc"), model.preprocess)


def _number(own: int | None, found: DatasetIndex, model: Model) -> int | None:
    return None if own is None or own < 0 else class_of(own, found, model)
