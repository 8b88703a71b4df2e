"""Types of options that several methods share."""

from __future__ import annotations

from typing import Annotated

from clairvit.option_types import Range as Range
from clairvit.option_types import check_fields as check_fields
from clairvit.option_types import check_range as check_range

Passes = Annotated[int, Range(ge=1, unit="passes", example=50)]
