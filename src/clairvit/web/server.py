"""The server itself: uvicorn, quiet, and with work that ends when it is told to stop."""

from __future__ import annotations

import socket
import warnings

import uvicorn

from clairvit.errors import ClairWarning
from clairvit.web.app import create_app
from clairvit.web.middleware import Rules
from clairvit.web.state import AppState


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, state: AppState) -> None:
        super().__init__(config)
        self._desk = state

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._desk.close()  # before uvicorn waits for the answers, or it would wait for the slowest
        await super().shutdown(sockets)


def run(state: AppState, rules: Rules, listener: socket.socket) -> None:
    """Serve until Ctrl-C."""
    config = uvicorn.Config(
        create_app(state, rules),
        log_level="warning",
        access_log=False,  # what people look at is nobody's business
        server_header=False,
        proxy_headers=False,
        ws="none",
        timeout_keep_alive=15,
        timeout_graceful_shutdown=3,
    )
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", ClairWarning
        )  # they are in the replies; here they would name photos, and pile up
        _Server(config, state).run(sockets=[listener])
