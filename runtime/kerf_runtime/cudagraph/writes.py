"""Refuses a forward that writes to its own parameters or buffers.

A recorded write runs again with every replay, and ran with every warm-up before: a counter would count
batches that nobody asked for.  No graph could tell, so one forward is watched before anything is
recorded.  Inside compiled pieces nothing is seen; a write there was already refused when it was traced
into a graph that owns no buffers.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from kerf_runtime.errors import CaptureError

__all__ = ["WriteWatch"]

_FRAMEWORK = (str(Path(torch.__file__).parent), __file__)


class WriteWatch(TorchDispatchMode):
    """Raises CaptureError when an operator writes to one of the watched tensors.

    Args:
        tensors: names and tensors that must not be written to.
    """

    def __init__(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        super().__init__()
        self._names = {_storage(tensor): name for name, tensor in tensors if tensor.numel()}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Say no: torch would wrap the dispatch below so that its first call imports Dynamo."""
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            for index, argument in enumerate(func._schema.arguments):
                value = args[index] if index < len(args) else kwargs.get(argument.name)
                if argument.alias_info is not None and argument.alias_info.is_write:
                    self._refuse(func, value)
        return func(*args, **kwargs)

    def _refuse(self, func: Any, written: Any) -> None:
        """Raise if a watched tensor is or is among what is written."""
        for value in written if isinstance(written, (list, tuple)) else [written]:
            if isinstance(value, Tensor) and (name := self._names.get(_storage(value))):
                raise CaptureError(
                    f"the forward writes to {name!r} with {func}: every replay and every warm-up would "
                    "write again",
                    where=_culprit(),
                    hint="Compute a new tensor instead, or keep the value outside the model",
                )


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _culprit() -> str | None:
    """Module, file and line of the model's code that is running."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_FRAMEWORK):
            owner = frame.f_locals.get("self")
            line = f"{name}:{frame.f_lineno} in {frame.f_code.co_name}"
            return f"{type(owner).__name__}, {line}" if isinstance(owner, nn.Module) else line
        frame = frame.f_back  # type: ignore[assignment]
    return None
