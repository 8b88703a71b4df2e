"""Run the app with uvicorn until Ctrl-C; jobs are cancelled at shutdown."""

from __future__ import annotations

import asyncio
import socket
import warnings
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from clairvit.errors import ClairWarning
from clairvit.web.app import create_app
from clairvit.web.middleware import AccessRules, Refusal, encode_refusal
from clairvit.web.state import AppState

HEADER_TIMEOUT = 10.0  # seconds until the headers of a request must have arrived


class HeaderTimeoutProtocol(H11Protocol):
    """HTTP/1.1 that closes a connection whose request line and headers do not arrive within HEADER_TIMEOUT."""

    header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timer of the first request."""
        super().connection_made(transport)
        self._start_timer()

    def data_received(self, data: bytes) -> None:
        """Start the timer when a part of the headers has arrived, stop it when all of them have."""
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._stop_timer()
        elif self.conn.trailing_data[0]:
            self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer."""
        self._stop_timer()
        super().connection_lost(exc)

    def _start_timer(self) -> None:
        if self.header_timer is None:
            self.header_timer = self.loop.call_later(HEADER_TIMEOUT, self._close)

    def _stop_timer(self) -> None:
        if self.header_timer is not None:
            self.header_timer.cancel()
            self.header_timer = None

    def _close(self) -> None:
        self.header_timer = None
        if self.conn.their_state is h11.IDLE:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP as the app refuses requests: with its security headers, and as JSON."""
        headers, body = encode_refusal(Refusal(400, "bad-request", f"{msg} Expected HTTP/1.1.", {}))
        for event in (h11.Response(status_code=400, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _unsupported_upgrade_warning(self) -> None:
        """Log nothing: there are no web sockets here, and no library for them is missing."""


def server_config(app: Any, **options: Any) -> uvicorn.Config:
    """Return how uvicorn serves the app: no access log (requests are private), no web sockets, time limits."""
    return uvicorn.Config(
        app,
        http=HeaderTimeoutProtocol,
        ws="none",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=15,
        timeout_graceful_shutdown=3,
        **{"log_level": "warning", **options},
    )


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, state: AppState) -> None:
        super().__init__(config)
        self._state = state

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._state.close()  # first: uvicorn waits for the responses, and so for the slowest job
        await super().shutdown(sockets)


def run(state: AppState, rules: AccessRules, listener: socket.socket) -> None:
    """Serve until Ctrl-C."""
    config = server_config(create_app(state, rules))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ClairWarning)  # they are in the responses; here they would name photos
        _Server(config, state).run(sockets=[listener])
