"""Hubs that cannot be reached: one sentence, no logging, no waiting."""

from __future__ import annotations

import logging
import os
import socket
import sys

import pytest

import clairvit as cv
from clairvit.errors import ModelUnavailable
from clairvit.models.sources import hub


@pytest.mark.parametrize(
    "name",
    [
        "timm:vit_tiny_patch16_224",
        "torchvision:vit_b_16",
        "hf:google/vit-base-patch16-224",
        "open_clip:ViT-B-32:openai",
        "open_clip:hf-hub:timm/ViT-B-16-SigLIP",
    ],
)
def test_an_unreachable_hub_raises_one_sentence_without_logging(
    name: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing is waited for: no connection is tried."""
    connections: list[object] = []
    monkeypatch.setattr(socket.socket, "connect", lambda _, address: connections.append(address))
    root = logging.getLogger()
    handlers = list(root.handlers)
    with pytest.raises(ModelUnavailable) as caught:
        cv.load(name)
    message = str(caught.value)
    assert message.startswith(f"The weights of '{name}' could not be downloaded (")
    assert "cannot be reached: " in message
    for way_out in ("'pets'", "file:PATH.safetensors", "pretrained=False"):
        assert way_out in message
    assert "\n" not in message
    assert connections == []
    assert capfd.readouterr() == ("", "")
    assert root.handlers == handlers
    assert not root.filters


def test_hub_probe_and_switches(monkeypatch: pytest.MonkeyPatch) -> None:

    from huggingface_hub import constants

    assert hub.hub_blocked() == f"{constants.ENDPOINT.removeprefix('https://')} cannot be reached: " + hub.first_line(
        f"Cannot reach {constants.ENDPOINT}: offline mode is enabled. To disable it …"
    )
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.delenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", raising=False)
    with hub.fetching("x", "no hub"):
        assert constants.HF_HUB_OFFLINE
        assert os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] == "1"
    assert not constants.HF_HUB_OFFLINE
    assert "TORCH_FORCE_WEIGHTS_ONLY_LOAD" not in os.environ
    with pytest.raises(ModelUnavailable, match=r"'x' could not be loaded \(KeyError"), hub.fetching("x"):
        raise KeyError("y")


def test_random_weights_of_a_hub_id_need_its_configuration() -> None:
    pytest.importorskip("transformers")
    with pytest.raises(
        ModelUnavailable, match=r"The configuration of 'hf:a/b' could not .*'hf:vit' with pretrained=False"
    ):
        cv.load("hf:a/b", pretrained=False)


def test_missing_extras_are_named(monkeypatch: pytest.MonkeyPatch) -> None:

    for library, extra, name in (("transformers", "hf", "hf:a/b"), ("open_clip", "clip", "open_clip:ViT-B-32:openai")):
        monkeypatch.setitem(sys.modules, library, None)
        with pytest.raises(ModelUnavailable, match=rf'needs the package {library}.*pip install "clairvit\[{extra}\]"'):
            cv.load(name)
