"""The engine in a process of its own: spawn, message loop, and an end under all circumstances.

Two one-way sockets (ZeroMQ over Unix sockets in a private folder) connect it to its parent: requests
come in, tokens and numbers go out.  The process ends when it is told to, when it fails, and when its
parent is gone, however that died.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import multiprocessing.process
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec
import zmq

from kerf_runtime.compilation.counters import compile_gate
from kerf_runtime.engine.args import EngineArgs
from kerf_runtime.engine.failures import describe_failure
from kerf_runtime.engine.messages import (
    AbortRequest,
    AddRequest,
    Alive,
    EngineMessage,
    Outputs,
    Phase,
    Refused,
    Report,
    ServerMessage,
    Shutdown,
    Stats,
    TokenOutput,
)
from kerf_runtime.engine.silence import ALIVE_SECONDS
from kerf_runtime.errors import EngineError, KerfError, RequestError
from kerf_runtime.termination import EXIT_TERMINATED, Terminated, terminable

__all__ = ["Addresses", "EngineLoop", "EngineProcess"]

logger = logging.getLogger(__name__)

_STATS_SECONDS = 0.25
"""How often numbers are sent while the engine works."""
_PROGRESS_SECONDS = 0.1
"""How often the fraction of a start-up phase is sent."""
_LINGER_MILLISECONDS = 2000
"""How long the last message may take to leave."""
_LONGEST_SOCKET_PATH = 100
"""Unix sockets allow 107 bytes; a file name is added to the folder."""


@dataclass(frozen=True)
class Addresses:
    """Where the two sockets are: ``requests`` towards the engine, ``results`` from it."""

    folder: Path

    @property
    def requests(self) -> str:
        """The engine reads from here."""
        return f"ipc://{self.folder / 'in'}"

    @property
    def results(self) -> str:
        """The engine writes here."""
        return f"ipc://{self.folder / 'out'}"


class EngineProcess:
    """A spawned engine.  It binds ``addresses.requests``, its parent ``addresses.results``."""

    def __init__(self, args: EngineArgs) -> None:
        folder = tempfile.mkdtemp(prefix="kerf-")
        if len(folder) > _LONGEST_SOCKET_PATH:
            Path(folder).rmdir()
            folder = tempfile.mkdtemp(prefix="kerf-", dir="/tmp")
        self.addresses = Addresses(Path(folder))
        self._args = args
        self._process: multiprocessing.process.BaseProcess | None = None

    def start(self) -> None:
        """Spawn the process; returns at once."""
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(
            target=_main,
            args=(self._args, self.addresses, time.monotonic()),
            name="kerf-engine",
        )
        self._process.start()
        # Registered after multiprocessing's own handler, so it runs before it: that one would wait
        # for ever for an engine that nobody stopped.
        atexit.register(self.kill)

    @property
    def _started(self) -> multiprocessing.process.BaseProcess:
        if self._process is None:
            raise EngineError("the engine process has not been started")
        return self._process

    @property
    def pid(self) -> int:
        """Process id."""
        pid = self._started.pid
        assert pid is not None
        return pid

    @property
    def sentinel(self) -> int:
        """A file descriptor that becomes readable when the process has ended."""
        return self._started.sentinel

    @property
    def exit_code(self) -> int | None:
        """Exit code, the negative signal number, or None while it runs."""
        return self._started.exitcode

    def terminate(self) -> None:
        """Ask the process to end now."""
        self._started.terminate()

    def kill(self) -> None:
        """End the process for certain, and remove the sockets."""
        if self._process is not None:
            self._process.kill()
            self._process.join(5.0)
        self.cleanup()

    def cleanup(self) -> None:
        """Remove the sockets; the process must have ended."""
        shutil.rmtree(self.addresses.folder, ignore_errors=True)
        atexit.unregister(self.kill)


class Core(Protocol):
    """What the loop needs of ``EngineCore``."""

    @property
    def has_work(self) -> bool: ...

    def add(self, request: AddRequest) -> None: ...

    def abort(self, request_id: str) -> None: ...

    def step(self) -> list[TokenOutput]: ...

    @property
    def captures_pending(self) -> bool: ...

    def capture_next(self) -> bool: ...

    def report(self) -> dict[str, Any]: ...

    def stats(self) -> dict[str, Any]: ...


class EngineLoop:
    """Reads requests, steps the core, sends what is new.

    Args:
        core: started.
        inbox: socket to read ``ServerMessage`` from.
        send: sends one ``EngineMessage``.
        clock: seconds that only grow.
    """

    def __init__(
        self,
        core: Core,
        inbox: zmq.Socket[bytes],
        send: Callable[[EngineMessage], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._core = core
        self._inbox = inbox
        self._deliver = send
        self._clock = clock
        self._spoke = 0.0
        self._decoder = msgspec.msgpack.Decoder(ServerMessage)
        self._stats_sent = 0.0
        self._report_sent = 0.0
        self._report_stale = False
        self._stats_stale = True

    def run(self) -> None:
        """Until ``Shutdown`` arrives."""
        self._send_stats()
        while self._read(wait=not self._core.has_work and not self._core.captures_pending):
            if self._core.has_work:
                outputs = self._core.step()
                self._stats_stale = True
                if outputs:
                    self._send(Outputs(outputs))
            if self._core.captures_pending:
                self._report_stale |= self._core.capture_next()
            self._send_report()
            self._send_stats()
            if self._clock() - self._spoke >= ALIVE_SECONDS:
                self._send(Alive())

    def _send(self, message: EngineMessage) -> None:
        self._deliver(message)
        self._spoke = self._clock()

    def _read(self, *, wait: bool) -> bool:
        """Handle every message that is there; False once told to stop."""
        timeout = int(_STATS_SECONDS * 1000) if wait else 0
        while self._inbox.poll(timeout):
            timeout = 0
            message = self._decoder.decode(self._inbox.recv())
            self._stats_stale = True
            match message:
                case AddRequest():
                    self._add(message)
                case AbortRequest():
                    self._core.abort(message.request_id)
                case Shutdown():
                    return False
        return True

    def _add(self, request: AddRequest) -> None:
        try:
            self._core.add(request)
        except RequestError as error:
            self._send(Refused(request.request_id, error.what, error.where, error.hint))

    def _send_report(self) -> None:
        """What a progressive capture has reached, now and then and at its end."""
        if not self._report_stale:
            return
        now = self._clock()
        if self._core.captures_pending and now - self._report_sent < _STATS_SECONDS:
            return
        self._send(Report(self._core.report()))
        self._report_sent, self._report_stale = now, False
        self._stats_stale = True

    def _send_stats(self) -> None:
        """Numbers go out now and then while working, and once more when the work is done."""
        if not self._stats_stale:
            return
        now = self._clock()
        if self._core.has_work and now - self._stats_sent < _STATS_SECONDS:
            return
        self._send(Stats(self._core.stats()))
        self._stats_sent, self._stats_stale = now, False


def _main(args: EngineArgs, addresses: Addresses, spawned: float) -> None:
    """What the spawned process runs."""
    # A terminal sends Ctrl-C to the whole group; the parent decides how the engine ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _end_with_parent(addresses.folder)
    logging.basicConfig(
        level=args.log_level,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    inbox, outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    for socket in (inbox, outbox):
        socket.set_hwm(0)
        socket.linger = _LINGER_MILLISECONDS
    outbox.connect(addresses.results)
    encoder = msgspec.msgpack.Encoder()

    def send(message: EngineMessage) -> None:
        outbox.send(encoder.encode(message))

    code = 0
    try:
        inbox.bind(addresses.requests)
        from kerf_runtime.engine.core import EngineCore

        core = EngineCore(args, spawned=spawned)
        with terminable():
            core.startup(_Announcer(send))
        compile_gate.open = False
        # Whoever ends a whole process group ends the parent too, which lets running requests finish.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        send(core.started_message())
        EngineLoop(core, inbox, send).run()
    # The border of the process: whatever happened must reach the parent as a message.
    except Exception as error:
        # The parent shows an error that a user can cause; where it arose is for --debug.
        level = logging.DEBUG if isinstance(error, KerfError) else logging.CRITICAL
        logger.log(level, "the engine failed: %s", error, exc_info=True)
        send(describe_failure(error))
        code = error.exit_code if isinstance(error, KerfError) else EngineError.exit_code
    except Terminated:
        code = EXIT_TERMINATED
    finally:
        inbox.close()
        outbox.close()
        context.term()
    raise SystemExit(code)


class _Announcer:
    """Sends start-up phases, and no more than a few fractions per second."""

    def __init__(self, send: Callable[[EngineMessage], None]) -> None:
        self._send = send
        self._last = ("", 0.0)

    def __call__(self, phase: str, detail: str, fraction: float | None) -> None:
        now = time.monotonic()
        if (
            phase == self._last[0]
            and fraction is not None
            and now - self._last[1] < _PROGRESS_SECONDS
        ):
            return
        self._last = (phase, now)
        self._send(Phase(phase, detail, fraction))


def _end_with_parent(folder: Path) -> None:
    """Exit when the parent is gone, even if it was killed and could say nothing.

    A thread waits for the parent instead of PR_SET_PDEATHSIG, which fires when the *thread* that
    spawned the process ends.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def wait() -> None:
        parent.join()
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(EngineError.exit_code)

    threading.Thread(target=wait, name="kerf-parent-watch", daemon=True).start()
