"""One serving process from its first listen to its exit code.

The socket listens before anything is loaded, so probes always get an answer.  The engine client and
the tokenizer start beside it.  Then one of three things ends the process:

* SIGTERM or SIGINT: not ready at once, running requests finish (bounded), exit 0;
* a second SIGINT: no more waiting;
* the engine or the tokenizer fails: ``/ready`` and ``/health`` say why, the reason is written to the
  termination log, and a moment later the process exits with the error's exit code.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import uvicorn

from kerf_runtime.engine.messages import Phase
from kerf_runtime.errors import ConfigError, EngineError, KerfError
from kerf_runtime.server.app import create_app
from kerf_runtime.server.connection import http_config, raise_file_limit, watch_peers
from kerf_runtime.server.state import ChatTokenizer, Client, ServerSettings, ServerState
from kerf_runtime.server.turns import collect_rarely

__all__ = ["ManagedClient", "bind", "serve", "termination_log_path", "write_termination_log"]

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.05
_FAILURE_GRACE_SECONDS = 1.0
"""How long a failed server still answers, so that running requests and probes hear the reason."""
_CLOSE_SECONDS = 10.0
_TERMINATION_LOG_BYTES = 4096


class ManagedClient(Client, Protocol):
    """An engine client that can be started and ended."""

    async def start(self) -> None:
        """Spawn the engine; returns before it is ready."""

    async def close(self) -> None:
        """End the engine, whatever it is doing."""


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one.

    Raises:
        ConfigError: the address cannot be used.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, proto)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            watch_peers(listener)
            listener.bind(address)
            listener.listen(2048)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise ConfigError(
            f"cannot listen: {error.strerror or error}",
            where=f"{host}:{port}",
            hint="Use another --port or --host, or stop what listens there",
        ) from None
    listener.setblocking(False)
    return listener


async def serve(
    client: ManagedClient,
    load_tokenizer: Callable[[], ChatTokenizer],
    settings: ServerSettings,
    listener: socket.socket,
    *,
    on_phase: Callable[[Phase], None] = lambda phase: None,
    on_ready: Callable[[ServerState], None] = lambda state: None,
) -> None:
    """Serve until a signal or a failure; returns after a clean stop.

    Args:
        client: the engine client, not yet started; closed at the end whatever happens.
        load_tokenizer: runs in a thread.
        settings: names and limits.
        listener: from ``bind``.
        on_phase: called when the start-up phase, its detail or its fraction changed.
        on_ready: called once.

    Raises:
        KerfError: the engine or the tokenizer failed.
    """
    raise_file_limit()
    collect_rarely()
    app = create_app(client, None, settings)
    state: ServerState = app.state.kerf.state
    server = _Server(http_config(app))
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    force = asyncio.Event()

    def on_signal(number: signal.Signals) -> None:
        if number is signal.SIGINT and stop.is_set():
            logger.warning("second interrupt: not waiting for running requests")
            force.set()
        lag = settings.drain_lag_seconds if number is signal.SIGTERM else 0.0
        if not stop.is_set():
            logger.info("%s: draining", number.name)
            # Dated back so that an interrupt refuses new requests at once.
            state.draining_since = time.monotonic() - settings.drain_lag_seconds + lag
            stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    http = asyncio.create_task(server.serve(sockets=[listener]), name="kerf-http")
    starting = asyncio.create_task(
        _start(client, load_tokenizer, state, on_phase, on_ready), name="kerf-start"
    )
    try:
        await _until_over(state, http, stop)
        error = state.error()
        if error is not None:
            write_termination_log(str(error))
            await _answer_a_moment_longer()
            raise error
        if http.done():
            await http  # raises what ended it
            raise EngineError("the HTTP server stopped by itself")
        await _drain(state, force)
    finally:
        starting.cancel()
        server.should_exit = True
        server.force_exit = force.is_set()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(client.close(), _CLOSE_SECONDS)
        await asyncio.gather(http, starting, return_exceptions=True)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


def termination_log_path() -> Path | None:
    """Where Kubernetes reads a container's last words, or None outside a container."""
    configured = os.environ.get("KERF_TERMINATION_LOG")
    if configured:
        return Path(configured)
    default = Path("/dev/termination-log")
    return default if default.exists() else None


def write_termination_log(message: str) -> None:
    """Leave ``message`` where Kubernetes shows it; a failure to do so is logged, not raised."""
    path = termination_log_path()
    if path is None:
        return
    try:
        path.write_bytes(message.encode()[:_TERMINATION_LOG_BYTES])
    except OSError as error:
        logger.warning("cannot write the termination message to %s: %s", path, error)


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: ``serve`` owns the signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _start(
    client: ManagedClient,
    load_tokenizer: Callable[[], ChatTokenizer],
    state: ServerState,
    on_phase: Callable[[Phase], None],
    on_ready: Callable[[ServerState], None],
) -> None:
    """Start engine and tokenizer side by side and report progress until ready or failed."""
    try:
        await client.start()
        loading = asyncio.create_task(asyncio.to_thread(load_tokenizer))
        shown: Phase | None = None
        while client.started is None or not loading.done():
            if state.error() is not None:
                return
            if loading.done() and state.tokenizer is None:
                state.tokenizer = loading.result()
            if client.started is None and client.phase != shown:
                shown = client.phase
                on_phase(shown)
            await asyncio.sleep(_POLL_SECONDS)
        state.tokenizer = loading.result()
    except KerfError as error:
        state.failure = error
    except Exception as error:
        logger.exception("start-up failed")
        state.failure = EngineError(f"start-up failed: {type(error).__name__}: {error}")
    else:
        on_ready(state)


async def _answer_a_moment_longer() -> None:
    await asyncio.sleep(_FAILURE_GRACE_SECONDS)


async def _until_over(state: ServerState, http: asyncio.Task[None], stop: asyncio.Event) -> None:
    while not stop.is_set() and state.error() is None and not http.done():
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(stop.wait(), _POLL_SECONDS)


async def _drain(state: ServerState, force: asyncio.Event) -> None:
    """Wait until nothing runs and endpoints had time to forget us, at most ``drain_seconds``."""
    limit = state.settings.drain_seconds
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline and not force.is_set() and state.error() is None:
        if state.outstanding == 0 and state.refuses_new_requests():
            return
        await asyncio.sleep(_POLL_SECONDS)
    if not state.outstanding:
        return
    error = state.error()
    if error is not None:
        why = f"the engine failed: {error}"
    elif force.is_set():
        why = "a second interrupt"
    else:
        why = f"the drain limit of {limit:g} s"
    logger.warning("ending with %d requests still running: %s", state.outstanding, why)
