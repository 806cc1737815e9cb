"""``kerf bench``: what is measured and recorded, with a tiny model that compiles nothing."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from tests.server.tiny import write_tiny_checkpoint, write_tiny_document

from benchmarks import readme
from kerf_runtime.cli import bench_latency
from kerf_runtime.cli.bench_latency import run_workload
from kerf_runtime.cli.bench_record import header, spread, spread_text
from kerf_runtime.cli.bench_server import wait_ready
from kerf_runtime.cli.document import raw_document, read_document
from kerf_runtime.engine.args import EngineArgs
from kerf_runtime.engine.core import EngineCore
from kerf_runtime.errors import EngineError


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Document and model."""
    root = tmp_path_factory.mktemp("tiny")
    return write_tiny_document(root / "tiny.yaml"), write_tiny_checkpoint(root / "model")


def test_a_record_says_where_and_how_it_was_measured(monkeypatch):
    monkeypatch.setattr("sys.argv", ["kerf", "bench", "latency", "--model-path", "/home/me/m.gguf"])
    record = header("kerf bench latency")
    assert record["command"] == ["kerf", "bench", "latency", "--model-path", "m.gguf"]
    assert record["machine"].keys() == {"cpu", "cores", "memoryGiB", "system"}
    assert record["versions"].keys() == {"kerf", "python", "torch"}
    assert record["date"].endswith("+00:00")


def test_a_spread_has_the_median_and_the_extremes():
    stats = spread([3.0, 1.0, 2.0])
    assert stats == {"median": 2.0, "min": 1.0, "max": 3.0, "runs": 3}
    assert spread_text(stats, 10, 1) == "20.0 (10.0 to 30.0)"


def test_a_workload_times_prefill_and_decode_apart_and_returns_the_tokens(tiny):
    document, model = tiny
    raw = raw_document(read_document(document, ("compilation.level=0",), {}))
    core = EngineCore(EngineArgs(document=raw, model_path=model))
    core.startup()
    times, tokens = run_workload(core, batch=3, prompt_tokens=40, output_tokens=6)
    again, same = run_workload(core, batch=3, prompt_tokens=40, output_tokens=6)
    assert [len(sequence) for sequence in tokens] == [6, 6, 6]
    assert same == tokens
    assert len({tuple(sequence) for sequence in tokens}) > 1
    assert all(0 < value < 60 for value in (*times.values(), *again.values()))


def test_latency_compares_configurations_in_one_run(kerf, tiny, tmp_path, monkeypatch):
    document, model = tiny
    graphs = ("compilation.level=0", "compilation.cudagraphMode=FULL_DECODE_ONLY")
    configurations = {"level 0": bench_latency.CONFIGURATIONS["level 0"], "graphs": graphs}
    monkeypatch.setattr(bench_latency, "CONFIGURATIONS", configurations)
    output = tmp_path / "results" / "latency.json"
    done = kerf(
        *("bench", "latency", "-f", document, "--model-path", model, "--output", output),
        *("--batch", 1, "--batch", 3, "--prompt-tokens", 16, "--output-tokens", 4, "--repeats", 2),
    )
    assert done.code == 0, done.err
    assert done.out.count("level 0") == 2
    record = json.loads(output.read_text())
    rows = [(row["configuration"], row["batch"]) for row in record["results"]]
    assert rows == [("level 0", 1), ("graphs", 1), ("level 0", 3), ("graphs", 3)]
    for row in record["results"]:
        assert row["sameTokensAsBaseline"] is True
        assert row["decodeStepSeconds"]["runs"] == row["prefillSeconds"]["runs"] == 2
    text = readme.render(output.parent)
    assert "| graphs | 3 |" in text
    assert "latency.json" in text


def test_startup_compares_cold_with_warm(kerf, tiny, tmp_path):
    document, model = tiny
    output = tmp_path / "startup.json"
    done = kerf(
        *("bench", "startup", "-f", document, "--model-path", model, "--repeats", 1),
        *("--set", "compilation.level=0", "--output", output, "--json"),
    )
    assert done.code == 0, done.err
    cold, warm = done.json["results"]
    assert (cold["configuration"], warm["configuration"]) == ("cold", "warm")
    for part in (cold, warm):
        assert {"import", "weights", "ready"} <= part["phases"].keys()
        assert part["firstToken"]["median"] >= part["ready"]["median"]
    assert "process to first token" in readme.render(tmp_path)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (['{"event": "phase"}', '{"error": {"message": "x"}}'], "no such model"),
        ([], "no such model"),
    ],
    ids=["error", "silent"],
)
def test_a_server_that_does_not_start_is_an_error_with_its_last_words(tmp_path, lines, words):
    log = tmp_path / "server.log"
    log.write_text("Error: no such model")
    code = f"print({chr(10).join(lines)!r})" if lines else ""
    with (
        subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
        ) as process,
        pytest.raises(EngineError, match=words),
    ):
        wait_ready(process, log)


def test_the_committed_table_is_the_one_that_the_records_give():
    assert readme.TARGET.read_text() == readme.render()
