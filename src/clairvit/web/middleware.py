"""The guard at the door: who may come in, how much they may bring, and what browsers are told.

Plain ASGI, so that it sees bytes before anybody parses them, and so that a client that goes away is noticed.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import time
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from clairvit.web.uploads import MOST_BYTES

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Scope = MutableMapping[str, Any]
Asgi = Callable[[Scope, Receive, Send], Awaitable[None]]

MOST_BODY = MOST_BYTES + 2**20  # the form around the photo
SMALL_BODY = 2**16  # what brings no photo: a little JSON becomes a hundred times its size in memory
MOST_TOGETHER = 8 * MOST_BODY  # bytes of all the bodies that are inside
SILENCE = 30.0  # seconds that a client may neither send nor read
LONGEST_BODY = 120.0  # seconds until a body must be here, however lively it trickles
STUMBLED = "The server stumbled over this request; its log says where."  # a bug of ours
AT_ONCE = 64  # requests to the API that are inside, waiting ones too
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


@dataclass(frozen=True)
class Rules:
    token: str | None = None
    hosts: frozenset[str] = frozenset()  # names by which the server may be called; none: any


class Refusal(NamedTuple):
    status: int
    kind: str
    message: str
    headers: dict[str, str]


class _Refused(Exception):
    """Where the app reads a body that is not read further, or writes to nobody; the guard has the answer."""


class RequestLimits:
    def __init__(self, app: Asgi, rules: Rules) -> None:
        self.app, self.rules = app, rules
        self._inside = 0
        self.carried = 0  # bytes of the bodies inside

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close"})  # there are none
            return
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {key.decode("latin-1").lower(): value.decode("latin-1") for key, value in scope["headers"]}
        is_api = scope["path"].startswith("/api/")
        most = MOST_BODY if headers.get("content-type", "").lower().startswith("multipart/") else SMALL_BODY
        refusal = self._refusal(scope["path"], headers, most)
        if refusal is None and is_api and self._inside >= AT_ONCE:
            refusal = _busy("Too many requests are waiting")
        if refusal is not None:
            await _answer(send, refusal)
            return
        self._inside += is_api
        try:
            await self._let_in(scope, _Visit(self, receive, send, most, is_api))
        finally:
            self._inside -= is_api

    def _refusal(self, path: str, headers: dict[str, str], most: int) -> Refusal | None:
        host = headers.get("host", "").lower()
        name = host.partition("]")[0] + "]" if host.startswith("[") else host.partition(":")[0]
        if self.rules.hosts and name not in self.rules.hosts:
            # A page elsewhere may point its own name at this machine and read what it gets (DNS rebinding).
            return Refusal(421, "not-allowed", f"This server does not go by the name '{name[:80]}'.", {})
        if path != "/" and _is_of_another_site(headers, host):
            return Refusal(403, "not-allowed", "Pages of other sites may not use this server.", {})
        if path.startswith("/api/") and self.rules.token is not None:  # the page itself is no secret
            # No cookie: browsers hand those to every port of a machine, and so to other people's servers on it.
            scheme, _, given = headers.get("authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not hmac.compare_digest(given.encode(), self.rules.token.encode()):
                return Refusal(401, "not-allowed", _NO_TOKEN, {"www-authenticate": "Bearer"})
        length = headers.get("content-length", "0")
        return _too_large(most) if not length.isdecimal() or int(length[:20]) > most else None

    async def _let_in(self, scope: Scope, visit: _Visit) -> None:
        try:
            with contextlib.suppress(_Refused):  # answered below
                await self.app(scope, visit.receive, visit.send)
        except Exception:
            if not visit.answered and visit.refusal is None:
                await _answer(visit.plain_send, Refusal(500, "broken", STUMBLED, {}))
            raise  # to the log
        finally:
            self.carried -= visit.came
        if visit.refusal is not None and not visit.answered:
            await _answer(visit.plain_send, visit.refusal)


class _Visit:
    """One request that was let in: bytes are counted on their way in, answers get our headers on their way out."""

    def __init__(self, guard: RequestLimits, receive: Receive, send: Send, most: int, is_api: bool) -> None:
        self.plain_receive, self.plain_send = receive, send
        self.guard, self.most, self.is_api = guard, most, is_api
        self.came, self.is_here, self.answered = 0, False, False
        self.began = time.monotonic()
        self.refusal: Refusal | None = None

    async def receive(self) -> Message:
        if self.is_here:
            return await self.plain_receive()  # only a disconnect can follow
        left = self.began + LONGEST_BODY - time.monotonic()
        try:
            async with asyncio.timeout(min(SILENCE, left)):
                message = await self.plain_receive()
        except TimeoutError:
            raise self._refuse(Refusal(408, "bad-request", _TOO_SLOW, {})) from None
        if message["type"] == "http.request":
            bytes_here = len(message.get("body", b""))
            self.came += bytes_here
            self.guard.carried += bytes_here
            self.is_here = not message.get("more_body", False)
            if self.came > self.most:
                raise self._refuse(_too_large(self.most))
            if self.guard.carried > MOST_TOGETHER:
                raise self._refuse(_busy("Too much is being sent to this server"))
        return message

    def _refuse(self, refusal: Refusal) -> _Refused:
        self.refusal = refusal
        return _Refused()

    async def send(self, message: Message) -> None:
        if self.refusal is not None and not self.answered:
            return  # whatever was made of the broken body; the guard answers itself
        if message["type"] == "http.response.start":
            self.answered = True
            own = HEADERS | {"cache-control": "no-store" if self.is_api else "no-cache"}
            kept = [(key, value) for key, value in message["headers"] if key.decode("latin-1").lower() not in own]
            message["headers"] = [*kept, *_encoded(own)]
        try:
            async with asyncio.timeout(SILENCE):
                await self.plain_send(message)
        except TimeoutError:
            raise _Refused from None  # a client that does not read its answer keeps no place


def _is_of_another_site(headers: dict[str, str], host: str) -> bool:
    """Browsers say where a request comes from; those that do not yet send Sec-Fetch-Site send Origin with a POST."""
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    if site is not None:
        return site not in ("same-origin", "none")
    return origin is not None and origin.partition("://")[2].lower() != host


_NO_TOKEN = "This server asks for a token: open the address that it printed, or send Authorization: Bearer TOKEN."
_TOO_SLOW = (
    f"The request did not come in time; expected no silence above {SILENCE:.0f} s and no more than "
    f"{LONGEST_BODY:.0f} s in all: send it again."
)


def _too_large(most: int) -> Refusal:
    advice = "send a smaller photo" if most == MOST_BODY else "photos are sent as multipart/form-data"
    return Refusal(413, "too-large", f"The request is larger than {most:,} bytes; {advice}.", {})


def _busy(why: str) -> Refusal:
    return Refusal(429, "busy", f"{why}; try again in 2 s.", {"retry-after": "2"})


def _encoded(headers: dict[str, str]) -> list[tuple[bytes, bytes]]:
    return [(key.encode(), value.encode("latin-1")) for key, value in headers.items()]


async def _answer(send: Send, refusal: Refusal) -> None:
    wait = refusal.headers.get("retry-after")
    told = {"kind": refusal.kind, "message": refusal.message, "retry_after": int(wait) if wait else None}
    body = json.dumps(told).encode()
    headers = HEADERS | {"content-type": "application/json", "cache-control": "no-store", "connection": "close"}
    encoded = _encoded(headers | {"content-length": str(len(body))} | refusal.headers)
    await send({"type": "http.response.start", "status": refusal.status, "headers": encoded})
    await send({"type": "http.response.body", "body": body})
