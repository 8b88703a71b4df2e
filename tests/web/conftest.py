"""A desk with the built-in model, a client that talks to it in-process, and a real server for what needs one.

Without the extra `web` (and httpx) there is nothing to test here; imports are inside fixtures for that reason.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

import clairvit as cv

if TYPE_CHECKING:
    from fastapi.testclient import TestClient

    from clairvit.web.desk import Desk

NEEDED = ("fastapi", "uvicorn", "httpx", "python_multipart")
collect_ignore_glob = [] if all(importlib.util.find_spec(name) for name in NEEDED) else ["test_*.py"]


@pytest.fixture(scope="session")
def desk() -> Iterator[Desk]:
    from clairvit.web.desk import open_desk

    made = open_desk([cv.load("pets")], seconds=300)
    yield made
    made.close()


@pytest.fixture(scope="session")
def client(desk: Desk) -> Iterator[TestClient]:
    from fastapi.testclient import TestClient

    from clairvit.web.app import create_app
    from unclosed import unclosed

    with TestClient(create_app(unclosed(desk)), base_url="http://127.0.0.1", raise_server_exceptions=False) as made:
        yield made


@pytest.fixture(scope="session")
def address(desk: Desk) -> Iterator[str]:
    """A real server on a free port."""
    from served import serving

    with serving(desk) as found:
        yield found
