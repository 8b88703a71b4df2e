"""Stages: where a network without attention keeps its feature maps, so that CNNs need no adapter either.

A stage is the last feature map [B, C, h, w] of one resolution, and its tokens are the cells of that map. Modules that
span several resolutions (`features`, `blocks`, the network itself) are opened; those that change it once belong to one
stage (a residual block that halves the grid still has the old one inside).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from clairvit.errors import CaptureError
from clairvit.models.submodules import weak_modules
from clairvit.tracing.grid import MOST_PREFIX_TOKENS, channels_first, fits_image
from clairvit.tracing.module_state import this_thread_only

_GLOBAL_POOLS = (nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d)  # part of the head, no feature map
Grid = tuple[int, int]


@weak_modules("module")
@dataclass(frozen=True)
class Stage:
    """The output of one call of one module."""

    name: str  # as in named_modules(): "layer4"
    module: nn.Module
    call: int  # which of the module's calls in one forward: a shared nn.ReLU has many
    grid: Grid


@dataclass(eq=False)
class ModuleCall:
    """One call of one module: the grids of its tensors, not the tensors."""

    module: nn.Module
    call: int
    grids: frozenset[Grid] = frozenset()  # of its input, and of the outputs of its submodules
    grid: Grid | None = None  # of its output
    tokens: int = 0  # of its output, if that is a sequence of vectors
    unchanged: bool = False  # its output is its input: nn.Identity
    inner: list[ModuleCall] = field(default_factory=list)  # calls of its submodules

    def set_output(self, x: Tensor | None, out: Tensor | None, image: Grid, *, unchanged: bool) -> None:
        self.unchanged = unchanged
        if out is not None and out.requires_grad:
            self.grid, self.tokens = grid_of(out, image), int(out.shape[1]) if out.ndim == 3 else 0
        grids = {call.grid for call in self.inner} | {None if x is None else grid_of(x, image)}
        self.grids = frozenset(grid for grid in grids if grid is not None and grid != (1, 1))


def first_map(out: Any) -> Tensor | None:
    """Return the first feature map among a module's outputs."""
    outputs = out if isinstance(out, tuple | list) else (out,)
    return next((o for o in outputs if isinstance(o, Tensor) and o.ndim == 4 and o.is_floating_point()), None)


def grid_of(feature_map: Tensor, image: Grid) -> Grid | None:
    """Return the rows and columns of [B, C, h, w] or [B, h, w, C]; None if no two axes can be those of the image."""
    if feature_map.ndim != 4:
        return None
    rows, cols = feature_map.shape[2:] if channels_first(feature_map, image, tie=True) else feature_map.shape[1:3]
    return (int(rows), int(cols)) if fits_image(int(rows), int(cols), image) else None


def find_stages(network: nn.Module, calls: list[ModuleCall]) -> tuple[Stage, ...]:
    """Return the stages, the grid smaller each time; none if the model turns its maps into tokens."""
    maps = [call for call in _opened(calls) if call.grid and not isinstance(call.module, _GLOBAL_POOLS)]
    maps = [call for call in maps if call.grid != (1, 1)] or maps
    last: dict[Grid, ModuleCall] = {}
    for call in maps:
        assert call.grid is not None
        if not (call.unchanged and call.grid in last):
            last.pop(call.grid, None)  # a later one goes to the end
            last[call.grid] = call
    kept: list[ModuleCall] = []
    for grid, call in reversed(last.items()):
        if not kept or _cells(grid) > _cells(kept[-1].grid):
            kept.append(call)
    kept.reverse()
    if kept and any(_are_tokens(call, _cells(kept[-1].grid)) for call in _all(calls)):
        return ()  # a Vision Transformer after all, whose attention was not seen
    names = {id(module): name for name, module in network.named_modules()}
    return tuple(Stage(names[id(s.module)], s.module, s.call, s.grid) for s in _without_stem(kept) if s.grid)


def _opened(calls: Iterable[ModuleCall]) -> Iterator[ModuleCall]:
    """Yield the calls that may be stages, in the order they ended."""
    for call in calls:
        if call.inner and (call.grid is None or len(call.grids | {call.grid}) > 2):
            yield from _opened(call.inner)
        else:
            yield call


def _without_stem(maps: list[ModuleCall]) -> list[ModuleCall]:
    """Drop single layers before the first module made of several: ResNet begins with layer1, not with a ReLU."""
    first = next((i for i, call in enumerate(maps) if call.inner), 0)
    return maps[first:]


def _are_tokens(call: ModuleCall, patches: int) -> bool:
    return patches > 1 and patches <= call.tokens <= patches + MOST_PREFIX_TOKENS


def _all(calls: Iterable[ModuleCall]) -> Iterator[ModuleCall]:
    for call in calls:
        yield call
        yield from _all(call.inner)


def _cells(grid: Grid | None) -> int:
    return 0 if grid is None else grid[0] * grid[1]


@dataclass(eq=False)
class StageRecorder:
    """Record the stages' feature maps of one forward. `start` replaces the first one."""

    stages: tuple[Stage, ...]
    start: Tensor | None
    _maps: dict[int, Tensor] = field(default_factory=dict)
    _call_counts: Counter[nn.Module] = field(default_factory=Counter)

    def hooks(self) -> list[RemovableHandle]:
        modules = {id(stage.module): stage.module for stage in self.stages}
        return [module.register_forward_hook(this_thread_only(self._leave)) for module in modules.values()]

    def _leave(self, module: nn.Module, args: Any, out: Any) -> None:
        call = self._call_counts[module]
        self._call_counts[module] += 1
        for index, stage in enumerate(self.stages):
            if stage.module is module and stage.call == call:
                feature_map = first_map(out)
                if feature_map is None:
                    continue
                if index == 0 and self.start is not None:
                    feature_map.copy_(self.start)
                # The tensor itself: where the model goes on in place (ReLU), value and gradient are those after it.
                self._maps[index] = feature_map

    def maps(self) -> tuple[Tensor, ...]:
        """Return one feature map per stage; raise CaptureError if one is missing."""
        if len(self._maps) != len(self.stages):
            missing = ", ".join(stage.name for i, stage in enumerate(self.stages) if i not in self._maps)
            raise CaptureError(
                f"The model did not come to {missing}, as it had on an earlier run of the same image size; expected "
                "the same path every time. Switch off random depth or early exits, then trace again."
            )
        return tuple(self._maps[index] for index in range(len(self.stages)))
