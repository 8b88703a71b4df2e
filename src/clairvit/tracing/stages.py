"""Stages: where a network without attention keeps its feature maps, so that CNNs need no adapter either.

A stage is the last feature map [B, C, h, w] of one resolution, and its tokens are the cells of that map. Modules that
span several resolutions (`features`, `blocks`, the network itself) are looked into; those that change it once are a
stage's own business (a residual block that halves the grid still has the old one inside).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from clairvit.errors import CaptureError
from clairvit.tracing.grid import channels_first, fits_image
from clairvit.tracing.module_state import this_thread_only
from clairvit.tracing.parts import MOST_PREFIX_TOKENS

_GLOBAL_POOLS = (nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d)  # the head's reading, no feature map of its own
Grid = tuple[int, int]


@dataclass(frozen=True)
class Stage:
    """The output of one call of one module."""

    name: str  # as in named_modules(): "layer4"
    module: nn.Module
    call: int  # which of the module's calls in one forward: a shared nn.ReLU has many
    grid: Grid


@dataclass(eq=False)
class StageOutput:
    """One call of one module, without its tensors."""

    module: nn.Module
    call: int
    grids: frozenset[Grid] = frozenset()  # of what it was given, and what its parts gave
    grid: Grid | None = None  # of what it gave
    tokens: int = 0  # what it gave, if that was a row of vectors
    unchanged: bool = False  # it gave what it was given: nn.Identity
    parts: list[StageOutput] = field(default_factory=list)

    def gave(self, given: Tensor | None, made: Tensor | None, image: Grid, *, unchanged: bool) -> None:
        self.unchanged = unchanged
        if made is not None and made.requires_grad:
            self.grid, self.tokens = grid_of(made, image), int(made.shape[1]) if made.ndim == 3 else 0
        inside = {part.grid for part in self.parts} | {None if given is None else grid_of(given, image)}
        self.grids = frozenset(grid for grid in inside if grid is not None and grid != (1, 1))


def first_map(out: Any) -> Tensor | None:
    """The first feature map among what a module gave."""
    given = out if isinstance(out, tuple | list) else (out,)
    return next((o for o in given if isinstance(o, Tensor) and o.ndim == 4 and o.is_floating_point()), None)


def grid_of(feature_map: Tensor, image: Grid) -> Grid | None:
    """Return the rows and columns of [B, C, h, w] or [B, h, w, C]; None if no two axes can be those of the image."""
    if feature_map.ndim != 4:
        return None
    rows, cols = feature_map.shape[2:] if channels_first(feature_map, image, tie=True) else feature_map.shape[1:3]
    return (int(rows), int(cols)) if fits_image(int(rows), int(cols), image) else None


def find_stages(network: nn.Module, parts: list[StageOutput]) -> tuple[Stage, ...]:
    """First to last, the grid smaller each time; none if the model turns its maps into tokens."""
    maps = [seen for seen in _laid_open(parts) if seen.grid and not isinstance(seen.module, _GLOBAL_POOLS)]
    maps = [seen for seen in maps if seen.grid != (1, 1)] or maps
    last: dict[Grid, StageOutput] = {}
    for seen in maps:
        assert seen.grid is not None
        if not (seen.unchanged and seen.grid in last):
            last.pop(seen.grid, None)  # a later one goes to the end of the row
            last[seen.grid] = seen
    kept: list[StageOutput] = []
    for grid, seen in reversed(last.items()):
        if not kept or _cells(grid) > _cells(kept[-1].grid):
            kept.append(seen)
    kept.reverse()
    if kept and any(_are_tokens(seen, _cells(kept[-1].grid)) for seen in _all(parts)):
        return ()  # a Vision Transformer after all, whose attention was not seen
    names = {id(module): name for name, module in network.named_modules()}
    return tuple(Stage(names[id(s.module)], s.module, s.call, s.grid) for s in _without_stem(kept) if s.grid)


def _laid_open(parts: Iterable[StageOutput]) -> Iterator[StageOutput]:
    """The calls that may be stages, in the order they ended."""
    for seen in parts:
        if seen.parts and (seen.grid is None or len(seen.grids | {seen.grid}) > 2):
            yield from _laid_open(seen.parts)
        else:
            yield seen


def _without_stem(maps: list[StageOutput]) -> list[StageOutput]:
    """Without single layers before the first module made of several: ResNet begins with layer1, not with a ReLU."""
    first = next((i for i, seen in enumerate(maps) if seen.parts), 0)
    return maps[first:]


def _are_tokens(seen: StageOutput, patches: int) -> bool:
    return patches > 1 and patches <= seen.tokens <= patches + MOST_PREFIX_TOKENS


def _all(parts: Iterable[StageOutput]) -> Iterator[StageOutput]:
    for seen in parts:
        yield seen
        yield from _all(seen.parts)


def _cells(grid: Grid | None) -> int:
    return 0 if grid is None else grid[0] * grid[1]


class Watcher:
    """Keeps the stages' feature maps of one forward. `start` takes the place of the first one."""

    def __init__(self, stages: tuple[Stage, ...], start: Tensor | None) -> None:
        self.stages = stages
        self.start = start
        self.found: dict[int, Tensor] = {}
        self.called: Counter[nn.Module] = Counter()

    def hooks(self) -> list[RemovableHandle]:
        modules = {id(stage.module): stage.module for stage in self.stages}
        return [module.register_forward_hook(this_thread_only(self._leave)) for module in modules.values()]

    def _leave(self, module: nn.Module, args: Any, out: Any) -> None:
        call = self.called[module]
        self.called[module] += 1
        for index, stage in enumerate(self.stages):
            if stage.module is module and stage.call == call:
                made = first_map(out)
                if made is None:
                    continue
                if index == 0 and self.start is not None:
                    made.copy_(self.start)
                # The tensor itself: where the model goes on in place (ReLU), value and gradient are those after it.
                self.found[index] = made

    def maps(self) -> tuple[Tensor, ...]:
        if len(self.found) != len(self.stages):
            missing = ", ".join(stage.name for i, stage in enumerate(self.stages) if i not in self.found)
            raise CaptureError(
                f"The model did not come to {missing}, as it had on an earlier run of the same image size; expected "
                "the same path every time. Switch off random depth or early exits, then trace again."
            )
        return tuple(self.found[index] for index in range(len(self.stages)))
