"""One look at one resource: observe, plan, execute, tell events, write the status if it changed.

Synchronous and stateless but for three caches that only save work: the reports of pods, when the dispatch
counters of a status were last refreshed, and the events told already.  Losing them changes nothing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from kerf_operator.api.names import CACHE_KIND, MANAGER
from kerf_operator.client import Client
from kerf_operator.errors import ApiError
from kerf_operator.execute import execute
from kerf_operator.metrics import Metrics
from kerf_operator.observation import JsonObject, conditions_of, is_being_deleted
from kerf_operator.observe import observe_cache, observe_deployment
from kerf_operator.plan import plan_cache, plan_deployment
from kerf_operator.report_reader import ReportReader
from kerf_operator.status import (
    EventNote,
    cache_events,
    deployment_events,
    differs,
    fold_cache,
    fold_deployment,
    only_volatile,
)
from kerf_runtime.config import API_VERSION, KIND

__all__ = ["Key", "Outcome", "Reconciler"]

logger = logging.getLogger(__name__)

REPORT_RETRY = 4.0
"""Seconds before pods whose report could not be read are asked again."""
WAIT_RETRY = 10.0
"""Seconds before something that sends no event (a foreign claim, a StorageClass) is looked at again."""


@dataclass(frozen=True, order=True)
class Key:
    """Which object: kind, namespace, name."""

    kind: str
    namespace: str
    name: str


@dataclass(frozen=True)
class Outcome:
    """What a reconcile asks of its caller.

    Attributes:
        after: seconds until the next look without an event.
        interests: objects without our labels whose events concern this one.
        gone: the object does not exist any more.
        failed: a write was refused; look again with back-off.
    """

    after: float
    interests: frozenset[Key] = field(default=frozenset())
    gone: bool = False
    failed: bool = False


class Reconciler:
    """Reconciles both kinds; safe for several threads on different keys.

    Args:
        clock: monotonic seconds.
        now: RFC 3339 time for conditions and events.
    """

    def __init__(
        self,
        client: Client,
        reports: ReportReader,
        metrics: Metrics,
        *,
        runtime_image: str,
        resync_seconds: float,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], str] | None = None,
    ) -> None:
        self._client = client
        self._reports = reports
        self._metrics = metrics
        self._runtime_image = runtime_image
        self._resync = resync_seconds
        self._clock = clock
        self._now = now or _timestamp
        self._refreshed: dict[str, float] = {}

    def reconcile(self, key: Key) -> Outcome:
        """Look at one object.

        Raises:
            ApiError: the API server is in trouble; look again with back-off.
        """
        if key.kind == KIND:
            return self._deployment(key)
        return self._cache(key)

    def _deployment(self, key: Key) -> Outcome:
        seen = observe_deployment(
            self._client, self._reports, key.namespace, key.name, runtime_image=self._runtime_image
        )
        if seen is None:
            self._metrics.forget(key.namespace, key.name)
            return Outcome(self._resync, gone=True)
        obs, target = seen
        if is_being_deleted(obs.resource):
            return Outcome(self._resync)
        failures = execute(self._client, plan_deployment(obs, target))
        status = fold_deployment(obs, target, failures, now=self._now())
        self._write(obs.resource, status, deployment_events(obs.resource, status))
        self._metrics.deployment(key.namespace, key.name, status)
        interests: set[Key] = set()
        if target is not None and target.cache_name is not None:
            interests.add(Key(CACHE_KIND, key.namespace, target.cache_name))
        return Outcome(
            self._next_look(status), interests=frozenset(interests), failed=bool(failures)
        )

    def _cache(self, key: Key) -> Outcome:
        obs = observe_cache(self._client, key.namespace, key.name)
        if obs is None:
            return Outcome(self._resync, gone=True)
        if is_being_deleted(obs.resource):
            return Outcome(self._resync)
        plan = plan_cache(obs)
        failures = execute(self._client, plan.actions)
        status = fold_cache(obs, plan, failures, now=self._now())
        events = cache_events(obs.resource, status)
        self._write(obs.resource, status, events)
        claim = Key("PersistentVolumeClaim", key.namespace, obs.resource["spec"]["claimName"])
        waits = status["state"] in ("Pending", "Compiling")
        return Outcome(
            min(WAIT_RETRY, self._resync) if waits else self._resync,
            interests=frozenset({claim}),
            failed=bool(failures),
        )

    def _next_look(self, status: dict[str, Any]) -> float:
        conditions = conditions_of({"status": status})
        if (conditions.get("CacheHit") or {}).get("reason") == "ReportUnreadable":
            return min(REPORT_RETRY, self._resync)
        if (conditions.get("StorageReady") or {}).get("status") != "True":
            return min(WAIT_RETRY, self._resync)
        return self._resync

    def _write(
        self, resource: JsonObject, status: dict[str, Any], events: Sequence[EventNote]
    ) -> None:
        """Tell events, then write the status; in this order a kill in between only repeats an event."""
        old = resource.get("status")
        if not differs(old, status):
            return
        uid = str(resource["metadata"]["uid"])
        if only_volatile(old, status):
            since = self._clock() - self._refreshed.get(uid, float("-inf"))
            if since < self._resync:
                return
        for event in events:
            self._tell(resource, event)
        manifest = {
            "apiVersion": API_VERSION,
            "kind": resource["kind"],
            "metadata": {
                "name": resource["metadata"]["name"],
                "namespace": resource["metadata"]["namespace"],
                "uid": uid,
            },
            "status": status,
        }
        try:
            self._client.apply(manifest, manager=MANAGER, subresource="status")
        except ApiError as error:
            if not (error.not_found or error.conflict):
                raise
            # Deleted, or deleted and made anew, since it was read: its own event wakes us.
            logger.debug("status of a deleted object: %s", error)
        self._refreshed[uid] = self._clock()

    def _tell(self, resource: JsonObject, event: EventNote) -> None:
        metadata = resource["metadata"]
        now = self._now()
        manifest = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {
                "name": event.event_name(resource),
                "namespace": metadata["namespace"],
            },
            "involvedObject": {
                "apiVersion": API_VERSION,
                "kind": resource["kind"],
                "name": metadata["name"],
                "namespace": metadata["namespace"],
                "uid": metadata["uid"],
            },
            "type": "Warning" if event.warning else "Normal",
            "reason": event.reason,
            "message": event.message[:1024],
            "count": 1,
            "firstTimestamp": now,
            "lastTimestamp": now,
            "source": {"component": MANAGER},
            "reportingComponent": MANAGER,
        }
        try:
            self._client.create(manifest)
        except ApiError as error:
            if error.already_exists:
                return
            if error.transient:
                raise
            logger.warning("event %s was refused: %s", event.reason, error)
            return
        if resource["kind"] == KIND and event.reason in ("CompileSucceeded", "CompileFailed"):
            result = event.reason.removeprefix("Compile").lower()
            self._metrics.compile_finished(metadata["namespace"], metadata["name"], result=result)


def _timestamp() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
