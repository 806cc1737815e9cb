"""Trace a model's forward once with Dynamo into one graph, before anything else happens to it.

This is the first stage of level 3: trace -> split -> compile -> stitch.  The graph takes parameters
and buffers as inputs; every graph input is named here (``InputRef``) so that the stitched forward can
be rebuilt in another process without Dynamo.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch import Tensor, fx, nn

from kerf_runtime.compilation.assumptions import check_assumptions
from kerf_runtime.compilation.counters import compilation_counter, compile_gate
from kerf_runtime.compilation.plan import InputRef
from kerf_runtime.errors import CompileError, GraphBreakError
from kerf_runtime.forward_context import ForwardContext, set_forward_context

__all__ = ["TracedGraph", "count_guard_evaluations", "trace_forward"]


@dataclass(frozen=True)
class TracedGraph:
    """One Dynamo graph of a whole forward, with fake values in ``node.meta['example_value']``."""

    module: fx.GraphModule
    inputs: tuple[InputRef, ...]
    fake_inputs: tuple[Any, ...]
    sources: tuple[str, ...]
    """Dotted names of the Python modules whose code was traced."""


class _Traced(Exception):  # noqa: N818 - control flow, never seen outside this module
    """Leaves Dynamo once the graph is in hand: nothing is compiled and no guard is installed."""


def trace_forward(model: nn.Module, arguments: dict[str, Tensor]) -> TracedGraph:
    """Trace ``model.forward(**arguments)``; dimension 0 of every argument is dynamic.

    Args:
        model: the module; its forward takes exactly the given arguments.
        arguments: name -> example tensor, dimension 0 at least 2 (0 and 1 are specialised by torch).

    Raises:
        GraphBreakError: the forward does not trace into exactly one graph; shows the user's stack.
        CompileError: a graph input that is no argument, size, parameter or buffer; or the graph holds
            for some numbers of tokens only.
    """
    compile_gate.check(f"a trace of {type(model).__name__}")
    captured: list[TracedGraph] = []

    def backend(module: fx.GraphModule, inputs: list[Any]) -> Any:
        captured.append(_describe(module, inputs, model, arguments))
        raise _Traced

    for tensor in arguments.values():
        torch._dynamo.mark_dynamic(tensor, 0)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=None)
    try:
        with torch.inference_mode(False), torch.no_grad(), set_forward_context(ForwardContext()):
            compiled(**arguments)
    except torch._dynamo.exc.BackendCompilerFailed as error:
        if not isinstance(error.inner_exception, _Traced):
            raise error.inner_exception from error
    except (torch._dynamo.exc.Unsupported, torch._dynamo.exc.UserError) as error:
        raise GraphBreakError(
            f"the forward of {type(model).__name__} does not trace into one graph: {error}",
            where=type(model).__name__,
            hint="Remove the construct shown in the stack above from the forward",
        ) from error
    finally:
        torch._dynamo.reset()
    if len(captured) != 1:
        raise GraphBreakError(
            f"expected one graph from {type(model).__name__}.forward, got {len(captured)}",
            where=type(model).__name__,
        )
    compilation_counter.dynamo_traces += 1
    compilation_counter.graphs_seen += 1
    return captured[0]


def _describe(
    module: fx.GraphModule, inputs: list[Any], model: nn.Module, arguments: dict[str, Tensor]
) -> TracedGraph:
    state = {id(t): name for name, t in model.named_buffers(remove_duplicate=True)}
    state |= {id(t): name for name, t in model.named_parameters(remove_duplicate=True)}
    argument_names = {id(t): name for name, t in arguments.items()}
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    fakes = tuple(node.meta["example_value"] for node in placeholders)
    fake_mode = torch._guards.TracingContext.get().fake_mode
    assert fake_mode is not None
    check_assumptions(fake_mode.shape_env, where=f"{type(model).__name__}.forward")

    argument_sizes: dict[str, InputRef] = {}
    for real, fake in zip(inputs, fakes, strict=True):
        if isinstance(fake, Tensor) and id(real) in argument_names:
            for dim, size in enumerate(fake.shape):
                if not isinstance(size, int):
                    ref = InputRef("size", argument_names[id(real)], dim)
                    argument_sizes.setdefault(str(size), ref)

    refs = []
    for node, real, fake in zip(placeholders, inputs, fakes, strict=True):
        if id(real) in argument_names:
            refs.append(InputRef("argument", argument_names[id(real)]))
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
    code = torch._guards.TracingContext.get_traced_code() or []
    return TracedGraph(module, tuple(refs), fakes, _module_names(code))


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

    def completed(cache_hit: bool) -> bool:
        compilation_counter.guards_evaluated += 1
        return cache_hit

    torch._C._dynamo.eval_frame.set_guard_complete_hook(completed)
