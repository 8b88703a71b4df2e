"""`cv.doctor`: every broken model fails one check, healthy ones none, and models are unchanged afterwards."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import clairvit as cv
from clairvit.diagnostics import explanations
from clairvit.diagnostics.context import DoctorContext, RegisteredCheck, passed, registered_checks
from clairvit.diagnostics.explanations import CLASS_METHODS, DELETION_METHODS, DeletionResult, min_images_for_test
from clairvit.diagnostics.inspection import snapshot
from clairvit.errors import BadInput, ClairWarning, UnknownName
from clairvit.methods.spec import resolve_method
from clairvit.models.images import prepare
from helpers.broken_models import (
    BROKEN,
    ActiveDropout,
    Artefacts,
    Cancelling,
    Counting,
    Plain,
    healthy,
    uninitialised,
    wrapped,
)
from helpers.broken_models import with_unknown_activation as unknown_activation
from helpers.module_fingerprint import differences, fingerprint, surroundings
from helpers.tiny_models import STRANGE, ZOO, fresh
from helpers.tiny_models import wrapped as tiny_wrapped

NAMES = {
    *("model", "device", "precision", "mode", "parameters", "compile", "parallel", "quantisation", "preprocessing"),
    *("forward", "finite scores", "side effects", "determinism", "batch independence", "scores", "checkpointing"),
    *("gradient", "activation", "labels", "layout", "trace", "attention", "token gradient", "rules"),
    *("completeness", "residual cancellation", "outlier tokens", "class sensitivity", "deletion", "methods"),
    "integrity",
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_model_is_named_by_one_line(name: str) -> None:
    build, lines, piece = BROKEN[name]
    diagnosis = cv.doctor(build())
    assert [check.name for check in diagnosis.failures] == lines.split(", ")
    line = lines.split(", ")[-1]
    assert piece in diagnosis[line].finding
    assert diagnosis[line].advice or name in ("squeeze", "no logits", "wrong layout")  # their errors say it themselves
    assert not diagnosis.ok
    assert {check.name for check in diagnosis.checks} == NAMES


def test_twenty_broken_models_and_more() -> None:
    assert len(BROKEN) >= 20
    assert len({line for _, line, _ in BROKEN.values()}) >= 15  # different lines


def test_wrong_labels_are_named() -> None:
    model = cv.Model(healthy(), "tiny", wrapped(healthy()).preprocess, labels=("cat", "dog"))
    diagnosis = cv.doctor(model)
    assert diagnosis["labels"].status == "fail"
    assert "2 labels for 7 outputs" in diagnosis["labels"].finding


HEALTHY = ["timm-vit", "timm-dinov2-reg4", "timm-siglip-map", "hf-vit-sdpa", "hf-dinov2-eager", "torchvision-vit"]
OTHERS = ["open_clip-tower", "home-lucid", "home-loop", "home-in-place", "home-encoder-post-norm", "home-mean-pool"]


@pytest.mark.parametrize("name", [*HEALTHY, *OTHERS])
def test_a_healthy_model_has_no_failing_line(name: str) -> None:
    diagnosis = cv.doctor(tiny_wrapped(name))
    assert not diagnosis.failures, str(diagnosis)
    tiny = ZOO[name]
    layout = diagnosis["layout"].details
    assert (tuple(layout["grid"]), layout["prefix"], layout["pooling"], layout["blocks"]) == (
        tiny.grid,
        tiny.prefix,
        tiny.pooling,
        tiny.layers,
    )
    assert diagnosis["trace"].details["gaps"][-1]["bound"] < 1e-9  # the sharp comparison, in float64


@pytest.mark.parametrize("name", STRANGE)
def test_windows_channels_and_cnns_have_no_failing_line(name: str) -> None:
    strange = STRANGE[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = strange.make().eval()
    diagnosis = cv.doctor(cv.wrap(module, size=strange.size, name=name))
    assert not diagnosis.failures, str(diagnosis)


@pytest.mark.slow
def test_the_built_in_model_passes() -> None:
    diagnosis = cv.doctor("pets")
    assert diagnosis.ok
    assert not diagnosis.warnings, str(diagnosis)
    assert diagnosis.images == ("demo",)


# what warns -----------------------------------------------------------------------------------------------------------


def test_cancelling_blocks_warn() -> None:
    check = cv.doctor(wrapped(uninitialised(Cancelling)))["residual cancellation"]
    assert check.status == "warn"
    assert check.details["ratios"][0][0] == pytest.approx(19)  # |x| + |−0.9 x| over |0.1 x|


def test_artefact_tokens_warn() -> None:
    check = cv.doctor(wrapped(uninitialised(Artefacts)))["outlier tokens"]
    assert check.status == "warn"
    assert check.details["count"] == [1]
    assert check.details["largest_ratio"][0] > 10
    assert "registers" in check.advice


def test_an_activation_without_a_rule_breaks_completeness() -> None:
    diagnosis = cv.doctor(wrapped(uninitialised(unknown_activation)))
    assert diagnosis["rules"].status == "fail"
    check = diagnosis["completeness"]
    assert check.status == "warn"
    assert check.details["difference"][0] > 1e6 * check.details["bound"][0]


def test_training_mode_warns_where_it_matters() -> None:
    module = healthy()
    module.train()
    assert cv.doctor(wrapped(module))["mode"].status == "pass"  # no layer of it behaves differently
    module.blocks[0].mlp.append(nn.Dropout(0.1))  # type: ignore[union-attr,operator,index]
    diagnosis = cv.doctor(wrapped(module))
    assert diagnosis["mode"].status == "warn"
    assert diagnosis["determinism"].status == "pass"  # examined in eval mode
    assert module.training


def test_half_precision_warns() -> None:
    diagnosis = cv.doctor(wrapped(healthy().bfloat16()))
    assert diagnosis["precision"].status == "warn"
    assert not diagnosis.failures, str(diagnosis)


def test_flags_of_gradient_checkpointing_are_no_problem() -> None:
    model = fresh("timm-vit")
    model.module.set_grad_checkpointing(True)  # type: ignore[operator]
    check = cv.doctor(model)["checkpointing"]
    assert check.status == "pass"
    assert "grad_checkpointing" in check.finding


def test_wrappers_are_named() -> None:
    model = cv.wrap(nn.DataParallel(healthy()), size=32)
    assert "DataParallel was removed" in cv.doctor(model)["parallel"].finding
    compiled = torch.compile(healthy())
    assert "torch.compile was removed" in cv.doctor(cv.wrap(compiled, size=32))["compile"].finding  # type: ignore[arg-type]


def test_assumed_preprocessing_warns() -> None:
    assert cv.doctor(cv.wrap(healthy(), size=32))["preprocessing"].status == "warn"
    assert cv.doctor(wrapped(healthy()))["preprocessing"].status == "pass"


# deletion -------------------------------------------------------------------------------------------------------------


def measured(gains: list[float], monkeypatch: pytest.MonkeyPatch) -> cv.results.Check:
    """The line for images on which the map gains so much over random ones."""
    ours = np.full(len(gains), 0.5)
    result = DeletionResult("ixg", ours, np.stack([ours + gains]), largest_change=0.3)
    monkeypatch.setattr(explanations, "measure_deletion", lambda *_: result)
    return cv.doctor(wrapped(healthy()), method="ixg")["deletion"]


def test_six_images_are_the_fewest_that_can_be_significant() -> None:
    assert min_images_for_test() == 6  # 2 / 2^6 = 0.031 is the first below 0.05


def test_better_on_six_images(monkeypatch: pytest.MonkeyPatch) -> None:
    check = measured([0.1, 0.2, 0.1, 0.3, 0.2, 0.1], monkeypatch)
    assert check.status == "pass"
    assert check.details["p"] == 2 / 64
    assert check.finding.startswith("Better than random")


def test_worse_on_six_images(monkeypatch: pytest.MonkeyPatch) -> None:
    check = measured([-0.1, -0.2, -0.1, -0.3, -0.2, -0.1], monkeypatch)
    assert check.status == "fail"
    assert check.finding.startswith("Worse than random")


def test_better_on_one_image_is_one_image(monkeypatch: pytest.MonkeyPatch) -> None:
    check = measured([0.4], monkeypatch)
    assert check.status == "pass"
    assert "1 image, and with fewer than 6 no test" in check.finding
    assert "6 or more images" in check.advice


@pytest.mark.parametrize("gains", [[0.1, -0.2, 0.1, -0.1, 0.05, 0.0], [-0.1], [0.0, 0.0]])
def test_no_better_than_random_warns(gains: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    check = measured(gains, monkeypatch)
    assert check.status == "warn"
    assert check.finding.startswith("Not better than random")


def test_deletion_runs_on_all_images() -> None:
    images = torch.randn(9, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    diagnosis = cv.doctor(wrapped(healthy()), images)
    assert diagnosis["deletion"].details["images"] == 9
    assert diagnosis["forward"].details["shape"] == [8, 7]  # the other checks look at eight of them
    assert len(diagnosis.images) == 9


# what is promised ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("build", [Plain, ActiveDropout, Counting])
def test_the_model_is_unchanged(build: Any) -> None:
    module = uninitialised(build)
    module.train()
    module.head.weight.grad = torch.ones_like(module.head.weight)  # type: ignore[union-attr,arg-type]
    before, around = fingerprint(module), surroundings()
    cv.doctor(wrapped(module))
    changed = differences(before, fingerprint(module))
    counted = [name for name in changed if name.startswith("calls: buffer")]
    assert changed == counted  # written to and put back: the same bits, a higher version
    assert all(before[name][2] == fingerprint(module)[name][2] for name in counted)
    assert differences(around, surroundings()) == []


class Interrupted(Plain):
    """Ctrl-C in the middle of the sixth forward."""

    forwards = 0

    def through(self, x: Tensor) -> Tensor:
        type(self).forwards += 1
        if type(self).forwards == 6:
            raise KeyboardInterrupt
        return super().through(x)


def test_ctrl_c_ends_the_checks_and_leaves_the_model_unchanged() -> None:
    Interrupted.forwards = 0
    module = uninitialised(Interrupted)
    module.train()
    before = snapshot(module)
    with pytest.raises(KeyboardInterrupt):
        cv.doctor(wrapped(module))
    assert snapshot(module) == before


def test_an_exception_in_a_check_is_a_failure_of_that_check(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(_: DoctorContext) -> cv.results.Check:
        raise IndexError("out of range")

    def fine(_: DoctorContext) -> cv.results.Check:
        return passed("Fine.")

    order = (
        RegisteredCheck("first", (), stop),
        RegisteredCheck("second", (), fine),
        RegisteredCheck("third", ("first",), fine),
    )
    monkeypatch.setattr("clairvit.diagnostics.doctor.registered_checks", lambda: order)
    diagnosis = cv.doctor(wrapped(healthy()))
    assert [check.status for check in diagnosis.checks] == ["fail", "pass", "skip"]
    assert "IndexError: out of range" in diagnosis["first"].finding
    assert diagnosis["third"].finding == "Not checked, because of 'first'."


def test_every_check_needs_checks_that_run_before_it() -> None:
    names: list[str] = []
    for step in registered_checks():
        assert {*step.needs} <= {*names}, step.name
        names.append(step.name)
    assert {*names} == NAMES
    assert len(names) == len(NAMES)


def test_every_check_is_in_the_docs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text(encoding="utf-8")
    named = {name.strip() for row in page.splitlines() if row.startswith("| ") for name in row.split("|")[1].split(",")}
    assert named - {"check"} == NAMES


def test_methods_in_the_advice_exist() -> None:
    for name in (
        *DELETION_METHODS,
        *CLASS_METHODS,
        "genatt",
        "legrad",
        "attnlrp+plus",
        "decompx+skipplus",
        "leave-one-out",
    ):
        assert resolve_method(name).text == name
    for name in ("rollout", "occlusion", "lime", "raw-attention", "cp-lrp"):
        assert resolve_method(name).text == name


def test_which_methods_apply_is_what_compare_says() -> None:
    model = tiny_wrapped("home-loop")
    details = cv.doctor(model)["methods"].details
    tried = [*details["apply"], *details["refused"]]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ClairWarning)  # of maps that are zero
        comparison = cv.compare(model, "demo", tried, skip=True)
    assert {*comparison} == {*details["apply"]}
    assert comparison.skipped == details["refused"]


def test_the_report_as_text_and_as_plain_values() -> None:
    diagnosis = cv.doctor(BROKEN["NaN weights"][0]())
    text = str(diagnosis)
    assert "fail  finite scores" in text
    assert "→ Load the weights again" in text
    assert text.endswith("tiny cannot be explained as it is: see finite scores.")
    assert max(map(len, text.splitlines())) <= 120
    document = json.loads(json.dumps(diagnosis.to_dict(), allow_nan=False))
    assert document["ok"] is False
    assert document["checks"][0]["name"] == "model"
    with pytest.raises(KeyError, match="the checks are model, device"):
        diagnosis["liver"]


def test_inputs_that_doctor_takes(tmp_path: Any) -> None:
    module = healthy()
    module.image_size = 32  # type: ignore[assignment]
    assert cv.doctor(module)["forward"].status == "pass"
    with pytest.raises(UnknownName, match="no model 'pet'"):
        cv.doctor("pet")
    with pytest.raises(BadInput, match="doctor got a int"):
        cv.doctor(3)  # type: ignore[arg-type]
    with pytest.raises(UnknownName, match="no method 'legard'"):
        cv.doctor(wrapped(module), method="legard")
    with pytest.raises(BadInput, match=r"cat\.jpg"):
        cv.doctor(wrapped(module), str(tmp_path / "cat.jpg"))
    scripted = cv.doctor(torch.jit.trace(healthy(), torch.zeros(1, 3, 32, 32)))
    assert [check.name for check in scripted.failures] == ["model"]
    assert "scripted or traced" in scripted["model"].finding


def test_images_of_every_kind(tmp_path: Any) -> None:
    from PIL import Image

    pictures = []
    for place in range(2):
        path = tmp_path / f"{place}.png"
        Image.fromarray(np.full((40, 40, 3), 80 * place + 40, np.uint8)).save(path)
        pictures.append(str(path))
    model = wrapped(healthy())
    assert cv.doctor(model, pictures).images == prepare(pictures, model).names
    assert len(cv.doctor(model, Image.open(pictures[0])).images) == 1
    assert len(cv.doctor(model, torch.zeros(3, 32, 32)).images) == 1
