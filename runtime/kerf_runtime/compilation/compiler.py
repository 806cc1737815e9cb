"""Cold compile of a model: trace, split, compile every distinct piece for every shape, plan.

Dynamo leaves a fake value at every input of every piece, so no second walk through the graph is needed
to know shapes: nothing of the model is computed or allocated here, and no kernel of it is launched
except to time candidates of static sizes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import SymInt, Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from kerf_runtime.compilation.artifact import CompiledPiece
from kerf_runtime.compilation.backends import CompilerBackend, CompileRequest, backend_named
from kerf_runtime.compilation.fingerprint import fingerprint_piece
from kerf_runtime.compilation.piecewise import find_token_input
from kerf_runtime.compilation.plan import StitchPlan, build_plan
from kerf_runtime.compilation.split import (
    Piece,
    resolve_splitting_ops,
    split_graph,
    split_source,
)
from kerf_runtime.compilation.trace import count_guard_evaluations, trace_forward
from kerf_runtime.errors import ConfigError

__all__ = ["CompileOptions", "CompiledModel", "Progress", "compile_model"]

Progress = Callable[[str, str, float | None], None]
"""Called with a phase name, a detail for people and the fraction done, if known."""

_EXAMPLE_TOKENS = 32


@dataclass(frozen=True)
class CompileOptions:
    """How to compile.

    Attributes:
        splitting_ops: operators at which the graph is cut, ``namespace::name``.
        backend: name of the compiler back end.
        inductor: options of the back end, as the user gave them.
        sizes: numbers of tokens that get code of their own beside the general one.
    """

    splitting_ops: tuple[str, ...]
    backend: str = "inductor"
    inductor: Mapping[str, Any] = field(default_factory=dict)
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True)
class CompiledModel:
    """Everything that is stored: the plan, the pieces by fingerprint, the traced modules, timings.

    ``graph_source`` is the split graph as readable Python.
    """

    plan: StitchPlan
    pieces: dict[str, CompiledPiece]
    sources: tuple[str, ...]
    timings: dict[str, float]
    graph_source: str


def compile_model(
    model: nn.Module, options: CompileOptions, *, device: torch.device, progress: Progress
) -> CompiledModel:
    """Trace ``model.forward(input_ids, positions)`` once and compile every distinct piece.

    Raises:
        GraphBreakError: the forward is not one graph.
        CompileError: a piece cannot be compiled for a symbolic number of tokens.
        ConfigError: an unknown Inductor option, or a splitting op that is unknown or never called.
    """
    backend = backend_named(options.backend)
    ops = resolve_splitting_ops(options.splitting_ops)
    backend.check(options.inductor)
    timings: dict[str, float] = {}
    clock = time.perf_counter()

    def lap(phase: str) -> None:
        nonlocal clock
        now = time.perf_counter()
        timings[phase] = now - clock
        clock = now

    progress("trace", "one Dynamo trace", None)
    arguments = _example_arguments(device)
    traced = trace_forward(model, arguments)
    count_guard_evaluations()
    lap("trace")
    progress("split", "cutting at " + (", ".join(options.splitting_ops) or "nothing"), None)
    split = split_graph(traced.module, ops)
    if ops and not any(piece.is_splitting for piece in split.pieces):
        raise ConfigError(
            f"the forward of {type(model).__name__} calls none of {', '.join(options.splitting_ops)}",
            where="compilation.splittingOps",
            hint="Name operators as the model calls them (torch.ops.namespace.name), or an empty list",
        )
    fingerprints = {piece.name: fingerprint_piece(piece.module) for piece in split.compilable}
    plan = build_plan(traced, split, fingerprints, tuple(arguments))
    lap("split")

    distinct: dict[str, Piece] = {}
    for piece in split.compilable:
        distinct.setdefault(fingerprints[piece.name], piece)
    pieces = {}
    with backend.session():
        for index, (fingerprint, piece) in enumerate(distinct.items()):
            detail = f"piece {index + 1} of {len(distinct)}"
            progress("compile", detail, index / len(distinct))
            pieces[fingerprint] = _compile_piece(backend, piece, options)
    lap(options.backend)
    return CompiledModel(plan, pieces, traced.sources, timings, split_source(split))


def _compile_piece(
    backend: CompilerBackend, piece: Piece, options: CompileOptions
) -> CompiledPiece:
    """One distinct piece for the general shape and every static size."""
    values = _example_values(piece)
    tokens = find_token_input(values)
    general = backend.compile(CompileRequest(piece.module, values, None, options.inductor))
    static = {}
    for size in options.sizes if tokens is not None else ():
        request = CompileRequest(piece.module, _static_values(values, size), size, options.inductor)
        static[size] = backend.compile(request)
    return CompiledPiece(backend.name, general, static, tokens)


def _static_values(values: Sequence[Any], tokens: int) -> list[Any]:
    """The same fake inputs for a fixed number of tokens, the only symbol there is."""

    def fixed(size: Any) -> int:
        if not isinstance(size, SymInt):
            return int(size)
        expression = size.node.expr
        return int(expression.subs(dict.fromkeys(expression.free_symbols, tokens)))

    with FakeTensorMode():
        return [
            torch.empty_strided(
                [fixed(size) for size in value.shape],
                [fixed(step) for step in value.stride()],
                dtype=value.dtype,
                device=value.device,
            )
            if isinstance(value, Tensor)
            else fixed(value)
            for value in values
        ]


def _example_arguments(device: torch.device) -> dict[str, Tensor]:
    ids = torch.zeros(_EXAMPLE_TOKENS, dtype=torch.int64, device=device)
    return {"input_ids": ids, "positions": torch.zeros_like(ids)}


def _example_values(piece: Piece) -> list[Any]:
    return [n.meta["example_value"] for n in piece.module.graph.nodes if n.op == "placeholder"]
