"""The engine in its own process: answers, aborts, failures, and an end under all circumstances."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.engine.engines import GREEDY, engine_args
from tests.patience import PATIENCE, eventually, until

from kerf_runtime.engine.args import EngineArgs
from kerf_runtime.engine.client import EngineClient
from kerf_runtime.engine.failures import describe_death, describe_failure, error_of
from kerf_runtime.engine.messages import AddRequest, SamplingParams
from kerf_runtime.errors import EngineError, KerfError, ModelError, RequestError

LONG = SamplingParams(max_tokens=100, ignore_eos=True)


def run(test: Callable[[], Awaitable[None]]) -> None:
    """Run a coroutine with a bound on its time."""

    async def bounded() -> None:
        await asyncio.wait_for(test(), 300)

    asyncio.run(bounded())


@asynccontextmanager
async def client_of(args: EngineArgs) -> AsyncIterator[EngineClient]:
    client = EngineClient(args)
    await client.start()
    try:
        await client.wait_started()
        yield client
    finally:
        await client.close()


@dataclass
class Shared:
    """A running engine and the loop that its client lives in."""

    client: EngineClient
    runner: asyncio.Runner

    def run(self, test: Callable[[EngineClient], Awaitable[None]]) -> None:
        """Run a coroutine with a bound on its time."""

        async def bounded() -> None:
            await asyncio.wait_for(test(self.client), 300)

        self.runner.run(bounded())


@pytest.fixture(scope="module")
def shared(tiny_path: Path) -> Iterator[Shared]:
    """One engine for all tests that leave it running: every start imports torch."""
    with asyncio.Runner() as runner:
        context = client_of(engine_args(tiny_path, mode="FULL_DECODE_ONLY"))
        yield Shared(runner.run(context.__aenter__()), runner)
        runner.run(context.__aexit__(None, None, None))


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


async def answer(client: EngineClient, request: AddRequest) -> list[int]:
    tokens: list[int] = []
    async for output in client.generate(request):
        tokens += output.token_ids
    return tokens


def test_concurrent_requests_are_answered_as_by_transformers(
    shared: Shared, tiny_prompts: list[list[int]], tiny_answers: list[list[int]]
) -> None:
    async def body(client: EngineClient) -> None:
        before = Counter(client.stats.get("requests_finished", {}))
        tokens = client.stats.get("generation_tokens", 0)
        requests = [AddRequest(str(i), p, GREEDY) for i, p in enumerate(tiny_prompts)]
        answers = await asyncio.gather(*(answer(client, request) for request in requests))
        assert answers == tiny_answers

        started = client.started
        assert started is not None
        assert (started.max_model_len, started.vocab_size) == (128, 320)
        assert started.eos_token_ids == (2,)
        assert started.report["effective"]["mode"] == "FULL_DECODE_ONLY"
        assert client.phase.name == "ready"
        await until(
            lambda: Counter(client.stats.get("requests_finished", {})) - before == {"length": 8}
        )
        assert client.stats["generation_tokens"] - tokens == 8 * 16

    shared.run(body)


def test_a_sigterm_to_the_whole_group_leaves_running_requests_to_the_parent(
    tiny_path: Path,
) -> None:
    async def body() -> None:
        async with client_of(engine_args(tiny_path)) as client:
            stream = client.generate(AddRequest("a", [1, 2], LONG))
            tokens = list((await anext(stream)).token_ids)
            os.kill(client.pid, signal.SIGTERM)
            async for output in stream:
                tokens += output.token_ids
            assert len(tokens) == 100

    run(body)


def test_closing_a_stream_aborts_the_request_and_frees_its_blocks(shared: Shared) -> None:
    async def body(client: EngineClient) -> None:
        before = client.stats.get("requests_finished", {}).get("abort", 0)
        stream = client.generate(AddRequest("a", [1] * 20, LONG))
        assert len((await anext(stream)).token_ids) == 1
        await stream.aclose()
        await until(lambda: client.stats.get("requests_finished", {}).get("abort") == before + 1)
        assert client.stats["kv_blocks_used"] == 0
        assert client.stats["requests_running"] == 0

    shared.run(body)


def test_a_request_that_cannot_run_is_refused_and_the_others_go_on(shared: Shared) -> None:
    async def body(client: EngineClient) -> None:
        good = asyncio.create_task(answer(client, AddRequest("good", [1, 2], GREEDY)))
        with pytest.raises(RequestError, match="300 tokens") as caught:
            await answer(client, AddRequest("bad", [1] * 300, GREEDY))
        assert caught.value.where == "prompt"
        assert len(await good) == 16

    shared.run(body)


def test_an_id_in_use_is_refused_without_disturbing_its_owner(shared: Shared) -> None:
    async def body(client: EngineClient) -> None:
        first = asyncio.create_task(answer(client, AddRequest("a", [1, 2], LONG)))
        await asyncio.sleep(0)
        with pytest.raises(RequestError, match="in use"):
            await answer(client, AddRequest("a", [3], GREEDY))
        assert len(await first) == 100

    shared.run(body)


def test_a_failed_start_is_reported_as_the_error_it_was(tmp_path: Path) -> None:
    async def body() -> None:
        client = EngineClient(engine_args(tmp_path / "nowhere"))
        await client.start()
        with pytest.raises(ModelError, match="does not exist") as caught:
            await client.wait_started()
        assert str(tmp_path / "nowhere") in str(caught.value)
        assert client.failed is not None
        assert client.failed.kind == "ModelError"
        with pytest.raises(ModelError):
            await answer(client, AddRequest("a", [1], GREEDY))
        await client.close()

    run(body)


def test_the_death_of_the_engine_is_noticed_and_running_requests_hear_of_it(
    tiny_path: Path,
) -> None:
    async def body() -> None:
        async with client_of(engine_args(tiny_path)) as client:
            assert client.pid is not None
            os.kill(client.pid, signal.SIGSTOP)  # it ends nothing before it is killed
            asked = [AddRequest(f"a{number}", [1, 2], LONG) for number in range(20)]
            running = [asyncio.create_task(answer(client, request)) for request in asked]
            await asyncio.sleep(0)  # sent
            os.kill(client.pid, signal.SIGKILL)
            await until(lambda: client.failed is not None)
            for waiting in running:
                with pytest.raises(EngineError, match="killed by SIGKILL"):
                    await waiting
            with pytest.raises(EngineError, match="SIGKILL"):
                await answer(client, AddRequest("b", [1], GREEDY))

    run(body)


@pytest.mark.parametrize("moment", ["while it starts", "while it works"])
def test_closing_ends_the_process_whatever_it_does(tiny_path: Path, moment: str) -> None:
    async def body() -> None:
        client = EngineClient(engine_args(tiny_path))
        await client.start()
        folder = client._process.addresses.folder  # type: ignore[union-attr]
        assert folder.is_dir()
        running: list[asyncio.Task[list[int]]] = []
        if moment == "while it works":
            await client.wait_started()
            # So many that it works for longer than any pause of this process.
            asked = [AddRequest(f"a{number}", [1, 2], LONG) for number in range(500)]
            running = [asyncio.create_task(answer(client, request)) for request in asked]
            await until(lambda: client.stats.get("requests_running", 0) > 0)
        assert client.pid is not None
        await client.close()
        await client.close()
        assert not is_alive(client.pid)
        assert not folder.exists()
        ends = await asyncio.gather(*running, return_exceptions=True)
        if running:
            assert isinstance(ends[-1], EngineError)
            assert "shutting down" in str(ends[-1])

    run(body)


PARENT = """
import asyncio, pickle, sys
from kerf_runtime.engine.client import EngineClient

async def main():
    client = EngineClient(pickle.loads(bytes.fromhex(sys.argv[1])))
    await client.start()
    if sys.argv[2] == "ready":
        await client.wait_started()
    print(client.pid, client._process.addresses.folder, flush=True)
    await asyncio.sleep(300)

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.parametrize("when", ["starting", "ready"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_engine_ends_with_its_parent_however_that_ends(
    tiny_path: Path, tmp_path: Path, when: str, how: signal.Signals
) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    parent = subprocess.Popen(
        [sys.executable, str(script), pickle.dumps(engine_args(tiny_path)).hex(), when],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert parent.stdout is not None
    with parent:
        pid, folder = parent.stdout.readline().split()
        assert is_alive(int(pid))
        parent.send_signal(how)
        parent.wait(PATIENCE)
        eventually(lambda: not is_alive(int(pid)))
        # Before its first line the engine cannot remove the folder: its end is all that is promised.
        if when == "ready":
            eventually(lambda: not Path(folder).exists())


def test_errors_survive_the_way_between_the_processes() -> None:
    ours = ModelError("no weights", where="/model", hint="copy them")
    assert repr(error_of(describe_failure(ours))) == repr(ours)
    try:
        raise ZeroDivisionError("by zero")
    except ZeroDivisionError as error:
        other = error_of(describe_failure(error))
    assert isinstance(other, EngineError)
    assert "unexpected ZeroDivisionError: by zero" in str(other)
    assert Path(__file__).name in str(other)
    assert "ran out of memory" in str(error_of(describe_death(-9)))
    assert "exited with code 3" in str(error_of(describe_death(3)))
    assert isinstance(error_of(describe_death(None)), KerfError)
