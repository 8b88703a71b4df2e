"""A real server on a free port, in a thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from clairvit.web.app import create_app
from clairvit.web.middleware import AccessRules
from clairvit.web.server import server_config
from clairvit.web.state import AppState
from helpers.app_lifespan import unclosed


@contextmanager
def serving(state: AppState, token: str | None = None) -> Iterator[str]:
    app = create_app(unclosed(state), AccessRules(token))
    server = uvicorn.Server(server_config(app, host="127.0.0.1", port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.05)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(10)
