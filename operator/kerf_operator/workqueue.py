"""A queue of keys: each key at most once, never handled twice at a time, repeated with back-off.

The idea is that of controllers written in Go: events only say *which* object to look at, so ten events of
one object become one look, and an event that arrives during a look causes exactly one more.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Hashable
from typing import Generic, TypeVar

__all__ = ["WorkQueue"]

K = TypeVar("K", bound=Hashable)


class WorkQueue(Generic[K]):
    """For one event loop; every method must be called in it.

    Args:
        base_delay: seconds before the first repetition of a failed key; doubled each time.
        max_delay: most seconds.
    """

    def __init__(self, *, base_delay: float = 0.5, max_delay: float = 60.0) -> None:
        self._base_delay, self._max_delay = base_delay, max_delay
        self._order: deque[K] = deque()
        self._waiting: set[K] = set()
        self._active: set[K] = set()
        self._again: set[K] = set()
        self._timers: dict[K, asyncio.TimerHandle] = {}
        self._failures: dict[K, int] = {}
        self._ready = asyncio.Event()

    def __len__(self) -> int:
        return len(self._order)

    @property
    def active(self) -> int:
        """Keys that are being handled."""
        return len(self._active)

    def add(self, key: K) -> None:
        """Have ``key`` handled soon, or once more when it is being handled."""
        if key in self._active:
            self._again.add(key)
        elif key not in self._waiting:
            self._waiting.add(key)
            self._order.append(key)
            self._ready.set()

    def add_after(self, key: K, seconds: float) -> None:
        """Have ``key`` handled after a while; of several such calls the earliest counts."""
        loop = asyncio.get_running_loop()
        timer = self._timers.get(key)
        if timer is not None:
            if timer.when() <= loop.time() + seconds:
                return
            timer.cancel()
        self._timers[key] = loop.call_later(seconds, self._due, key)

    def _due(self, key: K) -> None:
        del self._timers[key]
        self.add(key)

    async def get(self) -> K:
        """The next key; ``done`` must be called for it."""
        while not self._order:
            self._ready.clear()
            await self._ready.wait()
        key = self._order.popleft()
        self._waiting.discard(key)
        self._active.add(key)
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()  # what it waited for happens now
        return key

    def done(self, key: K) -> None:
        """The key was handled; it comes again at once if it was added meanwhile."""
        self._active.discard(key)
        if key in self._again:
            self._again.discard(key)
            self.add(key)

    def succeeded(self, key: K) -> None:
        """Forget earlier failures of ``key``."""
        self._failures.pop(key, None)

    def failed(self, key: K) -> float:
        """Have ``key`` handled again after its back-off; returns the seconds."""
        count = self._failures.get(key, 0)
        self._failures[key] = count + 1
        delay = min(self._base_delay * float(2 ** min(count, 16)), self._max_delay)
        self.add_after(key, delay)
        return delay

    def forget(self, key: K) -> None:
        """The object is gone: no repetition."""
        self.succeeded(key)
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()

    def close(self) -> None:
        """Cancel every pending timer."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
