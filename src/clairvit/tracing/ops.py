"""Torch operations: which callables are a sum, a product, a softmax, a norm; how their arguments are unpacked.

The one table of its kind: capture, recorders, linearisation, token dropping and diagnostics ask `kind_of(function)`.
Operators reach a torch function mode under several names (`a + b` as `Tensor.add`, `a += b` as `Tensor.add_`), so every
spelling is listed.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

ATTENTION = "attention"  # fused
MULTI_HEAD = "multi_head"  # torch's own multi-head attention, written in Python
SOFTMAX = "softmax"
MATMUL = "matmul"
BIASED_MATMUL = "biased_matmul"  # bias + a b, of torch's own multi-head attention with a mask
PRODUCT = "product"  # of two matrices
BIASED_PRODUCT = "biased_product"  # bias + x W of matrices
EINSUM = "einsum"
LINEAR = "linear"
CONV = "conv"
CONV1D = "conv1d"
NORM = "norm"  # LayerNorm, RMSNorm
GROUP_NORM = "group_norm"
BATCH_NORM = "batch_norm"
NORMALIZE = "normalize"  # x / ||x||
VECTOR_NORM = "vector_norm"  # ||x||
INVERSE_ROOT = "inverse_root"  # 1 / sqrt(x), of a norm that is written out: x · rsqrt(mean(x²) + eps)
ACTIVATION = "activation"  # f(z) = z · r(z)
GATE = "gate"  # sigmoid, tanh, erf
ADD = "add"
ADD_IN_PLACE = "add_in_place"
SUBTRACT = "subtract"
REVERSED_SUBTRACT = "reversed_subtract"  # b - x
MULTIPLY = "multiply"
MULTIPLY_IN_PLACE = "multiply_in_place"
MULTIPLY_ADD = "multiply_add"  # c + a b, entry by entry
DIVIDE = "divide"
DIVIDE_IN_PLACE = "divide_in_place"
CAST = "cast"  # to the type of another tensor
CONCATENATE = "concatenate"
STACK = "stack"

_C = torch._C._nn  # what functions of torch.nn.functional call
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    ATTENTION: (F.scaled_dot_product_attention,),
    MULTI_HEAD: (F.multi_head_attention_forward,),
    SOFTMAX: (F.softmax, torch.softmax, Tensor.softmax),
    MATMUL: (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm),
    BIASED_MATMUL: (torch.baddbmm,),
    PRODUCT: (torch.mm, Tensor.mm),
    BIASED_PRODUCT: (torch.addmm,),
    EINSUM: (torch.einsum,),
    LINEAR: (F.linear,),
    CONV: (F.conv2d, torch.conv2d, F.conv3d, torch.conv3d),
    CONV1D: (F.conv1d, torch.conv1d),
    NORM: (F.layer_norm, torch.layer_norm, F.rms_norm, torch.rms_norm),
    GROUP_NORM: (F.group_norm, torch.group_norm),
    BATCH_NORM: (F.batch_norm, torch.batch_norm),
    NORMALIZE: (F.normalize,),
    VECTOR_NORM: (Tensor.norm, torch.norm, torch.linalg.norm, torch.linalg.vector_norm),
    INVERSE_ROOT: (torch.rsqrt, Tensor.rsqrt),
    ACTIVATION: (F.gelu, F.silu, F.mish, F.hardswish, _C.silu, _C.mish, _C.hardswish),
    GATE: (
        *(torch.sigmoid, Tensor.sigmoid, F.sigmoid, torch.special.expit, torch.tanh, Tensor.tanh),
        *(torch.erf, Tensor.erf, torch.special.erf, torch.special.ndtr),
    ),
    ADD: (torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__),
    ADD_IN_PLACE: (Tensor.__iadd__, Tensor.add_),
    SUBTRACT: (torch.sub, Tensor.sub, Tensor.__sub__),
    REVERSED_SUBTRACT: (Tensor.__rsub__, torch.rsub),
    MULTIPLY: (torch.mul, Tensor.mul, torch.multiply, Tensor.multiply, Tensor.__mul__, Tensor.__rmul__),
    MULTIPLY_IN_PLACE: (Tensor.__imul__, Tensor.mul_, Tensor.multiply_),
    MULTIPLY_ADD: (torch.addcmul, Tensor.addcmul),
    DIVIDE: (torch.div, Tensor.div, torch.true_divide, Tensor.true_divide, Tensor.__truediv__, Tensor.__rtruediv__),
    DIVIDE_IN_PLACE: (Tensor.__itruediv__, Tensor.div_, Tensor.true_divide_),
    CAST: (Tensor.type_as,),
    CONCATENATE: (torch.cat, torch.concat, torch.concatenate),
    STACK: (torch.stack,),
}
_KINDS: dict[Any, str] = {function: kind for kind, functions in _FUNCTIONS.items() for function in functions}

# Functions that move values and change none; linear, without a constant
REARRANGEMENTS = frozenset(
    {
        *(Tensor.transpose, Tensor.permute, Tensor.reshape, Tensor.view, Tensor.flatten, Tensor.unflatten),
        *(Tensor.contiguous, Tensor.squeeze, Tensor.unsqueeze, Tensor.chunk, Tensor.split, Tensor.unbind),
        *(Tensor.expand, Tensor.movedim, Tensor.swapaxes, Tensor.clone, Tensor.__getitem__),
        *(torch.transpose, torch.permute, torch.reshape, torch.flatten, torch.squeeze, torch.unsqueeze),
        *(torch.chunk, torch.unbind, torch.movedim, torch.swapaxes),
        *(getter.__get__ for getter in (vars(torch._C.TensorBase)[name] for name in ("mT", "T"))),  # x.mT, x.T
    }
)

SUMS = frozenset({ADD, ADD_IN_PLACE})
DIFFERENCES = frozenset({SUBTRACT, REVERSED_SUBTRACT})
PRODUCTS = frozenset({MULTIPLY, MULTIPLY_IN_PLACE, MULTIPLY_ADD})  # entry by entry
QUOTIENTS = frozenset({DIVIDE, DIVIDE_IN_PLACE})
MATRIX_PRODUCTS = frozenset({MATMUL, EINSUM})
CONVOLUTIONS = frozenset({CONV, CONV1D})
PROJECTIONS = MATRIX_PRODUCTS | CONVOLUTIONS | {LINEAR, PRODUCT, BIASED_MATMUL, BIASED_PRODUCT}  # by a weight
JOINS = frozenset({CONCATENATE, STACK})
CHANNELS_SECOND = frozenset({BATCH_NORM, GROUP_NORM}) | CONVOLUTIONS  # [B, C, …] in and out

INPLACE_SECOND = (F.silu, F.mish, F.hardswish)  # (input, inplace)
HOMOGENEOUS = (F.relu, torch.relu, Tensor.relu, F.leaky_relu, F.relu6)  # activations that need no rule of their own
# Smooth functions of one number that are none of the kinds above.
SMOOTH = frozenset(
    {
        *(F.elu, F.softplus, torch.exp, Tensor.exp, Tensor.pow, Tensor.__pow__, torch.pow, torch.sqrt, Tensor.sqrt),
        *(torch.rsqrt, Tensor.rsqrt, Tensor.square, torch.square, torch.var, Tensor.var, torch.std, Tensor.std),
        *(torch.reciprocal, Tensor.reciprocal, torch.log, Tensor.log, torch.erfc, Tensor.erfc, torch.special.erfc),
    }
)
_OUT_OF_PLACE: dict[Any, Any] = {
    Tensor.__iadd__: torch.add,
    Tensor.add_: torch.add,
    Tensor.__isub__: torch.sub,
    Tensor.sub_: torch.sub,
    Tensor.__imul__: torch.mul,
    Tensor.mul_: torch.mul,
    Tensor.multiply_: torch.mul,
    Tensor.__itruediv__: torch.div,
    Tensor.div_: torch.div,
    Tensor.true_divide_: torch.div,
    Tensor.view: Tensor.reshape,  # tensors in the place of others may have other strides
    F.relu_: F.relu,
    torch.relu_: torch.relu,
}
_DUNDERS_NOT_IN_PLACE = ("__init__", "__invert__", "__index__", "__int__", "__iter__")


def kind_of(function: Any) -> str | None:
    """Return the kind of a torch callable, one of the constants above; None for any other."""
    return NORM if function is written_norm else _KINDS.get(function)


@functools.cache
def public(function: Any) -> Any:
    """Return the public function of a kernel that is called by its name: `F.gelu` for `torch.ops.aten.gelu`."""
    name = function.__name__.partition(".")[0]
    for namespace in (_C, torch, Tensor):
        candidate = getattr(namespace, name, None)
        if candidate is not None and kind_of(candidate) is not None:
            return candidate
    return function


def functions_of(kind: str) -> tuple[Any, ...]:
    """Return the callables of a kind."""
    return _FUNCTIONS[kind]


def out_of_place(function: Any) -> Any:
    """Return the form of an operation that does not write into its input: `torch.add` for `Tensor.add_`."""
    return _OUT_OF_PLACE.get(function, function)


def is_in_place(function: Callable[..., Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call overwrites its first argument: `x += y`, `x.add_(y)`, `relu(x, inplace=True)`."""
    name = getattr(function, "__name__", "")
    marked = name.endswith("_") and not name.endswith("__")
    return marked or (name.startswith("__i") and name not in _DUNDERS_NOT_IN_PLACE) or bool(kwargs.get("inplace"))


# Arguments, by name whether they were passed by position or by keyword

_ATTENTION = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
_LINEAR = ("input", "weight", "bias")
_CONV = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_BATCH_NORM = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
_NORMALIZE = ("input", "p", "dim", "eps")
_GROUP_NORM = ("input", "num_groups", "weight", "bias", "eps")


def attention_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `scaled_dot_product_attention` by name."""
    return {**dict(zip(_ATTENTION, args, strict=False)), **kwargs}


def linear_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return input, weight and, where it was passed, bias."""
    return {**dict(zip(_LINEAR, args, strict=False)), **kwargs}


def conv_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return input, weight, and bias, stride, padding, dilation, groups where they were passed."""
    return {**dict(zip(_CONV, args, strict=False)), **kwargs}


def is_pointwise(arguments: Mapping[str, Any]) -> bool:
    """Return whether a convolution, by its arguments without the input, is a linear layer of each position."""
    weight: Tensor = arguments["weight"]
    strides, padding = _numbers(arguments.get("stride", 1)), arguments.get("padding", 0)
    is_padded = padding not in ("valid", "same") and any(_numbers(padding))
    kernel = weight.shape[2:]
    return not is_padded and {*kernel, *strides, arguments.get("groups", 1)} == {1}


def _numbers(value: Any) -> tuple[int, ...]:
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def batch_norm_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `batch_norm` by name."""
    return {**dict(zip(_BATCH_NORM, args, strict=False)), **kwargs}


def group_norm_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `group_norm` by name."""
    return {**dict(zip(_GROUP_NORM, args, strict=False)), **kwargs}


def first_argument(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """Return the tensor that an operation of one input works on."""
    return args[0] if args else kwargs["input"]  # type: ignore[no-any-return]


def second_factor(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the right factor of a matrix product."""
    return args[1] if len(args) > 1 else kwargs.get("mat2", kwargs.get("other"))


def softmax_dim(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int | None:
    """Return the axis of a softmax."""
    dim: int | None = kwargs.get("dim", args[1] if len(args) > 1 else None)
    return dim


def einsum_operands(args: Sequence[Any]) -> Sequence[Any]:
    """Return the tensors of an einsum, also if they were passed as one list."""
    return args[1] if len(args) == 2 and isinstance(args[1], list | tuple) else args[1:]


def is_over_last_axis(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a softmax is over the last axis of three or more: attention, not class probabilities."""
    x = first_argument(args, kwargs)
    return x.ndim >= 3 and softmax_dim(args, kwargs) in (-1, x.ndim - 1)


@dataclass(frozen=True, eq=False)
class Spread:
    """1/sigma of a norm that is written out: a statistic of its input, and no input."""

    value: Tensor


def written_norm(
    x: Tensor, spread: Spread, weight: Tensor | None, bias: Tensor | None, axes: tuple[int, ...]
) -> Tensor:
    """Return the norm that a model has written out; not centred where there are no axes to take the mean of."""
    y = (x - x.mean(axes, keepdim=True) if axes else x) * spread.value
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


@dataclass(frozen=True, eq=False)
class NormArguments:
    """The arguments of a LayerNorm (`centred`) or RMSNorm, defaults filled in."""

    x: Tensor
    shape: Sequence[int]
    weight: Tensor | None
    bias: Tensor | None
    eps: float
    centred: bool

    @staticmethod
    def of(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> NormArguments:
        centred = function in (F.layer_norm, torch.layer_norm)
        names = ("input", "normalized_shape", "weight", *(("bias", "eps") if centred else ("eps",)))
        call = {**dict(zip(names, args, strict=False)), **kwargs}
        x, eps = call["input"], call.get("eps")
        if eps is None:
            eps = 1e-5 if centred else torch.finfo(x.dtype).eps
        return NormArguments(x, call["normalized_shape"], call.get("weight"), call.get("bias"), eps, centred)


@dataclass(frozen=True, eq=False)
class NormalizeArguments:
    """The arguments of x / max(||x||_p, eps)."""

    x: Tensor
    p: float
    dim: int
    eps: float

    @staticmethod
    def of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> NormalizeArguments:
        call = {**dict(zip(_NORMALIZE, args, strict=False)), **kwargs}
        return NormalizeArguments(call["input"], call.get("p", 2.0), call.get("dim", 1), call.get("eps", 1e-12))

    def inverse_length(self, x: Tensor) -> Tensor:
        """Return 1 / max(||x||_p, eps)."""
        length: Tensor = x.norm(self.p, self.dim, keepdim=True)
        return 1 / length.clamp_min(self.eps)


def causal_mask(q: Tensor, k: Tensor) -> Tensor:
    """Return the bool mask [queries, keys] of `is_causal=True`."""
    return torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()


def attention_scale(q: Tensor, scale: float | None) -> float:
    """Return the factor of q kᵀ, 1 / sqrt(d) unless another was passed."""
    return q.shape[-1] ** -0.5 if scale is None else scale


# Torch functions that are written in Python


@functools.cache
def without_dispatch(function: types.FunctionType) -> types.FunctionType:
    """Return a copy of a Python torch function that runs its own body under a mode instead of dispatching to it."""
    scope = {**function.__globals__, "has_torch_function": lambda *_: False}
    copy = types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


# Einsum equations


def einsum_axes(equation: Any, operands: Sequence[Any]) -> tuple[str, str, str] | None:
    """Return the axes of a product of two tensors: "...id, ...jd -> ...ij" gives ("BAid", "BAjd", "BAij")."""
    if not isinstance(equation, str) or "->" not in equation or len(operands) != 2:
        return None
    sides, result = equation.replace(" ", "").split("->")
    terms = sides.split(",")
    dots = [x.ndim - len(term) + 3 if "..." in term else 0 for x, term in zip(operands, terms, strict=True)]
    unused = [letter for letter in "HGFEDCBA" if letter not in equation]

    def expanded(term: str, count: int) -> str:
        return term.replace("...", "".join(unused[len(unused) - count :]))

    return expanded(terms[0], dots[0]), expanded(terms[1], dots[1]), expanded(result, max(dots))


def is_einsum_product(args: Sequence[Any]) -> bool:
    """Return whether an einsum sums nothing and is a product entry by entry, as "bnd,bn->bnd" is x · s[..., None]."""
    operands = einsum_operands(args)
    axes = einsum_axes(args[0], operands) if all(isinstance(x, Tensor) for x in operands) else None
    if axes is None or not any(sorted(term) == sorted(axes[2]) for term in axes[:2]):
        return False
    return all(set(term) <= set(axes[2]) and len(set(term)) == len(term) for term in axes)


def einsum_product(args: Sequence[Any]) -> Tensor:
    """Compute such an einsum as a product."""
    operands = einsum_operands(args)
    axes = einsum_axes(args[0], operands)
    assert axes is not None
    factors, result = [], axes[2]
    for x, term in zip(operands, axes[:2], strict=True):
        order = [axis for axis in result if axis in term]
        y = x if "".join(order) == term else x.permute([term.index(axis) for axis in order])
        factors.append(y if len(order) == len(result) else y[tuple(slice(None) if a in term else None for a in result)])
    return torch.mul(*factors)


def permute_axes(tensor: Tensor, axes: str, order: str, sizes: Mapping[str, int]) -> Tensor | None:
    """Return the tensor with its axes in another order, expanded along axes that it lacks; None if it has too many."""
    if set(axes) - set(order):
        return None
    out = torch.einsum(f"{axes}->{''.join(axis for axis in order if axis in axes)}", tensor)
    for position, axis in enumerate(order):
        out = out if axis in axes else out.unsqueeze(position)
    return out.expand([sizes[axis] for axis in order])
