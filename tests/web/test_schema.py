"""The OpenAPI document is true: whatever fits it, or nearly fits it, never makes the server stumble (no 5xx)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fastapi.testclient import TestClient

from clairvit.web.app import create_app
from clairvit.web.desk import open_desk
from tiny import wrapped

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")
hypothesis = pytest.importorskip("hypothesis", reason="schemathesis is not installed")

pytestmark = pytest.mark.filterwarnings("default::clairvit.errors.ClairWarning", "ignore::DeprecationWarning")
OPERATIONS = [
    ("/api/models", "GET"),
    ("/api/methods", "GET"),
    ("/api/explain", "POST"),
    ("/api/trace/{layer}", "GET"),
    ("/api/curve", "POST"),
]


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    """A tiny model: what is tried here are requests, not maps."""
    with TestClient(create_app(open_desk([wrapped("timm-vit")])), base_url="http://127.0.0.1") as made:
        yield made


@pytest.mark.parametrize("mode", ["positive", "negative"])
@pytest.mark.parametrize(("path", "verb"), OPERATIONS)
def test_nothing_makes_the_server_stumble(client: TestClient, path: str, verb: str, mode: str) -> None:
    """`positive`: requests that fit the document; `negative`: requests that break it in one place."""
    schema = schemathesis.openapi.from_asgi("/api/openapi.json", client.app)
    operation = schema[path][verb]
    if mode == "negative" and path in ("/api/models", "/api/methods"):
        assert not operation.query  # there is nothing to break
        return
    seen: list[int] = []

    @hypothesis.settings(
        max_examples=30,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(case=operation.as_strategy(generation_mode=schemathesis.GenerationMode(mode)))
    def attempt(case: schemathesis.Case) -> None:
        reply = case.call(base_url="http://127.0.0.1", timeout=60)
        seen.append(reply.status_code)
        assert reply.status_code < 500, reply.text
        case.validate_response(reply, checks=[schemathesis.checks.not_a_server_error])

    attempt()
    assert seen


def test_the_document_names_what_the_page_uses(client: TestClient) -> None:
    document = client.get("/api/openapi.json").json()
    wanted = {"/api/models", "/api/methods", "/api/explain", "/api/trace/{layer}", "/api/curve"}
    assert set(document["paths"]) == wanted
    for path in wanted:
        for what in document["paths"][path].values():
            assert {"200", "422", "429", "413"} <= set(what["responses"])
            assert "$ref" in str(what["responses"]["200"]), f"{path} has no typed reply"
