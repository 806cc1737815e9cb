"""What long commands show while they work."""

from __future__ import annotations

import io
import json
import re
from queue import SimpleQueue

import pytest
from tests.patience import PATIENCE

from kerf_runtime.cli import progress as module
from kerf_runtime.cli.output import echo_table, human_bytes, human_seconds
from kerf_runtime.cli.progress import JsonProgress, LiveProgress, PlainProgress, open_progress


def play(display):
    with display:
        display("weights", "a.safetensors", 0.0)
        display("weights", "b.safetensors", 0.5)
        display("compile", "piece 1 of 3", None)
        display("ready", "", 1.0)
        display.finish()


def test_plain_lines_say_each_phase_with_its_time(capsys):
    play(PlainProgress())
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[0] for line in lines] == ["weights", "compile"]


def test_a_long_phase_says_where_it_is_even_if_it_says_nothing_itself(monkeypatch):
    said: SimpleQueue[tuple[str, bool]] = SimpleQueue()
    monkeypatch.setattr(module, "_PLAIN_INTERVAL_SECONDS", 0.01)
    monkeypatch.setattr(module.click, "echo", lambda line, err=False: said.put((line, err)))
    with PlainProgress() as display:
        display("weights", "a.safetensors", None)
        display("weights", "b.safetensors", 0.5)
        while True:
            line, to_standard_error = said.get(timeout=PATIENCE)
            assert to_standard_error
            if re.fullmatch(r"  weights 50% b\.safetensors \(\d+ s so far\)", line):
                break


def test_json_lines_go_to_standard_output(capsys):
    play(JsonProgress())
    captured = capsys.readouterr()
    events = [json.loads(line) for line in captured.out.splitlines()]
    assert captured.err == ""
    events = [event for event in events if event["event"] != "progress"]
    assert [(e["event"], e["phase"]) for e in events[:3]] == [
        ("phase", "weights"),
        ("phase_done", "weights"),
        ("phase", "compile"),
    ]


def test_the_live_display_shows_each_phase_and_ends(capsys):
    play(LiveProgress())
    text = capsys.readouterr().err
    assert "weights" in text
    assert "compile" in text


@pytest.mark.parametrize(
    ("terminal", "as_json", "kind"),
    [(True, False, LiveProgress), (False, False, PlainProgress), (True, True, JsonProgress)],
)
def test_the_display_suits_where_it_goes(monkeypatch, terminal, as_json, kind):
    class Stream(io.StringIO):
        def isatty(self):
            return terminal

    monkeypatch.setattr("sys.stderr", Stream())
    assert isinstance(open_progress(as_json=as_json), kind)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 * 2**30, "5.0 GiB"), (2**41, "2.0 TiB")],
)
def test_bytes_for_people(count, text):
    assert human_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.00085, "850 us"), (0.0123, "12.3 ms"), (4.56, "4.56 s"), (123.4, "123 s")],
)
def test_seconds_for_people(seconds, text):
    assert human_seconds(seconds) == text


def test_a_table_is_aligned(capsys):
    echo_table(("A", "BB"), [("x", "1"), ("yyy", "22")], right=(1,))
    assert capsys.readouterr().out == "A    BB\n---  --\nx     1\nyyy  22\n"
