"""Taking explanations apart, image by image, and putting them together again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from clairvit.errors import BadInput
from clairvit.methods.explanation import Cost, Explanation, Heads


def part(explanation: Explanation, items: Sequence[int]) -> Explanation:
    """Some of the maps, in the order asked for. The cost stays that of the whole batch: it was spent together."""
    chosen = list(items)
    return replace(
        explanation,
        maps=explanation.maps[chosen],
        targets=tuple(explanation.targets[item] for item in chosen),
        classes=tuple(explanation.classes[item] for item in chosen),
        logits=explanation.logits[chosen],
        probabilities=tuple(explanation.probabilities[item] for item in chosen),
        pixels=explanation.pixels[chosen],
        names=tuple(explanation.names[item] for item in chosen),
        standard_error=None if explanation.standard_error is None else explanation.standard_error[chosen],
        chosen=None if explanation.chosen is None else explanation.chosen[chosen],
        layers=None if explanation.layers is None else explanation.layers[:, chosen],
        heads=None if explanation.heads is None else _part_of_heads(explanation.heads, chosen),
    )


def joined(explanations: Sequence[Explanation]) -> Explanation:
    """One explanation with all the maps, for one figure or one file. They must come from the same method and model."""
    first = explanations[0]
    if len({(one.method, one.model, one.score) for one in explanations}) > 1:
        raise BadInput("Only explanations by the same method, model and score fit into one; compare methods instead.")
    layers = [one.layers for one in explanations if one.layers is not None]
    heads = [one.heads for one in explanations if one.heads is not None]
    return replace(
        first,
        maps=torch.cat([one.maps for one in explanations]),
        targets=tuple(target for one in explanations for target in one.targets),
        classes=tuple(index for one in explanations for index in one.classes),
        logits=torch.cat([one.logits for one in explanations]),
        probabilities=tuple(probability for one in explanations for probability in one.probabilities),
        pixels=torch.cat([one.pixels for one in explanations]),
        names=tuple(name for one in explanations for name in one.names),
        standard_error=_joint([one.standard_error for one in explanations]),
        chosen=_joint([one.chosen for one in explanations]),
        layers=torch.cat(layers, dim=1) if len(layers) == len(explanations) else None,
        heads=_joint_heads(heads) if len(heads) == len(explanations) else None,
        cost=_joint_cost([one.cost for one in explanations]),
        notes=tuple(dict.fromkeys(note for one in explanations for note in one.notes)),
    )


def _joint(maps: Sequence[Tensor | None]) -> Tensor | None:
    found = [one for one in maps if one is not None]
    return torch.cat(found) if len(found) == len(maps) else None


def _part_of_heads(heads: Heads, chosen: list[int]) -> Heads:
    whole = None if heads.whole is None else heads.whole[:, chosen]
    return Heads(heads.method, heads.maps[:, :, chosen], heads.fused[:, :, chosen], whole)


def _joint_heads(heads: Sequence[Heads]) -> Heads:
    whole = [one.whole for one in heads if one.whole is not None]
    return Heads(
        heads[0].method,
        torch.cat([one.maps for one in heads], dim=2),
        torch.cat([one.fused for one in heads], dim=2),
        torch.cat(whole, dim=1) if len(whole) == len(heads) else None,
    )


def _joint_cost(costs: Sequence[Cost]) -> Cost:
    """Passes as each image took them, seconds of all batches. Parts of one batch share one object, counted once."""
    batches = list({id(cost): cost for cost in costs}.values())
    return Cost(
        max(cost.forwards for cost in batches),
        max(cost.backwards for cost in batches),
        sum(cost.seconds for cost in batches),
        sum(cost.own_seconds for cost in batches),
    )
