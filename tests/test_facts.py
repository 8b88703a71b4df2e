"""Files of facts: what they may hold, what is refused, and that every module that registers has one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import clairvit as cv
from clairvit._facts import LAST, Facts, facts_of, package_facts, read_facts
from clairvit.citations import references
from clairvit.errors import BadInput
from clairvit.methods.registry import METHODS
from clairvit.metrics.registry import METRICS

SOURCE = Path(cv.__file__).parent
PACKAGES = {"methods": METHODS, "metrics": METRICS}
REGISTERS = re.compile(r"^@?(method|metric|named_variant|_\w+_metric)\(|^    named_variant\(|^@wraps\(", re.MULTILINE)
FILE = """
position = 5

[texts]
shared = "Shared by two."

[one]
title = "One"
references = ["doe2026one"]
discrepancies = ["shared", "One more."]
as_written = ["shared", "its own reason"]

["one+plus"]
sentence = "A combination."

[references.doe2026one]
type = "misc"
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "mine.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_file_of_facts(tmp_path: Path) -> None:
    file = read_facts(written(tmp_path, FILE))
    assert file.position == 5
    assert set(file.entries) == {"one", "one+plus"}
    assert file.entries["one"] == Facts(
        title="One",
        references=("doe2026one",),
        discrepancies="Shared by two. One more.",
        as_written="Shared by two.; its own reason",
    )
    assert file.references == {"doe2026one": {"type": "misc"}}
    assert read_facts(tmp_path / "none.toml").entries == {}
    assert read_facts(written(tmp_path, "")).position == LAST


def test_texts_of_the_folder_are_shared_and_those_of_the_file_win(tmp_path: Path) -> None:
    (tmp_path / "texts.toml").write_text('a = "of the folder"\nb = "of all"', encoding="utf-8")
    path = written(tmp_path, '[texts]\na = "of the file"\n[one]\nas_written = ["a", "b"]')
    assert read_facts(path).entries["one"].as_written == "of the file; of all"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '[one]\nsentense = "x"',
            r"'sentense' is no key of 'one' in .*mine\.toml'; expected .*Did you mean 'sentence'",
        ),
        ("[one]\ntitle = 3", "'title' of 'one' in .* is 3; expected a text"),
        ('[one]\nalso = "x"', "'also' of 'one' in .* is 'x'; expected a list of texts"),
        ('[texts]\nsums = "x y"\n[one]\nas_written = ["sum"]', r"names the text 'sum'; expected .*Did you mean 'sums'"),
        ("one = 3", "'one' in .* is 3; expected a table of facts"),
        ("[one", "cannot be read .*; expected a TOML file in UTF-8"),
    ],
)
def test_what_is_no_fact_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        read_facts(written(tmp_path, text))


def test_a_file_beside_a_script_is_read_for_its_methods_only(tmp_path: Path) -> None:
    """study.toml may lie beside study.py: its tables are none of our business."""
    path = written(tmp_path, '[data]\nspec = "folder:photos"\n[one]\ntitle = "One"')
    assert set(read_facts(path, ["one"]).entries) == {"one"}
    assert read_facts(path, ["another"]).entries == {}


@pytest.mark.parametrize("package", PACKAGES)
def test_every_module_that_registers_has_a_file_of_facts(package: str) -> None:
    """A registry finds modules by these files: a method without one would not be there."""
    for path in sorted((SOURCE / package).glob("*.py")):
        if path.name != "registry.py" and REGISTERS.search(path.read_text(encoding="utf-8")):
            assert path.with_suffix(".toml").exists(), f"write {path.stem}.toml beside {path.name}"


@pytest.mark.parametrize("package", PACKAGES)
def test_every_file_of_facts_is_of_a_module_and_every_name_stands_once(package: str) -> None:
    files = package_facts(f"clairvit.{package}")
    others = {"texts.toml", "recommendations.toml"}
    assert {f"{module.rpartition('.')[2]}.toml" for module in files} == {
        path.name for path in (SOURCE / package).glob("*.toml")
    } - others
    names = [name for file in files.values() for name in file.entries]
    assert len(names) == len(set(names))
    for name in PACKAGES[package]:
        module = PACKAGES[package].resolve(name).function.__module__
        assert PACKAGES[package].resolve(name).facts == facts_of(name, module) != Facts()


def test_an_entry_of_bibtex_stands_once() -> None:
    shared = set(re.findall(r"^\[(\w+)\]", (SOURCE / "references.toml").read_text(encoding="utf-8"), re.MULTILINE))
    files = [*package_facts("clairvit.methods").values(), *package_facts("clairvit.metrics").values()]
    keys = [*shared, *(key for file in files for key in file.references)]
    assert len(keys) == len(set(keys))
    assert set(keys) == set(references())


def test_the_order_of_lists_is_that_of_positions() -> None:
    for package in PACKAGES:
        positions = [file.position for file in package_facts(f"clairvit.{package}").values()]
        assert positions == sorted(positions)
    modules = list(package_facts("clairvit.methods"))
    listed = [METHODS.resolve(name).function.__module__ for name in cv.list_methods()]
    assert listed == sorted(listed, key=modules.index)
