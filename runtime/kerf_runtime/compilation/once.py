"""Levels 1 and 2, for debugging: the whole forward through ``torch.compile``.

Level 1 is plain ``torch.compile``: guards, and as many traces as Dynamo likes.  Level 2 traces once and
from then on runs the bytecode that Dynamo made, without its guards.  Nothing of either is cached; level
3 needs no bytecode at all (docs/adr/0002).
"""

from __future__ import annotations

import dis
import importlib
import importlib.util
import inspect
import io
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, fx, nn

from kerf_runtime.compilation import dynamo, internals
from kerf_runtime.compilation.assumptions import check_assumptions
from kerf_runtime.compilation.backends import backend_named
from kerf_runtime.compilation.backends.indexing import index_for_every_step
from kerf_runtime.compilation.backends.options import REFUSED_OFF
from kerf_runtime.compilation.counters import compilation_counter, compile_gate
from kerf_runtime.compilation.decorator import (
    ArgumentPresence,
    IntermediateTensors,
    compile_support,
    tensors_of,
)
from kerf_runtime.compilation.mutation import (
    StateWrite,
    bytecode_stores,
    refuse_state_writes,
)
from kerf_runtime.compilation.trace import (
    STATIC_GRAPHS,
    Arguments,
    TracedGraph,
    count_guard_evaluations,
    describe_graph,
    tracing,
)
from kerf_runtime.config.compilation import CompilationLevel, CompilerBackendName
from kerf_runtime.cudagraph.emulated import record_opaque_call
from kerf_runtime.errors import CompileError, GraphBreakError

__all__ = ["CompiledForward", "check_same_layout", "decompiled"]

TRANSFORMED_CODE = "transformed_code.py"


class _Captured(Exception):  # noqa: N818 - control flow, never seen outside this module
    """Leaves the first call when there is bytecode, before it has computed anything."""


class CompiledForward:
    """The forward of ``model``, compiled whole; call it like ``model``.

    Args:
        model: its class is decorated with ``@support_torch_compile``.
        level: 1 or 2.
        backend: what compiles the graph.
        options: options of Inductor.
        static_graphs: whether static graphs will be recorded, which forbids writes to state (level 2).
        dump_dir: folder that gets ``transformed_code.py`` (level 2).

    Attributes:
        traced: the graph (level 2, after the trace).
        code: the transformed bytecode (level 2, after the trace).

    Raises:
        CompileError: another level; an undecorated class; a version of torch that was not tested.
        ConfigError: an option that Inductor does not have, or that cannot be used here.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        level: CompilationLevel,
        backend: CompilerBackendName = CompilerBackendName.INDUCTOR,
        options: Mapping[str, Any] | None = None,
        static_graphs: bool = False,
        dump_dir: Path | None = None,
    ) -> None:
        if level not in (CompilationLevel.DYNAMO_AS_IS, CompilationLevel.DYNAMO_ONCE):
            raise CompileError(f"level {int(level)} does not run a whole forward through Dynamo")
        self.model = model
        self.support = compile_support(model)
        # At once: the first call, which would find out too, only comes with the warm-up.
        backend_named(backend.value).check(options or {})
        self.level = level
        self.backend = backend
        self.options = dict(options or {})
        self.static_graphs = static_graphs
        self.dump_dir = dump_dir
        self.traced: TracedGraph | None = None
        self.code: CodeType | None = None
        self._run: Callable[..., Any] = self._first_call
        if level is CompilationLevel.DYNAMO_AS_IS:
            self._run = _outside_of_modes(model.forward, self._compile_again)
            count_guard_evaluations()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """``model.forward(*args, **kwargs)``; the first call compiles unless ``trace`` was called.

        Raises:
            GraphBreakError, CompileError: as in ``trace``, or an argument is None that was a tensor in
                the trace, or the other way round.
        """
        return self._run(*args, **kwargs)

    def trace(self, arguments: Arguments) -> None:
        """The one trace of level 2, computing nothing; afterwards calls evaluate no guard.

        Args:
            arguments: name -> example, at least 2 in every dynamic dimension.

        Raises:
            GraphBreakError: the forward is not one graph, or was traced before; shows the user's stack.
            CompileError: as in ``trace_forward``; or the bytecode cannot be run in place of the
                forward's own, assigns something else than a tensor, or writes any state while static
                graphs are on (shows it decompiled).
        """
        if self.level is not CompilationLevel.DYNAMO_ONCE:
            raise CompileError("only level 2 has one trace", where=self.support.where)
        graphs: list[TracedGraph] = []
        compiled: list[Callable[..., Any]] = []

        def backend(module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
            graphs.append(describe_graph(module, inputs, self.model, self.support, arguments))
            compiled.append(self._compile(module, inputs))
            # What the compiler assumed is a guard that nobody will evaluate.
            check_assumptions(dynamo.fake_mode().shape_env, where=self.support.where)
            return _stop

        with (
            tracing(self.model, self.support, arguments),
            dynamo.captured_bytecode() as pairs,
            suppress(_Captured),
        ):
            torch.compile(self.model.forward, backend=backend, fullgraph=True)(**arguments)
        self.traced, self.code = self._one(graphs), self._bytecode(pairs)
        source = decompiled(self.code)
        if self.dump_dir is not None:
            self.dump_dir.mkdir(parents=True, exist_ok=True)
            (self.dump_dir / TRANSFORMED_CODE).write_text(source)
        refuse_state_writes(
            [write for write in self.traced.assignments if write.frozen],
            where=self.support.where,
            why="without guards it would assign the value of the trace at every call",
            source=source,
        )
        if self.static_graphs:
            refuse_state_writes(
                _all_writes(self.traced, self.code),
                where=self.support.where,
                why=STATIC_GRAPHS,
                source=source,
            )
        presence = ArgumentPresence(self.support, arguments)
        self._run = presence.guard(self._function(self.code, compiled[0]))
        count_guard_evaluations()

    def _first_call(self, *args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(self.model.forward).bind(*args, **kwargs)
        self.trace({name: _alone(value) for name, value in bound.arguments.items()})
        return self._run(*args, **kwargs)

    def _compile_again(self, module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        """Level 1: one of perhaps many graphs.  After start-up it is counted, and stalls a request."""
        if not compile_gate.open:
            compilation_counter.compilations_after_startup += 1
        compilation_counter.dynamo_traces += 1
        compilation_counter.graphs_seen += 1
        return self._compile(module, inputs)

    def _compile(self, module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        compilation_counter.backend_compilations += 1
        if self.backend is CompilerBackendName.EAGER:
            return module.forward
        compilation_counter.inductor_compilations += 1
        options = {**REFUSED_OFF, **self.options}
        indexing: AbstractContextManager[None] = nullcontext()
        if self.level is CompilationLevel.DYNAMO_ONCE:
            # Inductor's own cache may hold the same graph, compiled for guards that are evaluated.
            options["fx_graph_cache"], indexing = False, index_for_every_step()
        with indexing:
            result: Callable[..., Any] = internals.inductor_compile(module, inputs, options=options)
        return result

    def _one(self, graphs: list[TracedGraph]) -> TracedGraph:
        if len(graphs) != 1:
            raise GraphBreakError(
                f"expected one graph from {self.support.where}, got {len(graphs)}",
                where=self.support.where,
            )
        return graphs[0]

    def _bytecode(self, pairs: list[tuple[CodeType, CodeType]]) -> CodeType:
        original = self.support.forward.__code__
        transformed = [new for old, new in pairs if old is original]
        if len(transformed) != 1:
            names = ", ".join(f"{old.co_name} ({old.co_filename})" for old, _ in pairs) or "nothing"
            raise CompileError(
                f"Dynamo transformed {names} instead of forward alone",
                where=self.support.where,
                hint="Remove decorators from forward, or use level 3, which needs no bytecode",
            )
        check_same_layout(original, transformed[0], where=self.support.where)
        return transformed[0]

    def _function(self, code: CodeType, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """The forward with other code, bound to the model; calls ``compiled`` without Dynamo's wrapper."""
        forward = self.support.forward
        assert isinstance(forward, FunctionType)
        names = dynamo.compiled_names(code)
        # An emulated graph sees no kernel of Inductor: the whole graph is one recorded call.
        recordable = partial(_recorded, compiled)
        function = FunctionType(
            code,
            {**forward.__globals__, **dict.fromkeys(names, recordable)},
            forward.__name__,
            forward.__defaults__,
            forward.__closure__,
        )
        return MethodType(function, self.model)


def _alone(value: Any) -> Any:
    """An argument of the same layout in memory of its own, with any values: tracing reads none.

    Where the engine's buffers begin in the memory they share would be an input of the graph, a number that
    the forward is not given.
    """
    if value is None:
        return None
    with torch.inference_mode(False):
        alone = {
            key: torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
            )
            for key, tensor in tensors_of(value)
        }
    return alone[""] if isinstance(value, Tensor) else IntermediateTensors(alone)


def _outside_of_modes(
    forward: Callable[..., Any], backend: Callable[..., Any]
) -> Callable[..., Any]:
    """``forward`` through ``torch.compile``, and as it is under a dispatch mode (a watched or emulated recording).

    There Dynamo would leave the forward alone and compile what operators call, and the mode itself.
    """
    compiled = torch.compile(forward, backend=backend)
    alone = torch.compiler.disable(forward)
    watched = internals.is_in_torch_dispatch_mode

    def run(*args: Any, **kwargs: Any) -> Any:
        return (alone if watched() else compiled)(*args, **kwargs)

    return run


def _recorded(compiled: Callable[..., Any], *inputs: Any) -> Any:
    return record_opaque_call(lambda given: compiled(*given), inputs)


def _stop(*_: Any) -> Any:
    raise _Captured


def _all_writes(traced: TracedGraph, code: CodeType) -> list[StateWrite]:
    """Writes of the graph, what Dynamo says is assigned, and what else the bytecode stores."""
    known = [*traced.state_writes, *traced.assignments]
    names = {write.name.rpartition(".")[2] for write in known}
    return known + [
        StateWrite(name, "an assignment", "") for name in bytecode_stores(code) if name not in names
    ]


def check_same_layout(original: CodeType, transformed: CodeType, *, where: str) -> None:
    """Refuse bytecode that cannot be run with the arguments and the closure of the original.

    Raises:
        CompileError: names what differs, and how.
    """
    for what, old, new in zip(_LAYOUT, _layout(original), _layout(transformed), strict=True):
        if old != new:
            raise CompileError(
                f"the transformed code has other {what} than forward: {new} instead of {old}",
                where=where,
                hint="Use level 3, which needs no bytecode, and report this as a bug",
            )


_LAYOUT = ("argument counts", "kinds of arguments", "arguments", "cell variables", "free variables")


def _layout(code: CodeType) -> tuple[Any, ...]:
    counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount)
    variable = tuple(
        bool(code.co_flags & flag) for flag in (inspect.CO_VARARGS, inspect.CO_VARKEYWORDS)
    )
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + sum(variable)]
    return counts, variable, names, code.co_cellvars, code.co_freevars


def decompiled(code: CodeType) -> str:
    """Readable form of bytecode: Python source if depyf is installed, else its instructions."""
    if importlib.util.find_spec("depyf") is None:
        return _instructions(code, "depyf is not installed (pip install depyf shows Python)")
    depyf = importlib.import_module("depyf")
    try:
        return str(depyf.decompile(code))
    except Exception as error:  # noqa: BLE001 - a tool for people must not stop a start; shown
        return _instructions(code, f"depyf cannot decompile it: {type(error).__name__}: {error}")


def _instructions(code: CodeType, why: str) -> str:
    buffer = io.StringIO()
    dis.dis(code, file=buffer)
    title = f"The bytecode of {code.co_name} as Dynamo transformed it; {why}."
    return "".join(
        f"# {line}".rstrip() + "\n" for line in [title, "", *buffer.getvalue().splitlines()]
    )
