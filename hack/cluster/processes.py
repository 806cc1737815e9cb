"""Starting and stopping the processes of one instance: pid files, log files, ordered ends.

A pid file holds the process id and the kernel's start time of that process, so that a recycled id
is never taken for ours.  A process that has ended but was not waited for (a zombie) counts as gone.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hack.cluster.errors import ClusterError, tail
from hack.cluster.progress import say

__all__ = ["Owner", "Processes", "is_running", "start_time"]

TERM_DEADLINE_S = 15.0
KILL_DEADLINE_S = 10.0


@dataclass(frozen=True)
class Owner:
    """A process, told apart from a later one that got the same id."""

    pid: int
    started: int

    @staticmethod
    def current() -> Owner:
        """This process."""
        started = start_time(os.getpid())
        assert started is not None, "/proc does not list the running process"
        return Owner(os.getpid(), started)

    def is_running(self) -> bool:
        """Whether that process is still alive (a zombie is not)."""
        return is_running(self.pid, self.started)


def start_time(pid: int) -> int | None:
    """Start time in clock ticks since boot, or None for no such process or a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command name, in parentheses, may itself contain spaces and parentheses.
    fields = text.rpartition(")")[2].split()
    state, started = fields[0], fields[19]
    return None if state in "ZX" else int(started)


def is_running(pid: int, started: int) -> bool:
    """Whether process ``pid`` that began at ``started`` still runs."""
    return start_time(pid) == started


class Processes:
    """The named processes of one instance.

    Args:
        folder: for the pid files.
        logs: for the log files, ``<name>.log``, appended to by every start.
    """

    def __init__(self, folder: Path, logs: Path) -> None:
        self._folder = folder
        self._logs = logs
        # Children of this process must be waited for, or they stay zombies.
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    def log(self, name: str) -> Path:
        """The log file of a process."""
        return self._logs / f"{name}.log"

    def pid(self, name: str) -> int | None:
        """The id of a running process, or None."""
        recorded = self._recorded(name)
        if recorded is None:
            return None
        child = self._children.get(name)
        if child is not None and child.pid == recorded.pid:
            child.poll()
        return recorded.pid if recorded.is_running() else None

    def names(self) -> list[str]:
        """Every process that was started and not stopped, running or not."""
        if not self._folder.is_dir():
            return []
        return sorted(file.name for file in self._folder.iterdir() if "." not in file.name)

    def start(
        self,
        name: str,
        command: Sequence[str | Path],
        *,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        """Start a process in its own session, unless it already runs."""
        if self.pid(name) is not None:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        self._logs.mkdir(parents=True, exist_ok=True)
        with self.log(name).open("ab") as log:
            child = subprocess.Popen(
                [str(part) for part in command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=None if environ is None else {**os.environ, **environ},
            )
        self._children[name] = child
        started = start_time(child.pid)
        if started is None:
            raise ClusterError(f"{name} ended at once\n{tail(self.log(name))}")
        file = self._folder / name
        partial = file.with_suffix(".partial")
        partial.write_text(f"{child.pid} {started}\n")
        partial.replace(file)

    def require_alive(self, *names: str) -> None:
        """Check that processes run that were started.

        Raises:
            ClusterError: one has ended; the message shows the end of its log.
        """
        for name in names:
            if self.pid(name) is None:
                raise ClusterError(f"{name} has ended by itself\n{tail(self.log(name))}")

    def stop(self, *names: str, deadline_s: float = TERM_DEADLINE_S) -> None:
        """End processes together: TERM to all, then KILL to those that outlive the deadline.

        Raises:
            ClusterError: a process survived KILL.
        """
        for name in names:
            self._signal(name, signal.SIGTERM)
        left = self._wait(names, deadline_s)
        for name in left:
            say(f"{name} did not end within {deadline_s:.0f} s and is killed")
            self._signal(name, signal.SIGKILL)
        stuck = self._wait(left, KILL_DEADLINE_S)
        if stuck:
            raise ClusterError(f"{', '.join(stuck)} cannot be killed")
        for name in names:
            (self._folder / name).unlink(missing_ok=True)
            child = self._children.pop(name, None)
            if child is not None:
                child.wait()

    def _signal(self, name: str, number: signal.Signals) -> None:
        pid = self.pid(name)
        if pid is not None:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                return

    def _wait(self, names: Sequence[str], deadline_s: float) -> list[str]:
        until = time.monotonic() + deadline_s
        while True:
            left = [name for name in names if self.pid(name) is not None]
            if not left or time.monotonic() > until:
                return left
            time.sleep(0.05)

    def _recorded(self, name: str) -> Owner | None:
        try:
            pid, started = (self._folder / name).read_text().split()
        except FileNotFoundError:
            return None
        return Owner(int(pid), int(started))
