"""Checks of the Deployment, of names, and of what the API server said to our writes.  Pure."""

from __future__ import annotations

from collections.abc import Iterable

from kerf_operator.api.names import is_managed
from kerf_operator.checks.finding import Finding, Severity, shorten
from kerf_operator.observation import ApplyFailure, JsonObject, conditions_of, is_foreign

__all__ = ["check_deployment", "check_failures", "check_names", "refused"]


def check_deployment(deployment: JsonObject | None) -> Finding | None:
    """What the Deployment's own conditions tell: pods that cannot be created, no progress."""
    conditions = conditions_of(deployment)
    failure = conditions.get("ReplicaFailure")
    if failure is not None and failure.get("status") == "True":
        return refused(failure.get("message", ""), component="serving")
    progress = conditions.get("Progressing")
    if progress is not None and progress.get("reason") == "ProgressDeadlineExceeded":
        return Finding(
            "ProgressDeadlineExceeded",
            f"{progress.get('message', '')} See the pods' logs, or raise probes.startupTimeoutSeconds",
            "serving",
            Severity.FAILING,
        )
    return None


def refused(message: str, *, component: str) -> Finding:
    """Pods or objects that admission refused: a quota, or another reason in its own words."""
    if "exceeded quota" in message:
        return Finding(
            "QuotaExceeded",
            f"{shorten(message)}. Raise the ResourceQuota or lower what the spec asks for",
            component,
            Severity.FAILING,
        )
    return Finding("PodsRefused", shorten(message), component, Severity.FAILING)


def check_failures(failures: Iterable[ApplyFailure]) -> Finding | None:
    """What the API server said to our own writes."""
    for failure in failures:
        target = f"{failure.kind} {failure.name}"
        if "exceeded quota" in failure.message:
            return refused(failure.message, component="operator")
        if failure.kind == "PersistentVolumeClaim" and failure.code in (403, 422):
            return Finding(
                "ClaimRefused",
                f"the claim cannot be changed as asked: {shorten(failure.message)}. Use another claim "
                "(cache.volume.existingClaim), or undo the change",
                "storage",
                Severity.FAILING,
            )
        severity = (
            Severity.FAILING
            if 400 <= failure.code < 500 and failure.code != 409
            else Severity.WAITING
        )
        return Finding("ApplyFailed", f"{target}: {shorten(failure.message)}", "operator", severity)
    return None


def check_names(uid: str, objects: Iterable[JsonObject | None]) -> Finding | None:
    """Objects that have a name we need and are not ours."""
    for obj in objects:
        if obj is None or not is_foreign(obj, uid):
            continue
        what = f"{obj['kind']} {obj['metadata']['name']}"
        if is_managed(obj):
            return Finding(
                "NameTaken",
                f"{what} of an earlier ModelDeployment is still being removed",
                "operator",
            )
        return Finding(
            "NameTaken",
            f"{what} exists and is not Kerf's; remove it or rename the ModelDeployment",
            "operator",
            Severity.FAILING,
        )
    return None
