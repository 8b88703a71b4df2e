"""open_data: names, splits, samples, hashes, downloads and errors, for every format."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torchvision
from PIL import Image

from clairvit.data.dataset import iter_batches
from clairvit.data.formats import registry
from clairvit.data.formats.entry import DatasetIndex, labelled_entry, list_files
from clairvit.data.formats.registry import DataRequest
from clairvit.data.open import list_datasets, open_data, stratified_sample
from clairvit.errors import BadInput, UnknownName
from helpers.small_datasets import block, called, identity_model, painted, photo, read_sample, shows, written

BREEDS = ("Abyssinian", "american_bulldog", "pug")


@pytest.fixture
def pets(tmp_path: Path) -> Path:
    """Three breeds with 4, 4 and 12 photos; each has its own trimap."""
    root, lines = tmp_path / "oxford-iiit-pet", ["#Image CLASS-ID SPECIES BREED ID"]
    for label, (breed, count) in enumerate(zip(BREEDS, (4, 4, 12), strict=True)):
        for number in range(count):
            name = f"{breed}_{number}"
            photo(root / "images" / f"{name}.jpg", seed=100 * label + number)
            trimap = np.where(block(1, 4, 2, 6), 1, 2)
            trimap[1, 2:6] = 3
            painted(root / "annotations" / "trimaps" / f"{name}.png", trimap)
            lines.append(f"{name} {label + 1} 1 1")
    written(root / "annotations" / "test.txt", "\n".join(lines[1:]) + "\n")
    written(root / "annotations" / "trainval.txt", "\n".join([lines[0], *lines[3:5]]))
    return root


def test_pets_are_what_torchvision_reads(pets: Path) -> None:
    """Names, order, classes and masks against torchvision's own class on the same folder."""
    data = open_data(f"pets:{pets}")
    theirs = torchvision.datasets.OxfordIIITPet(pets.parent, split="test", target_types=["category", "segmentation"])
    assert list(data.classes) == theirs.classes == ["Abyssinian", "American Bulldog", "Pug"]
    assert (data.name, data.title, data.split, data.total) == ("pets", "Oxford-IIIT Pet", "test", 20)
    assert len(data) == len(theirs) == 20
    assert (data.dataset.has_masks, data.dataset.has_labels, data.dataset.has_others) == (True, True, False)
    assert data.dataset.names[4] == "images/american_bulldog_0.jpg"
    for row in range(20):
        sample, (_, (label, trimap)) = read_sample(data, row), theirs[row]
        assert sample.label == label
        assert shows(sample, np.asarray(trimap) == 1, np.asarray(trimap) == 3)
    assert shows(read_sample(data, 0), block(2, 4, 2, 6), block(1, 2, 2, 6))
    assert open_data(f"pets:{pets.parent}").dataset.names == data.dataset.names, "the folder around it will do"


def test_a_mask_may_be_of_another_size(pets: Path) -> None:
    trimap = np.full((3, 4), 2)
    trimap[1, 1:3], trimap[0] = 1, 3
    painted(pets / "annotations" / "trimaps" / "Abyssinian_0.png", trimap)
    assert shows(read_sample(open_data(f"pets:{pets}"), 0), block(2, 4, 2, 6), block(0, 2, 0, 8))


def test_splits_are_checked(pets: Path) -> None:
    data = open_data(f"pets:{pets}", split="trainval")
    assert data.split == "trainval"
    assert data.dataset.names == ("images/Abyssinian_2.jpg", "images/Abyssinian_3.jpg")
    with pytest.raises(
        UnknownName, match=r"has no split 'trainvall'. Did you mean 'trainval'\? Choose one of: test, t"
    ):
        open_data(f"pets:{pets}", split="trainvall")


def test_images_are_read_lazily(pets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    kept = Image.open
    monkeypatch.setattr(Image, "open", lambda path, **how: opened.append(Path(path).name) or kept(path, **how))
    data = open_data(f"pets:{pets}", limit=10)
    assert opened == []
    read_sample(data, 3)
    name = Path(data.dataset.names[3]).stem
    assert opened == [f"{name}.jpg", f"{name}.png"]


def test_classes_are_mapped_to_the_models_index_or_none(pets: Path) -> None:
    """By whole names and synonyms, whatever the case; a beginning is not enough; without names by number."""
    data = open_data(f"pets:{pets}")
    named = identity_model(["Puget sound", "PUG, pug-dog", "abyssinian"])
    assert [read_sample(data, row, named).label for row in (0, 4, 8)] == [2, None, 1]
    assert data.unknown_classes(named) == ("American Bulldog",)
    assert [read_sample(data, row).label for row in (0, 4, 8)] == [0, 1, 2]
    assert data.unknown_classes(identity_model()) == ()
    assert read_sample(data, 8, identity_model(["pug", "pug, small"])).label == 0, "the whole name first"
    assert read_sample(data, 8, identity_model(["a, pug", "b, pug"])).label is None, "two of them"


def test_a_sample_has_every_class_and_keeps_the_order(pets: Path) -> None:
    every = open_data(f"pets:{pets}").dataset.names
    for seed in range(5):
        some = open_data(f"pets:{pets}", limit=5, seed=seed)
        assert some.total == 20
        kinds = Counter(name.rsplit("_", 1)[0] for name in some.dataset.names)
        assert sorted(kinds.values()) == [1, 1, 3]
        assert sorted(some.dataset.names, key=every.index) == list(some.dataset.names)
        assert open_data(f"pets:{pets}", limit=5, seed=seed).dataset.names == some.dataset.names
    assert len({open_data(f"pets:{pets}", limit=5, seed=seed).dataset.names for seed in range(5)}) > 1
    assert (
        open_data(f"pets:{pets}", limit=20).dataset.names == open_data(f"pets:{pets}", limit=99).dataset.names == every
    )
    with pytest.raises(BadInput, match="limit=0 was given; expected the number of images"):
        open_data(f"pets:{pets}", limit=0)


def test_every_image_is_sampled_equally_often() -> None:
    """Over many seeds: 3 of 10, uneven classes and one without."""
    groups = [0] * 6 + [1] * 3 + [None]
    drawn = np.zeros(10)
    for seed in range(4000):
        rows = stratified_sample(groups, 3, seed)
        assert len(set(rows)) == 3
        assert sum(row < 6 for row in rows) in (1, 2)
        drawn[rows] += 1
    assert np.abs(drawn / 4000 - 0.3).max() < 4 * (0.3 * 0.7 / 4000) ** 0.5


def test_the_hash_depends_on_image_mask_and_class(pets: Path) -> None:
    def marks() -> list[str]:
        data = open_data(f"pets:{pets}")
        return [data.dataset.content_hash(row) for row in range(len(data))]

    before = marks()
    assert len(set(before)) == 20
    assert before == marks()
    assert open_data(f"pets:{pets}", limit=5).dataset.content_hash(0) in before, "the row does not matter"
    image, trimap = pets / "images" / "pug_0.jpg", pets / "annotations" / "trimaps" / "pug_1.png"
    image.write_bytes(image.read_bytes() + b" ")
    painted(trimap, np.where(block(0, 1, 0, 1), 1, 2))
    after = marks()
    assert [row for row in range(20) if before[row] != after[row]] == [8, 9]
    trimap.unlink()
    assert marks()[9] not in (before[9], after[9])
    image.unlink()
    with pytest.raises(BadInput, match="There is no image"):
        open_data(f"pets:{pets}").dataset.content_hash(8)


def test_an_unreadable_image_does_not_stop_the_others(pets: Path) -> None:
    (pets / "images" / "pug_0.jpg").write_text("meow")
    (pets / "images" / "pug_1.jpg").unlink()
    (pets / "annotations" / "trimaps" / "pug_2.png").unlink()
    painted(pets / "annotations" / "trimaps" / "pug_3.png", np.ones((8, 6)))
    errors: dict[str, str] = {}
    data = open_data(f"pets:{pets}")
    parts = list(
        iter_batches(
            data.dataset, identity_model(), 50, lambda name, error: errors.update({Path(name).stem: str(error)})
        )
    )
    assert len(parts[0].rows) == 17
    assert parts[0].unmasked == ("images/pug_2.jpg",)
    assert "is not an image" in errors["pug_0"]
    assert "There is no image" in errors["pug_1"]
    assert "is 6 × 8 pixels and its image 8 × 6" in errors["pug_3"]


def test_a_wrong_folder_raises_with_the_expected_layout(pets: Path, tmp_path: Path) -> None:
    (pets / "annotations" / "test.txt").unlink()
    with pytest.raises(BadInput) as raised:
        open_data(f"pets:{pets.parent}")
    text = str(raised.value)
    assert f"'{pets}' does not look like Oxford-IIIT Pet: 'annotations/test.txt' is missing. Expected:\n" in text
    assert f"  {pets.parent}/\n    images/\n      Abyssinian_1.jpg …\n    annotations/\n" in text
    assert text.endswith("Give that folder as pets:PATH, or let it be downloaded there (download=True).")
    shutil.rmtree(pets / "images")
    with pytest.raises(BadInput, match="'images' is missing"):
        open_data(f"pets:{pets}")
    with pytest.raises(BadInput, match=r"There is no folder '.*nowhere', so no Oxford-IIIT Pet in it. Expected:"):
        open_data(f"pets:{tmp_path}/nowhere")


def test_broken_lists_raise_bad_input(pets: Path) -> None:
    listed = pets / "annotations" / "test.txt"
    written(listed, "pug_0 0 1 1\n")
    with pytest.raises(BadInput, match="has the line 'pug_0 0 1 1'; expected a name and three numbers from 1 on"):
        open_data(f"pets:{pets}")
    written(listed, "\n")
    with pytest.raises(BadInput, match="holds no images for pets, split test"):
        open_data(f"pets:{pets}")
    listed.write_bytes(b"\xff\xfe")
    with pytest.raises(BadInput, match="cannot be read"):
        open_data(f"pets:{pets}")
    written(listed, "pug_0 3 1 1\n")
    assert open_data(f"pets:{pets}").classes == ("class 0", "class 1", "Pug"), "numbers are the data set's"
    assert called(open_data(f"pets:{pets}"), 0) == "Pug"


def test_names_are_checked(tmp_path: Path) -> None:
    with pytest.raises(
        UnknownName, match=r"no data set 'pest'. Did you mean 'pets'\? Type NAME:PATH, with one of: fol"
    ):
        open_data(f"pest:{tmp_path}")
    with pytest.raises(UnknownName, match=rf"For a folder of images type folder:{tmp_path}"):
        open_data(str(tmp_path))
    with pytest.raises(BadInput, match=r"'coco' does not say where the data is; type coco:PATH. Expected:\n  PATH/\n"):
        open_data("coco")
    with pytest.raises(BadInput, match="which has its own; expected it with folder:PATH only"):
        open_data(f"pets:{tmp_path}", masks=tmp_path)
    with pytest.raises(BadInput, match="mask_kind='coco' was given"):
        open_data(f"pets:{tmp_path}", mask_kind="coco")


def test_datasets_lists_all_formats() -> None:
    listed = {data.name: data for data in list_datasets()}
    assert list(listed) == [
        *("folder", "pets", "flowers", "caltech101", "voc", "voc-class", "dogs", "indoor67", "mura"),
        *("imagenet", "imagenet-s", "imagenet-seg", "coco", "csv", "parquet", "wds", "hfds"),
    ]
    assert [data.name for data in list_datasets() if data.download] == [
        "pets",
        "flowers",
        "caltech101",
        "voc",
        "voc-class",
    ]
    assert all(data.download or data.why_no_download for data in list_datasets())
    assert {word for data in list_datasets() for word in data.has} == {"masks", "labels", "boxes", "others"}
    assert listed["dogs"].has == ("boxes", "labels")
    for data in list_datasets():
        lines = data.layout().splitlines()
        assert max(map(len, lines)) < 100
        if data.accepts == "location":
            assert data.required_paths == ()
            continue
        assert lines[0] == "  PATH/"
        assert all(line.startswith("    ") for line in lines[1:])
        for need in data.required_paths:  # what is asked for is in the picture
            shown = need.format(split=data.splits[0], Split=data.splits[0].title()).split("|")[0].split("/")[-1]
            assert shown in data.layout()


def test_a_format_is_registered_by_a_decorator(tmp_path: Path) -> None:
    photo(tmp_path / "cats" / "tom.png")
    with registry.FORMATS.restored():

        @registry.dataset_format("cats", "Cats", has=("labels",), tree="cats/\n  tom.png …", required_paths=("cats",))
        def cats(request: DataRequest) -> DatasetIndex:
            images = list_files(request.root / "cats", ".png")
            return DatasetIndex(tuple(labelled_entry(request.root, image, 0, None) for image in images), ("cat",))

        assert [data.name for data in list_datasets()][-2:] == ["hfds", "cats"]
        data = open_data(f"cats:{tmp_path}")
        assert (data.dataset.names, called(data, 0)) == (("cats/tom.png",), "cat")
        assert cats(DataRequest(tmp_path, "all")).classes == ("cat",), "the function stays a function"
    assert "cats" not in registry.FORMATS


def test_an_existing_dataset_is_not_downloaded(pets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def arrives(root: Path, **_: object) -> None:
        assert not (root / "oxford-iiit-pet").exists(), "asked although it is there"
        shutil.copytree(pets, root / "oxford-iiit-pet")

    monkeypatch.setattr(torchvision.datasets, "OxfordIIITPet", arrives)
    assert len(open_data(f"pets:{pets}", download=True)) == 20
    assert len(open_data(f"pets:{tmp_path}/new", download=True)) == 20
    assert len(open_data(f"pets:{tmp_path}/new", download=True)) == 20


def test_the_docs_show_every_data_set() -> None:
    text = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
    for data in list_datasets():
        download = "yes" if data.download else "no"
        splits = ", ".join(data.splits) or "its own"
        line = f"| `{data.name}` | {data.title} | {', '.join(data.has)} | {splits} | {download} |"
        assert line in text
        assert f"```\n{data.layout()}\n```" in text
