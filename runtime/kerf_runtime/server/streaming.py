"""Answers that end when the client goes away: event streams, and plain answers that are watched."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable
from contextlib import AbstractContextManager, aclosing
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from kerf_runtime.errors import KerfError
from kerf_runtime.server.responses import describe, event

__all__ = ["ClientGone", "EventStream", "merge", "unless_disconnected"]

T = TypeVar("T")


class ClientGone(Exception):  # noqa: N818  (not an error: nobody is left to read one)
    """The client disconnected; what it asked for was aborted."""


class EventStream(StreamingResponse):
    """Server-sent events from an async generator that is closed whatever ends the response.

    ``holding`` is left when the response is over: it keeps the request's place in the queue.
    """

    def __init__(
        self, events: AsyncGenerator[bytes, None], *, holding: AbstractContextManager[Any]
    ) -> None:
        self._events = _reporting_errors(events)
        self._holding = holding
        super().__init__(
            self._events,
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._holding:
            async with aclosing(self._events):
                await super().__call__(scope, receive, send)


async def unless_disconnected(request: Request, answer: Awaitable[T]) -> T:
    """The answer, or ``ClientGone`` after cancelling it because the client went away."""
    task = asyncio.ensure_future(answer)
    watcher = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        pending = [t for t in (task, watcher) if not t.done()]
        for unfinished in pending:
            unfinished.cancel()
        await asyncio.gather(*pending, return_exceptions=True)


async def merge(iterators: list[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Items of several generators as they come, each with the index of its generator.

    An error in one ends all of them.
    """
    if len(iterators) == 1:
        async with aclosing(iterators[0]) as only:
            async for piece in only:
                yield 0, piece
        return
    queue: asyncio.Queue[tuple[int, T] | BaseException | None] = asyncio.Queue(maxsize=64)

    async def drain(index: int, iterator: AsyncGenerator[T, None]) -> None:
        try:
            async with aclosing(iterator):
                async for item in iterator:
                    await queue.put((index, item))
            await queue.put(None)
        except Exception as error:  # noqa: BLE001  (raised again by the consumer)
            await queue.put(error)

    tasks = [asyncio.create_task(drain(i, iterator)) for i, iterator in enumerate(iterators)]
    try:
        running = len(tasks)
        while running:
            item = await queue.get()
            if item is None:
                running -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    """Return when the client has gone; the body was read before."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _reporting_errors(events: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """The events; an error after the headers becomes an error event, and the stream ends."""
    async with aclosing(events):
        try:
            async for item in events:
                yield item
        except KerfError as error:
            yield event(describe(error)[1])
