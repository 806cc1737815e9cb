"""Trace a model's forward once with Dynamo into one graph, before anything else happens to it.

This is the first stage of level 3: trace -> split -> compile -> stitch.  The graph takes parameters
and buffers as inputs; every graph input is named here (``InputRef``) so that the stitched forward can
be rebuilt in another process without Dynamo.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx, nn

from kerf_runtime.compilation import dynamo, internals
from kerf_runtime.compilation.assumptions import check_assumptions
from kerf_runtime.compilation.counters import compilation_counter, compile_gate
from kerf_runtime.compilation.decorator import (
    CompileSupport,
    IntermediateTensors,
    compile_support,
    tensors_of,
)
from kerf_runtime.compilation.mutation import (
    StateWrite,
    find_state_writes,
    refuse_state_writes,
)
from kerf_runtime.compilation.plan import InputRef
from kerf_runtime.errors import CompileError, GraphBreakError
from kerf_runtime.forward_context import ForwardContext, set_forward_context

__all__ = [
    "STATIC_GRAPHS",
    "Arguments",
    "TracedGraph",
    "count_guard_evaluations",
    "describe_graph",
    "trace_forward",
    "tracing",
]

STATIC_GRAPHS = "static graphs are on: a replay repeats writes, for padded and warm-up batches too, and assigns nothing"
"""Why writes to state are refused."""

Arguments = Mapping[str, Tensor | IntermediateTensors | None]
"""Arguments of one call, by name."""


@dataclass(frozen=True)
class TracedGraph:
    """One Dynamo graph of a whole forward, with fake values in ``node.meta['example_value']``."""

    module: fx.GraphModule
    inputs: tuple[InputRef, ...]
    fake_inputs: tuple[Any, ...]
    sources: tuple[str, ...]
    """Dotted names of the Python modules whose code was traced."""
    absent: tuple[str, ...] = ()
    """Arguments that were None."""
    state_writes: tuple[StateWrite, ...] = ()
    """Writes to parameters and buffers that the graph makes."""
    assignments: tuple[StateWrite, ...] = ()
    """Assignments to Python objects that are not in the graph."""


class _Traced(Exception):  # noqa: N818 - control flow, never seen outside this module
    """Leaves Dynamo once the graph is in hand: nothing is compiled and no guard is installed."""


def trace_forward(
    model: nn.Module, arguments: Arguments, *, static_graphs: bool = False
) -> TracedGraph:
    """Trace ``model.forward(**arguments)``, once in the life of ``model``.

    Args:
        model: its class is decorated with ``@support_torch_compile``, which says what is dynamic.
        arguments: name -> example, at least 2 in every dynamic dimension (torch specialises 0 and 1).
        static_graphs: whether static graphs will be recorded, which forbids writes to buffers.

    Raises:
        GraphBreakError: the forward does not trace into exactly one graph, or was traced before;
            shows the user's stack.
        CompileError: the class is not decorated; a wrong argument; a graph input that is no argument,
            size, parameter or buffer; the graph holds for some numbers of tokens only; or the forward
            writes state that would be lost or repeated.
    """
    support = compile_support(model)
    captured: list[TracedGraph] = []

    def backend(module: fx.GraphModule, inputs: list[Any]) -> Any:
        captured.append(describe_graph(module, inputs, model, support, arguments))
        raise _Traced

    with tracing(model, support, arguments):
        compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=None)
        try:
            compiled(**arguments)
        except dynamo.BACKEND_ERROR as error:
            if not isinstance(error.inner_exception, _Traced):  # type: ignore[attr-defined]
                raise
    if len(captured) != 1:
        raise GraphBreakError(
            f"expected one graph from {support.where}, got {len(captured)}", where=support.where
        )
    traced = captured[0]
    refuse_state_writes(
        traced.assignments,
        where=support.where,
        why="only the traced graph is run: the assignment would not happen",
    )
    if static_graphs:
        refuse_state_writes(
            traced.state_writes,
            where=support.where,
            why=STATIC_GRAPHS,
        )
    return traced


_first_traces: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
"""Models that were traced, with the stack that did it."""


@contextmanager
def tracing(model: nn.Module, support: CompileSupport, arguments: Arguments) -> Iterator[None]:
    """Surroundings of the one trace of ``model``: checks before, Dynamo's errors made ours, counters.

    Marks the dynamic dimensions and leaves nothing of Dynamo's caches behind.

    Raises:
        GraphBreakError, CompileError: as in ``trace_forward``.
    """
    compile_gate.check(f"a trace of {type(model).__name__}")
    if model in _first_traces:
        raise GraphBreakError(
            f"a second trace of {support.where} was attempted; the first was started here:\n"
            f"{_first_traces[model].rstrip()}\n",
            where=support.where,
            hint="A model is traced once in its life: keep what the first trace gave, or load the model "
            "again",
        )
    support.check_arguments(arguments)
    for tensor, dim in support.dynamic_tensors(arguments):
        internals.mark_dynamic(tensor, dim)
    internals.reset_dynamo()
    try:
        with torch.inference_mode(False), torch.no_grad(), set_forward_context(ForwardContext()):
            yield
    except dynamo.BACKEND_ERROR as error:
        raise error.inner_exception from error  # type: ignore[attr-defined]
    except dynamo.GRAPH_BREAKS as error:
        raise GraphBreakError(
            f"the forward of {type(model).__name__} does not trace into one graph: {error}",
            where=type(model).__name__,
            hint="Remove the construct shown in the stack above from the forward",
        ) from error
    finally:
        internals.reset_dynamo()
    _first_traces[model] = "".join(traceback.format_list(traceback.extract_stack()[-6:-2]))
    compilation_counter.dynamo_traces += 1
    compilation_counter.graphs_seen += 1


def describe_graph(
    module: fx.GraphModule,
    inputs: list[Any],
    model: nn.Module,
    support: CompileSupport,
    arguments: Arguments,
) -> TracedGraph:
    """Name every input of a graph that Dynamo handed to its back end; to be called from there.

    Raises:
        CompileError: as in ``trace_forward``.
    """
    state = {id(t): name for name, t in model.named_buffers(remove_duplicate=True)}
    state |= {id(t): name for name, t in model.named_parameters(remove_duplicate=True)}
    given = {
        id(tensor): InputRef("argument", name, key=key)
        for name, value in arguments.items()
        for key, tensor in tensors_of(value)
    }
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    fakes = tuple(node.meta["example_value"] for node in placeholders)
    check_assumptions(dynamo.fake_mode().shape_env, where=support.where)

    argument_sizes: dict[str, InputRef] = {}
    for real, fake in zip(inputs, fakes, strict=True):
        if isinstance(fake, Tensor) and id(real) in given:
            ref = given[id(real)]
            for dim, size in enumerate(fake.shape):
                if not isinstance(size, int):
                    argument_sizes.setdefault(
                        str(size), InputRef("size", ref.name, dim, key=ref.key)
                    )

    refs = []
    for node, real, fake in zip(placeholders, inputs, fakes, strict=True):
        if id(real) in given:
            refs.append(given[id(real)])
        elif id(real) in state:
            refs.append(InputRef("state", state[id(real)]))
        elif str(fake) in argument_sizes:
            refs.append(argument_sizes[str(fake)])
        else:
            raise CompileError(
                f"the traced graph has an input {node.name!r} ({fake!r}) that is no argument, size, "
                "parameter or buffer of the model",
                where=type(model).__name__,
                hint="Register the tensor as a buffer, or pass it as an argument of forward",
            )
    named = {
        node.name: ref.name
        for node, ref in zip(placeholders, refs, strict=True)
        if ref.kind == "state"
    }
    return TracedGraph(
        module,
        tuple(refs),
        fakes,
        _module_names(dynamo.traced_code()),
        absent=tuple(name for name, value in arguments.items() if value is None),
        state_writes=find_state_writes(module.graph, named),
        assignments=_assignments(),
    )


def _assignments() -> tuple[StateWrite, ...]:
    """Assignments that the running trace put off until after the graph."""
    return tuple(
        StateWrite(
            f"{effect.owner}.{name}".removeprefix("."),
            "an assignment",
            effect.stack,
            frozen=not is_tensor,
        )
        for effect in dynamo.pending_side_effects()
        for name, is_tensor in effect.names or (("?", False),)
    )


def _module_names(code: list[CodeType]) -> tuple[str, ...]:
    """Dotted names of the modules the traced code objects came from, sorted."""
    by_file = {
        str(Path(file).resolve()): name
        for name, module in list(sys.modules.items())
        if isinstance(file := getattr(module, "__file__", None), str) and name != "__main__"
    }
    names = set()
    for item in code:
        if item.co_filename.startswith("<frozen "):
            continue  # part of the interpreter, whose version is a factor of its own
        path = str(Path(item.co_filename).resolve())
        if path not in by_file:
            raise CompileError(
                f"traced code {item.co_name!r} comes from {item.co_filename}, which is no importable module",
                hint="Define models in an importable Python module: its content is part of the cache factors",
            )
        names.add(by_file[path])
    return tuple(sorted(names))


def count_guard_evaluations() -> None:
    """Count every guard that Dynamo evaluates in this process from now on (none should be)."""

    def count() -> None:
        compilation_counter.guards_evaluated += 1

    dynamo.set_guard_hook(count)
