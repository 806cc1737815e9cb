"""Worker processes that compile pieces side by side.

Generating code for a piece is seconds of Python in one thread, so distinct pieces and static sizes are
spread over processes.  A worker needs seconds to import the compiler: start the pool before the trace,
and it is ready when the trace is.  On machines with few cores one process is faster, and none are made.
"""

from __future__ import annotations

import importlib
import multiprocessing
from collections.abc import Generator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from types import TracebackType

import torch
from torch import fx

from kerf_runtime.compilation.backends import CompiledArtifact, CompileRequest, backend_named
from kerf_runtime.compilation.counters import compilation_counter, compile_gate
from kerf_runtime.compilation.program import (
    PieceProgram,
    describe_program,
    rebuild_program,
)
from kerf_runtime.errors import CompileError, ConfigError

__all__ = ["WORKERS_VARIABLE", "CompileWorkers", "worker_count"]

WORKERS_VARIABLE = "KERF_COMPILE_WORKERS"
"""Number of worker processes, for diagnosis; 0 compiles in one process."""

_CORES_PER_WORKER = 4
"""Inductor has helper processes of its own for kernels; fewer cores than this gain nothing."""
_MOST_WORKERS = 8


def worker_count(cores: int, requested: str | None = None) -> int:
    """How many worker processes to use; 0 means to compile in this process.

    Args:
        cores: that this process may use.
        requested: value of ``WORKERS_VARIABLE``, if it is set.

    Raises:
        ConfigError: ``requested`` is no number from 0 to 64.
    """
    if requested is not None:
        if not requested.isdecimal() or int(requested) > 64:
            raise ConfigError(
                f"{requested!r} is no number of worker processes",
                where=WORKERS_VARIABLE,
                hint="Write a number from 0 to 64, or leave it unset",
            )
        return int(requested)
    workers = min(cores // _CORES_PER_WORKER, _MOST_WORKERS)
    return workers if workers > 1 else 0


@dataclass(frozen=True)
class _Outcome:
    artifact: CompiledArtifact
    counters: dict[str, int]


class CompileWorkers:
    """A pool of ``count`` workers for one back end; with 0, ``compile`` works in this process."""

    def __init__(self, backend: str, count: int) -> None:
        self._backend = backend
        self._pool: ProcessPoolExecutor | None = None
        if count:
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(count, mp_context=context)
            for _ in range(count):
                self._pool.submit(_import_compiler, backend)

    def __enter__(self) -> CompileWorkers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=error is None, cancel_futures=True)

    def compile(
        self, requests: Sequence[CompileRequest]
    ) -> Generator[CompiledArtifact, None, None]:
        """The artifacts in the order of ``requests``; counters of workers are added to this process's.

        Raises:
            CompileError: what the back end raises, or a worker died.
        """
        if self._pool is None:
            backend = backend_named(self._backend)
            with backend.session():
                for request in requests:
                    yield backend.compile(request)
            return
        compile_gate.check("the compilation of pieces")
        outcomes = [
            self._pool.submit(_compile, self._backend, *_plain(request)) for request in requests
        ]
        try:
            for outcome in outcomes:
                done = outcome.result()
                compilation_counter.add(done.counters)
                yield done.artifact
        except BrokenProcessPool as error:
            raise CompileError(
                f"a compile worker died: {error}",
                hint="Most often memory is short. Give the pod more, or fewer workers with "
                f"{WORKERS_VARIABLE}",
            ) from error


def _plain(request: CompileRequest) -> tuple[PieceProgram, CompileRequest]:
    """A request in a form that can travel: its program, and the rest."""
    program = describe_program(request.module, request.example_values)
    return program, replace(request, module=fx.GraphModule({}, fx.Graph()), example_values=())


def _import_compiler(backend: str) -> None:
    """Import everything that the first compilation needs, and initialise the device."""
    backend_named(backend).check({})
    if torch.cuda.is_available():
        torch.cuda.init()


def _compile(name: str, program: PieceProgram, rest: CompileRequest) -> _Outcome:
    backend = backend_named(name)
    for needed in rest.modules:
        importlib.import_module(needed)
    module, values = rebuild_program(program)
    before = compilation_counter.snapshot()
    with backend.session():
        artifact = backend.compile(replace(rest, module=module, example_values=values))
    after = compilation_counter.snapshot()
    return _Outcome(artifact, {key: after[key] - before[key] for key in after})
