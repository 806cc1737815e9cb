"""The client beside an engine that dies, fails slowly or is stuck: it never waits with it.

The engine process is real, its core is a script.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.engine.scripted import DIE, FAIL_AND_LINGER, STUCK_SECONDS, run_scripted_engine

from kerf_runtime.engine import client as client_module
from kerf_runtime.engine import process as process_module
from kerf_runtime.engine.args import EngineArgs
from kerf_runtime.engine.client import EngineClient
from kerf_runtime.engine.messages import AddRequest, SamplingParams
from kerf_runtime.errors import CaptureError, EngineError, KerfError

ARGS = EngineArgs(document={}, model_path=Path("/nowhere"))
PARAMS = SamplingParams(max_tokens=100)


@pytest.fixture(autouse=True)
def scripted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Started processes run the script, and one that blocks the test's loop is an error, not a test that hangs."""
    monkeypatch.setattr(process_module, "_main", run_scripted_engine)
    monkeypatch.setattr(client_module, "ALIVE_SECONDS", 0.1)

    def blocked(number: int, frame: object) -> None:
        raise AssertionError("something blocked the event loop")

    before = signal.signal(signal.SIGALRM, blocked)
    signal.setitimer(signal.ITIMER_REAL, 30, 1)  # again and again: closing may block, too
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@asynccontextmanager
async def client_of(stall_seconds: float = 600.0) -> AsyncIterator[EngineClient]:
    client = EngineClient(ARGS, stall_seconds=stall_seconds)
    await client.start()
    try:
        yield client
    finally:
        await client.close()


async def answer(client: EngineClient, name: str, *prompt: int) -> list[int]:
    tokens: list[int] = []
    async for output in client.generate(AddRequest(name, list(prompt), PARAMS)):
        tokens += output.token_ids
    return tokens


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        await asyncio.sleep(0.01)


def run(test: Awaitable[None]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(test, 25)

    asyncio.run(bounded())


def test_a_request_that_comes_before_the_engine_has_connected_is_answered() -> None:
    async def body() -> None:
        async with client_of() as client:
            asked = asyncio.create_task(answer(client, "a", 1, 2, 3))
            began = time.monotonic()
            await asyncio.sleep(0)
            assert time.monotonic() - began < 0.4  # a process is not there sooner
            assert client.started is None
            assert await asked == [1, 2, 3]

    run(body())


@pytest.mark.parametrize("death", ["killed from outside", "in a step"])
def test_requests_and_aborts_around_the_death_of_the_engine_do_not_wait(death: str) -> None:
    async def body() -> None:
        async with client_of() as client:
            await client.wait_started()
            assert client.pid is not None
            longest, before, number, running = 0.0, time.monotonic(), 0, []
            if death == "in a step":
                running.append(asyncio.create_task(answer(client, "last", DIE)))
            else:
                os.kill(client.pid, signal.SIGKILL)
            while client.failed is None:
                number += 1
                running.append(asyncio.create_task(answer(client, f"a{number}", *[1] * 50)))
                stream = client.generate(AddRequest(f"b{number}", [1] * 50, PARAMS))
                running.append(asyncio.create_task(anext(stream)))  # type: ignore[arg-type]
                await asyncio.sleep(0.001)
                running[-1].cancel()
                longest = max(longest, time.monotonic() - before)
                before = time.monotonic()
            assert number > 10
            assert longest < 5
            results = await asyncio.gather(*running, return_exceptions=True)
            errors = [result for result in results if isinstance(result, KerfError)]
            assert errors
            assert {str(error).split(".")[0] for error in errors} == {
                "the engine process was killed by SIGKILL"
            }
            with pytest.raises(EngineError, match="SIGKILL"):
                await answer(client, "late", 1)

    run(body())


def test_an_engine_that_failed_and_does_not_exit_is_closed_within_the_limits() -> None:
    async def body() -> None:
        client = EngineClient(ARGS)
        await client.start()
        await client.wait_started()
        with pytest.raises(CaptureError, match="the step failed"):
            await answer(client, "a", FAIL_AND_LINGER)
        await asyncio.sleep(0.3)  # by then its inbox is closed
        began = time.monotonic()
        await client.close()
        assert time.monotonic() - began < 7

    run(body())


def test_a_stuck_step_makes_the_engine_stalled_and_a_later_word_takes_it_back() -> None:
    async def body() -> None:
        async with client_of(stall_seconds=2.5) as client:
            await client.wait_started()
            asked = asyncio.create_task(answer(client, "a", STUCK_SECONDS, 1))
            await until(lambda: client.is_stalled)
            assert client.silent_seconds >= 0.5
            assert client.failed is None
            assert await asked == [STUCK_SECONDS, 1]
            assert not client.is_stalled

    run(body())


def test_an_idle_engine_is_not_silent() -> None:
    async def body() -> None:
        async with client_of() as client:
            await client.wait_started()
            most = 0.0
            for _ in range(150):
                await asyncio.sleep(0.01)
                most = max(most, client.silent_seconds)
            assert 0 < most < 1

    run(body())


def test_an_engine_that_stays_stuck_has_failed_and_those_who_wait_hear_of_it() -> None:
    async def body() -> None:
        async with client_of(stall_seconds=1) as client:
            await client.wait_started()
            with pytest.raises(EngineError, match=r"stuck in one step for 1 seconds.*KERF_STALL"):
                await answer(client, "a", STUCK_SECONDS, 300)
            assert client.failed is not None

    run(body())
