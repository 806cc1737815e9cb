"""Static graphs on the CPU: the contract of a CUDA graph, without its speed.

Capture runs the forward once under a dispatch mode that records every operator call, with the very
tensors it read and wrote; a compiled piece, or a forward compiled whole, is one opaque call.  Replay runs the
recorded calls on the recorded tensors: no model code, no stitching, no shapes computed.  Reported as
``emulated`` everywhere.  It exists so that dispatch, capture bookkeeping, metrics and the whole
cluster flow are the real ones on machines without a GPU.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from kerf_runtime.errors import CaptureError
from kerf_runtime.forward_context import ForwardContext, get_forward_context, set_forward_context

__all__ = ["EmulatedStaticGraph", "record_opaque_call"]

_UNINITIALISED = ("aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty")
# Under inference mode composite operators arrive whole, so these hide behind their own names.
_SYNCING = (
    torch.ops.aten.is_nonzero.default,
    torch.ops.aten.where.default,
    torch.ops.aten.repeat_interleave.self_Tensor,
)
# On the CPU these read memory and call no operator that reads.
_READING = (Tensor.tolist, Tensor.numpy, Tensor.__array__)
_MAKING = (torch.tensor, torch.as_tensor)
_INDEXING = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")
_FRAMEWORK = (str(Path(torch.__file__).parent), __file__)


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
        self.allocated: dict[int, int] = {}
        """Address -> bytes of every storage that was allocated during the capture."""
        self._paused = False

    @property
    def is_paused(self) -> bool:
        """Whether what runs is inside of one recorded call."""
        return self._paused

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
        flat, _ = tree_flatten((args, kwargs))
        _check_recordable(func, args)
        with self.paused():
            result = func(*args, **kwargs)
        read = {_storage(t) for t in flat if isinstance(t, Tensor)}
        results = [t for t in tree_flatten(result)[0] if isinstance(t, Tensor)]
        fresh = [t for t in results if _storage(t) not in read]
        self._allocate(fresh)
        if func._schema.name in _UNINITIALISED or func is torch.ops.aten.detach_.default:
            return result  # the buffer exists; there is nothing to run again
        if fresh and len(fresh) != len(results) and not func._schema.is_mutable:
            raise CaptureError(
                f"{func} returns both new tensors and views, which cannot be recorded"
            )
        if fresh:
            # An operator that also writes in place may return what it wrote: copied onto itself.
            self.nodes.append(_Node(func, args, kwargs, tuple(results)))
        elif func._schema.is_mutable:
            self.nodes.append(_Node(func, args, kwargs, ()))
        return result  # else a view: it stays valid because its storage does

    def _allocate(self, tensors: Sequence[Tensor]) -> None:
        self.allocated.update({_storage(t): t.untyped_storage().nbytes() for t in tensors})

    @contextmanager
    def paused(self) -> Iterator[None]:
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def opaque(
        self, call: Callable[[list[Any]], Sequence[Any]], inputs: Sequence[Any]
    ) -> Sequence[Any]:
        with self.paused():
            outputs = tuple(call(list(inputs)))
        read = {_storage(t) for t in inputs if isinstance(t, Tensor)}
        tensors = [t for t in outputs if isinstance(t, Tensor)]
        self._allocate([t for t in tensors if _storage(t) not in read])
        self.nodes.append(_Node(lambda *args: call(list(args)), tuple(inputs), {}, outputs))
        return outputs


class _Reads(TorchFunctionMode):
    """Refuses what reads values on the CPU without a call that the recorder sees; a GPU would wait for them."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if not self._recorder.is_paused and _reads(func, args):
            raise _waiting(func.__name__)
        return func(*args, **(kwargs or {}))


def _reads(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether a function of Python's reads the values of a tensor."""
    made_of = args[0] if func in _MAKING and args else None
    parts = made_of if isinstance(made_of, (list, tuple)) else ()
    return func in _READING or any(isinstance(part, Tensor) for part in tree_flatten(parts)[0])


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _check_recordable(func: Any, args: tuple[Any, ...]) -> None:
    """Refuse what no static graph can replay: waiting for a value, shapes that depend on values."""
    data_dependent = func in _SYNCING or torch.Tag.data_dependent_output in func.tags
    if func._schema.name in _INDEXING:
        indices = [index for index in args[1] if isinstance(index, Tensor)]
        data_dependent = any(i.dtype in (torch.bool, torch.uint8) for i in indices)
    elif torch.Tag.dynamic_output_shape in func.tags:
        data_dependent = True
    if data_dependent:
        raise _waiting(func)
    if torch.Tag.inplace_view in func.tags and func is not torch.ops.aten.detach_.default:
        raise CaptureError(
            f"the forward calls {func}, which changes the shape of a tensor in place",
            where=_calling_line(),
            hint="Use the form that returns a view, without the underscore",
        )


def _waiting(func: Any) -> CaptureError:
    return CaptureError(
        f"the forward calls {func}, which waits for a value during capture",
        where=_calling_line(),
        hint="Remove .item(), .tolist(), data-dependent branches, boolean masks and nonzero from the forward",
    )


def _calling_line() -> str | None:
    """File and line of the model's code that is running."""
    for frame in reversed(traceback.extract_stack()):
        if not frame.filename.startswith(_FRAMEWORK):
            return f"{frame.filename}:{frame.lineno} in {frame.name}"
    return None


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
        """Bytes of the distinct buffers that were allocated at capture and stay for replays."""
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
            with _Reads(recorder), recorder:
                self._output = runnable(*inputs)
        finally:
            _recorder = None
        self._nodes = recorder.nodes
        kept, _ = tree_flatten([(n.args, n.kwargs, n.outputs) for n in self._nodes])
        used = {_storage(t) for t in kept if isinstance(t, Tensor)}
        self._memory_bytes = sum(size for at, size in recorder.allocated.items() if at in used)
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
