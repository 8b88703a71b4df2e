"""Commands of one process share the models that come with the package: loading and inspecting one costs seconds."""

from __future__ import annotations

from typing import Any

import pytest

import clairvit as cv

BUILT_IN = ("pets", "scenes", "parts")
loaded: dict[str, cv.Model] = {}  # by what was asked for; explaining a model leaves it bit-identical


@pytest.fixture(autouse=True)
def _built_in_models_are_loaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    load = cv.load

    def load_once(name: str, **options: Any) -> cv.Model:
        if name not in BUILT_IN:
            return load(name, **options)
        usual = {"pretrained": True}
        key = f"{name} {sorted((k, str(v)) for k, v in options.items() if v is not None and usual.get(k) != v)}"
        if key not in loaded:
            loaded[key] = load(name, **options)
        return loaded[key]

    monkeypatch.setattr(cv, "load", load_once)
