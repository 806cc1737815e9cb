"""How tests wait, and how they measure: a machine that stops for some seconds at any moment breaks neither.

What should happen soon is waited for much longer than it takes: the limit only ends a test that hangs. So
no test says how long something may take, but for the two promises that are about time: ``Given`` measures those.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["PATIENCE", "Given", "eventually", "given_time", "join", "until"]

PATIENCE = 60.0
"""Seconds after which something hangs: far more than it takes, even on a machine that stops at times."""
_TICK_SECONDS = 0.01


def eventually(check: Callable[[], Any], seconds: float = PATIENCE) -> None:
    """Wait until ``check`` holds."""
    deadline = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(_TICK_SECONDS)


async def until(check: Callable[[], Any]) -> None:
    """Wait until ``check`` holds, and let the event loop run meanwhile."""
    deadline = time.monotonic() + PATIENCE
    while not check():
        assert time.monotonic() < deadline, "did not happen in time"
        await asyncio.sleep(_TICK_SECONDS)


def join(*threads: threading.Thread) -> None:
    """Wait until the threads have ended."""
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive(), f"{thread.name} does not end"


class Given:
    """Time that this process was given; ``seconds`` grows while ``given_time`` lasts."""

    def __init__(self) -> None:
        self.ticks = 0

    @property
    def seconds(self) -> float:
        """Never more than has really passed, but for the last tick."""
        return self.ticks * _TICK_SECONDS


@contextmanager
def given_time() -> Iterator[Given]:
    """Measure what another process takes, by a clock that stands still while the machine does.

    A thread counts the times that it slept for a hundredth of a second. However long the machine stops in one of
    these sleeps, it is one tick. The other process is given about as much time as this one: they stop together.

    For what happens in this process it is no measure: who keeps the interpreter busy stops the clock as well.
    """
    given, over = Given(), threading.Event()

    def count() -> None:
        while not over.wait(_TICK_SECONDS):
            given.ticks += 1

    counting = threading.Thread(target=count, name="given-time", daemon=True)
    counting.start()
    try:
        yield given
    finally:
        over.set()
        join(counting)
