"""From the reports of pods to ``status.graphs``, the cache counts and the proof of a hit.  Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kerf_operator.checks import shorten
from kerf_operator.runtime_report import RuntimeReport
from kerf_operator.status.conditions import Verdict

__all__ = ["PodReport", "cache_hit", "count_hits", "fold_graphs", "fold_timings"]

_LOAD_PHASES = ("weights", "cache_verify", "cache_load")


@dataclass(frozen=True)
class PodReport:
    """The report of one Ready pod of the current revision; a string says why there is none."""

    pod: str
    report: RuntimeReport | str


def readable(reports: Sequence[PodReport]) -> list[RuntimeReport]:
    """The reports that could be read."""
    return [item.report for item in reports if isinstance(item.report, RuntimeReport)]


def miss(report: RuntimeReport, key: str) -> tuple[str, str] | None:
    """Reason and message why the pod did not start from the cache; None when it did.

    A hit is what the pod proves, not what it was told: it names the key, and it traced and compiled
    nothing.
    """
    cache = report.cache
    if cache.result != "hit":
        return cache.reason or "Miss", cache.message or "the pod did not use the cache"
    if cache.key != key:
        return "OtherKey", f"the pod loaded key {cache.key}, not {key}"
    if report.compilations:
        return (
            "CompiledAnyway",
            f"the pod loaded the cache and still compiled {report.compilations} times",
        )
    return None


def count_hits(reports: Sequence[PodReport], key: str) -> tuple[int, int]:
    """Pods that started from the cache, and pods that could not."""
    verdicts = [miss(report, key) for report in readable(reports)]
    return verdicts.count(None), len(verdicts) - verdicts.count(None)


def cache_hit(reports: Sequence[PodReport], key: str | None) -> Verdict:
    """Condition CacheHit: what the serving pods proved."""
    if key is None:
        return Verdict(None, "NotNeeded", "only level 3 is cached, so there is no cache to hit")
    if not reports:
        return Verdict(None, "NoReadyPods", "no pod of this revision is ready yet")
    for item in reports:
        if isinstance(item.report, RuntimeReport):
            missed = miss(item.report, key)
            if missed is not None:
                reason, message = missed
                return Verdict(False, reason, f"pod {item.pod}: {shorten(message)}")
    for item in reports:
        if isinstance(item.report, str):
            return Verdict(None, "ReportUnreadable", f"pod {item.pod}: {shorten(item.report)}")
    return Verdict(
        True,
        "Hit",
        f"{len(reports)} of {len(reports)} ready pods loaded key {key} and compiled nothing",
    )


def fold_graphs(
    reports: Sequence[PodReport], *, requested_mode: str, previous: dict[str, Any] | None
) -> dict[str, Any]:
    """``status.graphs``; the last known one while pods are ready but cannot be read."""
    found = readable(reports)
    if not found:
        kept = previous if reports and previous else {}
        return {**kept, "requestedMode": requested_mode}
    modes = sorted({report.effective.mode for report in found if report.effective.mode})
    changes = {change: None for report in found for change in report.effective.changes}
    result: dict[str, Any] = {
        "requestedMode": requested_mode,
        "reasons": [
            {
                "field": change.field,
                "requested": change.requested,
                "effective": change.effective,
                "reason": change.reason,
                "message": change.message,
            }
            for change in list(changes)[:32]
        ],
        "captureSizes": list(found[0].effective.capture_sizes),
        "dispatch": {
            mode: sum(report.dispatch.get(mode, 0) for report in found)
            for mode in ("FULL", "PIECEWISE", "NONE")
        },
    }
    if modes:
        result["effectiveMode"] = "/".join(modes)
    counts = [report.graphs.captured for report in found if report.graphs.captured is not None]
    if counts:
        result["capturedCount"] = min(counts)
    sizes = [
        report.graphs.memory_bytes for report in found if report.graphs.memory_bytes is not None
    ]
    if sizes:
        result["memoryBytes"] = max(sizes)
    seconds = [
        report.graphs.capture_seconds
        for report in found
        if report.graphs.capture_seconds is not None
    ]
    if seconds:
        result["captureSeconds"] = round(max(seconds), 3)
    return result


def _start_seconds(startup: dict[str, float]) -> float:
    """Seconds from process start to ready: the runtime's own total, else the sum of the phases."""
    return startup["ready"] if "ready" in startup else sum(startup.values())


def fold_timings(reports: Sequence[PodReport], compile_seconds: float | None) -> dict[str, float]:
    """``status.timings`` of the slowest pod, in seconds."""
    found = [report for report in readable(reports) if report.startup]
    timings: dict[str, float] = {}
    if compile_seconds is not None:
        timings["compile"] = round(compile_seconds, 3)
    if found:
        timings["load"] = round(
            max(sum(report.startup.get(phase, 0.0) for phase in _LOAD_PHASES) for report in found),
            3,
        )
        timings["capture"] = round(max(report.startup.get("capture", 0.0) for report in found), 3)
        timings["ready"] = round(max(_start_seconds(report.startup) for report in found), 3)
    return timings
