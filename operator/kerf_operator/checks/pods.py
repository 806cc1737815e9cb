"""Checks of pods and their containers, of compile and serving pods alike.  Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from kerf_operator.checks.finding import Finding, Severity, shorten, worst
from kerf_operator.observation import JsonObject, conditions_of

__all__ = [
    "check_pod",
    "check_pods",
    "ended_container",
    "is_ready_pod",
    "newest_first",
    "parse_result",
]

_IMAGE_REASONS = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")
_CONFIG_REASONS = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError")
_NODE_BOUND = "volume node affinity conflict"


def check_pod(pod: JsonObject, *, component: str) -> Finding | None:
    """Why one pod does not run; None when nothing is wrong with it."""
    name = pod["metadata"]["name"]
    status = pod.get("status") or {}
    for container in (
        *(status.get("initContainerStatuses") or ()),
        *(status.get("containerStatuses") or ()),
    ):
        found = _check_container(container, name, component)
        if found is not None:
            return found
    scheduled = conditions_of(pod).get("PodScheduled") or {}
    if scheduled.get("status") == "False" and scheduled.get("reason") == "Unschedulable":
        return _check_unscheduled(name, scheduled.get("message", ""), component)
    if status.get("reason") == "Evicted":
        return Finding("Evicted", f"pod {name}: {status.get('message', '')}", component, pod=name)
    return None


def _check_unscheduled(pod: str, message: str, component: str) -> Finding:
    """Why the scheduler found no node: a volume, or resources."""
    if "unbound immediate PersistentVolumeClaims" in message:
        return Finding(
            "ClaimPending", f"pod {pod} waits until its claims are bound", component, pod=pod
        )
    if "persistentvolumeclaim" in message and "not found" in message:
        return Finding(
            "ClaimNotFound",
            f"pod {pod} needs a claim that does not exist: {message}. Create it, or correct "
            "model.source.pvc.claimName or model.volume.existingClaim",
            component,
            pod=pod,
        )
    if _NODE_BOUND in message:
        return Finding(
            "VolumeNodeBound",
            f"pod {pod} must run on the node of its volume and that node cannot take it: {message}. "
            "Use a ReadWriteMany claim, or free that node",
            component,
            pod=pod,
        )
    return Finding(
        "Unschedulable",
        f"no node can take pod {pod}: {message}. Free resources or lower what the spec asks for",
        component,
        pod=pod,
    )


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


def parse_result(text: str) -> dict[str, Any]:
    """The JSON object of a termination message; empty when it is something else."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


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


def is_ready_pod(pod: JsonObject) -> bool:
    """Whether the pod serves and is not on its way out."""
    ready = conditions_of(pod).get("Ready") or {}
    return ready.get("status") == "True" and "deletionTimestamp" not in pod["metadata"]
