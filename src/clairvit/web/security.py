"""The guard at the door: who may come in, how much they may bring, and what browsers are told.

Plain ASGI, so that it sees bytes before anybody parses them, and so that a client that goes away is noticed.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qs

from clairvit.web.photos import MOST_BYTES

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Scope = MutableMapping[str, Any]
Asgi = Callable[[Scope, Receive, Send], Awaitable[None]]

MOST_BODY = MOST_BYTES + 2**20  # the form around the photo
SLOWEST_BODY = 30.0  # seconds that a request body may be silent
AT_ONCE = 64  # requests to the API that are inside, waiting ones too
COOKIE = "clairvit-token"
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
}


class _TooLarge(Exception):
    pass


class _TooQuiet(Exception):
    pass


@dataclass(frozen=True)
class Rules:
    token: str | None = None
    hosts: frozenset[str] = frozenset()  # names by which the server may be called; none: any


class Guard:
    def __init__(self, app: Asgi, rules: Rules) -> None:
        self.app, self.rules = app, rules
        self._inside = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {key.decode("latin-1").lower(): value.decode("latin-1") for key, value in scope["headers"]}
        is_api = scope["path"].startswith("/api/")
        refused = self._refusal(scope, headers)
        if refused is not None:
            await _answer(send, *refused)
        elif is_api and self._inside >= AT_ONCE:
            await _answer(send, 429, "busy", "Too many requests are waiting; try again in 2 s.", {"retry-after": "2"})
        else:
            self._inside += is_api
            try:
                await self._let_in(scope, receive, send, is_api)
            finally:
                self._inside -= is_api

    def _refusal(self, scope: Scope, headers: dict[str, str]) -> tuple[int, str, str, dict[str, str]] | None:
        host = headers.get("host", "").rpartition("@")[2]
        name = host.partition("]")[0] + "]" if host.startswith("[") else host.partition(":")[0]
        if self.rules.hosts and name.lower() not in self.rules.hosts:
            # A page elsewhere may point its own name at this machine and read what it gets (DNS rebinding).
            return 421, "not-allowed", f"This server does not go by the name '{name[:80]}'.", {}
        if headers.get("sec-fetch-site", "none") not in ("same-origin", "none") and scope["path"] != "/":
            return 403, "not-allowed", "Pages of other sites may not use this server.", {}
        if self.rules.token is not None:
            given = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("token", [""])[0]
            if scope["path"] == "/" and self._is_token(given):
                cookie = f"{COOKIE}={self.rules.token}; HttpOnly; SameSite=Strict; Path=/"
                return 303, "not-allowed", "", {"location": "/", "set-cookie": cookie}
            scheme, _, bearer = headers.get("authorization", "").partition(" ")
            if not (scheme.lower() == "bearer" and self._is_token(bearer)) and not self._is_token(_cookie(headers)):
                message = "This server asks for a token: open the address with ?token=… that it printed."
                return 401, "not-allowed", message, {"www-authenticate": "Bearer"}
        length = headers.get("content-length", "0")
        if not (length.isascii() and length.isdigit()) or int(length[:20]) > MOST_BODY:
            return 413, "too-large", _TOO_LARGE, {}
        return None

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), (self.rules.token or "").encode()) and bool(given)

    async def _let_in(self, scope: Scope, receive: Receive, send: Send, is_api: bool) -> None:
        came, over = 0, False
        refused: tuple[int, str, str] | None = None
        started = False

        async def bounded() -> Message:
            nonlocal came, over, refused
            if over:
                return await receive()  # only a disconnect can follow
            try:
                message = await asyncio.wait_for(receive(), SLOWEST_BODY)
            except TimeoutError:
                refused = (408, "bad-request", f"Nothing came for {SLOWEST_BODY:.0f} s; send the request again.")
                raise _TooQuiet from None
            if message["type"] == "http.request":
                came += len(message.get("body", b""))
                over = not message.get("more_body", False)
                if came > MOST_BODY:
                    refused = (413, "too-large", _TOO_LARGE)
                    raise _TooLarge
            return message

        async def dressed(message: Message) -> None:
            nonlocal started
            if refused is not None and not started:
                return  # whatever was made of the broken body; the guard answers itself
            if message["type"] == "http.response.start":
                started = True
                own = dict(HEADERS) | {"cache-control": "no-store" if is_api else "no-cache"}
                kept = [(key, value) for key, value in message["headers"] if key.decode("latin-1").lower() not in own]
                message["headers"] = [*kept, *((key.encode(), value.encode()) for key, value in own.items())]
            await send(message)

        try:
            with contextlib.suppress(_TooLarge, _TooQuiet):  # answered below
                await self.app(scope, bounded, dressed)
        except Exception:
            if not started and refused is None:
                await _answer(send, 500, "broken", "The server stumbled over this request; its log says where.")
            raise  # to the log
        if refused is not None and not started:
            await _answer(send, *refused)


_TOO_LARGE = f"The request is larger than {MOST_BODY:,} bytes; send a smaller photo."


def _cookie(headers: dict[str, str]) -> str:
    try:
        found = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
    except CookieError:
        return ""
    return "" if found is None else found.value


async def _answer(send: Send, status: int, kind: str, message: str, more: dict[str, str] | None = None) -> None:
    wait = (more or {}).get("retry-after")
    body = json.dumps({"kind": kind, "message": message, "retry_after": int(wait) if wait else None}).encode()
    headers = HEADERS | {"content-type": "application/json", "cache-control": "no-store", "connection": "close"}
    headers |= {"content-length": str(len(body))} | (more or {})
    encoded = [(key.encode(), value.encode("latin-1")) for key, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": encoded})
    await send({"type": "http.response.body", "body": body})
