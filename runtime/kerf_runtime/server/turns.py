"""Long work on the event loop, in turns with everything else.

What takes seconds in one go lets nobody read ``/health`` meanwhile, and a probe's patience ends.  A thread is
no way out where the work is Python: it would take the interpreter away from the loop for 5 ms whenever
the loop waits for anything, at every event that it sends.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar
from weakref import WeakKeyDictionary

__all__ = ["TURN_SECONDS", "collect_rarely", "in_turns"]

T = TypeVar("T")

TURN_SECONDS = 0.002
"""How long one turn lasts."""

_YOUNG_OBJECTS = 50_000

# Of each event loop, so that many who have long work do not each take a turn in every round of it.
_working: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()


async def in_turns(items: Iterable[T]) -> list[T]:
    """All items, made on the event loop without holding it up: making one item must be short.

    What fits into one turn is done at once.  Whoever has more to do queues for every further turn.
    """
    source, made = iter(items), list[T]()
    if _work(source, made):
        return made
    turn = _working.setdefault(asyncio.get_running_loop(), asyncio.Lock())
    while True:
        async with turn:
            await asyncio.sleep(0)
            if _work(source, made):
                return made


def collect_rarely() -> None:
    """Let more objects come before Python looks for unreachable cycles among them, in this process.

    By default it does for every 700, which makes reading a body of millions of lists take five times as long.
    Hardly anything here is in a cycle.
    """
    gc.set_threshold(_YOUNG_OBJECTS, 20, 20)


def _work(source: Iterator[T], made: list[T]) -> bool:
    """Take items for one turn; whether there are no more."""
    end = time.perf_counter() + TURN_SECONDS
    for item in source:
        made.append(item)
        if time.perf_counter() >= end:
            return False
    return True
