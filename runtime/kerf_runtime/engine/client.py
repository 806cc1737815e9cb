"""The engine as the HTTP process sees it: an asyncio client that owns the engine process.

``start`` spawns the process and returns; ``phase``, ``started`` and ``failed`` tell how far it is.
Every running request has a queue, filled by the one task that reads the engine's messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from kerf_runtime.engine.args import EngineArgs
from kerf_runtime.engine.failures import describe_death, describe_silence, error_of
from kerf_runtime.engine.messages import (
    AbortRequest,
    AddRequest,
    Alive,
    EngineMessage,
    Failed,
    Outputs,
    Phase,
    Refused,
    Report,
    ServerMessage,
    Shutdown,
    Started,
    Stats,
    TokenOutput,
)
from kerf_runtime.engine.process import EngineProcess
from kerf_runtime.engine.silence import ALIVE_SECONDS, STALL_SECONDS, Silence
from kerf_runtime.errors import EngineError, KerfError, RequestError

__all__ = ["EngineClient"]

_SHUTDOWN_SECONDS = 5.0
"""What an engine between two steps gets to end by itself."""
_TERMINATE_SECONDS = 2.0
"""What it gets after SIGTERM, before SIGKILL."""
_LAST_WORDS_SECONDS = 0.2
"""How long a dead engine's last message is waited for."""

_Stream = asyncio.Queue[TokenOutput | KerfError]


class EngineClient:
    """Starts one engine process and talks to it.

    Args:
        args: what the engine serves.
        on_phase: called for every start-up message.
        stall_seconds: how long one step may take before the engine has failed.
    """

    def __init__(
        self,
        args: EngineArgs,
        *,
        on_phase: Callable[[Phase], None] | None = None,
        stall_seconds: float = STALL_SECONDS,
    ) -> None:
        self._args = args
        self._on_phase = on_phase
        self._process: EngineProcess | None = None
        self._streams: dict[str, _Stream] = {}
        self._phase = Phase("import", "starting the engine process")
        self._started: Started | None = None
        self._failed: Failed | None = None
        self._stats: dict[str, Any] = {}
        self._silence = Silence(stall_seconds)
        self._closing = False
        self._changed = asyncio.Event()
        self._ended = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(EngineMessage)

    @property
    def phase(self) -> Phase:
        """The start-up phase the engine is in; ``ready`` at the end."""
        return self._phase

    @property
    def started(self) -> Started | None:
        """Set once the engine is ready."""
        return self._started

    @property
    def failed(self) -> Failed | None:
        """Set once the engine cannot go on."""
        return self._failed

    @property
    def stats(self) -> dict[str, Any]:
        """The latest numbers (``EngineStats.to_values``); empty before the first."""
        return self._stats

    @property
    def silent_seconds(self) -> float:
        """How long a started engine has said nothing; more than about a second is a long step."""
        return self._silence.seconds

    @property
    def is_stalled(self) -> bool:
        """Whether it has said nothing for so long that it is probably stuck in a step."""
        return self._silence.is_stalled

    @property
    def pid(self) -> int | None:
        """Process id of the engine, once started."""
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Spawn the engine; returns before it is ready."""
        if self._process is not None:
            raise EngineError("the engine client was started before")
        process = EngineProcess(self._args)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._requests = self._context.socket(zmq.PUSH)
        self._results = zmq.asyncio.Socket(self._context, zmq.PULL)
        for socket in (self._requests, self._results):
            socket.set_hwm(0)  # no limit: the server bounds the number of requests
            socket.linger = 0
        # Connected, not bound: a socket that connects has its queue before there is a peer and when it is
        # gone, while one that binds waits for a peer at every send.
        self._requests.connect(process.addresses.requests)
        self._results.bind(process.addresses.results)
        process.start()
        self._process = process
        asyncio.get_running_loop().add_reader(process.sentinel, self._on_exit)
        self._tasks = [
            asyncio.create_task(self._receive(), name="kerf-engine-results"),
            asyncio.create_task(self._watch(), name="kerf-engine-watch"),
            asyncio.create_task(self._count_silence(), name="kerf-engine-silence"),
        ]

    async def wait_started(self) -> Started:
        """Wait until the engine is ready.

        Raises:
            KerfError: it failed; the error is the engine's own.
        """
        while self._started is None:
            if self._failed is not None:
                raise error_of(self._failed)
            self._changed.clear()
            await self._changed.wait()
        return self._started

    async def generate(self, request: AddRequest) -> AsyncGenerator[TokenOutput, None]:
        """Tokens of one request as they come; closing the generator aborts it.

        The token that stops a request is part of the output.

        Raises:
            RequestError: the engine cannot run it as asked.
            KerfError: the engine failed.
        """
        if self._failed is not None:
            raise error_of(self._failed)
        if self._process is None or self._closing:
            raise EngineError("the engine is not running")
        if request.request_id in self._streams:
            raise RequestError(f"request id {request.request_id!r} is in use", where="request_id")
        stream: _Stream = asyncio.Queue()
        self._streams[request.request_id] = stream
        over = False
        try:
            self._send(request)
            while not over:
                item = await stream.get()
                if isinstance(item, KerfError):
                    over = True
                    raise item
                over = item.finish_reason is not None
                yield item
        finally:
            del self._streams[request.request_id]
            if not over and self._failed is None and not self._closing:
                self._send(AbortRequest(request.request_id))

    async def close(self) -> None:
        """End the engine, whatever it is doing, and free everything; may be called twice."""
        if self._closing or self._process is None:
            return
        self._closing = True
        self._break_streams(EngineError("the engine is shutting down"))
        process = self._process
        if not self._ended.is_set():
            if self._started is not None and self._failed is None:
                self._send(Shutdown())
                await self._wait_for_end(_SHUTDOWN_SECONDS)
            if not self._ended.is_set():
                # Still starting (nobody reads messages then), failed, or stuck in a step.
                process.terminate()
                await self._wait_for_end(_TERMINATE_SECONDS)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        asyncio.get_running_loop().remove_reader(process.sentinel)
        await asyncio.to_thread(process.kill)
        self._requests.close()
        self._results.close()
        self._context.term()

    def _send(self, message: ServerMessage) -> None:
        """Queue a message without ever waiting; what an engine that is gone never reads is dropped at close."""
        self._requests.send(self._encoder.encode(message), zmq.DONTWAIT)

    def _on_exit(self) -> None:
        assert self._process is not None
        asyncio.get_running_loop().remove_reader(self._process.sentinel)
        self._ended.set()

    async def _wait_for_end(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._ended.wait(), seconds)

    async def _receive(self) -> None:
        while True:
            self._handle(self._decoder.decode(await self._results.recv()))

    async def _watch(self) -> None:
        """Notice the end of the process; what it said last has precedence over its exit code."""
        await self._ended.wait()
        if self._closing or self._failed is not None:
            return
        await asyncio.sleep(_LAST_WORDS_SECONDS)
        if not self._closing and self._failed is None:
            assert self._process is not None
            self._fail(describe_death(self._process.exit_code))

    async def _count_silence(self) -> None:
        """Give an engine up that is stuck in a step; how long it takes to start is up to the probes."""
        while self._failed is None:
            await asyncio.sleep(ALIVE_SECONDS)
            if self._started is None:
                continue
            self._silence.tick(time.monotonic())
            if self._silence.is_final:
                self._fail(describe_silence(self._silence.seconds))

    def _handle(self, message: EngineMessage) -> None:
        self._silence.heard()
        match message:
            case Outputs():
                for output in message.outputs:
                    # Unknown: the stream was closed while the token was on its way.
                    if (stream := self._streams.get(output.request_id)) is not None:
                        stream.put_nowait(output)
            case Stats():
                self._stats = message.values
            case Refused():
                if (stream := self._streams.get(message.request_id)) is not None:
                    stream.put_nowait(
                        RequestError(message.what, where=message.where, hint=message.hint)
                    )
            case Phase():
                self._phase = message
                if self._on_phase is not None:
                    self._on_phase(message)
            case Started():
                self._started = message
                self._changed.set()
            case Report():
                assert self._started is not None  # the engine reports once it has started
                self._started = msgspec.structs.replace(self._started, report=message.report)
            case Alive():
                pass  # it was heard, and that is all
            case Failed():
                self._fail(message)

    def _fail(self, failed: Failed) -> None:
        self._failed = failed
        self._changed.set()
        self._break_streams(error_of(failed))

    def _break_streams(self, error: KerfError) -> None:
        for stream in self._streams.values():
            stream.put_nowait(error)
