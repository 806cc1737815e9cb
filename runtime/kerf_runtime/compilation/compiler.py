"""Cold compile of a model: trace, split, compile every distinct piece for every shape, plan.

Dynamo leaves a fake value at every input of every piece, so no second walk through the graph is needed
to know shapes: nothing of the model is computed or allocated here, and no kernel of it is launched
except to time candidates of static sizes.
"""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import SymInt, Tensor, fx, nn

from kerf_runtime.compilation import internals
from kerf_runtime.compilation.artifact import CompiledPiece
from kerf_runtime.compilation.backends import (
    CompiledArtifact,
    CompileRequest,
    backend_named,
)
from kerf_runtime.compilation.fingerprint import fingerprint_piece
from kerf_runtime.compilation.piecewise import find_token_input
from kerf_runtime.compilation.plan import StitchPlan
from kerf_runtime.compilation.planner import build_plan
from kerf_runtime.compilation.split import (
    Piece,
    check_all_called,
    resolve_splitting_ops,
    split_graph,
    split_source,
)
from kerf_runtime.compilation.trace import count_guard_evaluations, trace_forward
from kerf_runtime.compilation.workers import WORKERS_VARIABLE, CompileWorkers, worker_count
from kerf_runtime.config.passes import PassConfig

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
        passes: passes over the pieces' graphs.
        static_graphs: whether static graphs will be recorded (a forward may then write no buffers).
        dump: folder for the graphs around each pass.
    """

    splitting_ops: tuple[str, ...]
    backend: str = "inductor"
    inductor: Mapping[str, Any] = field(default_factory=dict)
    sizes: tuple[int, ...] = ()
    passes: PassConfig = field(default_factory=PassConfig.off)
    static_graphs: bool = False
    dump: Path | None = None


@dataclass(frozen=True)
class CompiledModel:
    """Everything that is stored: the plan, the pieces by fingerprint, the traced modules, timings.

    ``graph_source`` is the split graph as readable Python.  ``programs`` are what the pieces were compiled from, by
    fingerprint; they run without a compiler.
    """

    plan: StitchPlan
    pieces: dict[str, CompiledPiece]
    sources: tuple[str, ...]
    timings: dict[str, float]
    graph_source: str
    programs: Mapping[str, fx.GraphModule]


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

    count = worker_count(os.environ.get(WORKERS_VARIABLE), options.backend, device)
    with CompileWorkers(options.backend, count, device) as workers:
        progress("trace", "one Dynamo trace", None)
        arguments = _example_arguments(device)
        traced = trace_forward(model, arguments, static_graphs=options.static_graphs)
        count_guard_evaluations()
        lap("trace")
        progress("split", "cutting at " + (", ".join(options.splitting_ops) or "nothing"), None)
        split = split_graph(traced.module, ops)
        check_all_called(options.splitting_ops, traced.module, type(model).__name__)
        fingerprints = {piece.name: fingerprint_piece(piece.module) for piece in split.compilable}
        plan = build_plan(traced, split, fingerprints, tuple(arguments))
        lap("split")
        distinct: dict[str, Piece] = {}
        for piece in split.compilable:
            distinct.setdefault(fingerprints[piece.name], piece)
        # Compiling a piece may change its graph.
        programs = {
            name: fx.GraphModule(piece.module, copy.deepcopy(piece.module.graph))
            for name, piece in distinct.items()
        }
        own = tuple(name for name in traced.sources if not name.startswith("torch."))
        if count:
            progress("workers", f"{count} processes that compile", None)
            workers.wait()
            lap("workers")
        pieces = _compile_pieces(workers, distinct, own, options, progress)
        lap(options.backend)
    return CompiledModel(plan, pieces, traced.sources, timings, split_source(split), programs)


def _compile_pieces(
    workers: CompileWorkers,
    distinct: Mapping[str, Piece],
    modules: tuple[str, ...],
    options: CompileOptions,
    progress: Progress,
) -> dict[str, CompiledPiece]:
    """Every distinct piece for the general shape and every static size."""
    jobs: list[tuple[str, int | None, CompileRequest]] = []
    tokens = {}
    for fingerprint, piece in distinct.items():
        values = _example_values(piece)
        tokens[fingerprint] = find_token_input(values)
        dump = None if options.dump is None else options.dump / "passes" / piece.name
        general = CompileRequest(
            piece.module,
            values,
            options=options.inductor,
            passes=options.passes,
            dump=dump,
            modules=modules,
        )
        jobs.append((fingerprint, None, general))
        for size in options.sizes if tokens[fingerprint] is not None else ():
            static = replace(
                general, example_values=_static_values(values, size), tokens=size, dump=None
            )
            jobs.append((fingerprint, size, static))
    compiled: dict[str, dict[int | None, CompiledArtifact]] = {name: {} for name in distinct}
    artifacts = workers.compile([request for _, _, request in jobs])
    for index, (fingerprint, job_size, _) in enumerate(jobs):
        shape = "" if job_size is None else f" for {job_size} tokens"
        number = list(distinct).index(fingerprint) + 1
        progress("compile", f"piece {number} of {len(distinct)}{shape}", index / len(jobs))
        compiled[fingerprint][job_size] = next(artifacts)
    artifacts.close()
    pieces = {}
    for fingerprint, shapes in compiled.items():
        sizes = {size: shapes[size] for size in options.sizes if size in shapes}
        pieces[fingerprint] = CompiledPiece(
            options.backend, shapes[None], sizes, tokens[fingerprint]
        )
    return pieces


def _static_values(values: Sequence[Any], tokens: int) -> list[Any]:
    """The same fake inputs for a fixed number of tokens, the only symbol there is."""

    def fixed(size: Any) -> int:
        if not isinstance(size, SymInt):
            return int(size)
        expression = size.node.expr
        return int(expression.subs(dict.fromkeys(expression.free_symbols, tokens)))

    with internals.FakeTensorMode():
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
