"""What a check finds.  Pure.

Waiting is not failure: a finding of severity ``WAITING`` explains why something has not happened yet, one of
severity ``FAILING`` will not mend itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Finding", "Severity", "shorten", "worst"]

MESSAGE_LIMIT = 1024


class Severity(StrEnum):
    """Whether a person is needed."""

    WAITING = "Waiting"
    FAILING = "Failing"


@dataclass(frozen=True)
class Finding:
    """One thing that is not as it should be.

    Attributes:
        reason: CamelCase, stable.
        message: what is the case and what to do.
        component: compile, serving, storage or operator.
    """

    reason: str
    message: str
    component: str
    severity: Severity = Severity.WAITING
    pod: str | None = None
    exit_code: int | None = None


def shorten(text: str, limit: int = MESSAGE_LIMIT) -> str:
    """The end of a long text: errors stand last."""
    text = text.strip()
    return text if len(text) <= limit else "..." + text[-limit:]


def worst(findings: Iterable[Finding | None]) -> Finding | None:
    """The first failing finding, else the first waiting one."""
    found = [finding for finding in findings if finding is not None]
    failing = [finding for finding in found if finding.severity is Severity.FAILING]
    ordered = failing + found
    return ordered[0] if ordered else None
