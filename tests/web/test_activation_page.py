"""The page of a model without probabilities: scores in the lists, normalised curves, no percent sign for either."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient
from torch import Tensor, nn

import clairvit as cv
from clairvit.web.app import create_app
from clairvit.web.state import AppState, create_state
from helpers.app_lifespan import unclosed
from helpers.browser_tab import WAIT, animation_ended, browser, needs_a_browser, sync_api
from helpers.web_server import serving

__all__ = ["browser"]  # a fixture
pytestmark = needs_a_browser


class Age(nn.Module):
    """A regression on the built-in model: its first class score, moved to 37."""

    def __init__(self) -> None:
        super().__init__()
        self.net = cv.load("pets").module
        self.num_classes = 1

    def forward(self, pixels: Tensor) -> Tensor:
        scores: Tensor = self.net(pixels)
        return scores[:, 11:12] + 30


@pytest.fixture(scope="module")
def age_state() -> Iterator[AppState]:
    new_state = create_state([cv.wrap(Age(), name="age", size=224, labels=["age"])], time_limit=300)
    yield new_state
    new_state.close()


def test_the_web_page_gets_scores_without_probabilities(age_state: AppState) -> None:
    with TestClient(create_app(unclosed(age_state)), base_url="http://127.0.0.1") as client:
        assert client.get("/api/models").json()["models"][0]["activation"] == "raw"
        reply = client.post("/api/explain", data={"method": "legrad"}).json()
        assert reply["activation"] == "raw"
        assert reply["probabilities"] == [None]
        assert reply["top"][0]["probability"] is None
        assert reply["top"][0]["score"] == reply["class_scores"][0] > 30
        curve = client.post("/api/curve", json={"method": "legrad", "steps": 3}).json()
        assert curve["meaning"] == "normalised score"
        assert curve["deletion"]["method"]["mean"][0] == pytest.approx(1)
        assert curve["deletion"]["method"]["mean"][-1] == pytest.approx(0, abs=1e-6)
        assert curve["insertion"]["method"]["mean"][-1] == pytest.approx(1)


def test_the_web_page_shows_the_score(age_state: AppState, browser: Any) -> None:
    with serving(age_state) as address:
        page = browser.new_page()
        page.goto(address)
        sync_api.expect(page.locator("#caption-0")).to_contain_text(re.compile(r"age score \d"), timeout=WAIT)
        assert page.locator("#classes meter").count() == 0
        assert "%" not in page.locator("#classes").inner_text()
        page.locator("#play-deletion").click()
        animation_ended(page)
        sync_api.expect(page.locator("#curve-text")).to_contain_text("normalised score")
        sync_api.expect(page.locator("#answer-says")).to_contain_text("The model's answer: age")
        assert "%" not in page.locator("#curve-text").inner_text()
        page.close()
