"""Small values from Python to a device, without making either wait for the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["send"]


def send(values: Sequence[float] | np.ndarray[Any, Any], dtype: torch.dtype, to: Tensor) -> Tensor:
    """``values`` as a tensor on the device of ``to``, through pinned memory if that is a GPU."""
    host = torch.tensor(values, dtype=dtype)  # a copy: the caller may go on writing
    if to.device.type == "cpu":
        return host
    return host.pin_memory().to(to.device, non_blocking=True)
