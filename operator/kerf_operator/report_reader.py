"""Reads ``GET /debug/graphs`` of serving pods, directly and with short timeouts.

Not through the API server's proxy: that would need a wider permission and loads the API server.  An answer
is kept for a while, so that a burst of events does not become a burst of requests.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Lock

import httpx

from kerf_operator.checks import is_ready_pod
from kerf_operator.observation import JsonObject
from kerf_operator.render.deployment import PORT
from kerf_operator.runtime_report import RuntimeReport, parse_report

__all__ = ["ReportReader"]

MAX_BYTES = 4 << 20


class ReportReader:
    """Reports by pod.  Safe to use from several threads.

    Args:
        max_age: seconds a report may be reused.
        retry_age: seconds before a pod that could not be read is asked again.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        *,
        max_age: float,
        retry_age: float = 3.0,
        timeout: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_age, self._retry_age, self._clock = max_age, retry_age, clock
        self._http = httpx.Client(timeout=httpx.Timeout(timeout, connect=1.0), trust_env=False)
        self._pool = ThreadPoolExecutor(max_workers=8, thread_name_prefix="report")
        self._kept: dict[tuple[str, int], tuple[float, RuntimeReport | str]] = {}
        self._lock = Lock()

    def read(self, pods: Sequence[JsonObject]) -> dict[str, RuntimeReport | str]:
        """The reports of the Ready pods among ``pods``, by pod name; a string says what went wrong."""
        ready = [pod for pod in pods if is_ready_pod(pod)]
        found = self._pool.map(self._one, ready)
        return {
            str(pod["metadata"]["name"]): report for pod, report in zip(ready, found, strict=True)
        }

    def close(self) -> None:
        """Free connections and threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._http.close()

    def _one(self, pod: JsonObject) -> RuntimeReport | str:
        # A restarted container is another process with other counters.
        status = pod.get("status") or {}
        restarts = sum(c.get("restartCount", 0) for c in status.get("containerStatuses") or [])
        key = (str(pod["metadata"]["uid"]), restarts)
        now = self._clock()
        with self._lock:
            kept = self._kept.get(key)
        if kept is not None:
            age_limit = self._retry_age if isinstance(kept[1], str) else self._max_age
            if now - kept[0] < age_limit:
                return kept[1]
        report = self._fetch(status.get("podIP"))
        with self._lock:
            self._kept[key] = (now, report)
            old = [k for k, (then, _) in self._kept.items() if now - then > 10 * self._max_age]
            for k in old:
                del self._kept[k]
        return report

    def _fetch(self, address: str | None) -> RuntimeReport | str:
        if not address:
            return "the pod has no address"
        host = f"[{address}]" if ":" in address else address
        url = f"http://{host}:{PORT}/debug/graphs"
        try:
            response = self._http.get(url)
            if response.status_code != 200:
                return f"{url} answered {response.status_code}"
            if len(response.content) > MAX_BYTES:
                return f"{url} answered more than {MAX_BYTES} bytes"
            return parse_report(response.json())
        except httpx.HTTPError as error:
            return f"{url}: {error or type(error).__name__}"
        except ValueError as error:
            return f"{url}: {error}"
