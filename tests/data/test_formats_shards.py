"""Images that are no files in a folder: tar shards, Parquet, manifests, URLs, Hugging Face data sets."""

from __future__ import annotations

import io
import json
import tarfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as arrow
import pyarrow.parquet as arrow_parquet
import pytest

from clairvit.data import locations
from clairvit.data.dataset import ImageDataset
from clairvit.data.formats import hugging_face, tables
from clairvit.data.formats.encoded import index_labels
from clairvit.data.formats.imagenet import class_indices, class_names
from clairvit.data.open import open_data
from clairvit.errors import BadInput, UnknownName
from helpers.small_datasets import block, called, identity_model, painted, photo, read_sample, shows, written

NAMES = ("cat", "cat", "dog", "dog", "dog")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Five photos in folders of two classes."""
    for number, name in enumerate(NAMES):
        photo(tmp_path / "photos" / name / f"{number}.jpg", seed=number)
    return tmp_path / "photos"


@pytest.fixture
def bucket() -> Any:
    fsspec = pytest.importorskip("fsspec")
    filesystem = fsspec.filesystem("memory")
    filesystem.store.clear()
    yield filesystem
    filesystem.store.clear()


def contents(folder: Path) -> list[bytes]:
    return [(folder / name / f"{number}.jpg").read_bytes() for number, name in enumerate(NAMES)]


def add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))


def shards(folder: Path, target: Path) -> Path:
    """Two shards, whose samples have a text, a JSON, or both; and members that are no image."""
    target.mkdir()
    for shard, rows in ((0, (0, 1, 2)), (1, (3, 4))):
        with tarfile.open(target / f"{shard:03}.tar", "w") as archive:
            for row in rows:
                add(archive, f"./s/{row:04}.jpg", contents(folder)[row])
                add(archive, f"./s/{row:04}.json", json.dumps({"label": NAMES[row], "size": 3}).encode())
                if row != 1:
                    add(archive, f"./s/{row:04}.cls", NAMES[row].encode())
            add(archive, "notes.txt", b"no image")
    return target


def table(folder: Path, file: Path, labels: tuple[Any, ...] = NAMES, **metadata: Any) -> Path:
    cells = [{"bytes": content, "path": f"{row}.jpg"} for row, content in enumerate(contents(folder))]
    built = arrow.table({"image": cells, "label": list(labels)}).replace_schema_metadata(metadata or None)
    arrow_parquet.write_table(built, file, row_group_size=2)
    return file


def hashes(dataset: ImageDataset) -> list[str]:
    return [dataset.content_hash(row) for row in range(len(dataset))]


def test_every_form_of_the_same_images_has_the_same_pixels_classes_and_hashes(
    folder: Path, tmp_path: Path, bucket: Any
) -> None:
    """So that a study of the shards finds what was computed from the folder."""
    expected = open_data(f"folder:{folder}")
    shards(folder, tmp_path / "shards")
    table(folder, tmp_path / "all.parquet")
    lines = [f"photos/{name}/{number}.jpg,{name}" for number, name in enumerate(NAMES)]
    written(tmp_path / "list.csv", "\n".join(["image,label", *lines]))
    for file in (path for path in tmp_path.rglob("*") if path.is_file()):
        bucket.pipe(f"/bucket/{file.relative_to(tmp_path).as_posix()}", file.read_bytes())
    places = [
        *("wds:{}/shards/{{000..001}}.tar", "wds:{}/shards/*.tar", "wds:{}/shards"),
        *("parquet:{}/all.parquet", "csv:{}/list.csv", "folder:{}/photos"),
    ]
    model = identity_model(["dog", "cat"])
    for spec in (place.format(base) for place in places for base in (tmp_path, "memory://bucket")):
        opened = open_data(spec)
        assert hashes(opened.dataset) == hashes(expected.dataset), spec
        assert len(set(opened.dataset.names)) == 5, spec
        for row in range(5):
            sample, expected_sample = (read_sample(data, row, model) for data in (opened, expected))
            assert bool((sample.pixels == expected_sample.pixels).all()), spec
            assert sample.label == expected_sample.label == (1 if NAMES[row] == "cat" else 0), spec
    assert open_data(f"wds:{tmp_path}/shards").dataset.names[0] == "s/0000.jpg"
    assert open_data("folder:memory://bucket/photos").dataset.names[0] == "cat/0.jpg"
    assert len(open_data(f"wds:{tmp_path}/shards", limit=2)) == 2


def test_shards_that_cannot_be_read(folder: Path, tmp_path: Path) -> None:
    target = shards(folder, tmp_path / "shards")
    with pytest.raises(BadInput, match=r"There is no file '.*002\.tar'"):
        open_data(f"wds:{target}/{{000..002}}.tar")
    with pytest.raises(BadInput, match=r"The range \{5\.\.3\} is empty"):
        open_data(f"wds:{target}/{{5..3}}.tar")
    (target / "000.tar.gz").write_bytes(b"x")
    with pytest.raises(BadInput, match="is compressed, so that its images cannot be read one by one"):
        open_data(f"wds:{target}/000.tar.gz")
    written(tmp_path / "text.tar", "this is no archive" * 100)
    with pytest.raises(BadInput, match="expected a plain tar file"):
        open_data(f"wds:{tmp_path}/text.tar")
    opened = open_data(f"wds:{target}/001.tar")
    content = (target / "001.tar").read_bytes()
    (target / "001.tar").write_bytes(content[:4096])  # truncated after it was indexed
    with pytest.raises(BadInput, match="ends after 4096 bytes"):
        read_sample(opened, 1)


def test_a_damaged_image_in_a_shard_is_named(folder: Path, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "one.tar", "w") as archive:
        add(archive, "a.jpg", contents(folder)[0])
        add(archive, "b.jpg", b"no picture at all")
    opened = open_data(f"wds:{tmp_path}/one.tar")
    assert not opened.dataset.has_labels
    read_sample(opened, 0)
    with pytest.raises(BadInput, match=r"'b\.jpg' is not an image, whatever its name says \(it starts with b'no pict"):
        read_sample(opened, 1)


def test_bands_of_a_tiff_in_a_shard_are_read(tmp_path: Path) -> None:
    import tifffile
    from torch import nn

    from clairvit.models.model import Model
    from clairvit.models.preprocess import Preprocess

    bands = np.random.default_rng(0).integers(0, 255, (6, 8, 5), dtype=np.uint8)
    buffer = io.BytesIO()
    tifffile.imwrite(buffer, bands)
    with tarfile.open(tmp_path / "one.tar", "w") as archive:
        add(archive, "a.tif", buffer.getvalue())
    preprocess = Preprocess(size=(6, 8), mean=(0.0,) * 5, std=(1.0,) * 5)
    pixels = read_sample(open_data(f"wds:{tmp_path}/one.tar"), 0, Model(nn.Identity(), "bands", preprocess)).pixels
    assert np.array_equal((pixels * 255).round().numpy().astype(np.uint8), np.moveaxis(bands, -1, 0))


def test_parquet_reads_row_groups_once_and_keeps_few(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads: list[int] = []
    read = arrow_parquet.ParquetFile.read_row_group

    def watched(self: Any, group: int, **options: Any) -> Any:
        loads.append(group)
        return read(self, group, **options)

    monkeypatch.setattr(arrow_parquet.ParquetFile, "read_row_group", watched)
    monkeypatch.setattr(tables, "ROW_GROUPS", 1)
    opened = open_data(f"parquet:{table(folder, tmp_path / 'x.parquet')}")
    assert loads == []
    threads = [threading.Thread(target=read_sample, args=(opened, row)) for row in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert loads == [0]
    read_sample(opened, 4)
    read_sample(opened, 0)
    assert loads == [0, 2, 0]


def test_parquet_of_hugging_face_knows_its_classes_and_paths_are_read(folder: Path, tmp_path: Path) -> None:
    features = {"info": {"features": {"label": {"names": ["dog", "cat"], "_type": "ClassLabel"}}}}
    file = table(folder, tmp_path / "x.parquet", (1, 1, 0, 0, -1), huggingface=json.dumps(features))
    opened = open_data(f"parquet:{file}")
    assert opened.classes == ("dog", "cat")
    assert [called(opened, row) for row in range(5)] == ["cat", "cat", "dog", "dog", None]
    paths = [f"photos/{name}/{number}.jpg" for number, name in enumerate(NAMES)]
    arrow_parquet.write_table(arrow.table({"path": paths}), tmp_path / "paths.parquet")
    opened = open_data(f"parquet:{tmp_path}/paths.parquet")
    assert opened.dataset.names == tuple(paths)
    assert read_sample(opened, 3).pixels.equal(read_sample(open_data(f"folder:{folder}"), 3).pixels)
    written(tmp_path / "y.parquet", "nothing")
    with pytest.raises(BadInput, match="expected a Parquet file"):
        open_data(f"parquet:{tmp_path}/y.parquet")
    arrow_parquet.write_table(arrow.table({"text": ["a"]}), tmp_path / "z.parquet")
    with pytest.raises(BadInput, match=r"The columns of .* are 'text'; expected one called image"):
        open_data(f"parquet:{tmp_path}/z.parquet")


def test_a_manifest_may_name_masks_and_urls(folder: Path, tmp_path: Path, bucket: Any) -> None:
    painted(tmp_path / "mask.png", np.where(block(1, 4, 2, 6), 255, 0))
    bucket.pipe("/bucket/1.jpg", contents(folder)[1])
    bucket.pipe("/bucket/mask.png", (tmp_path / "mask.png").read_bytes())
    text = "file\tclass\tmask\nphotos/cat/0.jpg\t7\tmask.png\nmemory://bucket/1.jpg\t3\tmemory://bucket/mask.png\n"
    opened = open_data(f"csv:{written(tmp_path / 'list.tsv', text)}")
    assert opened.dataset.has_masks
    samples = [read_sample(opened, row) for row in (0, 1)]
    assert [sample.label for sample in samples] == [7, 3], "numbers are the model's own"
    assert all(shows(sample, block(1, 4, 2, 6)) for sample in samples)
    assert len(set(hashes(opened.dataset))) == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("picture,label\na.jpg,1\n", "The columns of .* are 'picture', 'label'; expected one called image"),
        ("image\na.jpg\nb.jpg\na.jpg\n", "'a.jpg' are in .* twice"),
        ("image,label\na.jpg,1\n,2\n", "Line 3 of .* names no image"),
        ("image\n", "holds no images for csv"),
    ],
)
def test_manifests_that_cannot_be_used(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        open_data(f"csv:{written(tmp_path / 'list.csv', text)}")


def test_an_image_of_a_manifest_that_is_not_there_costs_only_itself(folder: Path, tmp_path: Path) -> None:
    manifest = written(tmp_path / "list.csv", "image\nphotos/cat/0.jpg\nphotos/gone.jpg\n")
    opened = open_data(f"csv:{manifest}")
    read_sample(opened, 0)
    with pytest.raises(BadInput, match=r"There is no image '.*gone\.jpg'"):
        read_sample(opened, 1)


def test_data_sets_of_hugging_face(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    pictures = [{"bytes": content, "path": None} for content in contents(folder)]
    features = datasets.Features({"photo": datasets.Image(), "label": datasets.ClassLabel(names=["dog", "cat"])})
    rows = {"photo": pictures, "label": [int(name == "cat") for name in NAMES]}
    data = datasets.Dataset.from_dict(rows, features=features)
    datasets.disable_progress_bars()
    data.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": data, "val": data.select([4, 0])}).save_to_disk(tmp_path / "two")
    opened = open_data(f"hfds:{tmp_path}/one")
    assert [called(opened, row) for row in range(5)] == list(NAMES)
    assert read_sample(opened, 3).pixels.equal(read_sample(open_data(f"folder:{folder}"), 3).pixels)
    assert [len(open_data(f"hfds:{tmp_path}/two:{split}")) for split in ("train", "val")] == [5, 2]
    assert open_data(f"hfds:{tmp_path}/two", split="val").dataset.names == ("two:val/0", "two:val/1")
    with pytest.raises(UnknownName, match=r"has no split 'vall'\. Did you mean 'val'\? Choose one of: train, val"):
        open_data(f"hfds:{tmp_path}/two:vall")
    with pytest.raises(UnknownName, match="has several splits"):
        open_data(f"hfds:{tmp_path}/two")
    loads: list[Any] = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *names, split: loads.append((*names, split)) or data)
    open_data("hfds:timm/mini:first:validation")
    open_data("hfds:timm/mini", split="test")
    assert loads == [("timm/mini", "first", "validation"), ("timm/mini", "test")]
    with pytest.raises(BadInput, match="names no split; expected hfds:NAME:SPLIT"):
        open_data("hfds:mini")


def test_packages_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(f"No module named '{name}'", name=name)

    monkeypatch.setattr(hugging_face.importlib, "import_module", missing)
    with pytest.raises(BadInput, match=r"needs the package datasets.*pip install datasets"):
        open_data("hfds:timm/mini:validation")
    monkeypatch.setattr(locations.importlib, "import_module", missing)
    with pytest.raises(BadInput, match=r"'s3://b/x.csv' cannot be read.*pip install fsspec"):
        open_data("csv:s3://b/x.csv")


def test_urls_that_no_format_or_package_reads() -> None:
    pytest.importorskip("fsspec")
    with pytest.raises(BadInput, match=r"from a folder of this disk.*expected a copy of it here, or folder:, csv:"):
        open_data("pets:s3://bucket/pets")
    with pytest.raises(BadInput, match="nosuch"):
        open_data("csv:nosuch://bucket/list.csv")
    with pytest.raises(BadInput, match=r"There are no images below|There is no file"):
        open_data("folder:memory://nothing/here")


def test_labels_of_any_kind() -> None:
    assert index_labels(["b", None, "a"]).indices == (1, None, 0)
    assert index_labels([3, -1, 0]).indices == (3, None, 0)
    assert index_labels([3, -1, 0]).classes == ("0", "1", "2", "3")
    assert index_labels(["3", "1"]).indices == (3, 1), "a text of digits is a number"
    wordnet = list(class_indices())[5:7]
    assert index_labels(wordnet).indices == (5, 6)
    assert index_labels(wordnet).numbering == "imagenet"
    assert index_labels([1, 2], class_names()).numbering == "imagenet"
    assert index_labels([1, 2], class_names()[::-1]).numbering == "own"
    assert not index_labels([None, None]).has_labels
