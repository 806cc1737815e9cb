"""The Service in front of the serving pods.  Pure."""

from __future__ import annotations

from typing import Any

from kerf_operator.api.names import SERVING, labels, owner_reference
from kerf_operator.render.deployment import selector_labels
from kerf_runtime.config import ModelDeploymentSpec

__all__ = ["render_service"]


def render_service(owner: dict[str, Any], spec: ModelDeploymentSpec) -> dict[str, Any]:
    """A Service called like its ModelDeployment."""
    name = owner["metadata"]["name"]
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {
            "name": name,
            "namespace": owner["metadata"]["namespace"],
            "labels": labels(SERVING, deployment=name),
            "ownerReferences": [owner_reference(owner, controller=True)],
        },
        "spec": {
            "type": spec.service.type.value,
            "selector": selector_labels(name),
            "ports": [
                {
                    "name": "http",
                    "port": spec.service.port,
                    "targetPort": "http",
                    "protocol": "TCP",
                }
            ],
        },
    }
