"""Checks of the compile Job, and what it reported.  Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kerf_operator.checks.finding import Finding, Severity, worst
from kerf_operator.checks.objects import refused
from kerf_operator.checks.pods import check_pod, check_pods, newest_first, parse_result
from kerf_operator.observation import JsonObject, conditions_of

__all__ = ["check_job", "finished_job", "job_result"]


def finished_job(job: JsonObject | None) -> str | None:
    """``Complete``, ``Failed`` or None while the Job is not finished."""
    conditions = conditions_of(job)
    for kind in ("Complete", "Failed"):
        if (conditions.get(kind) or {}).get("status") == "True":
            return kind
    return None


def check_job(
    job: JsonObject, pods: Sequence[JsonObject], *, events: Sequence[str] = ()
) -> Finding | None:
    """Why a compile Job failed, or what it waits for."""
    name = job["metadata"]["name"]
    if finished_job(job) == "Failed":
        condition = conditions_of(job)["Failed"]
        if condition.get("reason") == "DeadlineExceeded":
            return Finding(
                "DeadlineExceeded",
                f"Job {name} ran longer than compile.job.activeDeadlineSeconds; raise it, or change "
                "compile.token to try again",
                "compile",
                Severity.FAILING,
            )
        ended = worst(check_pod(pod, component="compile") for pod in newest_first(pods))
        if ended is not None and ended.severity is Severity.FAILING:
            return ended
        return Finding(
            "JobFailed",
            f"Job {name} failed: {condition.get('message', condition.get('reason', ''))}. Change "
            "compile.token to try again",
            "compile",
            Severity.FAILING,
        )
    if finished_job(job) is not None:
        return None
    live = [
        pod
        for pod in newest_first(pods)
        if (pod.get("status") or {}).get("phase") in (None, "Pending", "Running")
    ]
    if live:
        return check_pods(live, component="compile")
    if events:
        found = refused(events[-1], component="compile")
        return Finding(found.reason, found.message, found.component)
    return None


def job_result(pods: Sequence[JsonObject]) -> dict[str, Any]:
    """What the pod that succeeded wrote: result, size, seconds, gate, counters; empty if unknown."""
    for pod in newest_first(pods):
        for container in (pod.get("status") or {}).get("containerStatuses") or []:
            ended = (container.get("state") or {}).get("terminated") or {}
            if ended and ended.get("exitCode") == 0:
                return parse_result(ended.get("message") or "")
    return {}
