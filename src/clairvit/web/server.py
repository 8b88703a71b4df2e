"""Run the app with uvicorn until Ctrl-C; jobs are cancelled at shutdown."""

from __future__ import annotations

import socket
import warnings

import uvicorn

from clairvit.errors import ClairWarning
from clairvit.web.app import create_app
from clairvit.web.middleware import AccessRules
from clairvit.web.state import AppState


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, state: AppState) -> None:
        super().__init__(config)
        self._state = state

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._state.close()  # first: uvicorn waits for the responses, and so for the slowest job
        await super().shutdown(sockets)


def run(state: AppState, rules: AccessRules, listener: socket.socket) -> None:
    """Serve until Ctrl-C."""
    config = uvicorn.Config(
        create_app(state, rules),
        log_level="warning",
        access_log=False,  # requests are private
        server_header=False,
        proxy_headers=False,
        ws="none",
        timeout_keep_alive=15,
        timeout_graceful_shutdown=3,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ClairWarning)  # they are in the responses; here they would name photos
        _Server(config, state).run(sockets=[listener])
