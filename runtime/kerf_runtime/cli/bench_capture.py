"""What recording graphs costs, per captured size, as the server's own report tells it.

Every run is a fresh ``kerf serve`` process: graphs belong to a process, and the first capture of a process
pays for what later ones find initialised.  The compile cache is filled by the first start, so that no run
compiles.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import httpx

from kerf_runtime.cli.bench_record import header, spread, spread_text
from kerf_runtime.cli.bench_server import started_server, write_document
from kerf_runtime.cli.document import apply_overrides
from kerf_runtime.cli.output import echo_table, human_bytes
from kerf_runtime.config import ModelDeploymentDocument

__all__ = ["measure", "print_table"]


def measure(document: ModelDeploymentDocument, model_path: Path, *, repeats: int) -> dict[str, Any]:
    """Start the server once to fill the cache and ``repeats`` times to measure; return the record.

    Raises:
        EngineError: a server did not become ready.
    """
    with tempfile.TemporaryDirectory(prefix="kerf-bench-") as folder:
        # Everything is captured before a server is ready, also where the document wants to serve before.
        whole = apply_overrides(document, ("compilation.captureMode=eager",))
        file, cache = write_document(whole, Path(folder)), Path(folder) / "cache"
        reports = []
        for _ in range(repeats + 1):
            with (
                started_server(file, model_path, cache) as url,
                httpx.Client(base_url=url, timeout=120) as http,
            ):
                reports.append(http.get("/debug/graphs").raise_for_status().json())
    return {**header("kerf bench capture"), "model": document.name, **_summary(reports[1:])}


def print_table(result: dict[str, Any]) -> None:
    """A row per captured size and mode, then the sums."""
    rows = [
        (
            row["mode"],
            str(row["tokens"]),
            "yes" if row["uniformDecode"] else "no",
            str(row["nodes"]),
            human_bytes(row["bytes"]),
            spread_text(row["seconds"], 1e3),
        )
        for row in result["results"]
    ]
    rows.append(
        (
            "all",
            "",
            "",
            str(sum(row["nodes"] for row in result["results"])),
            human_bytes(result["bytes"]),
            spread_text(result["captureSeconds"], 1e3),
        )
    )
    columns = ("MODE", "TOKENS", "DECODE ONLY", "NODES", "MEMORY", "CAPTURE ms")
    echo_table(columns, rows, right=(1, 3, 4, 5))


def _summary(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """Seconds over the runs; nodes and bytes are those of the last."""
    seconds: dict[tuple[str, int, bool], list[float]] = {}
    for report in reports:
        for graph in report["graphs"]["descriptors"]:
            key = (graph["mode"], graph["num_tokens"], graph["uniform_decode"])
            seconds.setdefault(key, []).append(graph["seconds"])
    last = reports[-1]["graphs"]
    return {
        "backend": last["backend"],
        "bytes": last["memory_bytes"],
        "captureSeconds": spread([report["graphs"]["capture_seconds"] for report in reports]),
        "results": [
            {
                "mode": graph["mode"],
                "tokens": graph["num_tokens"],
                "uniformDecode": graph["uniform_decode"],
                "nodes": graph["nodes"],
                "bytes": graph["bytes"],
                "seconds": spread(
                    seconds[graph["mode"], graph["num_tokens"], graph["uniform_decode"]]
                ),
            }
            for graph in last["descriptors"]
        ],
    }
