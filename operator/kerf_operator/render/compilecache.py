"""The CompileCache that a ModelDeployment needs.  Pure.

Each owner applies it under a field manager of its own: the identity of the cache (key, claim, image,
document) is the same for all of them, the owner reference and the retry token are each owner's own, and
the Job's settings are those of the first owner.
"""

from __future__ import annotations

from typing import Any

from kerf_operator.api.cache import JobSettings
from kerf_operator.api.names import CACHE_KIND, labels, owner_reference
from kerf_operator.render.target import Target
from kerf_runtime.config import API_VERSION, ModelDeploymentSpec, compile_document
from kerf_runtime.config.source import DownloadSettings

__all__ = ["job_settings", "render_compile_cache", "render_release"]


def job_settings(spec: ModelDeploymentSpec) -> dict[str, Any]:
    """The Job settings that ``spec`` asks for; resources default to those of the serving pods."""
    download = DownloadSettings.of(spec.model.source, spec.model.volume)
    settings = JobSettings(
        backoff_limit=spec.compile.job.backoff_limit,
        active_deadline_seconds=spec.compile.job.active_deadline_seconds,
        resources=spec.compile.job.resources or spec.resources,
        image_pull_policy=spec.image_pull_policy,
        image_pull_secrets=spec.image_pull_secrets,
        download=None if download == DownloadSettings() else download,
    )
    return settings.to_document()


def render_compile_cache(
    owner: dict[str, Any], spec: ModelDeploymentSpec, target: Target, *, settings: bool
) -> dict[str, Any]:
    """The CompileCache for ``target``.

    Args:
        owner: the ModelDeployment.
        spec: its spec.
        target: its target; must need a cache.
        settings: whether this owner decides how the Job runs.

    Raises:
        ValueError: the target needs no cache.
    """
    if target.cache_name is None or target.key is None or target.claim is None:
        raise ValueError(f"{owner['metadata']['name']} needs no compile cache")
    name = owner["metadata"]["name"]
    body: dict[str, Any] = {
        "key": target.key,
        "claimName": target.claim,
        "image": target.image,
        "factors": target.factors,
        "document": compile_document(spec),
    }
    if settings:
        body["job"] = job_settings(spec)
    if spec.compile.token is not None:
        body["tokens"] = {name: spec.compile.token}
    return {
        "apiVersion": API_VERSION,
        "kind": CACHE_KIND,
        "metadata": {
            "name": target.cache_name,
            "namespace": owner["metadata"]["namespace"],
            "labels": labels("cache"),
            "ownerReferences": [owner_reference(owner, controller=False)],
        },
        "spec": body,
    }


def render_release(cache: dict[str, Any]) -> dict[str, Any]:
    """An empty apply: the owner gives up what only it owned, its reference and its token."""
    return {
        "apiVersion": API_VERSION,
        "kind": CACHE_KIND,
        "metadata": {
            "name": cache["metadata"]["name"],
            "namespace": cache["metadata"]["namespace"],
            "uid": cache["metadata"]["uid"],
        },
    }
