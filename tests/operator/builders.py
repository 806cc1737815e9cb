"""Small builders of observed objects for the pure tests."""

from __future__ import annotations

from typing import Any

from kerf_operator.api.names import CACHE_NAME, REVISION_LABEL, labels, owner_reference
from kerf_operator.compare import stamped
from kerf_operator.observation import CacheObservation, DeploymentObservation
from kerf_operator.plan import plan_cache
from kerf_operator.render import (
    Target,
    render_claim,
    render_compile_cache,
    render_deployment,
    render_service,
    resolve_target,
)
from kerf_runtime.config import ModelDeploymentSpec

IMAGE = "registry.test/kerf-runtime:1"
UID = "11111111-aaaa-4000-8000-000000000001"
CACHE_UID = "22222222-bbbb-4000-8000-000000000002"
CLAIM_UID = "33333333-cccc-4000-8000-000000000003"
NOW = "2026-01-02T03:04:05Z"


def spec_document(**changes: Any) -> dict[str, Any]:
    """A small valid spec."""
    return {
        "model": {"source": {"pvc": {"claimName": "models", "path": "model.gguf"}}},
        "engine": {"dtype": "float32"},
        "compilation": {"captureSizes": [1, 2, 4]},
        **changes,
    }


def spec_of(**changes: Any) -> ModelDeploymentSpec:
    return ModelDeploymentSpec.model_validate(spec_document(**changes))


def resource(
    name: str = "chat", uid: str = UID, generation: int = 1, **changes: Any
) -> dict[str, Any]:
    """A ModelDeployment as the API server has it."""
    return {
        "apiVersion": "kerf.dev/v1alpha1",
        "kind": "ModelDeployment",
        "metadata": {"name": name, "namespace": "team", "uid": uid, "generation": generation},
        "spec": spec_document(**changes),
    }


def target_of(name: str = "chat", **changes: Any) -> Target:
    return resolve_target(name, spec_of(**changes), runtime_image=IMAGE)


def observe(
    name: str = "chat", *, uid: str = UID, **changes: Any
) -> tuple[DeploymentObservation, Target]:
    """A ModelDeployment with no children yet."""
    target = target_of(name, **changes)
    return DeploymentObservation(resource(name, uid, **changes), spec_of(**changes)), target


def as_observed(
    manifest: dict[str, Any], *, uid: str = "u", status: dict[str, Any] | None = None
) -> dict[str, Any]:
    """A manifest as the API server returns it after an apply."""
    found = stamped(manifest)
    return {
        **found,
        "metadata": {**found["metadata"], "uid": uid, "generation": 1},
        "status": status or {},
    }


def bound_claim(owner: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return as_observed(
        render_claim(owner, spec_of(**changes)), uid=CLAIM_UID, status={"phase": "Bound"}
    )


def compile_cache(
    owner: dict[str, Any],
    state: str | None = None,
    *,
    spec: dict[str, Any] | None = None,
    **status: Any,
) -> dict[str, Any]:
    """The CompileCache that ``owner`` needs, in ``state``."""
    changes = spec or {}
    name = owner["metadata"]["name"]
    manifest = render_compile_cache(
        owner, spec_of(**changes), target_of(name, **changes), settings=True
    )
    manifest["metadata"] = {**manifest["metadata"], "uid": CACHE_UID, "generation": 1}
    if state is not None:
        ready = {
            "type": "Ready",
            "status": str(state == "Ready"),
            "reason": status.pop("reason", "Published" if state == "Ready" else state),
            "message": status.pop("text", state),
            "lastTransitionTime": NOW,
            "observedGeneration": 1,
        }
        manifest["status"] = {
            "state": state,
            "claimUid": CLAIM_UID,
            "conditions": [ready],
            **status,
        }
    return manifest


def deployment(
    owner: dict[str, Any], *, ready: int, replicas: int = 1, spec: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The serving Deployment of ``owner``, rolled out, with ``ready`` pods."""
    changes = spec or {}
    target = target_of(owner["metadata"]["name"], **changes)
    manifest = render_deployment(
        owner, spec_of(**changes), template=target.template, revision=target.revision, replicas=None
    )
    found = as_observed(
        manifest,
        status={
            "observedGeneration": 1,
            "replicas": replicas,
            "updatedReplicas": replicas,
            "readyReplicas": ready,
        },
    )
    found["spec"] = {**found["spec"], "replicas": replicas}
    found["metadata"]["managedFields"] = [{"manager": "kerf-operator-scale"}]
    return found


def service(owner: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return as_observed(render_service(owner, spec_of(**changes)))


def pod(
    name: str = "chat-1",
    *,
    target: Target | None = None,
    ready: bool = True,
    scheduled: bool = True,
    container: dict[str, Any] | None = None,
    phase: str = "Running",
    message: str = "",
    component: str = "serving",
) -> dict[str, Any]:
    """A pod; ``container`` is merged into its container status."""
    metadata: dict[str, Any] = {
        "name": name,
        "namespace": "team",
        "uid": f"uid-{name}",
        "creationTimestamp": NOW,
        "labels": labels(component),
    }
    if target is not None:
        metadata["labels"][REVISION_LABEL] = target.revision
        metadata["annotations"] = {CACHE_NAME: target.cache_name}
    conditions = [
        {
            "type": "PodScheduled",
            "status": str(scheduled),
            "reason": "" if scheduled else "Unschedulable",
            "message": message,
        },
        {"type": "Ready", "status": str(ready)},
    ]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "status": {
            "phase": phase,
            "podIP": "127.0.0.9",
            "conditions": conditions,
            "containerStatuses": [
                {"name": "kerf", "ready": ready, "image": IMAGE, **(container or {})}
            ],
        },
    }


def job(
    cache: dict[str, Any],
    *,
    condition: str | None = None,
    reason: str = "",
    claim_uid: str = CLAIM_UID,
) -> dict[str, Any]:
    """The Job that the plan would create for ``cache``, finished with ``condition`` if given."""
    claim = {"metadata": {"name": "c", "uid": claim_uid}, "status": {"phase": "Bound"}}
    plan = plan_cache(CacheObservation({**cache, "status": {}}, claim=claim))
    manifest: dict[str, Any] = plan.actions[0].manifest  # type: ignore[union-attr]
    found = {**manifest, "metadata": {**manifest["metadata"], "uid": "job-uid"}, "status": {}}
    if condition is not None:
        found["status"] = {
            "startTime": "2026-01-02T03:04:05Z",
            "completionTime": "2026-01-02T03:04:15Z",
            "conditions": [{"type": condition, "status": "True", "reason": reason, "message": "m"}],
        }
    return found


def owner_of(cache: dict[str, Any], other_uid: str, name: str) -> dict[str, Any]:
    """``cache`` with one more owner."""
    extra = owner_reference(resource(name, other_uid), controller=False)
    owners = [*cache["metadata"]["ownerReferences"], extra]
    return {**cache, "metadata": {**cache["metadata"], "ownerReferences": owners}}
