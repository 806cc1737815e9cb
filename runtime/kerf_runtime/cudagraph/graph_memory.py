"""What graphs were estimated to take of the device, what they were measured to hold, and what it did not get back.

A driver keeps what graphs of this process have had, for the next ones: trials are gone when the first graph is
captured, and their memory is the graphs'.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kerf_runtime.cudagraph.descriptor import GraphKey
from kerf_runtime.cudagraph.estimate import MemoryEstimate
from kerf_runtime.cudagraph.recorder import Recorded
from kerf_runtime.platforms.interface import DeviceMemory, Platform

__all__ = ["GraphMemory"]


class GraphMemory:
    """Bytes of the graphs of one model.

    Args:
        platform: tells the memory of its device.
    """

    def __init__(self, platform: Platform) -> None:
        self._platform = platform
        self.estimate: MemoryEstimate | None = None
        """Of everything in the plan."""
        self.bytes: dict[GraphKey, int] = {}
        """Of every captured graph."""
        self._shared = 0
        """Of all graphs together, which no single one would give back."""
        self._unreleased = 0
        """Of graphs that were dropped after their capture: what the device did not get back."""
        self._left_by_trials = 0
        self._free_before: int | None = None
        self._peak = 0

    @property
    def pooled(self) -> bool:
        """Whether the device tells its memory, of which all graphs share a pool."""
        return self._platform.memory() is not None

    @property
    def measured(self) -> MemoryEstimate:
        """What is captured now."""
        return MemoryEstimate(self._shared, self.bytes)

    def begin_pass(self) -> DeviceMemory | None:
        """Memory now; the peak is counted from what was free before the trials."""
        memory = self._platform.memory()
        self._free_before = None if memory is None else memory.free + self._left_by_trials
        return memory

    def end_trials(self, before: DeviceMemory | None) -> None:
        """Trials are forgotten; ``before`` them there was this memory."""
        self._platform.release_memory()
        after = self._platform.memory()
        if before is not None and after is not None:
            self._left_by_trials = max(0, before.free - after.free)

    def still_needed(self) -> int:
        """Bytes that the estimate has beyond what trials left taken."""
        total = 0 if self.estimate is None else self.estimate.total()
        return max(0, total - self._left_by_trials)

    def note_peak(self, recorded: Recorded) -> None:
        """What recording and warming up have in use at the worst moment."""
        if self._free_before is not None and recorded.free is not None:
            self._peak = max(self._peak, self._free_before - recorded.free)

    def share_out(self, plan: Sequence[GraphKey]) -> None:
        """Split what the device lost to trials and captures between the graphs, as the estimate tells."""
        if self.estimate is None or not self.pooled:
            return
        missing = [key for key in plan if key not in self.bytes]
        total = self._left_by_trials + sum(self.bytes.values())
        shared_out = self.estimate.without(missing).scaled_to(total)
        self._shared, self.bytes = shared_out.shared, dict(shared_out.graphs)

    def drop(self, keys: Sequence[GraphKey], forget: Callable[[Iterable[GraphKey]], None]) -> None:
        """Destroy graphs with ``forget``, and note what the device does not get back."""
        held = sum(self.bytes.pop(key, 0) for key in keys)
        before = self._platform.memory()
        forget(keys)
        after = self._platform.memory()
        if before is not None and after is not None:
            self._unreleased += max(0, held - max(0, after.free - before.free))

    def report(self) -> dict[str, Any]:
        """The numbers of ``/debug/graphs``."""
        wanted = self.measured.total()
        held = wanted + self._unreleased
        return {
            "memory_bytes": held,
            "shared_bytes": self._shared + self._unreleased,
            "unreleased_bytes": self._unreleased,
            "peak_bytes": max(held, self._peak),
            **self._estimate_report(wanted),
        }

    def _estimate_report(self, measured: int) -> dict[str, Any]:
        """What the captured graphs were estimated to take, and how far that was off."""
        if self.estimate is None:
            return {"estimated_bytes": None, "estimate_error": None}
        missing = [key for key in self.estimate.graphs if key not in self.bytes]
        estimated = self.estimate.without(missing).total()
        error = (estimated - measured) / measured if measured else 0.0
        return {"estimated_bytes": estimated, "estimate_error": error}
