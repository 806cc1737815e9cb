"""Settings of the operator process: flags of ``kerf-operator run``, each with an environment variable."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from kerf_operator.errors import SettingsError

__all__ = ["Settings"]

_NAMESPACE = re.compile(r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")


@dataclass(frozen=True)
class Settings:
    """What ``kerf-operator run`` was asked for.

    Attributes:
        runtime_image: image of compile Jobs and serving pods that name none.
        namespaces: namespaces to serve; empty for all of them.
        resync_seconds: how often a resource that nothing happens to is looked at, which also refreshes
            the dispatch counters in its status.
        workers: resources that are looked at at the same time.
        liveness_port: port of ``/healthz``; 0 turns it off.
        metrics_port: port of ``/metrics``; 0 turns it off.
    """

    runtime_image: str
    namespaces: tuple[str, ...] = ()
    kubeconfig: Path | None = None
    context: str | None = None
    resync_seconds: float = 60.0
    workers: int = 4
    liveness_port: int = 8080
    metrics_port: int = 9090
    host: str = "0.0.0.0"

    def __post_init__(self) -> None:
        if not self.runtime_image:
            raise SettingsError(
                "no runtime image",
                where="--runtime-image",
                hint="Name the image that compiles and serves, or set KERF_RUNTIME_IMAGE",
            )
        for namespace in self.namespaces:
            if not _NAMESPACE.match(namespace):
                raise SettingsError(
                    f"{namespace!r} is not a namespace",
                    where="--namespace",
                    hint="Give exact names",
                )
        if self.resync_seconds < 1:
            raise SettingsError(f"{self.resync_seconds} s is too often", where="--resync-seconds")
        if not 1 <= self.workers <= 64:
            raise SettingsError(f"{self.workers} is not between 1 and 64", where="--workers")
