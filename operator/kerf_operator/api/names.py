"""Names that the operator puts on objects: labels, annotations, field managers, object names.  Pure.

Object names are functions of what they stand for, so that an operator that was killed between two
calls finds what it made: nothing is ever created under a random name.
"""

from __future__ import annotations

import hashlib
from typing import Any

from kerf_runtime.config import API_VERSION, KIND, digest

__all__ = [
    "APPLIED",
    "CACHE_KIND",
    "CACHE_LABEL",
    "CACHE_NAME",
    "COMPILE",
    "DEPLOYMENT_LABEL",
    "GROUP",
    "JOB_SETTINGS",
    "MANAGED_BY",
    "MANAGED_BY_LABEL",
    "MANAGER",
    "REVISION_LABEL",
    "SCALE_MANAGER",
    "SERVING",
    "VERSION",
    "cache_object_name",
    "claim_name",
    "is_managed",
    "job_name",
    "labels",
    "owner_manager",
    "owner_reference",
    "short_hash",
]

GROUP, VERSION = API_VERSION.split("/")
CACHE_KIND = "CompileCache"

MANAGED_BY_LABEL = "app.kubernetes.io/managed-by"
MANAGED_BY = "kerf-operator"
DEPLOYMENT_LABEL = f"{GROUP}/deployment"
CACHE_LABEL = f"{GROUP}/cache"
REVISION_LABEL = f"{GROUP}/revision"

APPLIED = f"{GROUP}/applied"
"""Annotation: digest of the manifest we applied last; differs when a field left the manifest."""
CACHE_NAME = f"{GROUP}/compile-cache"
"""Annotation of the pod template: the CompileCache whose artifacts the pods load."""
JOB_SETTINGS = f"{GROUP}/job-settings"
"""Annotation of a Job: digest of the settings it was made with."""

MANAGER = "kerf-operator"
SCALE_MANAGER = "kerf-operator-scale"
"""Owns ``replicas`` of the Deployment, so that it can be left to an autoscaler without a reset."""

SERVING = "serving"
COMPILE = "compile"


def short_hash(text: str, length: int = 5) -> str:
    """The first hex digits of the sha256 of ``text``."""
    return hashlib.sha256(text.encode()).hexdigest()[:length]


def labels(
    component: str, *, deployment: str | None = None, cache: str | None = None
) -> dict[str, str]:
    """The labels of everything the operator makes."""
    found = {
        "app.kubernetes.io/name": "kerf",
        "app.kubernetes.io/component": component,
        MANAGED_BY_LABEL: MANAGED_BY,
    }
    if deployment is not None:
        found["app.kubernetes.io/instance"] = deployment
        found[DEPLOYMENT_LABEL] = deployment
    if cache is not None:
        found[CACHE_LABEL] = cache
    return found


def is_managed(obj: dict[str, Any]) -> bool:
    """Whether the operator made the object (a CompileCache can be made by hand)."""
    return (obj["metadata"].get("labels") or {}).get(MANAGED_BY_LABEL) == MANAGED_BY


def cache_object_name(key: str, claim: str) -> str:
    """Name of the CompileCache for ``key`` on ``claim``: the same key on two claims is two caches."""
    return f"{key}-{short_hash(claim)}"


def claim_name(deployment: str) -> str:
    """Name of the claim that Kerf creates for a deployment."""
    return f"{deployment}-cache"


def job_name(cache: str, claim_uid: str, settings: dict[str, Any], tokens: dict[str, str]) -> str:
    """Name of the compile Job: another claim, other settings or another token is another attempt."""
    return f"{cache}-{digest([claim_uid, settings, tokens])[:5]}"


def owner_manager(uid: str) -> str:
    """Field manager of one ModelDeployment on a CompileCache it may share with others.

    Each owner has its own, so that adding or removing one owner reference never touches another.
    """
    return f"{MANAGER}-{uid[:13]}"


def owner_reference(owner: dict[str, Any], *, controller: bool) -> dict[str, Any]:
    """Reference to ``owner`` (a full object), for garbage collection."""
    reference: dict[str, Any] = {
        "apiVersion": owner.get("apiVersion", API_VERSION),
        "kind": owner.get("kind", KIND),
        "name": owner["metadata"]["name"],
        "uid": owner["metadata"]["uid"],
        "blockOwnerDeletion": True,
    }
    if controller:
        reference["controller"] = True
    return reference
