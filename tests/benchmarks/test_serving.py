"""``benchmarks.serving``: its table, whole and cut off, and what it says of a server that does not start."""

from __future__ import annotations

import pytest
from benchmarks.serving import Bench, make_checkpoint, record, table

from benchmarks import readme, serving
from kerf_runtime.cli.bench_record import spread
from kerf_runtime.errors import EngineError


def start(kind, seconds):
    """As ``summary`` makes it of two starts."""
    both = spread([seconds, seconds + 1])
    return {
        **{"configuration": kind, "ready": both, "firstToken": both, "cache": "hit"},
        "phases": {"import": both, "weights": both, "ready": both},
        "counters": {"dynamo_traces": 1, "inductor_compilations": 3},
        "weightsBytesPerSecond": spread([3.5e9, 7e9]),
    }


PERCENTILES = {"mean": 0.01, "p50": 0.01, "p99": 0.02, "max": 0.03}
WHOLE = {
    "machine": {"gpu": "a GPU"},
    "setup": {"max_num_seqs": 256, "max_model_len": 512, "max_num_batched_tokens": 2048},
    "checkpoint": {"bytes": 16.06e9},
    "starts": [start("cold", 30.0), start("warm, new pod", 10.0)],
    "oneClient": {
        "tokenSeconds": spread([0.0047, 0.0048, 0.0049]),
        "stepSeconds": spread([0.0046, 0.0047, 0.0048]),
        "outsideStepSeconds": spread([0.0001, 0.0001, 0.0001]),
        "firstTokenSeconds": spread([0.006, 0.007, 0.008]),
        "medianGapSeconds": spread([0.0047, 0.0047, 0.0047]),
    },
    "manyClients": {
        **{"clients": 256, "completed": 1024, "failed": 0, "outputTokensPerSecond": 25000.0},
        **{"clientProcesses": 8, "clientCpuShare": 0.4, "inStepsShare": 0.9},
        "serverCpuShare": {"http": 0.98, "engine": 1.2},
        **dict.fromkeys(("ttftSeconds", "tpotSeconds", "latencySeconds"), PERCENTILES),
        "steps": {"FULL": {"count": 500.0, "meanSeconds": 0.0085}},
    },
    "engineAlone": dict.fromkeys(("tokenSeconds", "medianStepSeconds"), spread([0.0046])),
}


def test_the_table_has_every_part():
    text = "\n".join(table(WHOLE))
    assert "| start, s | cold | warm, new pod |" in text
    assert "| process to first token | 30.50 (30.00 to 31.00) | 10.50 (10.00 to 11.00) |" in text
    assert "| weights, GB/s | 5.25 (3.50 to 7.00) |" in text
    assert "| time per token | 4.800 (4.700 to 4.900) |" in text
    assert "| **HTTP, per token**: difference of the times | 0.200 (0.100 to 0.300) |" in text
    assert "| the same: difference of the medians | 0.100 (0.100 to 0.100) |" in text
    assert "25000 output tokens/s" in text
    assert "| FULL | 500 | 8.500 |" in text
    assert "were the limit" not in text


def test_clients_that_were_the_limit_are_told():
    found = {**WHOLE["manyClients"], "clientCpuShare": 0.97}
    assert "The clients were the limit" in "\n".join(table({**WHOLE, "manyClients": found}))


@pytest.mark.parametrize("missing", [("engineAlone",), ("engineAlone", "manyClients", "oneClient")])
def test_a_record_that_was_cut_off_has_a_table_of_what_is_there(missing):
    text = "\n".join(table({name: part for name, part in WHOLE.items() if name not in missing}))
    assert "process to first token" in text
    assert "HTTP, per token" not in text
    assert ("one client" in text) is ("oneClient" not in missing)


def test_the_readme_knows_the_program():
    assert "benchmarks.serving" in readme._TABLES


def test_the_setups_are_documents_that_the_engine_takes(tmp_path):
    for model in serving.SETUPS:
        document = Bench(model, tmp_path).document()
        assert document.served_name == model
        assert document.spec.engine.max_model_len >= serving.PROMPT + serving.ANSWER


def test_a_server_that_does_not_start_is_an_error_with_its_last_words(tmp_path, monkeypatch):
    monkeypatch.setattr(
        serving, "make_checkpoint", lambda bench: {"gpu": "none", "bytes": 1, "seconds": 1.0}
    )
    monkeypatch.setenv("TRITON_CACHE_DIR", "")  # given back afterwards
    with pytest.raises(EngineError, match=r"did not become ready.*the model folder"):
        list(record(Bench("tiny", tmp_path)))


def test_a_checkpoint_that_cannot_be_made_is_an_error_with_the_reason(tmp_path, monkeypatch):
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho no space left >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(program))
    with pytest.raises(EngineError, match="could not be made: no space left"):
        make_checkpoint(Bench("tiny", tmp_path))
