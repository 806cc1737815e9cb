"""Conditions and what counts as a change of a status.  Pure."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from kerf_operator.checks import Finding

__all__ = ["Verdict", "condition_list", "differs", "failure_record", "only_volatile"]


@dataclass(frozen=True)
class Verdict:
    """Status, reason and message of one condition; ``status`` is True, False or None for Unknown."""

    status: bool | None
    reason: str
    message: str

    @classmethod
    def from_finding(cls, finding: Finding) -> Verdict:
        """A condition that is false because of ``finding``."""
        return cls(False, finding.reason, finding.message)

    @property
    def text(self) -> str:
        """The status as Kubernetes writes it."""
        return "Unknown" if self.status is None else str(self.status)


def condition_list(
    verdicts: dict[str, Verdict],
    *,
    previous: list[dict[str, Any]] | None,
    generation: int,
    now: str,
) -> list[dict[str, Any]]:
    """The conditions of a status; ``lastTransitionTime`` moves only when the status does.

    Args:
        verdicts: by condition type, in the order to show.
        previous: the conditions that the object has now.
        generation: the generation that was observed.
        now: RFC 3339 time.
    """
    before = {condition["type"]: condition for condition in previous or []}
    found = []
    for kind, verdict in verdicts.items():
        old = before.get(kind)
        unchanged = old is not None and old["status"] == verdict.text
        found.append(
            {
                "type": kind,
                "status": verdict.text,
                "reason": verdict.reason,
                "message": verdict.message,
                "lastTransitionTime": old["lastTransitionTime"] if old and unchanged else now,
                "observedGeneration": generation,
            }
        )
    return found


def failure_record(
    finding: Finding | None, previous: dict[str, Any] | None, now: str
) -> dict[str, Any] | None:
    """``status.lastFailure``: the new failure, or the old one with its time when it is the same."""
    if finding is None:
        return previous
    record: dict[str, Any] = {
        "component": finding.component,
        "reason": finding.reason,
        "message": finding.message,
    }
    if finding.exit_code is not None:
        record["exitCode"] = finding.exit_code
    if finding.pod is not None:
        record["pod"] = finding.pod
    if previous is not None and {**previous, "time": None} == {**record, "time": None}:
        return previous
    return {**record, "time": now}


def differs(old: dict[str, Any] | None, new: dict[str, Any]) -> bool:
    """Whether writing ``new`` would change anything."""
    return (old or {}) != new


def only_volatile(old: dict[str, Any] | None, new: dict[str, Any]) -> bool:
    """Whether nothing but the dispatch counters moved, which alone is not worth a write every time."""
    return _without_dispatch(old or {}) == _without_dispatch(new)


def _without_dispatch(status: dict[str, Any]) -> dict[str, Any]:
    if "graphs" not in status:
        return status
    reduced = copy.copy(status)
    reduced["graphs"] = {key: value for key, value in status["graphs"].items() if key != "dispatch"}
    return reduced
