"""From what was observed to the writes that are missing.  Pure: no client, no clock, no kopf.

Nothing here remembers anything and nothing depends on which event arrived: a plan is a function of the
observation.  An empty plan means that the cluster already says what the resources ask for.

The serving Deployment changes its pod template only when the cache that the new template mounts is
published.  Until then the old revision keeps serving (and can be scaled).
"""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import ValidationError

from kerf_operator.actions import Action, Apply, Create, Delete
from kerf_operator.api.cache import CompileCacheSpec
from kerf_operator.api.names import (
    CACHE_KIND,
    CACHE_NAME,
    JOB_SETTINGS,
    REVISION_LABEL,
    SCALE_MANAGER,
    is_managed,
    owner_manager,
)
from kerf_operator.api.status import CacheState
from kerf_operator.checks import finished_job
from kerf_operator.compare import is_applied, stamped
from kerf_operator.observation import (
    CacheObservation,
    DeploymentObservation,
    JsonObject,
    is_being_deleted,
    is_foreign,
    owned_by,
)
from kerf_operator.render import (
    Target,
    render_autoscaler,
    render_claim,
    render_compile_cache,
    render_deployment,
    render_job,
    render_scale,
    render_service,
)
from kerf_operator.render.compilecache import render_release
from kerf_operator.render.job import settings_digest
from kerf_runtime.config import ModelDeploymentSpec, cache_key

__all__ = [
    "CachePlan",
    "active_cache",
    "active_revision",
    "cache_is_ready",
    "current_job",
    "is_rolled_out",
    "may_roll_out",
    "plan_cache",
    "plan_deployment",
    "wanted_replicas",
]


@dataclass(frozen=True)
class CachePlan:
    """The plan of a CompileCache.

    Attributes:
        actions: what to write.
        job: name of the Job of the current attempt; None while it cannot be known.
        error: why no Job can be made from the spec.
    """

    actions: tuple[Action, ...] = ()
    job: str | None = None
    error: str | None = None


def active_revision(deployment: JsonObject | None) -> str | None:
    """Revision of the pod template that the Deployment has now."""
    if deployment is None:
        return None
    labels = deployment["spec"]["template"]["metadata"].get("labels") or {}
    found = labels.get(REVISION_LABEL)
    return None if found is None else str(found)


def active_cache(deployment: JsonObject | None) -> str | None:
    """Name of the CompileCache that the Deployment's pods mount."""
    if deployment is None:
        return None
    annotations = deployment["spec"]["template"]["metadata"].get("annotations") or {}
    found = annotations.get(CACHE_NAME)
    return None if found is None else str(found)


def cache_is_ready(cache: JsonObject | None) -> bool:
    """Whether the artifacts are published."""
    if cache is None or is_being_deleted(cache):
        return False
    return bool((cache.get("status") or {}).get("state") == CacheState.READY)


def may_roll_out(obs: DeploymentObservation, target: Target) -> bool:
    """Whether the Deployment may have the target's pod template: its cache is there, or not needed."""
    if target.cache_name is None or active_revision(obs.deployment) == target.revision:
        return True
    return cache_is_ready(obs.cache)


def is_rolled_out(deployment: JsonObject | None, revision: str) -> bool:
    """Whether every pod of the Deployment is of ``revision`` and no older one is left."""
    if deployment is None or active_revision(deployment) != revision:
        return False
    status = deployment.get("status") or {}
    total = status.get("replicas", 0)
    return bool(
        status.get("observedGeneration", 0) >= deployment["metadata"].get("generation", 0)
        and status.get("updatedReplicas", 0) == total
    )


def wanted_replicas(spec: ModelDeploymentSpec) -> int | None:
    """Pods to have; None when an autoscaler decides."""
    if spec.suspend:
        return 0
    if spec.autoscaling is not None:
        return None
    return 1 if spec.replicas is None else spec.replicas


def plan_deployment(obs: DeploymentObservation, target: Target | None) -> tuple[Action, ...]:
    """The writes that a ModelDeployment still needs, in the order in which they must happen."""
    if is_being_deleted(obs.resource) or obs.spec is None or target is None:
        return ()
    owner, spec = obs.resource, obs.spec
    actions: list[Action] = []
    if target.creates_claim and not spec.suspend:
        _apply(actions, obs.claim, render_claim(owner, spec), obs.uid)
    if target.cache_name is not None and not spec.suspend:
        actions.extend(_plan_own_cache(obs, spec, target))
    actions.extend(_plan_serving(obs, spec, target))
    _apply(actions, obs.service, render_service(owner, spec), obs.uid)
    actions.extend(_plan_autoscaler(obs, spec))
    actions.extend(_plan_old_caches(obs, target))
    return tuple(actions)


def _apply(
    actions: list[Action], observed: JsonObject | None, manifest: JsonObject, uid: str
) -> None:
    """Add an apply unless the object already says the same, is on its way out, or is not ours."""
    if observed is not None and (is_being_deleted(observed) or is_foreign(observed, uid)):
        return
    wanted = stamped(manifest)
    if not is_applied(observed, wanted):
        actions.append(Apply(wanted))


def _plan_own_cache(
    obs: DeploymentObservation, spec: ModelDeploymentSpec, target: Target
) -> list[Action]:
    """Make the CompileCache, or join the one that another owner made; one made by hand is left alone."""
    cache = obs.cache
    if cache is not None and (is_being_deleted(cache) or not is_managed(cache)):
        return []
    owners = [] if cache is None else cache["metadata"].get("ownerReferences") or []
    decides = not owners or owners[0]["uid"] == obs.uid
    manifest = render_compile_cache(obs.resource, spec, target, settings=decides)
    if (
        cache is not None
        and is_applied(cache, manifest)
        and (not decides or cache["spec"].get("job") == manifest["spec"]["job"])
        and _token_agrees(cache, obs.name, spec)
    ):
        return []
    return [Apply(manifest, manager=owner_manager(obs.uid))]


def _token_agrees(cache: JsonObject, name: str, spec: ModelDeploymentSpec) -> bool:
    """A token that left the spec leaves the cache as well."""
    found = (cache["spec"].get("tokens") or {}).get(name)
    return bool(found == spec.compile.token)


def _plan_serving(
    obs: DeploymentObservation, spec: ModelDeploymentSpec, target: Target
) -> list[Action]:
    actions: list[Action] = []
    observed, replicas = obs.deployment, wanted_replicas(spec)
    if observed is not None and (is_being_deleted(observed) or is_foreign(observed, obs.uid)):
        return []
    if observed is not None:
        # An autoscaler's number is left alone, but our scale manager must own the field beside it.
        wanted_now = observed["spec"].get("replicas", 1) if replicas is None else replicas
        if not _scaled(observed, wanted_now):
            scale = render_scale(obs.resource, replicas=wanted_now)
            actions.append(Apply(scale, manager=SCALE_MANAGER))
    if spec.suspend or not may_roll_out(obs, target):
        return actions
    initial = None
    if observed is None:
        initial = replicas if spec.autoscaling is None else spec.autoscaling.min_replicas
    manifest = render_deployment(
        obs.resource,
        spec,
        template=target.template,
        revision=target.revision,
        replicas=None,
    )
    wanted = stamped(manifest)
    if is_applied(observed, wanted):
        return actions
    if initial is not None:
        wanted = {**wanted, "spec": {**wanted["spec"], "replicas": initial}}
    actions.append(Apply(wanted))
    if initial is not None:
        # From now on this manager owns replicas, so that leaving the field out above resets nothing.
        actions.append(Apply(render_scale(obs.resource, replicas=initial), manager=SCALE_MANAGER))
    return actions


def _scaled(deployment: JsonObject, replicas: int) -> bool:
    """Whether the Deployment has ``replicas`` and our scale manager owns the field."""
    managers = {entry.get("manager") for entry in deployment["metadata"].get("managedFields") or []}
    return deployment["spec"].get("replicas") == replicas and SCALE_MANAGER in managers


def _plan_autoscaler(obs: DeploymentObservation, spec: ModelDeploymentSpec) -> list[Action]:
    actions: list[Action] = []
    if spec.autoscaling is not None and not spec.suspend:
        manifest = render_autoscaler(obs.resource, spec.autoscaling)
        _apply(actions, obs.autoscaler, manifest, obs.uid)
    elif obs.autoscaler is not None and owned_by(obs.autoscaler, obs.uid):
        actions.extend(_delete(obs.autoscaler, "HorizontalPodAutoscaler"))
    return actions


def _plan_old_caches(obs: DeploymentObservation, target: Target) -> list[Action]:
    """Let go of caches that neither the spec nor the running pods need.

    A compile that nobody waits for is ended.  Of published ones the newest is kept, so that going back
    needs no Job; the artifacts on the volume stay in any case.
    """
    keep = {target.cache_name, active_cache(obs.deployment)}
    keep |= {_cache_of(pod) for pod in obs.pods}
    old = [cache for cache in obs.owned_caches if cache["metadata"]["name"] not in keep]
    published = sorted(
        (cache for cache in old if cache_is_ready(cache)),
        key=lambda cache: (
            cache["metadata"].get("creationTimestamp", ""),
            cache["metadata"]["name"],
        ),
    )
    if published:
        old.remove(published[-1])
    actions: list[Action] = []
    for cache in old:
        if is_being_deleted(cache) or not is_managed(cache):
            continue
        if len(cache["metadata"].get("ownerReferences") or []) == 1:
            actions.extend(_delete(cache, CACHE_KIND))
        else:
            actions.append(Apply(render_release(cache), manager=owner_manager(obs.uid)))
    return actions


def _cache_of(pod: JsonObject) -> str | None:
    found = (pod["metadata"].get("annotations") or {}).get(CACHE_NAME)
    return None if found is None else str(found)


def _delete(obj: JsonObject, kind: str) -> list[Action]:
    if is_being_deleted(obj):
        return []
    metadata = obj["metadata"]
    return [Delete(kind, metadata["namespace"], metadata["name"], metadata["uid"])]


def plan_cache(obs: CacheObservation) -> CachePlan:
    """The writes that a CompileCache still needs: at most one Job, ever, at a time."""
    if is_being_deleted(obs.resource):
        return CachePlan()
    try:
        spec = CompileCacheSpec.model_validate(obs.resource["spec"])
        error = _key_error(spec)
        if error is not None:
            return CachePlan(error=error)
        if obs.claim is None:
            return CachePlan()
        claim_uid = str(obs.claim["metadata"]["uid"])
        wanted = render_job(obs.resource, spec, claim_uid=claim_uid)
    except ValidationError as problem:
        first = problem.errors()[0]
        path = ".".join(str(part) for part in first["loc"])
        return CachePlan(error=f"spec.document.{path}: {first['msg']}")
    name = str(wanted["metadata"]["name"])
    ours = [job for job in obs.jobs if owned_by(job, obs.uid)]
    strangers = [job for job in obs.jobs if not owned_by(job, obs.uid)]
    found = {str(job["metadata"]["name"]): job for job in ours}
    if is_published(obs.resource, claim_uid):
        return CachePlan(job=recorded_job(obs.resource) or name)
    if name in found:
        return CachePlan(job=name)
    running = [job for job in ours if finished_job(job) is None]
    kept = [
        job
        for job in running
        if not is_being_deleted(job) and _settings_of(job) == settings_digest(spec)
    ]
    if kept:
        return CachePlan(job=str(kept[0]["metadata"]["name"]))
    replaced: list[Action] = []
    for job in running:
        replaced.extend(_delete(job, "Job"))
    if running or strangers:
        # The key is the lock: the next Job is made when the last one is gone.
        return CachePlan(tuple(replaced), job=name)
    return CachePlan((Create(wanted),), job=name)


def _key_error(spec: CompileCacheSpec) -> str | None:
    expected = cache_key(spec.factors)
    if expected == spec.key:
        return None
    return f"spec.key {spec.key} is not the key of spec.factors, which is {expected}"


def _settings_of(job: JsonObject) -> str | None:
    found = (job["metadata"].get("annotations") or {}).get(JOB_SETTINGS)
    return None if found is None else str(found)


def recorded_job(cache: JsonObject) -> str | None:
    """Name of the Job that the status remembers."""
    found = (cache.get("status") or {}).get("jobName")
    return None if found is None else str(found)


def is_published(cache: JsonObject, claim_uid: str) -> bool:
    """Whether the status says that this very claim holds the artifacts."""
    status = cache.get("status") or {}
    return status.get("state") == CacheState.READY and status.get("claimUid") == claim_uid


def current_job(obs: CacheObservation, plan: CachePlan) -> JsonObject | None:
    """The Job that the plan names, if it exists and is this cache's own."""
    for job in obs.jobs:
        if job["metadata"]["name"] == plan.job and owned_by(job, obs.uid):
            return job
    return None
