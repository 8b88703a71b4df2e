"""Tape: the operations from the last tokens to the scores, so that the model's own head can read other tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

_SUMS = (torch.add, Tensor.add, Tensor.add_)


@dataclass(eq=False)
class HeadReplay:
    """Filled while a capture is on; `replay` runs the same operations on another start tensor."""

    start: Tensor | None = None  # the tensor that `replay` replaces
    steps: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], Any]] = field(default_factory=list)

    def add(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        if any(isinstance(leaf, Tensor) for leaf in tree_flatten(out)[0]):
            self.steps.append((function, args, kwargs, out))

    def start_at_last_sum(self, shape: torch.Size) -> None:
        """Where no module ends with the last block: its output is the last sum of the token stream."""
        sums = [i for i, step in enumerate(self.steps) if step[0] in _SUMS and step[3].shape == shape]
        if sums:
            self.start = self.steps[sums[-1]][3]
            del self.steps[: sums[-1] + 1]

    def replay(self, tokens: Tensor, end: Tensor) -> Tensor:
        """The value that `end` would have had if `tokens` had stood where `start` stood."""
        assert self.start is not None
        new: dict[int, Tensor] = {id(self.start): tokens}

        def renewed(leaf: Any) -> Any:
            return new.get(id(leaf), leaf) if isinstance(leaf, Tensor) else leaf

        for function, args, kwargs, out in self.steps:
            leaves = tree_flatten((args, kwargs))[0]
            if not any(id(leaf) in new for leaf in leaves if isinstance(leaf, Tensor)):
                continue  # does not depend on the tokens
            result = function(*tree_map(renewed, args), **tree_map(renewed, kwargs))
            for old, fresh in zip(tree_flatten(out)[0], tree_flatten(result)[0], strict=True):
                if isinstance(old, Tensor):
                    new[id(old)] = fresh
        return new[id(end)]
