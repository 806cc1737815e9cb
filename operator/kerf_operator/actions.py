"""The writes that a plan can ask for.  Pure data; ``execute`` carries them out in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kerf_operator.api.names import MANAGER

__all__ = ["Action", "Apply", "Create", "Delete"]


@dataclass(frozen=True)
class Apply:
    """Server-side apply of ``manifest`` (the fields we own) by ``manager``."""

    manifest: dict[str, Any]
    manager: str = MANAGER

    @property
    def target(self) -> str:
        return _target(self.manifest)


@dataclass(frozen=True)
class Create:
    """Create once; an object of that name is left as it is (Jobs cannot be changed)."""

    manifest: dict[str, Any]

    @property
    def target(self) -> str:
        return _target(self.manifest)


@dataclass(frozen=True)
class Delete:
    """Delete exactly the object with ``uid``; dependents go in the background."""

    kind: str
    namespace: str
    name: str
    uid: str

    @property
    def target(self) -> str:
        return f"{self.kind}/{self.name}"


Action = Apply | Create | Delete


def _target(manifest: dict[str, Any]) -> str:
    return f"{manifest['kind']}/{manifest['metadata']['name']}"
