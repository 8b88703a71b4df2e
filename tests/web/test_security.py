"""Who may come in: the token, the name, other sites, sizes; and what browsers are told in every answer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from clairvit.cli.serve import guard_rules, is_loopback
from clairvit.errors import BadInput
from clairvit.web import security
from clairvit.web.app import STATIC, create_app
from clairvit.web.desk import Desk
from clairvit.web.security import COOKIE, Guard, Rules
from unclosed import unclosed

SECRET = "correct-horse-battery"


@pytest.fixture
def guarded(desk: Desk) -> Iterator[TestClient]:
    rules = Rules(SECRET, frozenset({"127.0.0.1"}))
    with TestClient(create_app(unclosed(desk), rules), base_url="http://127.0.0.1", follow_redirects=False) as made:
        yield made


@pytest.mark.parametrize("path", ["/", "/api/models", "/api/openapi.json", "/page.js", "/api/nothing"])
def test_every_answer_has_the_headers(client: TestClient, path: str) -> None:
    headers = client.get(path).headers
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self';" in policy
    assert "unsafe" not in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert "frame-ancestors 'none'" in policy


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


def test_without_the_token_nobody_comes_in(guarded: TestClient) -> None:
    for path in ("/", "/api/models", "/page.js", "/?token=wrong"):
        told = guarded.get(path)
        assert told.status_code == 401
        assert told.headers["x-content-type-options"] == "nosniff"
    assert guarded.get("/api/models", headers={"Authorization": f"Bearer {SECRET}x"}).status_code == 401
    assert guarded.get("/api/models", headers={"Authorization": f"Bearer {SECRET}"}).status_code == 200


def test_the_address_with_the_token_gives_a_cookie(guarded: TestClient) -> None:
    told = guarded.get("/", params={"token": SECRET})
    assert (told.status_code, told.headers["location"]) == (303, "/")
    assert "HttpOnly" in told.headers["set-cookie"]
    assert "SameSite=Strict" in told.headers["set-cookie"]
    assert guarded.get("/api/models", headers={"Cookie": f"{COOKIE}={SECRET}"}).status_code == 200
    assert guarded.get("/api/models", headers={"Cookie": f"{COOKIE}={SECRET[:-1]}"}).status_code == 401


def test_only_its_own_name_and_no_other_site(guarded: TestClient) -> None:
    mine = {"Authorization": f"Bearer {SECRET}"}
    assert guarded.get("/api/models", headers=mine | {"Host": "evil.example"}).status_code == 421
    assert guarded.get("/api/models", headers=mine | {"Host": "127.0.0.1:8000"}).status_code == 200
    assert guarded.get("/api/models", headers=mine | {"Sec-Fetch-Site": "cross-site"}).status_code == 403
    assert guarded.get("/api/models", headers=mine | {"Sec-Fetch-Site": "same-site"}).status_code == 403
    assert guarded.get("/api/models", headers=mine | {"Sec-Fetch-Site": "same-origin"}).status_code == 200


def test_no_file_beside_the_page_can_be_had(client: TestClient) -> None:
    for path in ("/../app.py", "/%2e%2e/app.py", "/..%2fapp.py", "/static/../../app.py", "//etc/passwd"):
        assert client.get(path).status_code in (404, 405), path


def talk(body: list[bytes], headers: list[tuple[bytes, bytes]]) -> list[dict[str, Any]]:
    """A guard around an app that reads everything; the messages that it sends."""

    async def reads(scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    sent: list[dict[str, Any]] = []
    left = list(body)

    async def receive() -> dict[str, Any]:
        if not left:
            await asyncio.sleep(60)
        return {"type": "http.request", "body": left.pop(0), "more_body": bool(left) or body[-1:] == [b"more"]}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {"type": "http", "path": "/api/explain", "headers": headers, "query_string": b""}
    asyncio.run(Guard(reads, Rules())(scope, receive, send))
    return sent


def test_bodies_are_bounded_whether_they_say_their_size_or_not() -> None:
    assert talk([b"x"], [])[0]["status"] == 200
    assert talk([b"x"], [(b"content-length", b"999999999")])[0]["status"] == 413
    assert talk([b"x"], [(b"content-length", b"-5")])[0]["status"] == 413
    many = [bytes(2**20)] * (security.MOST_BODY // 2**20 + 2)
    assert talk(many, [])[0]["status"] == 413


def test_a_body_that_never_ends_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(security, "SLOWEST_BODY", 0.05)
    assert talk([b"x", b"more"], [])[0]["status"] == 408


def test_a_bug_of_ours_is_told_without_details_and_with_the_headers(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clairvit.web.app.list_methods", lambda: 1 / 0)
    told = client.get("/api/methods")
    assert (told.status_code, told.json()["kind"]) == (500, "broken")
    assert "zero" not in told.text
    assert told.headers["x-content-type-options"] == "nosniff"


def test_loopback_needs_no_token_and_everything_else_gets_one() -> None:
    assert is_loopback("127.0.0.1")
    assert is_loopback("::1")
    assert is_loopback("localhost")
    assert not is_loopback("0.0.0.0")
    assert not is_loopback("gpu-box")
    assert guard_rules("127.0.0.1", None).token is None
    assert "127.0.0.1" in guard_rules("127.0.0.1", None).hosts
    made = guard_rules("0.0.0.0", None).token
    assert made is not None
    assert len(made) >= 32
    assert guard_rules("0.0.0.0", SECRET).token == SECRET
    with pytest.raises(BadInput, match="8 or more"):
        guard_rules("127.0.0.1", "abc")
    with pytest.raises(BadInput, match="letters, digits"):
        guard_rules("127.0.0.1", "abc; Path=/ def")


def test_the_static_files_are_in_the_package() -> None:
    assert (Path(STATIC) / "index.html").is_file()
