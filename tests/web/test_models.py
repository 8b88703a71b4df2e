"""Every kind of model can be served: other grids, registers, windows, CNNs, embeddings, no class names."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from fastapi.testclient import TestClient

import clairvit as cv
from clairvit.errors import BadInput
from clairvit.web.app import create_app
from clairvit.web.state import create_state
from helpers.tiny_models import STRANGE, cnn, fresh, strange

pytestmark = pytest.mark.filterwarnings("default::clairvit.errors.ClairWarning")
KINDS: dict[str, tuple[Callable[[], cv.Model], bool]] = {  # model, and does it attend between all tokens?
    "nonsquare": (lambda: fresh("timm-vit-nonsquare"), True),
    "registers": (lambda: fresh("timm-dinov2-reg4"), True),
    "mean": (lambda: fresh("home-mean-pool"), True),
    "window": (lambda: cv.wrap(strange(STRANGE["swin"].make), name="swin", size=(32, 32)), False),
    "cnn": (lambda: cv.wrap(strange(cnn), name="cnn", size=(32, 32)), False),
    "embedding": (lambda: fresh("open_clip-tower"), True),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_fits_is_shown_and_what_does_not_is_explained(kind: str) -> None:
    make, attends = KINDS[kind]
    model = make()
    with TestClient(create_app(create_state([model])), base_url="http://127.0.0.1") as client:
        (card,) = client.get("/api/models").json()["models"]
        assert (card["heads"] > 0) == attends
        assert bool(card["labels"]) == model.classifier
        first = client.post("/api/explain", data={"layers": "true", "picture": "true"})
        assert first.status_code == 200, f"the page of this model would be dead: {first.text}"
        assert first.json()["explanations"][0]["method"] == card["default_method"]
        for method in ("rollout", "gradcam", "ixg"):
            response = client.post("/api/explain", data={"method": method, "layers": "true", "picture": "true"})
            assert response.status_code in (200, 422), response.text
            if response.status_code == 200:
                assert len(response.json()["top"]) == (min(5, len(card["labels"])))
        looked = client.get("/api/trace/0")
        assert looked.status_code == (200 if attends else 422), looked.text
        curve = client.post("/api/curve", json={"method": "gradcam" if model.classifier else "rollout", "steps": 2})
        assert curve.status_code == (200 if model.classifier else 422), curve.text


def test_several_models_are_served_by_name() -> None:
    models = [fresh("timm-vit"), fresh("timm-vit-nonsquare")]
    with TestClient(create_app(create_state(models)), base_url="http://127.0.0.1") as client:
        reply = client.post("/api/explain", data={"model": "timm-vit-nonsquare", "method": "rollout"}).json()
        assert reply["explanations"][0]["maps"]["shape"] == [1, 3, 5]
        assert reply["size"] == [24, 40]
        assert "timm-vit" in client.post("/api/explain", data={"model": "timm-vti"}).json()["message"]


def test_no_model_and_the_same_model_twice_are_refused() -> None:
    with pytest.raises(BadInput, match="at least one"):
        create_state([])
    with pytest.raises(BadInput, match="the same name"):
        create_state([fresh("timm-vit"), fresh("timm-vit")])
