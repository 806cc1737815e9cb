"""How long the engine's loop has said nothing, and when that means that it is stuck.  Pure.

A process that exists may still be stuck: a deadlock, a kernel that never ends.  The loop itself therefore
says something at least every ``ALIVE_SECONDS``, between two steps and when it is idle; a step that does not
end is silence.
"""

from __future__ import annotations

__all__ = ["ALIVE_SECONDS", "STALL_SECONDS", "Silence"]

ALIVE_SECONDS = 1.0
"""The longest that a loop between two steps says nothing."""
STALL_SECONDS = 600.0
"""Default of ``KERF_STALL_SECONDS``: no step takes as long, be it a long prompt on a slow CPU."""
_STALLED_SHARE = 0.2
_LONGEST_TICK_SECONDS = 2.0


class Silence:
    """Seconds in which the engine could have been heard and was not.

    They are counted by ticks of the listener, and a tick counts for no more than two seconds: while the
    listener itself is paused (stopped, frozen with its container, on a machine that sleeps), silence is
    not the engine's.

    Args:
        limit: seconds after which the engine has failed; after a fifth of them it is stalled.
    """

    def __init__(self, limit: float = STALL_SECONDS) -> None:
        self.limit = limit
        self.seconds = 0.0
        self._ticked: float | None = None

    def heard(self) -> None:
        """A message came."""
        self.seconds = 0.0

    def tick(self, now: float) -> None:
        """The listener runs; ``now`` is in seconds of a clock that only grows."""
        if self._ticked is not None:
            self.seconds += min(now - self._ticked, _LONGEST_TICK_SECONDS)
        self._ticked = now

    @property
    def is_stalled(self) -> bool:
        """Whether nothing new should be sent to it; it may still come back."""
        return self.seconds >= self.limit * _STALLED_SHARE

    @property
    def is_final(self) -> bool:
        """Whether it is not waited for any longer."""
        return self.seconds >= self.limit
