"""What a ModelDeployment asks for, worked out: image, cache key, claim, pod template, revision.  Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kerf_operator.api.names import cache_object_name, claim_name
from kerf_operator.render.deployment import render_pod_template
from kerf_runtime.config import (
    ModelDeploymentSpec,
    cache_key,
    declared_factors,
    digest,
    needs_compile_cache,
)

__all__ = ["Target", "resolve_target"]


@dataclass(frozen=True)
class Target:
    """Where a ModelDeployment wants to be.

    Attributes:
        image: runtime image of the Job and the pods.
        key, factors, claim, cache_name: the compile cache; None where nothing is cached.
        creates_claim: whether the claim is ours to create.
        revision: digest of the pod template, ten hex digits.
        template: the pod template, without the revision label.
    """

    image: str
    key: str | None
    factors: dict[str, Any] | None
    claim: str | None
    creates_claim: bool
    cache_name: str | None
    revision: str
    template: dict[str, Any]

    @property
    def cache_path(self) -> str | None:
        """Folder of the key on the claim."""
        return None if self.key is None else f"torch_compile_cache/{self.key}"


def resolve_target(name: str, spec: ModelDeploymentSpec, *, runtime_image: str) -> Target:
    """The target of the ModelDeployment ``name``.

    Args:
        name: name of the ModelDeployment.
        spec: its spec.
        runtime_image: the operator's default image.
    """
    image = spec.runtime_image or runtime_image
    key = factors = claim = cache_name = None
    creates_claim = False
    if needs_compile_cache(spec):
        factors = declared_factors(spec, image=image)
        key = cache_key(factors)
        existing = spec.cache.volume.existing_claim
        creates_claim = existing is None
        claim = existing or claim_name(name)
        cache_name = cache_object_name(key, claim)
    template = render_pod_template(
        name, spec, image=image, key=key, claim=claim, cache_name=cache_name
    )
    return Target(
        image=image,
        key=key,
        factors=factors,
        claim=claim,
        creates_claim=creates_claim,
        cache_name=cache_name,
        revision=digest(template)[:10],
        template=template,
    )
