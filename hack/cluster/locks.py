"""File locks between processes: one builder per binary, one owner per state folder.

The kernel drops a lock when its holder dies, so a killed test never blocks the next one.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hack.cluster.errors import ClusterError
from hack.cluster.progress import Ticker, say

__all__ = ["file_lock"]


@contextmanager
def file_lock(path: Path, *, purpose: str, deadline_s: float) -> Iterator[None]:
    """Hold an exclusive lock on ``path``; waiting is announced and bounded.

    Raises:
        ClusterError: another process held the lock for longer than ``deadline_s``.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Opened without truncation: the holder's process id inside is what a waiting process shows.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        _acquire(descriptor, path, purpose, deadline_s)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _acquire(descriptor: int, path: Path, purpose: str, deadline_s: float) -> None:
    ticker = Ticker(every=15)
    announced = False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
        if not announced:
            say(f"{purpose}: process {holder} is at it, waiting for its lock")
            announced = True
        if ticker.elapsed() > deadline_s:
            raise ClusterError(
                f"{purpose}: process {holder} held the lock for more than {deadline_s:.0f} s",
                where=str(path),
                hint="Stop that process if it hangs; its lock goes with it",
            )
        ticker.tick(f"{purpose}: still waiting for process {holder}")
        time.sleep(0.2)
