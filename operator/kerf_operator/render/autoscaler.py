"""The HorizontalPodAutoscaler on running requests per pod.  Pure."""

from __future__ import annotations

from typing import Any

from kerf_operator.api.names import SERVING, labels, owner_reference
from kerf_runtime.config.deployment import AutoscalingSpec

__all__ = ["METRIC", "render_autoscaler"]

METRIC = "kerf_requests_running"
"""Gauge of the runtime that a custom-metrics adapter serves per pod."""


def render_autoscaler(owner: dict[str, Any], autoscaling: AutoscalingSpec) -> dict[str, Any]:
    """An autoscaler called like its ModelDeployment; it, and not the operator, owns ``replicas``."""
    name = owner["metadata"]["name"]
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {
            "name": name,
            "namespace": owner["metadata"]["namespace"],
            "labels": labels(SERVING, deployment=name),
            "ownerReferences": [owner_reference(owner, controller=True)],
        },
        "spec": {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": name},
            "minReplicas": autoscaling.min_replicas,
            "maxReplicas": autoscaling.max_replicas,
            "metrics": [
                {
                    "type": "Pods",
                    "pods": {
                        "metric": {"name": METRIC},
                        "target": {
                            "type": "AverageValue",
                            "averageValue": str(autoscaling.target_running_requests),
                        },
                    },
                }
            ],
        },
    }
