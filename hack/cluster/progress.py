"""Progress on stderr: one line per step with its duration, so that a long build never looks hung.

Standard output stays free for results (``status --json``, a kubeconfig path), as scripts expect.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["Heartbeat", "Ticker", "duration", "say", "step"]

_started = time.monotonic()


def duration(seconds: float) -> str:
    """``2.3 s`` below a minute, ``4 min 05 s`` above."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s"


def say(text: str) -> None:
    """One line, stamped with the seconds since this program started."""
    print(f"[{time.monotonic() - _started:7.1f}] {text}", file=sys.stderr, flush=True)


@contextmanager
def step(name: str, *, quiet: bool = False) -> Iterator[None]:
    """Announce a step and report how long it took, also when it failed."""
    began = time.monotonic()
    if not quiet:
        say(f"{name} ...")
    try:
        yield
    except BaseException:
        say(f"{name}: failed after {duration(time.monotonic() - began)}")
        raise
    say(f"{name}: done in {duration(time.monotonic() - began)}")


class Ticker:
    """Repeats a line at most every ``every`` seconds; the text is only made when it is due."""

    def __init__(self, every: float = 10.0) -> None:
        self._every = every
        self.began = time.monotonic()
        self._next = self.began + every

    def elapsed(self) -> float:
        """Seconds since this ticker was made."""
        return time.monotonic() - self.began

    def tick(self, text: str) -> None:
        """Print ``text`` with the elapsed time if the last line is old enough."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + self._every
            say(f"{text} ({duration(now - self.began)})")


class Heartbeat:
    """A line every ``every`` seconds from a thread, for programs that stay silent while they work.

    with Heartbeat("building") as heartbeat:
        heartbeat.text = "building: step 3"
    """

    def __init__(self, text: str, every: float = 15.0) -> None:
        self.text = text
        self._every = every
        self._began = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def elapsed(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self._began

    def _beat(self) -> None:
        while not self._ended.wait(self._every):
            say(f"{self.text} ({duration(self.elapsed())})")
