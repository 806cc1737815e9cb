"""Where the weights of a model come from: a volume that holds them, or a place to download them from.

``pvc`` and ``oci`` are mounted.  ``huggingFace`` and ``s3`` are downloaded: by the command line into the
user's cache folder, in a cluster by an init container into a volume (``model.volume`` keeps it).  What
opens a source (secrets) and where a download is kept change nothing about the model, so they are in no
cache key.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, model_validator

from kerf_runtime.config.base import ConfigModel, digest

__all__ = [
    "DnsName",
    "DownloadSettings",
    "HuggingFaceSource",
    "ModelSource",
    "ModelVolume",
    "OciSource",
    "PvcSource",
    "S3Source",
    "SecretKeyRef",
    "SecretRef",
]

DnsName = Annotated[str, Field(pattern=r"^[a-z0-9]([-.a-z0-9]*[a-z0-9])?$", max_length=253)]
_PART = "[A-Za-z0-9_][A-Za-z0-9._-]*"
RelativePath = Annotated[str, Field(pattern=rf"^{_PART}(/{_PART})*$", max_length=512)]
_HOST = "^https?://[A-Za-z0-9.-]+(:[0-9]{1,5})?"
_KEY_PART = "[A-Za-z0-9_][A-Za-z0-9._=+@-]*"

_KINDS = ("pvc", "oci", "huggingFace", "s3")
_EXACTLY_ONE = f"set exactly one of {', '.join(_KINDS)}"


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


class SecretKeyRef(ConfigModel):
    """One key of a Secret of the same namespace."""

    name: DnsName = Field(description="Name of the Secret.")
    key: str = Field(
        "token",
        pattern=r"^[-._a-zA-Z0-9]+$",
        max_length=253,
        description="Key inside the Secret. Default token.",
    )


class SecretRef(ConfigModel):
    """A Secret of the same namespace."""

    name: DnsName = Field(description="Name of the Secret.")


class HuggingFaceSource(ConfigModel):
    """A model repository of the Hugging Face hub or a mirror of it, downloaded and verified."""

    repo: str = Field(
        pattern=rf"^{_PART}(/{_PART})?$",
        max_length=192,
        description="Repository, for example HuggingFaceTB/SmolLM2-135M-Instruct.",
    )
    revision: RelativePath = Field(
        "main",
        description="Branch, tag or commit. Only a commit never moves. Default main.",
    )
    path: RelativePath | None = Field(
        None,
        description="Folder or GGUF file inside the repository. Default: the root of the repository.",
    )
    endpoint: (
        Annotated[str, Field(pattern=rf"{_HOST}(/[A-Za-z0-9._~-]+)*/?$", max_length=253)] | None
    ) = Field(
        None,
        description="Address of the hub or of a mirror. Default: HF_ENDPOINT, else https://huggingface.co.",
    )
    token_secret_ref: SecretKeyRef | None = Field(
        None,
        description=(
            "Access token for private and gated repositories, in a cluster; elsewhere HF_TOKEN. "
            "Default: none."
        ),
    )

    @property
    def address(self) -> str:
        """How progress and errors name it."""
        return f"hub {self.repo}@{self.revision}"


class S3Source(ConfigModel):
    """A folder of a bucket in S3 or a storage that speaks its protocol, downloaded and verified."""

    bucket: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*[A-Za-z0-9]$",
        min_length=3,
        max_length=63,
        description="Name of the bucket.",
    )
    prefix: (
        Annotated[
            str,
            Field(pattern=rf"^{_KEY_PART}(/{_KEY_PART})*/?$", max_length=512),
        ]
        | None
    ) = Field(
        None,
        description="Folder, or key of a GGUF file, inside the bucket. Default: the root of the bucket.",
    )
    endpoint: Annotated[str, Field(pattern=rf"{_HOST}/?$", max_length=253)] | None = Field(
        None,
        description="Address of the storage, https:// or http://. Default: AWS_ENDPOINT_URL, else AWS.",
    )
    region: Annotated[str, Field(pattern=r"^[A-Za-z0-9-]+$", max_length=63)] | None = Field(
        None, description="Region of the bucket. Default: AWS_REGION, else that of the bucket."
    )
    credentials_secret_ref: SecretRef | None = Field(
        None,
        description=(
            "Secret with AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and optionally AWS_SESSION_TOKEN, in a "
            "cluster; elsewhere these variables. Default: none, for a public bucket."
        ),
    )

    @property
    def address(self) -> str:
        """How progress and errors name it."""
        return f"s3://{self.bucket}/{self.folder}".rstrip("/")

    @property
    def folder(self) -> str:
        """``prefix`` without a slash at its end; empty for the root of the bucket."""
        return (self.prefix or "").rstrip("/")

    @property
    def file(self) -> str | None:
        """Name of the GGUF file that ``prefix`` is the key of, if it is one."""
        return self.folder.rpartition("/")[2] if self.folder.endswith(".gguf") else None


class ModelSource(ConfigModel):
    """Where the weights come from: exactly one of the fields."""

    cel_rules: ClassVar[tuple[tuple[str, ...], ...]] = (
        (f"[{', '.join(f'has(self.{kind})' for kind in _KINDS)}].exists_one(x, x)", _EXACTLY_ONE),
    )

    pvc: PvcSource | None = Field(None, description="A folder on a PersistentVolumeClaim.")
    oci: OciSource | None = Field(None, description="A folder of an OCI image.")
    hugging_face: HuggingFaceSource | None = Field(
        None, description="A repository of the Hugging Face hub."
    )
    s3: S3Source | None = Field(None, description="A folder of an S3 bucket.")

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if [self.pvc, self.oci, self.hugging_face, self.s3].count(None) != len(_KINDS) - 1:
            raise ValueError(_EXACTLY_ONE)
        return self

    @property
    def download(self) -> HuggingFaceSource | S3Source | None:
        """The place to download from; None if a volume has the weights."""
        return self.hugging_face or self.s3

    @property
    def is_downloaded(self) -> bool:
        """Whether the weights must be downloaded; otherwise a volume has them."""
        return self.download is not None

    @property
    def path(self) -> str | None:
        """Folder or file below the root of the volume, or of the downloaded files."""
        if self.s3 is not None:
            return self.s3.file
        source = self.pvc or self.oci or self.hugging_face
        assert source is not None  # the validator holds
        return source.path

    @property
    def download_folder(self) -> str:
        """Name of the folder that keeps the downloads of this source: readable, and one per source."""
        if self.hugging_face is not None:
            name = f"{self.hugging_face.repo}-{self.hugging_face.revision}"
        else:
            assert self.s3 is not None
            name = f"{self.s3.bucket}-{self.s3.folder}"
        readable = re.sub(r"[^A-Za-z0-9._]+", "-", name).strip("-")[-80:]
        return f"{readable}-{digest(self.identity())[:8]}"

    def identity(self) -> dict[str, Any]:
        """The document of what names the model: everything but the secrets that open it."""
        secrets = {
            "hugging_face": {"token_secret_ref"},
            "s3": {"credentials_secret_ref"},
        }
        return self.model_dump(mode="json", by_alias=True, exclude_none=True, exclude=secrets)


class ModelVolume(ConfigModel):
    """The volume that keeps downloaded weights."""

    existing_claim: DnsName = Field(
        description=(
            "Name of a claim in the same namespace. What is downloaded there is shared by the compile Job, "
            "all pods, and every model that names this claim."
        )
    )


class DownloadSettings(ConfigModel):
    """How a cluster downloads a model: what opens the source, and where the files are kept."""

    token_secret_ref: SecretKeyRef | None = Field(
        None, description="Access token of the hub. Default: none."
    )
    credentials_secret_ref: SecretRef | None = Field(
        None, description="Secret with AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY. Default: none."
    )
    existing_claim: DnsName | None = Field(
        None, description="Claim that keeps the weights. Default: a temporary volume."
    )

    @classmethod
    def of(cls, source: ModelSource, volume: ModelVolume | None) -> Self:
        """What a model's source and volume say about it."""
        return cls(
            token_secret_ref=source.hugging_face and source.hugging_face.token_secret_ref,
            credentials_secret_ref=source.s3 and source.s3.credentials_secret_ref,
            existing_claim=volume and volume.existing_claim,
        )
