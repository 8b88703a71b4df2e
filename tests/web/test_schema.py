"""The OpenAPI document is true: whatever fits it, or nearly fits it, never makes the server stumble (no 5xx)."""

from __future__ import annotations

from collections.abc import Iterator

import hypothesis
import pytest
import schemathesis
from fastapi.testclient import TestClient
from hypothesis.strategies import integers, sampled_from

from clairvit.web.app import create_app
from clairvit.web.state import create_state
from helpers.app_lifespan import unclosed
from helpers.tiny_models import fresh

pytestmark = pytest.mark.filterwarnings("default::clairvit.errors.ClairWarning", "ignore::DeprecationWarning")
TRUE = [  # what the document says of answers
    schemathesis.checks.not_a_server_error,
    schemathesis.checks.status_code_conformance,
    schemathesis.checks.content_type_conformance,
    schemathesis.checks.response_headers_conformance,
    schemathesis.checks.response_schema_conformance,
]
METHODS = ("legrad", "rollout(fusion=max)", "ixg+plus", "gradcam", "smoothgrad(n=2)", "random")
FEW = hypothesis.settings(
    max_examples=30,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[hypothesis.Phase.generate],
    suppress_health_check=list(hypothesis.HealthCheck),
)
OPERATIONS = [
    ("/api/models", "GET"),
    ("/api/methods", "GET"),
    ("/api/explain", "POST"),
    ("/api/trace/{layer}", "GET"),
    ("/api/features/{layer}", "GET"),
    ("/api/curve", "POST"),
    ("/api/check", "POST"),
]


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    """A tiny model: what is tried here are requests, not maps. Schemathesis ends the app after each of them."""
    state = create_state([fresh("timm-vit")])
    with TestClient(create_app(unclosed(state)), base_url="http://127.0.0.1") as test_client:
        yield test_client
    state.close()


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

    @FEW
    @hypothesis.given(case=operation.as_strategy(generation_mode=schemathesis.GenerationMode(mode)))
    def attempt(case: schemathesis.Case) -> None:
        seen.append(answered(case))

    attempt()
    assert 429 not in seen, "one request at a time always has a place"
    assert set(seen) <= ({200} if path in ("/api/models", "/api/methods") else {200, 400, 404, 415, 422})


@pytest.mark.parametrize(("path", "verb"), OPERATIONS[2:])
def test_what_makes_sense_is_answered_as_the_document_says(client: TestClient, path: str, verb: str) -> None:
    """Requests that fit the document, with names that are known here: most are done, and their replies are checked."""
    operation = schemathesis.openapi.from_asgi("/api/openapi.json", client.app)[path][verb]
    seen: list[int] = []

    @FEW
    @hypothesis.given(case=operation.as_strategy(), method=sampled_from(METHODS), layer=integers(0, 2))
    def attempt(case: schemathesis.Case, method: str, layer: int) -> None:
        given = case.query if verb == "GET" else case.body
        for unknown in ("image", "photo", "model", "target", "text", "other", "similar_to"):
            given.pop(unknown, None)
        if "{layer}" in path:
            case.path_parameters["layer"] = layer
            given.pop("patch", None)
        else:
            given["method"] = [method] if path == "/api/explain" else method
        seen.append(answered(case))

    attempt()
    assert set(seen) <= {200, 422}
    assert seen.count(200) >= len(seen) / 4


def answered(case: schemathesis.Case) -> int:
    reply = case.call(base_url="http://127.0.0.1", timeout=60)
    case.validate_response(reply, checks=TRUE)
    return int(reply.status_code)


def test_the_document_names_what_the_page_uses(client: TestClient) -> None:
    document = client.get("/api/openapi.json").json()
    expected = {path for path, _ in OPERATIONS}
    assert set(document["paths"]) == expected
    for path in expected:
        for what in document["paths"][path].values():
            assert {"200", "422", "429", "413"} <= set(what["responses"])
            assert "$ref" in str(what["responses"]["200"]), f"{path} has no typed reply"
