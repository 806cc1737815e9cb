"""``/debug/graphs``, the metrics and the log say the same about every graph."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import httpx
import pytest
from tests.engine.engines import GREEDY, document, generate, started
from tests.models.checkpoints import make_llama, write_safetensors
from tests.patience import PATIENCE
from tests.server.fakes import FakeClient, running_server
from tests.server.test_metrics import scrape, value

from kerf_runtime.compilation.counters import compilation_counter
from kerf_runtime.engine.args import EngineArgs

MODE_LINE = re.compile(
    r"captured (\d+) (\w+) graphs \((\w+)\): (\d+) nodes, (\d+) bytes, ([\d.]+) s"
)
ALL_LINE = re.compile(
    r"captured (\d+) of \d+ graphs: (\d+) bytes, of which (\d+) are shared; estimated (\d+) bytes"
)
GRAPH_LINE = re.compile(r"graph (\w+) (\w+) of (\d+) tokens: (\d+) nodes, (\d+) bytes, ([\d.]+) s")


def test_report_metrics_and_log_agree_on_every_number(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_safetensors(tmp_path / "model", make_llama())
    compilation = {
        "level": 3,
        "cudagraphMode": "FULL_AND_PIECEWISE",
        "backend": "eager",
        "inductorConfig": {},
    }
    args = EngineArgs(document=document(compilation=compilation), model_path=path, cache_dir=None)
    with caplog.at_level(logging.DEBUG, logger="kerf_runtime.engine.report"):
        core = started(args)
    replays = compilation_counter.graph_replays
    generate(core, [[1, 2, 3], [4, 5]])  # 5 tokens of prompts in one step, and then 2 tokens a step
    decodes = GREEDY.max_tokens - 1

    client = FakeClient().make_ready()
    client.started, client.stats = core.started_message(), core.stats()
    with running_server(client) as (url, _), httpx.Client(base_url=url, timeout=PATIENCE) as http:
        report, samples = http.get("/debug/graphs").json(), scrape(http)
    graphs = report["graphs"]
    found = {
        (g["mode"], "decode" if g["uniform_decode"] else "mixed", g["num_tokens"]): g
        for g in graphs["descriptors"]
    }
    assert {mode for mode, _, _ in found} == {"FULL", "PIECEWISE"}

    logged = {(line[1], line[2], int(line[3])): line for line in GRAPH_LINE.finditer(caplog.text)}
    assert logged.keys() == found.keys()
    for key, graph in found.items():
        line = logged[key]
        assert (int(line[4]), int(line[5])) == (graph["nodes"], graph["bytes"])
        assert float(line[6]) == pytest.approx(graph["seconds"], abs=1e-6)

    sums = {line[2]: line for line in MODE_LINE.finditer(caplog.text)}
    for mode, line in sums.items():
        of_mode = [graph for graph in graphs["descriptors"] if graph["mode"] == mode]
        assert line[3] == graphs["backend"] == "emulated"
        assert int(line[1]) == len(of_mode) == value(samples, "kerf_cudagraph_graphs", mode=mode)
        assert int(line[4]) == sum(graph["nodes"] for graph in of_mode)
        assert int(line[5]) == sum(graph["bytes"] for graph in of_mode)
        assert float(line[6]) == pytest.approx(sum(g["seconds"] for g in of_mode), abs=1e-3)
        for size in {graph["num_tokens"] for graph in of_mode}:
            same = [graph for graph in of_mode if graph["num_tokens"] == size]
            labels = {"mode": mode, "size": str(size)}
            assert value(samples, "kerf_cudagraph_memory_bytes", **labels) == sum(
                graph["bytes"] for graph in same
            )
            assert value(
                samples, "kerf_cudagraph_capture_duration_seconds", **labels
            ) == pytest.approx(sum(graph["seconds"] for graph in same))
    assert sums.keys() == {"FULL", "PIECEWISE"}
    [total] = ALL_LINE.findall(caplog.text)
    assert int(total[0]) == graphs["captured"]
    for text, name, field in (
        (total[1], "kerf_cudagraph_pool_bytes", "memory_bytes"),
        (total[2], "kerf_cudagraph_shared_bytes", "shared_bytes"),
        (total[3], "kerf_cudagraph_estimated_bytes", "estimated_bytes"),
    ):
        assert int(text) == value(samples, name) == graphs[field]
    assert value(samples, "kerf_cudagraph_estimate_error_ratio") == graphs["estimate_error"]
    assert value(samples, "kerf_cudagraph_pending_graphs") == len(graphs["pending"]) == 0
    assert graphs["memory_bytes"] == graphs["shared_bytes"] + sum(
        graph["bytes"] for graph in found.values()
    )
    assert graphs["captured"] == len(found)

    # What the two requests must have done, counted here and not by the engine.
    steps = {("PIECEWISE", 8, "Padded"): 1, ("FULL", 2, "Exact"): decodes}
    rows = report["dispatch_detail"]
    assert {(r["mode"], r["size"], r["reason"]): r["count"] for r in rows} == steps
    assert report["dispatch"] == {"FULL": decodes, "PIECEWISE": 1, "NONE": 0}
    for (mode, size, reason), count in steps.items():
        labels = {"mode": mode, "size": str(size), "reason": reason}
        assert value(samples, "kerf_dispatch_total", **labels) == count
    assert value(samples, "kerf_batches_total", tokens="5") == 1
    assert value(samples, "kerf_batches_total", tokens="2") == decodes
    assert value(samples, "kerf_scheduled_tokens_total", mode="PIECEWISE") == 5
    assert value(samples, "kerf_padding_tokens_total", mode="PIECEWISE") == 3
    assert value(samples, "kerf_scheduled_tokens_total", mode="FULL") == 2 * decodes
    assert {key: graph["hits"] for key, graph in found.items() if graph["hits"]} == {
        ("PIECEWISE", "mixed", 8): 1,
        ("FULL", "decode", 2): decodes,
    }
    pieces = len(core.engine.graphs._recorder._pieces)
    assert report["counters"]["graph_replays"] - replays == decodes + pieces
