"""Which operations of a recorded graph a rule table should have had a rule for, and has none.

An operation with a rule is one node of the graph, and what it is made of is hidden behind it. So a walk from the scores
back to the pixels meets what has no rule of its own. There the ordinary gradient is right where the operation is linear
in what depends on the pixels, or homogeneous as a ReLU; anything else is reported.

    ok          views, sums, means, joins, ReLU, maxima, a product with one factor that depends on the pixels
    reported    a product or quotient of two such factors, a bent function, a custom autograd function, anything unknown
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from clairvit.tracing.residual_sums import joins_stream_and_layers, without_views
from clairvit.tracing.rules.table import INPUTS_FOLLOWED, RuleTable

# Linear in what depends on the pixels, however many inputs that are, or homogeneous of degree 1.
_LINEAR = frozenset(
    {
        *("Add", "Sub", "Rsub", "Neg", "Sum", "Mean", "Nansum", "Cumsum", "Trace", "AddRelu"),
        *("View", "UnsafeView", "ReshapeAlias", "Alias", "AsStrided", "Permute", "Transpose", "T", "Mt", "Swapaxes"),
        *("Unsqueeze", "Squeeze", "Expand", "Clone", "Contiguous", "ToCopy", "Cat", "Stack", "Unbind", "Split"),
        *("SplitWithSizes", "Chunk", "Select", "Slice", "Narrow", "Index", "IndexSelect", "IndexPut", "IndexAdd"),
        *("IndexCopy", "Gather", "Scatter", "ScatterAdd", "Take", "Copy", "CopySlices", "CopyBackwards", "Fill"),
        *(
            "MaskedFill",
            "MaskedSelect",
            "MaskedScatter",
            "Where",
            "Repeat",
            "RepeatInterleave",
            "Flip",
            "Roll",
            "Rot90",
        ),
        *("Tile", "Diagonal", "DiagEmbed", "Tril", "Triu", "Movedim", "PixelShuffle", "PixelUnshuffle", "Im2Col"),
        *("Col2Im", "UnfoldBackward", "Unfold", "ConstantPadNd", "ReflectionPad1D", "ReflectionPad2D", "Nop"),
        *(
            "ReplicationPad1D",
            "ReplicationPad2D",
            "AvgPool2D",
            "AvgPool3D",
            "AdaptiveAvgPool2D",
            "MkldnnAdaptiveAvgPool2D",
        ),
        *("UpsampleBilinear2D", "UpsampleBicubic2D", "UpsampleNearest2D", "UpsampleLinear1D", "UpsampleNearest1D"),
        *("UpsampleBilinear2DAa", "UpsampleBicubic2DAa", "UpsampleNearestExact2D", "GridSampler2D", "FftR2C", "FftC2R"),
        *("FftC2C", "Real", "Imag", "ViewAsReal", "ViewAsComplex", "Complex", "SelectReal", "ChannelShuffle"),
        *(
            "Relu",
            "LeakyRelu",
            "RreluWithNoise",
            "Abs",
            "Maximum",
            "Minimum",
            "Fmax",
            "Fmin",
            "Max",
            "Min",
            "Amax",
            "Amin",
        ),
        *("MaxPool2DWithIndices", "MaxPool3DWithIndices", "AdaptiveMaxPool2D", "Sort", "Topk", "Median", "Clamp"),
        *("ClampMin", "ClampMax", "Dropout", "NativeDropout", "AccumulateGrad", "Identity", "LiftFresh", "Detach"),
    }
)
# Linear in each factor: fine where one of them alone depends on the pixels.
_MULTILINEAR = frozenset(
    {
        *(
            "Mul",
            "Mm",
            "Bmm",
            "Mv",
            "Dot",
            "Linear",
            "MkldnnLinear",
            "Addmm",
            "Addbmm",
            "Baddbmm",
            "Addmv",
            "Addr",
            "Addcmul",
        ),
        *(
            "Convolution",
            "ConvolutionOverrideable",
            "CudnnConvolution",
            "MkldnnConvolution",
            "Bilinear",
            "Kron",
            "Prelu",
        ),
        *("PreluKernel", "EmbeddingBag", "Sparse"),
    }
)
_CONVOLUTIONS = ("Convolution", "ConvolutionOverrideable", "CudnnConvolution", "MkldnnConvolution")
_WITH_RULES = frozenset(  # linear layers and convolutions, which some tables have a rule for
    {"Mm", "Bmm", "Mv", "Linear", "MkldnnLinear", "Addmm", "Addbmm", "Baddbmm", "Addmv", *_CONVOLUTIONS}
)
_ADDENDS = {"Addmm": 1, "Addbmm": 1, "Baddbmm": 1, "Addmv": 1, "Addr": 1, "Addcmul": 1}  # inputs that are added
_QUOTIENTS = {"Div": 1, "Addcdiv": 2}  # the divisor's place
_PLAIN_SUMS = ("Add", "Sub", "Rsub")
_SUMS_OF = ("Sum", "Mean")  # along an axis, which may be that of a stack
_BATCH_NORMS = ("NativeBatchNorm", "CudnnBatchNorm", "MiopenBatchNorm")
_BENT_ROLES = frozenset({"norm", "length", "activation", "gate", "softmax", "attention", "factor", "uncentred"})
_VIEWS = ("View", "UnsafeView", "Squeeze", "Unsqueeze", "ToCopy", "Clone", "Select", "Slice")
_WITH_MEAN = ("VarMean", "StdMean")  # the second output is a mean
_NAMES = {
    "attnlrp": "AttnLRP",
    "reslrp": "ResLRP",
    "cp-lrp": "CP-LRP",
    "linear": "CP-LRP",
    "libra": "LibraGrad",
    "lrp": "LRP",
    "chefer": "LRP",
    "deep-taylor": "Deep Taylor",
}  # of tables, as readers know them
_NAME = re.compile(r"Backward\w*$")
_WORDS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


def uncovered_operations(scores: Tensor, outputs: Iterable[Any], table: RuleTable) -> tuple[str, ...]:
    """Return the names of the operations between the pixels and the output that the table should have had a rule for.

    Args:
        scores: The scores, in the graph of a recording that followed this table among others.
        outputs: The nodes of what the module returned. What turns that into scores is the target's, not the model's:
            it keeps its ordinary gradient.
        table: A rule table.

    Returns:
        One name per operation, last to first, such as "mul", "sqrt" or the name of a custom autograd function.
    """
    if scores.grad_fn is None or "norm" not in table.rules:  # `plain`, `residual`: no rules for bent operations
        return ()
    followed, means = _followed_nodes(_last_of_model(scores.grad_fn, set(outputs)), table)
    names = {node: _operation(node.name()) for node in followed}
    live = _live(followed)
    attention = _attention_scores(followed, names, live, table)
    sums = _weighted_sums(followed, names, live, attention) if "linear" in table.rules else set()
    residual = _residual_sums(followed, names, live) if "add" in table.rules else {}
    return tuple(
        "sum of a product" if node in sums else residual.get(node) or _reported_name(node)
        for node, parents in followed.items()
        if node in sums
        or node in residual
        or (live[node] and node not in attention | means and not _is_covered(node, names[node], parents, live, table))
    )


def note_on(names: tuple[str, ...], table: str) -> str:
    """Return the sentence about operations without a rule."""
    base = table.partition("(")[0]
    kinds = list(dict.fromkeys(names))
    listed = ", ".join(kinds[:3]) + (", …" if len(kinds) > 3 else "")
    operations = f"{len(names)} operation{'s' * (len(names) > 1)}"
    return f"{operations} of the model had no {_NAMES.get(base, base)} rule ({listed}); relevance may be wrong."


def _last_of_model(start: Any, outputs: set[Any]) -> list[Any]:
    """Return the nodes of the module's output that the scores are computed from; the scores' own if there is none.

    Where the module ends with probabilities, which are no part of the network, those of the scores before these.
    """
    reached, visited, pending = [], {start}, [start]
    while pending:
        node = pending.pop()
        if node in outputs:
            reached.append(node)
            continue
        new = [parent for parent, _ in node.next_functions if parent is not None and parent not in visited]
        visited.update(new)
        pending.extend(new)
    ends = []
    for node in reached or [start]:
        last = node
        while _operation(last.name()) in _VIEWS and last.next_functions[0][0] is not None:
            last = last.next_functions[0][0]
        parent = last.next_functions[0][0] if _operation(last.name()) in ("Softmax", "LogSoftmax", "Sigmoid") else None
        ends.append(node if parent is None else parent)
    return ends


def _followed_nodes(starts: Sequence[Any], table: RuleTable) -> tuple[dict[Any, tuple[Any, ...]], set[Any]]:
    """Return node -> parents of all nodes that a backward under the table visits, and those read for a mean alone."""
    followed: dict[Any, tuple[Any, ...]] = {}
    second, first = set[Any](), set[Any]()  # nodes by the output that is read
    pending = [*starts]
    while pending:
        node = pending.pop()
        if node in followed:
            continue
        edges = node.next_functions
        parents = tuple(parent for parent, _ in edges)
        role = getattr(node, "role", None)
        if node.name() == "torch::autograd::CopyBackwards":
            parents = (None, *parents[1:]) if len(parents) == 2 else parents  # what is overwritten passes nothing on
        if role is not None and (rule := table.rules.get(role)) is not None:
            places = INPUTS_FOLLOWED.get(rule)
            if places is not None:
                parents = tuple(parent if i in places else None for i, parent in enumerate(parents))
        followed[node] = parents
        for (_, output), parent in zip(edges, parents, strict=True):
            if parent is not None:
                (second if output else first).add(parent)
                if parent not in followed:
                    pending.append(parent)
    return followed, {node for node in second - first if _operation(node.name()) in _WITH_MEAN}


def _live(followed: dict[Any, tuple[Any, ...]]) -> dict[Any, bool]:
    """Return which nodes pass something on to the pixels: the others end in what is held fixed."""
    live: dict[Any, bool] = {}
    for start in followed:
        pending = [start]
        while pending:
            node = pending[-1]
            if node in live:
                pending.pop()
                continue
            parents = [parent for parent in followed[node] if parent is not None]
            unknown = [parent for parent in parents if parent not in live]
            if unknown:
                pending.extend(unknown)
            else:
                live[node] = hasattr(node, "variable") or any(live[parent] for parent in parents)
                pending.pop()
    return live


def _attention_scores(
    followed: dict[Any, tuple[Any, ...]], names: dict[Any, str], live: dict[Any, bool], table: RuleTable
) -> set[Any]:
    """Return the products q kᵀ that feed a softmax with a rule, which is the rule of both, and what is between them."""
    if "softmax" not in table.rules and "attention" not in table.rules:
        return set()
    products = set()
    pending = [
        parent
        for node, parents in followed.items()
        if getattr(node, "role", None) in ("softmax", "attention")
        for parent in (parents if node.role == "softmax" else parents[3:])  # of a fused attention its mask
        if parent is not None
    ]
    visited = set(pending)
    while pending:
        node = pending.pop()
        parents = [parent for parent in followed[node] if parent is not None and live[parent]]
        if names[node] in _MULTILINEAR and len(parents) > 1:
            products.add(node)
        elif names[node] in _LINEAR | _MULTILINEAR or names[node] == "Div" or _is_linear_role(node):
            products.add(node)
            new = [parent for parent in parents if parent not in visited]
            visited.update(new)
            pending.extend(new)
    return products


def _weighted_sums(
    followed: dict[Any, tuple[Any, ...]],
    names: dict[Any, str],
    live: dict[Any, bool],
    scores: set[Any],
) -> set[Any]:
    """Return the sums of products with constants, entry by entry: linear layers."""
    return {
        node
        for node, parents in followed.items()
        if names[node] == "Sum" and node not in scores and live[node] and names.get(parents[0]) == "Mul"
        if sum(parent is not None and live[parent] for parent in followed[parents[0]]) == 1
    }


def _residual_sums(
    followed: dict[Any, tuple[Any, ...]], names: dict[Any, str], live: dict[Any, bool]
) -> dict[Any, str]:
    """Return node -> name of the sums of a stream and its branch that met no rule."""
    sums = {}
    for node, parents in followed.items():
        stack = next((without_views(p) for p in parents if p is not None), None) if names[node] in _SUMS_OF else None
        of_stack = stack in followed and names[stack] == "Stack"
        terms = [p for p in (followed[stack] if of_stack else parents) if p is not None and live[p]]
        is_sum = of_stack or (names[node] in _PLAIN_SUMS and getattr(node, "role", None) is None)
        if is_sum and len(terms) > 1 and joins_stream_and_layers(terms):
            sums[node] = f"{_reported_name(node)} of a stack" if of_stack else _reported_name(node)
    return sums


def _is_covered(node: Any, name: str, parents: tuple[Any, ...], live: dict[Any, bool], table: RuleTable) -> bool:
    """Return whether relevance goes right through a node: it has a rule, or its gradient is the proportional share."""
    role = getattr(node, "role", None)
    depends = [parent is not None and live[parent] for parent in parents]
    if role is not None:
        return role in table.rules or _is_linear_role(node) or (role not in _BENT_ROLES and sum(depends) < 2)
    if name in _LINEAR:
        return True
    if name in _MULTILINEAR:
        kind = "conv" if "Convolution" in name else "linear"
        ruled = kind in table.rules and name in _WITH_RULES
        return sum(depends[_ADDENDS.get(name, 0) :]) < 1 + (not ruled)
    if name in _QUOTIENTS:
        at = _QUOTIENTS[name]
        return not any(depends[at : at + 1]) and sum(depends[at - 1 : at + 1]) < 2
    if name in _BATCH_NORMS:
        return not bool(node._saved_training)
    if name == "Pow":
        return bool(node._saved_exponent == 1)
    return name == "Hardtanh" and bool(node._saved_min_val == 0)  # ReLU6


def _is_linear_role(node: Any) -> bool:
    return getattr(node, "role", None) in ("add", "linear", "conv")


@functools.lru_cache(maxsize=4096)
def _operation(name: str) -> str:
    """Return what a node's name says of its operation: "Mul" of "MulBackward0"."""
    return _NAME.sub("", name.rpartition("::")[2])


def _reported_name(node: Any) -> str:
    """Return what a reader would call the operation: "mul", "native_group_norm", "GeluFunction"."""
    role = getattr(node, "role", None)
    if role is not None:
        return str(role)
    custom = getattr(node, "_forward_cls", None)
    return custom.__name__ if custom is not None else _WORDS.sub("_", _operation(node.name())).lower()
