"""What the runtime must know about, and ask of, the machine it runs on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from kerf_runtime.config.resolve import PlatformFacts

__all__ = ["DeviceMemory", "Platform", "StaticGraph"]


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of the device, in bytes.

    Attributes:
        total: of the device.
        free: neither used by this process nor by another.
        reserved: held by PyTorch's allocator in this process, used or cached.
    """

    total: int
    free: int
    reserved: int


class StaticGraph(Protocol):
    """A recorded forward (or piece) that can be replayed.

    Contract, the same for every implementation: inputs are read from the addresses they had at
    capture; the output lives in one buffer, overwritten by each replay; a replay never re-enters the
    Python code of the model.
    """

    @property
    def nodes(self) -> int:
        """Recorded operations."""
        ...

    @property
    def memory_bytes(self) -> int:
        """Bytes that the graph holds."""
        ...

    def capture(self, runnable: Callable[..., Any], inputs: Sequence[Any]) -> Any:
        """Run ``runnable(*inputs)`` once while recording; returns the output buffers.

        Whether the buffers hold a result before the first replay is up to the platform.
        """
        ...

    def replay(self) -> Any:
        """Run the recording; returns the same output buffers."""
        ...


class Platform(Protocol):
    """A kind of machine."""

    @property
    def device(self) -> torch.device:
        """Where weights, activations and the KV cache live."""
        ...

    def facts(self) -> PlatformFacts:
        """What configuration resolution needs to know."""
        ...

    def static_graph(self) -> StaticGraph:
        """An empty graph."""
        ...

    def capture_pass(self, *, tidy: bool = True) -> AbstractContextManager[None]:
        """Surrounds captures: memory is tidied once before, never in between.

        Args:
            tidy: whether it is tidied at all, which takes far longer than a capture.
        """
        ...

    def memory(self) -> DeviceMemory | None:
        """Memory of the device now; None where graphs have no memory of their own to be measured."""
        ...

    def release_memory(self) -> None:
        """Give back to the device what this process holds and does not use."""
        ...

    def observed_factors(self) -> dict[str, Any]:
        """Facts about the machine that compiled code depends on."""
        ...

    def synchronize(self, tensor: Tensor) -> None:
        """Wait until ``tensor`` is computed."""
        ...
