"""The status of a CompileCache, folded from its claim, its Job and the Job's pods.  Pure."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from kerf_operator.api.status import CacheState
from kerf_operator.checks import (
    Finding,
    Severity,
    check_claim,
    check_failures,
    check_job,
    finished_job,
    job_result,
)
from kerf_operator.observation import ApplyFailure, CacheObservation, JsonObject
from kerf_operator.plan import CachePlan, current_job, is_published
from kerf_operator.status.conditions import Verdict, condition_list, failure_record

__all__ = ["fold_cache"]

_KEPT = ("result", "sizeBytes", "seconds", "gate", "counters")
"""What a finished Job said; kept when its pods are gone."""


def fold_cache(
    obs: CacheObservation,
    plan: CachePlan,
    failures: Sequence[ApplyFailure] = (),
    *,
    now: str,
) -> dict[str, Any]:
    """The whole status of a CompileCache."""
    previous = obs.resource.get("status") or {}
    state, verdict, finding = _state(obs, plan, failures)
    status: dict[str, Any] = {
        "observedGeneration": obs.generation,
        "state": state.value,
        "message": verdict.message,
        "conditions": condition_list(
            {"Ready": verdict},
            previous=previous.get("conditions"),
            generation=obs.generation,
            now=now,
        ),
        "users": _users(obs.resource),
    }
    if obs.claim is not None:
        status["claimUid"] = obs.claim["metadata"]["uid"]
    if plan.job is not None:
        status["jobName"] = plan.job
    if state is CacheState.READY:
        status |= {key: previous[key] for key in _KEPT if key in previous}
        status |= _result(current_job(obs, plan), obs.pods)
    failing = finding if finding is not None and finding.severity is Severity.FAILING else None
    failure = failure_record(failing, previous.get("lastFailure"), now)
    if failure is not None:
        status["lastFailure"] = failure
    return status


def _state(
    obs: CacheObservation, plan: CachePlan, failures: Sequence[ApplyFailure]
) -> tuple[CacheState, Verdict, Finding | None]:
    if plan.error is not None:
        finding = Finding("InvalidSpec", plan.error, "operator", Severity.FAILING)
        return CacheState.FAILED, Verdict.from_finding(finding), finding
    claim = str(obs.resource["spec"]["claimName"])
    key = str(obs.resource["spec"]["key"])
    unbound = check_claim(obs.claim, obs.storage_class, name=claim, ours=False)
    if obs.claim is None and unbound is not None:
        return CacheState.PENDING, Verdict.from_finding(unbound), unbound
    assert obs.claim is not None  # a missing claim is always a finding
    published = Verdict(True, "Published", f"key {key} is on claim {claim}")
    if is_published(obs.resource, str(obs.claim["metadata"]["uid"])):
        return CacheState.READY, published, None
    job = current_job(obs, plan)
    if job is None:
        refused = check_failures(failures)
        if refused is not None:
            return CacheState.PENDING, Verdict.from_finding(refused), refused
        return (
            CacheState.PENDING,
            Verdict(False, "JobPending", f"compile Job {plan.job} is being created"),
            None,
        )
    if finished_job(job) == "Complete":
        return CacheState.READY, published, None
    trouble = check_job(job, _pods_of(job, obs.pods), events=obs.job_events)
    if finished_job(job) == "Failed":
        failed = trouble or Finding(
            "JobFailed", f"Job {plan.job} failed", "compile", Severity.FAILING
        )
        return CacheState.FAILED, Verdict.from_finding(failed), failed
    trouble = trouble or (unbound if unbound and unbound.severity is Severity.FAILING else None)
    if trouble is not None:
        return CacheState.COMPILING, Verdict.from_finding(trouble), trouble
    return (
        CacheState.COMPILING,
        Verdict(False, "Compiling", f"Job {plan.job} compiles key {key}"),
        None,
    )


def _pods_of(job: JsonObject, pods: Sequence[JsonObject]) -> list[JsonObject]:
    name = job["metadata"]["name"]
    return [
        pod for pod in pods if (pod["metadata"].get("labels") or {}).get("job-name", name) == name
    ]


def _users(cache: JsonObject) -> list[str]:
    owners = cache["metadata"].get("ownerReferences") or []
    return sorted({str(owner["name"]) for owner in owners if owner["kind"] == "ModelDeployment"})


def _result(job: JsonObject | None, pods: Sequence[JsonObject]) -> dict[str, Any]:
    """What the Job reported, with the Job's own duration where the pod's report is gone."""
    if job is None:
        return {}
    told = job_result(_pods_of(job, pods))
    found: dict[str, Any] = {}
    if isinstance(told.get("result"), str):
        found["result"] = told["result"]
    if isinstance(told.get("sizeBytes"), int):
        found["sizeBytes"] = told["sizeBytes"]
    if isinstance(told.get("seconds"), (int, float)):
        found["seconds"] = round(float(told["seconds"]), 3)
    elif "seconds" not in found:
        duration = _duration(job)
        if duration is not None and not told:
            found["seconds"] = duration
    if isinstance(told.get("gate"), dict):
        found["gate"] = told["gate"]
    if isinstance(told.get("counters"), dict):
        found["counters"] = {
            str(name): value for name, value in told["counters"].items() if isinstance(value, int)
        }
    return found


def _duration(job: JsonObject) -> float | None:
    status = job.get("status") or {}
    start, end = status.get("startTime"), status.get("completionTime")
    if not start or not end:
        return None
    return (datetime.fromisoformat(end) - datetime.fromisoformat(start)).total_seconds()
