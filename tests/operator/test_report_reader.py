"""Reading the reports of pods: directly, briefly, and not too often."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from tests.operator.builders import pod
from tests.operator.fakeserver import fake_server
from tests.patience import PATIENCE

from kerf_operator.render.deployment import PORT
from kerf_operator.report_reader import ReportReader
from kerf_operator.runtime_report import RuntimeReport, parse_report

REPORT = {"ready": True, "cache": {"key": "k", "result": "hit"}, "dispatch": {"FULL": 3}}


@pytest.fixture
def address() -> str:
    return f"127.{random.randrange(2, 250)}.{random.randrange(2, 250)}.9"


@pytest.fixture
def clock() -> list[float]:
    return [0.0]


@pytest.fixture
def reader(clock: list[float]) -> Iterator[ReportReader]:
    found = ReportReader(max_age=30, retry_age=3, timeout=PATIENCE, clock=lambda: clock[0])
    yield found
    found.close()


def at(address: str, **changes: Any) -> dict[str, Any]:
    found = pod("chat-1", **changes)
    found["status"]["podIP"] = address
    return found


def answer(status: int, document: Any) -> Any:
    return lambda request: (status, document)


def read(reader: ReportReader, address: str) -> RuntimeReport | str:
    return reader.read([at(address)])["chat-1"]


def test_only_ready_pods_are_asked(reader: ReportReader, address: str) -> None:
    with fake_server(answer(200, REPORT), address=address, port=PORT) as fake:
        assert reader.read([at(address, ready=False)]) == {}
    assert fake.requests == []


def test_a_report_is_reused_for_a_while(
    reader: ReportReader, clock: list[float], address: str
) -> None:
    with fake_server(answer(200, REPORT), address=address, port=PORT) as fake:
        first = read(reader, address)
        assert isinstance(first, RuntimeReport)
        assert first.dispatch == {"FULL": 3}
        clock[0] = 29
        read(reader, address)
        assert len(fake.requests) == 1
        clock[0] = 31
        read(reader, address)
        assert len(fake.requests) == 2


def test_a_restarted_container_is_asked_anew(reader: ReportReader, address: str) -> None:
    with fake_server(answer(200, REPORT), address=address, port=PORT) as fake:
        read(reader, address)
        reader.read([at(address, container={"restartCount": 1})])
        assert len(fake.requests) == 2


def test_a_pod_that_does_not_answer_is_asked_again_soon(
    reader: ReportReader, clock: list[float], address: str
) -> None:
    assert "refused" in str(read(reader, address))
    with fake_server(answer(200, REPORT), address=address, port=PORT):
        clock[0] = 2
        assert isinstance(read(reader, address), str)
        clock[0] = 4
        assert isinstance(read(reader, address), RuntimeReport)


@pytest.mark.parametrize(
    ("status", "document", "words"),
    [
        (500, {}, "answered 500"),
        (200, b"not JSON", "debug/graphs"),
        (200, [1], "unexpected report"),
        (200, {"cache": {"key": 7}}, "cache.key"),
    ],
)
def test_an_answer_that_is_no_report_is_said(
    reader: ReportReader, address: str, status: int, document: Any, words: str
) -> None:
    with fake_server(answer(status, document), address=address, port=PORT):
        assert words in str(read(reader, address))


def test_reports_of_other_versions_can_be_read() -> None:
    report = parse_report({"something new": 1, "cache": {"key": "k", "more": 2}, "graphs": None})
    assert report.cache.key == "k"
    assert report.graphs.captured is None
    assert report.compilations == 0
