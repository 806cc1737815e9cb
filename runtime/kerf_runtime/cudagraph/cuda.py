"""Static graphs on CUDA: ``torch.cuda.CUDAGraph`` with one memory pool and one capture stream per process.

Decisions, each with its reason:

* One pool.  Graphs of one process never run at the same time, so a buffer that one graph is done with
  may serve the next.  Captures go largest first, and smaller graphs fit what larger ones left.
* One side stream for all captures, because the allocator reuses memory of a pool within a stream only.
* Error mode ``thread_local``: a call of *this* thread that cannot be recorded (a wait, a plain
  allocation) fails the capture; other threads of the process, which know nothing of it, go on working.
* The garbage collector is off while graphs are captured: it could free a graph or a tensor of an
  earlier failure in the middle of a recording, which CUDA forbids.  PyTorch's cache is emptied once per
  pass, not per graph, as ``torch.cuda.graph`` would.
* A graph does not keep its output alive; ``weak_reference`` says why that is right.
"""

from __future__ import annotations

import ctypes
import gc
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from kerf_runtime.cudagraph.out_of_memory import first_line, is_out_of_memory, out_of_memory
from kerf_runtime.errors import CaptureError
from kerf_runtime.forward_context import get_forward_context

__all__ = ["CudaStaticGraph", "capture_pass", "driver_version", "release_memory", "weak_reference"]

_FRAMEWORK = (str(Path(torch.__file__).parent), str(Path(__file__).parent))


@dataclass(frozen=True)
class _Shared:
    """What all graphs of this process have in common.  The pool ends with the last of its graphs."""

    pool: Any
    stream: torch.cuda.Stream
    graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = field(default_factory=weakref.WeakSet)


_shared: _Shared | None = None
_failed: list[torch.cuda.CUDAGraph] = []
"""Graphs whose recording failed: PyTorch's allocators still refer to them, so they must not go away."""
_in_pass = False


def _shared_state() -> _Shared:
    """A new pool where the last one ended with its graphs; the stream stays, as libraries keep workspaces for it."""
    global _shared
    if _shared is None:
        _shared = _Shared(torch.cuda.graph_pool_handle(), torch.cuda.Stream())
    elif not _shared.graphs:
        _shared = _Shared(torch.cuda.graph_pool_handle(), _shared.stream)
    return _shared


def release_memory() -> None:
    """Give back to the device what PyTorch's allocator holds and nobody uses."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


@contextmanager
def capture_pass(*, tidy: bool = True) -> Iterator[None]:
    """Tidy memory once, then keep garbage collection away until everything is captured."""
    global _in_pass
    if tidy:
        gc.collect()
        release_memory()
    was_enabled = gc.isenabled()
    gc.disable()
    _in_pass = True
    try:
        yield
    finally:
        _in_pass = False
        if was_enabled:
            gc.enable()


class CudaStaticGraph:
    """See ``kerf_runtime.platforms.StaticGraph`` for the contract.

    The output holds no result before the first replay: a capture records and computes nothing.
    """

    def __init__(self) -> None:
        self._graph: torch.cuda.CUDAGraph | None = None
        self._output: Any = None
        self._nodes = 0
        self._memory_bytes = 0

    @property
    def nodes(self) -> int:
        """Kernels, copies and fills in the recorded graph."""
        return self._nodes

    @property
    def memory_bytes(self) -> int:
        """Bytes by which PyTorch's allocator grew for this capture; 0 where the shared pool had room.

        What the driver itself needs per node shows in the free memory of the device only; see
        ``GraphRunner.report``.
        """
        return self._memory_bytes

    def capture(self, runnable: Callable[..., Any], inputs: Sequence[Any]) -> Any:
        """Record ``runnable(*inputs)``; returns the output, which the caller may let go at once.

        Raises:
            CaptureError: the forward waits for the device, memory ran out, or a capture is running.
        """
        if torch.cuda.is_current_stream_capturing():
            raise CaptureError(
                "a capture is already running: graphs do not nest inside one capture"
            )
        if not _in_pass:
            with capture_pass():
                return self._record(runnable, inputs)
        return self._record(runnable, inputs)

    def _record(self, runnable: Callable[..., Any], inputs: Sequence[Any]) -> Any:
        shared = _shared_state()
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        before = _reserved_bytes()
        shared.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(shared.stream):
            graph.capture_begin(pool=shared.pool, capture_error_mode="thread_local")
            try:
                output = runnable(*inputs)
            except Exception as error:
                _abandon(graph, error)
                if isinstance(error, CaptureError):
                    raise
                raise _explained(error) from error
            try:
                graph.capture_end()
            except RuntimeError as error:
                _give_up(graph)
                raise _explained(error) from error
        shared.graphs.add(graph)
        try:
            graph.instantiate()
        except RuntimeError as error:
            raise _explained(error) from error
        self._nodes = _count_nodes(graph.raw_cuda_graph())
        self._memory_bytes = max(0, _reserved_bytes() - before)
        self._graph = graph
        self._output = weak_reference(output)
        return output

    def replay(self) -> Any:
        """Launch the graph on the current stream; returns the output buffers."""
        if self._graph is None:
            raise CaptureError("replay of a graph that was never captured")
        self._graph.replay()
        return self._output


def weak_reference(output: Any) -> Any:
    """``output`` with every CUDA tensor replaced by one of the same memory that does not own it.

    A tensor that owned its memory would keep the pool from ever using it again, for every piece of
    every size.  That is not needed: each reader of a piece's output runs before anything that may
    overwrite it, because replays follow the order of the capture, in which the output was alive until
    its last reader.  During the capture itself the caller gets the owning tensors and must keep them
    until the pieces that read them are recorded; only the output of the last piece has no such reader.
    """
    return tree_map_only(Tensor, _without_ownership, output)


def _without_ownership(tensor: Tensor) -> Tensor:
    if tensor.device.type != "cuda" or tensor.numel() == 0:
        return tensor
    storage = tensor.untyped_storage()
    alias = torch._C._construct_storage_from_data_pointer(
        storage.data_ptr(), tensor.device, storage.nbytes()
    )
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(alias, tensor.storage_offset(), tensor.size(), tensor.stride())


def _abandon(graph: torch.cuda.CUDAGraph, error: Exception) -> None:
    """End a capture whose forward failed, so that the process can go on."""
    try:
        graph.capture_end()
    except RuntimeError as ending:
        # Expected after a call that cannot be recorded; the first error is the one to report.
        error.add_note(f"the capture ended with: {first_line(ending)}")
        _give_up(graph)


def _give_up(graph: torch.cuda.CUDAGraph) -> None:
    """Start afresh after a capture that did not end: with another pool and another stream.

    ``capture_end`` tells the allocators that the capture is over only when it succeeds.  The one for
    the device can be told; the one for pinned memory goes on asking the graph which streams are its.
    """
    global _shared
    assert _shared is not None
    torch._C._cuda_endAllocateToPool(_shared.stream.device_index, _shared.pool)
    _failed.append(graph)
    _shared = None


def _explained(error: Exception) -> CaptureError:
    """What went wrong while recording, for whom it is useful: size, module, line, what to change."""
    descriptor = get_forward_context().descriptor
    what = "a graph" if descriptor is None else f"the graph of {descriptor.num_tokens} tokens"
    where = _culprit(error)
    if is_out_of_memory(error):
        from kerf_runtime.platforms.interface import DeviceMemory  # which imports this module

        free, total = torch.cuda.mem_get_info()
        memory = DeviceMemory(total, free, torch.cuda.memory_reserved())
        return out_of_memory(f"capturing {what}", error, memory, where=where)
    return CaptureError(
        f"the forward did something that cannot be recorded in {what}: {first_line(error)}",
        where=where,
        hint="Remove .item(), .tolist(), data-dependent branches, synchronisation and copies from "
        "pageable memory from the forward",
    )


def _culprit(error: Exception) -> str | None:
    """Module, file and line of the model's code that raised ``error``."""
    found: str | None = None
    module: str | None = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            module = type(owner).__name__
        name = frame.f_code.co_filename
        if not name.startswith(_FRAMEWORK):
            found = f"{name}:{line} in {frame.f_code.co_name}"
    if found is None:
        return module
    return f"{module}, {found}" if module else found


def _reserved_bytes() -> int:
    """Memory that PyTorch's allocator holds; the nested form, which is ten times as fast as the flat."""
    stats = torch.cuda.memory_stats_as_nested_dict()
    return int(stats["reserved_bytes"]["all"]["current"])


_driver: ctypes.CDLL | None = None


def _driver_call(name: str, *arguments: Any) -> None:
    """Call the driver: ``cu...`` on CUDA, the function of the same name with ``hip`` on ROCm.

    Raises:
        CaptureError: it refuses.
    """
    global _driver
    if _driver is None:
        _driver = ctypes.CDLL("libamdhip64.so" if torch.version.hip else "libcuda.so.1")
    prefix = "hip" if torch.version.hip else "cu"
    result = getattr(_driver, prefix + name)(*arguments)
    if result != 0:
        raise CaptureError(f"the driver's {prefix}{name} failed with error {result}")


def _count_nodes(graph: int) -> int:
    """Nodes of a graph of the runtime, which the driver's own interface takes as it is."""
    count = ctypes.c_size_t()
    _driver_call("GraphGetNodes", ctypes.c_void_p(graph), None, ctypes.byref(count))
    return count.value


def driver_version() -> int:
    """The newest CUDA version that the driver supports: 1000 * major + 10 * minor."""
    version = ctypes.c_int()
    _driver_call("DriverGetVersion", ctypes.byref(version))
    return version.value
