"""Networks side by side in one module: methods that read inside refuse them, those that only ask the model do not."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

import clairvit as cv
from clairvit.methods.registry import list_methods
from clairvit.tracing.structure import model_structure
from helpers.head_forms import CLASSES, ViT, images, single
from helpers.rounding import assert_same

# They ask for scores of changed images, or read the gradient at the pixels.
FITTING = [
    *("saliency", "smoothgrad", "integrated-gradients", "expected-gradients", "leave-one-out", "counterfactual"),
    *("lime", "kernelshap", "rise", "occlusion", "pami", "hsic", "random", "center"),
]


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([single(), single(seed=3)])


class Mean(Parts):
    def forward(self, image: Tensor) -> Tensor:
        return torch.stack([part(image) for part in self.parts]).mean(0)


class LayerByLayer(Parts):
    """Both networks advance by turns."""

    def forward(self, image: Tensor) -> Tensor:
        streams = [part.tokens(image) for part in self.parts]
        for blocks in zip(*(part.blocks for part in self.parts), strict=True):
            streams = [block(x) for block, x in zip(blocks, streams, strict=True)]
        return sum(part.head(part.norm(x)[:, 0]) for part, x in zip(self.parts, streams, strict=True))


class MirroredCopy(Parts):
    def forward(self, image: Tensor) -> Tensor:
        return (self.parts[0](image) + self.parts[0](image.flip(-1))) / 2


class MirroredCopyInTheBatch(Parts):
    def forward(self, image: Tensor) -> Tensor:
        return sum(self.parts[0](torch.cat([image, image.flip(-1)])).chunk(2))


class SecondPass(Parts):
    """The same network runs again for an output that is not the score."""

    def forward(self, image: Tensor) -> Tensor:
        scores = self.parts[0](image)
        self.other_output = self.parts[0](image / 2)
        return scores


class Trunk(Parts):
    """Common tokens and a common first layer, then a layer and a head for each."""

    def forward(self, image: Tensor) -> Tensor:
        first, second = self.parts
        x = first.blocks[0](first.tokens(image))
        return first.head(first.norm(first.blocks[1](x))[:, 0]) + second.head(second.norm(second.blocks[1](x))[:, 0])


class PostNormTowers(nn.Module):
    """Two networks of one layer each that read the very same tokens, with no norm before their attention."""

    def __init__(self) -> None:
        super().__init__()
        self.vit, self.other = single(), single(seed=3)

    def forward(self, image: Tensor) -> Tensor:
        x = self.vit.tokens(image)
        towers = (self.vit, self.other)
        return sum(vit.head(vit.norm(x + vit.blocks[0].attention(x))[:, 0]) for vit in towers)


def cnn() -> nn.Module:
    first, second = nn.Conv2d(3, 8, 4, 4), nn.Conv2d(8, 8, 2, 2)
    layers = (first, nn.ReLU(), second, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, CLASSES))
    return nn.Sequential(*layers).double()


class WithACNN(nn.Module):
    """The mean of a ViT and a network without attention."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([single(), cnn()])

    def forward(self, image: Tensor) -> Tensor:
        return torch.stack([part(image) for part in self.parts]).mean(0)


class TwoCNNs(WithACNN):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([cnn(), cnn()])


SIDE_BY_SIDE = {
    kind.__name__: kind
    for kind in (
        Mean,
        LayerByLayer,
        MirroredCopy,
        MirroredCopyInTheBatch,
        SecondPass,
        Trunk,
        PostNormTowers,
        WithACNN,
        TwoCNNs,
    )
}


@pytest.mark.parametrize("name", list(SIDE_BY_SIDE))
def test_no_method_reads_inside_one_of_several_networks(name: str) -> None:
    model = SIDE_BY_SIDE[name]().eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", cv.ClairWarning)
        results = cv.compare(model, images(), [method.name for method in list_methods()], target=1, skip=True)
    assert list(results) == FITTING
    assert all(result.maps.isfinite().all() for result in results.values())
    assert all("several networks side by side" in reason for reason in results.skipped.values())


@pytest.mark.parametrize(
    ("name", "members"),
    [
        ("Mean", ("parts.0", "parts.1")),
        ("MirroredCopy", ("parts.0", "parts.0")),
        ("Trunk", ("parts.0.blocks.1", "parts.1.blocks.1")),
        ("TwoCNNs", ("they meet in the scores alone",)),
        ("WithACNN", ("they meet in the scores alone",)),
    ],
)
def test_members_are_named(name: str, members: tuple[str, str]) -> None:
    structure = model_structure(cv.wrap(SIDE_BY_SIDE[name]().eval()), images())
    assert structure.members == members
    assert structure.layers == ()


def test_the_default_says_what_is_right_for_several_networks() -> None:
    with pytest.raises(
        cv.errors.NotApplicable, match=r"'parts\.0' and 'parts\.1' do not feed each other.*cv\.explain\(model"
    ):
        cv.explain(Mean().eval(), images(), "genatt", target=1)
    with pytest.raises(cv.errors.NotApplicable, match=r"'parts\.0' runs on several versions of each image"):
        cv.explain(MirroredCopy().eval(), images(), "rollout", target=1)


def test_gradients_at_the_pixels_are_those_of_the_whole() -> None:
    model = Mean().eval()
    gradient = cv.trace(model, images(), 1).dpixels
    assert_same(gradient, sum(cv.trace(part, images(), 1).dpixels for part in model.parts) / 2)


@pytest.mark.parametrize(
    "method", ["integrated-gradients(path=token)", "expected-gradients(level=token)", "ixg(level=pixel)"]
)
def test_options_that_read_tokens_are_refused(method: str) -> None:
    with pytest.raises(cv.errors.NotApplicable, match="several networks side by side"):
        cv.explain(Mean().eval(), images(), method, target=1)


def test_other_readers_refuse_several_networks() -> None:
    model = Mean().eval()
    for read in (
        lambda: cv.intervene(model, images(), {cv.Site(0): "zero"}),
        lambda: cv.features(model, images()),
        lambda: cv.explain(model, images(), "saliency", target=cv.Neuron(0, 1)),
    ):
        with pytest.raises(cv.errors.NotApplicable, match="several networks side by side"):
            read()


def test_doctor_warns_of_several_networks() -> None:
    checks = {check.name: check for check in cv.doctor(Mean().float().eval(), images().float()).checks}
    assert checks["attention"].status == "warn"
    assert "'parts.0' and 'parts.1' do not feed each other" in checks["attention"].finding


class OtherNetworkUnread(Parts):
    """Another network runs on the image, and its output is not the score."""

    def forward(self, image: Tensor) -> Tensor:
        self.other_output = self.parts[1](image)
        return self.parts[0](image)


class Difference(Parts):
    """The score of the image minus that of a fixed one, by the same network."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("fixed", images(1, seed=9))

    def forward(self, image: Tensor) -> Tensor:
        return self.parts[0](image) - self.parts[0](self.fixed).detach()


class UnreadBranch(Parts):
    """A second head with a layer of its own reads the backbone."""

    def forward(self, image: Tensor) -> Tensor:
        first, second = self.parts
        x = first.tokens(image)
        for block in first.blocks:
            x = block(x)
        self.other_output = second.head(second.norm(second.blocks[0](x))[:, 0])
        return first.head(first.norm(x)[:, 0])


class HeadOnTheStem(Parts):
    """A second head reads the tokens before the first block."""

    def forward(self, image: Tensor) -> Tensor:
        first, second = self.parts
        x = tokens = first.tokens(image)
        for block in first.blocks:
            x = block(x)
        return first.head(first.norm(x)[:, 0]) + second.head(tokens.mean(1)) * 0


class TwoHeads(Parts):
    """Two heads on one stream are one network."""

    def forward(self, image: Tensor) -> Tensor:
        first, second = self.parts
        x = first.tokens(image)
        for block in first.blocks:
            x = block(x)
        return first.head(first.norm(x)[:, 0]) + second.head(second.norm(x).mean(1)) * 0


@pytest.mark.parametrize("kind", [OtherNetworkUnread, UnreadBranch])
def test_what_the_scores_do_not_read_changes_no_map(kind: type[nn.Module]) -> None:
    model: nn.Module = kind().eval()
    whole: ViT = single()
    for method in ("rollout", "raw-attention", "genatt", "ixg", "attnlrp+plus", "decompx", "legrad", "gradcam", "lrp"):
        assert_same(*(cv.explain(m, images(), method, target=1).maps for m in (model, whole)), label=method)


@pytest.mark.parametrize("kind", [Difference, HeadOnTheStem, TwoHeads])
def test_one_network_is_not_refused(kind: type[nn.Module]) -> None:
    model = kind().eval()
    assert len(model_structure(cv.wrap(model), images()).layers) == 2
    for method in ("rollout", "genatt", "ixg", "gradcam"):
        assert_same(*(cv.explain(m, images(), method, target=1).maps for m in (model, single())), label=method)
