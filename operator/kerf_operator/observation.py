"""What one reconcile has seen: plain data between ``observe`` (which reads) and the pure half.  Pure.

Objects are kept as the API server gave them (dictionaries in camelCase); nothing here talks to anything.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kerf_operator.api.names import is_managed
from kerf_operator.runtime_report import RuntimeReport
from kerf_runtime.config import ModelDeploymentSpec

__all__ = [
    "ApplyFailure",
    "CacheObservation",
    "DeploymentObservation",
    "JsonObject",
    "StorageClassFact",
    "conditions_of",
    "is_being_deleted",
    "is_foreign",
    "owned_by",
]

JsonObject = dict[str, Any]


@dataclass(frozen=True)
class StorageClassFact:
    """What is known about the StorageClass of a claim that is not bound.

    Attributes:
        name: class the claim asks for; None when it relies on a default class.
        exists: whether that class exists; None when it could not be read.
        waits_for_consumer: whether the class binds only once a pod uses the claim.
    """

    name: str | None
    exists: bool | None
    waits_for_consumer: bool = False


@dataclass(frozen=True)
class ApplyFailure:
    """One write that the API server refused; becomes a reason in the status."""

    kind: str
    name: str
    code: int
    reason: str
    message: str


@dataclass(frozen=True)
class DeploymentObservation:
    """A ModelDeployment and everything that belongs to it.

    Attributes:
        resource: the ModelDeployment.
        spec: its parsed spec; None when it does not parse.
        spec_error: why it does not parse.
        claim: the cache claim that the spec names, if it exists.
        storage_class: set when the claim is not bound.
        cache: the CompileCache that the spec needs, if it exists.
        owned_caches: every CompileCache that names this ModelDeployment as an owner.
        pods: serving pods, those being deleted included.
        reports: by pod name, what Ready pods report; a string says why a report could not be read.
        children: other objects by kind: Deployment, Service, HorizontalPodAutoscaler.
    """

    resource: JsonObject
    spec: ModelDeploymentSpec | None
    spec_error: str | None = None
    claim: JsonObject | None = None
    storage_class: StorageClassFact | None = None
    cache: JsonObject | None = None
    owned_caches: tuple[JsonObject, ...] = ()
    deployment: JsonObject | None = None
    service: JsonObject | None = None
    autoscaler: JsonObject | None = None
    pods: tuple[JsonObject, ...] = ()
    reports: dict[str, RuntimeReport | str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return str(self.resource["metadata"]["name"])

    @property
    def namespace(self) -> str:
        return str(self.resource["metadata"]["namespace"])

    @property
    def uid(self) -> str:
        return str(self.resource["metadata"]["uid"])

    @property
    def generation(self) -> int:
        return int(self.resource["metadata"].get("generation", 0))


@dataclass(frozen=True)
class CacheObservation:
    """A CompileCache, its claim, its Jobs and their pods.

    Attributes:
        job_events: messages of Warning events of a Job that has no pod (quota, admission).
    """

    resource: JsonObject
    claim: JsonObject | None = None
    storage_class: StorageClassFact | None = None
    jobs: tuple[JsonObject, ...] = ()
    pods: tuple[JsonObject, ...] = ()
    job_events: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return str(self.resource["metadata"]["name"])

    @property
    def namespace(self) -> str:
        return str(self.resource["metadata"]["namespace"])

    @property
    def uid(self) -> str:
        return str(self.resource["metadata"]["uid"])

    @property
    def generation(self) -> int:
        return int(self.resource["metadata"].get("generation", 0))


def conditions_of(obj: JsonObject | None) -> dict[str, JsonObject]:
    """The conditions of an object by type; empty when there are none."""
    found = ((obj or {}).get("status") or {}).get("conditions") or []
    return {condition["type"]: condition for condition in found}


def is_being_deleted(obj: JsonObject) -> bool:
    """Whether deletion has begun."""
    return "deletionTimestamp" in obj["metadata"]


def is_foreign(obj: JsonObject, uid: str) -> bool:
    """Whether an object under a name we want is not ours to change.

    Either somebody else made it, or another owner controls it: an earlier resource of the same name whose
    children are still being collected.
    """
    if not is_managed(obj):
        return True
    owners = obj["metadata"].get("ownerReferences") or []
    return any(ref.get("controller") and ref["uid"] != uid for ref in owners)


def owned_by(obj: JsonObject, uid: str) -> bool:
    """Whether ``uid`` is among the owners of ``obj``."""
    return any(ref["uid"] == uid for ref in obj["metadata"].get("ownerReferences") or [])
