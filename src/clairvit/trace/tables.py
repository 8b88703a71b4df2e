"""Every rule table there is, from the files that hold the rules."""

from __future__ import annotations

from clairvit.trace.gamma_rules import GAMMA_MADE, GAMMA_TABLES
from clairvit.trace.lrp_rules import LRP_TABLES
from clairvit.trace.rules import MADE, TABLES, table

TABLES.update({**LRP_TABLES, **GAMMA_TABLES})
MADE.update(GAMMA_MADE)

__all__ = ["MADE", "TABLES", "table"]
