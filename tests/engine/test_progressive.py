"""An engine with ``captureMode: progressive`` serves at once, and captures the rest beside its requests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.engine.engines import document, engine_args, generate, started

from kerf_runtime.compilation.counters import compilation_counter
from kerf_runtime.config import CUDAGraphMode
from kerf_runtime.cudagraph.descriptor import BatchDescriptor
from kerf_runtime.cudagraph.recorder import GraphRecorder
from kerf_runtime.engine import process
from kerf_runtime.engine.core import EngineCore
from kerf_runtime.engine.messages import AddRequest, Report, SamplingParams, Shutdown, Stats
from kerf_runtime.engine.process import EngineLoop
from kerf_runtime.errors import CaptureError

SIZES = [1, 2, 3, 4, 5, 6]
"""As many as sequences run at once: 3 and 5 are captured later."""


def core_with(path: Path, **compilation: Any) -> EngineCore:
    wanted = {
        "level": 0,
        "cudagraphMode": "FULL_DECODE_ONLY",
        "captureSizes": SIZES,
        "captureDelayMilliseconds": 60_000,  # however busy the machine is
        **compilation,
    }
    return started(replace(engine_args(path), document=document(compilation=wanted)))


def test_tokens_are_the_same_while_graphs_are_captured_between_the_steps(
    tiny_path: Path, tiny_prompts: list[list[int]]
) -> None:
    expected = generate(core_with(tiny_path), tiny_prompts)
    core = core_with(tiny_path, captureMode="progressive")
    assert core.captures_pending
    found: dict[str, list[int]] = {}
    for index, prompt in enumerate(tiny_prompts):
        params = SamplingParams(max_tokens=len(expected[index]), ignore_eos=True)
        core.add(AddRequest(str(index), prompt, params))
    with compilation_counter.expect(captures_after_startup=0):
        while core.has_work:
            for output in core.step():
                found.setdefault(output.request_id, []).extend(output.token_ids)
            if core.captures_pending:
                core.capture_next()
    assert [found[str(index)] for index in range(len(tiny_prompts))] == expected
    while core.captures_pending:
        core.capture_next()
    graphs = core.report()["graphs"]
    assert [graph["num_tokens"] for graph in graphs["descriptors"]] == SIZES[::-1]
    assert abs(graphs["estimate_error"]) < 0.1


class Inbox:
    """A socket with nothing to read until it is told to stop after ``polls`` questions."""

    def __init__(self, polls: int, last: bytes) -> None:
        self._polls, self._last = polls, last
        self.waits: list[int] = []

    def poll(self, timeout: int) -> bool:
        self.waits.append(timeout)
        self._polls -= 1
        return self._polls < 0

    def recv(self) -> bytes:
        return self._last


def test_an_idle_engine_captures_without_waiting_and_reports_how_far_it_is(tiny_path: Path) -> None:
    core = core_with(tiny_path, captureMode="progressive")
    pending = core.engine.graphs.pending
    assert pending == 2
    inbox = Inbox(6, msgspec.msgpack.encode(Shutdown()))
    sent: list[Any] = []
    EngineLoop(core, inbox, sent.append).run()  # type: ignore[arg-type]
    # A warm-up and a recording each, without waiting for requests; then it waits for them.
    assert inbox.waits == [0] * (2 * pending) + [250] * (7 - 2 * pending)
    reports = [message.report for message in sent if isinstance(message, Report)]
    assert reports[-1]["graphs"]["pending"] == []
    assert reports[-1]["graphs"]["captured"] == len(SIZES)
    hits = [len(m.values["graph_hits"]) for m in sent if isinstance(m, Stats)]
    assert hits[-1] == len(SIZES)


def test_a_graph_that_cannot_be_captured_beside_requests_is_told_and_the_engine_goes_on(
    tiny_path: Path, tiny_prompts: list[list[int]]
) -> None:
    expected = generate(core_with(tiny_path), tiny_prompts)
    core = core_with(tiny_path, captureMode="progressive")

    def fail(*_: object) -> None:
        raise CaptureError("the forward waits for a value")

    record = GraphRecorder.record
    inbox = Inbox(6, msgspec.msgpack.encode(Shutdown()))
    sent: list[Any] = []
    try:
        GraphRecorder.record = fail  # type: ignore[assignment]
        EngineLoop(core, inbox, sent.append).run()  # type: ignore[arg-type]
    finally:
        GraphRecorder.record = record  # type: ignore[method-assign]
    assert not core.captures_pending
    report = [message.report for message in sent if isinstance(message, Report)][-1]
    assert [graph["num_tokens"] for graph in report["graphs"]["dropped"]] == [5, 3]
    [change] = [c for c in report["effective"]["changes"] if c["field"] == "captureSizes"]
    assert (change["reason"], change["effective"]) == ("CaptureFailed", "4 graphs")
    assert report["effective"]["capture_sizes"] == (1, 2, 4, 6)
    assert "waits for a value; dropped FULL decode 3 5" in change["message"]
    assert generate(core, tiny_prompts) == expected


def test_steps_overlap_where_what_is_left_waits_for_an_idle_engine(
    tiny_path: Path, tiny_prompts: list[list[int]]
) -> None:
    wanted = {
        "level": 0,
        "cudagraphMode": "FULL_DECODE_ONLY",
        "captureSizes": SIZES,
        "captureMode": "progressive",
        "captureDelayMilliseconds": 60_000,
    }
    args = replace(engine_args(tiny_path), document=document(compilation=wanted))
    core = started(args, overlap=True)
    graphs = core.engine.graphs
    pending = graphs.pending
    for size in (6, 4):
        for mode in (CUDAGraphMode.NONE, CUDAGraphMode.FULL):
            graphs._pending.seconds.add((mode, BatchDescriptor(size, True)), 61.0)
    graphs._leave_pending()
    core.add(AddRequest("0", tiny_prompts[0], SamplingParams(max_tokens=8, ignore_eos=True)))
    while core.has_work:
        core.step()
        if core.has_work:
            assert not core.capture_next()
    assert core.stats()["overlapped_steps"] > 0
    assert graphs.pending == pending
    while core.captures_pending:
        assert core.capture_next()
    assert graphs.report()["captured"] == len(SIZES)
    assert graphs.report()["longest_delay_seconds"] == 0


class LeavesOneForLater:
    """A core whose last capture waits for an idle engine that never comes."""

    has_work, captures_pending = True, True

    def __init__(self) -> None:
        self.units = 1
        self.steps = 0

    def step(self) -> list[Any]:
        self.steps += 1
        return []

    def capture_next(self) -> bool:
        self.units -= 1
        return self.units >= 0

    def report(self) -> dict[str, Any]:
        return {}

    def stats(self) -> dict[str, Any]:
        return {}


def test_a_capture_that_waits_is_not_reported_over_and_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process, "_STATS_SECONDS", 0.0)
    core = LeavesOneForLater()
    sent: list[Any] = []
    inbox = Inbox(20, msgspec.msgpack.encode(Shutdown()))
    EngineLoop(core, inbox, sent.append).run()  # type: ignore[arg-type]
    assert core.steps == 20
    assert len([message for message in sent if isinstance(message, Report)]) == 1
