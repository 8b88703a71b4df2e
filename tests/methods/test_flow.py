"""Attention flow against networkx with real capacities, by hand, and against what must hold for every maximum flow."""

from __future__ import annotations

import re
from typing import Any

import networkx as nx
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

import clairvit as cv
from clairvit._progress import on_progress
from clairvit.errors import BadInput, ClairError, NotApplicable
from clairvit.methods.flow import (
    Flow,
    maximum_flows,
    merge_tokens,
    patch_groups,
    row_normalised_capacities,
    upper_bounds,
)
from clairvit.methods.registry import COMBINATORS, MATRIX_COMBINATORS, list_methods
from clairvit.methods.spec import resolve_method
from clairvit.models.model import Layout
from helpers.rounding import assert_same
from helpers.tiny_models import ZOO, double, pixels, wrapped

Reals = NDArray[np.float64]
TARGET = 3
POOLINGS = [
    "timm-vit",
    "timm-deit-distilled-explicit",
    "timm-reg4-gap",
    "timm-siglip-map",
    "open_clip-coca",
    "timm-cait",
]


def by_networkx(source: Reals, layers: Reals) -> Reals:
    """[N] for what the source [N] and the layers [L, N, N], top first, pass on: one max-flow a token, no rounding."""
    depth, tokens = len(layers), len(source)
    graph = nx.DiGraph()
    for level in range(depth + 1):
        graph.add_nodes_from((level, token) for token in range(tokens))
    for token in range(tokens):
        graph.add_edge("source", (0, token), capacity=float(source[token]))
    for level in range(depth):
        for i in range(tokens):
            for j in range(tokens):
                graph.add_edge((level, i), (level + 1, j), capacity=float(layers[level, i, j]))
    return np.array([nx.maximum_flow_value(graph, "source", (depth, token)) for token in range(tokens)])


def random_network(seed: int, depth: int, tokens: int, sharp: float = 2.0) -> tuple[Reals, Reals]:
    """A read-out of several rows and layers of row-normalised attention with the residual, some of it very sharp."""
    draw = np.random.default_rng(seed)
    scores = sharp * draw.normal(size=(depth, tokens, tokens))
    attention = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    source = draw.random(tokens) * (draw.random(tokens) < 0.5)
    source[0] += 0.1
    return source / source.sum(), (attention + np.eye(tokens)) / 2


def whole(values: Reals, precision: float = 1e9) -> NDArray[np.int32]:
    return np.rint(values * precision).astype(np.int32)


def rounding_of_pipes(depth: int, tokens: int, precision: float = 1e9) -> float:
    """Return how far whole numbers of 1/precision can move a flow: half a step for each pipe that a cut may have."""
    return 0.5 / precision * (depth * tokens**2 + tokens)


def network_of(kind: str, dtype: torch.dtype = torch.float64) -> tuple[Reals, Reals]:
    """What `attention-flow` should have found in the trace: read-out [B, N], layers [B, L, N, N], top first."""
    trace = cv.trace(wrapped(kind, dtype), pixels(kind, dtype=dtype), target=TARGET)
    attention = torch.stack([layer.A.mean(1).clamp(min=0) for layer in reversed(trace.layers)], 1)  # [B, L, N, N]
    passing = attention + torch.eye(attention.shape[-1], dtype=dtype)
    source = trace.readout_weights.expand(len(passing), -1)
    return source.numpy(), (passing / passing.sum(-1, keepdim=True)).numpy()


def explained(text: str, kind: str = "timm-vit", dtype: torch.dtype = torch.float64, **options: Any) -> Tensor:
    return cv.explain(wrapped(kind, dtype), pixels(kind, dtype=dtype), text, target=TARGET, **options).maps


# The solver


@pytest.mark.parametrize("depth", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", range(4))
def test_flows_are_those_of_networkx(seed: int, depth: int) -> None:
    source, layers = random_network(seed, depth, tokens=7)
    flows = maximum_flows(whole(source), whole(layers)) / 1e9
    assert np.abs(flows - by_networkx(source, layers)).max() <= rounding_of_pipes(depth, tokens=7)


def test_flows_by_hand() -> None:
    """Two layers, three tokens, the head reads token 0; both cuts, at the source and at the token, bind somewhere."""
    top = np.array([[0.6, 0.3, 0.1], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    low = np.array([[0.5, 0.5, 0.0], [0.2, 0.8, 0.0], [0.0, 0.7, 0.3]])
    # To 0: min(.6, .5) + min(.3, .2) = .7.  To 1: min(.6, .5) + min(.3, .8) + min(.1, .7) = .9.  To 2: min(.1, .3).
    flows = maximum_flows(whole(np.array([1.0, 0, 0])), whole(np.stack([top, low])))
    assert flows.tolist() == [700_000_000, 900_000_000, 100_000_000]
    # The middle token is read half: from row 0 no more than .5 can leave, and .5 enters at row 1.
    halved = maximum_flows(whole(np.array([0.5, 0.5, 0])), whole(np.stack([top, low])))
    # To 0: row 0 sends up to .5 of which .5 fit through (0→0→0); row 1 sends .2.  To 1: all of it.  To 2: .1 by row 0.
    assert halved.tolist() == [700_000_000, 1_000_000_000, 100_000_000]


def test_flow_is_more_than_the_best_product_and_the_rollout() -> None:
    """Rollout splits what arrives in fixed shares; a flow may send it where there is room."""
    source, layers = random_network(5, 4, 6)
    rolled = source
    for layer in layers:
        rolled = rolled @ layer
    assert (maximum_flows(whole(source), whole(layers)) / 1e9 >= rolled - rounding_of_pipes(4, 6)).all()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("depth", "tokens", "keep"), [(2, 12, 3), (4, 12, 3), (6, 40, 6), (8, 40, None)])
def test_the_early_exit_changes_nothing(seed: int, depth: int, tokens: int, keep: int | None) -> None:
    source, layers = (whole(part) for part in random_network(seed, depth, tokens, sharp=1.0))
    exact = maximum_flows(source, layers, early_exit=False)
    assert (maximum_flows(source, layers, keep=keep) == exact).all()
    assert (exact <= upper_bounds(source, layers)).all()


def test_the_early_exit_is_taken_and_is_not_always_right_to_take() -> None:
    """In deep networks most flows reach the bound; in shallow ones many do not, so the bound is no replacement."""
    tight = []
    for depth in (2, 12):
        source, layers = (whole(part) for part in random_network(1, depth, 12, sharp=1.0))
        tight.append((maximum_flows(source, layers) == upper_bounds(source, layers)).mean())
    assert tight[0] < 0.6 < 0.8 < tight[1]


def test_large_sums_do_not_overflow() -> None:
    """Every token looks at token 0 alone: 40 units could enter it, one leaves the source."""
    layers = np.zeros((3, 40, 40))
    layers[:, :, 0] = 1
    flows = maximum_flows(whole(np.full(40, 1 / 40)), whole(layers))
    assert flows.tolist() == [10**9, *[0] * 39]


# The method


@pytest.mark.parametrize("kind", POOLINGS)
def test_the_map_is_the_flow_for_every_pooling(kind: str) -> None:
    """CLS, both class tokens, mean with registers, MAP pool, latent queries, class attention."""
    tiny, (source, layers) = ZOO[kind], network_of(kind)
    for row, heatmap in enumerate(explained("attention-flow", kind)):
        flows = by_networkx(source[row], layers[row])
        expected = (flows / flows.sum())[tiny.prefix :].reshape(tiny.grid)
        assert np.abs(heatmap.numpy() - expected).max() <= rounding_of_pipes(*layers.shape[1:3]) / flows.sum()


def test_flows_of_all_tokens_add_up_to_one() -> None:
    """The prefix tokens have their part, which is then cut off."""
    generator = torch.Generator().manual_seed(0)
    attention = torch.rand(3, 2, 17, 17, generator=generator, dtype=torch.float64)
    network = torch.stack([row_normalised_capacities(layer, 1.0) for layer in attention])
    flow, layout = Flow(), Layout(grid=(4, 4), prefix=1, pooling="token")
    row = flow.start_row(torch.eye(17, dtype=torch.float64)[:1])
    for layer in network:
        row = flow.step(row, layer, torch.empty(0))
    assert row is not None
    assert row.shape == (2, 1 + 3 * 17, 17)
    flow_map = flow.finish(row, 3, layout)
    assert flow_map.shape == (2, 17)
    assert_same(flow_map.sum(1), torch.ones(2, dtype=torch.float64))


@pytest.mark.parametrize("kind", ["timm-vit", "timm-siglip-map"])
def test_a_matrix_of_gradients_flows_too(kind: str) -> None:
    trace = cv.trace(wrapped(kind, torch.float64), pixels(kind, dtype=torch.float64), target=TARGET)
    weights = torch.stack([(layer.A * layer.G).clamp(min=0).mean(1) for layer in reversed(trace.layers)], 1)
    passing = weights + torch.eye(weights.shape[-1], dtype=torch.float64)
    layers = (passing / passing.sum(-1, keepdim=True)).numpy()
    source = trace.readout_weights.expand(len(layers), -1).numpy()
    for row, heatmap in enumerate(explained("genatt+flow", kind)):
        flows = by_networkx(source[row], layers[row])
        expected = (flows / flows.sum())[ZOO[kind].prefix :].reshape(ZOO[kind].grid)
        assert np.abs(heatmap.numpy() - expected).max() <= rounding_of_pipes(*layers.shape[1:3]) / flows.sum()


def test_names() -> None:
    assert torch.equal(explained("attention-flow"), explained("raw-attention+flow"))
    assert torch.equal(explained("attention-flow"), explained("rollout+flow"))
    assert torch.equal(explained("attention-flow(fusion=max)"), explained("raw-attention(fusion=max)+flow"))
    assert resolve_method("genatt(prune=0.001)+flow").text == "genatt(prune=0.001)+flow"
    (method,) = [m for m in list_methods() if m.name == "attention-flow"]
    assert method.slow
    assert (method.cost.forwards, method.cost.backwards, method.class_specific) == (1, 0, False)


def test_only_what_reads_gradients_depends_on_the_class() -> None:
    model, image = wrapped("timm-vit"), pixels("timm-vit")
    for text, depends in [("attention-flow", False), ("genatt+flow", True)]:
        first, second = (cv.explain(model, image, text, target=target).maps for target in (1, 4))
        assert torch.equal(first, second) != depends, text


def test_batches_and_repeats_give_the_same_bits() -> None:
    model, image = double("timm-reg4-gap", batch=3)
    together = cv.explain(model, image, "attention-flow", target=TARGET).maps
    assert torch.equal(together, cv.explain(model, image, "attention-flow", target=TARGET).maps)
    for row in range(3):
        alone = cv.explain(model, image[row], "attention-flow", target=TARGET).maps[0]
        assert (together[row] - alone).abs().max() <= rounding_of_pipes(ZOO["timm-reg4-gap"].layers, 19)


def test_nan_is_not_rounded_away() -> None:
    network = torch.rand(2, 6, 5)
    network[1, 2, 3] = torch.nan
    flow_map = Flow().finish(network, 1, Layout(grid=(2, 2), prefix=1, pooling="token"))
    assert flow_map[0].isfinite().all()
    assert flow_map[1].isnan().all()


# Options


def test_pruning_only_takes_away() -> None:
    source, layers = random_network(2, 4, 10)
    exact, pruned = (maximum_flows(whole(source), whole(np.where(layers < p, 0, layers))) for p in (0, 0.02))
    assert (pruned <= exact).all()
    assert (pruned < exact).any()
    usual, little, much = (explained(f"attention-flow(prune={p})") for p in (0, 1e-9, 0.02))
    assert torch.equal(usual, little)
    assert not torch.equal(usual, much)


def test_precision_is_a_rounding() -> None:
    exact, rough = explained("attention-flow"), explained("attention-flow(precision=1e6)")
    assert 0 < (exact - rough).abs().max() <= rounding_of_pipes(2, 17, precision=1e6)


def test_groups_of_patches() -> None:
    """Prefix tokens alone, 2×2 patches together, less at the edge of a 3×5 grid."""
    groups = patch_groups(Layout(grid=(3, 5), prefix=2, pooling="token"), 2)
    assert groups.tolist() == [0, 1, *[2, 2, 3, 3, 4], *[2, 2, 3, 3, 4], *[5, 5, 6, 6, 7]]
    assert patch_groups(Layout(grid=(3, 5), prefix=2, pooling="token"), 1).tolist() == list(range(17))


def test_pooling_keeps_what_is_read_and_passed_on() -> None:
    source, layers = random_network(3, 2, 17)
    groups = patch_groups(Layout(grid=(4, 4), prefix=1, pooling="token"), 2)
    few_source, few = merge_tokens(np.concatenate([source[None], *layers]), groups)
    assert few.shape == (2, 5, 5)
    assert_same(few_source.sum(), 1)
    assert_same(few.sum(-1), np.ones((2, 5)))
    first = np.flatnonzero(groups == 1)
    assert_same(few[0, 1, 0], layers[0, first, 0].mean(), label="rows are averaged")
    assert_same(few[0, 0, 1], layers[0, 0, first].sum(), label="columns are summed")
    same_source, same = merge_tokens(np.concatenate([source[None], *layers]), np.arange(17))
    assert_same(same_source, source)
    assert_same(same, layers)


def test_a_group_shares_its_flow_evenly() -> None:
    explanation = explained("attention-flow(grid_pool=2)")  # [2, 4, 4]
    cells = explanation.unflatten(1, (2, 2)).unflatten(3, (2, 2)).transpose(2, 3).flatten(3)  # [2, 2, 2, 4]
    assert torch.equal(cells, cells[..., :1].expand_as(cells))
    assert len(cells[0, ..., 0].unique()) == 4
    source, layers = network_of("timm-vit")
    few = merge_tokens(np.concatenate([source[0][None], *layers[0]]), patch_groups(ZOO_LAYOUT, 2))
    flows = by_networkx(*few)
    expected = (flows / flows.sum())[1:].reshape(2, 2) / 4
    assert np.abs(cells[0, ..., 0].numpy() - expected).max() <= rounding_of_pipes(2, 5) / flows.sum()


ZOO_LAYOUT = Layout(grid=(4, 4), prefix=1, pooling="token")  # of timm-vit


@pytest.mark.parametrize(("most", "side"), [(17, 1), (16, 2), (5, 2), (4, 4), (2, 4)])
@pytest.mark.filterwarnings("ignore:.*is the same everywhere")
def test_max_tokens_joins_as_few_as_it_takes(most: int, side: int) -> None:
    """16 patches and a class token; 2 × 2 patches joined leave 5, 4 × 4 leave 2."""
    explanation = explained(f"attention-flow(max_tokens={most})")
    assert torch.equal(explanation, explained(f"attention-flow(grid_pool={side})"))


def test_max_tokens_must_leave_a_patch() -> None:
    with pytest.raises(BadInput, match=r"max_tokens=1 was given for a model with 1 tokens next to the patches"):
        explained("attention-flow(max_tokens=1)")


@pytest.mark.filterwarnings("ignore:.*is the same everywhere")
def test_a_group_larger_than_the_grid_is_all_patches() -> None:
    explanation = explained("attention-flow(grid_pool=99)")
    assert torch.equal(explanation, explanation[:, :1, :1].expand_as(explanation))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("attention-flow(prune=1)", r"prune=1 was given; expected 0 or more and below 1, such as prune=0.0001"),
        ("genatt(prune=-0.1)+flow", r"prune=-0.1 was given"),
        (
            "attention-flow(grid_pool=0)",
            r"grid_pool=0 was given; expected 1 or more patches per side, such as grid_pool=2",
        ),
        ("attention-flow(residual=-1)", r"residual=-1 was given; expected 0 or more"),
        ("attention-flow(precision=10)", r"precision=10 was given; expected from 1000 to 1e\+09"),
        ("attention-flow(precision=1e10)", r"precision=1e\+10 was given"),
    ],
)
def test_values_that_are_not_allowed(text: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        resolve_method(text)


@pytest.mark.parametrize("combinator", MATRIX_COMBINATORS)
def test_token_maps_are_refused_with_what_to_type(combinator: str) -> None:
    with pytest.raises(
        NotApplicable,
        match=re.escape(
            f"'+{combinator}' goes from token to token through N×N matrices, and 'ixg' says one number for each token. "
            f"Use ixg+plus or ixg+skipplus, or a matrix method such as genatt+{combinator}."
        ),
    ):
        resolve_method(f"ixg+{combinator}")


def test_matrix_combinators_are_those_whose_aggregation_says_so() -> None:
    typed = [name.replace(":M", ":1").replace(":K", ":1") for name in COMBINATORS]
    specs = {name: resolve_method(f"genatt+{name}").aggregation for name in typed}
    assert {name for name, over in specs.items() if over is not None and over.matrices_only} == set(MATRIX_COMBINATORS)


def test_models_without_a_token_matrix_are_refused() -> None:
    with pytest.raises(ClairError, match=r"Use|use"):
        cv.explain(cv.load("timm:swin_tiny_patch4_window7_224", pretrained=False), "demo", "attention-flow")


# Progress


def test_nothing_is_printed_in_library_use_and_listeners_get_progress(capsys: pytest.CaptureFixture[str]) -> None:
    events: list[tuple[str, int, int]] = []
    explained("attention-flow")
    with on_progress(lambda *step: events.append(step)):
        explained("attention-flow")
    explained("attention-flow")
    assert capsys.readouterr() == ("", "")
    assert events == [(f"flow, image {image} of 2", done, 17) for image in (1, 2) for done in range(1, 18)]
