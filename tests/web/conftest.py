"""A desk with the built-in model, a client that talks to it in-process, and a real server for what needs one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fastapi.testclient import TestClient

import clairvit as cv
from clairvit.web.app import create_app
from clairvit.web.state import AppState, create_state
from served import serving
from unclosed import unclosed


@pytest.fixture(scope="session")
def desk() -> Iterator[AppState]:
    made = create_state([cv.load("pets")], seconds=300)
    yield made
    made.close()


@pytest.fixture(scope="session")
def client(desk: AppState) -> Iterator[TestClient]:
    with TestClient(create_app(unclosed(desk)), base_url="http://127.0.0.1", raise_server_exceptions=False) as made:
        yield made


@pytest.fixture(scope="session")
def address(desk: AppState) -> Iterator[str]:
    """A real server on a free port."""
    with serving(desk) as found:
        yield found
