"""An application with the built-in model: its state, a client in this process, and a real server for what needs one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fastapi.testclient import TestClient

import clairvit as cv
from clairvit.web.app import create_app
from clairvit.web.state import AppState, create_state
from helpers.app_lifespan import unclosed
from helpers.web_server import serving


@pytest.fixture(scope="session")
def state() -> Iterator[AppState]:
    new_state = create_state([cv.load("pets")], time_limit=300)
    yield new_state
    new_state.close()


@pytest.fixture(scope="session")
def client(state: AppState) -> Iterator[TestClient]:
    with TestClient(
        create_app(unclosed(state)), base_url="http://127.0.0.1", raise_server_exceptions=False
    ) as test_client:
        yield test_client


@pytest.fixture(scope="session")
def address(state: AppState) -> Iterator[str]:
    """A real server on a free port."""
    with serving(state) as url:
        yield url
