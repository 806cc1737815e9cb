"""What every benchmark record contains beside its numbers: machine, versions, command, date."""

from __future__ import annotations

import os
import platform
import statistics
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from kerf_runtime import __version__

__all__ = ["header", "spread", "spread_text"]


def header(program: str) -> dict[str, Any]:
    """The facts that make a number comparable."""
    return {
        "program": program,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": ["kerf", *(_short(argument) for argument in sys.argv[1:])],
        "machine": {
            "cpu": _cpu_model(),
            "cores": len(os.sched_getaffinity(0)),
            "memoryGiB": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
            "system": f"{platform.system()} {platform.machine()}",
        },
        "versions": {
            "kerf": __version__,
            "python": platform.python_version(),
            "torch": _version("torch"),
        },
    }


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median, extremes and number of runs, in the unit of ``values``."""
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "runs": len(values),
    }


def spread_text(stats: dict[str, Any], scale: float = 1.0, digits: int = 2) -> str:
    """``12.34 (12.01 to 13.20)``."""
    median, low, high = (f"{stats[k] * scale:.{digits}f}" for k in ("median", "min", "max"))
    return f"{median} ({low} to {high})"


def _short(argument: str) -> str:
    """Absolute paths say something about the machine and nothing about the measurement."""
    return Path(argument).name if argument.startswith("/") else argument


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        return platform.processor() or "unknown"
    return platform.processor() or "unknown"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
