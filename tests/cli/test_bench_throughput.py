"""``kerf bench throughput``: our own server, somebody else's, and what is said when there is none."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import contextmanager

import pytest
from tests.cli.test_load import DONE, USAGE, peer, piece
from tests.server.fakes import FakeClient, running_server
from tests.server.tiny import write_tiny_checkpoint, write_tiny_document

from benchmarks import readme
from kerf_runtime.cli import bench_capture, bench_server, bench_throughput


def test_our_own_server_is_measured_and_recorded(kerf, tmp_path):
    client = FakeClient(endless=True, max_model_len=400).make_ready()
    output = tmp_path / "results" / "throughput.json"
    with running_server(client) as (url, _):
        done = kerf(
            *("bench", "throughput", "--base-url", f"{url}/v1", "--num-requests", 12),
            *("--concurrency", 4, "--input-len", 20, "--output-len", 8, "--range-ratio", 0.5),
            *("--vocab-size", 200, "--warm-up", 2, "--output", output),
        )
    assert done.code == 0, done.err
    assert "12 answered, 0 failed" in done.out
    assert "time to first token" in done.out
    assert "LATENCY ms" in done.out
    record = json.loads(output.read_text())
    found = record["results"]
    assert (found["completed"], found["failed"], found["tokensCountedBy"]) == (12, 0, "server")
    counted = client.seen[2:]
    assert found["promptTokens"] == sum(len(r.prompt_token_ids) for r in counted)
    assert found["outputTokens"] == sum(r.params.max_tokens for r in counted)
    assert all(r.params.ignore_eos for r in counted)
    assert found["ttftSeconds"]["p50"] <= found["latencySeconds"]["p50"]
    assert found["clientCpuShare"] > 0
    assert record["model"] == "tiny"
    assert "output tokens/s" in readme.render(output.parent)


def test_a_load_generator_that_is_the_bottleneck_says_so(kerf, monkeypatch):
    monkeypatch.setattr(bench_throughput, "BUSY_SHARE", 0.0)
    with running_server(FakeClient(max_model_len=400).make_ready()) as (url, _):
        sizes = ("--num-requests", 2, "--input-len", 10, "--output-len", 4)
        done = kerf("bench", "throughput", "--base-url", f"{url}/v1", *sizes)
    assert done.code == 0, done.err
    assert "This program itself was busy" in done.out


def test_chats_in_words_and_json_with_progress(kerf):
    with running_server(FakeClient(max_model_len=4000).make_ready()) as (url, _):
        done = kerf(
            *("bench", "throughput", "--base-url", f"{url}/v1", "--endpoint", "chat", "--json"),
            *("--num-prompts", 5, "--max-concurrency", 2, "--input-len", 10, "--request-rate", 500),
        )
    assert done.code == 0, done.err
    assert done.json["results"]["completed"] == 5
    assert done.json["server"]["endpoint"] == "chat"
    events = [json.loads(line) for line in done.out.splitlines()[:-1]]
    assert {event["event"] for event in events} >= {"phase", "phase_done"}


def test_somebody_elses_server_with_failures_is_measured_too(kerf):
    def script(n):
        return (503, b"busy") if n % 4 == 0 else [piece("a"), piece("b"), USAGE, DONE]

    with peer(script) as server:
        done = kerf("bench", "throughput", "--base-url", server.url, "--num-requests", 20)
    assert done.code == 0, done.err
    assert "15 answered, 5 failed" in done.out
    assert "5 x HTTP 503: busy" in done.out


def test_a_server_that_knows_no_ignore_eos_is_told_apart(kerf):
    refusal = (400, b'{"error": {"message": "Unrecognized request argument: ignore_eos"}}')
    with peer(lambda n: refusal) as server:
        done = kerf("bench", "throughput", "--base-url", server.url, "--model", "x")
    assert done.code == 1
    assert "none of 1 warm-up requests was answered: HTTP 400" in done.err
    assert "--no-ignore-eos" in done.err


def test_a_server_that_answers_nothing_that_counts_is_told_from_one_that_did_not_warm_up(kerf):
    with peer(lambda n: (503, b"busy")) as server:
        ask = ("bench", "throughput", "--base-url", server.url, "--model", "x")
        done = kerf(*ask, "--num-requests", 5, "--warm-up", 0)
    assert done.code == 1
    assert "none of 5 requests was answered: HTTP 503" in done.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--base-url", "http://127.0.0.1:9/v1"), "models cannot be read"),
        (("--base-url", "http://x/v1", "-f", "y.yaml"), "there is a server already"),
        (("--base-url", "http://x/v1", "--prefix-len", 128), "leaves nothing"),
        (("--base-url", "http://x/v1", "--endpoint", "chat", "--vocab-size", 9), "no token ids"),
        ((), "no ModelDeployment was given"),
    ],
)
def test_wrong_usage_is_2_and_says_what_to_do(kerf, arguments, words):
    done = kerf("bench", "throughput", *arguments)
    assert done.code == 2
    assert words in done.err


def test_measuring_a_server_needs_no_torch():
    with peer(lambda n: [piece("a"), DONE]) as server:
        code = (
            "import sys\n"
            "from kerf_runtime.cli import run\n"
            f"assert run(['bench', 'throughput', '--base-url', {server.url!r}, '--num-requests', '2']) == 0\n"
            "assert 'torch' not in sys.modules\n"
        )
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)


@pytest.fixture
def started(monkeypatch):
    """Instead of servers of their own the programs get the fake one; the list says with which caches."""
    caches = []

    @contextmanager
    def start(file, model_path, cache):
        caches.append(cache)
        assert file.is_file()
        with running_server(FakeClient(max_model_len=400).make_ready()) as (url, _):
            yield url

    monkeypatch.setattr(bench_server, "started_server", start)
    monkeypatch.setattr(bench_capture, "started_server", start)
    return caches


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Options that name a document and a model."""
    root = tmp_path_factory.mktemp("tiny")
    document = write_tiny_document(root / "tiny.yaml")
    return "-f", document, "--model-path", write_tiny_checkpoint(root / "model")


def test_without_a_url_a_server_of_the_document_is_started(kerf, started, tiny, tmp_path):
    sizes = ("--num-requests", 10, "--vocab-size", 200, "--input-len", 16, "--output-len", 4)
    done = kerf("bench", "throughput", *tiny, "--cache-dir", tmp_path / "cache", "--json", *sizes)
    assert done.code == 0, done.err
    assert done.json["results"]["outputTokens"] == 40
    assert started == [tmp_path / "cache"]
    phases = [json.loads(line).get("phase") for line in done.out.splitlines()]
    assert [name for name in dict.fromkeys(phases) if name] == ["start", "warm-up", "requests"]


def test_captures_are_read_from_the_report_of_fresh_servers_with_a_filled_cache(
    kerf, started, tiny, tmp_path
):
    output = tmp_path / "results" / "capture.json"
    done = kerf("bench", "capture", *tiny, "--repeats", 2, "--output", output)
    assert done.code == 0, done.err
    assert len(started) == 3
    assert len(set(started)) == 1
    record = json.loads(output.read_text())
    rows = [(row["mode"], row["tokens"], row["seconds"]["runs"]) for row in record["results"]]
    assert rows == [("FULL", 8, 2), ("PIECEWISE", 8, 2)]
    assert record["captureSeconds"]["median"] == 0.5
    assert "CAPTURE ms" in done.out
    assert "| FULL | 8 | 3 |" in readme.render(output.parent)
