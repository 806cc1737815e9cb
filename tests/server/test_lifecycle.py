"""From the first listen to the exit code: start, drain, interrupt, engine failure."""

from __future__ import annotations

import asyncio
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from tests.engine.scripted import DIE, GO_ON, STUCK
from tests.patience import PATIENCE, eventually, join

from kerf_runtime.errors import ConfigError, EngineError
from kerf_runtime.server.lifecycle import _drain, bind

ROOT = Path(__file__).parents[2]


class Served:
    """A serving process; ``ask`` starts a request in a thread."""

    def __init__(self, *options: str, termination_log: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.server.serve_fake", *options],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "KERF_TERMINATION_LOG": str(termination_log),
                GO_ON: str(termination_log.with_name("never")),
            },
        )
        self.http = httpx.Client(base_url=f"http://{self.line()}", timeout=PATIENCE)
        self.answers: list[httpx.Response] = []

    def line(self) -> str:
        return self.process.stdout.readline().strip()

    def ask(self, prompt: str = "a", until: str = "asked") -> threading.Thread:
        def post() -> None:
            body = {"model": "tiny", "prompt": prompt}
            self.answers.append(self.http.post("/v1/completions", json=body))

        thread = threading.Thread(target=post)
        thread.start()
        assert self.line() == until
        return thread

    def say(self, command: str) -> None:
        self.process.stdin.write(f"{command}\n")
        self.process.stdin.flush()

    def ready(self) -> httpx.Response:
        return self.http.get("/ready")


@pytest.fixture
def served(tmp_path):
    started = []

    def start(*options: str) -> Served:
        server = Served(*options, termination_log=tmp_path / "termination-log")
        started.append(server)
        return server

    yield start
    for server in started:
        server.process.kill()
        server.process.wait(PATIENCE)
        server.http.close()


def test_more_connections_than_the_soft_limit_of_open_files_are_served(served):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        server = served()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert server.line() == "ready"
    address = (server.http.base_url.host, server.http.base_url.port)
    idle = [socket.create_connection(address, timeout=PATIENCE) for _ in range(400)]
    assert server.ready().status_code == 200
    for connection in idle:
        connection.close()


def test_probes_are_answered_while_the_engine_starts(served):
    server = served("slow")
    assert server.ready().status_code == 503
    assert server.ready().json()["status"] == "import"
    assert server.http.get("/health").status_code == 200
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(PATIENCE) == 0


def test_sigterm_drains(served):
    server = served()
    assert server.line() == "ready"
    assert server.ready().status_code == 200
    asking = server.ask()
    server.process.send_signal(signal.SIGTERM)
    eventually(lambda: server.ready().status_code == 503)
    assert server.ready().json() == {"status": "draining", "detail": "1 requests are still running"}
    assert server.http.get("/health").status_code == 200
    time.sleep(0.4)
    refused = server.http.post("/v1/completions", json={"model": "tiny", "prompt": "a"})
    assert refused.status_code == 503
    assert "shutting down" in refused.json()["error"]["message"]
    assert server.process.poll() is None
    server.say("release")
    assert server.process.wait(PATIENCE) == 0
    join(asking)
    assert server.answers[0].json()["choices"][0]["text"] == "Hello"


def test_a_request_whose_text_is_tokenised_at_sigterm_is_answered(served):
    server = served("held-texts")
    assert server.line() == "ready"
    asking = server.ask("a" * 5000, until="tokenising")
    server.process.send_signal(signal.SIGTERM)
    eventually(lambda: server.ready().status_code == 503)
    assert server.ready().json() == {"status": "draining", "detail": "1 requests are still running"}
    server.say("release")
    assert server.process.wait(PATIENCE) == 0
    join(asking)
    assert server.answers[0].json()["choices"][0]["text"] == "Hello"


def test_draining_is_bounded(served):
    server = served("drain1")
    assert server.line() == "ready"
    asking = server.ask()
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(PATIENCE) == 0
    join(asking)


def test_an_idle_server_stops_at_once_on_an_interrupt(served):
    server = served("lag")
    assert server.line() == "ready"
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(PATIENCE) == 0


def test_a_second_interrupt_does_not_wait_for_running_requests(served, capfd):
    server = served()
    assert server.line() == "ready"
    asking = server.ask()
    server.process.send_signal(signal.SIGINT)
    eventually(lambda: server.ready().json()["status"] == "draining")
    assert server.process.poll() is None
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(PATIENCE) == 0
    join(asking)
    said = capfd.readouterr().err
    assert "ending with 1 requests still running: a second interrupt\n" in said
    assert "drain limit" not in said


@pytest.mark.parametrize(
    ("failure", "forced", "why"),
    [
        (None, False, "the drain limit of 0.01 s"),
        (None, True, "a second interrupt"),
        (EngineError("out of memory"), False, "the engine failed: out of memory"),
    ],
)
def test_why_requests_were_not_waited_for_is_said(caplog, failure, forced, why):
    async def drain() -> None:
        force = asyncio.Event()
        if forced:
            force.set()
        seconds = 3600 if forced or failure else 0.01
        settings = SimpleNamespace(drain_seconds=seconds)
        state = SimpleNamespace(outstanding=3, settings=settings, error=lambda: failure)
        state.refuses_new_requests = lambda: True
        await _drain(state, force)

    asyncio.run(drain())
    assert [record.message for record in caplog.records] == [
        f"ending with 3 requests still running: {why}"
    ]


def test_an_engine_failure_turns_probes_off_and_ends_the_process_with_its_exit_code(
    served, tmp_path
):
    server = served()
    assert server.line() == "ready"
    asking = server.ask()
    server.say("fail")
    eventually(lambda: server.ready().status_code == 503)
    assert server.ready().json() == {"status": "failed", "detail": "out of memory. Lower it"}
    assert server.http.get("/health").status_code == 503
    assert server.process.poll() is None
    server.say("release")
    assert server.line() == "CaptureError"
    assert server.process.wait(PATIENCE) == 6
    assert (tmp_path / "termination-log").read_text() == "out of memory. Lower it"
    join(asking)
    assert server.answers[0].status_code == 503


def test_an_engine_that_dies_under_load_ends_the_server_with_its_reason(served, tmp_path):
    server = served("process")
    assert server.line() == "ready"
    url, answers = server.http.base_url, []

    def load() -> None:
        with httpx.Client(base_url=url, timeout=PATIENCE) as http:
            while not answers or answers[-1].status_code == 200:
                body = {"model": "tiny", "prompt": [1] * 20, "max_tokens": 1}
                answers.append(http.post("/v1/completions", json=body))

    threads = [threading.Thread(target=load) for _ in range(4)]
    for thread in threads:
        thread.start()
    death = server.http.post("/v1/completions", json={"model": "tiny", "prompt": [DIE]})
    assert death.status_code == 503
    assert "killed by SIGKILL" in death.json()["error"]["message"]
    assert server.http.get("/health").status_code == 503
    join(*threads)
    assert answers[-1].status_code == 503
    server.say("release")
    assert server.process.wait(PATIENCE) == 7
    assert "killed by SIGKILL" in (tmp_path / "termination-log").read_text()


def test_an_engine_that_is_stuck_is_not_ready_at_first_and_then_ends_the_server(served, tmp_path):
    """Takes the seconds that a failed engine gets to end."""
    server = served("process")
    assert server.line() == "ready"
    answers = []

    def post() -> None:
        body = {"model": "tiny", "prompt": [STUCK]}
        answers.append(server.http.post("/v1/completions", json=body))

    asking = threading.Thread(target=post)
    asking.start()
    eventually(lambda: server.ready().json()["status"] == "stalled")
    assert server.http.get("/health").status_code == 200
    server.say("give-up")
    server.say("release")
    assert server.process.wait(PATIENCE) == 7
    told = (tmp_path / "termination-log").read_text()
    assert re.search(r"stuck in one step for \d+ seconds", told)
    join(asking)
    assert answers[0].status_code == 503


def test_an_unreadable_tokenizer_is_a_failure_like_any_other(served, tmp_path):
    server = served("no-tokenizer")
    server.say("release")
    assert server.line() == "ModelError"
    assert server.process.wait(PATIENCE) == 3
    assert (tmp_path / "termination-log").read_text() == "/model: no tokenizer"


def test_a_port_in_use_is_an_error_that_names_it():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"127.0.0.1:{port}: cannot listen: .*--port"):
            bind("127.0.0.1", port)


def test_an_unknown_host_is_an_error_that_names_it():
    with pytest.raises(ConfigError, match=r"no\.such\.host\.invalid:80: cannot listen"):
        bind("no.such.host.invalid", 80)
