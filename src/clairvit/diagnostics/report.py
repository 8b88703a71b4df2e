"""Check and Diagnosis: what `cv.doctor` returns."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from clairvit._io import to_json
from clairvit._tables import TableRow, Tabular

Status = Literal["pass", "warn", "fail", "skip"]
WIDTH = 118  # columns of the report as text


@dataclass(frozen=True)
class Check:
    """One line of a diagnosis.

    Attributes:
        name: What was checked, e.g. "determinism".
        status: "pass"; "warn" (explanations exist, with a caution); "fail" (explanations would be wrong or impossible);
            "skip" (not run: another check failed, or it has no meaning for this model).
        finding: What was seen, in one or two sentences.
        advice: What to do about it; empty if nothing is to be done.
        details: The numbers behind the finding, ready for JSON.

    Example:
        >>> import clairvit as cv
        >>> cv.results.Check("determinism", "pass", "Two runs agree.").to_dict()["status"]
        'pass'
    """

    name: str
    status: Status
    finding: str
    advice: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the check as plain values for JSON; NaN and infinity become None."""
        return {
            "name": self.name,
            "status": self.status,
            "finding": self.finding,
            "advice": self.advice,
            "details": to_json(self.details),
        }


@dataclass(frozen=True)
class Diagnosis(Tabular):
    """All checks of one model.

    Attributes:
        model: The model's name.
        images: Names of the images that the checks ran on.
        checks: One `Check` per line, in the order in which they ran.

    Example:
        >>> import clairvit as cv
        >>> check = cv.results.Check("determinism", "pass", "Two runs agree.")
        >>> diagnosis = cv.results.Diagnosis("pets", ("demo",), (check,))
        >>> diagnosis.ok, diagnosis["determinism"].status
        (True, 'pass')
    """

    model: str
    images: tuple[str, ...]
    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        """Return whether no check failed; warnings do not count."""
        return not self.failures

    @property
    def failures(self) -> tuple[Check, ...]:
        """Return the checks that failed."""
        return tuple(check for check in self.checks if check.status == "fail")

    @property
    def warnings(self) -> tuple[Check, ...]:
        """Return the checks that passed with a caution."""
        return tuple(check for check in self.checks if check.status == "warn")

    def __getitem__(self, name: str) -> Check:
        """Return the check of that name; raise KeyError with all names if there is none."""
        for check in self.checks:
            if check.name == name:
                return check
        raise KeyError(f"{name}; the checks are {', '.join(check.name for check in self.checks)}")

    def summary(self) -> str:
        """Return the counts and the verdict in one sentence."""
        counts = {status: sum(check.status == status for check in self.checks) for status in ("pass", "warn", "fail")}
        skipped = sum(check.status == "skip" for check in self.checks)
        listed = f"{counts['pass']} passed, {counts['warn']} with a warning, {counts['fail']} failed"
        not_run = f", {skipped} not run" if skipped else ""
        if self.failures:
            verdict = f"{self.model} cannot be explained as it is: see {', '.join(c.name for c in self.failures)}."
        elif self.warnings:
            verdict = f"{self.model} can be explained; see the warnings of {', '.join(c.name for c in self.warnings)}."
        else:
            verdict = f"{self.model} can be explained."
        return f"{listed}{not_run}. {verdict}"

    def to_dict(self) -> dict[str, Any]:
        """Return the diagnosis as plain values for JSON."""
        return {
            "model": self.model,
            "images": list(self.images),
            "ok": self.ok,
            "summary": self.summary(),
            "checks": [check.to_dict() for check in self.checks],
        }

    def _table(self) -> list[TableRow]:
        """Return a row per check."""
        names = ("name", "status", "finding", "advice")
        return [{"model": self.model} | {name: getattr(check, name) for name in names} for check in self.checks]

    def __str__(self) -> str:
        width = max((len(check.name) for check in condensed(self.checks)), default=0)
        indent = " " * (len("pass") + 2 + width + 2)
        lines: list[str] = []
        for check in condensed(self.checks):
            start = f"{check.status}  {check.name:<{width}}  "
            lines += textwrap.wrap(check.finding, WIDTH, initial_indent=start, subsequent_indent=indent)
            if check.advice:
                lines += textwrap.wrap(
                    f"→ {check.advice}", WIDTH, initial_indent=indent, subsequent_indent=f"{indent}  "
                )
        return "\n".join([*lines, "", self.summary()])


def condensed(checks: Sequence[Check]) -> list[Check]:
    """Return checks as they are printed: those that another one kept from running are one line, the last."""
    because: dict[str, list[str]] = {}
    for check in checks:
        if check.status == "skip" and "because" in check.details:
            because.setdefault(str(check.details["because"]), []).append(check.name)
    several = {cause: names for cause, names in because.items() if len(names) > 1}
    kept = [check for check in checks if check.status != "skip" or check.details.get("because") not in several]
    return [
        *kept,
        *(
            Check(f"{len(names)} others", "skip", f"Not checked, because of '{cause}': {', '.join(names)}.")
            for cause, names in several.items()
        ),
    ]
