"""Film: every operation of a forward from the first block on, with its values, for methods that look inside blocks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map


@dataclass(frozen=True, eq=False)
class Step:
    """One operation. `stale`: a tensor of it was overwritten later, in a way that could not be followed."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any
    versions: tuple[tuple[Tensor, int], ...] = ()
    stale: bool = False

    @functools.cached_property
    def given(self) -> list[Tensor]:
        return _tensors((self.args, self.kwargs))

    @functools.cached_property
    def made(self) -> list[Tensor]:
        return _tensors(self.out)

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        return self.args[position] if len(self.args) > position else self.kwargs.get(name, default)


@dataclass(eq=False)
class OpLog:
    """Filled while a capture is on. `starts[b]` is the input of block b and how many steps came before it."""

    steps: list[Step] = field(default_factory=list)
    starts: list[tuple[Tensor, int]] = field(default_factory=list)
    attended: list[tuple[int, Tensor]] = field(default_factory=list)  # each layer's block and attention output
    last: Tensor | None = None  # the last block's output
    end: Tensor | None = None  # the scores

    def entering(self, tokens: Tensor) -> OpLog:
        self.starts.append((tokens, len(self.steps)))
        return self

    def before(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """The arguments as they are now: what an operation is about to overwrite is kept as a copy."""
        if not (args and isinstance(args[0], Tensor) and _overwrites(function, kwargs)):
            return args
        written, kept = args[0], args[0].detach().clone()

        def renewed(leaf: Any) -> Any:
            return kept if leaf is written else leaf

        self.steps = [
            Step(
                step.function,
                renew(renewed, step.args),
                renew(renewed, step.kwargs),
                renew(renewed, step.out),
                tuple((kept, _version(kept)) if t is written else (t, v) for t, v in step.versions),
            )
            for step in self.steps
        ]
        self.starts = [(renewed(tokens), index) for tokens, index in self.starts]
        return (kept, *args[1:])

    def add(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        made = _tensors(out)
        if made:
            seen = (*_tensors((args, kwargs)), *made)
            self.steps.append(Step(function, args, kwargs, out, tuple((t, _version(t)) for t in seen)))

    def seal(self, attended: list[tuple[int, Tensor]], last: Tensor | None, end: Tensor) -> None:
        """Cut every tensor from the graph, so that the film does not keep it."""
        cut: dict[int, Tensor] = {}
        alive: list[Tensor] = []  # an id is good for as long as its tensor lives

        def detached(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            if id(leaf) not in cut:
                cut[id(leaf)] = leaf.detach()
                alive.append(leaf)
            return cut[id(leaf)]

        self.steps = [
            Step(
                step.function,
                renew(detached, step.args),
                renew(detached, step.kwargs),
                renew(detached, step.out),
                stale=any(_version(t) != version for t, version in step.versions),
            )
            for step in self.steps
        ]
        self.starts = [(detached(tokens), index) for tokens, index in self.starts]
        self.attended = [(block, detached(out)) for block, out in attended]
        self.last, self.end = detached(last), detached(end)


def _tensors(tree: Any) -> list[Tensor]:
    """By hand for what nearly every call is made of: torch's own walk through trees takes ten times as long."""
    if isinstance(tree, Tensor):
        return [tree]
    if type(tree) in (tuple, list):
        return [leaf for branch in tree for leaf in _tensors(branch)]
    if type(tree) is dict:
        return [leaf for branch in tree.values() for leaf in _tensors(branch)]
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor)] if isinstance(tree, tuple) else []


def renew(change: Callable[[Any], Any], tree: Any) -> Any:
    """The tree with every leaf changed, as torch's tree_map."""
    if type(tree) in (tuple, list):
        return type(tree)(renew(change, branch) for branch in tree)
    if type(tree) is dict:
        return {name: renew(change, branch) for name, branch in tree.items()}
    return tree_map(change, tree) if isinstance(tree, tuple) else change(tree)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _overwrites(function: Callable[..., Any], kwargs: dict[str, Any]) -> bool:
    """`x += y`, `x.add_(y)`, `relu(x, inplace=True)`."""
    name = getattr(function, "__name__", "")
    marked = name.endswith("_") and not name.endswith("__")
    return marked or (name.startswith("__i") and name not in _NOT_IN_PLACE) or bool(kwargs.get("inplace"))


_NOT_IN_PLACE = ("__init__", "__invert__", "__index__", "__int__", "__iter__")
