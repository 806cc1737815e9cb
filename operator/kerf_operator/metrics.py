"""Metrics of the operator: its own work, and one set of series per ModelDeployment.

The per-resource series come from a snapshot of what the last reconcile saw; a resource that is gone takes
its series along.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from threading import Lock
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

__all__ = ["Metrics"]

_KEY = ("namespace", "name")
_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class Metrics:
    """The series of one operator process, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.reconciles = Counter(
            "kerf_operator_reconcile",
            "Reconciles by kind and result (ok, error).",
            ("kind", "result"),
            registry=self.registry,
        )
        self.errors = Counter(
            "kerf_operator_reconcile_errors",
            "Reconciles that failed, by reason.",
            ("reason",),
            registry=self.registry,
        )
        self.duration = Histogram(
            "kerf_operator_reconcile_duration_seconds",
            "Duration of a reconcile.",
            ("kind",),
            buckets=_BUCKETS,
            registry=self.registry,
        )
        self.queue_depth = Gauge(
            "kerf_operator_queue_depth",
            "Resources that wait to be looked at.",
            registry=self.registry,
        )
        self.active_workers = Gauge(
            "kerf_operator_active_workers", "Reconciles that run now.", registry=self.registry
        )
        self.last_event = Gauge(
            "kerf_operator_last_watch_event_timestamp_seconds",
            "When the last watch event arrived, in seconds since the epoch.",
            registry=self.registry,
        )
        self.requests = Counter(
            "kerf_operator_api_requests",
            "Requests to the API server by verb and HTTP status (0: no answer).",
            ("verb", "code"),
            registry=self.registry,
        )
        self._resources = _Resources()
        self.registry.register(self._resources)

    def saw_event(self) -> None:
        """A watch event arrived."""
        self.last_event.set(time.time())

    def request(self, verb: str, code: int) -> None:
        """One request to the API server ended."""
        self.requests.labels(verb, str(code)).inc()

    def deployment(self, namespace: str, name: str, status: dict[str, Any]) -> None:
        """Remember what the status of a ModelDeployment says."""
        self._resources.put((namespace, name), status)

    def compile_finished(self, namespace: str, name: str, *, result: str) -> None:
        """A compile Job of a ModelDeployment ended: ``succeeded`` or ``failed``."""
        self._resources.count((namespace, name), result)

    def forget(self, namespace: str, name: str) -> None:
        """Drop the series of a deleted ModelDeployment."""
        self._resources.drop((namespace, name))


class _Resources(Collector):
    """Series of the ModelDeployments that exist."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._statuses: dict[tuple[str, str], dict[str, Any]] = {}
        self._jobs: dict[tuple[str, str], dict[str, int]] = {}

    def put(self, key: tuple[str, str], status: dict[str, Any]) -> None:
        with self._lock:
            self._statuses[key] = status

    def count(self, key: tuple[str, str], result: str) -> None:
        with self._lock:
            counts = self._jobs.setdefault(key, {})
            counts[result] = counts.get(result, 0) + 1

    def drop(self, key: tuple[str, str]) -> None:
        with self._lock:
            self._statuses.pop(key, None)
            self._jobs.pop(key, None)

    def collect(self) -> Iterable[Metric]:
        with self._lock:
            statuses, jobs = dict(self._statuses), {k: dict(v) for k, v in self._jobs.items()}
        return list(_families(statuses, jobs))


def _families(
    statuses: dict[tuple[str, str], dict[str, Any]], jobs: dict[tuple[str, str], dict[str, int]]
) -> Iterator[Metric]:
    info = GaugeMetricFamily(
        "kerf_modeldeployment_info",
        "1 for every ModelDeployment.",
        labels=(*_KEY, "model", "key", "requested_mode", "effective_mode", "revision"),
    )
    condition = GaugeMetricFamily(
        "kerf_modeldeployment_condition",
        "1 for the status that a condition has.",
        labels=(*_KEY, "type", "status"),
    )
    replicas = GaugeMetricFamily(
        "kerf_modeldeployment_replicas", "Pods by state (total, ready).", labels=(*_KEY, "state")
    )
    size = GaugeMetricFamily(
        "kerf_modeldeployment_cache_bytes", "Size of the published artifacts.", labels=_KEY
    )
    seconds = GaugeMetricFamily(
        "kerf_modeldeployment_compile_duration_seconds", "Duration of the compile Job.", labels=_KEY
    )
    finished = CounterMetricFamily(
        "kerf_modeldeployment_compile_jobs",
        "Compile Jobs that ended, by result (succeeded, failed).",
        labels=(*_KEY, "result"),
    )
    for key, status in sorted(statuses.items()):
        cache, graphs = status.get("cache") or {}, status.get("graphs") or {}
        info.add_metric(
            (
                *key,
                status.get("servedName", ""),
                cache.get("key", ""),
                graphs.get("requestedMode", ""),
                graphs.get("effectiveMode", ""),
                (status.get("revisions") or {}).get("active", ""),
            ),
            1,
        )
        for item in status.get("conditions") or []:
            for value in ("True", "False", "Unknown"):
                condition.add_metric((*key, item["type"], value), float(item["status"] == value))
        replicas.add_metric((*key, "total"), status.get("replicas", 0))
        replicas.add_metric((*key, "ready"), status.get("readyReplicas", 0))
        if "sizeBytes" in cache:
            size.add_metric(key, cache["sizeBytes"])
        if "lastCompileSeconds" in cache:
            seconds.add_metric(key, cache["lastCompileSeconds"])
        for result, count in sorted(jobs.get(key, {}).items()):
            finished.add_metric((*key, result), count)
    yield from (info, condition, replicas, size, seconds, finished)
