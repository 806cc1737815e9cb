"""The claim of the compile cache, for deployments that do not bring their own.  Pure."""

from __future__ import annotations

from typing import Any

from kerf_operator.api.names import claim_name, labels, owner_reference
from kerf_runtime.config import DeletionPolicy, ModelDeploymentSpec
from kerf_runtime.config.deployment import ClaimTemplate

__all__ = ["render_claim"]


def render_claim(owner: dict[str, Any], spec: ModelDeploymentSpec) -> dict[str, Any]:
    """The claim; without an owner under ``deletionPolicy: Retain``, so that it outlives ``owner``."""
    name = owner["metadata"]["name"]
    template = spec.cache.volume.claim_template or ClaimTemplate()
    metadata: dict[str, Any] = {
        "name": claim_name(name),
        "namespace": owner["metadata"]["namespace"],
        "labels": labels("cache", deployment=name),
    }
    if spec.deletion_policy is DeletionPolicy.DELETE:
        metadata["ownerReferences"] = [owner_reference(owner, controller=True)]
    body: dict[str, Any] = {
        "accessModes": [mode.value for mode in template.access_modes],
        "resources": {"requests": {"storage": template.storage}},
    }
    if template.storage_class_name is not None:
        body["storageClassName"] = template.storage_class_name
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": metadata,
        "spec": body,
    }
