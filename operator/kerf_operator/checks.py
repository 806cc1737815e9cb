"""What is wrong, and what to do about it: small pure checks over observed objects.

Each check looks at one thing and returns a ``Finding`` or None.  Waiting is not failure: a finding of
severity ``WAITING`` explains why something has not happened yet, one of severity ``FAILING`` will not mend
itself.  The same checks serve both kinds.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from kerf_operator.api.names import is_managed
from kerf_operator.observation import (
    ApplyFailure,
    JsonObject,
    StorageClassFact,
    conditions_of,
    is_foreign,
)

__all__ = [
    "Finding",
    "Severity",
    "check_claim",
    "check_deployment",
    "check_failures",
    "check_job",
    "check_names",
    "check_pod",
    "check_pods",
    "finished_job",
    "is_ready_pod",
    "job_result",
    "worst",
]


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


_IMAGE_REASONS = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")
_CONFIG_REASONS = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError")
_NODE_BOUND = "volume node affinity conflict"
MESSAGE_LIMIT = 1024


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


def check_claim(
    claim: JsonObject | None, storage_class: StorageClassFact | None, *, name: str, ours: bool
) -> Finding | None:
    """Whether the cache claim can be used."""
    if claim is None:
        if ours:
            return Finding("ClaimPending", f"claim {name} is being created", "storage")
        return Finding(
            "ClaimNotFound",
            f"claim {name} does not exist in this namespace; create it, or remove "
            "cache.volume.existingClaim so that Kerf creates one",
            "storage",
            Severity.FAILING,
        )
    phase = (claim.get("status") or {}).get("phase")
    if phase == "Bound":
        return None
    if phase == "Lost":
        return Finding(
            "ClaimLost",
            f"the volume of claim {name} is gone; delete the claim to get a new one",
            "storage",
            Severity.FAILING,
        )
    return _check_unbound(name, storage_class)


def _check_unbound(name: str, storage_class: StorageClassFact | None) -> Finding:
    """Why a claim is not bound.  Never a failure: a volume may still be made for it by hand."""
    if storage_class is not None and storage_class.exists is False:
        if storage_class.name is None:
            return Finding(
                "NoDefaultStorageClass",
                f"claim {name} names no StorageClass and the cluster has no default one; set "
                "cache.volume.claimTemplate.storageClassName, or make a class the default",
                "storage",
            )
        return Finding(
            "StorageClassNotFound",
            f"StorageClass {storage_class.name} of claim {name} does not exist; create it, or name "
            "another one (kubectl get storageclass)",
            "storage",
        )
    if storage_class is not None and storage_class.waits_for_consumer:
        return Finding(
            "WaitForFirstConsumer",
            f"claim {name} is bound once the compile Job's pod is placed",
            "storage",
        )
    return Finding(
        "ClaimPending",
        f"claim {name} is not bound to a volume yet; see kubectl describe pvc {name}",
        "storage",
    )


def check_pod(pod: JsonObject, *, component: str) -> Finding | None:
    """Why one pod does not run; None when nothing is wrong with it."""
    name = pod["metadata"]["name"]
    status = pod.get("status") or {}
    for container in status.get("containerStatuses") or []:
        found = _check_container(container, name, component)
        if found is not None:
            return found
    scheduled = conditions_of(pod).get("PodScheduled") or {}
    if scheduled.get("status") == "False" and scheduled.get("reason") == "Unschedulable":
        message = scheduled.get("message", "")
        if _NODE_BOUND in message:
            return Finding(
                "VolumeNodeBound",
                f"pod {name} must run on the node of its volume and that node cannot take it: {message}. "
                "Use a ReadWriteMany claim, or free that node",
                component,
                pod=name,
            )
        return Finding(
            "Unschedulable",
            f"no node can take pod {name}: {message}. Free resources or lower what the spec asks for",
            component,
            pod=name,
        )
    if status.get("reason") == "Evicted":
        return Finding("Evicted", f"pod {name}: {status.get('message', '')}", component, pod=name)
    return None


def _check_container(container: JsonObject, pod: str, component: str) -> Finding | None:
    state = container.get("state") or {}
    waiting = state.get("waiting") or {}
    reason = waiting.get("reason", "")
    if reason in _IMAGE_REASONS:
        return Finding(
            "ImagePullFailed",
            f"pod {pod} cannot pull image {container.get('image', '')}: "
            f"{shorten(waiting.get('message', reason))}. Check runtimeImage and imagePullSecrets",
            component,
            Severity.FAILING,
            pod=pod,
        )
    if reason in _CONFIG_REASONS:
        return Finding(
            "ContainerConfigError",
            f"pod {pod} cannot start its container: {shorten(waiting.get('message', reason))}",
            component,
            Severity.FAILING,
            pod=pod,
        )
    ended = state.get("terminated") or (
        (container.get("lastState") or {}).get("terminated") if not container.get("ready") else None
    )
    if ended and ended.get("exitCode", 0) != 0:
        return ended_container(ended, pod=pod, component=component)
    return None


def ended_container(ended: JsonObject, *, pod: str, component: str) -> Finding:
    """What the end of a container tells: out of memory, the runtime's own error, or its last words."""
    code = int(ended.get("exitCode", 0))
    if ended.get("reason") == "OOMKilled":
        return Finding(
            "OOMKilled",
            f"pod {pod} needed more memory than its limit; raise resources.limits.memory, or lower "
            "engine.kvCacheMemory or engine.maxNumBatchedTokens",
            component,
            Severity.FAILING,
            pod,
            code,
        )
    text = ended.get("message") or ""
    error = parse_result(text).get("error")
    if isinstance(error, dict) and error.get("reason"):
        return Finding(
            str(error["reason"]),
            shorten(str(error.get("message", ""))),
            component,
            Severity.FAILING,
            pod,
            code,
        )
    last_words = f": {shorten(text)}" if text else f"; see kubectl logs {pod}"
    return Finding(
        "ContainerFailed",
        f"pod {pod} ended with exit code {code}{last_words}",
        component,
        Severity.FAILING,
        pod,
        code,
    )


def check_pods(pods: Sequence[JsonObject], *, component: str) -> Finding | None:
    """The worst finding of the pods that are not on their way out."""
    return worst(
        check_pod(pod, component=component)
        for pod in sorted(pods, key=lambda pod: str(pod["metadata"]["name"]))
        if "deletionTimestamp" not in pod["metadata"]
    )


def check_deployment(deployment: JsonObject | None) -> Finding | None:
    """What the Deployment's own conditions tell: pods that cannot be created, no progress."""
    conditions = conditions_of(deployment)
    failure = conditions.get("ReplicaFailure")
    if failure is not None and failure.get("status") == "True":
        return _refused(failure.get("message", ""), component="serving")
    progress = conditions.get("Progressing")
    if progress is not None and progress.get("reason") == "ProgressDeadlineExceeded":
        return Finding(
            "ProgressDeadlineExceeded",
            f"{progress.get('message', '')} See the pods' logs, or raise probes.startupTimeoutSeconds",
            "serving",
            Severity.FAILING,
        )
    return None


def _refused(message: str, *, component: str) -> Finding:
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
            return _refused(failure.message, component="operator")
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
        found = _refused(events[-1], component="compile")
        return Finding(found.reason, found.message, found.component)
    return None


def newest_first(pods: Sequence[JsonObject]) -> list[JsonObject]:
    """Pods by creation time, the newest first."""
    return sorted(
        pods,
        key=lambda pod: (
            str(pod["metadata"].get("creationTimestamp", "")),
            str(pod["metadata"]["name"]),
        ),
        reverse=True,
    )


def job_result(pods: Sequence[JsonObject]) -> dict[str, Any]:
    """What the pod that succeeded wrote: result, size, seconds, gate, counters; empty if unknown."""
    for pod in newest_first(pods):
        for container in (pod.get("status") or {}).get("containerStatuses") or []:
            ended = (container.get("state") or {}).get("terminated") or {}
            if ended and ended.get("exitCode") == 0:
                return parse_result(ended.get("message") or "")
    return {}


def parse_result(text: str) -> dict[str, Any]:
    """The JSON object of a termination message; empty when it is something else."""
    try:
        document = json.loads(text)
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}


def is_ready_pod(pod: JsonObject) -> bool:
    """Whether the pod serves and is not on its way out."""
    ready = conditions_of(pod).get("Ready") or {}
    return ready.get("status") == "True" and "deletionTimestamp" not in pod["metadata"]
