"""Requests in the order in which they get what is scarce: priority counts, and so does waiting.  Pure, no torch.

A request of priority p is placed as if it had arrived ``p * SECONDS_PER_PRIORITY`` seconds later than it did
(earlier if p is negative).  All requests age alike, so their order never changes, and nobody starves: who
arrives more than that many seconds per level of difference later comes later, whatever its priority.
Requests of one priority are served in order of arrival.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from kerf_runtime.engine.request import Request

__all__ = ["MAX_PRIORITY", "SECONDS_PER_PRIORITY", "FairQueue", "place_of"]

SECONDS_PER_PRIORITY = 10.0
"""How much longer a request waits for one of the next lower number."""

MAX_PRIORITY = 100
"""Largest priority; its negative is the smallest.  A request is overtaken for at most 2000 s."""


def place_of(arrived: float, priority: int) -> float:
    """Seconds that requests are ordered by.

    Args:
        arrived: seconds, of any one clock.
        priority: lower is sooner.
    """
    return arrived + priority * SECONDS_PER_PRIORITY


def _place(request: Request) -> tuple[float, int]:
    return request.place


class FairQueue:
    """Requests by ``Request.place``, which no two share."""

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        """From the first to the last; the queue must not change meanwhile."""
        return iter(self._requests)

    @property
    def first(self) -> Request:
        """Who is served first."""
        return self._requests[0]

    @property
    def last(self) -> Request:
        """Who is served last."""
        return self._requests[-1]

    def add(self, request: Request) -> None:
        """Put a request where it belongs."""
        insort(self._requests, request, key=_place)

    def remove(self, request: Request) -> None:
        """Take a request out; it must be in."""
        del self._requests[bisect_left(self._requests, request.place, key=_place)]
