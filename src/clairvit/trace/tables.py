"""Every rule table there is, from the files that hold the rules."""

from __future__ import annotations

from clairvit.trace.lrp_rules import LRP_MADE, LRP_TABLES
from clairvit.trace.rules import MADE, TABLES, table

TABLES.update(LRP_TABLES)
MADE.update(LRP_MADE)

__all__ = ["MADE", "TABLES", "table"]
