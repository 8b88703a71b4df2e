"""JSON without NaN, and files that are written whole or not at all."""

from __future__ import annotations

import json
import math
from datetime import date
from pathlib import Path

import pytest

from clairvit._io import atomic_write, dumps_json, to_json, write_json
from clairvit.errors import BadInput


def test_numbers_that_are_not_finite_become_null_at_any_depth() -> None:
    content = {"a": [1.5, math.nan, (math.inf, {"b": -math.inf})], 2: True, "c": None}
    assert to_json(content) == {"a": [1.5, None, [None, {"b": None}]], "2": True, "c": None}
    assert json.loads(dumps_json(content)) == to_json(content)


def test_json_keeps_letters_and_refuses_unknown_types_unless_told_how_to_convert_them() -> None:
    assert dumps_json({"name": "Käfer"}, indent=None) == '{"name": "Käfer"}'
    with pytest.raises(TypeError):
        dumps_json({"day": date(2026, 1, 2)})
    assert dumps_json({"day": date(2026, 1, 2)}, indent=None, default=str) == '{"day": "2026-01-02"}'


def test_a_failed_write_leaves_the_previous_file_and_no_temporary_one(tmp_path: Path) -> None:
    file = write_json({"x": math.nan}, tmp_path / "new" / "a.json")
    assert file.read_text(encoding="utf-8") == '{\n "x": null\n}\n'
    with pytest.raises(TypeError):
        atomic_write(file, b"half", "text")  # type: ignore[arg-type]
    assert [one.name for one in file.parent.iterdir()] == ["a.json"]
    assert file.read_text(encoding="utf-8") == '{\n "x": null\n}\n'
    with pytest.raises(BadInput, match="choose a place you may write to"):
        atomic_write(file / "below.json", b"")
