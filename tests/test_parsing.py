"""A method or metric that is typed is parsed once, wherever it is used after that."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

import clairvit as cv
from clairvit.bench.plan import Specs
from clairvit.cli import main
from clairvit.errors import UnknownName
from clairvit.methods import spec as methods
from clairvit.methods.registry import METHODS
from clairvit.metrics import registry as metrics
from clairvit.metrics.accumulator import BASELINES
from clairvit.web.app import create_app
from clairvit.web.state import create_state
from helpers.other_packages import METHOD
from helpers.small_study import ARCHITECTURE, photos, weights
from helpers.tiny_models import pixels, wrapped

KIND = "timm-vit"
METHOD_TEXTS, METRIC_TEXTS = ["saliency", "rollout(fusion=max)"], ["deletion(steps=3)", "sparseness"]
TYPED = {*METHOD_TEXTS, *METRIC_TEXTS}


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each text was parsed, with the texts that are typed already known to the registries."""
    list(map(cv.parse_method, METHOD_TEXTS)), list(map(cv.parse_metric, METRIC_TEXTS))
    monkeypatch.setattr(methods, "_remembered", methods._remembered.__wrapped__)  # each call shows
    counts: Counter[str] = Counter()
    for module in (methods, metrics):
        parse = module.parse_spec

        def counted(text: str, parse: object = parse) -> object:
            counts[text] += 1
            return parse(text)  # type: ignore[operator]

        monkeypatch.setattr(module, "parse_spec", counted)
    return counts


def test_explain_and_compare(parsed: Counter[str]) -> None:
    model, image = wrapped(KIND), pixels(KIND)
    cv.explain(model, image, "saliency")
    assert parsed == {"saliency": 1}
    parsed.clear()
    cv.compare(model, image, METHOD_TEXTS)
    assert parsed == dict.fromkeys(METHOD_TEXTS, 1)


def test_evaluate_and_choose(parsed: Counter[str]) -> None:
    model, images = wrapped(KIND), pixels(KIND, batch=4)
    cv.evaluate(model, images, METHOD_TEXTS, METRIC_TEXTS)
    assert parsed == dict.fromkeys([*TYPED, *BASELINES], 1)
    parsed.clear()
    cv.choose(model, images, METHOD_TEXTS, METRIC_TEXTS, target=[1, 2, 3, 4])
    assert parsed == dict.fromkeys([*TYPED, *BASELINES], 1)


@pytest.mark.parametrize("command", ["bench", "evaluate", "choose"])
def test_commands(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parsed: Counter[str]) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["--model", weights(tmp_path / "tiny.safetensors"), "--arch", f"timm:{ARCHITECTURE}"]
    arguments += ["--data", photos(tmp_path / "photos", 4), "--out", "out.json" if command == "choose" else "out"]
    arguments += ["--method", ",".join(METHOD_TEXTS), "--metric", ",".join(METRIC_TEXTS)]
    assert main([command, *arguments]) == 0
    assert parsed == dict.fromkeys([*TYPED, *BASELINES], 1)


def test_a_study_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parsed: Counter[str]) -> None:
    monkeypatch.chdir(tmp_path)
    spec, data = weights(tmp_path / "tiny.safetensors"), photos(tmp_path / "photos", 4)
    (tmp_path / "study.toml").write_text(
        f'models = [{{spec = "{spec}", arch = "timm:{ARCHITECTURE}"}}]\ndata = "{data}"\n'
        f"methods = {METHOD_TEXTS}\nmetrics = {METRIC_TEXTS}\nat_once = 2\n"
    )
    assert main(["bench", "study.toml", "--out", "store"]) == 0
    assert parsed == dict.fromkeys([*TYPED, *BASELINES], 1)
    parsed.clear()
    assert main(["report", "store", "--out", "report.html", "--no-gallery"]) == 0
    assert parsed == dict.fromkeys([*TYPED, *BASELINES], 1)


def test_a_request_of_the_page(parsed: Counter[str]) -> None:
    state = create_state([cv.load("pets")], time_limit=300)
    with TestClient(create_app(state), base_url="http://127.0.0.1") as client:  # closes the state
        parsed.clear()
        photo = client.post("/api/explain", data={"method": METHOD_TEXTS[1]}).json()["photo"]
        assert parsed == {METHOD_TEXTS[1]: 1}
        parsed.clear()
        answer = client.post("/api/curve", json={"photo": photo, "method": METHOD_TEXTS[1], "steps": 3})
        assert answer.status_code == 200
        assert parsed == {METHOD_TEXTS[1]: 1}


def test_specs_are_those_of_the_present_registry() -> None:
    specs = Specs()
    with METHODS.restored():
        namespace: dict[str, object] = {"__name__": "mine"}
        exec(METHOD, namespace)
        first = specs.method("token-length")
        assert specs.method("token-length") is first
        exec(METHOD, namespace)
        assert specs.method("token-length").method is METHODS.resolve("token-length"), "of the function as it is now"
        assert specs.method("token-length") is not first
    with pytest.raises(UnknownName, match="token-length"):
        specs.method("token-length")
