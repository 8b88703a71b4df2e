"""Every rule table there is, from the files that hold the rules."""

from __future__ import annotations

from clairvit.tracing.rules.gamma import GAMMA_MADE, GAMMA_TABLES
from clairvit.tracing.rules.lrp import LRP_TABLES
from clairvit.tracing.rules.table import PARAMETRIC_TABLES, TABLES, rule_table

TABLES.update({**LRP_TABLES, **GAMMA_TABLES})
PARAMETRIC_TABLES.update(GAMMA_MADE)

__all__ = ["PARAMETRIC_TABLES", "TABLES", "rule_table"]
