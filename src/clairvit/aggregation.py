"""Aggregations for methods of your own: how the maps of the layers become one map.

`cv.method("mine", output="matrix", aggregation=Product(residual=1.0))` multiplies them, `Total()` adds them up,
`Single(-1)` takes the last one.
"""

from clairvit.methods.aggregation import Aggregation, Product, Single, Suffixes, Total
from clairvit.methods.flow import Flow

__all__ = ["Aggregation", "Flow", "Product", "Single", "Suffixes", "Total"]
