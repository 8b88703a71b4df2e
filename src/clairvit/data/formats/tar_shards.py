"""Tar shards in the layout of WebDataset: the members of a sample follow each other and share their name up to the
first dot (0001.jpg, 0001.cls). The shards are indexed by their headers, and images are read by their position."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from clairvit._io import parse_json
from clairvit.data.formats.encoded import Label, encoded_entries, index_labels, unique_names
from clairvit.data.formats.entry import DatasetIndex
from clairvit.data.formats.registry import DataRequest, dataset_format
from clairvit.data.locations import expand_location, opened, read_bytes
from clairvit.errors import BadInput
from clairvit.models.image_files import SUFFIXES

COMPRESSED = (".gz", ".tgz", ".bz2", ".xz", ".zst")
LABEL_KEYS = ("label", "cls", "class", "target")  # in a member .json
LARGEST_LABEL = 1 << 20  # bytes of a member .cls or .json that is read
TREE = """
PATH.tar                      a file, folder, pattern or {000..063}, here or at a URL
  0001.jpg                    one image for each sample
  0001.cls                    its class, a number or a name; or in 0001.json as label
"""


@dataclass(frozen=True)
class _Sample:
    """An image in a shard."""

    shard: str
    name: str
    offset: int
    size: int
    label: Label

    def read(self) -> bytes:
        """Return the bytes of the image file."""
        return read_bytes(self.shard, self.offset, self.size)


@dataset_format(
    "wds",
    "tar shards (WebDataset)",
    has=("labels",),
    tree=TREE,
    why_no_download="it is your own",
    accepts="location",
)
def tar_shards(request: DataRequest) -> DatasetIndex:
    """Index the images of all shards in their order; the headers and the classes are read."""
    shards = expand_location(request.location, (".tar", *COMPRESSED))
    compressed = [shard for shard in shards if shard.lower().endswith(COMPRESSED)]
    if compressed:
        raise BadInput(
            f"'{compressed[0]}' is compressed, so that its images cannot be read one by one; expected a plain .tar: "
            "decompress it first. (Images are compressed already.)"
        )
    samples = [sample for shard in shards for sample in _samples(shard)]
    if not samples:
        raise BadInput(f"'{request.location}' has no images; expected members ending in {', '.join(SUFFIXES)}.")
    places = [f"{sample.shard.rpartition('/')[2]}/{sample.name}" for sample in samples]
    labels = index_labels([sample.label for sample in samples])
    names = unique_names([sample.name for sample in samples], places)
    entries = encoded_entries(names, [sample.read for sample in samples], labels)
    return DatasetIndex(entries, labels.classes, has_labels=labels.has_labels, numbering=labels.numbering)


def _samples(shard: str) -> Iterator[_Sample]:
    """Yield the samples of a shard that have an image."""
    with opened(shard) as file:
        try:
            with tarfile.open(fileobj=file, mode="r:") as archive:
                members: dict[str, tarfile.TarInfo] = {}
                key = ""
                for member in archive:
                    folder, _, base = member.name.rpartition("/")
                    stem, _, extension = base.partition(".")
                    if not member.isfile() or not stem:  # folders, links, hidden files
                        continue
                    if (name := f"{folder}/{stem}".lstrip("/")) != key:
                        yield from _sample(shard, archive, members)
                        key, members = name, {}
                    members[extension.lower()] = member
                yield from _sample(shard, archive, members)
        except tarfile.TarError as error:
            raise BadInput(f"'{shard}' cannot be read ({error}); expected a plain tar file: fetch it again.") from error


def _sample(shard: str, archive: tarfile.TarFile, members: Mapping[str, tarfile.TarInfo]) -> Iterator[_Sample]:
    """Yield the sample of members by extension, if one of them is an image."""
    image = next((members[name] for name in members if PurePosixPath(f"x.{name}").suffix in SUFFIXES), None)
    if image is not None:
        label = _label(shard, archive, members)
        yield _Sample(shard, image.name.removeprefix("./"), image.offset_data, image.size, label)


def _label(shard: str, archive: tarfile.TarFile, members: Mapping[str, tarfile.TarInfo]) -> Label:
    member = members.get("cls") or members.get("json")
    source = None if member is None or member.size > LARGEST_LABEL else archive.extractfile(member)
    if member is None or source is None:
        return None
    content = source.read()
    try:
        if members.get("cls") is not None:
            return content.decode().strip() or None
        document = parse_json(content)
    except ValueError as error:  # also of the decoding
        raise BadInput(f"'{member.name}' in '{shard}' cannot be read ({error}); expected text or JSON.") from error
    value = next((document[key] for key in LABEL_KEYS if key in document), None) if isinstance(document, dict) else None
    return value if isinstance(value, int | str) and not isinstance(value, bool) else None
