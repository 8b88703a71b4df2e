"""Checks of a trace: the same scores, attention in every block, and where the tokens lie on the image."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import nn

from clairvit.diagnostics.context import DoctorContext, Gap, abbreviated, check, failed, passed, plural, skipped, warned
from clairvit.diagnostics.forward import largest_gap
from clairvit.diagnostics.inspection import plain_forward
from clairvit.diagnostics.report import Check
from clairvit.errors import ClairError
from clairvit.tracing.attention_call import Kind
from clairvit.tracing.grid import off_proportion
from clairvit.tracing.recording import record
from clairvit.tracing.structure import ModelStructure, model_structure

TABLES = ("plain", "linear", "attnlrp", "reslrp")  # rule tables whose forward must give the plain scores
ATTENTION_KINDS: dict[Kind, str] = {
    "tokens": "between all tokens",
    "window": "inside windows or stages",
    "channel": "between channels",
}
MAX_OFF_PROPORTION = 0.2  # how far a patch may be from square: the tolerance for grids of feature maps


@check("layout", needs=("finite scores", "determinism", "checkpointing"))
def token_grid(context: DoctorContext) -> Check:
    """Check that the patch tokens lie on the image row by row, in a grid of its proportions."""
    try:
        structure = model_structure(context.model, context.pixels)
    except ClairError as error:
        if context.status("gradient") != "pass":
            return skipped(f"Not checked, because of 'gradient': {error}")
        raise
    rows, columns = (int(side) for side in context.pixels.shape[-2:])
    if structure.layout is None and structure.stages:
        listed_stages = ", ".join(f"{stage.name} {stage.grid[0]} × {stage.grid[1]}" for stage in structure.stages)
        return passed(
            f"Feature maps of a CNN: {listed_stages}.", stages=[list(stage.grid) for stage in structure.stages]
        )
    if structure.layout is None:
        return warned(
            "No patch tokens were recognised: neither a grid that fits the token count nor feature maps.",
            "State it: cv.wrap(module, layout=cv.Layout(grid=(rows, columns), prefix=…, pooling=…)). Without it only "
            "pixel methods (saliency) apply.",
        )
    layout = structure.layout
    details: dict[str, Any] = {
        "grid": list(layout.grid),
        "prefix": layout.prefix,
        "suffix": layout.suffix,
        "pooling": layout.pooling,
        "blocks": len(structure.layers),
        "given": context.model.layout is not None,
    }
    blocks = "" if structure.members else f"{plural(len(structure.layers), 'block')}, "
    summary = (
        f"{blocks}{' × '.join(map(str, layout.grid))} patches, "
        f"{plural(layout.prefix, 'prefix token')}, "
        f"{plural(layout.suffix, 'suffix token') + ', ' if layout.suffix else ''}{layout.pooling} pooling"
    )
    if off_proportion(layout.grid[-2], layout.grid[-1], (rows, columns)) > MAX_OFF_PROPORTION:
        return failed(
            f"{summary}: that grid has other proportions than an image of {rows} × {columns} pixels.",
            "State the right one: cv.wrap(module, layout=cv.Layout(grid=(rows, columns), prefix=…, pooling=…)).",
            **details,
        )
    if structure.region is not None:
        return failed(
            f"{summary}; but they lie on {structure.region}: the forward crops, pads or shifts the image.",
            "Let cv.wrap(module, size=…, resize=…) crop and resize, and wrap the inner module. Until then pixel "
            "methods (saliency) and perturbation methods apply.",
            **details,
        )
    if structure.painted:
        cells = " × ".join(map(str, layout.grid))
        return warned(
            f"No tokens are seen: the forward leaves torch. Perturbation methods paint {cells} cells of the image.",
            "State a grid if you want another: cv.wrap(module, layout=cv.Layout(grid=(rows, columns), prefix=0, "
            "pooling='avg')).",
            **details,
        )
    if not structure.in_order:
        return warned(
            f"{summary}; but the patch tokens do not lie row by row on the image (tokens sorted by windows, an "
            "image that is turned), or it cannot be told, so that they make no map.",
            "Use pixel methods (saliency), or state the layout if that is wrong: cv.wrap(module, layout=…).",
            **details,
        )
    return passed(f"{summary}.", **details)


@check("trace", needs=("layout",))
def scores_unchanged_in_trace(context: DoctorContext) -> Check:
    """Check that a traced forward pass gives the scores of a plain one."""
    differentiable = context.status("gradient") == "pass"
    tables = TABLES if differentiable else ("plain",)
    gaps = []
    for precision in context.precisions:
        traced = record(precision.model, precision.pixels, rules=tables, differentiable=differentiable)
        gap = largest_gap(plain_forward(precision.model, precision.pixels), traced.logits)
        gaps.append(Gap(precision.name, gap, precision.rounding.scores))
    details: dict[str, Any] = {"gaps": [vars(gap) for gap in gaps], "tables": list(tables)}
    broken = [gap for gap in gaps if gap.difference > gap.bound]
    if broken:
        return failed(
            f"The scores of a traced forward differ from those of a plain one {broken[0]}.",
            "The forward does something else when gradients are on (torch.is_grad_enabled(), x.requires_grad) or "
            "uses other kernels. Make both the same.",
            **details,
        )
    return passed(f"Scores of a traced and of a plain forward differ {' and '.join(map(str, gaps))}.", **details)


@check("attention", needs=("trace",))
def attention_in_every_block(context: DoctorContext) -> Check:
    """Check that attention was captured in every block that ran."""
    structure = model_structure(context.model, context.pixels)
    missing = blocks_without_attention(context.model.module, structure, context.forward.called)
    kinds = Counter(part.kind for part in structure.sites)
    details: dict[str, Any] = {"layers": len(structure.layers), "kinds": dict(kinds), "unseen": missing}
    if missing:
        captured_note = f"; it was seen in {plural(len(structure.layers), 'block')}" if structure.layers else ""
        return failed(
            f"No attention was seen in {abbreviated(missing)}, which ran{captured_note}. It is computed outside torch "
            "(numpy, xformers, flash-attn kernels) or in a way that is not recognised.",
            "Turn such kernels off in the model's settings, or write the attention with "
            "torch.nn.functional.scaled_dot_product_attention. Until then no attention method is right.",
            **details,
        )
    if not structure.sites:
        return passed(
            f"None, and no module is named so: a CNN, say. Its layers are {plural(len(structure.stages), 'stage')}; "
            "CAM and gradient methods apply.",
            **details,
        )
    if structure.members:
        return warned(
            f"Seen in several networks side by side: {structure.members_apart}.",
            "Explain each network by itself. Of the whole, methods that ask it for scores of changed images are right "
            "(lime, rise, leave-one-out), and gradients at the pixels (saliency).",
            **details,
        )
    counts = [f"{kinds[kind]} {phrase}" for kind, phrase in ATTENTION_KINDS.items() if kinds[kind]]
    pools = f", and {plural(kinds['pool'], 'attention pool')}" if kinds["pool"] else ""
    heads = head_count(context)
    heads_note = f", {heads} heads" if heads else ""
    return passed(f"Seen in every block: {', '.join(counts)}{heads_note}{pools}.", heads=heads, **details)


def head_count(context: DoctorContext) -> int:
    """Return the number of heads if all layers have the same, else 0."""
    recording = record(context.model, context.pixels[:1], differentiable=False)
    heads = {int(call.v.shape[1]) for call in recording.calls if call.kind == "tokens"}
    return heads.pop() if len(heads) == 1 else 0


def blocks_without_attention(module: nn.Module, structure: ModelStructure, called: set[str]) -> list[str]:
    """Return the names of submodules that ran, look like blocks with attention, and in which none was captured.

    If attention was captured somewhere: modules of the class of such a block, or in the same container, that have the
    parameters of such a block or a submodule named attention. If none was captured: modules named so.
    """
    captured = [part.block for part in structure.layers if part.block is not None]
    names = {id(part): name for name, part in module.named_modules()}
    if not structure.sites:
        return [
            name
            for name, part in module.named_modules()
            if name in called
            and _is_named_attention(name, part)
            and not any(_is_named_attention(inner, p) for inner, p in part.named_modules() if inner)
        ]
    inside = {id(part) for block in captured for part in block.modules()}
    around = {
        id(part) for part in module.modules() if any(id(inner) in {*map(id, captured)} for inner in part.modules())
    }
    containers = {name.rpartition(".")[0] for block in captured if (name := names[id(block)])}
    classes, shapes = {type(block) for block in captured}, {_parameter_names(block) for block in captured}
    missing = []
    for name, part in module.named_modules():
        if id(part) in inside or id(part) in around or name not in called:
            continue
        similar = type(part) in classes or name.rpartition(".")[0] in containers
        attends = any(_is_named_attention(inner, p) for inner, p in part.named_modules() if inner)
        if similar and (_parameter_names(part) in shapes or attends):
            missing.append(name)
    return missing


def _is_named_attention(name: str, part: nn.Module) -> bool:
    """Return whether a module's name or class contains attention; dropout and norms do not count."""
    last, kind = name.rpartition(".")[2].lower(), type(part).__name__.lower()
    if isinstance(part, nn.Identity | nn.Dropout | nn.LayerNorm | nn.Softmax):
        return False
    return last in ("attn", "attention", "self_attn", "self_attention", "mha") or "attention" in kind or "attn" in kind


def _parameter_names(part: nn.Module) -> frozenset[str]:
    """Return the names of a module's parameters; a unique name for a module without any."""
    return frozenset(name for name, _ in part.named_parameters()) or frozenset({f"<{id(part)}>"})
