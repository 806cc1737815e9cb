"""The ``spec`` of a CompileCache: one set of compiled artifacts on one claim.

What a ReplicaSet is to a Deployment: ModelDeployments that need the same key on the same claim share
one CompileCache, which owns the compile Job.  A person may apply one by hand to fill a cache before
an upgrade (``kerf render`` prints it).
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field

from kerf_runtime.config import ConfigModel
from kerf_runtime.config.deployment import ImagePullPolicy, ResourceRequirements
from kerf_runtime.config.source import DnsName, DownloadSettings

__all__ = ["CompileCacheSpec", "JobSettings"]


class JobSettings(ConfigModel):
    """How the compile Job runs; not part of the key."""

    backoff_limit: int = Field(
        2, ge=0, le=20, description="Failed pods before the Job fails. Default 2."
    )
    active_deadline_seconds: int = Field(
        3600, ge=60, le=86400, description="Seconds before the Job is given up. Default 3600."
    )
    resources: ResourceRequirements | None = Field(
        None, description="Resources of the compile container. Default: none."
    )
    image_pull_policy: ImagePullPolicy = Field(
        ImagePullPolicy.IF_NOT_PRESENT,
        description="When the image is pulled: Always, IfNotPresent or Never. Default IfNotPresent.",
    )
    image_pull_secrets: list[DnsName] = Field(
        [],
        max_length=16,
        description="Names of Secrets for pulling the image. Default: none.",
    )
    download: DownloadSettings | None = Field(
        None,
        description="How weights of huggingFace and s3 are downloaded. Default: without any Secret.",
    )


class CompileCacheSpec(ConfigModel):
    """Compiled artifacts for one cache key on one claim; immutable but for job and tokens."""

    cel_rules: ClassVar[tuple[tuple[str, ...], ...]] = (
        (
            "self.key == oldSelf.key && self.claimName == oldSelf.claimName && self.image == oldSelf.image",
            "key, claimName and image are immutable: another key or claim is another CompileCache",
        ),
    )

    key: str = Field(
        pattern=r"^[0-9a-f]{16}$",
        max_length=16,
        description="The cache key: 16 hex digits of the digest of factors, the folder name on the claim.",
    )
    claim_name: DnsName = Field(description="Claim that holds torch_compile_cache/<key>/.")
    image: str = Field(
        min_length=1,
        max_length=512,
        description="Runtime image that compiles; a factor of the key.",
    )
    factors: dict[str, Any] = Field(
        description="The declared factors that the key is the digest of: what makes artifacts valid."
    )
    document: dict[str, Any] = Field(
        description="The part of a ModelDeployment's spec that the compile Job needs."
    )
    job: JobSettings = Field(JobSettings(), description="How the compile Job runs.")
    tokens: dict[str, Annotated[str, Field(max_length=63)]] = Field(
        {},
        max_length=64,
        description=(
            "Retry tokens by name of the user; a change runs a failed Job again and does nothing to a "
            "published cache. Default: none."
        ),
    )
