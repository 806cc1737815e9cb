"""Tells memory that ran out from everything else that fails while a graph is warmed up or recorded.

PyTorch's allocator raises ``torch.OutOfMemoryError``.  What a driver keeps for a graph comes from no allocator:
where there is no room for it, a plain error of the runtime says so in its code or in its words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from kerf_runtime.errors import CaptureError, CaptureMemoryError

if TYPE_CHECKING:
    from kerf_runtime.platforms.interface import DeviceMemory

__all__ = ["first_line", "is_out_of_memory", "memory_explained", "out_of_memory"]

_CODE = 2
"""Of ``cudaErrorMemoryAllocation``, and of ``CUDA_ERROR_OUT_OF_MEMORY``."""
_WORDS = (
    "out of memory",
    "cudaErrorMemoryAllocation",
    "CUDA_ERROR_OUT_OF_MEMORY",
    "hipErrorOutOfMemory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` says that the device has no memory left, whoever asked for it."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    return getattr(error, "error_code", None) == _CODE or any(word in str(error) for word in _WORDS)


def out_of_memory(
    doing: str, error: BaseException, memory: DeviceMemory | None, *, where: str | None = None
) -> CaptureMemoryError:
    """The error that users meet: what was being done, what is in use, what to change.

    Args:
        doing: ``capturing the graph of 8 tokens``.
        error: for which ``is_out_of_memory``.
        memory: of the device now; None if it cannot tell.
        where: module, file and line, if known.
    """
    used = ""
    if memory is not None:
        used = (
            f"{(memory.total - memory.free) / 2**30:.2f} of {memory.total / 2**30:.2f} GiB are used, "
            f"{memory.reserved / 2**30:.2f} GiB by this process's tensors. "
        )
    return CaptureMemoryError(
        f"out of memory while {doing}: {used}{first_line(error)}",
        where=where,
        hint="Lower engine.kvCacheMemory, remove large sizes from compilation.captureSizes, or "
        "set compilation.cudagraphMode to FULL_DECODE_ONLY or NONE",
    )


@contextmanager
def memory_explained(doing: str, memory: Callable[[], DeviceMemory | None]) -> Iterator[None]:
    """Turn an error that means memory into one that says what was being done; let others pass.

    Raises:
        CaptureMemoryError: memory ran out.
    """
    try:
        yield
    except CaptureError:
        raise
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise out_of_memory(doing, error, memory()) from error


def first_line(error: BaseException) -> str:
    """The message without PyTorch's advice on environment variables."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
