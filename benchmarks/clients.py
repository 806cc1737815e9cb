"""Load from several client processes at once, so that one Python is not what limits a server.

The requests are planned together and dealt out; every process warms the server up with its part, waits until all
have, and then all begin.  Their outcomes are on one clock and are summed up as if one client had seen them.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection

from kerf_runtime.cli.load import Load, Outcome, Planned, Target, plan, run_load
from kerf_runtime.errors import EngineError

__all__ = ["Finished", "shares", "warm_clients"]

_WAIT_SECONDS = 600.0


@dataclass(frozen=True)
class Finished:
    """What the clients saw, and the CPU seconds that each process spent on it."""

    outcomes: list[Outcome]
    cpu_seconds: list[float]


def shares(total: int, parts: int) -> list[int]:
    """``total`` in ``parts`` that differ by one at most."""
    return [total // parts + (part < total % parts) for part in range(parts)]


@contextmanager
def warm_clients(
    target: Target, load: Load, *, warm_up: int, processes: int
) -> Iterator[Callable[[], Finished]]:
    """Clients that have warmed the server up; calling what this gives sends the load, once.

    Args:
        target: who is asked.
        load: ``concurrency`` is that of all processes together and must not be below their number.
        warm_up: requests before those of the load.
        processes: how many.

    Raises:
        EngineError: none of a client's requests was answered, or a client ended.
    """
    planned = plan(replace(load, requests=warm_up + load.requests))
    first, counted = planned[:warm_up], planned[warm_up:]
    context = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        clients = []
        for number, concurrency in enumerate(shares(load.concurrency, processes)):
            ours, theirs = context.Pipe()
            work = (first[number::processes], counted[number::processes])
            process = context.Process(
                target=_client, args=(theirs, target, *work, concurrency), daemon=True
            )
            process.start()
            theirs.close()
            stack.callback(process.join)
            stack.callback(process.terminate)
            clients.append(ours)
        for client in clients:
            _receive(client)

        def go() -> Finished:
            for client in clients:
                client.send("go")
            found = [_receive(client) for client in clients]
            outcomes = [outcome for seen, _ in found for outcome in seen]
            return Finished(outcomes, [cpu for _, cpu in found])

        yield go


def _receive(client: Connection) -> tuple[list[Outcome], float]:
    if not client.poll(_WAIT_SECONDS):
        raise EngineError(f"a client did not finish within {_WAIT_SECONDS:.0f} s")
    try:
        outcomes, cpu = client.recv()
    except EOFError:
        raise EngineError("a client process ended without an answer") from None
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    if errors and len(errors) == len(outcomes):
        raise EngineError(f"none of {len(errors)} requests was answered: {errors[0]}")
    return outcomes, cpu


def _client(
    connection: Connection,
    target: Target,
    first: Sequence[Planned],
    counted: Sequence[Planned],
    concurrency: int,
) -> None:
    """Body of a client process."""
    for requests in (first, counted):
        spent = time.process_time()
        outcomes = asyncio.run(run_load(target, requests, concurrency=concurrency))
        connection.send((outcomes, time.process_time() - spent))
        if requests is first:
            connection.recv()
