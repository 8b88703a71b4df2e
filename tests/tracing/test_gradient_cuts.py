"""Forwards that leave the graph: what needs no gradient works, what does is refused with the reason, or passes."""

from __future__ import annotations

import copy
import functools
import threading
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import clairvit as cv
from clairvit.errors import NotApplicable
from clairvit.methods.registry import list_methods
from clairvit.tracing.structure import model_structure
from helpers import tiny_models as tiny
from helpers.module_fingerprint import differences, fingerprint
from helpers.rounding import assert_same

SIZE = 32
LIME = "lime(samples=20)"
WITHOUT_GRADIENT = (
    *(LIME, "kernelshap(samples=40)", "rise(samples=20)", "leave-one-out", "occlusion", "hsic(samples=20)"),
    *("scorecam(top_k=4)", "raw-attention", "rollout"),
)


class Probe(nn.Module):
    """A linear probe: the backbone's tokens are pooled and read by a linear layer."""

    def __init__(self, pooling: str) -> None:
        super().__init__()
        self.backbone = tiny.build("timm-vit" if pooling == "token" else "timm-vit-avg").double()
        self.backbone.head = nn.Identity()
        generator = torch.Generator().manual_seed(5)
        self.head = nn.Linear(self.backbone.num_features, 5).double()
        for parameter in self.head.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.backbone(x))


class NoGrad(Probe):
    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            features = self.backbone(x)
        return self.head(features)


class Decorated(Probe):
    @torch.no_grad()
    def forward(self, x: Tensor) -> Any:
        return super().forward(x)


class SetGradEnabled(Probe):
    def forward(self, x: Tensor) -> Any:
        before = torch.is_grad_enabled()
        torch.set_grad_enabled(False)
        features = self.backbone(x)
        torch.set_grad_enabled(before)
        return self.head(features)


class InferenceMode(Probe):
    @torch.inference_mode()
    def forward(self, x: Tensor) -> Any:
        return super().forward(x)


class FirstBlock(Probe):
    """The patch embedding and the first block are frozen, the rest is not: a gradient exists, and ends early."""

    def forward(self, x: Tensor) -> Any:
        vit = self.backbone
        with torch.no_grad():
            x = vit.norm_pre(vit._pos_embed(vit.patch_embed(x)))
            x = vit.blocks[0](x)
        for block in vit.blocks[1:]:
            x = block(x)
        return self.head(vit.forward_head(vit.norm(x)))


class Detached(Probe):
    def forward(self, x: Tensor) -> Any:
        return self.head(self.backbone(x).detach())


class Data(Probe):
    def forward(self, x: Tensor) -> Any:
        return self.head(self.backbone(x).data)


class DetachedPatches(Probe):
    def forward(self, x: Tensor) -> Any:
        vit = self.backbone
        x = vit.norm_pre(vit._pos_embed(vit.patch_embed(x).detach()))
        for block in vit.blocks:
            x = block(x)
        return self.head(vit.forward_head(vit.norm(x)))


class NumpyHead(Probe):
    """A classifier of another library on the features."""

    def forward(self, x: Tensor) -> Any:
        features = self.backbone(x).detach().numpy()
        weight, bias = (parameter.detach().numpy() for parameter in (self.head.weight, self.head.bias))
        return torch.from_numpy(features @ weight.T + bias)


class NumpyHeadNoGrad(NumpyHead):
    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            return torch.from_numpy(self.backbone(x).numpy() @ self.head.weight.numpy().T + self.head.bias.numpy())


PASSABLE = (NoGrad, Decorated, SetGradEnabled, InferenceMode, FirstBlock)
CUT = (*PASSABLE, Detached, Data, DetachedPatches, NumpyHead, NumpyHeadNoGrad)
REASONS = {
    NoGrad: r"under torch\.no_grad\(\) from 'backbone\.patch_embed\.proj' \(Conv2d\) on.*through_no_grad=True",
    Decorated: r"under torch\.no_grad\(\).*through_no_grad=True",
    SetGradEnabled: r"under torch\.no_grad\(\).*through_no_grad=True",
    InferenceMode: r"under torch\.inference_mode\(\).*through_no_grad=True",
    FirstBlock: r"under torch\.no_grad\(\).*through_no_grad=True",
    Detached: r"detaches its tensors in the model itself.*remove the detach\(\)",
    Data: r"detaches its tensors in the model itself.*remove the detach\(\)",
    DetachedPatches: r"detaches its tensors in the model itself.*remove the detach\(\)",
    NumpyHead: r"leaves torch in the model itself",
    NumpyHeadNoGrad: r"leaves torch in the model itself",
}


def images(batch: int = 2) -> Tensor:
    return torch.randn(batch, 3, SIZE, SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def wrapped(kind: type[Probe], pooling: str = "token", **options: Any) -> cv.Model:
    return cv.wrap(kind(pooling).eval(), size=SIZE, **options)


@functools.cache
def plain_map(method: str, pooling: str) -> Tensor | str:
    """Return the map of the same network without a cut; the kind of error where a method does not fit it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return cv.explain(wrapped(Probe, pooling), images(), method, target=1).maps
        except cv.ClairError as error:
            return type(error).__name__


@pytest.mark.parametrize("pooling", ["token", "avg"])
@pytest.mark.parametrize("kind", CUT)
def test_what_needs_no_gradient_works_without_a_layout(kind: type[Probe], pooling: str) -> None:
    model = wrapped(kind, pooling)
    expected = model_structure(wrapped(Probe, pooling), images()).layout
    assert model_structure(model, images()).layout == expected
    for method in WITHOUT_GRADIENT:
        scores = plain_map(method, pooling)
        assert isinstance(scores, Tensor)
        assert_same(
            cv.explain(model, images(), method, target=1).maps, scores, magnitude=max(1.0, float(scores.abs().max()))
        )


@pytest.mark.parametrize("kind", CUT)
def test_methods_that_read_gradients_are_refused_with_the_reason(kind: type[Probe]) -> None:
    model = wrapped(kind)
    for method in ("ixg", "attnlrp+plus", "saliency", "genatt"):
        with pytest.raises(NotApplicable, match=REASONS[kind]):
            cv.explain(model, images(), method, target=1)
    with pytest.raises(NotApplicable, match=REASONS[kind]):
        cv.trace(model, images(), target=1)


@pytest.mark.parametrize("kind", CUT)
def test_the_default_says_why(kind: type[Probe]) -> None:
    explanation = cv.explain(wrapped(kind), images(1), target=1)
    assert explanation.method == "lime"
    assert any("gives no gradient: the forward" in note for note in explanation.notes)


@pytest.mark.parametrize("pooling", ["token", "avg"])
@pytest.mark.parametrize("kind", PASSABLE)
def test_through_no_grad_every_map_is_that_of_the_network_without(kind: type[Probe], pooling: str) -> None:
    model = wrapped(kind, pooling, through_no_grad=True)
    assert torch.equal(model.logits(images()).detach(), kind(pooling).eval()(images()).detach())
    compared = 0
    for method in list_methods():
        if method.slow:
            continue
        expected = plain_map(method.name, pooling)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if isinstance(expected, str):
                with pytest.raises(cv.ClairError):
                    cv.explain(model, images(), method.name, target=1)
            else:
                maps = cv.explain(model, images(), method.name, target=1).maps
                assert float((maps - expected).abs().max()) <= 1e-10 * float(expected.abs().max()), method.name
                compared += 1
    assert compared > 40


def test_a_detach_stays_one() -> None:
    with pytest.raises(NotApplicable, match=r"remove the detach\(\), which through_no_grad=True does not pass"):
        cv.explain(wrapped(Detached, through_no_grad=True), images(), "ixg", target=1)


class Interrupted(NoGrad):
    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            self.backbone(x)
            raise KeyboardInterrupt


@pytest.mark.parametrize("kind", [NoGrad, InferenceMode])
def test_the_model_and_grad_mode_are_left_as_they_were(kind: type[Probe]) -> None:
    module = kind("token").train()
    before, model = fingerprint(module), cv.wrap(module, size=SIZE, through_no_grad=True)
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled):
            cv.explain(model, images(), "ixg", target=1)
            assert torch.is_grad_enabled() is enabled
            with pytest.raises(KeyboardInterrupt):
                cv.explain(wrapped(Interrupted, through_no_grad=True), images(), "ixg", target=1)
            assert torch.is_grad_enabled() is enabled
    with torch.inference_mode():
        cv.explain(model, images(), "ixg", target=1)
        assert torch.is_inference_mode_enabled()
    assert not differences(before, fingerprint(module))


class Session(nn.Module):
    """ONNX Runtime and the like: a network that torch does not see, in a thread of its own."""

    def __init__(self, *, detach: bool) -> None:
        super().__init__()
        self.detach, self.network = detach, [Probe("token").eval()]
        self.scale = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def run(self, array: Any) -> Any:
        outputs: list[Any] = []

        def call() -> None:
            with torch.no_grad():
                outputs.append(self.network[0](torch.from_numpy(array)).numpy())

        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        return outputs[0]

    def forward(self, x: Tensor) -> Tensor:
        return torch.from_numpy(self.run((x.detach() if self.detach else x).cpu().numpy()))


@pytest.mark.parametrize("detach", [True, False])
def test_a_network_outside_torch_is_painted_on_cells(detach: bool) -> None:
    model, photos = cv.wrap(Session(detach=detach), size=SIZE), images(1)
    for method in (LIME, "kernelshap(samples=40)", "rise(samples=20)", "occlusion", "hsic(samples=20)"):
        explanation = cv.explain(model, photos, method, target=1)
        assert explanation.maps.shape == (1, 14, 14)
        assert any("patches are 14 × 14 cells of the image" in note for note in explanation.notes)
    maps = cv.explain(model, photos, "leave-one-out", target=1).maps
    painted = photos.clone()
    painted[:, :, 14:16, 21:23] = 0  # the cell of row 6 and column 9
    with torch.no_grad():
        drop = model.logits(photos).softmax(1)[0, 1] - model.logits(painted).softmax(1)[0, 1]
    assert_same(maps[0, 6, 9], drop, magnitude=1.0)
    for method in ("rollout", "scorecam"):
        with pytest.raises(NotApplicable, match="lime"):
            cv.explain(model, photos, method, target=1)
    with pytest.raises(NotApplicable, match="leaves torch in the model itself"):
        cv.explain(model, photos, "ixg", target=1)


def test_a_stated_grid_replaces_the_cells() -> None:
    layout = cv.Layout(grid=(4, 4), prefix=0, pooling="avg")
    explanation = cv.explain(cv.wrap(Session(detach=True), size=SIZE, layout=layout), images(1), LIME, target=1)
    assert explanation.maps.shape == (1, 4, 4)
    assert not any("cells of the image" in note for note in explanation.notes)


def test_scores_and_checks_of_a_frozen_backbone_are_those_of_a_free_one() -> None:
    frozen, free = (wrapped(kind) for kind in (NoGrad, Probe))
    scores = [cv.evaluate(model, images(), ["leave-one-out"], ["deletion"], target=1) for model in (frozen, free)]
    values = [[float(value) for value in part["leave-one-out", "deletion"].values] for part in scores]
    assert_same(torch.tensor(values[0]), torch.tensor(values[1]), magnitude=1.0)
    checks = [cv.explain(m, images(), "leave-one-out", target=1).check() for m in (frozen, free)]
    assert str(checks[0]) == str(checks[1])


class Normalised(Probe):
    """A norm that is detached: a gradient comes back, of another function than the scores."""

    def forward(self, x: Tensor) -> Any:
        features = self.backbone(x)
        return self.head(features / features.norm(dim=1, keepdim=True).detach())


def test_a_detach_that_changes_the_gradient_is_noted() -> None:
    note = "the gradient leaves out what the scores owe to the detached tensors"
    model = wrapped(Normalised)
    assert any(note in text for text in cv.explain(model, images(), "ixg", target=1).notes)
    assert not any(note in text for text in cv.explain(model, images(), "rollout").notes)
    assert not any(note in text for text in cv.explain(wrapped(Probe), images(), "ixg", target=1).notes)


class OnePatch(NumpyHead):
    """A head outside torch that reads a single patch: of the three patches that are changed it reads none."""

    def forward(self, x: Tensor) -> Any:
        tokens = self.backbone.forward_features(x).detach().numpy()
        return torch.from_numpy(tokens[:, 5] @ self.head.weight.detach().numpy().T)


def test_a_head_that_cannot_be_analysed_is_refused() -> None:
    model = wrapped(OnePatch)
    assert model_structure(model, images()).reads_unknown
    with pytest.raises(NotApplicable, match="Which tokens the scores read cannot be told"):
        cv.explain(model, images(), "rollout")
    assert cv.explain(model, images(), "leave-one-out", target=1).maps.any()


@pytest.mark.parametrize("kind", [NoGrad, NumpyHead])
def test_the_doctor_names_the_cut_and_passes_through(kind: type[Probe]) -> None:
    (finding,) = (check for check in cv.doctor(wrapped(kind)).checks if check.name == "gradient")
    assert finding.status == "fail"
    (finding,) = (
        check for check in cv.doctor(wrapped(NoGrad, through_no_grad=True)).checks if check.name == "gradient"
    )
    assert finding.status == "pass"


def test_copies_keep_the_option() -> None:
    model = wrapped(NoGrad, through_no_grad=True)
    assert copy.copy(model).through_no_grad
    ixg = cv.explain(model, images(), "ixg", target=cv.Output(lambda output: output[:, 1])).maps
    assert_same(ixg, cv.explain(wrapped(Probe), images(), "ixg", target=1).maps)
