"""Similarity of two images: against cosines of embeddings by autograd, and on scenes that share an object."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

import clairvit as cv
from clairvit.data.scenes import CLASSES, Scene, draw, plan, with_class
from helpers import tiny_models, tiny_pairs
from helpers.module_fingerprint import fingerprint
from helpers.relevance import mean_on
from helpers.rounding import assert_same

METHODS = ["ixg", "saliency", "attnlrp", "genatt", "decompx", "legrad", "fullgrad", "leave-one-out", "gradcam"]


def classifier_and_embedding(name: str) -> tuple[cv.Model, cv.Model, Any]:
    """Return a classifier, a model of the same weights without its head, and the module of the latter."""
    module: Any = tiny_models.build(name).double()
    without_head: Any = tiny_models.build(name).double()
    if hasattr(without_head, "reset_classifier"):
        without_head.head = nn.Identity()
    else:
        without_head.classifier = nn.Identity()
    size = tiny_models.ZOO[name].size
    return cv.wrap(module, size=size), cv.wrap(without_head, size=size, classifier=False), without_head


@pytest.mark.parametrize("name", ["timm-vit", "timm-vit-avg", "hf-dinov2-sdpa"])
def test_the_embedding_of_a_classifier_is_what_its_head_reads(name: str) -> None:
    classifier, embedding, module = classifier_and_embedding(name)
    images = tiny_models.pixels(name, batch=3, dtype=torch.float64)
    output = module(images)
    vectors = output if isinstance(output, Tensor) else output.logits
    trace = cv.trace(classifier, images[:2], target=cv.Similar(images[2]))
    assert trace.target.names == ("similar to image 1",) * 2
    assert_same(trace.target(trace.logits).detach(), cosine_similarity(vectors[:2], vectors[2:]).detach())
    for method in METHODS:
        first, second = (
            cv.explain(model, images[:2], method, target=cv.Similar(images[2])) for model in (classifier, embedding)
        )
        assert first.score == second.score == "cosine"
        assert_same(first.maps, second.maps, magnitude=max(1.0, float(second.maps.abs().max())), label=method)


@pytest.mark.parametrize("name", tiny_pairs.PAIRS)
def test_gradients_of_the_cosine_of_two_images(name: str) -> None:
    pair, images = tiny_pairs.build(name), tiny_pairs.pixels(2)
    trace = cv.trace(tiny_pairs.wrapped(name, pair), images[:1], target=cv.Similar(images[1]))
    inputs: list[Tensor] = []
    hook = tiny_pairs.blocks(pair)[0].register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    score = cosine_similarity(*(tiny_pairs.image_features(pair, image[None]) for image in images))
    hook.remove()
    (gradient,) = torch.autograd.grad(score.sum(), inputs[0])
    assert_same(trace.target(trace.logits).detach(), score.detach())
    assert_same(trace.layers[0].dx, gradient)


@pytest.mark.parametrize("name", ["open_clip", "SiglipModel"])
def test_the_cosine_is_shared_out_and_patches_are_removed_from_one_image_alone(name: str) -> None:
    """Linear rules: Σ x · dx is the cosine where the tower has no biases. Removal: the other image stays whole."""
    pair, images = tiny_pairs.build(name), tiny_pairs.pixels(2)
    with torch.no_grad():
        for parameter_name, parameter in pair.named_parameters():
            if parameter_name.endswith("bias") and "vis" in parameter_name:
                parameter.zero_()
    model, target = tiny_pairs.wrapped(name, pair), cv.Similar(images[1])
    with torch.no_grad():
        embeddings = [tiny_pairs.image_features(pair, image[None]) for image in images]
        cosine = cosine_similarity(*embeddings)
        dropped = []
        for patch in range(9):
            hook = tiny_pairs.blocks(pair)[0].register_forward_pre_hook(_without(patch))
            dropped.append(cosine_similarity(tiny_pairs.image_features(pair, images[:1]), embeddings[1]))
            hook.remove()
    trace = cv.trace(model, images[:1], target=target, rules="linear")
    for layer in trace.layers:
        products = layer.x * layer.dx
        assert_same(products.sum((1, 2)), cosine, magnitude=float(products.abs().sum((1, 2)).max()))
    maps = cv.explain(model, images[:1], "leave-one-out", target=target).maps
    assert_same(maps.flatten(), cosine - torch.cat(dropped), magnitude=1.0)


def _without(patch: int) -> Any:
    """Return a hook that removes one of the last nine tokens before a block."""

    def drop(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        gone = args[0].shape[1] - 9 + patch
        return (torch.cat([args[0][:, :gone], args[0][:, gone + 1 :]], 1), *args[1:])

    return drop


def test_a_zero_shot_classifier_compares_by_its_tower() -> None:
    from clairvit.models.sources.adapters import ZeroShot

    pair, images = tiny_pairs.build("open_clip"), tiny_pairs.pixels(2)
    module = ZeroShot(pair.visual, torch.eye(12, dtype=torch.float64)[:3], pair.logit_scale.exp()).double()
    trace = cv.trace(cv.wrap(module, size=24), images[:1], target=cv.Similar(images[1]))
    expected = cosine_similarity(*(pair.encode_image(image[None]) for image in images))
    assert_same(trace.target(trace.logits).detach(), expected.detach())


def test_both_directions(tmp_path: Path) -> None:
    model, images = tiny_models.double("timm-vit")
    pair = cv.match(model, images[0], images[1], "ixg")
    assert pair.explanation.cost.forwards == 1
    for item, other in ((0, 1), (1, 0)):
        alone = cv.explain(model, images[item], "ixg", target=cv.Similar(images[other]))
        assert_same(pair.explanation.maps[item], alone.maps[0], magnitude=1.0)
    assert_same(torch.tensor(pair.explanation.target_scores), torch.tensor([pair.cosine] * 2))
    assert json.loads(pair.save(tmp_path / "pair.json").read_text())["cosine"] == pair.cosine
    assert pair.save(tmp_path / "pair.png").read_bytes() == pair.save(tmp_path / "again.png").read_bytes()
    assert pair.save(tmp_path / "pair.npz").stat().st_size > 0
    assert pair._repr_png_().startswith(b"\x89PNG")


def test_the_value_that_is_explained() -> None:
    model, images = tiny_models.double("timm-vit")
    for method, score, value in (("ixg", "logit", "class_scores"), ("rise(samples=4)", "prob", "probabilities")):
        explanation = cv.explain(model, images, method)
        assert explanation.score == score
        assert_same(explanation.target_scores, getattr(explanation, value))
    assert cv.explain(model, images, "rollout").target_scores == (None, None)


def test_a_module_in_training_mode_is_left_so() -> None:
    module = tiny_models.build("timm-vit").train()
    before = fingerprint(module)
    cv.explain(cv.wrap(module), tiny_models.pixels("timm-vit", 1), "ixg", target=cv.Similar("demo"))
    assert fingerprint(module) == before


def test_images_and_models_that_cannot_be_compared(tmp_path: Path) -> None:
    with pytest.raises(cv.errors.BadInput, match=r"nowhere\.jpg"):
        cv.explain("pets", "demo", "ixg", target=cv.Similar(tmp_path / "nowhere.jpg"))
    (tmp_path / "broken.jpg").write_bytes(b"no picture")
    with pytest.raises(cv.errors.BadInput, match=r"broken\.jpg"):
        cv.explain("pets", "demo", "ixg", target=cv.Similar(tmp_path / "broken.jpg"))
    with pytest.raises(cv.errors.BadInput, match=r"cv\.Similar got 2 images; expected one"):
        cv.explain("pets", "demo", "ixg", target=cv.Similar(["demo", "demo"]))
    distilled, images = tiny_models.double("timm-deit-distilled")
    with pytest.raises(cv.errors.NotApplicable, match="are not the output of one linear layer"):
        cv.explain(distilled, images, "ixg", target=cv.Similar(images[0]))
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    detector = transformers.YolosForObjectDetection(transformers.YolosConfig(**sizes, image_size=[32, 32]))
    with pytest.raises(cv.errors.NotApplicable, match="has no embedding that images could be compared by"):
        cv.explain(cv.wrap(detector, size=32), torch.zeros(1, 3, 32, 32), "ixg", target=cv.Similar("demo"))


def shared_object_scenes(count: int) -> list[tuple[Scene, Scene]]:
    """Return pairs of scenes with two objects each, of which the first have one class and the second have two."""
    pairs = []
    for number in range(count):
        first, second = plan(5, 2 * number, 2), plan(5, 2 * number + 1, 2)
        classes = [item.marker.class_name for item in first.objects if item.marker is not None]
        third = next(name for name in CLASSES if name not in classes)
        pairs.append((draw(first), draw(with_class(with_class(second, str(classes[0])), third, 1))))
    return pairs


def test_scenes_are_alike_by_the_object_that_they_share() -> None:
    """The shared object has more relevance than the other in at least 10 of 12 maps; chance would give 6."""
    model, on_shared = cv.load("scenes"), []
    for scenes in shared_object_scenes(6):
        maps = cv.match(model, scenes[0].picture, scenes[1].picture, "attnlrp").explanation.maps
        on_shared += [mean_on(m, s.part) > mean_on(m, s.other_part) for m, s in zip(maps, scenes, strict=True)]
    assert sum(on_shared) >= 10, on_shared
