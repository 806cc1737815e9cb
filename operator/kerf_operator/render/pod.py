"""What compile and serving pods have in common: volumes, environment, restricted security.  Pure."""

from __future__ import annotations

from typing import Any

from kerf_runtime.config import API_VERSION, KIND
from kerf_runtime.config.base import canonical_json
from kerf_runtime.config.deployment import ResourceRequirements

__all__ = [
    "CACHE_MOUNT",
    "container_security",
    "environment",
    "mounts",
    "pod_security",
    "resource_requirements",
    "runtime_document",
    "volumes",
]

CACHE_MOUNT = "/cache"
USER_ID = 65532
SHARED_MEMORY = "1Gi"


def runtime_document(name: str, spec: dict[str, Any]) -> str:
    """The document that the runtime reads from ``KERF_DEPLOYMENT``, with stable field order."""
    return canonical_json(
        {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": name}, "spec": spec}
    )


def environment(*, document: str, image: str, cache_key: str | None) -> list[dict[str, str]]:
    """Environment of the runtime container; nothing of it comes from a pod's place or time."""
    values = {"KERF_DEPLOYMENT": document, "KERF_IMAGE": image, "HOME": "/tmp", "TMPDIR": "/tmp"}
    if cache_key is not None:
        values["KERF_CACHE_KEY"] = cache_key
    return [{"name": name, "value": value} for name, value in values.items()]


def volumes(
    model: dict[str, Any], *, cache_claim: str | None, cache_read_only: bool
) -> list[dict[str, Any]]:
    """The pod's volumes: ``model``, the cache if there is one, and every folder that is written to."""
    found: list[dict[str, Any]] = [model]
    if cache_claim is not None:
        claim: dict[str, Any] = {"claimName": cache_claim}
        if cache_read_only:
            claim["readOnly"] = True
        found.append({"name": "cache", "persistentVolumeClaim": claim})
    found.append({"name": "tmp", "emptyDir": {}})
    found.append({"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": SHARED_MEMORY}})
    return found


def mounts(model: dict[str, Any], *, cache: bool, cache_read_only: bool) -> list[dict[str, Any]]:
    """Where the volumes are mounted; ``model`` is the mount of the model."""
    found: list[dict[str, Any]] = [model]
    if cache:
        mount: dict[str, Any] = {"name": "cache", "mountPath": CACHE_MOUNT}
        if cache_read_only:
            mount["readOnly"] = True
        found.append(mount)
    found.append({"name": "tmp", "mountPath": "/tmp"})
    found.append({"name": "shm", "mountPath": "/dev/shm"})
    return found


def resource_requirements(resources: ResourceRequirements | None) -> dict[str, Any]:
    """The ``resources`` of a container; empty when none are asked for."""
    return {} if resources is None else resources.to_document()


def pod_security() -> dict[str, Any]:
    """Pod-level security context of the restricted Pod Security standard."""
    return {
        "runAsNonRoot": True,
        "runAsUser": USER_ID,
        "runAsGroup": USER_ID,
        "fsGroup": USER_ID,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def container_security() -> dict[str, Any]:
    """Container-level security context of the restricted Pod Security standard."""
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
