"""What a server spends: its engine's steps, from ``/metrics``, and the CPU time of its processes, from ``/proc``."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from kerf_runtime.errors import EngineError

__all__ = ["Steps", "cpu_seconds", "most_frequent", "steps_between", "steps_of"]

_STEPS = "kerf_step_duration_seconds"
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Steps:
    """A number of steps and the seconds inside them."""

    count: float
    seconds: float

    @property
    def mean(self) -> float:
        """Seconds of one."""
        return self.seconds / self.count


def steps_of(metrics: str) -> dict[str, Steps]:
    """The steps by mode since the server's start, from the text of ``/metrics``."""
    counts: dict[str, float] = {}
    seconds: dict[str, float] = {}
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples if family.name == _STEPS else ():
            if sample.name == f"{_STEPS}_count":
                counts[sample.labels["mode"]] = sample.value
            elif sample.name == f"{_STEPS}_sum":
                seconds[sample.labels["mode"]] = sample.value
    return {mode: Steps(count, seconds[mode]) for mode, count in counts.items()}


def steps_between(before: Mapping[str, Steps], after: Mapping[str, Steps]) -> dict[str, Steps]:
    """The steps by mode that were made between; modes without any are left out."""
    none = Steps(0, 0)
    made = {
        mode: Steps(
            steps.count - before.get(mode, none).count,
            steps.seconds - before.get(mode, none).seconds,
        )
        for mode, steps in after.items()
    }
    return {mode: steps for mode, steps in made.items() if steps.count}


def most_frequent(steps: Mapping[str, Steps]) -> Steps:
    """Those of the mode with the most steps: where one client decodes, all but the prompts'."""
    return max(steps.values(), key=lambda made: made.count)


def cpu_seconds(parent: int) -> dict[str, float]:
    """CPU seconds so far of the HTTP process that ``parent`` started, and of its engine with its children.

    Raises:
        EngineError: the server is not running.
    """
    processes = {pid: (owner, spent) for pid, owner, spent in _processes()}
    servers = [
        pid
        for pid, (owner, _) in processes.items()
        if owner == parent and b"serve" in _arguments(pid)
    ]
    if len(servers) != 1:
        raise EngineError(f"{len(servers)} servers are running that process {parent} started")
    [http] = servers
    engine = sum(
        spent
        for pid, (_, spent) in processes.items()
        if pid != http and _is_below(pid, http, processes)
    )
    return {"http": processes[http][1], "engine": engine}


def _is_below(pid: int, ancestor: int, processes: Mapping[int, tuple[int, float]]) -> bool:
    while pid in processes and pid != ancestor:
        pid = processes[pid][0]
    return pid == ancestor


def _processes() -> Iterator[tuple[int, int, float]]:
    """Process id, that of the parent, and CPU seconds, of every process."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                # The name, in brackets, may hold anything.
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):  # ended meanwhile
                continue
            yield int(folder.name), int(fields[1]), (int(fields[11]) + int(fields[12])) / _TICKS


def _arguments(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError):
        return []
