"""Every rule table by name: frozen values, parsed from text where text comes in."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from clairvit.errors import UnknownName, did_you_mean
from clairvit.tracing.rules.attnlrp import ATTNLRP, attnlrp, cp_lrp
from clairvit.tracing.rules.chefer_lrp import CHEFER, DEEP_TAYLOR, LRP
from clairvit.tracing.rules.linear import LIBRA, LINEAR, RESIDUAL
from clairvit.tracing.rules.reslrp import RESLRP, reslrp
from clairvit.tracing.rules.table import PLAIN, ActiveRuleTable, RuleTable

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
BUILDERS: dict[str, Callable[..., RuleTable]] = {"cp-lrp": cp_lrp, "attnlrp": attnlrp, "reslrp": reslrp}


def rule_table(rules: str | RuleTable) -> RuleTable:
    """Return the rule table of a name, or of a name with parameters such as "attnlrp(eps=0.01)".

    Raises:
        UnknownName: There is no such table.
    """
    if isinstance(rules, RuleTable):
        return rules
    name, parenthesis, inside = rules.removesuffix(")").partition("(")
    if name not in (BUILDERS if parenthesis else TABLES):
        raise UnknownName(
            f"There is no rule table '{rules}'; expected one of {', '.join(TABLES)}.{did_you_mean(rules, TABLES)}"
        )
    parameters = dict(item.split("=", 1) for item in inside.split(",") if "=" in item)
    return named_table(name, {key.strip(): _number(value.strip()) for key, value in parameters.items()})


def _number(text: str) -> float | bool:
    return text == "True" if text in ("True", "False") else float(text)


def named_table(name: str, parameters: Mapping[str, float | bool]) -> RuleTable:
    """Return the table of a name, built with these parameters where there are any."""
    return BUILDERS[name](**parameters) if parameters else TABLES[name]
