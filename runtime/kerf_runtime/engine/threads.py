"""How many threads a step uses and how they wait, decided before torch is loaded.  No torch.

OpenMP reads its settings once, when its library is loaded, and by default it assumes that every CPU of
the machine is its own: threads spin between parallel regions.  In a container with a CPU limit, or
beside other work, a spinning thread takes the time that the thread it waits for needs; a decode step
has hundreds of short regions.  Measured with SmolLM2 at level 3 on two cores that other work kept
busy (load 5): 1.0 to 3.0 s per decode step spinning, 0.24 s sleeping.
"""

from __future__ import annotations

import os
from math import ceil
from pathlib import Path

__all__ = ["cpu_limit", "prepare_environment"]

_CGROUP = Path("/sys/fs/cgroup")


def prepare_environment(cgroup: Path = _CGROUP) -> None:
    """Set OpenMP's variables unless the user has; without effect once torch is imported."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    limit = cpu_limit(cgroup)
    if limit is not None and limit < len(os.sched_getaffinity(0)):
        os.environ.setdefault("OMP_NUM_THREADS", str(limit))


def cpu_limit(cgroup: Path = _CGROUP) -> int | None:
    """CPUs that the container may use, rounded up, or None without a limit (cgroup v2 and v1)."""
    try:
        if (cgroup / "cpu.max").exists():
            quota, period = (cgroup / "cpu.max").read_text().split()
        else:
            quota = (cgroup / "cpu" / "cpu.cfs_quota_us").read_text().strip()
            period = (cgroup / "cpu" / "cpu.cfs_period_us").read_text().strip()
        if quota in ("max", "-1"):
            return None
        return max(1, ceil(int(quota) / int(period)))
    except (OSError, ValueError):
        return None
