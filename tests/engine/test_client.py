"""The client beside an engine that dies, fails slowly or is stuck: it never waits with it.

The engine process is real, its core is a script.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.engine.scripted import (
    DIE,
    FAIL_AND_LINGER,
    GO_ON,
    STUCK,
    run_late_engine,
    run_scripted_engine,
)
from tests.patience import PATIENCE, until

from kerf_runtime.engine import client as client_module
from kerf_runtime.engine import process as process_module
from kerf_runtime.engine import silence
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
    signal.setitimer(
        signal.ITIMER_REAL, PATIENCE + 10, 1
    )  # again and again: closing may block, too
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def go_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], None]:
    """Tells an engine that waits for the test to go on."""
    path = tmp_path / "go-on"
    monkeypatch.setenv(GO_ON, str(path))
    return path.touch


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


def is_closed(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as peer:
        return peer.connect_ex(str(path)) != 0


def run(test: Awaitable[None]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(test, PATIENCE)

    asyncio.run(bounded())


def test_a_request_that_comes_before_the_engine_has_connected_is_answered(
    monkeypatch: pytest.MonkeyPatch, go_on: Callable[[], None]
) -> None:
    monkeypatch.setattr(process_module, "_main", run_late_engine)

    async def body() -> None:
        async with client_of() as client:
            asked = asyncio.create_task(answer(client, "a", 1, 2, 3))
            await asyncio.sleep(0)
            assert client.started is None
            go_on()
            assert await asked == [1, 2, 3]

    run(body())


@pytest.mark.parametrize("death", ["killed from outside", "in a step"])
def test_requests_and_aborts_around_the_death_of_the_engine_do_not_wait(death: str) -> None:
    async def body() -> None:
        async with client_of() as client:
            await client.wait_started()
            assert client.pid is not None
            number, running = 0, []
            if death == "in a step":
                running.append(asyncio.create_task(answer(client, "last", DIE)))
            else:
                os.kill(client.pid, signal.SIGKILL)
            while number < 10 or client.failed is None:
                number += 1
                running.append(asyncio.create_task(answer(client, f"a{number}", *[1] * 50)))
                stream = client.generate(AddRequest(f"b{number}", [1] * 50, PARAMS))
                running.append(asyncio.create_task(anext(stream)))  # type: ignore[arg-type]
                await asyncio.sleep(0.001)
                running[-1].cancel()
            results = await asyncio.gather(*running, return_exceptions=True)
            errors = [result for result in results if isinstance(result, KerfError)]
            assert errors
            assert {str(error).split(".")[0] for error in errors} == {
                "the engine process was killed by SIGKILL"
            }
            with pytest.raises(EngineError, match="SIGKILL"):
                await answer(client, "late", 1)

    run(body())


def test_an_engine_that_failed_and_does_not_exit_is_terminated_and_killed_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_module, "_SHUTDOWN_SECONDS", 3600)  # nobody reads a word of it
    monkeypatch.setattr(client_module, "_TERMINATE_SECONDS", 0.1)

    async def body() -> None:
        client = EngineClient(ARGS)
        await client.start()
        await client.wait_started()
        with pytest.raises(CaptureError, match="the step failed"):
            await answer(client, "a", FAIL_AND_LINGER)
        assert client._process is not None
        inbox = client._process.addresses.folder / "in"
        await until(lambda: is_closed(inbox))
        await client.close()
        assert client._process.exit_code == -signal.SIGKILL

    run(body())


def test_a_stuck_step_makes_the_engine_stalled_and_a_later_word_takes_it_back(
    monkeypatch: pytest.MonkeyPatch, go_on: Callable[[], None]
) -> None:
    monkeypatch.setattr(silence, "_STALLED_SHARE", 0.001)  # stalled soon, failed much later

    async def body() -> None:
        async with client_of(stall_seconds=600) as client:
            await client.wait_started()
            asked = asyncio.create_task(answer(client, "a", STUCK, 1))
            await until(lambda: client.is_stalled)
            assert client.silent_seconds >= 0.6
            assert client.failed is None
            go_on()
            assert await asked == [STUCK, 1]
            await until(lambda: not client.is_stalled)

    run(body())


def test_an_idle_engine_is_heard_again_and_again() -> None:
    async def body() -> None:
        async with client_of() as client:
            await client.wait_started()
            for _ in range(5):
                await until(lambda: client.silent_seconds > 0)
                await until(lambda: client.silent_seconds == 0)
            assert client.failed is None

    run(body())


def test_an_engine_that_stays_stuck_has_failed_and_those_who_wait_hear_of_it(
    monkeypatch: pytest.MonkeyPatch, go_on: Callable[[], None]
) -> None:
    monkeypatch.setattr(client_module, "_TERMINATE_SECONDS", 0.1)

    async def body() -> None:
        async with client_of(stall_seconds=1) as client:
            await client.wait_started()
            with pytest.raises(EngineError, match=r"stuck in one step for \d seconds.*KERF_STALL"):
                await answer(client, "a", STUCK)
            assert client.failed is not None

    run(body())
