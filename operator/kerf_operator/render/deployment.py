"""The serving Deployment and its pod template.  Pure.

``replicas`` has a field manager of its own (``render_scale``): an autoscaler can then take it over, and
a change of the pod template never touches it.
"""

from __future__ import annotations

import math
from typing import Any

from kerf_operator.api.names import (
    CACHE_NAME,
    DEPLOYMENT_LABEL,
    REVISION_LABEL,
    SERVING,
    labels,
    owner_reference,
)
from kerf_operator.render.pod import (
    CACHE_MOUNT,
    container_security,
    environment,
    mounts,
    pod_security,
    resource_requirements,
    runtime_document,
    volumes,
)
from kerf_operator.render.weights import download_container, model_mount, model_path, model_volume
from kerf_runtime.config import ModelDeploymentSpec
from kerf_runtime.config.source import DownloadSettings

__all__ = [
    "PORT",
    "render_deployment",
    "render_pod_template",
    "render_scale",
    "selector_labels",
    "serving_document",
]

PORT = 8000
STARTUP_PERIOD = 2
ENDPOINT_SECONDS = 5
"""Seconds a stopping pod keeps serving, so that proxies hear of its end before it stops."""
DRAIN_MARGIN = 15
"""Seconds beyond drainSeconds before a stopping pod is killed."""
PROGRESS_MARGIN = 120


def selector_labels(name: str) -> dict[str, str]:
    """Labels that select the serving pods."""
    return {DEPLOYMENT_LABEL: name, "app.kubernetes.io/component": SERVING}


def serving_document(spec: ModelDeploymentSpec) -> dict[str, Any]:
    """The part of ``spec`` that a serving pod reads: nothing that may change without a new pod."""
    full = spec.to_document()
    return {
        "model": full["model"],
        "engine": full["engine"],
        "compilation": full["compilation"],
        "compile": {"policy": full["compile"]["policy"]},
        "cache": {"verification": full["cache"]["verification"]},
        "drainSeconds": full["drainSeconds"],
    }


def render_pod_template(
    name: str,
    spec: ModelDeploymentSpec,
    *,
    image: str,
    key: str | None,
    claim: str | None,
    cache_name: str | None,
) -> dict[str, Any]:
    """The pod template, without the revision label that is its digest."""
    arguments = ["serve", "--model-path", model_path(spec.model.source)]
    if claim is not None:
        arguments += ["--cache-dir", CACHE_MOUNT, "--cache-read-only"]
    arguments += ["--host", "0.0.0.0", "--port", str(PORT)]
    source, settings = spec.model.source, DownloadSettings.of(spec.model.source, spec.model.volume)
    document = runtime_document(name, serving_document(spec))
    pod: dict[str, Any] = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": pod_security(),
        "terminationGracePeriodSeconds": spec.drain_seconds + ENDPOINT_SECONDS + DRAIN_MARGIN,
        "volumes": volumes(model_volume(source, settings), cache_claim=claim, cache_read_only=True),
        "containers": [
            {
                "name": "kerf",
                "image": image,
                "imagePullPolicy": spec.image_pull_policy.value,
                "command": ["kerf"],
                "args": arguments,
                "env": environment(document=document, image=image, cache_key=key),
                "ports": [{"name": "http", "containerPort": PORT, "protocol": "TCP"}],
                "volumeMounts": mounts(
                    model_mount(), cache=claim is not None, cache_read_only=True
                ),
                "securityContext": container_security(),
                "terminationMessagePolicy": "FallbackToLogsOnError",
                "resources": resource_requirements(spec.resources),
                "lifecycle": {"preStop": {"sleep": {"seconds": ENDPOINT_SECONDS}}},
                "startupProbe": _probe(
                    "/health",
                    period=STARTUP_PERIOD,
                    failures=math.ceil(spec.probes.startup_timeout_seconds / STARTUP_PERIOD),
                ),
                "livenessProbe": _probe("/health", period=10, failures=6),
                "readinessProbe": _probe("/ready", period=2, failures=3),
            }
        ],
    }
    download = download_container(
        source,
        settings,
        image=image,
        pull_policy=spec.image_pull_policy,
        document=document,
        resources=spec.resources,
    )
    if download:
        pod["initContainers"] = download
    if spec.image_pull_secrets:
        pod["imagePullSecrets"] = [{"name": secret} for secret in spec.image_pull_secrets]
    metadata: dict[str, Any] = {"labels": labels(SERVING, deployment=name)}
    if cache_name is not None:
        metadata["annotations"] = {CACHE_NAME: cache_name}
    return {"metadata": metadata, "spec": pod}


def _probe(path: str, *, period: int, failures: int) -> dict[str, Any]:
    return {
        "httpGet": {"path": path, "port": "http"},
        "periodSeconds": period,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }


def render_deployment(
    owner: dict[str, Any],
    spec: ModelDeploymentSpec,
    *,
    template: dict[str, Any],
    revision: str,
    replicas: int | None,
) -> dict[str, Any]:
    """The Deployment ``owner`` asks for.

    Args:
        owner: the ModelDeployment.
        spec: its spec.
        template: the pod template.
        revision: its digest.
        replicas: set only when the Deployment is created; afterwards ``render_scale`` owns it.
    """
    name = owner["metadata"]["name"]
    metadata = template["metadata"]
    labelled = {
        **template,
        "metadata": {**metadata, "labels": {**metadata["labels"], REVISION_LABEL: revision}},
    }
    body: dict[str, Any] = {
        "selector": {"matchLabels": selector_labels(name)},
        "strategy": {
            "type": "RollingUpdate",
            "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1},
        },
        "progressDeadlineSeconds": spec.probes.startup_timeout_seconds + PROGRESS_MARGIN,
        "revisionHistoryLimit": 2,
        "template": labelled,
    }
    if replicas is not None:
        body["replicas"] = replicas
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {
            "name": name,
            "namespace": owner["metadata"]["namespace"],
            "labels": labels(SERVING, deployment=name),
            "ownerReferences": [owner_reference(owner, controller=True)],
        },
        "spec": body,
    }


def render_scale(owner: dict[str, Any], *, replicas: int) -> dict[str, Any]:
    """The one field of the Deployment that says how many pods."""
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {
            "name": owner["metadata"]["name"],
            "namespace": owner["metadata"]["namespace"],
        },
        "spec": {"replicas": replicas},
    }
