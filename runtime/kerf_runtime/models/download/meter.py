"""How far a download is: what all threads received, added up and told.  No torch."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kerf_runtime.models.download.remote import RemoteFile

__all__ = ["Meter", "Progress", "Transfer"]

_REPORT_SECONDS = 0.1


@dataclass(frozen=True)
class Transfer:
    """How far a download is.

    Attributes:
        done: bytes that are here, those of earlier tries included.
        total: bytes of all files; 0 while they are not known.
        files: number of files.
        received: bytes that this process received.
        seconds: since it began to receive.
    """

    done: int = 0
    total: int = 0
    files: int = 0
    received: int = 0
    seconds: float = 0.0


Progress = Callable[[Transfer], None]
"""Called now and then, from several threads but never from two at a time."""


class Meter:
    """Adds up what all threads received, and reports it."""

    def __init__(self, files: Sequence[RemoteFile], needed: int, progress: Progress) -> None:
        self._total, self._files = sum(file.size for file in files), len(files)
        self._done = self._total - needed
        self._began = time.monotonic()
        self._reported = 0.0
        self._progress = progress
        self._lock = threading.Lock()
        self.received = 0
        self.report()

    def count(self, count: int) -> None:
        """Bytes that came, or below 0 that were thrown away."""
        with self._lock:
            self._done += count
            self.received += max(count, 0)
            if time.monotonic() - self._reported >= _REPORT_SECONDS:
                self.report()

    def report(self) -> None:
        """Tell how far it is."""
        self._reported = time.monotonic()
        self._progress(
            Transfer(
                self._done,
                self._total,
                self._files,
                self.received,
                self._reported - self._began,
            )
        )
