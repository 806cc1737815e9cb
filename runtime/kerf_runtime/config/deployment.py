"""The ``spec`` of a ModelDeployment: one document for the cluster, the laptop and the cache key.

The CRD schema is generated from ``ModelDeploymentSpec``, ``kerf run -f`` reads the same YAML, and
``kerf_runtime.config.key`` computes the cache key from it.  Rules that cross fields are written
twice, here for the laptop and as CEL (``cel_rules``) for the API server; a test keeps them equal.
"""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

import yaml
from pydantic import BeforeValidator, Field, ValidationError, WithJsonSchema, model_validator

from kerf_runtime.config.base import ConfigModel, Quantity, config_error
from kerf_runtime.config.compilation import CompilationConfig, CUDAGraphMode
from kerf_runtime.config.engine import EngineConfig
from kerf_runtime.errors import ConfigError

__all__ = [
    "API_VERSION",
    "KIND",
    "NAME_MAX_LENGTH",
    "NAME_PATTERN",
    "AutoscalingSpec",
    "CachePolicy",
    "CacheSpec",
    "CacheVerification",
    "ClaimTemplate",
    "CompileJobSpec",
    "CompileSpec",
    "DeletionPolicy",
    "ImagePullPolicy",
    "ModelDeploymentDocument",
    "ModelDeploymentSpec",
    "ModelSource",
    "ModelSpec",
    "OciSource",
    "ProbesSpec",
    "PvcSource",
    "ResourceRequirements",
    "ServiceSpec",
    "load_document",
    "parse_document",
]

API_VERSION = "kerf.dev/v1alpha1"
KIND = "ModelDeployment"
NAME_PATTERN = r"[a-z]([-a-z0-9]*[a-z0-9])?"
"""Names of ModelDeployments: the Service and the Deployment are called the same."""
NAME_MAX_LENGTH = 52

DnsLabel = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=63)]
DnsName = Annotated[str, Field(pattern=r"^[a-z0-9]([-.a-z0-9]*[a-z0-9])?$", max_length=253)]
RelativePath = Annotated[
    str,
    Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*(/[A-Za-z0-9_][A-Za-z0-9._-]*)*$", max_length=512),
]


def _number_to_text(value: object) -> object:
    """``cpu: 2`` in YAML is a number; Kubernetes quantities are kept as text."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    return value


ResourceQuantity = Annotated[
    str,
    BeforeValidator(_number_to_text),
    WithJsonSchema({"x-kubernetes-int-or-string": True, "maxLength": 32}),
]
"""An amount of cpu, memory or devices, as in a pod: ``500m``, ``2``, ``4Gi``."""


class PvcSource(ConfigModel):
    """A folder on a PersistentVolumeClaim of the same namespace, mounted read-only."""

    claim_name: DnsName = Field(description="Name of the claim that holds the model.")
    path: RelativePath | None = Field(
        None, description="Folder or GGUF file inside the claim. Default: the root of the claim."
    )


class OciSource(ConfigModel):
    """A folder of an OCI image, mounted read-only as an image volume (needs Kubernetes' ImageVolume)."""

    reference: str = Field(
        min_length=1, max_length=512, description="Image reference, best with a digest."
    )
    path: RelativePath | None = Field(
        None, description="Folder or GGUF file inside the image. Default: the root of the image."
    )


class ModelSource(ConfigModel):
    """Where the weights come from: exactly one of the fields."""

    cel_rules: ClassVar[tuple[tuple[str, ...], ...]] = (
        ("has(self.pvc) != has(self.oci)", "set exactly one of pvc, oci"),
    )

    pvc: PvcSource | None = Field(None, description="A folder on a PersistentVolumeClaim.")
    oci: OciSource | None = Field(None, description="A folder of an OCI image.")

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if (self.pvc is None) == (self.oci is None):
            raise ValueError("set exactly one of pvc, oci")
        return self

    @property
    def path(self) -> str | None:
        """Folder or file below the root of the volume."""
        source = self.pvc or self.oci
        assert source is not None  # the validator holds
        return source.path


class ModelSpec(ConfigModel):
    """The model to serve."""

    source: ModelSource = Field(description="Where the weights come from.")
    served_name: str | None = Field(
        None,
        min_length=1,
        max_length=128,
        description="Model name in the HTTP API. Default: the name of the ModelDeployment.",
    )


class ResourceRequirements(ConfigModel):
    """Kubernetes resource requests and limits of a container."""

    requests: dict[str, ResourceQuantity] | None = Field(
        None,
        max_length=16,
        description="Minimum that is reserved, for example cpu: 2, memory: 4Gi.",
    )
    limits: dict[str, ResourceQuantity] | None = Field(
        None, max_length=16, description="Maximum that may be used, for example memory: 8Gi."
    )


class CachePolicy(StrEnum):
    """What to do about compiled artifacts."""

    AUTO = "Auto"
    REQUIRE = "Require"


class CompileJobSpec(ConfigModel):
    """The Job that fills the compile cache."""

    backoff_limit: int = Field(
        2, ge=0, le=20, description="Failed pods before the Job fails. Default 2."
    )
    active_deadline_seconds: int = Field(
        3600, ge=60, le=86400, description="Seconds before the Job is given up. Default 3600."
    )
    resources: ResourceRequirements | None = Field(
        None, description="Resources of the compile container. Default: those of the serving pods."
    )


class CompileSpec(ConfigModel):
    """When and how compiled artifacts are made."""

    policy: CachePolicy = Field(
        CachePolicy.AUTO,
        description=(
            "Auto: the compile Job fills the cache; a pod that cannot use it compiles for itself and says so. "
            "Require: a pod that cannot use the cache does not start. Default Auto."
        ),
    )
    token: str | None = Field(
        None,
        max_length=63,
        description="Any text; changing it runs a failed compile Job again.",
    )
    job: CompileJobSpec = Field(CompileJobSpec(), description="The compile Job.")


class AccessMode(StrEnum):
    """Access modes a cache claim can have; the compile Job must be able to write."""

    READ_WRITE_ONCE = "ReadWriteOnce"
    READ_WRITE_MANY = "ReadWriteMany"
    READ_WRITE_ONCE_POD = "ReadWriteOncePod"


class ClaimTemplate(ConfigModel):
    """A claim that Kerf creates for the cache."""

    storage: Quantity = Field("10Gi", description="Size of the volume. Default 10Gi.")
    storage_class_name: DnsName | None = Field(
        None, description="StorageClass. Default: the cluster's default class."
    )
    access_modes: list[AccessMode] = Field(
        [AccessMode.READ_WRITE_ONCE],
        min_length=1,
        max_length=4,
        description="Access modes. ReadWriteMany lets pods on every node share one cache. Default ReadWriteOnce.",
    )


class CacheVolume(ConfigModel):
    """The volume of the cache: an existing claim or a template for a new one."""

    cel_rules: ClassVar[tuple[tuple[str, ...], ...]] = (
        (
            "!(has(self.existingClaim) && has(self.claimTemplate))",
            "set at most one of existingClaim, claimTemplate",
        ),
    )

    existing_claim: DnsName | None = Field(
        None,
        description="Name of a claim in the same namespace, to share one cache between deployments.",
    )
    claim_template: ClaimTemplate | None = Field(
        None, description="Claim to create for this deployment."
    )

    @model_validator(mode="after")
    def _at_most_one(self) -> Self:
        if self.existing_claim is not None and self.claim_template is not None:
            raise ValueError("set at most one of existingClaim, claimTemplate")
        return self


class CacheVerification(StrEnum):
    """What is checked before a cached artifact is loaded."""

    CHECKSUM = "Checksum"
    NONE = "None"


class CacheSpec(ConfigModel):
    """The compile cache."""

    volume: CacheVolume = Field(
        CacheVolume(), description="Where the cache lives. Default: a new 10Gi claim."
    )
    verification: CacheVerification = Field(
        CacheVerification.CHECKSUM,
        description="Checksum: every file's sha256 is compared before anything is loaded. None: no check. Default Checksum.",
    )


class AutoscalingSpec(ConfigModel):
    """A HorizontalPodAutoscaler on the serving pods (needs a custom-metrics adapter)."""

    cel_rules: ClassVar[tuple[tuple[str, ...], ...]] = (
        ("self.minReplicas <= self.maxReplicas", "minReplicas must not be above maxReplicas"),
    )

    min_replicas: int = Field(1, ge=1, le=1000, description="Fewest pods. Default 1.")
    max_replicas: int = Field(ge=1, le=1000, description="Most pods.")
    target_running_requests: int = Field(
        8,
        ge=1,
        le=10000,
        description="Running requests per pod to aim for (kerf_requests_running). Default 8.",
    )

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_replicas > self.max_replicas:
            raise ValueError("minReplicas must not be above maxReplicas")
        return self


class ServiceType(StrEnum):
    CLUSTER_IP = "ClusterIP"
    NODE_PORT = "NodePort"
    LOAD_BALANCER = "LoadBalancer"


class ServiceSpec(ConfigModel):
    """The Service in front of the pods."""

    port: int = Field(80, ge=1, le=65535, description="Port of the Service. Default 80.")
    type: ServiceType = Field(
        ServiceType.CLUSTER_IP, description="Type of the Service. Default ClusterIP."
    )


class ProbesSpec(ConfigModel):
    """How long pods may take to start."""

    startup_timeout_seconds: int = Field(
        900, ge=30, le=86400, description="Seconds a pod may take until it is live. Default 900."
    )


class ImagePullPolicy(StrEnum):
    ALWAYS = "Always"
    IF_NOT_PRESENT = "IfNotPresent"
    NEVER = "Never"


class DeletionPolicy(StrEnum):
    DELETE = "Delete"
    RETAIN = "Retain"


class ModelDeploymentSpec(ConfigModel):
    """A compiled model, deployed: what to serve, how to compile it, where to cache it, how many pods."""

    cel_rules: ClassVar[tuple[tuple[str, ...], ...]] = (
        (
            "!(has(self.replicas) && has(self.autoscaling))",
            "set at most one of replicas, autoscaling",
        ),
        (
            "!has(self.compilation.captureSizes) || "
            "((self.compilation.cudagraphMode == 'NONE' || self.engine.enforceEager) && "
            "!(has(self.compilation.compileSizes) && "
            "self.compilation.compileSizes.exists(s, type(s) == string))) || "
            "self.compilation.captureSizes.all(s, s <= self.engine.maxNumBatchedTokens)",
            "compilation.captureSizes holds a size above engine.maxNumBatchedTokens: no step is that large",
            "'compilation.captureSizes holds %d, above engine.maxNumBatchedTokens %d: no step is that large'"
            ".format([self.compilation.captureSizes.max(), self.engine.maxNumBatchedTokens])",
        ),
        (
            "!has(self.compilation.compileSizes) || "
            "self.compilation.compileSizes.all(s, type(s) == string || s <= self.engine.maxNumBatchedTokens)",
            "compilation.compileSizes holds a size above engine.maxNumBatchedTokens: no step is that large",
            "'compilation.compileSizes holds %d, above engine.maxNumBatchedTokens %d: no step is that large'"
            ".format([self.compilation.compileSizes.filter(s, type(s) == int && "
            "s > self.engine.maxNumBatchedTokens)[0], self.engine.maxNumBatchedTokens])",
        ),
    )

    model: ModelSpec = Field(description="The model to serve.")
    engine: EngineConfig = Field(
        EngineConfig(), description="Limits of the engine inside each pod."
    )
    compilation: CompilationConfig = Field(
        CompilationConfig(), description="How the model is compiled, split and captured."
    )
    compile: CompileSpec = Field(
        CompileSpec(), description="When and how compiled artifacts are made."
    )
    cache: CacheSpec = Field(CacheSpec(), description="The compile cache.")
    replicas: int | None = Field(
        None,
        ge=0,
        le=1000,
        description="Number of serving pods. Default 1, unless autoscaling is set.",
    )
    autoscaling: AutoscalingSpec | None = Field(
        None, description="Scale the number of pods with load."
    )
    resources: ResourceRequirements | None = Field(
        None, description="Resources of the serving container."
    )
    service: ServiceSpec = Field(ServiceSpec(), description="The Service in front of the pods.")
    probes: ProbesSpec = Field(ProbesSpec(), description="How long pods may take to start.")
    drain_seconds: int = Field(
        30,
        ge=0,
        le=3600,
        description="Seconds that running requests get to finish when a pod stops. Default 30.",
    )
    runtime_image: str | None = Field(
        None,
        min_length=1,
        max_length=512,
        description="Image of the compile Job and the pods. Default: the operator's runtime image.",
    )
    image_pull_policy: ImagePullPolicy = Field(
        ImagePullPolicy.IF_NOT_PRESENT,
        description="When the image is pulled. Default IfNotPresent.",
    )
    image_pull_secrets: list[DnsName] = Field(
        [], max_length=16, description="Names of Secrets for pulling the image. Default: none."
    )
    suspend: bool = Field(
        False, description="Remove the pods and start no Job; claim and cache stay. Default false."
    )
    deletion_policy: DeletionPolicy = Field(
        DeletionPolicy.DELETE,
        description="What happens to a claim that Kerf created when this resource is deleted: Delete or Retain. Default Delete.",
    )

    @model_validator(mode="after")
    def _replicas_xor_autoscaling(self) -> Self:
        if self.replicas is not None and self.autoscaling is not None:
            raise ValueError("set at most one of replicas, autoscaling")
        return self

    @model_validator(mode="after")
    def _sizes_fit_a_step(self) -> Self:
        compilation, limit = self.compilation, self.engine.max_num_batched_tokens
        graphs = compilation.cudagraph_mode is not CUDAGraphMode.NONE
        captured = graphs and not self.engine.enforce_eager
        if captured or compilation.compiles_capture_sizes:
            _check_sizes("captureSizes", (compilation.capture_sizes or [])[-1:], limit)
        static = [size for size in compilation.compile_sizes or [] if isinstance(size, int)]
        _check_sizes("compileSizes", static, limit)
        return self


def _check_sizes(field: str, sizes: list[int], limit: int) -> None:
    above = next((size for size in sizes if size > limit), None)
    if above is not None:
        raise ValueError(
            f"compilation.{field} holds {above}, above engine.maxNumBatchedTokens {limit}: "
            "no step is that large"
        )


class ModelDeploymentDocument(ConfigModel):
    """A ModelDeployment as read from a file: its name and its spec."""

    name: str
    spec: ModelDeploymentSpec

    @property
    def served_name(self) -> str:
        """Model name in the HTTP API."""
        return self.spec.model.served_name or self.name


def parse_document(data: Any, *, where: str) -> ModelDeploymentDocument:
    """Validate one parsed YAML document.

    Raises:
        ConfigError: not a ModelDeployment, or a field is wrong; names the field.
    """
    if not isinstance(data, dict):
        raise ConfigError(
            f"expected a mapping, found {type(data).__name__}",
            where=where,
            hint=f"A file starts with apiVersion: {API_VERSION} and kind: {KIND}",
        )
    found = (data.get("apiVersion"), data.get("kind"))
    if found != (API_VERSION, KIND):
        raise ConfigError(
            f"expected apiVersion {API_VERSION} and kind {KIND}, found {found[0]} and {found[1]}",
            where=where,
        )
    metadata = data.get("metadata")
    name = metadata.get("name") if isinstance(metadata, dict) else None
    if not isinstance(name, str) or not name:
        raise ConfigError("metadata.name is missing", where=where)
    if len(name) > NAME_MAX_LENGTH or not re.fullmatch(NAME_PATTERN, name):
        raise ConfigError(
            f"metadata.name {name!r} cannot name a Service",
            where=where,
            hint=f"Use at most {NAME_MAX_LENGTH} lower-case letters, digits and dashes, a letter first",
        )
    try:
        spec = ModelDeploymentSpec.model_validate(data.get("spec"))
    except ValidationError as error:
        raise config_error(error, where=f"{where}: spec") from None
    return ModelDeploymentDocument(name=name, spec=spec)


class _UniqueKeys(yaml.SafeLoader):
    """Refuses a key that is given twice: YAML would silently keep the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        twice = next((key for key in keys if keys.count(key) > 1), None)
        if twice is not None:
            raise yaml.constructor.ConstructorError(
                None, None, f"the key {twice!r} is given twice", node.start_mark
            )
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


def load_document(path: Path) -> ModelDeploymentDocument:
    """The one ModelDeployment of a YAML file; other kinds in the same file are skipped.

    Raises:
        ConfigError: unreadable, invalid, or not exactly one ModelDeployment.
    """
    where = str(path)
    try:
        documents = [
            d for d in yaml.load_all(path.read_text(), Loader=_UniqueKeys) if d is not None
        ]
    except OSError as error:
        raise ConfigError(f"cannot read the file: {error.strerror}", where=where) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        # ValueError: bytes that are no text, or values such as the date 2026-13-01.
        raise ConfigError(f"not valid YAML: {error}", where=where) from None
    ours = [d for d in documents if not isinstance(d, dict) or d.get("kind") == KIND]
    if len(ours) != 1:
        kinds = [d.get("kind") for d in documents if isinstance(d, dict)]
        raise ConfigError(
            f"expected exactly one {KIND}, found {len(ours)} (kinds in the file: {kinds})",
            where=where,
        )
    return parse_document(ours[0], where=where)
