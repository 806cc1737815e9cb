"""What a started engine says of itself: in the log, in ``/debug/graphs``, in a dump."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from kerf_runtime.cache import CacheSession
from kerf_runtime.config import EffectiveConfig
from kerf_runtime.engine.started import StartedEngine
from kerf_runtime.reasons import ReasonedChange

__all__ = ["describe", "log_changes", "log_graphs", "resolution"]

logger = logging.getLogger(__name__)


def log_changes(changes: Iterable[ReasonedChange]) -> None:
    """What is in force beside what was asked for, a line each."""
    for change in changes:
        logger.info(
            "%s: %s -> %s (%s: %s)",
            change.field,
            change.requested,
            change.effective,
            change.reason,
            change.message,
        )


def log_graphs(report: Mapping[str, Any]) -> None:
    """The sums of each mode and of all; at level DEBUG every graph."""
    found: list[dict[str, Any]] = report["descriptors"]
    for mode in sorted({graph["mode"] for graph in found}):
        graphs = [graph for graph in found if graph["mode"] == mode]
        nodes, size, seconds = (
            sum(g[key] for g in graphs) for key in ("nodes", "bytes", "seconds")
        )
        logger.info(
            "captured %d %s graphs (%s): %d nodes, %d bytes, %.3f s",
            len(graphs),
            mode,
            report["backend"],
            nodes,
            size,
            seconds,
        )
    logger.info(
        "captured %d of %d graphs: %d bytes, of which %d are shared; estimated %s bytes",
        report["captured"],
        report["planned"],
        report["memory_bytes"],
        report["shared_bytes"],
        report["estimated_bytes"],
    )
    if report["pending"]:
        logger.info("%d graphs are captured between steps", len(report["pending"]))
    for graph in found:
        logger.debug(
            "graph %s %s of %d tokens: %d nodes, %d bytes, %.6f s",
            graph["mode"],
            "decode" if graph["uniform_decode"] else "mixed",
            graph["num_tokens"],
            graph["nodes"],
            graph["bytes"],
            graph["seconds"],
        )


def describe(started: StartedEngine, startup_seconds: Mapping[str, float]) -> dict[str, Any]:
    """The static part of ``/debug/graphs``."""
    prepared = started.prepared
    return {
        **resolution(started.effective, started.cache),
        "graphs": started.graphs.report(),
        "compile": {k: v for k, v in prepared.timings.items() if k != "cache_load"},
        "compiled": prepared.report(),
        "startup": dict(startup_seconds),
    }


def resolution(effective: EffectiveConfig, cache: CacheSession) -> dict[str, Any]:
    """What is in force beside what was asked for, and what the cache said."""
    return {
        "cache": {
            "key": cache.key,
            "result": cache.verdict.result,
            "reason": str(cache.verdict.reason),
            "message": cache.verdict.message,
            "bytes": cache.manifest.total_bytes if cache.manifest is not None else 0,
        },
        "effective": effective.to_json(),
    }
