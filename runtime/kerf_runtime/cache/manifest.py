"""The manifest of a cache folder: what is in it, what it was made from, how it was checked."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kerf_runtime.config.key import KEY_FORMAT, canonical_json, digest

__all__ = ["FileEntry", "Manifest", "file_sha256", "first_difference"]


class FileEntry(BaseModel):
    """One file of the artifact, by its path below the key's folder."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str
    size: int = Field(ge=0)
    sha256: str


class Manifest(BaseModel):
    """Contents of ``manifest.json``.

    ``declared`` are the factors that the key is the digest of; ``observed`` are facts about torch, the
    machine, the traced sources and the model, compared at load.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    format: int = KEY_FORMAT
    key: str
    digest: str
    created: str
    declared: dict[str, Any]
    observed: dict[str, Any]
    files: list[FileEntry]
    counters: dict[str, int] = {}
    timings: dict[str, float] = {}
    gate: dict[str, Any] = {}

    @property
    def total_bytes(self) -> int:
        """Bytes of all files."""
        return sum(entry.size for entry in self.files)

    def to_text(self) -> str:
        """The manifest as it is written."""
        return canonical_json(self.model_dump(mode="json")) + "\n"

    @classmethod
    def from_text(cls, text: str) -> Manifest:
        """Parse a manifest.

        Raises:
            ValueError: not a manifest, or its digest does not match its declared factors.
        """
        try:
            manifest = cls.model_validate_json(text)
        except ValidationError as error:
            raise ValueError(str(error)) from None
        if manifest.digest != digest(manifest.declared) or not manifest.digest.startswith(
            manifest.key
        ):
            raise ValueError("the key is not the digest of the declared factors")
        return manifest


def file_sha256(path: Path) -> str:
    """sha256 of a file as 64 hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def first_difference(
    stored: dict[str, Any], actual: dict[str, Any], prefix: str = ""
) -> tuple[str, Any, Any] | None:
    """Name, stored and actual value of the first factor that differs; None when all agree."""
    for name in sorted(stored.keys() | actual.keys()):
        left, right = stored.get(name), actual.get(name)
        if isinstance(left, dict) and isinstance(right, dict):
            nested = first_difference(left, right, f"{prefix}{name}.")
            if nested is not None:
                return nested
        elif left != right:
            return f"{prefix}{name}", left, right
    return None
