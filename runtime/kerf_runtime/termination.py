"""SIGTERM as an exception, for work that leaves something to clean up.  No torch."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["EXIT_TERMINATED", "Terminated", "terminable"]

EXIT_TERMINATED = 128 + signal.SIGTERM


class Terminated(SystemExit):
    """The process was told to end.  No ``Exception``, so that nobody takes it for a failure of what it was doing."""

    def __init__(self) -> None:
        super().__init__(EXIT_TERMINATED)

    def __str__(self) -> str:
        return "told to end by SIGTERM before it was done"


@contextmanager
def terminable() -> Iterator[None]:
    """Let SIGTERM raise ``Terminated``, so that staging folders and helpers are cleaned up."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Terminated

    previous = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
