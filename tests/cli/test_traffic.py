"""Every kind of file with a histogram is read, and what is wrong with one is named."""

from __future__ import annotations

import json
import re
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from tests.server.fakes import COUNTERS, REPORT

from kerf_runtime.cli.traffic import Traffic, parse_traffic, read_traffic
from kerf_runtime.config import CUDAGraphMode
from kerf_runtime.errors import ConfigError
from kerf_runtime.metrics import EngineCollector, EngineView, exposition
from kerf_runtime.stats import EngineStats

histograms = st.dictionaries(st.integers(1, 65536), st.integers(1, 10**9), min_size=1, max_size=8)


def parse(text):
    return parse_traffic(text, where="file")


def query(kind, result):
    return json.dumps({"status": "success", "data": {"resultType": kind, "result": result}})


@given(histograms)
def test_json_lines_and_an_instant_vector_say_the_same(histogram):
    lines = "".join(f"{size},{count}\n" for size, count in histogram.items())
    vector = [
        {"metric": {"tokens": str(size)}, "value": [1700000000.5, str(count)]}
        for size, count in histogram.items()
    ]
    assert parse(json.dumps(histogram)).histogram == histogram
    assert parse(lines).histogram == histogram
    assert parse("size,count\n" + lines).histogram == histogram
    assert parse(query("vector", vector)).histogram == histogram


def metrics_text(real_tokens, accept=None):
    """What a pod's /metrics say after steps of ``real_tokens``."""
    stats = EngineStats()
    for tokens in real_tokens:
        stats.record_step(mode="FULL", size=8, reason="Padded", real_tokens=tokens, seconds=0.1)
    view = EngineView("tiny", REPORT, stats.to_values(counters=COUNTERS))
    registry = CollectorRegistry()
    registry.register(EngineCollector(lambda: view))
    return exposition(registry, accept)[0].decode()


@pytest.mark.parametrize("accept", [None, "application/openmetrics-text; version=1.0.0"])
def test_the_runtimes_own_metrics_tell_the_batches_and_what_is_captured(accept):
    traffic = parse(metrics_text([5, 5, 7], accept))
    assert traffic.histogram == {5: 2, 7: 1}
    assert traffic.captured == (8,)
    full, pieces = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE
    assert traffic.graphs == {full: 1, pieces: 1}
    assert traffic.graph_bytes == {full: 2048, pieces: 2048}
    assert traffic.shared_bytes == 1024
    assert traffic.mode is CUDAGraphMode.FULL_AND_PIECEWISE


def test_what_a_graph_takes_is_known_for_each_mode():
    full, pieces = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE
    traffic = Traffic({}, graphs={full: 3, pieces: 2}, graph_bytes={full: 10, pieces: 100})
    assert (traffic.bytes_per_graph(full), traffic.bytes_per_graph(pieces)) == (4, 50)


def test_where_a_mode_has_no_graphs_any_graph_tells_what_one_takes():
    traffic = Traffic({}, graphs={CUDAGraphMode.FULL: 3}, graph_bytes={CUDAGraphMode.FULL: 10})
    assert traffic.bytes_per_graph(CUDAGraphMode.PIECEWISE) == 4
    assert Traffic({}).bytes_per_graph(CUDAGraphMode.FULL) is None


def test_series_of_several_pods_are_added_up():
    vector = [
        {"metric": {"tokens": "4", "pod": pod}, "value": [0, "1.5"]} for pod in ("a", "b", "c")
    ]
    assert parse(query("vector", vector)).histogram == {4: 4.5}


def test_of_a_range_a_plain_counter_counts_as_its_increase_with_resets_and_late_starts():
    name = {"__name__": "kerf_batches_total"}
    matrix = [
        {"metric": {**name, "tokens": "1"}, "values": [[10, "100"], [20, "130"], [30, "5"]]},
        {"metric": {**name, "tokens": "2"}, "values": [[20, "7"], [30, "9"]]},  # began later, at 0
    ]
    assert parse(query("matrix", matrix)).histogram == {1: 35, 2: 9}


def test_of_a_range_anything_computed_counts_as_the_sum_of_its_values():
    matrix = [{"metric": {"tokens": "1"}, "values": [[10, "0.5"], [20, "2"]]}]
    assert parse(query("matrix", matrix)).histogram == {1: 2.5}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "file: the histogram has no steps"),
        ("4,0\n", "the histogram has no steps"),
        ("1,2\n3\n", "line 2: expected size,count"),
        ("1,2\n0,5\n", "line 2: a size is a number of tokens from 1 to 65536, not '0'"),
        ("70000,5\n", "line 1: .* not '70000'"),
        ("1,-2\n", "line 1: a count is a number of steps, not '-2'"),
        ("1,nan\n", "line 1: a count .* not 'nan'"),
        ('{"1": ', "not valid JSON"),
        ('{"1": ' + "9" * 5000 + "}", "not valid JSON"),
        ('{"x": 3}', "entry 'x': a size .* not 'x'"),
        ('{"3": true}', "entry '3': a count .* not True"),
        ('{"3": [1]}', "entry '3': a count"),
        ("# HELP a b\n# TYPE a gauge\na 1\n", "the metrics have no kerf_batches_total"),
        ('# HELP a b\nkerf_batches_total{tokens="x"} 1\n', "a size is a number of tokens"),
        ("# HELP a b\nkerf_batches_total{ 1\n", "not the metrics of a runtime"),
        ('{"status": "error", "error": "too much"}', "the query failed: too much"),
        (query("scalar", [0, "1"]), "the query's result is a scalar, not a vector or a matrix"),
        (query("vector", [{"metric": {}, "value": [0, "1"]}]), "no label tokens"),
        (query("vector", [{"metric": {"tokens": "1"}}]), "not the answer of a query: KeyError"),
        (query("vector", [{"metric": {"tokens": "1"}, "value": [0, "NaN"]}]), "series 1: a count"),
        (query("vector", []), "the histogram has no steps"),
        ('{"status": "success", "data": [1]}', "not the answer of a query"),
    ],
)
def test_what_is_no_histogram_is_an_error_that_names_the_entry(text, words):
    with pytest.raises(ConfigError, match=words):
        parse(text)


def test_captured_sizes_are_refused_as_traffic():
    result = [{"metric": {"size": "8", "mode": "FULL"}, "value": [0, "1"]}]
    with pytest.raises(ConfigError, match=r"only size, which is the captured size .*kerf_batches"):
        parse(query("vector", result))


@given(st.text(max_size=60))
def test_no_text_whatever_raises_anything_but_a_config_error(text):
    with suppress(ConfigError):
        assert parse(text).histogram


def test_a_file_that_cannot_be_read_is_an_error_that_names_it(tmp_path):
    path = tmp_path / "absent.csv"
    with pytest.raises(ConfigError, match=re.escape(f"{path}: cannot read the histogram: No such")):
        read_traffic(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not text"):
        read_traffic(path)


def test_a_byte_order_mark_of_a_spreadsheet_is_no_part_of_the_first_line(tmp_path):
    path = tmp_path / "sizes.csv"
    path.write_bytes(b"\xef\xbb\xbfsize,count\n1,10\n8,2\n")
    assert dict(read_traffic(path).histogram) == {1: 10, 8: 2}
