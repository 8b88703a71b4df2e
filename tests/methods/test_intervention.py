"""Interventions and the logit lens against changed copies of the model and hand-written hooks, in float64."""

from __future__ import annotations

import copy
import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import clairvit as cv
from clairvit._progress import on_progress
from clairvit.errors import BadInput, CaptureError, NotApplicable, UnknownName, WrongType
from clairvit.models.image_files import read_image
from clairvit.perturbation.activation_patching import Place, PlacePatching
from clairvit.tracing.recording import record
from helpers import vision_language
from helpers.custom_vits import SortedByWindows
from helpers.module_fingerprint import differences, fingerprint
from helpers.rounding import assert_same, same
from helpers.tiny_models import (
    HEADS,
    STRANGE,
    WIDTH,
    ZOO,
    cnn,
    double,
    fresh_double,
    growth_of,
    pixels,
    shaken,
    strange,
)

MODELS = ["timm-vit", "hf-vit-sdpa", "torchvision-vit", "home-matmul"]
# Other attention code, token order, prefixes, residual sums and heads.
OTHERS = [
    *("timm-vit-qk-norm-explicit", "timm-dinov3", "timm-post-norm", "timm-cait", "timm-swiglu", "hf-clip-eager"),
    *("hf-deit-teacher-sdpa", "open_clip-tower", "home-einsum-transposed", "home-bmm", "home-grouped-query"),
    *("home-sequence-first", "home-encoder-post-norm"),
]
PARTS: list[dict[str, Any]] = [{}, {"head": 1}, {"part": "attention"}, {"part": "mlp"}]
DH = WIDTH // HEADS


def other_images(name: str, batch: int = 2) -> Tensor:
    return pixels(name, batch, seed=5, dtype=torch.float64)


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """The blocks: the first list of two modules of one class that are not layers of torch."""
    lists = [part for part in module.modules() if isinstance(part, nn.ModuleList | nn.Sequential) and len(part) == 2]
    return list(next(part for part in lists if type(part[0]) is type(part[1])))


def linear_layers(block: nn.Module) -> list[nn.Linear]:
    return [part for part in block.modules() if isinstance(part, nn.Linear)]


def output_projection(block: nn.Module) -> nn.Linear:
    """The last linear layer of the attention: two of the MLP come after it."""
    return linear_layers(block)[-3]


def scores_of(model: cv.Model, images: Tensor) -> Tensor:
    with torch.no_grad():
        return model.logits(images)


def changed(model: cv.Model, change: Callable[[nn.Module], None], layer: int) -> cv.Model:
    """A copy of the model with one block changed."""
    module = copy.deepcopy(model.module)
    with torch.no_grad():
        change(blocks_of(module)[layer])
    return cv.wrap(module, size=ZOO[MODELS[0]].size)


def check(name: str, actual: Tensor, expected: Tensor) -> None:
    assert_same(actual, expected, growth=growth_of(name))


@pytest.mark.parametrize("part", PARTS, ids=str)
@pytest.mark.parametrize("name", MODELS + OTHERS)
def test_a_site_replaced_by_its_own_value_changes_nothing(name: str, part: dict[str, Any]) -> None:
    model, images = double(name)
    site = cv.Site(1, **part)
    scores = cv.intervene(model, images, {site: "source"}, source=images)
    assert torch.equal(scores.intervened, scores.original)
    check(name, scores.original, scores_of(model, images))
    zeroed = cv.intervene(model, images, {site: "zero"})
    assert (zeroed.intervened != scores.original).any(1).all()


@pytest.mark.parametrize("name", MODELS + OTHERS)
def test_all_tokens_of_another_image_give_its_scores(name: str) -> None:
    model, images = double(name)
    others = other_images(name)
    expected = scores_of(model, others)
    for layer in range(ZOO[name].layers):
        scores = cv.intervene(model, images, {cv.Site(layer): "source"}, source=others)
        check(name, scores.intervened, expected)
        check(name, scores.original, scores_of(model, images))
    single = cv.intervene(model, images, {cv.Site(1): "source"}, source=others[0])
    check(name, single.intervened, expected[:1].expand(2, -1))


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("name", MODELS)
def test_a_head_set_to_zero_is_a_projection_that_does_not_read_it(name: str, layer: int) -> None:
    model, images = double(name)

    def without_head(block: nn.Module, head: int) -> None:
        output_projection(block).weight[:, head * DH : (head + 1) * DH] = 0

    for head in range(HEADS):
        reference = changed(model, lambda block, head=head: without_head(block, head), layer)  # type: ignore[misc]
        scores = cv.intervene(model, images, {cv.Site(layer, head=head): "zero"})
        check(name, scores.intervened, scores_of(reference, images))


@pytest.mark.parametrize("name", ["timm-vit", "hf-vit-sdpa", "home-matmul"])
def test_a_head_set_to_zero_is_a_hook_on_the_projection(name: str) -> None:
    """Torchvision's projection is no module that is called: it has the test above."""
    model, images = fresh_double(name)

    def zeroed(module: nn.Module, args: tuple[Tensor]) -> Tensor:
        tokens = args[0].clone()
        tokens[:, [3], DH : 2 * DH] = 0  # token 3 is patch 2
        return tokens

    scores = cv.intervene(model, images, {cv.Site(0, head=1, tokens=[2]): "zero"})
    hook = output_projection(blocks_of(model.module)[0]).register_forward_pre_hook(zeroed)
    expected = scores_of(model, images)
    hook.remove()
    check(name, scores.intervened, expected)
    assert not torch.equal(scores.intervened, scores.original)


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("part", ["attention", "mlp"])
@pytest.mark.parametrize("name", MODELS)
def test_a_part_set_to_zero_is_a_part_without_weights(name: str, part: Any, layer: int) -> None:
    model, images = fresh_double(name)

    def without_part(block: nn.Module) -> None:
        last = output_projection(block) if part == "attention" else linear_layers(block)[-1]
        last.weight.zero_()
        last.bias.zero_()

    scores = cv.intervene(model, images, {cv.Site(layer, part=part): "zero"})
    check(name, scores.intervened, scores_of(changed(model, without_part, layer), images))


@pytest.mark.parametrize(("part", "scale"), [("attention", "ls1"), ("mlp", "ls2")])
def test_the_value_of_a_part_is_what_comes_after_layer_scale(part: Any, scale: str) -> None:
    name = "timm-vit-qk-norm"
    model, images = fresh_double(name)
    value = torch.randn(2, 17, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    scores = cv.intervene(model, images, {cv.Site(0, part=part): value})
    layer_scale = blocks_of(model.module)[0].get_submodule(scale)
    hook = layer_scale.register_forward_hook(lambda module, args, out: value)
    expected = scores_of(model, images)
    hook.remove()
    check(name, scores.intervened, expected)


def test_values_of_every_shape_and_group_of_tokens() -> None:
    name = "timm-vit"
    model, images = fresh_double(name)
    generator = torch.Generator().manual_seed(3)
    block = blocks_of(model.module)[1]

    def by_hook(edit: Callable[[Tensor], None]) -> Tensor:
        def replace(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            tokens = args[0].clone()
            edit(tokens)
            return (tokens, *args[1:])

        hook = block.register_forward_pre_hook(replace)
        expected = scores_of(model, images)
        hook.remove()
        return expected

    def assign(rows: Any, value: Any) -> Callable[[Tensor], None]:
        def edit(tokens: Tensor) -> None:
            tokens[:, rows] = value(tokens) if callable(value) else value

        return edit

    def mean(tokens: Tensor) -> Tensor:
        return tokens[:, 1:].sum(1, keepdim=True) / 16

    for shape in [(2, 2, WIDTH), (2, WIDTH), (WIDTH,)]:
        value = torch.randn(shape, dtype=torch.float64, generator=generator)
        scores = cv.intervene(model, images, {cv.Site(1, tokens=[4, 0]): value})
        check(name, scores.intervened, by_hook(assign([5, 1], value)))
    groups: list[tuple[Any, Any]] = [("prefix", [0]), ("patches", slice(1, None)), (None, slice(None)), ([15], [16])]
    for tokens, rows in groups:
        scores = cv.intervene(model, images, {cv.Site(1, tokens=tokens): "mean"})
        check(name, scores.intervened, by_hook(assign(rows, mean)))


def test_sites_are_applied_in_the_order_of_the_mapping() -> None:
    model, images = double("timm-vit")
    wide, narrow = cv.Site(1), cv.Site(1, tokens=[2])
    value = torch.arange(WIDTH, dtype=torch.float64).sin()
    both = cv.intervene(model, images, {narrow: value, wide: "zero"})
    assert torch.equal(both.intervened, cv.intervene(model, images, {wide: "zero"}).intervened)
    assert not torch.equal(both.intervened, cv.intervene(model, images, {wide: "zero", narrow: value}).intervened)


@pytest.mark.parametrize("name", MODELS + OTHERS)
def test_the_logit_lens_of_the_last_layer_is_the_score(name: str) -> None:
    model, images = double(name)
    scores = cv.logit_lens(model, images)
    assert scores.shape[0] == ZOO[name].layers
    check(name, scores[-1], scores_of(model, images))


@pytest.mark.parametrize("name", [*MODELS, "home-sequence-first", "timm-dinov3"])
def test_the_logit_lens_is_the_model_whose_later_blocks_do_nothing(name: str) -> None:
    model, images = fresh_double(name)
    scores = cv.logit_lens(model, images)
    assert torch.equal(scores, cv.logit_lens(cv.trace(model, images)))

    def skip(module: nn.Module, args: Any, kwargs: Any, out: Any) -> Any:
        tokens = args[0] if args else next(iter(kwargs.values()))
        return tokens if isinstance(out, Tensor) else (tokens, *out[1:])

    hook = blocks_of(model.module)[1].register_forward_hook(skip, with_kwargs=True)
    expected = scores_of(model, images)
    hook.remove()
    check(name, scores[0], expected)
    assert not torch.equal(scores[0], scores[1])


@pytest.mark.parametrize("name", [name for name in MODELS + OTHERS if name != "home-encoder-post-norm"])
def test_a_block_whose_parts_add_nothing_is_left_out_by_the_logit_lens(name: str) -> None:
    """A norm behind the sum, as in an encoder layer with norm_first=False, is no part of either."""
    model, images = double(name)
    sites: dict[cv.Site, Any] = {cv.Site(1, part="attention"): "zero", cv.Site(1, part="mlp"): "zero"}
    check(name, cv.intervene(model, images, sites).intervened, cv.logit_lens(model, images)[0])


@pytest.mark.parametrize("kind", ["head", "block", "attention", "mlp"])
def test_a_sweep_is_one_intervention_per_site(kind: Any) -> None:
    model, images = double("timm-vit")
    others = other_images("timm-vit")
    sweep = cv.intervene_sweep(model, images, kind=kind, target=[3, 1], value="source", source=others, score="prob")
    heads = range(HEADS) if kind == "head" else [None]
    parts: dict[str, Any] = {} if kind in ("head", "block") else {"part": kind}
    assert sweep.effects.shape == (2, 2, len(heads))
    for layer in range(2):
        for column, head in enumerate(heads):
            site = cv.Site(layer, head=head, **parts)
            scores = cv.intervene(model, images, {site: "source"}, source=others)
            p = scores.intervened.softmax(1) - scores.original.softmax(1)
            check("timm-vit", sweep.effects[:, layer, column], torch.stack([p[0, 3], p[1, 1]]))
            assert torch.equal(scores.difference([3, 1], score="prob"), sweep.effects[:, layer, column])
    assert torch.equal(sweep.table, sweep.effects.mean(0))
    assert sweep.target == ("class 3", "class 1")


def test_a_sweep_is_drawn_with_zero_in_the_middle() -> None:
    model, images = double("timm-vit")
    axes = cv.intervene_sweep(model, images, target=3).plot()
    (drawn,) = axes.get_images()
    assert drawn.get_array().shape == (2, HEADS)
    assert drawn.norm.vmin == -drawn.norm.vmax < 0
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("head", "layer")


def test_the_default_target_is_the_class_that_the_unchanged_model_predicts() -> None:
    model, images = double("timm-vit")
    scores = cv.intervene(model, images, {cv.Site(0): "zero"})
    rows, predicted = torch.arange(2), scores.original.argmax(1)
    assert torch.equal(scores.difference(), scores.intervened[rows, predicted] - scores.original[rows, predicted])


BAD_VALUES: dict[str, tuple[Any, Any, type[Exception], str]] = {
    "layer": (cv.Site(2), "zero", BadInput, "There is no layer 2: the model has 2"),
    "head": (cv.Site(0, head=HEADS), "zero", BadInput, "There is no head 3"),
    "token": (cv.Site(0, tokens=[16]), "zero", BadInput, "There is no patch 16"),
    "shape": (cv.Site(0), torch.zeros(2, 16, WIDTH), BadInput, r"expected \[2, 17, 24\]"),
    "shape of a head": (cv.Site(0, head=0), torch.zeros(WIDTH), BadInput, r"\[8\] for every token"),
    "not finite": (cv.Site(0), torch.full((WIDTH,), torch.nan), BadInput, "not finite"),
    "integers": (cv.Site(0), torch.zeros(WIDTH, dtype=torch.long), BadInput, "floating-point"),
    "value": (cv.Site(0), "zeros", UnknownName, "Did you mean 'zero'"),
    "array": (cv.Site(0), np.zeros(WIDTH), WrongType, "is a ndarray; expected a tensor"),
    "source": (cv.Site(0), "source", BadInput, "no source images"),
    "site": (3, "zero", WrongType, "expected cv.Site"),
}


@pytest.mark.parametrize("case", BAD_VALUES)
def test_bad_values_are_refused(case: str) -> None:
    model, images = double("timm-vit")
    site, value, error, message = BAD_VALUES[case]
    before = fingerprint(model.module)
    with pytest.raises(error, match=message):
        cv.intervene(model, images, {site: value})
    assert differences(before, fingerprint(model.module)) == []


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"layer": -1}, BadInput, "layer of a site is -1"),
        ({"layer": True}, WrongType, "expected an integer"),
        ({"layer": 0, "head": 0.5}, WrongType, "head of a site is 0.5"),
        ({"layer": 0, "part": "atention"}, UnknownName, "Did you mean 'attention'"),
        ({"layer": 0, "part": "mlp", "head": 1}, BadInput, "expected one of them"),
        ({"layer": 0, "tokens": []}, BadInput, "names 0 patches"),
        ({"layer": 0, "tokens": [1, 1]}, BadInput, "2 patches, 1 different"),
        ({"layer": 0, "tokens": [-1]}, BadInput, "token of a site is -1"),
        ({"layer": 0, "tokens": 3}, WrongType, "expected a list"),
        ({"layer": 0, "tokens": "patch"}, UnknownName, "Did you mean 'patches'"),
    ],
)
def test_bad_sites_are_refused(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        cv.Site(**arguments)


def test_sites_of_equal_numbers_are_one_site() -> None:
    counted = cv.Site(np.int64(1), tokens=np.array([2, 0]))  # type: ignore[arg-type]
    assert {counted, cv.Site(1, tokens=(2, 0)), cv.Site(1, tokens=torch.tensor([2, 0]))} == {cv.Site(1, tokens=[2, 0])}  # type: ignore[arg-type]


def test_bad_arguments_are_refused() -> None:
    model, images = double("timm-vit")
    with pytest.raises(BadInput, match="No site was given"):
        cv.intervene(model, images, {})
    with pytest.raises(BadInput, match="one source image for all"):
        cv.intervene(model, images, {cv.Site(0): "source"}, source=other_images("timm-vit", 3))
    for run in (
        lambda: cv.intervene(model, images, {cv.Site(0): "zero"}, source=images),
        lambda: cv.intervene_sweep(model, images, source=images),
    ):
        with pytest.raises(BadInput, match="no site has the value 'source'"):
            run()
    with pytest.raises(UnknownName, match="Did you mean 'head'"):
        cv.intervene_sweep(model, images, kind="heads")  # type: ignore[arg-type]
    with pytest.raises(UnknownName, match="There is no value 'one'"):
        cv.intervene_sweep(model, images, value="one")  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="one of them"):
        cv.logit_lens(cv.trace(model, images), images)
    with pytest.raises(BadInput, match="No images were given"):
        cv.logit_lens(model)
    mean_pool, mean_pool_images = double("home-mean-pool")
    with pytest.raises(BadInput, match="has no prefix tokens"):
        cv.intervene(mean_pool, mean_pool_images, {cv.Site(0, tokens="prefix"): "zero"})


@pytest.mark.parametrize("name", ["home-loop", "home-lucid", "timm-parallel"])
def test_blocks_that_are_no_modules_have_heads_alone(name: str) -> None:
    model, images = double(name)
    assert cv.intervene(model, images, {cv.Site(1, head=0): "zero"}).difference(0).all()
    for site in (cv.Site(1), cv.Site(1, part="mlp")):
        with pytest.raises(NotApplicable, match="are no modules"):
            cv.intervene(model, images, {site: "zero"})
    with pytest.raises(NotApplicable, match="are no modules"):
        cv.logit_lens(model, images)


def test_a_block_without_two_residual_sums_has_no_parts() -> None:
    model, images = double("home-in-place")
    with pytest.raises(NotApplicable, match="by two sums"):
        cv.intervene(model, images, {cv.Site(0, part="attention"): "zero"})


@pytest.mark.parametrize("name", ["swin", "xcit", "cnn"])
def test_models_without_global_attention_are_refused(name: str) -> None:
    size = (32, 32) if name == "cnn" else STRANGE[name].size
    model = cv.wrap(strange(cnn if name == "cnn" else STRANGE[name].make), name=name, size=size)
    images = torch.zeros(1, 3, *size)
    for run in (lambda: cv.intervene(model, images, {cv.Site(0): "zero"}), lambda: cv.logit_lens(model, images)):
        with pytest.raises(NotApplicable, match="does not attend between all its tokens"):
            run()


def test_patches_that_are_not_in_order_have_no_index() -> None:
    module = shaken(SortedByWindows(), 0).double().eval()
    images = torch.randn(2, 3, 64, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with pytest.raises(NotApplicable, match="row by row"):
        cv.intervene(module, images, {cv.Site(0, tokens=[0]): "zero"})
    with pytest.raises(NotApplicable, match="row by row"):
        cv.intervene(module, images, {cv.Site(0): "mean"})
    assert cv.intervene(module, images, {cv.Site(0): "zero"}).difference(0).all()


def test_no_reference_cycle_keeps_tensors_alive() -> None:
    model, images = fresh_double("timm-vit")
    sites: dict[cv.Site, Any] = {cv.Site(1, **part): "source" for part in PARTS}
    cv.intervene(model, images, sites, source=images)
    cv.logit_lens(model, images)
    gc.collect()
    gc.disable()
    try:
        before = sum(issubclass(type(o), Tensor) for o in gc.get_objects())
        cv.intervene(model, images, sites, source=images)
        cv.logit_lens(model, images)
        assert sum(issubclass(type(o), Tensor) for o in gc.get_objects()) <= before
    finally:
        gc.enable()


def test_inference_mode_and_no_grad_make_no_difference() -> None:
    model, images = double("torchvision-vit")
    sites: dict[cv.Site, Any] = {cv.Site(1, **part): "mean" for part in PARTS}
    expected = cv.intervene(model, images, sites).intervened
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            assert torch.equal(cv.intervene(model, images, sites).intervened, expected)
    assert not expected.requires_grad


@pytest.mark.parametrize("place", [Place("tokens", 2), Place("heads", 2), Place("sum", 999)])
def test_an_activation_that_is_not_computed_is_an_error(place: Place) -> None:
    model, images = double("timm-vit")
    recording = record(model, images, differentiable=False)
    before = fingerprint(model.module)
    patching = PlacePatching(recording, len(images), {place: [torch.zeros_like]})
    with pytest.raises(CaptureError, match="1 of 1 activations were not computed"), patching:
        scores_of(model, images)
    assert differences(before, fingerprint(model.module)) == []


@pytest.mark.parametrize("name", ["llava", "qwen2-vl", "qwen2.5-vl"])
def test_sites_of_a_vision_language_model_are_those_of_its_language_model(name: str) -> None:
    """Its vision tower attends and adds up before, for some models image by image: sites are not counted from there."""
    with vision_language.without_float32():
        module = vision_language.tiny_language_model(name)
        text = vision_language.model_text(name, [1, 3], [4, 11, 12, 14])
        model = cv.wrap(module, size=vision_language.SIDE, mean=0.5, std=0.5).with_inputs(**text)
        images, target = vision_language.images(2), cv.NextToken(token=9)
        attention: Any = module.model.language_model.layers[1].self_attn
        width = attention.o_proj.in_features // attention.config.num_attention_heads
        for site, part, columns in (
            (cv.Site(1, head=2), attention.o_proj, slice(2 * width, 3 * width)),
            (cv.Site(1, part="attention"), attention.o_proj, slice(None)),
            (cv.Site(1, part="mlp"), module.model.language_model.layers[1].mlp.down_proj, slice(None)),
        ):
            scores = cv.intervene(model, images, {site: "zero"}, target=target)
            hook = part.register_forward_pre_hook(lambda _, args, columns=columns: (_without(args[0], columns),))
            with torch.no_grad():
                rows = [
                    module(**vision_language.model_inputs(name, image[None]), **text).logits[:, -1] for image in images
                ]
            hook.remove()
            expected = torch.cat(rows)
            assert not same(scores.original, scores.intervened)
            assert_same(scores.intervened, expected)
            assert_same(scores.difference(), expected[:, 9] - scores.original[:, 9], magnitude=1.0)


def _without(tokens: Tensor, columns: slice) -> Tensor:
    changed = tokens.clone()
    changed[..., columns] = 0
    return changed


def test_a_sweep_is_written(tmp_path: Path) -> None:
    model, images = double("timm-vit")
    sweep = cv.intervene_sweep(model, images, target=3)
    record = json.loads(sweep.save(tmp_path / "sweep.json").read_text(encoding="utf-8"))
    assert record["effects"] == sweep.effects.tolist()
    assert record["table"] == sweep.table.tolist()
    assert (record["kind"], record["value"], record["score"]) == ("head", "zero", "logit")
    assert record["target"] == ["class 3"] * 2
    with np.load(sweep.save(tmp_path / "sweep.npz")) as arrays:
        assert np.array_equal(arrays["effects"], sweep.effects.numpy())
        assert json.loads(str(arrays["about"]))["scores"] == record["scores"]
    assert sweep.save(tmp_path / "a.png").read_bytes() == sweep.save(tmp_path / "b.png").read_bytes()
    with pytest.raises(BadInput, match=r"ends in '\.txt'"):
        sweep.save(tmp_path / "sweep.txt")


def test_images_are_read_in_chunks_that_change_nothing() -> None:
    """Sources, values and targets of single images follow their images."""
    model, images = double("timm-vit", 5)
    others, classes = other_images("timm-vit", 5), [0, 1, 2, 3, 1]
    values = torch.randn(5, 17, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    sites: dict[cv.Site, Any] = {cv.Site(0): values, cv.Site(1, head=2): "source"}
    whole = cv.intervene(model, images, sites, source=others, target=classes)
    chunks = cv.intervene(model, images, sites, source=others, target=classes, batch_size=2)
    assert (chunks.names, chunks.asked) == (whole.names, classes)
    check("timm-vit", chunks.intervened, whole.intervened)
    check("timm-vit", chunks.difference(), whole.difference())
    check("timm-vit", chunks[3:].difference(), whole.difference()[3:])
    by_row = [
        cv.intervene(model, images[[row]], {cv.Site(0): values[row]}, target=classes[row]).difference()
        for row in range(5)
    ]
    check("timm-vit", cv.intervene(model, images, {cv.Site(0): values}, target=classes).difference(), torch.cat(by_row))
    for options in ({"value": "zero"}, {"value": "source", "source": others}, {"value": "source", "source": others[0]}):
        sweeps = [cv.intervene_sweep(model, images, target=classes, batch_size=size, **options) for size in (None, 2)]
        assert sweeps[0].target == sweeps[1].target
        check("timm-vit", sweeps[1].effects, sweeps[0].effects)


def test_images_that_cannot_be_read_are_left_out_with_their_sources(tmp_path: Path) -> None:
    model, photos, failed = cv.load("pets"), [], []
    for number, method in enumerate(Image.Transpose):
        read_image("demo").transpose(method).save(tmp_path / f"{number}.png")
        photos.append(str(tmp_path / f"{number}.png"))
    Path(photos[1]).write_bytes(b"no picture")
    sites: dict[cv.Site, Any] = {cv.Site(6): "source"}
    options: dict[str, Any] = {"batch_size": 2, "on_error": lambda name, error: failed.append(name)}
    sources = [*photos[:1], "demo", *photos[2:]]
    scores = cv.intervene(model, photos, sites, source=sources, **options)  # each image's own tokens
    assert torch.equal(scores.intervened, scores.original)
    sweep = cv.intervene_sweep(model, photos[:3], kind="block", target="Bengal", **options)
    assert failed == [photos[1]] * 2
    assert sweep.names == (photos[0], photos[2])
    with pytest.raises(BadInput, match="None of the images could be read"):
        cv.intervene_sweep(model, photos[1], **options)
    with pytest.raises(BadInput, match=photos[1]):
        cv.intervene(model, photos, sites, source="demo")


def test_targets_that_read_different_outputs_are_refused() -> None:
    model, images = double("timm-vit", 2)
    targets: list[Any] = [cv.Neuron(1, 5), cv.Neuron(0, 2)]
    for run in (
        lambda: cv.intervene(model, images, {cv.Site(0): "zero"}, target=targets),
        lambda: cv.intervene_sweep(model, images, target=targets),
    ):
        with pytest.raises(BadInput, match="read different outputs"):
            run()


def test_sites_and_images_are_progress() -> None:
    model, images = double("timm-vit", 3)
    steps: list[tuple[str, int, int]] = []
    with on_progress(lambda *step: steps.append(step)):
        cv.intervene_sweep(model, images, kind="mlp", target=1, batch_size=2)
    assert steps.count(("mlp replaced", 2, 2)) == 2
    assert [step for step in steps if step[0] == "images"] == [("images", 2, 3), ("images", 3, 3)]
