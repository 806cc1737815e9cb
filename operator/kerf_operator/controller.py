"""Turns events into looks: which keys an event concerns, and the workers that look at them.

Runs inside kopf's event loop; the looks themselves (blocking I/O) run in threads.
"""

from __future__ import annotations

import asyncio
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from kerf_operator.api.names import CACHE_KIND, CACHE_LABEL, DEPLOYMENT_LABEL
from kerf_operator.errors import ApiError, OperatorError
from kerf_operator.metrics import Metrics
from kerf_operator.reconcile import Key, Outcome, Reconciler
from kerf_operator.workqueue import WorkQueue
from kerf_runtime.config import KIND
from kerf_runtime.errors import KerfError

__all__ = ["Controller"]

logger = logging.getLogger(__name__)

STUCK_SECONDS = 300.0
"""A look that takes longer means that the process is not healthy."""


class Controller:
    """The queue, the workers and who is interested in what.

    Args:
        reconciler: does one look.
        workers: looks at the same time.
    """

    def __init__(self, reconciler: Reconciler, metrics: Metrics, *, workers: int) -> None:
        self._reconciler = reconciler
        self._metrics = metrics
        self._count = workers
        self._queue: WorkQueue[Key] = WorkQueue()
        self._pool = ThreadPoolExecutor(max_workers=workers, thread_name_prefix="reconcile")
        self._tasks: list[asyncio.Task[None]] = []
        self._interests: dict[Key, frozenset[Key]] = {}
        self._started: dict[Key, float] = {}
        metrics.queue_depth.set_function(lambda: float(len(self._queue)))
        metrics.active_workers.set_function(lambda: float(self._queue.active))

    def start(self) -> None:
        """Start the workers in the running event loop."""
        self._tasks = [asyncio.create_task(self._work()) for _ in range(self._count)]

    async def stop(self) -> None:
        """End the workers; a look that runs is waited for."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._queue.close()
        await asyncio.to_thread(self._pool.shutdown)

    def wake(self, kind: str, metadata: dict[str, Any]) -> None:
        """Something happened to an object: look at everything it concerns."""
        self._metrics.saw_event()
        for key in self.concerned(kind, metadata):
            self._queue.add(key)

    def concerned(self, kind: str, metadata: dict[str, Any]) -> set[Key]:
        """The keys to look at after an event of an object: itself, its owners by label, and whoever
        said that it is interested in it."""
        namespace, name = str(metadata["namespace"]), str(metadata["name"])
        labels = metadata.get("labels") or {}
        keys = set()
        if kind in (KIND, CACHE_KIND):
            keys.add(Key(kind, namespace, name))
        elif DEPLOYMENT_LABEL in labels:
            keys.add(Key(KIND, namespace, labels[DEPLOYMENT_LABEL]))
        if CACHE_LABEL in labels:
            keys.add(Key(CACHE_KIND, namespace, labels[CACHE_LABEL]))
        event = Key(kind, namespace, name)
        keys |= {key for key, interests in self._interests.items() if event in interests}
        return keys

    def health(self) -> dict[str, Any]:
        """Facts for the liveness endpoint.

        Raises:
            OperatorError: a worker has ended, or a look takes too long.
        """
        dead = [task for task in self._tasks if task.done()]
        if dead:
            raise OperatorError(f"{len(dead)} of {len(self._tasks)} workers have ended")
        now = time.monotonic()
        stuck = [key for key, since in self._started.items() if now - since > STUCK_SECONDS]
        if stuck:
            raise OperatorError(f"looking at {stuck[0]} takes longer than {STUCK_SECONDS} s")
        return {"queued": len(self._queue), "active": self._queue.active}

    async def _work(self) -> None:
        while True:
            key = await self._queue.get()
            self._started[key] = time.monotonic()
            try:
                await self._look(key)
            finally:
                del self._started[key]
                self._queue.done(key)

    async def _look(self, key: Key) -> None:
        loop = asyncio.get_running_loop()
        started = time.monotonic()
        result = "ok"
        try:
            outcome = await loop.run_in_executor(self._pool, self._reconciler.reconcile, key)
        except ApiError as error:
            result = "error"
            self._metrics.errors.labels(error.reason or str(error.code)).inc()
            delay = self._queue.failed(key)
            logger.warning("%s: %s; again in %.1f s", _text(key), error, delay)
        except KerfError as error:
            result = "error"
            self._metrics.errors.labels(type(error).__name__).inc()
            logger.error("%s: %s; again in %.1f s", _text(key), error, self._queue.failed(key))
        except Exception as error:  # a bug must not end the worker, and must not go unseen
            result = "error"
            self._metrics.errors.labels(type(error).__name__).inc()
            logger.exception("%s: again in %.1f s", _text(key), self._queue.failed(key))
        else:
            self._settle(key, outcome)
        self._metrics.reconciles.labels(key.kind, result).inc()
        self._metrics.duration.labels(key.kind).observe(time.monotonic() - started)

    def _settle(self, key: Key, outcome: Outcome) -> None:
        if outcome.gone:
            self._interests.pop(key, None)
            self._queue.forget(key)
            return
        self._interests[key] = outcome.interests
        if outcome.failed:
            self._metrics.errors.labels("ApplyFailed").inc()
            self._queue.failed(key)
            return
        self._queue.succeeded(key)
        self._queue.add_after(key, outcome.after)


def _text(key: Key) -> str:
    return f"{key.kind} {key.namespace}/{key.name}"
