"""The ``spec`` of a ModelDeployment: one document for the cluster, the laptop and the cache key.

The CRD schema is generated from ``ModelDeploymentSpec``, ``kerf run -f`` reads the same YAML, and
``kerf_runtime.config.key`` computes the cache key from it.  Rules that cross fields are written
twice, here for the laptop and as CEL (``cel_rules``) for the API server; a test keeps them equal.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, ClassVar, Self

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from kerf_runtime.config.base import ConfigModel, Quantity
from kerf_runtime.config.compilation import SIZE_RULES, CompilationConfig, check_sizes
from kerf_runtime.config.engine import EngineConfig
from kerf_runtime.config.source import DnsName, ModelSource, ModelVolume

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
    "LoadFormat",
    "ModelDeploymentSpec",
    "ModelSpec",
    "ProbesSpec",
    "ResourceRequirements",
    "ServiceSpec",
]

API_VERSION = "kerf.dev/v1alpha1"
KIND = "ModelDeployment"
NAME_PATTERN = r"[a-z]([-a-z0-9]*[a-z0-9])?"
"""Names of ModelDeployments: the Service and the Deployment are called the same."""
NAME_MAX_LENGTH = 52


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


class LoadFormat(StrEnum):
    """Where the values of weights come from."""

    AUTO = "auto"
    DUMMY = "dummy"


class ModelSpec(ConfigModel):
    """The model to serve."""

    cel_rules: ClassVar[tuple[tuple[str, ...], ...]] = (
        (
            "!has(self.volume) || has(self.source.huggingFace) || has(self.source.s3)",
            "volume keeps downloaded weights: it needs source huggingFace or s3",
        ),
    )

    source: ModelSource = Field(description="Where the weights come from.")
    volume: ModelVolume | None = Field(
        None,
        description=(
            "Where weights of huggingFace and s3 are kept. Default: every pod downloads them into a "
            "temporary volume of its own."
        ),
    )
    load_format: LoadFormat = Field(
        LoadFormat.AUTO,
        description=(
            "auto: weights as the source has them. dummy: random weights, for benchmarks; of the source only the "
            "configuration and the tokenizer are read. Default auto."
        ),
    )
    served_name: str | None = Field(
        None,
        min_length=1,
        max_length=128,
        description="Model name in the HTTP API. Default: the name of the ModelDeployment.",
    )

    @model_validator(mode="after")
    def _only_downloads_are_kept(self) -> Self:
        if self.volume is not None and not self.source.is_downloaded:
            raise ValueError("volume keeps downloaded weights: it needs source huggingFace or s3")
        return self


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
        description="Checksum: every file's sha256 is compared before anything is loaded. None: only the key's factors, and that exactly the files the manifest lists are there in their sizes. Default Checksum.",
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
        *SIZE_RULES,
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
        check_sizes(
            self.compilation,
            limit=self.engine.max_num_batched_tokens,
            enforce_eager=self.engine.enforce_eager,
        )
        return self
