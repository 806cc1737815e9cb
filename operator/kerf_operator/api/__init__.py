"""The API of the operator: group, kinds, labels, status models and the CRDs made from them.  Pure."""

from kerf_operator.api.cache import CompileCacheSpec, JobSettings
from kerf_operator.api.crds import crd_documents, crd_yaml, write_crds
from kerf_operator.api.status import (
    CacheState,
    CompileCacheStatus,
    Condition,
    ModelDeploymentStatus,
)

__all__ = [
    "CacheState",
    "CompileCacheSpec",
    "CompileCacheStatus",
    "Condition",
    "JobSettings",
    "ModelDeploymentStatus",
    "crd_documents",
    "crd_yaml",
    "write_crds",
]
