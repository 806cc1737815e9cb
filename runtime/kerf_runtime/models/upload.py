"""Reads stored tensors with several threads, straight to where they belong.

One thread gets a fraction of what a disk, a network or the page cache can give.  A GPU is fed through pinned
buffers, one for each thread: while one is copied, others are filled.  On a CPU the bytes are read into the
parameter itself.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from kerf_runtime.errors import ModelError

__all__ = ["StoredTensor", "Upload"]

_THREADS = 8
_PART_BYTES = 16 * 2**20
_POLL_SECONDS = 0.5


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies in a file, in one piece and row by row.

    Attributes:
        path: the file.
        offset: of its first byte.
        dtype: of its elements, in the machine's byte order.
        shape: row-major.
    """

    path: Path
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class Upload:
    """Fills tensors on one device from files; a context manager at whose end all are filled.

    Args:
        device: where the tensors are.
        threads: how many read at once.

    Attributes:
        pending_bytes: what was started and is not there yet.
    """

    def __init__(self, device: torch.device | str, *, threads: int = _THREADS) -> None:
        self.device = torch.device(device)
        self.pending_bytes = 0
        self._lock = threading.Lock()
        self._files: dict[Path, int] = {}
        self._parts: list[Future[None]] = []
        self._stack = ExitStack()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="kerf-weights")
        self._pinned = _PinnedBuffers(threads, self.device) if self.device.type == "cuda" else None

    def start(self, target: Tensor, stored: StoredTensor) -> None:
        """Have ``target`` filled; it may be read when the whole upload is finished.

        Args:
            target: contiguous, on the device, of the stored shape and data type.
            stored: what it shall hold.
        """
        self._parts += self._submit(target, stored)

    def fetch(self, stored: StoredTensor) -> Tensor:
        """The tensor, on the device, once all of it is there.

        Raises:
            ModelError: the file cannot be read, or is shorter than it said.
        """
        tensor = torch.empty(stored.shape, dtype=stored.dtype, device=self.device)
        for part in self._submit(tensor, stored):
            part.result()
        return tensor

    def finish(self, progress: Callable[[], None]) -> None:
        """Wait until everything is filled.

        Args:
            progress: called now and then.

        Raises:
            ModelError: a file cannot be read, or is shorter than it said.
        """
        waiting = set(self._parts)
        while waiting:
            done, waiting = wait(waiting, timeout=_POLL_SECONDS, return_when=FIRST_EXCEPTION)
            for part in done:
                part.result()
            progress()
        self._parts.clear()

    def __enter__(self) -> Upload:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Nothing is written after this; what was not begun after an error never is."""
        self._pool.shutdown(wait=True, cancel_futures=error is not None)
        self._stack.close()
        if self._pinned is not None:
            self._pinned.close()
        if error is None:
            for part in self._parts:
                part.result()

    def _submit(self, target: Tensor, stored: StoredTensor) -> list[Future[None]]:
        """The parts of a tensor, given to the threads."""
        assert target.is_contiguous()
        assert target.dtype is stored.dtype
        if not target.numel():
            return []
        into = target.reshape(-1).view(torch.uint8)
        file = self._open(stored.path)
        # The memory may have been somebody else's, whose kernels still run.
        free = None
        if self.device.type == "cuda":
            free = torch.cuda.Event()
            free.record(torch.cuda.current_stream(self.device))
        with self._lock:
            self.pending_bytes += into.numel()
        return [
            self._pool.submit(
                self._move,
                into[first : first + _PART_BYTES],
                file,
                stored.offset + first,
                stored.path,
                free,
            )
            for first in range(0, into.numel(), _PART_BYTES)
        ]

    def _open(self, path: Path) -> int:
        if path not in self._files:
            try:
                self._files[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise _unreadable(path, error) from error
            self._stack.callback(os.close, self._files[path])
        return self._files[path]

    def _move(
        self, into: Tensor, file: int, offset: int, path: Path, free: torch.cuda.Event | None
    ) -> None:
        """One part, from the file to the device."""
        try:
            if free is None or self._pinned is None:
                _read(file, into, offset, path)
            else:
                buffer, stream = self._pinned.mine()
                _read(file, buffer[: into.numel()], offset, path)
                with torch.cuda.stream(stream):
                    stream.wait_event(free)
                    into.copy_(buffer[: into.numel()], non_blocking=True)
                    stream.synchronize()
        except OSError as error:
            raise _unreadable(path, error) from error
        with self._lock:
            self.pending_bytes -= into.numel()


class _PinnedBuffers:
    """A buffer and a stream for every thread; given back to the system at the end, unlike the allocator's."""

    def __init__(self, threads: int, device: torch.device) -> None:
        self._device = device
        self._memory = torch.empty(threads, _PART_BYTES, dtype=torch.uint8)
        error = torch.cuda.cudart().cudaHostRegister(
            self._memory.data_ptr(), self._memory.numel(), 0
        )
        torch.cuda.check_error(int(error))
        self._idle = list(self._memory)
        self._mine = threading.local()

    def mine(self) -> tuple[Tensor, torch.cuda.Stream]:
        """Of the calling thread."""
        if not hasattr(self._mine, "pair"):
            self._mine.pair = (self._idle.pop(), torch.cuda.Stream(self._device))
        pair: tuple[Tensor, torch.cuda.Stream] = self._mine.pair
        return pair

    def close(self) -> None:
        """No thread uses them any more."""
        error = torch.cuda.cudart().cudaHostUnregister(self._memory.data_ptr())
        torch.cuda.check_error(int(error))


def _read(file: int, into: Tensor, offset: int, path: Path) -> None:
    """Fill ``into`` (bytes in host memory) from ``offset`` on."""
    rest = into.numpy().data
    while rest:
        count = os.preadv(file, [rest], offset)
        if not count:
            raise ModelError(
                f"the file has {os.fstat(file).st_size} bytes and ends in the middle of a tensor",
                where=str(path),
                hint="It may be truncated: copy or download it again",
            )
        rest, offset = rest[count:], offset + count


def _unreadable(path: Path, error: OSError) -> ModelError:
    return ModelError(f"the weights cannot be read: {error.strerror}", where=str(path))
