"""Copies the inputs of every call to fixed addresses (``compilation.cudagraphCopyInputs``).

A recorded graph reads its inputs from the addresses they had when it was recorded.  The engine passes
views of persistent buffers and needs no copy; a caller that cannot promise that puts this in front.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kerf_runtime.errors import CaptureError

__all__ = ["StaticInputs"]


class StaticInputs:
    """Calls ``runnable`` with copies of its inputs that lie at the same addresses every time.

    Args:
        runnable: takes tensors whose dimension 0 is the number of tokens.
        max_tokens: rows of the buffers, which are made at the first call.
    """

    def __init__(self, runnable: Callable[..., Any], max_tokens: int) -> None:
        self._runnable = runnable
        self._max_tokens = max_tokens
        self._buffers: tuple[Tensor, ...] = ()

    def __call__(self, *inputs: Tensor) -> Any:
        """``runnable(*copies)``.

        Raises:
            CaptureError: an input has more rows than there is room for, or another shape or data type
                than in the first call.
        """
        if not self._buffers:
            self._buffers = tuple(
                torch.empty((self._max_tokens, *x.shape[1:]), dtype=x.dtype, device=x.device)
                for x in inputs
            )
        return self._runnable(
            *(_copy(x, buffer, i) for i, (x, buffer) in enumerate(self._checked(inputs)))
        )

    def _checked(self, inputs: tuple[Tensor, ...]) -> list[tuple[Tensor, Tensor]]:
        if len(inputs) != len(self._buffers):
            raise CaptureError(
                f"{len(inputs)} inputs instead of the {len(self._buffers)} of the first call"
            )
        return list(zip(inputs, self._buffers, strict=True))


def _copy(value: Tensor, buffer: Tensor, index: int) -> Tensor:
    if value.shape[1:] != buffer.shape[1:] or value.dtype is not buffer.dtype:
        raise CaptureError(
            f"input {index} is {value.dtype} {list(value.shape)}, the first call had {buffer.dtype} "
            f"[tokens, {', '.join(map(str, buffer.shape[1:]))}]",
            hint="Pass the same kinds of tensors in every step",
        )
    tokens = value.shape[0]
    if tokens > buffer.shape[0]:
        raise CaptureError(
            f"input {index} has {tokens} tokens, and there is room for {buffer.shape[0]}",
            hint="Raise engine.maxNumBatchedTokens",
        )
    view = buffer[:tokens]
    view.copy_(value)
    return view
