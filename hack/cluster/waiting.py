"""Waits with a deadline.  A wait that cannot say what it waited for is a hung test later."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from hack.cluster.errors import ClusterError, tail
from hack.cluster.progress import Ticker

__all__ = ["wait_until"]

T = TypeVar("T")


def wait_until(
    probe: Callable[[], T | None],
    *,
    what: str,
    deadline_s: float,
    interval_s: float = 0.1,
    alive: Callable[[], bool] | None = None,
    log: Path | None = None,
    tick_s: float = 10.0,
) -> T:
    """Call ``probe`` until it returns something true, and return that.

    Args:
        what: the end of the sentence "waiting for ...".
        alive: whether the process that should answer still runs; when not, the wait ends at once.
        log: a log file whose end belongs into the error.

    Raises:
        ClusterError: the deadline passed, or the process ended.
    """
    ticker = Ticker(every=tick_s)
    while True:
        result = probe()
        if result:
            return result
        ending = f"\n{tail(log)}" if log else ""
        if alive is not None and not alive():
            raise ClusterError(f"the process ended while waiting for {what}{ending}")
        if ticker.elapsed() > deadline_s:
            raise ClusterError(f"waited {deadline_s:.0f} s in vain for {what}{ending}")
        ticker.tick(f"waiting for {what}")
        time.sleep(interval_s)
