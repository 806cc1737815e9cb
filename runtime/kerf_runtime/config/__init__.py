"""The configuration model: one source of truth for the CRD, the command line and the cache key."""

from kerf_runtime.config.base import ConfigModel, config_error, parse_quantity
from kerf_runtime.config.compilation import (
    ATTENTION_OPS,
    CaptureMode,
    CompilationConfig,
    CompilationLevel,
    CompilerBackendName,
    CUDAGraphMode,
)
from kerf_runtime.config.custom_ops import CUSTOM_OP_NAMES, resolve_custom_ops
from kerf_runtime.config.declared import default_capture_sizes
from kerf_runtime.config.deployment import (
    API_VERSION,
    KIND,
    CachePolicy,
    CacheVerification,
    DeletionPolicy,
    ModelDeploymentSpec,
)
from kerf_runtime.config.document import ModelDeploymentDocument, load_document, parse_document
from kerf_runtime.config.engine import DType, EngineConfig, Quantization
from kerf_runtime.config.key import (
    cache_key,
    compile_document,
    declared_factors,
    digest,
    needs_compile_cache,
)
from kerf_runtime.config.passes import PASS_VERSIONS, PassConfig, pass_uuids
from kerf_runtime.config.resolve import (
    AttentionGraphSupport,
    EffectiveConfig,
    PlatformFacts,
    resolve,
)

__all__ = [
    "API_VERSION",
    "ATTENTION_OPS",
    "CUSTOM_OP_NAMES",
    "KIND",
    "PASS_VERSIONS",
    "AttentionGraphSupport",
    "CUDAGraphMode",
    "CachePolicy",
    "CacheVerification",
    "CaptureMode",
    "CompilationConfig",
    "CompilationLevel",
    "CompilerBackendName",
    "ConfigModel",
    "DType",
    "DeletionPolicy",
    "EffectiveConfig",
    "EngineConfig",
    "ModelDeploymentDocument",
    "ModelDeploymentSpec",
    "PassConfig",
    "PlatformFacts",
    "Quantization",
    "cache_key",
    "compile_document",
    "config_error",
    "declared_factors",
    "default_capture_sizes",
    "digest",
    "load_document",
    "needs_compile_cache",
    "parse_document",
    "parse_quantity",
    "pass_uuids",
    "resolve",
    "resolve_custom_ops",
]
