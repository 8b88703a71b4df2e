"""JSON without NaN, and files that are written whole or not at all."""

from __future__ import annotations

import csv
import io
import json
import math
from datetime import date
from pathlib import Path

import pytest

from clairvit._io import (
    atomic_write,
    csv_text,
    decoded,
    dumps_json,
    parse_json,
    printable,
    to_json,
    write_json,
    write_text,
)
from clairvit.errors import BadInput


def test_numbers_that_are_not_finite_become_null_at_any_depth() -> None:
    content = {"a": [1.5, math.nan, (math.inf, {"b": -math.inf})], 2: True, "c": None}
    assert to_json(content) == {"a": [1.5, None, [None, {"b": None}]], "2": True, "c": None}
    assert json.loads(dumps_json(content)) == to_json(content)


def test_json_keeps_letters_and_refuses_unknown_types_without_a_converter() -> None:
    assert dumps_json({"name": "Käfer"}, indent=None) == '{"name": "Käfer"}'
    with pytest.raises(TypeError):
        dumps_json({"day": date(2026, 1, 2)})
    assert dumps_json({"day": date(2026, 1, 2)}, indent=None, default=str) == '{"day": "2026-01-02"}'


# file name as Python has it -> as it is shown
NAMES = {
    "plain é 猫.png": "plain é 猫.png",
    "bad\udcff.png": "bad\\xff.png",
    "caf\udcc3\udca9.png": "café.png",  # UTF-8, in a C locale
    "lone\ud800.png": "lone\\ud800.png",
    "title\x1b]0;x\x07.png": "title\\x1b]0;x\\x07.png",
    "csi\x9b2J\x7f\r.png": "csi\\x9b2J\\x7f\\x0d.png",
    "turned\u202egnp.exe": "turned\\u202egnp.exe",
}


@pytest.mark.parametrize("name", NAMES)
def test_any_name_is_printable_and_json_gives_it_back(name: str, tmp_path: Path) -> None:
    assert printable(name) == NAMES[name]
    assert printable(printable(name)) == printable(name)
    for ascii_only in (False, True):
        text = dumps_json({"name": name}, ascii_only=ascii_only)
        assert json.loads(text) == {"name": name}
        assert printable(text) == text
        assert text.isascii() or not ascii_only
    assert json.loads(write_json([name], tmp_path / "a.json").read_text(encoding="utf-8")) == [name]
    assert write_text(name, tmp_path / "a.txt").read_bytes().decode() == decoded(name)


@pytest.mark.parametrize(
    ("value", "cell"),
    [
        ("=cmd|' /C calc'!A0", "'=cmd|' /C calc'!A0"),
        ("+1+1", "'+1+1"),
        ("-2+3", "'-2+3"),
        ("@SUM(A1)", "'@SUM(A1)"),
        ("\t=1", "'\t=1"),
        ("-0.5", "-0.5"),
        ("+1e-3", "+1e-3"),
        (-0.5, "-0.5"),
        (-3, "-3"),
        (None, ""),
        ("a=b", "a=b"),
        ("bad\udcff\x1b.png", "bad\\xff\\x1b.png"),
    ],
)
def test_cells_of_csv_are_no_formulas_and_numbers_stay_numbers(value: object, cell: str) -> None:
    (row,) = csv.reader(io.StringIO(csv_text([["image", value]])))
    assert row == ["image", cell]


@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_json_that_is_nested_deep_is_a_value_error(opening: str) -> None:
    assert parse_json('{"a": [1]}') == {"a": [1]}
    for depth in (3_000, 200_000):
        with pytest.raises(ValueError, match=r"nested too deep|Expecting"):
            parse_json(opening * depth)


def test_a_failed_write_leaves_the_previous_file_and_no_temporary_one(tmp_path: Path) -> None:
    file = write_json({"x": math.nan}, tmp_path / "new" / "a.json")
    assert file.read_text(encoding="utf-8") == '{\n "x": null\n}\n'
    with pytest.raises(TypeError):
        atomic_write(file, b"half", "text")  # type: ignore[arg-type]
    assert [path.name for path in file.parent.iterdir()] == ["a.json"]
    assert file.read_text(encoding="utf-8") == '{\n "x": null\n}\n'
    with pytest.raises(BadInput, match="choose a place you may write to"):
        atomic_write(file / "below.json", b"")
