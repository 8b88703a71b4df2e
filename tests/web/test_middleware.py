"""Access by token, host name and origin; limits of size and time; security headers of every response."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from clairvit.cli.serve import access_rules, is_loopback
from clairvit.errors import BadInput
from clairvit.web import middleware, server
from clairvit.web.app import STATIC, create_app
from clairvit.web.middleware import AccessRules, RequestLimits
from clairvit.web.state import AppState
from helpers.app_lifespan import unclosed
from helpers.web_server import serving

SECRET = "correct-horse-battery"


@pytest.fixture
def guarded(state: AppState) -> Iterator[TestClient]:
    rules = AccessRules(SECRET, frozenset({"127.0.0.1"}))
    with TestClient(
        create_app(unclosed(state), rules), base_url="http://127.0.0.1", follow_redirects=False
    ) as test_client:
        yield test_client


@pytest.mark.parametrize("path", ["/", "/api/models", "/api/openapi.json", "/page.js", "/api/nothing"])
def test_every_response_has_the_security_headers(client: TestClient, path: str) -> None:
    headers = client.get(path).headers
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self';" in policy
    assert "unsafe" not in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert "frame-ancestors 'none'" in policy


@pytest.mark.parametrize("path", ["/", "/api/models", "/api/methods", "/api/openapi.json", "/page.js", "/api/nothing"])
def test_head_is_get_without_a_body(client: TestClient, path: str) -> None:
    get, head = client.get(path), client.head(path)
    assert head.status_code == get.status_code
    assert head.content == b""
    assert head.headers["content-length"] == get.headers["content-length"]
    assert head.headers["x-content-type-options"] == "nosniff"


def test_head_needs_the_token_too(guarded: TestClient) -> None:
    assert guarded.head("/api/models").status_code == 401


def raw_response(address: str, request: bytes) -> bytes:
    """Return all that a server sends until it closes the connection."""
    host, port = address.removeprefix("http://").split(":")
    response = b""
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(request)
        while part := connection.recv(2**16):
            response += part
    return response


def test_what_is_no_http_is_refused_with_the_security_headers(address: str) -> None:
    for request in (b"GARBAGE\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n"):
        head, _, body = raw_response(address, request).partition(b"\r\n\r\n")
        lines = head.decode().lower().split("\r\n")
        assert lines[0].startswith("http/1.1 400")
        assert {f"{name}: {value}".lower() for name, value in middleware.HEADERS.items()} <= set(lines)
        assert "connection: close" in lines
        assert json.loads(body)["kind"] == "bad-request"


def test_a_body_of_two_lengths_is_refused_and_ends_the_connection(address: str) -> None:
    hidden = b"GET /api/models HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    request = (
        b"POST /api/explain HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 6\r\nTransfer-Encoding: chunked\r\n"
        b"Content-Type: multipart/form-data; boundary=x\r\n\r\n0\r\n\r\n"
    )
    response = raw_response(address, request + hidden)
    assert response.startswith(b"HTTP/1.1 400")
    assert response.count(b"HTTP/1.1") == 1, "what follows is no request"
    assert b"two lengths" in response


def test_the_page_has_no_inline_script_or_style_and_nothing_from_elsewhere() -> None:
    page = (STATIC / "index.html").read_text(encoding="utf-8")
    assert "style=" not in page
    assert "<style" not in page
    assert " on" not in {word[:3] for word in page.split("=")}
    for script in page.split("<script")[1:]:
        assert script.split(">")[1].startswith("</script"), "a script in the page"
    for file in STATIC.rglob("*"):
        if file.suffix in (".html", ".js", ".css"):
            text = file.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
            assert "http://" not in text
            assert "https://" not in text


def test_the_api_needs_the_token(guarded: TestClient) -> None:
    addresses = [
        "/api/models",
        "/api/methods",
        "/api/explain",
        "/api/trace/0",
        "/api/curve",
        "/api/check",
        "/api/openapi.json",
        "/api/x",
    ]
    for path in (*addresses, "/api%2fmodels", "/api/models/", f"/api/models?token={SECRET}"):
        for verb in ("GET", "POST"):
            response = guarded.request(verb, path)
            assert (response.status_code, response.headers["www-authenticate"]) == (401, "Bearer"), path
            assert response.headers["x-content-type-options"] == "nosniff"
    for given in (f"Bearer {SECRET}x", f"Bearer {SECRET[:-1]}", "Bearer ", f"Basic {SECRET}", SECRET, "Bearer \u00e9"):
        answer = guarded.get("/api/models", headers={"Authorization": given.encode("latin-1")})
        assert answer.status_code == 401, given
    assert guarded.get("/api/models", headers={"Authorization": f"Bearer {SECRET}"}).status_code == 200


def test_the_page_is_public_and_sets_no_cookie(guarded: TestClient) -> None:
    """Cookies go to every port of a machine, so to the server of whoever else is on it."""
    response = guarded.get("/")
    assert response.status_code == 200
    assert "set-cookie" not in response.headers
    assert guarded.get("/api/models", headers={"Cookie": f"clairvit-token={SECRET}"}).status_code == 401


def test_only_its_own_name_and_no_other_site(guarded: TestClient) -> None:
    mine = {"Authorization": f"Bearer {SECRET}"}
    for host in ("evil.example", "127.0.0.1.evil.example", "evil.example:127.0.0.1", "evil@127.0.0.1", "[::1]", ""):
        assert guarded.get("/api/models", headers=mine | {"Host": host}).status_code == 421, host
    assert guarded.get("/api/models", headers=mine | {"Host": "127.0.0.1:8000"}).status_code == 200
    assert guarded.get("/api/models", headers=mine | {"Sec-Fetch-Site": "cross-site"}).status_code == 403
    assert guarded.get("/api/models", headers=mine | {"Sec-Fetch-Site": "same-site"}).status_code == 403
    assert guarded.get("/api/models", headers=mine | {"Sec-Fetch-Site": "same-origin"}).status_code == 200


def test_a_browser_that_sends_only_its_origin(client: TestClient) -> None:
    """A form on another page could otherwise make this machine work."""
    for origin in ("http://evil.example", "null", "http://127.0.0.1:9999", "http://127.0.0.1.evil.example"):
        assert client.post("/api/explain", headers={"Origin": origin}).status_code == 403, origin
    assert client.post("/api/explain", headers={"Origin": "http://127.0.0.1"}).status_code == 200
    proxied = {"Origin": "https://maps.example", "Sec-Fetch-Site": "same-origin"}
    assert client.post("/api/explain", headers=proxied).status_code == 200


def test_no_file_outside_the_static_folder_is_served(client: TestClient) -> None:
    for path in ("/../app.py", "/%2e%2e/app.py", "/..%2fapp.py", "/static/../../app.py", "//etc/passwd"):
        assert client.get(path).status_code in (404, 405), path


FORM = (b"content-type", b"multipart/form-data; boundary=x")


class LimitedApp:
    """The middleware around an app that reads whole bodies, and clients that send as slowly as they like."""

    def __init__(self) -> None:
        self.limits = RequestLimits(self.app, AccessRules())
        self.parts = 0

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            self.parts += 1
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def client(
        self,
        body: list[bytes],
        headers: list[tuple[bytes, bytes]],
        pause: float = 0.0,
        reads: bool = True,
        method: str = "POST",
    ) -> int | None:
        """Return the status of the response; a body that ends with b"more" never ends."""
        statuses, left = [], list(body)

        async def receive() -> dict[str, Any]:
            await asyncio.sleep(pause if left else 60)
            return {"type": "http.request", "body": left.pop(0), "more_body": bool(left) or body[-1:] == [b"more"]}

        async def send(message: dict[str, Any]) -> None:
            statuses.append(message.get("status"))
            if not reads:
                await asyncio.sleep(60)

        scope = {"type": "http", "method": method, "path": "/api/explain", "headers": headers, "query_string": b""}
        await self.limits(scope, receive, send)
        return statuses[0] if statuses else None


def status_of(*arguments: Any, **options: Any) -> int | None:
    return asyncio.run(LimitedApp().client(*arguments, **options))


def test_bodies_are_bounded_with_and_without_content_length() -> None:
    assert status_of([b"x"], [FORM]) == 200
    assert status_of([b"x"], [FORM, (b"content-length", b"999999999")]) == 413
    assert status_of([b"x"], [FORM, (b"content-length", b"-5")]) == 413
    many = [bytes(2**20)] * (middleware.MAX_UPLOAD_BODY // 2**20)
    assert status_of(many, [FORM]) == 200
    assert status_of([*many, bytes(2**20)], [FORM]) == 413


def test_only_photos_may_be_large(client: TestClient) -> None:
    """Twenty megabytes of brackets would become gigabytes of lists."""
    assert status_of([bytes(middleware.MAX_BODY)], []) == 200
    assert status_of([bytes(middleware.MAX_BODY), b"x"], []) == 413
    response = client.post(
        "/api/curve", content=b"[" + b"[]," * 10**6 + b"0]", headers={"content-type": "application/json"}
    )
    assert response.status_code == 413
    assert "multipart" in response.json()["message"]
    deep = client.post("/api/curve", content=b"[" * 60_000, headers={"content-type": "application/json"})
    assert deep.status_code in (400, 422)


def test_a_body_that_never_ends_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middleware, "IDLE_TIMEOUT", 0.05)
    assert status_of([b"x", b"more"], []) == 408


def test_a_body_that_arrives_too_slowly_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middleware, "BODY_TIMEOUT", 0.2)
    assert status_of([b"x"] * 100, [], pause=0.02) == 408
    assert status_of([b"x"] * 3, [], pause=0.02) == 200


def test_slow_uploads_have_a_budget_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bodies that trickle in hold the places of slow bodies and no others; requests without a body go through."""
    monkeypatch.setattr(middleware, "PROMPT_BODY", 0.1)
    monkeypatch.setattr(middleware, "MAX_SLOW_BODIES", 2)
    monkeypatch.setattr(middleware, "MAX_REQUESTS", 4)

    async def run() -> None:
        server = LimitedApp()
        slow = [asyncio.create_task(server.client([b"x", b"more"], [FORM])) for _ in range(4)]
        while server.parts < 4:
            await asyncio.sleep(0.01)
        assert await server.client([b""], [], method="GET") == 200
        while sum(task.done() for task in slow) < 2:
            await asyncio.sleep(0.01)
        arriving = [task for task in slow if not task.done()]
        assert [task.result() for task in slow if task.done()] == [429, 429]
        assert await server.client([b"x"], []) == 200
        for task in arriving:
            task.cancel()
        await asyncio.gather(*arriving, return_exceptions=True)
        assert server.limits.slow_bodies == 0
        assert await server.client([b"x"] * 20, [FORM], pause=0.02) == 200

    asyncio.run(run())


def test_a_host_is_parsed_to_its_end() -> None:
    accepted = {"127.0.0.1": "127.0.0.1", "localhost:8000": "localhost", "[::1]:80": "[::1]", "[::1]": "[::1]"}
    for host, name in accepted.items():
        assert middleware.host_name(host) == name
    for host in ("[::1].evil.example", "127.0.0.1:80:evil", "127.0.0.1:", "[::1]x", "a@127.0.0.1", "", "localhost:80x"):
        assert middleware.host_name(host) is None, host


def test_half_sent_headers_are_closed(state: AppState, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a new connection and on one that is kept alive; a request that arrives whole is answered."""
    monkeypatch.setattr(server, "HEADER_TIMEOUT", 2.0)
    with serving(state) as address:
        host, port = address.removeprefix("http://").split(":")
        whole = b"GET /api/models HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
        for first in (b"", whole):
            with socket.create_connection((host, int(port)), timeout=30) as connection:
                if first:
                    connection.sendall(first)
                    answer = connection.recv(2**20)
                    assert answer.startswith(b"HTTP/1.1 200")
                    while b"]" not in answer[-3:] and b"}" not in answer[-3:]:
                        answer += connection.recv(2**20)
                connection.sendall(whole[:20])
                assert connection.recv(100) == b"", "the connection was closed"


def test_a_client_that_does_not_read_its_response_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middleware, "IDLE_TIMEOUT", 0.05)
    monkeypatch.setattr(middleware, "MAX_REQUESTS", 1)

    async def run() -> None:
        server = LimitedApp()
        unread = asyncio.create_task(server.client([b"x"], [], reads=False))
        await asyncio.sleep(0.02)
        assert await server.client([b"x"], []) == 429
        await unread
        assert await server.client([b"x"], []) == 200

    asyncio.run(run())


def test_what_all_clients_send_together_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middleware, "MAX_TOTAL_BODY", 2500)

    async def run() -> None:
        server = LimitedApp()
        slow = [asyncio.create_task(server.client([bytes(1000), b"x"], [FORM], pause=0.1)) for _ in range(2)]
        while server.parts < 2:
            await asyncio.sleep(0.01)
        assert await server.client([bytes(1000)], [FORM]) == 429
        assert await asyncio.gather(*slow) == [200, 200]
        assert await server.client([bytes(1000)], [FORM]) == 200
        assert server.limits.body_bytes == 0

    asyncio.run(run())


def test_there_are_no_web_sockets(client: TestClient) -> None:
    for path in ("/", "/api/models"):
        with pytest.raises(WebSocketDisconnect), client.websocket_connect(path):
            pass


def test_a_bug_is_reported_without_details_and_with_the_headers(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clairvit.web.app.methods_response", lambda recipes: 1 / 0)
    response = client.get("/api/methods")
    assert (response.status_code, response.json()["kind"]) == (500, "internal-error")
    assert "zero" not in response.text
    assert response.headers["x-content-type-options"] == "nosniff"


def test_loopback_needs_no_token_and_everything_else_gets_one() -> None:
    assert is_loopback("127.0.0.1")
    assert is_loopback("::1")
    assert is_loopback("localhost")
    assert not is_loopback("0.0.0.0")
    assert not is_loopback("gpu-box")
    assert access_rules("127.0.0.1", None).token is None
    assert "127.0.0.1" in access_rules("127.0.0.1", None).hosts
    token = access_rules("0.0.0.0", None).token
    assert token is not None
    assert len(token) >= 32
    assert access_rules("0.0.0.0", SECRET).token == SECRET
    with pytest.raises(BadInput, match="16 or more"):
        access_rules("127.0.0.1", "fifteen-letters")
    with pytest.raises(BadInput, match="letters, digits"):
        access_rules("127.0.0.1", "abc; Path=/ defghij")


def test_the_static_files_are_in_the_package() -> None:
    assert (Path(STATIC) / "index.html").is_file()
