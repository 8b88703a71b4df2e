"""The API says what the library says: same maps, same attention, same curves; and refuses in clear words."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from fastapi.testclient import TestClient
from PIL import Image

import clairvit as cv
from clairvit.errors import BadInput
from clairvit.methods.recommended import recommended_methods
from clairvit.methods.registry import list_methods
from clairvit.methods.spec import MethodSpec, resolve_method
from clairvit.web import handlers
from clairvit.web.app import create_app
from clairvit.web.job_queue import JobQueue
from clairvit.web.result_cache import ResultCache
from clairvit.web.schemas import CurveRequest, ExplainRequest
from clairvit.web.state import AppState, create_state, resolve_request
from helpers.app_lifespan import unclosed
from helpers.module_fingerprint import fingerprint
from helpers.rounding import assert_same, growth

pytestmark = pytest.mark.filterwarnings("default::clairvit.errors.ClairWarning")
SENT = 1.0  # numbers are sent as float32: rounded once


@pytest.fixture(scope="module")
def wide() -> cv.Model:
    """In float64, so that the server's numbers and the library's are the same but for rounding."""
    return cv.load("pets", dtype="float64")


@pytest.fixture(scope="module")
def wide_client(wide: cv.Model) -> Iterator[TestClient]:
    state = create_state([wide], time_limit=300)
    with TestClient(
        create_app(unclosed(state)), base_url="http://127.0.0.1", raise_server_exceptions=False
    ) as test_client:
        yield test_client
    state.close()


def array(numbers: dict[str, Any]) -> np.ndarray:
    return np.frombuffer(base64.b64decode(numbers["float32"]), "<f4").reshape(numbers["shape"])


def jpeg(size: tuple[int, int] = (320, 240)) -> bytes:
    buffer = io.BytesIO()
    Image.radial_gradient("L").resize(size).convert("RGB").save(buffer, "JPEG")
    return buffer.getvalue()


def test_models_and_limits(client: TestClient) -> None:
    reply = client.get("/api/models").json()
    (card,) = reply["models"]
    assert (card["name"], card["grid"], card["prefix"], card["layers"], card["heads"]) == ("pets", [14, 14], 1, 12, 3)
    assert len(card["labels"]) == 37
    assert reply["limits"]["upload_bytes"] == 20 * 2**20
    assert reply["limits"]["pixels"] == 50_000_000


def test_every_method_is_listed_once_by_family(client: TestClient) -> None:
    reply = client.get("/api/methods").json()
    names = [entry["name"] for entry in reply["methods"]]
    assert sorted(names) == sorted(entry.name for entry in list_methods() if entry.name not in ("smooth", "ensemble"))
    assert reply["families"][0] == "attention"
    assert [entry["method"] for entry in reply["recommended"]] == [entry.method for entry in recommended_methods()]
    assert all(entry["summary"] for entry in reply["methods"])
    lime = next(entry for entry in reply["methods"] if entry["name"] == "lime")
    assert lime["slow"]
    assert not lime["one_trace"]


def test_explain_is_the_librarys_explain(wide_client: TestClient, wide: cv.Model) -> None:
    form = {"method": "ixg+plus", "target": ["Bengal", "3"], "layers": "true", "heads": "true", "picture": "true"}
    reply = wide_client.post("/api/explain", data=form).json()
    expected = cv.explain(wide, "demo", "ixg+plus", targets=["Bengal", 3], layers=True, by_head=True)
    (entry,) = reply["explanations"]
    assert entry["method"] == "ixg+plus"
    assert entry["signed"]
    assert_same(array(entry["maps"]), expected.maps, growth=SENT)
    assert expected.layers is not None
    assert expected.heads is not None
    assert_same(array(entry["layers"]), expected.layers, growth=SENT)
    assert_same(array(entry["heads"]["maps"]), expected.heads.maps, growth=SENT)
    assert reply["targets"] == list(expected.targets)
    # float32 probabilities: exponentials of logits of a size of 10, over the sum of 37
    assert_same(
        reply["probabilities"], expected.probabilities, magnitude=10.0, growth=growth(2, 37), dtype=torch.float32
    )
    assert len(reply["top"]) == 5
    with Image.open(io.BytesIO(base64.b64decode(reply["picture"]))) as picture:
        assert picture.size == (224, 224)


def test_all_one_trace_methods_at_once(client: TestClient) -> None:
    reply = client.post("/api/explain", data={"method": "all"}).json()
    names = [explanation["method"] for explanation in reply["explanations"]]
    assert sorted([*names, *reply["skipped"]]) == sorted(method.name for method in list_methods() if not method.slow)
    assert list(reply["skipped"]) == ["cam"]
    assert all(explanation["maps"]["shape"] == [1, 14, 14] for explanation in reply["explanations"])
    cards = {method["name"]: method for method in client.get("/api/methods").json()["methods"]}
    for entry in reply["explanations"]:
        assert entry["signed"] == cards[entry["method"]]["signed"], entry["method"]


def test_an_upload_is_found_by_its_id(wide_client: TestClient, wide: cv.Model) -> None:
    data = jpeg()
    first = wide_client.post("/api/explain", files={"image": ("a/../../x.jpg", data, "image/jpeg")}).json()
    again = wide_client.post("/api/explain", data={"photo": first["photo"]}).json()
    assert len(first["photo"]) == 32
    maps = [array(reply["explanations"][0]["maps"]) for reply in (first, again)]
    expected = cv.explain(wide, Image.open(io.BytesIO(data))).maps
    for heatmap_sent in maps:
        assert_same(heatmap_sent, expected, growth=SENT)


def test_record_and_arrays_to_keep(client: TestClient) -> None:
    response = client.post("/api/explain", data={"reply": "record"})
    assert response.json()["method"] == "attnlrp+plus"
    assert np.asarray(response.json()["maps"]).shape == (1, 14, 14)
    arrays = np.load(io.BytesIO(client.post("/api/explain", data={"reply": "npz"}).content), allow_pickle=False)
    assert arrays["maps"].shape == (1, 14, 14)
    assert json.loads(str(arrays["about"]))["method"] == "attnlrp+plus"


def test_features_are_the_librarys(wide_client: TestClient, wide: cv.Model) -> None:
    expected = cv.features(wide, "demo", layer=7)
    reply = wide_client.get("/api/features/7").json()
    assert (reply["grid"], reply["patch"], reply["layer_name"]) == ([14, 14], None, "block 7")
    assert_same(array(reply["cosine"]), expected.similarities()[0], growth=growth(1, 192) + SENT, dtype=torch.float32)
    for name in ("pca", "limits", "norms"):
        assert_same(array(reply[name]), getattr(expected, name), growth=SENT, dtype=torch.float32)
    assert_same(reply["explained_variance_ratio"], expected.explained_variance_ratio.tolist())
    row = wide_client.get("/api/features/7", params={"y": 0.5, "x": 0.99}).json()
    assert row["patch"] == 7 * 14 + 13
    assert_same(array(row["cosine"])[0], expected.similarity(7, 13)[0].flatten(), growth=SENT, dtype=torch.float32)
    refusals = [
        ({"y": 0.5}, "One of y and x was given; expected both"),
        ({"y": 1, "x": 0}, "less than 1"),
        ({"y": 0, "x": 0, "of_other": True}, "there is one photo"),
    ]
    for params, words in refusals:
        refused = wide_client.get("/api/features/7", params=params)
        assert refused.status_code == 422
        assert words in refused.json()["message"]
    assert "expected 0 to 11" in wide_client.get("/api/features/12").json()["message"]


def test_features_of_two_photos_are_in_one_basis(wide_client: TestClient, wide: cv.Model) -> None:
    """Both are the demo: equal components, and a patch of one is as like the other's as its own."""
    expected = cv.features(wide, ["demo", "demo"], layer=3)
    reply = wide_client.get("/api/features/3", params={"other": "demo"}).json()
    assert array(reply["pca"]).shape == (2, 14, 14, 3)
    assert_same(array(reply["pca"]), expected.pca, growth=SENT, dtype=torch.float32)
    assert array(reply["cosine"]).shape == (392, 392)
    of_other = {"other": "demo", "y": 0.5, "x": 0.99, "of_other": True}
    row = wide_client.get("/api/features/3", params=of_other).json()
    assert row["patch"] == 196 + 7 * 14 + 13
    cosines = expected.similarity(7, 13, image=1).flatten()
    assert_same(array(row["cosine"])[0], cosines, growth=SENT, dtype=torch.float32)
    assert wide_client.get("/api/features/3", params={"other": "0" * 32}).status_code == 404


def test_trace_is_the_librarys_attention(wide_client: TestClient, wide: cv.Model) -> None:
    A = cv.trace(wide, "demo").layers[7].A[0]
    reply = wide_client.get("/api/trace/7").json()
    assert_same(array(reply["attention"]), A.mean(0), growth=SENT)
    row_reply = wide_client.get("/api/trace/7", params={"head": 2, "patch": 5}).json()
    assert row_reply["attention"]["shape"] == [1, 197]
    assert_same(array(row_reply["attention"])[0], A[2, 6], growth=SENT)
    for head, fused in (("min", A.amin(0)), ("max", A.amax(0))):
        reply = wide_client.get("/api/trace/7", params={"head": head}).json()
        assert_same(array(reply["attention"]), fused, growth=SENT)


def test_curve_is_the_librarys_deletion(wide_client: TestClient, wide: cv.Model) -> None:
    reply = wide_client.post("/api/curve", json={"steps": 3}).json()
    for name in ("deletion", "insertion"):
        score = cv.evaluate(wide, ["demo"], "attnlrp+plus", name, steps=3, ends=True)
        assert_same(reply[name]["method"]["area"], score.values[0])
        low, mean, high = (np.array(reply[name]["random"][kind])[1:-1] for kind in ("low", "mean", "high"))
        assert (low < mean - 1e-6).all()
        assert (mean < high - 1e-6).all()
    assert reply["deletion"]["counts"] == [0, 49, 98, 147, 196]
    assert sorted(reply["rank"]) == list(range(196))
    expected = cv.explain(wide, "demo").maps.flatten()
    assert reply["rank"].index(0) == int(expected.argmax())


def test_check_is_the_librarys(wide_client: TestClient, wide: cv.Model) -> None:
    reply = wide_client.post("/api/check", json={"method": "genatt"}).json()
    (check,) = cv.explain(wide, "demo", "genatt").check()
    assert reply["verdict"] == check.verdict
    assert reply["sentence"] == check.sentence
    assert reply["badge"] == check.badge
    assert reply["answer"]["sentence"] == check.answer.sentence
    assert reply["marked"] == list(check.marked)
    assert reply["target"] == check.target
    assert_same(reply["removals"][0]["top"], check.removals[0].top)
    several = wide_client.post("/api/check", json={"method": "all"})
    assert several.status_code == 422
    assert "one method" in several.json()["message"]


def test_streams_tell_progress_and_then_the_reply(client: TestClient) -> None:
    text = client.post("/api/explain", data={"method": "lime(samples=64)", "stream": "true"}).text
    *progress, last = [json.loads(line) for line in text.splitlines()]
    assert last["reply"]["explanations"][0]["method"] == "lime(samples=64)"
    assert any(entry["progress"]["steps"] > 0 for entry in progress)
    (document,) = [
        json.loads(line)
        for line in client.post("/api/curve", json={"target": "Pug?", "stream": True}).text.splitlines()
        if "problem" in line
    ]
    assert "Pug" in document["problem"]["message"]


def test_a_bug_in_a_stream_is_reported_without_details(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clairvit.web.handlers.explain_photo", lambda *_: 1 / 0)
    text = client.post("/api/explain", data={"stream": "true", "seed": "77"}).text  # not cached
    problem = json.loads(text.splitlines()[-1])["problem"]
    assert problem["kind"] == "internal-error"
    assert "zero" not in text


@pytest.mark.parametrize(
    ("form", "status", "words"),
    [
        ({"method": "legrat"}, 422, "Did you mean 'legrad'"),
        ({"method": "lime(samples=100000000)"}, 422, "at most 10000"),
        ({"method": "rise(cells=33)"}, 422, "cells=33; expected at most 32"),
        ({"method": "ensemble(legrad,hsic(cells=10000))"}, 422, "at most 32"),
        ({"method": "lime(width=nan)"}, 422, "width=nan"),
        ({"method": "__import__('os')"}, 422, "method"),
        ({"target": "Begnal"}, 422, "Did you mean 'Bengal'"),
        ({"target": "99999999999999999999999"}, 422, "37"),
        ({"model": "/etc/passwd"}, 422, "There is no model"),
        ({"photo": "/etc/passwd"}, 422, "photo"),
        ({"photo": "0" * 32}, 404, "send the file again"),
        ({"colour": "red"}, 422, "colour"),
        ({"seed": "-1"}, 422, "seed"),
        ({"image": "not a file"}, 422, "image"),
        ({"method": ["legrad", "rollout"], "layers": "true"}, 422, "name one"),
        ({"method": ["legrad", "rollout"], "reply": "npz"}, 422, "name one"),
        ({"method": "cam"}, 422, "pooling"),
    ],
)
def test_mistakes_are_refused_with_a_reason(client: TestClient, form: dict[str, Any], status: int, words: str) -> None:
    response = client.post("/api/explain", data=form)
    assert response.status_code == status, response.text
    assert words in response.json()["message"]


def test_work_without_end_is_refused_before_it_begins() -> None:
    assert resolve_request(["rise(samples=9999)"], 196)[1] == "slow"
    with pytest.raises(BadInput, match="passes of the model"):
        resolve_request(["rise(samples=9999)"], 196, targets=3)


def test_curves_and_many_methods_do_not_delay_quick_maps(
    state: AppState, client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[str] = []
    submit = JobQueue.submit
    monkeypatch.setattr(JobQueue, "submit", lambda queue, work: (used.append(queue.name), submit(queue, work))[1])
    client.post("/api/curve", json={"steps": 1})
    client.post("/api/curve", json={"steps": 1, "method": "occlusion(window=7,stride=7)"})
    client.post("/api/explain", data={"method": ["legrad", "rollout"]})
    client.get("/api/trace/0")
    client.post("/api/check", json={})
    assert used == ["long", "slow", "quick", "quick", "long"]


def test_the_time_limit_is_reported_and_leaves_the_model_as_it_was(
    state: AppState, client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = state.models["slow"]["pets"].module
    before = fingerprint(module)
    monkeypatch.setattr(state.queues["slow"], "time_limit", 0.5)
    response = client.post("/api/explain", data={"method": "rise"})
    assert (response.status_code, response.json()["kind"]) == (422, "too-slow")
    assert "quicker method" in response.json()["message"]
    streamed = client.post("/api/explain", data={"method": "rise", "stream": "true"})
    assert json.loads(streamed.text.splitlines()[-1])["problem"] == response.json()
    assert fingerprint(module) == before


def test_few_perturbed_images_are_in_memory_at_once(state: AppState, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass forwards and backwards over fifty of them held 1.4 GB."""
    model, photo = state.models["quick"]["pets"], state.uploads.find("demo")
    seen: list[int] = []
    handle = model.module.register_forward_pre_hook(lambda _, given: seen.append(len(given[0])))
    try:
        for text in ("smoothgrad(n=20)", "integrated-gradients(steps=20)", "rise(samples=20,removal=mean)"):
            handlers.explain_photo(ResultCache(), model, photo, [resolve_method(text)], ExplainRequest())
        spec = resolve_method("rollout")
        (explanation,) = handlers.explain_photo(ResultCache(), model, photo, [spec], ExplainRequest()).values()
        handlers.curve_response(model, photo, spec, explanation, CurveRequest(steps=3, removal="mean"))
    finally:
        handle.remove()
    assert max(seen) == 8


def test_layers_heads_and_patches_that_are_not_there(client: TestClient) -> None:
    assert client.get("/api/trace/12").json()["message"] == "Layer 12 was requested; expected 0 to 11."
    assert (
        client.get("/api/trace/0", params={"head": 3}).json()["message"]
        == "Head 3 was requested; expected 0 to 2, or mean, min, max."
    )
    assert (
        client.get("/api/trace/0", params={"patch": 196}).json()["message"]
        == "Patch 196 was requested; expected 0 to 195."
    )
    assert client.get("/api/trace/0", params={"head": "sum"}).status_code == 422
    assert client.get("/api/nothing").json()["kind"] == "not-found"


def test_quick_and_slow_go_their_own_ways(state: AppState) -> None:
    assert resolve_request(["legrad", "rollout"], 196)[1] == "quick"
    assert resolve_request(["all"], 196)[1] == "long"
    assert len(resolve_request(["all"] * 64, 196)[0]) == len(resolve_request(["all"], 196)[0])
    for slow in ("lime", "attention-flow", "raw-attention+flow", "smoothgrad", "ensemble(legrad,raw-attention+flow)"):
        assert resolve_request([slow], 196)[1] == "slow"
    quick, slow_model = state.models["quick"]["pets"].module, state.models["slow"]["pets"].module
    assert quick is not slow_model
    assert all(a is b for a, b in zip(quick.parameters(), slow_model.parameters(), strict=True))


@pytest.mark.parametrize(
    "request_parts",
    [
        {"json": {"method": "rollout"}},
        {"content": "method=rollout", "headers": {"content-type": "text/plain"}},
        {"content": b"method=rollout"},
        {"params": {"method": "rollout"}},
    ],
    ids=["json", "text", "no type", "query"],
)
def test_parameters_that_are_no_form_are_refused(client: TestClient, request_parts: dict[str, Any]) -> None:
    """They were ignored, and the demo was explained by the default method."""
    response = client.post("/api/explain", **request_parts)
    assert (response.status_code, response.json()["kind"]) == (415, "bad-request")
    assert "multipart/form-data" in response.json()["message"]


def test_broken_forms_and_two_photos_are_refused(client: TestClient) -> None:
    for content_type in ("multipart/form-data", "multipart/form-data; boundary=other"):
        response = client.post("/api/explain", content=b"--x\r\nrubbish", headers={"content-type": content_type})
        assert response.status_code in (400, 415, 422), response.text
    files = [("image", ("a.jpg", jpeg(), "image/jpeg")), ("image", ("b.jpg", jpeg((64, 64)), "image/jpeg"))]
    response = client.post("/api/explain", files=files)
    assert (response.status_code, "one in each" in response.json()["message"]) == (422, True)


def test_what_was_shown_is_not_computed_again(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files, check and curve of a slow method use the map that the page has."""
    computed: list[str] = []
    explain, submit = handlers.explain, JobQueue.submit

    def counted(model: Any, batch: Any, method: MethodSpec, *arguments: Any, **options: Any) -> Any:
        computed.append(method.text)
        return explain(model, batch, method, *arguments, **options)

    monkeypatch.setattr(handlers, "explain", counted)
    monkeypatch.setattr(JobQueue, "submit", lambda queue, work: (used.append(queue.name), submit(queue, work))[1])
    used: list[str] = []
    method = "lime(samples=40)"
    reply = client.post("/api/explain", data={"method": method, "seed": 5}).json()
    index = reply["classes"][0]
    record = client.post("/api/explain", data={"method": method, "seed": 5, "target": index, "reply": "record"}).json()
    assert np.array_equal(np.float32(record["maps"]), array(reply["explanations"][0]["maps"]))
    client.post("/api/explain", data={"method": method, "seed": 5, "target": index, "reply": "npz"})
    check = client.post("/api/check", json={"method": method, "seed": 5, "target": str(index)}).json()
    assert check["verdict"] is not None
    client.post("/api/curve", json={"method": method, "seed": 5, "target": str(index), "steps": 1})
    assert computed == [method]
    assert used == ["slow", "quick", "quick", "long", "long"]
    client.post("/api/explain", data={"method": method, "seed": 6, "reply": "record"})
    assert computed == [method] * 2, "another seed is another map"


def test_files_can_be_streamed_with_progress(client: TestClient) -> None:
    text = client.post("/api/explain", data={"method": "lime(samples=32)", "reply": "npz", "stream": "true"}).text
    arrays = np.load(io.BytesIO(base64.b64decode(json.loads(text.splitlines()[-1])["reply"]["base64"])))
    assert arrays["maps"].shape == (1, 14, 14)


def test_the_film_gives_no_second_verdict(client: TestClient) -> None:
    """Badge and film once contradicted each other on 7 of 10 photos: the check alone judges."""
    reply = client.post("/api/curve", json={"method": "random", "steps": 3}).json()
    for name in ("deletion", "insertion"):
        assert sorted(reply[name]) == ["counts", "method", "random", "x"]


def test_pictures_that_mean_little_come_with_a_caution(client: TestClient) -> None:
    def cautions(image: Image.Image) -> str:
        buffer = io.BytesIO()
        image.save(buffer, "PNG")
        reply = client.post("/api/explain", files={"image": ("a.png", buffer.getvalue(), "image/png")}).json()
        return " ".join(reply["cautions"])

    assert "one colour" in cautions(Image.new("RGB", (300, 200), "grey"))
    assert "40 × 30 pixels" in cautions(Image.radial_gradient("L").resize((40, 30)))
    assert client.post("/api/explain").json()["cautions"] == []
    unsure = [cautions(Image.effect_noise((224, 224), sigma).convert("RGB")) for sigma in (20, 60, 120)]
    assert any("37 classes" in text for text in unsure)


def test_a_method_without_layers_is_not_computed_again_for_them(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {"method": "gradcam", "layers": "true", "target": "3"}
    first = client.post("/api/explain", data=fields).json()
    assert first["explanations"][0]["layers"] is None
    monkeypatch.setattr("clairvit.web.handlers.explain_photo", lambda *_: pytest.fail("computed again"))
    assert client.post("/api/explain", data=fields).json() == first


def test_a_refined_map_goes_on_from_the_passes_that_were_run(wide_client: TestClient, wide: cv.Model) -> None:
    """16 passes, then 32: the second request runs 16, and its map is that of 32 at once."""
    fields = {"photo": "demo", "method": "refine(genatt,passes=16)"}
    (first,) = wide_client.post("/api/explain", data=fields).json()["explanations"]
    assert first["forwards"] == 1 + 1 + 16
    assert first["refinement"][0].startswith("After 16 passes, ")
    assert first["title"].endswith(", refined by 16 passes")
    (second,) = wide_client.post("/api/explain", data=fields | {"method": "refine(genatt,passes=32)"}).json()[
        "explanations"
    ]
    assert second["forwards"] - first["forwards"] == 2 + 16
    expected = cv.explain(wide, "demo", "genatt", passes=32).maps
    assert_same(array(second["maps"]), expected.numpy(), growth=SENT, dtype=torch.float32)
    (plain,) = wide_client.post("/api/explain", data=fields | {"method": "genatt"}).json()["explanations"]
    assert plain["refinement"] is None
