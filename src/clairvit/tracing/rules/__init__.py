"""Every rule table by name: frozen values, resolved from text once."""

from __future__ import annotations

import functools
from collections.abc import Callable

from clairvit.errors import UnknownName, did_you_mean
from clairvit.tracing.rules.attnlrp import ATTNLRP, attnlrp_rules, cp_lrp_rules
from clairvit.tracing.rules.chefer_lrp import CHEFER, DEEP_TAYLOR, LRP
from clairvit.tracing.rules.linear import LIBRA, LINEAR, RESIDUAL
from clairvit.tracing.rules.reslrp import RESLRP, reslrp_rules
from clairvit.tracing.rules.table import PLAIN, ActiveRuleTable, Rule, RuleTable

__all__ = [
    "ATTNLRP",
    "CHEFER",
    "DEEP_TAYLOR",
    "LIBRA",
    "LINEAR",
    "LRP",
    "PLAIN",
    "RESIDUAL",
    "RESLRP",
    "TABLES",
    "ActiveRuleTable",
    "RuleTable",
    "rule_table",
]

TABLES = {table.name: table for table in (PLAIN, LINEAR, RESIDUAL, ATTNLRP, RESLRP, CHEFER, LRP, DEEP_TAYLOR, LIBRA)}
# Tables with parameters: "attnlrp(gamma_lin=0.05,gamma_conv=0.25,eps=0.0,inside=1.0)"
PARAMETRIC_TABLES: dict[str, Callable[..., dict[str, Rule]]] = {
    "cp-lrp": cp_lrp_rules,
    "attnlrp": attnlrp_rules,
    "reslrp": reslrp_rules,
}


def rule_table(rules: str | RuleTable) -> RuleTable:
    """Return the rule table of a name, or of a name with parameters such as "attnlrp(eps=0.01)".

    Raises:
        UnknownName: There is no such table.
    """
    return rules if isinstance(rules, RuleTable) else _from_text(rules)


@functools.cache
def _from_text(text: str) -> RuleTable:
    base, parenthesis, inside = text.removesuffix(")").partition("(")
    if base not in (PARAMETRIC_TABLES if parenthesis else TABLES):
        raise UnknownName(
            f"There is no rule table '{text}'; expected one of {', '.join(TABLES)}.{did_you_mean(text, TABLES)}"
        )
    if not parenthesis:
        return TABLES[base]
    parameters = (item.split("=") for item in inside.split(",") if item)
    return RuleTable(text, PARAMETRIC_TABLES[base](**{key: float(value) for key, value in parameters}))
