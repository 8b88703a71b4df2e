"""Middleware: host names, token and origin of requests, limits of their size and time, security headers.

Plain ASGI: it counts bytes before they are parsed, and notices a client that disconnects.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import math
import re
import time
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from clairvit.web.uploads import MAX_BYTES

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Scope = MutableMapping[str, Any]
Asgi = Callable[[Scope, Receive, Send], Awaitable[None]]

MAX_UPLOAD_BODY = MAX_BYTES + 2**20  # the photo and the form around it
MAX_BODY = 2**16  # without a photo: a little JSON becomes a hundred times its size in memory
MAX_TOTAL_BODY = 8 * MAX_UPLOAD_BODY  # bytes of all request bodies together
IDLE_TIMEOUT = 30.0  # seconds in which a client neither sends nor reads
BODY_TIMEOUT = 120.0  # seconds until the whole body must have arrived
PROMPT_BODY = 2.0  # seconds in which most bodies arrive; those that take longer have a budget of their own
MAX_SLOW_BODIES = 16
INTERNAL_ERROR = "The server failed on this request; its log says where."
MAX_REQUESTS = 64  # concurrent requests to the API that ask for work by POST, waiting ones too
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
        "font-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
}


@dataclass(frozen=True)
class AccessRules:
    """Which requests are accepted."""

    token: str | None = None
    hosts: frozenset[str] = frozenset()  # accepted values of the Host header; empty: any


class Refusal(NamedTuple):
    """The response to a request that is not accepted."""

    status: int
    kind: str
    message: str
    headers: dict[str, str]


class _Refused(Exception):
    """Raised inside the app when a request is refused; the middleware sends the response."""


class RequestLimits:
    """Refuse requests that break the access rules or the limits; add security headers to all responses."""

    def __init__(self, app: Asgi, rules: AccessRules) -> None:
        self.app, self.rules = app, rules
        self._active = 0  # requests
        self.slow_bodies = 0  # bodies that have been arriving for longer than PROMPT_BODY
        self.body_bytes = 0  # of all active requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close"})  # not supported
            return
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {key.decode("latin-1").lower(): value.decode("latin-1") for key, value in scope["headers"]}
        is_api = scope["path"].startswith("/api/")
        is_form = headers.get("content-type", "").lower().startswith("multipart/")
        max_bytes = MAX_UPLOAD_BODY if is_form else MAX_BODY
        refusal = self._refusal(scope["path"], headers, max_bytes)
        is_counted = is_api and scope["method"] not in ("GET", "HEAD")  # what they cost is bounded by the job queues
        if refusal is None and is_counted and self._active >= MAX_REQUESTS:
            refusal = _busy("Too many requests are waiting")
        if refusal is not None:
            await _respond(send, refusal)
            return
        self._active += is_counted
        try:
            is_head = scope["method"] == "HEAD"  # as GET, without its body
            request = _LimitedRequest(self, receive, send, max_bytes, is_api, is_head)
            await self._forward({**scope, "method": "GET"} if is_head else scope, request)
        finally:
            self._active -= is_counted

    def _refusal(self, path: str, headers: dict[str, str], max_bytes: int) -> Refusal | None:
        """Return why a request is refused before its body is read, None if it is accepted."""
        host = headers.get("host", "").lower()
        name = host_name(host)
        if self.rules.hosts and name not in self.rules.hosts:
            # DNS rebinding: a foreign page may point its own host name at this machine and read the responses.
            return Refusal(421, "not-allowed", f"This server does not answer to the name '{host[:80]}'.", {})
        site, origin = headers.get("sec-fetch-site"), headers.get("origin")  # older browsers send the latter only
        is_cross_site = origin is not None and origin.partition("://")[2].lower() != host
        if site is not None:
            is_cross_site = site not in ("same-origin", "none")
        if path != "/" and is_cross_site:
            return Refusal(403, "not-allowed", "Pages of other sites may not use this server.", {})
        if path.startswith("/api/") and self.rules.token is not None:  # the page itself is public
            # No cookie: browsers send those to every port of a machine, so to servers of other users, too.
            scheme, _, token = headers.get("authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not hmac.compare_digest(token.encode(), self.rules.token.encode()):
                return Refusal(401, "not-allowed", _NO_TOKEN, {"www-authenticate": "Bearer"})
        if "content-length" in headers and "transfer-encoding" in headers:
            # Request smuggling: a proxy in between may see the end of the body elsewhere than this server does.
            return Refusal(400, "bad-request", "The request states two lengths of its body; expected one.", {})
        length = headers.get("content-length", "0")
        return _too_large(max_bytes) if not length.isdecimal() or int(length[:20]) > max_bytes else None

    async def _forward(self, scope: Scope, request: _LimitedRequest) -> None:
        """Run the app on an accepted request; send the response of a refusal or an error."""
        try:
            with contextlib.suppress(_Refused):  # answered below
                await self.app(scope, request.receive, request.send)
        except Exception:  # a bug of the app: the client gets a 500, and the error is raised again for the log
            if not request.responded and request.refusal is None:
                await _respond(request.raw_send, Refusal(500, "internal-error", INTERNAL_ERROR, {}))
            raise  # to the log
        finally:
            self.body_bytes -= request.received
            self.slow_bodies -= request.is_slow
        if request.refusal is not None and not request.responded:
            await _respond(request.raw_send, request.refusal)


@dataclass(eq=False)
class _LimitedRequest:
    """The ASGI channels of one request: count the bytes received, add headers to the response, enforce timeouts."""

    limits: RequestLimits
    raw_receive: Receive
    raw_send: Send
    max_bytes: int
    is_api: bool
    is_head: bool
    received: int = 0  # bytes
    is_complete: bool = False
    responded: bool = False
    is_slow: bool = False  # it counts among the slow bodies
    started: float = field(default_factory=time.monotonic)
    refusal: Refusal | None = None

    async def receive(self) -> Message:
        """Receive a part of the body; refuse the request if it is too large or too slow."""
        if self.is_complete:
            return await self.raw_receive()  # only a disconnect can follow
        message: Message | None = None
        while message is None:
            elapsed = time.monotonic() - self.started
            limit = min(IDLE_TIMEOUT, BODY_TIMEOUT - elapsed)
            prompt = math.inf if self.is_slow else PROMPT_BODY - elapsed
            try:
                async with asyncio.timeout(min(limit, prompt)):
                    message = await self.raw_receive()
            except TimeoutError:
                if prompt >= limit:
                    raise self._refuse(Refusal(408, "bad-request", _TOO_SLOW, {})) from None
                if self.limits.slow_bodies >= MAX_SLOW_BODIES:
                    raise self._refuse(_busy("Too many photos are arriving slowly")) from None
                self.limits.slow_bodies += 1  # a body that is late needs a place among the slow ones
                self.is_slow = True
        if message["type"] == "http.request":
            size = len(message.get("body", b""))
            self.received += size
            self.limits.body_bytes += size
            self.is_complete = not message.get("more_body", False)
            if self.is_complete and self.is_slow:
                self.is_slow = False
                self.limits.slow_bodies -= 1
            if self.received > self.max_bytes:
                raise self._refuse(_too_large(self.max_bytes))
            if self.limits.body_bytes > MAX_TOTAL_BODY:
                raise self._refuse(_busy("Too much is being sent to this server"))
        return message

    def _refuse(self, refusal: Refusal) -> _Refused:
        self.refusal = refusal
        return _Refused()

    async def send(self, message: Message) -> None:
        """Send a part of the response; the headers get the security headers."""
        if self.refusal is not None and not self.responded:
            return  # the app's response to an incomplete body; the middleware sends the refusal
        if message["type"] == "http.response.start":
            self.responded = True
            added_headers = HEADERS | {"cache-control": "no-store" if self.is_api else "no-cache"}
            app_headers = [
                (key, value) for key, value in message["headers"] if key.decode("latin-1").lower() not in added_headers
            ]
            message["headers"] = [*app_headers, *_encoded(added_headers)]
        elif self.is_head:
            message = {**message, "body": b""}
        try:
            async with asyncio.timeout(IDLE_TIMEOUT):
                await self.raw_send(message)
        except TimeoutError:
            raise _Refused from None  # the client does not read its response


_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^\s:/?#@\[\]]+)(?::[0-9]{1,5})?", re.IGNORECASE)


def host_name(host: str) -> str | None:
    """Return the name in a Host header, without its port; None where it is not a name and a port to the end."""
    match = _HOST.fullmatch(host)
    return match[1] if match else None


_NO_TOKEN = "This server needs a token: open the address that it printed, or send Authorization: Bearer TOKEN."
_TOO_SLOW = (
    f"The request did not arrive in time; expected no pause above {IDLE_TIMEOUT:.0f} s and no more than "
    f"{BODY_TIMEOUT:.0f} s in total: send it again."
)


def _too_large(max_bytes: int) -> Refusal:
    advice = "send a smaller photo" if max_bytes == MAX_UPLOAD_BODY else "photos are sent as multipart/form-data"
    return Refusal(413, "too-large", f"The request is larger than {max_bytes:,} bytes; {advice}.", {})


def _busy(reason: str) -> Refusal:
    return Refusal(429, "busy", f"{reason}; try again in 2 s.", {"retry-after": "2"})


def _encoded(headers: dict[str, str]) -> list[tuple[bytes, bytes]]:
    return [(key.encode(), value.encode("latin-1")) for key, value in headers.items()]


def encode_refusal(refusal: Refusal) -> tuple[list[tuple[bytes, bytes]], bytes]:
    """Return the headers and the body of the response to a request that is not accepted; it ends the connection."""
    wait = refusal.headers.get("retry-after")
    problem = {"kind": refusal.kind, "message": refusal.message, "retry_after": int(wait) if wait else None}
    body = json.dumps(problem).encode()
    headers = HEADERS | {"content-type": "application/json", "cache-control": "no-store", "connection": "close"}
    return _encoded(headers | {"content-length": str(len(body))} | refusal.headers), body


async def _respond(send: Send, refusal: Refusal) -> None:
    headers, body = encode_refusal(refusal)
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
