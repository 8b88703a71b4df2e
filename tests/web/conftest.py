"""A desk with the built-in model, a client that talks to it in-process, and a real server for what needs one.

Without the extra `web` (and httpx) there is nothing to test here; imports are inside fixtures for that reason.
"""

from __future__ import annotations

import importlib.util
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
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
    with serving(desk) as found:
        yield found


@contextmanager
def serving(desk: Desk, token: str | None = None) -> Iterator[str]:
    import uvicorn

    from clairvit.web.app import create_app
    from clairvit.web.security import Rules
    from unclosed import unclosed

    app = create_app(unclosed(desk), Rules(token))
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.05)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join(10)


@pytest.fixture
def served_with(desk: Desk) -> Callable[[str], AbstractContextManager[str]]:
    """The same, asking for a token."""
    return partial(serving, desk)
