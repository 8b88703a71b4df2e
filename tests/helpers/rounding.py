"""Compare floating-point results with a bound computed from the arithmetic, never tuned to one machine.

Kernels of different processors (SSE, AVX2, AVX-512), thread counts and batch sizes sum in different orders, so two
correct results differ by rounding. That difference is at most

    bound = eps(dtype) · magnitude · growth

eps: machine epsilon of the precision that the numbers were computed in (2.2e-16 in float64, 1.2e-7 in float32).
magnitude: the size of the largest number that entered the sums, by default the largest |expected|. Where terms cancel
    (a residual stream of 40 that yields a map of 0.01), the terms count, not the result: state it.
growth: how many roundings can add up. `growth(depth, width)` counts them for `depth` operations in a row, each a
    reduction over `width` terms; state the two numbers next to the comparison.

Equalities of methods and metrics belong in float64, where the bound is far below anything a mistake could cause.
Use float32 only where float32 is the subject of the test.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

DEFAULT_GROWTH = 2.0**16  # a tiny transformer, forward and backward: about 100 reductions of up to 600 terms


def growth(depth: int, width: int) -> float:
    """Return the number of roundings in `depth` successive reductions over `width` terms: depth · width."""
    return float(depth * width)


def rounding_bound(magnitude: float, growth: float = DEFAULT_GROWTH, dtype: torch.dtype = torch.float64) -> float:
    """Return eps(dtype) · magnitude · growth, the largest difference that rounding alone explains."""
    return torch.finfo(dtype).eps * magnitude * growth


def magnified(single: Any, exact: Any) -> float:
    """Return the magnitude of the terms behind `exact`, from how far its float32 computation `single` is off.

    Where terms cancel or sums near zero divide, rounding is magnified by a factor that no formula says beforehand.
    The same computation in float32 shows it: |single − exact| / eps(float32) is the sum of its roundings. Another
    order of the sums may add up 2^8 times as many of them:

        eps · DEFAULT_GROWTH · magnified = 2^8 · eps(float64) / eps(float32) · |single − exact|
    """
    first, second = _tensor(single).double(), _tensor(exact).double()
    roundings = float((first - second).abs().max()) / torch.finfo(torch.float32).eps
    return max(float(second.abs().max()), roundings * 2.0**8 / DEFAULT_GROWTH)


def assert_same(
    actual: Any,
    expected: Any,
    *,
    growth: float = DEFAULT_GROWTH,
    magnitude: float | None = None,
    dtype: torch.dtype | None = None,
    label: str = "",
) -> None:
    """Assert that two arrays are equal up to rounding. NaN equals NaN; infinities must agree.

    Args:
        actual, expected: Tensors, arrays, lists or numbers of one shape.
        growth: Number of roundings that can add up, see `growth()`.
        magnitude: Size of the numbers that were summed; None takes the largest finite |expected|.
        dtype: Precision the numbers were computed in; None takes the coarser of the two tensors' own. Results that
            were computed in float32 and stored in float64 must name it; naming float64 refuses coarser tensors.
        label: Printed when the assertion fails.
    """
    reason = _difference(actual, expected, growth, magnitude, dtype)
    assert not reason, f"{label}: {reason}"


def same(
    actual: Any,
    expected: Any,
    *,
    growth: float = DEFAULT_GROWTH,
    magnitude: float | None = None,
    dtype: torch.dtype | None = None,
) -> bool:
    """Return whether two arrays are equal up to rounding; the arguments are those of `assert_same`."""
    return not _difference(actual, expected, growth, magnitude, dtype)


def _difference(actual: Any, expected: Any, growth: float, magnitude: float | None, dtype: torch.dtype | None) -> str:
    """Return what differs by more than rounding explains, in words; "" where nothing does."""
    first, second = _tensor(actual), _tensor(expected)
    if first.shape != second.shape:
        return f"shapes {list(first.shape)} and {list(second.shape)}"
    coarser = max((first.dtype, second.dtype), key=lambda kind: torch.finfo(kind).eps)
    precision = coarser if dtype is None else dtype
    if dtype == torch.float64 != coarser:
        return f"{first.dtype} and {second.dtype}, expected float64"
    first, second = first.double(), second.double()
    if not torch.equal(first.isnan(), second.isnan()):
        return "NaN in different places"
    infinite = first.isinf() | second.isinf()
    if not torch.equal(first[infinite], second[infinite]):
        return "infinities in different places"
    finite = first.isfinite()
    if not finite.any():
        return ""
    scale = float(second[finite].abs().max()) if magnitude is None else magnitude
    bound = rounding_bound(scale, growth, precision)
    difference = float((first - second)[finite].abs().max())
    if difference <= bound:
        return ""
    return (
        f"largest difference {difference:.3g}, rounding explains {bound:.3g} "
        f"(eps of {precision} × magnitude {scale:.3g} × growth {growth:.3g})"
    )


def _tensor(values: Any) -> Tensor:
    """Return values as a floating-point tensor on the CPU; integers and Python floats are float64."""
    tensor = values.detach().cpu() if isinstance(values, Tensor) else torch.as_tensor(np.asarray(values))
    return tensor if tensor.is_floating_point() else tensor.double()
