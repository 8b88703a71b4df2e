"""Prompts and a second photo over HTTP: the library's maps and clear refusals."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient
from PIL import Image

import clairvit as cv
from clairvit.models.image_files import read_image
from clairvit.web.app import create_app
from clairvit.web.state import create_state
from helpers.app_lifespan import unclosed
from helpers.rounding import assert_same
from helpers.tiny_models import fresh
from helpers.tiny_pairs import save_clip

SENT = 1.0  # numbers are sent as float32: rounded once


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> cv.Model:
    folder: Path = tmp_path_factory.mktemp("clip")
    return cv.load(f"hf:{save_clip(folder)}", dtype="float64")


@pytest.fixture(scope="module")
def client(clip: cv.Model) -> Iterator[TestClient]:
    state = create_state([clip, fresh("timm-vit")], time_limit=300)
    with TestClient(
        create_app(unclosed(state)), base_url="http://127.0.0.1", raise_server_exceptions=False
    ) as test_client:
        yield test_client
    state.close()


def array(numbers: dict[str, Any]) -> np.ndarray:
    return np.frombuffer(base64.b64decode(numbers["float32"]), "<f4").reshape(numbers["shape"]).copy()


def flipped() -> Image.Image:
    return read_image("demo").transpose(Image.Transpose.FLIP_LEFT_RIGHT)


def png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def test_prompts(client: TestClient, clip: cv.Model) -> None:
    cards = client.get("/api/models").json()["models"]
    assert [card["reads_prompts"] for card in cards] == [True, False]
    prompts = ["a red car", "the dog"]
    reply = client.post("/api/explain", data={"method": "ixg", "text": prompts}).json()
    expected = cv.explain(clip, "demo", "ixg", targets=[cv.Text(prompt) for prompt in prompts])
    assert reply["targets"] == prompts
    assert_same(reply["target_scores"], expected.target_scores)
    assert reply["explanations"][0]["score"] == "difference of cosines"
    assert_same(array(reply["explanations"][0]["maps"]), expected.maps.float().numpy(), growth=SENT)
    other = client.post("/api/explain", data={"method": "ixg", "text": "a cat"}).json()
    assert other["targets"] == ["a cat"]  # not the cached answer of another prompt
    for path in ("curve", "check"):
        answer = client.post(f"/api/{path}", json={"method": "ixg", "text": "a red car"})
        assert answer.status_code == 200, answer.text
        assert answer.json()["target"] == "a red car"


def test_a_second_photo(client: TestClient, clip: cv.Model) -> None:
    sent = {"other": ("cat.png", png(flipped()), "image/png")}
    reply = client.post("/api/explain", data={"method": "ixg"}, files=sent).json()
    expected = cv.explain(clip, "demo", "ixg", target=cv.Similar(flipped()))
    assert reply["targets"] == ["similar to the other photo"]
    assert_same(array(reply["explanations"][0]["maps"]), expected.maps.float().numpy(), growth=SENT)
    again = client.post("/api/explain", data={"method": "ixg", "similar_to": reply["other"]}).json()
    assert again["explanations"][0]["maps"] == reply["explanations"][0]["maps"]
    back = client.post("/api/explain", data={"method": "ixg", "photo": reply["other"], "similar_to": "demo"}).json()
    assert_same(back["target_scores"], reply["target_scores"])


@pytest.mark.parametrize(
    ("fields", "status", "message"),
    [
        ({"text": " "}, 422, "An empty prompt was given"),
        ({"text": "a cat", "model": "timm-vit"}, 422, "timm-vit has no text tower"),
        ({"similar_to": "0" * 32}, 404, "photo"),
    ],
)
def test_refusals(client: TestClient, fields: dict[str, str], status: int, message: str) -> None:
    reply = client.post("/api/explain", data={"method": "ixg", **fields})
    assert reply.status_code == status
    assert message in reply.json()["message"]


def test_an_unreadable_second_photo(client: TestClient) -> None:
    reply = client.post("/api/explain", data={"method": "ixg"}, files={"other": ("a.png", b"no picture", "image/png")})
    assert reply.status_code == 415
    assert reply.json()["kind"] == "bad-photo"
