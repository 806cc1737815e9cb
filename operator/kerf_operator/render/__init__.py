"""One pure builder per Kubernetes kind: from a validated spec to a manifest.  No client, no clock.

A manifest holds only the fields that Kerf owns; the API server fills in the rest.
"""

from kerf_operator.render.autoscaler import render_autoscaler
from kerf_operator.render.compilecache import render_compile_cache
from kerf_operator.render.deployment import render_deployment, render_pod_template, render_scale
from kerf_operator.render.job import render_job
from kerf_operator.render.pvc import render_claim
from kerf_operator.render.service import render_service
from kerf_operator.render.target import Target, resolve_target

__all__ = [
    "Target",
    "render_autoscaler",
    "render_claim",
    "render_compile_cache",
    "render_deployment",
    "render_job",
    "render_pod_template",
    "render_scale",
    "render_service",
    "resolve_target",
]
