"""What kopf calls: a table of contents without logic.

Only ``kopf.on.event`` handlers are used.  They keep no state on the objects: kopf puts neither finalizers
nor annotations on anything, so nothing can wedge a deletion and an idle cluster sees no write.  kopf lists
and watches (children by our label, on the server's side), reconnects, authenticates and answers the liveness
probe; every event only wakes the queue of ``Controller``.
"""

from __future__ import annotations

from typing import Any

import kopf

from kerf_operator.api.names import CACHE_KIND, MANAGED_BY, MANAGED_BY_LABEL
from kerf_operator.client import KINDS, Connection
from kerf_operator.controller import Controller
from kerf_runtime.config import KIND

__all__ = ["CHILDREN", "build_registry", "operator_settings"]

CHILDREN = (
    "Deployment",
    "Job",
    "Pod",
    "Service",
    "PersistentVolumeClaim",
    "HorizontalPodAutoscaler",
)
"""Kinds whose labelled objects wake their owner."""


def build_registry(controller: Controller, connection: Connection) -> kopf.OperatorRegistry:
    """Every handler of the operator."""
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry)
    def login(**_: Any) -> kopf.ConnectionInfo:
        return _credentials(connection)

    @kopf.on.startup(registry=registry)
    async def start(**_: Any) -> None:
        controller.start()

    @kopf.on.cleanup(registry=registry)
    async def stop(**_: Any) -> None:
        await controller.stop()

    @kopf.on.probe(registry=registry, id="queue")
    def queue(**_: Any) -> dict[str, Any]:
        return controller.health()

    for kind in (KIND, CACHE_KIND, *CHILDREN):
        _watch(registry, controller, kind)
    return registry


def _watch(registry: kopf.OperatorRegistry, controller: Controller, kind: str) -> None:
    entry = KINDS[kind]

    @kopf.on.event(entry.api_version, entry.plural, registry=registry, id=f"wake-{entry.plural}")
    async def wake(meta: Any, **_: Any) -> None:
        controller.wake(kind, dict(meta))


def operator_settings() -> kopf.OperatorSettings:
    """kopf without what we do not use: its events, its scanning, its peering."""
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.scanning.disabled = True
    settings.watching.server_timeout = 300
    settings.watching.connect_timeout = 10
    settings.networking.request_timeout = 30
    for kind in CHILDREN:
        entry = KINDS[kind]
        settings.watching.label_selectors[entry.api_version, entry.plural] = (
            f"{MANAGED_BY_LABEL}={MANAGED_BY}"
        )
    return settings


def _credentials(connection: Connection) -> kopf.ConnectionInfo:
    configuration = connection.configuration
    scheme, _, token = (connection.bearer() or "").partition(" ")
    return kopf.ConnectionInfo(
        server=connection.server,
        ca_path=configuration.ssl_ca_cert,
        insecure=not configuration.verify_ssl,
        username=configuration.username or None,
        password=configuration.password or None,
        scheme=scheme if token else None,
        token=token or scheme or None,
        certificate_path=configuration.cert_file,
        private_key_path=configuration.key_file,
    )
