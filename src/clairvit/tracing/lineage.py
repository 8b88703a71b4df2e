"""Lineage: which tensors are entry-by-entry functions, or statistics, of one activation, told while a forward runs.

A norm or an activation that is written out is a handful of torch operations on one tensor x, spelled in any of many
ways. What they have in common: the value is x, or x - mean(x), times or divided by a nonlinear function of statistics
of x (a norm), or x times a bent function of x (an activation). `Lineage` follows both through sums, products, powers,
casts, views and reductions; `held_factor` then says which factor of a product a rule of norms or activations holds.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from clairvit.tracing import ops

V = TypeVar("V")
_LINEAR_MAPS = frozenset({"add", "sub", "subtract", "rsub", "neg", "negative", "positive", "lerp"})
_PRODUCTS = frozenset({"mul", "multiply", "addcmul"})
_QUOTIENTS = frozenset({"div", "divide", "true_divide", "addcdiv"})
_BENT_MAPS = frozenset(
    {
        *("pow", "square", "sqrt", "rsqrt", "reciprocal", "abs", "absolute", "exp", "exp2", "expm1", "log", "log1p"),
        *(
            "log2",
            "sigmoid",
            "expit",
            "tanh",
            "erf",
            "erfc",
            "ndtr",
            "log_ndtr",
            "softplus",
            "logsigmoid",
            "sign",
            "sgn",
        ),
        *("clamp", "clamp_min", "clamp_max", "clip", "maximum", "minimum", "gelu", "silu", "mish", "hardswish", "elu"),
        *("relu", "leaky_relu", "relu6", "hardsigmoid", "hardtanh", "softsign", "sin", "cos", "atan", "rpow", "where"),
        *("float_power", "celu", "selu", "hypot", "special_erf", "rdiv", "nan_to_num", "heaviside", "gt", "lt"),
    }
)
_MAPS = _LINEAR_MAPS | _PRODUCTS | _QUOTIENTS | _BENT_MAPS
_LINEAR_REDUCTIONS = frozenset({"mean", "sum"})
_REDUCTIONS = _LINEAR_REDUCTIONS | {
    *("var", "std", "var_mean", "std_mean", "norm", "vector_norm", "amax", "amin", "logsumexp", "prod"),
}
_ABOUT_MEAN = frozenset({"var", "std", "var_mean", "std_mean"})
_WITH_MEAN = frozenset({"var_mean", "std_mean"})
_CASTS = frozenset(
    {"to", "float", "double", "half", "bfloat16", "type", "type_as", "clone", "contiguous", "detach_copy"}
)
VIEWS = frozenset(  # names of functions that move the entries of their first argument and change none
    {
        *(
            "unsqueeze",
            "squeeze",
            "expand",
            "expand_as",
            "view",
            "reshape",
            "getitem",
            "transpose",
            "permute",
            "movedim",
        ),
        *("flatten", "unflatten", "broadcast_to", "view_as", "reshape_as", "moveaxis", "swapaxes", "get"),
    }
)
_FOLLOWED = _MAPS | _REDUCTIONS | _CASTS | VIEWS | {"einsum", "matmul", "linear", "layer_norm", "normalize"}


@functools.lru_cache(maxsize=4096)
def plain_name(function: Any) -> str:
    """Return the name of a torch function without its spelling: "mul" for `Tensor.__imul__`, "ndtr" for a special."""
    name = str(getattr(function, "__name__", "")).partition(".")[0]
    if name.startswith("__") and name.endswith("__"):
        inner = name.strip("_")
        inner = {"truediv": "div", "rtruediv": "rdiv", "rmul": "mul", "radd": "add"}.get(inner, inner)
        in_place = {"iadd": "add", "isub": "sub", "imul": "mul", "itruediv": "div", "idiv": "div", "ipow": "pow"}
        return in_place.get(inner, inner)
    return name.rstrip("_").removeprefix("special_").removeprefix("linalg_")


@dataclass(frozen=True, eq=False)
class Trait:
    """What a tensor is of an activation, its origin."""

    origin: object  # stands for the activation
    statistic: bool = False  # summed over axes of it: a mean, a variance, a length
    bent: bool = False  # not linear in it
    about_mean: bool = False  # computed from what is left when a mean is taken away: a variance
    copied: Tensor | None = None  # x, where the tensor is a copy or cast of x
    centred: Tensor | None = None  # x, where the tensor is x - mean(x), times `scale`
    scale: Tensor | float | None = None
    norm: NormPart | None = None  # where it is a norm whose bias, or scale, may follow


@dataclass(frozen=True, eq=False)
class NormPart:
    """A norm that is written out, as far as it was computed: (x - mean(x) or x) · spread · weight + bias."""

    x: Tensor  # what it normalises
    factor: Tensor | None  # the spread, or what stands below the fraction; None where a fused norm has neither
    divided: bool
    centred: bool
    count: int  # entries that share a spread
    weight: Tensor | float | None = None
    bias: Tensor | None = None
    original: Tensor | None = None  # what x is a copy or cast of

    @property
    def of_original(self) -> Tensor:
        """What it normalises, before a cast or copy."""
        return self.x if self.original is None else self.original

    @property
    def spread(self) -> Tensor | None:
        """What x, or x - mean(x), is multiplied by."""
        return 1 / self.factor if self.divided and self.factor is not None else self.factor

    def is_scale(self, value: Any) -> bool:
        """Return whether a constant can be the weight of the norm."""
        number = isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() in (1, self.count))
        return number and self.bias is None

    def scaled(self, value: Tensor | float) -> NormPart:
        """Return the norm times a constant: sqrt(d) and a weight may follow x / ||x|| one by one."""
        return replace(self, weight=value if self.weight is None else self.weight * value)

    def is_shift(self, value: Any) -> bool:
        """Return whether a constant can be the bias of the norm: one number per entry that shares a spread."""
        return isinstance(value, Tensor) and value.numel() == self.count and self.bias is None


@dataclass(eq=False)
class TensorTable(Generic[V]):
    """Values by tensor; one goes when its tensor does."""

    _entries: dict[int, tuple[weakref.ref[Tensor], V]] = field(default_factory=dict, init=False)

    def get(self, tensor: Any) -> V | None:
        """Return the value of a tensor, if it has one."""
        entry = self._entries.get(id(tensor))
        return None if entry is None or entry[0]() is not tensor else entry[1]

    def set(self, tensor: Tensor, value: V | None) -> None:
        """Give a tensor a value; None takes away the one that it has."""
        entries, key = self._entries, id(tensor)
        if value is None:
            entries.pop(key, None)
            return

        def forget(gone: weakref.ref[Tensor]) -> None:  # the id may name another tensor then
            if key in entries and entries[key][0] is gone:
                del entries[key]

        entries[key] = (weakref.ref(tensor, forget), value)


@dataclass(eq=False)
class Lineage(TensorTable[Trait]):
    """Traits of the tensors of one forward pass; a tensor without is no function of one activation, as far as seen."""

    held: Tensor | None = None  # the factor that is held of the last operation, if that is such a product
    holds_spread: bool = False  # and that factor is a statistic
    _constants: TensorTable[bool] = field(default_factory=TensorTable[bool])  # where there are no gradients that tell

    def depends(self, tensor: Tensor) -> bool:
        """Return whether a tensor is an activation: one with a gradient, or, where there is none, no constant."""
        if torch.is_grad_enabled():
            return tensor.requires_grad
        return not is_weight(tensor) and self._constants.get(tensor) is None

    def origin_of(self, tensor: Tensor) -> Trait:
        """Return the trait of a tensor, which is its own origin if it has no other."""
        trait = self.get(tensor)
        if trait is None:
            trait = Trait(object())
            self.set(tensor, trait)
        return trait

    def follow(self, function: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
        """Take an operation into account, after it ran."""
        self.held, self.holds_spread = None, False
        name = plain_name(function)
        if torch.is_grad_enabled():  # told at once: most operations of the usual kinds give their output no trait
            if name not in _FOLLOWED or (name in VIEWS and (not args or self.get(args[0]) is None)):
                return
            if name in ("linear", "matmul") and not any(
                isinstance(a, Tensor) and a.numel() == max(a.shape, default=1) for a in args[:2]
            ):
                return
            if name == "layer_norm" and (
                len(args) < 2 or any(isinstance(a, Tensor) for a in (*args[1:], *kwargs.values()))
            ):
                return
        operands = [*(ops.einsum_operands(args) if name == "einsum" else args), *kwargs.values()]
        inputs = [a for a in operands if isinstance(a, Tensor) and self.depends(a)]
        if not inputs:
            lists = [a for a in args if isinstance(a, list | tuple)]
            if isinstance(out, Tensor) and not any(isinstance(x, Tensor) for a in lists for x in a):
                self._constants.set(out, True)
            return
        if name not in _FOLLOWED:
            return
        if name in VIEWS and self.get(inputs[0]) is None:
            return  # its entries are those of another tensor, which is an origin of its own
        trait = self._trait(name, args, inputs, out, kwargs)
        for place, tensor in enumerate(out if isinstance(out, tuple | list) else (out,)):
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                if name in _WITH_MEAN and place == 1:
                    trait = self._trait("mean", args, inputs, tensor, kwargs)
                self.set(tensor, trait)

    def _trait(
        self, name: str, args: Sequence[Any], inputs: Sequence[Tensor], out: Any, kwargs: dict[str, Any]
    ) -> Trait | None:
        traits = [self.origin_of(x) for x in inputs]
        first = traits[0]
        if any(trait.origin is not first.origin for trait in traits):
            return None
        bent = any(trait.bent for trait in traits)
        about_mean = any(trait.about_mean or trait.centred is not None for trait in traits)
        if name in VIEWS or name in _CASTS:
            if isinstance(out, Tensor) and out.shape == inputs[0].shape:
                is_copy = name in _CASTS and out is not inputs[0] and first.copied is None and first.norm is None
                return replace(first, copied=inputs[0]) if is_copy else first
            return replace(first, copied=None, centred=None, norm=None)
        if name in _REDUCTIONS:
            about_mean = about_mean or name in _ABOUT_MEAN
            return Trait(
                first.origin, statistic=True, bent=bent or name not in _LINEAR_REDUCTIONS, about_mean=about_mean
            )
        if name == "layer_norm":
            plain = len(args) > 1 and len(inputs) == 1 and inputs[0] is args[0]
            plain = plain and not any(isinstance(a, Tensor) for a in args[1:])  # no weight and no bias
            count = inputs[0].numel() // math.prod(inputs[0].shape[: -len(args[1])]) if plain else 0
            return Trait(first.origin, norm=NormPart(inputs[0], None, False, True, count)) if count else None
        if name == "normalize":
            return self._normalized(first, args, inputs, kwargs)
        if name in ("einsum", "matmul", "linear"):
            contraction = self._contraction(name, args, inputs, bent)
            return contraction and replace(contraction, about_mean=about_mean)
        if name in _BENT_MAPS:
            return Trait(first.origin, all(t.statistic for t in traits), bent=True, about_mean=about_mean)
        norm = self._norm(name, args, inputs, out)
        if norm is not None:
            return Trait(first.origin, norm=norm)
        constants = [a for a in args if isinstance(a, Tensor) and all(a is not x for x in inputs)]
        is_table = any(sum(side > 1 for side in constant.shape) > 1 for constant in constants)
        if (
            (name in _PRODUCTS and len(inputs) == 1 and is_table)
            and isinstance(out, Tensor)
            and out.numel() > inputs[0].numel()
        ):
            return None  # a table of products with weights, whose sums are those of a linear layer, and no statistics
        bent = bent or (name in _PRODUCTS and len(inputs) > 1) or (name in _QUOTIENTS and self._divides_by(name, args))
        statistic = all(trait.statistic for trait in traits)
        of_several = len(inputs) > 1 and name in _LINEAR_MAPS
        trait = Trait(first.origin, statistic, bent, about_mean or (statistic and of_several))  # E[x²] - E[x]²
        if statistic or bent:
            return trait
        if of_several and any(t.statistic for t in traits):  # x less a mean of it, or something like it
            x = first.copied if out is inputs[0] else inputs[0]
            is_centred = name in ("sub", "subtract") and len(args) == 2 and traits[1].statistic and not first.statistic
            return replace(trait, about_mean=True, centred=x if is_centred else None)
        constant = next((a for a in args if a is not inputs[0]), None)
        if len(args) == 2 and name in _PRODUCTS and first.centred is not None and first.scale is None:
            return replace(trait, centred=first.centred, scale=constant)
        return trait

    def _normalized(
        self, first: Trait, args: Sequence[Any], inputs: Sequence[Tensor], kwargs: dict[str, Any]
    ) -> Trait | None:
        """Return the trait of x / ||x||, or of x - mean(x) over its length: a norm but for a constant."""
        call = ops.NormalizeArguments.of(args, kwargs)
        if call.p != 2 or len(inputs) != 1 or not isinstance(call.dim, int):
            return None
        centred = first.centred is not None
        x = first.centred if centred else inputs[0]
        if x is None or x.shape != inputs[0].shape:
            return None
        original = first.copied if not centred else None
        return Trait(first.origin, norm=NormPart(x, None, False, centred, x.shape[call.dim], original=original))

    def _divides_by(self, name: str, args: Sequence[Any]) -> bool:
        at = 2 if name == "addcdiv" else 1
        return len(args) > at and isinstance(args[at], Tensor) and self.depends(args[at])

    def _norm(self, name: str, args: Sequence[Any], inputs: Sequence[Tensor], out: Any) -> NormPart | None:
        """Return the norm that a product, or a sum with a constant, completes further."""
        if name == "addcmul":
            if len(inputs) > 1 or len(args) != 3 or inputs[0] is args[0]:
                return None
            scale = args[2] if inputs[0] is args[1] else args[1]
            trait = self.get(inputs[0])
            norm = None if trait is None else trait.norm
            return norm and (
                replace(norm.scaled(scale), bias=args[0]) if norm.is_scale(scale) and norm.is_shift(args[0]) else None
            )
        if len(args) != 2:
            return None
        if len(inputs) == 2 and name in _PRODUCTS | _QUOTIENTS:
            held = held_factor(self, name, *inputs)
            if held is not None:
                self.held, self.holds_spread = inputs[held.place], held.held.statistic
            carried = inputs[1 - held.place] if held is not None else inputs[0]
            if held is None or not held.is_norm:
                return None
            centred = held.carried.centred is not None
            x = held.carried.centred if centred else carried
            if x is None or x is out or x.shape != out.shape or (held.held.about_mean and not centred):
                return None
            factor = inputs[held.place]
            count = carried.numel() // max(factor.numel(), 1)
            own = self.get(x)
            copied = None if own is None else own.copied
            return NormPart(x, factor, name in _QUOTIENTS, centred, count, held.carried.scale, original=copied)
        trait = self.get(inputs[0])
        if len(inputs) != 1 or trait is None or trait.norm is None:
            return None
        constant = args[1] if args[0] is inputs[0] else args[0]
        if name in _PRODUCTS and trait.norm.is_scale(constant):
            return trait.norm.scaled(constant)
        return replace(trait.norm, bias=constant) if name == "add" and trait.norm.is_shift(constant) else None

    def _contraction(self, name: str, args: Sequence[Any], inputs: Sequence[Tensor], bent: bool) -> Trait | None:
        """Return the trait of a sum that is written as a product: of squares, or with a vector of equal numbers."""
        origin = self.origin_of(inputs[0]).origin
        if name == "einsum":
            if not isinstance(args[0], str) or "->" not in args[0]:
                return None
            sides, _, result = args[0].replace(" ", "").partition("->")
            terms = sides.split(",")
            constants = [a for a in ops.einsum_operands(args) if all(a is not x for x in inputs)]
            if len(result) >= len(terms[0]) or not all(_is_uniform(c) for c in constants):
                return None
            own = [
                term for term, a in zip(terms, ops.einsum_operands(args), strict=True) if any(a is x for x in inputs)
            ]
            return Trait(origin, True, bent or len(inputs) > 1) if len(set(own)) == 1 else None
        constants = [a for a in args[:2] if isinstance(a, Tensor) and all(a is not x for x in inputs)]
        if len(inputs) == 1 and len(constants) == 1 and _is_uniform(constants[0]):
            return Trait(origin, True, bent)
        return None


def _is_uniform(constant: Any) -> bool:
    """Return whether a constant is a vector of equal numbers, as in a mean that is written as a product."""
    if not isinstance(constant, Tensor) or constant.numel() != max(constant.shape, default=1):
        return False
    return bool((constant == constant.flatten()[0]).all())


def is_weight(tensor: Any) -> bool:
    """Return whether a tensor is a parameter or a view of one."""
    return isinstance(tensor, nn.Parameter) or isinstance(getattr(tensor, "_base", None), nn.Parameter)


def is_formula(lineage: Lineage, a: Any, b: Any) -> bool:
    """Return whether a + b is a bent function of one activation, entry by entry, such as x + x · erf(x)."""
    of_a, of_b = lineage.get(a), lineage.get(b)
    return of_a is not None and of_b is not None and of_a.origin is of_b.origin and (of_a.bent or of_b.bent)


def norm_before_bias(lineage: Lineage, a: Any, b: Any) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return the norm y, its bias and its x where a + b adds the bias to a centred norm that is written out."""
    for y, bias in ((a, b), (b, a)):
        trait = lineage.get(y)
        norm = None if trait is None else trait.norm
        if norm is not None and norm.centred and norm.is_shift(bias) and not lineage.depends(bias):
            return y, bias, norm.x
    return None


@dataclass(frozen=True, eq=False)
class Held:
    """A product or quotient of which a rule holds one factor: the divisor of a norm, the gate of an activation."""

    place: int  # of the factor that is held
    carried: Trait
    held: Trait

    @property
    def is_norm(self) -> bool:
        """Whether it is x, or x - mean(x), times a function of statistics of x."""
        return self.held.statistic and not (self.carried.statistic or self.carried.bent)


def held_factor(lineage: Lineage, name: str, a: Any, b: Any) -> Held | None:
    """Return which factor of a · b or a / b is held: a bent function, or a statistic, of what the other one is.

    None where neither is: a product of two activations, or a formula that no rule of norms or activations covers.
    """
    if not (isinstance(a, Tensor) and isinstance(b, Tensor) and lineage.depends(a) and lineage.depends(b)):
        return None
    of_a, of_b = lineage.get(a), lineage.get(b)
    if of_a is None or of_b is None:  # one of them may be the origin of the other
        of_a, of_b = lineage.origin_of(a), lineage.origin_of(b)
    if of_a.origin is not of_b.origin:
        return None
    quotient = name in _QUOTIENTS
    second = Held(1, of_a, of_b)
    if of_b.statistic and (quotient or of_b.bent) and not (of_a.statistic and of_a.bent):
        return second
    if not quotient and of_a.statistic and of_a.bent and not (of_b.statistic and of_b.bent):
        return Held(0, of_b, of_a)
    if of_a.statistic or of_b.statistic or of_a.bent == of_b.bent:
        return None
    if of_b.bent:
        return second
    return None if quotient else Held(0, of_b, of_a)
