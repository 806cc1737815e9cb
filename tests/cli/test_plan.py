"""``kerf plan sizes``: what it prints, what it reads, what it refuses."""

from __future__ import annotations

import io
import json
import re

import pytest
import yaml
from tests.cli.test_traffic import metrics_text

DOCUMENT_SIZES = """
  engine: {maxNumSeqs: 8, maxNumBatchedTokens: 64}
  compilation: {cudagraphMode: FULL_AND_PIECEWISE, captureSizes: [1, 4, 32]}
"""


@pytest.fixture
def traffic(tmp_path):
    path = tmp_path / "traffic.csv"
    path.write_text("size,count\n1,60\n3,30\n8,9\n30,1\n")
    return path


@pytest.fixture
def deployment(document):
    document.write_text(document.read_text() + DOCUMENT_SIZES)
    return document


def test_the_list_is_printed_as_yaml_beside_what_the_sizes_of_now_cost(kerf, traffic, deployment):
    done = kerf("plan", "sizes", traffic, "-f", deployment, "--max-graphs", 6)
    assert done.code == 0
    table, _, snippet = done.out.partition("compilation:")
    assert yaml.safe_load("compilation:" + snippet) == {"compilation": {"captureSizes": [3, 8, 30]}}
    rows = [line.split() for line in table.splitlines()]
    assert ["1", "60.0", "%", "0.00", "%", "-", "-"] in rows
    assert ["3", "-", "-", "90.0", "%", "32.26", "%"] in rows
    assert ["4", "30.0", "%", "6.00", "%", "-", "-"] in rows
    assert ["above", "0.0", "%", "no", "graph", "0.0", "%", "no", "graph"] in rows
    assert ["all", "100.0", "%", "49.60", "%", "100.0", "%", "32.26", "%"] in rows
    # Two for 3 and for 8; no decode batch needs more than 8.
    assert "3 sizes, 5 graphs in mode FULL_AND_PIECEWISE (at most 6)" in table


def test_without_a_limit_there_are_as_many_graphs_as_now(kerf, traffic, deployment):
    result = kerf("plan", "sizes", traffic, "-f", deployment, "--json").json
    assert (result["maxGraphs"], result["graphs"]) == (6, 5)
    assert result["captureSizes"] == [use["size"] for use in result["after"]["sizes"]]
    assert result["after"]["paddingTokens"] < result["before"]["paddingTokens"]


def test_the_result_is_json_with_steps_and_padding_before_and_after(kerf, traffic):
    options = ("--max-num-seqs", 8, "--max-graphs", 2, "--max-size", 16, "--current", "4,16")
    assert kerf("plan", "sizes", traffic, *options, "--json").json == {
        "captureSizes": [3, 8],
        "mode": "PIECEWISE",
        "graphs": 2,
        "maxGraphs": 2,
        "before": {
            "steps": 100,
            "stepsAboveLargest": 1,
            "tokens": 60 + 90 + 72,
            "paddingTokens": 60 * 3 + 30 + 9 * 8,
            "paddingRatio": 282 / 504,
            "sizes": [
                {"size": 4, "steps": 90, "paddingTokens": 210},
                {"size": 16, "steps": 9, "paddingTokens": 72},
            ],
        },
        "after": {
            "steps": 100,
            "stepsAboveLargest": 1,
            "tokens": 222,
            "paddingTokens": 120,
            "paddingRatio": 120 / 342,
            "sizes": [
                {"size": 3, "steps": 90, "paddingTokens": 120},
                {"size": 8, "steps": 9, "paddingTokens": 0},
            ],
        },
    }


def test_metrics_on_standard_input_say_what_there_is_now(kerf, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(metrics_text([5] * 9 + [7])))
    result = kerf("plan", "sizes", "-", "--max-num-seqs", 8, "--json").json
    assert [use["size"] for use in result["before"]["sizes"]] == [8]
    # One size needs the two graphs that there are; 5 and 8 would need four.
    assert (result["captureSizes"], result["maxGraphs"]) == ([8], 2)
    assert result["mode"] == "FULL_AND_PIECEWISE"


def test_a_memory_budget_counts_what_graphs_of_each_mode_take_and_what_they_share(kerf, tmp_path):
    path = tmp_path / "metrics"
    line = 'kerf_cudagraph_memory_bytes{mode="FULL",size="8"} '
    text = metrics_text([1, 2, 3, 20])
    assert f"{line}2048" in text
    path.write_text(text.replace(f"{line}2048", f"{line}1024"))
    # 1 KiB for all, 1 KiB for a graph of decodes and 2 KiB for one of pieces: 3 up to 8 tokens, 2 above.
    options = ("--max-num-seqs", 8, "--max-size", 20, "--json")

    def planned(budget):
        return kerf("plan", "sizes", path, "--memory-budget", budget, *options).json

    found = {budget: planned(budget)["captureSizes"] for budget in ("4Ki", "6Ki", "7Ki", "10Ki")}
    assert found == {"4Ki": [20], "6Ki": [8, 20], "7Ki": [3, 20], "10Ki": [1, 3, 20]}
    assert planned("7Ki")["maxGraphs"] == 6


def test_a_memory_budget_is_divided_by_the_bytes_of_a_graph(kerf, traffic):
    options = ("--max-num-seqs", 8, "--json")
    budget = ("--memory-budget", "1Gi", "--bytes-per-graph", "256Mi")
    assert kerf("plan", "sizes", traffic, *budget, *options).json["maxGraphs"] == 4
    both = kerf("plan", "sizes", traffic, *budget, "--max-graphs", 3, *options)
    assert both.json["maxGraphs"] == 3


def test_the_budget_of_the_document_counts_where_the_bytes_of_a_graph_are_known(
    kerf, traffic, deployment
):
    more = ("--set", "compilation.graphMemoryBudget=8Mi", "--bytes-per-graph", "2Mi", "--json")
    assert kerf("plan", "sizes", traffic, "-f", deployment, *more).json["maxGraphs"] == 4


def test_batches_counted_above_the_largest_step_are_that_step(kerf, tmp_path, deployment):
    path = tmp_path / "traffic.json"
    path.write_text(json.dumps({"4": 5, "72": 5}))
    more = ("--max-size", 64, "--max-graphs", 8, "--json")
    result = kerf("plan", "sizes", path, "-f", deployment, *more).json
    assert result["captureSizes"] == [4, 64]
    assert result["after"]["stepsAboveLargest"] == 0


SEQS = ("--max-num-seqs", "8")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((), "--max-num-seqs: nothing says how many sequences a step can have"),
        (SEQS, "--max-graphs: nothing says how many graphs there may be"),
        ((*SEQS, "--current", "1,0"), "--current 1,0: a size is a number .* 65536, not '0'"),
        ((*SEQS, "--current", "1,x"), "not 'x'"),
        ((*SEQS, "--max-graphs", "4", "--max-size", "7"), "size 7 is below maxNumSeqs 8"),
        ((*SEQS, "--memory-budget", "1Gi"), "--memory-budget: a memory budget needs to know"),
        ((*SEQS, "--memory-budget", "1GB"), "--memory-budget: '1GB' is not a quantity"),
        ((*SEQS, "--bytes-per-graph", "0"), "--bytes-per-graph: 0 bytes hold no graph"),
        (
            (*SEQS, "--memory-budget", "1", "--bytes-per-graph", "2"),
            "--memory-budget: 1 bytes are too few: mode PIECEWISE needs 2",
        ),
        ((*SEQS, "--max-graphs", "0"), "0 is not in the range"),
    ],
)
def test_what_is_missing_or_impossible_is_said_with_exit_code_2(kerf, traffic, options, words):
    done = kerf("plan", "sizes", traffic, *options)
    assert (done.code, done.out) == (2, "")
    assert_matches(words, done.err)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--max-size", "65"), "size 65 is above engine.maxNumBatchedTokens 64"),
        (("--max-graphs", "1"), "1 graphs are too few: mode FULL_AND_PIECEWISE needs 2"),
        (("--set", "compilation.cudagraphMode=NONE"), "mode NONE records no graphs"),
        (
            ("--set", "compilation.graphMemoryBudget=1Mi"),
            "compilation.graphMemoryBudget: a memory budget needs to know what a graph takes",
        ),
    ],
)
def test_what_the_document_does_not_allow_is_said_with_exit_code_2(
    kerf, traffic, deployment, options, words
):
    done = kerf("plan", "sizes", traffic, "-f", deployment, *options)
    assert done.code == 2
    assert_matches(words, done.err)


def test_a_missing_file_is_an_error_that_names_it(kerf, tmp_path):
    done = kerf("plan", "sizes", tmp_path / "absent", "--json")
    assert done.code == 2
    assert str(tmp_path / "absent") in done.json["error"]["message"]


def assert_matches(words, text):
    assert re.search(words, text), text
