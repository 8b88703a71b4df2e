"""No test of this folder asks a hub."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without a network, wherever the tests run, and without waiting for a name server."""

    def refuse(*_: object, **__: object) -> None:
        raise ConnectionError("no network in tests")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("urllib.request.urlopen", refuse)
    monkeypatch.setattr("torch.hub.load_state_dict_from_url", refuse)


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A developer's own downloads must not decide a test."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("torch.hub.get_dir", lambda: str(tmp_path / "torch"))
