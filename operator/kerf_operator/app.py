"""Puts the operator process together and runs it: client, reconciler, controller, kopf, metrics."""

from __future__ import annotations

import logging
import time

import kopf
from prometheus_client import start_http_server

from kerf_operator.api.names import GROUP, VERSION
from kerf_operator.client import KINDS, Client, connect
from kerf_operator.controller import Controller
from kerf_operator.errors import ApiError, ClusterError, SettingsError
from kerf_operator.handlers import build_registry, operator_settings
from kerf_operator.metrics import Metrics
from kerf_operator.reconcile import Reconciler
from kerf_operator.report_reader import ReportReader
from kerf_operator.settings import Settings

__all__ = ["run_operator"]

logger = logging.getLogger(__name__)

CRD_WAIT_SECONDS = 60.0


def run_operator(settings: Settings) -> None:
    """Run until the process is told to stop.

    Raises:
        ClusterError: no connection, or the CRDs are not installed.
        SettingsError: a port is taken.
    """
    connection = connect(settings.kubeconfig, settings.context)
    metrics = Metrics()
    client = Client(connection, observer=metrics.request, pool_size=settings.workers)
    _wait_for_crds(client, connection.server)
    reports = ReportReader(max_age=settings.resync_seconds / 2)
    reconciler = Reconciler(
        client,
        reports,
        metrics,
        runtime_image=settings.runtime_image,
        resync_seconds=settings.resync_seconds,
    )
    controller = Controller(reconciler, metrics, workers=settings.workers)
    if settings.metrics_port:
        try:
            start_http_server(settings.metrics_port, addr=settings.host, registry=metrics.registry)
        except OSError as error:
            raise SettingsError(
                f"cannot listen: {error.strerror}", where=f"--metrics-port {settings.metrics_port}"
            ) from None
    liveness = f"http://{settings.host}:{settings.liveness_port}/healthz"
    logger.info(
        "serving %s of %s, runtime image %s",
        ", ".join(settings.namespaces) or "all namespaces",
        connection.server,
        settings.runtime_image,
    )
    kopf.run(
        registry=build_registry(controller, connection),
        settings=operator_settings(),
        clusterwide=not settings.namespaces,
        namespaces=settings.namespaces,
        standalone=True,
        liveness_endpoint=liveness if settings.liveness_port else None,
    )
    reports.close()


def _wait_for_crds(client: Client, server: str) -> None:
    """Both CRDs must be served; freshly created ones take a moment, an API server may be starting."""
    wanted = {kind.plural for kind in KINDS.values() if kind.group == GROUP}
    deadline = time.monotonic() + CRD_WAIT_SECONDS
    while True:
        problem = f"it does not serve {', '.join(sorted(wanted))} of {GROUP}/{VERSION}"
        try:
            if wanted <= client.served(GROUP, VERSION):
                return
        except ApiError as error:
            if not error.transient:
                raise
            problem = error.message
        if time.monotonic() > deadline:
            raise ClusterError(
                f"the cluster cannot be used after {CRD_WAIT_SECONDS:.0f} s: {problem}",
                where=server,
                hint="Install the CRDs: kubectl apply -f crds/, or the chart with crds.enabled",
            )
        logger.info("waiting for the cluster: %s", problem)
        time.sleep(1)
