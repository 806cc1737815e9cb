"""Reads everything that one reconcile needs, and decides nothing."""

from __future__ import annotations

from kerf_operator.api.names import CACHE_KIND, CACHE_LABEL
from kerf_operator.checks import finished_job
from kerf_operator.client import Client
from kerf_operator.observation import (
    CacheObservation,
    DeploymentObservation,
    JsonObject,
    StorageClassFact,
    owned_by,
)
from kerf_operator.render import Target, resolve_target
from kerf_operator.render.deployment import selector_labels
from kerf_operator.report_reader import ReportReader
from kerf_runtime.config import KIND, parse_document
from kerf_runtime.errors import ConfigError

__all__ = ["observe_cache", "observe_deployment"]

DEFAULT_CLASS = "storageclass.kubernetes.io/is-default-class"


def observe_deployment(
    client: Client, reports: ReportReader, namespace: str, name: str, *, runtime_image: str
) -> tuple[DeploymentObservation, Target | None] | None:
    """A ModelDeployment with its children and its target; None when it is gone.

    Raises:
        ApiError: the API server could not be read.
    """
    resource = client.get(KIND, name, namespace=namespace)
    if resource is None:
        return None
    try:
        spec = parse_document(resource, where=f"{namespace}/{name}").spec
    except ConfigError as error:
        return DeploymentObservation(resource, None, spec_error=error.what), None
    target = resolve_target(name, spec, runtime_image=runtime_image)
    uid = resource["metadata"]["uid"]
    claim = None
    if target.claim is not None:
        claim = client.get("PersistentVolumeClaim", target.claim, namespace=namespace)
    caches = client.list(CACHE_KIND, namespace=namespace)
    pods = client.list("Pod", namespace=namespace, labels=selector_labels(name))
    observation = DeploymentObservation(
        resource=resource,
        spec=spec,
        claim=claim,
        storage_class=_storage_class(client, claim),
        cache=next((c for c in caches if c["metadata"]["name"] == target.cache_name), None),
        owned_caches=tuple(cache for cache in caches if owned_by(cache, uid)),
        deployment=client.get("Deployment", name, namespace=namespace),
        service=client.get("Service", name, namespace=namespace),
        autoscaler=client.get("HorizontalPodAutoscaler", name, namespace=namespace),
        pods=tuple(pods),
        reports=reports.read(pods),
    )
    return observation, target


def observe_cache(client: Client, namespace: str, name: str) -> CacheObservation | None:
    """A CompileCache with its claim, Jobs and pods; None when it is gone.

    Raises:
        ApiError: the API server could not be read.
    """
    resource = client.get(CACHE_KIND, name, namespace=namespace)
    if resource is None:
        return None
    claim = client.get("PersistentVolumeClaim", resource["spec"]["claimName"], namespace=namespace)
    labels = {CACHE_LABEL: name}
    jobs = client.list("Job", namespace=namespace, labels=labels)
    pods = client.list("Pod", namespace=namespace, labels=labels)
    return CacheObservation(
        resource=resource,
        claim=claim,
        storage_class=_storage_class(client, claim),
        jobs=tuple(jobs),
        pods=tuple(pods),
        job_events=_job_events(client, namespace, jobs, pods),
    )


def _storage_class(client: Client, claim: JsonObject | None) -> StorageClassFact | None:
    """What is known about the class of a claim that is not bound; nothing is read for a bound one."""
    if claim is None or (claim.get("status") or {}).get("phase") == "Bound":
        return None
    name = claim["spec"].get("storageClassName")
    if name == "":
        return None  # a static volume: no class takes part
    if name is None:
        classes = client.list("StorageClass")
        default = [
            c
            for c in classes
            if (c["metadata"].get("annotations") or {}).get(DEFAULT_CLASS) == "true"
        ]
        return StorageClassFact(None, bool(default))
    found = client.get("StorageClass", name)
    waits = found is not None and found.get("volumeBindingMode") == "WaitForFirstConsumer"
    return StorageClassFact(name, found is not None, waits)


def _job_events(
    client: Client, namespace: str, jobs: list[JsonObject], pods: list[JsonObject]
) -> tuple[str, ...]:
    """Why a running Job has no pod (quota, admission): only its events know."""
    with_pods = {ref["uid"] for pod in pods for ref in pod["metadata"].get("ownerReferences") or []}
    waiting = [
        job for job in jobs if finished_job(job) is None and job["metadata"]["uid"] not in with_pods
    ]
    if not waiting:
        return ()
    fields = {"involvedObject.uid": waiting[0]["metadata"]["uid"], "type": "Warning"}
    events = client.list("Event", namespace=namespace, fields=fields)
    events.sort(key=lambda event: str(event.get("lastTimestamp") or event.get("eventTime") or ""))
    return tuple(str(event.get("message", "")) for event in events)
