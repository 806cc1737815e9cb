"""The objects that a ModelDeployment leads to, without a cluster.  Pure.

What ``kerf render`` prints: the same builders as the operator's, with placeholders where only a
cluster knows (uids).  The CompileCache in it can be applied by hand to fill a cache before an upgrade.
"""

from __future__ import annotations

from typing import Any

import yaml

from kerf_operator.api.cache import CompileCacheSpec
from kerf_operator.plan import wanted_replicas
from kerf_operator.render import (
    render_autoscaler,
    render_claim,
    render_compile_cache,
    render_deployment,
    render_job,
    render_service,
    resolve_target,
)
from kerf_runtime.config import API_VERSION, KIND, ModelDeploymentDocument

__all__ = ["objects_yaml", "preview_objects"]

PLACEHOLDER_UID = "00000000-0000-0000-0000-000000000000"


def preview_objects(
    document: ModelDeploymentDocument, *, namespace: str, runtime_image: str
) -> list[dict[str, Any]]:
    """Claim, CompileCache, Job, Deployment, Service and autoscaler of ``document``, as far as it has them."""
    spec = document.spec
    owner = {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": document.name, "namespace": namespace, "uid": PLACEHOLDER_UID},
    }
    target = resolve_target(document.name, spec, runtime_image=runtime_image)
    objects: list[dict[str, Any]] = []
    if target.creates_claim:
        objects.append(render_claim(owner, spec))
    if target.cache_name is not None:
        cache = render_compile_cache(owner, spec, target, settings=True)
        made = {**cache, "metadata": {**cache["metadata"], "uid": PLACEHOLDER_UID}}
        cache_spec = CompileCacheSpec.model_validate(cache["spec"])
        objects += [cache, render_job(made, cache_spec, claim_uid=PLACEHOLDER_UID)]
    objects.append(
        render_deployment(
            owner,
            spec,
            template=target.template,
            revision=target.revision,
            replicas=wanted_replicas(spec),
        )
    )
    objects.append(render_service(owner, spec))
    if spec.autoscaling is not None:
        objects.append(render_autoscaler(owner, spec.autoscaling))
    return [_without_placeholders(obj) for obj in objects]


def _without_placeholders(obj: dict[str, Any]) -> dict[str, Any]:
    metadata = {key: value for key, value in obj["metadata"].items() if key != "ownerReferences"}
    return {**obj, "metadata": metadata}


def objects_yaml(objects: list[dict[str, Any]]) -> str:
    """One YAML document for each object."""
    return "---\n".join(
        yaml.dump(obj, Dumper=_PlainDumper, sort_keys=False, width=110) for obj in objects
    )


class _PlainDumper(yaml.SafeDumper):
    """YAML without anchors: every object stands alone."""

    def ignore_aliases(self, data: Any) -> bool:
        return True
