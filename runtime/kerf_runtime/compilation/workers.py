"""Worker processes that compile pieces side by side.

Generating code for a piece is seconds of Python in one thread, so distinct pieces can be spread over
processes.  Importing the compiler takes longer than that: one process (the fork server) imports it while
weights are read and the model is traced, and the workers are forked from it.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from multiprocessing import forkserver
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

__all__ = ["WORKERS_VARIABLE", "CompileWorkers", "start_fork_server", "worker_count"]

WORKERS_VARIABLE = "KERF_COMPILE_WORKERS"
"""Number of worker processes; 0 compiles in one process."""

_MOST_WORKERS = 64
_DEFAULT_WORKERS = 3  # a model of equal layers has three distinct pieces
_LEAST_CPUS = 4  # with fewer, processes only take turns
_PRELOAD = "kerf_runtime.compilation.preload"
_WARM_POOL = "TORCH_WARM_POOL"

_failure: Exception | None = None
"""In a worker: why it could not be set up."""


def worker_count(requested: str | None, backend: str, device: torch.device) -> int:
    """How many worker processes to use; 0 means to compile in this process.

    Args:
        requested: value of ``WORKERS_VARIABLE``, if it is set.
        backend: name of the back end; without a request there are workers for Inductor only.
        device: compiled for; without a request there are workers for a GPU only.  On a CPU most of the
            time is a C++ compiler's, which has processes of its own.

    Raises:
        ConfigError: it is no number from 0 to 64.
    """
    if requested is None:
        pays = backend == "inductor" and device.type == "cuda"
        return _DEFAULT_WORKERS if pays and len(os.sched_getaffinity(0)) >= _LEAST_CPUS else 0
    if not requested.isascii() or not requested.isdecimal() or int(requested) > _MOST_WORKERS:
        raise ConfigError(
            f"{requested!r} is no number of worker processes",
            where=WORKERS_VARIABLE,
            hint=f"Write a number from 0 to {_MOST_WORKERS}, or leave it unset",
        )
    return int(requested)


def start_fork_server(backend: str, device: torch.device) -> None:
    """Begin to import the compiler in the process that workers will be forked from, if there will be any.

    Returns at once.  Call it as soon as it is known that something must be compiled.

    Raises:
        ConfigError: ``WORKERS_VARIABLE`` is no number of workers.
    """
    if worker_count(os.environ.get(WORKERS_VARIABLE), backend, device):
        _ensure_fork_server()


def _ensure_fork_server() -> None:
    forkserver.set_forkserver_preload([_PRELOAD])
    with _no_pool_of_its_own():
        forkserver.ensure_running()


@dataclass(frozen=True)
class _Outcome:
    artifact: CompiledArtifact
    counters: dict[str, int]


class CompileWorkers:
    """A pool of ``count`` workers for one back end; with 0, ``compile`` works in this process."""

    def __init__(self, backend: str, count: int, device: torch.device) -> None:
        self._backend = backend
        self._device = device
        self._pool: ProcessPoolExecutor | None = None
        self._starting: Future[list[Future[None]]] | None = None
        if count:
            _ensure_fork_server()
            threads = max(1, len(os.sched_getaffinity(0)) // count)
            self._pool = ProcessPoolExecutor(
                count,
                mp_context=multiprocessing.get_context("forkserver"),
                initializer=_start,
                initargs=(backend, device, threads),
            )
            # In a thread: the first fork waits until the server has imported everything.
            starter = ThreadPoolExecutor(1, thread_name_prefix="compile-workers")
            self._starting = starter.submit(self._start_all, count)
            starter.shutdown(wait=False)

    def _start_all(self, count: int) -> list[Future[None]]:
        """As many tasks as workers, so that all are started; the tasks wait for the first that is set up."""
        assert self._pool is not None
        return [self._pool.submit(_nothing) for _ in range(count)]

    def wait(self) -> None:
        """Return when workers can compile.

        Raises:
            CompileError: a worker died.
        """
        if self._starting is not None:
            with _told_of_dead_workers():
                for started in self._starting.result():
                    started.result()

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
        compile_gate.check("the compilation of pieces")
        backend = backend_named(self._backend)
        self.wait()
        with _told_of_dead_workers():
            outcomes = [self._submit(request) for request in requests]
            with backend.session() if None in outcomes else nullcontext():
                for request, outcome in zip(requests, outcomes, strict=True):
                    if outcome is None:
                        yield backend.compile(request)
                    else:
                        done = outcome.result()
                        compilation_counter.add(done.counters)
                        yield done.artifact

    def _submit(self, request: CompileRequest) -> Future[_Outcome] | None:
        """The coming outcome of a worker; None for what must be compiled here.

        Candidates for a static size are timed on a GPU, and would slow each other down.
        """
        if self._pool is None or (request.tokens is not None and self._device.type == "cuda"):
            return None
        return self._pool.submit(_compile, self._backend, *_plain(request))


@contextmanager
def _told_of_dead_workers() -> Iterator[None]:
    try:
        yield
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


def _start(backend: str, device: torch.device, threads: int) -> None:
    """Set up a forked worker.  An error here would only kill it, so its first task reports it."""
    global _failure
    try:
        backend_named(backend).prepare_worker(device, threads)
    except Exception as error:  # noqa: BLE001  (raised by the first task)
        _failure = error


def _compile(name: str, program: PieceProgram, rest: CompileRequest) -> _Outcome:
    if _failure is not None:
        raise CompileError(
            f"a compile worker could not be set up: {_failure}",
            hint=f"Compile in the engine's own process with {WORKERS_VARIABLE}=0",
        )
    backend = backend_named(name)
    for needed in rest.modules:
        importlib.import_module(needed)
    module, values = rebuild_program(program)
    before = compilation_counter.snapshot()
    with backend.session():
        artifact = backend.compile(replace(rest, module=module, example_values=values))
    after = compilation_counter.snapshot()
    return _Outcome(artifact, {key: after[key] - before[key] for key in after})
