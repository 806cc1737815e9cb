"""Start-up of the real server, from an empty and from a filled compile cache, phase by phase.

Every run is a fresh ``kerf serve`` process that is asked for one token and then stopped; a cold run has
an empty cache folder, a warm run the one that the cold run before it filled.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from kerf_runtime.cli.bench_record import header, spread, spread_text
from kerf_runtime.cli.bench_server import started_server, write_document
from kerf_runtime.cli.output import echo_table
from kerf_runtime.config import ModelDeploymentDocument

__all__ = ["measure", "measure_start", "print_table"]


def measure(document: ModelDeploymentDocument, model_path: Path, *, repeats: int) -> dict[str, Any]:
    """Start the server ``repeats`` times cold and warm and return the record.

    Raises:
        EngineError: a server did not become ready.
    """
    runs: dict[str, list[dict[str, Any]]] = {"cold": [], "warm": []}
    with tempfile.TemporaryDirectory(prefix="kerf-bench-") as folder:
        file = write_document(document, Path(folder))
        for repeat in range(repeats):
            cache = Path(folder) / f"cache-{repeat}"
            for kind in runs:
                runs[kind].append(measure_start(file, model_path, cache, document.served_name))
    return {
        **header("kerf bench startup"),
        "model": document.name,
        "results": [_summary(kind, starts) for kind, starts in runs.items()],
    }


def measure_start(file: Path, model_path: Path, cache: Path, model: str) -> dict[str, Any]:
    """One start: seconds per phase, to ready and to the first token, and the compile counters."""
    started = time.monotonic()
    with started_server(file, model_path, cache) as url:
        ready = time.monotonic() - started
        body = {"model": model, "prompt": [1, 2, 3, 4], "max_tokens": 1, "temperature": 0}
        with httpx.Client(base_url=url, timeout=120) as http:
            http.post("/v1/completions", json=body).raise_for_status()
            first_token = time.monotonic() - started
            report = http.get("/debug/graphs").json()
    return {
        "ready": ready,
        "firstToken": first_token,
        "phases": report["startup"],
        "cache": report["cache"]["result"],
        "counters": report["counters"],
    }


def print_table(result: dict[str, Any]) -> None:
    """Seconds per phase, cold beside warm."""
    cold, warm = result["results"]

    def both(label: str, cells: Sequence[dict[str, Any] | None]) -> tuple[str, ...]:
        return (label, *("-" if cell is None else spread_text(cell) for cell in cells))

    pair = (cold, warm)
    phases = dict.fromkeys([*cold["phases"], *warm["phases"]])
    phases.pop("ready", None)
    rows = [both(name, [part["phases"].get(name) for part in pair]) for name in phases]
    rows.append(both("process to ready", [part["ready"] for part in pair]))
    rows.append(both("process to first token", [part["firstToken"] for part in pair]))
    for label, counter in (
        ("traces", "dynamo_traces"),
        ("compilations", "inductor_compilations"),
    ):
        rows.append((label, *(str(part["counters"][counter]) for part in pair)))
    rows.append(("cache", cold["cache"], warm["cache"]))
    echo_table(("PHASE s", "COLD", "WARM"), rows, right=(1, 2))


def _summary(kind: str, starts: list[dict[str, Any]]) -> dict[str, Any]:
    names = dict.fromkeys(name for start in starts for name in start["phases"])
    return {
        "configuration": kind,
        "ready": spread([start["ready"] for start in starts]),
        "firstToken": spread([start["firstToken"] for start in starts]),
        "phases": {
            name: spread([s["phases"][name] for s in starts if name in s["phases"]])
            for name in names
        },
        "cache": starts[-1]["cache"],
        "counters": starts[-1]["counters"],
    }
