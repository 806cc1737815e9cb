"""Worker processes that compile pieces side by side.

Generating code for a piece is seconds of Python in one thread, so distinct pieces and static sizes can be
spread over processes.  Importing the compiler takes longer than that: one process imports it while the
model is traced, and the workers are forked from it.  Off unless asked for (``WORKERS_VARIABLE``).
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import TracebackType

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

_MOST_WORKERS = 64
_PRELOAD = "kerf_runtime.compilation.preload"
_WARM_POOL = "TORCH_WARM_POOL"


def worker_count(requested: str | None) -> int:
    """How many worker processes to use; 0 means to compile in this process.

    Args:
        requested: value of ``WORKERS_VARIABLE``, if it is set.

    Raises:
        ConfigError: it is no number from 0 to 64.
    """
    if requested is None:
        return 0
    if not requested.isascii() or not requested.isdecimal() or int(requested) > _MOST_WORKERS:
        raise ConfigError(
            f"{requested!r} is no number of worker processes",
            where=WORKERS_VARIABLE,
            hint=f"Write a number from 0 to {_MOST_WORKERS}, or leave it unset",
        )
    return int(requested)


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
            threads = max(1, len(os.sched_getaffinity(0)) // count)
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload([_PRELOAD])
            self._pool = ProcessPoolExecutor(
                count, mp_context=context, initializer=_start, initargs=(backend, threads)
            )
            with _no_pool_of_its_own():
                for _ in range(count):
                    self._pool.submit(_nothing)

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


@contextmanager
def _no_pool_of_its_own() -> Iterator[None]:
    """The process that imports the compiler must not start Inductor's helpers: it is there to fork."""
    before = os.environ.get(_WARM_POOL)
    os.environ[_WARM_POOL] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_WARM_POOL]
        else:
            os.environ[_WARM_POOL] = before


def _nothing() -> None:
    """Makes the executor start a worker now."""


def _start(backend: str, threads: int) -> None:
    """Set up a forked worker."""
    backend_named(backend).prepare_worker(threads)


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
