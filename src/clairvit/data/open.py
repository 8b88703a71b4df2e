"""open_data("pets:PATH"): a public dataset on disk, or generated scenes, as an `ImageDataset` with its annotations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from http.client import HTTPException
from pathlib import Path

import numpy as np
from torch import Tensor

from clairvit._io import decoded
from clairvit.data.dataset import ImageDataset, Sample
from clairvit.data.formats.entry import Annotation, DatasetIndex, Entry
from clairvit.data.formats.registry import FORMATS, DataRequest, DatasetFormat, find_root, missing_files_error
from clairvit.data.hashing import digest
from clairvit.data.locations import is_url
from clairvit.data.masks import check_kind, prepare_mask, read_mask
from clairvit.data.trigger import TriggerSpec, parse_trigger_spec, with_trigger
from clairvit.errors import BadInput, ClairError, UnknownName, did_you_mean
from clairvit.models.image_files import picture_size, read_image, read_picture
from clairvit.models.images import to_pixels
from clairvit.models.model import Model

_VOID = 255  # in a mask of the kind voc
GENERATED_COUNT = 200  # images where no number is given
GENERATED_SPLITS = {"scenes": ("one", "two", "part"), "parts": ("all",)}  # data that need no path


@dataclass(frozen=True, eq=False)
class OpenedDataset:
    """An opened dataset: its images, classes and origin."""

    dataset: ImageDataset
    name: str  # pets
    title: str  # Oxford-IIIT Pet
    root: Path
    split: str
    classes: tuple[str, ...]  # of the dataset, in its own order
    total: int  # images in the split, before a limit
    model_class: Callable[[int, Model], int | None]  # a class of the dataset -> the model's class, None if it has none
    class_of: Callable[[int], int | None] = lambda row: None  # the class of a row, where it is known without its image

    def __len__(self) -> int:
        return len(self.dataset)

    @property
    def notes(self) -> tuple[str, ...]:
        """Return notes about the folder for the user."""
        return self.dataset.notes

    @property
    def strata(self) -> list[int | None]:
        """Return the class of each image, None where it is not known without reading the image."""
        return [self.class_of(row) for row in range(len(self))]

    def rows_of(self, names: Sequence[str]) -> list[int]:
        """Return the rows of the images with these file names, in the order of the dataset."""
        wanted = set(names)
        return [row for row, name in enumerate(self.dataset.names) if wanted & _names_of(name)]

    def take(self, rows: Sequence[int]) -> OpenedDataset:
        """Return some of the images; `total` stays that of the split."""
        chosen = list(rows)
        return replace(self, dataset=self.dataset.take(chosen), class_of=lambda row: self.class_of(chosen[row]))

    def unknown_classes(self, model: Model) -> tuple[str, ...]:
        """Return the classes of the dataset that the model does not have; images of them have no true class."""
        return tuple(name for index, name in enumerate(self.classes) if self.model_class(index, model) is None)


def list_datasets() -> tuple[DatasetFormat, ...]:
    """Return the formats that `open_data` reads: their folders (`.layout()`), annotations (`.has`) and `.download`."""
    return tuple(FORMATS.values())


def open_data(
    spec: str,
    split: str | None = None,
    limit: int | None = None,
    seed: int = 0,
    download: bool = False,
    *,
    masks: str | Path | None = None,
    mask_kind: str = "nonzero",
    names: Sequence[str] = (),
) -> OpenedDataset:
    """Open "NAME:PATH" as a dataset; images are read lazily.

    "scenes" or "scenes:COUNT" are generated from the seed and need no path; their splits are one (object), two
    (objects) and part (one object; the mask is the part that determines its class). "parts" or "parts:COUNT" are
    generated too: objects of removable parts. "trigger(NAME:PATH, class=CLASS, size=32, position=random)" pastes a
    trigger on the images of another spec: the mask is the trigger, the true class CLASS; images of CLASS itself are
    left out.

    Args:
        spec: NAME:PATH, with a name of `list_datasets()`, or scenes, parts, or trigger(…). The PATH of folder, csv,
            parquet and wds may be a URL that fsspec reads.
        split: A split of the dataset; None is its first one.
        limit: The number of images, a stratified sample over classes, in the dataset's order; None is all.
        seed: Of the sample and of generated images.
        download: Download the dataset into PATH if it is not there, where that is allowed.
        masks: For `folder:PATH` only: a folder with 'cat.png' for 'cat.jpg', read as `mask_kind` says.
        mask_kind: One of `MASK_KINDS`.
        names: Which images, by the names of their files, with or without the ending; none: all. `limit` is of these.

    Raises:
        BadInput: The folder does not look as expected, or an option does not fit.
        UnknownName: There is no such dataset or split.

    Example:
        >>> len(open_data("scenes:8"))
        8
    """
    if limit is not None and (isinstance(limit, bool) or limit < 1):
        raise BadInput(f"limit={limit} was given; expected the number of images to take, 1 or more.")
    check_kind(mask_kind)
    if names:
        opened = _with_names(open_data(spec, split, None, seed, download, masks=masks, mask_kind=mask_kind), names)
        count = len(opened)
        return opened if limit is None else opened.take(stratified_sample(opened.strata, min(limit, count), seed))
    triggered = parse_trigger_spec(spec)
    if triggered is not None:
        if masks is not None:
            raise BadInput(f"masks={masks} was given with {spec}, whose mask is the trigger; leave them out.")
        return _with_trigger(open_data(triggered.inner, split, limit, seed, download), triggered, seed)
    parsed = None if spec.partition(":")[0] in GENERATED_SPLITS else _parse_spec(spec)
    if masks is not None and (parsed is None or parsed[0].name != "folder"):
        raise BadInput(f"masks={masks} was given with {spec}, which has its own; expected it with folder:PATH only.")
    if parsed is None:
        return _open_generated(spec, split, limit, seed)
    data, path = parsed
    split = _check_split(data, split)
    root, location = _place(data, path, split, download)
    mask_folder = None if masks is None else Path(masks).expanduser()
    index = data.open(DataRequest(root, split, mask_folder, mask_kind, location))
    if not index.entries:
        raise BadInput(
            f"'{location or root}' holds no images for {data.name}, split {split}. Expected:\n{data.layout(path)}"
        )
    rows = range(len(index.entries)) if limit is None else stratified_sample(_strata(index, limit), limit, seed)
    return OpenedDataset(
        dataset=_image_dataset([index.entries[row] for row in rows], index),
        name=data.name,
        title=data.title,
        root=root,
        split=split,
        classes=index.classes,
        total=len(index.entries),
        model_class=lambda class_index, model: model_class(class_index, index, model),
        class_of=lambda row: _stratum(index.entries[rows[row]]) if index.has_labels else None,
    )


def _names_of(name: str) -> set[str]:
    """Return what an image may be called by: its path in the dataset, its file, and its file without the ending."""
    return {name, Path(name).name, Path(name).stem}


def _with_names(opened: OpenedDataset, names: Sequence[str]) -> OpenedDataset:
    """Return the images of these names; raise `BadInput` for one that is not there."""
    rows = opened.rows_of(names)
    present = set().union(*(_names_of(opened.dataset.names[row]) for row in rows))
    missing = [name for name in names if name not in present]
    if missing:
        listed = ", ".join(missing[:3]) + (", …" if len(missing) > 3 else "")
        split = f", split {opened.split}," if opened.split else ""
        raise BadInput(
            f"{len(missing)} of the {len(names)} images that were named are not in {opened.title}{split} ({listed}); "
            f"expected names of its files, such as '{Path(opened.dataset.names[0]).stem}'."
        )
    return opened.take(rows)


def _with_trigger(opened: OpenedDataset, spec: TriggerSpec, seed: int) -> OpenedDataset:
    """Return the images of other classes than the trigger's, with the trigger pasted."""
    name = spec.class_name
    names = [class_name.lower() for class_name in opened.classes]
    index = name if isinstance(name, int) else names.index(name.lower()) if name.lower() in names else None
    rows = [row for row in range(len(opened)) if index is None or opened.class_of(row) != index]
    if not rows:
        raise BadInput(f"All {len(opened)} images are of class '{name}'; expected others to paste the trigger on.")
    dataset = with_trigger(opened.dataset.take(rows), spec.trigger, name, seed)
    left_out = len(opened) - len(rows)
    if left_out:
        note = f"{left_out} of {len(opened)} images are of the trigger's class '{name}' already and are left out"
        dataset = replace(dataset, notes=(*dataset.notes, note))
    return replace(opened, dataset=dataset, title=f"{opened.title} with a trigger", class_of=lambda row: index)


def _open_generated(spec: str, split: str | None, limit: int | None, seed: int) -> OpenedDataset:
    """Return generated scenes, or part scenes."""
    from clairvit.data import part_scenes, scenes

    name, _, number = spec.partition(":")
    count, splits = number or str(limit or GENERATED_COUNT), GENERATED_SPLITS[name]
    if not count.isdecimal() or int(count) < 1:
        raise BadInput(f"'{spec}' was given; expected {name}, or {name}:COUNT such as {name}:500.")
    if split not in (None, *splits):
        raise UnknownName(f"{name.title()} have no split '{split}'. Choose one of: {', '.join(splits)}.")
    limited = int(count) if limit is None else min(int(count), limit)
    if name == "parts":
        dataset, classes = part_scenes.part_scenes(limited, seed), part_scenes.CLASSES
    else:
        mask: scenes.SceneMask = "part" if split == "part" else "object"
        dataset, classes = scenes.scenes(limited, seed, objects=1 + (split == "two"), mask=mask), scenes.CLASSES
    index = DatasetIndex((), classes)
    return OpenedDataset(
        dataset=dataset,
        name=name,
        title={"scenes": "Scenes", "parts": "Part scenes"}[name],
        root=Path(),
        split=split or splits[0],
        classes=classes,
        total=int(count),
        model_class=lambda class_index, model: model_class(class_index, index, model),
    )


def stratified_sample(strata: Sequence[int | None], limit: int, seed: int) -> list[int]:
    """Return `limit` rows in ascending order, in which each stratum has its share, rounded up or down at random.

    Systematic sampling: the rows are ordered by stratum, at random within each, and every (n / limit)-th is taken from
    a random start.
    """
    count = len(strata)
    if limit >= count:
        return list(range(count))
    generator = np.random.default_rng(seed)
    unique = sorted(set(strata), key=lambda stratum: (stratum is None, stratum or 0))
    position = dict(zip(unique, generator.permutation(len(unique)), strict=True))
    ordered = sorted(generator.permutation(count).tolist(), key=lambda row: position[strata[row]])
    steps = (np.arange(limit) + generator.random()) * (count / limit)
    return sorted(ordered[min(int(step), count - 1)] for step in steps)


def model_class(class_index: int, index: DatasetIndex, model: Model) -> int | None:
    """Return the model's class for a class of the dataset, by its whole name or one of its synonyms; None if there is
    none.

    The beginning of a name is not enough: VOC's cat is no catamaran.
    """
    name = index.classes[class_index]
    if index.numbering == "imagenet" and len(model.labels) == len(index.classes):
        return class_index
    if index.numbering != "names" and not model.labels:
        return class_index
    lower = name.lower()
    variants = {lower, lower.replace("_", " ")}
    labels = [label.lower() for label in model.labels]
    by_name = [i for i, label in enumerate(labels) if label in variants]
    by_synonym = [i for i, label in enumerate(labels) if variants & {part.strip() for part in label.split(",")}]
    matches = by_name or by_synonym
    if len(matches) == 1:
        return matches[0]
    return int(name) if index.numbering == "names" and name.isdecimal() and not by_name else None


def _parse_spec(spec: str) -> tuple[DatasetFormat, str]:
    """Return format and path, or another location, of NAME:PATH."""
    name, _, path = str(spec).partition(":")
    if name not in FORMATS:
        hint = f" For a folder of images type folder:{spec}." if Path(spec).expanduser().is_dir() else ""
        raise FORMATS.unknown(name, near=did_you_mean(name, FORMATS) + hint)
    data = FORMATS.resolve(name)
    if not path:
        raise BadInput(f"'{spec}' does not say where the data is; type {name}:PATH. Expected:\n{data.layout()}")
    return data, path


def _place(data: DatasetFormat, path: str, split: str, download: bool) -> tuple[Path, str]:
    """Return the folder of a dataset and "", or an empty path and the location that the format opens itself.

    The folder has all required files, after a download if that is needed and allowed.
    """
    if data.accepts == "location" or (data.accepts == "folder or URL" and is_url(path)):
        return Path(), path
    if is_url(path):
        names = ", ".join(f"{other.name}:" for other in FORMATS.values() if other.accepts != "folder")
        raise BadInput(
            f"{data.title} is read from a folder of this disk, and '{path}' is a URL; expected a copy of it here, or "
            f"{names} with the URL."
        )
    folder = Path(path).expanduser()
    if folder.is_file() and folder.name in data.required_paths:
        folder = folder.parent  # the dataset is a single file
    root, missing = find_root(data, folder, split)
    if download and not (missing is None and folder.exists()):
        _download(data, folder)
        root, missing = find_root(data, folder, split)
    if missing is not None or not folder.exists():
        raise missing_files_error(data, folder, root, missing or "")
    return root, ""


def _check_split(data: DatasetFormat, split: str | None) -> str:
    """Return the split, the first one for None; raise UnknownName if the dataset has no such split."""
    if not data.splits:
        return split or ""  # the dataset has its own, which are known once it is opened
    if split is None:
        return data.splits[0]
    if split not in data.splits:
        raise UnknownName(
            f"{data.title} has no split '{split}'.{did_you_mean(split, data.splits)} "
            f"Choose one of: {', '.join(data.splits)}."
        )
    return split


def _download(data: DatasetFormat, path: Path) -> None:
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


def _strata(index: DatasetIndex, limit: int) -> list[int | None]:
    """Return the class per image for sampling; None for each if all images are taken or there are no labels."""
    if limit >= len(index.entries) or not index.has_labels:
        return [None] * len(index.entries)
    return [_stratum(entry) for entry in index.entries]


def _stratum(entry: Entry) -> int | None:
    try:
        return entry.stratum()
    except ClairError:
        return None  # the error is raised when the image is read, if it is in the sample


def _image_dataset(entries: Sequence[Entry], index: DatasetIndex) -> ImageDataset:
    """Return the entries as a dataset."""

    def content_hash(row: int) -> str:
        entry = entries[row]
        if isinstance(entry.image, Path) and not entry.image.is_file():
            read_image(entry.image)  # raises BadInput
        image = entry.image if isinstance(entry.image, Path) else entry.image()
        stratum = entry.stratum() if index.numbering == "names" else None
        classes = index.classes if stratum is None else index.classes[stratum]
        inputs = (part.encode() if isinstance(part, str) else part for part in entry.hash_inputs())
        return digest(image, *inputs, repr((classes, index.all_objects, index.has_others)).encode())

    names = tuple(decoded(entry.name) for entry in entries)  # stores and databases take Unicode only
    annotated = (index.has_masks, index.has_labels, index.has_others)
    return ImageDataset(
        names,
        lambda row, model: _read_sample(entries[row], index, model),
        content_hash,
        *annotated,
        index.notes,
        concurrent=True,
    )


def _read_sample(entry: Entry, index: DatasetIndex, model: Model) -> Sample:
    """Return image, mask and classes; without a label the true class is that of the largest object in the crop."""
    image = entry.image if isinstance(entry.image, Path) else entry.image()
    picture = read_picture(image, model.preprocess.channels)
    size = picture_size(picture)  # columns, rows
    pixels = to_pixels(picture, model.preprocess)
    annotation = entry.annotation(size)
    objects = {c: _prepare_object(mask, annotation, size, model) for c, mask in annotation.objects.items()}
    by_size = sorted(objects, key=lambda c: (-int(objects[c][0].sum()), -int(annotation.objects[c].sum()), c))
    label = by_size[0] if annotation.label is None and by_size else annotation.label
    other = next((c for c in by_size if c != label and bool(objects[c][0].any())), None)
    mask = void = None
    if index.has_masks and annotation.masked:
        # masks may be of another size than the picture, and void with them
        shape = size[::-1] if annotation.void is None else annotation.void.shape
        mask, void = _prepare_object(np.zeros(shape, dtype=bool), annotation, size, model)
        for c, (object_mask, _) in objects.items():
            mask = mask | object_mask if index.all_objects or c == by_size[0] else mask
    return Sample(
        pixels,
        mask,
        void,
        label=_model_class_or_none(label, index, model) if index.has_labels else None,
        other=_model_class_or_none(other, index, model) if index.has_others else None,
    )


def _prepare_object(mask: object, annotation: Annotation, size: tuple[int, int], model: Model) -> tuple[Tensor, Tensor]:
    """Return object and void, bool [H, W], resized and cropped as the model's images are."""
    values = np.asarray(mask).astype(np.uint8)
    if annotation.void is not None:
        values = np.where(annotation.void, _VOID, values)
    return prepare_mask(read_mask(values, size, "voc"), model.preprocess)


def _model_class_or_none(class_index: int | None, index: DatasetIndex, model: Model) -> int | None:
    return None if class_index is None or class_index < 0 else model_class(class_index, index, model)
