"""Checks of the cache claim.  Pure."""

from __future__ import annotations

from kerf_operator.checks.finding import Finding, Severity
from kerf_operator.observation import JsonObject, StorageClassFact

__all__ = ["check_claim"]


def check_claim(
    claim: JsonObject | None, storage_class: StorageClassFact | None, *, name: str, ours: bool
) -> Finding | None:
    """Whether the cache claim can be used."""
    if claim is None:
        if ours:
            return Finding("ClaimPending", f"claim {name} is being created", "storage")
        return Finding(
            "ClaimNotFound",
            f"claim {name} does not exist in this namespace; create it, or remove "
            "cache.volume.existingClaim so that Kerf creates one",
            "storage",
            Severity.FAILING,
        )
    phase = (claim.get("status") or {}).get("phase")
    if phase == "Bound":
        return None
    if phase == "Lost":
        return Finding(
            "ClaimLost",
            f"the volume of claim {name} is gone; delete the claim to get a new one",
            "storage",
            Severity.FAILING,
        )
    return _check_unbound(name, storage_class)


def _check_unbound(name: str, storage_class: StorageClassFact | None) -> Finding:
    """Why a claim is not bound.  Never a failure: a volume may still be made for it by hand."""
    if storage_class is not None and storage_class.exists is False:
        if storage_class.name is None:
            return Finding(
                "NoDefaultStorageClass",
                f"claim {name} names no StorageClass and the cluster has no default one; set "
                "cache.volume.claimTemplate.storageClassName, or make a class the default",
                "storage",
            )
        return Finding(
            "StorageClassNotFound",
            f"StorageClass {storage_class.name} of claim {name} does not exist; create it, or name "
            "another one (kubectl get storageclass)",
            "storage",
        )
    if storage_class is not None and storage_class.waits_for_consumer:
        return Finding(
            "WaitForFirstConsumer",
            f"claim {name} is bound once the compile Job's pod is placed",
            "storage",
        )
    return Finding(
        "ClaimPending",
        f"claim {name} is not bound to a volume yet; see kubectl describe pvc {name}",
        "storage",
    )
