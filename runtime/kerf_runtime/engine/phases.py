"""Times the start-up phases and tells whoever listens where the engine is.  No torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["PHASES", "PhaseClock", "Progress", "ignore_progress"]

PHASES = (
    "import",
    "weights",
    "cache_verify",
    "cache_load",
    "trace",
    "compile",
    "warmup",
    "estimate",
    "kv_alloc",
    "capture",
    "ready",
)
"""Phases in order; ``cache_load`` or ``trace`` and ``compile`` happen, ``ready`` is the whole."""

Progress = Callable[[str, str, float | None], None]
"""Called with the phase, a detail for people, and the fraction of the phase done (0..1) or None."""


def ignore_progress(phase: str, detail: str, fraction: float | None) -> None:
    """For callers that do not care."""


class PhaseClock:
    """Seconds per phase."""

    def __init__(self, progress: Progress, *, started: float) -> None:
        """Measure the whole from ``started`` (``time.monotonic``), which may lie in the parent."""
        self.seconds: dict[str, float] = {}
        self._progress = progress
        self._started = started

    @contextmanager
    def phase(self, name: str, detail: str = "") -> Iterator[None]:
        """Time a phase and announce it."""
        self._progress(name, detail, None)
        started = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = time.monotonic() - started

    def report(self, name: str) -> Callable[[str, float | None], None]:
        """A progress callback for code that does not know which phase it is in."""
        return lambda detail, fraction: self._progress(name, detail, fraction)

    def finish(self) -> None:
        """Record the time from the very beginning until now as ``ready``."""
        self.seconds["ready"] = time.monotonic() - self._started
        self._progress("ready", "", 1.0)
