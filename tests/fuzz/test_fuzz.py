"""Fuzz: whatever is given, the answer is a result or an error of our own; no NaN without a word, no end without one.

`make fuzz` runs 10,000 cases, `make test` 2,000 of them, from a fixed seed (helpers/fuzzing.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fastapi.testclient import TestClient
from hypothesis import strategies as st

import clairvit as cv
from clairvit.bench.config import DataConfig, StudyConfig, read_config
from clairvit.bench.study_file import study_of
from clairvit.methods.spec import MethodSpec, resolve_method
from clairvit.metrics.registry import resolve_metric
from clairvit.web.app import create_app
from clairvit.web.state import create_state
from helpers import strategies
from helpers.app_lifespan import unclosed
from helpers.fuzzing import CASES, SHARES, Cases, cases_of, run_family
from helpers.tiny_models import build, pixels, wrapped

pytestmark = pytest.mark.slow
LABELS = ["cat", "dog", "cow", "ant", "bee", "catfish", "d"]
MOST_FORWARDS = 200  # of one case: a method that asks for more is bound, and not run


@pytest.fixture(scope="module")
def model() -> cv.Model:
    """The tiny ViT on 32 × 32 pixels with names for its seven classes."""
    return cv.wrap(build("timm-vit"), name="tiny", size=32, labels=LABELS)


@pytest.fixture(scope="module")
def photo() -> torch.Tensor:
    return pixels("timm-vit", batch=1)


def check(explanation: cv.Explanation, messages: list[str]) -> None:
    """NaN and infinity in a map are flagged by a note or a warning."""
    if not bool(explanation.maps.isfinite().all()):
        assert explanation.notes or messages, f"{explanation.method}: NaN without a word"


def test_the_shares_add_up() -> None:
    assert sum(SHARES.values()) == 1000
    assert sum(cases_of(family) for family in SHARES) >= CASES - len(SHARES)


def test_images(
    model: cv.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.chdir(tmp_path)  # patterns and folders find nothing there

    def explain(cases: Cases, image: Any) -> None:
        with cases.case() as messages:
            check(cv.explain(model, image, "ixg", target=1), messages)

    run_family("images", request, explain, image=strategies.images())


def test_files(model: cv.Model, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    def explain(cases: Cases, content: bytes, name: str) -> None:
        path = tmp_path / name
        path.write_bytes(content)
        with cases.case() as messages:
            check(cv.explain(model, path, "ixg", target=1), messages)

    names = st.sampled_from(["a.png", "a.jpg", "a", "a.tif"])
    run_family("files", request, explain, content=strategies.damaged(), name=names)


def test_tensors(model: cv.Model, request: pytest.FixtureRequest) -> None:
    def explain(cases: Cases, tensor: torch.Tensor, method: str) -> None:
        with cases.case() as messages:
            check(cv.explain(model, tensor, method, target=1), messages)

    methods = st.sampled_from(["ixg", "rollout", "attnlrp", "saliency"])
    run_family("tensors", request, explain, tensor=strategies.tensors(), method=methods)


def test_targets(model: cv.Model, photo: torch.Tensor, request: pytest.FixtureRequest) -> None:
    images = [photo, photo[0], torch.cat([photo, photo.flip(-1)])]

    def explain(cases: Cases, target: Any, image: int, score: Any, method: str) -> None:
        with cases.case() as messages:
            check(cv.explain(model, images[image], method, target, score=score), messages)

    scores = st.sampled_from([None] * 6 + ["logit", "prob", "logprob", "loss", "", "Prob", 1])
    kinds = st.sampled_from(["ixg", "genatt", "rollout"])
    given = {"target": strategies.targets(), "image": st.integers(0, 2), "score": scores, "method": kinds}
    run_family("targets", request, explain, **given)


def affordable(spec: MethodSpec) -> bool:
    """Say whether a method takes few passes; the others are only bound."""
    cost = spec.own_cost(16)
    numbers = [abs(value) for _, value in spec.options if isinstance(value, int | float)]
    slow = any(member.method.name in ("attention-flow", "counterfactual", "pami") for member in spec.members or (spec,))
    return cost.forwards + cost.backwards <= MOST_FORWARDS and not slow and max(numbers, default=0) <= 1000


def test_methods(model: cv.Model, photo: torch.Tensor, request: pytest.FixtureRequest) -> None:
    def explain(cases: Cases, text: str, options: dict[str, Any], how: dict[str, Any]) -> None:
        with cases.case() as messages:
            spec = resolve_method(text, **options)
            assert resolve_method(spec.text).text == spec.text, "the settled text means the same"
            if affordable(spec):
                check(cv.explain(model, photo, text, target=1, **how, **options), messages)

    names = st.sampled_from(
        ["fusion", "alpha", "n", "sigma", "samples", "removal", "layer", "start", "by", "relu", "m"]
    )
    arguments = st.sampled_from(["seed", "batch_size", "autocast", "layers", "by_head", "score", "recipe"])
    values = strategies.ODD | st.sampled_from([1, 2, 0, -1, "max", "bfloat16", True, None])
    given = {
        "text": strategies.method_texts(),
        "options": st.just({}) | st.just({}) | st.dictionaries(names, values, max_size=1),
        "how": st.just({}) | st.just({}) | st.dictionaries(arguments, values, max_size=1),
    }
    run_family("methods", request, explain, **given)


def test_metrics(model: cv.Model, photo: torch.Tensor, request: pytest.FixtureRequest) -> None:
    mask = np.zeros((1, 32, 32), dtype=bool)
    mask[:, 8:20, 4:30] = True

    def evaluate(cases: Cases, text: str) -> None:
        with cases.case():
            settled = resolve_metric(text)
            assert resolve_metric(settled.text).text == settled.text, "the settled text means the same"
            how = {"masks": mask, "target": 1, "baselines": False, "labels": [1], "distractors": [2]}
            score = cv.evaluate(model, photo, "raw-attention", text, **how)
            assert len(score.values) - score.n_valid == int(score.values.isnan().sum()), "NaN is counted as invalid"

    run_family("metrics", request, evaluate, text=strategies.metric_texts())


def test_masks(model: cv.Model, photo: torch.Tensor, request: pytest.FixtureRequest) -> None:
    explanation = cv.explain(model, photo, "raw-attention", target=1)

    def evaluate(cases: Cases, mask: Any, kind: Any, listed: bool, metric: str) -> None:
        with cases.case():
            score = cv.evaluate(model, photo, explanation, metric, masks=[mask] if listed else mask, mask_kind=kind)
            assert len(score.values) - score.n_valid == int(score.values.isnan().sum())

    kinds = st.sampled_from(["nonzero", "nonzero", "nonzero", "trimap", "voc", "", 3])
    metrics = st.sampled_from(["iou", "ap", "pointing-game", "relevance-mass"])
    given = {"mask": strategies.masks(), "kind": kinds, "listed": st.booleans(), "metric": metrics}
    run_family("masks", request, evaluate, **given)


def test_studies(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    def read(cases: Cases, text: str) -> None:
        path = tmp_path / "study.toml"
        path.write_text(text, encoding="utf-8")
        with cases.case():
            config = read_config(path)
            study = study_of(config, StudyConfig(data=None if config.data else (DataConfig("folder:x"),)))
            json.dumps(study.resolved().as_document())

    run_family("studies", request, read, text=strategies.studies())


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    state = create_state([wrapped("timm-vit")])
    with TestClient(
        create_app(unclosed(state)), base_url="http://127.0.0.1", raise_server_exceptions=False
    ) as test_client:
        yield test_client
    state.close()


def test_requests(client: TestClient, request: pytest.FixtureRequest) -> None:
    """No request makes the server stumble: 200, or 4xx with a sentence."""

    def send(cases: Cases, path: str, verb: str, fields: dict[str, Any], form: str, raw: bytes) -> None:
        files = {"image": ("a.png", raw)} if form == "file" else None
        how: dict[str, Any] = {
            "json": {"json": fields},
            "form": {"data": fields},
            "file": {"data": fields, "files": files},
            "raw": {"content": raw, "headers": {"content-type": "application/json"}},
            "query": {"params": fields},
        }[form]
        reply = client.request(verb, path, **how)
        assert reply.status_code < 500, f"{verb} {path} {how}: {reply.text[:300]}"
        if reply.status_code >= 400 and path.startswith("/api"):
            assert reply.json()["message"].strip()
        cases.outcomes["done" if reply.status_code < 400 else "refused"] += 1

    names = st.sampled_from(
        ["method", "photo", "target", "model", "layers", "heads", "seed", "score", "stream", "patch"]
    )
    quick = st.sampled_from(["legrad", "rollout", "ixg+plus", "demo", "0", "1", "true", "logit", "-1", "", "timm-vit"])
    values = quick | strategies.method_texts().filter(lambda text: "(" not in text) | strategies.TEXT.map(str)
    paths = [
        "/api/explain",
        "/api/explain",
        "/api/curve",
        "/api/trace/0",
        "/api/trace/x",
        "/api/models",
        "/api/no",
        "/",
    ]
    given = {
        "path": st.sampled_from(paths),
        "verb": st.sampled_from(["POST", "POST", "GET", "PUT"]),
        "fields": st.dictionaries(names, values | st.lists(values, max_size=2), max_size=3),
        "form": st.sampled_from(["json", "form", "form", "file", "raw", "query"]),
        "raw": strategies.damaged()
        | st.binary(max_size=30)
        | st.just(b'{"method": "legrad"}')
        | st.just(b'{"a": NaN}'),
    }
    run_family("requests", request, send, **given)
