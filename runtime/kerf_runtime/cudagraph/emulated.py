"""Static graphs on the CPU: the contract of a CUDA graph, without its speed.

Capture runs the forward once under a dispatch mode that records every operator call, with the very
tensors it read and wrote; compiled pieces are recorded as one opaque call each.  Replay runs the
recorded calls on the recorded tensors: no model code, no stitching, no shapes computed.  Reported as
``emulated`` everywhere.  It exists so that dispatch, capture bookkeeping, metrics and the whole
cluster flow are the real ones on machines without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from kerf_runtime.errors import CaptureError
from kerf_runtime.forward_context import ForwardContext, get_forward_context, set_forward_context

__all__ = ["EmulatedStaticGraph", "record_opaque_call"]

_UNINITIALISED = ("aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty")
_SYNCING = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)


@dataclass(frozen=True)
class _Node:
    """One recorded call and where its results go."""

    function: Callable[..., Any]
    args: Sequence[Any]
    kwargs: dict[str, Any]
    outputs: tuple[Tensor, ...]
    """Tensors that replay must fill with the results; empty when the call writes in place."""


class _Recorder(TorchDispatchMode):
    """Records operator calls; ``opaque`` records a compiled piece without looking inside."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes: list[_Node] = []
        self._paused = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Say no: torch would wrap the dispatch below so that its first call imports Dynamo, which
        takes seconds of a start that compiles nothing."""
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self._paused:
            return func(*args, **kwargs)
        if func in _SYNCING:
            raise CaptureError(
                f"the forward calls {func}, which waits for a value during capture",
                hint="Remove .item(), data-dependent branches and nonzero from the forward",
            )
        result = func(*args, **kwargs)
        flat, _ = tree_flatten((args, kwargs))
        read = {t.untyped_storage().data_ptr() for t in flat if isinstance(t, Tensor)}
        results = [t for t in tree_flatten(result)[0] if isinstance(t, Tensor)]
        fresh = [t for t in results if t.untyped_storage().data_ptr() not in read]
        if func._schema.name in _UNINITIALISED:
            return result  # the buffer exists; there is nothing to run again
        if func._schema.is_mutable:
            self.nodes.append(_Node(func, args, kwargs, ()))
        elif fresh:
            if len(fresh) != len(results):
                raise CaptureError(
                    f"{func} returns both new tensors and views, which cannot be recorded"
                )
            self.nodes.append(_Node(func, args, kwargs, tuple(results)))
        return result  # else a view: it stays valid because its storage does

    @contextmanager
    def paused(self) -> Iterator[None]:
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def opaque(
        self, call: Callable[[list[Any]], Sequence[Any]], inputs: Sequence[Any]
    ) -> Sequence[Any]:
        with self.paused():
            outputs = tuple(call(list(inputs)))
        self.nodes.append(_Node(lambda *args: call(list(args)), tuple(inputs), {}, outputs))
        return outputs


_recorder: _Recorder | None = None


def record_opaque_call(
    call: Callable[[list[Any]], Sequence[Any]], inputs: Sequence[Any]
) -> Sequence[Any]:
    """Run ``call(list(inputs))``; while a graph is being captured, record it as one node."""
    if _recorder is None:
        return call(list(inputs))
    return _recorder.opaque(call, inputs)


class EmulatedStaticGraph:
    """See ``kerf_runtime.platforms.StaticGraph`` for the contract."""

    def __init__(self) -> None:
        self._nodes: list[_Node] = []
        self._output: Any = None
        self._context: ForwardContext | None = None
        self._memory_bytes = 0

    @property
    def nodes(self) -> int:
        """Recorded calls."""
        return len(self._nodes)

    @property
    def memory_bytes(self) -> int:
        """Bytes of the distinct buffers that the recorded calls write."""
        return self._memory_bytes

    def capture(self, runnable: Callable[..., Any], inputs: Sequence[Any]) -> Any:
        """Run and record ``runnable(*inputs)``.

        Raises:
            CaptureError: the forward waits for a value, or another capture is running.
        """
        global _recorder
        if _recorder is not None:
            raise CaptureError(
                "a capture is already running: graphs do not nest inside one capture"
            )
        recorder = _Recorder()
        self._context = get_forward_context()
        _recorder = recorder
        try:
            with recorder:
                self._output = runnable(*inputs)
        finally:
            _recorder = None
        self._nodes = recorder.nodes
        written = {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
            for node in self._nodes
            for t in node.outputs
        }
        self._memory_bytes = sum(written.values())
        return self._output

    def replay(self) -> Any:
        """Run the recorded calls; metadata is read from the buffers of the captured context."""
        if self._context is None:
            raise CaptureError("replay of a graph that was never captured")
        with set_forward_context(self._context):
            for node in self._nodes:
                results = node.function(*node.args, **node.kwargs)
                if node.outputs:
                    flat = results if isinstance(results, (tuple, list)) else (results,)
                    for buffer, value in zip(node.outputs, flat, strict=True):
                        buffer.copy_(value)
        return self._output
