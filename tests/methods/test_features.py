"""Principal components, similarities and norms of patch tokens, against numpy and brute force."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, ResNet

import clairvit as cv
from clairvit.methods.principal_components import principal_components
from helpers.module_fingerprint import unchanged
from helpers.rounding import assert_same, rounding_bound
from helpers.tiny_models import ZOO, build, double, pixels, wrapped

EPS = torch.finfo(torch.float64).eps
SIZES = [(50, 6), (7, 12), (12, 12), (3, 9)]  # n above, below and equal to d; fewer directions than components


def random_tokens(n: int, d: int, seed: int = 0) -> Tensor:
    """Return tokens whose variances are far apart, so that the components are well conditioned."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, d, generator=generator, dtype=torch.float64) * 2.0 ** -torch.arange(d) + 3


def component_bound(tokens: Tensor, count: int = 3) -> float:
    """Return how far rounding can turn one of the first components: |error of C| / gap between eigenvalues."""
    centred = tokens - tokens.mean(0)
    spectrum = torch.linalg.svdvals(centred).square()
    gaps = spectrum[:-1] - spectrum[1:]
    error = EPS * tokens.numel() * float(tokens.square().sum())
    return error / float(gaps[:count].min())


@pytest.mark.parametrize(("n", "d"), SIZES)
def test_components_are_those_of_numpy(n: int, d: int) -> None:
    tokens = random_tokens(n, d)
    basis = principal_components(tokens, 3)
    centred = tokens.numpy() - tokens.numpy().mean(0)
    _, singular, rows = np.linalg.svd(centred, full_matrices=False)
    rank = min(3, n - 1)
    signs = np.sign(rows[np.arange(len(rows)), np.abs(rows).argmax(1)])
    expected = (rows * signs[:, None])[:rank]
    turned = (basis.components[:rank] - torch.from_numpy(expected)).abs().max()
    assert float(turned) <= component_bound(tokens, rank)
    total = float((singular**2).sum() / (n - 1))
    assert_same(basis.variances[:rank], (singular**2)[:rank] / (n - 1), magnitude=total)
    assert_same(basis.ratios[:rank], (singular**2)[:rank] / (singular**2).sum(), magnitude=1.0)
    assert not basis.components[rank:].any()
    assert not basis.variances[rank:].any()
    assert_same(basis.project(tokens)[:, :rank].var(0), basis.variances[:rank], magnitude=total)


def test_signs_do_not_depend_on_the_side_that_the_tokens_are_on() -> None:
    tokens = random_tokens(40, 5)
    components = principal_components(tokens).components
    assert (components.gather(1, components.abs().argmax(1, keepdim=True)) > 0).all()
    mirrored = principal_components(-tokens).components
    assert float((components - mirrored).abs().max()) <= 2 * component_bound(tokens)


def test_equal_tokens_have_no_components() -> None:
    basis = principal_components(torch.full((30, 4), 0.1, dtype=torch.float32))
    assert basis.total_variance == 0
    assert not basis.components.any()
    assert not basis.ratios.any()


@pytest.mark.parametrize(
    "name", ["timm-vit", "home-sequence-first", "home-mean-pool", "open_clip-nonsquare", "torchvision-vit"]
)
def test_tokens_are_the_outputs_of_blocks(name: str) -> None:
    model, images = double(name)
    features = cv.features(model, images, layer="all")
    trace, prefix, grid = cv.trace(model, images, target=0), ZOO[name].prefix, ZOO[name].grid
    inputs = [layer.tokens for layer in trace.layers[1:]]
    for layer, tokens in zip(features.layers, [*inputs, trace.final_tokens], strict=True):
        assert tokens is not None
        assert_same(layer.tokens.flatten(1, 2), tokens[:, prefix:])
    assert features.grid == grid
    assert features.layer == ZOO[name].layers - 1
    assert_same(features.norms, features.tokens.square().sum(-1).sqrt())


def test_pca_of_a_model_is_that_of_all_its_patches() -> None:
    model, images = double("timm-vit", batch=3)
    features = cv.features(model, images, batch_size=2)
    flat = features.tokens.reshape(-1, features.tokens.shape[-1])
    expected = principal_components(flat)
    assert_same(features.pca, expected.project(features.tokens))
    assert_same(features.explained_variance, features.pca.flatten(0, 2).var(0), magnitude=float(flat.square().max()))


def test_the_basis_does_not_depend_on_the_order_of_images() -> None:
    model, images = double("timm-vit", batch=4)
    features, order = cv.features(model, images, batch_size=4), [2, 0, 3, 1]
    shuffled = cv.features(model, images[order], batch_size=4)
    flat = features.tokens.reshape(-1, features.tokens.shape[-1])
    bound = component_bound(flat) * float(flat.norm(dim=-1).max()) * math.sqrt(flat.shape[1])
    assert bound < 1e-3 * float(features.pca.abs().max())
    assert float((shuffled.pca - features.pca[order]).abs().max()) <= bound
    assert float((shuffled.components - features.components).abs().max()) <= component_bound(flat)


def test_similarity_is_the_cosine_of_each_pair() -> None:
    model, images = double("open_clip-nonsquare")
    features = cv.features(model, images)
    rows, cols = features.grid
    for image in (None, 0, -1):
        similarity = features.similarity(1, cols - 1, image)
        for item in range(2):
            a = features.tokens[item if image is None else image, 1, cols - 1].numpy()
            for row in range(rows):
                for col in range(cols):
                    b = features.tokens[item, row, col].numpy()
                    cosine = float(a @ b / np.sqrt((a @ a) * (b @ b)))
                    assert abs(float(similarity[item, row, col]) - cosine) <= rounding_bound(1.0, 8 * len(a))


class TwoHalves(nn.Module):
    """Add ±v to the patches of the left and right half before attention: what a first component must find."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv2d(3, 8, 4, 4)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True)
        self.head = nn.Linear(8, 2)
        self.register_buffer("direction", torch.tensor([0.0, 0, 0, 10, 0, 0, 0, 0]))

    def forward(self, images: Tensor) -> Tensor:
        maps = self.stem(images)
        sides = torch.where(torch.arange(maps.shape[-1]) < maps.shape[-1] // 2, 1.0, -1.0).to(maps)
        planted = maps + self.direction[:, None, None] * sides
        return self.head(self.block(planted.flatten(2).transpose(1, 2)).mean(1))


def two_halves() -> cv.Model:
    return cv.wrap(TwoHalves().double().eval(), size=(16, 24))


def test_the_first_component_separates_planted_halves() -> None:
    generator = torch.Generator().manual_seed(0)
    images = 0.1 * torch.randn(2, 3, 16, 24, generator=generator, dtype=torch.float64)
    features = cv.features(two_halves(), images)
    assert features.grid == (4, 6)
    assert (features.pca[:, :, :3, 0] > 0).all()  # the largest entry of the component is the planted one: positive
    assert (features.pca[:, :, 3:, 0] < 0).all()
    assert int(features.components[0].abs().argmax()) == 3
    for side, left in (("positive", True), ("negative", False)):
        kept = cv.features(two_halves(), images, foreground=side)  # type: ignore[arg-type]
        assert kept.foreground is not None
        assert (kept.foreground[:, :, :3] == left).all()
        assert (kept.foreground[:, :, 3:] != left).all()
        expected = principal_components(features.tokens[kept.foreground])
        assert_same(kept.pca[kept.foreground], expected.project(features.tokens[kept.foreground]))
        assert not kept.pca[~kept.foreground].any()


def test_outliers_are_patches_of_more_than_five_median_norms() -> None:
    module = build("timm-vit").double()
    plain = cv.features(cv.wrap(module), pixels("timm-vit", dtype=torch.float64))
    assert plain.outliers is not None
    ratios = plain.norms.flatten(1) / plain.norms.flatten(1).median(1, keepdim=True).values
    assert (plain.outliers.flatten(1) == (ratios > 5)).all()

    def enlarge(_: nn.Module, __: object, out: Tensor) -> Tensor:
        return torch.cat([out[:, :4], 100 * out[:, 4:5], out[:, 5:]], 1)  # the class token and patches 0 to 2 before it

    module.blocks[-1].register_forward_hook(enlarge)  # type: ignore[union-attr, operator, index]
    planted = cv.features(cv.wrap(module), pixels("timm-vit", dtype=torch.float64)).outliers
    assert planted is not None
    assert planted.nonzero().tolist() == [[0, 0, 3], [1, 0, 3]]


def small_resnet() -> nn.Module:
    torch.manual_seed(0)
    return ResNet(BasicBlock, [1, 1, 1, 1], num_classes=3).eval()


def test_stages_of_a_cnn_have_grids_of_their_own() -> None:
    module, images = small_resnet(), torch.randn(2, 3, 64, 96, generator=torch.Generator().manual_seed(0))
    kept: list[Tensor] = []
    hook = module.layer4.register_forward_hook(lambda _m, _a, out: kept.append(out.detach()))  # type: ignore[union-attr, operator]
    with torch.no_grad():
        module(images)
    hook.remove()
    features = cv.features(cv.wrap(module), images, layer="all")
    assert features.layer_name == "layer4"
    assert features.grid == (2, 3)
    assert features.outliers is None
    assert [layer.grid for layer in features.layers][-2:] == [(4, 6), (2, 3)]
    assert_same(features.tokens, kept[0].permute(0, 2, 3, 1), dtype=torch.float32)


def test_layers_of_a_hierarchical_model_have_the_grids_of_their_stages() -> None:
    torch.manual_seed(0)
    module = timm.create_model(
        "swin_tiny_patch4_window7_224", img_size=64, depths=(1, 2), embed_dim=8, num_heads=(1, 2), window_size=4
    )
    features = cv.features(cv.wrap(module.double().eval()), torch.randn(2, 3, 64, 64).double(), layer="all")
    assert [layer.grid for layer in features.layers] == [(8, 8), (8, 8), (8, 8)]  # block 0 as block 1 receives it
    assert [layer.tokens.shape[-1] for layer in features.layers] == [16, 16, 16]
    assert features.outliers is None  # norms of windows are not compared
    expected = principal_components(features.tokens.reshape(-1, 16)).variances
    assert_same(features.explained_variance, expected, magnitude=float(features.tokens.square().max()))


class FewerTokens(nn.Module):
    """Two blocks, the second on the first seven of sixteen tokens: these form no grid."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv2d(3, 8, 8, 8)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True) for _ in range(3)
        )
        self.head = nn.Linear(8, 2)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.stem(images).flatten(2).transpose(1, 2)
        tokens = self.blocks[1](self.blocks[0](tokens))
        return torch.as_tensor(self.head(self.blocks[2](tokens[:, :7]).mean(1)))


def test_a_layer_without_a_grid_is_refused_and_left_out_of_all() -> None:
    model, images = cv.wrap(FewerTokens().eval()), torch.randn(2, 3, 32, 32)
    with pytest.raises(
        cv.errors.NotApplicable, match=r"block 2 of FewerTokens do not lie on a grid.*layers that do: 0"
    ):
        cv.features(model, images)
    features = cv.features(model, images, layer="all")
    assert features.layer_name == "block 0"
    assert [layer.grid for layer in features.layers] == [(4, 4)]
    assert any("block 2" in note for note in features.notes)


def test_half_precision_tokens_are_widened() -> None:
    model = wrapped("timm-vit", torch.bfloat16)
    features = cv.features(model, pixels("timm-vit", dtype=torch.bfloat16))
    assert features.tokens.dtype == torch.float32
    assert features.pca.dtype == torch.float64
    assert torch.equal(features.norms, features.tokens.norm(dim=-1))


def test_images_that_are_too_small_are_refused() -> None:
    model = cv.wrap(small_resnet())
    with pytest.raises(cv.errors.BadInput, match="2 patches of 512 channels in all; expected 4 or more"):
        cv.features(model, torch.randn(1, 3, 32, 64))
    with pytest.raises(cv.ClairError):
        cv.features(wrapped("timm-vit"), torch.randn(1, 3, 4, 4))  # less than a patch


class NoGrid(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, images: Tensor) -> Tensor:
        return torch.as_tensor(self.linear(images.mean((2, 3))))


def test_a_model_without_a_grid_is_refused() -> None:
    with pytest.raises(cv.ClairError) as caught:
        cv.features(cv.wrap(NoGrid()), torch.randn(1, 3, 32, 32))
    assert str(caught.value).count("\n") == 0


def test_a_model_whose_blocks_are_no_modules_is_refused() -> None:
    with pytest.raises(cv.errors.NotApplicable, match="No layer of home-loop lies on a grid of patches"):
        cv.features(wrapped("home-loop"), pixels("home-loop"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"layer": 99}, "layer=99 was given, and timm-vit has 2 layers; expected 0 to 1"),
        ({"layer": -3}, "layer=-3"),
        ({"layer": "last"}, "layer='last'"),
        ({"layer": True}, "layer=True"),
        ({"foreground": "left"}, "foreground='left'"),
        ({"threshold": 1.0}, "without a foreground"),
        ({"foreground": "positive", "threshold": math.nan}, "threshold=nan"),
        ({"foreground": "positive", "threshold": 50}, "foreground has 0 of 16 patches"),
        ({"batch_size": 0}, "batch_size=0"),
    ],
)
def test_bad_options_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(cv.errors.BadInput, match=message):
        cv.features(wrapped("timm-vit"), pixels("timm-vit", 1), **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("patch", [(4, 0), (0, -5), (1.0, 0), (0, True)])
def test_a_patch_out_of_range_is_refused(patch: tuple[int, int]) -> None:
    features = cv.features(wrapped("timm-vit"), pixels("timm-vit", 1))
    with pytest.raises(cv.errors.BadInput, match="expected a whole number from 0 to 3"):
        features.similarity(*patch)
    with pytest.raises(cv.errors.BadInput, match="image=1 was given"):
        features.similarity(0, 0, image=1)


def test_equal_tokens_get_a_warning() -> None:
    model = two_halves()
    model.module.direction.zero_()  # type: ignore[union-attr, operator]
    with pytest.warns(cv.ClairWarning, match="are equal, so the components are zero"):
        features = cv.features(model, torch.zeros(1, 3, 16, 24, dtype=torch.float64))
    assert not features.pca.any()
    assert features.notes


def test_images_in_any_form_and_slices_of_the_result(tmp_path: Path) -> None:
    model, images = wrapped("timm-vit"), pixels("timm-vit", 3)
    features = cv.features(model, images, layer="all", batch_size=2)
    labelled = cv.features(model, [(image, 0) for image in images])
    assert_same(labelled.tokens, features.tokens, dtype=torch.float32)
    assert len(features) == 3
    assert [item.names for item in features] == [("image 1",), ("image 2",), ("image 3",)]
    assert torch.equal(features[[0, 2]].pca, features.pca[[0, 2]])
    assert torch.equal(features[1:].layers[0].norms, features.layers[0].norms[1:])
    assert features[1].limits is features.limits


def test_the_model_stays_as_it_is() -> None:
    module = build("timm-vit").train()
    with unchanged(module):
        cv.features(cv.wrap(module), pixels("timm-vit"), layer="all")


def test_files_hold_what_the_result_holds(tmp_path: Path) -> None:
    features = cv.features(wrapped("timm-vit"), pixels("timm-vit"), layer="all", foreground="positive")
    record = json.loads(features.save(tmp_path / "f.json", patch=(0, 1)).read_text(encoding="utf-8"))
    assert record["grid"] == [4, 4]
    assert record["similarity"] == features.similarity(0, 1).tolist()
    assert record["pca"] == features.pca.tolist()
    assert [layer["layer_name"] for layer in record["layers"]] == ["block 0", "block 1"]
    with np.load(features.save(tmp_path / "f.npz", patch=(0, 1))) as arrays:
        assert np.array_equal(arrays["pca"], features.pca.numpy())
        assert np.array_equal(arrays["tokens"], features.tokens.numpy())
        assert np.array_equal(arrays["block 0/norms"], features.layers[0].norms.numpy())
        assert json.loads(str(arrays["about"]))["layer"] == 1
    with pytest.raises(cv.errors.BadInput, match="write to a name that ends in"):
        features.save(tmp_path / "f.txt")


def test_all_pairs_are_the_rows_of_single_patches() -> None:
    model, images = double("timm-vit-nonsquare")
    features = cv.features(model, images)
    pairs = features.similarities()
    assert pairs.shape == (2, 15, 15)
    for patch in range(15):
        assert_same(pairs[:, patch], features.similarity(*divmod(patch, 5)).flatten(1))
    assert_same(pairs.diagonal(dim1=1, dim2=2), torch.ones(2, 15, dtype=torch.float64))
