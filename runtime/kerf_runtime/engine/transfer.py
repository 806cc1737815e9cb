"""Small values from Python to a device and back, without making either wait for the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["Mailbox", "Received", "send"]


def send(values: Sequence[float] | np.ndarray[Any, Any], dtype: torch.dtype, to: Tensor) -> Tensor:
    """``values`` as a tensor on the device of ``to``, through pinned memory if that is a GPU."""
    host = torch.tensor(values, dtype=dtype)  # a copy: the caller may go on writing
    if to.device.type == "cpu":
        return host
    return host.pin_memory().to(to.device, non_blocking=True)


class Received:
    """A tensor on its way to the CPU: the copy is enqueued at once and waited for when it is read.

    Args:
        tensor: of a few values; it may change or go away as soon as this returns.
        into: pinned memory for it, and an event, which nobody else uses until this was read.
    """

    def __init__(self, tensor: Tensor, into: tuple[Tensor, torch.cuda.Event] | None = None) -> None:
        self._arrived: torch.cuda.Event | None = None
        if tensor.device.type == "cpu":
            self._host = tensor.clone()
            return
        if into is None:
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            into = host, torch.cuda.Event()
        self._host, self._arrived = into
        self._host.copy_(tensor, non_blocking=True)
        self._arrived.record()

    def tolist(self) -> list[Any]:
        """The values, once everything that was enqueued before the copy has run."""
        if self._arrived is not None:
            self._arrived.synchronize()
        values: list[Any] = self._host.tolist()
        return values


class Mailbox:
    """Where the tokens of steps arrive: two places in turn, one to be read while the other fills.

    Args:
        size: most tokens of a step.
        device: where they come from.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self._places: list[tuple[Tensor, torch.cuda.Event]] = []
        if device.type != "cpu":
            self._places = [
                (torch.empty(size, dtype=torch.int64, pin_memory=True), torch.cuda.Event())
                for _ in range(2)
            ]

    def receive(self, tokens: Tensor) -> Received:
        """Fetch tokens, int64 [R]; those of the step before the last must have been read."""
        if not self._places:
            return Received(tokens)
        self._places.reverse()
        host, arrived = self._places[0]
        return Received(tokens, (host[: len(tokens)], arrived))
