"""`kerf compile`, then `kerf serve` on a read-only cache: the whole chain with a tiny random model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from tests.patience import PATIENCE, eventually, given_time, join
from tests.server.test_metrics import scrape, value
from tests.server.tiny import MAX_LENGTH, write_tiny_checkpoint, write_tiny_document
from tests.server.tripwire import Tripwire

from kerf_runtime.metric_table import METRICS

KERF = (sys.executable, "-m", "kerf_runtime.cli")
GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0}


def kerf(*arguments: object, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    command = [*KERF, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=500, **kwargs)


@dataclass
class Setup:
    """Files of one model and a cache that `kerf compile` filled."""

    model: Path
    document: Path
    cache: Path
    compiled: dict[str, Any]

    @property
    def options(self) -> list[str]:
        return [
            *("-f", str(self.document)),
            *("--model-path", str(self.model)),
            *("--cache-dir", str(self.cache)),
        ]


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    root = tmp_path_factory.mktemp("tiny")
    model = write_tiny_checkpoint(root / "model")
    document = write_tiny_document(root / "tiny.yaml")
    made = Setup(model, document, root / "cache", {})
    result_file = root / "result.json"
    done = kerf("compile", *made.options, "--result-file", result_file)
    assert done.returncode == 0, done.stderr
    made.compiled = json.loads(result_file.read_text())
    return made


class Server:
    """A `kerf serve --json` process; ``events`` are the lines it wrote until it was ready."""

    def __init__(self, *options: str, env: dict[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            [*KERF, "serve", *options, "--port", "0", "--json"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(env or {})},
        )
        self.events: list[dict[str, Any]] = []
        for line in self.process.stdout:
            self.events.append(json.loads(line))
            if self.events[-1].get("event") == "ready":
                break
        else:
            raise AssertionError(self.process.stderr.read())
        self.http = httpx.Client(base_url=self.events[-1]["url"], timeout=120)

    @property
    def engine_pid(self) -> int:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        [engine] = [pid for pid in children.split() if "spawn_main" in _command_of(pid)]
        return int(engine)

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        self.process.communicate(timeout=PATIENCE)
        return self.process.returncode

    def end(self) -> None:
        self.http.close()
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate(timeout=PATIENCE)


def _command_of(pid: str) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


@pytest.fixture(scope="module")
def tripwire(tmp_path_factory: pytest.TempPathFactory) -> Tripwire:
    return Tripwire(tmp_path_factory.mktemp("tripwire"), "transformers")


@pytest.fixture(scope="module")
def server(setup: Setup, tripwire: Tripwire) -> Iterator[Server]:
    """Shared: tests must leave it running."""
    started = Server(*setup.options, "--cache-read-only", env=tripwire.environment)
    yield started
    started.end()


def test_compiling_publishes_the_key_with_its_gate(setup):
    compiled = setup.compiled
    assert compiled["result"] == "published"
    folder = setup.cache / "torch_compile_cache" / compiled["key"]
    assert (folder / "READY").is_file()
    assert compiled["sizeBytes"] > 0
    assert compiled["gate"]["passed"] is True
    counters = compiled["counters"]
    assert (counters["dynamo_traces"], counters["graphs_seen"]) == (1, 1)
    assert (counters["pieces_seen"], counters["capturable_pieces_seen"]) == (7, 4)
    assert counters["inductor_compilations"] == 3
    assert {"weights", "trace", "compile"} <= compiled["phases"].keys()


@pytest.mark.parametrize(
    ("command", "number", "code"),
    [("compile", signal.SIGTERM, 143), ("serve", signal.SIGINT, 0)],
)
def test_a_compilation_that_is_cut_off_leaves_nothing_behind(
    setup: Setup, tmp_path: Path, command: str, number: signal.Signals, code: int
) -> None:
    cache, scratch = tmp_path / "cache", tmp_path / "scratch"
    scratch.mkdir()
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\nwhile kill -0 $PPID; do sleep 0.05; done\n")
    compiler.chmod(0o755)
    options = ["-f", setup.document, "--model-path", setup.model, "--cache-dir", cache, "--json"]
    options += ["--result-file", tmp_path / "result"] if command == "compile" else ["--port", "0"]
    process = subprocess.Popen(
        [*KERF, command, *map(str, options)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # With a compiler that does not finish, the test takes the time that it needs.
        env={**os.environ, "TMPDIR": str(scratch), "CXX": str(compiler)},
    )

    def left() -> list[Path]:
        return [*cache.glob("*/.staging-*"), *scratch.glob("kerf-*")]

    try:
        eventually(lambda: process.poll() is not None or any(scratch.glob("kerf-inductor-*")), 120)
        assert any(cache.glob("*/.staging-*"))
        process.send_signal(number)
        output, errors = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    assert process.returncode == code, errors
    assert left() == []
    if command == "compile":
        told = json.loads((tmp_path / "result").read_text())
        assert told == json.loads(output.splitlines()[-1])
        assert told["error"]["reason"] == "Terminated"


def test_compiling_again_is_a_hit_that_compiles_nothing(setup):
    done = kerf("compile", *setup.options, "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert (result["result"], result["key"]) == ("hit", setup.compiled["key"])
    assert result["counters"]["dynamo_traces"] == 0
    assert result["counters"]["inductor_compilations"] == 0
    assert result["gate"]["passed"] is True


def test_serving_from_the_read_only_cache_traces_and_compiles_nothing(setup, server):
    ready = server.events[-1]
    assert ready["cache"]["result"] == "hit"
    assert ready["cache"]["key"] == setup.compiled["key"]
    assert ready["counters"]["dynamo_traces"] == 0
    assert ready["counters"]["inductor_compilations"] == 0
    # Short phases of a tiny model may pass between two looks; the import of torch never does.
    assert "import" in [event["phase"] for event in server.events if event["event"] == "phase"]
    startup = server.http.get("/debug/graphs").json()["startup"]
    assert {"import", "weights", "capture"} <= set(startup)


def test_no_process_of_a_server_imports_transformers(server, tripwire):
    text = {**GREEDY, "max_tokens": 2, "prompt": "ab"}
    chat = {**GREEDY, "max_tokens": 2, "messages": [{"role": "user", "content": "ab"}]}
    for path, body in (("/v1/completions", text), ("/v1/chat/completions", chat)):
        assert server.http.post(path, json=body).status_code == 200
    assert tripwire.tripped == []


def test_an_import_in_a_child_of_a_process_is_seen(tmp_path):
    own = Tripwire(tmp_path, "transformers")
    code = "from multiprocessing import *; set_start_method('spawn'); Pool(1).apply(exec, ['import transformers'])"
    environment = {**os.environ, **own.environment}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=PATIENCE)
    assert ["spawn_main" in command for command in own.tripped] == [True]


def test_answers_are_the_same_streamed_in_a_batch_and_alone(server):
    ask = {**GREEDY, "max_tokens": 12, "prompt": ["abc", "Hello", "z" * 90]}
    together = server.http.post("/v1/completions", json=ask).json()
    texts = [choice["text"] for choice in together["choices"]]
    assert together["usage"] == {
        "prompt_tokens": 98,
        "completion_tokens": 36,
        "total_tokens": 134,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    with openai.OpenAI(base_url=f"{server.http.base_url}/v1", api_key="none") as client:
        for prompt, text in zip(ask["prompt"], texts, strict=True):
            stream = client.completions.create(**GREEDY, prompt=prompt, max_tokens=12, stream=True)
            assert "".join(chunk.choices[0].text for chunk in stream) == text
        answer = client.chat.completions.create(
            **GREEDY, messages=[{"role": "user", "content": "Hi"}], max_tokens=5
        )
    assert answer.usage.completion_tokens == 5


def test_a_seed_repeats_an_answer_and_another_seed_gives_another(server):
    def ask(seed: int) -> str:
        body = {"model": "tiny", "prompt": "abc", "max_tokens": 20, "seed": seed}
        return server.http.post("/v1/completions", json=body).json()["choices"][0]["text"]

    first = ask(1)
    assert ask(1) == first
    assert any(ask(seed) != first for seed in (2, 3))


def test_the_report_and_the_metrics_move_with_the_requests_and_agree(server):
    before = scrape(server.http)
    body = {**GREEDY, "prompt": ["ab", "cd", "e"], "max_tokens": 8}
    assert server.http.post("/v1/completions", json=body).status_code == 200

    def generated() -> float:
        return value(scrape(server.http), "kerf_generation_tokens_total", model_name="tiny")

    start = value(before, "kerf_generation_tokens_total", model_name="tiny")
    eventually(lambda: generated() == start + 24)
    samples = scrape(server.http)
    report = server.http.get("/debug/graphs").json()
    for row in report["dispatch_detail"]:
        labels = {"mode": row["mode"], "size": str(row["size"]), "reason": row["reason"]}
        assert value(samples, "kerf_dispatch_total", **labels) == row["count"]
    assert report["dispatch"]["FULL"] >= 7
    assert report["dispatch"]["PIECEWISE"] >= 1
    hits = {(d["mode"], d["num_tokens"]): d["hits"] for d in report["graphs"]["descriptors"]}
    # Whether all three began in one step is up to the machine; that every step was a replay is not.
    assert sum(n for (mode, _), n in hits.items() if mode == "FULL") == report["dispatch"]["FULL"]
    assert report["graphs"]["backend"] == "emulated"
    assert report["graphs"]["captured"] == len(report["graphs"]["descriptors"])
    assert value(samples, "kerf_padding_tokens_total", mode="FULL") >= 7
    assert value(samples, "kerf_compilations_after_startup_total") == 0
    assert value(samples, "kerf_capture_after_startup_total") == 0
    assert report["counters"]["guards_evaluated"] == 0


def test_a_real_engine_exports_every_metric_of_the_table(server):
    body = {**GREEDY, "prompt": "ab", "max_tokens": 2}
    assert server.http.post("/v1/completions", json=body).status_code == 200
    only_when_compiling_or_dropping = {
        "kerf_compile_duration_seconds_bucket",
        "kerf_cudagraph_dropped_graphs",
    }

    def missing() -> set[str]:
        exported = {name for name, _ in scrape(server.http)}
        return {spec.series for spec in METRICS.values()} - exported

    eventually(lambda: missing() <= only_when_compiling_or_dropping)
    assert missing() == only_when_compiling_or_dropping


def test_bad_requests_are_refused_and_the_server_stays_up(server):
    def status(**fields: Any) -> int:
        body = {"model": "tiny", "prompt": "a", **fields}
        return server.http.post("/v1/completions", json=body).status_code

    headers = {"content-type": "application/json"}
    assert server.http.post("/v1/completions", content="{", headers=headers).status_code == 400
    assert status(max_tokens=-1) == 400
    too_long = server.http.post("/v1/completions", json={"model": "tiny", "prompt": "x" * 500})
    assert too_long.status_code == 400
    told = too_long.json()["error"]["message"]
    assert "the prompt has 500 tokens, which leaves no room for an answer within" in told
    assert f"the model's limit of {MAX_LENGTH} tokens" in told
    assert status(unknown_option=1) == 400
    assert status(model="other") == 404
    assert server.http.get("/ready").status_code == 200
    assert status(max_tokens=1) == 200


def test_a_client_that_leaves_frees_its_blocks(server):
    body = {**GREEDY, "prompt": "abc", "stream": True, "max_tokens": 180, "ignore_eos": True}
    with server.http.stream("POST", "/v1/completions", json=body) as response:
        next(response.iter_lines())

    def idle() -> bool:
        samples = scrape(server.http)
        running = value(samples, "kerf_requests_running", model_name="tiny")
        return running == 0 and value(samples, "kerf_kv_cache_usage_ratio", model_name="tiny") == 0

    eventually(idle)


def test_sigterm_under_load_is_not_ready_at_once_answers_what_runs_and_exits_with_0(setup):
    server = Server(*setup.options, "--cache-read-only", "--set", "drainSeconds=600")
    try:
        engine = server.engine_pid
        asked: list[bool] = []
        results: list[httpx.Response] = []
        last = threading.Event()

        def ask(stream: bool) -> None:
            """One request after another: some are running at any moment."""
            body = {**GREEDY, "prompt": "abc", "max_tokens": 150, "ignore_eos": True}
            while not last.is_set():
                asked.append(stream)
                fields = {**body, "stream": stream}
                results.append(server.http.post("/v1/completions", json=fields))

        def is_whole(response: httpx.Response) -> bool:
            if response.headers["content-type"].startswith("text/event-stream"):
                return response.text.endswith("data: [DONE]\n\n")
            return response.json().get("usage", {}).get("completion_tokens") == 150

        threads = [threading.Thread(target=ask, args=(stream,)) for stream in (False, True) * 6]
        for thread in threads:
            thread.start()
        eventually(lambda: len(results) > 0)
        os.kill(engine, signal.SIGSTOP)  # what is running does not end before the rest is seen
        eventually(lambda: len(asked) - len(results) == len(threads))
        last.set()
        server.process.send_signal(signal.SIGTERM)
        eventually(lambda: server.http.get("/ready").status_code == 503)
        running, _, words = server.http.get("/ready").json()["detail"].partition(" ")
        assert (int(running) > 0, words) == (True, "requests are still running")
        assert server.http.get("/health").status_code == 200
        before = sum(map(is_whole, results))
        os.kill(engine, signal.SIGCONT)
        server.process.communicate(timeout=PATIENCE)
        assert server.process.returncode == 0
        join(*threads)
        assert sum(map(is_whole, results)) - before >= int(running)
        # Who comes two seconds after the signal is refused, and nobody else.
        assert {r.status_code for r in results if not is_whole(r)} <= {503}
        assert not Path(f"/proc/{engine}").exists()
    finally:
        server.end()


def test_a_killed_engine_turns_the_server_not_live_with_the_reason_within_two_seconds(
    setup, tmp_path
):
    log = tmp_path / "termination-log"
    server = Server(*setup.options, "--cache-read-only", env={"KERF_TERMINATION_LOG": str(log)})
    try:
        answers: list[int | None] = []
        body = {**GREEDY, "prompt": "abc", "max_tokens": 180, "ignore_eos": True}

        def ask() -> None:
            """One request after another: a fast machine answers one before a scrape sees it."""
            while not answers or answers[-1] == 200:
                try:
                    answers.append(server.http.post("/v1/completions", json=body).status_code)
                except httpx.TransportError:
                    answers.append(None)  # asked when the server had already ended

        def is_live() -> bool:
            try:
                return server.http.get("/health").status_code == 200
            except httpx.TransportError:
                return False

        thread = threading.Thread(target=ask)
        thread.start()
        eventually(lambda: value(scrape(server.http), "kerf_requests_running", model_name="tiny"))
        with given_time() as given:
            os.kill(server.engine_pid, signal.SIGKILL)
            eventually(lambda: not is_live() and log.exists() and "killed" in log.read_text())
            assert given.seconds < 2
        join(thread)
        assert answers[-1] in (503, None)
        server.process.communicate(timeout=PATIENCE)
        assert server.process.returncode == 7
        assert "was killed by SIGKILL" in log.read_text()
    finally:
        server.end()


def test_what_only_the_engine_can_find_wrong_is_one_message_and_its_own_exit_code(setup):
    options = (*setup.options, "--set", "engine.maxModelLen=99999", "--port", "0")
    done = kerf("serve", *options)
    assert done.returncode == 2
    assert done.stderr.count("maxModelLen 99999 is above the model's own limit") == 1
    assert "Traceback" not in done.stderr


def test_an_unexpected_cache_key_is_refused(setup):
    environment = {**os.environ, "KERF_CACHE_KEY": "0123456789abcdef"}
    done = kerf("serve", *setup.options, "--port", "0", env=environment)
    assert done.returncode == 5
    assert "the operator expects cache key 0123456789abcdef" in done.stderr


def test_an_interrupt_while_the_engine_loads_leaves_no_process(setup, tmp_path):
    process = subprocess.Popen(
        [*KERF, "run", *setup.options, "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        assert "(loading)" in process.stdout.readline()
        eventually(lambda: _children(process.pid) != [])
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        output, _ = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, output
        assert "Traceback" not in output
        # Python's own helper of shared resources ends by itself once its parent has.
        eventually(lambda: _group(process.pid) == [])
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def _children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def _group(leader: int) -> list[int]:
    """Living processes of a process group."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it ended while we looked
        if int(fields[2]) == leader and fields[0] != "Z":
            found.append(int(path.parent.name))
    return found
